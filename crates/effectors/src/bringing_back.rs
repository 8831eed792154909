//! Reads again the file pages that a program lost to a streaming reader, once the reader is limited.
//!
//! A program with random reads (`pread`) needs minutes to get its pages back, a database tens of seconds. The kernel
//! reports how many pages of each part of a file it evicted (`cachestat(2)`, Linux 6.5). A process in the program's
//! group ([`Fetcher`]) reads these parts, so that the pages are charged as before.
//!
//! The kernel does not report when it evicted a page: its "recently" covers less than a second. If all missing pages of
//! the affected parts fit the room and 1 GiB, all are read. Otherwise only parts are read with pages still in memory
//! within 2 MiB, most pages first. Next to such a reader only pages in use stay, so these parts are the working set.
//! Every missing page counts toward the room: a part of 128 KiB is read whole. If half of 2 MiB is missing, the rest is
//! dropped and all of it read as a unit ([`lost_parts`]).
//!
//! Left alone: files on no disk of this machine, and DAX files, whose pages look evicted. No process of homeostat
//! enters containers and delegated groups. `O_DIRECT` files lost only pages that somebody else brought, such as a
//! backup. In other files such pages look like the program's own. There is no undo: the pages are clean.

use crate::fetcher::{FetchError, Fetcher, Wish};
use crate::giving_back::{Obstacle, each_mapped_file, each_open_file, unless_ended};
use crate::identity::ProcessStat;
use crate::lost_parts;
use crate::lost_parts::{DIVISIONS, Identity, Known, Part, choose, is_gone, run, taken_of};
use crate::mounts::Mounts;
use crate::page_dropping::{Held, has_lease, open_held, regular};
use homeostat_kernel::Root;
use homeostat_kernel::bytes::{hexadecimal, lines, number};
use homeostat_model::{ActionId, ProcessId};
use homeostat_sensors::memory_group::{MemoryGroup, hands_off, is_delegated};
use homeostat_sensors::reader::{PATIENCE, Reader};
use rustix::fd::{AsRawFd, OwnedFd};
use rustix::fs::{AtFlags, Mode, OFlags, StatxAttributes, StatxFlags, open, statx};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

const SLICE: Duration = Duration::from_millis(20);
/// Processes of the program that are checked, oldest first.
pub(super) const PROCESSES_MAX: usize = 64;
/// Its files that are checked.
const FILES_MAX: usize = 256;
/// Open files and mappings checked, of all its processes.
const LOOKED_AT_MAX: usize = 100_000;
/// The program itself gets smaller files back with a few reads.
const SIZE_MIN: u64 = 256 << 10;
/// Range of one question to the kernel: some milliseconds.
const RANGE: u64 = 256 << 20;
/// Ranges checked, of all files together: 256 GiB.
const RANGES_MAX: usize = 1024;
/// Parts remembered: 16 GiB, in some megabytes of memory.
const PARTS_MAX: usize = 128 * 1024;
/// Most bytes read when the reader is limited.
const BROUGHT_MAX: u64 = 8 << 30;
/// Most bytes read later, while it stays limited.
pub(super) const BROUGHT_AGAIN_MAX: u64 = 1 << 30;
/// How long the disk may delay an answer.
const DEADLINE: Duration = Duration::from_secs(10);
/// Longest pass when the reader is limited, which waits for it.
const LONGEST: Duration = Duration::from_secs(10);
/// Longest later pass.
const LONGEST_AGAIN: Duration = Duration::from_secs(60);
/// A unit is read only if this much stays free in addition.
const TO_SPARE: u64 = 8 << 20;
/// Most units under way: the check of each must still hold when its pages are dropped.
const UNITS_MAX: usize = 16;
/// After so many units of one file it is opened anew. The kernel counts missing pages per open file, and stops reading
/// ahead after a hundred (`mmap_miss`, for such mappings since about Linux 6.19).
const UNITS_OF_A_FILE: u32 = 64;

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
    identity: Identity,
    /// The kernel keeps it in large units.
    in_units: bool,
    size: u64,
    /// Offset up to which it has been checked.
    looked: u64,
}

