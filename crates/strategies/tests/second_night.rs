//! The backup of every night: what a program loses to it in the first night, and in those that follow, when the reader is
//! known. The mind and the strategy are the real ones, looked at as often as the mind asks for; the machine is a small plant
//! in virtual time.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use homeostat_engine::{
    Command, Engine, Event, Fault, FaultKind, Memory, OperatorRequest, Policy, ProvenReader,
};
use homeostat_model::action::Target;
use homeostat_model::{
    ActionId, Bytes, Capability, CapabilityState, Direction, ExperimentRecord, Fingerprint, Machine,
    MachineSample, MeterCandidate, MeterClass, MeterReading, Nanoseconds, OperatorChoice, Paging, ProcessId,
    Progress, Reads, Snapshot, Verdict, Workload, WorkloadId, WorkloadKind, WorkloadSample,
};
use homeostat_statistics::discovery::Rule;
use std::collections::{BTreeMap, BTreeSet};

const MIB: f64 = 1024.0 * 1024.0;
/// What the reader reads a second, and what nobody uses, in MiB: it lasts for 20 s. A quarter of it is pages of files.
const READ_MIB: f64 = 800.0;
const UNUSED_MIB: f64 = 16_000.0;
const FREE_SHARE: f64 = 0.75;
/// What is left of the program's work without its pages, and the seconds that they take to come back.
const LEFT: f64 = 0.05;
const COMES_BACK_S: u64 = 5;
/// Work of the program per second.
const WORK: f64 = 1000.0;
/// How long the reader reads, and how long it does not.
const NIGHT_S: u64 = 900;
const DAY_S: u64 = 3600;

/// Counters of a workload at a time.
#[derive(Clone, Copy, Default)]
struct Counters {
    at: u64,
    work: f64,
    read_mib: f64,
    faults: u64,
}

struct Plant {
    engine: Engine,
    second: u64,
    /// The process of the reader, while it runs.
    reader: Option<i32>,
    /// What nobody uses but for the pages of the reader of this night: all of it at its beginning.
    unused_mib: f64,
    all_unused_mib: f64,
    /// Of it free. What is not free is pages of files that nobody uses, the reader's own among them: the kernel does not
    /// tell them apart, so that the two together stay what they were, however much it reads.
    free_mib: f64,
    /// Until when the program lacks pages.
    back_at: u64,
    program: Counters,
    tar: Counters,
    /// At the last sample of each, and at the last look at the machine.
    before: BTreeMap<&'static str, Counters>,
    looked: Counters,
    scanned: u64,
    short: Option<u64>,
    contains: BTreeMap<ActionId, bool>,
    /// The process of the reader that an action is about, and since when the one runs that reads now.
    whose: BTreeMap<ActionId, i32>,
    reads_since: u64,
    contained_at: Vec<u64>,
    open: BTreeSet<WorkloadId>,
    pending: Vec<Event>,
    accepted: Vec<ExperimentRecord>,
    trials: u32,
    lost_s: f64,
    faults: Option<Faults>,
}

/// What goes wrong on the machine, by chance, and what may be made without a trial for all that.
struct Faults {
    chance: u64,
    /// What takes its time: when it is done, and what.
    late: Vec<(u64, ActionId, Direction)>,
    /// The last trial that said something has accepted, and nobody has taken it back since.
    is_proven: bool,
    /// Whether it has to come to a trial first, and how often it was contained without one since the last.
    must_try: bool,
    recalls: u32,
    all_recalls: u32,
    /// Those that are being made.
    recalling: BTreeSet<ActionId>,
    /// Since when nobody reads.
    quiet_since: u64,
}

impl Faults {
    fn new(seed: u64) -> Self {
        Self {
            chance: seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1,
            late: vec![],
            is_proven: false,
            must_try: false,
            recalls: 0,
            all_recalls: 0,
            recalling: BTreeSet::new(),
            quiet_since: 0,
        }
    }

    fn below(&mut self, n: u64) -> u64 {
        self.chance = self
            .chance
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.chance >> 33) % n
    }
}

impl Plant {
    fn new(memory: Memory) -> Self {
        Self::with_unused(memory, UNUSED_MIB)
    }

