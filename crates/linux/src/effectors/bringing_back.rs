//! Bringing back what a program lost before the reader that took it was contained.
//!
//! A program that reads single pages at random (`pread`) brings back one page at a time, in minutes; a database does so in tens
//! of seconds (measured: docs/file-cache-notebook.md). What it lost is known: of each part of a file the kernel tells how many pages it
//! has taken (`cachestat(2)`, Linux 6.5). Of the files that the program has open or mapped those parts are read again, by a
//! process in the program's own group ([`Fetcher`]), so that they count where they did before and whoever limits the program limits
//! them.
//!
//! How long ago a page was taken the kernel does not tell (its measure of "recently" has gone by within a second of such a
//! reader). So where all that is missing from parts of which pages were taken fits into the room that there is, and is no more than
//! [`BLIND_MAX`], all of it is brought back. Otherwise only those parts are in whose [`NEIGHBOURHOOD`] some pages are in memory: nothing
//! stays there while such a reader is at work but what the program has just used, so those are the ones that it works on. Those with the most pages come
//! first, until the room is used up: what the limits of the group, and of all above it, leave, and at last the machine's own
//! memory, with the pages of files that nobody has used lately.
//!
//! What is read is counted by the pages that are not in memory, the ones between them that were never there included: a part of 128 KiB is
//! read whole. Files that the program reads past the file cache (`O_DIRECT`) have lost nothing there: what was taken of them
//! somebody else brought, such as a backup. The same may be so of other files, of which what the reader brought and what the program did
//! look alike.
//!
//! Files that are not on a disk of this machine are left alone, and programs in containers or delegated groups: no process of ours
//! enters those. So are files in memory that is a disk (DAX), of which the kernel takes what they are for pages that were taken. There is
//! nothing to put back: what was read are clean pages of files, of which the kernel takes what nobody uses.

use super::fetcher::{FetchError, Fetcher};
use super::giving_back::{Obstacle, each_mapped_file, each_open_file, unless_ended};
use super::identity::ProcessStat;
use super::memory_group::{MemoryGroup, hands_off, is_delegated};
use super::mounts::Mounts;
use super::page_dropping::{Held, has_lease, open_held, regular};
use crate::Root;
use crate::sensors::bytes::{hexadecimal, lines, number};
use crate::sensors::reader::{PATIENCE, Reader};
use crate::sys::cache::{Pages, pages_of};
use homeostat_model::{ActionId, ProcessId};
use rustix::fd::{AsRawFd, OwnedFd};
use rustix::fs::{AtFlags, Mode, OFlags, StatxAttributes, StatxFlags, open, statx};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fs;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// One slice of work.
const SLICE: Duration = Duration::from_millis(20);
/// Processes of the program that are looked at, oldest first.
pub(super) const PROCESSES_MAX: usize = 64;
/// Its files that are looked at.
const FILES_MAX: usize = 256;
/// Open files and mappings of all its processes that are looked at.
const LOOKED_AT_MAX: usize = 100_000;
/// Smaller files are back after a few reads of the program's own.
const SIZE_MIN: u64 = 256 << 10;
/// What the kernel is asked about at one time: some milliseconds.
const RANGE: u64 = 256 << 20;
/// Ranges are divided so far.
const DIVISIONS: [u64; 3] = [32 << 20, NEIGHBOURHOOD, PART];
/// A neighbourhood is either worked on or not.
const NEIGHBOURHOOD: u64 = 2 << 20;
/// What is read whole if pages of it were taken.
const PART: u64 = 128 << 10;
/// What is read at one time.
const ASKED_MAX: u64 = 2 << 20;
/// A neighbourhood of which the kernel has taken so many of so many pages …
const TAKEN: (u64, u64) = (3, 4);
/// … and of which so many of so many are left at most is read anew as a whole.
const LEFT: (u64, u64) = (1, 8);
/// So far before what is read next what is left of such neighbourhoods is dropped: further than disks read ahead as a rule (the file
/// system's `read_ahead_kb`: 128 KiB to 8 MiB) …
const DROPPED_AHEAD: u64 = 16 << 20;
/// … and so much further at one time: to drop something waits for all CPUs.
const DROPPED_STEP: u64 = 8 << 20;
/// Ranges that are looked at, of all files together: 256 GiB.
const RANGES_MAX: usize = 1024;
/// Parts that are kept in mind: 16 GiB, and some megabytes of memory.
const PARTS_MAX: usize = 128 * 1024;
/// Most that is brought back where it is not known whether the program works on it.
const BLIND_MAX: u64 = 1 << 30;
/// Most that is brought back when the reader is contained …
pub(super) const BROUGHT_MAX: u64 = 8 << 30;
/// … and later, while it is.
pub(super) const BROUGHT_AGAIN_MAX: u64 = 1 << 30;
/// How long the disk may keep it waiting for an answer.
const DEADLINE: Duration = Duration::from_secs(10);
/// How long all of it may take when the reader is contained, which waits for it …
pub(super) const LONGEST: Duration = Duration::from_secs(10);
/// … and later, while it is.
pub(super) const LONGEST_AGAIN: Duration = Duration::from_secs(60);

