//! The undo journal: what homeostat changed on this machine and has not yet reverted.
//!
//! **Problem.** The daemon may be killed, or the kernel may stop, between any two instructions. After that
//! the machine must still be restorable. So the undo of an action is on the disk *before* the action is taken
//! ([`Journal::intend`]), and stays there until the undo is known to be done ([`Journal::closed`]).
//!
//! **Shape.** One text file, `journal`, in the state directory (mode 0700, file 0600); one record a line,
//! each with format version, sequence number and CRC-32 (see `line`). Records are only appended. A file that
//! has grown is replaced by its shortest equivalent: `journal.new` is written and synced, renamed over
//! `journal`, and the directory is synced; at every moment one of the two is complete. `journal.lock` holds
//! an exclusive `flock` and the number of the process that has it, so a second daemon, or `restore` beside a
//! running daemon, is refused.
//!
//! **What a caller can rely on**
//!
//! | call | on success | on error |
//! |---|---|---|
//! | [`intend`](Journal::intend) | synced: the undo is owed | nothing is owed in memory; do not act. A crash now may find the undo owed nevertheless: harmless, undo is idempotent |
//! | [`applied`](Journal::applied), [`undoing`](Journal::undoing) | written, not synced: they change how far an action got, never whether it is owed | unchanged; the undo stays owed |
//! | [`undoing`](Journal::undoing) of what is kept | synced: it is no longer kept, and a start that finds it undoes it | it is still kept: a start would leave it as it is |
//! | [`put_back`](Journal::put_back) | written, not synced: a kill leaves what was written, and a boot voids the record | unchanged; the undo stays owed |
//! | [`kept`](Journal::kept) | synced | unchanged |
//! | [`closed`](Journal::closed) | synced: nothing is owed | still owed: call again, or undo again after a restart |
//! | [`note`](Journal::note) | synced: the block may start | the coin is not fixed: do not start the block |
//!
//! **Full disk.** The file always has allocated space ahead of its end ([`RESERVE_BYTES`]). `intend` is refused
//! when it would eat into it, notes and states may use a part of it, `closed` all of it: so what was begun
//! can be ended on a full disk.
//!
//! **Damage.** Every record that is whole is used, wherever it stands. Damage is reported in [`Recovered`], with
//! the numbers of actions whose record is known to be lost, and the damaged file is copied aside before the
//! journal is rewritten. An unfinished last line is what a crash leaves behind, not damage. A second file,
//! `journal.count`, holds the number of records and the actions in force: it shows the loss of whole records at the end of the
//! journal, of the journal, or of all that stands in it. It is written after the record, and before an action may be taken.
//!
//! **After a failed sync** the kernel may have dropped the data and report success the next time (the `fsync`
//! man page, *BUGS* of many file systems), so the journal never syncs the same pages twice: it writes itself
//! anew from memory before it takes the next record.
//!
//! Why not a table in the history database: recovery would need SQLite, its WAL and its recovery, on a
//! machine in trouble. Why not a binary format: a person must be able to read what is owed with `less`.

mod books;
mod count;
mod line;
#[cfg(test)]
mod mutation_tests;

pub use books::{COINS_MAX, Coin, Note, OWED_MAX, Owed, OwedState, REMARK_BYTES_MAX, REMARKS_MAX};
pub use line::FORMAT_VERSION;

use crate::trust;
use books::{Books, Event};
use count::{Count, Found};
use homeostat_model::{ActionId, ExperimentId, UndoRecord};
use rustix::fs::{FallocateFlags, FlockOperation, Mode, OFlags};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{DirBuilder, File};
use std::io::{self, Read, Write};
use std::ops::Range;
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt};
use std::path::{Path, PathBuf};

/// Name of the journal in the state directory.
pub const JOURNAL_FILE: &str = "journal";
/// Name of the file that is written during compaction.
pub const NEW_FILE: &str = "journal.new";
/// Name of the file with the number of records and the actions in force.
pub const COUNT_FILE: &str = "journal.count";
/// Name of the lock file.
pub const LOCK_FILE: &str = "journal.lock";

/// Space kept allocated after the last record, for closing on a full disk: more than 300 records of the
/// small kind (about 150 bytes).
pub const RESERVE_BYTES: u64 = 64 * 1024;
/// Largest single record; an undo record of half a million 2 MiB pieces (1 TiB) takes about 8 MiB.
pub const RECORD_BYTES_MAX: u64 = 16 * 1024 * 1024;
/// Largest journal; beyond it nothing more is intended.
pub const JOURNAL_BYTES_MAX: u64 = 64 * 1024 * 1024;
/// Size from which a journal is compacted when at least half of it is history.
const COMPACT_BYTES: u64 = 256 * 1024;
/// Damaged files kept for a person to look at; further ones are not copied.
const SET_ASIDE_MAX: u32 = 8;
/// Closed numbers remembered one by one; older ones are covered by a floor.
const CLOSED_MAX: usize = 4096;

/// Every named step at which [`JournalOptions::fault`] is called, for tests that crash or fail there.
pub const FAULT_POINTS: &[&str] = &[
    "open.after_lock",
    "open.after_read",
    "open.after_set_aside",
    "intend.before_write",
    "intend.after_write",
    "intend.after_sync",
    "applied.before_write",
    "applied.after_write",
    "undoing.before_write",
    "undoing.after_write",
    "undoing.after_sync",
    "kept.before_write",
    "kept.after_write",
    "kept.after_sync",
    "put_back.before_write",
    "put_back.after_write",
    "closed.before_write",
    "closed.after_write",
    "closed.after_sync",
    "note.before_write",
    "note.after_write",
    "note.after_sync",
    "count.before_create",
    "count.after_create",
    "count.before_write",
    "count.after_write",
    "count.after_sync",
    "reserve.before_allocate",
    "compact.before_create",
    "compact.after_write",
    "compact.after_sync",
    "compact.after_rename",
    "compact.after_directory_sync",
];

/// Called with the name of each step; an error is treated as if the step just before that point had failed.
pub type FaultHook = Box<dyn FnMut(&'static str) -> io::Result<()> + Send>;

/// How to open a journal. The default is right for the daemon.
#[derive(Default)]
pub struct JournalOptions {
    /// Tests only: called at each of [`FAULT_POINTS`].
    pub fault: Option<FaultHook>,
    /// Size in bytes from which the file is compacted; `None` = 256 KiB.
    pub compact_bytes: Option<u64>,
}
impl std::fmt::Debug for JournalOptions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("JournalOptions")
            .field("fault", &self.fault.is_some())
            .field("compact_bytes", &self.compact_bytes)
            .finish()
    }
}

