//! A small plant in virtual time: a program that works on pages of files, and a reader that takes them. The mind and the
//! strategy are the real ones, looked at as often as the mind asks for.
#![allow(dead_code, reason = "each test binary uses its own part")]

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
use homeostat_statistics::simulation::Random;
use std::collections::{BTreeMap, BTreeSet};

const MIB: f64 = 1024.0 * 1024.0;
/// What the reader of every night reads a second, and what nobody uses, in MiB: it lasts for 20 s.
pub(crate) const READ_MIB: f64 = 800.0;
pub(crate) const UNUSED_MIB: f64 = 16_000.0;
/// Share of what nobody uses that is free; the rest is pages of files.
const FREE_SHARE: f64 = 0.75;
/// Work of the program per second, and the CPUs that it uses then.
const WORK: f64 = 1000.0;
const WORKING_CPUS: f64 = 0.9;
/// CPUs that who waits for storage uses, and the reader.
const WAITING_CPUS: f64 = 0.02;

/// What the machine and the two programs on it are like.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Conditions {
    /// What the reader reads a second, and what nobody uses, in MiB.
    pub(crate) read_mib: f64,
    pub(crate) unused_mib: f64,
    /// What is left of the program's work without its pages, the CPUs that it uses then, and the seconds that the pages take
    /// to come back.
    pub(crate) left: f64,
    pub(crate) cpus_left: f64,
    pub(crate) comes_back_s: u64,
    /// Share of its work that it loses while a reader that reads is contained.
    pub(crate) hurt: f64,
    /// Coefficient of variation of its work from second to second.
    pub(crate) noise: f64,
}

impl Conditions {
    /// Those of the backup of every night.
    pub(crate) const NIGHT: Self = Self {
        read_mib: READ_MIB,
        unused_mib: UNUSED_MIB,
        left: 0.05,
        cpus_left: WAITING_CPUS,
        comes_back_s: 5,
        hurt: 0.0,
        noise: 0.0,
    };

    /// The CPUs of a program of whose work that much is left: less work takes less of them.
    pub(crate) fn cpus_of(left: f64) -> f64 {
        (WORKING_CPUS * left).max(WAITING_CPUS)
    }
}

/// A containment that was made or undone, and whether a coin that was noted in the same second says so.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Switch {
    pub(crate) at: u64,
    pub(crate) on: bool,
    pub(crate) by_coin: bool,
}

/// What was told at the end of a trial, or when a guard took back what it had proven.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Told {
    pub(crate) at: u64,
    pub(crate) verdict: Verdict,
    /// Seconds of a block, and whether the circuit breaker ended one.
    pub(crate) block_s: f64,
    pub(crate) is_broken: bool,
}

/// What became of a containment.
#[derive(Clone, Debug)]
pub(crate) struct Containment {
    /// The process of its reader.
    pub(crate) reader: i32,
    /// Whether it is the beginning of a trial; else it rests on an earlier one.
    pub(crate) is_trial: bool,
    pub(crate) began: u64,
    pub(crate) switches: Vec<Switch>,
    pub(crate) told: Vec<Told>,
    /// When it was undone for good.
    pub(crate) closed: Option<u64>,
}

impl Containment {
    /// Whether the reader was ever contained: one that had ended is not.
    pub(crate) fn is_made(&self) -> bool {
        !self.switches.is_empty()
    }

    /// Since when it stays on a verdict.
    pub(crate) fn kept_at(&self) -> Option<u64> {
        let accepted = self.told.iter().find(|t| t.verdict == Verdict::Accepted);
        if self.is_trial {
            accepted.map(|t| t.at)
        } else {
            Some(self.began)
        }
    }
}

/// Counters of a workload at a time.
#[derive(Clone, Copy, Default)]
struct Counters {
    at: u64,
    work: f64,
    read_mib: f64,
    faults: u64,
}

/// The machine, and the mind that looks at it.
pub(crate) struct Plant {
    pub(crate) engine: Engine,
    policy: Policy,
    conditions: Conditions,
    /// From which the noise comes.
    random: Random,
    pub(crate) second: u64,
    /// The process of the reader, while it runs.
    pub(crate) reader: Option<i32>,
    /// Whether it reads.
    pub(crate) reads: bool,
    /// When each ended.
    pub(crate) ended: BTreeMap<i32, u64>,
    /// What nobody uses but for the pages of the reader of this night: all of it at its beginning.
    pub(crate) unused_mib: f64,
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
    pub(crate) contained_at: Vec<u64>,
    /// All containments.
    pub(crate) log: BTreeMap<ActionId, Containment>,
    /// The actions with which trials begin.
    on_trial: BTreeSet<ActionId>,
    /// The last coin, and when it was noted.
    coin: Option<(u64, bool)>,
    open: BTreeSet<WorkloadId>,
    pending: Vec<Event>,
    pub(crate) accepted: Vec<ExperimentRecord>,
    pub(crate) trials: u32,
    /// Work that the program lost, in seconds of its work, and seconds in which it lacked pages.
    pub(crate) lost_s: f64,
    pub(crate) lacked_s: u64,
    /// Seconds in which a reader that reads was contained.
    pub(crate) held_s: u64,
    pub(crate) faults: Option<Faults>,
}

