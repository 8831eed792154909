//! Protection from a loss that happens now: it is made at once, proven after, and goes when it helps nobody.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use homeostat_engine::{
    Command, Declined, Engine, Event, Fault, FaultKind, Memory, Neighbour, OperatorRequest, Opinion, Policy,
    Prior, Proposal, Seen, Stage, Strategy, WorkloadRule,
};
use homeostat_model::action::{FileReader, Target};
use homeostat_model::{
    ActionId, Advice, Bytes, Direction, Effect, ExperimentId, Fingerprint, Machine, MachineSample,
    MeterCandidate, MeterClass, MeterReading, Nanoseconds, OperatorChoice, Owner, Paging, Pressure,
    ProcessId, Progress, Reads, Snapshot, StrategyId, Verdict, Workload, WorkloadId, WorkloadKind,
    WorkloadSample,
};
use homeostat_statistics::discovery::Rule;
use std::collections::{BTreeMap, BTreeSet};

const GUESS: Effect = Effect {
    estimate: 0.5,
    lower: 0.1,
    upper: 10.0,
    confidence: 0.5,
};

fn proposal(target: Target, urgent: bool) -> Opinion {
    Opinion::Propose(Box::new(Proposal {
        hypothesis: "it may help".into(),
        predicted: GUESS,
        effector: if urgent { "contain" } else { "other" }.into(),
        target,
        stages: vec![],
        arguments: BTreeMap::new(),
        reversible: true,
        joint: false,
        urgent,
        makes_room: false,
        settling: Nanoseconds::from_millis(500),
        risk: "none".into(),
        advice: vec![],
    }))
}

/// Contains the reader for the sake of whoever waits for pages.
struct Protect;

impl Strategy for Protect {
    fn id(&self) -> StrategyId {
        "protect".into()
    }
    fn summary(&self) -> &'static str {
        "test"
    }
    fn applicable(&self, _: &Machine) -> Result<(), String> {
        Ok(())
    }
    fn relieves(&self) -> bool {
        true
    }
    fn consider(&self, seen: &Seen<'_>) -> Opinion {
        let is_contained = |n: &&Neighbour| {
            seen.held
                .iter()
                .any(|h| matches!(&h.target, Target::Reader(r) if r.workload == n.id))
        };
        let mut readers = seen
            .neighbours
            .iter()
            .filter(|n| n.reads.from_storage.0 > 0 && n.left_alone.is_none());
        let reader = readers.find(|n| !is_contained(n));
        match reader {
            Some(reader) if seen.sample.faults_major > 0 => proposal(
                Target::Reader(FileReader {
                    workload: reader.id.clone(),
                    processes: reader.processes.clone(),
                    limit: Bytes::from_mib(64),
                }),
                true,
            ),
            _ => Opinion::Decline(Declined {
                reason: "nobody takes its memory who may be contained".into(),
                advice: seen
                    .neighbours
                    .iter()
                    .filter(|n| n.reads.from_storage.0 > 0 && n.left_alone.is_some())
                    .map(|n| Advice {
                        id: format!("protect/{}", n.id),
                        workload: Some(seen.workload.id.clone()),
                        finding: "it reads much".into(),
                        remedy: "limit it".into(),
                        risk: "none".into(),
                        setting: None,
                    })
                    .collect(),
            }),
        }
    }
    fn unwanted_change(&self, seen: &Seen<'_>, change: &Target) -> Option<String> {
        let Target::Reader(reader) = change else {
            return None;
        };
        let said = seen.workload.choice.tuned.first()?;
        said.starts_with(&format!("{} ", reader.workload))
            .then(|| said.clone())
    }
}

/// Proposes something slow for the third workload.
struct Other;

impl Strategy for Other {
    fn id(&self) -> StrategyId {
        "other".into()
    }
    fn summary(&self) -> &'static str {
        "test"
    }
    fn applicable(&self, _: &Machine) -> Result<(), String> {
        Ok(())
    }
    fn consider(&self, seen: &Seen<'_>) -> Opinion {
        if seen.workload.program == "third" {
            return proposal(Target::Files(vec!["/a".into()]), false);
        }
        Opinion::Decline(Declined::because("nothing to gain"))
    }
}

/// A machine with a program, two readers that start later, and a third program.
struct World {
    engine: Engine,
    policy: Policy,
    second: u64,
    reads: bool,
    /// Whether the other reader reads.
    other_reads: bool,
    /// Whether readers find what they read in memory for every other 20 seconds.
    pauses: bool,
    third: bool,
    /// What the reader costs the program, and the limit the reader (shares of their work).
    loss: f64,
    price: f64,
    /// What the change of the other strategy brings the third program (share of its work).
    gain: f64,
    /// How often the process of the reader has executed a program.
    reader_executions: u32,
    /// Whether it is told that a contained reader has ended, as the effector does.
    tells_end: bool,
    /// So many attempts to contain a reader fail, and whether those that follow take their time.
    failures: u32,
    is_slow: bool,
    /// Seconds that the program needs to come back, and since when it has been protected.
    comes_back_s: u64,
    protected_since: Option<u64>,
    on: BTreeMap<ActionId, bool>,
    whose: BTreeMap<ActionId, String>,
    /// The reader that an action contains.
    contains: BTreeMap<ActionId, String>,
    open: BTreeSet<WorkloadId>,
    applied: Vec<(u64, String)>,
    verdicts: Vec<(ExperimentId, String, Verdict, String)>,
    pending: Vec<Event>,
    noise: u64,
    /// What the program gets by read calls in a second from files in memory (MiB), of which nothing is resident in it.
    from_memory: u64,
    /// Faults of the program that wait for storage, in a second in which it loses its pages.
    faults: u64,
    /// The same of the third program, which uses its CPU all the same.
    third_faults: u64,
    /// By how much its work swings about what it is: while it loses its pages, and while it does not.
    rough_loss: f64,
    rough: f64,
    /// Whose the program and the readers are.
    owners: (Owner, Owner),
    /// CPUs of the machine that are busy.
    busy: f64,
}

