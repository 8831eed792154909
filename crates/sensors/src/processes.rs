//! The process table between samples.
//!
//! A pass costs one directory entry and one clock reading per process ([`homeostat_kernel::probe::process_cpu_time`]).
//! A process with the same directory inode and no new CPU time is unchanged, so nothing of it is read. For other
//! processes the pass reads `/proc/PID/stat`. Executable, arguments, cgroup, environment and user are read when a
//! process is new, after an `exec` (its name changed), and every 32 passes. Every 16th pass reads a process anyway,
//! because resident memory may shrink while it sleeps. The steady state allocates nothing per process.
//!
//! **Differences.** Counters are kept per process (pid and start time). A workload's difference is the sum over its
//! processes: exits, forks and reused pids cannot make it negative or add a whole life at once. A process that is older
//! than the interval when first seen contributes its time in proportion. Children that ended between two passes are
//! known from their parent's `cutime` and `cstime`, less the time already seen. Their last fraction of an interval is
//! lost if the parent does not wait (SIGCHLD ignored) or init inherited them.

use crate::choice::{Said, Unknown};
use crate::counters::others;
use crate::counters::others::Profiler;
use crate::elsewhere::Elsewhere;
use crate::group_view::GroupView;
use crate::grouping::{Member, Segment};
use crate::reader::Reader;
use crate::{choice, grouping, host, live_environment, reader, topology, tuners};
use homeostat_kernel::Root;
use homeostat_kernel::bytes::{fingerprint, hexadecimal, lines, number, signed, words};
use homeostat_kernel::files::{Directory, ProcessFile, SMALL_FILE_MAX, Text};
use homeostat_kernel::probe::process_cpu_time;
use homeostat_model::{Bytes, Nanoseconds, ProcessId, Workload, WorkloadId, WorkloadSample};
use homeostat_platform::PlatformError;
use rustix::fs::{RawDir, SeekFrom};
use rustix::io::Errno;
use std::collections::{BTreeMap, BTreeSet};
use std::mem::MaybeUninit;
use std::sync::Arc;
use std::time::Duration;

/// Most processes that are kept; of a machine with more, a part is seen (`pid_max` of a 64-bit kernel is 4,194,304).
pub const PROCESSES_MAX: usize = 65_536;
/// Most threads of one process whose run-queue delay is read.
pub const THREADS_MAX: usize = 1024;
/// Resident shared memory in bytes from which `/proc/PID/maps` is read.
pub const SEGMENT_MIN: u64 = 16 * 1024 * 1024;
const MAPS_MAX: usize = 1024 * 1024;
/// Interval in passes at which a process is read although it used no CPU time.
const READ_ANYWAY: u64 = 16;
/// Interval in passes at which the identity of a running process is read again (a unit may be moved to a cgroup).
const IDENTIFY_ANYWAY: u64 = 32;
/// Passes in a row that read an environment without an answer: the parent may have been read after the child.
const ASKED_MAX: u32 = 3;
/// Up to this age, the starter of a process may still be about to set its cgroup.
const YOUNG: Nanoseconds = Nanoseconds::from_secs(5);
/// Interval at which the anonymous memory of a workload without detailed sampling is read: enough to see it grow.
const WEIGHED_EVERY: Nanoseconds = Nanoseconds::from_secs(55);
/// Most processes of a workload whose anonymous memory is read, oldest first.
const WEIGHED_MAX: usize = 64;
/// `PF_KTHREAD` of `include/linux/sched.h`: a kernel thread.
const KERNEL_THREAD: u64 = 0x0020_0000;

/// Fields of `/proc/PID/stat` (proc_pid_stat(5)).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stat<'a> {
    /// Process id.
    pub pid: i32,
    /// Name; may hold spaces and parentheses.
    pub comm: &'a [u8],
    /// State letter.
    pub state: u8,
    /// Parent.
    pub parent: i32,
    /// Session.
    pub session: i32,
    /// Kernel flags.
    pub flags: u64,
    /// Minor faults.
    pub faults_minor: u64,
    /// Major faults.
    pub faults_major: u64,
    /// User and system time in clock ticks.
    pub cpu_ticks: u64,
    /// User and system time of children that were waited for, in clock ticks.
    pub child_cpu_ticks: u64,
    /// Threads.
    pub threads: u32,
    /// Start time in clock ticks since boot.
    pub start_ticks: u64,
    /// Resident pages.
    pub resident_pages: u64,
    /// Begin and end of its code: one without permission to see it, zero while it is executing a program.
    pub code: (u64, u64),
    /// Initial stack address; zero without permission to see it.
    pub start_stack: u64,
    /// Begin and end of its arguments: zeros without permission to see them, and while it is executing a program.
    pub arguments: (u64, u64),
    /// Begin and end of its environment: zeros in the same cases as the arguments.
    pub environment: (u64, u64),
}

impl Stat<'_> {
    /// Tells executed programs of one process apart, if addresses are random or sizes differ; `None`: not visible yet.
    fn image(&self) -> Option<Image> {
        let known = self.code.0 > 1 && self.start_stack > 1;
        known.then_some((self.code, self.start_stack))
    }

    /// Whether its first thread has ended, even if its parent has not yet waited for it; other threads may live on.
    pub fn has_ended(&self) -> bool {
        matches!(self.state, b'Z' | b'X' | b'x')
    }
}

/// Where code begins and ends, and the stack begins.
type Image = ((u64, u64), u64);

