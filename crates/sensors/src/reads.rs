//! Which processes read files, and how: bytes from storage, bytes requested, and bytes read in order.
//!
//! `/proc/PID/io` counts the bytes of read calls and the bytes that storage delivered, with faults on mapped files and
//! read-ahead. A sequential read moves the position in `/proc/PID/fdinfo` by as much as it reads. Scattered `pread`
//! calls and mappings move none. A program that reads small files, or one short file again and again (`tar`), is
//! anywhere in them a second later. Such a program is sampled twice, four milliseconds apart.
//!
//! A process that waits for a child inherits the child's counts (`wait_task_zombie` in Linux `kernel/exit.c`), so a
//! shell seems to have read its commands' files at once. The CPU time of its children reveals that it has waited.
//!
//! Cost: one file per process, and one per open file of processes that read much. A finding of order holds for five
//! seconds. Order is sampled only while memory is short, of processes that work or wait for pages. Otherwise bytes are
//! only counted ([`ReadSensor::count`]).

use crate::host::tick_length;
use homeostat_kernel::Root;
use homeostat_kernel::bytes::{lines, number, words};
use homeostat_kernel::files::{Directory, NumberedFile, ProcessFile};
use homeostat_model::{Bytes, ProcessId, Reads, Workload};
use rustix::fs::{AtFlags, RawDir, readlinkat_raw, statat};
use std::collections::BTreeMap;
use std::mem::MaybeUninit;
use std::time::Duration;

/// Most processes of one workload that are sampled, oldest first.
const PROCESSES_MAX: usize = 64;
/// Most processes of one workload whose reads are counted while memory is not short, oldest first.
const COUNTED_MAX: usize = 8;
/// Bytes from read calls and not from storage between two counts, from which a process is checked for an open file.
const FROM_MEMORY_MIN: u64 = 16 << 20;
/// Beginnings of names of open files that are on no disk, at most 16 bytes long.
const OF_NO_DISK: [&[u8]; 4] = [b"/dev/", b"/proc/", b"/sys/", b"/memfd:"];
/// Most open files of one process whose positions are read.
const FILES_MAX: usize = 64;
/// Bytes from storage, and most of those requested, from which a process with unclear positions is sampled twice.
const CLOSELY_MIN: u64 = 16 << 20;
/// Most processes sampled twice at one time.
const CLOSELY_MAX: usize = 4;
/// Time between the two samples.
const A_MOMENT: Duration = Duration::from_millis(4);
/// Least bytes of read calls between the two samples for a result.
const MOMENT_MIN: u64 = 64 << 10;
/// Validity of a finding of how a process reads.
const HOLDS: Duration = Duration::from_secs(5);
/// Bytes of read calls since the last sample from which the positions of a process are read.
const CALLED_MIN: u64 = 4 * 1024 * 1024;
/// Room for one batch of directory names from the kernel, in bytes.
const NAMES_BYTES: usize = 4096;
/// Processes that are remembered.
const KNOWN_MAX: usize = 4096;

/// The counters of `/proc/PID/io` that matter here.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Io {
    /// Bytes got by read calls (`rchar`).
    pub called: u64,
    /// Read calls (`syscr`).
    pub calls: u64,
    /// Bytes that storage delivered (`read_bytes`).
    pub from_storage: u64,
}

/// Parses `/proc/PID/io`; `None` when it is cut or something else.
pub fn parse_io(text: &[u8]) -> Option<Io> {
    let value = |key: &[u8]| {
        lines(text).find_map(|line| {
            let rest = line.strip_prefix(key)?.strip_prefix(b":")?;
            words(rest).next().and_then(number)
        })
    };
    Some(Io {
        called: value(b"rchar")?,
        calls: value(b"syscr")?,
        from_storage: value(b"read_bytes")?,
    })
}

/// The position in `/proc/PID/fdinfo/N`.
pub fn parse_position(text: &[u8]) -> Option<u64> {
    lines(text).find_map(|line| words(line.strip_prefix(b"pos:")?).next().and_then(number))
}

/// The inode in `/proc/PID/fdinfo/N`, reported since Linux 5.14.
pub fn parse_inode(text: &[u8]) -> Option<u64> {
    lines(text).find_map(|line| words(line.strip_prefix(b"ino:")?).next().and_then(number))
}

/// Read position in an open file of a process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
struct Position {
    file: u32,
    at: u64,
    /// 0 if the kernel does not report it.
    inode: u64,
}

type Positions = Vec<Position>;

