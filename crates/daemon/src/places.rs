//! Places for people: the topology, and where workloads run and their memory lies. The stable JSON shapes of `homeostat
//! topology` and `homeostat locality`, filled without a daemon. The same rules as in [`crate::api`] hold.

use crate::api::{Named, SCHEMA};
use homeostat_kernel::Root;
use homeostat_kernel::clock::MonotonicClock;
use homeostat_linux::LinuxPlatform;
use homeostat_model::units::ranges;
use homeostat_model::{
    self as model, CpuId, LlcId, Machine, Nanoseconds, NodeId, Places, Workload, WorkloadId, WorkloadSample,
};
use homeostat_model::{Cache, Device, LogicalCpu, MemoryByKind, MemoryNode, MemoryTier, Redispatches};
use homeostat_platform::{Clock, PlatformError, SampleRequest, Sensors};
pub use homeostat_sensors::locality::nodes::HostBalancing;
use homeostat_sensors::locality::nodes::{NodeActivity, NodeWatch};
use homeostat_sensors::topology;
use homeostat_store::journal;
use homeostat_strategies::{PlacementScore, Scored, placement_scores};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// Workloads sampled by default: the largest users of CPU and memory.
pub const SHOWN: usize = 12;
const RANKING: Nanoseconds = Nanoseconds::from_millis(300);
/// How often the kernel's record of moves between CPUs is read.
const POLL: Nanoseconds = Nanoseconds::from_millis(100);
/// How often the threads are sampled.
const LOOK: Nanoseconds = Nanoseconds::from_millis(200);

// ---- topology -------------------------------------------------------------------------------------------------------

/// The machine's shape (`homeostat topology --json`).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Topology {
    /// Version of these shapes.
    pub schema: u32,
    /// Kernel release.
    pub kernel: String,
    /// CPU model.
    pub cpu_model: String,
    /// Hypervisor, if the CPU reports one, which then defines the shape.
    pub hypervisor: Option<String>,
    /// Online CPUs.
    pub cpus: Vec<LogicalCpu>,
    /// CPUs that are there but switched off.
    pub offline: Vec<CpuId>,
    /// Caches, by level, kind and first CPU.
    pub caches: Vec<Cache>,
    /// NUMA nodes.
    pub nodes: Vec<MemoryNode>,
    /// Nodes that are nearer to each other than the farthest pair, group by group.
    pub near_groups: Vec<Vec<NodeId>>,
    /// Memory tiers, fastest first.
    pub tiers: Vec<MemoryTier>,
    /// Disks, network interfaces and accelerators.
    pub devices: Vec<Device>,
    /// All memory; zero if unknown.
    #[serde(default)]
    pub memory_bytes: u64,
    /// Size of the base page.
    #[serde(default)]
    pub page_bytes: u64,
    /// Impossible claims of firmware, hypervisor or container, and the values used instead.
    #[serde(default)]
    pub doubts: Vec<String>,
}

impl Topology {
    /// From what was read.
    pub fn new(machine: &Machine, t: model::Topology) -> Self {
        Self {
            schema: SCHEMA,
            kernel: machine.kernel.clone(),
            cpu_model: machine.cpu_model.clone(),
            hypervisor: machine.hypervisor.clone(),
            near_groups: t.near_groups(),
            cpus: t.cpus,
            offline: t.offline,
            caches: t.caches,
            nodes: t.nodes,
            tiers: t.tiers,
            devices: t.devices,
            memory_bytes: machine.memory.0,
            page_bytes: machine.page_size.0,
            doubts: Vec::new(),
        }
    }
}

/// The shape of this machine, or of the one whose `/proc` and `/sys` lie below `root`.
///
/// # Errors
/// It cannot be described at all.
pub fn describe(root: Option<&Path>) -> Result<Topology, PlatformError> {
    let root = root.map_or_else(Root::default, Root::new);
    let (machine, doubts) = topology::read_and_repair(&root)?;
    Ok(Topology {
        doubts,
        ..Topology::new(&machine, topology::describe(&root)?)
    })
}

