//! The visible state of the machine, and the optimizer's cost.

use super::{Alive, Surroundings, World, ticks};
use crate::behaviour::ResponseTimes;
use crate::layout::Layout;
use crate::memory::Segment;
use homeostat_model::{Bytes, CpuId, Nanoseconds, NodeId};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Memory accesses of a running thread per second, for the chance to meet a moving page (assumed).
const ACCESSES_PER_S: f64 = 1e7;

/// Totals of a program since the start of the run.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Totals {
    /// Seconds in which it ran.
    pub run_s: f64,
    /// Units of work.
    pub work: f64,
    /// CPU seconds, as the operating system counts them.
    pub cpu_s: f64,
    /// Seconds of consumed cores: in a shared partition a core with one thread is consumed whole.
    pub core_s: f64,
    /// Seconds that its threads waited for a CPU.
    pub wait_s: f64,
    /// Seconds that it stood still for moves and conversions, or lost to the optimizer.
    pub lost_s: f64,
    /// Integral over time of the share of accesses that are local.
    pub local_s: f64,
    /// … of the share of accesses that go to large pages.
    pub large_s: f64,
    /// … of the share of the memory traffic that is prefetch.
    pub prefetch_s: f64,
    /// … of cycles per instruction.
    pub cpi_s: f64,
    /// … of the latency of a load from memory, in nanoseconds.
    pub latency_ns_s: f64,
    /// Response times.
    pub responses: ResponseTimes,
}

impl Totals {
    pub(super) fn add(&mut self, o: &Self) {
        for (a, b) in [
            (&mut self.run_s, o.run_s),
            (&mut self.work, o.work),
            (&mut self.cpu_s, o.cpu_s),
            (&mut self.core_s, o.core_s),
            (&mut self.wait_s, o.wait_s),
            (&mut self.lost_s, o.lost_s),
            (&mut self.local_s, o.local_s),
            (&mut self.large_s, o.large_s),
            (&mut self.prefetch_s, o.prefetch_s),
            (&mut self.cpi_s, o.cpi_s),
            (&mut self.latency_ns_s, o.latency_ns_s),
        ] {
            *a += b;
        }
        self.responses.merge(&o.responses);
    }
}

/// How fast a program is now, without noise.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Pace {
    /// Units of work per second.
    pub work_per_s: f64,
    /// Largest rate where it may run, units per second.
    pub capacity_per_s: f64,
    /// Share of the offered work that it does: below 1 its requests wait ever longer. 1 for a closed load.
    pub served: f64,
    /// CPUs used.
    pub cpus: f64,
    /// Cores consumed.
    pub cores: f64,
    /// Threads that wait for a CPU.
    pub waiting: f64,
    /// Share of the accesses that are local.
    pub local_share: f64,
    /// Share of the accesses on large pages.
    pub large_share: f64,
}

/// Everything that an effector or a person can change, for comparing machines.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Settings {
    /// CPUs to which threads are restricted, by workload; free ones are absent.
    pub masks: BTreeMap<String, Vec<CpuId>>,
    /// Workloads with threads kept on their boards in groups, or (`NAME by process 0,0,1,1`) each process on a chip.
    pub grouped: Vec<String>,
    /// Small pages (or their equivalent) by workload and node.
    pub pages: BTreeMap<String, BTreeMap<NodeId, u64>>,
    /// Pieces on large pages by workload.
    pub large: BTreeMap<String, u64>,
    /// A number over the place and kind of every piece, by workload: differs when any piece differs.
    pub pieces: BTreeMap<String, u64>,
    /// Main process start by workload, in ticks. A change means a restart, which lost its settings.
    pub started: BTreeMap<String, u64>,
    /// CPUs whose hardware prefetch is off.
    pub prefetch_off: Vec<CpuId>,
    /// The switch of large pages.
    pub large_page_switch: String,
    /// CPUs that are offline.
    pub offline: Vec<CpuId>,
    /// Nodes that are offline.
    pub nodes_offline: Vec<NodeId>,
}

