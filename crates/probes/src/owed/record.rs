//! The clean-up log on disk: one small file per counting homeostat, in the state directory.
//!
//! Each change rewrites `breakpoints/PID-STARTED.json` as a whole (`….new`, sync, rename, sync of the directory), so
//! one complete version always exists. A file is left over when its process has ended. It only lists where breakpoints
//! may be, and [`mending`](crate::owed::mending) verifies each entry.

use crate::owed::Entry;
use homeostat_kernel::process::start_ticks;
use homeostat_model::ProcessId;
use rustix::fs::{AtFlags, FileType, Mode, OFlags};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

const DIRECTORY: &str = "breakpoints";
const SUFFIX: &str = ".json";
/// Suffix while writing.
const NEW: &str = ".new";
/// Suffix of an unreadable record.
const DAMAGED: &str = ".damaged";
const VERSION: u32 = 1;
/// Most bytes read of a file: far more than a search and some hundred meters need.
const BYTES_MAX: u64 = 16 * 1024 * 1024;

/// The record of one homeostat.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Record {
    version: u32,
    /// Boot id: no breakpoint survives a reboot.
    pub(super) boot: String,
    pub(super) writer: ProcessId,
    pub(super) owed: Vec<Entry>,
}

impl Record {
    pub(super) fn new(boot: String, writer: ProcessId, owed: Vec<Entry>) -> Self {
        Self {
            version: VERSION,
            boot,
            writer,
            owed,
        }
    }
}

struct Book {
    /// `None`: no log is kept.
    directory: Option<PathBuf>,
    owed: BTreeMap<u64, Vec<Entry>>,
    next: u64,
}

static BOOK: Mutex<Book> = Mutex::new(Book {
    directory: None,
    owed: BTreeMap::new(),
    next: 0,
});

/// From now on, breakpoints are logged in this state directory before their insertion, or not counted. Without this
/// call, nothing is logged.
pub fn write_breakpoints_down_in(state_directory: &Path) {
    let mut book = BOOK.lock().unwrap_or_else(PoisonError::into_inner);
    book.directory = Some(state_directory.join(DIRECTORY));
}

pub(super) fn directory_of(state_directory: &Path) -> PathBuf {
    state_directory.join(DIRECTORY)
}

/// Durably logs places before breakpoints are inserted. Returns the entry's number if a log is kept.
///
/// # Errors
/// A sentence: it cannot be written.
pub(super) fn add(entries: &[Entry]) -> Result<Option<u64>, String> {
    BOOK.lock().unwrap_or_else(PoisonError::into_inner).add(entries)
}

/// Removes an entry, whose breakpoints are known to be out.
pub(super) fn strike(number: u64) {
    BOOK.lock().unwrap_or_else(PoisonError::into_inner).strike(number);
}

impl Book {
    fn add(&mut self, entries: &[Entry]) -> Result<Option<u64>, String> {
        let Some(directory) = self.directory.clone() else {
            return Ok(None);
        };
        let number = self.next;
        self.next += 1;
        self.owed.insert(number, entries.to_vec());
        match self.write(&directory, true) {
            Ok(()) => Ok(Some(number)),
            Err(e) => {
                self.owed.remove(&number);
                Err(format!(
                    "where breakpoints will be cannot be written down in {}: {e}; without that none is put in",
                    directory.display()
                ))
            }
        }
    }

    fn strike(&mut self, number: u64) {
        self.owed.remove(&number);
        if let Some(directory) = self.directory.clone() {
            // A stale entry is harmless: the next start finds no breakpoint there.
            let _ = self.write(&directory, false);
        }
    }

    fn write(&self, directory: &Path, durably: bool) -> io::Result<()> {
        let writer = own_id()?;
        let dir = private(directory)?;
        let owed: Vec<Entry> = self.owed.values().flatten().cloned().collect();
        if owed.is_empty() {
            return remove(&dir, &name_of(writer));
        }
        write(&dir, &Record::new(boot_id()?, writer, owed), durably)
    }
}