    /// A machine on which nobody uses so much memory.
    fn with_unused(memory: Memory, unused_mib: f64) -> Self {
        Self {
            engine: engine(memory),
            second: 0,
            reader: None,
            unused_mib,
            all_unused_mib: unused_mib,
            free_mib: FREE_SHARE * unused_mib,
            back_at: 0,
            program: Counters::default(),
            tar: Counters::default(),
            before: BTreeMap::new(),
            looked: Counters::default(),
            scanned: 0,
            short: None,
            contains: BTreeMap::new(),
            whose: BTreeMap::new(),
            reads_since: 0,
            contained_at: vec![],
            open: BTreeSet::new(),
            pending: vec![],
            accepted: vec![],
            trials: 0,
            lost_s: 0.0,
            faults: None,
        }
    }

    /// Whether the reader that runs now is contained.
    fn is_contained(&self) -> bool {
        let is_its = |id: &ActionId| self.reader.is_some() && self.whose.get(id).copied() == self.reader;
        self.contains.iter().any(|(id, on)| *on && is_its(id))
    }

    /// Whether any containment is in force, of whomever.
    fn is_any_in_force(&self) -> bool {
        self.contains.values().any(|on| *on)
    }

    /// A second passes on the machine.
    fn pass(&mut self) {
        self.second += 1;
        if self.reader.is_some() {
            self.tar.read_mib += READ_MIB;
            if !self.is_contained() {
                self.unused_mib = (self.unused_mib - READ_MIB).max(0.0);
                self.free_mib = (self.free_mib - READ_MIB).max(0.0);
                if self.unused_mib == 0.0 {
                    self.back_at = self.second + COMES_BACK_S;
                }
            }
        }
        let lacks = self.second < self.back_at;
        self.program.work += if lacks { LEFT * WORK } else { WORK };
        if lacks {
            self.program.faults += 300;
            self.lost_s += 1.0 - LEFT;
        }
    }

    /// Looks at the machine if the mind wants it, as the runtime does where a scan is cheap.
    fn look(&mut self) {
        let plan = self.engine.sampling();
        let is_due = |at: u64, every: Nanoseconds| self.second >= at + every.0.div_ceil(1_000_000_000);
        let scan = is_due(self.scanned, plan.scan_every);
        let host = plan.host_every.is_some_and(|every| is_due(self.looked.at, every));
        if !scan && !host && plan.detail.is_empty() {
            return;
        }
        if scan {
            self.scanned = self.second;
        }
        let before = std::mem::replace(
            &mut self.looked,
            Counters {
                at: self.second,
                work: 0.0,
                read_mib: self.tar.read_mib,
                faults: self.program.faults,
            },
        );
        if self.looked.faults > before.faults {
            self.short = Some(self.second);
        }
        let sees_reads = plan.reads || self.short.is_some_and(|s| self.second < s + 60);
        let length = Nanoseconds::from_secs(self.second - before.at);
        let mut seen = vec!["program", "tar"];
        seen.retain(|name| *name == "program" || self.reader.is_some());
        seen.retain(|name| scan || plan.detail.iter().any(|id| id.as_str().starts_with(*name)));
        let snapshot = Snapshot {
            at: Nanoseconds::from_secs(self.second),
            unix_seconds: self.second,
            interval: length,
            machine: MachineSample {
                cpu_busy: length,
                memory_free: Bytes((self.free_mib * MIB) as u64),
                memory_file_inactive: Bytes(((self.all_unused_mib - self.free_mib) * MIB) as u64),
                paging: Paging {
                    read_in: Bytes(((self.looked.read_mib - before.read_mib) * MIB) as u64),
                    refaults_file: (self.looked.faults - before.faults) * 60,
                    ..Paging::default()
                },
                ..MachineSample::default()
            },
            workloads: scan.then(|| self.workloads()),
            samples: seen
                .into_iter()
                .map(|name| self.sample(name, sees_reads))
                .collect(),
            own_cpu: Nanoseconds::ZERO,
            own_resident: Bytes::ZERO,
        };
        self.step(Event::Sampled(Box::new(snapshot)));
        for _ in 0..64 {
            if self.pending.is_empty() {
                break;
            }
            let event = self.pending.remove(0);
            self.step(event);
        }
    }

