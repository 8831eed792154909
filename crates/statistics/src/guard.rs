//! Does an accepted gain last?
//!
//! Three detectors watch a change in force. *Probe pairs* feed them: one block on and one off in random order.
//! Differences are on − off in log units.
//!
//! * [`Probation`], right after acceptance. A bounded bet misses a change that often helps a little and rarely hurts a
//!   lot. So thirty more pairs are checked for rare large losses and for a vanishing mean.
//! * [`Holdback`], for ever: an e-detector (Shiryaev–Roberts sum of the trial's martingales). At least 200 probes on
//!   average lie between false alarms, exactly, for any load.
//! * [`PageHinkley`], on the passive metric: quick and free, but the load easily fools it. It may only request a burst
//!   of probe pairs, never revert.

use crate::robust::{exp, ln_1p_tanh, mean, median, variance};
use serde::{Deserialize, Serialize};

/// Outliers are differences beyond this many scales of the median.
const OUTLIER_SCALES: f64 = 4.0;
/// This many more losses than gains among the outliers revoke.
const EXCESS_MAX: i64 = 2;
/// The mean of the probation revokes when it is shown to be below this (log units): the smallest gain that is accepted. A small
/// gain that is real comes out lower by chance, as often as not on a noisy machine.
pub const PROBATION_MEAN_MIN: f64 = 0.01;
/// … by so many standard errors at its end: the upper end of an interval of 90 %.
const LAST_ERRORS: f64 = 1.645;
/// … and by so many before.
const EARLY_ERRORS: f64 = 3.0;
/// No early check before this many pairs.
const EARLY_PAIRS_MIN: usize = 6;
/// A difference that is not a number counts as no difference; −∞ as a loss of this many scales.
const WORST_SCALES: f64 = 8.0;
const PROBATION_PAIRS_LIMIT: u32 = 10_000;

/// A scale by which can be divided, whatever was given.
pub(crate) fn usable_scale(scale: f64) -> f64 {
    if scale.is_finite() {
        scale.clamp(1e-4, 10.0)
    } else {
        0.05
    }
}

fn usable_difference(difference: f64, scale: f64) -> f64 {
    if difference == f64::NEG_INFINITY {
        -WORST_SCALES * scale
    } else if difference.is_finite() {
        difference
    } else {
        0.0
    }
}

/// The state of a probation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ProbationState {
    /// More pairs are needed.
    Running,
    /// All pairs were seen and nothing was wrong.
    Passed,
    /// The change must go.
    Revoked,
}

/// The probation of an accepted change.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Probation {
    pairs: u32,
    scale: f64,
    differences: Vec<f64>,
    state: ProbationState,
}

impl Probation {
    /// `pairs`: 30 by default; 0 = passed at once. `scale`: standard deviation of a pair's difference, its rare large ones
    /// included: a program that stops now and then has outliers with any change.
    pub fn new(pairs: u32, scale: f64) -> Self {
        let pairs = pairs.min(PROBATION_PAIRS_LIMIT);
        let state = if pairs == 0 {
            ProbationState::Passed
        } else {
            ProbationState::Running
        };
        Self {
            pairs,
            scale: usable_scale(scale),
            differences: Vec::new(),
            state,
        }
    }

    /// Takes the difference of a probe pair, on − off (log units).
    pub fn observe(&mut self, difference: f64) -> ProbationState {
        if self.state != ProbationState::Running {
            return self.state;
        }
        self.differences.push(usable_difference(difference, self.scale));
        let n = self.differences.len();
        let average = mean(&self.differences);
        let complete = n as u64 >= u64::from(self.pairs);
        // One stall in many pairs is not a mean: use the observed spread as well as the expected one.
        let spread = self.scale.max(variance(&self.differences).sqrt());
        let error = spread / (n as f64).sqrt();
        let below = |errors: f64| average + errors * error < PROBATION_MEAN_MIN;
        let vanished = (complete && below(LAST_ERRORS)) || (n >= EARLY_PAIRS_MIN && below(EARLY_ERRORS));
        if vanished || self.excess() >= EXCESS_MAX {
            self.state = ProbationState::Revoked;
        } else if complete {
            self.state = ProbationState::Passed;
        }
        self.state
    }

