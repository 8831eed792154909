//! The staged rollout: is a change that cannot be switched back cheaply a gain?
//!
//! The change is made in stages (10, 25, 50, 100 %). Each stage has nine slots. Its onset slot `J` is drawn uniformly
//! from `1..=8` and recorded beforehand. Under "no effect" the slot means `z` do not depend on `J`. So for *any*
//! weights `q_j(z)` and any noise the evidence has mean 1 over `J`, exactly:
//!
//! ```text
//! E_stage = exp(q_J) / mean_j exp(q_j)
//! ```
//!
//! The weights come from a noise model (white + random walk), which sets the power only. The switchback's `1 + tanh` is
//! the case of two slots. Slot means are in log units (more is better). The start of each slot is discarded, and the
//! part that other programs explain is subtracted.

use crate::robust::{exp, exp_m1, ln, ln_mean_exp, mad_sigma};
use crate::trimmed::Comparison;
use serde::{Deserialize, Serialize};

/// Slots of a stage.
pub const SLOTS: usize = 9;
/// Onset slots: `1..=ONSETS`.
pub const ONSETS: usize = SLOTS - 1;
/// Share of the whole that is changed after each stage.
pub const SHARES: [f64; 4] = [0.10, 0.25, 0.50, 1.0];
/// Final effects on which the bets are tuned.
const EFFECTS: [f64; 3] = [0.05, 0.15, 0.50];
/// Weights are cut at this many nats below the best, so that one outlier costs no more.
const CLIP: f64 = 6.0;
/// Variance of the unknown level, in white variances.
const LEVEL_VARIANCE: f64 = 1000.0;
const VARIANCE_MIN: f64 = 1e-8;
/// Most evidence that one stage can give (nats): ln 8.
pub const EVIDENCE_PER_STAGE_MAX: f64 = 3.0 * std::f64::consts::LN_2;
/// Slot means needed before the start.
pub const HISTORY_MIN: usize = 6;

/// Share of the whole that is changed after each part, from the sizes of the parts. Without sizes: [`SHARES`] for four
/// parts, else equal parts. Shares set the power only.
pub fn shares(sizes: &[f64]) -> Vec<f64> {
    let usable = sizes.iter().all(|s| s.is_finite() && *s > 0.0);
    if !usable && sizes.len() == SHARES.len() {
        return SHARES.to_vec();
    }
    let size = |i: usize| if usable { sizes[i] } else { 1.0 };
    let total: f64 = (0..sizes.len()).map(size).sum();
    let mut sum = 0.0;
    let mut shares: Vec<f64> = (0..sizes.len())
        .map(|i| {
            sum += size(i);
            sum / total
        })
        .collect();
    if let Some(last) = shares.last_mut() {
        *last = 1.0;
    }
    shares
}

/// White noise plus a random walk, per slot (variances, log units squared).
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct NoiseModel {
    /// Variance of the white part.
    pub white: f64,
    /// Variance of one step of the walk.
    pub walk: f64,
}

impl NoiseModel {
    /// From slot means before the start, by robust variances of lagged differences. `None` below [`HISTORY_MIN`].
    pub fn from_history(slots: &[f64]) -> Option<Self> {
        if slots.len() < HISTORY_MIN || slots.iter().any(|s| !s.is_finite()) {
            return None;
        }
        let spread = |lag: usize| {
            let differences: Vec<f64> = slots.iter().zip(&slots[lag..]).map(|(a, b)| b - a).collect();
            let sigma = mad_sigma(&differences);
            (sigma * sigma).max(VARIANCE_MIN)
        };
        let (one, two) = (spread(1), spread(2));
        let walk = (two - one).clamp(0.02 * one, one);
        let white = (one - walk).max(0.1 * one) / 2.0;
        Some(Self { white, walk })
    }

    /// The noise of other slots, as multiples of the model's: the white part falls with the measured length, the walk
    /// grows with the distance. It sets the power only.
    pub fn scaled(&self, measured: f64, distance: f64) -> Self {
        Self {
            white: self.white / measured,
            walk: self.walk * distance,
        }
    }

