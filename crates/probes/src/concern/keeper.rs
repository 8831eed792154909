//! Keeps probes that cannot be detached now, and detaches them later.
//!
//! Removing a breakpoint waits for every process that maps the file, like inserting one. While one of them stands
//! still, the breakpoint stays, and a thread retries. An orderly exit waits for that, within limits
//! ([`wait_for_all`](crate::owed::wait_for_all)). The end of the process removes the rest, whoever that blocks.

use crate::concern::Files;
use crate::owed::On;
use homeostat_kernel::Root;
use homeostat_model::ProcessId;
use homeostat_sensors::storage::Refusal;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

const BEAT: Duration = Duration::from_secs(1);

struct Kept {
    root: Root,
    files: Files,
    processes: Vec<ProcessId>,
    /// Dropping it removes the breakpoints.
    what: Box<dyn Send>,
    /// Dropped after them.
    on: On,
}

struct Store {
    kept: Vec<Kept>,
    looked_after: bool,
}

static STORE: Mutex<Store> = Mutex::new(Store {
    kept: Vec::new(),
    looked_after: false,
});

/// Links or counters that are detached only when this blocks nobody, however they end.
pub(crate) struct Held<T: Send + 'static> {
    root: Root,
    files: Files,
    processes: Vec<ProcessId>,
    /// The probes are dropped before the mark.
    what: Option<(T, On)>,
}

impl<T: Send + 'static> Held<T> {
    /// Takes over probes in these files and processes, with the mark from before they were attached.
    pub(crate) fn new(root: &Root, files: &Files, processes: &[ProcessId], what: T, on: On) -> Self {
        Self {
            root: root.clone(),
            files: files.clone(),
            processes: processes.to_vec(),
            what: Some((what, on)),
        }
    }

    /// Detaches now, or leaves it to the retrying thread.
    ///
    /// # Errors
    /// A sentence: a process stands still, and detachment follows later.
    pub(crate) fn let_go(mut self) -> Result<(), Refusal> {
        self.take_off()
    }

    /// Detaches without a check. The caller has just checked.
    pub(crate) fn take_off_now(mut self) {
        drop(self.what.take());
    }

    fn take_off(&mut self) -> Result<(), Refusal> {
        let Some((what, on)) = self.what.take() else {
            return Ok(());
        };
        let Err(why) = self.files.settled(&self.root, &self.processes) else {
            drop(what);
            drop(on);
            return Ok(());
        };
        keep(Kept {
            root: self.root.clone(),
            files: self.files.clone(),
            processes: self.processes.clone(),
            what: Box::new(what),
            on,
        });
        Err(Refusal::Now(format!(
            "{why}; what is counted with stays until it does, and is taken off then"
        )))
    }
}

impl<T: Send + 'static> Drop for Held<T> {
    fn drop(&mut self) {
        // No caller is left to report a delay to.
        let _ = self.take_off();
    }
}

fn keep(kept: Kept) {
    let mut store = STORE.lock().unwrap_or_else(PoisonError::into_inner);
    store.kept.push(kept);
    if !store.looked_after {
        // If no thread can be made, the next caller tries again. Until then the probes stay.
        store.looked_after = std::thread::Builder::new()
            .name("points-keep".to_owned())
            .stack_size(256 * 1024)
            .spawn(look_after)
            .is_ok();
    }
}

fn look_after() {
    loop {
        std::thread::sleep(BEAT);
        let mut store = STORE.lock().unwrap_or_else(PoisonError::into_inner);
        if store.kept.is_empty() {
            store.looked_after = false;
            return;
        }
        // Releases the lock, so that callers do not wait.
        let all = std::mem::take(&mut store.kept);
        drop(store);
        for kept in all {
            if kept.files.settled(&kept.root, &kept.processes).is_ok() {
                let Kept { what, on, .. } = kept;
                drop(what);
                drop(on);
            } else {
                let mut store = STORE.lock().unwrap_or_else(PoisonError::into_inner);
                store.kept.push(kept);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::concern::{Looked, Others};
    use crate::owed::Owed;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::time::Instant;

    struct Flag(Arc<AtomicBool>);

    impl Drop for Flag {
        fn drop(&mut self) {
            self.0.store(true, Ordering::SeqCst);
        }
    }

    #[test]
    fn what_concerns_nobody_who_stands_still_is_taken_off_at_once() {
        let files = Files {
            targets: Vec::new(),
            others: Others::None,
            pages: 1,
            looked: Looked::default(),
        };
        let gone = ProcessId {
            pid: i32::MAX,
            start_ticks: 1,
        };
        for explicit in [true, false] {
            let off = Arc::new(AtomicBool::new(false));
            let held = Held::new(
                &Root::default(),
                &files,
                &[gone],
                Flag(off.clone()),
                Owed::unwritten(Vec::new()).unwrap().take().unwrap(),
            );
            assert!(!off.load(Ordering::SeqCst));
            let outcome = if explicit {
                held.let_go()
            } else {
                drop(held);
                Ok(())
            };
            // Somebody else on this machine may stand still in a fork just now (another test does): then it goes a little later.
            if let Err(why) = outcome {
                assert!(why.to_string().contains("making a process"), "{why}");
            }
            let begun = Instant::now();
            while !off.load(Ordering::SeqCst) {
                assert!(begun.elapsed() < Duration::from_secs(60), "it is never taken off");
                std::thread::sleep(Duration::from_millis(5));
            }
        }
    }
}
