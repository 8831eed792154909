//! Seconds to a verdict with and without a memory canary, on the records of `fixtures/noise` (rows of 250 ms).
//!
//! `cargo run --release -p homeostat-statistics --example control_series -- RUNS EFFECT…` (effects in percent)

#![allow(clippy::print_stdout, clippy::expect_used, reason = "an example for people")]

use homeostat_statistics::control::Control;
use homeostat_statistics::robust::{ln, ln_1p, mad_sigma, quantile};
use homeostat_statistics::simulation::Random;
use homeostat_statistics::{Arm, Decision, Trial, TrialParameters};

/// Rows of washout and of measuring in a block, and of passive history for the scale: 0.5, 1 and 120 s.
const WASHOUT: usize = 2;
const MEASURED: usize = 4;
const HISTORY: usize = 480;
const ROW_S: f64 = 0.25;

/// Work, CPU seconds, the canary's loads and their CPU seconds.
type Row = [f64; 4];

fn read(name: &str) -> Vec<Row> {
    let path = format!("{}/../../fixtures/noise/{name}.csv", env!("CARGO_MANIFEST_DIR"));
    let text = std::fs::read_to_string(path).expect("the record can be read");
    let rows = text.lines().skip(1).filter_map(|line| {
        let cells: Vec<f64> = line.split(',').filter_map(|cell| cell.parse().ok()).collect();
        Some([*cells.get(2)?, *cells.get(3)?, *cells.get(11)?, *cells.get(10)?])
    });
    rows.collect()
}

/// Score and control of the block whose measured part begins at a row of the ring.
fn block(rows: &[Row], from: usize) -> (f64, f64) {
    let mut sums = [0.0; 4];
    for row in (0..MEASURED).filter_map(|i| rows.get((from + i) % rows.len())) {
        for (sum, cell) in sums.iter_mut().zip(row) {
            *sum += cell;
        }
    }
    let [work, cpu, loads, loading] = sums;
    (
        ln(work.max(0.5) / cpu.max(1e-6)),
        ln(loads.max(0.5) / loading.max(1e-9)),
    )
}

/// Decision, seconds, and the factor by which the variance was lowered.
fn run(rows: &[Row], scale: f64, alpha: f64, effect: f64, seed: u64, with: bool) -> (Decision, f64, f64) {
    let mut random = Random::new(seed);
    let mut at = (random.uniform() * rows.len() as f64) as usize;
    let mut trial = Trial::new(TrialParameters {
        alpha,
        scale_prior: scale,
        ..TrialParameters::default()
    });
    let mut control = Control::default();
    loop {
        let coin = trial.needs_coin() && {
            control.fix();
            random.coin()
        };
        let on = trial.next_arm(coin) == Arm::On;
        let (score, seen) = block(rows, at + WASHOUT);
        at += WASHOUT + MEASURED;
        let score = score + if on { effect } else { 0.0 };
        let seen = with.then_some(seen);
        let taken = control.taken_out(seen);
        control.observe(on, score, seen);
        let mut decision = trial.observe(score - taken);
        if decision == Decision::Benefit && !control.permits(0.01) {
            decision = trial.go_on();
        }
        if decision != Decision::Continue {
            let blocks = trial.estimate().blocks;
            let seconds = f64::from(blocks) * (WASHOUT + MEASURED) as f64 * ROW_S;
            return (decision, seconds, control.lowered().unwrap_or(1.0));
        }
    }
}

fn main() {
    let arguments: Vec<f64> = std::env::args().skip(1).filter_map(|a| a.parse().ok()).collect();
    let runs = arguments.first().map_or(200, |runs| *runs as u64);
    let effects = arguments
        .get(1..)
        .filter(|e| !e.is_empty())
        .unwrap_or(&[0.0, 3.0, 15.0]);
    for name in ["noisy1", "noisy2"] {
        let rows = read(name);
        let step = WASHOUT + MEASURED;
        let past: Vec<f64> = (0..HISTORY - 2 * step)
            .map(|at| block(&rows, at).0 - block(&rows, at + step).0)
            .collect();
        let scale = mad_sigma(&past).max(0.002);
        for alpha in [0.0055, 0.001] {
            for effect in effects {
                for with in [false, true] {
                    let all: Vec<_> = (0..runs)
                        .map(|seed| run(&rows, scale, alpha, ln_1p(effect / 100.0), seed, with))
                        .collect();
                    let count = |wanted| all.iter().filter(|r| r.0 == wanted).count();
                    let seconds: Vec<f64> = all
                        .iter()
                        .map(|r| {
                            if r.0 == Decision::Benefit {
                                r.1
                            } else {
                                f64::INFINITY
                            }
                        })
                        .collect();
                    let lowered: Vec<f64> = all.iter().map(|r| r.2).collect();
                    println!(
                        "{name} alpha {alpha} effect {effect:+} % canary {with}: accepted {} harm {} of {runs}, median {:.0} s, 90 % {:.0} s, variance / {:.2}",
                        count(Decision::Benefit),
                        count(Decision::Harm),
                        quantile(&seconds, 0.5),
                        quantile(&seconds, 0.9),
                        quantile(&lowered, 0.5),
                    );
                }
            }
        }
    }
}
