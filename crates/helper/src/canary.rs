//! The memory canary: a process that measures how fast the machine's memory is, while a trial runs.
//!
//! Neighbours and other guests of a host make memory slower for seconds at a time. A trial's program suffers, and so does
//! the canary. What the canary shows can be taken out of the trial's noise.
//!
//! * Every [`PERIOD`] the canary makes [`LOADS`] dependent loads on a random cycle through [`LINES`] cache lines. Each load
//!   misses caches and translation buffers. It uses small pages, so that a trial of large pages does not change it.
//! * It builds the cycle in slices, so that its start is no burst.
//! * Its counts lie in a file in memory of one page, which the daemon reads without a wait. The file cannot shrink.
//! * It has no capability, opens nothing, and ends with its line, with the mother, or with the daemon. The kernel ends it
//!   first when memory is short.

use crate::mother::{Answer, Make};
use crate::pool::{has_ended, there};
use crate::wire::{Line, wait};
use homeostat_model::{Bytes, CanaryReading, Nanoseconds};
use rustix::event::PollFlags;
use rustix::fs::{MemfdFlags, Mode, OFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::io::{Errno, pread, pwrite};
use rustix::process::{Signal, pidfd_send_signal};
use rustix::thread::disable_transparent_huge_pages;
use rustix::time::{ClockId, clock_gettime};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

/// Pause between two rounds of loads.
const PERIOD: Duration = Duration::from_millis(20);
/// Loads of a round: 20 to 40 µs. With waking up that was 0.8 % of a CPU.
const LOADS: u32 = 200;
/// Cache lines of the cycle: 64 MiB, beyond the caches and the reach of translation buffers.
const LINES: u32 = 1 << 20;
/// Lines that are added to the cycle in a round: 0.5 ms, until it is whole after 5 s.
const SLICE: u32 = 4096;
/// Rounds between two looks at its own memory: one second.
const LOOK_EVERY: u64 = 50;
/// Memory beyond the program's own: the lines, and 8 MiB for all else.
pub(crate) const MEMORY: u64 = LINES as u64 * 64 + (8 << 20);
/// Seconds of CPU time in its life: a day at 0.5 % are 432 s.
pub(crate) const CPU_SECONDS: u64 = 600;
/// Size of the file with the counts.
pub(crate) const COUNTS_BYTES: u64 = 4096;

/// Calls of the canary: sleep until the line ends, read clocks and its own size, write its counts.
pub(crate) const CALLS: &[libc::c_long] = &[
    libc::SYS_ppoll,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_poll,
    libc::SYS_clock_gettime,
    libc::SYS_pread64,
    libc::SYS_pwrite64,
    libc::SYS_munmap,
    libc::SYS_restart_syscall,
    libc::SYS_exit,
    libc::SYS_exit_group,
];

/// Why there is no canary.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoCanary {
    /// No process could be made.
    #[error("no process can be made for it ({0})")]
    Start(Errno),
    /// It ended by itself, or was killed.
    #[error("its process has ended")]
    Ended,
    /// Its counts cannot be read.
    #[error("its counts cannot be read ({0})")]
    Read(Errno),
}

/// One cache line: the index of the next one in the cycle.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct CacheLine(u32);

/// The canary's memory: a random cycle through its lines.
pub(crate) struct Memory {
    lines: Vec<CacheLine>,
    most: u32,
    random: u64,
    at: u32,
}

impl Memory {
    /// Reserves address space. Pages come with the lines.
    pub(crate) fn reserve() -> Result<Self, Errno> {
        Self::of(LINES)
    }

    fn of(most: u32) -> Result<Self, Errno> {
        let mut lines = Vec::new();
        lines.try_reserve_exact(most as usize).map_err(|_| Errno::NOMEM)?;
        Ok(Self {
            lines,
            most,
            random: 0x9E37_79B9_7F4A_7C15,
            at: 0,
        })
    }

    fn is_whole(&self) -> bool {
        self.lines.len() >= self.most as usize
    }

    /// Adds lines, each behind a random one of those before: every cycle is equally likely.
    fn grow(&mut self, by: u32) {
        let from = u32::try_from(self.lines.len()).unwrap_or(self.most);
        for line in from..from.saturating_add(by).min(self.most) {
            let place = match line {
                0 => 0,
                some => (self.draw() % u64::from(some)) as usize,
            };
            match self.lines.get_mut(place) {
                Some(before) => {
                    let next = std::mem::replace(&mut before.0, line);
                    self.lines.push(CacheLine(next));
                }
                None => self.lines.push(CacheLine(line)),
            }
        }
    }

