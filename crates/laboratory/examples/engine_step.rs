//! How the cost of one step of the mind grows with workloads and CPUs, with the strategies of the registry:
//! `cargo run --release -p homeostat-laboratory --example engine_step [WORKLOADS…]`.
//!
//! Every workload is above the floors, has eight threads on all last-level caches, memory on all nodes and a counter of
//! its own; a scan with samples of all of them every ten seconds, detailed samples every second; ten virtual minutes from
//! a cold start, so that all of them are considered at once. Columns, in milliseconds of `Engine::step`: a sample with a
//! scan (median, the most), a sample without, the answers to inspections (there the strategies work), all other
//! events; then the time of `Engine::view`, which the daemon asks for once a second. The goal is 10 ms for a sample at
//! 1,000 workloads. The engine follows 4,096 workloads at most, the rest is looked at and left alone.
#![expect(clippy::print_stdout, reason = "an example prints its table")]

use homeostat_engine::{Command, Engine, Event, Memory, Policy};
use homeostat_model::{
    ActionId, Bytes, Counters, Direction, Fingerprint, LlcId, Locality, Machine, MachineSample, MemoryAdvice,
    MemoryKind, MemoryMap, MemoryRegion, MeterCandidate, MeterClass, MeterReading, Nanoseconds, NodeId,
    OperatorChoice, Pieces, ProcessId, Progress, Snapshot, Workload, WorkloadId, WorkloadKind,
    WorkloadSample,
};
use homeostat_simulator::hardware::Generation;
use homeostat_simulator::layout::{Chip, Layout};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::error::Error;
use std::time::Instant;

/// Virtual seconds of a run.
const LENGTH_S: u64 = 600;
/// Resident memory of each workload.
const RESIDENT: Bytes = Bytes::from_mib(512);

/// A machine with that many CPUs: chips of at most 64 hardware threads, two chips to a node.
fn machine(cpus: u32) -> Result<Machine, Box<dyn Error>> {
    let cores = (cpus / 2).clamp(1, 32);
    let chips = (cpus / (cores * 2)).max(1);
    let nodes = chips.div_ceil(2);
    let layout = Layout {
        name: format!("{cpus} CPUs"),
        generation: Generation::X86,
        ghz: 3.0,
        threads_per_core: 2,
        chips: (0..chips)
            .map(|c| Chip {
                cores,
                node: c / 2,
                board: c / 8,
            })
            .collect(),
        node_memory: vec![Bytes::from_mib(1 << 20); nodes as usize],
        small_page: Bytes(4096),
        large_page: Bytes::from_mib(2),
        shared_partition: false,
        split_shared: false,
    };
    Ok(layout.machine()?)
}

/// Milliseconds that steps of one kind took.
#[derive(Default)]
struct Spent(Vec<f64>);

impl Spent {
    fn show(&mut self) -> String {
        self.0.sort_by(f64::total_cmp);
        let median = self.0.get(self.0.len() / 2).copied().unwrap_or(0.0);
        format!("{median:8.3} {:8.3}", self.0.last().copied().unwrap_or(0.0))
    }
}

struct World {
    engine: Engine,
    llcs: Vec<LlcId>,
    nodes: Vec<NodeId>,
    count: usize,
    second: u64,
    metered: BTreeSet<WorkloadId>,
    on: BTreeMap<ActionId, (WorkloadId, bool)>,
    waiting: VecDeque<Event>,
}

fn id(i: usize) -> WorkloadId {
    WorkloadId::new(format!("workload-{i:05}.service"))
}

fn process(i: usize) -> ProcessId {
    ProcessId {
        pid: 1000 + i as i32,
        start_ticks: 1,
    }
}

impl World {
    fn new(count: usize, machine: Machine) -> Self {
        let llcs: BTreeSet<LlcId> = machine.cpus.iter().map(|c| c.llc).collect();
        let nodes = machine.nodes.iter().map(|n| n.id).collect();
        Self {
            engine: Engine::new(
                machine,
                homeostat_strategies::all(),
                Policy::default(),
                Memory::default(),
            ),
            llcs: llcs.into_iter().collect(),
            nodes,
            count,
            second: 1000,
            metered: BTreeSet::new(),
            on: BTreeMap::new(),
            waiting: VecDeque::new(),
        }
    }

