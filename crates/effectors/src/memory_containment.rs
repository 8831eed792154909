//! Limits the page cache of a streaming reader, so that its reads evict nobody else's pages.
//!
//! The action is taken for a program that loses its pages. Its target is another workload: the reader. A reader does
//! not use its pages twice, so under a small limit its old pages make room for new ones (docs/file-cache.md).
//!
//! **Apply**, cgroup version 1: moves the reader's processes into a new group below theirs (`homeostat-reader-ACTION`).
//! Other limits and controllers stay as they are. Version 2: sets `memory.high` on the group that the reader has to
//! itself. In the root group it gets a new group. Refused: a shared group in version 2; everywhere containers,
//! delegated groups and groups limited by a person. **Undo** moves the processes back and removes the group, or
//! restores the limit. A person who changes the limit or moves a process out of the group wins.
//!
//! The reader loses nothing but speed. `memory.high` refuses nothing. A version 1 limit makes system calls fail, so
//! none stays. The [`keeper`](crate::keeper) shrinks the group from moment to moment, and a dead daemon leaves nobody
//! limited. Undroppable memory of more than half the limit comes on top; in version 2 the limit doubles.

use crate::Effector;
use crate::aftercare::{Aftercare, Pass, Wanted};
use crate::fetcher::Launch;
use crate::identity::{
    NAMESPACES, ProcessStat, boot_id, malformed, namespaces, of_another_boot, require_namespaces,
};
use crate::keeper::{KeepCounts, Keeper, is_of_a_moment};
use homeostat_kernel::Root;
use homeostat_model::action::{FileReader, Target};
use homeostat_model::{
    Action, ActionId, Direction, EffectorId, Nanoseconds, ProcessId, Progress, UndoRecord, Workload,
    WorkloadId,
};
use homeostat_platform::PlatformError;
use homeostat_sensors::grouping::OWN_GROUP;
use homeostat_sensors::memory_group::{MemoryGroup, Version, hands_off, hierarchy, is_delegated};
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::time::{Duration, Instant};

/// Least memory that a reader is left with, in bytes: read-ahead of a few files, and the program itself.
pub(crate) const LIMIT_MIN: u64 = 16 * 1024 * 1024;
const PROCESSES_MAX: usize = 512;
const SLICE: Duration = Duration::from_millis(20);
/// A group that is still busy is removed a little later.
const BUSY_PAUSE: Nanoseconds = Nanoseconds::from_millis(50);
/// Pause between two slices of aftercare: a quarter of a CPU at most.
const AFTER_PAUSE: Nanoseconds = Nanoseconds::from_millis(60);
/// A group that uses this share of its limit is full, or will be soon.
const FULL_FROM: f64 = 0.9;
/// Most doublings of the limit: 64 MiB become 64 GiB.
const DOUBLINGS_MAX: u32 = 10;

/// Argument, 1 or 0: drop the pages that a moved reader has read before ([`giving_back`](crate::giving_back)). They
/// stay charged to its old group. A limit on the reader's own group reaches them by itself.
const GIVE_BACK: &str = "give_back";
/// Argument, 1 or 0: read the program's lost pages, each time that the reader is limited
/// ([`bringing_back`](crate::bringing_back)). Neither needs an undo, and both are repeated if once was not enough
/// ([`aftercare`](crate::aftercare)).
const BRING_BACK: &str = "bring_back";

/// Limits readers to a little memory.
///
/// A group of the same name that somebody made anew belongs to that person. The inode tells: the record holds the inode
/// of the reader's own group. The inode of a group made for the reader is known only to the daemon that made it. After
/// that daemon's end the name (with the number of the action and of the daemon's process) and the limit decide. In
/// version 1 any limit on homeostat's group is somebody else's, except in homeostat's own moments.
pub(super) struct MemoryContainment {
    root: Root,
    in_force: BTreeMap<ActionId, Contained>,
    /// The inodes of the groups that were made.
    made: BTreeMap<ActionId, u64>,
    /// Work when a reader is limited, and while it is.
    aftercare: Aftercare,
    /// The processes of the protected programs, oldest first.
    victims: BTreeMap<ActionId, Vec<ProcessId>>,
    /// The action reviewed last: the others come first the next time.
    last: Option<ActionId>,
    /// Keeps groups of version 1 small.
    keeper: Keeper,
}

/// A limitation in force.
struct Contained {
    plan: Plan,
    care: Care,
    victim: WorkloadId,
    /// A contrary choice by somebody, or why nothing is left to limit.
    over: Option<String>,
}

/// Aftercare that the action asks for. Actions of an earlier version ask for none.
#[derive(Clone, Copy)]
struct Care {
    gives: bool,
    brings: bool,
}

