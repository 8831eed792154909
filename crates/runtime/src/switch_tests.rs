//! What the journal says of a change that is switched on and off, at each moment at which the machine is written to.

use crate::Runtime;
use homeostat_engine::{Event, FaultKind, Policy};
use homeostat_model::action::Target;
use homeostat_model::{
    Action, ActionId, Bytes, Direction, Locality, Machine, MemoryMap, MeterCandidate, MeterId, Nanoseconds,
    Progress, Snapshot, UndoRecord, WorkloadId,
};
use homeostat_platform::{Clock, Effectors, LostMeter, PlatformError, SampleRequest, Sensors};
use homeostat_store::journal::{self, OwedState};
use homeostat_store::{HistoryOptions, Journal, JournalOptions, ResilientHistory};
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

const BOOT: &str = "boot-of-switches";
const ID: ActionId = ActionId(1);

struct Still;

impl Clock for Still {
    fn now(&self) -> Nanoseconds {
        Nanoseconds::ZERO
    }
    fn unix_seconds(&self) -> u64 {
        0
    }
    fn sleep(&self, _: Nanoseconds) {}
}

/// Asks the journal on disk what it says whenever it is to change something.
#[derive(Clone, Default)]
struct Asking {
    directory: PathBuf,
    said: Rc<RefCell<Vec<(Direction, OwedState)>>>,
    forgotten: Rc<Cell<u32>>,
    /// What the next sample has lost.
    lost: Rc<RefCell<Vec<LostMeter>>>,
}

fn nobody() -> PlatformError {
    PlatformError::Vanished {
        target: "nobody".into(),
    }
}

impl Sensors for Asking {
    fn machine(&mut self) -> Result<Machine, PlatformError> {
        Ok(Machine {
            kernel: "test".into(),
            cpu_model: "test".into(),
            hypervisor: None,
            cpus: vec![],
            nodes: vec![],
            memory: Bytes::from_mib(4096),
            page_size: Bytes(4096),
            huge_page_size: Bytes::from_mib(2),
            llc_size: Bytes::ZERO,
            boot_id: BOOT.into(),
            capabilities: vec![],
        })
    }
    fn sample(&mut self, _: &SampleRequest) -> Result<Snapshot, PlatformError> {
        Err(nobody())
    }
    fn inspect_memory(&mut self, _: &WorkloadId) -> Result<MemoryMap, PlatformError> {
        Err(nobody())
    }
    fn inspect_locality(&mut self, _: &WorkloadId) -> Result<Locality, PlatformError> {
        Err(nobody())
    }
    fn find_meters(&mut self, _: &WorkloadId) -> Result<Vec<MeterCandidate>, PlatformError> {
        Err(nobody())
    }
    fn open_meter(&mut self, _: &WorkloadId, _: &MeterId) -> Result<(), PlatformError> {
        Err(nobody())
    }
    fn close_meter(&mut self, _: &WorkloadId, _: &MeterId) {}
    fn take_lost_meters(&mut self) -> Vec<LostMeter> {
        self.lost.take()
    }
}

impl Effectors for Asking {
    fn prepare(&mut self, action: &Action) -> Result<UndoRecord, PlatformError> {
        Ok(UndoRecord {
            action: action.clone(),
            boot_id: BOOT.into(),
            found: BTreeMap::new(),
        })
    }
    fn advance(&mut self, _: &UndoRecord, direction: Direction) -> Result<Progress, PlatformError> {
        self.said.borrow_mut().push((direction, on_disk(&self.directory)));
        Ok(Progress {
            done: true,
            verified: true,
            ..Progress::default()
        })
    }
    fn forget(&mut self, _: &UndoRecord) {
        self.forgotten.set(self.forgotten.get() + 1);
    }
}

fn on_disk(directory: &Path) -> OwedState {
    journal::read(directory).unwrap().owed[&ID].state
}

fn action() -> Action {
    Action {
        id: ID,
        effector: "asking".into(),
        workload: "host".into(),
        target: Target::Nothing,
        arguments: BTreeMap::new(),
        why: "test".into(),
    }
}

/// A loop on that machine, whose journal cannot be written while the switch is on.
fn runtime(directory: &Path, broken: &Arc<AtomicBool>) -> (Runtime<Asking, Still>, Asking) {
    let machine = Asking {
        directory: directory.to_owned(),
        ..Asking::default()
    };
    let broken = broken.clone();
    let options = JournalOptions {
        fault: Some(Box::new(move |_| match broken.load(Ordering::Relaxed) {
            true => Err(std::io::Error::other("disk error")),
            false => Ok(()),
        })),
        ..JournalOptions::default()
    };
    let (journal, _) = Journal::open(directory, options).unwrap();
    let history = ResilientHistory::open(&directory.join("history.db"), HistoryOptions::default(), 0);
    let (runtime, _) = Runtime::start(
        machine.clone(),
        Still,
        journal,
        history,
        Vec::new(),
        Policy::default(),
    )
    .unwrap();
    (runtime, machine)
}