    /// Standard error of a stage's step, averaged over the onsets (log units). `None` without positive variances.
    pub fn step_error(&self) -> Option<f64> {
        let covariance = self.covariance();
        let mut information = 0.0;
        for onset in 1..=ONSETS {
            let u = step(onset);
            information += dot(&u, &solve(&covariance, &u)?);
        }
        let error = (ONSETS as f64 / information).sqrt();
        error.is_finite().then_some(error)
    }

    /// Approximate evidence (nats) of stages with these shares for a true effect `theta` (log units). It is half the
    /// squared signal-to-noise ratio of each stage, at most ln 8: a stage tells only one of eight onsets.
    pub fn evidence_expected(&self, shares: &[f64], theta: f64) -> f64 {
        let Some(error) = self.step_error() else {
            return 0.0;
        };
        let mut before = 0.0;
        let mut sum = 0.0;
        for share in shares {
            let ratio = theta * (share - before) / error;
            sum += (ratio * ratio / 2.0).min(EVIDENCE_PER_STAGE_MAX);
            before = *share;
        }
        sum
    }

    fn covariance(&self) -> [[f64; SLOTS]; SLOTS] {
        let mut c = [[0.0; SLOTS]; SLOTS];
        for (i, row) in c.iter_mut().enumerate() {
            for (j, cell) in row.iter_mut().enumerate() {
                *cell = self.walk * (i.min(j) + 1) as f64 + LEVEL_VARIANCE * self.white;
                if i == j {
                    *cell += self.white;
                }
            }
        }
        c
    }
}

/// Solves `c x = b` by Cholesky's method. `None` unless `c` is positive definite.
fn solve(c: &[[f64; SLOTS]; SLOTS], b: &[f64; SLOTS]) -> Option<[f64; SLOTS]> {
    let mut l = [[0.0; SLOTS]; SLOTS];
    for i in 0..SLOTS {
        for j in 0..=i {
            let dot: f64 = (0..j).map(|k| l[i][k] * l[j][k]).sum();
            let rest = c[i][j] - dot;
            if i == j {
                if rest.is_nan() || rest <= 0.0 {
                    return None;
                }
                l[i][i] = rest.sqrt();
            } else {
                l[i][j] = rest / l[j][j];
            }
        }
    }
    let mut x = [0.0; SLOTS];
    for i in 0..SLOTS {
        let dot: f64 = (0..i).map(|k| l[i][k] * x[k]).sum();
        x[i] = (b[i] - dot) / l[i][i];
    }
    for i in (0..SLOTS).rev() {
        let dot: f64 = (i + 1..SLOTS).map(|k| l[k][i] * x[k]).sum();
        x[i] = (x[i] - dot) / l[i][i];
    }
    Some(x)
}

/// How a part takes effect: at a steady pace from the start of its onset slot. Lengths share one unit.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Ramp {
    /// Length of a slot.
    pub slot: f64,
    /// Discarded start of a slot; less than the slot.
    pub discard: f64,
    /// How long the part is expected to take, from earlier parts; 0 = at once.
    pub takes: f64,
}

impl Ramp {
    /// At once.
    pub const STEP: Self = Self {
        slot: 1.0,
        discard: 0.0,
        takes: 0.0,
    };

    /// Mean share of the part in effect during the measured part of each slot.
    fn shape(&self, onset: usize) -> [f64; SLOTS] {
        let usable = self.takes.is_finite()
            && self.takes > 0.0
            && self.slot > self.discard
            && self.discard >= 0.0
            && self.slot.is_finite();
        if !usable {
            return step(onset);
        }
        let upto = |x: f64| {
            if x <= 0.0 {
                0.0
            } else if x < self.takes {
                x * x / (2.0 * self.takes)
            } else {
                x - self.takes / 2.0
            }
        };
        let mut u = [0.0; SLOTS];
        for (i, x) in u.iter_mut().enumerate().skip(onset) {
            let start = (i - onset) as f64 * self.slot;
            let measured = self.slot - self.discard;
            *x = (upto(start + self.slot) - upto(start + self.discard)) / measured;
        }
        u
    }
}

