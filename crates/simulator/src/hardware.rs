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
//! on a chip take part of its cache ([`Profile::footprint`]).

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
/// A queue is `service · r / (2 (1 - r))` up to this use `r`; beyond, it goes on along its tangent, so that the
/// equations have a solution for any load. At a fixed point the use stays below 1.
const USE_KNEE: f64 = 0.9999;

/// What a processor generation brings along. [`crate::profiles::figures`] says where each number comes from.
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

/// Model-fit 3.1; links serve bursts of 384 bytes.
const POWER7: Constants = Constants {
    line: 128.0,
    cache_bytes: REFERENCE_CACHE,
    local_ns: 115.0,
    near_ns: 230.0,
    far_ns: 375.0,
    line_local_ns: 30.0,
    line_node_ns: 30.0,
    line_near_ns: 30.0 + 230.0 - 115.0,
    line_far_ns: 30.0 + 375.0 - 115.0,
    covered_ns: 12.0,
    walk_ns: 30.0,
    memory_gbps: 100.0,
    memory_service_ns: 25.0,
    near_gbps: 21.4,
    near_service_ns: 384.0 / 21.4,
    far_gbps: 8.065,
    far_service_ns: 384.0 / 8.065,
    tlb_small: 512.0,
    tlb_large: 512.0,
    table_bytes: 128.0,
    table_cache_share: 0.25,
    theta: 0.5,
    alpha: 0.47,
    tau: 4.0,
    prefetch_residue: 0.041,
};

/// Machine-model B.2, column x86; what it does not have is taken over from POWER7 or assumed (far, lines between the
/// chips of a node).
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
fn prefetch_lines() -> f64 {
    0.754
}
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
    /// Mean number of threads that run on a core on which its threads run (k), 1 to the threads per core.
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
    cpi: Vec<f64>,
    // scratch, by workload or by resource × workload
    fixed: Vec<f64>,
    delay: Vec<f64>,
    load: Vec<f64>,
    memory_way: Vec<f64>,
    line_way: Vec<f64>,
    used: Vec<bool>,
    active: Vec<usize>,
    rho: Vec<f64>,
    queue: Vec<f64>,
    slope: Vec<f64>,
    residual: Vec<f64>,
    matrix: Vec<f64>,
    step: Vec<f64>,
    trial: Vec<f64>,
    groups: Vec<Group>,
    node_share: Vec<f64>,
    memory: Vec<f64>,
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

/// Length of a queue in ns and its slope at use `rho`.
fn queue(service: f64, rho: f64) -> (f64, f64) {
    let r = rho.clamp(0.0, USE_KNEE);
    let slope = service / (2.0 * (1.0 - r) * (1.0 - r));
    (
        service * r / (2.0 * (1.0 - r)) + slope * (rho - r).max(0.0),
        slope,
    )
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
        self.cpi.clear();
    }
}

