//! Where threads run, and how full that makes cores. Mean numbers of runnable threads are spread over cores like a
//! fluid, as two kernels do it. The law of threads on a core (model-fit 2.1) turns fullness into accounting: `u_k`, the
//! throughput of `k` threads relative to a full core; the charge per hardware thread (PURR); and the cores consumed by
//! a partition of a shared pool.

use crate::layout::Layout;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// How the kernel spreads threads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SchedulerKind {
    /// As AIX: the first thread of every core, then the second, and so on. A workload confined to some chips keeps idle
    /// cores there in reserve and lets two threads share the others ([`DISPATCHED`], [`PAIRED`]).
    FanOut,
    /// As Linux: threads stay in their cache domain, idle cores before siblings, within the tolerated imbalance
    /// ([`IMBALANCE`]). The rest goes to the emptiest domain.
    #[default]
    Linux,
}

/// Share of a confined workload's cores that the fan-out dispatches before using its reserve. Fitted to the published
/// processor use after placement (P2): .41 + .33 + .07 + .08 of a core.
pub const DISPATCHED: f64 = 0.89;
/// Share of the dispatched cores with two threads before the reserve is used. Fitted to the same table.
pub const PAIRED: f64 = 0.824;

/// Threads per core up to which Linux leaves threads despite idle cores in other domains. Its load balancer tolerates
/// an imbalance of 25 % between nodes (`imbalance_pct` = 125 in the kernel's scheduling domains).
pub const IMBALANCE: f64 = 1.25;

/// A workload's demand on the scheduler.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Request {
    /// Mean number of threads that want to run, at least 0.
    pub runnable: f64,
    /// CPUs on which they may run, by number; `None` = all. CPUs beyond the vector are not allowed.
    pub allowed: Option<Vec<bool>>,
    /// Preferred chips as weights (where threads started, or where the kernel keeps them); `None` = no preference.
    pub lean: Option<Vec<f64>>,
    /// Random variation of the thread number, for threads bound to fewer CPUs than there are, 0..1. 0: constant demand
    /// (a closed load that never thinks). 1: independent arrivals (Poisson). Unbound threads have 0: they find an idle
    /// core. The published use before placement (Table 3) shows no second thread on any core at 80 % of the cores.
    pub chance: f64,
}

/// The places of a workload.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Placed {
    /// Mean number of running threads by chip.
    pub running: Vec<f64>,
    /// Mean number of running threads, of any workload, on this one's cores, by chip; 1 where it does not run.
    pub threads_per_core: Vec<f64>,
    /// Its share of the mean number of cores on which at least one thread runs, by chip.
    pub cores_dispatched: Vec<f64>,
    /// Its processor use by CPU as accounting shows it, 0..1.
    pub cpu_use: Vec<f64>,
    /// Its share of the consumed cores. A core with a running thread is consumed whole: a shared partition is charged
    /// so, and hardware thread charges add up to it.
    pub consumed_cores: f64,
    /// Threads that want to run and have no CPU.
    pub waiting: f64,
}

impl Placed {
    /// All running threads.
    pub fn running_threads(&self) -> f64 {
        self.running.iter().sum()
    }
    /// Threads per core (k) as the mean over running threads: what [`crate::hardware::Demand`] wants.
    pub fn mean_threads_per_core(&self) -> f64 {
        let n = self.running_threads();
        if n > 0.0 {
            self.running
                .iter()
                .zip(&self.threads_per_core)
                .map(|(r, k)| r * k)
                .sum::<f64>()
                / n
        } else {
            1.0
        }
    }
}

/// Throughput of `k` running threads of a core with `threads`, relative to all running, when a thread waits as long as
/// it computes alone: `1.25 k/(k+1)` for four. `k` may be fractional; 0 to `threads`.
pub fn core_share(k: f64, threads: f64) -> f64 {
    (threads + 1.0) / threads * k / (k + 1.0)
}

