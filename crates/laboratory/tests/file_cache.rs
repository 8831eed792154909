//! The controllers of the file cache on the two-pool memory of the simulated machine: what seed 003 shows in its
//! Figures 6 to 11, with autotune's rules and with homeostat's own; and their margins.
#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests")]

use homeostat_laboratory::file_cache::figures::{
    EXPERT, INSUFFICIENT_MIB, SUFFICIENT_MIB, Shown, after_the_writer, shown,
};
use homeostat_laboratory::file_cache::sweep::{Held, held};
use homeostat_laboratory::file_cache::{Control, Tuning, loads};

/// Seed of the random loads.
const SEED: u64 = 1;

fn three(memory_mib: u64) -> [Shown; 3] {
    shown(memory_mib).try_into().unwrap()
}

#[test]
fn figures_6_and_7_with_sufficient_memory_the_controllers_cost_nothing() {
    for s in three(SUFFICIENT_MIB) {
        assert!(
            s.dip < 0.001 && s.paged_out < 1.0 && s.resumed_s.is_none(),
            "{s:?}"
        );
        // The file is read from memory after the first time.
        assert!(s.reads > 10_000.0, "{s:?}");
    }
}

#[test]
fn figures_8_to_11_the_writer_recovers_while_the_reader_runs() {
    let [nobody, classic, own] = three(INSUFFICIENT_MIB);
    // Figure 8: no progress while the reader runs, and over 30 s to resume after it.
    assert!(nobody.with_reader < 0.1 && nobody.recovered_s.is_none());
    assert!(nobody.resumed_s.unwrap() > 30.0, "{:?}", nobody.resumed_s);
    // Figure 9: it recovers while the reader runs, in "about a minute".
    assert!(classic.with_reader > 0.9 && classic.resumed_s.is_none());
    let minute = classic.recovered_s.unwrap();
    assert!((20.0..120.0).contains(&minute), "{minute}");
    // Figures 10 and 11: the spike is smaller by 30 % or more, and page-outs do not go on.
    assert!(
        classic.spike < 0.7 * nobody.spike,
        "{} {}",
        classic.spike,
        nobody.spike
    );
    assert!(classic.ongoing < 0.05 * nobody.ongoing);
    // homeostat's own takes less from it, and is back earlier.
    assert!(own.with_reader > 0.9 && own.recovered_s.unwrap() < minute);
    assert!(own.paged_out < classic.paged_out && own.spike < classic.spike);
    // The reader loses nothing: it never found anything in memory.
    for s in [&classic, &own] {
        assert!(
            (s.reads / nobody.reads - 1.0).abs() < 0.01,
            "{} {}",
            s.reads,
            nobody.reads
        );
    }
}

#[test]
fn when_the_writer_ends_the_reader_gets_its_memory_unless_a_person_fixed_the_ceiling() {
    assert!(after_the_writer(Control::Autotune).is_some());
    assert!(after_the_writer(Control::Own).is_some());
    assert_eq!(after_the_writer(Control::Fixed(EXPERT)), None);
}

#[test]
fn both_hold_a_writer_over_gains_and_delays() {
    let held = |control, gain, delay_s| -> Held {
        held(Tuning {
            gain,
            delay_s,
            ..Tuning::of(control)
        })
    };
    for control in [Control::Autotune, Control::Own] {
        for (gain, delay_s) in [(0.5, 0.0), (1.0, 0.0), (2.0, 0.0), (1.0, 4.0)] {
            let h = held(control, gain, delay_s);
            assert!(h.holds(), "{h:?}");
        }
    }
    let nobody = held(Control::Nobody, 1.0, 0.0);
    assert!(!nobody.holds(), "{nobody:?}");
}

#[test]
fn on_random_loads_homeostats_own_is_never_far_from_the_expert() {
    let cases = loads::cases(12, SEED, 2);
    let sum = |i: usize| cases.iter().map(|c| c.of_the_experts(i)).sum::<f64>() / cases.len() as f64;
    assert!(sum(2) > sum(0), "{} {}", sum(2), sum(0));
    for case in &cases {
        assert!(case.of_the_experts(2) > 0.8, "{case:?}");
    }
}