const NAMES: [&str; 4] = ["program", "reader", "third", "other reader"];

impl World {
    fn new(loss: f64, price: f64) -> Self {
        Self::remembering(loss, price, Memory::default())
    }

    /// With what an earlier run knew.
    fn remembering(loss: f64, price: f64, memory: Memory) -> Self {
        let policy = Policy {
            seed: 7,
            observe_min_s: 20.0,
            placebo_every_s: 0.0,
            discovery: Rule::Fixed { alpha: 0.05 },
            ..Policy::default()
        };
        Self {
            engine: Engine::new(
                machine(),
                vec![Box::new(Other), Box::new(Protect)],
                policy.clone(),
                memory,
            ),
            policy,
            second: 0,
            reads: false,
            other_reads: false,
            pauses: false,
            third: false,
            loss,
            price,
            gain: 0.0,
            tells_end: false,
            reader_executions: 0,
            failures: 0,
            is_slow: false,
            comes_back_s: 0,
            protected_since: None,
            on: BTreeMap::new(),
            whose: BTreeMap::new(),
            contains: BTreeMap::new(),
            open: BTreeSet::new(),
            applied: vec![],
            verdicts: vec![],
            pending: vec![],
            noise: 1,
            from_memory: 0,
            faults: 300,
            third_faults: 0,
            rough_loss: 1.0,
            rough: 1.0,
            owners: (Owner::Machine, Owner::Machine),
            busy: 1.0,
        }
    }

    fn is_contained(&self) -> bool {
        self.is_on("contain")
    }

    /// Whether a change by this effector is on.
    fn is_on(&self, effector: &str) -> bool {
        self.on
            .iter()
            .any(|(id, on)| *on && self.whose.get(id).is_some_and(|e| e == effector))
    }

    /// Whether this reader is contained now.
    fn contains(&self, reader: &str) -> bool {
        self.contains
            .iter()
            .any(|(id, name)| name == reader && self.on.get(id) == Some(&true))
    }

    /// The factor of this second: it falls from the one end to the other in sixteen.
    fn roughness(&self, by: f64) -> f64 {
        by.powf(1.0 - (self.second % 16) as f64 / 8.0)
    }

    fn snapshot(&mut self) -> Snapshot {
        let contained = self.contains("reader");
        let pushed_out = (self.reads && !contained) || (self.other_reads && !self.contains("other reader"));
        if pushed_out {
            self.protected_since = None;
        } else {
            self.protected_since.get_or_insert(self.second);
        }
        let loses = self
            .protected_since
            .is_none_or(|at| self.reads && self.second < at + self.comes_back_s);
        let reading = self.reads || self.other_reads;
        let second = Nanoseconds::from_secs(1);
        let (mut workloads, mut samples) = (vec![], vec![]);
        for (i, name) in NAMES.iter().enumerate() {
            let is_reader = i == 1 || i == 3;
            if (i == 1 && !self.reads) || (i == 2 && !self.third) || (i == 3 && !self.other_reads) {
                continue;
            }
            self.noise = self.noise.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let noise = 1.0 + 0.02 * ((self.noise >> 33) as f64 / (1u64 << 31) as f64 - 0.5);
            let rate = match i {
                0 if loses => 1000.0 * (1.0 - self.loss) * self.roughness(self.rough_loss),
                0 => 1000.0 * self.roughness(self.rough),
                1 if contained => 1000.0 * (1.0 - self.price),
                2 if self.is_on("other") => 1000.0 * (1.0 + self.gain),
                _ => 1000.0,
            } * noise;
            let id = WorkloadId::new(*name);
            let is_over = self.tells_end && i == 0 && !self.reads && self.contains("reader");
            workloads.push(Workload {
                id: id.clone(),
                kind: WorkloadKind::ProcessGroup,
                former: None,
                owner: match i {
                    0 => self.owners.0.clone(),
                    1 | 3 => self.owners.1.clone(),
                    _ => Owner::Machine,
                },
                others: Vec::new(),
                fingerprint: Fingerprint::new(*name),
                program: (*name).into(),
                executable: (*name).into(),
                processes: vec![ProcessId {
                    pid: 100 + i as i32,
                    start_ticks: 1,
                }],
                choice: OperatorChoice {
                    tuned: is_over.then(|| "reader has ended".into()).into_iter().collect(),
                    ..OperatorChoice::default()
                },
            });
            let rests = self.pauses && self.second % 40 >= 20;
            let mib = |n: u64| Bytes::from_mib(if is_reader && !rests { n } else { 0 });
            // A program that waits uses as much less CPU as it does less work, and its pages are not resident any more.
            let waits = i == 0 && loses;
            let cpu = if waits {
                0.9 * (1.0 - self.loss).clamp(0.01, 1.0)
            } else {
                0.9
            };
            samples.push(WorkloadSample {
                id: id.clone(),
                interval: second,
                age: Nanoseconds::from_secs(self.second + 100),
                processes: 1,
                threads: 1,
                cpu: Nanoseconds::from_secs_f64(cpu),
                cpu_busiest: Nanoseconds::from_secs_f64(cpu),
                runqueue_wait: Nanoseconds::ZERO,
                faults_minor: 0,
                faults_major: match i {
                    _ if waits => self.faults,
                    2 if loses => self.third_faults,
                    _ => 0,
                },
                churn: 0,
                resident: Bytes::from_mib(if waits || is_reader || (i == 0 && self.from_memory > 0) {
                    5
                } else {
                    512
                }),
                anonymous: Bytes::ZERO,
                shared: Bytes::ZERO,
                huge: None,
                meters: if self.open.contains(&id) {
                    vec![MeterReading {
                        meter: "progress".into(),
                        work: rate,
                        interval: second,
                        counted: 1.0,
                        lag: Nanoseconds::ZERO,
                    }]
                } else {
                    vec![]
                },
                reads: if i == 0 {
                    Reads {
                        called: Bytes::from_mib(if waits { 0 } else { self.from_memory }),
                        ..Reads::default()
                    }
                } else {
                    Reads {
                        from_storage: mib(500),
                        called: mib(500),
                        calls: 500,
                        in_sequence: mib(500),
                        ..Reads::default()
                    }
                },
                spans: None,
                executions: if i == 1 { self.reader_executions } else { 0 },
            });
        }
        Snapshot {
            at: Nanoseconds::from_secs(self.second),
            unix_seconds: self.second,
            interval: second,
            machine: MachineSample {
                cpu_busy: Nanoseconds::from_secs_f64(self.busy),
                // Tasks wait for memory all the time, which puts other trials off.
                pressure_memory: Pressure {
                    some: if reading { second } else { Nanoseconds::ZERO },
                    full: Nanoseconds::ZERO,
                },
                paging: Paging {
                    refaults_file: if reading { 10_000 } else { 0 },
                    ..Paging::default()
                },
                ..MachineSample::default()
            },
            workloads: Some(workloads),
            samples,
            own_cpu: Nanoseconds::ZERO,
            own_resident: Bytes::ZERO,
            canary: None,
        }
    }

