//! How fast all programs are together, worked out anew when something changes.

use super::{Event, Pace, Program, World, WorldError};
use crate::behaviour::{Load, ProgramSpec, Response};
use crate::hardware::{Copying, Demand, Profile, Rate, Solution, Warm, solve_with};
use crate::scheduler::{Classes, Placed, Request, place_in};
use homeostat_model::{CpuId, Nanoseconds};
use std::collections::BTreeMap;

/// Time constant of threads moving to their allowed CPUs, s (experiments.md, CPU affinity: 1.5 s).
const PLACEMENT_SETTLING_S: f64 = 1.5;
/// Times after a placement change at which rates are recomputed; the last one ends it.
const SHIFT_STEPS_S: [f64; 9] = [0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.5, 7.5];
/// Most rounds for the number of busy threads; each solves the whole machine.
const ROUNDS_MAX: usize = 16;
const REST_ROUNDS: u32 = 3;
const ROUNDS_PRECISION: f64 = 1e-6;
/// Share of the busiest chip's threads from which a chip counts as spanned in full.
const SPANNED_FROM: f64 = 0.25;
/// Delay until the end of a copy is noticed, ns: the next slice of a paced move comes within it.
const COPY_END_NS: u64 = 2_000_000;

/// Places of a workload's threads, whether grouped by board, and whether each process has its chip.
type Place = (Option<Placed>, bool, bool);

/// Threads under way, with the remaining share.
struct Fading {
    from: Vec<Place>,
    weight: f64,
}

/// Demands of the programs, with the same index in all lists.
#[derive(Default)]
struct Asked {
    alive: Vec<usize>,
    requests: Vec<Request>,
    demands: Vec<Demand>,
    terms: Vec<Terms>,
}

struct Terms {
    limit: Limit,
    is_bound: bool,
    is_apart: bool,
}

struct Found {
    busy: f64,
    placed: Placed,
    rate: Rate,
    large_share: f64,
    /// CPUs on which it may run, and idle ones.
    room: f64,
    idle: f64,
}

#[derive(Clone, Debug, Default)]
pub(super) struct Rates {
    pub(super) dirty: bool,
    arranging: bool,
    pub(super) solved: u64,
    warm: Warm,
    /// Places of the threads at the last change of a restriction, and its time.
    shift: Option<(Vec<Place>, u64)>,
    pub(super) movers: BTreeMap<usize, Mover>,
}

#[derive(Clone, Debug)]
pub(super) struct Mover {
    /// End, ns.
    pub(super) until: u64,
    copies: Vec<Copying>,
}

impl Rates {
    pub(super) fn unknown() -> Self {
        Self {
            dirty: true,
            ..Self::default()
        }
    }
}

impl World {
    fn effective(&self, p: &Program) -> Option<Vec<bool>> {
        let all_online = self.online.iter().all(|o| *o);
        match &p.mask {
            None if all_online => None,
            None => Some(self.online.clone()),
            Some(mask) => {
                let mut allowed = vec![false; self.online.len()];
                for cpu in mask {
                    if let Some(a) = allowed.get_mut(cpu.0 as usize) {
                        *a = self.online.get(cpu.0 as usize).copied().unwrap_or(false);
                    }
                }
                // The kernel breaks an affinity that leaves no CPU.
                Some(if allowed.iter().any(|a| *a) {
                    allowed
                } else {
                    self.online.clone()
                })
            }
        }
    }

    fn is_bound(&self, p: &Program) -> bool {
        p.mask.as_ref().is_some_and(|mask| {
            let mut allowed = vec![false; self.online.len()];
            for cpu in mask {
                if let Some(a) = allowed.get_mut(cpu.0 as usize) {
                    *a = true;
                }
            }
            self.online.iter().zip(&allowed).any(|(online, a)| *online && !a)
        })
    }

    fn copies(&self) -> Vec<Copying> {
        self.rates
            .movers
            .values()
            .flat_map(|m| m.copies.iter().copied())
            .collect()
    }

