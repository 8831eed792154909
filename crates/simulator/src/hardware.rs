//! Speeds of all workloads' threads from their CPUs, memory places, page sizes and neighbours.
//!
//! Units: nanoseconds, GHz = cycles per ns, GB/s = bytes per ns; events are per 1000 instructions. The equations are
//! the project's fit to published machines (`model-fit.md`, section 2, numbers in brackets). An instruction costs
//! `b·k + s` cycles with `k` threads on the core and `s` waiting cycles (1, 8). `s` comes from last-level cache misses (3)
//! at a latency by memory distance (2, 4), from lines of other chips' caches (4), and from page table walks (7). Queues
//! at memory controllers and links add latency by the traffic of all workloads (4 to 6). Traffic depends on speed:
//! Newton's method finds the fixed point. For one workload it equals the reference's bisection.
//!
//! Additions to the reference, which has one workload on like chips: routing by node for any machine shape, cache use
//! by other workloads' threads ([`Profile::footprint`]), and traffic of copied memory ([`Copying`]).

mod solve;
#[cfg(test)]
mod tests;

pub use solve::{Warm, solve, solve_with};

use homeostat_model::{Bytes, Counters};
use serde::{Deserialize, Serialize};

/// Kind of processor: which constants hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Generation {
    /// POWER7: 32 MB of last-level cache per chip.
    Power7,
    /// POWER7+: 80 MB, otherwise as POWER7.
    Power7Plus,
    /// A present two-socket server or one with many last-level caches (machine-model B.2, assumed).
    X86,
}

impl Generation {
    /// As people call it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Power7 => "POWER7",
            Self::Power7Plus => "POWER7+",
            Self::X86 => "x86-64",
        }
    }

    /// Its constants.
    pub fn constants(self) -> Constants {
        match self {
            Self::Power7 => POWER7,
            Self::Power7Plus => Constants {
                cache_bytes: 80.0 * MIB,
                ..POWER7
            },
            Self::X86 => X86,
        }
    }
}

const MIB: f64 = 1024.0 * 1024.0;
/// Last-level cache size for which a profile states its misses (POWER7's).
const REFERENCE_CACHE: f64 = 32.0 * MIB;

/// Constants of a processor generation.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Constants {
    /// Bytes of a cache line.
    pub line: f64,
    /// Bytes of last-level cache per chip.
    pub cache_bytes: f64,
    /// Unloaded latency of memory of the own node, ns.
    pub local_ns: f64,
    /// Latency of another node of the same board, ns.
    pub near_ns: f64,
    /// Latency of a node of another board, ns.
    pub far_ns: f64,
    /// A modified line from a cache of the own chip, ns.
    pub line_local_ns: f64,
    /// From another chip of the own node, ns.
    pub line_node_ns: f64,
    /// From a chip of another node of the same board, unloaded, ns.
    pub line_near_ns: f64,
    /// From a chip of another board, unloaded, ns.
    pub line_far_ns: f64,
    /// A miss that the prefetcher covered, ns.
    pub covered_ns: f64,
    /// A walk of the page table that finds its line in the cache, ns.
    pub walk_ns: f64,
    /// Bandwidth of a node's memory, GB/s.
    pub memory_gbps: f64,
    /// Service time of a memory controller, ns.
    pub memory_service_ns: f64,
    /// Bandwidth of a link between nodes of a board, GB/s per direction.
    pub near_gbps: f64,
    /// Its service time, ns.
    pub near_service_ns: f64,
    /// Bandwidth from other boards to a node, GB/s.
    pub far_gbps: f64,
    /// Its service time, ns.
    pub far_service_ns: f64,
    /// Translations that the TLB of a core holds, for small and for large pages.
    pub tlb_small: f64,
    /// For large pages.
    pub tlb_large: f64,
    /// Bytes of page table per page, as far as they take up cache (POWER: one line per page).
    pub table_bytes: f64,
    /// Share of the last-level cache that holds page table.
    pub table_cache_share: f64,
    /// Exponent of TLB coverage and of the cached page table.
    pub theta: f64,
    /// Exponent of misses in the size of the cache and in the number of footprints per cache.
    pub alpha: f64,
    /// Lines moved per exposed miss.
    pub tau: f64,
    /// Remaining prefetch when switched off, 0..1.
    pub prefetch_residue: f64,
}

