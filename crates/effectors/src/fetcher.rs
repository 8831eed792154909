//! A helper process that reads parts of files in the control group of another program.
//!
//! The kernel charges a file page to the group of the process (not thread) that reads it first. Lost pages must be
//! charged to the program's group again, or a person's limit on it would stop holding. So a process that does nothing
//! else moves into the program's group, receives open files with the wanted parts, reads them, and moves back. It
//! starts early: when memory is short, nothing starts.
//!
//! It has no capabilities, opens nothing, and ends when its socket closes. After a killed daemon it stays in a group
//! only until the disk has answered the last requests ([`WINDOW_BYTES`]).
//!
//! **Its reads kill nobody.** A plain read of a missing page may make the kernel kill a process of a full group.
//! Read-ahead gives up instead. So it reads with `RWF_NOWAIT`, which starts read-ahead (`filemap_get_pages` in Linux
//! `mm/filemap.c`), until the pages are there. A unit ([`read_as_unit`]) is a page fault. It may fall back to a plain
//! request for one page, so it needs room to spare ([`bringing_back`](crate::bringing_back)). The kernel kills only
//! when nothing is reclaimable, and pages just read are. Then the program's next page would kill, too.

use homeostat_kernel::Root;
use homeostat_kernel::cache::read_as_unit;
use homeostat_model::ActionId;
use homeostat_sensors::memory_group::MemoryGroup;
use rustix::cmsg_space;
use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::{Advice, fadvise};
use rustix::io::{Errno, ReadWriteFlags, preadv2};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recv, recvmsg, send, sendmsg, socketpair,
};
use rustix::thread::{CapabilitySet, CapabilitySets, set_capabilities};
use std::collections::VecDeque;
use std::ffi::OsString;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::num::NonZeroU64;
use std::ops::Range;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Most unanswered parts: what a socket holds.
const WINDOW: usize = 192;
/// Most unanswered bytes.
const WINDOW_BYTES: u64 = 64 << 20;
/// A request as it is sent: its kind, begin and end, in bytes from the beginning of the file.
const MESSAGE: usize = 3 * size_of::<u64>();
/// Kinds of requests.
const TO_READ: u64 = 0;
const AS_UNIT: u64 = 1;
const CHUNK: usize = 256 << 10;
/// Pause between two checks for the pages of a read-ahead.
const PAUSE_MIN: Duration = Duration::from_micros(50);
const PAUSE_MAX: Duration = Duration::from_millis(2);
/// If the kernel finds no memory, it reads nothing ahead and reports nothing. After this wait it gives up.
const COMING: Duration = Duration::from_secs(2);
/// Later requests wait only this long, until one succeeds again.
const COMING_NO_MORE: Duration = Duration::from_millis(20);
/// Answers: the part was read, it cannot be read, there was no room for it.
const READ: u8 = 0;
const CANNOT: u8 = 1;
const NO_ROOM: u8 = 2;
/// Killed processes that the disk still keeps. With so many, no more are started.
const ENDED_MAX: usize = 4;

/// How the process is started.
#[derive(Clone, Debug)]
pub struct Launch {
    /// The program, which calls [`serve`] when it gets these arguments.
    pub program: PathBuf,
    /// The arguments.
    pub arguments: Vec<OsString>,
}

#[derive(Debug, thiserror::Error)]
pub(super) enum FetchError {
    #[error("nobody is there to read it in the program's group")]
    Nobody,
    #[error("the process that reads it cannot be started: {0}")]
    Start(io::Error),
    #[error("that process cannot be moved into {group}: {why}")]
    Move { group: String, why: io::Error },
    #[error("that process has ended")]
    Ended,
    #[error("{ENDED_MAX} such processes have not come back from the disk yet")]
    Stuck,
}

/// The process and its requests.
#[derive(Default)]
pub(super) struct Fetcher {
    launch: Option<Launch>,
    running: Option<Running>,
    /// Ended processes, or about to end. They are reaped as they come.
    ended: Vec<Child>,
}

struct Running {
    child: Child,
    socket: OwnedFd,
    /// Its own control group.
    home: MemoryGroup,
    /// The group that it visits, and the action for which.
    away: Option<(ActionId, MemoryGroup)>,
    /// Lengths of the unanswered parts.
    waiting: VecDeque<u64>,
}

/// Answers since the last call, and work under way.
#[derive(Debug, Default)]
pub(super) struct Answers {
    /// Parts answered.
    pub(super) answered: u64,
    /// Parts of these that could not be read.
    pub(super) refused: u64,
    /// Parts of these for which there was no room.
    pub(super) no_room: u64,
    /// Parts under way.
    pub(super) waiting: usize,
    /// Bytes under way.
    pub(super) waiting_bytes: u64,
}

