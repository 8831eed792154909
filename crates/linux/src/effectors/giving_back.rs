//! Giving back what a reader brought before it was contained.
//!
//! A process that is moved into a group with a limit leaves the pages behind that it was charged for: they stay counted in the
//! group that it came from. Where that one has a limit of its own it stays full of them, and the kernel goes on taking pages
//! from everybody in it (measured: docs/file-cache.md). So what the reader has read already of the files that it has open is
//! dropped (`posix_fadvise(POSIX_FADV_DONTNEED)` on the same file, opened anew).
//!
//! Dropped is only what is behind the reader, of regular files on a disk of this machine, that it has open for reading
//! only, and that nobody else has open or mapped: all processes are looked at first. Where not all of them can be seen, or
//! one of them does not let itself be looked at (but for the first one), nothing is dropped. There is nothing to put back:
//! what is dropped is clean, and whoever needs it reads it again. The kernel keeps pages that are mapped; of those that
//! wait to be written it begins to write what it would have written anyway, and keeps them.
//!
//! Others are known by the number of the inode alone, on whatever device: to ask more about a file may be to ask another
//! machine. Two files of one number are taken for one, and then nothing is dropped; a file that is open through an overlay
//! mostly has the number of the one below. Not seen are who opens a file after it was looked at, a thread that does not share
//! the open files of its process, and the kernel itself (a loop device, an NFS server): they read again what was dropped.
//!
//! It takes its time: one process or one part of a file is a step, as many of them as fit are a slice, and each is done by
//! the bounded reader ([`Reader`]), so that a process that keeps its address space locked, or a disk that does not answer,
//! holds up nobody.

use super::page_dropping::{hold_regular, is_open_for_reading_only, open_held};
use crate::Root;
use crate::capabilities::{CAP_SYS_PTRACE, may};
use crate::sensors::bytes::{number, words};
use crate::sensors::reader::{NotNow, PATIENCE, Reader};
use crate::sensors::reads::{parse_inode, parse_position};
use rustix::fd::OwnedFd;
use rustix::fs::{Advice, fadvise, fstatfs};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{self, BufRead, BufReader};
use std::num::NonZeroU64;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// One slice of work.
const SLICE: Duration = Duration::from_millis(20);
/// Processes that are looked at; where there are more, nothing is dropped.
const PROCESSES_MAX: usize = 16 * 1024;
/// Open files and mappings that are looked at, of all processes together; where there are more, nothing is dropped.
const LOOKED_AT_MAX: usize = 500_000;
/// Files of a reader that are kept in mind.
const FILES_MAX: usize = 64;
/// What was read last stays: a reader may go back a little.
const KEEP: u64 = 1 << 20;
/// Parts of files end at multiples of this: the largest unit in which the kernel keeps pages of files, and of which it drops no
/// part.
const STEP: u64 = 2 << 20;
/// Most that is dropped by one call: a few milliseconds where all of it is in memory.
const PART: u64 = 64 << 20;
/// Most that is gone through for one reader, beginning with what it read last.
const GIVEN_MAX: u64 = 16 << 30;
/// The process that the kernel starts.
const FIRST: i32 = 1;
/// The first name space of processes (`PROC_PID_INIT_INO`): from any other one not all processes are seen.
const PROCESSES_OF_THE_MACHINE: &str = "pid:[4026531836]";
/// File systems whose pages come from a disk of this machine (`include/uapi/linux/magic.h`): ext, xfs, btrfs, f2fs, bcachefs,
/// squashfs, erofs. Another machine or a program may be behind any that is not known; an overlay shows the files of others.
const ON_DISK: [u64; 7] = [
    0xef53,
    0x5846_5342,
    0x9123_683e,
    0xf2f5_2010,
    0xca45_1a4e,
    0x7371_7368,
    0xe0f5_e1e2,
];

