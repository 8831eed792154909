//! Memory that grows and does not come back: who may be leaking, since when, and when it is used up.
//!
//! Only memory that no file backs is looked at: pages of files come and go with what is read, and harm nobody. What was
//! written to swap is not in it. One figure a minute of each workload's anonymous memory is kept, in a ring of fixed size; when it is full every second
//! figure goes and the distance doubles, so that it reaches back from an hour to days. A program that fills a cache of its
//! own, or starts up, grows fast and then ever more slowly; one that leaks grows on. So it must have grown for half an hour
//! at least, next to without falling, and in the later half as in the earlier one.

use crate::engine::Engine;
use homeostat_model::{Advice, Bytes, Nanoseconds, WorkloadId};
use std::collections::VecDeque;

/// Figures kept of one workload.
const POINTS_MAX: usize = 64;
/// Figures needed for a judgement …
const POINTS_MIN: usize = 24;
/// … over at least this time.
const WINDOW_MIN: Nanoseconds = Nanoseconds::from_secs(1800);
/// Distance of figures at the start …
const EVERY: Nanoseconds = Nanoseconds::from_secs(60);
/// … and at most: the ring then reaches back three days or so, and the oldest figure goes.
const EVERY_MAX: Nanoseconds = Nanoseconds::from_secs(3840);
/// Growth that is worth telling: so much …
const GROWN_MIN: u64 = 32 * 1024 * 1024;
/// … and this share of what there was.
const GROWN_SHARE: f64 = 0.05;
/// It may have fallen now and then by so much of what it has grown in all.
const FALLEN_MAX: f64 = 0.1;
/// In each later part of the window it grew at least this share of what the whole would have it grow there.
const LATER_MIN: f64 = 0.5;

/// The past of one workload.
#[derive(Clone, Debug)]
pub(crate) struct Growth {
    every: Nanoseconds,
    points: VecDeque<(Nanoseconds, u64)>,
}

impl Default for Growth {
    fn default() -> Self {
        Self {
            every: EVERY,
            points: VecDeque::new(),
        }
    }
}

/// Steady growth.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Suspect {
    /// Since when.
    pub(crate) since: Nanoseconds,
    /// Anonymous memory then and now, in bytes.
    pub(crate) from: u64,
    pub(crate) to: u64,
    /// Bytes per second: over the whole window or over its last quarter, whichever is more. A leak may quicken with the load,
    /// and how long memory lasts is better told too short than too long.
    pub(crate) rate: f64,
}

impl Growth {
    /// Notes a figure. Returns whether it was kept: it is time for a judgement.
    pub(crate) fn note(&mut self, now: Nanoseconds, bytes: u64) -> bool {
        if self
            .points
            .back()
            .is_some_and(|(at, _)| now.saturating_sub(*at) < self.every)
        {
            return false;
        }
        if self.points.len() == POINTS_MAX {
            if self.every < EVERY_MAX {
                let mut keep = false;
                self.points.retain(|_| {
                    keep = !keep;
                    keep
                });
                self.every = self.every * 2;
            } else {
                self.points.pop_front();
            }
        }
        self.points.push_back((now, bytes));
        true
    }

    /// Whether it grows and grows.
    pub(crate) fn suspect(&self) -> Option<Suspect> {
        let ((since, from), (now, to)) = (*self.points.front()?, *self.points.back()?);
        let length = now - since;
        if self.points.len() < POINTS_MIN || length < WINDOW_MIN {
            return None;
        }
        let grown = to.checked_sub(from)?;
        if grown < GROWN_MIN || (grown as f64) < GROWN_SHARE * from as f64 {
            return None;
        }
        let steps = self.points.iter().zip(self.points.iter().skip(1));
        // A sensor may tell nonsense near the end of the numbers.
        let fallen = steps.fold(0u64, |sum, (a, b)| sum.saturating_add(a.1.saturating_sub(b.1)));
        if fallen as f64 > FALLEN_MAX * grown as f64 {
            return None;
        }
        let mut rate = grown as f64 / length.as_secs_f64();
        for part in [2, 4] {
            let from_index = self.points.len() - 1 - (self.points.len() - 1) / part;
            let (at, then) = self.points[from_index];
            let later = to.saturating_sub(then) as f64;
            let seconds = (now - at).as_secs_f64();
            if later < LATER_MIN * seconds / length.as_secs_f64() * grown as f64 {
                return None;
            }
            if part == 4 {
                rate = rate.max(later / seconds);
            }
        }
        Some(Suspect {
            since,
            from,
            to,
            rate,
        })
    }
}

impl Engine {
    /// Notes what a workload has of anonymous memory, where that was looked at, and judges it when it is time.
    pub(crate) fn note_growth(&mut self, id: &WorkloadId, anonymous: Bytes) {
        let now = self.now;
        let Some(w) = self.workloads.get_mut(id) else {
            return;
        };
        if anonymous > Bytes::ZERO && w.growth.note(now, anonymous.0) {
            self.judge_growth(id);
        }
    }

