//! Drops the pages that a streaming reader leaves behind, where the reader itself must not be touched. A container's
//! limits belong to its operator, but file pages belong to the host.
//!
//! **Apply** begins to follow the reader. At every sample ([`Effector::tick`]) it reads in `/proc/PID/fdinfo` how far
//! each file open for reading has been read. It drops the part behind the reader (`posix_fadvise(POSIX_FADV_DONTNEED)`
//! on the same file, opened anew). **Undo** ends that. Whoever needs a dropped page reads it again; the record says so.
//!
//! Only pages that the reader itself brought are dropped. Before it arrives, pages ahead of it are looked up
//! (`mincore`). If some are in memory, somebody uses the file or the reader had read it before, and that part stays.
//! The kernel keeps mapped and unwritten pages. Only regular files read from beginning to end are followed.
//!
//! A second or more passes between samples, in which a fast reader brings hundreds of megabytes. So this protects only
//! if that much memory is left, and is the second choice (docs/file-cache.md).

use crate::Effector;
use crate::identity::{NAMESPACES, ProcessStat, boot_id, namespaces, of_another_boot, require_namespaces};
use crate::mounts::Mounts;
use homeostat_kernel::Root;
use homeostat_kernel::cache::{RANGE_MAX, residency};
use homeostat_model::action::{FileReader, Target};
use homeostat_model::{
    Action, ActionId, Direction, EffectorId, ProcessId, Progress, UndoRecord, Workload, WorkloadId,
};
use homeostat_platform::PlatformError;
use homeostat_sensors::reads::parse_position;
use rustix::fd::OwnedFd;
use rustix::fs::{Advice, FileType, Mode, OFlags, Stat, fadvise, fstat, open};
use std::collections::BTreeMap;
use std::fs;
use std::num::NonZeroU64;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Processes of a reader that are followed, oldest first.
const PROCESSES_MAX: usize = 64;
/// Open files of a process that are checked.
const FILES_MAX: usize = 64;
/// Files of all readers that are followed at a time.
const FOLLOWED_MAX: usize = 256;
const SLICE: Duration = Duration::from_millis(20);
/// The part read last stays: a reader may go back a little.
const KEEP: u64 = 1 << 20;
/// Parts of files begin and end at multiples of this. It is the kernel's largest unit, dropped as a whole only.
const STEP: u64 = 2 << 20;
/// Most bytes dropped at one time: a few milliseconds.
const PART: u64 = 64 << 20;
/// Distance looked up ahead, in multiples of the distance read since the last sample, and at least [`LOOK_MIN`].
const LOOK_FACTOR: u64 = 2;
const LOOK_MIN: u64 = 64 << 20;
/// Key of the record for the undo.
const UNDO: &str = "undo";

pub(super) struct PageDropping {
    root: Root,
    in_force: BTreeMap<ActionId, Following>,
}

/// A reader that is followed.
struct Following {
    reader: FileReader,
    victim: WorkloadId,
    /// Its present processes.
    members: Vec<ProcessId>,
    files: BTreeMap<(ProcessId, i32), Followed>,
    over: Option<String>,
}

/// Held files. A separate thread closes them: the last close of a deleted file waits for the disk.
#[derive(Default)]
pub(super) struct Held(pub(super) Vec<Arc<OwnedFd>>);

impl Drop for Held {
    fn drop(&mut self) {
        let files = std::mem::take(&mut self.0);
        if !files.is_empty() {
            // Without a thread they are closed here.
            let _ = std::thread::Builder::new()
                .name("closer".into())
                .spawn(move || drop(files));
        }
    }
}

struct Followed {
    /// The same file, opened anew once it is read on.
    file: Option<OwnedFd>,
    /// Device and inode: another file may get the same descriptor.
    identity: (u64, u64),
    /// Position at the last sample.
    position: u64,
    /// Begin of the range that was not in memory before the reader came.
    fresh_from: u64,
    /// End of that range.
    fresh_to: u64,
}

