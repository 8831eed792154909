//! The switchback trial: is a change that can be switched on and off a gain?
//!
//! Unit: a *block*, a stretch of time spent wholly on or wholly off, summarised by one score (natural logarithm of
//! the metric, more is better). Effects θ are differences of scores, i.e. relative changes in log units.
//!
//! Problem: load drifts, steps, swings daily and is autocorrelated, so "before and after" proves nothing, and tests
//! that model the noise are wrong when the noise is new. Approach: toss a fair coin for what comes next and bet on
//! it. From the blocks come *contrasts* `x` whose distribution is symmetric around θ whatever the load does, because
//! only the coin decides the sign of the rest. The evidence for a gain
//!
//! ```text
//! E = mean over targets j of  Π_k (1 + tanh(λ_jk · x_k)),   λ_jk = min(d_j / S_k², 4 / S_k),   S_k from the past
//! ```
//!
//! is a test martingale under "no effect": its mean stays 1 and the chance that it ever reaches 1/α is at most α
//! (Ville's inequality), at any stopping time, for any noise. The scale `S` only sets the stakes.
//!
//! Two designs make contrasts:
//!
//! * [`Design::Paired`]: two blocks, the coin decides their order; `x` = on − off. Every pair can double E.
//! * [`Design::Blockwise`]: a coin for every block; `x = 2 s (y − m)`, where `s` is +1 for on and −1 for off and `m`
//!   a forecast of the block's score half way between the arms, from past blocks only. Under an effect θ,
//!   `y = u + s θ/2` with `u` untouched by the coin, so `x = θ + s · 2(u − m)`: again symmetric around θ. Every
//!   block can double E, so a strong effect is proven in about half the time; the price is a forecast from one side
//!   only, which a pair does not need.
//!
//! `docs/operating-characteristics.md` shows what they achieve. Why not a paired t test or a mixture SPRT: with a look
//! after every pair the first is wrong one time in four, the second up to one in three when the load steps; both are
//! right only for the noise they assume.

use crate::robust::{exp, exp_m1, ln, ln_1p_tanh, ln_mean_exp, mad_sigma, mean, median};
use serde::{Deserialize, Serialize};

/// State of the change during a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Arm {
    /// The change is in force.
    On,
    /// The machine is as it was.
    Off,
}

impl Arm {
    fn other(self) -> Self {
        match self {
            Self::On => Self::Off,
            Self::Off => Self::On,
        }
    }

    fn sign(self) -> f64 {
        match self {
            Self::On => 1.0,
            Self::Off => -1.0,
        }
    }
}

/// How coins become arms.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Design {
    /// One coin for two blocks: their order.
    Paired,
    /// One coin for every block.
    Blockwise,
}

/// What the trial says after a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Decision {
    /// Go on with the next block.
    Continue,
    /// A gain is proven at the level `alpha`, and it is large enough to matter.
    Benefit,
    /// A loss is likely.
    Harm,
    /// A gain of `delta` or more is unlikely.
    Futile,
    /// The budget is used up without a result.
    Exhausted,
}

/// Parameters of a trial. `Default` = the table of recommended defaults in `docs/operating-characteristics.md`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TrialParameters {
    /// How coins become arms.
    pub design: Design,
    /// Expected standard deviation of an on − off difference of two neighbouring blocks (log units), from passive
    /// history. Sets the stakes only: a wrong value costs time, never validity.
    pub scale_prior: f64,
    /// Weight of `scale_prior`, in pairs.
    pub scale_prior_pairs: f64,
    /// Largest chance of accepting a change that does nothing.
    pub alpha: f64,
    /// Smallest gain that is worth having (log units): futility means that it is ruled out.
    pub delta: f64,
    /// A gain is accepted only when its estimate is at least this (log units).
    pub gate: f64,
    /// A harm is declared only when its estimate is at least this large; also the margin of non-inferiority.
    pub harm_margin: f64,
    /// Level of the test for harm.
    pub alpha_harm: f64,
    /// Level of the test for futility.
    pub beta: f64,
    /// Effects on which the bets are tuned (log units), equal weights.
    pub targets: [f64; 5],
    /// Largest stake: this many times 1/S.
    pub stake_cap: f64,
    /// Blocks before the trial ends as [`Decision::Exhausted`]. The caller's budget of time usually ends it earlier.
    pub blocks_max: u32,
    /// Confidence of the interval in [`Estimate`].
    pub confidence: f64,
}