impl Care {
    fn of(action: &Action) -> Self {
        let asks = |name: &str| action.arguments.get(name).is_some_and(|value| value == "1");
        Self {
            gives: asks(GIVE_BACK),
            brings: asks(BRING_BACK),
        }
    }

    fn is_wanted(self) -> bool {
        self.gives || self.brings
    }

    /// The processes to work on now.
    fn wanted(self, root: &Root, can_bring: bool, plan: &Plan, program: &[ProcessId]) -> Wanted {
        let gives = self.gives && plan.from.as_ref().is_some_and(|from| is_full(root, from));
        Wanted {
            give_back: gives.then(|| {
                let living = plan.reader.processes.iter().filter(|p| is_alive(root, **p));
                let mut own: BTreeSet<i32> = living.map(|p| p.pid).collect();
                // Newcomers included.
                own.extend(plan.group.processes(root).unwrap_or_default());
                own
            }),
            bring_back: (self.brings && can_bring).then(|| program.to_vec()),
        }
    }
}

/// How a reader is limited, as its record says.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Plan {
    reader: FileReader,
    /// The group that is limited.
    group: MemoryGroup,
    /// Its inode, if it is the reader's own group. Unknown beforehand for a group made for the reader.
    inode: Option<u64>,
    /// Where its processes come from. `None`: they have the group to themselves and stay there.
    from: Option<MemoryGroup>,
}

impl Plan {
    /// Whether the group's limit is as it was set. In version 1 that is none, because a limit exists for a moment only.
    fn is_as_set(&self, found: Option<u64>) -> bool {
        match found {
            Some(limit) => is_ours(limit, self.reader.limit.0),
            None => self.group.is_kept_by_hand(),
        }
    }
}

impl MemoryContainment {
    pub(super) fn new(root: Root) -> Self {
        Self {
            aftercare: Aftercare::new(root.clone()),
            root,
            in_force: BTreeMap::new(),
            made: BTreeMap::new(),
            victims: BTreeMap::new(),
            last: None,
            keeper: Keeper::default(),
        }
    }

    fn survey(&self, action: &Action) -> Result<Plan, PlatformError> {
        let reader = checked_target(action)?.clone();
        let root = &self.root;
        let refused = |why: String| PlatformError::Unsupported {
            what: format!("keeping {} to a little memory", reader.workload),
            why,
        };
        let living: Vec<ProcessId> = reader
            .processes
            .iter()
            .copied()
            .filter(|p| is_alive(root, *p))
            .collect();
        let Some(first) = living.first() else {
            return Err(PlatformError::Vanished {
                target: format!("workload {}", reader.workload),
            });
        };
        let group = MemoryGroup::of(root, first.pid)
            .ok_or_else(|| refused("it is in no control group that counts memory".into()))?;
        for process in &living {
            if let Some(why) = hands_off(root, process.pid) {
                return Err(refused(why));
            }
            if MemoryGroup::of(root, process.pid).as_ref() != Some(&group) {
                return Err(refused("its processes are in several groups".into()));
            }
        }
        if is_delegated(root, first.pid, &group) {
            return Err(refused(format!("{} was delegated to somebody", group.path)));
        }
        let everybody = group
            .all_processes(root)
            .map_err(|e| fault(&group, &e))?
            .ok_or_else(|| refused(format!("too many groups are below {}", group.path)))?;
        let is_alone = everybody.iter().all(|pid| living.iter().any(|p| p.pid == *pid));
        if is_alone && !group.is_root() {
            if let Some(choice) = group.chosen(root) {
                return Err(PlatformError::Conflict {
                    what: format!("the memory of {}", reader.workload),
                    expected: "not limited by anybody".into(),
                    found: choice,
                });
            }
        }
        let is_own_of_reader = is_alone && !group.is_root();
        match group.version {
            Version::Two if is_own_of_reader => Ok(Plan {
                reader,
                inode: Some(group.inode(root).ok_or_else(|| vanished(&group))?),
                group,
                from: None,
            }),
            Version::Two if !group.is_root() => Err(refused(format!(
                "it shares the group {} with other programs; give it one of its own (systemd-run --scope, or a unit)",
                group.path
            ))),
            Version::Two if !group.takes_groups(root) => Err(refused(
                "the memory controller is off for groups below the root (cgroup.subtree_control)".into(),
            )),
            Version::One | Version::Two => {
                let made = group.below(&format!("{OWN_GROUP}{}-{}", action.id, std::process::id()));
                if made.exists(root) {
                    return Err(PlatformError::Conflict {
                        what: format!("the control group {}", made.path),
                        expected: "none of that name".into(),
                        found: "one that somebody else has made".into(),
                    });
                }
                Ok(Plan {
                    group: made,
                    inode: None,
                    from: Some(group),
                    reader,
                })
            }
        }
    }

