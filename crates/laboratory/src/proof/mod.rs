//! How fast and how reliably the published procedure proves a gain in real noise.
//!
//! A record of an undisturbed workload contains no effect. Each run starts at a random place of a record, chooses the
//! block length from the history before it, and runs the trial with random assignments on the rows that follow. Work of
//! on blocks is multiplied by a known gain. So the truth is known and the noise is real. After an accept the run makes
//! the fresh pairs and the probation. The record is a ring.
//!
//! What is not modelled: the circuit breaker, guardrails, real switch costs, and gains that vary with the load.
//!
//! A *cell* is one record, measure, injected effect and level. Results depend only on the options and the seed.

mod keep;
mod record;
mod schedule;
mod table;

pub use record::{Objective, Record, Ring};
pub use schedule::{After, Injected, Revoked, Rules, Run, Shown};
pub use table::{Afterwards, Interval, Summary, complaints, operators, text};

use crate::parallel;
use homeostat_engine::Policy;
use homeostat_statistics::discovery::Rule;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// Runs that one thread makes at a time.
const CHUNK: u64 = 25;
const RUNS_MAX: u64 = 1_000_000;
const CELLS_MAX: usize = 10_000;
/// Most pairs right after an accept, and fewest of a probation, that may be asked for.
const PAIRS_MAX: f64 = 200.0;

/// Kinds of cells.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CellKind {
    /// No effect: every accept is false.
    Null,
    /// A gain.
    Gain,
    /// A loss.
    Loss,
    /// A loss after each undo, and no effect of the change.
    Scar,
    /// A gain that comes and goes slowly.
    Onset,
}

/// What runs.
#[derive(Clone, Debug, PartialEq)]
pub struct Options {
    /// Seed of all schedules.
    pub seed: u64,
    /// Random schedules of each cell without an effect.
    pub schedules: u64,
    /// Runs of each other cell.
    pub runs: u64,
    /// Gains and losses (0.15 is +15 %).
    pub effects: Vec<f64>,
    /// How long scars last (seconds).
    pub scars_s: Vec<f64>,
    /// Time constant of slow gains (seconds).
    pub onset_s: f64,
    /// Time constant that the daemon takes the effect to have (seconds).
    pub tau_s: f64,
    /// Numbers of tries, from 1, whose level the default rule gives.
    pub tries: Vec<u32>,
    /// Accepts before that try.
    pub accepts: u32,
    /// Levels instead of the rule's.
    pub alphas: Vec<f64>,
    /// What work is divided by.
    pub objectives: Vec<Objective>,
    /// Kinds of cells; none: all.
    pub kinds: Vec<CellKind>,
    /// The procedure.
    pub rules: Rules,
    /// Where finished cells are kept and taken from again.
    pub raw: Option<PathBuf>,
}

impl Default for Options {
    /// The daemon's defaults.
    fn default() -> Self {
        let policy = Policy::default();
        Self {
            seed: 1,
            schedules: 5000,
            runs: 200,
            effects: vec![0.03, 0.15, 0.40, -0.03, -0.10, -0.20],
            scars_s: vec![1.5, 2.0, 3.0, 5.0, 8.0, 12.0],
            onset_s: 1.5,
            tau_s: 0.0,
            tries: vec![1, 100],
            accepts: 0,
            alphas: Vec::new(),
            objectives: vec![Objective::Cpu],
            kinds: Vec::new(),
            rules: Rules {
                history_s: 120.0,
                washout_min_s: policy.washout_min_s,
                switch_s: 0.0,
                candidates_s: policy.measured_candidates_s,
                budget_s: policy.experiment_max_s,
                fresh_pairs: None,
                canary: true,
                probation_pairs: policy.probation_pairs,
                confidence: 0.90,
                trial: policy.trial,
            },
            raw: None,
        }
    }
}

/// Why nothing, or not all, was run.
#[derive(Debug, thiserror::Error)]
pub enum ProofError {
    /// The options make no sense.
    #[error("{0}")]
    Options(String),
    /// A file cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A line of a record makes no sense.
    #[error("{}, line {line}: {what}", path.display())]
    Row {
        /// The file.
        path: PathBuf,
        /// Line, from 1.
        line: usize,
        /// What is wrong, and the remedy.
        what: String,
    },
    /// Finished cells cannot be kept.
    #[error("cannot write {}: {source}. Choose another --raw directory", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A kept cell is damaged, or comes from other options.
    #[error("{} is damaged or comes from other options: {why}. Delete it or choose another --raw directory", path.display())]
    Stale {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        why: String,
    },
    /// It was interrupted.
    #[error("interrupted after {done} of {of} cells; --raw DIR keeps finished cells for the next time")]
    Interrupted {
        /// Finished cells.
        done: usize,
        /// All cells.
        of: usize,
    },
}