/// Why the journal could not do what was asked.
#[derive(Debug, thiserror::Error)]
pub enum JournalError {
    /// Another homeostat works with it.
    #[error("{} is in use{}\n  hint: ask the running daemon, or stop it first", directory.display(), holder(*pid))]
    Held {
        /// State directory.
        directory: PathBuf,
        /// Process that holds it, if it could be read.
        pid: Option<u32>,
    },
    /// Others may write there; what stands in it would be carried out with our privileges.
    #[error("{} can not be trusted: {why}\n  hint: {remedy}", path.display())]
    Insecure {
        /// Directory or file.
        path: PathBuf,
        /// What is wrong.
        why: String,
        /// What a person can do.
        remedy: String,
    },
    /// Written by a newer homeostat.
    #[error("{}: format version {version}, this program knows {FORMAT_VERSION}\n  hint: run `homeostat restore` of the newer version first", path.display())]
    Newer {
        /// Journal.
        path: PathBuf,
        /// Version found.
        version: u32,
    },
    /// Larger than any journal that homeostat writes.
    #[error("{}: {bytes} bytes, more than a journal can have ({JOURNAL_BYTES_MAX})\n  hint: this is not a journal of homeostat, or it is badly damaged; move it away after looking at it", path.display())]
    Oversized {
        /// Journal.
        path: PathBuf,
        /// Its size.
        bytes: u64,
    },
    /// No space for it.
    #[error("{}: no space to {what}: {source}\n  hint: free space on that file system; what is owed can still be undone", path.display())]
    NoSpace {
        /// File.
        path: PathBuf,
        /// What was being done.
        what: &'static str,
        /// The cause.
        source: io::Error,
    },
    /// Nothing can be written there at all.
    #[error("{}: can not {what}: {source}\n  hint: make that file system writable; or copy the directory to a place that is, and work there: `homeostat restore --state-dir COPY` undoes what it says", path.display())]
    ReadOnly {
        /// File.
        path: PathBuf,
        /// What was being done.
        what: &'static str,
        /// The cause.
        source: io::Error,
    },
    /// Any other failure of the file system.
    #[error("{}: can not {what}: {source}", path.display())]
    Io {
        /// File.
        path: PathBuf,
        /// What was being done.
        what: &'static str,
        /// The cause.
        source: io::Error,
    },
    /// The journal is at its limit: undo something first.
    #[error("the journal is full: {what}\n  hint: undo or close actions that are in force")]
    Full {
        /// Which limit.
        what: String,
    },
    /// The record is larger than one record may be.
    #[error(
        "undo record of action {id}: {bytes} bytes, more than {RECORD_BYTES_MAX}\n  hint: split the action"
    )]
    RecordTooLarge {
        /// Action.
        id: ActionId,
        /// Size.
        bytes: u64,
    },
    /// The record could not be expressed.
    #[error("record can not be written as JSON: {source}")]
    Encoding {
        /// The cause.
        source: serde_json::Error,
    },
    /// The action's undo is owed already.
    #[error("action {id} is already in the journal")]
    AlreadyOwed {
        /// Action.
        id: ActionId,
    },
    /// The number belonged to an earlier action.
    #[error("action number {id} was used before; the next free one is {next}")]
    Reused {
        /// Action.
        id: ActionId,
        /// First number never used.
        next: ActionId,
    },
    /// No undo of that number is owed.
    #[error("action {id} is not in the journal")]
    NotOwed {
        /// Action.
        id: ActionId,
    },
    /// A coin is drawn once.
    #[error("the coin of experiment {experiment}, block {block} was drawn before and fell the other way")]
    CoinFixed {
        /// Experiment.
        experiment: ExperimentId,
        /// Block.
        block: u32,
    },
}

fn holder(pid: Option<u32>) -> String {
    pid.map_or_else(String::new, |pid| format!(" by process {pid}"))
}

fn io_error(path: &Path, what: &'static str, source: io::Error) -> JournalError {
    let path = path.to_owned();
    match source.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded | io::ErrorKind::FileTooLarge => {
            JournalError::NoSpace { path, what, source }
        }
        _ if cannot_be_written(&source) => JournalError::ReadOnly { path, what, source },
        _ => JournalError::Io { path, what, source },
    }
}

/// A read-only file system, or a file or directory that is immutable (`chattr +i`).
fn cannot_be_written(error: &io::Error) -> bool {
    use rustix::io::Errno;
    [Errno::ROFS, Errno::PERM]
        .map(Errno::raw_os_error)
        .map(Some)
        .contains(&error.raw_os_error())
}

/// What makes a directory fit to hold a journal.
const PRIVATE_DIRECTORY: &str = "make it a directory of this user with mode 0700";
/// What to do about a file that somebody else may have written.
const STRANGE_FILE: &str =
    "look at it; if it is not a journal that homeostat wrote, move it away and start again";

/// What was found in the journal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Recovered {
    /// Where it is, or would be.
    pub file: PathBuf,
    /// Whether there was a journal at all.
    pub existed: bool,
    /// Actions whose undo is owed, by number. Undo them in descending order.
    pub owed: BTreeMap<ActionId, Owed>,
    /// Coins of experiments that had not ended, in order.
    pub coins: Vec<Coin>,
    /// The last remarks, oldest first.
    pub remarks: Vec<String>,
    /// Number for the next action: higher than any ever seen.
    pub next_action: ActionId,
    /// Number for the next experiment, as far as the journal knows (the history may know higher ones).
    pub next_experiment: ExperimentId,
    /// Records read.
    pub records: u64,
    /// Bytes of an unfinished last record; normal after a crash.
    pub torn: u64,
    /// Damaged places, as byte ranges (the first 64).
    pub damaged: Vec<Range<u64>>,
    /// Records that existed and could not be read.
    pub missing: u64,
    /// The journal does not begin as every journal does, or is gone: what stood in it is not known.
    pub headless: bool,
    /// Records do not stand where they were written.
    pub disordered: bool,
    /// The file ends where space was reserved: its end was cut off.
    pub short: bool,
    /// `journal.count` is missing or unreadable, so the loss of the last records could not be seen.
    pub uncounted: bool,
    /// Actions that were in force and whose undo record is lost to damage. They can not be undone; reported at
    /// every start until they are [closed](Journal::closed).
    pub lost: Vec<ActionId>,
    /// Copy of the damaged file.
    pub set_aside: Option<PathBuf>,
}

