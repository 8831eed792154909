//! Whole outputs as snapshots: reviewed as text.

use super::*;
use homeostat_daemon::api::{Switch, find_workload};
use homeostat_daemon::report::{Capability, StrategyState};
use homeostat_engine::view::{
    Budget, Calibration, Change, Decision, Experiment, KeptSmall, Meter, Outcome, Proposal, Stage, Status,
    Workload,
};
use homeostat_model::{
    ActionId, Effect, ExperimentId, ExperimentKind, LossIn, MeterCandidate, MeterClass, Verdict, WorkloadKind,
};

const NOW: u64 = 1_700_000_000;

fn look() -> Look {
    Look {
        width: 100,
        color: false,
        now_unix: NOW,
    }
}

fn workload(id: &str, program: &str, stage: Stage, summary: &str) -> Workload {
    Workload {
        name: id.into(),
        kind: WorkloadKind::Unit,
        program: program.into(),
        fingerprint: format!("unit {id}"),
        owner: "machine".into(),
        pids: vec![4711, 4712],
        processes: 2,
        age_s: 8000.0,
        cpus: 0.93,
        resident_bytes: 3 << 29,
        huge_bytes: Some(1 << 30),
        stage,
        undone: false,
        summary: summary.into(),
        meter: None,
        meters: [].into(),
        proposal: None,
        decisions: [].into(),
    }
}

fn off_level(change: f64, may_be_a_scar: bool) -> OffLevel {
    OffLevel {
        change,
        usual_lower: -0.021,
        usual_upper: 0.023,
        confidence: 0.9,
        blocks: 12,
        spans_before: 60,
        may_be_a_scar,
    }
}

