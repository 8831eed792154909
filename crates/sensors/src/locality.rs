//! Where the threads of a workload run, where its memory lies, and who chose that.
//!
//! [`LocalitySensor::follow`] samples the threads of a workload under measurement, with each of its samples.
//! [`LocalitySensor::look`] adds its memory by node, within [`BUDGET`]: unread processes first, largest first, then
//! those read longest ago. Older readings are remembered, and scaled by kind to the resident memory of all processes.
//! So a program of hundreds of processes is estimated at the first sample and known after a few.
//!
//! **Chosen by a person.** A narrower CPU or node mask than the machine's, or a memory policy, comes from a person,
//! another tool, or the program itself. homeostat leaves all of them alone. Its own mask does not count.

pub mod memory;
pub mod nodes;
pub mod threads;

use crate::processes::PROCESSES_MAX as KNOWN_MAX;
use crate::reader::{NotNow, Reader};
use crate::topology::Online;
use crate::{host, regions, topology};
use homeostat_kernel::numa::CpuMask;
use homeostat_kernel::{Root, files, numa};
use homeostat_model::units::ranges;
use homeostat_model::{
    Bytes, Cpu, LlcId, Machine, MemoryByKind, Nanoseconds, NodeId, NumaBalancing, Places, ProcessId,
    Redispatches, Workload, WorkloadId,
};
use homeostat_platform::PlatformError;
use memory::{Backing, MemoryError, ProcessMemory, Reading, Resident};
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};
use threads::{DispatchWatch, Moment, ThreadWatch};

/// No process begins after this time.
pub const BUDGET: Duration = Duration::from_millis(50);
const SAMPLING: Duration = Duration::from_millis(30);
/// Limit for one process in total, with its locks.
const PATIENCE: Duration = Duration::from_millis(250);
/// Most processes of one workload whose `status` is read, about 15 µs each.
pub const MEMBERS_MAX: usize = 1024;
/// Validity of a process's reading, unless its size changed.
const FRESH: Nanoseconds = Nanoseconds::from_secs(2);
/// A change in size above this share makes a reading old.
const GROWN: f64 = 0.02;
/// Share of the memory under a policy above which the policy counts as a choice.
const POLICY_MIN: f64 = 0.01;
/// Pause between samples of a followed workload's threads, in multiples of the sample's duration: at most 0.1 % of a
/// CPU. Up to a hundred threads that is each second.
const FOLLOW_REST: u64 = 1000;
const FOLLOWED_MAX: usize = 1024;

/// Place of a CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CpuPlace {
    /// Physical core.
    pub core: u32,
    /// Last-level-cache domain.
    pub llc: LlcId,
    /// NUMA node.
    pub node: NodeId,
}

/// Places of the online CPUs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Shape {
    cpus: BTreeMap<u32, CpuPlace>,
}

impl Shape {
    /// Places of these CPUs.
    pub fn of(cpus: &[Cpu]) -> Self {
        Self {
            cpus: cpus
                .iter()
                .map(|c| {
                    let place = CpuPlace {
                        core: c.core,
                        llc: c.llc,
                        node: c.node,
                    };
                    (c.id.0, place)
                })
                .collect(),
        }
    }

    /// Place of one CPU; `None` if it is offline.
    pub fn place(&self, cpu: u32) -> Option<CpuPlace> {
        self.cpus.get(&cpu).copied()
    }

    /// The CPUs in order.
    pub fn cpus(&self) -> impl Iterator<Item = u32> + '_ {
        self.cpus.keys().copied()
    }

    /// Whether there are several places.
    pub fn is_divided(&self) -> bool {
        let mut places = self.cpus.values().map(|p| (p.llc, p.node));
        let first = places.next();
        places.any(|p| Some(p) != first)
    }
}

#[derive(Clone, Debug)]
struct Remembered {
    at: Nanoseconds,
    size: Bytes,
    memory: ProcessMemory,
}

/// Samples where workloads run and where their memory lies.
#[derive(Debug)]
pub struct LocalitySensor {
    root: Root,
    shape: Shape,
    nodes: Vec<NodeId>,
    online: Online,
    /// CPUs that are not set aside.
    general: Vec<u32>,
    threads: BTreeMap<WorkloadId, ThreadWatch>,
    /// End of a followed workload's pause.
    rest: BTreeMap<WorkloadId, Nanoseconds>,
    memory: BTreeMap<ProcessId, Remembered>,
    dispatches: Option<DispatchWatch>,
    /// Number of samples: the seed of the next one, so that no two draw the same pages.
    looks: u64,
    tick: Nanoseconds,
}

