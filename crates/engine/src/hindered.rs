//! Changes that nothing speaks against but a neighbour who lost: asked about again when the neighbours have moved.
//!
//! A trial that a neighbour ended says little about the change itself. Where that neighbour ran, or what it shared, was the
//! reason as much, and that is another matter as soon as somebody else's change of the same kind is accepted: whoever goes to
//! a place of its own leaves room behind. Then the back-off does not count, once for each of them and each such acceptance; each
//! try is at a level of its own. What is known of it is lost at a restart: then the back-off counts.

use crate::engine::Engine;
use crate::experiment::Experiment;
use crate::panel::Member;
use crate::view::Stage;
use homeostat_model::{Fingerprint, StrategyId, Verdict, WorkloadId};
use std::collections::BTreeMap;

/// Most kinds of program that are remembered so.
const HINDERED_MAX: usize = 256;

/// What was tried last and ended for a neighbour's sake; true when that may be tried again.
pub(crate) type Hindered = BTreeMap<(Fingerprint, StrategyId), bool>;

impl Engine {
    /// Notes for whom a trial ended because a neighbour lost by it.
    pub(crate) fn note_hindered(&mut self, e: &Experiment, living: &[Member]) {
        if !e.hindered || e.verdict != Some(Verdict::Inconclusive) {
            return;
        }
        for m in living {
            let key = (m.fingerprint.clone(), e.setup.strategy.clone());
            // One that is known is noted anew also where there is no room for more: its one try is used up.
            if self.hindered.len() < HINDERED_MAX || self.hindered.contains_key(&key) {
                self.hindered.insert(key, false);
            }
        }
    }

    /// Whether the back-off of a strategy does not count for this kind of program.
    pub(crate) fn may_try_again(&self, key: &(Fingerprint, StrategyId)) -> bool {
        self.hindered.get(key) == Some(&true)
    }

    /// A change was accepted for these: those who failed with the same strategy because of a neighbour are asked again.
    /// Who places threads has moved for all who do.
    pub(crate) fn neighbours_moved(&mut self, e: &Experiment, who: &[Member]) {
        let strategy = &e.setup.strategy;
        let same_kind: Vec<StrategyId> = self
            .hindered
            .keys()
            .map(|(_, other)| other)
            .filter(|other| {
                *other == strategy || (!e.setup.places.is_empty() && self.knows_other_places(other))
            })
            .cloned()
            .collect();
        let mut reopened: Vec<Fingerprint> = Vec::new();
        for ((fingerprint, other), again) in &mut self.hindered {
            if same_kind.contains(other) && !*again && !who.iter().any(|m| m.fingerprint == *fingerprint) {
                *again = true;
                reopened.push(fingerprint.clone());
            }
        }
        let waiting: Vec<WorkloadId> = self
            .workloads
            .iter()
            .filter(|(_, w)| !w.gone && reopened.contains(&w.workload.fingerprint))
            .map(|(id, _)| id.clone())
            .collect();
        let now = self.now;
        for id in waiting {
            self.forget_places_of_neighbours(&id);
            let Some(w) = self.workloads.get_mut(&id) else {
                continue;
            };
            match w.stage {
                Stage::Declined => w.retry_at = now,
                Stage::Improved => w.more_at = now,
                // It is looked at, or about to be, as it is.
                Stage::Ignored | Stage::Considered | Stage::Observed | Stage::Proposed | Stage::Trying => {
                    continue;
                }
            }
            let text = format!(
                "{strategy} was tried and given up for a neighbour's sake; a change of the neighbours was accepted since: it is \
                 asked again"
            );
            self.narrate(&id, text, false);
        }
    }
}
