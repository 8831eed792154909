//! Undoing what is owed: at start, before the first sample, and by `homeostat restore`. Needs only the journal and the
//! effectors: no history, engine or configuration.
//!
//! One deadline covers everything, since a service manager kills a slow start, again and again. A change that answers
//! "not now" must not block others: each is driven in turn, newest first, until it is done or says "not now". The rest
//! goes round until the time is up. Then the engine, the next start or `homeostat restore` continues.

use homeostat_model::action::Target;
use homeostat_model::{Action, ActionId, Direction, Nanoseconds, UndoRecord};
use homeostat_platform::{Clock, Effectors, PlatformError, Reached};
use homeostat_store::Journal;
use homeostat_store::journal::OwedState;

/// Time limit of recovery. packaging/homeostat.service allows a start 300 s and `restore` after a stop 150 s. Both
/// include the recovery of settings made by hand. A test of the daemon compares the limits.
pub const RECOVERY_PATIENCE: Nanoseconds = Nanoseconds::from_secs(100);
/// Time limit for one change by hand, and for its undo.
const PATIENCE: Nanoseconds = Nanoseconds::from_secs(60);
const BUSY_WAIT: Nanoseconds = Nanoseconds::from_millis(500);
const SLICE_WAIT: Nanoseconds = Nanoseconds::from_millis(1);

/// The result of recovery.
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
    /// Undone or void actions that the journal could not close, with the reason. The next start tries again.
    pub unrecorded: Vec<(ActionId, String)>,
}

impl RecoveryReport {
    /// Whether everything owed is settled.
    pub fn complete(&self) -> bool {
        self.failed.is_empty() && self.unrecorded.is_empty()
    }
}

/// Undoes every owed action, newest first. `include_kept` also undoes actions kept on purpose.
pub fn restore(
    journal: &mut Journal,
    effectors: &mut dyn Effectors,
    clock: &dyn Clock,
    boot_id: &str,
    include_kept: bool,
) -> RecoveryReport {
    restore_within(
        RECOVERY_PATIENCE,
        journal,
        effectors,
        clock,
        boot_id,
        include_kept,
    )
}

struct Owed {
    record: UndoRecord,
    text: String,
    /// Whether the journal says kept, so that an undo must first note the end of keeping.
    kept: bool,
    why: String,
}

/// A change that is not undone, so that those under it wait.
struct InTheWay {
    action: Action,
    tried: bool,
    /// Whether it stays so: this recovery tries nothing more.
    for_good: bool,
}

/// As [`restore`], within a time limit, and at least a slice of each action.
pub fn restore_within(
    patience: Nanoseconds,
    journal: &mut Journal,
    effectors: &mut dyn Effectors,
    clock: &dyn Clock,
    boot_id: &str,
    include_kept: bool,
) -> RecoveryReport {
    let deadline = clock.now() + patience;
    let mut report = RecoveryReport::default();
    if boot_id.is_empty() {
        // Without a known boot, every record would seem to be of another boot and be struck off undone.
        let why = "it is not known in which boot this is (/proc/sys/kernel/random/boot_id is empty)";
        report.failed = journal
            .owed()
            .map(|o| (o.record.action.id, why.to_owned()))
            .collect();
        return report;
    }
    // Collect all before undoing the first: some share what they changed.
    for owed in journal.owed().filter(|o| !o.is_void(boot_id)) {
        effectors.inherit(&owed.record, reached(owed.state));
    }
    let mut all: Vec<(UndoRecord, bool, bool)> = journal
        .owed()
        .map(|o| (o.record.clone(), o.state == OwedState::Kept, o.is_void(boot_id)))
        .collect();
    all.sort_by_key(|(r, _, _)| std::cmp::Reverse(r.action.id));
    let mut in_the_way: Vec<InTheWay> = Vec::new();
    let mut waiting: Vec<Owed> = Vec::new();
    for (record, kept, void) in all {
        let id = record.action.id;
        let text = format!("{} on {}", record.action.effector, record.action.workload);
        if void {
            close(journal, id, &mut report);
            report
                .void
                .push((id, format!("{text}: made before the last boot")));
        } else if kept && !include_kept {
            report.kept.push((id, text));
            // An interrupted stop may have kept this change but not the one under it, which then cannot come back.
            in_the_way.push(InTheWay {
                action: record.action,
                tried: false,
                for_good: true,
            });
        } else {
            waiting.push(Owed {
                record,
                text,
                kept,
                why: String::new(),
            });
        }
    }
    loop {
        // Changes that waited in the last round may go now.
        in_the_way.retain(|w| w.for_good);
        waiting = round(
            waiting,
            &mut in_the_way,
            deadline,
            journal,
            effectors,
            clock,
            &mut report,
        );
        let left = deadline.saturating_sub(clock.now());
        if waiting.is_empty() || left == Nanoseconds::ZERO {
            break;
        }
        clock.sleep(BUSY_WAIT.min(left));
    }
    let late = waiting
        .into_iter()
        .map(|owed| (owed.record.action.id, format!("{}: {}", owed.text, owed.why)));
    report.failed.extend(late);
    report.failed.sort_by_key(|(id, _)| std::cmp::Reverse(*id));
    report
}

