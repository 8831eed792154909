//! The best that any fixed placement can reach on a simulated machine: the reference for homeostat.
//!
//! A placement covers all that homeostat's effectors can change, in units of chips. For every program it gives the
//! chips of its threads, whether its memory lies with them, and large pages. For every chip it gives prefetch. Each
//! placement is tried on a clone of the world, which gives all speeds without noise or transition costs. Small machines
//! try all placements; larger ones climb from several starting points.
//!
//! [`merit`] judges oracle and homeostat. A placement in which a program cannot do its offered work is invalid: its
//! requests would wait ever longer, however little CPU time each takes.

use homeostat_simulator::layout::Layout;
use homeostat_simulator::world::{PersonChange, World, WorldError};
use std::collections::{BTreeMap, BTreeSet};

/// Most placements for an exhaustive search.
const EXHAUSTIVE_MAX: u64 = 1500;
const TRIES_MAX: usize = 3000;
/// Least relative gain of a step: less is noise of the fixed point.
const UPHILL_MIN: f64 = 1e-6;
/// Machines with at most this many chips try all sets of chips.
const ALL_SETS_CHIPS_MAX: usize = 4;

/// Share of the offered work from which a program counts as serving it: noise and rounding.
const SERVED_MIN: f64 = 0.99;

/// A program that counts.
#[derive(Clone, Debug, PartialEq)]
pub struct Subject {
    /// Its workload.
    pub name: String,
    /// Closed load with a fixed number of customers: work per second counts. Otherwise arrivals have a rate: work per
    /// CPU second counts, as long as the offered work is done.
    pub closed: bool,
}

/// Merit of each subject without noise: work per second (closed load), or per CPU second times the served share.
pub fn merits(world: &mut World, subjects: &[Subject]) -> Vec<f64> {
    subjects
        .iter()
        .map(|s| {
            let pace = world.pace(&s.name);
            if s.closed {
                pace.work_per_s
            } else if pace.cpus > 0.0 {
                pace.served * pace.work_per_s / pace.cpus
            } else {
                0.0
            }
        })
        .collect()
}

/// Merit of a state relative to another; 1 = equal. The geometric mean keeps one's gain from hiding another's ruin.
pub fn merit(now: &[f64], before: &[f64]) -> f64 {
    let logs: Vec<f64> = now
        .iter()
        .zip(before)
        .filter(|(_, b)| **b > 0.0)
        .map(|(n, b)| (n / b).max(1e-9).ln())
        .collect();
    if logs.is_empty() {
        return 1.0;
    }
    (logs.iter().sum::<f64>() / logs.len() as f64).exp()
}

/// The smallest share of what is offered to it that a program does: 1 where all do all of it.
pub fn least_served(world: &mut World, subjects: &[Subject]) -> f64 {
    let served = subjects.iter().map(|s| world.pace(&s.name).served);
    served.fold(1.0, f64::min)
}

/// Worth of a machine state relative to another: its [`merit`]. A state in which a program cannot do its offered work
/// is never better than the other. Among such states the one with the least undone work is best, so that a search finds
/// its way out. The same figure judges the oracle's placements and homeostat's states.
pub fn worth(world: &mut World, subjects: &[Subject], before: &[f64]) -> f64 {
    let merit = merit(&merits(world, subjects), before);
    let least = least_served(world, subjects);
    if least < SERVED_MIN {
        merit.min(1.0) * least
    } else {
        merit
    }
}

/// The choice for one program.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Choice {
    /// Chips on which its threads may run; `None` = wherever the scheduler puts them.
    pub chips: Option<Vec<usize>>,
    /// Its memory lies on the nodes of those chips; else where it was.
    pub beside: bool,
    /// Its memory is on large pages, as far as they could be split again; else as it was.
    pub large: bool,
}

impl Choice {
    const AS_IT_WAS: Self = Self {
        chips: None,
        beside: false,
        large: false,
    };
}

/// The choice for the machine.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Placement {
    /// By subject.
    pub programs: Vec<Choice>,
    /// Chips whose hardware prefetch is off.
    pub prefetch_off: BTreeSet<usize>,
}

/// The best that was found.
#[derive(Clone, Debug, PartialEq)]
pub struct Best {
    /// Its merit relative to the machine left alone; at least 1.
    pub merit: f64,
    /// The placement.
    pub placement: Placement,
}

type Step = Box<dyn Fn(&Placement) -> Placement>;

/// Looks for the best placement.
pub struct Oracle<'a> {
    base: &'a World,
    layout: Layout,
    subjects: &'a [Subject],
    alone: Vec<f64>,
    sets: Vec<Vec<usize>>,
    tried: usize,
    /// Worth of the tried placements; bounded by the number of tries.
    known: BTreeMap<Placement, f64>,
}

