//! Control series: what else was measured beside a trial takes noise out of its scores.
//!
//! A *control* `x` sees a part of the noise of the score `y` and nothing of the change: the speed of the machine's memory
//! by a canary. The trial judges `y − β (x − x̄)` then. `β` follows from past blocks of the same trial only, and holds for
//! both blocks of a pair. So under "the change does nothing" the bets stay exact, whatever `β` is.
//!
//! * Differences of neighbouring blocks are fitted: `Δy = θ Δarm + β Δx`. The fit has Huber's weights, and a ridge on `β`.
//! * `β` is used only while it would have lowered the variance of past differences by [`LOWERED_MIN`]. Each of them is
//!   predicted by the fit of those before it, so a fit to chance does not pass.
//! * A control that reacts to the change would count its own reaction as a gain. [`Control::reacts`] tells that; `β` is 0
//!   then. The raw estimate ([`Control::raw`]) owes nothing to the control.

use crate::robust::{mad_sigma, mean, median, student_t_limit, variance};

/// Least factor by which the variance must be lowered.
pub const LOWERED_MIN: f64 = 1.3;
/// Differences before the first fit.
const FIT_MIN: usize = 6;
/// Predicted differences before `β` is used: with fewer a factor of 1.3 may be chance.
const PREDICTED_MIN: usize = 10;
/// Standard errors by which the errors must have become smaller.
const LOWERED_ERRORS: f64 = 2.0;
/// Standard errors by which the scores as measured must show a gain: one that only the adjusted scores show is none.
const RAW_ERRORS: f64 = 1.5;
/// Differences that a fit uses: noise changes by the hour.
const RECENT: usize = 240;
/// Ridge: share of the variance of `x` that is added to it.
const RIDGE: f64 = 0.05;
/// Residuals beyond this many standard deviations count less (Huber).
const HUBER: f64 = 1.5;
/// Rounds of reweighting.
const ROUNDS: usize = 8;
/// Errors are cut at this many standard deviations when variances are compared.
const CUT: f64 = 3.0;
/// Largest factor that is believed: a program waits for memory all the time, and no more.
const FACTOR_MAX: f64 = 3.0;
/// Pairs before a reaction of the control can be told.
const REACTION_MIN: usize = 4;
/// Level of the test for a reaction, for either side.
const REACTION_LEVEL: f64 = 0.05;
/// A reaction that moves the score by less is none (log units).
const REACTION_LEAST: f64 = 0.002;

/// A block: whether the change was on, the score, and the control.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Block {
    on: bool,
    score: f64,
    control: f64,
}

/// Difference of two neighbouring blocks.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Difference {
    /// 1 if the second is on and the first off, −1 the other way, else 0.
    arm: f64,
    score: f64,
    control: f64,
}

/// A fit: the effect and the factor.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Fit {
    /// The effect if the control is left alone.
    effect_alone: f64,
    effect: f64,
    factor: f64,
}

/// The control series of one trial.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Control {
    last: Option<Block>,
    differences: Vec<Difference>,
    /// Errors of predictions without and with the control.
    errors: Vec<(f64, f64)>,
    /// On − off differences of score and control of neighbours, each block in one of them.
    pairs: Vec<(f64, f64)>,
    /// The block that waits for a neighbour of the other arm.
    waits: Option<Block>,
    /// Sum and number of the control's values before it was first used.
    centre: (f64, u32),
    fit: Option<Fit>,
    used: f64,
    was_used: bool,
}

impl Control {
    /// The factor `β` in use; 0 while the control is of no use.
    pub fn factor(&self) -> f64 {
        self.used
    }

    /// Whether it was used for any block.
    pub fn was_used(&self) -> bool {
        self.was_used
    }

    /// Fixes the factor for the blocks to come, from past ones. Call it before a coin is tossed, and at no other time.
    pub fn fix(&mut self) {
        self.used = match self.fit {
            Some(fit) if self.helps() && !self.reacts() => fit.factor,
            _ => 0.0,
        };
    }

