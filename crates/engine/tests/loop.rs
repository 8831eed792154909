//! The whole mind against a small plant: workloads whose true gain is known, in virtual time.

#![expect(clippy::unwrap_used, clippy::panic, reason = "helpers of tests")]

use homeostat_engine::view;
use homeostat_engine::{
    Command, Declined, Engine, Event, Fault, FaultKind, Memory, Mode, OperatorRequest, Opinion, Policy,
    Prior, Proposal, Seen, Stage, Strategy, WorkloadRule,
};
use homeostat_model::action::{MemoryTarget, PageMove, Target};
use homeostat_model::{
    Action, ActionId, Bytes, CanaryReading, CpuId, Direction, Effect, EffectorId, ExperimentKind,
    ExperimentRecord, Fingerprint, Locality, LossIn, Machine, MachineSample, MeterCandidate, MeterClass,
    MeterReading, Nanoseconds, NodeId, OperatorChoice, Owner, ProcessId, Progress, Snapshot, SpanHistogram,
    Spans, StrategyId, Verdict, Workload, WorkloadId, WorkloadKind, WorkloadSample,
};
use homeostat_statistics::discovery::Rule;
use std::collections::{BTreeMap, BTreeSet};

struct Try;

impl Strategy for Try {
    fn id(&self) -> StrategyId {
        "try".into()
    }
    fn summary(&self) -> &'static str {
        "test"
    }
    fn applicable(&self, _: &Machine) -> Result<(), String> {
        Ok(())
    }
    fn consider(&self, seen: &Seen<'_>) -> Opinion {
        if seen.workload.program == "hopeless" {
            return Opinion::Decline(Declined::because("nothing to gain"));
        }
        Opinion::Propose(Box::new(Proposal {
            hypothesis: "it may help".into(),
            predicted: Effect {
                estimate: 0.1,
                lower: 0.0,
                upper: 0.2,
                confidence: 0.9,
            },
            effector: EffectorId::from("switch"),
            target: Target::Memory(vec![MemoryTarget {
                process: seen.workload.processes[0],
                pieces: vec![1, 2],
            }]),
            stages: vec![],
            arguments: BTreeMap::new(),
            reversible: true,
            joint: false,
            urgent: false,
            makes_room: false,
            settling: Nanoseconds::from_millis(100),
            risk: "none".into(),
            advice: vec![],
        }))
    }
}

/// A strategy made to measure.
#[derive(Clone)]
struct Custom {
    id: &'static str,
    /// Who carries it out, if not the effector of that name.
    effector: &'static str,
    /// What it proposes: parts in order; empty = it declines.
    parts: Vec<Target>,
    reversible: bool,
    /// Only after this strategy has a change in force.
    after: Option<&'static str>,
    /// Looks where the workload runs first.
    looks: bool,
    /// Withdraws when this strategy has nothing in force.
    needs: Option<&'static str>,
    /// Its changes of several workloads are tried as one.
    joint: bool,
    /// It gives CPUs to threads that wait for one.
    makes_room: bool,
    /// It sets something that reaches whoever runs there.
    reaches: bool,
    /// Memory goes along with the threads.
    with_memory: bool,
}

fn custom(id: &'static str, parts: Vec<Target>) -> Custom {
    Custom {
        id,
        effector: id,
        parts,
        reversible: true,
        after: None,
        looks: false,
        needs: None,
        joint: false,
        makes_room: false,
        reaches: false,
        with_memory: false,
    }
}

/// A strategy that finds nothing to gain for the program of that name.
struct Sparing(Custom, &'static str);

impl Strategy for Sparing {
    fn id(&self) -> StrategyId {
        self.0.id()
    }
    fn summary(&self) -> &'static str {
        self.0.summary()
    }
    fn applicable(&self, machine: &Machine) -> Result<(), String> {
        self.0.applicable(machine)
    }
    fn consider(&self, seen: &Seen<'_>) -> Opinion {
        if seen.workload.program == self.1 {
            return Opinion::Decline(Declined::because("nothing to gain"));
        }
        self.0.consider(seen)
    }
}

/// A strategy whose change is too small for a program that uses more than a CPU and a half, or of which more threads want to run
/// than before it was tried.
struct Narrow(Custom);

impl Strategy for Narrow {
    fn id(&self) -> StrategyId {
        self.0.id()
    }
    fn summary(&self) -> &'static str {
        self.0.summary()
    }
    fn applicable(&self, machine: &Machine) -> Result<(), String> {
        self.0.applicable(machine)
    }
    fn consider(&self, seen: &Seen<'_>) -> Opinion {
        self.0.consider(seen)
    }
    fn outgrown(&self, seen: &Seen<'_>) -> Option<String> {
        let before = seen.held.last().map_or(0.0, |h| h.runnable);
        let waits = seen.load.cpus * (1.0 + seen.load.runqueue_wait) >= before + 0.6;
        (seen.load.cpus > 1.5 || waits).then(|| "it has outgrown that".to_owned())
    }
}

/// A strategy that proposes places, a larger one each time that one was refused.
struct Wandering;

impl Strategy for Wandering {
    fn id(&self) -> StrategyId {
        "thread_placement".into()
    }
    fn summary(&self) -> &'static str {
        "test"
    }
    fn applicable(&self, _: &Machine) -> Result<(), String> {
        Ok(())
    }
    fn consider(&self, seen: &Seen<'_>) -> Opinion {
        if !seen.held.is_empty() {
            return Opinion::Decline(Declined::because("it has its place"));
        }
        let size = 2 + 2 * seen.refused.len() as u32;
        custom("thread_placement", vec![cpus(0..size)]).consider(seen)
    }
    fn knows_other_places(&self) -> bool {
        true
    }
}

impl Strategy for Custom {
    fn id(&self) -> StrategyId {
        self.id.into()
    }
    fn summary(&self) -> &'static str {
        "test"
    }
    fn applicable(&self, _: &Machine) -> Result<(), String> {
        Ok(())
    }
    fn consider(&self, seen: &Seen<'_>) -> Opinion {
        let held = |strategy: &str| seen.held.iter().any(|h| h.strategy.as_str() == strategy);
        if self.after.is_some_and(|s| !held(s)) {
            return Opinion::Decline(Declined::because(format!("{}: not before its turn", self.id)));
        }
        if self.looks && seen.locality.is_none() {
            return Opinion::InspectLocality;
        }
        let Some((first, rest)) = self.parts.split_first() else {
            return Opinion::Decline(Declined::because(format!("{}: nothing to gain", self.id)));
        };
        Opinion::Propose(Box::new(Proposal {
            hypothesis: format!("{} may help", self.id),
            predicted: Effect {
                estimate: 0.2,
                lower: 0.0,
                upper: 0.4,
                confidence: 0.9,
            },
            effector: EffectorId::from(self.effector),
            target: first.clone(),
            stages: rest.to_vec(),
            arguments: self
                .with_memory
                .then(|| ("memory".to_owned(), "all".to_owned()))
                .into_iter()
                .collect(),
            reversible: self.reversible,
            joint: self.joint,
            urgent: false,
            makes_room: self.makes_room,
            settling: Nanoseconds::from_millis(100),
            risk: "none".into(),
            advice: vec![],
        }))
    }
    fn reaches_others(&self) -> bool {
        self.reaches
    }
    fn unwanted(&self, seen: &Seen<'_>) -> Option<String> {
        let needs = self.needs?;
        let there = seen.held.iter().any(|h| h.strategy.as_str() == needs);
        (!there).then(|| format!("{needs} is gone"))
    }
}

fn memory(pieces: std::ops::Range<u64>) -> Target {
    Target::Memory(vec![MemoryTarget {
        process: ProcessId {
            pid: 100,
            start_ticks: 1,
        },
        pieces: pieces.collect(),
    }])
}

fn cpus(list: std::ops::Range<u32>) -> Target {
    Target::Cpus(list.map(CpuId).collect())
}

fn pages(mib: u64) -> Target {
    Target::Pages(PageMove {
        node: NodeId(0),
        bytes: Bytes::from_mib(mib),
        shared: false,
    })
}

/// How much a target changes, in its own unit.
fn size(target: &Target) -> f64 {
    match target {
        Target::Memory(m) => m.iter().map(|t| t.pieces.len() as f64).sum(),
        Target::Cpus(c) => c.len() as f64,
        Target::Pages(p) => p.bytes.0 as f64,
        Target::Files(f) => f.len() as f64,
        Target::Reader(_) | Target::Nothing => 0.0,
    }
}

#[derive(Clone)]
struct Plant {
    name: &'static str,
    gain: f64,
    /// What a change by another effector gives when all of it is made: effector, gain, size of all of it.
    gains: Vec<(&'static str, f64, f64)>,
    /// What places give, by their size.
    places: Vec<(f64, f64)>,
    noise: f64,
    metered: bool,
    alive: bool,
    /// Share of a CPU that it uses, and of its work that it does.
    busy: f64,
    /// How long its threads wait for a CPU, relative to the time they run.
    waits: f64,
    /// Its work is what is offered to it: what it gains, it saves of its CPU time.
    offered: bool,
    /// The spans of its threads, where they can be followed.
    spans: Option<Spanned>,
    /// A person wants it left alone.
    excluded: bool,
    /// Nobody can tell whether a person excluded it.
    unread: bool,
    /// How often its main process has executed a program.
    executions: u32,
    /// When that process began.
    started: u64,
    /// Whose it is.
    owner: Owner,
    /// How an earlier version called it.
    former: Option<&'static str>,
}

/// Spans of a plant: 300 a second of a millisecond, one in fifty four times as long.
#[derive(Clone, Copy)]
struct Spanned {
    /// By what the change multiplies the long ones.
    tail: f64,
    /// By what it multiplies the length of all, and the work done in each: what is worked at together.
    together: f64,
    /// Standard deviation from second to second (log units).
    noise: f64,
    /// They cannot be followed.
    refused: bool,
    /// By what a change of another plant multiplies the long ones.
    by_others: f64,
}

const SPANNED: Spanned = Spanned {
    tail: 1.0,
    together: 1.0,
    noise: 0.05,
    refused: false,
    by_others: 1.0,
};

fn plant(name: &'static str, gain: f64) -> Plant {
    Plant {
        name,
        gain,
        gains: vec![],
        places: vec![],
        noise: 0.01,
        metered: true,
        alive: true,
        busy: 1.0,
        waits: 0.0,
        offered: false,
        spans: None,
        excluded: false,
        unread: false,
        executions: 1,
        started: 1,
        owner: Owner::Machine,
        former: None,
    }
}

/// Segments (or another kind), and write calls (or another) beside them, which keep a ratio.
#[derive(Clone, Copy)]
struct TwoKinds {
    first: &'static str,
    beside: &'static str,
    /// By what the change multiplies the calls for a segment.
    changed: f64,
    /// From this second on there are half as many calls for a segment.
    phase: u64,
    /// Standard deviation of the ratio from second to second.
    noise: f64,
}

/// Work per CPU second rises and falls.
#[derive(Clone, Copy)]
struct Swings {
    /// Until when it did not.
    since: u64,
    /// By what it is multiplied from then on, for four seconds each, over and over.
    factors: &'static [f64],
    /// A meter that does not show it.
    apart: Option<&'static str>,
}

/// A memory canary, and noise of the memory that every plant has.
#[derive(Clone, Copy)]
struct Canary {
    /// Standard deviation of the shared noise from second to second (log units).
    shared: f64,
    /// The canary has readings.
    reads: bool,
    /// By what a change makes its memory slower (log units).
    slower: f64,
}

struct World {
    engine: Engine,
    plants: Vec<Plant>,
    second: u64,
    random: u64,
    on: BTreeMap<ActionId, (WorkloadId, bool)>,
    actions: BTreeMap<ActionId, Action>,
    /// Gain of every plant when all plants have a change of this effector; of fewer in proportion.
    common: BTreeMap<&'static str, f64>,
    /// A change of this effector on any other plant hurts this plant by so much.
    hurts: Vec<(&'static str, &'static str, f64)>,
    /// Share of the work that is lost for so many seconds after each undo.
    scar: Option<(f64, u64)>,
    /// Seconds that a change by an effector takes in either direction.
    slow: BTreeMap<&'static str, u64>,
    /// Seconds that a change by an effector takes for all of the plant's gain, at a steady pace.
    paced: BTreeMap<&'static str, u64>,
    /// Since when a change is on its way.
    moving: BTreeMap<ActionId, u64>,
    later: Vec<(u64, Event)>,
    /// The order in which changes were undone for good.
    closed: Vec<ActionId>,
    /// Coins as journalled: experiment, block, on.
    coins: Vec<(u64, u32, bool)>,
    open: BTreeMap<WorkloadId, BTreeSet<String>>,
    pending: Vec<Event>,
    trace: Vec<String>,
    stories: Vec<String>,
    verdicts: Vec<(String, Verdict, Option<Effect>)>,
    records: Vec<ExperimentRecord>,
    trials_at_once: usize,
    most_trials_at_once: usize,
    /// Whether progress points can be found in every plant.
    points: bool,
    /// How long what the program's own counter tells may be of before.
    lag: Nanoseconds,
    /// … as only its readings say.
    told_late: Nanoseconds,
    /// Every plant is measured by two kinds of kernel work instead.
    kernel: Option<TwoKinds>,
    /// A meter that cannot be opened any more once something is tried.
    unreadable: Option<&'static str>,
    /// A meter that cannot be opened.
    shut: Option<&'static str>,
    /// A meter that is open and delivers no readings yet.
    silent: Option<&'static str>,
    /// Every plant does more and less work per CPU second in turn.
    swings: Option<Swings>,
    /// The memory canary, if there is one.
    canary: Option<Canary>,
    finished: bool,
    fail_undo: bool,
    /// What each switch costs: standstill and memory.
    price: Progress,
    /// A change that cannot be undone.
    stuck: Option<ActionId>,
    refuse_apply: Option<Fault>,
    /// No change can be made on this plant.
    refuse_for: Option<&'static str>,
    /// Changes that an effector puts off with "not now" before it makes one, and those that it has put off: when.
    not_now: u32,
    put_off: Vec<u64>,
    kept: Vec<ActionId>,
    /// What reached the mind, as it would be recorded: second and event.
    recorded: Option<Vec<(u64, String)>>,
}

fn machine() -> Machine {
    Machine {
        kernel: "test".into(),
        cpu_model: "test".into(),
        hypervisor: None,
        cpus: (0..4)
            .map(|i| homeostat_model::Cpu {
                id: homeostat_model::CpuId(i),
                core: i,
                package: 0,
                llc: homeostat_model::LlcId(0),
                node: homeostat_model::NodeId(0),
                set_aside: false,
            })
            .collect(),
        nodes: vec![],
        memory: Bytes::from_mib(1024),
        page_size: Bytes(4096),
        huge_page_size: Bytes(2 << 20),
        llc_size: Bytes(0),
        boot_id: "boot".into(),
        capabilities: vec![],
    }
}

/// Blocks long enough for a beat of one second, and levels that leave a trial time to be watched.
fn policy() -> Policy {
    Policy {
        seed: 42,
        placebo_every_s: 0.0,
        washout_min_s: 2.0,
        washout_max_s: 60.0,
        measured_candidates_s: vec![4.0, 6.0, 10.0, 20.0, 40.0, 80.0],
        discovery: Rule::ELond {
            rate: 0.1,
            decay: 0.99,
            decay_first: 0.99,
            epoch: 200,
        },
        ..Policy::default()
    }
}

impl World {
    fn new(plants: Vec<Plant>, policy: Policy, memory: Memory) -> Self {
        Self::with(vec![Box::new(Try)], plants, policy, memory)
    }

    fn with(strategies: Vec<Box<dyn Strategy>>, plants: Vec<Plant>, policy: Policy, memory: Memory) -> Self {
        Self {
            engine: Engine::new(machine(), strategies, policy, memory),
            actions: BTreeMap::new(),
            common: BTreeMap::new(),
            hurts: vec![],
            scar: None,
            slow: BTreeMap::new(),
            paced: BTreeMap::new(),
            moving: BTreeMap::new(),
            later: vec![],
            closed: vec![],
            coins: vec![],
            plants,
            second: 1000,
            random: 88172645463325252,
            on: BTreeMap::new(),
            open: BTreeMap::new(),
            pending: vec![],
            trace: vec![],
            stories: vec![],
            verdicts: vec![],
            records: vec![],
            trials_at_once: 0,
            most_trials_at_once: 0,
            points: false,
            lag: Nanoseconds::ZERO,
            told_late: Nanoseconds::ZERO,
            kernel: None,
            unreadable: None,
            shut: None,
            silent: None,
            swings: None,
            canary: None,
            finished: false,
            fail_undo: false,
            price: Progress::default(),
            stuck: None,
            refuse_apply: None,
            refuse_for: None,
            not_now: 0,
            put_off: vec![],
            kept: vec![],
            recorded: None,
        }
    }

    /// Roughly normal noise from a sum of uniforms.
    fn noise(&mut self) -> f64 {
        let mut sum = 0.0;
        for _ in 0..6 {
            self.random ^= self.random << 13;
            self.random ^= self.random >> 7;
            self.random ^= self.random << 17;
            sum += (self.random >> 11) as f64 / (1u64 << 53) as f64;
        }
        (sum - 3.0) * 2f64.sqrt()
    }

    fn step(&mut self, event: Event) {
        let now = Nanoseconds::from_secs(self.second);
        if let Some(recorded) = &mut self.recorded {
            recorded.push((self.second, serde_json::to_string(&event).unwrap()));
        }
        let commands = self.engine.step(now, 1_000_000 + self.second, event);
        for c in commands {
            self.trace.push(format!("{} {c:?}", self.second));
            self.carry_out(c);
        }
    }

    fn carry_out(&mut self, command: Command) {
        match command {
            Command::FindMeters(id) => {
                let plant = self.plants.iter().find(|p| p.name == id.as_str()).unwrap();
                let candidate = MeterCandidate {
                    id: "progress".into(),
                    class: MeterClass::Application,
                    unit: "operation".into(),
                    cost_per_count: Nanoseconds::ZERO,
                    lag: self.lag,
                    refused: (!plant.metered).then(|| "it publishes nothing".to_owned()),
                };
                let mut candidates = vec![candidate];
                if let Some(kinds) = self.kernel {
                    candidates = [kinds.first, kinds.beside]
                        .map(|id| MeterCandidate {
                            id: id.into(),
                            class: MeterClass::Kernel,
                            unit: "x".into(),
                            cost_per_count: Nanoseconds::ZERO,
                            lag: Nanoseconds::ZERO,
                            refused: None,
                        })
                        .to_vec();
                }
                if self.points {
                    candidates.push(MeterCandidate {
                        id: "points".into(),
                        class: MeterClass::Points,
                        unit: "turn of its work".into(),
                        cost_per_count: Nanoseconds(1_000),
                        lag: Nanoseconds::ZERO,
                        refused: None,
                    });
                }
                self.pending.push(Event::MetersFound(id, Ok(candidates)));
            }
            Command::OpenMeter(id, meter)
                if self.unreadable == Some(meter.as_str()) && !self.engine.view().experiments.is_empty() =>
            {
                let fault = Fault {
                    kind: FaultKind::Denied,
                    text: "no permission to read /proc/100/io".into(),
                };
                self.pending.push(Event::MeterOpened(id, meter, Err(fault)));
            }
            Command::OpenMeter(id, meter) if self.shut == Some(meter.as_str()) => {
                let fault = Fault {
                    kind: FaultKind::Unsupported,
                    text: "its file is gone".into(),
                };
                self.pending.push(Event::MeterOpened(id, meter, Err(fault)));
            }
            Command::OpenMeter(id, meter) => {
                self.open.entry(id.clone()).or_default().insert(meter.to_string());
                self.pending.push(Event::MeterOpened(id, meter, Ok(())));
            }
            Command::CloseMeter(id, meter) => {
                self.open.entry(id).or_default().remove(meter.as_str());
            }
            Command::Apply(action) if self.refuse_for == Some(action.workload.as_str()) => {
                let fault = Fault {
                    kind: FaultKind::Denied,
                    text: "not permitted".into(),
                };
                self.pending
                    .push(Event::Settled(action.id, Direction::Apply, Err(fault)));
            }
            Command::Apply(action) if self.not_now > 0 => {
                self.not_now -= 1;
                self.put_off.push(self.second);
                let fault = Fault {
                    kind: FaultKind::Busy,
                    text: "a snapshot is being written".into(),
                };
                self.pending
                    .push(Event::Settled(action.id, Direction::Apply, Err(fault)));
            }
            Command::Apply(action) => match self.refuse_apply.take() {
                Some(fault) => self
                    .pending
                    .push(Event::Settled(action.id, Direction::Apply, Err(fault))),
                None => {
                    self.trials_at_once = self.on.values().filter(|(_, on)| *on).count();
                    self.on.insert(action.id, (action.workload.clone(), true));
                    let id = action.id;
                    self.actions.insert(id, *action);
                    self.settle(id, Direction::Apply);
                }
            },
            Command::Switch(id, direction) => {
                if direction == Direction::Undo && (self.fail_undo || self.stuck == Some(id)) {
                    let fault = Fault {
                        kind: FaultKind::Busy,
                        text: "mapped by others".into(),
                    };
                    self.pending.push(Event::Settled(id, direction, Err(fault)));
                    return;
                }
                if let Some(entry) = self.on.get_mut(&id) {
                    entry.1 = direction == Direction::Apply;
                }
                self.settle(id, direction);
            }
            Command::Close(id) => {
                if let Some((_, on)) = self.on.remove(&id) {
                    assert!(!on, "an action is closed only when it is undone");
                    self.closed.push(id);
                }
            }
            Command::Keep(id) => self.kept.push(id),
            Command::RecordExperiment(r) => {
                // What was measured after an acceptance is written beside the same verdict.
                let again = r.fresh.is_some() && r.verdict == Some(Verdict::Accepted);
                if let Some(v) = r.verdict.filter(|_| !again) {
                    self.verdicts.push((r.workload.to_string(), v, r.effect));
                    self.records.push(*r);
                }
            }
            Command::Tell(s) => self.stories.push(s.text),
            Command::Finished => self.finished = true,
            Command::NoteCoin {
                experiment,
                block,
                on,
            } => self.coins.push((experiment.0, block, on)),
            Command::InspectLocality(id) => {
                let locality = Locality {
                    workload: id.clone(),
                    threads: 4,
                    threads_of_busiest_process: 4,
                    running: BTreeMap::new(),
                    private: BTreeMap::new(),
                    shared: BTreeMap::new(),
                    huge: BTreeMap::new(),
                    bound: None,
                    counters: None,
                };
                self.pending.push(Event::LocalityInspected(id, Ok(locality)));
            }
            Command::InspectMemory(_)
            | Command::DropCoins(_)
            | Command::RecordDecision(_)
            | Command::RecordWindow(_) => {}
        }
    }