/// Solves for the speed of every workload. `layout` should be a checked one ([`Layout::check`]).
pub fn solve(layout: &Layout, demands: &[Demand], warm: &mut Warm) -> Solution {
    let c = layout.constants();
    warm.prepare(layout, &c);
    let count = demands.len();
    let nodes = warm.board.len();
    let resources = warm.service.len();
    let w = &mut *warm;
    for (v, n) in [
        (&mut w.fixed, count),
        (&mut w.delay, resources * count),
        (&mut w.load, resources * count),
        (&mut w.memory_way, resources * count),
        (&mut w.line_way, resources * count),
        (&mut w.rho, resources),
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
    w.active.clear();
    w.active.extend((0..resources).filter(|r| w.used[*r]));
    let converged = fixed_point(w, count);

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

    let aligned = share(demand.aligned);
    let mut group = Group {
        threads_per_core: sane(demand.threads_per_core).clamp(1.0, f64::from(layout.threads_per_core.max(1))),
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
        group.line_local += mine * (aligned + (1.0 - aligned) * mine);
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
        w.memory_way[i] += memory;
        w.line_way[i] += lines;
        w.delay[i] += memory * memory_delay + lines * line_delay;
        w.load[i] += (memory * memory_load + lines * line_load) / gbps;
        used[r] = true;
    };
    let same_node: f64 = layout
        .chips
        .iter()
        .enumerate()
        .map(|(i, chip)| on(i) * (w.node_share[chip.node as usize] - on(i)).max(0.0))
        .sum();
    let kept = share(demand.grouped) * share(p.kin);
    group.line_node = (1.0 - aligned) * same_node;
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
            group.line_local += here * (1.0 - aligned) * stranger_share * kept;
        }
        for b in 0..nodes {
            let near = w.board[a] == w.board[b];
            let (memory, lines) = match stated {
                Some((memory, lines)) if a == b => (memory.local, lines.local),
                Some((memory, lines)) if near => {
                    (memory.near / neighbours as f64, lines.near / neighbours as f64)
                }
                Some((memory, lines)) => (memory.far / strangers as f64, lines.far / strangers as f64),
                None => {
                    let memory = (1.0 - aligned) * w.memory[b] + if a == b { aligned } else { 0.0 };
                    let there = (1.0 - aligned) * w.node_share[b];
                    let lines = if near && a != b && board_share > 0.0 {
                        there + (1.0 - aligned) * stranger_share * kept * w.node_share[b] / board_share
                    } else if near {
                        there
                    } else {
                        there * (1.0 - kept)
                    };
                    (memory, lines)
                }
            };
            let (memory, lines) = (here * memory, here * lines);
            add(&mut w.used, b, memory, 0.0, capacity);
            if a == b {
                group.local += memory;
            } else if near {
                group.near += memory;
                group.line_near += lines;
                add(&mut w.used, w.link[a * nodes + b], memory, lines, c.near_gbps);
            } else {
                group.far += memory;
                group.line_far += lines;
                add(&mut w.used, nodes + a, memory, lines, c.far_gbps);
            }
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

/// Queues at speed `cpi`; fills `rho`, `queue`, `slope`, and returns the largest relative residual with `residual`.
fn evaluate(w: &mut Warm, cpi: &[f64], count: usize) -> f64 {
    for (g, fixed) in w.fixed.iter().enumerate() {
        w.residual[g] = cpi[g] - fixed;
    }
    for r in &w.active {
        let row = r * count..(r + 1) * count;
        let rho: f64 = w.load[row.clone()]
            .iter()
            .zip(cpi)
            .map(|(load, cpi)| load / cpi)
            .sum();
        let (q, slope) = queue(w.service[*r], rho);
        w.rho[*r] = rho;
        w.queue[*r] = q;
        w.slope[*r] = slope;
        for (residual, delay) in w.residual.iter_mut().zip(&w.delay[row]) {
            *residual -= delay * q;
        }
    }
    w.residual
        .iter()
        .zip(cpi)
        .map(|(r, v)| (r / v).abs())
        .fold(0.0, f64::max)
}

/// Relative error at which the equations count as solved.
const ACCURACY: f64 = 1e-12;
/// Most Newton steps; three to six are usual.
const STEPS_MAX: usize = 100;
/// Most halvings of one step.
const HALVINGS_MAX: usize = 12;

/// Solves cpi = fixed + delay · queue(load / cpi). The right side falls as any cpi rises, so the residual grows with
/// each cpi and is concave: Newton's method with halved steps finds its one zero; bisection by turns is the fallback.
fn fixed_point(w: &mut Warm, count: usize) -> bool {
    let mut cpi = std::mem::take(&mut w.cpi);
    if cpi.len() != count {
        cpi.clear();
        cpi.extend_from_slice(&w.fixed);
    }
    for (v, fixed) in cpi.iter_mut().zip(&w.fixed) {
        *v = v.max(*fixed);
    }
    let mut error = evaluate(w, &cpi, count);
    for _ in 0..STEPS_MAX {
        if error <= ACCURACY {
            break;
        }
        newton_step(w, &cpi, count);
        let mut scale = 1.0;
        let before = error;
        let mut trial = std::mem::take(&mut w.trial);
        for _ in 0..HALVINGS_MAX {
            for (g, t) in trial.iter_mut().enumerate() {
                *t = (cpi[g] - scale * w.step[g]).max(w.fixed[g]);
            }
            error = evaluate(w, &trial, count);
            if error < before {
                break;
            }
            scale *= 0.5;
        }
        if error < before {
            std::mem::swap(&mut cpi, &mut trial);
            w.trial = trial;
        } else {
            w.trial = trial;
            if before <= 1e-10 {
                // As accurate as the arithmetic allows.
                error = evaluate(w, &cpi, count);
                break;
            }
            by_turns(w, &mut cpi, count);
            error = evaluate(w, &cpi, count);
        }
    }
    w.cpi = cpi;
    error <= 1e-10
}

/// One Newton step in `step`: solves (1 + delay · slope · load / cpi²) step = residual by elimination with pivots.
fn newton_step(w: &mut Warm, cpi: &[f64], count: usize) {
    w.matrix.fill(0.0);
    for g in 0..count {
        w.matrix[g * count + g] = 1.0;
        w.step[g] = w.residual[g];
    }
    for r in &w.active {
        let row = r * count..(r + 1) * count;
        let (delay, load) = (&w.delay[row.clone()], &w.load[row]);
        let slope = w.slope[*r];
        for (g, d) in delay.iter().enumerate() {
            if *d <= 0.0 {
                continue;
            }
            let line = &mut w.matrix[g * count..(g + 1) * count];
            for ((m, l), v) in line.iter_mut().zip(load).zip(cpi) {
                *m += d * slope * l / (v * v);
            }
        }
    }
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
        for i in k + 1..count {
            let factor = m[i * count + k] / diagonal;
            if factor != 0.0 {
                for j in k..count {
                    m[i * count + j] -= factor * m[k * count + j];
                }
                x[i] -= factor * x[k];
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
}

/// Each workload in turn by 60 halvings with the others held, half of the way: slow and sure.
fn by_turns(w: &mut Warm, cpi: &mut [f64], count: usize) {
    for g in 0..count {
        let old = cpi[g];
        let (mut low, mut high) = (w.fixed[g], w.fixed[g] * 2.0);
        let mut residual = |cpi: &mut [f64], v: f64| {
            cpi[g] = v;
            evaluate(w, cpi, count);
            w.residual[g]
        };
        let mut doublings = 0;
        while residual(cpi, high) < 0.0 && doublings < 60 {
            low = high;
            high *= 2.0;
            doublings += 1;
        }
        for _ in 0..60 {
            let middle = 0.5 * (low + high);
            if residual(cpi, middle) < 0.0 {
                low = middle
            } else {
                high = middle
            }
        }
        cpi[g] = (old * 0.5 * (low + high)).sqrt();
    }
}

fn rate(c: &Constants, ghz: f64, demand: &Demand, w: &Warm, g: usize, count: usize) -> Rate {
    let group = &w.groups[g];
    let cpi = w.cpi[g];
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

/// Gain in throughput when a thread needs 1/(1 + `cpi_gain`) of the cycles and `cpu_share` of its response time is
/// CPU time (9).
pub fn throughput_gain(cpi_gain: f64, cpu_share: f64) -> f64 {
    1.0 / (1.0 - cpu_share + cpu_share / (1.0 + cpi_gain)) - 1.0
}

/// Change of the response time of a kind of transaction that waits `stall_weight` times as much for memory as the mean
/// one, when the waiting cycles per instruction go from `before` to `after` (published for P8: by transaction type).
pub fn response_change(base: f64, before: f64, after: f64, stall_weight: f64) -> f64 {
    (base + stall_weight * after) / (base + stall_weight * before) - 1.0
}