    /// Somebody copies memory of a program between nodes for this time: `bytes` by source and destination node. Spread
    /// evenly, it takes its part of links and memory controllers. A new copy of the program replaces the last.
    pub(crate) fn copy(&mut self, p: usize, bytes: &BTreeMap<(usize, usize), u64>, seconds: f64) {
        if bytes.is_empty() || !(seconds > 0.0 && seconds.is_finite()) {
            return;
        }
        let until = self.now_ns + Nanoseconds::from_secs_f64(seconds).0;
        self.rates.movers.insert(
            p,
            Mover {
                until,
                copies: bytes
                    .iter()
                    .map(|((from, to), bytes)| Copying {
                        from: *from,
                        to: *to,
                        gbps: *bytes as f64 / (seconds * 1e9),
                    })
                    .collect(),
            },
        );
        // An immediate next slice replaces this one before its end is noticed: one solution instead of two.
        self.schedule_s((until + COPY_END_NS) as f64 / 1e9, Event::Copied(p, until));
        self.rates.dirty = true;
    }

    pub(super) fn settle(&mut self) {
        if !self.rates.dirty || self.rates.arranging {
            return;
        }
        self.rates.dirty = false;
        self.rates.solved += 1;
        let alive: Vec<usize> = (0..self.programs.len())
            .filter(|p| self.programs[*p].alive.is_some())
            .collect();
        for p in &mut self.programs {
            p.flush();
            if p.alive.is_none() {
                p.placed = None;
                p.pace = Pace::default();
            }
        }
        if alive.is_empty() {
            return;
        }
        let fading = self.rates.shift.as_ref().and_then(|(from, since)| {
            let age = (self.now_ns - since) as f64 / 1e9;
            let last = SHIFT_STEPS_S.last().copied().unwrap_or(0.0);
            (age < last).then(|| Fading {
                from: from.clone(),
                weight: (-age / PLACEMENT_SETTLING_S).exp(),
            })
        });
        if fading.is_none() {
            self.rates.shift = None;
        }
        let mut asked = self.ask(alive, fading.as_ref());
        let (placed, solution) = self.find_rates(&mut asked, fading.as_ref());
        let online = self.online.iter().filter(|o| **o).count() as f64;
        let running: f64 = placed.iter().map(Placed::running_threads).sum();
        let idle = (online - running).max(0.0);
        let each = asked.alive.iter().zip(asked.terms).zip(&asked.requests);
        let each = each.zip(&asked.demands).zip(placed).zip(&solution.rates);
        for (((((index, terms), request), demand), placed), rate) in each {
            let limit = terms.limit;
            let room = self
                .programs
                .get(*index)
                .and_then(|p| self.effective(p))
                .map_or(online, |a| a.iter().filter(|a| **a).count() as f64);
            if let Some(p) = self.programs.get_mut(*index) {
                // Calibrated at full load, from which the present follows.
                self.rates.dirty |= p.load * p.modulation != 1.0
                    && matches!(limit.drive, Drive::FindRate | Drive::FindThink { .. });
                p.adopt(
                    &limit,
                    Found {
                        busy: request.runnable,
                        placed,
                        rate: *rate,
                        large_share: demand.large_share,
                        room,
                        idle,
                    },
                );
            }
        }
    }