#[derive(Debug, Default)]
struct Known {
    /// Time of the last sample, on the clock of start times (clock ticks since boot).
    at: u64,
    io: Io,
    /// CPU time of the children that it has waited for (ns).
    children_cpu: u64,
    positions: Positions,
    /// Its bytes of read calls when the positions were read.
    called_then: u64,
    /// Whether it reads in order, if that was seen, and until when that holds (as `at`).
    in_order: Option<(bool, u64)>,
}

impl Known {
    /// Whether it reads in order, by a finding that still holds.
    fn order_at(&self, now: u64) -> Option<bool> {
        self.in_order
            .filter(|(_, until)| now < *until)
            .map(|(in_order, _)| in_order)
    }
}

/// Reads of a process since the last sample; for a new process, since its birth.
struct Since {
    is_new: bool,
    /// It has waited for a child, so its counts now include the child's.
    has_waited: bool,
    /// Bytes of read calls in all, and since the last sample.
    called_in_all: u64,
    called: u64,
    calls: u64,
    from_storage: u64,
}

/// The processes of this machine that read files, between two samples.
#[derive(Debug)]
pub struct ReadSensor {
    root: Root,
    proc: Option<Directory>,
    known: BTreeMap<ProcessId, Known>,
    buffer: Vec<u8>,
    names: Box<[MaybeUninit<u8>]>,
    /// Positions being read; each process reuses the buffer of the one before.
    reading: Positions,
    /// The second of two samples a moment apart.
    near: Positions,
    /// Validity of a finding of how a process reads (clock ticks).
    holds: u64,
    /// Time of the last double samples (clock ticks since boot), and their number then.
    closely: (u64, usize),
}

impl ReadSensor {
    /// Nothing is known yet.
    pub fn new(root: Root) -> Self {
        Self {
            root,
            proc: None,
            known: BTreeMap::new(),
            buffer: Vec::new(),
            names: vec![MaybeUninit::uninit(); NAMES_BYTES].into_boxed_slice(),
            reading: Positions::new(),
            near: Positions::new(),
            holds: u64::try_from(HOLDS.as_nanos()).unwrap_or(u64::MAX) / tick_length().max(1),
            closely: (0, 0),
        }
    }

    /// Reads of a workload since its last sample (nothing at the first), at `now` on the clock of start times (clock
    /// ticks since boot). `children_cpu` returns the CPU time of the children that a process has waited for (ns).
    pub fn look(&mut self, workload: &Workload, now: u64, children_cpu: impl Fn(ProcessId) -> u64) -> Reads {
        let mut sum = Reads::default();
        let known = workload.processes.iter().filter_map(|p| self.known.get(p));
        let looked_at = known.map(|k| k.at).max();
        for process in workload.processes.iter().take(PROCESSES_MAX) {
            // A process born since the last sample has read all its bytes since then.
            let is_born_since = looked_at.is_some_and(|at| process.start_ticks >= at);
            if let Some(reads) = self.look_at(*process, now, is_born_since, children_cpu(*process)) {
                sum.by_ended += reads.by_ended;
                sum.from_storage += reads.from_storage;
                sum.called += reads.called;
                sum.calls = sum.calls.saturating_add(reads.calls);
                sum.in_sequence += reads.in_sequence;
            }
        }
        sum
    }

    /// Bytes of read calls and from storage since the last sample, without order: one file per process. A process that
    /// reads a pipe or a socket counts as reading nothing, because the end of a pipeline has no use for the page cache.
    pub fn count(&mut self, workload: &Workload, now: u64, children_cpu: impl Fn(ProcessId) -> u64) -> Reads {
        let mut sum = Reads::default();
        for process in workload.processes.iter().take(COUNTED_MAX) {
            let Some(since) = self.since(*process, now, children_cpu(*process)) else {
                continue;
            };
            self.forget_order(*process);
            let from_memory = since.called.saturating_sub(since.from_storage);
            if since.is_new || self.is_fed(process.pid, from_memory) {
                continue;
            }
            sum.from_storage += Bytes(since.from_storage);
            sum.called += Bytes(since.called);
            sum.calls = sum.calls.saturating_add(since.calls);
        }
        sum
    }

