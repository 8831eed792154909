//! The clean-up log: breakpoints are logged before the kernel inserts them, until they are known to be removed.
//!
//! When a process ends, the kernel removes its breakpoints from other programs. But a process killed during an
//! insertion or removal leaves some behind. The kernel's write into the program's code fails for a dying thread, and is
//! not retried. Each later hit then costs the program a trap. Therefore:
//! * Places are durably logged before the first breakpoint of a search or meter ([`record`]), or not counted.
//! * Active breakpoints are noted before the kernel call, so that an orderly exit waits for them ([`wait_for_all`]).
//!   After the exit begins, none is inserted ([`end`]).
//! * The next start and `homeostat restore` read the log and remove what is left ([`mending`]).

mod mending;
mod record;
#[cfg(test)]
mod tests;

use crate::concern::{Target, large};
use homeostat_kernel::Root;
use homeostat_kernel::release::{kernel_release, kernel_version};
use homeostat_model::ProcessId;
use homeostat_sensors::storage::{DeviceInode, Refusal};
pub use mending::{Mended, mend};
pub use record::write_breakpoints_down_in;
use serde::{Deserialize, Serialize};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

/// Bytes of code logged per place, to detect a changed file.
const CODE: usize = 8;

/// A five-byte `nop`. From Linux 6.18 on, the kernel replaces a counted one by a call. The call writes below the
/// program's stack pointer, where the program may keep data, and its remains do not look like a breakpoint.
const NOP_OF_FIVE: [u8; 5] = [0x0f, 0x1f, 0x44, 0x00, 0x00];
/// Whether this kernel may do so.
static REPLACES: LazyLock<bool> = LazyLock::new(|| {
    kernel_version(&kernel_release(&Root::default())).is_none_or(|version| version >= (6, 18))
});

/// Whether the kernel may write more than a breakpoint over this code, so that it must not be counted.
pub(super) fn is_replaced(code: &[u8]) -> bool {
    *REPLACES && looks_replaceable(code)
}

