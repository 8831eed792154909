//! Undoing what is owed: at start, before the first sample, and by `homeostat restore`. Needs the journal and the
//! effectors, nothing else: no history, no mind, no configuration.

use homeostat_model::action::Target;
use homeostat_model::{Action, ActionId, Direction, Nanoseconds, UndoRecord};
use homeostat_platform::{Clock, Effectors, PlatformError, Reached};
use homeostat_store::Journal;
use homeostat_store::journal::OwedState;

/// Time one action may take to be undone before recovery goes on with the next.
const PATIENCE: Nanoseconds = Nanoseconds::from_secs(60);
/// Wait when the machine says "not now".
const BUSY_WAIT: Nanoseconds = Nanoseconds::from_millis(500);
/// Shortest wait between slices that are not done.
const SLICE_WAIT: Nanoseconds = Nanoseconds::from_millis(1);

/// What recovery did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RecoveryReport {
    /// Undone and verified.
    pub undone: Vec<(ActionId, String)>,
    /// Nothing to undo: another boot, or the process is gone.
    pub void: Vec<(ActionId, String)>,
    /// Left in force on purpose (`--keep`), and not asked to be undone.
    pub kept: Vec<(ActionId, String)>,
    /// Could not be undone; still owed, with the reason.
    pub failed: Vec<(ActionId, String)>,
}

impl RecoveryReport {
    /// Whether everything owed is settled.
    pub fn complete(&self) -> bool {
        self.failed.is_empty()
    }
}

/// Undoes every action that is owed, newest first. `include_kept` also takes back what was kept on purpose.
pub fn restore(
    journal: &mut Journal,
    effectors: &mut dyn Effectors,
    clock: &dyn Clock,
    boot_id: &str,
    include_kept: bool,
) -> RecoveryReport {
    let mut report = RecoveryReport::default();
    if boot_id.is_empty() {
        // Not knowing the boot, every record would seem to be of another one and be struck off undone.
        let why = "it is not known in which boot this is (/proc/sys/kernel/random/boot_id is empty)";
        report.failed = journal
            .owed()
            .map(|o| (o.record.action.id, why.to_owned()))
            .collect();
        return report;
    }
    // All before the first is undone: some share what they changed.
    for owed in journal.owed().filter(|o| !o.is_void(boot_id)) {
        effectors.inherit(&owed.record, reached(owed.state));
    }
    let mut owed: Vec<(UndoRecord, bool, bool)> = journal
        .owed()
        .map(|o| (o.record.clone(), o.state == OwedState::Kept, o.is_void(boot_id)))
        .collect();
    owed.sort_by_key(|(r, _, _)| std::cmp::Reverse(r.action.id));
    // What a change found cannot be given back while another lies over it. Where threads are kept the effector knows best: those
    // of the later one may be back, and only its memory finds no room.
    let mut stuck: Vec<(Action, bool)> = Vec::new();
    let effector_knows = |later: &Action, tried: bool, own: &Action| {
        tried && matches!((&later.target, &own.target), (Target::Cpus(_), Target::Cpus(_)))
    };
    for (record, kept, void) in owed {
        let id = record.action.id;
        let text = format!("{} on {}", record.action.effector, record.action.workload);
        if void {
            close(journal, id, &mut report);
            report
                .void
                .push((id, format!("{text}: made before the last boot")));
            continue;
        }
        let over = stuck.iter().find(|(later, tried)| {
            later.lies_over(&record.action) && !effector_knows(later, *tried, &record.action)
        });
        if let Some((over, _)) = over {
            let why = format!("{text}: action {} lies over it and is not undone", over.id);
            report.failed.push((id, why));
            stuck.push((record.action, false));
            continue;
        }
        if kept && !include_kept {
            report.kept.push((id, text));
            // A stop that was cut off may have kept this and not what lies under it, which is then not there to be given back.
            stuck.push((record.action, false));
            continue;
        }
        if kept {
            // What is kept is left alone by the next start: it must not say so of what is half undone. If that cannot be
            // written down, it is undone all the same: a person wants it, and what cannot be closed either is told.
            let _ = journal.undoing(id);
        }
        match undo(effectors, clock, &record) {
            Ok(true) => {
                close(journal, id, &mut report);
                report.undone.push((id, text));
            }
            Ok(false) => {
                close(journal, id, &mut report);
                report.void.push((id, format!("{text}: the process is gone")));
            }
            Err(why) => {
                report.failed.push((id, format!("{text}: {why}")));
                stuck.push((record.action, true));
            }
        }
    }
    report
}

/// What the journal says of an action, as effectors need it.
fn reached(state: OwedState) -> Reached {
    match state {
        OwedState::Intended => Reached::Begun,
        OwedState::Applied | OwedState::Undoing | OwedState::Kept => Reached::Made,
        OwedState::PutBack => Reached::PutBack,
    }
}