impl LocalitySensor {
    /// A sensor without samples.
    pub fn new(root: Root) -> Self {
        Self {
            root,
            shape: Shape::default(),
            nodes: Vec::new(),
            online: Online::default(),
            general: Vec::new(),
            threads: BTreeMap::new(),
            rest: BTreeMap::new(),
            memory: BTreeMap::new(),
            dispatches: None,
            looks: 0,
            tick: Nanoseconds(host::tick_length()),
        }
    }

    /// Takes over the shape of the machine.
    pub fn set_machine(&mut self, machine: &Machine) {
        self.shape = Shape::of(&machine.cpus);
        self.general = machine.general_cpus().map(|c| c.id.0).collect();
        self.nodes = machine
            .nodes
            .iter()
            .filter(|n| n.memory.0 > 0)
            .map(|n| n.id)
            .collect();
        self.online = Online::read(&self.root);
    }

    /// Whether CPUs or nodes came or went, or were set aside, since [`LocalitySensor::set_machine`].
    pub fn machine_changed(&self) -> bool {
        !self.shape.cpus.is_empty() && Online::read(&self.root) != self.online
    }

    fn know_machine(&mut self) -> Result<(), PlatformError> {
        if self.shape.cpus.is_empty() {
            let machine = topology::read(&self.root)?;
            self.set_machine(&machine);
        }
        Ok(())
    }

    /// Samples the threads of a workload under measurement, at the pace of [`FOLLOW_REST`]; nothing with one place.
    pub fn follow(&mut self, workload: &Workload, now: Nanoseconds) {
        let rested = self.rest.get(&workload.id).is_none_or(|until| *until <= now);
        if self.shape.is_divided() && rested {
            let begun = Instant::now();
            self.look_at_threads(workload, now);
            let took = u64::try_from(begun.elapsed().as_nanos()).unwrap_or(u64::MAX);
            if self.rest.len() < FOLLOWED_MAX {
                self.rest
                    .insert(workload.id.clone(), now + Nanoseconds(took) * FOLLOW_REST);
            }
        }
    }

    /// The places of the online CPUs.
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// Takes one sample of a workload's threads.
    pub fn look_at_threads(&mut self, workload: &Workload, now: Nanoseconds) {
        if !self.threads.contains_key(&workload.id) && self.threads.len() >= FOLLOWED_MAX {
            return;
        }
        let at = Moment {
            now,
            uptime: topology::uptime(&self.root).unwrap_or(now),
            tick: self.tick,
        };
        let watch = self.threads.entry(workload.id.clone()).or_default();
        watch.look(&self.root, workload, at, &self.shape);
    }

    /// Forgets workloads and processes that are gone.
    pub fn retain(&mut self, workload: impl Fn(&WorkloadId) -> bool, process: impl Fn(ProcessId) -> bool) {
        self.threads.retain(|id, _| workload(id));
        self.rest.retain(|id, _| workload(id));
        self.memory.retain(|id, _| process(*id));
    }

    /// Begins to watch dispatches for a live view. Returns a sentence about facts that cannot be seen.
    ///
    /// # Errors
    /// As [`topology::read`].
    pub fn watch_dispatches(&mut self) -> Result<Option<String>, PlatformError> {
        self.know_machine()?;
        let mut watch = DispatchWatch::default();
        let why_not = watch.begin(&self.root, &self.shape);
        self.dispatches = Some(watch);
        Ok(why_not)
    }

    /// Empties the kernel's rings: ten times a second while dispatches are watched.
    pub fn poll_dispatches(&mut self) {
        if let Some(watch) = &mut self.dispatches {
            watch.poll(&self.shape);
        }
    }

