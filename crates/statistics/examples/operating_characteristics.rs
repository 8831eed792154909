//! What the procedures of this crate achieve, by simulation: how often a trial errs, and how long it takes.
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
use homeostat_statistics::guard::{ALARM, Holdback, Probation, ProbationState};
use homeostat_statistics::robust::{exp, ln, mean, median, variance, wilson};
use homeostat_statistics::simulation::{Load, Random, Signal};
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
const CANDIDATES: [f64; 10] = [1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 10.0, 20.0, 40.0, 80.0];

/// The block of a trial: seconds discarded, seconds measured.
#[derive(Clone, Copy)]
struct Block {
    washout: u32,
    measured: u32,
}

/// History of one second after the other.
fn history(seconds: &[(f64, f64)]) -> block_length::Past<'_> {
    block_length::Past {
        seconds,
        interval: 1.0,
        few: false,
    }
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
    block: Block,
    /// The load, for what follows.
    signal: Signal,
}

/// How long blocks are.
#[derive(Clone, Copy)]
enum Length {
    /// Always the same.
    Fixed(Block),
    /// Chosen from the history, for this washout.
    Chosen { washout: u32 },
}

/// One trial; `None` when it would not be started.
fn run(
    load: Load,
    truth: Truth,
    parameters: &TrialParameters,
    length: Length,
    random: &mut Random,
) -> Option<Outcome> {
    run_misled(load, truth, parameters, length, 1.0, random)
}

