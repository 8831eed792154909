//! What a server did while nothing of it was counted, by how often its threads waited.
//!
//! A server that gives a thread to each connection waits once for each request, whether it is counted or not: *hits ÷ waits* of a window
//! times the waits of the rest is what it did in the rest. That ratio hardly varies (of MariaDB .964 to .972 waits for a statement over three
//! loads), so one short window in some seconds tells it, and each reading has something to say, also one with no window in it.
//!
//! It speaks for what comes after its window, so after a change it is that of before until the next window has ended
//! ([`lag`](crate::turns::lag)): who compares leaves that out. Nothing of one window is added to the next, which may be of another arm of a trial.
//!
//! An event loop, or a pool of threads, finds more requests at each wait the busier it is, and is busier while it is counted: the ratio of a
//! window is not that of the rest. Who waits for several connections at once is refused by what it waits for
//! ([`Waits`](homeostat_meters::waits::Waits)); and here whatever runs more than 1.1 times for each wait. The ratio of a window is then near to
//! that of the rest, and a dearer request is told as less work in any case, though by up to a third too little where the rest of the waits are for other
//! things (a statistician's reckoning: M/M/1 .2 points of 10, pools of eight 3.2; docs/meters.md).

/// Beyond this ratio several units are done at one wait.
const HITS_PER_WAIT_MAX: f64 = 1.1;
/// … and below this one most of its waits are for something else.
const HITS_PER_WAIT_MIN: f64 = 0.2;
/// A window with fewer hits does not tell the ratio (of 300 it varies by some 2 %) …
const HITS_MIN: f64 = 300.0;
/// … and so many of them, one after the other, tell that none will.
const THIN_MAX: u32 = 5;
/// Neither does one of which adding up the waits took a larger share, at both ends together.
const LOOK_MAX: f64 = 0.2;
/// So many windows together judge whether waits may stand for hits: of a single one that might be chance.
const JUDGED: usize = 3;

/// How often the threads had waited at a moment.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Waited {
    /// Since some fixed moment.
    pub(crate) waits: f64,
    /// Hits in the middle of looking at all threads.
    pub(crate) hits: f64,
    /// How long that look took (seconds).
    pub(crate) took: f64,
}

/// Hits for each wait.
#[derive(Clone, Debug)]
pub(super) struct Calibration {
    /// So long after its window the ratio still speaks (seconds): as long as who compares leaves out after a change ([`lag`](crate::turns::lag)).
    speaks: f64,
    /// The last window that told it: the ratio, and when it ended.
    known: Option<(f64, f64)>,
    /// Hits and waits of the last windows, the newest last.
    last: Vec<(f64, f64)>,
    /// Windows since then that did not tell it, though the program worked.
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

    /// The last windows had few hits because the program rested, or because windows are growing.
    pub(super) fn excuse(&mut self) {
        self.thin = 0;
    }

    /// A window has begun and ended so, at these moments (seconds).
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
        // Chance, or something that does not last, or it will be judged: until then it says nothing.
        self.known = is_fit(ratio).then_some((ratio, ended));
    }

    /// What it is now, if anything that was counted lately says so.
    pub(super) fn hits_per_wait(&self, now: f64) -> Option<f64> {
        let (ratio, at) = self.known?;
        (now - at <= self.speaks).then_some(ratio)
    }

    /// Whether waits may stand for hits, as far as that is known.
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
