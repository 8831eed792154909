//! The undo journal: the changes on this machine that homeostat has not yet reverted.
//!
//! The daemon may be killed, or the kernel may stop, at any instruction. So [`Journal::intend`] puts the undo of an
//! action on disk *before* the action. The record stays until [`Journal::closed`] confirms the undo.
//!
//! The text file `journal` is in the state directory (mode 0700, file 0600). Each line is a record with format version,
//! sequence number and CRC-32. Compaction writes and syncs `journal.new`, renames it and syncs the directory, so one
//! complete file always exists. An `flock` on `journal.lock` refuses a second daemon, or `restore` while a daemon runs.
//! Space is allocated ahead ([`RESERVE_BYTES`]), so a full disk still lets work end.
//!
//! `journal.count` holds the number of records and the actions in force. It reveals lost whole records. It is written
//! after the record and before an action. Recovery uses every whole record, reports damage in [`Recovered`] and copies
//! the damaged file aside. An unfinished last line is a crash, not damage.
//!
//! Why not SQLite: recovery must not need a WAL. Why not binary: `less` must show what is owed.

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

/// Space kept allocated after the last record, for closing on a full disk: more than 300 small records (about 150
/// bytes). `intend` may not use it, notes and states may use a part of it, `closed` all of it.
pub const RESERVE_BYTES: u64 = 64 * 1024;
/// Largest record. An undo record of half a million 2 MiB pieces (1 TiB) takes about 8 MiB.
pub const RECORD_BYTES_MAX: u64 = 16 * 1024 * 1024;
/// Largest journal; beyond it nothing more is intended.
pub const JOURNAL_BYTES_MAX: u64 = 64 * 1024 * 1024;
/// Size from which a journal is compacted when at least half of it is history.
const COMPACT_BYTES: u64 = 256 * 1024;
/// Damaged files kept for a person; further ones are not copied.
const SET_ASIDE_MAX: u32 = 8;
/// Closed numbers remembered one by one; older ones are covered by a floor.
const CLOSED_MAX: usize = 4096;

/// The steps at which [`JournalOptions::fault`] is called, for tests that crash or fail there.
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

