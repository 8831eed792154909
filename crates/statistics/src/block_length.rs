//! Chooses the length of a block, and checks whether the budget can prove anything. Short blocks pay the washout too
//! often; in long ones the load drifts between the arms. A noise model is only right if it fits. So the candidates are
//! tried on the passive history, where nothing was changed, and neighbouring blocks are compared. This costs nothing,
//! needs no model, and keeps the error level of the trial: the history is independent of the random assignment.

use crate::robust::{MAD_TO_SIGMA, ln, median, quantile};
use crate::switchback::{Design, TrialParameters};
use serde::{Deserialize, Serialize};
use std::fmt;

/// The history must cover this many pairs of a length before the length is considered.
const PAIRS_MIN: f64 = 2.0;
/// The measured part is at least this share of the washout, or most of the trial would be waiting and switching.
const MEASURED_SHARE: f64 = 0.5;
/// A block should hold this many counts of work: its logarithm then varies by 5 % for counting alone, and is hardly skewed.
const COUNTS_MIN: f64 = 400.0;
/// … but no block is longer than this for that: what counts seldom shows its noise in the history.
const COUNTS_FOR: f64 = 10.0;
/// At least this share of the placebo blocks must have a score.
const USABLE_MIN: f64 = 0.8;
/// Smaller differences are not believed: stakes on a smaller scale can lose everything on one block.
pub const SCALE_FLOOR: f64 = 0.002;
/// A trial starts only when the budget can prove an effect of this size (log units).
pub const PROVABLE_MAX: f64 = 0.16;
/// Pairs to prove an effect of one scale are this times ln(2/α) (fitted to the simulation).
const PAIRS_PER_NAT: f64 = 2.6;
/// Nine of ten normal numbers are at most this many standard deviations in size.
const NINE_OF_TEN: f64 = 1.645;
/// The circuit breaker looks at means of this length.
pub const BREAKER_SECONDS: f64 = 2.0;
const PLACEBOS_MAX: usize = 4096;

/// The length chosen, and what to expect of it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Choice {
    /// Measured part of a block (seconds).
    pub measured_s: f64,
    /// Prior scale: expected standard deviation of an on − off difference of two blocks (log units).
    pub scale: f64,
    /// The same with its rare large differences, which `scale` leaves out.
    pub spread: f64,
    /// Expected standard deviation of a mean over [`BREAKER_SECONDS`] (log units), for the circuit breaker.
    pub scale_breaker: f64,
    /// Pairs needed to prove a gain of `delta`.
    pub pairs: f64,
    /// Time for that (seconds); may exceed the budget, then only larger gains can be proven.
    pub predicted_s: f64,
    /// Smallest gain that can be proven within the budget (log units).
    pub provable: f64,
    /// Disjoint pairs in the history.
    pub history_pairs: f64,
}

/// Why nothing can be proven now.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "why", rename_all = "snake_case")]
pub enum Unmeasurable {
    /// Too little history.
    HistoryTooShort {
        /// Seconds there are.
        have_s: f64,
        /// Seconds needed for the shortest length.
        need_s: f64,
    },
    /// Too many blocks without any work.
    NoWork,
    /// Too noisy for the budget.
    TooNoisy {
        /// Best scale of a pair difference (log units).
        scale: f64,
        /// Smallest gain that could be proven within the budget (log units).
        provable: f64,
        /// Budget (seconds).
        budget_s: f64,
    },
    /// The budget does not even hold the fewest pairs that can decide.
    BudgetTooShort {
        /// Seconds needed at least.
        need_s: f64,
        /// Budget (seconds).
        budget_s: f64,
    },
    /// No usable candidate length, or an interval that is not positive.
    NoCandidate,
}

impl fmt::Display for Unmeasurable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::HistoryTooShort { have_s, need_s } => {
                write!(
                    f,
                    "only {have_s:.0} s of history, {need_s:.0} s are needed to choose a block length"
                )
            }
            Self::NoWork => f.write_str("too many intervals without any work"),
            Self::TooNoisy {
                scale,
                provable,
                budget_s,
            } => write!(
                f,
                "too noisy: neighbouring blocks differ by {:.1} %, so only gains above {:.0} % could be proven in {:.0} min",
                scale * 100.0,
                provable * 100.0,
                budget_s / 60.0
            ),
            Self::BudgetTooShort { need_s, budget_s } => {
                write!(
                    f,
                    "the budget of {budget_s:.0} s is too short: {need_s:.0} s are needed at least"
                )
            }
            Self::NoCandidate => f.write_str("no usable candidate for the block length"),
        }
    }
}

