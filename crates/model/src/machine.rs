//! The host: its topology, memory, kernel, and what it can sense and do.

use crate::units::{Bytes, CpuId, LlcId, NodeId};
use crate::{text_id, words};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// Share by which the sum of the nodes may differ from all memory. Measured: the two are equal on a virtual machine of one
/// node; a machine that told half of its memory is the fault that this finds. Between them any value tells them apart.
const NODES_APART: f64 = 0.1;

text_id!(
    /// Stable name of a capability, such as `process_madvise.collapse`.
    CapabilityId
);

/// One logical CPU and where it sits.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cpu {
    /// The kernel's number.
    pub id: CpuId,
    /// Physical core (lowest CPU number among its SMT siblings).
    pub core: u32,
    /// Package (socket).
    pub package: u32,
    /// Last-level-cache domain.
    pub llc: LlcId,
    /// NUMA node.
    pub node: NodeId,
    /// Taken out of general use by a person: `isolcpus=`, `nohz_full=`, or a partition of the control groups (cpuset).
    /// Nothing is placed there, and it is no room.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub set_aside: bool,
}

/// One NUMA node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NumaNode {
    /// The kernel's number.
    pub id: NodeId,
    /// Memory of the node.
    pub memory: Bytes,
    /// Distances to all nodes in order (10 = local), from `/sys/devices/system/node/nodeN/distance`.
    pub distances: Vec<u32>,
}

/// What the host is. Read once at start and again when the topology changes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Machine {
    /// Kernel release, as `uname -r`.
    pub kernel: String,
    /// CPU model name, or `unknown`.
    pub cpu_model: String,
    /// Hypervisor name when the CPU says it runs in a virtual machine.
    pub hypervisor: Option<String>,
    /// Online CPUs in order.
    pub cpus: Vec<Cpu>,
    /// NUMA nodes in order; at least one.
    pub nodes: Vec<NumaNode>,
    /// Total memory.
    pub memory: Bytes,
    /// Base page size.
    pub page_size: Bytes,
    /// PMD (large) page size; zero when the kernel has no transparent huge pages.
    pub huge_page_size: Bytes,
    /// Size of the largest last-level cache.
    pub llc_size: Bytes,
    /// `/proc/sys/kernel/random/boot_id`: undo records of another boot are void.
    pub boot_id: String,
    /// Sensors and effectors as probed at start.
    pub capabilities: Vec<Capability>,
}

impl Machine {
    /// The CPUs in general use, in order: those that nobody has set aside.
    pub fn general_cpus(&self) -> impl Iterator<Item = &Cpu> {
        self.cpus.iter().filter(|c| !c.set_aside)
    }
    /// How many of these CPUs are online. They must ascend.
    pub fn online_among(&self, cpus: &[CpuId]) -> usize {
        self.cpus
            .iter()
            .filter(|c| cpus.binary_search(&c.id).is_ok())
            .count()
    }
    /// The capability of that name, if it was probed.
    pub fn capability(&self, id: &str) -> Option<&Capability> {
        self.capabilities.iter().find(|c| c.id.as_str() == id)
    }
    /// Whether the capability was probed and works.
    pub fn can(&self, id: &str) -> bool {
        self.capability(id)
            .is_some_and(|c| c.state == CapabilityState::Available)
    }
    /// Makes a machine of what firmware, hypervisors and containers tell that cannot be. Returns a sentence for each part that
    /// was changed. What is left keeps these rules: each CPU once and ascending, a core in one package, a last-level
    /// cache in one node, each CPU in a known node, a distance for each pair of nodes or none, and nodes
    /// that hold no more than all memory.
    pub fn repair(&mut self) -> Vec<String> {
        let mut told = Vec::new();
        self.cpus.sort_by_key(|cpu| cpu.id);
        let count = self.cpus.len();
        self.cpus.dedup_by_key(|cpu| cpu.id);
        if self.cpus.len() < count {
            told.push("a CPU is listed twice; the first entry counts".to_owned());
        }
        self.nodes.sort_by_key(|node| node.id);
        let count = self.nodes.len();
        self.nodes.dedup_by_key(|node| node.id);
        if self.nodes.len() < count {
            told.push("a memory node is listed twice; the first entry counts".to_owned());
        }
        if self.nodes.is_empty() {
            told.push("no memory node is told; all memory counts as one node".to_owned());
            self.nodes.push(NumaNode {
                id: NodeId(0),
                memory: self.memory,
                distances: vec![10],
            });
        }
        self.repair_memory(&mut told);
        self.repair_cpus(&mut told);
        let nodes = self.nodes.len();
        if self
            .nodes
            .iter()
            .any(|n| !n.distances.is_empty() && n.distances.len() != nodes)
        {
            told.push("the table of distances does not fit the nodes; it is left out".to_owned());
            self.nodes.iter_mut().for_each(|node| node.distances.clear());
        }
        told
    }