    fn ask(&self, alive: Vec<usize>, fading: Option<&Fading>) -> Asked {
        let mut asked = Asked::default();
        for index in &alive {
            let Some((p, spec)) = self
                .programs
                .get(*index)
                .and_then(|p| Some((p, self.specs.get(p.spec)?)))
            else {
                continue;
            };
            let limit = Limit::of(p, spec);
            let lean = if !p.split.is_empty() {
                Some(self.by_chip(&p.split))
            } else {
                (!spec.threads_on.is_empty() && p.mask.is_none()).then(|| spec.threads_on.clone())
            };
            asked.requests.push(Request {
                runnable: if p.drive.busy > 0.0 {
                    p.drive.busy.min(limit.threads)
                } else {
                    limit.start
                },
                allowed: self.effective(p),
                lean,
                chance: 0.0,
            });
            let before = fading.map(|f| (f.from.get(*index), f.weight));
            // Processes under way are as far from their memory as before.
            let arrived = match before {
                Some((place, weight)) if !place.is_some_and(|(_, _, split)| *split) => 1.0 - weight,
                _ => 1.0,
            };
            let mut demand = self.demand(p, arrived);
            let to = f64::from(u8::from(p.grouped));
            demand.grouped = match before {
                Some((place, weight)) => {
                    let before = place.map_or(to, |(_, g, _)| f64::from(u8::from(*g)));
                    weight * before + (1.0 - weight) * to
                }
                None => to,
            };
            asked.demands.push(demand);
            asked.terms.push(Terms {
                is_bound: self.is_bound(p),
                is_apart: !p.split.is_empty(),
                limit,
            });
        }
        asked.alive = alive;
        asked
    }

    /// Thread places and speeds, in rounds: the number of busy threads depends on speed.
    fn find_rates(&mut self, asked: &mut Asked, fading: Option<&Fading>) -> (Vec<Placed>, Solution) {
        let (mut placed, mut solution) = (Vec::new(), Solution::default());
        let copies = self.copies();
        let mut classes = Classes::of(&self.layout, &asked.requests);
        for _ in 0..ROUNDS_MAX {
            for (request, terms) in asked.requests.iter_mut().zip(&asked.terms) {
                request.chance = if terms.is_bound {
                    terms.limit.chance(request.runnable)
                } else {
                    0.0
                };
            }
            placed = place_in(&self.layout, self.scheduler, &asked.requests, &mut classes);
            if let Some(fading) = fading {
                for (index, now) in asked.alive.iter().zip(&mut placed) {
                    if let Some((Some(before), _, _)) = fading.from.get(*index) {
                        *now = blend(before, now, fading.weight);
                    }
                }
            }
            for ((demand, placed), terms) in asked.demands.iter_mut().zip(&placed).zip(&asked.terms) {
                self.aim(demand, placed, terms.is_apart);
            }
            solution = solve_with(&self.layout, &asked.demands, &copies, &mut self.rates.warm);
            let mut moved: f64 = 0.0;
            let requests = asked.terms.iter().zip(&mut asked.requests);
            for (((terms, request), placed), rate) in requests.zip(&placed).zip(&solution.rates) {
                let wanted = terms.limit.busy(placed, unit_s(&terms.limit.profile, rate));
                moved = moved.max((wanted - request.runnable).abs() / wanted.max(1e-9));
                request.runnable = wanted;
            }
            if moved < ROUNDS_PRECISION {
                break;
            }
        }
        (placed, solution)
    }

    fn by_chip(&self, split: &[u32]) -> Vec<f64> {
        let mut chips = vec![0.0; self.layout.chips.len()];
        for chip in split {
            if let Some(c) = chips.get_mut(*chip as usize) {
                *c += 1.0;
            }
        }
        chips
    }

