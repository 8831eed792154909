//! Automatic NUMA balancing: its setting, who made it, and its work on the whole host in the last minutes.
//!
//! Sources: `/proc/sys/kernel/numa_balancing`, `/proc/vmstat` (`numa_hint_faults`, `numa_hint_faults_local`,
//! `numa_pages_migrated`), the kernel's configuration (`CONFIG_NUMA_BALANCING_DEFAULT_ENABLED`), and files of
//! administrators and tuned. Read only with the scans: the kernel scans each program only every second to minute.

use crate::settings::{self, Holder};
use homeostat_kernel::bytes::{lines, number, words};
use homeostat_kernel::{Root, files, kernel_config};
use homeostat_model::{KernelBalancing, Nanoseconds};
use std::collections::VecDeque;

/// The setting.
pub const FILE: &str = "/proc/sys/kernel/numa_balancing";

/// The place where somebody configured the value.
pub fn configured(root: &Root) -> Option<String> {
    settings::configured(root, FILE)
}

/// Length of the past that counts.
const WINDOW: Nanoseconds = Nanoseconds::from_secs(300);
/// Most samples kept: the window holds only a few.
const LOOKS_MAX: usize = 64;
/// Least distance between kept samples, except the newest.
const LOOK_EVERY: Nanoseconds = Nanoseconds::from_secs(5);

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Counters {
    cpu_busy: Nanoseconds,
    hint_faults: u64,
    hint_faults_local: u64,
    pages_migrated: u64,
}

impl Counters {
    /// From `/proc/vmstat`; `None` when the kernel does not count hinting faults.
    fn parse(vmstat: &[u8], cpu_busy: Nanoseconds) -> Option<Self> {
        let mut out = Self {
            cpu_busy,
            ..Self::default()
        };
        let mut counts = false;
        for line in lines(vmstat) {
            let mut parts = words(line);
            let (Some(name), Some(value)) = (parts.next(), parts.next().and_then(number)) else {
                continue;
            };
            match name {
                b"numa_hint_faults" => {
                    counts = true;
                    out.hint_faults = value;
                }
                b"numa_hint_faults_local" => out.hint_faults_local = value,
                b"numa_pages_migrated" => out.pages_migrated = value,
                _ => {}
            }
        }
        counts.then_some(out)
    }
}

/// Samples automatic NUMA balancing.
#[derive(Debug)]
pub struct BalancingWatch {
    root: Root,
    /// The kernel's own value on a machine of several nodes; read once. The inner `None`: not known.
    built_in: Option<Option<u8>>,
    value: Option<u8>,
    /// Samples with the present setting, oldest first.
    looks: VecDeque<(Nanoseconds, Counters)>,
}

impl BalancingWatch {
    /// A sensor without samples.
    pub fn new(root: Root) -> Self {
        Self {
            root,
            built_in: None,
            value: None,
            looks: VecDeque::new(),
        }
    }

    /// Its setting and its work. `cpu_busy`: busy time of the host since boot. `holder`: the effector's knowledge of
    /// who set it. `None` if the kernel lacks it, or there is one node.
    pub fn look(
        &mut self,
        now: Nanoseconds,
        cpu_busy: Nanoseconds,
        holder: Holder,
    ) -> Option<KernelBalancing> {
        if files::numbered(&self.root, "/sys/devices/system/node", "node").len() < 2 {
            return None;
        }
        let value: u8 = files::text(&self.root, FILE)?.parse().ok()?;
        let vmstat = files::bytes(&self.root, "/proc/vmstat", files::SMALL_FILE_MAX)?;
        let counters = Counters::parse(&vmstat, cpu_busy)?;
        if self.value.replace(value) != Some(value) {
            self.looks.clear();
        }
        while self.looks.front().is_some_and(|(at, _)| now - *at > WINDOW) {
            self.looks.pop_front();
        }
        // Of several samples within a few seconds, one is kept besides the newest.
        let mut newest = self.looks.iter().rev().map(|(at, _)| *at);
        if let (Some(last), Some(before)) = (newest.next(), newest.next()) {
            if last - before < LOOK_EVERY {
                self.looks.pop_back();
            }
        }
        if self.looks.len() == LOOKS_MAX {
            self.looks.pop_front();
        }
        self.looks.push_back((now, counters));
        let (then, before) = self.looks.front().copied().unwrap_or((now, counters));
        let since = |of: fn(&Counters) -> u64| of(&counters).saturating_sub(of(&before));
        Some(KernelBalancing {
            value,
            set_by: self.set_by(value, holder),
            ours: holder == Holder::Homeostat,
            window: now - then,
            cpu_busy: counters.cpu_busy - before.cpu_busy,
            hint_faults: since(|c| c.hint_faults),
            hint_faults_local: since(|c| c.hint_faults_local),
            pages_migrated: since(|c| c.pages_migrated),
        })
    }

