//! Drops the pages that a streaming reader brought before it was limited.
//!
//! A process moved into a limited group leaves its charged pages in the old group. If that group has a limit of its
//! own, it stays full, and the kernel goes on taking pages from everybody in it. So homeostat calls
//! `posix_fadvise(POSIX_FADV_DONTNEED)` on the reader's open files, each opened anew. There is no undo: the pages are
//! clean, and whoever needs one reads it again. The kernel keeps mapped pages. It also keeps unwritten pages, and
//! starts the writes that it would have done anyway.
//!
//! Only pages that the reader has read are dropped, of regular files on a disk of this machine. The reader has them
//! open for reading only, and nobody else has them open or mapped. All processes are checked first. If one cannot be
//! checked (except process 1), nothing is dropped. Other users of a file are matched by inode number alone, because a
//! query may ask another machine. Two files of one number count as one, and nothing is dropped. A file open through an
//! overlay mostly has the number of the lower file. Unseen: a later open, a thread with its own file table, and the
//! kernel (a loop device, an NFS server). They read from disk again.

use crate::lost_parts::{Identity, identity};
use crate::mounts::Mounts;
use crate::page_dropping::{Held, has_lease, hold_regular, is_open_for_reading_only, open_held};
use homeostat_kernel::Root;
use homeostat_kernel::bytes::{lines, number, words};
use homeostat_kernel::privileges::{CAP_SYS_PTRACE, may};
use homeostat_sensors::processes::parse_stat;
use homeostat_sensors::reader::{NotNow, PATIENCE, Reader};
use homeostat_sensors::reads::{may_be_on_disk, parse_inode, parse_position};
use rustix::fd::OwnedFd;
use rustix::fs::{Advice, fadvise};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{self, BufRead, BufReader};
use std::num::NonZeroU64;
use std::ops::Range;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

const SLICE: Duration = Duration::from_millis(20);
/// Processes checked. If there are more, nothing is dropped.
const PROCESSES_MAX: usize = 16 * 1024;
/// Open files and mappings checked, of all processes together. If there are more, nothing is dropped.
const LOOKED_AT_MAX: usize = 500_000;
/// Files remembered of one reader.
const FILES_MAX: usize = 64;
/// Open files of one process checked, some tens of milliseconds. If it has more, nothing is dropped.
const OPEN_MAX: usize = 16 * 1024;
/// Inodes of others remembered from one check to the next: 8 bytes each.
const SEEN_MAX: usize = 64 * 1024;
/// The part read last stays: a reader may go back a little.
const KEEP: u64 = 1 << 20;
/// Parts of files end at multiples of this: the kernel's largest unit of file pages, which it drops as a whole only.
const STEP: u64 = 2 << 20;
/// Most bytes dropped by one call: a few milliseconds if all of it is in memory.
const PART: u64 = 64 << 20;
/// Most bytes handled for one reader, beginning with the part read last.
const GIVEN_MAX: u64 = 16 << 30;
const FIRST: i32 = 1;
/// The first PID namespace (`PROC_PID_INIT_INO`). From any other namespace not all processes are visible.
const PROCESSES_OF_THE_MACHINE: &str = "pid:[4026531836]";
const OF_OTHERS: &str = "file whose pages stay: another process has it open or mapped";
const NOT_ONLY_READ: &str = "file whose pages stay: the reader writes to it or maps it";
const NOT_ON_DISK: &str = "file whose pages stay: it is not on a disk of this machine";
const TOO_MANY: &str = "file whose pages stay: the reader has more files open than are looked at";
const REFUSED: &str = "file whose pages stay: the kernel drops none of them";
const TOO_LARGE: &str = "file of which a part stays: the reader has read more than is gone through";

/// Why nothing is dropped.
#[derive(Debug, thiserror::Error)]
pub(super) enum Obstacle {
    #[error("not all processes can be seen from here (it takes root, outside of a name space of processes)")]
    Blind,
    #[error("the open files of process {pid} cannot be looked at: {why}")]
    Process { pid: i32, why: io::Error },
    #[error("process {0} has too many files open to look at")]
    Open(i32),
    #[error("the mounts of process {pid} cannot be read: {why}")]
    Mounts { pid: i32, why: io::Error },
    #[error("the leader of process {0} has ended and its threads have not: their open files are not known")]
    Headless(i32),
    #[error("the kernel does not tell which file is open (before Linux 5.14)")]
    Untold,
    #[error("the processes cannot be listed: {0}")]
    List(io::Error),
    #[error("the disk took longer than {PATIENCE:?} to let a part of it go")]
    Disk,
    #[error("too many processes, open files or mappings to look at all")]
    TooMany,
    #[error(transparent)]
    NotNow(#[from] NotNow),
}

/// Files whose read position is remembered.
const ROUNDS_MAX: usize = 256;
/// Bytes ahead of the reader that stay: the kernel is reading them ahead.
const AHEAD: u64 = 16 << 20;

/// How far a reader has come in its files, from pass to pass and from one limitation to the next.
///
/// A reader that starts its file anew leaves pages *ahead* of itself and comes by them again and again. The kernel then
/// takes them for used pages, and takes those of others instead. So [`Rounds`] remembers how far in a file all openers
/// were. The part ahead is dropped up to there, or up to the end once a single process has passed the end. It has if it
/// is further back after enough reading (`rchar`, which also counts other files). Each part is dropped once per
/// limitation: later reads are charged elsewhere. A process that goes back for another reason reads from disk again.
#[derive(Clone, Debug, Default)]
pub(super) struct Rounds {
    ways: BTreeMap<Identity, Way>,
    looks: u64,
}

/// How far a reader has come in one file.
#[derive(Clone, Debug)]
struct Way {
    /// At some check all openers were here or further. Or one opener was, and has begun anew since.
    reached: u64,
    /// The last check of a single process that has it open.
    anchor: Option<Anchor>,
    /// Ahead of the reader, and dropped since it was limited.
    dropped: Option<Range<u64>>,
    /// The check at which it was seen last.
    seen: u64,
}

/// Where a process was in a file, and the bytes it had read by then, of all files.
#[derive(Clone, Copy, Debug)]
struct Anchor {
    process: Single,
    at: u64,
}

/// Bytes that a single process has read, of all files.
#[derive(Clone, Copy, Debug)]
struct Single {
    pid: i32,
    start_ticks: u64,
    read: u64,
}

impl Rounds {
    /// The reader is limited once more, so everything it has left behind meanwhile can be dropped.
    pub(super) fn begin(&mut self) {
        for way in self.ways.values_mut() {
            way.dropped = None;
        }
    }

    /// Whether a file with this inode number is known.
    fn knows(&self, inode: u64) -> bool {
        self.ways.keys().any(|(_, known, ..)| *known == inode)
    }

    /// Notes the positions in a file of this size. `single`: the only opener, if it reads no other file much.
    fn note(&mut self, file: Identity, size: u64, at: Positions, single: Option<Single>) {
        self.looks += 1;
        if self.ways.len() >= ROUNDS_MAX && !self.ways.contains_key(&file) {
            let oldest = self.ways.iter().min_by_key(|(_, way)| way.seen);
            if let Some(oldest) = oldest.map(|(file, _)| *file) {
                self.ways.remove(&oldest);
            }
        }
        let anchor = single.map(|process| Anchor {
            process,
            at: at.hindmost,
        });
        let begins = Way {
            reached: at.hindmost,
            anchor,
            dropped: None,
            seen: self.looks,
        };
        let way = self.ways.entry(file).or_insert_with(|| begins.clone());
        if way.reached > size.saturating_add(STEP) {
            // It has been truncated since.
            *way = begins;
            return;
        }
        way.reached = at.hindmost.max(way.reached);
        way.seen = self.looks;
        if let (Some(then), Some(now)) = (way.anchor, anchor) {
            if then.has_passed_the_end(&now, size) {
                way.reached = size;
            }
        }
        // Without a single process the old anchor stays.
        way.anchor = anchor.or(way.anchor);
    }

