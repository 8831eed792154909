//! The history on real files: what is stored comes back exactly, and nothing that can happen to the file stops
//! its user.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]

mod common;

use homeostat_model::{
    ActionId, BlockRecord, Bytes, Effect, ExperimentId, ExperimentKind, ExperimentRecord, FreshGain, LossIn,
    MeaningAccount, MemberOutcome, Nanoseconds, NotExcluded, OffLevel, SpanChange, SpansAccount, Verdict,
    WindowRecord,
};
use homeostat_store::history::{
    DecisionRecord, Entry, ExperimentFilter, Filter, HISTORY_FILE, History, HistoryError, HistoryOptions,
    HistoryState, PlaceboSummary, ResilientHistory, Window,
};
use proptest::prelude::*;
use std::io::Write;
use std::path::Path;

const MACHINE: &str = "6.1 | EPYC | 2 cpus | 1 nodes | 8 GiB";
const DAY: u64 = 86_400;

fn spans(unseen: Option<&str>) -> SpansAccount {
    let longer = Effect {
        estimate: 0.031,
        lower: -0.01,
        upper: f64::INFINITY,
        confidence: 0.9,
    };
    let change = SpanChange {
        on_s: 0.001_03,
        off_s: 0.001,
        noise: 0.05,
        longer,
        longer_for_its_work: longer,
    };
    SpansAccount {
        workload: "redis-server.service".into(),
        unseen: unseen.map(str::to_owned),
        blocks_on: 9,
        blocks_off: 8,
        median: unseen.is_none().then_some(change),
        p99: unseen.is_none().then_some(change),
    }
}

fn meaning(unwatched: Option<&str>) -> MeaningAccount {
    let change = Effect {
        estimate: 0.001,
        lower: -0.01,
        upper: 0.012,
        confidence: 0.9,
    };
    MeaningAccount {
        workload: "redis-server.service".into(),
        judge: "sockets.segments".into(),
        beside: "io.write_calls".into(),
        unwatched: unwatched.map(str::to_owned),
        blocks_on: 7,
        blocks_off: 6,
        change: unwatched.is_none().then_some(change),
        drift: None,
        slots: 0,
        staged: None,
    }
}

fn experiment(id: u64) -> ExperimentRecord {
    ExperimentRecord {
        id: ExperimentId(id),
        kind: ExperimentKind::Switchback,
        strategy: "large_pages".into(),
        workload: "redis-server.service".into(),
        fingerprint: "unit:redis-server.service".into(),
        others: Vec::new(),
        members: Vec::new(),
        spans: if id % 3 == 0 {
            vec![spans(None), spans(Some("it has more than 64 threads"))]
        } else {
            Vec::new()
        },
        meanings: if id % 2 == 0 {
            vec![meaning(None), meaning(Some("the trial protects from a loss"))]
        } else {
            Vec::new()
        },
        fresh: (id % 2 == 0).then_some(FreshGain {
            effect: Effect {
                estimate: 0.13,
                lower: 0.12,
                upper: 0.16,
                confidence: 0.9,
            },
            pairs: 12,
        }),
        off_level: (id % 2 == 0).then_some(OffLevel {
            change: -0.004,
            usual_lower: -0.021,
            usual_upper: 0.023,
            confidence: 0.9,
            blocks: 12,
            spans_before: 60,
            may_be_a_scar: id % 4 == 0,
        }),
        not_excluded: LossIn::ALL
            .iter()
            .take(id as usize % 4)
            .map(|what| NotExcluded {
                workload: "backend.service".into(),
                what: *what,
                most: 0.012,
                confidence: 0.95,
            })
            .collect(),
        settling: (id % 3 == 0).then_some(Nanoseconds::from_millis(300)),
        reader: None,
        machine: MACHINE.to_owned(),
        action: ActionId(id + 100),
        hypothesis: "1.8 GiB in 4 KiB pages: +12 % predicted".to_owned(),
        predicted: Effect {
            estimate: 0.12,
            lower: 0.05,
            upper: 0.2,
            confidence: 0.9,
        },
        meter: "redis:INFO".into(),
        objective: "operations per second".to_owned(),
        seed: 0xfedc_ba98_7654_3210,
        alpha: 0.05,
        washout: Nanoseconds::from_secs(5),
        measured: Nanoseconds::from_secs(20),
        started_unix: 1_000_000 + id * 60,
        ended_unix: 1_000_050 + id * 60,
        verdict: Some(Verdict::Accepted),
        reason: "e-value 31.4".to_owned(),
        effect: Some(Effect {
            estimate: 0.143,
            lower: 0.08,
            upper: f64::INFINITY,
            confidence: 0.9,
        }),
        evidence: 31.4,
        stalled: Nanoseconds::from_millis(812),
        bloat: Bytes::from_mib(3),
        harm_exposure: 0.25,
        blocks: (0..6).map(block).collect(),
    }
}

fn block(index: u32) -> BlockRecord {
    BlockRecord {
        index,
        on: index % 2 == 0,
        measured_from: Nanoseconds(u64::from(index) * 25_000_000_000),
        measured: Nanoseconds::from_secs(20),
        work: 1.0e6 / 3.0 + f64::from(index),
        cpu: Nanoseconds(19_999_999_999),
        score: 13.1 + f64::from(index) * 1e-9,
        broken: index == 5,
    }
}

fn decision(at_unix: u64) -> DecisionRecord {
    DecisionRecord {
        at_unix,
        workload: Some("redis-server.service".into()),
        stage: "predicted".to_owned(),
        text: "+12 % predicted from 37 % of time in page walks".to_owned(),
    }
}

