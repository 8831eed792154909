//! Estimates a server's work while nothing is counted from the number of waits of its threads.
//!
//! A server with a thread per connection waits once per request, counted or not. So *hits ÷ waits* of a window, times
//! the waits of the rest, is the work of the rest. The ratio hardly varies (MariaDB: 0.964 to 0.972 waits per statement
//! over three loads). One short window every few seconds is enough, and readings without a window are valid too.
//!
//! A ratio stays in use after its window. After a change, the old ratio lasts until the next window ends
//! ([`lag`](crate::turns::lag)), and comparisons drop that time. Windows are never summed, because they may belong to
//! different arms of a trial.
//!
//! Event loops and thread pools serve more requests per wait the busier they are, and counting makes them busier. So
//! threads that wait for several connections are refused ([`Waits`](homeostat_meters::waits::Waits)), and so is a ratio
//! above 1.1. A costlier request then always reads as less work, up to a third too little if other waits are frequent
//! (computed: M/M/1 0.2 points of 10, pools of eight 3.2; docs/meters.md).

/// Above this ratio, one wait serves several units.
const HITS_PER_WAIT_MAX: f64 = 1.1;
/// … and below this ratio, most waits are for something else.
const HITS_PER_WAIT_MIN: f64 = 0.2;
/// A window with fewer hits is void (the ratio of 300 varies by about 2 %) …
const HITS_MIN: f64 = 300.0;
/// … and after this many in a row, windows never will suffice.
const THIN_MAX: u32 = 5;
/// A window is void if reading the waits, at both ends together, took a larger share of it.
const LOOK_MAX: f64 = 0.2;
/// Windows that decide together whether waits may stand for hits: a single one may be chance.
const JUDGED: usize = 3;

/// Number of waits of the threads at a moment.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Waited {
    pub(crate) waits: f64,
    /// Hits in the middle of reading all threads.
    pub(crate) hits: f64,
    /// Duration of that reading (seconds).
    pub(crate) took: f64,
}

#[derive(Clone, Debug)]
pub(super) struct Calibration {
    /// How long a ratio stays valid (seconds): the time that comparisons drop after a change
    /// ([`lag`](crate::turns::lag)).
    speaks: f64,
    /// The last valid ratio, and the end of its window.
    known: Option<(f64, f64)>,
    /// Hits and waits of the last windows, newest last.
    last: Vec<(f64, f64)>,
    /// Void windows since then in which the program was active.
    thin: u32,
}

impl Calibration {
    pub(super) fn new(speaks: f64) -> Self {
        Self {
            speaks,
            known: None,
            last: Vec::new(),
            thin: 0,
        }
    }

    /// Excuses windows with few hits: the program was idle, or windows are growing.
    pub(super) fn excuse(&mut self) {
        self.thin = 0;
    }

    /// Adds a window with its start and end (seconds).
    pub(super) fn window(&mut self, begun: (Waited, f64), ended: (Waited, f64)) {
        let ((from, begun), (to, ended)) = (begun, ended);
        let (hits, waits) = (to.hits - from.hits, to.waits - from.waits);
        if hits < HITS_MIN || from.took + to.took > LOOK_MAX * (ended - begun) {
            self.thin += 1;
            return;
        }
        self.thin = 0;
        if self.last.len() == JUDGED {
            self.last.remove(0);
        }
        self.last.push((hits, waits));
        let ratio = hits / waits.max(1.0);
        // An unfit ratio is not used until it is judged: it may be chance or temporary.
        self.known = is_fit(ratio).then_some((ratio, ended));
    }

    /// The current ratio, if a recent window gives one.
    pub(super) fn hits_per_wait(&self, now: f64) -> Option<f64> {
        let (ratio, at) = self.known?;
        (now - at <= self.speaks).then_some(ratio)
    }

