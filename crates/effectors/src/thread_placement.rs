//! Keeps the threads of a workload on chosen CPUs, and gives each thread back the mask that it had.
//!
//! **Apply** calls `sched_setaffinity` for each thread, in rounds, until a round changes nothing: new threads inherit a
//! mask. **Undo** restores the masks found. Newcomers get that of their process, or of the record's oldest process.
//! After each scan a review ([`Effector::review`]) places newcomers without the mask, and notices changes by a person.
//!
//! Only workloads that may run everywhere are placed: an undo restores that freedom. [`PlatformError::Conflict`]
//! answers a narrower mask (`taskset`, `numactl --cpunodebind`) and a memory policy (`numactl`). It also answers a
//! narrower cpuset (container, Kubernetes' CPU manager, `AllowedCPUs=`), unless homeostat lives in it. CPUs under
//! `isolcpus=` or `nohz_full=` are never a target.
//!
//! A person who binds a thread later wins: homeostat overwrites only its own mask and the one found. Apply then ends in
//! a conflict, and undo restores the other threads. If a person sets homeostat's very mask, it goes with homeostat's.

use crate::cpuset::Group;
use crate::identity::{
    NAMESPACES, boot_id, by_process, denied, malformed, namespaces, of_another_boot, process_key, read_error,
    require_namespaces,
};
use crate::page_moves::{PageMoves, Seen, Settings, Wanted, wrong_argument};
use crate::{Effector, cpuset, page_moves};
use homeostat_kernel::numa::{CPUS_MAX, CpuMask, NumaError};
use homeostat_kernel::{Root, files, numa};
use homeostat_model::action::Target;
use homeostat_model::{
    Action, ActionId, Bytes, Direction, EffectorId, LlcId, ProcessId, Progress, UndoRecord, Workload,
    WorkloadId,
};
use homeostat_platform::{PlatformError, Reached};
use homeostat_sensors::processes::parse_stat;
use homeostat_sensors::reader::Reader;
use homeostat_sensors::topology::SetAside;
use homeostat_sensors::walks::Policy;
use homeostat_sensors::{topology, walks};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::time::{Duration, Instant};

/// Most processes in one action; the rest is not placed. The record takes some 60 bytes for each.
const PROCESSES_PER_ACTION_MAX: usize = 4096;
/// Length of one slice. A thread takes about 1 µs to check and 5 µs to place.
const SLICE: Duration = Duration::from_millis(20);
/// Time after which a review checks no further process. The next review goes on there.
const REVIEW_MAX: Duration = Duration::from_millis(5);
/// Rounds over all threads before an action reports that it cannot keep up. Usually two are enough.
const ROUNDS_MAX: u8 = 16;
/// Generations of parents checked for a process of the record.
const ANCESTORS_MAX: usize = 32;
/// Processes checked for a memory policy. Children inherit policies, so the oldest are enough.
const POLICIES_MAX: usize = 16;
/// Mappings checked for a policy.
const POLICY_MAPPINGS: usize = 64;
/// A policy that is not read.
pub(super) const POLICY_HIDDEN: &str =
    "hidden (its first mapping is too large to be looked at without holding up the program)";
/// How long that read may take. The sensors' 250 ms broke off a trial in a guest whose CPUs were busy elsewhere.
const POLICY_PATIENCE: Duration = Duration::from_secs(1);
/// Most threads of one process that may have a mask of their own in the record.
const ODD_THREADS_MAX: usize = 4096;

/// In the record of a placement over another: the number of the lower action, and the mask from before it.
const OVER: &str = "over";
const NATURAL: &str = "natural";

const ONLINE: &str = "/sys/devices/system/cpu/online";
const POSSIBLE: &str = "/sys/devices/system/cpu/possible";
const NODES: &str = "/sys/devices/system/node";

// Reasons why something is left as it is. Stable: they appear in histories.
const ENDED: &str = "process ended";
const CHANGED_BY_OTHERS: &str = "changed by somebody else";
const DEADLINE: &str = "a deadline thread";
const TOO_MANY: &str = "more processes than one action can hold";
const OFFLINE: &str = "none of its CPUs is online";
const CUT: &str = "its cpuset or the CPUs online are not what they were";

/// Why threads are not kept in groups (capability `placement.threads.grouped`).
pub const GROUPED_WHY_NOT: &str = "which threads of a process share data is not to be seen from outside, and a group \
                                          made by chance would keep those apart that do";

/// Places threads.
///
/// **Exact**: each thread's mask as `Cpus_allowed` showed it, unless its cpuset or the online CPUs changed; the text of
/// `cpuset.cpus`. **Not exact**: the kernel does not show whether a thread once *asked* for its mask. In a cpuset of
/// its own such a thread may then use all that the cpuset ever offers, like one that never asked.
///
/// **One over another.** A later placement of the same workload may lie over the first. It finds the first's mask and
/// its undo restores that. While it lasts, the lower placement is neither moved nor reviewed. This effector ensures
/// that. The runtime orders several placements under way, and recovery undoes the newest first. Cpusets take no part.
pub(super) struct ThreadPlacement {
    root: Root,
    tasks: BTreeMap<ActionId, Task>,
    /// Placements applied by this process, for the review.
    in_force: BTreeMap<ActionId, InForce>,
    /// The placement reviewed last.
    reviewed: Option<ActionId>,
    reader: Reader,
    /// For memory that goes along.
    moves: PageMoves,
    /// Actions whose threads are done while their memory is still moving.
    threads_done: BTreeMap<ActionId, (Direction, Progress)>,
    /// Placements that are owed an undo, as far as this process knows.
    laid: BTreeMap<ActionId, Laid>,
    /// Processes outside the record of a placement that were set free with the others. A new apply places them again.
    born: BTreeMap<ActionId, Vec<ProcessId>>,
}

/// A placement that is owed an undo.
struct Laid {
    workload: WorkloadId,
    /// Its threads were given back, and only memory has to come back. It lies over nobody's threads any more.
    threads_back: bool,
}

impl ThreadPlacement {
    pub(super) fn new(root: Root) -> Self {
        Self {
            moves: PageMoves::new(root.clone()),
            threads_done: BTreeMap::new(),
            laid: BTreeMap::new(),
            born: BTreeMap::new(),
            root,
            tasks: BTreeMap::new(),
            in_force: BTreeMap::new(),
            reviewed: None,
            reader: Reader::default(),
        }
    }

    fn require_live(&self) -> Result<(), PlatformError> {
        if self.root.is_live() {
            return Ok(());
        }
        Err(unsupported(
            "the files below the root are not those of the running kernel",
        ))
    }

    fn survey(
        &mut self,
        action: &Action,
        members: &[ProcessId],
    ) -> Result<BTreeMap<String, String>, PlatformError> {
        let wishes = Wishes::parse(action)?;
        let machine = Cpus::read(&self.root)?;
        let ours = checked_target(action, &machine, wishes.split)?;
        let mut found = BTreeMap::from([(NAMESPACES.to_owned(), namespaces(&self.root))]);
        let mut skipped: BTreeMap<&str, u64> = BTreeMap::new();
        if members.len() > PROCESSES_PER_ACTION_MAX {
            let more = members.len() - PROCESSES_PER_ACTION_MAX;
            skipped.insert(TOO_MANY, more as u64);
        }
        let members = members.get(..PROCESSES_PER_ACTION_MAX).unwrap_or(members);
        // The placement that this action would lie over.
        let below = self
            .in_force
            .iter()
            .rev()
            .find(|(id, placed)| **id < action.id && placed.plan.workload == action.workload)
            .map(|(id, placed)| (*id, &placed.plan))
            // Somebody else may have undone it from its record.
            .filter(|(_, plan)| plan.is_seen(&machine.online));
        if let Some((id, plan)) = &below {
            let by_cpuset = plan.group.is_some() || wishes.means == Means::Cpuset;
            if by_cpuset || wishes.split || !plan.own.is_empty() {
                return Err(unsupported(&format!(
                    "a placement by cpuset, or of each process by itself, neither lies over another nor carries one (action {id})"
                )));
            }
            found.insert(OVER.into(), id.to_string());
            found.insert(NATURAL.into(), plan.natural().to_string());
        }
        let below = below.map(|(_, plan)| plan);
        let mut living = Vec::new();
        let mut parents = BTreeSet::new();
        let mut sessions = BTreeSet::new();
        let mut groups = BTreeSet::new();
        let mut threads = 0;
        for id in members {
            let Some(kin) = Kin::read(&self.root, id.pid).filter(|k| k.start_ticks == id.start_ticks) else {
                *skipped.entry(ENDED).or_default() += 1;
                continue;
            };
            if living.len() < POLICIES_MAX {
                require_no_policy(&self.root, &mut self.reader, *id)?;
            }
            let free = free_for(&self.root, *id, &machine)?;
            let Some(masks) = masks_of(&self.root, *id, &machine, &free, below)? else {
                *skipped.entry(ENDED).or_default() += 1;
                continue;
            };
            threads += masks.count;
            if living.is_empty() {
                found.insert("mask".into(), masks.main.to_string());
            }
            found.insert(process_key("mask", *id), masks.main.to_string());
            if !masks.odd.is_empty() {
                found.insert(process_key("threads", *id), odd_text(&masks.odd));
            }
            living.push(*id);
            parents.insert(kin.parent);
            if kin.session > 1 {
                sessions.insert(kin.session.to_string());
            }
            groups.extend(own_group(&self.root, id.pid));
        }
        if living.is_empty() {
            return Err(vanished(&action.workload));
        }
        for pid in living.iter().map(|id| id.pid) {
            parents.remove(&pid);
        }
        let group = match wishes.means {
            _ if wishes.split || below.is_some() => None,
            Means::Threads => None,
            Means::Cpuset => {
                let group = Group::of_exactly(&self.root, &living).map_err(|why| rejected("cpuset", &why))?;
                Some(group)
            }
            Means::Auto if parents.len() > 1 => Group::of_exactly(&self.root, &living).ok(),
            Means::Auto => None,
        };
        if let Some(group) = group {
            let cpus = group.cpus(&self.root).map_err(|e| group_error(&group, &e))?;
            found.insert("cpuset".into(), group.path);
            found.insert("cpuset.version".into(), group.version.to_string());
            found.insert("cpuset.inode".into(), group.inode.to_string());
            found.insert("cpuset.cpus".into(), cpus);
        }
        found.insert("cpus".into(), ours.to_string());
        found.insert("since".into(), now_ticks(&self.root).to_string());
        found.insert(
            "sessions".into(),
            sessions.into_iter().collect::<Vec<_>>().join(","),
        );
        found.insert("groups".into(), groups.into_iter().collect::<Vec<_>>().join("\n"));
        found.insert("count".into(), threads.to_string());
        for (reason, count) in skipped {
            found.insert(format!("skipped.{reason}"), count.to_string());
        }
        let seen = match &wishes.memory {
            Some(_) => self.moves.look(&living)?,
            None => Seen::default(),
        };
        let places = if wishes.split {
            assign(&self.root, &ours, &machine, &living, &seen)?
        } else {
            BTreeMap::new()
        };
        for (id, place) in &places {
            found.insert(process_key("cpus", *id), place.cpus.to_string());
        }
        if let Some(along) = &wishes.memory {
            let homes = nodes_of(&self.root, &ours.and(&machine.online));
            if homes.is_empty() {
                return Err(rejected(
                    &format!("CPUs {ours}"),
                    "memory can not go along: the nodes of these CPUs have none",
                ));
            }
            let own_home = places
                .iter()
                .filter(|(_, place)| homes.contains(&place.node))
                .map(|(id, place)| (*id, place.node))
                .collect();
            let wanted = Wanted {
                bytes: along.bytes,
                shared: along.shared,
                homes,
                own_home,
            };
            let survey = self.moves.survey(action, &seen, &along.settings, &wanted)?;
            found.extend(survey.found);
        }
        Ok(found)
    }