const OF_OTHERS: &str = "file whose pages stay: another process has it open or mapped";
const NOT_ONLY_READ: &str = "file whose pages stay: the reader writes to it or maps it";
const NOT_ON_DISK: &str = "file whose pages stay: it is not on a disk of this machine";
const TOO_MANY: &str = "file whose pages stay: the reader has more files open than are looked at";
const REFUSED: &str = "file whose pages stay: the kernel drops none of them";

/// Why nothing is dropped.
#[derive(Debug, thiserror::Error)]
enum Obstacle {
    #[error("not all processes can be seen from here (it takes root, outside of a name space of processes)")]
    Blind,
    #[error("the open files of process {pid} cannot be looked at: {why}")]
    Process { pid: i32, why: io::Error },
    #[error("the leader of process {0} has ended and its threads have not: their open files are not known")]
    Headless(i32),
    #[error("the kernel does not tell which file is open (before Linux 5.14)")]
    Untold,
    #[error("the processes cannot be listed: {0}")]
    List(io::Error),
    #[error("too many processes, open files or mappings to look at all")]
    TooMany,
    #[error(transparent)]
    NotNow(#[from] NotNow),
}

/// A file of the reader.
struct Candidate {
    file: Arc<OwnedFd>,
    /// A process that has it open.
    pid: i32,
    /// What lies before this is behind the reader, and not yet dropped.
    to: u64,
}

/// The work of giving back, as far as it got.
pub(super) struct GivingBack {
    /// Processes of the reader that are still to be looked at …
    own: Vec<i32>,
    /// … and all of them.
    own_all: BTreeSet<i32>,
    /// Other processes that are still to be looked at; `None`: not listed yet.
    others: Option<Vec<i32>>,
    /// By inode.
    files: BTreeMap<u64, Candidate>,
    /// What lies behind all that have a file open, by inode.
    behind: BTreeMap<u64, u64>,
    /// What the reader does otherwise than read.
    not_only_read: BTreeSet<u64>,
    /// Files that stay as they are, by reason.
    left: BTreeMap<String, u64>,
    looked_at: usize,
    given: u64,
    steps: u64,
}

impl GivingBack {
    /// Begins with the processes of a reader.
    pub(super) fn new(processes: BTreeSet<i32>) -> Self {
        Self {
            own: processes.iter().copied().collect(),
            own_all: processes,
            others: None,
            files: BTreeMap::new(),
            behind: BTreeMap::new(),
            not_only_read: BTreeSet::new(),
            left: BTreeMap::new(),
            looked_at: 0,
            given: 0,
            steps: 0,
        }
    }

    /// One slice. When it is over: what was left as it is, by reason.
    pub(super) fn go_on(&mut self, root: &Root, reader: &mut Reader) -> Option<BTreeMap<String, u64>> {
        let begun = Instant::now();
        loop {
            match self.step(root, reader) {
                Ok(false) => {}
                Ok(true) => return Some(std::mem::take(&mut self.left)),
                Err(obstacle) => {
                    let why = format!("what it read before stays in memory: {obstacle}");
                    return Some(BTreeMap::from([(why, 1)]));
                }
            }
            if begun.elapsed() >= SLICE {
                return None;
            }
        }
    }

    /// Steps done, and how many there are in all as far as is known.
    pub(super) fn steps(&self) -> (u64, u64) {
        let parts: u64 = self.files.values().map(|c| c.to.div_ceil(PART)).sum();
        let waiting = self.own.len() + self.others.as_ref().map_or(0, Vec::len);
        (self.steps, self.steps + waiting as u64 + parts + 1)
    }

