//! The state that the journal records add up to. [`Books::enter`] builds it both when the file is read and while the
//! journal is open. So recovery finds exactly what the daemon believed.

use homeostat_model::{ActionId, ExperimentId, UndoRecord};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// Most actions that may be owed at one time; a further `intend` is refused.
pub const OWED_MAX: usize = 1024;
/// Most remembered assignments; the oldest are dropped (an experiment of 200 blocks needs 200).
pub const COINS_MAX: usize = 4096;
/// Most remarks remembered; the oldest are dropped.
pub const REMARKS_MAX: usize = 64;
/// Longest remark in bytes; the rest is cut off.
pub const REMARK_BYTES_MAX: usize = 1024;

/// End of the first record's text if the journal has a `journal.count`. Older versions have none.
pub(super) const COUNTED: &str = ", counted in journal.count";

/// Last known progress of an action whose undo is owed. The undo is owed in every state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OwedState {
    /// Written down; the machine may be changed not at all, in part or wholly.
    Intended,
    /// Carried out to the end.
    Applied,
    /// Its undo has begun.
    Undoing,
    /// Left in force on purpose over a stop of the daemon.
    Kept,
    /// Everything was put back, and nothing was written since; it may be made again.
    PutBack,
}
impl std::fmt::Display for OwedState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Intended => "intended",
            Self::Applied => "applied",
            Self::Undoing => "undoing",
            Self::Kept => "kept",
            Self::PutBack => "put back",
        })
    }
}

/// An action whose undo is owed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Owed {
    /// The record for reverting it.
    pub record: UndoRecord,
    /// How far it got.
    pub state: OwedState,
}
impl Owed {
    /// Whether the machine was booted since. Kernel memory, `/proc` and `/sys` reset at boot: close the record.
    pub fn is_void(&self, boot_id: &str) -> bool {
        self.record.boot_id != boot_id
    }
}

/// The random assignment of one block of an experiment, fixed before the block starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Coin {
    /// The experiment.
    pub experiment: ExperimentId,
    /// Position of the block, from 0.
    pub block: u32,
    /// The arm: whether the change is on in this block.
    pub on: bool,
}

/// Something worth knowing after a crash that owes no undo.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Note {
    /// A random assignment was drawn.
    Coin(Coin),
    /// The experiment ended; its assignments may be forgotten.
    Ended(ExperimentId),
    /// Free text, for people.
    Remark(String),
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Event {
    Start(String),
    /// From now on the undo is owed.
    Intend(Box<UndoRecord>),
    Applied(ActionId),
    Undoing(ActionId),
    Closed(ActionId),
    Kept(ActionId),
    PutBack(ActionId),
    Note(Note),
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Books {
    pub(super) owed: BTreeMap<ActionId, Owed>,
    pub(super) coins: BTreeMap<(ExperimentId, u32), bool>,
    pub(super) remarks: VecDeque<String>,
    /// Highest numbers ever seen; they outlive compaction, so no number is ever used twice.
    pub(super) highest_action: u64,
    pub(super) highest_experiment: u64,
    /// Actions whose undo record existed and is unreadable now.
    pub(super) lost: BTreeSet<ActionId>,
}

impl Books {
    /// Takes one record into account. Records may come in any order; contradictions go to `lost`.
    pub(super) fn enter(&mut self, event: Event) {
        match event {
            Event::Start(_) => {}
            Event::Intend(record) => {
                let id = record.action.id;
                self.highest_action = self.highest_action.max(id.0);
                self.lost.remove(&id);
                self.owed.insert(
                    id,
                    Owed {
                        record: *record,
                        state: OwedState::Intended,
                    },
                );
            }
            Event::Applied(id) => self.advance(id, OwedState::Applied),
            Event::Undoing(id) => self.advance(id, OwedState::Undoing),
            Event::Kept(id) => self.advance(id, OwedState::Kept),
            Event::PutBack(id) => self.advance(id, OwedState::PutBack),
            Event::Closed(id) => {
                self.highest_action = self.highest_action.max(id.0);
                self.owed.remove(&id);
                self.lost.remove(&id);
            }
            Event::Note(Note::Coin(coin)) => {
                self.highest_experiment = self.highest_experiment.max(coin.experiment.0);
                self.coins.insert((coin.experiment, coin.block), coin.on);
                while self.coins.len() > COINS_MAX {
                    self.coins.pop_first();
                }
            }
            Event::Note(Note::Ended(id)) => {
                self.highest_experiment = self.highest_experiment.max(id.0);
                let later = self.coins.split_off(&(id, 0));
                self.coins
                    .extend(later.into_iter().filter(|((experiment, _), _)| *experiment != id));
            }
            Event::Note(Note::Remark(text)) => {
                self.remarks.push_back(text);
                while self.remarks.len() > REMARKS_MAX {
                    self.remarks.pop_front();
                }
            }
        }
    }

    fn advance(&mut self, id: ActionId, state: OwedState) {
        self.highest_action = self.highest_action.max(id.0);
        match self.owed.get_mut(&id) {
            Some(owed) => owed.state = state,
            None => {
                self.lost.insert(id);
            }
        }
    }

    /// After a loss of records: nothing counts as put back any more, and every existing change is undone.
    pub(super) fn doubt(&mut self) {
        for owed in self.owed.values_mut().filter(|o| o.state == OwedState::PutBack) {
            owed.state = OwedState::Applied;
        }
    }

    /// Actions whose undo is owed, or would be if its record were not lost.
    pub(super) fn open(&self) -> BTreeSet<ActionId> {
        self.owed.keys().chain(&self.lost).copied().collect()
    }

    /// The shortest list of records for this state.
    pub(super) fn retell(&self) -> impl Iterator<Item = Event> + '_ {
        let start = std::iter::once(Event::Start(format!(
            "{}{COUNTED}",
            concat!("homeostat ", env!("CARGO_PKG_VERSION"))
        )));
        let owed = self.owed.iter().flat_map(|(id, owed)| {
            let state = match owed.state {
                OwedState::Intended => None,
                OwedState::Applied => Some(Event::Applied(*id)),
                OwedState::Undoing => Some(Event::Undoing(*id)),
                OwedState::Kept => Some(Event::Kept(*id)),
                OwedState::PutBack => Some(Event::PutBack(*id)),
            };
            std::iter::once(Event::Intend(Box::new(owed.record.clone()))).chain(state)
        });
        // Still missing after the damage was set aside: say so again at every start until it is closed.
        let lost = self.lost.iter().map(|id| Event::Applied(*id));
        let coins = self
            .coins
            .iter()
            .map(|((experiment, block), on)| {
                Note::Coin(Coin {
                    experiment: *experiment,
                    block: *block,
                    on: *on,
                })
            })
            .map(Event::Note);
        let remarks = self.remarks.iter().cloned().map(Note::Remark).map(Event::Note);
        start.chain(owed).chain(lost).chain(coins).chain(remarks)
    }
}