    fn set_by(&mut self, value: u8, holder: Holder) -> Option<String> {
        if let Some(place) = configured(&self.root) {
            return Some(place);
        }
        match holder {
            Holder::Homeostat => return None,
            Holder::SomebodyElse => return Some("at run time".to_owned()),
            Holder::Unknown => {}
        }
        let root = &self.root;
        let built_in = *self.built_in.get_or_insert_with(|| built_in(root));
        // If the kernel's configuration is hidden, on: its default unless configured otherwise.
        (value != built_in.unwrap_or(1)).then(|| "at run time".to_owned())
    }
}

/// The kernel's own value on several nodes (`init/Kconfig`, `check_numabalancing_enable`).
fn built_in(root: &Root) -> Option<u8> {
    let config = kernel_config::read(root)?;
    let on = lines(&config).any(|l| l == b"CONFIG_NUMA_BALANCING_DEFAULT_ENABLED=y");
    Some(u8::from(on))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    struct Host {
        tree: tempfile::TempDir,
        watch: BalancingWatch,
    }

    impl Host {
        fn new(nodes: u32, value: &str) -> Self {
            let tree = tempfile::tempdir().unwrap();
            let watch = BalancingWatch::new(Root::new(tree.path()));
            let host = Self { tree, watch };
            for node in 0..nodes {
                host.write(&format!("sys/devices/system/node/node{node}/cpulist"), "0\n");
            }
            host.write("proc/sys/kernel/numa_balancing", value);
            host.count(0, 0, 0);
            host
        }

        fn write(&self, path: &str, text: &str) {
            let file = self.tree.path().join(path);
            std::fs::create_dir_all(file.parent().unwrap()).unwrap();
            std::fs::write(file, text).unwrap();
        }

        fn count(&self, faults: u64, local: u64, migrated: u64) {
            let text = format!(
                "pgfault 9\nnuma_hint_faults {faults}\nnuma_hint_faults_local {local}\nnuma_pages_migrated {migrated}\n"
            );
            self.write("proc/vmstat", &text);
        }

        fn look(&mut self, second: u64) -> Option<KernelBalancing> {
            let at = Nanoseconds::from_secs(second);
            self.watch.look(at, at * 2, Holder::Unknown)
        }
    }

    #[test]
    fn what_it_did_is_counted_over_the_last_minutes() {
        let mut host = Host::new(2, "1\n");
        host.count(100, 50, 7);
        let first = host.look(10).unwrap();
        assert_eq!((first.window, first.hint_faults), (Nanoseconds::ZERO, 0));
        host.count(1100, 950, 10);
        let later = host.look(70).unwrap();
        assert_eq!(later.window, Nanoseconds::from_secs(60));
        assert_eq!(later.cpu_busy, Nanoseconds::from_secs(120));
        assert_eq!(
            (later.hint_faults, later.hint_faults_local, later.pages_migrated),
            (1000, 900, 3)
        );
        // What is older than the window is forgotten.
        let last = host.look(365).unwrap();
        assert_eq!((last.window, last.hint_faults), (Nanoseconds::from_secs(295), 0));
        // However often it is looked at.
        for at in 366..2000 {
            host.look(at).unwrap();
        }
        assert!(host.watch.looks.len() <= LOOKS_MAX);
        let last = host.look(2000).unwrap();
        assert!(last.window >= Nanoseconds::from_secs(280), "{last:?}");
    }

    #[test]
    fn another_setting_begins_another_window() {
        let mut host = Host::new(2, "1\n");
        host.look(10);
        host.look(70);
        host.write("proc/sys/kernel/numa_balancing", "0\n");
        assert_eq!(host.look(80).unwrap().window, Nanoseconds::ZERO);
        assert_eq!(host.look(90).unwrap().window, Nanoseconds::from_secs(10));
    }

    #[test]
    fn who_set_it_is_told_unless_it_was_the_kernel_or_we() {
        const RELEASE: (&str, &str) = ("proc/sys/kernel/osrelease", "6.1.0\n");
        let on = ("boot/config-6.1.0", "CONFIG_NUMA_BALANCING_DEFAULT_ENABLED=y\n");
        let off = (
            "boot/config-6.1.0",
            "# CONFIG_NUMA_BALANCING_DEFAULT_ENABLED is not set\n",
        );
        let run_time = Some("at run time");
        for (value, config, expected) in [
            ("1", Some(on), None),
            ("0", Some(on), run_time),
            ("2", Some(on), run_time),
            ("0", Some(off), None),
            ("1", Some(off), run_time),
            ("1", None, None),
            ("0", None, run_time),
        ] {
            let mut host = Host::new(2, value);
            host.write(RELEASE.0, RELEASE.1);
            if let Some((path, text)) = config {
                host.write(path, text);
            }
            let found = host.look(1).unwrap();
            assert_eq!(found.set_by.as_deref(), expected, "{value} {config:?}");
            let at = Nanoseconds::from_secs(2);
            let ours = host.watch.look(at, at, Holder::Homeostat).unwrap();
            assert_eq!((ours.set_by, ours.ours), (None, true), "{value} {config:?}");
            // Also who writes what the kernel would have set has chosen it.
            let theirs = host.watch.look(at, at, Holder::SomebodyElse).unwrap();
            assert_eq!(theirs.set_by.as_deref(), run_time, "{value} {config:?}");
        }
        let mut host = Host::new(2, "0");
        host.write("etc/sysctl.d/9.conf", "kernel.numa_balancing = 0\n");
        let place = host.look(1).unwrap().set_by;
        assert_eq!(place.as_deref(), Some("/etc/sysctl.d/9.conf:1"));
        let at = Nanoseconds::from_secs(2);
        let ours = host.watch.look(at, at, Holder::Homeostat).unwrap();
        assert!(ours.set_by.is_some(), "configured meanwhile");
        let mut host = Host::new(2, "0");
        host.write("etc/tuned/active_profile", "sap-hana\n");
        host.write(
            "usr/lib/tuned/sap-hana/tuned.conf",
            "[sysctl]\nkernel.numa_balancing = 0\n",
        );
        let place = host.look(1).unwrap().set_by.unwrap();
        assert!(place.contains("tuned profile sap-hana"), "{place}");
    }

    #[test]
    fn where_there_is_nothing_to_balance_nothing_is_told() {
        assert_eq!(Host::new(1, "1").look(1), None);
        let mut host = Host::new(2, "1");
        host.write("proc/vmstat", "pgfault 1\n");
        assert_eq!(host.look(1), None);
        let mut host = Host::new(2, "rubbish");
        assert_eq!(host.look(1), None);
    }

    proptest! {
        #[test]
        fn never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let _ = Counters::parse(&bytes, Nanoseconds::ZERO);
        }
    }
}