/// Parses `/proc/PID/stat`; `None` when it is cut or something else.
pub fn parse_stat(text: &[u8]) -> Option<Stat<'_>> {
    // The name may hold anything, also `) R 1`; the last parenthesis ends it.
    let open = text.iter().position(|&b| b == b'(')?;
    let close = text.iter().rposition(|&b| b == b')')?;
    let pid = i32::try_from(number(text.get(..open)?.trim_ascii())?).ok()?;
    let comm = text.get(open + 1..close)?;
    let mut field: [&[u8]; 49] = [b""; 49];
    let mut count = 0;
    for (slot, word) in field.iter_mut().zip(words(text.get(close + 1..)?)) {
        *slot = word;
        count += 1;
    }
    // Up to rss (field 24 of the manual, here 21): all kernels have these.
    if count < 22 {
        return None;
    }
    let unsigned = |i: usize| field.get(i).and_then(|w| number(w));
    let id = |i: usize| {
        field
            .get(i)
            .and_then(|w| signed(w))
            .and_then(|n| i32::try_from(n).ok())
    };
    // Times of children are signed in the kernel's format.
    let time = |i: usize| {
        field
            .get(i)
            .and_then(|w| signed(w))
            .map(|n| u64::try_from(n).unwrap_or(0))
    };
    Some(Stat {
        pid,
        comm,
        state: *field.first()?.first()?,
        parent: id(1)?,
        session: id(3)?,
        flags: unsigned(6)?,
        faults_minor: unsigned(7)?,
        faults_major: unsigned(9)?,
        cpu_ticks: unsigned(11)?.saturating_add(unsigned(12)?),
        child_cpu_ticks: time(13)?.saturating_add(time(14)?),
        threads: u32::try_from(unsigned(17)?).ok()?,
        start_ticks: unsigned(19)?,
        resident_pages: time(21)?,
        code: (unsigned(23).unwrap_or(0), unsigned(24).unwrap_or(0)),
        start_stack: unsigned(25).unwrap_or(0),
        arguments: (unsigned(45).unwrap_or(0), unsigned(46).unwrap_or(0)),
        environment: (unsigned(47).unwrap_or(0), unsigned(48).unwrap_or(0)),
    })
}

/// Run-queue wait in nanoseconds, second number of a `schedstat` file.
pub fn parse_wait(schedstat: &[u8]) -> Option<u64> {
    words(schedstat).nth(1).and_then(number)
}

/// Anonymous resident pages: `resident` of `/proc/PID/statm`, less the pages that files or shared memory back.
pub fn parse_anonymous(statm: &[u8]) -> Option<u64> {
    let mut numbers = words(statm).skip(1).map(number);
    let (resident, shared) = (numbers.next()??, numbers.next()??);
    Some(resident.saturating_sub(shared))
}