    fn step(&mut self, event: Event) {
        let now = Nanoseconds::from_secs(self.second);
        for command in self.engine.step(now, self.second, event) {
            match command {
                Command::FindMeters(id) => self.pending.push(Event::MetersFound(
                    id,
                    Ok(vec![MeterCandidate {
                        id: "progress".into(),
                        class: MeterClass::Application,
                        unit: "operation".into(),
                        cost_per_count: Nanoseconds::ZERO,
                        lag: Nanoseconds::ZERO,
                        refused: None,
                    }]),
                )),
                Command::OpenMeter(id, meter) => {
                    self.open.insert(id.clone());
                    self.pending.push(Event::MeterOpened(id, meter, Ok(())));
                }
                Command::CloseMeter(id, _) => {
                    self.open.remove(&id);
                }
                Command::Apply(action) => {
                    self.applied.push((self.second, action.effector.to_string()));
                    self.whose.insert(action.id, action.effector.to_string());
                    if let Target::Reader(reader) = &action.target {
                        self.contains.insert(action.id, reader.workload.to_string());
                    }
                    let contains = action.effector.as_str() == "contain";
                    if contains && self.failures > 0 {
                        self.failures -= 1;
                        let fault = Fault {
                            kind: FaultKind::Vanished,
                            text: "it has ended".into(),
                        };
                        let failed = Event::Settled(action.id, Direction::Apply, Err(fault));
                        self.pending.push(failed);
                        continue;
                    }
                    self.on.insert(action.id, true);
                    if !(contains && self.is_slow) {
                        self.settled(action.id, Direction::Apply);
                    }
                }
                Command::Switch(id, direction) => {
                    self.on.insert(id, direction == Direction::Apply);
                    self.settled(id, direction);
                }
                Command::Close(id) => {
                    assert_eq!(self.on.remove(&id), Some(false), "closed when undone");
                }
                Command::RecordExperiment(r) => {
                    if let Some(verdict) = r.verdict {
                        self.verdicts
                            .push((r.id, r.strategy.to_string(), verdict, r.reason));
                    }
                }
                _ => {}
            }
        }
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
            self.second += 1;
            let snapshot = self.snapshot();
            self.step(Event::Sampled(Box::new(snapshot)));
            for _ in 0..64 {
                if self.pending.is_empty() {
                    break;
                }
                let event = self.pending.remove(0);
                self.step(event);
            }
        }
    }

    fn stage(&self, name: &str) -> Stage {
        let view = self.engine.view();
        view.workloads
            .iter()
            .find(|w| w.name.as_str() == name)
            .unwrap()
            .stage
    }

    /// All that was decided about one of them.
    fn story(&self, name: &str) -> String {
        let view = self.engine.view();
        let w = view.workloads.iter().find(|w| w.name.as_str() == name).unwrap();
        let told: Vec<&str> = w.decisions.iter().map(|d| d.text.as_str()).collect();
        told.join("\n")
    }

    fn verdict_of(&self, strategy: &str) -> Option<(Verdict, String)> {
        self.verdicts
            .iter()
            .find(|v| v.1 == strategy)
            .map(|v| (v.2, v.3.clone()))
    }

    /// The reader has read for so long, beside a program that was alone before.
    fn beside_the_reader(loss: f64, price: f64, seconds: u64) -> Self {
        let mut world = Self::new(loss, price);
        world.run(90);
        world.reads = true;
        world.run(seconds);
        world
    }

    /// A protection was tried and did not help.
    fn assert_it_did_not_help(&self) {
        let (verdict, reason) = self.verdict_of("protect").unwrap();
        assert!(
            matches!(verdict, Verdict::Rejected | Verdict::Inconclusive),
            "{verdict:?} {reason}"
        );
    }

    /// However many pages it loses, nobody is to be contained for so long.
    fn assert_no_attempt(&mut self, faults: u64, seconds: u64) {
        let attempts = self.attempts();
        self.faults = faults;
        self.run(seconds);
        assert_eq!(self.attempts(), attempts, "{:?}", self.applied);
    }

    /// What the blocks of the trial discard of their beginning (s).
    fn washout_s(&self) -> f64 {
        self.engine.view().experiments[0].washout_s
    }

    /// Whether a guard probes.
    fn is_probed(&self) -> bool {
        let view = self.engine.view();
        view.in_force.iter().any(|c| c.guard.starts_with("probing"))
    }

    /// What is told of the guard of the first change in force.
    fn guard(&self) -> String {
        let view = self.engine.view();
        view.in_force.first().map(|c| c.guard.clone()).unwrap_or_default()
    }

    /// Seconds from now, or from the end of the probe that runs, to the next.
    fn next_probe_in(&mut self) -> u64 {
        self.run_until(|w| !w.is_probed());
        let from = self.second;
        self.run_until(Self::is_probed);
        self.second - from
    }

    /// How often a reader was to be contained.
    fn attempts(&self) -> usize {
        self.applied.iter().filter(|a| a.1 == "contain").count()
    }

    /// Runs until something is so, which it is to be within a day.
    fn run_until(&mut self, is_so: impl Fn(&Self) -> bool) {
        let day = self.second + 86_400;
        while !is_so(self) {
            assert!(self.second < day, "{:?} {:?}", self.applied, self.verdicts);
            self.run(1);
        }
    }

    /// The reader was proven to take the memory of the program, and has ended.
    fn after_the_first_night() -> Self {
        let mut world = Self::new(0.95, 0.0);
        world.tells_end = true;
        world.run(90);
        world.reads = true;
        world.run(400);
        assert_eq!(world.verdict_of("protect").unwrap().0, Verdict::Accepted);
        world.reads = false;
        world.run(120);
        assert!(!world.is_contained());
        world
    }

    /// A person says that the reader is to be left alone.
    fn protect_the_reader(&mut self) {
        let protected = Policy {
            workloads: vec![WorkloadRule {
                pattern: "reader".into(),
                never: true,
                ..WorkloadRule::default()
            }],
            ..self.policy.clone()
        };
        self.configure(protected);
    }

    fn configure(&mut self, policy: Policy) {
        self.policy = policy.clone();
        self.step(Event::Operator(OperatorRequest::Configure(Box::new(policy))));
    }

    fn contained_at(&self) -> Option<u64> {
        self.applied.iter().find(|a| a.1 == "contain").map(|a| a.0)
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
    Machine {
        kernel: "test".into(),
        cpu_model: "test".into(),
        hypervisor: None,
        cpus,
        nodes: vec![],
        memory: Bytes::from_mib(4096),
        page_size: Bytes(4096),
        huge_page_size: Bytes(2 << 20),
        llc_size: Bytes::ZERO,
        boot_id: "boot".into(),
        capabilities: vec![],
    }
}

