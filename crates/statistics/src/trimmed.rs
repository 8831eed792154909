//! Two samples compared by their trimmed means (K. K. Yuen, "The two-sample trimmed t for unequal population variances",
//! Biometrika 61, 1974): Welch's comparison that one strange value in five does not spoil.
//!
//! A single block that was read wrongly moves a mean by little and its standard error by much: five blocks that all show
//! the same loss of half then prove nothing. A fifth of the values at either end is set aside; what their spread says of
//! the others is taken from the winsorized variance. With fewer than five values nothing is set aside, and it is Welch's.

use crate::robust::{mean, variance};

/// Share of the values that is set aside at either end.
const TRIMMED: f64 = 0.2;

/// One sample minus another.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Comparison {
    /// Difference of the trimmed means.
    pub change: f64,
    /// Its standard error.
    pub error: f64,
    /// Degrees of freedom of the t distribution that change / error follows if there is no difference.
    pub freedom: f64,
}

/// A sample as it is compared.
struct Trimmed {
    mean: f64,
    /// Squared standard error of that.
    squared_error: f64,
    /// Values that are left.
    left: f64,
}

impl Trimmed {
    /// `None` for fewer than two values, or where one is no number.
    fn of(xs: &[f64]) -> Option<Self> {
        if xs.len() < 2 || xs.iter().any(|x| !x.is_finite()) {
            return None;
        }
        let mut sorted = xs.to_vec();
        sorted.sort_by(f64::total_cmp);
        let count = sorted.len();
        let aside = (TRIMMED * count as f64).floor() as usize;
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

/// Compares two samples, `a` − `b`; `None` where one has fewer than two values or one that is no number.
pub fn compare(a: &[f64], b: &[f64]) -> Option<Comparison> {
    let (a, b) = (Trimmed::of(a)?, Trimmed::of(b)?);
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
    use crate::robust::student_t_limit;
    use crate::simulation::Random;

    #[test]
    fn of_few_values_it_is_welch_s() {
        let c = compare(&[1.0, 2.0, 3.0], &[2.0, 4.0, 6.0, 8.0]).unwrap();
        assert_eq!(c.change, -3.0);
        let (a, b): (f64, f64) = (1.0 / 3.0, 20.0 / 3.0 / 4.0);
        assert!((c.error - (a + b).sqrt()).abs() < 1e-12);
        assert!((c.freedom - (a + b) * (a + b) / (a * a / 2.0 + b * b / 3.0)).abs() < 1e-9);
    }

    #[test]
    fn nothing_is_said_of_one_value_or_of_none_that_is_a_number() {
        assert_eq!(compare(&[1.0], &[1.0, 2.0]), None);
        assert_eq!(compare(&[1.0, f64::NAN, 2.0], &[1.0, 2.0]), None);
        assert_eq!(compare(&[1.0, f64::INFINITY], &[1.0, 2.0]), None);
    }

    /// Seen on a simulated machine: a neighbour lost half of its work in a trial of eleven blocks, of which one was misread.
    #[test]
    fn one_strange_block_does_not_hide_that_half_was_lost() {
        let on = [6.195, 6.234, 6.140, 6.168, 6.178, 6.211];
        let off = [6.819, 6.835, 6.786, 6.131, 6.803];
        let c = compare(&on, &off).unwrap();
        assert!((-0.65..-0.58).contains(&c.change), "{c:?}");
        assert!(-c.change > student_t_limit(0.001, c.freedom) * c.error, "{c:?}");
    }

    /// How often nothing is taken for a fall, at a level of 1 %.
    fn false_alarms(count: (usize, usize), mut noise: impl FnMut(&mut Random) -> f64) -> f64 {
        const RUNS: usize = 20_000;
        let mut random = Random::new(17);
        let mut alarms = 0;
        for _ in 0..RUNS {
            let a: Vec<f64> = (0..count.0).map(|_| noise(&mut random)).collect();
            let b: Vec<f64> = (0..count.1).map(|_| noise(&mut random)).collect();
            let c = compare(&a, &b).unwrap();
            alarms += usize::from(c.change < -student_t_limit(0.01, c.freedom) * c.error);
        }
        alarms as f64 / RUNS as f64
    }

    #[test]
    fn nothing_is_rarely_taken_for_a_fall() {
        for count in [
            (3, 3),
            (4, 6),
            (5, 5),
            (6, 5),
            (8, 7),
            (10, 10),
            (20, 18),
            (40, 40),
        ] {
            let normal = false_alarms(count, Random::gaussian);
            assert!(normal < 0.0165, "{count:?}: {normal}");
            let heavy = false_alarms(count, Random::heavy);
            assert!(heavy < 0.0165, "heavy {count:?}: {heavy}");
        }
    }
}
