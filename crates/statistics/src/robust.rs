//! Robust summaries, stable elementary functions, and the quality of a work meter. Noise on a busy machine has heavy
//! tails and steps, so order statistics replace means and standard deviations. The standard `exp` and `ln` differ in
//! the last bit between platforms, which would break replay. The functions here use exactly rounded operations only.

use std::f64::consts::LN_2;

/// Scales a median absolute deviation to the standard deviation of a Gaussian sample: 1 / normal quantile at 3/4.
pub const MAD_TO_SIGMA: f64 = 1.4826;

/// e^x to a few units in the last place, the same bits everywhere. Underflows to 0, overflows to ∞; NaN stays NaN.
pub fn exp(x: f64) -> f64 {
    if x.is_nan() {
        return x;
    }
    if x > 709.7 {
        return f64::INFINITY;
    }
    if x < -708.0 {
        return 0.0;
    }
    // ln 2 in two parts (Cody and Waite): the first has zeros in its last bits, so k × HIGH is exact.
    const HIGH: f64 = 6.931_471_803_691_238e-1;
    const LOW: f64 = 1.908_214_929_270_587_7e-10;
    let k = (x / LN_2).round();
    let r = (x - k * HIGH) - k * LOW;
    // Taylor series on |r| <= ln(2)/2; the term of degree 14 is below 5e-18.
    let mut sum = 1.0;
    let mut degree = 14.0;
    while degree > 0.5 {
        sum = 1.0 + r * sum / degree;
        degree -= 1.0;
    }
    // k is an integer in -1022 to 1024; two factors keep each a normal number.
    let k = k as i64;
    let half = k / 2;
    sum * power_of_two(half) * power_of_two(k - half)
}

fn power_of_two(k: i64) -> f64 {
    f64::from_bits(((k + 1023) as u64) << 52)
}

/// 2 atanh(s) for small `s`, by its series.
fn two_atanh(s: f64) -> f64 {
    let square = s * s;
    let mut sum = 0.0;
    let mut n = 33.0;
    while n > 0.0 {
        sum = sum * square + 1.0 / n;
        n -= 2.0;
    }
    2.0 * s * sum
}

/// Natural logarithm. The same bits on every machine. `ln(0)` is −∞, of a negative number NaN.
pub fn ln(x: f64) -> f64 {
    if x.is_nan() || x < 0.0 {
        return f64::NAN;
    }
    if x == 0.0 {
        return f64::NEG_INFINITY;
    }
    if x.is_infinite() {
        return x;
    }
    // Scale subnormal numbers up first.
    let (x, offset) = if x < f64::MIN_POSITIVE {
        (x * power_of_two(54), -54.0)
    } else {
        (x, 0.0)
    };
    let bits = x.to_bits();
    let mut exponent = ((bits >> 52) as i64 - 1023) as f64 + offset;
    let mut mantissa = f64::from_bits((bits & ((1 << 52) - 1)) | (1023 << 52));
    if mantissa > std::f64::consts::SQRT_2 {
        mantissa /= 2.0;
        exponent += 1.0;
    }
    exponent * LN_2 + two_atanh((mantissa - 1.0) / (mantissa + 1.0))
}

/// ln(1 + x), accurate for small `x`. The same bits on every machine.
pub fn ln_1p(x: f64) -> f64 {
    if x > -0.25 && x < 0.5 {
        two_atanh(x / (2.0 + x))
    } else {
        ln(1.0 + x)
    }
}

/// e^x − 1, accurate for small `x`.
pub fn exp_m1(x: f64) -> f64 {
    if x.abs() > 0.1 {
        return exp(x) - 1.0;
    }
    let mut sum = 1.0;
    let mut degree = 12.0;
    while degree > 1.5 {
        sum = 1.0 + x * sum / degree;
        degree -= 1.0;
    }
    x * sum
}

/// Largest stake × outcome. Beyond it a bet has won (ln 2) or lost all it may (−29.3).
const BET_LIMIT: f64 = 15.0;