fn view() -> Status {
    let gain = Effect {
        estimate: 0.142,
        lower: 0.11,
        upper: 0.175,
        confidence: 0.9,
    };
    let open = Effect {
        estimate: 0.031,
        lower: f64::NEG_INFINITY,
        upper: f64::INFINITY,
        confidence: 0.9,
    };
    let mut redis = workload(
        "redis-server.service",
        "redis-server",
        Stage::Improved,
        "large pages keep +14.2 %",
    );
    redis.meter = Some(Meter {
        id: "redis:commands".into(),
        unit: "command".into(),
        rate: 61_250.0,
        noise: 0.021,
        cost: 0.0,
        counted: 1.0,
        lag_s: 0.0,
        objective: "work per second".into(),
        objective_reason: "it uses all the CPU it can get".into(),
    });
    redis.meters = [
        MeterCandidate {
            id: "redis:commands".into(),
            class: MeterClass::Application,
            unit: "command".into(),
            cost_per_count: Nanoseconds::ZERO,
            lag: Nanoseconds::ZERO,
            refused: None,
        },
        MeterCandidate {
            id: "progress".into(),
            class: MeterClass::Application,
            unit: "operation".into(),
            cost_per_count: Nanoseconds::ZERO,
            lag: Nanoseconds::ZERO,
            refused: Some("the program publishes no progress file; link the progress library".into()),
        },
    ]
    .into();
    redis.decisions = [
        Decision {
            at_unix: NOW - 900,
            stage: Stage::Considered,
            text: "uses 0.93 CPUs and 1.50 GiB".into(),
        },
        Decision {
            at_unix: NOW - 300,
            stage: Stage::Improved,
            text: "accepted: +14.2 %".into(),
        },
    ]
    .into();
    let mut java = workload("shop.service", "java", Stage::Proposed, "waits for its turn");
    java.proposal = Some(Proposal {
        id: "large_pages/shop.service".into(),
        strategy: "large_pages".into(),
        hypothesis: "convert 700 pieces (1.37 GiB, 94 % resident) to 2 MiB pages".into(),
        predicted: Effect {
            estimate: 0.08,
            lower: 0.02,
            upper: 0.2,
            confidence: 0.8,
        }
        .into(),
        risk: "stalls of at most 0.4 ms each, 1.9 s in all; 2.0 MiB of memory".into(),
        design: "switchback, blocks of 2 s washout and 6 s measurement, at most 60 min".into(),
    });
    Status {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        pid: 4242,
        at_unix: NOW,
        notes: vec!["memory is not locked".into()],
        mode: "act".into(),
        paused: false,
        machine: "2 CPUs, 23.54 GiB, Linux 6.18.0".into(),
        host: homeostat_engine::view::Host::default(),
        machine_refusals: vec![],
        workloads: vec![
            redis,
            java,
            workload(
                "latency[77]",
                "latency",
                Stage::Trying,
                "large pages are being tried",
            ),
            workload(
                "cron.service",
                "cron",
                Stage::Declined,
                "only 3.0 MiB resident: nothing to gain",
            ),
        ],
        workloads_ignored: 12,
        experiments: vec![Experiment {
            id: ExperimentId(8),
            kind: ExperimentKind::Switchback,
            strategy: "large_pages".into(),
            workload: "latency[77]".into(),
            others: Vec::new(),
            phase: "measuring".into(),
            prepared: 1.0,
            blocks: 5,
            latest: Vec::new(),
            on: true,
            washout_s: 2.0,
            measured_s: 4.0,
            effect: Some(open.into()),
            evidence: 3.2,
            evidence_needed: 1000.0,
            elapsed_s: 36.0,
            budget_s: 3600.0,
            stalled_s: 13.8,
            bloat_bytes: 0,
            lost_work_s: 14.84,
            own_cpu_s: 1.2,
        }],
        in_force: vec![Change {
            action: ActionId(17),
            strategy: "large_pages".into(),
            workload: "redis-server.service".into(),
            text: "700 pieces in large pages".into(),
            effect: Some(gain.into()),
            since_unix: NOW - 7200,
            guard: "probation 3 of 30".into(),
            on: true,
        }],
        outcomes: vec![Outcome {
            id: ExperimentId(7),
            workload: "redis-server.service".into(),
            others: Vec::new(),
            strategy: "large_pages".into(),
            verdict: Verdict::Accepted,
            effect: Some(gain.into()),
            blocks: 22,
            ended_unix: NOW - 7300,
            reason: "evidence 1240 of 1000 after 22 blocks".into(),
            off_level: Some(off_level(-0.004, false)),
            not_excluded: [
                (LossIn::Spans, 0.083),
                (LossIn::WorkPerSecond, 0.012),
                (LossIn::WorkPerCpuSecond, 0.011),
                (LossIn::WorkPerSecond, 0.006),
            ]
            .map(|(what, most)| NotExcluded {
                workload: "shop.service".into(),
                what,
                most,
                confidence: 0.95,
            })
            .into(),
        }],
        advice: vec![homeostat_model::Advice {
            id: "large_pages/shared-memory/postgresql".into(),
            workload: Some("shop.service".into()),
            finding: "1.00 GiB of shared memory can not be converted: shmem_enabled is never".into(),
            remedy: "write advise to /sys/kernel/mm/transparent_hugepage/shmem_enabled and restart the unit"
                .into(),
            risk: "a restart".into(),
            setting: None,
        }],
        budget: Budget {
            own_cpu: 0.0007,
            own_resident_bytes: 11 << 20,
            canary_cpu: 0.0041,
            canary_resident_bytes: 66 << 20,
            own_faults_minor: 312,
            own_faults_major: 0,
            own_waited_s: 1.5,
            kept_small: KeptSmall {
                readers: 1,
                looks: 41_203,
                above: 2_310,
                stuck: 302,
            },
            experiments_last_hour: 2,
            experiments_per_hour_max: 20,
            harm_exposure_day: 12.4,
            harm_exposure_per_day_max: 20_000.0,
            owners: Vec::new(),
            stalled_s: 0.21,
            bloat_bytes: 2 << 20,
        },
        calibration: Calibration {
            placebos: 31,
            false_accepts: 1,
            tries: 9,
            accepts: 4,
            alpha_next: 0.0049,
        },
        ..Status::default()
    }
}

fn switch(on: bool) -> Switch {
    Switch {
        on,
        by: "switch".into(),
        since_unix: Some(1_700_000_000),
        why: "since 2023-11-14 22:13 UTC".into(),
        change: if on { "homeostat off" } else { "homeostat on" }.into(),
    }
}

#[test]
fn status_tells_the_state_at_a_glance() {
    let status = Status {
        switch: Some(switch(true)),
        ..view()
    };
    insta::assert_snapshot!("status", super::status(&status, false, &look()));
    insta::assert_snapshot!(
        "status_all_narrow",
        super::status(&status, true, &Look { width: 60, ..look() })
    );
}