    fn repair_memory(&mut self, told: &mut Vec<String>) {
        let sum: Bytes = self.nodes.iter().map(|node| node.memory).sum();
        if self.memory.0 == 0 {
            // A container that hides how much there is shows the nodes of the host all the same.
            self.nodes.iter_mut().for_each(|node| node.memory = Bytes(0));
            told.push("how much memory there is cannot be told: /proc/meminfo says 0 B".to_owned());
            return;
        }
        let apart = sum.0.abs_diff(self.memory.0) as f64 / self.memory.0 as f64;
        if apart <= NODES_APART {
            return;
        }
        match self.nodes.as_mut_slice() {
            [one] => {
                told.push(format!(
                    "the one node is told to hold {}, the machine has {}; the latter counts",
                    one.memory, self.memory
                ));
                one.memory = self.memory;
            }
            several => {
                told.push(format!(
                    "the nodes are told to hold {sum}, the machine has {}; how memory is spread is not sure",
                    self.memory
                ));
                if sum.0 > self.memory.0 {
                    for node in several {
                        let part = u128::from(node.memory.0) * u128::from(self.memory.0) / u128::from(sum.0);
                        node.memory = Bytes(part as u64);
                    }
                }
            }
        }
    }

    fn repair_cpus(&mut self, told: &mut Vec<String>) {
        let first_node = self.nodes.first().map_or(NodeId(0), |node| node.id);
        let known: BTreeSet<NodeId> = self.nodes.iter().map(|node| node.id).collect();
        let mut strange = false;
        for cpu in self.cpus.iter_mut().filter(|cpu| !known.contains(&cpu.node)) {
            cpu.node = first_node;
            strange = true;
        }
        if strange {
            told.push(
                "a CPU is told to be at a node that is not there; it counts for the first node".to_owned(),
            );
        }
        // Parts are named after their first CPU.
        let mut cores: BTreeMap<(u32, u32), CpuId> = BTreeMap::new();
        let mut domains: BTreeMap<(LlcId, NodeId), CpuId> = BTreeMap::new();
        for cpu in &self.cpus {
            cores.entry((cpu.core, cpu.package)).or_insert(cpu.id);
            domains.entry((cpu.llc, cpu.node)).or_insert(cpu.id);
        }
        let several = |names: BTreeSet<u32>, parts: usize| names.len() < parts;
        if several(self.cpus.iter().map(|cpu| cpu.core).collect(), cores.len()) {
            for cpu in &mut self.cpus {
                cpu.core = cores
                    .get(&(cpu.core, cpu.package))
                    .map_or(cpu.id.0, |first| first.0);
            }
            told.push("a core is told to be in two packages; its part in each counts as a core".to_owned());
        }
        if several(self.cpus.iter().map(|cpu| cpu.llc.0).collect(), domains.len()) {
            for cpu in &mut self.cpus {
                let first = domains.get(&(cpu.llc, cpu.node));
                cpu.llc = LlcId(first.map_or(cpu.id.0, |first| first.0));
            }
            told.push(
                "a last-level cache is told to span memory nodes; its part at each node counts as a cache"
                    .to_owned(),
            );
        }
    }

    /// Identity of this kind of machine for the history: kernel, CPU model and size, not the host's name.
    pub fn fingerprint(&self) -> String {
        format!(
            "{} | {} | {} cpus | {} nodes | {}",
            self.kernel,
            self.cpu_model,
            self.cpus.len(),
            self.nodes.len(),
            self.memory
        )
    }
}

words!(
    /// Whether a sensor or effector works here.
    CapabilityState {
        /// Works.
        Available = "available",
        /// Works in part; `detail` says what does not.
        Limited = "limited",
        /// Does not work here.
        Missing = "missing",
    }
);

