//! The settings of one machine as they are now, and who made each of them so.

use crate::catalogue::{Catalogue, Kind, Standard, Tunable};
use crate::configured::{Applies, Candidate, Configured, Form, Phase, Way, Written, pattern};
use crate::kernel;
use crate::reading::{self, Reading};
use crate::tree::{Facts, Tree, Unreadable};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Most devices of one kind that are looked at.
const DEVICES_MAX: usize = 128;
/// Most settings of all kinds together.
const SETTINGS_MAX: usize = 8192;

/// What a setting's file says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Found {
    /// This, in normal form.
    Value(String),
    /// This kernel or machine does not have it.
    Absent,
    /// This user may not read it.
    Denied,
    /// It is there and cannot be read now.
    Unreadable,
}

impl Found {
    /// The value, if there is one.
    pub fn value(&self) -> Option<&str> {
        match self {
            Self::Value(value) => Some(value),
            Self::Absent | Self::Denied | Self::Unreadable => None,
        }
    }
}

/// One setting of this machine.
#[derive(Clone, Debug)]
pub struct Setting<'c> {
    /// What the catalogue says.
    pub tunable: &'c Tunable,
    /// Name, with the device in it.
    pub name: String,
    /// File.
    pub path: String,
    /// What it says.
    pub found: Found,
    /// The file's text as it is.
    pub shown: String,
    /// What the kernel does by itself.
    pub standard: Standard,
}

impl Setting<'_> {
    /// Whether the value differs from the kernel's own; `None` when either is not known.
    pub fn is_changed(&self) -> Option<bool> {
        self.standard.holds(self.found.value()?).map(|holds| !holds)
    }
}

/// A change of a setting that the daemon saw somebody else make.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Change {
    /// When, in seconds since the epoch.
    pub at_unix: u64,
    /// The setting's name.
    pub name: String,
    /// Its file.
    pub path: String,
    /// Value before.
    pub from: String,
    /// Value after.
    pub to: String,
    /// Who wrote it, where the kernel could tell: `sysctl (pid 7)`.
    pub by: Option<String>,
    /// A command of homeostat wrote it (`homeostat tunable`).
    #[serde(default)]
    pub own_command: bool,
}

/// Most changes that are remembered.
pub const CHANGES_MAX: usize = 1000;

/// What the daemon keeps of its watch, for this boot.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Watched {
    /// Version of this shape.
    pub schema: u32,
    /// The boot that it is about.
    pub boot_id: String,
    /// Since when, in seconds since the epoch.
    pub since_unix: u64,
    /// Values when the watch began, by file.
    pub boot: BTreeMap<String, String>,
    /// What others changed since, oldest first.
    pub changes: Vec<Change>,
}

impl Watched {
    /// Adds a change; the oldest go when there are too many.
    pub fn add(&mut self, change: Change) {
        if self.changes.len() >= CHANGES_MAX {
            self.changes.remove(0);
        }
        self.changes.push(change);
    }

    /// The last change of a file.
    pub fn last(&self, path: &str) -> Option<&Change> {
        self.changes.iter().rev().find(|c| c.path == path)
    }

    /// The last change of a file that counts. What a command of homeostat put back (`tunable unset`) counts for nothing: the
    /// value has the origin again that it had before it was set.
    pub fn last_that_counts(&self, path: &str) -> Option<&Change> {
        let mut last = None;
        // What our commands found when they began to set it: the value, and the change that had made it so.
        let mut found: Option<(&str, Option<&Change>)> = None;
        for change in self.changes.iter().filter(|c| c.path == path) {
            if !change.own_command {
                (last, found) = (Some(change), None);
                continue;
            }
            match found {
                Some((value, before)) if value == change.to => (last, found) = (before, None),
                _ => {
                    found = found.or(Some((&change.from, last)));
                    last = Some(change);
                }
            }
        }
        last
    }
}