/// One record, measure, effect and level.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Cell {
    /// Kind.
    pub kind: CellKind,
    /// Name of the record.
    pub record: String,
    /// What work is divided by.
    pub objective: Objective,
    /// The effect.
    pub injected: Injected,
    /// Time constant by which the washout is set (seconds).
    pub known_onset_s: f64,
    /// Number of the try; `None` for a level of one's own.
    pub number: Option<u32>,
    /// Level of the trial.
    pub alpha: f64,
    /// Runs.
    pub runs: u64,
}

/// Everything that was found.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    /// Seed.
    pub seed: u64,
    /// The procedure.
    pub rules: Rules,
    /// One summary for each cell.
    pub cells: Vec<Summary>,
}

impl Options {
    fn complaint(&self) -> Option<String> {
        let rules = &self.rules;
        let wrong = rules.trial.validate();
        if let Some(first) = wrong.into_iter().next() {
            return Some(first);
        }
        let range = |name: &str, value: f64, low: f64, high: f64| {
            (!(low..=high).contains(&value))
                .then(|| format!("{name} {value}: must be between {low} and {high}"))
        };
        let of_all = |name: &str, values: &[f64], low: f64, high: f64| {
            values.iter().find_map(|v| range(name, *v, low, high))
        };
        let runs = RUNS_MAX as f64;
        range("--schedules", self.schedules as f64, 1.0, runs)
            .or_else(|| range("--runs", self.runs as f64, 1.0, runs))
            .or_else(|| of_all("--effects", &self.effects, -0.9, 10.0))
            .or_else(|| of_all("--scars", &self.scars_s, 0.0, 3600.0))
            .or_else(|| range("--onset", self.onset_s, 0.0, 600.0))
            .or_else(|| range("--tau", self.tau_s, 0.0, 60.0))
            .or_else(|| range("--switch", rules.switch_s, 0.0, 60.0))
            .or_else(|| range("--washout", rules.washout_min_s, 0.0, 60.0))
            .or_else(|| of_all("--alpha", &self.alphas, 1e-9, 0.5))
            .or_else(|| of_all("--candidates", &rules.candidates_s, 0.05, 600.0))
            .or_else(|| range("--history", rules.history_s, 10.0, 86_400.0))
            .or_else(|| {
                range(
                    "--fresh-pairs",
                    f64::from(rules.fresh_pairs.unwrap_or(0)),
                    0.0,
                    PAIRS_MAX,
                )
            })
            .or_else(|| {
                range(
                    "--probation-pairs",
                    f64::from(rules.probation_pairs),
                    1.0,
                    PAIRS_MAX,
                )
            })
            .or_else(|| range("--confidence", rules.confidence, 0.5, 0.999))
            .or_else(|| {
                self.tries
                    .contains(&0)
                    .then(|| "--tries 0: tries are counted from 1".into())
            })
            .or_else(|| {
                let none = self.tries.is_empty() && self.alphas.is_empty();
                none.then(|| "no level: give --tries or --alpha".into())
            })
    }

    /// Number of the try and level.
    fn levels(&self) -> Vec<(Option<u32>, f64)> {
        if self.alphas.is_empty() {
            let level = |n: &u32| (Some(*n), Rule::default().alpha(n.saturating_sub(1), self.accepts));
            self.tries.iter().map(level).collect()
        } else {
            self.alphas.iter().map(|a| (None, *a)).collect()
        }
    }

