use super::*;
use crate::top::cells::Cell;
use crate::top::model::Wish;
use homeostat_daemon::api::{
    Advice, Budget, Calibration, Change, Effect, Host, KeptSmall, Meter, Outcome, Proposal, Stage, Switch,
    Verdict, Workload,
};
use homeostat_model::{ActionId, ExperimentId, WorkloadKind};

const LOOK: Look = Look {
    color: true,
    unicode: true,
};
const SIZES: [(u16, u16); 6] = [(80, 24), (140, 40), (40, 10), (100, 30), (220, 60), (119, 24)];

fn effect_of(estimate: f64, lower: f64, upper: f64) -> Effect {
    Effect {
        estimate: Some(estimate),
        lower: Some(lower),
        upper: Some(upper),
        confidence: 0.9,
    }
}

fn workload(name: &str, stage: &str, cpus: f64) -> Workload {
    Workload {
        name: name.into(),
        kind: WorkloadKind::Unit,
        program: name.to_owned(),
        fingerprint: "f".into(),
        owner: "machine".into(),
        pids: vec![77],
        processes: 3,
        age_s: 7000.0,
        cpus,
        resident_bytes: 512 << 20,
        huge_bytes: Some(128 << 20),
        stage: Stage::of(stage).unwrap(),
        undone: false,
        summary: format!("what is said of {name}"),
        meter: Some(Meter {
            id: "progress".into(),
            unit: "loads".into(),
            rate: 3.7e6,
            noise: 0.005,
            cost: 0.0,
            counted: 1.0,
            lag_s: 0.0,
            objective: "work per second".into(),
            objective_reason: "the load is saturated".into(),
        }),
        meters: [].into(),
        decisions: [].into(),
        proposal: (stage == "proposed").then(|| Proposal {
            id: "large_pages/x".into(),
            strategy: "large_pages".into(),
            hypothesis: "small pages".into(),
            predicted: effect_of(0.08, 0.0, 0.2),
            risk: "some".into(),
            design: "blocks".into(),
        }),
    }
}