fn window(started_unix: u64) -> Window {
    let seen = WindowRecord {
        workload: "redis-server.service".into(),
        fingerprint: "unit:redis-server.service".into(),
        length: Nanoseconds::from_secs(60),
        samples: 60,
        meter: Some("redis:INFO".into()),
        work: 3.3e7,
        variation: 0.021,
        cpu: Nanoseconds::from_secs(59),
        runqueue_wait: Nanoseconds(1),
        faults_minor: 2,
        faults_major: 3,
        resident: Bytes::from_mib(1850),
        anonymous: Bytes::from_mib(1840),
        shared: Bytes::from_mib(8),
        huge: Some(Bytes::ZERO),
    };
    Window {
        machine: MACHINE.to_owned(),
        started_unix,
        seen,
    }
}

fn create(directory: &Path, options: HistoryOptions) -> History {
    History::open(&directory.join(HISTORY_FILE), options).unwrap()
}

/// Equal in every bit, NaN included; only the sign of zero is not compared.
fn assert_same(a: &ExperimentRecord, b: &ExperimentRecord) {
    assert_eq!(
        format!("{a:?}").replace("-0.0", "0.0"),
        format!("{b:?}").replace("-0.0", "0.0")
    );
}

#[test]
fn an_experiment_comes_back_exactly_after_reopening() {
    let directory = tempfile::tempdir().unwrap();
    let mut odd = experiment(2);
    odd.predicted = Effect {
        estimate: f64::NAN,
        lower: f64::NEG_INFINITY,
        upper: f64::INFINITY,
        confidence: 0.0,
    };
    odd.effect = Some(Effect {
        estimate: f64::NAN,
        lower: f64::NAN,
        upper: f64::NAN,
        confidence: f64::NAN,
    });
    odd.evidence = f64::INFINITY;
    odd.harm_exposure = f64::MIN_POSITIVE;
    odd.alpha = f64::MAX;
    odd.seed = u64::MAX;
    odd.stalled = Nanoseconds(u64::MAX);
    odd.reason = "quotes ' \" \0 and \u{1f680}".to_owned();
    odd.blocks[1].score = f64::NAN;
    odd.blocks[2].work = f64::NEG_INFINITY;
    let mut running = experiment(3);
    running.verdict = None;
    running.effect = None;
    running.kind = ExperimentKind::StagedRollout;
    running.blocks.clear();
    let all = [experiment(1), odd, running];
    {
        let mut history = create(directory.path(), HistoryOptions::default());
        for e in &all {
            history.record_experiment(e).unwrap();
        }
    }
    let history = create(directory.path(), HistoryOptions::default());
    let mut found = history.experiments(&ExperimentFilter::default()).unwrap();
    found.reverse();
    assert_eq!(found.len(), 3);
    for (a, b) in all.iter().zip(&found) {
        assert_same(a, b);
    }
}

#[test]
fn a_trial_of_several_workloads_is_found_under_each_and_known_for_each() {
    let directory = tempfile::tempdir().unwrap();
    let mut history = create(directory.path(), HistoryOptions::default());
    let mut joint = experiment(1);
    joint.others = vec![
        ("backend.service".into(), "exe:other".into()),
        // Two of one kind.
        ("backend-2.service".into(), "exe:other".into()),
    ];
    history.record_experiment(&joint).unwrap();
    // Recorded again as it goes on.
    history.record_experiment(&joint).unwrap();
    let of = |workload: Option<&str>, fingerprint: Option<&str>| {
        let filter = ExperimentFilter {
            workload: workload.map(Into::into),
            fingerprint: fingerprint.map(Into::into),
            blocks: true,
            ..ExperimentFilter::default()
        };
        history.experiments(&filter).unwrap()
    };
    for found in [
        of(Some("redis-server.service"), None),
        of(Some("backend-2.service"), None),
        of(None, Some("exe:other")),
    ] {
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].others, joint.others);
    }
    assert!(of(Some("nobody.service"), None).is_empty());
    let priors = history.priors(MACHINE).unwrap();
    let known: Vec<(&str, u32)> = priors
        .iter()
        .map(|p| (p.fingerprint.as_str(), p.accepted))
        .collect();
    assert_eq!(
        known,
        [("exe:other", 1), ("unit:redis-server.service", 1)],
        "once for each kind"
    );
}

#[test]
fn what_a_trial_of_several_showed_of_each_is_what_is_known_of_each() {
    let directory = tempfile::tempdir().unwrap();
    let mut history = create(directory.path(), HistoryOptions::default());
    let own = |estimate: f64| Effect {
        estimate,
        lower: estimate - 0.02,
        upper: estimate + 0.02,
        confidence: 0.9,
    };
    let outcome = |workload: &str, verdict, effect| MemberOutcome {
        workload: workload.into(),
        verdict,
        effect,
    };
    let mut joint = experiment(1);
    joint.others = vec![
        ("backend.service".into(), "exe:backend".into()),
        ("other.service".into(), "exe:other".into()),
    ];
    joint.verdict = None;
    history.record_experiment(&joint).unwrap();
    joint.verdict = Some(Verdict::Harmful);
    joint.members = vec![
        outcome("redis-server.service", Verdict::Aborted, Some(own(0.25))),
        outcome("backend.service", Verdict::Harmful, Some(own(-0.1))),
        outcome("other.service", Verdict::Harmful, None),
    ];
    history.record_experiment(&joint).unwrap();
    let found = history.experiments(&ExperimentFilter::default()).unwrap();
    assert_eq!(found[0].members, joint.members);
    let known = |history: &History| -> Vec<(String, u32, u32, Option<f64>)> {
        let priors = history.priors(MACHINE).unwrap();
        let of = |p: &homeostat_store::history::Prior| {
            let name = p.fingerprint.to_string();
            (name, p.harmful, p.aborted, p.last_effect.map(|e| e.estimate))
        };
        priors.iter().map(of).collect()
    };
    assert_eq!(
        known(&history),
        [
            ("exe:backend".to_owned(), 1, 0, Some(-0.1)),
            // Nothing of its own is known: what the whole showed.
            ("exe:other".to_owned(), 1, 0, Some(0.143)),
            // Nothing is held against it.
            ("unit:redis-server.service".to_owned(), 0, 1, None),
        ]
    );
    // A guard revokes what was accepted: the record is written anew.
    let mut kept = experiment(2);
    kept.fresh = None;
    kept.others = joint.others[..1].to_vec();
    kept.members = vec![
        outcome("redis-server.service", Verdict::Accepted, Some(own(0.3))),
        outcome("backend.service", Verdict::Accepted, Some(own(0.0))),
    ];
    history.record_experiment(&kept).unwrap();
    let effect = |history: &History, name: &str| {
        let known = known(history);
        known.iter().find(|k| k.0 == name).and_then(|k| k.3)
    };
    assert_eq!(
        effect(&history, "exe:backend"),
        Some(0.143),
        "accepted as a whole"
    );
    kept.verdict = Some(Verdict::Rejected);
    for m in &mut kept.members {
        m.verdict = Verdict::Rejected;
    }
    history.record_experiment(&kept).unwrap();
    assert_eq!(effect(&history, "exe:backend"), Some(0.0));
    let found = history.experiments(&ExperimentFilter::default()).unwrap();
    assert_eq!(found[0].members, kept.members);
}

