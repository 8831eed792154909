//! The simulated machine behind the traits of the seam.
//!
//! [`SimPlatform`] is a handle: clones see the same [`World`], but what a daemon would keep in its memory (open meters,
//! the state of a change under way) belongs to the handle. A crash is a handle that is dropped; a fresh one knows nothing
//! but what the machine shows and the undo record says.
//!
//! | effector | target | undo |
//! |---|---|---|
//! | `thread_placement` | `Cpus`: the workload's threads run there and nowhere else | the restriction found |
//! | `page_placement` | `Pages`: pieces of memory move to the node, hottest first | the same pieces go back to where they were |
//! | `large_pages` | `Memory`: pieces get a large page | those pieces are split |
//! | `prefetch` | `Cpus`: their hardware prefetch is off | it is on where it was on |
//! | `placebo` | `Nothing` | nothing |
//!
//! The first and the fourth are done at once and take no arguments (but `group_by` = `board` for threads: each stays on
//! its board, with those that it shares data with); the others work in slices, with the arguments
//! `slice_ms` (1 to 100, default 20), `duty` (share of the time spent working, 0.01 to 1, default 0.5), `bytes_per_second`
//! (upper bound), `free_memory_min` (bytes; default 2 % of the node) and `several_mappers` (`allow`, `refuse`: as on Linux, large
//! pages in a segment that several processes map cannot be split while they run, unless the machine's layout says that it
//! can).
//!
//! With `large_pages` = `move` moves of pages take large pages along as they are; else those stay.
//! `page_placement` with `spread_over` = `0,2` shares the pages out evenly among those nodes, the target's among them.
//! `thread_placement` with `memory` = `all` or `private` moves up to `memory_bytes` of the workload's memory along, to the
//! nodes of the CPUs; then it works in slices, too, and takes their arguments. With `split_by` = `process` each process is
//! kept on one chip among those CPUs, as many on each as it has cores, where most of its private memory is; memory that
//! goes along goes to the node of its process's chip (`private` only).

use crate::behaviour::MeterSpec;
use crate::memory::{MemoryError, move_cost};
use crate::noise::Draws;
use crate::world::{Alive, PersonChange, Program, Settings, Totals, World, WorldError, ticks};
use homeostat_model::action::{MemoryTarget, Target};
use homeostat_model::{
    Action, ActionId, Bytes, Capability, CapabilityId, CapabilityState, CpuId, Direction, Fingerprint,
    HugePageSettings, Locality, Machine, MachineSample, MemoryAdvice, MemoryKind, MemoryMap, MemoryRegion,
    MeterCandidate, MeterId, MeterReading, Nanoseconds, NodeId, OperatorChoice, PageSizeSetting, Pieces,
    Pressure, ProcessId, Progress, Snapshot, UndoRecord, Workload, WorkloadId, WorkloadKind, WorkloadSample,
};
use homeostat_platform::{Clock, Effectors, PlatformError, SampleRequest, Sensors};
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

/// Shortest and longest period in seconds with which a biased work meter wanders.
const METER_PERIOD_S: (f64, f64) = (1200.0, 10_800.0);
/// Most regions of one memory map, as on Linux.
const REGIONS_MAX: usize = 4096;
/// Most pieces in one action, as on Linux.
const PIECES_PER_ACTION_MAX: usize = 32 * 1024;
/// Refused conversions in a row after which the action waits for better times, as on Linux.
const REFUSED_MAX: u32 = 3;
/// Longest pause asked for.
const PAUSE_MAX_S: f64 = 10.0;
/// Share of a node that is kept free when pages move there, unless the action says otherwise.
const KEEP_FREE_SHARE: f64 = 0.02;
/// CPU time of one change of a mask or of a prefetch switch.
const SWITCH_S: f64 = 50e-6;

/// Why something was left as it is. Stable: they appear in histories.
const NO_ROOM: &str = "no free memory at the node";
const MOVED_BY_OTHERS: &str = "moved by somebody else";
const CHANGED_BY_OTHERS: &str = "changed by somebody else";
const ENDED: &str = "process ended";
const HOLES: &str = "has holes that would be filled";
const ALREADY_LARGE: &str = "already huge";
const NOT_MAPPED: &str = "not mapped";
const SEVERAL: &str = "mapped by several processes, could not be undone";

/// A handle to a simulated machine: its sensors and effectors.
#[derive(Clone)]
pub struct SimPlatform {
    world: Rc<RefCell<World>>,
    seen: Seen,
    meters: BTreeMap<(WorkloadId, MeterId), OpenMeter>,
    tasks: BTreeMap<ActionId, Task>,
    /// Placements of threads that are made, or on their way in or out, and whose.
    placed: BTreeMap<ActionId, WorkloadId>,
    /// Placements whose threads are back, and whose memory is not yet.
    owes_memory: BTreeMap<ActionId, WorkloadId>,
}

impl std::fmt::Debug for SimPlatform {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SimPlatform")
            .field("now", &self.now())
            .field("meters", &self.meters.len())
            .finish_non_exhaustive()
    }
}

/// What the sensors saw last.
#[derive(Clone, Debug, Default)]
struct Seen {
    at: Option<Nanoseconds>,
    busy_s: f64,
    own_s: f64,
    workloads: BTreeMap<WorkloadId, Before>,
}

#[derive(Clone, Debug)]
struct Before {
    at: Nanoseconds,
    cpu_s: f64,
    wait_s: f64,
    started: u64,
    processes: usize,
}

#[derive(Clone, Debug)]
struct OpenMeter {
    spec: MeterSpec,
    work: f64,
    at: Nanoseconds,
    started: u64,
    fraction: f64,
}

/// The memory of a change under way or done. Lost in a crash.
#[derive(Clone, Debug, Default)]
struct Task {
    /// The state in which it was left when it was last done.
    left: Option<Direction>,
    cursor: usize,
    way: Option<Direction>,
    finished: u64,
    skipped: BTreeMap<String, u64>,
    refused: u32,
}

impl SimPlatform {
    /// A machine. Further handles are clones, or come from [`SimPlatform::fresh`].
    pub fn new(world: World) -> Self {
        Self {
            world: Rc::new(RefCell::new(world)),
            seen: Seen::default(),
            meters: BTreeMap::new(),
            tasks: BTreeMap::new(),
            placed: BTreeMap::new(),
            owes_memory: BTreeMap::new(),
        }
    }

    /// A handle to the same machine that remembers nothing, as a daemon has after a crash.
    pub fn fresh(&self) -> Self {
        Self {
            world: Rc::clone(&self.world),
            seen: Seen::default(),
            meters: BTreeMap::new(),
            tasks: BTreeMap::new(),
            placed: BTreeMap::new(),
            owes_memory: BTreeMap::new(),
        }
    }

    /// Its clock.
    pub fn clock(&self) -> SimClock {
        SimClock {
            world: Rc::clone(&self.world),
        }
    }

    /// Looks at the world, or changes it as nobody on the machine could.
    pub fn with_world<T>(&self, look: impl FnOnce(&mut World) -> T) -> T {
        look(&mut self.world.borrow_mut())
    }

    /// Time since the start.
    pub fn now(&self) -> Nanoseconds {
        self.world.borrow().now()
    }

    /// Lets time pass.
    pub fn advance_to(&self, until: Nanoseconds) {
        self.world.borrow_mut().advance_to(until);
    }

    /// Something happens that is not homeostat's doing.
    ///
    /// # Errors
    /// As [`World::person`].
    pub fn person(&self, change: PersonChange) -> Result<(), WorldError> {
        self.world.borrow_mut().person(change)
    }

    /// What a program (all instances) or a workload did since the start.
    pub fn totals(&self, name: &str) -> Totals {
        self.world.borrow_mut().totals(name)
    }

    /// Everything that an effector or a person can change.
    pub fn settings(&self) -> Settings {
        self.world.borrow().settings()
    }

    /// CPU time that the optimizer used so far.
    pub fn own_cpu(&self) -> Nanoseconds {
        self.world.borrow().own_cpu()
    }
}

/// The clock of a simulated machine: its time is the world's, and waiting lets it pass.
#[derive(Clone)]
pub struct SimClock {
    world: Rc<RefCell<World>>,
}

impl std::fmt::Debug for SimClock {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("SimClock").field(&self.now()).finish()
    }
}

impl Clock for SimClock {
    fn now(&self) -> Nanoseconds {
        self.world.borrow().now()
    }
    fn unix_seconds(&self) -> u64 {
        self.world.borrow().unix_seconds()
    }
    fn sleep(&self, length: Nanoseconds) {
        let mut world = self.world.borrow_mut();
        let until = world.now() + length;
        world.advance_to(until);
    }
}

fn vanished(workload: &WorkloadId) -> PlatformError {
    PlatformError::Vanished {
        target: format!("workload {workload}"),
    }
}

fn find(world: &World, workload: &WorkloadId) -> Result<usize, PlatformError> {
    world.find(workload.as_str()).ok_or_else(|| vanished(workload))
}

fn alive<'a>(
    world: &'a World,
    p: usize,
    workload: &WorkloadId,
) -> Result<(&'a Program, &'a Alive), PlatformError> {
    let program = world.programs.get(p).ok_or_else(|| vanished(workload))?;
    Ok((program, program.alive.as_ref().ok_or_else(|| vanished(workload))?))
}

/// CPU seconds as the operating system counts them: in a shared partition, cores that are consumed.
fn counted_cpu(world: &World, program: &Program) -> f64 {
    if world.layout().shared_partition {
        program.totals.core_s
    } else {
        program.totals.cpu_s
    }
}

// ---- sensors -------------------------------------------------------------------------------------------------------