impl World {
    /// The optimizer used this much CPU time. Where no CPU is idle the programs lose it.
    pub fn charge(&mut self, seconds: f64) {
        if !(seconds > 0.0 && seconds.is_finite()) {
            return;
        }
        self.settle();
        self.own_cpu_s += seconds;
        self.busy_s += seconds;
        let online = self.online.iter().filter(|o| **o).count().max(1) as f64;
        let cores = online / f64::from(self.layout().threads_per_core.max(1));
        let dispatched: f64 = self
            .programs
            .iter()
            .filter_map(|p| p.placed.as_ref())
            .map(|p| p.cores_dispatched.iter().sum::<f64>())
            .sum();
        // With busy cores, a spare core gets unlikely. A used core's spare thread slows that core as much.
        let full = ((dispatched / cores - 0.85) / 0.15).clamp(0.0, 1.0);
        for p in self.programs.iter_mut().filter(|p| p.alive.is_some()) {
            p.books.debt_s += seconds * full / online;
        }
    }

    /// The program's threads may meet memory locked for this time, with this share of its accesses.
    pub(crate) fn stall(&mut self, p: usize, seconds: f64, weight: f64) {
        if let Some(program) = self.programs.get_mut(p) {
            if seconds > 0.0 {
                // A thread runs until its first access to the locked memory, then waits.
                let accesses = ACCESSES_PER_S * weight.clamp(0.0, 1.0) * seconds;
                let share = if accesses > 1e-6 {
                    1.0 - (1.0 - (-accesses).exp()) / accesses
                } else {
                    accesses / 2.0
                };
                program.books.debt_s += seconds * share;
            }
        }
    }

    /// As `stall`, for this many similar stretches of memory in sequence.
    pub(crate) fn stall_often(&mut self, p: usize, seconds: f64, weight: f64, count: u64) {
        let before = self.programs.get(p).map_or(0.0, |p| p.books.debt_s);
        self.stall(p, seconds, weight);
        if let Some(program) = self.programs.get_mut(p) {
            program.books.debt_s = before + (program.books.debt_s - before) * count as f64;
        }
    }

    /// CPU time that the optimizer used so far.
    pub fn own_cpu(&self) -> Nanoseconds {
        Nanoseconds::from_secs_f64(self.own_cpu_s)
    }