#[test]
fn it_is_made_at_once_and_proven_after() {
    let mut world = World::new(0.95, 0.0);
    world.run(90);
    assert_eq!(
        world.stage("program"),
        Stage::Declined,
        "nothing to gain while nobody reads"
    );
    assert_eq!(world.contained_at(), None);
    world.reads = true;
    world.run(4);
    // Tasks wait for memory, there is no passive history, its meter was closed, it is small and idle: none of it holds it up.
    let at = world.contained_at().unwrap();
    assert!(at <= 93, "contained at {at}");
    world.run(5);
    assert!(world.is_contained(), "it protects before the first coin");
    world.run(400);
    let (verdict, reason) = world.verdict_of("protect").unwrap();
    assert_eq!(verdict, Verdict::Accepted, "{reason}");
    assert_eq!(world.stage("program"), Stage::Improved);
    assert!(world.is_contained());
    // Off blocks that are rare, each with a third of the work lost that is predicted to be gained.
    let costs = world.story("program");
    let costs = costs.split_once("is expected to cost ").unwrap().1;
    let seconds: f64 = costs.split_once(" s of lost work").unwrap().0.parse().unwrap();
    assert!((1.0..30.0).contains(&seconds), "{costs}");
}

/// A protection without a probation, on a machine where the reader never ends.
fn guarded() -> World {
    let mut world = World::new(0.5, 0.0);
    let policy = Policy {
        probation_pairs: 0,
        ..world.policy.clone()
    };
    world.configure(policy);
    world.run(90);
    world.reads = true;
    world.run_until(|w| w.guard().starts_with("passed probation"));
    world
}

#[test]
fn fine_probes_of_what_protects_come_ever_rarer_until_the_regime_changes() {
    let mut world = guarded();
    let gaps: Vec<u64> = (0..4).map(|_| world.next_probe_in()).collect();
    assert!(
        gaps.windows(2)
            .skip(1)
            .all(|g| g[1].abs_diff(2 * g[0]) < g[0] / 10),
        "{gaps:?}"
    );
    // Once it is known how the machine works after that probe.
    world.run_until(|w| !w.is_probed());
    world.run(120);
    world.busy = 1.8;
    let soon = world.next_probe_in();
    assert!(soon <= 620, "{soon} after {gaps:?}");
    let then = world.next_probe_in();
    assert!(then < gaps[2] && then <= 1900, "{then} after {gaps:?}");
}

#[test]
fn a_probe_that_would_exceed_the_daily_budget_waits_and_says_so() {
    let mut world = guarded();
    let spent = world.engine.view().budget.harm_exposure_day;
    assert!(spent > 0.0, "off blocks of a protection are lost work");
    let policy = Policy {
        harm_exposure_per_day_max: spent,
        ..world.policy.clone()
    };
    world.configure(policy);
    world.run_until(|w| w.guard().contains("waits for the daily budget of lost work"));
    let since = world.second;
    world.run_until(World::is_probed);
    // Room comes when what was spent is a day old.
    assert!(world.second - since > 3600, "{}", world.second - since);
}

/// A night of a program and a reader of these owners, with these rules of root's.
fn night_of(program: Owner, reader: Owner, one_owner: Vec<Vec<String>>) -> World {
    let mut world = World::new(0.95, 0.0);
    world.owners = (program, reader);
    world.policy.one_owner = one_owner;
    let policy = Box::new(world.policy.clone());
    world.step(Event::Operator(OperatorRequest::Configure(policy)));
    world.run(90);
    world.reads = true;
    world.run(400);
    world
}