impl Running {
    fn pid(&self) -> i32 {
        i32::try_from(self.child.id()).unwrap_or(0)
    }
}

impl Fetcher {
    /// Starts it ahead of need.
    pub(super) fn start(&mut self, root: &Root, launch: Launch) -> Result<(), FetchError> {
        self.launch = Some(launch);
        self.ensure(root).map(|_| ())
    }

    /// Its process number, while it is believed to live.
    pub(super) fn pid(&self) -> Option<i32> {
        self.running.as_ref().map(Running::pid)
    }

    /// Whether a process can be started.
    pub(super) fn is_there(&self) -> bool {
        self.launch.is_some()
    }

    /// The process, started anew if it has ended.
    fn ensure(&mut self, root: &Root) -> Result<&mut Running, FetchError> {
        self.ended
            .retain_mut(|child| matches!(child.try_wait(), Ok(None)));
        if let Some(running) = &mut self.running {
            if !matches!(running.child.try_wait(), Ok(None)) {
                self.running = None;
            }
        }
        if self.running.is_none() {
            if self.ended.len() >= ENDED_MAX {
                return Err(FetchError::Stuck);
            }
            let launch = self.launch.as_ref().ok_or(FetchError::Nobody)?;
            self.running = Some(spawn(root, launch)?);
        }
        self.running.as_mut().ok_or(FetchError::Nobody)
    }

    /// Sends it into a group for an action. False: it works for another action.
    pub(super) fn enter(
        &mut self,
        root: &Root,
        action: ActionId,
        group: &MemoryGroup,
    ) -> Result<bool, FetchError> {
        let running = self.ensure(root)?;
        if let Some((whose, _)) = &running.away {
            return Ok(*whose == action);
        }
        if running.home != *group {
            if let Err(why) = group.take(root, running.pid()) {
                // It was about to end, which shows only later.
                if why.raw_os_error() == Some(libc::ESRCH) {
                    self.end();
                    return Err(FetchError::Ended);
                }
                let group = group.path.clone();
                return Err(FetchError::Move { group, why });
            }
        }
        running.away = Some((action, group.clone()));
        Ok(true)
    }

    pub(super) fn works_for(&self, action: ActionId) -> bool {
        self.running
            .as_ref()
            .is_some_and(|running| running.away.as_ref().is_some_and(|(whose, _)| *whose == action))
    }

    /// Requests a part of a file. False: it has enough to do. A process that has ended is forgotten.
    pub(super) fn ask(&mut self, file: &OwnedFd, wish: &Wish) -> Result<bool, FetchError> {
        let (Wish::Read(range) | Wish::AsUnit(range)) = wish;
        let length = range.end.saturating_sub(range.start);
        let running = self.running.as_mut().ok_or(FetchError::Ended)?;
        let bytes: u64 = running.waiting.iter().sum();
        let is_full = running.waiting.len() >= WINDOW || bytes.saturating_add(length) > WINDOW_BYTES;
        if is_full && !running.waiting.is_empty() {
            return Ok(false);
        }
        let message = told(wish);
        let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let files = [file.as_fd()];
        control.push(SendAncillaryMessage::ScmRights(&files));
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        match sendmsg(&running.socket, &[IoSlice::new(&message)], &mut control, flags) {
            Ok(_) => {
                running.waiting.push_back(length);
                Ok(true)
            }
            Err(Errno::AGAIN | Errno::NOBUFS) => Ok(false),
            Err(_) => {
                self.end();
                Err(FetchError::Ended)
            }
        }
    }

    /// Takes its answers.
    pub(super) fn answers(&mut self) -> Result<Answers, FetchError> {
        let running = self.running.as_mut().ok_or(FetchError::Ended)?;
        let mut answers = Answers::default();
        while !running.waiting.is_empty() {
            let mut answer = [READ; 1];
            match recv(&running.socket, &mut answer, RecvFlags::DONTWAIT) {
                Ok((1, _)) => {
                    running.waiting.pop_front();
                    answers.answered += 1;
                    answers.refused += u64::from(answer == [CANNOT]);
                    answers.no_room += u64::from(answer == [NO_ROOM]);
                }
                Err(Errno::AGAIN) => break,
                Ok(_) | Err(_) => return Err(FetchError::Ended),
            }
        }
        answers.waiting = running.waiting.len();
        answers.waiting_bytes = running.waiting.iter().sum();
        Ok(answers)
    }

