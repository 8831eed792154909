//! What may wait for a process's address space or for the storage of its files, by the bounded reader
//! ([`reader`](crate::reader)): nobody here waits longer than a moment for a process that hangs.
//!
//! One reader for all meters, so that the number of threads that hang is bounded for all of them together.

use crate::reader::{PATIENCE, Reader};
use std::sync::{LazyLock, Mutex, PoisonError};

static READER: LazyLock<Mutex<Reader>> = LazyLock::new(Mutex::default);

/// Runs a job about a process.
///
/// # Errors
/// A sentence: it did not come back in time, or too many did not.
pub fn patiently<T: Send + 'static>(pid: i32, job: impl FnOnce() -> T + Send + 'static) -> Result<T, String> {
    // A job that panicked has left the reader as it was.
    let mut reader = READER.lock().unwrap_or_else(PoisonError::into_inner);
    reader.run(pid, PATIENCE, job).map_err(|e| e.to_string())
}