impl Default for TrialParameters {
    fn default() -> Self {
        Self {
            design: Design::Paired,
            scale_prior: 0.05,
            scale_prior_pairs: 6.0,
            alpha: 0.01,
            delta: 0.02,
            gate: 0.01,
            harm_margin: 0.01,
            alpha_harm: 0.20,
            beta: 0.10,
            targets: [0.01, 0.02, 0.05, 0.10, 0.20],
            stake_cap: 4.0,
            blocks_max: BLOCKS_MAX_DEFAULT,
            confidence: 0.90,
        }
    }
}

/// An hour of the shortest useful blocks (5 s). The interval is computed from all of them, so it must be bounded.
const BLOCKS_MAX_DEFAULT: u32 = 720;
/// No trial is longer than this, whatever the parameters say.
const BLOCKS_MAX_LIMIT: u32 = 10_000;
/// Smallest scale: below it every difference would be certain.
const SCALE_MIN: f64 = 1e-4;
/// A broken on block counts as a loss of this many scales.
const BROKEN_SCALES: f64 = 4.0;
/// The running scale is used from this many contrasts on.
const RUNNING_SCALE_MIN: usize = 4;
/// Effects outside ± this (log units; a factor of e^20) are not distinguished.
const EFFECT_LIMIT: f64 = 20.0;

impl TrialParameters {
    /// Checks ranges. Each complaint names the parameter, its value and the allowed range.
    pub fn validate(&self) -> Vec<String> {
        let mut wrong = Vec::new();
        let mut range = |name: &str, value: f64, low: f64, high: f64| {
            if !(value >= low && value <= high) {
                wrong.push(format!("{name} = {value}: must be between {low} and {high}"));
            }
        };
        range("scale_prior", self.scale_prior, SCALE_MIN, 10.0);
        range("scale_prior_pairs", self.scale_prior_pairs, 0.1, 1000.0);
        range("alpha", self.alpha, 1e-12, 0.5);
        range("delta", self.delta, 1e-4, 1.0);
        range("gate", self.gate, 0.0, self.delta);
        range("harm_margin", self.harm_margin, 0.0, 1.0);
        range("alpha_harm", self.alpha_harm, 1e-6, 0.5);
        range("beta", self.beta, 1e-6, 0.5);
        for target in self.targets {
            range("targets", target, 1e-4, 2.0);
        }
        range("stake_cap", self.stake_cap, 0.1, 100.0);
        range(
            "blocks_max",
            f64::from(self.blocks_max),
            4.0,
            f64::from(BLOCKS_MAX_LIMIT),
        );
        range("confidence", self.confidence, 0.5, 0.999);
        wrong
    }
}

/// What a trial knows at the moment.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Estimate {
    /// Relative change of the metric by the change, e^θ − 1; 0 before the first contrast. At an acceptance the
    /// estimate is inflated (it stopped because it looked good): remember `lower`.
    pub effect: f64,
    /// Lower end of the time-uniform interval; −1 while nothing is known.
    pub lower: f64,
    /// Upper end; +∞ while nothing is known.
    pub upper: f64,
    /// Confidence of the interval.
    pub confidence: f64,
    /// Evidence for a gain, as an e-value: a gain is proven at the level α from 1/α on.
    pub evidence: f64,
    /// Evidence for a loss.
    pub evidence_harm: f64,
    /// Evidence against a gain of `delta` or more.
    pub evidence_futility: f64,
    /// Evidence against a loss of `harm_margin` or more (for changes that save something else).
    pub evidence_not_worse: f64,
    /// Standard deviation of an on − off difference of two blocks, as it would be staked on now (log units).
    pub scale: f64,
    /// Contrasts: pairs when paired, blocks after the first when blockwise.
    pub contrasts: u32,
    /// Blocks.
    pub blocks: u32,
    /// Blocks ended by the circuit breaker.
    pub broken: u32,
    /// Blocks without a number (counted as no difference).
    pub unusable: u32,
}