    /// (kind, effect, known time constant) of every cell of a record. Scars and slow gains run at the first level only.
    fn effects(&self, is_first_level: bool) -> Vec<(CellKind, Injected, f64)> {
        let gain = |gain: f64| Injected {
            gain,
            ..Injected::default()
        };
        let mut all = vec![(CellKind::Null, gain(0.0), self.tau_s)];
        for effect in self.effects.iter().filter(|e| **e != 0.0) {
            let kind = if *effect > 0.0 {
                CellKind::Gain
            } else {
                CellKind::Loss
            };
            all.push((kind, gain(*effect), self.tau_s));
        }
        if is_first_level {
            for scar_s in &self.scars_s {
                let injected = Injected {
                    scar: 0.02,
                    scar_s: *scar_s,
                    ..Injected::default()
                };
                all.push((CellKind::Scar, injected, self.tau_s));
            }
            for known in [0.0, self.onset_s] {
                let injected = Injected {
                    onset_s: self.onset_s,
                    ..gain(0.15)
                };
                all.push((CellKind::Onset, injected, known));
            }
        }
        all.retain(|(kind, ..)| self.kinds.is_empty() || self.kinds.contains(kind));
        all
    }

    fn cells<'a>(&self, records: &'a [Record]) -> Vec<(&'a Record, Cell)> {
        let mut cells = Vec::new();
        for record in records {
            for objective in &self.objectives {
                for (position, (number, alpha)) in self.levels().into_iter().enumerate() {
                    for (kind, injected, known_onset_s) in self.effects(position == 0) {
                        let cell = Cell {
                            kind,
                            record: record.name.clone(),
                            objective: *objective,
                            injected,
                            known_onset_s,
                            number,
                            alpha,
                            runs: if kind == CellKind::Null {
                                self.schedules
                            } else {
                                self.runs
                            },
                        };
                        cells.push((record, cell));
                    }
                }
            }
        }
        cells
    }
}

impl Cell {
    /// A name for files and for the seed.
    fn name(&self) -> String {
        let Injected {
            gain,
            onset_s,
            scar,
            scar_s,
        } = self.injected;
        format!(
            "{}-{:?}-{:?}-gain{gain}-onset{onset_s}-known{}-scar{scar}for{scar_s}-alpha{:.3e}",
            self.record, self.objective, self.kind, self.known_onset_s, self.alpha
        )
        .to_lowercase()
    }

    /// Seeds of the cell's runs: other cells get others (FNV-1a over the name).
    fn seed(&self, seed: u64, run: u64) -> u64 {
        let text = self.name();
        let start = 0xcbf2_9ce4_8422_2325 ^ seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let hash = text
            .bytes()
            .fold(start, |h, b| (h ^ u64::from(b)).wrapping_mul(0x100_0000_01b3));
        hash.wrapping_add(run.wrapping_mul(0x2545_f491_4f6c_dd1d))
    }
}

/// Runs all cells on up to `threads` threads. `watch` gets the number of finished runs, of all runs, and the name of the
/// cell; false ends it.
///
/// # Errors
/// [`ProofError`].
pub fn run(
    records: &[Record],
    options: &Options,
    threads: usize,
    watch: &mut dyn FnMut(u64, u64, &str) -> bool,
) -> Result<Report, ProofError> {
    if let Some(complaint) = options.complaint() {
        return Err(ProofError::Options(complaint));
    }
    let cells = options.cells(records);
    if cells.is_empty() || cells.len() > CELLS_MAX {
        return Err(ProofError::Options(format!(
            "{} cells: must be between 1 and {CELLS_MAX}",
            cells.len()
        )));
    }
    let of: u64 = cells.iter().map(|(_, cell)| cell.runs).sum();
    let mut done = 0;
    let mut summaries = Vec::new();
    for (record, cell) in &cells {
        let file = options.raw.as_ref().map(|raw| raw.join(cell.name() + ".json"));
        let kept = file
            .as_deref()
            .map(|file| keep::read(file, cell, options, record.len()));
        let runs = match kept.transpose()?.flatten() {
            Some(runs) => runs,
            None => {
                let mut runs = Vec::new();
                let mut goes_on = true;
                run_cell(record, cell, options, threads, &mut |chunk| {
                    runs.extend(chunk);
                    goes_on = watch(done + runs.len() as u64, of, &cell.name());
                    goes_on
                });
                if !goes_on && (runs.len() as u64) < cell.runs {
                    return Err(ProofError::Interrupted {
                        done: summaries.len(),
                        of: cells.len(),
                    });
                }
                if let Some(file) = &file {
                    keep::write(file, cell, options, record.len(), &runs)?;
                }
                runs
            }
        };
        done += cell.runs;
        summaries.push(Summary::new(cell, &runs));
    }
    Ok(Report {
        seed: options.seed,
        rules: options.rules.clone(),
        cells: summaries,
    })
}

