//! A second meter that looks on during a trial and decides nothing.
//!
//! Where a program counts its own work and progress points are wanted as well, the points of its code are found and counted beside its
//! own counter until the trial is over. What they would have said of the change is written down with what the counter said: so the
//! error of discovered points is known from every trial in which it can be, and a person can see how far to trust them where there
//! is nothing else.
//!
//! Both are compared block by block, so that what moves both alike (the load, the machine) is in neither the error nor its interval.

use crate::panel::Member;
use crate::series::Series;
use homeostat_model::{Effect, MeterId, Nanoseconds, WitnessAccount};
use homeostat_statistics::robust::exp_m1;
use homeostat_statistics::trimmed::{Comparison, welch};

/// Blocks of each arm from which the two are compared.
const BLOCKS_MIN: usize = 3;

/// Scores of a block by both meters (log units).
#[derive(Clone, Copy, Debug)]
struct Both {
    judge: f64,
    witness: f64,
}

/// The witness of a trial of one workload.
#[derive(Clone, Debug)]
pub(crate) struct Witness {
    judge: Member,
    witness: Member,
    on: Vec<Both>,
    off: Vec<Both>,
}

impl Witness {
    pub(crate) fn new(judge: &Member, meter: MeterId) -> Self {
        Self {
            witness: judge.by_meter(meter),
            judge: judge.clone(),
            on: Vec::new(),
            off: Vec::new(),
        }
    }

    /// Reads both over the measured part of a block that ended. A block that only one of them has measured says nothing.
    pub(crate) fn observe(&mut self, series: &Series, on: bool, from: Nanoseconds, to: Nanoseconds) {
        let score = |member: &Member| member.measured(&series.sums(&member.meter, from, to), to - from);
        let (Some(judge), Some(witness)) = (score(&self.judge), score(&self.witness)) else {
            return;
        };
        let arm = if on { &mut self.on } else { &mut self.off };
        arm.push(Both { judge, witness });
    }

    pub(crate) fn member(&self) -> &Member {
        &self.witness
    }

    /// By what it counts.
    pub(crate) fn meter(&self) -> &MeterId {
        &self.witness.meter
    }

    /// Whether it has counted in any block.
    pub(crate) fn has_seen(&self) -> bool {
        !self.on.is_empty() || !self.off.is_empty()
    }

    /// What it said beside the meter that judged; `None` with too few blocks.
    pub(crate) fn account(&self) -> Option<WitnessAccount> {
        if self.on.len() < BLOCKS_MIN || self.off.len() < BLOCKS_MIN {
            return None;
        }
        let effect = |score: fn(&Both) -> f64| -> Option<Effect> {
            let of = |arm: &[Both]| arm.iter().map(score).collect::<Vec<f64>>();
            effect_between(&of(&self.on), &of(&self.off))
        };
        Some(WitnessAccount {
            meter: self.witness.meter.clone(),
            blocks: u32::try_from(self.on.len() + self.off.len()).unwrap_or(u32::MAX),
            effect: effect(|b| b.witness)?,
            judge: effect(|b| b.judge)?,
            difference: effect(|b| b.witness - b.judge)?,
        })
    }
}

/// The effect of blocks that were on against those that were off, both in log units: two standard errors either way. `None` with too
/// few of them.
pub(crate) fn effect_between(on: &[f64], off: &[f64]) -> Option<Effect> {
    welch(on, off).map(effect_of)
}

/// What was compared in log units: two standard errors either way.
pub(crate) fn effect_of(found: Comparison) -> Effect {
    Effect {
        estimate: exp_m1(found.change),
        lower: exp_m1(found.change - 2.0 * found.error),
        upper: exp_m1(found.change + 2.0 * found.error),
        confidence: 0.90,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::blocks::Objective;
    use crate::series::Interval;
    use homeostat_model::Fingerprint;
    use std::collections::BTreeMap;

    /// Blocks of ten seconds, every other one on: the counter gains a tenth, the points two hundredths less. The load wanders, and
    /// both follow it.
    fn series() -> Series {
        let mut series = Series::default();
        for t in 1..=160u64 {
            let on = ((t - 1) / 10) % 2 == 1;
            let load = 1000.0 * (1.0 + 0.3 * (t as f64 / 13.0).sin());
            let judge = load * if on { 1.10 } else { 1.0 };
            let witness = 0.07 * load * if on { 1.08 } else { 1.0 };
            let mut work = BTreeMap::from([(MeterId::new("own"), (judge, 1.0))]);
            // The search ends in the second block.
            if t > 15 {
                work.insert(MeterId::new("points"), (witness, 1.0));
            }
            series.push(Interval {
                end: Nanoseconds::from_secs(t),
                seconds: 1.0,
                cpu: 1.0,
                machine_idle: 0.5,
                work,
                ..Interval::default()
            });
        }
        series
    }

    #[test]
    fn what_the_points_would_have_said_is_compared_block_by_block() {
        let judge = Member::new(
            "w".into(),
            Fingerprint::new("w"),
            MeterId::new("own"),
            Objective::WorkPerSecond,
            1.0,
        );
        let mut witness = Witness::new(&judge, MeterId::new("points"));
        let series = series();
        for block in 0..16u64 {
            let from = Nanoseconds::from_secs(block * 10);
            witness.observe(&series, block % 2 == 1, from, from + Nanoseconds::from_secs(10));
            if block == 5 {
                assert_eq!(witness.account(), None, "two blocks of one arm are too few");
            }
        }
        let account = witness.account().expect("enough blocks");
        assert_eq!((account.meter.as_str(), account.blocks), ("points", 14));
        assert!(account.effect.upper - account.effect.lower > 0.2, "{account:?}");
        // The load has wandered by a third; the difference knows nothing of that.
        assert!((account.difference.estimate - (1.08 / 1.10 - 1.0)).abs() < 1e-9);
        assert!(account.difference.upper - account.difference.lower < 1e-9);
    }

    #[test]
    fn what_is_told_of_the_time_before_a_block_is_not_the_blocks() {
        let secs = Nanoseconds::from_secs;
        let mut series = series();
        series.push(Interval {
            end: secs(161),
            seconds: 1.0,
            work: BTreeMap::from([(MeterId::new("points"), (1.0, 1.0))]),
            lags: BTreeMap::from([(MeterId::new("points"), secs(7))]),
            ..Interval::default()
        });
        let own = |meter: &str, left_out| {
            let (workload, kind) = ("w".into(), Fingerprint::new("w"));
            let member = Member::new(workload, kind, meter.into(), Objective::WorkPerSecond, 1.0);
            member.own_from(&series, secs(100), secs(left_out), secs(104))
        };
        // The trial leaves out nothing, or less or more than it takes, for the meter that judges; in no case more than there is.
        assert_eq!(
            [0, 5, 7, 9].map(|left_out| own("points", left_out)),
            [104, 102, 100, 100].map(secs)
        );
        assert_eq!(own("own", 0), secs(100));
    }
}
