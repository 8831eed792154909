//! The hardware prefetcher, switched off and on by CPU.
//!
//! **Apply** sets the documented bits of one register of each CPU ([`control`]). **Undo** writes back the whole value
//! found. Both read a register before and after the write: a write without effect, as in some VMs, is an error.
//!
//! Rules, whatever the strategy proposes:
//! * A CPU with prefetchers partly off was set up by somebody. With no other CPU: [`PlatformError::Conflict`].
//! * On x86 the register belongs to the core. A core of which only some CPUs are meant stays as it is.
//! * A register with a third value is somebody else's choice, also after a suspend to memory: the firmware sets it
//!   anew. Apply ends in [`PlatformError::Conflict`]; undo leaves that CPU.
//! * A write by others in the microseconds between check and write is missed: no driver has compare-and-write.
//! * An offline CPU keeps its debt: undo is [`PlatformError::Busy`] until it is back, or an online sibling holds the
//!   same register. A CPU that left the machine took its register with it.
//! * A boot resets the registers and voids records. After a crash with kexec the old values pass for a person's.

pub mod control;

use self::control::{AccessError, Control, CpuLists, Obstacle, Register, State};
use crate::{Effector, identity};
use homeostat_kernel::Root;
use homeostat_kernel::bytes::list;
use homeostat_model::action::Target;
use homeostat_model::{
    Action, ActionId, Direction, EffectorId, Nanoseconds, Progress, UndoRecord, Workload, WorkloadId,
};
use homeostat_platform::{PlatformError, Reached};
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

/// Most CPUs in one action: `NR_CPUS` of the largest kernels in use.
const CPUS_MAX: usize = homeostat_kernel::bytes::LIST_MAX;
/// Length of one slice. A switch is two reads and a write, each an interrupt on that CPU: some microseconds.
const SLICE: Duration = Duration::from_millis(20);
/// Most registers checked after a scan: each check is an interrupt on that CPU.
const REVIEWED_MAX: usize = 16;
const PAUSE: Nanoseconds = Nanoseconds::from_millis(1);

// Why a CPU is left as it is. Stable: they appear in histories.
const CHANGED_BY_OTHERS: &str = "changed by somebody else";
const ALREADY_OFF: &str = "prefetch is off already";
const CHOSEN: &str = "prefetch is partly off: somebody chose";
const SHARED_CORE: &str = "shares its core with a CPU that is not meant";
const OTHER_SWITCH: &str = "an efficiency core: its switch is another";
const OFFLINE: &str = "offline";
const GONE: &str = "left the machine";

pub(super) struct Prefetch {
    root: Root,
    tasks: BTreeMap<ActionId, Task>,
}

impl Prefetch {
    pub(super) fn new(root: Root) -> Self {
        Self {
            root,
            tasks: BTreeMap::new(),
        }
    }
}

/// Memory of an action. Lost in a crash; undo does without. A CPU belongs to one action at a time.
#[derive(Clone, Debug, Default)]
struct Task {
    /// The CPUs of the action.
    cpus: BTreeSet<u32>,
    /// The state in which it was left when it was last done.
    left: Option<Direction>,
    /// The direction under way, and how far.
    way: Option<Direction>,
    cursor: usize,
    finished: u64,
    skipped: BTreeMap<&'static str, u64>,
    waiting: Vec<u32>,
    /// Registers checked before Apply is made again.
    looked: usize,
    /// The first fault of an undo: one refusing register does not keep the others from being restored.
    failed: Option<PlatformError>,
    /// CPUs that were offline when the action was last done: their registers may have either value.
    missed: BTreeSet<u32>,
    /// CPUs written, if this process made the action. Others need no undo.
    written: Option<BTreeSet<u32>>,
    /// The plan while the change is in force, and its next CPU to check.
    in_force: Option<(WorkloadId, Plan)>,
    reviewed: usize,
    /// A choice by somebody else.
    overruled: Option<String>,
}

