//! The exact interval of a gain, from probe pairs made after the verdict.
//!
//! The estimate of an accepted trial is inflated: the trial stopped while the change looked good. Fresh pairs have no
//! such bias. A fair coin decides each pair's order, so a difference `d = θ ± u` is symmetric around a constant effect
//! θ for any load. A t interval assumes normal noise. This interval assumes nothing about the noise.
//!
//! The typical-value theorem (Hartigan, JASA 64 (1969) 1303) gives the interval. A group of 2^k subsets of the pairs,
//! closed under symmetric difference, has 2^k − 1 non-empty subsets. Their means cut the line into 2^k parts, and θ
//! lies in each part with the same probability. Up to [`DIMENSION`] pairs all subsets are used. For more pairs a linear
//! code selects the subsets.
//!
//! All values are log units. Coverage holds for a number of pairs that was fixed beforehand.

use crate::guard::usable_scale;
use crate::robust::mean;
use serde::{Deserialize, Serialize};

/// Logarithm of the number of subsets: 4,096 means bound the cost of an interval to about 50,000 additions.
const DIMENSION: usize = 12;
/// The primitive polynomial x^12 + x^6 + x^4 + x + 1 without its first term. Its powers of x are 4,095 different
/// columns, and the first twelve of them are the unit vectors.
const POLYNOMIAL: usize = 0b101_0011;
/// The newest this many pairs count.
pub const PAIRS_MAX: usize = 240;
/// A broken block counts as a loss of this many scales, and never as less than the largest measured loss.
const WORST_SCALES: f64 = 8.0;
/// No interval if more than this share of the pairs has no number.
const MISSING_MAX: f64 = 0.25;

/// An exact interval of the mean effect (log units).
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Interval {
    /// Mean difference: unbiased for a constant effect.
    pub estimate: f64,
    /// Lower end.
    pub lower: f64,
    /// Upper end.
    pub upper: f64,
    /// Exact coverage: at least what was asked for.
    pub confidence: f64,
    /// Pairs it comes from.
    pub pairs: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Pair {
    Measured(f64),
    /// The on block did no work, or the circuit breaker ended it.
    Broken,
    /// No number.
    Missing,
}

/// Differences of probe pairs (on − off, log units), and the interval of their mean.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Fresh {
    scale: f64,
    pairs: Vec<Pair>,
    seen: u32,
}

impl Fresh {
    /// `scale`: standard deviation of a pair's difference at acceptance. It only says how much a broken block counts.
    pub fn new(scale: f64) -> Self {
        Self {
            scale: usable_scale(scale),
            pairs: Vec::new(),
            seen: 0,
        }
    }

    /// Takes the difference of a pair whose order a fair coin decided.
    ///
    /// −∞ (an on block without work, or a broken one) counts as a loss of eight scales or the largest measured loss.
    /// Other differences that are no numbers widen the interval: they count as the worst pair for its lower end and as
    /// the best pair for its upper end.
    pub fn observe(&mut self, difference: f64) {
        if self.pairs.len() >= PAIRS_MAX {
            self.pairs.remove(0);
        }
        self.seen = self.seen.saturating_add(1);
        self.pairs.push(if difference.is_finite() {
            Pair::Measured(difference)
        } else if difference == f64::NEG_INFINITY {
            Pair::Broken
        } else {
            Pair::Missing
        });
    }

    /// Pairs observed so far, including those that no longer count.
    pub fn count(&self) -> u32 {
        self.seen
    }

    /// The interval with at least this coverage (0.5 to 0.9995). `None` while the pairs are too few for it (five pairs
    /// for 0.9), or when more than a quarter of them has no number.
    pub fn interval(&self, confidence: f64) -> Option<Interval> {
        let n = self.pairs.len();
        let parts = 1usize << n.min(DIMENSION);
        // As many parts of the line are left out on each side; NaN leaves none.
        let left_out = (parts as f64 * (1.0 - confidence.clamp(0.5, 0.9995)) / 2.0 + 1e-9) as usize;
        let missing = self.pairs.iter().filter(|p| **p == Pair::Missing).count();
        if left_out == 0 || missing as f64 > MISSING_MAX * n as f64 {
            return None;
        }
        let known = self.with_missing_as(None);
        let low = known.iter().copied().fold(0.0, f64::min);
        let high = known.iter().copied().fold(0.0, f64::max);
        let mut means = subset_means(&self.with_missing_as(Some(low)));
        let lower = *means.select_nth_unstable_by(left_out - 1, f64::total_cmp).1;
        if missing > 0 {
            means = subset_means(&self.with_missing_as(Some(high)));
        }
        let from_above = means.len().checked_sub(left_out)?;
        let upper = *means.select_nth_unstable_by(from_above, f64::total_cmp).1;
        Some(Interval {
            estimate: mean(&known),
            lower,
            upper,
            confidence: 1.0 - 2.0 * left_out as f64 / parts as f64,
            pairs: n as u32,
        })
    }