#[test]
fn recording_again_replaces_also_when_blocks_disappear() {
    let directory = tempfile::tempdir().unwrap();
    let mut history = create(directory.path(), HistoryOptions::default());
    let mut e = experiment(1);
    e.verdict = None;
    e.effect = None;
    history.record_experiment(&e).unwrap();
    e.blocks.push(block(6));
    e.blocks[3].work += 1.0;
    e.blocks[4].score = f64::NAN;
    history.record_experiment(&e).unwrap();
    assert_same(&history.experiments(&ExperimentFilter::default()).unwrap()[0], &e);
    e.blocks.remove(2);
    e.verdict = Some(Verdict::Harmful);
    e.workload = "redis[4711]".into();
    e.fingerprint = "exe:redis".into();
    history.record_experiment(&e).unwrap();
    let found = history.experiments(&ExperimentFilter::default()).unwrap();
    assert_eq!(found.len(), 1);
    assert_same(&found[0], &e);
}

#[test]
fn filters_choose_and_the_newest_come_first() {
    let mut history = History::in_memory(HistoryOptions::default()).unwrap();
    for id in 1..=9 {
        let mut e = experiment(id);
        if id % 3 == 0 {
            e.fingerprint = "exe:other".into();
            e.workload = "other".into();
        }
        if id > 6 {
            e.strategy = "placement".into();
        }
        history.record_experiment(&e).unwrap();
    }
    let ids = |filter: ExperimentFilter| -> Vec<u64> {
        history
            .experiments(&filter)
            .unwrap()
            .iter()
            .map(|e| e.id.0)
            .collect()
    };
    let all = ExperimentFilter::default;
    assert_eq!(ids(all()), [9, 8, 7, 6, 5, 4, 3, 2, 1]);
    assert_eq!(ids(ExperimentFilter { limit: 2, ..all() }), [9, 8]);
    assert_eq!(
        ids(ExperimentFilter {
            fingerprint: Some("exe:other".into()),
            ..all()
        }),
        [9, 6, 3]
    );
    assert_eq!(
        ids(ExperimentFilter {
            workload: Some("other".into()),
            since_unix: 1_000_300,
            ..all()
        }),
        [9, 6]
    );
    assert_eq!(
        ids(ExperimentFilter {
            strategy: Some("placement".into()),
            ..all()
        }),
        [9, 8, 7]
    );
    assert_eq!(
        ids(ExperimentFilter {
            id: Some(ExperimentId(4)),
            ..all()
        }),
        [4]
    );
    let without = history
        .experiments(&ExperimentFilter {
            blocks: false,
            ..all()
        })
        .unwrap();
    assert!(without.iter().all(|e| e.blocks.is_empty()));
}

#[test]
fn decisions_and_windows_come_back_exactly() {
    let mut history = History::in_memory(HistoryOptions::default()).unwrap();
    let mut host = decision(20);
    host.workload = None;
    let mut blind = window(20);
    (blind.seen.meter, blind.seen.huge) = (None, None);
    (blind.seen.work, blind.seen.variation) = (f64::NAN, f64::NAN);
    history
        .record(&[
            Entry::Decision(decision(10)),
            Entry::Decision(host.clone()),
            Entry::Window(window(10)),
            Entry::Window(blind.clone()),
        ])
        .unwrap();
    assert_eq!(
        history.decisions(&Filter::default()).unwrap(),
        [host, decision(10)]
    );
    let one = Filter {
        workload: Some("redis-server.service".into()),
        ..Filter::default()
    };
    assert_eq!(history.decisions(&one).unwrap(), [decision(10)]);
    let windows = history.windows(&Filter::default()).unwrap();
    assert_eq!(format!("{windows:?}"), format!("{:?}", [blind, window(10)]));
    assert_eq!(
        history
            .windows(&Filter {
                since_unix: 11,
                ..Filter::default()
            })
            .unwrap()
            .len(),
        1
    );

    let mut long = decision(30);
    long.text = "ä".repeat(5000);
    history.record_decision(&long).unwrap();
    let stored = &history
        .decisions(&Filter {
            limit: 1,
            ..Filter::default()
        })
        .unwrap()[0];
    assert_eq!(stored.text, "ä".repeat(2048));
}