    /// The factor for the pairs that follow the trial. It is 0 where the control is of no use, or seems to react to the change.
    ///
    /// The trial's blocks fix the factor, so the sign-flip interval of `d − β Δx` is exact for any `β`. A factor from earlier
    /// pairs would not be fixed: their signs would move the sizes of later differences. So a factor that chance made costs
    /// width, and never coverage. The fit of all blocks needs to lower their spread by [`LOWERED_MIN`], and nothing more:
    /// large gains end trials before [`PREDICTED_MIN`]. On records of noisy memory (`homeostat-lab proof`) the interval
    /// becomes 11 to 15 % narrower. With the canary of another time it becomes 1 % wider.
    fn factor_after(&self) -> f64 {
        let Some(fit) = self.fit.filter(|_| self.reaction().is_some() && !self.reacts()) else {
            return 0.0;
        };
        let errors: Vec<(f64, f64)> = self.differences.iter().map(|d| fit.errors(d)).collect();
        match ratio(&errors) {
            Some(by) if by >= LOWERED_MIN => fit.factor,
            _ => 0.0,
        }
    }

    /// The factor for the pairs that follow, and their scale, given that of the trial: differences as measured need one as measured.
    pub fn after(&self, scale: f64) -> (f64, f64) {
        let factor = self.factor_after();
        if factor != 0.0 || !self.was_used {
            return (factor, scale);
        }
        let measured: Vec<f64> = self.pairs.iter().map(|p| p.0).collect();
        (factor, scale.max(variance(&measured).sqrt()))
    }

    /// What to subtract from the score of the running block, whose control is this.
    pub fn taken_out(&mut self, control: Option<f64>) -> f64 {
        let Some(control) = control.filter(|x| x.is_finite() && self.used != 0.0) else {
            return 0.0;
        };
        self.was_used = true;
        let (sum, count) = self.centre;
        self.used * (control - sum / f64::from(count.max(1)))
    }

    /// Takes a finished block: its score as measured, and its control. One that lacks either ends the row of neighbours.
    pub fn observe(&mut self, on: bool, score: f64, control: Option<f64>) {
        let block = control.map(|control| Block { on, score, control });
        let Some(block) = block.filter(|b| b.score.is_finite() && b.control.is_finite()) else {
            self.last = None;
            self.waits = None;
            return;
        };
        if !self.was_used {
            self.centre.0 += block.control;
            self.centre.1 = self.centre.1.saturating_add(1);
        }
        if let Some(before) = self.last.replace(block) {
            self.learn(Difference {
                arm: f64::from(u8::from(block.on)) - f64::from(u8::from(before.on)),
                score: block.score - before.score,
                control: block.control - before.control,
            });
        }
        match self.waits.take() {
            Some(before) if before.on != on => {
                let sign = if on { 1.0 } else { -1.0 };
                let pair = (
                    sign * (block.score - before.score),
                    sign * (block.control - before.control),
                );
                push(&mut self.pairs, pair, usize::MAX);
            }
            _ => self.waits = Some(block),
        }
    }

    fn learn(&mut self, new: Difference) {
        if let Some(fit) = self.fit {
            push(&mut self.errors, fit.errors(&new), RECENT);
        }
        push(&mut self.differences, new, RECENT);
        self.fit = Fit::of(&self.differences);
    }

    /// Whether the control would have made the errors smaller, by more than chance.
    fn helps(&self) -> bool {
        let cut = CUT * mad_sigma(&self.errors.iter().map(|e| e.0).collect::<Vec<_>>());
        let square = |error: f64| error.clamp(-cut, cut) * error.clamp(-cut, cut);
        let saved: Vec<f64> = self.errors.iter().map(|e| square(e.0) - square(e.1)).collect();
        let error = (variance(&saved) / saved.len().max(1) as f64).sqrt();
        mean(&saved) > LOWERED_ERRORS * error && self.lowered().is_some_and(|by| by >= LOWERED_MIN)
    }

    /// By which factor the control would have lowered the variance of past differences; `None` while too few are known.
    pub fn lowered(&self) -> Option<f64> {
        if self.errors.len() < PREDICTED_MIN {
            return None;
        }
        ratio(&self.errors)
    }