    /// A program's demand apart from its place. If each process has its chip, private memory on the chip's node is
    /// `aligned` as far as it has `arrived` (0..1).
    fn demand(&self, p: &Program, arrived: f64) -> Demand {
        let nodes = self.memory.nodes().len();
        let mut memory = vec![0.0; nodes];
        let mut large = 0.0;
        let mut resident = 0.0;
        let mut aligned = 0.0;
        if let Some(alive) = &p.alive {
            resident = alive.resident().0 as f64;
            for (s, chip) in alive.private.iter().zip(&p.split) {
                let node = self
                    .layout
                    .chips
                    .get(*chip as usize)
                    .map_or(0, |c| c.node as usize);
                let own = s.weight_on().get(node).copied().unwrap_or(0.0);
                let own = arrived * own * s.bytes.0 as f64 / resident.max(1.0);
                aligned += own;
                // Memory elsewhere shares the rest.
                if let Some(m) = memory.get_mut(node) {
                    *m -= own;
                }
            }
            for s in alive.segments() {
                let share = s.bytes.0 as f64 / resident.max(1.0);
                for (to, from) in memory.iter_mut().zip(s.weight_on()) {
                    *to += share * from;
                }
                large += share * s.large_weight();
            }
        }
        for m in &mut memory {
            *m = m.max(0.0);
        }
        let mut demand = Demand::new(p.profile.clone(), Vec::new(), memory);
        demand.aligned = aligned.clamp(0.0, 1.0);
        demand.own_lines = p.alive.as_ref().is_some_and(|a| a.shared.is_none());
        if demand.hot <= 0.0 {
            demand.hot = resident;
        }
        demand.large_share = large.clamp(0.0, 1.0);
        demand
    }

    /// `apart`: each process on a chip of its own.
    fn aim(&self, demand: &mut Demand, placed: &Placed, apart: bool) {
        let threads = placed.running_threads();
        demand.running.clone_from(&placed.running);
        demand.threads_per_core = placed
            .mean_threads_per_core()
            .clamp(1.0, f64::from(self.layout.threads_per_core));
        demand.spread = if apart {
            1.0
        } else {
            chips_spanned(&placed.running)
        };
        let mut on = 0.0;
        for (chip, running) in placed.running.iter().enumerate() {
            if let Some(cpus) = self.layout.cpus_of_chip(chip) {
                let all = f64::from(cpus.end - cpus.start).max(1.0);
                let switched = cpus
                    .filter(|c| self.prefetch_on.get(*c as usize).copied().unwrap_or(true))
                    .count();
                on += running * switched as f64 / all;
            }
        }
        demand.prefetch = if threads > 0.0 {
            (on / threads).clamp(0.0, 1.0)
        } else {
            1.0
        };
    }

    pub(crate) fn touch(&mut self) {
        self.rates.dirty = true;
    }

    /// Restricts or frees a workload's threads. They move with the time constant [`PLACEMENT_SETTLING_S`].
    pub(crate) fn set_mask(&mut self, p: usize, mask: Option<Vec<CpuId>>, grouped: bool, person: bool) {
        self.settle();
        self.begin_shift();
        if let Some(program) = self.programs.get_mut(p) {
            program.bound = person && mask.is_some();
            program.mask = mask;
            program.grouped = grouped;
            program.split.clear();
        }
        self.rates.dirty = true;
    }

    /// Keeps each process of a workload on its chip, by number. [`Self::set_mask`] describes the pace and ends it.
    pub(crate) fn set_split(&mut self, p: usize, chips: Vec<u32>) {
        if let Some(program) = self.programs.get_mut(p) {
            program.split = chips;
        }
        self.rates.dirty = true;
    }

    pub(super) fn begin_shift(&mut self) {
        let from = self
            .programs
            .iter()
            .map(|p| (p.placed.clone(), p.grouped, !p.split.is_empty()))
            .collect();
        self.rates.shift = Some((from, self.now_ns));
        let now = self.now_s();
        for step in SHIFT_STEPS_S {
            self.schedule_s(now + step, Event::Shift);
        }
    }

    pub(crate) fn settle_now(&mut self) {
        self.settle();
    }

    /// Moves threads to their allowed places at once and computes the rates: for trying placements on a copy.
    pub fn come_to_rest(&mut self) {
        self.rates.shift = None;
        self.queue.retain(|_, event| *event != Event::Shift);
        // Each round starts from the last round's busy threads.
        for _ in 0..REST_ROUNDS {
            self.rates.dirty = true;
            self.settle();
        }
    }

