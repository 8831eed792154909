//! What homeostat writes down: the crash-safe undo [`journal`] and the SQLite [`history`].
//!
//! The two are independent on purpose. The journal is small, plain text and synced to the disk before every
//! change of the machine; recovery needs it and nothing else. The history is large and convenient; losing it
//! costs knowledge, never the way back. The [`switch`] says whether homeostat may act at all.

pub mod history;
pub mod journal;
pub mod switch;
pub mod trust;

pub use history::{History, HistoryError, HistoryOptions, ResilientHistory};
pub use journal::{Journal, JournalError, JournalOptions, Recovered};

/// Cuts a text off after at most `bytes_max` bytes, between two characters.
fn cut(text: &mut String, bytes_max: usize) {
    let mut at = text.len().min(bytes_max);
    while !text.is_char_boundary(at) {
        at -= 1;
    }
    text.truncate(at);
}
