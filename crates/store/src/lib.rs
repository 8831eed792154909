//! Persistent state: the crash-safe undo [`journal`], the SQLite [`history`], and the [`switch`] that permits actions.
//!
//! Journal and history are independent. The journal is small, plain text and synced before every change. Recovery needs
//! nothing else. A lost history costs knowledge, never an undo.

pub mod history;
pub mod journal;
pub mod switch;
pub mod trust;

pub use history::{History, HistoryError, HistoryOptions, ResilientHistory};
pub use journal::{Journal, JournalError, JournalOptions, Recovered};

/// Cuts a text to at most `bytes_max` bytes, between two characters.
fn cut(text: &mut String, bytes_max: usize) {
    let mut at = text.len().min(bytes_max);
    while !text.is_char_boundary(at) {
        at -= 1;
    }
    text.truncate(at);
}
