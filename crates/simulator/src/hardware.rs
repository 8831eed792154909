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

use crate::layout::Layout;
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
    /// Number of chips that each of several instances spans (S), at least 1; see [`span`].
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

/// Effective number of places among which shares are spread: 1 = all in one, n = evenly over n.
pub fn span(shares: &[f64]) -> f64 {
    let sum: f64 = shares.iter().sum();
    let squares: f64 = shares.iter().map(|s| s * s).sum();
    if squares > 0.0 { sum * sum / squares } else { 1.0 }
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

/// Work space and last result, so that the next, similar, question is answered faster. Carries no state that changes
/// an answer by more than the accuracy of the solution.
#[derive(Clone, Debug, Default)]
pub struct Warm {
    chips: Vec<crate::layout::Chip>,
    generation: Option<Generation>,
    /// For each node: nodes of its board other than itself.
    neighbours: Vec<Vec<usize>>,
    /// For each node: nodes of other boards.
    strangers: Vec<Vec<usize>>,
    board: Vec<u32>,
    /// Number of the link from node to node, row by row; `NONE` where there is none.
    link: Vec<usize>,
    /// Service time by resource: memory of each node, far link of each node, near links.
    service: Vec<f64>,
    /// Instructions per cycle of each workload at the last solution.
    speed: Vec<f64>,
    // scratch, by workload or by resource × workload
    fixed: Vec<f64>,
    cycles: Vec<f64>,
    delay: Vec<f64>,
    load: Vec<f64>,
    memory_way: Vec<f64>,
    line_way: Vec<f64>,
    used: Vec<bool>,
    active: Vec<usize>,
    rho: Vec<f64>,
    /// Use of each resource by copying, of which the workloads have the rest.
    copied: Vec<f64>,
    queue: Vec<f64>,
    slope: Vec<f64>,
    residual: Vec<f64>,
    matrix: Vec<f64>,
    step: Vec<f64>,
    trial: Vec<f64>,
    groups: Vec<Group>,
    node_share: Vec<f64>,
    memory: Vec<f64>,
    memory_in: Vec<f64>,
}

const NONE: usize = usize::MAX;

/// What is fixed of one workload while the fixed point is sought.
#[derive(Clone, Copy, Debug, Default)]
struct Group {
    threads_per_core: f64,
    m3: f64,
    mx: f64,
    mt: f64,
    covered: f64,
    lines: f64,
    cached: f64,
    /// Walks or loads per load of a chase, 1 or more.
    factor: f64,
    local: f64,
    near: f64,
    far: f64,
    line_local: f64,
    line_node: f64,
    line_near: f64,
    line_far: f64,
    memory_ns: f64,
    line_ns: f64,
}

fn sane(x: f64) -> f64 {
    if x.is_finite() && x > 0.0 { x } else { 0.0 }
}
fn share(x: f64) -> f64 {
    sane(x).min(1.0)
}
fn at(v: &[f64], i: usize) -> f64 {
    sane(v.get(i).copied().unwrap_or(0.0))
}

impl Warm {
    fn prepare(&mut self, layout: &Layout, c: &Constants) {
        if self.chips == layout.chips && self.generation == Some(layout.generation) {
            return;
        }
        self.chips.clone_from(&layout.chips);
        self.generation = Some(layout.generation);
        let nodes = layout
            .chips
            .iter()
            .map(|c| c.node as usize + 1)
            .max()
            .unwrap_or(0);
        self.board = (0..nodes)
            .map(|n| layout.board_of_node(n as u32).unwrap_or(0))
            .collect();
        let of = |same: bool, a: usize, board: &[u32]| -> Vec<usize> {
            (0..nodes)
                .filter(|b| *b != a && (board[a] == board[*b]) == same)
                .collect()
        };
        self.neighbours = (0..nodes).map(|a| of(true, a, &self.board)).collect();
        self.strangers = (0..nodes).map(|a| of(false, a, &self.board)).collect();
        self.service = vec![c.memory_service_ns; nodes];
        self.service.resize(2 * nodes, c.far_service_ns);
        self.link = vec![NONE; nodes * nodes];
        for a in 0..nodes {
            for b in &self.neighbours[a] {
                self.link[a * nodes + b] = self.service.len();
                self.service.push(c.near_service_ns);
            }
        }
        self.speed.clear();
    }
}

/// Solves for the speed of every workload. `layout` should be a checked one ([`Layout::check`]).
pub fn solve(layout: &Layout, demands: &[Demand], warm: &mut Warm) -> Solution {
    solve_with(layout, demands, &[], warm)
}

/// As [`solve`], while memory is being copied. All copies together get at most half of a controller or
/// link; the workloads share the rest.
pub fn solve_with(layout: &Layout, demands: &[Demand], copies: &[Copying], warm: &mut Warm) -> Solution {
    let c = layout.constants();
    warm.prepare(layout, &c);
    let count = demands.len();
    let nodes = warm.board.len();
    let resources = warm.service.len();
    let w = &mut *warm;
    for (v, n) in [
        (&mut w.fixed, count),
        (&mut w.cycles, count),
        (&mut w.delay, resources * count),
        (&mut w.load, resources * count),
        (&mut w.memory_way, resources * count),
        (&mut w.line_way, resources * count),
        (&mut w.rho, resources),
        (&mut w.copied, resources),
        (&mut w.queue, resources),
        (&mut w.slope, resources),
        (&mut w.residual, count),
        (&mut w.matrix, count * count),
        (&mut w.step, count),
        (&mut w.trial, count),
    ] {
        v.clear();
        v.resize(n, 0.0);
    }
    w.used.clear();
    w.used.resize(resources, false);
    w.groups.clear();
    for (g, demand) in demands.iter().enumerate() {
        let group = describe(layout, &c, demands, g, w, nodes, count);
        w.fixed[g] = fixed_part(&c, layout.ghz, demand, &group);
        w.groups.push(group);
    }
    charge_copies(&c, copies, w, nodes);
    w.active.clear();
    w.active.extend((0..resources).filter(|r| w.used[*r]));
    let converged = fixed_point(w);

    let mut solution = Solution {
        converged,
        ..Solution::default()
    };
    solution.memory_use.extend(w.rho.iter().take(nodes).copied());
    solution
        .far_use
        .extend(w.rho.iter().skip(nodes).take(nodes).copied());
    solution.near_use.extend((0..nodes).map(|a| {
        w.neighbours[a]
            .iter()
            .map(|b| w.rho[w.link[a * nodes + b]])
            .fold(0.0, f64::max)
    }));
    for (g, demand) in demands.iter().enumerate() {
        solution.rates.push(rate(&c, layout.ghz, demand, w, g, count));
    }
    solution
}

/// Most of a controller or link that copying takes from the workloads: it is a program among others, and at a full link they
/// share alike (assumed).
const COPY_SHARE_MAX: f64 = 0.5;

/// Adds the use of every resource by copying. Links are numbered by who asks: the copier runs where the memory goes to.
fn charge_copies(c: &Constants, copies: &[Copying], w: &mut Warm, nodes: usize) {
    for copy in copies.iter().filter(|k| k.from < nodes && k.to < nodes) {
        let gbps = sane(copy.gbps);
        let mut add = |resource: usize, capacity: f64| {
            w.copied[resource] = (w.copied[resource] + gbps / capacity).min(COPY_SHARE_MAX);
            w.used[resource] = true;
        };
        add(copy.from, c.memory_gbps);
        add(copy.to, c.memory_gbps);
        if copy.from != copy.to {
            match w.link.get(copy.to * nodes + copy.from) {
                Some(link) if *link != NONE => add(*link, c.near_gbps),
                _ => add(nodes + copy.to, c.far_gbps),
            }
        }
    }
}

/// The parts of one workload that do not depend on queues, and its rows of `delay` (cycles per instruction for each ns
/// of queue) and `load` (use of a resource times cycles per instruction).
fn describe(
    layout: &Layout,
    c: &Constants,
    demands: &[Demand],
    g: usize,
    w: &mut Warm,
    nodes: usize,
    count: usize,
) -> Group {
    let demand = &demands[g];
    let p = &demand.profile;
    let chips = layout.chips.len();
    let running: f64 = (0..chips).map(|i| at(&demand.running, i)).sum();
    // A workload at rest is asked how fast it would be on any core.
    let on = |i: usize| {
        if running > 0.0 {
            at(&demand.running, i) / running
        } else {
            1.0 / chips as f64
        }
    };
    let total_memory: f64 = (0..nodes).map(|n| at(&demand.memory, n)).sum();
    w.memory.clear();
    w.memory.extend((0..nodes).map(|n| {
        if total_memory > 0.0 {
            at(&demand.memory, n) / total_memory
        } else {
            1.0 / nodes as f64
        }
    }));
    w.node_share.clear();
    w.node_share.resize(nodes, 0.0);
    w.memory_in.clear();
    w.memory_in.resize(nodes, 0.0);

    let aligned = share(demand.aligned);
    let own_lines = if demand.own_lines { aligned } else { 0.0 };
    let mut group = Group {
        threads_per_core: sane(demand.threads_per_core).clamp(0.1, f64::from(layout.threads_per_core.max(1))),
        ..Group::default()
    };
    // (3) the cache: size, instances per cache, other workloads
    let mut crowding = 0.0;
    for (i, chip) in layout.chips.iter().enumerate() {
        let mine = on(i);
        if mine <= 0.0 {
            continue;
        }
        w.node_share[chip.node as usize] += mine;
        group.line_local += mine * (own_lines + (1.0 - own_lines) * mine);
        let threads = f64::from(chip.cores) * f64::from(layout.threads_per_core);
        let others: f64 = demands
            .iter()
            .enumerate()
            .filter(|(h, d)| *h != g && d.profile.footprint > 0.0)
            .map(|(_, d)| sane(d.profile.footprint) * (at(&d.running, i) / threads).min(1.0))
            .sum();
        crowding += mine
            * if others > 0.0 {
                (1.0 + others).powf(c.alpha)
            } else {
                1.0
            };
    }
    let mut cache = crowding;
    if p.several_instances {
        cache *= sane(demand.spread).max(1.0).powf(c.alpha);
    }
    if c.cache_bytes != REFERENCE_CACHE {
        cache *= (c.cache_bytes / REFERENCE_CACHE).powf(-c.alpha);
    }
    group.m3 = sane(p.m3) / 1000.0 * cache;
    group.mx = sane(p.mx) / 1000.0;
    // (6) prefetch
    let prefetch = share(demand.prefetch);
    let left = prefetch + (1.0 - prefetch) * c.prefetch_residue;
    group.covered = share(p.prefetch_covered) * left;
    group.lines = sane(p.prefetch_lines) * left;
    // (7) TLB and cached page table
    let large = share(demand.large_share);
    let (small_page, large_page) = (
        layout.small_page.0.max(1) as f64,
        layout.large_page.0.max(1) as f64,
    );
    let hot = sane(demand.hot);
    group.cached = 1.0;
    group.factor = 1.0;
    if hot > 0.0 {
        let miss = |entries: f64, page: f64| 1.0 - (entries * page / hot).min(1.0).powf(c.theta);
        group.mt = sane(p.mt) / 1000.0
            * ((1.0 - large) * miss(c.tlb_small, small_page) + large * miss(c.tlb_large, large_page));
        let table = c.table_bytes * hot * ((1.0 - large) / small_page + large / large_page);
        group.cached = (c.table_cache_share * c.cache_bytes / table)
            .min(1.0)
            .powf(c.theta);
    }
    if let Some(chase) = p.chase {
        group.m3 = (share(chase.miss_share) * cache).min(1.0);
        group.mx = 0.0;
        group.mt = 0.0;
        let stride = chase.stride.0 as f64;
        group.factor =
            1.0 + (1.0 - large) * (stride / small_page).min(1.0) + large * (stride / large_page).min(1.0);
    }

    // (2, 5) where memory accesses and lines go
    let ghz = layout.ghz;
    let (memory_delay, memory_load, line_delay, line_load, capacity) = match p.chase {
        Some(chase) => {
            let per_load = group.factor * group.m3;
            let bytes = running * ghz * per_load * c.line;
            (ghz * per_load, bytes, 0.0, 0.0, sane(chase.stride_gbps).max(1e-3))
        }
        None => (
            ghz * (group.m3 * (1.0 - group.covered) + group.mt * (1.0 - group.cached)),
            running * ghz * c.line * c.tau * group.m3 * (1.0 - group.covered) * (1.0 + group.lines),
            ghz * group.mx,
            running * ghz * c.line * group.mx,
            c.memory_gbps,
        ),
    };
    let mut add = |used: &mut [bool], r: usize, memory: f64, lines: f64, gbps: f64| {
        let i = r * count + g;
        w.memory_way[i] = memory;
        w.line_way[i] = lines;
        w.delay[i] = memory * memory_delay + lines * line_delay;
        w.load[i] = (memory * memory_load + lines * line_load) / gbps;
        used[r] = true;
    };
    let same_node: f64 = layout
        .chips
        .iter()
        .enumerate()
        .map(|(i, chip)| on(i) * (w.node_share[chip.node as usize] - on(i)).max(0.0))
        .sum();
    let kept = share(demand.grouped) * share(p.kin);
    group.line_node = (1.0 - own_lines) * same_node;
    if let Some(reach) = &demand.reach {
        group.line_local = share(reach.lines.local);
        group.line_node = 0.0;
    }
    for a in 0..nodes {
        let here = w.node_share[a];
        if here <= 0.0 {
            continue;
        }
        let (neighbours, strangers) = (w.neighbours[a].len(), w.strangers[a].len());
        let board_share: f64 = w.neighbours[a].iter().map(|b| w.node_share[*b]).sum();
        let stranger_share: f64 = w.strangers[a].iter().map(|b| w.node_share[*b]).sum();
        // What is stated to go to a distance that this machine does not have stays as near as it can.
        let stated = demand.reach.map(|reach| {
            (
                nearest(reach.memory, neighbours, strangers),
                nearest(reach.lines, neighbours, strangers),
            )
        });
        if let Some((_, lines)) = stated {
            group.line_local += here * (lines.local - share(demand.reach.map_or(0.0, |r| r.lines.local)));
        } else if kept > 0.0 && board_share <= 0.0 {
            group.line_local += here * (1.0 - own_lines) * stranger_share * kept;
        }
        let (loose, loose_lines) = (1.0 - aligned, 1.0 - own_lines);
        let mine = here * stated.map_or(loose * w.memory[a] + aligned, |(memory, _)| memory.local);
        w.memory_in[a] += mine;
        group.local += mine;
        // Sharing that was kept on the board goes to its nodes as their threads do.
        let gathered = if board_share > 0.0 {
            stranger_share * kept / board_share
        } else {
            0.0
        };
        for b in &w.neighbours[a] {
            let (memory, lines) = match stated {
                Some((memory, lines)) => (memory.near / neighbours as f64, lines.near / neighbours as f64),
                None => (
                    loose * w.memory[*b],
                    loose_lines * w.node_share[*b] * (1.0 + gathered),
                ),
            };
            let (memory, lines) = (here * memory, here * lines);
            w.memory_in[*b] += memory;
            group.near += memory;
            group.line_near += lines;
            add(&mut w.used, w.link[a * nodes + b], memory, lines, c.near_gbps);
        }
        let (mut far_memory, mut far_lines) = (0.0, 0.0);
        for b in &w.strangers[a] {
            let (memory, lines) = match stated {
                Some((memory, lines)) => (memory.far / strangers as f64, lines.far / strangers as f64),
                None => (
                    loose * w.memory[*b],
                    loose_lines * w.node_share[*b] * (1.0 - kept),
                ),
            };
            w.memory_in[*b] += here * memory;
            far_memory += here * memory;
            far_lines += here * lines;
        }
        if strangers > 0 {
            group.far += far_memory;
            group.line_far += far_lines;
            add(&mut w.used, nodes + a, far_memory, far_lines, c.far_gbps);
        }
    }
    for b in 0..nodes {
        let memory = w.memory_in[b];
        if memory > 0.0 {
            add(&mut w.used, b, memory, 0.0, capacity);
        }
    }
    group.memory_ns = group.local * c.local_ns + group.near * c.near_ns + group.far * c.far_ns;
    group.line_ns = group.line_local * c.line_local_ns
        + group.line_node * c.line_node_ns
        + group.line_near * c.line_near_ns
        + group.line_far * c.line_far_ns;
    group
}

/// Puts shares for distances that do not exist to the nearest that does, and makes them add up to one.
fn nearest(d: Distances, neighbours: usize, strangers: usize) -> Distances {
    let (mut local, mut near, mut far) = (share(d.local), share(d.near), share(d.far));
    if strangers == 0 {
        near += far;
        far = 0.0;
    }
    if neighbours == 0 {
        if strangers == 0 {
            local += near;
        } else {
            far += near;
        }
        near = 0.0;
    }
    let sum = local + near + far;
    if sum > 0.0 {
        Distances {
            local: local / sum,
            near: near / sum,
            far: far / sum,
        }
    } else {
        Distances {
            local: 1.0,
            near: 0.0,
            far: 0.0,
        }
    }
}

/// Cycles per instruction with empty queues (8, 10).
fn fixed_part(c: &Constants, ghz: f64, demand: &Demand, g: &Group) -> f64 {
    if let Some(chase) = demand.profile.chase {
        return ghz * g.factor * (g.m3 * g.memory_ns + (1.0 - g.m3) * sane(chase.hit_ns).max(1e-3));
    }
    let walk = g.cached * c.walk_ns + (1.0 - g.cached) * g.memory_ns;
    let memory = g.m3 * ((1.0 - g.covered) * g.memory_ns + g.covered * c.covered_ns);
    sane(demand.profile.b).max(1e-3) * g.threads_per_core + ghz * (memory + g.mx * g.line_ns + g.mt * walk)
}

/// Use of every resource and length of its queue at the given speeds (instructions per cycle); returns the largest
/// `|1 - speed · cycles|`, with `residual` holding the signed values and `cycles` what the queues make of each workload.
/// Infinite when a resource would be used beyond its capacity.
fn evaluate(w: &mut Warm, speed: &[f64]) -> f64 {
    let count = speed.len();
    w.cycles.copy_from_slice(&w.fixed);
    for r in &w.active {
        let row = r * count..(r + 1) * count;
        let asked: f64 = w.load[row.clone()]
            .iter()
            .zip(speed)
            .map(|(load, x)| load * x)
            .sum();
        let rho = asked + w.copied[*r];
        let idle = 1.0 - rho;
        if idle <= 0.0 {
            return f64::INFINITY;
        }
        let service = w.service[*r];
        w.rho[*r] = rho;
        w.queue[*r] = service * rho / (2.0 * idle);
        w.slope[*r] = service / (2.0 * idle * idle);
        for (cycles, delay) in w.cycles.iter_mut().zip(&w.delay[row]) {
            *cycles += delay * w.queue[*r];
        }
    }
    let mut error = 0.0_f64;
    for ((residual, cycles), x) in w.residual.iter_mut().zip(&w.cycles).zip(speed) {
        *residual = 1.0 - x * cycles;
        error = error.max(residual.abs());
    }
    error
}

/// Relative error at which the equations count as solved.
const ACCURACY: f64 = 1e-12;
/// Relative error up to which the arithmetic may stop short of it.
const TOLERANCE: f64 = 1e-10;
/// Most Newton steps; three to six are usual.
const STEPS_MAX: usize = 60;
/// Most halvings of one step.
const HALVINGS_MAX: usize = 10;
/// A step goes at most this far towards full use of a resource.
const BRINK: f64 = 0.98;
/// Uses above this at the start are scaled down to it.
const START: f64 = 0.9;

/// Solves speed · (fixed + delay · queue(load · speed)) = 1 by Newton's method, kept inside of what the resources can
/// carry (queues grow without limit towards it, so a solution exists there for any demand). When Newton's method does
/// not get nearer, each workload is solved for in turn.
fn fixed_point(w: &mut Warm) -> bool {
    let count = w.fixed.len();
    let mut speed = std::mem::take(&mut w.speed);
    if speed.len() != count {
        speed.clear();
        speed.extend(w.fixed.iter().map(|f| 1.0 / f));
    }
    for (x, fixed) in speed.iter_mut().zip(&w.fixed) {
        *x = x.min(1.0 / fixed);
    }
    let highest = highest_use(w, &speed);
    if highest > 0.999 {
        speed.iter_mut().for_each(|x| *x *= START / highest);
    }
    let mut error = evaluate(w, &speed);
    let mut trial = std::mem::take(&mut w.trial);
    for _ in 0..STEPS_MAX {
        if error <= ACCURACY {
            break;
        }
        newton_step(w, &speed);
        let mut scale = longest_step(w, &speed);
        let mut after = f64::INFINITY;
        for _ in 0..HALVINGS_MAX {
            for ((t, x), step) in trial.iter_mut().zip(&speed).zip(&w.step) {
                *t = x + scale * step;
            }
            after = evaluate(w, &trial);
            if after < error {
                break;
            }
            scale *= 0.5;
        }
        if after < error {
            std::mem::swap(&mut speed, &mut trial);
            error = after;
        } else if error <= TOLERANCE {
            break;
        } else {
            by_turns(w, &mut speed);
            error = evaluate(w, &speed);
        }
    }
    error = error.min(evaluate(w, &speed));
    w.trial = trial;
    w.speed = speed;
    error <= TOLERANCE
}

/// Use of the busiest resource at these speeds, as a share of what copying leaves of it.
fn highest_use(w: &Warm, speed: &[f64]) -> f64 {
    let count = speed.len();
    let of = |r: &usize| -> f64 {
        let asked: f64 = w.load[r * count..(r + 1) * count]
            .iter()
            .zip(speed)
            .map(|(l, x)| l * x)
            .sum();
        asked / (1.0 - w.copied[*r])
    };
    w.active.iter().map(of).fold(0.0, f64::max)
}

/// The part of `step`, 1 at most, that leaves every speed above nothing and every resource below full.
fn longest_step(w: &Warm, speed: &[f64]) -> f64 {
    let count = speed.len();
    let mut longest = 1.0_f64;
    for (x, step) in speed.iter().zip(&w.step) {
        if *step < 0.0 {
            longest = longest.min(-BRINK * x / step);
        }
    }
    for r in &w.active {
        let more: f64 = w.load[r * count..(r + 1) * count]
            .iter()
            .zip(&w.step)
            .map(|(l, s)| l * s)
            .sum();
        if more > 0.0 {
            longest = longest.min(BRINK * (1.0 - w.rho[*r]) / more);
        }
    }
    longest
}

/// One Newton step in `step`: solves (cycles + speed · delay · slope · load) step = residual by elimination.
fn newton_step(w: &mut Warm, speed: &[f64]) {
    let count = speed.len();
    w.matrix.fill(0.0);
    for r in &w.active {
        let row = r * count..(r + 1) * count;
        let (delay, load) = (&w.delay[row.clone()], &w.load[row]);
        let slope = w.slope[*r];
        for ((line, d), x) in w.matrix.chunks_exact_mut(count).zip(delay).zip(speed) {
            let weight = d * slope * x;
            if weight > 0.0 {
                for (m, l) in line.iter_mut().zip(load) {
                    *m += weight * l;
                }
            }
        }
    }
    // A change of speed of one part in so many of each is the natural unit: columns scaled by speed.
    for (g, line) in w.matrix.chunks_exact_mut(count).enumerate() {
        line[g] += w.cycles[g];
        for (m, x) in line.iter_mut().zip(speed) {
            *m *= x;
        }
    }
    w.step.copy_from_slice(&w.residual);
    let (m, x) = (&mut w.matrix, &mut w.step);
    for k in 0..count {
        let pivot = (k..count).fold(k, |best, i| {
            if m[i * count + k].abs() > m[best * count + k].abs() {
                i
            } else {
                best
            }
        });
        if pivot != k {
            for j in 0..count {
                m.swap(pivot * count + j, k * count + j);
            }
            x.swap(pivot, k);
        }
        let diagonal = m[k * count + k];
        if diagonal == 0.0 {
            continue;
        }
        let (above, below) = m.split_at_mut((k + 1) * count);
        let head = &above[k * count + k..];
        for (i, line) in below.chunks_exact_mut(count).enumerate() {
            let factor = line[k] / diagonal;
            if factor != 0.0 {
                for (a, b) in line[k..].iter_mut().zip(head) {
                    *a -= factor * b;
                }
                x[k + 1 + i] -= factor * x[k];
            }
        }
    }
    for k in (0..count).rev() {
        let sum: f64 = (k + 1..count).map(|j| m[k * count + j] * x[j]).sum();
        let diagonal = m[k * count + k];
        x[k] = if diagonal == 0.0 {
            0.0
        } else {
            (x[k] - sum) / diagonal
        };
    }
    for (step, x) in x.iter_mut().zip(speed) {
        *step *= x;
    }
}

/// Each workload in turn by 60 halvings with the others held, half of the way: slow and sure.
fn by_turns(w: &mut Warm, speed: &mut [f64]) {
    for g in 0..speed.len() {
        let old = speed[g];
        let (mut low, mut high) = (0.0, 1.0 / w.fixed[g]);
        for _ in 0..60 {
            let middle = 0.5 * (low + high);
            speed[g] = middle;
            let fits = evaluate(w, speed).is_finite() && w.residual[g] > 0.0;
            if fits { low = middle } else { high = middle }
        }
        // The old speed fitted and the new one fits, so does their mean.
        speed[g] = (old * low.max(old * 1e-3)).sqrt();
    }
}

fn rate(c: &Constants, ghz: f64, demand: &Demand, w: &Warm, g: usize, count: usize) -> Rate {
    let group = &w.groups[g];
    let cpi = 1.0 / w.speed[g];
    let mut latency = group.memory_ns;
    let mut line = group.line_ns;
    let mut busiest = 0.0_f64;
    for r in &w.active {
        let (memory_way, line_way) = (w.memory_way[r * count + g], w.line_way[r * count + g]);
        if memory_way + line_way > 0.0 {
            busiest = busiest.max(w.rho[*r]);
            latency += memory_way * w.queue[*r];
            line += line_way * w.queue[*r];
        }
    }
    let chase = demand.profile.chase.is_some();
    let walk = group.cached * c.walk_ns + (1.0 - group.cached) * latency;
    let base = if chase {
        0.0
    } else {
        sane(demand.profile.b).max(1e-3) * group.threads_per_core
    };
    let memory_cycles = if chase {
        ghz * group.factor * group.m3 * latency
    } else {
        ghz * group.m3 * ((1.0 - group.covered) * latency + group.covered * c.covered_ns)
    };
    Rate {
        cpi,
        instructions_per_ns: ghz / cpi,
        stall: cpi - base,
        local: group.local,
        near: group.near,
        far: group.far,
        latency_ns: latency,
        line_ns: line,
        walk_ns: walk,
        walks: group.mt * 1000.0,
        walks_cached: group.cached,
        misses: group.m3 * 1000.0,
        counters: Counters {
            cycles_per_instruction: cpi,
            memory_stall_share: memory_cycles / cpi,
            cache_to_cache_stall_share: ghz * group.mx * line / cpi,
            table_walk_share: ghz * group.mt * walk / cpi,
            local_share: group.local,
            prefetch_share: if chase {
                0.0
            } else {
                group.lines / (1.0 + group.lines)
            },
            prefetch_useful_share: if chase { 0.0 } else { group.covered },
            busiest_link: busiest,
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::Chip;
    use crate::profiles::profile;
    use crate::scheduler::{SchedulerKind, collisions, running_at};
    use proptest::prelude::*;

    /// Gain in throughput when a thread needs 1/(1 + `cpi_gain`) of the cycles and `cpu_share` of its response time is
    /// CPU time (9).
    fn throughput_gain(cpi_gain: f64, cpu_share: f64) -> f64 {
        1.0 / (1.0 - cpu_share + cpu_share / (1.0 + cpi_gain)) - 1.0
    }

    /// Change of the response time of a kind of transaction that waits `stall_weight` times as much for memory as the mean
    /// one, when the waiting cycles per instruction go from `before` to `after` (published for P8: by transaction type).
    fn response_change(base: f64, before: f64, after: f64, stall_weight: f64) -> f64 {
        (base + stall_weight * after) / (base + stall_weight * before) - 1.0
    }

    /// Work per second that is done when `offered` arrives and the machine can do `capacity` (9).
    fn capacity_limited(offered: f64, capacity: f64) -> f64 {
        offered.min(capacity)
    }

    /// Boards of like nodes of one chip each.
    fn boards(generation: Generation, ghz: f64, boards: u32, nodes: u32, cores: u32) -> Layout {
        Layout {
            name: "test".to_owned(),
            generation,
            ghz,
            threads_per_core: 4,
            chips: (0..boards * nodes)
                .map(|n| Chip {
                    cores,
                    node: n,
                    board: n / nodes,
                })
                .collect(),
            node_memory: vec![Bytes(64 << 30); (boards * nodes) as usize],
            small_page: Bytes::from_kib(64),
            large_page: Bytes::from_mib(16),
            shared_partition: false,
            split_shared: false,
        }
    }
    const fn d(local: f64, near: f64, far: f64) -> Distances {
        Distances { local, near, far }
    }
    /// A workload on all cores of all chips, `k` threads on each, with stated distances.
    fn everywhere(layout: &Layout, profile: Profile, k: f64, memory: Distances, lines: Distances) -> Demand {
        let running = layout.chips.iter().map(|c| f64::from(c.cores) * k).collect();
        Demand {
            threads_per_core: k,
            reach: Some(Reach { memory, lines }),
            ..Demand::new(profile, running, vec![])
        }
    }
    fn one(layout: &Layout, demand: &Demand) -> (Rate, Solution) {
        let solution = solve(layout, std::slice::from_ref(demand), &mut Warm::default());
        assert!(solution.converged);
        (solution.rates[0], solution)
    }
    fn cpi(layout: &Layout, demand: &Demand) -> f64 {
        one(layout, demand).0.cpi
    }
    #[track_caller]
    fn close(value: f64, oracle: f64, relative: f64) {
        assert!(
            (value / oracle - 1.0).abs() <= relative,
            "{value} is not {oracle} within {relative}"
        );
    }
    #[track_caller]
    fn points(value: f64, oracle: f64) {
        assert!(
            (value - oracle).abs() <= 2e-4,
            "{value} is not {oracle} within .02 percentage points"
        );
    }
    fn program(name: &str) -> Profile {
        profile(name).unwrap()
    }

    const ONE_OF_FOUR: Distances = d(0.25, 0.75, 0.0);
    const TWO_BY_TWO: Distances = d(0.25, 0.25, 0.5);
    const HALVES: Distances = d(0.5, 0.5, 0.0);
    const FAR_HALVES: Distances = d(0.5, 0.0, 0.5);

    /// Gains of large pages, of prefetch off, and of both, as relative changes of cycles per instruction.
    fn gains(layout: &Layout, demand: &Demand) -> [f64; 3] {
        let base = cpi(layout, demand);
        let large = Demand {
            large_share: 1.0,
            ..demand.clone()
        };
        let quiet = Demand {
            prefetch: 0.0,
            ..demand.clone()
        };
        let both = Demand {
            large_share: 1.0,
            prefetch: 0.0,
            ..demand.clone()
        };
        [large, quiet, both].map(|other| base / cpi(layout, &other) - 1.0)
    }

    // ---- the oracles of model-fit 8, with more digits from the reference program

    #[test]
    fn oracle_one_the_database_on_four_chips() {
        let layout = boards(Generation::Power7Plus, 3.72, 1, 4, 8);
        let demand = everywhere(
            &layout,
            program("oltp"),
            running_at(0.9, 4.0),
            ONE_OF_FOUR,
            ONE_OF_FOUR,
        );
        let (rate, machine) = one(&layout, &demand);
        close(rate.cpi, 3.160_766_465_8, 1e-9);
        close(rate.stall, 0.846_480_751_5, 1e-9);
        close(rate.latency_ns, 204.246_356_03, 1e-9);
        close(rate.line_ns, 117.483_709_885, 1e-9);
        close(rate.walk_ns, 160.454_920_82, 1e-9);
        close(rate.walks_cached, 0.251_319_087_5, 1e-9);
        close(rate.walks, 0.480_153_541_6, 1e-9);
        close(machine.memory_use[0], 0.123_584_790_95, 1e-9);
        close(machine.near_use[0], 0.154_936_478_53, 1e-9);
        assert_eq!(machine.far_use[0], 0.0);
        // Derived from where threads and memory are, it is the same.
        let spread = Demand {
            reach: None,
            memory: vec![1.0; 4],
            ..demand
        };
        close(cpi(&layout, &spread), rate.cpi, 1e-12);
    }

    #[test]
    fn oracle_two_the_chase() {
        let layout = Layout::named("redbook-16").unwrap();
        let latency = program("latency");
        // Two programs of 30 threads; what is not local is distant.
        let at = |local: f64, spread: f64| {
            let reach = Some(Reach {
                memory: d(local, 0.0, 1.0 - local),
                lines: d(1.0, 0.0, 0.0),
            });
            let demand = Demand {
                spread,
                reach,
                ..Demand::new(latency.clone(), vec![30.0, 30.0], vec![])
            };
            let (rate, machine) = one(&layout, &demand);
            let per_second = 60.0 * rate.instructions_per_ns / latency.instructions_per_unit * 1e9;
            (per_second, rate, machine)
        };
        for (local, spread, tps, latency_ns, far) in [
            (0.4, 2.0, 8.896_007_594_8, 346.179_204_8, 0.823_742_507_5),
            (0.7, 1.0, 18.702_115_902, 224.545_089_24, 0.625_133_802_5),
            (1.0, 1.0, 24.799_440_544, 168.366_276_095, 0.0),
        ] {
            let (per_second, rate, machine) = at(local, spread);
            close(per_second, tps, 1e-9);
            close(rate.latency_ns, latency_ns, 1e-9);
            assert!((machine.far_use[0] - far).abs() < 1e-8);
        }
        // P15, model-fit 4.4: the way from 70 % local to all.
        for (local, tps) in [
            (0.75, 19.91),
            (0.80, 21.07),
            (0.85, 22.16),
            (0.90, 23.15),
            (0.95, 24.03),
        ] {
            close(at(local, 1.0).0, tps, 5e-4);
        }
        // The same as two workloads, each at home on one chip with seven tenths of its memory there.
        let each = |home: usize| {
            let mut running = vec![0.0; 2];
            running[home] = 30.0;
            let mut memory = vec![0.3; 2];
            memory[home] = 0.7;
            Demand::new(latency.clone(), running, memory)
        };
        let both = solve(&layout, &[each(0), each(1)], &mut Warm::default());
        for rate in &both.rates {
            close(
                30.0 * 2e9 * rate.instructions_per_ns / 16_777_216.0,
                18.702_115_902,
                1e-9,
            );
        }
    }

    #[test]
    fn oracle_four_spread_and_contained() {
        let of = |cores: u32, memory, lines| {
            let layout = boards(Generation::Power7, 3.86, 2, 1, cores);
            one(
                &layout,
                &everywhere(&layout, program("oracle-oltp"), 4.0, memory, lines),
            )
        };
        let (before, machine) = of(4, d(0.59, 0.0, 0.41), FAR_HALVES);
        close(before.cpi, 7.413_824_762_7, 1e-9);
        close(before.latency_ns, 368.717_429_7, 1e-9);
        close(machine.far_use[0], 0.936_670_572_6, 1e-9);
        let (after, _) = of(8, d(0.998, 0.0, 0.002), d(0.998, 0.0, 0.002));
        close(after.cpi, 4.855_152_151_9, 1e-9);
        close(after.latency_ns, 130.867_412_7, 1e-9);
        // P16: 5100 to 6300 transactions, as instructions per transaction grow.
        let p = program("oracle-oltp");
        let tps = 5100.0 * before.cpi / after.cpi * p.instructions(before.cpi) / p.instructions(after.cpi);
        close(tps, 6300.0, 1e-3);
    }

    // ---- model-fit 4.1: the equations with the state before and after, row by row

    #[test]
    fn row_p1_cores_of_the_database() {
        let layout = boards(Generation::Power7, 3.86, 1, 2, 8);
        let at = |home: f64, k: f64| {
            let local = home * 0.607 + (1.0 - home) * (1.0 - 0.607);
            let lines = home * home + (1.0 - home) * (1.0 - home);
            let mut demand = everywhere(
                &layout,
                program("oltp"),
                k,
                d(local, 1.0 - local, 0.0),
                d(lines, 1.0 - lines, 0.0),
            );
            for running in &mut demand.running {
                *running *= 0.8;
            }
            demand.hot = 87e9;
            cpi(&layout, &demand)
        };
        let before = at(9.0 / 12.78, 1.0);
        close(before, 1.820_710_257_8, 1e-9);
        // Cores on the first domain until it is full, the rest on the other: the reference's iteration.
        let (mut home, mut cores) = (0.934, 0.0);
        for _ in 0..40 {
            let alone = at(home, 1.0);
            let used = 12.78 * alone / before;
            let pair = 2.0 * alone / at(home, 2.0);
            let room = 10.0 * 0.89 * (1.0 - 0.824 + 0.824 * pair);
            let rest = (used - room).max(0.0);
            home = used.min(room) / used;
            cores = 8.9 * (used / room).min(1.0) + rest;
        }
        close(cores, 10.0108, 1e-3);
        assert!(
            (cores / 9.7 - 1.0).abs() <= 0.05,
            "published 9.7, tolerance 5 %: {cores}"
        );
    }

    #[test]
    fn row_p3_share_of_prefetch_in_the_traffic() {
        let layout = boards(Generation::Power7, 3.86, 1, 2, 8);
        let mut demand = everywhere(&layout, program("oltp"), 1.0, HALVES, HALVES);
        let (on, _) = one(&layout, &demand);
        demand.prefetch = 0.0;
        let (off, _) = one(&layout, &demand);
        assert!((on.counters.prefetch_share - 0.43).abs() < 0.005);
        assert!((off.counters.prefetch_share - 0.03).abs() < 0.005);
        assert!(off.counters.prefetch_useful_share < on.counters.prefetch_useful_share);
    }

    #[test]
    fn rows_p5_and_p6_several_instances() {
        // Every instance on a chip of its own with 97 % of its memory there, against spread over all.
        let gain = |name: &str, chips: u32, cores: u32, k: f64, before: Distances| {
            let layout = boards(Generation::Power7, 3.55, 1, chips, cores);
            let spread = Demand {
                hot: 0.0,
                spread: f64::from(chips),
                ..everywhere(&layout, program(name), k, before, before)
            };
            let placed = d(0.97, 0.03, 0.0);
            let after = Demand {
                hot: 0.0,
                ..everywhere(&layout, program(name), k, placed, placed)
            };
            cpi(&layout, &spread) / cpi(&layout, &after) - 1.0
        };
        points(gain("specjbb", 2, 8, 4.0, HALVES), 0.271_67);
        points(gain("specjbb", 4, 8, 4.0, ONE_OF_FOUR), 0.388_33);
        let k = running_at(0.8, 4.0);
        points(gain("daytrader", 2, 4, k, HALVES), 0.395_01);
        points(gain("daytrader", 2, 8, k, HALVES), 0.484_99);
        // The same from where instances and memory are, without stating distances.
        let layout = boards(Generation::Power7, 3.55, 1, 2, 8);
        let spread = Demand {
            spread: span(&[1.0, 1.0]),
            threads_per_core: k,
            ..Demand::new(program("daytrader"), vec![8.0 * k; 2], vec![1.0, 1.0])
        };
        let placed = Demand {
            spread: 1.0,
            aligned: 0.94,
            ..spread.clone()
        };
        points(cpi(&layout, &spread) / cpi(&layout, &placed) - 1.0, 0.484_99);
    }

    #[test]
    fn row_p7_nothing_to_gain_and_something_to_lose() {
        // The reference holds the number of running threads, so that its CPU share of the response time is .1059; the
        // world closes the loop (threads that collide are more at a time) and its profile has less.
        let layout = boards(Generation::Power7, 3.55, 1, 2, 8);
        let p = Profile {
            cpu_share: 0.1059,
            ..program("daytrader-17")
        };
        // By default a thread finds its memory at home unless the machine is busy: 1 - U (1 - 1/D).
        let at = |k: f64, aligned: f64| {
            let local = aligned + (1.0 - aligned) / 2.0;
            let spread = span(&[local, 1.0 - local]);
            Demand {
                threads_per_core: k,
                aligned,
                spread,
                ..Demand::new(p.clone(), vec![8.0 * 0.2 * k; 2], vec![1.0, 1.0])
            }
        };
        let gain = cpi(&layout, &at(1.0, 0.83))
            / cpi(
                &layout,
                &Demand {
                    spread: 1.0,
                    ..at(1.0, 0.94)
                },
            )
            - 1.0;
        points(gain, 0.072_275);
        points(throughput_gain(gain, p.cpu_share), 0.007_2);
        // Bound to one core per instance: 1.088 threads on average that collide.
        let speeds: Vec<f64> = (1..=4)
            .map(|k| 1.0 / cpi(&layout, &at(f64::from(k), 0.83)))
            .collect();
        let slow = collisions(1.088, 1, &speeds);
        close(slow, 1.497_31, 1e-3);
        points(throughput_gain(1.0 / slow - 1.0, p.cpu_share), -0.05);
    }

    #[test]
    fn row_p8_affinity_large_pages_and_prefetch() {
        let layout = boards(Generation::Power7, 4.0, 2, 2, 8);
        let k = running_at(0.85, 4.0);
        let before = everywhere(&layout, program("oltp"), k, TWO_BY_TWO, TWO_BY_TWO);
        let grouped = Demand {
            reach: None,
            memory: vec![1.0; 4],
            grouped: 1.0,
            ..before.clone()
        };
        let affinity = cpi(&layout, &before) / cpi(&layout, &grouped) - 1.0;
        points(affinity, 0.032_592);
        let [large, quiet, both] = gains(&layout, &grouped);
        points(large, 0.072_4);
        points(quiet, 0.084_26);
        points(both * (1.0 + affinity), 0.231_703);
        // Response times by kind of transaction: .4 to very many times the mean wait.
        let base = 0.9 * k;
        let after = Demand {
            large_share: 1.0,
            prefetch: 0.0,
            ..grouped
        };
        let (s0, s1) = (cpi(&layout, &before) - base, cpi(&layout, &after) - base);
        for (weight, published) in [(0.4, -0.122), (1.0, -0.209), (5.0, -0.337), (1e6, -0.399)] {
            let change = response_change(base, s0, s1, weight);
            assert!((change - published).abs() < 1e-3, "{weight}: {change}");
        }
    }

    #[test]
    fn rows_p9_p10_p11_large_pages_and_prefetch() {
        let p9 = boards(Generation::Power7Plus, 3.72, 1, 4, 8);
        let k = running_at(0.9, 4.0);
        let [large, quiet, both] = gains(
            &p9,
            &everywhere(&p9, program("oltp"), k, ONE_OF_FOUR, ONE_OF_FOUR),
        );
        points(large, 0.083_548);
        points(quiet, -0.000_932);
        points(both, 0.081_949);

        // The reference counts two near peers for P10, and one link per pair for the state before as well.
        let p10 = boards(Generation::Power7Plus, 3.72, 2, 3, 8);
        let home = d(0.25, 0.72, 0.03);
        let before = everywhere(&p10, program("oltp"), k, TWO_BY_TWO, TWO_BY_TWO);
        let after = everywhere(&p10, program("oltp"), k, home, home);
        let affinity = cpi(&p10, &before) / cpi(&p10, &after) - 1.0;
        points(affinity, 0.137_554);
        points(gains(&p10, &after)[2] * (1.0 + affinity), 0.095_557);

        let p11 = boards(Generation::Power7Plus, 3.7, 1, 2, 8);
        let at = |used: f64| {
            everywhere(
                &p11,
                program("process-database"),
                running_at(used, 4.0),
                HALVES,
                HALVES,
            )
        };
        points(gains(&p11, &at(0.9))[2], 0.037_723);
        let busy_60 = gains(&p11, &at(0.6))[2];
        points(
            throughput_gain(busy_60, program("process-database-60").cpu_share),
            0.043,
        );
    }

    #[test]
    fn row_p12_two_partitions_each() {
        let k = running_at(0.8, 4.0);
        let both = |layout: &Layout, name: &str, hot: f64, memory, lines| {
            gains(
                layout,
                &Demand {
                    hot,
                    ..everywhere(layout, program(name), k, memory, lines)
                },
            )[2]
        };
        let far = boards(Generation::Power7, 3.86, 2, 1, 8);
        let near = boards(Generation::Power7, 3.86, 1, 2, 8);
        let a = both(&far, "process-database", 40e9, FAR_HALVES, FAR_HALVES);
        let b = both(&near, "process-database", 40e9, d(0.6, 0.4, 0.0), HALVES);
        points((a + b) / 2.0, 0.069_553);
        let far = boards(Generation::Power7Plus, 4.42, 2, 2, 4);
        let near = boards(Generation::Power7Plus, 4.42, 1, 4, 4);
        let a = both(&far, "oltp", 52e9, TWO_BY_TWO, TWO_BY_TWO);
        let b = both(&near, "process-database", 40e9, HALVES, ONE_OF_FOUR);
        points((a + b) / 2.0, 0.083);
    }

    #[test]
    fn row_p13_capacity_of_tiles() {
        let layout = boards(Generation::Power7, 3.55, 1, 4, 8);
        let before = Demand {
            spread: 4.0,
            ..everywhere(&layout, program("tradelite"), 4.0, ONE_OF_FOUR, ONE_OF_FOUR)
        };
        let placed = d(0.97, 0.03, 0.0);
        let after = everywhere(&layout, program("tradelite"), 4.0, placed, placed);
        let ratio = cpi(&layout, &before) / cpi(&layout, &after);
        close(ratio, 1.650_778, 1e-4);
        let capacity = 2.0 / 1.1;
        for (offered, gain) in [(1.0, 0.0), (2.0, 0.10), (3.0, 0.65)] {
            points(
                capacity_limited(offered, 1.65 * capacity) / capacity_limited(offered, capacity) - 1.0,
                gain,
            );
        }
        points(
            capacity_limited(3.0, ratio * capacity) / capacity_limited(3.0, capacity) - 1.0,
            0.65,
        );
    }

    // ---- the reference's bisection, for what the rows above do not cover: one workload on like chips

    fn bisection(layout: &Layout, demand: &Demand) -> f64 {
        let c = layout.constants();
        let p = &demand.profile;
        let reach = demand.reach.unwrap();
        let (m, x) = (reach.memory, reach.lines);
        let board = layout.chips[0].board;
        let peers = (layout.chips.iter().filter(|c| c.board == board).count() - 1).max(1) as f64;
        let left = if demand.prefetch > 0.5 {
            1.0
        } else {
            c.prefetch_residue
        };
        let (cov, pf) = (p.prefetch_covered * left, p.prefetch_lines * left);
        let m3 = p.m3 / 1000.0 * (c.cache_bytes / REFERENCE_CACHE).powf(-c.alpha);
        let large = demand.large_share;
        let cover = |page: Bytes| 1.0 - (c.tlb_small * page.0 as f64 / demand.hot).min(1.0).sqrt();
        let mt =
            p.mt / 1000.0 * ((1.0 - large) * cover(layout.small_page) + large * cover(layout.large_page));
        let table = c.table_bytes
            * demand.hot
            * ((1.0 - large) / layout.small_page.0 as f64 + large / layout.large_page.0 as f64);
        let h = (c.table_cache_share * c.cache_bytes / table).min(1.0).sqrt();
        let q = |ts: f64, r: f64| ts * r.min(0.995) / (2.0 * (1.0 - r.min(0.995)));
        let f = |v: f64| {
            let ips = demand.running[0] * layout.ghz / v;
            let tr = ips * c.line * c.tau * m3 * (1.0 - cov) * (1.0 + pf);
            let ti = ips * c.line * p.mx / 1000.0;
            let qm = q(c.memory_service_ns, tr / c.memory_gbps);
            let qn = q(
                c.near_service_ns,
                (tr * m.near + ti * x.near) / peers / c.near_gbps,
            );
            let qd = q(c.far_service_ns, (tr * m.far + ti * x.far) / c.far_gbps);
            let latency =
                m.local * (c.local_ns + qm) + m.near * (c.near_ns + qm + qn) + m.far * (c.far_ns + qm + qd);
            let line =
                x.local * c.line_local_ns + x.near * (c.line_near_ns + qn) + x.far * (c.line_far_ns + qd);
            let walk = h * c.walk_ns + (1.0 - h) * latency;
            let s = m3 * ((1.0 - cov) * latency + cov * c.covered_ns) + p.mx / 1000.0 * line + mt * walk;
            p.b * demand.threads_per_core + layout.ghz * s
        };
        let (mut low, mut high) = (0.05, 4000.0);
        for _ in 0..100 {
            let v = 0.5 * (low + high);
            if f(v) > v { low = v } else { high = v }
        }
        0.5 * (low + high)
    }

    /// (boards, nodes per board, cores, k, m3, mx, mt, shares, large pages, prefetch)
    fn single() -> impl Strategy<Value = (Layout, Demand)> {
        (
            (1_u32..3, 1_u32..4, 1_u32..12, 1.0..4.0_f64),
            (0.0..6.0_f64, 0.0..2.0_f64, 0.0..2.0_f64),
            (0.1..1.0_f64, 0.0..1.0_f64, 0.0..1.0_f64),
            (0.0..1.0_f64, any::<bool>(), 1e9..3e11_f64, any::<bool>()),
        )
            .prop_map(
                |((nb, nn, cores, k), (m3, mx, mt), (l, n, f), (large_share, prefetch, hot, plus))| {
                    let generation = if plus {
                        Generation::Power7Plus
                    } else {
                        Generation::Power7
                    };
                    let layout = boards(generation, 3.7, nb, nn, cores);
                    let n = if nn > 1 { n } else { 0.0 };
                    let f = if nb > 1 { f } else { 0.0 };
                    let sum = l + n + f;
                    let shares = d(l / sum, n / sum, f / sum);
                    let demand = Demand {
                        hot,
                        large_share,
                        prefetch: if prefetch { 1.0 } else { 0.0 },
                        ..everywhere(&layout, Profile::new("any", m3, mx, mt), k, shares, shares)
                    };
                    (layout, demand)
                },
            )
    }

    const SHAPES: [&str; 6] = [
        "power7-10+6",
        "power795-32",
        "x86-2s",
        "epyc-8llc",
        "epyc-2s-8llc",
        "redbook-16",
    ];

    fn any_demand() -> impl Strategy<Value = Demand> {
        (
            (
                0.0..30.0_f64,
                0.0..3.0_f64,
                0.0..3.0_f64,
                0.0..2.0_f64,
                0.0..0.9_f64,
            ),
            proptest::collection::vec(0.0..32.0_f64, 0..8),
            proptest::collection::vec(0.0..1.0_f64, 0..8),
            (
                1.0..4.0_f64,
                0.0..3e11_f64,
                0.0..1.0_f64,
                0.0..1.0_f64,
                1.0..8.0_f64,
                0.0..1.0_f64,
                0.0..1.0_f64,
            ),
            any::<bool>(),
        )
            .prop_map(
                |(
                    (m3, mx, mt, footprint, covered),
                    running,
                    memory,
                    (k, hot, large, pf, s, a, gr),
                    chase,
                )| {
                    let mut profile = Profile::new("any", m3, mx, mt);
                    profile.footprint = footprint;
                    profile.prefetch_covered = covered;
                    profile.several_instances = true;
                    profile.kin = 0.7;
                    if chase {
                        profile.chase = program("latency").chase;
                    }
                    Demand {
                        threads_per_core: k,
                        hot,
                        large_share: large,
                        prefetch: pf,
                        spread: s,
                        aligned: a,
                        grouped: gr,
                        ..Demand::new(profile, running, memory)
                    }
                },
            )
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(300))]

        #[test]
        fn for_one_workload_it_is_the_bisection((layout, demand) in single()) {
            let (rate, machine) = one(&layout, &demand);
            let highest = machine.memory_use.iter().chain(&machine.near_use).chain(&machine.far_use).fold(0.0_f64, |a, b| a.max(*b));
            prop_assert!(highest < 1.0, "a use of {} cannot last", highest);
            // Beyond this use the reference stops its queue; demand may then exceed capacity.
            if highest < 0.995 {
                let reference = bisection(&layout, &demand);
                prop_assert!((rate.cpi / reference - 1.0).abs() < 1e-9, "{} and {}", rate.cpi, reference);
            }
            let parts = rate.counters;
            let stalls = parts.memory_stall_share + parts.cache_to_cache_stall_share + parts.table_walk_share;
            prop_assert!((stalls - rate.stall / rate.cpi).abs() < 1e-9, "{} {}", stalls, rate.stall / rate.cpi);
        }

        #[test]
        fn speeds_are_finite_in_any_order_and_from_any_start(
            shape in 0..SHAPES.len(), demands in proptest::collection::vec(any_demand(), 1..10), turn in 0_usize..10
        ) {
            let layout = Layout::named(SHAPES[shape]).unwrap();
            let mut warm = Warm::default();
            let first = solve(&layout, &demands, &mut warm);
            prop_assert!(first.converged);
            for use_ in first.memory_use.iter().chain(&first.near_use).chain(&first.far_use) {
                prop_assert!((0.0..1.0).contains(use_), "use {}", use_);
            }
            for rate in &first.rates {
                prop_assert!(rate.cpi.is_finite() && rate.cpi > 0.0 && rate.instructions_per_ns > 0.0);
                prop_assert!((rate.local + rate.near + rate.far - 1.0).abs() < 1e-9);
            }
            let again = solve(&layout, &demands, &mut warm);
            let mut turned = demands.clone();
            let turn = turn % turned.len();
            turned.rotate_left(turn);
            let other = solve(&layout, &turned, &mut warm);
            for i in 0..demands.len() {
                let moved = other.rates[(i + demands.len() - turn) % demands.len()].cpi;
                prop_assert!((first.rates[i].cpi / again.rates[i].cpi - 1.0).abs() < 1e-9);
                prop_assert!((first.rates[i].cpi / moved - 1.0).abs() < 1e-9, "{} {}", first.rates[i].cpi, moved);
            }
        }

        #[test]
        fn more_local_memory_and_more_large_pages_are_never_slower(
            shape in 0..SHAPES.len(), demand in any_demand(), more in 0.0..1.0_f64
        ) {
            let layout = Layout::named(SHAPES[shape]).unwrap();
            // Like chips with like memory, so that no controller gets more than its share.
            let even = Demand { running: vec![8.0; layout.chips.len()], memory: vec![], ..demand };
            let base = cpi(&layout, &even);
            let local = Demand { aligned: even.aligned + (1.0 - even.aligned) * more, ..even.clone() };
            prop_assert!(cpi(&layout, &local) <= base * (1.0 + 1e-9));
            let large = Demand { large_share: even.large_share + (1.0 - even.large_share) * more, ..even.clone() };
            prop_assert!(cpi(&layout, &large) <= base * (1.0 + 1e-9));
        }

        #[test]
        fn a_competitor_never_makes_it_faster(
            shape in 0..SHAPES.len(), demand in any_demand(), competitor in any_demand(), copies in 1_usize..4
        ) {
            let layout = Layout::named(SHAPES[shape]).unwrap();
            // Several unlike workloads may help each other by getting in a third one's way; one and its copies cannot.
            let alone = solve(&layout, &vec![demand.clone(); copies], &mut Warm::default());
            let mut all = vec![demand; copies];
            all.push(competitor);
            let together = solve(&layout, &all, &mut Warm::default());
            for i in 0..copies {
                prop_assert!(together.rates[i].cpi >= alone.rates[i].cpi * (1.0 - 1e-9), "{} {} {} {}", together.rates[i].cpi, alone.rates[i].cpi, together.converged, alone.converged);
            }
        }
    }

    #[test]
    fn prefetch_that_is_useful_is_worth_its_traffic_and_prefetch_that_is_not_is_none() {
        // machine-model B.3, T4: off must lose clearly in the one case and win a little in the other.
        let layout = Layout::named("power770-12a-far").unwrap();
        let at = |name: &str, prefetch: f64| {
            let demand = Demand {
                prefetch,
                threads_per_core: 4.0,
                ..Demand::new(program(name), vec![32.0; 2], vec![1.0, 1.0])
            };
            cpi(&layout, &demand)
        };
        assert!(at("stream", 0.0) > 1.1 * at("stream", 1.0));
        assert!(at("scattered", 0.0) < at("scattered", 1.0));
    }

    #[test]
    fn crowded_caches_and_lines_between_chips_of_a_node_cost_something() {
        let layout = Layout::named("epyc-8llc").unwrap();
        let mut profile = Profile::new("p", 2.0, 0.5, 0.0);
        let apart = |n: usize| {
            let mut running = vec![0.0; 8];
            running[..n].fill(8.0 / n as f64);
            Demand::new(profile.clone(), running, vec![])
        };
        // One node: all memory is local wherever the threads are, but lines travel between its chips.
        let (packed, _) = one(&layout, &apart(1));
        let (spread, _) = one(&layout, &apart(8));
        assert_eq!((packed.local, spread.local), (1.0, 1.0));
        assert!(spread.line_ns > packed.line_ns && spread.cpi > packed.cpi);
        assert_eq!(packed.line_ns, X86.line_local_ns);
        profile.footprint = 1.0;
        let home = Demand::new(profile.clone(), vec![8.0], vec![]);
        let away = Demand::new(profile, vec![0.0, 8.0], vec![]);
        let shared = solve(&layout, &[home.clone(), home.clone()], &mut Warm::default()).rates[0].misses;
        let apart = solve(&layout, &[home, away], &mut Warm::default()).rates[0].misses;
        close(shared / apart, 1.5_f64.powf(0.47), 1e-9);
    }

    #[test]
    fn copying_takes_its_part_of_links_and_controllers() {
        // Two distant chips whose links are busy: the chase of P14.
        let layout = Layout::named("redbook-16").unwrap();
        let demand = Demand {
            spread: 2.0,
            ..Demand::new(program("latency"), vec![30.0, 30.0], vec![1.0, 1.0])
        };
        let at = |copies: &[Copying]| {
            let solution = solve_with(
                &layout,
                std::slice::from_ref(&demand),
                copies,
                &mut Warm::default(),
            );
            assert!(solution.converged, "{copies:?}");
            solution
        };
        let copy = |gbps| Copying { from: 1, to: 0, gbps };
        let quiet = at(&[]);
        assert_eq!(
            quiet,
            solve(&layout, std::slice::from_ref(&demand), &mut Warm::default())
        );
        let busy = at(&[copy(1.0)]);
        // The link of the node that it goes to, and both memories; what the program gets less of them, it asks less.
        assert!(busy.far_use[0] > quiet.far_use[0] && busy.far_use[1] < quiet.far_use[1]);
        assert!(busy.rates[0].cpi > 1.01 * quiet.rates[0].cpi);
        assert!(busy.rates[0].latency_ns > quiet.rates[0].latency_ns);
        assert!(busy.rates[0].counters.busiest_link > quiet.rates[0].counters.busiest_link);
        // More costs more, and two copies are as one of both together; but it never takes more than half.
        assert!(at(&[copy(2.0)]).rates[0].cpi > busy.rates[0].cpi);
        close(at(&[copy(0.5), copy(0.5)]).rates[0].cpi, busy.rates[0].cpi, 1e-9);
        let most = at(&[copy(1e6)]);
        close(
            most.rates[0].cpi,
            at(&[copy(100.0), copy(100.0)]).rates[0].cpi,
            1e-9,
        );
        assert!(most.far_use[0] < 1.0);
        // Nothing runs but the copier.
        let alone = solve_with(&layout, &[], &[copy(1.0)], &mut Warm::default());
        assert!(alone.rates.is_empty() && alone.converged);
        // What the machine does not have is not copied.
        assert_eq!(
            at(&[Copying {
                from: 0,
                to: 7,
                gbps: 1.0
            }]),
            quiet
        );
        // On one board it is the near link.
        let near = Layout::named("power750-16").unwrap();
        let of = |copies: &[Copying]| {
            solve_with(&near, std::slice::from_ref(&demand), copies, &mut Warm::default()).near_use[0]
        };
        assert!(of(&[copy(4.0)]) > of(&[]) + 0.1);
    }

    #[test]
    fn what_is_no_number_counts_as_nothing() {
        let layout = Layout::named("x86-2s").unwrap();
        let mut demand = Demand::new(
            Profile::new("p", f64::NAN, -1.0, f64::INFINITY),
            vec![f64::NAN, 4.0],
            vec![-1.0],
        );
        demand.spread = f64::NAN;
        demand.aligned = 7.0;
        let (rate, _) = one(&layout, &demand);
        close(rate.cpi, 0.9, 1e-12);
        assert!(solve(&layout, &[], &mut Warm::default()).rates.is_empty());
        // At rest: how fast it would be.
        let (rest, machine) = one(&layout, &Demand::new(program("oltp"), vec![], vec![]));
        assert!(rest.cpi > 0.9 && machine.memory_use.iter().all(|u| *u == 0.0));
        assert_eq!(SchedulerKind::default(), SchedulerKind::Linux);
    }
}