/// Tries each waiting action, newest first, and returns those to try again. They share the remaining time evenly.
fn round(
    waiting: Vec<Owed>,
    in_the_way: &mut Vec<InTheWay>,
    deadline: Nanoseconds,
    journal: &mut Journal,
    effectors: &mut dyn Effectors,
    clock: &dyn Clock,
    report: &mut RecoveryReport,
) -> Vec<Owed> {
    let mut to_come = waiting.len() as u64;
    let mut again = Vec::new();
    for mut owed in waiting {
        let share = Nanoseconds(deadline.saturating_sub(clock.now()).0 / to_come.max(1));
        to_come = to_come.saturating_sub(1);
        let id = owed.record.action.id;
        // A value cannot come back while another change lies over it.
        let over = in_the_way.iter().find(|w| {
            w.action.lies_over(&owed.record.action)
                && !(w.tried && effector_knows(&w.action, &owed.record.action))
        });
        if let Some(over) = over {
            let for_good = over.for_good;
            owed.why = format!("action {} lies over it and is not undone", over.action.id);
            in_the_way.push(InTheWay {
                action: owed.record.action.clone(),
                tried: false,
                for_good,
            });
            if for_good {
                report.failed.push((id, format!("{}: {}", owed.text, owed.why)));
            } else {
                again.push(owed);
            }
            continue;
        }
        if owed.kept {
            // A kept change must not be left half undone at the next start. Without a journal, undo it all the same.
            owed.kept = journal.undoing(id).is_err();
        }
        match advance(
            effectors,
            clock,
            &owed.record,
            Direction::Undo,
            clock.now() + share,
        ) {
            Ok(there) => {
                effectors.forget(&owed.record);
                close(journal, id, report);
                if there {
                    report.undone.push((id, owed.text));
                } else {
                    report
                        .void
                        .push((id, format!("{}: the process is gone", owed.text)));
                }
            }
            Err(why) => {
                let for_good = !why.may_pass();
                in_the_way.push(InTheWay {
                    action: owed.record.action.clone(),
                    tried: true,
                    for_good,
                });
                owed.why = why.to_string();
                if for_good {
                    report.failed.push((id, format!("{}: {}", owed.text, owed.why)));
                } else {
                    again.push(owed);
                }
            }
        }
    }
    again
}

/// Whether the effector itself refuses to undo a change under a later one. For kept threads, the threads of the later
/// change may be back while its memory still finds no room; until then the effector refuses.
pub(crate) fn effector_knows(later: &Action, own: &Action) -> bool {
    matches!((&later.target, &own.target), (Target::Cpus(_), Target::Cpus(_)))
}

fn reached(state: OwedState) -> Reached {
    match state {
        OwedState::Intended => Reached::Begun,
        OwedState::Applied | OwedState::Undoing | OwedState::Kept => Reached::Made,
        OwedState::PutBack => Reached::PutBack,
    }
}