impl Recovered {
    fn from_reading(file: PathBuf, existed: bool, reading: &line::Reading) -> Self {
        let books = &reading.books;
        Self {
            file,
            existed,
            owed: books.owed.clone(),
            coins: books
                .coins
                .iter()
                .map(|((experiment, block), on)| Coin {
                    experiment: *experiment,
                    block: *block,
                    on: *on,
                })
                .collect(),
            remarks: books.remarks.iter().cloned().collect(),
            next_action: ActionId(books.highest_action.saturating_add(1)),
            next_experiment: ExperimentId(books.highest_experiment.saturating_add(1)),
            records: reading.records,
            torn: reading.torn,
            damaged: reading.damaged.clone(),
            missing: reading.missing,
            headless: reading.headless,
            disordered: reading.disordered,
            short: reading.short,
            uncounted: reading.uncounted,
            lost: books.lost.iter().copied().collect(),
            set_aside: None,
        }
    }

    /// Whether every record was read. An unfinished last line does not count as damage.
    pub fn is_whole(&self) -> bool {
        self.damaged.is_empty()
            && self.missing == 0
            && self.lost.is_empty()
            && !(self.headless || self.disordered || self.short || self.uncounted)
    }

    /// What a person should know about the state of the file, one sentence each; empty when all is well.
    pub fn complaints(&self) -> Vec<String> {
        let mut out = Vec::new();
        let file = self.file.display();
        if self.torn > 0 {
            let meaning = if self.is_whole() {
                "as a crash leaves it; nothing is lost by that"
            } else {
                "and what stood there is not known"
            };
            out.push(format!(
                "the last record of {file} is unfinished ({} bytes), {meaning}",
                self.torn
            ));
        }
        if let Some(first) = self.damaged.first() {
            out.push(format!(
                "{file} is damaged in {} place(s), the first at byte {}",
                self.damaged.len(),
                first.start
            ));
        }
        if self.headless {
            out.push(if self.existed {
                format!("{file} has lost its beginning")
            } else {
                format!("{file} is gone, and was there before")
            });
        }
        if self.missing > 0 {
            out.push(format!("{file} lacks {} record(s)", self.missing));
        }
        if self.disordered {
            out.push(format!("records of {file} do not stand where they were written"));
        }
        if self.short {
            out.push(format!("the end of {file} was cut off"));
        }
        if self.uncounted {
            out.push(format!(
                "{} is missing or unreadable, so it is not known whether the last records of {file} are missing",
                self.file.with_file_name(COUNT_FILE).display()
            ));
        }
        if !self.lost.is_empty() {
            let ids: Vec<String> = self.lost.iter().map(ToString::to_string).collect();
            out.push(format!(
                "the undo record of action {} is lost; if it is still in force it ends with the processes it changed, or at the next boot",
                ids.join(", ")
            ));
        }
        if !self.is_whole() {
            let copy = self.set_aside.as_ref().map_or_else(String::new, |p| {
                format!("; a copy of the file is {}", p.display())
            });
            out.push(format!(
                "a change that was recorded there may still be in force: restart the programs that homeostat changed, or reboot; \
                 all {} record(s) that could be read were used{copy}",
                self.records
            ));
        }
        out
    }
}

/// Reads the journal of a state directory without changing anything and without the lock, for `status` and
/// `doctor`. Beside a running daemon the last record may be seen unfinished.
///
/// # Errors
/// When there is a journal that can not be opened, is not a file, is oversized or newer than this program.
pub fn read(directory: &Path) -> Result<Recovered, JournalError> {
    let (file, reading) = load(directory, &boot_id())?;
    let path = directory.join(JOURNAL_FILE);
    Ok(Recovered::from_reading(path, file.is_some(), &reading))
}

/// The current boot; empty where the kernel does not tell it.
fn boot_id() -> String {
    std::fs::read_to_string("/proc/sys/kernel/random/boot_id")
        .map_or_else(|_| String::new(), |id| id.trim().to_owned())
}

/// The open journal. There is at most one per state directory on the machine.
#[derive(Debug)]
pub struct Journal {
    directory: PathBuf,
    options: JournalOptions,
    /// Held for as long as this value lives.
    _lock: Option<Lock>,
    file: File,
    books: Books,
    /// Number of the next record.
    sequence: u64,
    /// Byte after the last record.
    end: u64,
    /// The last byte in use is not a newline (a tail that could not be cleaned up on a full disk).
    unterminated: bool,
    /// Byte up to which space is allocated.
    allocated: u64,
    /// The second file; `None` until it could be made.
    count: Option<File>,
    /// Number of the record after the last one that is synced.
    synced: u64,
    boot: String,
    /// Nothing can be written there: the journal was opened to undo what it says.
    read_only: bool,
    /// A sync failed: what the file holds is unknown; write it anew before anything else.
    rewrite_first: bool,
    /// The file was renamed into place and the directory is not synced yet.
    directory_unsynced: bool,
    /// Size at which to compact next.
    compact_at: u64,
    /// Why the last compaction did not work.
    compaction_failure: Option<String>,
    /// No action up to this number can be intended any more, nor one of `closed`.
    floor: u64,
    closed: BTreeSet<ActionId>,
}

/// One kind of appended record: its fault points, whether it is synced, and how much space it must leave.
struct Kind {
    before_write: &'static str,
    after_write: &'static str,
    /// `None`: not synced.
    after_sync: Option<&'static str>,
    /// The second file must know of it, also after a loss of power.
    counted: bool,
    /// Allocated bytes that must remain behind it.
    leave: u64,
    what: &'static str,
}
const INTEND: Kind = Kind {
    before_write: "intend.before_write",
    after_write: "intend.after_write",
    after_sync: Some("intend.after_sync"),
    counted: true,
    leave: RESERVE_BYTES,
    what: "write the undo record",
};
const NOTE: Kind = Kind {
    before_write: "note.before_write",
    after_write: "note.after_write",
    after_sync: Some("note.after_sync"),
    counted: false,
    leave: RESERVE_BYTES / 2,
    what: "write a note",
};
const APPLIED: Kind = Kind {
    before_write: "applied.before_write",
    after_write: "applied.after_write",
    after_sync: None,
    counted: false,
    leave: RESERVE_BYTES / 4,
    what: "write that an action was applied",
};
const UNDOING: Kind = Kind {
    before_write: "undoing.before_write",
    after_write: "undoing.after_write",
    after_sync: None,
    counted: false,
    leave: RESERVE_BYTES / 4,
    what: "write that an undo began",
};
/// A start leaves alone what is kept: that this is so no longer must be as sure as that it was.
const UNDOING_KEPT: Kind = Kind {
    after_sync: Some("undoing.after_sync"),
    counted: true,
    ..UNDOING
};
const KEPT: Kind = Kind {
    before_write: "kept.before_write",
    after_write: "kept.after_write",
    after_sync: Some("kept.after_sync"),
    counted: false,
    leave: RESERVE_BYTES / 4,
    what: "write that an action is kept",
};
const PUT_BACK: Kind = Kind {
    before_write: "put_back.before_write",
    after_write: "put_back.after_write",
    after_sync: None,
    counted: false,
    leave: RESERVE_BYTES / 4,
    what: "write that everything was put back",
};
const CLOSED: Kind = Kind {
    before_write: "closed.before_write",
    after_write: "closed.after_write",
    after_sync: Some("closed.after_sync"),
    counted: false,
    leave: 0,
    what: "write that an action is closed",
};