/// The processes of a workload now. Short-lived ones take turns: each slot has a new one every life.
fn processes(world: &World, p: usize, alive: &Alive) -> (Vec<ProcessId>, f64) {
    let now_s = world.now().as_secs_f64();
    let Some(churn) = world.spec(p).and_then(|s| s.churn) else {
        return (alive.processes.clone(), (now_s - alive.started_s).max(0.0));
    };
    let slots = alive.processes.len().max(1) as f64;
    let mut oldest: f64 = 0.0;
    let mut list: Vec<ProcessId> = alive
        .processes
        .iter()
        .enumerate()
        .map(|(slot, first)| {
            let offset = alive.started_s + churn.life_s * slot as f64 / slots;
            let lives = ((now_s - offset) / churn.life_s).floor();
            let started_s = offset + lives * churn.life_s;
            oldest = oldest.max(now_s - started_s);
            let number = (lives.max(0.0) as u64 * slots as u64) % 1_000_000;
            ProcessId {
                pid: first.pid.saturating_add(number as i32),
                start_ticks: ticks(started_s),
            }
        })
        .collect();
    list.sort_by_key(|p| (p.start_ticks, p.pid));
    (list, oldest)
}

fn workload_of(world: &World, p: usize, program: &Program, alive: &Alive) -> Workload {
    let spec = world.spec(p);
    let shared = alive.shared.is_some() && alive.processes.len() > 1 && spec.is_some_and(|s| s.threads == 1);
    let choice = spec.map(|s| &s.choice);
    let tuned = match (&program.nodes, program.bound) {
        (Some(_), true) => vec!["threads and memory were bound by a person".to_owned()],
        (Some(_), false) => vec!["memory was bound by a person (numactl)".to_owned()],
        (None, true) => vec!["threads were bound by a person (taskset)".to_owned()],
        (None, false) => Vec::new(),
    };
    Workload {
        id: WorkloadId::new(&program.name),
        kind: if shared {
            WorkloadKind::SharedSegment
        } else {
            WorkloadKind::Unit
        },
        former: None,
        owner: homeostat_model::Owner::Machine,
        others: Vec::new(),
        fingerprint: Fingerprint::new(format!("simulated {}", program.name)),
        program: spec.map_or_else(String::new, |s| s.name.clone()),
        executable: spec.map_or_else(String::new, |s| format!("/usr/bin/{}", s.name)),
        processes: processes(world, p, alive).0,
        choice: OperatorChoice {
            never: program
                .never
                .then(|| "HOMEOSTAT=never in its environment".to_owned()),
            always: choice
                .is_some_and(|c| c.always)
                .then(|| "HOMEOSTAT=always in its environment".to_owned()),
            unknown: None,
            strategies: choice.map(|c| c.strategies.clone()).unwrap_or_default(),
            tuned,
        },
    }
}

fn nanoseconds(seconds: f64) -> Nanoseconds {
    Nanoseconds::from_secs_f64(seconds)
}

impl SimPlatform {
    fn sample_one(&mut self, p: usize, detailed: bool) -> Option<WorkloadSample> {
        let world = Rc::clone(&self.world);
        let world = world.borrow();
        let program = world.programs.get(p)?;
        let alive = program.alive.as_ref()?;
        let id = WorkloadId::new(&program.name);
        let now = world.now();
        let started = ticks(alive.started_s);
        let cpu_s = counted_cpu(&world, program);
        let t = &program.totals;
        let (list, age_s) = processes(&world, p, alive);
        let here = Before {
            at: now,
            cpu_s,
            wait_s: t.wait_s,
            started,
            processes: list.len(),
        };
        let before = self.seen.workloads.insert(id.clone(), here);
        // A workload that restarted is a new one: its counters start at zero.
        let before = before.filter(|b| b.started == started);
        let (interval, cpu, wait) = match &before {
            Some(b) => (now - b.at, cpu_s - b.cpu_s, t.wait_s - b.wait_s),
            None => (Nanoseconds::ZERO, 0.0, 0.0),
        };
        let spec = world.spec(p)?;
        let churn = match (spec.churn, &before) {
            (Some(churn), Some(_)) => 2.0 * list.len() as f64 * interval.as_secs_f64() / churn.life_s,
            (None, Some(b)) => list.len().abs_diff(b.processes) as f64,
            (_, None) => list.len() as f64,
        };
        let resident = alive.resident();
        let shared = alive.shared.as_ref().map_or(Bytes::ZERO, |s| s.resident());
        let large = Bytes(alive.segments().map(|s| s.large_pieces()).sum::<u64>() * world.memory.piece().0);
        let threads = list.len() as u32 * spec.threads;
        let busiest = cpu / list.len().max(1) as f64;
        let mut sample = WorkloadSample {
            id: id.clone(),
            interval,
            age: nanoseconds(age_s),
            processes: list.len() as u32,
            threads,
            cpu: nanoseconds(cpu),
            cpu_busiest: nanoseconds(busiest),
            runqueue_wait: nanoseconds(wait),
            faults_minor: (churn * 200.0) as u64,
            faults_major: 0,
            churn: churn.min(f64::from(u32::MAX)) as u32,
            resident,
            anonymous: if detailed {
                resident.saturating_sub(shared)
            } else {
                Bytes::ZERO
            },
            shared: if detailed { shared } else { Bytes::ZERO },
            huge: detailed.then_some(large),
            meters: Vec::new(),
            reads: homeostat_model::Reads::default(),
            spans: None,
            executions: alive.executions,
        };
        if detailed {
            let work = program.totals.work;
            for ((owner, meter), open) in self.meters.range_mut((id.clone(), MeterId::new(""))..) {
                if *owner != id {
                    break;
                }
                if let Some(reading) = open.read(meter, work, now, started, world.seed(), p) {
                    sample.meters.push(reading);
                }
            }
        }
        Some(sample)
    }
}

impl OpenMeter {
    /// The counts since the last reading; none after a restart, because the counter started again.
    fn read(
        &mut self,
        id: &MeterId,
        work: f64,
        now: Nanoseconds,
        started: u64,
        seed: u64,
        p: usize,
    ) -> Option<MeterReading> {
        let (before, then) = (self.work, self.at);
        self.work = work;
        self.at = now;
        if std::mem::replace(&mut self.started, started) != started {
            self.fraction = 0.0;
            return None;
        }
        let interval = now - then;
        if interval.0 == 0 {
            return None;
        }
        let name = id
            .as_str()
            .bytes()
            .fold(0u64, |h, b| h.wrapping_mul(31).wrapping_add(u64::from(b)));
        let draws = Draws::new(seed ^ name, p as u64);
        let noise = self.spec.cv / interval.as_secs_f64().max(1e-3).sqrt() * draws.normal(now.0);
        let (shortest, longest) = METER_PERIOD_S;
        let period_s = shortest + (longest - shortest) * draws.uniform(u64::MAX);
        let turns = now.as_secs_f64() / period_s + draws.uniform(u64::MAX - 1);
        let bias = self.spec.bias * (std::f64::consts::TAU * turns).sin();
        let factor = (1.0 + noise).max(0.0) * (1.0 + bias);
        let exact = (work - before).max(0.0) * self.spec.per_unit * factor + self.fraction;
        // Counters of small things are whole; progress of big units is published in finer steps.
        let counted = if exact >= 1000.0 { exact.floor() } else { exact };
        self.fraction = exact - counted;
        Some(MeterReading {
            meter: id.clone(),
            work: counted,
            interval,
            counted: 1.0,
            lag: Nanoseconds::ZERO,
        })
    }
}

impl Sensors for SimPlatform {
    fn machine(&mut self) -> Result<Machine, PlatformError> {
        let world = self.world.borrow();
        let layout = world.layout();
        let mut machine = layout.machine().map_err(|e| PlatformError::Unsupported {
            what: "this layout".into(),
            why: e.to_string(),
        })?;
        machine.cpus.retain(|c| world.is_online(c.id));
        machine.capabilities.push(Capability {
            id: CapabilityId::new("placement.threads.grouped"),
            state: CapabilityState::Available,
            detail: "simulated threads stay on their boards with those that they share data with".into(),
            cost_of_absence: String::new(),
            remedy: String::new(),
        });
        Ok(machine)
    }

    fn sample(&mut self, request: &SampleRequest) -> Result<Snapshot, PlatformError> {
        let (list, wanted) = {
            let mut world = self.world.borrow_mut();
            let cost = world.surroundings().own_cost;
            let mut us = cost.look_us + cost.detail_us * request.detail.len() as f64;
            if request.scan {
                let count: usize = world
                    .programs
                    .iter()
                    .filter_map(|p| p.alive.as_ref())
                    .map(|a| a.processes.len())
                    .sum();
                us += cost.process_us * count as f64;
            }
            world.charge(us / 1e6);
            let running: Vec<usize> = (0..world.programs.len())
                .filter(|p| world.programs.get(*p).is_some_and(|p| p.alive.is_some()))
                .collect();
            let list = request.scan.then(|| {
                running
                    .iter()
                    .filter_map(|p| {
                        let program = world.programs.get(*p)?;
                        Some(workload_of(&world, *p, program, program.alive.as_ref()?))
                    })
                    .collect::<Vec<_>>()
            });
            let wanted: Vec<(usize, bool)> = if request.scan {
                let detail: BTreeSet<&str> = request.detail.iter().map(WorkloadId::as_str).collect();
                running
                    .iter()
                    .map(|p| {
                        (
                            *p,
                            world
                                .programs
                                .get(*p)
                                .is_some_and(|p| detail.contains(p.name.as_str())),
                        )
                    })
                    .collect()
            } else {
                let found: BTreeSet<usize> = request
                    .detail
                    .iter()
                    .filter_map(|w| world.find(w.as_str()))
                    .collect();
                found.into_iter().map(|p| (p, true)).collect()
            };
            (list, wanted)
        };
        let mut samples: Vec<WorkloadSample> = wanted
            .into_iter()
            .filter_map(|(p, d)| self.sample_one(p, d))
            .collect();
        samples.sort_by(|a, b| a.id.cmp(&b.id));
        if let Some(list) = &list {
            let living: BTreeSet<&WorkloadId> = list.iter().map(|w| &w.id).collect();
            self.meters.retain(|(w, _), _| living.contains(w));
            self.seen.workloads.retain(|w, _| living.contains(w));
        }
        let world = self.world.borrow();
        let at = world.now();
        let own_s = world.own_cpu().as_secs_f64();
        let interval = at - self.seen.at.unwrap_or(at);
        let first = self.seen.at.is_none();
        let since = |total: f64, before: f64| if first { 0.0 } else { (total - before).max(0.0) };
        let machine = machine_sample(&world, since(world.busy_s(), self.seen.busy_s), interval);
        let own_cpu = nanoseconds(since(own_s, self.seen.own_s));
        self.seen.at = Some(at);
        self.seen.busy_s = world.busy_s();
        self.seen.own_s = own_s;
        Ok(Snapshot {
            at,
            unix_seconds: world.unix_seconds(),
            interval,
            machine,
            workloads: list,
            samples,
            own_cpu,
            own_resident: Bytes::from_mib(world.surroundings().own_cost.resident_mib),
        })
    }