/// Whether this machine has several last-level caches or memory nodes.
pub fn are_several(root: Option<&Path>) -> bool {
    topology::read(&root.map_or_else(Root::default, Root::new)).is_ok_and(|machine| {
        let first = machine.cpus.first().map(|c| c.llc);
        machine.nodes.len() > 1 || machine.cpus.iter().any(|c| Some(c.llc) != first)
    })
}

// ---- locality -------------------------------------------------------------------------------------------------------

/// Places of workloads and their memory (`homeostat locality --json`).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Locality {
    /// Version of these shapes.
    pub schema: u32,
    /// When, seconds since the epoch.
    pub at_unix: u64,
    /// Length of the interval that rates and shares of dispatches are of.
    pub interval_s: f64,
    /// The nodes.
    pub nodes: Vec<NodePlaces>,
    /// Automatic NUMA balancing in the interval; absent where the kernel has none.
    pub balancing: Option<HostBalancing>,
    /// The workloads, busiest first.
    pub workloads: Vec<WorkloadPlaces>,
    /// Workloads that are not listed, because they use little.
    pub workloads_left_out: u32,
    /// Invisible facts, with the reason.
    pub notes: Vec<String>,
}

/// A node in the interval.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct NodePlaces {
    /// The kernel's number.
    pub id: u32,
    /// CPUs as a list such as `0-3,8`.
    pub cpus: String,
    /// CPUs that were busy (1.0 = one all the time).
    pub busy_cpus: f64,
    /// Memory.
    pub memory_bytes: u64,
    /// Its free part.
    pub free_bytes: u64,
    /// Its part that caches files.
    pub file_cache_bytes: u64,
    /// Pages given out here to programs that ran here.
    pub pages_local: u64,
    /// Pages given out here to programs that ran elsewhere.
    pub pages_to_others: u64,
    /// Pages given out here although another node was wanted.
    pub pages_missed: u64,
}

/// A workload's places.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct WorkloadPlaces {
    /// Name.
    pub name: String,
    /// Program of its main process.
    pub program: String,
    /// Main process.
    pub pid: i64,
    /// Why nothing is known of its places; absent when it is known.
    pub unknown: Option<String>,
    /// CPUs that it used in the interval.
    pub cpus: f64,
    /// Threads that ran.
    pub threads: u32,
    /// Their places, by last-level cache.
    pub running: Vec<RunningPlace>,
    /// Places of its memory.
    pub memory: Vec<MemoryPlace>,
    /// Half of the 95 % interval of each node's share of the memory; 0 = every page was counted.
    pub memory_error: f64,
    /// Share of its memory, by processes, that was sampled; the rest is taken to lie alike.
    pub memory_covered: f64,
    /// Share of the accesses to memory of the own node, if every thread used all memory alike.
    pub local: Option<f64>,
    /// To memory of a near node.
    pub near: Option<f64>,
    /// To memory of a node of another group.
    pub far: Option<f64>,
    /// Dispatches of its threads, relative to their earlier places.
    pub dispatches: Option<Dispatches>,
    /// Pages that automatic NUMA balancing migrated for it since it began; absent where not reported.
    pub pages_migrated: Option<u64>,
    /// Threads by the node that automatic NUMA balancing prefers for them.
    pub preferred: BTreeMap<u32, u32>,
    /// A restriction by a person or another tool; the workload is then left alone.
    pub bound: Option<String>,
    /// Share of the last-level-cache misses served by the own node, if event counters are available.
    pub counted_local: Option<f64>,
    /// How well it is placed; absent where threads or memory are not known.
    pub score: Option<Score>,
}

/// CPUs used on one last-level cache.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RunningPlace {
    /// The cache: lowest CPU number that shares it.
    pub cache: u32,
    /// Its node.
    pub node: u32,
    /// CPUs used there.
    pub cpus: f64,
}

/// Memory on one node.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MemoryPlace {
    /// The node.
    pub node: NodeId,
    /// The kinds of memory there.
    #[serde(flatten)]
    pub kinds: MemoryByKind,
}

/// Shares of the dispatches.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Dispatches {
    /// Per second.
    pub per_second: f64,
    /// How far they went.
    #[serde(flatten)]
    pub shares: Redispatches,
}