impl<'a> Oracle<'a> {
    /// For a world at rest in which nothing was changed yet.
    pub fn new(base: &'a World, subjects: &'a [Subject]) -> Self {
        let layout = base.layout().clone();
        let alone = merits(&mut base.clone(), subjects);
        Self {
            sets: chip_sets(&layout),
            layout,
            base,
            subjects,
            alone,
            tried: 0,
            known: BTreeMap::new(),
        }
    }

    /// Each subject's merit without a change.
    pub fn alone(&self) -> &[f64] {
        &self.alone
    }

    /// The world with that placement, at rest.
    ///
    /// # Errors
    /// The world refuses (a program that is not there).
    pub fn world_with(&self, placement: &Placement) -> Result<World, WorldError> {
        self.base.at_rest_after(|world| self.arrange(world, placement))
    }

    fn arrange(&self, world: &mut World, placement: &Placement) -> Result<(), WorldError> {
        for (subject, choice) in self.subjects.iter().zip(&placement.programs) {
            let program = subject.name.clone();
            if let Some(chips) = &choice.chips {
                let cpus = chips
                    .iter()
                    .filter_map(|c| self.layout.cpus_of_chip(*c))
                    .flatten();
                world.person(PersonChange::BindThreads {
                    program: program.clone(),
                    cpus: Some(cpus.collect()),
                })?;
                if choice.beside {
                    let nodes: BTreeSet<u32> = chips
                        .iter()
                        .filter_map(|c| self.layout.chips.get(*c))
                        .map(|c| c.node)
                        .collect();
                    world.person(PersonChange::BindMemory {
                        program: program.clone(),
                        nodes: Some(nodes.into_iter().collect()),
                    })?;
                }
            }
            if choice.large {
                world.large_pages_undoable(&program)?;
            }
        }
        if !placement.prefetch_off.is_empty() {
            let cpus = placement
                .prefetch_off
                .iter()
                .filter_map(|c| self.layout.cpus_of_chip(*c))
                .flatten();
            world.person(PersonChange::Prefetch {
                cpus: Some(cpus.collect()),
                on: false,
            })?;
        }
        Ok(())
    }

    /// Worth of a placement. Remembered placements count as tries, too: the search budget does not depend on memory.
    fn value(&mut self, placement: &Placement) -> Result<f64, WorldError> {
        self.tried += 1;
        if let Some(known) = self.known.get(placement) {
            return Ok(*known);
        }
        let value = worth(&mut self.world_with(placement)?, self.subjects, &self.alone);
        self.known.insert(placement.clone(), value);
        Ok(value)
    }

    fn choices(&self) -> Vec<Choice> {
        let mut all = Vec::new();
        for large in [false, true] {
            all.push(Choice {
                large,
                ..Choice::AS_IT_WAS
            });
            for set in &self.sets {
                for beside in [false, true] {
                    all.push(Choice {
                        chips: Some(set.clone()),
                        beside,
                        large,
                    });
                }
            }
        }
        all
    }

    /// The best placement, on large machines the best that the search finds.
    ///
    /// # Errors
    /// The world refuses.
    pub fn best(&mut self) -> Result<Best, WorldError> {
        let chips = self.layout.chips.len() as u32;
        let per_program = self.choices().len() as u64;
        let all = u32::try_from(self.subjects.len())
            .ok()
            .and_then(|n| per_program.checked_pow(n))
            .and_then(|n| n.checked_mul(1 << chips.min(32)));
        if all.is_some_and(|n| n <= EXHAUSTIVE_MAX) {
            self.exhaustive()
        } else {
            self.search()
        }
    }

    /// Tries every placement.
    ///
    /// # Errors
    /// The world refuses.
    pub fn exhaustive(&mut self) -> Result<Best, WorldError> {
        let choices = self.choices();
        let n = self.subjects.len();
        let chips = self.layout.chips.len();
        let mut at = vec![0; n];
        let mut best = self.left_alone();
        loop {
            for bits in 0..1_u64 << chips {
                let placement = Placement {
                    programs: at
                        .iter()
                        .filter_map(|i: &usize| choices.get(*i).cloned())
                        .collect(),
                    prefetch_off: (0..chips).filter(|c| bits >> c & 1 == 1).collect(),
                };
                let value = self.value(&placement)?;
                if value > best.merit {
                    best = Best {
                        merit: value,
                        placement,
                    };
                }
            }
            // Counts up, the first program fastest.
            let Some(digit) = at.iter().position(|i| i + 1 < choices.len()) else {
                break;
            };
            for lower in at.iter_mut().take(digit) {
                *lower = 0;
            }
            if let Some(i) = at.get_mut(digit) {
                *i += 1;
            }
        }
        Ok(best)
    }

