//! Programs: starts and ends, possessions, and activity under constant rates.

use super::{Event, Pace, Totals, World, WorldError};
use crate::behaviour::{BurstCursor, ProgramSpec, Response};
use crate::hardware::{Profile, Rate};
use crate::memory::{MemoryError, Segment, Shape};
use crate::noise::{CELL_NS, Draws, Noise};
use crate::scheduler::Placed;
use homeostat_model::{Bytes, CpuId, ProcessId};

/// Longest waiting line of an open load, in seconds of its rate; more requests are refused.
const BACKLOG_S: f64 = 30.0;
/// Largest share of time that a program can stand still for homeostat.
const LOST_MAX: f64 = 0.95;
const TICKS_PER_S: f64 = 100.0;
/// Zero of start times, long before the beginning, so that programs can be older than the run.
const EPOCH_S: f64 = 1e7;
const PROCESSES_MAX: usize = 8192;

#[derive(Clone, Debug)]
pub(crate) struct Alive {
    /// Seconds since the start of the run; negative when older.
    pub(crate) started_s: f64,
    pub(crate) processes: Vec<ProcessId>,
    pub(crate) private: Vec<Segment>,
    pub(crate) shared: Option<Segment>,
    pub(crate) executions: u32,
}

impl Alive {
    pub(crate) fn segments(&self) -> impl Iterator<Item = &Segment> {
        self.private.iter().chain(&self.shared)
    }
    pub(crate) fn resident(&self) -> Bytes {
        self.segments().map(Segment::resident).sum()
    }
    /// Segment `index` in the order private by process, then shared.
    pub(crate) fn segment(&self, index: usize) -> Option<&Segment> {
        self.private.get(index).or_else(|| {
            (index == self.private.len())
                .then_some(self.shared.as_ref())
                .flatten()
        })
    }
    pub(crate) fn segment_count(&self) -> usize {
        self.private.len() + usize::from(self.shared.is_some())
    }
}

#[derive(Clone, Debug)]
pub(crate) struct Program {
    pub(crate) name: String,
    pub(crate) spec: usize,
    pub(crate) profile: Profile,
    pub(crate) alive: Option<Alive>,
    /// CPUs asked for; `None` = all.
    pub(crate) mask: Option<Vec<CpuId>>,
    pub(crate) grouped: bool,
    /// The chip on which each process is kept, by its number; empty = wherever the mask allows.
    pub(crate) split: Vec<u32>,
    /// Whether a person asked for the mask.
    pub(crate) bound: bool,
    /// Nodes that a person bound the memory to.
    pub(crate) nodes: Option<Vec<u32>>,
    pub(crate) never: bool,
    pub(crate) totals: Totals,
    pub(crate) rate: Rate,
    pub(crate) placed: Option<Placed>,
    pub(crate) pace: Pace,
    pub(super) chance: Chance,
    /// Factor of the modulation, of the phase, and of people.
    pub(super) modulation: f64,
    pub(super) load: f64,
    pub(super) generation: u64,
    pub(super) drive: Driven,
    pub(super) books: Books,
}

#[derive(Clone, Debug)]
pub(crate) struct Chance {
    noise: Noise,
    arrival: Noise,
    pub(super) draws: Draws,
    pub(super) cursor: BurstCursor,
}

#[derive(Clone, Debug, Default)]
pub(crate) struct Driven {
    pub(super) think_s: Option<f64>,
    pub(super) offered: Option<f64>,
    pub(super) busy: f64,
    pub(super) unit_s: f64,
    pub(super) response: Response,
    /// Units that arrive per second (open load).
    pub(super) arrivals: Option<f64>,
}

#[derive(Clone, Debug, Default)]
pub(crate) struct Books {
    /// Work whose response times are not.
    pending: f64,
    backlog: f64,
    /// Standstill in seconds.
    pub(super) debt_s: f64,
}

impl World {
    pub(super) fn install(&mut self, index: usize) -> Result<(), WorldError> {
        let Some(spec) = self.specs.get(index).cloned() else {
            return Ok(());
        };
        let profile = self.profile(&spec.name, &spec)?;
        for name in spec.workloads() {
            if self.by_name.contains_key(&name) {
                return Err(WorldError::Values(format!("two workloads are called {name}")));
            }
            let number = self.programs.len();
            let stream = number as u64 * 8;
            let mask = spec.choice.cpus.as_ref().map(|c| self.cpu_list(c)).transpose()?;
            if let Some(nodes) = &spec.choice.nodes {
                self.check_nodes(nodes)?;
            }
            self.programs.push(Program {
                name: name.clone(),
                spec: index,
                profile: profile.clone(),
                alive: None,
                grouped: false,
                split: Vec::new(),
                bound: mask.is_some(),
                mask,
                nodes: spec.choice.nodes.clone(),
                never: spec.choice.never,
                totals: Totals::default(),
                rate: Rate::default(),
                placed: None,
                pace: Pace::default(),
                chance: Chance {
                    noise: Noise::new(spec.noise, self.seed, stream, 0),
                    arrival: Noise::new(spec.arrival_noise, self.seed, stream + 1, 0),
                    draws: Draws::new(self.seed, stream + 2),
                    cursor: BurstCursor::default(),
                },
                modulation: 1.0,
                load: 1.0,
                generation: 0,
                drive: Driven::default(),
                books: Books::default(),
            });
            self.by_name.insert(name, number);
        }
        Ok(())
    }

