//! Messages that a program sends and receives through sockets of any kind, also Unix sockets, whose bytes nobody counts: about one of
//! either for each request in servers. Counted where the kernel hands them over, by tracepoints of its sockets (Linux 6.3).
//!
//! Not by tracepoints of system calls: while one of those is counted for anybody, every call of every program on the machine takes
//! the way of calls that are traced. Nor by a perf event for each thread, which the kernel loads and puts away each time that the thread
//! is given a CPU, at some 2 µs: a database that waits for each statement lost 11 % of its work by two of them. A BPF program at the
//! tracepoint costs neither, but everybody's messages pass through it. So they are counted in turns where that comes to more
//! than counting may cost, and others' messages are charged like own ones ([`turns`](super::turns)). What was measured is in docs/meters.md.

use super::common::{PROCESSES_MAX, not_mine, open_process, refused, usable};
use super::concern::Refusal;
use super::turns::{Beginning, COUNTED, Counting, Hits, Lost, Subject, Unpaid, WITNESS, Window};
use super::{Meter, MeterKind, MeterSettings};
use crate::Root;
use crate::sys::bpf::{Link, OWN, Passages, REST};
use crate::sys::perf::OpenError;
use homeostat_model::{MeterCandidate, MeterClass, MeterId, Nanoseconds, ProcessId, Workload};
use homeostat_platform::PlatformError;
use rustix::io::Errno;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::CStr;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;

/// Cost of one passage (`examples/message_cost.rs`).
const COST: Nanoseconds = Nanoseconds(130);
/// Cost in a turn (seconds of CPU time) that nobody minds: a thousandth of a CPU.
const ALLOWANCE: f64 = 0.001;
/// Number of the first namespace of processes, in which the kernel tells its programs who runs (`PROC_PID_INIT_INO`).
const FIRST_NAMESPACE: u64 = 0xEFFF_FFFC;

/// One of the two.
#[derive(Clone, Copy)]
struct Direction {
    id: &'static str,
    tracepoint: &'static CStr,
}

const DIRECTIONS: [Direction; 2] = [
    Direction {
        id: "messages.sent",
        tracepoint: c"sock_send_length",
    },
    Direction {
        id: "messages.received",
        tracepoint: c"sock_recv_length",
    },
];

/// The kind.
pub(super) struct Messages {
    /// Share of a program's CPU time that counting may cost.
    cost_max: f64,
    /// Why this machine cannot count them, or that it can; found out once.
    known: BTreeMap<&'static str, Result<(), String>>,
}

impl Messages {
    pub(super) fn new(settings: &MeterSettings) -> Self {
        Self {
            cost_max: settings.probe_cost_max,
            known: BTreeMap::new(),
        }
    }

    /// Whether it can be done here.
    fn possible(&mut self, root: &Root, direction: Direction) -> Result<(), String> {
        if !root.is_live() {
            return Err("this is a captured tree, not the running machine".to_owned());
        }
        if let Some(known) = self.known.get(direction.id) {
            return known.clone();
        }
        let tried = try_one(root, direction);
        self.known.insert(direction.id, tried.clone());
        tried
    }
}

/// Counts in both directions for a moment, nobody's messages.
///
/// # Errors
/// Why that cannot be done here, for people.
pub(crate) fn try_out(root: &Root) -> Result<(), String> {
    if !root.is_live() {
        return Err("this is a captured tree, not the running machine".to_owned());
    }
    DIRECTIONS.into_iter().try_for_each(|d| try_one(root, d))
}

fn try_one(root: &Root, direction: Direction) -> Result<(), String> {
    in_first_namespace(root)?;
    Passages::new(1)
        .and_then(|passages| passages.attach(direction.tracepoint))
        .map(drop)
        .map_err(|e| words(e, direction.tracepoint))
}