impl std::error::Error for Unmeasurable {}

/// Fewest contrasts that can reach the evidence 1/α: each at best doubles it. One more for an imperfect start.
pub fn contrasts_min(alpha: f64) -> f64 {
    (ln(1.0 / alpha.clamp(1e-12, 0.5)) / std::f64::consts::LN_2).ceil() + 1.0
}

/// Blocks that a design needs to prove an effect of `ratio` scales of a pair difference at the level `alpha`.
pub fn blocks_needed(design: Design, alpha: f64, ratio: f64) -> f64 {
    let weak = 2.0 * PAIRS_PER_NAT * ln(2.0 / alpha.clamp(1e-12, 0.5)) / (ratio * ratio);
    match design {
        Design::Paired => (2.0 * contrasts_min(alpha)).max(weak),
        Design::Blockwise | Design::Adaptive => (contrasts_min(alpha) + 1.0).max(weak),
    }
}

/// Passive history. The metric of a stretch is Σ work / Σ denominator: a ratio of sums, never a mean of ratios.
#[derive(Clone, Copy, Debug)]
pub struct Past<'a> {
    /// (work, denominator) per interval, oldest first.
    pub seconds: &'a [(f64, f64)],
    /// Length of one interval (seconds).
    pub interval: f64,
    /// A block has few readings: a rare event falls into few blocks instead of a little into each.
    pub few: bool,
}

/// What a switch costs (seconds).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Switch {
    /// Discarded at the start of a block.
    pub washout: f64,
    /// The program stands still for so long.
    pub standstill: f64,
}

impl Switch {
    /// A switch during which the program goes on.
    pub fn smooth(washout: f64) -> Self {
        Self {
            washout,
            standstill: 0.0,
        }
    }
}

/// Chooses the measured part of a block for a change with the expected `effect` (log units; 0 if unknown). Short blocks
/// suffice for a large effect. A wrong expectation affects the length of the trial, not its level. Times are seconds:
/// dear switches get longer blocks, too short `candidates` are skipped, `budget` is the longest trial.
///
/// # Errors
/// [`Unmeasurable`] says why no trial should start, in a sentence with numbers.
pub fn choose(
    effect: f64,
    past: Past<'_>,
    switch: Switch,
    candidates: &[f64],
    parameters: &TrialParameters,
    budget: f64,
) -> Result<Choice, Unmeasurable> {
    let Switch { washout, standstill } = switch;
    let Past {
        seconds,
        interval,
        few,
    } = past;
    let usable = |s: f64| s >= 0.0 && s.is_finite();
    if !(interval > 0.0 && interval.is_finite() && usable(washout) && usable(standstill)) {
        return Err(Unmeasurable::NoCandidate);
    }
    let known = if effect.is_finite() { effect } else { 0.0 };
    let expected = known.max(parameters.delta);
    let history = Prefix::new(seconds);
    let have_s = seconds.len() as f64 * interval;
    let for_counts = (COUNTS_MIN * have_s / history.work().max(1.0)).min(COUNTS_FOR);
    let lengths = lengths(candidates, interval, for_counts.max(MEASURED_SHARE * washout));
    let shortest = lengths.first().ok_or(Unmeasurable::NoCandidate)?;
    let need_s = PAIRS_MIN * 2.0 * (washout + shortest);
    if have_s < need_s {
        return Err(Unmeasurable::HistoryTooShort { have_s, need_s });
    }
    let scale_of = |measured| history.pair_scale(interval, washout, measured, few);
    let mut best: Option<(f64, f64, f64, f64, f64)> = None;
    for measured in lengths {
        let pairs = have_s / (2.0 * (washout + measured));
        let Some((scale, spread)) = (pairs >= PAIRS_MIN).then(|| scale_of(measured)).flatten() else {
            continue;
        };
        // Few pairs underestimate the spread, and the smallest of several estimates even more.
        let scale = (scale * (1.0 + 0.8 / pairs)).max(SCALE_FLOOR);
        let blocks = blocks_needed(parameters.design, parameters.alpha, expected / scale);
        let cost = blocks * (washout + measured + standstill);
        if best.as_ref().is_none_or(|b| cost < b.0) {
            best = Some((cost, blocks, measured, scale, spread.max(scale)));
        }
    }
    let Some((_, blocks, measured, scale, spread)) = best else {
        return Err(Unmeasurable::NoWork);
    };
    let block_s = washout + measured;
    let provable = provable(scale, block_s, parameters, budget)?;
    let of_breaker = scale_of(BREAKER_SECONDS.max(interval)).map_or(scale, |(usual, _)| usual);
    Ok(Choice {
        measured_s: measured,
        scale,
        spread,
        scale_breaker: of_breaker.max(SCALE_FLOOR) / std::f64::consts::SQRT_2,
        pairs: blocks / 2.0,
        predicted_s: blocks * block_s,
        provable,
        history_pairs: have_s / (2.0 * block_s),
    })
}

