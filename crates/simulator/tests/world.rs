//! The simulated machine through the seam: the conformance suite on every effector, exact undo, people, determinism.

#![expect(clippy::unwrap_used, clippy::panic, reason = "helpers of tests")]

use homeostat_model::action::{MemoryTarget, PageMove, Target};
use homeostat_model::{
    Action, ActionId, Bytes, CpuId, Direction, MeterId, Nanoseconds, NodeId, Progress, UndoRecord,
};
use homeostat_platform::{Clock, Effectors, PlatformError, SampleRequest, Sensors, conformance};
use homeostat_simulator::behaviour::{Churn, Load, Modulation, ProgramSpec};
use homeostat_simulator::hardware::Profile;
use homeostat_simulator::layout::Layout;
use homeostat_simulator::noise::NoiseSpec;
use homeostat_simulator::platform::SimPlatform;
use homeostat_simulator::scheduler::SchedulerKind;
use homeostat_simulator::world::{PersonChange, TimedChange, World, WorldError, WorldSpec};
use proptest::prelude::*;

const EFFECTORS: [&str; 5] = [
    "thread_placement",
    "page_placement",
    "large_pages",
    "prefetch",
    "placebo",
];

fn seconds(s: f64) -> Nanoseconds {
    Nanoseconds::from_secs_f64(s)
}

fn program(name: &str) -> ProgramSpec {
    ProgramSpec {
        name: name.into(),
        profile: "oltp".into(),
        threads: 4,
        private_mib: 600,
        shared_mib: 200,
        memory_on: vec![0.5, 0.5],
        ..ProgramSpec::default()
    }
}

fn spec(programs: Vec<ProgramSpec>) -> WorldSpec {
    WorldSpec {
        programs,
        profiles: vec![
            Profile::new("oltp", 2.0, 0.3, 0.5),
            Profile::new("light", 0.2, 0.0, 0.0),
        ],
        seed: 7,
        ..WorldSpec::new(Layout::named("small-2n").unwrap(), SchedulerKind::Linux)
    }
}

fn platform(programs: Vec<ProgramSpec>) -> SimPlatform {
    SimPlatform::new(World::new(spec(programs)).unwrap())
}

fn action(platform: &mut SimPlatform, effector: &str, workload: &str) -> Action {
    let target = match effector {
        "thread_placement" | "prefetch" => Target::Cpus((0..4).map(CpuId).collect()),
        "page_placement" => Target::Pages(PageMove {
            node: NodeId(0),
            bytes: Bytes::from_mib(4000),
            shared: true,
        }),
        "large_pages" => {
            let map = platform.inspect_memory(&workload.into()).unwrap();
            let region = &map.regions[0];
            Target::Memory(vec![MemoryTarget {
                process: region.process,
                pieces: region.convertible.iter().copied().take(40).collect(),
            }])
        }
        _ => Target::Nothing,
    };
    Action {
        id: ActionId(EFFECTORS.iter().position(|e| *e == effector).unwrap_or(9) as u64 + 1),
        effector: effector.into(),
        workload: workload.into(),
        target,
        arguments: Default::default(),
        why: "test".into(),
    }
}

fn drive(
    platform: &mut SimPlatform,
    record: &UndoRecord,
    direction: Direction,
) -> Result<Progress, PlatformError> {
    for _ in 0..100_000 {
        let progress = platform.advance(record, direction)?;
        if progress.done {
            return Ok(progress);
        }
        platform.clock().sleep(progress.pause);
    }
    panic!("does not end")
}

#[test]
fn the_sensors_conform() {
    assert_eq!(
        conformance::sensing(&mut platform(vec![program("db"), program("app")])),
        Vec::<String>::new()
    );
}

#[test]
fn every_effector_conforms_and_restores_everything_exactly() {
    for effector in EFFECTORS {
        let mut platform = platform(vec![program("db"), program("app")]);
        platform.advance_to(seconds(10.0));
        let before = platform.settings();
        let free = platform.with_world(|w| w.nodes());
        let action = action(&mut platform, effector, "db");
        let mut fresh = platform.fresh();
        assert_eq!(
            conformance::acting(&mut platform, &mut fresh, &action),
            Vec::<String>::new(),
            "{effector}"
        );
        assert_eq!(platform.settings(), before, "{effector}");
        assert_eq!(
            platform.with_world(|w| w.nodes()),
            free,
            "{effector}: free memory"
        );
        // The first handle would see somebody else's hand in what the fresh one did.
        let mut platform = platform.fresh();
        let record = platform.prepare(&action).unwrap();
        drive(&mut platform, &record, Direction::Apply).unwrap();
        assert_eq!(
            platform.settings() == before,
            effector == "placebo",
            "{effector} does something"
        );
    }
}

#[test]
fn an_undo_half_way_restores_everything_exactly_even_after_a_crash() {
    for effector in ["page_placement", "large_pages"] {
        for slices in [1, 2, 5] {
            let mut platform = platform(vec![program("db")]);
            let before = platform.settings();
            let mut action = action(&mut platform, effector, "db");
            action.arguments.insert("slice_ms".into(), "5".into());
            let record = platform.prepare(&action).unwrap();
            for _ in 0..slices {
                assert!(!platform.advance(&record, Direction::Apply).unwrap().done);
            }
            assert_ne!(platform.settings(), before);
            let mut fresh = platform.fresh();
            drop(platform);
            drive(&mut fresh, &record, Direction::Undo).unwrap();
            assert_eq!(fresh.settings(), before, "{effector} after {slices} slices");
        }
    }
}

#[test]
fn stages_are_undone_one_by_one() {
    let mut platform = platform(vec![program("db")]);
    let mut pictures = vec![platform.settings()];
    let mut records = vec![];
    for stage in 0..3 {
        let action = Action {
            id: ActionId(100 + stage),
            target: Target::Pages(PageMove {
                node: NodeId(0),
                bytes: Bytes::from_mib(80),
                shared: false,
            }),
            ..action(&mut platform, "page_placement", "db")
        };
        let record = platform.prepare(&action).unwrap();
        let progress = drive(&mut platform, &record, Direction::Apply).unwrap();
        assert_eq!(progress.finished, 40, "80 MiB in 2 MiB pieces");
        records.push(record);
        pictures.push(platform.settings());
    }
    while let Some(record) = records.pop() {
        assert_eq!(platform.settings(), pictures.pop().unwrap());
        drive(&mut platform, &record, Direction::Undo).unwrap();
    }
    assert_eq!(platform.settings(), pictures.pop().unwrap());
}

#[test]
fn pages_move_at_the_pace_that_was_asked_for_and_cost_the_mover_its_time() {
    let mut platform = platform(vec![program("db")]);
    let mut action = action(&mut platform, "page_placement", "db");
    action
        .arguments
        .insert("bytes_per_second".into(), "50000000".into());
    let record = platform.prepare(&action).unwrap();
    let (from, own) = (platform.now(), platform.own_cpu());
    let progress = drive(&mut platform, &record, Direction::Apply).unwrap();
    let bytes = progress.finished as f64 * 2097152.0;
    let rate = bytes / (platform.now() - from).as_secs_f64();
    assert!((rate / 50e6 - 1.0).abs() < 0.05, "{rate}");
    // 3 µs a page and 5 GB/s.
    let cost = (platform.own_cpu() - own).as_secs_f64();
    assert!(
        (cost / (bytes / 4096.0 * 3e-6 + bytes / 5e9) - 1.0).abs() < 0.01,
        "{cost}"
    );
}

