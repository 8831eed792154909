//! The clockwork of blocks: washout, then measurement, at fixed times after the block's start.
//!
//! The same part is discarded from every block, also when nothing was switched, and its length is fixed before the
//! coin is tossed from past blocks only: so under "no effect" nothing that is measured depends on the coin, and the
//! test martingale is exact whatever the load does. A switch that takes longer than the washout only mixes the arms,
//! which shrinks the measured effect, and lengthens the washout of later blocks. Not covered: an undo that slows the
//! program down beyond the washout would look like a gain.

use crate::panel::{Gauge, Reading};
use crate::series::{EDGE_TOLERANCE, Sums};
use crate::strategy::Load;
use homeostat_model::{BlockRecord, Effect, LossIn, Nanoseconds};
use homeostat_statistics::TrialParameters;
use homeostat_statistics::block_length::{self, BREAKER_SECONDS, Choice, Past, Switch, Unmeasurable};
use homeostat_statistics::robust::ln;

/// A block is measured again when less than this share of its time carries readings.
pub(crate) const COVERAGE_MIN: f64 = 0.6;
/// Most times one block is measured again before the experiment gives up.
const EXTENSIONS_MAX: u32 = 10;
/// A saturated program that waits for a CPU more than this share of the time it runs is judged by CPU time: how much
/// of a CPU it gets is decided by its neighbours, and would drown the effect.
const CONTENDED: f64 = 0.05;
/// The circuit breaker averages over this, or over the measured part of a shorter block.
pub(crate) const BREAKER_SPAN: Nanoseconds = Nanoseconds::from_secs(BREAKER_SECONDS as u64);

/// From so many switches on, one that is slower than any other by this factor is not one to expect: on a busy host the blocks of a
/// trial, 3 s each until then, took 10 to 20 s after one slow switch, for two minutes.
const SWITCHES_MIN: usize = 4;
const SLOW_SWITCH: u64 = 2;

/// How long the next switch may take, by the last ones: as long as the slowest. A busy moment of the host makes a single one slow,
/// and the next blocks would all be as long: such a one counts as the second slowest. Its own block shows less than there is.
pub(crate) fn next_switch(past: impl Iterator<Item = Nanoseconds>) -> Nanoseconds {
    let mut all: Vec<Nanoseconds> = past.collect();
    all.sort_unstable_by(|a, b| b.cmp(a));
    match all.as_slice() {
        [slowest, second, ..] if all.len() >= SWITCHES_MIN && *slowest > *second * SLOW_SWITCH => *second,
        [slowest, ..] => *slowest,
        [] => Nanoseconds::ZERO,
    }
}

/// What the length of blocks is chosen from: the passive history before the trial.
#[derive(Clone, Debug)]
pub(crate) struct Lengths {
    /// (work, denominator) per interval, oldest first.
    pub(crate) seconds: Vec<(f64, f64)>,
    /// Length of one interval (seconds).
    pub(crate) interval: f64,
    /// Whether a block has few readings.
    pub(crate) few: bool,
    /// The least gain that is predicted (log units).
    pub(crate) least: f64,
    /// Candidates for the measured part (seconds).
    pub(crate) candidates: Vec<f64>,
    /// Longest trial (seconds).
    pub(crate) budget: f64,
}

impl Lengths {
    /// The best length for this washout and standstill of a switch (seconds).
    pub(crate) fn choose(
        &self,
        washout: f64,
        standstill: f64,
        parameters: &TrialParameters,
    ) -> Result<Choice, Unmeasurable> {
        let past = Past {
            seconds: &self.seconds,
            interval: self.interval,
            few: self.few,
        };
        block_length::choose(
            self.least,
            past,
            Switch { washout, standstill },
            &self.candidates,
            parameters,
            self.budget,
        )
    }
}