#[test]
fn nobodys_reader_is_contained_for_another_owners_program_unless_root_says_so() {
    let user = || Owner::User(1000);
    let pod = |name: &str| Owner::Tenant(format!("pod:{name}"));
    for (program, reader) in [
        (user(), Owner::Machine),
        (Owner::Machine, user()),
        (user(), Owner::User(1001)),
        (pod("a"), pod("b")),
    ] {
        let world = night_of(program.clone(), reader.clone(), vec![]);
        assert_eq!(world.contained_at(), None, "{program} {reader}");
        let told = world.engine.view();
        let advised = told.advice.iter().any(|a| a.id == "protect/reader");
        assert!(advised, "a person can do it: {told:?}");
        let rule = vec![vec![program.to_string(), reader.to_string()]];
        let world = night_of(program, reader, rule);
        assert!(world.is_contained(), "{}", world.story("program"));
    }
    assert!(night_of(user(), user(), vec![]).is_contained());
}

#[test]
fn a_strategy_that_does_not_ask_whose_a_reader_is_is_declined_with_the_rule() {
    /// Contains whoever reads.
    struct Blind;
    impl Strategy for Blind {
        fn id(&self) -> StrategyId {
            "blind".into()
        }
        fn summary(&self) -> &'static str {
            "test"
        }
        fn applicable(&self, _: &Machine) -> Result<(), String> {
            Ok(())
        }
        fn relieves(&self) -> bool {
            true
        }
        fn consider(&self, seen: &Seen<'_>) -> Opinion {
            let Some(reader) = seen.neighbours.iter().find(|n| n.reads.from_storage.0 > 0) else {
                return Opinion::Decline(Declined::because("nobody reads"));
            };
            proposal(
                Target::Reader(FileReader {
                    workload: reader.id.clone(),
                    processes: reader.processes.clone(),
                    limit: Bytes::from_mib(64),
                }),
                true,
            )
        }
    }
    let night = |owner: Owner| {
        let mut world = World::new(0.95, 0.0);
        world.engine = Engine::new(
            machine(),
            vec![Box::new(Blind)],
            world.policy.clone(),
            Memory::default(),
        );
        world.owners = (owner, Owner::Machine);
        world.run(90);
        world.reads = true;
        world.run(700);
        world
    };
    assert!(night(Owner::Machine).contained_at().is_some());
    let world = night(Owner::User(1000));
    assert_eq!(world.contained_at(), None);
    let story = world.story("program");
    assert!(
        story.contains("policy.one_owner = [[\"machine\", \"user:1000\"]]"),
        "{story}"
    );
}

#[test]
fn what_was_proven_of_one_tenants_reader_is_not_recalled_for_the_next() {
    // A tenant that comes later may have the same fingerprints and be another one: each night is a trial.
    let second_night_is_a_trial = |owner: Owner| {
        let mut world = World::new(0.95, 0.0);
        world.owners = (owner.clone(), owner);
        world.tells_end = true;
        world.run(90);
        world.reads = true;
        world.run(400);
        assert_eq!(world.verdict_of("protect").unwrap().0, Verdict::Accepted);
        world.reads = false;
        world.run(120);
        assert!(!world.is_contained());
        world.reads = true;
        world.run(10);
        assert!(world.is_contained());
        !world.engine.view().experiments.is_empty()
    };
    assert!(!second_night_is_a_trial(Owner::Machine));
    assert!(!second_night_is_a_trial(Owner::User(1000)));
    assert!(second_night_is_a_trial(Owner::Tenant("pod:a".into())));
}

#[test]
fn blocks_discard_what_it_takes_to_come_back() {
    let washout_after = |comes_back_s: u64| {
        let mut world = World::new(0.95, 0.0);
        world.comes_back_s = comes_back_s;
        world.run(90);
        world.reads = true;
        world.run(45);
        assert!(world.verdicts.is_empty(), "{:?}", world.verdicts);
        let washout_s = world.washout_s();
        world.run(600);
        let (verdict, reason) = world.verdict_of("protect").unwrap();
        assert_eq!(verdict, Verdict::Accepted, "{reason}");
        washout_s
    };
    let quick = washout_after(0);
    assert_eq!(quick, 2.0);
    // Looked at in windows of two seconds, from the moment in which it was settled, and a second more.
    let slow = washout_after(12);
    assert!((10.0..=15.0).contains(&slow), "{slow}");
}

#[test]
fn a_reader_that_was_there_first_is_contained_though_the_loss_makes_the_meter_vary() {
    let mut world = World::new(0.95, 0.0);
    world.rough_loss = 10.0;
    world.reads = true;
    world.run(60);
    let at = world.contained_at().unwrap();
    assert!(at <= 40, "contained at {at}");
    let text = world.story("program");
    assert!(text.contains("judges what is done against that only"), "{text}");
    world.run(400);
    let (verdict, reason) = world.verdict_of("protect").unwrap();
    assert_eq!(verdict, Verdict::Accepted, "{reason}");
    // Where it has its pages it varies little, and anything may be judged by it.
    world.run(300);
    let text = world.story("program");
    assert!(text.contains("judges any change from now on"), "{text}");
}

#[test]
fn a_meter_that_was_taken_in_a_loss_and_varies_without_it_judges_nothing_else() {
    for (name, is_rough) in [("varies", 10.0), ("does not", 1.0)] {
        let mut world = World::new(0.95, 0.0);
        (world.rough_loss, world.rough) = (10.0, is_rough);
        world.reads = true;
        // Nobody may be contained: the loss is over when the reader is.
        world.protect_the_reader();
        world.run(100);
        assert_eq!(world.stage("program"), Stage::Observed, "{name}");
        world.reads = false;
        world.run(120);
        let text = world.story("program");
        assert_eq!(
            text.contains("also while the program loses no pages"),
            is_rough > 1.0,
            "{text}"
        );
        assert_eq!(
            text.contains("judges any change from now on"),
            is_rough == 1.0,
            "{text}"
        );
    }
}