/// ln(1 + tanh z): logarithm of a bet's factor on the evidence, stable for all `z`. `z` is cut at ±15, so one outcome
/// costs at most 29.3 nats. NaN counts as 0 (no bet).
pub fn ln_1p_tanh(z: f64) -> f64 {
    if z.is_nan() {
        return 0.0;
    }
    LN_2 - ln_1p(exp(-2.0 * z.clamp(-BET_LIMIT, BET_LIMIT)))
}

/// 1 + tanh z: a bet's factor on the evidence, cut as in [`ln_1p_tanh`] and never 0. NaN counts as 0 (no bet).
pub fn one_plus_tanh(z: f64) -> f64 {
    if z.is_nan() {
        return 1.0;
    }
    2.0 / (1.0 + exp(-2.0 * z.clamp(-BET_LIMIT, BET_LIMIT)))
}

/// ln of the mean of e^x over `xs`; −∞ for none.
pub fn ln_mean_exp(xs: &[f64]) -> f64 {
    let top = xs.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    if !top.is_finite() {
        return top;
    }
    let sum: f64 = xs.iter().map(|x| exp(x - top)).sum();
    top + ln(sum / xs.len() as f64)
}

/// Arithmetic mean; NaN for none.
pub fn mean(xs: &[f64]) -> f64 {
    xs.iter().sum::<f64>() / xs.len() as f64
}

/// Sample variance (divisor n − 1); 0 for fewer than two.
pub fn variance(xs: &[f64]) -> f64 {
    if xs.len() < 2 {
        return 0.0;
    }
    let m = mean(xs);
    xs.iter().map(|x| (x - m) * (x - m)).sum::<f64>() / (xs.len() - 1) as f64
}

/// Quantile `p` (0..1), interpolated linearly between order statistics. Ignores NaN; NaN without values.
pub fn quantile(xs: &[f64], p: f64) -> f64 {
    let mut sorted: Vec<f64> = xs.iter().copied().filter(|x| !x.is_nan()).collect();
    sorted.sort_by(f64::total_cmp);
    let Some(last) = sorted.len().checked_sub(1) else {
        return f64::NAN;
    };
    let position = p.clamp(0.0, 1.0) * last as f64;
    let below = position.floor() as usize;
    let share = position - position.floor();
    match (sorted.get(below), sorted.get(below + 1)) {
        // Not a + (b − a) × share: that is NaN between two equal infinities.
        (Some(a), Some(b)) if share > 0.0 && a != b => a * (1.0 - share) + b * share,
        (Some(a), _) => *a,
        (None, _) => f64::NAN,
    }
}

/// Median, ignoring NaN; NaN without values. Selects instead of sorting, since it runs after every block.
pub fn median(xs: &[f64]) -> f64 {
    let mut values: Vec<f64> = xs.iter().copied().filter(|x| !x.is_nan()).collect();
    let middle = values.len() / 2;
    if values.is_empty() {
        return f64::NAN;
    }
    let even = values.len() % 2 == 0;
    let (below, upper, _) = values.select_nth_unstable_by(middle, f64::total_cmp);
    let upper = *upper;
    // For an even count, the mean of the middle two. The lower one is the largest of those below.
    match below.iter().copied().max_by(f64::total_cmp) {
        Some(lower) if even && lower != upper => lower * 0.5 + upper * 0.5,
        _ => upper,
    }
}

/// Median absolute deviation from the median; NaN for none.
pub fn mad(xs: &[f64]) -> f64 {
    let centre = median(xs);
    let deviations: Vec<f64> = xs.iter().map(|x| (x - centre).abs()).collect();
    median(&deviations)
}

/// Standard deviation estimated from the median absolute deviation; NaN for none.
pub fn mad_sigma(xs: &[f64]) -> f64 {
    MAD_TO_SIGMA * mad(xs)
}

/// Autocorrelation at `lag`, between −1 and 1; 0 when there is no variation or too little data.
pub fn autocorrelation(xs: &[f64], lag: usize) -> f64 {
    if xs.len() < lag + 2 {
        return 0.0;
    }
    let m = mean(xs);
    let total: f64 = xs.iter().map(|x| (x - m) * (x - m)).sum();
    // A plain comparison would let NaN through.
    if total.is_nan() || total <= 0.0 {
        return 0.0;
    }
    let shared: f64 = xs.iter().zip(&xs[lag..]).map(|(a, b)| (a - m) * (b - m)).sum();
    shared / total
}