const TOO_MANY: &str = "file that is not brought back: the program has more files open than are looked at";
const UNSEEN: &str = "process whose files are not brought back: it cannot be looked at now";
const UNTOLD: &str = "file that is not brought back: the kernel does not tell what was taken of it";
const TOO_LARGE: &str = "file of which a part is not looked at: the program has more than is looked at";
const IN_ANOTHER_GROUP: &str =
    "process whose files are not brought back: its memory counts in another group than that of the first";
const NO_ROOM: &str = "part of a file that is not brought back: there is no room for it";
const TOO_LONG: &str = "part of a file that is not brought back: it took too long";
const REFUSED: &str = "part of a file that is not brought back: it cannot be read";

/// Why nothing is brought back.
#[derive(Debug, thiserror::Error)]
enum Hindrance {
    #[error("{0}")]
    Group(String),
    #[error("the kernel does not tell what was taken of a file (cachestat, Linux 6.5): {0}")]
    Untold(std::io::Error),
    #[error("nothing came from the disk for {DEADLINE:?}")]
    Disk,
    #[error(transparent)]
    Fetch(#[from] FetchError),
}

/// A file of the program.
struct Found {
    file: Arc<OwnedFd>,
    size: u64,
    /// Up to here it has been looked at.
    looked: u64,
}

/// A part of which pages were taken.
#[derive(Clone)]
struct Part {
    file: Arc<OwnedFd>,
    range: Range<u64>,
    /// What of it is not in memory, in bytes.
    absent: u64,
    /// Pages of its neighbourhood that are.
    near: u64,
    /// It is a neighbourhood of which next to nothing is left, which is dropped and read with the rest.
    is_anew: bool,
}

/// What is being done.
enum Stage {
    /// Looking what the program has open and mapped, process by process.
    Looking(Vec<ProcessId>),
    /// Asking the kernel what was taken of these.
    Asking(Vec<Found>),
    /// Having it read, last part first.
    Fetching(Vec<Part>),
}

/// The work of bringing back, as far as it got.
pub(super) struct BringingBack {
    stage: Stage,
    /// For the sake of which action.
    action: ActionId,
    /// The program's group, and its inode.
    group: Option<(MemoryGroup, u64)>,
    /// By device and inode.
    files: BTreeMap<(u64, u64), Found>,
    seen: BTreeSet<Seen>,
    /// Inodes that a process reads past the file cache, and those that one has mapped.
    direct: BTreeSet<u64>,
    mapped: BTreeSet<u64>,
    looked_at: usize,
    ranges: usize,
    parts: Vec<Part>,
    /// So much is brought back at most, in bytes …
    most: u64,
    /// … and so much was asked for.
    asked: u64,
    /// So long it may take.
    longest: Duration,
    /// Since when it is read by the process that is asked now …
    since: Option<Instant>,
    /// … and since when at all.
    begun: Option<Instant>,
    /// When something was last answered, or nothing was waited for.
    heard: Instant,
    /// Parts that there was no room for, as it seems.
    no_room: u64,
    /// What was asked for and not answered yet, oldest first: the parts of each question.
    sent: VecDeque<Vec<Part>>,
    /// Who was to read it has ended once, and another one is asked.
    is_another: bool,
    /// The file that is read now, by its number here, and up to where what is left of it has been dropped.
    dropped: (i32, u64),
    /// What is left as it is, by reason.
    left: BTreeMap<String, u64>,
    steps: u64,
    /// The last of all that hold them: it closes them elsewhere.
    held: Held,
}

/// A file that was looked at: by its mount where it is open, by its device where it is mapped, and its inode.
type Seen = (Place, u64);

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Place {
    Mount(u64),
    Device(u64),
}

impl BringingBack {
    /// Begins with the processes of the program, oldest first; brings so many bytes back at most, and takes so long at most.
    pub(super) fn new(action: ActionId, mut members: Vec<ProcessId>, most: u64, longest: Duration) -> Self {
        members.truncate(PROCESSES_MAX);
        members.reverse();
        Self {
            stage: Stage::Looking(members),
            action,
            group: None,
            files: BTreeMap::new(),
            seen: BTreeSet::new(),
            direct: BTreeSet::new(),
            mapped: BTreeSet::new(),
            looked_at: 0,
            ranges: 0,
            parts: Vec::new(),
            most,
            asked: 0,
            longest,
            since: None,
            begun: None,
            heard: Instant::now(),
            no_room: 0,
            sent: VecDeque::new(),
            is_another: false,
            dropped: (-1, 0),
            left: BTreeMap::new(),
            steps: 0,
            held: Held::default(),
        }
    }