    /// Whether somebody has since made another group of the same name.
    fn is_another(&self, action: ActionId, plan: &Plan) -> bool {
        let known = plan.inode.or_else(|| self.made.get(&action).copied());
        is_another(&self.root, &plan.group, known)
    }

    fn apply(&mut self, record: &UndoRecord, plan: &Plan) -> Result<Progress, PlatformError> {
        let root = &self.root;
        let group = &plan.group;
        let limit = plan.reader.limit.0;
        let failed = |e: io::Error| fault(group, &e);
        if self.is_another(record.action.id, plan) {
            return Err(vanished(group));
        }
        if self.aftercare.is_at_work(record.action.id) {
            // All processes were moved before: whoever has moved one away since then wins.
            return self.go_on_after(record.action.id, plan);
        }
        if plan.from.is_some() {
            match group.make(root) {
                Err(e) if e.kind() != io::ErrorKind::AlreadyExists => return Err(failed(e)),
                _ => {}
            }
            let inode = group.inode(root).ok_or_else(|| vanished(group))?;
            self.made.insert(record.action.id, inode);
        }
        match group.limit(root).map_err(failed)? {
            Some(found) if is_ours(found, limit) => {}
            Some(found) => {
                return Err(PlatformError::Conflict {
                    what: format!("the limit of {}", group.path),
                    expected: limit.to_string(),
                    found: found.to_string(),
                });
            }
            // The first process comes when all is set.
            None => {
                if plan.from.is_some() {
                    group.spare_processes(root, true).map_err(failed)?;
                }
                if !group.is_kept_by_hand() {
                    group.set_limit(root, Some(limit)).map_err(failed)?;
                }
            }
        }
        if group.is_kept_by_hand() && !self.keeper.holds(record.action.id) {
            self.keeper
                .hold(root, record.action.id, group, limit)
                .map_err(failed)?;
        }
        let mut progress = Progress {
            total: plan.reader.processes.len() as u64,
            verified: true,
            ..Progress::default()
        };
        for process in &plan.reader.processes {
            match admit(root, plan, *process)? {
                Admission::In => progress.finished += 1,
                Admission::Gone => *progress.skipped.entry("ended".into()).or_default() += 1,
                Admission::Elsewhere => {
                    *progress
                        .skipped
                        .entry("moved by somebody else".into())
                        .or_default() += 1;
                }
            }
        }
        if progress.finished == 0 {
            // Children of ended processes may be in the group.
            let inside = group.processes(root).map_err(failed)?.len() as u64;
            if inside == 0 {
                return Err(PlatformError::Vanished {
                    target: format!("workload {}", plan.reader.workload),
                });
            }
        }
        // Processes that ended since are not missing.
        progress.total = progress
            .total
            .saturating_sub(progress.skipped.get("ended").copied().unwrap_or(0))
            .max(progress.finished);
        progress.done = true;
        let care = Care::of(&record.action);
        self.in_force.insert(
            record.action.id,
            Contained {
                plan: plan.clone(),
                care,
                victim: record.action.workload.clone(),
                over: None,
            },
        );
        if care.is_wanted() {
            let program = self.victims.get(&record.action.id).map_or(&[][..], Vec::as_slice);
            let wanted = care.wanted(&self.root, self.aftercare.can_bring(), plan, program);
            self.aftercare.begin(record.action.id, wanted);
            self.after_containing(record.action.id, &mut progress);
        }
        Ok(progress)
    }

    /// The slices after the first one, which moves all processes.
    fn go_on_after(&mut self, action: ActionId, plan: &Plan) -> Result<Progress, PlatformError> {
        let failed = |e: io::Error| fault(&plan.group, &e);
        let found = plan.group.limit(&self.root).map_err(failed)?;
        if !plan.is_as_set(found) {
            return Err(PlatformError::Conflict {
                what: format!("the limit of {}", plan.group.path),
                expected: plan.reader.limit.0.to_string(),
                found: found.map_or_else(|| "none".to_owned(), |limit| limit.to_string()),
            });
        }
        let inside = plan.group.processes(&self.root).map_err(failed)?.len() as u64;
        let mut progress = Progress {
            done: true,
            total: inside,
            finished: inside,
            verified: true,
            ..Progress::default()
        };
        self.after_containing(action, &mut progress);
        Ok(progress)
    }

