//! The world's facts about the changes: whether they help, and their total cost.

use super::{Checkers, DAY, Gain, HARM, Invariant, LOOK_EVERY, PROBES_OF_HARM_MAX, Speeds, WORKS_FROM};
use homeostat_model::{ActionId, Direction, Nanoseconds};

/// The world's facts about the tried changes, in one life or in many.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Truth {
    /// Changes whose true effect on their own program was seen while they were tried.
    pub tried: u64,
    /// Of these, changes without a true gain in work per second and per CPU second.
    pub nulls: u64,
    /// Changes that were kept and whose true effect was seen then.
    pub kept: u64,
    /// Of these, changes without a true gain.
    pub kept_for_nothing: u64,
    /// Times that a kept change was taken back and made again.
    pub probes: u64,
    /// Largest cost of at least ten probes of a kept change, as a share of its program's work since then.
    pub probe_cost_max: f64,
    /// Kept changes that cost their program 5 % or more and outlasted the probes that should have ended them.
    pub harm_stood: u64,
    /// Work lost against the same machine left alone, in seconds of one program that works.
    pub lost_s: f64,
    /// Seconds for which programs worked.
    pub worked_s: f64,
    /// Most that was lost within 24 hours, in percent × seconds of one program.
    pub lost_per_day_max: f64,
}

impl Truth {
    /// Adds that of another life.
    pub fn add(&mut self, other: &Self) {
        self.tried += other.tried;
        self.nulls += other.nulls;
        self.kept += other.kept;
        self.kept_for_nothing += other.kept_for_nothing;
        self.probes += other.probes;
        self.harm_stood += other.harm_stood;
        self.probe_cost_max = self.probe_cost_max.max(other.probe_cost_max);
        self.lost_s += other.lost_s;
        self.worked_s += other.worked_s;
        self.lost_per_day_max = self.lost_per_day_max.max(other.lost_per_day_max);
    }
}

impl Checkers {
    /// Changes whose true gain should be asked of the world now, if their program works.
    pub fn to_judge(&self, at: Nanoseconds) -> Vec<ActionId> {
        self.acted
            .iter()
            .filter(|(_, a)| a.on && a.done && !a.is_placebo() && a.direction == Direction::Apply)
            .filter(|(_, a)| match a.looked {
                None => true,
                Some(then) => a.kept() && at - then >= LOOK_EVERY,
            })
            .map(|(id, _)| *id)
            .collect()
    }

    /// The world's gain of a change that is on.
    pub fn judged(&mut self, at: Nanoseconds, id: ActionId, gain: Gain) {
        let leaders = self.acted.get(&id).is_some_and(|a| a.leader.is_none());
        let Some(acted) = self.acted.get_mut(&id) else {
            return;
        };
        let nothing = u64::from(gain.best() <= 0.0);
        // Each counts once when tried and once when kept. Further parts rest on the tried one.
        if leaders && acted.looked.is_none() {
            self.truth.tried += 1;
            self.truth.nulls += nothing;
        }
        let worked = acted.looked.is_some_and(|then| at - then <= LOOK_EVERY * 3);
        acted.looked = Some(at);
        acted.gain = Some(gain);
        if leaders && acted.kept() && !std::mem::replace(&mut acted.counted, true) {
            self.truth.kept += 1;
            self.truth.kept_for_nothing += nothing;
        }
        if gain.best() > -HARM || !acted.kept() {
            acted.harms = None;
            return;
        }
        // Probes of a resting program show nothing.
        let (before, rounds) = acted.harms.unwrap_or((0, acted.rounds));
        let probes = before + if worked { acted.rounds - rounds } else { 0 };
        acted.harms = Some((probes, acted.rounds));
        if probes > PROBES_OF_HARM_MAX && !std::mem::replace(&mut acted.stood, true) {
            self.truth.harm_stood += 1;
            let (effector, workload) = (acted.effector.clone(), acted.workload.clone());
            self.report(
                at,
                Invariant::NoHarm,
                &format!("stands/{effector}"),
                format!(
                    "action {id} ({effector} on {workload}) costs its program {:.1} % and stands after {probes} probes while it works",
                    -gain.best() * 100.0
                ),
            );
        }
    }

    /// For `length` until now programs ran at these speeds, and would have run at those on the machine left alone.
    /// `touched`: an undo is owed. Otherwise the machine is untouched, which another check proves: differences then
    /// come from the moments of the disturbances and are no harm.
    pub fn compared(
        &mut self,
        at: Nanoseconds,
        length: Nanoseconds,
        with: &Speeds,
        alone: &Speeds,
        touched: bool,
    ) {
        let seconds = length.as_secs_f64();
        let mut lost = 0.0;
        for (name, alone) in alone.iter().filter(|(_, s)| s.cpus >= WORKS_FROM && s.work > 0.0) {
            let Some(with) = with.get(name) else { continue };
            lost += (1.0 - with.work / alone.work).max(0.0) * seconds;
            self.truth.worked_s += seconds;
        }
        if !touched || lost <= 0.0 || !lost.is_finite() {
            return;
        }
        self.truth.lost_s += lost;
        self.lost.push_back((at, 100.0 * lost));
        while self.lost.front().is_some_and(|(then, _)| at - *then > DAY) {
            self.lost.pop_front();
        }
        let day: f64 = self.lost.iter().map(|(_, lost)| lost).sum();
        self.truth.lost_per_day_max = self.truth.lost_per_day_max.max(day);
        let most = self.limits.harm_per_day;
        if day > most {
            self.report(
                at,
                Invariant::NoHarm,
                "lost",
                format!(
                    "work lost against the machine left alone within a day: {day:.0} percent-seconds, at most {most:.0}"
                ),
            );
        }
    }

    /// The world's facts so far.
    pub fn truth(&self) -> Truth {
        self.truth
    }
}
