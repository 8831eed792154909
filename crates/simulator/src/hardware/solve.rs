//! The fixed point: how fast all workloads run together.

mod newton;

use super::{Constants, Copying, Demand, Distances, Generation, REFERENCE_CACHE, Rate, Solution};
use crate::layout::{Chip, Layout};
use homeostat_model::{Bytes, Counters};
use newton::fixed_point;

/// Work space and last result, for a faster next answer. Changes no answer beyond the solution's accuracy.
#[derive(Clone, Debug, Default)]
pub struct Warm {
    map: Map,
    /// Instructions per cycle of each workload at the last solution.
    speed: Vec<f64>,
    // Scratch, by workload or by resource × workload.
    fixed: Vec<f64>,
    cycles: Vec<f64>,
    delay: Vec<f64>,
    load: Vec<f64>,
    memory_way: Vec<f64>,
    line_way: Vec<f64>,
    used: Vec<bool>,
    active: Vec<usize>,
    rho: Vec<f64>,
    /// Use of each resource by copying.
    copied: Vec<f64>,
    queue: Vec<f64>,
    slope: Vec<f64>,
    groups: Vec<Group>,
    node_share: Vec<f64>,
    memory: Vec<f64>,
    memory_in: Vec<f64>,
    newton: Newton,
}

#[derive(Clone, Debug, Default)]
struct Map {
    chips: Vec<Chip>,
    generation: Option<Generation>,
    /// By node: other nodes of its board.
    neighbours: Vec<Vec<usize>>,
    /// By node: nodes of other boards.
    strangers: Vec<Vec<usize>>,
    board: Vec<u32>,
    /// Number of the link from node to node, row by row; `NONE` where there is none.
    link: Vec<usize>,
    /// Service time by resource: memory of each node, far link of each node, near links.
    service: Vec<f64>,
}

#[derive(Clone, Debug, Default)]
struct Newton {
    residual: Vec<f64>,
    matrix: Vec<f64>,
    step: Vec<f64>,
    trial: Vec<f64>,
}

const NONE: usize = usize::MAX;

/// Constants of one workload during the search.
#[derive(Clone, Copy, Debug, Default)]
struct Group {
    threads_per_core: f64,
    m3: f64,
    mx: f64,
    mt: f64,
    covered: f64,
    lines: f64,
    cached: f64,
    /// Walks or loads per load of a chase, at least 1.
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
        if self.map.chips == layout.chips && self.map.generation == Some(layout.generation) {
            return;
        }
        self.map.chips.clone_from(&layout.chips);
        self.map.generation = Some(layout.generation);
        let nodes = layout
            .chips
            .iter()
            .map(|c| c.node as usize + 1)
            .max()
            .unwrap_or(0);
        self.map.board = (0..nodes)
            .map(|n| layout.board_of_node(n as u32).unwrap_or(0))
            .collect();
        let of = |same: bool, a: usize, board: &[u32]| -> Vec<usize> {
            (0..nodes)
                .filter(|b| *b != a && (board[a] == board[*b]) == same)
                .collect()
        };
        self.map.neighbours = (0..nodes).map(|a| of(true, a, &self.map.board)).collect();
        self.map.strangers = (0..nodes).map(|a| of(false, a, &self.map.board)).collect();
        self.map.service = vec![c.memory_service_ns; nodes];
        self.map.service.resize(2 * nodes, c.far_service_ns);
        self.map.link = vec![NONE; nodes * nodes];
        for a in 0..nodes {
            for b in &self.map.neighbours[a] {
                self.map.link[a * nodes + b] = self.map.service.len();
                self.map.service.push(c.near_service_ns);
            }
        }
        self.speed.clear();
    }
}

/// Solves for the speed of every workload. `layout` should be a checked one ([`Layout::check`]).
pub fn solve(layout: &Layout, demands: &[Demand], warm: &mut Warm) -> Solution {
    solve_with(layout, demands, &[], warm)
}

