//! The profile `autotune-classic` from the sensors to the files: the rules, the mind, the journal and the effector for
//! settings on a tree of files that stands for `/proc/sys`, in virtual time.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "helpers of tests"
)]

use homeostat_effectors::Registry;
use homeostat_engine::{Mode, OperatorRequest, Policy, Profile};
use homeostat_kernel::Root;
use homeostat_model::{
    Action, Bytes, Capability, CapabilityId, CapabilityState, Cpu, CpuId, Direction, LlcId, Locality,
    Machine, MachineSample, MemoryMap, MeterCandidate, MeterId, Nanoseconds, NodeId, Paging, Progress,
    Snapshot, UndoRecord, WorkloadId,
};
use homeostat_platform::{Clock, Effectors, PlatformError, SampleRequest, Sensors};
use homeostat_runtime::{Runtime, restore};
use homeostat_sensors::memory_settings::{FILES, MemorySettings};
use homeostat_store::{HistoryOptions, Journal, JournalOptions, ResilientHistory};
use std::cell::{Cell, RefCell};
use std::path::Path;
use std::rc::Rc;

const BOOT: &str = "boot-of-settings";
const FOUND: [u64; 3] = [60, 100, 10];
const MEMORY: Bytes = Bytes::from_mib(4096);
const SECOND: Nanoseconds = Nanoseconds::from_secs(1);

/// Virtual time, and CPU time of the loop.
#[derive(Clone, Default)]
struct Time(Rc<Cell<u64>>, Rc<Cell<Nanoseconds>>);

impl Clock for Time {
    fn now(&self) -> Nanoseconds {
        Nanoseconds(self.0.get())
    }
    fn unix_seconds(&self) -> u64 {
        1_700_000_000 + self.0.get() / SECOND.0
    }
    fn cpu_time(&self) -> Nanoseconds {
        self.1.get()
    }
    fn sleep(&self, length: Nanoseconds) {
        self.0.set(self.0.get() + length.0);
    }
}

/// A machine that pages as it is told, with the real effectors and the real sensor of settings on a tree of files.
struct Host {
    time: Time,
    effectors: Registry,
    settings: MemorySettings,
    /// Pages a second to swap and back.
    pages: Rc<Cell<u64>>,
    before: Option<Nanoseconds>,
    known: Vec<homeostat_model::MemorySetting>,
    /// What a scan costs, and when there was one.
    scan_cost: Nanoseconds,
    scans: Rc<RefCell<Vec<Nanoseconds>>>,
}

impl Sensors for Host {
    fn machine(&mut self) -> Result<Machine, PlatformError> {
        Ok(Machine {
            kernel: "test".into(),
            cpu_model: "test".into(),
            hypervisor: None,
            cpus: vec![Cpu {
                id: CpuId(0),
                core: 0,
                package: 0,
                llc: LlcId(0),
                node: NodeId(0),
                set_aside: false,
            }],
            nodes: vec![],
            memory: MEMORY,
            page_size: Bytes(4096),
            huge_page_size: Bytes::from_mib(2),
            llc_size: Bytes::ZERO,
            boot_id: BOOT.into(),
            capabilities: vec![Capability {
                id: CapabilityId::new("memory.settings"),
                state: CapabilityState::Available,
                detail: String::new(),
                cost_of_absence: String::new(),
                remedy: String::new(),
            }],
        })
    }

