//! The coins of an experiment.
//!
//! ChaCha12 keyed by the policy's seed and the experiment's number: independent of everything a workload can see,
//! and the same again when the run is replayed. The engine draws no randomness of its own.

use homeostat_model::ExperimentId;
use rand_chacha::ChaCha12Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

/// Independent coins.
pub(crate) struct Coins {
    generator: ChaCha12Rng,
}

impl Coins {
    /// The coins of one experiment.
    pub(crate) fn new(seed: u64, experiment: ExperimentId) -> Self {
        let mut key = [0u8; 32];
        key[..8].copy_from_slice(&seed.to_le_bytes());
        key[8..16].copy_from_slice(&experiment.0.to_le_bytes());
        key[16..24].copy_from_slice(b"homeosta");
        Self {
            generator: ChaCha12Rng::from_seed(key),
        }
    }

    /// The onset slot of a stage: uniform over `1..=8`.
    pub(crate) fn onset(&mut self) -> usize {
        1 + (self.generator.next_u32() & 7) as usize
    }

    /// One fair coin.
    pub(crate) fn toss(&mut self) -> bool {
        self.generator.next_u32() & 1 == 1
    }

    /// A coin that is `true` with this chance.
    pub(crate) fn toss_with(&mut self, chance: f64) -> bool {
        if chance == 0.5 {
            self.toss()
        } else {
            f64::from(self.generator.next_u32()) < chance * 2f64.powi(32)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn coins_repeat_for_the_same_seed_and_differ_between_experiments() {
        let run = |seed, id| {
            let mut coins = Coins::new(seed, ExperimentId(id));
            (0..64).map(|_| coins.toss()).collect::<Vec<_>>()
        };
        assert_eq!(run(1, 1), run(1, 1));
        assert_ne!(run(1, 1), run(1, 2));
        assert_ne!(run(1, 1), run(2, 1));
        let heads = (0..1000u64).flat_map(|i| run(7, i)).filter(|c| *c).count();
        assert!((31_000..33_000).contains(&heads), "{heads} of 64000");
    }

    #[test]
    fn an_uneven_coin_is_as_uneven_as_asked() {
        let mut coins = Coins::new(3, ExperimentId(6));
        let heads = (0..10_000).filter(|_| coins.toss_with(0.75)).count();
        assert!((7_300..7_700).contains(&heads), "{heads}");
    }

    #[test]
    fn every_onset_is_as_likely_as_any_other() {
        let mut coins = Coins::new(3, ExperimentId(5));
        let mut count = [0; 9];
        for _ in 0..8000 {
            count[coins.onset()] += 1;
        }
        assert_eq!(count[0], 0);
        assert!(count[1..].iter().all(|n| (880..1120).contains(n)), "{count:?}");
    }
}