impl PageDropping {
    pub(super) fn new(root: Root) -> Self {
        Self {
            root,
            in_force: BTreeMap::new(),
        }
    }

    fn begin(&mut self, record: &UndoRecord, reader: &FileReader) {
        self.in_force
            .entry(record.action.id)
            .or_insert_with(|| Following {
                reader: reader.clone(),
                victim: record.action.workload.clone(),
                members: reader.processes.clone(),
                files: BTreeMap::new(),
                over: None,
            });
    }
}

impl Following {
    /// Checks how far the reader got, and drops the part behind it.
    fn look(&mut self, root: &Root, begun: Instant) {
        let members: Vec<ProcessId> = self.members.iter().take(PROCESSES_MAX).copied().collect();
        self.files.retain(|(process, _), _| members.contains(process));
        for process in members {
            if begun.elapsed() >= SLICE {
                return;
            }
            if !is_alive(root, process) {
                self.files.retain(|(p, _), _| *p != process);
                continue;
            }
            let Ok(list) = fs::read_dir(root.path(&format!("/proc/{}/fdinfo", process.pid))) else {
                continue;
            };
            let numbers: Vec<i32> = list
                .take(FILES_MAX)
                .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
                .collect();
            self.files
                .retain(|(p, number), _| *p != process || numbers.contains(number));
            let Ok(mounts) = Mounts::with_overlays(root, process.pid) else {
                continue;
            };
            for number in numbers {
                self.look_at(root, process, number, &mounts, begun);
                if begun.elapsed() >= SLICE {
                    return;
                }
            }
        }
    }

    fn look_at(&mut self, root: &Root, process: ProcessId, number: i32, mounts: &Mounts, begun: Instant) {
        // A file not on a disk is not queried: its server may not answer.
        let Some(position) = position(root, process.pid, number, mounts) else {
            self.files.remove(&(process, number));
            return;
        };
        let key = (process, number);
        let path = root.path(&format!("/proc/{}/fd/{number}", process.pid));
        // The number may stand for another file by now.
        let Some((held, there)) = hold_regular(root, &path, mounts) else {
            self.files.remove(&key);
            return;
        };
        let identity = (there.st_dev, there.st_ino);
        let is_known = self.files.get(&key).is_some_and(|f| f.identity == identity);
        if !is_known {
            if self.files.len() >= FOLLOWED_MAX {
                return;
            }
            self.files.insert(key, Followed::new(identity, position));
            return;
        }
        if let Some(followed) = self.files.get_mut(&key) {
            followed.read_to(&held, position, begun);
        }
    }
}

impl Drop for Followed {
    fn drop(&mut self) {
        let is_deleted = |file: &OwnedFd| fstat(file).is_ok_and(|stat| stat.st_nlink == 0);
        if let Some(file) = self.file.take().filter(is_deleted) {
            drop(Held(vec![Arc::new(file)]));
        }
    }
}

impl Followed {
    /// The file is opened only when it is read on. Most open files of a program are not.
    fn new(identity: (u64, u64), position: u64) -> Self {
        Self {
            file: None,
            identity,
            position,
            fresh_from: 0,
            fresh_to: 0,
        }
    }

    /// The reader has got to `position`. Returns the bytes dropped behind it: as many as fit into the current slice.
    /// The rest follows at the next sample.
    fn read_to(&mut self, held: &OwnedFd, position: u64, begun: Instant) -> u64 {
        let before = std::mem::replace(&mut self.position, position);
        if position < before {
            // It begins anew, or reads here and there.
            (self.fresh_from, self.fresh_to) = (0, 0);
            return 0;
        }
        let moved = position - before;
        if moved < KEEP {
            return 0;
        }
        if self.file.is_none() {
            self.file = open_regular(held, self.identity);
        }
        let Some(file) = &self.file else { return 0 };
        let end = (position.saturating_sub(KEEP) / STEP * STEP).min(self.fresh_to);
        let mut dropped = 0;
        while let Some(length) = NonZeroU64::new(end.saturating_sub(self.fresh_from).min(PART)) {
            if fadvise(file, self.fresh_from, Some(length), Advice::DontNeed).is_err() {
                break;
            }
            dropped += length.get();
            self.fresh_from += length.get();
            if begun.elapsed() >= SLICE {
                break;
            }
        }
        self.look_ahead(moved);
        dropped
    }