    /// The range ahead of all openers that was read before and is not dropped yet.
    fn ahead(&self, file: Identity, size: u64, at: Positions) -> Option<Range<u64>> {
        let way = self.ways.get(&file)?;
        if at.foremost.saturating_add(STEP) >= way.reached {
            return None;
        }
        let from = behind(at.foremost).saturating_add(AHEAD);
        let to = behind(way.reached.min(size));
        let range = match &way.dropped {
            // It has been seen further ahead since.
            Some(dropped) if to > dropped.end => from.max(dropped.end)..to,
            Some(dropped) => from..to.min(dropped.start),
            None => from..to,
        };
        (range.start < range.end).then_some(range)
    }

    /// A part ahead was dropped. Parts come from the end.
    fn note_dropped(&mut self, file: Identity, part: Range<u64>) {
        let Some(way) = self.ways.get_mut(&file) else {
            return;
        };
        match &mut way.dropped {
            Some(dropped) if part.end == dropped.start => dropped.start = part.start,
            Some(dropped) if part.start == dropped.end => dropped.end = part.end,
            dropped => *dropped = Some(part),
        }
    }
}

impl Anchor {
    /// Whether the same process is further back now, after reading enough to pass the end of a file of this size.
    /// (Position and bytes read are not sampled at the same moment.)
    fn has_passed_the_end(&self, now: &Self, size: u64) -> bool {
        let is_same =
            (self.process.pid, self.process.start_ticks) == (now.process.pid, now.process.start_ticks);
        let has_read = now.process.read.saturating_sub(self.process.read);
        let needed = size.saturating_sub(self.at).saturating_add(now.at);
        is_same && now.at.saturating_add(STEP) < self.at && has_read.saturating_add(AHEAD) >= needed
    }
}

/// A file of the reader.
struct Candidate {
    file: Arc<OwnedFd>,
    identity: Option<Identity>,
    /// A process that has it open.
    pid: i32,
    /// The mount of that opening. Together with the inode it identifies the file.
    mount: u64,
    /// End of the range behind the reader that is not yet dropped.
    to: u64,
    /// The range ahead of the reader that was read before.
    ahead: Option<Range<u64>>,
    /// Its size in whole parts that can be dropped.
    size: u64,
    length: u64,
}

impl Candidate {
    /// Sets the ranges to drop: behind the reader, and ahead of it if read before.
    fn aim(&mut self, rounds: &mut Rounds, at: Positions, single: Option<Single>) {
        let to = behind(at.hindmost).min(self.size);
        if let Some(identity) = self.identity {
            rounds.note(identity, self.length, at, single);
            self.ahead = rounds.ahead(identity, self.length, at);
        }
        // If the reader has begun anew since the first check, the kernel's read-ahead for it stays.
        self.to = if self.ahead.is_some() { to } else { to.max(self.to) };
    }

    fn parts(&self) -> u64 {
        let ahead = self.ahead.as_ref().map_or(0, |ahead| ahead.end - ahead.start);
        self.to.div_ceil(PART) + ahead.div_ceil(PART)
    }

    /// The next part, from the end. The part read last comes first.
    fn next(&mut self) -> Option<(u64, NonZeroU64)> {
        let (from, to) = match &mut self.ahead {
            _ if self.to > 0 => {
                let to = self.to;
                self.to = to.saturating_sub(PART);
                (self.to, to)
            }
            Some(ahead) => {
                let to = ahead.end;
                ahead.end = to.saturating_sub(PART).max(ahead.start);
                (ahead.end, to)
            }
            None => return None,
        };
        Some((from, NonZeroU64::new(to.saturating_sub(from))?))
    }
}

/// Positions of all openers of a file.
#[derive(Clone, Copy, Debug)]
struct Positions {
    /// The smallest position.
    hindmost: u64,
    /// The largest position.
    foremost: u64,
}

/// Activity counters of a process. Different values mean that it has run, or is another process.
///
/// Most processes sleep most of the time, and checking their files is most of the work. An idle process has opened
/// nothing, so its last result ([`Seen`]) holds. Not noticed: less than a clock tick (10 ms) of work without a page
/// fault or a read. Such a process may have opened a file, but has made no use of its pages so far.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Doings {
    start_ticks: u64,
    faults: u64,
    cpu_ticks: u64,
    /// Read calls, and bytes that they returned. They reveal a process that does little else.
    reads: (u64, u64),
}

impl Doings {
    /// `None`: it has ended, or its counters are unreadable.
    fn read(root: &Root, pid: i32) -> Option<Self> {
        let text = fs::read(root.path(&format!("/proc/{pid}/stat"))).ok()?;
        let stat = parse_stat(&text)?;
        let io = fs::read(root.path(&format!("/proc/{pid}/io"))).ok()?;
        Some(Self {
            start_ticks: stat.start_ticks,
            faults: stat.faults_minor.saturating_add(stat.faults_major),
            cpu_ticks: stat.cpu_ticks,
            reads: (counted(&io, b"syscr:")?, counted(&io, b"rchar:")?),
        })
    }
}

/// The count in one line of `/proc/PID/io`.
fn counted(io: &[u8], name: &[u8]) -> Option<u64> {
    let line = lines(io).find_map(|line| line.strip_prefix(name))?;
    number(line.trim_ascii())
}

/// Files that processes had open and mapped at their last check.
#[derive(Default)]
pub(super) struct Seen {
    processes: BTreeMap<i32, (Doings, Box<[u64]>)>,
    inodes: usize,
}

impl Seen {
    fn keep(&mut self, pid: i32, doings: Doings, inodes: Vec<u64>) {
        if self.inodes + inodes.len() <= SEEN_MAX && self.processes.len() < PROCESSES_MAX {
            self.inodes += inodes.len();
            self.processes.insert(pid, (doings, inodes.into()));
        }
    }
}

/// The work of dropping, as far as it got.
pub(super) struct GivingBack {
    /// Processes of the reader that are still to be checked.
    own: Vec<i32>,
    /// All processes of the reader.
    own_all: BTreeSet<i32>,
    /// Other processes that are still to be checked. `None`: not listed yet.
    others: Option<Vec<i32>>,
    /// Processes of the reader whose positions are checked once more at the end.
    ///
    /// The disk has read ahead for a fast reader when it is moved. A moment later these pages lie behind the reader
    /// (measured: 14 and 18 MiB of 256). They stay charged to the old group as long as it comes by again. If the second
    /// check fails, the first one counts.
    again: Vec<i32>,
    /// By inode.
    files: BTreeMap<u64, Candidate>,
    /// Positions of the reader's processes in their open files, by inode.
    positions: BTreeMap<u64, Positions>,
    /// The same at the second check.
    positions_now: BTreeMap<u64, Positions>,
    /// Mounts of the files open at the second check.
    mounts_now: BTreeSet<(u64, u64)>,
    /// Bytes that each of its processes has read, of all files.
    doings: Vec<Single>,
    /// The same at the second check.
    doings_now: Vec<Single>,
    /// How far it was before.
    rounds: Rounds,
    /// Files whose part ahead was dropped, too.
    rounds_dropped: usize,
    /// Files that the reader also writes or maps.
    not_only_read: BTreeSet<u64>,
    /// Files that stay as they are, by reason.
    left: BTreeMap<String, u64>,
    looked_at: usize,
    given: u64,
    steps: u64,
    /// Longest wait for a step. Tests with much to check set it longer.
    patience: Duration,
    /// Results of earlier checks of other processes.
    before: Seen,
    /// Results of this check.
    seen: Seen,
    /// Last owner of the reader's files. It closes them in another thread.
    held: Held,
}