/// Running threads on a core with the accounted use `used` (0..1): the inverse of [`core_share`].
#[cfg(test)]
pub(crate) fn running_at(used: f64, threads: f64) -> f64 {
    let most = (threads + 1.0) / threads;
    if used <= 0.0 {
        0.0
    } else if used >= 1.0 {
        threads
    } else {
        (used / (most - used)).min(threads)
    }
}

/// Mean slowdown of a thread because others of its workload run at the same time on the `cores` of its confinement.
/// Their number is Poisson with mean `others`, and threads spread evenly over cores. `speeds`: speed of a thread with
/// 1, 2, … running threads on its core. Excess threads alternate. Means over time hide this cost of binding a mostly
/// idle workload (P7). [`place_in`] applies it by [`Request::chance`].
pub fn collisions(others: f64, cores: u32, speeds: &[f64]) -> f64 {
    let (Some(alone), threads) = (speeds.first().copied(), speeds.len() as f64) else {
        return 1.0;
    };
    let others = sane(others);
    let cores = f64::from(cores.max(1));
    let time = |on_core: u32| 1.0 / speeds[(on_core.max(1) as usize - 1).min(speeds.len() - 1)];
    let with = |running: f64| {
        let per_core = running / cores;
        if running <= cores {
            time(1)
        } else if per_core <= threads {
            let low = per_core.floor();
            let fuller = running - low * cores;
            let (high, low) = (low as u32 + 1, low as u32);
            (fuller * f64::from(high) * time(high) + (cores - fuller) * f64::from(low) * time(low)) / running
        } else {
            time(speeds.len() as u32) * per_core / threads
        }
    };
    if others > 400.0 {
        // The number hardly varies, and its probabilities would underflow.
        return with(others.round() + 1.0) * alone;
    }
    // Ten standard deviations and some cover all but 1e-20 of the distribution.
    let most = (others + 10.0 * others.sqrt() + 20.0) as u32;
    let (mut probability, mut mean) = ((-others).exp(), 0.0);
    for count in 0..=most {
        if count > 0 {
            probability *= others / f64::from(count);
        }
        mean += probability * with(f64::from(count) + 1.0);
    }
    mean * alone
}

/// Interchangeable cores: same chip, same permissions.
struct Class {
    chip: usize,
    /// First CPU of each core.
    cores: Vec<u32>,
    /// Hardware threads per core that each request may use.
    allowed: Vec<u32>,
    load: Vec<f64>,
    /// Most threads that fit: union of the allowed.
    capacity: f64,
}

impl Class {
    fn total(&self) -> f64 {
        self.load.iter().sum()
    }
    fn size(&self) -> f64 {
        self.cores.len() as f64
    }
    fn density(&self) -> f64 {
        self.total() / self.size()
    }
}

#[cfg(test)]
fn place(layout: &Layout, kind: SchedulerKind, requests: &[Request]) -> Vec<Placed> {
    place_in(layout, kind, requests, &mut Classes::of(layout, requests))
}

/// The cores of a machine in classes, for requests that may use certain CPUs.
pub struct Classes(Vec<Class>);

impl Classes {
    /// For these requests, and for others that may use the same CPUs.
    pub fn of(layout: &Layout, requests: &[Request]) -> Self {
        Self(classes(layout, requests))
    }
}

