//! Old tuning that this kernel ignores, or that works against the machine it is on.

use crate::catalogue::{Against, Catalogue, Gone};
use crate::configured::{Way, Written, pattern};
use crate::expression::{self, Names};
use crate::settings::{Host, Known, Setting};
use crate::tree::{Release, Unreadable};
use crate::values::Values;

/// What is wrong with a setting.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Trouble {
    /// It is written down, and this kernel does not have it or does not read it.
    Ignored,
    /// It is written down, and something else is in force.
    NotInForce,
    /// It works against the machine.
    WorksAgainst,
}

impl Trouble {
    /// Its name in JSON.
    pub fn name(self) -> &'static str {
        match self {
            Self::Ignored => "ignored",
            Self::NotInForce => "not_in_force",
            Self::WorksAgainst => "works_against",
        }
    }
}

/// One thing that is wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// What kind.
    pub trouble: Trouble,
    /// The setting.
    pub name: String,
    /// Where it is written, or who set it.
    pub place: String,
    /// What is wrong, and what to do.
    pub text: String,
}

/// The name of a sysctl by its file.
fn sysctl_name(path: &str) -> Option<String> {
    path.strip_prefix("/proc/sys/").map(|p| p.replace('/', "."))
}

/// Whether a kernel of this release no longer has the setting, or no longer reads it.
pub fn gone<'c>(catalogue: &'c Catalogue, name: &str, release: Release) -> Option<&'c Gone> {
    catalogue
        .gone
        .iter()
        .find(|g| g.name == name && release >= g.since)
}

/// The rule that a value breaks; those about all devices hold for each.
pub fn against<'c>(
    catalogue: &'c Catalogue,
    name: &str,
    value: &str,
    host: &Host<'_>,
) -> Option<&'c Against> {
    catalogue
        .against
        .iter()
        .filter(|rule| pattern::fits(&rule.name, name))
        .find(|rule| {
            if rule.when.is_empty() {
                return rule.words.iter().any(|w| w == value);
            }
            let names = Names {
                facts: &host.facts,
                value: Values::number(value),
            };
            expression::evaluate(&rule.when, &names).is_ok_and(|v| v != 0.0)
        })
}