/// How well a workload is placed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Score {
    /// 0..100; 100 = its threads share one cache, local to all of its memory.
    pub now: f64,
    /// Best that can be had here with all workloads at their places; never below `now`.
    pub best: f64,
    /// CPUs of the best place as a list; empty when it is not better than now.
    pub cpus: String,
    /// Node to which memory would go.
    pub node: Option<u32>,
    /// Memory that would be moved there.
    pub moved_bytes: u64,
    /// The obstacle to a better best; empty without one.
    pub limit: String,
}

impl From<PlacementScore> for Score {
    fn from(s: PlacementScore) -> Self {
        Self {
            now: s.now,
            best: s.best,
            cpus: ranges(s.cpus.iter().map(|c| c.0)),
            node: s.node.map(|n| n.0),
            moved_bytes: s.moved.0,
            limit: s.limit,
        }
    }
}

/// The workloads to sample.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Wanted {
    /// The largest users of CPU and memory.
    Largest(usize),
    /// One, by its name.
    One(WorkloadId),
}

/// Looks at places again and again, without a daemon and without acting.
pub struct Observer {
    platform: LinuxPlatform,
    clock: MonotonicClock,
    root: Root,
    machine: Machine,
    groups: Vec<Vec<NodeId>>,
    nodes: NodeWatch,
    workloads: Vec<Workload>,
    samples: BTreeMap<WorkloadId, WorkloadSample>,
    begun: BTreeSet<WorkloadId>,
    since: Nanoseconds,
    notes: Vec<String>,
    state_directory: PathBuf,
}

impl Observer {
    /// Samples the machine, or the one below `root`. The journal in `state_directory` tells our changes from choices.
    ///
    /// # Errors
    /// The machine or its processes cannot be described.
    pub fn begin(root: Option<&Path>, state_directory: &Path) -> Result<Self, PlatformError> {
        let root = root.map_or_else(Root::default, Root::new);
        let mut platform = LinuxPlatform::new(root.clone());
        let machine = topology::read(&root)?;
        platform.locality().set_machine(&machine);
        let groups = topology::describe(&root)?.near_groups();
        let notes = platform.locality().watch_dispatches()?.into_iter().collect();
        let mut observer = Self {
            platform,
            clock: MonotonicClock,
            machine,
            groups,
            nodes: NodeWatch::new(root.clone()),
            root,
            workloads: Vec::new(),
            samples: BTreeMap::new(),
            begun: BTreeSet::new(),
            since: Nanoseconds::ZERO,
            notes,
            state_directory: state_directory.to_owned(),
        };
        observer.scan()?;
        // CPU use needs a second scan.
        observer.clock.sleep(RANKING);
        observer.scan()?;
        observer.look_at_nodes();
        Ok(observer)
    }

    /// The workloads of the last scan.
    pub fn workloads(&self) -> &[Workload] {
        &self.workloads
    }

    fn scan(&mut self) -> Result<(), PlatformError> {
        // Ignore an unreadable journal; `homeostat doctor` reports it.
        let in_force = journal::read(&self.state_directory)
            .map(|recovered| recovered.owed)
            .unwrap_or_default();
        self.platform
            .recognise(in_force.values().map(|owed| &owed.record));
        let snapshot = self.platform.sample(&SampleRequest {
            scan: true,
            detail: Vec::new(),
        })?;
        self.workloads = snapshot.workloads.unwrap_or_default();
        let living: BTreeSet<&WorkloadId> = self.workloads.iter().map(|w| &w.id).collect();
        self.begun.retain(|id| living.contains(id));
        self.samples = snapshot.samples.into_iter().map(|s| (s.id.clone(), s)).collect();
        if self.platform.machine_changed() {
            self.machine = topology::read(&self.root)?;
            self.platform.locality().set_machine(&self.machine);
            self.notes = self.platform.locality().watch_dispatches()?.into_iter().collect();
        }
        Ok(())
    }