    /// Finds the part ahead of the reader that nobody uses.
    fn look_ahead(&mut self, moved: u64) {
        let Some(file) = &self.file else { return };
        let far = moved.saturating_mul(LOOK_FACTOR).clamp(LOOK_MIN, RANGE_MAX);
        let Ok(pages) = residency(file, self.position, far) else {
            return;
        };
        let page = rustix::param::page_size() as u64;
        let begin = self.position / page * page;
        // The next pages stay: the kernel's read-ahead for it, or somebody's.
        let ahead = pages.iter().take_while(|is_there| **is_there).count() as u64;
        let beyond = (begin + ahead * page).div_ceil(STEP) * STEP;
        let from = self.fresh_to.max(beyond);
        let to = (begin + pages.len() as u64 * page) / STEP * STEP;
        if to <= from {
            return;
        }
        let first = ((from - begin) / page) as usize;
        if pages.iter().skip(first).any(|is_there| *is_there) {
            return;
        }
        if from > self.fresh_to {
            // It was faster than expected: the part not looked up in time stays.
            self.fresh_from = from;
        }
        self.fresh_to = to;
    }
}

/// Position of an open file. `None` if it is not open for reading only, or not on a disk of this machine.
fn position(root: &Root, pid: i32, number: i32, mounts: &Mounts) -> Option<u64> {
    let text = fs::read(root.path(&format!("/proc/{pid}/fdinfo/{number}"))).ok()?;
    (is_open_for_reading_only(&text) && !has_lease(&text) && mounts.have(&text))
        .then(|| parse_position(&text))
        .flatten()
}

/// Whether a file is open for reading only, by its `fdinfo` text.
pub(super) fn is_open_for_reading_only(text: &[u8]) -> bool {
    let flags = text.split(|b| *b == b'\n').find_map(|line| {
        let value = line.strip_prefix(b"flags:")?;
        u32::from_str_radix(std::str::from_utf8(value).ok()?.trim(), 8).ok()
    });
    flags.is_some_and(|flags| flags & libc::O_ACCMODE as u32 == libc::O_RDONLY as u32)
}

/// Whether a process has a lease on its open file (`F_SETLEASE`, as file servers do), by its `fdinfo` text. Opening the
/// file once more would break the lease.
pub(super) fn has_lease(text: &[u8]) -> bool {
    let mut locks = text
        .split(|b| *b == b'\n')
        .filter_map(|line| line.strip_prefix(b"lock:"));
    locks.any(|lock| lock.windows(5).any(|word| word == b"LEASE"))
}

/// Opens a held file, if it is that regular file.
fn open_regular(held: &OwnedFd, identity: (u64, u64)) -> Option<OwnedFd> {
    let stat = regular(held)?;
    ((stat.st_dev, stat.st_ino) == identity)
        .then(|| open_held(held))
        .flatten()
}

/// Holds an open file of a process, if it is a regular file on one of these mounts. The type is checked before any
/// opening, because opening a device may have effects. The kernel names the mount without asking the file's server.
pub(super) fn hold_regular(root: &Root, path: &std::path::Path, mounts: &Mounts) -> Option<(OwnedFd, Stat)> {
    let held = open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).ok()?;
    // (The mounts of a captured tree are not those of this machine.)
    if root.is_live() {
        let number = std::os::fd::AsRawFd::as_raw_fd(&held);
        let text = fs::read(format!("/proc/self/fdinfo/{number}")).ok()?;
        mounts.mount_of(&text)?;
    }
    let stat = regular(&held)?;
    Some((held, stat))
}