impl Task {
    /// Starts over when the direction is new.
    fn head(&mut self, direction: Direction) {
        if self.way != Some(direction) {
            // After a change of direction half way, homeostat's own writes must not look like somebody else's.
            self.left = self.left.filter(|left| *left == direction);
            self.way = Some(direction);
            self.cursor = 0;
            self.finished = 0;
            self.skipped.clear();
            self.waiting.clear();
            self.looked = 0;
            self.failed = None;
        }
    }
    fn skip(&mut self, why: &'static str) {
        *self.skipped.entry(why).or_default() += 1;
    }
    fn leave(&mut self, direction: Direction, missed: BTreeSet<u32>) {
        self.left = Some(direction);
        self.way = None;
        self.missed = missed;
    }
}

impl Effector for Prefetch {
    fn id(&self) -> EffectorId {
        EffectorId::new("prefetch")
    }

    fn prepare(&mut self, action: &Action) -> Result<UndoRecord, PlatformError> {
        let wanted = wanted_cpus(action)?;
        let (control, _) = control::probe(&self.root).map_err(|obstacle| match obstacle {
            Obstacle::Impossible(why) => unsupported(why),
            Obstacle::Remediable(what, needs) => PlatformError::Denied {
                what: format!("switching the hardware prefetcher: {what}"),
                needs: needs.into(),
            },
        })?;
        let others = self.tasks.iter().filter(|(id, _)| **id != action.id);
        if let Some((holder, _)) = others
            .into_iter()
            .find(|(_, task)| !task.cpus.is_disjoint(&wanted))
        {
            // Also while the other action is off for a block: each would take the other for somebody else.
            return Err(PlatformError::Busy {
                what: "hardware prefetch".into(),
                why: format!("action {holder} has some of these CPUs until it is undone"),
            });
        }
        let mut survey = Survey::default();
        survey.take(&self.root, control, &wanted)?;
        let found = survey.record(control)?;
        // Done before anything is remembered: a refused action gets no `forget`, and would hold its CPUs for ever.
        let boot_id = identity::boot_id(&self.root)?;
        self.tasks.insert(
            action.id,
            Task {
                cpus: wanted,
                written: Some(BTreeSet::new()),
                ..Task::default()
            },
        );
        Ok(UndoRecord {
            action: action.clone(),
            boot_id,
            found,
        })
    }

    fn advance(&mut self, record: &UndoRecord, direction: Direction) -> Result<Progress, PlatformError> {
        if let Some(done) = identity::of_another_boot(&self.root, record, direction)? {
            return Ok(done);
        }
        let plan = Plan::of(record)?;
        let task = self.tasks.entry(record.action.id).or_default();
        if task.cpus.is_empty() {
            task.cpus = plan.steps.iter().map(|s| s.cpu).collect();
        }
        // Every register is checked anew.
        task.in_force = None;
        task.overruled = None;
        let outcome = task.advance(&self.root, &plan, direction);
        match &outcome {
            Ok(progress) if progress.done && direction == Direction::Apply => {
                task.in_force = Some((record.action.workload.clone(), plan));
            }
            Ok(_) => {}
            // The next call starts over, from the registers.
            Err(_) => {
                task.way = None;
                task.looked = 0;
            }
        }
        outcome
    }

    fn forget(&mut self, record: &UndoRecord) {
        self.tasks.remove(&record.action.id);
    }

    fn inherit(&mut self, record: &UndoRecord, reached: Reached) {
        let Ok(plan) = Plan::of(record) else {
            // The undo reports a record that is not understood.
            return;
        };
        // If it was made, the registers say enough. If it was only begun, each may have either value, and neither is
        // somebody else's. So it is not taken over as in force.
        if reached != Reached::Made {
            let task = self.tasks.entry(record.action.id).or_default();
            task.cpus = plan.steps.iter().map(|s| s.cpu).collect();
            task.left = (reached == Reached::PutBack).then_some(Direction::Undo);
        }
    }

