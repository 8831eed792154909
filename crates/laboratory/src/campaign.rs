//! The fault campaign: deterministic simulation of whole lives of homeostat under faults.
//!
//! One seed is one life. It draws a machine, programs, settings and a [swarm](FaultPlan::swarm) of faults, and runs the
//! daemon's loop, journal and history through them in virtual time. The [checkers](crate::checkers) look after every
//! turn. In the second half the faults stop, and everything must settle within a named time: no trial hangs, and owed
//! actions are in force by a verdict or undone. After `pause` and `undo --all` nothing may remain, and a stop must end.
//! One seed in [`Options::repeat_every`] runs twice and must leave the same trace.
//!
//! A failing seed prints one line that reproduces it. Seeds that found a bug stay in `data/regressions.toml`.

mod drawn;
mod life;

pub use drawn::Drawn;

use crate::checkers::{Invariant, Speeds, Truth, Violation};
use crate::exact;
use crate::faults::{FaultPlan, Faults, Kind, PictureOf, TRACE_SHOWN, private_directory};
use crate::parallel;
use crate::run::scratch;
use homeostat_engine::Strategy;
use homeostat_model::{Nanoseconds, UndoRecord};
use homeostat_platform::{Clock, Effectors, Sensors};
use homeostat_simulator::world::WorldError;
use homeostat_statistics::simulation::Random;
use life::Run;
use std::collections::BTreeMap;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// A machine that can be put through a campaign.
pub trait Subject {
    /// Its sensors and effectors; clones are handles to the same machine.
    type Platform: Sensors + Effectors + Clone + 'static;
    /// Its clock; sleeping lets its time pass.
    type Clock: Clock + Clone + 'static;
    /// Sensors and effectors.
    fn platform(&self) -> Self::Platform;
    /// The clock.
    fn clock(&self) -> Self::Clock;
    /// Takes pictures of everything that can be changed.
    fn picture(&self) -> PictureOf;
    /// The strategies to run on it.
    fn strategies(&self) -> Vec<Box<dyn Strategy>>;
    /// Lets time pass.
    fn advance_to(&mut self, at: Nanoseconds);
    /// Disturbs the machine and describes it; `None` without a target. The second value: by a person (or tuner).
    fn disturb(&mut self, kind: Kind, random: &mut Random) -> Option<(String, bool)>;
    /// The setting that the person of the last [`disturb`](Self::disturb) wrote, perhaps with the same value.
    fn written(&self) -> Option<String> {
        None
    }
    /// The noise-free speed of every running program if these changes were undone and everything was at rest. Without
    /// changes: the present speed at rest. The machine is unchanged. The records are in the order of the changes.
    fn speeds_without(&self, undone: &[&UndoRecord]) -> Speeds;
    /// How fast every program that runs is at this moment, without noise.
    fn speeds(&self) -> Speeds;
    /// Most work that a day may cost against the machine left alone, in percent × seconds of one program, before it is
    /// harm. Gains of competing programs do not offset a loss, since a loser's guard watches it alone.
    fn harm_per_day_max(&self) -> f64;
    /// The daemon was killed or stopped: handles from now on are those of a new process.
    fn restarted(&mut self) {}
    /// Takes back what only a fault had taken away: CPUs and nodes come back.
    fn heal(&mut self);
    /// Whether the machine has no room for what this undo would bring back, so that it stays owed.
    fn has_no_way_back(&self, _record: &UndoRecord) -> bool {
        false
    }
}

/// The options of a run.
#[derive(Clone, Debug, PartialEq)]
pub struct Options {
    /// First seed.
    pub seed: u64,
    /// Number of seeds, from the first.
    pub seeds: u64,
    /// Simulated hours of each seed under faults; the quiet second half comes on top.
    pub hours: f64,
    /// One seed in this many runs twice to compare the traces; 0 = none.
    pub repeat_every: u64,
    /// Stop at this many failing seeds.
    pub failures_max: usize,
    /// Rough signals instead of the usual ones: [`homeostat_simulator::rough`].
    pub rough: bool,
}

