//! Where a workload's threads run and its memory lies, in full, for people. What the strategies need of it is the
//! summary [`Locality`].

use crate::locality::{Counters, Locality};
use crate::units::{Bytes, LlcId, Nanoseconds, NodeId};
use crate::workload::WorkloadId;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Resident memory on one node, by what backs it. Each page counts once, in one of the first four.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryByKind {
    /// Private memory without a file: heap, stacks, what a program wrote into its own copy of a file.
    #[serde(rename = "anonymous_bytes")]
    pub anonymous: Bytes,
    /// Shared memory: System V segments, `/dev/shm`, memfd, shared anonymous mappings.
    #[serde(rename = "shared_bytes")]
    pub shared: Bytes,
    /// Pages of files, mapped: executables, libraries, memory-mapped data.
    #[serde(rename = "file_bytes")]
    pub file: Bytes,
    /// Reserved huge pages (hugetlbfs).
    #[serde(rename = "hugetlb_bytes")]
    pub hugetlb: Bytes,
    /// Of all these, what lies on large pages, the reserved ones included.
    #[serde(rename = "huge_bytes")]
    pub huge: Bytes,
}

impl MemoryByKind {
    /// All of it.
    pub fn total(&self) -> Bytes {
        self.anonymous + self.shared + self.file + self.hugetlb
    }

    /// Adds another amount, kind by kind.
    pub fn add(&mut self, other: &Self) {
        self.anonymous += other.anonymous;
        self.shared += other.shared;
        self.file += other.file;
        self.hugetlb += other.hugetlb;
        self.huge += other.huge;
    }
}

/// Where threads were dispatched, relative to where they had run before. Shares of all dispatches; they sum to 1.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Redispatches {
    /// Dispatches in the interval; people are told how many a second.
    #[serde(skip)]
    pub dispatches: f64,
    /// On the same core.
    pub same_core: f64,
    /// On another core of the same last-level cache.
    pub same_cache: f64,
    /// On another last-level cache of the same node.
    pub same_node: f64,
    /// On another node.
    pub other_node: f64,
    /// Whether each move between CPUs was seen; else the moves are counted, and how far they went is taken from where
    /// the threads were found now and then.
    pub every_move_seen: bool,
}

/// What automatic NUMA balancing does to a workload.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NumaBalancing {
    /// Pages that the kernel migrated for its threads, since they began.
    pub pages_migrated: u64,
    /// Threads by the node that the kernel prefers for them.
    pub preferred: BTreeMap<NodeId, u32>,
}

/// Where a workload's threads run and its memory lies. Bounded however many threads and pages there are.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Places {
    /// Whose.
    pub workload: WorkloadId,
    /// Time that the threads were watched for.
    pub watched: Nanoseconds,
    /// Threads that ran in that time (or ever, when it is zero).
    pub threads: u32,
    /// Of the busiest process.
    pub threads_of_busiest_process: u32,
    /// CPUs used, by last-level-cache domain.
    pub running: BTreeMap<LlcId, f64>,
    /// Resident memory by node.
    pub memory: BTreeMap<NodeId, MemoryByKind>,
    /// Half of the 95 % interval of each node's share of the memory, 0..1. Zero where every page was counted.
    pub memory_error: f64,
    /// Share of the resident memory that was looked at, in processes; the rest is taken to lie alike.
    pub memory_covered: f64,
    /// How dispatches went; `None` where they were not watched.
    pub redispatches: Option<Redispatches>,
    /// What automatic NUMA balancing did; `None` where the kernel does not tell.
    pub balancing: Option<NumaBalancing>,
    /// A person or another tool restricted where threads may run or memory may lie: what was found.
    pub bound: Option<String>,
    /// Hardware events, where the machine counts them.
    pub counters: Option<Counters>,
}

impl Places {
    /// What the strategies need of it. Files count as shared memory: others may map the same pages.
    pub fn summary(&self) -> Locality {
        let of = |part: fn(&MemoryByKind) -> Bytes| -> BTreeMap<NodeId, Bytes> {
            self.memory
                .iter()
                .map(|(node, m)| (*node, part(m)))
                .filter(|(_, bytes)| bytes.0 > 0)
                .collect()
        };
        Locality {
            workload: self.workload.clone(),
            threads: self.threads,
            threads_of_busiest_process: self.threads_of_busiest_process,
            running: self.running.clone(),
            private: of(|m| m.anonymous),
            shared: of(|m| m.shared + m.file + m.hugetlb),
            huge: of(|m| m.huge),
            bound: self.bound.clone(),
            counters: self.counters,
        }
    }

    /// All resident memory.
    pub fn resident(&self) -> Bytes {
        self.memory.values().map(MemoryByKind::total).sum()
    }

    /// CPUs used.
    pub fn cpus(&self) -> f64 {
        self.running.values().sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_summary_loses_no_page() {
        let one = MemoryByKind {
            anonymous: Bytes(10),
            shared: Bytes(20),
            file: Bytes(30),
            hugetlb: Bytes(40),
            huge: Bytes(45),
        };
        let mut two = one;
        two.add(&one);
        let places = Places {
            workload: "w".into(),
            watched: Nanoseconds::ZERO,
            threads: 2,
            threads_of_busiest_process: 2,
            running: BTreeMap::from([(LlcId(0), 1.5)]),
            memory: BTreeMap::from([
                (NodeId(0), one),
                (NodeId(1), two),
                (NodeId(2), MemoryByKind::default()),
            ]),
            memory_error: 0.0,
            memory_covered: 1.0,
            redispatches: None,
            balancing: None,
            bound: None,
            counters: None,
        };
        let summary = places.summary();
        let total: u64 = summary
            .private
            .values()
            .chain(summary.shared.values())
            .map(|b| b.0)
            .sum();
        assert_eq!(total, places.resident().0);
        assert_eq!(total, 300);
        assert_eq!(summary.huge[&NodeId(1)], Bytes(90));
        assert!(!summary.private.contains_key(&NodeId(2)), "nothing is no place");
        assert!((places.cpus() - 1.5).abs() < 1e-12);
    }
}
