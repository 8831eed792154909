//! The whole daemon in trials of its own. It finds two processes of `latency` whose memory lies on two nodes and whose
//! threads may run anywhere, meters them, and tries to keep the threads on one node, in blocks with and without; where the
//! daemon is killed or stopped, with their memory in the same change. Nothing becomes faster by that in the emulation, so
//! the right end of each trial is that every mask and the node of every page is as it was found: by a verdict, by a person
//! who takes hold of a thread, by SIGTERM, or by `restore` after kill -9.

use super::Context;
use super::people::taskset;
use super::programs::{Latencies, Nodes, Size};
use crate::daemon::{Daemon, ask, json};
use crate::instruments::{Frames, Masks};
use crate::{Failure, ensure};
use serde_json::Value;
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// The shortest times until a trial and in it, and thresholds with which it is soon over on a CPU whose speed changes by
/// tens of percent from second to second: by default homeostat rightly begins no trial there, because it could not prove
/// anything within the hour. A change would have to make the program 2.7 times as fast to be kept.
pub(super) const HURRIED: &str = "\
[policy]
age_min_s = 1
scan_interval_s = 2
observe_min_s = 10
meter_samples_min = 8
meter_noise_max = 10
washout_min_s = 1
measured_candidates_s = [2]
placebo_every_s = 0
reconsider_s = 10
experiment_max_s = 86400
[policy.discovery]
kind = \"fixed\"
alpha = 0.0001
[policy.trial]
delta = 1.0
gate = 1.0
harm_margin = 1.0
alpha_harm = 0.0001
beta = 0.5
targets = [1.0, 1.0, 1.0, 1.0, 1.0]
blocks_max = 10000
[policy.strategies]
large_pages = false
";
/// Four pairs of processes have room on four CPUs, and each pair has it on one node.
const SIZE: Size = Size {
    mib: 32,
    threads: 2,
    duty: 12,
};
/// A little more than the least that is ever moved.
const SIZE_TO_MOVE: Size = Size { mib: 40, ..SIZE };
/// Threads are tried together with their memory whatever that adds by prediction.
const WITH_MEMORY: &str = "\
[policy.settings.cache_affinity]
together_below = 10
together_gain_min = 0
";
/// From the beginning of a trial to threads in their places: the goal of issue 5. It takes one or two blocks of seven
/// seconds.
const PLACED_WITHIN_S: f64 = 60.0;
const TICK: Duration = Duration::from_millis(200);
/// Between two looks into the history: each starts a program.
const HISTORY_EVERY: Duration = Duration::from_secs(4);

/// How a trial ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    /// By its verdict.
    Verdict,
    /// kill -9 of the daemon while the change is on, then `homeostat restore`.
    Killed,
    /// SIGTERM while the change is on.
    Stopped,
    /// A person binds a thread while the change is on.
    Person,
}

impl End {
    const ALL: [Self; 4] = [Self::Verdict, Self::Killed, Self::Stopped, Self::Person];

    fn unit(self) -> &'static str {
        match self {
            Self::Verdict => "verdict.service",
            Self::Killed => "killed.service",
            Self::Stopped => "stopped.service",
            Self::Person => "person.service",
        }
    }

    /// Whether memory goes along with the threads: the daemon is interrupted while it moves it.
    fn moves_memory(self) -> bool {
        matches!(self, Self::Killed | Self::Stopped)
    }
}

/// Only this unit is the business of a daemon with this configuration.
pub(super) fn configuration(unit: &str) -> String {
    format!(
        "{HURRIED}[[policy.workloads]]\nmatch = {unit:?}\n[[policy.workloads]]\nmatch = \"*\"\nnever = true\n"
    )
}

/// A daemon with a pair of processes of its own.
struct Trial {
    end: End,
    latencies: Latencies,
    found: Masks,
    frames: Frames,
    pages: Nodes,
    directory: PathBuf,
    /// `None` when it has ended.
    daemon: Option<Daemon>,
    placed: bool,
    /// What the person bound, and to what.
    bound: Option<(i32, BTreeSet<u32>)>,
    asked: Instant,
}