    /// A change reaches the state it was sent to, at once or after the time its effector takes. A later order
    /// replaces an earlier one.
    fn settle(&mut self, id: ActionId, direction: Direction) {
        self.later
            .retain(|(_, e)| !matches!(e, Event::Settled(other, _, _) if *other == id));
        let progress = Progress {
            stalled: self.price.stalled,
            bloat: self.price.bloat,
            ..done()
        };
        let event = Event::Settled(id, direction, Ok(progress));
        self.moving.insert(id, self.second);
        match self.takes(id) {
            0 => self.pending.push(event),
            seconds => self.later.push((self.second + seconds, event)),
        }
    }

    /// Seconds that a change takes.
    fn takes(&self, id: ActionId) -> u64 {
        let Some(action) = self.actions.get(&id) else {
            return 0;
        };
        let effector = action.effector.as_str();
        let of = |p: &Plant| p.gains.iter().find(|g| g.0 == effector).map(|g| g.2);
        let all = self.plants.iter().find_map(of).unwrap_or(1.0);
        let paced = self
            .paced
            .get(effector)
            .map(|s| *s as f64 * size(&action.target) / all);
        let slow = self.slow.get(effector).copied().unwrap_or(0);
        slow + paced.map_or(0, |s| s.ceil() as u64)
    }

    /// Share of a change that is made: it comes and goes at a steady pace where the effector has one.
    fn made(&self, id: ActionId, on: bool) -> f64 {
        let paced = self
            .actions
            .get(&id)
            .is_some_and(|a| self.paced.contains_key(a.effector.as_str()));
        if !paced {
            return f64::from(u8::from(on));
        }
        let since = self
            .second
            .saturating_sub(self.moving.get(&id).copied().unwrap_or(0));
        let done = (since as f64 / self.takes(id).max(1) as f64).min(1.0);
        if on { done } else { 1.0 - done }
    }

    /// What the changes that are on do to the rate of a plant.
    fn factor(&self, plant: &Plant) -> f64 {
        let on = |effector: &str| {
            self.on
                .iter()
                .filter(|(_, (w, _))| w.as_str() == plant.name)
                .filter_map(|(id, (_, on))| Some((self.made(*id, *on), self.actions.get(id)?)))
                .filter(|(_, a)| a.effector.as_str() == effector)
                .map(|(made, a)| made * size(&a.target))
                .sum::<f64>()
        };
        let mut factor = if on("switch") > 0.0 { 1.0 + plant.gain } else { 1.0 };
        for (effector, gain, all) in &plant.gains {
            factor *= (1.0 + gain).powf((on(effector) / all).min(1.0));
        }
        let placed = on("thread_placement");
        for (size, gain) in &plant.places {
            factor *= if placed == *size { 1.0 + gain } else { 1.0 };
        }
        for (effector, gain) in &self.common {
            let share = self.changed_by(effector).len() as f64 / self.plants.len() as f64;
            factor *= (1.0 + gain).powf(share);
        }
        if let Some((loss, seconds)) = self.scar {
            let is_sore = |(id, (w, on)): (&ActionId, &(WorkloadId, bool))| {
                let since = self.moving.get(id).copied().unwrap_or(0);
                !on && w.as_str() == plant.name && self.second <= since + seconds
            };
            if self.on.iter().any(is_sore) {
                factor *= 1.0 - loss;
            }
        }
        for (effector, victim, loss) in &self.hurts {
            if *victim == plant.name {
                factor *= (1.0 - loss).powf(self.made_by_others(effector, victim));
            }
        }
        factor
    }

    /// Share of the changes of an effector that are made on others.
    fn made_by_others(&self, effector: &str, victim: &str) -> f64 {
        let all = |w: &WorkloadId| {
            let plant = self.plants.iter().find(|p| p.name == w.as_str())?;
            plant.gains.iter().find(|g| g.0 == effector).map(|g| g.2)
        };
        let mut shares: BTreeMap<&WorkloadId, f64> = BTreeMap::new();
        for (id, (w, on)) in &self.on {
            let action = self.actions.get(id).filter(|a| a.effector.as_str() == effector);
            if let Some(action) = action.filter(|_| *on && w.as_str() != victim) {
                let share = all(w).map_or(1.0, |all| size(&action.target) / all);
                *shares.entry(w).or_default() += share;
            }
        }
        shares.into_values().fold(0.0, f64::max).min(1.0)
    }

    /// By what work per CPU second is multiplied in this second.
    fn swing(&self) -> f64 {
        self.swings.map_or(1.0, |s| {
            let before = self.second.saturating_sub(s.since + 1);
            s.factors[(before / 4) as usize % s.factors.len()]
        })
    }

    /// What an open meter counts in a second in which so much work is done, and this many calls for a segment.
    fn counted(&self, meter: &str, rate: f64, calls: f64) -> f64 {
        if self.kernel.is_some_and(|k| meter == k.beside) {
            rate * calls
        } else if self.swings.is_some_and(|s| s.apart == Some(meter)) {
            rate / self.swing()
        } else {
            rate
        }
    }

    /// The workloads that have a change of this effector on.
    fn changed_by(&self, effector: &str) -> BTreeSet<&WorkloadId> {
        self.on
            .iter()
            .filter(|(id, (_, on))| {
                *on && self
                    .actions
                    .get(id)
                    .is_some_and(|a| a.effector.as_str() == effector)
            })
            .map(|(_, (w, _))| w)
            .collect()
    }

    /// The spans of a plant whose change is on or off, if anybody asked for them.
    fn spans(&mut self, plant: &Plant, rate: f64) -> Option<Result<Spans, String>> {
        let spanned = plant.spans?;
        let asked = self
            .engine
            .sampling()
            .spans
            .iter()
            .any(|w| w.as_str() == plant.name);
        if !asked {
            return None;
        }
        if spanned.refused {
            return Some(Err("following it would cost 1.2 % of its CPU time".to_owned()));
        }
        let on = self.on.values().any(|(w, on)| w.as_str() == plant.name && *on);
        let (tail, together) = if on {
            (spanned.tail, spanned.together)
        } else {
            (1.0, 1.0)
        };
        let effectors: BTreeSet<&str> = self.actions.values().map(|a| a.effector.as_str()).collect();
        let made = effectors.into_iter().map(|e| self.made_by_others(e, plant.name));
        let tail = tail * spanned.by_others.powf(made.fold(0.0, f64::max));
        let wobble = (spanned.noise * self.noise()).exp();
        let mut histogram = SpanHistogram::default();
        let number = (0.3 * rate / together) as u64;
        for k in 0..number {
            let long = if k % 50 == 0 { 4.0 * tail } else { 1.0 };
            histogram.add((1e6 * long * together * wobble) as u64);
        }
        Some(Ok(Spans::of(&histogram, Nanoseconds::from_millis(1))))
    }

    /// Until it is so, but for so many seconds at most.
    fn run_until(&mut self, seconds: u64, is_so: impl Fn(&Self) -> bool) {
        for _ in 0..seconds {
            if is_so(self) {
                break;
            }
            self.run(1);
        }
    }

    fn run(&mut self, seconds: u64) {
        for _ in 0..seconds {
            self.second += 1;
            let second = self.second;
            let (due, later): (Vec<_>, Vec<_>) = self.later.drain(..).partition(|(at, _)| *at <= second);
            self.later = later;
            self.pending.extend(due.into_iter().map(|(_, e)| e));
            let snapshot = self.snapshot();
            self.step(Event::Sampled(Box::new(snapshot)));
            for _ in 0..64 {
                let Some(event) = (!self.pending.is_empty()).then(|| self.pending.remove(0)) else {
                    break;
                };
                self.step(event);
            }
            let trials = self.engine.view().experiments.len();
            self.most_trials_at_once = self.most_trials_at_once.max(trials);
        }
    }

    fn snapshot(&mut self) -> Snapshot {
        let plants = self.plants.clone();
        let shared = self.canary.map_or(0.0, |c| c.shared * self.noise());
        let canary = self.canary.filter(|c| c.reads).map(|c| {
            let on = self.on.values().any(|(_, on)| *on);
            let slower = if on { c.slower } else { 0.0 };
            Ok(CanaryReading {
                loads: 10_000,
                loading: Nanoseconds((1e6 * (slower - shared).exp()) as u64),
                cpu: Nanoseconds::from_millis(5),
                resident: Bytes::from_mib(66),
            })
        });
        let mut workloads = vec![];
        let mut samples = vec![];
        for (i, p) in plants.iter().enumerate().filter(|(_, p)| p.alive) {
            let id = WorkloadId::new(p.name);
            let factor = self.factor(p);
            let (faster, saves) = if p.offered { (1.0, factor) } else { (factor, 1.0) };
            let rate = 1000.0 * p.busy * faster * self.swing() * (shared + p.noise * self.noise()).exp();
            let calls = match self.kernel {
                Some(k) => {
                    let changed = self.on.values().any(|(w, on)| *on && w.as_str() == p.name);
                    let phase = if self.second >= k.phase { 0.5 } else { 1.0 };
                    let wobble = if k.noise > 0.0 {
                        (k.noise * self.noise()).exp()
                    } else {
                        1.0
                    };
                    phase * wobble * if changed { k.changed } else { 1.0 }
                }
                None => 1.0,
            };
            workloads.push(Workload {
                id: id.clone(),
                kind: WorkloadKind::ProcessGroup,
                former: p.former.map(Fingerprint::from),
                owner: p.owner.clone(),
                others: Vec::new(),
                fingerprint: Fingerprint::new(p.name),
                // `job@2` is the second process of job.
                program: p.name.split('@').next().unwrap_or(p.name).into(),
                executable: p.name.into(),
                processes: vec![ProcessId {
                    pid: 100 + i as i32,
                    start_ticks: p.started,
                }],
                choice: OperatorChoice {
                    never: p
                        .excluded
                        .then(|| "HOMEOSTAT=never in its environment".to_owned()),
                    unknown: p.unread.then(|| "its environment is overwritten".to_owned()),
                    ..OperatorChoice::default()
                },
            });
            let readings = self
                .open
                .get(&id)
                .into_iter()
                .flatten()
                .filter(|m| self.silent != Some(m.as_str()))
                .map(|m| MeterReading {
                    meter: m.as_str().into(),
                    work: self.counted(m, rate, calls),
                    interval: Nanoseconds::from_secs(1),
                    counted: 1.0,
                    lag: self.told_late,
                })
                .collect();
            let spans = self.spans(p, rate);
            samples.push(WorkloadSample {
                id,
                interval: Nanoseconds::from_secs(1),
                age: Nanoseconds::from_secs(self.second),
                processes: 1,
                threads: 1,
                cpu: Nanoseconds::from_secs_f64(p.busy / saves),
                cpu_busiest: Nanoseconds::from_secs_f64(p.busy / saves),
                runqueue_wait: Nanoseconds::from_secs_f64(p.waits * p.busy / saves),
                faults_minor: 0,
                faults_major: 0,
                churn: 0,
                resident: Bytes::from_mib(512),
                anonymous: Bytes::from_mib(512),
                shared: Bytes::ZERO,
                huge: Some(Bytes::ZERO),
                meters: readings,
                reads: homeostat_model::Reads::default(),
                spans,
                executions: p.executions,
            });
        }
        Snapshot {
            at: Nanoseconds::from_secs(self.second),
            unix_seconds: 1_000_000 + self.second,
            interval: Nanoseconds::from_secs(1),
            machine: MachineSample {
                cpu_busy: Nanoseconds::from_secs(1),
                ..MachineSample::default()
            },
            workloads: Some(workloads),
            samples,
            own_cpu: Nanoseconds::from_millis(1),
            own_resident: Bytes::from_mib(8),
            canary,
        }
    }

    fn seen(&self, name: &str) -> view::Workload {
        let mut workloads = self.engine.view().workloads.into_iter();
        workloads.find(|w| w.name.as_str() == name).unwrap()
    }

    fn stage(&self, name: &str) -> Stage {
        self.seen(name).stage
    }

    fn summary(&self, name: &str) -> String {
        self.seen(name).summary
    }