/// Source: model-fit 3.1. Line, cache and translations are given, the rest is assumed unless noted.
const POWER7: Constants = Constants {
    line: 128.0,
    cache_bytes: REFERENCE_CACHE,
    local_ns: 115.0,
    near_ns: 230.0,
    // 340 to 375 fit P14 about equally well, 375 best.
    far_ns: 375.0,
    line_local_ns: 30.0,
    line_node_ns: 30.0,
    line_near_ns: 30.0 + 230.0 - 115.0,
    line_far_ns: 30.0 + 375.0 - 115.0,
    covered_ns: 12.0,
    walk_ns: 30.0,
    memory_gbps: 100.0,
    memory_service_ns: 25.0,
    // Fitted to P5 and P6; 22.4 raw in a vendor manual. Links serve bursts of three lines.
    near_gbps: 21.4,
    near_service_ns: 384.0 / 21.4,
    // Fitted to P14; 41 % of the raw figure in a vendor manual.
    far_gbps: 8.065,
    far_service_ns: 384.0 / 8.065,
    tlb_small: 512.0,
    tlb_large: 512.0,
    table_bytes: 128.0,
    // Chosen from .25 and .5.
    table_cache_share: 0.25,
    theta: 0.5,
    // Read from P14; used for P5, P6, P13 and the cache of POWER7+.
    alpha: 0.47,
    // Fitted to P8, by grid; 3 to 4 works.
    tau: 4.0,
    // Fitted to P3: 3 % of the traffic.
    prefetch_residue: 0.041,
};

/// Source: machine-model B.2, column x86: assumed, but for the line and the eight bytes of a page table entry. Missing
/// values are POWER7's or assumed (far, lines between the chips of a node).
const X86: Constants = Constants {
    line: 64.0,
    cache_bytes: 32.0 * MIB,
    local_ns: 90.0,
    near_ns: 145.0,
    far_ns: 220.0,
    line_local_ns: 15.0,
    line_node_ns: 80.0,
    line_near_ns: 100.0,
    line_far_ns: 175.0,
    covered_ns: 12.0,
    walk_ns: 35.0 / 3.0,
    memory_gbps: 200.0,
    memory_service_ns: 25.0,
    near_gbps: 40.0,
    near_service_ns: 25.0,
    far_gbps: 40.0,
    far_service_ns: 25.0,
    tlb_small: 1536.0,
    tlb_large: 1024.0,
    table_bytes: 8.0,
    table_cache_share: 0.25,
    theta: 0.5,
    alpha: 0.47,
    tau: 4.0,
    prefetch_residue: 0.041,
};