/// A change of homeostat's that is in force.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Own {
    /// Files that it set.
    pub path: String,
    /// The value that it set.
    pub value: String,
    /// Number of the action, or of the change by `homeostat tunable set`.
    pub action: u64,
    /// The experiment that it is part of, where that is known.
    pub experiment: Option<u64>,
    /// A person asked for it by `homeostat tunable set`: when, in seconds since the epoch.
    pub by_command: Option<u64>,
}

/// Who made a setting what it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// Nobody: the kernel does so by itself.
    Default,
    /// A line somewhere.
    Configured {
        /// Kind of place.
        way: Way,
        /// The place in words.
        place: String,
    },
    /// The kernel by itself, because of another setting or of the state of the machine.
    Kernel {
        /// Why, in words.
        why: String,
        /// The line that stands behind it, where somebody chose the other setting or a value that the kernel could not keep.
        place: Option<String>,
    },
    /// A person or program, while the machine ran.
    RunTime {
        /// When, in seconds since the epoch, if the daemon saw it.
        at_unix: Option<u64>,
        /// Who, if the kernel could tell.
        by: Option<String>,
    },
    /// A person, by `homeostat tunable set`.
    Command {
        /// Number of the change, for `unset`.
        change: u64,
        /// When, in seconds since the epoch.
        at_unix: u64,
    },
    /// homeostat, as an experiment or after one.
    Homeostat {
        /// Number of the action.
        action: u64,
        /// Number of the experiment.
        experiment: Option<u64>,
    },
    /// No line explains it, and the kernel's own value is not known.
    Unknown,
}

impl Origin {
    /// For filters and JSON.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Default => "default",
            Self::Kernel { .. } => "kernel",
            Self::Configured { way, .. } => way.name(),
            Self::RunTime { .. } => "run_time",
            Self::Command { .. } => "command",
            Self::Homeostat { .. } => "homeostat",
            Self::Unknown => "unknown",
        }
    }

    /// Whether somebody chose the value: what homeostat leaves alone.
    pub fn is_choice(&self) -> bool {
        matches!(
            self,
            Self::Configured { .. }
                | Self::Kernel { place: Some(_), .. }
                | Self::RunTime { .. }
                | Self::Command { .. }
        )
    }
}

/// A line about a setting, with what the kernel makes of it.
#[derive(Clone, Debug)]
pub struct Said<'h> {
    /// The line.
    pub written: &'h Written,
    /// Its position in the order of effect of all lines.
    pub position: usize,
    /// Whether it is carried out: never [`Applies::No`].
    pub applies: Applies,
    /// What the kernel makes of its value.
    pub reading: Reading,
    /// The value, for people.
    pub value: String,
}

impl Said<'_> {
    /// Whether it is carried out, and the kernel takes its value.
    fn is_sure(&self) -> bool {
        self.applies == Applies::Yes && !matches!(self.reading, Reading::Refused(_))
    }
}

/// What is known of a machine beside its files.
#[derive(Clone, Debug, Default)]
pub struct Known<'k> {
    /// The daemon's watch in this boot.
    pub watched: Option<&'k Watched>,
    /// homeostat's own changes in force.
    pub own: &'k [Own],
}

/// A machine: its files, its facts, what is written down.
pub struct Host<'t> {
    /// Its files.
    pub tree: &'t dyn Tree,
    /// What defaults depend on.
    pub facts: Facts,
    /// What is written down.
    pub configured: Configured,
}

impl<'t> Host<'t> {
    /// Reads facts and configuration.
    pub fn read(tree: &'t dyn Tree) -> Self {
        Self {
            tree,
            facts: Facts::read(tree),
            configured: Configured::read(tree),
        }
    }

