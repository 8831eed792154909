//! How fast does an effect set in after a switch?
//!
//! A block that begins too early shows a part of the effect, one that begins too late wastes time. So the readings after past
//! switches to *on* are laid over each other, relative to the block before without the change, and the curve
//! `θ (1 − exp(−t/τ))` is fitted to their means. Only past switches count, so what is chosen from it does not depend on the
//! coins to come. Switches to *off* are left out: what an undo leaves behind must not lengthen the wait for it.

use crate::robust::exp;
use serde::{Deserialize, Serialize};

/// Readings are put together by their time after the switch in bins of this length (seconds).
pub const BIN_S: f64 = 0.25;
/// So many bins: fifteen seconds.
const BINS: usize = 60;
/// Time constants that are told from each other (seconds).
const CONSTANTS: [f64; 13] = [0.0, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 8.0, 12.0];
/// Another time constant than the one that was told is believed after so many switches …
const EDGES_MIN: u32 = 4;
/// … and when it fits better by so much, in variances of a reading. Two would do for independent noise; that of neighbouring
/// readings is not.
const BETTER_MIN: f64 = 8.0;

/// Sums over the readings of one bin.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
struct Bin {
    count: f64,
    sum: f64,
    squares: f64,
}

/// What followed the switches so far.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Onset {
    bins: Vec<Bin>,
    edges: u32,
}

impl Onset {
    /// Takes the readings after one switch to on: (seconds from the switch to the middle of the reading, score minus that of the
    /// block before in log units). Readings before the switch, after fifteen seconds, or that are no numbers are left out.
    pub fn edge(&mut self, readings: impl IntoIterator<Item = (f64, f64)>) {
        self.bins.resize(BINS, Bin::default());
        let mut any = false;
        for (after, score) in readings {
            if !(after >= 0.0 && score.is_finite()) {
                continue;
            }
            if let Some(bin) = self.bins.get_mut((after / BIN_S) as usize) {
                bin.count += 1.0;
                bin.sum += score;
                bin.squares += score * score;
                any = true;
            }
        }
        self.edges = self.edges.saturating_add(u32::from(any));
    }

    /// The time constant (seconds): `told` while the readings say nothing else.
    pub fn constant(&self, told: f64) -> f64 {
        let noise = self.noise();
        if self.edges < EDGES_MIN || noise <= 0.0 {
            return told;
        }
        let misfit = |constant: f64| self.misfit(constant);
        let best = CONSTANTS
            .into_iter()
            .min_by(|a, b| misfit(*a).total_cmp(&misfit(*b)))
            .unwrap_or(told);
        if misfit(told) - misfit(best) >= BETTER_MIN * noise {
            best
        } else {
            told
        }
    }

    /// Variance of one reading around the mean of its bin.
    fn noise(&self) -> f64 {
        let (squares, freedom) = self.filled().fold((0.0, 0.0), |(squares, freedom), (_, bin)| {
            let around = bin.squares - bin.sum * bin.sum / bin.count;
            (squares + around.max(0.0), freedom + bin.count - 1.0)
        });
        if freedom > 0.0 { squares / freedom } else { 0.0 }
    }

    /// Sum of squares that the best curve with this time constant leaves, but for what does not depend on it.
    fn misfit(&self, constant: f64) -> f64 {
        let (mut across, mut along) = (0.0, 0.0);
        for (at, bin) in self.filled() {
            let shape = risen(at, constant);
            across += shape * bin.sum;
            along += shape * shape * bin.count;
        }
        if along > 0.0 {
            -across * across / along
        } else {
            0.0
        }
    }

    /// Bins with readings, by their middle (seconds).
    fn filled(&self) -> impl Iterator<Item = (f64, &Bin)> {
        let middle = |index: usize| (index as f64 + 0.5) * BIN_S;
        let all = self.bins.iter().enumerate();
        all.filter(|(_, bin)| bin.count > 0.0)
            .map(move |(index, bin)| (middle(index), bin))
    }
}

/// The share of an effect with this time constant that a block shows whose measured part begins `washout` after the switch; what
/// was there before goes as slowly as it comes. All in seconds.
pub fn shown(constant: f64, washout: f64, measured: f64) -> f64 {
    if !(constant > 0.0 && measured > 0.0) {
        return 1.0;
    }
    let missing = exp(-washout / constant) * constant / measured * (1.0 - exp(-measured / constant));
    (1.0 - 2.0 * missing).max(0.0)
}

/// The share of an effect that is there after so many seconds.
fn risen(after: f64, constant: f64) -> f64 {
    if constant > 0.0 {
        1.0 - exp(-after / constant)
    } else {
        1.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simulation::Random;

    /// Edges of a program that gains so much with this time constant, read four times a second for three seconds.
    fn seen(edges: u32, gain: f64, constant: f64, noise: f64, seed: u64) -> Onset {
        let mut random = Random::new(seed);
        let mut onset = Onset::default();
        for _ in 0..edges {
            let level = noise * random.gaussian();
            let readings: Vec<(f64, f64)> = (0..12)
                .map(|i| {
                    let after = (f64::from(i) + 0.5) * BIN_S;
                    (
                        after,
                        gain * risen(after, constant) + level + noise * random.gaussian(),
                    )
                })
                .collect();
            onset.edge(readings);
        }
        onset
    }

    #[test]
    fn a_quick_and_a_slow_onset_are_told_from_what_was_said() {
        for seed in 0..20 {
            let quick = seen(12, 0.15, 0.0, 0.02, seed).constant(1.5);
            assert!(quick <= 0.35, "{quick}");
            let slow = seen(12, 0.15, 1.5, 0.02, seed).constant(0.1);
            assert!((0.75..=3.0).contains(&slow), "{slow}");
        }
    }

    #[test]
    fn noise_says_nothing_and_few_edges_are_not_asked() {
        let mut wrong = 0;
        for seed in 0..200 {
            wrong += u32::from(seen(30, 0.0, 0.0, 0.05, seed).constant(0.5) != 0.5);
        }
        assert!(wrong <= 10, "{wrong} of 200");
        assert_eq!(seen(3, 0.5, 5.0, 0.01, 1).constant(0.5), 0.5);
        assert_eq!(Onset::default().constant(0.7), 0.7);
    }

    #[test]
    fn a_block_shows_more_of_an_effect_the_later_it_begins() {
        assert_eq!(shown(0.0, 0.5, 1.0), 1.0);
        assert!((shown(1.5, 2.25, 1.5) - 0.718).abs() < 0.001);
        assert!(shown(0.5, 0.75, 1.0) > 0.8 && shown(0.5, 2.0, 1.0) > 0.98);
        assert_eq!(shown(1e9, 0.0, 1.0), 0.0);
    }

    #[test]
    fn readings_that_are_none_are_left_out() {
        let mut onset = Onset::default();
        onset.edge([(-1.0, 0.3), (f64::NAN, 0.3), (1.0, f64::NAN), (1e9, 0.3)]);
        assert_eq!(onset.edges, 0);
        assert_eq!(onset.constant(0.4), 0.4);
    }
}
