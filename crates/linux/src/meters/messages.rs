//! Messages that a program sends and receives through sockets of any kind, also Unix sockets, whose bytes nobody counts: about one of
//! either for each request in servers. Counted where the kernel hands them over, by tracepoints of its sockets (Linux 6.3).
//!
//! Not by tracepoints of system calls: while one of those is counted for anybody, every call of every program on the machine takes
//! the way of calls that are traced (docs/meters.md has what that costs). These are passed by messages only, and whoever is not
//! counted finds out at once.
//!
//! Where tracefs is not mounted the numbers are read from one that is mounted at no place ([`trace_events`]).

use super::common::{not_mine, refused, usable};
use super::tasks::{Counted, Limits, TaskCounters, threads};
use super::{Meter, MeterKind, trace_events};
use crate::Root;
use homeostat_model::{MeterCandidate, MeterClass, MeterId, Nanoseconds, Workload};
use homeostat_platform::PlatformError;
use std::collections::BTreeMap;
use std::ffi::CStr;
use std::fs::File;
use std::io::{self, Read};

/// A server that makes a thread or a process for each connection has hundreds. Each has a descriptor here.
const LIMITS: Limits = Limits {
    counters: 256,
    attach: 16,
};
/// Cost of one count: 185 ± 21 ns (two standard errors) of CPU time in `examples/message_cost.rs`; no less than its upper end.
const COST: Nanoseconds = Nanoseconds(210);
const DIRECTORIES: [&str; 2] = ["/sys/kernel/tracing", "/sys/kernel/debug/tracing"];

/// One of the two.
struct Direction {
    id: &'static str,
    /// Tracepoint, of the kernel's group `sock`.
    event: &'static str,
    /// What is a message: something was handed over (the tracepoint also tells of calls that failed, as of a socket that has nothing
    /// to read) and taken, not only looked at (`MSG_PEEK`, 2).
    filter: &'static CStr,
}

const DIRECTIONS: [Direction; 2] = [
    Direction {
        id: "messages.sent",
        event: "sock_send_length",
        filter: c"ret > 0",
    },
    Direction {
        id: "messages.received",
        event: "sock_recv_length",
        filter: c"ret > 0 && !(flags & 2)",
    },
];

/// The kind.
#[derive(Default)]
pub(super) struct Messages {
    /// Numbers of tracepoints that are known; they stay as long as the kernel runs.
    known: BTreeMap<&'static str, u64>,
}

impl Messages {
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

impl MeterKind for Messages {
    fn find(&mut self, root: &Root, workload: &Workload) -> Vec<MeterCandidate> {
        let many = threads(root, workload, LIMITS.counters) > LIMITS.counters;
        DIRECTIONS
            .iter()
            .map(|&Direction { id, event, .. }| {
                let unit = "message";
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
        let direction = DIRECTIONS
            .iter()
            .find(|d| d.id == id.as_str())
            .ok_or_else(|| not_mine(id))?;
        let number = self
            .number(root, direction.event)
            .map_err(|why| PlatformError::Unsupported {
                what: format!("meter {id}"),
                why,
            })?;
        let event = Counted::Tracepoint {
            number,
            filter: direction.filter,
        };
        let counters = TaskCounters::open(root, workload, vec![event], LIMITS)?;
        Ok(Box::new(MessageMeter(counters)))
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

/// The kernel's number of a tracepoint of sockets.
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
    format!("events/sock/{event}/id")
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
                format!("the kernel has no tracepoint sock:{event}; it needs Linux 6.3 or later")
            }
            Self::Unreadable => format!("the number of {event} is not readable"),
            Self::Refused(e) => format!("the number of {event} cannot be read: {e}; run homeostat as root"),
            Self::NoList(e) => format!(
                "tracefs is not mounted, and cannot be looked at otherwise ({e}); mount it (mount -t tracefs tracefs /sys/kernel/tracing)"
            ),
        }
    }
}

struct MessageMeter(TaskCounters);

impl Meter for MessageMeter {
    fn read(&mut self, workload: &Workload) -> Result<f64, PlatformError> {
        self.0.read(workload)
    }
}