/// The largest shared segment that a process maps, from `/proc/PID/maps`.
pub fn parse_segment(maps: &[u8]) -> Option<Segment> {
    let mut best: Option<Segment> = None;
    for line in lines(maps) {
        let mut parts = words(line);
        let (Some(range), Some(permissions), Some(_offset), Some(device), Some(inode), Some(name)) = (
            parts.next(),
            parts.next(),
            parts.next(),
            parts.next(),
            parts.next(),
            parts.next(),
        ) else {
            continue;
        };
        if permissions.get(3) != Some(&b's') || !crate::regions::is_shared_memory(name) {
            continue;
        }
        let Some(length) = crate::regions::parse_range(range).map(|(start, end)| end - start) else {
            continue;
        };
        let device = device.split(|&b| b == b':').try_fold(0u64, |sum, part| {
            hexadecimal(part).and_then(|n| sum.checked_mul(1 << 32)?.checked_add(n))
        });
        let (Some(device), Some(inode)) = (device, number(inode)) else {
            continue;
        };
        let segment = Segment {
            device,
            inode,
            length,
            system_v: name.starts_with(b"/SYSV"),
        };
        if length >= SEGMENT_MIN && best.is_none_or(|b| (length, inode) > (b.length, b.inode)) {
            best = Some(segment);
        }
    }
    best
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Counters {
    cpu: u64,
    child_cpu: u64,
    faults_minor: u64,
    faults_major: u64,
    wait: u64,
}

#[derive(Debug)]
struct Entry {
    /// Inode of the process's directory: another inode means another process.
    inode: u64,
    seen: u64,
    identified: u64,
    /// Its identity could not be read completely: each pass tries again.
    unread: bool,
    now: Counters,
    /// Counters that earlier samples have delivered.
    delivered: Counters,
    /// Not part of any sample yet.
    fresh: bool,
    zombie: bool,
    /// CPU time of ended children that was delivered while they lived.
    known_of_children: u64,
    threads: u32,
    resident_pages: u64,
    shared_pages: u64,
    segment_searched_at: u64,
    waits: BTreeMap<i32, u64>,
    /// Hash of the name as bytes: another hash means an `exec`.
    name: u64,
    /// The program that it ran when last seen.
    image: Option<Image>,
    /// How often another program was seen in its place.
    executions: u32,
    workload: Option<WorkloadId>,
    tuner: Option<&'static str>,
    /// The statement of its environment since it executed its program; `None` until it was read.
    said: Option<Said>,
    /// How often the environment was read since then without an answer.
    asked_in_vain: u32,
    /// Its control groups as a key of their statements, and the state of the statement that its choice contains.
    groups: u64,
    groups_seen: u64,
    /// The statements that its status shows.
    tuned: Vec<String>,
    member: Member,
}

/// Facts from memory of the process, which the kernel reads under the process's `mmap_lock`.
struct Told {
    /// Hash of the arguments, and the tuner they name; `None` when they could not be read.
    arguments: Option<(grouping::ArgumentHashes, Option<&'static str>)>,
    /// `None` if not requested, or if the process has ended.
    said: Option<Said>,
    /// The largest shared segment, if it was looked for and all mappings were seen.
    segment: Option<Option<Segment>>,
}

struct Question {
    pid: i32,
    place: String,
    is_live: bool,
    with_environment: bool,
    with_segment: bool,
}

impl Told {
    fn read(proc: &Directory, question: &Question, buffer: &mut Vec<u8>) -> Self {
        /// Most of a command line that is read, in bytes: some class paths have tens of thousands.
        const ARGUMENTS_MAX: usize = 256 * 1024;
        let pid = question.pid;
        let arguments = proc
            .read(ProcessFile::new(pid, "cmdline").name(), buffer, ARGUMENTS_MAX)
            .ok()
            .map(|text| {
                let is_cut = text.is_cut();
                let text = text.beginning();
                let first: Vec<&[u8]> = text.split(|&b| b == 0).take(8).collect();
                let mut hashes = grouping::ArgumentHashes::of(text);
                if is_cut {
                    // A cut command line never has the hash of arguments that end there.
                    hashes.lasting = !hashes.lasting;
                }
                (hashes, tuners::by_argument(&first))
            });
        let said = if question.with_environment {
            read_environment(proc, question, buffer)
        } else {
            None
        };
        // Searched once per process, and again whenever it maps more.
        let segment = question
            .with_segment
            .then(|| {
                proc.read(ProcessFile::new(pid, "maps").name(), buffer, MAPS_MAX)
                    .ok()
                    .and_then(Text::whole)
            })
            .flatten()
            .map(parse_segment);
        Self {
            arguments,
            said,
            segment,
        }
    }
}

/// Reads the environment of a process; `None` when it has ended.
fn read_environment(proc: &Directory, question: &Question, buffer: &mut Vec<u8>) -> Option<Said> {
    /// Pause between two reads of an empty environment: a process that is executing a program briefly has none.
    const MOMENT: Duration = Duration::from_millis(1);
    /// Most such pauses. Measured: `execve` of a static program takes 0.3 ms.
    const MOMENTS: u32 = 4;
    let mut said = Said::nothing(Unknown::Unreadable);
    for _ in 0..MOMENTS {
        said = look_through(proc, question, buffer)?;
        let may_pass = said
            .unknown
            .is_some_and(|why| matches!(why, Unknown::Empty | Unknown::Cut | Unknown::Unreadable));
        if !may_pass || !question.is_live {
            break;
        }
        std::thread::sleep(MOMENT);
    }
    Some(said)
}

fn look_through(proc: &Directory, question: &Question, buffer: &mut Vec<u8>) -> Option<Said> {
    const PIECE: usize = 64 * 1024;
    /// `PF_EXITING` of `include/linux/sched.h`.
    const EXITING: u64 = 0x4;
    let pid = question.pid;
    let mut lengths = None;
    if question.is_live {
        let text = proc
            .read_record(ProcessFile::new(pid, "stat").name(), buffer)
            .ok()?;
        let stat = parse_stat(text)?;
        if stat.has_ended() || stat.flags & EXITING != 0 {
            return None;
        }
        if stat.environment.1 <= 1 {
            return Some(Said::nothing(Unknown::Unreadable));
        }
        let length = |(from, to): (u64, u64)| to.saturating_sub(from);
        lengths = Some((length(stat.arguments), length(stat.environment)));
    }
    let environ = match proc.open_file(ProcessFile::new(pid, "environ").name()) {
        Ok(file) => file,
        Err(Errno::NOENT) if !question.is_live => return Some(Said::default()),
        Err(Errno::NOENT | Errno::SRCH) => return None,
        Err(_) => return Some(Said::nothing(Unknown::Unreadable)),
    };
    if buffer.len() < PIECE {
        buffer.resize(PIECE, 0);
    }
    let mut scanner = choice::Scanner::default();
    let mut at = 0;
    let outcome = loop {
        let piece = buffer.get_mut(..PIECE).unwrap_or_default();
        match rustix::io::pread(&environ, &mut *piece, at) {
            Ok(0) => break scanner.finish(lengths.map(|(_, length)| length), &question.place),
            // It may still have said "never".
            Err(Errno::INTR) => {}
            Err(_) => {
                let so_far = scanner.finish(None, &question.place);
                break Said {
                    unknown: Some(Unknown::Unreadable),
                    ..so_far
                };
            }
            Ok(n) => {
                scanner.feed(piece.get(..n).unwrap_or_default(), &question.place);
                at += n as u64;
                if at > choice::ENVIRONMENT_MAX {
                    let so_far = scanner.finish(None, &question.place);
                    break Said {
                        unknown: Some(Unknown::Cut),
                        ..so_far
                    };
                }
            }
        }
    };
    // Environments hold secrets, so they do not stay in our memory.
    buffer.fill(0);
    let spilled = lengths.is_some_and(|(arguments, _)| title_goes_on(proc, pid, arguments));
    Some(if spilled && outcome.unknown.is_none() {
        Said {
            unknown: Some(Unknown::Overwritten),
            ..outcome
        }
    } else {
        outcome
    })
}

/// Whether a title overwrites the last argument's zero byte, and so goes on in the environment.
fn title_goes_on(proc: &Directory, pid: i32, arguments: u64) -> bool {
    let Some(last) = arguments.checked_sub(1) else {
        return false;
    };
    let Ok(file) = proc.open_file(ProcessFile::new(pid, "cmdline").name()) else {
        return true;
    };
    let mut byte = [1];
    !matches!(rustix::io::pread(&file, &mut byte, last), Ok(1) if byte == [0])
}

/// Joins the known statement of a process image, the new finding, and the parent's statement if it is a fork of it. A
/// `never` stays. An environment that was read completely stays read when the program overwrites it.
fn settle(before: Option<&Said>, found: Option<Said>, parent: Option<&Said>) -> Said {
    let mut now = found
        .or_else(|| before.cloned())
        .unwrap_or(Said::nothing(Unknown::Unreadable));
    for known in [before, parent].into_iter().flatten() {
        if now.unknown.is_some() && known.unknown.is_none() {
            let never = now.choice.never.take();
            now = known.clone();
            now.choice.never = now.choice.never.or(never);
        }
        if now.choice.never.is_none() {
            now.choice.never.clone_from(&known.choice.never);
        }
    }
    now
}

#[derive(Debug, Default)]
struct Account {
    sampled: Option<Nanoseconds>,
    churn: u32,
    weighed: Option<Nanoseconds>,
}

/// Costs of the last pass, for `homeostat status` and the benchmark.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PassCost {
    /// Processes seen, with kernel threads.
    pub processes: u32,
    /// Processes whose `/proc/PID/stat` was read.
    pub read: u32,
    /// Processes whose identity was read.
    pub identified: u32,
}

/// All processes of the machine.
pub struct ProcessTable {
    root: Root,
    /// Shared with the thread that makes reads that may block.
    proc: Arc<Directory>,
    groups: GroupView,
    reader: Reader,
    /// Reads the memory of programs that overwrote their environment, for each user one at a time.
    memory_reader: Reader,
    elsewhere: Elsewhere,
    own: i32,
    tick: u64,
    page: u64,
    passes: u64,
    listed: Vec<(i32, u64)>,
    entries: BTreeMap<i32, Entry>,
    /// Kernel threads by pid, with the inode of their directory: they are never read again.
    kernel_threads: BTreeMap<i32, (u64, u64)>,
    accounts: BTreeMap<WorkloadId, Account>,
    last_pass: Option<Nanoseconds>,
    cost: PassCost,
    small: Vec<u8>,
    large: Vec<u8>,
    directory: Box<[MaybeUninit<u8>]>,
}

impl std::fmt::Debug for ProcessTable {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ProcessTable")
            .field("root", &self.root)
            .field("entries", &self.entries.len())
            .finish()
    }
}

