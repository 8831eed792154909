//! The host: its topology, memory, kernel, and what it can sense and do.

use crate::text_id;
use crate::units::{Bytes, CpuId, LlcId, NodeId};
use serde::{Deserialize, Serialize};

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

/// Whether a sensor or effector works here.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CapabilityState {
    /// Works.
    Available,
    /// Works in part; `detail` says what does not.
    Limited,
    /// Does not work here.
    Missing,
}

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
