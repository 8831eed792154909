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
/// The loop in which they are was not recorded: the start of their piece stands for it.
fn node_branch() -> Observation {
    let mut seen = observation("node-branch");
    for point in &mut seen.points {
        point.innermost_loop = Some(point.function);
    }
    seen
}

/// The same with so many times as many counts.
fn node_branch_for_longer(times: u64) -> Observation {
    let mut seen = node_branch();
    for count in seen.points.iter_mut().flat_map(|p| &mut p.counts) {
        *count *= times;
    }
    seen
}

/// Sets what was counted of the branch in each window: of the window's number and the turns of the loop in it.
fn with_branch(mut seen: Observation, count: impl Fn(usize, u64) -> f64) -> Observation {
    let turns = seen.points[0].counts.clone();
    let of = turns.iter().enumerate();
    seen.points[2].counts = of.map(|(i, all)| count(i, *all).round() as u64).collect();
    seen
}

/// What a coin might do, in standard deviations.
const COIN: [f64; 16] = [
    0.9, -0.6, 0.2, -1.2, 0.8, 0.1, -0.4, 0.6, -0.8, 1.2, -0.2, 0.4, -1.0, 0.2, 0.6, -0.8,
];

fn by_coin(i: usize, all: u64) -> f64 {
    0.5 * all as f64 + COIN[i] * 0.5 * (all as f64).sqrt()
}

fn told(seen: &Observation, expected: fn(&Choice) -> bool) {
    let choice = choose(seen, Limits::default());
    assert!(expected(&choice), "{choice:?}");
}

fn is_of_two(choice: &Choice) -> bool {
    matches!(choice, Choice::Abstained(why) if why.contains("two clusters"))
}

#[test]
fn a_branch_that_chance_takes_is_no_other_work_than_its_loop() {
    let of_turns = |choice: &Choice| matches!(choice, Choice::Chosen(c) if c.cluster == [0, 1]);
    told(&with_branch(node_branch_for_longer(10), by_coin), of_turns);
    // Where the branch has more places than the loop, all of the turns are counted nevertheless.
    let mut more = with_branch(node_branch_for_longer(10), by_coin);
    more.points
        .extend([more.points[2].clone(), more.points[2].clone()]);
    told(&more, of_turns);
    // … unless they would be left without a witness.
    more.points.remove(1);
    told(&more, |c| matches!(c, Choice::Chosen(c) if c.witness.is_some()));
}

#[test]
fn a_branch_that_goes_its_own_way_is_another_work() {
    let longer = || node_branch_for_longer(10);
    let slowed: Vec<bool> = node_branch().burden.iter().map(|b| *b > 0.0).collect();
    // What comes by time: a tenth more often in the windows in which the program was slowed by a tenth.
    let by_time = |i: usize, all: u64| by_coin(i, all) * if slowed[i] { 1.11 } else { 1.0 };
    told(&with_branch(longer(), by_time), is_of_two);
    // … which a third of the counts would not tell from a coin but for that.
    told(&with_branch(node_branch_for_longer(3), by_time), is_of_two);
    // As often in the mean, and less evenly than a coin would.
    let uneven = |i: usize, all: u64| by_coin(i, all) * if i % 4 < 2 { 0.9 } else { 1.1 };
    told(&with_branch(longer(), uneven), is_of_two);
    // In another loop or function, where anything may be, or in none.
    let mut elsewhere = with_branch(longer(), by_coin);
    for innermost_loop in [Some(7), None] {
        elsewhere.points[2].innermost_loop = innermost_loop;
        told(&elsewhere, is_of_two);
    }
    let mut elsewhere = with_branch(longer(), by_coin);
    elsewhere.points[2].function += 0x1000;
    told(&elsewhere, is_of_two);
    // A coin for each of the turns of another loop, of which there are a hundred times as many, would explain anything.
    let mut inner = with_branch(longer(), uneven);
    let mut turns = inner.points[0].clone();
    turns.innermost_loop = Some(7);
    for count in &mut turns.counts {
        *count *= 100;
    }
    inner.points.push(turns);
    told(&inner, is_of_two);
    // More often than the loop in a window: no part of it.
    let more = |i: usize, all: u64| if i == 3 { all as f64 + 9.0 } else { by_coin(i, all) };
    told(&with_branch(longer(), more), is_of_two);
}

#[test]
fn more_windows_are_asked_for_where_few_counts_do_not_tell() {
    // It moved by 2 % while the program was slowed by 10, and by 3 % by chance with twice the counts that there were.
    told(
        &node_branch_for_longer(2),
        |c| matches!(c, Choice::Undecided(why) if why.contains("two clusters")),
    );
    // Of what was counted three times as many windows would not tell either.
    told(&node_branch(), is_of_two);
}
