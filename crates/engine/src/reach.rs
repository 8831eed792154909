//! Changes that reach others: settings of CPUs or of the whole host ([`crate::Strategy::reaches_others`]).
//!
//! Whoever runs there has them, not only the workload for whose sake they are made. Two things follow.
//!
//! A program that a person excluded would be changed like the others, and nobody would see what it loses, since it is not
//! measured either. So while one works, nothing of the kind is proposed, tried or kept: a trial ends, and what is in force goes, when
//! it has worked for twenty seconds, and it is asked about again when none has worked for five minutes, so that one that comes every
//! minute does not have it come and go.
//!
//! And a change whose own workload does nothing can only cost the others: it goes after five minutes of that, and after twice as
//! many each time that this was so before, so that a job that rests between two runs is not tried anew for each.

use crate::engine::Engine;
use crate::strategy::Declined;
use crate::view::Stage;
use homeostat_model::{ActionId, ExperimentId, Nanoseconds, StrategyId, WorkloadId};

/// An excluded program that works for less does not end what is in force.
const EXCLUDED_FOR: Nanoseconds = Nanoseconds::from_secs(20);
/// It works on while it rests for less.
const EXCLUDED_GAP: Nanoseconds = Nanoseconds::from_secs(60);
/// Nothing is proposed until none has worked for so long.
const EXCLUDED_CLEAR: Nanoseconds = Nanoseconds::from_secs(300);
/// What reaches others goes when those for whose sake it was made have done nothing for so long: longer than a pause between two
/// jobs, and not much, since it can only cost others meanwhile …
const IDLE_FOR: Nanoseconds = Nanoseconds::from_secs(300);
/// … and twice as long after each time, so often.
const IDLE_DOUBLINGS: u32 = 4;

/// The work of programs that a person excluded.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Excluded {
    /// The busiest one, and why it is left alone.
    who: String,
    /// Since when there is one at work.
    since: Option<Nanoseconds>,
    /// When one worked last.
    last: Option<Nanoseconds>,
}

impl Excluded {
    /// One works now, or none does.
    fn note(&mut self, who: Option<String>, now: Nanoseconds) {
        if let Some(who) = who {
            self.who = who;
            self.since.get_or_insert(now);
            self.last = Some(now);
        } else if self.last.is_none_or(|last| now - last >= EXCLUDED_GAP) {
            self.since = None;
        }
    }

    /// Why nothing that reaches it is proposed, if one has worked lately.
    fn bars(&self, now: Nanoseconds) -> Option<String> {
        self.last.filter(|last| now - *last < EXCLUDED_CLEAR)?;
        Some(format!("{}: this would reach it, too", self.who))
    }

    /// Why what reaches it goes, if one works for some time.
    fn ends(&self, now: Nanoseconds) -> Option<String> {
        self.since.filter(|since| now - *since >= EXCLUDED_FOR)?;
        self.bars(now)
    }
}

/// How long the workloads of a guard may do nothing, when that was so before so often.
pub(crate) fn idle_for(times: u32) -> Nanoseconds {
    IDLE_FOR * (1 << times.min(IDLE_DOUBLINGS))
}

impl Engine {
    /// Whether the changes of a strategy reach others.
    pub(crate) fn reaches_others(&self, strategy: &StrategyId) -> bool {
        self.strategies
            .iter()
            .any(|s| s.id() == *strategy && s.reaches_others())
    }

    /// Why nothing that reaches others is proposed now, if a person excluded one that works.
    pub(crate) fn reaches_excluded(&self, strategy: &StrategyId) -> Option<String> {
        self.excluded
            .bars(self.now)
            .filter(|_| self.reaches_others(strategy))
    }

    /// What reaches a program that a person excluded, and that works, goes.
    pub(crate) fn keep_off_the_excluded(&mut self) {
        let now = self.now;
        let at_work = self
            .workloads
            .iter()
            .filter(|(_, w)| !w.gone && w.load.cpus >= self.policy.cpu_min)
            .filter_map(|(id, w)| Some((id, w.load.cpus, self.opted_out(&w.workload)?)))
            .max_by(|a, b| a.1.total_cmp(&b.1));
        let who = at_work
            .map(|(id, cpus, why)| format!("{id} works on this machine ({cpus:.1} CPUs), and is {why}"));
        self.excluded.note(who, now);
        if let Some(why) = self.excluded.bars(now) {
            self.drop_proposals(&why);
        }
        if let Some(why) = self.excluded.ends(now) {
            let trials: Vec<ExperimentId> = self
                .experiments
                .iter()
                .filter(|(_, e)| self.reaches_others(&e.setup.strategy))
                .map(|(id, _)| *id)
                .collect();
            for id in trials {
                self.abort(id, why.clone());
            }
            let guards: Vec<(ActionId, Vec<WorkloadId>)> = self
                .guards
                .all()
                .filter(|g| self.reaches_others(&g.strategy))
                .map(|g| (g.key, g.workloads().cloned().collect()))
                .collect();
            for (key, ids) in guards {
                for id in ids {
                    self.withdraw_from(key, &id, &why);
                }
            }
        }
    }