#[test]
fn that_a_change_was_put_back_is_on_disk_until_just_before_it_is_made_again() {
    let directory = tempfile::tempdir().unwrap();
    let broken = Arc::new(AtomicBool::new(false));
    let (mut runtime, machine) = runtime(directory.path(), &broken);
    runtime.apply(action());
    runtime.advance_due();
    for direction in [Direction::Undo, Direction::Apply, Direction::Undo] {
        runtime.switch(ID, direction);
        runtime.advance_due();
    }
    use OwedState::{Applied, Intended};
    assert_eq!(
        *machine.said.borrow(),
        [
            (Direction::Apply, Intended),
            (Direction::Undo, Applied),
            (Direction::Apply, Applied),
            (Direction::Undo, Applied),
        ]
    );
    assert_eq!(on_disk(directory.path()), OwedState::PutBack);
    // What cannot be noted is not made: a start would take it for somebody else's.
    broken.store(true, Ordering::Relaxed);
    runtime.events.clear();
    runtime.switch(ID, Direction::Apply);
    runtime.advance_due();
    assert_eq!(machine.said.borrow().len(), 4, "nothing was written");
    assert!(matches!(
        runtime.events.front(),
        Some(Event::Settled(ID, Direction::Apply, Err(fault))) if fault.kind == FaultKind::Journal
    ));
}

#[test]
fn the_mind_hears_of_a_lost_meter_with_its_reason_before_the_sample() {
    let directory = tempfile::tempdir().unwrap();
    let (mut runtime, machine) = runtime(directory.path(), &Arc::default());
    machine.lost.borrow_mut().push(LostMeter {
        workload: "w".into(),
        meter: "m".into(),
        why: PlatformError::Unsupported {
            what: "meter m".into(),
            why: "its code was made anew".into(),
        },
    });
    runtime.sample_if_due(Nanoseconds::ZERO);
    assert!(matches!(
        runtime.events.make_contiguous(),
        [Event::MeterLost(id, meter, fault), Event::Unseen]
            if id.as_str() == "w"
                && meter.as_str() == "m"
                && fault.kind == FaultKind::Unsupported
                && fault.text.contains("made anew")
    ));
}

#[test]
fn what_never_reached_the_journal_is_forgotten() {
    let directory = tempfile::tempdir().unwrap();
    let broken = Arc::new(AtomicBool::new(false));
    let (mut runtime, machine) = runtime(directory.path(), &broken);
    broken.store(true, Ordering::Relaxed);
    runtime.apply(action());
    runtime.advance_due();
    assert_eq!((machine.said.borrow().len(), machine.forgotten.get()), (0, 1));
}

#[test]
fn a_pair_of_settings_is_ours_and_somebody_else_s_by_both_names() {
    let (ratio, bytes) = ("/proc/sys/vm/dirty_ratio", "/proc/sys/vm/dirty_bytes");
    let directory = tempfile::tempdir().unwrap();
    let (mut runtime, _) = runtime(directory.path(), &Arc::default());
    runtime.apply(Action {
        target: Target::Files(vec![ratio.to_owned()]),
        arguments: BTreeMap::from([("value".to_owned(), "10".to_owned())]),
        ..action()
    });
    // What the kernel made of the other one when we wrote is nobody else's.
    assert!(runtime.wrote_setting(ratio, "10") && runtime.wrote_setting(bytes, "0"));
    assert!(!runtime.wrote_setting(bytes, "8192") && !runtime.wrote_setting(ratio, "33"));
    assert_eq!(runtime.setting_is_others(bytes, "somebody set it"), [ID]);
    assert_eq!(
        runtime.setting_is_others("/proc/sys/vm/swappiness", "somebody set it"),
        []
    );
}

/// Time that a test moves, and a machine on which some changes never come to an end.
#[derive(Clone, Default)]
struct Hours(Rc<Cell<Nanoseconds>>);

impl Clock for Hours {
    fn now(&self) -> Nanoseconds {
        self.0.get()
    }
    fn unix_seconds(&self) -> u64 {
        0
    }
    fn sleep(&self, length: Nanoseconds) {
        self.0.set(self.0.get() + length);
    }
}

