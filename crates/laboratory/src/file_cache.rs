//! The controllers of the file cache on the simulated machine's two pools: seed 003's Figures 6 to 11 ([`figures`]), how
//! much their gain and their delay may change before they lose their hold ([`sweep`]), and random loads against the best
//! fixed ceiling that an expert could have set ([`loads`]). [`page`] makes a page of the book of it.
//!
//! The ceiling of the file pool is moved by nobody, by the rules of IBM's autotune, or by homeostat's own controller. Both
//! are the code that ships; the machine is [`homeostat_simulator::paging`]. Linux has no such ceiling: there autotune's
//! rules move other settings and homeostat limits the reader itself (docs/file-cache.md), so nothing here is evidence for
//! Linux. It is evidence for the rules.
//!
//! Everything follows from the seed, to the bit: the model uses sums, products and quotients only.

pub mod figures;
pub mod loads;
pub mod sweep;

use homeostat_model::Nanoseconds;
use homeostat_simulator::paging::{PagingSpec, TICK_S, TwoPool, Wants};
use homeostat_statistics::simulation::Random;
use homeostat_strategies::{autotune, ceiling};
use std::collections::VecDeque;

/// Length of a point of a run, in seconds.
pub const POINT_S: f64 = 2.0;
const TICKS_PER_POINT: u64 = (POINT_S / TICK_S) as u64;
/// A tick in milliseconds.
const TICK_MS: u64 = (TICK_S * 1e3) as u64;
/// Ceiling of the file pool as AIX has it (seed 003, 3.1: `maxperm` is 80 %).
pub const CEILING_FOUND: f64 = 0.8;
/// Floor as AIX has it (`minperm` is 20 %), percent.
const FLOOR_FOUND: f64 = 20.0;
/// homeostat's own controller looks so often, in seconds.
const OWN_EVERY_S: f64 = 2.0;

/// The machine of machine-model T7 with so much memory: pages of 4 KiB, a disk that turns, the ceiling as AIX has it.
pub fn machine(memory_mib: u64) -> PagingSpec {
    PagingSpec {
        memory_mib,
        file_ceiling: CEILING_FOUND,
        ..PagingSpec::default()
    }
}

/// What the programs want from a moment on.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Piece {
    /// Seconds since the start.
    pub from_s: f64,
    /// What they want.
    pub wants: Wants,
}

/// A machine and what happens on it.
#[derive(Clone, Debug, PartialEq)]
pub struct Load {
    /// The machine.
    pub spec: PagingSpec,
    /// What is wanted, in the order of time; the first piece begins at 0.
    pub pieces: Vec<Piece>,
    /// Length in seconds.
    pub end_s: f64,
}

/// Who moves the ceiling.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Control {
    /// Nobody: it stays as AIX has it.
    Nobody,
    /// An expert who set it once, to this share of the memory.
    Fixed(f64),
    /// The rules of IBM's autotune.
    Autotune,
    /// homeostat's own controller.
    Own,
}

impl Control {
    /// The three that the figures show.
    pub const SHOWN: [Self; 3] = [Self::Nobody, Self::Autotune, Self::Own];
}

/// A controller, and what is done to it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Tuning {
    /// Which.
    pub control: Control,
    /// Its steps up and down are multiplied by this.
    pub gain: f64,
    /// What it sets takes effect after so many seconds.
    pub delay_s: f64,
    /// What it sees is off by up to this share, uniformly …
    pub noise: f64,
    /// … with numbers from this seed.
    pub seed: u64,
}

impl Tuning {
    /// The controller as it ships.
    pub fn of(control: Control) -> Self {
        Self {
            control,
            gain: 1.0,
            delay_s: 0.0,
            noise: 0.0,
            seed: 1,
        }
    }
}

/// Two seconds of a run; rates are means over them.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Point {
    /// When it ended, in seconds.
    pub at_s: f64,
    /// Pages per second that the writer touched.
    pub touches: f64,
    /// … that it would touch if it never waited.
    pub touches_wanted: f64,
    /// Pages per second that the reader got.
    pub reads: f64,
    /// Pages per second that came from paging space.
    pub paged_in: f64,
    /// … that went there.
    pub paged_out: f64,
    /// Share of the memory that holds pages of files, at the end.
    pub files: f64,
    /// Ceiling of the file pool, share of the memory, at the end.
    pub ceiling: f64,
}

impl Point {
    /// Speed of the writer, 1 = it never waits; `None` while there is no writer.
    pub fn writer(&self) -> Option<f64> {
        (self.touches_wanted > 0.0).then(|| self.touches / self.touches_wanted)
    }
}

/// What a run showed.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Run {
    /// Every two seconds.
    pub points: Vec<Point>,
    /// When the controller set another ceiling (seconds), and which (share of the memory).
    pub moves: Vec<(f64, f64)>,
}

