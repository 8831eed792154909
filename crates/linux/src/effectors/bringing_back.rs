//! Bringing back what a program lost before the reader that took it was contained.
//!
//! A program that reads single pages at random (`pread`) brings back one page at a time, in minutes; a database does so in tens
//! of seconds (measured: docs/file-cache.md). What it lost is known: of each part of a file the kernel tells how many pages it
//! has taken (`cachestat(2)`, Linux 6.5). Of the files that the program has open or mapped those parts are read again, by a
//! process in the program's own group ([`Fetcher`]), so that they count where they did before and whoever limits the program limits
//! them.
//!
//! How long ago a page was taken the kernel does not tell (its measure of "recently" has gone by within a second of such a
//! reader). So where all that was taken fits into the room that there is, and is no more than [`BLIND_MAX`], all of it is
//! brought back. Otherwise only those parts are of which some pages are in memory: nothing stays there while such a reader
//! is at work but what the program has just used, so those are the ones that it works on. Those with the most pages come
//! first, until the room is used up: what the limits of the group, and of all above it, leave, and at last the machine's own
//! memory, with the pages of files that nobody has used lately.
//!
//! Files that are not on a disk of this machine are left alone, and programs in containers or delegated groups: no process of ours
//! enters those. There is nothing to put back: what was read are clean pages of files, of which the kernel takes what nobody
//! uses.

use super::fetcher::{FetchError, Fetcher};
use super::giving_back::{Obstacle, each_mapped_file, each_open_file, unless_ended};
use super::identity::ProcessStat;
use super::memory_group::{MemoryGroup, hands_off, is_delegated};
use super::mounts::Mounts;
use super::page_dropping::{open_held, regular};
use crate::Root;
use crate::sensors::bytes::{hexadecimal, lines, number};
use crate::sensors::reader::{PATIENCE, Reader};
use crate::sys::cache::{Pages, pages_of};
use homeostat_model::ProcessId;
use rustix::fd::{AsRawFd, OwnedFd};
use rustix::fs::{Mode, OFlags, open};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// One slice of work.
const SLICE: Duration = Duration::from_millis(20);
/// Processes of the program that are looked at, oldest first.
const PROCESSES_MAX: usize = 64;
/// Its files that are looked at.
const FILES_MAX: usize = 256;
/// Open files and mappings of all its processes that are looked at.
const LOOKED_AT_MAX: usize = 100_000;
/// Smaller files are back after a few reads of the program's own.
const SIZE_MIN: u64 = 256 << 10;
/// What the kernel is asked about at one time: some milliseconds.
const RANGE: u64 = 1 << 30;
/// Ranges are divided so far: a small part is either worked on or not.
const DIVISIONS: [u64; 2] = [64 << 20, PART];
/// What is read at one time.
const PART: u64 = 2 << 20;
/// Ranges that are looked at, of all files together: 256 GiB.
const RANGES_MAX: usize = 256;
/// Most that is brought back where it is not known whether the program works on it.
const BLIND_MAX: u64 = 1 << 30;
/// Most that is brought back when the reader is contained …
pub(super) const BROUGHT_MAX: u64 = 8 << 30;
/// … and later, while it is.
pub(super) const BROUGHT_AGAIN_MAX: u64 = 1 << 30;
/// How long the disk may take for it.
const DEADLINE: Duration = Duration::from_secs(10);

const TOO_MANY: &str = "file that is not brought back: the program has more files open than are looked at";
const UNSEEN: &str = "process whose files are not brought back: it cannot be looked at now";
const NO_ROOM: &str = "part of a file that is not brought back: there is no room for it";
const REFUSED: &str = "part of a file that is not brought back: the kernel reads nothing ahead of it";

/// Why nothing is brought back.
#[derive(Debug, thiserror::Error)]
enum Hindrance {
    #[error("{0}")]
    Group(String),
    #[error("the kernel does not tell what was taken of a file (cachestat, Linux 6.5): {0}")]
    Untold(std::io::Error),
    #[error("the disk took longer than {DEADLINE:?}")]
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
    from: u64,
    pages: Pages,
}