    fn inspect_memory(&mut self, workload: &WorkloadId) -> Result<MemoryMap, PlatformError> {
        let world = self.world.borrow();
        let p = find(&world, workload)?;
        let (_, alive) = alive(&world, p, workload)?;
        let piece = world.memory.piece();
        let mut regions = Vec::new();
        let mut left_out = false;
        let mut budget = PIECES_PER_ACTION_MAX * 4;
        for (index, segment) in alive.segments().enumerate() {
            let Some(process) = alive.processes.get(if segment.shared { 0 } else { index }) else {
                continue;
            };
            if segment.bytes < piece {
                continue;
            }
            if regions.len() >= REGIONS_MAX || segment.pieces() > budget {
                left_out = true;
                break;
            }
            budget -= segment.pieces();
            let mut pieces = Pieces::default();
            let mut convertible = Vec::new();
            for i in 0..segment.pieces() {
                if segment.is_large(i) {
                    pieces.huge += 1;
                } else if segment.is_sparse(i) {
                    pieces.sparse += 1;
                } else {
                    pieces.full += 1;
                    convertible.push(segment.address_of(i));
                }
            }
            regions.push(MemoryRegion {
                process: *process,
                start: segment.base,
                length: segment.bytes,
                kind: if segment.shared {
                    MemoryKind::Shared
                } else {
                    MemoryKind::Anonymous
                },
                name: if segment.shared {
                    "/SYSV00000000".into()
                } else {
                    "[heap]".into()
                },
                resident: segment.resident(),
                referenced: segment.resident(),
                huge: Bytes(segment.large_pieces() * piece.0),
                swapped: Bytes::ZERO,
                advice: MemoryAdvice::None,
                locked: false,
                eligible: true,
                aligned: true,
                mappers: if segment.shared {
                    alive.processes.len() as u32
                } else {
                    1
                },
                pieces,
                convertible,
            });
        }
        Ok(MemoryMap {
            workload: workload.clone(),
            disabled: Vec::new(),
            regions,
            truncated: left_out,
        })
    }

    fn inspect_locality(&mut self, workload: &WorkloadId) -> Result<Locality, PlatformError> {
        let mut world = self.world.borrow_mut();
        world.settle_now();
        let cost = world.surroundings().own_cost.detail_us;
        world.charge(cost / 1e6);
        let p = find(&world, workload)?;
        let (program, alive) = alive(&world, p, workload)?;
        let layout = world.layout();
        let piece = world.memory.piece();
        let page = world.memory.page();
        let placed = program.placed.clone().unwrap_or_default();
        let threads = placed.running_threads();
        let mut running = BTreeMap::new();
        for (chip, n) in placed.running.iter().enumerate().filter(|(_, n)| **n > 1e-6) {
            if let Some(llc) = layout.llc_of_chip(chip) {
                running.insert(
                    llc,
                    if threads > 0.0 {
                        n / threads * program.pace.cpus
                    } else {
                        0.0
                    },
                );
            }
        }
        let mut private = BTreeMap::new();
        let mut shared = BTreeMap::new();
        let mut huge = BTreeMap::new();
        for segment in alive.segments() {
            let by = if segment.shared { &mut shared } else { &mut private };
            for (node, pages) in segment.pages_on().iter().enumerate().filter(|(_, n)| **n > 0) {
                let sum: &mut Bytes = by.entry(NodeId(node as u32)).or_default();
                *sum += Bytes(pages * page.0);
            }
            if segment.large_pieces() > 0 {
                for i in (0..segment.pieces()).filter(|i| segment.is_large(*i)) {
                    let sum: &mut Bytes = huge.entry(NodeId(segment.node_of(i) as u32)).or_default();
                    *sum += piece;
                }
            }
        }
        let bound = match (&program.nodes, program.bound) {
            (Some(nodes), true) => Some(format!(
                "threads bound by a person (taskset), memory bound to nodes {nodes:?} (numactl)"
            )),
            (Some(nodes), false) => Some(format!("memory bound to nodes {nodes:?} by a person (numactl)")),
            (None, true) => Some("threads bound by a person (taskset)".to_owned()),
            (None, false) => None,
        };
        let counters = world.surroundings().counters.then(|| {
            let draws = Draws::new(world.seed() ^ 0xC0C0, p as u64);
            let off = Draws::new(world.seed() ^ 0xB1A5, p as u64);
            let (cv, bias) = (world.surroundings().counter_cv, world.surroundings().counter_bias);
            let at = world.now().0;
            let mut index = 0;
            let mut noisy = |x: f64, most: f64| {
                index += 1;
                let factor = 1.0 + cv * draws.normal(at.wrapping_add(index));
                (x * factor * (bias * off.normal(index)).exp()).clamp(0.0, most)
            };
            let mut c = program.rate.counters;
            c.cycles_per_instruction = noisy(c.cycles_per_instruction, f64::MAX);
            for share in [
                &mut c.memory_stall_share,
                &mut c.cache_to_cache_stall_share,
                &mut c.table_walk_share,
                &mut c.local_share,
                &mut c.prefetch_share,
                &mut c.prefetch_useful_share,
                &mut c.busiest_link,
            ] {
                *share = noisy(*share, 1.0);
            }
            c
        });
        let per_process = world.spec(p).map_or(1, |s| s.threads);
        Ok(Locality {
            workload: workload.clone(),
            threads: alive.processes.len() as u32 * per_process,
            threads_of_busiest_process: per_process,
            running,
            private,
            shared,
            huge,
            bound,
            counters,
        })
    }

    fn find_meters(&mut self, workload: &WorkloadId) -> Result<Vec<MeterCandidate>, PlatformError> {
        let world = self.world.borrow();
        let p = find(&world, workload)?;
        let mut found: Vec<MeterCandidate> = world
            .spec(p)
            .map(|s| s.meters.as_slice())
            .unwrap_or_default()
            .iter()
            .map(|m| MeterCandidate {
                id: MeterId::new(&m.id),
                class: m.class,
                unit: m.unit.clone(),
                cost_per_count: Nanoseconds(m.cost_ns),
                lag: Nanoseconds::ZERO,
                refused: m.refused.clone(),
            })
            .collect();
        found.sort_by(|a, b| (a.class, &a.id).cmp(&(b.class, &b.id)));
        Ok(found)
    }

    fn open_meter(&mut self, workload: &WorkloadId, meter: &MeterId) -> Result<(), PlatformError> {
        let world = self.world.borrow();
        let p = find(&world, workload)?;
        let (program, alive) = alive(&world, p, workload)?;
        let unsupported = |why: String| PlatformError::Unsupported {
            what: format!("meter {meter}"),
            why,
        };
        let spec = world
            .spec(p)
            .and_then(|s| s.meters.iter().find(|m| m.id == meter.as_str()))
            .ok_or_else(|| unsupported("the program has none of that name".into()))?;
        if let Some(why) = &spec.refused {
            return Err(unsupported(why.clone()));
        }
        self.meters
            .entry((workload.clone(), meter.clone()))
            .or_insert_with(|| OpenMeter {
                spec: spec.clone(),
                work: program.totals.work,
                at: world.now(),
                started: ticks(alive.started_s),
                fraction: 0.0,
            });
        Ok(())
    }

    fn close_meter(&mut self, workload: &WorkloadId, meter: &MeterId) {
        self.meters.remove(&(workload.clone(), meter.clone()));
    }
}

fn machine_sample(world: &World, busy_s: f64, interval: Nanoseconds) -> MachineSample {
    let nodes = world.memory.nodes();
    let free: Bytes = nodes.iter().map(|n| n.free()).sum();
    let whole: Bytes = nodes.iter().map(|n| n.whole).sum();
    let piece = world.memory.piece().0;
    let (mut anonymous, mut shared) = (0, 0);
    for segment in world
        .programs
        .iter()
        .filter_map(|p| p.alive.as_ref())
        .flat_map(Alive::segments)
    {
        let large = segment.large_pieces() * piece;
        if segment.shared {
            shared += large;
        } else {
            anonymous += large;
        }
    }
    let seconds = interval.as_secs_f64();
    let waiting = world.waiting();
    MachineSample {
        cpu_busy: nanoseconds(busy_s),
        cpu_steal: Nanoseconds::ZERO,
        memory_free: free,
        memory_available: free,
        memory_free_in_huge_blocks: whole,
        anonymous_huge: Bytes(anonymous),
        shared_huge: Bytes(shared),
        swap_used: Bytes::ZERO,
        memory_file: Bytes::ZERO,
        memory_file_inactive: Bytes::ZERO,
        pressure_cpu: Pressure {
            some: nanoseconds(if waiting > 1e-3 {
                seconds * (waiting / (waiting + 1.0))
            } else {
                0.0
            }),
            full: Nanoseconds::ZERO,
        },
        pressure_memory: Pressure::default(),
        pressure_io: Pressure::default(),
        huge_pages: HugePageSettings {
            enabled: PageSizeSetting(world.surroundings().large_page_switch.clone()),
            shmem_enabled: PageSizeSetting("advise".into()),
            defrag: PageSizeSetting("madvise".into()),
            enabled_set_by: None,
            khugepaged_pages_collapsed: 0,
        },
        other_tuners: world.tuners(),
        // Hinting faults are not simulated: the kernel of the simulated machine has no automatic balancing.
        numa_balancing: None,
        paging: homeostat_model::Paging::default(),
        memory_settings: Vec::new(),
    }
}

// ---- effectors -----------------------------------------------------------------------------------------------------

fn rejected(what: &str, value: String, why: &str) -> PlatformError {
    PlatformError::Rejected {
        what: what.to_owned(),
        value,
        errno: why.to_owned(),
    }
}