    /// One slice of aftercare when a reader is limited.
    fn after_containing(&mut self, action: ActionId, progress: &mut Progress) {
        match self.aftercare.go_on(action) {
            Pass::On(finished, total) => {
                progress.done = false;
                progress.pause = AFTER_PAUSE;
                (progress.finished, progress.total) = (finished, total);
            }
            Pass::Over(mut left) => progress.skipped.append(&mut left),
        }
    }

    fn undo(&mut self, record: &UndoRecord, plan: &Plan) -> Result<Progress, PlatformError> {
        self.in_force.remove(&record.action.id);
        self.aftercare.stop(record.action.id);
        let root = &self.root;
        let group = &plan.group;
        if !self.keeper.release(record.action.id) {
            // The keeper is interrupted, and the next call checks again.
            return Ok(Progress {
                total: 1,
                pause: BUSY_PAUSE,
                ..Progress::default()
            });
        }
        let done = |skipped: Option<&str>| Progress {
            done: true,
            total: 1,
            finished: u64::from(skipped.is_none()),
            skipped: skipped.map(|why| (why.to_owned(), 1)).into_iter().collect(),
            verified: true,
            ..Progress::default()
        };
        if !group.exists(root) {
            self.made.remove(&record.action.id);
            return Ok(done(None));
        }
        if self.is_another(record.action.id, plan) {
            return Ok(done(Some("its control group was made anew by somebody else")));
        }
        let failed = |e: io::Error| fault(group, &e);
        let found = group.limit(root).map_err(failed)?;
        if found.is_some_and(|limit| !is_ours(limit, plan.reader.limit.0)) {
            if plan.from.is_some() {
                // The group is theirs now, with all that follows from their limit.
                group.spare_processes(root, false).map_err(failed)?;
            }
            return Ok(done(Some("its limit was changed by somebody else")));
        }
        let Some(from) = &plan.from else {
            if found.is_some() {
                group.set_limit(root, None).map_err(failed)?;
            }
            return Ok(done(None));
        };
        // The limit goes first, so that a process that waits for memory under it goes on at once.
        if found.is_some() {
            group.set_limit(root, None).map_err(failed)?;
        }
        let begun = Instant::now();
        for pid in group.processes(root).map_err(failed)? {
            match from.take(root, pid) {
                Ok(()) => {}
                // It ended meanwhile.
                Err(e) if is_gone(&e) => {}
                Err(e) => return Err(fault(from, &e)),
            }
            if begun.elapsed() >= SLICE {
                return Ok(Progress {
                    total: 1,
                    ..Progress::default()
                });
            }
        }
        let removed = group.remove(root);
        if !group.exists(root) {
            self.made.remove(&record.action.id);
        }
        match removed {
            Ok(()) => Ok(done(None)),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(done(None)),
            // A process was born in it, or one is about to end.
            Err(e) if e.raw_os_error() == Some(libc::EBUSY) => Ok(Progress {
                total: 1,
                pause: BUSY_PAUSE,
                ..Progress::default()
            }),
            Err(e) => Err(failed(e)),
        }
    }
}

/// Whether a group exists with another inode than the known one.
fn is_another(root: &Root, group: &MemoryGroup, known: Option<u64>) -> bool {
    let now = group.inode(root);
    known.is_some() && now.is_some() && known != now
}

/// Whether a group, or one above it, has used up its limit. Only there pages left behind take the room of others. If
/// the machine alone is full, the kernel takes unused pages first.
fn is_full(root: &Root, group: &MemoryGroup) -> bool {
    std::iter::successors(Some(group.clone()), MemoryGroup::above).any(|group| {
        group
            .used_of_limit(root)
            .is_some_and(|(used, limit)| used as f64 >= FULL_FROM * limit as f64)
    })
}

/// Outcome for a process that was to be limited.
enum Admission {
    In,
    Gone,
    Elsewhere,
}

/// Moves a process into the group, unless it is there or somebody moved it elsewhere.
fn admit(root: &Root, plan: &Plan, process: ProcessId) -> Result<Admission, PlatformError> {
    if !is_alive(root, process) {
        return Ok(Admission::Gone);
    }
    let Some(now) = MemoryGroup::of(root, process.pid) else {
        return Ok(Admission::Gone);
    };
    if now == plan.group {
        return Ok(Admission::In);
    }
    if plan.from.as_ref() != Some(&now) {
        return Ok(Admission::Elsewhere);
    }
    match plan.group.take(root, process.pid) {
        Ok(()) => Ok(Admission::In),
        Err(e) if is_gone(&e) => Ok(Admission::Gone),
        Err(e) => Err(fault(&plan.group, &e)),
    }
}