fn step(onset: usize) -> [f64; SLOTS] {
    let mut u = [0.0; SLOTS];
    for (i, x) in u.iter_mut().enumerate() {
        if i >= onset {
            *x = 1.0;
        }
    }
    u
}

fn dot(a: &[f64; SLOTS], b: &[f64; SLOTS]) -> f64 {
    a.iter().zip(b).map(|(x, y)| x * y).sum()
}

/// Why a stage was not counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StageError {
    /// The onset is not one of `1..=8`.
    Onset,
    /// The share did not grow, or is not within 0..1.
    Share,
    /// A slot mean is not a number. The rollout must be given up: a stage may not be dropped.
    Slot,
    /// The noise model does not give a covariance (variances that are not positive numbers).
    Noise,
}

impl std::fmt::Display for StageError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Onset => "the onset slot must be one of 1 to 8",
            Self::Share => "the share must grow from stage to stage and end at 1",
            Self::Slot => "a slot has no measurement",
            Self::Noise => "the noise model has no positive variance",
        })
    }
}

impl std::error::Error for StageError {}

/// The estimate of a rollout.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct StagedEstimate {
    /// Relative effect of the stages so far.
    pub effect: f64,
    /// The same in log units.
    pub theta: f64,
    /// Its standard error if the noise model is right (log units).
    pub error: f64,
    /// Evidence for a gain (e-value).
    pub evidence: f64,
}

/// The advice after a stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StagedAdvice {
    /// Go on with the next stage.
    Proceed,
    /// The stage lost: do not proceed.
    Freeze,
    /// All stages together lost: undo them.
    Undo,
}

/// A staged rollout in progress.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Rollout {
    noise: NoiseModel,
    share: f64,
    /// ln E per final effect.
    wealth: [f64; 3],
    theta: f64,
    variance: f64,
    last: Option<(f64, f64)>,
    stages: u32,
}

impl Rollout {
    /// Before the first stage.
    pub fn new(noise: NoiseModel) -> Self {
        Self {
            noise,
            share: 0.0,
            wealth: [0.0; 3],
            theta: 0.0,
            variance: 0.0,
            last: None,
            stages: 0,
        }
    }

    /// Counts a stage: its slot means, its drawn onset slot, and the share changed after it.
    ///
    /// # Errors
    /// [`StageError`]; nothing is counted then.
    pub fn stage(&mut self, slots: &[f64; SLOTS], onset: usize, share: f64) -> Result<(), StageError> {
        self.stage_ramp(slots, onset, share, &Ramp::STEP)
    }

    /// As [`Rollout::stage`], for a gradual part. Fix the ramp before. A wrong ramp costs power, not validity.
    ///
    /// # Errors
    /// [`StageError`]; nothing is counted then.
    pub fn stage_ramp(
        &mut self,
        slots: &[f64; SLOTS],
        onset: usize,
        share: f64,
        ramp: &Ramp,
    ) -> Result<(), StageError> {
        if !(1..=ONSETS).contains(&onset) {
            return Err(StageError::Onset);
        }
        if !(share > self.share && share <= 1.0 + 1e-9) {
            return Err(StageError::Share);
        }
        if slots.iter().any(|s| !s.is_finite()) {
            return Err(StageError::Slot);
        }
        // The level is unknown anyway; removing it makes the arithmetic more exact.
        let z = slots.map(|s| s - slots[0]);
        let covariance = self.noise.covariance();
        let pz = solve(&covariance, &z).ok_or(StageError::Noise)?;
        let mut along = [0.0; ONSETS];
        let mut weight = [0.0; ONSETS];
        for j in 0..ONSETS {
            let u = ramp.shape(j + 1);
            along[j] = dot(&u, &pz);
            weight[j] = dot(&u, &solve(&covariance, &u).ok_or(StageError::Noise)?);
        }
        for (wealth, effect) in self.wealth.iter_mut().zip(EFFECTS) {
            let d = ln(1.0 + effect) * (share - self.share);
            let mut q = [0.0; ONSETS];
            for ((q, a), w) in q.iter_mut().zip(&along).zip(&weight) {
                *q = d * a - d * d * w / 2.0;
            }
            let best = q.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let q = q.map(|x| x.max(best - CLIP));
            *wealth += q[onset - 1] - ln_mean_exp(&q);
        }
        let (a, w) = (along[onset - 1], weight[onset - 1]);
        self.theta += a / w;
        self.variance += 1.0 / w;
        self.last = Some((a / w, (1.0 / w).sqrt()));
        self.share = share;
        self.stages += 1;
        Ok(())
    }