    fn workloads(&self) -> Vec<Workload> {
        let workload = |name: &str, pid: i32, tuned: Vec<String>| Workload {
            id: id_of(name, pid),
            kind: WorkloadKind::ProcessGroup,
            fingerprint: Fingerprint::new(name),
            program: name.into(),
            executable: name.into(),
            processes: vec![ProcessId { pid, start_ticks: 1 }],
            choice: OperatorChoice {
                tuned,
                ..OperatorChoice::default()
            },
        };
        // What the effector says of a containment whose reader has ended.
        let is_gone = |id: &&ActionId| self.reader.is_none() || self.whose.get(id).copied() != self.reader;
        let ended = self
            .contains
            .keys()
            .filter(is_gone)
            .filter_map(|id| self.whose.get(id));
        let tuned = ended
            .map(|pid| format!("memory_containment: {}: it has ended", id_of("tar", *pid)))
            .collect();
        let mut list = vec![workload("program", 100, tuned)];
        list.extend(self.reader.map(|pid| workload("tar", pid, vec![])));
        list
    }

    fn sample(&mut self, name: &'static str, sees_reads: bool) -> WorkloadSample {
        let is_reader = name == "tar";
        let now = Counters {
            at: self.second,
            ..if is_reader { self.tar } else { self.program }
        };
        let known = self.before.insert(name, now);
        let before = known.unwrap_or(now);
        let interval = Nanoseconds::from_secs(now.at - before.at);
        let id = id_of(name, self.reader.unwrap_or_default());
        let read = Bytes(((now.read_mib - before.read_mib) * MIB) as u64);
        let faults = now.faults - before.faults;
        // A program that waits uses next to no CPU time, and one that reads little.
        let cpus = if faults > 0 || is_reader { 0.02 } else { 0.9 };
        let wobble = 1.0 + 0.01 * ((self.second * 7919 % 13) as f64 / 6.0 - 1.0);
        let reading = MeterReading {
            meter: "progress".into(),
            work: (now.work - before.work) * wobble,
            interval,
            counted: 1.0,
        };
        WorkloadSample {
            interval,
            age: Nanoseconds::from_secs(if is_reader {
                self.second - self.reads_since
            } else {
                self.second + 100
            }),
            processes: 1,
            threads: 1,
            cpu: Nanoseconds::from_secs_f64(interval.as_secs_f64() * cpus),
            cpu_busiest: Nanoseconds::ZERO,
            runqueue_wait: Nanoseconds::ZERO,
            faults_minor: 0,
            faults_major: faults,
            churn: 0,
            resident: Bytes::from_mib(if is_reader { 4 } else { 1024 }),
            anonymous: Bytes::ZERO,
            shared: Bytes::ZERO,
            huge: None,
            meters: (self.open.contains(&id) && interval > Nanoseconds::ZERO)
                .then_some(reading)
                .into_iter()
                .collect(),
            // The first look at a process only begins its counts.
            reads: if sees_reads && is_reader && known.is_some() {
                Reads {
                    from_storage: read,
                    called: read,
                    calls: read.0 >> 18,
                    in_sequence: read,
                    ..Reads::default()
                }
            } else {
                Reads::default()
            },
            spans: None,
            executions: 0,
            id,
        }
    }

    fn step(&mut self, event: Event) {
        let now = Nanoseconds::from_secs(self.second);
        for command in self.engine.step(now, self.second, event) {
            match command {
                Command::FindMeters(id) => {
                    // The reader has none, as most have.
                    let found = (id.as_str() == "program").then(|| MeterCandidate {
                        id: "progress".into(),
                        class: MeterClass::Application,
                        unit: "operation".into(),
                        cost_per_count: Nanoseconds::ZERO,
                        refused: None,
                    });
                    let found = found.into_iter().collect();
                    self.pending.push(Event::MetersFound(id, Ok(found)));
                }
                Command::OpenMeter(id, meter) => {
                    self.open.insert(id.clone());
                    self.pending.push(Event::MeterOpened(id, meter, Ok(())));
                }
                Command::CloseMeter(id, _) => {
                    self.open.remove(&id);
                }
                Command::Apply(action) => {
                    let reader = match &action.target {
                        Target::Reader(reader) => Some(reader),
                        _ => None,
                    };
                    let is_tar = reader.is_some_and(|r| r.workload.as_str().starts_with("tar["));
                    assert!(is_tar, "another target: {action:?}");
                    let pids = reader.into_iter().flat_map(|r| &r.processes);
                    self.whose.extend(pids.map(|p| (action.id, p.pid)));
                    self.contained_at.push(self.second);
                    self.contains.insert(action.id, false);
                    self.note_recall(action.id);
                    self.carry_out(action.id, Direction::Apply);
                }
                Command::Switch(id, direction) => self.carry_out(id, direction),
                Command::Close(id) => {
                    assert_eq!(self.contains.remove(&id), Some(false), "closed when undone");
                }
                Command::RecordExperiment(r) => self.note_experiment(*r),
                _ => {}
            }
        }
    }