    /// The differences, with a value for those that have none; `None` leaves them out.
    fn with_missing_as(&self, missing: Option<f64>) -> Vec<f64> {
        let measured = self.pairs.iter().filter_map(|p| match p {
            Pair::Measured(d) => Some(*d),
            _ => None,
        });
        let broken = measured.fold(-WORST_SCALES * self.scale, f64::min);
        self.pairs
            .iter()
            .filter_map(|p| match p {
                Pair::Measured(d) => Some(*d),
                Pair::Broken => Some(broken),
                Pair::Missing => missing,
            })
            .collect()
    }
}

/// Means of the non-empty subsets of the code. Pair `j` belongs to subset `m` if `m` and the column of `j` share an odd
/// number of bits. So all sums come from one Walsh–Hadamard transform.
fn subset_means(values: &[f64]) -> Vec<f64> {
    let bits = values.len().min(DIMENSION);
    // Sum and count of the values of each column.
    let mut cells = vec![(0.0f64, 0.0f64); 1 << bits];
    let mut column = 1usize;
    for value in values {
        if let Some(cell) = cells.get_mut(column) {
            cell.0 += value;
            cell.1 += 1.0;
        }
        column <<= 1;
        if column >> DIMENSION != 0 {
            column = (column ^ POLYNOMIAL) & ((1 << DIMENSION) - 1);
        }
    }
    let mut half = 1;
    while half < cells.len() {
        for block in cells.chunks_mut(2 * half) {
            let (left, right) = block.split_at_mut(half);
            for (a, b) in left.iter_mut().zip(right) {
                (*a, *b) = ((a.0 + b.0, a.1 + b.1), (a.0 - b.0, a.1 - b.1));
            }
        }
        half *= 2;
    }
    // The transform is what lies outside a subset minus what lies inside.
    let all = cells.first().copied().unwrap_or_default();
    cells
        .iter()
        .skip(1)
        .map(|(sum, count)| (all.0 - sum) / (all.1 - count))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::robust::{student_t_limit, variance};
    use crate::simulation::Random;

    fn of(differences: &[f64]) -> Fresh {
        let mut fresh = Fresh::new(0.05);
        for d in differences {
            fresh.observe(*d);
        }
        fresh
    }

    #[test]
    fn the_code_has_different_columns_and_starts_with_all_subsets() {
        let means = subset_means(&[1.0, 2.0, 4.0]);
        assert_eq!(means, [1.0, 2.0, 1.5, 4.0, 2.5, 3.0, 7.0 / 3.0]);
        let mut column = 1usize;
        let mut seen = std::collections::BTreeSet::new();
        while seen.insert(column) {
            column <<= 1;
            if column >> DIMENSION != 0 {
                column = (column ^ POLYNOMIAL) & ((1 << DIMENSION) - 1);
            }
        }
        assert_eq!(seen.len(), (1 << DIMENSION) - 1);
    }

    #[test]
    fn coverage_is_exact_over_all_orders_of_the_pairs() {
        // The sizes are fixed and the coins run through all sequences: no sampling error, whatever the sizes.
        for n in [5usize, 8, 12, 14] {
            let sizes: Vec<f64> = (0..n)
                .map(|i| 0.01 * (1.0 + i as f64).powi(3) + 0.001 * i as f64)
                .collect();
            let mut misses = [0u32; 2];
            for coins in 0..1u32 << n {
                let differences: Vec<f64> = sizes
                    .iter()
                    .enumerate()
                    .map(|(i, u)| 0.1 + if coins >> i & 1 == 1 { *u } else { -u })
                    .collect();
                let i = of(&differences).interval(0.90).unwrap();
                misses[0] += u32::from(i.lower > 0.1 + 1e-9);
                misses[1] += u32::from(i.upper < 0.1 - 1e-9);
                assert!(i.confidence >= 0.90);
            }
            let parts = (1u64 << n.min(DIMENSION)) as f64;
            let due = (parts * 0.05).floor() / parts * f64::from(1u32 << n);
            assert_eq!(
                [f64::from(misses[0]), f64::from(misses[1])],
                [due, due],
                "{n} pairs"
            );
        }
    }

    #[test]
    fn coverage_holds_for_any_symmetric_noise() {
        let mut random = Random::new(11);
        let noises: [fn(&mut Random) -> f64; 3] = [
            |r| r.gaussian(),
            |r| r.heavy().powi(3),
            |r| {
                if r.coin() {
                    r.exponential()
                } else {
                    -r.exponential()
                }
            },
        ];
        for noise in noises {
            for n in [5usize, 12, 25, 42, 60] {
                let (mut missed, runs) = (0u32, 2000u32);
                let mut due = 0.0;
                for _ in 0..runs {
                    let d: Vec<f64> = (0..n).map(|_| 0.14 + 0.05 * noise(&mut random)).collect();
                    let i = of(&d).interval(0.90).unwrap();
                    missed += u32::from(i.lower > 0.14 || i.upper < 0.14);
                    due = 1.0 - i.confidence;
                }
                // Within 3.5 standard errors of the exact rate, on both sides.
                let error = (due * (1.0 - due) / f64::from(runs)).sqrt();
                let share = f64::from(missed) / f64::from(runs);
                assert!((share - due).abs() < 3.5 * error, "{n} pairs: {share}, due {due}");
            }
        }
    }

    #[test]
    fn on_normal_noise_it_is_hardly_wider_than_students_interval() {
        let mut random = Random::new(5);
        for (n, most) in [(8usize, 1.10), (12, 1.06), (30, 1.05), (60, 1.06)] {
            let (mut own, mut students) = (0.0, 0.0);
            for _ in 0..400 {
                let d: Vec<f64> = (0..n).map(|_| random.gaussian()).collect();
                let i = of(&d).interval(0.90).unwrap();
                own += i.upper - i.lower;
                students += 2.0 * student_t_limit(0.05, n as f64 - 1.0) * (variance(&d) / n as f64).sqrt();
            }
            let ratio = own / students;
            assert!(ratio < most && ratio > 0.9, "{n} pairs: {ratio}");
        }
    }

    #[test]
    fn an_interval_needs_enough_pairs_for_its_confidence() {
        for n in 0..5 {
            assert_eq!(of(&vec![0.1; n]).interval(0.90), None);
        }
        let i = of(&[0.1; 5]).interval(0.90).unwrap();
        assert_eq!((i.pairs, i.confidence), (5, 0.9375));
        assert!((i.lower - 0.1).abs() < 1e-12 && (i.upper - 0.1).abs() < 1e-12);
        assert_eq!(of(&[0.1; 7]).interval(0.99), None);
        assert!(of(&[0.1; 8]).interval(0.99).is_some());
        assert_eq!(of(&[0.1; 30]).interval(f64::NAN), None);
    }

    #[test]
    fn broken_and_missing_pairs_never_flatter() {
        let mut random = Random::new(3);
        let d: Vec<f64> = (0..12).map(|_| 0.15 + 0.02 * random.gaussian()).collect();
        let whole = of(&d).interval(0.90).unwrap();
        let with = |last: f64| of(&[&d[..11], &[last]].concat()).interval(0.90).unwrap();
        let broken = with(f64::NEG_INFINITY);
        assert!(broken.estimate < whole.estimate - 0.03 && broken.lower < whole.lower);
        let missing = with(f64::NAN);
        assert!(missing.lower <= whole.lower && missing.upper >= whole.upper - 0.01);
        assert!(missing.lower < missing.estimate && missing.estimate < missing.upper);
        assert_eq!(of(&[f64::NAN; 20]).interval(0.90), None);
        assert_eq!(
            of(&[0.1, 0.1, 0.1, 0.1, 0.1, f64::NAN, f64::INFINITY]).interval(0.90),
            None
        );
        // A broken block is no better than the largest measured loss.
        let mut far = d.clone();
        far[0] = -3.0;
        far[11] = f64::NEG_INFINITY;
        let as_measured = {
            far[11] = -3.0;
            of(&far).interval(0.90)
        };
        far[11] = f64::NEG_INFINITY;
        assert_eq!(of(&far).interval(0.90), as_measured);
    }

    #[test]
    fn memory_is_bounded_and_the_newest_pairs_count() {
        let mut fresh = of(&vec![5.0; 10_000]);
        assert_eq!((fresh.pairs.len(), fresh.count()), (PAIRS_MAX, 10_000));
        for _ in 0..PAIRS_MAX {
            fresh.observe(0.1);
        }
        let i = fresh.interval(0.90).unwrap();
        assert!((i.estimate - 0.1).abs() < 1e-9 && i.pairs as usize == PAIRS_MAX);
    }

    #[test]
    fn state_survives_writing_down() {
        let fresh = of(&[0.1, f64::NAN, f64::NEG_INFINITY, 0.05, 0.2, 0.1, 0.13, 0.12]);
        let text = serde_json::to_string(&fresh).unwrap();
        let again: Fresh = serde_json::from_str(&text).unwrap();
        assert_eq!(again, fresh);
        assert_eq!(again.interval(0.90), fresh.interval(0.90));
    }
}
