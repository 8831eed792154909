//! Room for others: a neighbour that loses by a placement is asked whether it can keep off those CPUs.
//!
//! A program that nobody keeps anywhere runs on all CPUs, also on those on which another one is kept since. What the other gains
//! by that, it may lose, and neither can be placed by itself then. Kept off those CPUs, with its memory where that can be moved,
//! it may lose nothing. Such a place gives it nothing of its own, so it is tried only together with those whom it makes room
//! for, as one change: all are judged, and nobody may lose by it.

use crate::engine::{Change, Engine, PLACEMENT};
use crate::experiment::Experiment;
use crate::panel::Member;
use crate::view::Stage;
use crate::watched::Watched;
use homeostat_model::{CpuId, Nanoseconds, WorkloadId};

/// A workload is asked so often: who loses with a place of its own, too, does not lose for want of room.
const ASKED_MAX: u32 = 1;
/// For so long it is looked for a place for all; then those who asked have found another or given up.
const ASKED_FOR: Nanoseconds = Nanoseconds::from_secs(180);

/// Who asks a workload to make room.
#[derive(Clone, Debug)]
pub(crate) struct AskedForRoom {
    /// The CPUs on which others were kept when it lost.
    pub(crate) cpus: Vec<CpuId>,
    until: Nanoseconds,
}

impl Engine {
    /// After a trial of places that was given up because a neighbour lost by it: asks that neighbour, if it is kept nowhere, and
    /// those who were tried once more.
    pub(crate) fn ask_for_room(&mut self, e: &Experiment, living: &[Member]) {
        for m in living {
            if let Some(w) = self.workloads.get_mut(&m.workload) {
                w.asked_for_room = None;
            }
        }
        let strategy = &e.setup.strategy;
        let Some(hurt) = e.hurt.as_ref().filter(|_| self.knows_other_places(strategy)) else {
            return;
        };
        let cpus = e.setup.places.cpus();
        if cpus.is_empty() || self.is_kept(hurt) || living.iter().any(|m| self.is_kept(&m.workload)) {
            return;
        }
        let until = self.now + ASKED_FOR;
        let Some(w) = self.workloads.get_mut(hurt).filter(|w| !w.gone) else {
            return;
        };
        if w.times_asked_for_room >= ASKED_MAX || !matches!(w.stage, Stage::Declined | Stage::Improved) {
            return;
        }
        w.times_asked_for_room += 1;
        w.asked_for_room = Some(AskedForRoom { cpus, until });
        let fingerprint = w.workload.fingerprint.clone();
        self.try_again(fingerprint, strategy.clone());
        let text = format!(
            "{} would gain from a place by which this one loses: it is asked whether it can keep off those CPUs",
            e.setup.panel.lead().workload
        );
        self.narrate(hurt, text, false);
        self.look_now(hurt);
        for m in living {
            self.forget_places_of_neighbours(&m.workload);
            if let Some(w) = self.workloads.get_mut(&m.workload) {
                w.alone_until = self.now;
            }
            self.try_again(m.fingerprint.clone(), strategy.clone());
            self.look_now(&m.workload);
        }
    }

    /// Whether what is proposed for it serves others, so that it is tried with them or not at all.
    pub(crate) fn only_makes_room(&self, w: &Watched) -> bool {
        let Some(p) = w.proposed.as_ref().filter(|_| w.asked_for_room.is_some()) else {
            return false;
        };
        p.proposal.effector.as_str() == PLACEMENT && self.knows_other_places(&p.strategy)
    }

    /// Those who were asked for long enough are as before; what they proposed meanwhile is asked once more.
    pub(crate) fn forget_who_asked_for_room(&mut self) {
        let now = self.now;
        let over = |w: &Watched| w.asked_for_room.as_ref().is_some_and(|r| r.until <= now);
        let asked: Vec<WorkloadId> = self
            .workloads
            .iter()
            .filter(|(_, w)| over(w) && w.stage != Stage::Trying)
            .map(|(id, _)| id.clone())
            .collect();
        for id in asked {
            let made_room = self.workloads.get(&id).is_some_and(|w| self.only_makes_room(w));
            if let Some(w) = self.workloads.get_mut(&id) {
                w.asked_for_room = None;
            }
            if made_room {
                self.ask_again(&id);
            }
        }
    }

    fn is_kept(&self, id: &WorkloadId) -> bool {
        let keeps = |c: &Change| c.workload == *id && c.effector.as_str() == PLACEMENT && !c.leaving;
        self.changes.values().any(keeps)
    }

    /// The next time that this workload is looked at is now; one that is being looked at already goes on.
    fn look_now(&mut self, id: &WorkloadId) {
        let now = self.now;
        if let Some(w) = self.workloads.get_mut(id) {
            match w.stage {
                Stage::Declined => w.retry_at = now,
                Stage::Improved => w.more_at = w.more_at.min(now),
                Stage::Ignored | Stage::Considered | Stage::Observed | Stage::Proposed | Stage::Trying => {}
            }
        }
    }
}