    /// The machine's shape.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    pub(crate) fn surroundings(&self) -> &Surroundings {
        &self.surroundings
    }

    pub(crate) fn seed(&self) -> u64 {
        self.seed
    }

    pub(crate) fn is_online(&self, cpu: CpuId) -> bool {
        self.online.get(cpu.0 as usize).copied().unwrap_or(false)
    }

    pub(crate) fn has_prefetch(&self, cpu: CpuId) -> bool {
        self.prefetch_on.get(cpu.0 as usize).copied().unwrap_or(false)
    }

    pub(crate) fn tuners(&self) -> Vec<String> {
        self.tuners.iter().cloned().collect()
    }

    pub(crate) fn busy_s(&self) -> f64 {
        self.busy_s
    }

    pub(crate) fn waiting(&self) -> f64 {
        self.programs.iter().map(|p| p.pace.waiting).sum()
    }

    /// Names of the programs' workloads that run now.
    pub fn workloads(&self) -> Vec<String> {
        self.programs
            .iter()
            .filter(|p| p.alive.is_some())
            .map(|p| p.name.clone())
            .collect()
    }

    /// Totals of a program (all instances) or a workload since the start; zeros for an unknown name.
    pub fn totals(&mut self, name: &str) -> Totals {
        let mut sum = Totals::default();
        for p in self.members(name).unwrap_or_default() {
            if let Some(program) = self.programs.get_mut(p) {
                program.flush();
                sum.add(&program.totals);
            }
        }
        sum
    }

    /// How fast a workload is now, without noise; zeros when it does not run.
    pub fn pace(&mut self, workload: &str) -> Pace {
        self.settle();
        self.find(workload)
            .and_then(|p| self.programs.get(p))
            .map(|p| p.pace.clone())
            .unwrap_or_default()
    }

    /// A number that is another one whenever any [`World::pace`] may be another one.
    pub fn paces_version(&mut self) -> u64 {
        self.settle();
        self.rates.solved
    }

    /// Seconds that a program or workload lost to moves, conversions and the optimizer; zero for an unknown name.
    pub fn lost_s(&self, name: &str) -> f64 {
        let members = self.members(name).unwrap_or_default();
        members
            .into_iter()
            .filter_map(|p| self.programs.get(p))
            .fold(0.0, |sum, p| sum + p.totals.lost_s)
    }

    /// Present threads of a workload by chip; empty when it does not run.
    pub fn running(&mut self, workload: &str) -> Vec<f64> {
        self.settle();
        self.find(workload)
            .and_then(|p| self.programs.get(p)?.placed.as_ref())
            .map(|p| p.running.clone())
            .unwrap_or_default()
    }

    /// Processor use by CPU as accounting shows it, 0..1, of all programs together.
    pub fn cpu_use(&mut self) -> Vec<f64> {
        self.settle();
        let mut sum = vec![0.0; self.online.len()];
        for placed in self.programs.iter().filter_map(|p| p.placed.as_ref()) {
            for (s, u) in sum.iter_mut().zip(&placed.cpu_use) {
                *s += u;
            }
        }
        sum
    }

    /// Memory by node: total, free.
    pub fn nodes(&self) -> Vec<(Bytes, Bytes)> {
        self.memory.nodes().iter().map(|n| (n.total, n.free())).collect()
    }

    /// Resident memory of a workload.
    pub fn resident(&self, workload: &str) -> Bytes {
        self.find(workload)
            .and_then(|p| self.programs.get(p)?.alive.as_ref())
            .map_or(Bytes::ZERO, Alive::resident)
    }

    /// Everything that an effector or a person can change.
    pub fn settings(&self) -> Settings {
        let mut s = Settings {
            prefetch_off: (0..self.prefetch_on.len() as u32)
                .map(CpuId)
                .filter(|c| !self.has_prefetch(*c))
                .collect(),
            large_page_switch: self.surroundings.large_page_switch.clone(),
            offline: (0..self.online.len() as u32)
                .map(CpuId)
                .filter(|c| !self.is_online(*c))
                .collect(),
            nodes_offline: (0..self.memory.nodes().len())
                .filter(|n| self.memory.node(*n).is_some_and(|n| !n.online))
                .map(|n| NodeId(n as u32))
                .collect(),
            ..Settings::default()
        };
        for p in &self.programs {
            let Some(alive) = &p.alive else { continue };
            if let Some(mask) = &p.mask {
                s.masks.insert(p.name.clone(), mask.clone());
            }
            if p.grouped {
                s.grouped.push(p.name.clone());
            }
            if !p.split.is_empty() {
                let chips: Vec<String> = p.split.iter().map(u32::to_string).collect();
                s.grouped
                    .push(format!("{} by process {}", p.name, chips.join(",")));
            }
            let pages = s.pages.entry(p.name.clone()).or_default();
            for segment in alive.segments() {
                for (node, n) in segment.pages_on().iter().enumerate().filter(|(_, n)| **n > 0) {
                    *pages.entry(NodeId(node as u32)).or_default() += n;
                }
            }
            s.large
                .insert(p.name.clone(), alive.segments().map(Segment::large_pieces).sum());
            s.pieces.insert(
                p.name.clone(),
                alive
                    .segments()
                    .fold(0, |h: u64, x| h.rotate_left(7) ^ x.digest()),
            );
            s.started.insert(p.name.clone(), ticks(alive.started_s));
        }
        s
    }
}