#[test]
fn priors_count_verdicts_per_workload_and_strategy_without_placebos() {
    let mut history = History::in_memory(HistoryOptions::default()).unwrap();
    let verdicts = [
        Some(Verdict::Accepted),
        Some(Verdict::Harmful),
        Some(Verdict::Harmful),
        Some(Verdict::Rejected),
        Some(Verdict::Inconclusive),
        Some(Verdict::Aborted),
        None,
    ];
    for (id, verdict) in (1..).zip(verdicts) {
        let mut e = experiment(id);
        e.verdict = verdict;
        if verdict == Some(Verdict::Inconclusive) {
            e.effect = None;
        }
        history.record_experiment(&e).unwrap();
    }
    let mut other = experiment(20);
    other.fingerprint = "a".into();
    other.verdict = Some(Verdict::Aborted);
    history.record_experiment(&other).unwrap();
    let mut elsewhere = experiment(21);
    elsewhere.machine = "another machine".to_owned();
    history.record_experiment(&elsewhere).unwrap();
    for id in 30..35 {
        let mut placebo = experiment(id);
        placebo.kind = ExperimentKind::Placebo;
        placebo.verdict = match id {
            30 => Some(Verdict::Accepted),
            31 => Some(Verdict::Aborted),
            32 => None,
            _ => Some(Verdict::Rejected),
        };
        history.record_experiment(&placebo).unwrap();
    }
    let priors = history.priors(MACHINE).unwrap();
    assert_eq!(
        priors.iter().map(|p| p.fingerprint.as_str()).collect::<Vec<_>>(),
        ["a", "unit:redis-server.service"]
    );
    let p = &priors[1];
    assert_eq!(
        (p.accepted, p.rejected, p.harmful, p.inconclusive, p.aborted),
        (1, 1, 2, 1, 1)
    );
    assert_eq!(
        (p.last_verdict, p.last_effect, p.last_unix),
        (Some(Verdict::Inconclusive), None, experiment(5).ended_unix)
    );
    assert_eq!(
        (priors[0].aborted, priors[0].last_verdict, priors[0].last_unix),
        (1, None, 0)
    );
    let there = history.priors("another machine").unwrap();
    assert_eq!((there.len(), there[0].last_effect), (1, experiment(21).effect));
    assert_eq!(
        history.placebo_summary().unwrap(),
        PlaceboSummary { run: 3, accepted: 1 }
    );
}

#[test]
fn a_batch_is_stored_whole_or_not_at_all() {
    let mut history = History::in_memory(HistoryOptions::default()).unwrap();
    let mut too_long = experiment(1);
    too_long.blocks = (0..10_001).map(block).collect();
    let batch = [
        Entry::Decision(decision(1)),
        Entry::Experiment(Box::new(too_long)),
    ];
    assert!(matches!(
        history.record(&batch),
        Err(HistoryError::Invalid { .. })
    ));
    assert!(history.decisions(&Filter::default()).unwrap().is_empty());
    let mut zero = experiment(0);
    zero.id = ExperimentId(0);
    assert!(matches!(
        history.record_experiment(&zero),
        Err(HistoryError::Invalid { .. })
    ));
}

#[test]
fn pruning_forgets_by_age_in_small_steps_and_keeps_the_last_verdict() {
    let directory = tempfile::tempdir().unwrap();
    let options = HistoryOptions {
        keep_days: 10,
        ..HistoryOptions::default()
    };
    let mut history = create(directory.path(), options);
    let now = 1_000_000 + 100 * DAY;
    let entries: Vec<Entry> = (0..1200)
        .map(|i| Entry::Window(window(1_000_000 + i)))
        .chain((0..30).map(|i| Entry::Decision(decision(now - i * DAY))))
        .collect();
    history.record(&entries).unwrap();
    for id in 1..=5 {
        history.record_experiment(&experiment(id)).unwrap();
    }
    let mut harmful = experiment(6);
    harmful.verdict = Some(Verdict::Harmful);
    history.record_experiment(&harmful).unwrap();
    for id in 7..=10 {
        let mut e = experiment(id);
        e.kind = ExperimentKind::Placebo;
        e.verdict = Some(if id == 7 {
            Verdict::Accepted
        } else {
            Verdict::Rejected
        });
        history.record_experiment(&e).unwrap();
    }
    let mut recent = experiment(11);
    recent.started_unix = now - DAY;
    recent.verdict = None;
    history.record_experiment(&recent).unwrap();

    let mut steps = 0;
    loop {
        let pruned = history.prune(now).unwrap();
        assert!(pruned.rows <= 4 * 500, "{pruned:?}");
        steps += 1;
        if !pruned.more {
            break;
        }
        assert!(steps < 20);
    }
    assert!(steps >= 4, "1200 windows are more than two steps of 500: {steps}");
    assert!(history.windows(&Filter::default()).unwrap().is_empty());
    assert_eq!(history.decisions(&Filter::default()).unwrap().len(), 11);
    let left = history.experiments(&ExperimentFilter::default()).unwrap();
    assert_eq!(left.iter().map(|e| e.id.0).collect::<Vec<_>>(), [11, 6]);
    assert_eq!((left[0].blocks.len(), left[1].blocks.len()), (6, 0));
    assert_eq!(
        history.priors(MACHINE).unwrap()[0].last_verdict,
        Some(Verdict::Harmful)
    );
    assert_eq!(
        history.placebo_summary().unwrap(),
        PlaceboSummary { run: 4, accepted: 1 }
    );
    assert_eq!(history.next_experiment_id().unwrap(), ExperimentId(12));
    assert!(!history.prune(now).unwrap().more);
}