impl GivingBack {
    /// Begins with the processes of a reader, the last results for others, and how far the reader was.
    pub(super) fn new(processes: BTreeSet<i32>, before: Seen, rounds: Rounds) -> Self {
        Self {
            before,
            seen: Seen::default(),
            held: Held::default(),
            own: processes.iter().copied().collect(),
            again: processes.iter().copied().collect(),
            own_all: processes,
            others: None,
            files: BTreeMap::new(),
            positions: BTreeMap::new(),
            positions_now: BTreeMap::new(),
            mounts_now: BTreeSet::new(),
            doings: Vec::new(),
            doings_now: Vec::new(),
            rounds,
            rounds_dropped: 0,
            not_only_read: BTreeSet::new(),
            left: BTreeMap::new(),
            looked_at: 0,
            given: 0,
            steps: 0,
            patience: PATIENCE,
        }
    }

    /// One slice. At the end it returns the files left as they are, by reason.
    pub(super) fn go_on(
        &mut self,
        root: &Root,
        reader: &mut Reader,
    ) -> Option<(BTreeMap<String, u64>, Seen)> {
        let begun = Instant::now();
        loop {
            let left = match self.step(root, reader) {
                Ok(false) => None,
                Ok(true) => Some(std::mem::take(&mut self.left)),
                Err(obstacle) => {
                    let why = format!("what it read before stays in memory: {obstacle}");
                    Some(BTreeMap::from([(why, 1)]))
                }
            };
            if let Some(left) = left {
                return Some((left, self.take_seen()));
            }
            if begun.elapsed() >= SLICE {
                return None;
            }
        }
    }

    /// Results for other processes: new ones, and old ones for processes not checked this time.
    pub(super) fn take_seen(&mut self) -> Seen {
        let mut seen = std::mem::take(&mut self.seen);
        for (pid, (doings, inodes)) in std::mem::take(&mut self.before).processes {
            // The start time reveals a reused number. A complete check leaves out ended processes.
            if self.others.as_ref().is_none_or(|others| others.contains(&pid)) {
                seen.keep(pid, doings, inodes.into_vec());
            }
        }
        seen
    }

    /// How far the reader is, for the next time.
    pub(super) fn take_rounds(&mut self) -> Rounds {
        std::mem::take(&mut self.rounds)
    }

    #[cfg(test)]
    pub(super) fn note_for_a_test(&mut self) {
        let at = Positions {
            hindmost: 0,
            foremost: 0,
        };
        self.rounds.note((1, 1, 1, 1), 0, at, None);
    }

    #[cfg(test)]
    pub(super) fn looks_so_far(&self) -> u64 {
        self.rounds.looks
    }

    /// Number of files whose part ahead was dropped, too.
    pub(super) fn rounds_dropped(&self) -> usize {
        self.rounds_dropped
    }

    /// Bytes of files handled, whether they were in memory or not.
    pub(super) fn given(&self) -> u64 {
        self.given
    }

    /// Steps done, and the total as far as is known.
    pub(super) fn steps(&self) -> (u64, u64) {
        let parts: u64 = self.files.values().map(Candidate::parts).sum();
        let waiting = self.own.len() + self.again.len() + self.others.as_ref().map_or(0, Vec::len);
        (self.steps, self.steps + waiting as u64 + parts + 1)
    }

    /// One step: one process, or one part of a file. True when it was the last one. The bounded reader ([`Reader`])
    /// does each step, so that a locked address space or a dead disk holds up nobody.
    fn step(&mut self, root: &Root, reader: &mut Reader) -> Result<bool, Obstacle> {
        self.steps += 1;
        let room = LOOKED_AT_MAX.saturating_sub(self.looked_at);
        if let Some(pid) = self.own.pop() {
            let (of, most) = (root.clone(), FILES_MAX.saturating_sub(self.files.len()));
            let rounds = self.rounds.clone();
            let look = reader.run(pid, self.patience, move || {
                look_at_reader(&of, pid, room, most, &rounds)
            })??;
            self.looked_at += look.looked_at;
            self.add(pid, look);
            return Ok(false);
        }
        if self.others.is_none() {
            // Only now the last position of its processes is known.
            let single = single(&self.positions, &self.doings);
            for (inode, file) in &mut self.files {
                if let Some(at) = self.positions.get(inode) {
                    file.aim(&mut self.rounds, *at, single);
                }
            }
            self.files.retain(|_, file| file.parts() > 0);
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
            let (of, before) = (root.clone(), self.before.processes.remove(&pid));
            let (doings, held, looked_at) =
                reader.run(pid, self.patience, move || held_by(&of, pid, before, room))??;
            self.looked_at += looked_at;
            for inode in &held {
                if self.files.remove(inode).is_some() {
                    self.leave(OF_OTHERS);
                }
            }
            if let Some(doings) = doings {
                self.seen.keep(pid, doings, held);
            }
            return Ok(false);
        }
        if let Some(pid) = self.again.pop() {
            let of = root.clone();
            let nothing = Rounds::default();
            match reader.run(pid, self.patience, move || {
                look_at_reader(&of, pid, LOOKED_AT_MAX, 0, &nothing)
            }) {
                Ok(Ok(look)) => self.see_again(look),
                // The first check is enough.
                Ok(Err(_)) | Err(_) => self.again.clear(),
            }
            return Ok(false);
        }
        self.give_back_a_part(reader)
    }

    fn leave(&mut self, why: &str) {
        *self.left.entry(why.to_owned()).or_default() += 1;
    }

    /// Adds the open files of one process of the reader.
    fn add(&mut self, pid: i32, look: Look) {
        for (why, count) in look.left {
            *self.left.entry(why.to_owned()).or_default() += count;
        }
        note(&mut self.positions, look.positions);
        self.doings.extend(look.doings);
        for (inode, found) in look.files {
            let file = Arc::new(found.file);
            self.held.0.push(Arc::clone(&file));
            self.files.entry(inode).or_insert(Candidate {
                identity: identity(&file),
                file,
                pid,
                mount: found.mount,
                to: 0,
                ahead: None,
                size: behind(found.length),
                length: found.length,
            });
        }
        self.leave_what_is_not_only_read(look.not_only_read);
    }

    /// Adds the second check of one process. Once all are checked, the range now behind the reader counts as well.
    fn see_again(&mut self, look: Look) {
        note(&mut self.positions_now, look.positions);
        self.mounts_now.extend(look.mounts);
        self.leave_what_is_not_only_read(look.not_only_read);
        self.doings_now.extend(look.doings);
        if self.again.is_empty() {
            let single = single(&self.positions_now, &self.doings_now);
            for (inode, file) in &mut self.files {
                // A file closed since gives no position, nor does another file of that number.
                let is_open = self.mounts_now.contains(&(*inode, file.mount));
                if let Some(now) = self.positions_now.get(inode).filter(|_| is_open) {
                    file.aim(&mut self.rounds, *now, single);
                }
            }
        }
    }

    fn leave_what_is_not_only_read(&mut self, inodes: BTreeSet<u64>) {
        self.not_only_read.extend(inodes);
        let before = self.files.len();
        self.files.retain(|inode, _| !self.not_only_read.contains(inode));
        for _ in self.files.len()..before {
            self.leave(NOT_ONLY_READ);
        }
    }

