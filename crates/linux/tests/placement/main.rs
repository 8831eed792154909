//! Placement of threads and pages on the real machine: what the effectors promise, checked on processes of our own.
//!
//! Each test starts this test binary again as its victim (the ignored test `victim::victim`), which obeys one-word
//! commands. A victim ends with its standard input at the latest. Tests about several nodes or several CPUs say so when
//! they skip; `make vm-test SHAPE=placement-tests` runs this binary in a virtual machine that has them.
#![expect(unsafe_code, reason = "victims bind threads and map memory by hand")]
#![expect(clippy::unwrap_used, clippy::panic, reason = "helpers of tests")]

mod pages;
mod threads;
mod victim;

use homeostat_effectors::Registry;
use homeostat_kernel::Root;
use homeostat_model::{
    Action, Direction, Fingerprint, OperatorChoice, ProcessId, Progress, UndoRecord, Workload, WorkloadId,
    WorkloadKind,
};
use homeostat_platform::{Effectors, PlatformError, Reached};
use std::collections::BTreeMap;
use std::time::Duration;

/// The effectors of this machine, and the processes of the one workload, as the last scan would have seen them.
struct Hands {
    registry: Registry,
    members: Vec<ProcessId>,
}

impl Hands {
    fn new(members: &[ProcessId]) -> Self {
        Self {
            registry: Registry::new(&Root::default()),
            members: members.to_vec(),
        }
    }

    /// What a scan that sees these processes now is told.
    fn review(&mut self, members: &[ProcessId]) -> Vec<(WorkloadId, String)> {
        let workload = Workload {
            id: "victim".into(),
            kind: WorkloadKind::ProcessGroup,
            former: None,
            owner: homeostat_model::Owner::Machine,
            others: Vec::new(),
            fingerprint: Fingerprint::new("victim"),
            program: "victim".into(),
            executable: String::new(),
            processes: members.to_vec(),
            choice: OperatorChoice::default(),
        };
        self.registry
            .review(&BTreeMap::from([(workload.id.clone(), workload)]))
    }
}

impl Effectors for Hands {
    fn prepare(&mut self, action: &Action) -> Result<UndoRecord, PlatformError> {
        self.registry.prepare_for(action, &self.members)
    }
    fn advance(&mut self, record: &UndoRecord, direction: Direction) -> Result<Progress, PlatformError> {
        self.registry.advance(record, direction)
    }
    fn forget(&mut self, record: &UndoRecord) {
        self.registry.forget(record);
    }
    fn adopt(&mut self, record: &UndoRecord) {
        self.registry.adopt(record);
    }
    fn inherit(&mut self, record: &UndoRecord, reached: Reached) {
        self.registry.inherit(record, reached);
    }
}

/// Advances to the end.
fn drive(hands: &mut Hands, record: &UndoRecord, direction: Direction) -> Result<Progress, PlatformError> {
    let mut last = Progress::default();
    for _ in 0..100_000 {
        last = hands.advance(record, direction)?;
        if last.done {
            assert!(last.verified);
            return Ok(last);
        }
        std::thread::sleep(Duration::from_nanos(last.pause.0).min(Duration::from_secs(1)));
    }
    panic!("never done: {last:?}");
}

fn skipped(progress: &Progress, reason: &str) -> u64 {
    progress.skipped.get(reason).copied().unwrap_or(0)
}

fn is_root() -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        eprintln!("skipped: only root may change processes of others");
    }
    root
}
