//! A chain of dependent loads through memory: each word read holds the index of the next.
//!
//! The IBM PowerVM Redbook (SG24-8171, Example C-3) demonstrates memory affinity with such a program: it steps
//! through a piece of heap, and one transaction is 16,777,216 loads. A load cannot begin before the one ahead of it
//! has ended, so the rate is the inverse of the latency, and with more memory than the translation buffers cover,
//! a good part of the latency is the walk through the page tables.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

/// Loads in one transaction (Example C-3: `REPEATTIMES` x `ITERATIONS`).
pub const LOADS_PER_TRANSACTION: u64 = 16_777_216;

/// Loads between two updates of the progress counter. About half a millisecond of cache misses: fine enough for
/// intervals of a second, coarse enough to cost nothing.
pub const LOADS_PER_BATCH: u64 = 4096;

/// Seed of the random order: the same chain in every run.
const SEED: u64 = 0x005E_ED0F_7E57;

/// Order in which the chain visits the memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Order {
    /// Downwards by one step at a time, then back to the top, as Example C-3. The hardware prefetcher can follow.
    Stride,
    /// One random cycle through all steps. Nothing can follow.
    Random,
}

/// Why no chain can be laid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ChainError {
    /// The step does not hold whole words.
    #[error(
        "a step of {step_bytes} bytes is not a positive multiple of 8; try 64 (a cache line) or 4096 (a page)"
    )]
    Step {
        /// Bytes asked for.
        step_bytes: usize,
    },
    /// Fewer than two steps fit.
    #[error(
        "the memory holds only {steps} step(s) of {step_bytes} bytes; take more memory or a smaller step"
    )]
    TooFewSteps {
        /// Steps that fit.
        steps: usize,
        /// Bytes of one step.
        step_bytes: usize,
    },
}

/// A closed chain through a region of memory.
#[derive(Clone, Copy, Debug)]
pub struct Chain<'a> {
    words: &'a [AtomicU64],
    step_words: usize,
    steps: usize,
}

impl<'a> Chain<'a> {
    /// Lays a chain that visits one word in every `step_bytes` bytes exactly once. Touches all of the memory.
    ///
    /// # Errors
    /// When the step is not made of whole words or fewer than two steps fit.
    pub fn lay(words: &'a [AtomicU64], step_bytes: usize, order: Order) -> Result<Self, ChainError> {
        if step_bytes == 0 || step_bytes % 8 != 0 {
            return Err(ChainError::Step { step_bytes });
        }
        let step_words = step_bytes / 8;
        let steps = words.len() / step_words;
        if steps < 2 {
            return Err(ChainError::TooFewSteps { steps, step_bytes });
        }
        let at = |step: usize| &words[step * step_words];
        match order {
            Order::Stride => {
                for step in 0..steps {
                    let next = if step == 0 { steps - 1 } else { step - 1 };
                    at(step).store((next * step_words) as u64, Relaxed);
                }
            }
            Order::Random => {
                // Sattolo's shuffle makes a permutation that is one single cycle. It is done in the memory itself:
                // a list beside it would be half as large again, and its freed pages would disturb what is measured.
                for step in 0..steps {
                    at(step).store((step * step_words) as u64, Relaxed);
                }
                let mut random = Random::new(SEED);
                for last in (1..steps).rev() {
                    let other = (random.next() % last as u64) as usize;
                    let held = at(last).load(Relaxed);
                    at(last).store(at(other).load(Relaxed), Relaxed);
                    at(other).store(held, Relaxed);
                }
            }
        }
        Ok(Self {
            words,
            step_words,
            steps,
        })
    }

    /// Number of words in the cycle.
    #[must_use]
    pub const fn steps(&self) -> usize {
        self.steps
    }

    /// A place to start: the `part`-th of `parts` places spread evenly over the memory.
    #[must_use]
    pub fn start(&self, part: usize, parts: usize) -> usize {
        // More parts than steps: the remainder keeps all of them inside.
        let step = part * (self.steps / parts.max(1)).max(1);
        step % self.steps * self.step_words
    }

    /// Follows the chain for a number of loads and returns where it stands then.
    ///
    /// # Panics
    /// When `at` is not a place of this chain or another program has written to the memory.
    #[must_use]
    pub fn follow(&self, at: usize, loads: u64) -> usize {
        let mut place = at;
        for _ in 0..loads {
            // The comparison with the length is predicted; only the load itself is waited for.
            place = self.words[place].load(Relaxed) as usize;
        }
        place
    }
}