    /// What was proposed before one of them began to work, and was not begun yet.
    fn drop_proposals(&mut self, why: &str) {
        let proposed: Vec<(WorkloadId, StrategyId)> = self
            .workloads
            .iter()
            .filter(|(_, w)| w.stage == Stage::Proposed)
            .filter_map(|(id, w)| Some((id.clone(), w.proposed.as_ref()?.strategy.clone())))
            .filter(|(_, strategy)| self.reaches_others(strategy))
            .collect();
        for (id, strategy) in proposed {
            self.refuse(&id, Declined::because(format!("{strategy}: {why}")), false);
            // The other strategies are asked at once.
            if let Some(w) = self.workloads.get_mut(&id) {
                (w.retry_at, w.more_at) = (self.now, self.now);
            }
        }
    }

    /// A change that reaches others goes when its own workloads have done nothing for a while. True when it does.
    pub(crate) fn withdraw_if_idle(&mut self, key: ActionId, anybody_works: bool) -> bool {
        let now = self.now;
        let Some(g) = self.guards.get_mut(key) else {
            return false;
        };
        g.idle_since = (!anybody_works).then(|| g.idle_since.unwrap_or(now));
        let (since, strategy) = (g.idle_since, g.strategy.clone());
        let ids: Vec<WorkloadId> = g.workloads().cloned().collect();
        let before = ids.iter().filter_map(|id| Some(self.workloads.get(id)?.idled));
        let patience = idle_for(before.max().unwrap_or(0));
        let idle = since.is_some_and(|since| now - since >= patience);
        // A person who paused wants what is in force to stay.
        if !idle || self.paused || !self.reaches_others(&strategy) {
            return false;
        }
        let why = format!(
            "it reaches whoever runs there, and for {patience} nothing was done that could gain by it"
        );
        for id in ids {
            if let Some(w) = self.workloads.get_mut(&id) {
                w.idled = w.idled.saturating_add(1);
            }
            self.withdraw_from(key, &id, &why);
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(second: u64) -> Nanoseconds {
        Nanoseconds::from_secs(second)
    }

    fn works() -> Option<String> {
        Some("backup works".into())
    }

    #[test]
    fn an_excluded_program_bars_at_once_and_ends_what_is_in_force_after_a_while() {
        let mut e = Excluded::default();
        assert_eq!((e.bars(at(0)), e.ends(at(0))), (None, None));
        e.note(works(), at(10));
        assert!(e.bars(at(10)).is_some_and(|why| why.contains("backup works")));
        assert_eq!(e.ends(at(10)), None);
        e.note(works(), at(29));
        assert_eq!(e.ends(at(29)), None);
        e.note(works(), at(30));
        assert!(e.ends(at(30)).is_some());
    }

    #[test]
    fn a_pause_of_it_is_none_and_after_five_minutes_it_is_forgotten() {
        let mut e = Excluded::default();
        e.note(works(), at(0));
        // Every fifty seconds for a moment: it is at work all the time.
        e.note(None, at(50));
        e.note(works(), at(50));
        assert!(e.ends(at(50)).is_some());
        // Every two minutes for a moment: it ends nothing, and bars.
        let mut e = Excluded::default();
        for minute in 0..10 {
            e.note(works(), at(120 * minute));
            assert_eq!(e.ends(at(120 * minute)), None);
            e.note(None, at(120 * minute + 100));
            assert!(e.bars(at(120 * minute + 100)).is_some());
        }
        e.note(None, at(1380));
        assert_eq!(e.bars(at(1380)), None);
    }

    #[test]
    fn who_rests_again_and_again_is_given_more_time() {
        assert_eq!(idle_for(0), at(300));
        assert_eq!(idle_for(2), at(1200));
        assert_eq!(idle_for(u32::MAX), at(4800));
    }
}
