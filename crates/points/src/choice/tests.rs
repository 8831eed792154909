use super::*;

/// A little noise that does not repeat.
fn wobble(seed: usize, window: usize) -> f64 {
    let x = (seed * 7919 + window * 104_729) % 1009;
    x as f64 / 1009.0 - 0.5
}

const WINDOWS: usize = 12;

fn burdened(window: usize) -> bool {
    matches!(window % 4, 1 | 2)
}

/// A program on one CPU whose work slows by a tenth while it is burdened.
fn program() -> Observation {
    Observation {
        seconds: vec![0.5; WINDOWS],
        cpu: (0..WINDOWS).map(|w| 0.5 * (1.0 + 0.01 * wobble(1, w))).collect(),
        burden: (0..WINDOWS)
            .map(|w| if burdened(w) { 0.1 } else { 0.0 })
            .collect(),
        waiting: 0.0,
        gathering: 0.0,
        points: vec![],
        signals: vec![],
    }
}

/// Units of work in each window.
fn work(per_second: f64) -> Vec<f64> {
    (0..WINDOWS)
        .map(|w| {
            let slow = if burdened(w) { 0.9 } else { 1.0 };
            0.5 * per_second * slow * (1.0 + 0.02 * wobble(2, w))
        })
        .collect()
}

fn point(function: u64, coverage: f64, counts: &[f64], per_unit: f64) -> Point {
    Point {
        function,
        kind: PointKind::Entry,
        innermost_loop: None,
        coverage,
        of_function: 0.0,
        waits: false,
        counts: counts.iter().map(|c| (c * per_unit).round() as u64).collect(),
    }
}

fn chosen(choice: Choice) -> Chosen {
    match choice {
        Choice::Chosen(c) => c,
        Choice::Abstained(why) | Choice::Undecided(why) => panic!("{why}"),
    }
}

fn abstained(choice: Choice) -> String {
    match choice {
        Choice::Abstained(why) => why,
        other => panic!("{other:?}"),
    }
}

fn undecided(choice: Choice) -> String {
    match choice {
        Choice::Undecided(why) => why,
        other => panic!("{other:?}"),
    }
}

/// As if the same had been seen so many times.
fn seen_again(seen: &Observation, times: usize) -> Observation {
    Observation {
        seconds: seen.seconds.repeat(times),
        cpu: seen.cpu.repeat(times),
        burden: seen.burden.repeat(times),
        points: seen
            .points
            .iter()
            .map(|p| Point {
                counts: p.counts.repeat(times),
                ..p.clone()
            })
            .collect(),
        ..seen.clone()
    }
}

#[test]
fn points_that_move_together_are_one_cluster_and_the_cheapest_of_them_counts() {
    let mut seen = program();
    let units = work(2_000.0);
    seen.points = vec![
        point(1, 0.9, &units, 1.0),
        point(2, 0.8, &units, 20.0),
        point(3, 0.7, &units, 0.1),
    ];
    let c = chosen(choose(&seen, Limits::default()));
    assert_eq!(c.cluster, [0, 1, 2]);
    assert!(c.point == 0 || c.point == 2, "{c:?}");
    assert_eq!(c.duty, 1.0);
    assert!(c.noise < 0.03);
    assert!(c.reason.contains("3 points in 3 functions"), "{}", c.reason);
}

#[test]
fn a_program_that_spins_is_abstained_from() {
    let mut seen = program();
    let turns: Vec<f64> = (0..WINDOWS).map(|_| 5_000.0).collect();
    seen.points = vec![point(1, 0.9, &turns, 1.0), point(2, 0.9, &turns, 0.5)];
    for p in &mut seen.points {
        p.waits = true;
    }
    assert!(abstained(choose(&seen, Limits::default())).contains("only wait"));
    // Its loops are not known to wait, but they turn more often while the work is slowed.
    let eager: Vec<f64> = (0..WINDOWS)
        .map(|w| if burdened(w) { 9_000.0 } else { 5_000.0 })
        .collect();
    seen.points = vec![point(1, 0.9, &eager, 1.0), point(2, 0.9, &eager, 0.5)];
    assert!(abstained(choose(&seen, Limits::default())).contains("polling"));
    seen.waiting = 0.8;
    assert!(abstained(choose(&seen, Limits::default())).contains("CPU time is no measure"));
}

