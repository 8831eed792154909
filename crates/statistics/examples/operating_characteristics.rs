//! What the procedures of this crate achieve, by simulation: prints the tables of `docs/operating-characteristics.md`.
//!
//! ```text
//! cargo run --release -p homeostat-statistics --example operating_characteristics -- [--quick] [--seed N] [TABLE...]
//! ```
//!
//! The same seed prints the same tables on every machine. `--quick` runs a tenth of the replications.
#![allow(clippy::disallowed_methods, reason = "a program reads its arguments")]

use homeostat_statistics::block_length;
use homeostat_statistics::breaker::Breaker;
use homeostat_statistics::discovery::{Discovery, Rule};
use homeostat_statistics::guard::{Holdback, Probation, ProbationState};
use homeostat_statistics::robust::{exp, ln, mean, median, variance, wilson};
use homeostat_statistics::simulation::{Load, Random};
use homeostat_statistics::staged::{NoiseModel, ONSETS, Rollout, SHARES, SLOTS};
use homeostat_statistics::{Arm, Decision, Design, Trial, TrialParameters};
use std::process::ExitCode;

const DESIGNS: [(&str, Design); 3] = [
    ("paired", Design::Paired),
    ("blockwise", Design::Blockwise),
    ("adaptive", Design::Adaptive),
];
const BUDGET_S: f64 = 3600.0;
const HISTORY_S: usize = 1200;
const CANDIDATES: [u32; 6] = [3, 5, 10, 20, 40, 80];

/// The block of a trial: seconds discarded, seconds measured.
#[derive(Clone, Copy)]
struct Block {
    washout: u32,
    measured: u32,
}

impl Block {
    fn seconds(self) -> f64 {
        f64::from(self.washout + self.measured)
    }
}

/// What the change really does: mostly `usual`, but in a share `rarely` of the on blocks `rare` (log units).
#[derive(Clone, Copy)]
struct Truth {
    usual: f64,
    rare: f64,
    rarely: f64,
}

impl Truth {
    fn plain(relative: f64) -> Self {
        Self {
            usual: ln(1.0 + relative),
            rare: 0.0,
            rarely: 0.0,
        }
    }

    fn draw(self, random: &mut Random) -> f64 {
        if self.rarely > 0.0 && random.uniform() < self.rarely {
            self.rare
        } else {
            self.usual
        }
    }
}

struct Outcome {
    decision: Decision,
    blocks: u32,
    seconds: f64,
    /// Percent × seconds lost while on during the trial.
    harm: f64,
    trial: Trial,
    /// Scores of the load after the trial, for what follows.
    block: Block,
}

/// The passive history as the daemon would have it: (work, seconds) per second.
fn history(load: Load, random: &mut Random) -> Vec<(f64, f64)> {
    let mut signal = load.start(random);
    (0..HISTORY_S)
        .map(|_| (1000.0 * exp(signal.next(random)), 1.0))
        .collect()
}

/// One trial. `block` = fixed length, or `None` = chosen from the history for a washout of 5 s.
fn run(
    load: Load,
    truth: Truth,
    parameters: &TrialParameters,
    block: Option<Block>,
    random: &mut Random,
) -> Option<Outcome> {
    let mut signal = load.start(random);
    let past: Vec<(f64, f64)> = (0..HISTORY_S)
        .map(|_| (1000.0 * exp(signal.next(random)), 1.0))
        .collect();
    let washout = block.map_or(5, |b| b.washout);
    let fixed = block.map(|b| [b.measured]);
    let candidates: &[u32] = fixed.as_ref().map_or(&CANDIDATES, |f| f);
    // A fixed length is tried whatever the history says.
    let choice = block_length::choose(&past, 1.0, f64::from(washout), candidates, parameters, BUDGET_S);
    let (measured, scale) = match (choice, block) {
        (Ok(c), _) => (c.measured_s as u32, c.scale),
        (Err(block_length::Unmeasurable::TooNoisy { scale, .. }), Some(b)) => (b.measured, scale),
        (Err(_), _) => return None,
    };
    let block = Block { washout, measured };
    let mut trial = Trial::new(TrialParameters {
        scale_prior: scale,
        ..parameters.clone()
    });
    let (mut seconds, mut harm, mut blocks) = (0.0, 0.0, 0);
    let decision = loop {
        let coin = trial.needs_coin() && random.coin();
        let arm = trial.next_arm(coin);
        let effect = if arm == Arm::On { truth.draw(random) } else { 0.0 };
        let score = signal.block(random, washout, measured, effect);
        harm += 100.0 * (1.0 - exp(effect)).max(0.0) * block.seconds();
        seconds += block.seconds();
        blocks += 1;
        let decision = trial.observe(score);
        if decision != Decision::Continue {
            break decision;
        }
        if seconds + block.seconds() > BUDGET_S {
            break trial.budget_exhausted();
        }
    };
    Some(Outcome {
        decision,
        blocks,
        seconds,
        harm,
        trial,
        block,
    })
}