    /// The plan of a record. `None` when it is of another boot or other namespaces, or not understood.
    fn plan_of_this_boot(&self, record: &UndoRecord) -> Option<Plan> {
        let here = boot_id(&self.root).is_ok_and(|boot| boot == record.boot_id)
            && require_namespaces(&self.root, record).is_ok();
        here.then(|| Plan::from(record).ok())?
    }

    /// The plan of a record whose lower placement may be gone. Then the threads get the mask found before both.
    fn plan_above_what_is_left(&self, record: &UndoRecord) -> Result<Plan, PlatformError> {
        let mut plan = Plan::from(record)?;
        let is_gone = |below: &ActionId| self.laid.get(below).is_none_or(|laid| laid.threads_back);
        if plan.over.as_ref().is_some_and(is_gone) {
            plan.forget_what_lay_below();
        }
        Ok(plan)
    }

    fn advance_threads(
        &mut self,
        record: &UndoRecord,
        direction: Direction,
    ) -> Result<Progress, PlatformError> {
        let id = record.action.id;
        if self.tasks.get(&id).is_none_or(|t| t.direction != direction) {
            let mut task = Task::new(self.plan_above_what_is_left(record)?, direction);
            if let Some(born) = self.born.get(&id) {
                task.newcomers.clone_from(born);
            }
            if let Some(known) = self.in_force.get(&id) {
                task.newcomers.extend(known.newcomers.iter().copied());
                if direction == Direction::Apply {
                    task.complete.clone_from(&known.complete);
                }
            }
            task.newcomers.sort_unstable();
            task.newcomers.dedup();
            // The placement below or above acts on the same processes.
            let others = self
                .in_force
                .values()
                .filter(|other| other.plan.workload != record.action.workload);
            for other in others {
                task.claimed
                    .extend(other.plan.processes.keys().chain(&other.newcomers));
            }
            self.tasks.insert(id, task);
        }
        if direction == Direction::Undo {
            // From here on no process is placed any more, nor by a review.
            self.in_force.remove(&id);
        }
        let Some(task) = self.tasks.get_mut(&id) else {
            return Err(unsupported("no task"));
        };
        let outcome = if task.plan.group.is_some() {
            task.by_group(&self.root)
        } else {
            task.by_thread(&self.root)
        };
        if matches!(&outcome, Ok(progress) if !progress.done) {
            return outcome;
        }
        if let Some(task) = self.tasks.remove(&id) {
            self.born.insert(id, task.newcomers.clone());
            if direction == Direction::Apply && outcome.is_ok() {
                let placed = InForce::new(task.plan, task.complete, task.newcomers);
                self.in_force.insert(id, placed);
            }
        }
        outcome
    }

    /// The placement of the same workload that lies over this one, if any. A placement that is neither visible nor
    /// under way does not count: somebody else undid it from its record.
    fn over(&self, id: ActionId, workload: &WorkloadId) -> Option<ActionId> {
        let online = Cpus::read(&self.root).map(|machine| machine.online);
        let is_there = |later: &ActionId| {
            let is_on_its_way = self.tasks.contains_key(later) || self.threads_done.contains_key(later);
            let placed = self.in_force.get(later).map(|placed| &placed.plan);
            let is_seen = match (placed, &online) {
                (Some(plan), Ok(online)) => plan.is_seen(online),
                _ => true,
            };
            is_on_its_way || is_seen
        };
        self.laid
            .iter()
            .rev()
            .filter(|(_, laid)| !laid.threads_back)
            .find(|(later, laid)| **later > id && laid.workload == *workload && is_there(later))
            .map(|(later, _)| *later)
    }

    /// A later placement of the same workload that still owes memory. It goes first. Otherwise this placement would
    /// take the pages that the later one moved on for moved by somebody else.
    fn owes_memory_above(&self, id: ActionId, workload: &WorkloadId) -> Option<ActionId> {
        let owes = |(later, laid): &(&ActionId, &Laid)| {
            **later > id && laid.workload == *workload && laid.threads_back
        };
        self.laid.iter().rev().find(owes).map(|(later, _)| *later)
    }

    /// Goes on with threads, then with memory.
    ///
    /// Memory moves as [`crate::page_moves`] does it: up to `memory_bytes` of pages elsewhere go to the nodes of the
    /// CPUs. A process with a place of its own moves private memory only, to its node. Placing threads takes
    /// microseconds, so it comes first, as does freeing them. If no memory lies elsewhere, only threads are placed.
    fn advance_all(&mut self, record: &UndoRecord, direction: Direction) -> Result<Progress, PlatformError> {
        let id = record.action.id;
        // After a change of direction the threads come first again.
        if self
            .threads_done
            .get(&id)
            .is_some_and(|(way, _)| *way != direction)
        {
            self.threads_done.remove(&id);
        }
        let threads = match self.threads_done.get(&id) {
            Some((_, threads)) => threads.clone(),
            None => self.advance_threads(record, direction)?,
        };
        if !threads.done {
            return Ok(threads);
        }
        if direction == Direction::Undo {
            self.in_force.remove(&id);
            // The placement below may be undone now. Memory may wait long for room at its old place.
            if let Some(laid) = self.laid.get_mut(&id) {
                laid.threads_back = true;
            }
        }
        if !PageMoves::has_plan(record) {
            return Ok(threads);
        }
        if direction == Direction::Undo {
            if let Some(later) = self.owes_memory_above(id, &record.action.workload) {
                self.threads_done.insert(id, (direction, threads));
                return Err(PlatformError::Busy {
                    what: format!("memory of {} that action {id} moved", record.action.workload),
                    why: format!("what action {later} moved on goes back first"),
                });
            }
        }
        let settings = Settings::parse(&record.action, &OWN_ARGUMENTS)?;
        match self.moves.advance(record, direction, &settings) {
            Ok(pages) => {
                if pages.done {
                    self.threads_done.remove(&id);
                } else {
                    self.threads_done.insert(id, (direction, threads.clone()));
                }
                Ok(both(threads, pages))
            }
            Err(error) => {
                // Threads that are back stay so, whatever becomes of the memory.
                if direction == Direction::Undo && !matches!(error, PlatformError::Vanished { .. }) {
                    self.threads_done.insert(id, (direction, threads));
                } else {
                    self.threads_done.remove(&id);
                }
                Err(error)
            }
        }
    }

    /// Whether its threads were given back and only memory has to come back.
    fn has_threads_back(&self, id: ActionId) -> bool {
        self.laid.get(&id).is_some_and(|laid| laid.threads_back)
    }
}