    /// One slice. When it is over: what was left as it is, by reason.
    pub(super) fn go_on(
        &mut self,
        root: &Root,
        reader: &mut Reader,
        fetcher: &mut Fetcher,
    ) -> Option<BTreeMap<String, u64>> {
        let begun = Instant::now();
        loop {
            match self.step(root, reader, fetcher) {
                Ok(Step::More) => {}
                Ok(Step::Wait) => return None,
                Ok(Step::Over) => {
                    fetcher.leave(root, self.action);
                    return Some(std::mem::take(&mut self.left));
                }
                Err(why) => {
                    fetcher.leave(root, self.action);
                    let why = format!("what the program lost is not brought back: {why}");
                    return Some(BTreeMap::from([(why, 1)]));
                }
            }
            if begun.elapsed() >= SLICE {
                return None;
            }
        }
    }

    /// Ends it where it is.
    pub(super) fn stop(&self, root: &Root, fetcher: &mut Fetcher) {
        fetcher.leave(root, self.action);
    }

    /// How much was asked for so far, in bytes.
    pub(super) fn asked(&self) -> u64 {
        self.asked
    }

    /// Steps done, and how many there are in all as far as is known.
    pub(super) fn steps(&self) -> (u64, u64) {
        let waiting = match &self.stage {
            Stage::Looking(members) => members.len(),
            Stage::Asking(files) => files.len(),
            Stage::Fetching(parts) => parts.len(),
        };
        (self.steps, self.steps + waiting as u64 + 1)
    }

    fn leave(&mut self, why: &str, count: u64) {
        if count > 0 {
            *self.left.entry(why.to_owned()).or_default() += count;
        }
    }

    fn step(&mut self, root: &Root, reader: &mut Reader, fetcher: &mut Fetcher) -> Result<Step, Hindrance> {
        self.steps += 1;
        match &mut self.stage {
            Stage::Looking(members) => match members.pop() {
                Some(process) => self.look_at(root, reader, process),
                None => {
                    let mut files = std::mem::take(&mut self.files);
                    let past_the_cache =
                        |inode| self.direct.contains(&inode) && !self.mapped.contains(&inode);
                    files.retain(|(_, inode), _| !past_the_cache(*inode));
                    self.stage = Stage::Asking(files.into_values().collect());
                    Ok(Step::More)
                }
            },
            Stage::Asking(files) => {
                let Some(found) = files.last_mut() else {
                    return self.choose(root);
                };
                let is_enough = self.ranges >= RANGES_MAX || self.parts.len() >= PARTS_MAX;
                if found.looked >= found.size || is_enough {
                    let is_whole = found.looked >= found.size;
                    files.pop();
                    self.leave(TOO_LARGE, u64::from(!is_whole));
                    return Ok(Step::More);
                }
                let range = found.looked..found.size.min(found.looked + RANGE);
                found.looked += RANGE;
                self.ranges += 1;
                let file = Arc::clone(&found.file);
                match taken_of(&file, range, &DIVISIONS, 0, &mut self.parts) {
                    Ok(()) => {}
                    Err(e) if e.raw_os_error() == Some(libc::ENOSYS) => return Err(Hindrance::Untold(e)),
                    // Of a file that cannot be written to, not even by root, the kernel tells only its owner.
                    Err(_) => {
                        files.pop();
                        self.leave(UNTOLD, 1);
                    }
                }
                Ok(Step::More)
            }
            Stage::Fetching(_) => match self.fetch(root, fetcher) {
                Err(Hindrance::Fetch(FetchError::Ended)) if !self.is_another => {
                    self.ask_another(root, fetcher);
                    Ok(Step::Wait)
                }
                step => step,
            },
        }
    }

