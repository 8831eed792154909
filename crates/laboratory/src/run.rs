//! Runs a scenario: the daemon's runtime, engine, strategies and journal over a simulated machine. A run has one
//! [`Arm`]: the machine left alone, set by hand at the start, or given to homeostat. All arms share programs, events
//! and noise, and differ in what is done to the machine. Curves and table use the world's count of finished work, never
//! homeostat's sensors.

use crate::scenario::{Baseline, Scenario};
use homeostat_engine::{OperatorRequest, Status};
use homeostat_model::Nanoseconds;
use homeostat_platform::{Clock, Sensors};
use homeostat_runtime::{Recorder, RecoveryReport, Runtime, StartError};
use homeostat_simulator::platform::{SimClock, SimPlatform};
use homeostat_simulator::world::{PersonChange, TimedChange, Totals, World, WorldError};
use homeostat_store::history::HISTORY_FILE;
use homeostat_store::{HistoryOptions, Journal, JournalError, JournalOptions, ResilientHistory};
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// Turns without advance of the time that count as stuck.
const IDLE_TURNS_MAX: u32 = 100_000;
const STORY_MAX: usize = 20_000;
const SUMMARY_PROGRAMS_MAX: usize = 8;
/// Time limit of a stop with all undos.
const STOP_PATIENCE_S: f64 = 3600.0;
/// Delay before the daemon probes the machine again after a change of CPUs or nodes.
pub(crate) const MACHINE_CHANGED: Nanoseconds = Nanoseconds::from_secs(10);

/// The treatment of the machine in a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Arm {
    /// Nothing.
    #[default]
    LeftAlone,
    /// Set by an expert at the start.
    Manual,
    /// Decided by homeostat.
    Homeostat,
}

impl Arm {
    /// In words.
    pub fn words(self) -> &'static str {
        match self {
            Self::LeftAlone => "left alone",
            Self::Manual => "set by hand at the start",
            Self::Homeostat => "homeostat",
        }
    }
}

/// Means of one program over a span of time: a step of a curve, or a window of the table.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Point {
    /// End of the step, seconds since the start of the run.
    pub at_s: f64,
    /// Its length in seconds.
    pub seconds: f64,
    /// Units of work finished per second.
    pub work_per_s: f64,
    /// CPUs busy (1.0 = one hardware thread all the time).
    pub cpus: f64,
    /// Cores consumed, as a shared partition is charged for them.
    pub cores: f64,
    /// Share of the accesses to memory that stay on the own node, 0..1; `None` while nothing runs.
    pub local_share: Option<f64>,
    /// Share of the memory on large pages, 0..1.
    pub large_share: f64,
    /// Share of the memory traffic that is hardware prefetch, 0..1; `None` while nothing runs.
    pub prefetch_share: Option<f64>,
    /// Mean response time in milliseconds, of programs that have one.
    pub response_mean_ms: Option<f64>,
    /// 95th percentile of the response time in milliseconds.
    pub response_p95_ms: Option<f64>,
    /// Cycles per instruction of a running thread.
    pub cycles_per_instruction: Option<f64>,
    /// Mean latency of an access to memory in nanoseconds.
    pub latency_ns: Option<f64>,
}

/// Means between two states of the world's totals.
fn point_between(old: &Totals, new: &Totals, at_s: f64, seconds: f64) -> Point {
    let run_s = new.run_s - old.run_s;
    let work = (new.work - old.work).max(0.0);
    let mean = |new: f64, old: f64| (run_s > 0.0).then(|| (new - old) / run_s);
    let responses = new.responses.since(&old.responses);
    let timed = responses.requests() > 0.0;
    Point {
        at_s,
        seconds,
        work_per_s: work / seconds,
        cpus: (new.cpu_s - old.cpu_s) / seconds,
        cores: (new.core_s - old.core_s) / seconds,
        local_share: mean(new.local_s, old.local_s),
        large_share: mean(new.large_s, old.large_s).unwrap_or(0.0),
        prefetch_share: mean(new.prefetch_s, old.prefetch_s),
        response_mean_ms: timed.then(|| responses.mean_s() * 1e3),
        response_p95_ms: timed.then(|| responses.percentile_s(0.95) * 1e3),
        cycles_per_instruction: mean(new.cpi_s, old.cpi_s).filter(|c| *c > 0.0),
        latency_ns: mean(new.latency_ns_s, old.latency_ns_s).filter(|l| *l > 0.0),
    }
}