    /// Large losses minus large gains so far. A pair with a smaller gain is no loss: a large gain spreads wider than
    /// the noise from which the scale comes.
    pub fn excess(&self) -> i64 {
        let centre = median(&self.differences);
        let far = OUTLIER_SCALES * self.scale;
        let loss = (centre - far).min(0.0);
        let low = self.differences.iter().filter(|d| **d < loss).count() as i64;
        // As far above as a loss lies below, so that a varying large gain does not outweigh real losses.
        let high = self
            .differences
            .iter()
            .filter(|d| **d > centre + far.max(centre))
            .count() as i64;
        low - high
    }

    /// The present state.
    pub fn state(&self) -> ProbationState {
        self.state
    }

    /// Mean difference so far (log units); 0 before the first pair.
    pub fn mean(&self) -> f64 {
        if self.differences.is_empty() {
            0.0
        } else {
            mean(&self.differences)
        }
    }

    /// Pairs seen.
    pub fn seen(&self) -> u32 {
        self.differences.len() as u32
    }
}

/// Losses on which the detector is tuned (log units).
const LOSSES: [f64; 2] = [0.02, 0.05];
/// Mean number of probes between false alarms is at least this.
pub const ALARM: f64 = 200.0;
/// Largest stake: this many times 1/scale.
const STAKE_CAP: f64 = 4.0;

/// The watch over an accepted change, for ever: raises an alarm when it has become a loss.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Holdback {
    scale: f64,
    /// Differences below this count as losses (log units).
    floor: f64,
    sums: [f64; 2],
    probes: u64,
    alarm: f64,
}

impl Holdback {
    /// Alarms when the effect has become negative. `scale`: standard deviation of a pair's difference.
    pub fn new(scale: f64) -> Self {
        Self::below(0.0, scale)
    }

    /// Alarms when the effect has fallen below `floor` (log units), such as 0.01 to notice a lost gain.
    pub fn below(floor: f64, scale: f64) -> Self {
        let floor = if floor.is_finite() { floor } else { 0.0 };
        Self {
            scale: usable_scale(scale),
            floor,
            sums: [0.0; 2],
            probes: 0,
            alarm: ALARM,
        }
    }

    /// Makes it one of several detectors with the same probes, of which the first alarm decides. Together they have at
    /// least [`ALARM`] probes on average between false alarms. Proof: the mean of their levels grows by one per probe.
    /// It is at least `ALARM` when one level reaches the detector count times `ALARM`. Independence is not needed.
    pub fn one_of(mut self, detectors: usize) -> Self {
        self.alarm = ALARM * detectors.max(1) as f64;
        self
    }

    /// Takes the difference of a probe pair, on − off (log units). True = alarm, after which the detector restarts.
    pub fn observe(&mut self, difference: f64) -> bool {
        let difference = usable_difference(difference, self.scale) - self.floor;
        self.probes = self.probes.saturating_add(1);
        for (sum, loss) in self.sums.iter_mut().zip(LOSSES) {
            let stake = (loss / (self.scale * self.scale)).min(STAKE_CAP / self.scale);
            *sum = (1.0 + *sum) * exp(ln_1p_tanh(-stake * difference));
        }
        let alarm = self.level() >= self.alarm;
        if alarm {
            self.sums = [0.0; 2];
        }
        alarm
    }

    /// The detector's level. The alarm is at [`ALARM`] times the number of detectors that watch together.
    pub fn level(&self) -> f64 {
        mean(&self.sums)
    }

    /// Probes seen.
    pub fn probes(&self) -> u64 {
        self.probes
    }
}