    /// Whether waits may stand for hits, as far as known.
    ///
    /// # Errors
    /// A sentence: they may not.
    pub(super) fn judge(&self) -> Result<(), String> {
        if self.thin >= THIN_MAX {
            return Err(format!(
                "it ran fewer than {HITS_MIN} times in each of {THIN_MAX} windows, or adding up how often its threads waited took too long, so how often \
                 it runs for each wait is not told"
            ));
        }
        if self.last.len() < JUDGED {
            return Ok(());
        }
        let (hits, waits) = self.last.iter().fold((0.0, 0.0), |s, w| (s.0 + w.0, s.1 + w.1));
        let ratio = hits / f64::max(waits, 1.0);
        if is_fit(ratio) {
            Ok(())
        } else {
            Err(format!(
                "its threads run it {ratio:.2} times for each time that they wait, and what they do is told by that only between \
                 {HITS_PER_WAIT_MIN} and {HITS_PER_WAIT_MAX}"
            ))
        }
    }
}

fn is_fit(ratio: f64) -> bool {
    (HITS_PER_WAIT_MIN..=HITS_PER_WAIT_MAX).contains(&ratio)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A window of 50 ms that ended at this moment.
    fn window(calibration: &mut Calibration, hits: f64, waits: f64, at: f64) {
        let end = Waited {
            waits,
            hits,
            took: 0.001,
        };
        calibration.window((Waited::default(), at - 0.05), (end, at));
    }

    #[test]
    fn the_last_window_with_enough_hits_tells_the_ratio_for_a_while() {
        let mut calibration = Calibration::new(10.0);
        window(&mut calibration, 150.0, 160.0, 1.0);
        assert_eq!(calibration.hits_per_wait(1.0), None);
        window(&mut calibration, 500.0, 500.0, 2.0);
        assert_eq!(
            calibration.hits_per_wait(3.0),
            Some(1.0),
            "nothing of the one before"
        );
        window(&mut calibration, 400.0, 500.0, 6.0);
        assert_eq!(calibration.hits_per_wait(16.0), Some(0.8));
        assert_eq!(calibration.hits_per_wait(16.1), None);
        // The look was held up: it may be off by as much as it took.
        let late = Waited {
            waits: 1_000.0,
            hits: 1_000.0,
            took: 0.02,
        };
        calibration.window((Waited::default(), 16.05), (late, 16.1));
        assert_eq!(calibration.hits_per_wait(16.1), None);
    }

    #[test]
    fn windows_with_few_hits_are_not_waited_for_for_ever() {
        let mut calibration = Calibration::new(10.0);
        for at in 0..4 {
            window(&mut calibration, 100.0, 100.0, f64::from(at));
        }
        assert_eq!(calibration.judge(), Ok(()));
        window(&mut calibration, 400.0, 400.0, 4.0);
        for at in 5..10 {
            assert_eq!(calibration.judge(), Ok(()));
            window(&mut calibration, 100.0, 100.0, f64::from(at));
        }
        assert!(calibration.judge().unwrap_err().contains("fewer than 300 times"));
        calibration.excuse();
        assert_eq!(calibration.judge(), Ok(()), "it was idle");
    }

    #[test]
    fn whoever_does_several_units_at_a_wait_is_told_by_three_windows_and_says_nothing_until_then() {
        let judged = |ratios: &[f64]| {
            let mut calibration = Calibration::new(10.0);
            for ratio in ratios {
                window(&mut calibration, 1_000.0 * ratio, 1_000.0, 1.0);
            }
            (calibration.hits_per_wait(1.0).is_some(), calibration.judge())
        };
        assert_eq!(judged(&[1.03]), (true, Ok(())));
        // By chance.
        assert_eq!(judged(&[1.03, 1.03, 1.12]), (false, Ok(())));
        assert_eq!(judged(&[1.2, 1.2]), (false, Ok(())), "not yet");
        assert!(judged(&[1.2, 1.2, 1.2]).1.unwrap_err().contains("1.20 times"));
        assert_eq!(judged(&[0.4, 0.4, 0.4]), (true, Ok(())));
        let mut calibration = Calibration::new(10.0);
        (0..3).for_each(|_| window(&mut calibration, 500.0, 5_000.0, 1.0));
        assert!(calibration.judge().unwrap_err().contains("0.10 times"));
    }
}