impl Effector for MemoryContainment {
    fn id(&self) -> EffectorId {
        EffectorId::new("memory_containment")
    }

    fn prepare(&mut self, action: &Action) -> Result<UndoRecord, PlatformError> {
        require_live(&self.root)?;
        let plan = self.survey(action)?;
        let mut found = BTreeMap::from([
            (NAMESPACES.to_owned(), namespaces(&self.root)),
            ("group".to_owned(), plan.group.path.clone()),
            (
                "version".to_owned(),
                match plan.group.version {
                    Version::One => "1",
                    Version::Two => "2",
                }
                .to_owned(),
            ),
        ]);
        if let Some(from) = plan.from {
            found.insert("from".to_owned(), from.path);
        }
        if let Some(inode) = plan.inode {
            found.insert("inode".to_owned(), inode.to_string());
        }
        Ok(UndoRecord {
            action: action.clone(),
            boot_id: boot_id(&self.root)?,
            found,
        })
    }

    fn prepare_for(&mut self, action: &Action, members: &[ProcessId]) -> Result<UndoRecord, PlatformError> {
        let record = self.prepare(action)?;
        self.victims.insert(action.id, members.to_vec());
        Ok(record)
    }

    fn advance(&mut self, record: &UndoRecord, direction: Direction) -> Result<Progress, PlatformError> {
        require_live(&self.root)?;
        if let Some(answer) = of_another_boot(&self.root, record, direction)? {
            return Ok(answer);
        }
        require_namespaces(&self.root, record)?;
        let plan = plan_of(record)?;
        match direction {
            Direction::Apply => self.apply(record, &plan),
            Direction::Undo => self.undo(record, &plan),
        }
    }

    fn forget(&mut self, record: &UndoRecord) {
        self.in_force.remove(&record.action.id);
        self.made.remove(&record.action.id);
        self.victims.remove(&record.action.id);
        self.aftercare.forget(record.action.id);
        self.keeper.release(record.action.id);
    }

    fn helper(&self) -> Option<i32> {
        self.aftercare.helper()
    }

    fn told(&mut self) -> Vec<(WorkloadId, String)> {
        let accounts = self.aftercare.take_accounts();
        let told = accounts.into_iter().filter_map(|(action, account)| {
            // An action undone since has nothing to report.
            let contained = self.in_force.get(&action)?;
            let sentence = account.sentence(&contained.plan.reader.workload);
            Some((contained.victim.clone(), sentence))
        });
        told.collect()
    }

    fn kept_small(&self) -> Option<KeepCounts> {
        Some(self.keeper.counts())
    }

    fn stand_by(&mut self) {
        if hierarchy(&self.root).is_some_and(|(_, is_version_one)| is_version_one) {
            let _ = self.keeper.stand_by();
        }
    }

    fn start_fetcher(&mut self, launch: Launch) -> Result<(), String> {
        self.aftercare.start_fetcher(launch).map_err(|e| e.to_string())
    }

    fn adopt(&mut self, record: &UndoRecord) {
        if let Ok(plan) = plan_of(record) {
            if plan.from.is_some() {
                if let Some(inode) = plan.group.inode(&self.root) {
                    self.made.insert(record.action.id, inode);
                }
            }
            if plan.group.is_kept_by_hand() {
                let limit = plan.reader.limit.0;
                // A review reports a group that is gone. Without a thread nobody is kept small.
                let _ = self.keeper.hold(&self.root, record.action.id, &plan.group, limit);
            }
            let contained = Contained {
                plan,
                care: Care::of(&record.action),
                victim: record.action.workload.clone(),
                over: None,
            };
            self.in_force.insert(record.action.id, contained);
        }
    }

    fn tick(&mut self) {
        use std::ops::Bound::{Excluded, Unbounded};
        self.keeper.watch();
        let begun = Instant::now();
        let last = self.last.unwrap_or(ActionId(0));
        let after = self.in_force.range((Excluded(last), Unbounded));
        for (action, contained) in after.chain(self.in_force.range(..=last)) {
            let is_in_force = contained.over.is_none() && contained.care.is_wanted();
            let Some(program) = self.victims.get(action).filter(|_| is_in_force) else {
                continue;
            };
            let (root, can_bring) = (&self.root, self.aftercare.can_bring());
            self.aftercare.tick(*action, program, || {
                contained.care.wanted(root, can_bring, &contained.plan, program)
            });
            if begun.elapsed() >= SLICE {
                self.last = Some(*action);
                break;
            }
        }
    }

