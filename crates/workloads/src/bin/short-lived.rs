//! `short-lived`: processes that end as soon as they have begun, as the SPEC SDET mix.
//!
//! SDET mimics interactive users running scripts of common commands; its time goes into stat, fork, exec and exit.
//! Nothing lives long enough to be worth an experiment, and homeostat must cost it nothing.

use clap::Parser;
use homeostat_workloads::session::THREADS_MAX;
use homeostat_workloads::{ProgramError, Session, Timing, Work, main_of};
use std::io;
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

/// Directory entries that each child looks at.
const ENTRIES_PER_CHILD: usize = 64;
/// Memory that each child touches, in bytes.
const BYTES_PER_CHILD: usize = 1024 * 1024;
/// Longest sleep without a look at whether to stop.
const SLEEP_MAX: Duration = Duration::from_millis(100);

/// Starts short-lived processes at a steady rate: each looks at 64 files, touches 1 MiB and ends.
///
/// The progress counter counts processes that have ended well. CPU time includes the children's.
#[derive(Debug, Parser)]
#[command(version, after_help = "Example: short-lived 60 --rate 100 --report 1")]
struct Arguments {
    #[command(flatten)]
    timing: Timing,
    /// Processes per second of all threads together; 0 means as many as the machine can.
    #[arg(long, value_name = "PER_SECOND", default_value_t = 50, value_parser = clap::value_parser!(u32).range(0..=100_000))]
    rate: u32,
    /// Processes at a time.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=THREADS_MAX as i64))]
    threads: u16,
    /// Be one of the children.
    #[arg(long, hide = true)]
    child: bool,
}

fn main() -> ExitCode {
    main_of("short-lived", |arguments: &Arguments| {
        if arguments.child { child() } else { run(arguments) }
    })
}

fn run(arguments: &Arguments) -> Result<(), ProgramError> {
    let session = Session::prepare()?;
    let program = std::env::current_exe().map_err(ProgramError::OwnProgram)?;
    let threads = usize::from(arguments.threads);
    let work = Work::publish("short-lived", "process", threads);
    let interval = match arguments.rate {
        0 => Duration::ZERO,
        rate => Duration::from_secs(threads as u64) / rate,
    };
    let worker = |thread: usize| {
        let mut due = Instant::now();
        while !session.stopping() {
            let left = due.saturating_duration_since(Instant::now());
            if !left.is_zero() {
                std::thread::sleep(left.min(SLEEP_MAX));
                continue;
            }
            let status = Command::new(&program)
                .args(["1", "--child"])
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .status()?;
            // SIGINT from a terminal reaches the child, too, and ends it.
            if !status.success() && !session.stopping() {
                return Err(io::Error::other(format!("a child ended with {status}")));
            }
            work.add(thread, 1);
            // More than a second behind: give the schedule up instead of catching up in a burst.
            let earliest = Instant::now().checked_sub(Duration::from_secs(1)).unwrap_or(due);
            due = (due + interval).max(earliest);
        }
        Ok(())
    };
    session.run(arguments.timing.plan(threads), &work, worker, |_| String::new())?;
    Ok(())
}

fn child() -> Result<(), ProgramError> {
    let mut seen = 0;
    for directory in ["/", "/etc", "/usr/bin"] {
        let entries = match std::fs::read_dir(directory) {
            Ok(entries) => entries,
            Err(error) if directory == "/" => return Err(ProgramError::Child(error)),
            Err(_) => continue,
        };
        for entry in entries.flatten().take(ENTRIES_PER_CHILD - seen) {
            // What the file is does not matter, nor that it may be gone by now.
            std::hint::black_box(entry.metadata().ok());
            seen += 1;
        }
    }
    let mut memory = vec![0u8; BYTES_PER_CHILD];
    for page in memory.chunks_mut(4096) {
        page[0] = 1;
    }
    std::hint::black_box(&memory);
    Ok(())
}