    /// Adds what one process has open or mapped.
    fn look_at(&mut self, root: &Root, reader: &mut Reader, process: ProcessId) -> Result<Step, Hindrance> {
        let is_alive = ProcessStat::read(root, process)
            .is_ok_and(|stat| stat.start_ticks == process.start_ticks && !stat.ended);
        if !is_alive {
            return Ok(Step::More);
        }
        let group = group_of(root, process.pid)?;
        let inode = group.inode(root).unwrap_or(0);
        let (first, _) = self.group.get_or_insert_with(|| (group.clone(), inode));
        if *first != group {
            // What it lost would count where it did not before.
            self.leave(IN_ANOTHER_GROUP, 1);
            return Ok(Step::More);
        }
        let (of, pid, known) = (root.clone(), process.pid, self.seen.clone());
        let room = LOOKED_AT_MAX.saturating_sub(self.looked_at);
        let most = FILES_MAX.saturating_sub(self.files.len());
        let look = reader.run(pid, PATIENCE, move || look_at(&of, pid, room, most, known));
        match look {
            Ok(Ok(look)) => {
                self.looked_at += look.looked_at;
                self.seen = look.seen;
                self.direct.extend(look.direct);
                self.mapped.extend(look.mapped);
                self.held
                    .0
                    .extend(look.files.values().map(|found| Arc::clone(&found.file)));
                self.files.extend(look.files);
                self.leave(TOO_MANY, look.too_many);
            }
            // Others of its processes may have the same files open.
            Ok(Err(_)) | Err(_) => self.leave(UNSEEN, 1),
        }
        Ok(Step::More)
    }

    /// Decides what is brought back.
    fn choose(&mut self, root: &Root) -> Result<Step, Hindrance> {
        let parts = std::mem::take(&mut self.parts);
        let (Some((group, _)), false) = (&self.group, parts.is_empty()) else {
            return Ok(Step::Over);
        };
        let (chosen, too_many) = choose(parts, room(root, group).min(self.most));
        self.leave(NO_ROOM, too_many);
        self.stage = Stage::Fetching(chosen);
        Ok(Step::More)
    }

    /// Who was asked has ended; what that did not answer for another one is asked for. Not twice: it may be what it is asked for that ends it.
    fn ask_another(&mut self, root: &Root, fetcher: &mut Fetcher) {
        fetcher.leave(root, self.action);
        (self.is_another, self.since, self.heard) = (true, None, Instant::now());
        if let Stage::Fetching(parts) = &mut self.stage {
            for part in std::mem::take(&mut self.sent).into_iter().rev().flatten() {
                self.asked = self.asked.saturating_sub(part.absent);
                parts.push(part);
            }
        }
    }

