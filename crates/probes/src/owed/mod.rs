//! Breakpoints that are owed their end: written down before the kernel is asked to put them in, until they are known to be out.
//!
//! The kernel takes the breakpoints of a process that ends out of the programs that they were put into, but not where that one is
//! killed in the very moment in which some are put in or taken out: its own writes into a program's code give up for a thread that
//! is being killed, and it does not try again. What is left then costs the program a trap at each hit, for as long as it runs. So:
//! * before the first breakpoint of a search or of a meter it is durably written down where they will be ([`record`]), and what cannot
//!   be written down is not counted;
//! * it is noted that something is on before the kernel is asked, so that an orderly end waits for it ([`wait_for_all`]), and once
//!   the end has begun nothing more is asked for ([`end`]);
//! * the next start, and `homeostat restore`, look at what an earlier homeostat has written down, and take out what it left
//!   ([`mending`]).

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

/// Bytes of code that are written down of each place: whether the file still holds what it held.
const CODE: usize = 8;

/// A `nop` of five bytes. From Linux 6.18 on the kernel replaces one that is counted by a call, which writes below the stack pointer
/// of the program, where that may keep its own; and what is left of it does not look like a breakpoint.
const NOP_OF_FIVE: [u8; 5] = [0x0f, 0x1f, 0x44, 0x00, 0x00];
/// Whether this kernel may do so.
static REPLACES: LazyLock<bool> = LazyLock::new(|| {
    kernel_version(&kernel_release(&Root::default())).is_none_or(|version| version >= (6, 18))
});

/// Whether the kernel may put more than a breakpoint where this code is: it must not be counted.
pub(super) fn is_replaced(code: &[u8]) -> bool {
    *REPLACES && looks_replaceable(code)
}

fn looks_replaceable(code: &[u8]) -> bool {
    cfg!(target_arch = "x86_64") && code.starts_with(&NOP_OF_FIVE)
}

/// A place that is counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Breakpoint {
    /// Offset in the file.
    offset: u64,
    /// That of its semaphore; 0: it has none.
    semaphore: u32,
    /// What the file holds there.
    code: [u8; CODE],
}

/// Places of a file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Entry {
    /// In whose memory they are put first. Children that are forked meanwhile have them, too.
    processes: Vec<ProcessId>,
    /// The file, as a list of mappings gives it.
    device_inode: DeviceInode,
    path: String,
    breakpoints: Vec<Breakpoint>,
}

impl Entry {
    /// Places of a file, each with its semaphore, in these processes.
    ///
    /// # Errors
    /// A sentence: the file cannot be read there.
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

/// How many things are counted with, and whether more may come.
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

    /// One more. Noted before it is looked whether it may be: who ends meanwhile either waits for it or is seen here.
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

    /// Waits until there is none any more, at most so long; whether that is so.
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

/// From now on nothing more is put in, by anybody in this process.
pub(super) fn end() {
    GATE.end();
}

/// Waits until nothing is counted with any more, at most so long; whether that is so.
pub(super) fn wait_for_all(longest: Duration) -> bool {
    GATE.wait(longest)
}

/// Those that have not ended.
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

/// That breakpoints may come to be in, from before the first of them is put in until the last is known to be out.
#[derive(Debug)]
pub(super) struct Owed {
    /// Number in the record, where one is kept.
    number: Option<u64>,
    entries: Vec<Entry>,
    /// So many things may be counted with at present.
    on: AtomicUsize,
}

/// That they may be in at present: taken before the kernel is asked, and held until they are out.
#[derive(Debug)]
pub(super) struct On(Arc<Owed>);

impl Owed {
    /// Writes down where breakpoints are about to be put, of whose files none has its code in large pages.
    ///
    /// # Errors
    /// A sentence: it cannot be written down, or homeostat is ending. Then none may be put in.
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

    /// The same of our own code, which ends with us, and of what is written down already.
    ///
    /// # Errors
    /// A sentence: homeostat is ending.
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

    /// The kernel is about to be asked for some of them.
    ///
    /// # Errors
    /// A sentence: homeostat is ending.
    pub(super) fn take(self: &Arc<Self>) -> Result<On, Refusal> {
        GATE.open()?;
        self.on.fetch_add(1, Ordering::SeqCst);
        Ok(On(self.clone()))
    }
}

impl On {
    /// Whether the kernel may be asked for one more of them.
    ///
    /// # Errors
    /// A sentence: homeostat is ending.
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
            // What the kernel could not take out, for want of memory for example, stays written down.
            if !mending::is_left(&self.entries) {
                record::strike(number);
            }
        }
        GATE.leave();
    }
}
