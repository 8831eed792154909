//! `memory-writer`: rewrites all of its memory, again and again.
//!
//! The processor-bound program of the test of IBM's autotune: "allocates a user specified amount of memory and
//! repeatedly writes to all of this memory, reporting the number of megabytes … every 10 seconds".

use clap::Parser;
use homeostat_workloads::session::THREADS_MAX;
use homeostat_workloads::{
    Backing, Outcome, PageAdvice, Pausing, ProgramError, Region, Session, Timing, Work, main_of,
};
use std::process::ExitCode;
use std::sync::atomic::Ordering::Relaxed;

/// Words written between two updates of the progress counter: 256 KiB, some tens of microseconds.
const WORDS_PER_BATCH: usize = 32 * 1024;

/// Rewrites all of its memory, again and again; each thread has its own part.
///
/// The progress counter counts bytes; the reports give MiB, too.
#[derive(Debug, Parser)]
#[command(version, after_help = "Example: memory-writer 512 60 --report 10")]
struct Arguments {
    /// Memory to rewrite, in MiB.
    #[arg(value_name = "MiB", value_parser = clap::value_parser!(u64).range(1..))]
    mib: u64,
    #[command(flatten)]
    timing: Timing,
    /// Threads.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=THREADS_MAX as i64))]
    threads: u16,
    #[command(flatten)]
    pace: Pausing,
    /// Kind of memory.
    #[arg(long, value_enum, default_value = "anon")]
    shared: Backing,
}

fn main() -> ExitCode {
    main_of("memory-writer", run)
}

fn run(arguments: &Arguments) -> Result<(), ProgramError> {
    let session = Session::prepare()?;
    let region = Region::map(arguments.mib, arguments.shared, PageAdvice::None)?;
    let threads = usize::from(arguments.threads);
    let work = Work::publish("memory-writer", "byte", threads);
    let words = region.words();
    let part = words.len().div_ceil(threads);
    let worker = |thread: usize| {
        let mut duty = arguments.pace.duty();
        let own = words.chunks(part).nth(thread).unwrap_or_default();
        let mut pass = 1;
        while !session.stopping() && !own.is_empty() {
            for batch in own.chunks(WORDS_PER_BATCH) {
                for word in batch {
                    word.store(pass, Relaxed);
                }
                work.add(thread, batch.len() as u64 * 8);
                duty.rest();
                if session.stopping() {
                    break;
                }
            }
            pass += 1;
        }
        Ok(())
    };
    session.run(arguments.timing.plan(threads), &work, worker, Outcome::mebibytes)?;
    Ok(())
}
