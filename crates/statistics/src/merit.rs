//! How good a meter of work is, as its own readings tell while nobody changes anything.
//!
//! Unit: a *block*, a stretch of time of one length with what the meter counted in it and the CPU seconds that the program used.
//! Two questions are asked that the spread of work per CPU second does not answer:
//!
//! * Does the meter follow the load ([`linearity`])? The slope of ln(work) on ln(CPU time) is 1 for a meter that is proportional to
//!   CPU time, 0 for one that runs by a clock whatever the program does. A program that works in larger portions under load has
//!   more than 1 by itself, so the slope alone convicts no meter.
//! * Does it stand still when nothing is changed ([`placebo`])? The blocks are compared as if a change had been in force in half of
//!   them, in the order ABBA, in which what moves in a straight line cancels.
//!
//! The slope is that of Theil and Sen, the median of the slopes of all pairs of points (P. K. Sen, "Estimates of the regression
//! coefficient based on Kendall's tau", Journal of the American Statistical Association 63, 1968): three blocks of ten may be
//! wrong by any amount. Least squares follow the one block in which somebody compiled beside the program.

use crate::robust::{exp_m1, ln, mean, quantile, student_t_limit, variance};
use std::fmt;

/// Fewest blocks that are told anything of: with fewer the limits of either figure are wider than what is of interest.
pub const BLOCKS_MIN: usize = 8;
/// Most points whose pairs are all looked at (8,128); more blocks are joined to longer ones first.
const POINTS_MAX: usize = 128;
/// ln(CPU time) must range at least so far, between the tenth of the blocks with the least and that with the most. Of eleven
/// blocks (45 s) that spread by 0.2 a meter with a noise of 2 % has a slope that is known to ± 0.1, which tells 1 from 0.5; with
/// a quarter of the range it is ± 0.4, which tells nothing. It also keeps small what the clock of CPU time does to the slope: with
/// ticks of 10 ms and blocks of 1 s of CPU time it comes out at most 1 % too low.
pub const CPU_RANGE_MIN: f64 = 0.2;
/// Largest share of the blocks with CPU time in which a meter may have counted nothing: they have no logarithm, and to leave out
/// many of them would tell of the others only.
const SILENT_MAX: f64 = 0.1;
/// Confidence of the interval of [`Placebo`].
pub const CONFIDENCE: f64 = 0.95;
/// Standard errors to either end of an interval of 95 % of a normal distribution.
const NORMAL_95: f64 = 1.96;

/// A slope and how well it is known.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Slope {
    /// Median slope.
    pub slope: f64,
    /// Its standard error, if the points vary independently.
    pub error: f64,
}

/// The slope of y on x by Theil and Sen, for (x, y); `None` where x hardly varies, or of fewer than five points. Points that are no
/// numbers are left out.
///
/// The error is a 1.96th of half of Sen's interval of 95 %, whose ends are the slopes at those ranks that Kendall's S, were there
/// nothing but noise, leaves by chance in one case of twenty.
pub fn theil_sen(points: &[(f64, f64)]) -> Option<Slope> {
    let points: Vec<(f64, f64)> = points
        .iter()
        .copied()
        .filter(|(x, y)| x.is_finite() && y.is_finite())
        .collect();
    let mut slopes = Vec::new();
    for (i, (x, y)) in points.iter().enumerate() {
        for (other_x, other_y) in points.iter().skip(i + 1) {
            let slope = (other_y - y) / (other_x - x);
            // Two points at the same x say nothing.
            if slope.is_finite() {
                slopes.push(slope);
            }
        }
    }
    let n = points.len() as f64;
    let spread_of_s = (n * (n - 1.0) * (2.0 * n + 5.0) / 18.0).sqrt();
    let aside = NORMAL_95 * spread_of_s / (2.0 * slopes.len() as f64);
    // Also refuses NaN: no slopes of no points.
    if points.len() < 5 || aside.is_nan() || aside >= 0.5 {
        return None;
    }
    slopes.sort_by(f64::total_cmp);
    let at = |share: f64| quantile(&slopes, share);
    Some(Slope {
        slope: at(0.5),
        error: (at(0.5 + aside) - at(0.5 - aside)) / (2.0 * NORMAL_95),
    })
}

