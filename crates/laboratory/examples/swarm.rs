//! A swarm of random machines against the best fixed placement:
//! `cargo run --release -p homeostat-laboratory --example swarm [MACHINES [HOURS [SEED [FROM]]]]`.
//!
//! Prints a line per machine on standard error and the figures at the end. With HOMEOSTAT_SWARM_JSON=FILE it writes every
//! machine with its experiments as JSON, with
//! HOMEOSTAT_SWARM_ROUGH=1 the signals are rough. With HOMEOSTAT_SWARM_MINUTES=M it ends after the machine that is done when
//! so many minutes are over, and tells and shows those that it has.
#![expect(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "an example prints its table"
)]

use homeostat_laboratory::swarm::{self, Options};
use std::error::Error;
use std::thread::available_parallelism;

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let mut options = Options {
        rough: std::env::var_os("HOMEOSTAT_SWARM_ROUGH").is_some(),
        ..Options::default()
    };
    if let Some(count) = arguments.first() {
        options.count = count.parse()?;
    }
    if let Some(hours) = arguments.get(1) {
        options.hours = hours.parse()?;
    }
    if let Some(seed) = arguments.get(2) {
        options.seed = seed.parse()?;
    }
    if let Some(from) = arguments.get(3) {
        options.from = from.parse()?;
    }
    let threads = available_parallelism().map_or(1, Into::into);
    let minutes: f64 = match std::env::var("HOMEOSTAT_SWARM_MINUTES") {
        Ok(text) => text.parse()?,
        Err(_) => f64::INFINITY,
    };
    let started = std::time::Instant::now();
    let mut report = swarm::run(&options, threads, &mut |case| {
        eprintln!(
            "{:>6.0} s  {:>5}: {:.1} % of the best (left alone {:.1} %), {} trials, lost {:.4} %, {} placements tried; {}",
            started.elapsed().as_secs_f64(),
            case.index,
            case.share * 100.0,
            case.alone * 100.0,
            case.trials.len(),
            case.exposure * 100.0,
            case.tried,
            case.machine
        );
        started.elapsed().as_secs_f64() < minutes * 60.0
    })?;
    // What the page and the figures say is what was run.
    options.count = report.cases.len() as u64;
    report.options.count = options.count;
    println!("{}", report.text());
    if let Some(file) = std::env::var_os("HOMEOSTAT_SWARM_JSON") {
        std::fs::write(file, serde_json::to_vec_pretty(&report)?)?;
    }
    Ok(())
}
