//! `collapse`: large pages by hand, for one process, at once, without asking whether they help.
//!
//! What a knowing person could do with a few lines of code: the yardstick for what homeostat achieves.

use clap::{Parser, ValueEnum};
use homeostat_workloads::maps::{ProcessMapping, parse_smaps};
use homeostat_workloads::{Advice, BASE_PAGE_BYTES, LARGE_PAGE_BYTES, advise_process, main_of};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// Tries for a block whose pages are in use (EAGAIN).
const TRIES_MAX: u32 = 4;
/// Pause between two tries.
const RETRY_PAUSE: Duration = Duration::from_millis(1);
/// Base pages in a block.
const PAGES_PER_BLOCK: usize = LARGE_PAGE_BYTES / BASE_PAGE_BYTES;

/// Maps the memory of a running process by 2 MiB pages, or splits them again.
///
/// "on" gives MADV_COLLAPSE for every whole 2 MiB block of anonymous and shared memory, "off" gives MADV_COLD for
/// one 4 KiB page of each. Memory that the program refused large pages for (MADV_NOHUGEPAGE) is left alone. Needs
/// root. Prints one line with what was done; large_kib is from the process's smaps.
#[derive(Debug, Parser)]
#[command(version, after_help = "Example: collapse 1234 on --min-present 50")]
struct Arguments {
    /// Process id.
    #[arg(value_parser = clap::value_parser!(i32).range(1..))]
    pid: i32,
    /// What to do.
    #[arg(value_enum)]
    state: State,
    /// Only blocks of which at least this percentage of the base pages is present in this process. 0 tries all:
    /// right for shared memory, of which the process may have mapped nothing yet.
    #[arg(long, value_name = "PERCENT", default_value_t = 1, value_parser = clap::value_parser!(u32).range(0..=100))]
    min_present: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum State {
    /// Map by large pages.
    On,
    /// Split large pages.
    Off,
}

#[derive(Debug, thiserror::Error)]
enum CollapseError {
    #[error("cannot find process {pid}: {source}")]
    Process { pid: i32, source: io::Error },
    #[error("cannot read {path}: {source}; run as root")]
    Read { path: String, source: io::Error },
    #[error("the kernel refused advice to process {pid}: {source}; it needs root and Linux 6.1")]
    Refused { pid: i32, source: io::Error },
}

fn main() -> ExitCode {
    main_of("collapse", |arguments| {
        run(arguments).map(|line| println!("{line}"))
    })
}

/// What came of the blocks.
#[derive(Debug, Default)]
struct Tally {
    done: u64,
    in_use: u64,
    invalid: u64,
    no_memory: u64,
    skipped: u64,
    slowest: Duration,
}

fn run(arguments: &Arguments) -> Result<String, CollapseError> {
    let pid = arguments.pid;
    let process = open(pid)?;
    let before = smaps(pid)?;
    let pagemap_path = format!("/proc/{pid}/pagemap");
    let pagemap = File::open(&pagemap_path).map_err(|source| CollapseError::Read {
        path: pagemap_path,
        source,
    })?;
    let mut tally = Tally::default();
    let begin = Instant::now();
    for mapping in before.iter().filter(|mapping| mapping.is_eligible()) {
        for block in mapping.blocks() {
            if arguments.state == State::On
                && present_percent(&pagemap, block, arguments.min_present) < arguments.min_present
            {
                tally.skipped += 1;
                continue;
            }
            let one = Instant::now();
            let result = advise_block(process.as_fd(), block, arguments.state);
            tally.slowest = tally.slowest.max(one.elapsed());
            match result.map_err(|error| (Errno::from_io_error(&error), error)) {
                Ok(()) => tally.done += 1,
                Err((Some(Errno::AGAIN), _)) => tally.in_use += 1,
                Err((Some(Errno::INVAL), _)) => tally.invalid += 1,
                Err((Some(Errno::NOMEM), _)) => tally.no_memory += 1,
                Err((Some(Errno::SRCH), source)) => return Err(CollapseError::Process { pid, source }),
                Err((_, source)) => return Err(CollapseError::Refused { pid, source }),
            }
        }
    }
    let seconds = begin.elapsed().as_secs_f64();
    let after = smaps(pid)?;
    let sum =
        |mappings: &[ProcessMapping], of: fn(&ProcessMapping) -> u64| mappings.iter().map(of).sum::<u64>();
    Ok(format!(
        "collapse pid={pid} blocks={} in_use={} invalid={} no_memory={} skipped={} seconds={seconds:.3} slowest_ms={:.2} \
         large_kib_before={} large_kib={} resident_kib_before={} resident_kib={}",
        tally.done,
        tally.in_use,
        tally.invalid,
        tally.no_memory,
        tally.skipped,
        tally.slowest.as_secs_f64() * 1e3,
        sum(&before, |mapping| mapping.large_kib),
        sum(&after, |mapping| mapping.large_kib),
        sum(&before, |mapping| mapping.resident_kib),
        sum(&after, |mapping| mapping.resident_kib),
    ))
}

fn open(pid: i32) -> Result<OwnedFd, CollapseError> {
    let gone = |source| CollapseError::Process { pid, source };
    let id = Pid::from_raw(pid).ok_or_else(|| gone(io::ErrorKind::InvalidInput.into()))?;
    pidfd_open(id, PidfdFlags::empty()).map_err(|error| gone(error.into()))
}

fn smaps(pid: i32) -> Result<Vec<ProcessMapping>, CollapseError> {
    let path = format!("/proc/{pid}/smaps");
    // Names of mappings need not be UTF-8.
    match std::fs::read(&path) {
        Ok(text) => Ok(parse_smaps(&String::from_utf8_lossy(&text))),
        Err(source) => Err(CollapseError::Read { path, source }),
    }
}

/// Percentage of the block's base pages that are present; not looked up when the least percentage is 0.
fn present_percent(pagemap: &File, block: u64, min_present: u32) -> u32 {
    if min_present == 0 {
        return 0;
    }
    let mut entries = [0u8; PAGES_PER_BLOCK * 8];
    if pagemap
        .read_exact_at(&mut entries, block / BASE_PAGE_BYTES as u64 * 8)
        .is_err()
    {
        return 0; // unmapped meanwhile
    }
    // Bit 63 of an entry: present (Documentation/admin-guide/mm/pagemap.rst).
    let present = entries
        .chunks_exact(8)
        .filter(|entry| entry[7] & 0x80 != 0)
        .count();
    (present * 100).div_ceil(PAGES_PER_BLOCK) as u32
}

fn advise_block(process: BorrowedFd<'_>, block: u64, state: State) -> io::Result<()> {
    let (bytes, advice) = match state {
        State::On => (LARGE_PAGE_BYTES as u64, Advice::Collapse),
        // A part of a large page is enough, and only a part splits it.
        State::Off => (BASE_PAGE_BYTES as u64, Advice::Cold),
    };
    let mut tries = 1;
    loop {
        match advise_process(process, block, bytes, advice) {
            Ok(_) => return Ok(()),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock && tries < TRIES_MAX => {
                tries += 1;
                std::thread::sleep(RETRY_PAUSE);
            }
            Err(error) => return Err(error),
        }
    }
}