/// Page–Hinkley's cumulative sum on the passive metric: a trigger for probes, nothing more.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PageHinkley {
    delta: f64,
    threshold: f64,
    memory: f64,
    mean: Option<f64>,
    seen: f64,
    sum: f64,
}

impl Default for PageHinkley {
    /// One-minute means, falls of more than 1 %, threshold 10 %, running mean over 120 values.
    fn default() -> Self {
        Self::new(0.01, 0.10, 120.0)
    }
}

impl PageHinkley {
    /// `delta`: falls up to this are ignored. `threshold`: cumulated fall. `memory`: values in the running mean.
    pub fn new(delta: f64, threshold: f64, memory: f64) -> Self {
        Self {
            delta,
            threshold,
            memory: memory.max(1.0),
            mean: None,
            seen: 0.0,
            sum: 0.0,
        }
    }

    /// Takes the next mean score (log units). True = request a burst of probe pairs, after which it restarts. Skips
    /// values that are no numbers: passive values cannot be biased.
    pub fn observe(&mut self, score: f64) -> bool {
        if !score.is_finite() {
            return false;
        }
        let Some(level) = self.mean else {
            self.mean = Some(score);
            self.seen = 1.0;
            return false;
        };
        self.sum = (self.sum + level - score - self.delta).max(0.0);
        self.seen = (self.seen + 1.0).min(self.memory);
        self.mean = Some(level + (score - level) / self.seen);
        let trigger = self.sum > self.threshold;
        if trigger {
            self.mean = None;
            self.sum = 0.0;
        }
        trigger
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simulation::Random;

    #[test]
    fn a_lasting_gain_passes_probation() {
        let mut random = Random::new(7);
        let mut p = Probation::new(30, 0.02);
        for _ in 0..29 {
            assert_eq!(
                p.observe(0.05 + 0.02 * random.gaussian()),
                ProbationState::Running
            );
        }
        assert_eq!(p.observe(0.05), ProbationState::Passed);
        assert_eq!(p.seen(), 30);
        assert_eq!(
            p.observe(-9.0),
            ProbationState::Passed,
            "a passed probation is over"
        );
    }

    #[test]
    fn a_large_gain_that_varies_is_not_a_disaster() {
        // Differences of a placement of eight programs that more than doubled their work, as simulated.
        let mut p = Probation::new(30, 0.0178);
        for difference in [1.085, 1.076, 1.083, 0.958, 1.097, 1.091, 0.946] {
            assert_eq!(p.observe(difference), ProbationState::Running);
        }
        assert_eq!(p.excess(), 0);
        p.observe(-0.2);
        assert_eq!(p.observe(-0.2), ProbationState::Revoked, "two real losses");
    }

    #[test]
    fn two_rare_disasters_revoke_and_a_balanced_pair_of_outliers_does_not() {
        let mut p = Probation::new(30, 0.01);
        for _ in 0..10 {
            p.observe(0.03);
        }
        assert_eq!(p.observe(-0.40), ProbationState::Running);
        assert_eq!(p.observe(-0.40), ProbationState::Revoked);
        let mut q = Probation::new(30, 0.01);
        for d in [0.03, 0.03, 0.03, 0.40, -0.30, 0.03, 0.40, -0.30] {
            assert_eq!(q.observe(d), ProbationState::Running);
        }
    }

    #[test]
    fn a_vanished_gain_is_revoked_at_the_end_and_a_loss_early() {
        let last_two = |gain: f64| {
            let mut p = Probation::new(30, 0.02);
            let states: Vec<ProbationState> = (0..30).map(|_| p.observe(gain)).collect();
            (states[28], states[29])
        };
        assert_eq!(
            last_two(0.003),
            (ProbationState::Running, ProbationState::Revoked)
        );
        let in_doubt = last_two(0.005);
        assert_eq!(in_doubt, (ProbationState::Running, ProbationState::Passed));
        let mut q = Probation::new(30, 0.02);
        let first = (1..=30).find(|_| q.observe(-0.05) == ProbationState::Revoked);
        assert_eq!(first, Some(6));
    }

    #[test]
    fn what_is_no_number_does_not_poison_the_guard() {
        let mut p = Probation::new(3, f64::NAN);
        let mut h = Holdback::new(f64::INFINITY);
        for d in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
            p.observe(d);
            h.observe(d);
        }
        assert!(p.mean().is_finite() && h.level().is_finite());
        assert_eq!(Probation::new(0, 0.1).state(), ProbationState::Passed);
    }

