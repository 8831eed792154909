//! A placebo changes nothing. So an hour of a real server's work and CPU time, recorded once, serves any number of
//! placebo experiments: each coin sequence is one, and none of them may be accepted more often than its level.
//!
//! The traces in `fixtures/traces` were recorded by `tools/record-traces` on a busy machine (compilers ran beside the
//! servers), which is the hard case.
#![expect(clippy::unwrap_used, clippy::panic, reason = "a test over recorded data")]

use homeostat_statistics::{Arm, Decision, Design, Trial, TrialParameters, block_length};
use std::path::{Path, PathBuf};

/// Coin sequences per trace, objective and design.
const SEQUENCES: u64 = 600;
/// Level under test; high, so that a broken test shows.
const ALPHA: f64 = 0.05;
const WASHOUT_S: usize = 2;

struct Second {
    interval: f64,
    work: f64,
    cpu: f64,
}

fn traces() -> Vec<(String, Vec<Second>)> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/traces");
    #[expect(clippy::disallowed_methods, reason = "a test over recorded data")]
    let mut files: Vec<PathBuf> = std::fs::read_dir(directory)
        .unwrap()
        .map(|e| e.unwrap().path())
        .filter(|p| p.extension().is_some_and(|e| e == "csv"))
        .collect();
    files.sort();
    files
        .iter()
        .map(|path| {
            #[expect(clippy::disallowed_methods, reason = "a test over recorded data")]
            let text = std::fs::read_to_string(path).unwrap();
            let seconds = text
                .lines()
                .filter(|l| !l.starts_with('#'))
                .filter_map(|l| {
                    let mut f = l.split(',').map(|x| x.trim().parse::<f64>());
                    let (_, interval, work, cpu) =
                        (f.next()?.ok()?, f.next()?.ok()?, f.next()?.ok()?, f.next()?.ok()?);
                    Some(Second { interval, work, cpu })
                })
                .collect();
            (path.file_stem().unwrap().to_string_lossy().into_owned(), seconds)
        })
        .collect()
}

/// SplitMix64.
struct Random(u64);
impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}

/// The score of a block; half a count stands for none.
fn score(seconds: &[Second], per_cpu: bool) -> f64 {
    let work: f64 = seconds.iter().map(|s| s.work).sum();
    let denominator: f64 = seconds
        .iter()
        .map(|s| if per_cpu { s.cpu } else { s.interval })
        .sum();
    homeostat_statistics::robust::ln(work.max(0.5) / denominator.max(1e-6))
}

/// One placebo experiment on the trace: was it accepted?
fn placebo(trace: &[Second], per_cpu: bool, design: Design, measured: usize, scale: f64, seed: u64) -> bool {
    let mut random = Random(seed);
    let mut at = (random.next() as usize) % trace.len();
    let parameters = TrialParameters {
        alpha: ALPHA,
        scale_prior: scale,
        design,
        ..TrialParameters::default()
    };
    let mut trial = Trial::new(parameters);
    for _ in 0..10_000 {
        let coin = if trial.needs_coin() {
            random.next() & 1 == 1
        } else {
            false
        };
        let _: Arm = trial.next_arm(coin);
        // The trace is a ring: an experiment that reaches its end goes on at its beginning, a step in the load.
        let block: Vec<usize> = (0..measured)
            .map(|i| (at + WASHOUT_S + i) % trace.len())
            .collect();
        let seconds: Vec<Second> = block
            .iter()
            .map(|i| Second {
                interval: trace[*i].interval,
                work: trace[*i].work,
                cpu: trace[*i].cpu,
            })
            .collect();
        at = (at + WASHOUT_S + measured) % trace.len();
        match trial.observe(score(&seconds, per_cpu)) {
            Decision::Continue => {}
            decision => return decision == Decision::Benefit,
        }
    }
    panic!("a trial has no end");
}

#[test]
fn on_recorded_servers_a_placebo_is_accepted_no_more_often_than_its_level() {
    let traces = traces();
    assert!(traces.len() >= 3, "traces are missing");
    for (name, trace) in &traces {
        assert!(trace.len() >= 3000, "{name}: only {} seconds", trace.len());
        for per_cpu in [false, true] {
            let history: Vec<(f64, f64)> = trace
                .iter()
                .take(600)
                .map(|s| (s.work, if per_cpu { s.cpu } else { s.interval }))
                .collect();
            let parameters = TrialParameters::default();
            let past = block_length::Past {
                seconds: &history,
                interval: 1.0,
                few: false,
            };
            let chosen = block_length::choose(
                0.0,
                past,
                block_length::Switch::smooth(WASHOUT_S as f64),
                &[1.0, 2.0, 3.0, 4.0, 6.0, 10.0, 20.0, 40.0, 80.0],
                &parameters,
                3600.0,
            );
            let (measured, scale) = chosen.map_or((10, 0.1), |c| (c.measured_s as usize, c.scale));
            for design in [
                TrialParameters::default().design,
                Design::Paired,
                Design::Blockwise,
            ] {
                // The design in use is checked hardest.
                let used = design == TrialParameters::default().design;
                let sequences = if used { SEQUENCES } else { SEQUENCES / 4 };
                let accepted = (0..sequences)
                    .filter(|seed| placebo(trace, per_cpu, design, measured, scale, seed * 2_654_435_761 + 1))
                    .count();
                let share = accepted as f64 / sequences as f64;
                println!(
                    "{name:12} per_cpu {per_cpu:5} {design:?} M={measured:2} s={scale:.3}: accepted {share:.4}"
                );
                // The expected share is at most ALPHA; what is counted may lie three standard errors above.
                let slack = 3.0 * (ALPHA * (1.0 - ALPHA) / sequences as f64).sqrt();
                assert!(
                    share <= ALPHA + slack,
                    "{name}, per_cpu {per_cpu}, {design:?}: {share} accepted at level {ALPHA}"
                );
            }
        }
    }
}