/// The event loop of a server turns less often for each request when it is slow: it takes larger batches.
fn server() -> Observation {
    let mut seen = program();
    let requests = work(8_000.0);
    let turns: Vec<f64> = requests
        .iter()
        .enumerate()
        .map(|(w, r)| r * if burdened(w) { 0.10 } else { 0.15 } * (1.0 + 0.04 * wobble(3, w)))
        .collect();
    seen.points = vec![
        point(1, 0.95, &turns, 1.0),
        point(2, 0.9, &turns, 1.0),
        point(3, 0.6, &requests, 1.0),
        point(4, 0.5, &requests, 1.0),
    ];
    seen
}

#[test]
fn a_signal_from_outside_decides_between_requests_and_turns_of_the_event_loop() {
    let mut seen = server();
    seen.signals = vec![Signal {
        name: "TCP segments received".to_owned(),
        weak: false,
        counts: work(8_000.0),
    }];
    let c = chosen(choose(&seen, Limits::default()));
    assert_eq!(c.cluster, [2, 3], "{}", c.reason);
    assert!(c.reason.contains("TCP segments received"));
    // Without it nothing does.
    seen.signals.clear();
    for p in &mut seen.points {
        p.coverage = 0.9;
    }
    let choice = choose(&seen, Limits::default());
    match choice {
        Choice::Abstained(why) | Choice::Undecided(why) => {
            assert!(why.contains("do not keep their ratio"), "{why}");
        }
        // The turns wobble: the steadier cluster may be taken, but never the turns.
        Choice::Chosen(c) => assert_eq!(c.cluster, [2, 3]),
    }
}

#[test]
fn in_a_program_that_waits_for_several_connections_only_a_signal_from_outside_decides() {
    let mut seen = server();
    // As in a server that is asked by as many clients as before: slowing it shows nothing.
    let turns = work(900.0);
    seen.points = vec![point(1, 0.95, &turns, 1.0), point(2, 0.9, &turns, 2.0)];
    assert!(matches!(choose(&seen, Limits::default()), Choice::Chosen(_)));
    seen.gathering = 0.9;
    let none = |seen: &Observation| abstained(choose(seen, Limits::default()));
    assert!(none(&seen).contains("several connections at once"));
    let signal = |rate| Signal {
        name: "TCP segments received".to_owned(),
        weak: false,
        counts: work(rate),
    };
    seen.signals = vec![signal(900.0)];
    assert!(matches!(choose(&seen, Limits::default()), Choice::Chosen(_)));
    // Eight requests in each turn, all the time: what runs less often than requests come may be turns, though the ratio is constant.
    seen.signals = vec![signal(7_200.0)];
    assert!(none(&seen).contains("several connections at once"));
    // Of what keeps to both that is counted which runs for each.
    seen.points.push(point(3, 0.9, &turns, 8.0));
    assert_eq!(chosen(choose(&seen, Limits::default())).point, 2);
}

#[test]
fn what_runs_by_a_clock_is_not_work_however_steady() {
    let mut seen = program();
    let ticks: Vec<f64> = seen.cpu.iter().map(|cpu| cpu * 1_000.0).collect();
    seen.points = vec![point(1, 0.9, &ticks, 1.0), point(2, 0.9, &ticks, 2.0)];
    assert!(abstained(choose(&seen, Limits::default())).contains("clock"));
    // Where the program could not be slowed, only what is too fast for a clock is believed.
    seen.burden = vec![0.0; WINDOWS];
    assert!(matches!(choose(&seen, Limits::default()), Choice::Chosen(_)));
    let slow: Vec<f64> = seen.cpu.iter().map(|cpu| cpu * 100.0).collect();
    seen.points = vec![point(1, 0.9, &slow, 1.0), point(2, 0.9, &slow, 1.0)];
    assert!(abstained(choose(&seen, Limits::default())).contains("clock"));
}