/// Limits of one pass.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    is_first: bool,
    /// Most bytes read.
    most: u64,
    longest: Duration,
}

impl Limits {
    /// For the pass when the reader is limited.
    pub(super) const FIRST: Self = Self {
        is_first: true,
        most: BROUGHT_MAX,
        longest: LONGEST,
    };

    /// For a later pass, with this many bytes.
    pub(super) fn again(most: u64) -> Self {
        Self {
            is_first: false,
            most,
            longest: LONGEST_AGAIN,
        }
    }
}

enum Stage {
    /// Checking the open and mapped files, process by process.
    Looking(Vec<ProcessId>),
    /// Asking the kernel for the evicted pages of these files.
    Asking(Vec<Found>),
    /// Having these parts read, last part first.
    Fetching(Vec<Part>),
}

/// The work of bringing back, as far as it got.
pub(super) struct BringingBack {
    stage: Stage,
    action: ActionId,
    /// Whether the reader was limited just now. Later passes drop nothing, for the program may be well.
    is_first: bool,
    /// Parts read before, or chosen for reading.
    known: Known,
    /// The program's group, and its inode.
    group: Option<(MemoryGroup, u64)>,
    /// By device and inode.
    files: BTreeMap<(u64, u64), Found>,
    seen: BTreeSet<Seen>,
    /// Inodes that a process reads past the file cache, and inodes that one has mapped.
    direct: BTreeSet<u64>,
    mapped: BTreeSet<u64>,
    looked_at: usize,
    ranges: usize,
    parts: Vec<Part>,
    /// Most bytes to read.
    most: u64,
    /// Bytes asked for.
    asked: u64,
    /// Bytes of these asked for in units.
    asked_in_units: u64,
    /// Longest duration.
    longest: Duration,
    /// When the current fetcher process began.
    since: Option<Instant>,
    /// When the first one began.
    begun: Option<Instant>,
    /// When the last answer came, or nothing was waited for.
    heard: Instant,
    /// Parts for which there seems to have been no room.
    no_room: u64,
    /// Parts of each unanswered request, oldest first.
    sent: VecDeque<Vec<Part>>,
    /// The fetcher has ended once, and its successor is at work.
    is_another: bool,
    /// The file now read in units, its separate opening, and the number of units read through that.
    unit_file: Option<(Arc<OwnedFd>, Arc<OwnedFd>, u32)>,
    /// Files left as they are, by reason.
    left: BTreeMap<String, u64>,
    steps: u64,
    /// Last owner of the files. It closes them in another thread.
    held: Held,
}

/// A checked file: mount (if open) or device (if mapped), and inode.
type Seen = (Place, u64);

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Place {
    Mount(u64),
    Device(u64),
}

impl BringingBack {
    /// Begins with the processes of the program, oldest first, and the remembered parts of its files.
    pub(super) fn new(action: ActionId, mut members: Vec<ProcessId>, limits: Limits, known: Known) -> Self {
        members.truncate(PROCESSES_MAX);
        members.reverse();
        Self {
            stage: Stage::Looking(members),
            action,
            is_first: limits.is_first,
            known,
            group: None,
            files: BTreeMap::new(),
            seen: BTreeSet::new(),
            direct: BTreeSet::new(),
            mapped: BTreeSet::new(),
            looked_at: 0,
            ranges: 0,
            parts: Vec::new(),
            most: limits.most,
            asked: 0,
            asked_in_units: 0,
            longest: limits.longest,
            since: None,
            begun: None,
            heard: Instant::now(),
            no_room: 0,
            sent: VecDeque::new(),
            is_another: false,
            unit_file: None,
            left: BTreeMap::new(),
            steps: 0,
            held: Held::default(),
        }
    }

    /// One slice. At the end it returns the files left as they are, by reason.
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

    /// The remembered parts, at the end.
    pub(super) fn take_known(&mut self) -> Known {
        std::mem::take(&mut self.known)
    }

    pub(super) fn stop(&self, root: &Root, fetcher: &mut Fetcher) {
        fetcher.leave(root, self.action);
    }

