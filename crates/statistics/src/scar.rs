//! Does undoing a change leave a scar that looks like a gain?
//!
//! A trial compares on blocks with off blocks. If the undo itself slows the program for a while (cold caches, split
//! pages), off blocks look bad and a useless change looks like a gain. Longer washouts tell: a scar fades, a gain stays.
//! So the probe pairs right after the acceptance have the washout of the trial, and those that follow a longer one.
//!
//! Both questions are answered by e-values like those of the trial, valid at any moment and for any noise:
//!
//! * **Clear**: the gain of the long pairs is above zero.
//! * **Scar**: the gain of the long pairs is less than half of that of the short pairs. The centre of `long − short / 2`
//!   is negative then; pairs are matched in order of arrival.
//!
//! A scar that outlasts the long washout and the block after it looks the same in both kinds, and is not found here.
//! All differences are on − off in log units.

use crate::guard::usable_scale;
use crate::robust::{ln, ln_mean_exp, one_plus_tanh};
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;

/// The long washout is at least this many times the short one.
pub const LONG: f64 = 4.0;
/// Each of the two tests errs with at most this probability, ever.
pub const LEVEL: f64 = 0.01;
/// Effects on which the bets are tuned (log units), as in the trial.
const TARGETS: [f64; 5] = [0.01, 0.02, 0.05, 0.10, 0.20];
/// Scales that are thought possible, as multiples of the given one.
const MULTIPLES: [f64; 3] = [0.5, 1.0, 2.0];
/// Largest stake: this many times 1/scale.
const STAKE_CAP: f64 = 4.0;
/// Outcomes are cut at this many scales, so one outlier cannot decide.
const OUTCOME_SCALES_MAX: f64 = 6.0;
/// Never staked, so that one pair cannot lose everything.
const UNSTAKED: f64 = 0.01;
/// A broken on block counts as a loss of this many scales.
const WORST_SCALES: f64 = 8.0;
/// Standard deviation of `long − short / 2`, relative to that of a pair.
const MATCHED_SCALE: f64 = 1.118_033_988_749_895;
/// Unmatched pairs that are remembered; a fair coin rarely leads by more than a few dozen.
const WAITING_MAX: usize = 256;

/// What the pairs say so far.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ScarState {
    /// More pairs are needed.
    Open,
    /// The gain is proven with the long washout too.
    Clear,
    /// The gain shrinks to less than half with the long washout: the change must go.
    Scar,
}

/// Logarithms of the products of bets that a symmetric difference lies above zero: one for each target and scale.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Bets {
    scale: f64,
    wealth: [[f64; TARGETS.len()]; MULTIPLES.len()],
}

impl Bets {
    fn new(scale: f64) -> Self {
        Self {
            scale,
            wealth: [[0.0; TARGETS.len()]; MULTIPLES.len()],
        }
    }

    fn bet(&mut self, outcome: f64) {
        for (row, multiple) in self.wealth.iter_mut().zip(MULTIPLES) {
            let scale = self.scale * multiple;
            let worst = OUTCOME_SCALES_MAX * scale;
            let outcome = outcome.clamp(-worst, worst);
            for (wealth, target) in row.iter_mut().zip(TARGETS) {
                let stake = (target / (scale * scale)).min(STAKE_CAP / scale);
                *wealth += ln(UNSTAKED + (1.0 - UNSTAKED) * one_plus_tanh(stake * outcome));
            }
        }
    }

    fn ln_e(&self) -> f64 {
        ln_mean_exp(self.wealth.as_flattened())
    }

    fn has_proven(&self) -> bool {
        self.ln_e() >= -ln(LEVEL)
    }
}

/// The scar test of a change in force.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Scar {
    scale: f64,
    long: Bets,
    fading: Bets,
    /// Differences that wait for a partner, and whether they are of long pairs.
    waiting: VecDeque<f64>,
    waiting_long: bool,
    pairs: u32,
    state: ScarState,
}

impl Scar {
    /// `scale`: standard deviation of a pair's difference at acceptance (log units). It sets the stakes: a wrong scale
    /// costs pairs, never validity.
    pub fn new(scale: f64) -> Self {
        let scale = usable_scale(scale);
        Self {
            scale,
            long: Bets::new(scale),
            fading: Bets::new(scale * MATCHED_SCALE),
            waiting: VecDeque::new(),
            waiting_long: false,
            pairs: 0,
            state: ScarState::Open,
        }
    }

    /// Takes the difference of a pair whose order a fair coin decided. Whether its washout `is_long` must not depend on that
    /// coin.
    ///
    /// −∞ (a broken on block) counts as a loss of eight scales. Other differences that are no numbers teach nothing.
    /// A scar is final. A clear change may still be found to have one.
    pub fn observe(&mut self, difference: f64, is_long: bool) -> ScarState {
        self.pairs = self.pairs.saturating_add(1);
        let difference = if difference == f64::NEG_INFINITY {
            -WORST_SCALES * self.scale
        } else {
            difference
        };
        if self.state == ScarState::Scar || !difference.is_finite() {
            return self.state;
        }
        if is_long {
            self.long.bet(difference);
        }
        self.match_up(difference, is_long);
        if self.fading.has_proven() {
            self.state = ScarState::Scar;
        } else if self.long.has_proven() {
            self.state = ScarState::Clear;
        }
        self.state
    }