/// The kernel's programs see numbers of processes as the first namespace has them.
fn in_first_namespace(root: &Root) -> Result<(), String> {
    match std::fs::metadata(root.path("/proc/self/ns/pid")) {
        Ok(namespace) if namespace.ino() == FIRST_NAMESPACE => Ok(()),
        Ok(_) => Err(
            "homeostat runs in a PID namespace of its own, and the kernel tells only numbers of the first; run it \
             outside of the container, or in one with the host's (docker run --pid=host)"
                .to_owned(),
        ),
        Err(e) => Err(format!("/proc/self/ns/pid: {e}")),
    }
}

fn words(e: OpenError, tracepoint: &CStr) -> String {
    match e {
        OpenError::Unsupported(Errno::NOENT) => format!(
            "the kernel has no tracepoint {}; it needs Linux 6.3 or later",
            tracepoint.to_string_lossy()
        ),
        OpenError::Denied(errno) => {
            format!("run homeostat as root, or with CAP_BPF and CAP_PERFMON ({errno})")
        }
        other => format!("{other}; choose another meter"),
    }
}

fn failed(id: &str, e: OpenError, tracepoint: &CStr) -> PlatformError {
    let what = format!("meter {id}");
    match e {
        OpenError::Denied(_) => PlatformError::Denied {
            what,
            needs: words(e, tracepoint),
        },
        OpenError::Busy(errno) => PlatformError::Busy {
            what,
            why: errno.to_string(),
        },
        OpenError::Vanished | OpenError::Unsupported(_) => PlatformError::Unsupported {
            what,
            why: words(e, tracepoint),
        },
    }
}