    /// Keeps the review going: otherwise the next probe would switch off a register that somebody set in between.
    fn adopt(&mut self, record: &UndoRecord) {
        let id = record.action.id;
        // An action that is only begun, or that recovery has begun to undo, is not in force as a whole.
        if self.tasks.contains_key(&id) {
            return;
        }
        // The undo reports a record that is not understood.
        if let Ok(plan) = Plan::of(record) {
            let lists = CpuLists::read(&self.root);
            let cpus: BTreeSet<u32> = plan.steps.iter().map(|s| s.cpu).collect();
            let task = Task {
                // A CPU offline at Apply and back since passes for one that somebody switched on. Its end is harmless.
                missed: cpus
                    .iter()
                    .copied()
                    .filter(|cpu| !lists.is_online(*cpu))
                    .collect(),
                cpus,
                left: Some(Direction::Apply),
                in_force: Some((record.action.workload.clone(), plan)),
                ..Task::default()
            };
            self.tasks.insert(id, task);
        }
    }

    fn review(&mut self, _workloads: &BTreeMap<WorkloadId, Workload>) -> Vec<(WorkloadId, String)> {
        let mut told = Vec::new();
        for task in self.tasks.values_mut() {
            task.review(&self.root);
            if let (Some((workload, _)), Some(sentence)) = (&task.in_force, &task.overruled) {
                told.push((workload.clone(), sentence.clone()));
            }
        }
        told
    }
}

fn unsupported(why: impl Into<String>) -> PlatformError {
    PlatformError::Unsupported {
        what: "switching the hardware prefetcher".into(),
        why: why.into(),
    }
}

/// The CPUs of the action, each once, ascending.
fn wanted_cpus(action: &Action) -> Result<BTreeSet<u32>, PlatformError> {
    let rejected = |what: &str, value: String, expected: &str| PlatformError::Rejected {
        what: what.into(),
        value,
        errno: format!("expected {expected}"),
    };
    if let Some((name, value)) = action.arguments.iter().next() {
        return Err(rejected(
            &format!("argument {name} of prefetch"),
            value.clone(),
            "no argument",
        ));
    }
    let Target::Cpus(cpus) = &action.target else {
        return Err(rejected("target of prefetch", "no CPUs".into(), "CPUs"));
    };
    let cpus: BTreeSet<u32> = cpus.iter().map(|c| c.0).collect();
    if cpus.is_empty() || cpus.len() > CPUS_MAX {
        return Err(rejected(
            "target of prefetch",
            format!("{} CPUs", cpus.len()),
            &format!("1 to {CPUS_MAX} CPUs"),
        ));
    }
    Ok(cpus)
}

fn fault(register: Register, cpu: u32, doing: &str, error: AccessError) -> PlatformError {
    let what = format!("{doing} {register} of CPU {cpu}");
    match error {
        AccessError::Offline => PlatformError::Busy {
            what,
            why: "the CPU is offline; possible when it is back".into(),
        },
        AccessError::Absent(path) => PlatformError::Unsupported {
            what,
            why: format!("{path} is absent (modprobe msr)"),
        },
        AccessError::Denied(errno) => PlatformError::Denied {
            what: format!("{what} ({errno})"),
            needs: "run homeostat as root with CAP_SYS_RAWIO, without lockdown, with msr.allow_writes=on"
                .into(),
        },
        e @ AccessError::Refused(_) => PlatformError::Unsupported {
            what,
            why: e.to_string(),
        },
        AccessError::Malformed(line) => PlatformError::Malformed {
            path: what.into(),
            line,
        },
        AccessError::Other(errno) => PlatformError::Busy {
            what,
            why: errno.to_string(),
        },
    }
}

#[derive(Default)]
struct Survey {
    /// CPUs whose prefetchers are on, by the value of their register.
    on: BTreeMap<u64, Vec<u32>>,
    /// Cores of which several CPUs are meant.
    cores: Vec<Vec<u32>>,
    skipped: BTreeMap<&'static str, Vec<u32>>,
}