    fn look_at_nodes(&mut self) -> (BTreeMap<NodeId, NodeActivity>, Option<HostBalancing>) {
        let now = self.clock.now();
        self.since = now;
        let ids: Vec<NodeId> = self.machine.nodes.iter().map(|n| n.id).collect();
        self.nodes.look(&ids, self.platform.locality().shape(), now)
    }

    fn choose(&self, wanted: &Wanted) -> (Vec<Workload>, u32) {
        match wanted {
            Wanted::One(id) => (
                self.workloads.iter().filter(|w| w.id == *id).cloned().collect(),
                0,
            ),
            Wanted::Largest(most) => {
                let size = |w: &Workload| {
                    // A hundredth of a CPU is noise: below it memory decides.
                    self.samples.get(&w.id).map_or((0.0, 0), |s| {
                        ((s.cpu.share_of(s.interval) * 100.0).floor(), s.resident.0)
                    })
                };
                let mut list: Vec<Workload> = self
                    .workloads
                    .iter()
                    .filter(|w| self.samples.contains_key(&w.id))
                    .cloned()
                    .collect();
                list.sort_by(|a, b| {
                    let ((ca, ra), (cb, rb)) = (size(a), size(b));
                    cb.total_cmp(&ca).then(rb.cmp(&ra)).then(a.id.cmp(&b.id))
                });
                let all = self.workloads.len();
                list.truncate(*most);
                let left_out = u32::try_from(all - list.len()).unwrap_or(u32::MAX);
                (list, left_out)
            }
        }
    }

    /// Watches for the given time and reports. `go_on` is asked several times a second; false ends it early.
    ///
    /// # Errors
    /// The processes cannot be listed any more, or the wanted workload has gone.
    pub fn watch(
        &mut self,
        wanted: &Wanted,
        length: Nanoseconds,
        go_on: impl Fn() -> bool,
    ) -> Result<Locality, PlatformError> {
        let (chosen, _) = self.choose(wanted);
        // The first sample starts the counts and reads the memory of the largest processes.
        let mut fresh = false;
        for workload in &chosen {
            if self.begun.insert(workload.id.clone()) {
                fresh = true;
                // The end reports failures.
                let _ = self.platform.look_at_places(&workload.id);
            }
        }
        if fresh {
            self.look_at_nodes();
        }
        let begun = self.clock.now();
        let mut looked = begun;
        loop {
            let now = self.clock.now();
            if now.saturating_sub(begun) >= length || !go_on() {
                break;
            }
            let left = (begun + length).saturating_sub(now);
            self.clock.sleep(POLL.min(left));
            self.platform.locality().poll_dispatches();
            let now = self.clock.now();
            if now.saturating_sub(looked) >= LOOK {
                looked = now;
                for workload in &chosen {
                    self.platform.locality().look_at_threads(workload, now);
                }
            }
        }
        self.scan()?;
        let interval = self.clock.now().saturating_sub(self.since).as_secs_f64();
        let (activity, balancing) = self.look_at_nodes();
        let (chosen, left_out) = match wanted {
            // Show the watched workloads even if others are larger by now, but no ended ones.
            Wanted::Largest(_) => {
                let (_, left_out) = self.choose(wanted);
                (chosen, left_out)
            }
            Wanted::One(id) if !self.workloads.iter().any(|w| w.id == *id) => {
                return Err(PlatformError::Vanished {
                    target: format!("workload {id}"),
                });
            }
            Wanted::One(_) => (chosen, 0),
        };
        let looks: Vec<(Workload, Result<Places, PlatformError>)> = chosen
            .into_iter()
            .filter(|w| self.workloads.iter().any(|now| now.id == w.id))
            .map(|w| {
                let places = self.platform.look_at_places(&w.id);
                (w, places)
            })
            .collect();
        Ok(Locality {
            schema: SCHEMA,
            at_unix: self.clock.unix_seconds(),
            interval_s: interval,
            nodes: self.nodes_of(&activity),
            balancing,
            workloads: self.rows(looks, interval),
            workloads_left_out: left_out,
            notes: self.notes.clone(),
        })
    }