    /// Mean on − off difference of the scores as measured (log units); 0 without any.
    pub fn raw(&self) -> f64 {
        let scores: Vec<f64> = self.pairs.iter().map(|p| p.0).collect();
        if scores.is_empty() { 0.0 } else { mean(&scores) }
    }

    /// Mean on − off difference of the control (log units), and its standard error.
    pub fn reaction(&self) -> Option<(f64, f64)> {
        let controls: Vec<f64> = self.pairs.iter().map(|p| p.1).collect();
        if controls.len() < REACTION_MIN {
            return None;
        }
        let error = (variance(&controls) / controls.len() as f64).sqrt();
        Some((mean(&controls), error))
    }

    /// Whether the control seems to react to the change, by so much that the score would move.
    pub fn reacts(&self) -> bool {
        let Some((change, error)) = self.reaction() else {
            return false;
        };
        let factor = self.fit.map_or(0.0, |fit| fit.factor);
        let limit = student_t_limit(REACTION_LEVEL, self.pairs.len() as f64 - 1.0);
        change.abs() > limit * error && (factor * change).abs() >= REACTION_LEAST
    }

    /// Whether a gain may be accepted at this gate (log units): the scores as measured show it, and the control's own
    /// reaction explains at most a quarter of it. Without use of the control nothing more is asked.
    pub fn permits(&self, gate: f64) -> bool {
        const SHARE: f64 = 0.25;
        if !self.was_used {
            return true;
        }
        let factor = self.fit.map_or(0.0, |fit| fit.factor);
        let reaction = self.reaction().map_or(0.0, |(change, _)| (factor * change).abs());
        let raw = self.raw();
        let scores: Vec<f64> = self.pairs.iter().map(|p| p.0).collect();
        let error = (variance(&scores) / scores.len().max(1) as f64).sqrt();
        raw >= gate.max(RAW_ERRORS * error) && (!self.reacts() || reaction <= SHARE * raw)
    }
}

impl Fit {
    /// What a difference lacks of its prediction without and with the control.
    fn errors(&self, d: &Difference) -> (f64, f64) {
        let alone = d.score - self.effect_alone * d.arm;
        let with = d.score - self.effect * d.arm - self.factor * d.control;
        (alone, with)
    }

    /// Least squares with Huber's weights. `None` for too few differences, or a control that does not move.
    fn of(differences: &[Difference]) -> Option<Self> {
        if differences.len() < FIT_MIN {
            return None;
        }
        let moves: Vec<f64> = differences.iter().map(|d| d.control * d.control).collect();
        let ridge = RIDGE * moves.iter().sum::<f64>();
        if mean(&moves) < 1e-12 {
            return None;
        }
        let alone = Self::solve(differences, None);
        let with = Self::solve(differences, Some(ridge));
        Some(Self {
            effect_alone: alone.effect,
            ..with
        })
    }

    /// `ridge`: `None` leaves the control out.
    fn solve(differences: &[Difference], ridge: Option<f64>) -> Self {
        let mut fit = Self::default();
        for _ in 0..ROUNDS {
            let errors: Vec<f64> = differences
                .iter()
                .map(|d| d.score - fit.effect * d.arm - fit.factor * d.control)
                .collect();
            let sizes: Vec<f64> = errors.iter().map(|e| e.abs()).collect();
            let bound = (HUBER * 1.4826 * median(&sizes)).max(1e-9);
            let (mut aa, mut ac, mut cc, mut ay, mut cy) = (1e-9, 0.0, ridge.unwrap_or(1.0), 0.0, 0.0);
            for (d, size) in differences.iter().zip(&sizes) {
                let weight = 1.0 / (size / bound).max(1.0);
                let control = if ridge.is_some() { d.control } else { 0.0 };
                aa += weight * d.arm * d.arm;
                ac += weight * d.arm * control;
                cc += weight * control * control;
                ay += weight * d.arm * d.score;
                cy += weight * control * d.score;
            }
            let determinant = aa * cc - ac * ac;
            if determinant <= 0.0 {
                return Self::default();
            }
            fit.effect = (ay * cc - cy * ac) / determinant;
            fit.factor = ((cy * aa - ay * ac) / determinant).clamp(-FACTOR_MAX, FACTOR_MAX);
        }
        fit
    }
}

