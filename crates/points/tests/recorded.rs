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

/// A loop of Node's, its jump back and two branches of it in 16 windows; the last branch was taken in 48 % of its turns, as the data had it.
fn node_branch() -> Observation {
    observation("node-branch")
}

/// Sets what was counted of the branch in each window: of the window's number and the turns of the loop in it.
fn with_branch(mut seen: Observation, count: impl Fn(usize, u64) -> u64) -> Observation {
    let turns = seen.points[0].counts.clone();
    seen.points[2].counts = turns.iter().enumerate().map(|(i, all)| count(i, *all)).collect();
    seen
}

#[test]
fn a_branch_that_chance_takes_is_no_other_work_than_its_loop() {
    let seen = node_branch();
    let Choice::Chosen(chosen) = choose(&seen, Limits::default()) else {
        panic!("{:?}", choose(&seen, Limits::default()));
    };
    assert_eq!(
        chosen.cluster,
        [0, 1],
        "all of the turns rather than some: {chosen:?}"
    );
}

#[test]
fn a_branch_that_goes_its_own_way_is_another_work() {
    let abstained = |seen: &Observation| match choose(seen, Limits::default()) {
        Choice::Abstained(why) => assert!(why.contains("two clusters"), "{why}"),
        other => panic!("{other:?}"),
    };
    // More often in the windows in which the program was slowed: what comes by time.
    let slowed: Vec<bool> = node_branch().burden.iter().map(|b| *b > 0.0).collect();
    let by_time = |i: usize, all: u64| all * if slowed[i] { 56 } else { 40 } / 100;
    abstained(&with_branch(node_branch(), by_time));
    // As often in the mean, and less evenly than a coin would.
    let uneven = |i: usize, all: u64| all * if i % 2 == 0 { 33 } else { 63 } / 100;
    abstained(&with_branch(node_branch(), uneven));
    // In another function, where anything may be.
    let mut elsewhere = node_branch();
    elsewhere.points[2].function += 0x1000;
    abstained(&elsewhere);
    // More often than the loop in a window: no part of it.
    abstained(&with_branch(node_branch(), |i, all| {
        if i == 3 { all + 9 } else { all / 2 }
    }));
}

#[test]
fn more_windows_are_asked_for_where_the_machine_was_too_even_to_tell() {
    let mut seen = node_branch();
    let turns: Vec<u64> = (seen.burden.iter().enumerate())
        .map(|(i, b)| if *b > 0.0 { 85 } else { 95 } + 5 * (i as u64 % 4))
        .collect();
    for point in &mut seen.points[..2] {
        point.counts.clone_from(&turns);
    }
    let coin = [5_i64, -3, 1, -6, 4, 0, -2, 3, -4, 6, -1, 2, -5, 1, 3, -4];
    let seen = with_branch(seen, |i, all| (all / 2).saturating_add_signed(coin[i]));
    let choice = choose(&seen, Limits::default());
    assert!(
        matches!(&choice, Choice::Undecided(why) if why.contains("two clusters")),
        "{choice:?}"
    );
}
