//! What may wait for a process's address space or for the storage of its files, by the bounded reader
//! ([`reader`](crate::sensors::reader)): nobody here waits longer than a moment for a process that hangs.
//!
//! One reader for all meters, and one for the paths of their servers, so that the number of threads that hang is bounded for all of
//! them together.

use crate::sensors::reader::{PATIENCE, Reader};
use std::sync::{LazyLock, Mutex, PoisonError};
use std::time::Duration;

static READER: LazyLock<Mutex<Reader>> = LazyLock::new(Mutex::default);

/// A path is looked up again so long after it was late: a server that is measured is asked every second, and one that was late once
/// is not to go without readings for long.
const PATH_REST: Duration = Duration::from_secs(2);
static PATHS: LazyLock<Mutex<Reader>> = LazyLock::new(|| Mutex::new(Reader::with_rest(PATH_REST)));

/// Runs a job about a process.
///
/// # Errors
/// A sentence: it did not come back in time, or too many did not.
pub(super) fn patiently<T: Send + 'static>(
    pid: i32,
    job: impl FnOnce() -> T + Send + 'static,
) -> Result<T, String> {
    run(&READER, pid, job)
}

/// Runs a job that looks up the path at which a process listens.
///
/// # Errors
/// As of [`patiently`].
pub(super) fn look_up<T: Send + 'static>(
    pid: i32,
    job: impl FnOnce() -> T + Send + 'static,
) -> Result<T, String> {
    run(&PATHS, pid, job)
}

fn run<T: Send + 'static>(
    reader: &Mutex<Reader>,
    pid: i32,
    job: impl FnOnce() -> T + Send + 'static,
) -> Result<T, String> {
    // A job that panicked has left the reader as it was.
    let mut reader = reader.lock().unwrap_or_else(PoisonError::into_inner);
    reader.run(pid, PATIENCE, job).map_err(|e| e.to_string())
}
