//! Jobs that may wait for a process's address space or storage, run by the bounded reader ([`reader`](crate::reader)).
//! All meters share one reader, which bounds the number of hanging threads for all together.

use crate::reader::{PATIENCE, Reader};
use std::sync::{LazyLock, Mutex, PoisonError};

static READER: LazyLock<Mutex<Reader>> = LazyLock::new(Mutex::default);

/// Runs a job about a process.
///
/// # Errors
/// A sentence: it did not return in time, or too many did not.
pub fn patiently<T: Send + 'static>(pid: i32, job: impl FnOnce() -> T + Send + 'static) -> Result<T, String> {
    let mut reader = READER.lock().unwrap_or_else(PoisonError::into_inner);
    reader.run(pid, PATIENCE, job).map_err(|e| e.to_string())
}