/// Status of a held file, if it is a regular one.
pub(super) fn regular(held: &OwnedFd) -> Option<Stat> {
    let stat = fstat(held).ok()?;
    (FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile).then_some(stat)
}

pub(super) fn open_held(held: &OwnedFd) -> Option<OwnedFd> {
    let own = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(held));
    open(
        own,
        OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK,
        Mode::empty(),
    )
    .ok()
}

fn is_alive(root: &Root, process: ProcessId) -> bool {
    ProcessStat::read(root, process).is_ok_and(|s| s.start_ticks == process.start_ticks && !s.ended)
}

fn checked_target(action: &Action) -> Result<&FileReader, PlatformError> {
    let rejected = |value: String, why: &str| PlatformError::Rejected {
        what: "target of page_dropping".into(),
        value,
        errno: why.into(),
    };
    let Target::Reader(reader) = &action.target else {
        return Err(rejected("another one".into(), "a reader expected"));
    };
    if reader.workload == action.workload {
        return Err(rejected(
            reader.workload.to_string(),
            "the reader is the workload that is to be protected",
        ));
    }
    Ok(reader)
}

/// Start of the sentence about the end of the action. The strategy searches for it and the reader's name after it.
const OVER: &str = "page_dropping: ";

impl Effector for PageDropping {
    fn id(&self) -> EffectorId {
        EffectorId::new("page_dropping")
    }

    fn prepare(&mut self, action: &Action) -> Result<UndoRecord, PlatformError> {
        let reader = checked_target(action)?;
        if !self.root.is_live() {
            return Err(PlatformError::Unsupported {
                what: "dropping pages that were read".into(),
                why: "the files below the root are not those of the running kernel".into(),
            });
        }
        if !reader.processes.iter().any(|p| is_alive(&self.root, *p)) {
            return Err(PlatformError::Vanished {
                target: format!("workload {}", reader.workload),
            });
        }
        Ok(UndoRecord {
            action: action.clone(),
            boot_id: boot_id(&self.root)?,
            found: BTreeMap::from([
                (NAMESPACES.to_owned(), namespaces(&self.root)),
                (
                    UNDO.to_owned(),
                    "nothing to put back: pages that were dropped are read again when they are needed"
                        .to_owned(),
                ),
            ]),
        })
    }

    fn advance(&mut self, record: &UndoRecord, direction: Direction) -> Result<Progress, PlatformError> {
        if let Some(answer) = of_another_boot(&self.root, record, direction)? {
            return Ok(answer);
        }
        require_namespaces(&self.root, record)?;
        let reader = checked_target(&record.action)?.clone();
        match direction {
            Direction::Apply => {
                if !reader.processes.iter().any(|p| is_alive(&self.root, *p)) {
                    return Err(PlatformError::Vanished {
                        target: format!("workload {}", reader.workload),
                    });
                }
                self.begin(record, &reader);
            }
            Direction::Undo => {
                self.in_force.remove(&record.action.id);
            }
        }
        Ok(Progress {
            done: true,
            finished: 1,
            total: 1,
            verified: true,
            ..Progress::default()
        })
    }

    fn forget(&mut self, record: &UndoRecord) {
        self.in_force.remove(&record.action.id);
    }

    fn adopt(&mut self, record: &UndoRecord) {
        if let Ok(reader) = checked_target(&record.action) {
            let reader = reader.clone();
            self.begin(record, &reader);
        }
    }

    fn tick(&mut self) {
        let begun = Instant::now();
        for following in self.in_force.values_mut() {
            if following.over.is_none() && begun.elapsed() < SLICE {
                following.look(&self.root, begun);
            }
        }
    }