    fn left_alone(&self) -> Best {
        Best {
            merit: 1.0,
            placement: self.as_it_was(),
        }
    }

    fn as_it_was(&self) -> Placement {
        Placement {
            programs: vec![Choice::AS_IT_WAS; self.subjects.len()],
            prefetch_off: BTreeSet::new(),
        }
    }

    /// Goes uphill from several starting points.
    ///
    /// # Errors
    /// The world refuses.
    pub fn search(&mut self) -> Result<Best, WorldError> {
        let mut best = self.left_alone();
        for start in self.starts() {
            let found = self.climb(start)?;
            if found.merit > best.merit {
                best = found;
            }
        }
        Ok(best)
    }

    /// Left alone; each program on the smallest sufficient set of the least used chips, the busiest first; and the same
    /// with memory in place and prefetch off.
    fn starts(&self) -> Vec<Placement> {
        let as_it_was = self.as_it_was();
        let mut world = self.base.clone();
        let mut load = vec![0.0; self.layout.chips.len()];
        let demand: Vec<f64> = self
            .subjects
            .iter()
            .map(|s| world.pace(&s.name))
            .map(|p| p.cpus + p.waiting)
            .collect();
        let mut order: Vec<usize> = (0..self.subjects.len()).collect();
        order.sort_by(|a, b| demand[*b].total_cmp(&demand[*a]));
        let room = |set: &[usize]| -> f64 {
            set.iter()
                .filter_map(|c| self.layout.chips.get(*c))
                .map(|c| f64::from(c.cores * self.layout.threads_per_core))
                .sum()
        };
        let mut packed = as_it_was.clone();
        for p in order {
            let fullness = |set: &[usize]| {
                let used: f64 = set.iter().map(|c| load[*c]).sum();
                (used + demand[p]) / room(set).max(1.0)
            };
            let fits = self.sets.iter().filter(|s| fullness(s) <= 0.9);
            let chosen = fits
                .min_by(|a, b| {
                    (a.len(), fullness(a))
                        .partial_cmp(&(b.len(), fullness(b)))
                        .unwrap_or(std::cmp::Ordering::Equal)
                })
                .or_else(|| {
                    self.sets
                        .iter()
                        .min_by(|a, b| fullness(a).total_cmp(&fullness(b)))
                })
                .cloned();
            if let (Some(set), Some(choice)) = (chosen, packed.programs.get_mut(p)) {
                for c in &set {
                    load[*c] += demand[p] / set.len() as f64;
                }
                *choice = Choice {
                    chips: Some(set),
                    beside: true,
                    large: true,
                };
            }
        }
        let mut dry = packed.clone();
        dry.prefetch_off = (0..self.layout.chips.len()).collect();
        for choice in &mut dry.programs {
            choice.beside = false;
        }
        vec![packed, as_it_was, dry]
    }

    /// Climbs while a step helps: for each program another set, memory with it or not, large pages or not; prefetch of
    /// one or all chips; two programs swapped.
    fn climb(&mut self, start: Placement) -> Result<Best, WorldError> {
        let choices = self.choices();
        let chips = self.layout.chips.len();
        let mut at = Best {
            merit: self.value(&start)?,
            placement: start,
        };
        let budget = self.tried + TRIES_MAX / 3;
        loop {
            let before = at.merit;
            let mut steps: Vec<Step> = Vec::new();
            for p in 0..self.subjects.len() {
                for choice in &choices {
                    let choice = choice.clone();
                    steps.push(Box::new(move |from| {
                        let mut to = from.clone();
                        if let Some(c) = to.programs.get_mut(p) {
                            *c = choice.clone();
                        }
                        to
                    }));
                }
                for q in 0..p {
                    steps.push(Box::new(move |from| {
                        let mut to = from.clone();
                        to.programs.swap(p, q);
                        to
                    }));
                }
            }
            for c in 0..chips {
                steps.push(Box::new(move |from| {
                    let mut to = from.clone();
                    if !to.prefetch_off.remove(&c) {
                        to.prefetch_off.insert(c);
                    }
                    to
                }));
            }
            for all in [BTreeSet::new(), (0..chips).collect()] {
                steps.push(Box::new(move |from| Placement {
                    prefetch_off: all.clone(),
                    ..from.clone()
                }));
            }
            for step in steps {
                if self.tried >= budget {
                    return Ok(at);
                }
                let placement = step(&at.placement);
                if placement == at.placement {
                    continue;
                }
                let merit = self.value(&placement)?;
                if merit > at.merit * (1.0 + UPHILL_MIN) {
                    at = Best { merit, placement };
                }
            }
            if at.merit <= before {
                return Ok(at);
            }
        }
    }
}