/// The arguments of an action that works in slices.
struct Pacing {
    slice_s: f64,
    duty: f64,
    bytes_per_second: Option<f64>,
    keep_free: Option<Bytes>,
    several_mappers: bool,
}

impl Pacing {
    /// Reads the arguments, except those that the effector has for itself.
    fn parse(action: &Action, own: &[&str]) -> Result<Self, PlatformError> {
        let mut pacing = Self {
            slice_s: 0.020,
            duty: 0.5,
            bytes_per_second: None,
            keep_free: None,
            several_mappers: false,
        };
        let arguments = action.arguments.iter();
        for (name, value) in arguments.filter(|(name, _)| !own.contains(&name.as_str())) {
            let wrong = |why: &str| rejected(&argument(action, name), value.clone(), why);
            let number = value.parse::<f64>().ok().filter(|n| n.is_finite());
            let within = |low: f64, high: f64| number.filter(|n| (low..=high).contains(n));
            match name.as_str() {
                "slice_ms" => {
                    pacing.slice_s =
                        within(1.0, 100.0).ok_or_else(|| wrong("expected 1 to 100 milliseconds"))? / 1e3
                }
                "duty" => {
                    pacing.duty = within(0.01, 1.0).ok_or_else(|| wrong("expected a share from 0.01 to 1"))?
                }
                "bytes_per_second" => {
                    pacing.bytes_per_second = Some(
                        within(65_536.0, 1e15)
                            .ok_or_else(|| wrong("expected a number of bytes, at least 65536"))?,
                    );
                }
                "free_memory_min" => {
                    pacing.keep_free = Some(Bytes(
                        within(0.0, 1e18).ok_or_else(|| wrong("expected a number of bytes"))? as u64,
                    ));
                }
                "several_mappers" if ["allow", "refuse"].contains(&value.as_str()) => {
                    pacing.several_mappers = value == "allow";
                }
                _ => {
                    return Err(wrong(
                        "expected slice_ms, duty, bytes_per_second, free_memory_min or several_mappers",
                    ));
                }
            }
        }
        Ok(pacing)
    }

    fn pause(&self, worked_s: f64, bytes: u64) -> Nanoseconds {
        let for_duty = worked_s * (1.0 - self.duty) / self.duty;
        let for_rate = self
            .bytes_per_second
            .map_or(0.0, |rate| (bytes as f64 / rate - worked_s).max(0.0));
        nanoseconds(for_duty.max(for_rate).min(PAUSE_MAX_S))
    }

    /// Bytes of one slice, so that the rate can be kept with the longest pause.
    fn bytes_per_slice(&self) -> u64 {
        self.bytes_per_second
            .map_or(u64::MAX, |rate| (rate * PAUSE_MAX_S / 2.0) as u64)
    }
}

fn cpus_text(cpus: &[CpuId]) -> String {
    let mut out: Vec<String> = Vec::new();
    for run in cpus.chunk_by(|a, b| a.0 + 1 == b.0) {
        if let (Some(first), Some(last)) = (run.first(), run.last()) {
            out.push(if first == last {
                first.to_string()
            } else {
                format!("{first}-{last}")
            });
        }
    }
    out.join(",")
}

fn numbers(text: &str) -> Option<Vec<u32>> {
    let mut out = Vec::new();
    for part in text.split(',').filter(|p| !p.is_empty()) {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (u32, u32) = (first.parse().ok()?, last.parse().ok()?);
        if first > last || last - first > 1 << 20 {
            return None;
        }
        out.extend(first..=last);
    }
    Some(out)
}

/// `0-3,8`, or `all`; with ` by board` when threads are kept on their boards in groups.
fn mask_text(mask: Option<&[CpuId]>, grouped: bool) -> String {
    let cpus = mask.map_or_else(|| "all".to_owned(), cpus_text);
    if grouped { cpus + BY_BOARD } else { cpus }
}

const BY_BOARD: &str = " by board";

fn mask_from(text: &str) -> Option<(Option<Vec<CpuId>>, bool)> {
    let (cpus, grouped) = match text.strip_suffix(BY_BOARD) {
        Some(cpus) => (cpus, true),
        None => (text, false),
    };
    if cpus == "all" {
        return Some((None, grouped));
    }
    numbers(cpus).map(|n| (Some(n.into_iter().map(CpuId).collect()), grouped))
}

fn argument(action: &Action, name: &str) -> String {
    format!("argument {name} of {}", action.effector)
}

/// What a placement of threads is asked for beside the CPUs.
#[derive(Debug, Default)]
struct Beside {
    /// `group_by` = `board`.
    grouped: bool,
    /// `split_by` = `process`.
    split: bool,
    memory: Option<Along>,
}

/// Memory that goes along with threads: to the nodes of their CPUs, so much of what lies elsewhere at most.
#[derive(Debug)]
struct Along {
    bytes: Bytes,
    shared: bool,
    large: bool,
}

/// Arguments of `thread_placement` that are not those of a pace.
const BESIDE: [&str; 5] = ["group_by", "split_by", "memory", "memory_bytes", LARGE];

impl Beside {
    fn parse(action: &Action) -> Result<Self, PlatformError> {
        let of = |name: &str| action.arguments.get(name);
        let wrong = |name: &str, why: &str| {
            let value = of(name).cloned().unwrap_or_default();
            rejected(&argument(action, name), value, why)
        };
        if action.effector.as_str() != "thread_placement" {
            if let Some(name) = action.arguments.keys().next() {
                return Err(wrong(name, "it takes none"));
            }
        }
        let grouped = match of("group_by").map(String::as_str) {
            None => false,
            Some("board") => true,
            Some(_) => return Err(wrong("group_by", "only group_by = board is known")),
        };
        let split = match of("split_by").map(String::as_str) {
            None => false,
            Some("process") if !grouped => true,
            Some(_) => {
                return Err(wrong(
                    "split_by",
                    "only split_by = process is known, and not with group_by",
                ));
            }
        };
        let Some(memory) = of("memory") else {
            let own = ["group_by", "split_by"];
            if let Some(name) = action.arguments.keys().find(|name| !own.contains(&name.as_str())) {
                return Err(wrong(name, "only with memory = all or private"));
            }
            return Ok(Self {
                grouped,
                split,
                memory: None,
            });
        };
        let shared = match memory.as_str() {
            "all" if split => return Err(wrong("memory", "a process takes its private memory along only")),
            "all" => true,
            "private" => false,
            _ => return Err(wrong("memory", "expected all or private")),
        };
        let bytes = of("memory_bytes")
            .and_then(|b| b.parse().ok())
            .map(Bytes)
            .ok_or_else(|| wrong("memory_bytes", "expected a number of bytes"))?;
        let large = moves_large(action)?;
        Pacing::parse(action, &BESIDE)?;
        Ok(Self {
            grouped,
            split,
            memory: Some(Along { bytes, shared, large }),
        })
    }
}

fn malformed(record: &UndoRecord, name: &str) -> PlatformError {
    PlatformError::Malformed {
        path: format!("undo record {}", record.action.id).into(),
        line: format!("{name} = {}", record.found.get(name).map_or("", String::as_str)),
    }
}

fn done() -> Progress {
    Progress {
        done: true,
        finished: 1,
        total: 1,
        verified: true,
        ..Progress::default()
    }
}

/// What was found was left because somebody else changed it since.
fn left_alone() -> Progress {
    Progress {
        finished: 0,
        skipped: BTreeMap::from([(CHANGED_BY_OTHERS.to_owned(), 1)]),
        ..done()
    }
}

const STARTED: &str = "started";

/// Whether the processes of the record still run.
fn same_processes(world: &World, record: &UndoRecord) -> Option<usize> {
    let p = world.find(record.action.workload.as_str())?;
    let alive = world.programs.get(p)?.alive.as_ref()?;
    (record.found.get(STARTED).map(String::as_str) == Some(ticks(alive.started_s).to_string().as_str()))
        .then_some(p)
}

/// The executions of the processes whose memory is in the record, where there were any before.
const EXECUTIONS: &str = "executions";

fn note_executions(found: &mut BTreeMap<String, String>, alive: &Alive) {
    if alive.executions > 0 {
        found.insert(EXECUTIONS.to_owned(), alive.executions.to_string());
    }
}

/// Whether the processes of the record still run, with the memory that they had.
fn same_memory(world: &World, record: &UndoRecord) -> Option<usize> {
    let p = same_processes(world, record)?;
    let alive = world.programs.get(p)?.alive.as_ref()?;
    let noted = record
        .found
        .get(EXECUTIONS)
        .map_or(Some(0), |text| text.parse().ok())?;
    (alive.executions == noted).then_some(p)
}

fn target_cpus(world: &World, action: &Action) -> Result<Vec<CpuId>, PlatformError> {
    let what = format!("target of {}", action.effector);
    let Target::Cpus(cpus) = &action.target else {
        return Err(rejected(&what, "no CPUs".into(), "CPUs expected"));
    };
    let set: BTreeSet<CpuId> = cpus.iter().copied().collect();
    if set.is_empty() || !set.iter().any(|c| world.is_online(*c)) {
        return Err(rejected(&what, cpus_text(cpus), "none of these CPUs is online"));
    }
    let count = world.layout().cpus();
    if let Some(cpu) = set.iter().find(|c| c.0 >= count) {
        return Err(rejected(&what, cpu.to_string(), "the machine has no such CPU"));
    }
    Beside::parse(action)?;
    Ok(set.into_iter().collect())
}

impl SimPlatform {
    fn record(&self, action: &Action, found: BTreeMap<String, String>) -> Result<UndoRecord, PlatformError> {
        let boot_id = format!("simulated-{}", self.world.borrow().layout().name);
        Ok(UndoRecord {
            action: action.clone(),
            boot_id,
            found,
        })
    }

    fn conflict(record: &UndoRecord, expected: String, found: String) -> PlatformError {
        PlatformError::Conflict {
            what: format!("{} of {}", record.action.effector, record.action.workload),
            expected,
            found,
        }
    }

    // -- threads