/// One number about the effect, and the scale it was staked with.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
struct Contrast {
    value: f64,
    /// Of the contrast, from the past.
    scale: f64,
    /// False when no number was there: it says nothing about the scale.
    measured: bool,
}

/// What was seen in one block.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Seen {
    Score(f64),
    Broken,
    Nothing,
}

/// Logarithms of the products, one per target.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
struct Wealth([f64; 5]);

impl Wealth {
    fn bet(&mut self, value: f64, scale: f64, parameters: &TrialParameters) {
        for (wealth, target) in self.0.iter_mut().zip(&parameters.targets) {
            let stake = (target / (scale * scale)).min(parameters.stake_cap / scale);
            *wealth += ln_1p_tanh(stake * value);
        }
    }

    fn ln_e(&self) -> f64 {
        ln_mean_exp(&self.0)
    }
}

/// e-values are shown up to e^700; the decision uses the logarithm.
fn shown(ln_e: f64) -> f64 {
    exp(ln_e.min(700.0))
}

/// A trial in progress. Serialisable, so that it survives a restart.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Trial {
    parameters: TrialParameters,
    /// Arm of the block that is running.
    pending: Option<Arm>,
    /// First block of the pair that is running.
    first: Option<(Arm, Seen)>,
    blocks: Vec<(Arm, Seen)>,
    contrasts: Vec<Contrast>,
    forecaster: Forecaster,
    benefit: Wealth,
    harm: Wealth,
    futility: Wealth,
    not_worse: Wealth,
    broken: u32,
    unusable: u32,
    decision: Decision,
}

impl Trial {
    /// A trial before its first block. Parameters outside their ranges are brought to the nearest sensible value,
    /// so that a trial never divides by zero; call [`TrialParameters::validate`] to tell people.
    pub fn new(parameters: TrialParameters) -> Self {
        let mut p = parameters;
        if !p.scale_prior.is_finite() {
            p.scale_prior = TrialParameters::default().scale_prior;
        }
        p.scale_prior = p.scale_prior.clamp(SCALE_MIN, 10.0);
        p.blocks_max = p.blocks_max.clamp(1, BLOCKS_MAX_LIMIT);
        Self {
            forecaster: Forecaster::default(),
            parameters: p,
            pending: None,
            first: None,
            blocks: Vec::new(),
            contrasts: Vec::new(),
            benefit: Wealth::default(),
            harm: Wealth::default(),
            futility: Wealth::default(),
            not_worse: Wealth::default(),
            broken: 0,
            unusable: 0,
            decision: Decision::Continue,
        }
    }

    /// The parameters in use.
    pub fn parameters(&self) -> &TrialParameters {
        &self.parameters
    }

    /// Whether the next call of [`Trial::next_arm`] uses its coin. If not, no coin need be tossed (nor journalled).
    pub fn needs_coin(&self) -> bool {
        self.pending.is_none() && self.first.is_none()
    }

    /// Starts the next block and says its arm. `coin` must be fair, independent of everything the workload can see,
    /// and written down before the block starts. Heads (`true`) = on (paired: on first). While a block is running
    /// its arm is returned again and the coin is not used.
    pub fn next_arm(&mut self, coin: bool) -> Arm {
        let arm = match (self.pending, self.first) {
            (Some(arm), _) => arm,
            (None, Some((first, _))) => first.other(),
            (None, None) => {
                if coin {
                    Arm::On
                } else {
                    Arm::Off
                }
            }
        };
        self.pending = Some(arm);
        arm
    }