/// A program's demand per 1000 instructions. Rates are *exposed* events: already divided by their overlap.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Profile {
    /// Name.
    pub name: String,
    /// Cycles per instruction without any wait, per thread on the core.
    #[serde(default = "base_cycles")]
    pub b: f64,
    /// Misses of a 32 MB last-level cache that the thread waits for.
    pub m3: f64,
    /// Modified lines taken from other caches.
    #[serde(default)]
    pub mx: f64,
    /// Misses of the TLB when it covers nothing.
    #[serde(default)]
    pub mt: f64,
    /// Lines that the prefetcher fetches per remaining demand miss.
    #[serde(default = "prefetch_lines")]
    pub prefetch_lines: f64,
    /// Share of the demand misses that the prefetcher covers, 0..1.
    #[serde(default = "prefetch_covered")]
    pub prefetch_covered: f64,
    /// Whether instances each have a footprint in every cache they touch. If not, [`Demand::spread`] has no effect.
    #[serde(default)]
    pub several_instances: bool,
    /// Cache that a chip full of its threads takes from others, in footprints (0 = nothing).
    #[serde(default)]
    pub footprint: f64,
    /// Share of the sharing that placement can keep within a board, 0..1: most is within a group of threads.
    #[serde(default)]
    pub kin: f64,
    /// CPU share of the response time, 0..1; the rest does not depend on this machine.
    #[serde(default = "one")]
    pub cpu_share: f64,
    /// Instructions per unit of work.
    #[serde(default = "instructions_per_unit")]
    pub instructions_per_unit: f64,
    /// Instructions that threads spend waiting for each other grow as they run faster.
    #[serde(default)]
    pub spin: Option<Spin>,
    /// A pointer chase instead of a mix of instructions: an "instruction" is then one dependent load.
    #[serde(default)]
    pub chase: Option<Chase>,
    /// Memory it uses over and over, per instance.
    #[serde(default)]
    pub hot: Bytes,
}

fn base_cycles() -> f64 {
    0.9
}
/// Fitted to P3: 43 % of the traffic.
fn prefetch_lines() -> f64 {
    0.754
}
/// Assumed: "small increase of demand misses"; .05 equally good.
fn prefetch_covered() -> f64 {
    0.02
}
fn instructions_per_unit() -> f64 {
    1e6
}
fn one() -> f64 {
    1.0
}

/// Faster threads meet at locks more often: instructions per unit = stated · (reference / cpi) ^ exponent.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Spin {
    /// Cycles per instruction at which [`Profile::instructions_per_unit`] holds.
    pub reference: f64,
    /// Exponent; 0 = no spinning, 1 = all that is gained is spun away.
    pub exponent: f64,
}

/// A chase of dependent loads with a stride (the program `latency`; equation 10).
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Chase {
    /// Share of the loads that miss when each instance has a last-level cache for itself, 0..1.
    pub miss_share: f64,
    /// Bytes from one load to the next.
    pub stride: Bytes,
    /// A load that hits, ns.
    pub hit_ns: f64,
    /// Bandwidth of a node's memory for this stride, which hits few channels, GB/s.
    pub stride_gbps: f64,
}

impl Profile {
    /// A profile with the given misses and nothing else unusual.
    pub fn new(name: &str, m3: f64, mx: f64, mt: f64) -> Self {
        Self {
            name: name.to_owned(),
            b: base_cycles(),
            m3,
            mx,
            mt,
            prefetch_lines: prefetch_lines(),
            prefetch_covered: prefetch_covered(),
            several_instances: false,
            footprint: 0.0,
            kin: 0.0,
            cpu_share: 1.0,
            instructions_per_unit: instructions_per_unit(),
            spin: None,
            chase: None,
            hot: Bytes::ZERO,
        }
    }

    /// Instructions that one unit of work takes at this speed.
    pub fn instructions(&self, cpi: f64) -> f64 {
        match self.spin {
            Some(spin) if cpi > 0.0 && spin.reference > 0.0 => {
                self.instructions_per_unit * (spin.reference / cpi).powf(spin.exponent)
            }
            _ => self.instructions_per_unit,
        }
    }
}

/// Shares of accesses by distance; they add up to one.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Distances {
    /// To the own node (memory) or the own chip (lines of other caches).
    pub local: f64,
    /// To other nodes of the board.
    pub near: f64,
    /// To other boards.
    pub far: f64,
}

/// Distances of accesses, stated instead of derived, where measured.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Reach {
    /// Memory.
    pub memory: Distances,
    /// Modified lines in other caches.
    pub lines: Distances,
}