    /// Places of the workload; the reader's thread reads its memory. `own` are homeostat's masks on its threads.
    ///
    /// # Errors
    /// `Vanished` when all its processes are gone, `Denied` when their memory may not be read. `Busy` when none of it
    /// can be read now, `Unsupported` when the kernel reports nothing by node though the machine has several.
    pub fn look(
        &mut self,
        workload: &Workload,
        now: Nanoseconds,
        reader: &mut Reader,
        own: &[CpuMask],
    ) -> Result<Places, PlatformError> {
        self.know_machine()?;
        self.looks += 1;
        self.look_at_threads(workload, now);
        let members = self.members(workload);
        if members.is_empty() {
            return Err(PlatformError::Vanished {
                target: format!("workload {}", workload.id),
            });
        }
        let bound = self.chosen(workload, &members, own);
        let trouble = self.read_memory(workload, &members, now, reader)?;
        let summed = self.sum(&members);
        if summed.covered <= 0.0 {
            if let Some(trouble) = trouble {
                return Err(trouble);
            }
        }
        let bound = bound.or_else(|| policy_chosen(&summed, workload)).or_else(|| {
            // On one node a policy has no effect.
            (summed.policy_hidden && self.nodes.len() > 1).then(|| {
                format!(
                    "the memory policy of {} cannot be seen without holding it up: its first mapping is too large",
                    workload.program
                )
            })
        });
        let (redispatches, balancing) = self.dispatches_of(workload);
        let running = self
            .threads
            .get(&workload.id)
            .map(|watch| watch.running(&self.shape))
            .unwrap_or_default();
        Ok(Places {
            workload: workload.id.clone(),
            watched: running.watched,
            threads: running.threads,
            threads_of_busiest_process: running.threads_of_busiest_process,
            running: running.by_cache,
            memory: summed.nodes,
            memory_error: summed.error,
            memory_covered: summed.covered,
            redispatches,
            balancing,
            bound,
            counters: None,
        })
    }

    fn dispatches_of(&mut self, workload: &Workload) -> (Option<Redispatches>, Option<NumaBalancing>) {
        match (&mut self.dispatches, self.threads.get_mut(&workload.id)) {
            (Some(dispatches), Some(threads)) => dispatches.ask(&self.root, workload, &self.shape, threads),
            _ => (None, None),
        }
    }

    /// The processes with memory, and its amount.
    fn members(&self, workload: &Workload) -> Vec<(ProcessId, Resident)> {
        let mut buffer = Vec::new();
        workload
            .processes
            .iter()
            .take(MEMBERS_MAX)
            .filter_map(|process| {
                let status =
                    regions::read_of(&self.root, *process, "status", &mut buffer, files::SMALL_FILE_MAX)?;
                Some((*process, Resident::parse(status.whole()?)?))
            })
            .collect()
    }

    /// Reads the memory of as many processes as fit into the budget. Returns the reason for an unread one.
    fn read_memory(
        &mut self,
        workload: &Workload,
        members: &[(ProcessId, Resident)],
        now: Nanoseconds,
        reader: &mut Reader,
    ) -> Result<Option<PlatformError>, PlatformError> {
        let begun = Instant::now();
        let mut order: Vec<(Nanoseconds, Bytes, &(ProcessId, Resident))> = members
            .iter()
            .filter_map(|member| {
                let size = member.1.total();
                match self.memory.get(&member.0) {
                    None => Some((Nanoseconds::ZERO, size, member)),
                    Some(known) => {
                        let grown = (size.0 as f64 - known.size.0 as f64).abs() > GROWN * known.size.0 as f64;
                        (grown || now - known.at >= FRESH).then_some((known.at, size, member))
                    }
                }
            })
            .collect();
        order.sort_by_key(|(at, size, member)| (*at, std::cmp::Reverse(*size), member.0));
        let mut trouble = None;
        let huge = self.huge_pages_in_use();
        for (_, size, (process, resident)) in order {
            if begun.elapsed() > BUDGET {
                break;
            }
            let how = Reading {
                exact_max: memory::EXACT_MAX,
                budget: SAMPLING,
                seed: self.looks
                    ^ process.start_ticks.rotate_left(32)
                    ^ u64::from(process.pid.unsigned_abs()),
                huge,
            };
            let (root, process, own) = (self.root.clone(), *process, resident.clone());
            let outcome = reader.run(process.pid, PATIENCE, move || {
                memory::read(&root, process, &own, &how)
            });
            let memory = match outcome {
                Ok(Ok(memory)) => memory,
                // Without NUMA in the kernel there is one node, and everything is on it.
                Ok(Err(MemoryError::NoNuma)) if self.nodes.len() < 2 => ProcessMemory {
                    nodes: BTreeMap::from([(
                        self.nodes.first().copied().unwrap_or(NodeId(0)),
                        resident.on_one_node(),
                    )]),
                    ..ProcessMemory::default()
                },
                Ok(Err(error)) => {
                    if error != MemoryError::Vanished {
                        trouble = Some(fault(error, workload));
                    }
                    continue;
                }
                Err(not_now) => {
                    trouble = Some(busy(not_now, workload));
                    continue;
                }
            };
            if self.memory.len() < KNOWN_MAX {
                self.memory.insert(
                    process,
                    Remembered {
                        at: now,
                        size,
                        memory,
                    },
                );
            }
        }
        Ok(trouble)
    }

