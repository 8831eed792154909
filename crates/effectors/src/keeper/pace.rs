//! When a group is checked again, and how to treat a group in which the kernel finds nothing.

use crate::keeper::look::{GROWTH, Look};
use std::time::{Duration, Instant};

/// The largest growth decays by this share with each check.
const FORGOTTEN: u64 = 16;
/// Shortest pause. Measured with a reader of 3.3 GB/s, 8 MiB of read-ahead and a target of 37 MiB. With 4 ms it came to
/// 56 MiB in nearly every tenth of a second. With 1 ms it comes to 40 MiB, for no more CPU time.
pub(super) const PAUSE_MIN: Duration = Duration::from_millis(1);
/// Longest pause: an idle group may begin to read.
const PAUSE_MAX: Duration = Duration::from_millis(50);
/// A pause exceeds the one before by this share at most.
const LONGER: u32 = 4;
/// Consecutive failures before unfound memory is allowed. If all pages are fresh read-ahead, the kernel finds nothing
/// for some milliseconds. With that reader this happens seven times a second. With 50 ms each time it came to 100 MiB.
pub(super) const STUCK_AFTER: u32 = 4;
/// First period for which unfound memory is allowed. It doubles each time that nothing is found again.
pub(super) const STUCK_MIN: Duration = Duration::from_millis(50);
/// Longest such period.
pub(super) const STUCK_MAX: Duration = Duration::from_secs(3);
/// Rest after a check, in multiples of its CPU time: a third of a CPU at most for each group. (At a fifth, a reader of
/// 3.3 GB/s came to 60 MiB several times a second.)
pub(super) const REST: u32 = 2;
/// Most waiting time that counts for a rest: for writes, for a CPU, or because the daemon was stopped (`SIGSTOP`, the
/// freezer). Other groups get their turn, and no group is left alone for minutes.
const WAITED_MAX: Duration = Duration::from_secs(1);

/// How fast a group grows.
#[derive(Clone, Copy)]
pub(super) struct Pace {
    /// Time and use at the last check.
    at: Instant,
    used: u64,
    pause: Duration,
    /// Recent largest growth from one check to the next, decaying.
    pub(super) growth: u64,
}

impl Pace {
    pub(super) fn new(now: Instant) -> Self {
        Self {
            at: now,
            used: 0,
            pause: PAUSE_MIN,
            growth: 0,
        }
    }

    /// The pause after a check that found so much and left so much.
    pub(super) fn next(&mut self, now: Instant, found: u64, left: u64, limit: u64) -> Duration {
        let seconds = now.saturating_duration_since(self.at).as_secs_f64().max(1e-4);
        let grown = found.saturating_sub(self.used);
        let rate = grown as f64 / seconds;
        // Use before the first check is no growth.
        if self.used > 0 {
            self.growth = grown.max(self.growth - self.growth / FORGOTTEN);
        }
        let room = (limit / GROWTH) as f64;
        // The pause lengthens slowly: a standing group may just begin, and read-ahead comes in leaps.
        let wanted = if rate > 0.0 {
            Duration::try_from_secs_f64(room / rate).unwrap_or(PAUSE_MAX)
        } else {
            PAUSE_MAX
        };
        self.pause = wanted
            .min(self.pause + self.pause / LONGER)
            .clamp(PAUSE_MIN, PAUSE_MAX);
        (self.at, self.used) = (now, left);
        self.pause
    }
}

/// Consecutive checks without a find, this one included. `is_bare`: it also tried for memory not found before.
pub(super) fn found_nothing(before: u32, look: &Look, is_bare: bool, lasted: Duration) -> u32 {
    if look.is_stuck && lasted >= STUCK_MIN {
        // It waited for writes, so this is not fresh read-ahead.
        STUCK_AFTER
    } else if look.is_stuck {
        before.saturating_add(1)
    } else if look.left < look.found && is_bare {
        0
    } else {
        // Nothing had to be taken, which says nothing.
        before
    }
}