    fn sample(&self, i: usize, interval_s: u64) -> WorkloadSample {
        let id = id(i);
        let helped = self.on.values().any(|(w, on)| *w == id && *on);
        // A little noise that repeats after a prime number of seconds.
        let noise = 1.0 + 0.01 * ((self.second * 7919 + i as u64 * 104_729) % 101) as f64 / 101.0;
        let rate = 1000.0 * if helped { 1.2 } else { 1.0 } * noise;
        let interval = Nanoseconds::from_secs(interval_s);
        let meters = self.metered.get(&id).map(|_| MeterReading {
            meter: "progress".into(),
            work: rate * interval_s as f64,
            interval,
            counted: 1.0,
            lag: Nanoseconds::ZERO,
        });
        WorkloadSample {
            interval,
            age: Nanoseconds::from_secs(self.second),
            processes: 1,
            threads: 8,
            cpu: interval,
            cpu_busiest: interval,
            runqueue_wait: Nanoseconds::ZERO,
            faults_minor: 0,
            faults_major: 0,
            churn: 0,
            resident: RESIDENT,
            anonymous: RESIDENT,
            shared: Bytes::ZERO,
            huge: Some(Bytes::ZERO),
            meters: meters.into_iter().collect(),
            reads: homeostat_model::Reads::default(),
            spans: None,
            executions: 0,
            id,
        }
    }

    fn snapshot(&self, scan: bool) -> Snapshot {
        let workloads = scan.then(|| {
            (0..self.count)
                .map(|i| Workload {
                    id: id(i),
                    kind: WorkloadKind::Unit,
                    former: None,
                    owner: homeostat_model::Owner::Machine,
                    others: Vec::new(),
                    fingerprint: Fingerprint::new(format!("unit {i}")),
                    program: "program".into(),
                    executable: "/usr/bin/program".into(),
                    processes: vec![process(i)],
                    choice: OperatorChoice::default(),
                })
                .collect()
        });
        let detail = self.engine.sampling().detail;
        let samples = (0..self.count)
            .filter(|i| scan || detail.binary_search(&id(*i)).is_ok())
            .map(|i| {
                self.sample(
                    i,
                    if detail.binary_search(&id(i)).is_ok() {
                        1
                    } else {
                        10
                    },
                )
            })
            .collect();
        Snapshot {
            at: Nanoseconds::from_secs(self.second),
            unix_seconds: self.second,
            interval: Nanoseconds::from_secs(1),
            machine: MachineSample {
                cpu_busy: Nanoseconds::from_secs((self.count as u64).min(self.llcs.len() as u64)),
                memory_free: Bytes::from_mib(1 << 18),
                memory_available: Bytes::from_mib(1 << 18),
                memory_free_in_huge_blocks: Bytes::from_mib(1 << 18),
                ..MachineSample::default()
            },
            workloads,
            samples,
            own_cpu: Nanoseconds::ZERO,
            own_resident: Bytes::ZERO,
            canary: None,
        }
    }

    /// Takes the event and answers what is asked; the time of the step in milliseconds.
    fn step(&mut self, event: Event) -> f64 {
        let now = Nanoseconds::from_secs(self.second);
        let begin = Instant::now();
        let commands = self.engine.step(now, self.second, event);
        let spent = begin.elapsed().as_secs_f64() * 1e3;
        for command in commands {
            self.carry_out(command);
        }
        spent
    }

    fn settled(&mut self, action: ActionId, direction: Direction) {
        let done = Progress {
            done: true,
            finished: 1,
            total: 1,
            verified: true,
            ..Progress::default()
        };
        self.waiting
            .push_back(Event::Settled(action, direction, Ok(done)));
    }

    fn carry_out(&mut self, command: Command) {
        match command {
            Command::FindMeters(id) => {
                let progress = MeterCandidate {
                    id: "progress".into(),
                    class: MeterClass::Application,
                    unit: "operation".into(),
                    cost_per_count: Nanoseconds::ZERO,
                    lag: Nanoseconds::ZERO,
                    refused: None,
                };
                self.waiting.push_back(Event::MetersFound(id, Ok(vec![progress])));
            }
            Command::OpenMeter(id, meter) => {
                self.metered.insert(id.clone());
                self.waiting.push_back(Event::MeterOpened(id, meter, Ok(())));
            }
            Command::CloseMeter(id, _) => {
                self.metered.remove(&id);
            }
            Command::InspectMemory(id) => {
                let map = self.memory(&id);
                self.waiting.push_back(Event::MemoryInspected(id, Ok(map)));
            }
            Command::InspectLocality(id) => {
                let places = self.locality(&id);
                self.waiting.push_back(Event::LocalityInspected(id, Ok(places)));
            }
            Command::Apply(action) => {
                self.on.insert(action.id, (action.workload.clone(), true));
                self.settled(action.id, Direction::Apply);
            }
            Command::Switch(action, direction) => {
                if let Some(entry) = self.on.get_mut(&action) {
                    entry.1 = direction == Direction::Apply;
                }
                self.settled(action, direction);
            }
            Command::Close(action) => {
                self.on.remove(&action);
            }
            _ => {}
        }
    }