/// The curve of one program.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct ProgramTrack {
    /// Its name.
    pub program: String,
    /// The unit of its work.
    pub unit: String,
    /// The points, in order.
    pub points: Vec<Point>,
}

/// A line of the log.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Line {
    /// When, seconds since the start of the run.
    pub at_s: f64,
    /// About whom; `None` = the machine.
    pub workload: Option<String>,
    /// Stage it belongs to, or `event` for what the scenario did.
    pub stage: String,
    /// The sentence.
    pub text: String,
    /// Whether an operator should see it.
    pub warning: bool,
}

/// Everything a run showed.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Track {
    /// The treatment of the machine.
    pub arm: Arm,
    /// Seed of the run.
    pub seed: u64,
    /// Length in seconds, shorter than the scenario's when it was broken off.
    pub length_s: f64,
    /// The programs, in the order of the scenario.
    pub programs: Vec<ProgramTrack>,
    /// The events.
    pub story: Vec<Line>,
    /// Mean use of each hardware thread (0..1, as accounting shows it) over the table's window.
    pub thread_use: Vec<f64>,
    /// Lines that did not fit.
    pub lines_left_out: u64,
    /// CPU time that homeostat itself used, in seconds; part of what the machine had to carry.
    pub own_cpu_s: f64,
    /// homeostat's state at the end.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub view: Option<Status>,
    /// True when it was broken off before its end.
    pub broken_off: bool,
}

impl Track {
    /// One line: what was done to the machine, how much work came of it, and what homeostat cost.
    pub fn summary(&self) -> String {
        let work: Vec<String> = self
            .programs
            .iter()
            .take(SUMMARY_PROGRAMS_MAX)
            .map(|p| {
                let done: f64 = p.points.iter().map(|q| q.work_per_s * q.seconds).sum();
                format!("{} {}", p.program, crate::report::number(done))
            })
            .collect();
        let more = self.programs.len().saturating_sub(SUMMARY_PROGRAMS_MAX);
        let more = if more > 0 {
            format!(" and {more} more programs")
        } else {
            String::new()
        };
        let cost = if self.arm == Arm::Homeostat && self.length_s > 0.0 {
            format!(
                "; its own cost {:.3} % of one CPU",
                100.0 * self.own_cpu_s / self.length_s
            )
        } else {
            String::new()
        };
        format!(
            "{}: units of work in {}: {}{more}{cost}",
            self.arm.words(),
            crate::report::moment(self.length_s),
            work.join(", ")
        )
    }
}