    fn note_experiment(&mut self, r: ExperimentRecord) {
        let is_accepted = r.verdict == Some(Verdict::Accepted);
        if let Some(f) = &mut self.faults {
            match r.verdict {
                None if r.blocks.is_empty() => (f.must_try, f.recalls) = (false, 0),
                None | Some(Verdict::Aborted) => {}
                Some(_) => f.is_proven = is_accepted,
            }
        }
        match r.verdict {
            Some(Verdict::Accepted) => self.accepted.push(r),
            None if r.blocks.is_empty() => self.trials += 1,
            _ => {}
        }
    }

    /// A containment that begins without a trial: on a verdict that holds, and at most four times.
    fn note_recall(&mut self, id: ActionId) {
        let is_recall = self.engine.view().experiments.is_empty();
        if let Some(f) = self.faults.as_mut().filter(|_| is_recall) {
            assert!(f.is_proven && !f.must_try && f.recalls < 4, "at {}", self.second);
            f.recalling.insert(id);
        }
    }

    /// What the machine makes of it: what was asked for, as a rule.
    fn carry_out(&mut self, id: ActionId, direction: Direction) {
        let is_gone = self.reader.is_none() || self.whose.get(&id).copied() != self.reader;
        if direction == Direction::Apply && is_gone {
            let fault = Fault {
                kind: FaultKind::Vanished,
                text: "the reader has ended".into(),
            };
            self.pending.push(Event::Settled(id, direction, Err(fault)));
            return;
        }
        if let Some(f) = &mut self.faults {
            f.late.retain(|(_, of, _)| *of != id);
            match f.below(60) {
                0 => {
                    let kinds = [
                        FaultKind::Vanished,
                        FaultKind::Busy,
                        FaultKind::Denied,
                        FaultKind::Conflict,
                    ];
                    let kind = kinds[f.below(4) as usize];
                    let text = "by chance".to_owned();
                    let failed = Event::Settled(id, direction, Err(Fault { kind, text }));
                    self.pending.push(failed);
                    return;
                }
                1..=4 => {
                    let done_at = self.second + 1 + f.below(40);
                    f.late.push((done_at, id, direction));
                    return;
                }
                _ => {}
            }
        }
        self.done(id, direction);
    }

    fn done(&mut self, id: ActionId, direction: Direction) {
        self.contains.insert(id, direction == Direction::Apply);
        if let Some(f) = &mut self.faults
            && f.recalling.remove(&id)
            && direction == Direction::Apply
        {
            f.recalls += 1;
            f.all_recalls += 1;
        }
        self.settled(id, direction);
    }

    fn settled(&mut self, id: ActionId, direction: Direction) {
        let progress = Progress {
            done: true,
            finished: 1,
            total: 1,
            verified: true,
            ..Progress::default()
        };
        self.pending.push(Event::Settled(id, direction, Ok(progress)));
    }

    fn run(&mut self, seconds: u64) {
        for _ in 0..seconds {
            self.pass();
            if self.goes_wrong() {
                self.step(Event::Unseen);
            } else {
                self.look();
            }
        }
    }

    /// What is due of what takes its time, and what else goes wrong: whether the machine cannot be looked at now.
    fn goes_wrong(&mut self) -> bool {
        let second = self.second;
        let Some(f) = &mut self.faults else { return false };
        let (due, later) = std::mem::take(&mut f.late)
            .into_iter()
            .partition::<Vec<_>, _>(|(at, ..)| *at <= second);
        f.late = later;
        if self.reader.is_some() {
            f.quiet_since = second;
        }
        // Undos that fail are tried again every ten seconds, later every minute.
        let is_quiet = second > f.quiet_since + 600;
        let (is_blind, is_undone, is_killed) = (f.below(20) == 0, f.below(9000) == 0, f.below(18_000) == 0);
        for (_, id, direction) in due {
            self.done(id, direction);
        }
        assert!(
            !(is_quiet && self.is_any_in_force()),
            "at {second}: {:?}",
            self.contains
        );
        if is_undone {
            let is_taken_back = !self.contains.is_empty();
            self.step(Event::Operator(OperatorRequest::UndoAll));
            if let Some(f) = self.faults.as_mut().filter(|_| is_taken_back) {
                f.is_proven = false;
            }
        }
        if is_killed {
            self.restart();
        }
        is_blind
    }