fn status(name: &str, at_unix: u64, blocks: usize) -> Status {
    let latest: Vec<TrialBlock> = (0..blocks)
        .map(|i| TrialBlock {
            on: i % 3 != 1,
            broken: i == 4,
            score: Some(1.0),
            effect: effect_of(0.2, 0.2 - 1.0 / (i + 1) as f64, 0.2 + 1.0 / (i + 1) as f64),
            evidence: 1.5f64.powi(i as i32),
        })
        .collect();
    Status {
        schema: 1,
        version: "0.1.0".into(),
        pid: 1,
        at_unix,
        view_age_s: None,
        mode: "act".into(),
        paused: false,
        switch: Some(Switch {
            on: true,
            by: "switch".into(),
            since_unix: Some(1_700_000_000),
            why: "since 2023-11-14 22:13 UTC".into(),
            change: "homeostat off".into(),
        }),
        machine: "Linux 6.18 | Xeon | 2 cpus | 1 nodes | 24.0 GiB".into(),
        host: Host {
            cpus: 2,
            cpus_busy: 1.5,
            cpus_stolen: 0.2,
            memory_bytes: 24 << 30,
            memory_available_bytes: 18 << 30,
            pressure_cpu: 0.31,
            pressure_memory: 0.0,
            pressure_io: 0.02,
        },
        machine_refusals: vec!["prefetch: no register".into()],
        workloads: vec![
            workload("redis-server.service", "improved", 1.0),
            workload(name, "trying", 0.98),
            workload("cron.service", "declined", 0.0),
            workload("java[9]", "proposed", 0.3),
        ],
        workloads_ignored: 12,
        experiments: vec![Experiment {
            id: ExperimentId(8),
            kind: ExperimentKind::Switchback,
            strategy: "large_pages".into(),
            workload: name.into(),
            others: Vec::new(),
            phase: "measuring".into(),
            prepared: 1.0,
            blocks: blocks as u32,
            latest,
            on: true,
            washout_s: 2.0,
            measured_s: 4.0,
            effect: (blocks >= 2).then(|| effect_of(0.2, -0.05, 0.45)),
            evidence: 34.0,
            evidence_needed: 1000.0,
            elapsed_s: 61.0,
            budget_s: 3600.0,
            stalled_s: 2.7,
            bloat_bytes: 0,
            lost_work_s: 2.74,
            own_cpu_s: 1.2,
        }],
        in_force: vec![Change {
            action: ActionId(17),
            strategy: "large_pages".into(),
            workload: "redis-server.service".into(),
            text: "700 pieces".into(),
            effect: Some(effect_of(0.142, 0.125, 0.16)),
            since_unix: at_unix - 100,
            guard: "probation 3 of 30".into(),
            on: true,
        }],
        outcomes: vec![Outcome {
            id: ExperimentId(7),
            workload: "redis-server.service".into(),
            others: Vec::new(),
            strategy: "large_pages".into(),
            verdict: Verdict::Accepted,
            effect: Some(effect_of(0.142, 0.125, 0.16)),
            blocks: 16,
            ended_unix: at_unix - 100,
            reason: "evidence 1394".into(),
            off_level: None,
            not_excluded: Vec::new(),
        }],
        advice: vec![Advice {
            id: "x".into(),
            workload: Some(name.into()),
            finding: "found".into(),
            remedy: "do it".into(),
            risk: "little".into(),
            setting: None,
        }],
        budget: Budget {
            own_cpu: 0.003,
            own_resident_bytes: 12 << 20,
            canary_cpu: 0.0,
            canary_resident_bytes: 0,
            own_faults_minor: 312,
            own_faults_major: 0,
            own_waited_s: 1.5,
            kept_small: KeptSmall::default(),
            experiments_last_hour: 1,
            experiments_per_hour_max: 6,
            harm_exposure_day: 274.0,
            harm_exposure_per_day_max: 2000.0,
            owners: Vec::new(),
            stalled_s: 2.7,
            bloat_bytes: 0,
        },
        calibration: Calibration {
            placebos: 3,
            false_accepts: 0,
            tries: 2,
            accepts: 1,
            alpha_next: 0.001,
        },
        notes: Vec::new(),
    }
}

fn line(at_unix: u64, workload: &str, text: &str) -> StoryLine {
    StoryLine {
        schema: 1,
        at_unix,
        workload: Some(workload.to_owned()),
        stage: "trying".into(),
        text: text.to_owned(),
        warning: false,
    }
}

fn model(name: &str) -> Model {
    let mut model = Model::new(Origin::Daemon);
    for i in 0..5u64 {
        let lines = vec![line(1000 + i, name, &format!("decision {i}"))];
        model.learn(status(name, 1000 + i, 9 + i as usize), lines);
    }
    model
}

fn cells(model: &mut Model, size: (u16, u16), look: Look) -> Cells {
    let mut cells = Cells::blank(size.0, size.1);
    let (seen, most) = draw(model, &mut cells, look);
    model.drawn(seen, most);
    cells
}

/// The screen as lines.
fn screen(model: &mut Model, size: (u16, u16), look: Look) -> Vec<String> {
    let mut lines = vec![String::new(); usize::from(size.1)];
    for (_, y, cell) in cells(model, size, look).characters() {
        lines[usize::from(y)].push(cell.symbol);
    }
    lines
}

fn text(model: &mut Model, size: (u16, u16), look: Look) -> String {
    screen(model, size, look).join("\n")
}