/// The same when the history shows a noise that is `misled` times that of the trial.
fn run_misled(
    load: Load,
    truth: Truth,
    parameters: &TrialParameters,
    length: Length,
    misled: f64,
    random: &mut Random,
) -> Option<Outcome> {
    let mut signal = load.start(random);
    let past: Vec<(f64, f64)> = (0..HISTORY_S)
        .map(|_| (1000.0 * exp(signal.next(random)), 1.0))
        .collect();
    let (washout, fixed) = match length {
        Length::Fixed(b) => (b.washout, Some([f64::from(b.measured)])),
        Length::Chosen { washout } => (washout, None),
    };
    let candidates: &[f64] = fixed.as_ref().map_or(&CANDIDATES, |f| f);
    let choice = block_length::choose(
        0.0,
        history(&past),
        block_length::Switch::smooth(f64::from(washout)),
        candidates,
        parameters,
        BUDGET_S,
    );
    let (measured, scale) = match (choice, length) {
        (Ok(c), _) => (c.measured_s.round() as u32, c.scale),
        // A fixed length is tried whatever the history says.
        (Err(block_length::Unmeasurable::TooNoisy { scale, .. }), Length::Fixed(b)) => (b.measured, scale),
        (Err(_), _) => return None,
    };
    let block = Block { washout, measured };
    let mut trial = Trial::new(TrialParameters {
        scale_prior: scale * misled,
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
        signal,
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
    let block = Length::Fixed(Block {
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

/// A signal a second, averaged over `n` seconds.
fn average(signal: &mut Signal, random: &mut Random, n: u32) -> f64 {
    signal.block(random, 0, n, 0.0)
}

/// Quantile 95 % of Student's t (Cornish–Fisher; good to 1 % from three degrees of freedom).
fn t95(degrees: f64) -> f64 {
    let z = 1.6449f64;
    let z3 = z * z * z;
    z + (z3 + z) / (4.0 * degrees) + (5.0 * z3 * z * z + 16.0 * z3 + 3.0 * z) / (96.0 * degrees * degrees)
}

fn t_value(ds: &[f64]) -> f64 {
    mean(ds) / (variance(ds) / ds.len() as f64).sqrt()
}

/// How often a change that does nothing is accepted.
fn false_accepts(runs: usize, random: &mut Random) {
    println!(
        "## False accepts\n\nTrue effect 0, alpha .05, M 25 s, W 5 s, 60 min; {runs} runs per cell, 95 % intervals in the last table.\n"
    );
    let names: Vec<&str> = Load::scenarios(0.05).iter().map(|(n, _)| *n).collect();
    let mut header = vec!["cv", "procedure"];
    header.extend(&names);
    head(&header);
    let length = Length::Fixed(Block {
        washout: 5,
        measured: 25,
    });
    let mut pooled: Vec<(String, usize, usize)> = Vec::new();
    for cv in [0.02, 0.05, 0.10] {
        let mut before_after = vec![
            format!("{:.0} %", cv * 100.0),
            "60 s before / after, better?".to_owned(),
        ];
        let mut by_two = vec![
            format!("{:.0} %", cv * 100.0),
            "the same, better by 2 %?".to_owned(),
        ];
        let mut once = vec![
            format!("{:.0} %", cv * 100.0),
            "paired t, one look at 20 pairs".to_owned(),
        ];
        let mut peeking = vec![
            format!("{:.0} %", cv * 100.0),
            "paired t, a look at every pair".to_owned(),
        ];
        for (_, load) in Load::scenarios(cv) {
            let (mut better, mut much, mut single, mut peeked) = (0, 0, 0, 0);
            for _ in 0..runs {
                let mut signal = load.start(random);
                let gain = -average(&mut signal, random, 60) + average(&mut signal, random, 60);
                better += usize::from(gain > 0.0);
                much += usize::from(gain > 0.02);
                let mut ds = Vec::new();
                let mut seen = false;
                for _ in 0..20 {
                    let sign = if random.coin() { 1.0 } else { -1.0 };
                    let (a, b) = (signal.block(random, 5, 25, 0.0), signal.block(random, 5, 25, 0.0));
                    ds.push(sign * (a - b));
                    seen |= ds.len() >= 4 && t_value(&ds) > t95((ds.len() - 1) as f64);
                }
                single += usize::from(t_value(&ds) > t95(19.0));
                peeked += usize::from(seen);
            }
            for (cells, hits) in [
                (&mut before_after, better),
                (&mut by_two, much),
                (&mut once, single),
                (&mut peeking, peeked),
            ] {
                cells.push(format!("{:.3}", share(hits, runs)));
            }
        }
        for cells in [before_after, by_two, once, peeking] {
            row(&cells);
        }
        for (design_name, design) in DESIGNS {
            let parameters = TrialParameters {
                alpha: 0.05,
                design,
                ..TrialParameters::default()
            };
            let mut cells = vec![format!("{:.0} %", cv * 100.0), format!("**{design_name}**")];
            let (mut hits, mut of) = (0, 0);
            for (_, load) in Load::scenarios(cv) {
                let decisions: Vec<Decision> = (0..runs)
                    .filter_map(|_| run(load, Truth::plain(0.0), &parameters, length, random))
                    .map(|o| o.decision)
                    .collect();
                let accepted = decisions.iter().filter(|d| **d == Decision::Benefit).count();
                hits += accepted;
                of += decisions.len();
                cells.push(format!("{:.3}", share(accepted, decisions.len())));
            }
            pooled.push((format!("{design_name}, cv {:.0} %", cv * 100.0), hits, of));
            row(&cells);
        }
    }
    println!("\nAll loads together (95 % interval):\n");
    head(&["procedure", "accepted", "runs"]);
    for (name, hits, of) in pooled {
        row(&[name, with_interval(hits, of), of.to_string()]);
    }
    println!();
}

fn minutes(outcomes: &[&Outcome]) -> f64 {
    median(&outcomes.iter().map(|o| o.seconds / 60.0).collect::<Vec<_>>())
}

/// Verdicts, times, bias and coverage of the default design.
fn power(runs: usize, random: &mut Random) {
    println!(
        "## Power, time, win bias and interval\n\nAdaptive design, alpha .01, M 10 s, W 5 s, 60 min; {runs} runs per row. \
         Bias = estimate − truth at acceptance, percentage points; miss = share of 90 % intervals without the truth when \
         the trial ends.\n"
    );
    head(&[
        "cv, load",
        "effect",
        "accept",
        "harm",
        "futile",
        "budget",
        "min to accept",
        "bias",
        "miss",
        "exposure %s",
    ]);
    let parameters = TrialParameters::default();
    for (cv, wanted) in [
        (0.02, "rho .5"),
        (0.05, "rho .5"),
        (0.05, "rho .8"),
        (0.05, "all"),
        (0.10, "rho .5"),
        (0.10, "all"),
    ] {
        let load = Load::scenarios(cv)
            .into_iter()
            .find(|(n, _)| *n == wanted)
            .map_or(Load::white(cv), |(_, l)| l);
        for effect in [-0.05, -0.02, 0.0, 0.01, 0.02, 0.05, 0.10] {
            let length = Length::Fixed(Block {
                washout: 5,
                measured: 10,
            });
            let outcomes: Vec<Outcome> = (0..runs)
                .filter_map(|_| run(load, Truth::plain(effect), &parameters, length, random))
                .collect();
            let of = |d: Decision| {
                share(
                    outcomes.iter().filter(|o| o.decision == d).count(),
                    outcomes.len(),
                )
            };
            let accepted: Vec<&Outcome> = outcomes
                .iter()
                .filter(|o| o.decision == Decision::Benefit)
                .collect();
            let bias: Vec<f64> = accepted
                .iter()
                .map(|o| o.trial.estimate().effect - effect)
                .collect();
            let missed = outcomes
                .iter()
                .map(|o| o.trial.estimate())
                .filter(|e| effect < e.lower || effect > e.upper)
                .count();
            let enough = accepted.len() * 20 >= outcomes.len();
            row(&[
                format!("{:.0} % {wanted}", cv * 100.0),
                format!("{:+.0} %", effect * 100.0),
                format!("{:.3}", of(Decision::Benefit)),
                format!("{:.3}", of(Decision::Harm)),
                format!("{:.3}", of(Decision::Futile)),
                format!("{:.3}", of(Decision::Exhausted)),
                if enough {
                    format!("{:.1}", minutes(&accepted))
                } else {
                    "–".to_owned()
                },
                if enough {
                    format!("{:+.1}", 100.0 * mean(&bias))
                } else {
                    "–".to_owned()
                },
                format!("{:.3}", share(missed, outcomes.len())),
                format!(
                    "{:.0}",
                    mean(&outcomes.iter().map(|o| o.harm).collect::<Vec<_>>())
                ),
            ]);
        }
    }
    println!();
}

/// What it costs when the history was louder or quieter than the trial.
fn misled(runs: usize, random: &mut Random) {
    println!(
        "## A history that misleads\n\nAdaptive design, alpha .01, M 10 s, W 5 s, 60 min; {runs} runs per cell. The scale that the \
         history gave is multiplied by the factor. Per cell: share accepted, blocks to accept (median and 90th percentile of \
         all runs; more than the budget: –).\n"
    );
    let factors = [1.0 / 32.0, 0.125, 0.5, 1.0, 2.0, 4.0, 8.0];
    let names = ["x 1/32", "x 1/8", "x 1/2", "x 1", "x 2", "x 4", "x 8"];
    let mut header = vec!["cv, load", "effect"];
    header.extend(names);
    head(&header);
    for (cv, wanted) in [(0.02, "rho .5"), (0.05, "all"), (0.10, "rho .5"), (0.10, "all")] {
        let load = Load::scenarios(cv)
            .into_iter()
            .find(|(n, _)| *n == wanted)
            .map_or(Load::white(cv), |(_, l)| l);
        for effect in [0.0, 0.05, 0.10, 0.30] {
            let mut cells = vec![
                format!("{:.0} % {wanted}", cv * 100.0),
                format!("{:+.0} %", effect * 100.0),
            ];
            for factor in factors {
                let length = Length::Fixed(Block {
                    washout: 5,
                    measured: 10,
                });
                let parameters = TrialParameters::default();
                let outcomes: Vec<Outcome> = (0..runs)
                    .filter_map(|_| {
                        run_misled(load, Truth::plain(effect), &parameters, length, factor, random)
                    })
                    .collect();
                let mut blocks: Vec<u32> = outcomes
                    .iter()
                    .map(|o| {
                        if o.decision == Decision::Benefit {
                            o.blocks
                        } else {
                            u32::MAX
                        }
                    })
                    .collect();
                blocks.sort_unstable();
                let accepted = blocks.iter().filter(|b| **b < u32::MAX).count();
                let quantile = |q: f64| match blocks.get((blocks.len() as f64 * q) as usize) {
                    Some(&u32::MAX) | None => "–".to_owned(),
                    Some(b) => b.to_string(),
                };
                cells.push(if effect > 0.0 {
                    format!(
                        "{:.3}, {}, {}",
                        share(accepted, outcomes.len()),
                        quantile(0.5),
                        quantile(0.9)
                    )
                } else {
                    format!("{:.3}", share(accepted, outcomes.len()))
                });
            }
            row(&cells);
        }
    }
    println!();
}

/// Fixed lengths against the choice from history.
fn lengths(runs: usize, random: &mut Random) {
    println!(
        "## Block length\n\nSeconds to prove +2 % (median of those accepted; share accepted within 3600 s), alpha .05, \
         W 5 s, adaptive design; {runs} runs per cell. Last columns: chosen from 20 min of history, and the share of \
         trials started; a trial starts when +16 % or less is provable within the hour.\n"
    );
    head(&[
        "cv, load",
        "M=5",
        "M=10",
        "M=20",
        "M=40",
        "M=80",
        "from history",
        "started",
        "false accepts from history",
    ]);
    let parameters = TrialParameters {
        alpha: 0.05,
        ..TrialParameters::default()
    };
    for cv in [0.02, 0.05, 0.10] {
        for (name, load) in Load::scenarios(cv) {
            if !["rho .2", "rho .8", "all"].contains(&name) {
                continue;
            }
            let mut cells = vec![format!("{:.0} % {name}", cv * 100.0)];
            let mut choices: Vec<Length> = [5, 10, 20, 40, 80]
                .map(|m| {
                    Length::Fixed(Block {
                        washout: 5,
                        measured: m,
                    })
                })
                .to_vec();
            choices.push(Length::Chosen { washout: 5 });
            let mut started = 0;
            for length in choices {
                let outcomes: Vec<Outcome> = (0..runs)
                    .filter_map(|_| run(load, Truth::plain(0.02), &parameters, length, random))
                    .collect();
                let times: Vec<f64> = outcomes
                    .iter()
                    .filter(|o| o.decision == Decision::Benefit)
                    .map(|o| o.seconds)
                    .collect();
                cells.push(format!(
                    "{:.0} ({:.2})",
                    median(&times),
                    share(times.len(), outcomes.len())
                ));
                started = outcomes.len();
            }
            cells.push(format!("{:.2}", share(started, runs)));
            let nulls: Vec<Outcome> = (0..runs)
                .filter_map(|_| {
                    run(
                        load,
                        Truth::plain(0.0),
                        &parameters,
                        Length::Chosen { washout: 5 },
                        random,
                    )
                })
                .collect();
            let accepted = nulls.iter().filter(|o| o.decision == Decision::Benefit).count();
            cells.push(format!("{:.3}", share(accepted, nulls.len())));
            row(&cells);
        }
    }
    println!();
}

/// What a person sees with the defaults of the daemon.
fn defaults(runs: usize, random: &mut Random) {
    println!(
        "## The first try of a fresh daemon\n\nAlpha .001 (first try of e-LOND), W 2 s, block length from history, 60 min; \
         share accepted and median minutes; {runs} runs per cell.\n"
    );
    head(&[
        "cv, load",
        "design",
        "0",
        "+2 %",
        "+5 %",
        "+10 %",
        "+20 %",
        "−5 % (harm, exposure)",
    ]);
    for cv in [0.02, 0.05, 0.10] {
        for (name, load) in Load::scenarios(cv) {
            if !["rho .5", "all"].contains(&name) {
                continue;
            }
            for (design_name, design) in DESIGNS {
                if design == Design::Blockwise {
                    continue;
                }
                let parameters = TrialParameters {
                    alpha: 0.001,
                    design,
                    ..TrialParameters::default()
                };
                let mut cells = vec![format!("{:.0} % {name}", cv * 100.0), design_name.to_owned()];
                for effect in [0.0, 0.02, 0.05, 0.10, 0.20, -0.05] {
                    let length = Length::Chosen { washout: 2 };
                    let outcomes: Vec<Outcome> = (0..runs)
                        .filter_map(|_| run(load, Truth::plain(effect), &parameters, length, random))
                        .collect();
                    let accepted: Vec<&Outcome> = outcomes
                        .iter()
                        .filter(|o| o.decision == Decision::Benefit)
                        .collect();
                    let rate = share(accepted.len(), outcomes.len());
                    cells.push(if effect > 0.0 {
                        format!("{rate:.3}, {:.1}", minutes(&accepted))
                    } else if effect < 0.0 {
                        let harmful = outcomes.iter().filter(|o| o.decision == Decision::Harm).count();
                        let exposure = mean(&outcomes.iter().map(|o| o.harm).collect::<Vec<_>>());
                        format!("{:.3}, {exposure:.0} %s", share(harmful, outcomes.len()))
                    } else {
                        format!("{rate:.3}")
                    });
                }
                row(&cells);
            }
        }
    }
    println!();
}

/// False discoveries over two hundred tries.
fn many(sequences: usize, random: &mut Random) {
    const TRIES: usize = 200;
    println!(
        "## Many tries\n\n{TRIES} tries (15 % truly +2/3/5/10 %, 15 % −1 %, 70 % nothing), cv 5 %, loads rho .5 / steps / \
         all, M 10 s, W 5 s; {sequences} sequences. FDR = mean share of false among accepted (−1 % and 0 are false); \
         blocks per try.\n"
    );
    head(&[
        "rule",
        "FDR",
        "P(any false)",
        "false / 200",
        "power",
        "blocks / try",
    ]);
    let rules = [
        ("alpha .05 each", Rule::Fixed { alpha: 0.05 }),
        ("alpha .01 each", Rule::Fixed { alpha: 0.01 }),
        ("alpha .001 each", Rule::Fixed { alpha: 0.001 }),
        ("spending .05", Rule::Spending { total: 0.05 }),
        ("**e-LOND .10, decay .99**", Rule::default()),
    ];
    let loads: Vec<Load> = Load::scenarios(0.05)
        .into_iter()
        .filter(|(n, _)| ["rho .5", "steps", "all"].contains(n))
        .map(|(_, l)| l)
        .collect();
    for (name, rule) in rules {
        let (mut rates, mut any, mut wrong, mut right, mut good, mut blocks) = (Vec::new(), 0, 0, 0, 0, 0u64);
        for _ in 0..sequences {
            let mut discovery = Discovery::new(rule.clone());
            let (mut false_here, mut true_here) = (0, 0);
            for i in 0..TRIES {
                let kind = random.uniform();
                let effect = if kind < 0.15 {
                    [0.02, 0.03, 0.05, 0.10][i % 4]
                } else if kind < 0.30 {
                    -0.01
                } else {
                    0.0
                };
                let parameters = TrialParameters {
                    alpha: discovery.next_alpha(),
                    ..TrialParameters::default()
                };
                let length = Length::Fixed(Block {
                    washout: 5,
                    measured: 10,
                });
                let Some(o) = run(
                    loads[i % loads.len()],
                    Truth::plain(effect),
                    &parameters,
                    length,
                    random,
                ) else {
                    continue;
                };
                let accepted = o.decision == Decision::Benefit;
                // Each try is of another kind of change.
                discovery.record(&i.to_string(), accepted);
                blocks += u64::from(o.blocks);
                good += usize::from(effect > 0.0);
                true_here += usize::from(accepted && effect > 0.0);
                false_here += usize::from(accepted && effect <= 0.0);
            }
            rates.push(share(false_here, false_here + true_here));
            any += usize::from(false_here > 0);
            wrong += false_here;
            right += true_here;
        }
        row(&[
            name.to_owned(),
            format!("{:.3}", mean(&rates)),
            format!("{:.2}", share(any, sequences)),
            format!("{:.2}", share(wrong, sequences)),
            format!("{:.3}", share(right, good)),
            format!("{:.1}", blocks as f64 / (sequences * TRIES) as f64),
        ]);
    }
    println!();
}

/// What probation takes away from accepted changes.
fn probation(runs: usize, random: &mut Random) {
    println!(
        "## Probation\n\nAlpha .01, M 10 s, W 5 s: accepted by the trial → still there after 30 probe pairs; {runs} runs \
         per cell.\n"
    );
    head(&["truth", "cv 2 % rho .5", "cv 5 % rho .5", "cv 5 % all"]);
    let rare = |usual: f64, rare: f64, rarely: f64| Truth {
        usual: ln(1.0 + usual),
        rare: ln(1.0 + rare),
        rarely,
    };
    for (name, truth) in [
        ("nothing", Truth::plain(0.0)),
        ("+2 %", Truth::plain(0.02)),
        ("+5 %", Truth::plain(0.05)),
        ("+3 %, in 10 % of blocks −40 %", rare(0.03, -0.40, 0.10)),
        ("+3 %, in 10 % of blocks −20 %", rare(0.03, -0.20, 0.10)),
        ("+3 %, in 3 % of blocks −40 %", rare(0.03, -0.40, 0.03)),
    ] {
        let mut cells = vec![name.to_owned()];
        for load in [
            Load::correlated(0.02, 0.5),
            Load::correlated(0.05, 0.5),
            Load::all(0.05),
        ] {
            let (mut accepted, mut kept, mut of) = (0, 0, 0);
            for _ in 0..runs {
                let length = Length::Fixed(Block {
                    washout: 5,
                    measured: 10,
                });
                let Some(mut o) = run(load, truth, &TrialParameters::default(), length, random) else {
                    continue;
                };
                of += 1;
                if o.decision != Decision::Benefit {
                    continue;
                }
                accepted += 1;
                let mut watch = Probation::new(30, o.trial.estimate().scale);
                while watch.state() == ProbationState::Running {
                    // One probe pair in four pair lengths.
                    average(&mut o.signal, random, 6 * o.block.seconds() as u32);
                    let sign = if random.coin() { 1.0 } else { -1.0 };
                    let (on, off) = (truth.draw(random), 0.0);
                    let (first, second) = if sign > 0.0 { (on, off) } else { (off, on) };
                    let a = o.signal.block(random, o.block.washout, o.block.measured, first);
                    let b = o.signal.block(random, o.block.washout, o.block.measured, second);
                    watch.observe(sign * (a - b));
                }
                kept += usize::from(watch.state() == ProbationState::Passed);
            }
            cells.push(format!("{:.3} → {:.3}", share(accepted, of), share(kept, of)));
        }
        row(&cells);
    }
    println!();
}

/// Probes until the holdback alarm.
fn holdback(runs: usize, random: &mut Random) {
    const PROBES_MAX: u32 = 5000;
    println!(
        "## Holdback\n\nMean probes to the alarm (\"> n\" when some runs reached {PROBES_MAX} without one); standard \
         deviation of a probe's difference 2.5 %; {runs} runs per cell.\n"
    );
    head(&[
        "true effect",
        "loss detector (below 0)",
        "lost-benefit detector (below +1 %)",
    ]);
    for effect in [0.02, 0.01, 0.0, -0.01, -0.02, -0.05] {
        let mut cells = vec![format!("{:+.0} %", effect * 100.0)];
        for floor in [0.0, 0.01] {
            let mut censored = false;
            let waits: Vec<f64> = (0..runs)
                .map(|_| {
                    let mut h = Holdback::below(floor, 0.025);
                    let alarm = (1..=PROBES_MAX).find(|_| h.observe(effect + 0.025 * random.gaussian()));
                    censored |= alarm.is_none();
                    f64::from(alarm.unwrap_or(PROBES_MAX))
                })
                .collect();
            cells.push(format!("{}{:.0}", if censored { "> " } else { "" }, mean(&waits)));
        }
        row(&cells);
    }
    println!();
}

/// Members of a joint change and neighbours, watched in the same probes, one of which loses.
fn rails(runs: usize, random: &mut Random) {
    const PROBES_MAX: u32 = 5000;
    println!(
        "## Guardrails of a guard\n\nPrograms that the guard of a change watches besides the score that was proven; the alarm \
         is at a loss of more than 3 %, and at {ALARM} times their number. One of them loses, the others do not. Mean probes to \
         an alarm of any (\"> n\" when some runs reached {PROBES_MAX} without one); standard deviation of a probe's difference \
         2.5 %, half of it common to all; {runs} runs per cell.\n"
    );
    head(&["watched", "0", "−3 %", "−5 %", "−10 %", "−20 %"]);
    for count in [1_usize, 3, 6, 20] {
        let mut cells = vec![count.to_string()];
        for loss in [0.0, 0.03, 0.05, 0.10, 0.20] {
            let mut censored = false;
            let waits: Vec<f64> = (0..runs)
                .map(|_| {
                    let mut all: Vec<Holdback> = (0..count)
                        .map(|_| Holdback::below(-0.03, 0.025).one_of(count))
                        .collect();
                    let alarm = (1..=PROBES_MAX).find(|_| {
                        let common = random.gaussian();
                        let mut any = false;
                        for (i, detector) in all.iter_mut().enumerate() {
                            let effect = if i == 0 { -loss } else { 0.0 };
                            let noise = (common + random.gaussian()) * std::f64::consts::FRAC_1_SQRT_2;
                            any |= detector.observe(effect + 0.025 * noise);
                        }
                        any
                    });
                    censored |= alarm.is_none();
                    f64::from(alarm.unwrap_or(PROBES_MAX))
                })
                .collect();
            cells.push(format!("{}{:.0}", if censored { "> " } else { "" }, mean(&waits)));
        }
        row(&cells);
    }
    println!();
}

/// The staged rollout, without a control series (the load is all residual).
fn staged(runs: usize, random: &mut Random) {
    println!(
        "## Staged rollout\n\nFour stages of nine 45 s slots (15 s of each discarded), alpha .05, cv 3 % per second, no \
         control series; {runs} runs per cell: share accepted; for naive: last minute after against the minute before, \
         better by 2 %.\n"
    );
    head(&[
        "load",
        "procedure",
        "0",
        "−5 %",
        "+5 %",
        "+10 %",
        "+25 %",
        "+80 %",
        "sd of estimate",
    ]);
    for (name, load) in [
        ("rho .5", Load::correlated(0.03, 0.5)),
        ("all, a tenth of the drift, steps and swings", calm(0.03)),
        ("all", Load::all(0.03)),
    ] {
        let mut cells = vec![name.to_owned(), "staged".to_owned()];
        let mut naive = vec![name.to_owned(), "naive".to_owned()];
        let mut spread = 0.0;
        for effect in [0.0, -0.05, 0.05, 0.10, 0.25, 0.80] {
            let theta = ln(1.0 + effect);
            let (mut accepted, mut better) = (0, 0);
            let mut estimates = Vec::new();
            for _ in 0..runs {
                let mut signal = Mixed::start(name, load, random);
                let past: Vec<f64> = (0..20).map(|_| signal.slot(random)).collect();
                let Some(noise) = NoiseModel::from_history(&past) else {
                    continue;
                };
                let mut rollout = Rollout::new(noise);
                let before = past[past.len() - 1];
                let mut last = before;
                let mut done = 0.0;
                for share_after in SHARES {
                    let onset = 1 + (random.next_u64() % ONSETS as u64) as usize;
                    let mut slots = [0.0; SLOTS];
                    for (i, slot) in slots.iter_mut().enumerate() {
                        let on = if i >= onset { share_after } else { done };
                        *slot = signal.slot(random) + theta * on;
                        last = *slot;
                    }
                    if rollout.stage(&slots, onset, share_after).is_err() {
                        break;
                    }
                    done = share_after;
                }
                let e = rollout.estimate();
                accepted += usize::from(e.evidence >= 20.0);
                better += usize::from(last - before > 0.02);
                estimates.push(e.theta);
            }
            if effect == 0.0 {
                spread = variance(&estimates).sqrt();
            }
            cells.push(format!("{:.3}", share(accepted, runs)));
            naive.push(format!("{:.3}", share(better, runs)));
        }
        cells.push(format!("{:.1} %", spread * 100.0));
        naive.push(String::new());
        row(&cells);
        row(&naive);
    }
    println!();
}

fn calm(cv: f64) -> Load {
    Load {
        tails: true,
        ..Load::correlated(cv, 0.8)
    }
}

/// A load, of which a control series has taken away nine tenths of what moves slowly.
struct Mixed {
    quick: Signal,
    slow: Option<Signal>,
}

impl Mixed {
    fn start(name: &str, load: Load, random: &mut Random) -> Self {
        let slow = name.starts_with("all, a tenth").then(|| {
            let moving = Load {
                cv: 0.0,
                rho: 0.0,
                tails: false,
                ..Load::all(0.0)
            };
            moving.start(random)
        });
        Self {
            quick: load.start(random),
            slow,
        }
    }

    /// Mean of the last 30 of 45 seconds.
    fn slot(&mut self, random: &mut Random) -> f64 {
        let quick = self.quick.block(random, 15, 30, 0.0);
        let slow = self.slow.as_mut().map_or(0.0, |s| s.block(random, 15, 30, 0.0));
        quick + 0.1 * slow
    }
}

/// Trips of the circuit breaker.
fn breaker(runs: usize, random: &mut Random) {
    println!(
        "## Circuit breaker\n\nOff block of 10 s, then five-second means of the on block (10 s, one a second, after 2 s): \
         share of blocks that trip; {runs} blocks per cell. False trips per hour of on blocks in brackets.\n"
    );
    head(&["cv, load", "0", "−10 %", "−30 %", "−50 %"]);
    for (cv, name) in [
        (0.02, "rho .5"),
        (0.05, "rho .5"),
        (0.10, "rho .5"),
        (0.05, "all"),
        (0.10, "all"),
    ] {
        let load = if name == "all" {
            Load::all(cv)
        } else {
            Load::correlated(cv, 0.5)
        };
        let mut cells = vec![format!("{:.0} % {name}", cv * 100.0)];
        for effect in [0.0, -0.10, -0.30, -0.50] {
            let mut trips = 0;
            for _ in 0..runs {
                let mut signal = load.start(random);
                let past: Vec<(f64, f64)> = (0..300).map(|_| (exp(signal.next(random)), 1.0)).collect();
                let scale_breaker = block_length::choose(
                    0.0,
                    history(&past),
                    block_length::Switch::smooth(2.0),
                    &[10.0],
                    &TrialParameters::default(),
                    BUDGET_S,
                )
                .map_or(0.05, |c| c.scale_breaker);
                let mut fuse = Breaker::new(scale_breaker);
                fuse.off_block(signal.block(random, 2, 10, 0.0));
                fuse.block_started();
                average(&mut signal, random, 2);
                let seconds: Vec<f64> = (0..10).map(|_| signal.next(random) + ln(1.0 + effect)).collect();
                trips += usize::from(seconds.windows(2).any(|w| fuse.trips(mean(w))));
            }
            let rate = share(trips, runs);
            cells.push(if effect == 0.0 {
                format!("{rate:.4} ({:.1})", rate * 300.0)
            } else {
                format!("{rate:.3}")
            });
        }
        row(&cells);
    }
    println!();
}

/// Prints one table.
type Table<'a> = &'a dyn Fn(&mut Random);

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
    let tables: [(&str, Table); 12] = [
        ("false_accepts", &|r| false_accepts(runs(1500), r)),
        ("designs", &|r| designs(runs(400), r)),
        ("power", &|r| power(runs(500), r)),
        ("defaults", &|r| defaults(runs(400), r)),
        ("lengths", &|r| lengths(runs(300), r)),
        ("many", &|r| many(runs(100), r)),
        ("probation", &|r| probation(runs(1000), r)),
        ("holdback", &|r| holdback(runs(300), r)),
        ("staged", &|r| staged(runs(1000), r)),
        ("breaker", &|r| breaker(runs(10_000), r)),
        ("rails", &|r| rails(runs(300), r)),
        ("misled", &|r| misled(runs(400), r)),
    ];
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