impl ProcessTable {
    /// An empty table over `/proc` below the root.
    ///
    /// # Errors
    /// `Unsupported` when `/proc` is not there.
    pub fn new(root: Root) -> Result<Self, PlatformError> {
        let proc = Directory::open(&root, "/proc").map_err(|e| PlatformError::Unsupported {
            what: format!("reading {}", root.path("/proc").display()),
            why: format!("{e}; homeostat needs proc mounted and readable"),
        })?;
        // Under a captured root our own process id means nothing.
        let own = if root.is_live() {
            i32::try_from(std::process::id()).unwrap_or(0)
        } else {
            0
        };
        let page = topology::page_size(&root).0;
        Ok(Self {
            elsewhere: Elsewhere::new(root.clone()),
            groups: GroupView::new(root.clone()),
            root,
            proc: Arc::new(proc),
            reader: Reader::default(),
            memory_reader: Reader::default(),
            own,
            tick: host::tick_length(),
            page,
            passes: 0,
            listed: Vec::new(),
            entries: BTreeMap::new(),
            kernel_threads: BTreeMap::new(),
            accounts: BTreeMap::new(),
            last_pass: None,
            cost: PassCost::default(),
            small: Vec::new(),
            large: Vec::new(),
            directory: vec![MaybeUninit::uninit(); 32 * 1024].into_boxed_slice(),
        })
    }

    /// What the last pass cost.
    pub fn cost(&self) -> PassCost {
        self.cost
    }

    /// Samples all processes once. `uptime` is the time since boot, on the clock of start times.
    ///
    /// # Errors
    /// `Unsupported` when `/proc` can no longer be listed.
    pub fn pass(&mut self, uptime: Nanoseconds) -> Result<(), PlatformError> {
        self.passes += 1;
        if self.passes % IDENTIFY_ANYWAY == 0 {
            self.groups.forget();
        }
        self.cost = PassCost::default();
        self.list().map_err(|e| PlatformError::Unsupported {
            what: format!("listing {}", self.root.path("/proc").display()),
            why: e.to_string(),
        })?;
        let listed = std::mem::take(&mut self.listed);
        for &(pid, inode) in &listed {
            self.cost.processes += 1;
            self.look(pid, inode, uptime);
        }
        self.listed = listed;
        let pass = self.passes;
        let gone: Vec<i32> = self
            .entries
            .iter()
            .filter(|(_, e)| e.seen != pass)
            .map(|(pid, _)| *pid)
            .collect();
        for pid in gone {
            self.remove(pid);
        }
        self.kernel_threads.retain(|_, (_, seen)| *seen == pass);
        self.look_elsewhere();
        Ok(())
    }

    fn list(&mut self) -> Result<(), Errno> {
        self.listed.clear();
        rustix::fs::seek(self.proc.descriptor(), SeekFrom::Start(0))?;
        let mut entries = RawDir::new(self.proc.descriptor(), &mut self.directory);
        while let Some(entry) = entries.next() {
            let entry = entry?;
            let Some(pid) = number(entry.file_name().to_bytes()).and_then(|n| i32::try_from(n).ok()) else {
                continue;
            };
            if self.listed.len() >= PROCESSES_MAX {
                break;
            }
            self.listed.push((pid, entry.ino()));
        }
        Ok(())
    }

    fn look(&mut self, pid: i32, inode: u64, uptime: Nanoseconds) {
        let pass = self.passes;
        if let Some(known) = self.kernel_threads.get_mut(&pid) {
            if known.0 == inode {
                known.1 = pass;
                return;
            }
            self.kernel_threads.remove(&pid);
        }
        let turn = pass.wrapping_add(pid.unsigned_abs().into());
        if self.root.is_live() && turn % READ_ANYWAY != 0 {
            if let Some(entry) = self.entries.get_mut(&pid) {
                if entry.inode == inode && !entry.unread && process_cpu_time(pid) == Some(entry.now.cpu) {
                    entry.seen = pass;
                    return;
                }
            }
        }
        self.read(pid, inode, uptime);
    }

    /// Reads `/proc/PID/stat` and everything that depends on it. Returns whether the process is there.
    fn read(&mut self, pid: i32, inode: u64, uptime: Nanoseconds) -> bool {
        self.cost.read += 1;
        let mut small = std::mem::take(&mut self.small);
        let outcome = match self
            .proc
            .read_record(ProcessFile::new(pid, "stat").name(), &mut small)
        {
            Ok(text) => parse_stat(text)
                .filter(|s| s.pid == pid)
                .map(|stat| self.take(&stat, inode, uptime)),
            Err(_) => None,
        };
        self.small = small;
        match outcome {
            Some(identify) => {
                if identify {
                    self.identify(pid);
                }
                true
            }
            None => false,
        }
    }

