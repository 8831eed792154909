//! Progress counters that a program publishes for homeostat.
//!
//! A program that counts its own finished work gives homeostat the best measure there is: nothing to guess, no
//! probe, no cost. It publishes a small file of counters in shared memory; counting is one relaxed atomic
//! addition, without a system call, and homeostat reads the file from outside. The program runs the same with
//! and without homeostat.
//!
//! ```no_run
//! let progress = homeostat_progress::Publisher::create("my-server", "request", 4).ok();
//! // in the loop of thread 2:
//! if let Some(p) = &progress {
//!     p.counter(2).add(1);
//! }
//! ```
//!
//! * Count **finished units of useful work** of equal size (requests, transactions, frames), not turns of a loop
//!   that may do nothing: what is counted here is what homeostat optimises.
//! * Give each thread a slot of its own. More threads than slots may share slots; that costs time, not counts.
//! * The file is removed when the [`Publisher`] is dropped. A program that was killed leaves its file behind;
//!   such a file is recognised by process id and start time, is never read, and is removed by the next publisher
//!   of the same user.
//! * A forked child that goes on counting through the inherited publisher counts into its parent's file, which
//!   is right for servers that fork workers. A child that publishes on its own creates its own file.
//! * C and C++ programs use `include/homeostat_progress.h`, which does the same. The layout is in [`layout`].

pub mod layout;
mod sys;

use layout::{DIRECTORY, DIRECTORY_VARIABLE, HEADER_SIZE, Header, MAGIC, SLOT_STRIDE, SLOTS_MAX};
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Files of ended processes looked at by one [`Publisher::create`].
const STALE_SCAN_MAX: usize = 256;

/// Process that has a publisher now (0 = none): one file per process.
static PUBLISHING: AtomicU32 = AtomicU32::new(0);

/// The counters of this program, visible to homeostat while this value lives.
#[derive(Debug)]
pub struct Publisher {
    mapping: sys::Mapping,
    slots: usize,
    path: PathBuf,
    pid: u32,
}

/// One counter. Copy it into the thread that uses it.
#[derive(Clone, Copy, Debug)]
pub struct Counter<'a>(&'a AtomicU64);

impl Publisher {
    /// Publishes `slots` counters (1 to 256) that start at zero, in the directory that
    /// `HOMEOSTAT_PROGRESS_DIR` names, else in `/run/homeostat/progress`.
    ///
    /// `name` is for people; `unit` is what one count is, in the singular (`request`).
    ///
    /// # Errors
    /// Whatever the file system says; a number of slots outside the limits; `AlreadyExists` when this process
    /// already has a publisher. A program is expected to go on without.
    pub fn create(name: &str, unit: &str, slots: usize) -> io::Result<Self> {
        let directory = match std::env::var_os(DIRECTORY_VARIABLE) {
            Some(d) if !d.is_empty() => PathBuf::from(d),
            _ => PathBuf::from(DIRECTORY),
        };
        Self::create_in(&directory, name, unit, slots)
    }