    /// Drops one part of one file; true when nothing is left. The ranges behind come first, of all files.
    fn give_back_a_part(&mut self, reader: &mut Reader) -> Result<bool, Obstacle> {
        let mut next = self.files.iter().find(|(_, c)| c.to > 0);
        next = next.or_else(|| self.files.iter().find(|(_, c)| c.parts() > 0));
        let Some(inode) = next.map(|(inode, _)| *inode) else {
            return Ok(true);
        };
        if self.given >= GIVEN_MAX {
            self.leave(TOO_LARGE);
            return Ok(true);
        }
        let Some(candidate) = self.files.get_mut(&inode) else {
            return Ok(true);
        };
        let is_ahead = candidate.to == 0;
        let Some((from, length)) = candidate.next() else {
            return Ok(true);
        };
        let file = Arc::clone(&candidate.file);
        // The negative number stands for the disk: if it hangs, the process can still be checked.
        let own = -candidate.pid;
        let dropped = reader
            .run(own, self.patience, move || {
                fadvise(&*file, from, Some(length), Advice::DontNeed)
            })
            .map_err(|_| Obstacle::Disk)?;
        if dropped.is_err() {
            self.files.remove(&inode);
            self.leave(REFUSED);
            return Ok(false);
        }
        self.given = self.given.saturating_add(length.get());
        if let Some(identity) = candidate.identity.filter(|_| is_ahead) {
            self.rounds_dropped += usize::from(candidate.parts() == 0);
            self.rounds.note_dropped(identity, from..from + length.get());
        }
        Ok(false)
    }
}

/// Open files of one process of the reader.
#[derive(Default)]
struct Look {
    /// Files that it has read a part of, by inode.
    files: BTreeMap<u64, Found>,
    /// All positions, including files that it has not read yet.
    positions: Vec<(u64, u64)>,
    /// Inodes that it has open on a disk, with the mount of each.
    mounts: Vec<(u64, u64)>,
    /// Bytes it has read, of all files, if its counters are readable.
    doings: Option<Single>,
    not_only_read: BTreeSet<u64>,
    left: BTreeMap<&'static str, u64>,
    looked_at: usize,
}

/// A file that the reader has open.
struct Found {
    file: OwnedFd,
    mount: u64,
    length: u64,
}

/// Checks the open files of a process of the reader. Opens at most `most` files: those much read before or now.
fn look_at_reader(
    root: &Root,
    pid: i32,
    room: usize,
    most: usize,
    rounds: &Rounds,
) -> Result<Look, Obstacle> {
    let mut look = Look::default();
    let mut read = Vec::new();
    // Read before anything is opened: opening a file of another machine may hang.
    let mounts = Mounts::of(root, pid).map_err(|why| Obstacle::Mounts { pid, why });
    let Some(mounts) = unless_ended(root, pid, mounts)? else {
        return Ok(look);
    };
    let open = each_open_file(root, pid, room, |number, inode, text| {
        if !is_open_for_reading_only(text) || has_lease(text) {
            look.not_only_read.insert(inode);
            return;
        }
        // A file without a position is not read by one.
        let at = parse_position(text).unwrap_or(0);
        look.positions.push((inode, at));
        let mount = mounts.mount_of(text);
        look.mounts.extend(mount.map(|mount| (inode, mount)));
        if behind(at) > 0 || rounds.knows(inode) {
            if let Some(mount) = mount {
                read.push((number, inode, mount));
            } else {
                *look.left.entry(NOT_ON_DISK).or_default() += 1;
            }
        }
    })?;
    let mapped = each_mapped_file(root, pid, room.saturating_sub(open), |inode, _, _| {
        look.not_only_read.insert(inode);
    })?;
    look.looked_at = open + mapped;
    look.doings = Doings::read(root, pid).map(|doings| Single {
        pid,
        start_ticks: doings.start_ticks,
        read: doings.reads.1,
    });
    for (number, inode, mount) in read {
        if look.files.contains_key(&inode) {
            continue;
        }
        if look.files.len() >= most {
            *look.left.entry(TOO_MANY).or_default() += 1;
            continue;
        }
        // Otherwise another file has taken its number meanwhile, or it is no regular file.
        let path = root.path(&format!("/proc/{pid}/fd/{number}"));
        if let Some((file, length)) = open_read(root, &path, &mounts, inode) {
            look.files.insert(inode, Found { file, mount, length });
        }
    }
    Ok(look)
}

/// End of the range behind this position that may be dropped.
fn behind(position: u64) -> u64 {
    position.saturating_sub(KEEP) / STEP * STEP
}

/// Notes for each inode the positions of its openers.
fn note(all: &mut BTreeMap<u64, Positions>, positions: Vec<(u64, u64)>) {
    for (inode, at) in positions {
        let known = all.entry(inode).or_insert(Positions {
            hindmost: at,
            foremost: at,
        });
        known.hindmost = known.hindmost.min(at);
        known.foremost = known.foremost.max(at);
    }
}

/// The only process of a reader, if it has read much of one file at most among its open files.
fn single(positions: &BTreeMap<u64, Positions>, doings: &[Single]) -> Option<Single> {
    let read = positions.values().filter(|at| behind(at.foremost) > 0).count();
    match doings {
        [one] if read <= 1 => Some(*one),
        _ => None,
    }
}

/// Opens a process's file of that inode once more, if it is a regular file. Returns its length, too.
fn open_read(root: &Root, path: &Path, mounts: &Mounts, inode: u64) -> Option<(OwnedFd, u64)> {
    let (held, stat) = hold_regular(root, path, mounts).filter(|(_, stat)| stat.st_ino == inode)?;
    Some((open_held(&held)?, u64::try_from(stat.st_size).unwrap_or(0)))
}

/// `None` if the question failed because the process has ended.
pub(super) fn unless_ended<T>(
    root: &Root,
    pid: i32,
    answer: Result<T, Obstacle>,
) -> Result<Option<T>, Obstacle> {
    match answer {
        Ok(found) => Ok(Some(found)),
        Err(_) if !root.path(&format!("/proc/{pid}/fdinfo")).exists() || is_dead(root, pid) => Ok(None),
        Err(obstacle) => Err(obstacle),
    }
}

/// Whether a process has ended, or is ending and has closed its files. Its directories stay until its parent reaps it.
/// A process with other live threads is not dead.
fn is_dead(root: &Root, pid: i32) -> bool {
    /// `PF_EXITING` (Linux `include/linux/sched.h`), as proc_pid_stat(5) shows it.
    const EXITING: u64 = 0x4;
    let text = fs::read(root.path(&format!("/proc/{pid}/stat"))).unwrap_or_default();
    parse_stat(&text).is_some_and(|stat| {
        let is_over = stat.has_ended() || stat.flags & EXITING != 0;
        is_over && stat.threads <= 1
    })
}

/// Inodes that a process has open or mapped, its counters before the check, and the number of files and mappings
/// checked. That is none if the process was idle since its last check.
fn held_by(
    root: &Root,
    pid: i32,
    before: Option<(Doings, Box<[u64]>)>,
    room: usize,
) -> Result<(Option<Doings>, Vec<u64>, usize), Obstacle> {
    // Read first: activity during the check counts as later.
    let doings = Doings::read(root, pid);
    if let Some((_, inodes)) = before.filter(|(then, _)| doings == Some(*then)) {
        return Ok((doings, inodes.into_vec(), 0));
    }
    let mut held = Vec::new();
    let open = each_open_file(root, pid, room, |_, inode, _| held.push(inode))?;
    let mapped = each_mapped_file(root, pid, room.saturating_sub(open), |inode, _, _| {
        held.push(inode)
    })?;
    if open + mapped == 0 && pid != FIRST {
        // A leader that has ended shows no files, whatever its threads have open.
        let threads =
            fs::read_dir(root.path(&format!("/proc/{pid}/task"))).map_or(0, |list| list.take(2).count());
        if threads > 1 {
            return Err(Obstacle::Headless(pid));
        }
    }
    held.sort_unstable();
    held.dedup();
    Ok((doings, held, open + mapped))
}