/// The generator xorshift64* (Vigna 2016): fast, and random enough to defeat a prefetcher.
#[derive(Debug)]
pub struct Random {
    state: u64,
}

impl Random {
    /// A generator for this seed; a seed of zero is replaced, because zero would stay zero.
    #[must_use]
    pub const fn new(seed: u64) -> Self {
        Self {
            state: if seed == 0 { SEED } else { seed },
        }
    }

    /// The next number.
    pub const fn next(&mut self) -> u64 {
        self.state ^= self.state >> 12;
        self.state ^= self.state << 25;
        self.state ^= self.state >> 27;
        self.state.wrapping_mul(0x2545_F491_4F6C_DD1D)
    }

    /// A number below a limit, with a bias of limit / 2^64: the upper half of the product needs no division.
    pub const fn below(&mut self, limit: u64) -> u64 {
        ((self.next() as u128 * limit as u128) >> 64) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Backing, PageAdvice, Region};

    fn visited(chain: &Chain<'_>, words: usize) -> Vec<u32> {
        let mut counts = vec![0; words];
        let mut place = chain.start(0, 1);
        for _ in 0..chain.steps() {
            counts[place] += 1;
            place = chain.follow(place, 1);
        }
        assert_eq!(place, chain.start(0, 1), "the chain is closed");
        counts
    }

    #[test]
    fn both_orders_visit_one_word_of_every_step_exactly_once() {
        let region = Region::map(1, Backing::Anon, PageAdvice::None).unwrap();
        for order in [Order::Stride, Order::Random] {
            // 1 MiB / 24 leaves a remainder that must stay untouched.
            for step_bytes in [8, 24, 64, 4096] {
                let chain = Chain::lay(region.words(), step_bytes, order).unwrap();
                let counts = visited(&chain, region.words().len());
                assert_eq!(counts.iter().sum::<u32>() as usize, chain.steps());
                for (word, count) in counts.iter().enumerate() {
                    let expected =
                        u32::from(word % (step_bytes / 8) == 0 && word / (step_bytes / 8) < chain.steps());
                    assert_eq!(*count, expected, "{order:?} step {step_bytes} word {word}");
                }
            }
        }
    }

    #[test]
    fn the_random_order_is_not_the_stride() {
        let region = Region::map(1, Backing::Anon, PageAdvice::None).unwrap();
        let chain = Chain::lay(region.words(), 64, Order::Random).unwrap();
        let mut place = chain.start(0, 1);
        let mut near = 0;
        for _ in 0..chain.steps() {
            let next = chain.follow(place, 1);
            near += usize::from(place.abs_diff(next) <= 8);
            place = next;
        }
        assert!(
            near < chain.steps() / 100,
            "{near} of {} steps go to a neighbour",
            chain.steps()
        );
    }

    #[test]
    fn following_in_two_parts_is_following_once() {
        let region = Region::map(1, Backing::Anon, PageAdvice::None).unwrap();
        let chain = Chain::lay(region.words(), 64, Order::Random).unwrap();
        let start = chain.start(1, 3);
        assert_eq!(
            chain.follow(chain.follow(start, 1000), 234),
            chain.follow(start, 1234)
        );
    }

    #[test]
    fn impossible_steps_are_refused() {
        let region = Region::map(1, Backing::Anon, PageAdvice::None).unwrap();
        let lay = |step| Chain::lay(region.words(), step, Order::Stride).map(|_| ());
        assert_eq!(lay(0), Err(ChainError::Step { step_bytes: 0 }));
        assert_eq!(lay(12), Err(ChainError::Step { step_bytes: 12 }));
        assert_eq!(
            lay(1 << 20),
            Err(ChainError::TooFewSteps {
                steps: 1,
                step_bytes: 1 << 20
            })
        );
        assert_eq!(
            lay(1 << 30),
            Err(ChainError::TooFewSteps {
                steps: 0,
                step_bytes: 1 << 30
            })
        );
    }

    #[test]
    fn starting_places_are_distinct_places_of_the_chain() {
        let region = Region::map(1, Backing::Anon, PageAdvice::None).unwrap();
        let chain = Chain::lay(region.words(), 64, Order::Stride).unwrap();
        let starts: std::collections::BTreeSet<_> = (0..7).map(|part| chain.start(part, 7)).collect();
        assert_eq!(starts.len(), 7);
        assert!(
            starts
                .iter()
                .all(|place| place % 8 == 0 && place / 8 < chain.steps())
        );
    }
}