    /// Stores the fields of `stat`. Returns whether the identity should be read.
    fn take(&mut self, stat: &Stat<'_>, inode: u64, uptime: Nanoseconds) -> bool {
        let pid = stat.pid;
        if stat.flags & KERNEL_THREAD != 0 {
            self.entries.remove(&pid);
            self.kernel_threads.insert(pid, (inode, self.passes));
            return false;
        }
        if self
            .entries
            .get(&pid)
            .is_some_and(|e| e.member.start_ticks != stat.start_ticks)
        {
            // Another process has this number now.
            self.remove(pid);
        }
        let precise = if self.root.is_live() {
            process_cpu_time(pid)
        } else {
            None
        };
        let now = Counters {
            cpu: precise.unwrap_or_else(|| stat.cpu_ticks.saturating_mul(self.tick)),
            child_cpu: stat.child_cpu_ticks.saturating_mul(self.tick),
            faults_minor: stat.faults_minor,
            faults_major: stat.faults_major,
            wait: 0,
        };
        let first_pass = self.last_pass.is_none();
        let started = Nanoseconds(stat.start_ticks.saturating_mul(self.tick));
        let young = uptime - started < YOUNG;
        let pass = self.passes;
        let is_new = !self.entries.contains_key(&pid);
        let entry = self.entries.entry(pid).or_insert_with(|| Entry {
            inode,
            seen: pass,
            identified: 0,
            unread: false,
            now,
            delivered: if first_pass {
                now
            } else {
                Counters {
                    child_cpu: now.child_cpu,
                    ..Counters::default()
                }
            },
            fresh: !first_pass,
            zombie: false,
            known_of_children: 0,
            threads: 1,
            resident_pages: 0,
            shared_pages: 0,
            segment_searched_at: 0,
            waits: BTreeMap::new(),
            name: 0,
            image: None,
            executions: 0,
            workload: None,
            tuner: None,
            said: None,
            asked_in_vain: 0,
            groups: 0,
            groups_seen: 0,
            tuned: Vec::new(),
            member: Member {
                pid,
                start_ticks: stat.start_ticks,
                ..Member::default()
            },
        });
        entry.inode = inode;
        entry.seen = pass;
        entry.now = Counters {
            wait: entry.now.wait,
            ..now
        };
        entry.zombie = stat.state == b'Z' && stat.threads <= 1;
        entry.threads = stat.threads.max(1);
        entry.resident_pages = stat.resident_pages;
        entry.member.parent = stat.parent;
        entry.member.session = stat.session;
        let start_stack = if stat.start_stack > 1 { stat.start_stack } else { 0 };
        let mut executed = entry.member.start_stack != start_stack;
        entry.member.start_stack = start_stack;
        if let Some(image) = stat.image() {
            let before = entry.image.replace(image);
            if before.is_some_and(|before| before != image) {
                entry.executions = entry.executions.saturating_add(1);
                // Another program: the statement of the previous one no longer holds.
                entry.said = None;
                entry.asked_in_vain = 0;
                executed = true;
            }
        }
        let name = fingerprint(&[stat.comm]);
        let renamed = entry.name != name;
        if renamed {
            entry.name = name;
            entry.member.program = one_line(stat.comm);
        }
        !entry.zombie
            && (is_new
                || renamed
                || executed
                || young
                || entry.unread
                || (1..ASKED_MAX).contains(&entry.asked_in_vain)
                || pass.wrapping_sub(entry.identified) >= IDENTIFY_ANYWAY
                || entry.resident_pages.saturating_mul(self.page) / 2
                    > entry.segment_searched_at.max(SEGMENT_MIN))
    }

    /// If the environment of a process is overwritten, reads the copy that its C library uses.
    fn look_into_memory(&mut self, pid: i32, place: &str) {
        let Some(entry) = self.entries.get(&pid) else {
            return;
        };
        let is_unknown = entry.said.as_ref().is_some_and(|said| said.unknown.is_some());
        let process = entry.member.process();
        if !is_unknown || !self.root.is_live() || !crate::storage::maps_only_its_own(&self.root, process) {
            return;
        }
        let (proc, place) = (self.proc.clone(), place.to_owned());
        let executable = entry.member.executable.clone();
        let user = i32::from_ne_bytes(entry.member.user.to_ne_bytes());
        // A process may map storage that does not answer. Then processes of its user are left alone for a while.
        let outcome = self.memory_reader.run(user, reader::PATIENCE, move || {
            let mut buffer = Vec::new();
            let maps = proc.read(ProcessFile::new(pid, "maps").name(), &mut buffer, MAPS_MAX);
            live_environment::read(pid, maps.ok()?.whole()?, &executable, &place)
        });
        if let (Ok(found @ Some(_)), Some(entry)) = (outcome, self.entries.get_mut(&pid)) {
            entry.said = Some(settle(entry.said.as_ref(), found, None));
        }
    }

    /// Joins the statements about a process from its environment and elsewhere. `not_now`: why the former is unread.
    fn choose(&mut self, pid: i32, place: &str, not_now: Option<String>) {
        let Some(entry) = self.entries.get_mut(&pid) else {
            return;
        };
        let mut choice = entry
            .said
            .as_ref()
            .map(|said| said.choice.clone())
            .unwrap_or_default();
        choice.tuned.extend(entry.tuned.iter().cloned());
        let mut unknown = not_now.or_else(|| {
            let why = entry.said.as_ref()?.unknown?;
            Some(why.sentence(place))
        });
        entry.groups_seen = 0;
        if let Some((state, says)) = self.elsewhere.says(entry.groups) {
            entry.groups_seen = state;
            choice::merge(&mut choice, &says.choice);
            if unknown.is_some() && says.answer_for(&entry.member.executable) {
                unknown = None;
            }
        }
        entry.asked_in_vain = if unknown.is_some() {
            entry.asked_in_vain.saturating_add(1)
        } else {
            0
        };
        choice.unknown = choice.unknown.or(unknown);
        entry.member.choice = choice;
    }

    fn look_elsewhere(&mut self) {
        self.elsewhere.refresh(self.passes);
        let changed: Vec<i32> = self
            .entries
            .iter()
            .filter(|(_, e)| {
                self.elsewhere
                    .says(e.groups)
                    .is_some_and(|(state, _)| state != e.groups_seen)
            })
            .map(|(pid, _)| *pid)
            .collect();
        for pid in changed {
            self.identify(pid);
        }
        let used: BTreeSet<u64> = self.entries.values().map(|e| e.groups).collect();
        self.elsewhere.retain(&used);
    }