#[test]
fn moved_pages_cross_the_link_that_the_program_needs() {
    // Two busy programs on two distant chips; the memory of one moves. The other one feels it only through the links.
    let chase = |name: &str| ProgramSpec {
        name: name.into(),
        profile: "latency".into(),
        threads: 30,
        private_mib: 8 * 1024,
        memory_on: vec![0.5, 0.5],
        threads_on: vec![0.5, 0.5],
        noise: NoiseSpec::QUIET,
        ..ProgramSpec::default()
    };
    let mut platform = SimPlatform::new(
        World::new(WorldSpec {
            programs: vec![chase("db"), chase("bystander")],
            ..WorldSpec::new(Layout::named("redbook-16").unwrap(), SchedulerKind::FanOut)
        })
        .unwrap(),
    );
    let speed = |platform: &SimPlatform| platform.with_world(|w| w.pace("bystander").work_per_s);
    let before = speed(&platform);
    let action = action(&mut platform, "page_placement", "db");
    let record = platform.prepare(&action).unwrap();
    let progress = platform.advance(&record, Direction::Apply).unwrap();
    assert!(!progress.done);
    let during = speed(&platform);
    assert!(during < 0.995 * before, "{during} after {before}");
    // The traffic goes on while the mover pauses: it is spread over the slice and the pause.
    platform.clock().sleep(Nanoseconds(progress.pause.0 / 2));
    assert_eq!(speed(&platform), during);
    // It ends when no slice follows. What was moved so far is a quarter of a percent.
    platform.clock().sleep(seconds(1.0));
    let idle = speed(&platform);
    assert!((idle / before - 1.0).abs() < 0.003, "{idle} after {before}");
    drive(&mut platform, &record, Direction::Apply).unwrap();
    drive(&mut platform, &record, Direction::Undo).unwrap();
    platform.clock().sleep(seconds(1.0));
    let back = speed(&platform);
    assert!((back / before - 1.0).abs() < 1e-6, "{back} after {before}");
}

#[test]
fn a_full_node_takes_what_fits_and_the_rest_is_named() {
    let mut hog = program("hog");
    hog.private_mib = 3300;
    hog.shared_mib = 0;
    hog.memory_on = vec![1.0, 0.0];
    let mut platform = platform(vec![hog, program("db")]);
    let before = platform.settings();
    let action = action(&mut platform, "page_placement", "db");
    let record = platform.prepare(&action).unwrap();
    let progress = drive(&mut platform, &record, Direction::Apply).unwrap();
    assert!(
        progress.finished > 0 && progress.skipped["no free memory at the node"] > 0,
        "{progress:?}"
    );
    drive(&mut platform, &record, Direction::Undo).unwrap();
    assert_eq!(platform.settings(), before);
}

#[test]
fn the_person_wins() {
    let bind = |cpus: Option<Vec<u32>>| PersonChange::BindThreads {
        program: "db".into(),
        cpus,
    };
    let mut sim = platform(vec![program("db")]);
    let place = action(&mut sim, "thread_placement", "db");
    let record = sim.prepare(&place).unwrap();
    drive(&mut sim, &record, Direction::Apply).unwrap();
    sim.person(bind(Some(vec![5]))).unwrap();
    assert!(matches!(
        sim.advance(&record, Direction::Apply),
        Err(PlatformError::Conflict { .. })
    ));
    let theirs = sim.settings();
    let undone = sim.advance(&record, Direction::Undo).unwrap();
    assert!(undone.done && undone.skipped.contains_key("changed by somebody else"));
    assert_eq!(sim.settings(), theirs, "theirs stays");
    assert!(
        matches!(sim.prepare(&place), Err(PlatformError::Conflict { .. })),
        "bound by a person"
    );
    assert!(sim.inspect_locality(&"db".into()).unwrap().bound.is_some());

    // Freed by a person while ours was in force: we do not restrict it again.
    let mut sim = platform(vec![program("db")]);
    let place = action(&mut sim, "thread_placement", "db");
    let record = sim.prepare(&place).unwrap();
    drive(&mut sim, &record, Direction::Apply).unwrap();
    sim.person(bind(None)).unwrap();
    assert!(matches!(
        sim.advance(&record, Direction::Apply),
        Err(PlatformError::Conflict { .. })
    ));
    assert!(sim.advance(&record, Direction::Undo).unwrap().done);

    let mut sim = platform(vec![program("db")]);
    let large = action(&mut sim, "large_pages", "db");
    let record = sim.prepare(&large).unwrap();
    sim.person(PersonChange::LargePageSwitch {
        enabled: "never".into(),
    })
    .unwrap();
    assert!(matches!(
        sim.advance(&record, Direction::Apply),
        Err(PlatformError::Conflict { .. })
    ));

    // Pages that a person moved to a third place stay there.
    let mut sim = platform(vec![program("db")]);
    let moved = action(&mut sim, "page_placement", "db");
    let record = sim.prepare(&moved).unwrap();
    drive(&mut sim, &record, Direction::Apply).unwrap();
    sim.person(PersonChange::MovePages {
        program: "db".into(),
        node: 1,
        share: 1.0,
    })
    .unwrap();
    let theirs = sim.settings();
    let again = drive(&mut sim, &record, Direction::Apply).unwrap();
    assert!(again.skipped["moved by somebody else"] > 0);
    assert_eq!(sim.settings(), theirs);
}

#[test]
fn what_was_done_to_a_process_ends_with_it() {
    for effector in ["thread_placement", "page_placement", "large_pages"] {
        let mut platform = platform(vec![program("db")]);
        let action = action(&mut platform, effector, "db");
        let record = platform.prepare(&action).unwrap();
        drive(&mut platform, &record, Direction::Apply).unwrap();
        platform.advance_to(platform.now() + seconds(5.0));
        platform
            .person(PersonChange::Restart { program: "db".into() })
            .unwrap();
        let restarted = platform.settings();
        assert!(
            matches!(
                platform.advance(&record, Direction::Apply),
                Err(PlatformError::Vanished { .. })
            ),
            "{effector}"
        );
        assert!(
            drive(&mut platform, &record, Direction::Undo).unwrap().done,
            "{effector}"
        );
        assert_eq!(platform.settings(), restarted, "{effector}");
        platform
            .person(PersonChange::Stop { program: "db".into() })
            .unwrap();
        assert!(
            platform.advance(&record, Direction::Undo).unwrap().done,
            "{effector}"
        );
        assert!(
            matches!(platform.prepare(&action), Err(PlatformError::Vanished { .. })),
            "{effector}"
        );
    }
}

/// Places threads on the CPUs of node 0, all memory with them.
fn with_memory(sim: &mut SimPlatform) -> Action {
    let mut place = action(sim, "thread_placement", "db");
    place.arguments.insert("memory".into(), "all".into());
    place
        .arguments
        .insert("memory_bytes".into(), (4_u64 << 30).to_string());
    place
}