/// How the objective of a block is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Objective {
    /// ln(work per second): the load is saturated.
    WorkPerSecond,
    /// ln(work per CPU second): the load is limited by what is offered, or the program competes for CPUs.
    CpuPerWork,
}

impl Objective {
    pub(crate) fn words(self) -> &'static str {
        match self {
            Self::WorkPerSecond => "work per second",
            Self::CpuPerWork => "work per CPU second",
        }
    }

    /// A loss by it.
    pub(crate) fn loss(self) -> LossIn {
        match self {
            Self::WorkPerSecond => LossIn::WorkPerSecond,
            Self::CpuPerWork => LossIn::WorkPerCpuSecond,
        }
    }

    /// The gain in words: more work, or the same work with less CPU. The score is the same logarithm in both cases.
    pub(crate) fn gain(self, effect: &Effect) -> String {
        match self {
            Self::WorkPerSecond => format!("gave {effect} work per second"),
            Self::CpuPerWork => format!("gave {effect} work per CPU second"),
        }
    }

    /// Which of the two judges this load, and why; `offered`: a trial has shown that its work is what is asked of it.
    pub(crate) fn of(load: &Load, offered: bool) -> (Self, &'static str) {
        if offered {
            (
                Self::CpuPerWork,
                "a trial has shown that the load is limited by what is offered: its work stayed the same while its CPU \
                 time fell",
            )
        } else if !load.saturated {
            (
                Self::CpuPerWork,
                "the load is limited by what is offered: a faster program does the same work with less CPU",
            )
        } else if load.runqueue_wait > CONTENDED {
            (
                Self::CpuPerWork,
                "it competes for CPUs: its work per second follows what the others leave, its CPU per unit does not",
            )
        } else {
            (
                Self::WorkPerSecond,
                "the load is saturated: a faster program does more work",
            )
        }
    }

    /// The score of sums: the logarithm of the objective, more is better. `None` when nothing was measured.
    pub(crate) fn score(self, sums: &Sums) -> Option<f64> {
        // Half a count stands for none at all: the logarithm stays finite and the block counts as the worst.
        let work = sums.work.max(0.5);
        let denominator = match self {
            Self::WorkPerSecond => sums.work_seconds,
            Self::CpuPerWork => sums.cpu,
        };
        (sums.intervals > 0 && denominator > 0.0).then(|| ln(work / denominator))
    }
}

/// One block in the making.
#[derive(Clone, Debug)]
pub(crate) struct Block {
    pub(crate) index: u32,
    pub(crate) on: bool,
    pub(crate) measure_from: Nanoseconds,
    pub(crate) ends: Nanoseconds,
    extensions: u32,
    /// Since when it is measured again, and why.
    waits: Option<(Nanoseconds, &'static str)>,
}

/// What became of a block at this moment.
pub(crate) enum BlockState {
    /// Still washing out or measuring.
    Running,
    /// Measured.
    Finished(BlockRecord),
    /// The program did nothing, again, after the block was extended; it is measured once more.
    Idle,
    /// Could not be measured, again and again.
    Unmeasurable(String),
}

impl Block {
    pub(crate) fn start(
        index: u32,
        on: bool,
        now: Nanoseconds,
        washout: Nanoseconds,
        measured: Nanoseconds,
    ) -> Self {
        let measure_from = now + washout;
        Self {
            index,
            on,
            measure_from,
            ends: measure_from + measured,
            extensions: 0,
            waits: None,
        }
    }

    /// What it waits for, since when, and for how much longer at most; `None` when it goes as planned.
    pub(crate) fn waits(&self) -> Option<(Nanoseconds, &'static str, Nanoseconds)> {
        let left = u64::from(EXTENSIONS_MAX.saturating_sub(self.extensions) + 1);
        self.waits
            .map(|(since, what)| (since, what, (self.ends - self.measure_from) * left))
    }

    pub(crate) fn measuring(&self, now: Nanoseconds) -> bool {
        now >= self.measure_from
    }