    /// Whether anything on this host is on large pages (`AnonHugePages` and `ShmemHugePages` of `/proc/meminfo`).
    fn huge_pages_in_use(&self) -> bool {
        let meminfo = files::bytes(&self.root, "/proc/meminfo", files::SMALL_FILE_MAX).unwrap_or_default();
        ["AnonHugePages", "ShmemHugePages", "FileHugePages"]
            .iter()
            .any(|key| homeostat_kernel::bytes::keyed(&meminfo, key).is_some_and(|kib| kib > 0))
    }

    /// The members' remembered memory, scaled by kind to all resident memory. Shared memory and files count once, at
    /// the process with most of them.
    fn sum(&self, members: &[(ProcessId, Resident)]) -> Summed {
        let known: Vec<(&Resident, &ProcessMemory)> = members
            .iter()
            .filter_map(|(process, resident)| Some((resident, &self.memory.get(process)?.memory)))
            .collect();
        let mut summed = Summed::default();
        let resident_all: u64 = members.iter().map(|(_, r)| r.anonymous.0).sum();
        let read: u64 = known.iter().map(|(r, _)| r.anonymous.0).sum();
        let mut weighed = 0.0;
        for (_, memory) in &known {
            for (node, on) in &memory.nodes {
                let huge = on.huge.0 as f64 * on.anonymous.0 as f64 / on.total().0.max(1) as f64;
                let sum = summed.nodes.entry(*node).or_default();
                sum.anonymous += on.anonymous;
                sum.huge += Bytes(huge as u64);
            }
            let weight = memory.total().0 as f64;
            summed.error += memory.error * memory.error * weight * weight;
            weighed += weight;
            summed.policy_hidden |= memory.policy_hidden;
            for (policy, bytes) in &memory.policies {
                *summed.policies.entry(policy.clone()).or_default() += *bytes;
            }
        }
        let scale = |bytes: &mut Bytes| {
            if read > 0 && resident_all > read {
                bytes.0 = (u128::from(bytes.0) * u128::from(resident_all) / u128::from(read)) as u64;
            }
        };
        for on in summed.nodes.values_mut() {
            scale(&mut on.anonymous);
            scale(&mut on.huge);
        }
        // Kinds that several processes can map, from the process that has most of each.
        for kind in [Backing::Shared, Backing::File, Backing::HugeTlb] {
            let amount =
                |memory: &ProcessMemory| -> u64 { memory.nodes.values().map(|m| kind.amount(m).0).sum() };
            let largest = known.iter().max_by_key(|(_, memory)| amount(memory));
            for (node, on) in largest.iter().flat_map(|(_, memory)| &memory.nodes) {
                let part = kind.amount(on);
                let huge = on.huge.0 as f64 * part.0 as f64 / on.total().0.max(1) as f64;
                let sum = summed.nodes.entry(*node).or_default();
                *kind.place(sum) += part;
                sum.huge += Bytes(huge as u64);
            }
        }
        summed.nodes.retain(|_, m| m.total().0 > 0);
        summed.error = if weighed > 0.0 {
            summed.error.sqrt() / weighed
        } else {
            0.0
        };
        let all: u64 = members.iter().map(|(_, r)| r.total().0).sum();
        let seen: u64 = known.iter().map(|(r, _)| r.total().0).sum();
        summed.covered = if all > 0 { seen as f64 / all as f64 } else { 1.0 };
        summed
    }

