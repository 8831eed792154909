//! Programs that start badly placed, as nobody placed them: memory on one node, threads on any.

use super::Context;
use super::groups::Group;
use super::placement::two_nodes;
use crate::instruments::{Frames, Masks, PAGE, Pages, list, masks, numa_maps_by_kind, text};
use crate::keeper::{cpu_set, program};
use crate::{Failure, ensure};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::path::Path;
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
        Self::spawn(name, arguments, Stdio::null())
    }

    /// Starts it with what it reports in a file.
    pub(super) fn start_reporting(name: &str, arguments: &[&str], report: &Path) -> Result<Self, Failure> {
        let report = File::create(report).map_err(Failure::system(format!("making {}", report.display())))?;
        Self::spawn(name, arguments, report.into())
    }

    fn spawn(name: &str, arguments: &[&str], output: Stdio) -> Result<Self, Failure> {
        Command::new(program(name)?)
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(output)
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
    let cpus = list(&context.expected.general_cpus_of(node));
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
    set_masks(program.pid(), &context.expected.general_cpus())?;
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

/// By process and address of a page: its node.
pub(super) type Nodes = BTreeMap<(i32, u64), u32>;
/// A mapping of at least so many pages is what a program works in.
const LARGE_FROM: u64 = 256;

/// Large mappings of a process that are no file's: start, pages.
fn anonymous_ranges(pid: i32) -> Result<Vec<(u64, u64)>, Failure> {
    let path = format!("/proc/{pid}/maps");
    let maps = text(&path)?;
    let mut out = Vec::new();
    for line in maps.lines() {
        let mut words = line.split_whitespace();
        let range = words.next().and_then(|r| r.split_once('-'));
        let writable = words.next().is_some_and(|p| p.starts_with("rw"));
        let inode = words.nth(2);
        let address = |t: &str| u64::from_str_radix(t, 16).ok();
        let Some((start, end)) = range.and_then(|(a, b)| Some((address(a)?, address(b)?))) else {
            return Err(Failure::Broken(format!("{path}: {line}")));
        };
        let pages = (end - start) / PAGE;
        if writable && inode == Some("0") && pages >= LARGE_FROM {
            out.push((start, pages));
        }
    }
    Ok(out)
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

    /// The node of each page of the memory in which they work, by process and address. Only mappings of a MiB and more:
    /// stacks and small buffers come and go.
    pub(super) fn nodes(&self, frames: &Frames) -> Result<Nodes, Failure> {
        let mut out = Nodes::new();
        for pid in self.pids() {
            for (start, pages) in anonymous_ranges(pid)? {
                let on = frames.of_pages(pid, start, pages)?;
                let at = (0..).map(|page| start + page * PAGE);
                out.extend(at.zip(on).filter_map(|(at, on)| Some(((pid, at), on?))));
            }
        }
        ensure!(!out.is_empty(), "latency has no memory");
        Ok(out)
    }

    /// The process numbers.
    pub(super) fn pids(&self) -> Vec<i32> {
        self.programs.iter().map(Program::pid).collect()
    }
}