#[test]
fn a_program_that_never_ceases_to_lose_is_not_looked_at_for_ever() {
    let mut world = World::new(0.95, 0.0);
    world.rough_loss = 10.0;
    world.reads = true;
    world.protect_the_reader();
    world.run(200);
    assert_eq!(world.stage("program"), Stage::Declined);
    let text = world.story("program");
    assert!(
        text.contains("only what is done against that can be judged"),
        "{text}"
    );
    // Whoever may be contained later is so at once all the same.
    world.other_reads = true;
    world.run_until(|w| w.contains("other reader"));
    assert!(world.second < 215, "{}", world.second);
}

#[test]
fn what_helps_nobody_goes() {
    // It waits for pages, but not because of the reader.
    let world = World::beside_the_reader(0.0, 0.0, 2000);
    world.assert_it_did_not_help();
    assert!(!world.is_contained());
}

#[test]
fn who_was_refused_for_a_small_loss_is_protected_from_a_large_one() {
    let mut world = World::beside_the_reader(0.0, 0.0, 2000);
    world.assert_it_did_not_help();
    // Three times the loss is not another matter …
    world.assert_no_attempt(900, 600);
    // … five times is: it is tried again, for nothing.
    world.faults = 1500;
    world.run(10);
    assert!(world.is_contained(), "{}", world.story("program"));
    let told = "tried again although it was refused: it reads 6.5 MiB again for each second of its CPU time (5.9 MiB/s), and read \
                1.3 MiB at most when it was tried";
    assert!(
        world.story("program").contains(told),
        "{}",
        world.story("program")
    );
    world.run(2000);
    assert!(!world.is_contained());
    // That loss is known by now.
    world.assert_no_attempt(1500, 4000);
    // In the night everything is lost, to a reader that is over in the middle of its trial. It waits for storage nearly all
    // the time, which gives it less in a second than before, when it waited now and then …
    world.faults = 1200;
    world.loss = 0.95;
    world.run(10);
    assert!(world.is_contained(), "{}", world.story("program"));
    world.reads = false;
    world.run(120);
    assert!(!world.is_contained());
    // … which says nothing, so that the next one is tried as well.
    world.reads = true;
    world.run(10);
    assert!(world.is_contained(), "{}", world.story("program"));
    world.run(600);
    let last = world.verdicts.iter().rev().find(|v| v.1 == "protect").unwrap();
    assert_eq!(last.2, Verdict::Accepted, "{}", last.3);
}

#[test]
fn who_idles_and_reads_a_little_is_not_tried_again_for_that() {
    let mut world = World::beside_the_reader(0.0, 0.0, 2000);
    world.assert_it_did_not_help();
    // Eight MiB for a second of CPU time that it hardly uses, and .08 MiB a second.
    world.loss = 0.99;
    world.assert_no_attempt(20, 600);
    world.faults = 300;
    world.run(10);
    assert!(world.is_contained(), "{}", world.story("program"));
}

#[test]
fn a_lump_while_it_is_tried_is_not_what_it_lost() {
    let mut world = World::beside_the_reader(0.0, 0.0, 0);
    world.run_until(World::is_contained);
    world.run_until(|w| !w.is_contained());
    world.faults = 100_000;
    world.run(1);
    world.faults = 300;
    world.run(2000);
    world.assert_it_did_not_help();
    world.faults = 1500;
    world.run(10);
    assert!(world.is_contained(), "{}", world.story("program"));
}

#[test]
fn who_loses_most_is_protected_first() {
    let mut world = World::new(0.95, 0.0);
    world.third = true;
    // More by the clock, and a tenth of it for a second of its CPU time.
    world.third_faults = 400;
    world.run(90);
    world.reads = true;
    world.run_until(World::is_contained);
    // It waits, so that it uses a twentieth of a CPU; the third program uses all of one.
    assert_eq!(world.stage("program"), Stage::Trying, "{}", world.story("third"));
}

#[test]
fn what_was_harmful_is_not_tried_again_for_a_larger_loss() {
    // It does twice its work while the reader reads.
    let mut world = World::beside_the_reader(-1.0, 0.0, 600);
    let (verdict, reason) = world.verdict_of("protect").unwrap();
    assert_eq!(verdict, Verdict::Harmful, "{reason}");
    world.assert_no_attempt(10_000, 600);
}

#[test]
fn after_a_restart_the_back_off_counts_whatever_is_lost() {
    let prior = Prior {
        fingerprint: Fingerprint::new("program"),
        strategy: "protect".into(),
        verdict: Verdict::Rejected,
        effect: None,
        unix_seconds: 0,
        failures: 1,
        settling: None,
    };
    let memory = Memory {
        priors: vec![prior],
        ..Memory::default()
    };
    let mut world = World::remembering(0.95, 0.0, memory);
    world.faults = 10_000;
    world.run(90);
    world.reads = true;
    world.run(600);
    assert_eq!(world.attempts(), 0, "{:?}", world.applied);
}

#[test]
fn what_a_reader_lost_by_is_not_tried_again_for_a_larger_loss() {
    let mut world = World::beside_the_reader(0.95, 0.5, 600);
    let (_, reason) = world.verdict_of("protect").unwrap();
    assert!(reason.contains("reader lost"), "{reason}");
    world.assert_no_attempt(10_000, 600);
}

#[test]
fn a_reader_that_loses_by_it_is_seen_although_nobody_knew_its_meter() {
    let world = World::beside_the_reader(0.95, 0.5, 600);
    let (verdict, reason) = world.verdict_of("protect").unwrap();
    assert_eq!(verdict, Verdict::Inconclusive, "{reason}");
    assert!(reason.contains("reader lost"), "{reason}");
    assert!(!world.is_contained());
}