#[test]
fn threads_and_their_memory_go_in_one_change_and_come_back() {
    let one = || {
        let mut p = program("db");
        p.memory_on = vec![0.2, 0.8];
        p.noise = NoiseSpec::QUIET;
        platform(vec![p, program("app")])
    };
    let mut sim = one();
    let (before, free) = (sim.settings(), sim.with_world(|w| w.nodes()));
    let place = with_memory(&mut sim);
    let mut fresh = sim.fresh();
    assert_eq!(
        conformance::acting(&mut sim, &mut fresh, &place),
        Vec::<String>::new()
    );
    assert_eq!(sim.settings(), before);
    assert_eq!(sim.with_world(|w| w.nodes()), free);

    let mut sim = one();
    let pace = |s: &SimPlatform| s.with_world(|w| w.pace("db"));
    let slow = pace(&sim);
    let record = sim.prepare(&place).unwrap();
    let progress = drive(&mut sim, &record, Direction::Apply).unwrap();
    // 600 + 200 MiB in pieces of 2 MiB, 80 % of them elsewhere; and the mask.
    assert_eq!((progress.finished, progress.total), (321, 321));
    sim.advance_to(sim.now() + seconds(20.0));
    let (there, fast) = (sim.settings(), pace(&sim));
    assert_eq!(there.masks["db"].len(), 4);
    assert!(there.pages["db"].keys().all(|n| *n == NodeId(0)), "{there:?}");
    assert!((fast.local_share - 1.0).abs() < 1e-6 && fast.work_per_s > slow.work_per_s);
    assert_eq!(there.pages["app"], before.pages["app"]);
    drive(&mut sim.fresh(), &record, Direction::Undo).unwrap();
    assert_eq!(sim.settings(), before);

    // Private memory alone, and no more than was asked for.
    let mut sim = one();
    let mut part = with_memory(&mut sim);
    part.arguments.insert("memory".into(), "private".into());
    part.arguments
        .insert("memory_bytes".into(), Bytes::from_mib(100).0.to_string());
    let record = sim.prepare(&part).unwrap();
    assert_eq!(drive(&mut sim, &record, Direction::Apply).unwrap().finished, 51);
}

#[test]
fn a_placement_with_memory_that_is_broken_off_comes_back_even_after_a_crash() {
    for slices in [1, 2, 5] {
        let mut sim = platform(vec![program("db")]);
        let before = sim.settings();
        let mut place = with_memory(&mut sim);
        place.arguments.insert("slice_ms".into(), "5".into());
        let record = sim.prepare(&place).unwrap();
        for _ in 0..slices {
            assert!(!sim.advance(&record, Direction::Apply).unwrap().done);
        }
        let under_way = sim.settings();
        assert!(under_way.masks.contains_key("db") && under_way.pages != before.pages);
        let mut fresh = sim.fresh();
        drop(sim);
        drive(&mut fresh, &record, Direction::Undo).unwrap();
        assert_eq!(fresh.settings(), before, "after {slices} slices");
    }
}

#[test]
fn a_person_who_binds_threads_placed_with_memory_keeps_them_and_the_memory_goes_back() {
    for at_once in [true, false] {
        let mut sim = platform(vec![program("db")]);
        let before = sim.settings();
        let mut place = with_memory(&mut sim);
        place.arguments.insert("slice_ms".into(), "5".into());
        let record = sim.prepare(&place).unwrap();
        if at_once {
            sim.advance(&record, Direction::Apply).unwrap();
        } else {
            drive(&mut sim, &record, Direction::Apply).unwrap();
        }
        let bind = |cpus| PersonChange::BindThreads {
            program: "db".into(),
            cpus,
        };
        sim.person(bind(Some(vec![5]))).unwrap();
        assert!(matches!(
            sim.advance(&record, Direction::Apply),
            Err(PlatformError::Conflict { .. })
        ));
        let undone = drive(&mut sim, &record, Direction::Undo).unwrap();
        assert_eq!(undone.skipped["changed by somebody else"], 1);
        let now = sim.settings();
        assert_eq!(now.masks["db"], [CpuId(5)]);
        assert_eq!((now.pages, now.pieces), (before.pages, before.pieces));
        // Free again by a person: neither is it restricted by us.
        sim.person(bind(None)).unwrap();
        let record = sim.prepare(&place).unwrap();
        sim.advance(&record, Direction::Apply).unwrap();
        sim.person(bind(None)).unwrap();
        assert!(matches!(
            sim.advance(&record, Direction::Apply),
            Err(PlatformError::Conflict { .. })
        ));
    }
    // Memory that a person bound is not planned for.
    let mut sim = platform(vec![program("db")]);
    let place = with_memory(&mut sim);
    sim.person(PersonChange::BindMemory {
        program: "db".into(),
        nodes: Some(vec![1]),
    })
    .unwrap();
    assert!(matches!(sim.prepare(&place), Err(PlatformError::Conflict { .. })));
}

#[test]
fn processes_are_kept_on_chips_of_their_own_with_their_memory() {
    let workers = |memory: Vec<f64>| {
        let mut p = program("db");
        p.processes = 4;
        p.threads = 1;
        p.private_mib = 300;
        p.shared_mib = 0;
        p.memory_on = memory;
        p.noise = NoiseSpec::QUIET;
        platform(vec![p, program("app")])
    };
    let split = |sim: &mut SimPlatform| {
        let mut a = action(sim, "thread_placement", "db");
        a.target = Target::Cpus((0..8).map(CpuId).collect());
        let words = [
            ("split_by", "process".to_owned()),
            ("memory", "private".to_owned()),
            ("memory_bytes", (4_u64 << 30).to_string()),
        ];
        a.arguments
            .extend(words.map(|(name, value)| (name.to_owned(), value)));
        a
    };
    let mut sim = workers(vec![0.5, 0.5]);
    let before = sim.settings();
    let place = split(&mut sim);
    let mut fresh = sim.fresh();
    assert_eq!(
        conformance::acting(&mut sim, &mut fresh, &place),
        Vec::<String>::new()
    );
    assert_eq!(sim.settings(), before);

    let mut sim = workers(vec![0.5, 0.5]);
    let pace = |s: &SimPlatform| s.with_world(|w| w.pace("db"));
    let slow = pace(&sim);
    assert!((slow.local_share - 0.5).abs() < 1e-6);
    let record = sim.prepare(&place).unwrap();
    drive(&mut sim, &record, Direction::Apply).unwrap();
    sim.advance_to(sim.now() + seconds(20.0));
    let fast = pace(&sim);
    assert!(
        (fast.local_share - 1.0).abs() < 1e-6 && fast.work_per_s > slow.work_per_s * 1.02,
        "{fast:?} {slow:?}"
    );
    // Two on each chip, and as much memory on each node as before: every process has its own beside it.
    assert_eq!(sim.settings().grouped, ["db by process 0,1,0,1"]);
    assert_eq!(sim.settings().pages["db"], before.pages["db"]);
    assert!(sim.settings().pieces != before.pieces);
    assert!(
        matches!(sim.prepare(&place), Err(PlatformError::Busy { .. })),
        "twice"
    );
    drive(&mut sim.fresh(), &record, Direction::Undo).unwrap();
    assert_eq!(sim.settings(), before);
    sim.advance_to(sim.now() + seconds(20.0));
    assert!((pace(&sim).work_per_s / slow.work_per_s - 1.0).abs() < 1e-6);

    // Where it runs first is where its memory is, as long as there is room.
    let mut sim = workers(vec![0.1, 0.9]);
    let record = sim.prepare(&place).unwrap();
    assert_eq!(record.found["split"], "0-1@1,2-3@0");
    // A person frees them: they stay free.
    drive(&mut sim, &record, Direction::Apply).unwrap();
    sim.person(PersonChange::BindThreads {
        program: "db".into(),
        cpus: None,
    })
    .unwrap();
    assert!(sim.settings().grouped.is_empty());
    assert!(matches!(
        sim.advance(&record, Direction::Apply),
        Err(PlatformError::Conflict { .. })
    ));
}