/// What goes wrong on the machine, by chance, and what may be made without a trial for all that.
pub(crate) struct Faults {
    chance: u64,
    /// What takes its time: when it is done, and what.
    late: Vec<(u64, ActionId, Direction)>,
    /// The last trial that said something has accepted, and nobody has taken it back since.
    is_proven: bool,
    /// Whether it has to come to a trial first, and how often it was contained without one since the last.
    must_try: bool,
    recalls: u32,
    pub(crate) all_recalls: u32,
    /// Those that are being made.
    recalling: BTreeSet<ActionId>,
    /// Since when nobody reads.
    quiet_since: u64,
}

impl Faults {
    pub(crate) fn new(seed: u64) -> Self {
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

    pub(crate) fn below(&mut self, n: u64) -> u64 {
        self.chance = self
            .chance
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.chance >> 33) % n
    }
}

impl Plant {
    /// The backup of every night.
    pub(crate) fn new(memory: Memory) -> Self {
        Self::with_unused(memory, UNUSED_MIB)
    }

    /// The same on a machine on which nobody uses so much memory.
    pub(crate) fn with_unused(memory: Memory, unused_mib: f64) -> Self {
        let policy = Policy {
            seed: 11,
            placebo_every_s: 0.0,
            discovery: Rule::Fixed { alpha: 0.05 },
            ..Policy::default()
        };
        let conditions = Conditions {
            unused_mib,
            ..Conditions::NIGHT
        };
        Self::of(memory, policy, conditions, 0)
    }

    /// Another machine, with noise from this seed.
    pub(crate) fn of(memory: Memory, policy: Policy, conditions: Conditions, seed: u64) -> Self {
        Self {
            engine: engine(policy.clone(), memory),
            policy,
            conditions,
            random: Random::new(seed),
            second: 0,
            reader: None,
            reads: false,
            ended: BTreeMap::new(),
            unused_mib: conditions.unused_mib,
            all_unused_mib: conditions.unused_mib,
            free_mib: FREE_SHARE * conditions.unused_mib,
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
            log: BTreeMap::new(),
            on_trial: BTreeSet::new(),
            coin: None,
            open: BTreeSet::new(),
            pending: vec![],
            accepted: vec![],
            trials: 0,
            lost_s: 0.0,
            lacked_s: 0,
            held_s: 0,
            faults: None,
        }
    }

    /// Whether the reader that runs now is contained.
    fn is_contained(&self) -> bool {
        let is_its = |id: &ActionId| self.reader.is_some() && self.whose.get(id).copied() == self.reader;
        self.contains.iter().any(|(id, on)| *on && is_its(id))
    }

    /// Whether any containment is in force, of whomever.
    pub(crate) fn is_any_in_force(&self) -> bool {
        self.contains.values().any(|on| *on)
    }

    /// A second passes on the machine.
    fn pass(&mut self) {
        let of = self.conditions;
        self.second += 1;
        let reads = self.reader.is_some() && self.reads;
        let is_held = reads && self.is_contained();
        if reads {
            self.tar.read_mib += of.read_mib;
            if !is_held {
                self.unused_mib = (self.unused_mib - of.read_mib).max(0.0);
                self.free_mib = (self.free_mib - of.read_mib).max(0.0);
                if self.unused_mib == 0.0 {
                    self.back_at = self.second + of.comes_back_s;
                }
            }
        }
        let lacks = self.second < self.back_at;
        let mut left = if lacks { of.left } else { 1.0 };
        if is_held {
            left *= 1.0 - of.hurt;
            self.held_s += 1;
        }
        if lacks {
            self.program.faults += 300;
            self.lacked_s += 1;
        }
        self.lost_s += 1.0 - left;
        let wobble = self.wobble();
        self.program.work += left * WORK * wobble;
    }