/// How a meter follows the CPU time that its program uses.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Linearity {
    /// Slope of ln(work) on ln(CPU time): 1 = proportional.
    pub slope: f64,
    /// Its standard error, if the blocks vary independently.
    pub error: f64,
    /// By how much more CPU time the blocks with the most used than those with the least, a tenth of them left out at either end,
    /// as a share.
    pub cpu_range: f64,
}

/// What a comparison shows where nothing was changed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Placebo {
    /// Work per CPU second in one half of the blocks against that in the other, as a share.
    pub effect: f64,
    /// Lower end of its interval at [`CONFIDENCE`].
    pub lower: f64,
    /// Upper end.
    pub upper: f64,
}

/// Why something is not known of a meter.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Unknown {
    /// Too few blocks in which it counted.
    Blocks {
        /// How many.
        seen: usize,
    },
    /// It counted nothing in too many blocks in which the program worked.
    Silent {
        /// How many.
        silent: usize,
        /// Of so many.
        busy: usize,
    },
    /// CPU use varied too little to tell.
    CpuRange {
        /// [`Linearity::cpu_range`].
        range: f64,
    },
}

impl fmt::Display for Unknown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Blocks { seen } => write!(f, "{seen} blocks with work so far, {BLOCKS_MIN} are needed"),
            Self::Silent { silent, busy } => {
                write!(f, "it counted nothing in {silent} of {busy} blocks")
            }
            Self::CpuRange { range } => write!(
                f,
                "CPU use varied by {:.0} % only, {:.0} % are needed",
                range * 100.0,
                exp_m1(CPU_RANGE_MIN) * 100.0
            ),
        }
    }
}

/// A block whose logarithms exist.
fn counted((work, cpu): (f64, f64)) -> bool {
    work.is_finite() && cpu.is_finite() && work > 0.0 && cpu > 0.0
}

/// Whether enough can be said of these blocks: (work, CPU seconds).
fn enough(blocks: &[(f64, f64)]) -> Result<(), Unknown> {
    let busy = blocks.iter().filter(|b| b.1 > 0.0 && b.1.is_finite()).count();
    let seen = blocks.iter().filter(|b| counted(**b)).count();
    let silent = busy - seen;
    if silent as f64 > SILENT_MAX * busy as f64 {
        Err(Unknown::Silent { silent, busy })
    } else if seen < BLOCKS_MIN {
        Err(Unknown::Blocks { seen })
    } else {
        Ok(())
    }
}

/// How `work` follows CPU time, over blocks (work, CPU seconds) of equal length.
///
/// # Errors
/// Why that is not known.
pub fn linearity(blocks: &[(f64, f64)]) -> Result<Linearity, Unknown> {
    enough(blocks)?;
    let each = blocks.len().div_ceil(POINTS_MAX);
    // What is left over at the end is shorter, and would look like less load.
    let points: Vec<(f64, f64)> = blocks
        .chunks_exact(each)
        .map(|some| some.iter().fold((0.0, 0.0), |sum, b| (sum.0 + b.0, sum.1 + b.1)))
        .filter(|b| counted(*b))
        .map(|(work, cpu)| (ln(cpu), ln(work)))
        .collect();
    let cpu: Vec<f64> = points.iter().map(|p| p.0).collect();
    let range = quantile(&cpu, 0.9) - quantile(&cpu, 0.1);
    let too_narrow = Unknown::CpuRange { range: exp_m1(range) };
    if range < CPU_RANGE_MIN {
        return Err(too_narrow);
    }
    let found = theil_sen(&points).ok_or(too_narrow)?;
    Ok(Linearity {
        slope: found.slope,
        error: found.error,
        cpu_range: exp_m1(range),
    })
}