    /// As [`Publisher::create`], in a given directory.
    ///
    /// # Errors
    /// As there.
    pub fn create_in(directory: &Path, name: &str, unit: &str, slots: usize) -> io::Result<Self> {
        if slots == 0 || slots > SLOTS_MAX {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("slots: 1 to {SLOTS_MAX}"),
            ));
        }
        let pid = std::process::id();
        // A forked child finds its parent's number here and may publish on its own.
        let before = PUBLISHING.load(Ordering::Acquire);
        if before == pid
            || PUBLISHING
                .compare_exchange(before, pid, Ordering::AcqRel, Ordering::Acquire)
                .is_err()
        {
            return Err(io::Error::new(
                io::ErrorKind::AlreadyExists,
                "this process already publishes its progress",
            ));
        }
        let made = Self::make(directory, name, unit, slots, pid);
        if made.is_err() {
            PUBLISHING.store(0, Ordering::Release);
        }
        made
    }

    fn make(directory: &Path, name: &str, unit: &str, slots: usize, pid: u32) -> io::Result<Self> {
        let start_ticks = start_ticks(Path::new("/proc/self/stat"))?;
        let pid_namespace = fs::metadata("/proc/self/ns/pid").map_or(0, |m| m.ino());
        make_directory(directory)?;
        remove_stale(directory, pid_namespace);

        let path = directory.join(layout::file_name(pid, start_ticks));
        let file = match new_file(&path) {
            // Left by this very process before it called exec (start time and pid stay): nobody writes it.
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {
                fs::remove_file(&path)?;
                new_file(&path)
            }
            other => other,
        }?;
        let filled = (|| {
            let mapping = sys::Mapping::new(&file, layout::file_size(slots))?;
            let clean = |text: &str| text.chars().filter(|c| !c.is_control()).collect::<String>();
            let header = Header {
                slots,
                pid,
                start_ticks,
                pid_namespace,
                unit: clean(unit),
                name: clean(name),
            };
            let bytes = header.to_bytes();
            file.write_all_at(&bytes[MAGIC.len()..], MAGIC.len() as u64)?;
            file.write_all_at(&MAGIC, 0)?;
            Ok(mapping)
        })();
        match filled {
            Ok(mapping) => Ok(Self {
                mapping,
                slots,
                path,
                pid,
            }),
            Err(e) => {
                // Ours and of no use to anybody; the error that counts is the first one.
                let _ = fs::remove_file(&path);
                Err(e)
            }
        }
    }

    /// The counter of a slot; slots beyond the last wrap round to the first.
    pub fn counter(&self, slot: usize) -> Counter<'_> {
        let offset = HEADER_SIZE + (slot % self.slots) * SLOT_STRIDE;
        match self.mapping.counter(offset) {
            Some(counter) => Counter(counter),
            // `slot % slots` keeps the offset inside the mapping that `new` sized for `slots`.
            None => unreachable!("a slot lies inside the file"),
        }
    }

    /// Number of slots.
    pub fn slots(&self) -> usize {
        self.slots
    }

    /// Where the counters are.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Publisher {
    fn drop(&mut self) {
        // In a forked child this is the parent's file, and stays.
        if std::process::id() == self.pid {
            // It may be gone already (somebody cleaned up); nothing to do about it.
            let _ = fs::remove_file(&self.path);
            PUBLISHING.store(0, Ordering::Release);
        }
    }
}

impl Counter<'_> {
    /// Counts `n` finished units. Wait-free; no ordering with other memory.
    pub fn add(&self, n: u64) {
        self.0.fetch_add(n, Ordering::Relaxed);
    }
    /// Count so far.
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

fn new_file(path: &Path) -> io::Result<File> {
    OpenOptions::new()
        .read(true)
        .write(true)
        .create_new(true)
        .mode(0o644)
        .custom_flags(libc::O_NOFOLLOW | libc::O_CLOEXEC)
        .open(path)
}

/// Makes the directory if it is missing, for this user alone. The one in which every user may publish is made by the daemon, which
/// limits its size: else every user could fill `/run`.
fn make_directory(directory: &Path) -> io::Result<()> {
    fs::DirBuilder::new()
        .recursive(true)
        .mode(0o755)
        .create(directory)
}

/// Removes files of this user whose process has ended, as far as `STALE_SCAN_MAX` entries tell. A process id
/// means something only in its namespace, so files of other namespaces stay.
fn remove_stale(directory: &Path, pid_namespace: u64) {
    let Ok(entries) = fs::read_dir(directory) else {
        return;
    };
    for entry in entries.flatten().take(STALE_SCAN_MAX) {
        let name = entry.file_name();
        let Some((pid, start)) = name.to_str().and_then(layout::parse_file_name) else {
            continue;
        };
        let Ok(metadata) = entry.metadata() else { continue };
        if !metadata.is_file() || metadata.uid() != sys::effective_uid() {
            continue;
        }
        let lives = match start_ticks(Path::new(&format!("/proc/{pid}/stat"))) {
            Ok(now) => now == start,
            Err(e) => e.kind() != io::ErrorKind::NotFound,
        };
        if lives {
            continue;
        }
        let header = File::open(entry.path()).and_then(|f| {
            let mut bytes = [0; HEADER_SIZE];
            f.read_exact_at(&mut bytes, 0)?;
            Header::parse(&bytes, metadata.len()).map_err(io::Error::other)
        });
        if header.is_ok_and(|h| h.pid_namespace == pid_namespace && (h.pid, h.start_ticks) == (pid, start)) {
            // Another publisher may have been faster.
            let _ = fs::remove_file(entry.path());
        }
    }
}

/// Field 22 of a `stat` file: start time in clock ticks since boot (proc(5)).
fn start_ticks(stat: &Path) -> io::Result<u64> {
    let text = fs::read(stat)?;
    // The name in parentheses may contain anything, blanks and parentheses included.
    let after_name = text.iter().rposition(|&c| c == b')').map_or(0, |p| p + 1);
    String::from_utf8_lossy(&text[after_name..])
        .split_ascii_whitespace()
        .nth(19)
        .and_then(|field| field.parse().ok())
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "no start time in the stat file"))
}