    /// A step of xorshift64 (Marsaglia 2003). Anybody may guess it.
    fn draw(&mut self) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random
    }

    /// Follows the cycle for that many loads, each of which needs the one before.
    fn follow(&mut self, loads: u32) {
        let mut at = self.at;
        for _ in 0..loads {
            at = self.lines.get(at as usize).map_or(0, |line| line.0);
        }
        self.at = std::hint::black_box(at);
    }
}

/// Sums since its start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Counts {
    loads: u64,
    /// CPU time of the loads, ns.
    loading: u64,
    /// CPU time of the process, ns.
    cpu: u64,
    /// Resident memory, bytes.
    resident: u64,
}

/// Length of [`Counts`] in the file, with a check that tells a record from a half-written one.
const RECORD: usize = 5 * size_of::<u64>();

impl Counts {
    fn check(self) -> u64 {
        let mix = |sum: u64, part: u64| (sum ^ part).wrapping_mul(0x0000_0100_0000_01B3);
        [self.loads, self.loading, self.cpu, self.resident]
            .into_iter()
            .fold(0xCBF2_9CE4_8422_2325, mix)
    }

    fn bytes(self) -> [u8; RECORD] {
        let mut bytes = [0; RECORD];
        let parts = [self.loads, self.loading, self.cpu, self.resident, self.check()];
        for (place, part) in bytes.chunks_exact_mut(size_of::<u64>()).zip(parts) {
            place.copy_from_slice(&part.to_ne_bytes());
        }
        bytes
    }

    /// `None`: it was being written.
    fn parse(bytes: &[u8; RECORD]) -> Option<Self> {
        let part = |index: usize| {
            let at = index * size_of::<u64>();
            let bytes = bytes.get(at..at + size_of::<u64>())?;
            Some(u64::from_ne_bytes(bytes.try_into().ok()?))
        };
        let counts = Self {
            loads: part(0)?,
            loading: part(1)?,
            cpu: part(2)?,
            resident: part(3)?,
        };
        let is_empty = counts == Self::default() && part(4)? == 0;
        (is_empty || counts.check() == part(4)?).then_some(counts)
    }

    fn read(file: &OwnedFd) -> Result<Option<Self>, Errno> {
        let mut bytes = [0; RECORD];
        match pread(file, &mut bytes, 0)? {
            RECORD => Ok(Self::parse(&bytes)),
            _ => Err(Errno::IO),
        }
    }
}

/// The file with the counts.
pub(crate) fn counts_file() -> Result<OwnedFd, Errno> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = memfd_create("homeostat-canary", flags)?;
    ftruncate(&file, COUNTS_BYTES)?;
    fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(file)
}

/// First steps of the process, while it may still open files. Returns the file with its own size.
pub(crate) fn prepare() -> Result<OwnedFd, Errno> {
    // Without it the kernel may end another process first. The canary is the cheapest loss.
    let _ = std::fs::write("/proc/self/oom_score_adj", "1000");
    // It competes like any program: with the daemon's priority it would be disturbed less than the trial's program.
    let _ = rustix::process::setpriority_process(None, 0);
    disable_transparent_huge_pages(true)?;
    rustix::fs::open(
        "/proc/self/statm",
        OFlags::RDONLY | OFlags::CLOEXEC,
        Mode::empty(),
    )
}

/// The process: makes loads until its line ends.
pub(crate) fn serve(line: &Line, file: &OwnedFd, own: &OwnedFd, mut memory: Memory) -> Result<(), Errno> {
    let mut counts = Counts::default();
    for round in 0.. {
        match wait(&line.0, PollFlags::IN, Some(Instant::now() + PERIOD)) {
            Err(Errno::TIMEDOUT) => {}
            Err(e) => return Err(e),
            // The daemon sends nothing: the line has ended.
            Ok(()) => return Ok(()),
        }
        if memory.is_whole() {
            let begun = cpu_time();
            memory.follow(LOADS);
            counts.loading = counts.loading.saturating_add(cpu_time().saturating_sub(begun));
            counts.loads = counts.loads.saturating_add(u64::from(LOADS));
        } else {
            memory.grow(SLICE);
        }
        if round % LOOK_EVERY == 0 {
            counts.resident = resident(own);
        }
        counts.cpu = cpu_time();
        pwrite(file, &counts.bytes(), 0)?;
    }
    Ok(())
}