/// A memory policy says where somebody wants the memory, and so where the threads belong.
fn require_no_policy(root: &Root, reader: &mut Reader, id: ProcessId) -> Result<(), PlatformError> {
    let below = root.clone();
    let policy = reader
        .run(id.pid, POLICY_PATIENCE, move || {
            walks::policy(&below, id, POLICY_MAPPINGS, Instant::now() + POLICY_PATIENCE / 2)
        })
        .map_err(|e| PlatformError::Busy {
            what: format!("looking at the memory policy of process {id}"),
            why: e.to_string(),
        })?;
    let found = match policy {
        Policy::Default => return Ok(()),
        Policy::Chosen(policy) => format!("{policy} (numactl, or the program's own choice)"),
        // On one node a policy chooses nothing.
        Policy::Hidden if files::numbered(root, "/sys/devices/system/node", "node").len() < 2 => {
            return Ok(());
        }
        Policy::Hidden => POLICY_HIDDEN.into(),
    };
    Err(PlatformError::Conflict {
        what: format!("memory policy of process {id}"),
        expected: "default".into(),
        found,
    })
}

impl Effector for ThreadPlacement {
    fn id(&self) -> EffectorId {
        EffectorId::new("thread_placement")
    }

    fn prepare(&mut self, action: &Action) -> Result<UndoRecord, PlatformError> {
        self.prepare_for(action, &[])
    }

    fn prepare_for(&mut self, action: &Action, members: &[ProcessId]) -> Result<UndoRecord, PlatformError> {
        self.require_live()?;
        Ok(UndoRecord {
            action: action.clone(),
            boot_id: boot_id(&self.root)?,
            found: self.survey(action, members)?,
        })
    }

    fn advance(&mut self, record: &UndoRecord, direction: Direction) -> Result<Progress, PlatformError> {
        self.require_live()?;
        require_namespaces(&self.root, record)?;
        if let Some(answer) = of_another_boot(&self.root, record, direction)? {
            return Ok(answer);
        }
        let (id, workload) = (record.action.id, &record.action.workload);
        if let Some(later) = self.over(id, workload) {
            // Apply came again before the undo could begin: the placement is in force.
            if direction == Direction::Apply && !self.tasks.contains_key(&id) {
                if let Some(placed) = self.in_force.get(&id) {
                    return Ok(Progress {
                        done: true,
                        finished: placed.plan.count,
                        total: placed.plan.count,
                        verified: true,
                        ..Progress::default()
                    });
                }
            }
            // Its threads have the masks of the later one. They would pass for somebody else's and never be given back.
            return Err(PlatformError::Busy {
                what: format!("placement of the threads of {workload} (action {id})"),
                why: format!("action {later} lies over it"),
            });
        }
        let laid = Laid {
            workload: workload.clone(),
            threads_back: direction == Direction::Undo && self.has_threads_back(id),
        };
        self.laid.insert(id, laid);
        let outcome = self.advance_all(record, direction);
        let is_over = match &outcome {
            Ok(progress) => progress.done,
            Err(error) => matches!(error, PlatformError::Vanished { .. }),
        };
        if direction == Direction::Undo && is_over {
            self.laid.remove(&id);
        }
        outcome
    }

    fn forget(&mut self, record: &UndoRecord) {
        let id = record.action.id;
        self.tasks.remove(&id);
        self.in_force.remove(&id);
        self.threads_done.remove(&id);
        self.laid.remove(&id);
        self.born.remove(&id);
        self.moves.forget(id);
    }

    fn inherit(&mut self, record: &UndoRecord, _: Reached) {
        let laid = Laid {
            workload: record.action.workload.clone(),
            threads_back: false,
        };
        self.laid.entry(record.action.id).or_insert(laid);
    }

    fn adopt(&mut self, record: &UndoRecord) {
        let id = record.action.id;
        if let Some(plan) = self.plan_of_this_boot(record) {
            if !self.tasks.contains_key(&id) && !self.has_threads_back(id) {
                // All its threads were placed. A thread that is not has since been set free by somebody.
                let complete = plan.processes.keys().copied().collect();
                self.inherit(record, Reached::Made);
                self.in_force
                    .entry(id)
                    .or_insert_with(|| InForce::new(plan, complete, Vec::new()));
            }
        }
    }

    fn masks_of(&self, record: &UndoRecord) -> Vec<CpuMask> {
        let plan = self.plan_of_this_boot(record);
        plan.map(|plan| plan.masks).unwrap_or_default()
    }

    fn review(&mut self, workloads: &BTreeMap<WorkloadId, Workload>) -> Vec<(WorkloadId, String)> {
        if self.in_force.is_empty() {
            return Vec::new();
        }
        let begun = Instant::now();
        let Ok(machine) = Cpus::read(&self.root) else {
            return Vec::new();
        };
        // Placements take turns, so that one with many threads does not keep the others from being checked.
        let last = self.reviewed;
        let (first, second): (Vec<ActionId>, Vec<ActionId>) =
            self.in_force.keys().copied().partition(|id| Some(*id) > last);
        // If all its CPUs are offline, the kernel set the threads free. That proves nothing about a placement below.
        let offline: BTreeSet<WorkloadId> = self
            .in_force
            .values()
            .filter(|placed| placed.plan.ours.and(&machine.online).is_empty())
            .map(|placed| placed.plan.workload.clone())
            .collect();
        for placed in self.in_force.values_mut() {
            if offline.contains(&placed.plan.workload) {
                placed.complete.clear();
            }
        }
        for id in first.into_iter().chain(second) {
            let covered = |placed: &InForce| self.over(id, &placed.plan.workload).is_some();
            if self.in_force.get(&id).is_some_and(covered) {
                continue;
            }
            let Some(placed) = self.in_force.get_mut(&id).filter(|p| p.overruled.is_none()) else {
                continue;
            };
            let members = workloads
                .get(&placed.plan.workload)
                .map(|w| w.processes.as_slice())
                .unwrap_or_default();
            placed.review(&self.root, &machine, members, begun);
            self.reviewed = Some(id);
            if begun.elapsed() >= REVIEW_MAX {
                break;
            }
        }
        self.in_force
            .values()
            .filter_map(|placed| Some((placed.plan.workload.clone(), placed.overruled.clone()?)))
            .collect()
    }

    fn placed_on(&self, workload: &WorkloadId) -> Vec<CpuMask> {
        self.in_force
            .values()
            .map(|f| &f.plan)
            .chain(self.tasks.values().map(|t| &t.plan))
            .filter(|plan| plan.workload == *workload)
            .flat_map(|plan| &plan.masks)
            .collect::<BTreeSet<_>>()
            .into_iter()
            .cloned()
            .collect()
    }
}

/// How the threads are kept.
///
/// Where a workload is alone in a control group whose cpuset nobody set, `cpuset.cpus` can serve. Every new process in
/// the group falls under it, whoever starts it. But a person's later `taskset` to other CPUs fails with EINVAL; with
/// masks it simply wins. So `auto` (the default) takes the cpuset only if the processes have several parents outside
/// the workload. Newcomers would then not inherit a mask.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Means {
    Auto,
    Threads,
    Cpuset,
}

/// Arguments of an action, all optional: `means` (`auto`, `threads`, `cpuset`), `split_by` (`process`), `memory`
/// (`all`, `private`). With `memory`: `memory_bytes`, and `page_placement`'s for pace and large pages.
struct Wishes {
    means: Means,
    /// Each process on one last-level cache.
    split: bool,
    memory: Option<Along>,
}

/// Memory that goes along with threads.
struct Along {
    bytes: Bytes,
    shared: bool,
    settings: Settings,
}

/// Arguments that are not about how pages move.
const OWN_ARGUMENTS: [&str; 4] = ["means", "split_by", "memory", "memory_bytes"];

impl Wishes {
    fn parse(action: &Action) -> Result<Self, PlatformError> {
        let of = |name: &str| action.arguments.get(name).map(String::as_str);
        let wrong = |name: &str, expected: &str| wrong_argument(action, name, expected);
        if of("group_by").is_some() {
            return Err(unsupported(GROUPED_WHY_NOT));
        }
        let means = match of("means") {
            None | Some("auto") => Means::Auto,
            Some("threads") => Means::Threads,
            Some("cpuset") => Means::Cpuset,
            Some(_) => return Err(wrong("means", "auto, threads or cpuset")),
        };
        let split = match of("split_by") {
            None => false,
            Some("process") if means != Means::Cpuset => true,
            Some("process") => {
                return Err(wrong(
                    "means",
                    "one cpuset can not keep each process on CPUs of its own",
                ));
            }
            Some(_) => return Err(wrong("split_by", "process")),
        };
        let shared = match of("memory") {
            None => {
                let own = ["means", "split_by"];
                return match action.arguments.keys().find(|name| !own.contains(&name.as_str())) {
                    Some(name) => Err(wrong(
                        name,
                        "means or split_by, and others with memory = all or private",
                    )),
                    None => Ok(Self {
                        means,
                        split,
                        memory: None,
                    }),
                };
            }
            Some("private") => false,
            Some("all") if !split => true,
            Some("all") => {
                return Err(wrong(
                    "memory",
                    "private where each process has a place of its own",
                ));
            }
            Some(_) => return Err(wrong("memory", "all or private")),
        };
        let bytes = of("memory_bytes")
            .and_then(|text| text.parse().ok())
            .map(Bytes)
            .ok_or_else(|| wrong("memory_bytes", "a number of bytes"))?;
        let settings = Settings::parse(action, &OWN_ARGUMENTS)?;
        Ok(Self {
            means,
            split,
            memory: Some(Along {
                bytes,
                shared,
                settings,
            }),
        })
    }
}