/// Chip sets for a program: all on small machines; else single chips, neighbour pairs, nodes, boards, runs of boards.
fn chip_sets(layout: &Layout) -> Vec<Vec<usize>> {
    let n = layout.chips.len();
    let mut sets: BTreeSet<Vec<usize>> = BTreeSet::new();
    if n <= ALL_SETS_CHIPS_MAX {
        for bits in 1..1_u32 << n {
            sets.insert((0..n).filter(|c| bits >> c & 1 == 1).collect());
        }
    } else {
        for c in 0..n {
            sets.insert(vec![c]);
            if c + 1 < n {
                sets.insert(vec![c, c + 1]);
            }
        }
        let group = |key: &dyn Fn(usize) -> u32, low: u32, high: u32| -> Vec<usize> {
            (0..n).filter(|c| (low..=high).contains(&key(*c))).collect()
        };
        let board = |c: usize| layout.chips.get(c).map_or(0, |c| c.board);
        let node = |c: usize| layout.chips.get(c).map_or(0, |c| c.node);
        for c in 0..n {
            sets.insert(group(&node, node(c), node(c)));
            for d in 0..n {
                let (low, high) = (board(c).min(board(d)), board(c).max(board(d)));
                sets.insert(group(&board, low, high));
            }
        }
        sets.insert((0..n / 2).collect());
        sets.insert((n / 2..n).collect());
    }
    sets.remove(&Vec::new());
    // All chips at once is a program left free.
    if n == 1 {
        sets.clear();
    }
    sets.into_iter().collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::swarm;
    use homeostat_model::Nanoseconds;

    fn worlds(count: u64) -> impl Iterator<Item = (World, Vec<Subject>)> {
        let options = swarm::Options {
            seed: 7,
            ..swarm::Options::default()
        };
        (0..count).map(move |index| {
            let scenario = swarm::scenario(&options, index);
            let subjects = swarm::subjects(&scenario);
            let mut world = World::new(scenario.world().unwrap()).unwrap();
            world.advance_to(Nanoseconds::from_secs(1));
            (world, subjects)
        })
    }

    #[test]
    fn on_small_machines_the_search_finds_what_trying_all_finds() {
        let mut compared = 0;
        let mut gained = 0;
        for (world, subjects) in worlds(60) {
            let mut all = Oracle::new(&world, &subjects);
            let placements = (all.choices().len() as f64).powi(subjects.len() as i32)
                * f64::from(world.layout().chips.len() as u32).exp2();
            if placements > 4000.0 {
                continue;
            }
            let most = all.exhaustive().unwrap();
            let found = Oracle::new(&world, &subjects).search().unwrap();
            assert!(
                found.merit >= most.merit * 0.999 && found.merit <= most.merit * (1.0 + 1e-9),
                "search {} {:?}, all {} {:?}",
                found.merit,
                found.placement,
                most.merit,
                most.placement
            );
            compared += 1;
            gained += u32::from(most.merit > 1.01);
        }
        assert!(
            compared >= 5 && gained >= 2,
            "{compared} compared, {gained} with something to gain"
        );
    }

    #[test]
    fn the_best_is_what_its_placement_gives_and_never_less_than_leaving_alone() {
        for (world, subjects) in worlds(6) {
            let mut oracle = Oracle::new(&world, &subjects);
            let best = oracle.best().unwrap();
            assert!(best.merit >= 1.0);
            let mut there = oracle.world_with(&best.placement).unwrap();
            let served = least_served(&mut there, &subjects);
            assert!(served >= SERVED_MIN, "{served} of the offered work is done");
            let again = merit(&merits(&mut there, &subjects), oracle.alone());
            assert!((again - best.merit).abs() < 1e-6, "{again} {}", best.merit);
            let as_it_was = oracle.as_it_was();
            let nothing = oracle.value(&as_it_was).unwrap();
            assert!((nothing - 1.0).abs() < 1e-3, "leaving alone is worth {nothing}");
        }
    }

    #[test]
    fn sets_of_chips_are_not_empty_and_named_once() {
        for (world, _) in worlds(40) {
            let sets = chip_sets(world.layout());
            let chips = world.layout().chips.len();
            assert!(sets.iter().all(|s| !s.is_empty() && s.iter().all(|c| *c < chips)));
            let unique: BTreeSet<&Vec<usize>> = sets.iter().collect();
            assert_eq!(unique.len(), sets.len());
            assert!(chips == 1 || (0..chips).all(|c| sets.contains(&vec![c])));
            assert!(sets.len() <= 64, "{} sets for {chips} chips", sets.len());
        }
    }
}