impl Survey {
    fn take(&mut self, root: &Root, control: Control, wanted: &BTreeSet<u32>) -> Result<(), PlatformError> {
        let lists = CpuLists::read(root);
        if let Some(cpu) = wanted.iter().find(|c| !lists.is_present(**c)) {
            return Err(PlatformError::Rejected {
                what: "target of prefetch".into(),
                value: format!("CPU {cpu}"),
                errno: "the machine has no such CPU".into(),
            });
        }
        let hybrid = control::efficiency_cores(root);
        for cpu in wanted {
            if !lists.is_online(*cpu) {
                self.skip(OFFLINE, *cpu);
                continue;
            }
            if hybrid.contains(cpu) {
                self.skip(OTHER_SWITCH, *cpu);
                continue;
            }
            if matches!(control.register, Register::Msr(_)) {
                let core = control::siblings(root, *cpu);
                if core.iter().any(|s| !wanted.contains(s)) {
                    self.skip(SHARED_CORE, *cpu);
                    continue;
                }
                if core.len() > 1 && core.first() == Some(cpu) {
                    self.cores.push(core);
                }
            }
            match control::read(root, control.register, *cpu) {
                Ok(value) => match control.state(value) {
                    State::On => self.on.entry(value).or_default().push(*cpu),
                    State::Off => self.skip(ALREADY_OFF, *cpu),
                    State::Chosen => self.skip(CHOSEN, *cpu),
                },
                Err(AccessError::Offline) => self.skip(OFFLINE, *cpu),
                Err(e) => return Err(fault(control.register, *cpu, "reading", e)),
            }
        }
        Ok(())
    }

    fn skip(&mut self, why: &'static str, cpu: u32) {
        self.skipped.entry(why).or_default().push(cpu);
    }

    /// The record, if there is anything to do.
    ///
    /// It names the register and, for each pair of values (found, ours), the CPUs: `cpus.0x0.0xf = 0-15`.
    fn record(self, control: Control) -> Result<BTreeMap<String, String>, PlatformError> {
        if self.on.is_empty() {
            let reasons: Vec<String> = self
                .skipped
                .iter()
                .map(|(why, cpus)| format!("{why} on CPUs {}", text_of(cpus)))
                .collect();
            let what = "hardware prefetch".to_owned();
            let is = |why| self.skipped.contains_key(why);
            return Err(if is(ALREADY_OFF) || is(CHOSEN) {
                PlatformError::Conflict {
                    what,
                    expected: "on".into(),
                    found: reasons.join("; "),
                }
            } else if is(OFFLINE) {
                PlatformError::Busy {
                    what,
                    why: reasons.join("; "),
                }
            } else {
                unsupported(reasons.join("; "))
            });
        }
        let mut found = BTreeMap::from([("register".to_owned(), control.register.to_string())]);
        for (value, cpus) in &self.on {
            let name = format!("cpus.{value:#x}.{:#x}", control.switched_off(*value));
            found.insert(name, text_of(cpus));
        }
        let cores: Vec<String> = self
            .cores
            .iter()
            .map(|core| {
                let numbers: Vec<String> = core.iter().map(u32::to_string).collect();
                numbers.join("+")
            })
            .collect();
        if !cores.is_empty() {
            found.insert("cores".to_owned(), cores.join(","));
        }
        for (why, cpus) in self.skipped {
            found.insert(format!("skipped.{why}"), text_of(&cpus));
        }
        Ok(found)
    }
}