    /// Has as many parts read as the disk takes now.
    fn fetch(&mut self, root: &Root, fetcher: &mut Fetcher) -> Result<Step, Hindrance> {
        let (Stage::Fetching(parts), Some((group, inode))) = (&mut self.stage, &self.group) else {
            return Ok(Step::Over);
        };
        if parts.is_empty() && self.since.is_none() {
            return Ok(Step::Over);
        }
        match self.since {
            // It has ended in between, and what it was told with it.
            Some(_) if !fetcher.works_for(self.action) => return Err(FetchError::Ended.into()),
            Some(_) => {}
            None => {
                if group.inode(root) != Some(*inode) {
                    return Err(Hindrance::Group(
                        "the program's control group is another one now".into(),
                    ));
                }
                if !fetcher.enter(root, self.action, group)? {
                    // It works for another program; that takes some seconds at most.
                    return Ok(Step::Wait);
                }
                self.since = Some(Instant::now());
            }
        }
        let begun = *self.begun.get_or_insert_with(Instant::now);
        let answers = fetcher.answers()?;
        let (mut waiting, now) = (answers.waiting, Instant::now());
        self.sent.drain(..self.sent.len().saturating_sub(answers.waiting));
        if answers.answered > 0 || waiting == 0 {
            self.heard = now;
        }
        let (mut too_long, mut no_room) = (0, answers.no_room);
        if begun.elapsed() > self.longest {
            // What it is at is waited for: it goes home by itself.
            too_long = parts.len() as u64;
            parts.clear();
        }
        self.no_room += answers.no_room;
        // Of one it may have been the disk, which could not read it.
        if self.no_room > 1 {
            no_room += parts.len() as u64;
            parts.clear();
        }
        // Others have grown meanwhile, the program itself among them: what it works on is not pushed out for what it has lost.
        let mut room = room(root, group).saturating_sub(answers.waiting_bytes);
        while let Some(part) = parts.last() {
            let (next, count) = run(parts, part);
            let length = next.end - next.start;
            if room < length {
                // As soon as nothing is on its way any more there is no more to come.
                if waiting == 0 {
                    no_room += parts.len() as u64;
                    parts.clear();
                }
                break;
            }
            let of = part.file.as_raw_fd();
            let done = if self.dropped.0 == of { self.dropped.1 } else { 0 };
            let dropped = dropped_before(parts, &next, done);
            match fetcher.ask(&part.file, &next, &dropped) {
                Ok(true) => self.dropped = (of, dropped.end),
                Ok(false) => break,
                Err(e) => return Err(e.into()),
            }
            room -= length;
            let sent = parts.split_off(parts.len() - count);
            for part in &sent {
                self.asked = self.asked.saturating_add(part.absent);
            }
            self.sent.push_back(sent);
            waiting += 1;
        }
        let is_over = parts.is_empty() && waiting == 0;
        self.leave(REFUSED, answers.refused);
        self.leave(TOO_LONG, too_long);
        self.leave(NO_ROOM, no_room);
        if is_over {
            return Ok(Step::Over);
        }
        if now.saturating_duration_since(self.heard) > DEADLINE {
            return Err(Hindrance::Disk);
        }
        Ok(Step::Wait)
    }
}

/// The range that is read in one go with the last of these parts, what follows without a gap, and how many parts that is.
fn run(parts: &[Part], last: &Part) -> (Range<u64>, usize) {
    let (mut range, mut count) = (last.range.clone(), 1);
    for part in parts.iter().rev().skip(1) {
        let follows = Arc::ptr_eq(&part.file, &last.file) && part.range.start == range.end;
        if !follows || part.is_anew != last.is_anew || part.range.end - range.start > ASKED_MAX {
            break;
        }
        range.end = part.range.end;
        count += 1;
    }
    (range, count)
}

/// What is dropped of a file before this range is read, which begins with the last of these parts, when all is dropped up to some
/// place: what is left of the parts that are read anew, up to where the disk may read ahead.
fn dropped_before(parts: &[Part], next: &Range<u64>, done: u64) -> Range<u64> {
    let mut parts = parts.iter().rev();
    let Some(first) = parts.next().filter(|first| first.is_anew) else {
        return done..done;
    };
    let furthest = next.end + DROPPED_AHEAD + DROPPED_STEP;
    let mut end = first.range.end;
    for part in parts {
        let follows = part.is_anew && Arc::ptr_eq(&part.file, &first.file) && part.range.start == end;
        if !follows || part.range.end > furthest {
            break;
        }
        end = part.range.end;
    }
    let done = done.max(next.start);
    if done >= end.min(next.end + DROPPED_AHEAD) {
        return done..done;
    }
    done..end
}

/// What a step comes to.
enum Step {
    More,
    /// Nothing more can be done in this slice.
    Wait,
    Over,
}

/// In which group a program's pages count, if a process of ours may be there for a moment.
fn group_of(root: &Root, pid: i32) -> Result<MemoryGroup, Hindrance> {
    let refused = |why: &str| Hindrance::Group(why.to_owned());
    if let Some(why) = hands_off(root, pid) {
        return Err(refused(&why));
    }
    let group = MemoryGroup::of(root, pid)
        .ok_or_else(|| refused("the program is in no control group that counts memory"))?;
    if is_delegated(root, pid, &group) {
        return Err(refused("the program's control group was delegated to somebody"));
    }
    Ok(group)
}

/// What one process has open and mapped.
#[derive(Default)]
struct Look {
    files: BTreeMap<(u64, u64), Found>,
    seen: BTreeSet<Seen>,
    direct: BTreeSet<u64>,
    mapped: BTreeSet<u64>,
    looked_at: usize,
    too_many: u64,
}

/// Looks what a process has open for reading or mapped, and opens once more what is not known and lies on a disk, so many files at
/// most.
fn look_at(root: &Root, pid: i32, room: usize, most: usize, known: BTreeSet<Seen>) -> Result<Look, Obstacle> {
    let mut look = Look {
        seen: known,
        ..Look::default()
    };
    // Before anything is opened: to open a file of another machine may take as long as that likes.
    let mounts = Mounts::of(root, pid).map_err(|why| Obstacle::Mounts { pid, why });
    let Some(mounts) = unless_ended(root, pid, mounts)? else {
        return Ok(look);
    };
    let mut found = Vec::new();
    let open = each_open_file(root, pid, room, |number, inode, text| {
        let flags = flags_of(text);
        if flags & libc::O_DIRECT as u32 != 0 {
            look.direct.insert(inode);
        } else if flags & libc::O_ACCMODE as u32 != libc::O_WRONLY as u32
            && !has_lease(text)
            && let Some(mount) = mounts.mount_of(text)
            && look.seen.insert((Place::Mount(mount), inode))
        {
            found.push((format!("fd/{number}"), inode));
        }
    })?;
    let mapped = each_mapped_file(root, pid, room.saturating_sub(open), |inode, device, range| {
        look.mapped.insert(inode);
        if let (Some(name), Some(device)) = (name_of_mapping(range), device_of(device))
            && look.seen.insert((Place::Device(device), inode))
        {
            found.push((name, inode));
        }
    })?;
    look.looked_at = open + mapped;
    for (name, inode) in found {
        let path = root.path(&format!("/proc/{pid}/{name}"));
        // Another one has got its number meanwhile, or it is something else than a file of a disk: nothing to say of it.
        let Some((held, stat)) = hold_on_disk(&path, &mounts).filter(|(_, stat)| stat.st_ino == inode) else {
            continue;
        };
        let size = u64::try_from(stat.st_size).unwrap_or(0);
        // The same file may be open and mapped.
        if size < SIZE_MIN || look.files.contains_key(&(stat.st_dev, stat.st_ino)) || is_memory(&held) {
            continue;
        }
        if look.files.len() >= most {
            look.too_many += 1;
            continue;
        }
        if let Some(file) = open_held(&held) {
            let found = Found {
                file: Arc::new(file),
                size,
                looked: 0,
            };
            look.files.insert((stat.st_dev, stat.st_ino), found);
        }
    }
    Ok(look)
}

/// Where the file of a mapping is found below `/proc/PID`, by its addresses in `maps`, which are longer there.
fn name_of_mapping(range: &[u8]) -> Option<String> {
    let mut ends = range.split(|byte| *byte == b'-').map(hexadecimal);
    let (from, to) = (ends.next()??, ends.next()??);
    Some(format!("map_files/{from:x}-{to:x}"))
}

/// Holds what lies at this path of `/proc` without opening it, if it is a regular file on one of these mounts. Whoever keeps the file
/// is not asked before it is known that this is a disk.
fn hold_on_disk(path: &Path, mounts: &Mounts) -> Option<(OwnedFd, rustix::fs::Stat)> {
    let held = open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).ok()?;
    let text = fs::read(format!("/proc/self/fdinfo/{}", held.as_raw_fd())).ok()?;
    if !mounts.have(&text) {
        return None;
    }
    let stat = regular(&held)?;
    Some((held, stat))
}