impl Trial {
    fn start(context: &Context, end: End) -> Result<Self, Failure> {
        let size = if end.moves_memory() { SIZE_TO_MOVE } else { SIZE };
        let latencies = Latencies::start(context, end.unit(), size)?;
        let found = latencies.masks()?;
        let frames = Frames::read()?;
        let pages = latencies.nodes(&frames)?;
        let directory = context.directory.join(end.unit());
        let memory = if end.moves_memory() { WITH_MEMORY } else { "" };
        let mut settings = format!("{}{memory}", configuration(end.unit()));
        if matches!(end, End::Person) {
            // Not given up before a block in which the change is made again, which is when it meets the person's choice.
            settings = settings.replace("beta = 0.5", "beta = 0.001");
        }
        let daemon = Daemon::start(&directory, &settings)?;
        Ok(Self {
            end,
            latencies,
            found,
            frames,
            pages,
            directory,
            daemon: Some(daemon),
            placed: false,
            bound: None,
            asked: Instant::now(),
        })
    }

    /// The CPUs on which all threads are kept; `None` when they are not, or not all yet.
    fn place(&self) -> Result<Option<BTreeSet<u32>>, Failure> {
        let now = self.latencies.masks()?;
        let masks: BTreeSet<&BTreeSet<u32>> = now.values().collect();
        Ok(match masks.first() {
            Some(mask) if masks.len() == 1 && now != self.found => Some((*mask).clone()),
            _ => None,
        })
    }

    /// Pages that lie on another node than the one on which they were found.
    fn moved(&self) -> Result<usize, Failure> {
        let now = self.latencies.nodes(&self.frames)?;
        let elsewhere = |(page, node): &(&(i32, u64), &u32)| now.get(page) != Some(*node);
        Ok(self.pages.iter().filter(elsewhere).count())
    }

    fn as_found(&self, when: &str) -> Result<(), Failure> {
        let now = self.latencies.masks()?;
        ensure!(
            now == self.found,
            "{}: {when} masks are {now:?}, found {:?}; the daemon's log:\n{}",
            self.end.unit(),
            self.found,
            self.log()
        );
        self.pages_as_found(when)
    }

    fn pages_as_found(&self, when: &str) -> Result<(), Failure> {
        let moved = self.moved()?;
        ensure!(
            moved == 0,
            "{}: {when} {moved} of {} pages are not on the node on which they were found; the daemon's log:\n{}",
            self.end.unit(),
            self.pages.len(),
            self.log()
        );
        Ok(())
    }

    fn log(&self) -> String {
        crate::daemon::log(&self.directory)
    }

    /// What the daemon says of the trial that runs.
    fn running(&self) -> Result<Option<Value>, Failure> {
        let status = json(&ask(&self.directory, &["status", "--json"])?)?;
        Ok(status["experiments"]
            .as_array()
            .and_then(|all| all.first())
            .cloned())
    }

    /// The verdict of the first experiment in the history, once there is one.
    fn verdict(&mut self) -> Result<Option<Value>, Failure> {
        if self.asked.elapsed() < HISTORY_EVERY {
            return Ok(None);
        }
        self.asked = Instant::now();
        let status = json(&ask(&self.directory, &["status", "--json"])?)?;
        Ok(status["outcomes"].as_array().and_then(|all| all.last()).cloned())
    }

    /// Looks once, and does what is due.
    fn turn(&mut self, context: &Context) -> Result<(), Failure> {
        let Some(daemon) = &mut self.daemon else {
            return Ok(());
        };
        daemon.must_live("its trial was over")?;
        if self.placed {
            self.wait_for_the_end(context)?;
        } else if let Some(place) = self.place()? {
            if !self.end.moves_memory() || self.moved()? > 0 {
                self.placed = true;
                self.just_placed(context, &place)?;
            }
        }
        Ok(())
    }

