//! System calls by kind, through the kernel's tracepoints: about one per request in servers that send and
//! receive. Works where tracefs is mounted; homeostat mounts nothing itself.

use super::common::{not_mine, refused, usable};
use super::tasks::{Counted, Limits, TaskCounters, threads};
use super::{Meter, MeterKind};
use crate::Root;
use homeostat_model::{MeterCandidate, MeterClass, MeterId, Nanoseconds, Workload};
use homeostat_platform::PlatformError;

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
pub(super) struct Tracepoints(());

impl Tracepoints {
    pub(super) fn new() -> Self {
        Self(())
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
                match number(root, event) {
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
        let number = number(root, event).map_err(|why| PlatformError::Unsupported {
            what: format!("meter {id}"),
            why,
        })?;
        let counters = TaskCounters::open(root, workload, vec![Counted::Tracepoint(number)], LIMITS)?;
        Ok(Box::new(TracepointMeter(counters)))
    }
}

/// The kernel's number of a system call tracepoint.
fn number(root: &Root, event: &str) -> Result<u64, String> {
    if !root.is_live() {
        return Err("this is a captured tree, not the running machine".to_owned());
    }
    let mut why =
        "tracefs is not mounted; mount it (mount -t tracefs tracefs /sys/kernel/tracing)".to_owned();
    for directory in DIRECTORIES {
        if !root.path(&format!("{directory}/events")).exists() {
            continue;
        }
        match std::fs::read_to_string(root.path(&format!("{directory}/events/syscalls/{event}/id"))) {
            Ok(text) => {
                return text
                    .trim()
                    .parse()
                    .map_err(|_| format!("the number of {event} is not readable"));
            }
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
                why =
                    format!("the kernel has no tracepoint syscalls:{event}; it needs CONFIG_FTRACE_SYSCALLS");
            }
            Err(e) => why = format!("the number of {event} cannot be read: {e}; run homeostat as root"),
        }
    }
    Err(why)
}

struct TracepointMeter(TaskCounters);

impl Meter for TracepointMeter {
    fn read(&mut self, workload: &Workload) -> Result<f64, PlatformError> {
        self.0.read(workload)
    }
}
