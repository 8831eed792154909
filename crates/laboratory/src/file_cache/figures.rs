//! Seed 003's Figures 6 to 11: a writer and a reader of a large file, with sufficient and with insufficient memory.
//!
//! The source tells neither the sizes of its programs nor the speed of its disk. Sizes and speeds are those of
//! machine-model T7, which was fitted to the published "about a minute"; the reader reads a file over and over, half as fast
//! from memory as the writer writes, as in the source (3,000 and 6,000 MB per 10 s).

use super::{Control, Load, POINT_S, Piece, Run, Tuning, machine, run};
use homeostat_simulator::paging::Wants;

/// The reader runs from here to there (seconds).
pub const READER: (f64, f64) = (60.0, 240.0);
/// Length of a run (seconds).
pub const END_S: f64 = 420.0;
/// Memory in MiB that is enough for both programs, and that is not.
pub const SUFFICIENT_MIB: u64 = 1024;
/// See [`SUFFICIENT_MIB`].
pub const INSUFFICIENT_MIB: u64 = 512;
/// The writer (T7).
pub const WRITER: Wants = Wants {
    working_pages: 60_000.0,
    touches_per_s: 40_000.0,
    file_pages_per_s: 0.0,
    file_pages: 0.0,
    cached_pages_per_s: 0.0,
};
/// The file has so many pages: more than the smaller memory holds, less than the larger one leaves.
const FILE_PAGES: f64 = 150_000.0;
/// The reader's speed from the disk (T7) and from memory, in pages per second.
const DISK_PAGES_PER_S: f64 = 2500.0;
const CACHED_PAGES_PER_S: f64 = 20_000.0;
/// The writer counts as back at this share of its speed.
const BACK: f64 = 0.9;
/// Spikes are means over so many points: 10 seconds, the interval at which the source's programs report.
const SPIKE_POINTS: usize = 5;
/// Page-outs count as going on in the last so many seconds of the reader.
const ONGOING_S: f64 = 60.0;

/// The writer, and a reader of a file of that size.
pub fn both(file_pages: f64) -> Wants {
    Wants {
        file_pages_per_s: DISK_PAGES_PER_S,
        file_pages,
        cached_pages_per_s: CACHED_PAGES_PER_S,
        ..WRITER
    }
}

fn load(memory_mib: u64) -> Load {
    let piece = |from_s, wants| Piece { from_s, wants };
    Load {
        spec: machine(memory_mib),
        pieces: vec![
            piece(0.0, WRITER),
            piece(READER.0, both(FILE_PAGES)),
            piece(READER.1, WRITER),
        ],
        end_s: END_S,
    }
}

/// A run and what the figures say of it.
#[derive(Clone, Debug, PartialEq)]
pub struct Shown {
    /// Who controlled.
    pub control: Control,
    /// The run.
    pub run: Run,
    /// Share of its speed that the writer lost while the reader ran, 0..1.
    pub dip: f64,
    /// Its speed in the second half of the reader's time, 1 = it never waits.
    pub with_reader: f64,
    /// Seconds from the reader's start until the writer, which had fallen, was back while the reader ran; `None`: it was
    /// not, or had not fallen.
    pub recovered_s: Option<f64>,
    /// Seconds from the reader's end until the writer was back; `None`: it was back before.
    pub resumed_s: Option<f64>,
    /// Most page-outs per second, over 10 seconds …
    pub spike: f64,
    /// … and over two.
    pub sharp_spike: f64,
    /// Page-outs per second in the last minute of the reader.
    pub ongoing: f64,
    /// Pages taken from the writer while the reader ran.
    pub paged_out: f64,
    /// Pages per second that the reader got.
    pub reads: f64,
}

impl Shown {
    fn of(control: Control, memory_mib: u64) -> Self {
        let run = run(&load(memory_mib), &Tuning::of(control));
        let is_back = |p: &super::Point| p.writer().is_some_and(|speed| speed >= BACK);
        let during = run.between(READER.0, READER.1);
        let fell = during.iter().position(|p| !is_back(p));
        let recovered_s = fell.and_then(|fell| {
            let back = during.iter().skip(fell).find(|p| is_back(p))?;
            Some(back.at_s - READER.0)
        });
        let after = run.between(READER.1, END_S);
        let was_back = during.last().is_some_and(is_back);
        let resumed_s = (!was_back)
            .then(|| after.iter().find(|p| is_back(p)).map(|p| p.at_s - READER.1))
            .flatten();
        let spike = |points: usize| {
            during
                .windows(points)
                .map(|w| w.iter().map(|p| p.paged_out).sum::<f64>() / w.len() as f64)
                .fold(0.0, f64::max)
        };
        let alone = run.writer(0.0, READER.0);
        Self {
            control,
            dip: 1.0 - run.writer(READER.0, READER.1) / alone,
            with_reader: run.writer((READER.0 + READER.1) / 2.0, READER.1),
            recovered_s,
            resumed_s,
            spike: spike(SPIKE_POINTS),
            sharp_spike: spike(1),
            ongoing: run.mean(READER.1 - ONGOING_S, READER.1, |p| p.paged_out),
            paged_out: during.iter().map(|p| p.paged_out * POINT_S).sum(),
            reads: run.mean(READER.0, READER.1, |p| p.reads),
            run,
        }
    }
}

/// Figures 6 and 7 (sufficient memory), or 8 to 11 (insufficient memory): nobody, autotune, homeostat's own.
pub fn shown(memory_mib: u64) -> Vec<Shown> {
    Control::SHOWN
        .into_iter()
        .map(|control| Shown::of(control, memory_mib))
        .collect()
}

/// When the writer of [`after_the_writer`] ends, and the length of that run (seconds).
pub const WRITER_ENDS_S: f64 = 240.0;
const AFTER_END_S: f64 = 1200.0;
/// Its file, which fits once the writer has gone.
const SMALLER_FILE_PAGES: f64 = 100_000.0;
/// The ceiling of an expert who protects the writer.
pub const EXPERT: f64 = 0.5;

/// "Unlike using a statically limited file cache, when the CPU bound process terminates, the disk I/O bound process will run
/// at full speed" (seed 003, 4.6): seconds from the writer's end until the reader reads from memory; `None`: never.
pub fn after_the_writer(control: Control) -> Option<f64> {
    let piece = |from_s, wants| Piece { from_s, wants };
    let with = both(SMALLER_FILE_PAGES);
    let without = Wants {
        working_pages: 0.0,
        touches_per_s: 0.0,
        ..with
    };
    let load = Load {
        spec: machine(INSUFFICIENT_MIB),
        pieces: vec![
            piece(0.0, WRITER),
            piece(READER.0, with),
            piece(WRITER_ENDS_S, without),
        ],
        end_s: AFTER_END_S,
    };
    let run = run(&load, &Tuning::of(control));
    let fast = |p: &&super::Point| p.reads > 2.0 * DISK_PAGES_PER_S;
    run.between(WRITER_ENDS_S, AFTER_END_S)
        .iter()
        .find(fast)
        .map(|p| p.at_s - WRITER_ENDS_S)
}