#[test]
fn a_point_that_is_too_dear_is_counted_part_of_the_time() {
    let mut seen = program();
    let units = work(40_000.0);
    seen.points = vec![point(1, 0.9, &units, 1.0), point(2, 0.9, &units, 1.0)];
    let c = chosen(choose(&seen, Limits::default()));
    assert!(c.duty < 0.2 && c.duty > 0.05, "{c:?}");
}

#[test]
fn a_witness_is_not_so_dear_that_what_could_be_counted_all_the_time_no_longer_can() {
    let mut seen = program();
    let units = work(4_000.0);
    seen.points = vec![
        point(1, 0.9, &units, 0.05),
        point(1, 0.9, &units, 0.06),
        point(2, 0.9, &units, 1.0),
    ];
    // One in another function would tell more, but runs twenty times as often.
    let c = chosen(choose(&seen, Limits::default()));
    assert_eq!((c.point, c.witness, c.duty), (0, Some(1), 1.0), "{c:?}");
    // Where that can be afforded, too, it is taken.
    seen.points[2] = point(2, 0.9, &units, 0.1);
    assert_eq!(chosen(choose(&seen, Limits::default())).witness, Some(2));
}

#[test]
fn what_is_rare_short_silent_or_broken_is_no_meter() {
    let none = |seen: &Observation| abstained(choose(seen, Limits::default()));
    let mut seen = program();
    assert!(none(&seen).contains("at least 50 times a second"));
    seen.points = vec![point(1, 0.9, &work(40.0), 1.0)];
    assert!(none(&seen).contains("at least 50 times a second"));
    seen.points = vec![point(1, 0.01, &work(500.0), 1.0)];
    assert!(none(&seen).contains("little weight"));
    seen.points = vec![point(1, 0.9, &work(500.0), 1.0)];
    seen.points[0].counts[3] = 0;
    assert!(none(&seen).contains("silent"));
    seen.points[0].counts.pop();
    assert!(none(&seen).contains("windows"));
    seen.points.clear();
    seen.cpu[0] = 0.0;
    assert!(none(&seen).contains("rested"));
}

proptest::proptest! {
    #[test]
    fn the_order_of_the_points_does_not_matter(rates in proptest::collection::vec(400.0f64..5_000.0, 1..12), turn in 0usize..12) {
        let mut seen = program();
        let units = work(1.0);
        seen.points = rates
            .iter()
            .enumerate()
            .map(|(i, r)| point(i as u64, 0.9, &units, *r))
            .collect();
        let first = choose(&seen, Limits::default());
        let by = turn % seen.points.len();
        seen.points.rotate_left(by);
        let second = choose(&seen, Limits::default());
        match (first, second) {
            (Choice::Chosen(a), Choice::Chosen(b)) => {
                proptest::prop_assert_eq!(a.rate, b.rate);
                proptest::prop_assert_eq!(a.cluster.len(), b.cluster.len());
            }
            (Choice::Abstained(_), Choice::Abstained(_)) | (Choice::Undecided(_), Choice::Undecided(_)) => {}
            other => proptest::prop_assert!(false, "{:?}", other),
        }
    }

    #[test]
    fn nothing_that_waits_is_ever_chosen(
        waits in proptest::collection::vec(proptest::bool::ANY, 2..10),
        rate in 50.0f64..20_000.0,
    ) {
        let mut seen = program();
        let units = work(rate);
        seen.points = waits
            .iter()
            .enumerate()
            .map(|(i, w)| Point { waits: *w, ..point(i as u64, 0.9, &units, 1.0) })
            .collect();
        if let Choice::Chosen(c) = choose(&seen, Limits::default()) {
            proptest::prop_assert!(!seen.points[c.point].waits);
            proptest::prop_assert!(c.witness.is_none_or(|w| !seen.points[w].waits));
        }
    }

    #[test]
    fn any_counts_get_an_answer(
        counts in proptest::collection::vec(proptest::collection::vec(0u64..u64::MAX / 2, WINDOWS), 0..6),
        coverage in 0.0f64..1.0,
    ) {
        let mut seen = program();
        seen.points = counts
            .into_iter()
            .enumerate()
            .map(|(i, counts)| Point { counts, ..point(i as u64, coverage, &[], 1.0) })
            .collect();
        if let Choice::Chosen(c) = choose(&seen, Limits::default()) {
            proptest::prop_assert!(c.point < seen.points.len() && c.duty > 0.0 && c.duty <= 1.0);
        }
    }
}