/// Calls back for each open file with a name on a disk: its number, its inode and its `fdinfo` text. Returns the number
/// of all open files. A process that has ended has none.
pub(super) fn each_open_file(
    root: &Root,
    pid: i32,
    room: usize,
    mut see: impl FnMut(i32, u64, &[u8]),
) -> Result<usize, Obstacle> {
    let Some(list) = unless_gone(pid, fs::read_dir(root.path(&format!("/proc/{pid}/fd"))))? else {
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
        if count >= OPEN_MAX {
            return Err(Obstacle::Open(pid));
        }
        count += 1;
        // Reading the name does not involve the file's server.
        let name = unless_gone(pid, fs::read_link(entry.path()))?;
        let Some(name) = name.as_ref().map(|name| name.as_os_str().as_bytes()) else {
            continue;
        };
        if !may_be_on_disk(name) {
            continue;
        }
        // Closed meanwhile.
        let text = fs::read(root.path(&format!("/proc/{pid}/fdinfo/{number}")));
        let Some(text) = unless_gone(pid, text)? else {
            continue;
        };
        see(number, parse_inode(&text).ok_or(Obstacle::Untold)?, &text);
    }
    Ok(count)
}

/// Calls back for each file mapping: inode, device, and addresses as the kernel writes them. Returns the count.
pub(super) fn each_mapped_file(
    root: &Root,
    pid: i32,
    room: usize,
    mut see: impl FnMut(u64, &[u8], &[u8]),
) -> Result<usize, Obstacle> {
    /// The most that the kernel writes at one time.
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
        let mut fields = words(&line);
        let range = fields.next().unwrap_or_default();
        let device = fields.nth(2).unwrap_or_default();
        if let Some(inode) = fields.next().and_then(number).filter(|inode| *inode != 0) {
            see(inode, device, range);
        }
    }
}

/// `None` when the answer is gone, or never was there: a kernel thread has no memory. Process 1 may keep even root from
/// looking. It starts others, and works on no large files.
fn unless_gone<T>(pid: i32, answer: io::Result<T>) -> Result<Option<T>, Obstacle> {
    match answer {
        Ok(found) => Ok(Some(found)),
        Err(e) if e.kind() == io::ErrorKind::NotFound || e.raw_os_error() == Some(libc::ESRCH) => Ok(None),
        Err(e) if pid == FIRST && e.kind() == io::ErrorKind::PermissionDenied => Ok(None),
        Err(why) => Err(Obstacle::Process { pid, why }),
    }
}

/// All processes of that kind except this one. Homeostat's own open files come from here, or are checked elsewhere.
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

/// Whether all processes of the machine are visible and can be checked.
fn sees_everybody(root: &Root) -> bool {
    let namespace = fs::read_link(root.link_path("/proc/self/ns/pid"));
    namespace.is_ok_and(|name| name.as_os_str() == PROCESSES_OF_THE_MACHINE) && may(root, CAP_SYS_PTRACE)
}

#[cfg(test)]
mod tests {
    use super::*;
    use homeostat_kernel::testing::tree;
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
            /// `TMPFS_MAGIC` (include/uapi/linux/magic.h).
            const IN_MEMORY: u64 = 0x0102_1994;
            let kind = rustix::fs::statfs(disk.path()).unwrap().f_type as u64;
            if kind == IN_MEMORY {
                eprintln!("skipped: the tests do not lie on a disk");
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
            let mounts = "1 0 98:0 / / rw - ext4 /dev/x rw\n2 1 0:9 / /far rw - nfs4 host:/ rw\n";
            fs::write(self.root.path(&format!("/proc/{pid}/mountinfo")), mounts).unwrap();
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
            self.choose_after(own, Seen::default()).0
        }

        /// The same, after an earlier look at others; with what was seen of them.
        fn choose_after(&self, own: &[i32], before: Seen) -> ((Vec<u64>, Vec<String>), Seen) {
            let mut giving = GivingBack::new(own.iter().copied().collect(), before, Rounds::default());
            let mut reader = Reader::default();
            for _ in 0..1000 {
                let others_are_known = giving.others.as_ref().is_some_and(Vec::is_empty);
                if giving.own.is_empty() && others_are_known && giving.again.is_empty() {
                    break;
                }
                match giving.step(&self.root, &mut reader) {
                    Ok(false) => {}
                    Ok(true) => break,
                    Err(obstacle) => return ((Vec::new(), vec![obstacle.to_string()]), giving.take_seen()),
                }
            }
            let files = giving.files.values().map(|c| c.to / MIB).filter(|mib| *mib > 0);
            let files = files.collect();
            let seen = giving.take_seen();
            ((files, giving.left.into_keys().collect()), seen)
        }

        /// What the kernel tells of a process: its start, its page faults and its CPU time.
        fn has_done(&self, pid: i32, start: u64, faults: u64, cpu: u64) {
            let text =
                format!("{pid} (a) b) S 1 1 1 0 -1 0 {faults} 0 0 0 {cpu} 0 0 0 20 0 1 0 {start} 9 9\n");
            fs::create_dir_all(self.root.path(&format!("/proc/{pid}"))).unwrap();
            fs::write(self.root.path(&format!("/proc/{pid}/stat")), text).unwrap();
            self.has_read(pid, 0);
        }