    /// One step; true when it was the last one.
    fn step(&mut self, root: &Root, reader: &mut Reader) -> Result<bool, Obstacle> {
        self.steps += 1;
        let room = LOOKED_AT_MAX.saturating_sub(self.looked_at);
        if let Some(pid) = self.own.pop() {
            let (of, most) = (root.clone(), FILES_MAX.saturating_sub(self.files.len()));
            let look = reader.run(pid, PATIENCE, move || look_at_reader(&of, pid, room, most))??;
            self.looked_at += look.looked_at;
            self.add(pid, look);
            return Ok(false);
        }
        if self.files.is_empty() {
            return Ok(true);
        }
        let Some(others) = &mut self.others else {
            if !sees_everybody(root) {
                return Err(Obstacle::Blind);
            }
            let own = &self.own_all;
            self.others = Some(processes(root, |pid| !own.contains(&pid))?);
            return Ok(false);
        };
        if let Some(pid) = others.pop() {
            let (of, wanted) = (root.clone(), self.files.keys().copied().collect());
            let (held, looked_at) = reader.run(pid, PATIENCE, move || held_by(&of, pid, &wanted, room))??;
            self.looked_at += looked_at;
            for inode in held {
                self.files.remove(&inode);
                self.leave(OF_OTHERS);
            }
            return Ok(false);
        }
        self.give_back_a_part(reader)
    }

    fn leave(&mut self, why: &str) {
        *self.left.entry(why.to_owned()).or_default() += 1;
    }

    /// Adds what one process of the reader has open.
    fn add(&mut self, pid: i32, look: Look) {
        for (why, count) in look.left {
            *self.left.entry(why.to_owned()).or_default() += count;
        }
        for (inode, at) in look.positions {
            let least = self.behind.entry(inode).or_insert(u64::MAX);
            *least = behind(at).min(*least);
        }
        for (inode, (file, to)) in look.files {
            self.files.entry(inode).or_insert_with(|| Candidate {
                file: Arc::new(file),
                pid,
                to,
            });
        }
        self.not_only_read.extend(look.not_only_read);
        let before = self.files.len();
        self.files.retain(|inode, file| {
            file.to = self.behind.get(inode).copied().unwrap_or(0).min(file.to);
            !self.not_only_read.contains(inode)
        });
        for _ in self.files.len()..before {
            self.leave(NOT_ONLY_READ);
        }
    }

    /// Drops one part of one file, from behind; true when there is nothing more to drop.
    fn give_back_a_part(&mut self, reader: &mut Reader) -> Result<bool, Obstacle> {
        let Some(mut entry) = self.files.first_entry() else {
            return Ok(true);
        };
        let candidate = entry.get_mut();
        let from = candidate.to.saturating_sub(PART);
        let Some(length) = NonZeroU64::new(candidate.to - from) else {
            entry.remove();
            return Ok(self.files.is_empty());
        };
        let file = Arc::clone(&candidate.file);
        let dropped = reader.run(candidate.pid, PATIENCE, move || {
            fadvise(&*file, from, Some(length), Advice::DontNeed)
        })?;
        candidate.to = from;
        self.given = self.given.saturating_add(length.get());
        if dropped.is_err() {
            entry.remove();
            self.leave(REFUSED);
        }
        Ok(self.given >= GIVEN_MAX)
    }
}

/// What one process of the reader has open.
#[derive(Default)]
struct Look {
    /// Files that it has read a part of, with what lies behind it, by inode.
    files: BTreeMap<u64, (OwnedFd, u64)>,
    /// All positions, also of files that it has not read yet.
    positions: Vec<(u64, u64)>,
    not_only_read: BTreeSet<u64>,
    left: BTreeMap<&'static str, u64>,
    looked_at: usize,
}

/// Looks what a process of the reader has open, and opens what it has read much of, at most so many files.
fn look_at_reader(root: &Root, pid: i32, room: usize, most: usize) -> Result<Look, Obstacle> {
    let mut look = Look::default();
    let mut read = Vec::new();
    let open = each_open_file(root, pid, room, |number, inode, text| {
        if !is_open_for_reading_only(text) {
            look.not_only_read.insert(inode);
            return;
        }
        // What has no position is not read by one.
        let at = parse_position(text).unwrap_or(0);
        look.positions.push((inode, at));
        if behind(at) > 0 {
            read.push((number, inode, at));
        }
    })?;
    let mapped = each_mapped_file(root, pid, room.saturating_sub(open), |inode| {
        look.not_only_read.insert(inode);
    })?;
    look.looked_at = open + mapped;
    for (number, inode, at) in read {
        if look.files.contains_key(&inode) {
            continue;
        }
        if look.files.len() >= most {
            *look.left.entry(TOO_MANY).or_default() += 1;
            continue;
        }
        match open_read(&root.path(&format!("/proc/{pid}/fd/{number}")), inode, at) {
            Ok(Some(file)) => {
                look.files.insert(inode, file);
            }
            // Another one has got its number meanwhile, or it is something else than a file.
            Ok(None) => {}
            Err(why) => *look.left.entry(why).or_default() += 1,
        }
    }
    Ok(look)
}

/// What lies behind a reader at this position, to where it may be dropped.
fn behind(position: u64) -> u64 {
    position.saturating_sub(KEEP) / STEP * STEP
}

/// Opens what a process has open as that inode once more, if it is a regular file on a disk. With it: what lies behind the reader,
/// but no more than the file has.
fn open_read(path: &Path, inode: u64, at: u64) -> Result<Option<(OwnedFd, u64)>, &'static str> {
    let Some((held, stat)) = hold_regular(path).filter(|(_, stat)| stat.st_ino == inode) else {
        return Ok(None);
    };
    // Before it is opened: to open a file of another machine may take as long as that likes.
    if !fstatfs(&held).is_ok_and(|s| ON_DISK.contains(&(s.f_type as u64 & 0xffff_ffff))) {
        return Err(NOT_ON_DISK);
    }
    let size = u64::try_from(stat.st_size).unwrap_or(0);
    Ok(open_held(&held).map(|file| (file, behind(at.min(size)))))
}