pub(super) fn own_id() -> io::Result<ProcessId> {
    let stat = std::fs::read("/proc/self/stat")?;
    let unclear = || io::Error::other("/proc/self/stat is not understood");
    Ok(ProcessId {
        pid: i32::try_from(std::process::id()).map_err(|_| unclear())?,
        start_ticks: start_ticks(&stat).ok_or_else(unclear)?,
    })
}

pub(super) fn boot_id() -> io::Result<String> {
    let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id")?;
    Ok(text.trim().to_owned())
}

fn name_of(writer: ProcessId) -> String {
    format!("{}-{}{SUFFIX}", writer.pid, writer.start_ticks)
}

/// Opens or creates the directory. Refuses one that others can write, on whose word breakpoints would be inserted.
fn private(directory: &Path) -> io::Result<OwnedFd> {
    match open_private(directory) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => {}
        found => return found,
    }
    std::fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(directory)?;
    if let Some(above) = directory.parent() {
        // The directory must be as durable as its files.
        File::open(above)?.sync_all()?;
    }
    open_private(directory)
}

/// The same for an existing directory.
pub(super) fn open_private(directory: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let dir = rustix::fs::open(directory, flags, Mode::empty())?;
    is_ours(&dir)?;
    Ok(dir)
}

/// Checks that only this user and root can have written it.
fn is_ours(fd: impl AsFd) -> io::Result<()> {
    let stat = rustix::fs::fstat(fd)?;
    let user = rustix::process::geteuid().as_raw();
    if (stat.st_uid != user && stat.st_uid != 0) || stat.st_mode & 0o022 != 0 {
        return Err(io::Error::new(
            io::ErrorKind::PermissionDenied,
            "others may write there; make it a directory of this user with mode 0700",
        ));
    }
    Ok(())
}

pub(super) fn write(dir: &OwnedFd, record: &Record, durably: bool) -> io::Result<()> {
    let name = name_of(record.writer);
    let new = format!("{name}{NEW}");
    let bytes = serde_json::to_vec(record)?;
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::TRUNC | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let mut file = File::from(rustix::fs::openat(dir, &new, flags, Mode::from_raw_mode(0o600))?);
    file.write_all(&bytes)?;
    if durably {
        file.sync_all()?;
    }
    rustix::fs::renameat(dir, &new, dir, &name)?;
    if durably {
        rustix::fs::fsync(dir)?;
    }
    Ok(())
}

pub(super) fn remove(dir: &OwnedFd, name: &str) -> io::Result<()> {
    match rustix::fs::unlinkat(dir, name, AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT) => Ok(()),
        Err(e) => Err(e.into()),
    }
}

pub(super) fn names(dir: &OwnedFd) -> io::Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in rustix::fs::Dir::read_from(dir)? {
        let name = entry?.file_name().to_string_lossy().into_owned();
        if name.ends_with(SUFFIX) {
            names.push(name);
        }
    }
    names.sort_unstable();
    Ok(names)
}

