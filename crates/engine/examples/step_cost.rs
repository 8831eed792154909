//! What one step of the mind costs: `cargo run --release -p homeostat-engine --example step_cost [WORKLOADS…]`.
//!
//! Workloads above the floors, each with a meter, a scan every ten seconds and samples of all of them in it, detailed
//! samples every second, one strategy that looks first where a workload runs and proposes for every tenth. One virtual
//! hour; the columns are the time of `Engine::step` on a sample with a scan, on one without, and of all other events.

#![expect(clippy::print_stdout, reason = "an example prints its table")]

use homeostat_engine::{
    Command, Declined, Engine, Event, Memory, Opinion, Policy, Proposal, Seen, Stage, Strategy,
};
use homeostat_model::action::Target;
use homeostat_model::{
    ActionId, Bytes, Cpu, CpuId, Direction, Effect, EffectorId, Fingerprint, LlcId, Locality, Machine,
    MachineSample, MeterCandidate, MeterClass, MeterReading, Nanoseconds, NodeId, OperatorChoice, ProcessId,
    Progress, Snapshot, StrategyId, Workload, WorkloadId, WorkloadKind, WorkloadSample,
};
use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

struct Places;

impl Strategy for Places {
    fn id(&self) -> StrategyId {
        "places".into()
    }
    fn summary(&self) -> &'static str {
        "looks, and proposes for every tenth workload"
    }
    fn applicable(&self, _: &Machine) -> Result<(), String> {
        Ok(())
    }
    fn consider(&self, seen: &Seen<'_>) -> Opinion {
        if seen.locality.is_none() {
            return Opinion::InspectLocality;
        }
        if !seen.workload.id.as_str().ends_with("0.service") {
            return Opinion::Decline(Declined::because("nothing to gain"));
        }
        Opinion::Propose(Box::new(Proposal {
            hypothesis: "a place of its own".into(),
            predicted: Effect {
                estimate: 0.3,
                lower: 0.0,
                upper: 0.5,
                confidence: 0.9,
            },
            effector: EffectorId::from("thread_placement"),
            target: Target::Cpus(vec![CpuId(0), CpuId(1)]),
            stages: vec![],
            arguments: BTreeMap::new(),
            reversible: true,
            settling: Nanoseconds::from_millis(100),
            risk: "none".into(),
            advice: vec![],
        }))
    }
}

fn machine(cpus: u32) -> Machine {
    Machine {
        kernel: "example".into(),
        cpu_model: "example".into(),
        hypervisor: None,
        cpus: (0..cpus)
            .map(|i| Cpu {
                id: CpuId(i),
                core: i,
                package: 0,
                llc: LlcId(0),
                node: NodeId(0),
            })
            .collect(),
        nodes: vec![],
        memory: Bytes::from_mib(1 << 20),
        page_size: Bytes(4096),
        huge_page_size: Bytes(2 << 20),
        llc_size: Bytes(0),
        boot_id: "boot".into(),
        capabilities: vec![],
    }
}

#[derive(Default)]
struct Spent {
    steps: u32,
    sum: Duration,
    most: Duration,
}

impl Spent {
    fn add(&mut self, spent: Duration) {
        self.steps += 1;
        self.sum += spent;
        self.most = self.most.max(spent);
    }

    fn show(&self) -> String {
        let mean = self.sum.as_secs_f64() * 1e3 / f64::from(self.steps.max(1));
        format!("{mean:8.3} {:8.3}", self.most.as_secs_f64() * 1e3)
    }
}

struct World {
    engine: Engine,
    count: usize,
    second: u64,
    open: BTreeMap<WorkloadId, Vec<String>>,
    on: BTreeMap<ActionId, (WorkloadId, bool)>,
    waiting: VecDeque<Event>,
}

impl World {
    fn new(count: usize, cpus: u32) -> Self {
        let policy = Policy {
            experiments_per_hour_max: 1000,
            detail_workloads_max: 64,
            ..Policy::default()
        };
        Self {
            engine: Engine::new(machine(cpus), vec![Box::new(Places)], policy, Memory::default()),
            count,
            second: 1000,
            open: BTreeMap::new(),
            on: BTreeMap::new(),
            waiting: VecDeque::new(),
        }
    }

    fn id(i: usize) -> WorkloadId {
        WorkloadId::new(format!("workload-{i:05}.service"))
    }

    fn sample(&self, i: usize) -> WorkloadSample {
        let id = Self::id(i);
        let on = self.on.values().any(|(w, on)| *w == id && *on);
        // A little noise that repeats after a prime number of seconds.
        let noise = 1.0 + 0.01 * ((self.second * 7919 + i as u64 * 104_729) % 101) as f64 / 101.0;
        let rate = 1000.0 * if on { 1.3 } else { 1.0 } * noise;
        let meters = self
            .open
            .get(&id)
            .into_iter()
            .flatten()
            .map(|m| MeterReading {
                meter: m.as_str().into(),
                work: rate,
                interval: Nanoseconds::from_secs(1),
            })
            .collect();
        WorkloadSample {
            id,
            interval: Nanoseconds::from_secs(1),
            age: Nanoseconds::from_secs(self.second),
            processes: 1,
            threads: 1,
            cpu: Nanoseconds::from_secs(1),
            cpu_busiest: Nanoseconds::from_secs(1),
            runqueue_wait: Nanoseconds::ZERO,
            faults_minor: 0,
            faults_major: 0,
            churn: 0,
            resident: Bytes::from_mib(512),
            anonymous: Bytes::from_mib(512),
            shared: Bytes::ZERO,
            huge: None,
            meters,
        }
    }