/// Closes a record. If that fails it stays owed: a later undo finds nothing to do.
fn close(journal: &mut Journal, id: ActionId, report: &mut RecoveryReport) {
    if let Err(e) = journal.closed(id) {
        report.unrecorded.push((id, e.to_string()));
    }
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Undriven {
    #[error("{0}")]
    Machine(PlatformError),
    #[error("not done in time")]
    Late,
}

impl Undriven {
    fn may_pass(&self) -> bool {
        matches!(self, Self::Late | Self::Machine(PlatformError::Busy { .. }))
    }
}

/// Drives one action in one direction to its end, "not now" or the deadline. `Ok(false)`: the target is gone.
fn advance(
    effectors: &mut dyn Effectors,
    clock: &dyn Clock,
    record: &UndoRecord,
    direction: Direction,
    until: Nanoseconds,
) -> Result<bool, Undriven> {
    loop {
        match effectors.advance(record, direction) {
            Ok(progress) if progress.done => return Ok(true),
            // Not beyond the deadline, whatever the effector asks for.
            Ok(progress) => {
                let left = until.saturating_sub(clock.now());
                clock.sleep(progress.pause.min(left).max(SLICE_WAIT));
            }
            Err(PlatformError::Vanished { .. }) if direction == Direction::Undo => return Ok(false),
            Err(e) => return Err(Undriven::Machine(e)),
        }
        if clock.now() >= until {
            return Err(Undriven::Late);
        }
    }
}

/// Drives one action to its end in one direction and waits out "not now". `Ok(false)` as for `advance`.
pub(crate) fn drive(
    effectors: &mut dyn Effectors,
    clock: &dyn Clock,
    record: &UndoRecord,
    direction: Direction,
) -> Result<bool, Undriven> {
    let deadline = clock.now() + PATIENCE;
    loop {
        match advance(effectors, clock, record, direction, deadline) {
            Err(Undriven::Machine(PlatformError::Busy { .. })) if clock.now() < deadline => {
                clock.sleep(BUSY_WAIT);
            }
            outcome => return outcome,
        }
    }
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
        assert!(
            clock.now() <= RECOVERY_PATIENCE + SLICE_WAIT,
            "slept {}",
            clock.now()
        );
    }

    /// Some say "not now" until a time, or for ever.
    struct Busy<'a> {
        clock: &'a Still,
        until: BTreeMap<ActionId, Nanoseconds>,
        tried: Vec<ActionId>,
        undone: Vec<ActionId>,
    }

    impl Effectors for Busy<'_> {
        fn prepare(&mut self, action: &Action) -> Result<UndoRecord, PlatformError> {
            Endless.prepare(action)
        }
        fn advance(&mut self, record: &UndoRecord, _: Direction) -> Result<Progress, PlatformError> {
            let id = record.action.id;
            if !self.tried.contains(&id) {
                self.tried.push(id);
            }
            if self.until.get(&id).is_some_and(|until| self.clock.now() < *until) {
                return Err(PlatformError::Busy {
                    what: "it".into(),
                    why: "not now".into(),
                });
            }
            self.undone.push(id);
            Ok(Progress {
                done: true,
                ..Progress::default()
            })
        }
        fn forget(&mut self, _: &UndoRecord) {}
    }

    /// A service manager kills a start that takes 300 s: five that are never possible took just that, and what was older was
    /// never tried.
    #[test]
    fn what_is_not_possible_now_keeps_nobody_else_waiting_and_recovery_has_one_deadline() {
        let directory = tempfile::tempdir().unwrap();
        let (mut journal, _) = Journal::open(directory.path(), JournalOptions::default()).unwrap();
        let action = |id: u64| Action {
            id: ActionId(id),
            effector: "setting".into(),
            workload: "w".into(),
            // The seventh lies over the second.
            target: Target::Files(vec![format!("/{}", if id == 7 { 2 } else { id })]),
            arguments: BTreeMap::new(),
            why: "test".into(),
        };
        for id in 1..=9 {
            journal.intend(&Endless.prepare(&action(id)).unwrap()).unwrap();
        }
        let clock = Still(Cell::new(0));
        let ever = Nanoseconds(u64::MAX);
        let soon = Nanoseconds::from_secs(3);
        let mut hands = Busy {
            clock: &clock,
            until: BTreeMap::from([4, 5, 6, 8, 9].map(|id| (ActionId(id), ever))),
            tried: Vec::new(),
            undone: Vec::new(),
        };
        hands.until.insert(ActionId(7), soon);
        let report = restore(&mut journal, &mut hands, &clock, "boot", false);
        assert!(
            clock.now() <= RECOVERY_PATIENCE + BUSY_WAIT,
            "took {}",
            clock.now()
        );
        // In the first round all but the one that lies under another; then that, after the one over it.
        assert_eq!(hands.tried, [9, 8, 7, 6, 5, 4, 3, 1, 2].map(ActionId));
        assert_eq!(hands.undone, [3, 1, 7, 2].map(ActionId));
        let failed: Vec<ActionId> = report.failed.iter().map(|(id, _)| *id).collect();
        assert_eq!(failed, [9, 8, 6, 5, 4].map(ActionId), "{report:?}");
        assert!(report.failed[0].1.contains("not now"), "{report:?}");
        assert_eq!(journal.owed().count(), 5, "they are still owed");
    }

    /// One that goes on and on leaves time for the others.
    #[test]
    fn time_is_shared_by_all() {
        struct First(Vec<ActionId>);
        impl Effectors for First {
            fn prepare(&mut self, action: &Action) -> Result<UndoRecord, PlatformError> {
                Endless.prepare(action)
            }
            fn advance(&mut self, record: &UndoRecord, way: Direction) -> Result<Progress, PlatformError> {
                if record.action.id > ActionId(1) {
                    return Endless.advance(record, way);
                }
                self.0.push(record.action.id);
                Ok(Progress {
                    done: true,
                    ..Progress::default()
                })
            }
            fn forget(&mut self, _: &UndoRecord) {}
        }
        let directory = tempfile::tempdir().unwrap();
        let (mut journal, _) = Journal::open(directory.path(), JournalOptions::default()).unwrap();
        for id in 1..=20 {
            let action = Action {
                id: ActionId(id),
                effector: "endless".into(),
                workload: "w".into(),
                target: Target::Nothing,
                arguments: BTreeMap::new(),
                why: "test".into(),
            };
            journal.intend(&Endless.prepare(&action).unwrap()).unwrap();
        }
        let clock = Still(Cell::new(0));
        let mut hands = First(Vec::new());
        let report = restore(&mut journal, &mut hands, &clock, "boot", false);
        assert_eq!((hands.0, report.failed.len()), (vec![ActionId(1)], 19));
        let slack = Nanoseconds(20 * SLICE_WAIT.0);
        assert!(clock.now() <= RECOVERY_PATIENCE + slack, "took {}", clock.now());
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
        // Of two that are kept the lower one is no failure.
        journal
            .intend(&Endless.prepare(&action(4, file("/c"))).unwrap())
            .unwrap();
        journal
            .intend(&Endless.prepare(&action(5, file("/c"))).unwrap())
            .unwrap();
        journal.kept(ActionId(4)).unwrap();
        journal.kept(ActionId(5)).unwrap();
        let clock = Still(Cell::new(0));
        let mut hands = Failing {
            fails: ActionId(0),
            undone: Vec::new(),
        };
        let report = restore(&mut journal, &mut hands, &clock, "boot", false);
        assert_eq!(hands.undone, [ActionId(2)], "another file is another matter");
        assert_eq!((report.kept.len(), report.failed.len()), (3, 1), "{report:?}");
        assert!(restore(&mut journal, &mut hands, &clock, "boot", true).complete());
        assert_eq!(hands.undone, [2, 5, 4, 3, 1].map(ActionId));
    }
}
