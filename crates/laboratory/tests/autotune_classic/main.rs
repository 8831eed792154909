//! Seed 003's Figures 6 to 11: the rules of IBM's autotune on two pools of memory.
//!
//! A writer and a reader of a large file, with sufficient and with insufficient memory. The source tells neither the sizes of its
//! programs nor the speed of its disk. Sizes and speeds are those of machine-model T7, which was fitted to the published "about a
//! minute". The reader reads a file over and over, half as fast from memory as the writer writes, as in the source.

mod pools;

use homeostat_model::Nanoseconds;
use homeostat_strategies::autotune::{Autotune, Limits, Parameters, Sample};
use pools::{TICK_S, TwoPool, Wants};

/// The reader runs from here to there, and the run ends (seconds).
const READER: (f64, f64) = (60.0, 240.0);
const END_S: f64 = 420.0;
/// Memory in MiB that is enough for both programs, and that is not.
const SUFFICIENT_MIB: u64 = 1024;
const INSUFFICIENT_MIB: u64 = 512;
/// The writer (T7).
const WRITER: Wants = Wants {
    working_pages: 60_000.0,
    touches_per_s: 40_000.0,
    file_pages_per_s: 0.0,
    file_pages: 0.0,
    cached_pages_per_s: 0.0,
};
/// The writer, and a reader of more pages than the smaller memory holds and fewer than the larger one leaves; its speed from the
/// disk is T7's.
const BOTH: Wants = Wants {
    file_pages_per_s: 2500.0,
    file_pages: 150_000.0,
    cached_pages_per_s: 20_000.0,
    ..WRITER
};
/// Share of the memory that files may use as AIX has it (seed 003, 3.1: `maxperm` is 80 %, `minperm` 20 %).
const MAXPERM: f64 = 0.8;
const MINPERM: f64 = 0.2;
/// A point is the mean of so many ticks: 2 seconds.
const TICKS_PER_POINT: u64 = 20;
/// autotune looks every so many ticks: 4 seconds.
const TICKS_PER_LOOK: u64 = 40;
/// The writer counts as back at this share of its speed.
const BACK: f64 = 0.9;
/// Spikes are means over so many points: 10 seconds, the interval at which the source's programs report.
const SPIKE_POINTS: usize = 5;
/// Page-outs count as going on in the last so many seconds of the reader.
const ONGOING_S: f64 = 60.0;

/// Two seconds of a run; rates are means over them.
#[derive(Clone, Copy, Debug, Default)]
struct Point {
    /// When it ended, in seconds.
    at_s: f64,
    /// Speed of the writer, 1 = it never waits.
    speed: f64,
    /// Pages per second that the reader got.
    reads: f64,
    /// Pages per second that went to paging space.
    paged_out: f64,
}

/// Runs the load with the ceiling moved by these rules; with none it stays as AIX has it.
fn run(memory_mib: u64, mut rules: Option<Autotune>) -> Vec<Point> {
    let mut pools = TwoPool::new(memory_mib, MAXPERM, WRITER.working_pages);
    let (mut points, mut point) = (Vec::new(), Point::default());
    let (mut paged_in, mut paged_out) = (0.0, 0.0);
    for tick in 0..(END_S / TICK_S) as u64 {
        let at_s = tick as f64 * TICK_S;
        let reads = (READER.0..READER.1).contains(&(at_s + 1e-9));
        pools.tick(if reads { BOTH } else { WRITER });
        let part = 1.0 / TICKS_PER_POINT as f64;
        point.speed += pools.speed * part;
        point.reads += pools.reads * part;
        point.paged_out += pools.paged_out * part;
        paged_in += pools.faults / TICKS_PER_LOOK as f64;
        paged_out += pools.paged_out / TICKS_PER_LOOK as f64;
        let ticks = tick + 1;
        if ticks % TICKS_PER_POINT == 0 {
            point.at_s = ticks as f64 * TICK_S;
            points.push(std::mem::take(&mut point));
        }
        if ticks % TICKS_PER_LOOK == 0 {
            let sample = Sample {
                at: Nanoseconds::from_millis(ticks * 100),
                paged_in: std::mem::take(&mut paged_in),
                paged_out: std::mem::take(&mut paged_out),
                numperm: pools.file_share() * 100.0,
                free: pools.unused_share() * 100.0,
            };
            if let Some(set) = rules.as_mut().and_then(|rules| rules.step(&sample)) {
                pools.set_ceiling(set.maxperm / 100.0);
            }
        }
    }
    points
}