    fn identify(&mut self, pid: i32) {
        self.cost.identified += 1;
        let Some(entry) = self.entries.get_mut(&pid) else {
            return;
        };
        entry.identified = self.passes;
        let proc = &self.proc;
        let buffer = &mut self.large;
        let link = rustix::fs::readlinkat(proc.descriptor(), ProcessFile::new(pid, "exe").name(), Vec::new());
        if let Ok(target) = link {
            let target = target.to_string_lossy();
            target
                .strip_suffix(" (deleted)")
                .unwrap_or(&target)
                .clone_into(&mut entry.member.executable);
        }
        let mut groups_known = false;
        if let Ok(text) = proc.read(ProcessFile::new(pid, "cgroup").name(), buffer, SMALL_FILE_MAX) {
            // Some of the hierarchies may name another place than all of them together.
            if let Some(text) = text.whole() {
                entry.member.place = grouping::place(text, &self.groups);
                entry.groups = self.elsewhere.enter(text);
                groups_known = true;
            }
        }
        if let Ok(text) = proc.read(ProcessFile::new(pid, "status").name(), buffer, SMALL_FILE_MAX) {
            if choice::is_status(text.beginning()) {
                // The user comes before fields that may be long.
                entry.member.user = choice::user(text.beginning());
                entry.tuned = choice::from_status(text, &entry.member.program, pid);
            }
        }
        if let Ok(text) = proc.read_record(ProcessFile::new(pid, "statm").name(), buffer) {
            entry.shared_pages = words(text).nth(2).and_then(number).unwrap_or(0);
        }
        let shared = entry.shared_pages.saturating_mul(self.page);
        entry.segment_searched_at = entry.resident_pages.saturating_mul(self.page);
        let place = format!("the environment of {} (pid {pid})", entry.member.program);
        let question = Question {
            pid,
            place: place.clone(),
            is_live: self.root.is_live(),
            // Nothing revokes a "never".
            with_environment: entry.said.as_ref().is_none_or(|said| said.choice.never.is_none()),
            with_segment: shared >= SEGMENT_MIN,
        };
        let (parent, image) = (entry.member.parent, entry.image);
        // A fork runs the program of its parent, and has its environment.
        let of_parent = self
            .entries
            .get(&parent)
            .filter(|parent| image.is_some() && parent.image == image)
            .and_then(|parent| parent.said.clone());
        // The following reads take the process's mmap_lock.
        let (proc, mut lent) = (self.proc.clone(), std::mem::take(&mut self.large));
        let outcome = self.reader.run(pid, reader::PATIENCE, move || {
            let told = Told::read(&proc, &question, &mut lent);
            (told, lent)
        });
        let Some(entry) = self.entries.get_mut(&pid) else {
            return;
        };
        let mut not_now = None;
        match outcome {
            Ok((told, buffer)) => {
                self.large = buffer;
                entry.unread = false;
                if let Some((arguments, tuner)) = told.arguments {
                    entry.member.arguments = arguments;
                    // Only root can tune the machine, whatever the program's name.
                    entry.tuner = tuners::by_program(&entry.member.program)
                        .or(tuner)
                        .filter(|_| entry.member.user == 0);
                }
                if let Some(segment) = told.segment {
                    entry.member.segment = segment;
                }
                // A process that has ended reveals nothing more and needs no action.
                if told.said.is_some() || entry.said.is_some() || of_parent.is_some() {
                    entry.said = Some(settle(entry.said.as_ref(), told.said, of_parent.as_ref()));
                }
            }
            Err(error) => {
                entry.unread = true;
                if entry.said.is_none() {
                    not_now = Some(error.to_string());
                }
            }
        }
        self.look_into_memory(pid, &place);
        if !groups_known {
            not_now.get_or_insert_with(|| format!("/proc/{pid}/cgroup cannot be read whole"));
        }
        self.choose(pid, &place, not_now);
        /// A buffer larger than this is given back.
        const KEEP: usize = 128 * 1024;
        if self.large.len() > KEEP {
            self.large.truncate(KEEP);
            self.large.shrink_to_fit();
        }
    }

    fn remove(&mut self, pid: i32) {
        let Some(entry) = self.entries.remove(&pid) else {
            return;
        };
        let seen = entry.delivered.cpu.saturating_add(entry.delivered.child_cpu);
        // The CPU time of its own children was added to its children's time, which its parent inherits.
        if let Some(parent) = self.entries.get_mut(&entry.member.parent) {
            parent.known_of_children = parent.known_of_children.saturating_add(seen);
        }
        if let Some(account) = entry.workload.and_then(|w| self.accounts.get_mut(&w)) {
            account.churn = account.churn.saturating_add(1);
        }
    }

    /// Recognises the workloads of the last pass. Processes of `ours`, in any control group, are left out.
    pub fn workloads(&mut self, ours: impl IntoIterator<Item = i32>) -> Vec<Workload> {
        let ours: Vec<i32> = ours.into_iter().collect();
        let counts = |e: &&Entry| !e.zombie && !ours.contains(&e.member.pid);
        let entries = self.entries.values().filter(counts);
        let members: Vec<&Member> = entries.map(|e| &e.member).collect();
        let workloads = grouping::group(&members, self.own);
        let first_pass = self.last_pass.is_none();
        let mut named: BTreeSet<&WorkloadId> = BTreeSet::new();
        for workload in &workloads {
            named.insert(&workload.id);
            let account = self.accounts.entry(workload.id.clone()).or_default();
            for process in &workload.processes {
                let Some(entry) = self.entries.get_mut(&process.pid) else {
                    continue;
                };
                if entry.workload.as_ref() != Some(&workload.id) {
                    if !first_pass {
                        account.churn = account.churn.saturating_add(1);
                    }
                    entry.workload = Some(workload.id.clone());
                }
            }
        }
        self.accounts.retain(|id, _| named.contains(id));
        workloads
    }

    /// Names of other tuners that run, sorted.
    pub fn other_tuners(&self) -> Vec<String> {
        let found: BTreeSet<&str> = self.entries.values().filter_map(|e| e.tuner).collect();
        found.into_iter().map(str::to_owned).collect()
    }

    /// Profilers that run, each once.
    pub fn profilers(&self) -> Vec<Profiler> {
        let found: BTreeSet<Profiler> = self
            .entries
            .values()
            .filter(|e| !e.zombie)
            .filter_map(|e| others::by_program(&e.member.program))
            .collect();
        found.into_iter().collect()
    }

    /// Marks the end of a pass whose samples were taken.
    pub fn finish_pass(&mut self, now: Nanoseconds) {
        self.last_pass = Some(now);
    }

