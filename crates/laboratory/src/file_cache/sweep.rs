//! How much the gain and the delay of the controllers may change before they lose their hold: an hour of a writer beside an
//! endless reader, for each gain and each delay.

use super::figures::{INSUFFICIENT_MIB, WRITER, both};
use super::{CEILING_FOUND, Load, Piece, Run, Tuning, machine, run};

/// The reader starts (seconds), and runs for an hour.
pub const READER_S: f64 = 60.0;
/// Length of a run (seconds).
pub const END_S: f64 = READER_S + 3600.0;
/// What is measured as the steady state begins here (seconds).
const STEADY_S: f64 = READER_S + 1800.0;
/// The writer counts as back at this share of its speed, in the mean of a minute.
const BACK: f64 = 0.9;
const MINUTE_S: f64 = 60.0;

/// How a controller held a writer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Held {
    /// Who controlled, and how.
    pub tuning: Tuning,
    /// Seconds from the reader's start until no minute came any more in which the writer had less than nine tenths of its
    /// speed; `None`: the last such minute ended in the steady half hour.
    pub settled_s: Option<f64>,
    /// Speed of the writer in the second half hour, 1 = it never waits.
    pub writer: f64,
    /// … in its worst minute.
    pub worst_minute: f64,
    /// Share of the memory that nobody misses that files had in the second half hour.
    pub files: f64,
    /// How far files were pushed below that at the worst moment of the whole run, as a share of it.
    pub overshoot: f64,
    /// Changes of the ceiling's direction per hour, in the second half hour.
    pub reversals_per_h: f64,
    /// Pages per second that went to paging space in the second half hour.
    pub paged_out: f64,
}

impl Held {
    /// Whether the controller does its work: the writer works, nothing swings, and files have at least half of what nobody
    /// misses.
    pub fn holds(&self) -> bool {
        self.settled_s.is_some() && self.reversals_per_h <= REVERSALS_MAX && self.files >= FILES_MIN
    }
}

/// More changes of direction per hour than this are swinging: one look over the edge a minute, there and back.
pub const REVERSALS_MAX: f64 = 120.0;
/// Files must have this share of the memory that nobody misses.
pub const FILES_MIN: f64 = 0.5;

fn load() -> Load {
    let piece = |from_s, wants| Piece { from_s, wants };
    Load {
        spec: machine(INSUFFICIENT_MIB),
        pieces: vec![piece(0.0, WRITER), piece(READER_S, both(0.0))],
        end_s: END_S,
    }
}

/// Share of the memory that files can have without anybody missing it.
fn spare(load: &Load) -> f64 {
    let spec = load.spec;
    let pages = (spec.memory_mib * 1024 * 1024 / spec.page_bytes) as f64;
    (pages - spec.reserve_pages as f64 - WRITER.working_pages) / pages
}

/// Runs a controller for an hour beside the reader.
pub fn held(tuning: Tuning) -> Held {
    let load = load();
    let run = run(&load, &tuning);
    let spare = spare(&load);
    // The file pool grows for a while before it can be too small.
    let lowest = run
        .between(first_fall(&run), END_S)
        .iter()
        .map(|p| p.files)
        .fold(spare, f64::min);
    let minutes = minutes(&run);
    let settled_s = minutes
        .iter()
        .rposition(|speed| *speed < BACK)
        .map_or(0.0, |last| (last + 1) as f64 * MINUTE_S);
    let steady = ((STEADY_S - READER_S) / MINUTE_S) as usize;
    Held {
        tuning,
        settled_s: (settled_s <= STEADY_S - READER_S).then_some(settled_s),
        writer: run.writer(STEADY_S, END_S),
        worst_minute: minutes.iter().skip(steady).copied().fold(1.0, f64::min),
        files: run.mean(STEADY_S, END_S, |p| p.files.min(spare)) / spare,
        overshoot: (spare - lowest) / spare,
        reversals_per_h: f64::from(run.reversals(STEADY_S, END_S)) * 3600.0 / (END_S - STEADY_S),
        paged_out: run.mean(STEADY_S, END_S, |p| p.paged_out),
    }
}

/// When the ceiling fell for the first time (seconds).
fn first_fall(run: &Run) -> f64 {
    let before = std::iter::once(CEILING_FOUND).chain(run.moves.iter().map(|m| m.1));
    let fall = run
        .moves
        .iter()
        .zip(before)
        .find(|((_, share), before)| share < before);
    fall.map_or(END_S, |((at_s, _), _)| *at_s)
}

/// Speed of the writer in each minute from the reader's start on.
fn minutes(run: &Run) -> Vec<f64> {
    let count = ((END_S - READER_S) / MINUTE_S) as usize;
    (0..count)
        .map(|i| {
            let from_s = READER_S + i as f64 * MINUTE_S;
            run.writer(from_s, from_s + MINUTE_S)
        })
        .collect()
}
