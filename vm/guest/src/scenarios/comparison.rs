//! numad and homeostat on the same machine and the same badly placed process: what each did, and what each left behind
//! when it was stopped or killed. A measurement: the notes are the result (docs/placement.md); of numad it asks only that
//! there is something to tell, of homeostat that everything is as it was found.

use super::Context;
use super::groups::Group;
use super::placement::two_nodes;
use super::programs::{Program, Size, latency_on, set_masks};
use super::trials::configuration;
use crate::daemon::{Daemon, ask, json};
use crate::instruments::{Masks, Pages, list, masks, numa_maps_by_kind, text};
use crate::keeper::program;
use crate::{Failure, ensure};
use rustix::process::{Pid, Signal, kill_process};
use std::collections::BTreeSet;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// numad looks at processes of more than 300 MB only.
const SIZE: Size = Size {
    mib: 400,
    threads: 2,
    duty: 60,
};
/// Shortest and longest wait between two looks of numad, in seconds; the default is 5:15.
const INTERVALS: &str = "5:15";
const ACT_PATIENCE: Duration = Duration::from_secs(400);
/// numad moves all memory at once; that is over by then.
const SETTLE: Duration = Duration::from_secs(10);
const TICK: Duration = Duration::from_millis(200);
const BLOCK_BEGUN: Duration = Duration::from_millis(1500);
const SCAN_SLEEP: &str = "/sys/kernel/mm/transparent_hugepage/khugepaged/scan_sleep_millisecs";
const BALANCING: &str = "/proc/sys/kernel/numa_balancing";
const PID_FILE: &str = "/var/run/numad.pid";
const LOG: &str = "/var/log/numad.log";
const LOG_LINES: usize = 12;
const UNIT: &str = "latency.service";

/// What an optimiser may change.
#[derive(Clone, Debug, PartialEq, Eq)]
struct State {
    masks: Masks,
    private: Pages,
    scan_sleep_ms: String,
    balancing: String,
}

impl State {
    fn of(pid: i32) -> Result<Self, Failure> {
        Ok(Self {
            masks: masks(pid)?,
            private: numa_maps_by_kind(pid)?.0,
            scan_sleep_ms: text(SCAN_SLEEP)?,
            balancing: text(BALANCING)?,
        })
    }

    fn told(&self) -> String {
        let cpus: BTreeSet<String> = self.masks.values().map(list).collect();
        let total: u64 = self.private.values().sum();
        let share = |pages: &u64| *pages as f64 / total.max(1) as f64 * 100.0;
        let pages = self.private.iter().filter(|(_, pages)| **pages > 0);
        let pages: Vec<String> = pages
            .map(|(node, pages)| format!("{:.1} % on node {node}", share(pages)))
            .collect();
        format!(
            "threads on CPUs {}, memory {}, khugepaged scan_sleep_millisecs {}, numa_balancing {}",
            cpus.into_iter().collect::<Vec<_>>().join(" or "),
            pages.join(" and "),
            self.scan_sleep_ms,
            self.balancing
        )
    }
}

/// A process with its memory on the last node and threads that were on the others, and may run anywhere; in a unit of its
/// own.
fn badly_placed(context: &Context) -> Result<(Program, Group), Failure> {
    let (_, away) = two_nodes(context)?;
    let group = Group::make(UNIT)?;
    let program = latency_on(context, away, SIZE)?;
    group.enter(program.pid())?;
    let all = context.expected.cpus();
    // As a scheduler that knows nothing of the memory might have it.
    let others: BTreeSet<u32> = all.difference(&context.expected.cpus_of(away)).copied().collect();
    set_masks(program.pid(), &others)?;
    std::thread::sleep(Duration::from_secs(1));
    set_masks(program.pid(), &all)?;
    Ok((program, group))
}