    fn nodes_of(&self, activity: &BTreeMap<NodeId, NodeActivity>) -> Vec<NodePlaces> {
        self.machine
            .nodes
            .iter()
            .map(|node| {
                let seen = activity.get(&node.id).cloned().unwrap_or_default();
                NodePlaces {
                    id: node.id.0,
                    cpus: ranges(
                        self.machine
                            .cpus
                            .iter()
                            .filter(|c| c.node == node.id)
                            .map(|c| c.id.0),
                    ),
                    busy_cpus: seen.busy.unwrap_or(0.0),
                    memory_bytes: node.memory.0,
                    free_bytes: seen.amounts.free.0,
                    file_cache_bytes: seen.amounts.file_cache.0,
                    pages_local: seen.pages_local,
                    pages_to_others: seen.pages_to_others,
                    pages_missed: seen.pages_missed,
                }
            })
            .collect()
    }

    fn rows(
        &self,
        looks: Vec<(Workload, Result<Places, PlatformError>)>,
        interval: f64,
    ) -> Vec<WorkloadPlaces> {
        let cpus_of = |w: &Workload| {
            let sample = self.samples.get(&w.id);
            sample.map_or(0.0, |s| s.cpu.share_of(s.interval))
        };
        let known: Vec<(WorkloadId, homeostat_model::Locality, f64)> = looks
            .iter()
            .filter_map(|(w, places)| Some((w.id.clone(), places.as_ref().ok()?.summary(), cpus_of(w))))
            .collect();
        let scored: Vec<Scored<'_>> = known
            .iter()
            .map(|(_, locality, cpus)| Scored {
                locality,
                cpus: *cpus,
                priority: 0,
            })
            .collect();
        let mut scores: BTreeMap<WorkloadId, PlacementScore> = known
            .iter()
            .zip(placement_scores(&self.machine, &scored))
            .filter_map(|((id, _, _), score)| Some((id.clone(), score?)))
            .collect();
        let mut rows: Vec<WorkloadPlaces> = looks
            .iter()
            .map(|(w, places)| {
                let score = scores.remove(&w.id);
                self.row(w, places, cpus_of(w), interval, score)
            })
            .collect();
        rows.sort_by(|a, b| b.cpus.total_cmp(&a.cpus).then_with(|| a.name.cmp(&b.name)));
        rows
    }

    fn row(
        &self,
        workload: &Workload,
        places: &Result<Places, PlatformError>,
        cpus: f64,
        interval: f64,
        score: Option<PlacementScore>,
    ) -> WorkloadPlaces {
        let mut row = WorkloadPlaces {
            name: workload.id.to_string(),
            program: workload.program.clone(),
            pid: workload.processes.first().map_or(0, |p| i64::from(p.pid)),
            cpus,
            score: score.map(Into::into),
            ..WorkloadPlaces::default()
        };
        let places = match places {
            Ok(places) => places,
            Err(error) => {
                row.unknown = Some(error.to_string());
                return row;
            }
        };
        let node_of: BTreeMap<LlcId, NodeId> = self.machine.cpus.iter().map(|c| (c.llc, c.node)).collect();
        row.threads = places.threads;
        row.running = places
            .running
            .iter()
            .map(|(llc, cpus)| RunningPlace {
                cache: llc.0,
                node: node_of.get(llc).map_or(0, |n| n.0),
                cpus: *cpus,
            })
            .collect();
        row.memory = places
            .memory
            .iter()
            .map(|(node, kinds)| MemoryPlace {
                node: *node,
                kinds: *kinds,
            })
            .collect();
        row.memory_error = places.memory_error;
        row.memory_covered = places.memory_covered;
        if let Some([local, near, far]) = accesses(places, &node_of, &self.groups) {
            (row.local, row.near, row.far) = (Some(local), Some(near), Some(far));
        }
        row.dispatches = places.redispatches.map(|r| Dispatches {
            per_second: if interval > 0.0 {
                r.dispatches / interval
            } else {
                0.0
            },
            shares: r,
        });
        if let Some(balancing) = &places.balancing {
            row.pages_migrated = Some(balancing.pages_migrated);
            row.preferred = balancing.preferred.iter().map(|(n, c)| (n.0, *c)).collect();
        }
        row.bound.clone_from(&places.bound);
        row.counted_local = places
            .counters
            .map(|c| c.local_share)
            .filter(|share| share.is_finite());
        row
    }
}