/// How a file was opened, by its text in `fdinfo`; what is not told is not read from.
fn flags_of(text: &[u8]) -> u32 {
    let flags = lines(text).find_map(|line| {
        let value = line.strip_prefix(b"flags:")?;
        u32::from_str_radix(std::str::from_utf8(value).ok()?.trim(), 8).ok()
    });
    flags.unwrap_or(libc::O_WRONLY as u32)
}

/// The device of a mapping, as `maps` has it.
fn device_of(text: &[u8]) -> Option<u64> {
    let mut numbers = text.split(|byte| *byte == b':').map(hexadecimal);
    let (major, minor) = (numbers.next()??, numbers.next()??);
    Some(major << 32 | minor)
}

/// Whether what is held lies in memory that is a disk (DAX), or that cannot be told.
fn is_memory(held: &OwnedFd) -> bool {
    let found = statx(held, c"", AtFlags::EMPTY_PATH, StatxFlags::empty());
    !found.is_ok_and(|found| !found.stx_attributes.contains(StatxAttributes::DAX))
}

/// Adds the parts of a range of which the kernel has taken pages.
fn taken_of(
    file: &Arc<OwnedFd>,
    range: Range<u64>,
    divisions: &[u64],
    near: u64,
    parts: &mut Vec<Part>,
) -> std::io::Result<()> {
    let pages = match pages_of(&**file, range.start, range.end - range.start) {
        // A file of a kind of which the kernel tells nothing has lost nothing.
        Err(e) if e.raw_os_error() == Some(libc::EOPNOTSUPP) => Pages::default(),
        pages => pages?,
    };
    // However few: a program that reads 200 times as fast from memory as from storage does half of its work when one page of 200 is
    // missing.
    if pages.evicted == 0 {
        return Ok(());
    }
    let length = range.end - range.start;
    let is_neighbourhood = divisions.len() == 1;
    let near = if is_neighbourhood { pages.cached } else { near };
    let is_anew = is_neighbourhood && is_nearly_gone(pages, length);
    match divisions.split_first() {
        Some((step, finer)) if !is_anew => {
            let mut from = range.start;
            while from < range.end {
                let to = range.end.min(from + step);
                taken_of(file, from..to, finer, near, parts)?;
                from = to;
            }
        }
        _ => {
            let page = rustix::param::page_size() as u64;
            parts.push(Part {
                file: Arc::clone(file),
                absent: length.saturating_sub(pages.cached * page),
                range,
                near,
                is_anew,
            });
        }
    }
    Ok(())
}

/// Whether of a neighbourhood next to nothing is left, of what was there once, and nothing that waits to be written.
fn is_nearly_gone(pages: Pages, length: u64) -> bool {
    let all = length.div_ceil(rustix::param::page_size() as u64);
    pages.evicted * TAKEN.1 >= all * TAKEN.0 && pages.cached * LEFT.1 <= all * LEFT.0 && pages.unwritten == 0
}