fn both(threads: Progress, pages: Progress) -> Progress {
    let mut skipped = threads.skipped;
    for (reason, count) in pages.skipped {
        *skipped.entry(reason).or_default() += count;
    }
    Progress {
        finished: threads.finished + pages.finished,
        total: threads.total + pages.total,
        skipped,
        verified: threads.verified && pages.verified,
        ..pages
    }
}

/// The nodes of these CPUs that have memory, ascending.
fn nodes_of(root: &Root, cpus: &CpuMask) -> Vec<u32> {
    let nodes = files::numbered(root, NODES, "node");
    let of = |node: &u32| {
        let list = files::text(root, &format!("{NODES}/node{node}/cpulist"));
        let cpus_of_node = list
            .and_then(|list| CpuMask::from_list(&list))
            .unwrap_or_default();
        !cpus_of_node.and(cpus).is_empty() && page_moves::has_memory(root, *node)
    };
    nodes.into_iter().filter(of).collect()
}

struct OwnPlace {
    cpus: CpuMask,
    node: u32,
}

/// A last-level cache.
struct Domain {
    place: OwnPlace,
    cores: BTreeSet<u32>,
    /// Processes that it can still take.
    left: f64,
}

/// Deals the processes out to the last-level caches among these CPUs (`split_by` = `process`): as many to each as it
/// has cores, oldest first. Each goes where most of its private memory is, else where most room is. Newcomers inherit
/// the mask of their parent, and undo restores their mask like all others.
fn assign(
    root: &Root,
    ours: &CpuMask,
    machine: &Cpus,
    members: &[ProcessId],
    seen: &Seen,
) -> Result<BTreeMap<ProcessId, OwnPlace>, PlatformError> {
    let mut domains: BTreeMap<LlcId, Domain> = BTreeMap::new();
    let usable = ours.and(&machine.online);
    for cpu in topology::read(root)?
        .cpus
        .iter()
        .filter(|cpu| usable.contains(cpu.id.0))
    {
        let domain = domains.entry(cpu.llc).or_insert_with(|| Domain {
            place: OwnPlace {
                cpus: CpuMask::default(),
                node: cpu.node.0,
            },
            cores: BTreeSet::new(),
            left: 0.0,
        });
        domain.place.cpus = domain.place.cpus.or(&CpuMask::of([cpu.id.0]));
        domain.cores.insert(cpu.core);
    }
    let cores: usize = domains.values().map(|d| d.cores.len()).sum();
    for domain in domains.values_mut() {
        let share = domain.cores.len() as f64 / cores.max(1) as f64;
        domain.left = (members.len() as f64 * share).ceil();
    }
    if domains.len() < 2 {
        return Err(rejected(
            &format!("CPUs {ours}"),
            "they share one last-level cache: there is nothing to split over",
        ));
    }
    let mut out = BTreeMap::new();
    for id in members {
        let pages = seen.private_pages(*id);
        let on = |domain: &Domain| pages.get(&domain.place.node).copied().unwrap_or(0);
        let best = domains
            .values_mut()
            .filter(|domain| domain.left >= 1.0)
            .reduce(|best, next| {
                let order = on(best).cmp(&on(next)).then(best.left.total_cmp(&next.left));
                if order == std::cmp::Ordering::Less {
                    next
                } else {
                    best
                }
            });
        if let Some(domain) = best {
            domain.left -= 1.0;
            let place = OwnPlace {
                cpus: domain.place.cpus.clone(),
                node: domain.place.node,
            };
            out.insert(*id, place);
        }
    }
    Ok(out)
}

struct Cpus {
    online: CpuMask,
    possible: CpuMask,
    /// Isolated at boot, or given to a partition of cpusets. Ordinary programs do not run there.
    isolated: CpuMask,
    /// The isolated CPUs, and the CPUs kept free of timer ticks.
    set_aside: CpuMask,
}

impl Cpus {
    fn read(root: &Root) -> Result<Self, PlatformError> {
        let list = |path: &str| files::text(root, path).and_then(|text| CpuMask::from_list(&text));
        let online = list(ONLINE)
            .filter(|cpus| !cpus.is_empty())
            .ok_or_else(|| unsupported(&format!("{ONLINE} is absent or not understood")))?;
        let chosen = SetAside::read(root);
        let isolated = CpuMask::of(chosen.isolated.union(&chosen.partitioned).copied());
        let set_aside = CpuMask::of(chosen.all());
        Ok(Self {
            possible: list(POSSIBLE).unwrap_or_default().or(&online),
            online,
            isolated,
            set_aside,
        })
    }
}

/// The CPUs of the target, if they are a valid one. `all`: the target is the whole machine, minus the CPUs set aside.
fn checked_target(action: &Action, machine: &Cpus, all: bool) -> Result<CpuMask, PlatformError> {
    let Target::Cpus(cpus) = &action.target else {
        return Err(rejected("the target", "CPUs expected"));
    };
    let mut ours = CpuMask::of(cpus.iter().map(|c| c.0));
    if all {
        ours = ours.without(&machine.set_aside);
    }
    if let Some(cpu) = cpus
        .iter()
        .find(|c| c.0 >= CPUS_MAX || !machine.possible.contains(c.0))
    {
        return Err(rejected(&format!("CPU {cpu}"), "the machine has no such CPU"));
    }
    if ours.and(&machine.online).is_empty() {
        return Err(rejected(&format!("CPUs {ours}"), "none of these CPUs is online"));
    }
    let taken = ours.and(&machine.set_aside);
    if !taken.is_empty() {
        return Err(PlatformError::Conflict {
            what: format!("CPUs {taken}"),
            expected: "in general use".into(),
            found: "set aside (isolcpus=, nohz_full=, or a partition of cpusets)".into(),
        });
    }
    Ok(ours)
}

/// The CPUs that a process may use when nobody restricted it. The error names the restriction.
fn free_for(root: &Root, id: ProcessId, machine: &Cpus) -> Result<CpuMask, PlatformError> {
    let everywhere = machine.online.without(&machine.isolated);
    let Some((allowed, group)) = cpuset::allowed(root, id.pid) else {
        return Ok(everywhere);
    };
    let offered = everywhere.and(&allowed);
    if offered == everywhere {
        return Ok(everywhere);
    }
    // The cpuset in which homeostat lives is the machine that it was given.
    let own = i32::try_from(std::process::id()).unwrap_or(0);
    if cpuset::allowed(root, own).is_some_and(|(ours, _)| everywhere.and(&ours) == offered) {
        return Ok(offered);
    }
    Err(PlatformError::Conflict {
        what: format!("the CPUs of process {id}"),
        expected: format!("{everywhere}"),
        found: format!(
            "{allowed} by its cpuset {group} (a container's or AllowedCPUs= setting, or the CPU manager of Kubernetes)"
        ),
    })
}

struct Masks {
    /// That of the main thread.
    main: CpuMask,
    /// Threads with another mask, by number and start time.
    odd: BTreeMap<(i32, u64), CpuMask>,
    count: u64,
}

/// Reads the masks of all threads. `None` when the process ended.
///
/// # Errors
/// `Conflict` when somebody restricted a thread: it may not run on all of `free`, or lacks the mask of `below`.
fn masks_of(
    root: &Root,
    id: ProcessId,
    machine: &Cpus,
    free: &CpuMask,
    below: Option<&Plan>,
) -> Result<Option<Masks>, PlatformError> {
    let Some(threads) = threads_of(root, id)? else {
        return Ok(None);
    };
    // If CPUs can still be added, the call shows less than the whole mask.
    let whole = machine.possible != machine.online;
    let mut masks: Option<Masks> = None;
    for thread in threads {
        let seen = match numa::affinity(thread) {
            Ok(seen) => seen,
            Err(NumaError::NoProcess) => continue,
            Err(error) => return Err(numa_error(id, error)),
        };
        let (is_as_left, expected) = match below {
            // A newcomer that did not inherit the mask is as free as the others were.
            Some(plan) if !plan.processes.contains_key(&id) && free.is_within(&seen) => (true, free),
            Some(plan) => (
                plan.is_ours(id, &seen, &machine.online),
                plan.ours_of(id).unwrap_or(&plan.ours),
            ),
            None => (free.is_within(&seen), free),
        };
        if !is_as_left {
            return Err(PlatformError::Conflict {
                what: format!("affinity of thread {thread} of process {id}"),
                expected: format!("CPUs {expected}"),
                found: format!("CPUs {seen} (taskset, numactl, or the program's own choice)"),
            });
        }
        let mask = if whole || masks.is_none() {
            match whole_mask(root, id.pid, thread) {
                Some(mask) => mask,
                None => continue,
            }
        } else {
            seen
        };
        match &mut masks {
            None => {
                masks = Some(Masks {
                    main: mask,
                    odd: BTreeMap::new(),
                    count: 1,
                });
            }
            Some(masks) => {
                masks.count += 1;
                let same = if whole {
                    mask == masks.main
                } else {
                    mask == masks.main.and(&machine.online)
                };
                if !same && masks.odd.len() < ODD_THREADS_MAX {
                    if let Some(start) = thread_start(root, id.pid, thread) {
                        masks.odd.insert((thread, start), mask);
                    }
                }
            }
        }
    }
    Ok(masks)
}

