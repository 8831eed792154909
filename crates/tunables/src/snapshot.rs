//! The settings of a machine in a file, and one machine compared with another.

use crate::catalogue::Catalogue;
use crate::settings::{Found, Host, Known, Setting};
use crate::stale;
use homeostat_model::words;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Version of the file.
pub const SCHEMA: u32 = 1;
/// Most settings of a snapshot that are compared.
const SETTINGS_MAX: usize = 65_536;

/// One setting of a snapshot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Kept {
    /// Name.
    pub name: String,
    /// File.
    pub path: String,
    /// Value.
    pub value: String,
    /// Whether it was the kernel's own there; absent when that was not known.
    pub is_default: Option<bool>,
    /// Who set it, in words.
    pub set_by: String,
}

/// The settings of a machine at one time.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Snapshot {
    /// [`SCHEMA`].
    pub schema: u32,
    /// Name of the machine.
    pub host: String,
    /// Its kernel.
    pub kernel: String,
    /// When, in seconds since the epoch.
    pub taken_unix: u64,
    /// Its memory.
    pub memory_bytes: u64,
    /// Its CPUs.
    pub cpus: u32,
    /// The settings that had a value.
    pub settings: Vec<Kept>,
}

impl Snapshot {
    /// Of a machine, now.
    pub fn take(
        host: &Host<'_>,
        settings: &[Setting<'_>],
        known: &Known<'_>,
        name: &str,
        taken_unix: u64,
    ) -> Self {
        Self {
            schema: SCHEMA,
            host: name.to_owned(),
            kernel: host.facts.release_text.clone(),
            taken_unix,
            memory_bytes: host.facts.memory,
            cpus: host.facts.cpus,
            settings: settings
                .iter()
                .filter_map(|s| {
                    Some(Kept {
                        name: s.name.clone(),
                        path: s.path.clone(),
                        value: s.found.value()?.to_owned(),
                        is_default: s.is_changed().map(|changed| !changed),
                        set_by: host
                            .origin(s, known)
                            .map_or_else(String::new, |o| o.kind().to_owned()),
                    })
                })
                .collect(),
        }
    }
}

words!(
    /// In what way two machines are not alike.
    Difference {
        /// They have different values.
        Value = "differs",
        /// This machine does not have it.
        MissingHere = "missing_here",
        /// Only this machine has it, and not at its default.
        MissingThere = "missing_there",
    }
);

/// One difference.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Differing {
    /// In what way.
    pub difference: Difference,
    /// The setting.
    pub name: String,
    /// Value in the snapshot.
    pub there: Option<String>,
    /// Value here.
    pub here: Option<String>,
    /// What else is to be said: both at their own default, gone from this kernel, harmful here.
    pub remark: String,
}