impl Journal {
    /// Opens the journal of a state directory, creating both if need be, and takes its lock.
    ///
    /// # Errors
    /// [`JournalError::Held`] when another process has it; [`JournalError::Insecure`],
    /// [`JournalError::Newer`], [`JournalError::Oversized`] as they say; [`JournalError::NoSpace`] only when there
    /// was no journal yet; [`JournalError::Io`] otherwise. Damage is no error.
    pub fn open(directory: &Path, options: JournalOptions) -> Result<(Self, Recovered), JournalError> {
        Self::open_as(directory, options, false)
    }

    /// As [`open`](Self::open), to undo what is owed: where nothing can be written it opens all the same, and every write fails.
    ///
    /// # Errors
    /// As there, but for [`JournalError::ReadOnly`].
    pub fn open_for_undo(
        directory: &Path,
        options: JournalOptions,
    ) -> Result<(Self, Recovered), JournalError> {
        Self::open_as(directory, options, true)
    }

    fn open_as(
        directory: &Path,
        mut options: JournalOptions,
        allow_read_only: bool,
    ) -> Result<(Self, Recovered), JournalError> {
        create_directory(directory)?;
        let lock = take_lock(directory, allow_read_only)?;
        let path = directory.join(JOURNAL_FILE);
        hook(&mut options, "open.after_lock").map_err(|e| io_error(&path, "open", e))?;
        match adopt_new_file(directory) {
            Err(JournalError::ReadOnly { .. }) if allow_read_only => {}
            adopted => adopted?,
        }
        let boot = boot_id();
        let (file, reading) = load(directory, &boot)?;
        hook(&mut options, "open.after_read").map_err(|e| io_error(&path, "read", e))?;
        let mut recovered = Recovered::from_reading(path.clone(), file.is_some(), &reading);
        let allocated = match &file {
            Some(file) => file.metadata().map_err(|e| io_error(&path, "examine", e))?.len(),
            None => 0,
        };
        if !reading.is_whole() {
            if let Some(file) = &file {
                // On a full disk there may be no room for a copy. Then the damaged file itself stays as it is:
                // records are appended after the damage and the next start tries again.
                recovered.set_aside = set_aside(directory, file).ok().flatten();
                hook(&mut options, "open.after_set_aside").map_err(|e| io_error(&path, "copy", e))?;
            }
        }
        let may_rewrite = reading.is_whole() || recovered.set_aside.is_some();
        let unclean =
            reading.torn > 0 || !reading.ends_with_newline || !reading.is_whole() || !reading.counted;
        let compact_bytes = options.compact_bytes.unwrap_or(COMPACT_BYTES);

        // Without a file there is nothing to write to until the first rewrite made one.
        let fresh = file.is_none();
        let file = match file {
            Some(file) => file,
            None => File::open(directory).map_err(|e| io_error(directory, "open", e))?,
        };
        let mut journal = Self {
            directory: directory.to_owned(),
            options,
            _lock: lock,
            file,
            floor: reading.books.highest_action,
            books: reading.books,
            sequence: reading.sequence,
            end: reading.end,
            unterminated: !reading.ends_with_newline,
            allocated,
            // One that is damaged, or was never written, is made anew.
            count: match load_count(directory) {
                Found::Valid(_) => open_count(directory, OFlags::RDWR).ok(),
                Found::Nothing | Found::Unreadable => None,
            },
            synced: 0,
            boot,
            read_only: false,
            rewrite_first: false,
            directory_unsynced: false,
            compact_at: compact_bytes,
            compaction_failure: None,
            closed: BTreeSet::new(),
        };
        journal.synced = journal.sequence;
        if fresh {
            match journal.rewrite() {
                Err(JournalError::ReadOnly { .. }) if allow_read_only => {}
                made => made?,
            }
        } else if (unclean && may_rewrite) || journal.end >= journal.compact_at {
            // On a full disk this fails and the old file serves on: recovery must work then, too.
            journal.compact();
        }
        journal.read_only = allow_read_only && !is_writable(&journal.file);
        Ok((journal, recovered))
    }

    /// Writes the undo record and syncs it. From now on the undo is owed: only now may the action be taken.
    ///
    /// # Errors
    /// The action must not be taken. Nothing is owed, as far as this process is concerned; after a crash the
    /// undo may be found owed, which is harmless.
    pub fn intend(&mut self, record: &UndoRecord) -> Result<(), JournalError> {
        let id = record.action.id;
        if self.books.owed.contains_key(&id) {
            return Err(JournalError::AlreadyOwed { id });
        }
        if id.0 <= self.floor || self.closed.contains(&id) {
            return Err(JournalError::Reused {
                id,
                next: self.next_action_id(),
            });
        }
        if self.books.owed.len() >= OWED_MAX {
            return Err(JournalError::Full {
                what: format!("{OWED_MAX} actions are owed an undo"),
            });
        }
        self.append(&INTEND, Event::Intend(Box::new(record.clone())))
    }

    /// Notes that the action was carried out to its end, or that it is about to be made again after it was put back: what it
    /// writes was taken as it is before.
    ///
    /// # Errors
    /// The undo stays owed as before.
    pub fn applied(&mut self, id: ActionId) -> Result<(), JournalError> {
        self.must_owe(id)?;
        self.append(&APPLIED, Event::Applied(id))
    }