    pub(super) fn start(&mut self, p: usize) -> Result<(), WorldError> {
        let now_s = self.now_s();
        let Some(spec) = self.spec(p).cloned() else {
            return Ok(());
        };
        let first = self.programs.get(p).is_some_and(|p| p.generation == 0);
        let started_s = if first { now_s - spec.age_s } else { now_s };
        let mut processes = Vec::new();
        for _ in 0..spec.processes {
            processes.push(self.new_process(started_s));
        }
        let name = self.programs.get(p).map(|p| p.name.clone()).unwrap_or_default();
        let shares = self.first_touch(p, &spec);
        let shape = Shape {
            shares,
            skew: spec.skew,
            sparse: spec.sparse,
            large: spec.large,
        };
        let mut alive = Alive {
            started_s,
            processes,
            private: Vec::new(),
            shared: None,
            executions: 0,
        };
        self.allocate(&spec, &shape, &mut alive).map_err(|source| {
            alive.segments().for_each(|s| self.memory.release(s));
            WorldError::Memory {
                program: name,
                source,
            }
        })?;
        if let Some(program) = self.programs.get_mut(p) {
            program.alive = Some(alive);
            program.generation += 1;
            program.drive.busy = 0.0;
            program.books.backlog = 0.0;
            program.books.debt_s = 0.0;
            program.load = 1.0;
            if !first {
                // A new process loses the old settings, unless its starter sets them again.
                (program.mask, program.bound, program.grouped) = (None, false, false);
                program.split.clear();
            }
        }
        let generation = self.programs.get(p).map_or(0, |p| p.generation);
        if let Some(cpus) = &spec.choice.cpus {
            let mask = self.cpu_list(cpus)?;
            if let Some(program) = self.programs.get_mut(p) {
                program.mask = Some(mask);
                program.bound = true;
            }
        }
        for (index, phase) in spec.phases.iter().enumerate() {
            self.schedule_s(now_s + phase.after_s, Event::Phase(p, generation, index));
        }
        if let Some(end) = spec.end_s {
            if end > now_s {
                self.schedule_s(end, Event::End(p));
            }
        }
        if let Some(every) = spec.restart_every_s {
            self.schedule_s(now_s + every, Event::Restart(p, generation));
        }
        self.rates.dirty = true;
        self.modulate(p);
        Ok(())
    }

    /// As a restart, but the same processes and thread places stay.
    pub(super) fn execute(&mut self, p: usize) -> Result<(), WorldError> {
        let Some(program) = self.programs.get_mut(p) else {
            return Ok(());
        };
        let Some(before) = &program.alive else {
            return Ok(());
        };
        let (started_s, processes) = (before.started_s, before.processes.clone());
        let executions = before.executions.saturating_add(1);
        let (mask, bound, grouped) = (program.mask.clone(), program.bound, program.grouped);
        let split = program.split.clone();
        self.end(p);
        self.start(p)?;
        if let Some(program) = self.programs.get_mut(p) {
            (program.mask, program.bound, program.grouped) = (mask, bound, grouped);
            program.split = split;
            if let Some(alive) = &mut program.alive {
                (alive.started_s, alive.processes) = (started_s, processes);
                alive.executions = executions;
            }
        }
        Ok(())
    }

    fn new_process(&mut self, started_s: f64) -> ProcessId {
        let pid = self.next_pid;
        self.next_pid = if pid >= 4_000_000 { 1000 } else { pid + 1 };
        ProcessId {
            pid,
            start_ticks: ticks(started_s),
        }
    }

    fn allocate(&mut self, spec: &ProgramSpec, shape: &Shape, alive: &mut Alive) -> Result<(), MemoryError> {
        const PRIVATE: u64 = 0x7f00_0000_0000;
        const SHARED: u64 = 0x7a00_0000_0000;
        if spec.private_mib > 0 {
            for _ in 0..spec.processes {
                alive.private.push(self.memory.allocate(
                    PRIVATE,
                    Bytes::from_mib(spec.private_mib),
                    false,
                    shape,
                )?);
            }
        }
        if spec.shared_mib > 0 {
            alive.shared =
                Some(
                    self.memory
                        .allocate(SHARED, Bytes::from_mib(spec.shared_mib), true, shape)?,
                );
        }
        Ok(())
    }

    /// Memory share by node: as given, bound, or where the threads first run.
    fn first_touch(&self, p: usize, spec: &ProgramSpec) -> Vec<f64> {
        let nodes = self.memory.nodes().len();
        if let Some(bound) = self.programs.get(p).and_then(|p| p.nodes.as_ref()) {
            return (0..nodes)
                .map(|n| f64::from(u8::from(bound.contains(&(n as u32)))))
                .collect();
        }
        if !spec.memory_on.is_empty() {
            return spec.memory_on.clone();
        }
        let mut shares = vec![0.0; nodes];
        for (index, chip) in self.layout.chips.iter().enumerate() {
            let weight = if spec.threads_on.is_empty() {
                f64::from(chip.cores)
            } else {
                spec.threads_on.get(index).copied().unwrap_or(0.0)
            };
            if let Some(s) = shares.get_mut(chip.node as usize) {
                *s += weight;
            }
        }
        shares
    }