    /// Bets on a long and a short pair together. Which pairs meet does not depend on the coins of their order.
    fn match_up(&mut self, difference: f64, is_long: bool) {
        if self.waiting.is_empty() || self.waiting_long == is_long {
            self.waiting_long = is_long;
            if self.waiting.len() < WAITING_MAX {
                self.waiting.push_back(difference);
            }
        } else if let Some(other) = self.waiting.pop_front() {
            let (long, short) = if is_long {
                (difference, other)
            } else {
                (other, difference)
            };
            self.fading.bet(short / 2.0 - long);
        }
    }

    /// The present state.
    pub fn state(&self) -> ScarState {
        self.state
    }

    /// Pairs seen.
    pub fn pairs(&self) -> u32 {
        self.pairs
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::robust::exp;
    use crate::simulation::Random;

    /// Pairs until the state is not open, and that state.
    fn run(seed: u64, short: f64, long: f64, noise: fn(&mut Random) -> f64) -> (u32, ScarState) {
        let mut random = Random::new(seed);
        let mut scar = Scar::new(0.05);
        for _ in 0..400 {
            let is_long = random.coin();
            let effect = if is_long { long } else { short };
            let state = scar.observe(effect + 0.05 * noise(&mut random), is_long);
            if state != ScarState::Open {
                break;
            }
        }
        (scar.pairs(), scar.state())
    }

    fn shares(short: f64, long: f64, noise: fn(&mut Random) -> f64) -> (f64, f64) {
        let (mut clear, mut scars) = (0.0, 0.0);
        for seed in 0..1000 {
            match run(seed, short, long, noise).1 {
                ScarState::Clear => clear += 0.001,
                ScarState::Scar => scars += 0.001,
                ScarState::Open => {}
            }
        }
        (clear, scars)
    }

    #[test]
    fn bets_are_fair_over_all_coins() {
        let sizes = [0.01, 0.3, 0.002, 0.07, 5.0, 0.04, 0.11, 0.0, 0.06, 0.5];
        let total: f64 = (0..1u32 << sizes.len())
            .map(|coins| {
                let mut bets = Bets::new(0.05);
                for (i, size) in sizes.iter().enumerate() {
                    bets.bet(if coins >> i & 1 == 1 { *size } else { -size });
                }
                exp(bets.ln_e())
            })
            .sum();
        assert!((total / f64::from(1u32 << sizes.len()) - 1.0).abs() < 1e-9);
    }

    #[test]
    fn errors_are_as_rare_as_the_level() {
        for noise in [
            (|r| r.gaussian()) as fn(&mut Random) -> f64,
            |r| r.heavy(),
            |r| if r.coin() { 1.0 } else { -1.0 },
        ] {
            // A gain that is gone with the long washout is not proven; one of exactly half is no scar.
            let (clear, _) = shares(0.1, 0.0, noise);
            assert!(clear <= LEVEL + 0.01, "{clear}");
            let (_, scars) = shares(0.1, 0.05, noise);
            assert!(scars <= LEVEL + 0.01, "{scars}");
        }
    }

    #[test]
    fn a_gain_is_cleared_and_a_scar_is_found() {
        let (clear, scars) = shares(0.15, 0.15, |r| r.gaussian());
        assert!(clear > 0.99 && scars < 0.005, "{clear} {scars}");
        let (clear, scars) = shares(0.1, 0.0, |r| r.gaussian());
        assert!(scars > 0.9 && clear < 0.02, "{clear} {scars}");
    }

    #[test]
    fn a_scar_is_final_and_numbers_that_are_none_teach_nothing() {
        let mut scar = Scar::new(f64::NAN);
        for i in 0..100 {
            assert_eq!(scar.observe(f64::NAN, i % 2 == 0), ScarState::Open);
        }
        for i in 0..60 {
            scar.observe(if i % 2 == 0 { -0.2 } else { 0.2 }, i % 2 == 0);
        }
        assert_eq!(scar.state(), ScarState::Scar);
        assert_eq!(scar.observe(9.0, true), ScarState::Scar);
        let mut broken = Scar::new(0.05);
        for i in 0..60 {
            broken.observe(if i % 2 == 0 { f64::NEG_INFINITY } else { 0.1 }, i % 2 == 0);
        }
        assert_eq!(broken.state(), ScarState::Scar);
    }

    #[test]
    fn memory_is_bounded_and_the_state_survives_writing_down() {
        let mut scar = Scar::new(0.05);
        for _ in 0..1000 {
            scar.observe(0.001, false);
        }
        assert_eq!(scar.waiting.len(), WAITING_MAX);
        let text = serde_json::to_string(&scar).unwrap();
        assert_eq!(serde_json::from_str::<Scar>(&text).unwrap(), scar);
    }
}
