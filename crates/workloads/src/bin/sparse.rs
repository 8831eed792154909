//! `sparse`: a large reservation of which one base page in every 2 MiB is used.
//!
//! The case against large pages: converting it would multiply its memory by up to 512 and save few translations.

use clap::Parser;
use homeostat_workloads::chain::Random;
use homeostat_workloads::{LARGE_PAGE_BYTES, ProgramError, Region, Session, Share, Timing, Work, main_of};
use std::process::ExitCode;
use std::sync::atomic::Ordering::Relaxed;

/// Touches between two updates of the progress counter.
const TOUCHES_PER_BATCH: u64 = 4096;
/// Distance between two places touched, in words.
const STEP_WORDS: usize = LARGE_PAGE_BYTES / 8;

/// Reserves much memory and uses one 4 KiB page in every 2 MiB of it, in random order.
///
/// The progress counter counts touches (one word read and written).
#[derive(Debug, Parser)]
#[command(
    version,
    after_help = "Example: sparse 8192 60 --duty 50 --report 1   (uses 16 MiB)"
)]
struct Arguments {
    /// Memory to reserve, in MiB; a 512th of it is used.
    #[arg(value_name = "MiB", value_parser = clap::value_parser!(u64).range(2..))]
    mib: u64,
    #[command(flatten)]
    timing: Timing,
    #[command(flatten)]
    pace: Share,
}

fn main() -> ExitCode {
    main_of("sparse", run)
}

fn run(arguments: &Arguments) -> Result<(), ProgramError> {
    let session = Session::prepare()?;
    let region = Region::reserve(arguments.mib)?;
    let words = region.words();
    // Not always the first page of a block: 512 pages at the same offset would fight for the same cache sets.
    let places: Vec<usize> = (0..words.len() / STEP_WORDS)
        .map(|block| block * STEP_WORDS + block * 520 % STEP_WORDS)
        .collect();
    for &place in &places {
        words[place].store(1, Relaxed);
    }
    let work = Work::publish("sparse", "touch", 1);
    let worker = |thread: usize| {
        let mut duty = arguments.pace.duty();
        let mut random = Random::new(1);
        while !session.stopping() {
            for _ in 0..TOUCHES_PER_BATCH {
                let place = places[random.below(places.len() as u64) as usize];
                words[place].fetch_add(1, Relaxed);
            }
            work.add(thread, TOUCHES_PER_BATCH);
            duty.rest();
        }
        Ok(())
    };
    session.run(arguments.timing.plan(1), &work, worker, |_| {
        format!("used_mib={:.1}", places.len() as f64 * 4096.0 / 1048576.0)
    })?;
    Ok(())
}
