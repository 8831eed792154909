//! A process that has parts of files read in the control group of another program.
//!
//! The kernel counts a page of a file to the group of the process that has it read first, whoever uses it afterwards, and goes
//! by the process and not by the thread. What a program lost and homeostat has read for it must count where it did before: to
//! homeostat's group the program's pages do not belong, and a limit that somebody gave to the program would no longer hold for
//! them. So a process that does nothing else is moved into the program's group, is given open files one after another with the
//! part that is wanted, reads it, and is moved back. It is started before it is needed: when memory
//! is short, nothing is.
//!
//! It has no capabilities, opens nothing, and ends when the socket through which it is told closes: a daemon that is killed
//! leaves nobody behind in somebody's group, but for as long as the disk takes for what it was told last ([`WINDOW_BYTES`]).
//!
//! **It ends nobody**, as far as the pages go. A plain read of a page that is not there asks for memory in a way that has the kernel end a
//! process of the group where there is none. To read ahead does not: the kernel gives up. So it only reads what is in memory already (`RWF_NOWAIT`, which has
//! the kernel read ahead what is not: `filemap_get_pages` in Linux `mm/filemap.c`), and asks again until it is. What is read as a unit
//! ([`read_as_unit`]) is a fault on a mapping: that reads ahead first, too, but asks for a single page in the first way where this gave nothing. So
//! it is done only where the machine and every limit above leave room to spare
//! ([`bringing_back`](crate::bringing_back)): the kernel ends somebody only when nothing at all can be taken, and what was read just before can be. It
//! would end somebody for the program's own next page then.

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

/// Parts that it has been told and has not answered for, at most: what a socket holds.
const WINDOW: usize = 192;
/// … and in bytes.
const WINDOW_BYTES: u64 = 64 << 20;
/// A wish as it is told: which, and from where to where, in bytes from the beginning of the file.
const MESSAGE: usize = 3 * size_of::<u64>();
/// Which wishes there are.
const TO_READ: u64 = 0;
const AS_UNIT: u64 = 1;
/// Read at one time.
const CHUNK: usize = 256 << 10;
/// Between two looks whether what is read ahead is there.
const PAUSE_MIN: Duration = Duration::from_micros(50);
const PAUSE_MAX: Duration = Duration::from_millis(2);
/// The kernel reads nothing ahead where it finds no memory, and does not tell. What is not there after so long is not coming …
const COMING: Duration = Duration::from_secs(2);
/// … and what was asked for after that is not waited for so long, until something is there again.
const COMING_NO_MORE: Duration = Duration::from_millis(20);
/// Its answers: the part was read, it cannot be, there was no room for it.
const READ: u8 = 0;
const CANNOT: u8 = 1;
const NO_ROOM: u8 = 2;
/// Processes that were ended and that the disk still keeps; no more are started then.
const ENDED_MAX: usize = 4;

/// How the process is started.
#[derive(Clone, Debug)]
pub struct Launch {
    /// The program, which calls [`serve`] …
    pub program: PathBuf,
    /// … when it is given these.
    pub arguments: Vec<OsString>,
}

/// Why nothing is read for anybody.
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

/// The process, and what it was told.
#[derive(Default)]
pub(super) struct Fetcher {
    launch: Option<Launch>,
    running: Option<Running>,
    /// Ended or about to: they are waited for as they come.
    ended: Vec<Child>,
}

struct Running {
    child: Child,
    socket: OwnedFd,
    /// Where it belongs.
    home: MemoryGroup,
    /// Where it is, if not there, and for whose sake.
    away: Option<(ActionId, MemoryGroup)>,
    /// Lengths of the parts that it has not answered for.
    waiting: VecDeque<u64>,
}

/// What it has answered since the last time, and what it is still at.
#[derive(Debug, Default)]
pub(super) struct Answers {
    /// Parts that it has answered for.
    pub(super) answered: u64,
    /// … of which could not be read …
    pub(super) refused: u64,
    /// … and for which there was no room.
    pub(super) no_room: u64,
    /// Parts that it is still at.
    pub(super) waiting: usize,
    /// … in bytes.
    pub(super) waiting_bytes: u64,
}

