//! What a server did while nothing of it was counted, by how often its threads waited.
//!
//! A server that gives a thread to each connection waits once for each request, whether it is counted or not: *hits ÷ waits* of a window
//! times the waits of the rest is what it did in the rest. That ratio hardly varies (of MariaDB .969 waits for a statement, ± .3 % over three
//! loads), so one short window in some seconds tells it, and each reading has something to say, also one with no window in it.
//!
//! It does not hold for an event loop, which finds the more requests at each wait the busier it is: it is busier while it is counted, so that
//! the ratio of a window is not that of the rest, and a change that makes its work dearer is told as a gain. How far that can go follows from the ratio
//! itself: of a loop that is busy for a share *u* of its time each wait finds about *1 ÷ (1 − u)* requests, so a ratio *r* moves by *r − 1* of
//! what its work became dearer by. Up to [`HITS_PER_WAIT_MAX`] that is a tenth, and beyond it nothing is told.

/// Beyond this ratio several units are done at one wait.
const HITS_PER_WAIT_MAX: f64 = 1.1;
/// … and below this one most of its waits are for something else.
const HITS_PER_WAIT_MIN: f64 = 0.2;
/// So many hits tell the ratio; windows with fewer are taken together.
const HITS_MIN: f64 = 200.0;
/// So long after its window the ratio still speaks (seconds): a few times the time between two windows.
pub(super) const AGE_MAX: f64 = 20.0;

/// Hits for each wait.
#[derive(Clone, Debug, Default)]
pub(super) struct Calibration {
    /// Of windows that do not tell the ratio yet.
    hits: f64,
    waits: f64,
    /// The ratio, and when the window ended that told it.
    known: Option<(f64, f64)>,
}

impl Calibration {
    /// A window with so many hits and waits has ended.
    pub(super) fn window(&mut self, hits: f64, waits: f64, at: f64) {
        self.hits += hits;
        self.waits += waits;
        if self.hits >= HITS_MIN {
            self.known = Some((self.hits / self.waits.max(1.0), at));
            (self.hits, self.waits) = (0.0, 0.0);
        }
    }

    /// What it is now, if anything that was counted lately says so.
    pub(super) fn hits_per_wait(&self, now: f64) -> Option<f64> {
        let (ratio, at) = self.known?;
        (now - at <= AGE_MAX).then_some(ratio)
    }

    /// Whether waits may stand for hits, as far as that is known.
    ///
    /// # Errors
    /// A sentence: they may not.
    pub(super) fn judge(&self) -> Result<(), String> {
        match self.known {
            Some((ratio, _)) if ratio > HITS_PER_WAIT_MAX => Err(format!(
                "its threads run it {ratio:.2} times for each time that they wait (at most {HITS_PER_WAIT_MAX} can be told by the waits)"
            )),
            Some((ratio, _)) if ratio < HITS_PER_WAIT_MIN => Err(format!(
                "its threads run it {ratio:.2} times for each time that they wait (at least {HITS_PER_WAIT_MIN} can be told by the waits)"
            )),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_window_with_enough_hits_tells_the_ratio_for_a_while() {
        let mut calibration = Calibration::default();
        calibration.window(150.0, 160.0, 1.0);
        assert_eq!(calibration.hits_per_wait(1.0), None);
        calibration.window(50.0, 40.0, 2.0);
        assert_eq!(calibration.hits_per_wait(3.0), Some(1.0), "both together");
        calibration.window(400.0, 500.0, 6.0);
        assert_eq!(calibration.hits_per_wait(26.0), Some(0.8));
        assert_eq!(calibration.hits_per_wait(26.1), None);
    }

    #[test]
    fn an_event_loop_is_not_told_by_its_waits() {
        let judged = |hits, waits| {
            let mut calibration = Calibration::default();
            calibration.window(hits, waits, 0.0);
            calibration.judge()
        };
        assert_eq!(judged(100.0, 1.0), Ok(()), "not known yet");
        assert_eq!(judged(1_000.0, 970.0), Ok(()));
        assert_eq!(judged(1_000.0, 4_000.0), Ok(()));
        assert!(judged(1_000.0, 800.0).unwrap_err().contains("1.25 times"));
        assert!(judged(1_000.0, 0.0).is_err());
        assert!(judged(1_000.0, 6_000.0).unwrap_err().contains("at least"));
    }

    /// What the module's text says of an event loop: of its requests a tenth dearer, at the largest ratio that is told by waits, less than a
    /// fiftieth is told as more work.
    #[test]
    fn a_dearer_request_of_a_loop_is_told_as_hardly_any_gain() {
        let found = |busy: f64| 1.0 / (1.0 - busy);
        let busy = 1.0 - 1.0 / HITS_PER_WAIT_MAX;
        let gain = found(busy * 1.1) / found(busy) - 1.0;
        assert!(gain > 0.0 && gain < 0.02, "{gain}");
    }
}