#[test]
fn status_of_a_quiet_machine_is_short() {
    let quiet = Status {
        machine: "1 CPU".into(),
        mode: "advise-only".into(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        pid: 1,
        switch: Some(switch(false)),
        ..Status::default()
    };
    insta::assert_snapshot!("status_quiet", super::status(&quiet, false, &look()));
}

#[test]
fn explain_tells_the_whole_chain() {
    let view = view();
    for (snapshot, name) in [("explain_improved", "redis-server"), ("explain_proposed", "shop")] {
        let homeostat_daemon::api::Found::One(found) = find_workload(&view, name) else {
            panic!("{name}")
        };
        insta::assert_snapshot!(snapshot, explanation(&Explanation::new(&view, found), &look()));
    }
}

#[test]
fn plan_tells_what_would_be_tried() {
    let plan = Plan::new(&view());
    insta::assert_snapshot!("plan", super::plan(&plan, "", &look()));
    let line = plan_progress(&plan, Nanoseconds::from_secs(31), Nanoseconds::from_secs(90));
    assert_eq!(
        line,
        "31 of 90 s: 1 to try, 0 being measured, 1 with nothing to do"
    );
}

#[test]
fn an_end_without_bound_is_not_shown_as_a_loss_of_everything() {
    let open = Effect {
        estimate: 0.011,
        lower: -1.0,
        upper: f64::INFINITY,
        confidence: 0.9,
    };
    assert_eq!(effect(&open.into()), "+1.1 % (no interval yet)");
    let large = Effect {
        estimate: 25.0,
        lower: 1.708,
        ..open
    };
    assert_eq!(effect(&large.into()), "at least +170.8 %");
}

#[test]
fn a_plan_is_not_settled_before_any_program_was_seen_to_run() {
    let settled = |stage, cpus| {
        let mut view = view();
        view.workloads.truncate(1);
        view.workloads[0].stage = stage;
        view.workloads[0].cpus = cpus;
        Plan::new(&view).is_settled()
    };
    assert!(!settled(Stage::Ignored, 0.0), "scanned once: no rate is known");
    assert!(settled(Stage::Ignored, 0.01));
    assert!(settled(Stage::Proposed, 0.5));
    assert!(!settled(Stage::Considered, 0.5), "still being measured");
}

#[test]
fn doctor_tells_what_is_missing_and_what_to_do() {
    let d = Diagnosis {
        schema: 1,
        switch: Some(switch(false)),
        kernel: "6.18.0".into(),
        cpu_model: "EPYC".into(),
        hypervisor: Some("KVM".into()),
        cpus: 2,
        nodes: 1,
        memory_bytes: 24 << 30,
        huge_page_bytes: 2 << 20,
        capabilities: vec![
            Capability {
                id: "perf.hardware".into(),
                state: CapabilityState::Missing,
                detail: "no PMU: perf_event_open says ENOENT".into(),
                cost_of_absence: "instructions per cycle are not known".into(),
                remedy: "give the virtual machine a PMU".into(),
            },
            Capability {
                id: "process_madvise.collapse".into(),
                state: CapabilityState::Available,
                detail: "tried on 2 MiB of our own memory: 0.3 ms".into(),
                cost_of_absence: String::new(),
                remedy: String::new(),
            },
        ],
        strategies: vec![StrategyState {
            id: "large_pages".into(),
            summary: "gives running processes large pages".into(),
            refused: Some("no process_madvise: Linux 6.1 or newer is needed".into()),
        }],
    };
    insta::assert_snapshot!("doctor", diagnosis(&d, &look()));
}

#[test]
fn the_past_is_listed_and_shown_block_by_block() {
    let block = |index, on, score| homeostat_daemon::report::Block {
        index,
        on,
        measured_from_s: Some(5_000.0 + 8.0 * f64::from(index)),
        measured_s: 6.0,
        work: Some(100_000.0 + f64::from(index)),
        cpu_s: 5.98,
        score: Some(score),
        broken: index == 1,
    };
    let span = |on_s: f64, off_s: f64| {
        let longer = Effect {
            estimate: on_s / off_s - 1.0,
            lower: on_s / off_s - 1.04,
            upper: on_s / off_s - 0.96,
            confidence: 0.9,
        };
        homeostat_model::SpanChange {
            on_s,
            off_s,
            noise: 0.03,
            longer,
            longer_for_its_work: longer,
        }
    };
    let one = homeostat_daemon::report::PastExperiment {
        id: ExperimentId(7),
        kind: ExperimentKind::Switchback,
        strategy: "large_pages".into(),
        workload: "redis-server.service".into(),
        fingerprint: "unit redis-server.service".into(),
        others: Vec::new(),
        machine: "6.18".into(),
        hypothesis: "convert 700 pieces".into(),
        predicted: Effect {
            estimate: 0.08,
            lower: 0.02,
            upper: 0.2,
            confidence: 0.8,
        }
        .into(),
        meter: "redis:commands".into(),
        objective: "work per second".into(),
        seed: 5,
        alpha: 0.001,
        washout_s: 2.0,
        measured_s: 6.0,
        started_unix: NOW - 7500,
        ended_unix: NOW - 7300,
        verdict: Some(Verdict::Accepted),
        reason: "evidence 1240 of 1000 after 22 blocks".into(),
        effect: Some(
            Effect {
                estimate: 0.142,
                lower: 0.11,
                upper: 0.175,
                confidence: 0.9,
            }
            .into(),
        ),
        spans: vec![homeostat_daemon::report::TrialSpans::from(
            &homeostat_model::SpansAccount {
                workload: "redis-server.service".into(),
                unseen: None,
                blocks_on: 11,
                blocks_off: 11,
                median: Some(span(0.000_18, 0.000_2)),
                p99: Some(span(0.001_9, 0.001_8)),
            },
        )],
        meanings: [Some(0.002), None]
            .map(|change: Option<f64>| {
                let effect = |x: f64| Effect {
                    estimate: x,
                    lower: x - 0.006,
                    upper: x + 0.006,
                    confidence: 0.9,
                };
                homeostat_daemon::report::TrialMeaning::from(&homeostat_model::MeaningAccount {
                    workload: "redis-server.service".into(),
                    judge: "sockets.segments".into(),
                    beside: "io.write_calls".into(),
                    unwatched: change.is_none().then(|| {
                        "io.write_calls, by which it qualified, cannot be read: no such file".into()
                    }),
                    blocks_on: 11,
                    blocks_off: 11,
                    change: change.map(effect),
                    drift: change.map(|x| effect(-x)),
                    slots: 0,
                    staged: None,
                })
            })
            .into(),
        off_level: Some(off_level(-0.18, true)),
        not_excluded: Vec::new(),
        evidence: Some(1240.0),
        stalled_s: 0.21,
        bloat_bytes: 2 << 20,
        harm_exposure: Some(1.5),
        blocks: vec![block(0, true, 11.6), block(1, false, 11.4)],
    };
    insta::assert_snapshot!("experiment", experiment(&one, &look()));
    let unfinished = homeostat_daemon::report::PastExperiment {
        id: ExperimentId(8),
        verdict: None,
        effect: None,
        reason: String::new(),
        ..one.clone()
    };
    let both = homeostat_daemon::report::Past {
        schema: 1,
        experiments: vec![unfinished, one],
    };
    insta::assert_snapshot!("past", super::past(&both, &look()));
}

#[test]
fn a_line_of_the_story_names_its_workload() {
    let line = StoryLine {
        schema: 1,
        at_unix: NOW,
        workload: Some("redis".into()),
        stage: "trying".into(),
        text: "block 3".into(),
        warning: false,
    };
    assert_eq!(story(&line, &look()), "22:13:20Z redis trying: block 3\n");
}

/// The shape of a described machine (`fixtures/topologies`).
fn shape(name: &str) -> homeostat_daemon::places::Topology {
    let directory = tempfile::tempdir().unwrap();
    let file = std::path::Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../fixtures/topologies")
        .join(format!("{name}.tree"));
    for line in std::fs::read_to_string(file)
        .unwrap()
        .lines()
        .filter(|l| !l.starts_with('#'))
    {
        let (path, link, text) = match line.split_once('\t') {
            Some((path, text)) => (path, false, text.replace("\\n", "\n")),
            None => {
                let (path, target) = line.split_once(" -> ").unwrap();
                (path, true, target.to_owned())
            }
        };
        let path = directory.path().join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        if link {
            std::os::unix::fs::symlink(text, path).unwrap();
        } else {
            std::fs::write(path, text).unwrap();
        }
    }
    homeostat_daemon::places::describe(Some(directory.path())).unwrap()
}

#[test]
fn topologies_read_like_trees() {
    for name in [
        "hybrid-3-kinds",
        "server-4-nodes",
        "memory-classes",
        "sparse-numbers",
        "big-little",
    ] {
        insta::assert_snapshot!(format!("topology_{name}"), super::topology(&shape(name), &look()));
    }
}

fn places() -> homeostat_daemon::places::Locality {
    use homeostat_daemon::places::{
        Dispatches, Locality, MemoryPlace, NodePlaces, RunningPlace, Score, WorkloadPlaces,
    };
    use homeostat_model::{Bytes, MemoryByKind, NodeId, Redispatches};
    const GIB: u64 = 1 << 30;
    let node = |id: u32, cpus: &str, busy: f64| NodePlaces {
        id,
        cpus: cpus.into(),
        busy_cpus: busy,
        memory_bytes: 64 * GIB,
        free_bytes: 20 * GIB,
        file_cache_bytes: 3 * GIB,
        pages_local: 900,
        pages_to_others: if id == 0 { 100 } else { 0 },
        pages_missed: 0,
    };
    let memory = |node: u32, gib: u64| MemoryPlace {
        node: NodeId(node),
        kinds: MemoryByKind {
            anonymous: Bytes(gib * GIB),
            shared: Bytes(GIB / 2),
            file: Bytes(8 << 20),
            hugetlb: Bytes::ZERO,
            huge: Bytes(GIB),
        },
    };
    let redis = WorkloadPlaces {
        name: "redis-server.service".into(),
        program: "redis-server".into(),
        pid: 4711,
        unknown: None,
        cpus: 3.42,
        threads: 5,
        running: vec![
            RunningPlace {
                cache: 0,
                node: 0,
                cpus: 2.5,
            },
            RunningPlace {
                cache: 8,
                node: 1,
                cpus: 0.92,
            },
        ],
        memory: vec![memory(0, 4), memory(1, 12)],
        memory_error: 0.008,
        memory_covered: 1.0,
        local: Some(0.42),
        near: Some(0.58),
        far: Some(0.0),
        dispatches: Some(Dispatches {
            per_second: 12_345.0,
            shares: Redispatches {
                dispatches: 0.0,
                same_core: 0.81,
                same_cache: 0.1,
                same_node: 0.05,
                other_node: 0.04,
                every_move_seen: true,
            },
        }),
        pages_migrated: Some(123),
        preferred: std::collections::BTreeMap::from([(1, 4)]),
        bound: None,
        counted_local: None,
        score: Some(Score {
            now: 57.6,
            best: 96.2,
            cpus: "8-15".into(),
            node: Some(1),
            moved_bytes: 4 * GIB,
            limit: "1.00 GiB on large pages stay where they are".into(),
        }),
    };
    let plain = |name: &str| WorkloadPlaces {
        name: name.into(),
        program: name.into(),
        ..redis.clone()
    };
    let mut bound = plain("batch");
    bound.bound = Some(
        "its threads are restricted to CPUs 0-3, by taskset, CPUAffinity=, a cpuset or the program itself"
            .into(),
    );
    bound.dispatches = None;
    bound.score = Some(Score {
        now: 88.0,
        best: 88.0,
        cpus: String::new(),
        node: None,
        moved_bytes: 0,
        limit: "a person or another tool placed it".into(),
    });
    let mut secret = plain("secret");
    secret.unknown = Some("looking where the memory of secret lies: permission denied".into());
    secret.memory = vec![];
    (secret.local, secret.near, secret.far) = (None, None, None);
    secret.dispatches = None;
    secret.score = None;
    Locality {
        schema: 1,
        at_unix: NOW,
        interval_s: 2.0,
        nodes: vec![node(0, "0-7", 3.1), node(1, "8-15", 0.95)],
        balancing: Some(homeostat_daemon::places::HostBalancing {
            hint_faults: 1000,
            hint_faults_local: 640,
            pages_migrated: 200,
        }),
        workloads: vec![redis, bound, secret],
        workloads_left_out: 7,
        notes: vec![
            "moves between CPUs cannot be seen one by one: not permitted; run homeostat as root".into(),
        ],
    }
}

#[test]
fn places_of_all_workloads_and_of_one() {
    let wide = Look { width: 150, ..look() };
    insta::assert_snapshot!("locality", super::locality(&places(), &wide));
    insta::assert_snapshot!("locality_of_one", super::locality_of_one(&places(), &look()));
    insta::assert_snapshot!("placement", super::placement(&places(), &look()));
}

/// A test of a server: one meter is known well, one for a part of the time, one counts nothing, and one could not be opened.
fn tried() -> homeostat_daemon::meters::Test {
    let meter = |id: &str, rate: Option<f64>, more: serde_json::Value| {
        let mut meter = serde_json::json!({
            "id": id, "class": "kernel", "unit": "requests", "rate": rate, "noise": null, "detectable": null,
            "cost": 0.0, "counted": 1.0, "taken": false, "why": "", "story": null, "readings": [],
        });
        for (key, value) in more.as_object().unwrap() {
            meter[key] = value.clone();
        }
        meter
    };
    let meters = [
        meter(
            "redis",
            Some(67_631.0),
            serde_json::json!({
                "noise": 0.001, "detectable": 0.0265, "taken": true,
                "why": "taken: nothing closer to the work can be counted",
            }),
        ),
        meter(
            "uprobe:redis-server:readQueryFromClient",
            Some(72_886.0),
            serde_json::json!({
                "noise": 0.0338, "detectable": 0.0395, "cost": 0.0041, "counted": 0.02,
                "why": "good, but redis is closer to the work or steadier",
            }),
        ),
        meter(
            "io.bytes",
            Some(0.0),
            serde_json::json!({
                "why": "counted nothing in 45 s: the program does no such work, or is idle",
            }),
        ),
        meter(
            "points",
            None,
            serde_json::json!({"why": "they are switched off"}),
        ),
    ];
    serde_json::from_value(serde_json::json!({
        "schema": 1, "name": "redis-server.service", "program": "redis-server", "pid": 4711, "seconds": 45.0,
        "cpus": 0.81, "meters": meters,
        "spans": {"count": 31_250, "threads": 5, "recorded": 0.043, "median_s": 14.2e-6, "median_noise": 0.021,
                  "p99_s": 71.0e-6, "p99_noise": 0.09},
        "spans_unknown": null,
        "waits": {"runqueue_wait": 0.12, "pressure_cpu": 0.231, "pressure_memory": 0.0, "pressure_io": 0.004},
    }))
    .unwrap()
}

#[test]
fn a_test_of_meters_tells_how_good_they_are_and_what_is_waited_for() {
    let test = tried();
    for width in [80, 120] {
        let text = super::meter_test(&test, &Look { width, ..look() });
        for line in text.lines() {
            assert!(text::visible(line) <= width, "{width}: {line}");
        }
        insta::assert_snapshot!(format!("meter_test_{width}"), text);
    }
}

#[test]
fn configured_meters_are_listed_with_what_one_count_is() {
    let mut known: homeostat_daemon::meters::Known = serde_json::from_value(serde_json::json!({
        "schema": 1, "meters": [], "configured": [
            {"workload": "shop*", "meter": "uprobe:shop:handle_order", "unit": "order"},
            {"workload": "web", "meter": "prometheus:http://127.0.0.1:9090/metrics#pages_total", "unit": null},
        ],
    }))
    .unwrap();
    let text = super::known_meters(&known, &look());
    let rows: Vec<Vec<&str>> = text
        .lines()
        .map(|line| line.split_whitespace().collect())
        .collect();
    for row in [
        &["WORKLOAD", "METER", "UNIT"][..],
        &["shop*", "uprobe:shop:handle_order", "order"],
        &[
            "web",
            "prometheus:http://127.0.0.1:9090/metrics#pages_total",
            "not",
            "said",
        ],
    ] {
        assert!(rows.iter().any(|r| r == row), "{row:?}: {text}");
    }
    known.configured.clear();
    assert!(!super::known_meters(&known, &look()).contains("Configured"));
}

#[test]
fn a_test_of_meters_says_why_a_figure_is_missing() {
    let mut test = tried();
    test.spans = None;
    test.spans_unknown = Some("its waits cannot be seen".into());
    test.waits = homeostat_daemon::meters::Waits::default();
    let text = super::meter_test(&test, &look());
    assert!(text.contains("No times from wait to wait: its waits cannot be seen."));
    assert!(text.contains("(schedstat)") && text.contains("does not tell (PSI)"));
}