    /// Reads the counters of a process; `None` if they cannot be read or too many processes are known.
    fn since(&mut self, process: ProcessId, now: u64, children_cpu: u64) -> Option<Since> {
        let io = self.io_of(process.pid)?;
        let is_new = !self.known.contains_key(&process);
        if is_new && self.known.len() >= KNOWN_MAX {
            return None;
        }
        let known = self.known.entry(process).or_default();
        known.at = now;
        let before = std::mem::replace(&mut known.io, io);
        let children_before = std::mem::replace(&mut known.children_cpu, children_cpu);
        Some(Since {
            is_new,
            has_waited: children_before != children_cpu,
            called_in_all: io.called,
            called: io.called.saturating_sub(before.called),
            calls: io.calls.saturating_sub(before.calls),
            from_storage: io.from_storage.saturating_sub(before.from_storage),
        })
    }

    /// Drops the finding of how a process reads, so that two samples of its positions decide anew.
    fn forget_order(&mut self, process: ProcessId) {
        if let Some(known) = self.known.get_mut(&process) {
            known.positions.clear();
            known.in_order = None;
        }
    }

    /// Whether a process with so many bytes of read calls read a pipe or a socket: it has no file open to read.
    fn is_fed(&mut self, pid: i32, got: u64) -> bool {
        let names = &mut self.names;
        let reads_a_file = |proc| reads_a_file(proc, pid, names);
        got >= FROM_MEMORY_MIN && !self.proc.as_ref().is_some_and(reads_a_file)
    }

    fn io_of(&mut self, pid: i32) -> Option<Io> {
        if self.proc.is_none() {
            self.proc = Directory::open(&self.root, "/proc").ok();
        }
        let text = self
            .proc
            .as_ref()?
            .read_record(ProcessFile::new(pid, "io").name(), &mut self.buffer)
            .ok()?;
        parse_io(text)
    }

    /// Forgets the processes that `keep` refuses.
    pub fn retain(&mut self, keep: impl Fn(ProcessId) -> bool) {
        self.known.retain(|process, _| keep(*process));
    }

    fn look_at(
        &mut self,
        process: ProcessId,
        now: u64,
        is_born_since: bool,
        children_cpu: u64,
    ) -> Option<Reads> {
        let since = self.since(process, now, children_cpu)?;
        let Since {
            is_new,
            has_waited,
            called,
            ..
        } = since;
        if is_new && !is_born_since {
            return None;
        }
        // A process that reads from storage may just have closed its file.
        if since.from_storage == 0 && self.is_fed(process.pid, called) {
            self.forget_order(process);
            return Some(Reads::default());
        }
        let mut reads = Reads {
            from_storage: Bytes(since.from_storage),
            called: Bytes(called),
            calls: since.calls,
            in_sequence: Bytes::ZERO,
            by_ended: Bytes::ZERO,
        };
        if called < CALLED_MIN {
            self.forget_order(process);
            if has_waited {
                reads.by_ended = reads.from_storage;
            }
            return Some(reads);
        }
        let (proc, known) = (self.proc.as_ref()?, self.known.get_mut(&process)?);
        let holds = known.order_at(now);
        if holds == Some(true) && !has_waited {
            reads.in_sequence = reads.called;
            return Some(reads);
        }
        positions(
            proc,
            process.pid,
            &mut self.buffer,
            &mut self.names,
            &mut self.reading,
        );
        let moved = if is_new {
            // At the first sample, each position counts from the beginning of the file.
            self.reading
                .iter()
                .fold(0, |sum: u64, position| sum.saturating_add(position.at))
        } else {
            moved_forward(&known.positions, &self.reading)
        };
        // The positions may be older than the last sample.
        let called_since = since
            .called_in_all
            .saturating_sub(std::mem::replace(&mut known.called_then, since.called_in_all));
        let mut forward = share(moved, called, called_since);
        std::mem::swap(&mut known.positions, &mut self.reading);
        let mut in_order = is_all_in_order(moved, called_since).then_some(true);
        // For small files, or one file read repeatedly, only two samples a moment apart show the order.
        let much = reads.from_storage.0 >= CLOSELY_MIN && reads.from_storage.0 >= called / 2;
        if forward < called / 2 && holds.is_none() && much && self.may_look_closely(now) {
            let reads_on = self.reads_on(process, since.called_in_all);
            if reads_on {
                forward = called;
            }
            in_order = Some(reads_on);
        }
        if let (Some(in_order), Some(known)) = (in_order, self.known.get_mut(&process)) {
            known.in_order = Some((in_order, now.saturating_add(self.holds)));
        }
        // A jump ahead in a file does not read the bytes in between.
        reads.in_sequence = Bytes(forward.min(called));
        // If its own positions moved by most of the bytes, the process itself has read them.
        if has_waited && forward < called / 2 {
            reads.by_ended = reads.from_storage;
        }
        Some(reads)
    }
}