    /// Calls it home, if it is away for this action. A process that the disk keeps busy is killed and replaced.
    pub(super) fn leave(&mut self, root: &Root, action: ActionId) {
        if !self.works_for(action) {
            return;
        }
        let Some(running) = &mut self.running else {
            return;
        };
        let Some((_, away)) = running.away.take() else {
            return;
        };
        let is_home = away == running.home || running.home.take(root, running.pid()).is_ok();
        if !running.waiting.is_empty() || !is_home {
            self.end();
        }
    }

    fn end(&mut self) {
        if let Some(mut running) = self.running.take() {
            let _ = running.child.kill();
            if matches!(running.child.try_wait(), Ok(None)) {
                self.ended.push(running.child);
            }
        }
    }
}

impl Drop for Fetcher {
    fn drop(&mut self) {
        // Its socket closes, so that it would end by itself.
        self.end();
    }
}

fn spawn(root: &Root, launch: &Launch) -> Result<Running, FetchError> {
    let flags = SocketFlags::CLOEXEC;
    let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
        .map_err(|e| FetchError::Start(e.into()))?;
    let mut child = Command::new(&launch.program)
        .args(&launch.arguments)
        .env_clear()
        .current_dir("/")
        .stdin(Stdio::from(theirs))
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .map_err(FetchError::Start)?;
    let home = i32::try_from(child.id())
        .ok()
        .and_then(|pid| MemoryGroup::of(root, pid));
    let Some(home) = home else {
        // It has just begun, and nothing keeps it.
        let _ = child.kill();
        let _ = child.wait();
        return Err(FetchError::Nobody);
    };
    Ok(Running {
        child,
        socket: ours,
        home,
        away: None,
        waiting: VecDeque::new(),
    })
}

/// The process itself: handles requests from its standard input until that closes.
///
/// # Errors
/// Its standard input is no such socket: it was not started by homeostat.
pub fn serve() -> io::Result<()> {
    let socket = io::stdin();
    // In the group of a program protected from the out-of-memory killer it would be the only victim, and systemd stops
    // such a unit. It has next to no memory, and its reads kill nobody. The write may fail.
    let _ = std::fs::write("/proc/self/oom_score_adj", "-1000");
    // It needs neither the daemon's priority …
    let _ = rustix::process::setpriority_process(None, 0);
    // … nor its capabilities.
    let _ = set_capabilities(
        None,
        CapabilitySets {
            effective: CapabilitySet::empty(),
            permitted: CapabilitySet::empty(),
            inheritable: CapabilitySet::empty(),
        },
    );
    let mut buffer = vec![0; CHUNK];
    let (mut coming, mut is_well, mut units_work) = (COMING, true, true);
    loop {
        let mut message = [0; MESSAGE];
        let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let received = match recvmsg(
            &socket,
            &mut [IoSliceMut::new(&mut message)],
            &mut control,
            RecvFlags::CMSG_CLOEXEC,
        ) {
            Err(Errno::INTR) => continue,
            received => received?,
        };
        if received.bytes == 0 {
            return Ok(());
        }
        let file = control.drain().find_map(|part| match part {
            RecvAncillaryMessage::ScmRights(mut files) => files.next(),
            _ => None,
        });
        let wished = file
            .filter(|_| received.bytes == MESSAGE)
            .and_then(|file| Some((file, understood(&message)?)));
        let read = wished.map(|(file, wish)| {
            let (Wish::Read(range) | Wish::AsUnit(range)) = &wish;
            // Dropped pages must come back, so no unit is read after a failure.
            if matches!(wish, Wish::AsUnit(_)) && is_well && units_work {
                match read_as_unit(&file, range.start, || drop_pages(&file, range)) {
                    // Reading it once more would make the kernel read ahead the next part.
                    Ok(true) if is_told_of(&file) => return Ok(()),
                    Ok(_) => {}
                    // Nothing was dropped. No further unit is tried.
                    Err(_) => units_work = false,
                }
            }
            read_all(&file, range, &mut buffer, coming)
        });
        let answer = match read {
            Some(Ok(())) => READ,
            Some(Err(Errno::AGAIN)) => NO_ROOM,
            Some(Err(_)) | None => CANNOT,
        };
        is_well = answer == READ;
        coming = match answer {
            READ => COMING,
            NO_ROOM => COMING_NO_MORE,
            _ => coming,
        };
        send(&socket, &[answer], SendFlags::NOSIGNAL)?;
    }
}

/// A request for a part of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Wish {
    Read(Range<u64>),
    /// Drop its pages in memory and read it as a unit. After a failed request: read it plainly.
    AsUnit(Range<u64>),
}

/// A request as bytes.
fn told(wish: &Wish) -> [u8; MESSAGE] {
    let (which, range) = match wish {
        Wish::Read(range) => (TO_READ, range),
        Wish::AsUnit(range) => (AS_UNIT, range),
    };
    let mut message = [0; MESSAGE];
    let numbers = [which, range.start, range.end];
    for (place, number) in message.chunks_exact_mut(size_of::<u64>()).zip(numbers) {
        place.copy_from_slice(&number.to_ne_bytes());
    }
    message
}