impl Options {
    fn reproduction(&self, seed: u64) -> String {
        format!(
            "homeostat-lab --campaign --seed {seed} --seeds 1 --hours {}{}",
            self.hours,
            if self.rough { " --rough" } else { "" }
        )
    }
}

impl Default for Options {
    fn default() -> Self {
        Self {
            seed: 1,
            seeds: 200,
            hours: 48.0,
            repeat_every: 16,
            failures_max: 8,
            rough: false,
        }
    }
}

/// Why a campaign could not be run at all.
#[derive(Debug, thiserror::Error)]
pub enum CampaignError {
    /// No directory for the journal.
    #[error("no temporary directory for journal and history: {0}")]
    Directory(#[from] io::Error),
    /// A machine cannot be built.
    #[error("the machine of a seed cannot be built: {0}")]
    World(#[from] WorldError),
    /// The options make no sense.
    #[error("{0}")]
    Options(String),
}

/// Actions and their results, in one life or in all together.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Counts {
    /// Simulated time, both halves; repetitions not counted.
    pub hours: f64,
    /// Faults by kind.
    pub injected: BTreeMap<Kind, u64>,
    /// Turns of the loop.
    pub turns: u64,
    /// Real trials started.
    pub trials: u64,
    /// Verdicts seen, by word.
    pub verdicts: BTreeMap<String, u64>,
    /// Times the daemon was killed and started again.
    pub crashes: u64,
    /// The world's facts about the changes.
    pub truth: Truth,
}

impl Counts {
    fn add(&mut self, other: &Self) {
        self.hours += other.hours;
        self.turns += other.turns;
        self.trials += other.trials;
        self.crashes += other.crashes;
        self.truth.add(&other.truth);
        for (kind, n) in &other.injected {
            *self.injected.entry(*kind).or_default() += n;
        }
        for (verdict, n) in &other.verdicts {
            *self.verdicts.entry(verdict.clone()).or_default() += n;
        }
    }
}

/// The result of one seed.
#[derive(Clone, Debug, Default)]
pub struct Life {
    /// Its seed.
    pub seed: u64,
    /// Its events.
    pub counts: Counts,
    /// Hash over every effector call and every line.
    pub hash: u64,
    /// Lines in the trace.
    pub lines: u64,
    /// Violations.
    pub violations: Vec<Violation>,
    /// The last lines of the trace after a violation, or all lines if requested.
    pub trace: Vec<String>,
}

/// A seed that failed.
#[derive(Clone, Debug)]
pub struct Failure {
    /// The life.
    pub life: Life,
    /// The command that reproduces it.
    pub reproduction: String,
}

/// The result of a campaign.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// Seeds run.
    pub seeds: u64,
    /// The events of all.
    pub counts: Counts,
    /// Seeds run twice.
    pub repeated: u64,
    /// Seeds that failed.
    pub failures: Vec<Failure>,
}

impl Report {
    /// Whether every invariant held in every seed.
    pub fn passed(&self) -> bool {
        self.failures.is_empty()
    }

