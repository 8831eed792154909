//! The machine down to its caches, classes of memory and devices, for people and planners. What the strategies need
//! of it is [`crate::Machine`].

use crate::units::{Bytes, CpuId, NodeId};
use crate::words;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// Everything that firmware and kernel tell about places. A part that they hide is absent, never guessed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Topology {
    /// Online CPUs in order.
    pub cpus: Vec<LogicalCpu>,
    /// CPUs that are there but switched off.
    pub offline: Vec<CpuId>,
    /// Caches by level, then by kind, then by their first CPU. One that is told to span nodes is listed at each of them.
    pub caches: Vec<Cache>,
    /// NUMA nodes in order; at least one. A node may have no CPUs, or no memory.
    pub nodes: Vec<MemoryNode>,
    /// Memory tiers, fastest first; empty before Linux 6.1.
    pub tiers: Vec<MemoryTier>,
    /// Devices that sit at a place, by kind and name.
    pub devices: Vec<Device>,
}

/// One logical CPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LogicalCpu {
    /// The kernel's number.
    pub id: CpuId,
    /// Physical core: lowest CPU number among its SMT siblings.
    pub core: u32,
    /// Cluster of cores, by its lowest CPU number, where it is larger than a core and smaller than a package.
    pub cluster: Option<u32>,
    /// Die inside the package, where the kernel tells more than one.
    pub die: Option<u32>,
    /// Package (socket).
    pub package: u32,
    /// NUMA node.
    pub node: NodeId,
    /// Kind of core, on machines with several: `performance`, `efficiency`, `low_power`, `compact`.
    pub kind: Option<String>,
    /// Speed relative to the fastest CPU of the machine = 1024, where the kernel tells it.
    pub capacity: Option<u32>,
    /// Kept out of the scheduler's balancing by `isolcpus=` or an isolated cpuset.
    pub isolated: bool,
    /// Runs without the timer tick (`nohz_full=`).
    pub tickless: bool,
    /// Given to one control group alone (a partition of cpusets).
    pub partitioned: bool,
}

words!(
    /// What a cache holds.
    CacheKind {
        /// Data only.
        Data = "data",
        /// Instructions only.
        Instruction = "instruction",
        /// Both.
        Unified = "unified",
    }
);

/// One cache and the CPUs that share it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cache {
    /// Level, 1 = nearest to the core.
    pub level: u32,
    /// What it holds.
    pub kind: CacheKind,
    /// Size; zero where it is not told.
    pub size_bytes: Bytes,
    /// Length of a line in bytes; zero where it is not told.
    pub line_bytes: u32,
    /// Associativity; zero where it is not told.
    pub ways: u32,
    /// CPUs that share it, in order.
    pub cpus: Vec<CpuId>,
}

/// One NUMA node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryNode {
    /// The kernel's number.
    pub id: NodeId,
    /// Its memory; zero for a node without.
    pub memory_bytes: Bytes,
    /// Of which free.
    pub free_bytes: Bytes,
    /// Online CPUs of the node; empty for a node of memory alone.
    pub cpus: Vec<CpuId>,
    /// Distance to each node, 10 = the own one (ACPI SLIT); empty where the firmware tells none.
    pub distances: BTreeMap<NodeId, u32>,
    /// Latency and bandwidth as the firmware rates them (ACPI HMAT), by class.
    pub access: Vec<MemoryAccess>,
    /// Caches in front of its memory.
    pub side_caches: Vec<SideCache>,
    /// Memory tier it belongs to.
    pub tier: Option<u32>,
}

/// Rated performance of a node's memory, seen from the nodes that reach it best.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryAccess {
    /// 0: from any initiator, devices included; 1: from CPUs.
    pub class: u32,
    /// Nodes of the initiators.
    pub initiators: Vec<NodeId>,
    /// Nanoseconds for a read.
    pub read_latency_ns: Option<u32>,
    /// Nanoseconds for a write.
    pub write_latency_ns: Option<u32>,
    /// MiB per second read.
    pub read_bandwidth_mib_s: Option<u32>,
    /// MiB per second written.
    pub write_bandwidth_mib_s: Option<u32>,
}

/// A cache of the memory side (for example fast memory in front of slow memory).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SideCache {
    /// Level, 1 = nearest to the CPUs.
    pub level: u32,
    /// Size.
    pub size_bytes: Bytes,
    /// Length of a line in bytes.
    pub line_bytes: u32,
    /// Whether each address has one place only.
    pub direct_mapped: bool,
    /// Whether writes wait in it.
    pub write_back: bool,
}

/// Nodes of one speed class, as the kernel demotes and promotes between them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryTier {
    /// The kernel's number; smaller is faster.
    pub id: u32,
    /// Its nodes.
    pub nodes: Vec<NodeId>,
}

words!(
    /// What a device does.
    DeviceKind {
        /// A disk.
        Block = "block",
        /// A network interface.
        Network = "network",
        /// A graphics processor or another accelerator.
        Accelerator = "accelerator",
    }
);