    /// The present estimate.
    pub fn estimate(&self) -> StagedEstimate {
        StagedEstimate {
            effect: exp_m1(self.theta),
            theta: self.theta,
            error: self.variance.sqrt(),
            evidence: exp(ln_mean_exp(&self.wealth).min(700.0)),
        }
    }

    /// What to do after the last stage. Undo if all stages lost more than 2 % and more than one standard error. Freeze
    /// if the last lost more than 1 % and more than two.
    pub fn advice(&self) -> StagedAdvice {
        if self.theta < -0.02 && self.theta < -self.variance.sqrt() {
            return StagedAdvice::Undo;
        }
        match self.last {
            Some((theta, error)) if theta < -0.01 && theta < -2.0 * error => StagedAdvice::Freeze,
            _ => StagedAdvice::Proceed,
        }
    }

    /// Whether the outcome is not worse than `margin` (log units, positive) by two standard errors. With a proven
    /// mechanism the change may then be kept as "benefit unproven".
    pub fn not_worse(&self, margin: f64) -> bool {
        self.stages > 0 && self.theta - 2.0 * self.variance.sqrt() > -margin
    }
}

/// A slot of a rollout in which something else than its score was seen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Seen {
    /// Stage, from 0.
    pub stage: u32,
    /// Slot of the stage, from 0.
    pub slot: u32,
    /// Share of the change that was in force.
    pub share: f64,
    /// The observation.
    pub value: f64,
}

/// The drawn onsets must single a fall out by this many standard deviations, against those that might have been drawn.
const ONSET_ERRORS: f64 = 1.645;

/// The change of the whole, if that is a fall of at least `fall` and proven twice. The first proof is that of
/// [`moved_with_the_share`] at this level (one-sided, with at least the error `error_min`). It takes the noise within a
/// stage for white around a trend. The second asks the random onsets, and takes no noise for granted.
pub fn fell_with_the_share(slots: &[Seen], fall: f64, level: f64, error_min: f64) -> Option<f64> {
    let found = moved_with_the_share(slots)?;
    let has_fallen = found.fell(fall, level, error_min) && against_other_onsets(slots) <= -ONSET_ERRORS;
    has_fallen.then_some(found.change)
}

/// How far the values follow the drawn onsets more than the eight that might have been drawn in each stage, in standard
/// deviations over all of them. 0 when nothing can be said.
fn against_other_onsets(slots: &[Seen]) -> f64 {
    let (mut drawn, mut expected, mut variance) = (0.0, 0.0, 0.0);
    for stage in stages_of(slots) {
        let own: Vec<&Seen> = slots.iter().filter(|s| s.stage == stage).collect();
        let Some((before, added)) = steps_of(&own) else {
            continue;
        };
        let values = without_trend(&own);
        let with = |is_on: &dyn Fn(&Seen) -> bool| -> f64 {
            let on = own.iter().zip(&values).filter(|(s, _)| is_on(s));
            added * on.map(|(_, v)| v).sum::<f64>()
        };
        drawn += with(&|s| s.share > before);
        let might: Vec<f64> = (1..=ONSETS as u32)
            .map(|onset| with(&|s| s.slot >= onset))
            .collect();
        let mean = might.iter().sum::<f64>() / ONSETS as f64;
        expected += mean;
        variance += might.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / ONSETS as f64;
    }
    if variance > 0.0 {
        (drawn - expected) / variance.sqrt()
    } else {
        0.0
    }
}