fn share(hits: usize, of: usize) -> f64 {
    hits as f64 / of.max(1) as f64
}

fn with_interval(hits: usize, of: usize) -> String {
    let (low, high) = wilson(hits as u64, of as u64, 1.96);
    format!("{:.3} [{low:.3}, {high:.3}]", share(hits, of))
}

fn row(cells: &[String]) {
    println!("| {} |", cells.join(" | "));
}

fn head(cells: &[&str]) {
    row(&cells.iter().map(|c| (*c).to_owned()).collect::<Vec<_>>());
    row(&cells.iter().map(|_| "---".to_owned()).collect::<Vec<_>>());
}

/// Paired against blockwise at equal blocks, level and load.
fn designs(runs: usize, random: &mut Random) {
    println!("## Paired against blockwise\n");
    println!(
        "M 10 s, W 5 s, 60 min. Columns per effect: share accepted, median blocks to accept; for the loss: share\n\
         accepted, harm exposure of the trial in percent × seconds.\n"
    );
    head(&[
        "alpha", "cv, load", "design", "0", "+2 %", "+5 %", "+10 %", "+20 %", "−5 %",
    ]);
    let block = Some(Block {
        washout: 5,
        measured: 10,
    });
    for alpha in [0.05, 0.01, 0.001] {
        for cv in [0.02, 0.05, 0.10] {
            for (name, load) in Load::scenarios(cv) {
                if !["rho .2", "rho .5", "rho .8", "steps", "all"].contains(&name) {
                    continue;
                }
                for (design_name, design) in DESIGNS {
                    let parameters = TrialParameters {
                        alpha,
                        design,
                        ..TrialParameters::default()
                    };
                    let mut cells = vec![
                        format!("{alpha}"),
                        format!("{:.0} % {name}", cv * 100.0),
                        design_name.to_owned(),
                    ];
                    for effect in [0.0, 0.02, 0.05, 0.10, 0.20, -0.05] {
                        let outcomes: Vec<Outcome> = (0..runs)
                            .filter_map(|_| run(load, Truth::plain(effect), &parameters, block, random))
                            .collect();
                        let accepted: Vec<&Outcome> = outcomes
                            .iter()
                            .filter(|o| o.decision == Decision::Benefit)
                            .collect();
                        let rate = share(accepted.len(), outcomes.len());
                        cells.push(if effect > 0.0 {
                            let blocks: Vec<f64> = accepted.iter().map(|o| f64::from(o.blocks)).collect();
                            format!("{rate:.3}, {:.0}", median(&blocks))
                        } else if effect < 0.0 {
                            let harm: Vec<f64> = outcomes.iter().map(|o| o.harm).collect();
                            format!("{rate:.3}, {:.0} %s", mean(&harm))
                        } else {
                            format!("{rate:.3}")
                        });
                    }
                    row(&cells);
                }
            }
        }
    }
    println!();
}

fn main() -> ExitCode {
    let mut seed = 20_251_121u64;
    let mut quick = false;
    let mut wanted: Vec<String> = Vec::new();
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--quick" => quick = true,
            "--seed" => match arguments.next().and_then(|s| s.parse().ok()) {
                Some(s) => seed = s,
                None => {
                    eprintln!("--seed needs a number");
                    return ExitCode::from(2);
                }
            },
            name => wanted.push(name.to_owned()),
        }
    }
    let runs = |full: usize| if quick { (full / 10).max(20) } else { full };
    let tables: [(&str, &dyn Fn(&mut Random)); 1] = [("designs", &|r| designs(runs(400), r))];
    for name in &wanted {
        if !tables.iter().any(|(n, _)| n == name) {
            eprintln!(
                "no table {name}; there are: {}",
                tables.map(|(n, _)| n).join(", ")
            );
            return ExitCode::from(2);
        }
    }
    for (i, (name, table)) in tables.iter().enumerate() {
        if wanted.is_empty() || wanted.iter().any(|w| w == name) {
            // Each table has its own stream, so that one can be printed alone.
            table(&mut Random::new(seed.wrapping_add(i as u64 * 1_000_003)));
        }
    }
    ExitCode::SUCCESS
}