    pub(super) fn end(&mut self, p: usize) {
        let Some(program) = self.programs.get_mut(p) else {
            return;
        };
        program.flush();
        if let Some(alive) = program.alive.take() {
            for s in alive.segments() {
                self.memory.release(s);
            }
            self.rates.dirty = true;
        }
    }

    pub(super) fn change_phase(&mut self, p: usize, profile: Option<&str>, load: Option<f64>) {
        let found = profile.and_then(|name| self.profile_named(name));
        let instructions = self.spec(p).and_then(|s| s.instructions_per_unit);
        if let Some(program) = self.programs.get_mut(p) {
            if let Some(mut found) = found {
                if let Some(instructions) = instructions {
                    found.instructions_per_unit = instructions;
                }
                program.profile = found;
            }
            if let Some(load) = load {
                program.load = load.max(0.0);
            }
            self.rates.dirty = true;
        }
    }

    pub(super) fn fork(&mut self, p: usize, processes: u32) -> Result<(), WorldError> {
        let Some(spec) = self.spec(p).cloned() else {
            return Ok(());
        };
        let now_s = self.now_s();
        let shape = Shape {
            shares: self.first_touch(p, &spec),
            skew: spec.skew,
            sparse: spec.sparse,
            large: 0.0,
        };
        for _ in 0..processes {
            let Some(name) = self.programs.get(p).map(|p| p.name.clone()) else {
                return Ok(());
            };
            if self
                .programs
                .get(p)
                .and_then(|p| p.alive.as_ref())
                .is_none_or(|a| a.processes.len() >= PROCESSES_MAX)
            {
                return Ok(());
            }
            let process = self.new_process(now_s);
            let segment = if spec.private_mib > 0 {
                let made =
                    self.memory
                        .allocate(0x7f00_0000_0000, Bytes::from_mib(spec.private_mib), false, &shape);
                Some(made.map_err(|source| WorldError::Memory {
                    program: name,
                    source,
                })?)
            } else {
                None
            };
            if let Some(alive) = self.programs.get_mut(p).and_then(|p| p.alive.as_mut()) {
                alive.processes.push(process);
                alive.private.extend(segment);
            }
        }
        self.rates.dirty = true;
        Ok(())
    }
}

impl Program {
    /// Runs at the present rates. Returns the CPU seconds.
    pub(super) fn run(&mut self, from: u64, until: u64) -> f64 {
        let span_s = (until - from) as f64 / 1e9;
        let lost = self.books.debt_s.min(span_s * LOST_MAX);
        self.books.debt_s -= lost;
        let useful = 1.0 - lost / span_s;
        let (mut work, mut cpu) = (0.0, 0.0);
        let mut at = from;
        while at < until {
            let cell = at / CELL_NS;
            let end = ((cell + 1) * CELL_NS).min(until);
            let dt = (end - at) as f64 / 1e9;
            let speed = self.chance.noise.at(cell);
            match self.drive.arrivals {
                Some(per_s) => {
                    let wanted = per_s * self.chance.arrival.at(cell) * dt + self.books.backlog;
                    let done = wanted.min(self.pace.capacity_per_s * speed * dt * useful);
                    self.books.backlog = (wanted - done).clamp(0.0, per_s * BACKLOG_S);
                    work += done;
                    cpu += done * self.drive.unit_s / speed.max(1e-3);
                }
                None => {
                    work += self.pace.work_per_s * speed * dt * useful;
                    cpu += self.pace.cpus * dt * useful;
                }
            }
            at = end;
        }
        if !cpu.is_finite() {
            cpu = 0.0;
        }
        let usual = self.pace.cpus * span_s;
        let t = &mut self.totals;
        t.run_s += span_s;
        t.work += work;
        t.cpu_s += cpu;
        t.core_s += if usual > 0.0 {
            self.pace.cores * span_s * cpu / usual
        } else {
            0.0
        };
        t.wait_s += self.pace.waiting * span_s;
        t.lost_s += lost;
        t.local_s += self.rate.local * span_s;
        t.large_s += self.pace.large_share * span_s;
        t.prefetch_s += self.rate.counters.prefetch_share * span_s;
        t.cpi_s += self.rate.cpi * span_s;
        t.latency_ns_s += self.rate.latency_ns * span_s;
        self.books.pending += work;
        cpu
    }

    /// Books the response times of the work since the last rate change.
    pub(super) fn flush(&mut self) {
        let work = std::mem::take(&mut self.books.pending);
        if work > 0.0 && self.drive.response.service_s.is_finite() {
            self.totals.responses.add(work, &self.drive.response);
        }
    }
}

pub(crate) fn ticks(started_s: f64) -> u64 {
    ((started_s + EPOCH_S).max(0.0) * TICKS_PER_S) as u64
}
