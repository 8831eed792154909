//! Parts of a simulated machine: chips, cores, hardware threads, nodes, boards, memory and page sizes. A *chip* is a
//! last-level cache domain. A *node* has memory of its own and holds one chip (POWER7) or several (EPYC). *Boards*
//! (drawers, books) group nodes: nodes of other boards are farther.

use crate::hardware::{Constants, Generation};
use homeostat_model::{
    Bytes, Capability, CapabilityId, CapabilityState, Cpu, CpuId, LlcId, Machine, NodeId, NumaNode,
};
use serde::{Deserialize, Serialize};
use std::sync::LazyLock;
use thiserror::Error;

/// Most hardware threads a layout may have.
pub const CPUS_MAX: u64 = 65_536;
/// Most hardware threads per core (POWER8 and later have eight).
pub const THREADS_PER_CORE_MAX: u32 = 8;
/// Distances of the own node, another of the board, another board, as in `/sys/devices/system/node/nodeN/distance`.
pub const DISTANCES: [u32; 3] = [10, 20, 40];

/// One last-level-cache domain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Chip {
    /// Cores, at least one.
    pub cores: u32,
    /// The node whose memory is local, an index into [`Layout::node_memory`].
    pub node: u32,
    /// The node's board (drawer, book), the same for all chips of a node.
    #[serde(default)]
    pub board: u32,
}

/// A machine of any shape. CPUs count by chip, core and thread: with four threads per core, 0 to 3 are core 0.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Layout {
    /// Name, as in `homeostat-lab --list`.
    pub name: String,
    /// The constants' generation.
    pub generation: Generation,
    /// Clock in GHz (cycles per nanosecond), 0.1 to 10.
    pub ghz: f64,
    /// Hardware threads per core, 1 to [`THREADS_PER_CORE_MAX`].
    pub threads_per_core: u32,
    /// The chips in order of their CPU numbers.
    pub chips: Vec<Chip>,
    /// Memory of each node.
    pub node_memory: Vec<Bytes>,
    /// Size of a base page, a power of two.
    pub small_page: Bytes,
    /// Size of a large page, a power of two above [`Self::small_page`].
    pub large_page: Bytes,
    /// Whether the machine is a partition of a shared processor pool: a core with a running thread is consumed whole.
    #[serde(default)]
    pub shared_partition: bool,
    /// Whether a large page that several processes map can be split, as on published machines (AIX on POWER). Linux
    /// cannot do it from outside, so the default is off.
    #[serde(default)]
    pub split_shared: bool,
}

/// Why a layout is no machine.
#[derive(Clone, Debug, PartialEq, Error)]
pub enum LayoutError {
    /// No chip.
    #[error("a machine needs at least one chip")]
    NoChips,
    /// A chip without cores.
    #[error("chip {chip} has no cores")]
    NoCores {
        /// Index of the chip.
        chip: usize,
    },
    /// Too many hardware threads in all.
    #[error("{cpus} hardware threads are more than the {CPUS_MAX} that can be simulated")]
    TooManyCpus {
        /// How many.
        cpus: u64,
    },
    /// Hardware threads per core out of range.
    #[error("{threads} threads per core: must be 1 to {THREADS_PER_CORE_MAX}")]
    ThreadsPerCore {
        /// The given number.
        threads: u32,
    },
    /// A clock that is no clock.
    #[error("a clock of {ghz} GHz: must be 0.1 to 10")]
    Clock {
        /// The given frequency.
        ghz: f64,
    },
    /// A chip names a node that has no memory entry.
    #[error("chip {chip} is on node {node}, but `node_memory` has {nodes} entries")]
    NoSuchNode {
        /// Index of the chip.
        chip: usize,
        /// The named node.
        node: u32,
        /// How many nodes there are.
        nodes: usize,
    },
    /// Two chips of one node on different boards.
    #[error("node {node} is on board {first} and on board {second}: a node is on one board")]
    NodeOnTwoBoards {
        /// The node.
        node: u32,
        /// Board named first.
        first: u32,
        /// Board named later.
        second: u32,
    },
    /// A node that no chip belongs to.
    #[error("node {node} has memory but no chip")]
    NodeWithoutChip {
        /// The node.
        node: usize,
    },
    /// A node without memory.
    #[error("node {node} has {memory} of memory, less than one large page")]
    NoMemory {
        /// The node.
        node: usize,
        /// Its memory.
        memory: Bytes,
    },
    /// Page sizes that cannot be.
    #[error(
        "pages of {small} and {large}: both must be powers of two, the first at least 4 KiB and below the second"
    )]
    PageSizes {
        /// The base page.
        small: Bytes,
        /// The large page.
        large: Bytes,
    },
    /// A name that nobody knows.
    #[error("no machine is called `{name}`; there are: {}", names().join(", "))]
    Unknown {
        /// The requested name.
        name: String,
    },
}