#[test]
fn large_pages_move_as_they_are_only_when_asked() {
    let mut p = program("db");
    p.memory_on = vec![0.5, 0.5];
    p.large = 1.0;
    let mut sim = platform(vec![p]);
    let before = sim.settings();
    let mut moved = action(&mut sim, "page_placement", "db");
    assert!(
        matches!(sim.prepare(&moved), Err(PlatformError::Busy { .. })),
        "all of it is large"
    );
    moved.arguments.insert("large_pages".into(), "move".into());
    let mut fresh = sim.fresh();
    assert_eq!(
        conformance::acting(&mut sim, &mut fresh, &moved),
        Vec::<String>::new()
    );
    assert_eq!(sim.settings(), before);
    let mut sim = sim.fresh();
    let record = sim.prepare(&moved).unwrap();
    drive(&mut sim, &record, Direction::Apply).unwrap();
    let there = sim.settings();
    assert!(there.pages["db"].keys().all(|n| *n == NodeId(0)), "{there:?}");
    assert_eq!(there.large, before.large, "as large as before");
}

#[test]
fn memory_is_shared_out_evenly_among_several_nodes() {
    let mut p = program("db");
    p.private_mib = 2048;
    p.memory_on = vec![0.25, 0.25, 0.25, 0.25];
    let four = |programs: Vec<ProgramSpec>| {
        let layout = Layout::named("power770-32").unwrap();
        SimPlatform::new(
            World::new(WorldSpec {
                layout,
                ..spec(programs)
            })
            .unwrap(),
        )
    };
    let mut sim = four(vec![p.clone()]);
    let before = sim.settings();
    let mut spread = action(&mut sim, "page_placement", "db");
    spread.arguments.insert("spread_over".into(), "0,2".into());
    let mut fresh = sim.fresh();
    assert_eq!(
        conformance::acting(&mut sim, &mut fresh, &spread),
        Vec::<String>::new()
    );
    assert_eq!(sim.settings(), before);
    let mut sim = four(vec![p.clone()]);
    let record = sim.prepare(&spread).unwrap();
    drive(&mut sim, &record, Direction::Apply).unwrap();
    let pages = &sim.settings().pages["db"];
    assert_eq!(pages.keys().copied().collect::<Vec<_>>(), [NodeId(0), NodeId(2)]);
    let share = pages[&NodeId(0)] as f64 / pages.values().sum::<u64>() as f64;
    assert!((share - 0.5).abs() < 0.02, "{share}");

    // The record of a move to one node may lack where to, as journals of earlier versions do.
    let mut sim = four(vec![p]);
    let mut record = sim
        .prepare(&action(&mut sim.fresh(), "page_placement", "db"))
        .unwrap();
    for (name, text) in &mut record.found {
        if name.starts_with("segment.") {
            *text = text.replace(">0", "");
            assert!(!text.contains('>'), "{text}");
        }
    }
    drive(&mut sim, &record, Direction::Apply).unwrap();
    assert!(sim.settings().pages["db"].keys().all(|n| *n == NodeId(0)));
    drive(&mut sim, &record, Direction::Undo).unwrap();
    assert_eq!(sim.settings(), before);
}

#[test]
fn wrong_actions_are_refused_with_a_reason() {
    let mut platform = platform(vec![program("db")]);
    let mut refused = |change: &dyn Fn(&mut Action)| {
        let mut a = action(&mut platform, "page_placement", "db");
        change(&mut a);
        platform.prepare(&a).unwrap_err()
    };
    let rejected = |e: PlatformError| matches!(e, PlatformError::Rejected { .. });
    assert!(rejected(refused(&|a| drop(
        a.arguments.insert("bytes_per_second".into(), "fast".into())
    ))));
    assert!(rejected(refused(&|a| drop(
        a.arguments.insert("colour".into(), "red".into())
    ))));
    assert!(rejected(refused(&|a| a.target = Target::Nothing)));
    assert!(rejected(refused(&|a| a.effector = "thread_placement".into())));
    assert!(rejected(refused(&|a| {
        a.effector = "thread_placement".into();
        a.target = Target::Cpus(vec![CpuId(99)]);
    })));
    let places = |words: &'static [(&'static str, &'static str)]| {
        move |a: &mut Action| {
            a.effector = "thread_placement".into();
            a.target = Target::Cpus(vec![CpuId(1)]);
            let words = words.iter().map(|(n, v)| ((*n).to_owned(), (*v).to_owned()));
            a.arguments.extend(words);
        }
    };
    for words in [
        &[("group_by", "colour")][..],
        &[("split_by", "thread")],
        &[("split_by", "process"), ("group_by", "board")],
        &[("split_by", "process"), ("memory", "all"), ("memory_bytes", "1")],
        &[("memory", "some")],
        &[("memory", "all")],
        &[("memory", "all"), ("memory_bytes", "many")],
        &[
            ("memory", "all"),
            ("memory_bytes", "1"),
            ("bytes_per_second", "fast"),
        ],
        &[("memory", "all"), ("memory_bytes", "1"), ("colour", "red")],
        &[("memory_bytes", "1")],
        &[("bytes_per_second", "100000")],
    ] {
        assert!(rejected(refused(&places(words))), "{words:?}");
    }
    assert!(rejected(refused(&|a| drop(
        a.arguments.insert("large_pages".into(), "split".into())
    ))));
    for nodes in ["1", "0,7", "all"] {
        let spread = |a: &mut Action| drop(a.arguments.insert("spread_over".into(), nodes.into()));
        assert!(rejected(refused(&spread)), "{nodes}");
    }
    assert!(rejected(refused(&|a| {
        a.effector = "prefetch".into();
        a.target = Target::Cpus(vec![CpuId(1)]);
        a.arguments.insert("group_by".into(), "board".into());
    })));
    assert!(rejected(refused(&|a| a.effector = "placebo".into())));
    assert!(matches!(
        refused(&|a| a.effector = "magic".into()),
        PlatformError::Unsupported { .. }
    ));
    assert!(matches!(
        refused(&|a| a.workload = "nobody".into()),
        PlatformError::Vanished { .. }
    ));
}