/// Spreads all requests over the machine. Requests with the same permissions are treated alike, in any order. The
/// classes do not depend on the numbers of threads.
pub fn place_in(
    layout: &Layout,
    kind: SchedulerKind,
    requests: &[Request],
    classes: &mut Classes,
) -> Vec<Placed> {
    let classes = &mut classes.0;
    for class in classes.iter_mut() {
        class.load.fill(0.0);
    }
    let chips = layout.chips.len();
    // Most restricted first: the others fill in around them. Equals are spread together.
    let room = |g: usize| -> usize {
        classes
            .iter()
            .filter(|c| c.allowed[g] > 0)
            .map(|c| c.cores.len())
            .sum()
    };
    let mut order: BTreeMap<(usize, Vec<u32>), Vec<usize>> = BTreeMap::new();
    for g in 0..requests.len() {
        let signature = classes.iter().map(|c| c.allowed[g]).collect();
        order.entry((room(g), signature)).or_default().push(g);
    }
    for members in order.values() {
        spread(layout, kind, requests, members, classes);
    }
    // Excess threads of a core wait, all alike.
    for class in classes.iter_mut() {
        let (total, most) = (class.total(), class.capacity * class.size());
        if total > most {
            for load in &mut class.load {
                *load *= most / total;
            }
        }
    }
    let mut placed: Vec<Placed> = requests
        .iter()
        .map(|_| Placed {
            running: vec![0.0; chips],
            threads_per_core: vec![1.0; chips],
            cores_dispatched: vec![0.0; chips],
            cpu_use: vec![0.0; layout.cpus() as usize],
            ..Placed::default()
        })
        .collect();
    // Nobody may use offline CPUs; only a request without a whole chip was confined by choice.
    let confined: Vec<bool> = (0..requests.len())
        .map(|g| (0..chips).any(|chip| !classes.iter().any(|c| c.chip == chip && c.allowed[g] > 0)))
        .collect();
    for class in classes.iter() {
        account(layout, kind, &confined, class, &mut placed);
    }
    collide(layout, kind, requests, classes, &mut placed);
    for (p, request) in placed.iter_mut().zip(requests) {
        for (k, running) in p.threads_per_core.iter_mut().zip(&p.running) {
            if *running <= 0.0 {
                *k = 1.0;
            }
        }
        p.waiting = (sane(request.runnable) - p.running_threads()).max(0.0);
        p.consumed_cores = p.cores_dispatched.iter().sum();
    }
    placed
}

fn sane(x: f64) -> f64 {
    if x.is_finite() && x > 0.0 { x } else { 0.0 }
}

fn classes(layout: &Layout, requests: &[Request]) -> Vec<Class> {
    let threads = layout.threads_per_core;
    let mut found: BTreeMap<(usize, Vec<u32>, u32), Vec<u32>> = BTreeMap::new();
    let mut first = 0_u32;
    for (chip, c) in layout.chips.iter().enumerate() {
        for core in 0..c.cores {
            let start = first + core * threads;
            let may = |request: &Request, cpu: u32| match &request.allowed {
                None => true,
                Some(mask) => mask.get(cpu as usize).copied().unwrap_or(false),
            };
            let allowed = requests
                .iter()
                .map(|r| (start..start + threads).filter(|cpu| may(r, *cpu)).count() as u32)
                .collect();
            let union = (start..start + threads)
                .filter(|cpu| requests.iter().any(|r| may(r, *cpu)))
                .count();
            found
                .entry((chip, allowed, union as u32))
                .or_default()
                .push(start);
        }
        first += c.cores * threads;
    }
    found
        .into_iter()
        .map(|((chip, allowed, union), cores)| Class {
            chip,
            cores,
            load: vec![0.0; allowed.len()],
            allowed,
            capacity: f64::from(union),
        })
        .collect()
}