fn run_cell(
    record: &Record,
    cell: &Cell,
    options: &Options,
    threads: usize,
    take: &mut dyn FnMut(Vec<Run>) -> bool,
) {
    let ring = record.ring(cell.objective);
    let chunks = cell.runs.div_ceil(CHUNK);
    let work = |chunk: u64| -> Vec<Run> {
        let runs = chunk * CHUNK..((chunk + 1) * CHUNK).min(cell.runs);
        runs.map(|i| {
            let trial = schedule::Setting {
                injected: cell.injected,
                known_onset_s: cell.known_onset_s,
                alpha: cell.alpha,
                seed: cell.seed(options.seed, i),
            };
            schedule::run(&ring, trial, &options.rules)
        })
        .collect()
    };
    parallel::in_order(0..chunks, threads, &work, &mut |_, runs| take(runs));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn noisy1() -> Vec<Record> {
        let mut records = Record::built_in().unwrap();
        records.truncate(1);
        records
    }

    fn options() -> Options {
        Options {
            schedules: 400,
            runs: 40,
            effects: vec![0.15],
            kinds: vec![CellKind::Null, CellKind::Gain],
            ..Options::default()
        }
    }

    #[test]
    fn nothing_is_accepted_more_often_than_its_level_and_a_large_gain_soon() {
        let records = noisy1();
        let nothing = Options {
            alphas: vec![0.05],
            kinds: vec![CellKind::Null],
            ..options()
        };
        let report = run(&records, &nothing, 2, &mut |_, _, _| true).unwrap();
        assert!(complaints(&report.cells).is_empty(), "{}", text(&report.cells));
        let gains = Options {
            tries: vec![1],
            kinds: vec![CellKind::Gain],
            ..options()
        };
        let report = run(&records, &gains, 2, &mut |_, _, _| true).unwrap();
        let gain = &report.cells[0];
        assert!(
            gain.accepted == 1.0 && gain.seconds_median.unwrap() <= 75.0,
            "{}",
            text(&report.cells)
        );
        assert!(
            gain.after.fresh.as_ref().unwrap().width < 16.0,
            "{}",
            text(&report.cells)
        );
        assert!(operators(&report.cells).contains("| noisy1 |"));
    }

    #[test]
    fn results_depend_on_the_seed_alone_and_finished_cells_are_taken_up_again() {
        let records = noisy1();
        let raw = tempfile::tempdir().unwrap();
        let few = Options {
            schedules: 30,
            runs: 6,
            tries: vec![1],
            raw: Some(raw.path().to_owned()),
            ..options()
        };
        let mut seen = 0;
        let interrupted = run(&records, &few, 2, &mut |_, _, cell| {
            seen += 1;
            cell.contains("null")
        });
        assert!(matches!(interrupted, Ok(_) | Err(ProofError::Interrupted { .. })));
        let first = run(&records, &few, 1, &mut |_, _, cell| {
            assert!(cell.contains("gain0.15"), "{cell} was kept");
            true
        })
        .unwrap();
        let afresh = Options {
            raw: None,
            ..few.clone()
        };
        assert_eq!(
            text(&run(&records, &afresh, 2, &mut |_, _, _| true).unwrap().cells),
            text(&first.cells)
        );
        let other = Options { seed: 2, ..few };
        assert!(matches!(
            run(&records, &other, 1, &mut |_, _, _| true),
            Err(ProofError::Stale { .. })
        ));
    }

    #[test]
    fn options_out_of_range_are_named() {
        for (options, part) in [
            (Options { runs: 0, ..options() }, "--runs 0"),
            (
                Options {
                    effects: vec![-1.0],
                    ..options()
                },
                "--effects -1",
            ),
            (
                Options {
                    tries: vec![0],
                    ..options()
                },
                "--tries 0",
            ),
            (
                Options {
                    alphas: vec![0.7],
                    ..options()
                },
                "--alpha 0.7",
            ),
            (
                Options {
                    tries: Vec::new(),
                    ..options()
                },
                "no level",
            ),
        ] {
            let error = run(&noisy1(), &options, 1, &mut |_, _, _| true).unwrap_err();
            assert!(error.to_string().contains(part), "{error}");
        }
    }
}
