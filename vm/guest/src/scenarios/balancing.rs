//! The kernel's automatic NUMA balancing, on a kernel that balances as it was built: the whole daemon tries to switch it off
//! for two programs at once, in blocks with and without; and the value found is there again after SIGTERM, and after
//! kill -9 and `restore`. What a person writes meanwhile stays.
//!
//! The emulation has no distance, and an emulated fault costs what it likes: whether it pays is not asked here.

use super::Context;
use super::groups::Group;
use super::programs::{Program, Size, latency_on};
use super::trials::HURRIED;
use crate::daemon::{Daemon, ask, json};
use crate::instruments::{text, write};
use crate::{Failure, ensure};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

const SETTING: &str = "/proc/sys/kernel/numa_balancing";
/// As Debian's kernel sets it on a machine with several nodes.
const FOUND: &str = "1";
const OFF: &str = "0";
/// What a person sets: memory tiering.
const THEIRS: &str = "2";
const UNITS: [&str; 2] = ["balanced-a.service", "balanced-b.service"];
/// The kernel's counters are looked at for a moment only, and whatever they say it is tried.
const STRATEGY: &str = "\
cache_affinity = false
memory_affinity = false
[policy.settings.numa_balancing]
window_min_s = 1
moved_share_max = 1e9
settling_s = 0.1
gain_min = 0
";
const SIZE: Size = Size {
    mib: 64,
    threads: 2,
    duty: 20,
};
const TICK: Duration = Duration::from_millis(50);
/// While a trial is waited for.
const SLOW_TICK: Duration = Duration::from_millis(400);

fn setting() -> Result<String, Failure> {
    text(SETTING)
}

/// The daemon's configuration: two programs and one strategy.
fn configuration() -> String {
    let units: String = UNITS
        .iter()
        .map(|unit| format!("[[policy.workloads]]\nmatch = {unit:?}\n"))
        .collect();
    format!("{HURRIED}{STRATEGY}{units}[[policy.workloads]]\nmatch = \"*\"\nnever = true\n")
}

/// A daemon that tries it, in a directory of its own.
struct Attempt {
    daemon: Daemon,
    directory: PathBuf,
    patience: Duration,
}

impl Attempt {
    fn start(context: &Context, name: &str) -> Result<Self, Failure> {
        ensure!(
            setting()? == FOUND,
            "{name}: {SETTING} is {} before the trial",
            setting()?
        );
        let directory = context.directory.join(name);
        let daemon = Daemon::start(&directory, &configuration())?;
        Ok(Self {
            daemon,
            directory,
            patience: context.expected.limit / 8,
        })
    }

    fn wait_for(&mut self, value: &str) -> Result<Duration, Failure> {
        let patience = self.patience;
        let what = format!("{SETTING} = {value}");
        self.daemon
            .wait_every(SLOW_TICK, &what, patience, |_| Ok(setting()? == value))
    }

    fn trial(&self) -> Result<Value, Failure> {
        let status = json(&ask(&self.directory, &["status", "--json"])?)?;
        let first = status["experiments"].as_array().and_then(|all| all.first());
        first
            .cloned()
            .ok_or_else(|| Failure::Broken(format!("no trial runs; the log:\n{}", self.daemon.log())))
    }
}

/// Off and on again in blocks, for both programs as one change; SIGTERM gives the value back.
fn stopped(context: &Context) -> Result<(), Failure> {
    let mut attempt = Attempt::start(context, "stopped")?;
    let until = attempt.wait_for(OFF)?;
    let trial = attempt.trial()?;
    ensure!(trial["strategy"] == "numa_balancing", "the trial is {trial}");
    let others = trial["others"].as_array().map_or(0, Vec::len);
    ensure!(others + 1 == UNITS.len(), "not one trial for all: {trial}");
    attempt.wait_for(FOUND)?;
    attempt.trial()?;
    attempt.wait_for(OFF)?;
    context.note(&format!(
        "off {:.0} s after the start of the daemon, as one change for {} workloads, then on and off in blocks",
        until.as_secs_f64(),
        others + 1
    ));
    let ended = attempt.daemon.stop()?;
    ensure!(ended.success(), "after SIGTERM it ended with {ended}");
    ensure!(setting()? == FOUND, "after SIGTERM {SETTING} is {}", setting()?);
    Ok(())
}

/// kill -9 while it is off; `restore` gives the value back, and finds nothing to do the next time.
fn killed(context: &Context) -> Result<(), Failure> {
    let mut attempt = Attempt::start(context, "killed")?;
    attempt.wait_for(OFF)?;
    let directory = attempt.directory.clone();
    attempt.daemon.kill()?;
    let left = setting()?;
    let undone = restore(&directory)?;
    ensure!(left == OFF, "{SETTING} was {left} when the daemon was killed");
    ensure!(undone == UNITS.len(), "{undone} actions were undone");
    ensure!(setting()? == FOUND, "after restore {SETTING} is {}", setting()?);
    ensure!(
        restore(&directory)? == 0,
        "restore found something the second time"
    );
    context.note("killed while it was off: restore put it back");
    Ok(())
}

fn restore(directory: &Path) -> Result<usize, Failure> {
    let told = json(&ask(directory, &["restore", "--json"])?)?;
    let count = |key: &str| told[key].as_array().map_or(0, Vec::len);
    ensure!(count("failed") == 0, "restore: {told}");
    Ok(count("undone"))
}

/// A person writes another value while it is off: the trial ends, and the value stays.
fn person(context: &Context) -> Result<(), Failure> {
    let mut attempt = Attempt::start(context, "person")?;
    attempt.wait_for(OFF)?;
    write(SETTING, THEIRS)?;
    let begin = Instant::now();
    let outcome = loop {
        let status = json(&ask(&attempt.directory, &["status", "--json"])?)?;
        ensure!(setting()? == THEIRS, "what the person set became {}", setting()?);
        if let Some(last) = status["outcomes"].as_array().and_then(|all| all.last()) {
            break last.clone();
        }
        ensure!(
            begin.elapsed() < attempt.patience,
            "the trial goes on; the log:\n{}",
            attempt.daemon.log()
        );
        std::thread::sleep(TICK);
    };
    ensure!(outcome["verdict"] == "aborted", "the trial ended with {outcome}");
    let ended = attempt.daemon.stop()?;
    ensure!(ended.success(), "after SIGTERM it ended with {ended}");
    ensure!(setting()? == THEIRS, "in the end {SETTING} is {}", setting()?);
    context.note(&format!("a person's {THEIRS} stays: {}", outcome["reason"]));
    write(SETTING, FOUND)
}

/// Three ends of such a trial.
pub(super) fn tried_and_put_back(context: &Context) -> Result<(), Failure> {
    ensure!(
        setting()? == FOUND,
        "this kernel has {SETTING} = {}: the shape must not set it",
        setting()?
    );
    let mut running: Vec<(Group, Program)> = Vec::new();
    for (unit, node) in UNITS.iter().zip(context.expected.nodes.keys()) {
        let group = Group::make(unit)?;
        let program = latency_on(context, *node, SIZE)?;
        group.enter(program.pid())?;
        running.push((group, program));
    }
    let outcome = stopped(context)
        .and_then(|()| killed(context))
        .and_then(|()| person(context));
    // Groups go after their programs.
    for (group, program) in running {
        drop(program);
        drop(group);
    }
    outcome
}