/// `Cpus_allowed` of a thread, with CPUs that are offline. `None` when it ended.
fn whole_mask(root: &Root, pid: i32, thread: i32) -> Option<CpuMask> {
    let text = files::text(root, &format!("/proc/{pid}/task/{thread}/status"))?;
    let mask = text.lines().find_map(|line| line.strip_prefix("Cpus_allowed:"))?;
    CpuMask::from_hexadecimal(mask)
}

fn thread_start(root: &Root, pid: i32, thread: i32) -> Option<u64> {
    let text = files::bytes(
        root,
        &format!("/proc/{pid}/task/{thread}/stat"),
        files::SMALL_FILE_MAX,
    )?;
    Some(parse_stat(&text)?.start_ticks)
}

/// Threads of the process. `None` when it ended.
fn threads_of(root: &Root, id: ProcessId) -> Result<Option<Vec<i32>>, PlatformError> {
    let gone = |e: &PlatformError| matches!(e, PlatformError::Vanished { .. });
    let entries = match fs::read_dir(root.path(&format!("/proc/{}/task", id.pid))) {
        Ok(entries) => entries,
        Err(e) => match read_error(id, &e) {
            error if gone(&error) => return Ok(None),
            error => return Err(error),
        },
    };
    let mut threads = Vec::new();
    for entry in entries {
        match entry {
            Ok(entry) => threads.extend(entry.file_name().to_str().and_then(|n| n.parse::<i32>().ok())),
            Err(e) => match read_error(id, &e) {
                error if gone(&error) => return Ok(None),
                error => return Err(error),
            },
        }
    }
    // Checked last: if it is still the same process, it was so all the time. It may outlive its main thread.
    match Kin::read(root, id.pid) {
        Some(kin) if kin.start_ticks == id.start_ticks && (!kin.ended || threads.len() > 1) => {
            Ok(Some(threads))
        }
        _ => Ok(None),
    }
}

/// Where a process comes from.
struct Kin {
    parent: i32,
    session: i32,
    start_ticks: u64,
    ended: bool,
}

impl Kin {
    fn read(root: &Root, pid: i32) -> Option<Self> {
        let text = files::bytes(root, &format!("/proc/{pid}/stat"), files::SMALL_FILE_MAX)?;
        let stat = parse_stat(&text)?;
        Some(Self {
            parent: stat.parent,
            session: stat.session,
            start_ticks: stat.start_ticks,
            ended: stat.has_ended(),
        })
    }
}

/// The control group that names a process. Groups that hold everything do not count.
fn own_group(root: &Root, pid: i32) -> Option<String> {
    let text = files::text(root, &format!("/proc/{pid}/cgroup"))?;
    let path = |mark: &str| {
        text.lines()
            .find_map(|line| line.split_once(mark).map(|(_, path)| path))
            .filter(|path| path.starts_with('/') && *path != "/" && *path != "/init.scope")
    };
    path("0::").or_else(|| path(":name=systemd:")).map(str::to_owned)
}

/// Now, in the unit of start times.
fn now_ticks(root: &Root) -> u64 {
    let uptime = topology::uptime(root).map_or(0.0, |t| t.as_secs_f64());
    (uptime * rustix::param::clock_ticks_per_second() as f64) as u64
}

/// `0-3:12@345,13@346;0-7:…`: threads by number and start time, by mask.
fn odd_text(odd: &BTreeMap<(i32, u64), CpuMask>) -> String {
    let mut by_mask: BTreeMap<&CpuMask, Vec<String>> = BTreeMap::new();
    for ((thread, start), mask) in odd {
        by_mask.entry(mask).or_default().push(format!("{thread}@{start}"));
    }
    by_mask
        .into_iter()
        .map(|(mask, threads)| format!("{}:{}", mask, threads.join(",")))
        .collect::<Vec<_>>()
        .join(";")
}

/// The reverse of [`odd_text`].
fn odd_from(text: &str) -> Option<BTreeMap<(i32, u64), CpuMask>> {
    let mut odd = BTreeMap::new();
    for part in text.split(';').filter(|part| !part.is_empty()) {
        let (mask, threads) = part.split_once(':')?;
        let mask = CpuMask::from_list(mask)?;
        for thread in threads.split(',') {
            let (thread, start) = thread.split_once('@')?;
            odd.insert((thread.parse().ok()?, start.parse().ok()?), mask.clone());
        }
    }
    Some(odd)
}

struct Plan {
    workload: WorkloadId,
    /// All CPUs of the placement.
    ours: CpuMask,
    /// CPUs of processes with a place of their own. Empty when all have the same.
    own: BTreeMap<ProcessId, CpuMask>,
    /// The masks that threads get, each once.
    masks: Vec<CpuMask>,
    /// Processes with the mask found, and the differing masks of single threads.
    processes: BTreeMap<ProcessId, Found>,
    /// For newcomers.
    found: CpuMask,
    /// The mask from before the placement that this one lies over.
    natural: Option<CpuMask>,
    /// The placement that it lies over.
    over: Option<ActionId>,
    /// Earliest start time of a newcomer.
    since: u64,
    sessions: BTreeSet<i32>,
    groups: BTreeSet<String>,
    group: Option<(Group, String)>,
    count: u64,
    skipped: BTreeMap<String, u64>,
}

struct Found {
    mask: CpuMask,
    odd: BTreeMap<(i32, u64), CpuMask>,
}

impl Plan {
    fn from(record: &UndoRecord) -> Result<Self, PlatformError> {
        let text = |key: &str| record.found.get(key).map_or("", String::as_str);
        let wrong = |key: &str| malformed(record, key);
        let number = |key: &str| text(key).parse::<u64>().map_err(|_| wrong(key));
        let mask = |key: &str| {
            CpuMask::from_list(text(key))
                .filter(|mask| !mask.is_empty())
                .ok_or_else(|| wrong(key))
        };
        let mut processes = BTreeMap::new();
        for entry in by_process(record, "mask") {
            let (id, list) = entry?;
            let key = process_key("mask", id);
            let mask = CpuMask::from_list(list)
                .filter(|mask| !mask.is_empty())
                .ok_or_else(|| wrong(&key))?;
            let key = process_key("threads", id);
            let odd = odd_from(text(&key)).ok_or_else(|| wrong(&key))?;
            processes.insert(id, Found { mask, odd });
        }
        let ours = mask("cpus")?;
        let mut own = BTreeMap::new();
        for entry in by_process(record, "cpus") {
            let (id, list) = entry?;
            let mask = CpuMask::from_list(list)
                .filter(|mask| !mask.is_empty())
                .ok_or_else(|| wrong(&process_key("cpus", id)))?;
            own.insert(id, mask);
        }
        let masks: BTreeSet<CpuMask> = if own.is_empty() {
            BTreeSet::from([ours.clone()])
        } else {
            own.values().cloned().collect()
        };
        let group = match text("cpuset") {
            "" => None,
            path => {
                let version = match number("cpuset.version")? {
                    1 => 1,
                    2 => 2,
                    _ => return Err(wrong("cpuset.version")),
                };
                // Whatever the record says, homeostat writes to cpusets only.
                if !path.starts_with("/sys/fs/cgroup/") || path.split('/').any(|part| part == "..") {
                    return Err(wrong("cpuset"));
                }
                let group = Group {
                    path: path.to_owned(),
                    version,
                    inode: number("cpuset.inode")?,
                };
                Some((group, text("cpuset.cpus").to_owned()))
            }
        };
        let sessions = text("sessions")
            .split(',')
            .filter(|s| !s.is_empty())
            .map(|s| s.parse().map_err(|_| wrong("sessions")))
            .collect::<Result<BTreeSet<i32>, _>>()?;
        Ok(Self {
            workload: record.action.workload.clone(),
            ours,
            own,
            masks: masks.into_iter().collect(),
            processes,
            found: mask("mask")?,
            over: match text(OVER) {
                "" => None,
                below => Some(ActionId(below.parse().map_err(|_| wrong(OVER))?)),
            },
            natural: match text(NATURAL) {
                "" => None,
                _ => Some(mask(NATURAL)?),
            },
            since: number("since")?,
            sessions,
            groups: text("groups")
                .split('\n')
                .filter(|g| !g.is_empty())
                .map(str::to_owned)
                .collect(),
            group,
            count: number("count")?,
            skipped: record
                .found
                .iter()
                .filter_map(|(name, count)| {
                    Some((name.strip_prefix("skipped.")?.to_owned(), count.parse().ok()?))
                })
                .collect(),
        })
    }

    /// The mask of a process's threads. `None` for a newcomer, which has the mask of its parent, whichever that is.
    fn ours_of(&self, id: ProcessId) -> Option<&CpuMask> {
        if self.own.is_empty() {
            return Some(&self.ours);
        }
        self.own.get(&id)
    }

    /// Whether a process of the record has its given mask, judged by its main thread.
    fn is_seen(&self, online: &CpuMask) -> bool {
        let has_ours =
            |id: &ProcessId| numa::affinity(id.pid).is_ok_and(|mask| self.is_ours(*id, &mask, online));
        self.processes.keys().any(has_ours)
    }

    /// The mask of the oldest process before all placements.
    fn natural(&self) -> &CpuMask {
        self.natural.as_ref().unwrap_or(&self.found)
    }

    /// Takes the mask from before the lower placement for the mask found.
    fn forget_what_lay_below(&mut self) {
        let Some(natural) = self.natural.clone() else {
            return;
        };
        for found in self.processes.values_mut() {
            found.mask = natural.clone();
            found.odd.clear();
        }
        self.found = natural;
    }