    /// Bytes asked for so far.
    pub(super) fn asked(&self) -> u64 {
        self.asked
    }

    /// Bytes of these asked for in units.
    pub(super) fn asked_in_units(&self) -> u64 {
        self.asked_in_units
    }

    /// Steps done, and the total as far as is known.
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
                let in_units = found.in_units && self.is_first && !self.mapped.contains(&found.identity.1);
                let first = self.parts.len();
                let told = taken_of(&file, in_units, range.clone(), &DIVISIONS, 0, &mut self.parts);
                let (known, parts) = (&self.known, &mut self.parts);
                let told = told.and_then(|()| known.add_missing(&file, found.identity, &range, first, parts));
                match told {
                    Ok(()) => {}
                    Err(e) if e.raw_os_error() == Some(libc::ENOSYS) => return Err(Hindrance::Untold(e)),
                    // If even root cannot write to a file, the kernel answers its owner only.
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

    /// Adds the open and mapped files of one process.
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
            // Its pages would be charged to a group to which they did not belong.
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
            // Other processes of the program may have the same files open.
            Ok(Err(_)) | Err(_) => self.leave(UNSEEN, 1),
        }
        Ok(Step::More)
    }

    /// Decides which parts are read.
    fn choose(&mut self, root: &Root) -> Result<Step, Hindrance> {
        let parts = std::mem::take(&mut self.parts);
        let (Some((group, _)), false) = (&self.group, parts.is_empty()) else {
            return Ok(Step::Over);
        };
        let (chosen, too_many) = choose(parts, room(root, group).all.min(self.most));
        self.known.note(&chosen);
        self.leave(NO_ROOM, too_many);
        self.stage = Stage::Fetching(chosen);
        Ok(Step::More)
    }

    /// The fetcher has ended: its successor is asked for the unanswered parts. Only once: a request may have ended it.
    fn ask_another(&mut self, root: &Root, fetcher: &mut Fetcher) {
        fetcher.leave(root, self.action);
        (self.is_another, self.since, self.heard) = (true, None, Instant::now());
        if let Stage::Fetching(parts) = &mut self.stage {
            for part in std::mem::take(&mut self.sent).into_iter().rev().flatten() {
                self.asked = self.asked.saturating_sub(part.absent);
                if part.as_unit {
                    self.asked_in_units = self.asked_in_units.saturating_sub(part.absent);
                }
                parts.push(part);
            }
        }
    }

    /// The opening for reading in units, renewed now and then.
    fn opened_for_units(
        unit_file: &mut Option<(Arc<OwnedFd>, Arc<OwnedFd>, u32)>,
        file: &Arc<OwnedFd>,
    ) -> Arc<OwnedFd> {
        match unit_file {
            Some((of, opened, units)) if Arc::ptr_eq(of, file) && *units < UNITS_OF_A_FILE => {
                *units += 1;
                Arc::clone(opened)
            }
            _ => {
                let opened = open_held(file).map_or_else(|| Arc::clone(file), Arc::new);
                *unit_file = Some((Arc::clone(file), Arc::clone(&opened), 1));
                opened
            }
        }
    }

    /// Requests as many parts as the disk takes now.
    ///
    /// The room is what the limits of the group and of all groups above leave, and at last the machine's own memory.
    /// Inactive file pages count as room.
    fn fetch(&mut self, root: &Root, fetcher: &mut Fetcher) -> Result<Step, Hindrance> {
        let (Stage::Fetching(parts), Some((group, inode))) = (&mut self.stage, &self.group) else {
            return Ok(Step::Over);
        };
        if parts.is_empty() && self.since.is_none() {
            return Ok(Step::Over);
        }
        match self.since {
            // The fetcher has ended in between, and its requests with it.
            Some(_) if !fetcher.works_for(self.action) => return Err(FetchError::Ended.into()),
            Some(_) => {}
            None => {
                if group.inode(root) != Some(*inode) {
                    return Err(Hindrance::Group(
                        "the program's control group is another one now".into(),
                    ));
                }
                if !fetcher.enter(root, self.action, group)? {
                    // It works for another program, for some seconds at most.
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
            // Requests under way are waited for: the fetcher goes home by itself.
            too_long = parts.len() as u64;
            parts.clear();
        }
        self.no_room += answers.no_room;
        // A single failure may come from a disk error.
        if self.no_room > 1 {
            no_room += parts.len() as u64;
            parts.clear();
        }
        // Others, also the program itself, have grown meanwhile. Lost pages must not push out its working set.
        let there = room(root, group);
        let mut room = there.all.saturating_sub(answers.waiting_bytes);
        let mut free = there.free.saturating_sub(answers.waiting_bytes);
        while let Some(part) = parts.last() {
            let (next, count) = run(parts, part);
            let length = next.end - next.start;
            if room < length {
                // Once nothing is under way, no more room will come.
                if waiting == 0 {
                    no_room += parts.len() as u64;
                    parts.clear();
                }
                break;
            }
            let file = Arc::clone(&part.file);
            // Nothing is dropped for which there may be no room any more.
            let as_unit = part.as_unit && free >= length + TO_SPARE && is_gone(part);
            let asked = if as_unit {
                if waiting >= UNITS_MAX {
                    break;
                }
                let opened = Self::opened_for_units(&mut self.unit_file, &file);
                fetcher.ask(&opened, &Wish::AsUnit(next))?
            } else {
                fetcher.ask(&file, &Wish::Read(next))?
            };
            if !asked {
                break;
            }
            free = free.saturating_sub(length);
            room -= length;
            let sent = parts.split_off(parts.len() - count);
            for part in &sent {
                self.asked = self.asked.saturating_add(part.absent);
                if as_unit {
                    self.asked_in_units = self.asked_in_units.saturating_add(part.absent);
                }
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

enum Step {
    More,
    /// Nothing more can be done in this slice.
    Wait,
    Over,
}

/// The group charged for a program's pages, if a process of homeostat may enter it for a moment.
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

/// Open and mapped files of one process.
#[derive(Default)]
struct Look {
    files: BTreeMap<(u64, u64), Found>,
    seen: BTreeSet<Seen>,
    direct: BTreeSet<u64>,
    mapped: BTreeSet<u64>,
    looked_at: usize,
    too_many: u64,
}

/// Checks the files that a process has open for reading or mapped. Opens unknown files on a disk, at most so many.
fn look_at(root: &Root, pid: i32, room: usize, most: usize, known: BTreeSet<Seen>) -> Result<Look, Obstacle> {
    let mut look = Look {
        seen: known,
        ..Look::default()
    };
    // Read before anything is opened: opening a file of another machine may hang.
    let mounts = Mounts::of(root, pid).map_err(|why| Obstacle::Mounts { pid, why });
    let Some(mounts) = unless_ended(root, pid, mounts)? else {
        return Ok(look);
    };
    let mut found = Vec::new();
    let open = each_open_file(root, pid, room, |number, inode, text| {
        let flags = flags_of(text);
        if flags & libc::O_DIRECT as u32 != 0 {
            look.direct.insert(inode);
        } else if flags & libc::O_ACCMODE as u32 != libc::O_WRONLY as u32 && !has_lease(text) {
            if let Some(mount) = mounts.mount_of(text) {
                if look.seen.insert((Place::Mount(mount), inode)) {
                    found.push((format!("fd/{number}"), inode));
                }
            }
        }
    })?;
    let mapped = each_mapped_file(root, pid, room.saturating_sub(open), |inode, device, range| {
        look.mapped.insert(inode);
        if let (Some(name), Some(device)) = (name_of_mapping(range), device_of(device)) {
            if look.seen.insert((Place::Device(device), inode)) {
                found.push((name, inode));
            }
        }
    })?;
    look.looked_at = open + mapped;
    for (name, inode) in found {
        let path = root.path(&format!("/proc/{pid}/{name}"));
        // Otherwise another file has taken its number meanwhile, or it is no file of a disk.
        let Some((held, stat, kind)) =
            hold_on_disk(&path, &mounts).filter(|(_, stat, _)| stat.st_ino == inode)
        else {
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
            if let Some(identity) = lost_parts::identity(&file) {
                let found = Found {
                    file: Arc::new(file),
                    identity,
                    in_units: lost_parts::has_large_units(root, kind),
                    size,
                    looked: 0,
                };
                look.files.insert((stat.st_dev, stat.st_ino), found);
            }
        }
    }
    Ok(look)
}

/// Name of a mapping below `/proc/PID/map_files`, from its addresses in `maps`, which have more digits.
fn name_of_mapping(range: &[u8]) -> Option<String> {
    let mut ends = range.split(|byte| *byte == b'-').map(hexadecimal);
    let (from, to) = (ends.next()??, ends.next()??);
    Some(format!("map_files/{from:x}-{to:x}"))
}

/// Holds the file at this path of `/proc` without opening it, with the kind of its file system. It must be a regular
/// file on one of these mounts. The file's server is not asked before it is known to be a disk.
fn hold_on_disk(path: &Path, mounts: &Mounts) -> Option<(OwnedFd, rustix::fs::Stat, &'static [u8])> {
    let held = open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).ok()?;
    let text = fs::read(format!("/proc/self/fdinfo/{}", held.as_raw_fd())).ok()?;
    let kind = mounts.kind_of(&text)?;
    let stat = regular(&held)?;
    Some((held, stat, kind))
}

/// Open flags of a file, by its `fdinfo` text. Without them it counts as not read.
fn flags_of(text: &[u8]) -> u32 {
    let flags = lines(text).find_map(|line| {
        let value = line.strip_prefix(b"flags:")?;
        u32::from_str_radix(std::str::from_utf8(value).ok()?.trim(), 8).ok()
    });
    flags.unwrap_or(libc::O_WRONLY as u32)
}

/// The device of a mapping, as `maps` shows it.
fn device_of(text: &[u8]) -> Option<u64> {
    let mut numbers = text.split(|byte| *byte == b':').map(hexadecimal);
    let (major, minor) = (numbers.next()??, numbers.next()??);
    Some(major << 32 | minor)
}

/// Whether the file lies in memory used as a disk (DAX), or that is unknown.
fn is_memory(held: &OwnedFd) -> bool {
    let found = statx(held, c"", AtFlags::EMPTY_PATH, StatxFlags::empty());
    !found.is_ok_and(|found| !found.stx_attributes.contains(StatxAttributes::DAX))
}

/// Bytes that fit into a group.
struct Room {
    /// Before the kernel takes pages in use.
    all: u64,
    /// Part of it for which nothing has to be evicted.
    free: u64,
}

/// Room under the limits of the group and all groups above, and on the machine, inactive file pages included.
fn room(root: &Root, group: &MemoryGroup) -> Room {
    let text = fs::read(root.path("/proc/meminfo")).unwrap_or_default();
    let kib = |name: &[u8]| {
        let line = lines(&text).find_map(|line| line.strip_prefix(name))?;
        let value = line.trim_ascii().split(|b| *b == b' ').next()?;
        number(value)
    };
    let free = kib(b"MemFree:").unwrap_or(0);
    // `MemFree` includes the kernel's reserve, for which it begins to take pages.
    let kept = fs::read_to_string(root.path("/proc/sys/vm/min_free_kbytes")).unwrap_or_default();
    let kept = kept
        .trim()
        .parse::<u64>()
        .map_or(free, |kept| kept.saturating_mul(2));
    let machine = Room {
        all: (free + kib(b"Inactive(file):").unwrap_or(0)) << 10,
        free: free.saturating_sub(kept) << 10,
    };
    std::iter::successors(Some(group.clone()), MemoryGroup::above)
        .filter_map(|group| {
            let (used, limit) = group.used_of_limit(root)?;
            let free = limit.saturating_sub(used);
            let all = free + group.unused_files(root).unwrap_or(0);
            Some(Room { all, free })
        })
        .fold(machine, |least, room| Room {
            all: least.all.min(room.all),
            free: least.free.min(room.free),
        })
}

#[cfg(test)]
mod tests {
    use super::*;

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