/// A record that cannot be closed stays owed: undoing it again later finds nothing to do.
fn close(journal: &mut Journal, id: ActionId, report: &mut RecoveryReport) {
    if let Err(e) = journal.closed(id) {
        report
            .failed
            .push((id, format!("undone, but the journal cannot be written: {e}")));
    }
}

/// Why an action did not come to its end.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Undriven {
    /// The machine said no.
    #[error("{0}")]
    Machine(PlatformError),
    /// The patience ran out.
    #[error("not done after {PATIENCE}")]
    Late,
}

/// Drives one action to its end in one direction. `Ok(false)`: the target is gone, so there is nothing left to undo.
pub(crate) fn drive(
    effectors: &mut dyn Effectors,
    clock: &dyn Clock,
    record: &UndoRecord,
    direction: Direction,
) -> Result<bool, Undriven> {
    let deadline = clock.now() + PATIENCE;
    loop {
        match effectors.advance(record, direction) {
            Ok(progress) if progress.done => return Ok(true),
            // No longer than the patience lasts, whatever the effector asks for.
            Ok(progress) => {
                let left = deadline.saturating_sub(clock.now());
                clock.sleep(progress.pause.min(left).max(SLICE_WAIT));
            }
            Err(PlatformError::Vanished { .. }) if direction == Direction::Undo => return Ok(false),
            Err(e @ PlatformError::Busy { .. }) => {
                if clock.now() >= deadline {
                    return Err(Undriven::Machine(e));
                }
                clock.sleep(BUSY_WAIT);
            }
            Err(e) => return Err(Undriven::Machine(e)),
        }
        if clock.now() >= deadline {
            return Err(Undriven::Late);
        }
    }
}

/// Drives one undo to its end. `Ok(false)`: there was nothing left to undo.
fn undo(effectors: &mut dyn Effectors, clock: &dyn Clock, record: &UndoRecord) -> Result<bool, String> {
    let outcome = drive(effectors, clock, record, Direction::Undo).map_err(|e| e.to_string())?;
    effectors.forget(record);
    Ok(outcome)
}

#[cfg(test)]
mod tests {
    use super::*;
    use homeostat_model::Progress;
    use homeostat_store::JournalOptions;
    use std::cell::Cell;
    use std::collections::BTreeMap;

    /// Never done, and asks to be left alone for centuries.
    struct Endless;

    impl Effectors for Endless {
        fn prepare(&mut self, action: &Action) -> Result<UndoRecord, PlatformError> {
            Ok(UndoRecord {
                action: action.clone(),
                boot_id: "boot".into(),
                found: BTreeMap::new(),
            })
        }
        fn advance(&mut self, _: &UndoRecord, _: Direction) -> Result<Progress, PlatformError> {
            Ok(Progress {
                pause: Nanoseconds(u64::MAX),
                ..Progress::default()
            })
        }
        fn forget(&mut self, _: &UndoRecord) {}
    }

    struct Still(Cell<u64>);

    impl Clock for Still {
        fn now(&self) -> Nanoseconds {
            Nanoseconds(self.0.get())
        }
        fn unix_seconds(&self) -> u64 {
            0
        }
        fn sleep(&self, length: Nanoseconds) {
            self.0.set(self.0.get().saturating_add(length.0));
        }
    }

    /// Found by the fault campaign: recovery slept for as long as an effector asked, so the daemon never started.
    #[test]
    fn recovery_waits_no_longer_than_its_patience() {
        let directory = tempfile::tempdir().unwrap();
        let (mut journal, _) = Journal::open(directory.path(), JournalOptions::default()).unwrap();
        let action = Action {
            id: ActionId(1),
            effector: "endless".into(),
            workload: "w".into(),
            target: homeostat_model::action::Target::Nothing,
            arguments: BTreeMap::new(),
            why: "test 1".into(),
        };
        journal.intend(&Endless.prepare(&action).unwrap()).unwrap();
        let clock = Still(Cell::new(0));
        let report = restore(&mut journal, &mut Endless, &clock, "boot", false);
        assert_eq!(report.failed.len(), 1);
        assert_eq!(journal.owed().count(), 1, "it is still owed");
        assert!(clock.now() <= PATIENCE + SLICE_WAIT, "slept {}", clock.now());
    }

    /// Knows what was undone in which order; the undo of one action fails.
    struct Failing {
        fails: ActionId,
        undone: Vec<ActionId>,
    }

    impl Effectors for Failing {
        fn prepare(&mut self, action: &Action) -> Result<UndoRecord, PlatformError> {
            Endless.prepare(action)
        }
        fn advance(&mut self, record: &UndoRecord, _: Direction) -> Result<Progress, PlatformError> {
            if record.action.id == self.fails {
                return Err(PlatformError::Denied {
                    what: "it".into(),
                    needs: "more".into(),
                });
            }
            self.undone.push(record.action.id);
            Ok(Progress {
                done: true,
                ..Progress::default()
            })
        }
        fn forget(&mut self, _: &UndoRecord) {}
    }