/// By which factor the second errors have a lower variance than the first, without their rare large ones.
fn ratio(errors: &[(f64, f64)]) -> Option<f64> {
    let cut = CUT * mad_sigma(&errors.iter().map(|e| e.0).collect::<Vec<_>>());
    let spread = |of: fn(&(f64, f64)) -> f64| {
        let squares: Vec<f64> = errors.iter().map(|e| of(e).clamp(-cut, cut).powi(2)).collect();
        mean(&squares)
    };
    let (before, after) = (spread(|e| e.0), spread(|e| e.1));
    (after > 0.0).then(|| before / after)
}

/// Appends to a list that keeps the last `most`.
fn push<T>(list: &mut Vec<T>, new: T, most: usize) {
    if list.len() >= most {
        list.remove(0);
    }
    list.push(new);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simulation::Random;
    use crate::{Arm, Decision, Trial, TrialParameters};

    /// Blocks of noise: a part that the control sees, and a part of the score's own.
    struct Noise {
        random: Random,
        shared: f64,
        own: f64,
        level: f64,
    }

    impl Noise {
        fn new(seed: u64, shared: f64, own: f64) -> Self {
            Self {
                random: Random::new(seed),
                shared,
                own,
                level: 0.0,
            }
        }

        /// Score and control of the next block.
        fn next(&mut self) -> (f64, f64) {
            self.level = 0.5 * self.level + self.shared * self.random.gaussian();
            let control = 16.0 + self.level + 0.2 * self.shared * self.random.gaussian();
            (self.level + self.own * self.random.gaussian(), control)
        }
    }

    /// Decision and blocks of a trial with an effect on the score, and a reaction of the control.
    fn run(
        noise: &mut Noise,
        coins: u64,
        effect: f64,
        reaction: f64,
        use_it: bool,
    ) -> (Decision, u32, Control) {
        let mut coins = Random::new(coins);
        let mut trial = Trial::new(TrialParameters {
            alpha: 0.02,
            scale_prior: 0.05,
            blocks_max: 600,
            ..TrialParameters::default()
        });
        let mut control = Control::default();
        loop {
            let coin = trial.needs_coin() && {
                control.fix();
                coins.coin()
            };
            let on = trial.next_arm(coin) == Arm::On;
            let (mut score, mut seen) = noise.next();
            if on {
                score += effect;
                seen += reaction;
            }
            let taken = if use_it {
                control.taken_out(Some(seen))
            } else {
                0.0
            };
            control.observe(on, score, Some(seen));
            let mut decision = trial.observe(score - taken);
            if decision == Decision::Benefit && !control.permits(0.01) {
                decision = trial.go_on();
            }
            if decision != Decision::Continue {
                return (decision, trial.estimate().blocks, control);
            }
        }
    }

    fn median_blocks(shared: f64, own: f64, effect: f64, use_it: bool) -> f64 {
        let blocks: Vec<f64> = (0..40)
            .map(|seed| {
                let (decision, blocks, _) = run(
                    &mut Noise::new(seed, shared, own),
                    seed + 900,
                    effect,
                    0.0,
                    use_it,
                );
                if decision == Decision::Benefit {
                    f64::from(blocks)
                } else {
                    600.0
                }
            })
            .collect();
        median(&blocks)
    }

    #[test]
    fn shared_noise_is_taken_out_and_a_gain_is_proven_sooner() {
        let (_, _, control) = run(&mut Noise::new(1, 0.05, 0.02), 2, 0.0, 0.0, true);
        assert!(control.lowered().unwrap() > 2.0, "{:?}", control.lowered());
        assert!(
            (0.6..1.2).contains(&control.fit.unwrap().factor),
            "{:?}",
            control.fit
        );
        let (with, without) = (
            median_blocks(0.05, 0.02, 0.03, true),
            median_blocks(0.05, 0.02, 0.03, false),
        );
        assert!(with * 1.5 < without, "{with} instead of {without} blocks");
    }

    #[test]
    fn a_control_that_sees_nothing_of_the_noise_is_not_used() {
        let mut used = 0;
        for seed in 0..100 {
            let mut noise = Noise::new(seed, 0.0, 0.05);
            // The control has noise of its own.
            let mut control = Control::default();
            let mut own = Random::new(seed + 5000);
            for block in 0..200 {
                control.fix();
                let (score, _) = noise.next();
                let seen = Some(0.05 * own.gaussian());
                control.taken_out(seen);
                control.observe(block % 2 == 0, score, seen);
            }
            used += u32::from(control.was_used());
        }
        assert!(used <= 5, "{used} of 100");
    }

    #[test]
    fn a_short_trial_fixes_a_factor_for_later_and_one_of_a_reacting_control_is_none() {
        let factor = |blocks: u32, own: f64, reaction: f64| -> Vec<f64> {
            let of = |seed: u64| {
                let (mut noise, mut coins) = (Noise::new(seed, 0.05, own), Random::new(seed + 60));
                let (mut control, mut first) = (Control::default(), false);
                for block in 0..blocks {
                    if block % 2 == 0 {
                        first = coins.coin();
                    }
                    let on = first == (block % 2 == 0);
                    let (score, seen) = noise.next();
                    control.observe(on, score, Some(seen + if on { reaction } else { 0.0 }));
                }
                control.factor_after()
            };
            (0..100).map(of).collect()
        };
        let used = |factors: Vec<f64>| factors.iter().filter(|f| **f != 0.0).count();
        let short = factor(12, 0.01, 0.0);
        assert!((0.6..1.2).contains(&median(&short)), "{}", median(&short));
        assert!(used(short) > 80);
        assert_eq!(used(factor(6, 0.01, 0.0)), 0, "too few pairs");
        assert!(used(factor(40, 0.01, 0.2)) < 5);
        assert!(used(factor(40, 0.5, 0.0)) < 20, "it sees little of the noise");
    }

    #[test]
    fn the_level_holds_whatever_the_control_does() {
        for (shared, own) in [(0.05, 0.02), (0.02, 0.05), (0.08, 0.005)] {
            let accepted = (0..500)
                .filter(|seed| {
                    run(&mut Noise::new(*seed, shared, own), seed + 77, 0.0, 0.0, true).0 == Decision::Benefit
                })
                .count();
            // 500 at a level of 0.02: 19 with three standard deviations.
            assert!(accepted <= 19, "{accepted} of 500 at {shared}, {own}");
        }
    }

    #[test]
    fn a_control_that_reacts_to_the_change_proves_nothing_by_that() {
        // The change does nothing for the program, and makes memory slower for others.
        let (mut accepted, mut told) = (0, 0);
        for seed in 0..200 {
            let (decision, _, control) = run(&mut Noise::new(seed, 0.05, 0.02), seed + 31, 0.0, -0.05, true);
            accepted += u32::from(decision == Decision::Benefit);
            told += u32::from(control.reaction().is_some_and(|(change, _)| change < 0.0));
        }
        assert!(accepted <= 4, "{accepted} of 200");
        assert!(told > 160, "{told} of 200");
    }

    #[test]
    fn blocks_without_a_number_are_left_out() {
        let mut control = Control::default();
        for block in 0..40u32 {
            let lost = block % 7 == 3;
            let x = f64::from(block % 5) * 0.01;
            control.fix();
            control.taken_out((!lost).then_some(x));
            control.observe(
                block % 2 == 0,
                if lost { f64::NAN } else { 2.0 * x },
                (!lost).then_some(x),
            );
        }
        assert!(control.raw().is_finite() && control.factor().is_finite());
        assert_eq!(Control::default().raw(), 0.0);
        assert!(Control::default().permits(0.01) && Control::default().lowered().is_none());
    }
}