    fn verdict(&self, name: &str) -> Verdict {
        self.verdicts
            .iter()
            .find(|v| v.0 == name)
            .unwrap_or_else(|| panic!("no verdict for {name}: {:#?}", self.stories))
            .1
    }
}

fn done() -> Progress {
    Progress {
        done: true,
        finished: 2,
        total: 2,
        verified: true,
        ..Progress::default()
    }
}

#[test]
fn a_real_gain_is_accepted_and_stays() {
    let mut world = World::new(vec![plant("good", 0.10)], policy(), Memory::default());
    world.run(900);
    assert_eq!(world.verdict("good"), Verdict::Accepted);
    let effect = world.verdicts[0].2.unwrap();
    assert!(effect.lower < 0.10 && 0.10 < effect.upper, "{effect}");
    assert_eq!(world.stage("good"), Stage::Improved);
    assert!(world.on.values().any(|(_, on)| *on) || world.engine.view().experiments.is_empty());
    assert_eq!(world.engine.view().in_force.len(), 1);
    let level = world.records[0].off_level.unwrap();
    assert!(level.change.abs() < 0.02 && !level.may_be_a_scar, "{level:?}");
    assert_eq!(world.engine.view().outcomes[0].off_level, Some(level));
}

/// With the blocks and levels of the daemon.
fn usual_blocks() -> Policy {
    let usual = Policy::default();
    Policy {
        washout_min_s: usual.washout_min_s,
        measured_candidates_s: usual.measured_candidates_s,
        discovery: usual.discovery,
        ..policy()
    }
}

#[test]
fn how_much_is_gained_is_measured_afresh_right_after_the_acceptance() {
    let mut world = World::new(vec![plant("good", 0.10)], usual_blocks(), Memory::default());
    world.run_until(900, |world| world.told("by 12 pairs after the acceptance") > 0);
    let accepted_at = world.records[0].ended_unix;
    let took = 1_000_000 + world.second - accepted_at;
    // A pair is 3 s, and as much longer as it takes to the next sample.
    assert!((36..=70).contains(&took), "{took}");
    let shown = world.engine.view().in_force[0].effect.unwrap();
    let (lower, upper) = (shown.lower.unwrap(), shown.upper.unwrap());
    assert!(lower < 0.10 && 0.10 < upper && upper - lower < 0.02, "{shown:?}");
    let trial = world.verdicts[0].2.unwrap();
    assert!(upper - lower < (trial.upper - trial.lower) / 2.0, "{trial}");
    // The probation adds to it.
    world.run_until(20_000, |world| world.told("by 30 pairs after the acceptance") > 0);
    assert_eq!(world.verdicts.len(), 1);
}

/// The first gain that pairs after the acceptance tell.
fn fresh_gain(seed: u64, canary: Canary) -> Option<Effect> {
    let policy = Policy {
        seed,
        ..usual_blocks()
    };
    let mut world = World::new(vec![plant("good", 0.10)], policy, Memory::default());
    world.random ^= seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    world.canary = Some(canary);
    world.run_until(3000, |world| world.told("pairs after the acceptance") > 0);
    let told = world.engine.view().in_force.first()?.effect?;
    (world.told("pairs after the acceptance") > 0).then_some(Effect {
        estimate: told.estimate?,
        lower: told.lower?,
        upper: told.upper?,
        confidence: 0.9,
    })
}

#[test]
fn the_gain_told_is_sharper_where_the_canary_saw_the_noise_and_covers_the_truth_as_often() {
    let noisy = Canary {
        shared: 0.04,
        reads: true,
        slower: 0.0,
    };
    let told =
        |canary: Canary| -> Vec<Effect> { (1..=60).filter_map(|seed| fresh_gain(seed, canary)).collect() };
    let width = |told: &[Effect]| {
        let mut widths: Vec<f64> = told.iter().map(|e| e.upper - e.lower).collect();
        widths.sort_by(f64::total_cmp);
        widths[widths.len() / 2]
    };
    let with = told(noisy);
    let without = told(Canary {
        reads: false,
        ..noisy
    });
    assert!(
        with.len() > 40 && without.len() > 40,
        "{} {}",
        with.len(),
        without.len()
    );
    assert!(
        width(&with) * 1.5 < width(&without),
        "{} {}",
        width(&with),
        width(&without)
    );
    let missed = with.iter().filter(|e| e.lower > 0.10 || e.upper < 0.10).count();
    // 60 at a miss rate of 0.1: 13 with three standard deviations.
    assert!(missed <= 13, "{missed} of {}", with.len());
    let bias = with.iter().map(|e| e.estimate - 0.10).sum::<f64>() / with.len() as f64;
    assert!(bias.abs() < 0.005, "{bias}");
}

#[test]
fn a_canary_that_reacts_to_the_change_adds_nothing_to_the_gain_told() {
    let reacts = Canary {
        shared: 0.02,
        reads: true,
        slower: 0.04,
    };
    let told: Vec<Effect> = (1..=20).filter_map(|seed| fresh_gain(seed, reacts)).collect();
    assert!(told.len() > 10);
    let bias = told.iter().map(|e| e.estimate - 0.10).sum::<f64>() / told.len() as f64;
    // Its reaction, taken for noise, would add four points.
    assert!(bias.abs() < 0.01, "{bias}");
}

#[test]
fn a_slowness_that_the_undo_leaves_is_found_to_be_no_gain() {
    for (loss, seconds) in [(0.06, 5), (0.06, 0)] {
        let mut world = World::new(vec![plant("sore", 0.0)], usual_blocks(), Memory::default());
        world.scar = Some((loss, seconds));
        world.run(6000);
        assert!(world.engine.view().in_force.is_empty(), "{:#?}", world.stories);
        let verdicts: Vec<Verdict> = world.verdicts.iter().map(|v| v.1).collect();
        if seconds > 0 {
            assert_eq!(verdicts, [Verdict::Accepted, Verdict::Rejected]);
            assert!(world.told("the undo slows the program down for a while") > 0);
            // The level before the trial shows it at once.
            let level = world.records[0].off_level.unwrap();
            assert!(level.may_be_a_scar && level.change < -0.03, "{level:?}");
            assert!(world.told("The undo may leave a scar") > 0);
        } else {
            assert_eq!(verdicts, [Verdict::Rejected]);
        }
    }
    // A gain beside it stays.
    let mut world = World::new(vec![plant("both", 0.10)], usual_blocks(), Memory::default());
    world.scar = Some((0.02, 5));
    world.run(6000);
    assert_eq!(world.engine.view().in_force.len(), 1, "{:#?}", world.stories);
}

/// A program that gains so much by the change, and whose spans do this.
fn server(gain: f64, spans: Spanned) -> World {
    let spans = Some(spans);
    let mut world = World::new(
        vec![Plant {
            spans,
            ..plant("server", gain)
        }],
        policy(),
        Memory::default(),
    );
    world.recorded = Some(Vec::new());
    world.run(900);
    world
}

#[test]
fn what_a_meter_may_tell_of_the_block_before_is_left_out_of_each() {
    let washout_of = |lag, told_late| {
        let mut world = World::new(vec![plant("db", 0.1)], policy(), Memory::default());
        world.lag = Nanoseconds::from_secs(lag);
        world.told_late = Nanoseconds::from_secs(told_late);
        world.run(3600);
        let record = world.records.first().cloned().unwrap();
        assert_eq!(record.verdict, Some(Verdict::Accepted));
        for pair in record.blocks.windows(2) {
            assert!(pair[1].measured_from >= pair[0].measured_from + record.measured + record.washout);
        }
        record.washout
    };
    let washout = |lag| washout_of(lag, 0);
    assert_eq!(washout(0), Nanoseconds::from_secs(2));
    assert_eq!(
        washout(5),
        Nanoseconds::from_secs(7),
        "after the change has settled"
    );
    // Also where that is longer than what a change may take.
    assert_eq!(washout(70), Nanoseconds::from_secs(72));
    // What is found by a search says so with its readings only.
    assert_eq!(washout_of(0, 9), Nanoseconds::from_secs(11));
    assert_eq!(washout_of(9, 5), Nanoseconds::from_secs(11));
}

#[test]
fn more_work_is_refused_where_the_tail_of_the_spans_gets_clearly_longer() {
    let world = server(0.12, Spanned { tail: 2.0, ..SPANNED });
    assert_eq!(world.verdict("server"), Verdict::Harmful);
    let record = &world.records[0];
    assert!(
        record.reason.contains("99 of 100 of its spans") && record.reason.contains("instead of 4."),
        "{}",
        record.reason
    );
    let p99 = record.spans[0].p99.unwrap();
    assert!(
        (0.9..1.1).contains(&p99.longer.estimate) && p99.longer.lower > 0.5,
        "{p99:?}"
    );
    assert!(world.engine.view().in_force.is_empty());
    assert!(
        world.engine.sampling().spans.is_empty(),
        "they are followed in trials and probes only"
    );
    let told = |text: &str| world.stories.iter().any(|s| s.contains(text));
    assert!(told("spans from wait to wait over"), "{:#?}", world.stories);
}

#[test]
fn more_work_with_the_same_spans_is_accepted_and_what_was_seen_is_written_down() {
    for spans in [
        SPANNED,
        // A tenth longer is within what is allowed.
        Spanned { tail: 1.1, ..SPANNED },
        // Twice as long, with twice the work in each.
        Spanned {
            together: 2.0,
            ..SPANNED
        },
        Spanned {
            noise: 0.5,
            ..SPANNED
        },
    ] {
        let world = server(0.12, spans);
        assert_eq!(world.verdict("server"), Verdict::Accepted);
        let account = &world.records[0].spans[0];
        assert!(account.unseen.is_none() && account.blocks_on >= 3, "{account:?}");
        assert!(account.p99.unwrap().noise > 0.0);
    }
}

#[test]
fn spans_that_get_longer_by_an_accepted_change_are_found_by_its_guard() {
    for (later, harmed) in [(Spanned { tail: 2.0, ..SPANNED }, true), (SPANNED, false)] {
        let mut world = server(0.12, SPANNED);
        assert_eq!(world.verdict("server"), Verdict::Accepted);
        assert_eq!(world.engine.view().in_force.len(), 1);
        world.plants[0].spans = Some(later);
        let (mut followed, mut without) = (0, 0);
        for _ in 0..7200 {
            world.run(1);
            let spans = world.engine.sampling().spans.len();
            followed += spans;
            without += usize::from(spans == 0);
        }
        assert!(
            followed > 60 && without > 3600,
            "in its probes: {followed} {without}"
        );
        let why = world
            .records
            .iter()
            .map(|r| r.reason.as_str())
            .find(|why| why.starts_with("revoked"));
        let gone = world.engine.view().in_force.is_empty();
        if harmed {
            let why = why.unwrap_or_else(|| panic!("{:#?}", world.stories));
            assert!(why.contains("server: 99 of 100 of its spans"), "{why}");
        } else {
            assert!(why.is_none() && !gone, "{why:?}");
        }
    }
}

#[test]
fn longer_spans_of_a_neighbour_are_no_gain_and_nobody_s_fault() {
    let trial = |by_others: f64| {
        let placement = custom("place", vec![cpus(0..2)]);
        let mut mover = plant("m", 0.0);
        mover.gains = vec![("place", 0.15, 2.0)];
        // Its work stays what it is.
        let beside = Plant {
            spans: Some(Spanned { by_others, ..SPANNED }),
            ..plant("beside", 0.0)
        };
        let mut world = World::with(
            vec![Box::new(Sparing(placement, "beside"))],
            vec![beside, mover],
            policy(),
            Memory::default(),
        );
        world.run(300);
        world.records[0].clone()
    };
    let record = trial(1.0);
    assert_eq!(record.verdict, Some(Verdict::Accepted), "{}", record.reason);
    assert!(
        record
            .spans
            .iter()
            .any(|s| s.workload.as_str() == "beside" && s.p99.is_some()),
        "{:?}",
        record.spans
    );
    let [beside] = record.not_excluded.as_slice() else {
        panic!("{:?}", record.not_excluded);
    };
    assert_eq!(
        (beside.workload.as_str(), beside.what),
        ("beside", LossIn::WorkPerSecond)
    );
    assert!(beside.most > 0.0 && beside.confidence == 0.95, "{beside:?}");
    let told = format!("; not excluded (95 % confidence): {beside}");
    assert!(record.reason.contains(&told), "{}", record.reason);
    let record = trial(2.0);
    assert_eq!(record.verdict, Some(Verdict::Inconclusive), "{}", record.reason);
    assert!(
        record.reason.contains("beside: 99 of 100 of its spans"),
        "{}",
        record.reason
    );
}

#[test]
fn spans_that_cannot_be_followed_are_told_and_stop_nothing() {
    let refused = Spanned {
        tail: 2.0,
        refused: true,
        ..SPANNED
    };
    let world = server(0.12, refused);
    assert_eq!(world.verdict("server"), Verdict::Accepted);
    let told = world
        .stories
        .iter()
        .filter(|s| s.contains("is not watched in this trial"));
    assert_eq!(told.count(), 1, "{:#?}", world.stories);
    let account = &world.records[0].spans[0];
    assert_eq!(
        account.unseen.as_deref(),
        Some("following it would cost 1.2 % of its CPU time")
    );
    let off = Policy {
        span_rise_max: 0.0,
        ..policy()
    };
    let spans = Some(Spanned { tail: 2.0, ..SPANNED });
    let mut world = World::new(
        vec![Plant {
            spans,
            ..plant("server", 0.12)
        }],
        off,
        Memory::default(),
    );
    world.run(900);
    assert_eq!(world.verdict("server"), Verdict::Accepted);
    assert!(world.records[0].spans.is_empty());
}

#[test]
fn a_recorded_trial_with_spans_is_decided_again_in_the_same_way() {
    let world = server(0.12, Spanned { tail: 2.0, ..SPANNED });
    let mut again = Engine::new(machine(), vec![Box::new(Try)], policy(), Memory::default());
    let mut trace = Vec::new();
    for (second, event) in world.recorded.unwrap() {
        let event: Event = serde_json::from_str(&event).unwrap();
        let commands = again.step(Nanoseconds::from_secs(second), 1_000_000 + second, event);
        trace.extend(commands.iter().map(|c| format!("{second} {c:?}")));
    }
    assert_eq!(trace, world.trace);
}

/// What [`Try`] proposes, with so much predicted.
struct Promise(f64);

impl Strategy for Promise {
    fn id(&self) -> StrategyId {
        Try.id()
    }
    fn summary(&self) -> &'static str {
        Try.summary()
    }
    fn applicable(&self, machine: &Machine) -> Result<(), String> {
        Try.applicable(machine)
    }
    fn consider(&self, seen: &Seen<'_>) -> Opinion {
        match Try.consider(seen) {
            Opinion::Propose(mut p) => {
                p.predicted = Effect {
                    estimate: 2.0 * self.0,
                    lower: self.0,
                    upper: 3.0 * self.0,
                    confidence: 0.9,
                };
                p.settling = Nanoseconds::from_millis(1500);
                Opinion::Propose(p)
            }
            other => other,
        }
    }
}

#[test]
fn a_gain_that_is_plain_to_see_is_tried_sooner_and_proven_as_well() {
    let of = |promised: f64, observe_min_s: f64, gain: f64| {
        let policy = Policy {
            observe_min_s,
            ..policy()
        };
        let plants = vec![plant("db", gain)];
        let mut world = World::with(
            vec![Box::new(Promise(promised))],
            plants,
            policy,
            Memory::default(),
        );
        world.run(900);
        let record = world.records.first().cloned().unwrap();
        let first = record.blocks.first().unwrap();
        (record.verdict.unwrap(), first.measured_from)
    };
    let (verdict, plain_at) = of(0.3, 30.0, 0.5);
    assert_eq!(verdict, Verdict::Accepted);
    let (verdict, usual_at) = of(0.05, 30.0, 0.5);
    assert_eq!(verdict, Verdict::Accepted);
    assert!(
        plain_at + Nanoseconds::from_secs(5) <= usual_at,
        "{plain_at} {usual_at}"
    );
    // Who asks for a longer history gets it, and a promise alone proves nothing.
    assert!(of(0.3, 300.0, 0.5).1 > Nanoseconds::from_secs(120));
    assert_ne!(of(0.3, 30.0, 0.0).0, Verdict::Accepted);
}

#[test]
fn an_offered_load_that_looks_like_a_busy_thread_is_judged_by_its_cpu_time_once_a_trial_has_shown_it() {
    let offered = Plant {
        offered: true,
        ..plant("offered", 0.25)
    };
    let mut world = World::new(vec![offered, plant("nothing", 0.0)], policy(), Memory::default());
    world.run(1200);
    let of = |name: &str| -> Vec<(Verdict, String)> {
        let records = world.records.iter().filter(|r| r.workload.as_str() == name);
        records
            .map(|r| (r.verdict.unwrap(), r.objective.clone()))
            .collect()
    };
    assert_eq!(
        of("offered"),
        [
            (Verdict::Rejected, "work per second".to_owned()),
            (Verdict::Accepted, "work per CPU second".to_owned())
        ]
    );
    let told = world
        .stories
        .iter()
        .any(|s| s.contains("From now on its work per CPU second judges"));
    assert!(told, "{:#?}", world.stories);
    // A saturated program that gains nothing saves no CPU time either.
    assert_eq!(of("nothing"), [(Verdict::Rejected, "work per second".to_owned())]);
}

#[test]
fn no_gain_is_rejected_a_loss_is_harmful_and_nothing_stays_changed() {
    let mut world = World::new(
        vec![plant("nothing", 0.0), plant("worse", -0.10)],
        policy(),
        Memory::default(),
    );
    world.run(3000);
    assert_eq!(world.verdict("nothing"), Verdict::Rejected);
    assert_eq!(world.verdict("worse"), Verdict::Harmful);
    assert!(world.on.is_empty(), "{:?}", world.on);
    assert_eq!(world.most_trials_at_once, 1, "one change at a time on the host");
    let trials = world.verdicts.len();
    world.run(3000);
    assert_eq!(
        world.verdicts.len(),
        trials,
        "neither is tried again within its back-off"
    );
}

#[test]
fn cpu_time_that_no_machine_has_is_not_believed() {
    let mut world = World::new(vec![plant("idle", 0.10)], policy(), Memory::default());
    world.plants[0].busy = 0.001;
    world.run(60);
    assert_eq!(world.stage("idle"), Stage::Ignored);
    // A counter wrapped.
    world.plants[0].busy = 1e9;
    world.run(1);
    world.plants[0].busy = 0.001;
    for _ in 0..30 {
        world.run(1);
        assert_eq!(world.stage("idle"), Stage::Ignored);
    }
}

#[test]
fn without_a_meter_nothing_is_touched_and_the_remedy_is_named() {
    let mut silent = plant("silent", 0.10);
    silent.metered = false;
    let mut world = World::new(vec![silent], policy(), Memory::default());
    world.run(600);
    assert!(world.verdicts.is_empty() && world.on.is_empty());
    assert_eq!(world.stage("silent"), Stage::Declined);
    let told: Vec<_> = world
        .stories
        .iter()
        .filter(|s| s.contains("progress counter"))
        .collect();
    assert_eq!(
        told.len(),
        1,
        "said once, not at every retry: {:#?}",
        world.stories
    );
}

#[test]
fn the_same_seed_gives_the_same_decisions_and_another_seed_other_coins() {
    let run = |seed| {
        let mut world = World::new(
            vec![plant("good", 0.05), plant("nothing", 0.0)],
            Policy { seed, ..policy() },
            Memory::default(),
        );
        world.run(800);
        world.trace
    };
    assert_eq!(run(1), run(1));
    assert_ne!(run(1), run(2));
}

#[test]
fn a_workload_that_ends_in_the_trial_is_forgotten_without_a_verdict_on_the_effect() {
    let mut world = World::new(vec![plant("good", 0.10)], policy(), Memory::default());
    while world.stages_missing("good", Stage::Trying) {
        world.run(1);
    }
    world.run(20);
    world.plants[0].alive = false;
    world.run(30);
    assert_eq!(world.verdict("good"), Verdict::Aborted);
    assert!(world.on.is_empty());
    assert!(world.engine.view().workloads.is_empty());
}

#[test]
fn another_program_in_the_same_process_ends_the_trial_as_its_end_does_and_is_told() {
    let mut world = World::new(vec![plant("good", 0.20)], policy(), Memory::default());
    world.recorded = Some(vec![]);
    while world.stages_missing("good", Stage::Trying) {
        world.run(1);
    }
    world.run(20);
    let followed = world.closed.len();
    world.plants[0].executions += 1;
    world.run(2);
    assert_eq!(world.verdict("good"), Verdict::Aborted);
    let reason = &world.records[0].reason;
    assert!(reason.starts_with("program replaced"), "{reason}");
    assert!(world.on.is_empty() && world.closed.len() > followed);
    let told: Vec<&String> = world
        .stories
        .iter()
        .filter(|s| s.starts_with("program replaced"))
        .collect();
    let [told] = told.as_slice() else {
        panic!("{:#?}", world.stories);
    };
    assert!(
        told.ends_with("(it was good); experiment 1 is aborted; what was changed for it is undone"),
        "{told}"
    );
    // What runs now is measured, tried and improved like any other, and goes when it is replaced in turn.
    world.run(900);
    assert_eq!(world.stage("good"), Stage::Improved);
    assert!(world.on.values().any(|(_, on)| *on));
    world.plants[0].executions += 1;
    world.run(3);
    assert!(world.on.is_empty(), "{:#?}", world.stories);
    assert!(
        !matches!(world.stage("good"), Stage::Improved | Stage::Trying),
        "{:?}",
        world.stage("good")
    );
    let mut again = Engine::new(machine(), vec![Box::new(Try)], policy(), Memory::default());
    let mut trace = Vec::new();
    for (second, event) in world.recorded.unwrap() {
        let event: Event = serde_json::from_str(&event).unwrap();
        let commands = again.step(Nanoseconds::from_secs(second), 1_000_000 + second, event);
        trace.extend(commands.iter().map(|c| format!("{second} {c:?}")));
    }
    assert_eq!(trace, world.trace);
}

#[test]
fn a_restart_is_none_and_fewer_executions_than_before_are_nobodys() {
    for (executions, started) in [(5, 2), (0, 1)] {
        let mut world = World::new(vec![plant("good", 0.20)], policy(), Memory::default());
        while world.stages_missing("good", Stage::Trying) {
            world.run(1);
        }
        world.plants[0].executions = executions;
        world.plants[0].started = started;
        world.run(900);
        assert!(world.stories.iter().all(|s| !s.contains("program replaced")));
        let first = &world.records[0].reason;
        assert_eq!(first == "the workload ended", started == 2, "{first}");
        assert_eq!(world.stage("good"), Stage::Improved);
    }
}

impl World {
    fn stages_missing(&self, name: &str, stage: Stage) -> bool {
        assert!(self.second < 5000, "never reached {stage}: {:#?}", self.stories);
        !self
            .engine
            .view()
            .workloads
            .iter()
            .any(|w| w.name.as_str() == name && w.stage == stage)
    }
}

#[test]
fn stopping_undoes_everything_unless_it_is_to_be_kept() {
    for keep in [false, true] {
        let mut world = World::new(vec![plant("good", 0.20)], policy(), Memory::default());
        while world.stages_missing("good", Stage::Improved) {
            world.run(1);
        }
        world.step(Event::Operator(OperatorRequest::Stop { keep }));
        world.run(3);
        assert!(world.finished);
        assert_eq!(world.kept.len(), usize::from(keep));
        assert_eq!(world.on.values().filter(|(_, on)| *on).count(), usize::from(keep));
    }
}

#[test]
fn an_operators_undo_wins_over_a_running_trial_and_over_a_change_in_force() {
    let mut world = World::new(vec![plant("good", 0.20)], policy(), Memory::default());
    while world.stages_missing("good", Stage::Trying) {
        world.run(1);
    }
    world.step(Event::Operator(OperatorRequest::UndoAll));
    world.run(2);
    assert_eq!(world.verdict("good"), Verdict::Aborted);
    assert!(world.on.is_empty());
    while world.stages_missing("good", Stage::Improved) {
        world.run(1);
    }
    let id = world.engine.view().in_force[0].action;
    world.step(Event::Operator(OperatorRequest::Undo(id)));
    world.run(2);
    assert!(world.on.is_empty());
    assert_eq!(world.stage("good"), Stage::Declined);
    // It is not shown as one that homeostat declined, until it is looked at anew.
    let seen = world.seen("good");
    assert!(
        seen.undone && seen.summary.starts_with("undone by a person"),
        "{seen:#?}"
    );
    for _ in 0..5000 {
        world.run(1);
        if !world.stages_missing("good", Stage::Trying) {
            break;
        }
    }
    assert_eq!(world.stage("good"), Stage::Trying);
    assert!(!world.seen("good").undone);
}

/// In a trial and in force.
#[test]
fn a_setting_that_somebody_else_took_hold_of_is_given_up_with_the_reason() {
    let mut world = World::new(vec![plant("good", 0.20)], policy(), Memory::default());
    let why = "vm.x was changed from 1 to 2 by sysctl (pid 7)";
    while world.stages_missing("good", Stage::Improved) {
        world.run(1);
    }
    let id = world.engine.view().in_force[0].action;
    world.step(Event::Operator(OperatorRequest::Yield(id, why.to_owned())));
    world.run(2);
    assert!(world.on.is_empty());
    assert_eq!(world.stage("good"), Stage::Declined);
    let view = world.engine.view();
    let told = view
        .workloads
        .iter()
        .flat_map(|w| w.decisions.iter())
        .any(|d| d.text.contains(why));
    assert!(told, "{:?}", view.workloads);
}

#[test]
fn paused_means_no_new_trial() {
    let mut world = World::new(vec![plant("good", 0.20)], policy(), Memory::default());
    world.step(Event::Operator(OperatorRequest::Pause));
    world.run(300);
    assert!(world.on.is_empty() && world.verdicts.is_empty());
    world.step(Event::Operator(OperatorRequest::Resume));
    world.run(600);
    assert_eq!(world.verdict("good"), Verdict::Accepted);
}

#[test]
fn never_in_the_configuration_is_honoured_also_when_it_comes_later() {
    let never = Policy {
        workloads: vec![WorkloadRule {
            pattern: "good*".into(),
            never: true,
            ..WorkloadRule::default()
        }],
        ..policy()
    };
    let mut world = World::new(vec![plant("good", 0.20)], never.clone(), Memory::default());
    world.run(300);
    assert!(world.on.is_empty());
    let mut world = World::new(vec![plant("good", 0.20)], policy(), Memory::default());
    while world.stages_missing("good", Stage::Improved) {
        world.run(1);
    }
    world.step(Event::Operator(OperatorRequest::Configure(Box::new(never))));
    world.run(5);
    assert!(
        world.on.is_empty(),
        "a choice that comes later withdraws what is in force"
    );
}

#[test]
fn a_rule_that_fits_one_process_after_another_is_told_once() {
    let never = Policy {
        workloads: vec![WorkloadRule {
            pattern: "job*".into(),
            never: true,
            ..WorkloadRule::default()
        }],
        ..policy()
    };
    let jobs = ["job@1", "job@2", "job@3", "job@4"].map(|id| plant(id, 0.0));
    let mut world = World::new(jobs.to_vec(), never, Memory::default());
    world.run(120);
    let told = world.stories.iter().filter(|s| s.contains("left alone")).count();
    assert_eq!(told, 1, "{:#?}", world.stories);
}

