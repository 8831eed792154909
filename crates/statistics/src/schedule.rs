//! The pairs that follow an acceptance: how many, how long, and how far apart.
//!
//! The first pairs come at once and tell the gain. The probation follows. Its pairs have a long washout, which a scar of
//! the undo does not outlast. Probe pairs lie so far apart that they cost little work.
//!
//! The engine and the harness that measures the procedure share these rules. Times are in seconds, gains are relative.

use crate::robust::exp_m1;
use crate::scar::LONG;

/// The washout covers this many times the slowest switch seen …
pub const SWITCH_MARGIN: f64 = 1.25;
/// … plus this many time constants of the effect: in a block of the shortest length that follows, 85 % of it shows.
pub const SETTLING_CONSTANTS: f64 = 1.5;
/// Most pairs made at once after the acceptance: a minute of the shortest blocks. On the noisiest recorded machine the
/// interval of a gain of 40 % is then 11.3 points wide with the memory canary, and 12.8 with 16 pairs
/// (`homeostat-lab proof --seed 2 --only gain --tries 1 --runs 2000 --effects 40`). A gain that is then below the gate goes.
pub const FRESH_PAIRS: u32 = 20;
const FRESH_PAIRS_MIN: u32 = 12;
const FRESH_WIDTH: f64 = 0.12;
/// The pairs at once are made if they cost no more work than the change earns in this (seconds).
pub const FRESH_EARNED_IN_S: f64 = 60.0;
/// The gain must stay above this (log units).
pub const GAIN_MIN: f64 = 0.01;
/// The long washout is at least this (seconds): cold caches, page tables and queues have recovered by then.
const LONG_MIN_S: f64 = 8.0;
/// A change goes if its gain is not proven with the long washout in so many pairs. On the noisiest recorded machine a
/// gain of 3 % is shown in a third of them.
pub const SCAR_PAIRS_MAX: u32 = 1500;
/// The probation has as many pairs as it takes to tell the gain to within so much (its whole interval, relative) …
const TOLD_WIDTH: f64 = 0.06;
/// … but at most this many.
const PROBATION_PAIRS_MAX: u32 = 120;
/// Length of that interval for one pair, in standard deviations: 1.645 to either side, and a seventh more because the
/// deviation is estimated.
const WIDTH_IN_SPREADS: f64 = 3.8;
/// Probe pairs of the probation are at least this many pair lengths apart (one in four) …
pub const PROBATION_SPACING: u64 = 3;
/// … and so far apart that all probes together cost at most this share of the work …
pub const PROBE_COST_MAX: f64 = 0.005;
/// … and at most this share of the gain …
pub const PROBE_GAIN_MAX: f64 = 0.05;
/// … but at most this far apart (seconds). A day holds one of each regime that a machine repeats: night, peak hour,
/// backup.
pub const PROBE_INTERVAL_MAX_S: f64 = 86_400.0;

/// Pairs made at once after the acceptance: as many as tell the gain to within twelve points, twelve at least
/// and [`FRESH_PAIRS`] at most. `spread`: standard deviation of a pair's difference with its rare
/// large ones (log units).
pub fn fresh_pairs(spread: f64, gain: f64) -> u32 {
    pairs_to_tell(FRESH_WIDTH, spread, gain).clamp(FRESH_PAIRS_MIN, FRESH_PAIRS)
}

/// Pairs after which the interval of this gain is so wide (relative).
fn pairs_to_tell(wanted: f64, spread: f64, gain: f64) -> u32 {
    let width = WIDTH_IN_SPREADS * spread * (1.0 + gain.max(0.0));
    (width / wanted).powi(2).ceil() as u32
}

/// Share of the work with the change that is lost without it.
fn share_lost(gain: f64) -> f64 {
    let gain = gain.max(0.0);
    gain / (1.0 + gain)
}

/// Pairs of the probation, those at once included. `asked`: fewest; 0 is no probation. `spread`: standard deviation of a
/// pair's difference with its rare large ones (log units).
pub fn probation_pairs(asked: u32, spread: f64, gain: f64) -> u32 {
    if asked == 0 {
        return 0;
    }
    asked.max(pairs_to_tell(TOLD_WIDTH, spread, gain).min(PROBATION_PAIRS_MAX))
}

/// The long washout for a usual one.
pub fn long_washout_s(usual: f64) -> f64 {
    (usual * LONG).max(LONG_MIN_S)
}

/// Whether a gain is too small by the upper end of its interval (relative).
pub fn is_too_small(upper: f64) -> bool {
    upper < exp_m1(GAIN_MIN)
}

/// Work that some probe pairs cost, or the off blocks of a trial, as many as are expected: `off` is the length of a block,
/// `stall` the standstill that switching off and on causes.
pub fn lost_by_s(pairs: f64, gain: f64, off: f64, stall: f64) -> f64 {
    pairs * (share_lost(gain) * off + stall)
}

/// Whether some pairs at once cost no more than the change earns in so many seconds; the other arguments as in [`lost_by_s`].
pub fn is_cheap(pairs: u32, gain: f64, off: f64, stall: f64, earned_in: f64) -> bool {
    lost_by_s(f64::from(pairs), gain, off, stall) <= share_lost(gain) * earned_in
}

/// Time between two probe pairs of the probation: `pair` is the length of one, `gain` the proven gain, `stall` the
/// standstill that switching off and on again causes.
pub fn probe_interval_s(pair: f64, gain: f64, stall: f64) -> f64 {
    // Off costs this share of what on does. A pair is off for half its length, and for up to as long the change is on its
    // way back.
    let share = if gain.is_finite() { share_lost(gain) } else { 0.0 };
    let affordable = (PROBE_GAIN_MAX * share).min(PROBE_COST_MAX);
    let apart = if affordable > 0.0 {
        ((share * pair + stall) / affordable).min(PROBE_INTERVAL_MAX_S)
    } else {
        0.0
    };
    apart.max(pair * PROBATION_SPACING as f64)
}

/// Time between two probe pairs after the probation of a change that protects: an off block is damage there. Each of
/// `fine` pairs in a row without a suspicion doubles the time from `first`, up to [`PROBE_INTERVAL_MAX_S`].
pub fn doubled_interval_s(first: f64, fine: u32) -> f64 {
    (first * 2_f64.powi(fine.min(64) as i32))
        .min(PROBE_INTERVAL_MAX_S)
        .max(first)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_fine_pair_doubles_the_time_to_the_next_up_to_a_day() {
        let after = |fine| doubled_interval_s(1800.0, fine);
        assert_eq!((after(0), after(1), after(5)), (1800.0, 3600.0, 57_600.0));
        assert_eq!((after(6), after(u32::MAX)), (86_400.0, 86_400.0));
        // A longer interval that a person asks for stays.
        assert_eq!(doubled_interval_s(100_000.0, 3), 100_000.0);
    }

    #[test]
    fn noisy_machines_get_more_pairs_and_none_stays_none() {
        assert_eq!(probation_pairs(0, 0.1, 0.1), 0);
        assert_eq!(probation_pairs(30, 0.02, 0.1), 30);
        // (3.8 · 0.1 · 1.15 / 0.06)² = 53.05.
        assert_eq!(probation_pairs(30, 0.1, 0.15), 54);
        assert_eq!(probation_pairs(30, 1.0, 0.15), 120);
    }

    #[test]
    fn the_long_washout_is_four_times_the_usual_one_and_at_least_eight_seconds() {
        assert_eq!((long_washout_s(0.5), long_washout_s(3.0)), (8.0, 12.0));
    }
}