    fn prepare_threads(&self, action: &Action) -> Result<BTreeMap<String, String>, PlatformError> {
        let world = self.world.borrow();
        let cpus = target_cpus(&world, action)?;
        let p = find(&world, &action.workload)?;
        let (program, alive) = alive(&world, p, &action.workload)?;
        if program.bound {
            return Err(PlatformError::Conflict {
                what: format!("threads of {}", action.workload),
                expected: "not bound".into(),
                found: format!(
                    "bound by a person to CPUs {}",
                    mask_text(program.mask.as_deref(), program.grouped)
                ),
            });
        }
        let mut found = BTreeMap::from([
            (STARTED.to_owned(), ticks(alive.started_s).to_string()),
            (
                "mask".to_owned(),
                mask_text(program.mask.as_deref(), program.grouped),
            ),
        ]);
        note_executions(&mut found, alive);
        let Beside { split, memory, .. } = Beside::parse(action)?;
        let mut own: Vec<BTreeSet<usize>> = Vec::new();
        if split {
            if !program.split.is_empty() {
                return Err(PlatformError::Busy {
                    what: format!("processes of {}", action.workload),
                    why: "each is kept on a chip already".into(),
                });
            }
            let chips = assign(&world, alive, &cpus);
            own = chips
                .iter()
                .filter_map(|c| world.layout().chips.get(*c as usize))
                .map(|c| BTreeSet::from([c.node as usize]))
                .collect();
            found.insert(SPLIT.to_owned(), split_text(&chips));
        }
        if let Some(along) = memory {
            not_bound(&action.workload, program)?;
            let home = nodes_of(&world, &cpus)?;
            let of = |segment: usize| own.get(segment).unwrap_or(&home);
            for (index, plan) in plan_moves(&world, alive, of, &along) {
                found.insert(format!("segment.{index}"), plan_text(&plan));
            }
        }
        Ok(found)
    }

    fn advance_threads(
        &mut self,
        record: &UndoRecord,
        direction: Direction,
    ) -> Result<Progress, PlatformError> {
        let mut world = self.world.borrow_mut();
        let ours = target_cpus(&world, &record.action);
        let found = record
            .found
            .get("mask")
            .and_then(|t| mask_from(t))
            .ok_or_else(|| malformed(record, "mask"))?;
        let Some(p) = same_processes(&world, record) else {
            return match direction {
                Direction::Undo => Ok(Progress {
                    skipped: BTreeMap::from([(ENDED.to_owned(), 1)]),
                    finished: 0,
                    ..done()
                }),
                Direction::Apply => Err(vanished(&record.action.workload)),
            };
        };
        let now = world
            .programs
            .get(p)
            .map(|p| (p.mask.clone(), p.grouped))
            .unwrap_or_default();
        let split_now = world.programs.get(p).map(|p| p.split.clone()).unwrap_or_default();
        let split = match record.found.get(SPLIT) {
            Some(text) => split_from(text).ok_or_else(|| malformed(record, SPLIT))?,
            None => Vec::new(),
        };
        let bound = world.programs.get(p).is_some_and(|p| p.bound);
        let mine = match &record.action.target {
            Target::Cpus(cpus) => cpus
                .iter()
                .copied()
                .collect::<BTreeSet<_>>()
                .into_iter()
                .collect::<Vec<_>>(),
            _ => Vec::new(),
        };
        let Beside {
            grouped: by_board,
            memory,
            ..
        } = Beside::parse(&record.action).unwrap_or_default();
        // As on Linux: one that another lies over is not moved. Sent back on before its undo could begin, it is on.
        if let Some(later) = self.over(&record.action) {
            if direction == Direction::Apply && self.is_left_on(record.action.id) {
                return Ok(done());
            }
            return Err(PlatformError::Busy {
                what: format!("placement of the threads of {}", record.action.workload),
                why: format!("action {later} lies over it"),
            });
        }
        self.placed
            .insert(record.action.id, record.action.workload.clone());
        let is_ours =
            !bound && now.0.as_deref() == Some(mine.as_slice()) && now.1 == by_board && split_now == split;
        let is_found = !bound && now == found && (split.is_empty() || split_now.is_empty());
        let task = self.tasks.entry(record.action.id).or_default();
        // The mask is the work of the first slice.
        let set = task.left == Some(Direction::Apply) || task.way == Some(Direction::Apply);
        let mut threads = done();
        match direction {
            Direction::Apply => {
                let ours = ours?;
                // Back to what was found although we left it changed: somebody else did that.
                let undone_by_others = is_found && set;
                if !is_ours && (undone_by_others || !is_found) {
                    return Err(Self::conflict(
                        record,
                        cpus_text(&ours),
                        mask_text(now.0.as_deref(), now.1),
                    ));
                }
                if !is_ours {
                    world.set_mask(p, Some(ours), by_board, false);
                    world.set_split(p, split);
                    world.charge(SWITCH_S);
                }
            }
            Direction::Undo if is_ours => {
                world.set_mask(p, found.0, found.1, false);
                world.charge(SWITCH_S);
            }
            Direction::Undo if is_found => {}
            Direction::Undo if memory.is_some() => threads = left_alone(),
            Direction::Undo => {
                self.placed.remove(&record.action.id);
                return Ok(left_alone());
            }
        }
        drop(world);
        let (id, workload) = (record.action.id, &record.action.workload);
        self.owes_memory.remove(&id);
        if direction == Direction::Undo {
            // As on Linux: what lies below can go now, although memory may find no room for long.
            self.placed.remove(&id);
        }
        if memory.is_some() {
            if direction == Direction::Undo {
                let later = self
                    .owes_memory
                    .iter()
                    .rev()
                    .find(|(later, of)| **later > id && *of == workload);
                let later = later.map(|(later, _)| *later);
                self.owes_memory.insert(id, workload.clone());
                if let Some(later) = later {
                    return Err(PlatformError::Busy {
                        what: format!("memory of {workload} that action {id} moved"),
                        why: format!("what action {later} moved on goes back first"),
                    });
                }
            }
            let pacing = Pacing::parse(&record.action, &BESIDE)?;
            let pages = if same_memory(&self.world.borrow(), record).is_some() {
                self.advance_moves(record, direction, &pacing, None, p)?
            } else {
                left_alone()
            };
            if pages.done {
                self.owes_memory.remove(&id);
            }
            return Ok(both(threads, pages));
        }
        self.leave(record, direction);
        Ok(done())
    }

    /// Whether memory that an undo would bring back finds no room where it was found: others have taken it since. The undo stays
    /// owed then, whatever anybody does.
    pub fn has_no_way_back(&self, record: &UndoRecord) -> bool {
        let to = match &record.action.target {
            Target::Pages(wanted) => Some(wanted.node.0 as usize),
            _ => None,
        };
        let world = self.world.borrow();
        let Some(p) = same_memory(&world, record) else {
            return false;
        };
        let Some(alive) = world.programs.get(p).and_then(|p| p.alive.as_ref()) else {
            return false;
        };
        let stuck = |m: &Moved| {
            alive
                .private
                .get(m.segment)
                .or(alive.shared.as_ref())
                .filter(|s| m.piece < s.pieces() && s.node_of(m.piece) == m.to)
                .is_some_and(|s| !world.memory.has_room(m.from, s.bytes_in(m.piece), Bytes::ZERO))
        };
        plan_of(record, to).is_ok_and(|plan| plan.iter().any(stuck))
    }

    /// A placement of the same workload that lies over this one and is not undone.
    fn over(&self, action: &Action) -> Option<ActionId> {
        let later = |(id, of): &(&ActionId, &WorkloadId)| **id > action.id && **of == action.workload;
        self.placed.iter().rev().find(later).map(|(id, _)| *id)
    }

    fn is_left_on(&self, id: ActionId) -> bool {
        self.tasks
            .get(&id)
            .is_some_and(|t| t.left == Some(Direction::Apply) && t.way.is_none())
    }

    fn leave(&mut self, record: &UndoRecord, direction: Direction) {
        if direction == Direction::Undo {
            self.placed.remove(&record.action.id);
        }
        let task = self.tasks.entry(record.action.id).or_default();
        *task = Task {
            left: Some(direction),
            ..Task::default()
        };
    }

    // -- prefetch

    fn prepare_prefetch(&self, action: &Action) -> Result<BTreeMap<String, String>, PlatformError> {
        let world = self.world.borrow();
        let cpus = target_cpus(&world, action)?;
        let on: Vec<CpuId> = cpus.into_iter().filter(|c| world.has_prefetch(*c)).collect();
        if on.is_empty() {
            return Err(PlatformError::Conflict {
                what: "hardware prefetch".into(),
                expected: "on".into(),
                found: "off on all of these CPUs already".into(),
            });
        }
        Ok(BTreeMap::from([("on".to_owned(), cpus_text(&on))]))
    }

    fn advance_prefetch(
        &mut self,
        record: &UndoRecord,
        direction: Direction,
    ) -> Result<Progress, PlatformError> {
        let mut world = self.world.borrow_mut();
        let cpus: Vec<CpuId> = record
            .found
            .get("on")
            .and_then(|t| numbers(t))
            .ok_or_else(|| malformed(record, "on"))?
            .into_iter()
            .map(CpuId)
            .collect();
        let on = cpus.iter().filter(|c| world.has_prefetch(**c)).count();
        let left = self.tasks.entry(record.action.id).or_default().left;
        match direction {
            Direction::Apply => {
                if left == Some(Direction::Apply) && on > 0 {
                    return Err(Self::conflict(
                        record,
                        "off".into(),
                        format!("on for {on} of {} CPUs", cpus.len()),
                    ));
                }
                // Off although we left it on: somebody chose what we would have set.
                if left == Some(Direction::Undo) && on < cpus.len() {
                    return Err(Self::conflict(
                        record,
                        "on".into(),
                        format!("off for {} of {} CPUs", cpus.len() - on, cpus.len()),
                    ));
                }
                if on > 0 {
                    world.set_prefetch(&cpus, false);
                    world.charge(SWITCH_S);
                }
            }
            Direction::Undo => {
                if left == Some(Direction::Undo) && on < cpus.len() {
                    return Ok(left_alone());
                }
                if on < cpus.len() {
                    world.set_prefetch(&cpus, true);
                    world.charge(SWITCH_S);
                }
            }
        }
        drop(world);
        self.leave(record, direction);
        Ok(done())
    }