/// Which of these inodes a process has open or mapped, and how many open files and mappings were looked at.
fn held_by(
    root: &Root,
    pid: i32,
    wanted: &BTreeSet<u64>,
    room: usize,
) -> Result<(BTreeSet<u64>, usize), Obstacle> {
    let mut held = BTreeSet::new();
    let open = each_open_file(root, pid, room, |_, inode, _| {
        if wanted.contains(&inode) {
            held.insert(inode);
        }
    })?;
    let mapped = each_mapped_file(root, pid, room.saturating_sub(open), |inode| {
        if wanted.contains(&inode) {
            held.insert(inode);
        }
    })?;
    if open + mapped == 0 && pid != FIRST {
        // Of a leader that has ended nothing is told, whatever its threads have open.
        let threads =
            fs::read_dir(root.path(&format!("/proc/{pid}/task"))).map_or(0, |list| list.take(2).count());
        if threads > 1 {
            return Err(Obstacle::Headless(pid));
        }
    }
    Ok((held, open + mapped))
}

/// Shows each open file of a process with its number, its inode and its text in `fdinfo`; returns how many there are. A process
/// that has ended has none.
fn each_open_file(
    root: &Root,
    pid: i32,
    room: usize,
    mut see: impl FnMut(i32, u64, &[u8]),
) -> Result<usize, Obstacle> {
    let directory = root.path(&format!("/proc/{pid}/fdinfo"));
    let Some(list) = unless_gone(pid, fs::read_dir(&directory))? else {
        return Ok(0);
    };
    let mut count = 0;
    for entry in list {
        let Some(entry) = unless_gone(pid, entry)? else {
            break;
        };
        let Some(number) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else {
            continue;
        };
        if count >= room {
            return Err(Obstacle::TooMany);
        }
        // Closed meanwhile.
        let Some(text) = unless_gone(pid, fs::read(entry.path()))? else {
            continue;
        };
        count += 1;
        see(number, parse_inode(&text).ok_or(Obstacle::Untold)?, &text);
    }
    Ok(count)
}