#[test]
fn advice_only_proposes_and_touches_nothing() {
    let mut world = World::new(
        vec![plant("good", 0.20)],
        Policy {
            mode: Mode::AdviseOnly,
            ..policy()
        },
        Memory::default(),
    );
    world.run(600);
    assert!(world.on.is_empty());
    let view = world.engine.view();
    assert_eq!(view.workloads[0].proposal.as_ref().unwrap().id, "try/good");
}

/// As the switch does: off undoes what is in force and what is tried, and is no refusal; on tries again.
#[test]
fn advice_only_from_now_on_undoes_everything_and_refuses_nothing() {
    let advise = || Policy {
        mode: Mode::AdviseOnly,
        ..policy()
    };
    let configure = |policy| Event::Operator(OperatorRequest::Configure(Box::new(policy)));
    let mut world = World::new(vec![plant("good", 0.20)], policy(), Memory::default());
    while world.stages_missing("good", Stage::Improved) {
        world.run(1);
    }
    assert!(!world.on.is_empty());
    world.step(configure(advise()));
    world.run(60);
    assert!(world.on.is_empty(), "{:#?}", world.stories);
    let view = world.engine.view();
    assert!(
        view.in_force.is_empty() && view.experiments.is_empty(),
        "{view:?}"
    );
    assert!(!view.workloads[0].undone, "no person refused it");
    assert!(!world.stories.iter().any(|s| s.contains("undone by a person")));
    // It goes on advising.
    world.run(900);
    assert!(world.on.is_empty());
    assert!(world.engine.view().workloads[0].proposal.is_some());
    // A trial that runs is undone, too.
    world.step(configure(policy()));
    let mut waited = 0;
    while world.on.is_empty() {
        world.run(1);
        waited += 1;
        assert!(waited < 600, "it is tried again: {:#?}", world.stories);
    }
    world.step(configure(advise()));
    world.run(60);
    assert!(world.on.is_empty() && world.engine.view().experiments.is_empty());
    world.step(configure(policy()));
    while world.stages_missing("good", Stage::Improved) {
        world.run(1);
    }
}

#[test]
fn calibration_runs_placebos_side_by_side_and_accepts_almost_none() {
    let plants = vec![plant("a", 0.0), plant("b", 0.0), plant("c", 0.0)];
    let mut world = World::new(
        plants,
        Policy {
            mode: Mode::Calibrate,
            ..policy()
        },
        Memory::default(),
    );
    world.run(6000);
    let view = world.engine.view();
    assert!(view.calibration.placebos >= 30, "{:?}", view.calibration);
    // At a level of 5 % ten false accepts of thirty would happen once in ten million runs.
    assert!(
        view.calibration.false_accepts <= view.calibration.placebos / 3,
        "{:?}",
        view.calibration
    );
    assert!(world.most_trials_at_once >= 2, "a placebo disturbs nobody");
}

#[test]
fn a_known_harm_is_not_repeated_and_a_known_gain_is_tried_sooner() {
    let prior = |verdict| Prior {
        fingerprint: Fingerprint::new("good"),
        strategy: "try".into(),
        verdict,
        effect: None,
        unix_seconds: 1_000_900,
        failures: 1,
        settling: None,
    };
    let first_trial = |memory| {
        let mut world = World::new(vec![plant("good", 0.2)], policy(), memory);
        for _ in 0..400 {
            world.run(1);
            if !world.on.is_empty() {
                return Some(world.second);
            }
        }
        None
    };
    let fresh = first_trial(Memory::default()).unwrap();
    let known = first_trial(Memory {
        priors: vec![prior(Verdict::Accepted)],
        ..Memory::default()
    })
    .unwrap();
    assert!(known < fresh, "{known} {fresh}");
    assert_eq!(
        first_trial(Memory {
            priors: vec![prior(Verdict::Harmful)],
            ..Memory::default()
        }),
        None
    );
}

#[test]
fn an_undo_that_fails_is_tried_again_and_then_reported() {
    let mut world = World::new(vec![plant("good", 0.20)], policy(), Memory::default());
    while world.stages_missing("good", Stage::Improved) {
        world.run(1);
    }
    world.fail_undo = true;
    world.step(Event::Operator(OperatorRequest::UndoAll));
    world.run(30);
    world.fail_undo = false;
    world.run(30);
    assert!(
        world.on.is_empty(),
        "succeeds once the obstacle is gone: {:#?}",
        world.stories
    );
}

#[test]
fn a_refused_change_ends_the_trial_without_harm() {
    let mut world = World::new(vec![plant("good", 0.20)], policy(), Memory::default());
    world.refuse_apply = Some(Fault {
        kind: FaultKind::Conflict,
        text: "MADV_NOHUGEPAGE".into(),
    });
    world.run(200);
    assert_eq!(world.verdict("good"), Verdict::Aborted);
    assert!(
        world.stories.iter().any(|s| s.contains("chose otherwise")),
        "{:#?}",
        world.stories
    );
    assert!(world.on.is_empty());
}

#[test]
fn not_now_puts_a_trial_off_and_does_not_end_it() {
    let mut world = World::new(vec![plant("good", 0.20)], policy(), Memory::default());
    world.not_now = 3;
    world.run(900);
    assert_eq!((world.put_off.len(), world.not_now), (3, 0));
    // Each wait is longer than the one before; passive history is gathered anew after it.
    let waits: Vec<u64> = world.put_off.windows(2).map(|w| w[1] - w[0]).collect();
    assert!(waits[0] >= 60 && waits[1] >= waits[0] + 30, "{waits:?}");
    let told: Vec<&String> = world
        .stories
        .iter()
        .filter(|s| s.contains("put off for"))
        .collect();
    assert_eq!(told.len(), 3, "{:#?}", world.stories);
    assert!(told[2].contains("3 of 5 times") && told[2].contains("a snapshot is being written"));
    let verdicts: Vec<Verdict> = world.verdicts.iter().map(|v| v.1).collect();
    assert_eq!(
        verdicts,
        [
            Verdict::Aborted,
            Verdict::Aborted,
            Verdict::Aborted,
            Verdict::Accepted
        ]
    );
    assert_eq!(world.stage("good"), Stage::Improved);
    // The bound on trials per hour is on what is begun.
    assert_eq!(world.engine.view().budget.experiments_last_hour, 4);
}

#[test]
fn not_now_for_ever_ends_in_a_refusal_that_says_how_often() {
    let mut world = World::new(vec![plant("good", 0.20)], policy(), Memory::default());
    world.not_now = u32::MAX;
    for _ in 0..2000 {
        world.run(1);
        if world.stage("good") == Stage::Declined {
            break;
        }
    }
    assert_eq!(world.put_off.len(), 6, "five times put off, then refused");
    assert_eq!(world.stage("good"), Stage::Declined);
    assert!(world.on.is_empty());
    let last = world.stories.last().unwrap();
    assert!(last.contains("5th time in a row"), "{last}");
}

#[test]
fn who_must_wait_does_not_keep_the_others_waiting() {
    let mut world = crowd(&["a", "b", "c"], 0.10);
    // Of the three that are to be changed as one, the first cannot be changed now.
    world.not_now = 1;
    world.run(900);
    assert_eq!(world.records[0].verdict, Some(Verdict::Aborted));
    let accepted: Vec<&ExperimentRecord> = world
        .records
        .iter()
        .filter(|r| r.verdict == Some(Verdict::Accepted))
        .collect();
    assert_eq!(accepted[0].workload.as_str(), "b", "{:#?}", world.stories);
    assert_eq!(accepted[0].others.len(), 1, "{:#?}", world.stories);
    for name in ["b", "c"] {
        assert_eq!(world.stage(name), Stage::Improved, "{:#?}", world.stories);
    }
    // The first has its turn later: what would be done for it is the setting that the others have by now.
    let view = world.engine.view();
    let first = view.workloads.iter().find(|w| w.name.as_str() == "a").unwrap();
    let said: Vec<&str> = first.decisions.iter().map(|d| d.text.as_str()).collect();
    assert!(said.iter().any(|t| t.contains("in force already")), "{said:#?}");
}

/// Two strategies that help, between them one that declines and one that does not help.
fn four(gain_first: f64, gain_last: f64) -> World {
    let mut plant = plant("good", 0.0);
    plant.gains = vec![
        ("places", gain_first, 2.0),
        ("useless", 0.0, 4.0),
        ("threads", gain_last, 2.0),
    ];
    let strategies: Vec<Box<dyn Strategy>> = vec![
        Box::new(custom("none", vec![])),
        Box::new(custom("places", vec![cpus(0..2)])),
        Box::new(custom("useless", vec![cpus(0..4)])),
        Box::new(Custom {
            looks: true,
            ..custom("threads", vec![cpus(0..2)])
        }),
    ];
    World::with(strategies, vec![plant], policy(), Memory::default())
}

#[test]
fn a_workload_gets_every_change_that_helps_one_after_the_other() {
    let mut world = four(0.10, 0.08);
    world.run(1500);
    let verdicts: Vec<(String, Verdict)> = world
        .records
        .iter()
        .map(|r| (r.strategy.to_string(), r.verdict.unwrap()))
        .collect();
    assert_eq!(
        verdicts,
        [
            ("places".to_owned(), Verdict::Accepted),
            ("useless".to_owned(), Verdict::Rejected),
            ("threads".to_owned(), Verdict::Accepted),
        ],
        "{:#?}",
        world.stories
    );
    assert_eq!(world.most_trials_at_once, 1);
    let view = world.engine.view();
    assert_eq!(view.in_force.len(), 2, "{:?}", view.in_force);
    assert!(view.in_force.iter().all(|c| c.effect.is_some()));
    let w = &view.workloads[0];
    assert_eq!(w.stage, Stage::Improved);
    assert!(
        w.summary.contains("places") && w.summary.contains("threads"),
        "all that is in force: {}",
        w.summary
    );
    assert!(
        w.decisions
            .iter()
            .any(|d| d.text.contains("none: nothing to gain")),
        "a reason to decline is kept when another strategy proposes: {:#?}",
        w.decisions
    );
    // The second change is measured on top of the first one, not against the machine as found.
    let last = world.records.last().unwrap().effect.unwrap();
    assert!((last.estimate - 0.08).abs() < 0.02, "{last}");
}

#[test]
fn the_undo_of_one_change_leaves_the_other_on_its_own_evidence() {
    let mut world = four(0.10, 0.08);
    world.run(1500);
    let first = world.engine.view().in_force[0].action;
    world.step(Event::Operator(OperatorRequest::Undo(first)));
    world.run(3);
    let view = world.engine.view();
    assert_eq!(world.closed.last(), Some(&first));
    assert_eq!(view.in_force.len(), 1);
    assert_eq!(view.in_force[0].strategy.as_str(), "threads");
    assert_eq!(view.workloads[0].stage, Stage::Improved);
    let rest = view.in_force[0].action;
    world.step(Event::Operator(OperatorRequest::Undo(rest)));
    world.run(3);
    assert!(world.on.is_empty());
    assert_eq!(world.stage("good"), Stage::Declined);
}

#[test]
fn a_change_that_needs_another_comes_after_it_and_goes_with_it() {
    let mut plant = plant("good", 0.0);
    plant.gains = vec![("base", 0.10, 2.0), ("upon", 0.10, 2.0)];
    let strategies: Vec<Box<dyn Strategy>> = vec![
        Box::new(Custom {
            after: Some("base"),
            needs: Some("base"),
            ..custom("upon", vec![cpus(2..4)])
        }),
        Box::new(custom("base", vec![cpus(0..2)])),
    ];
    let mut world = World::with(strategies, vec![plant], policy(), Memory::default());
    world.run(1200);
    let order: Vec<&str> = world.records.iter().map(|r| r.strategy.as_str()).collect();
    assert_eq!(order, ["base", "upon"], "{:#?}", world.stories);
    assert_eq!(world.engine.view().in_force.len(), 2);
    let base = world.engine.view().in_force[0].action;
    world.step(Event::Operator(OperatorRequest::Undo(base)));
    world.run(3);
    assert!(world.on.is_empty(), "{:#?}", world.stories);
}

#[test]
fn probes_never_overlap_a_trial_of_the_same_workload_and_resume_after_it() {
    let mut world = four(0.10, 0.08);
    let mut probed = false;
    for _ in 0..3000 {
        world.run(1);
        let view = world.engine.view();
        let switching = view
            .in_force
            .iter()
            .filter(|c| c.guard.contains("probing"))
            .count();
        assert!(
            switching + view.experiments.len() <= 1,
            "one change at a time: {view:#?}"
        );
        probed |= switching > 0;
    }
    assert!(probed, "the guards go on with their probes");
    assert_eq!(world.engine.view().in_force.len(), 2);
}

#[test]
fn a_probe_switches_the_parts_that_followed_together_with_the_tried_one() {
    let mut plant = plant("good", 0.0);
    plant.gains = vec![("parts", 0.20, 8.0)];
    let strategies: Vec<Box<dyn Strategy>> = vec![Box::new(custom(
        "parts",
        vec![memory(0..4), memory(4..6), memory(6..8)],
    ))];
    let mut world = World::with(strategies, vec![plant], policy(), Memory::default());
    let mut sizes = BTreeSet::new();
    let mut accepted = false;
    for _ in 0..1500 {
        world.run(1);
        let view = world.engine.view();
        accepted |= view.in_force.len() == 3;
        if accepted {
            sizes.insert(world.on.values().filter(|(_, on)| *on).count());
        }
    }
    assert_eq!(sizes, BTreeSet::from([0, 3]), "all of it or nothing of it");
    assert_eq!(world.stage("good"), Stage::Improved);
}

#[test]
fn a_change_that_cannot_be_switched_off_for_a_probe_leaves_with_all_its_parts() {
    let mut plant = plant("good", 0.0);
    plant.gains = vec![("parts", 0.20, 8.0)];
    let strategies: Vec<Box<dyn Strategy>> = vec![Box::new(custom(
        "parts",
        vec![memory(0..4), memory(4..6), memory(6..8)],
    ))];
    let mut world = World::with(strategies, vec![plant], policy(), Memory::default());
    for _ in 0..1500 {
        world.run(1);
        if world.engine.view().in_force.len() == 3 {
            break;
        }
    }
    assert_eq!(world.engine.view().in_force.len(), 3);
    // The next probe finds that it cannot be undone; soon after it can.
    world.fail_undo = true;
    let refused = |w: &World| w.stories.iter().any(|s| s.contains("could not be switched off"));
    for _ in 0..3000 {
        world.run(1);
        if refused(&world) {
            break;
        }
    }
    assert!(refused(&world), "{:#?}", world.stories);
    world.fail_undo = false;
    world.run(60);
    assert!(world.on.is_empty(), "nothing stays on unguarded: {:?}", world.on);
    assert!(world.engine.view().in_force.is_empty());
    assert_eq!(world.stage("good"), Stage::Declined);
}

#[test]
fn what_is_off_for_a_probe_when_homeostat_stops_is_kept_all_the_same() {
    let mut world = World::new(vec![plant("good", 0.20)], policy(), Memory::default());
    while world.stages_missing("good", Stage::Improved) {
        world.run(1);
    }
    for _ in 0..3000 {
        world.run(1);
        if world.on.values().any(|(_, on)| !*on) {
            break;
        }
    }
    assert!(world.on.values().any(|(_, on)| !*on), "a probe is under way");
    world.step(Event::Operator(OperatorRequest::Stop { keep: true }));
    world.run(10);
    assert_eq!(world.kept.len(), 1);
    assert!(world.on.values().all(|(_, on)| *on) && world.finished);
}

#[test]
fn a_trial_ends_when_nothing_can_be_seen_any_more() {
    let mut world = World::new(vec![plant("good", 0.20)], policy(), Memory::default());
    while world.stages_missing("good", Stage::Trying) {
        world.run(1);
    }
    for _ in 0..3700 {
        world.second += 1;
        world.step(Event::Unseen);
        for event in std::mem::take(&mut world.pending) {
            world.step(event);
        }
    }
    assert_eq!(world.verdict("good"), Verdict::Aborted);
    assert!(world.on.is_empty(), "{:?}", world.on);
}

/// A workload with two changes of the same effector in force; the later one found what the earlier one had set.
fn twice() -> (World, [ActionId; 2]) {
    let mut plant = plant("good", 0.0);
    plant.gains = vec![("places", 0.30, 6.0)];
    struct Twice;
    impl Strategy for Twice {
        fn id(&self) -> StrategyId {
            "places".into()
        }
        fn summary(&self) -> &'static str {
            "test"
        }
        fn applicable(&self, _: &Machine) -> Result<(), String> {
            Ok(())
        }
        fn consider(&self, seen: &Seen<'_>) -> Opinion {
            let part = if seen.held.is_empty() {
                cpus(0..2)
            } else {
                cpus(0..4)
            };
            custom("places", vec![part]).consider(seen)
        }
    }
    let mut world = World::with(vec![Box::new(Twice)], vec![plant], policy(), Memory::default());
    world.slow.insert("places", 2);
    let both = |world: &World| world.engine.view().in_force.len() == 2;
    world.run_until(4000, both);
    assert!(both(&world), "asked again after a while: {:#?}", world.stories);
    let in_force = world.engine.view().in_force;
    let ids = [in_force[0].action, in_force[1].action];
    (world, ids)
}

#[test]
fn what_lies_over_another_change_is_undone_first() {
    let (mut world, ids) = twice();
    // Each has probes of its own. The first never goes without the second, which found what the first had set.
    let (mut alone, mut together) = (0, 0);
    for _ in 0..6 * 3600 {
        world.run(1);
        let is_on = |id: ActionId| world.on.get(&id).map(|(_, on)| *on);
        match (is_on(ids[0]), is_on(ids[1])) {
            (Some(true), Some(false)) => alone += 1,
            (Some(false), Some(false)) => together += 1,
            (Some(true), Some(true)) => {}
            other => panic!("{other:?}"),
        }
    }
    assert!(alone > 0 && together > 0, "{alone} and {together} s");
    world.step(Event::Operator(OperatorRequest::Undo(ids[0])));
    world.run(10);
    assert!(world.on.is_empty());
    assert_eq!(world.closed, [ids[1], ids[0]], "newest first");
}

#[test]
fn settings_in_different_files_have_nothing_to_do_with_each_other() {
    let mut plant = plant("good", 0.0);
    plant.gains = vec![("setting", 0.40, 2.0)];
    let one = |id, file: &str| {
        Box::new(Custom {
            effector: "setting",
            ..custom(id, vec![Target::Files(vec![file.to_owned()])])
        })
    };
    let strategies: Vec<Box<dyn Strategy>> = vec![one("a", "/proc/sys/a"), one("b", "/proc/sys/b")];
    let mut world = World::with(strategies, vec![plant], policy(), Memory::default());
    world.run_until(4000, |world| world.engine.view().in_force.len() == 2);
    let in_force = world.engine.view().in_force;
    let [first, second] = [in_force[0].action, in_force[1].action];
    // The probes of the first leave the other alone.
    let mut alone = 0;
    for _ in 0..3600 {
        world.run(1);
        let off = [first, second].map(|id| !world.on[&id].1);
        assert!(!(off[0] && off[1]));
        alone += usize::from(off[0]);
    }
    assert!(alone > 0);
    world.step(Event::Operator(OperatorRequest::Undo(first)));
    world.run(60);
    assert_eq!(world.closed, [first], "{:#?}", world.stories);
    assert!(world.on[&second].1);
}

#[test]
fn a_place_whose_memory_cannot_go_back_yet_does_not_keep_the_threads_in_the_place_below_it() {
    let (mut world, ids) = twice();
    world.stuck = Some(ids[1]);
    world.step(Event::Operator(OperatorRequest::Undo(ids[0])));
    // The effector knows whether the threads of the later one are back; here they are.
    world.run(8);
    assert_eq!(world.closed, [ids[0]], "{:#?}", world.stories);
    assert!(world.on.contains_key(&ids[1]), "it stays owed");
    world.stuck = None;
    world.run(120);
    assert_eq!(world.closed, ids, "{:#?}", world.stories);
}

