//! One life of the fault campaign, told in full: `cargo run --release -p homeostat-laboratory --example life SEED [HOURS]`.
//!
//! Prints every line of the trace (what homeostat told, the faults, what the changes truly gain), then what did not hold.
//! With a third argument N it runs N seeds from SEED instead and prints a line for each: what was lost, what stood.
#![expect(clippy::print_stdout, reason = "an example prints its findings")]

use homeostat_laboratory::campaign::{Drawn, Options, live, told};
use std::error::Error;

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let seed: u64 = arguments.first().ok_or("which SEED?")?.parse()?;
    let hours: f64 = arguments
        .get(1)
        .map_or(Ok(Options::default().hours), |h| h.parse())?;
    if let Some(seeds) = arguments.get(2) {
        let seeds: u64 = seeds.parse()?;
        for seed in seed..seed.saturating_add(seeds) {
            let life = live(seed, hours, Drawn::new)?;
            let t = life.counts.truth;
            println!(
                "{seed}: lost {:.0} percent-seconds on the worst day, {:.4} % of {:.1} hours at work; {} kept, {} for nothing, {} stood; {} trials, {} probes; {} violations",
                t.lost_per_day_max,
                100.0 * t.lost_s / t.worked_s.max(1e-9),
                t.worked_s / 3600.0,
                t.kept,
                t.kept_for_nothing,
                t.harm_stood,
                life.counts.trials,
                t.probes,
                life.violations.len()
            );
        }
        return Ok(());
    }
    let life = told(seed, hours, Drawn::new)?;
    for line in &life.trace {
        println!("{line}");
    }
    for v in &life.violations {
        println!("{} at {}: {}", v.invariant, v.at, v.text);
    }
    println!("{:?}", life.counts);
    Ok(())
}