    /// The anonymous memory of a workload if a new reading is due, else zero. Costs one small file per process.
    pub fn weigh(&mut self, workload: &Workload, now: Nanoseconds) -> Bytes {
        let account = self.accounts.entry(workload.id.clone()).or_default();
        if account
            .weighed
            .is_some_and(|at| now.saturating_sub(at) < WEIGHED_EVERY)
        {
            return Bytes::ZERO;
        }
        account.weighed = Some(now);
        let mut pages: u64 = 0;
        for process in workload.processes.iter().take(WEIGHED_MAX) {
            let name = ProcessFile::new(process.pid, "statm");
            if let Ok(text) = self.proc.read_record(name.name(), &mut self.small) {
                if let Some(own) = parse_anonymous(text) {
                    pages = pages.saturating_add(own);
                }
            }
        }
        Bytes(pages.saturating_mul(self.page))
    }

    /// Samples the processes of one workload again, between two passes.
    pub fn refresh(&mut self, workload: &Workload, uptime: Nanoseconds) {
        for process in &workload.processes {
            let Some(entry) = self.entries.get(&process.pid) else {
                continue;
            };
            if entry.member.start_ticks != process.start_ticks {
                continue;
            }
            let inode = entry.inode;
            if !self.read(process.pid, inode, uptime) {
                self.remove(process.pid);
            }
        }
    }

    /// Whether a process is still the one that was seen.
    pub fn is_known(&self, process: ProcessId) -> bool {
        self.entries
            .get(&process.pid)
            .is_some_and(|e| e.member.start_ticks == process.start_ticks)
    }

    /// Resident pages of a process at its last reading; `None` for an unknown process.
    pub fn resident_pages(&self, process: ProcessId) -> Option<u64> {
        let entry = self.entries.get(&process.pid);
        entry
            .filter(|e| e.member.start_ticks == process.start_ticks)
            .map(|e| e.resident_pages)
    }

    /// CPU time of the children that a process has waited for, at its last reading (ns); zero for an unknown process.
    pub fn children_cpu(&self, process: ProcessId) -> u64 {
        let entry = self.entries.get(&process.pid);
        entry
            .filter(|e| e.member.start_ticks == process.start_ticks)
            .map_or(0, |e| e.now.child_cpu)
    }

    /// Sample of a workload: differences since its previous sample. `uptime` is `now` on the clock of start times.
    pub fn sample(
        &mut self,
        workload: &Workload,
        now: Nanoseconds,
        uptime: Nanoseconds,
        detailed: bool,
    ) -> WorkloadSample {
        let account = self.accounts.entry(workload.id.clone()).or_default();
        let since = account
            .sampled
            .or(self.last_pass)
            .map_or(Nanoseconds::ZERO, |t| now - t);
        account.sampled = Some(now);
        let churn = std::mem::take(&mut account.churn);
        let mut sample = WorkloadSample::empty(workload.id.clone(), since);
        sample.churn = churn;
        sample.executions = workload
            .processes
            .first()
            .filter(|main| self.is_known(**main))
            .and_then(|main| self.entries.get(&main.pid))
            .map_or(0, |main| main.executions);
        let mut own_pages: u64 = 0;
        let mut shared_pages: u64 = 0;
        for process in &workload.processes {
            if !self.is_known(*process) {
                continue;
            }
            let wait = self.wait(process.pid, detailed);
            let Some(entry) = self.entries.get_mut(&process.pid) else {
                continue;
            };
            let age = uptime - Nanoseconds(entry.member.start_ticks.saturating_mul(self.tick));
            let used = entry.deliver(since, age);
            sample.age = sample.age.max(age);
            sample.processes += 1;
            sample.threads = sample.threads.saturating_add(entry.threads);
            sample.cpu += Nanoseconds(used.cpu);
            sample.cpu_busiest = sample.cpu_busiest.max(Nanoseconds(used.cpu));
            sample.runqueue_wait += Nanoseconds(wait);
            sample.faults_minor = sample.faults_minor.saturating_add(used.faults_minor);
            sample.faults_major = sample.faults_major.saturating_add(used.faults_major);
            // Shared memory counts once, at the process that has most of it.
            let shared = if workload.processes.len() > 1 {
                entry.shared_pages.min(entry.resident_pages)
            } else {
                0
            };
            own_pages = own_pages.saturating_add(entry.resident_pages - shared);
            shared_pages = shared_pages.max(shared);
        }
        sample.resident = Bytes(own_pages.saturating_add(shared_pages).saturating_mul(self.page));
        sample
    }

    /// Run-queue wait of a process since the last call: of all threads in detail, else of its first thread.
    fn wait(&mut self, pid: i32, detailed: bool) -> u64 {
        let Some(entry) = self.entries.get_mut(&pid) else {
            return 0;
        };
        // A process that used no CPU time since its last sample has hardly waited for it either.
        if entry.now.cpu == entry.delivered.cpu && !entry.fresh {
            return 0;
        }
        let mut sum: u64 = 0;
        let mut note = |waits: &mut BTreeMap<i32, u64>, thread: i32, total: u64| {
            // A thread seen for the first time has no difference yet.
            let before = waits.insert(thread, total).unwrap_or(total);
            sum = sum.saturating_add(total.saturating_sub(before));
        };
        if !detailed || entry.threads <= 1 {
            let name = ProcessFile::new(pid, "schedstat");
            if let Some(total) = self
                .proc
                .read_record(name.name(), &mut self.small)
                .ok()
                .and_then(parse_wait)
            {
                note(&mut entry.waits, pid, total);
            }
            return sum;
        }
        let mut threads: Vec<i32> = Vec::new();
        if let Ok(task) = self.proc.open_file(ProcessFile::new(pid, "task").name()) {
            let mut list = RawDir::new(&task, &mut self.directory);
            while threads.len() < THREADS_MAX {
                let Some(Ok(listed)) = list.next() else {
                    break;
                };
                let name = number(listed.file_name().to_bytes());
                threads.extend(name.and_then(|n| i32::try_from(n).ok()));
            }
        }
        for thread in &threads {
            let leaf = format!("task/{thread}/schedstat");
            let name = ProcessFile::new(pid, &leaf);
            if let Some(total) = self
                .proc
                .read_record(name.name(), &mut self.small)
                .ok()
                .and_then(parse_wait)
            {
                note(&mut entry.waits, *thread, total);
            }
        }
        if entry.waits.len() > threads.len() {
            let living: BTreeSet<i32> = threads.into_iter().collect();
            entry.waits.retain(|thread, _| living.contains(thread));
        }
        sum
    }
}