/// How long a group is left alone after a check with this CPU time and duration.
pub(super) fn rest(spent: Duration, lasted: Duration, has_others: bool) -> Duration {
    let waited = lasted.saturating_sub(spent).min(WAITED_MAX);
    (spent * REST).max(if has_others { waited * REST } else { waited })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::keeper::look::{MIB, less, tight};

    const AT_ONCE: Duration = Duration::from_millis(1);

    #[test]
    fn who_grows_fast_is_looked_at_often_and_who_stands_still_within_fifty_milliseconds() {
        let begun = Instant::now();
        let mut pace = Pace::new(begun);
        let limit = 40 << 20;
        let mut at = begun;
        // Nothing read: ever more rarely, within four tenths of a second.
        for _ in 0..20 {
            at += pace.next(at, 0, 0, limit);
        }
        assert_eq!(pace.pause, PAUSE_MAX);
        assert!(at - begun < Duration::from_millis(400), "{:?}", at - begun);
        // 100 MB/s: a quarter of the limit lasts for 0.1 s.
        at += PAUSE_MAX;
        assert_eq!(pace.next(at, 5_000_000, 0, limit), PAUSE_MAX);
        // 1 GB/s: 10 ms.
        at += PAUSE_MAX;
        let pause = pace.next(at, 50_000_000, 0, limit).as_secs_f64();
        assert!((pause - 0.0105).abs() < 0.001, "{pause}");
        // More than can be followed.
        at += PAUSE_MIN;
        assert_eq!(pace.next(at, 1 << 30, 0, limit), PAUSE_MIN);
        // 3.3 GB/s: a quarter of the limit lasts for 3 ms.
        at += Duration::from_millis(3);
        let pause = pace.next(at, 9_900_000, 0, limit);
        assert!(pause <= Duration::from_millis(4), "{pause:?}");
    }

    #[test]
    fn a_look_that_used_or_waited_for_much_is_followed_by_a_rest_and_one_that_was_stopped_by_a_short_one() {
        let ms = Duration::from_millis;
        assert_eq!(rest(ms(1), ms(1), false), ms(2));
        // The kernel waits for what is being written: as long as that, and others have two thirds of the time.
        assert_eq!(rest(ms(1), ms(101), false), ms(100));
        assert_eq!(rest(ms(1), ms(101), true), ms(200));
        // Stopped for an hour.
        assert_eq!(rest(ms(1), ms(3_600_000), false), ms(1_000));
        assert_eq!(rest(ms(1), ms(3_600_000), true), ms(2_000));
    }

    #[test]
    fn a_reader_that_leaps_is_left_with_so_much_less_that_it_comes_to_its_limit() {
        let mut pace = Pace::new(Instant::now());
        let (limit, leap) = (37 * MIB, 16 * MIB);
        let mut left = 28 * MIB;
        for moment in 0..50 {
            let found = left + leap;
            left = found.min(tight(limit, 3 * MIB, limit, pace.growth));
            pace.next(pace.at + PAUSE_MIN, found, left, limit);
            assert!(moment < 3 || found <= limit + MIB, "{moment}: {found}");
        }
        // It slows down.
        for _ in 0..50 {
            pace.next(pace.at + PAUSE_MIN, left + MIB, left, limit);
        }
        assert_eq!(tight(limit, 3 * MIB, limit, pace.growth), 27 * MIB - less());
    }

    #[test]
    fn only_a_group_of_which_nothing_is_found_time_after_time_is_left_with_more() {
        let look = |found, left, is_stuck| Look {
            found,
            left,
            held: None,
            is_stuck,
        };
        let mut times = 0;
        for _ in 1..STUCK_AFTER {
            times = found_nothing(times, &look(56, 24, true), true, AT_ONCE);
            assert!(times < STUCK_AFTER);
        }
        // Nothing to be taken in between.
        times = found_nothing(times, &look(20, 20, false), true, AT_ONCE);
        assert_eq!(
            found_nothing(times, &look(56, 24, true), true, AT_ONCE),
            STUCK_AFTER
        );
        // What was read ahead is there; what was taken beside what is left to it tells nothing.
        assert_eq!(found_nothing(times, &look(56, 20, false), true, AT_ONCE), 0);
        assert_eq!(found_nothing(times, &look(56, 20, false), false, AT_ONCE), times);
        // What is being written takes longer.
        assert_eq!(
            found_nothing(0, &look(56, 24, true), true, AT_ONCE * 100),
            STUCK_AFTER
        );
    }
}