/// A point in the function of an interpreter, hardly ever on the stack itself.
fn in_its_loop(function: u64, counts: &[f64], per_unit: f64) -> Point {
    Point {
        of_function: 1.0,
        ..point(function, 0.01, counts, per_unit)
    }
}

#[test]
fn what_stands_only_in_the_function_of_an_interpreter_falls_with_the_work() {
    let mut seen = program();
    let units = work(2_000.0);
    seen.points = vec![in_its_loop(1, &units, 1.0), point(2, 0.01, &units, 4.0)];
    assert_eq!(chosen(choose(&seen, Limits::default())).cluster, [0, 1]);
    // Somebody who asks by a clock, as unevenly as a busy machine makes it: it is not seen to stand still either.
    let asked = |spread: f64| -> Vec<f64> {
        (0..WINDOWS)
            .map(|w| {
                let slow = if burdened(w) { 0.96 } else { 1.0 };
                2_000.0 * slow * (1.0 + spread * wobble(6, w))
            })
            .collect()
    };
    seen.points = vec![in_its_loop(1, &asked(0.3), 1.0), point(2, 0.01, &asked(0.3), 4.0)];
    let why = undecided(choose(&seen, Limits::default()));
    assert!(why.contains("loop of an interpreter"), "{why}");
    let why = abstained(choose(&seen_again(&seen, 4), Limits::default()));
    assert!(why.contains("loop of an interpreter"), "{why}");
    // What varies by more than clocks do is not asked by one.
    let points = vec![in_its_loop(1, &asked(0.5), 1.0), point(2, 0.01, &asked(0.5), 4.0)];
    let uneven = Observation {
        points,
        ..seen.clone()
    };
    assert!(matches!(choose(&uneven, Limits::default()), Choice::Chosen(_)));
    // Seen on the stack itself it is believed as before.
    for p in &mut seen.points {
        p.coverage = 0.2;
    }
    assert!(matches!(choose(&seen, Limits::default()), Choice::Chosen(_)));
    seen.points = vec![point(1, 0.01, &units, 1.0), point(2, 0.01, &units, 4.0)];
    assert!(abstained(choose(&seen, Limits::default())).contains("little weight"));
}

/// What falls with the work by as much as that is slowed, and wobbles by that beside.
fn falling(per_second: f64, wobbles: f64) -> Vec<f64> {
    (0..WINDOWS)
        .map(|w| {
            let slow = if burdened(w) { 0.9 } else { 1.0 };
            0.5 * per_second * slow * (1.0 + wobbles * wobble(6, w))
        })
        .collect()
}

#[test]
fn more_windows_are_asked_for_where_they_may_show_that_it_falls_with_the_work() {
    let mut seen = program();
    seen.points = vec![
        in_its_loop(1, &falling(2_000.0, 0.32), 1.0),
        point(2, 0.01, &falling(2_000.0, 0.32), 4.0),
    ];
    let why = undecided(choose(&seen, Limits::default()));
    assert!(why.contains("loop of an interpreter"), "{why}");
    let c = chosen(choose(&seen_again(&seen, 4), Limits::default()));
    assert_eq!(c.cluster, [0, 1]);
    // The same of what is seldom enough for a clock.
    seen.points = vec![
        point(1, 0.9, &falling(120.0, 0.5), 1.0),
        point(2, 0.9, &falling(120.0, 0.5), 1.0),
    ];
    assert!(undecided(choose(&seen, Limits::default())).contains("perhaps running by a clock"));
    assert_eq!(
        chosen(choose(&seen_again(&seen, 4), Limits::default())).cluster,
        [0, 1]
    );
}