/// Called with the name of each step. An error counts as a failure of the step just before.
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
    /// Others may write there, and its content would act with our privileges.
    #[error("{} can not be trusted: {why}\n  hint: {remedy}", path.display())]
    Insecure {
        /// Directory or file.
        path: PathBuf,
        /// The fault.
        why: String,
        /// The remedy.
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
        /// The operation.
        what: &'static str,
        /// The cause.
        source: io::Error,
    },
    /// Nothing can be written there at all.
    #[error("{}: can not {what}: {source}\n  hint: make that file system writable; or copy the directory to a place that is, and work there: `homeostat restore --state-dir COPY` undoes what it says", path.display())]
    ReadOnly {
        /// File.
        path: PathBuf,
        /// The operation.
        what: &'static str,
        /// The cause.
        source: io::Error,
    },
    /// Any other failure of the file system.
    #[error("{}: can not {what}: {source}", path.display())]
    Io {
        /// File.
        path: PathBuf,
        /// The operation.
        what: &'static str,
        /// The cause.
        source: io::Error,
    },
    /// The journal is at its limit: undo something first.
    #[error("the journal is full: {what}\n  hint: undo or close actions that are in force")]
    Full {
        /// The limit.
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
    /// A random assignment is drawn once.
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

/// A read-only file system, or an immutable file or directory (`chattr +i`).
fn cannot_be_written(error: &io::Error) -> bool {
    use rustix::io::Errno;
    [Errno::ROFS, Errno::PERM]
        .map(Errno::raw_os_error)
        .map(Some)
        .contains(&error.raw_os_error())
}

const PRIVATE_DIRECTORY: &str = "make it a directory of this user with mode 0700";
const STRANGE_FILE: &str =
    "look at it; if it is not a journal that homeostat wrote, move it away and start again";

/// The content of the journal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Recovered {
    /// Its path, even if missing.
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
    /// Next experiment number known to the journal. The history may know higher ones.
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
    /// Records are not where they were written.
    pub disordered: bool,
    /// The file ends where space was reserved: its end was cut off.
    pub short: bool,
    /// `journal.count` is missing or unreadable, so the loss of the last records could not be seen.
    pub uncounted: bool,
    /// Actions in force with a lost undo record. Every start reports them until they are [closed](Journal::closed).
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

    /// Sentences for people about the state of the file; empty when it is sound.
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

/// Reads the journal without change or lock, for `status` and `doctor`. A daemon's last record may be unfinished.
///
/// # Errors
/// When the journal cannot be opened, is not a file, is oversized or newer than this program.
pub fn read(directory: &Path) -> Result<Recovered, JournalError> {
    let (file, reading) = load(directory, &boot_id())?;
    let path = directory.join(JOURNAL_FILE);
    Ok(Recovered::from_reading(path, file.is_some(), &reading))
}

/// The current boot; empty where the kernel does not report it.
fn boot_id() -> String {
    std::fs::read_to_string("/proc/sys/kernel/random/boot_id")
        .map_or_else(|_| String::new(), |id| id.trim().to_owned())
}

/// The open journal. There is at most one per state directory on the machine.
#[derive(Debug)]
pub struct Journal {
    directory: PathBuf,
    options: JournalOptions,
    _lock: Option<Lock>,
    file: File,
    books: Books,
    sequence: u64,
    /// Byte after the last record.
    end: u64,
    /// The last byte in use is not a newline: a full disk prevented the clean-up.
    unterminated: bool,
    /// Byte up to which space is allocated.
    allocated: u64,
    /// `journal.count`; `None` until it could be made.
    count: Option<File>,
    /// Number of the record after the last one that is synced.
    synced: u64,
    boot: String,
    /// Nothing can be written there: the journal was opened to undo what it says.
    read_only: bool,
    /// After a failed sync the kernel may drop data and report success next time (*BUGS* in `fsync` man pages). The
    /// same pages are never synced twice: rewrite the file from memory before the next record.
    rewrite_first: bool,
    /// Renamed into place, but the directory is not synced yet.
    directory_unsynced: bool,
    compact_at: u64,
    compaction_failure: Option<String>,
    /// Actions up to this number, and those of `closed`, cannot be intended again.
    floor: u64,
    closed: BTreeSet<ActionId>,
}

/// A kind of appended record: fault points, whether it is synced, and the space it must leave.
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
/// A start leaves kept actions alone, so the end of keeping must be as durable as its beginning.
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
    /// Opens or creates the journal of a state directory and takes its lock. Damage is no error.
    ///
    /// # Errors
    /// [`JournalError::Held`], [`JournalError::Insecure`], [`JournalError::Newer`], [`JournalError::Oversized`] as they
    /// say. [`JournalError::NoSpace`] only without an earlier journal. Otherwise [`JournalError::Io`].
    pub fn open(directory: &Path, options: JournalOptions) -> Result<(Self, Recovered), JournalError> {
        Self::open_as(directory, options, false)
    }

    /// As [`open`](Self::open), for undoing. On a read-only file system it opens too, and every write fails.
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
                // No room for a copy: the damaged file stays, records follow, and the next start tries again.
                recovered.set_aside = set_aside(directory, file).ok().flatten();
                hook(&mut options, "open.after_set_aside").map_err(|e| io_error(&path, "copy", e))?;
            }
        }
        let may_rewrite = reading.is_whole() || recovered.set_aside.is_some();
        let unclean =
            reading.torn > 0 || !reading.ends_with_newline || !reading.is_whole() || !reading.counted;
        let compact_bytes = options.compact_bytes.unwrap_or(COMPACT_BYTES);

        // Without a file, the first rewrite creates one.
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
            // A damaged or never written file is made anew.
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
            // On a full disk this fails, and the old file serves on for recovery.
            journal.compact();
        }
        journal.read_only = allow_read_only && !is_writable(&journal.file);
        Ok((journal, recovered))
    }

    /// Writes the undo record and syncs it. The undo is owed from here on. Only now may the caller act.
    ///
    /// # Errors
    /// The action must not be taken. After a crash the undo may be owed: harmless, since undo is idempotent.
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

    /// Notes that the action is complete, or is about to be made again after it was put back. Not synced: the note
    /// changes how far the action got, never whether it is owed.
    ///
    /// # Errors
    /// The undo stays owed as before.
    pub fn applied(&mut self, id: ActionId) -> Result<(), JournalError> {
        self.must_owe(id)?;
        self.append(&APPLIED, Event::Applied(id))
    }

    /// Notes that the undo has begun; a switchback may apply the action again later. For a kept action the note is
    /// synced and precedes the first undo step: a start would otherwise take the action for being in force.
    ///
    /// # Errors
    /// The undo stays owed as before; a kept action is still kept.
    pub fn undoing(&mut self, id: ActionId) -> Result<(), JournalError> {
        self.must_owe(id)?;
        let kind = if self.is_kept(id) { &UNDOING_KEPT } else { &UNDOING };
        self.append(kind, Event::Undoing(id))
    }

    /// Notes that the action stays in force on purpose while the daemon is stopped. Synced.
    ///
    /// # Errors
    /// The undo stays owed as before.
    pub fn kept(&mut self, id: ActionId) -> Result<(), JournalError> {
        self.must_owe(id)?;
        self.append(&KEPT, Event::Kept(id))
    }

    /// Notes that the state before the action is restored until the action is made again (an off block of a trial). If
    /// homeostat's value is found now, somebody else chose it. Note [`Self::applied`] before making the action again.
    /// Not synced: a kill leaves what was written, and a boot voids the record.
    ///
    /// # Errors
    /// The undo stays owed as before.
    pub fn put_back(&mut self, id: ActionId) -> Result<(), JournalError> {
        self.must_owe(id)?;
        self.append(&PUT_BACK, Event::PutBack(id))
    }

    /// Notes that nothing is owed for this action: it was undone, or its record is void. Synced. Also closes actions in
    /// [`Recovered::lost`]. Closing twice is no error.
    ///
    /// # Errors
    /// The undo is still owed. Try again, or undo once more after a restart.
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

    /// Writes a note and syncs it. The block may start.
    ///
    /// # Errors
    /// The block must not start. [`JournalError::CoinFixed`] if the assignment was drawn before with another result.
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

    /// Owed actions, by number.
    pub fn owed(&self) -> impl DoubleEndedIterator<Item = &Owed> {
        self.books.owed.values()
    }

    /// Whether the action is left in force on purpose: a start that finds it so does not undo it.
    pub fn is_kept(&self, id: ActionId) -> bool {
        self.find(id).is_some_and(|owed| owed.state == OwedState::Kept)
    }

    /// The owed record of this action.
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

    /// Why the last compaction failed, if it did. Nothing is lost; the file grows.
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

    /// Appends a record. The books take it once it is as safe as its kind asks.
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
                // The record stays, since `journal.count` may know it. The next rewrite drops it.
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
            // The journal does not claim that the file exists.
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
        // Counts the current content, so a crash before the rename leaves both files in agreement.
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
            // A few bytes may still fit: try to write.
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

    /// Zeros an incomplete record within the file. After a failure, the next record or the reader copes with it.
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

    /// Tries to compact the file. A failure is remembered and tried again when the file has grown further.
    fn compact(&mut self) {
        match self.rewrite() {
            Ok(()) => self.compaction_failure = None,
            Err(e) => {
                self.compaction_failure = Some(e.to_string());
                self.compact_at = self.compact_at.max(self.end + RESERVE_BYTES);
            }
        }
    }

    /// Replaces the file by its shortest equivalent. One complete file exists at every step.
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
                // The next try ignores and removes the rest.
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
        // A `journal.count` that knows less is harmless, and the next record updates it.
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

