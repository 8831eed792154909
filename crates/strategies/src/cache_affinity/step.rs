//! A step over a placement: a workload that is kept somewhere already goes to another set of domains, with a trial and a guard
//! of its own, and its undo gives back the place before. The strategies `consolidation` (fewer domains) and `relocation` (others,
//! or more) differ only in the question that they ask.

use super::choice::{self, Candidate, Question};
use super::{CacheAffinity, after_refused, decline, outgrown, placement, propose};
use crate::common::domains::{Demand, Domains};
use crate::common::prediction::Picture;
use crate::common::{cpu_list, placed_by_a_person};
use homeostat_engine::{Held, Opinion, Seen, Setting, Strategy};
use homeostat_model::{CpuId, Locality, Machine, StrategyId};

/// So many steps of a kind lie over a placement at most.
const STEPS_MAX: usize = 3;

/// A kind of step.
pub(crate) struct Step {
    /// Whose idea it is.
    pub(crate) id: &'static str,
    pub(crate) summary: &'static str,
    /// Its only setting: the predicted gain from which it is tried.
    pub(crate) gain_min: &'static [Setting; 1],
    /// Where it goes, in words.
    pub(crate) to: &'static str,
    pub(crate) ask: Ask,
}

/// What is asked about a workload that is kept on some domains.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ask {
    /// Whether fewer of them would do, now that is seen how it runs there.
    Fewer,
    /// Whether others, or more of them, would do better.
    Elsewhere,
}

impl Strategy for Step {
    fn id(&self) -> StrategyId {
        self.id.into()
    }

    fn summary(&self) -> &'static str {
        self.summary
    }

    fn settings(&self) -> &'static [Setting] {
        self.gain_min
    }

    fn applicable(&self, machine: &Machine) -> Result<(), String> {
        CacheAffinity.applicable(machine)
    }

    fn consider(&self, seen: &Seen<'_>) -> Opinion {
        let Some(kept) = placement(seen) else {
            return decline("its threads are not kept anywhere: there is no place to start from".into());
        };
        let taken = |h: &&Held| h.strategy.as_str() == self.id;
        let steps = seen.held.iter().filter(taken).count();
        if steps >= STEPS_MAX {
            return decline(format!(
                "its threads were brought to {} {steps} times, now CPUs {}",
                self.to,
                cpu_list(kept)
            ));
        }
        let Some(locality) = seen.locality else {
            return Opinion::InspectLocality;
        };
        if let Some(why) = placed_by_a_person(seen) {
            return decline(format!(
                "left where it is, because a person or another tool chose: {why}"
            ));
        }
        self.choose(seen, locality, kept)
    }

    fn knows_other_places(&self) -> bool {
        self.ask == Ask::Elsewhere
    }

    fn unwanted(&self, seen: &Seen<'_>) -> Option<String> {
        CacheAffinity.unwanted(seen)
    }

    fn outgrown(&self, seen: &Seen<'_>) -> Option<String> {
        outgrown(seen)
    }
}

impl Step {
    fn choose(&self, seen: &Seen<'_>, locality: &Locality, kept: &[CpuId]) -> Opinion {
        let domains = Domains::of(seen.machine);
        let Some(positions) = whole(&domains, kept) else {
            return decline(format!(
                "CPUs {}, where it is kept, are all there are, or parts of last-level caches",
                cpu_list(kept)
            ));
        };
        // What an earlier step gave is no prediction of the next.
        let seen = &Seen { known: None, ..*seen };
        let everywhere = Demand::of(seen, &domains);
        let mean = everywhere.busy(&domains);
        let demand = everywhere.on(&domains, &positions);
        let now = choice::moved_to(&Picture::of(locality), &choice::list(&domains, &positions));
        let question = Question::of(seen, locality, &domains, &demand, &now, mean);
        match self.ask {
            Ask::Fewer if positions.len() < 2 => decline(format!(
                "CPUs {}, where it is kept, have one last-level cache",
                cpu_list(kept)
            )),
            Ask::Fewer => {
                let question = question.boldly();
                let best = question.best(question.candidates_among(&positions));
                self.propose(&question, best, || {
                    format!(
                        "no part of CPUs {} holds its demand of {:.1} cores ({:.1} running threads)",
                        cpu_list(kept),
                        demand.own,
                        demand.own_running
                    )
                })
            }
            Ask::Elsewhere => {
                let question = question.leaving(positions);
                let best = question.best(question.candidates());
                let none = || {
                    format!(
                        "no other caches than those of CPUs {} are left for it",
                        cpu_list(kept)
                    )
                };
                after_refused(seen, self.propose(&question, best, none))
            }
        }
    }

    fn propose(
        &self,
        question: &Question<'_>,
        best: Option<Candidate>,
        none: impl Fn() -> String,
    ) -> Opinion {
        match best {
            Some(best) => propose(question, best, &self.gain_min[0]),
            None => decline(none()),
        }
    }
}

/// The domains on which a workload is kept. `None` where it has parts of some, or all of them: what keeps each process on a place
/// of its own names all CPUs.
fn whole(domains: &Domains, kept: &[CpuId]) -> Option<Vec<usize>> {
    let among = domains.among(kept);
    let is_whole =
        |(at, count): (&usize, &usize)| domains.list.get(*at).is_some_and(|d| d.cpus.len() == *count);
    let is_place = !among.is_empty() && among.iter().all(is_whole) && !domains.is_all(kept);
    is_place.then(|| among.into_keys().collect())
}