impl MeterKind for Messages {
    fn find(&mut self, root: &Root, workload: &Workload) -> Vec<MeterCandidate> {
        DIRECTIONS
            .into_iter()
            .map(|direction| {
                let (id, unit) = (direction.id, "message");
                let refused = |why: String| refused(id, MeterClass::Kernel, unit, why);
                if workload.processes.len() > PROCESSES_MAX {
                    return refused(format!(
                        "the workload has more than {PROCESSES_MAX} processes; use a counter of its own"
                    ));
                }
                if workload
                    .processes
                    .first()
                    .is_none_or(|p| open_process(root, *p).is_err())
                {
                    return refused("its main process is gone; wait for a scan".to_owned());
                }
                match self.possible(root, direction) {
                    Ok(()) => MeterCandidate {
                        cost_per_count: COST,
                        ..usable(id, MeterClass::Kernel, unit)
                    },
                    Err(why) => refused(why),
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
            .into_iter()
            .find(|d| d.id == id.as_str())
            .ok_or_else(|| not_mine(id))?;
        let unsupported = |why| PlatformError::Unsupported {
            what: format!("meter {id}"),
            why,
        };
        self.possible(root, direction).map_err(unsupported)?;
        let main = workload.processes.first().ok_or_else(|| vanished(workload))?;
        open_process(root, *main)?;
        let passages = Arc::new(
            Passages::new(PROCESSES_MAX as u32).map_err(|e| failed(direction.id, e, direction.tracepoint))?,
        );
        let socket = Sockets {
            direction,
            passages: passages.clone(),
            included: BTreeSet::new(),
            link: None,
        };
        let how = Beginning {
            counters: passages,
            hit_cost: COST.as_secs_f64(),
            cost_max: self.cost_max,
            // What it costs shows in the first turn, which ends when that is much.
            share: 1.0,
            cpus: 0.0,
        };
        Ok(Box::new(MessageMeter {
            id: direction.id,
            counting: Counting::begin(workload, socket, how)?,
        }))
    }
}

fn vanished(workload: &Workload) -> PlatformError {
    PlatformError::Vanished {
        target: workload.id.to_string(),
    }
}

/// The meter.
struct MessageMeter {
    id: &'static str,
    counting: Counting,
}

impl Meter for MessageMeter {
    fn read(&mut self, workload: &Workload) -> Result<f64, PlatformError> {
        let busy = |why: String| PlatformError::Busy {
            what: format!("meter {}", self.id),
            why,
        };
        match self.counting.read(workload) {
            Ok(Some(work)) => Ok(work),
            Ok(None) => Err(busy("counting begins".to_owned())),
            Err(Lost::Paused(why)) => Err(busy(why)),
            Err(Lost::Vanished(e)) => Err(e),
            Err(Lost::Changed(why)) => Err(PlatformError::Unsupported {
                what: format!("meter {}", self.id),
                why,
            }),
        }
    }

    fn counted(&self) -> Option<f64> {
        self.counting.share()
    }

    fn is_over(&self) -> bool {
        self.counting.is_over()
    }
}

impl Hits for Passages {
    fn hits(&self) -> [u64; 2] {
        let mut hits = [0; 2];
        // What others pass through it costs them as much, and is charged.
        for (place, number) in [(COUNTED, OWN), (WITNESS, REST)] {
            if let Some(hit) = hits.get_mut(place as usize) {
                *hit = self.read(number).unwrap_or(0);
            }
        }
        hits
    }
}

/// What is counted: what passes through a tracepoint of sockets.
struct Sockets {
    direction: Direction,
    passages: Arc<Passages>,
    /// Processes whose messages are own ones.
    included: BTreeSet<ProcessId>,
    link: Option<Link>,
}

impl Subject for Sockets {
    fn name(&self) -> &str {
        self.direction.id
    }

    fn check(&mut self, _workload: &Workload) -> Result<(), Lost> {
        // Nothing of the program is changed, so nobody has to be asked.
        Ok(())
    }

    fn attach(&mut self, processes: &[ProcessId]) -> Result<(), PlatformError> {
        let failed = |errno: Errno| PlatformError::Busy {
            what: format!("meter {}", self.direction.id),
            why: format!("the list of processes: {errno}"),
        };
        let there: BTreeSet<ProcessId> = processes.iter().copied().take(PROCESSES_MAX).collect();
        if there.is_empty() {
            return Err(PlatformError::Vanished {
                target: "the workload".to_owned(),
            });
        }
        // Those that are gone first: one that has come may have the number of one of them.
        for gone in self.included.difference(&there) {
            match self.passages.leave_out(gone.pid) {
                Ok(()) | Err(Errno::NOENT) => {}
                Err(e) => return Err(failed(e)),
            }
        }
        for new in there.difference(&self.included) {
            self.passages.include(new.pid).map_err(failed)?;
        }
        self.included = there;
        if self.link.is_none() {
            let link = self.passages.attach(self.direction.tracepoint);
            self.link =
                Some(link.map_err(|e| self::failed(self.direction.id, e, self.direction.tracepoint))?);
        }
        Ok(())
    }

    fn off(&mut self) -> Result<(), Refusal> {
        self.link = None;
        Ok(())
    }

    fn at_liberty(&mut self) -> bool {
        true
    }

    fn judge(&mut self, _window: &Window) -> Result<(), String> {
        // Whether the program sends anything is judged from the readings.
        Ok(())
    }

    fn unpaid(&mut self, _processes: &[ProcessId]) -> Unpaid {
        // All passages are counted, whoever made them.
        Unpaid::default()
    }

    fn allowance(&self) -> f64 {
        ALLOWANCE
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusals_say_what_is_missing() {
        let of = |e| words(e, c"sock_send_length");
        let old = of(OpenError::Unsupported(Errno::NOENT));
        assert!(
            old.contains("sock_send_length") && old.contains("Linux 6.3"),
            "{old}"
        );
        assert!(of(OpenError::Denied(Errno::PERM)).contains("CAP_BPF"));
        let captured = Root::new("/nowhere");
        let mut kind = Messages::new(&MeterSettings::default());
        let why = kind.possible(&captured, DIRECTIONS[0]).unwrap_err();
        assert!(why.contains("captured"), "{why}");
        assert!(kind.known.is_empty(), "of another machine nothing is kept");
    }
}