    /// Whether a thread has its old mask: the one found, or for a newcomer that inherited nothing the first of all.
    fn is_free(&self, root: &Root, id: ProcessId, thread: i32, seen: &CpuMask, online: &CpuMask) -> bool {
        *seen == self.found_of(root, id, thread).and(online)
            || (!self.processes.contains_key(&id) && *seen == self.natural().and(online))
    }

    /// Whether a thread of that process has homeostat's mask, directly or by inheritance.
    fn is_ours(&self, id: ProcessId, seen: &CpuMask, online: &CpuMask) -> bool {
        match self.ours_of(id) {
            Some(ours) => *seen == ours.and(online),
            None => self.masks.iter().any(|mask| *seen == mask.and(online)),
        }
    }

    /// The mask found of a thread. A newcomer gets that of the oldest process.
    fn found_of(&self, root: &Root, id: ProcessId, thread: i32) -> &CpuMask {
        let Some(found) = self.processes.get(&id) else {
            return &self.found;
        };
        if found.odd.is_empty() {
            return &found.mask;
        }
        thread_start(root, id.pid, thread)
            .and_then(|start| found.odd.get(&(thread, start)))
            .unwrap_or(&found.mask)
    }

    /// Whether a process outside the record is a newcomer: started since, and a descendant of a process in the record.
    /// A process in one of their sessions or control groups counts, too, unless its parent is in the same one. That is
    /// an orphan, or started by a service manager. A process from a shell in that place does not count: a person may
    /// have given it the same mask. After a crash only this tells who inherited the mask.
    fn is_newcomer(&self, root: &Root, pid: i32) -> Option<ProcessId> {
        let kin = Kin::read(root, pid)?;
        let id = ProcessId {
            pid,
            start_ticks: kin.start_ticks,
        };
        // Both count ticks of the same clock, and one of them may be rounded up.
        if kin.ended || kin.start_ticks + 1 < self.since || self.processes.contains_key(&id) {
            return None;
        }
        let above = Kin::read(root, kin.parent);
        if self.sessions.contains(&kin.session) && above.is_none_or(|above| above.session != kin.session) {
            return Some(id);
        }
        let mut parent = kin.parent;
        for _ in 0..ANCESTORS_MAX {
            if parent <= 1 {
                break;
            }
            let Some(above) = Kin::read(root, parent) else {
                break;
            };
            let known = ProcessId {
                pid: parent,
                start_ticks: above.start_ticks,
            };
            if self.processes.contains_key(&known) {
                return Some(id);
            }
            parent = above.parent;
        }
        let group = own_group(root, pid)?;
        (self.groups.contains(&group) && own_group(root, kin.parent).as_ref() != Some(&group)).then_some(id)
    }

    /// Newcomers with homeostat's mask, except those that another placement holds.
    fn born_since(&self, root: &Root, online: &CpuMask, claimed: &BTreeSet<ProcessId>) -> Vec<ProcessId> {
        let masks: Vec<CpuMask> = self.masks.iter().map(|mask| mask.and(online)).collect();
        files::numbered(root, "/proc", "")
            .into_iter()
            .filter_map(|pid| i32::try_from(pid).ok())
            .filter(|pid| numa::affinity(*pid).is_ok_and(|mask| masks.contains(&mask)))
            .filter_map(|pid| self.is_newcomer(root, pid))
            .filter(|id| !claimed.contains(id))
            .collect()
    }
}

/// Threads met by one visit to a process.
#[derive(Default)]
struct Visit {
    /// As they should be.
    right: u64,
    changed: u64,
    skipped: BTreeMap<&'static str, u64>,
    gone: bool,
}

impl Visit {
    /// Whether every thread was right before the visit.
    fn is_complete(&self) -> bool {
        self.changed == 0 && self.skipped.is_empty() && !self.gone
    }
}

/// Places the threads of one process. `complete`: all were placed before, so somebody set a free thread free.
fn place(
    root: &Root,
    plan: &Plan,
    id: ProcessId,
    machine: &Cpus,
    complete: bool,
) -> Result<Visit, PlatformError> {
    let mut visit = Visit::default();
    let Some(threads) = threads_of(root, id)? else {
        visit.gone = true;
        return Ok(visit);
    };
    let goal = plan.ours_of(id);
    let ours = goal.unwrap_or(&plan.ours).and(&machine.online);
    if ours.is_empty() {
        // The kernel has set them free. When the CPUs come back they may be placed again.
        visit.skipped.insert(OFFLINE, threads.len() as u64);
        return Ok(visit);
    }
    for thread in threads {
        let seen = match numa::affinity(thread) {
            Ok(seen) => seen,
            Err(NumaError::NoProcess) => continue,
            Err(error) => return Err(numa_error(id, error)),
        };
        if plan.is_ours(id, &seen, &machine.online) {
            visit.right += 1;
            continue;
        }
        let is_free = plan.is_free(root, id, thread, &seen, &machine.online);
        let Some(goal) = goal.filter(|_| is_free && !complete) else {
            if is_free && goal.is_none() {
                // A newcomer that did not inherit a place. To choose one would be a guess.
                visit.right += 1;
                continue;
            }
            return Err(PlatformError::Conflict {
                what: format!("affinity of thread {thread} of process {id}"),
                expected: format!("CPUs {ours}"),
                found: format!("CPUs {seen}"),
            });
        };
        match numa::set_affinity(thread, goal) {
            Ok(()) => visit.changed += 1,
            Err(NumaError::NoProcess) => {}
            Err(NumaError::Busy) => *visit.skipped.entry(DEADLINE).or_default() += 1,
            Err(error) => return Err(numa_error(id, error)),
        }
    }
    Ok(visit)
}

/// Gives the threads of one process that have homeostat's mask their old masks back.
fn give_back(root: &Root, plan: &Plan, id: ProcessId, machine: &Cpus) -> Result<Visit, PlatformError> {
    let mut visit = Visit::default();
    let Some(threads) = threads_of(root, id)? else {
        visit.gone = true;
        return Ok(visit);
    };
    // A thread that goes back to the mask of a placement below must not run on other CPUs meanwhile.
    let in_root = plan.natural.is_some()
        || files::text(root, &format!("/proc/{}/cpuset", id.pid)).is_none_or(|path| path == "/");
    for thread in threads {
        let seen = match numa::affinity(thread) {
            Ok(seen) => seen,
            Err(NumaError::NoProcess) => continue,
            Err(error) => return Err(numa_error(id, error)),
        };
        let found = plan.found_of(root, id, thread);
        if plan.is_free(root, id, thread, &seen, &machine.online) {
            visit.right += 1;
        } else if seen.is_empty() || !plan.is_ours(id, &seen, &machine.online) {
            *visit.skipped.entry(CHANGED_BY_OTHERS).or_default() += 1;
        } else {
            match free_thread(thread, found, machine, in_root) {
                Ok(true) => visit.changed += 1,
                Ok(false) => *visit.skipped.entry(CUT).or_default() += 1,
                Err(NumaError::NoProcess) => {}
                Err(error) => return Err(numa_error(id, error)),
            }
        }
    }
    Ok(visit)
}

/// Gives one thread its mask back. `false`: it got what the kernel allows now, which differs from the mask found.
fn free_thread(thread: i32, found: &CpuMask, machine: &Cpus, in_root: bool) -> Result<bool, NumaError> {
    let wanted = found.and(&machine.online);
    let everywhere = found.or(&machine.possible.without(&machine.isolated));
    // Below a cpuset the kernel cuts the mask. When the cpuset grows, the thread gets more only if more was asked for.
    if !in_root {
        numa::set_affinity(thread, &everywhere)?;
        if numa::affinity(thread)? == wanted {
            return Ok(true);
        }
    }
    match numa::set_affinity(thread, found) {
        Ok(()) => {}
        // None of those CPUs is left. The thread may run everywhere, as the kernel itself does when a CPU goes offline.
        Err(NumaError::Invalid) => numa::set_affinity(thread, &everywhere)?,
        Err(error) => return Err(error),
    }
    Ok(numa::affinity(thread)? == wanted)
}

/// The way to one direction. Everything in it can be rebuilt from the record and the machine.
struct Task {
    plan: Plan,
    direction: Direction,
    /// Processes of this round.
    round: Vec<ProcessId>,
    at: usize,
    rounds: u8,
    changed: u64,
    right: u64,
    skipped: BTreeMap<&'static str, u64>,
    living: bool,
    complete: BTreeSet<ProcessId>,
    /// Newcomers: as the reviews saw them, or with homeostat's mask.
    newcomers: Vec<ProcessId>,
    /// Processes of other placements. In the same login session and on the same CPUs they would pass for newcomers.
    claimed: BTreeSet<ProcessId>,
}

impl Task {
    fn new(plan: Plan, direction: Direction) -> Self {
        Self {
            plan,
            direction,
            round: Vec::new(),
            at: 0,
            rounds: 0,
            changed: 0,
            right: 0,
            skipped: BTreeMap::new(),
            living: false,
            complete: BTreeSet::new(),
            newcomers: Vec::new(),
            claimed: BTreeSet::new(),
        }
    }