/// Pearson correlation, between −1 and 1; `None` when either side does not vary or fewer than three pairs.
pub fn correlation(pairs: &[(f64, f64)]) -> Option<f64> {
    if pairs.len() < 3 {
        return None;
    }
    let n = pairs.len() as f64;
    let mx = pairs.iter().map(|p| p.0).sum::<f64>() / n;
    let my = pairs.iter().map(|p| p.1).sum::<f64>() / n;
    let (mut xx, mut yy, mut xy) = (0.0, 0.0, 0.0);
    for (x, y) in pairs {
        xx += (x - mx) * (x - mx);
        yy += (y - my) * (y - my);
        xy += (x - mx) * (y - my);
    }
    let scale = xx.sqrt() * yy.sqrt();
    (scale > 0.0 && scale.is_finite()).then(|| xy / scale)
}

/// Wilson's interval for a share of `hits` in `trials` at `z` standard errors (1.96 for 95 %).
pub fn wilson(hits: u64, trials: u64, z: f64) -> (f64, f64) {
    if trials == 0 {
        return (0.0, 1.0);
    }
    let n = trials as f64;
    let p = hits as f64 / n;
    let z2 = z * z;
    let centre = (p + z2 / (2.0 * n)) / (1.0 + z2 / n);
    let half = z / (1.0 + z2 / n) * (p * (1.0 - p) / n + z2 / (4.0 * n * n)).sqrt();
    ((centre - half).max(0.0), (centre + half).min(1.0))
}