    fn review(&mut self, workloads: &BTreeMap<WorkloadId, Workload>) -> Vec<(WorkloadId, String)> {
        let begun = Instant::now();
        for (action, contained) in &self.in_force {
            if let Some(victim) = workloads.get(&contained.victim) {
                self.victims.insert(*action, victim.processes.clone());
            }
        }
        for (action, contained) in &mut self.in_force {
            if contained.over.is_none() && begun.elapsed() < SLICE {
                let plan = &contained.plan;
                let known = plan.inode.or_else(|| self.made.get(action).copied());
                if is_another(&self.root, &plan.group, known) {
                    contained.over = Some(format!(
                        "{OVER}{}: {} was made anew by somebody else",
                        plan.reader.workload, plan.group.path
                    ));
                    continue;
                }
                let members = workloads
                    .get(&contained.plan.reader.workload)
                    .map(|w| w.processes.as_slice())
                    .unwrap_or_default();
                contained.over = review(&self.root, plan, members);
                if contained.over.is_none() && plan.group.is_kept_by_hand() && !self.keeper.holds(*action) {
                    contained.over = Some(format!(
                        "{OVER}{}: {} was limited by somebody else for a while",
                        plan.reader.workload, plan.group.path
                    ));
                }
            }
        }
        self.in_force
            .values()
            .filter_map(|c| Some((c.victim.clone(), c.over.clone()?)))
            .collect()
    }
}

/// Reviews an action: newcomers join, and a limit too tight for undroppable memory is doubled. Returns why it is over.
fn review(root: &Root, plan: &Plan, members: &[ProcessId]) -> Option<String> {
    let name = &plan.reader.workload;
    let group = &plan.group;
    let ended = || Some(format!("{OVER}{name}: it has ended"));
    let Ok(inside) = group.processes(root) else {
        return ended();
    };
    let limit = match group.limit(root) {
        Ok(found) if plan.is_as_set(found) => found,
        Ok(other) => {
            let found = other.map_or_else(|| "none".to_owned(), |limit| limit.to_string());
            return Some(format!(
                "{OVER}{name}: the limit of {} was changed to {found} by somebody else",
                group.path
            ));
        }
        Err(_) => return ended(),
    };
    for process in members.iter().take(PROCESSES_MAX) {
        if inside.contains(&process.pid) {
            continue;
        }
        // Somebody moved those of its first processes that are elsewhere.
        if plan.reader.processes.contains(process) {
            if is_alive(root, *process) {
                return Some(format!(
                    "{OVER}{name}: process {process} was moved out of {} by somebody else",
                    group.path
                ));
            }
            continue;
        }
        // The next review checks again.
        let _ = admit(root, plan, *process);
    }
    if inside.is_empty() && members.is_empty() {
        return ended();
    }
    let limit = limit.filter(|_| !group.is_kept_by_hand())?;
    let held = group.held(root).unwrap_or(0);
    let most = plan.reader.limit.0 << DOUBLINGS_MAX;
    let mut wanted = limit;
    while held > wanted / 2 && wanted < most {
        wanted *= 2;
    }
    if wanted != limit {
        // A limit that cannot be raised stays. The next review tries again.
        let _ = group.set_limit(root, Some(wanted));
    }
    None
}

/// Start of the sentence about the end of a limitation. The strategy searches for it and the reader's name after it.
const OVER: &str = "memory_containment: ";

/// Whether a limit is the action's, doubled or not, or a momentary limit of version 1.
fn is_ours(found: u64, limit: u64) -> bool {
    is_of_a_moment(found) || (0..=DOUBLINGS_MAX).any(|doublings| found == limit << doublings)
}

fn is_alive(root: &Root, process: ProcessId) -> bool {
    ProcessStat::read(root, process).is_ok_and(|s| s.start_ticks == process.start_ticks && !s.ended)
}

fn is_gone(error: &io::Error) -> bool {
    error.raw_os_error() == Some(libc::ESRCH)
}

/// The work is impossible on files that only look like control groups.
fn require_live(root: &Root) -> Result<(), PlatformError> {
    if root.is_live() {
        return Ok(());
    }
    Err(PlatformError::Unsupported {
        what: "keeping a reader to a little memory".into(),
        why: "the files below the root are not those of the running kernel".into(),
    })
}