    #[test]
    fn the_detector_is_fair_under_no_effect() {
        // Over all 2^10 coin sequences the mean level after n probes is exactly n, whatever the sizes.
        let sizes = [0.01, 0.2, 0.03, 0.0, 0.05, 0.011, 0.4, 0.02, 0.001, 0.07];
        let mut total = 0.0;
        for coins in 0..1u32 << sizes.len() {
            let mut h = Holdback::new(0.03);
            for (i, size) in sizes.iter().enumerate() {
                let sign = if coins >> i & 1 == 1 { 1.0 } else { -1.0 };
                // The level stays below the alarm on this data often enough to be worth checking: undo the reset.
                let before = h.clone();
                if h.observe(sign * size) {
                    h = before;
                    for (sum, loss) in h.sums.iter_mut().zip(LOSSES) {
                        let stake = (loss / (0.03f64 * 0.03)).min(STAKE_CAP / 0.03);
                        *sum = (1.0 + *sum) * exp(ln_1p_tanh(-stake * sign * size));
                    }
                }
            }
            total += h.level();
        }
        let average = total / f64::from(1u32 << sizes.len());
        assert!((average - sizes.len() as f64).abs() < 1e-9, "{average}");
    }

    #[test]
    fn detectors_that_watch_together_alarm_as_rarely_as_one() {
        // Nothing is lost: the sign of every difference is a coin, alike for all five, which see different sizes.
        let mut random = Random::new(17);
        let runs = 300;
        let mut probes = 0;
        for _ in 0..runs {
            let mut all: Vec<Holdback> = (0..5).map(|_| Holdback::new(0.02).one_of(5)).collect();
            loop {
                probes += 1;
                let sign = if random.coin() { 1.0 } else { -1.0 };
                let alarms = all
                    .iter_mut()
                    .map(|h| h.observe(sign * 0.02 * random.gaussian().abs()))
                    .fold(false, |any, alarm| any | alarm);
                if alarms || probes > runs * 2000 {
                    break;
                }
            }
        }
        let between = f64::from(probes) / f64::from(runs);
        assert!(between >= ALARM, "{between} probes between false alarms");
    }

    #[test]
    fn a_loss_alarms_soon_and_a_gain_does_not() {
        let mut random = Random::new(11);
        let probes_to_alarm = |effect: f64, random: &mut Random| {
            let mut h = Holdback::new(0.025);
            (1..=3000).find(|_| h.observe(effect + 0.025 * random.gaussian()))
        };
        let loss: Vec<i32> = (0..50)
            .filter_map(|_| probes_to_alarm(-0.05, &mut random))
            .collect();
        assert_eq!(loss.len(), 50);
        assert!(mean(&loss.iter().map(|n| f64::from(*n)).collect::<Vec<_>>()) < 15.0);
        assert_eq!(probes_to_alarm(0.02, &mut random), None);
    }

    #[test]
    fn a_fall_of_the_passive_metric_triggers_within_minutes() {
        let mut ph = PageHinkley::default();
        assert!((0..200).all(|i| !ph.observe(1.0 + 0.002 * f64::from(i % 3))));
        let after = (1..=10).find(|_| ph.observe(0.95));
        assert!(after.is_some_and(|n| n <= 4), "{after:?}");
        assert!(!ph.observe(f64::NAN));
    }
}