#[test]
fn the_size_limit_holds_and_pruning_makes_room() {
    let directory = tempfile::tempdir().unwrap();
    let options = HistoryOptions {
        bytes_max: Bytes::from_mib(1),
        ..HistoryOptions::default()
    };
    let mut history = create(directory.path(), options);
    let mut id = 1;
    let full = loop {
        match history.record_experiment(&experiment(id)) {
            Ok(()) => id += 1,
            Err(e) => break e,
        }
        assert!(id < 100_000);
    };
    assert!(matches!(full, HistoryError::Full { .. }), "{full}");
    assert!(id > 100, "{id}");
    let size = |name: &str| std::fs::metadata(directory.path().join(name)).unwrap().len();
    assert!(size(HISTORY_FILE) <= 1024 * 1024);
    let mut steps = 0;
    while history.prune(1_000_000).unwrap().more {
        steps += 1;
        assert!(steps < 100);
    }
    assert!(history.bytes_used().unwrap().0 <= 768 * 1024);
    history.record_experiment(&experiment(id)).unwrap();
    // The user of it never sees the limit: a write that hits it prunes by itself.
    drop(history);
    let mut history = ResilientHistory::open(&directory.path().join(HISTORY_FILE), options, 5);
    for i in 0..400 {
        history.record_experiment(experiment(id + 1 + i));
        history.flush(5);
    }
    assert_eq!((history.state(), history.dropped()), (&HistoryState::OnDisk, 0));
    assert!(history.take_messages().is_empty());
    assert!(size(HISTORY_FILE) <= 1024 * 1024);
    assert!(size(&format!("{HISTORY_FILE}-wal")) <= 3 * 1024 * 1024);
}

#[test]
fn a_reader_sees_whole_batches_while_the_daemon_writes() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join(HISTORY_FILE);
    let mut writer = create(directory.path(), HistoryOptions::default());
    let reading = path.clone();
    let reader = std::thread::spawn(move || {
        let history = History::open_read_only(&reading).unwrap();
        let mut last = 0;
        while last < 60 {
            let found = history.experiments(&ExperimentFilter::default()).unwrap();
            assert!(found.len() >= last, "went back from {last} to {}", found.len());
            assert!(found.iter().all(|e| e.blocks.len() == 6));
            last = found.len();
        }
        let refused = History::open_read_only(&reading)
            .unwrap()
            .record_decision(&decision(1));
        assert!(
            matches!(refused, Err(HistoryError::ReadOnly { .. })),
            "{refused:?}"
        );
    });
    for batch in 0..30 {
        let entries: Vec<Entry> = (1..=2)
            .map(|i| Entry::Experiment(Box::new(experiment(batch * 2 + i))))
            .collect();
        writer.record(&entries).unwrap();
    }
    reader.join().unwrap();
}

#[test]
fn a_locked_file_delays_a_batch_and_loses_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join(HISTORY_FILE);
    let mut history = ResilientHistory::open(&path, HistoryOptions::default(), 1);
    let other = rusqlite::Connection::open(&path).unwrap();
    other.execute_batch("BEGIN IMMEDIATE").unwrap();
    for tick in 1..=2 {
        history.record_experiment(experiment(tick));
        history.flush(tick);
    }
    assert_eq!(history.take_messages().len(), 1);
    assert_eq!(history.next_experiment_id(2), ExperimentId(3));
    other.execute_batch("COMMIT").unwrap();
    history.flush(3);
    assert_eq!(history.experiments(&ExperimentFilter::default(), 3).len(), 2);
    assert_eq!((history.state(), history.dropped()), (&HistoryState::OnDisk, 0));
}

#[test]
fn a_missing_file_is_an_error_for_a_reader_and_is_not_made() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join(HISTORY_FILE);
    assert!(matches!(
        History::open_read_only(&path),
        Err(HistoryError::Unreachable { .. })
    ));
    assert!(!path.exists());
    let none = directory.path().join("none").join(HISTORY_FILE);
    assert!(matches!(
        History::open(&none, HistoryOptions::default()),
        Err(HistoryError::Unreachable { .. })
    ));
    let mut history = ResilientHistory::open(&none, HistoryOptions::default(), 1);
    history.record_experiment(experiment(1));
    history.flush(2);
    assert_eq!(history.experiments(&ExperimentFilter::default(), 2).len(), 1);
}

#[test]
fn a_damaged_file_is_set_aside_and_a_new_one_begun() {
    type Damage = fn(&Path);
    let damages: [(&str, Damage); 4] = [
        ("random bytes", |p| std::fs::write(p, [0xa7; 20_000]).unwrap()),
        ("text", |p| {
            std::fs::write(p, "not a database ".repeat(1000)).unwrap()
        }),
        ("cut off", |p| {
            let bytes = std::fs::read(p).unwrap();
            std::fs::write(p, &bytes[..bytes.len() / 2 + 100]).unwrap();
        }),
        ("a page overwritten", |p| {
            let mut bytes = std::fs::read(p).unwrap();
            let third = bytes.len() / 4096 / 3 * 4096;
            bytes[third..third + 16_384].fill(0x5a);
            std::fs::write(p, bytes).unwrap();
        }),
    ];
    for (name, damage) in damages {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join(HISTORY_FILE);
        {
            let mut history = create(directory.path(), HistoryOptions::default());
            let entries: Vec<Entry> = (1..60)
                .map(|id| Entry::Experiment(Box::new(experiment(id))))
                .collect();
            history.record(&entries).unwrap();
        }
        damage(&path);
        assert!(
            matches!(
                History::open(&path, HistoryOptions::default()),
                Err(HistoryError::Damaged { .. })
            ),
            "{name}"
        );
        let damaged = std::fs::read(&path).unwrap();
        let options = HistoryOptions {
            first_experiment: ExperimentId(60),
            ..HistoryOptions::default()
        };
        let mut history = ResilientHistory::open(&path, options, 1234);
        assert_eq!(history.state(), &HistoryState::OnDisk, "{name}");
        assert_eq!(
            std::fs::read(directory.path().join("history.sqlite.damaged-1234")).unwrap(),
            damaged,
            "{name}"
        );
        let messages = history.take_messages();
        assert!(
            messages.len() == 1 && messages[0].contains("damaged-1234"),
            "{name}: {messages:?}"
        );
        // Numbers go on where the journal says.
        assert_eq!(history.next_experiment_id(1235), ExperimentId(60));
        history.record_experiment(experiment(60));
        history.flush(1236);
        assert_eq!(history.experiments(&ExperimentFilter::default(), 1236).len(), 1);
        assert!(history.take_messages().is_empty());
    }
}