    /// A copy of the world with this arranged at once and at rest. Rates are computed once at the end.
    ///
    /// # Errors
    /// What `arrange` answers.
    pub fn at_rest_after(
        &self,
        arrange: impl FnOnce(&mut Self) -> Result<(), WorldError>,
    ) -> Result<Self, WorldError> {
        let mut copy = self.clone();
        copy.rates.arranging = true;
        arrange(&mut copy)?;
        copy.rates.arranging = false;
        copy.come_to_rest();
        Ok(copy)
    }
}

/// Seconds of one running thread for one unit of work.
fn unit_s(profile: &Profile, rate: &Rate) -> f64 {
    if rate.instructions_per_ns > 0.0 {
        profile.instructions(rate.cpi) / rate.instructions_per_ns / 1e9
    } else {
        f64::INFINITY
    }
}

/// Number of chips that the threads of one instance span. A chip counts in full from a quarter of the busiest chip's
/// threads: its cache then holds the working set. Assumed; model-fit P14 counts two chips at shares of .25 and .75.
fn chips_spanned(running: &[f64]) -> f64 {
    let most = running.iter().copied().fold(0.0, f64::max);
    if most <= 0.0 {
        return 1.0;
    }
    running.iter().map(|r| (r / most / SPANNED_FROM).min(1.0)).sum()
}

fn blend(before: &Placed, now: &Placed, weight: f64) -> Placed {
    let mix = |a: &[f64], b: &[f64]| -> Vec<f64> {
        let n = a.len().max(b.len());
        let at = |v: &[f64], i: usize| v.get(i).copied().unwrap_or(0.0);
        (0..n)
            .map(|i| weight * at(a, i) + (1.0 - weight) * at(b, i))
            .collect()
    };
    Placed {
        running: mix(&before.running, &now.running),
        threads_per_core: mix(&before.threads_per_core, &now.threads_per_core),
        cores_dispatched: mix(&before.cores_dispatched, &now.cores_dispatched),
        cpu_use: mix(&before.cpu_use, &now.cpu_use),
        consumed_cores: weight * before.consumed_cores + (1.0 - weight) * now.consumed_cores,
        waiting: weight * before.waiting + (1.0 - weight) * now.waiting,
    }
}

/// Factor on a unit's time because threads wait for CPUs.
fn stretch(placed: &Placed) -> f64 {
    let running = placed.running_threads();
    if running > 0.0 {
        ((running + placed.waiting) / running).max(1.0)
    } else {
        1.0
    }
}

struct Limit {
    profile: Profile,
    threads: f64,
    start: f64,
    drive: Drive,
}

enum Drive {
    /// Customers with a think time in seconds.
    Closed { customers: f64, think_s: f64 },
    /// Requests per second.
    Open { per_s: f64 },
    /// Keeps the start's busy threads: the think time follows from the CPU share of the response time.
    FindThink { share: f64 },
    /// Keeps the start's busy threads: the arrival rate follows.
    FindRate,
}

impl Limit {
    fn of(p: &Program, spec: &ProgramSpec) -> Self {
        let alive = p.alive.as_ref().map_or(0, |a| a.processes.len());
        let threads = alive as f64 * f64::from(spec.threads);
        let factor = p.load * p.modulation;
        let (start, drive) = match spec.load {
            Load::Closed {
                customers,
                think_ms,
                cpu_share,
            } => {
                let n = customers.unwrap_or(threads) * factor;
                let share = cpu_share.unwrap_or(p.profile.cpu_share).clamp(0.001, 1.0);
                match (think_ms, p.drive.think_s) {
                    (Some(ms), _) => (
                        n.min(threads),
                        Drive::Closed {
                            customers: n,
                            think_s: ms / 1e3,
                        },
                    ),
                    (None, Some(think_s)) => (
                        n.min(threads),
                        Drive::Closed {
                            customers: n,
                            think_s,
                        },
                    ),
                    (None, None) => ((n * share).min(threads), Drive::FindThink { share }),
                }
            }
            Load::Open { per_s, busy } => match (per_s, p.drive.offered) {
                (Some(x), _) | (None, Some(x)) => (threads.min(1.0), Drive::Open { per_s: x * factor }),
                (None, None) => (busy.unwrap_or(0.0).min(threads), Drive::FindRate),
            },
        };
        Self {
            profile: p.profile.clone(),
            threads,
            start,
            drive,
        }
    }