    /// Checks whether the block is over. While a program whose load is offered is idle nothing can be learnt, and the
    /// block is measured again. That rule does not look at the arm.
    pub(crate) fn poll(&mut self, now: Nanoseconds, gauge: &Gauge<'_>) -> BlockState {
        self.poll_reading(now, |from| (gauge.read(from, now), gauge.meters()))
    }

    /// The same with another way to read what was measured since a moment; it also names the meters.
    pub(crate) fn poll_reading(
        &mut self,
        now: Nanoseconds,
        read: impl FnOnce(Nanoseconds) -> (Reading, String),
    ) -> BlockState {
        if now + EDGE_TOLERANCE < self.ends {
            return BlockState::Running;
        }
        let (reading, meters) = read(self.measure_from);
        let length = (self.ends - self.measure_from).as_secs_f64();
        let idle = reading.idle;
        match reading.score {
            Some(score) if reading.seconds >= COVERAGE_MIN * length && !idle => {
                BlockState::Finished(BlockRecord {
                    index: self.index,
                    on: self.on,
                    measured_from: reading.from.unwrap_or(self.measure_from),
                    measured: Nanoseconds::from_secs_f64(reading.seconds),
                    work: reading.work,
                    cpu: Nanoseconds::from_secs_f64(reading.cpu),
                    score,
                    broken: false,
                })
            }
            _ if self.extensions >= EXTENSIONS_MAX => BlockState::Unmeasurable(if idle {
                "the load went away".to_owned()
            } else {
                format!("the meter {meters} delivered no readings")
            }),
            _ => {
                let measured = self.ends - self.measure_from;
                self.extensions += 1;
                let since = self.waits.map_or(self.measure_from, |(since, _)| since);
                self.waits = Some((since, if idle { "for work to come" } else { "for readings" }));
                self.measure_from = now;
                self.ends = now + measured;
                if idle && self.extensions > 1 {
                    BlockState::Idle
                } else {
                    BlockState::Running
                }
            }
        }
    }