#[derive(Clone, Default)]
struct Endless {
    machine: Asking,
    /// Those that never end, and how far each has got.
    never: Rc<RefCell<BTreeMap<ActionId, u64>>>,
    /// Whether those get further.
    moves: Rc<Cell<bool>>,
}

impl Sensors for Endless {
    fn machine(&mut self) -> Result<Machine, PlatformError> {
        self.machine.machine()
    }
    fn sample(&mut self, _: &SampleRequest) -> Result<Snapshot, PlatformError> {
        Err(nobody())
    }
    fn inspect_memory(&mut self, _: &WorkloadId) -> Result<MemoryMap, PlatformError> {
        Err(nobody())
    }
    fn inspect_locality(&mut self, _: &WorkloadId) -> Result<Locality, PlatformError> {
        Err(nobody())
    }
    fn find_meters(&mut self, _: &WorkloadId) -> Result<Vec<MeterCandidate>, PlatformError> {
        Err(nobody())
    }
    fn open_meter(&mut self, _: &WorkloadId, _: &MeterId) -> Result<(), PlatformError> {
        Err(nobody())
    }
    fn close_meter(&mut self, _: &WorkloadId, _: &MeterId) {}
}

impl Effectors for Endless {
    fn prepare(&mut self, action: &Action) -> Result<UndoRecord, PlatformError> {
        self.machine.prepare(action)
    }
    fn advance(&mut self, record: &UndoRecord, direction: Direction) -> Result<Progress, PlatformError> {
        let mut never = self.never.borrow_mut();
        let ends = direction == Direction::Apply || !never.contains_key(&record.action.id);
        if let (false, Some(finished)) = (ends, never.get_mut(&record.action.id)) {
            *finished += u64::from(self.moves.get());
            return Ok(Progress {
                finished: *finished,
                pause: Nanoseconds::from_secs(1),
                ..Progress::default()
            });
        }
        Ok(Progress {
            done: true,
            verified: true,
            ..Progress::default()
        })
    }
    fn forget(&mut self, _: &UndoRecord) {}
}

/// Two changes of which the later lies over the earlier and is never undone; what became of the undo of the earlier after so long.
fn under_one_that_never_ends(target: fn() -> Target, moves: bool, after: Nanoseconds) -> Option<String> {
    let directory = tempfile::tempdir().unwrap();
    let machine = Endless::default();
    machine.moves.set(moves);
    machine.never.borrow_mut().insert(ActionId(2), 0);
    let clock = Hours::default();
    let (journal, _) = Journal::open(directory.path(), JournalOptions::default()).unwrap();
    let history = ResilientHistory::open(&directory.path().join("history.db"), HistoryOptions::default(), 0);
    let (mut runtime, _) = Runtime::start(
        machine,
        clock.clone(),
        journal,
        history,
        Vec::new(),
        Policy::default(),
    )
    .unwrap();
    for id in [1, 2] {
        runtime.apply(Action {
            id: ActionId(id),
            target: target(),
            ..action()
        });
    }
    for _ in 0..5 {
        runtime.advance_due();
        clock.sleep(crate::WAIT_MIN);
    }
    assert!(runtime.pending.is_empty());
    runtime.events.clear();
    for id in [1, 2] {
        runtime.switch(ActionId(id), Direction::Undo);
    }
    let end = clock.now() + after;
    while clock.now() < end {
        runtime.advance_due();
        clock.sleep(Nanoseconds::from_secs(1));
    }
    runtime.events.iter().find_map(|event| match event {
        Event::Settled(ActionId(1), Direction::Undo, Ok(_)) => Some("done".to_owned()),
        Event::Settled(ActionId(1), Direction::Undo, Err(fault)) => Some(fault.text.clone()),
        _ => None,
    })
}

#[test]
fn what_lies_under_a_change_that_gets_no_further_does_not_wait_for_ever() {
    let file = || Target::Files(vec!["/proc/sys/vm/swappiness".to_owned()]);
    let minutes = |n: u64| Nanoseconds::from_secs(60 * n);
    assert_eq!(under_one_that_never_ends(file, false, minutes(4)), None);
    // Not undone all the same: what lies there is the later one's, and would be taken for somebody else's.
    assert_eq!(
        under_one_that_never_ends(file, false, minutes(10)).as_deref(),
        Some("it waits for action 2, which gets no further")
    );
    assert_eq!(
        under_one_that_never_ends(file, true, minutes(60)),
        None,
        "it moves"
    );
    // Where threads are kept the effector knows whether it may.
    let cpus = || Target::Cpus(vec![homeostat_model::CpuId(1)]);
    assert_eq!(
        under_one_that_never_ends(cpus, false, minutes(10)).as_deref(),
        Some("done")
    );
}