/// Shows the inode of each mapping of a process that is one of a file; returns how many mappings there are.
fn each_mapped_file(root: &Root, pid: i32, room: usize, mut see: impl FnMut(u64)) -> Result<usize, Obstacle> {
    /// Room for what the kernel writes at one time.
    const BUFFER_BYTES: usize = 64 * 1024;
    let Some(maps) = unless_gone(pid, fs::File::open(root.path(&format!("/proc/{pid}/maps"))))? else {
        return Ok(0);
    };
    let mut maps = BufReader::with_capacity(BUFFER_BYTES, maps);
    let (mut line, mut count) = (Vec::new(), 0);
    loop {
        line.clear();
        match unless_gone(pid, maps.read_until(b'\n', &mut line))? {
            None | Some(0) => return Ok(count),
            Some(_) if count >= room => return Err(Obstacle::TooMany),
            Some(_) => count += 1,
        }
        // proc(5): address, rights, offset, device, inode, name.
        if let Some(inode) = words(&line).nth(4).and_then(number).filter(|inode| *inode != 0) {
            see(inode);
        }
    }
}

/// `None` when what was asked for is not there any more, or never was: a thread of the kernel has no memory. The first process of
/// the machine may keep even root from looking; it starts others, and works on no large files.
fn unless_gone<T>(pid: i32, answer: io::Result<T>) -> Result<Option<T>, Obstacle> {
    match answer {
        Ok(found) => Ok(Some(found)),
        Err(e) if e.kind() == io::ErrorKind::NotFound || e.raw_os_error() == Some(libc::ESRCH) => Ok(None),
        Err(e) if pid == FIRST && e.kind() == io::ErrorKind::PermissionDenied => Ok(None),
        Err(why) => Err(Obstacle::Process { pid, why }),
    }
}

/// All processes of that kind but this one: what we have open is what we have opened here, or look at from elsewhere.
fn processes(root: &Root, is_meant: impl Fn(i32) -> bool) -> Result<Vec<i32>, Obstacle> {
    let own = i32::try_from(std::process::id()).unwrap_or(0);
    let mut found = Vec::new();
    for entry in fs::read_dir(root.path("/proc")).map_err(Obstacle::List)? {
        let entry = entry.map_err(Obstacle::List)?;
        let pid = entry.file_name().to_str().and_then(|name| name.parse().ok());
        let Some(pid) = pid.filter(|pid| *pid != own && is_meant(*pid)) else {
            continue;
        };
        if found.len() >= PROCESSES_MAX {
            return Err(Obstacle::TooMany);
        }
        found.push(pid);
    }
    Ok(found)
}

/// Whether all processes of the machine are listed to us, and let themselves be looked at.
fn sees_everybody(root: &Root) -> bool {
    let namespace = fs::read_link(root.path("/proc/self/ns/pid"));
    namespace.is_ok_and(|name| name.as_os_str() == PROCESSES_OF_THE_MACHINE) && may(root, CAP_SYS_PTRACE)
}

#[cfg(test)]
mod tests {
    use super::super::testing::tree;
    use super::*;
    use std::io::Write;
    use std::os::unix::fs::{MetadataExt, symlink};
    use std::path::PathBuf;

    const MIB: u64 = 1 << 20;
    /// Beyond the largest number that the kernel gives to a process.
    const READER: i32 = 5_000_001;
    const SECOND: i32 = 5_000_002;
    const OTHER: i32 = 5_000_003;

    /// Processes that are told of, and real files on a disk.
    struct Scene {
        _keep: tempfile::TempDir,
        root: Root,
        disk: tempfile::TempDir,
    }

    impl Scene {
        /// `None` where the tests do not lie on a disk.
        fn new() -> Option<Self> {
            let (keep, root) = tree(&[("proc/self/status", "CapEff:\t000001ffffffffff\n")]);
            fs::create_dir_all(root.path("/proc/self/ns")).unwrap();
            symlink(PROCESSES_OF_THE_MACHINE, root.path("/proc/self/ns/pid")).unwrap();
            let beside = std::env::current_exe().unwrap();
            let disk = tempfile::tempdir_in(beside.parent().unwrap()).unwrap();
            let opened = fs::File::open(disk.path()).unwrap();
            let kind = fstatfs(&opened).unwrap().f_type as u64 & 0xffff_ffff;
            if !ON_DISK.contains(&kind) {
                eprintln!("skipped: the tests do not lie on a disk ({kind:#x})");
                return None;
            }
            Some(Self {
                _keep: keep,
                root,
                disk,
            })
        }

