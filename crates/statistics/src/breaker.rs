//! The circuit breaker: must an on block end at once? It is a fuse, not a statistical test. Scores are means over one or
//! two seconds (log units, more is better). A block is broken when a mean falls below the last off block by more than
//! 20 % and eight scales. Load steps trip it once or twice an hour in a rough load. A broken block is no verdict; it
//! counts as a large loss.

use crate::robust::ln;
use serde::{Deserialize, Serialize};

/// A fall by this share trips the breaker, if it is beyond the noise.
pub const FALL_MIN: f64 = 0.20;
/// … and if it exceeds this many scales of such means.
pub const SCALES_MIN: f64 = 8.0;

/// A circuit breaker.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Breaker {
    /// Tolerated fall of a score (log units, positive).
    fall: f64,
    reference: Option<f64>,
    trips: u32,
    tripped: bool,
}

impl Breaker {
    /// `scale`: standard deviation of such a mean (log units). If it is no number, only the 20 % rule holds.
    pub fn new(scale: f64) -> Self {
        let share = -ln(1.0 - FALL_MIN);
        let noise = if scale.is_finite() {
            SCALES_MIN * scale
        } else {
            0.0
        };
        Self {
            fall: share.max(noise),
            reference: None,
            trips: 0,
            tripped: false,
        }
    }

    /// An off block ended with this score.
    pub fn off_block(&mut self, score: f64) {
        if score.is_finite() {
            self.reference = Some(score);
        }
    }

    /// A block starts: the breaker is armed again.
    pub fn block_started(&mut self) {
        self.tripped = false;
    }

    /// Whether the on block must end after this score of the last seconds. −∞ (no work) trips, NaN does not. Never
    /// trips without an earlier off block. Counts one trip per block.
    pub fn trips(&mut self, score: f64) -> bool {
        let Some(reference) = self.reference else {
            return false;
        };
        if self.tripped || score < reference - self.fall {
            if !self.tripped {
                self.trips = self.trips.saturating_add(1);
            }
            self.tripped = true;
        }
        self.tripped
    }

    /// Whether the score is below the reference by more than this share and the breaker's fall. Counts nothing.
    pub fn below(&self, score: f64, share: f64) -> bool {
        let fall = self.fall.max(-ln(1.0 - share.clamp(0.0, 0.999)));
        self.reference.is_some_and(|reference| score < reference - fall)
    }

    /// Whether it has tripped in the block that runs.
    pub fn tripped(&self) -> bool {
        self.tripped
    }

    /// How far a score may fall below the last off block (log units).
    pub fn fall(&self) -> f64 {
        self.fall
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trips_at_a_fall_of_a_fifth_and_counts_it_once() {
        let mut b = Breaker::new(0.01);
        assert!(!b.trips(-100.0), "nothing to compare with");
        b.off_block(2.0);
        b.block_started();
        assert!(!b.trips(2.0 + 0.81f64.ln()));
        assert!(b.trips(2.0 + 0.79f64.ln()));
        assert!(b.trips(2.0), "stays tripped until the next block");
        b.block_started();
        assert!(!b.trips(2.0));
    }

    #[test]
    fn a_collapse_is_more_than_a_fall() {
        let mut b = Breaker::new(0.01);
        assert!(!b.below(-100.0, 0.8), "nothing to compare with");
        b.off_block(2.0);
        assert!(!b.below(2.0 + 0.3f64.ln(), 0.8));
        assert!(b.below(2.0 + 0.19f64.ln(), 0.8));
        assert!(b.below(f64::NEG_INFINITY, 0.8) && !b.below(f64::NAN, 0.8));
    }

    #[test]
    fn noise_widens_the_fall_and_nonsense_does_not() {
        assert!((Breaker::new(0.05).fall() - 0.40).abs() < 1e-12);
        for scale in [f64::NAN, f64::INFINITY, -1.0, 0.0] {
            assert!((Breaker::new(scale).fall() - 0.2231).abs() < 1e-3);
        }
        let mut b = Breaker::new(0.0);
        b.off_block(f64::NAN);
        assert!(
            !b.trips(f64::NEG_INFINITY),
            "a reference without a number is none"
        );
        b.off_block(1.0);
        assert!(!b.trips(f64::NAN));
        assert!(b.trips(f64::NEG_INFINITY));
    }
}