#[test]
fn damage_while_it_is_open_does_not_stop_the_loop() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join(HISTORY_FILE);
    let mut history = ResilientHistory::open(&path, HistoryOptions::default(), 1);
    // More than SQLite keeps in its cache.
    for id in 1..200 {
        let blocks = (0..200).map(block).collect();
        history.record_experiment(ExperimentRecord {
            blocks,
            ..experiment(id)
        });
    }
    history.flush(2);
    for name in [HISTORY_FILE.to_owned(), format!("{HISTORY_FILE}-wal")] {
        let file = directory.path().join(name);
        let length = std::fs::metadata(&file).unwrap().len() as usize;
        let mut open = std::fs::OpenOptions::new().write(true).open(&file).unwrap();
        open.write_all(&vec![0x5a; length]).unwrap();
    }
    for tick in 3..20 {
        history.record_experiment(experiment(1000 + tick));
        history.flush(tick);
        history.experiments(
            &ExperimentFilter {
                limit: 1000,
                ..ExperimentFilter::default()
            },
            tick,
        );
        history.prune(tick);
    }
    assert_eq!(history.state(), &HistoryState::OnDisk);
    let messages = history.take_messages();
    assert_eq!(messages.len(), 1, "{messages:?}");
    drop(history);
    let history = History::open(&path, HistoryOptions::default()).unwrap();
    assert!(
        history
            .experiments(&ExperimentFilter::default())
            .unwrap()
            .iter()
            .any(|e| e.id.0 == 1019)
    );
}

#[test]
fn only_the_newest_damaged_files_are_kept() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join(HISTORY_FILE);
    for now in 1..=6 {
        std::fs::write(&path, [7; 9000]).unwrap();
        assert_eq!(
            ResilientHistory::open(&path, HistoryOptions::default(), now).state(),
            &HistoryState::OnDisk
        );
    }
    let mut left: Vec<String> = std::fs::read_dir(directory.path())
        .unwrap()
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .filter(|n| n.contains("damaged"))
        .collect();
    left.sort();
    assert_eq!(
        left,
        [
            "history.sqlite.damaged-4",
            "history.sqlite.damaged-5",
            "history.sqlite.damaged-6"
        ]
    );
}