/// As [`solve`], with memory being copied. Copies get at most half of a controller or link in total.
pub fn solve_with(layout: &Layout, demands: &[Demand], copies: &[Copying], warm: &mut Warm) -> Solution {
    let c = layout.constants();
    warm.prepare(layout, &c);
    let count = demands.len();
    let nodes = warm.map.board.len();
    let resources = warm.map.service.len();
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
        (&mut w.newton.residual, count),
        (&mut w.newton.matrix, count * count),
        (&mut w.newton.step, count),
        (&mut w.newton.trial, count),
    ] {
        v.clear();
        v.resize(n, 0.0);
    }
    w.used.clear();
    w.used.resize(resources, false);
    w.groups.clear();
    for (g, demand) in demands.iter().enumerate() {
        let group = Case::new(layout, &c, demands, g).describe(w);
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
        w.map.neighbours[a]
            .iter()
            .map(|b| w.rho[w.map.link[a * nodes + b]])
            .fold(0.0, f64::max)
    }));
    for (g, demand) in demands.iter().enumerate() {
        solution.rates.push(rate(&c, layout.ghz, demand, w, g, count));
    }
    solution
}

/// Largest share of a controller or link for copying: at a full link it competes like one program (assumed).
const COPY_SHARE_MAX: f64 = 0.5;

/// Adds the use of resources by copying. The requester selects the link: the copier runs at the destination.
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
            match w.map.link.get(copy.to * nodes + copy.from) {
                Some(link) if *link != NONE => add(*link, c.near_gbps),
                _ => add(nodes + copy.to, c.far_gbps),
            }
        }
    }
}

/// One workload while computing what does not depend on queues.
struct Case<'a> {
    layout: &'a Layout,
    c: &'a Constants,
    demands: &'a [Demand],
    g: usize,
    running: f64,
    /// Share of them by chip; even at rest, to give its speed on any core.
    on: Vec<f64>,
    aligned: f64,
    own_lines: f64,
    group: Group,
}

impl<'a> Case<'a> {
    fn new(layout: &'a Layout, c: &'a Constants, demands: &'a [Demand], g: usize) -> Self {
        let demand = &demands[g];
        let chips = layout.chips.len();
        let running: f64 = (0..chips).map(|i| at(&demand.running, i)).sum();
        let on = |i| {
            if running > 0.0 {
                at(&demand.running, i) / running
            } else {
                1.0 / chips as f64
            }
        };
        let aligned = share(demand.aligned);
        let threads = f64::from(layout.threads_per_core.max(1));
        Self {
            layout,
            c,
            demands,
            g,
            running,
            on: (0..chips).map(on).collect(),
            aligned,
            own_lines: if demand.own_lines { aligned } else { 0.0 },
            group: Group {
                threads_per_core: sane(demand.threads_per_core).clamp(0.1, threads),
                ..Group::default()
            },
        }
    }