    #[test]
    fn what_another_lies_over_waits_for_it() {
        use homeostat_model::action::Target;
        let directory = tempfile::tempdir().unwrap();
        let (mut journal, _) = Journal::open(directory.path(), JournalOptions::default()).unwrap();
        let action = |id: u64, workload: &str, target: Target| Action {
            id: ActionId(id),
            effector: "setting".into(),
            workload: workload.into(),
            target,
            arguments: BTreeMap::new(),
            why: "test".into(),
        };
        let file = || Target::Files(vec!["/a".to_owned()]);
        for action in [
            action(1, "w", file()),
            action(2, "other", file()),
            action(3, "w", file()),
            action(4, "w", file()),
            action(5, "w", Target::Nothing),
        ] {
            journal.intend(&Endless.prepare(&action).unwrap()).unwrap();
        }
        let clock = Still(Cell::new(0));
        let mut hands = Failing {
            fails: ActionId(3),
            undone: Vec::new(),
        };
        let report = restore(&mut journal, &mut hands, &clock, "boot", false);
        assert_eq!(hands.undone, [ActionId(5), ActionId(4), ActionId(2)]);
        assert_eq!(report.failed.len(), 2, "{report:?}");
        assert!(
            report.failed[1]
                .1
                .contains("action 3 lies over it and is not undone"),
            "{report:?}"
        );
        // The next time both go, in order.
        hands = Failing {
            fails: ActionId(0),
            undone: Vec::new(),
        };
        assert!(restore(&mut journal, &mut hands, &clock, "boot", false).complete());
        assert_eq!(hands.undone, [ActionId(3), ActionId(1)]);
    }

    /// Of two placements the effector says whether the threads of the later one are back; memory that a placement took along waits.
    #[test]
    fn under_a_placement_that_cannot_be_undone_threads_are_asked_and_moved_pages_wait() {
        use homeostat_model::action::PageMove;
        let directory = tempfile::tempdir().unwrap();
        let (mut journal, _) = Journal::open(directory.path(), JournalOptions::default()).unwrap();
        let action = |id: u64, effector: &str, target: Target| Action {
            id: ActionId(id),
            effector: effector.into(),
            workload: "w".into(),
            target,
            arguments: BTreeMap::from([("memory".to_owned(), "all".to_owned())]),
            why: "test".into(),
        };
        let cpus = || Target::Cpus(vec![homeostat_model::CpuId(1)]);
        let pages = Target::Pages(PageMove {
            bytes: homeostat_model::Bytes::from_mib(1),
            shared: true,
            node: homeostat_model::NodeId(0),
        });
        for action in [
            action(1, "thread_placement", cpus()),
            action(2, "page_placement", pages),
            action(3, "thread_placement", cpus()),
        ] {
            journal.intend(&Endless.prepare(&action).unwrap()).unwrap();
        }
        let clock = Still(Cell::new(0));
        let mut hands = Failing {
            fails: ActionId(3),
            undone: Vec::new(),
        };
        let report = restore(&mut journal, &mut hands, &clock, "boot", false);
        assert_eq!(hands.undone, [ActionId(1)]);
        let why: Vec<&str> = report.failed.iter().map(|(_, why)| why.as_str()).collect();
        assert!(
            why[1].contains("page_placement on w: action 3 lies over it"),
            "{why:?}"
        );
        let mut all = Failing {
            fails: ActionId(0),
            undone: Vec::new(),
        };
        assert!(restore(&mut journal, &mut all, &clock, "boot", false).complete());
        assert_eq!(all.undone, [ActionId(3), ActionId(2)]);
    }

    /// A stop with `keep` that was cut off: the upper one is written down as kept, the lower one not yet.
    #[test]
    fn what_lies_under_a_kept_change_is_not_undone_without_it() {
        use homeostat_model::action::Target;
        let directory = tempfile::tempdir().unwrap();
        let (mut journal, _) = Journal::open(directory.path(), JournalOptions::default()).unwrap();
        let action = |id: u64, target: Target| Action {
            id: ActionId(id),
            effector: "setting".into(),
            workload: "w".into(),
            target,
            arguments: BTreeMap::new(),
            why: "test".into(),
        };
        let file = |path: &str| Target::Files(vec![path.to_owned()]);
        for action in [
            action(1, file("/a")),
            action(2, file("/b")),
            action(3, file("/a")),
        ] {
            journal.intend(&Endless.prepare(&action).unwrap()).unwrap();
        }
        journal.kept(ActionId(3)).unwrap();
        let clock = Still(Cell::new(0));
        let mut hands = Failing {
            fails: ActionId(0),
            undone: Vec::new(),
        };
        let report = restore(&mut journal, &mut hands, &clock, "boot", false);
        assert_eq!(hands.undone, [ActionId(2)], "another file is another matter");
        assert_eq!((report.kept.len(), report.failed.len()), (1, 1), "{report:?}");
        assert!(restore(&mut journal, &mut hands, &clock, "boot", true).complete());
        assert_eq!(hands.undone, [ActionId(2), ActionId(3), ActionId(1)]);
    }
}