    // -- pages

    /// The pieces to move, hottest first, private memory before shared.
    fn prepare_pages(&self, action: &Action) -> Result<BTreeMap<String, String>, PlatformError> {
        Pacing::parse(action, &[SPREAD, LARGE])?;
        let large = moves_large(action)?;
        let world = self.world.borrow();
        let Target::Pages(wanted) = &action.target else {
            return Err(rejected(
                "target of page_placement",
                "no page move".into(),
                "a page move expected",
            ));
        };
        let home = spread(action, wanted.node)?;
        let mut room = Bytes::ZERO;
        for node in &home {
            let found = world.memory.node(*node).filter(|n| n.online).ok_or_else(|| {
                rejected(
                    "target of page_placement",
                    format!("node {node}"),
                    "the machine has no such node online",
                )
            })?;
            room = Bytes(room.0.max(found.available().0));
        }
        let p = find(&world, &action.workload)?;
        let (program, alive) = alive(&world, p, &action.workload)?;
        not_bound(&action.workload, program)?;
        let mut found = BTreeMap::from([(STARTED.to_owned(), ticks(alive.started_s).to_string())]);
        note_executions(&mut found, alive);
        let along = Along {
            bytes: wanted.bytes,
            shared: wanted.shared,
            large,
        };
        let plans = plan_moves(&world, alive, |_| &home, &along);
        if plans.is_empty() {
            return Err(PlatformError::Busy {
                what: format!("moving pages of {} to node {}", action.workload, wanted.node),
                why: "none of its movable memory lies elsewhere".into(),
            });
        }
        if room.0 < world.memory.piece().0 {
            return Err(PlatformError::Busy {
                what: format!("moving pages to node {}", wanted.node),
                why: format!("only {room} are free there"),
            });
        }
        for (index, plan) in plans {
            found.insert(format!("segment.{index}"), plan_text(&plan));
        }
        Ok(found)
    }

    fn advance_pages(
        &mut self,
        record: &UndoRecord,
        direction: Direction,
    ) -> Result<Progress, PlatformError> {
        let pacing = Pacing::parse(&record.action, &[SPREAD, LARGE])?;
        let Target::Pages(wanted) = &record.action.target else {
            return Err(malformed(record, "target"));
        };
        let to = Some(wanted.node.0 as usize);
        let p = same_memory(&self.world.borrow(), record);
        match p {
            Some(p) => self.advance_moves(record, direction, &pacing, to, p),
            None => {
                let total = plan_of(record, to)?.len() as u64;
                ended(&record.action.workload, direction, total)
            }
        }
    }

    /// One slice of the moves in a record, whose pieces go to `to` where the record does not say otherwise.
    fn advance_moves(
        &mut self,
        record: &UndoRecord,
        direction: Direction,
        pacing: &Pacing,
        to: Option<usize>,
        p: usize,
    ) -> Result<Progress, PlatformError> {
        let plan = plan_of(record, to)?;
        let large = moves_large(&record.action)?;
        let world = Rc::clone(&self.world);
        let mut world = world.borrow_mut();
        let total = plan.len() as u64;
        if direction == Direction::Apply && world.programs.get(p).is_some_and(|p| p.nodes.is_some()) {
            return Err(Self::conflict(
                record,
                "not bound".into(),
                "bound by a person".into(),
            ));
        }
        world.settle_now();
        let task = self.tasks.entry(record.action.id).or_default();
        task.head(direction);
        let mut slice = Slice::default();
        let (mut no_room, mut moved_any) = (None, false);
        while slice.worked_s < pacing.slice_s && slice.bytes < pacing.bytes_per_slice() {
            let Some(Moved {
                segment: index,
                piece,
                from,
                to,
            }) = plan.get(task.cursor).copied()
            else {
                break;
            };
            let keep_free = match direction {
                Direction::Apply => pacing.keep_free.unwrap_or_else(|| {
                    Bytes((world.memory.node(to).map_or(0, |n| n.total.0) as f64 * KEEP_FREE_SHARE) as u64)
                }),
                Direction::Undo => Bytes::ZERO,
            };
            let World { memory, programs, .. } = &mut *world;
            let Some(alive) = programs.get_mut(p).and_then(|p| p.alive.as_mut()) else {
                break;
            };
            let whole = alive.resident().0.max(1) as f64;
            let segment = match alive.private.get_mut(index) {
                Some(s) => Some(s),
                None => alive.shared.as_mut(),
            };
            let Some(segment) = segment.filter(|s| piece < s.pieces()) else {
                task.skip(NOT_MAPPED);
                continue;
            };
            let (source, goal) = match direction {
                Direction::Apply => (from, to),
                Direction::Undo => (to, from),
            };
            let here = segment.node_of(piece);
            if here == goal {
                task.cursor += 1;
                task.finished += 1;
                continue;
            }
            // Not where we left it: somebody else moved it since, and theirs it stays.
            if here != source || task.left == Some(direction) {
                task.skip(MOVED_BY_OTHERS);
                continue;
            }
            if direction == Direction::Apply && segment.is_large(piece) && !large {
                task.skip(ALREADY_LARGE);
                continue;
            }
            let bytes = segment.bytes_in(piece);
            if !memory.has_room(goal, bytes, keep_free) {
                no_room = Some(goal);
                if direction == Direction::Undo {
                    break;
                }
                task.skip(NO_ROOM);
                continue;
            }
            match memory.move_piece(segment, piece, goal) {
                Ok(ns) => {
                    let pages = segment.pages_in(piece).max(1);
                    let weight = segment.weight(piece) * segment.bytes.0 as f64 / whole;
                    slice.add(ns / 1e9, bytes.0);
                    *slice.copied.entry((here, goal)).or_default() += bytes.0;
                    moved_any = true;
                    task.cursor += 1;
                    task.finished += 1;
                    let page_s = move_cost(1, bytes.0 / pages) / 1e9;
                    slice.stalls.push((page_s, weight / pages as f64, pages));
                }
                Err(MemoryError::NoMemory { .. } | MemoryError::Offline(_))
                    if direction == Direction::Apply =>
                {
                    task.skip(NO_ROOM)
                }
                Err(e) => {
                    no_room = Some(goal);
                    slice.why = Some(e.to_string());
                    break;
                }
            }
        }
        if moved_any {
            world.touch();
        }
        let at_end = task.cursor >= plan.len();
        let (finished, skipped) = (task.finished, task.skipped.clone());
        slice.spend(&mut world, p, pacing, at_end);
        let stuck = !moved_any && !at_end && no_room.is_some();
        let nothing = at_end
            && finished == 0
            && direction == Direction::Apply
            && skipped.get(NO_ROOM).is_some_and(|n| *n > 0);
        if stuck || nothing {
            let place = no_room
                .or(to)
                .map_or_else(|| "its nodes".to_owned(), |n| format!("node {n}"));
            self.tasks.remove(&record.action.id);
            return Err(PlatformError::Busy {
                what: format!("moving pages of {} to {place}", record.action.workload),
                why: slice.why.unwrap_or_else(|| NO_ROOM.to_owned()),
            });
        }
        drop(world);
        let progress = slice.progress(pacing, at_end, finished, total, skipped);
        if at_end {
            self.leave(record, direction);
        }
        Ok(progress)
    }

    // -- large pages

    fn prepare_large(&self, action: &Action) -> Result<BTreeMap<String, String>, PlatformError> {
        let pacing = Pacing::parse(action, &[])?;
        let world = self.world.borrow();
        let targets = memory_targets(&world, action)?;
        require_switch(&world)?;
        let p = find(&world, &action.workload)?;
        let (_, alive) = alive(&world, p, &action.workload)?;
        let several = alive.processes.len() > 1 && !world.layout().split_shared;
        let mut found = BTreeMap::from([(STARTED.to_owned(), ticks(alive.started_s).to_string())]);
        note_executions(&mut found, alive);
        let mut skipped: BTreeMap<&str, u64> = BTreeMap::new();
        let mut convertible = 0;
        for target in targets {
            let Some(process) = alive.processes.iter().position(|id| *id == target.process) else {
                *skipped.entry(ENDED).or_default() += target.pieces.len() as u64;
                continue;
            };
            let mut usable = Vec::new();
            for address in &target.pieces {
                match locate(alive, process, *address) {
                    None => *skipped.entry(NOT_MAPPED).or_default() += 1,
                    Some((index, piece)) => match alive.segment(index) {
                        Some(s) if s.is_large(piece) => *skipped.entry(ALREADY_LARGE).or_default() += 1,
                        Some(s) if s.is_sparse(piece) => *skipped.entry(HOLES).or_default() += 1,
                        Some(s) if s.shared && several && !pacing.several_mappers => {
                            *skipped.entry(SEVERAL).or_default() += 1;
                        }
                        _ => usable.push((index, piece)),
                    },
                }
            }
            convertible += usable.len();
            for (index, piece) in usable {
                let text = found.entry(format!("segment.{index}")).or_default();
                if !text.is_empty() {
                    text.push(',');
                }
                text.push_str(&piece.to_string());
            }
        }
        if convertible == 0 && skipped.contains_key(ENDED) {
            return Err(vanished(&action.workload));
        }
        for text in found
            .iter_mut()
            .filter(|(k, _)| k.starts_with("segment."))
            .map(|(_, v)| v)
        {
            if let Some(mut list) = numbers(text) {
                list.sort_unstable();
                list.dedup();
                *text = cpus_text(&list.into_iter().map(CpuId).collect::<Vec<_>>());
            }
        }
        for (reason, count) in skipped {
            found.insert(format!("skipped.{reason}"), count.to_string());
        }
        Ok(found)
    }

