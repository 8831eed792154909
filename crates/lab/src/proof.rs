//! `homeostat-lab proof`: how fast the procedure proves a gain in records of real noise.

use super::{SCHEMA, clear, progress, threads};
use clap::{Args, ValueEnum};
use homeostat_cli::failure::{Failure, Kind};
use homeostat_cli::terminal::Terminal;
use homeostat_laboratory::proof::{self, CellKind, Objective, Options, ProofError, Record, Report};
use serde::Serialize;
use std::io::{IsTerminal, Write};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};

/// Run the published procedure on records of real noise with a known effect.
///
/// Each run starts at a random place of a record of an undisturbed workload. Work of the blocks with the change on is
/// multiplied by the effect. The tables show how often and how fast the trial accepts, how often it accepts nothing,
/// and how good the shown gain is. Fails if a change without effect was accepted more often than the level allows.
#[derive(Debug, Args)]
#[command(after_help = "EXAMPLES
  homeostat-lab proof                              the records that ship with the program, some minutes
  homeostat-lab proof --raw DIR                    the same; goes on where it was interrupted
  homeostat-lab proof my.csv --schedules 500       a record of yours
  homeostat-lab proof --operators --only gain --effects 3,5,10,15,25,40")]
pub(crate) struct Proof {
    /// Records to use instead of those that ship: columns t,dt,work,cpu or t_s,interval_s,work,cpu_s.
    #[arg(value_name = "FILE.csv")]
    files: Vec<PathBuf>,
    /// Seed of all schedules.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Random schedules of each cell without an effect.
    #[arg(long, value_name = "N", default_value_t = 5000)]
    schedules: u64,
    /// Runs of each cell with an effect.
    #[arg(long, value_name = "N", default_value_t = 200)]
    runs: u64,
    /// Gains and losses in percent.
    #[arg(
        long,
        value_name = "PERCENT",
        value_delimiter = ',',
        allow_negative_numbers = true
    )]
    effects: Vec<f64>,
    /// Which cells.
    #[arg(long, value_enum, value_delimiter = ',')]
    only: Vec<Only>,
    /// What work is divided by.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "cpu")]
    objective: Vec<Measure>,
    /// Levels of these tries (from 1) by the default rule.
    #[arg(long, value_name = "NUMBER", value_delimiter = ',', default_value = "1,100")]
    tries: Vec<u32>,
    /// Accepts before the try.
    #[arg(long, value_name = "N", default_value_t = 0)]
    accepts: u32,
    /// Levels instead of those of the tries.
    #[arg(long, value_name = "LEVEL", value_delimiter = ',')]
    alpha: Vec<f64>,
    /// True time constant of a slow gain (seconds).
    #[arg(long, value_name = "SECONDS", default_value_t = 1.5)]
    onset: f64,
    /// How long the loss of 2 % after an undo lasts (seconds).
    #[arg(long, value_name = "SECONDS", value_delimiter = ',')]
    scars: Vec<f64>,
    /// Threads; as many as CPUs when absent.
    #[arg(long, value_name = "N")]
    jobs: Option<usize>,
    /// Keep finished cells in this directory, and take them from there.
    #[arg(long, value_name = "DIR")]
    raw: Option<PathBuf>,
    /// Print the table of the manual: gain and noise to seconds.
    #[arg(long)]
    operators: bool,
    /// Print JSON with a stable schema instead of text.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    procedure: Procedure,
}

/// What differs from the daemon's procedure.
#[derive(Debug, Args)]
struct Procedure {
    /// Candidates for the measured part of a block (seconds).
    #[arg(long, value_name = "SECONDS", value_delimiter = ',')]
    candidates: Vec<f64>,
    /// Shortest washout (seconds).
    #[arg(long, value_name = "SECONDS")]
    washout: Option<f64>,
    /// Slowest switch (seconds).
    #[arg(long, value_name = "SECONDS", default_value_t = 0.0)]
    switch: f64,
    /// Time constant by which the washout is set (seconds).
    #[arg(long, value_name = "SECONDS", default_value_t = 0.0)]
    tau: f64,
    /// Passive history before a trial (seconds).
    #[arg(long, value_name = "SECONDS")]
    history: Option<f64>,
    /// Probe pairs right after an accept.
    #[arg(long, value_name = "N")]
    fresh_pairs: Option<u32>,
    /// Take no noise out of the scores by a record's memory canary.
    #[arg(long)]
    no_canary: bool,
    /// Fewest pairs of the probation, those right after the accept included.
    #[arg(long, value_name = "N")]
    probation_pairs: Option<u32>,
    /// Confidence of the shown intervals.
    #[arg(long, value_name = "SHARE", default_value_t = 0.9)]
    confidence: f64,
}