/// Smallest gain that blocks of this length can prove within the budget.
fn provable(
    scale: f64,
    block_s: f64,
    parameters: &TrialParameters,
    budget: f64,
) -> Result<f64, Unmeasurable> {
    let fewest = blocks_needed(parameters.design, parameters.alpha, f64::INFINITY) * block_s;
    if fewest > budget {
        return Err(Unmeasurable::BudgetTooShort {
            need_s: fewest,
            budget_s: budget,
        });
    }
    let affordable = (budget / block_s).min(f64::from(parameters.blocks_max)).max(1.0);
    let one_scale = 2.0 * PAIRS_PER_NAT * ln(2.0 / parameters.alpha.clamp(1e-12, 0.5));
    let provable = scale * (one_scale / affordable).sqrt();
    if provable > PROVABLE_MAX {
        return Err(Unmeasurable::TooNoisy {
            scale,
            provable,
            budget_s: budget,
        });
    }
    Ok(provable)
}

/// The usable lengths, the shortest first: those of at least `at_least` seconds, or else the longest.
fn lengths(candidates: &[f64], interval: f64, at_least: f64) -> Vec<f64> {
    let mut lengths: Vec<f64> = candidates
        .iter()
        .copied()
        .filter(|c| c.is_finite() && *c >= interval)
        .collect();
    lengths.sort_by(f64::total_cmp);
    let longest = lengths.last().copied().unwrap_or(0.0);
    lengths.retain(|c| *c >= at_least.min(longest));
    lengths
}

/// Prefix sums, so that any stretch costs one subtraction.
struct Prefix {
    /// (work, denominator, intervals without a number).
    sums: Vec<(f64, f64, u32)>,
}

impl Prefix {
    fn new(seconds: &[(f64, f64)]) -> Self {
        let mut sums = vec![(0.0, 0.0, 0u32)];
        let mut total = (0.0, 0.0, 0u32);
        for (work, denominator) in seconds {
            if work.is_finite() && denominator.is_finite() && *work >= 0.0 && *denominator >= 0.0 {
                total = (total.0 + work, total.1 + denominator, total.2);
            } else {
                total.2 += 1;
            }
            sums.push(total);
        }
        Self { sums }
    }

    /// Work in all.
    fn work(&self) -> f64 {
        self.sums.last().map_or(0.0, |(work, _, _)| *work)
    }

    /// ln(Σ work / Σ denominator) of `n` intervals from `from`.
    fn score(&self, from: usize, n: usize) -> Option<f64> {
        let (a, b) = (self.sums.get(from)?, self.sums.get(from + n)?);
        let (work, denominator) = (b.0 - a.0, b.1 - a.1);
        (work > 0.0 && denominator > 0.0 && b.2 == a.2).then(|| ln(work / denominator))
    }

