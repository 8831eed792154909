//! A change that a person asks for, outside any experiment. Its undo is on disk first. It stays until the person takes
//! it back. A failure half way reverts it in full.

use crate::recovery;
use homeostat_model::{Action, ActionId, Direction, UndoRecord};
use homeostat_platform::{Clock, Effectors, PlatformError};
use homeostat_store::{Journal, JournalError};

/// Why a change was not made, or not taken back.
#[derive(Debug, thiserror::Error)]
pub enum ByHandError {
    /// The machine refused; it is as it was.
    #[error("{0}")]
    Machine(#[from] PlatformError),
    /// The journal cannot be written, so nothing was changed.
    #[error("{0}")]
    Journal(#[from] JournalError),
    /// The change failed, and so did its undo, which is still owed.
    #[error("{why}; and it could not be put back: {undo}\n  hint: `homeostat restore` tries again")]
    HalfWay {
        /// Why the change failed.
        why: String,
        /// Why the undo failed.
        undo: String,
    },
    /// The undo failed and is still owed.
    #[error("change {id} could not be taken back: {why}\n  hint: try again, or `homeostat restore --kept`")]
    Undo {
        /// The action.
        id: ActionId,
        /// Why.
        why: String,
    },
    /// No such change.
    #[error("change {0} is not in the journal")]
    NotFound(ActionId),
}

/// Makes a change and keeps it in force; returns the record of its undo.
///
/// # Errors
/// [`ByHandError`]; but for `HalfWay` the machine is as it was.
pub fn change(
    journal: &mut Journal,
    effectors: &mut dyn Effectors,
    clock: &dyn Clock,
    action: &Action,
) -> Result<UndoRecord, ByHandError> {
    let record = effectors.prepare(action)?;
    journal.intend(&record)?;
    if let Err(failed) = recovery::drive(effectors, clock, &record, Direction::Apply) {
        return Err(
            match recovery::drive(effectors, clock, &record, Direction::Undo) {
                Ok(_) => {
                    journal.closed(action.id)?;
                    effectors.forget(&record);
                    failed.into_error(&record)
                }
                Err(undo) => ByHandError::HalfWay {
                    why: failed.to_string(),
                    undo: undo.to_string(),
                },
            },
        );
    }
    journal.applied(action.id)?;
    journal.kept(action.id)?;
    effectors.forget(&record);
    Ok(record)
}

/// Takes a change back. False: nothing was left to take back.
///
/// The end of keeping is on disk before the first step: a start that found the change kept would leave it half undone.
/// An unwritable journal does not stop a person's undo. A change that lies under another one waits: otherwise its undo
/// would take the upper value for somebody else's and strike the record off.
///
/// # Errors
/// [`ByHandError`]; the undo stays owed.
pub fn take_back(
    journal: &mut Journal,
    effectors: &mut dyn Effectors,
    clock: &dyn Clock,
    id: ActionId,
) -> Result<bool, ByHandError> {
    let record = journal
        .find(id)
        .map(|owed| owed.record.clone())
        .ok_or(ByHandError::NotFound(id))?;
    let over = journal
        .owed()
        .map(|owed| &owed.record)
        .find(|other| other.boot_id == record.boot_id && other.action.lies_over(&record.action));
    if let Some(over) = over {
        let why = format!("change {} lies over it and is not undone", over.action.id);
        return Err(ByHandError::Undo { id, why });
    }
    if journal.is_kept(id) {
        let _ = journal.undoing(id);
    }
    let taken =
        recovery::drive(effectors, clock, &record, Direction::Undo).map_err(|why| ByHandError::Undo {
            id,
            why: why.to_string(),
        })?;
    effectors.forget(&record);
    journal.closed(id)?;
    Ok(taken)
}

impl recovery::Undriven {
    fn into_error(self, record: &UndoRecord) -> ByHandError {
        match self {
            Self::Machine(e) => e.into(),
            Self::Late => PlatformError::Busy {
                what: format!("{} of {}", record.action.effector, record.action.workload),
                why: self.to_string(),
            }
            .into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use homeostat_model::action::Target;
    use homeostat_model::{Nanoseconds, Progress};
    use homeostat_store::JournalOptions;
    use homeostat_store::journal::OwedState;
    use std::collections::BTreeMap;
    use std::io;

    /// One number.
    struct Number {
        value: u32,
        refuses: bool,
    }

    impl Effectors for Number {
        fn prepare(&mut self, action: &Action) -> Result<UndoRecord, PlatformError> {
            Ok(UndoRecord {
                action: action.clone(),
                boot_id: "boot".into(),
                found: BTreeMap::from([("value".to_owned(), self.value.to_string())]),
            })
        }
        fn advance(&mut self, record: &UndoRecord, direction: Direction) -> Result<Progress, PlatformError> {
            match direction {
                Direction::Apply => {
                    self.value = 7;
                    if self.refuses {
                        return Err(PlatformError::Rejected {
                            what: "number".into(),
                            value: "7".into(),
                            errno: "no".into(),
                        });
                    }
                }
                Direction::Undo => self.value = record.found["value"].parse().unwrap(),
            }
            Ok(Progress {
                done: true,
                ..Progress::default()
            })
        }
        fn forget(&mut self, _: &UndoRecord) {}
    }

    struct Still;
    impl Clock for Still {
        fn now(&self) -> Nanoseconds {
            Nanoseconds(0)
        }
        fn unix_seconds(&self) -> u64 {
            0
        }
        fn sleep(&self, _: Nanoseconds) {}
    }

    fn action(id: u64) -> Action {
        Action {
            id: ActionId(id),
            effector: "number".into(),
            workload: "host".into(),
            target: Target::Nothing,
            arguments: BTreeMap::new(),
            why: "asked for".into(),
        }
    }

    #[test]
    fn a_change_is_kept_until_it_is_taken_back() {
        let directory = tempfile::tempdir().unwrap();
        let (mut journal, _) = Journal::open(directory.path(), JournalOptions::default()).unwrap();
        let mut number = Number {
            value: 1,
            refuses: false,
        };
        change(&mut journal, &mut number, &Still, &action(1)).unwrap();
        assert_eq!(number.value, 7);
        assert_eq!(journal.find(ActionId(1)).unwrap().state, OwedState::Kept);
        // Recovery leaves it alone.
        let report = crate::restore(&mut journal, &mut number, &Still, "boot", false);
        assert_eq!((report.kept.len(), number.value), (1, 7));
        assert!(take_back(&mut journal, &mut number, &Still, ActionId(1)).unwrap());
        assert_eq!((number.value, journal.owed().count()), (1, 0));
        assert!(matches!(
            take_back(&mut journal, &mut number, &Still, ActionId(1)),
            Err(ByHandError::NotFound(_))
        ));
    }

    #[test]
    fn what_another_change_lies_over_is_taken_back_after_it() {
        let directory = tempfile::tempdir().unwrap();
        let (mut journal, _) = Journal::open(directory.path(), JournalOptions::default()).unwrap();
        let mut number = Number {
            value: 1,
            refuses: false,
        };
        // The two names of one setting.
        for (id, file) in [(1, "/proc/sys/vm/dirty_ratio"), (2, "/proc/sys/vm/dirty_bytes")] {
            let action = Action {
                target: Target::Files(vec![file.to_owned()]),
                ..action(id)
            };
            change(&mut journal, &mut number, &Still, &action).unwrap();
        }
        let early = take_back(&mut journal, &mut number, &Still, ActionId(1));
        assert!(
            matches!(&early, Err(ByHandError::Undo { why, .. }) if why.contains("change 2 lies over it")),
            "{early:?}"
        );
        for id in [2, 1] {
            take_back(&mut journal, &mut number, &Still, ActionId(id)).unwrap();
        }
        assert_eq!((number.value, journal.owed().count()), (1, 0));
    }

    #[test]
    fn what_fails_half_way_is_put_back() {
        let directory = tempfile::tempdir().unwrap();
        let (mut journal, _) = Journal::open(directory.path(), JournalOptions::default()).unwrap();
        let mut number = Number {
            value: 1,
            refuses: true,
        };
        let outcome = change(&mut journal, &mut number, &Still, &action(1));
        assert!(matches!(outcome, Err(ByHandError::Machine(_))), "{outcome:?}");
        assert_eq!((number.value, journal.owed().count()), (1, 0));
    }

    /// Killed at each step of the journal: the machine is as it was, or the change is kept.
    #[test]
    fn after_a_crash_at_any_step_the_machine_is_whole() {
        let mut crashed = 0;
        for point in [
            "intend.before_write",
            "intend.after_write",
            "intend.after_sync",
            "applied.before_write",
            "applied.after_write",
            "kept.before_write",
            "kept.after_write",
            "kept.after_sync",
        ] {
            let directory = tempfile::tempdir().unwrap();
            let mut number = Number {
                value: 1,
                refuses: false,
            };
            let options = JournalOptions {
                fault: Some(Box::new(move |step| {
                    if step == point {
                        Err(io::Error::other("crash"))
                    } else {
                        Ok(())
                    }
                })),
                ..JournalOptions::default()
            };
            {
                let (mut journal, _) = Journal::open(directory.path(), options).unwrap();
                crashed += usize::from(change(&mut journal, &mut number, &Still, &action(1)).is_err());
            }
            let (mut journal, _) = Journal::open(directory.path(), JournalOptions::default()).unwrap();
            let report = crate::restore(&mut journal, &mut number, &Still, "boot", false);
            assert!(report.complete());
            let expected = if report.kept.is_empty() { 1 } else { 7 };
            assert_eq!(number.value, expected, "{point}: {report:?}");
        }
        assert!(crashed >= 6, "{crashed}");
    }
}