/// What the figures say of a run.
#[derive(Debug)]
struct Shown {
    /// Share of its speed that the writer lost while the reader ran.
    dip: f64,
    /// Its speed in the second half of the reader's time.
    with_reader: f64,
    /// Seconds from the reader's start until the writer, which had fallen, was back while the reader ran.
    recovered_s: Option<f64>,
    /// Seconds from the reader's end until the writer was back; `None`: it was back before.
    resumed_s: Option<f64>,
    /// Most page-outs per second, over 10 seconds.
    spike: f64,
    /// Page-outs per second while the reader ran …
    paged_out: f64,
    /// … and in its last minute.
    ongoing: f64,
    /// Pages per second that the reader got.
    reads: f64,
}

fn mean(points: &[Point], of: impl Fn(&Point) -> f64) -> f64 {
    points.iter().map(of).sum::<f64>() / points.len() as f64
}

impl Shown {
    fn of(points: &[Point]) -> Self {
        let between = |from_s: f64, to_s: f64| {
            let at = |s: f64| points.partition_point(|p| p.at_s <= s + 1e-6);
            &points[at(from_s)..at(to_s)]
        };
        let is_back = |p: &Point| p.speed >= BACK;
        let during = between(READER.0, READER.1);
        let fell = during.iter().position(|p| !is_back(p));
        let recovered = fell.and_then(|fell| during[fell..].iter().find(|p| is_back(p)));
        let was_back = during.last().is_some_and(is_back);
        let after = between(READER.1, END_S);
        let resumed = after.iter().find(|p| !was_back && is_back(p));
        let spikes = during.windows(SPIKE_POINTS);
        Self {
            dip: 1.0 - mean(during, |p| p.speed) / mean(between(0.0, READER.0), |p| p.speed),
            with_reader: mean(between((READER.0 + READER.1) / 2.0, READER.1), |p| p.speed),
            recovered_s: recovered.map(|p| p.at_s - READER.0),
            resumed_s: resumed.map(|p| p.at_s - READER.1),
            spike: spikes.map(|w| mean(w, |p| p.paged_out)).fold(0.0, f64::max),
            paged_out: mean(during, |p| p.paged_out),
            ongoing: mean(between(READER.1 - ONGOING_S, READER.1), |p| p.paged_out),
            reads: mean(during, |p| p.reads),
        }
    }
}

/// Nobody moves the ceiling, and autotune does.
fn nobody_and_autotune(memory_mib: u64) -> [Shown; 2] {
    let found = Parameters {
        minperm: MINPERM * 100.0,
        maxperm: MAXPERM * 100.0,
        maxclient: MAXPERM * 100.0,
        strict: false,
    };
    let autotune = Autotune::new(Limits::default(), found, Nanoseconds::ZERO);
    [None, Some(autotune)].map(|rules| Shown::of(&run(memory_mib, rules)))
}

#[test]
fn with_autotunes_rules_the_writer_recovers_as_in_figures_6_to_11() {
    // Figures 6 and 7: with sufficient memory they cost nothing, and the file is read from memory after the first time.
    for s in nobody_and_autotune(SUFFICIENT_MIB) {
        assert!(
            s.dip < 0.001 && s.paged_out < 0.01 && s.resumed_s.is_none(),
            "{s:?}"
        );
        assert!(s.reads > 10_000.0, "{s:?}");
    }
    let [nobody, autotune] = nobody_and_autotune(INSUFFICIENT_MIB);
    // Figure 8: no progress while the reader runs, and over 30 s to resume after it.
    assert!(
        nobody.with_reader < 0.1 && nobody.recovered_s.is_none(),
        "{nobody:?}"
    );
    assert!(nobody.resumed_s.unwrap() > 30.0, "{nobody:?}");
    // Figure 9: it recovers while the reader runs, in "about a minute".
    assert!(
        autotune.with_reader > 0.9 && autotune.resumed_s.is_none(),
        "{autotune:?}"
    );
    let minute = autotune.recovered_s.unwrap();
    assert!((20.0..120.0).contains(&minute), "{minute}");
    // Figures 10 and 11: the spike is smaller by 30 % or more, and page-outs do not go on.
    assert!(
        autotune.spike < 0.7 * nobody.spike && autotune.ongoing < 0.05 * nobody.ongoing,
        "{nobody:?} {autotune:?}"
    );
    // The reader loses nothing: it never found anything in memory.
    assert!(
        (autotune.reads / nobody.reads - 1.0).abs() < 0.01,
        "{nobody:?} {autotune:?}"
    );
}
