//! Inputs of the checkers after every turn of the loop.

use super::Run;
use crate::campaign::Subject;
use crate::checkers::{Gain, Hand, Invariant, Said, WORKS_FROM};
use crate::faults::Breach;
use homeostat_model::{ActionId, ExperimentKind, Nanoseconds, UndoRecord};
use homeostat_platform::Clock;
use homeostat_store::journal;

/// Longest time between two comparisons of the state, even without calls.
const CHECK_EVERY: Nanoseconds = Nanoseconds::from_secs(300);
/// Longest time between two views of the engine without new lines.
const HEAR_EVERY: Nanoseconds = Nanoseconds::from_secs(30);

impl<S: Subject> Run<S> {
    pub(super) fn take_calls(&mut self) -> (bool, u64) {
        let at = self.clock.now();
        let (calls, n) = self.faults.take_calls();
        for call in &calls {
            self.checkers.called(at, call);
        }
        for (breach, text) in self.faults.take_broken() {
            let (invariant, key) = match breach {
                Breach::Unrecorded => (Invariant::Restorable, "unrecorded"),
                Breach::Overwritten => (Invariant::PersonWins, "overwritten"),
            };
            self.report(invariant, key, text);
        }
        (!calls.is_empty(), n)
    }

    pub(super) fn check(&mut self, lines: &[String]) {
        let at = self.clock.now();
        for line in lines {
            self.faults.trace(format!("{:.3} {line}", at.as_secs_f64()));
        }
        let written = self.read_journal(at);
        let (acted, calls) = self.take_calls();
        if self.faults.dead() {
            return;
        }
        self.checkers.turned(at, calls, lines);
        if !acted && !written && lines.is_empty() && at - self.looked.checked < CHECK_EVERY {
            return;
        }
        self.looked.checked = at;
        // A view costs a search for interval ends, and slices of one change bring no news.
        if !lines.is_empty() || at - self.looked.heard >= HEAR_EVERY {
            self.looked.heard = at;
            self.listen(at);
            self.ask_the_world(at);
        }
        self.compare(at);
        self.faults.note(Hand::Machine, (self.picture)());
        if let Some((_, owed)) = &self.looked.read {
            if owed.is_empty() {
                self.faults.nothing_owed();
            }
            let owed = owed.keys().copied().collect();
            self.checkers.owed(at, &owed, &self.faults.ledger());
        }
        for v in self.checkers.take_new() {
            self.faults
                .trace(format!("VIOLATION {}: {}", v.invariant, v.text));
        }
    }

    /// Reads the journal again if it was written, before the calls of this turn: assignments of an ended block are
    /// compared with the calls during it. An unreadable journal is read after the next turn. True when it was written.
    fn read_journal(&mut self, at: Nanoseconds) -> bool {
        let steps = self.faults.journal_steps();
        if self.faults.dead() || self.looked.read.as_ref().is_some_and(|(then, _)| *then == steps) {
            return false;
        }
        let found = journal::read(&self.faults.directory()).ok();
        if let Some(found) = &found {
            self.checkers.tossed(at, &found.coins);
        }
        self.looked.read = found.map(|found| {
            let owed = found.owed.into_iter().map(|(id, o)| (id, o.record));
            (steps, owed.collect())
        });
        true
    }

    fn ask_the_world(&mut self, at: Nanoseconds) {
        let wanted = self.checkers.to_judge(at);
        let Some((_, owed)) = self.looked.read.as_ref().filter(|_| !wanted.is_empty()) else {
            return;
        };
        // A resting program gains and loses nothing.
        let now = self.subject.speeds();
        let works = |record: &&UndoRecord| {
            now.get(record.action.workload.as_str())
                .is_some_and(|s| s.cpus >= WORKS_FROM)
        };
        let wanted: Vec<&UndoRecord> = wanted
            .iter()
            .filter_map(|id| owed.get(id))
            .filter(works)
            .collect();
        if wanted.is_empty() {
            return;
        }
        let with = self.subject.speeds_without(&[]);
        for record in wanted {
            let (id, name) = (record.action.id, record.action.workload.as_str());
            // Undo together what was tried together: one alone would gain at the others' expense.
            let whole = self.checkers.tried_with(id);
            let gone: Vec<&UndoRecord> = owed
                .values()
                .filter(|r| {
                    let over = |of: &ActionId| {
                        owed.get(of).is_some_and(|of| {
                            r.action.id >= of.action.id
                                && r.action.workload == of.action.workload
                                && (r.action.id == of.action.id || r.action.effector == of.action.effector)
                        })
                    };
                    whole.iter().any(over)
                })
                .collect();
            let without = self.subject.speeds_without(&gone);
            let speeds = with.get(name).zip(without.get(name));
            if let Some(gain) = speeds.and_then(|(with, without)| Gain::of(with, without)) {
                self.faults.trace(format!(
                    "{:.3} in the world action {id} ({} on {name}) gives {:+.2} % work per second and {:+.2} % work per CPU second",
                    at.as_secs_f64(),
                    record.action.effector,
                    gain.work * 100.0,
                    gain.per_cpu * 100.0
                ));
                self.checkers.judged(at, id, gain);
            }
        }
    }

    pub(super) fn compare(&mut self, at: Nanoseconds) {
        let length = at - self.beside.compared;
        if length.0 == 0 {
            return;
        }
        self.beside.compared = at;
        self.beside.alone.advance_to(at);
        let (with, alone) = (self.subject.speeds(), self.beside.alone.speeds());
        let touched = self.looked.read.as_ref().is_none_or(|(_, owed)| !owed.is_empty());
        self.checkers.compared(at, length, &with, &alone, touched);
        for (name, alone) in alone.iter().filter(|(_, s)| s.cpus >= WORKS_FROM) {
            // In steps of a tenth, when the step changes.
            let lost = with.get(name).map_or(0.0, |with| 1.0 - with.work / alone.work);
            let tenths = (lost * 10.0).clamp(0.0, 10.0).round() as u32;
            if self.beside.slower.insert(name.clone(), tenths).unwrap_or(0) != tenths {
                let (at, lost) = (at.as_secs_f64(), lost * 100.0);
                self.faults.trace(format!(
                    "{at:.3} in the world {name} is {lost:.1} % slower than on the machine left alone"
                ));
            }
        }
    }

    /// Records what the engine says of itself.
    fn listen(&mut self, at: Nanoseconds) {
        let Some(runtime) = &self.runtime else { return };
        let view = runtime.view();
        let said = Said {
            trials: view
                .experiments
                .iter()
                .filter(|e| e.kind != ExperimentKind::Placebo)
                .map(|e| {
                    let others = e.others.iter().cloned();
                    (e.id, std::iter::once(e.workload.clone()).chain(others).collect())
                })
                .collect(),
            placebos: view
                .experiments
                .iter()
                .filter(|e| e.kind == ExperimentKind::Placebo)
                .map(|e| e.id)
                .collect(),
            in_force: view
                .in_force
                .iter()
                .map(|c| (c.action, c.workload.clone()))
                .collect(),
            exposure: view.budget.harm_exposure_day,
        };
        for outcome in &view.outcomes {
            self.counted.verdicts.insert(outcome.id.0, outcome.verdict);
        }
        self.checkers.said(at, &said);
    }
}