        /// A file of so many MiB, all of it holes.
        fn file(&self, name: &str, mib: u64) -> PathBuf {
            let path = self.disk.path().join(name);
            fs::File::create(&path).unwrap().set_len(mib * MIB).unwrap();
            path
        }

        /// A process has a file open, at a position.
        fn opens(&self, pid: i32, number: i32, path: &Path, at: u64, flags: &str) {
            let inode = fs::metadata(path).unwrap().ino();
            self.tells(
                pid,
                number,
                path,
                &format!("pos:\t{at}\nflags:\t{flags}\nmnt_id:\t1\nino:\t{inode}\n"),
            );
        }

        fn tells(&self, pid: i32, number: i32, path: &Path, text: &str) {
            for directory in ["fd", "fdinfo"] {
                fs::create_dir_all(self.root.path(&format!("/proc/{pid}/{directory}"))).unwrap();
            }
            fs::write(self.root.path(&format!("/proc/{pid}/fdinfo/{number}")), text).unwrap();
            symlink(path, self.root.path(&format!("/proc/{pid}/fd/{number}"))).unwrap();
        }

        fn maps(&self, pid: i32, path: &Path) {
            let inode = fs::metadata(path).unwrap().ino();
            let text = format!(
                "00400000-00401000 r--p 00000000 00:00 0\n7f00-7f10 r--s 00000000 fe:00 {inode}    {}\n",
                path.display()
            );
            fs::create_dir_all(self.root.path(&format!("/proc/{pid}"))).unwrap();
            fs::write(self.root.path(&format!("/proc/{pid}/maps")), text).unwrap();
        }

        /// All steps up to the first part that would be dropped. Returns what would be, in MiB, and what is left and why.
        fn choose(&self, own: &[i32]) -> (Vec<u64>, Vec<String>) {
            let mut giving = GivingBack::new(own.iter().copied().collect());
            let mut reader = Reader::default();
            for _ in 0..1000 {
                if giving.own.is_empty() && giving.others.as_ref().is_some_and(Vec::is_empty) {
                    break;
                }
                match giving.step(&self.root, &mut reader) {
                    Ok(false) => {}
                    Ok(true) => break,
                    Err(obstacle) => return (Vec::new(), vec![obstacle.to_string()]),
                }
            }
            let files = giving.files.values().map(|c| c.to / MIB).filter(|mib| *mib > 0);
            (files.collect(), giving.left.into_keys().collect())
        }
    }

    const READS: &str = "0100000";

    #[test]
    fn what_lies_behind_the_reader_is_meant_and_no_more() {
        let Some(scene) = Scene::new() else { return };
        let big = scene.file("big", 100);
        scene.opens(READER, 3, &big, 81 * MIB, READS);
        scene.opens(OTHER, 3, &scene.file("theirs", 1), 0, READS);
        assert_eq!(scene.choose(&[READER]), (vec![80], vec![]));
        // The part that was read last stays, and a little is not worth it.
        let small = scene.file("small", 100);
        scene.opens(READER, 4, &small, 3 * MIB - 1, READS);
        assert_eq!(scene.choose(&[READER]), (vec![80], vec![]));
        // Another process of the reader is not as far yet, whichever is looked at first.
        scene.opens(SECOND, 3, &big, 41 * MIB, READS);
        assert_eq!(scene.choose(&[READER, SECOND]), (vec![40], vec![]));
        scene.opens(SECOND, 4, &big, 0, READS);
        assert_eq!(scene.choose(&[SECOND, READER]), (vec![], vec![]));
        // A position beyond the end of the file.
        let cut = scene.file("cut", 9);
        scene.opens(5_000_009, 3, &cut, 900 * MIB, READS);
        assert_eq!(scene.choose(&[5_000_009]), (vec![8], vec![]));
    }