    fn snapshot(&self, scan: bool) -> Snapshot {
        let workloads = scan.then(|| {
            (0..self.count)
                .map(|i| Workload {
                    id: Self::id(i),
                    kind: WorkloadKind::Unit,
                    fingerprint: Fingerprint::new(format!("unit {i}")),
                    program: "program".into(),
                    executable: "/usr/bin/program".into(),
                    processes: vec![ProcessId {
                        pid: 1000 + i as i32,
                        start_ticks: 1,
                    }],
                    choice: OperatorChoice::default(),
                })
                .collect()
        });
        let detail = self.engine.sampling().detail;
        let samples = (0..self.count)
            .filter(|i| scan || detail.binary_search(&Self::id(*i)).is_ok())
            .map(|i| self.sample(i))
            .collect();
        Snapshot {
            at: Nanoseconds::from_secs(self.second),
            unix_seconds: self.second,
            interval: Nanoseconds::from_secs(1),
            machine: MachineSample::default(),
            workloads,
            samples,
            own_cpu: Nanoseconds::ZERO,
            own_resident: Bytes::ZERO,
        }
    }

    fn step(&mut self, event: Event) -> Duration {
        let now = Nanoseconds::from_secs(self.second);
        let begin = Instant::now();
        let commands = self.engine.step(now, self.second, event);
        let spent = begin.elapsed();
        for c in commands {
            self.carry_out(c);
        }
        spent
    }

    fn settled(&mut self, id: ActionId, direction: Direction) {
        let done = Progress {
            done: true,
            finished: 1,
            total: 1,
            verified: true,
            ..Progress::default()
        };
        self.waiting.push_back(Event::Settled(id, direction, Ok(done)));
    }

    fn carry_out(&mut self, command: Command) {
        match command {
            Command::FindMeters(id) => {
                let progress = MeterCandidate {
                    id: "progress".into(),
                    class: MeterClass::Application,
                    unit: "operation".into(),
                    cost_per_count: Nanoseconds::ZERO,
                    refused: None,
                };
                self.waiting.push_back(Event::MetersFound(id, Ok(vec![progress])));
            }
            Command::OpenMeter(id, meter) => {
                self.open.entry(id.clone()).or_default().push(meter.to_string());
                self.waiting.push_back(Event::MeterOpened(id, meter, Ok(())));
            }
            Command::CloseMeter(id, _) => {
                self.open.remove(&id);
            }
            Command::InspectLocality(id) => {
                let locality = Locality {
                    workload: id.clone(),
                    threads: 1,
                    threads_of_busiest_process: 1,
                    running: BTreeMap::new(),
                    private: BTreeMap::new(),
                    shared: BTreeMap::new(),
                    huge: BTreeMap::new(),
                    bound: None,
                    counters: None,
                };
                self.waiting.push_back(Event::LocalityInspected(id, Ok(locality)));
            }
            Command::Apply(action) => {
                self.on.insert(action.id, (action.workload.clone(), true));
                self.settled(action.id, Direction::Apply);
            }
            Command::Switch(id, direction) => {
                if let Some(entry) = self.on.get_mut(&id) {
                    entry.1 = direction == Direction::Apply;
                }
                self.settled(id, direction);
            }
            Command::Close(id) => {
                self.on.remove(&id);
            }
            _ => {}
        }
    }
}

fn main() {
    let counts: Vec<usize> = std::env::args().skip(1).filter_map(|a| a.parse().ok()).collect();
    let counts = if counts.is_empty() {
        vec![10, 100, 1000]
    } else {
        counts
    };
    println!(
        "workloads  CPUs  improved  scan: mean   most ms  detail: mean   most ms  other: mean   most ms"
    );
    for (count, cpus) in counts.iter().flat_map(|n| [(*n, 2), (*n, 1024)]) {
        let mut world = World::new(count, cpus);
        let (mut scans, mut details, mut others) = (Spent::default(), Spent::default(), Spent::default());
        for second in 0..3600u64 {
            world.second += 1;
            let scan = second % 10 == 0;
            let snapshot = world.snapshot(scan);
            let spent = world.step(Event::Sampled(Box::new(snapshot)));
            if scan {
                scans.add(spent);
            } else {
                details.add(spent);
            }
            while let Some(event) = world.waiting.pop_front() {
                let spent = world.step(event);
                others.add(spent);
            }
        }
        let improved = world
            .engine
            .view()
            .workloads
            .iter()
            .filter(|w| w.stage == Stage::Improved)
            .count();
        println!(
            "{count:9} {cpus:5} {improved:9}  {}    {}   {}",
            scans.show(),
            details.show(),
            others.show()
        );
    }
}