/// A sensor or effector that this machine has or lacks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Capability {
    /// Stable name.
    pub id: CapabilityId,
    /// Whether it works.
    pub state: CapabilityState,
    /// How it was probed and what was seen, with numbers.
    pub detail: String,
    /// What is lost without it; empty when available.
    pub cost_of_absence: String,
    /// What a person can do about it; empty when nothing.
    pub remedy: String,
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn cpu(id: u32, core: u32, package: u32, llc: u32, node: u32) -> Cpu {
        Cpu {
            id: CpuId(id),
            core,
            package,
            llc: LlcId(llc),
            node: NodeId(node),
            set_aside: false,
        }
    }

    fn machine(cpus: Vec<Cpu>, nodes: &[(u32, u64, usize)], memory: u64) -> Machine {
        Machine {
            kernel: "6.12.0".into(),
            cpu_model: "x".into(),
            hypervisor: None,
            cpus,
            nodes: nodes
                .iter()
                .map(|(id, memory, distances)| NumaNode {
                    id: NodeId(*id),
                    memory: Bytes(*memory),
                    distances: vec![10; *distances],
                })
                .collect(),
            memory: Bytes(memory),
            page_size: Bytes(4096),
            huge_page_size: Bytes(2 << 20),
            llc_size: Bytes(1 << 25),
            boot_id: String::new(),
            capabilities: Vec::new(),
        }
    }

    #[test]
    fn a_cache_over_two_nodes_is_one_domain_at_each() {
        let cpus = (0..8).map(|id| cpu(id, id, 0, 0, id / 4)).collect();
        let mut seen = machine(cpus, &[(0, 8 << 30, 2), (1, 8 << 30, 2)], 16 << 30);
        let told = seen.repair();
        assert!(told.len() == 1 && told[0].contains("span"), "{told:?}");
        let domains: Vec<u32> = seen.cpus.iter().map(|c| c.llc.0).collect();
        assert_eq!(domains, [0, 0, 0, 0, 4, 4, 4, 4]);
    }

    #[test]
    fn nodes_are_held_against_all_memory() {
        let mut half = machine(vec![cpu(0, 0, 0, 0, 0)], &[(0, 12 << 30, 1)], 24 << 30);
        assert_eq!(half.repair().len(), 1);
        assert_eq!(half.nodes[0].memory, Bytes(24 << 30));
        let mut none = machine(vec![cpu(0, 0, 0, 0, 0)], &[(0, 12 << 30, 1)], 0);
        assert!(none.repair()[0].contains("cannot be told"));
        assert_eq!(none.nodes[0].memory, Bytes(0));
        let mut whole = machine(vec![cpu(0, 0, 0, 0, 0)], &[(0, 24 << 30, 1)], 24 << 30);
        assert_eq!(whole.repair(), Vec::<String>::new());
    }

    proptest! {
        #[test]
        fn what_was_repaired_keeps_the_rules_and_is_not_repaired_again(
            cpus in proptest::collection::vec((0u32..12, 0u32..12, 0u32..3, 0u32..12, 0u32..5), 0..12),
            nodes in proptest::collection::vec((0u32..4, 0u64..1 << 36, 0usize..4), 0..4),
            memory in 0u64..1 << 37,
        ) {
            let cpus = cpus.into_iter().map(|(a, b, c, d, e)| cpu(a, b, c, d, e)).collect();
            let mut seen = machine(cpus, &nodes, memory);
            seen.repair();
            prop_assert!(seen.cpus.windows(2).all(|w| w[0].id < w[1].id));
            prop_assert!(!seen.nodes.is_empty() && seen.nodes.windows(2).all(|w| w[0].id < w[1].id));
            let known: Vec<NodeId> = seen.nodes.iter().map(|n| n.id).collect();
            for a in &seen.cpus {
                prop_assert!(known.contains(&a.node));
                for b in &seen.cpus {
                    prop_assert!(a.llc != b.llc || a.node == b.node);
                    prop_assert!(a.core != b.core || a.package == b.package);
                }
            }
            let sum: u64 = seen.nodes.iter().map(|n| n.memory.0).sum();
            prop_assert!(sum as f64 <= seen.memory.0 as f64 * (1.0 + NODES_APART));
            prop_assert!(seen.nodes.iter().all(|n| n.distances.is_empty() || n.distances.len() == known.len()));
            let once = seen.clone();
            seen.repair();
            prop_assert_eq!(once.cpus, seen.cpus);
            prop_assert_eq!(once.nodes, seen.nodes);
        }
    }
}
