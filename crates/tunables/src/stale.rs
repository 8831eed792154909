//! Old tuning that this kernel ignores, or that works against the machine it is on.

use crate::catalogue::{Against, Catalogue, Gone};
use crate::configured::{Applies, Phase, UNREAD_SYSCTL_CONF, Way, Written, pattern};
use crate::expression::{self, Names};
use crate::kernel;
use crate::reading::Reading;
use crate::settings::{Host, Said, Setting};
use crate::tree::{Release, Tree, Unreadable};
use crate::values::Values;
use homeostat_model::words;

/// Most devices of one kind that a rule is looked up for.
const DEVICES_MAX: usize = 128;

words!(
    /// What is wrong with a setting.
    Trouble {
        /// It is written down, and this kernel does not have it or does not read it.
        Ignored = "ignored",
        /// It is written down, and something else is in force.
        NotInForce = "not_in_force",
        /// Two places say different values, and nothing fixes which of them comes last.
        Conflict = "conflict",
        /// It works against the machine.
        WorksAgainst = "works_against",
    }
);

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
pub fn find(catalogue: &Catalogue, host: &Host<'_>, settings: &[Setting<'_>]) -> Vec<Finding> {
    let mut found = Vec::new();
    for written in host.configured.all() {
        found.extend(ignored(catalogue, host, written));
    }
    for setting in settings {
        let Some(value) = setting.found.value() else {
            continue;
        };
        if let Some(rule) = against(catalogue, &setting.name, value, host) {
            // What the kernel does by itself is nobody's stale tuning.
            if setting.is_changed() != Some(false) {
                found.push(Finding {
                    trouble: Trouble::WorksAgainst,
                    name: setting.name.clone(),
                    place: format!("= {value}"),
                    text: rule.text.clone(),
                });
            }
        }
        let said = host.lines_about(setting);
        found.extend(refused(setting, value, &said));
        let finding = |trouble, line: &Said<'_>, text| Finding {
            trouble,
            name: setting.name.clone(),
            place: line.written.place(),
            text,
        };
        if let Some(line) = host.not_in_force(setting, &said) {
            let why =
                kernel::made(host, setting, &said).map_or_else(String::new, |made| format!(": {}", made.why));
            let text = format!("says {}, but {value} is in force{why}", line.value);
            found.push(finding(Trouble::NotInForce, line, text));
        } else if let Some((line, other)) = conflict(&said) {
            let text = format!(
                "says {}, and {} says {}: nothing fixes which of the two comes last; {value} is in force",
                line.value,
                other.written.place(),
                other.value
            );
            found.push(finding(Trouble::Conflict, line, text));
        }
    }
    found.sort_by(|a, b| (a.trouble, &a.name, &a.place).cmp(&(b.trouble, &b.name, &b.place)));
    found.dedup();
    found
}

/// Lines that the kernel refuses, whenever they are carried out. What a command writes may be tried on purpose.
fn refused(setting: &Setting<'_>, value: &str, said: &[Said<'_>]) -> Vec<Finding> {
    let of = |line: &Said<'_>| {
        let Reading::Refused(why) = &line.reading else {
            return None;
        };
        if matches!(line.written.way, Way::SystemdUnit | Way::BootScript) {
            return None;
        }
        let (trouble, text) = match setting.tunable.values {
            Values::Words(_) | Values::Listed => (
                Trouble::Ignored,
                format!("{} can never be in force here: {why}", line.value),
            ),
            Values::Integers { .. } | Values::Text => (
                Trouble::NotInForce,
                format!("says {}, but {value} is in force: {why}", line.value),
            ),
        };
        Some(Finding {
            trouble,
            name: setting.name.clone(),
            place: line.written.place(),
            text,
        })
    };
    said.iter().filter_map(of).collect()
}

/// Two lines that are sure to be carried out at the start of the machine, from different kinds of places, of which only one is
/// in force.
fn conflict<'s, 'h>(said: &'s [Said<'h>]) -> Option<(&'s Said<'h>, &'s Said<'h>)> {
    let sure = || {
        said.iter()
            .filter(|s| s.written.phase == Phase::Boot && s.applies == Applies::Yes)
    };
    let other = sure().find(|s| s.reading == Reading::Equal)?;
    let line =
        sure().find(|s| matches!(s.reading, Reading::Different(_)) && s.written.way != other.written.way)?;
    Some((line, other))
}