    fn sample(&mut self, request: &SampleRequest) -> Result<Snapshot, PlatformError> {
        let at = self.time.now();
        let interval = self.before.map_or(Nanoseconds::ZERO, |before| at - before);
        self.before = Some(at);
        if request.scan {
            self.scans.borrow_mut().push(at);
            self.time.1.set(self.time.1.get() + self.scan_cost);
            let effectors = &self.effectors;
            self.known = self.settings.look(at, |file| effectors.holder(file));
            let _ = self.effectors.review(&std::collections::BTreeMap::new());
        }
        let paged = (self.pages.get() as f64 * interval.as_secs_f64()) as u64;
        Ok(Snapshot {
            at,
            unix_seconds: self.time.unix_seconds(),
            interval,
            machine: MachineSample {
                memory_free: Bytes::from_mib(64),
                memory_available: Bytes::from_mib(1024),
                memory_file: Bytes::from_mib(2048),
                paging: Paging {
                    swapped_in: paged,
                    swapped_out: paged,
                    ..Paging::default()
                },
                memory_settings: self.known.clone(),
                ..MachineSample::default()
            },
            workloads: request.scan.then(Vec::new),
            samples: vec![],
            own_cpu: Nanoseconds::ZERO,
            own_resident: Bytes::ZERO,
            canary: None,
        })
    }
    fn inspect_memory(&mut self, _: &WorkloadId) -> Result<MemoryMap, PlatformError> {
        unreachable!("there are no workloads")
    }
    fn inspect_locality(&mut self, _: &WorkloadId) -> Result<Locality, PlatformError> {
        unreachable!("there are no workloads")
    }
    fn find_meters(&mut self, _: &WorkloadId) -> Result<Vec<MeterCandidate>, PlatformError> {
        unreachable!("there are no workloads")
    }
    fn open_meter(&mut self, _: &WorkloadId, _: &MeterId) -> Result<(), PlatformError> {
        unreachable!("there are no workloads")
    }
    fn close_meter(&mut self, _: &WorkloadId, _: &MeterId) {}
}

impl Effectors for Host {
    fn prepare(&mut self, action: &Action) -> Result<UndoRecord, PlatformError> {
        self.effectors.prepare(action)
    }
    fn advance(&mut self, record: &UndoRecord, direction: Direction) -> Result<Progress, PlatformError> {
        self.effectors.advance(record, direction)
    }
    fn forget(&mut self, record: &UndoRecord) {
        self.effectors.forget(record);
    }
    fn adopt(&mut self, record: &UndoRecord) {
        self.effectors.adopt(record);
    }
}

/// The tree, and a loop at work on it.
struct World {
    tree: tempfile::TempDir,
    time: Time,
    pages: Rc<Cell<u64>>,
    runtime: Option<Runtime<Host, Time>>,
    stories: Vec<String>,
    scan_cost: Nanoseconds,
    scans: Rc<RefCell<Vec<Nanoseconds>>>,
}

fn policy(profile: Profile) -> Policy {
    Policy {
        profile,
        seed: 1,
        ..Policy::default()
    }
}

impl World {
    fn new(profile: Profile) -> Self {
        Self::with_scans_that_cost(Nanoseconds::ZERO, profile)
    }