#[test]
fn pages_that_a_later_placement_took_along_go_back_after_it_and_are_not_probed_under_it() {
    let mut plant = plant("good", 0.0);
    plant.gains = vec![
        ("page_placement", 0.20, Bytes::from_mib(100).0 as f64),
        ("thread_placement", 0.20, 2.0),
    ];
    let moved = custom("page_placement", vec![pages(100)]);
    let placed = Custom {
        after: Some("page_placement"),
        with_memory: true,
        ..custom("thread_placement", vec![cpus(0..2)])
    };
    let mut world = World::with(
        vec![Box::new(moved), Box::new(placed)],
        vec![plant],
        policy(),
        Memory::default(),
    );
    world.run_until(4000, |world| world.engine.view().in_force.len() == 2);
    let in_force = world.engine.view().in_force;
    let [below, above] = [in_force[0].action, in_force[1].action];
    assert_eq!(world.actions[&below].effector.as_str(), "page_placement");
    let mut probed = 0;
    for _ in 0..6 * 3600 {
        world.run(1);
        assert!(
            world.on[&below].1,
            "its pages lie where the later one brought them"
        );
        probed += usize::from(!world.on[&above].1);
    }
    assert!(probed > 0);
    // However long the later one cannot go.
    world.stuck = Some(above);
    world.step(Event::Operator(OperatorRequest::Undo(below)));
    world.run(3000);
    assert_eq!(world.closed, [], "{:#?}", world.stories);
    let told = world
        .stories
        .iter()
        .filter(|s| s.contains("could not be undone after"));
    assert!((2..10).contains(&told.count()), "{:#?}", world.stories);
    world.stuck = None;
    world.run(120);
    assert_eq!(world.closed, [above, below]);
}

/// Pages of one program are moved in four parts to that node each; the trial is on its way when all are made.
fn all_parts_made(nodes: [u32; 4]) -> (World, Vec<ActionId>) {
    let mut plant = plant("far", 0.0);
    plant.gains = vec![("pages", 0.0, Bytes::from_mib(1000).0 as f64)];
    let parts: Vec<Target> = [100, 150, 250, 500]
        .into_iter()
        .zip(nodes)
        .map(|(mib, node)| {
            Target::Pages(PageMove {
                node: NodeId(node),
                bytes: Bytes::from_mib(mib),
                shared: false,
            })
        })
        .collect();
    let strategies: Vec<Box<dyn Strategy>> = vec![Box::new(Custom {
        reversible: false,
        ..custom("pages", parts)
    })];
    let mut world = World::with(strategies, vec![plant], policy(), Memory::default());
    world.run_until(3000, |world| world.on.len() == 4);
    let parts: Vec<ActionId> = world.on.keys().copied().collect();
    assert_eq!(parts.len(), 4, "{:#?}", world.stories);
    assert!(world.records.is_empty(), "the trial is not over");
    (world, parts)
}

#[test]
fn parts_of_a_rollout_that_do_not_touch_each_other_go_although_one_of_them_cannot() {
    let (mut world, parts) = all_parts_made([0; 4]);
    world.stuck = Some(parts[3]);
    world.step(Event::Operator(OperatorRequest::Pause));
    world.run(5);
    assert_eq!(
        world.closed,
        [parts[2], parts[1], parts[0]],
        "{:#?}",
        world.stories
    );
    world.run(120);
    assert_eq!(world.verdict("far"), Verdict::Aborted, "{:#?}", world.stories);
    assert!(world.engine.view().experiments.is_empty());
    world.stuck = None;
    world.run(120);
    assert!(world.on.is_empty());
}

#[test]
fn a_rollout_whose_last_part_cannot_be_undone_ends_and_what_lies_under_that_part_waits_for_it() {
    let (mut world, parts) = all_parts_made([0, 1, 0, 1]);
    world.stuck = Some(parts[3]);
    world.step(Event::Operator(OperatorRequest::Pause));
    world.run(120);
    // The first and the third are to one node, the second and the last to another: each lies over the one before.
    assert_eq!(world.closed, [], "{:#?}", world.stories);
    assert_eq!(world.verdict("far"), Verdict::Aborted, "{:#?}", world.stories);
    assert!(
        world.engine.view().experiments.is_empty(),
        "others have their turn"
    );
    // A stop does not wait for it either: it stays in the journal.
    world.step(Event::Operator(OperatorRequest::Stop { keep: false }));
    world.run(120);
    assert!(world.finished, "{:#?}", world.stories);
    assert_eq!(world.closed, []);
    world.stuck = None;
    world.run(120);
    assert_eq!(world.closed, [parts[3], parts[2], parts[1], parts[0]]);
}

#[test]
fn what_reaches_others_goes_when_its_program_has_done_nothing_for_a_while() {
    for reaches in [true, false] {
        let strategy = Custom {
            reaches,
            ..custom("common", vec![cpus(0..2)])
        };
        let mut plant = plant("good", 0.0);
        plant.gains = vec![("common", 0.20, 2.0)];
        let mut world = World::with(vec![Box::new(strategy)], vec![plant], policy(), Memory::default());
        world.run(400);
        assert_eq!(world.verdict("good"), Verdict::Accepted);
        world.plants[0].busy = 0.0;
        world.run(250);
        assert_eq!(world.on.len(), 1, "a pause between two jobs");
        world.plants[0].busy = 1.0;
        world.run(60);
        world.plants[0].busy = 0.0;
        world.run(280);
        assert_eq!(world.on.len(), 1, "it worked in between");
        world.run(120);
        assert_eq!(world.on.is_empty(), reaches, "{:#?}", world.stories);
    }
}

#[test]
fn what_reaches_others_goes_when_a_program_works_that_a_person_excluded_and_is_not_tried_beside_it() {
    let strategy = |reaches| Custom {
        reaches,
        ..custom("common", vec![cpus(0..2)])
    };
    let gains = Plant {
        gains: vec![("common", 0.20, 2.0)],
        ..plant("good", 0.0)
    };
    let private = |alive| Plant {
        alive,
        excluded: true,
        ..plant("private", 0.0)
    };
    // It comes after the change was accepted.
    let mut world = World::with(
        vec![Box::new(strategy(true))],
        vec![gains.clone(), private(false)],
        policy(),
        Memory::default(),
    );
    world.run(400);
    assert_eq!(world.verdict("good"), Verdict::Accepted);
    world.plants[1].alive = true;
    world.run(15);
    assert_eq!(world.on.len(), 1, "that may be over in a moment");
    world.run(60);
    assert!(world.on.is_empty(), "{:#?}", world.stories);
    let told = |world: &World, what: &str| world.stories.iter().any(|s| s.contains(what));
    assert!(told(&world, "HOMEOSTAT=never"), "{:#?}", world.stories);
    // It comes in the trial.
    let mut world = World::with(
        vec![Box::new(strategy(true))],
        vec![gains.clone(), private(false)],
        policy(),
        Memory::default(),
    );
    while world.stages_missing("good", Stage::Trying) {
        world.run(1);
    }
    world.plants[1].alive = true;
    world.run(60);
    assert_eq!(world.verdict("good"), Verdict::Aborted, "{:#?}", world.stories);
    assert!(world.on.is_empty());
    // It is there from the beginning.
    for reaches in [true, false] {
        let mut world = World::with(
            vec![Box::new(strategy(reaches))],
            vec![gains.clone(), private(true)],
            policy(),
            Memory::default(),
        );
        world.run(1200);
        assert_eq!(world.records.is_empty(), reaches, "{:#?}", world.stories);
        assert_eq!(
            told(&world, "this would reach it, too"),
            reaches,
            "{:#?}",
            world.stories
        );
        // It ends, and five minutes later what it kept from being tried is tried.
        world.plants[1].alive = false;
        world.run(4000);
        assert_eq!(world.stage("good"), Stage::Improved, "{:#?}", world.stories);
    }
}

/// Seconds from now in which some change is off.
fn seconds_off(world: &mut World, seconds: u64) -> usize {
    let is_off = |world: &World| world.on.values().any(|(_, on)| !on);
    (0..seconds)
        .filter(|_| {
            world.run(1);
            is_off(world)
        })
        .count()
}

#[test]
fn a_probe_comes_soon_when_the_program_works_in_another_way() {
    let gap = |busy: f64| {
        let mut world = World::new(vec![plant("good", 0.20)], policy(), Memory::default());
        for _ in 0..40_000 {
            if world.stories.iter().any(|s| s.contains("probation passed")) {
                break;
            }
            world.run(1);
        }
        assert!(world.stories.iter().any(|s| s.contains("probation passed")));
        // The level of the way in which it works now is taken, and the last probe is a while ago.
        assert_eq!(seconds_off(&mut world, 300), 0, "the next is half an hour away");
        world.plants[0].busy = busy;
        seconds_off(&mut world, 700)
    };
    assert_eq!(gap(1.0), 0);
    assert_eq!(gap(0.95), 0, "that much is noise");
    assert!(gap(0.5) > 0);
}

#[test]
fn while_a_loss_is_suspected_nothing_else_begins_and_what_it_cost_is_paid_from_the_days_budget() {
    let late = Plant {
        alive: false,
        ..plant("late", 0.20)
    };
    let mut world = World::new(vec![plant("good", 0.20), late], policy(), Memory::default());
    while world.stages_missing("good", Stage::Improved) {
        world.run(1);
    }
    let budget = |world: &World| world.engine.view().budget.harm_exposure_day;
    let before = budget(&world);
    // What gained loses a tenth from now on. The other one comes once a pair has shown that.
    world.plants[0].gain = -0.10;
    while seconds_off(&mut world, 1) == 0 {}
    while seconds_off(&mut world, 1) > 0 {}
    world.run(60);
    assert_eq!(world.stage("good"), Stage::Improved, "one pair is no proof");
    world.plants[1].alive = true;
    let mut waited = 0;
    while world.stage("good") == Stage::Improved && waited < 7200 {
        assert!(
            world.stages_missing("late", Stage::Trying),
            "{:#?}",
            world.stories
        );
        world.run(1);
        waited += 1;
    }
    let taken_back = world.stories.iter().any(|s| s.starts_with("revoked"));
    assert!(taken_back, "{:#?}", world.stories);
    let cost = budget(&world) - before;
    assert!(
        (1.0..=100.0 * 0.10 * 3.0 * f64::from(waited + 300)).contains(&cost),
        "{cost} %s in {waited} s"
    );
    world.run(3600);
    assert_eq!(world.stage("late"), Stage::Improved, "{:#?}", world.stories);
}

#[test]
fn the_price_of_a_trial_is_shown_while_it_runs() {
    let mut world = World::new(vec![plant("good", 0.20)], policy(), Memory::default());
    world.price = Progress {
        stalled: Nanoseconds::from_secs(3),
        bloat: Bytes(4096),
        ..Progress::default()
    };
    while world.engine.view().experiments.iter().all(|e| e.stalled_s == 0.0) {
        world.run(1);
    }
    // No block is measured yet: 3 s of standstill of the thread of this program are all that it has cost.
    let view = world.engine.view();
    let e = &view.experiments[0];
    assert!((e.blocks, e.stalled_s, e.bloat_bytes) == (0, 3.0, 4096), "{e:#?}");
    assert!(e.lost_work_s > 0.0 && e.lost_work_s <= 3.0, "{e:#?}");
    assert!(
        (view.budget.harm_exposure_day - e.lost_work_s * 100.0).abs() < 1e-9,
        "{:?}",
        view.budget
    );
    let (first, cost) = (e.own_cpu_s, e.lost_work_s * 100.0);
    world.run(10);
    assert!(world.engine.view().experiments[0].own_cpu_s > first);
    // The verdict takes it over: nothing counts twice.
    while world.stages_missing("good", Stage::Improved) {
        world.run(1);
    }
    let view = world.engine.view();
    assert!(view.experiments.is_empty());
    let record = world.records.last().unwrap();
    assert!((view.budget.harm_exposure_day - record.harm_exposure).abs() < 1e-6);
    assert!(record.harm_exposure >= cost, "{}", record.harm_exposure);
}

#[test]
fn a_change_is_in_force_since_its_verdict() {
    let mut world = World::new(vec![plant("good", 0.20)], policy(), Memory::default());
    while world.stages_missing("good", Stage::Trying) {
        world.run(1);
    }
    world.run(10);
    let in_trial = world.engine.view().at_unix;
    while world.stages_missing("good", Stage::Improved) {
        world.run(1);
    }
    let view = world.engine.view();
    assert_eq!(view.in_force[0].since_unix, view.outcomes[0].ended_unix);
    assert!(view.in_force[0].since_unix > in_trial);
}

#[test]
fn what_earlier_days_cost_is_carried_over_a_restart() {
    let spent = Memory {
        exposure: 30_000.0,
        ..Memory::default()
    };
    let mut world = World::new(vec![plant("good", 0.20)], policy(), spent);
    world.run(600);
    assert!((world.engine.view().budget.harm_exposure_day - 30_000.0).abs() < 1.0);
    assert!(
        world.records.is_empty() && world.on.is_empty(),
        "no trial: {:#?}",
        world.stories
    );
    assert!(
        world
            .stories
            .iter()
            .any(|s| s.contains("of lost work, and 3.3 min are allowed"))
    );
}

#[test]
fn more_room_for_threads_that_wait_is_judged_by_the_work_per_second() {
    let of = |makes_room: bool| {
        let strategy = Custom {
            makes_room,
            ..custom("room", vec![cpus(0..2)])
        };
        let crowded = Plant {
            waits: 0.6,
            gains: vec![("room", 0.20, 2.0)],
            ..plant("crowded", 0.0)
        };
        let mut world = World::with(
            vec![Box::new(strategy)],
            vec![crowded],
            policy(),
            Memory::default(),
        );
        world.run(600);
        world.records[0].objective.clone()
    };
    assert_eq!(of(true), "work per second");
    assert_eq!(of(false), "work per CPU second");
}

/// A workload whose memory can be moved in four parts, but not back and forth.
fn one_way(gain: f64, noise: f64, seconds: u64, seed: u64) -> World {
    let mut plant = plant("far", 0.0);
    plant.gains = vec![("pages", gain, Bytes::from_mib(1000).0 as f64)];
    plant.noise = noise;
    let strategies: Vec<Box<dyn Strategy>> = vec![Box::new(Custom {
        reversible: false,
        ..custom("pages", vec![pages(100), pages(150), pages(250), pages(500)])
    })];
    let policy = Policy { seed, ..policy() };
    let mut world = World::with(strategies, vec![plant], policy, Memory::default());
    world.slow.insert("pages", seconds);
    world
}

/// The same beside a neighbour that loses this share of its work when all of it is moved, and whose long spans get so many
/// times as long.
fn one_way_beside(loss: f64, by_others: f64, seed: u64) -> World {
    let mut world = one_way(0.40, 0.01, 2, seed);
    world.plants.push(Plant {
        spans: Some(Spanned { by_others, ..SPANNED }),
        ..plant("beside", 0.0)
    });
    let strategy = Custom {
        reversible: false,
        ..custom("pages", vec![pages(100), pages(150), pages(250), pages(500)])
    };
    let policy = Policy { seed, ..policy() };
    let strategies: Vec<Box<dyn Strategy>> = vec![Box::new(Sparing(strategy, "beside"))];
    let mut world = World::with(strategies, world.plants, policy, Memory::default());
    world.slow.insert("pages", 2);
    world.hurts = vec![("pages", "beside", loss)];
    world.run_until(1500, |w| !w.records.is_empty());
    world
}

#[test]
fn a_one_way_change_is_not_accepted_at_the_cost_of_a_neighbour() {
    for seed in [42, 7, 8] {
        let record = one_way_beside(0.08, 1.0, seed).records[0].clone();
        assert_eq!(record.kind, ExperimentKind::StagedRollout);
        assert_eq!(record.verdict, Some(Verdict::Inconclusive), "{}", record.reason);
        assert!(
            record.reason.contains("beside lost") && record.reason.contains("work per second"),
            "{}",
            record.reason
        );
    }
}

#[test]
fn a_one_way_change_is_not_accepted_where_a_neighbour_answers_later() {
    let record = one_way_beside(0.0, 2.0, 42).records[0].clone();
    assert_eq!(record.verdict, Some(Verdict::Inconclusive), "{}", record.reason);
    assert!(
        record.reason.contains("beside: 99 of 100 of its spans"),
        "{}",
        record.reason
    );
    assert!(record.not_excluded.is_empty(), "only of what stays");
}

#[test]
fn a_neighbour_that_loses_nothing_stops_no_one_way_change() {
    let mut several = 0;
    for seed in 1..=20 {
        let record = one_way_beside(0.0, 1.0, seed).records[0].clone();
        assert_eq!(
            record.verdict,
            Some(Verdict::Accepted),
            "{seed}: {}",
            record.reason
        );
        // What is not proven is not excluded; the sentence names the largest.
        let not_excluded = &record.not_excluded;
        assert!(
            not_excluded.is_sorted_by(|a, b| a.most >= b.most),
            "{not_excluded:?}"
        );
        let told = format!("; not excluded (95 % confidence): {}", not_excluded[0]);
        assert!(record.reason.ends_with(&told), "{}", record.reason);
        several += usize::from(not_excluded.len() > 1);
    }
    assert!(several > 0);
}

#[test]
fn a_one_way_change_is_rolled_out_in_stages_whose_onsets_are_journalled_first() {
    let mut world = one_way(0.40, 0.01, 2, 42);
    world.run(900);
    let record = world.records[0].clone();
    assert_eq!(record.kind, ExperimentKind::StagedRollout);
    assert_eq!(record.verdict, Some(Verdict::Accepted), "{:#?}", world.stories);
    let minutes = record.ended_unix - record.started_unix;
    assert!(minutes <= 600, "a large gain takes {minutes} s to prove");
    world.run(60);
    let view = world.engine.view();
    assert_eq!(
        view.in_force.len(),
        4,
        "all parts are listed: {:?}",
        view.in_force
    );
    assert!(view.in_force.iter().all(|c| c.guard.contains("one-way")));
    // The onset slot of every stage was written down before its part was made, and the part came in that slot.
    for (stage, (_, block, on)) in world.coins.iter().enumerate() {
        assert!(*on && *block as usize / 16 == stage && (1..=8).contains(&(block % 16)));
        let first_on = record
            .blocks
            .iter()
            .find(|b| b.index as usize / 16 == stage && b.on)
            .unwrap();
        assert_eq!(first_on.index % 16, block % 16);
        let noted = world
            .trace
            .iter()
            .position(|l| l.contains(&format!("block: {block},")));
        let made = world
            .trace
            .iter()
            .position(|l| l.contains("Apply(Action") && l.contains(&format!("part {} of", stage + 1)));
        assert!(noted.unwrap() < made.unwrap());
    }
    let effect = record.effect.unwrap();
    assert!(effect.estimate > 0.02, "{effect}");
    // Nothing is ever switched off for a probe.
    let undone = world
        .trace
        .iter()
        .filter(|l| l.contains("Switch(") && l.contains("Undo"))
        .count();
    world.run(4000);
    assert_eq!(undone, 0);
    assert!(world.on.values().all(|(_, on)| *on));
    // An operator's undo of the first part takes all of it, newest first.
    let ids: Vec<ActionId> = world.engine.view().in_force.iter().map(|c| c.action).collect();
    world.step(Event::Operator(OperatorRequest::Undo(ids[0])));
    world.run(20);
    assert!(world.on.is_empty());
    assert_eq!(world.closed, ids.iter().rev().copied().collect::<Vec<_>>());
}

#[test]
fn a_one_way_change_without_effect_is_moved_back_and_hardly_ever_accepted() {
    let mut accepted = 0;
    for seed in 0..20 {
        let mut world = one_way(0.0, 0.02, 2, seed);
        world.random ^= seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        for _ in 0..5000 {
            world.run(1);
            if !world.records.is_empty() {
                break;
            }
        }
        let verdict = world.records[0].verdict.unwrap();
        accepted += u32::from(verdict == Verdict::Accepted);
        if verdict != Verdict::Accepted {
            assert!(world.on.is_empty(), "{verdict}: {:?}", world.on);
            let mut newest_first = world.closed.clone();
            newest_first.sort_by_key(|a| std::cmp::Reverse(*a));
            assert_eq!(world.closed, newest_first);
        }
    }
    // The level is 0.001: one of twenty would happen once in fifty runs, two never.
    assert!(accepted <= 1, "{accepted} of 20");
}

#[test]
fn a_one_way_change_that_hurts_is_stopped_before_all_of_it_is_made() {
    let mut world = one_way(-0.40, 0.01, 2, 42);
    for _ in 0..2000 {
        world.run(1);
        if !world.records.is_empty() {
            break;
        }
    }
    let record = world.records[0].clone();
    assert!(
        matches!(
            record.verdict,
            Some(Verdict::Harmful | Verdict::Rejected | Verdict::Aborted)
        ),
        "{record:?}"
    );
    assert!(world.on.is_empty());
    assert!(world.closed.len() < 4, "stopped early: {:?}", world.closed);
    assert!(record.harm_exposure > 0.0);
    world.run(3000);
    assert_eq!(world.records.len(), 1, "not tried again within its back-off");
}