/// The reverse of [`told`].
fn understood(message: &[u8; MESSAGE]) -> Option<Wish> {
    let mut numbers = message
        .chunks_exact(size_of::<u64>())
        .filter_map(|bytes| bytes.try_into().ok().map(u64::from_ne_bytes));
    let (which, start, end) = (numbers.next()?, numbers.next()?, numbers.next()?);
    match which {
        TO_READ => Some(Wish::Read(start..end)),
        AS_UNIT => Some(Wish::AsUnit(start..end)),
        _ => None,
    }
}

/// Whether the kernel shows this process which pages of a file are in memory. Without capabilities it does so for its
/// own files. For other files it reports all pages as present.
fn is_told_of(file: &OwnedFd) -> bool {
    rustix::fs::fstat(file).is_ok_and(|stat| stat.st_uid == rustix::process::geteuid().as_raw())
}

/// Drops the pages of a part of a file. Mapped pages and pages under read or write stay (`mapping_evict_folio` in Linux
/// `mm/truncate.c`), as do pages not used lately. Then the part is read in smaller units, which is no failure. The
/// kernel also forgets its evictions from that part.
fn drop_pages(file: &OwnedFd, range: &Range<u64>) {
    // A length of zero would mean up to the end of the file.
    if let Some(length) = range.end.checked_sub(range.start).and_then(NonZeroU64::new) {
        let _ = fadvise(file, range.start, Some(length), Advice::DontNeed);
    }
}

/// Reads a part of a file, as far as the file goes, and forgets it: only the pages left in memory count.
///
/// `POSIX_FADV_WILLNEED` would be cheaper. But on many disks it reads only the beginning of a larger part
/// (`force_page_cache_ra` in Linux `mm/readahead.c`), reports no result, and makes single pages. A program with
/// single-page reads did a quarter less work with these than with the pages of a sequential read.
///
/// # Errors
/// `AGAIN`: nothing of it came for too long. Any other: it cannot be read so.
fn read_all(
    file: &OwnedFd,
    range: &Range<u64>,
    buffer: &mut [u8],
    coming: Duration,
) -> rustix::io::Result<()> {
    let (mut at, end) = (range.start, range.end);
    let (mut since, mut pause) = (None, PAUSE_MIN);
    while at < end {
        let wanted = usize::try_from(end - at).unwrap_or(usize::MAX).min(buffer.len());
        let room = buffer.get_mut(..wanted).unwrap_or_default();
        match preadv2(file, &mut [IoSliceMut::new(room)], at, ReadWriteFlags::NOWAIT) {
            Ok(0) => return Ok(()),
            Ok(bytes) => {
                at += bytes as u64;
                (since, pause) = (None, PAUSE_MIN);
            }
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) if since.get_or_insert_with(Instant::now).elapsed() < coming => {
                std::thread::sleep(pause);
                pause = (pause * 2).min(PAUSE_MAX);
            }
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_dropped_is_that_part_and_nothing_where_it_is_empty() {
        use std::io::{Read, Seek, Write};
        // On a disk: what lies in memory only is not dropped.
        let beside = std::env::current_exe().unwrap();
        let mut file = tempfile::tempfile_in(beside.parent().unwrap()).unwrap();
        file.write_all(&vec![1; 8 << 20]).unwrap();
        file.sync_all().unwrap();
        file.rewind().unwrap();
        file.read_to_end(&mut Vec::new()).unwrap();
        let file = OwnedFd::from(file);
        let in_memory = |from: u64, to: u64| {
            let pages = homeostat_kernel::cache::residency(&file, from, to - from).unwrap();
            pages.iter().filter(|is_there| **is_there).count() as u64 * rustix::param::page_size() as u64
        };
        drop_pages(&file, &(4 << 20..4 << 20));
        assert_eq!(in_memory(0, 8 << 20), 8 << 20);
        drop_pages(&file, &(2 << 20..4 << 20));
        assert_eq!(in_memory(0, 2 << 20), 2 << 20);
        assert!(in_memory(2 << 20, 4 << 20) < 2 << 20);
        assert_eq!(in_memory(4 << 20, 8 << 20), 4 << 20);
    }

    #[test]
    fn what_is_told_is_understood() {
        for wish in [Wish::Read(1 << 40..(1 << 40) + 7), Wish::AsUnit(3..5)] {
            assert_eq!(understood(&told(&wish)), Some(wish));
        }
        assert_eq!(understood(&[7; MESSAGE]), None);
    }
}