fn spread(
    layout: &Layout,
    kind: SchedulerKind,
    requests: &[Request],
    members: &[usize],
    classes: &mut [Class],
) {
    let Some(&one) = members.first() else { return };
    let chips = layout.chips.len();
    let open: Vec<usize> = (0..classes.len())
        .filter(|i| classes[*i].allowed[one] > 0)
        .collect();
    if open.is_empty() {
        return;
    }
    // Preferences first, by chip, within the kernel's tolerance.
    let tolerated = match kind {
        // The found places are an input of the measured machine, valid while there are hardware threads.
        SchedulerKind::FanOut => f64::from(layout.threads_per_core),
        SchedulerKind::Linux => IMBALANCE,
    };
    let room = |class: &Class| (tolerated * class.size() - class.total()).max(0.0);
    let mut left: Vec<f64> = members.iter().map(|g| sane(requests[*g].runnable)).collect();
    for chip in 0..chips {
        let here: Vec<usize> = open
            .iter()
            .copied()
            .filter(|i| classes[*i].chip == chip)
            .collect();
        let idle: f64 = here.iter().map(|i| room(&classes[*i])).sum();
        let wants: Vec<f64> = members
            .iter()
            .map(|g| leaning(&requests[*g], chip, chips))
            .collect();
        let sum: f64 = wants.iter().sum();
        if sum <= 0.0 || idle <= 0.0 {
            continue;
        }
        let fits = (idle / sum).min(1.0);
        for i in here {
            let part = room(&classes[i]) / idle;
            for ((g, want), left) in members.iter().zip(&wants).zip(&mut left) {
                let threads = want * fits * part;
                classes[i].load[*g] += threads;
                *left -= threads;
            }
        }
    }
    // The rest fills the emptiest cores, level by level.
    let rest: f64 = left.iter().map(|l| l.max(0.0)).sum();
    if rest <= 1e-12 {
        return;
    }
    let mut by_density: Vec<usize> = open;
    by_density.sort_by(|a, b| classes[*a].density().total_cmp(&classes[*b].density()));
    let (mut cores, mut threads, mut level) = (0.0, rest, 0.0);
    for (n, i) in by_density.iter().enumerate() {
        cores += classes[*i].size();
        threads += classes[*i].total();
        level = threads / cores;
        if by_density
            .get(n + 1)
            .is_none_or(|next| classes[*next].density() >= level)
        {
            break;
        }
    }
    for i in by_density {
        let more = (level - classes[i].density()).max(0.0) * classes[i].size();
        for (g, left) in members.iter().zip(&left) {
            classes[i].load[*g] += more * left.max(0.0) / rest;
        }
    }
}

/// Threads bound to some cores meet more often by chance than on average. The steady part shares cores as the mean, the
/// rest as in [`collisions`]. The exception is whole chips under the fan-out, whose measured fullness (P2) includes
/// chance. Core charges stay those of the means.
fn collide(
    layout: &Layout,
    kind: SchedulerKind,
    requests: &[Request],
    classes: &[Class],
    placed: &mut [Placed],
) {
    let full = layout.threads_per_core;
    for (g, request) in requests.iter().enumerate() {
        if sane(request.chance) <= 0.0 {
            continue;
        }
        let mine = || classes.iter().filter(|c| c.allowed[g] > 0);
        let whole_chips = layout.chips.iter().enumerate().all(|(index, chip)| {
            let of_chip = || mine().filter(|c| c.chip == index);
            of_chip().all(|c| c.allowed[g] == full)
                && [0, chip.cores as usize].contains(&of_chip().map(|c| c.cores.len()).sum())
        });
        if kind == SchedulerKind::FanOut && whole_chips {
            continue;
        }
        let cores: f64 = mine().map(Class::size).sum();
        let (mut running, mut by_chance) = (0.0, 0.0);
        for class in mine() {
            for (load, other) in class.load.iter().zip(requests) {
                running += load;
                by_chance += load * sane(other.chance).min(1.0);
            }
        }
        let density = running / cores;
        if running <= 0.0 {
            continue;
        }
        let chance = by_chance / running;
        let allowed = mine().map(|c| c.allowed[g]).max().unwrap_or(full).clamp(1, full);
        // With speeds of 1/k, the loss is the number of threads on the core.
        let speeds: Vec<f64> = (1..=allowed).map(|k| 1.0 / f64::from(k)).collect();
        let met = collisions(running, cores as u32, &speeds);
        let per_core = ((1.0 - chance) * density.max(1.0) + chance * met).min(f64::from(full));
        if let Some(p) = placed.get_mut(g) {
            for (k, on) in p.threads_per_core.iter_mut().zip(&p.running) {
                if *on > 0.0 {
                    *k = k.max(per_core);
                }
            }
        }
    }
}