    /// kill -9 and a new daemon: what was in force is undone from the journal before its first look.
    fn restart(&mut self) {
        let last = self.accepted.last();
        let readers = last.filter(|_| self.faults.as_ref().is_none_or(|f| f.is_proven));
        let memory = Memory {
            readers: readers
                .map(|proven| known(proven, self.accepted.len() as u32))
                .into_iter()
                .collect(),
            ..Memory::default()
        };
        self.engine = engine(memory);
        self.contains.clear();
        self.open.clear();
        self.pending.clear();
        self.before.clear();
        if let Some(f) = &mut self.faults {
            f.late.clear();
            f.must_try = true;
        }
    }

    /// A reader starts, as another process each time.
    fn starts_to_read(&mut self) {
        self.before.remove("tar");
        self.reads_since = self.second;
        self.reader = Some(200 + self.second as i32);
    }

    /// The reader comes and ends; then a day passes.
    fn night(&mut self) -> Night {
        let (trials, lost, began) = (self.trials, self.lost_s, self.second);
        self.contained_at.clear();
        self.starts_to_read();
        self.run(NIGHT_S);
        // What it leaves behind nobody uses.
        self.reader = None;
        self.before.remove("tar");
        self.unused_mib = self.all_unused_mib;
        self.run(DAY_S);
        assert!(!self.is_any_in_force(), "nothing stays after the reader");
        Night {
            lost_s: self.lost_s - lost,
            contained_after: self.contained_at.first().map(|at| at - began),
            trials: self.trials - trials,
        }
    }
}

#[derive(Debug)]
struct Night {
    /// Work that the program lost, in seconds of its work.
    lost_s: f64,
    /// Seconds until the reader was contained first.
    contained_after: Option<u64>,
    trials: u32,
}

/// A reader is another workload each time.
fn id_of(name: &str, pid: i32) -> WorkloadId {
    match name {
        "tar" => WorkloadId::new(format!("{name}[{pid}]")),
        _ => WorkloadId::new(name),
    }
}

/// The mind with the one strategy that this is about.
fn engine(memory: Memory) -> Engine {
    let policy = Policy {
        seed: 11,
        placebo_every_s: 0.0,
        discovery: Rule::Fixed { alpha: 0.05 },
        ..Policy::default()
    };
    let strategies = homeostat_strategies::all();
    let file_cache = strategies.into_iter().filter(|s| s.id().as_str() == "file_cache");
    Engine::new(machine(), file_cache.collect(), policy, memory)
}

/// What the history tells of a trial that accepted, as the last of so many.
fn known(proven: &ExperimentRecord, trials: u32) -> ProvenReader {
    ProvenReader {
        program: proven.fingerprint.clone(),
        reader: proven.reader.clone().unwrap(),
        strategy: proven.strategy.clone(),
        effect: proven.effect.unwrap(),
        washout: proven.washout,
        trials,
    }
}

fn machine() -> Machine {
    let cpus = (0..2)
        .map(|id| homeostat_model::Cpu {
            id: homeostat_model::CpuId(id),
            core: id,
            package: 0,
            llc: homeostat_model::LlcId(0),
            node: homeostat_model::NodeId(0),
            set_aside: false,
        })
        .collect();
    let works = |id: &str| Capability {
        id: id.into(),
        state: CapabilityState::Available,
        detail: String::new(),
        cost_of_absence: String::new(),
        remedy: String::new(),
    };
    Machine {
        kernel: "test".into(),
        cpu_model: "test".into(),
        hypervisor: None,
        cpus,
        nodes: vec![],
        memory: Bytes::from_mib(24 * 1024),
        page_size: Bytes(4096),
        huge_page_size: Bytes(2 << 20),
        llc_size: Bytes::ZERO,
        boot_id: "boot".into(),
        capabilities: vec![works("memory.groups"), works("process.io")],
    }
}