/// The limit that Student's t with `freedom` (at least 2) exceeds with probability `tail` (one-sided, 1e-9..=0.5).
///
/// Normal quantile after Abramowitz and Stegun 26.2.23 (error below 4.5e-4), then expansion 26.7.5 in 1 / `freedom`.
/// With 4 degrees of freedom and a tail of 0.001 it is 2 % too low. More freedom or a larger tail reduces the error.
pub fn student_t_limit(tail: f64, freedom: f64) -> f64 {
    let tail = tail.clamp(1e-9, 0.5);
    let n = freedom.max(2.0);
    let t = (-2.0 * ln(tail)).sqrt();
    let z = t
        - (2.515_517 + 0.802_853 * t + 0.010_328 * t * t)
            / (1.0 + 1.432_788 * t + 0.189_269 * t * t + 0.001_308 * t * t * t);
    let z = z.max(0.0);
    let (z3, z5, z7) = (z * z * z, z.powi(5), z.powi(7));
    let z9 = z7 * z * z;
    z + (z3 + z) / (4.0 * n)
        + (5.0 * z5 + 16.0 * z3 + 3.0 * z) / (96.0 * n * n)
        + (3.0 * z7 + 19.0 * z5 + 17.0 * z3 - 15.0 * z) / (384.0 * n * n * n)
        + (79.0 * z9 + 776.0 * z7 + 1482.0 * z5 - 1920.0 * z3 - 945.0 * z) / (92_160.0 * n * n * n * n)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn close(a: f64, b: f64, relative: f64) -> bool {
        (a - b).abs() <= relative * b.abs().max(f64::MIN_POSITIVE)
    }

    proptest! {
        #[test]
        fn exp_agrees_with_the_platform(x in -700.0f64..700.0) {
            prop_assert!(close(exp(x), x.exp(), 1e-14), "{} {}", exp(x), x.exp());
        }

        #[test]
        fn ln_agrees_with_the_platform(e in -300.0f64..300.0) {
            let x = 10f64.powf(e);
            prop_assert!((ln(x) - x.ln()).abs() <= 4e-15 * x.ln().abs().max(1e-3));
        }

        #[test]
        fn ln_1p_and_exp_m1_agree_with_the_platform(x in -0.9f64..3.0) {
            prop_assert!(close(ln_1p(x), x.ln_1p(), 1e-14));
            prop_assert!(close(exp_m1(x), x.exp_m1(), 1e-13));
        }

        #[test]
        fn a_bet_is_fair(z in -14.0f64..14.0) {
            // The mean over the coin is exactly 1: that is what makes the evidence a martingale.
            let mean = (exp(ln_1p_tanh(z)) + exp(ln_1p_tanh(-z))) / 2.0;
            prop_assert!(close(mean, 1.0, 1e-12));
        }

        #[test]
        fn the_median_is_the_middle_quantile(xs in prop::collection::vec(-1e6f64..1e6, 0..40)) {
            prop_assert_eq!(median(&xs).to_bits(), quantile(&xs, 0.5).to_bits());
        }

        #[test]
        fn quantiles_lie_between_the_extremes(xs in prop::collection::vec(-1e6f64..1e6, 1..40), p in 0.0f64..1.0) {
            let q = quantile(&xs, p);
            let low = xs.iter().copied().fold(f64::INFINITY, f64::min);
            let high = xs.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            prop_assert!(q >= low - 1e-9 && q <= high + 1e-9);
        }
    }

    #[test]
    fn elementary_functions_at_the_edges() {
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(1e9), f64::INFINITY);
        assert_eq!(exp(-1e9), 0.0);
        assert!(exp(f64::NAN).is_nan());
        assert_eq!(ln(1.0), 0.0);
        assert_eq!(ln(0.0), f64::NEG_INFINITY);
        assert!(ln(-1.0).is_nan());
        assert!(close(ln(5e-324), 5e-324f64.ln(), 1e-14));
        assert!(close(ln_1p_tanh(1e9), LN_2, 1e-12));
        assert!(ln_1p_tanh(-1e9).is_finite());
        assert_eq!(ln_1p_tanh(f64::NAN), 0.0);
        assert!(close(ln_mean_exp(&[1000.0, 1000.0]), 1000.0, 1e-12));
        assert_eq!(ln_mean_exp(&[]), f64::NEG_INFINITY);
    }

    #[test]
    fn order_statistics_of_known_samples() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), 2.5);
        assert_eq!(median(&[f64::NAN, 7.0]), 7.0);
        assert!(median(&[]).is_nan());
        assert_eq!(mad(&[1.0, 2.0, 3.0, 4.0, 100.0]), 1.0);
        assert_eq!(median(&[f64::NEG_INFINITY, f64::NEG_INFINITY]), f64::NEG_INFINITY);
        assert_eq!(quantile(&[0.0, 10.0], 0.25), 2.5);
        assert!((autocorrelation(&[1.0, -1.0, 1.0, -1.0, 1.0, -1.0], 1) + 5.0 / 6.0).abs() < 1e-12);
        assert_eq!(autocorrelation(&[2.0; 9], 1), 0.0);
        assert!(correlation(&[(1.0, 2.0), (2.0, 4.0), (3.0, 6.0)]).is_some_and(|c| (c - 1.0).abs() < 1e-12));
        assert_eq!(correlation(&[(1.0, 2.0), (1.0, 4.0), (1.0, 6.0)]), None);
    }

    #[test]
    fn wilson_interval_of_the_textbook_case() {
        let (low, high) = wilson(10, 100, 1.96);
        assert!(
            (low - 0.0552).abs() < 1e-3 && (high - 0.1744).abs() < 1e-3,
            "{low} {high}"
        );
        assert_eq!(wilson(0, 0, 1.96), (0.0, 1.0));
    }

    #[test]
    fn limits_of_students_t_are_those_of_the_tables() {
        for (tail, freedom, truth) in [
            (0.05, 8.0, 1.860),
            (0.05, 4.0, 2.132),
            (0.01, 6.0, 3.143),
            (0.001, 8.0, 4.501),
            (0.001, 4.0, 7.173),
            (0.025, 30.0, 2.042),
        ] {
            let limit = student_t_limit(tail, freedom);
            assert!(
                (limit / truth - 1.0).abs() < 0.03,
                "{tail} {freedom}: {limit} {truth}"
            );
        }
    }
}