    /// Takes the score of the running block: ln(metric), more is better.
    ///
    /// A score of −∞ (no work at all) in an on block counts as broken. Any other score that is not a number counts
    /// as "no difference": the block is never dropped, because dropping bad blocks would bias towards accepting; it
    /// is counted in [`Estimate::unusable`]. Without a running block, or after the trial ended, nothing changes.
    pub fn observe(&mut self, score: f64) -> Decision {
        if score.is_finite() {
            // Beyond that the arithmetic of differences could overflow.
            self.finish_block(Seen::Score(score.clamp(-1e6, 1e6)))
        } else if score == f64::NEG_INFINITY && self.pending == Some(Arm::On) {
            self.observe_broken()
        } else {
            self.finish_block(Seen::Nothing)
        }
    }

    /// The circuit breaker ended the running block: an on block counts as a loss of four scales, an off block as no
    /// difference (both can only delay an acceptance). A pair ends with it.
    pub fn observe_broken(&mut self) -> Decision {
        self.finish_block(Seen::Broken)
    }

    /// The budget of time is used up.
    pub fn budget_exhausted(&mut self) -> Decision {
        if self.decision == Decision::Continue {
            self.decision = Decision::Exhausted;
        }
        self.decision
    }

    /// The decision so far.
    pub fn decision(&self) -> Decision {
        self.decision
    }

    fn finish_block(&mut self, seen: Seen) -> Decision {
        if self.decision != Decision::Continue {
            return self.decision;
        }
        let Some(arm) = self.pending.take() else {
            return self.decision;
        };
        match seen {
            Seen::Score(_) => {}
            Seen::Broken => self.broken += 1,
            Seen::Nothing => self.unusable += 1,
        }
        match self.parameters.design {
            Design::Paired => self.finish_paired(arm, seen),
            Design::Blockwise => self.finish_blockwise(arm, seen),
        }
        self.blocks.push((arm, seen));
        if self.decision == Decision::Continue
            && self.blocks.len() as u64 >= u64::from(self.parameters.blocks_max)
        {
            self.decision = Decision::Exhausted;
        }
        self.decision
    }

    fn finish_paired(&mut self, arm: Arm, seen: Seen) {
        let scale = self.contrast_scale();
        let (value, measured) = match (self.first.take(), seen) {
            (_, Seen::Broken) => (broken_value(arm, scale), arm == Arm::On),
            (None, _) => {
                self.first = Some((arm, seen));
                return;
            }
            (Some((_, Seen::Score(first))), Seen::Score(second)) => (arm.sign() * (second - first), true),
            // A pair without both numbers is a pair without a difference.
            (Some(_), _) => (0.0, false),
        };
        self.count(Contrast {
            value,
            scale,
            measured,
        });
    }

    fn finish_blockwise(&mut self, arm: Arm, seen: Seen) {
        let scale = self.contrast_scale();
        let pair_scale = self.pair_scale();
        let forecast = self.forecaster.forecast();
        if let Seen::Score(score) = seen {
            self.forecaster.learn(arm, score, pair_scale);
        }
        // Before the first score there is no forecast, whatever the arm: no contrast.
        let Some(forecast) = forecast else { return };
        let (value, measured) = match seen {
            Seen::Score(score) => (2.0 * arm.sign() * (score - forecast), true),
            Seen::Broken => (broken_value(arm, scale), arm == Arm::On),
            Seen::Nothing => (0.0, false),
        };
        self.count(Contrast {
            value,
            scale,
            measured,
        });
    }

    /// Bets on a contrast and decides. Order matters: harm first.
    fn count(&mut self, contrast: Contrast) {
        let p = &self.parameters;
        let Contrast { value, scale, .. } = contrast;
        self.benefit.bet(value, scale, p);
        self.harm.bet(-value, scale, p);
        self.futility.bet(p.delta - value, scale, p);
        self.not_worse.bet(value + p.harm_margin, scale, p);
        self.contrasts.push(contrast);
        let estimate = self.theta();
        self.decision = if self.harm.ln_e() >= -ln(p.alpha_harm) && estimate <= -p.harm_margin {
            Decision::Harm
        } else if self.benefit.ln_e() >= -ln(p.alpha) && estimate >= p.gate {
            Decision::Benefit
        } else if self.futility.ln_e() >= -ln(p.beta) && estimate < p.gate {
            Decision::Futile
        } else {
            Decision::Continue
        };
    }

