//! Does an accepted gain last? Probation after acceptance, then holdback probes for ever.
//!
//! The bets of the trial bound the influence of every pair, so a change that helps a little often and hurts a lot
//! rarely can pass. *Probation* looks at further probe pairs for outliers and for a mean that does not hold.
//! *Holdback* is an e-value version of the Shiryaev-Roberts detector: `R = (1 + R)(1 + tanh(λ(−D)))`, averaged over
//! targets, alarm at a threshold; the mean number of probes to a false alarm is at least the threshold, exactly.

use crate::robust::{ln_1p_tanh, mean, median};
use serde::{Deserialize, Serialize};

/// Outliers on the bad side in excess of those on the good side that end probation.
const OUTLIERS_MAX: i64 = 2;
/// An outlier is this many scales away from the median.
const OUTLIER_SCALES: f64 = 4.0;
/// Probation is not passed with a mean gain below this.
const MEAN_MIN: f64 = 0.005;
/// Pairs before the mean may end probation.
const MEAN_FROM: usize = 8;
/// Targets of the holdback detector.
const HOLDBACK_TARGETS: [f64; 2] = [0.02, 0.05];
/// Alarm threshold: mean probes to a false alarm.
pub const HOLDBACK_ALARM: f64 = 200.0;
/// Largest stake.
const STAKE_CAP: f64 = 4.0;
/// A scale below this is not believed.
const SCALE_MIN: f64 = 1e-4;

/// Where probation stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ProbationState {
    /// More pairs are needed.
    Running,
    /// The gain holds.
    Passed,
    /// The gain does not hold: undo.
    Revoked,
}

/// Probation of an accepted change.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Probation {
    pairs_max: u32,
    scale: f64,
    differences: Vec<f64>,
    state: ProbationState,
}

impl Probation {
    /// Over `pairs_max` probe pairs; `scale` is the spread of a pair difference in the trial.
    pub fn new(pairs_max: u32, scale: f64) -> Self {
        let state = if pairs_max == 0 { ProbationState::Passed } else { ProbationState::Running };
        Self { pairs_max, scale: scale.max(SCALE_MIN), differences: Vec::new(), state }
    }

    /// Takes the difference on − off of one probe pair.
    pub fn observe(&mut self, difference: f64) -> ProbationState {
        if self.state != ProbationState::Running || difference.is_nan() {
            return self.state;
        }
        self.differences.push(difference.clamp(-10.0, 10.0));
        let middle = median(&self.differences);
        let far = OUTLIER_SCALES * self.scale;
        let bad = self.differences.iter().filter(|d| **d < middle - far).count() as i64;
        let good = self.differences.iter().filter(|d| **d > middle + far).count() as i64;
        let low = self.differences.len() >= MEAN_FROM && mean(&self.differences) < MEAN_MIN;
        if bad - good >= OUTLIERS_MAX || low {
            self.state = ProbationState::Revoked;
        } else if self.differences.len() as u32 >= self.pairs_max {
            self.state = ProbationState::Passed;
        }
        self.state
    }

    /// Where it stands.
    pub fn state(&self) -> ProbationState {
        self.state
    }
}

/// The holdback detector.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Holdback {
    scale: f64,
    statistic: [f64; 2],
}

impl Holdback {
    /// With the spread of a pair difference.
    pub fn new(scale: f64) -> Self {
        Self { scale: scale.max(SCALE_MIN), statistic: [0.0; 2] }
    }

    /// Takes the difference on − off of one probe pair; true = alarm: the gain is gone.
    pub fn observe(&mut self, difference: f64) -> bool {
        if difference.is_nan() {
            return false;
        }
        for (r, target) in self.statistic.iter_mut().zip(HOLDBACK_TARGETS) {
            let stake = (target / (self.scale * self.scale)).min(STAKE_CAP / self.scale);
            let factor = crate::robust::exp(ln_1p_tanh((-stake * difference).clamp(-15.0, 15.0)));
            *r = ((1.0 + *r) * factor).min(1e12);
        }
        mean(&self.statistic) > HOLDBACK_ALARM
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lasting_gain_passes_and_a_rare_heavy_loss_is_revoked() {
        let mut p = Probation::new(30, 0.02);
        for i in 0..30 {
            p.observe(0.05 + if i % 2 == 0 { 0.01 } else { -0.01 });
        }
        assert_eq!(p.state(), ProbationState::Passed);
        let mut p = Probation::new(30, 0.02);
        for i in 0..30 {
            p.observe(if i % 10 == 9 { -0.5 } else { 0.03 });
        }
        assert_eq!(p.state(), ProbationState::Revoked);
        let mut p = Probation::new(30, 0.02);
        for _ in 0..8 {
            p.observe(0.0);
        }
        assert_eq!(p.state(), ProbationState::Revoked);
    }

    #[test]
    fn holdback_alarms_on_a_loss_and_never_on_a_lasting_gain() {
        let mut h = Holdback::new(0.025);
        assert!(!(0..5000).any(|_| h.observe(0.03)));
        let mut h = Holdback::new(0.025);
        let at = (1..100).find(|_| h.observe(-0.05)).unwrap();
        assert!(at < 12, "{at}");
        let mut h = Holdback::new(0.025);
        assert!(!h.observe(f64::NAN));
    }
}