#[test]
fn a_gain_that_the_stages_cannot_prove_is_decided_by_round_trips_of_the_last_part() {
    let mut world = one_way(0.05, 0.01, 2, 42);
    world.run(3000);
    let trips: Vec<&(u64, u32, bool)> = world.coins.iter().filter(|c| c.1 >= 1024).collect();
    assert!(trips.len() >= 6, "{:?} {:#?}", world.coins, world.stories);
    assert_eq!(
        world.records[0].verdict,
        Some(Verdict::Accepted),
        "{:#?}",
        world.stories
    );
    assert_eq!(world.engine.view().in_force.len(), 4);
    assert!(
        world.on.values().all(|(_, on)| *on),
        "all parts are on in the end"
    );
}

#[test]
fn a_rollout_that_is_interrupted_is_undone_part_by_part_in_reverse() {
    for stop in [false, true] {
        let mut world = one_way(0.40, 0.03, 3, 42);
        while world.on.len() < 2 {
            world.run(1);
            assert!(world.second < 5000, "{:#?}", world.stories);
        }
        let made: Vec<ActionId> = world.on.keys().rev().copied().collect();
        world.step(Event::Operator(if stop {
            OperatorRequest::Stop { keep: true }
        } else {
            OperatorRequest::Pause
        }));
        world.run(30);
        assert!(world.on.is_empty(), "what is not proven is not kept");
        assert_eq!(world.closed, made);
        assert_eq!(world.records[0].verdict, Some(Verdict::Aborted));
        assert_eq!(world.finished, stop);
    }
}

#[test]
fn a_part_that_takes_long_delays_the_next_stage_and_not_the_verdict() {
    let mut world = one_way(0.60, 0.01, 12, 42);
    world.run(1500);
    assert_eq!(
        world.records[0].verdict,
        Some(Verdict::Accepted),
        "{:#?}",
        world.stories
    );
}

#[test]
fn a_program_that_pays_half_while_the_change_is_made_is_not_let_go() {
    // An effector's pace stops it for half of the time; that ends when the change is made.
    let mut plant = plant("good", 0.0);
    plant.gains = vec![("slow", -0.50, 2.0)];
    let strategies: Vec<Box<dyn Strategy>> = vec![Box::new(custom("slow", vec![cpus(0..2)]))];
    let mut world = World::with(strategies, vec![plant], policy(), Memory::default());
    world.slow.insert("slow", 100);
    while world.stages_missing("good", Stage::Trying) {
        world.run(1);
    }
    world.run(90);
    assert!(
        !world.trace.iter().any(|l| l.contains("Switch(")),
        "{:#?}",
        world.stories
    );
}

#[test]
fn a_standstill_while_the_change_is_made_ends_the_trial() {
    let mut plant = plant("good", 0.0);
    plant.gains = vec![("slow", -0.90, 2.0)];
    let strategies: Vec<Box<dyn Strategy>> = vec![Box::new(custom("slow", vec![cpus(0..2)]))];
    let mut world = World::with(strategies, vec![plant], policy(), Memory::default());
    world.slow.insert("slow", 300);
    world.run(300);
    assert_eq!(
        world.verdicts.len(),
        0,
        "its undo takes as long: {:?}",
        world.verdicts
    );
    let undone = world
        .trace
        .iter()
        .find(|l| l.contains("Switch(") && l.contains("Undo"));
    assert!(undone.is_some(), "{:#?}", world.stories);
    world.run(400);
    assert_eq!(world.verdict("good"), Verdict::Aborted);
    assert!(
        world
            .stories
            .iter()
            .any(|s| s.contains("while the change was being made")),
        "{:#?}",
        world.stories
    );
}

#[test]
fn many_guards_do_not_keep_proposals_from_their_turn() {
    let names = ["a", "b", "c", "d", "e", "f", "g", "h", "i", "j", "k", "l"];
    let plants = names.iter().map(|n| plant(n, 0.20)).collect();
    let policy = Policy {
        detail_workloads_max: 64,
        experiments_per_hour_max: 100,
        ..policy()
    };
    let mut world = World::new(plants, policy, Memory::default());
    world.run(3000);
    assert_eq!(world.engine.view().in_force.len(), names.len());
    let starts: Vec<u64> = world.records.iter().map(|r| r.started_unix).collect();
    let longest = starts.windows(2).map(|w| w[1] - w[0]).max().unwrap();
    assert!(longest <= 240, "{longest} s between two trials: {starts:?}");
}

#[test]
fn a_slow_one_way_change_ramps_up_and_is_decided_by_the_largest_part_that_can_go_back_in_time() {
    // All of it takes 150 s: the last part 75 s, too long for a washout; the one before 38 s.
    let mut world = one_way(0.10, 0.01, 0, 42);
    world.slow.clear();
    world.paced.insert("pages", 150);
    world.run(2400);
    assert_eq!(
        world.records[0].verdict,
        Some(Verdict::Accepted),
        "{:#?}",
        world.stories
    );
    let ids: Vec<ActionId> = world.actions.keys().copied().collect();
    let switched: BTreeSet<ActionId> = world
        .trace
        .iter()
        .filter(|l| l.contains("Switch(") && l.contains("Undo"))
        .filter_map(|l| {
            ids.iter()
                .find(|id| l.contains(&format!("ActionId({}),", id.0)))
                .copied()
        })
        .collect();
    assert_eq!(switched, BTreeSet::from([ids[2]]), "the third of {ids:?}");
    assert!(
        world.on.values().all(|(_, on)| *on),
        "all parts are on in the end"
    );
}

/// Programs that stand in each other's way: what is gained is gained by all, when all are placed.
fn crowd(names: &[&'static str], gain: f64) -> World {
    let placement = Custom {
        joint: true,
        looks: true,
        ..custom("place", vec![cpus(0..2)])
    };
    let plants = names.iter().map(|name| plant(name, 0.0)).collect();
    let mut world = World::with(vec![Box::new(placement)], plants, policy(), Memory::default());
    world.common.insert("place", gain);
    world
}

#[test]
fn changes_that_act_on_each_other_are_tried_as_one_and_guarded_as_one() {
    let mut world = crowd(&["a", "b", "c"], 0.10);
    world.run(400);
    assert_eq!(world.records.len(), 1, "one trial for all: {:#?}", world.stories);
    let record = world.records[0].clone();
    assert_eq!(record.verdict, Some(Verdict::Accepted), "{}", record.reason);
    let others: Vec<&str> = record.others.iter().map(|(w, _)| w.as_str()).collect();
    assert_eq!((record.workload.as_str(), others), ("a", vec!["b", "c"]));
    let gain = record.effect.unwrap().estimate;
    assert!((0.08..0.12).contains(&gain), "the gain of all: {gain}");
    let level = record.off_level.unwrap();
    assert!(level.change.abs() < 0.02, "of all, by the same score: {level:?}");
    assert_eq!(record.members.len(), 3, "and of each by itself");
    for m in &record.members {
        let own = m.effect.unwrap().estimate;
        assert_eq!(m.verdict, Verdict::Accepted);
        assert!((0.05..0.15).contains(&own), "{m:?}");
    }
    for name in ["a", "b", "c"] {
        assert_eq!(world.stage(name), Stage::Improved);
    }
    // A probe switches all three, in reverse order, and its coin is journalled before.
    world.trace.clear();
    let begun = world.coins.len();
    world.run(3600);
    let (experiment, block, _) = world.coins[begun];
    assert_eq!(experiment, record.id.0);
    assert!(block >= 1 << 20, "the coins of probes have numbers of their own");
    assert!(
        world.coins[begun..]
            .chunks_exact(2)
            .all(|pair| pair[0].2 != pair[1].2)
    );
    let first: Vec<&String> = world
        .trace
        .iter()
        .filter(|t| t.contains("NoteCoin") || t.contains("Switch"))
        .take(4)
        .collect();
    let off = |t: &str| t.contains("Undo");
    assert!(first[0].contains("NoteCoin"), "{first:?}");
    let undone: Vec<bool> = first[1..].iter().map(|t| off(t)).collect();
    assert!(undone == [true; 3] || first[1].contains("NoteCoin"), "{first:?}");
    assert_eq!(
        world.on.values().filter(|(_, on)| *on).count(),
        3,
        "all are on again"
    );
}

#[test]
fn owners_are_tried_apart_unless_root_makes_them_one() {
    let of = |owners: [Owner; 3], one_owner: Vec<Vec<String>>| {
        let mut world = crowd(&["a", "b", "c"], 0.10);
        for (plant, owner) in world.plants.iter_mut().zip(owners) {
            plant.owner = owner;
        }
        let policy = Policy {
            one_owner,
            ..policy()
        };
        world.step(Event::Operator(OperatorRequest::Configure(Box::new(policy))));
        world.run(400);
        let mut together: Vec<Vec<String>> = world
            .records
            .iter()
            .map(|r| {
                let others = r.others.iter().map(|(w, _)| w.to_string());
                std::iter::once(r.workload.to_string()).chain(others).collect()
            })
            .collect();
        together.sort();
        together.dedup();
        together
    };
    let user = |n: u32| Owner::User(n);
    let names = |list: &[&str]| list.iter().map(|n| (*n).to_owned()).collect::<Vec<_>>();
    let machine = || Owner::Machine;
    assert_eq!(
        of([machine(), machine(), machine()], vec![]),
        [names(&["a", "b", "c"])]
    );
    assert_eq!(of([user(1), user(1), user(1)], vec![]), [names(&["a", "b", "c"])]);
    let apart = of([machine(), user(1), user(1)], vec![]);
    assert!(
        !apart.is_empty()
            && apart
                .iter()
                .all(|t| *t == names(&["a"]) || *t == names(&["b", "c"])),
        "{apart:?}"
    );
    let apart = of([user(1), user(2), user(3)], vec![]);
    assert!(apart.iter().all(|t| t.len() == 1), "{apart:?}");
    let joined = of([machine(), user(1), user(2)], vec![vec!["*".into()]]);
    assert_eq!(joined, [names(&["a", "b", "c"])]);
}

#[test]
fn settings_of_the_host_are_not_changed_for_a_users_sake() {
    let of = |owner: Owner| {
        let setting = custom("setting", vec![Target::Files(vec!["/sys/x".into()])]);
        let mut a = plant("a", 0.0);
        a.gains = vec![("setting", 0.10, 1.0)];
        a.owner = owner;
        let mut world = World::with(vec![Box::new(setting)], vec![a], policy(), Memory::default());
        world.run(400);
        (world.records.len(), world.summary("a"))
    };
    assert_eq!(of(Owner::Machine).0, 1);
    let (tried, told) = of(Owner::User(1000));
    assert_eq!(tried, 0);
    assert!(
        told.contains("policy.one_owner = [[\"machine\", \"user:1000\"]]"),
        "{told}"
    );
}

#[test]
fn one_user_cannot_use_up_the_budgets_of_all() {
    let names = ["u0", "u1", "u2", "u3", "u4", "u5", "u6", "u7", "u8", "u9", "root"];
    let plants: Vec<Plant> = names
        .iter()
        .map(|name| Plant {
            owner: if *name == "root" {
                Owner::Machine
            } else {
                Owner::User(1000)
            },
            ..plant(name, 0.0)
        })
        .collect();
    let policy = Policy {
        experiments_per_hour_max: 8,
        backoff_rejected_s: 0.0,
        backoff_inconclusive_s: 0.0,
        reconsider_s: 10.0,
        ..policy()
    };
    let mut world = World::with(vec![Box::new(Try)], plants, policy, Memory::default());
    world.run(3500);
    let budget = world.engine.view().budget;
    let user = budget.owners.iter().find(|o| o.owner == "user:1000").unwrap();
    assert_eq!(
        (user.experiments_last_hour, user.experiments_per_hour_max),
        (2, 2),
        "{budget:?}"
    );
    let of_root = world
        .records
        .iter()
        .filter(|r| r.workload.as_str() == "root")
        .count();
    assert!(of_root >= 1, "{:#?}", world.stories);
    let waits = world.engine.view().workloads;
    assert!(
        waits
            .iter()
            .any(|w| w.summary.contains("user:1000 has used up its share")),
        "{waits:#?}"
    );
}

#[test]
fn history_of_an_earlier_version_is_found_under_the_former_fingerprint() {
    let tries = |former: Option<&'static str>| {
        let harmful = Prior {
            fingerprint: Fingerprint::new("as it was"),
            strategy: "try".into(),
            verdict: Verdict::Harmful,
            effect: None,
            unix_seconds: 1_000_900,
            failures: 1,
            settling: None,
        };
        let memory = Memory {
            priors: vec![harmful],
            ..Memory::default()
        };
        let a = Plant {
            former,
            ..plant("a", 0.10)
        };
        let mut world = World::new(vec![a], policy(), memory);
        world.run(300);
        world.records.len()
    };
    assert_eq!(tries(Some("as it was")), 0, "what did harm is known");
    assert_eq!(tries(Some("another")), 1);
    assert_eq!(tries(None), 1);
}

#[test]
fn tried_one_by_one_none_of_them_would_have_been_proven() {
    let mut world = crowd(&["a", "b", "c", "d", "e", "f", "g", "h"], 0.05);
    world.run(1200);
    assert_eq!(world.verdict("a"), Verdict::Accepted, "{:#?}", world.stories);
    assert_eq!(world.records[0].others.len(), 7);
    let alone = Custom {
        looks: true,
        ..custom("place", vec![cpus(0..2)])
    };
    let plants = ["a", "b", "c", "d", "e", "f", "g", "h"].map(|name| plant(name, 0.0));
    let mut world = World::with(
        vec![Box::new(alone)],
        plants.to_vec(),
        policy(),
        Memory::default(),
    );
    world.common.insert("place", 0.05);
    world.run(3600);
    let accepted = world.verdicts.iter().filter(|v| v.1 == Verdict::Accepted).count();
    assert!(accepted < 8, "an eighth of 5 % is below what is worth a change");
}

#[test]
fn one_of_several_can_be_undone_or_end_and_the_others_keep_theirs() {
    let mut world = crowd(&["a", "b", "c"], 0.10);
    world.run(400);
    assert_eq!(world.verdict("a"), Verdict::Accepted);
    // The first of them, whose action names the guard.
    let first = *world.on.keys().next().unwrap();
    world.step(Event::Operator(OperatorRequest::Undo(first)));
    world.run(5);
    assert_eq!(world.stage("a"), Stage::Declined);
    assert_eq!(
        (world.stage("b"), world.stage("c")),
        (Stage::Improved, Stage::Improved)
    );
    world.plants[1].alive = false;
    world.run(20);
    assert_eq!(world.on.len(), 1, "{:?}", world.on);
    assert_eq!(world.stage("c"), Stage::Improved);
    let guard = world.engine.view().in_force[0].guard.clone();
    assert!(guard.contains("prob") && !guard.contains("passed"), "{guard}");
    world.trace.clear();
    // Only the change of c is left, which by itself brings its share.
    world.run(3000);
    assert!(
        world.trace.iter().any(|t| t.contains("Switch")),
        "its guard goes on probing"
    );
}

#[test]
fn when_one_ends_in_the_trial_the_others_are_tried_again() {
    let mut world = crowd(&["a", "b", "c"], 0.10);
    while world.on.is_empty() {
        world.run(1);
    }
    world.run(10);
    world.plants[2].alive = false;
    world.run(400);
    assert_eq!(world.records[0].verdict, Some(Verdict::Aborted));
    let last = world.records.last().unwrap();
    assert_eq!(last.verdict, Some(Verdict::Accepted), "{:#?}", world.stories);
    assert_eq!(last.others.len(), 1, "as one again");
    assert_eq!(world.on.values().filter(|(_, on)| *on).count(), 2);
}

#[test]
fn a_member_that_loses_is_not_carried_along_and_one_that_gains_is_tried_alone() {
    let mut world = crowd(&["a", "b"], 0.0);
    world.plants[0].gains = vec![("place", 0.30, 2.0)];
    world.plants[1].gains = vec![("place", -0.10, 2.0)];
    world.run(900);
    assert_eq!(
        world.records[0].verdict,
        Some(Verdict::Harmful),
        "{}",
        world.records[0].reason
    );
    assert!(
        world.records[0].reason.contains("b lost"),
        "{}",
        world.records[0].reason
    );
    let members: Vec<(&str, Verdict)> = world.records[0]
        .members
        .iter()
        .map(|m| (m.workload.as_str(), m.verdict))
        .collect();
    assert_eq!(
        members,
        [("a", Verdict::Aborted), ("b", Verdict::Harmful)],
        "nothing is held against the one that gained"
    );
    assert!(world.records[0].members[1].effect.unwrap().estimate < -0.05);
    let last = world.records.last().unwrap();
    assert_eq!(
        (last.verdict, last.workload.as_str()),
        (Some(Verdict::Accepted), "a")
    );
    assert!(last.others.is_empty());
    assert_eq!(world.stage("b"), Stage::Declined);
    assert_eq!(world.on.values().filter(|(_, on)| *on).count(), 1);
}

#[test]
fn a_gain_at_the_cost_of_a_neighbour_is_no_gain() {
    let helped = |hurt: f64| {
        let mut first = custom("switch", vec![memory(0..2)]);
        first.id = "switch";
        let second = Custom {
            after: Some("switch"),
            ..custom("thread_placement", vec![cpus(0..2)])
        };
        let mut neighbour = plant("n", 0.2);
        neighbour.gains = vec![];
        let mut mover = plant("m", 0.2);
        mover.gains = vec![("thread_placement", 0.15, 2.0)];
        let mut world = World::with(
            vec![Box::new(first), Box::new(second)],
            vec![mover, neighbour],
            policy(),
            Memory::default(),
        );
        world.hurts = vec![("thread_placement", "n", hurt)];
        world.run(2400);
        let placed = world
            .records
            .iter()
            .find(|r| r.strategy.as_str() == "thread_placement" && r.workload.as_str() == "m");
        placed.map(|r| (r.verdict, r.reason.clone()))
    };
    let (verdict, why) = helped(0.0).unwrap();
    assert_eq!(verdict, Some(Verdict::Accepted), "{why}");
    let (verdict, why) = helped(0.12).unwrap();
    assert_eq!(verdict, Some(Verdict::Inconclusive), "{why}");
    assert!(why.contains("n lost 1"), "{why}");
}

#[test]
fn what_is_set_for_one_is_not_set_again_for_its_neighbour() {
    let switch = custom("prefetch", vec![cpus(0..4)]);
    let mut plants = vec![plant("a", 0.0), plant("b", 0.0)];
    for p in &mut plants {
        p.gains = vec![("prefetch", 0.10, 4.0)];
    }
    let mut world = World::with(vec![Box::new(switch)], plants, policy(), Memory::default());
    world.run(900);
    assert_eq!(world.records.len(), 1, "{:#?}", world.stories);
    let said = |text: &str| world.stories.iter().any(|s| s.contains(text));
    assert!(
        said("in force by now, for a neighbour") || said("is in force already"),
        "{:#?}",
        world.stories
    );
    assert_eq!(world.on.len(), 1);
}

#[test]
fn a_neighbour_for_whom_nothing_is_planned_is_a_guardrail_too() {
    let placement = custom("place", vec![cpus(0..2)]);
    let mut mover = plant("m", 0.0);
    mover.gains = vec![("place", 0.15, 2.0)];
    // What is proposed for every workload is hopeless for this one.
    let hopeless = plant("hopeless", 0.0);
    let mut world = World::with(
        vec![Box::new(Sparing(placement, "hopeless"))],
        vec![hopeless, mover],
        policy(),
        Memory::default(),
    );
    world.hurts = vec![("place", "hopeless", 0.20)];
    world.run(300);
    let record = &world.records[0];
    assert_eq!(record.verdict, Some(Verdict::Inconclusive), "{}", record.reason);
    assert!(record.reason.contains("hopeless lost"), "{}", record.reason);
    assert_eq!(world.stage("hopeless"), Stage::Declined);
    let open = &world.open[&WorkloadId::new("hopeless")];
    assert!(open.is_empty(), "its meter was closed again: {open:?}");
}

#[test]
fn a_member_that_rests_does_not_hide_what_the_change_costs_those_that_work() {
    let mut world = crowd(&["a", "b"], 0.10);
    world.run(400);
    assert_eq!(world.verdict("a"), Verdict::Accepted);
    // Now one rests, and the other loses by the change.
    world.plants[1].busy = 0.001;
    world.common.insert("place", -0.10);
    world.run(2 * 3600);
    let revoked = world
        .stories
        .iter()
        .any(|s| s.contains("revoked") && s.contains(" % in the last"));
    assert!(revoked, "{:#?}", world.stories);
    assert!(world.on.values().all(|(_, on)| !*on), "{:?}", world.on);
}