#[test]
fn a_reader_that_finds_its_file_in_memory_for_a_while_is_not_looked_at_anew_each_time() {
    let mut world = World::new(0.95, 0.0);
    world.pauses = true;
    world.run(90);
    world.reads = true;
    world.run(10);
    assert!(world.is_contained());
    for _ in 0..300 {
        world.run(1);
        assert_ne!(world.stage("reader"), Stage::Ignored, "at {} s", world.second);
    }
}

#[test]
fn a_program_that_works_on_files_in_memory_has_a_meter_before_memory_is_short() {
    for (from_memory, is_known) in [(100, true), (10, false)] {
        let mut world = World::new(0.95, 0.0);
        world.from_memory = from_memory;
        world.run(90);
        assert_eq!(world.stage("program") != Stage::Ignored, is_known);
        world.reads = true;
        let since = world.second;
        world.run_until(World::is_contained);
        let after_s = world.second - since;
        assert_eq!(after_s <= 8, is_known, "contained after {after_s} s");
    }
}

#[test]
fn a_reader_may_lose_what_the_program_is_sure_to_gain_and_no_more() {
    // A backup that gets a tenth slower for a database that comes back.
    let mut world = World::beside_the_reader(0.95, 0.11, 400);
    let (verdict, reason) = world.verdict_of("protect").unwrap();
    assert_eq!(verdict, Verdict::Accepted, "{reason}");
    assert!(reason.contains("reader lost 1"), "the price is told: {reason}");
    // Its guard knows the price, too.
    world.run(4 * 3600);
    assert!(world.is_contained());

    // The same loss for next to nothing.
    let mut world = World::new(0.1, 0.2);
    world.run(90);
    world.reads = true;
    world.run(2000);
    let (verdict, reason) = world.verdict_of("protect").unwrap();
    assert_eq!(verdict, Verdict::Inconclusive, "{reason}");
    assert!(reason.contains("reader lost"), "{reason}");
    assert!(!world.is_contained());
}

#[test]
fn a_reader_in_whose_process_another_program_runs_is_released() {
    let mut world = World::new(0.95, 0.0);
    world.run(90);
    world.reads = true;
    world.run_until(World::is_contained);
    world.run(40);
    let attempts = world.attempts();
    world.reader_executions += 1;
    world.run(2);
    let (verdict, reason) = world.verdict_of("protect").unwrap();
    assert_eq!(verdict, Verdict::Aborted);
    assert_eq!(
        reason,
        "the process of its reader reader has executed another program"
    );
    // What runs now takes the memory as well, and is contained anew.
    let accepted = |w: &World| w.verdicts.iter().any(|v| v.2 == Verdict::Accepted);
    world.run_until(accepted);
    assert!(world.is_contained() && world.attempts() > attempts);
    // In force it goes as well.
    let attempts = world.attempts();
    world.reader_executions += 1;
    world.run_until(|w| w.attempts() > attempts);
}

#[test]
fn a_running_trial_of_something_else_makes_way() {
    let mut world = World::new(0.95, 0.0);
    world.third = true;
    while world.applied.is_empty() && world.second < 200 {
        world.run(1);
    }
    assert_eq!(world.applied[0].1, "other");
    world.run(5);
    assert_eq!(world.verdict_of("other"), None, "it runs");
    let since = world.second;
    world.reads = true;
    world.run(5);
    let (verdict, reason) = world.verdict_of("other").unwrap();
    assert_eq!(verdict, Verdict::Aborted);
    assert!(reason.contains("comes first"), "{reason}");
    assert!(world.contained_at().unwrap() <= since + 4);
}

#[test]
fn an_operator_who_paused_is_obeyed() {
    let mut world = World::new(0.95, 0.0);
    world.run(90);
    world.step(Event::Operator(OperatorRequest::Pause));
    world.reads = true;
    world.run(60);
    assert_eq!(world.contained_at(), None);
    world.step(Event::Operator(OperatorRequest::Resume));
    world.run(5);
    assert!(world.contained_at().is_some());
}

#[test]
fn what_a_person_took_back_is_not_made_again_at_once() {
    let mut world = World::new(0.95, 0.0);
    world.run(90);
    world.reads = true;
    world.run(8);
    assert!(world.is_contained(), "it protects before the first coin");
    world.step(Event::Operator(OperatorRequest::UndoAll));
    world.run(300);
    assert!(!world.is_contained());
    assert_eq!(world.applied.len(), 1, "{:?}", world.applied);
    world.run(400);
    assert_eq!(world.applied.len(), 2, "ten minutes later it is looked at again");
}

#[test]
fn a_reader_that_becomes_the_important_one_ends_it() {
    let mut world = World::new(0.95, 0.0);
    world.run(90);
    world.reads = true;
    world.run(400);
    let (verdict, reason) = world.verdict_of("protect").unwrap();
    assert_eq!(verdict, Verdict::Accepted, "{reason}");
    assert!(world.is_contained());
    // From now on it reads the same data again and again, and the limit takes more than half of its work.
    world.price = 0.6;
    // Its probes are some 40 minutes apart, because each costs the program nearly all of its work; then at once again.
    world.run(4 * 3600);
    assert!(!world.is_contained(), "its guard sees the loss of the neighbour");
}

#[test]
fn a_reader_that_a_person_protects_is_released_at_once() {
    // In the trial, and after its verdict.
    for seconds in [8, 400] {
        let mut world = World::new(0.95, 0.0);
        world.run(90);
        world.reads = true;
        world.run(seconds);
        assert!(!world.applied.is_empty());
        world.protect_the_reader();
        world.run(2);
        assert!(!world.is_contained(), "after {seconds} s");
        // Memory is as short as it was, and the program loses as much.
        world.run(1500);
        assert_eq!(world.applied.len(), 1, "{:?}", world.applied);
    }
}