/// CPU time of this process's one thread, ns. A process with a limit of CPU time has its own clock only by ticks.
fn cpu_time() -> u64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    seconds
        .saturating_mul(1_000_000_000)
        .saturating_add(u64::try_from(time.tv_nsec).unwrap_or(0))
}

/// Resident bytes by an open `statm` (field 2, in pages: proc_pid_statm(5)); 0 if unreadable.
fn resident(statm: &OwnedFd) -> u64 {
    let mut buffer = [0; 128];
    let length = pread(statm, &mut buffer, 0).unwrap_or(0);
    let text = buffer.get(..length).unwrap_or_default();
    let pages = homeostat_kernel::bytes::words(text)
        .nth(1)
        .and_then(homeostat_kernel::bytes::number)
        .unwrap_or(0);
    pages.saturating_mul(rustix::param::page_size() as u64)
}

/// The daemon's handle of a canary. Dropping it ends the process.
#[derive(Debug)]
pub struct Canary {
    /// The process ends when it closes.
    _line: Line,
    process: OwnedFd,
    file: OwnedFd,
    pid: i32,
    last: Counts,
}

impl Canary {
    /// Has one made. It measures after some seconds, when its memory is filled.
    ///
    /// # Errors
    /// There is no mother of helpers, or she could make no process.
    pub fn start() -> Result<Self, NoCanary> {
        let mut pool = there().ok_or(NoCanary::Start(Errno::SRCH))?;
        let (answer, descriptors) = pool.ask_mother(&Make::Canary).map_err(NoCanary::Start)?;
        let made: Result<[OwnedFd; 3], _> = descriptors.try_into();
        let (Answer::Canary(pid), Ok([line, process, file])) = (answer, made) else {
            return Err(NoCanary::Start(Errno::PROTO));
        };
        Ok(Self {
            _line: Line(line),
            process,
            file,
            pid,
            last: Counts::default(),
        })
    }

    /// Its process number.
    pub fn pid(&self) -> i32 {
        self.pid
    }

    /// What it did since the last call: some system calls without a wait, a few µs.
    ///
    /// # Errors
    /// It has ended, or its counts make no sense.
    pub fn read(&mut self) -> Result<CanaryReading, NoCanary> {
        // A record that is just being written is whole a moment later, or in the next sample.
        let now = match Counts::read(&self.file).map_err(NoCanary::Read)? {
            Some(counts) => counts,
            None => Counts::read(&self.file)
                .map_err(NoCanary::Read)?
                .unwrap_or(self.last),
        };
        if has_ended(&self.process) {
            return Err(NoCanary::Ended);
        }
        let before = std::mem::replace(&mut self.last, now);
        Ok(CanaryReading {
            loads: now.loads.saturating_sub(before.loads),
            loading: Nanoseconds(now.loading.saturating_sub(before.loading)),
            cpu: Nanoseconds(now.cpu.saturating_sub(before.cpu)),
            resident: Bytes(now.resident),
        })
    }
}

impl Drop for Canary {
    fn drop(&mut self) {
        // An error means that it has ended. The mother's kernel reaps it.
        let _ = pidfd_send_signal(&self.process, Signal::KILL);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lines_form_one_cycle_also_when_they_come_in_slices() {
        let mut memory = Memory::of(1000).unwrap();
        while !memory.is_whole() {
            memory.grow(64);
        }
        let mut seen = vec![false; 1000];
        let (mut at, mut far) = (0, 0);
        for _ in 0..1000 {
            assert!(!std::mem::replace(&mut seen[at], true), "{at} comes twice");
            let next = memory.lines[at].0 as usize;
            far += usize::from(next.abs_diff(at) > 10);
            at = next;
        }
        assert_eq!(at, 0);
        assert!(far > 900, "the order is random: {far}");
        memory.follow(1000);
        assert_eq!(memory.at, 0);
    }

    #[test]
    fn half_a_record_is_told_from_a_whole_one() {
        let (one, other) = (
            Counts {
                loads: 400,
                loading: 31_000,
                cpu: 90_000,
                resident: 70 << 20,
            },
            Counts {
                loads: 600,
                loading: 46_000,
                cpu: 130_000,
                resident: 70 << 20,
            },
        );
        assert_eq!(Counts::parse(&one.bytes()), Some(one));
        assert_eq!(Counts::parse(&[0; RECORD]), Some(Counts::default()));
        for cut in 1..24 {
            let mut torn = one.bytes();
            torn[..cut].copy_from_slice(&other.bytes()[..cut]);
            if torn != one.bytes() {
                assert_eq!(Counts::parse(&torn), None, "{cut}");
            }
        }
    }
}