#[test]
fn placing_threads_takes_effect_gradually_and_comes_back() {
    let mut p = program("db");
    p.memory_on = vec![1.0, 0.0];
    p.noise = NoiseSpec::QUIET;
    p.threads = 2;
    p.threads_on = vec![0.5, 0.5];
    let mut platform = platform(vec![p]);
    platform.advance_to(seconds(1.0));
    let pace = |s: &SimPlatform| s.with_world(|w| w.pace("db"));
    let before = pace(&platform);
    assert!((before.local_share - 0.5).abs() < 1e-6, "{before:?}");
    let action = action(&mut platform, "thread_placement", "db");
    let record = platform.prepare(&action).unwrap();
    drive(&mut platform, &record, Direction::Apply).unwrap();
    platform.advance_to(seconds(2.0));
    let under_way = pace(&platform).local_share;
    assert!(under_way > 0.6 && under_way < 0.95, "{under_way}");
    platform.advance_to(seconds(30.0));
    let after = pace(&platform);
    assert!(
        (after.local_share - 1.0).abs() < 1e-6 && after.work_per_s > before.work_per_s,
        "{after:?}"
    );
    drive(&mut platform, &record, Direction::Undo).unwrap();
    platform.advance_to(seconds(60.0));
    let again = pace(&platform);
    assert!(
        (again.work_per_s / before.work_per_s - 1.0).abs() < 1e-6,
        "{again:?} {before:?}"
    );
}

#[test]
fn threads_are_grouped_by_board_and_set_free_again() {
    let mut oltp = program("db");
    oltp.threads = 64;
    oltp.memory_on = Vec::new();
    let mut spec = WorldSpec {
        layout: Layout::named("power770-2x16").unwrap(),
        ..spec(vec![oltp])
    };
    spec.profiles[0].kin = 0.8;
    spec.profiles[0].mx = 2.0;
    let mut sim = SimPlatform::new(World::new(spec).unwrap());
    let machine = sim.machine().unwrap();
    assert!(machine.can("placement.threads.grouped") && machine.can("cores.shared_pool"));
    let (before, slow) = (sim.settings(), sim.with_world(|w| w.pace("db").work_per_s));
    let mut group = action(&mut sim, "thread_placement", "db");
    group.target = Target::Cpus(machine.cpus.iter().map(|c| c.id).collect());
    group.arguments.insert("group_by".into(), "board".into());
    let record = sim.prepare(&group).unwrap();
    drive(&mut sim, &record, Direction::Apply).unwrap();
    sim.advance_to(seconds(30.0));
    assert!(sim.with_world(|w| w.pace("db").work_per_s) > slow * 1.01);
    assert_eq!(sim.settings().grouped, ["db"]);
    drive(&mut sim.fresh(), &record, Direction::Undo).unwrap();
    assert_eq!(sim.settings(), before);
}

#[test]
fn large_pages_and_prefetch_change_the_speed() {
    let mut p = program("db");
    p.noise = NoiseSpec::QUIET;
    let mut sim = platform(vec![p]);
    let pace = |s: &SimPlatform| s.with_world(|w| w.pace("db").work_per_s);
    let small = pace(&sim);
    sim.person(PersonChange::LargePages {
        program: "db".into(),
        share: 1.0,
    })
    .unwrap();
    let large = pace(&sim);
    assert!(large > small * 1.005, "{small} {large}");
    sim.person(PersonChange::Prefetch {
        cpus: None,
        on: false,
    })
    .unwrap();
    assert_ne!(pace(&sim), large);
    let locality = sim.inspect_locality(&"db".into()).unwrap();
    assert!(locality.huge.values().map(|b| b.0).sum::<u64>() > 0);
    sim.person(PersonChange::LargePages {
        program: "db".into(),
        share: 0.0,
    })
    .unwrap();
    sim.person(PersonChange::Prefetch { cpus: None, on: true })
        .unwrap();
    assert!((pace(&sim) / small - 1.0).abs() < 1e-9);
}

fn run(programs: Vec<ProgramSpec>, seed: u64, step_s: f64) -> (String, f64) {
    let mut platform = SimPlatform::new(
        World::new(WorldSpec {
            seed,
            ..spec(programs)
        })
        .unwrap(),
    );
    platform
        .open_meter(&"db".into(), &MeterId::new("progress"))
        .unwrap();
    let request = SampleRequest {
        scan: true,
        detail: vec!["db".into()],
    };
    let mut text = String::new();
    let mut now = 0.0;
    while now < 300.0 {
        now += step_s;
        platform.advance_to(seconds(now));
        text += &serde_json::to_string(&platform.sample(&request).unwrap()).unwrap();
        text += &serde_json::to_string(&platform.inspect_locality(&"db".into()).unwrap()).unwrap();
        if (now / step_s) as u64 == 20 {
            let action = action(&mut platform, "page_placement", "db");
            let record = platform.prepare(&action).unwrap();
            drive(&mut platform, &record, Direction::Apply).unwrap();
            now = platform.now().as_secs_f64();
        }
    }
    platform.advance_to(seconds(400.0));
    (text, platform.totals("db").work)
}

#[test]
fn one_seed_is_one_run_byte_for_byte() {
    let programs = || {
        let mut bursty = program("burst");
        bursty.modulation = Modulation::Bursty {
            low: 0.1,
            on_s: 3.0,
            off_s: 7.0,
        };
        let mut db = program("db");
        db.noise = NoiseSpec {
            steps: 0.05,
            drift: 0.02,
            stalls_per_hour: 60.0,
            ..NoiseSpec::default()
        };
        vec![db, bursty]
    };
    let first = run(programs(), 1, 1.0);
    assert_eq!(first, run(programs(), 1, 1.0));
    assert_ne!(first.0, run(programs(), 2, 1.0).0);
}

#[test]
fn how_often_somebody_looks_does_not_change_what_happens() {
    let work = |step: f64| {
        let mut spec = spec(vec![
            program("db"),
            ProgramSpec {
                modulation: Modulation::Bursty {
                    low: 0.0,
                    on_s: 2.0,
                    off_s: 5.0,
                },
                ..program("app")
            },
        ]);
        spec.surroundings.own_cost.look_us = 0.0;
        spec.surroundings.own_cost.process_us = 0.0;
        let mut world = World::new(spec).unwrap();
        let mut at = 0.0;
        while at < 600.0 {
            at += step;
            world.advance_to(seconds(at));
        }
        world.totals("db").work
    };
    let (often, seldom) = (work(0.25), work(600.0));
    assert!((often / seldom - 1.0).abs() < 1e-9, "{often} {seldom}");
}