/// Why a run cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// The scenario has no machine to run on.
    #[error("scenario {scenario}: {why}")]
    Scenario {
        /// Its name.
        scenario: String,
        /// The fault.
        why: String,
    },
    /// The world refuses.
    #[error("scenario {scenario}: {source}")]
    World {
        /// Its name.
        scenario: String,
        /// Why.
        source: WorldError,
    },
    /// There is no place for the journal.
    #[error(
        "no temporary directory for the journal: {0}\n  hint: set TMPDIR to a directory that can be written"
    )]
    Directory(#[from] std::io::Error),
    /// The journal of the run cannot be used.
    #[error("the journal of the run: {0}")]
    Journal(#[from] JournalError),
    /// The simulated machine cannot be described.
    #[error("the simulated machine: {0}")]
    Start(#[from] StartError),
    /// The run makes no progress.
    #[error("the run stands still at {at_s} s: {turns} turns without any advance of the time")]
    Stuck {
        /// Time, seconds since the start.
        at_s: f64,
        /// Turns.
        turns: u32,
    },
}

/// A directory for journal and history, in memory if possible: syncs are free, and the tests need only their order.
pub(crate) fn scratch(prefix: &str) -> Result<TempDir, std::io::Error> {
    let memory = Path::new("/dev/shm");
    if memory.is_dir() {
        if let Ok(directory) = TempDir::with_prefix_in(prefix, memory) {
            return Ok(directory);
        }
    }
    TempDir::with_prefix(prefix)
}

/// One run on its way.
pub struct Laboratory {
    scenario: Scenario,
    platform: SimPlatform,
    clock: SimClock,
    directory: TempDir,
    runtime: Option<Runtime<SimPlatform, SimClock>>,
    wake_at: Nanoseconds,
    /// When to probe again after a change of CPUs or nodes.
    look_at: Option<Nanoseconds>,
    events: VecDeque<TimedChange>,
    next_point: Nanoseconds,
    last: Vec<Totals>,
    last_at: Nanoseconds,
    origin: Nanoseconds,
    used: Vec<Vec<f64>>,
    track: Track,
}

impl Laboratory {
    /// A world at its start, with the arm's actor.
    ///
    /// # Errors
    /// [`RunError`]: the scenario, the temporary directory or the journal cannot be used.
    pub fn new(scenario: &Scenario, arm: Arm) -> Result<Self, RunError> {
        Self::recorded(scenario, arm, None)
    }

    /// The same, with a recorder for homeostat's inputs and answers until its first crash.
    ///
    /// # Errors
    /// As [`Laboratory::new`].
    pub fn recorded(scenario: &Scenario, arm: Arm, recorder: Option<Recorder>) -> Result<Self, RunError> {
        let complain = |why| RunError::Scenario {
            scenario: scenario.name.clone(),
            why,
        };
        let refused = |source| RunError::World {
            scenario: scenario.name.clone(),
            source,
        };
        let mut world = World::new(scenario.world().map_err(complain)?).map_err(refused)?;
        if arm == Arm::Manual {
            for change in &scenario.by_hand {
                world.person(change.clone()).map_err(refused)?;
            }
        }
        let platform = SimPlatform::new(world);
        let clock = platform.clock();
        let mut events = scenario.events.clone();
        events.sort_by(|a, b| a.at_s.total_cmp(&b.at_s));
        let origin = clock.now();
        let mut laboratory = Self {
            track: Track {
                arm,
                seed: scenario.seed,
                programs: scenario
                    .programs
                    .iter()
                    .map(|p| ProgramTrack {
                        program: p.name.clone(),
                        unit: p
                            .meters
                            .first()
                            .map_or_else(String::new, |m| format!("{}s", m.unit)),
                        points: Vec::new(),
                    })
                    .collect(),
                ..Track::default()
            },
            scenario: scenario.clone(),
            platform,
            clock,
            directory: scratch("homeostat-simulate-")?,
            runtime: None,
            wake_at: origin,
            look_at: None,
            events: events.into(),
            next_point: origin,
            last: Vec::new(),
            last_at: origin,
            origin,
            used: Vec::new(),
        };
        laboratory.last = laboratory.totals();
        laboratory.next_point = origin + Nanoseconds::from_secs_f64(scenario.resolution_s);
        if arm == Arm::Homeostat {
            laboratory.start(recorder)?;
        }
        Ok(laboratory)
    }

    /// Seconds since the start of the run.
    pub fn now_s(&self) -> f64 {
        (self.clock.now() - self.origin).as_secs_f64()
    }

    /// The simulated machine.
    pub fn platform(&self) -> &SimPlatform {
        &self.platform
    }

    /// The directory of journal and history.
    pub fn directory(&self) -> PathBuf {
        self.directory.path().to_owned()
    }

    /// The state for people, while homeostat runs.
    pub fn view(&self) -> Option<Status> {
        self.runtime.as_ref().map(Runtime::view)
    }

    /// The track so far.
    pub fn track(&self) -> &Track {
        &self.track
    }

    fn start(&mut self, recorder: Option<Recorder>) -> Result<RecoveryReport, RunError> {
        let (journal, recovered) = Journal::open(self.directory.path(), JournalOptions::default())?;
        let history = ResilientHistory::open(
            &self.directory.path().join(HISTORY_FILE),
            HistoryOptions {
                first_experiment: recovered.next_experiment,
                ..HistoryOptions::default()
            },
            self.clock.unix_seconds(),
        );
        let (runtime, report) = Runtime::start_recorded(
            self.platform.fresh(),
            self.platform.clock(),
            journal,
            history,
            homeostat_strategies::all(),
            self.scenario.policy(),
            recorder,
        )?;
        self.runtime = Some(runtime);
        self.wake_at = self.clock.now();
        Ok(report)
    }

    /// Ends homeostat as a crash would: nothing is undone, nothing is closed. The machine runs on.
    pub fn crash(&mut self) {
        if self.runtime.take().is_some() {
            self.tell("event", None, "homeostat is killed".into(), false);
        }
    }

    /// Starts homeostat again after a crash, with recovery from its journal.
    ///
    /// # Errors
    /// The journal cannot be used, or the machine cannot be described.
    pub fn restart(&mut self) -> Result<RecoveryReport, RunError> {
        let report = self.start(None)?;
        let text = format!(
            "homeostat is started again: {} changes undone, {} void, {} not undone",
            report.undone.len(),
            report.void.len(),
            report.failed.len()
        );
        self.tell("event", None, text, !report.failed.is_empty());
        Ok(report)
    }

    /// Passes on what a person asks of homeostat.
    pub fn operator(&mut self, request: OperatorRequest) {
        if let Some(runtime) = &mut self.runtime {
            runtime.operator(request);
            self.wake_at = self.clock.now();
        }
    }

    /// Asks homeostat to stop and undo everything, and runs until it has. True when it finished.
    ///
    /// # Errors
    /// As [`Laboratory::run_until`].
    pub fn stop(&mut self) -> Result<bool, RunError> {
        self.operator(OperatorRequest::Stop { keep: false });
        let deadline = self.now_s() + STOP_PATIENCE_S;
        while self.runtime.is_some() && self.now_s() < deadline {
            self.run_until(self.now_s() + 1.0)?;
        }
        Ok(self.runtime.is_none())
    }

    /// Runs until that moment (seconds since the start).
    ///
    /// # Errors
    /// [`RunError::World`] when an event cannot happen, [`RunError::Stuck`] when the time stands still.
    pub fn run_until(&mut self, until_s: f64) -> Result<(), RunError> {
        let end = self.origin + Nanoseconds::from_secs_f64(until_s);
        let mut idle = 0;
        loop {
            let now = self.clock.now();
            self.events_due(now)?;
            self.look_again(now)?;
            if now >= self.next_point {
                self.point(now);
            }
            if self.runtime.is_some() && now >= self.wake_at && now < end {
                self.turn();
            }
            let mut next = end.min(self.next_point);
            if self.runtime.is_some() {
                next = next.min(self.wake_at);
            }
            if let Some(at) = self.look_at {
                next = next.min(at);
            }
            if let Some(event) = self.events.front() {
                next = next.min(self.origin + Nanoseconds::from_secs_f64(event.at_s));
            }
            if now >= end {
                break;
            }
            if next > now {
                idle = 0;
                self.platform.advance_to(next);
            } else {
                idle += 1;
                if idle > IDLE_TURNS_MAX {
                    return Err(RunError::Stuck {
                        at_s: self.now_s(),
                        turns: idle,
                    });
                }
            }
        }
        self.track.length_s = self.now_s();
        Ok(())
    }

    fn turn(&mut self) {
        let Some(runtime) = &mut self.runtime else {
            return;
        };
        let turn = runtime.turn();
        self.wake_at = turn.wake_at;
        for story in turn.stories {
            let workload = story.workload.map(|w| w.to_string());
            let stage = story.stage.to_string();
            self.tell(&stage, workload, story.text, story.warning);
        }
        if turn.finished {
            self.runtime = None;
        }
    }

    fn events_due(&mut self, now: Nanoseconds) -> Result<(), RunError> {
        while let Some(event) = self.events.front() {
            if self.origin + Nanoseconds::from_secs_f64(event.at_s) > now {
                break;
            }
            let Some(event) = self.events.pop_front() else {
                break;
            };
            let text = event.change.to_string();
            let program = event.change.program().map(str::to_owned);
            if matches!(
                event.change,
                PersonChange::Cpus { .. } | PersonChange::Node { .. }
            ) {
                self.look_at = Some(now + MACHINE_CHANGED);
            }
            self.platform
                .person(event.change)
                .map_err(|source| RunError::World {
                    scenario: self.scenario.name.clone(),
                    source,
                })?;
            self.tell("event", program, text, false);
        }
        Ok(())
    }

    fn look_again(&mut self, now: Nanoseconds) -> Result<(), RunError> {
        if self.look_at.is_some_and(|at| now >= at) {
            self.look_at = None;
            let machine = Box::new(self.platform.machine().map_err(StartError::from)?);
            self.operator(OperatorRequest::Machine(machine));
        }
        Ok(())
    }

    fn tell(&mut self, stage: &str, workload: Option<String>, text: String, warning: bool) {
        if self.track.story.len() >= STORY_MAX {
            self.track.lines_left_out += 1;
            return;
        }
        let at_s = self.now_s();
        self.track.story.push(Line {
            at_s,
            workload,
            stage: stage.to_owned(),
            text,
            warning,
        });
    }

    fn totals(&self) -> Vec<Totals> {
        self.scenario
            .programs
            .iter()
            .map(|p| self.platform.totals(&p.name))
            .collect()
    }

    fn point(&mut self, now: Nanoseconds) {
        let totals = self.totals();
        let seconds = (now - self.last_at).as_secs_f64();
        let at_s = (now - self.origin).as_secs_f64();
        if seconds > 0.0 {
            for ((track, new), old) in self.track.programs.iter_mut().zip(&totals).zip(&self.last) {
                track.points.push(point_between(old, new, at_s, seconds));
            }
        }
        let windows = self.scenario.windows();
        let window = if self.track.arm == Arm::Homeostat {
            windows.after
        } else {
            windows.before
        };
        if at_s > window.from_s && at_s <= window.to_s {
            self.used.push(self.platform.with_world(World::cpu_use));
        }
        self.last = totals;
        self.last_at = now;
        self.next_point = now + Nanoseconds::from_secs_f64(self.scenario.resolution_s);
    }

    /// Ends the run and gives what it showed.
    pub fn finish(mut self, broken_off: bool) -> Track {
        let now = self.clock.now();
        if now > self.last_at {
            self.point(now);
        }
        let looks = self.used.len();
        if let Some(cpus) = self.used.first().map(Vec::len).filter(|_| looks > 0) {
            let mean = |cpu: usize| self.used.iter().filter_map(|u| u.get(cpu)).sum::<f64>() / looks as f64;
            self.track.thread_use = (0..cpus).map(mean).collect();
        }
        self.track.own_cpu_s = self.platform.own_cpu().as_secs_f64();
        self.track.view = self.view();
        self.track.broken_off = broken_off;
        self.track.length_s = self.now_s();
        self.track
    }
}

/// How far the runs of a scenario are.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Progress<'a> {
    /// The scenario.
    pub scenario: &'a str,
    /// The run at hand.
    pub arm: Arm,
    /// Seconds simulated in this run.
    pub at_s: f64,
    /// Seconds to simulate in this run.
    pub length_s: f64,
    /// Lines of the log since the last call.
    pub lines: &'a [Line],
}

/// One run. `go_on` sees the progress about a hundred times; false ends it early and returns what was seen.
///
/// # Errors
/// [`RunError`].
pub fn run(
    scenario: &Scenario,
    arm: Arm,
    go_on: &mut dyn FnMut(Progress<'_>) -> bool,
) -> Result<Track, RunError> {
    const STEPS: u32 = 200;
    let mut laboratory = Laboratory::new(scenario, arm)?;
    let length_s = scenario.length_s();
    let mut told = 0;
    for step in 1..=STEPS {
        let until = length_s * f64::from(step) / f64::from(STEPS);
        laboratory.run_until(until)?;
        let lines = laboratory.track.story.get(told..).unwrap_or_default();
        let more = go_on(Progress {
            scenario: &scenario.name,
            arm,
            at_s: until,
            length_s,
            lines,
        });
        told = laboratory.track.story.len();
        if !more {
            return Ok(laboratory.finish(step < STEPS));
        }
    }
    Ok(laboratory.finish(false))
}

/// All runs of a scenario: left alone, by hand where the scenario says how, and homeostat's.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Outcome {
    /// Name of the scenario.
    pub scenario: String,
    /// One line for people.
    pub title: String,
    /// Its source.
    pub source: String,
    /// The runs: homeostat's first.
    pub tracks: Vec<Track>,
    /// The table before and after.
    pub comparisons: Vec<crate::report::Comparison>,
}

impl Outcome {
    /// The run of an arm.
    pub fn track(&self, arm: Arm) -> Option<&Track> {
        self.tracks.iter().find(|t| t.arm == arm)
    }
}

/// Makes all runs of a scenario and compares them, or those until it is broken off.
///
/// # Errors
/// [`RunError`].
pub fn run_all(
    scenario: &Scenario,
    go_on: &mut dyn FnMut(Progress<'_>) -> bool,
) -> Result<Outcome, RunError> {
    let mut arms = vec![Arm::Homeostat, Arm::LeftAlone];
    if !scenario.by_hand.is_empty() {
        arms.push(Arm::Manual);
    }
    let mut tracks: Vec<Track> = Vec::new();
    for arm in arms {
        let track = run(scenario, arm, go_on)?;
        let broken_off = track.broken_off;
        tracks.push(track);
        if broken_off {
            break;
        }
    }
    let windows = scenario.windows();
    let with = tracks.iter().find(|t| t.arm == Arm::Homeostat);
    let before = match windows.baseline {
        Baseline::SameRun => with,
        Baseline::LeftAlone => tracks.iter().find(|t| t.arm == Arm::LeftAlone),
    };
    let comparisons = match (before, with) {
        (Some(before), Some(with)) => crate::report::compare(before, windows.before, with, windows.after),
        _ => Vec::new(),
    };
    Ok(Outcome {
        scenario: scenario.name.clone(),
        title: scenario.title.clone(),
        source: scenario.source.clone(),
        tracks,
        comparisons,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn small() -> Scenario {
        crate::scenario::parse(
            "test.toml",
            r#"name = "test"
title = "two chases on two chips"
hours = 0.4
seed = 5
resolution_s = 30.0
[machine]
named = "redbook-16"
[[program]]
name = "a"
profile = "latency"
threads = 30
private_mib = 8192
memory_on = [0.7, 0.3]
threads_on = [0.25, 0.75]
[[program]]
name = "b"
profile = "latency"
threads = 30
private_mib = 8192
memory_on = [0.3, 0.7]
threads_on = [0.75, 0.25]
[[event]]
at_s = 1200.0
change = { what = "restart", program = "b" }
[[by_hand]]
what = "large-pages"
program = "a"
share = 1.0
"#,
        )
        .unwrap()
    }

    fn done(track: &Track) -> f64 {
        track
            .programs
            .iter()
            .flat_map(|p| &p.points)
            .map(|p| p.work_per_s * p.seconds)
            .sum()
    }

    #[test]
    fn the_same_seed_is_the_same_run_and_another_seed_is_another() {
        let scenario = small();
        let go = &mut |_: Progress<'_>| true;
        let first = run_all(&scenario, go).unwrap();
        assert_eq!(run_all(&scenario, go).unwrap(), first);
        let other = run(&Scenario { seed: 6, ..scenario }, Arm::Homeostat, go).unwrap();
        assert_ne!(Some(&other), first.track(Arm::Homeostat));
        // Homeostat first, then what it is compared with.
        assert_eq!(
            first.tracks.iter().map(|t| t.arm).collect::<Vec<_>>(),
            [Arm::Homeostat, Arm::LeftAlone, Arm::Manual]
        );
        for track in &first.tracks {
            assert!((track.length_s - 1440.0).abs() < 1e-6 && !track.broken_off);
            assert_eq!(track.programs[0].points.len(), 48, "{:?}", track.arm);
            assert!(done(track) > 0.0);
            assert!(
                track
                    .story
                    .iter()
                    .any(|l| l.stage == "event" && l.text.contains("restarts"))
            );
        }
        let alone = first.track(Arm::LeftAlone).unwrap();
        assert_eq!(alone.own_cpu_s, 0.0, "nobody looked");
        let with = first.track(Arm::Homeostat).unwrap();
        assert!(with.own_cpu_s > 0.0, "looking is not free");
        assert!(
            with.story.iter().any(|l| l.stage == "trying"),
            "{}",
            crate::report::story(&with.story)
        );
        assert!(
            with.thread_use.len() == 64 && with.thread_use.iter().all(|u| (0.0..=1.0 + 1e-9).contains(u))
        );
    }

    #[test]
    fn a_crash_leaves_what_the_journal_then_takes_back() {
        let scenario = small();
        let mut laboratory = Laboratory::new(&scenario, Arm::Homeostat).unwrap();
        let untouched = laboratory.platform().settings();
        let mut at = 0.0;
        // Until something is changed.
        while laboratory.platform().settings().masks.is_empty() {
            at += 1.0;
            assert!(at < 600.0, "{}", crate::report::story(&laboratory.track().story));
            laboratory.run_until(at).unwrap();
        }
        laboratory.crash();
        laboratory.run_until(at + 60.0).unwrap();
        assert!(
            !laboratory.platform().settings().masks.is_empty(),
            "a crash undoes nothing"
        );
        let report = laboratory.restart().unwrap();
        assert!(report.complete() && !report.undone.is_empty(), "{report:?}");
        assert_eq!(laboratory.platform().settings(), untouched);
        laboratory.run_until(at + 300.0).unwrap();
        assert!(laboratory.stop().unwrap());
        assert_eq!(laboratory.platform().settings(), untouched);
    }

    #[test]
    fn a_program_that_executes_itself_anew_in_a_trial_ends_it_and_nothing_is_left_set() {
        let plain = Scenario {
            events: Vec::new(),
            ..small()
        };
        let mut laboratory = Laboratory::new(&plain, Arm::Homeostat).unwrap();
        // Memory is another one; what the threads are bound to outlives what they execute.
        let bound = |laboratory: &Laboratory| {
            let settings = laboratory.platform().settings();
            (settings.masks, settings.grouped)
        };
        let untouched = bound(&laboratory);
        let mut at = 0.0;
        while laboratory.platform().settings().masks.is_empty() {
            at += 1.0;
            assert!(at < 600.0, "{}", crate::report::story(&laboratory.track().story));
            laboratory.run_until(at).unwrap();
        }
        for program in ["a", "b"] {
            let program = program.to_owned();
            let change = PersonChange::Execute { program };
            laboratory.platform().person(change).unwrap();
        }
        laboratory.run_until(at + 30.0).unwrap();
        let told = |laboratory: &Laboratory| {
            let story = &laboratory.track().story;
            story.iter().any(|l| l.text.starts_with("program replaced"))
        };
        assert!(
            told(&laboratory),
            "{}",
            crate::report::story(&laboratory.track().story)
        );
        assert_eq!(bound(&laboratory), untouched);
        assert!(laboratory.stop().unwrap());
        assert_eq!(bound(&laboratory), untouched);
    }

    #[test]
    fn a_run_that_is_broken_off_shows_what_it_saw() {
        let mut calls = 0;
        let track = run(&small(), Arm::LeftAlone, &mut |_| {
            calls += 1;
            calls < 50
        })
        .unwrap();
        assert!(
            track.broken_off && (track.length_s - 360.0).abs() < 1e-6,
            "{}",
            track.length_s
        );
        assert_eq!(track.programs[0].points.len(), 12);
    }
}
