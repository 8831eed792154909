//! System calls by kind, through the kernel's tracepoints: about one per request in servers that send and
//! receive. Where tracefs is not mounted their numbers are read from one that is mounted at no place ([`trace_events`]).

use super::common::{not_mine, refused, usable};
use super::tasks::{Counted, Limits, TaskCounters, threads};
use super::{Meter, MeterKind, trace_events};
use crate::Root;
use homeostat_model::{MeterCandidate, MeterClass, MeterId, Nanoseconds, Workload};
use homeostat_platform::PlatformError;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read};

/// Each counter costs tens of milliseconds to close.
const LIMITS: Limits = Limits {
    counters: 64,
    attach: 4,
};
/// Cost of one count: not resolved in the measurement (at most 2 % at 88,000 a second, so at most 230 ns).
const COST: Nanoseconds = Nanoseconds(230);
const DIRECTORIES: [&str; 2] = ["/sys/kernel/tracing", "/sys/kernel/debug/tracing"];
const CALLS: [(&str, &str); 5] = [
    ("syscalls.sendto", "sys_enter_sendto"),
    ("syscalls.sendmsg", "sys_enter_sendmsg"),
    ("syscalls.writev", "sys_enter_writev"),
    ("syscalls.recvfrom", "sys_enter_recvfrom"),
    ("syscalls.epoll_wait", "sys_enter_epoll_wait"),
];

/// The kind.
#[derive(Default)]
pub(super) struct Tracepoints {
    /// Numbers that are known; they stay as long as the kernel runs.
    known: BTreeMap<&'static str, u64>,
}

impl Tracepoints {
    pub(super) fn new() -> Self {
        Self::default()
    }

    fn number(&mut self, root: &Root, event: &'static str) -> Result<u64, String> {
        if !root.is_live() {
            return Err("this is a captured tree, not the running machine".to_owned());
        }
        if let Some(number) = self.known.get(event) {
            return Ok(*number);
        }
        let number = number(root, event).map_err(|why| why.words(event))?;
        self.known.insert(event, number);
        Ok(number)
    }
}

impl MeterKind for Tracepoints {
    fn find(&mut self, root: &Root, workload: &Workload) -> Vec<MeterCandidate> {
        let many = threads(root, workload, LIMITS.counters) > LIMITS.counters;
        CALLS
            .iter()
            .map(|&(id, event)| {
                let unit = "system call";
                if many {
                    let why = format!(
                        "the workload has more than {} threads, and each needs a counter; use a counter of its own",
                        LIMITS.counters
                    );
                    return refused(id, MeterClass::Kernel, unit, why);
                }
                if workload.processes.first().is_none_or(|p| super::common::open_process(root, *p).is_err()) {
                    return refused(id, MeterClass::Kernel, unit, "its main process is gone; wait for a scan");
                }
                match self.number(root, event) {
                    Ok(_) => MeterCandidate { cost_per_count: COST, ..usable(id, MeterClass::Kernel, unit) },
                    Err(why) => refused(id, MeterClass::Kernel, unit, why),
                }
            })
            .collect()
    }

    fn open(
        &mut self,
        root: &Root,
        workload: &Workload,
        id: &MeterId,
    ) -> Result<Box<dyn Meter>, PlatformError> {
        let (_, event) = CALLS
            .iter()
            .find(|(name, _)| *name == id.as_str())
            .ok_or_else(|| not_mine(id))?;
        let number = self
            .number(root, event)
            .map_err(|why| PlatformError::Unsupported {
                what: format!("meter {id}"),
                why,
            })?;
        let counters = TaskCounters::open(root, workload, vec![Counted::Tracepoint(number)], LIMITS)?;
        Ok(Box::new(TracepointMeter(counters)))
    }
}

/// Why a tracepoint has no number.
#[derive(Debug)]
enum Unnumbered {
    Missing,
    Unreadable,
    Refused(String),
    /// There is no tracefs.
    NoList(String),
}

/// The kernel's number of a system call tracepoint.
fn number(root: &Root, event: &str) -> Result<u64, Unnumbered> {
    let mut why = None;
    for directory in DIRECTORIES {
        if !root.path(&format!("{directory}/events")).exists() {
            continue;
        }
        match read_number(File::open(root.path(&format!("{directory}/{}", path_of(event))))) {
            Ok(number) => return Ok(number),
            Err(e) => why = Some(e),
        }
    }
    if let Some(why) = why {
        return Err(why);
    }
    let list = trace_events::nowhere(root).map_err(|e| Unnumbered::NoList(e.to_string()))?;
    read_number(trace_events::open_below(&list, &path_of(event)))
}

fn path_of(event: &str) -> String {
    format!("events/syscalls/{event}/id")
}

fn read_number(file: io::Result<File>) -> Result<u64, Unnumbered> {
    let mut text = String::new();
    match file.and_then(|mut file| file.read_to_string(&mut text)) {
        Ok(_) => text.trim().parse().map_err(|_| Unnumbered::Unreadable),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Err(Unnumbered::Missing),
        Err(e) => Err(Unnumbered::Refused(e.to_string())),
    }
}

impl Unnumbered {
    fn words(&self, event: &str) -> String {
        match self {
            Self::Missing => {
                format!("the kernel has no tracepoint syscalls:{event}; it needs CONFIG_FTRACE_SYSCALLS")
            }
            Self::Unreadable => format!("the number of {event} is not readable"),
            Self::Refused(e) => format!("the number of {event} cannot be read: {e}; run homeostat as root"),
            Self::NoList(e) => format!(
                "tracefs is not mounted, and cannot be looked at otherwise ({e}); mount it (mount -t tracefs tracefs /sys/kernel/tracing)"
            ),
        }
    }
}

struct TracepointMeter(TaskCounters);

impl Meter for TracepointMeter {
    fn read(&mut self, workload: &Workload) -> Result<f64, PlatformError> {
        self.0.read(workload)
    }
}