fn checked_target(action: &Action) -> Result<&FileReader, PlatformError> {
    let rejected = |value: String, why: &str| PlatformError::Rejected {
        what: "target of memory_containment".into(),
        value,
        errno: why.into(),
    };
    let Target::Reader(reader) = &action.target else {
        return Err(rejected("another one".into(), "a reader expected"));
    };
    for (name, value) in &action.arguments {
        if ![GIVE_BACK, BRING_BACK].contains(&name.as_str()) || !["0", "1"].contains(&value.as_str()) {
            return Err(rejected(
                format!("{name} = {value}"),
                "no arguments but give_back and bring_back expected, which are 1 or 0",
            ));
        }
    }
    if reader.workload == action.workload {
        return Err(rejected(
            reader.workload.to_string(),
            "the reader is the workload that is to be protected",
        ));
    }
    // Whole MiB: the kernel rounds to pages, and a rounded limit would look like somebody else's.
    if reader.limit.0 < LIMIT_MIN || reader.limit.0 % (1024 * 1024) != 0 {
        return Err(rejected(
            reader.limit.0.to_string(),
            "at least 16 MiB and whole MiB expected",
        ));
    }
    if reader.limit.0 > u64::MAX >> (DOUBLINGS_MAX + 4) {
        return Err(rejected(reader.limit.0.to_string(), "no such machine"));
    }
    if reader.processes.is_empty() || reader.processes.len() > PROCESSES_MAX {
        return Err(rejected(
            format!("{} processes", reader.processes.len()),
            "1 to 512 expected",
        ));
    }
    Ok(reader)
}

fn plan_of(record: &UndoRecord) -> Result<Plan, PlatformError> {
    let reader = checked_target(&record.action)?.clone();
    let version = match record.found.get("version").map(String::as_str) {
        Some("1") => Version::One,
        Some("2") => Version::Two,
        _ => return Err(malformed(record, "version")),
    };
    let group = |key: &str| {
        let path = record.found.get(key)?;
        // A damaged record must not remove anything elsewhere.
        let is_below = path.starts_with("/sys/fs/cgroup") && !path.split('/').any(|part| part == "..");
        is_below.then(|| MemoryGroup {
            path: path.clone(),
            version,
        })
    };
    let from = match record.found.get("from") {
        Some(_) => Some(group("from").ok_or_else(|| malformed(record, "from"))?),
        None => None,
    };
    // Records of an earlier version have none.
    let inode = match record.found.get("inode") {
        Some(text) => Some(text.parse().map_err(|_| malformed(record, "inode"))?),
        None => None,
    };
    Ok(Plan {
        reader,
        group: group("group").ok_or_else(|| malformed(record, "group"))?,
        inode,
        from,
    })
}

fn vanished(group: &MemoryGroup) -> PlatformError {
    PlatformError::Vanished {
        target: format!("control group {}", group.path),
    }
}