#[test]
fn the_overview_holds_what_matters_at_80_by_24() {
    let shown = text(&mut model("latency[77]"), (80, 24), LOOK);
    for part in [
        "homeostat 0.1.0 on ",
        "live",
        "1.50/2",
        "6.0/24.0 GiB",
        "cpu 31 mem 0 io 2 %",
        "lost work 2.7 s/20.0 s",
        "stood still 2.7 s, lost work 2.7 s, own CPU 1.2 s, added memory 0 B",
        "latency[77]",
        "experiment 8",
        "1m 1s of at most",
        "\u{25cf}\u{25cb}\u{25cf}",
        "-5.0 to +45.0 %",
        "34.0 of 1000 needed",
        "In force, proven",
        "+12.5 to +16.0 %",
        "4 workloads, 12 ignored",
        "25 %",
        "decision 4",
        "? help",
    ] {
        // How long a minute and a second is called is not for this test.
        let part = part.split("1m 1s ").last().unwrap_or(part);
        assert!(shown.contains(part), "{part} is missing:\n{shown}");
    }
}

#[test]
fn every_page_is_drawn_at_every_size_with_and_without_colour() {
    for size in SIZES {
        for look in [
            LOOK,
            Look {
                color: false,
                unicode: true,
            },
            Look {
                color: false,
                unicode: false,
            },
        ] {
            for name in [
                "latency[77]",
                "\u{6f22}\u{5b57}\u{6f22}\u{5b57}\u{6f22}\u{5b57}.service",
                &"x".repeat(300),
            ] {
                for page in PAGES {
                    let mut model = model(name);
                    model.wish(Wish::Go(page));
                    let lines = screen(&mut model, size, look);
                    assert!(lines[0].contains("homeostat") || size.0 <= 40, "{lines:#?}");
                    if !look.unicode {
                        assert!(lines.iter().all(|l| l.is_ascii()), "{lines:#?}");
                    }
                    model.wish(Wish::Help);
                    screen(&mut model, size, look);
                }
            }
        }
    }
    let small = text(&mut model("x"), (20, 5), LOOK);
    assert!(small.contains("at least 40"), "{small}");
}

#[test]
fn without_colour_no_cell_has_one() {
    for color in [false, true] {
        let look = Look { color, ..LOOK };
        let colored = cells(&mut model("latency[77]"), (80, 24), look)
            .characters()
            .any(|(_, _, cell)| cell.style.contains(['3', '9']));
        assert_eq!(colored, color);
    }
}

#[test]
fn nothing_that_a_terminal_obeys_reaches_a_cell() {
    let hostile = "a\x1b[2J\u{9b}31m\r\u{202e}b\u{200d}\u{0}\x07\n\u{feff}e\u{301}";
    for size in SIZES {
        for page in PAGES {
            let mut model = model(hostile);
            model.tell(vec![line(2000, hostile, hostile)]);
            model.wish(Wish::Go(page));
            for (_, _, Cell { symbol: c, .. }) in cells(&mut model, size, LOOK).characters() {
                assert!(!c.is_control() && c != '\u{202e}' && c != '\u{9b}', "{c:?}");
                assert!(c.width().unwrap_or(0) > 0, "{c:?} hangs on to its neighbour");
            }
        }
    }
}

#[test]
fn the_interval_shrinks_on_the_screen_and_zero_is_marked() {
    let wide = interval(&effect_of(0.2, -1.0, 3.0), 40, LOOK);
    let narrow = interval(&effect_of(0.2, 0.17, 0.24), 40, LOOK);
    let inside = |row: &Row| row.iter().filter(|p| p.0 == "\u{2550}").count();
    assert!(inside(&wide) > 3 * inside(&narrow), "{wide:?} {narrow:?}");
    assert!(narrow.iter().any(|p| p.0 == "\u{2503}"), "zero is marked");
    assert!(narrow.iter().any(|p| p.1 == Tone::Good) && !wide.iter().any(|p| p.1 == Tone::Good));
    let lost = interval(&effect_of(-0.2, -0.24, -0.17), 40, LOOK);
    assert!(lost.iter().any(|p| p.1 == Tone::Bad));
    let unknown = Effect {
        estimate: None,
        lower: None,
        upper: None,
        confidence: 0.9,
    };
    assert!(inside(&interval(&unknown, 40, LOOK)) > 30);
}