    /// Standard deviation of differences of neighbouring placebo blocks: the usual one, from their median size, and that of
    /// all of them. Starts slide by one
    /// interval: more (dependent) pairs give a steadier median. The median misses an event in one block of seven. So
    /// for blocks with `few` readings the scale also covers the largest tenth of the differences. So it does where most
    /// blocks count the same.
    fn pair_scale(&self, interval: f64, washout: f64, measured: f64, few: bool) -> Option<(f64, f64)> {
        let skip = (washout / interval).round() as usize;
        let length = (measured / interval).round().max(1.0) as usize;
        let starts = (self.sums.len() - 1).checked_sub(2 * (skip + length))? + 1;
        let stride = starts.div_ceil(PLACEBOS_MAX).max(1);
        let mut differences = Vec::new();
        let mut tried = 0usize;
        for start in (0..starts).step_by(stride) {
            tried += 1;
            if let (Some(a), Some(b)) = (
                self.score(start + skip, length),
                self.score(start + 2 * skip + length, length),
            ) {
                differences.push((a - b).abs());
            }
        }
        let usable = differences.len() as f64 / tried as f64;
        (usable >= USABLE_MIN).then(|| {
            let squares: f64 = differences.iter().map(|d| d * d).sum();
            let spread = (squares / differences.len().max(1) as f64).sqrt();
            let usual = MAD_TO_SIGMA * median(&differences);
            if few || usual <= 0.0 {
                (usual.max(quantile(&differences, 0.9) / NINE_OF_TEN), spread)
            } else {
                (usual, spread)
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simulation::{Load, Random};

    const CANDIDATES: [f64; 6] = [3.0, 5.0, 10.0, 20.0, 40.0, 80.0];

    /// Nothing is known of the change.
    fn usual(
        seconds: &[(f64, f64)],
        interval: f64,
        washout: f64,
        candidates: &[f64],
        parameters: &TrialParameters,
        budget: f64,
    ) -> Result<Choice, Unmeasurable> {
        let past = Past {
            interval,
            ..past(seconds, false)
        };
        choose(0.0, past, Switch::smooth(washout), candidates, parameters, budget)
    }

    fn past(seconds: &[(f64, f64)], few: bool) -> Past<'_> {
        Past {
            seconds,
            interval: 1.0,
            few,
        }
    }

    #[test]
    fn what_is_seldom_is_in_the_scale_where_blocks_are_told_by_few_moments() {
        // Told by one moment in six seconds: every seventh or so it does half of its work.
        let mut random = Random::new(7);
        let mut seconds = Vec::new();
        for _ in 0..300 {
            let rate = if random.uniform() < 0.15 { 500.0 } else { 1000.0 };
            let rate = rate * (1.0 + 0.02 * (random.uniform() - 0.5));
            seconds.extend([(rate, 1.0); 6]);
        }
        let p = TrialParameters::default();
        let scale = |few| {
            choose(0.0, past(&seconds, few), Switch::smooth(9.0), &[10.0], &p, 1e9)
                .unwrap()
                .scale
        };
        // Of the mean of ten seconds: 2 moments of variance (ln 2)² · .15 · .85, roughly, and of a difference twice that.
        assert!(scale(false) < 0.1, "{}", scale(false));
        assert!(scale(true) > 0.2 && scale(true) < 0.5, "{}", scale(true));
    }

    fn history(load: Load, seconds: usize, seed: u64) -> Vec<(f64, f64)> {
        let mut random = Random::new(seed);
        let mut signal = load.start(&mut random);
        (0..seconds)
            .map(|_| (1000.0 * crate::robust::exp(signal.next(&mut random)), 1.0))
            .collect()
    }

    fn parameters() -> TrialParameters {
        TrialParameters {
            design: Design::Paired,
            ..TrialParameters::default()
        }
    }

    #[test]
    fn the_scale_of_white_noise_is_that_of_theory() {
        let seconds = history(Load::white(0.02), 1200, 1);
        let c = usual(&seconds, 1.0, 2.0, &[20.0], &parameters(), 3600.0).unwrap();
        let theory = 0.02 * (2.0f64 / 20.0).sqrt();
        assert!((c.scale / theory - 1.0).abs() < 0.25, "{} {theory}", c.scale);
        assert_eq!(c.measured_s, 20.0);
    }

    #[test]
    fn quiet_loads_get_short_blocks_and_noisy_ones_longer() {
        let quiet = usual(
            &history(Load::white(0.005), 1200, 2),
            1.0,
            2.0,
            &CANDIDATES,
            &parameters(),
            3600.0,
        );
        let noisy = usual(
            &history(Load::white(0.10), 1200, 3),
            1.0,
            2.0,
            &CANDIDATES,
            &parameters(),
            3600.0,
        );
        let (quiet, noisy) = (quiet.unwrap(), noisy.unwrap());
        assert!(
            quiet.measured_s <= 5.0 && noisy.measured_s >= 10.0,
            "{quiet:?} {noisy:?}"
        );
        assert!(quiet.predicted_s < noisy.predicted_s);
        assert!(quiet.provable < noisy.provable);
    }

    #[test]
    fn each_refusal_says_why() {
        let p = parameters();
        let steady = vec![(100.0, 1.0); 600];
        let steady = vec![(1000.0, 1.0); steady.len()];
        let short = usual(&steady[..15], 1.0, 2.0, &CANDIDATES, &p, 3600.0).unwrap_err();
        assert_eq!(
            short.to_string(),
            "only 15 s of history, 20 s are needed to choose a block length"
        );
        assert_eq!(
            usual(&[(0.0, 1.0); 600], 1.0, 2.0, &CANDIDATES, &p, 3600.0),
            Err(Unmeasurable::NoWork)
        );
        assert_eq!(
            usual(&[(f64::NAN, 1.0); 600], 1.0, 2.0, &CANDIDATES, &p, 3600.0),
            Err(Unmeasurable::NoWork)
        );
        let wild = history(Load::white(2.0), 600, 4);
        let noisy = usual(&wild, 1.0, 2.0, &CANDIDATES, &p, 3600.0).unwrap_err();
        assert!(matches!(noisy, Unmeasurable::TooNoisy { .. }), "{noisy:?}");
        let hasty = usual(&steady, 1.0, 2.0, &CANDIDATES, &p, 10.0).unwrap_err();
        assert!(matches!(hasty, Unmeasurable::BudgetTooShort { .. }), "{hasty:?}");
        assert_eq!(
            usual(&steady, 1.0, 2.0, &[], &p, 3600.0),
            Err(Unmeasurable::NoCandidate)
        );
        assert_eq!(
            usual(&steady, 0.0, 2.0, &CANDIDATES, &p, 3600.0),
            Err(Unmeasurable::NoCandidate)
        );
        assert_eq!(
            usual(&steady, 1.0, f64::NAN, &CANDIDATES, &p, 3600.0),
            Err(Unmeasurable::NoCandidate)
        );
    }

    #[test]
    fn a_constant_history_is_not_believed_to_be_noiseless() {
        let c = usual(&[(100.0, 1.0); 600], 1.0, 2.0, &CANDIDATES, &parameters(), 3600.0).unwrap();
        assert_eq!(c.scale, SCALE_FLOOR);
    }

    #[test]
    fn no_block_is_shorter_than_half_of_the_washout() {
        let seconds = history(Load::white(0.01), 1200, 5);
        let c = usual(&seconds, 1.0, 30.0, &CANDIDATES, &parameters(), 3600.0).unwrap();
        assert!(c.measured_s >= 15.0);
        let only_short = usual(&seconds, 1.0, 30.0, &[5.0, 10.0], &parameters(), 3600.0).unwrap();
        assert_eq!(only_short.measured_s, 10.0);
    }

    #[test]
    fn what_is_expected_to_be_large_gets_short_blocks() {
        let seconds = history(Load::white(0.05), 1200, 11);
        let p = parameters();
        let usual = usual(&seconds, 1.0, 6.0, &CANDIDATES, &p, 3600.0).unwrap();
        let of = |effect| {
            choose(
                effect,
                past(&seconds, false),
                Switch::smooth(6.0),
                &CANDIDATES,
                &p,
                3600.0,
            )
        };
        let large = of(0.3).unwrap();
        assert!(large.measured_s < usual.measured_s, "{large:?} {usual:?}");
        assert_eq!(large.measured_s, 3.0, "half of the washout suffices");
        assert_eq!(of(f64::NAN).unwrap(), usual);
    }

    #[test]
    fn a_dear_switch_gets_longer_blocks() {
        let seconds = history(Load::white(0.02), 1200, 12);
        let p = parameters();
        let of = |standstill| {
            let past = past(&seconds, false);
            let switch = Switch {
                washout: 1.0,
                standstill,
            };
            choose(0.0, past, switch, &CANDIDATES, &p, 3600.0).unwrap()
        };
        let (free, dear) = (of(0.0), of(10.0));
        assert!(dear.measured_s > free.measured_s, "{dear:?} {free:?}");
        assert!(of(0.1).measured_s <= dear.measured_s);
    }

    #[test]
    fn few_counts_a_second_get_blocks_with_enough_of_them() {
        // Quiet, so that the noise asks for the shortest block.
        let of = |rate: f64| {
            usual(
                &vec![(rate, 1.0); 600],
                1.0,
                0.5,
                &CANDIDATES,
                &parameters(),
                3600.0,
            )
        };
        assert_eq!(of(1e6).unwrap().measured_s, 3.0);
        assert_eq!(of(50.0).unwrap().measured_s, 10.0);
        assert_eq!(of(1.0).unwrap().measured_s, 10.0, "no length has enough");
    }

    #[test]
    fn a_median_of_nothing_is_not_believed() {
        // Most blocks count the same, some one more.
        let mut random = Random::new(13);
        let seconds: Vec<(f64, f64)> = (0..600)
            .map(|_| (if random.uniform() < 0.1 { 600.0 } else { 500.0 }, 1.0))
            .collect();
        let c = usual(&seconds, 1.0, 1.0, &[1.0], &parameters(), 3600.0).unwrap();
        assert!(c.scale > 0.09, "{}", c.scale);
    }
}