        fn has_read(&self, pid: i32, bytes: u64) {
            let text = format!("rchar: {bytes}\nwchar: 9\nsyscr: 3\nsyscw: 4\nread_bytes: 0\n");
            fs::write(self.root.path(&format!("/proc/{pid}/io")), text).unwrap();
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

    /// What would be dropped of one file of 100 MiB, in MiB, when its reader moves on while the others are looked at.
    fn chosen_when_it_moves(scene: &Scene, from: u64, then: impl FnOnce(&Path)) -> (Vec<u64>, Vec<String>) {
        chosen_when_they_move(scene, &[READER], from, then)
    }

    /// The same, of a reader of several processes, all of which are there at first.
    fn chosen_when_they_move(
        scene: &Scene,
        own: &[i32],
        from: u64,
        then: impl FnOnce(&Path),
    ) -> (Vec<u64>, Vec<String>) {
        let big = scene.file("big", 100);
        for pid in own {
            scene.opens(*pid, 3, &big, from * MIB, READS);
        }
        let mut giving = GivingBack::new(own.iter().copied().collect(), Seen::default(), Rounds::default());
        let mut reader = Reader::default();
        while !giving.others.as_ref().is_some_and(Vec::is_empty) {
            assert!(!giving.step(&scene.root, &mut reader).unwrap());
        }
        for pid in own {
            for directory in ["fd", "fdinfo"] {
                fs::remove_file(scene.root.path(&format!("/proc/{pid}/{directory}/3"))).unwrap();
            }
        }
        then(&big);
        while !giving.again.is_empty() {
            assert!(!giving.step(&scene.root, &mut reader).unwrap());
        }
        let meant = |c: &Candidate| c.to + c.ahead.as_ref().map_or(0, |ahead| ahead.end - ahead.start);
        let files = giving.files.values().map(|c| meant(c) / MIB).collect();
        (files, giving.left.into_keys().collect())
    }

    #[test]
    fn what_had_been_read_ahead_for_the_reader_is_dropped_once_it_lies_behind() {
        let Some(scene) = Scene::new() else { return };
        // It went on, a little and to the end; it went back a little; it turned round.
        for (from, to, chosen) in [
            (41, 61, 60),
            (41, 300, 98),
            (41, 39, 40),
            (41, 5, 4 + 20),
            (41, 0, 24),
        ] {
            let moved = |path: &Path| scene.opens(READER, 3, path, to * MIB, READS);
            assert_eq!(chosen_when_it_moves(&scene, from, moved), (vec![chosen], vec![]));
            fs::remove_dir_all(scene.root.path(&format!("/proc/{READER}"))).unwrap();
        }
        // One of two went on and the other one has only begun: the last of them counts, but for what was behind all before.
        let moved = |path: &Path| {
            scene.opens(READER, 3, path, 61 * MIB, READS);
            scene.opens(READER, 4, path, 0, READS);
        };
        assert_eq!(chosen_when_it_moves(&scene, 41, moved), (vec![40], vec![]));
        fs::remove_dir_all(scene.root.path(&format!("/proc/{READER}"))).unwrap();
        // One of two processes went on and the other one stays, or is not seen again: whichever is looked at first.
        for is_seen in [true, false] {
            for (ahead, behind) in [(READER, SECOND), (SECOND, READER)] {
                let moved = |path: &Path| {
                    scene.opens(ahead, 3, path, 61 * MIB, READS);
                    scene.opens(behind, 3, path, 41 * MIB, READS);
                    if !is_seen {
                        fs::remove_file(scene.root.path(&format!("/proc/{behind}/mountinfo"))).unwrap();
                    }
                };
                let chosen = chosen_when_they_move(&scene, &[READER, SECOND], 41, moved);
                assert_eq!(chosen, (vec![40], vec![]));
                for pid in [READER, SECOND] {
                    fs::remove_dir_all(scene.root.path(&format!("/proc/{pid}"))).unwrap();
                }
            }
        }
        // It closed the file, and has another one open that has the same number on another mount.
        let another = |path: &Path| {
            let inode = fs::metadata(path).unwrap().ino();
            let text = format!("pos:\t{}\nflags:\t{READS}\nmnt_id:\t2\nino:\t{inode}\n", 61 * MIB);
            scene.tells(READER, 3, path, &text);
        };
        assert_eq!(chosen_when_it_moves(&scene, 41, another), (vec![40], vec![]));
        fs::remove_dir_all(scene.root.path(&format!("/proc/{READER}"))).unwrap();
        // Of two, one has ended and nobody has waited for it: the other one tells.
        let dead = scene.root.path("/proc/5000002");
        fs::create_dir_all(dead.join("fdinfo")).unwrap();
        let stat = "5000002 (tar) Z 1 1 1 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 7 0 0\n";
        fs::write(dead.join("stat"), stat).unwrap();
        // … or is about to, and has let go of its files.
        for stat in [
            stat.to_owned(),
            stat.replace("Z 1 1 1 0 -1 0", "D 1 1 1 0 -1 4194308"),
        ] {
            fs::write(dead.join("stat"), stat).unwrap();
            let look = look_at_reader(&scene.root, SECOND, 100, 100, &Rounds::default()).unwrap();
            assert!(look.positions.is_empty() && look.files.is_empty());
        }
        // A leader whose threads live on is none that has ended.
        fs::write(dead.join("stat"), stat.replace("20 0 1 0", "20 0 2 0")).unwrap();
        let look = look_at_reader(&scene.root, SECOND, 100, 100, &Rounds::default());
        assert!(matches!(look, Err(Obstacle::Mounts { pid: SECOND, .. })));
        fs::remove_dir_all(&dead).unwrap();
        // It closed the file; it has ended; it does not let itself be looked at; it began to write to the file.
        assert_eq!(chosen_when_it_moves(&scene, 41, |_| ()), (vec![40], vec![]));
        let ended = |_: &Path| fs::remove_dir_all(scene.root.path(&format!("/proc/{READER}"))).unwrap();
        assert_eq!(chosen_when_it_moves(&scene, 41, ended), (vec![40], vec![]));
        let hidden = |_: &Path| {
            fs::remove_file(scene.root.path(&format!("/proc/{READER}/mountinfo"))).unwrap();
        };
        assert_eq!(chosen_when_it_moves(&scene, 41, hidden), (vec![40], vec![]));
        let writes = |path: &Path| scene.opens(READER, 3, path, 61 * MIB, "0100002");
        let left = vec![NOT_ONLY_READ.to_owned()];
        assert_eq!(chosen_when_it_moves(&scene, 41, writes), (vec![], left));
    }

    /// Looks at a reader of one file of 200 MiB in one pass after the other, at positions in MiB, each with what that process has
    /// read in all; returns what each would drop, in MiB: what lies behind it, and what lies ahead.
    fn passes(
        scene: &Scene,
        rounds: &mut Rounds,
        looks: &[&[(i32, i32, u64, u64)]],
    ) -> Vec<Option<(u64, Option<Range<u64>>)>> {
        let big = scene.disk.path().join("round");
        if !big.exists() {
            scene.file("round", 200);
        }
        let in_mib = |range: &Range<u64>| range.start / MIB..range.end / MIB;
        let mut passes = Vec::new();
        for open in looks {
            let own = open.iter().map(|(pid, ..)| *pid).collect();
            for (pid, number, at, read) in *open {
                scene.opens(*pid, *number, &big, at * MIB, READS);
                scene.has_done(*pid, 7, 5, 5);
                scene.has_read(*pid, read * MIB);
            }
            let mut giving = GivingBack::new(own, Seen::default(), std::mem::take(rounds));
            let mut reader = Reader::default();
            while !giving.others.as_ref().is_some_and(Vec::is_empty) || !giving.again.is_empty() {
                if giving.step(&scene.root, &mut reader).unwrap() {
                    break;
                }
            }
            let inode = fs::metadata(&big).unwrap().ino();
            let meant = giving.files.get(&inode).filter(|c| c.parts() > 0);
            passes.push(meant.map(|c| (c.to / MIB, c.ahead.as_ref().map(in_mib))));
            *rounds = giving.take_rounds();
            for (pid, ..) in *open {
                let _ = fs::remove_dir_all(scene.root.path(&format!("/proc/{pid}")));
            }
        }
        passes
    }

    #[test]
    fn what_a_reader_that_goes_round_has_left_ahead_of_it_is_dropped() {
        let Some(scene) = Scene::new() else { return };
        let at = |mib, read| [(READER, 3, mib, read)];
        let looks = |looks: &[&[(i32, i32, u64, u64)]]| passes(&scene, &mut Rounds::default(), looks);
        // On, and back after so much that it has passed by the end: what is just being read ahead for it stays. Also where it has
        // hardly begun, and then wherever it is.
        let seen = looks(&[
            &at(41, 41),
            &at(161, 161),
            &at(21, 221),
            &at(0, 400),
            &at(121, 521),
        ]);
        let expected = [
            Some((40, None)),
            Some((160, None)),
            Some((20, Some(36..198))),
            Some((0, Some(16..198))),
            Some((120, Some(136..198))),
        ];
        assert_eq!(seen, expected);
        // Back, but it has not read so much: what it was seen to have read. A little less is for what is not told in one moment.
        let seen = looks(&[&at(161, 161), &at(21, 161 + 60 - 17)]);
        assert_eq!(seen[1], Some((20, Some(36..160))));
        let seen = looks(&[&at(161, 161), &at(21, 161 + 60 - 16)]);
        assert_eq!(seen[1], Some((20, Some(36..198))));
        // Further on is no round, whatever it has read; nor is a little back.
        assert_eq!(looks(&[&at(21, 21), &at(41, 600)])[1], Some((40, None)));
        assert_eq!(looks(&[&at(41, 41), &at(40, 600)])[1], Some((38, None)));
        // What was never seen further on has nothing ahead.
        assert_eq!(looks(&[&at(0, 0), &at(0, 600)]), [None, None]);
        // Another process of the same reader begins anew when the first has ended, also where nothing is open in between, and
        // whatever it has read before.
        let second = [(SECOND, 3, 21, 900)];
        assert_eq!(looks(&[&at(161, 161), &second])[1], Some((20, Some(36..160))));
        assert_eq!(
            looks(&[&at(161, 161), &[], &second])[2],
            Some((20, Some(36..160)))
        );
        // While the first goes on, what it has brought is of use to the second.
        let both = [(READER, 3, 171, 171), (SECOND, 3, 21, 21)];
        assert_eq!(looks(&[&at(161, 161), &both])[1], Some((20, None)));
        // Two processes: which of them has read what is not known.
        let both = |a, b, read| [(READER, 3, a, read), (SECOND, 3, b, read)];
        let seen = looks(&[&both(161, 171, 200), &both(21, 31, 900)]);
        assert_eq!(seen[1], Some((20, Some(46..160))));
        // Two that read a half each: the hindmost counts for what all have read, and the foremost for what lies ahead.
        let halves = |a, b| [(READER, 3, a, 182), (READER, 4, b, 182)];
        let seen = looks(&[&halves(91, 191), &halves(11, 111), &halves(11, 31)]);
        let expected = [Some((90, None)), Some((10, None)), Some((10, Some(46..90)))];
        assert_eq!(seen, expected);
        // With a second file there is no saying of which it has read so much.
        let other = scene.file("other", 200);
        let mut rounds = Rounds::default();
        passes(&scene, &mut rounds, &[&at(161, 161)]);
        scene.opens(READER, 4, &other, 41 * MIB, READS);
        let seen = passes(&scene, &mut rounds, &[&at(21, 900)]);
        assert_eq!(seen, [Some((20, Some(36..160)))]);
    }

    #[test]
    fn another_file_of_that_number_was_not_gone_round() {
        const SIZE: u64 = 200 * MIB;
        let file = |born| (1, 7, born, 0);
        let at = |mib| Positions {
            hindmost: mib * MIB,
            foremost: mib * MIB,
        };
        let in_mib = |range: Option<Range<u64>>| range.map(|range| range.start / MIB..range.end / MIB);
        let mut rounds = Rounds::default();
        rounds.note(file(1), SIZE, at(161), None);
        rounds.note(file(1), SIZE, at(21), None);
        assert_eq!(in_mib(rounds.ahead(file(1), SIZE, at(21))), Some(36..160));
        rounds.note(file(2), SIZE, at(21), None);
        assert_eq!(rounds.ahead(file(2), SIZE, at(21)), None);
        assert!(rounds.knows(7) && !rounds.knows(8));
        // It was cut, and has grown again.
        rounds.note(file(1), 100 * MIB, at(21), None);
        assert_eq!(in_mib(rounds.ahead(file(1), SIZE, at(1))), Some(16..20));
        // What was seen last is kept.
        for inode in 0..2 * ROUNDS_MAX as u64 {
            rounds.note((2, inode, 0, 0), MIB, at(1), None);
        }
        assert_eq!(rounds.ways.len(), ROUNDS_MAX);
        let last = 2 * ROUNDS_MAX as u64 - 1;
        assert!(rounds.knows(last) && !rounds.knows(100));
    }

    #[test]
    fn what_lies_ahead_is_dropped_once_while_the_reader_is_contained() {
        const FILE: Identity = (1, 7, 1, 1);
        const SIZE: u64 = 400 * MIB;
        let at = |mib| Positions {
            hindmost: mib * MIB,
            foremost: mib * MIB,
        };
        let mut rounds = Rounds::default();
        rounds.note(FILE, SIZE, at(201), None);
        rounds.note(FILE, SIZE, at(21), None);
        let ahead = |rounds: &Rounds, mib| {
            let range = rounds.ahead(FILE, SIZE, at(mib));
            range.map(|range| range.start / MIB..range.end / MIB)
        };
        assert_eq!(ahead(&rounds, 21), Some(36..200));
        // A pass that is cut off goes on where it was.
        rounds.note_dropped(FILE, 136 * MIB..200 * MIB);
        rounds.note_dropped(FILE, 72 * MIB..136 * MIB);
        assert_eq!(ahead(&rounds, 21), Some(36..72));
        rounds.note_dropped(FILE, 36 * MIB..72 * MIB);
        assert_eq!(ahead(&rounds, 21), None);
        // It was seen further ahead since: that much.
        rounds.note(FILE, SIZE, at(301), None);
        assert_eq!(ahead(&rounds, 21), Some(200..300));
        rounds.note_dropped(FILE, 236 * MIB..300 * MIB);
        assert_eq!(ahead(&rounds, 21), Some(36..236));
        // Contained anew: all of it.
        rounds.begin();
        assert_eq!(ahead(&rounds, 21), Some(36..300));
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
    fn who_has_done_nothing_since_is_not_looked_at_again() {
        let Some(scene) = Scene::new() else { return };
        let (big, second) = (scene.file("big", 100), scene.file("second", 100));
        scene.opens(READER, 3, &big, 81 * MIB, READS);
        scene.opens(OTHER, 3, &second, 0, READS);
        scene.has_done(OTHER, 7, 5, 5);
        let (chosen, seen) = scene.choose_after(&[READER], Seen::default());
        assert_eq!(chosen, (vec![80], vec![]));
        let inode = fs::metadata(&second).unwrap().ino();
        assert_eq!(*seen.processes[&OTHER].1, [inode]);
        // What it has open is known, also where the reader comes to that file only now …
        scene.opens(READER, 4, &second, 21 * MIB, READS);
        let of_others = vec![OF_OTHERS.to_owned()];
        // … and it has not opened the first one, since it has not run: a test can do that, a process cannot.
        scene.opens(OTHER, 4, &big, 0, READS);
        let (chosen, _) = scene.choose_after(&[READER], seen);
        assert_eq!(chosen, (vec![80], of_others.clone()));
        // It has run, had a fault, or is another process: looked at again.
        for (start, faults, cpu, bytes) in [(7, 5, 6, 0), (7, 6, 5, 0), (8, 5, 5, 0), (7, 5, 5, 1)] {
            let doings = Doings {
                start_ticks: 7,
                faults: 5,
                cpu_ticks: 5,
                reads: (3, 0),
            };
            let before = Seen {
                processes: BTreeMap::from([(OTHER, (doings, [inode].into()))]),
                inodes: 1,
            };
            scene.has_done(OTHER, start, faults, cpu);
            scene.has_read(OTHER, bytes);
            let (chosen, _) = scene.choose_after(&[READER], before);
            assert_eq!(
                chosen,
                (vec![], of_others.clone()),
                "{start} {faults} {cpu} {bytes}"
            );
        }
        // A look that ends before it comes to somebody keeps what was known of him; one that has seen all forgets who is gone.
        let doings = Doings::read(&scene.root, OTHER).unwrap();
        let known = || Seen {
            processes: BTreeMap::from([
                (OTHER, (doings, [inode].into())),
                (5_000_077, (doings, [].into())),
            ]),
            inodes: 1,
        };
        let mut giving = GivingBack::new(BTreeSet::from([READER]), known(), Rounds::default());
        assert_eq!(giving.take_seen().processes.len(), 2, "nothing was looked at");
        let (_, seen) = scene.choose_after(&[READER], known());
        assert_eq!(seen.processes.keys().collect::<Vec<_>>(), [&OTHER]);
        // One that does not tell what it has done is looked at each time.
        fs::remove_file(scene.root.path(&format!("/proc/{OTHER}/stat"))).unwrap();
        let (_, seen) = scene.choose_after(&[READER], seen);
        assert!(!seen.processes.contains_key(&OTHER));
    }

    #[test]
    fn what_is_kept_of_others_is_bounded() {
        let mut seen = Seen::default();
        let doings = Doings {
            start_ticks: 1,
            faults: 0,
            cpu_ticks: 0,
            reads: (0, 0),
        };
        for pid in 0..10 {
            seen.keep(pid, doings, vec![7; SEEN_MAX / 4]);
        }
        assert_eq!((seen.processes.len(), seen.inodes), (4, SEEN_MAX));
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
            &format!("pos:\t{}\nflags:\t{READS}\nmnt_id:\t1\nino:\t{inode}\n", 81 * MIB),
        );
        assert_eq!(scene.choose(&[READER]), (vec![], vec![]));
        // A regular file of the kernel's own.
        scene.opens(READER, 6, Path::new("/proc/version"), 81 * MIB, READS);
        assert_eq!(scene.choose(&[READER]), (vec![], vec![]));
        // One of another machine: it is not so much as asked for.
        let text = format!("pos:\t{}\nflags:\t{READS}\nmnt_id:\t2\nino:\t{inode}\n", 81 * MIB);
        scene.tells(READER, 7, &seen, &text);
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
        let inode = fs::metadata(&big).unwrap().ino();
        let (_, held, looked_at) = held_by(&scene.root, OTHER, None, 7).unwrap();
        assert_eq!((held, looked_at), (vec![inode], 7));
        for room in 0..7 {
            let answer = held_by(&scene.root, OTHER, None, room);
            assert!(matches!(answer, Err(Obstacle::TooMany)), "{answer:?}");
        }
        // Of more files than are kept in mind the rest is told.
        let look = look_at_reader(&scene.root, OTHER, 100, 0, &Rounds::default()).unwrap();
        assert!(look.files.is_empty() && look.not_only_read.len() == 1);
        let (_, held, _) = held_by(&scene.root, 5_000_099, None, 7).unwrap();
        assert!(held.is_empty(), "a process that has ended");
    }

    #[test]
    fn of_ten_thousand_open_files_a_few_are_given_back_and_none_that_another_process_has_open() {
        const FILES: i32 = 10_000;
        let Some(scene) = Scene::new() else { return };
        let (mut paths, mut shared) = (BTreeMap::new(), BTreeSet::new());
        for number in 3..3 + FILES {
            let path = scene.file(&number.to_string(), 6);
            let inode = fs::metadata(&path).unwrap().ino();
            scene.opens(READER, number, &path, 5 * MIB, READS);
            if number % 2 == 0 {
                scene.opens(OTHER, number, &path, 0, READS);
                shared.insert(inode);
            }
            paths.insert(inode, path);
        }
        // Whether the first page of a file is in memory.
        let is_there = |inode: &u64| {
            let file = fs::File::open(&paths[inode]).unwrap();
            let pages = homeostat_kernel::cache::residency(&file, 0, 1).unwrap();
            pages.contains(&true)
        };
        // Gives back once; whether what the other one has open is there before and after that.
        let gives_back = || {
            let mut giving = GivingBack::new(BTreeSet::from([READER]), Seen::default(), Rounds::default());
            // However busy the machine is.
            giving.patience = Duration::from_secs(3600);
            let mut reader = Reader::default();
            // All are looked at, and no more are opened than are kept in mind.
            assert!(!giving.step(&scene.root, &mut reader).unwrap());
            assert_eq!(
                (giving.looked_at, giving.files.len(), giving.held.0.len()),
                (FILES as usize, FILES_MAX, FILES_MAX)
            );
            let chosen: BTreeSet<u64> = giving.files.keys().copied().collect();
            for inode in &chosen {
                let file = fs::File::open(&paths[inode]).unwrap();
                std::os::unix::fs::FileExt::read_exact_at(&file, &mut [0; 1], 0).unwrap();
            }
            let (theirs, alone): (BTreeSet<u64>, BTreeSet<u64>) =
                chosen.into_iter().partition(|inode| shared.contains(inode));
            let were_there = theirs.iter().chain(&alone).all(is_there);
            let left = loop {
                if let Some((left, _)) = giving.go_on(&scene.root, &mut reader) {
                    break left;
                }
                assert!(giving.files.len() <= FILES_MAX);
            };
            assert!(giving.files.keys().eq(&alone));
            assert!(!alone.iter().any(is_there));
            assert_eq!(giving.given(), 4 * MIB * alone.len() as u64);
            let told = |why: &str| left.get(why).copied().unwrap_or(0);
            assert_eq!(told(TOO_MANY), FILES as u64 - FILES_MAX as u64);
            assert_eq!(told(OF_OTHERS), theirs.len() as u64);
            // A slice may end after each of them: the reader, the list of the others, the other one, the reader once more, each
            // file that is dropped, and the last.
            assert_eq!(giving.steps, 4 + alone.len() as u64 + 1);
            were_there && theirs.iter().all(is_there)
        };
        // Where memory is short the kernel may take one of these pages meanwhile. What is dropped is gone each time. (To keep them mapped
        // would show nothing: what is mapped is not dropped.)
        assert!((0..5).any(|_| gives_back()), "what the other one has open stays");
    }

    #[test]
    fn what_lies_behind_goes_before_what_lies_ahead() {
        let Some(scene) = Scene::new() else { return };
        let (round, other) = (scene.file("round", 201), scene.file("other", 100));
        scene.opens(READER, 3, &round, 161 * MIB, READS);
        scene.opens(READER, 4, &other, 21 * MIB, READS);
        let reader = &mut Reader::default();
        let pass = |rounds, reader: &mut Reader| {
            let mut giving = GivingBack::new(BTreeSet::from([READER]), Seen::default(), rounds);
            let mut left = Vec::new();
            while !giving.step(&scene.root, reader).unwrap() {
                let (done, total) = giving.steps();
                assert!(done < total);
                if giving.again.is_empty() {
                    left.push(giving.files.values().map(Candidate::parts).sum::<u64>());
                }
            }
            left.dedup();
            (
                giving.take_rounds(),
                giving.given() / MIB,
                giving.rounds_dropped(),
                left,
            )
        };
        let (rounds, given, dropped, _) = pass(Rounds::default(), reader);
        assert_eq!((given, dropped), (160 + 20, 0));
        fs::remove_dir_all(scene.root.path(&format!("/proc/{READER}"))).unwrap();
        scene.opens(READER, 3, &round, 21 * MIB, READS);
        scene.opens(READER, 4, &other, 41 * MIB, READS);
        // 20 and 40 behind, 36 to 160 ahead.
        let (rounds, given, dropped, left) = pass(rounds, reader);
        assert_eq!((given, dropped), (20 + 40 + 124, 1));
        assert_eq!(left, [4, 3, 2, 1, 0]);
        // It is not gone through again before the reader is contained once more.
        let (mut rounds, given, dropped, _) = pass(rounds, reader);
        assert_eq!((given, dropped), (20 + 40, 0));
        rounds.begin();
        let (_, given, dropped, _) = pass(rounds, reader);
        assert_eq!((given, dropped), (20 + 40 + 124, 1));
    }

    #[test]
    fn it_is_dropped_in_parts_from_behind() {
        let Some(scene) = Scene::new() else { return };
        let path = scene.file("big", 200);
        let mut file = fs::OpenOptions::new().write(true).open(&path).unwrap();
        file.write_all(&[1; MIB as usize]).unwrap();
        file.sync_all().unwrap();
        scene.opens(READER, 3, &path, 141 * MIB, READS);
        let mut giving = GivingBack::new(BTreeSet::from([READER]), Seen::default(), Rounds::default());
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
        // Nothing is meant before all were looked at.
        assert_eq!(reached, [0, 140, 76, 12, 0]);
        assert_eq!(giving.given, 140 * MIB);
        let open = fs::File::open(&path).unwrap();
        let there = homeostat_kernel::cache::residency(&open, 0, MIB).unwrap();
        // A few pages stay that somebody holds at that moment (DAMON, compaction).
        let left = there.iter().filter(|p| **p).count();
        assert!(
            left * 10 < there.len(),
            "{left}: what was written to the disk is dropped"
        );
    }
}
