//! Compares two samples by their means (Welch) and by their trimmed means (K. K. Yuen, "The two-sample trimmed t for
//! unequal population variances", Biometrika 61, 1974).
//!
//! One misread block moves a mean little but its standard error much, so five equal losses of half may prove nothing to
//! Welch. Yuen trims a fifth of the values at either end and uses the winsorized variance. It has less power on clean
//! data: five blocks each leave three. It then sees a loss of four standard deviations half of the time, Welch nearly
//! always. Scores that jump between two states may leave no spread: 4 % false alarms instead of 0.1 % over twelve
//! checks. So [`fall`] uses both. Neither sees a loss in one block of five.

use crate::robust::{mean, student_t_limit, variance};

const TRIMMED: f64 = 0.2;

/// One sample minus another.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Comparison {
    /// Difference of the trimmed means.
    pub change: f64,
    /// Its standard error.
    pub error: f64,
    /// Degrees of freedom of the t distribution of change / error under no difference.
    pub freedom: f64,
}

struct Trimmed {
    mean: f64,
    squared_error: f64,
    left: f64,
}

impl Trimmed {
    /// `share`: trimmed at either end. `None` for fewer than two values, or one that is no number.
    fn of(xs: &[f64], share: f64) -> Option<Self> {
        if xs.len() < 2 || xs.iter().any(|x| !x.is_finite()) {
            return None;
        }
        let mut sorted = xs.to_vec();
        sorted.sort_by(f64::total_cmp);
        let count = sorted.len();
        let aside = (share * count as f64).floor() as usize;
        let middle = sorted.get(aside..count - aside)?;
        let (low, high) = (*middle.first()?, *middle.last()?);
        let winsorized: Vec<f64> = sorted.iter().map(|x| x.clamp(low, high)).collect();
        let left = middle.len() as f64;
        Some(Self {
            mean: mean(middle),
            squared_error: (count - 1) as f64 * variance(&winsorized) / (left * (left - 1.0)),
            left,
        })
    }
}

impl Comparison {
    /// Whether `a` is at least `fall` below `b`, proven at this level (one-sided), with at least the error `error_min`.
    pub fn fell(&self, fall: f64, level: f64, error_min: f64) -> bool {
        let limit = student_t_limit(level, self.freedom);
        self.change <= -fall && self.change <= -limit * self.error.max(error_min)
    }
}

impl Comparison {
    /// Whether the change is at least `rise`, proven at this level (one-sided), with at least the error `error_min`.
    pub fn rose(&self, rise: f64, level: f64, error_min: f64) -> bool {
        let down = Self {
            change: -self.change,
            ..*self
        };
        down.fell(rise, level, error_min)
    }
}

/// Compares means, `a` − `b`. `None` if a sample has fewer than two values or one that is no number.
pub fn welch(a: &[f64], b: &[f64]) -> Option<Comparison> {
    compare(a, b, 0.0)
}

/// The same by their trimmed means. With fewer than five values each it is the same.
pub fn yuen(a: &[f64], b: &[f64]) -> Option<Comparison> {
    compare(a, b, TRIMMED)
}

/// The proof required of the two comparisons.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Proof {
    /// One final check: either proves it at half the level.
    Either,
    /// One of many checks: both must prove it.
    Both,
}

/// The change, if `a` fell below `b` by at least `fall`, proven at this level (one-sided, 1e-9 to 0.5). It is that of
/// the comparison that proves it, the smaller fall if both do.
pub fn fall(a: &[f64], b: &[f64], fall: f64, level: f64, error_min: f64, proof: Proof) -> Option<f64> {
    let (welch, yuen) = (welch(a, b)?, yuen(a, b)?);
    let level = match proof {
        Proof::Either => level / 2.0,
        Proof::Both => level,
    };
    let fell = (
        welch.fell(fall, level, error_min),
        yuen.fell(fall, level, error_min),
    );
    match (fell, proof) {
        ((true, true), _) => Some(welch.change.max(yuen.change)),
        ((true, false), Proof::Either) => Some(welch.change),
        ((false, true), Proof::Either) => Some(yuen.change),
        _ => None,
    }
}