    /// Scale of a contrast before anything was seen.
    fn contrast_scale_prior(&self) -> f64 {
        match self.parameters.design {
            Design::Paired => self.parameters.scale_prior,
            Design::Blockwise => self.parameters.scale_prior * BLOCKWISE_SCALE,
        }
    }

    /// Scale of the next contrast, from past ones only.
    fn contrast_scale(&self) -> f64 {
        let prior = self.contrast_scale_prior();
        let values: Vec<f64> = self
            .contrasts
            .iter()
            .filter(|c| c.measured)
            .map(|c| c.value)
            .collect();
        let k = values.len() as f64;
        if values.len() < RUNNING_SCALE_MIN {
            return prior.max(SCALE_MIN);
        }
        // The median absolute deviation of few numbers is too small on average.
        let running = mad_sigma(&values) * (1.0 + 0.8 / k);
        let weight = match self.parameters.design {
            Design::Paired => self.parameters.scale_prior_pairs,
            Design::Blockwise => 2.0 * self.parameters.scale_prior_pairs,
        };
        let square = (weight * prior * prior + k * running * running) / (weight + k);
        square.sqrt().max(SCALE_MIN)
    }

    /// Scale of an on − off difference of two blocks.
    fn pair_scale(&self) -> f64 {
        match self.parameters.design {
            Design::Paired => self.contrast_scale(),
            Design::Blockwise => self.contrast_scale() / BLOCKWISE_SCALE,
        }
    }

    /// Mean contrast: an unbiased estimate of θ at a fixed number of blocks; 0 before the first.
    fn theta(&self) -> f64 {
        let values: Vec<f64> = self.contrasts.iter().map(|c| c.value).collect();
        if values.is_empty() { 0.0 } else { mean(&values) }
    }

    /// Logarithm of the evidence that the effect is above (`sign` = 1) or below (−1) `theta`.
    fn ln_e_against(&self, theta: f64, sign: f64) -> f64 {
        let mut wealth = Wealth::default();
        for c in &self.contrasts {
            wealth.bet(sign * (c.value - theta), c.scale, &self.parameters);
        }
        wealth.ln_e()
    }

    /// End of the interval on the side of `sign`: the smallest |θ| beyond the estimate that is ruled out. The
    /// stakes do not depend on θ, so the evidence is monotone in θ and halving finds the end.
    fn interval_end(&self, sign: f64) -> f64 {
        let needed = ln(2.0 / (1.0 - self.parameters.confidence).clamp(1e-9, 1.0));
        // `sign` = −1 looks for the lower end: evidence that the effect is above.
        let excluded = |theta: f64| self.ln_e_against(theta, -sign) >= needed;
        let (mut inside, mut outside) = (-sign * EFFECT_LIMIT, sign * EFFECT_LIMIT);
        if !excluded(outside) {
            return sign * f64::INFINITY;
        }
        for _ in 0..64 {
            let middle = (inside + outside) / 2.0;
            if excluded(middle) {
                outside = middle;
            } else {
                inside = middle;
            }
        }
        outside
    }

    /// What is known now. Costs about 600 elementary steps per contrast (the interval).
    pub fn estimate(&self) -> Estimate {
        Estimate {
            effect: exp_m1(self.theta()),
            lower: exp_m1(self.interval_end(-1.0)),
            upper: exp_m1(self.interval_end(1.0)),
            confidence: self.parameters.confidence,
            evidence: shown(self.benefit.ln_e()),
            evidence_harm: shown(self.harm.ln_e()),
            evidence_futility: shown(self.futility.ln_e()),
            evidence_not_worse: shown(self.not_worse.ln_e()),
            scale: self.pair_scale(),
            contrasts: self.contrasts.len() as u32,
            blocks: self.blocks.len() as u32,
            broken: self.broken,
            unusable: self.unusable,
        }
    }
}