    /// Random variation of the busy threads ([`Request::chance`]) at this mean. Thinking customers and outside requests
    /// come and go; without pauses the number is constant.
    fn chance(&self, busy: f64) -> f64 {
        let most = match self.drive {
            Drive::Closed { customers, .. } => customers.min(self.threads),
            Drive::FindThink { share } => return 1.0 - share,
            Drive::Open { .. } | Drive::FindRate => self.threads,
        };
        if most > 0.0 {
            (1.0 - busy / most).clamp(0.0, 1.0)
        } else {
            0.0
        }
    }

    /// Busy threads for this unit time and placement.
    fn busy(&self, placed: &Placed, unit_s: f64) -> f64 {
        let stretch = stretch(placed);
        let wanted = match self.drive {
            Drive::FindThink { .. } | Drive::FindRate => self.start,
            Drive::Closed { customers, think_s } if think_s <= 0.0 => customers,
            Drive::Closed { customers, think_s } => {
                let busy_s = unit_s * stretch;
                customers * busy_s / (busy_s + think_s)
            }
            Drive::Open { per_s } => per_s * unit_s * stretch,
        };
        if wanted.is_finite() {
            wanted.clamp(0.0, self.threads)
        } else {
            self.threads
        }
    }
}

impl Program {
    fn adopt(&mut self, limit: &Limit, found: Found) {
        let placed = found.placed;
        let unit_s = unit_s(&limit.profile, &found.rate);
        let running = placed.running_threads();
        let per_s = |threads: f64| {
            if unit_s.is_finite() && unit_s > 0.0 {
                threads / unit_s
            } else {
                0.0
            }
        };
        let possible = per_s(running);
        let stretch = stretch(&placed);
        // Threads that could run if there were work.
        let most = limit
            .threads
            .min(found.room)
            .min(running + found.idle)
            .max(running);
        let capacity = per_s(most);
        let open = |rate: f64| Response::open(unit_s, most.max(1.0), rate / capacity.max(1e-30));
        let closed = Response::closed(unit_s, unit_s * (stretch - 1.0));
        let mut arrivals = None;
        let (work, response) = match limit.drive {
            Drive::Open { per_s } => {
                arrivals = Some(per_s);
                (per_s.min(possible.max(capacity)), open(per_s))
            }
            Drive::Closed { .. } => (possible, closed),
            // Calibrated in the found state.
            Drive::FindThink { share } => {
                if unit_s.is_finite() {
                    self.drive.think_s = Some(unit_s * stretch * (1.0 - share) / share);
                }
                (possible, closed)
            }
            Drive::FindRate => {
                if unit_s.is_finite() {
                    self.drive.offered = Some(possible);
                }
                arrivals = Some(possible);
                (possible, open(possible))
            }
        };
        self.drive.arrivals = arrivals;
        self.pace = Pace {
            work_per_s: work,
            capacity_per_s: capacity.max(work),
            served: arrivals.filter(|a| *a > 0.0).map_or(1.0, |a| (work / a).min(1.0)),
            cpus: work * unit_s,
            cores: placed.consumed_cores,
            waiting: placed.waiting,
            local_share: found.rate.local,
            large_share: found.large_share,
        };
        if !self.pace.cpus.is_finite() {
            self.pace.cpus = running;
        }
        self.drive.busy = found.busy;
        self.drive.unit_s = unit_s;
        self.drive.response = response;
        self.rate = found.rate;
        self.placed = Some(placed);
    }
}