fn fault(group: &MemoryGroup, error: &io::Error) -> PlatformError {
    match error.raw_os_error() {
        Some(libc::EACCES | libc::EPERM | libc::EROFS) => PlatformError::Denied {
            what: group.path.clone(),
            needs: "run as root on the host, with /sys/fs/cgroup writable".into(),
        },
        Some(libc::ENOENT | libc::ENODEV) => vanished(group),
        _ => PlatformError::Busy {
            what: format!("limiting {}", group.path),
            why: error.to_string(),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use homeostat_kernel::testing::tree;
    use homeostat_model::Bytes;
    use std::fs;

    const GROUP: &str = "/sys/fs/cgroup/backup.service";
    const OURS: &str = "67108864\n";

    fn record(found: &[(&str, &str)]) -> UndoRecord {
        let reader = FileReader {
            workload: "backup.service".into(),
            processes: vec![ProcessId {
                pid: 7,
                start_ticks: 1,
            }],
            limit: Bytes::from_mib(64),
        };
        UndoRecord {
            action: Action {
                id: ActionId(3),
                effector: "memory_containment".into(),
                workload: "victim".into(),
                target: Target::Reader(reader),
                arguments: BTreeMap::new(),
                why: "test".into(),
            },
            boot_id: "boot".into(),
            found: found
                .iter()
                .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()))
                .collect(),
        }
    }

    /// A control group of that name is removed, and somebody makes another one with the same files.
    fn make_anew(root: &Root, path: &str, limit: &str) {
        let (old, new) = (root.path("/old"), root.path("/new"));
        // Made before the other one goes: a file system may give its inode to the next.
        fs::create_dir(&new).unwrap();
        fs::rename(root.path(path), old).unwrap();
        fs::rename(new, root.path(path)).unwrap();
        fs::write(root.path(&format!("{path}/memory.high")), limit).unwrap();
        fs::write(root.path(&format!("{path}/cgroup.procs")), "7\n").unwrap();
    }

    #[test]
    fn the_readers_own_group_is_known_by_its_inode_and_one_that_was_made_anew_is_left_alone() {
        let high = format!("{GROUP}/memory.high");
        let files = [
            ("sys/fs/cgroup/backup.service/memory.high", OURS),
            ("sys/fs/cgroup/backup.service/cgroup.procs", "7\n"),
        ];
        let limit = |root: &Root| fs::read_to_string(root.path(&high)).unwrap();
        for is_made_anew in [false, true] {
            let (_keep, root) = tree(&files);
            let group = MemoryGroup {
                path: GROUP.into(),
                version: Version::Two,
            };
            let inode = group.inode(&root).unwrap().to_string();
            let record = record(&[("group", GROUP), ("version", "2"), ("inode", &inode)]);
            let plan = plan_of(&record).unwrap();
            let mut effector = MemoryContainment::new(root.clone());
            effector.adopt(&record);
            if is_made_anew {
                // By systemd, for a person who set the limit that we would set.
                make_anew(&root, GROUP, OURS);
            }
            let told = effector.review(&BTreeMap::new());
            let is_over = told.iter().any(|(_, why)| why.contains("made anew"));
            assert_eq!(is_over, is_made_anew, "{told:?}");
            let progress = effector.undo(&record, &plan).unwrap();
            assert!(progress.done);
            if is_made_anew {
                assert_eq!(limit(&root), OURS, "theirs stays");
                assert!(progress.skipped.keys().any(|why| why.contains("made anew")));
                assert!(matches!(
                    effector.apply(&record, &plan),
                    Err(PlatformError::Vanished { .. })
                ));
                assert_eq!(limit(&root), OURS);
            } else {
                assert_eq!(limit(&root), "max\n");
            }
        }
    }

    #[test]
    fn a_group_that_was_made_for_the_reader_and_made_anew_by_somebody_else_is_not_removed() {
        let made = "/sys/fs/cgroup/homeostat-reader-3-99";
        let (_keep, root) = tree(&[
            ("sys/fs/cgroup/homeostat-reader-3-99/memory.high", OURS),
            ("sys/fs/cgroup/homeostat-reader-3-99/cgroup.procs", "7\n"),
            ("sys/fs/cgroup/cgroup.procs", ""),
        ]);
        let record = record(&[("group", made), ("version", "2"), ("from", "/sys/fs/cgroup")]);
        let plan = plan_of(&record).unwrap();
        let mut effector = MemoryContainment::new(root.clone());
        effector.adopt(&record);
        make_anew(&root, made, "max\n");
        let progress = effector.undo(&record, &plan).unwrap();
        assert!(progress.done && progress.finished == 0, "{progress:?}");
        assert!(root.path(made).is_dir());
        let moved = fs::read_to_string(root.path("/sys/fs/cgroup/cgroup.procs")).unwrap();
        assert_eq!(moved, "", "nobody is moved out of it");
    }

    #[test]
    fn the_processes_of_a_unit_that_was_delegated_are_left_alone() {
        let (_keep, root) = tree(&[
            ("sys/fs/cgroup/cgroup.controllers", "memory\n"),
            ("sys/fs/cgroup/backup.service/memory.high", "max\n"),
            ("sys/fs/cgroup/backup.service/cgroup.procs", "7\n"),
            ("proc/7/cgroup", "0::/backup.service\n"),
            (
                "proc/7/stat",
                "7 (tar) S 1 7 7 0 -1 4194304 1 0 0 0 1 2 0 0 20 0 1 0 1 9 9 9 1 2 3 0\n",
            ),
        ]);
        let action = record(&[]).action;
        let effector = MemoryContainment::new(root.clone());
        assert_eq!(effector.survey(&action).unwrap().group.path, GROUP);
        let is_noted = ["trusted.delegate", "user.delegate"].iter().any(|name| {
            let flags = rustix::fs::XattrFlags::empty();
            rustix::fs::setxattr(root.path(GROUP), *name, b"1", flags).is_ok()
        });
        if !is_noted {
            eprintln!("skipped: that it was delegated cannot be noted of a directory here");
            return;
        }
        let refused = effector.survey(&action);
        let Err(PlatformError::Unsupported { why, .. }) = &refused else {
            panic!("{refused:?}");
        };
        assert_eq!(why, "/sys/fs/cgroup/backup.service was delegated to somebody");
    }

    #[test]
    fn a_record_with_a_damaged_inode_is_malformed_and_one_without_is_of_an_earlier_version() {
        let found = [("group", GROUP), ("version", "2")];
        assert_eq!(plan_of(&record(&found)).unwrap().inode, None);
        let damaged = [found[0], found[1], ("inode", "x")];
        assert!(matches!(
            plan_of(&record(&damaged)),
            Err(PlatformError::Malformed { .. })
        ));
    }
}