    /// Notes that the undo of the action has begun. (In a switchback the action may be applied again later.) Of what is
    /// kept this is synced, and comes before the first step of the undo: a start that found it kept would take it for
    /// being in force.
    ///
    /// # Errors
    /// The undo stays owed as before.
    pub fn undoing(&mut self, id: ActionId) -> Result<(), JournalError> {
        self.must_owe(id)?;
        let kind = if self.is_kept(id) { &UNDOING_KEPT } else { &UNDOING };
        self.append(kind, Event::Undoing(id))
    }

    /// Notes that the action is left in force on purpose over a stop of the daemon.
    ///
    /// # Errors
    /// The undo stays owed as before.
    pub fn kept(&mut self, id: ActionId) -> Result<(), JournalError> {
        self.must_owe(id)?;
        self.append(&KEPT, Event::Kept(id))
    }

    /// Notes that everything is as it was found, until the action is made again (a block of a trial without it). Who finds its
    /// value there then knows that somebody else chose it. Before the first step of making it again [`Self::applied`] has to be
    /// noted.
    ///
    /// # Errors
    /// The undo stays owed as before.
    pub fn put_back(&mut self, id: ActionId) -> Result<(), JournalError> {
        self.must_owe(id)?;
        self.append(&PUT_BACK, Event::PutBack(id))
    }

    /// Notes that nothing is owed for this action any more: it was undone, or its record is void. Closing what
    /// this journal has closed before is no error. Also closes actions reported in [`Recovered::lost`].
    ///
    /// # Errors
    /// The undo is still owed. Try again; if that is not possible, the undo is done once more after a restart.
    pub fn closed(&mut self, id: ActionId) -> Result<(), JournalError> {
        if self.closed.contains(&id) && !self.books.owed.contains_key(&id) {
            return Ok(());
        }
        if !self.books.lost.contains(&id) {
            self.must_owe(id)?;
        }
        self.append(&CLOSED, Event::Closed(id))?;
        self.closed.insert(id);
        while self.closed.len() > CLOSED_MAX {
            if let Some(oldest) = self.closed.pop_first() {
                self.floor = self.floor.max(oldest.0);
            }
        }
        self.compact_if_large();
        Ok(())
    }

    /// Writes a note and syncs it.
    ///
    /// # Errors
    /// Nothing was noted: a block whose coin this was must not start. [`JournalError::CoinFixed`] when the coin
    /// was drawn before with another result; the same coin again is no error.
    pub fn note(&mut self, note: Note) -> Result<(), JournalError> {
        let note = match note {
            Note::Coin(coin) => {
                match self.books.coins.get(&(coin.experiment, coin.block)) {
                    Some(on) if *on == coin.on => return Ok(()),
                    Some(_) => {
                        let Coin {
                            experiment, block, ..
                        } = coin;
                        return Err(JournalError::CoinFixed { experiment, block });
                    }
                    None => {}
                }
                Note::Coin(coin)
            }
            Note::Ended(id) => Note::Ended(id),
            Note::Remark(mut text) => {
                crate::cut(&mut text, REMARK_BYTES_MAX);
                Note::Remark(text)
            }
        };
        self.append(&NOTE, Event::Note(note))?;
        self.compact_if_large();
        Ok(())
    }

    /// What is owed, by action number.
    pub fn owed(&self) -> impl DoubleEndedIterator<Item = &Owed> {
        self.books.owed.values()
    }

    /// Whether the action is left in force on purpose: a start that finds it so does not undo it.
    pub fn is_kept(&self, id: ActionId) -> bool {
        self.find(id).is_some_and(|owed| owed.state == OwedState::Kept)
    }

    /// What is owed for this action.
    pub fn find(&self, id: ActionId) -> Option<&Owed> {
        self.books.owed.get(&id)
    }

