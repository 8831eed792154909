//! The scenarios, one file per subject, and how they are run: each in a process of its own with a limit of time, so that
//! one that hangs or dies does not take the others with it.
//!
//! Reported on standard output, which is the second serial port: `@begin NAME`, `@note NAME TEXT`, `@pass NAME SECONDS`,
//! `@fail NAME SENTENCE`, `@log NAME LINE` for all that a failed scenario said, and `@done passed=N failed=M`.

mod badly_placed;
mod balancing;
mod comparison;
mod daemons;
mod demo;
mod effectors;
mod file_cache;
mod generations;
mod groups;
mod hotplug;
mod large_pages;
mod locality;
mod machine;
mod people;
mod placement;
mod placement_tests;
mod programs;
mod root_reader;
mod set_aside;
mod settings;
mod trials;

use crate::driver::private_directory;
use crate::expected::Expected;
use crate::instruments::text;
use crate::keeper::program;
use crate::{Failure, ensure};
use rustix::process::{Pid, Signal, kill_process_group};
use std::fs::File;
use std::io::{self, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// What a scenario gets.
#[derive(Debug)]
pub struct Context {
    /// The machine as it was built.
    pub expected: Expected,
    /// A directory of its own, empty.
    pub directory: PathBuf,
}

impl Context {
    /// A number for the report.
    pub fn note(&self, text: &str) {
        println!("{NOTE}{text}");
    }
}

type Scenario = fn(&Context) -> Result<(), Failure>;

/// Every scenario by name. `vm/vm-test` says which shape runs which.
const ALL: &[(&str, Scenario)] = &[
    ("topology", machine::topology),
    ("sensing", machine::sensing),
    ("large-pages-come-and-go", large_pages::come_and_go),
    (
        "large-pages-killed-at-every-step",
        large_pages::killed_at_every_step,
    ),
    ("threads-come-and-go", placement::threads_come_and_go),
    ("threads-share-a-cache", placement::threads_share_a_cache),
    (
        "threads-killed-at-every-step",
        placement::threads_killed_at_every_step,
    ),
    ("pages-come-and-go", placement::pages_come_and_go),
    (
        "pages-to-a-node-without-cpus",
        placement::pages_to_a_node_without_cpus,
    ),
    (
        "pages-killed-at-every-step",
        placement::pages_killed_at_every_step,
    ),
    (
        "pages-keep-to-their-budget",
        placement::pages_keep_to_their_budget,
    ),
    ("threads-bound-before", people::bound_before),
    ("threads-bound-after", people::bound_after),
    ("memory-bound-before", people::memory_bound_before),
    ("cpus-leave", hotplug::cpus_leave),
    ("memory-leaves", hotplug::memory_leaves),
    (
        "cpus-leave-while-pages-move",
        hotplug::cpus_leave_while_pages_move,
    ),
    ("locality-agrees", locality::agrees_with_the_kernel),
    ("badly-placed", badly_placed::placed_by_the_strategies),
    ("numad", comparison::numad),
    ("homeostat-beside-numad", comparison::homeostat),
    (
        "settings-killed-at-every-step",
        effectors::settings_killed_at_every_step,
    ),
    (
        "reader-limited-killed-at-every-step",
        effectors::reader_limited_killed_at_every_step,
    ),
    ("prefetch-declined", effectors::prefetch_declined),
    ("control-groups", groups::recognised_and_left_alone),
    ("daemon-lives-and-dies", daemons::lives_and_dies),
    ("demo", demo::ends_with_a_true_account),
    ("setting-by-a-person", settings::made_by_a_person),
    ("daemon-trials", trials::end_with_everything_as_found),
    ("placement-tests", placement_tests::pass_here),
    ("cpus-set-aside", set_aside::are_no_room),
    ("balancing-is-tried", balancing::tried_and_put_back),
    ("reader-is-contained", file_cache::reader_is_contained),
    (
        "reader-is-contained-with-multi-gen-lru",
        generations::reader_is_contained,
    ),
    (
        "reader-of-the-root-group-is-contained",
        root_reader::reader_of_the_root_group_is_contained,
    ),
    (
        "reader-is-contained-while-swap-is-full",
        root_reader::reader_is_contained_while_swap_is_full,
    ),
];

/// Part of the machine's time that one scenario may take, so that one that hangs leaves some to the others.
const ONE_PART: u32 = 2;
const TICK: Duration = Duration::from_millis(20);
/// Lines of a failed scenario that are sent out: the last ones.
const LINES_MAX: usize = 200;
const DIRECTORY: &str = "/run/scenarios";
const NOTE: &str = "note: ";

/// Runs what the command line of the kernel names, and reports.
///
/// # Errors
/// It is not known what to run, or nobody takes the report.
pub fn run_all() -> Result<(), Failure> {
    let expected = Expected::parse(&text("/proc/cmdline")?)?;
    let begin = Instant::now();
    let (mut passed, mut failed) = (0, 0);
    for name in &expected.scenarios {
        say(&format!("@begin {name}"))?;
        let at = Instant::now();
        let left = expected.limit.saturating_sub(begin.elapsed());
        let log = Path::new(DIRECTORY).join(format!("{name}.log"));
        let ended = supervise(name, &log, left.min(expected.limit / ONE_PART));
        let lines = std::fs::read(&log).unwrap_or_default();
        let lines = String::from_utf8_lossy(&lines);
        for note in lines.lines().filter_map(|l| l.strip_prefix(NOTE)) {
            say(&format!("@note {name} {note}"))?;
        }
        match ended {
            Ok(()) => {
                passed += 1;
                say(&format!("@pass {name} {:.1}", at.elapsed().as_secs_f64()))?;
            }
            Err(failure) => {
                failed += 1;
                let sentence = failure.to_string();
                say(&format!(
                    "@fail {name} {}",
                    sentence.lines().next().unwrap_or_default()
                ))?;
                let lines: Vec<&str> = lines.lines().chain(sentence.lines().skip(1)).collect();
                for line in lines.iter().skip(lines.len().saturating_sub(LINES_MAX)) {
                    say(&format!("@log {name} {line}"))?;
                }
            }
        }
    }
    say(&format!("@done passed={passed} failed={failed}"))
}

/// Runs one scenario here and now.
///
/// # Errors
/// It fails, or there is none of that name.
pub fn run_one(name: &str) -> Result<(), Failure> {
    let Some((_, scenario)) = ALL.iter().find(|(n, _)| *n == name) else {
        return Err(Failure::Broken(format!("there is no scenario {name}")));
    };
    let directory = Path::new(DIRECTORY).join(name);
    private_directory(&directory)?;
    scenario(&Context {
        // Where the machine was not built for it, as around a container, its shape is given.
        expected: Expected::parse(&match std::env::var("VM_COMMAND_LINE") {
            Ok(words) => words,
            Err(_) => text("/proc/cmdline")?,
        })?,
        directory,
    })
}

fn say(line: &str) -> Result<(), Failure> {
    let mut out = io::stdout().lock();
    writeln!(out, "{line}")
        .and_then(|()| out.flush())
        .map_err(Failure::system("reporting"))
}

/// Runs a scenario in a process group of its own, which ends with it, and says why it did not pass.
fn supervise(name: &str, log: &Path, limit: Duration) -> Result<(), Failure> {
    private_directory(Path::new(DIRECTORY))?;
    let file = File::create(log).map_err(Failure::system(format!("making {}", log.display())))?;
    let errors = file.try_clone().map_err(Failure::system("sharing the log"))?;
    let mut child = Command::new(program("scenarios")?)
        .args(["run", name])
        .stdin(Stdio::null())
        .stdout(file)
        .stderr(errors)
        .process_group(0)
        .spawn()
        .map_err(Failure::system("starting the scenario"))?;
    let group = Pid::from_child(&child);
    let begin = Instant::now();
    let ended = loop {
        match child
            .try_wait()
            .map_err(Failure::system("waiting for the scenario"))?
        {
            Some(status) => break Some(status),
            None if begin.elapsed() >= limit => break None,
            None => std::thread::sleep(TICK),
        }
    };
    // What it started and did not end; none of it may disturb the next one.
    let _ = kill_process_group(group, Signal::KILL);
    let _ = child.wait();
    let Some(status) = ended else {
        return Err(Failure::Broken(format!(
            "it did not end within {} s",
            limit.as_secs()
        )));
    };
    ensure!(status.success(), "{}", last_words(status, log));
    Ok(())
}

/// The last sentence that a failed scenario said begins at the last line that does not look like a continuation.
fn last_words(status: ExitStatus, log: &Path) -> String {
    let text = std::fs::read(log).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let last = text
        .lines()
        .rfind(|l| !l.is_empty() && !l.starts_with(char::is_whitespace));
    match (status.code(), last) {
        (Some(1), Some(line)) => line.to_owned(),
        (_, Some(line)) => format!("{status}: {line}"),
        (_, None) => format!("{status}, without a word"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    /// The host's part names scenarios by text; one that does not exist would only fail inside the machine.
    #[test]
    fn every_scenario_is_run_by_a_shape_and_every_shape_runs_scenarios_that_exist() {
        let script = include_str!("../../../vm-test");
        let lists = ["COMMON = (", "scenarios=("]
            .iter()
            .flat_map(|head| script.split(head).skip(1));
        let named: BTreeSet<&str> = lists
            .flat_map(|rest| {
                rest.split(')')
                    .next()
                    .unwrap_or_default()
                    .split('"')
                    .skip(1)
                    .step_by(2)
            })
            .collect();
        let names: BTreeSet<&str> = ALL.iter().map(|(name, _)| *name).collect();
        assert_eq!(names.len(), ALL.len(), "each name is given once");
        assert_eq!(named, names);
    }

    #[test]
    fn an_unknown_scenario_is_refused() {
        let said = run_one("no-such-scenario").unwrap_err().to_string();
        assert!(said.contains("no-such-scenario"), "{said}");
    }
}