#[test]
fn while_nobody_works_a_guard_waits_and_says_so() {
    let mut world = crowd(&["a", "b"], 0.10);
    world.run(400);
    for p in &mut world.plants {
        p.busy = 0.001;
    }
    world.run(100);
    world.trace.clear();
    world.run(3000);
    assert!(
        !world.trace.iter().any(|t| t.contains("Switch")),
        "nothing can be learnt"
    );
    let guard = world.engine.view().in_force[0].guard.clone();
    assert!(guard.contains("waits for it to work, since"), "{guard}");
    // It may be the change that keeps them from their work: now and then it is asked all the same.
    world.run(3600);
    assert!(world.trace.iter().any(|t| t.contains("Switch")));
    assert!(world.on.values().all(|(_, on)| *on), "and nothing came of it");
}

#[test]
fn a_neighbour_that_loses_after_the_change_was_accepted_ends_it() {
    let placement = Custom {
        looks: true,
        joint: true,
        ..custom("place", vec![cpus(0..2)])
    };
    let mut mover = plant("mover", 0.0);
    mover.gains = vec![("place", 0.20, 2.0)];
    let mut world = World::with(
        vec![Box::new(Sparing(placement, "neighbour"))],
        vec![mover, plant("neighbour", 0.0)],
        policy(),
        Memory::default(),
    );
    world.run(400);
    assert_eq!(world.records[0].verdict, Some(Verdict::Accepted));
    world.hurts = vec![("place", "neighbour", 0.15)];
    world.run(6 * 3600);
    let told = world.stories.iter().any(|s| s.contains("neighbour loses"));
    assert!(told, "{:#?}", world.stories);
    let record = world
        .records
        .iter()
        .rfind(|r| r.verdict == Some(Verdict::Inconclusive));
    assert!(record.is_some_and(|r| r.reason.contains("neighbour loses")));
}

#[test]
fn a_change_that_is_outgrown_goes_after_a_while_and_not_because_of_a_moment() {
    let placement = Custom {
        looks: true,
        ..custom("thread_placement", vec![cpus(0..2)])
    };
    let mut mover = plant("mover", 0.0);
    mover.gains = vec![("thread_placement", 0.20, 2.0)];
    let mut world = World::with(
        vec![Box::new(Narrow(placement))],
        vec![mover],
        policy(),
        Memory::default(),
    );
    world.run(400);
    assert_eq!(world.verdict("mover"), Verdict::Accepted);
    // It catches up.
    world.plants[0].busy = 4.0;
    world.run(4);
    world.plants[0].busy = 1.0;
    world.run(600);
    assert_eq!(world.stage("mover"), Stage::Improved, "{:#?}", world.stories);
    world.plants[0].busy = 4.0;
    world.run(600);
    assert!(world.on.is_empty(), "{:#?}", world.stories);
    assert!(
        world
            .stories
            .iter()
            .any(|s| s.contains("withdrawn: it has outgrown that"))
    );
}

#[test]
fn as_many_threads_as_ran_before_it_was_tried_have_not_outgrown_it() {
    let placement = Custom {
        looks: true,
        ..custom("thread_placement", vec![cpus(0..2)])
    };
    let mover = Plant {
        gains: vec![("thread_placement", 0.20, 2.0)],
        waits: 0.4,
        ..plant("mover", 0.0)
    };
    let strategies: Vec<Box<dyn Strategy>> = vec![Box::new(Narrow(placement))];
    let mut world = World::with(strategies, vec![mover], policy(), Memory::default());
    world.run(1000);
    assert_eq!(world.stage("mover"), Stage::Improved, "{:#?}", world.stories);
    world.plants[0].waits = 1.5;
    world.run(200);
    assert!(world.on.is_empty(), "{:#?}", world.stories);
}

#[test]
fn what_failed_for_a_neighbours_sake_is_tried_again_when_somebody_else_has_moved() {
    // Two placements on the same CPUs are two changes; elsewhere the second would be in force already.
    let of = |later: bool| {
        let placement = Custom {
            looks: true,
            joint: true,
            ..custom("thread_placement", vec![cpus(0..2)])
        };
        let gains = |name| Plant {
            gains: vec![("thread_placement", 0.20, 2.0)],
            ..plant(name, 0.0)
        };
        let late = Plant {
            alive: false,
            ..gains("late")
        };
        let mut world = World::with(
            vec![Box::new(Sparing(placement, "neighbour"))],
            vec![gains("mover"), plant("neighbour", 0.0), late],
            policy(),
            Memory::default(),
        );
        world.hurts = vec![("thread_placement", "neighbour", 0.15)];
        world.run(600);
        assert_eq!(world.records[0].verdict, Some(Verdict::Inconclusive));
        assert_eq!(world.stage("mover"), Stage::Declined);
        world.hurts.clear();
        world.plants[2].alive = later;
        world.run(1500);
        let tried = |name: &str| {
            let of = world.records.iter().filter(|r| r.workload.as_str() == name);
            of.filter_map(|r| r.verdict).collect::<Vec<_>>()
        };
        (tried("mover"), tried("late"), world.stories.concat())
    };
    let (mover, late, _) = of(false);
    assert_eq!((mover, late), (vec![Verdict::Inconclusive], vec![]));
    let (mover, late, story) = of(true);
    assert_eq!(late, [Verdict::Accepted], "{story}");
    assert_eq!(mover, [Verdict::Inconclusive, Verdict::Accepted], "{story}");
    assert!(story.contains("given up for a neighbour's sake"), "{story}");
}

#[test]
fn a_place_that_does_harm_does_not_bar_the_others_and_after_a_few_it_rests() {
    let of = |places: Vec<(f64, f64)>| {
        let plant = Plant {
            places,
            ..plant("worker", 0.0)
        };
        let mut world = World::with(
            vec![Box::new(Wandering)],
            vec![plant],
            policy(),
            Memory::default(),
        );
        world.run(6000);
        let verdicts: Vec<Verdict> = world.records.iter().filter_map(|r| r.verdict).collect();
        let on = world.on.values().filter(|(_, on)| *on).count();
        let stage = world.stage("worker");
        (verdicts, on, stage, world.stories.concat())
    };
    let (verdicts, on, _, story) = of(vec![(2.0, -0.10), (4.0, 0.20)]);
    assert_eq!(verdicts, [Verdict::Harmful, Verdict::Accepted], "{story}");
    assert_eq!(on, 1);
    let (verdicts, on, stage, story) = of(vec![(2.0, -0.10), (4.0, -0.10), (6.0, -0.10), (8.0, 0.20)]);
    assert_eq!(verdicts, [Verdict::Harmful; 3], "{story}");
    assert_eq!((on, stage), (0, Stage::Declined));
    assert!(story.contains("not tried again for"), "{story}");
}

#[test]
fn a_place_that_its_guard_took_back_is_not_asked_for_again_before_its_time() {
    let plant = Plant {
        places: vec![(2.0, -0.10), (4.0, 0.20)],
        ..plant("worker", 0.0)
    };
    let mut world = World::with(
        vec![Box::new(Wandering)],
        vec![plant],
        policy(),
        Memory::default(),
    );
    world.run(2000);
    // What the guard takes back is written down under the number of its experiment.
    let tried = |world: &World| {
        let ids: BTreeSet<_> = world.records.iter().map(|r| r.id).collect();
        ids.len()
    };
    assert_eq!(tried(&world), 2);
    world.plants[0].places = vec![(2.0, -0.10), (4.0, -0.10), (6.0, -0.10)];
    world.run(20_000);
    assert!(world.on.is_empty(), "{:#?}", world.stories);
    assert_eq!(tried(&world), 2, "{:#?}", world.stories);
}

#[test]
fn a_place_that_cannot_be_compared_counts_among_those_that_were_refused() {
    let mut world = World::with(
        vec![Box::new(Wandering)],
        vec![plant("worker", 0.0)],
        policy(),
        Memory::default(),
    );
    world.slow.insert("thread_placement", 400);
    world.run(15_000);
    let verdicts: Vec<Verdict> = world.records.iter().filter_map(|r| r.verdict).collect();
    assert_eq!(verdicts, [Verdict::Aborted; 3], "{:#?}", world.stories);
}

#[test]
fn what_has_outgrown_a_larger_place_does_not_go_back_to_a_smaller_one() {
    let first = custom("thread_placement", vec![cpus(0..2)]);
    let wider = Custom {
        effector: "thread_placement",
        after: Some("thread_placement"),
        ..custom("wider", vec![cpus(0..6)])
    };
    let mover = Plant {
        gains: vec![("thread_placement", 0.30, 8.0)],
        ..plant("mover", 0.0)
    };
    let strategies: Vec<Box<dyn Strategy>> = vec![Box::new(first), Box::new(Narrow(wider))];
    let mut world = World::with(strategies, vec![mover], policy(), Memory::default());
    world.run(3000);
    let on = |world: &World| world.on.values().filter(|(_, on)| *on).count();
    assert_eq!(on(&world), 2, "{:#?}", world.stories);
    world.plants[0].busy = 4.0;
    world.run(120);
    assert_eq!(on(&world), 0, "{:#?}", world.stories);
}

#[test]
fn a_neighbour_that_needs_more_cpu_for_the_work_that_is_offered_to_it_is_harmed() {
    let placement = || Custom {
        looks: true,
        joint: true,
        ..custom("place", vec![cpus(0..2)])
    };
    let of = |loss: f64, later: f64| {
        let mut mover = plant("mover", 0.0);
        mover.gains = vec![("place", 0.20, 2.0)];
        // It does all of its work, whatever CPU time that takes.
        let neighbour = Plant {
            offered: true,
            busy: 0.6,
            ..plant("neighbour", 0.0)
        };
        let mut world = World::with(
            vec![Box::new(Sparing(placement(), "neighbour"))],
            vec![mover, neighbour],
            policy(),
            Memory::default(),
        );
        world.hurts = vec![("place", "neighbour", loss)];
        world.run(600);
        let first = world.records[0].clone();
        world.hurts = vec![("place", "neighbour", later)];
        world.run(6 * 3600);
        (first, world.stories.concat())
    };
    let (record, _) = of(0.15, 0.15);
    assert_eq!(record.verdict, Some(Verdict::Inconclusive), "{}", record.reason);
    assert!(
        record.reason.contains("neighbour lost") && record.reason.contains("work per CPU second"),
        "{}",
        record.reason
    );
    // Less than is worth giving a gain up for; and a loss that comes later is found by the probes.
    let (record, story) = of(0.01, 0.15);
    assert_eq!(record.verdict, Some(Verdict::Accepted), "{}", record.reason);
    assert!(story.contains("neighbour loses") && story.contains("work per CPU second"));
}

#[test]
fn one_that_ends_again_and_again_does_not_keep_its_company_from_their_trial() {
    let mut world = crowd(&["a", "b", "c"], 0.10);
    while world.engine.view().experiments.is_empty() && world.second < 2000 {
        world.run(1);
    }
    assert_eq!(world.engine.view().experiments[0].others.len(), 2);
    for _ in 0..8 {
        world.run(30);
        world.plants[2].alive = false;
        world.run(3);
        world.plants[2].alive = true;
        world.run(60);
    }
    assert_eq!(world.records[0].verdict, Some(Verdict::Aborted));
    let accepted = world
        .records
        .iter()
        .find(|r| r.verdict == Some(Verdict::Accepted));
    let others: Vec<&str> = accepted.unwrap().others.iter().map(|(w, _)| w.as_str()).collect();
    assert_eq!(others, ["b"], "{:#?}", world.stories);
}

#[test]
fn what_waits_says_since_when_and_for_what() {
    let plants = vec![plant("a", 0.0), plant("b", 0.0)];
    let mut world = World::new(plants, policy(), Memory::default());
    while world.engine.view().experiments.is_empty() && world.second < 2000 {
        world.run(1);
    }
    world.run(30);
    let view = world.engine.view();
    let waiting = view
        .workloads
        .iter()
        .find(|w| w.stage == Stage::Proposed)
        .unwrap();
    assert!(
        waiting.summary.contains("waits since 3") && waiting.summary.contains("experiment 1 (try on"),
        "{}",
        waiting.summary
    );
    world.step(Event::Operator(OperatorRequest::Pause));
    world.run(1);
    let view = world.engine.view();
    let waiting = view
        .workloads
        .iter()
        .find(|w| w.stage == Stage::Proposed)
        .unwrap();
    assert!(
        waiting.summary.contains("homeostat resume"),
        "{}",
        waiting.summary
    );
}

#[test]
fn one_that_cannot_be_changed_does_not_keep_the_others_from_their_gain() {
    let mut world = crowd(&["a", "b", "c"], 0.10);
    world.refuse_for = Some("b");
    world.run(500);
    assert_eq!(world.records[0].verdict, Some(Verdict::Aborted));
    let last = world.records.last().unwrap();
    assert_eq!(last.verdict, Some(Verdict::Accepted), "{:#?}", world.stories);
    let others: Vec<&str> = last.others.iter().map(|(w, _)| w.as_str()).collect();
    assert_eq!((last.workload.as_str(), others), ("a", vec!["c"]));
    assert_eq!(world.stage("b"), Stage::Declined);
}

#[test]
fn a_part_in_the_making_of_one_that_leaves_holds_nobody_up() {
    let follows = Custom {
        joint: true,
        ..custom("mem", vec![memory(0..2), memory(2..4), memory(4..6)])
    };
    let mut plants = vec![plant("a", 0.0), plant("b", 0.0)];
    for p in &mut plants {
        p.gains = vec![("mem", 0.15, 2.0)];
    }
    let mut world = World::with(vec![Box::new(follows)], plants, policy(), Memory::default());
    while world.records.is_empty() {
        world.run(1);
    }
    assert_eq!(
        world.records[0].verdict,
        Some(Verdict::Accepted),
        "{:#?}",
        world.stories
    );
    let tried: Vec<ActionId> = world.actions.keys().copied().collect();
    let of_b = |world: &World, id: &ActionId| world.actions[id].workload.as_str() == "b";
    world.slow.insert("mem", 30);
    while !world
        .actions
        .keys()
        .any(|id| !tried.contains(id) && of_b(&world, id))
    {
        world.run(1);
    }
    // The tried part of b is undone while the next part of b is being made.
    let of_b = tried.iter().copied().find(|id| of_b(&world, id)).unwrap();
    world.step(Event::Operator(OperatorRequest::Undo(of_b)));
    world.slow.clear();
    world.run(120);
    let coins = world.coins.len();
    world.run(4 * 3600);
    assert_eq!(world.stage("a"), Stage::Improved);
    assert!(world.coins.len() > coins, "probes go on: {:#?}", world.stories);
}

#[test]
fn an_undo_that_gets_nowhere_is_told() {
    let mut world = World::new(vec![plant("w", 0.0)], policy(), Memory::default());
    world.slow.insert("switch", 5000);
    world.run(1500);
    assert!(
        world.stories.iter().any(|s| s.contains("has made no progress")),
        "{:#?}",
        world.stories
    );
    assert_eq!(world.on.len(), 1, "and the change stays in the books");
}

#[test]
fn what_goes_in_and_out_can_be_written_down_and_read_back() {
    let mut world = World::new(vec![plant("good", 0.20)], policy(), Memory::default());
    let mut events = vec![];
    for _ in 0..120 {
        world.second += 1;
        let event = Event::Sampled(Box::new(world.snapshot()));
        events.push(event.clone());
        world.step(event);
        while !world.pending.is_empty() {
            let event = world.pending.remove(0);
            events.push(event.clone());
            world.step(event);
        }
    }
    assert!(events.len() > 125);
    let fault = Fault {
        kind: FaultKind::Vanished,
        text: "the meter has ended".into(),
    };
    events.push(Event::MeterLost("good".into(), "progress".into(), fault));
    for event in &events {
        let text = serde_json::to_string(event).unwrap();
        assert_eq!(serde_json::from_str::<Event>(&text).unwrap(), *event);
    }
    // What is not a number has no word in JSON.
    let window = homeostat_model::WindowRecord {
        workload: "w".into(),
        fingerprint: Fingerprint::new("w"),
        length: Nanoseconds::from_secs(60),
        samples: 1,
        meter: Some("m".into()),
        work: 1.0,
        variation: f64::NAN,
        cpu: Nanoseconds::ZERO,
        runqueue_wait: Nanoseconds::ZERO,
        faults_minor: 0,
        faults_major: 0,
        resident: Bytes::ZERO,
        anonymous: Bytes::ZERO,
        shared: Bytes::ZERO,
        huge: None,
    };
    let text = serde_json::to_string(&Command::RecordWindow(window)).unwrap();
    let back: Command = serde_json::from_str(&text).unwrap();
    assert!(matches!(back, Command::RecordWindow(w) if w.variation.is_nan()));
}

/// A program that is measured by two kinds of kernel work and gains a tenth by the change.
fn two_kinds(kinds: TwoKinds, seed: u64) -> World {
    let policy = Policy { seed, ..policy() };
    let mut world = World::new(vec![plant("server", 0.10)], policy, Memory::default());
    world.random ^= seed << 20;
    world.kernel = Some(kinds);
    world
}

const KEPT: TwoKinds = TwoKinds {
    first: "sockets.segments",
    beside: "io.write_calls",
    changed: 1.0,
    phase: u64::MAX,
    noise: 0.0,
};

#[test]
fn nothing_is_decided_before_points_were_read_long_enough_to_speak_for_kernel_work() {
    // By more than kernel work may vary, and by less than points may.
    const AS_EVER: &[f64] = &[1.0, 1.2, 1.4];
    // At first by more than any meter may: whoever judges then says that its work cannot be measured.
    const LOUD_AT_FIRST: &[f64] = &[1.0, 1.6, 2.2, 1.3, 1.6, 1.9];
    for (while_both_are_read, apart, taken) in [
        (AS_EVER, None, "sockets.segments"),
        (LOUD_AT_FIRST, None, "sockets.segments"),
        // What does not vary alike does not speak for it, which is not clear any sooner.
        (AS_EVER, Some("points"), "points"),
    ] {
        let mut world = two_kinds(KEPT, 42);
        world.points = true;
        world.silent = Some("points");
        world.run_until(10, |world| !world.open.is_empty());
        world.swings = Some(Swings {
            since: world.second,
            factors: AS_EVER,
            apart: None,
        });
        let points_are_open = |world: &World| world.open.values().any(|open| open.contains("points"));
        world.run_until(60, points_are_open);
        assert!(points_are_open(&world), "{:#?}", world.stories);
        // They are still to be found, while kernel work is read.
        world.run(20);
        world.silent = None;
        world.swings = Some(Swings {
            since: world.second,
            factors: while_both_are_read,
            apart,
        });
        // Six blocks of four seconds are needed; points alone could be judged after half of them.
        for seconds in 1..24 {
            world.run(1);
            assert_eq!(
                world.stage("server"),
                Stage::Considered,
                "after {seconds} s: {:#?}",
                world.stories
            );
        }
        let said = world.summary("server");
        assert!(
            said.contains(
                "what may speak for it has few readings yet; it is judged after at most 24 readings of both"
            ),
            "{said}"
        );
        world.run(1);
        assert_eq!(world.stage("server"), Stage::Observed, "{:#?}", world.stories);
        assert_eq!(
            world.told(&format!(" by {taken} (")),
            1,
            "{taken}: {:#?}",
            world.stories
        );
        // It was not steady either.
        let is_vouched_for = world.told("more noise than the 15 % of kernel work, but as much as points has");
        assert_eq!(
            is_vouched_for,
            usize::from(apart.is_none()),
            "{:#?}",
            world.stories
        );
        assert_eq!(world.told("cannot be measured"), 0, "{:#?}", world.stories);
    }
}

#[test]
fn who_looks_is_told_why_what_comes_as_by_a_clock_is_read_for_longer() {
    let mut world = two_kinds(KEPT, 42);
    world.plants[0].noise = 0.0;
    world.run_until(30, |world| !world.open.is_empty());
    world.run(60);
    let said = world.summary("server");
    assert!(
        said.contains("as evenly as by a clock so far")
            && said.contains("it is judged after at most 96 readings"),
        "{said}"
    );
    assert_eq!(world.told("as by a clock"), 0, "nobody is told who does not ask");
    world.run(60);
    assert_eq!(world.stage("server"), Stage::Declined, "{:#?}", world.stories);
    assert!(
        !world.summary("server").contains("so far"),
        "{}",
        world.summary("server")
    );
}

