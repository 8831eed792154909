//! Random loads on random disks, with noise in what the controllers see, against an expert who knows the load beforehand and
//! sets the best fixed ceiling for it.

use super::{Control, Load, Piece, Tuning, machine, run};
use crate::parallel;
use homeostat_simulator::paging::Wants;
use homeostat_statistics::robust::{exp, ln};
use homeostat_statistics::simulation::Random;

/// Length of a load in seconds.
const LENGTH_S: f64 = 3600.0;
/// Memory of the machine.
const MEMORY_MIB: u64 = 512;
const MEMORY_PAGES: f64 = (MEMORY_MIB * 256) as f64;
/// Mean time between two changes of what the programs do, in seconds …
const CHANGE_EVERY_S: f64 = 300.0;
/// … and at least.
const CHANGE_MIN_S: f64 = 20.0;
/// What the controllers see is off by up to this share.
const NOISE: f64 = 0.2;
/// Ceilings among which the expert chooses, shares of the memory.
const EXPERTS: [f64; 10] = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0];

/// What came of one load under one controller.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Outcome {
    /// Mean speed of the writer, 1 = it never waits.
    pub writer: f64,
    /// Pages that the reader got, as a share of what it gets alone on the machine.
    pub reader: f64,
    /// Changes of the ceiling's direction per hour.
    pub reversals_per_h: f64,
}

impl Outcome {
    /// Both speeds together.
    pub fn sum(&self) -> f64 {
        self.writer + self.reader
    }
}

/// One load under all.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Case {
    /// Its number, from which with the seed everything follows.
    pub index: u64,
    /// The best fixed ceiling.
    pub expert: Outcome,
    /// Nobody, autotune, homeostat's own: as [`Control::SHOWN`].
    pub shown: [Outcome; 3],
}

impl Case {
    /// Both speeds together, as a share of the expert's.
    pub fn of_the_experts(&self, shown: usize) -> f64 {
        self.shown
            .get(shown)
            .map_or(f64::NAN, |o| o.sum() / self.expert.sum())
    }
}

/// Makes and runs so many loads on up to `threads` threads; the result does not depend on how many those are.
pub fn cases(count: u64, seed: u64, threads: usize) -> Vec<Case> {
    let mut out = Vec::new();
    parallel::in_order(0..count, threads, &|index| case(seed, index), &mut |_, case| {
        out.push(case);
        true
    });
    out
}

fn case(seed: u64, index: u64) -> Case {
    let mut random = Random::new(seed ^ index.wrapping_mul(0x9E37_79B9_7F4A_7C15));
    let load = drawn(&mut random);
    let alone = reader_alone(&load);
    let outcome = |control| {
        let run = run(
            &load,
            &Tuning {
                noise: NOISE,
                seed: index,
                ..Tuning::of(control)
            },
        );
        let got = run.mean(0.0, LENGTH_S, |p| p.reads);
        Outcome {
            writer: run.writer(0.0, LENGTH_S),
            reader: if alone > 0.0 { got / alone } else { 1.0 },
            reversals_per_h: f64::from(run.reversals(0.0, LENGTH_S)) * 3600.0 / LENGTH_S,
        }
    };
    let expert = EXPERTS
        .into_iter()
        .map(|share| outcome(Control::Fixed(share)))
        .fold(None, |best: Option<Outcome>, next| match best {
            Some(best) if best.sum() >= next.sum() => Some(best),
            _ => Some(next),
        });
    let shown = Control::SHOWN.map(outcome);
    Case {
        index,
        expert: expert.unwrap_or(shown[0]),
        shown,
    }
}

/// Pages per second that the reader gets when it has the machine to itself.
fn reader_alone(load: &Load) -> f64 {
    let alone = Load {
        pieces: load
            .pieces
            .iter()
            .map(|piece| Piece {
                wants: Wants {
                    working_pages: 0.0,
                    touches_per_s: 0.0,
                    ..piece.wants
                },
                ..*piece
            })
            .collect(),
        ..load.clone()
    };
    run(&alone, &Tuning::of(Control::Fixed(1.0))).mean(0.0, LENGTH_S, |p| p.reads)
}

/// A random load: one writer that changes its working set now and then, one reader that comes and goes.
fn drawn(random: &mut Random) -> Load {
    let mut spec = machine(MEMORY_MIB);
    spec.disk.random_ms = between(random, 0.4, 20.0);
    spec.queue = random.coin();
    let touches_per_s = between(random, 5e3, 2e5);
    let file_pages_per_s = between(random, 500.0, 20_000.0);
    spec.disk.sequential_mb_s = file_pages_per_s * spec.page_bytes as f64 / 1e6 * 1.2;
    let file_pages = if random.coin() {
        0.0
    } else {
        between(random, 0.1, 2.0) * MEMORY_PAGES
    };
    let cached_pages_per_s = file_pages_per_s * between(random, 2.0, 20.0);
    let mut pieces = Vec::new();
    let mut at_s = 0.0;
    let mut working_pages = (0.2 + 0.65 * random.uniform()) * MEMORY_PAGES;
    let mut reads = false;
    while at_s < LENGTH_S {
        pieces.push(Piece {
            from_s: at_s,
            wants: Wants {
                working_pages,
                touches_per_s,
                file_pages_per_s: if reads { file_pages_per_s } else { 0.0 },
                file_pages: if reads { file_pages } else { 0.0 },
                cached_pages_per_s,
            },
        });
        at_s += CHANGE_MIN_S + CHANGE_EVERY_S * random.exponential();
        // The first change is the reader's start, so that every load has one.
        if pieces.len() == 1 || random.uniform() < 0.6 {
            reads = !reads;
        } else {
            working_pages = (0.2 + 0.65 * random.uniform()) * MEMORY_PAGES;
        }
    }
    Load {
        spec,
        pieces,
        end_s: LENGTH_S,
    }
}

/// Between two positive numbers, evenly on the scale of logarithms.
fn between(random: &mut Random, low: f64, high: f64) -> f64 {
    exp(ln(low) + (ln(high) - ln(low)) * random.uniform())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_seed_gives_the_same_loads_on_any_number_of_threads() {
        let one = cases(3, 7, 1);
        assert_eq!(one, cases(3, 7, 3));
        assert_ne!(one, cases(3, 8, 1));
        for case in one {
            assert!((0.0..=1.0).contains(&case.expert.writer), "{case:?}");
            assert!(
                case.expert.reader > 0.0 && case.expert.sum() >= case.shown[0].sum() - 0.05,
                "{case:?}"
            );
        }
    }
}