fn looks_replaceable(code: &[u8]) -> bool {
    cfg!(target_arch = "x86_64") && code.starts_with(&NOP_OF_FIVE)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Breakpoint {
    offset: u64,
    /// Offset of its semaphore. 0: none.
    semaphore: u32,
    /// Bytes of the file there.
    code: [u8; CODE],
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Entry {
    /// Processes that get them first. Children forked meanwhile inherit them.
    processes: Vec<ProcessId>,
    /// The file, as in a list of mappings.
    device_inode: DeviceInode,
    path: String,
    breakpoints: Vec<Breakpoint>,
}

impl Entry {
    /// Places in a file, each with its semaphore, in these processes.
    ///
    /// # Errors
    /// A sentence: the file is unreadable there.
    pub(super) fn new(
        target: &Target,
        places: impl IntoIterator<Item = (u64, u32)>,
        processes: &[ProcessId],
    ) -> Result<Self, Refusal> {
        let breakpoints = places
            .into_iter()
            .map(|(offset, semaphore)| {
                let code = target
                    .file
                    .bytes(offset)
                    .and_then(|bytes| bytes.first_chunk::<CODE>().copied())
                    .ok_or_else(|| {
                        Refusal::Lasting(format!("{} cannot be read at {offset:#x}", target.path))
                    })?;
                if is_replaced(&code) {
                    return Err(Refusal::Lasting(format!(
                        "at {offset:#x} of {} stands a nop of five bytes, which this kernel would replace by a call",
                        target.path
                    )));
                }
                Ok(Breakpoint {
                    offset,
                    semaphore,
                    code,
                })
            })
            .collect::<Result<_, Refusal>>()?;
        Ok(Self {
            processes: processes.to_vec(),
            device_inode: target.device_inode,
            path: target.path.clone(),
            breakpoints,
        })
    }
}

/// Counts active breakpoints, and blocks new ones at the exit.
#[derive(Debug)]
struct Gate {
    on: AtomicUsize,
    ending: AtomicBool,
}

impl Gate {
    const fn new() -> Self {
        Self {
            on: AtomicUsize::new(0),
            ending: AtomicBool::new(false),
        }
    }

    /// Counts up before the check, so that a concurrent exit either waits for this one or is seen here.
    fn enter(&self) -> Result<(), Refusal> {
        self.on.fetch_add(1, Ordering::SeqCst);
        self.open().inspect_err(|_| self.leave())
    }

    fn open(&self) -> Result<(), Refusal> {
        if self.ending.load(Ordering::SeqCst) {
            return Err(Refusal::Now(
                "homeostat is ending: no breakpoint is put in any more".to_owned(),
            ));
        }
        Ok(())
    }

    fn leave(&self) {
        self.on.fetch_sub(1, Ordering::SeqCst);
    }

    fn end(&self) {
        self.ending.store(true, Ordering::SeqCst);
    }

    /// Waits up to `longest` for the count to reach zero. Returns whether it did.
    fn wait(&self, longest: Duration) -> bool {
        let begun = Instant::now();
        while self.on.load(Ordering::SeqCst) > 0 {
            if begun.elapsed() >= longest {
                return false;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        true
    }
}

static GATE: Gate = Gate::new();

/// From now on, no thread of this process inserts breakpoints.
pub(super) fn end() {
    GATE.end();
}

/// Waits up to `longest` for all breakpoints to be removed. Returns whether they are.
pub(super) fn wait_for_all(longest: Duration) -> bool {
    GATE.wait(longest)
}

static LIVING: Mutex<Vec<Weak<Owed>>> = Mutex::new(Vec::new());

/// Whether a breakpoint of ours may be at a place of a file now.
pub(super) fn is_on(file: &DeviceInode, offset: u64) -> bool {
    let living = LIVING.lock().unwrap_or_else(PoisonError::into_inner);
    living.iter().filter_map(Weak::upgrade).any(|owed| {
        owed.on.load(Ordering::SeqCst) > 0
            && owed.entries.iter().any(|entry| {
                entry.device_inode == *file && entry.breakpoints.iter().any(|b| b.offset == offset)
            })
    })
}

/// A log entry, from before the first of its breakpoints is inserted until all are known to be out.
#[derive(Debug)]
pub(super) struct Owed {
    /// Number in the record, if one is kept.
    number: Option<u64>,
    entries: Vec<Entry>,
    on: AtomicUsize,
}

/// Marks breakpoints as active: taken before the kernel call, and held until they are out.
#[derive(Debug)]
pub(super) struct On(Arc<Owed>);

impl Owed {
    /// Logs places before insertion. Refuses a file with code in large pages.
    ///
    /// # Errors
    /// A sentence: logging failed, or homeostat is exiting. Nothing may be inserted then.
    pub(super) fn begin(root: &Root, entries: Vec<Entry>) -> Result<Arc<Self>, Refusal> {
        for entry in &entries {
            large::allow(root, &entry.processes, &entry.device_inode)?;
        }
        GATE.enter()?;
        match record::add(&entries) {
            Ok(number) => Ok(Self::new(number, entries)),
            Err(why) => {
                GATE.leave();
                Err(Refusal::Now(why))
            }
        }
    }

    /// Without logging, for our own code, which ends with us, and for places already in a record.
    ///
    /// # Errors
    /// A sentence: homeostat is exiting.
    pub(super) fn unwritten(entries: Vec<Entry>) -> Result<Arc<Self>, Refusal> {
        GATE.enter()?;
        Ok(Self::new(None, entries))
    }

    fn new(number: Option<u64>, entries: Vec<Entry>) -> Arc<Self> {
        let this = Arc::new(Self {
            number,
            entries,
            on: AtomicUsize::new(0),
        });
        let mut living = LIVING.lock().unwrap_or_else(PoisonError::into_inner);
        living.retain(|owed| owed.strong_count() > 0);
        living.push(Arc::downgrade(&this));
        this
    }

    /// Marks breakpoints as active before the kernel call.
    ///
    /// # Errors
    /// A sentence: homeostat is exiting.
    pub(super) fn take(self: &Arc<Self>) -> Result<On, Refusal> {
        GATE.open()?;
        self.on.fetch_add(1, Ordering::SeqCst);
        Ok(On(self.clone()))
    }
}

impl On {
    /// Checks before another kernel call.
    ///
    /// # Errors
    /// A sentence: homeostat is exiting.
    pub(super) fn may_attach(&self) -> Result<(), Refusal> {
        GATE.open()
    }
}

impl Clone for On {
    fn clone(&self) -> Self {
        self.0.on.fetch_add(1, Ordering::SeqCst);
        Self(self.0.clone())
    }
}

impl Drop for On {
    fn drop(&mut self) {
        self.0.on.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Drop for Owed {
    fn drop(&mut self) {
        if let Some(number) = self.number {
            // An entry stays if the kernel could not remove its breakpoints, for example for lack of memory.
            if !mending::is_left(&self.entries) {
                record::strike(number);
            }
        }
        GATE.leave();
    }
}