    #[test]
    fn what_somebody_else_has_open_or_mapped_stays() {
        let left = vec![OF_OTHERS.to_owned()];
        let Some(scene) = Scene::new() else { return };
        let big = scene.file("big", 100);
        scene.opens(READER, 3, &big, 81 * MIB, READS);
        // Wherever he is in it, and whatever he does with it.
        scene.opens(OTHER, 9, &big, 0, "0100002");
        assert_eq!(scene.choose(&[READER]), (vec![], left.clone()));

        let Some(scene) = Scene::new() else { return };
        let (big, second) = (scene.file("big", 100), scene.file("second", 100));
        scene.opens(READER, 3, &big, 81 * MIB, READS);
        scene.opens(READER, 4, &second, 21 * MIB, READS);
        scene.maps(OTHER, &big);
        assert_eq!(scene.choose(&[READER]), (vec![20], left));
    }

    #[test]
    fn what_the_reader_writes_to_or_maps_stays() {
        let left = vec![NOT_ONLY_READ.to_owned()];
        let Some(scene) = Scene::new() else { return };
        let big = scene.file("big", 100);
        scene.opens(READER, 3, &big, 81 * MIB, READS);
        scene.opens(SECOND, 3, &big, 81 * MIB, "0100001");
        assert_eq!(scene.choose(&[READER, SECOND]), (vec![], left.clone()));
        assert_eq!(scene.choose(&[SECOND, READER]), (vec![], left.clone()));

        let Some(scene) = Scene::new() else { return };
        let big = scene.file("big", 100);
        scene.opens(READER, 3, &big, 81 * MIB, READS);
        scene.maps(READER, &big);
        assert_eq!(scene.choose(&[READER]), (vec![], left));
    }

    #[test]
    fn only_regular_files_on_a_disk_are_meant_and_only_the_one_that_was_seen() {
        let Some(scene) = Scene::new() else { return };
        scene.opens(READER, 3, Path::new("/dev/null"), 81 * MIB, READS);
        let pipe = scene.disk.path().join("pipe");
        rustix::fs::mknodat(
            rustix::fs::CWD,
            &pipe,
            rustix::fs::FileType::Fifo,
            rustix::fs::Mode::RUSR,
            0,
        )
        .unwrap();
        scene.opens(READER, 4, &pipe, 81 * MIB, READS);
        // Another file has got the number since it was told which one it is.
        let (seen, now) = (scene.file("seen", 100), scene.file("now", 100));
        let inode = fs::metadata(&seen).unwrap().ino();
        scene.tells(
            READER,
            5,
            &now,
            &format!("pos:\t{}\nflags:\t{READS}\nino:\t{inode}\n", 81 * MIB),
        );
        assert_eq!(scene.choose(&[READER]), (vec![], vec![]));
        // A regular file of the kernel's own.
        scene.opens(READER, 6, Path::new("/proc/version"), 81 * MIB, READS);
        assert_eq!(scene.choose(&[READER]), (vec![], vec![NOT_ON_DISK.to_owned()]));
    }