    fn memory(&self, workload: &WorkloadId) -> MemoryMap {
        let pieces = RESIDENT.0 >> 21;
        let start = 0x7f00_0000_0000_u64;
        MemoryMap {
            workload: workload.clone(),
            disabled: Vec::new(),
            regions: vec![MemoryRegion {
                process: process((0..self.count).find(|i| id(*i) == *workload).unwrap_or(0)),
                start,
                length: RESIDENT,
                kind: MemoryKind::Anonymous,
                name: String::new(),
                resident: RESIDENT,
                referenced: RESIDENT,
                huge: Bytes::ZERO,
                swapped: Bytes::ZERO,
                advice: MemoryAdvice::None,
                locked: false,
                eligible: true,
                aligned: true,
                mappers: 1,
                pieces: Pieces {
                    full: pieces as u32,
                    ..Pieces::default()
                },
                convertible: (0..pieces).map(|p| start + (p << 21)).collect(),
            }],
            truncated: false,
        }
    }

    fn locality(&self, id: &WorkloadId) -> Locality {
        let share = 1.0 / self.llcs.len() as f64;
        let part = Bytes(RESIDENT.0 / self.nodes.len().max(1) as u64);
        Locality {
            workload: id.clone(),
            threads: 8,
            threads_of_busiest_process: 8,
            running: self.llcs.iter().map(|l| (*l, share)).collect(),
            private: self.nodes.iter().map(|n| (*n, part)).collect(),
            shared: BTreeMap::new(),
            huge: BTreeMap::new(),
            bound: None,
            counters: Some(Counters {
                cycles_per_instruction: 2.0,
                memory_stall_share: 0.4,
                cache_to_cache_stall_share: 0.1,
                table_walk_share: 0.08,
                local_share: share,
                prefetch_share: 0.3,
                prefetch_useful_share: 0.5,
                busiest_link: 0.5,
            }),
        }
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut counts: Vec<usize> = std::env::args()
        .skip(1)
        .map(|a| a.parse())
        .collect::<Result<_, _>>()?;
    if counts.is_empty() {
        counts = vec![10, 100, 1000, 10_000];
    }
    println!(
        "{:>9} {:>5} {:>7}  {:>17} {:>17} {:>17} {:>17} {:>8}",
        "workloads", "CPUs", "changes", "scan", "detail", "inspected", "other", "view"
    );
    for count in counts {
        for cpus in [2, 64, 512, 4096] {
            let mut world = World::new(count, machine(cpus)?);
            let [mut scans, mut details, mut inspected, mut others, mut views] =
                [(); 5].map(|()| Spent::default());
            for second in 0..LENGTH_S {
                world.second += 1;
                let scan = second % 10 == 0;
                let snapshot = world.snapshot(scan);
                let spent = world.step(Event::Sampled(Box::new(snapshot)));
                if scan { &mut scans } else { &mut details }.0.push(spent);
                while let Some(event) = world.waiting.pop_front() {
                    let looked = matches!(event, Event::MemoryInspected(..) | Event::LocalityInspected(..));
                    let spent = world.step(event);
                    if looked { &mut inspected } else { &mut others }.0.push(spent);
                }
                if second % 60 == 0 {
                    let begin = Instant::now();
                    let view = world.engine.view();
                    views.0.push(begin.elapsed().as_secs_f64() * 1e3);
                    drop(view);
                }
            }
            views.0.sort_by(f64::total_cmp);
            println!(
                "{count:>9} {cpus:>5} {:>7}  {} {} {} {} {:>8.3}",
                world.on.len(),
                scans.show(),
                details.show(),
                inspected.show(),
                others.show(),
                views.0.get(views.0.len() / 2).copied().unwrap_or(0.0)
            );
        }
    }
    Ok(())
}