    fn demand(&self) -> &'a Demand {
        &self.demands[self.g]
    }

    /// Its part of the fixed point. Sets its rows of `delay` (cycles per instruction for each ns of queue) and `load`
    /// (use of a resource times cycles per instruction).
    fn describe(mut self, w: &mut Warm) -> Group {
        let nodes = w.map.board.len();
        let memory = &self.demand().memory;
        let total: f64 = (0..nodes).map(|n| at(memory, n)).sum();
        w.memory.clear();
        w.memory.extend((0..nodes).map(|n| {
            if total > 0.0 {
                at(memory, n) / total
            } else {
                1.0 / nodes as f64
            }
        }));
        w.node_share.clear();
        w.node_share.resize(nodes, 0.0);
        w.memory_in.clear();
        w.memory_in.resize(nodes, 0.0);
        let cache = self.cache(w);
        self.prefetch();
        self.pages();
        self.chase(cache);
        self.ways(w);
        self.group
    }

    /// (3) Cache: size, instances, other workloads. Returns the factor on its misses.
    fn cache(&mut self, w: &mut Warm) -> f64 {
        let (c, p) = (self.c, &self.demand().profile);
        let mut crowding = 0.0;
        for (i, chip) in self.layout.chips.iter().enumerate() {
            let mine = self.on[i];
            if mine <= 0.0 {
                continue;
            }
            w.node_share[chip.node as usize] += mine;
            self.group.line_local += mine * (self.own_lines + (1.0 - self.own_lines) * mine);
            let threads = f64::from(chip.cores) * f64::from(self.layout.threads_per_core);
            let others: f64 = self
                .demands
                .iter()
                .enumerate()
                .filter(|(h, d)| *h != self.g && d.profile.footprint > 0.0)
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
            cache *= sane(self.demand().spread).max(1.0).powf(c.alpha);
        }
        if c.cache_bytes != REFERENCE_CACHE {
            cache *= (c.cache_bytes / REFERENCE_CACHE).powf(-c.alpha);
        }
        self.group.m3 = sane(p.m3) / 1000.0 * cache;
        self.group.mx = sane(p.mx) / 1000.0;
        cache
    }

    /// (6) Prefetch.
    fn prefetch(&mut self) {
        let (demand, group) = (self.demand(), &mut self.group);
        let prefetch = share(demand.prefetch);
        let left = prefetch + (1.0 - prefetch) * self.c.prefetch_residue;
        group.covered = share(demand.profile.prefetch_covered) * left;
        group.lines = sane(demand.profile.prefetch_lines) * left;
    }

    /// Bytes of a small and of a large page.
    fn page_bytes(&self) -> (f64, f64) {
        let bytes = |page: Bytes| page.0.max(1) as f64;
        (bytes(self.layout.small_page), bytes(self.layout.large_page))
    }

    /// (7) TLB and cached page table.
    fn pages(&mut self) {
        let (c, demand) = (self.c, self.demand());
        let large = share(demand.large_share);
        let (small_page, large_page) = self.page_bytes();
        let hot = sane(demand.hot);
        self.group.cached = 1.0;
        self.group.factor = 1.0;
        if hot > 0.0 {
            let miss = |entries: f64, page: f64| 1.0 - (entries * page / hot).min(1.0).powf(c.theta);
            self.group.mt = sane(demand.profile.mt) / 1000.0
                * ((1.0 - large) * miss(c.tlb_small, small_page) + large * miss(c.tlb_large, large_page));
            let table = c.table_bytes * hot * ((1.0 - large) / small_page + large / large_page);
            self.group.cached = (c.table_cache_share * c.cache_bytes / table)
                .min(1.0)
                .powf(c.theta);
        }
    }

    /// (10) differences of a chase.
    fn chase(&mut self, cache: f64) {
        let demand = self.demand();
        let Some(chase) = demand.profile.chase else { return };
        let large = share(demand.large_share);
        let (small_page, large_page) = self.page_bytes();
        let stride = chase.stride.0 as f64;
        self.group.m3 = (share(chase.miss_share) * cache).min(1.0);
        self.group.mx = 0.0;
        self.group.mt = 0.0;
        self.group.factor =
            1.0 + (1.0 - large) * (stride / small_page).min(1.0) + large * (stride / large_page).min(1.0);
    }

    /// Cycles per instruction for each ns of queue, bytes per cycle of memory and lines, and a node's memory limit.
    fn rates(&self) -> Rates {
        let (c, ghz, group, running) = (self.c, self.layout.ghz, &self.group, self.running);
        match self.demand().profile.chase {
            Some(chase) => {
                let per_load = group.factor * group.m3;
                Rates {
                    memory_delay: ghz * per_load,
                    memory_load: running * ghz * per_load * c.line,
                    capacity: sane(chase.stride_gbps).max(1e-3),
                    ..Rates::default()
                }
            }
            None => Rates {
                memory_delay: ghz * (group.m3 * (1.0 - group.covered) + group.mt * (1.0 - group.cached)),
                memory_load: running
                    * ghz
                    * c.line
                    * c.tau
                    * group.m3
                    * (1.0 - group.covered)
                    * (1.0 + group.lines),
                line_delay: ghz * group.mx,
                line_load: running * ghz * c.line * group.mx,
                capacity: c.memory_gbps,
            },
        }
    }

    /// (2, 5) Nodes of memory accesses and lines.
    fn ways(&mut self, w: &mut Warm) {
        let (c, rates) = (self.c, self.rates());
        let nodes = w.map.board.len();
        let (g, count) = (self.g, self.demands.len());
        let mut add = |w: &mut Warm, r: usize, memory: f64, lines: f64, gbps: f64| {
            let i = r * count + g;
            w.memory_way[i] = memory;
            w.line_way[i] = lines;
            w.delay[i] = memory * rates.memory_delay + lines * rates.line_delay;
            w.load[i] = (memory * rates.memory_load + lines * rates.line_load) / gbps;
            w.used[r] = true;
        };
        let chips = self.layout.chips.iter().zip(&self.on);
        let same_node: f64 = chips
            .map(|(chip, on)| on * (w.node_share[chip.node as usize] - on).max(0.0))
            .sum();
        self.group.line_node = (1.0 - self.own_lines) * same_node;
        if let Some(reach) = &self.demand().reach {
            self.group.line_local = share(reach.lines.local);
            self.group.line_node = 0.0;
        }
        for a in 0..nodes {
            if w.node_share[a] > 0.0 {
                self.ways_from(a, w, &mut add);
            }
        }
        for b in 0..nodes {
            let memory = w.memory_in[b];
            if memory > 0.0 {
                add(w, b, memory, 0.0, rates.capacity);
            }
        }
        let group = &mut self.group;
        group.memory_ns = group.local * c.local_ns + group.near * c.near_ns + group.far * c.far_ns;
        group.line_ns = group.line_local * c.line_local_ns
            + group.line_node * c.line_node_ns
            + group.line_near * c.line_near_ns
            + group.line_far * c.line_far_ns;
    }

    fn ways_from(&mut self, a: usize, w: &mut Warm, add: &mut impl FnMut(&mut Warm, usize, f64, f64, f64)) {
        let (c, demand, group) = (self.c, self.demand(), &mut self.group);
        let (nodes, here) = (w.map.board.len(), w.node_share[a]);
        let kept = share(demand.grouped) * share(demand.profile.kin);
        let (neighbours, strangers) = (w.map.neighbours[a].len(), w.map.strangers[a].len());
        let board_share: f64 = w.map.neighbours[a].iter().map(|b| w.node_share[*b]).sum();
        let stranger_share: f64 = w.map.strangers[a].iter().map(|b| w.node_share[*b]).sum();
        // Accesses stated for a distance that this machine lacks use the nearest one.
        let stated = demand.reach.map(|reach| {
            (
                nearest(reach.memory, neighbours, strangers),
                nearest(reach.lines, neighbours, strangers),
            )
        });
        if let Some((_, lines)) = stated {
            group.line_local += here * (lines.local - share(demand.reach.map_or(0.0, |r| r.lines.local)));
        } else if kept > 0.0 && board_share <= 0.0 {
            group.line_local += here * (1.0 - self.own_lines) * stranger_share * kept;
        }
        let (loose, loose_lines) = (1.0 - self.aligned, 1.0 - self.own_lines);
        let mine = here * stated.map_or(loose * w.memory[a] + self.aligned, |(memory, _)| memory.local);
        w.memory_in[a] += mine;
        group.local += mine;
        // Sharing kept on the board follows the threads to its nodes.
        let gathered = if board_share > 0.0 {
            stranger_share * kept / board_share
        } else {
            0.0
        };
        for at in 0..neighbours {
            let b = w.map.neighbours[a][at];
            let (memory, lines) = match stated {
                Some((memory, lines)) => (memory.near / neighbours as f64, lines.near / neighbours as f64),
                None => (
                    loose * w.memory[b],
                    loose_lines * w.node_share[b] * (1.0 + gathered),
                ),
            };
            let (memory, lines) = (here * memory, here * lines);
            w.memory_in[b] += memory;
            group.near += memory;
            group.line_near += lines;
            let link = w.map.link[a * nodes + b];
            add(w, link, memory, lines, c.near_gbps);
        }
        let (mut far_memory, mut far_lines) = (0.0, 0.0);
        for at in 0..strangers {
            let b = w.map.strangers[a][at];
            let (memory, lines) = match stated {
                Some((memory, lines)) => (memory.far / strangers as f64, lines.far / strangers as f64),
                None => (loose * w.memory[b], loose_lines * w.node_share[b] * (1.0 - kept)),
            };
            w.memory_in[b] += here * memory;
            far_memory += here * memory;
            far_lines += here * lines;
        }
        if strangers > 0 {
            group.far += far_memory;
            group.line_far += far_lines;
            add(w, nodes + a, far_memory, far_lines, c.far_gbps);
        }
    }
}

#[derive(Clone, Copy, Default)]
struct Rates {
    memory_delay: f64,
    memory_load: f64,
    line_delay: f64,
    line_load: f64,
    capacity: f64,
}

/// Moves shares of missing distances to the nearest existing one, and normalises to one.
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

/// (8, 10) Cycles per instruction with empty queues.
fn fixed_part(c: &Constants, ghz: f64, demand: &Demand, g: &Group) -> f64 {
    if let Some(chase) = demand.profile.chase {
        return ghz * g.factor * (g.m3 * g.memory_ns + (1.0 - g.m3) * sane(chase.hit_ns).max(1e-3));
    }
    let walk = g.cached * c.walk_ns + (1.0 - g.cached) * g.memory_ns;
    let memory = g.m3 * ((1.0 - g.covered) * g.memory_ns + g.covered * c.covered_ns);
    sane(demand.profile.b).max(1e-3) * g.threads_per_core + ghz * (memory + g.mx * g.line_ns + g.mt * walk)
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
