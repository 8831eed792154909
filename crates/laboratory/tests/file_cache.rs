//! The controllers of the file cache on the two-pool memory of the simulated machine: what seed 003 shows in its
//! Figures 6 to 11, with autotune's rules and with homeostat's own.
#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests")]

use homeostat_model::Nanoseconds;
use homeostat_simulator::paging::{PagingSpec, TICK_S, TwoPool, Wants};
use homeostat_strategies::{autotune, ceiling};

/// The reader runs from here to there (seconds).
const READER: (f64, f64) = (60.0, 240.0);
/// The whole run.
const END: f64 = 360.0;
/// The writer's working set and its touches per second, and the pages that the reader reads: T7 of the machine model.
const WANTS: Wants = Wants {
    working_pages: 60_000.0,
    touches_per_s: 40_000.0,
    file_pages_per_s: 2500.0,
};

/// Who moves the ceiling.
enum Control {
    Nobody,
    Autotune(autotune::Autotune),
    Own(ceiling::Ceiling),
}

/// What a run showed.
#[derive(Debug, Default)]
struct Run {
    /// Mean speed of the writer while it is alone, in the second half of the reader's time, and at the end (1 = it never waits).
    alone: f64,
    with_reader: f64,
    at_end: f64,
    /// Seconds from the start of the reader until the writer, which had fallen below 90 %, is back there while the reader runs.
    recovered_s: Option<f64>,
    /// Pages taken from the writer while the reader ran.
    paged_out: f64,
    /// Share of its speed that the reader had on average.
    reader: f64,
}

fn run(memory_mib: u64, mut control: Control) -> Run {
    let mut pools = TwoPool::new(PagingSpec {
        memory_mib,
        ..PagingSpec::default()
    });
    pools.populate(WANTS.working_pages);
    let page = pools.page().0 as f64;
    let mut r = Run::default();
    // Since the controller looked last: pages in, pages out, seconds.
    let (mut came, mut went, mut since) = (0.0, 0.0, 0.0);
    let mut fell = false;
    let ticks = (END / TICK_S) as usize;
    for i in 0..ticks {
        let at = i as f64 * TICK_S;
        let had = pools.anonymous().0 as f64 / page;
        let reads = (READER.0..READER.1).contains(&at);
        let wants = Wants {
            file_pages_per_s: if reads { WANTS.file_pages_per_s } else { 0.0 },
            ..WANTS
        };
        pools.tick(at, wants);
        let back = pools.faults() * TICK_S;
        let out = (had + back - pools.anonymous().0 as f64 / page).max(0.0);
        came += back;
        went += out;
        since += TICK_S;
        let share = |from: f64, to: f64, value: f64| value * TICK_S / (to - from);
        let half = (READER.0 + READER.1) / 2.0;
        if at < READER.0 {
            r.alone += share(0.0, READER.0, pools.speed());
        } else if reads {
            r.paged_out += out;
            r.reader += share(READER.0, READER.1, pools.read_speed());
            fell |= pools.speed() < 0.9;
            if fell && pools.speed() >= 0.9 {
                r.recovered_s.get_or_insert(at - READER.0);
            }
            if at >= half {
                r.with_reader += share(half, READER.1, pools.speed());
            }
        } else if at >= END - 30.0 {
            r.at_end += share(END - 30.0, END, pools.speed());
        }
        let now = Nanoseconds::from_secs_f64(at + TICK_S);
        let set = match &mut control {
            Control::Autotune(a) if since >= 4.0 - 1e-9 => a
                .step(&autotune::Sample {
                    at: now,
                    paged_in: came / since,
                    paged_out: went / since,
                    numperm: pools.file_share() * 100.0,
                    free: pools.unused().0 as f64 / pools.memory().0 as f64 * 100.0,
                })
                .map(|p| p.maxperm / 100.0),
            Control::Own(c) if since >= 2.0 - 1e-9 => c.step(&ceiling::Sample {
                at: now,
                stalled: 1.0 - pools.speed(),
                refaults: came / since,
                files: pools.file_share(),
            }),
            Control::Nobody | Control::Autotune(_) | Control::Own(_) => continue,
        };
        (came, went, since) = (0.0, 0.0, 0.0);
        if let Some(share) = set {
            pools.set_ceiling(share);
        }
    }
    r
}

fn classic() -> Control {
    let found = autotune::Parameters {
        minperm: 20.0,
        maxperm: 80.0,
        maxclient: 80.0,
        strict: false,
    };
    let limits = autotune::Limits::default();
    Control::Autotune(autotune::Autotune::new(limits, found, Nanoseconds::ZERO))
}

fn own() -> Control {
    Control::Own(ceiling::Ceiling::new(ceiling::Gains::default()))
}

#[test]
fn figures_6_and_7_with_sufficient_memory_the_controllers_cost_nothing() {
    for control in [Control::Nobody, classic(), own()] {
        let r = run(4096, control);
        println!("{r:?}");
        assert!(
            r.alone > 0.999 && r.with_reader > 0.999 && r.at_end > 0.999,
            "{r:?}"
        );
        assert!(r.reader > 0.999 && r.paged_out < 1.0, "{r:?}");
    }
}

#[test]
fn figures_8_to_11_the_writer_recovers_while_the_reader_runs() {
    let nobody = run(512, Control::Nobody);
    let classic = run(512, classic());
    let own = run(512, own());
    println!("nobody   {nobody:?}\nautotune {classic:?}\nown      {own:?}");
    // Figure 8: it makes no progress while the reader runs.
    assert!(nobody.with_reader < 0.1 && nobody.recovered_s.is_none());
    // Figure 9: it recovers while the reader runs, in "about a minute".
    assert!(classic.with_reader > 0.9);
    let minute = classic.recovered_s.unwrap();
    assert!((20.0..120.0).contains(&minute), "{minute}");
    // Figures 10 and 11: page-outs do not go on.
    assert!(classic.paged_out < 0.5 * nobody.paged_out);
    // homeostat's own takes less from it, and is back earlier.
    assert!(own.with_reader > 0.9 && own.recovered_s.unwrap() < minute);
    assert!(own.paged_out < classic.paged_out);
}