fn ignored(catalogue: &Catalogue, host: &Host<'_>, written: &Written) -> Vec<Finding> {
    let finding = |name: String, text: String| Finding {
        trouble: Trouble::Ignored,
        name,
        place: written.place(),
        text,
    };
    let name = match (written.path.strip_prefix("cmdline:"), sysctl_name(&written.path)) {
        (Some(parameter), _) => format!("boot.{parameter}"),
        (None, Some(name)) => name,
        (None, None) => name_of(catalogue, &written.path),
    };
    if let Applies::No(why) = &written.applies {
        let is_read_later = host
            .configured
            .all()
            .iter()
            .any(|w| w.phase == Phase::Reapplied && w.file == written.file && w.line == written.line);
        return (why == UNREAD_SYSCTL_CONF && !is_read_later)
            .then(|| finding(name, why.clone()))
            .into_iter()
            .collect();
    }
    if let Some(gone) = gone(catalogue, &name, host.facts.release) {
        let what = if gone.stays {
            "has no effect from"
        } else {
            "is not there from"
        };
        return vec![finding(
            name,
            format!("{what} Linux {} on: {}", gone.since, gone.text),
        )];
    }
    // Commands look first whether a file is there, modules come and go, and only what has a file can be missing.
    if written.optional
        || written.path.starts_with("cmdline:")
        || matches!(
            written.way,
            Way::SystemdUnit | Way::BootScript | Way::KernelCommandLine | Way::ModuleOptions
        ) && !written.path.starts_with("/proc/sys/")
    {
        return Vec::new();
    }
    if written.way == Way::UdevRule {
        return missing_device(host, written)
            .map(|text| finding(name, text))
            .into_iter()
            .collect();
    }
    // A pattern may fit nothing today.
    if pattern::is_pattern(&written.path) {
        return Vec::new();
    }
    let is_of_device = ["/conf/", "/neigh/"]
        .iter()
        .any(|part| written.path.contains(part));
    if host.tree.read(&written.path) != Err(Unreadable::Absent) || is_of_device {
        return Vec::new();
    }
    if written.path.starts_with("/sys/") {
        return missing_file(host.tree, &written.path)
            .map(|text| finding(name, text))
            .into_iter()
            .collect();
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
    vec![finding(name, text)]
}

/// Name of a setting by its file; the file itself where the catalogue has none.
fn name_of(catalogue: &Catalogue, path: &str) -> String {
    let of = |t: &crate::catalogue::Tunable| {
        let (before, after) = t.path.split_once('*')?;
        let star = path.strip_prefix(before)?.strip_suffix(after)?;
        (!after.contains('*') && !star.contains('/')).then(|| t.name.replacen('*', star, 1))
    };
    catalogue
        .tunables
        .iter()
        .find_map(|t| {
            if t.path == path {
                Some(t.name.clone())
            } else {
                of(t)
            }
        })
        .unwrap_or_else(|| path.to_owned())
}

/// What is missing of a path below /sys: the first part that is not there. A tree that has nothing of that branch was not
/// captured whole, and says nothing.
fn missing_file(tree: &dyn Tree, path: &str) -> Option<String> {
    let parts: Vec<&str> = path.split('/').collect();
    for depth in (3..parts.len()).rev() {
        let directory = parts.get(..depth)?.join("/");
        if tree.names(&directory).is_empty() {
            continue;
        }
        let missing = parts.get(depth)?;
        return Some(match directory.as_str() {
            "/sys/block" | "/sys/class/net" => format!("there is no device {missing} here"),
            _ => format!("this kernel has no {directory}/{missing}"),
        });
    }
    None
}

/// A rule of the administrator about one device that is not here, or about a file that the devices it fits do not have.
fn missing_device(host: &Host<'_>, written: &Written) -> Option<String> {
    let (base, leaf) = written.path.split_once("/*/")?;
    // Packages bring rules for every machine; files of a scheduler come and go with it.
    if !written.file.starts_with("/etc/")
        || !matches!(base, "/sys/block" | "/sys/class/net")
        || leaf.contains("iosched/")
    {
        return None;
    }
    let devices = host.tree.names(base);
    if devices.is_empty() {
        return None;
    }
    if let Some(name) = written.device() {
        if !devices.iter().any(|d| d == name) {
            return Some(format!("there is no device {name} here"));
        }
    }
    let lacks = |device: &&String| {
        let path = format!("{base}/{device}/{leaf}");
        host.tree.read(&path) == Err(Unreadable::Absent)
            && host.configured.about(&path, host.tree).iter().any(|c| {
                c.applies == Applies::Yes && c.written.file == written.file && c.written.line == written.line
            })
    };
    let device = devices.iter().take(DEVICES_MAX).find(lacks)?;
    missing_file(host.tree, &format!("{base}/{device}/{leaf}"))
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
        find(&catalogue, &host, &settings)
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