#[test]
fn on_a_full_disk_the_history_goes_on_in_memory_and_returns() {
    const TEST: &str = "on_a_full_disk_the_history_goes_on_in_memory_and_returns";
    if common::role().as_deref() == Some("full") {
        full_disk_child();
        println!("CHILD-DONE");
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let mount = "mount -t tmpfs -o size=3m,mode=700 none \"$DIR\"";
    if let Some(output) = common::child_with_mounts(mount, TEST, "full", directory.path()) {
        assert!(String::from_utf8_lossy(&output.stdout).contains("CHILD-DONE"));
    }
}

fn full_disk_child() {
    let directory = common::directory();
    let path = directory.join(HISTORY_FILE);
    let filler = directory.join("filler");
    let mut history = ResilientHistory::open(&path, HistoryOptions::default(), 1000);
    let mut harmful = experiment(1);
    harmful.verdict = Some(Verdict::Harmful);
    history.record_experiment(harmful);
    history.flush(1000);
    assert_eq!(history.state(), &HistoryState::OnDisk);

    let mut file = std::fs::File::create(&filler).unwrap();
    while file.write_all(&[1; 512]).is_ok() {}
    let mut now = 1000;
    for id in 2..=200 {
        history.record_experiment(experiment(id));
        history.record_decision(decision(now));
        history.record_window(window(now));
        history.flush(now);
        now += 1;
    }
    assert!(matches!(history.state(), HistoryState::InMemory { .. }));
    let messages = history.take_messages();
    assert_eq!(messages.len(), 1, "{messages:?}");
    // What was known before is still known, and everything since.
    assert_eq!(history.priors(MACHINE, now)[0].harmful, 1);
    let all = ExperimentFilter {
        limit: 1000,
        ..ExperimentFilter::default()
    };
    assert_eq!(history.experiments(&all, now).len(), 200);
    assert_eq!(history.next_experiment_id(now), ExperimentId(201));
    // A restart on the full disk knows what the disk holds.
    // Trying again on a full disk changes nothing and says nothing.
    now += 1000;
    history.flush(now);
    assert!(matches!(history.state(), HistoryState::InMemory { .. }));
    assert!(history.take_messages().is_empty());
    drop(file);
    std::fs::remove_file(&filler).unwrap();
    history.flush(now + 1);
    assert!(
        matches!(history.state(), HistoryState::InMemory { .. }),
        "not before the next try is due"
    );
    history.flush(now + 301);
    assert_eq!((history.state(), history.dropped()), (&HistoryState::OnDisk, 0));
    assert!(history.take_messages()[0].contains("on disk again"));
    drop(history);
    let history = History::open(&path, HistoryOptions::default()).unwrap();
    let found = history.experiments(&all).unwrap();
    assert_eq!(found.len(), 200);
    assert!(found.iter().all(|e| e.blocks.len() == 6));
    let many = Filter {
        limit: 1000,
        ..Filter::default()
    };
    assert_eq!(history.decisions(&many).unwrap().len(), 199);
    assert_eq!(history.windows(&many).unwrap().len(), 199);
}

#[test]
fn on_a_read_only_file_system_it_is_read_and_the_loop_goes_on() {
    const TEST: &str = "on_a_read_only_file_system_it_is_read_and_the_loop_goes_on";
    if common::role().as_deref() == Some("read-only") {
        read_only_child();
        println!("CHILD-DONE");
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    create(directory.path(), HistoryOptions::default())
        .record_experiment(&experiment(1))
        .unwrap();
    let mount = "mount --bind \"$DIR\" \"$DIR\" && mount -o remount,bind,ro \"$DIR\"";
    if let Some(output) = common::child_with_mounts(mount, TEST, "read-only", directory.path()) {
        assert!(String::from_utf8_lossy(&output.stdout).contains("CHILD-DONE"));
    }
}

fn read_only_child() {
    let path = common::directory().join(HISTORY_FILE);
    let e = History::open(&path, HistoryOptions::default()).unwrap_err();
    assert!(matches!(e, HistoryError::ReadOnly { .. }), "{e}");
    assert_same(
        &History::open_read_only(&path)
            .unwrap()
            .experiments(&ExperimentFilter::default())
            .unwrap()[0],
        &experiment(1),
    );
    let mut history = ResilientHistory::open(&path, HistoryOptions::default(), 10);
    assert!(matches!(
        history.state(),
        HistoryState::InMemory { since_unix: 10, .. }
    ));
    assert_eq!(history.take_messages().len(), 1);
    assert_eq!(history.priors(MACHINE, 10)[0].accepted, 1);
    assert_eq!(history.next_experiment_id(10), ExperimentId(2));
    history.record_experiment(experiment(2));
    history.flush(11);
    history.flush(1000);
    assert_eq!(history.priors(MACHINE, 1000)[0].accepted, 2);
    assert!(history.take_messages().is_empty());
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_numbers_and_texts_come_back_exactly(
        floats in proptest::collection::vec(proptest::num::f64::ANY, 12),
        numbers in proptest::collection::vec(any::<u64>(), 6),
        texts in proptest::collection::vec(".{0,30}", 6),
        has_effect in any::<bool>(),
        blocks in 0_u32..5,
    ) {
        let mut e = experiment(1);
        e.id = ExperimentId(1 + numbers[0] / 4);
        (e.started_unix, e.ended_unix) = (1, 2);
        e.seed = numbers[1];
        e.stalled = Nanoseconds(numbers[2]);
        e.bloat = Bytes(numbers[3]);
        e.action = ActionId(numbers[4]);
        e.washout = Nanoseconds(numbers[5]);
        e.predicted = Effect { estimate: floats[0], lower: floats[1], upper: floats[2], confidence: floats[3] };
        e.effect = has_effect.then_some(Effect {
            estimate: floats[4], lower: floats[5], upper: floats[6], confidence: floats[7],
        });
        (e.alpha, e.evidence, e.harm_exposure) = (floats[8], floats[9], floats[10]);
        e.hypothesis.clone_from(&texts[0]);
        e.reason.clone_from(&texts[1]);
        e.machine.clone_from(&texts[2]);
        e.fingerprint = texts[3].as_str().into();
        e.workload = texts[4].as_str().into();
        e.strategy = texts[5].as_str().into();
        e.blocks = (0..blocks).map(|i| BlockRecord { work: floats[11], score: floats[0], ..block(i) }).collect();
        let mut history = History::in_memory(HistoryOptions::default()).unwrap();
        history.record_experiment(&e).unwrap();
        history.record_experiment(&e).unwrap();
        let found = history.experiments(&ExperimentFilter::default()).unwrap();
        prop_assert_eq!(found.len(), 1);
        assert_same(&found[0], &e);
    }

    #[test]
    fn no_damage_to_the_file_stops_its_user(
        places in proptest::collection::vec((0_usize..200_000, any::<u8>()), 1..40),
        cut in proptest::option::of(0_usize..200_000),
    ) {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join(HISTORY_FILE);
        create(directory.path(), HistoryOptions::default())
            .record(&(1..20).map(|id| Entry::Experiment(Box::new(experiment(id)))).collect::<Vec<_>>())
            .unwrap();
        let mut bytes = std::fs::read(&path).unwrap();
        for (at, byte) in places {
            let length = bytes.len();
            bytes[at % length] = byte;
        }
        bytes.truncate(cut.unwrap_or(usize::MAX));
        std::fs::write(&path, &bytes).unwrap();
        let options = HistoryOptions { first_experiment: ExperimentId(500), ..HistoryOptions::default() };
        let mut history = ResilientHistory::open(&path, options, 1);
        for tick in 1..5 {
            history.experiments(&ExperimentFilter::default(), tick);
            history.priors(MACHINE, tick);
            history.record_experiment(experiment(500 + tick));
            history.flush(tick);
            history.prune(tick);
        }
        let one = ExperimentFilter { id: Some(ExperimentId(504)), ..ExperimentFilter::default() };
        let found = history.experiments(&one, 5);
        prop_assert_eq!(found.len(), 1, "{:?}", history);
        // A changed letter inside an old text goes unnoticed (SQLite has no checksums), so texts that are stored
        // once and shared are not compared.
        prop_assert_eq!(&found[0].blocks, &experiment(504).blocks);
    }
}

#[test]
fn a_machine_whose_name_is_no_text_any_more_is_damage() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join(HISTORY_FILE);
    let mut history = create(directory.path(), HistoryOptions::default());
    history
        .record(&[Entry::Experiment(Box::new(experiment(1)))])
        .unwrap();
    drop(history);
    let mut bytes = std::fs::read(&path).unwrap();
    let places: Vec<usize> = bytes
        .windows(MACHINE.len())
        .enumerate()
        .filter_map(|(at, window)| (window == MACHINE.as_bytes()).then_some(at))
        .collect();
    assert!(!places.is_empty());
    for at in places {
        bytes[at] = 0x80;
    }
    std::fs::write(&path, &bytes).unwrap();
    let mut history = ResilientHistory::open(&path, HistoryOptions::default(), 1);
    assert!(history.experiments(&ExperimentFilter::default(), 1).is_empty());
    let told = history.take_messages();
    assert!(
        told.len() == 1 && told[0].contains("a new history was begun"),
        "{told:?}"
    );
    history.record_experiment(experiment(2));
    history.flush(2);
    assert_eq!(history.experiments(&ExperimentFilter::default(), 2).len(), 1);
}

#[test]
fn what_an_earlier_version_told_beside_a_trial_is_left_unread() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join(HISTORY_FILE);
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/upgrade/history.sqlite");
    std::fs::copy(fixture, &path).unwrap();
    let raw = rusqlite::Connection::open(&path).unwrap();
    let told: u32 = raw
        .query_row(
            "SELECT COUNT(*) FROM experiments WHERE waits IS NOT NULL",
            [],
            |r| r.get(0),
        )
        .unwrap();
    assert_eq!(told, 1);
    raw.execute(
        "INSERT INTO experiment_witnesses (experiment, meter, blocks) VALUES (2, 'points', 20)",
        [],
    )
    .unwrap();
    drop(raw);
    let mut history = History::open(&path, HistoryOptions::default()).unwrap();
    let read = history.experiments(&ExperimentFilter::default()).unwrap();
    assert_eq!(read.iter().map(|e| e.id.0).collect::<Vec<_>>(), [2, 1]);
    assert!(!read[0].spans.is_empty());
    history.record_experiment(&read[0]).unwrap();
    assert_eq!(history.experiments(&ExperimentFilter::default()).unwrap(), read);
    // So it is with what an earlier version recorded as JSON.
    let whole = experiment(3);
    let mut old = serde_json::to_value(&whole).unwrap();
    old["waits"] = serde_json::json!([{"workload": "redis-server.service", "blocks_on": 9, "blocks_off": 8}]);
    old["witness"] = serde_json::json!({"meter": "points", "blocks": 20});
    assert_eq!(serde_json::from_value::<ExperimentRecord>(old).unwrap(), whole);
}