#[test]
fn bytes_that_may_come_in_bursts_are_read_for_longer_before_a_meter_is_taken() {
    const STEADY: &[f64] = &[1.0];
    // One of the first three blocks is larger by what kernel work may vary against another, a later one by so much that neither would do.
    const BURSTS: &[f64] = &[1.08, 1.0, 1.0, 1.25, 1.0, 1.2];
    for (bytes, seconds, taken) in [(STEADY, 12, "io.bytes"), (BURSTS, 24, "io.write_calls")] {
        let files = TwoKinds {
            first: "io.write_calls",
            beside: "io.bytes",
            ..KEPT
        };
        let mut world = two_kinds(files, 42);
        world.run_until(30, |world| !world.open.is_empty());
        world.swings = Some(Swings {
            since: world.second,
            factors: bytes,
            apart: Some("io.write_calls"),
        });
        world.run(seconds - 1);
        assert_eq!(world.stage("server"), Stage::Considered, "{:#?}", world.stories);
        let said = world.summary("server");
        let is_told = said.contains("comes in bursts is not clear yet; that is judged after 24 readings");
        assert_eq!(is_told, seconds == 24, "{said}");
        world.run(1);
        assert_eq!(world.stage("server"), Stage::Observed, "{:#?}", world.stories);
        assert_eq!(world.told(&format!(" by {taken} (")), 1, "{:#?}", world.stories);
    }
}

#[test]
fn a_change_that_alters_what_the_meter_means_is_not_accepted_by_it() {
    let mut halved = two_kinds(TwoKinds { changed: 0.5, ..KEPT }, 42);
    halved.run(900);
    let record = &halved.records.iter().find(|r| r.verdict.is_some()).unwrap();
    assert_eq!(record.verdict, Some(Verdict::Aborted));
    let why = &record.reason;
    assert!(
        why.contains("sockets.segments means") && why.contains("io.write_calls"),
        "{why}"
    );
    let account = &record.meanings[0];
    let change = account.change.unwrap();
    assert!((change.estimate - 1.0).abs() < 1e-9, "{account:?}");
    assert!(account.drift.is_none_or(|d| d.estimate.abs() < 1e-9));
    assert!(halved.on.values().all(|(_, on)| !on));
    assert!(halved.verdicts.iter().all(|v| v.1 != Verdict::Accepted));
}

#[test]
fn a_rollout_is_watched_for_what_its_meter_means() {
    // (by what the whole change multiplies the calls for a segment, from when on there are half as many, verdict)
    for (changed, phase_after, verdict) in [
        (1.0, None, Verdict::Accepted),
        (0.5, None, Verdict::Aborted),
        (1.0, Some(60), Verdict::Aborted),
    ] {
        let mut world = one_way(0.40, 0.01, 2, 42);
        world.kernel = Some(TwoKinds {
            changed,
            noise: 0.02,
            ..KEPT
        });
        world.run_until(900, |world| !world.coins.is_empty());
        if let (Some(kinds), Some(after)) = (&mut world.kernel, phase_after) {
            kinds.phase = world.second + after;
        }
        world.run_until(900, |world| world.records.iter().any(|r| r.verdict.is_some()));
        let record = world.records.iter().find(|r| r.verdict.is_some()).unwrap();
        assert_eq!(record.kind, ExperimentKind::StagedRollout);
        assert_eq!(record.verdict, Some(verdict), "{changed} {}", record.reason);
        let account = &record.meanings[0];
        assert!(account.slots >= 6 && account.staged.is_some(), "{account:?}");
        if verdict == Verdict::Aborted {
            let why = &record.reason;
            assert!(why.contains("sockets.segments no longer means"), "{why}");
            world.run(60);
            assert!(world.on.is_empty(), "all parts were undone");
        }
    }
}

#[test]
fn another_phase_of_the_program_ends_the_trial() {
    let mut world = two_kinds(KEPT, 42);
    while world.records.is_empty() {
        world.run(1);
    }
    // A gain that takes long to prove, so that the phase begins in the middle.
    let mut world = two_kinds(
        TwoKinds {
            phase: world.second + 120,
            ..KEPT
        },
        42,
    );
    world.plants[0].gain = 0.03;
    world.plants[0].noise = 0.10;
    world.run(1500);
    let record = &world.records.iter().find(|r| r.verdict.is_some()).unwrap();
    assert_eq!(record.verdict, Some(Verdict::Aborted), "{}", record.reason);
    assert!(record.reason.contains("no longer means"), "{}", record.reason);
    let account = &record.meanings[0];
    assert!(account.drift.unwrap().lower > 0.5, "{account:?}");
    assert!(account.change.unwrap().estimate.abs() < 0.3, "{account:?}");
}

#[test]
fn what_the_ratio_varies_by_anyway_ends_no_trial() {
    for seed in 1..=20 {
        let mut world = two_kinds(TwoKinds { noise: 0.04, ..KEPT }, seed);
        world.run(900);
        assert_eq!(world.verdict("server"), Verdict::Accepted, "seed {seed}");
        assert!(
            world.verdicts.iter().all(|v| v.1 != Verdict::Aborted),
            "seed {seed}"
        );
        assert_eq!(
            world.open[&WorkloadId::from("server")].len(),
            1,
            "seed {seed}: closed after it"
        );
        let record = world.records.iter().find(|r| r.verdict.is_some()).unwrap();
        let [account] = record.meanings.as_slice() else {
            panic!("{record:?}");
        };
        assert_eq!(
            (account.judge.as_str(), account.beside.as_str()),
            ("sockets.segments", "io.write_calls")
        );
        assert_eq!(
            (account.blocks_on + account.blocks_off) as usize,
            record.blocks.len()
        );
        assert_eq!(account.unwatched, None);
        assert!(
            account.change.unwrap().estimate.abs() < 0.05,
            "seed {seed}: {account:?}"
        );
        let told = world.stories.iter().filter(|s| **s == account.to_string());
        assert_eq!(told.count(), 1, "seed {seed}: {:#?}", world.stories);
    }
}

#[test]
fn a_placebo_is_watched_alike_and_its_account_shows_that_the_watch_is_calm() {
    let policy = Policy {
        mode: Mode::Calibrate,
        ..policy()
    };
    let mut world = World::new(vec![plant("server", 0.0)], policy, Memory::default());
    world.kernel = Some(TwoKinds { noise: 0.04, ..KEPT });
    world.run(6000);
    assert!(world.records.len() >= 8, "{}", world.records.len());
    for record in &world.records {
        assert_eq!(record.kind, homeostat_model::ExperimentKind::Placebo);
        assert_ne!(record.verdict, Some(Verdict::Aborted), "{}", record.reason);
        let account = &record.meanings[0];
        assert_eq!(
            (account.blocks_on + account.blocks_off) as usize,
            record.blocks.len()
        );
        match account.change {
            Some(change) => assert!(change.estimate.abs() < 0.05, "{account:?}"),
            None => assert!(account.blocks_on < 3 || account.blocks_off < 3, "{account:?}"),
        }
    }
    let watched = world.records.iter().filter(|r| r.meanings[0].change.is_some());
    assert!(watched.count() * 2 > world.records.len());
}

#[test]
fn a_witness_that_cannot_be_read_is_told_once_and_the_trial_goes_on_without() {
    // What would end the trial if anybody saw it.
    let mut world = two_kinds(TwoKinds { changed: 0.5, ..KEPT }, 42);
    world.unreadable = Some("io.write_calls");
    world.run(900);
    assert_eq!(world.verdict("server"), Verdict::Accepted);
    let account = &world.records[0].meanings[0];
    assert_eq!((account.change, account.blocks_on), (None, 0));
    let why = "io.write_calls, by which it qualified, cannot be read: no permission to read /proc/100/io";
    assert_eq!(account.unwatched.as_deref(), Some(why));
    let told = world.stories.iter().filter(|s| s.contains(why));
    assert_eq!(told.count(), 1, "{:#?}", world.stories);
    let explained = world.engine.view();
    let story = &explained.workloads[0].decisions;
    assert!(story.iter().any(|d| d.text.contains(why)), "{story:#?}");
}

#[test]
fn switches_are_no_witness_and_the_account_says_so() {
    let kinds = TwoKinds {
        beside: "switches.voluntary",
        changed: 0.5,
        ..KEPT
    };
    let mut world = two_kinds(kinds, 42);
    world.run(900);
    assert_eq!(world.verdict("server"), Verdict::Accepted);
    let account = &world.records[0].meanings[0];
    assert_eq!((account.change, account.blocks_on), (None, 0));
    assert!(
        account.to_string().contains("not watched: switches.voluntary"),
        "{account}"
    );
    // Two kinds of the program's own counters have no such ratio.
    let mut world = World::new(vec![plant("server", 0.10)], policy(), Memory::default());
    world.run(900);
    assert_eq!(world.verdict("server"), Verdict::Accepted);
    assert!(world.records[0].meanings.is_empty());
}

impl World {
    /// A meter of a plant can be read no more.
    fn lose(&mut self, name: &'static str, meter: &str) {
        let id = WorkloadId::new(name);
        self.open.entry(id.clone()).or_default().remove(meter);
        let fault = Fault {
            kind: FaultKind::Unsupported,
            text: "its code was made anew".into(),
        };
        self.step(Event::MeterLost(id, meter.into(), fault));
    }

    /// The lines of the story with this in them.
    fn told(&self, text: &str) -> usize {
        self.stories.iter().filter(|s| s.contains(text)).count()
    }

    /// The lines with this in them that a person is shown who asks.
    fn explained(&self, text: &str) -> usize {
        let view = self.engine.view();
        let story = view.workloads[0].decisions.iter();
        story.filter(|d| d.text.contains(text)).count()
    }

    /// When meters were opened.
    fn openings(&self) -> Vec<u64> {
        let opened = self.trace.iter().filter(|l| l.contains(" OpenMeter("));
        opened
            .map(|l| l.split(' ').next().unwrap().parse().unwrap())
            .collect()
    }

    /// What was recorded is decided again in the same way.
    fn assert_decided_again(&self) {
        let mut again = Engine::new(machine(), vec![Box::new(Try)], policy(), Memory::default());
        let mut trace = Vec::new();
        for (second, event) in self.recorded.as_ref().unwrap() {
            let event: Event = serde_json::from_str(event).unwrap();
            let commands = again.step(Nanoseconds::from_secs(*second), 1_000_000 + second, event);
            trace.extend(commands.iter().map(|c| format!("{second} {c:?}")));
        }
        assert_eq!(trace, self.trace);
    }
}

#[test]
fn a_meter_that_is_lost_ends_the_trial_with_its_reason() {
    let mut world = World::new(vec![plant("good", 0.20)], policy(), Memory::default());
    world.recorded = Some(vec![]);
    while world.stages_missing("good", Stage::Trying) {
        world.run(1);
    }
    world.run(20);
    assert!(world.records.is_empty() && !world.on.is_empty());
    world.lose("good", "progress");
    world.run(2);
    assert_eq!(world.verdict("good"), Verdict::Aborted);
    assert!(world.on.is_empty(), "and what was changed is undone");
    let why = "good: the meter progress was lost: its code was made anew";
    assert_eq!(world.records[0].reason, why);
    let text = format!("aborted by experiment 1: {why}; the change was undone");
    assert_eq!(world.told(&text), 1, "{:#?}", world.stories);
    let explained = world.engine.view();
    let story = &explained.workloads[0].decisions;
    assert!(story.iter().any(|d| d.text == text), "{story:#?}");
    assert_eq!(world.stage("good"), Stage::Declined, "nothing else can be tried");
    // A meter is looked for anew; the change itself waits, as after any trial that could not be measured.
    world.run(700);
    let measured = "its work is measured in operations by progress";
    assert_eq!(world.told(measured), 2, "{:#?}", world.stories);
    assert_eq!(world.verdicts.len(), 1, "{:#?}", world.stories);
    world.assert_decided_again();
}

#[test]
fn a_rollout_whose_meter_is_lost_is_undone_part_by_part() {
    let mut world = one_way(0.40, 0.03, 3, 42);
    while world.on.len() < 2 {
        world.run(1);
        assert!(world.second < 5000, "{:#?}", world.stories);
    }
    let made: Vec<ActionId> = world.on.keys().rev().copied().collect();
    world.lose("far", "progress");
    world.run(30);
    assert!(world.on.is_empty(), "{:#?}", world.stories);
    assert_eq!(world.closed, made);
    let record = &world.records[0];
    assert_eq!(record.verdict, Some(Verdict::Aborted));
    assert!(record.reason.contains("progress was lost"), "{}", record.reason);
}

#[test]
fn when_the_meter_of_one_is_lost_in_the_trial_the_others_are_tried_again() {
    let mut world = crowd(&["a", "b", "c"], 0.10);
    while world.on.is_empty() {
        world.run(1);
    }
    world.run(10);
    world.lose("b", "progress");
    world.run(400);
    let first = &world.records[0];
    assert_eq!(first.verdict, Some(Verdict::Aborted));
    assert!(
        first.reason.starts_with("b: the meter progress was lost"),
        "{}",
        first.reason
    );
    let last = world.records.last().unwrap();
    assert_eq!(last.verdict, Some(Verdict::Accepted), "{:#?}", world.stories);
    let others: Vec<&str> = last.others.iter().map(|(w, _)| w.as_str()).collect();
    assert_eq!((last.workload.as_str(), others), ("a", vec!["c"]), "as one again");
    assert_eq!(world.stage("b"), Stage::Declined);
}

#[test]
fn a_meter_that_only_looks_on_is_told_when_it_is_lost_and_the_trial_goes_on() {
    // The second kind of kernel work, which would end the trial if it were read.
    let mut world = two_kinds(TwoKinds { changed: 0.5, ..KEPT }, 42);
    while world.stages_missing("server", Stage::Trying) {
        world.run(1);
    }
    world.run(2);
    world.lose("server", "io.write_calls");
    world.run(900);
    assert_eq!(world.verdict("server"), Verdict::Accepted);
    let account = &world.records[0].meanings[0];
    let why = "io.write_calls, by which it qualified, cannot be read: its code was made anew";
    assert_eq!(account.unwatched.as_deref(), Some(why));

    // That of a neighbour.
    let placement = custom("place", vec![cpus(0..2)]);
    let mut mover = plant("m", 0.0);
    mover.gains = vec![("place", 0.15, 2.0)];
    let mut world = World::with(
        vec![Box::new(Sparing(placement, "hopeless"))],
        vec![plant("hopeless", 0.0), mover],
        policy(),
        Memory::default(),
    );
    while world.stages_missing("m", Stage::Trying) {
        world.run(1);
    }
    world.run(5);
    world.lose("hopeless", "progress");
    world.run(600);
    assert_eq!(world.verdict("m"), Verdict::Accepted);
    let text = "the meter progress, by which harm to it was to be seen in experiment 1, was lost";
    assert_eq!(world.told(text), 1, "{:#?}", world.stories);
}

#[test]
fn a_meter_that_is_lost_while_nothing_is_tried_shows_in_what_is_read() {
    let mut world = World::new(vec![plant("good", 0.20)], policy(), Memory::default());
    while world.stages_missing("good", Stage::Observed) {
        world.run(1);
    }
    world.lose("good", "progress");
    world.run(1);
    assert_eq!(world.stage("good"), Stage::Observed);
    world.run(250);
    assert_eq!(
        world.told("the meter progress delivered"),
        1,
        "{:#?}",
        world.stories
    );
    assert_eq!(world.told("was lost"), 0);
    assert!(world.verdicts.is_empty() && world.on.is_empty());

    // What waits for its turn is not tried.
    let mut world = World::new(vec![plant("good", 0.20)], policy(), Memory::default());
    world.step(Event::Operator(OperatorRequest::Pause));
    while world.stages_missing("good", Stage::Proposed) {
        world.run(1);
    }
    world.run(60);
    world.lose("good", "progress");
    world.step(Event::Operator(OperatorRequest::Resume));
    world.run(2);
    assert_eq!(world.told("not tried: good: the meter progress was lost"), 1);
    assert_eq!(world.stage("good"), Stage::Declined);
    assert!(world.records.is_empty() && world.on.is_empty());
}

/// A change was accepted and is watched over.
fn guarded() -> World {
    let mut world = World::new(vec![plant("good", 0.10)], policy(), Memory::default());
    world.recorded = Some(vec![]);
    world.run_until(900, |world| world.engine.view().in_force.len() == 1);
    assert_eq!(world.stage("good"), Stage::Improved, "{:#?}", world.stories);
    world
}

#[test]
fn a_change_whose_meter_is_lost_once_stays_and_is_watched_by_it_again() {
    let mut world = guarded();
    let at = world.second;
    world.lose("good", "progress");
    world.run(600);
    let again: Vec<u64> = world.openings().into_iter().filter(|then| *then >= at).collect();
    assert_eq!(again, [at + 60], "once, after a while");
    // As long as it would take to give it up.
    world.run(6 * 3600);
    assert_eq!(world.openings().len(), 2, "{:?}", world.openings());
    assert_eq!(world.verdicts.len(), 1, "{:#?}", world.stories);
    let in_force = world.engine.view().in_force;
    assert_eq!(in_force.len(), 1, "{:#?}", world.stories);
    // Its probes are read.
    let guard = &in_force[0].guard;
    assert!(
        guard.contains(", the last ") && guard.contains(" show +"),
        "{guard}"
    );
    assert_eq!(
        world.explained("the meter progress, by which what is in force is watched, was lost"),
        1
    );
    assert_eq!(
        world.explained("the meter progress, which was lost, is read again"),
        1
    );
    world.assert_decided_again();
}

#[test]
fn a_change_whose_meter_is_lost_for_good_is_given_up_since_nobody_can_watch_it() {
    let mut world = guarded();
    let at = world.second;
    world.shut = Some("progress");
    world.lose("good", "progress");
    world.run_until(12 * 3600, |world| world.engine.view().in_force.is_empty());
    world.run(2);
    assert!(world.on.is_empty(), "{:#?}", world.stories);
    let record = world.records.last().unwrap();
    assert_eq!(record.verdict, Some(Verdict::Inconclusive));
    let why = "its work could not be measured in 24 probe pairs in a row: nobody can watch it any more";
    assert!(record.reason.contains(why), "{}", record.reason);
    assert_eq!(world.stage("good"), Stage::Declined);
    // Asked for ever more seldom meanwhile.
    let again = world.openings().into_iter().filter(|then| *then >= at);
    let after: Vec<u64> = again.take(6).map(|then| then - at).collect();
    assert_eq!(after, [60, 180, 420, 900, 1500, 2100]);
}

#[test]
fn what_was_refused_for_a_lost_meter_is_tried_when_that_is_read_again() {
    let mut good = plant("good", 0.0);
    good.gains = vec![("base", 0.10, 2.0), ("upon", 0.10, 2.0)];
    let strategies: Vec<Box<dyn Strategy>> = vec![
        Box::new(custom("base", vec![cpus(0..2)])),
        Box::new(Custom {
            after: Some("base"),
            ..custom("upon", vec![cpus(2..4)])
        }),
    ];
    // So that the second one waits for its turn.
    let sparing = Policy {
        experiments_per_hour_max: 1,
        ..policy()
    };
    let mut world = World::with(strategies, vec![good], sparing, Memory::default());
    world.run_until(900, |world| world.engine.view().in_force.len() == 1);
    world.run_until(900, |world| world.stage("good") == Stage::Proposed);
    assert_eq!(world.stage("good"), Stage::Proposed, "{:#?}", world.stories);
    world.lose("good", "progress");
    world.step(Event::Operator(OperatorRequest::Configure(Box::new(policy()))));
    let refused = "not tried: good: the meter progress was lost";
    // The pairs that measure the first gain come first.
    world.run_until(400, |world| world.told(refused) > 0);
    assert_eq!(world.told(refused), 1, "{:#?}", world.stories);
    assert_eq!(world.stage("good"), Stage::Improved);
    world.run(2400);
    assert_eq!(world.told(refused), 1, "{:#?}", world.stories);
    let order: Vec<&str> = world.records.iter().map(|r| r.strategy.as_str()).collect();
    assert_eq!(order, ["base", "upon"], "{:#?}", world.stories);
    assert!(world.records.iter().all(|r| r.verdict == Some(Verdict::Accepted)));
    assert_eq!(world.engine.view().in_force.len(), 2);
}

#[test]
fn a_program_whose_choice_cannot_be_read_is_left_alone_unless_a_rule_says_always() {
    let of = |always: bool| {
        let gains = Plant {
            gains: vec![("common", 0.20, 2.0)],
            unread: true,
            ..plant("good", 0.0)
        };
        let rule = WorkloadRule {
            pattern: "good".into(),
            always,
            ..WorkloadRule::default()
        };
        let policy = Policy {
            workloads: vec![rule],
            ..policy()
        };
        let mut world = World::with(
            vec![Box::new(custom("common", vec![cpus(0..2)]))],
            vec![gains],
            policy,
            Memory::default(),
        );
        world.run(400);
        world
    };
    let world = of(false);
    assert!(world.on.is_empty() && !world.stories.iter().any(|s| s.contains("trying")));
    let says = |s: &String| {
        s.contains("is not known: its environment is overwritten") && s.contains("always = true")
    };
    assert!(world.stories.iter().any(says), "{:#?}", world.stories);
    assert_eq!(of(true).verdict("good"), Verdict::Accepted);
}