    /// Judges a workload of which a figure was kept: advice while it grows, none when it does not any more.
    fn judge_growth(&mut self, id: &WorkloadId) {
        let Some(w) = self.workloads.get(id) else { return };
        let key = format!("memory/growth/{id}");
        let Some(s) = w.growth.suspect() else {
            self.advice.remove(&key);
            return;
        };
        let available = self.machine_sample.memory_available;
        let left = Nanoseconds::from_secs_f64((available.0 as f64 / s.rate).min(1e9));
        let hourly = Bytes((s.rate * 3600.0) as u64);
        self.advise(vec![Advice {
            id: key,
            workload: Some(id.clone()),
            finding: format!(
                "its own memory (anonymous) has grown steadily for {}, from {} to {} ({hourly} an hour); at that rate the {available} \
                 that are available last for {left}",
                self.now - s.since,
                Bytes(s.from),
                Bytes(s.to),
            ),
            remedy: "find out whether it leaks; until then give it a limit (MemoryHigh= in its unit), so that it pushes nobody \
                     else out, or restart it in time"
                .into(),
            risk: "a program that fills a cache on purpose looks the same until the cache is full".into(),
            setting: None,
        }]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn after(minutes: u64, bytes: impl Fn(u64) -> u64) -> Growth {
        let mut growth = Growth::default();
        for minute in 0..minutes {
            growth.note(Nanoseconds::from_secs(minute * 60), bytes(minute));
        }
        growth
    }

    #[test]
    fn what_grows_on_is_suspected_with_its_rate() {
        let leak = after(50, |m| 500 * MIB + m * 2 * MIB);
        let s = leak.suspect().unwrap();
        assert_eq!((s.since, s.from, s.to), (Nanoseconds::ZERO, 500 * MIB, 598 * MIB));
        assert!((s.rate * 60.0 - 2.0 * MIB as f64).abs() < 1.0, "{s:?}");
        // Not yet after a quarter of an hour.
        assert_eq!(after(20, |m| 500 * MIB + m * 5 * MIB).suspect(), None);
    }

    #[test]
    fn a_leak_that_quickens_is_told_with_its_latest_rate() {
        let s = after(60, |m| {
            500 * MIB
                + if m < 40 {
                    m * MIB
                } else {
                    40 * MIB + (m - 40) * 4 * MIB
                }
        })
        .suspect()
        .unwrap();
        assert!((s.rate * 60.0 / MIB as f64 - 4.0).abs() < 0.1, "{s:?}");
    }

    #[test]
    fn nonsense_near_the_end_of_the_numbers_is_no_growth() {
        // Found by the fault campaign, seed 35.
        let wild = after(60, |m| if m % 2 == 0 { u64::MAX - m } else { m });
        assert_eq!(wild.suspect(), None);
        let wild = after(60, |m| {
            if m == 59 {
                u64::MAX
            } else if m % 3 == 0 {
                u64::MAX / 2
            } else {
                0
            }
        });
        assert_eq!(wild.suspect(), None);
    }

    #[test]
    fn caches_that_fill_start_ups_and_what_comes_and_goes_are_not() {
        // Half of what is missing every ten minutes.
        let cache = after(120, |m| {
            500 * MIB + (400.0 * MIB as f64 * (1.0 - 0.93f64.powi(m as i32))) as u64
        });
        assert_eq!(cache.suspect(), None);
        let started = after(120, |m| if m < 5 { m * 100 * MIB } else { 500 * MIB });
        assert_eq!(started.suspect(), None);
        let saw = after(120, |m| 500 * MIB + (m % 20) * 10 * MIB + m * MIB / 2);
        assert_eq!(saw.suspect(), None);
        let still = after(120, |_| 500 * MIB);
        assert_eq!(still.suspect(), None);
        let little = after(120, |m| 4096 * MIB + m * MIB);
        assert_eq!(little.suspect(), None, "three percent");
    }

    #[test]
    fn the_ring_is_bounded_and_reaches_back() {
        let mut growth = Growth::default();
        for minute in 0..30_000 {
            growth.note(Nanoseconds::from_secs(minute * 60), 500 * MIB + minute * MIB);
        }
        assert!(growth.points.len() <= POINTS_MAX);
        assert_eq!(growth.every, EVERY_MAX, "three weeks");
        let days =
            (growth.points.back().unwrap().0 - growth.points.front().unwrap().0).as_secs_f64() / 86400.0;
        assert!((2.0..4.0).contains(&days), "{days}");
        let mut growth = Growth::default();
        for second in 0..200_000 {
            growth.note(Nanoseconds::from_secs(second), 500 * MIB + second * MIB / 60);
        }
        assert!(growth.points.len() <= POINTS_MAX);
        let s = growth.suspect().unwrap();
        assert_eq!(s.since, Nanoseconds::ZERO, "two days back");
        assert!((s.rate - MIB as f64 / 60.0).abs() < 0.01 * MIB as f64, "{s:?}");
    }
}
