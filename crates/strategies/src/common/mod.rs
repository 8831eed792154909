//! What several strategies need: the machine's domains, the demand on them, and the prediction of a gain.

pub(crate) mod domains;
pub(crate) mod prediction;
pub(crate) mod score;
#[cfg(test)]
pub(crate) mod testing;

use crate::numa_balancing;
use homeostat_engine::{Seen, Setting};
use homeostat_model::units::ranges;
use homeostat_model::{CapabilityState, CpuId, Machine, Nanoseconds, NodeId};
use std::collections::BTreeSet;

/// The setting `gain_min` as most strategies have it: the predicted gain from which a change is tried.
pub(crate) const fn gain_min(strategy: &'static str) -> Setting {
    Setting {
        strategy,
        name: "gain_min",
        default: 0.01,
        classic: 0.01,
        low: 0.0,
        high: 1.0,
        help: "predicted gain from which it is tried (0.01 = 1 %)",
    }
}

/// The setting `age_min_s`: the age from which a workload is considered, over the general floor. `classic` is that of
/// the profile `aso-classic` in seconds, `help` says where it comes from.
pub(crate) const fn age_min(strategy: &'static str, classic: f64, help: &'static str) -> Setting {
    Setting {
        strategy,
        name: "age_min_s",
        default: 0.0,
        classic,
        low: 0.0,
        high: 86_400.0,
        help,
    }
}

/// Age floor of strategies of which no classic figure is known.
pub(crate) const AGE_HELP: &str =
    "age in seconds from which a workload is considered, over the general floor (no classic figure is known)";

/// Whether the capabilities work here; else the first one that does not, with what the probe saw and the remedy.
pub(crate) fn capable(machine: &Machine, ids: &[&str]) -> Result<(), String> {
    for id in ids {
        match machine.capability(id) {
            Some(c) if c.state == CapabilityState::Available => {}
            Some(c) => {
                let remedy = if c.remedy.is_empty() {
                    String::new()
                } else {
                    format!("; {}", c.remedy)
                };
                return Err(format!("{id} does not work here: {}{remedy}", c.detail));
            }
            None => return Err(format!("{id} was not probed")),
        }
    }
    Ok(())
}

/// Words by which a setting that a person or another tool made on a workload is known to be about where it runs,
/// where its memory lies, or how it ranks against others (units of systemd, `taskset`, `numactl`, `chrt`, `nice`).
const PLACING: [&str; 10] = [
    "affinity",
    "allowedcpus",
    "allowedmemorynodes",
    "cpuset",
    "taskset",
    "numa",
    "nice",
    "priority",
    "schedulingpolicy",
    "chrt",
];

/// The choice of a person or another tool about place or rank that homeostat must respect, if there is one.
pub(crate) fn placed_by_a_person(seen: &Seen<'_>) -> Option<String> {
    if let Some(bound) = seen.locality.and_then(|l| l.bound.as_ref()) {
        return Some(bound.clone());
    }
    seen.workload
        .choice
        .tuned
        .iter()
        .find(|t| {
            let t = t.to_lowercase();
            // A setting of the whole host says nothing about where this one runs.
            !t.starts_with(numa_balancing::SETTING) && PLACING.iter().any(|word| t.contains(word))
        })
        .cloned()
}

/// A sentence when the workload is younger than a strategy's floor of age (seconds).
pub(crate) fn too_young(seen: &Seen<'_>, age_min_s: f64) -> Option<String> {
    let age = seen.sample.age;
    (age.as_secs_f64() < age_min_s).then(|| {
        format!(
            "only {age} old; this is considered from {}",
            Nanoseconds::from_secs_f64(age_min_s)
        )
    })
}

/// Nodes as people say it: `node 0`, `nodes 0,2`.
pub(crate) fn node_list(nodes: &BTreeSet<NodeId>) -> String {
    let list: Vec<String> = nodes.iter().map(ToString::to_string).collect();
    format!(
        "node{} {}",
        if list.len() == 1 { "" } else { "s" },
        list.join(",")
    )
}

/// CPU numbers as people write them: `0-15,32`. They must ascend.
pub(crate) fn cpu_list(cpus: &[CpuId]) -> String {
    ranges(cpus.iter().map(|cpu| cpu.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_lists_read_like_the_kernels() {
        let list = |numbers: &[u32]| cpu_list(&numbers.iter().map(|n| CpuId(*n)).collect::<Vec<_>>());
        assert_eq!(list(&[0, 1, 2, 3, 8, 10, 11]), "0-3,8,10-11");
        assert_eq!(list(&[]), "");
        let nodes = |numbers: &[u32]| node_list(&numbers.iter().map(|n| NodeId(*n)).collect());
        assert_eq!(
            (nodes(&[3]), nodes(&[0, 2])),
            ("node 3".into(), "nodes 0,2".into())
        );
    }
}