#[test]
fn a_reader_is_proven_by_the_last_trial_that_says_something() {
    let directory = tempfile::tempdir().unwrap();
    let mut history = create(directory.path(), HistoryOptions::default());
    let trial = |id: u64, program: &str, reader: Option<&str>, verdict: Option<Verdict>| ExperimentRecord {
        fingerprint: program.into(),
        reader: reader.map(Into::into),
        verdict,
        ..experiment(id)
    };
    let accepted = Some(Verdict::Accepted);
    for record in [
        trial(1, "db", Some("tar"), accepted),
        trial(2, "db", Some("tar"), accepted),
        // Broken off, and still running: they say nothing.
        trial(3, "db", Some("tar"), Some(Verdict::Aborted)),
        trial(4, "db", Some("tar"), None),
        // Accepted once, and not any more.
        trial(5, "db", Some("grep"), accepted),
        trial(6, "db", Some("grep"), Some(Verdict::Inconclusive)),
        // Another program, another machine, no reader.
        trial(7, "index", Some("grep"), accepted),
        ExperimentRecord {
            machine: "another".into(),
            ..trial(8, "db", Some("cp"), accepted)
        },
        trial(9, "db", None, accepted),
    ] {
        history.record_experiment(&record).unwrap();
    }
    let known = history.proven_readers(MACHINE).unwrap();
    let pairs: Vec<(&str, &str, u32)> = known
        .iter()
        .map(|r| (r.program.as_str(), r.reader.as_str(), r.trials))
        .collect();
    assert_eq!(pairs, [("index", "grep", 1), ("db", "tar", 2)]);
    assert_eq!(known[1].effect.estimate, 0.143);
    assert_eq!(known[1].washout, Nanoseconds::from_secs(5));
    let read = history.experiments(&ExperimentFilter::default()).unwrap();
    assert_eq!(
        read.iter().find(|e| e.id.0 == 1).unwrap().reader,
        Some("tar".into())
    );
}

/// SQLite would wait for the other end of a FIFO.
#[test]
fn what_is_no_regular_file_is_not_opened() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join(homeostat_store::history::HISTORY_FILE);
    for suffix in ["", "-wal", "-shm", "-journal"] {
        let mut name = path.clone().into_os_string();
        name.push(suffix);
        let made = std::process::Command::new("mkfifo").arg(&name).status().unwrap();
        assert!(made.success());
        for opened in [
            History::open(&path, HistoryOptions::default()).err(),
            History::open_read_only(&path).err(),
        ] {
            assert!(
                matches!(opened, Some(HistoryError::Unreachable { .. })),
                "{suffix}: {opened:?}"
            );
        }
        std::fs::remove_file(&name).unwrap();
        std::fs::create_dir(&name).unwrap();
        let opened = History::open(&path, HistoryOptions::default()).err();
        assert!(
            matches!(opened, Some(HistoryError::Unreachable { .. })),
            "{suffix}: {opened:?}"
        );
        std::fs::remove_dir(&name).unwrap();
    }
    History::open(&path, HistoryOptions::default()).unwrap();
}
