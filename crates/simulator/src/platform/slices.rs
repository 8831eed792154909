//! Changes of memory work in slices.

use super::arguments::Pacing;
use super::{ENDED, NOT_MAPPED, done, nanoseconds, vanished};
use crate::memory::{Memory, Segment};
use crate::world::World;
use homeostat_model::{Bytes, Direction, Nanoseconds, Progress, WorkloadId};
use homeostat_platform::PlatformError;
use std::collections::BTreeMap;

/// Refused conversions in a row after which the action waits, as on Linux.
const REFUSED_MAX: u32 = 3;

/// State of a change under way or done. Lost in a crash.
#[derive(Clone, Debug, Default)]
pub(super) struct Task {
    /// Its direction when it was last done.
    pub(super) left: Option<Direction>,
    pub(super) cursor: usize,
    pub(super) way: Option<Direction>,
    pub(super) finished: u64,
    pub(super) skipped: BTreeMap<String, u64>,
    pub(super) refused: u32,
}

impl Task {
    pub(super) fn head(&mut self, direction: Direction) {
        if self.way != Some(direction) {
            *self = Self {
                // The pieces are now mixed: after an interruption, they must not look like others' work.
                left: self.left.filter(|left| *left == direction),
                way: Some(direction),
                ..Self::default()
            };
        }
    }
    fn next(&mut self) {
        self.cursor += 1;
        self.finished += 1;
    }
    fn skip(&mut self, reason: &str) {
        *self.skipped.entry(reason.to_owned()).or_default() += 1;
        self.cursor += 1;
    }
}

pub(super) enum Step {
    /// Time in ns and bytes. Then the program's possible waits: length in seconds, share of its accesses, count.
    Worked(f64, u64, (f64, f64, u64)),
    Nothing,
    Skip(&'static str),
    /// Not possible now; the same step comes next.
    Refused(String),
    /// Not possible, and neither is any later step; the reason, if known.
    Stop(Option<String>),
}

/// The piece of memory of the next step.
pub(super) struct Turn<'a> {
    pub(super) memory: &'a mut Memory,
    pub(super) segment: &'a mut Segment,
    /// Share of the program's accesses that go to the piece.
    pub(super) weight: f64,
    pub(super) several: bool,
    /// The change's direction when it was last done.
    pub(super) left: Option<Direction>,
}

#[derive(Default)]
pub(super) struct Slice {
    pub(super) worked_s: f64,
    longest_s: f64,
    bytes: u64,
    /// Waits of the program: (length, share of the accesses, count).
    stalls: Vec<(f64, f64, u64)>,
    /// Copied bytes by source and destination node. Within a node they are below 1 % of its memory's bandwidth.
    pub(super) copied: BTreeMap<(usize, usize), u64>,
    pub(super) why: Option<String>,
}

impl Slice {
    /// Works on a program's memory by a plan until the slice is full. `at` gives a step's segment and piece.
    pub(super) fn of<P: Copy>(
        world: &mut World,
        p: usize,
        (task, pacing): (&mut Task, &Pacing),
        plan: &[P],
        at: impl Fn(P) -> (usize, usize),
        mut work: impl FnMut(Turn<'_>, P) -> Step,
    ) -> Self {
        let mut slice = Self::default();
        while slice.worked_s < pacing.slice_s && slice.bytes < pacing.bytes_per_slice() {
            let Some(step) = plan.get(task.cursor).copied() else {
                break;
            };
            let (index, piece) = at(step);
            let World { memory, programs, .. } = &mut *world;
            let Some(alive) = programs.get_mut(p).and_then(|p| p.alive.as_mut()) else {
                break;
            };
            let whole = alive.resident().0.max(1) as f64;
            let several = alive.processes.len() > 1;
            let segment = match alive.private.get_mut(index) {
                Some(s) => Some(s),
                None => alive.shared.as_mut(),
            };
            let Some(segment) = segment.filter(|s| piece < s.pieces()) else {
                task.skip(NOT_MAPPED);
                continue;
            };
            let turn = Turn {
                weight: segment.weight(piece) * segment.bytes.0 as f64 / whole,
                left: task.left,
                memory,
                segment,
                several,
            };
            match work(turn, step) {
                Step::Worked(ns, bytes, stall) => {
                    let seconds = ns / 1e9;
                    slice.worked_s += seconds;
                    slice.longest_s = slice.longest_s.max(seconds);
                    slice.bytes += bytes;
                    slice.stalls.push(stall);
                    task.refused = 0;
                    task.next();
                }
                Step::Nothing => task.next(),
                Step::Skip(reason) => task.skip(reason),
                Step::Refused(why) => {
                    task.refused += 1;
                    slice.why = (task.refused >= REFUSED_MAX).then_some(why);
                    break;
                }
                Step::Stop(why) => {
                    slice.why = why;
                    break;
                }
            }
        }
        if !slice.stalls.is_empty() {
            world.touch();
        }
        slice
    }

    fn pause(&self, pacing: &Pacing, at_end: bool) -> Nanoseconds {
        if at_end {
            Nanoseconds::ZERO
        } else {
            pacing
                .pause(self.worked_s, self.bytes)
                .max(Nanoseconds::from_millis(1))
        }
    }

    /// Lets the time pass and charges the cost: the mover's CPU time, the program's standstill, and the copies'
    /// traffic, spread over the slice and the pause after it.
    pub(super) fn spend(&self, world: &mut World, p: usize, pacing: &Pacing, at_end: bool) {
        if self.worked_s <= 0.0 {
            return;
        }
        let turn_s = self.worked_s + self.pause(pacing, at_end).as_secs_f64();
        world.copy(p, &self.copied, turn_s);
        for (seconds, weight, count) in &self.stalls {
            world.stall_often(p, *seconds, *weight, *count);
        }
        world.charge(self.worked_s);
        let until = world.now() + nanoseconds(self.worked_s);
        world.advance_to(until);
    }

    pub(super) fn progress(
        &self,
        pacing: &Pacing,
        at_end: bool,
        finished: u64,
        total: u64,
        skipped: BTreeMap<String, u64>,
    ) -> Progress {
        Progress {
            done: at_end,
            finished,
            total,
            skipped,
            stalled: nanoseconds(self.worked_s),
            longest_call: nanoseconds(self.longest_s),
            pause: self.pause(pacing, at_end),
            bloat: Bytes::ZERO,
            verified: at_end,
        }
    }
}

pub(super) fn ended(
    workload: &WorkloadId,
    direction: Direction,
    total: u64,
) -> Result<Progress, PlatformError> {
    match direction {
        Direction::Undo => Ok(Progress {
            finished: 0,
            total,
            skipped: BTreeMap::from([(ENDED.to_owned(), total)]),
            ..done()
        }),
        Direction::Apply => Err(vanished(workload)),
    }
}
