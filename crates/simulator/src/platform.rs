//! The simulated machine behind the traits of the seam.
//!
//! [`SimPlatform`] is a handle on a shared [`World`]. A daemon's memory (open meters, changes under way) belongs to the
//! handle. A crash drops the handle; a fresh one knows only the machine and the undo records.
//!
//! | effector | target | undo |
//! |---|---|---|
//! | `thread_placement` | `Cpus`: the workload's threads run only there; `memory`, `split_by`, `group_by` extend it | the restriction found |
//! | `page_placement` | `Pages`: pieces of memory move to the node, hottest first | the same pieces go back |
//! | `large_pages` | `Memory`: pieces get a large page | those pieces are split |
//! | `prefetch` | `Cpus`: their hardware prefetch is off | it is on where it was on |
//! | `placebo` | `Nothing` | nothing |

mod arguments;
mod large;
mod moves;
mod prefetch;
mod sensors;
mod slices;
mod threads;

use crate::world::{Alive, PersonChange, Program, Settings, Totals, World, WorldError, ticks};
use arguments::rejected;
use homeostat_model::action::Target;
use homeostat_model::{
    Action, ActionId, Bytes, Direction, MeterId, Nanoseconds, Progress, UndoRecord, WorkloadId,
};
use homeostat_platform::{Clock, Effectors, PlatformError};
use moves::{Moved, plan_of};
use sensors::{OpenMeter, Seen};
use slices::Task;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

/// CPU time of one change of a mask or prefetch switch.
const SWITCH_S: f64 = 50e-6;

/// Stable reasons for leaving something: they appear in histories.
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
    /// Thread placements made, or on their way in or out, by workload.
    placed: BTreeMap<ActionId, WorkloadId>,
    /// Placements with threads restored, and memory not yet.
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

    /// Totals of a program (all instances) or a workload since the start.
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

fn nanoseconds(seconds: f64) -> Nanoseconds {
    Nanoseconds::from_secs_f64(seconds)
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

/// Left alone: somebody else changed it since.
fn left_alone() -> Progress {
    Progress {
        finished: 0,
        skipped: BTreeMap::from([(CHANGED_BY_OTHERS.to_owned(), 1)]),
        ..done()
    }
}

const STARTED: &str = "started";

fn same_processes(world: &World, record: &UndoRecord) -> Option<usize> {
    let p = world.find(record.action.workload.as_str())?;
    let alive = world.programs.get(p)?.alive.as_ref()?;
    (record.found.get(STARTED).map(String::as_str) == Some(ticks(alive.started_s).to_string().as_str()))
        .then_some(p)
}

/// Executions of the processes whose memory is in the record.
const EXECUTIONS: &str = "executions";

fn note_executions(found: &mut BTreeMap<String, String>, alive: &Alive) {
    if alive.executions > 0 {
        found.insert(EXECUTIONS.to_owned(), alive.executions.to_string());
    }
}

/// Whether the processes of the record still run, with the same memory.
fn same_memory(world: &World, record: &UndoRecord) -> Option<usize> {
    let p = same_processes(world, record)?;
    let alive = world.programs.get(p)?.alive.as_ref()?;
    let noted = record
        .found
        .get(EXECUTIONS)
        .map_or(Some(0), |text| text.parse().ok())?;
    (alive.executions == noted).then_some(p)
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

    /// A placement of the same workload that lies over this one.
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

    /// Whether an undo's memory finds no room at its old place, taken by others since. The undo then stays owed.
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