impl Layout {
    /// Checks the shape. Other methods accept any layout, but a machine needs a checked one.
    pub fn check(&self) -> Result<(), LayoutError> {
        if self.chips.is_empty() {
            return Err(LayoutError::NoChips);
        }
        if self.threads_per_core == 0 || self.threads_per_core > THREADS_PER_CORE_MAX {
            return Err(LayoutError::ThreadsPerCore {
                threads: self.threads_per_core,
            });
        }
        if !(0.1..=10.0).contains(&self.ghz) {
            return Err(LayoutError::Clock { ghz: self.ghz });
        }
        let mut boards: Vec<Option<u32>> = vec![None; self.node_memory.len()];
        let mut cpus = 0_u64;
        for (index, chip) in self.chips.iter().enumerate() {
            if chip.cores == 0 {
                return Err(LayoutError::NoCores { chip: index });
            }
            cpus += u64::from(chip.cores) * u64::from(self.threads_per_core);
            let Some(board) = boards.get_mut(chip.node as usize) else {
                return Err(LayoutError::NoSuchNode {
                    chip: index,
                    node: chip.node,
                    nodes: self.node_memory.len(),
                });
            };
            match *board {
                Some(first) if first != chip.board => {
                    return Err(LayoutError::NodeOnTwoBoards {
                        node: chip.node,
                        first,
                        second: chip.board,
                    });
                }
                _ => *board = Some(chip.board),
            }
        }
        if cpus > CPUS_MAX {
            return Err(LayoutError::TooManyCpus { cpus });
        }
        if let Some(node) = boards.iter().position(Option::is_none) {
            return Err(LayoutError::NodeWithoutChip { node });
        }
        let (small, large) = (self.small_page.0, self.large_page.0);
        if small < 4096 || !small.is_power_of_two() || !large.is_power_of_two() || large <= small {
            return Err(LayoutError::PageSizes {
                small: self.small_page,
                large: self.large_page,
            });
        }
        for (node, memory) in self.node_memory.iter().enumerate() {
            if *memory < self.large_page {
                return Err(LayoutError::NoMemory {
                    node,
                    memory: *memory,
                });
            }
        }
        Ok(())
    }

    /// How many hardware threads there are.
    pub fn cpus(&self) -> u32 {
        self.chips.iter().fold(0_u32, |sum, c| {
            sum.saturating_add(c.cores.saturating_mul(self.threads_per_core))
        })
    }

    /// All memory.
    pub fn memory(&self) -> Bytes {
        self.node_memory.iter().copied().sum()
    }

    /// First CPU of the chip: its [`LlcId`]. `None` when there is no such chip.
    pub fn llc_of_chip(&self, chip: usize) -> Option<LlcId> {
        self.cpus_of_chip(chip).map(|r| LlcId(r.start))
    }

    #[cfg(test)]
    fn chip_of_cpu(&self, cpu: CpuId) -> Option<usize> {
        let mut first = 0_u32;
        self.chips.iter().position(|c| {
            let end = first.saturating_add(c.cores.saturating_mul(self.threads_per_core));
            let here = (first..end).contains(&cpu.0);
            first = end;
            here
        })
    }