    #[test]
    fn where_not_everything_can_be_looked_at_nothing_is_dropped() {
        let Some(scene) = Scene::new() else { return };
        let big = scene.file("big", 100);
        scene.opens(READER, 3, &big, 81 * MIB, READS);
        assert_eq!(scene.choose(&[READER]), (vec![80], vec![]));
        let why = |scene: &Scene| {
            let (files, why) = scene.choose(&[READER]);
            assert!(files.is_empty(), "{files:?}");
            why.concat()
        };
        // A kernel that does not tell inodes.
        scene.tells(OTHER, 3, &big, "pos:\t0\nflags:\t0100000\n");
        assert!(why(&scene).contains("5.14"), "{}", why(&scene));
        // Threads whose leader has ended.
        for directory in ["fd", "fdinfo"] {
            fs::remove_dir_all(scene.root.path(&format!("/proc/{OTHER}/{directory}"))).unwrap();
        }
        for thread in 0..2 {
            fs::create_dir_all(scene.root.path(&format!("/proc/{OTHER}/task/{thread}"))).unwrap();
        }
        assert!(why(&scene).contains("leader"), "{}", why(&scene));
        fs::remove_dir_all(scene.root.path(&format!("/proc/{OTHER}"))).unwrap();
        assert_eq!(scene.choose(&[READER]), (vec![80], vec![]));
        // One that keeps us from looking, unless it is the first one of the machine.
        let denied = || io::Error::from(io::ErrorKind::PermissionDenied);
        assert!(matches!(
            unless_gone(OTHER, Err::<(), _>(denied())),
            Err(Obstacle::Process { .. })
        ));
        assert!(unless_gone(FIRST, Err::<(), _>(denied())).unwrap().is_none());
        // Without the right to look at others, or in a name space of processes.
        fs::write(scene.root.path("/proc/self/status"), "CapEff:\t0\n").unwrap();
        assert!(why(&scene).contains("root"), "{}", why(&scene));
        fs::write(
            scene.root.path("/proc/self/status"),
            "CapEff:\t000001ffffffffff\n",
        )
        .unwrap();
        fs::remove_file(scene.root.path("/proc/self/ns/pid")).unwrap();
        symlink("pid:[4026532000]", scene.root.path("/proc/self/ns/pid")).unwrap();
        assert!(why(&scene).contains("name space"), "{}", why(&scene));
    }

    #[test]
    fn too_much_to_look_at_is_an_obstacle() {
        let Some(scene) = Scene::new() else { return };
        let big = scene.file("big", 100);
        for number in 3..8 {
            scene.opens(OTHER, number, &big, 0, READS);
        }
        scene.maps(OTHER, &big);
        let wanted = BTreeSet::from([fs::metadata(&big).unwrap().ino()]);
        let (held, looked_at) = held_by(&scene.root, OTHER, &wanted, 7).unwrap();
        assert_eq!((held, looked_at), (wanted.clone(), 7));
        for room in 0..7 {
            let answer = held_by(&scene.root, OTHER, &wanted, room);
            assert!(matches!(answer, Err(Obstacle::TooMany)), "{answer:?}");
        }
        // Of more files than are kept in mind the rest is told.
        let look = look_at_reader(&scene.root, OTHER, 100, 0).unwrap();
        assert!(look.files.is_empty() && look.not_only_read.len() == 1);
        let (held, _) = held_by(&scene.root, 5_000_099, &wanted, 7).unwrap();
        assert!(held.is_empty(), "a process that has ended");
    }

    #[test]
    fn it_is_dropped_in_parts_from_behind() {
        let Some(scene) = Scene::new() else { return };
        let path = scene.file("big", 200);
        let mut file = fs::OpenOptions::new().write(true).open(&path).unwrap();
        file.write_all(&[1; MIB as usize]).unwrap();
        file.sync_all().unwrap();
        scene.opens(READER, 3, &path, 141 * MIB, READS);
        let mut giving = GivingBack::new(BTreeSet::from([READER]));
        let mut reader = Reader::default();
        let mut reached = Vec::new();
        loop {
            let (before, total) = giving.steps();
            assert!(before < total);
            let is_over = giving.step(&scene.root, &mut reader).unwrap();
            reached.extend(giving.files.values().map(|c| c.to / MIB));
            if is_over {
                break;
            }
        }
        reached.dedup();
        assert_eq!(reached, [140, 76, 12, 0]);
        assert_eq!(giving.given, 140 * MIB);
        let open = fs::File::open(&path).unwrap();
        let there = crate::sys::cache::residency(&open, 0, MIB).unwrap();
        assert!(!there.contains(&true), "what was written to the disk is dropped");
    }
}