    /// Coins of experiments that have not ended, in order.
    pub fn coins(&self) -> impl Iterator<Item = Coin> + '_ {
        self.books.coins.iter().map(|((experiment, block), on)| Coin {
            experiment: *experiment,
            block: *block,
            on: *on,
        })
    }

    /// First action number that was never used.
    pub fn next_action_id(&self) -> ActionId {
        ActionId(self.books.highest_action.saturating_add(1))
    }

    /// First experiment number that was never used, as far as the journal knows.
    pub fn next_experiment_id(&self) -> ExperimentId {
        ExperimentId(self.books.highest_experiment.saturating_add(1))
    }

    /// Bytes in use.
    pub fn bytes(&self) -> u64 {
        self.end
    }

    /// Why the file could not be made smaller, if the last try failed. Nothing is lost by that; it grows.
    pub fn compaction_failure(&self) -> Option<&str> {
        self.compaction_failure.as_deref()
    }

    fn path(&self) -> PathBuf {
        self.directory.join(JOURNAL_FILE)
    }

    fn must_owe(&self, id: ActionId) -> Result<(), JournalError> {
        if self.books.owed.contains_key(&id) {
            Ok(())
        } else {
            Err(JournalError::NotOwed { id })
        }
    }

    /// Appends one record; enters it into the books only when it is as safe as its kind asks.
    fn append(&mut self, kind: &Kind, event: Event) -> Result<(), JournalError> {
        if self.read_only {
            return Err(JournalError::ReadOnly {
                path: self.path(),
                what: kind.what,
                source: io::Error::from_raw_os_error(rustix::io::Errno::ROFS.raw_os_error()),
            });
        }
        if self.rewrite_first {
            self.rewrite()?;
        }
        if self.directory_unsynced {
            self.sync_directory()
                .map_err(|e| io_error(&self.directory, "sync", e))?;
        }
        let (mut line, event) = line::encode(&self.books, self.sequence, event)
            .map_err(|source| JournalError::Encoding { source })?;
        if self.unterminated {
            line.insert(0, b'\n');
        }
        self.check_limits(line.len() as u64, &event)?;
        self.make_room(line.len() as u64, kind)?;
        if let Err((source, synced)) = self.put(&line, kind) {
            self.blank(line.len());
            self.rewrite_first |= synced;
            return Err(io_error(&self.path(), kind.what, source));
        }
        let end = self.end + line.len() as u64;
        let sequence = self.sequence + 1;
        if kind.after_sync.is_some() {
            self.synced = sequence;
        }
        let mut open = self.books.open();
        let mut highest_action = self.books.highest_action;
        match &event {
            Event::Intend(record) => {
                open.insert(record.action.id);
                highest_action = highest_action.max(record.action.id.0);
            }
            Event::Closed(id) => {
                open.remove(id);
            }
            _ => {}
        }
        let counted = self.count_records(sequence, highest_action, open, kind.counted);
        if let Err(source) = counted {
            if kind.counted {
                // The record stays where it is, since the second file may know of it, and goes with the next rewrite.
                self.sequence = sequence;
                self.rewrite_first = true;
                return Err(io_error(&self.directory.join(COUNT_FILE), kind.what, source));
            }
        }
        self.end = end;
        self.unterminated = false;
        self.sequence = sequence;
        self.books.enter(event);
        Ok(())
    }

    /// Writes into the second file how many records there are and which actions are open.
    fn count_records(
        &mut self,
        next: u64,
        highest_action: u64,
        open: BTreeSet<ActionId>,
        sync: bool,
    ) -> io::Result<()> {
        let count = Count {
            next,
            synced: self.synced,
            boot: self.boot.clone(),
            a: highest_action,
            e: self.books.highest_experiment,
            open,
        };
        hook(&mut self.options, "count.before_write")?;
        let Some(file) = &self.count else {
            // The journal does not say that it is there either.
            return Ok(());
        };
        write_count(file, &count)?;
        hook(&mut self.options, "count.after_write")?;
        if sync {
            file.sync_data()?;
            hook(&mut self.options, "count.after_sync")?;
        }
        Ok(())
    }

    /// Makes the second file before a journal says that it is there.
    fn make_count(&mut self) -> io::Result<()> {
        if self.count.is_some() {
            return Ok(());
        }
        hook(&mut self.options, "count.before_create")?;
        let file = open_count(&self.directory, OFlags::RDWR | OFlags::CREATE)?;
        allocate(&file, 0, count::COUNT_BYTES)?;
        // What the journal holds now: a crash before the rename leaves the two in agreement.
        let count = Count {
            next: self.sequence,
            synced: self.synced,
            boot: self.boot.clone(),
            a: self.books.highest_action,
            e: self.books.highest_experiment,
            open: self.books.open(),
        };
        write_count(&file, &count)?;
        file.sync_all()?;
        File::open(&self.directory)?.sync_all()?;
        hook(&mut self.options, "count.after_create")?;
        self.count = Some(file);
        Ok(())
    }

    fn check_limits(&mut self, bytes: u64, event: &Event) -> Result<(), JournalError> {
        let Event::Intend(record) = event else {
            return Ok(());
        };
        if bytes > RECORD_BYTES_MAX {
            return Err(JournalError::RecordTooLarge {
                id: record.action.id,
                bytes,
            });
        }
        // Only intents are limited, well below what `load` accepts: the small records always fit.
        if self.end + bytes > JOURNAL_BYTES_MAX / 2 {
            self.compact();
            if self.end + bytes > JOURNAL_BYTES_MAX / 2 {
                return Err(JournalError::Full {
                    what: format!("{} bytes are in use", self.end),
                });
            }
        }
        Ok(())
    }

    /// Makes sure that `bytes` can be written and `kind.leave` allocated bytes remain after them.
    fn make_room(&mut self, bytes: u64, kind: &Kind) -> Result<(), JournalError> {
        let needed = self.end + bytes + kind.leave;
        if needed <= self.allocated {
            return Ok(());
        }
        let wanted = self.end + bytes + 2 * RESERVE_BYTES;
        let got = hook(&mut self.options, "reserve.before_allocate")
            .and_then(|()| allocate(&self.file, self.allocated, wanted));
        match got {
            Ok(()) => {
                self.allocated = wanted;
                Ok(())
            }
            // Try to write it all the same: there may be just enough for the few bytes.
            Err(_) if kind.leave == 0 => Ok(()),
            Err(source) => Err(io_error(&self.path(), kind.what, source)),
        }
    }

    /// Writes and syncs. The error says whether a sync may have failed.
    fn put(&mut self, line: &[u8], kind: &Kind) -> Result<(), (io::Error, bool)> {
        hook(&mut self.options, kind.before_write).map_err(|e| (e, false))?;
        self.file.write_all_at(line, self.end).map_err(|e| (e, false))?;
        self.allocated = self.allocated.max(self.end + line.len() as u64);
        hook(&mut self.options, kind.after_write).map_err(|e| (e, kind.after_sync.is_some()))?;
        if let Some(after_sync) = kind.after_sync {
            self.file.sync_data().map_err(|e| (e, true))?;
            hook(&mut self.options, after_sync).map_err(|e| (e, true))?;
        }
        Ok(())
    }

    /// Overwrites a record that was not completed with zeros, as far as the file reaches; never makes it longer.
    /// If this fails, the remains are overwritten by the next record or reported as damage: nothing is lost.
    fn blank(&mut self, bytes: usize) {
        let Ok(metadata) = self.file.metadata() else {
            return;
        };
        let reach = usize::try_from(metadata.len().saturating_sub(self.end))
            .unwrap_or(bytes)
            .min(bytes);
        if self.file.write_all_at(&vec![0; reach], self.end).is_err() {
            self.rewrite_first = true;
        }
    }

    fn compact_if_large(&mut self) {
        if self.end >= self.compact_at {
            self.compact();
        }
    }

    /// Tries to make the file smaller. Failing is remembered, and tried again when the file has grown further.
    fn compact(&mut self) {
        match self.rewrite() {
            Ok(()) => self.compaction_failure = None,
            Err(e) => {
                self.compaction_failure = Some(e.to_string());
                self.compact_at = self.compact_at.max(self.end + RESERVE_BYTES);
            }
        }
    }

    /// Replaces the file by the shortest one that says the same. At every step either file is complete.
    fn rewrite(&mut self) -> Result<(), JournalError> {
        let target = self.path();
        let new = self.directory.join(NEW_FILE);
        self.make_count()
            .map_err(|e| io_error(&self.directory.join(COUNT_FILE), "write", e))?;
        let mut content = Vec::new();
        let mut sequence = self.sequence;
        for event in self.books.retell() {
            let (line, _) = line::encode(&self.books, sequence, event)
                .map_err(|source| JournalError::Encoding { source })?;
            content.extend_from_slice(&line);
            sequence += 1;
        }
        let end = content.len() as u64;
        let allocated = end + 2 * RESERVE_BYTES;
        let written = self.write_new(&new, &content, allocated);
        let file = match written.and_then(|file| std::fs::rename(&new, &target).map(|()| file)) {
            Ok(file) => file,
            Err(source) => {
                // What is left of it is ignored and removed by the next try.
                let _ = std::fs::remove_file(&new);
                return Err(io_error(&new, "write", source));
            }
        };
        self.file = file;
        self.sequence = sequence;
        self.synced = sequence;
        self.end = end;
        self.allocated = allocated;
        self.unterminated = false;
        self.rewrite_first = false;
        self.directory_unsynced = true;
        self.compact_at = self.options.compact_bytes.unwrap_or(COMPACT_BYTES).max(2 * end);
        hook(&mut self.options, "compact.after_rename")
            .and_then(|()| self.sync_directory())
            .and_then(|()| hook(&mut self.options, "compact.after_directory_sync"))
            .map_err(|e| io_error(&self.directory, "sync", e))?;
        // A second file that knows less does no harm, and the next record brings it up to date.
        let (action, open) = (self.books.highest_action, self.books.open());
        let _ = self.count_records(sequence, action, open, false);
        Ok(())
    }

    fn write_new(&mut self, path: &Path, content: &[u8], allocated: u64) -> io::Result<File> {
        hook(&mut self.options, "compact.before_create")?;
        match std::fs::remove_file(path) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
            _ => {}
        }
        let file = open_file(path, OFlags::RDWR | OFlags::CREATE | OFlags::EXCL)?;
        // Space first: a new file without its reserve would be worse than a long old one.
        allocate(&file, 0, allocated)?;
        file.write_all_at(content, 0)?;
        hook(&mut self.options, "compact.after_write")?;
        file.sync_all()?;
        hook(&mut self.options, "compact.after_sync")?;
        Ok(file)
    }

    fn sync_directory(&mut self) -> io::Result<()> {
        File::open(&self.directory)?.sync_all()?;
        self.directory_unsynced = false;
        Ok(())
    }
}