impl ReadSensor {
    /// Whether one more process may be sampled twice at this time.
    fn may_look_closely(&mut self, now: u64) -> bool {
        if self.closely.0 != now {
            self.closely = (now, 0);
        }
        self.closely.1 += 1;
        self.closely.1 <= CLOSELY_MAX
    }

    /// Whether a process, just sampled with so many bytes of read calls, reads on from its positions a moment later.
    fn reads_on(&mut self, process: ProcessId, called: u64) -> bool {
        let (Some(proc), Some(known)) = (self.proc.as_ref(), self.known.get(&process)) else {
            return false;
        };
        std::thread::sleep(A_MOMENT);
        positions(
            proc,
            process.pid,
            &mut self.buffer,
            &mut self.names,
            &mut self.near,
        );
        let text = proc.read_record(ProcessFile::new(process.pid, "io").name(), &mut self.buffer);
        let Some(after) = text.ok().and_then(parse_io) else {
            return false;
        };
        went_on(&known.positions, &self.near, after.called.saturating_sub(called))
    }
}

/// Whether an open file may lie on a disk: names such as `socket:`, `pipe:`, `anon_inode:` do not begin with `/`.
/// Details of such files are not read, because that takes locks of a program that waits for many connections.
pub fn may_be_on_disk(name: &[u8]) -> bool {
    name.starts_with(b"/") && !OF_NO_DISK.iter().any(|beginning| name.starts_with(beginning))
}

/// Whether one of the first open files of a process is on a disk and open to read.
fn reads_a_file(proc: &Directory, pid: i32, names: &mut [MaybeUninit<u8>]) -> bool {
    let Ok(directory) = proc.open_file(ProcessFile::new(pid, "fd").name()) else {
        return false;
    };
    let mut list = RawDir::new(&directory, names);
    let mut looked_at = 0;
    while let Some(Ok(entry)) = list.next() {
        let name = entry.file_name();
        if number(name.to_bytes()).is_none() {
            continue;
        }
        looked_at += 1;
        if looked_at > FILES_MAX {
            break;
        }
        // The mode of the link shows how the file is open (proc_pid_fd(5)), and the beginning of its name the kind.
        let link = statat(&directory, name, AtFlags::SYMLINK_NOFOLLOW);
        if !link.is_ok_and(|link| link.st_mode & 0o400 != 0) {
            continue;
        }
        let mut beginning = [MaybeUninit::uninit(); 16];
        if let Ok((beginning, _)) = readlinkat_raw(&directory, name, &mut beginning) {
            if may_be_on_disk(beginning) {
                return true;
            }
        }
    }
    false
}

/// Whether positions moved by the bytes requested or, for a copy, by twice that. Jumps move a position by anything.
fn is_all_in_order(moved: u64, called: u64) -> bool {
    [called, called.saturating_mul(2)]
        .iter()
        .any(|sum| moved.abs_diff(*sum) <= called / 10)
}

/// The last sample's part of the movement: `called` of all bytes requested since the positions were read.
fn share(moved: u64, called: u64, called_since: u64) -> u64 {
    let part = u128::from(moved) * u128::from(called) / u128::from(called_since.max(called).max(1));
    u64::try_from(part).unwrap_or(u64::MAX)
}

/// Whether positions moved by the bytes requested in a moment, or files were opened and read from the beginning. After
/// a jump the position is farther away, or behind.
fn went_on(before: &[Position], now: &[Position], called: u64) -> bool {
    if called < MOMENT_MIN {
        return false;
    }
    let mut moved: u64 = 0;
    for position in now {
        let then = before
            .binary_search_by_key(&position.file, |then| then.file)
            .ok()
            .and_then(|at| before.get(at))
            .filter(|then| then.inode == position.inode && then.at <= position.at);
        match then {
            Some(then) => moved = moved.saturating_add(position.at - then.at),
            // Opened since the first sample, and read from the beginning.
            None if position.at > 0 && position.at <= called => return true,
            None => {}
        }
    }
    // The first and the last file are not sampled at the same moment, and a copy also moves the position of its target.
    moved >= called / 2 && moved <= called.saturating_mul(3)
}