    fn review(&mut self, workloads: &BTreeMap<WorkloadId, Workload>) -> Vec<(WorkloadId, String)> {
        for following in self.in_force.values_mut() {
            let name = &following.reader.workload;
            match workloads.get(name) {
                Some(w) if !w.processes.is_empty() => following.members.clone_from(&w.processes),
                _ => following.over = Some(format!("{OVER}{name}: it has ended")),
            }
        }
        self.in_force
            .values()
            .filter_map(|f| Some((f.victim.clone(), f.over.clone()?)))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use homeostat_kernel::testing::tree;
    use homeostat_model::Bytes;
    use std::io::Write;

    const MIB: usize = 1 << 20;

    fn process(pid: u32) -> ProcessId {
        let text = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
        let after = &text[text.rfind(')').unwrap() + 2..];
        ProcessId {
            pid: pid as i32,
            start_ticks: after.split(' ').nth(19).unwrap().parse().unwrap(),
        }
    }

    fn me() -> ProcessId {
        process(std::process::id())
    }

    fn action(processes: Vec<ProcessId>, victim: &str) -> Action {
        Action {
            id: ActionId(7),
            effector: "page_dropping".into(),
            workload: victim.into(),
            target: Target::Reader(FileReader {
                workload: "reader".into(),
                processes,
                limit: Bytes::from_mib(32),
            }),
            arguments: BTreeMap::new(),
            why: "test".into(),
        }
    }

    /// A file on a disk, mostly of holes, none of it in memory; `None` where the file system keeps its pages.
    fn cold_file(mib: u64) -> Option<(tempfile::TempDir, std::path::PathBuf)> {
        let beside = std::env::current_exe().unwrap();
        let tree = tempfile::tempdir_in(beside.parent().unwrap()).unwrap();
        let path = tree.path().join("file");
        let mut file = fs::File::create(&path).unwrap();
        file.write_all(&[1; MIB]).unwrap();
        file.sync_all().unwrap();
        fadvise(&file, 0, None, Advice::DontNeed).unwrap();
        file.set_len(mib << 20).unwrap();
        // A file that is open for writing only cannot be mapped.
        let file = fs::File::open(&path).unwrap();
        if residency(&file, 0, mib << 20).unwrap().contains(&true) {
            eprintln!("skipped: this file system keeps the pages of files in memory");
            return None;
        }
        Some((tree, path))
    }

    fn identity(path: &std::path::Path) -> (u64, u64) {
        let stat = rustix::fs::stat(path).unwrap();
        (stat.st_dev, stat.st_ino)
    }

    const fn mib(n: u64) -> u64 {
        n << 20
    }

    /// Nobody reads here: the positions are said, so that nothing depends on how far the kernel reads ahead.
    fn held(path: &std::path::Path) -> OwnedFd {
        open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).unwrap()
    }

    #[test]
    fn what_the_reader_brought_goes_and_what_somebody_else_had_stays() {
        let Some((_keep, path)) = cold_file(256) else {
            return;
        };
        // However slow the disk is, the slice is not over.
        let in_time = Instant::now() + Duration::from_secs(3600);
        let mut followed = Followed::new(identity(&path), 0);
        // What it had read when it was first seen to read may be somebody's.
        assert_eq!(followed.read_to(&held(&path), mib(16), in_time), 0);
        // The first 16 MiB were not looked at before they were read, and the last ones stay.
        assert_eq!(followed.read_to(&held(&path), mib(48), in_time), mib(46 - 16));
        // Somebody else works on what comes next: what was not yet written to the disk cannot be taken.
        let mut other = fs::OpenOptions::new().write(true).open(&path).unwrap();
        std::io::Seek::seek(&mut other, std::io::SeekFrom::Start(mib(130))).unwrap();
        other.write_all(&[2; MIB]).unwrap();
        assert_eq!(
            followed.read_to(&held(&path), mib(80), in_time),
            mib(32),
            "that was looked at in time"
        );
        assert_eq!(
            followed.read_to(&held(&path), mib(180), in_time),
            mib(112 - 78),
            "up to where it may be the other one's"
        );
        assert_eq!(followed.read_to(&held(&path), mib(182), in_time), 0);
        // Round again.
        assert_eq!(followed.read_to(&held(&path), mib(2), in_time), 0);
        assert_eq!((followed.fresh_from, followed.fresh_to), (0, 0));
        // Another file has got the descriptor: it is not this one that is opened.
        let mut another = Followed::new((1, 1), 0);
        assert_eq!(
            (
                another.read_to(&held(&path), mib(16), in_time),
                another.file.is_none()
            ),
            (0, true)
        );
        assert!(
            open_regular(
                &held(std::path::Path::new("/dev/null")),
                identity(std::path::Path::new("/dev/null"))
            )
            .is_none()
        );
    }