/// Reads a record. An invalid record is set aside, so that it is reported once.
///
/// # Errors
/// Also if somebody else may have written it.
pub(super) fn read(dir: &OwnedFd, name: &str) -> io::Result<Record> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let fd = rustix::fs::openat(dir, name, flags, Mode::empty())?;
    if FileType::from_raw_mode(rustix::fs::fstat(&fd)?.st_mode) != FileType::RegularFile {
        return Err(io::Error::other("it is no regular file"));
    }
    is_ours(&fd)?;
    let mut bytes = Vec::new();
    File::from(fd).take(BYTES_MAX).read_to_end(&mut bytes)?;
    match serde_json::from_slice::<Record>(&bytes) {
        Ok(record) if record.version == VERSION => Ok(record),
        other => {
            let why = match other {
                Ok(record) => format!("its version is {}", record.version),
                Err(e) => e.to_string(),
            };
            let aside = format!("{name}{DAMAGED}");
            let where_now = match rustix::fs::renameat(dir, name, dir, &aside) {
                Ok(()) => format!("it is kept as {aside}"),
                Err(e) => format!("it cannot be set aside: {e}"),
            };
            Err(io::Error::other(format!(
                "it is not understood ({why}); {where_now}"
            )))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::owed::Breakpoint;
    use std::os::unix::fs::PermissionsExt;

    fn entry(offset: u64) -> Entry {
        Entry {
            processes: vec![ProcessId {
                pid: 7,
                start_ticks: 8,
            }],
            device_inode: ((1, 2), 3),
            path: "/usr/bin/program".to_owned(),
            breakpoints: vec![Breakpoint {
                offset,
                semaphore: 0,
                code: [0x90; crate::owed::CODE],
            }],
        }
    }

    fn book(state: &Path) -> Book {
        Book {
            directory: Some(state.join(DIRECTORY)),
            owed: BTreeMap::new(),
            next: 0,
        }
    }

    #[test]
    fn what_is_owed_is_in_the_file_from_before_it_begins_until_it_is_struck() {
        let state = tempfile::tempdir().unwrap();
        let mut book = book(state.path());
        let first = book.add(&[entry(1)]).unwrap().unwrap();
        let second = book.add(&[entry(2)]).unwrap().unwrap();
        let dir = open_private(&state.path().join(DIRECTORY)).unwrap();
        let written = || {
            let names = names(&dir).unwrap();
            assert!(names.len() <= 1, "{names:?}");
            names.first().map(|name| read(&dir, name).unwrap())
        };
        let record = written().unwrap();
        assert_eq!(record.owed, [entry(1), entry(2)]);
        assert_eq!(record.writer, own_id().unwrap());
        assert_eq!(record.boot, boot_id().unwrap());
        book.strike(first);
        assert_eq!(written().unwrap().owed, [entry(2)]);
        book.strike(second);
        assert_eq!(written(), None, "nothing is owed, and no file is left");
    }

    #[test]
    fn what_cannot_be_written_down_is_not_owed() {
        let state = tempfile::tempdir().unwrap();
        // No directory can be made there.
        std::fs::write(state.path().join(DIRECTORY), "").unwrap();
        let mut book = book(state.path());
        let why = book.add(&[entry(1)]).unwrap_err();
        assert!(why.contains("cannot be written down"), "{why}");
        assert!(book.owed.is_empty());
        // Where nobody has asked for a record there is none.
        book.directory = None;
        assert_eq!(book.add(&[entry(1)]), Ok(None));
    }

    #[test]
    fn a_directory_where_others_may_write_is_refused() {
        let state = tempfile::tempdir().unwrap();
        let directory = state.path().join(DIRECTORY);
        std::fs::create_dir(&directory).unwrap();
        std::fs::set_permissions(&directory, std::fs::Permissions::from_mode(0o777)).unwrap();
        assert!(
            book(state.path())
                .add(&[entry(1)])
                .unwrap_err()
                .contains("others")
        );
        std::fs::set_permissions(&directory, std::fs::Permissions::from_mode(0o700)).unwrap();
        assert!(book(state.path()).add(&[entry(1)]).is_ok());
        let dir = open_private(&directory).unwrap();
        let name = names(&dir).unwrap().remove(0);
        std::fs::set_permissions(directory.join(&name), std::fs::Permissions::from_mode(0o666)).unwrap();
        assert!(read(&dir, &name).is_err());
    }

    #[test]
    fn a_damaged_record_is_told_once_and_kept() {
        let state = tempfile::tempdir().unwrap();
        let directory = state.path().join(DIRECTORY);
        book(state.path()).add(&[entry(1)]).unwrap();
        let dir = open_private(&directory).unwrap();
        for text in [
            &b"{\"version\":1,"[..],
            b"",
            b"{\"version\":2,\"boot\":\"\",\"writer\":{\"pid\":1,\"start_ticks\":1},\"owed\":[]}",
        ] {
            let name = "1-1.json";
            std::fs::write(directory.join(name), text).unwrap();
            std::fs::set_permissions(directory.join(name), std::fs::Permissions::from_mode(0o600)).unwrap();
            let why = read(&dir, name).unwrap_err().to_string();
            assert!(why.contains("not understood") && why.contains("kept as"), "{why}");
            assert!(!names(&dir).unwrap().contains(&name.to_owned()));
            assert_eq!(std::fs::read(directory.join("1-1.json.damaged")).unwrap(), text);
        }
    }
}