impl Run {
    /// The points that lie between two moments (seconds).
    pub fn between(&self, from_s: f64, to_s: f64) -> &[Point] {
        let at = |s: f64| self.points.partition_point(|p| p.at_s <= s + 1e-6);
        let (from, to) = (at(from_s), at(to_s));
        self.points.get(from..to.max(from)).unwrap_or_default()
    }

    /// Mean of a quantity between two moments (seconds); 0 where no point lies.
    pub fn mean(&self, from_s: f64, to_s: f64, of: impl Fn(&Point) -> f64) -> f64 {
        let points = self.between(from_s, to_s);
        points.iter().map(of).sum::<f64>() / points.len().max(1) as f64
    }

    /// Mean speed of the writer between two moments (seconds), over the time in which there is one; 1 where there is none.
    pub fn writer(&self, from_s: f64, to_s: f64) -> f64 {
        let points = self.between(from_s, to_s);
        let wanted: f64 = points.iter().map(|p| p.touches_wanted).sum();
        let touched: f64 = points.iter().map(|p| p.touches).sum();
        if wanted > 0.0 { touched / wanted } else { 1.0 }
    }

    /// How often the ceiling changed its direction between two moments (seconds).
    pub fn reversals(&self, from_s: f64, to_s: f64) -> u32 {
        let mut direction = 0.0;
        let mut turns = 0;
        for pair in self.moves.windows(2) {
            let [(_, before), (at, after)] = pair else {
                continue;
            };
            let moved = (after - before).signum();
            if *at > from_s && *at <= to_s && direction != 0.0 && moved != direction {
                turns += 1;
            }
            direction = moved;
        }
        turns
    }
}

/// The rules, between the machine and the ceiling.
enum Rules {
    None,
    Autotune(autotune::Autotune),
    Own(ceiling::Ceiling),
}

impl Rules {
    fn new(tuning: &Tuning) -> Self {
        match tuning.control {
            Control::Nobody | Control::Fixed(_) => Self::None,
            Control::Autotune => {
                let found = autotune::Parameters {
                    minperm: FLOOR_FOUND,
                    maxperm: CEILING_FOUND * 100.0,
                    maxclient: CEILING_FOUND * 100.0,
                    strict: false,
                };
                let usual = autotune::Limits::default();
                let limits = autotune::Limits {
                    increase: usual.increase * tuning.gain,
                    decrease: (usual.decrease.0 * tuning.gain, usual.decrease.1 * tuning.gain),
                    ..usual
                };
                Self::Autotune(autotune::Autotune::new(limits, found, Nanoseconds::ZERO))
            }
            Control::Own => {
                let usual = ceiling::Gains::default();
                Self::Own(ceiling::Ceiling::new(ceiling::Gains {
                    fall: usual.fall * tuning.gain,
                    rise_fast: usual.rise_fast * tuning.gain,
                    rise_slow: usual.rise_slow * tuning.gain,
                    ..usual
                }))
            }
        }
    }

    /// Ticks between two looks; `None`: it never looks.
    fn every(&self) -> Option<u64> {
        let seconds = match self {
            Self::None => return None,
            Self::Autotune(_) => autotune::Limits::default().monitor_interval.as_secs_f64(),
            Self::Own(_) => OWN_EVERY_S,
        };
        Some((seconds / TICK_S).round() as u64)
    }

    /// The new ceiling, share of the memory, when it changes.
    fn step(&mut self, at: Nanoseconds, counted: &Counted, pools: &TwoPool) -> Option<f64> {
        let seconds = counted.ticks as f64 * TICK_S;
        match self {
            Self::None => None,
            Self::Autotune(rules) => rules
                .step(&autotune::Sample {
                    at,
                    paged_in: counted.paged_in / seconds,
                    paged_out: counted.paged_out / seconds,
                    numperm: pools.file_share() * 100.0,
                    free: pools.unused().0 as f64 / pools.memory().0.max(1) as f64 * 100.0,
                })
                .map(|set| set.maxperm / 100.0),
            Self::Own(rules) => rules.step(&ceiling::Sample {
                at,
                stalled: counted.stalled / seconds,
                refaults: counted.paged_in / seconds,
                taken: counted.paged_out / seconds,
                files: pools.file_share(),
            }),
        }
    }
}

/// What was counted since the controller looked last.
#[derive(Clone, Copy, Debug, Default)]
struct Counted {
    paged_in: f64,
    paged_out: f64,
    /// Seconds in which the writer stood still.
    stalled: f64,
    ticks: u64,
}

impl Counted {
    fn blurred(self, random: &mut Random, noise: f64) -> Self {
        let mut factor = || 1.0 + noise * (2.0 * random.uniform() - 1.0);
        Self {
            paged_in: self.paged_in * factor(),
            paged_out: self.paged_out * factor(),
            stalled: self.stalled * factor(),
            ticks: self.ticks,
        }
    }
}