    #[test]
    fn a_file_with_a_lease_is_told_by_its_text() {
        let text =
            b"pos:\t0\nflags:\t0100000\nmnt_id:\t27\nlock:\t1: LEASE  ACTIVE    READ  7 fd:00:11 0 EOF\n";
        assert!(has_lease(text));
        for other in [
            &b"lock:\t1: POSIX  ADVISORY  WRITE 7 fd:00:11 0 EOF\n"[..],
            b"pos:\t0\n",
            b"LEASE\n",
        ] {
            assert!(!has_lease(other));
        }
    }

    #[test]
    fn what_does_not_fit_into_the_slice_is_given_back_at_the_next_look() {
        let Some((_keep, path)) = cold_file(256) else {
            return;
        };
        let mut followed = Followed::new(identity(&path), 0);
        followed.read_to(&held(&path), mib(2), Instant::now());
        (followed.fresh_from, followed.fresh_to) = (0, mib(256));
        let over = Instant::now().checked_sub(SLICE).unwrap();
        assert_eq!(followed.read_to(&held(&path), mib(201), over), PART);
        assert_eq!(followed.read_to(&held(&path), mib(203), over), PART);
        let in_time = Instant::now() + Duration::from_secs(3600);
        assert_eq!(
            followed.read_to(&held(&path), mib(205), in_time),
            mib(204) - 2 * PART
        );
    }

    /// A shell that reads as many bytes of a file as it is told, and says when it has.
    struct Reader(std::process::Child, std::io::BufReader<std::process::ChildStdout>);

    impl Reader {
        fn start(path: &std::path::Path) -> Self {
            use std::process::{Command, Stdio};
            let script = "exec 3<\"$0\"; while read -r n; do head -c \"$n\" <&3 >/dev/null; echo; done";
            let mut child = Command::new("sh")
                .args(["-c", script])
                .arg(path)
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .spawn()
                .unwrap();
            let out = std::io::BufReader::new(child.stdout.take().unwrap());
            let mut reader = Self(child, out);
            reader.read(1);
            reader
        }

        fn read(&mut self, bytes: u64) {
            use std::io::BufRead;
            writeln!(self.0.stdin.as_mut().unwrap(), "{bytes}").unwrap();
            self.1.read_line(&mut String::new()).unwrap();
        }
    }

    impl Drop for Reader {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    #[test]
    fn a_process_that_reads_is_followed() {
        let Some((_keep, path)) = cold_file(128) else {
            return;
        };
        let mut reader = Reader::start(&path);
        let who = process(reader.0.id());
        let mut effector = PageDropping::new(Root::default());
        let record = effector.prepare(&action(vec![who], "victim")).unwrap();
        assert!(record.found[UNDO].contains("nothing to put back"));
        effector.advance(&record, Direction::Apply).unwrap();
        effector.tick();
        for _ in 0..3 {
            reader.read(mib(24));
            // A slice of work is short, and the host may be busy.
            for _ in 0..100 {
                effector.tick();
            }
        }
        let following = &effector.in_force[&ActionId(7)];
        let followed = &following.files[&(who, 3)];
        assert!(followed.position > mib(72), "{}", followed.position);
        // How far the kernel reads ahead is a setting of the disk; what was behind the reader when it was last seen is gone.
        assert_eq!(followed.fresh_from, mib(70), "{}", followed.fresh_to);
        let file = followed.file.as_ref().unwrap();
        let behind = residency(file, mib(60), mib(10)).unwrap();
        let left = behind.iter().filter(|p| **p).count();
        // A few pages stay that somebody holds at that moment (DAMON, compaction).
        assert!(left * 20 < behind.len(), "{left} of {}", behind.len());
        // Undone: it is followed no more, again and again.
        for _ in 0..2 {
            assert!(effector.advance(&record, Direction::Undo).unwrap().verified);
        }
        assert!(effector.in_force.is_empty());
        effector.tick();
    }