/// Shares of accesses by distance, if every thread used all memory alike. `None` without load or memory.
fn accesses(places: &Places, node_of: &BTreeMap<LlcId, NodeId>, groups: &[Vec<NodeId>]) -> Option<[f64; 3]> {
    let load = places.cpus();
    let memory = places.resident().0 as f64;
    if load <= 0.0 || memory <= 0.0 {
        return None;
    }
    let mut shares = [0.0; 3];
    for (llc, cpus) in &places.running {
        let Some(here) = node_of.get(llc) else { continue };
        for (node, bytes) in &places.memory {
            let near = groups.iter().any(|g| g.contains(here) && g.contains(node));
            let kind = match (here == node, near) {
                (true, _) => 0,
                (false, true) => 1,
                (false, false) => 2,
            };
            if let Some(share) = shares.get_mut(kind) {
                *share += cpus / load * bytes.total().0 as f64 / memory;
            }
        }
    }
    Some(shares)
}

impl Named for Workload {
    fn name(&self) -> &str {
        self.id.as_str()
    }
    fn program(&self) -> &str {
        &self.program
    }
    fn has_process(&self, pid: i32) -> bool {
        self.processes.iter().any(|p| p.pid == pid)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::{Found, find_named};
    use homeostat_model::{Bytes, Fingerprint, OperatorChoice, ProcessId, WorkloadKind};

    fn workload(id: &str, program: &str, pid: i32) -> Workload {
        Workload {
            id: id.into(),
            kind: WorkloadKind::ProcessGroup,
            former: None,
            owner: homeostat_model::Owner::Machine,
            others: Vec::new(),
            fingerprint: Fingerprint::new(id),
            program: program.into(),
            executable: String::new(),
            processes: vec![ProcessId { pid, start_ticks: 1 }],
            choice: OperatorChoice::default(),
        }
    }

    #[test]
    fn a_workload_is_found_by_whatever_a_person_calls_it() {
        let list = [
            workload("redis-server.service", "redis-server", 10),
            workload("shop.service", "java", 20),
            workload("java[30]", "java", 30),
        ];
        for name in ["redis-server.service", "10", "redis-server", "red"] {
            assert_eq!(find_named(&list, name), Found::One(&list[0]), "{name}");
        }
        assert!(matches!(find_named(&list, "java"), Found::Several(names) if names.len() == 2));
        assert_eq!(
            find_named(&list, "shpo.service"),
            Found::Near(vec!["shop.service".into()])
        );
        assert_eq!(find_named(&list, "4711"), Found::Near(vec![]));
    }

    #[test]
    fn accesses_are_local_near_or_far_and_sum_to_one() {
        let memory = |bytes| MemoryByKind {
            anonymous: Bytes(bytes),
            ..MemoryByKind::default()
        };
        let mut places = Places {
            workload: "w".into(),
            watched: Nanoseconds::ZERO,
            threads: 1,
            threads_of_busiest_process: 1,
            running: BTreeMap::from([(LlcId(0), 3.0), (LlcId(8), 1.0)]),
            memory: BTreeMap::from([
                (NodeId(0), memory(50)),
                (NodeId(1), memory(30)),
                (NodeId(2), memory(20)),
            ]),
            memory_error: 0.0,
            memory_covered: 1.0,
            redispatches: None,
            balancing: None,
            bound: None,
            counters: None,
        };
        let node_of = BTreeMap::from([(LlcId(0), NodeId(0)), (LlcId(8), NodeId(2))]);
        let groups = [vec![NodeId(0), NodeId(1)], vec![NodeId(2)]];
        let [local, near, far] = accesses(&places, &node_of, &groups).unwrap();
        assert!((local - (0.75 * 0.5 + 0.25 * 0.2)).abs() < 1e-12);
        assert!((near - 0.75 * 0.3).abs() < 1e-12);
        assert!((local + near + far - 1.0).abs() < 1e-12);
        places.running.clear();
        assert_eq!(accesses(&places, &node_of, &groups), None);
    }
}