    /// Restrictions on the threads or the nodes of a workload, other than homeostat's.
    fn chosen(
        &self,
        workload: &Workload,
        members: &[(ProcessId, Resident)],
        own: &[CpuMask],
    ) -> Option<String> {
        let online = CpuMask::of(self.shape.cpus());
        let general = CpuMask::of(self.general.iter().copied());
        let narrow = |mask: &CpuMask| {
            let mask = mask.and(&online);
            // CPUs set aside for others are no choice about this program.
            let free = mask.is_empty()
                || general.without(&mask).is_empty()
                || own.iter().any(|own| own.and(&online) == mask);
            (!free).then_some(mask)
        };
        let masks: Vec<CpuMask> = if self.root.is_live() {
            self.threads
                .get(&workload.id)
                .into_iter()
                .flat_map(ThreadWatch::known)
                .filter_map(|(_, thread)| numa::affinity(thread).ok())
                .collect()
        } else {
            members
                .iter()
                .filter_map(|(_, r)| r.cpus_allowed.clone().map(CpuMask::of))
                .collect()
        };
        let bound: Vec<CpuMask> = masks.iter().filter_map(narrow).collect();
        if let Some(first) = bound.first() {
            let whole_host = self.root.is_live()
                && numa::affinity(1)
                    .is_ok_and(|host| host.and(&online) == *first && host.and(&online) != online);
            let who = if whole_host {
                "as all programs of this host (CPUAffinity= of the service manager)".to_owned()
            } else {
                match self.cpuset(members) {
                    Some(path) => format!("by cpuset {path}, taskset, CPUAffinity= or the program itself"),
                    None => "by taskset, CPUAffinity=, a cpuset or the program itself".to_owned(),
                }
            };
            let of = if bound.len() == masks.len() {
                "its threads are".to_owned()
            } else {
                format!("{} of its {} threads are", bound.len(), masks.len())
            };
            return Some(format!("{of} restricted to CPUs {first}, {who}"));
        }
        let nodes: BTreeSet<u32> = self.nodes.iter().map(|n| n.0).collect();
        members.iter().find_map(|(process, resident)| {
            let allowed: BTreeSet<u32> = resident.nodes_allowed.as_ref()?.iter().copied().collect();
            let missing = nodes.difference(&allowed).count();
            (missing > 0 && !allowed.is_empty()).then(|| {
                format!(
                    "process {process} may use the memory of nodes {} only (a cpuset)",
                    ranges(allowed)
                )
            })
        })
    }

    /// The cpuset of the first member, if it differs from the root's.
    fn cpuset(&self, members: &[(ProcessId, Resident)]) -> Option<String> {
        let (process, _) = members.first()?;
        files::text(&self.root, &format!("/proc/{}/cpuset", process.pid)).filter(|path| path.len() > 1)
    }
}

#[derive(Debug, Default)]
struct Summed {
    nodes: BTreeMap<NodeId, MemoryByKind>,
    policies: BTreeMap<String, Bytes>,
    policy_hidden: bool,
    error: f64,
    covered: f64,
}

fn policy_chosen(summed: &Summed, workload: &Workload) -> Option<String> {
    let all: u64 = summed.nodes.values().map(|m| m.total().0).sum();
    let (policy, bytes) = summed.policies.iter().max_by_key(|(_, bytes)| **bytes)?;
    let share = bytes.0 as f64 / all.max(1) as f64;
    (share >= POLICY_MIN).then(|| {
        format!(
            "{:.0} % of the memory of {} has the policy {policy} (numactl, or the program itself)",
            (share * 100.0).min(100.0),
            workload.program
        )
    })
}

fn busy(not_now: NotNow, workload: &Workload) -> PlatformError {
    PlatformError::Busy {
        what: format!("looking where the memory of {} lies", workload.id),
        why: not_now.to_string(),
    }
}

fn fault(error: MemoryError, workload: &Workload) -> PlatformError {
    let what = format!("looking where the memory of {} lies", workload.id);
    match error {
        MemoryError::Denied => PlatformError::Denied {
            what,
            needs: "run homeostat as root, or give it CAP_SYS_PTRACE and CAP_SYS_NICE".into(),
        },
        MemoryError::Vanished => PlatformError::Vanished {
            target: workload.id.to_string(),
        },
        MemoryError::NoNuma | MemoryError::TooLong => PlatformError::Unsupported {
            what,
            why: error.to_string(),
        },
        MemoryError::Sampling(_) => PlatformError::Busy {
            what,
            why: error.to_string(),
        },
    }
}