/// What a trial would have made of these blocks (work, CPU seconds), in order, had a change that does nothing been in force in the
/// second and third of every four.
///
/// The interval is Student's over pairs of neighbours, of which the second is "on" in every other one. What moves in a straight line
/// adds to its width and not to the effect; what comes and goes every eight or sixteen blocks, or changes for good, adds to
/// the effect. In one case of twenty it excludes 0 by chance.
///
/// # Errors
/// Why that is not known.
pub fn placebo(blocks: &[(f64, f64)]) -> Result<Placebo, Unknown> {
    enough(blocks)?;
    let score = |(work, cpu): (f64, f64)| ln(work) - ln(cpu);
    let contrasts: Vec<f64> = blocks
        .chunks_exact(2)
        .enumerate()
        .filter_map(|(i, pair)| match pair {
            [first, second] if counted(*first) && counted(*second) => {
                let later = score(*second) - score(*first);
                Some(if i % 2 == 0 { later } else { -later })
            }
            _ => None,
        })
        .collect();
    let pairs = contrasts.len();
    if pairs < BLOCKS_MIN / 2 {
        return Err(Unknown::Blocks { seen: 2 * pairs });
    }
    let effect = mean(&contrasts);
    let error = (variance(&contrasts) / pairs as f64).sqrt();
    let half = student_t_limit((1.0 - CONFIDENCE) / 2.0, (pairs - 1) as f64) * error;
    Ok(Placebo {
        effect: exp_m1(effect),
        lower: exp_m1(effect - half),
        upper: exp_m1(effect + half),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::robust::exp;
    use crate::simulation::Random;
    use proptest::prelude::*;

    /// A load that goes up and down by a factor of two.
    fn cpu(i: usize) -> f64 {
        [1.0, 1.6, 2.0, 1.3, 0.9, 1.1, 1.8][i % 7]
    }

    fn blocks(count: usize, mut work: impl FnMut(usize, f64) -> f64) -> Vec<(f64, f64)> {
        (0..count).map(|i| (work(i, cpu(i)), cpu(i))).collect()
    }

    #[test]
    fn the_slope_is_that_of_the_power_law() {
        for power in [0.0, 0.5, 1.0, 1.4] {
            let found = linearity(&blocks(11, |_, cpu| 700.0 * exp(power * ln(cpu)))).unwrap();
            assert!((found.slope - power).abs() < 1e-9, "{found:?}");
            assert!(found.error < 1e-9, "{found:?}");
            assert!((0.7..1.3).contains(&found.cpu_range), "{found:?}");
        }
    }

    #[test]
    fn three_blocks_of_twelve_may_be_wrong_by_any_amount() {
        let found = linearity(&blocks(12, |i, cpu| if i % 4 == 1 { 1e9 } else { cpu })).unwrap();
        assert!((found.slope - 1.0).abs() < 0.05, "{found:?}");
    }

    #[test]
    fn a_load_that_hardly_varies_tells_nothing_of_linearity() {
        let steady: Vec<(f64, f64)> = (0..40)
            .map(|i| (10.0 + f64::from(i % 3), 1.0 + 0.01 * f64::from(i % 5)))
            .collect();
        assert!(matches!(linearity(&steady), Err(Unknown::CpuRange { range }) if range < 0.05));
        assert!(
            linearity(&steady)
                .unwrap_err()
                .to_string()
                .contains("22 % are needed")
        );
        assert!(placebo(&steady).is_ok());
        // One block in which it was busier is no range.
        let mut one = vec![(10.0, 1.0); 20];
        one[7] = (100.0, 10.0);
        assert!(matches!(linearity(&one), Err(Unknown::CpuRange { .. })));
    }

    #[test]
    fn too_few_blocks_and_silent_ones_are_no_answer() {
        for f in [
            |b: &[(f64, f64)]| linearity(b).err(),
            |b: &[(f64, f64)]| placebo(b).err(),
        ] {
            assert_eq!(f(&[]), Some(Unknown::Blocks { seen: 0 }));
            let few = blocks(BLOCKS_MIN - 1, |_, cpu| cpu);
            assert_eq!(f(&few), Some(Unknown::Blocks { seen: BLOCKS_MIN - 1 }));
            let rare = blocks(20, |i, cpu| if i % 5 == 0 { 0.0 } else { cpu });
            assert_eq!(f(&rare), Some(Unknown::Silent { silent: 4, busy: 20 }));
            // A program that does nothing need not count.
            let mut idle = blocks(20, |_, cpu| cpu);
            (0..6).for_each(|i| idle[i] = (0.0, 0.0));
            assert_eq!(f(&idle), None);
        }
    }

    #[test]
    fn a_constant_shift_in_half_of_the_blocks_is_the_effect() {
        let shifted = blocks(16, |i, cpu| cpu * if matches!(i % 4, 1 | 2) { 1.1 } else { 1.0 });
        let found = placebo(&shifted).unwrap();
        assert!((found.effect - 0.1).abs() < 1e-9, "{found:?}");
        assert!(found.lower > 0.09 && found.upper < 0.11);
    }

    #[test]
    fn what_moves_in_a_straight_line_cancels_and_widens_the_interval() {
        let drifting = blocks(16, |i, cpu| cpu * exp(0.03 * i as f64));
        let found = placebo(&drifting).unwrap();
        assert!(found.effect.abs() < 1e-9, "{found:?}");
        assert!(found.lower < -0.02 && found.upper > 0.02, "{found:?}");
    }

    #[test]
    fn the_error_of_a_slope_is_the_spread_of_slopes() {
        for heavy in [false, true] {
            let mut random = Random::new(5);
            let (mut missed, mut sum) = (0, 0.0);
            for _ in 0..400 {
                let noisy = blocks(11, |_, cpu| {
                    let noise = if heavy { random.heavy() } else { random.gaussian() };
                    cpu * exp(0.03 * noise)
                });
                let found = linearity(&noisy).unwrap();
                sum += found.slope;
                missed += u32::from((found.slope - 1.0).abs() > NORMAL_95 * found.error);
            }
            assert!((sum / 400.0 - 1.0).abs() < 0.02, "{}", sum / 400.0);
            // 20 expected; 34 is three standard deviations more.
            assert!((2..=34).contains(&missed), "{heavy} {missed}");
        }
    }

    #[test]
    fn a_placebo_shows_an_effect_in_one_case_of_twenty() {
        let mut random = Random::new(9);
        let mut shown = 0;
        for _ in 0..1000 {
            let found = placebo(&blocks(11, |_, cpu| cpu * exp(0.05 * random.gaussian()))).unwrap();
            shown += u32::from(found.lower > 0.0 || found.upper < 0.0);
        }
        assert!((30..=71).contains(&shown), "{shown}");
    }

    #[test]
    fn many_blocks_are_joined_and_none_is_judged_by_its_length() {
        let many = blocks(7 * POINTS_MAX + 3, |i, _| cpu(i / 50));
        let many: Vec<(f64, f64)> = many.into_iter().map(|(work, _)| (work, work)).collect();
        let found = linearity(&many).unwrap();
        assert!(
            (found.slope - 1.0).abs() < 1e-9 && found.error < 1e-9,
            "{found:?}"
        );
    }

    proptest! {
        #[test]
        fn units_change_nothing(
            seen in prop::collection::vec((0.1f64..1e6, 0.01f64..4.0), 8..40),
            scale in 1e-3f64..1e3,
        ) {
            let scaled: Vec<(f64, f64)> = seen.iter().map(|(work, cpu)| (work * scale, *cpu)).collect();
            match (linearity(&seen), linearity(&scaled)) {
                (Ok(a), Ok(b)) => {
                    prop_assert!((a.slope - b.slope).abs() <= 1e-6 * a.slope.abs().max(1.0));
                    prop_assert!((a.error - b.error).abs() <= 1e-6 * a.error.abs().max(1.0));
                }
                (a, b) => prop_assert_eq!(a.err(), b.err()),
            }
            let (a, b) = (placebo(&seen).unwrap(), placebo(&scaled).unwrap());
            prop_assert!((a.effect - b.effect).abs() <= 1e-6 * (1.0 + a.effect));
        }

        #[test]
        fn figures_are_numbers_in_their_order(
            seen in prop::collection::vec((0.0f64..1e9, 0.0f64..1e3), 0..300),
        ) {
            if let Ok(found) = linearity(&seen) {
                prop_assert!(found.slope.is_finite() && found.error.is_finite() && found.error >= 0.0);
                prop_assert!(found.cpu_range >= exp_m1(CPU_RANGE_MIN) - 1e-12);
            }
            if let Ok(found) = placebo(&seen) {
                prop_assert!(-1.0 <= found.lower && found.lower <= found.effect);
                prop_assert!(found.effect <= found.upper && !found.upper.is_nan());
            }
        }

        #[test]
        fn a_power_law_beside_another_adds_its_power(
            seen in prop::collection::vec((0.1f64..1e6, 0.01f64..4.0), 8..30),
            power in -2.0f64..2.0,
        ) {
            // The slope of y + p x is the slope of y, plus p.
            let points: Vec<(f64, f64)> = seen.iter().map(|(work, cpu)| (ln(*cpu), ln(*work))).collect();
            let tilted: Vec<(f64, f64)> = points.iter().map(|(x, y)| (*x, y + power * x)).collect();
            if let (Some(a), Some(b)) = (theil_sen(&points), theil_sen(&tilted)) {
                prop_assert!((a.slope + power - b.slope).abs() <= 1e-6 * a.slope.abs().max(1.0));
            }
        }
    }
}
