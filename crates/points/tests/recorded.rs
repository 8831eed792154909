//! What was counted in real programs by searches on a busy virtual machine of two CPUs, and what is made of it.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests and their helpers")]

use homeostat_points::choice::{Choice, Chosen, Limits, Observation, choose};

fn observation(name: &str) -> Observation {
    let path = format!("{}/fixtures/{name}.json", env!("CARGO_MANIFEST_DIR"));
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

fn chosen(name: &str) -> (Observation, Chosen) {
    let seen = observation(name);
    match choose(&seen, Limits::default()) {
        Choice::Chosen(chosen) => (seen, chosen),
        Choice::Abstained(why) | Choice::Undecided(why) => panic!("{name}: {why}"),
    }
}

/// Counts of the chosen point for one of a signal.
fn per_signal(name: &str, signal: &str) -> f64 {
    let (seen, chosen) = chosen(name);
    let counts: u64 = seen.points[chosen.point].counts.iter().sum();
    let signal = seen.signals.iter().find(|s| s.name.contains(signal)).unwrap();
    counts as f64 / signal.counts.iter().sum::<f64>()
}

#[test]
fn in_redis_the_point_counts_requests_and_not_turns_of_the_event_loop() {
    // One segment is one request, or one pipeline of 16; the event loop turned five to ten times less often.
    let each = per_signal("redis-P1", "segments");
    assert!(
        (each - each.round()).abs() < 0.03 * each && each.round() >= 1.0,
        "{each}"
    );
    let batch = per_signal("redis-P16", "segments");
    assert!(
        (batch - batch.round()).abs() < 0.05 * batch && batch.round() >= 1.0,
        "{batch}"
    );
}

#[test]
fn in_postgresql_the_point_counts_queries() {
    let each = per_signal("postgres-ro", "segments");
    assert!(
        (each - each.round()).abs() < 0.05 * each && each.round() >= 1.0,
        "{each}"
    );
}

#[test]
fn a_point_is_found_in_an_interpreter_a_compressor_and_a_database_engine() {
    // The second Python's interpreter is reached through a table of jumps.
    for name in ["python", "python-table", "gzip", "sqlite"] {
        let (seen, chosen) = chosen(name);
        assert!(chosen.cluster.len() >= 2, "{name}");
        assert!(!seen.points[chosen.point].waits, "{name}");
        assert!(chosen.rate > 100.0, "{name}: {}", chosen.rate);
    }
}

#[test]
fn in_go_the_ticks_of_its_scheduler_are_not_taken_for_work() {
    // Fourteen points run 72 times a second, whatever the program does; one follows its work.
    let (_, chosen) = chosen("go");
    assert!(chosen.rate > 10_000.0, "{chosen:?}");
}

#[test]
fn compiled_java_is_abstained_from() {
    let Choice::Abstained(why) = choose(&observation("java"), Limits::default()) else {
        panic!("a point in the virtual machine counts no work of the program");
    };
    assert!(why.contains("little weight") || why.contains("clock"), "{why}");
}