    fn advance_large(
        &mut self,
        record: &UndoRecord,
        direction: Direction,
    ) -> Result<Progress, PlatformError> {
        let pacing = Pacing::parse(&record.action, &[])?;
        let world = Rc::clone(&self.world);
        let mut world = world.borrow_mut();
        let mut plan: Vec<(usize, usize)> = Vec::new();
        for (name, text) in record.found.iter().filter(|(k, _)| k.starts_with("segment.")) {
            let index = name
                .trim_start_matches("segment.")
                .parse()
                .map_err(|_| malformed(record, name))?;
            let pieces = numbers(text).ok_or_else(|| malformed(record, name))?;
            plan.extend(pieces.into_iter().map(|p| (index, p as usize)));
        }
        let found_skipped: BTreeMap<String, u64> = record
            .found
            .iter()
            .filter_map(|(k, v)| Some((k.strip_prefix("skipped.")?.to_owned(), v.parse().ok()?)))
            .collect();
        let total = plan.len() as u64 + found_skipped.values().sum::<u64>();
        let Some(p) = same_memory(&world, record) else {
            return ended(&record.action.workload, direction, total);
        };
        if direction == Direction::Apply {
            require_switch(&world)?;
        }
        world.settle_now();
        let task = self.tasks.entry(record.action.id).or_default();
        task.head(direction);
        let mut slice = Slice::default();
        let mut refused = None;
        let mut changed = false;
        let split_shared = world.layout().split_shared;
        while slice.worked_s < pacing.slice_s && slice.bytes < pacing.bytes_per_slice() {
            let Some((index, piece)) = plan.get(task.cursor).copied() else {
                break;
            };
            let World { memory, programs, .. } = &mut *world;
            let Some(alive) = programs.get_mut(p).and_then(|p| p.alive.as_mut()) else {
                break;
            };
            let whole = alive.resident().0.max(1) as f64;
            let several = alive.processes.len() > 1 && !split_shared;
            let size = memory.piece().0;
            let segment = match alive.private.get_mut(index) {
                Some(s) => Some(s),
                None => alive.shared.as_mut(),
            };
            let Some(segment) = segment.filter(|s| piece < s.pieces()) else {
                task.skip(NOT_MAPPED);
                continue;
            };
            let weight = segment.weight(piece) * segment.bytes.0 as f64 / whole;
            let is_large = segment.is_large(piece);
            if task.left == Some(direction) && is_large != (direction == Direction::Apply) {
                task.skip(CHANGED_BY_OTHERS);
                continue;
            }
            match direction {
                Direction::Apply if !is_large => match memory.convert(segment, piece) {
                    Ok(ns) => {
                        slice.add(ns / 1e9, size);
                        slice.stalls.push((ns / 1e9, weight, 1));
                        changed = true;
                        task.refused = 0;
                    }
                    Err(error) => {
                        task.refused += 1;
                        if task.refused >= REFUSED_MAX {
                            refused = Some(error.to_string());
                        }
                        break;
                    }
                },
                Direction::Undo if is_large && segment.shared && several => {
                    refused = Some("other processes map it, too".to_owned());
                    break;
                }
                Direction::Undo if is_large => {
                    let ns = memory.split(segment, piece);
                    slice.add(ns / 1e9, size);
                    slice.stalls.push((ns / 1e9, weight, 1));
                    changed = true;
                }
                Direction::Apply | Direction::Undo => {}
            }
            task.cursor += 1;
            task.finished += 1;
        }
        if changed {
            world.touch();
        }
        let at_end = task.cursor >= plan.len();
        let finished = task.finished;
        let mut skipped = found_skipped;
        for (reason, count) in &task.skipped {
            *skipped.entry(reason.clone()).or_default() += count;
        }
        slice.spend(&mut world, p, &pacing, at_end);
        drop(world);
        if let Some(why) = refused {
            self.tasks.remove(&record.action.id);
            return Err(PlatformError::Busy {
                what: format!("large pages for {}", record.action.workload),
                why,
            });
        }
        let progress = slice.progress(&pacing, at_end, finished, total, skipped);
        if at_end {
            self.leave(record, direction);
        }
        Ok(progress)
    }
}

impl Task {
    /// Starts over when the direction is new.
    fn head(&mut self, direction: Direction) {
        if self.way != Some(direction) {
            *self = Self {
                // From here on the pieces are no longer all as the other direction left them: if this one is broken
                // off half way, what it did must not look like the work of somebody else.
                left: self.left.filter(|left| *left == direction),
                way: Some(direction),
                ..Self::default()
            };
        }
    }
    fn skip(&mut self, reason: &str) {
        *self.skipped.entry(reason.to_owned()).or_default() += 1;
        self.cursor += 1;
    }
}

/// The work of one slice.
#[derive(Default)]
struct Slice {
    worked_s: f64,
    longest_s: f64,
    bytes: u64,
    /// (length, share of the accesses, how often) of what the program may have to wait for.
    stalls: Vec<(f64, f64, u64)>,
    /// Bytes by the nodes that they were copied from and to. Copies within a node are not counted: at the pace of a
    /// conversion they take less than 1 % of its memory's bandwidth.
    copied: BTreeMap<(usize, usize), u64>,
    why: Option<String>,
}

impl Slice {
    fn add(&mut self, seconds: f64, bytes: u64) {
        self.worked_s += seconds;
        self.longest_s = self.longest_s.max(seconds);
        self.bytes += bytes;
    }

    /// Pause until the next slice.
    fn pause(&self, pacing: &Pacing, at_end: bool) -> Nanoseconds {
        if at_end {
            Nanoseconds::ZERO
        } else {
            pacing
                .pause(self.worked_s, self.bytes)
                .max(Nanoseconds::from_millis(1))
        }
    }

    /// The time it took passes, and its cost is borne: the mover's CPU time, the program's standstill, and the traffic of
    /// the copies, which is spread over the slice and the pause after it.
    fn spend(&self, world: &mut World, p: usize, pacing: &Pacing, at_end: bool) {
        if self.worked_s <= 0.0 {
            return;
        }
        let turn_s = self.worked_s + self.pause(pacing, at_end).as_secs_f64();
        world.copy(p, &self.copied, turn_s);
        for (seconds, weight, count) in &self.stalls {
            world.stall_often(p, *seconds, *weight, *count);
        }
        world.charge(self.worked_s);
        let until = world.now() + nanoseconds(self.worked_s);
        world.advance_to(until);
    }

    fn progress(
        &self,
        pacing: &Pacing,
        at_end: bool,
        finished: u64,
        total: u64,
        skipped: BTreeMap<String, u64>,
    ) -> Progress {
        Progress {
            done: at_end,
            finished,
            total,
            skipped,
            stalled: nanoseconds(self.worked_s),
            longest_call: nanoseconds(self.longest_s),
            pause: self.pause(pacing, at_end),
            bloat: Bytes::ZERO,
            verified: at_end,
        }
    }
}

fn ended(workload: &WorkloadId, direction: Direction, total: u64) -> Result<Progress, PlatformError> {
    match direction {
        Direction::Undo => Ok(Progress {
            finished: 0,
            total,
            skipped: BTreeMap::from([(ENDED.to_owned(), total)]),
            ..done()
        }),
        Direction::Apply => Err(vanished(workload)),
    }
}

fn require_switch(world: &World) -> Result<(), PlatformError> {
    let enabled = &world.surroundings().large_page_switch;
    if enabled == "never" {
        return Err(PlatformError::Conflict {
            what: "transparent_hugepage/enabled".into(),
            expected: "madvise or always".into(),
            found: enabled.clone(),
        });
    }
    Ok(())
}

fn memory_targets<'a>(world: &World, action: &'a Action) -> Result<&'a [MemoryTarget], PlatformError> {
    let what = "target of large_pages";
    let Target::Memory(targets) = &action.target else {
        return Err(rejected(what, "no memory".into(), "memory expected"));
    };
    let pieces: usize = targets.iter().map(|t| t.pieces.len()).sum();
    if pieces > PIECES_PER_ACTION_MAX {
        return Err(rejected(
            what,
            format!("{pieces} pieces"),
            "too many for one action",
        ));
    }
    let size = world.memory.piece().0;
    for target in targets {
        if !target.pieces.is_sorted_by(|a, b| a < b) || target.pieces.iter().any(|p| p % size != 0) {
            let whose = format!("pieces of process {}", target.process);
            return Err(rejected(
                what,
                whose,
                "multiples of the large page size in ascending order expected",
            ));
        }
    }
    Ok(targets)
}

/// Segment and piece at an address of a process.
fn locate(alive: &Alive, process: usize, address: u64) -> Option<(usize, usize)> {
    let private = alive
        .private
        .get(process)
        .and_then(|s| Some((process, s.piece_at(address)?)));
    private.or_else(|| Some((alive.private.len(), alive.shared.as_ref()?.piece_at(address)?)))
}

/// A piece of memory that is moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Moved {
    segment: usize,
    piece: usize,
    from: usize,
    to: usize,
}

/// Argument of `page_placement`: the nodes among which pages are shared out.
const SPREAD: &str = "spread_over";
/// A segment goes to several nodes in so many runs of pieces: enough that each gets as much of what is hot, and few
/// enough that the record stays short.
const RUNS: usize = 64;

/// Argument of moves of pages: large pages go along as they are.
const LARGE: &str = "large_pages";

fn moves_large(action: &Action) -> Result<bool, PlatformError> {
    match action.arguments.get(LARGE).map(String::as_str) {
        None => Ok(false),
        Some("move") => Ok(true),
        Some(other) => Err(rejected(
            &argument(action, LARGE),
            other.to_owned(),
            "only large_pages = move is known",
        )),
    }
}

/// The nodes of a page move: the target's, and those that it is to be shared out among.
fn spread(action: &Action, node: NodeId) -> Result<BTreeSet<usize>, PlatformError> {
    let mut home = BTreeSet::from([node.0 as usize]);
    if let Some(text) = action.arguments.get(SPREAD) {
        let list = numbers(text).filter(|l| l.contains(&node.0)).ok_or_else(|| {
            rejected(
                &argument(action, SPREAD),
                text.clone(),
                "expected nodes such as 0,2, the target's among them",
            )
        })?;
        home.extend(list.into_iter().map(|n| n as usize));
    }
    Ok(home)
}

