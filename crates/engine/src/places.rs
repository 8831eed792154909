//! Places at which a program was tried and that were refused.
//!
//! What a trial refuses is a place, not every place: the same program may gain on other CPUs, on more of them, or with its
//! memory beside it. So a strategy that knows of other places is asked again at once, a few times, and told which were refused
//! ([`crate::Seen::refused`]); each try is an experiment at a level of its own, and after the last one the back-off counts. What
//! was refused is forgotten at a restart: then the back-off counts from the first.

use crate::engine::{Engine, PLACEMENT};
use crate::experiment::Experiment;
use crate::rollout::Piece;
use crate::strategy::RefusedPlace;
use crate::watched::Watched;
use homeostat_model::action::Target;
use homeostat_model::{CpuId, Nanoseconds, StrategyId, Verdict, WorkloadId};
use std::collections::BTreeMap;

/// So many places are tried for one program before the back-off of the strategy counts.
const PLACES_MAX: usize = 3;

/// Where one member of a trial is kept.
#[derive(Clone, Debug)]
struct Place {
    cpus: Vec<CpuId>,
    with_memory: bool,
    /// Threads of it that ran or waited for a CPU before, on average.
    runnable: f64,
}

/// Where the members of a trial are kept, if that is the change.
#[derive(Clone, Debug, Default)]
pub(crate) struct Places(BTreeMap<WorkloadId, Place>);

impl Places {
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Threads of each member that ran or waited for a CPU before.
    pub(crate) fn runnable(&self) -> BTreeMap<WorkloadId, f64> {
        let of = |(id, place): (&WorkloadId, &Place)| (id.clone(), place.runnable);
        self.0.iter().map(of).collect()
    }
}

/// A place that was refused, and until when that counts: as long as the back-off of that verdict.
#[derive(Clone, Debug)]
pub(crate) struct Refused {
    place: RefusedPlace,
    until: Nanoseconds,
}

impl Engine {
    /// The places that these pieces are about.
    pub(crate) fn places_of(&self, pieces: &[Piece]) -> Places {
        let place = |piece: &Piece| match &piece.target {
            Target::Cpus(cpus) if piece.effector.as_str() == PLACEMENT => {
                let load = self.workloads.get(&piece.workload).map(|w| &w.load);
                let place = Place {
                    cpus: cpus.clone(),
                    with_memory: piece.arguments.contains_key("memory"),
                    runnable: load.map_or(0.0, |l| l.cpus * (1.0 + l.runqueue_wait)),
                };
                Some((piece.workload.clone(), place))
            }
            _ => None,
        };
        Places(pieces.iter().filter_map(place).collect())
    }

    /// Notes the place at which a trial kept the workload, when it ended without a gain: by its verdict, or because that place
    /// itself made the trial impossible.
    pub(crate) fn note_refused_place(&mut self, e: &Experiment, workload: &WorkloadId, verdict: Verdict) {
        if verdict == Verdict::Accepted || (verdict == Verdict::Aborted && !e.own_end) {
            return;
        }
        let Some(place) = e.setup.places.0.get(workload).cloned() else {
            return;
        };
        let (now, until) = (self.now, self.now + self.back_off(verdict, 1));
        if let Some(w) = self.workloads.get_mut(workload) {
            let refused = w.refused_places.entry(e.setup.strategy.clone()).or_default();
            refused.retain(|r| now < r.until);
            refused.push(Refused {
                place: RefusedPlace {
                    cpus: place.cpus,
                    with_memory: place.with_memory,
                    verdict,
                    for_a_neighbour: e.hindered,
                },
                until,
            });
        }
    }

    /// A place was accepted, or taken back by its guard: what was refused before says nothing of a further one.
    pub(crate) fn forget_refused_places(&mut self, workload: &WorkloadId, strategy: &StrategyId) {
        if let Some(w) = self.workloads.get_mut(workload) {
            w.refused_places.remove(strategy);
        }
    }

    /// The neighbours have moved: what was refused for their sake is open again.
    pub(crate) fn forget_places_of_neighbours(&mut self, workload: &WorkloadId) {
        if let Some(w) = self.workloads.get_mut(workload) {
            for refused in w.refused_places.values_mut() {
                refused.retain(|r| !r.place.for_a_neighbour);
            }
        }
    }

    /// The places that were refused and still are.
    pub(crate) fn refused_places(&self, w: &Watched, strategy: &StrategyId) -> Vec<RefusedPlace> {
        let refused = w.refused_places.get(strategy).into_iter().flatten();
        refused
            .filter(|r| self.now < r.until)
            .map(|r| r.place.clone())
            .collect()
    }

    /// Whether what was refused so far leaves other places to this strategy.
    pub(crate) fn another_place_is_open(&self, workload: &WorkloadId, strategy: &StrategyId) -> bool {
        let Some(w) = self.workloads.get(workload) else {
            return false;
        };
        let refused = w.refused_places.get(strategy).into_iter().flatten();
        let refused = refused.filter(|r| self.now < r.until).count();
        (1..PLACES_MAX).contains(&refused) && self.knows_other_places(strategy)
    }

    /// Whether that strategy proposes places, and another one after one was refused.
    pub(crate) fn knows_other_places(&self, strategy: &StrategyId) -> bool {
        let mut all = self.strategies.iter();
        all.any(|s| s.id() == *strategy && s.knows_other_places())
    }
}
