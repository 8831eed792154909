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
use homeostat_model::{CpuId, StrategyId, Verdict, WorkloadId};
use std::collections::BTreeMap;

/// So many places are tried for one program before the back-off of the strategy counts.
const PLACES_MAX: usize = 3;

/// Where each member of a trial is kept, and whether its memory goes along.
pub(crate) type Places = BTreeMap<WorkloadId, (Vec<CpuId>, bool)>;

/// The places that these pieces are about.
pub(crate) fn of(pieces: &[Piece]) -> Places {
    let place = |piece: &Piece| match &piece.target {
        Target::Cpus(cpus) if piece.effector.as_str() == PLACEMENT => {
            let place = (cpus.clone(), piece.arguments.contains_key("memory"));
            Some((piece.workload.clone(), place))
        }
        _ => None,
    };
    pieces.iter().filter_map(place).collect()
}

impl Engine {
    /// Notes the place at which a trial kept the workload, when it ended without a gain.
    pub(crate) fn note_refused_place(&mut self, e: &Experiment, workload: &WorkloadId, verdict: Verdict) {
        if matches!(verdict, Verdict::Accepted | Verdict::Aborted) {
            return;
        }
        let Some((cpus, with_memory)) = e.setup.places.get(workload).cloned() else {
            return;
        };
        if let Some(w) = self.workloads.get_mut(workload) {
            let refused = w.refused_places.entry(e.setup.strategy.clone()).or_default();
            if refused.len() >= PLACES_MAX {
                // The back-off was over since: this is another round.
                refused.clear();
            }
            refused.push(RefusedPlace {
                cpus,
                with_memory,
                verdict,
                for_a_neighbour: e.hindered,
            });
        }
    }

    /// The places that were refused, as long as the back-off that they began lasts.
    pub(crate) fn refused_places<'a>(&self, w: &'a Watched, strategy: &StrategyId) -> &'a [RefusedPlace] {
        let Some(refused) = w.refused_places.get(strategy) else {
            return &[];
        };
        let key = (w.workload.fingerprint.clone(), strategy.clone());
        if self.backs_off(&key).is_some() || w.rests_from(strategy, self.now) {
            refused
        } else {
            &[]
        }
    }

    /// Whether what was refused so far leaves other places to this strategy.
    pub(crate) fn another_place_is_open(&self, workload: &WorkloadId, strategy: &StrategyId) -> bool {
        let refused = self
            .workloads
            .get(workload)
            .and_then(|w| w.refused_places.get(strategy))
            .map_or(0, Vec::len);
        (1..PLACES_MAX).contains(&refused)
            && self
                .strategies
                .iter()
                .any(|s| s.id() == *strategy && s.knows_other_places())
    }
}