    /// All settings that the catalogue knows, in its order. Those that every device has appear once for each device, and
    /// not at all where there is none.
    pub fn settings<'c>(&self, catalogue: &'c Catalogue) -> Vec<Setting<'c>> {
        let mut all = Vec::new();
        for tunable in &catalogue.tunables {
            for (name, path) in instances(tunable, self.tree) {
                if all.len() >= SETTINGS_MAX {
                    return all;
                }
                all.push(self.setting(tunable, name, path));
            }
        }
        all
    }

    /// The setting that has a file, by its path without any device in it.
    pub fn setting_at<'c>(&self, catalogue: &'c Catalogue, path: &str) -> Option<Setting<'c>> {
        let tunable = catalogue.tunables.iter().find(|t| t.path == path)?;
        Some(self.setting(tunable, tunable.name.clone(), path.to_owned()))
    }

    fn setting<'c>(&self, tunable: &'c Tunable, name: String, path: String) -> Setting<'c> {
        let (found, shown) = self.look(tunable, &path);
        Setting {
            standard: tunable.standard(&self.facts),
            tunable,
            name,
            path,
            found,
            shown,
        }
    }

    fn look(&self, tunable: &Tunable, path: &str) -> (Found, String) {
        if tunable.kind == Kind::Boot {
            // What is not given has the kernel's own value, if that is known.
            let given = self.configured.about(path, self.tree).pop().map(|c| c.written);
            let text = match (given, tunable.standard(&self.facts)) {
                (Some(written), _) if written.value.is_empty() => "given".to_owned(),
                (Some(written), _) => written.value.clone(),
                (None, Standard::Exact(value)) => value,
                (None, _) => return (Found::Absent, String::new()),
            };
            return (Found::Value(tunable.values.normal(&text)), text);
        }
        match self.tree.read(path) {
            Ok(bytes) => {
                let text = String::from_utf8_lossy(&bytes).into_owned();
                (Found::Value(tunable.values.normal(&text)), text)
            }
            Err(Unreadable::Absent) => (Found::Absent, String::new()),
            Err(Unreadable::Denied) => (Found::Denied, String::new()),
            Err(Unreadable::Failed) => (Found::Unreadable, String::new()),
        }
    }

    /// The lines about a setting that may have made its value, in order of effect. Of one kind of place a line that is sure
    /// takes the place of those before it; where it is not sure both are kept.
    pub fn lines_about(&self, setting: &Setting<'_>) -> Vec<Said<'_>> {
        let mut lines: Vec<Said<'_>> = Vec::new();
        if let Some(parameter) = &setting.tunable.parameter {
            let path = crate::configured::own_parameter(parameter);
            for candidate in self.configured.about(&path, self.tree) {
                let text = &candidate.written.value;
                let text = setting.tunable.parameter_values.get(text).unwrap_or(text).clone();
                lines.push(self.said(setting, candidate, &text));
            }
        }
        for candidate in self.configured.about(&setting.path, self.tree) {
            let text = candidate.written.value.clone();
            lines.push(self.said(setting, candidate, &text));
        }
        lines.sort_by_key(|s| s.position);
        let mut kept: Vec<Said<'_>> = Vec::new();
        for line in lines {
            if line.is_sure() {
                let kind = |s: &Said<'_>| (s.written.phase, s.written.way);
                kept.retain(|s| kind(s) != kind(&line));
            }
            kept.push(line);
        }
        kept
    }

    fn said<'h>(&self, setting: &Setting<'_>, candidate: Candidate<'h>, text: &str) -> Said<'h> {
        let written = candidate.written;
        let mut reading = reading::of(
            setting.tunable,
            &setting.path,
            written.form,
            text,
            &setting.shown,
            self.tree,
        );
        if let (Reading::Different(value), Some(now)) = (&reading, setting.found.value()) {
            if let Some(why) = kernel::refuses(&setting.path, value, now, self.tree) {
                reading = Reading::Refused(why);
            }
        }
        let plain = setting.tunable.values.normal(text);
        let value = match (written.form, &reading, setting.found.value()) {
            (Form::AtLeast, ..) => format!("at least {plain}"),
            (Form::AtMost, ..) => format!("at most {plain}"),
            (Form::Computed, ..) if plain.is_empty() => "something".to_owned(),
            (Form::Plain, Reading::Equal, Some(now)) => now.to_owned(),
            (Form::Plain, Reading::Different(value), _) if !value.is_empty() => value.clone(),
            (Form::Plain, ..) if setting.tunable.kind == Kind::Boot && text.is_empty() => "given".to_owned(),
            (Form::Plain | Form::FirstOffered | Form::Computed, ..) => plain,
        };
        Said {
            written,
            position: candidate.position,
            applies: candidate.applies,
            reading,
            value,
        }
    }

    /// Who made a setting what it is; `None` when it has no value here.
    pub fn origin(&self, setting: &Setting<'_>, known: &Known<'_>) -> Option<Origin> {
        let value = setting.found.value()?;
        let same = |other: &str| setting.tunable.values.normal(other) == value;
        if let Some(own) = known
            .own
            .iter()
            .rev()
            .find(|o| o.path == setting.path && same(&o.value))
        {
            return Some(match own.by_command {
                Some(at_unix) => Origin::Command {
                    change: own.action,
                    at_unix,
                },
                None => Origin::Homeostat {
                    action: own.action,
                    experiment: own.experiment,
                },
            });
        }
        let seen = known.watched.and_then(|w| w.last_that_counts(&setting.path));
        if let Some(change) = seen.filter(|c| same(&c.to)) {
            return Some(Origin::RunTime {
                at_unix: Some(change.at_unix),
                by: change.by.clone(),
            });
        }
        let said = self.lines_about(setting);
        // What is sure to be carried out explains a value better than what may be.
        let equal = |s: &&Said<'_>| s.reading == Reading::Equal;
        let explains = said
            .iter()
            .rev()
            .find(|s| equal(s) && s.applies == Applies::Yes)
            .or_else(|| said.iter().rev().find(equal));
        if let Some(line) = explains {
            return Some(Origin::Configured {
                way: line.written.way,
                place: line.written.place(),
            });
        }
        if let Some(made) = kernel::made(self, setting, &said) {
            return Some(Origin::Kernel {
                why: made.why,
                place: made.place,
            });
        }
        let may = said
            .iter()
            .rev()
            .find(|s| matches!(s.reading, Reading::Unknown(_)));
        Some(match (setting.is_changed(), may) {
            (Some(false), _) => Origin::Default,
            (_, Some(line)) => Origin::Configured {
                way: line.written.way,
                place: format!("{} may have set it", line.written.place()),
            },
            (Some(true), None) => Origin::RunTime {
                at_unix: None,
                by: None,
            },
            (None, None) => Origin::Unknown,
        })
    }

    /// The line that should be in force and is not, given the lines about the setting. The last phase in which a line is sure
    /// to be carried out decides; in it nothing fixes the order between kinds of places.
    pub fn not_in_force<'s, 'h>(&self, setting: &Setting<'_>, said: &'s [Said<'h>]) -> Option<&'s Said<'h>> {
        for phase in [
            Phase::Reapplied,
            Phase::Tuned,
            Phase::Boot,
            Phase::Kernel,
            Phase::Module,
        ] {
            let of = || said.iter().filter(|s| s.written.phase == phase);
            if of().any(|s| matches!(s.reading, Reading::Equal | Reading::Unknown(_))) {
                return None;
            }
            let last =
                of().rfind(|s| s.applies == Applies::Yes && matches!(s.reading, Reading::Different(_)));
            if let Some(line) = last {
                let explained = kernel::made(self, setting, said).is_some_and(|made| {
                    !made.falls_short && made.position.is_some_and(|at| at >= line.position)
                });
                return (!explained).then_some(line);
            }
        }
        None
    }
}

/// Names and files of a setting on a machine: one, or one for each device.
pub fn instances(tunable: &Tunable, tree: &dyn Tree) -> Vec<(String, String)> {
    if !tunable.path.contains('*') || tunable.kind == Kind::Boot {
        return vec![(tunable.name.clone(), tunable.path.clone())];
    }
    // What stands for the stars, directory by directory.
    let mut found: Vec<(String, Vec<String>)> = vec![(String::new(), Vec::new())];
    for component in tunable.path.split('/').skip(1) {
        if !component.contains('*') {
            for (path, _) in &mut found {
                path.push('/');
                path.push_str(component);
            }
            continue;
        }
        let (before, after) = component.split_once('*').unwrap_or((component, ""));
        let mut next = Vec::new();
        for (path, stars) in &found {
            let names = tree.names(path);
            let fitting = names
                .iter()
                .filter(|n| pattern::fits(component, n) && !is_passing(path, n))
                .take(DEVICES_MAX);
            for name in fitting {
                let star = name
                    .strip_prefix(before)
                    .and_then(|n| n.strip_suffix(after))
                    .unwrap_or(name);
                let mut stars = stars.clone();
                stars.push(star.to_owned());
                next.push((format!("{path}/{name}"), stars));
            }
        }
        found = next;
    }
    found
        .into_iter()
        // A directory may hold more than devices: only those count that have the file.
        .filter(|(path, _)| tree.read(path) != Err(Unreadable::Absent))
        .map(|(path, stars)| {
            let name = stars
                .iter()
                .fold(tunable.name.clone(), |name, star| name.replacen('*', star, 1));
            (name, path)
        })
        .take(DEVICES_MAX)
        .collect()
}

/// Devices that come and go with what uses them, and have no disk of their own.
fn is_passing(directory: &str, name: &str) -> bool {
    directory == "/sys/block" && (name.starts_with("loop") || name.starts_with("ram"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Files;

    fn catalogue() -> Catalogue {
        Catalogue::load().unwrap()
    }

    fn base() -> Files {
        Files::new(&[
            ("/proc/sys/kernel/osrelease", "6.12.0\n"),
            ("/proc/meminfo", "MemTotal: 16777216 kB\n"),
            ("/sys/devices/system/cpu/online", "0-7\n"),
            ("/sys/devices/system/node/online", "0-1\n"),
        ])
        .with_configuration("CONFIG_TRANSPARENT_HUGEPAGE_MADVISE=y\n")
    }

    /// Twenty-four settings, set in eleven ways.
    #[test]
    fn who_set_what_is_told_for_every_way_of_setting() {
        let mut tree = base();
        let cases: &[(&str, &str, &str, &str)] = &[
            // name, path, what the file says, what is expected
            (
                "vm.swappiness",
                "/proc/sys/vm/swappiness",
                "10",
                "/etc/sysctl.d/10-db.conf:2",
            ),
            (
                "vm.dirty_ratio",
                "/proc/sys/vm/dirty_ratio",
                "5",
                "/etc/sysctl.d/10-db.conf:3",
            ),
            (
                "net.core.somaxconn",
                "/proc/sys/net/core/somaxconn",
                "8192",
                "/usr/lib/sysctl.d/50-pkg.conf:1",
            ),
            (
                "net.ipv4.tcp_rmem",
                "/proc/sys/net/ipv4/tcp_rmem",
                "4096\t87380\t16777216",
                "/etc/sysctl.conf:1",
            ),
            (
                "fs.aio-max-nr",
                "/proc/sys/fs/aio-max-nr",
                "1048576",
                "/run/sysctl.d/20-x.conf:1",
            ),
            (
                "kernel.numa_balancing",
                "/proc/sys/kernel/numa_balancing",
                "0",
                "kernel command line numa_balancing=disable",
            ),
            (
                "vm.max_map_count",
                "/proc/sys/vm/max_map_count",
                "262144",
                "kernel command line sysctl.vm.max_map_count=262144",
            ),
            (
                "thp.enabled",
                "/sys/kernel/mm/transparent_hugepage/enabled",
                "[always] madvise never",
                "kernel command line transparent_hugepage=always",
            ),
            (
                "zswap.enabled",
                "/sys/module/zswap/parameters/enabled",
                "Y",
                "kernel command line zswap.enabled=1",
            ),
            (
                "module.kvm.halt_poll_ns",
                "/sys/module/kvm/parameters/halt_poll_ns",
                "0",
                "/etc/modprobe.d/kvm.conf:1",
            ),
            (
                "thp.defrag",
                "/sys/kernel/mm/transparent_hugepage/defrag",
                "always [defer] defer+madvise madvise never",
                "/etc/tmpfiles.d/thp.conf:1",
            ),
            (
                "khugepaged.scan_sleep_millisecs",
                "/sys/kernel/mm/transparent_hugepage/khugepaged/scan_sleep_millisecs",
                "1000",
                "/etc/tmpfiles.d/thp.conf:2",
            ),
            (
                "block.vda.scheduler",
                "/sys/block/vda/queue/scheduler",
                "[none] mq-deadline",
                "/etc/udev/rules.d/60-d.rules:1",
            ),
            (
                "block.vda.read_ahead_kb",
                "/sys/block/vda/queue/read_ahead_kb",
                "4096",
                "/etc/udev/rules.d/60-d.rules:1",
            ),
            (
                "link.eth0.tx_queue_len",
                "/sys/class/net/eth0/tx_queue_len",
                "5000",
                "/etc/udev/rules.d/60-d.rules:2",
            ),
            ("ksm.run", "/sys/kernel/mm/ksm/run", "1", "/etc/sysfs.conf:1"),
            (
                "ksm.sleep_millisecs",
                "/sys/kernel/mm/ksm/sleep_millisecs",
                "50",
                "/etc/systemd/system/ksm.service:2",
            ),
            (
                "ksm.pages_to_scan",
                "/sys/kernel/mm/ksm/pages_to_scan",
                "500",
                "/etc/rc.local:2",
            ),
            (
                "cpu.policy0.scaling_governor",
                "/sys/devices/system/cpu/cpufreq/policy0/scaling_governor",
                "performance",
                "tuned profile db (/etc/tuned/db/tuned.conf:2)",
            ),
            (
                "kernel.sched_autogroup_enabled",
                "/proc/sys/kernel/sched_autogroup_enabled",
                "0",
                "tuned profile db (/etc/tuned/db/tuned.conf:4)",
            ),
            ("boot.isolcpus", "", "", "kernel command line isolcpus=2-3"),
            (
                "vm.vfs_cache_pressure",
                "/proc/sys/vm/vfs_cache_pressure",
                "50",
                "run time at 1700000100 by sysctl (pid 7)",
            ),
            ("vm.page-cluster", "/proc/sys/vm/page-cluster", "0", "run time"),
            (
                "vm.watermark_scale_factor",
                "/proc/sys/vm/watermark_scale_factor",
                "100",
                "homeostat 5 in 3",
            ),
            (
                "vm.stat_interval",
                "/proc/sys/vm/stat_interval",
                "10",
                "command 2 at 1700000000",
            ),
            (
                "vm.dirty_expire_centisecs",
                "/proc/sys/vm/dirty_expire_centisecs",
                "3000",
                "default",
            ),
            ("vm.lowmem", "", "", ""),
        ];
        for (_, path, value, _) in cases.iter().filter(|c| !c.1.is_empty()) {
            tree.set(path, &format!("{value}\n"));
        }
        for (path, text) in [
            (
                "/proc/cmdline",
                "numa_balancing=disable sysctl.vm.max_map_count=262144 transparent_hugepage=always zswap.enabled=1 isolcpus=2-3\n",
            ),
            (
                "/etc/sysctl.d/10-db.conf",
                "# database\nvm.swappiness = 10\nvm/dirty_ratio=5\n",
            ),
            ("/usr/lib/sysctl.d/50-pkg.conf", "net.core.somaxconn=8192\n"),
            ("/etc/sysctl.conf", "net.ipv4.tcp_rmem = 4096 87380 16777216\n"),
            ("/run/sysctl.d/20-x.conf", "fs.aio-max-nr=1048576\n"),
            ("/etc/modprobe.d/kvm.conf", "options kvm halt_poll_ns=0\n"),
            (
                "/etc/tmpfiles.d/thp.conf",
                "w /sys/kernel/mm/transparent_hugepage/defrag - - - - defer\nw! /sys/kernel/mm/transparent_hugepage/khugepaged/scan_sleep_millisecs - - - - 1000\n",
            ),
            (
                "/etc/udev/rules.d/60-d.rules",
                "SUBSYSTEM==\"block\", KERNEL==\"vd*\", ATTR{queue/scheduler}=\"none\", ATTR{queue/read_ahead_kb}=\"4096\"\nSUBSYSTEM==\"net\", ATTR{tx_queue_len}=\"5000\"\n",
            ),
            ("/etc/sysfs.conf", "kernel/mm/ksm/run = 1\n"),
            (
                "/etc/systemd/system/ksm.service",
                "[Service]\nExecStart=/bin/sh -c 'echo 50 > /sys/kernel/mm/ksm/sleep_millisecs'\n",
            ),
            (
                "/etc/rc.local",
                "#!/bin/sh\necho 500 > /sys/kernel/mm/ksm/pages_to_scan\n",
            ),
            ("/etc/tuned/active_profile", "db\n"),
            (
                "/etc/tuned/db/tuned.conf",
                "[cpu]\ngovernor=performance\n[sysctl]\nkernel.sched_autogroup_enabled=0\n",
            ),
        ] {
            tree.set(path, text);
        }
        let mut watched = Watched::default();
        for (from, to) in [("100", "80"), ("80", "50")] {
            watched.add(Change {
                at_unix: 1_700_000_100,
                name: "vm.vfs_cache_pressure".into(),
                path: "/proc/sys/vm/vfs_cache_pressure".into(),
                from: from.into(),
                to: to.into(),
                by: Some("sysctl (pid 7)".into()),
                own_command: false,
            });
        }
        let own = |path: &str, value: &str, action, experiment, by_command| Own {
            path: path.to_owned(),
            value: value.to_owned(),
            action,
            experiment,
            by_command,
        };
        let own = [
            own("/proc/sys/vm/watermark_scale_factor", "100", 5, Some(3), None),
            own("/proc/sys/vm/stat_interval", "10", 2, None, Some(1_700_000_000)),
            // Overwritten since: what is in force is somebody else's.
            own("/proc/sys/vm/swappiness", "1", 1, None, None),
        ];
        let known = Known {
            watched: Some(&watched),
            own: &own,
        };
        let catalogue = catalogue();
        let host = Host::read(&tree);
        let settings = host.settings(&catalogue);
        let mut ways = std::collections::BTreeSet::new();
        let mut checked = 0;
        for (name, _, _, expected) in cases.iter().filter(|c| !c.3.is_empty()) {
            let setting = settings.iter().find(|s| s.name == *name).expect(name);
            let origin = host.origin(setting, &known).expect(name);
            ways.insert(origin.kind());
            let text = match origin {
                Origin::Default => "default".to_owned(),
                Origin::Kernel { why, .. } => why,
                Origin::Configured { place, .. } => place,
                Origin::RunTime {
                    at_unix: Some(at),
                    by: Some(by),
                } => format!("run time at {at} by {by}"),
                Origin::RunTime { .. } => "run time".to_owned(),
                Origin::Command { change, at_unix } => format!("command {change} at {at_unix}"),
                Origin::Homeostat { action, experiment } => {
                    format!("homeostat {action} in {}", experiment.unwrap_or_default())
                }
                Origin::Unknown => "unknown".to_owned(),
            };
            assert_eq!(text, *expected, "{name}");
            checked += 1;
        }
        assert!(checked >= 20 && ways.len() >= 10, "{checked} {ways:?}");
    }

    #[test]
    fn a_line_that_is_not_in_force_does_not_explain_the_value() {
        let mut tree = base();
        tree.set("/proc/sys/vm/swappiness", "60\n");
        tree.set("/etc/sysctl.d/a.conf", "vm.swappiness=10\n");
        let catalogue = catalogue();
        let host = Host::read(&tree);
        let settings = host.settings(&catalogue);
        let setting = settings.iter().find(|s| s.name == "vm.swappiness").unwrap();
        assert_eq!(host.origin(setting, &Known::default()), Some(Origin::Default));
        assert_eq!(host.lines_about(setting).len(), 1);
        let absent = settings.iter().find(|s| s.name == "vm.dirty_ratio").unwrap();
        assert_eq!(absent.found, Found::Absent);
        assert_eq!(host.origin(absent, &Known::default()), None);
    }

    #[test]
    fn every_device_has_settings_of_its_own_and_passing_ones_are_left_out() {
        let mut tree = base();
        for (path, value) in [
            ("/sys/block/vda/queue/scheduler", "[none]"),
            ("/sys/block/loop0/queue/scheduler", "[none]"),
            ("/sys/block/sdb/queue/nr_requests", "64"),
            ("/sys/class/net/eth0/queues/rx-0/rps_cpus", "0"),
            ("/sys/class/net/eth0/queues/rx-1/rps_cpus", "0"),
            (
                "/sys/kernel/mm/transparent_hugepage/hugepages-64kB/enabled",
                "always [never]",
            ),
        ] {
            tree.set(path, value);
        }
        let catalogue = catalogue();
        let names: Vec<String> = Host::read(&tree)
            .settings(&catalogue)
            .into_iter()
            .filter(|s| s.found.value().is_some() && s.tunable.name.contains('*'))
            .map(|s| s.name)
            .collect();
        assert_eq!(
            names,
            [
                "thp.hugepages-64kB.enabled",
                "block.vda.scheduler",
                "block.sdb.nr_requests",
                "link.eth0.rx-0.rps_cpus",
                "link.eth0.rx-1.rps_cpus",
            ]
        );
    }

    #[test]
    fn what_is_remembered_of_changes_is_bounded() {
        let mut watched = Watched::default();
        for at in 0..CHANGES_MAX as u64 + 5 {
            watched.add(Change {
                at_unix: at,
                name: String::new(),
                path: "/x".into(),
                from: String::new(),
                to: String::new(),
                by: None,
                own_command: false,
            });
        }
        assert_eq!(watched.changes.len(), CHANGES_MAX);
        assert_eq!(watched.last("/x").unwrap().at_unix, CHANGES_MAX as u64 + 4);
    }

    #[test]
    fn what_a_command_of_homeostat_put_back_has_the_origin_that_it_had() {
        let seen_after = |changes: &[(&str, &str, &str)]| {
            let mut watched = Watched::default();
            for (from, to, by) in changes {
                watched.add(Change {
                    at_unix: 1,
                    name: "x".into(),
                    path: "/x".into(),
                    from: (*from).into(),
                    to: (*to).into(),
                    by: Some((*by).into()),
                    own_command: by.starts_with("homeostat"),
                });
            }
            watched.last_that_counts("/x").cloned().and_then(|c| c.by)
        };
        let (set, unset, person) = (
            "homeostat (pid 9, user 0)",
            "homeostat (pid 10, user 0)",
            "sysctl (pid 7, user 0)",
        );
        let by = |who: &str| Some(who.to_owned());
        assert_eq!(seen_after(&[("10", "7", set), ("7", "10", unset)]), None);
        assert_eq!(
            seen_after(&[("10", "7", set), ("7", "8", set), ("8", "10", unset)]),
            None
        );
        assert_eq!(
            seen_after(&[("10", "12", person), ("12", "7", set), ("7", "12", unset)]),
            by(person)
        );
        assert_eq!(
            seen_after(&[("10", "7", set), ("7", "10", unset), ("10", "12", person)]),
            by(person)
        );
        // What was set and not put back is a choice, also where its journal is not at hand; and so is a person's write
        // that was seen as ours, because it came right after.
        assert_eq!(seen_after(&[("10", "7", set)]), by(set));
        assert_eq!(seen_after(&[("10", "12", set)]), by(set));
        // A person's write in between is nothing to be put back.
        assert_eq!(
            seen_after(&[("10", "7", set), ("7", "9", person), ("9", "10", unset)]),
            by(unset)
        );
    }
}