    fn with_scans_that_cost(scan_cost: Nanoseconds, profile: Profile) -> Self {
        let tree = tempfile::tempdir().unwrap();
        let write = |file: &str, text: &str| {
            let path = tree.path().join("root").join(file.trim_start_matches('/'));
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        write("/proc/sys/kernel/random/boot_id", BOOT);
        for (file, value) in FILES.iter().zip(FOUND) {
            write(file, &format!("{value}\n"));
        }
        let mut world = Self {
            tree,
            time: Time::default(),
            pages: Rc::default(),
            runtime: None,
            stories: vec![],
            scan_cost,
            scans: Rc::default(),
        };
        world.start(profile);
        world
    }

    fn root(&self) -> Root {
        Root::new(self.tree.path().join("root"))
    }

    fn journal(&self) -> Journal {
        Journal::open(&self.tree.path().join("state"), JournalOptions::default())
            .unwrap()
            .0
    }

    fn start(&mut self, profile: Profile) {
        let host = Host {
            time: self.time.clone(),
            effectors: Registry::new(&self.root()),
            settings: MemorySettings::new(self.root()),
            pages: self.pages.clone(),
            before: None,
            known: vec![],
            scan_cost: self.scan_cost,
            scans: self.scans.clone(),
        };
        let history = ResilientHistory::open(
            &self.tree.path().join("state/history.db"),
            HistoryOptions::default(),
            0,
        );
        let (runtime, _) = Runtime::start(
            host,
            self.time.clone(),
            self.journal(),
            history,
            homeostat_strategies::all(),
            policy(profile),
        )
        .unwrap();
        self.runtime = Some(runtime);
    }

    fn path(&self, file: &str) -> std::path::PathBuf {
        self.root().path(file)
    }

    fn values(&self) -> [u64; 3] {
        FILES.map(|file| {
            std::fs::read_to_string(self.path(file))
                .unwrap()
                .trim()
                .parse()
                .unwrap()
        })
    }

    /// One turn of the loop; whether it has ended.
    fn turn(&mut self) -> bool {
        let runtime = self.runtime.as_mut().unwrap();
        let turn = runtime.turn();
        self.stories.extend(turn.stories.into_iter().map(|s| s.text));
        self.time.0.set(turn.wake_at.0.max(self.time.0.get()));
        turn.finished
    }

    fn run(&mut self, seconds: u64) {
        let end = self.time.now() + Nanoseconds::from_secs(seconds);
        while self.time.now() < end {
            self.turn();
        }
    }

    fn has_said(&self, words: &str) -> bool {
        self.stories.iter().any(|s| s.contains(words))
    }
}

#[test]
fn paging_moves_the_settings_and_quiet_gives_them_back() {
    let mut world = World::new(Profile::AutotuneClassic);
    world.run(60);
    assert_eq!(world.values(), FOUND, "nothing pages");
    world.pages.set(2000);
    world.run(60);
    let [swappiness, pressure, scale] = world.values();
    assert!(
        swappiness <= 10 && pressure == 200 && scale == 50,
        "{:?}",
        world.values()
    );
    assert!(world.has_said("autotune: 2000 pages a second come from swap"));
    let view = world.runtime.as_ref().unwrap().view();
    assert!(
        view.in_force.len() == 3
            && view
                .in_force
                .iter()
                .all(|c| c.guard.contains("controller autotune")),
        "{:?}",
        view.in_force
    );
    world.pages.set(0);
    world.run(50);
    assert!(world.values()[0] <= 10, "a minute of quiet is not over");
    world.run(900);
    assert_eq!(world.values(), FOUND);
    assert!(world.runtime.as_ref().unwrap().view().in_force.is_empty());
    world.runtime = None;
    assert_eq!(world.journal().owed().count(), 0);
}

#[test]
fn dear_scans_are_spread_out_but_for_those_at_the_start() {
    let mut world = World::with_scans_that_cost(Nanoseconds::from_millis(40), Profile::Homeostat);
    world.run(200);
    let scans = world.scans.borrow();
    let apart: Vec<u64> = scans.windows(2).map(|w| (w[1] - w[0]).0 / SECOND.0).collect();
    // The policy's own interval is ten seconds; 40 ms are a thousandth of 40 s.
    assert_eq!(apart[..5], [10, 10, 10, 40, 40]);
}

#[test]
fn in_other_profiles_nothing_is_moved() {
    for profile in [Profile::Homeostat, Profile::AsoClassic] {
        let mut world = World::new(profile);
        world.pages.set(2000);
        world.run(60);
        assert_eq!(world.values(), FOUND);
    }
}

#[test]
fn a_person_wins_at_once_and_for_good() {
    let mut world = World::new(Profile::AutotuneClassic);
    world.pages.set(2000);
    world.run(30);
    assert!(world.values()[0] < 60);
    // As the daemon does when the kernel tells it of the write.
    std::fs::write(world.path(FILES[0]), "33\n").unwrap();
    let gone = world
        .runtime
        .as_mut()
        .unwrap()
        .setting_is_others(FILES[0], "vm.swappiness was changed to 33 by sh");
    assert_eq!(gone.len(), 1);
    world.turn();
    assert!(world.has_said("is left alone"), "{:?}", world.stories);
    world.run(600);
    assert_eq!(world.values()[0], 33);
    assert_eq!(world.values()[1], 200, "the others go on");
    world.pages.set(0);
    world.run(900);
    assert_eq!(world.values(), [33, 100, 10]);
}

#[test]
fn a_person_who_is_noticed_by_a_look_only_wins_as_well() {
    let mut world = World::new(Profile::AutotuneClassic);
    world.pages.set(2000);
    world.run(30);
    std::fs::write(world.path(FILES[0]), "33\n").unwrap();
    world.run(600);
    assert_eq!(world.values()[0], 33);
    world.pages.set(0);
    world.run(900);
    assert_eq!(world.values(), [33, 100, 10]);
}

#[test]
fn what_a_person_undoes_rests_and_what_stops_puts_all_back() {
    let mut world = World::new(Profile::AutotuneClassic);
    world.pages.set(2000);
    world.run(30);
    world.runtime.as_mut().unwrap().operator(OperatorRequest::UndoAll);
    world.run(60);
    assert_eq!(world.values(), FOUND, "undone, and not made again at once");
    world.run(600);
    assert!(world.values()[0] < 60, "later it is");
    // Also with `keep`: what a controller holds is right only while it is there.
    world
        .runtime
        .as_mut()
        .unwrap()
        .operator(OperatorRequest::Stop { keep: true });
    for _ in 0..100 {
        if world.turn() {
            break;
        }
    }
    assert_eq!(world.values(), FOUND);
    world.runtime = None;
    assert_eq!(world.journal().owed().count(), 0);
}

/// As the switch does: what a controller holds goes at once, and it moves nothing until it may act again.
#[test]
fn advice_only_gives_all_back_and_moves_nothing() {
    let mut world = World::new(Profile::AutotuneClassic);
    world.pages.set(2000);
    world.run(30);
    assert!(world.values()[0] < 60);
    let configure = |world: &mut World, mode: Mode| {
        let policy = Policy {
            mode,
            ..policy(Profile::AutotuneClassic)
        };
        let request = OperatorRequest::Configure(Box::new(policy));
        world.runtime.as_mut().unwrap().operator(request);
    };
    configure(&mut world, Mode::AdviseOnly);
    for _ in 0..20 {
        world.run(60);
        assert_eq!(world.values(), FOUND);
    }
    configure(&mut world, Mode::Act);
    world.run(60);
    assert!(world.values()[0] < 60, "it goes on at once: nobody refused it");
}

#[test]
fn another_profile_while_it_runs_gives_all_back() {
    let mut world = World::new(Profile::AutotuneClassic);
    world.pages.set(2000);
    world.run(30);
    assert!(world.values()[0] < 60);
    let other = Box::new(policy(Profile::Homeostat));
    world
        .runtime
        .as_mut()
        .unwrap()
        .operator(OperatorRequest::Configure(other));
    world.run(60);
    assert_eq!(world.values(), FOUND);
    let again = Box::new(policy(Profile::AutotuneClassic));
    world
        .runtime
        .as_mut()
        .unwrap()
        .operator(OperatorRequest::Configure(again));
    world.run(60);
    assert!(world.values()[0] < 60);
}

/// The loop is dropped after any number of turns, as kill -9 drops it: nothing of it runs any more, and only the disk
/// knows. A restore by a fresh process, and a fresh daemon, both put back what was found.
#[test]
fn killed_after_any_turn_the_settings_are_as_found() {
    let mut left_moved = 0;
    for turns in (1..121).step_by(5) {
        let mut world = World::new(Profile::AutotuneClassic);
        world.pages.set(2000);
        for _ in 0..turns {
            world.turn();
        }
        world.runtime = None;
        left_moved += usize::from(world.values() != FOUND);
        if turns % 2 == 0 {
            let mut effectors = Registry::new(&world.root());
            let report = restore(&mut world.journal(), &mut effectors, &world.time, BOOT, false);
            assert!(report.complete(), "{turns}: {report:?}");
        } else {
            world.pages.set(0);
            world.start(Profile::AutotuneClassic);
        }
        assert_eq!(world.values(), FOUND, "after {turns} turns");
        drop(world.runtime.take());
        assert_eq!(world.journal().owed().count(), 0, "after {turns} turns");
    }
    assert!(left_moved >= 6, "only {left_moved} crashes left anything to undo");
}

/// A person's value that was written while nothing of homeostat ran stays.
#[test]
fn a_value_of_a_person_survives_the_restore_after_a_crash() {
    let mut world = World::new(Profile::AutotuneClassic);
    world.pages.set(2000);
    world.run(30);
    world.runtime = None;
    std::fs::write(world.path(FILES[0]), "42\n").unwrap();
    let mut effectors = Registry::new(&world.root());
    let report = restore(&mut world.journal(), &mut effectors, &world.time, BOOT, false);
    assert!(report.complete(), "{report:?}");
    assert_eq!(world.values(), [42, 100, 10]);
}

/// The tree is what it was made from; nothing else is written below it.
#[test]
fn only_the_three_files_are_written() {
    let mut world = World::new(Profile::AutotuneClassic);
    let list = |path: &Path| {
        let mut found = vec![];
        let mut waiting = vec![path.to_owned()];
        while let Some(directory) = waiting.pop() {
            for entry in std::fs::read_dir(directory).unwrap() {
                let path = entry.unwrap().path();
                if path.is_dir() {
                    waiting.push(path);
                } else {
                    found.push(path);
                }
            }
        }
        found.sort();
        found
    };
    let root = world.tree.path().join("root");
    let before = list(&root);
    world.pages.set(2000);
    world.run(60);
    assert_eq!(list(&root), before);
}
