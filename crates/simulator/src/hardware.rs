//! How fast the threads of each workload run, given where they run, where their memory lies, how large its pages are
//! and who else is there.
//!
//! Units: nanoseconds, GHz = cycles per nanosecond, GB/s = bytes per nanosecond; events are per 1000 instructions.
//!
//! The equations are those of the project's fit to published machines (`model-fit.md`, section 2, numbers in brackets
//! below): an instruction costs `b·k + s` cycles, `k` threads on the core, `s` the cycles it waits (1, 8); `s` comes
//! from misses of the last-level cache (3) at a latency that depends on where memory is (2, 4), from lines taken out of
//! other chips' caches (4), and from walks of the page table (7). Latency contains queues at memory controllers and
//! links, whose length depends on the traffic of all workloads (4 to 6), which depends on how fast they run: a fixed
//! point over all workloads, found by Newton's method. For one workload it is the same number as the reference's
//! bisection.
//!
//! What is added to the reference, because it has one workload on like chips and nothing else: traffic is routed node
//! by node, so that machines of any shape and several workloads share controllers and links; other workloads' threads
//! on a chip take part of its cache ([`Profile::footprint`]); memory that is being copied takes part of controllers and
//! links ([`Copying`]).

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
/// The misses of a profile are stated for a last-level cache of this size (POWER7's).
const REFERENCE_CACHE: f64 = 32.0 * MIB;

/// What a processor generation brings along.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Constants {
    /// Bytes of a cache line.
    pub line: f64,
    /// Bytes of last-level cache per chip.
    pub cache_bytes: f64,
    /// Unloaded latency of memory of the own node, ns.
    pub local_ns: f64,
    /// Of another node of the same board, ns.
    pub near_ns: f64,
    /// Of a node of another board, ns.
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
    /// What a node's memory can deliver, GB/s.
    pub memory_gbps: f64,
    /// Service time of a memory controller, ns.
    pub memory_service_ns: f64,
    /// What a link from one node to another of its board can carry, GB/s per direction.
    pub near_gbps: f64,
    /// Its service time, ns.
    pub near_service_ns: f64,
    /// What a node can get from other boards, GB/s.
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
    /// What remains of prefetching when it is switched off, 0..1.
    pub prefetch_residue: f64,
}

/// Source: model-fit 3.1. Line, cache and translations are given, the rest is assumed where nothing else is said.
const POWER7: Constants = Constants {
    line: 128.0,
    cache_bytes: REFERENCE_CACHE,
    local_ns: 115.0,
    near_ns: 230.0,
    // 340 to 375 fit P14 about equally, 375 best.
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

/// Source: machine-model B.2, column x86, assumed but for the line and the eight bytes of an entry of a page table. What it does not
/// have is taken over from POWER7 or assumed (far, lines between the chips of a node).
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

/// What a program asks of the machine, per 1000 instructions of its work. Rates are *exposed* events: already divided
/// by how many of them overlap.
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
    /// Whether it is several instances, each with a footprint of its own in every cache it touches. If not (one shared
    /// footprint), [`Demand::spread`] has no effect.
    #[serde(default)]
    pub several_instances: bool,
    /// How much of a chip's cache a chip full of its threads takes from others, in footprints (0 = nothing).
    #[serde(default)]
    pub footprint: f64,
    /// Share of the sharing between threads that placement can keep within a board, 0..1 (threads of one group share
    /// more with each other than with the rest).
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
    /// Share of the loads that miss the last-level cache when each instance has a cache for itself, 0..1.
    pub miss_share: f64,
    /// Bytes from one load to the next.
    pub stride: Bytes,
    /// A load that hits, ns.
    pub hit_ns: f64,
    /// What a node's memory can deliver to this stride, which hits few of its channels, GB/s.
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

/// Where accesses go, stated instead of derived, for programs of which that was measured.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Reach {
    /// Memory.
    pub memory: Distances,
    /// Modified lines in other caches.
    pub lines: Distances,
}

/// One workload at one moment. Vectors that are too short are filled with zeros; numbers that are none count as zero.
#[derive(Clone, Debug, PartialEq)]
pub struct Demand {
    /// What it does.
    pub profile: Profile,
    /// Mean number of running threads by chip.
    pub running: Vec<f64>,
    /// Mean number of threads that run on a core on which its threads run (k), up to the threads per core. Below 1 only
    /// where use of a core stands for k, as in the reference's P11 at 60 % busy.
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
    /// Share of its running threads whose instance has all its memory on the threads' node, beyond what `running` and
    /// `memory` of the workload as a whole imply: 1 = every instance placed for itself, 0 = no relation.
    pub aligned: f64,
    /// Whether lines of other caches are aligned as memory is: instances share lines among themselves only. If not, they
    /// come from wherever the workload runs.
    pub own_lines: bool,
    /// How far threads that share data were brought together by board, 0..1 (effect: [`Profile::kin`]).
    pub grouped: f64,
    /// Where accesses go, if that is stated; then `memory` only says which nodes deliver, not how far they are.
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

/// Memory that is being copied from node to node, by whoever moves pages. Every byte is read from the memory of the one
/// node, crosses the link once, and is written to the memory of the other (machine-model B.1 point 9).
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
    /// Of `cpi`, cycles spent waiting.
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
    /// What processor counters would show.
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