fn hook(options: &mut JournalOptions, step: &'static str) -> io::Result<()> {
    match &mut options.fault {
        Some(fault) => fault(step),
        None => Ok(()),
    }
}

fn open_file(path: &Path, flags: OFlags) -> io::Result<File> {
    let mode = Mode::RUSR | Mode::WUSR;
    Ok(File::from(rustix::fs::open(
        path,
        flags | OFlags::CLOEXEC | OFlags::NOFOLLOW,
        mode,
    )?))
}

/// Allocates the bytes from `from` to `to` and makes the file that long; they read as zero.
fn allocate(file: &File, from: u64, to: u64) -> io::Result<()> {
    if to <= from {
        return Ok(());
    }
    match rustix::io::retry_on_intr(|| rustix::fs::fallocate(file, FallocateFlags::empty(), from, to - from))
    {
        Ok(()) => Ok(()),
        // Some file systems can not allocate ahead. Zeros do the same.
        Err(rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::NOSYS) => {
            let zeros = [0; 4096];
            let mut at = from;
            while at < to {
                let step = (to - at).min(zeros.len() as u64);
                file.write_all_at(&zeros[..step as usize], at)?;
                at += step;
            }
            Ok(())
        }
        Err(e) => Err(e.into()),
    }
}

fn is_writable(file: &File) -> bool {
    rustix::fs::fcntl_getfl(file).is_ok_and(|flags| flags.contains(OFlags::RDWR))
}

/// Opens the second file. Who may have written it is no matter: it can only make a journal doubtful.
fn open_count(directory: &Path, flags: OFlags) -> io::Result<File> {
    let file = open_file(&directory.join(COUNT_FILE), flags | OFlags::NONBLOCK)?;
    if !file.metadata()?.is_file() {
        return Err(io::Error::other("it is not a regular file"));
    }
    Ok(file)
}

fn write_count(file: &File, count: &Count) -> io::Result<()> {
    let line = count
        .encode()
        .ok_or_else(|| io::Error::other("too many actions are in force"))?;
    file.write_all_at(&line, (count.next % 2) * count::SLOT_BYTES)
}

/// What the second file says.
fn load_count(directory: &Path) -> Found {
    match open_count(directory, OFlags::RDONLY) {
        Ok(file) => {
            let mut bytes = Vec::new();
            match file.take(count::COUNT_BYTES).read_to_end(&mut bytes) {
                Ok(_) => count::decode(&bytes),
                Err(_) => Found::Unreadable,
            }
        }
        Err(e) if e.kind() == io::ErrorKind::NotFound => Found::Nothing,
        Err(_) => Found::Unreadable,
    }
}

/// Makes the state directory, where it is not there, and checks that nobody else may write to it.
pub(crate) fn create_directory(directory: &Path) -> Result<(), JournalError> {
    // First: below a directory of somebody else nothing is made.
    if let Some(above) = directory.parent() {
        if let Some(trust::Distrust { path, why, remedy }) = trust::distrust(above) {
            let why = format!(
                "{why}, and so can replace the state directory {}",
                directory.display()
            );
            return Err(JournalError::Insecure { path, why, remedy });
        }
    }
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(directory)
        .map_err(|e| io_error(directory, "create the directory", e))?;
    // Where it is a link, as well.
    if let Some(trust::Distrust { path, why, remedy }) =
        trust::distrust(directory).filter(|d| d.path != directory)
    {
        let why = format!(
            "{why}, and so can replace the state directory {}",
            directory.display()
        );
        return Err(JournalError::Insecure { path, why, remedy });
    }
    let metadata = std::fs::metadata(directory).map_err(|e| io_error(directory, "examine", e))?;
    let insecure = |why: String| {
        Err(JournalError::Insecure {
            path: directory.to_owned(),
            why,
            remedy: PRIVATE_DIRECTORY.to_owned(),
        })
    };
    if metadata.mode() & 0o022 != 0 {
        return insecure(format!(
            "others may write to it (mode {:04o})",
            metadata.mode() & 0o7777
        ));
    }
    check_owner(directory, metadata.uid())
}

fn check_owner(path: &Path, owner: u32) -> Result<(), JournalError> {
    let own = rustix::process::geteuid().as_raw();
    if owner == own || owner == 0 {
        return Ok(());
    }
    let why = format!("it belongs to user {owner}, not to user {own}");
    Err(JournalError::Insecure {
        path: path.to_owned(),
        why,
        remedy: "look at it; if it is yours, give it to this user (chown)".to_owned(),
    })
}

/// The lock, given back when dropped: also when a process that was just forked still has the file open.
#[derive(Debug)]
struct Lock(File);
impl Drop for Lock {
    fn drop(&mut self) {
        let _ = rustix::fs::flock(&self.0, FlockOperation::Unlock);
    }
}