    /// The report as text.
    pub fn text(&self) -> String {
        let c = &self.counts;
        let mut out = format!(
            "{} seeds, {:.0} simulated hours, {} turns, {} trials, {} crashes, {} seeds run twice\n",
            self.seeds, c.hours, c.turns, c.trials, c.crashes, self.repeated
        );
        let verdicts: Vec<String> = c.verdicts.iter().map(|(v, n)| format!("{n} {v}")).collect();
        out += &format!(
            "verdicts: {}\n",
            if verdicts.is_empty() {
                "none".to_owned()
            } else {
                verdicts.join(", ")
            }
        );
        let t = &c.truth;
        out += &format!(
            "in the world: {} changes tried, {} of them gained nothing; {} kept, {} of them gained nothing: at most {:.1} % of \
             what gains nothing is kept (exact, 95 %); {} probes of what is kept, the \
             dearest cost {:.2} % of the work since then\n",
            t.tried,
            t.nulls,
            t.kept,
            t.kept_for_nothing,
            100.0 * exact::rate_at_most(t.kept_for_nothing, t.nulls.max(t.kept_for_nothing), 0.95),
            t.probes,
            100.0 * t.probe_cost_max
        );
        out += &format!(
            "{} kept changes truly cost their program 5 % or more and stood after 20 probes\n",
            t.harm_stood
        );
        out += &format!(
            "work lost against the same machines left alone: {:.4} % of {:.0} hours of programs at work; on the worst day {:.0} \
             percent-seconds\n",
            100.0 * t.lost_s / t.worked_s.max(1e-9),
            t.worked_s / 3600.0,
            t.lost_per_day_max
        );
        let total: u64 = c.injected.values().sum();
        out += &format!("{total} faults of {} kinds:\n", c.injected.len());
        for (kind, n) in &c.injected {
            out += &format!("  {n:>9}  {}\n", kind_name(*kind));
        }
        if self.failures.is_empty() {
            out += "all invariants held in every seed\n";
        }
        for failure in &self.failures {
            out += &format!(
                "seed {} FAILED; reproduce with: {}\n",
                failure.life.seed, failure.reproduction
            );
            for v in &failure.life.violations {
                out += &format!("  {} at {}: {}\n", v.invariant, v.at, v.text);
            }
            for line in &failure.life.trace {
                out += &format!("    | {line}\n");
            }
        }
        out
    }
}

/// The name of a kind in scenario files.
pub fn kind_name(kind: Kind) -> String {
    match serde_json::to_value(kind) {
        Ok(serde_json::Value::String(name)) => name,
        _ => format!("{kind:?}"),
    }
}

/// How far a campaign is.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Progress {
    /// Seeds done.
    pub done: u64,
    /// Seeds in all.
    pub of: u64,
    /// Simulated hours so far.
    pub hours: f64,
    /// Seeds that failed so far.
    pub failures: usize,
}

/// Runs a campaign on machines that `make` builds from seeds, in parallel. `progress` follows each seed, in order;
/// false ends it. The result does not depend on threads.
///
/// # Errors
/// The options make no sense, or there is no temporary directory.
pub fn run_on<S: Subject>(
    options: &Options,
    threads: usize,
    make: impl Fn(u64) -> Result<S, WorldError> + Sync,
    progress: &mut dyn FnMut(&Progress) -> bool,
) -> Result<Report, CampaignError> {
    if !(options.hours > 0.0 && options.hours <= 10_000.0) {
        return Err(CampaignError::Options(format!(
            "hours = {}: must be above 0 and at most 10000",
            options.hours
        )));
    }
    let mut report = Report::default();
    let mut broken = None;
    let work = |index: u64| lived(options, options.seed.wrapping_add(index), &make);
    parallel::in_order(0..options.seeds, threads, &work, &mut |index, outcome| {
        let (life, repeated) = match outcome {
            Ok(lived) => lived,
            Err(e) => {
                broken = Some(e);
                return false;
            }
        };
        report.seeds += 1;
        report.repeated += u64::from(repeated);
        report.counts.add(&life.counts);
        if !life.violations.is_empty() {
            report.failures.push(Failure {
                reproduction: options.reproduction(life.seed),
                life,
            });
        }
        let go_on = progress(&Progress {
            done: index + 1,
            of: options.seeds,
            hours: report.counts.hours,
            failures: report.failures.len(),
        });
        go_on && report.failures.len() < options.failures_max
    });
    broken.map_or(Ok(report), Err)
}