/// One workload at one moment. Short vectors are filled with zeros; NaN counts as zero.
#[derive(Clone, Debug, PartialEq)]
pub struct Demand {
    /// Its demand per instruction.
    pub profile: Profile,
    /// Mean number of running threads by chip.
    pub running: Vec<f64>,
    /// Mean threads per core that runs its threads (k), up to the threads per core. Below 1 only where core use stands
    /// for k, as in the reference's P11 at 60 % busy.
    pub threads_per_core: f64,
    /// Share of its hot memory by node; scaled to add up to one. All zero: evenly.
    pub memory: Vec<f64>,
    /// Hot memory in bytes: what the TLB would have to cover.
    pub hot: f64,
    /// Share of the hot memory on large pages, 0..1.
    pub large_share: f64,
    /// Share of its running threads on chips whose prefetcher is on, 0..1.
    pub prefetch: f64,
    /// Number of chips that each of several instances spans (S), at least 1.
    pub spread: f64,
    /// Share of its running threads whose instance has all memory on their node, beyond what `running` and `memory`
    /// imply. 1 = every instance placed for itself, 0 = no relation.
    pub aligned: f64,
    /// Whether other caches' lines are aligned like memory (instances share internally), or come from anywhere.
    pub own_lines: bool,
    /// Degree to which threads that share data are together by board, 0..1 (effect: [`Profile::kin`]).
    pub grouped: f64,
    /// Distances of accesses, if stated. `memory` then only says which nodes deliver.
    pub reach: Option<Reach>,
}

impl Demand {
    /// A workload with small pages, prefetch on, threads alone on their cores, memory independent of threads.
    pub fn new(profile: Profile, running: Vec<f64>, memory: Vec<f64>) -> Self {
        let hot = profile.hot.0 as f64;
        Self {
            profile,
            running,
            threads_per_core: 1.0,
            memory,
            hot,
            large_share: 0.0,
            prefetch: 1.0,
            spread: 1.0,
            aligned: 0.0,
            own_lines: true,
            grouped: 0.0,
            reach: None,
        }
    }
}

/// Memory being copied between nodes. Every byte is read from one node's memory, crosses the link once, and is written
/// to the other's (machine-model B.1 point 9).
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Copying {
    /// Node that it comes from.
    pub from: usize,
    /// Node that it goes to.
    pub to: usize,
    /// Bytes per nanosecond = GB/s.
    pub gbps: f64,
}

/// How fast a workload runs.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Rate {
    /// Cycles per instruction of a running thread; for a chase, cycles per load.
    pub cpi: f64,
    /// Instructions per nanosecond of a running thread.
    pub instructions_per_ns: f64,
    /// Waiting cycles within `cpi`.
    pub stall: f64,
    /// Share of memory accesses to the own node, to other nodes of the board, to other boards.
    pub local: f64,
    /// To other nodes of the board.
    pub near: f64,
    /// To other boards.
    pub far: f64,
    /// Mean latency of a memory access with queues, ns.
    pub latency_ns: f64,
    /// Mean latency of a line from another cache with queues, ns.
    pub line_ns: f64,
    /// Mean length of a walk of the page table, ns.
    pub walk_ns: f64,
    /// TLB misses per 1000 instructions.
    pub walks: f64,
    /// Share of the walks that find the page table in the cache, 0..1.
    pub walks_cached: f64,
    /// Last-level-cache misses per 1000 instructions (per 1000 loads of a chase).
    pub misses: f64,
    /// The processor counters.
    pub counters: Counters,
}

/// The state of the machine.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Solution {
    /// Per demand, in order.
    pub rates: Vec<Rate>,
    /// Use of each node's memory controllers, 0..1.
    pub memory_use: Vec<f64>,
    /// Use of the busiest link from each node to another one of its board, 0..1.
    pub near_use: Vec<f64>,
    /// Use of each node's link to other boards, 0..1.
    pub far_use: Vec<f64>,
    /// Whether the equations were solved to a relative error of 1e-10; if not, the rates are the best found.
    pub converged: bool,
}