fn leaning(request: &Request, chip: usize, chips: usize) -> f64 {
    let Some(lean) = &request.lean else { return 0.0 };
    let weight = |i: usize| sane(lean.get(i).copied().unwrap_or(0.0));
    let sum: f64 = (0..chips).map(weight).sum();
    if sum <= 0.0 {
        return 0.0;
    }
    sane(request.runnable) * weight(chip) / sum
}

/// Share of a class's cores with a running thread, and mean number of threads there.
fn fullness(kind: SchedulerKind, confined: bool, density: f64, capacity: f64) -> (f64, f64) {
    if density <= 0.0 {
        return (0.0, 1.0);
    }
    if kind == SchedulerKind::FanOut && confined {
        let pair = 1.0 + PAIRED;
        let busy = if density <= DISPATCHED {
            density
        } else if density <= DISPATCHED * pair {
            DISPATCHED
        } else {
            (density / pair).min(1.0)
        };
        let busy = busy.max(density / capacity.max(1.0));
        (busy, density / busy)
    } else {
        let busy = density.min(1.0);
        (busy, density / busy)
    }
}

fn account(layout: &Layout, kind: SchedulerKind, confined: &[bool], class: &Class, placed: &mut [Placed]) {
    let total = class.total();
    if total <= 0.0 {
        return;
    }
    let threads = layout.threads_per_core;
    let full = f64::from(threads);
    let packed: f64 = class
        .load
        .iter()
        .zip(confined)
        .filter(|(_, c)| **c)
        .map(|(load, _)| load)
        .sum();
    let (busy, k) = fullness(kind, packed > 0.5 * total, class.density(), class.capacity);
    // A mean of k threads mixes cores with the next lower and next higher whole number.
    let low = k.floor().clamp(1.0, full);
    let high = (low + 1.0).min(full);
    let at_high = if high > low {
        (k - low).clamp(0.0, 1.0)
    } else {
        0.0
    };
    let charge = |thread: u32| {
        let with = |running: f64| {
            let used = core_share(running, full);
            if f64::from(thread) < running {
                used / running
            } else {
                (1.0 - used) / (full - running).max(1.0)
            }
        };
        busy * ((1.0 - at_high) * with(low) + at_high * with(high))
    };
    let charges: Vec<f64> = (0..threads).map(charge).collect();
    for (g, p) in placed.iter_mut().enumerate() {
        let load = class.load[g];
        if load <= 0.0 {
            continue;
        }
        let part = load / total;
        let before = p.running[class.chip];
        p.threads_per_core[class.chip] =
            (p.threads_per_core[class.chip] * before + k * load) / (before + load);
        p.running[class.chip] = before + load;
        p.cores_dispatched[class.chip] += part * busy * class.size();
        for start in &class.cores {
            for (thread, charge) in charges.iter().enumerate() {
                if let Some(cpu) = p.cpu_use.get_mut(*start as usize + thread) {
                    *cpu += part * charge;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn close(a: f64, b: f64, tolerance: f64) {
        assert!((a - b).abs() <= tolerance, "{a} is not {b} within {tolerance}");
    }

    fn only_chip(layout: &Layout, chip: usize) -> Option<Vec<bool>> {
        let cpus = layout.cpus_of_chip(chip).unwrap();
        Some((0..layout.cpus()).map(|c| cpus.contains(&c)).collect())
    }

    #[test]
    fn the_law_of_shared_cores_has_the_published_values() {
        for (k, u) in [(1.0, 0.625), (2.0, 0.8333), (3.0, 0.9375), (4.0, 1.0)] {
            close(core_share(k, 4.0), u, 5e-5);
        }
        for (u, k) in [
            (0.17, 0.1574),
            (0.60, 0.9231),
            (0.80, 1.7778),
            (0.85, 2.125),
            (0.90, 2.5714),
            (1.0, 4.0),
        ] {
            close(running_at(u, 4.0), k, 5e-5);
            close(core_share(running_at(u, 4.0), 4.0), u, 1e-12);
        }
        close(core_share(1.0, 1.0), 1.0, 1e-12);
    }

    #[test]
    fn who_asks_again_gets_what_was_answered_first() {
        let layout = Layout::named("power7-10+6").unwrap();
        let asked = |runnable: f64| {
            [
                Request {
                    runnable,
                    allowed: only_chip(&layout, 1),
                    lean: None,
                    chance: 0.5,
                },
                Request {
                    runnable: 7.5,
                    ..Request::default()
                },
            ]
        };
        for kind in [SchedulerKind::FanOut, SchedulerKind::Linux] {
            let mut classes = Classes::of(&layout, &asked(1.0));
            for runnable in [3.0, 40.0, 0.0, 3.0] {
                let again = place_in(&layout, kind, &asked(runnable), &mut classes);
                assert_eq!(again, place(&layout, kind, &asked(runnable)));
            }
        }
    }

    #[test]
    fn processor_use_by_hardware_thread_is_as_published_before_placement() {
        // P2 before: threads fanned out, .90 and .63 of the cores of the two domains busy.
        let layout = Layout::named("power7-10+6").unwrap();
        let runnable = 9.0 + 6.0 * 0.63;
        let request = Request {
            runnable,
            allowed: None,
            lean: Some(vec![9.0, 6.0 * 0.63]),
            chance: 0.0,
        };
        let placed = &place(&layout, SchedulerKind::FanOut, &[request])[0];
        for (cpu, published) in [0.57, 0.11, 0.11, 0.11].into_iter().enumerate() {
            close(placed.cpu_use[cpu], published, 0.01);
        }
        for (cpu, published) in [0.39, 0.08, 0.08, 0.08].into_iter().enumerate() {
            close(placed.cpu_use[40 + cpu], published, 0.01);
        }
        close(placed.consumed_cores, 12.78, 1e-9);
        close(placed.mean_threads_per_core(), 1.0, 1e-12);
    }

    #[test]
    fn processor_use_by_hardware_thread_is_as_published_after_placement() {
        // P2 after: the same threads on the ten cores of the first domain.
        let layout = Layout::named("power7-10+6").unwrap();
        let runnable = 10.0 * DISPATCHED * (1.0 + PAIRED);
        let request = Request {
            runnable,
            allowed: only_chip(&layout, 0),
            lean: None,
            chance: 0.0,
        };
        let placed = &place(&layout, SchedulerKind::FanOut, &[request])[0];
        for (cpu, oracle) in [0.403, 0.325, 0.081, 0.081].into_iter().enumerate() {
            close(placed.cpu_use[cpu], oracle, 5e-4);
            close(placed.cpu_use[36 + cpu], oracle, 5e-4);
        }
        for cpu in 40..64 {
            assert_eq!(placed.cpu_use[cpu], 0.0);
        }
        close(placed.consumed_cores, 8.9, 1e-9);
        close(placed.threads_per_core[0], 1.824, 1e-9);
        assert_eq!(placed.waiting, 0.0);
    }

    #[test]
    fn a_confined_workload_keeps_its_reserve_until_it_needs_it() {
        let layout = Layout::named("power7-10+6").unwrap();
        let at = |runnable: f64| {
            let request = Request {
                runnable,
                allowed: only_chip(&layout, 0),
                lean: None,
                chance: 0.0,
            };
            place(&layout, SchedulerKind::FanOut, &[request]).remove(0)
        };
        close(at(5.0).consumed_cores, 5.0, 1e-9);
        close(at(12.0).consumed_cores, 8.9, 1e-9);
        close(at(18.0).consumed_cores, 18.0 / 1.824, 1e-9);
        close(at(30.0).consumed_cores, 10.0, 1e-9);
        close(at(30.0).threads_per_core[0], 3.0, 1e-9);
        close(at(50.0).waiting, 10.0, 1e-9);
        // A CPU that is offline confines nobody.
        let allowed = Some((0..64).map(|cpu| cpu != 63).collect());
        let request = Request {
            runnable: 16.0,
            allowed,
            lean: None,
            chance: 0.0,
        };
        close(
            place(&layout, SchedulerKind::FanOut, &[request])[0].consumed_cores,
            16.0,
            1e-9,
        );
    }

    #[test]
    fn linux_stays_at_home_until_the_imbalance_is_too_large() {
        let layout = Layout::named("x86-2s").unwrap();
        let at = |runnable: f64| {
            let request = Request {
                runnable,
                allowed: None,
                lean: Some(vec![1.0, 0.0]),
                chance: 0.0,
            };
            place(&layout, SchedulerKind::Linux, &[request]).remove(0).running
        };
        assert_eq!(at(16.0), [16.0, 0.0]);
        assert_eq!(at(20.0), [20.0, 0.0]);
        close(at(24.0)[1], 4.0, 1e-9);
        close(at(60.0)[0], 30.0, 1e-9);
    }

    #[test]
    fn the_rest_fills_in_around_those_who_are_confined() {
        let layout = Layout::named("x86-2s").unwrap();
        let confined = Request {
            runnable: 16.0,
            allowed: only_chip(&layout, 0),
            lean: None,
            chance: 0.0,
        };
        let free = Request {
            runnable: 20.0,
            allowed: None,
            lean: None,
            chance: 0.0,
        };
        for requests in [[confined.clone(), free.clone()], [free, confined]] {
            let placed = place(&layout, SchedulerKind::Linux, &requests);
            let (c, f) = if requests[0].allowed.is_some() {
                (0, 1)
            } else {
                (1, 0)
            };
            close(placed[c].running[0], 16.0, 1e-9);
            close(placed[f].running[0], 2.0, 1e-9);
            close(placed[f].running[1], 18.0, 1e-9);
        }
        // Only the first hardware thread of two cores: no more than two threads run.
        let allowed = Some((0..64).map(|c| c == 0 || c == 2).collect());
        let placed = place(
            &layout,
            SchedulerKind::FanOut,
            &[Request {
                runnable: 5.0,
                allowed,
                lean: None,
                chance: 0.0,
            }],
        );
        close(placed[0].running[0], 2.0, 1e-9);
        close(placed[0].waiting, 3.0, 1e-9);
        close(placed[0].threads_per_core[0], 1.0, 1e-9);
        // Nowhere to go.
        let nowhere = Request {
            runnable: 5.0,
            allowed: Some(vec![]),
            lean: None,
            chance: 0.0,
        };
        close(
            place(&layout, SchedulerKind::FanOut, &[nowhere])[0].waiting,
            5.0,
            1e-9,
        );
    }

    #[test]
    fn threads_collide_more_the_more_they_are_and_the_fewer_cores_they_have() {
        let speeds = [1.0, 0.7, 0.5, 0.4];
        close(collisions(0.0, 1, &speeds), 1.0, 1e-12);
        close(collisions(1.0, 1000, &speeds), 1.0, 1e-12);
        let mut before = 1.0;
        for others in [0.5, 1.0, 4.0, 30.0, 399.0, 401.0, 5000.0] {
            let slow = collisions(others, 2, &speeds);
            assert!(slow > before, "{others}: {slow} after {before}");
            assert!(slow > collisions(others, 3, &speeds));
            before = slow;
        }
        // Always many: they take turns at the speed of full cores.
        close(collisions(4001.0, 2, &speeds), 4002.0 / 8.0 / 0.4, 1e-6);
        assert_eq!(collisions(1.0, 1, &[]), 1.0);
    }

    #[test]
    fn bound_threads_that_come_and_go_share_cores_more_often_than_their_mean_says() {
        let layout = Layout::named("power750-16").unwrap();
        let at = |runnable: f64, cores: u32, chance: f64| {
            let request = Request {
                runnable,
                allowed: Some((0..layout.cpus()).map(|cpu| cpu < 4 * cores).collect()),
                lean: None,
                chance,
            };
            place(&layout, SchedulerKind::Linux, &[request])
                .remove(0)
                .threads_per_core[0]
        };
        // Binomial: 1 + (n - 1) q others on the one core, with n = 19.16 customers of which 1.088 compute.
        close(
            at(1.088, 1, 1.0 - 1.088 / 19.16),
            1.0 + 18.16 * 1.088 / 19.16,
            1e-9,
        );
        assert_eq!(at(1.088, 1, 0.0), 1.088);
        // The more cores, the less chance there is to meet.
        let by_cores: Vec<f64> = [1, 2, 4, 8].map(|cores| at(1.088, cores, 1.0)).to_vec();
        assert!(by_cores.windows(2).all(|w| w[0] > w[1]), "{by_cores:?}");
        close(by_cores[3], 1.0, 1e-3);
        // Full cores are full whatever the chance.
        close(at(60.0, 1, 1.0), 4.0, 1e-12);
        // A neighbour that always runs varies nothing.
        let steady = |runnable: f64, chance: f64| Request {
            runnable,
            allowed: Some((0..layout.cpus()).map(|cpu| cpu < 4).collect()),
            lean: None,
            chance,
        };
        let with = |chance: f64| {
            place(
                &layout,
                SchedulerKind::Linux,
                &[steady(0.5, 1.0), steady(2.0, chance)],
            )[0]
            .threads_per_core[0]
        };
        assert!(
            with(1.0) > with(0.0) && with(0.0) > 2.5,
            "{} {}",
            with(1.0),
            with(0.0)
        );
    }

    #[test]
    fn the_measured_reserve_of_the_fan_out_on_whole_chips_is_not_charged_twice() {
        let layout = Layout::named("power7-10+6").unwrap();
        let at = |chance: f64| {
            let request = Request {
                runnable: 10.0 * DISPATCHED * (1.0 + PAIRED),
                allowed: only_chip(&layout, 0),
                lean: None,
                chance,
            };
            place(&layout, SchedulerKind::FanOut, &[request])
                .remove(0)
                .threads_per_core[0]
        };
        close(at(1.0), at(0.0), 1e-12);
        assert!(at(1.0) > 1.8);
    }

    fn requests() -> impl Strategy<Value = Vec<Request>> {
        let request = (
            0.0..90.0_f64,
            proptest::option::of(proptest::collection::vec(any::<bool>(), 64)),
            any::<bool>(),
            0.0..1.5_f64,
        )
            .prop_map(|(runnable, allowed, lean, chance)| Request {
                runnable,
                allowed,
                lean: lean.then(|| vec![0.8, 0.2]),
                chance,
            });
        proptest::collection::vec(request, 1..6)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(200))]
        #[test]
        fn threads_are_conserved_and_fit(requests in requests(), fan_out in any::<bool>()) {
            let kind = if fan_out { SchedulerKind::FanOut } else { SchedulerKind::Linux };
            let layout = Layout::named("x86-2s").unwrap();
            let placed = place(&layout, kind, &requests);
            for (p, r) in placed.iter().zip(&requests) {
                prop_assert!((p.running_threads() + p.waiting - r.runnable).abs() < 1e-9);
                let room = r.allowed.as_ref().map_or(64, |a| a.iter().filter(|x| **x).count());
                prop_assert!(p.running_threads() <= room as f64 + 1e-9 || requests.len() > 1);
                for k in &p.threads_per_core {
                    prop_assert!((1.0..=2.0 + 1e-9).contains(k), "k = {}", k);
                }
                prop_assert!((p.cpu_use.iter().sum::<f64>() - p.consumed_cores).abs() < 1e-9);
            }
            for cpu in 0..64 {
                let used: f64 = placed.iter().map(|p| p.cpu_use[cpu]).sum();
                prop_assert!((-1e-12..=1.0 + 1e-9).contains(&used));
            }
            for chip in 0..2 {
                let cores: f64 = placed.iter().map(|p| p.cores_dispatched[chip]).sum();
                prop_assert!(cores <= 16.0 + 1e-9);
            }
        }
    }
}