#[test]
fn a_reader_goes_back_in_time_and_returns() {
    let mut model = model("latency[77]");
    model.wish(Wish::Time(-3));
    let shown = text(&mut model, (80, 24), LOOK);
    assert!(
        shown.contains("3.0 s ago") || shown.contains("3 s ago"),
        "{shown}"
    );
    assert!(
        shown.contains("decision 1") && !shown.contains("decision 2"),
        "{shown}"
    );
    model.learn(status("latency[77]", 1005, 14), Vec::new());
    assert_eq!(
        model.moment().map(|m| m.at_unix),
        Some(1001),
        "what comes does not move the reader"
    );
    model.wish(Wish::Live);
    assert_eq!(model.moment().map(|m| m.at_unix), Some(1005));
    model.wish(Wish::First);
    assert_eq!(model.moment().map(|m| m.at_unix), Some(1000));
    model.wish(Wish::Time(i32::MAX));
    assert_eq!(model.place(), None, "at its end time runs again");
}

#[test]
fn hours_of_moments_take_bounded_room_and_keep_their_order() {
    let mut model = Model::new(Origin::Daemon);
    let mut began = None;
    for i in 0..5000u64 {
        model.learn(status("w", 1000 + i, 2), vec![line(1000 + i, "w", "x")]);
        if i == 1000 {
            model.wish(Wish::Time(-50));
            began = model.moment().map(|m| m.at_unix);
        }
    }
    let (_, of) = model.place().expect("held");
    assert!(of <= 401, "{of}");
    let held = model.moment().map(|m| m.at_unix).expect("a moment");
    assert_eq!(Some(held), began, "what is held stays");
    model.wish(Wish::First);
    assert_eq!(model.moment().map(|m| m.at_unix), Some(1000));
    let mut last = 0;
    for _ in 0..of - 1 {
        let at = model.moment().map(|m| m.at_unix).expect("a moment");
        assert!(at > last);
        last = at;
        model.wish(Wish::Time(1));
    }
    model.wish(Wish::Live);
    assert_eq!(model.moment().map(|m| m.at_unix), Some(5999));
}

#[test]
fn a_recording_plays_holds_and_ends() {
    let mut model = Model::new(Origin::Recording("bug.jsonl".into()));
    for i in 0..4u64 {
        model.learn(status("w", 1000 + i, 2), Vec::new());
    }
    model.rewind();
    assert!(!model.play(), "it waits for its reader");
    model.wish(Wish::Hold);
    for _ in 0..10 {
        model.play();
    }
    assert_eq!(model.place(), Some((4, 4)));
    assert!(!model.playing());
    model.wish(Wish::Hold);
    assert_eq!(model.place(), Some((1, 4)), "and begins again");
    let shown = text(&mut model, (80, 24), LOOK);
    assert!(shown.contains("playing 1/4"), "{shown}");
}

#[test]
fn the_selection_moves_and_opens_and_survives_what_comes() {
    let mut model = model("latency[77]");
    assert_eq!(
        model.selected(),
        Some("latency[77]"),
        "what is being tried comes first"
    );
    model.wish(Wish::Move(1));
    model.wish(Wish::Open);
    let shown = text(&mut model, (80, 24), LOOK);
    assert!(
        shown.contains("redis-server.service") && shown.contains("In force: large_pages (undo 17)"),
        "{shown}"
    );
    let mut next = status("latency[77]", 1010, 3);
    next.workloads.remove(0);
    model.learn(next, Vec::new());
    assert_eq!(
        model.selected(),
        Some("latency[77]"),
        "a workload that ended is not selected any more"
    );
    model.wish(Wish::Back);
    assert_eq!(model.page(), Page::Overview);
}

#[test]
fn a_daemon_that_does_not_answer_is_seen() {
    let mut fresh = Model::new(Origin::Daemon);
    fresh.lose("no homeostat daemon answers".into());
    assert!(text(&mut fresh, (80, 24), LOOK).contains("no homeostat daemon answers"));
    let mut model = model("w");
    model.lose("gone".into());
    let shown = text(&mut model, (80, 24), LOOK);
    assert!(
        shown.contains("no answer") && shown.contains("In force"),
        "{shown}"
    );
}
