//! How long a block must be, and whether anything can be proven within the budget.
//!
//! No model of the noise is trusted: for each candidate length the passive history is cut into placebo pairs, and the
//! robust spread of their differences says how many pairs a useful effect needs. Choosing from the history is free (no
//! action is taken) and keeps the error of the test, since the coins come later.

use crate::robust::{ln, mad_sigma, median};
use crate::switchback::TrialParameters;

/// Least pairs that an experiment is planned for, whatever the noise.
const PAIRS_MIN: f64 = 6.0;
/// Pairs needed are this times ln(2 / level) × (spread / effect)².
const PAIRS_PER_EVIDENCE: f64 = 2.6;
/// Level for which is planned; the actual one may be stricter.
const PLANNED_LEVEL: f64 = 0.01;
/// Placebo differences needed before a candidate is believed.
const DIFFERENCES_MIN: usize = 6;
/// A spread below this is not believed; it would make the bets reckless.
const SCALE_MIN: f64 = 1e-3;
/// An effect this many times the useful one is the least that is tested for when noise forbids more.
const EFFECT_STEPS: [f64; 4] = [1.0, 2.0, 4.0, 8.0];

/// What was chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Choice {
    /// Length of the measured part of a block, seconds.
    pub measured_s: f64,
    /// Robust standard deviation of a placebo pair difference at that length.
    pub scale: f64,
    /// The same for means over about five seconds (for the circuit breaker).
    pub scale_5s: f64,
    /// Pairs expected to be needed.
    pub pairs: f64,
    /// Seconds expected to be needed.
    pub seconds: f64,
    /// Smallest effect that can be expected to be proven within the budget.
    pub effect: f64,
}

/// Why nothing can be proven now.
#[derive(Clone, Debug, PartialEq)]
pub enum Unmeasurable {
    /// Too little history.
    History {
        /// Seconds there are.
        seconds: f64,
    },
    /// Too noisy.
    Noise {
        /// Best spread of a pair difference.
        scale: f64,
        /// Seconds it would take.
        seconds: f64,
    },
}

impl std::fmt::Display for Unmeasurable {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::History { seconds } => write!(f, "only {seconds:.0} s of usable history"),
            Self::Noise { scale, seconds } => write!(
                f,
                "too noisy to prove anything now: pairs of blocks differ by {:.0} % by chance, a verdict would take {:.0} min",
                scale * 100.0,
                seconds / 60.0
            ),
        }
    }
}

/// Chooses the length of blocks from `history`: per interval of `interval_s` seconds the work and its denominator
/// (seconds or CPU seconds), in order.
///
/// # Errors
/// Nothing can be proven: too little history, or too noisy for the budget.
pub fn choose(
    history: &[(f64, f64)],
    interval_s: f64,
    washout_s: f64,
    candidates_s: &[u32],
    parameters: &TrialParameters,
    budget_s: f64,
) -> Result<Choice, Unmeasurable> {
    let interval = interval_s.max(1e-3);
    let scale_5s = mad_sigma(&differences(history, steps(5.0, interval), 0)).max(SCALE_MIN);
    let mut best: Option<Choice> = None;
    let mut longest_usable = false;
    for effect in EFFECT_STEPS.map(|k| k * parameters.delta) {
        for candidate in candidates_s {
            let measured = f64::from(*candidate);
            let found = differences(history, steps(measured, interval), steps(washout_s, interval));
            if found.len() < DIFFERENCES_MIN {
                continue;
            }
            longest_usable = true;
            let scale = (1.4826 * median(&found.iter().map(|d| d.abs()).collect::<Vec<_>>())).max(SCALE_MIN);
            let needed = PAIRS_PER_EVIDENCE * -ln(PLANNED_LEVEL / 2.0) * (scale / effect) * (scale / effect);
            let pairs = needed.max(PAIRS_MIN);
            let seconds = pairs * 2.0 * (washout_s + measured);
            if best.is_none_or(|b| seconds < b.seconds) {
                best = Some(Choice { measured_s: measured, scale, scale_5s, pairs, seconds, effect });
            }
        }
        if let Some(choice) = best
            && choice.seconds <= budget_s
        {
            return Ok(choice);
        }
        if effect < parameters.delta * EFFECT_STEPS[EFFECT_STEPS.len() - 1] {
            // Try for a larger effect; keep nothing that does not fit the budget.
            best = None;
        }
    }
    match best {
        Some(b) => Err(Unmeasurable::Noise { scale: b.scale, seconds: b.seconds }),
        None if longest_usable => Err(Unmeasurable::Noise { scale: f64::NAN, seconds: f64::INFINITY }),
        None => Err(Unmeasurable::History { seconds: history.len() as f64 * interval }),
    }
}

fn steps(seconds: f64, interval: f64) -> usize {
    ((seconds / interval).round() as usize).max(usize::from(seconds > 0.0))
}

/// Differences of scores of neighbouring blocks of `measured` intervals, a gap of `washout` before each, from every
/// possible start a block apart and half a block apart (overlapping pairs use short histories better).
fn differences(history: &[(f64, f64)], measured: usize, washout: usize) -> Vec<f64> {
    let block = measured + washout;
    let hop = (block / 2).max(1);
    let mut found = Vec::new();
    let mut start = 0;
    while start + 2 * block <= history.len() {
        let score = |from: usize| {
            let part = &history[from + washout..from + block];
            let work: f64 = part.iter().map(|h| h.0).sum();
            let denominator: f64 = part.iter().map(|h| h.1).sum();
            (work > 0.0 && denominator > 0.0).then(|| ln(work / denominator))
        };
        if let (Some(a), Some(b)) = (score(start), score(start + block)) {
            found.push(a - b);
        }
        start += hop;
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn noise(n: usize, sd: f64) -> Vec<(f64, f64)> {
        let mut x = 88_172_645_463_325_252u64;
        (0..n)
            .map(|_| {
                let mut sum = 0.0;
                for _ in 0..12 {
                    x ^= x << 13;
                    x ^= x >> 7;
                    x ^= x << 17;
                    sum += (x >> 11) as f64 / (1u64 << 53) as f64;
                }
                (1000.0 * crate::robust::exp(sd * (sum - 6.0)), 1.0)
            })
            .collect()
    }

    #[test]
    fn quiet_loads_get_short_blocks_and_noisy_ones_longer_or_a_refusal() {
        let p = TrialParameters::default();
        let c = [4, 6, 10, 20, 40];
        let quiet = choose(&noise(120, 0.005), 1.0, 2.0, &c, &p, 3600.0).unwrap();
        assert_eq!(quiet.measured_s, 4.0);
        let noisy = choose(&noise(1200, 0.10), 1.0, 2.0, &c, &p, 3600.0).unwrap();
        assert!(noisy.seconds > 3.0 * quiet.seconds && noisy.measured_s >= quiet.measured_s, "{noisy:?}");
        let hopeless = choose(&noise(600, 3.0), 1.0, 2.0, &c, &p, 600.0);
        assert!(matches!(hopeless, Err(Unmeasurable::Noise { .. })), "{hopeless:?}");
        assert!(matches!(choose(&noise(10, 0.1), 1.0, 2.0, &c, &p, 600.0), Err(Unmeasurable::History { .. })));
    }
}
