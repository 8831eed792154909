//! Programs that start badly placed, as nobody placed them: memory on one node, threads on any.

use super::Context;
use super::groups::Group;
use super::placement::two_nodes;
use crate::instruments::{Masks, Pages, list, masks, numa_maps_by_kind};
use crate::keeper::{cpu_set, program};
use crate::{Failure, ensure};
use std::collections::{BTreeMap, BTreeSet};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Time for `latency` to lay out its memory, on an emulated CPU.
const LAY_PATIENCE: Duration = Duration::from_secs(120);
const TICK: Duration = Duration::from_millis(50);
/// Longer than any scenario: whoever starts a program ends it.
const SECONDS: &str = "86400";

/// A program that lies beside this one, ended when dropped.
#[derive(Debug)]
pub(super) struct Program(Child);

impl Program {
    /// Starts it without input and output.
    pub(super) fn start(name: &str, arguments: &[&str]) -> Result<Self, Failure> {
        Command::new(program(name)?)
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .map(Self)
            .map_err(Failure::system(format!("starting {name}")))
    }

    /// Its process number.
    pub(super) fn pid(&self) -> i32 {
        i32::try_from(self.0.id()).unwrap_or(0)
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// `latency` as it is started here.
#[derive(Clone, Copy, Debug)]
pub(super) struct Size {
    /// Memory in MiB.
    pub(super) mib: u32,
    /// Threads besides the main one.
    pub(super) threads: usize,
    /// How much of a CPU each thread uses, in percent.
    pub(super) duty: u32,
}

/// Starts `latency` so that its memory lies on a node: there it is first touched. Its threads are let go to everywhere
/// afterwards, as if nobody had ever bound them.
pub(super) fn latency_on(context: &Context, node: u32, size: Size) -> Result<Program, Failure> {
    let cpus = list(&context.expected.cpus_of(node));
    let (mib, threads, duty) = (
        size.mib.to_string(),
        size.threads.to_string(),
        size.duty.to_string(),
    );
    let words = ["-c", &cpus, "/bin/latency", &mib, "64", &threads, SECONDS];
    let options = ["--order", "random", "--duty", &duty];
    let program = Program::start("taskset", &[&words[..], &options[..]].concat())?;
    let begin = Instant::now();
    // The threads start when the memory has been laid out.
    while masks(program.pid())?.len() <= size.threads {
        ensure!(begin.elapsed() < LAY_PATIENCE, "latency does not begin to work");
        std::thread::sleep(TICK);
    }
    set_masks(program.pid(), &context.expected.cpus())?;
    Ok(program)
}

/// Lets all threads of a process run on these CPUs.
pub(super) fn set_masks(pid: i32, cpus: &BTreeSet<u32>) -> Result<(), Failure> {
    for tid in masks(pid)?.into_keys() {
        let tid = rustix::process::Pid::from_raw(tid);
        rustix::thread::sched_setaffinity(tid, &cpu_set(cpus))
            .map_err(Failure::call("setting where latency runs"))?;
    }
    Ok(())
}

/// Two processes of `latency` in one unit, the memory of each on another node and the threads of both anywhere.
#[derive(Debug)]
pub(super) struct Latencies {
    programs: Vec<Program>,
    // Dropped last: the group cannot be removed before its processes are gone.
    _group: Group,
}

impl Latencies {
    /// Starts them in a unit of that name.
    pub(super) fn start(context: &Context, unit: &str, size: Size) -> Result<Self, Failure> {
        let (home, away) = two_nodes(context)?;
        let group = Group::make(unit)?;
        let mut programs = Vec::new();
        for node in [home, away] {
            let program = latency_on(context, node, size)?;
            group.enter(program.pid())?;
            programs.push(program);
        }
        Ok(Self {
            programs,
            _group: group,
        })
    }

    /// The masks of all threads.
    pub(super) fn masks(&self) -> Result<Masks, Failure> {
        let mut out = BTreeMap::new();
        for pid in self.pids() {
            out.extend(masks(pid)?);
        }
        Ok(out)
    }

    /// Private memory and files of both, in pages by node. Files are mapped by other programs, too, and count twice here.
    pub(super) fn pages(&self) -> Result<(Pages, Pages), Failure> {
        let (mut private, mut files) = (Pages::new(), Pages::new());
        for pid in self.pids() {
            let found = numa_maps_by_kind(pid)?;
            for (sum, found) in [(&mut private, found.0), (&mut files, found.1)] {
                for (node, pages) in found {
                    *sum.entry(node).or_default() += pages;
                }
            }
        }
        Ok((private, files))
    }

    /// The process numbers.
    pub(super) fn pids(&self) -> Vec<i32> {
        self.programs.iter().map(Program::pid).collect()
    }
}