    fn just_placed(&mut self, context: &Context, place: &BTreeSet<u32>) -> Result<(), Failure> {
        let unit = self.end.unit();
        ensure!(
            context.expected.nodes.values().any(|n| n.cpus == *place),
            "{unit}: threads are kept on CPUs {place:?}, which are no node"
        );
        let Some(daemon) = self.daemon.take() else {
            return Ok(());
        };
        let (moved, all) = (self.moved()?, self.pages.len());
        match self.end {
            End::Killed => {
                daemon.kill()?;
                let restored = json(&ask(&self.directory, &["restore", "--json"])?)?;
                let count = |key: &str| restored[key].as_array().map_or(0, Vec::len);
                ensure!(
                    count("undone") == 1 && count("failed") == 0,
                    "restore after kill -9: {restored}"
                );
                self.as_found("after kill -9 and restore")?;
                context.note(&format!(
                    "{unit}: killed in a block with the change, {moved} of {all} pages moved by then; restore put masks and \
                     pages back"
                ));
            }
            End::Stopped => {
                let ended = daemon.stop()?;
                ensure!(ended.success(), "after SIGTERM it ended with {ended}");
                self.as_found("after SIGTERM")?;
                context.note(&format!(
                    "{unit}: stopped in a block with the change, {moved} of {all} pages moved by then; it put masks and \
                     pages back"
                ));
            }
            End::Person => {
                let chosen = self.found.keys().next_back().copied();
                let chosen = chosen.ok_or_else(|| Failure::Broken("latency has no threads".into()))?;
                let all = context.expected.cpus();
                let elsewhere: BTreeSet<u32> = all.difference(place).take(1).copied().collect();
                taskset(chosen, &elsewhere)?;
                self.bound = Some((chosen, elsewhere));
                self.daemon = Some(daemon);
            }
            End::Verdict => {
                self.daemon = Some(daemon);
                let running = self.running()?;
                let since = running.as_ref().and_then(|e| e["elapsed_s"].as_f64());
                let since = since.ok_or_else(|| {
                    Failure::Broken(format!(
                        "{unit}: placed without a trial; the log:\n{}",
                        self.log()
                    ))
                })?;
                context.note(&format!(
                    "{unit}: threads on CPUs {place:?} {since:.0} s after the beginning of the trial"
                ));
                ensure!(
                    since <= PLACED_WITHIN_S,
                    "placed {since:.0} s after the beginning of the trial"
                );
            }
        }
        Ok(())
    }

    fn wait_for_the_end(&mut self, context: &Context) -> Result<(), Failure> {
        let unit = self.end.unit();
        match self.bound.clone() {
            Some((chosen, theirs)) => {
                let mut wanted = self.found.clone();
                wanted.insert(chosen, theirs.clone());
                let now = self.latencies.masks()?;
                ensure!(
                    now.get(&chosen) == Some(&theirs),
                    "{unit}: thread {chosen} was taken from the person: {now:?}"
                );
                if now != wanted {
                    return Ok(());
                }
                // A block without the change looks like that, too.
                let Some(outcome) = self.verdict()? else {
                    return Ok(());
                };
                ensure!(
                    outcome["verdict"] == "aborted",
                    "{unit}: the trial of what a person bound ended with {outcome}"
                );
                self.stop()?;
                let now = self.latencies.masks()?;
                ensure!(
                    now == wanted,
                    "{unit}: in the end masks are {now:?}, wanted {wanted:?}"
                );
                self.pages_as_found("in the end")?;
                context.note(&format!("{unit}: withdrawn: {}", outcome["reason"]));
            }
            None => {
                let Some(outcome) = self.verdict()? else {
                    return Ok(());
                };
                let verdict = outcome["verdict"].as_str().unwrap_or_default();
                ensure!(
                    ["rejected", "inconclusive", "harmful"].contains(&verdict),
                    "{unit}: the emulation shows no gain, and the trial ended with {outcome}"
                );
                self.as_found("after the verdict")?;
                context.note(&format!("{unit}: {verdict}: {}", outcome["reason"]));
                self.stop()?;
                self.as_found("in the end")?;
            }
        }
        Ok(())
    }

    fn stop(&mut self) -> Result<(), Failure> {
        let Some(daemon) = self.daemon.take() else {
            return Ok(());
        };
        let ended = daemon.stop()?;
        ensure!(ended.success(), "after SIGTERM it ended with {ended}");
        Ok(())
    }
}

/// Four daemons side by side, each with a pair of processes of its own, and four ways in which a trial ends.
pub(super) fn end_with_everything_as_found(context: &Context) -> Result<(), Failure> {
    let mut trials = Vec::new();
    for end in End::ALL {
        trials.push(Trial::start(context, end)?);
    }
    let begin = Instant::now();
    // The supervisor ends this scenario when its time is over; a little before that the logs can still be told.
    let patience = context.expected.limit * 2 / 5;
    loop {
        for trial in &mut trials {
            trial.turn(context)?;
        }
        let open: Vec<&Trial> = trials.iter().filter(|t| t.daemon.is_some()).collect();
        if open.is_empty() {
            return Ok(());
        }
        ensure!(
            begin.elapsed() < patience,
            "not over within {} s: {}",
            patience.as_secs(),
            open.iter()
                .map(|t| format!("{} (placed: {}), its log:\n{}", t.end.unit(), t.placed, t.log()))
                .collect::<String>()
        );
        std::thread::sleep(TICK);
    }
}