/// The share in force before the onset of a stage, and what its part adds. `None` if only one of both was seen.
fn steps_of(own: &[&Seen]) -> Option<(f64, f64)> {
    let shares = || own.iter().map(|s| s.share);
    let before = shares().fold(f64::INFINITY, f64::min);
    let added = shares().fold(f64::NEG_INFINITY, f64::max) - before;
    (added > 0.0).then_some((before, added))
}

/// The values without the straight line that fits them best.
fn without_trend(own: &[&Seen]) -> Vec<f64> {
    let mean = |of: &dyn Fn(&Seen) -> f64| own.iter().map(|s| of(s)).sum::<f64>() / own.len().max(1) as f64;
    let (slot, value) = (mean(&|s| f64::from(s.slot)), mean(&|s| s.value));
    let sums = own.iter().fold((0.0, 0.0), |(tt, tv), s| {
        let t = f64::from(s.slot) - slot;
        (tt + t * t, tv + t * (s.value - value))
    });
    let slope = if sums.0 > 0.0 { sums.1 / sums.0 } else { 0.0 };
    own.iter()
        .map(|s| s.value - value - slope * (f64::from(s.slot) - slot))
        .collect()
}

fn stages_of(slots: &[Seen]) -> Vec<u32> {
    let mut stages: Vec<u32> = slots.iter().map(|s| s.stage).collect();
    stages.sort_unstable();
    stages.dedup();
    stages
}