    /// The CPUs of a chip; `None` when there is no such chip.
    pub fn cpus_of_chip(&self, chip: usize) -> Option<std::ops::Range<u32>> {
        let mut first = 0_u32;
        for (index, c) in self.chips.iter().enumerate() {
            let end = first.saturating_add(c.cores.saturating_mul(self.threads_per_core));
            if index == chip {
                return Some(first..end);
            }
            first = end;
        }
        None
    }

    /// Board of a node; boards decide what is near. `None` when there is no such node.
    pub fn board_of_node(&self, node: u32) -> Option<u32> {
        self.chips.iter().find(|c| c.node == node).map(|c| c.board)
    }

    /// Distance between two nodes in the kernel's scale (see [`DISTANCES`]).
    pub fn distance(&self, from: u32, to: u32) -> u32 {
        if from == to {
            DISTANCES[0]
        } else if self.board_of_node(from) == self.board_of_node(to) {
            DISTANCES[1]
        } else {
            DISTANCES[2]
        }
    }

    /// The constants of its generation.
    pub fn constants(&self) -> Constants {
        self.generation.constants()
    }

    /// The machine as the sensors report it, with every capability that the simulated hardware has.
    pub fn machine(&self) -> Result<Machine, LayoutError> {
        self.check()?;
        let mut cpus = Vec::with_capacity(self.cpus() as usize);
        let mut first = 0_u32;
        for chip in &self.chips {
            for core in 0..chip.cores {
                for thread in 0..self.threads_per_core {
                    cpus.push(Cpu {
                        id: CpuId(first + core * self.threads_per_core + thread),
                        core: first + core * self.threads_per_core,
                        package: chip.node,
                        llc: LlcId(first),
                        node: NodeId(chip.node),
                        set_aside: false,
                    });
                }
            }
            first += chip.cores * self.threads_per_core;
        }
        let count = self.node_memory.len() as u32;
        let nodes = self
            .node_memory
            .iter()
            .enumerate()
            .map(|(node, memory)| NumaNode {
                id: NodeId(node as u32),
                memory: *memory,
                distances: (0..count).map(|to| self.distance(node as u32, to)).collect(),
            })
            .collect();
        let capability = |id: &str, detail: &str| Capability {
            id: CapabilityId::new(id),
            state: CapabilityState::Available,
            detail: detail.to_owned(),
            cost_of_absence: String::new(),
            remedy: String::new(),
        };
        let mut capabilities = vec![
            capability(
                "locality",
                "the simulated machine knows where threads and pages are",
            ),
            capability("placement.threads", "affinity masks of simulated threads"),
            capability("placement.pages", "simulated pages move between nodes"),
            capability(
                "placement.pages.spread",
                "simulated pages are shared out among several nodes",
            ),
            capability("placement.pages.large", "simulated large pages move as they are"),
            capability(
                "placement.threads.memory",
                "simulated threads and their pages go to a place in one change",
            ),
            capability(
                "placement.threads.split",
                "each process of a simulated program is kept on a chip of its own",
            ),
            capability("prefetch.switch", "per chip"),
            capability("process_madvise.collapse", "simulated pages become large"),
            capability("process_madvise.split", "simulated large pages are split"),
        ];
        if self.split_shared {
            capabilities.push(capability(
                "process_madvise.split.shared",
                "simulated large pages are split whoever maps them",
            ));
        }
        if self.shared_partition {
            capabilities.push(capability(
                "cores.shared_pool",
                "cores that the partition leaves idle go back to a shared pool",
            ));
        }
        Ok(Machine {
            kernel: "simulated".to_owned(),
            cpu_model: format!("{} at {} GHz (simulated)", self.generation.name(), self.ghz),
            hypervisor: None,
            cpus,
            nodes,
            memory: self.memory(),
            page_size: self.small_page,
            huge_page_size: self.large_page,
            llc_size: Bytes(self.constants().cache_bytes as u64),
            boot_id: format!("simulated-{}", self.name),
            capabilities,
        })
    }