    /// The record of a block that the circuit breaker ended.
    pub(crate) fn broken(&self, now: Nanoseconds, gauge: &Gauge<'_>) -> BlockRecord {
        let reading = gauge.read(self.measure_from, now);
        BlockRecord {
            index: self.index,
            on: self.on,
            measured_from: reading.from.unwrap_or(self.measure_from),
            measured: Nanoseconds::from_secs_f64(reading.seconds),
            work: reading.work,
            cpu: Nanoseconds::from_secs_f64(reading.cpu),
            score: reading.score.unwrap_or(f64::NEG_INFINITY),
            broken: true,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::panel::{Member, Panel};
    use crate::series::{Interval, Series};
    use homeostat_model::{Fingerprint, MeterId};
    use std::collections::BTreeMap;

    fn series(upto: u64, gap: std::ops::Range<u64>) -> Series {
        let mut s = Series::default();
        for t in 1..=upto {
            let work = if gap.contains(&t) {
                BTreeMap::new()
            } else {
                BTreeMap::from([(MeterId::new("m"), (10.0, 1.0))])
            };
            s.push(Interval {
                end: Nanoseconds::from_secs(t),
                seconds: 1.0,
                cpu: 0.5,
                wait: 0.0,
                machine_idle: 0.5,
                churn: 0,
                faults: (0, 0),
                work,
                counted: BTreeMap::new(),
                lags: BTreeMap::new(),
                spans: None,
            });
        }
        s
    }

    /// `cpus`: CPUs used when the trial began.
    fn panel(objective: Objective, cpus: f64) -> Panel {
        let member = Member::new(
            "w".into(),
            Fingerprint::new("w"),
            MeterId::new("m"),
            objective,
            cpus,
        );
        Panel::new(member, Vec::new())
    }

    fn poll(block: &mut Block, now: u64, series: &Series, panel: &Panel) -> BlockState {
        let gauge = Gauge::new(panel, |_| Some(series)).unwrap();
        block.poll(at(now), &gauge)
    }

    fn at(t: u64) -> Nanoseconds {
        Nanoseconds::from_secs(t)
    }

    #[test]
    fn one_slow_switch_does_not_make_the_next_blocks_long() {
        let of = |past: &[u64]| next_switch(past.iter().map(|ms| Nanoseconds::from_millis(*ms)));
        let ms = Nanoseconds::from_millis;
        assert_eq!(of(&[]), Nanoseconds::ZERO);
        assert_eq!(of(&[300, 900]), ms(900), "too few to know better");
        assert_eq!(of(&[300, 40, 8000, 50, 320, 40]), ms(320));
        assert_eq!(of(&[300, 40, 500, 50, 320, 40]), ms(500));
        // Two are how it is.
        assert_eq!(of(&[300, 40, 8000, 50, 7000, 40]), ms(8000));
    }

    #[test]
    fn the_washout_is_discarded_and_the_rest_measured() {
        let mut block = Block::start(0, true, at(10), at(2), at(5));
        let panel = panel(Objective::WorkPerSecond, 0.0);
        assert!(matches!(
            poll(&mut block, 16, &series(16, 0..0), &panel),
            BlockState::Running
        ));
        match poll(&mut block, 17, &series(17, 0..0), &panel) {
            BlockState::Finished(r) => {
                assert_eq!((r.work, r.measured, r.measured_from), (50.0, at(5), at(12)));
                assert!((r.score - 10f64.ln()).abs() < 1e-12);
            }
            _ => panic!("not finished"),
        }
    }

    #[test]
    fn the_measured_part_begins_with_the_first_reading_that_is_in_it() {
        // A washout that ends between two samples: what lies across its end is not measured.
        let washout = Nanoseconds::from_millis(2_500);
        let mut block = Block::start(0, true, at(10), washout, at(5));
        let panel = panel(Objective::WorkPerSecond, 0.0);
        match poll(&mut block, 18, &series(18, 0..0), &panel) {
            BlockState::Finished(r) => assert_eq!((r.measured_from, r.measured), (at(13), at(5))),
            _ => panic!("not finished"),
        }
        let gauge_of = series(18, 0..0);
        let gauge = Gauge::new(&panel, |_| Some(&gauge_of)).unwrap();
        let broken = Block::start(0, true, at(10), washout, at(5)).broken(at(15), &gauge);
        assert_eq!((broken.measured_from, broken.measured), (at(13), at(2)));
    }

    #[test]
    fn a_gap_in_the_readings_extends_the_block_and_a_lasting_one_ends_it() {
        let panel = panel(Objective::WorkPerSecond, 0.0);
        let mut block = Block::start(0, true, at(10), at(2), at(5));
        let s = series(200, 12..200);
        let mut now = 17;
        let mut extensions = 0;
        loop {
            match poll(&mut block, now, &s, &panel) {
                BlockState::Running | BlockState::Idle => {
                    extensions += 1;
                    now += 5;
                }
                BlockState::Unmeasurable(why) => {
                    assert!(why.contains("no readings"), "{why}");
                    break;
                }
                BlockState::Finished(r) => panic!("{r:?}"),
            }
        }
        assert_eq!(extensions, EXTENSIONS_MAX);
    }

    #[test]
    fn an_idle_program_is_not_a_measurement_when_its_load_is_offered() {
        let mut block = Block::start(0, false, at(10), at(2), at(5));
        let s = series(40, 0..0);
        assert!(matches!(
            poll(&mut block, 17, &s, &panel(Objective::CpuPerWork, 9.0)),
            BlockState::Running
        ));
        let mut block = Block::start(0, false, at(10), at(2), at(5));
        assert!(matches!(
            poll(&mut block, 17, &s, &panel(Objective::CpuPerWork, 0.5)),
            BlockState::Finished(_)
        ));
    }
}