/// How far the seen values move with the whole change: least squares with a level for each stage and one slope over the
/// shares in force. So a trend between or evenly within stages does not count as the change: the random onsets separate
/// the two. `None` with too few slots, or if the onsets do not separate them.
pub fn moved_with_the_share(slots: &[Seen]) -> Option<Comparison> {
    let stages = stages_of(slots);
    // Subtract each stage's mean.
    let mut within: Vec<[f64; 3]> = Vec::with_capacity(slots.len());
    for stage in &stages {
        let own: Vec<[f64; 3]> = slots
            .iter()
            .filter(|s| s.stage == *stage)
            .map(|s| [f64::from(s.slot), s.share, s.value])
            .collect();
        let mean = |of: usize| own.iter().map(|x| x[of]).sum::<f64>() / own.len() as f64;
        let means = [mean(0), mean(1), mean(2)];
        within.extend(
            own.iter()
                .map(|x| [x[0] - means[0], x[1] - means[1], x[2] - means[2]]),
        );
    }
    let sum = |a: usize, b: usize| within.iter().map(|x| x[a] * x[b]).sum::<f64>();
    let (tt, ss, ts, tv, sv) = (sum(0, 0), sum(1, 1), sum(0, 1), sum(0, 2), sum(1, 2));
    let freedom = slots.len() as f64 - stages.len() as f64 - 2.0;
    let determinant = tt * ss - ts * ts;
    // Refuses NaN, too.
    if !(freedom >= 2.0 && determinant > 1e-9 * tt * ss) {
        return None;
    }
    let change = (tt * sv - ts * tv) / determinant;
    let slope = (ss * tv - ts * sv) / determinant;
    let left: f64 = within
        .iter()
        .map(|x| (x[2] - slope * x[0] - change * x[1]).powi(2))
        .sum();
    Some(Comparison {
        change,
        error: (left / freedom * tt / determinant).sqrt(),
        freedom,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simulation::Random;

    /// Four stages of nine slots, with a level that differs from stage to stage and drifts within them.
    fn seen(onsets: [u32; 4], effect: f64, drift: f64) -> Vec<Seen> {
        let shares = [0.0, 0.1, 0.25, 0.5, 1.0];
        (0..4u32)
            .flat_map(|stage| (0..9u32).map(move |slot| (stage, slot)))
            .map(|(stage, slot)| {
                let share = shares[stage as usize + usize::from(slot >= onsets[stage as usize])];
                let level = [0.3, -0.2, 0.5, 0.1][stage as usize];
                let noise = 0.01 * [1.0, -1.0, 0.5, -0.5][((3 * slot + stage) % 4) as usize];
                Seen {
                    stage,
                    slot,
                    share,
                    value: level + drift * f64::from(slot) + effect * share + noise,
                }
            })
            .collect()
    }

    /// How often a rollout of four stages shows a fall of 3 % or more at this level.
    fn fallen(
        effect: f64,
        level: f64,
        mut noise: impl FnMut(&mut Random) -> Box<dyn FnMut(&mut Random) -> f64>,
    ) -> f64 {
        const RUNS: u32 = 4000;
        let shares = [0.0, 0.1, 0.25, 0.5, 1.0];
        let mut random = Random::new(3);
        let mut found = 0;
        for _ in 0..RUNS {
            let mut next = noise(&mut random);
            let mut slots = Vec::new();
            for stage in 0..4u32 {
                let onset = 1 + (random.uniform() * 8.0) as u32;
                for slot in 0..9u32 {
                    let share = shares[stage as usize + usize::from(slot >= onset)];
                    let value = effect * share + next(&mut random);
                    slots.push(Seen {
                        stage,
                        slot,
                        share,
                        value,
                    });
                }
            }
            found += u32::from(fell_with_the_share(&slots, 0.03, level, 0.002).is_some());
        }
        f64::from(found) / f64::from(RUNS)
    }

    #[test]
    fn nothing_is_rarely_taken_for_a_fall_whatever_the_noise() {
        let white = fallen(0.0, 0.01, |_| Box::new(|r| 0.02 * r.gaussian()));
        let heavy = fallen(0.0, 0.01, |_| Box::new(|r| 0.01 * r.heavy()));
        let walk = fallen(0.0, 0.01, |_| {
            let mut at = 0.0;
            Box::new(move |r| {
                at += 0.01 * r.gaussian();
                at + 0.01 * r.gaussian()
            })
        });
        let states = fallen(0.0, 0.01, |_| Box::new(|r| if r.coin() { 0.0 } else { -0.69 }));
        let all = [white, heavy, walk, states];
        assert!(all.iter().all(|share| *share <= 0.02), "{all:?}");
    }

    #[test]
    fn a_fall_of_eight_percent_is_seen_where_the_noise_allows() {
        let quiet = fallen(-0.083, 0.0125, |_| Box::new(|r| 0.01 * r.gaussian()));
        let noisy = fallen(-0.083, 0.0125, |_| Box::new(|r| 0.02 * r.gaussian()));
        assert!(quiet > 0.8 && noisy > 0.3, "{quiet} {noisy}");
    }

    #[test]
    fn what_moves_with_the_share_is_told_from_what_time_does() {
        for (effect, drift) in [(0.0, 0.0), (0.2, 0.0), (0.0, 0.03), (0.2, -0.03)] {
            let found = moved_with_the_share(&seen([3, 7, 2, 5], effect, drift)).unwrap();
            assert!(
                (found.change - effect).abs() < 3.0 * found.error,
                "{effect} {drift} {found:?}"
            );
            assert!(
                found.error < 0.02 && (found.freedom - 30.0).abs() < 1e-9,
                "{found:?}"
            );
            assert_eq!(found.rose(0.1, 0.001, 0.002), effect > 0.1);
        }
        // One stage: its level and its slope are taken off, and some of nine slots are left.
        let one: Vec<Seen> = seen([3, 7, 2, 5], 2.0, 0.03)
            .into_iter()
            .filter(|s| s.stage == 3)
            .collect();
        let found = moved_with_the_share(&one).unwrap();
        assert!(
            (found.change - 2.0).abs() < 0.2 && (found.freedom - 6.0).abs() < 1e-9,
            "{found:?}"
        );
        // Nothing has come into effect yet, or hardly anything was seen.
        assert_eq!(moved_with_the_share(&one[..5]), None);
        assert_eq!(moved_with_the_share(&one[3..7]), None);
        assert_eq!(moved_with_the_share(&[]), None);
    }
    use proptest::prelude::*;

    const NOISE: NoiseModel = NoiseModel {
        white: 1e-4,
        walk: 2e-5,
    };

    fn slots(random: &mut Random, onset: usize, effect: f64) -> [f64; SLOTS] {
        let mut z = [0.0; SLOTS];
        let mut walk = 0.0;
        for (i, x) in z.iter_mut().enumerate() {
            walk += NOISE.walk.sqrt() * random.gaussian();
            *x = 3.0 + walk + NOISE.white.sqrt() * random.gaussian() + if i >= onset { effect } else { 0.0 };
        }
        z
    }

    fn rollout(random: &mut Random, total: f64) -> Rollout {
        let mut r = Rollout::new(NOISE);
        let mut before = 0.0;
        for share in SHARES {
            let onset = 1 + (random.next_u64() % ONSETS as u64) as usize;
            r.stage(&slots(random, onset, total * (share - before)), onset, share)
                .unwrap();
            before = share;
        }
        r
    }

    proptest! {
        #[test]
        fn a_stage_is_fair_for_any_data(
            z in prop::array::uniform9(-0.5f64..0.5),
            white in 1e-6f64..1e-2,
            takes in 0.0f64..5.0,
        ) {
            // The mean of E over the onsets is exactly 1.
            let ramp = Ramp { slot: 1.0, discard: 0.3, takes };
            let mut total = 0.0;
            for onset in 1..=ONSETS {
                let mut r = Rollout::new(NoiseModel { white, walk: white / 3.0 });
                r.stage_ramp(&z, onset, 0.25, &ramp).unwrap();
                total += r.estimate().evidence;
            }
            prop_assert!((total / ONSETS as f64 - 1.0).abs() < 1e-9);
        }
    }

    #[test]
    fn a_quarter_more_is_proven_and_estimated() {
        let mut random = Random::new(5);
        let estimates: Vec<StagedEstimate> =
            (0..100).map(|_| rollout(&mut random, 0.223).estimate()).collect();
        let proven = estimates.iter().filter(|e| e.evidence >= 20.0).count();
        assert!(proven >= 95, "{proven}");
        let theta: Vec<f64> = estimates.iter().map(|e| e.theta).collect();
        assert!((crate::robust::mean(&theta) - 0.223).abs() < 0.01);
        let error = estimates[0].error;
        let spread = crate::robust::variance(&theta).sqrt();
        assert!((spread / error - 1.0).abs() < 0.3, "{spread} {error}");
    }

    #[test]
    fn nothing_is_proven_about_nothing_and_a_loss_is_undone() {
        let mut random = Random::new(6);
        let nothing: Vec<Rollout> = (0..200).map(|_| rollout(&mut random, 0.0)).collect();
        assert!(nothing.iter().filter(|r| r.estimate().evidence >= 20.0).count() <= 10);
        let loss: Vec<Rollout> = (0..100).map(|_| rollout(&mut random, -0.20)).collect();
        assert!(
            loss.iter()
                .all(|r| r.advice() == StagedAdvice::Undo && !r.not_worse(0.01))
        );
    }

    #[test]
    fn the_noise_model_recovers_its_parts() {
        let mut random = Random::new(8);
        let mut walk = 0.0;
        let history: Vec<f64> = (0..4000)
            .map(|_| {
                walk += 0.01 * random.gaussian();
                walk + 0.02 * random.gaussian()
            })
            .collect();
        let n = NoiseModel::from_history(&history).unwrap();
        assert!(
            (n.white / 4e-4 - 1.0).abs() < 0.25 && (n.walk / 1e-4 - 1.0).abs() < 0.6,
            "{n:?}"
        );
        assert_eq!(NoiseModel::from_history(&[1.0; 5]), None);
        assert_eq!(NoiseModel::from_history(&[f64::NAN; 50]), None);
        assert!(NoiseModel::from_history(&[1.0; 50]).is_some_and(|n| n.white > 0.0 && n.walk > 0.0));
    }

    #[test]
    fn shares_follow_the_sizes_and_have_a_rule_without_them() {
        assert_eq!(shares(&[10.0, 15.0, 25.0, 50.0]), SHARES);
        assert_eq!(shares(&[0.0; 4]), SHARES);
        assert_eq!(shares(&[1.0, 3.0]), [0.25, 1.0]);
        assert_eq!(shares(&[0.0, 0.0]), [0.5, 1.0]);
        assert_eq!(shares(&[7.0]), [1.0]);
        assert!(shares(&[]).is_empty());
    }

    #[test]
    fn a_slow_part_is_recognised_by_its_ramp() {
        let mut random = Random::new(10);
        let ramp = Ramp {
            slot: 1.0,
            discard: 0.2,
            takes: 2.0,
        };
        assert_eq!(Ramp::STEP.shape(3), step(3));
        assert_eq!(
            Ramp {
                takes: f64::NAN,
                ..ramp
            }
            .shape(3),
            step(3)
        );
        let shape = ramp.shape(3);
        assert_eq!(shape[2], 0.0);
        assert!(
            (shape[3] - 0.3).abs() < 1e-9 && (shape[4] - 0.8).abs() < 1e-9 && (shape[5] - 1.0).abs() < 1e-9
        );
        let (mut with, mut without) = (0.0, 0.0);
        for i in 0..200 {
            let onset = 1 + i % ONSETS;
            let quiet = slots(&mut random, SLOTS, 0.0);
            let shape = ramp.shape(onset);
            let mut z = quiet;
            for (x, u) in z.iter_mut().zip(shape) {
                *x += 0.10 * u;
            }
            for (sum, ramp) in [(&mut with, &ramp), (&mut without, &Ramp::STEP)] {
                let mut r = Rollout::new(NOISE);
                r.stage_ramp(&z, onset, 1.0, ramp).unwrap();
                *sum += ln(r.estimate().evidence) / 200.0;
            }
        }
        assert!(with > 1.5 && with > without + 0.5, "{with} {without}");
    }

    #[test]
    fn the_expected_error_is_that_of_the_estimates() {
        let mut random = Random::new(9);
        let steps: Vec<f64> = (0..400)
            .map(|i| {
                let mut r = Rollout::new(NOISE);
                let onset = 1 + i % ONSETS;
                r.stage(&slots(&mut random, onset, 0.05), onset, 1.0).unwrap();
                r.estimate().theta
            })
            .collect();
        let spread = crate::robust::variance(&steps).sqrt();
        let error = NOISE.step_error().unwrap();
        assert!((spread / error - 1.0).abs() < 0.2, "{spread} {error}");
        // More noise, less evidence; never more than eight onsets can tell.
        let much = NOISE.evidence_expected(&SHARES, 0.2);
        let little = NOISE.scaled(0.25, 4.0).evidence_expected(&SHARES, 0.2);
        assert!(little < much && much <= 4.0 * EVIDENCE_PER_STAGE_MAX + 1e-9);
        let broken = NoiseModel {
            white: -1.0,
            walk: 0.0,
        };
        assert_eq!(broken.step_error(), None);
        assert_eq!(broken.evidence_expected(&SHARES, 0.2), 0.0);
    }

    #[test]
    fn bad_input_is_refused_and_not_counted() {
        let mut r = Rollout::new(NOISE);
        let fresh = r.clone();
        assert_eq!(r.stage(&[0.0; SLOTS], 0, 0.1), Err(StageError::Onset));
        assert_eq!(r.stage(&[0.0; SLOTS], 9, 0.1), Err(StageError::Onset));
        assert_eq!(r.stage(&[0.0; SLOTS], 1, 0.0), Err(StageError::Share));
        assert_eq!(r.stage(&[f64::NAN; SLOTS], 1, 0.1), Err(StageError::Slot));
        assert_eq!(r, fresh);
        let mut broken = Rollout::new(NoiseModel {
            white: -1.0,
            walk: 0.0,
        });
        assert_eq!(broken.stage(&[0.0; SLOTS], 1, 0.1), Err(StageError::Noise));
        let text = serde_json::to_string(&r).unwrap();
        assert_eq!(serde_json::from_str::<Rollout>(&text).unwrap(), r);
    }
}