#[test]
fn meters_count_the_work_and_start_again_with_the_program() {
    let mut p = program("db");
    p.noise = NoiseSpec::QUIET;
    let mut sim = platform(vec![p]);
    let found = sim.find_meters(&"db".into()).unwrap();
    assert_eq!(
        found[0].id.as_str(),
        "progress",
        "the program's own counter comes first"
    );
    for meter in &found {
        sim.open_meter(&"db".into(), &meter.id).unwrap();
    }
    let request = SampleRequest {
        scan: false,
        detail: vec!["db".into()],
    };
    sim.advance_to(seconds(10.0));
    let sample = sim.sample(&request).unwrap().samples.remove(0);
    let work = sim.totals("db").work;
    for reading in &sample.meters {
        let per_unit = match reading.meter.as_str() {
            "progress" => 1.0,
            "io.write_calls" => 1000.0,
            _ => 2000.0,
        };
        assert!(
            (reading.work / (work * per_unit) - 1.0).abs() < 0.05,
            "{reading:?} {work}"
        );
    }
    assert_eq!(sample.meters.len(), 3);
    sim.person(PersonChange::Restart { program: "db".into() })
        .unwrap();
    sim.advance_to(seconds(11.0));
    assert!(
        sim.sample(&request).unwrap().samples[0].meters.is_empty(),
        "a counter that restarted says nothing"
    );
    sim.advance_to(seconds(12.0));
    assert_eq!(sim.sample(&request).unwrap().samples[0].meters.len(), 3);
}

#[test]
fn a_saturated_machine_shows_waiting_threads_and_no_idle_time() {
    let mut p = program("db");
    p.threads = 16;
    let mut platform = platform(vec![p]);
    let request = SampleRequest {
        scan: true,
        detail: vec![],
    };
    platform.sample(&request).unwrap();
    platform.advance_to(seconds(10.0));
    let snapshot = platform.sample(&request).unwrap();
    let sample = &snapshot.samples[0];
    assert!((sample.cpu.as_secs_f64() - 80.0).abs() < 1.0, "{:?}", sample.cpu);
    assert!(
        (sample.runqueue_wait.as_secs_f64() - 80.0).abs() < 1.0,
        "{:?}",
        sample.runqueue_wait
    );
    assert!((snapshot.machine.cpu_busy.as_secs_f64() - 80.0).abs() < 1.0);
}

#[test]
fn an_open_load_does_what_is_offered_and_answers_faster_on_a_faster_machine() {
    let mut p = program("db");
    p.load = Load::Open {
        per_s: None,
        busy: Some(1.5),
    };
    p.threads = 8;
    p.noise = NoiseSpec::QUIET;
    p.threads_on = vec![0.5, 0.5];
    let platform = platform(vec![p]);
    platform.advance_to(seconds(60.0));
    let before = platform.totals("db");
    assert!((before.cpu_s / 60.0 - 1.5).abs() < 0.01, "{}", before.cpu_s);
    platform
        .person(PersonChange::MovePages {
            program: "db".into(),
            node: 0,
            share: 1.0,
        })
        .unwrap();
    platform
        .person(PersonChange::BindThreads {
            program: "db".into(),
            cpus: Some((0..4).collect()),
        })
        .unwrap();
    platform
        .person(PersonChange::LargePages {
            program: "db".into(),
            share: 1.0,
        })
        .unwrap();
    platform.advance_to(seconds(120.0));
    let after = platform.totals("db");
    assert!(
        ((after.work - before.work) / before.work - 1.0).abs() < 1e-6,
        "offered load: {} {}",
        before.work,
        after.work
    );
    assert!(before.responses.percentile_s(0.5) < before.responses.percentile_s(0.95));
    let later = after.responses.since(&before.responses);
    assert!((later.requests() - before.responses.requests()).abs() < 1.0);
}

#[test]
fn own_cost_is_taken_from_a_full_machine_only() {
    let work = |threads: u32, looks: u32| {
        let mut p = program("db");
        p.threads = threads;
        p.noise = NoiseSpec::QUIET;
        let mut platform = platform(vec![p]);
        for i in 1..=600 {
            platform.advance_to(seconds(f64::from(i) * 0.1));
            for _ in 0..looks {
                platform
                    .sample(&SampleRequest {
                        scan: true,
                        detail: vec!["db".into()],
                    })
                    .unwrap();
            }
        }
        (platform.totals("db").work, platform.own_cpu().as_secs_f64())
    };
    let ((idle, _), (idle_looked, cost)) = (work(2, 0), work(2, 20));
    assert!((cost - 600.0 * 20.0 * 362e-6).abs() < 0.01, "{cost}");
    assert_eq!(idle, idle_looked);
    let ((full, _), (full_looked, cost)) = (work(8, 0), work(8, 20));
    let lost = 1.0 - full_looked / full;
    assert!(
        (lost / (cost / (60.0 * 8.0)) - 1.0).abs() < 0.05,
        "{lost} of {}",
        cost / 480.0
    );
}

#[test]
fn converting_memory_that_is_in_use_holds_its_program_up() {
    let mut p = program("db");
    p.noise = NoiseSpec::QUIET;
    let mut platform = platform(vec![p]);
    let action = action(&mut platform, "large_pages", "db");
    let record = platform.prepare(&action).unwrap();
    let progress = drive(&mut platform, &record, Direction::Apply).unwrap();
    assert_eq!((progress.finished, progress.verified), (40, true));
    platform.advance_to(platform.now() + seconds(10.0));
    let lost = platform.totals("db").lost_s;
    // 40 conversions of 4.1 ms, in each of which every thread soon meets the piece; all cores are busy, so the CPU time
    // of the conversion is taken from the program too.
    let own = platform.own_cpu().as_secs_f64();
    assert!(lost > 0.10 && lost < 0.164 + own, "{lost} and {own}");
}

#[test]
fn short_lived_processes_never_grow_old() {
    let mut sdet = program("sdet");
    sdet.churn = Some(Churn { life_s: 2.0 });
    sdet.processes = 40;
    sdet.threads = 1;
    sdet.private_mib = 4;
    sdet.shared_mib = 0;
    let mut platform = platform(vec![sdet]);
    let request = SampleRequest {
        scan: true,
        detail: vec![],
    };
    let mut pids = std::collections::BTreeSet::new();
    let mut churn = 0;
    for second in 1..=120 {
        platform.advance_to(seconds(f64::from(second)));
        let snapshot = platform.sample(&request).unwrap();
        assert!(
            snapshot.samples[0].age <= seconds(2.0),
            "{:?}",
            snapshot.samples[0].age
        );
        churn += snapshot.samples[0].churn;
        pids.extend(snapshot.workloads.unwrap()[0].processes.iter().copied());
    }
    assert!(pids.len() > 2000, "{} processes in two minutes", pids.len());
    assert!((4000..6000).contains(&churn), "{churn}");
}

#[test]
fn cpus_and_nodes_go_and_come_back() {
    let mut sim = platform(vec![program("db")]);
    let before = sim.with_world(|w| w.pace("db").work_per_s);
    let cpus = |online| PersonChange::Cpus {
        cpus: (2..8).collect(),
        online,
    };
    sim.person(cpus(false)).unwrap();
    assert_eq!(sim.machine().unwrap().cpus.len(), 2);
    sim.advance_to(seconds(20.0));
    assert!(sim.with_world(|w| w.pace("db").work_per_s) < before * 0.8);
    let last = PersonChange::Cpus {
        cpus: vec![0, 1],
        online: false,
    };
    assert!(matches!(sim.person(last), Err(WorldError::Impossible(_))));
    sim.person(cpus(true)).unwrap();
    sim.advance_to(seconds(40.0));
    assert!((sim.with_world(|w| w.pace("db").work_per_s) / before - 1.0).abs() < 1e-6);

    sim.person(PersonChange::Node {
        node: 1,
        online: false,
    })
    .unwrap();
    let pages = &sim.settings().pages["db"];
    assert!(pages.keys().all(|n| *n == NodeId(0)), "{pages:?}");
    let mut there = action(&mut sim, "page_placement", "db");
    there.target = Target::Pages(PageMove {
        node: NodeId(1),
        bytes: Bytes::from_mib(10),
        shared: false,
    });
    assert!(matches!(sim.prepare(&there), Err(PlatformError::Rejected { .. })));
    assert!(
        sim.person(PersonChange::Node {
            node: 0,
            online: false
        })
        .is_err(),
        "the last one"
    );
    sim.person(PersonChange::Node {
        node: 1,
        online: true,
    })
    .unwrap();
    assert!(sim.prepare(&there).is_ok());
}