fn compare(a: &[f64], b: &[f64], share: f64) -> Option<Comparison> {
    let (a, b) = (Trimmed::of(a, share)?, Trimmed::of(b, share)?);
    let sum = a.squared_error + b.squared_error;
    let spread = a.squared_error * a.squared_error / (a.left - 1.0)
        + b.squared_error * b.squared_error / (b.left - 1.0);
    Some(Comparison {
        change: a.mean - b.mean,
        error: sum.sqrt(),
        freedom: if spread > 0.0 {
            sum * sum / spread
        } else {
            a.left + b.left - 2.0
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simulation::Random;

    const ERROR_MIN: f64 = 0.002;

    #[test]
    fn of_few_values_it_is_welch_s() {
        let (x, y) = ([1.0, 2.0, 3.0], [2.0, 4.0, 6.0, 8.0]);
        let c = yuen(&x, &y).unwrap();
        assert_eq!(Some(c), welch(&x, &y));
        assert_eq!(c.change, -3.0);
        let (a, b): (f64, f64) = (1.0 / 3.0, 20.0 / 3.0 / 4.0);
        assert!((c.error - (a + b).sqrt()).abs() < 1e-12);
        assert!((c.freedom - (a + b) * (a + b) / (a * a / 2.0 + b * b / 3.0)).abs() < 1e-9);
    }

    #[test]
    fn nothing_is_said_of_one_value_or_of_none_that_is_a_number() {
        for f in [welch, yuen] {
            assert_eq!(f(&[1.0], &[1.0, 2.0]), None);
            assert_eq!(f(&[1.0, f64::NAN, 2.0], &[1.0, 2.0]), None);
            assert_eq!(f(&[1.0, f64::INFINITY], &[1.0, 2.0]), None);
        }
    }

    /// Seen on a simulated machine: a neighbour lost half of its work in a trial of eleven blocks, of which one was misread.
    #[test]
    fn one_strange_block_does_not_hide_that_half_was_lost() {
        let on = [6.195, 6.234, 6.140, 6.168, 6.178, 6.211];
        let off = [6.819, 6.835, 6.786, 6.131, 6.803];
        let level = 0.05 / 5.0;
        let found = fall(&on, &off, 0.03, level, ERROR_MIN, Proof::Either).unwrap();
        assert!((-0.65..-0.58).contains(&found), "{found}");
        assert!(!welch(&on, &off).unwrap().fell(0.03, level / 2.0, ERROR_MIN));
    }

    /// How often samples of so many values show a fall of 3 % and more.
    fn shown(
        count: (usize, usize),
        level: f64,
        proof: Proof,
        mut noise: impl FnMut(&mut Random, bool) -> f64,
    ) -> f64 {
        const RUNS: usize = 10_000;
        let mut random = Random::new(17);
        let mut found = 0;
        for _ in 0..RUNS {
            let a: Vec<f64> = (0..count.0).map(|_| noise(&mut random, true)).collect();
            let b: Vec<f64> = (0..count.1).map(|_| noise(&mut random, false)).collect();
            found += usize::from(fall(&a, &b, 0.03, level, ERROR_MIN, proof).is_some());
        }
        found as f64 / RUNS as f64
    }

    #[test]
    fn nothing_is_rarely_taken_for_a_fall() {
        for count in [(3, 3), (4, 6), (5, 5), (6, 5), (8, 7), (10, 10), (20, 18)] {
            for proof in [Proof::Either, Proof::Both] {
                let normal = shown(count, 0.01, proof, |r, _| r.gaussian());
                assert!(normal < 0.015, "{count:?} {proof:?}: {normal}");
                let heavy = shown(count, 0.01, proof, |r, _| r.heavy());
                assert!(heavy < 0.015, "heavy {count:?} {proof:?}: {heavy}");
            }
        }
    }

    /// A program that does half of its work in half of the blocks, whatever is on.
    #[test]
    fn two_states_are_not_taken_for_a_fall_at_an_early_look() {
        let states = |r: &mut Random, _| if r.coin() { 0.0 } else { -0.69 } + 0.01 * r.gaussian();
        for count in [(3, 3), (4, 4), (5, 5), (6, 6), (7, 5)] {
            let early = shown(count, 0.001, Proof::Both, states);
            assert!(early < 0.02, "{count:?}: {early}");
        }
    }

    #[test]
    fn a_clear_loss_is_seen_with_few_blocks() {
        let lost = |r: &mut Random, on: bool| 0.03 * r.gaussian() - if on { 0.12 } else { 0.0 };
        let seen = shown((5, 5), 0.05 / 17.0, Proof::Either, lost);
        assert!(seen > 0.8, "{seen}");
    }
}