#[test]
fn what_a_person_can_do_about_a_reader_is_said_while_it_reads() {
    let mut world = World::new(0.95, 0.0);
    world.protect_the_reader();
    world.run(90);
    let is_told = |w: &World| w.engine.view().advice.iter().any(|a| a.id == "protect/reader");
    assert!(!is_told(&world), "nobody reads");
    world.reads = true;
    world.run(5);
    assert!(is_told(&world) && world.applied.is_empty());
}

#[test]
fn who_takes_memory_is_looked_for_in_a_hurry_for_a_while_only() {
    let mut world = World::new(0.95, 0.0);
    world.run(90);
    let plan = world.engine.sampling();
    assert!(!plan.in_a_hurry);
    assert_eq!(plan.host_every, Some(Nanoseconds::from_secs(4)), "also at rest");
    // Nobody is protected while it is paused.
    world.step(Event::Operator(OperatorRequest::Pause));
    world.reads = true;
    world.run(10);
    assert!(world.engine.sampling().in_a_hurry);
    world.run(400);
    assert!(!world.engine.sampling().in_a_hurry, "memory is still short");
    world.reads = false;
    world.run(120);
    world.reads = true;
    world.run(10);
    assert!(world.engine.sampling().in_a_hurry, "short again");
    world.step(Event::Operator(OperatorRequest::Resume));
    world.run(5);
    assert!(world.contained_at().is_some() && !world.engine.sampling().in_a_hurry);
}

#[test]
fn another_reader_is_contained_after_the_first() {
    let mut world = World::new(0.95, 0.0);
    world.run(90);
    world.reads = true;
    world.run(400);
    assert_eq!(world.verdict_of("protect").unwrap().0, Verdict::Accepted);
    world.other_reads = true;
    // Well before the strategy would be asked again about a program that has what it proposed.
    world.run(90);
    assert!(
        world.contains("reader") && world.contains("other reader"),
        "{:?}",
        world.contains
    );
    world.run(400);
    let accepted = world.verdicts.iter().filter(|v| v.2 == Verdict::Accepted).count();
    assert_eq!(accepted, 2, "{:?}", world.verdicts);
    assert!(world.contains("reader") && world.contains("other reader"));
    // The first ends and is released: the other one stays contained all the time.
    world.reads = false;
    world.tells_end = true;
    for _ in 0..60 {
        world.run(1);
        assert!(world.contains("other reader"), "{:?}", world.on);
    }
    assert!(!world.contains("reader"), "{:?}", world.on);
}

#[test]
fn a_known_reader_and_the_probe_of_another_guard_wait_for_each_other() {
    // A change for the third program is guarded, and the next probe of it is at hand.
    let at_a_probe = || {
        let mut world = World::after_the_first_night();
        world.gain = 0.3;
        world.third = true;
        world.run_until(|w| w.verdict_of("other").is_some());
        assert_eq!(world.verdict_of("other").unwrap().0, Verdict::Accepted);
        world.run_until(World::is_probed);
        world
    };
    // The reader comes while it is probed.
    let mut world = at_a_probe();
    world.reads = true;
    while world.is_probed() {
        assert_eq!(world.attempts(), 1, "{:?}", world.applied);
        world.run(1);
    }
    world.run(3);
    assert_eq!(world.attempts(), 2, "{:?}", world.applied);
    assert!(world.is_contained() && world.engine.view().experiments.is_empty());
    // It comes just before, and the kernel takes its time to contain it.
    let probed_at = at_a_probe().second;
    let mut world = World::after_the_first_night();
    world.gain = 0.3;
    world.third = true;
    world.run((probed_at - 4).saturating_sub(world.second));
    assert!(!world.is_probed());
    world.reads = true;
    world.is_slow = true;
    world.run(2);
    assert_eq!(world.attempts(), 2, "{:?}", world.applied);
    for _ in 0..60 {
        world.run(1);
        assert!(!world.is_probed(), "probed at {}", world.second);
    }
    let (made, _) = world.contains.last_key_value().unwrap();
    world.settled(*made, Direction::Apply);
    let settled_at = world.second;
    world.run_until(World::is_probed);
    assert!(world.second <= settled_at + 30 && world.is_contained());
}

#[test]
fn what_could_not_be_made_is_no_recall() {
    let mut world = World::after_the_first_night();
    // It has ended each time before it could be contained; then one lives longer.
    world.failures = 3;
    world.reads = true;
    world.run_until(|w| w.attempts() == 5);
    world.run(5);
    assert!(world.is_contained());
    assert!(world.engine.view().experiments.is_empty(), "not tried anew");
    // The second, and the last before the next trial.
    for is_tried in [false, true] {
        world.reads = false;
        world.run(120);
        assert!(!world.is_contained());
        world.reads = true;
        world.run(10);
        assert!(world.is_contained());
        assert_eq!(!world.engine.view().experiments.is_empty(), is_tried);
    }
}

#[test]
fn only_memory_of_its_own_that_grows_is_told() {
    let told_of = |anonymous: fn(u64) -> u64| {
        let mut world = World::new(0.95, 0.0);
        for minute in 0..60 {
            world.second += 60;
            let mut snapshot = world.snapshot();
            let sample = &mut snapshot.samples[0];
            sample.resident = Bytes::from_mib(1000 + 10 * minute);
            sample.anonymous = Bytes::from_mib(anonymous(minute));
            world.step(Event::Sampled(Box::new(snapshot)));
        }
        let advice = world.engine.view().advice;
        advice.into_iter().find(|a| a.id == "memory/growth/program")
    };
    // It maps more and more of a file; or nobody has looked.
    assert_eq!(told_of(|_| 500), None);
    assert_eq!(told_of(|_| 0), None);
    let advice = told_of(|minute| 500 + 10 * minute).unwrap();
    assert!(advice.finding.contains("from 500"), "{}", advice.finding);
}
