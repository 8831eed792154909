//! The least content of the journal, in a second file, so that the loss of the journal or of its end is noticed.
//! `journal.count` has two slots of a fixed size, written alternately. The valid slot with the higher number counts, so
//! a torn write leaves the one before. The file is written after the journal: it may know less, never more.

use homeostat_model::ActionId;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;

/// Bytes of one slot: [`OWED_MAX`](super::OWED_MAX) numbers of 20 digits with commas, and the rest of the line.
pub(super) const SLOT_BYTES: u64 = 32 * 1024;
pub(super) const COUNT_BYTES: u64 = 2 * SLOT_BYTES;

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Count {
    /// Number of the record after the last one.
    pub(super) next: u64,
    /// The same for the last one that is synced.
    pub(super) synced: u64,
    /// Boot in which this was written. After another boot only synced records are expected.
    pub(super) boot: String,
    /// Highest action and experiment numbers.
    pub(super) a: u64,
    pub(super) e: u64,
    /// Actions whose undo is owed or lost.
    pub(super) open: BTreeSet<ActionId>,
}

impl Count {
    /// Number of the record after the last one that must be there.
    pub(super) fn expected(&self, boot: &str) -> u64 {
        if self.boot == boot { self.next } else { self.synced }
    }

    /// The line for a slot; `None` when it does not fit.
    pub(super) fn encode(&self) -> Option<Vec<u8>> {
        let json = serde_json::to_string(self).ok()?;
        let line = format!("{:08x} {json}\n", crc32fast::hash(json.as_bytes()));
        (line.len() as u64 <= SLOT_BYTES).then(|| line.into_bytes())
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Found {
    /// No file, or one that was made and never written.
    Nothing,
    /// A file without a valid slot.
    Unreadable,
    Valid(Count),
}

pub(super) fn decode(bytes: &[u8]) -> Found {
    if bytes.iter().all(|b| *b == 0) {
        return Found::Nothing;
    }
    let slot = usize::try_from(SLOT_BYTES).unwrap_or(usize::MAX);
    let valid = bytes.chunks(slot).filter_map(|slot| {
        let end = slot.iter().position(|b| *b == b'\n')?;
        let json = super::line::whole_record(slot.get(..end)?)?;
        serde_json::from_slice::<Count>(json).ok()
    });
    valid
        .max_by_key(|count| count.next)
        .map_or(Found::Unreadable, Found::Valid)
}