/// What a snapshot of another machine has that this one has not, and the other way round. Settings that are at the
/// kernel's own value on both are alike, whatever the value (some go by memory and CPUs); so are devices that only one of
/// them has.
pub fn compare(
    catalogue: &Catalogue,
    there: &Snapshot,
    host: &Host<'_>,
    settings: &[Setting<'_>],
) -> Vec<Differing> {
    let here: BTreeMap<&str, &Setting<'_>> = settings.iter().map(|s| (s.name.as_str(), s)).collect();
    let mut found = Vec::new();
    let mut named = std::collections::BTreeSet::new();
    for kept in there.settings.iter().take(SETTINGS_MAX) {
        named.insert(kept.name.as_str());
        let ours = here.get(kept.name.as_str());
        let is_of_device = ours.map_or_else(
            || {
                catalogue
                    .tunables
                    .iter()
                    .any(|t| t.name.contains('*') && crate::configured::pattern::fits(&t.name, &kept.name))
            },
            |s| s.tunable.name.contains('*'),
        );
        match ours.map(|s| (&s.found, s)) {
            Some((Found::Value(value), setting)) => {
                let same = setting.tunable.values.normal(&kept.value) == *value;
                let both_default = kept.is_default == Some(true) && setting.is_changed() == Some(false);
                if same || both_default {
                    continue;
                }
                let remark = stale::against(catalogue, &kept.name, &kept.value, host)
                    .map(|rule| format!("that value would work against this machine: {}", rule.text))
                    .unwrap_or_default();
                found.push(Differing {
                    difference: Difference::Value,
                    name: kept.name.clone(),
                    there: Some(kept.value.clone()),
                    here: Some(value.clone()),
                    remark,
                });
            }
            // What may not be read here is no difference.
            Some((Found::Denied | Found::Unreadable, _)) => {}
            Some((Found::Absent, _)) | None => {
                // The kernel's own value there means nothing here.
                if is_of_device || kept.is_default == Some(true) {
                    continue;
                }
                let remark = match stale::gone(catalogue, &kept.name, host.facts.release) {
                    Some(gone) => format!("gone from Linux {} on: {}", gone.since, gone.text),
                    None => "this kernel ignores it".to_owned(),
                };
                found.push(Differing {
                    difference: Difference::MissingHere,
                    name: kept.name.clone(),
                    there: Some(kept.value.clone()),
                    here: None,
                    remark,
                });
            }
        }
    }
    for setting in settings {
        if named.contains(setting.name.as_str())
            || setting.tunable.name.contains('*')
            || setting.is_changed() != Some(true)
        {
            continue;
        }
        found.push(Differing {
            difference: Difference::MissingThere,
            name: setting.name.clone(),
            there: None,
            here: setting.found.value().map(str::to_owned),
            remark: "the other machine did not have it".to_owned(),
        });
    }
    found.sort_by(|a, b| (a.difference, &a.name).cmp(&(b.difference, &b.name)));
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Files;

    fn machine(memory: &str, list: &[(&str, &str)]) -> Files {
        let mut all = vec![
            ("/proc/sys/kernel/osrelease", "6.12.0\n"),
            ("/proc/meminfo", memory),
            ("/sys/devices/system/cpu/online", "0-7\n"),
            ("/sys/devices/system/node/online", "0\n"),
        ];
        all.extend(list);
        Files::new(&all)
    }

    #[test]
    fn two_machines_are_compared_by_what_was_chosen() {
        let catalogue = Catalogue::load().unwrap();
        let there = machine(
            "MemTotal: 33554432 kB\n",
            &[
                ("/proc/sys/vm/swappiness", "0\n"),
                ("/proc/sys/vm/dirty_ratio", "20\n"),
                ("/proc/sys/fs/file-max", "3355443\n"),
                ("/proc/sys/net/netfilter/nf_conntrack_max", "100\n"),
                ("/proc/sys/vm/legacy_va_layout", "0\n"),
                ("/sys/block/sda/queue/nr_requests", "64\n"),
            ],
        );
        let host = Host::read(&there);
        let settings = host.settings(&catalogue);
        let snapshot = Snapshot::take(&host, &settings, &Known::default(), "a", 1);
        assert!(
            snapshot
                .settings
                .iter()
                .any(|k| k.name == "fs.file-max" && k.is_default == Some(true))
        );
        // The machine itself: alike.
        assert_eq!(compare(&catalogue, &snapshot, &host, &settings), []);
        let here = machine(
            "MemTotal: 16777216 kB\n",
            &[
                ("/proc/sys/vm/swappiness", "60\n"),
                ("/proc/sys/vm/dirty_ratio", "20\n"),
                ("/proc/sys/fs/file-max", "1677721\n"),
                ("/proc/sys/vm/stat_interval", "10\n"),
            ],
        );
        let host = Host::read(&here);
        let settings = host.settings(&catalogue);
        let found = compare(&catalogue, &snapshot, &host, &settings);
        let names: Vec<(&str, &str)> = found
            .iter()
            .map(|d| (d.difference.as_str(), d.name.as_str()))
            .collect();
        assert_eq!(
            names,
            [
                ("differs", "vm.swappiness"),
                ("missing_here", "net.netfilter.nf_conntrack_max"),
                ("missing_there", "vm.stat_interval"),
            ]
        );
        assert!(found[0].remark.contains("work against"), "{}", found[0].remark);
    }
}
