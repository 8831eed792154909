//! The sensors of the simulated machine.

use super::large::PIECES_PER_ACTION_MAX;
use super::{SimPlatform, alive, find, nanoseconds};
use crate::behaviour::MeterSpec;
use crate::noise::Draws;
use crate::world::{Alive, Program, World, ticks};
use homeostat_model::{
    Bytes, CanaryReading, Capability, CapabilityId, CapabilityState, Counters, Fingerprint, HugePageSettings,
    Locality, Machine, MachineSample, MemoryAdvice, MemoryKind, MemoryMap, MemoryRegion, MeterCandidate,
    MeterId, MeterReading, Nanoseconds, NodeId, OperatorChoice, PageSizeSetting, Pieces, Pressure, ProcessId,
    Snapshot, Workload, WorkloadId, WorkloadKind, WorkloadSample,
};
use homeostat_platform::{PlatformError, SampleRequest, Sensors};
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

/// Shortest and longest period in seconds with which a biased work meter wanders.
const METER_PERIOD_S: (f64, f64) = (1200.0, 10_800.0);
/// Most regions of one memory map, as on Linux.
const REGIONS_MAX: usize = 4096;

/// Loads of the memory canary, and CPU time of each, as on a server at rest.
const CANARY_LOADS_PER_S: f64 = 10_000.0;
const CANARY_LOAD_NS: u64 = 100;

#[derive(Clone, Debug, Default)]
pub(super) struct Seen {
    /// Whether the memory canary runs.
    canary: bool,
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
pub(super) struct OpenMeter {
    spec: MeterSpec,
    work: f64,
    at: Nanoseconds,
    started: u64,
    fraction: f64,
}

/// CPU seconds as the operating system counts them: in a shared partition, consumed cores.
fn counted_cpu(world: &World, program: &Program) -> f64 {
    if world.layout().shared_partition {
        program.totals.core_s
    } else {
        program.totals.cpu_s
    }
}

// ---- sensors -------------------------------------------------------------------------------------------------------

/// The processes of a workload now. In short-lived slots a new process starts every life.
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
        // A restarted workload is new: its counters start at zero.
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
        let open = self.meters.range_mut((id.clone(), MeterId::new(""))..);
        let meters = open
            .take_while(|((owner, _), _)| detailed && *owner == id)
            .filter_map(|((_, meter), open)| open.read(meter, t.work, now, started, world.seed(), p))
            .collect();
        Some(WorkloadSample {
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
            meters,
            reads: homeostat_model::Reads::default(),
            spans: None,
            executions: alive.executions,
        })
    }
}

impl OpenMeter {
    /// The counts since the last reading; none after a restart of the counter.
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
        // Counters of small units are whole; progress of big units has finer steps.
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
            let wanted = wanted(&world, request, &running);
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
            canary: self.seen.canary.then(|| Ok(canary(interval))),
        })
    }

    fn keep_canary(&mut self, wanted: bool) {
        self.seen.canary = wanted;
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
        let counters = world
            .surroundings()
            .counters
            .then(|| counters(&world, p, program));
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

/// The programs to sample, and whether in detail.
/// What the memory canary did. The programs' noise is their own, so the memory of a simulated machine is steady.
fn canary(interval: Nanoseconds) -> CanaryReading {
    let loads = (interval.as_secs_f64() * CANARY_LOADS_PER_S) as u64;
    CanaryReading {
        loads,
        loading: Nanoseconds(loads * CANARY_LOAD_NS),
        cpu: Nanoseconds(loads * CANARY_LOAD_NS * 2),
        resident: Bytes::from_mib(66),
    }
}

fn wanted(world: &World, request: &SampleRequest, running: &[usize]) -> Vec<(usize, bool)> {
    let detail: BTreeSet<&str> = request.detail.iter().map(WorkloadId::as_str).collect();
    if request.scan {
        let is_detailed = |p: &usize| {
            world
                .programs
                .get(*p)
                .is_some_and(|p| detail.contains(p.name.as_str()))
        };
        return running.iter().map(|p| (*p, is_detailed(p))).collect();
    }
    let found: BTreeSet<usize> = detail.iter().filter_map(|name| world.find(name)).collect();
    found.into_iter().map(|p| (p, true)).collect()
}

/// The processor counters of a program, with their roughness.
fn counters(world: &World, p: usize, program: &Program) -> Counters {
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
        // Hinting faults are not simulated: the simulated kernel has no automatic balancing.
        numa_balancing: None,
        paging: homeostat_model::Paging::default(),
        memory_settings: Vec::new(),
    }
}