impl Running {
    fn pid(&self) -> i32 {
        i32::try_from(self.child.id()).unwrap_or(0)
    }
}

impl Fetcher {
    /// Starts it, to be there when it is needed.
    pub(super) fn start(&mut self, root: &Root, launch: Launch) -> Result<(), FetchError> {
        self.launch = Some(launch);
        self.ensure(root).map(|_| ())
    }

    /// Its number, while it lives as far as is known.
    pub(super) fn pid(&self) -> Option<i32> {
        self.running.as_ref().map(Running::pid)
    }

    /// Whether anybody can be started.
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

    /// Sends it into a group for the sake of an action; false: it works for another one.
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
                // It was about to end, which is not known at once.
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

    /// Whether it is there for the sake of this action.
    pub(super) fn works_for(&self, action: ActionId) -> bool {
        self.running
            .as_ref()
            .is_some_and(|running| running.away.as_ref().is_some_and(|(whose, _)| *whose == action))
    }

    /// Has a part of a file read; false: it has enough to do. One that has ended is forgotten: the next one is another
    /// process.
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

    /// Calls it back home, if it is away for this action. One that is not done, since the disk keeps it, is ended: the next one is
    /// another process.
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

    /// Ends the process.
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

/// The process itself: does what it is told through its standard input until that closes.
///
/// # Errors
/// Its standard input is no such socket: it was not started by homeostat.
pub fn serve() -> io::Result<()> {
    let socket = io::stdin();
    // In the group of a program whose own processes are protected from the out-of-memory killer it would be the only one that can be
    // chosen, and systemd stops a unit of which one was. It has next to no memory, and what it reads ends nobody. Where that is refused
    // it is as it was.
    let _ = std::fs::write("/proc/self/oom_score_adj", "-1000");
    // The priority of the daemon it does not need …
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
            // What is dropped must come back: not where the last one did not.
            if matches!(wish, Wish::AsUnit(_)) && is_well && units_work {
                match read_as_unit(&file, range.start, || drop_pages(&file, range)) {
                    // To read it once more would have the kernel read ahead what follows.
                    Ok(true) if is_told_of(&file) => return Ok(()),
                    Ok(_) => {}
                    // Nothing was dropped. It is not tried again with the next one.
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

/// What it is to do with a part of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Wish {
    /// It is read.
    Read(Range<u64>),
    /// What is in memory of it is dropped, and it is read as a unit; where what was wished before did not come, it is read.
    AsUnit(Range<u64>),
}

/// A wish as it is told …
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

/// … and as it is understood.
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

/// Whether the kernel tells this process which pages of a file are in memory: without capabilities, of its own files. Of others it says that all
/// are.
fn is_told_of(file: &OwnedFd) -> bool {
    rustix::fs::fstat(file).is_ok_and(|stat| stat.st_uid == rustix::process::geteuid().as_raw())
}

/// Drops what is in memory of a part of a file. What is mapped, being read or waits to be written stays (`mapping_evict_folio` in
/// Linux `mm/truncate.c`), as pages that were not used lately; that it does is no failure: then the part is read in smaller units. The kernel forgets as well
/// what it had taken of that part.
fn drop_pages(file: &OwnedFd, range: &Range<u64>) {
    // A length of zero would mean up to the end of the file.
    if let Some(length) = range.end.checked_sub(range.start).and_then(NonZeroU64::new) {
        let _ = fadvise(file, range.start, Some(length), Advice::DontNeed);
    }
}

/// Reads a part of a file, as far as the file goes, and forgets it: what it is read for are the pages that stay in memory.
///
/// To ask the kernel to read ahead (`POSIX_FADV_WILLNEED`) would be cheaper, but of a larger part it reads only the beginning on many disks
/// (`force_page_cache_ra` in Linux `mm/readahead.c`), does not tell what came of it, and makes pages one by one: a program that
/// reads single pages did a quarter less with them than with those that the kernel makes for who reads in order.
///
/// # Errors
/// `AGAIN`: for so long nothing of it came; any other: it cannot be read so.
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