/// What is being done.
enum Stage {
    /// Looking what the program has open and mapped, process by process.
    Looking(Vec<ProcessId>),
    /// Asking the kernel what was taken of these.
    Asking(Vec<Found>),
    /// Having it read, last part first.
    Fetching {
        parts: Vec<Part>,
        since: Option<Instant>,
    },
}

/// The work of bringing back, as far as it got.
pub(super) struct BringingBack {
    stage: Stage,
    group: Option<MemoryGroup>,
    /// By device and inode.
    files: BTreeMap<(u64, u64), Found>,
    /// Inodes that were looked at already, on whatever device.
    seen: BTreeSet<u64>,
    looked_at: usize,
    ranges: usize,
    parts: Vec<Part>,
    /// So much is brought back at most, in bytes.
    most: u64,
    /// What is left as it is, by reason.
    left: BTreeMap<String, u64>,
    steps: u64,
}

impl BringingBack {
    /// Begins with the processes of the program, oldest first; brings so many bytes back at most.
    pub(super) fn new(mut members: Vec<ProcessId>, most: u64) -> Self {
        members.truncate(PROCESSES_MAX);
        members.reverse();
        Self {
            stage: Stage::Looking(members),
            group: None,
            files: BTreeMap::new(),
            seen: BTreeSet::new(),
            looked_at: 0,
            ranges: 0,
            parts: Vec::new(),
            most,
            left: BTreeMap::new(),
            steps: 0,
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
                    fetcher.leave(root);
                    return Some(std::mem::take(&mut self.left));
                }
                Err(why) => {
                    fetcher.leave(root);
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
        if matches!(self.stage, Stage::Fetching { since: Some(_), .. }) {
            fetcher.leave(root);
        }
    }

    /// Steps done, and how many there are in all as far as is known.
    pub(super) fn steps(&self) -> (u64, u64) {
        let waiting = match &self.stage {
            Stage::Looking(members) => members.len(),
            Stage::Asking(files) => files.len(),
            Stage::Fetching { parts, .. } => parts.len(),
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
                    let files = std::mem::take(&mut self.files);
                    self.stage = Stage::Asking(files.into_values().collect());
                    Ok(Step::More)
                }
            },
            Stage::Asking(files) => {
                let Some(found) = files.last_mut() else {
                    return self.choose(root);
                };
                if found.looked >= found.size || self.ranges >= RANGES_MAX {
                    files.pop();
                    return Ok(Step::More);
                }
                let range = found.looked..found.size.min(found.looked + RANGE);
                found.looked += RANGE;
                self.ranges += 1;
                let file = Arc::clone(&found.file);
                taken_of(&file, range, &DIVISIONS, &mut self.parts).map_err(Hindrance::Untold)?;
                Ok(Step::More)
            }
            Stage::Fetching { .. } => self.fetch(root, fetcher),
        }
    }

    /// Adds what one process has open or mapped.
    fn look_at(&mut self, root: &Root, reader: &mut Reader, process: ProcessId) -> Result<Step, Hindrance> {
        let is_alive = ProcessStat::read(root, process)
            .is_ok_and(|stat| stat.start_ticks == process.start_ticks && !stat.ended);
        if !is_alive {
            return Ok(Step::More);
        }
        if self.group.is_none() {
            self.group = Some(group_of(root, process.pid)?);
        }
        let (of, pid, known) = (root.clone(), process.pid, self.seen.clone());
        let room = LOOKED_AT_MAX.saturating_sub(self.looked_at);
        let most = FILES_MAX.saturating_sub(self.files.len());
        let look = reader.run(pid, PATIENCE, move || look_at(&of, pid, room, most, known));
        match look {
            Ok(Ok(look)) => {
                self.looked_at += look.looked_at;
                self.seen = look.seen;
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
        let (Some(group), false) = (&self.group, parts.is_empty()) else {
            return Ok(Step::Over);
        };
        let (chosen, too_many) = choose(
            parts,
            room(root, group).min(self.most),
            rustix::param::page_size() as u64,
        );
        self.leave(NO_ROOM, too_many);
        self.stage = Stage::Fetching {
            parts: chosen,
            since: None,
        };
        Ok(Step::More)
    }

    /// Has as many parts read as the disk takes now.
    fn fetch(&mut self, root: &Root, fetcher: &mut Fetcher) -> Result<Step, Hindrance> {
        let (Stage::Fetching { parts, since }, Some(group)) = (&mut self.stage, &self.group) else {
            return Ok(Step::Over);
        };
        if parts.is_empty() && since.is_none() {
            return Ok(Step::Over);
        }
        if !fetcher.enter(root, group)? {
            // It works for another program; that takes some seconds at most.
            return Ok(Step::Wait);
        }
        let begun = *since.get_or_insert_with(Instant::now);
        let (mut waiting, refused) = fetcher.answers()?;
        while let Some(part) = parts.last() {
            if !fetcher.ask(&part.file, part.from, PART)? {
                break;
            }
            parts.pop();
            waiting += 1;
        }
        let is_over = parts.is_empty() && waiting == 0;
        self.leave(REFUSED, refused);
        if is_over {
            return Ok(Step::Over);
        }
        if begun.elapsed() > DEADLINE {
            return Err(Hindrance::Disk);
        }
        Ok(Step::Wait)
    }
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
    if is_delegated(root, &group) {
        return Err(refused("the program's control group was delegated to somebody"));
    }
    Ok(group)
}

/// What one process has open and mapped.
#[derive(Default)]
struct Look {
    files: BTreeMap<(u64, u64), Found>,
    seen: BTreeSet<u64>,
    looked_at: usize,
    too_many: u64,
}

/// Looks what a process has open for reading or mapped, and opens once more what is not known and lies on a disk, so many files at
/// most.
fn look_at(root: &Root, pid: i32, room: usize, most: usize, known: BTreeSet<u64>) -> Result<Look, Obstacle> {
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
        if is_open_for_reading(text) && mounts.have(text) && look.seen.insert(inode) {
            found.push((format!("fd/{number}"), inode));
        }
    })?;
    let mapped = each_mapped_file(root, pid, room.saturating_sub(open), |inode, range| {
        if let Some(name) = name_of_mapping(range)
            && look.seen.insert(inode)
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
        if size < SIZE_MIN {
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

/// Whether an open file is read from, by its text in `fdinfo`.
fn is_open_for_reading(text: &[u8]) -> bool {
    let flags = lines(text).find_map(|line| {
        let value = line.strip_prefix(b"flags:")?;
        u32::from_str_radix(std::str::from_utf8(value).ok()?.trim(), 8).ok()
    });
    flags.is_some_and(|flags| flags & libc::O_ACCMODE as u32 != libc::O_WRONLY as u32)
}

/// Adds the parts of a range of which the kernel has taken pages.
fn taken_of(
    file: &Arc<OwnedFd>,
    range: std::ops::Range<u64>,
    divisions: &[u64],
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
    let Some((step, finer)) = divisions.split_first() else {
        parts.push(Part {
            file: Arc::clone(file),
            from: range.start,
            pages,
        });
        return Ok(());
    };
    let mut from = range.start;
    while from < range.end {
        let to = range.end.min(from + step);
        taken_of(file, from..to, finer, parts)?;
        from = to;
    }
    Ok(())
}

/// What is brought back of these into so much room, to be taken from the end, and how much of what the program works on is left out
/// for want of room.
fn choose(mut parts: Vec<Part>, room: u64, page: u64) -> (Vec<Part>, u64) {
    let bytes = |part: &Part| part.pages.evicted * page;
    let all: u64 = parts.iter().map(bytes).sum();
    let mut too_many = 0;
    if all > room.min(BLIND_MAX) {
        parts.retain(|part| part.pages.cached > 0);
        // The sort is stable: of equal ones what the program opened first comes first.
        parts.sort_by_key(|part| std::cmp::Reverse(part.pages.cached));
        let mut sum = 0;
        let before = parts.len();
        parts.retain(|part| {
            sum += bytes(part);
            sum <= room
        });
        too_many = (before - parts.len()) as u64;
    }
    // In the order in which they lie: a disk with a head reads them in one go.
    parts.sort_by_key(|part| std::cmp::Reverse((part.file.as_raw_fd(), part.from)));
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