/// Runs a load under a controller.
pub fn run(load: &Load, tuning: &Tuning) -> Run {
    let mut pools = TwoPool::new(load.spec);
    match tuning.control {
        Control::Fixed(share) => pools.set_ceiling(share),
        // It limits nothing before it has seen a loss.
        Control::Own => pools.set_ceiling(1.0),
        Control::Nobody | Control::Autotune => {}
    }
    let mut rules = Rules::new(tuning);
    let every = rules.every();
    let delay = (tuning.delay_s / TICK_S).round() as u64;
    let mut random = Random::new(tuning.seed);
    let mut pending: VecDeque<(u64, f64)> = VecDeque::new();
    let mut counted = Counted::default();
    let mut out = Run::default();
    let mut point = Point::default();
    let mut pieces = load.pieces.iter().peekable();
    let mut wants = Wants::default();
    for tick in 0..(load.end_s / TICK_S) as u64 {
        let at_s = tick as f64 * TICK_S;
        while let Some(piece) = pieces.next_if(|p| p.from_s <= at_s + 1e-9) {
            change(&mut pools, &wants, &piece.wants);
            wants = piece.wants;
        }
        while let Some((due, share)) = pending.front().copied() {
            if due > tick {
                break;
            }
            pools.set_ceiling(share);
            pending.pop_front();
        }
        pools.tick(at_s, wants);
        counted.paged_in += pools.faults() * TICK_S;
        counted.paged_out += pools.paged_out() * TICK_S;
        counted.stalled += (1.0 - pools.speed()) * TICK_S;
        counted.ticks += 1;
        point.touches += wants.touches_per_s * pools.speed();
        point.touches_wanted += wants.touches_per_s;
        point.reads += pools.reads();
        point.paged_in += pools.faults();
        point.paged_out += pools.paged_out();
        let end_s = (tick + 1) as f64 * TICK_S;
        if (tick + 1) % TICKS_PER_POINT == 0 {
            let part = 1.0 / TICKS_PER_POINT as f64;
            out.points.push(Point {
                at_s: end_s,
                touches: point.touches * part,
                touches_wanted: point.touches_wanted * part,
                reads: point.reads * part,
                paged_in: point.paged_in * part,
                paged_out: point.paged_out * part,
                files: pools.file_share(),
                ceiling: pools.ceiling(),
            });
            point = Point::default();
        }
        if every.is_some_and(|every| (tick + 1) % every == 0) {
            let seen = std::mem::take(&mut counted).blurred(&mut random, tuning.noise);
            let at = Nanoseconds::from_millis((tick + 1) * TICK_MS);
            if let Some(share) = rules.step(at, &seen, &pools) {
                out.moves.push((end_s, share));
                pending.push_back((tick + 1 + delay, share));
            }
        }
    }
    out
}

/// A writer asks for more memory or gives some back.
fn change(pools: &mut TwoPool, before: &Wants, after: &Wants) {
    if after.working_pages > before.working_pages {
        pools.allocate(after.working_pages - before.working_pages);
    } else if before.working_pages > 0.0 {
        pools.free(1.0 - after.working_pages / before.working_pages);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run_of(moves: &[(f64, f64)]) -> Run {
        Run {
            moves: moves.to_vec(),
            ..Run::default()
        }
    }

    #[test]
    fn reversals_are_changes_of_direction() {
        let run = run_of(&[
            (2.0, 0.5),
            (4.0, 0.4),
            (6.0, 0.3),
            (8.0, 0.35),
            (10.0, 0.4),
            (12.0, 0.2),
        ]);
        assert_eq!(run.reversals(0.0, 100.0), 2);
        assert_eq!(run.reversals(9.0, 100.0), 1);
        assert_eq!(run_of(&[(2.0, 0.5)]).reversals(0.0, 100.0), 0);
    }

    #[test]
    fn a_delay_holds_back_what_is_set_and_nothing_else() {
        let wants = Wants {
            working_pages: 60_000.0,
            touches_per_s: 40_000.0,
            file_pages_per_s: 2500.0,
            ..Wants::default()
        };
        let load = Load {
            spec: machine(512),
            pieces: vec![Piece { from_s: 0.0, wants }],
            end_s: 120.0,
        };
        let at_once = run(&load, &Tuning::of(Control::Own));
        let late = run(
            &load,
            &Tuning {
                delay_s: 10.0,
                ..Tuning::of(Control::Own)
            },
        );
        let first = at_once.moves[0];
        assert_eq!(late.moves[0], first);
        let ceiling = |run: &Run, at_s: f64| run.between(at_s - POINT_S, at_s)[0].ceiling;
        assert!(ceiling(&at_once, first.0 + 4.0) < 1.0);
        assert_eq!(ceiling(&late, first.0 + 8.0), 1.0);
        assert!(ceiling(&late, first.0 + 14.0) < 1.0);
    }
}