    #[test]
    fn of_ten_thousand_open_files_a_few_are_followed() {
        const FILES: i32 = 10_000;
        let who = ProcessId {
            pid: 7,
            start_ticks: 1,
        };
        let (_keep, root) = tree(&[
            (
                "proc/7/stat",
                "7 (tar) S 1 7 7 0 -1 4194304 1 0 0 0 1 2 0 0 20 0 1 0 1 9 9 9 1 2 3 0\n",
            ),
            ("proc/7/mountinfo", "1 0 98:0 / / rw - ext4 /dev/x rw\n"),
        ]);
        // All of them are one file, of holes: the number is what counts.
        let path = root.path("/file");
        fs::File::create(&path).unwrap().set_len(mib(8)).unwrap();
        for directory in ["fd", "fdinfo"] {
            fs::create_dir(root.path(&format!("/proc/7/{directory}"))).unwrap();
        }
        let is_at = |number: i32, at: u64| {
            let text = format!("pos:\t{at}\nflags:\t0100000\nmnt_id:\t1\nino:\t9\n");
            fs::write(root.path(&format!("/proc/7/fdinfo/{number}")), text).unwrap();
        };
        for number in 3..3 + FILES {
            is_at(number, 0);
            std::os::unix::fs::symlink(&path, root.path(&format!("/proc/7/fd/{number}"))).unwrap();
        }
        let action = action(vec![who], "victim");
        let mut following = Following {
            reader: checked_target(&action).unwrap().clone(),
            victim: action.workload.clone(),
            members: vec![who],
            files: BTreeMap::new(),
            over: None,
        };
        following.look(&root, Instant::now().checked_sub(SLICE).unwrap());
        assert!(following.files.is_empty(), "the slice is over");
        // However busy the machine is.
        let in_time = Instant::now() + Duration::from_secs(3600);
        following.look(&root, in_time);
        assert_eq!(following.files.len(), FILES_MAX);
        let opened = |following: &Following| following.files.values().filter(|f| f.file.is_some()).count();
        assert_eq!(opened(&following), 0);
        let numbers: Vec<i32> = following.files.keys().map(|(_, number)| *number).collect();
        for number in numbers {
            is_at(number, mib(6));
        }
        following.look(&root, in_time);
        assert_eq!(following.files.len(), FILES_MAX);
        assert!((1..=FILES_MAX).contains(&opened(&following)));
    }

    #[test]
    fn it_ends_with_the_reader_and_is_refused_for_one_who_has_ended() {
        let mut effector = PageDropping::new(Root::default());
        let gone = ProcessId {
            pid: me().pid,
            start_ticks: 1,
        };
        assert!(matches!(
            effector.prepare(&action(vec![gone], "victim")),
            Err(PlatformError::Vanished { .. })
        ));
        assert!(matches!(
            effector.prepare(&action(vec![me()], "reader")),
            Err(PlatformError::Rejected { .. })
        ));
        let record = effector.prepare(&action(vec![me()], "victim")).unwrap();
        // A fresh process that takes over what an earlier one left.
        effector.adopt(&record);
        let told = effector.review(&BTreeMap::new());
        assert!(told.len() == 1 && told[0].0.as_str() == "victim", "{told:?}");
        assert!(told[0].1.contains("has ended"));
    }
}