    fn begin_round(&mut self, root: &Root, online: &CpuMask) {
        self.round = self.plan.processes.keys().copied().collect();
        if self.direction == Direction::Undo {
            for id in self.plan.born_since(root, online, &self.claimed) {
                if !self.newcomers.contains(&id) {
                    self.newcomers.push(id);
                }
            }
        }
        self.round.extend(self.newcomers.iter().copied());
        self.rounds += 1;
        self.at = 0;
        self.changed = 0;
        self.right = 0;
        self.living = false;
        self.skipped.clear();
    }

    fn by_thread(&mut self, root: &Root) -> Result<Progress, PlatformError> {
        let begun = Instant::now();
        let machine = Cpus::read(root)?;
        let ours = self.plan.ours.and(&machine.online);
        if self.direction == Direction::Apply && ours.is_empty() {
            return Err(rejected(
                &format!("CPUs {}", self.plan.ours),
                "none of these CPUs is online any more",
            ));
        }
        if self.round.is_empty() {
            self.begin_round(root, &machine.online);
        }
        while let Some(id) = self.round.get(self.at).copied() {
            let visit = match self.direction {
                Direction::Apply => place(root, &self.plan, id, &machine, self.complete.contains(&id))?,
                Direction::Undo => give_back(root, &self.plan, id, &machine)?,
            };
            self.at += 1;
            self.changed += visit.changed;
            self.right += visit.right;
            let complete = visit.is_complete();
            for (reason, count) in visit.skipped {
                *self.skipped.entry(reason).or_default() += count;
            }
            if visit.gone {
                *self.skipped.entry(ENDED).or_default() += 1;
            } else {
                self.living = true;
                if self.direction == Direction::Apply && complete {
                    self.complete.insert(id);
                }
            }
            if begun.elapsed() >= SLICE {
                break;
            }
        }
        if self.at < self.round.len() {
            return Ok(self.progress(false));
        }
        if self.direction == Direction::Apply && !self.living {
            return Err(vanished(&self.plan.workload));
        }
        // The next round checks the changes of this one: threads born meanwhile, and whether the masks hold.
        if self.changed == 0 {
            return Ok(self.progress(true));
        }
        if self.rounds >= ROUNDS_MAX {
            return Err(PlatformError::Busy {
                what: format!("placing the threads of {}", self.plan.workload),
                why: format!("after {ROUNDS_MAX} rounds there were still new threads without the mask"),
            });
        }
        let progress = self.progress(false);
        self.round.clear();
        Ok(progress)
    }

    fn by_group(&mut self, root: &Root) -> Result<Progress, PlatformError> {
        let Some((group, found)) = &self.plan.group else {
            return Err(unsupported("no group"));
        };
        let machine = Cpus::read(root)?;
        let ours = self.plan.ours.to_string();
        if !group.exists(root) {
            return match self.direction {
                Direction::Apply => Err(vanished(&self.plan.workload)),
                Direction::Undo => {
                    self.skipped.insert(ENDED, 1);
                    Ok(self.progress(true))
                }
            };
        }
        let now = group.cpus(root).map_err(|e| group_error(group, &e))?;
        let is_ours = same_cpus(&now, &self.plan.ours, &machine);
        let is_found =
            now == *found || CpuMask::from_list(found).is_some_and(|f| same_cpus(&now, &f, &machine));
        let conflict = || PlatformError::Conflict {
            what: format!("affinity by {}/cpuset.cpus", group.path),
            expected: ours.clone(),
            found: now.clone(),
        };
        let write = |list: &str| group.set_cpus(root, list).map_err(|e| group_error(group, &e));
        match self.direction {
            Direction::Apply if is_ours => {}
            // It was homeostat's, and is not any more.
            Direction::Apply if !self.complete.is_empty() || !is_found => return Err(conflict()),
            Direction::Apply => {
                write(&ours)?;
                let back = group.cpus(root).map_err(|e| group_error(group, &e))?;
                if !same_cpus(&back, &self.plan.ours, &machine) {
                    return Err(PlatformError::Rejected {
                        what: format!("{}/cpuset.cpus", group.path),
                        value: ours,
                        errno: format!("it reads {back} afterwards"),
                    });
                }
            }
            Direction::Undo if is_found && !is_ours => {}
            Direction::Undo if is_ours => {
                if let Err(error) = group.set_cpus(root, found) {
                    // Version 1 takes no CPU that is offline now.
                    let left = CpuMask::from_list(found)
                        .map(|f| f.and(&machine.online))
                        .filter(|left| !left.is_empty());
                    match left {
                        Some(left) if group.version == 1 => write(&left.to_string())?,
                        _ => return Err(group_error(group, &error)),
                    }
                }
                let back = group.cpus(root).map_err(|e| group_error(group, &e))?;
                if back != *found {
                    self.skipped.insert(CUT, 1);
                }
            }
            Direction::Undo => {
                self.skipped.insert(CHANGED_BY_OTHERS, 1);
            }
        }
        if self.direction == Direction::Apply {
            self.complete.extend(self.plan.processes.keys().copied());
        }
        if self.skipped.is_empty() {
            self.right = self.plan.count;
        }
        Ok(self.progress(true))
    }

    fn progress(&self, done: bool) -> Progress {
        let mut skipped = self.plan.skipped.clone();
        for (reason, count) in &self.skipped {
            *skipped.entry((*reason).to_owned()).or_default() += count;
        }
        let finished = self.right + self.changed;
        let met = finished + skipped.values().sum::<u64>();
        Progress {
            done,
            finished,
            total: if done { met } else { met.max(self.plan.count) },
            skipped,
            verified: done,
            ..Progress::default()
        }
    }
}

/// Whether a list of CPUs is that set, apart from offline CPUs: version 1 of the control groups forgets those.
fn same_cpus(list: &str, cpus: &CpuMask, machine: &Cpus) -> bool {
    CpuMask::from_list(list)
        .is_some_and(|now| now == *cpus || (now.is_within(cpus) && now == cpus.and(&machine.online)))
        && !list.is_empty()
}

struct InForce {
    plan: Plan,
    complete: BTreeSet<ProcessId>,
    newcomers: Vec<ProcessId>,
    /// Where the next review begins.
    at: usize,
    /// Somebody chose otherwise: the sentence that says what was found.
    overruled: Option<String>,
}

impl InForce {
    fn new(plan: Plan, complete: BTreeSet<ProcessId>, newcomers: Vec<ProcessId>) -> Self {
        Self {
            plan,
            complete,
            newcomers,
            at: 0,
            overruled: None,
        }
    }

    /// Checks that everything is as it was left, and places new processes of the workload. [`Plan::is_newcomer`]
    /// decides both here and in an undo, so the undo finds every process placed here.
    fn review(&mut self, root: &Root, machine: &Cpus, members: &[ProcessId], begun: Instant) {
        let ours = self.plan.ours.and(&machine.online);
        if ours.is_empty() {
            // The kernel has set the threads free. When the CPUs come back they may be placed again.
            self.complete.clear();
            return;
        }
        if let Some((group, _)) = &self.plan.group {
            let now = group.cpus(root).unwrap_or_default();
            if group.exists(root) && !same_cpus(&now, &self.plan.ours, machine) {
                self.overruled = Some(format!(
                    "affinity by {}/cpuset.cpus was changed from CPUs {} to {now:?} by somebody else",
                    group.path, self.plan.ours
                ));
            }
            return;
        }
        self.newcomers.retain(|id| members.contains(id));
        let count = members.len();
        for _ in 0..count {
            let Some(id) = members.get(self.at % count).copied() else {
                break;
            };
            self.at = (self.at + 1) % count;
            if !self.plan.processes.contains_key(&id) && !self.newcomers.contains(&id) {
                if self.plan.is_newcomer(root, id.pid) != Some(id) {
                    continue;
                }
                self.newcomers.push(id);
            }
            match place(root, &self.plan, id, machine, self.complete.contains(&id)) {
                Ok(visit) if visit.gone => {
                    self.complete.remove(&id);
                }
                Ok(visit) => {
                    if visit.is_complete() {
                        self.complete.insert(id);
                    }
                }
                Err(error @ PlatformError::Conflict { .. }) => {
                    self.overruled = Some(error.to_string());
                    return;
                }
                // The next review checks again.
                Err(_) => {}
            }
            if begun.elapsed() >= REVIEW_MAX {
                return;
            }
        }
    }
}

fn rejected(value: &str, why: &str) -> PlatformError {
    PlatformError::Rejected {
        what: "thread_placement".into(),
        value: value.to_owned(),
        errno: why.to_owned(),
    }
}

fn unsupported(why: &str) -> PlatformError {
    PlatformError::Unsupported {
        what: "placement of threads".into(),
        why: why.to_owned(),
    }
}

fn vanished(workload: &WorkloadId) -> PlatformError {
    PlatformError::Vanished {
        target: format!("workload {workload}"),
    }
}

fn group_error(group: &Group, error: &std::io::Error) -> PlatformError {
    let what = format!("{}/cpuset.cpus", group.path);
    match error.raw_os_error() {
        Some(libc::EACCES | libc::EPERM | libc::EROFS) => PlatformError::Denied {
            what,
            needs: "run as root, with the control groups mounted read-write".into(),
        },
        Some(libc::ENOENT | libc::ENODEV) => PlatformError::Vanished { target: what },
        Some(libc::EBUSY | libc::EAGAIN | libc::ENOMEM | libc::EMFILE | libc::ENFILE) => {
            PlatformError::Busy {
                what,
                why: error.to_string(),
            }
        }
        _ => PlatformError::Rejected {
            what,
            value: "a list of CPUs".into(),
            errno: error.to_string(),
        },
    }
}