#[test]
fn in_the_second_night_the_program_loses_nothing() {
    let mut plant = Plant::new(Memory::default());
    plant.run(DAY_S);
    let first = plant.night();
    assert_eq!((first.trials, plant.accepted.len()), (1, 1), "{first:?}");
    // What nobody uses lasts for 20 s; then it is pushed out, and in half of the blocks of the trial again.
    assert!(
        first.contained_after.unwrap() >= 20 && first.lost_s > 30.0,
        "{first:?}"
    );
    let nights: Vec<Night> = (0..3).map(|_| plant.night()).collect();
    println!("first {first:?}\nthen {nights:?}");
    for night in &nights[..2] {
        assert_eq!(night.trials, 0, "{night:?}");
        assert!(night.contained_after.unwrap() <= 8, "{night:?}");
        assert_eq!(night.lost_s, 0.0, "{night:?}");
    }
    // The third after that is left to come to a trial again, and the four that follow are not.
    assert_eq!(nights[2].trials, 1, "{nights:?}");
    assert!(nights[2].lost_s > 30.0, "{nights:?}");
    let later: Vec<u32> = (0..5).map(|_| plant.night().trials).collect();
    assert_eq!(later, [0, 0, 0, 0, 1]);
}

#[test]
fn what_the_reader_itself_left_behind_is_no_room_for_it() {
    // It lasts for 100 s: nothing is to be done at first.
    let mut plant = Plant::with_unused(Memory::default(), 100.0 * READ_MIB);
    plant.run(DAY_S);
    let first = plant.night();
    assert!(
        first.contained_after.unwrap() >= 100 && first.lost_s > 30.0,
        "{first:?}"
    );
    let second = plant.night();
    println!("first {first:?}\nthen {second:?}");
    // Contained when the rest lasts for less than a minute, although the kernel tells of as much unused memory as ever.
    let after = second.contained_after.unwrap();
    assert!((40..=55).contains(&after), "{second:?}");
    assert_eq!((second.trials, second.lost_s), (0, 0.0), "{second:?}");
}

#[test]
fn what_was_proven_is_known_after_a_restart() {
    let mut plant = Plant::new(Memory::default());
    plant.run(DAY_S);
    plant.night();
    let memory = Memory {
        readers: vec![known(&plant.accepted[0], 1)],
        ..Memory::default()
    };
    let mut plant = Plant::new(memory);
    plant.run(DAY_S);
    // How often it was recalled is not known any more, so it comes to a trial first; which is the second then.
    let trials: Vec<u32> = (0..6).map(|_| plant.night().trials).collect();
    assert_eq!(trials, [1, 0, 0, 0, 0, 1]);
}

#[test]
fn whatever_goes_wrong_it_is_recalled_on_a_verdict_that_holds_and_released_when_it_has_ended() {
    let (mut trials, mut recalls) = (0, 0);
    for seed in 0..20 {
        let mut plant = Plant::new(Memory::default());
        plant.faults = Some(Faults::new(seed));
        plant.run(600);
        for _ in 0..6 {
            plant.starts_to_read();
            // Some end before anything can be done about them.
            let length = plant.faults.as_mut().unwrap().below(NIGHT_S);
            plant.run(length);
            plant.reader = None;
            plant.before.remove("tar");
            plant.unused_mib = plant.all_unused_mib;
            plant.run(1800);
        }
        trials += plant.trials;
        recalls += plant.faults.as_ref().unwrap().all_recalls;
    }
    println!("120 nights: {trials} trials, {recalls} times contained without");
    // It is about what happens, so something must.
    assert!(trials >= 20 && recalls >= 10, "{trials} {recalls}");
}

#[test]
fn readers_that_are_over_before_they_are_tried_do_not_use_up_the_trials() {
    let mut plant = Plant::new(Memory::default());
    plant.run(DAY_S);
    plant.unused_mib = 0.0;
    // A shell that runs one after another, for an hour; what each leaves behind the next one takes.
    for _ in 0..360 {
        plant.starts_to_read();
        plant.run(10);
    }
    assert!((1..=3).contains(&plant.trials), "{}", plant.trials);
    println!("an hour of readers of 10 s each: {} trials", plant.trials);
    // One that stays is tried, if a little later.
    let trials = plant.trials;
    plant.contained_at.clear();
    plant.starts_to_read();
    let began = plant.second;
    plant.run(60);
    assert_eq!(plant.trials, trials + 1);
    let after = plant.contained_at.first().unwrap() - began;
    assert!(after <= 45, "contained after {after} s");
}

#[test]
fn a_reader_that_was_never_proven_is_not_looked_for() {
    let mut plant = Plant::new(Memory::default());
    plant.run(DAY_S);
    plant.starts_to_read();
    plant.run(10);
    let plan = plant.engine.sampling();
    assert!(!plan.reads && !plan.in_a_hurry);
}