#[test]
fn no_more_windows_are_asked_for_where_they_would_not_tell() {
    let mut seen = program();
    // Too uneven for as many as there may be.
    seen.points = vec![
        point(1, 0.9, &falling(120.0, 1.2), 1.0),
        point(2, 0.9, &falling(120.0, 1.2), 1.0),
    ];
    assert!(abstained(choose(&seen, Limits::default())).contains("clock"));
    // It could not be slowed.
    seen.burden = vec![0.0; WINDOWS];
    seen.points = vec![
        in_its_loop(1, &falling(2_000.0, 0.2), 1.0),
        point(2, 0.01, &falling(2_000.0, 0.2), 4.0),
    ];
    assert!(abstained(choose(&seen, Limits::default())).contains("loop of an interpreter"));
}

#[test]
fn what_an_interpreter_does_beside_its_work_does_not_outweigh_that_by_its_functions() {
    let mut seen = program();
    let units = work(2_000.0);
    let other: Vec<f64> = units
        .iter()
        .enumerate()
        .map(|(w, n)| n * (1.0 + 0.2 * wobble(7, w)))
        .collect();
    let rival = |coverage| vec![point(9, coverage, &other, 1.0), point(9, coverage, &other, 2.0)];
    let many = [
        in_its_loop(1, &units, 1.0),
        point(2, 0.01, &units, 1.0),
        point(3, 0.01, &units, 1.0),
        point(4, 0.01, &units, 1.0),
    ];
    seen.points = many.iter().cloned().chain(rival(0.9)).collect();
    let steadier = choose(&seen, Limits::default());
    // As unsteady as that: only their number speaks for them.
    let loud = |points: &[Point]| -> Vec<Point> {
        let shake = |p: &Point| Point {
            counts: (0..)
                .zip(&p.counts)
                .map(|(w, n)| (*n as f64 * (1.0 + 0.2 * wobble(11, w))) as u64)
                .collect(),
            ..p.clone()
        };
        points.iter().map(shake).collect()
    };
    assert!(matches!(steadier, Choice::Chosen(_)), "{steadier:?}");
    seen.points = loud(&many).into_iter().chain(rival(0.9)).collect();
    assert!(abstained(choose(&seen, Limits::default())).contains("do not keep their ratio"));
    for p in &mut seen.points {
        p.coverage = p.coverage.max(0.2);
    }
    assert_eq!(chosen(choose(&seen, Limits::default())).cluster, [0, 1, 2, 3]);
}

#[test]
fn windows_of_different_lengths_round_as_much_as_the_shortest_do() {
    let even = Series(vec![40.0; 8]);
    assert!((even.rounding() - 0.5 / 40.0).abs() < 1e-12);
    let uneven = Series(vec![120.0, 120.0, 120.0, 120.0, 12.0, 12.0, 12.0, 12.0]);
    assert!(
        uneven.rounding() > 0.5 / uneven.mean() && uneven.rounding() > 0.029,
        "{}",
        uneven.rounding()
    );
    // A rare point is judged by the shortest window.
    let mut seen = program();
    let units = work(120.0);
    seen.points = vec![point(1, 0.9, &units, 1.0), point(2, 0.9, &units, 1.0)];
    assert!(matches!(choose(&seen, Limits::default()), Choice::Chosen(_)));
    seen.seconds[3] = 0.05;
    assert!(abstained(choose(&seen, Limits::default())).contains("at least 500 times a second"));
}