/// Kinds of cells.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum Only {
    /// No effect.
    Null,
    /// Gains.
    Gain,
    /// Losses.
    Loss,
    /// A loss after each undo.
    Scar,
    /// Gains that come and go slowly.
    Onset,
}

/// What work is divided by.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum Measure {
    /// CPU seconds.
    Cpu,
    /// Seconds by the clock.
    Wall,
}

#[derive(Debug, Serialize)]
struct Shown<'a> {
    schema: u32,
    passed: bool,
    #[serde(flatten)]
    report: &'a Report,
}

impl Proof {
    /// Whether JSON was asked for.
    pub(crate) fn json(&self) -> bool {
        self.json
    }

    fn options(&self) -> Options {
        let mut options = Options::default();
        if !self.effects.is_empty() {
            options.effects = self.effects.iter().map(|e| e / 100.0).collect();
        }
        if !self.procedure.candidates.is_empty() {
            options.rules.candidates_s.clone_from(&self.procedure.candidates);
        }
        if !self.scars.is_empty() {
            options.scars_s.clone_from(&self.scars);
        }
        options.kinds = self
            .only
            .iter()
            .map(|kind| match kind {
                Only::Null => CellKind::Null,
                Only::Gain => CellKind::Gain,
                Only::Loss => CellKind::Loss,
                Only::Scar => CellKind::Scar,
                Only::Onset => CellKind::Onset,
            })
            .collect();
        options.objectives = self
            .objective
            .iter()
            .map(|o| match o {
                Measure::Cpu => Objective::Cpu,
                Measure::Wall => Objective::Wall,
            })
            .collect();
        let rules = &mut options.rules;
        rules.washout_min_s = self.procedure.washout.unwrap_or(rules.washout_min_s);
        rules.history_s = self.procedure.history.unwrap_or(rules.history_s);
        rules.probation_pairs = self.procedure.probation_pairs.unwrap_or(rules.probation_pairs);
        rules.switch_s = self.procedure.switch;
        rules.fresh_pairs = self.procedure.fresh_pairs;
        rules.canary = !self.procedure.no_canary;
        rules.confidence = self.procedure.confidence;
        Options {
            seed: self.seed,
            schedules: self.schedules,
            runs: self.runs,
            onset_s: self.onset,
            tau_s: self.procedure.tau,
            tries: self.tries.clone(),
            accepts: self.accepts,
            alphas: self.alpha.clone(),
            raw: self.raw.clone(),
            ..options
        }
    }

    pub(crate) fn run(&self, terminal: &Terminal, interrupted: &AtomicBool) -> Result<(), Failure> {
        let records = if self.files.is_empty() {
            Record::built_in()
        } else {
            self.files.iter().map(|file| Record::read(file)).collect()
        }
        .map_err(refused)?;
        let options = self.options();
        let jobs = self.jobs.unwrap_or_else(threads);
        let live = std::io::stderr().is_terminal();
        let mut shown_cell = String::new();
        let report = proof::run(&records, &options, jobs, &mut |done, of, cell| {
            let text = format!("{:3.0} % of {of} runs, {cell}", 100.0 * done as f64 / of as f64);
            progress(live, &text);
            if !live && shown_cell != cell {
                let _ = writeln!(std::io::stderr(), "{text}");
                cell.clone_into(&mut shown_cell);
            }
            !interrupted.load(Ordering::Relaxed)
        });
        clear(live);
        let report = report.map_err(refused)?;
        let complaints = proof::complaints(&report.cells);
        let shown = Shown {
            schema: SCHEMA,
            passed: complaints.is_empty(),
            report: &report,
        };
        terminal.show(&shown, |_| {
            if self.operators {
                proof::operators(&report.cells)
            } else {
                proof::text(&report.cells)
            }
        })?;
        if complaints.is_empty() {
            Ok(())
        } else {
            Err(Failure::failed(complaints.join("\n")))
        }
    }
}

fn refused(e: ProofError) -> Failure {
    match e {
        ProofError::Options(_) | ProofError::Row { .. } => Failure::Report(Kind::Usage, e.to_string()),
        e => Failure::from_error(&e),
    }
}