/// numad as it is shipped; it goes to the background by itself.
fn start_numad() -> Result<Pid, Failure> {
    for directory in ["/var/run", "/var/log"] {
        std::fs::create_dir_all(directory).map_err(Failure::system(format!("making {directory}")))?;
    }
    let _ = std::fs::remove_file(PID_FILE);
    let output = Command::new(program("numad")?)
        .args(["-i", INTERVALS, "-l", "6"])
        .stdin(Stdio::null())
        .output()
        .map_err(Failure::system("starting numad"))?;
    ensure!(
        output.status.success(),
        "numad: {} {}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    let begin = Instant::now();
    loop {
        if let Ok(pid) = text(PID_FILE) {
            if let Some(pid) = pid.parse().ok().and_then(Pid::from_raw) {
                return Ok(pid);
            }
        }
        ensure!(begin.elapsed() < ACT_PATIENCE, "numad writes no {PID_FILE}");
        std::thread::sleep(TICK);
    }
}

/// Waits until the process is no longer as it was found, and a little longer; how long it took.
fn wait_for_change(pid: i32, found: &State) -> Result<Option<Duration>, Failure> {
    let begin = Instant::now();
    // The state of the kernel's own workers changes when an optimiser starts, before it has done anything to the process.
    let same = |now: &State| now.masks == found.masks && now.private == found.private;
    while same(&State::of(pid)?) {
        if begin.elapsed() >= ACT_PATIENCE {
            return Ok(None);
        }
        std::thread::sleep(TICK);
    }
    let acted = begin.elapsed();
    std::thread::sleep(SETTLE);
    Ok(Some(acted))
}

/// What numad did to a badly placed process, and what was left when it was stopped, and when it was killed.
pub(super) fn numad(context: &Context) -> Result<(), Failure> {
    for (how, signal) in [("SIGTERM", Signal::TERM), ("kill -9", Signal::KILL)] {
        let (program, _group) = badly_placed(context)?;
        let found = State::of(program.pid())?;
        context.note(&format!("{how}: found: {}", found.told()));
        let daemon = start_numad()?;
        let acted = wait_for_change(program.pid(), &found)?;
        let on = State::of(program.pid())?;
        let acted = acted.map_or("did nothing".to_owned(), |a| {
            format!("acted after {:.0} s", a.as_secs_f64())
        });
        context.note(&format!("{how}: numad {acted}: {}", on.told()));
        kill_process(daemon, signal).map_err(Failure::call("ending numad"))?;
        let begin = Instant::now();
        while std::path::Path::new(&format!("/proc/{}", daemon.as_raw_nonzero())).exists() {
            ensure!(begin.elapsed() < ACT_PATIENCE, "numad does not end after {how}");
            std::thread::sleep(TICK);
        }
        std::thread::sleep(Duration::from_secs(2));
        let left = State::of(program.pid())?;
        context.note(&format!("{how}: numad gone: {}", left.told()));
        let log = text(LOG).unwrap_or_default();
        let lines: Vec<&str> = log.lines().collect();
        for line in &lines[lines.len().saturating_sub(LOG_LINES)..] {
            context.note(&format!("numad.log: {line}"));
        }
    }
    Ok(())
}

/// The same process under homeostat's daemon with the settings of the scenario `daemon-trials`: placed in a trial, and put
/// back.
pub(super) fn homeostat(context: &Context) -> Result<(), Failure> {
    let configuration = configuration(UNIT);
    for how in ["SIGTERM", "kill -9"] {
        let (program, _group) = badly_placed(context)?;
        let found = State::of(program.pid())?;
        context.note(&format!("{how}: found: {}", found.told()));
        let directory = context
            .directory
            .join(if how == "SIGTERM" { "stopped" } else { "killed" });
        let mut daemon = Daemon::start(&directory, &configuration)?;
        let took = daemon.wait_until("it places the threads", ACT_PATIENCE, |_| {
            // A trial makes the change once before its first block, for a moment; a block with it lasts for seconds.
            if masks(program.pid())? == found.masks {
                return Ok(false);
            }
            std::thread::sleep(BLOCK_BEGUN);
            Ok(masks(program.pid())? != found.masks)
        })?;
        let on = State::of(program.pid())?;
        context.note(&format!(
            "{how}: homeostat acted after {:.0} s: {}",
            took.as_secs_f64(),
            on.told()
        ));
        if how == "SIGTERM" {
            let ended = daemon.stop()?;
            ensure!(ended.success(), "after SIGTERM it ended with {ended}");
        } else {
            daemon.kill()?;
            let left = State::of(program.pid())?;
            context.note(&format!("{how}: homeostat gone: {}", left.told()));
            json(&ask(&directory, &["restore", "--json"])?)?;
        }
        let left = State::of(program.pid())?;
        let after = if how == "SIGTERM" {
            "homeostat gone"
        } else {
            "after homeostat restore (the next start does the same)"
        };
        context.note(&format!("{how}: {after}: {}", left.told()));
        ensure!(
            left.masks == found.masks && left.balancing == found.balancing,
            "{how}: left {left:?}, found {found:?}"
        );
    }
    Ok(())
}