/// Ascending numbers as `0-3,8`.
fn text_of(cpus: &[u32]) -> String {
    let runs = cpus.chunk_by(|a, b| a + 1 == *b).filter_map(|run| {
        let (first, last) = (run.first()?, run.last()?);
        Some(if first == last {
            first.to_string()
        } else {
            format!("{first}-{last}")
        })
    });
    runs.collect::<Vec<_>>().join(",")
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Step {
    cpu: u32,
    found: u64,
    ours: u64,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Plan {
    register: Register,
    steps: Vec<Step>,
    cores: Vec<Vec<u32>>,
    found_skipped: BTreeMap<String, u64>,
}

impl Plan {
    fn of(record: &UndoRecord) -> Result<Self, PlatformError> {
        let wrong = |name: &str| PlatformError::Malformed {
            path: format!("undo record {}", record.action.id).into(),
            line: format!("{name} = {}", record.found.get(name).map_or("", String::as_str)),
        };
        let register = record
            .found
            .get("register")
            .and_then(|t| Register::parse(t))
            .ok_or_else(|| wrong("register"))?;
        let mut steps = Vec::new();
        let mut found_skipped = BTreeMap::new();
        let hex = |text: &str| u64::from_str_radix(text.strip_prefix("0x")?, 16).ok();
        for (name, text) in &record.found {
            if let Some(pair) = name.strip_prefix("cpus.") {
                let (found, ours) = pair
                    .split_once('.')
                    .and_then(|(a, b)| Some((hex(a)?, hex(b)?)))
                    .ok_or_else(|| wrong(name))?;
                let cpus = list(text.as_bytes())
                    .filter(|l| !l.is_empty())
                    .ok_or_else(|| wrong(name))?;
                steps.extend(cpus.into_iter().map(|cpu| Step { cpu, found, ours }));
            } else if let Some(why) = name.strip_prefix("skipped.") {
                let cpus = list(text.as_bytes()).ok_or_else(|| wrong(name))?;
                found_skipped.insert(why.to_owned(), cpus.len() as u64);
            }
        }
        steps.sort_by_key(|s| s.cpu);
        if steps.is_empty() || steps.windows(2).any(|w| matches!(w, [a, b] if a.cpu == b.cpu)) {
            return Err(wrong("cpus"));
        }
        let cores = record
            .found
            .get("cores")
            .map_or("", String::as_str)
            .split(',')
            .filter(|c| !c.is_empty())
            .map(|core| {
                core.split('+')
                    .map(|n| n.parse().ok())
                    .collect::<Option<Vec<u32>>>()
            })
            .collect::<Option<Vec<_>>>()
            .ok_or_else(|| wrong("cores"))?;
        Ok(Self {
            register,
            steps,
            cores,
            found_skipped,
        })
    }

    /// Whether an online sibling shares the register of this CPU.
    fn has_sibling_online(&self, cpu: u32, lists: &CpuLists) -> bool {
        self.cores
            .iter()
            .filter(|core| core.contains(&cpu))
            .flatten()
            .any(|other| *other != cpu && lists.is_online(*other))
    }
}

struct Slice {
    started: Instant,
    inside: Duration,
    longest: Duration,
}

impl Slice {
    fn timed<T>(&mut self, call: impl FnOnce() -> T) -> T {
        let before = Instant::now();
        let outcome = call();
        let took = before.elapsed();
        self.inside += took;
        self.longest = self.longest.max(took);
        outcome
    }
}

/// Outcome for one CPU in one call.
enum Outcome {
    Finished,
    Skipped(&'static str),
    /// Offline, with an undo owed to it.
    Waiting,
}

impl Task {
    fn advance(&mut self, root: &Root, plan: &Plan, direction: Direction) -> Result<Progress, PlatformError> {
        let lists = CpuLists::read(root);
        let mut slice = Slice {
            started: Instant::now(),
            inside: Duration::ZERO,
            longest: Duration::ZERO,
        };
        let is_again =
            direction == Direction::Apply && self.way.is_none() && self.left == Some(Direction::Undo);
        if is_again && !self.leave_the_chosen(root, plan, &lists, &mut slice)? {
            return Ok(Progress {
                finished: 0,
                skipped: BTreeMap::new(),
                ..self.progress(plan, &slice, false)
            });
        }
        self.head(direction);
        while let Some(step) = plan.steps.get(self.cursor) {
            if slice.started.elapsed() >= SLICE {
                return Ok(self.progress(plan, &slice, false));
            }
            let outcome = match direction {
                Direction::Apply => Ok(self.switch_off(root, plan, *step, &lists, &mut slice)?),
                Direction::Undo => self.switch_back(root, plan, *step, &lists, &mut slice),
            };
            match outcome {
                Ok(Outcome::Finished) => self.finished += 1,
                Ok(Outcome::Skipped(why)) => self.skip(why),
                Ok(Outcome::Waiting) => self.waiting.push(step.cpu),
                Err(e) => {
                    self.failed.get_or_insert(e);
                }
            }
            self.cursor += 1;
        }
        if let Some(error) = self.failed.take() {
            return Err(error);
        }
        if !self.waiting.is_empty() {
            return Err(PlatformError::Busy {
                what: format!(
                    "switching the hardware prefetcher of CPUs {} on again",
                    text_of(&self.waiting)
                ),
                why: "they are offline; possible when they are back".into(),
            });
        }
        let progress = self.progress(plan, &slice, true);
        let missed = plan
            .steps
            .iter()
            .map(|s| s.cpu)
            .filter(|cpu| !lists.is_online(*cpu))
            .collect();
        self.leave(direction, missed);
        Ok(progress)
    }

    fn progress(&self, plan: &Plan, slice: &Slice, done: bool) -> Progress {
        let mut skipped = plan.found_skipped.clone();
        for (why, count) in &self.skipped {
            *skipped.entry((*why).to_owned()).or_default() += count;
        }
        Progress {
            done,
            finished: self.finished,
            total: plan.steps.len() as u64 + plan.found_skipped.values().sum::<u64>(),
            skipped,
            stalled: Nanoseconds(slice.inside.as_nanos() as u64),
            longest_call: Nanoseconds(slice.longest.as_nanos() as u64),
            pause: if done { Nanoseconds::ZERO } else { PAUSE },
            verified: done,
            ..Progress::default()
        }
    }

    /// Checks the next registers of a change in force, in turn. Another value is a person's: the change is withdrawn.
    fn review(&mut self, root: &Root) {
        let Some((_, plan)) = &self.in_force else {
            return;
        };
        let lists = CpuLists::read(root);
        for _ in 0..plan.steps.len().min(REVIEWED_MAX) {
            let Some(step) = plan.steps.get(self.reviewed % plan.steps.len()) else {
                return;
            };
            self.reviewed = (self.reviewed + 1) % plan.steps.len();
            // A CPU that was offline may come back as the firmware sets it. The next block handles that.
            if !lists.is_online(step.cpu) || self.missed.contains(&step.cpu) {
                continue;
            }
            // An unreadable register says nothing about anybody's choice.
            if let Ok(now) = control::read(root, plan.register, step.cpu) {
                if now != step.ours {
                    self.overruled = Some(format!(
                        "hardware prefetch of CPU {} was set by somebody else: {} is {now:#x}, not {:#x}",
                        step.cpu, plan.register, step.ours
                    ));
                    return;
                }
            }
        }
    }

    /// The register's value, unless the CPU is offline.
    fn look(
        root: &Root,
        plan: &Plan,
        cpu: u32,
        lists: &CpuLists,
        slice: &mut Slice,
    ) -> Result<Option<u64>, PlatformError> {
        if !lists.is_online(cpu) {
            return Ok(None);
        }
        match slice.timed(|| control::read(root, plan.register, cpu)) {
            Ok(value) => Ok(Some(value)),
            Err(AccessError::Offline) => Ok(None),
            // The device goes before the list of CPUs shows it.
            Err(AccessError::Absent(_)) if !CpuLists::read(root).is_online(cpu) => Ok(None),
            Err(e) => Err(fault(plan.register, cpu, "reading", e)),
        }
    }

    /// Finds registers with homeostat's value although they were left as found: somebody chose that value, and it is
    /// theirs. All are checked, by slices, before a write, so that the undo that follows touches none. True when done.
    ///
    /// # Errors
    /// Somebody chose such a value.
    fn leave_the_chosen(
        &mut self,
        root: &Root,
        plan: &Plan,
        lists: &CpuLists,
        slice: &mut Slice,
    ) -> Result<bool, PlatformError> {
        while let Some(step) = plan.steps.get(self.looked) {
            if slice.started.elapsed() >= SLICE {
                return Ok(false);
            }
            if !self.missed.contains(&step.cpu) {
                if let Some(now) = Self::look(root, plan, step.cpu, lists, slice)? {
                    if now == step.ours {
                        return Err(conflict(plan, step.cpu, step.found, now));
                    }
                }
            }
            self.looked += 1;
        }
        self.looked = 0;
        Ok(true)
    }

    /// Writes and reads back.
    fn put(
        root: &Root,
        plan: &Plan,
        step: Step,
        before: u64,
        value: u64,
        slice: &mut Slice,
    ) -> Result<(), PlatformError> {
        slice
            .timed(|| control::write(root, plan.register, step.cpu, value))
            .map_err(|e| fault(plan.register, step.cpu, "writing", e))?;
        let now = control::read(root, plan.register, step.cpu)
            .map_err(|e| fault(plan.register, step.cpu, "reading back", e))?;
        if now == value {
            Ok(())
        } else if now == before {
            Err(unsupported(format!(
                "writing {value:#x} to {} of CPU {} had no effect; a hypervisor may swallow it",
                plan.register, step.cpu
            )))
        } else {
            Err(conflict(plan, step.cpu, value, now))
        }
    }

    fn switch_off(
        &mut self,
        root: &Root,
        plan: &Plan,
        step: Step,
        lists: &CpuLists,
        slice: &mut Slice,
    ) -> Result<Outcome, PlatformError> {
        let Some(now) = Self::look(root, plan, step.cpu, lists, slice)? else {
            return Ok(Outcome::Skipped(if lists.is_present(step.cpu) {
                OFFLINE
            } else {
                GONE
            }));
        };
        if now == step.ours {
            return Ok(Outcome::Finished);
        }
        // It has the value found although it was left changed: somebody else did that.
        let undone_by_others = self.left == Some(Direction::Apply) && !self.missed.contains(&step.cpu);
        if now != step.found || undone_by_others {
            return Err(conflict(plan, step.cpu, step.ours, now));
        }
        // Noted first: a write that fails half way may have happened.
        if let Some(written) = &mut self.written {
            written.insert(step.cpu);
        }
        Self::put(root, plan, step, now, step.ours, slice)?;
        Ok(Outcome::Finished)
    }

    fn switch_back(
        &mut self,
        root: &Root,
        plan: &Plan,
        step: Step,
        lists: &CpuLists,
        slice: &mut Slice,
    ) -> Result<Outcome, PlatformError> {
        let Some(now) = Self::look(root, plan, step.cpu, lists, slice)? else {
            let untouched = self.written.as_ref().is_some_and(|w| !w.contains(&step.cpu));
            return Ok(if !lists.is_present(step.cpu) {
                Outcome::Skipped(GONE)
            } else if untouched || plan.has_sibling_online(step.cpu, lists) {
                Outcome::Skipped(OFFLINE)
            } else {
                Outcome::Waiting
            });
        };
        if now == step.found {
            return Ok(Outcome::Finished);
        }
        // It has homeostat's value although it was left as found: somebody else did that.
        let redone_by_others = self.left == Some(Direction::Undo) && !self.missed.contains(&step.cpu);
        if now != step.ours || redone_by_others {
            return Ok(Outcome::Skipped(CHANGED_BY_OTHERS));
        }
        Self::put(root, plan, step, now, step.found, slice)?;
        Ok(Outcome::Finished)
    }
}

fn conflict(plan: &Plan, cpu: u32, expected: u64, found: u64) -> PlatformError {
    PlatformError::Conflict {
        what: format!("hardware prefetch of CPU {cpu} ({})", plan.register),
        expected: format!("{expected:#x}"),
        found: format!("{found:#x}"),
    }
}

#[cfg(test)]
mod tests;