/// What is brought back of these into so much room, to be taken from the end, and how much of what the program works on is left out
/// for want of room.
fn choose(mut parts: Vec<Part>, room: u64) -> (Vec<Part>, u64) {
    let all: u64 = parts.iter().map(|part| part.absent).sum();
    let mut too_many = 0;
    if all > room.min(BLIND_MAX) {
        parts.retain(|part| part.near > 0);
        // The sort is stable: of equal ones what the program opened first comes first.
        parts.sort_by_key(|part| std::cmp::Reverse(part.near));
        let mut sum = 0;
        let before = parts.len();
        parts.retain(|part| {
            sum += part.absent;
            sum <= room
        });
        too_many = (before - parts.len()) as u64;
    }
    // In the order in which they lie: a disk with a head reads them in one go.
    parts.sort_by_key(|part| std::cmp::Reverse((part.file.as_raw_fd(), part.range.start)));
    (parts, too_many)
}

/// How much can be brought into a group before the kernel takes what is in use: what the machine and the limits of the group, and
/// of all above it, leave, with the pages of files that nobody has used lately.
fn room(root: &Root, group: &MemoryGroup) -> u64 {
    let text = fs::read(root.path("/proc/meminfo")).unwrap_or_default();
    let kib = |name: &[u8]| {
        let line = lines(&text).find_map(|line| line.strip_prefix(name))?;
        let value = line.trim_ascii().split(|b| *b == b' ').next()?;
        number(value)
    };
    let machine = kib(b"MemFree:").unwrap_or(0) + kib(b"Inactive(file):").unwrap_or(0);
    std::iter::successors(Some(group.clone()), MemoryGroup::above)
        .filter_map(|group| {
            let (used, limit) = group.used_of_limit(root)?;
            Some(limit.saturating_sub(used) + group.unused_files(root).unwrap_or(0))
        })
        .fold(machine << 10, u64::min)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn file() -> Arc<OwnedFd> {
        Arc::new(std::fs::File::open("/dev/null").unwrap().into())
    }

    fn part(file: &Arc<OwnedFd>, at: u64, absent: u64, near: u64) -> Part {
        Part {
            file: Arc::clone(file),
            range: at * PART..(at + 1) * PART,
            absent,
            near,
            is_anew: false,
        }
    }

    /// A neighbourhood of which next to nothing is left.
    fn anew(file: &Arc<OwnedFd>, at: u64) -> Part {
        Part {
            file: Arc::clone(file),
            range: at * NEIGHBOURHOOD..(at + 1) * NEIGHBOURHOOD,
            absent: NEIGHBOURHOOD,
            near: 0,
            is_anew: true,
        }
    }

    fn starts(parts: &[Part]) -> Vec<u64> {
        parts.iter().rev().map(|part| part.range.start / PART).collect()
    }

    #[test]
    fn all_that_was_taken_is_chosen_where_there_is_room_for_what_is_not_in_memory() {
        let file = file();
        let parts = vec![part(&file, 3, PART, 0), part(&file, 1, PART, 0)];
        let (chosen, too_many) = choose(parts.clone(), 2 * PART);
        assert_eq!((starts(&chosen), too_many), (vec![1, 3], 0));
        // Nothing shows that the program works on them.
        let (chosen, too_many) = choose(parts, 2 * PART - 1);
        assert_eq!((starts(&chosen), too_many), (vec![], 0));
    }

    #[test]
    fn where_room_is_short_what_the_program_works_on_most_comes_first() {
        let file = file();
        let parts = vec![
            part(&file, 0, PART, 1),
            part(&file, 40, PART, 9),
            part(&file, 80, PART, 0),
            part(&file, 120, PART / 2, 5),
        ];
        let (chosen, too_many) = choose(parts, PART + PART / 2);
        assert_eq!((starts(&chosen), too_many), (vec![40, 120], 1));
    }

    #[test]
    fn what_lies_together_is_read_in_one_go_up_to_two_mebibytes() {
        let (file, other) = (file(), file());
        let mut parts: Vec<Part> = (0..40).map(|at| part(&file, at, PART, 1)).collect();
        parts.push(part(&file, 50, PART, 1));
        parts.push(part(&other, 51, PART, 1));
        // The same place of another file is another part.
        parts.push(part(&file, 60, PART, 1));
        parts.push(part(&other, 60, PART, 1));
        parts.reverse();
        let (mut ranges, all) = (Vec::new(), parts.len());
        let mut taken = 0;
        while let Some(last) = parts.last() {
            let (range, count) = run(&parts, last);
            parts.truncate(parts.len() - count);
            taken += count;
            ranges.push((range.start / PART, range.end / PART));
        }
        assert_eq!(
            ranges,
            [
                (0, 16),
                (16, 32),
                (32, 40),
                (50, 51),
                (51, 52),
                (60, 61),
                (60, 61)
            ]
        );
        assert_eq!(taken, all);
        assert_eq!(16 * PART, 2 * MIB);
    }

    #[test]
    fn what_is_left_of_what_is_read_anew_is_dropped_once_and_further_ahead_than_disks_read() {
        let (file, other) = (file(), file());
        // 96 MiB, a gap, 4 MiB of which the middle is read in parts, and another file at the same place.
        let mut parts: Vec<Part> = (0..48).chain([60]).map(|at| anew(&file, at)).collect();
        parts.push(part(&file, 61 * 16, PART, 9));
        parts.push(anew(&file, 62));
        parts.push(anew(&other, 63));
        parts.reverse();
        let (mut dropped, mut read) = (Vec::new(), Vec::new());
        let mut done = (-1, 0);
        while let Some(last) = parts.last() {
            let (next, count) = run(&parts, last);
            let of = last.file.as_raw_fd();
            let before = dropped_before(&parts, &next, if done.0 == of { done.1 } else { 0 });
            assert!(dropped.iter().all(|(file, range): &(i32, Range<u64>)| *file != of
                || range.end <= before.start
                || before.is_empty()));
            if last.is_anew {
                let end = if next.start < 96 * MIB { 96 * MIB } else { next.end };
                assert!(
                    before.end >= end.min(next.end + DROPPED_AHEAD),
                    "{next:?}: {before:?}"
                );
                assert!(before.end <= end.min(next.end + DROPPED_AHEAD + DROPPED_STEP));
            } else {
                assert!(before.is_empty(), "{next:?}: {before:?}");
            }
            done = (of, before.end);
            if !before.is_empty() {
                dropped.push((of, before));
            }
            read.push(next);
            parts.truncate(parts.len() - count);
        }
        let mib: Vec<_> = dropped
            .iter()
            .map(|(_, range)| (range.start / MIB, range.end / MIB))
            .collect();
        // Not at each step: that waits for all CPUs.
        assert_eq!(mib.iter().filter(|(_, end)| *end <= 96).count(), 8);
        assert_eq!(mib[..2], [(0, 26), (26, 36)]);
        assert_eq!(mib[mib.len() - 3..], [(120, 122), (124, 126), (126, 128)]);
        // Who has it read by somebody else asks once more for what is read already: that is not dropped again.
        let parts: Vec<Part> = (0..48).rev().map(|at| anew(&file, at)).collect();
        assert!(dropped_before(&parts, &(0..2 * MIB), 36 * MIB).is_empty());
        assert!(read.iter().all(|range| range.end - range.start <= ASKED_MAX));
    }

    #[test]
    fn of_what_is_read_anew_next_to_nothing_is_left_and_nothing_waits_to_be_written() {
        let all = NEIGHBOURHOOD / rustix::param::page_size() as u64;
        let pages = |cached, unwritten, evicted| Pages {
            cached,
            unwritten,
            evicted,
        };
        for (pages, expected) in [
            (pages(0, 0, all), true),
            (pages(all / 8, 0, all - all / 8), true),
            (pages(all / 8 + 1, 0, all - all / 8 - 1), false),
            // Much of it was never there, or it is forgotten.
            (pages(0, 0, all - all / 4), true),
            (pages(0, 0, all - all / 4 - 1), false),
            (pages(1, 1, all - 1), false),
            (pages(0, 0, 0), false),
        ] {
            assert_eq!(is_nearly_gone(pages, NEIGHBOURHOOD), expected, "{pages:?}");
        }
    }

    #[test]
    fn what_is_read_past_the_file_cache_is_told_by_its_flags() {
        let direct = format!("pos:\t0\nflags:\t0{:o}\n", libc::O_DIRECT | libc::O_RDWR);
        assert_ne!(flags_of(direct.as_bytes()) & libc::O_DIRECT as u32, 0);
        assert_eq!(flags_of(b"flags:\t0100000\n") & libc::O_ACCMODE as u32, 0);
        for odd in [&b""[..], b"flags:\t\n", b"flags:\t9\n", b"pos: 1"] {
            assert_eq!(flags_of(odd), libc::O_WRONLY as u32, "not read from");
        }
        assert_eq!(device_of(b"fd:10"), Some(0xfd << 32 | 0x10));
        assert_eq!(device_of(b"fd"), None);
    }
}