/// One life, lived twice if the options ask for it, and whether it was.
fn lived<S: Subject>(
    options: &Options,
    seed: u64,
    make: impl Fn(u64) -> Result<S, WorldError>,
) -> Result<(Life, bool), CampaignError> {
    let mut life = live(seed, options.hours, &make)?;
    let twice = options.repeat_every > 0 && seed % options.repeat_every == 0 && life.violations.is_empty();
    if twice {
        let again = live(seed, options.hours, &make)?;
        if (again.hash, again.lines) != (life.hash, life.lines) {
            life.violations.push(Violation {
                at: Nanoseconds::ZERO,
                invariant: Invariant::Deterministic,
                text: format!(
                    "two runs of one seed differ: {} lines with hash {:016x}, {} lines with hash {:016x}",
                    life.lines, life.hash, again.lines, again.hash
                ),
            });
        }
    }
    Ok((life, twice))
}

/// One life under its seed's swarm: both halves. A panic of the code under test is a violation.
///
/// # Errors
/// The machine cannot be built, or there is no temporary directory.
pub fn live<S: Subject>(
    seed: u64,
    hours: f64,
    make: impl Fn(u64) -> Result<S, WorldError>,
) -> Result<Life, CampaignError> {
    live_under(FaultPlan::swarm(seed), seed, hours, make)
}

/// One life under a plan of faults of its own.
///
/// # Errors
/// As [`live`].
pub fn live_under<S: Subject>(
    plan: FaultPlan,
    seed: u64,
    hours: f64,
    make: impl Fn(u64) -> Result<S, WorldError>,
) -> Result<Life, CampaignError> {
    let mut life = remember(plan, seed, hours, TRACE_SHOWN, make)?;
    if life.violations.is_empty() {
        life.trace.clear();
    }
    Ok(life)
}

/// One life under its seed's swarm, with all lines of its trace, for finding a cause.
///
/// # Errors
/// As [`live`].
pub fn told<S: Subject>(
    seed: u64,
    hours: f64,
    make: impl Fn(u64) -> Result<S, WorldError>,
) -> Result<Life, CampaignError> {
    remember(FaultPlan::swarm(seed), seed, hours, usize::MAX, make)
}

/// One life with this many remembered last lines.
fn remember<S: Subject>(
    plan: FaultPlan,
    seed: u64,
    hours: f64,
    lines: usize,
    make: impl Fn(u64) -> Result<S, WorldError>,
) -> Result<Life, CampaignError> {
    let directory = scratch("homeostat-campaign-")?;
    let state = directory.path().join("state-0");
    private_directory(&state)?;
    let subject = make(seed)?;
    let alone = make(seed)?;
    let faults = Faults::new(plan.clone(), &state, (subject.picture())());
    faults.keep_trace(lines);
    let mut run = Run::new(plan, seed, hours, subject, alone, faults.clone());
    let outcome = catch_unwind(AssertUnwindSafe(|| run.live()));
    let mut life = run.life();
    match outcome {
        Ok(Ok(())) => {}
        Ok(Err(e)) => return Err(e.into()),
        Err(panic) => {
            let text = panic
                .downcast_ref::<String>()
                .cloned()
                .or_else(|| panic.downcast_ref::<&str>().map(|s| (*s).to_owned()))
                .unwrap_or_default();
            life.violations.push(Violation {
                at: run.subject.clock().now(),
                invariant: Invariant::NoPanic,
                text: format!("a panic: {text}"),
            });
        }
    }
    let trace = faults.traced();
    life.hash = trace.hash();
    life.lines = trace.lines();
    life.trace = trace.last().cloned().collect();
    Ok(life)
}

/// Runs a campaign on simulated machines from seeds, in parallel. `progress` follows each seed; false ends it.
///
/// # Errors
/// The options make no sense, a machine cannot be built, or there is no temporary directory.
pub fn run(
    options: &Options,
    threads: usize,
    progress: &mut dyn FnMut(&Progress) -> bool,
) -> Result<Report, CampaignError> {
    run_on(
        options,
        threads,
        |seed| Drawn::with_signals(seed, options.rough),
        progress,
    )
}

#[cfg(test)]
mod tests;