fn broken_value(arm: Arm, scale: f64) -> f64 {
    match arm {
        Arm::On => -BROKEN_SCALES * scale,
        Arm::Off => 0.0,
    }
}

/// A blockwise contrast is twice a forecast error; with a forecast from three blocks of white noise its standard
/// deviation is √(4 · (1 + 1/3) / 2) times that of a pair's difference.
const BLOCKWISE_SCALE: f64 = 1.632_993_161_855_452;

/// Numbers of past blocks that the forecasters average: one follows a step at once, eight average noise away.
const WINDOWS: [usize; 3] = [1, 3, 8];
/// Past errors are forgotten at this rate per block, so that the choice follows the load.
const ERROR_MEMORY: f64 = 0.9;
/// Mean absolute errors assumed before any was seen, in block scales: those of white noise, with a slight
/// preference for the middle window.
const ERRORS_PRIOR: [f64; 3] = [1.2, 1.1, 1.15];
/// A prior effect of this size (log units) is thought possible when the effect is first estimated.
const EFFECT_PRIOR: f64 = 0.1;
/// Differences between neighbouring blocks of different arms that are remembered.
const DIFFERENCES_MAX: usize = 64;

/// Forecasts a block's score half way between the arms, from past blocks only.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
struct Forecaster {
    /// Last scores with their arms, newest last.
    recent: Vec<(Arm, f64)>,
    /// On − off differences of neighbouring blocks of different arms.
    differences: Vec<f64>,
    /// Discounted sums of absolute errors per window, in block scales, and their weight.
    errors: [f64; 3],
    weight: f64,
    /// Effect removed from past scores.
    theta: f64,
}

impl Forecaster {
    fn level(&self, window: usize) -> Option<f64> {
        let from = self.recent.len().saturating_sub(window);
        let levels: Vec<f64> = self.recent[from..]
            .iter()
            .map(|(arm, y)| y - arm.sign() * self.theta / 2.0)
            .collect();
        (!levels.is_empty()).then(|| mean(&levels))
    }

    fn forecast(&self) -> Option<f64> {
        let mut best = (f64::INFINITY, 0);
        for (i, (sum, prior)) in self.errors.iter().zip(&ERRORS_PRIOR).enumerate() {
            let error = (sum + 3.0 * prior) / (self.weight + 3.0);
            if error < best.0 {
                best = (error, i);
            }
        }
        self.level(WINDOWS[best.1])
    }

    fn learn(&mut self, arm: Arm, score: f64, pair_scale: f64) {
        let block_scale = pair_scale / std::f64::consts::SQRT_2;
        let centred = score - arm.sign() * self.theta / 2.0;
        let levels = WINDOWS.map(|w| self.level(w));
        self.weight *= ERROR_MEMORY;
        if !self.recent.is_empty() {
            self.weight += 1.0;
        }
        for (sum, level) in self.errors.iter_mut().zip(levels) {
            *sum *= ERROR_MEMORY;
            if let Some(level) = level {
                // One outlier must not decide for long.
                *sum += ((centred - level).abs() / block_scale).min(4.0);
            }
        }
        if let Some((before, y)) = self.recent.last()
            && *before != arm
        {
            self.differences.push(arm.sign() * (score - y));
            if self.differences.len() > DIFFERENCES_MAX {
                self.differences.remove(0);
            }
            let n = self.differences.len() as f64;
            let ratio = pair_scale / EFFECT_PRIOR;
            self.theta = median(&self.differences) * n / (n + ratio * ratio);
        }
        self.recent.push((arm, score));
        if self.recent.len() > WINDOWS[2] {
            self.recent.remove(0);
        }
    }
}