impl Entry {
    /// Usage since the last delivery, which counts as delivered from now on.
    fn deliver(&mut self, since: Nanoseconds, age: Nanoseconds) -> Counters {
        let (now, before) = (self.now, self.delivered);
        // If a process is older than the interval but new to us, only a share of its time belongs to the interval.
        let share = |total: u64| {
            if self.fresh && age.0 > since.0 {
                (u128::from(total) * u128::from(since.0) / u128::from(age.0.max(1))) as u64
            } else {
                total
            }
        };
        let children = now.child_cpu.saturating_sub(before.child_cpu);
        let known = self.known_of_children.min(children);
        let used = Counters {
            cpu: share(now.cpu.saturating_sub(before.cpu)).saturating_add(children - known),
            child_cpu: 0,
            faults_minor: share(now.faults_minor.saturating_sub(before.faults_minor)),
            faults_major: share(now.faults_major.saturating_sub(before.faults_major)),
            wait: 0,
        };
        // Keeps half of the time that the parent has not waited for: a parent that never waits gradually forgets it.
        self.known_of_children = (self.known_of_children - known) / 2;
        self.delivered = now;
        self.fresh = false;
        used
    }
}

/// The name of a process as one line of text. Programs choose their names, and names of workloads in tables and logs
/// contain them. Invalid text, line ends and cursor movements become U+FFFD. An empty or blank name gets a visible one.
pub(super) fn one_line(name: &[u8]) -> String {
    let name = String::from_utf8_lossy(name);
    if name.trim().is_empty() {
        return "?".to_owned();
    }
    name.chars()
        .map(|c| {
            if c.is_control() {
                char::REPLACEMENT_CHARACTER
            } else {
                c
            }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const LINE: &[u8] =
        b"42 (a) R (b c) S 7 42 9 0 -1 4194560 11 0 12 0 100 50 -1 3 20 0 4 0 5000 1 77 1 1 1 99 0\n";

    #[test]
    fn a_name_is_one_line_whatever_the_program_calls_itself() {
        assert_eq!(one_line(b"redis-server"), "redis-server");
        assert_eq!(one_line("größe".as_bytes()), "größe");
        assert_eq!(one_line(b"a\nc\x1b[2J\xff"), "a\u{fffd}c\u{fffd}[2J\u{fffd}");
    }

    #[test]
    fn what_files_back_is_not_anonymous() {
        assert_eq!(parse_anonymous(b"9000 700 200 10 0 5000 0\n"), Some(500));
        // Read while it changed.
        assert_eq!(parse_anonymous(b"9000 700 701 10 0 5000 0\n"), Some(0));
        assert_eq!(parse_anonymous(b"9000 700"), None);
        assert_eq!(parse_anonymous(b"9000 x 7"), None);
    }

    #[test]
    fn names_with_parentheses_and_negative_times_are_read() {
        let stat = parse_stat(LINE).unwrap();
        assert_eq!((stat.pid, stat.comm, stat.state), (42, &b"a) R (b c"[..], b'S'));
        assert_eq!((stat.parent, stat.session, stat.threads), (7, 9, 4));
        assert_eq!((stat.faults_minor, stat.faults_major), (11, 12));
        assert_eq!((stat.cpu_ticks, stat.child_cpu_ticks), (150, 3));
        assert_eq!(
            (stat.start_ticks, stat.resident_pages, stat.start_stack),
            (5000, 77, 99)
        );
        assert_eq!(stat.code, (1, 1));
    }

    #[test]
    fn what_a_process_executes_is_told_apart_where_it_can_be_seen() {
        let of = |code: (u64, u64), start_stack: u64| Stat {
            code,
            start_stack,
            ..parse_stat(LINE).unwrap()
        };
        let image = |code, start_stack| of(code, start_stack).image();
        let first = image((0x5000, 0x9000), 0x7ff0);
        assert!(first.is_some());
        assert_eq!(first, image((0x5000, 0x9000), 0x7ff0));
        assert_ne!(first, image((0x5000, 0x9000), 0x7fe0));
        // No address is random: the programs differ in size.
        assert_ne!(first, image((0x5000, 0xa000), 0x7ff0));
        // No permission, and in the middle of it.
        for unseen in [
            image((1, 1), 0),
            image((0, 0), 0x7ff0),
            image((0x5000, 0x9000), 0),
        ] {
            assert_eq!(unseen, None);
        }
    }

    #[test]
    fn the_largest_shared_segment_is_found() {
        let maps = b"7f0000000000-7f0002000000 rw-s 00000000 00:01 5 /memfd:small (deleted)\n\
                     7f1000000000-7f1010000000 rw-s 00000000 00:01 9 /SYSV00000000 (deleted)\n\
                     7f2000000000-7f2080000000 rw-p 00000000 00:00 0 \n\
                     7f3000000000-7f3080000000 r--s 00000000 fe:01 3 /var/lib/data\n7f4000";
        let found = parse_segment(maps).unwrap();
        assert_eq!((found.inode, found.length, found.system_v), (9, 256 << 20, true));
        assert_eq!(
            parse_segment(b"7f0000000000-7f0000200000 rw-s 0 00:01 5 /memfd:x\n"),
            None
        );
    }

    #[test]
    fn run_queue_wait_is_the_second_number() {
        assert_eq!(parse_wait(b"1 22 3\n"), Some(22));
        assert_eq!(parse_wait(b"1"), None);
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let _ = parse_stat(&bytes);
            let _ = parse_segment(&bytes);
            let _ = parse_wait(&bytes);
        }

        #[test]
        fn a_cut_line_is_refused_or_says_the_same(cut in 0..LINE.len()) {
            if let Some(stat) = parse_stat(&LINE[..cut]) {
                prop_assert_eq!(stat.start_ticks, 5000);
            }
        }
    }
}