    /// By how much the program's work is off in a second.
    fn wobble(&mut self) -> f64 {
        let noise = self.conditions.noise;
        if noise > 0.0 {
            (1.0 + noise * self.random.gaussian()).clamp(0.2, 1.8)
        } else {
            1.0
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
            canary: None,
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
            former: None,
            owner: homeostat_model::Owner::Machine,
            others: Vec::new(),
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
        // A program that waits uses little CPU time, and so does one that reads.
        let cpus = if is_reader {
            WAITING_CPUS
        } else if faults > 0 {
            self.conditions.cpus_left
        } else {
            WORKING_CPUS
        };
        let wobble = 1.0 + 0.01 * ((self.second * 7919 % 13) as f64 / 6.0 - 1.0);
        let reading = MeterReading {
            meter: "progress".into(),
            work: (now.work - before.work) * wobble,
            interval,
            counted: 1.0,
            lag: Nanoseconds::ZERO,
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
                        lag: Nanoseconds::ZERO,
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
                    let begun = Containment {
                        reader: self.whose.get(&action.id).copied().unwrap_or_default(),
                        is_trial: self.on_trial.contains(&action.id),
                        began: self.second,
                        switches: vec![],
                        told: vec![],
                        closed: None,
                    };
                    self.log.insert(action.id, begun);
                    self.contains.insert(action.id, false);
                    self.note_recall(action.id);
                    self.carry_out(action.id, Direction::Apply);
                }
                Command::Switch(id, direction) => self.carry_out(id, direction),
                Command::Close(id) => {
                    assert_eq!(self.contains.remove(&id), Some(false), "closed when undone");
                    if let Some(known) = self.log.get_mut(&id) {
                        known.closed = Some(self.second);
                    }
                }
                Command::NoteCoin { on, .. } => self.coin = Some((self.second, on)),
                Command::RecordExperiment(r) => self.note_experiment(*r),
                _ => {}
            }
        }
    }

    fn note_experiment(&mut self, r: ExperimentRecord) {
        match (r.verdict, self.log.get_mut(&r.action)) {
            (None, None) => {
                self.on_trial.insert(r.action);
            }
            (Some(verdict), Some(known)) => known.told.push(Told {
                at: self.second,
                verdict,
                block_s: (r.washout + r.measured).as_secs_f64(),
                is_broken: r.blocks.iter().any(|b| b.broken),
            }),
            _ => {}
        }
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
        let on = direction == Direction::Apply;
        let was = self.contains.insert(id, on);
        if was != Some(on) {
            if let Some(known) = self.log.get_mut(&id) {
                known.switches.push(Switch {
                    at: self.second,
                    on,
                    by_coin: self.coin == Some((self.second, on)),
                });
            }
        }
        if let Some(f) = &mut self.faults {
            if f.recalling.remove(&id) && direction == Direction::Apply {
                f.recalls += 1;
                f.all_recalls += 1;
            }
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

    pub(crate) fn run(&mut self, seconds: u64) {
        for _ in 0..seconds {
            self.pass();
            if self.goes_wrong() {
                self.step(Event::Unseen);
            } else {
                self.look();
            }
        }
    }

    /// The same without anybody who looks.
    pub(crate) fn run_alone(&mut self, seconds: u64) {
        for _ in 0..seconds {
            self.pass();
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
        self.engine = engine(self.policy.clone(), memory);
        // It counts its actions anew.
        self.log.clear();
        self.on_trial.clear();
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
    pub(crate) fn starts_to_read(&mut self) {
        self.before.remove("tar");
        self.reads_since = self.second;
        self.reader = Some(200 + self.second as i32);
        self.reads = true;
    }

    /// It ends. What it leaves behind nobody uses.
    pub(crate) fn ends(&mut self) {
        if let Some(pid) = self.reader.take() {
            self.ended.insert(pid, self.second);
        }
        self.reads = false;
        self.before.remove("tar");
        self.unused_mib = self.all_unused_mib;
    }
}

/// A reader is another workload each time.
fn id_of(name: &str, pid: i32) -> WorkloadId {
    match name {
        "tar" => WorkloadId::new(format!("{name}[{pid}]")),
        _ => WorkloadId::new(name),
    }
}

/// The mind with the one strategy that this is about.
fn engine(policy: Policy, memory: Memory) -> Engine {
    let strategies = homeostat_strategies::all();
    let file_cache = strategies.into_iter().filter(|s| s.id().as_str() == "file_cache");
    Engine::new(machine(), file_cache.collect(), policy, memory)
}

/// What the history tells of a trial that accepted, as the last of so many.
pub(crate) fn known(proven: &ExperimentRecord, trials: u32) -> ProvenReader {
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