/// A device that sits at a place.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Device {
    /// What it does.
    pub kind: DeviceKind,
    /// Name, as below `/sys/class`, or the PCI address of an accelerator.
    pub name: String,
    /// Node it is attached to; `None` where the firmware does not tell.
    pub node: Option<NodeId>,
}

/// The last-level caches of data, in order of their first CPU. CPUs without one of the highest level (efficiency
/// cores of some hybrids) have the largest that they have.
pub fn last_level_caches(caches: &[Cache]) -> Vec<&Cache> {
    let mut seen: BTreeSet<CpuId> = BTreeSet::new();
    let mut found: Vec<&Cache> = Vec::new();
    let mut by_level: Vec<&Cache> = caches
        .iter()
        .filter(|c| c.kind != CacheKind::Instruction)
        .collect();
    by_level.sort_by_key(|c| std::cmp::Reverse(c.level));
    for cache in by_level {
        if cache.cpus.iter().any(|cpu| !seen.contains(cpu)) {
            seen.extend(cache.cpus.iter().copied());
            found.push(cache);
        }
    }
    found.sort_by(|a, b| a.cpus.first().cmp(&b.cpus.first()));
    found
}

impl Topology {
    /// Level of the last-level cache; 0 where caches are hidden.
    pub fn last_level(&self) -> u32 {
        self.caches
            .iter()
            .filter(|c| c.kind != CacheKind::Instruction)
            .map(|c| c.level)
            .max()
            .unwrap_or(0)
    }

    /// Its [`last_level_caches`].
    pub fn last_level_caches(&self) -> Vec<&Cache> {
        last_level_caches(&self.caches)
    }

    /// Groups of nodes that are nearer to each other than the farthest pair (boards, books, drawers), each in order of
    /// its nodes. One group where there is one remote distance only.
    pub fn near_groups(&self) -> Vec<Vec<NodeId>> {
        let distance = |a: &MemoryNode, b: &MemoryNode| a.distances.get(&b.id).copied();
        let mut remote: BTreeSet<u32> = BTreeSet::new();
        for a in &self.nodes {
            for b in self.nodes.iter().filter(|b| b.id != a.id) {
                remote.extend(distance(a, b));
            }
        }
        let far = match remote.last() {
            Some(far) if remote.len() > 1 => *far,
            _ => u32::MAX,
        };
        let mut groups: Vec<Vec<&MemoryNode>> = Vec::new();
        for node in &self.nodes {
            let near = |other: &&MemoryNode| distance(node, other).is_none_or(|d| d < far);
            match groups.iter_mut().find(|g| g.iter().all(near)) {
                Some(group) => group.push(node),
                None => groups.push(vec![node]),
            }
        }
        groups
            .into_iter()
            .map(|g| g.into_iter().map(|n| n.id).collect())
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(id: u32, distances: &[u32]) -> MemoryNode {
        MemoryNode {
            id: NodeId(id),
            memory_bytes: Bytes::from_mib(1024),
            free_bytes: Bytes::ZERO,
            cpus: vec![],
            distances: (0..).map(NodeId).zip(distances.iter().copied()).collect(),
            access: vec![],
            side_caches: vec![],
            tier: None,
        }
    }

    fn cache(level: u32, kind: CacheKind, cpus: std::ops::Range<u32>) -> Cache {
        Cache {
            level,
            kind,
            size_bytes: Bytes::from_mib(1),
            line_bytes: 64,
            ways: 8,
            cpus: cpus.map(CpuId).collect(),
        }
    }

    #[test]
    fn nodes_nearer_than_the_farthest_are_one_group() {
        let two_boards = Topology {
            nodes: vec![
                node(0, &[10, 20, 40, 40]),
                node(1, &[20, 10, 40, 40]),
                node(2, &[40, 40, 10, 20]),
                node(3, &[40, 40, 20, 10]),
            ],
            ..Topology::default()
        };
        let groups: Vec<Vec<u32>> = two_boards
            .near_groups()
            .iter()
            .map(|g| g.iter().map(|n| n.0).collect())
            .collect();
        assert_eq!(groups, [[0, 1], [2, 3]]);
        let flat = Topology {
            nodes: vec![node(0, &[10, 21]), node(1, &[21, 10])],
            ..Topology::default()
        };
        assert_eq!(flat.near_groups().len(), 1);
        let silent = Topology {
            nodes: vec![node(0, &[]), node(1, &[])],
            ..Topology::default()
        };
        assert_eq!(silent.near_groups().len(), 1);
    }

    #[test]
    fn cores_without_the_highest_level_have_the_largest_cache_they_have() {
        let hybrid = Topology {
            caches: vec![
                cache(1, CacheKind::Instruction, 0..2),
                cache(2, CacheKind::Unified, 0..2),
                cache(2, CacheKind::Unified, 2..6),
                cache(3, CacheKind::Unified, 0..2),
            ],
            ..Topology::default()
        };
        let found: Vec<(u32, usize)> = hybrid
            .last_level_caches()
            .iter()
            .map(|c| (c.level, c.cpus.len()))
            .collect();
        assert_eq!(found, [(3, 2), (2, 4)]);
        assert_eq!(hybrid.last_level(), 3);
        assert_eq!(Topology::default().last_level(), 0);
    }
}