/// The nodes of CPUs.
fn nodes_of(world: &World, cpus: &[CpuId]) -> Result<BTreeSet<usize>, PlatformError> {
    let layout = world.layout();
    let mut home = BTreeSet::new();
    for (chip, of_chip) in layout.chips.iter().enumerate() {
        let range = layout.cpus_of_chip(chip).unwrap_or_default();
        if cpus.iter().any(|c| range.contains(&c.0)) {
            home.insert(of_chip.node as usize);
        }
    }
    match home
        .iter()
        .find(|n| !world.memory.node(**n).is_some_and(|n| n.online))
    {
        Some(node) => Err(rejected(
            "target of thread_placement",
            format!("node {node}"),
            "memory cannot go there: the node is offline",
        )),
        None => Ok(home),
    }
}

fn not_bound(workload: &WorkloadId, program: &Program) -> Result<(), PlatformError> {
    match &program.nodes {
        Some(nodes) => Err(PlatformError::Conflict {
            what: format!("memory of {workload}"),
            expected: "not bound".into(),
            found: format!("bound by a person to nodes {nodes:?}"),
        }),
        None => Ok(()),
    }
}

/// Name in a record: the chip of each process.
const SPLIT: &str = "split";

/// Processes and their chips, as `0-15@0,16-31@1`.
fn split_text(chips: &[u32]) -> String {
    let mut first = 0;
    let runs = chips.chunk_by(|a, b| a == b).map(|run| {
        let last = first + run.len() - 1;
        let text = format!("{first}-{last}@{}", run.first().copied().unwrap_or(0));
        first = last + 1;
        text
    });
    runs.collect::<Vec<_>>().join(",")
}

fn split_from(text: &str) -> Option<Vec<u32>> {
    let mut chips = Vec::new();
    for run in text.split(',').filter(|r| !r.is_empty()) {
        let (processes, chip) = run.split_once('@')?;
        let chip: u32 = chip.parse().ok()?;
        chips.extend(numbers(processes)?.into_iter().map(|_| chip));
    }
    Some(chips)
}

/// A chip for each process among those of the CPUs: where most of its private memory is, as many on each as its cores are
/// of all; of equals the emptiest, then the first.
fn assign(world: &World, alive: &Alive, cpus: &[CpuId]) -> Vec<u32> {
    let layout = world.layout();
    let chips: Vec<(usize, f64)> = layout
        .chips
        .iter()
        .enumerate()
        .filter(|(at, _)| {
            let range = layout.cpus_of_chip(*at).unwrap_or_default();
            cpus.iter().any(|c| range.contains(&c.0))
        })
        .map(|(at, chip)| (at, f64::from(chip.cores)))
        .collect();
    let cores: f64 = chips.iter().map(|(_, cores)| cores).sum();
    let mut left: Vec<(usize, f64)> = chips
        .into_iter()
        .map(|(at, of_chip)| (at, (alive.processes.len() as f64 * of_chip / cores).ceil()))
        .collect();
    let pages = |process: usize, chip: usize| -> u64 {
        let node = layout.chips.get(chip).map_or(0, |c| c.node as usize);
        let on = alive.private.get(process).map(|s| s.pages_on());
        on.and_then(|on| on.get(node)).copied().unwrap_or(0)
    };
    let mut out = Vec::with_capacity(alive.processes.len());
    for process in 0..alive.processes.len() {
        let best = left
            .iter_mut()
            .filter(|(_, left)| *left >= 1.0)
            .reduce(|best, next| {
                let order = pages(process, best.0)
                    .cmp(&pages(process, next.0))
                    .then(best.1.total_cmp(&next.1));
                if order == std::cmp::Ordering::Less {
                    next
                } else {
                    best
                }
            });
        if let Some((chip, left)) = best {
            *left -= 1.0;
            out.push(*chip as u32);
        }
    }
    out
}

/// What moves to the nodes of its segment, by segment: the hottest first, private memory before shared.
/// Processes take turns, so that a part of the whole is a part of each. With several nodes, each gets runs of pieces by
/// turns as long as it has room.
fn plan_moves<'a>(
    world: &World,
    alive: &Alive,
    home_of: impl Fn(usize) -> &'a BTreeSet<usize>,
    along: &Along,
) -> BTreeMap<usize, Vec<Moved>> {
    let mut room: Vec<u64> = world.memory.nodes().iter().map(|n| n.available().0).collect();
    let mut left = along.bytes.0;
    let mut plans: BTreeMap<usize, Vec<Moved>> = BTreeMap::new();
    for shared in [false, true] {
        let mut cursors: Vec<(usize, usize)> = (0..alive.segment_count())
            .filter(|i| along.shared || *i < alive.private.len())
            .filter(|i| alive.segment(*i).is_some_and(|s| s.shared == shared))
            .map(|i| (i, 0))
            .collect();
        while left > 0 && !cursors.is_empty() {
            for (index, cursor) in &mut cursors {
                let Some(segment) = alive.segment(*index) else {
                    continue;
                };
                let home = home_of(*index);
                while *cursor < segment.pieces()
                    && (home.contains(&segment.node_of(*cursor))
                        || (segment.is_large(*cursor) && !along.large))
                {
                    *cursor += 1;
                }
                if *cursor >= segment.pieces() || left == 0 {
                    *cursor = usize::MAX;
                    continue;
                }
                let plan = plans.entry(*index).or_default();
                let size = segment.bytes_in(*cursor).0;
                let run = (segment.pieces() / RUNS).max(1);
                let turn = *index + plan.len() / run;
                let Some(to) = next_node(home, &mut room, turn, size) else {
                    return plans;
                };
                plan.push(Moved {
                    segment: *index,
                    piece: *cursor,
                    from: segment.node_of(*cursor),
                    to,
                });
                left = left.saturating_sub(size);
                *cursor += 1;
            }
            cursors.retain(|(_, c)| *c != usize::MAX);
        }
    }
    plans
}

/// The node whose turn it is, or the next one that has room; where none has any, whose turn it is: what does not fit is
/// counted when it is to be moved.
fn next_node(home: &BTreeSet<usize>, room: &mut [u64], turn: usize, size: u64) -> Option<usize> {
    let first = turn.checked_rem(home.len())?;
    let mut turns = home.iter().cycle().skip(first).take(home.len());
    let fits = turns.find(|n| room.get(**n).is_some_and(|left| *left >= size));
    let node = *fits.or_else(|| home.iter().nth(first))?;
    let left = room.get_mut(node)?;
    *left = left.saturating_sub(size);
    Some(node)
}

/// Pieces with the node they come from and the one they go to, as `0-99@1>0,100@0>2`.
fn plan_text(plan: &[Moved]) -> String {
    plan.chunk_by(|a, b| a.piece + 1 == b.piece && (a.from, a.to) == (b.from, b.to))
        .filter_map(|run| {
            let (first, last) = (run.first()?, run.last()?);
            let pieces = if first.piece == last.piece {
                first.piece.to_string()
            } else {
                format!("{}-{}", first.piece, last.piece)
            };
            Some(format!("{pieces}@{}>{}", first.from, first.to))
        })
        .collect::<Vec<_>>()
        .join(",")
}

/// The plan of a page move: each segment's hottest first, segments by turns. Pieces of which the record does not say where
/// they go (`0-99@1`) go to `to`.
fn plan_of(record: &UndoRecord, to: Option<usize>) -> Result<Vec<Moved>, PlatformError> {
    let mut all: Vec<(usize, usize, Moved)> = Vec::new();
    for (name, text) in record.found.iter().filter(|(k, _)| k.starts_with("segment.")) {
        let wrong = || malformed(record, name);
        let segment: usize = name.trim_start_matches("segment.").parse().map_err(|_| wrong())?;
        let mut turn = 0;
        for part in text.split(',').filter(|p| !p.is_empty()) {
            let (range, nodes) = part.split_once('@').ok_or_else(wrong)?;
            let (from, to) = match nodes.split_once('>') {
                Some((from, to)) => (from, Some(to.parse().map_err(|_| wrong())?)),
                None => (nodes, to),
            };
            let from: usize = from.parse().map_err(|_| wrong())?;
            let to = to.ok_or_else(wrong)?;
            for piece in numbers(range).ok_or_else(wrong)? {
                let piece = piece as usize;
                all.push((
                    turn,
                    segment,
                    Moved {
                        segment,
                        piece,
                        from,
                        to,
                    },
                ));
                turn += 1;
            }
        }
    }
    all.sort_unstable_by_key(|(turn, segment, m)| (*turn, *segment, m.piece, m.from));
    Ok(all.into_iter().map(|(_, _, m)| m).collect())
}

/// The progress of a change that places threads and moves memory: the mask counts as one piece.
fn both(threads: Progress, mut memory: Progress) -> Progress {
    memory.finished += threads.finished;
    memory.total += threads.total;
    for (reason, count) in threads.skipped {
        *memory.skipped.entry(reason).or_default() += count;
    }
    memory
}

impl Effectors for SimPlatform {
    fn prepare(&mut self, action: &Action) -> Result<UndoRecord, PlatformError> {
        let found = match action.effector.as_str() {
            "thread_placement" => self.prepare_threads(action)?,
            "prefetch" => self.prepare_prefetch(action)?,
            "page_placement" => self.prepare_pages(action)?,
            "large_pages" => self.prepare_large(action)?,
            "placebo" => match action.target {
                Target::Nothing => BTreeMap::new(),
                _ => return Err(rejected("placebo", "a target".into(), "a placebo has no target")),
            },
            _ => return Err(unknown_effector(action)),
        };
        self.record(action, found)
    }

    fn advance(&mut self, record: &UndoRecord, direction: Direction) -> Result<Progress, PlatformError> {
        match record.action.effector.as_str() {
            "thread_placement" => self.advance_threads(record, direction),
            "prefetch" => self.advance_prefetch(record, direction),
            "page_placement" => self.advance_pages(record, direction),
            "large_pages" => self.advance_large(record, direction),
            "placebo" => Ok(done()),
            _ => Err(unknown_effector(&record.action)),
        }
    }

    fn forget(&mut self, record: &UndoRecord) {
        self.tasks.remove(&record.action.id);
        self.placed.remove(&record.action.id);
        self.owes_memory.remove(&record.action.id);
    }
}

fn unknown_effector(action: &Action) -> PlatformError {
    PlatformError::Unsupported {
        what: format!("effector {}", action.effector),
        why: "the simulated machine does not have it".into(),
    }
}