#[test]
fn programs_start_end_fork_and_change_phase_on_time() {
    let mut late = program("late");
    late.start_s = 10.0;
    late.end_s = Some(30.0);
    late.phases = vec![homeostat_simulator::behaviour::Phase {
        after_s: 10.0,
        profile: Some("light".into()),
        load: Some(0.5),
    }];
    let mut spec = spec(vec![program("db"), late]);
    spec.events = vec![TimedChange {
        at_s: 5.0,
        change: PersonChange::Fork {
            program: "db".into(),
            processes: 2,
        },
    }];
    let mut sim = SimPlatform::new(World::new(spec).unwrap());
    let names = |s: &mut SimPlatform| {
        let found = s
            .sample(&SampleRequest {
                scan: true,
                detail: vec![],
            })
            .unwrap()
            .workloads
            .unwrap();
        found
            .iter()
            .map(|w| format!("{} {}", w.id, w.processes.len()))
            .collect::<Vec<_>>()
    };
    assert_eq!(names(&mut sim), ["db 1"]);
    sim.advance_to(seconds(15.0));
    assert_eq!(names(&mut sim), ["db 3", "late 1"]);
    let (cpus, slow) = sim.with_world(|w| (w.pace("late").cpus, w.pace("late").work_per_s));
    sim.advance_to(seconds(25.0));
    let (halved, fast) = sim.with_world(|w| (w.pace("late").cpus, w.pace("late").work_per_s));
    assert!(
        halved < cpus * 0.8 && fast > slow * 0.5,
        "{cpus} {halved} {slow} {fast}"
    );
    let free = sim.with_world(|w| w.nodes());
    sim.advance_to(seconds(31.0));
    assert_eq!(names(&mut sim), ["db 3"]);
    let freed = sim.with_world(|w| w.nodes()).iter().map(|n| n.1.0).sum::<u64>()
        - free.iter().map(|n| n.1.0).sum::<u64>();
    assert_eq!(Bytes(freed), Bytes::from_mib(800));
}

#[test]
fn impossible_worlds_are_refused_with_a_reason() {
    let text = |change: &dyn Fn(&mut WorldSpec)| {
        let mut s = spec(vec![program("db")]);
        change(&mut s);
        World::new(s).unwrap_err().to_string()
    };
    assert!(text(&|s| s.programs[0].profile = "unheard of".into()).contains("unheard of"));
    assert!(text(&|s| s.programs[0].private_mib = 100_000).contains("does not fit"));
    assert!(text(&|s| s.programs.push(program("db"))).contains("two workloads"));
    assert!(text(&|s| s.programs[0].choice.cpus = Some(vec![77])).contains("CPU 77"));
    assert!(text(&|s| s.layout.chips.clear()).contains("chip"));
    assert!(text(&|s| s.surroundings.large_page_switch = "maybe".into()).contains("maybe"));
    let event = TimedChange {
        at_s: 1.0,
        change: PersonChange::Stop {
            program: "nobody".into(),
        },
    };
    assert!(text(&|s| s.events.push(event.clone())).contains("nobody"));
}

#[test]
fn ten_thousand_workloads_can_be_looked_at() {
    let many = ProgramSpec {
        instances: 2000,
        threads: 1,
        private_mib: 1,
        shared_mib: 0,
        load: Load::Open {
            per_s: Some(0.1),
            busy: None,
        },
        ..program("tiny")
    };
    let mut platform = platform(vec![ProgramSpec {
        profile: "light".into(),
        ..many
    }]);
    platform.advance_to(seconds(1.0));
    let snapshot = platform
        .sample(&SampleRequest {
            scan: true,
            detail: vec![],
        })
        .unwrap();
    assert_eq!(snapshot.workloads.unwrap().len(), 2000);
}

#[derive(Clone, Debug)]
enum Step {
    Person(PersonChange),
    Act(usize, bool, u8),
    Pass(f64),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let name = || "db".to_owned();
    let person = prop_oneof![
        prop::collection::vec(0u32..8, 1..8).prop_map(move |c| PersonChange::BindThreads {
            program: name(),
            cpus: Some(c)
        }),
        Just(PersonChange::BindThreads {
            program: name(),
            cpus: None
        }),
        (0u32..2, 0.0..1.0f64).prop_map(move |(node, share)| PersonChange::MovePages {
            program: name(),
            node,
            share
        }),
        (0.0..1.0f64).prop_map(move |share| PersonChange::LargePages {
            program: name(),
            share
        }),
        Just(PersonChange::Restart { program: name() }),
        Just(PersonChange::Stop { program: name() }),
        Just(PersonChange::Start { program: name() }),
        (1u32..3).prop_map(move |processes| PersonChange::Fork {
            program: name(),
            processes
        }),
        (0u32..2, any::<bool>()).prop_map(|(node, online)| PersonChange::Node { node, online }),
        (prop::collection::vec(0u32..8, 1..6), any::<bool>())
            .prop_map(|(cpus, online)| PersonChange::Cpus { cpus, online }),
        any::<bool>().prop_map(|on| PersonChange::Prefetch { cpus: None, on }),
    ];
    let step = prop_oneof![
        person.prop_map(Step::Person),
        (0usize..4, any::<bool>(), 1u8..40).prop_map(|(e, on, n)| Step::Act(e, on, n)),
        (0.01..20.0f64).prop_map(Step::Pass),
    ];
    prop::collection::vec(step, 1..40)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn memory_is_conserved_and_time_passes_whatever_happens(steps in steps()) {
        let mut sim = platform(vec![program("db"), program("app")]);
        let total: u64 = sim.with_world(|w| w.nodes()).iter().map(|n| n.0.0).sum();
        let mut records: Vec<Option<UndoRecord>> = vec![None; 4];
        let mut work = 0.0;
        for step in steps {
            match step {
                // What is impossible just now is refused, and that is all.
                Step::Person(change) => drop(sim.person(change)),
                Step::Pass(s) => {
                    let until = sim.now() + seconds(s);
                    sim.advance_to(until);
                }
                Step::Act(e, on, slices) => {
                    if records[e].is_none() && sim.settings().pages.contains_key("db") {
                        let a = action(&mut sim, EFFECTORS[e], "db");
                        records[e] = sim.prepare(&a).ok();
                    }
                    if let Some(record) = &records[e] {
                        for _ in 0..slices {
                            let way = if on { Direction::Apply } else { Direction::Undo };
                            if sim.advance(record, way).map_or(true, |p| p.done) {
                                break;
                            }
                        }
                    }
                }
            }
            let settings = sim.settings();
            let used: u64 = settings.pages.values().flat_map(|n| n.values()).sum::<u64>() * 4096;
            let free: u64 = sim.with_world(|w| w.nodes()).iter().map(|n| n.1.0).sum();
            prop_assert_eq!(used + free, total, "pages and free memory add up");
            for name in sim.with_world(|w| w.workloads()) {
                let resident = sim.with_world(|w| w.resident(&name));
                let pages: u64 = settings.pages[&name].values().sum();
                prop_assert_eq!(resident.0, pages * 4096);
                let pace = sim.with_world(|w| w.pace(&name));
                prop_assert!(pace.work_per_s.is_finite() && pace.work_per_s >= 0.0, "{:?}", pace);
            }
            let now = sim.totals("db").work;
            prop_assert!(now >= work && now.is_finite());
            work = now;
        }
        // Whatever the order: what is undone by us leaves nothing of ours behind.
        for record in records.iter().flatten() {
            let undone = drive(&mut sim, record, Direction::Undo);
            prop_assert!(matches!(undone, Ok(_) | Err(PlatformError::Busy { .. })), "{:?}", undone);
        }
    }
}