    /// The machine of that name: one per published row, and some of today.
    pub fn named(name: &str) -> Result<Self, LayoutError> {
        let found = MACHINES.iter().find(|layout| layout.name == name).cloned();
        found.ok_or_else(|| LayoutError::Unknown {
            name: name.to_owned(),
        })
    }
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct Shipped {
    machines: Vec<Layout>,
}

/// Part of the program; a test proves that it is readable.
static MACHINES: LazyLock<Vec<Layout>> = LazyLock::new(|| {
    let shipped: Shipped = toml::from_str(include_str!("../data/machines.toml")).unwrap_or_default();
    shipped.machines
});

/// The names that [`Layout::named`] knows.
pub fn names() -> Vec<&'static str> {
    MACHINES.iter().map(|layout| layout.name.as_str()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_named_machine_is_sound_and_numbered_thread_by_thread() {
        assert_eq!(names().len(), 21);
        for name in names() {
            let layout = Layout::named(name).unwrap();
            assert_eq!(layout.name, name);
            let machine = layout.machine().unwrap_or_else(|e| panic!("{name}: {e}"));
            assert_eq!(machine.cpus.len(), layout.cpus() as usize);
            for (index, cpu) in machine.cpus.iter().enumerate() {
                assert_eq!(cpu.id.0 as usize, index);
                let chip = layout.chip_of_cpu(cpu.id).unwrap();
                assert_eq!(layout.llc_of_chip(chip), Some(cpu.llc));
                assert_eq!(cpu.core, cpu.id.0 - cpu.id.0 % layout.threads_per_core);
                assert!(layout.cpus_of_chip(chip).unwrap().contains(&cpu.id.0));
            }
            assert_eq!(layout.chip_of_cpu(CpuId(layout.cpus())), None);
            for node in &machine.nodes {
                assert_eq!(node.distances[node.id.0 as usize], 10);
            }
        }
        assert!(matches!(
            Layout::named("pdp-11"),
            Err(LayoutError::Unknown { .. })
        ));
    }

    #[test]
    fn domain_one_of_the_first_row_starts_at_cpu_forty_and_boards_are_far() {
        let p1 = Layout::named("power7-10+6").unwrap();
        assert_eq!(p1.cpus_of_chip(1), Some(40..64));
        assert_eq!(p1.distance(0, 1), 20);
        assert_eq!(Layout::named("redbook-16").unwrap().distance(0, 1), 40);
    }

    #[test]
    fn what_is_no_machine_is_refused_with_a_reason() {
        let good = Layout::named("small-2n").unwrap();
        let broken = |change: fn(&mut Layout)| {
            let mut layout = good.clone();
            change(&mut layout);
            layout.check().unwrap_err()
        };
        assert_eq!(broken(|l| l.chips.clear()), LayoutError::NoChips);
        assert_eq!(broken(|l| l.chips[1].cores = 0), LayoutError::NoCores { chip: 1 });
        assert_eq!(
            broken(|l| l.threads_per_core = 9),
            LayoutError::ThreadsPerCore { threads: 9 }
        );
        assert!(matches!(broken(|l| l.ghz = f64::NAN), LayoutError::Clock { .. }));
        assert_eq!(
            broken(|l| l.chips[1].node = 2),
            LayoutError::NoSuchNode {
                chip: 1,
                node: 2,
                nodes: 2
            }
        );
        assert_eq!(
            broken(|l| {
                l.chips[1].node = 0;
                l.chips[1].board = 1;
            }),
            LayoutError::NodeOnTwoBoards {
                node: 0,
                first: 0,
                second: 1
            }
        );
        assert_eq!(
            broken(|l| l.chips[1].node = 0),
            LayoutError::NodeWithoutChip { node: 1 }
        );
        assert!(matches!(
            broken(|l| l.node_memory[1] = Bytes(1)),
            LayoutError::NoMemory { node: 1, .. }
        ));
        assert!(matches!(
            broken(|l| l.large_page = l.small_page),
            LayoutError::PageSizes { .. }
        ));
        assert!(matches!(
            broken(|l| l.chips[0].cores = 40_000),
            LayoutError::TooManyCpus { .. }
        ));
    }
}