/// Allocates from `from` to `to` and extends the file; the bytes read as zero.
fn allocate(file: &File, from: u64, to: u64) -> io::Result<()> {
    if to <= from {
        return Ok(());
    }
    match rustix::io::retry_on_intr(|| rustix::fs::fallocate(file, FallocateFlags::empty(), from, to - from))
    {
        Ok(()) => Ok(()),
        // Some file systems cannot allocate ahead. Zeros do the same.
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

/// Opens `journal.count`. Its writer need not be trusted: the file can only cast doubt on a journal.
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

/// Creates the state directory if needed, and checks that nobody else may write to it.
pub(crate) fn create_directory(directory: &Path) -> Result<(), JournalError> {
    // First, so that nothing is created below an untrusted user's directory.
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
    // Check the target of a link as well.
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

/// Unlocks when dropped, even if a process forked just before still has the file open.
#[derive(Debug)]
struct Lock(File);
impl Drop for Lock {
    fn drop(&mut self) {
        let _ = rustix::fs::flock(&self.0, FlockOperation::Unlock);
    }
}

/// Takes the directory's lock or names its holder. A missing lock file on a read-only system means no holder.
fn take_lock(directory: &Path, allow_read_only: bool) -> Result<Option<Lock>, JournalError> {
    let path = directory.join(LOCK_FILE);
    let failed = |e: io::Error| io_error(&path, "lock", e);
    // If a person removes the file between opening and locking, nobody else sees our lock. A few tries settle it.
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
                // Only for a friendlier refusal; missing on a full disk.
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

/// Adopts a left-over `journal.new` when a person removed `journal`, so that the next compaction does not delete it.
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
    // Read before the journal: while a daemon writes, the file read first must be the older one.
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

/// Copies the damaged journal to the first free `journal.damaged-N`. `None` when there are enough copies.
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