#[test]
fn the_first_published_row_comes_out_of_the_world() {
    // P1: an OLTP database of a shared partition uses 12.7 cores fanned out (cores busy .90 and .63) and
    // 9.7 packed, each within 5 %.
    let busy = 10.0 * 0.90 + 6.0 * 0.63;
    let oltp = ProgramSpec {
        name: "db".into(),
        profile: "oltp".into(),
        threads: 64,
        shared_mib: 1024,
        memory_on: vec![0.607, 0.393],
        load: Load::Open {
            per_s: None,
            busy: Some(busy),
        },
        noise: NoiseSpec::QUIET,
        ..ProgramSpec::default()
    };
    let layout = Layout::named("power7-10+6").unwrap();
    let spec = WorldSpec {
        programs: vec![oltp],
        ..WorldSpec::new(layout, SchedulerKind::FanOut)
    };
    let mut world = World::new(spec).unwrap();
    world.advance_to(seconds(100.0));
    let before = world.totals("db");
    assert!(
        (before.core_s / 100.0 / 12.78 - 1.0).abs() < 0.02,
        "{}",
        before.core_s / 100.0
    );
    world
        .person(PersonChange::BindThreads {
            program: "db".into(),
            cpus: Some((0..40).collect()),
        })
        .unwrap();
    world.advance_to(seconds(200.0));
    let settled = world.totals("db");
    world.advance_to(seconds(300.0));
    let after = world.totals("db");
    let cores = (after.core_s - settled.core_s) / 100.0;
    assert!((cores / 9.7 - 1.0).abs() < 0.05, "{cores} cores");
    assert!(
        ((after.work - settled.work) / before.work - 1.0).abs() < 0.001,
        "throughput unchanged"
    );
}

#[test]
fn binding_a_quiet_server_to_one_core_costs_what_was_published() {
    // P7: four application servers on 16 cores that are 17 % busy; bound to one core each they do 5 % less.
    let server = |number: u32| ProgramSpec {
        name: format!("was-{number}"),
        profile: "daytrader-17".into(),
        threads: 50,
        private_mib: 1024,
        threads_on: if number < 2 {
            vec![1.0, 0.0]
        } else {
            vec![0.0, 1.0]
        },
        load: Load::Closed {
            customers: Some(19.163),
            think_ms: None,
            cpu_share: None,
        },
        noise: NoiseSpec::QUIET,
        ..ProgramSpec::default()
    };
    let mut world = World::new(WorldSpec {
        programs: (0..4).map(server).collect(),
        ..WorldSpec::new(Layout::named("power750-16").unwrap(), SchedulerKind::FanOut)
    })
    .unwrap();
    let rate = |w: &mut World| {
        (0..4)
            .map(|i| w.pace(&format!("was-{i}")).work_per_s)
            .sum::<f64>()
    };
    // By the accounting of the published system, in which one thread uses .625 of a core.
    let busy = world.cpu_use().iter().step_by(4).sum::<f64>() / 16.0;
    assert!((busy - 0.17).abs() < 0.002, "{busy} busy");
    let free = rate(&mut world);
    let bind = |world: &mut World, cores: u32| {
        for i in 0..4_u32 {
            let first = (i % 2) * 4 * cores + (i / 2) * 32;
            world
                .person(PersonChange::BindThreads {
                    program: format!("was-{i}"),
                    cpus: Some((first..first + 4 * cores).collect()),
                })
                .unwrap();
        }
        world.advance_to(Nanoseconds(world.now().0 + 60_000_000_000));
    };
    bind(&mut world, 1);
    let bound = rate(&mut world);
    assert!(
        ((bound / free - 1.0) * 100.0 + 5.0).abs() < 0.3,
        "{:+.2} %",
        (bound / free - 1.0) * 100.0
    );
    // With two cores each they hardly meet.
    bind(&mut world, 2);
    let roomy = rate(&mut world);
    assert!(roomy > 0.98 * free && roomy < free, "{roomy} of {free}");
}

#[test]
fn the_chase_of_the_redbook_comes_out_of_the_world() {
    // P14: 8.90 transactions a second spread with 40 % local, 18.7 packed with 70 % local, 24.8 packed and local.
    let chase = |name: &str, threads: [f64; 2], memory: [f64; 2]| ProgramSpec {
        name: name.into(),
        profile: "latency".into(),
        threads: 30,
        private_mib: 16 * 1024,
        memory_on: memory.to_vec(),
        threads_on: threads.to_vec(),
        noise: NoiseSpec::QUIET,
        ..ProgramSpec::default()
    };
    let layout = Layout::named("redbook-16").unwrap();
    let programs = vec![
        chase("a", [0.25, 0.75], [0.7, 0.3]),
        chase("b", [0.75, 0.25], [0.3, 0.7]),
    ];
    let mut world = World::new(WorldSpec {
        programs,
        ..WorldSpec::new(layout, SchedulerKind::FanOut)
    })
    .unwrap();
    let rate = |w: &mut World| w.pace("a").work_per_s + w.pace("b").work_per_s;
    let spread = rate(&mut world);
    world
        .person(PersonChange::BindThreads {
            program: "a".into(),
            cpus: Some((0..32).collect()),
        })
        .unwrap();
    world
        .person(PersonChange::BindThreads {
            program: "b".into(),
            cpus: Some((32..64).collect()),
        })
        .unwrap();
    world.advance_to(seconds(60.0));
    let packed = rate(&mut world);
    for (program, node) in [("a", 0), ("b", 1)] {
        world
            .person(PersonChange::MovePages {
                program: program.into(),
                node,
                share: 1.0,
            })
            .unwrap();
    }
    let local = rate(&mut world);
    assert!((packed / 18.70 - 1.0).abs() < 0.01, "{packed}");
    assert!((local / 24.80 - 1.0).abs() < 0.01, "{local}");
    assert!((spread / 8.90 - 1.0).abs() < 0.01, "{spread}");
}