/// Takes the lock of the directory or says who has it. Where nothing can be written, a lock file that is there is locked all the same;
/// without one nobody can have locked it.
fn take_lock(directory: &Path, allow_read_only: bool) -> Result<Option<Lock>, JournalError> {
    let path = directory.join(LOCK_FILE);
    let failed = |e: io::Error| io_error(&path, "lock", e);
    // The file may be removed by a person between opening and locking; then we would hold a lock that nobody
    // else sees. A few tries settle it.
    for _ in 0..8 {
        let mut lock = match open_file(&path, OFlags::RDWR | OFlags::CREATE) {
            Ok(lock) => lock,
            Err(e) if allow_read_only && cannot_be_written(&e) => match open_file(&path, OFlags::RDONLY) {
                Ok(lock) => lock,
                Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
                Err(e) => return Err(failed(e)),
            },
            Err(e) => return Err(failed(e)),
        };
        match rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(rustix::io::Errno::WOULDBLOCK) => {
                let mut text = String::new();
                let _ = Read::by_ref(&mut lock).take(32).read_to_string(&mut text);
                return Err(JournalError::Held {
                    directory: directory.to_owned(),
                    pid: text.trim().parse().ok(),
                });
            }
            Err(rustix::io::Errno::INTR) => continue,
            Err(e) => return Err(failed(e.into())),
        }
        let ours = lock.metadata().map_err(failed)?;
        match std::fs::symlink_metadata(&path) {
            Ok(there) if there.ino() == ours.ino() && there.dev() == ours.dev() => {
                // The number only makes the refusal friendlier; on a full disk it is missing.
                let _ = lock
                    .set_len(0)
                    .and_then(|()| writeln!(lock, "{}", std::process::id()));
                return Ok(Some(Lock(lock)));
            }
            _ => {}
        }
    }
    Err(JournalError::Held {
        directory: directory.to_owned(),
        pid: None,
    })
}

/// A compaction never leaves a directory without `journal`, but a person may have removed it. What stands in a
/// left-over `journal.new` must then not be removed by the next compaction.
fn adopt_new_file(directory: &Path) -> Result<(), JournalError> {
    let (journal, new) = (directory.join(JOURNAL_FILE), directory.join(NEW_FILE));
    let missing =
        |path: &Path| std::fs::symlink_metadata(path).is_err_and(|e| e.kind() == io::ErrorKind::NotFound);
    if !missing(&journal) || missing(&new) {
        return Ok(());
    }
    std::fs::rename(&new, &journal).map_err(|e| io_error(&new, "rename", e))
}

/// Opens and reads the journal, or the half of a first compaction if there is no journal.
fn load(directory: &Path, boot: &str) -> Result<(Option<File>, line::Reading), JournalError> {
    // Before the journal: beside a daemon that writes, the one read first must be the one that knows less.
    let count = load_count(directory);
    for name in [JOURNAL_FILE, NEW_FILE] {
        let path = directory.join(name);
        // Read-only media can be read by `read`; `open` finds out at its first write.
        let opened = open_file(&path, OFlags::RDWR | OFlags::NONBLOCK).or_else(|e| match e.kind() {
            io::ErrorKind::ReadOnlyFilesystem | io::ErrorKind::PermissionDenied => {
                open_file(&path, OFlags::RDONLY | OFlags::NONBLOCK)
            }
            _ => Err(e),
        });
        let mut file = match opened {
            Ok(file) => file,
            Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
            Err(e) if e.raw_os_error() == Some(rustix::io::Errno::LOOP.raw_os_error()) => {
                return Err(JournalError::Insecure {
                    path,
                    why: "it is a symbolic link".to_owned(),
                    remedy: STRANGE_FILE.to_owned(),
                });
            }
            Err(e) => return Err(io_error(&path, "open", e)),
        };
        let metadata = file.metadata().map_err(|e| io_error(&path, "examine", e))?;
        if !metadata.is_file() {
            return Err(JournalError::Insecure {
                path,
                why: "it is not a regular file".to_owned(),
                remedy: STRANGE_FILE.to_owned(),
            });
        }
        if metadata.mode() & 0o022 != 0 {
            return Err(JournalError::Insecure {
                path,
                why: "others may write to it".to_owned(),
                remedy: STRANGE_FILE.to_owned(),
            });
        }
        check_owner(&path, metadata.uid())?;
        let bytes = metadata.len();
        if bytes > JOURNAL_BYTES_MAX {
            return Err(JournalError::Oversized { path, bytes });
        }
        let mut content = Vec::new();
        Read::by_ref(&mut file)
            .take(JOURNAL_BYTES_MAX)
            .read_to_end(&mut content)
            .map_err(|e| io_error(&path, "read", e))?;
        let reading = reading(Some(&content), &count, boot);
        if let Some(version) = reading.newer {
            return Err(JournalError::Newer { path, version });
        }
        return Ok((Some(file), reading));
    }
    Ok((None, reading(None, &count, boot)))
}

/// What the bytes of the journal, or none, and the second file add up to.
fn reading(journal: Option<&[u8]>, count: &Found, boot: &str) -> line::Reading {
    let mut reading = journal.map_or_else(line::Reading::default, line::decode);
    if journal.is_none() {
        if let Found::Valid(count) = count {
            reading.headless = count.expected(boot) > 0;
        }
    }
    reading.hold_against(count, boot);
    reading
}

/// Copies the damaged journal to the first free `journal.damaged-N`. `None` when there are enough of them.
fn set_aside(directory: &Path, from: &File) -> io::Result<Option<PathBuf>> {
    for number in 1..=SET_ASIDE_MAX {
        let path = directory.join(format!("{JOURNAL_FILE}.damaged-{number}"));
        let mut copy = match open_file(&path, OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL) {
            Ok(copy) => copy,
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => continue,
            Err(e) => return Err(e),
        };
        let mut at = 0;
        let mut piece = vec![0; 64 * 1024];
        let copied = loop {
            match from.read_at(&mut piece, at) {
                Ok(0) => break copy.sync_all(),
                Ok(n) => {
                    at += n as u64;
                    if let Err(e) = copy.write_all(&piece[..n]) {
                        break Err(e);
                    }
                }
                Err(e) => break Err(e),
            }
        };
        if let Err(e) = copied {
            let _ = std::fs::remove_file(&path);
            return Err(e);
        }
        return Ok(Some(path));
    }
    Ok(None)
}
