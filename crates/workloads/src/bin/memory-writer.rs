//! `memory-writer`: rewrites all of its memory, again and again.
//!
//! The processor-bound program of the test of IBM's autotune: "allocates a user specified amount of memory and
//! repeatedly writes to all of this memory, reporting the number of megabytes … every 10 seconds".

use clap::Parser;
use homeostat_workloads::session::{SECONDS_MAX, THREADS_MAX};
use homeostat_workloads::{
    Backing, Duty, MIB, MemoryError, Outcome, PageAdvice, Plan, Region, Session, SessionError, Work,
};
use std::process::ExitCode;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

/// Words written between two updates of the progress counter: 256 KiB, some tens of microseconds.
const WORDS_PER_BATCH: usize = 32 * 1024;
/// Work between two pauses.
const BURST: Duration = Duration::from_millis(100);

/// Rewrites all of its memory, again and again; each thread has its own part.
///
/// The progress counter counts bytes; the reports give MiB, too.
#[derive(Debug, Parser)]
#[command(version, after_help = "Example: memory-writer 512 60 --report 10")]
struct Arguments {
    /// Memory to rewrite, in MiB.
    #[arg(value_name = "MiB", value_parser = clap::value_parser!(u64).range(1..))]
    mib: u64,
    /// Time to run, in seconds.
    #[arg(value_parser = clap::value_parser!(u64).range(1..=SECONDS_MAX))]
    seconds: u64,
    /// Threads.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=THREADS_MAX as i64))]
    threads: u16,
    /// CPU time to use, in percent of one CPU, per thread.
    #[arg(long, value_name = "PERCENT", default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=100))]
    duty: u32,
    /// Pause for so many milliseconds after every 100 ms of work, each thread by itself, as a program does that waits for people.
    /// Memory that is written all the time may stay; what lies idle meanwhile may go to swap.
    #[arg(long, value_name = "MS", value_parser = clap::value_parser!(u64).range(1..=60_000))]
    pause: Option<u64>,
    /// Kind of memory.
    #[arg(long, value_enum, default_value = "anon")]
    shared: Backing,
    /// Print a line every so many seconds.
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=SECONDS_MAX))]
    report: Option<u64>,
}

#[derive(Debug, thiserror::Error)]
enum WriterError {
    #[error(transparent)]
    Memory(#[from] MemoryError),
    #[error(transparent)]
    Session(#[from] SessionError),
}

fn main() -> ExitCode {
    match run(&Arguments::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("memory-writer: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &Arguments) -> Result<(), WriterError> {
    let session = Session::prepare()?;
    let region = Region::map(arguments.mib, arguments.shared, PageAdvice::None)?;
    let threads = usize::from(arguments.threads);
    let work = Work::publish("memory-writer", "byte", threads);
    let words = region.words();
    let part = words.len().div_ceil(threads);
    let worker = |thread: usize| {
        let mut duty = Duty::new(arguments.duty);
        let own = words.chunks(part).nth(thread).unwrap_or_default();
        let mut pass = 1;
        let mut burst = Instant::now();
        while !session.stopping() && !own.is_empty() {
            for batch in own.chunks(WORDS_PER_BATCH) {
                for word in batch {
                    word.store(pass, Relaxed);
                }
                work.add(thread, batch.len() as u64 * 8);
                duty.rest();
                if let Some(pause) = arguments.pause {
                    if burst.elapsed() >= BURST {
                        std::thread::sleep(Duration::from_millis(pause));
                        burst = Instant::now();
                    }
                }
                if session.stopping() {
                    break;
                }
            }
            pass += 1;
        }
        Ok(())
    };
    let plan = Plan {
        threads,
        duration: Duration::from_secs(arguments.seconds),
        report: arguments.report.map(Duration::from_secs),
    };
    session.run(plan, &work, worker, mebibytes)?;
    Ok(())
}

fn mebibytes(outcome: &Outcome) -> String {
    let mib = outcome.work as f64 / MIB as f64;
    format!(
        "mib={mib:.1} mib_per_10s={:.1}",
        outcome.work_per_s() * 10.0 / MIB as f64
    )
}
