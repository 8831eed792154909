//! The second half of a life: without faults everything must settle, and nothing may be left.

use super::Run;
use crate::campaign::Subject;
use crate::checkers::{Hand, Invariant, differences};
use homeostat_engine::OperatorRequest;
use homeostat_model::{ActionId, Nanoseconds, UndoRecord, WorkloadId};
use homeostat_platform::Clock;
use homeostat_store::journal::{self, OwedState};
use std::collections::{BTreeMap, BTreeSet};
use std::io;

/// Time for running trials to end and for refused undos to be retried.
const SETTLE: Nanoseconds = Nanoseconds::from_secs(900);
const UNDO: Nanoseconds = Nanoseconds::from_secs(900);
const STOP: Nanoseconds = Nanoseconds::from_secs(600);

impl<S: Subject> Run<S> {
    pub(super) fn quiet_half(&mut self) -> io::Result<()> {
        self.schedule.clear();
        self.faults.stop();
        self.heal();
        self.faults.trace("the faults stop".to_owned());
        self.ask(OperatorRequest::Resume);
        let now = self.clock.now();
        self.run_until(now + Nanoseconds::from_secs_f64(self.policy.experiment_max_s) + SETTLE)?;
        if !self.checkers.found().is_empty() {
            return Ok(());
        }
        self.settled();
        // Later programs took the room: the action stays owed in the journal, is reported, and cannot settle.
        let stuck = self.without_way_back();
        if !stuck.is_empty() {
            self.faults.trace(format!("no room to undo: {stuck:?}"));
            return Ok(());
        }

        self.ask(OperatorRequest::Pause);
        self.ask(OperatorRequest::UndoAll);
        let now = self.clock.now();
        self.run_until(now + UNDO)?;
        if !self.checkers.found().is_empty() {
            return Ok(());
        }
        self.nothing_left("undo --all");
        if !self.checkers.found().is_empty() {
            return Ok(());
        }

        self.ask(OperatorRequest::Stop { keep: false });
        let now = self.clock.now();
        self.run_until(now + STOP)?;
        if !self.finished {
            self.report(
                Invariant::Liveness,
                "stop",
                format!("a stop did not end within {STOP} without faults"),
            );
        }
        Ok(())
    }

    fn on_disk(&mut self) -> Option<BTreeMap<ActionId, (WorkloadId, OwedState)>> {
        match journal::read(&self.faults.directory()) {
            Ok(found) => Some(
                found
                    .owed
                    .into_iter()
                    .map(|(id, o)| (id, (o.record.action.workload, o.state)))
                    .collect(),
            ),
            Err(e) => {
                let text = self.without_path(&e.to_string());
                self.report(Invariant::Liveness, "journal", text);
                None
            }
        }
    }

    /// Actions on disk whose memory has no room at its old place, and the actions under them, which wait.
    fn without_way_back(&self) -> BTreeSet<ActionId> {
        let Ok(found) = journal::read(&self.faults.directory()) else {
            return BTreeSet::new();
        };
        let stuck: Vec<&UndoRecord> = found
            .owed
            .values()
            .map(|o| &o.record)
            .filter(|record| self.subject.has_no_way_back(record))
            .collect();
        let waits = |record: &UndoRecord| stuck.iter().any(|s| s.action.lies_over(&record.action));
        let owed = found.owed.iter();
        owed.filter(|(id, o)| stuck.iter().any(|s| s.action.id == **id) || waits(&o.record))
            .map(|(id, _)| *id)
            .collect()
    }

    /// Runs without faults for the length of a trial: owed actions are in force, or in a trial that began since.
    fn settled(&mut self) {
        let Some(owed) = self.on_disk() else { return };
        let Some(runtime) = &self.runtime else {
            self.report(
                Invariant::Liveness,
                "start",
                "the daemon does not start without faults".to_owned(),
            );
            return;
        };
        let view = runtime.view();
        let stuck = self.without_way_back();
        for (id, (workload, state)) in owed.into_iter().filter(|(id, _)| !stuck.contains(id)) {
            let in_force = view.in_force.iter().any(|c| c.action == id);
            let tried = view
                .experiments
                .iter()
                .any(|e| e.workload == workload || e.others.contains(&workload));
            if !in_force && !tried {
                self.report(
                    Invariant::Liveness,
                    "owed",
                    format!("action {id} on {workload} ({state}) is owed, not in force and not on trial"),
                );
            }
        }
        // Shown values must be numbers: NaN becomes null in JSON and cannot be read back.
        let sane = serde_json::to_string(&view)
            .ok()
            .and_then(|text| serde_json::from_str::<homeostat_engine::Status>(&text).ok());
        if sane.is_none() {
            self.report(
                Invariant::Liveness,
                "status",
                "the status cannot be written as JSON and read back".to_owned(),
            );
        }
    }

    fn nothing_left(&mut self, after: &str) {
        self.faults.note(Hand::Machine, (self.picture)());
        let left = self.faults.ledger().ours();
        if !left.is_empty() {
            self.report(
                Invariant::Restorable,
                "end",
                format!(
                    "after {after} without faults the machine is not as found: {}",
                    differences(&left)
                ),
            );
        }
        if let Some(owed) = self.on_disk() {
            if let Some((id, (workload, state))) = owed.first_key_value() {
                self.report(
                Invariant::Liveness,
                "undo",
                format!(
                    "{} undos are owed {UNDO} after {after} without faults, the first of action {id} on {workload} ({state})",
                    owed.len()
                ),
            );
            }
        }
    }
}