fn numa_error(id: ProcessId, error: NumaError) -> PlatformError {
    match error {
        NumaError::NotPermitted => denied(id),
        NumaError::NoProcess => PlatformError::Vanished {
            target: format!("process {id}"),
        },
        NumaError::NotSupported => unsupported("the kernel has no sched_setaffinity"),
        NumaError::NoMemory | NumaError::Interrupted => PlatformError::Busy {
            what: format!("placing the threads of process {id}"),
            why: error.to_string(),
        },
        error => PlatformError::Rejected {
            what: format!("affinity of process {id}"),
            value: "a mask of CPUs".into(),
            errno: error.to_string(),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use homeostat_kernel::testing::tree;
    use homeostat_model::CpuId;
    use proptest::prelude::*;

    /// A machine of 8 possible CPUs, of which 6 are online.
    fn machine(files: &[(&str, &str)]) -> (tempfile::TempDir, Root) {
        let common = [
            (ONLINE, "0-5\n"),
            (POSSIBLE, "0-7\n"),
            ("/sys/devices/system/cpu/isolated", "\n"),
            ("/sys/devices/system/cpu/nohz_full", "(null)\n"),
        ];
        tree(common.iter().chain(files))
    }

    fn action(cpus: &[u32]) -> Action {
        Action {
            id: ActionId(1),
            effector: "thread_placement".into(),
            workload: "w".into(),
            target: Target::Cpus(cpus.iter().map(|c| CpuId(*c)).collect()),
            arguments: BTreeMap::new(),
            why: String::new(),
        }
    }

    fn stat(pid: i32, parent: i32, session: i32, start: u64) -> String {
        format!(
            "{pid} (a b) S {parent} {pid} {session} 0 -1 4194304 1 0 0 0 1 2 0 0 20 0 1 0 {start} 9 9 99 1 2 3 0\n"
        )
    }

    fn id(pid: i32, start_ticks: u64) -> ProcessId {
        ProcessId { pid, start_ticks }
    }

    #[test]
    fn a_target_must_be_there_online_and_not_set_aside() {
        let (_keep, root) = machine(&[
            ("/sys/devices/system/cpu/isolated", "4\n"),
            ("/sys/devices/system/cpu/nohz_full", "3-4\n"),
        ]);
        let cpus = Cpus::read(&root).unwrap();
        let checked = |list: &[u32]| checked_target(&action(list), &cpus, false);
        assert_eq!(checked(&[2, 1, 2]), Ok(CpuMask::of([1, 2])));
        // One of them is offline: the kernel leaves it out until it comes.
        assert_eq!(checked(&[5, 6]), Ok(CpuMask::of([5, 6])));
        for wrong in [&[][..], &[6, 7], &[8], &[u32::MAX]] {
            assert!(
                matches!(checked(wrong), Err(PlatformError::Rejected { .. })),
                "{wrong:?}"
            );
        }
        for taken in [&[3][..], &[0, 4]] {
            assert!(
                matches!(checked(taken), Err(PlatformError::Conflict { .. })),
                "{taken:?}"
            );
        }
        fs::remove_file(root.path(ONLINE)).unwrap();
        assert!(matches!(
            Cpus::read(&root),
            Err(PlatformError::Unsupported { .. })
        ));
    }

    #[test]
    fn what_a_partition_has_is_no_target_and_no_room_for_others() {
        let (_keep, root) = machine(&[
            ("/sys/fs/cgroup/cpuset.cpus.effective", "0-3,5\n"),
            ("/proc/9/cgroup", "0::/wide\n"),
            ("/sys/fs/cgroup/wide/cpuset.cpus", "\n"),
            ("/sys/fs/cgroup/wide/cpuset.cpus.effective", "0-3,5\n"),
        ]);
        let cpus = Cpus::read(&root).unwrap();
        let outcome = checked_target(&action(&[4, 5]), &cpus, false);
        assert!(
            matches!(outcome, Err(PlatformError::Conflict { .. })),
            "{outcome:?}"
        );
        // Nobody chose anything about who lives beside it.
        assert_eq!(free_for(&root, id(9, 1), &cpus), Ok(CpuMask::of([0, 1, 2, 3, 5])));
    }

    #[test]
    fn a_cpuset_narrower_than_the_machine_is_somebody_s_choice() {
        let (_keep, root) = machine(&[
            ("/proc/7/cgroup", "0::/kubepods/pod1/c\n"),
            ("/sys/fs/cgroup/kubepods/pod1/c/cpuset.cpus", "2-3\n"),
            ("/sys/fs/cgroup/kubepods/pod1/c/cpuset.cpus.effective", "2-3\n"),
            ("/proc/8/cgroup", "0::/user.slice\n"),
            ("/proc/9/cgroup", "0::/wide\n"),
            ("/sys/fs/cgroup/wide/cpuset.cpus", "\n"),
            ("/sys/fs/cgroup/wide/cpuset.cpus.effective", "0-5\n"),
        ]);
        let cpus = Cpus::read(&root).unwrap();
        let free = |pid| free_for(&root, id(pid, 1), &cpus);
        assert_eq!(free(8), Ok(CpuMask::of(0..6)));
        assert_eq!(free(9), Ok(CpuMask::of(0..6)));
        match free(7) {
            Err(PlatformError::Conflict { found, .. }) => {
                assert!(found.contains("2-3") && found.contains("kubepods"), "{found}");
            }
            other => panic!("{other:?}"),
        }
        // homeostat lives in the same one: that is the machine that both were given.
        let own = format!("/proc/{}/cgroup", std::process::id());
        let path = root.path(&own);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, "0::/kubepods/pod1/c\n").unwrap();
        assert_eq!(free(7), Ok(CpuMask::of([2, 3])));
    }

    #[test]
    fn only_descendants_orphans_and_what_a_manager_started_belong_to_a_placement() {
        let (_keep, root) = machine(&[
            // The shell, the placed process, its child and grandchild.
            ("/proc/50/stat", &stat(50, 1, 50, 10)),
            ("/proc/100/stat", &stat(100, 50, 50, 1000)),
            ("/proc/101/stat", &stat(101, 100, 50, 2100)),
            ("/proc/102/stat", &stat(102, 101, 102, 2200)),
            // A command that the person starts beside it.
            ("/proc/103/stat", &stat(103, 50, 50, 2300)),
            // An orphan of the same session.
            ("/proc/104/stat", &stat(104, 1, 50, 2400)),
            // A child that was there before the record.
            ("/proc/105/stat", &stat(105, 100, 50, 1500)),
            // Started by the service manager in the same control group, and by a shell in that group.
            ("/proc/106/stat", &stat(106, 1, 106, 2500)),
            ("/proc/106/cgroup", "0::/system.slice/w.service\n"),
            ("/proc/107/stat", &stat(107, 106, 106, 2600)),
            ("/proc/107/cgroup", "0::/system.slice/w.service\n"),
            // Nobody's.
            ("/proc/108/stat", &stat(108, 1, 108, 2700)),
            ("/proc/108/cgroup", "0::/system.slice/other.service\n"),
            ("/proc/1/stat", &stat(1, 0, 1, 1)),
            ("/proc/1/cgroup", "0::/init.scope\n"),
        ]);
        let plan = Plan {
            workload: "w".into(),
            ours: CpuMask::of([0]),
            own: BTreeMap::new(),
            masks: vec![CpuMask::of([0])],
            processes: BTreeMap::from([(
                id(100, 1000),
                Found {
                    mask: CpuMask::of(0..6),
                    odd: BTreeMap::new(),
                },
            )]),
            found: CpuMask::of(0..6),
            natural: None,
            over: None,
            since: 2000,
            sessions: BTreeSet::from([50]),
            groups: BTreeSet::from(["/system.slice/w.service".to_owned()]),
            group: None,
            count: 1,
            skipped: BTreeMap::new(),
        };
        for (pid, belongs) in [
            (100, false),
            (101, true),
            (102, true),
            (103, false),
            (104, true),
            (105, false),
            (106, true),
            (107, false),
            (108, false),
            (999, false),
        ] {
            assert_eq!(plan.is_newcomer(&root, pid).is_some(), belongs, "{pid}");
        }
    }

    #[test]
    fn damaged_lists_of_threads_are_refused() {
        for text in ["0", "0:", "0:1", "0:1@", "0:@1", "x:1@2", "0:1@2,", "3-1:1@2"] {
            assert_eq!(odd_from(text), None, "{text}");
        }
        assert_eq!(odd_from(""), Some(BTreeMap::new()));
    }

    proptest! {
        #[test]
        fn threads_with_masks_of_their_own_survive_the_record(
            threads in proptest::collection::btree_map((1..100_000i32, 0..1_000_000u64), 1..255u8, 0..40),
        ) {
            let odd: BTreeMap<(i32, u64), CpuMask> = threads
                .into_iter()
                .map(|(thread, bits)| (thread, CpuMask::of((0..8).filter(|bit| bits >> bit & 1 == 1))))
                .collect();
            prop_assert_eq!(odd_from(&odd_text(&odd)), Some(odd));
        }

        #[test]
        fn no_list_of_threads_makes_it_panic(text in "[0-9:;@,-]{0,40}") {
            let _ = odd_from(&text);
        }
    }
}