/// Everything stale on a machine.
pub fn find(
    catalogue: &Catalogue,
    host: &Host<'_>,
    settings: &[Setting<'_>],
    known: &Known<'_>,
) -> Vec<Finding> {
    let mut found = Vec::new();
    for written in host.configured.all() {
        found.extend(ignored(catalogue, host, written));
    }
    for setting in settings {
        let Some(value) = setting.found.value() else {
            continue;
        };
        let origin = host.origin(setting, known);
        if let Some(rule) = against(catalogue, &setting.name, value, host)
            // What the kernel does by itself is nobody's stale tuning.
            && setting.is_changed() != Some(false)
        {
            found.push(Finding {
                trouble: Trouble::WorksAgainst,
                name: setting.name.clone(),
                place: format!("= {value}"),
                text: rule.text.clone(),
            });
        }
        // A line that wins in the last kind of place that speaks of the setting should be in force.
        if let Some((written, means)) = host.lines_about(setting).last()
            && means != value
            && !origin
                .as_ref()
                .is_some_and(|o| matches!(o, crate::settings::Origin::Configured { .. }))
            && is_certain(written)
        {
            found.push(Finding {
                trouble: Trouble::NotInForce,
                name: setting.name.clone(),
                place: written.place(),
                text: format!("says {means}, but {value} is in force"),
            });
        }
    }
    found.sort_by(|a, b| (a.trouble, &a.name, &a.place).cmp(&(b.trouble, &b.name, &b.place)));
    found.dedup();
    found
}

/// Whether a line can be known to have been carried out: rules have conditions that are not seen, units may be off, and
/// tuned may compute the value.
fn is_certain(written: &Written) -> bool {
    match written.way {
        Way::SysctlFile | Way::Tmpfiles | Way::KernelCommandLine | Way::SysfsFile => true,
        Way::TunedProfile | Way::TunedSysctl => !written.value.contains('$'),
        Way::UdevRule | Way::ModuleOptions | Way::SystemdUnit | Way::BootScript => false,
    }
}

fn ignored(catalogue: &Catalogue, host: &Host<'_>, written: &Written) -> Option<Finding> {
    let finding = |name: String, text: String| {
        Some(Finding {
            trouble: Trouble::Ignored,
            name,
            place: written.place(),
            text,
        })
    };
    let name = match (written.path.strip_prefix("cmdline:"), sysctl_name(&written.path)) {
        (Some(parameter), _) => format!("boot.{parameter}"),
        (None, Some(name)) => name,
        (None, None) => return None,
    };
    if let Some(gone) = gone(catalogue, &name, host.facts.release) {
        let what = if gone.stays {
            "has no effect from"
        } else {
            "is not there from"
        };
        return finding(name, format!("{what} Linux {} on: {}", gone.since, gone.text));
    }
    // Only what has a file can be missing; and a pattern may fit nothing today.
    if written.path.starts_with("cmdline:") || pattern::is_pattern(&written.path) {
        return None;
    }
    let is_of_device = ["/conf/", "/neigh/"]
        .iter()
        .any(|part| written.path.contains(part));
    if host.tree.read(&written.path) != Err(Unreadable::Absent) || is_of_device {
        return None;
    }
    let newer = catalogue
        .tunables
        .iter()
        .find(|t| t.path == written.path)
        .filter(|t| t.since > host.facts.release);
    let text = match newer {
        Some(t) => format!("this kernel is too old: it came with Linux {}", t.since),
        None => "this kernel has no such setting: a module that is not loaded, another name, or another system's kernel"
            .to_owned(),
    };
    finding(name, text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Files;

    fn findings(list: &[(&str, &str)]) -> Vec<(Trouble, String, String)> {
        let mut all = vec![
            ("/proc/sys/kernel/osrelease", "6.12.0\n"),
            ("/proc/meminfo", "MemTotal: 33554432 kB\n"),
            ("/sys/devices/system/cpu/online", "0-7\n"),
            ("/sys/devices/system/node/online", "0\n"),
        ];
        all.extend(list);
        let tree = Files::new(&all);
        let catalogue = Catalogue::load().unwrap();
        let host = Host::read(&tree);
        let settings = host.settings(&catalogue);
        find(&catalogue, &host, &settings, &Known::default())
            .into_iter()
            .map(|f| (f.trouble, f.name, f.place))
            .collect()
    }

    #[test]
    fn what_this_kernel_ignores_is_found() {
        let found = findings(&[
            (
                "/etc/sysctl.d/old.conf",
                "kernel.sched_min_granularity_ns=10000000\nnet.ipv4.tcp_tw_recycle=1\nnet.ipv4.tcp_low_latency=1\n\
                 vm.no_such=1\nvm.swappiness=60\nnet.ipv4.conf.eth7.rp_filter=1\nvm.vfs_cache_pressure_denom=200\n",
            ),
            ("/proc/sys/vm/swappiness", "60\n"),
            ("/proc/sys/net/ipv4/tcp_low_latency", "1\n"),
            ("/proc/cmdline", "elevator=deadline quiet\n"),
        ]);
        let names: Vec<&str> = found
            .iter()
            .filter(|f| f.0 == Trouble::Ignored)
            .map(|f| f.1.as_str())
            .collect();
        assert_eq!(
            names,
            [
                "boot.elevator",
                "kernel.sched_min_granularity_ns",
                "net.ipv4.tcp_low_latency",
                "net.ipv4.tcp_tw_recycle",
                "vm.no_such",
                "vm.vfs_cache_pressure_denom",
            ]
        );
    }

    #[test]
    fn what_works_against_the_machine_is_found_and_what_is_not_in_force() {
        let found = findings(&[
            ("/proc/sys/vm/zone_reclaim_mode", "1\n"),
            ("/proc/sys/net/ipv4/tcp_window_scaling", "0\n"),
            ("/proc/sys/vm/dirty_ratio", "60\n"),
            ("/proc/sys/vm/overcommit_memory", "0\n"),
            ("/etc/sysctl.d/a.conf", "vm.overcommit_memory=1\n"),
            (
                "/sys/devices/system/clocksource/clocksource0/current_clocksource",
                "hpet\n",
            ),
        ]);
        let of = |trouble: Trouble| -> Vec<&str> {
            found
                .iter()
                .filter(|f| f.0 == trouble)
                .map(|f| f.1.as_str())
                .collect()
        };
        assert_eq!(
            of(Trouble::WorksAgainst),
            [
                "cpu.clocksource",
                "net.ipv4.tcp_window_scaling",
                "vm.dirty_ratio",
                "vm.zone_reclaim_mode"
            ]
        );
        assert_eq!(of(Trouble::NotInForce), ["vm.overcommit_memory"]);
    }

    #[test]
    fn a_sound_machine_has_no_findings() {
        assert_eq!(
            findings(&[
                ("/proc/sys/vm/swappiness", "10\n"),
                ("/etc/sysctl.d/a.conf", "vm.swappiness = 10\n"),
                ("/proc/sys/net/core/somaxconn", "4096\n"),
            ]),
            []
        );
    }
}