/// The positions of the open files of a process, as far as the kernel reports them.
fn positions(
    proc: &Directory,
    pid: i32,
    buffer: &mut Vec<u8>,
    names: &mut [MaybeUninit<u8>],
    found: &mut Positions,
) {
    found.clear();
    // Reserved at once: the number of open files changes between samples.
    found.reserve_exact(FILES_MAX);
    let Ok(directory) = proc.open_file(ProcessFile::new(pid, "fdinfo").name()) else {
        return;
    };
    let mut list = RawDir::new(&directory, names);
    while let Some(Ok(entry)) = list.next() {
        if found.len() == FILES_MAX {
            break;
        }
        let name = entry.file_name().to_bytes();
        if let Some(file) = number(name).and_then(|n| u32::try_from(n).ok()) {
            found.push(Position {
                file,
                ..Position::default()
            });
        }
    }
    let directory = Directory::from(directory);
    found.retain_mut(|position| {
        let Ok(text) = directory.read_record(NumberedFile::new(position.file).name(), buffer) else {
            return false;
        };
        position.inode = parse_inode(text).unwrap_or(0);
        match parse_position(text) {
            Some(at) => {
                position.at = at;
                true
            }
            None => false,
        }
    });
    found.sort_unstable();
}

/// By how much the positions of the files that are in both lists moved forward.
fn moved_forward(before: &[Position], now: &[Position]) -> u64 {
    now.iter()
        .filter_map(|position| {
            let then = before
                .binary_search_by_key(&position.file, |then| then.file)
                .ok()?;
            position.at.checked_sub(before.get(then)?.at)
        })
        .fold(0, u64::saturating_add)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::counted;
    use homeostat_model::{Fingerprint, OperatorChoice, WorkloadKind};
    use proptest::prelude::*;
    use std::fs;

    const IO: &[u8] = b"rchar: 100\nwchar: 5\nsyscr: 7\nsyscw: 1\nread_bytes: 4096\nwrite_bytes: 0\n\
        cancelled_write_bytes: 0\n";

    fn workload(pids: &[i32]) -> Workload {
        Workload {
            id: "w".into(),
            kind: WorkloadKind::ProcessGroup,
            former: None,
            owner: homeostat_model::Owner::Machine,
            others: Vec::new(),
            fingerprint: Fingerprint::new("w"),
            program: "w".into(),
            executable: String::new(),
            processes: pids
                .iter()
                .map(|pid| ProcessId {
                    pid: *pid,
                    start_ticks: 1,
                })
                .collect(),
            choice: OperatorChoice::default(),
        }
    }

    #[test]
    fn a_moment_tells_who_reads_on_from_who_jumps_about() {
        let at = |file: u32, inode: u64, at: u64| Position { file, at, inode };
        const MIB: u64 = 1 << 20;
        // A big file, read on.
        assert!(went_on(&[at(3, 7, 100 * MIB)], &[at(3, 7, 104 * MIB)], 4 * MIB));
        // The same opened again, and the next of many small ones.
        assert!(went_on(&[at(3, 7, 900 * MIB)], &[at(3, 7, MIB)], 4 * MIB));
        assert!(went_on(&[at(3, 7, 9000)], &[at(3, 8, 20_000)], MIB));
        assert!(went_on(&[], &[at(4, 8, 20_000)], MIB));
        // Jumps in a file of many gigabytes, forward and back; and calls that move no position.
        assert!(!went_on(&[at(3, 7, 100 * MIB)], &[at(3, 7, 900 * MIB)], 4 * MIB));
        assert!(!went_on(&[at(3, 7, 900 * MIB)], &[at(3, 7, 100 * MIB)], 4 * MIB));
        assert!(!went_on(&[at(3, 7, 0)], &[at(3, 7, 0)], 4 * MIB));
        // Too little to say anything.
        assert!(!went_on(&[at(3, 7, 0)], &[at(3, 7, 4096)], 4096));
    }

    fn no_children(_: ProcessId) -> u64 {
        0
    }

    /// So much later (clock ticks) nothing holds any more of what was seen.
    const LATER: u64 = 1_000_000;

    #[test]
    fn who_reads_in_order_is_not_asked_for_its_files_for_a_while_and_who_jumped_ahead_is() {
        let tree = tempfile::tempdir().unwrap();
        let root = Root::new(tree.path());
        let mut sensor = ReadSensor::new(root.clone());
        let dir = root.path("/proc/7/fdinfo");
        fs::create_dir_all(&dir).unwrap();
        let mib = |n: u64| n << 20;
        // What it called for in all, and where it is.
        let mut look = |now: u64, called: u64, position: u64| {
            let io = format!("rchar: {called}\nsyscr: {}\nread_bytes: {called}\n", called >> 18);
            fs::write(root.path("/proc/7/io"), io).unwrap();
            fs::write(dir.join("3"), format!("pos:\t{position}\n")).unwrap();
            sensor.look(&workload(&[7]), now, no_children).in_sequence
        };
        look(0, 0, 0);
        look(100, mib(100), mib(100));
        // It jumped: by three times what it called for. That says nothing of the next second.
        assert_eq!(look(200, mib(200), mib(400)), Bytes(mib(100)));
        assert_eq!(look(300, mib(300), mib(40)), Bytes::ZERO);
        // By what it called for: where it is now is not asked for five seconds.
        assert_eq!(look(400, mib(400), mib(140)), Bytes(mib(100)));
        assert_eq!(look(500, mib(500), mib(7)), Bytes(mib(100)));
        assert_eq!(look(800, mib(800), mib(7)), Bytes(mib(300)));
        // Then it is, and compared with where it was when it was asked last: 100 MiB of the 900 since, a ninth of this look.
        let then = look(1300, mib(1300), mib(240)).0;
        assert_eq!(then, mib(100) * 500 / 900);
        // Who read next to nothing is looked at anew.
        look(1400, mib(1301), mib(241));
        look(1500, mib(1401), mib(341));
        assert_eq!(look(1600, mib(1501), mib(441)), Bytes(mib(100)));
        look(1650, mib(1501), mib(441));
        assert_eq!(look(1700, mib(1601), mib(541)), Bytes::ZERO);
        // What moved with nobody's help, such as the place in a log that is appended to, is more than was called for.
        assert!(!is_all_in_order(mib(300), mib(100)) && is_all_in_order(mib(205), mib(100)));
        assert_eq!(share(u64::MAX, u64::MAX, 0), u64::MAX);
    }

    #[test]
    fn what_a_shell_inherits_from_its_commands_is_told_apart_from_what_a_reader_reads() {
        let tree = tempfile::tempdir().unwrap();
        let root = Root::new(tree.path());
        let mut sensor = ReadSensor::new(root.clone());
        let mut round = 0u64;
        // Each second 100 MiB more, with a position that follows or not, and with a child that was waited for or not.
        let mut look = |moves: bool, waits: bool| {
            round += 1;
            let called = round * (100 << 20);
            let dir = root.path("/proc/7/fdinfo");
            fs::create_dir_all(&dir).unwrap();
            let io = format!("rchar: {called}\nsyscr: {round}\nread_bytes: {called}\n");
            fs::write(root.path("/proc/7/io"), io).unwrap();
            let position = if moves { called } else { 0 };
            fs::write(dir.join("3"), format!("pos:\t{position}\n")).unwrap();
            let children_cpu = if waits { round } else { 0 };
            sensor.look(&workload(&[7]), 0, |_| children_cpu)
        };
        let all = Bytes(100 << 20);
        look(false, false);
        look(false, false);
        // A program that reads many small files moves no position for long, but waits for nobody.
        assert_eq!(look(false, false).by_ended, Bytes::ZERO);
        let shell = look(false, true);
        assert_eq!((shell.from_storage, shell.by_ended), (all, all));
        // A backup that starts helpers and reads itself.
        look(true, true);
        let backup = look(true, true);
        assert_eq!((backup.from_storage, backup.by_ended), (all, Bytes::ZERO));
    }

    #[test]
    fn a_process_that_was_born_since_the_last_look_has_read_all_that_it_ever_read_since() {
        let tree = tempfile::tempdir().unwrap();
        let root = Root::new(tree.path());
        let mut sensor = ReadSensor::new(root.clone());
        let put = |pid: i32, mib: u64| {
            let (bytes, dir) = (mib << 20, root.path(&format!("/proc/{pid}/fdinfo")));
            fs::create_dir_all(&dir).unwrap();
            // By calls of 10 KiB, as tar does.
            let io = format!("rchar: {bytes}\nsyscr: {}\nread_bytes: {bytes}\n", bytes / 10_240);
            fs::write(root.path(&format!("/proc/{pid}/io")), io).unwrap();
            fs::write(dir.join("4"), format!("pos:\t{bytes}\n")).unwrap();
        };
        // A unit with a script and the first of its commands, which is old enough to be anything.
        let mut unit = workload(&[7, 8]);
        put(7, 0);
        put(8, 500);
        let look = |sensor: &mut ReadSensor, unit: &Workload, now| sensor.look(unit, now, no_children);
        assert_eq!(look(&mut sensor, &unit, 1000), Reads::default());
        // The next command, a second later.
        unit.processes[1] = ProcessId {
            pid: 9,
            start_ticks: 1050,
        };
        put(9, 300);
        let reads = look(&mut sensor, &unit, 1100);
        let all = Bytes(300 << 20);
        assert_eq!((reads.from_storage, reads.in_sequence), (all, all));
        // One that is older than the last look came from elsewhere.
        unit.processes[1] = ProcessId {
            pid: 10,
            start_ticks: 1099,
        };
        put(10, 300);
        assert_eq!(look(&mut sensor, &unit, 1200), Reads::default());
    }

    #[test]
    fn counting_tells_how_much_is_read_by_those_who_have_a_file_to_read() {
        let tree = tempfile::tempdir().unwrap();
        let root = Root::new(tree.path());
        let mut sensor = ReadSensor::new(root.clone());
        let put = |pid: i32, called: u64, from_storage: u64| {
            let io = format!("rchar: {called}\nsyscr: 9\nread_bytes: {from_storage}\n");
            fs::create_dir_all(root.path(&format!("/proc/{pid}"))).unwrap();
            fs::write(root.path(&format!("/proc/{pid}/io")), io).unwrap();
        };
        let pids: Vec<i32> = (10..30).collect();
        for pid in &pids {
            put(*pid, 1000, 500);
            let fd = root.path(&format!("/proc/{pid}/fd"));
            fs::create_dir_all(&fd).unwrap();
            std::os::unix::fs::symlink("/data/table", fd.join("4")).unwrap();
        }
        let all = workload(&pids);
        assert_eq!(
            sensor.count(&all, 100, no_children),
            Reads::default(),
            "the first look tells nothing"
        );
        for pid in &pids {
            put(*pid, 1000 + (64 << 20), 500 + 4096);
        }
        let reads = sensor.count(&all, 200, no_children);
        let counted = COUNTED_MAX as u64;
        assert_eq!(reads.called, Bytes(counted * (64 << 20)));
        assert_eq!(reads.from_storage, Bytes(counted * 4096));
        assert_eq!((reads.in_sequence, reads.by_ended), (Bytes::ZERO, Bytes::ZERO));
        // The end of a pipeline has no file to read.
        put(40, 0, 0);
        fs::create_dir_all(root.path("/proc/40/fd")).unwrap();
        std::os::unix::fs::symlink("pipe:[7]", root.path("/proc/40/fd/0")).unwrap();
        std::os::unix::fs::symlink("/dev/null", root.path("/proc/40/fd/1")).unwrap();
        let end = workload(&[40]);
        assert_eq!(sensor.count(&end, 100, no_children), Reads::default());
        put(40, 64 << 20, 0);
        assert_eq!(sensor.count(&end, 200, no_children), Reads::default());
        // Nor while memory is short.
        put(40, 128 << 20, 0);
        assert_eq!(sensor.look(&end, 300, no_children), Reads::default());
        // When memory becomes short its positions are asked for as those of one that is new.
        let dir = root.path("/proc/10/fdinfo");
        fs::create_dir_all(&dir).unwrap();
        fs::write(dir.join("4"), "pos:\t0\n").unwrap();
        put(10, 1000 + (128 << 20), 500 + 4096);
        let one = workload(&[10]);
        let reads = sensor.look(&one, 300, no_children);
        assert_eq!((reads.called, reads.in_sequence), (Bytes(64 << 20), Bytes::ZERO));
    }

    #[test]
    fn the_counters_are_read_by_name() {
        let io = parse_io(IO).unwrap();
        assert_eq!((io.called, io.calls, io.from_storage), (100, 7, 4096));
        assert_eq!(parse_io(b"rchar: 1\nsyscr: 2\n"), None);
        assert_eq!(parse_position(b"pos:\t123\nflags:\t0100000\n"), Some(123));
        assert_eq!(parse_position(b"flags:\t0\n"), None);
    }

    #[test]
    fn what_is_read_in_order_moves_a_position_and_what_is_read_here_and_there_does_not() {
        let tree = tempfile::tempdir().unwrap();
        let root = Root::new(tree.path());
        let mut sensor = ReadSensor::new(root.clone());
        let put = |pid: i32, called: u64, storage: u64, position: u64| {
            let dir = root.path(&format!("/proc/{pid}/fdinfo"));
            fs::create_dir_all(&dir).unwrap();
            let io = format!(
                "rchar: {called}\nsyscr: {}\nread_bytes: {storage}\n",
                called >> 18
            );
            fs::write(root.path(&format!("/proc/{pid}/io")), io).unwrap();
            fs::write(dir.join("3"), format!("pos:\t{position}\nflags:\t0\n")).unwrap();
        };
        let mib = |n: u64| n << 20;
        put(7, 0, 0, 0);
        put(8, 0, 0, 0);
        assert_eq!(
            sensor.look(&workload(&[7, 8]), 0, no_children),
            Reads::default(),
            "nothing is known yet"
        );
        put(7, mib(100), mib(100), mib(100));
        put(8, mib(50), mib(60), 0);
        // The first look that sees much read only learns the positions.
        let first = sensor.look(&workload(&[7, 8]), 0, no_children);
        assert_eq!((first.called, first.in_sequence), (Bytes(mib(150)), Bytes::ZERO));
        put(7, mib(180), mib(170), mib(180));
        put(8, mib(90), mib(99), 0);
        let streamer = sensor.look(&workload(&[7]), 0, no_children);
        assert_eq!(
            (streamer.called, streamer.from_storage, streamer.in_sequence),
            (Bytes(mib(80)), Bytes(mib(70)), Bytes(mib(80)))
        );
        assert_eq!(
            sensor.look(&workload(&[8]), 0, no_children).in_sequence,
            Bytes::ZERO
        );
        // Around to the beginning: not known how much of it was in order.
        put(7, mib(260), mib(250), mib(20));
        assert_eq!(
            sensor.look(&workload(&[7]), LATER, no_children).in_sequence,
            Bytes::ZERO
        );
        sensor.retain(|process| process.pid != 7);
        put(7, mib(400), mib(400), mib(20));
        assert_eq!(
            sensor.look(&workload(&[7]), 0, no_children),
            Reads::default(),
            "a new process"
        );
    }

    #[test]
    fn of_ten_thousand_open_files_a_few_are_looked_at() {
        const FILES: u64 = 10_000;
        let tree = tempfile::tempdir().unwrap();
        let root = Root::new(tree.path());
        let mut sensor = ReadSensor::new(root.clone());
        let directory = root.path("/proc/7/fdinfo");
        fs::create_dir_all(&directory).unwrap();
        let step = 1u64 << 20;
        // Each file is read on by a MiB between two looks.
        let read_to = |round: u64| {
            let called = round * FILES * step;
            let io = format!("rchar: {called}\nsyscr: {}\nread_bytes: {called}\n", called >> 18);
            fs::write(root.path("/proc/7/io"), io).unwrap();
            for file in 0..FILES {
                fs::write(
                    directory.join(file.to_string()),
                    format!("pos:\t{}\n", round * step),
                )
                .unwrap();
            }
        };
        for round in 0..3 {
            read_to(round);
            let reads = sensor.look(&workload(&[7]), 0, no_children);
            assert!(reads.in_sequence.0 <= FILES_MAX as u64 * step, "{reads:?}");
            if round == 2 {
                assert_eq!(
                    reads.from_storage.0,
                    FILES * step,
                    "what it reads is known all the same"
                );
                assert!(reads.in_sequence.0 > 0);
            }
        }
        let kept: usize = sensor.known.values().map(|k| k.positions.len()).sum();
        assert!(kept <= FILES_MAX, "{kept}");
    }

    #[test]
    fn looking_again_at_who_reads_allocates_nothing() {
        // This process, which has files open, and reads enough to be asked for its positions.
        let own = workload(&[std::process::id() as i32]);
        let mut sensor = ReadSensor::new(Root::default());
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), vec![1u8; CALLED_MIN as usize]).unwrap();
        let mut room = vec![0u8; CALLED_MIN as usize];
        let mut at = 0;
        let mut read_and_look = || {
            let mut open = fs::File::open(file.path()).unwrap();
            std::io::Read::read_exact(&mut open, &mut room).unwrap();
            at += LATER;
            counted::of(|| sensor.look(&own, at, no_children))
        };
        for _ in 0..3 {
            read_and_look();
        }
        let (reads, allocated) = read_and_look();
        assert!(reads.called.0 >= CALLED_MIN, "{reads:?}");
        assert_eq!(allocated, 0);
    }

    #[test]
    fn a_process_that_ended_reads_nothing() {
        let tree = tempfile::tempdir().unwrap();
        let mut sensor = ReadSensor::new(Root::new(tree.path()));
        assert_eq!(sensor.look(&workload(&[7]), 0, no_children), Reads::default());
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let _ = parse_io(&bytes);
            let _ = parse_position(&bytes);
        }
    }
}
