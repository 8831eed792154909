//! Where a workload runs and where its memory lies, as placement strategies need it.

use crate::units::{Bytes, LlcId, NodeId};
use crate::workload::WorkloadId;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Threads and memory of a workload by place. A summary: bounded however many threads and pages there are.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Locality {
    /// Whose.
    pub workload: WorkloadId,
    /// Threads that ran since the previous inspection (or ever, at the first).
    pub threads: u32,
    /// Of the busiest process: more than one means that threads share memory. One = process-based program.
    pub threads_of_busiest_process: u32,
    /// CPUs used (1.0 = one CPU busy all the time), by last-level-cache domain on which the threads ran.
    pub running: BTreeMap<LlcId, f64>,
    /// Resident private memory by node.
    pub private: BTreeMap<NodeId, Bytes>,
    /// Resident shared memory by node.
    pub shared: BTreeMap<NodeId, Bytes>,
    /// Of all resident memory, the part on large pages, by node: not moved for affinity.
    pub huge: BTreeMap<NodeId, Bytes>,
    /// A person or another tool restricted where the threads may run or the memory may lie (affinity mask,
    /// cpuset, `numactl`, memory policy): the sentence that says what was found. Then nothing is placed.
    pub bound: Option<String>,
    /// Hardware events, where the machine counts them.
    pub counters: Option<Counters>,
}

impl Locality {
    /// Share of the resident memory that lies on the nodes where the threads run, weighted by where they run:
    /// 1 = every access can be local. `node_of` gives the node of a cache domain. `None` without memory or load.
    pub fn local_share(&self, node_of: impl Fn(LlcId) -> Option<NodeId>) -> Option<f64> {
        let load: f64 = self.running.values().sum();
        let on = |n: &NodeId| {
            let of = |m: &BTreeMap<NodeId, Bytes>| m.get(n).map_or(0.0, |b| b.0 as f64);
            of(&self.private) + of(&self.shared)
        };
        let total: f64 = self
            .private
            .keys()
            .chain(self.shared.keys())
            .collect::<std::collections::BTreeSet<_>>()
            .into_iter()
            .map(on)
            .sum();
        if load <= 0.0 || total <= 0.0 {
            return None;
        }
        let local: f64 = self
            .running
            .iter()
            .filter_map(|(llc, cpus)| node_of(*llc).map(|n| cpus / load * on(&n) / total))
            .sum();
        Some(local)
    }
}

/// Rates from the processor's event counters over the last interval. Never the judge of an experiment (the counts
/// may change with the treatment); they predict and they prove the mechanism. A rate that the machine does not count is
/// not a number (NaN); cycles per instruction are always known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Counters {
    /// Cycles per instruction of a running thread.
    #[serde(with = "crate::units::any_number")]
    pub cycles_per_instruction: f64,
    /// Share of the cycles spent waiting for memory beyond the last-level cache.
    #[serde(with = "crate::units::any_number")]
    pub memory_stall_share: f64,
    /// Share of the cycles spent on lines taken from another cache domain's cache (interventions).
    #[serde(with = "crate::units::any_number")]
    pub cache_to_cache_stall_share: f64,
    /// Share of the cycles spent on page-table walks.
    #[serde(with = "crate::units::any_number")]
    pub table_walk_share: f64,
    /// Share of the last-level-cache misses that were served by memory of the own node, 0..1.
    #[serde(with = "crate::units::any_number")]
    pub local_share: f64,
    /// Share of the memory traffic that is hardware prefetch, 0..1. Where the lines that were used can be told from those
    /// that were not, only the latter: the former would be fetched anyway.
    #[serde(with = "crate::units::any_number")]
    pub prefetch_share: f64,
    /// Share of the demand misses that the prefetcher covered, 0..1.
    #[serde(with = "crate::units::any_number")]
    pub prefetch_useful_share: f64,
    /// Use of the busiest link or memory controller, 0..1.
    #[serde(with = "crate::units::any_number")]
    pub busiest_link: f64,
}
