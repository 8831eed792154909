//! What an operator would name: a unit, a container, a group of processes of one program.

use crate::text_id;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;

text_id!(
    /// Name of a workload, unique on the machine while it runs, e.g. `redis-server.service` or `latency[4711]`.
    WorkloadId
);
text_id!(
    /// Identity of a workload that survives restarts: kind, unit or executable, and arguments that do not
    /// look like numbers of a single run. History is keyed by it.
    Fingerprint
);

/// A process that cannot be mistaken for a later one with the same number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ProcessId {
    /// Thread-group id.
    pub pid: i32,
    /// Start time in clock ticks since boot (field 22 of `/proc/PID/stat`): changes when the pid is reused.
    pub start_ticks: u64,
}
impl fmt::Display for ProcessId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.pid.fmt(f)
    }
}

/// How the processes of a workload were found to belong together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WorkloadKind {
    /// A systemd unit.
    Unit,
    /// A container (a cgroup that a container runtime made).
    Container,
    /// Another cgroup with processes of its own.
    Cgroup,
    /// Processes attached to one shared memory segment.
    SharedSegment,
    /// Processes of one executable under one session or parent.
    ProcessGroup,
}

/// What the person in charge of the workload chose.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct OperatorChoice {
    /// `HOMEOSTAT=never`, or a label in the configuration: leave it alone. Holds where the choice was made.
    pub never: Option<String>,
    /// `HOMEOSTAT=always`: skip the age and size floors. Holds where the choice was made.
    pub always: Option<String>,
    /// `HOMEOSTAT_STRATEGIES=large_pages=off,…`: strategy id to on/off.
    pub strategies: BTreeMap<String, bool>,
    /// Settings that a person or another tool made on this workload and that homeostat must respect,
    /// each as a sentence (for example `MemoryTHP=disable in the unit`).
    pub tuned: Vec<String>,
}

/// A workload as recognised by the last scan.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Workload {
    /// Name.
    pub id: WorkloadId,
    /// How it was recognised.
    pub kind: WorkloadKind,
    /// Identity across restarts.
    pub fingerprint: Fingerprint,
    /// Name of the program (`comm` of the main process).
    pub program: String,
    /// Path of the main executable; empty if unreadable.
    pub executable: String,
    /// Its processes, oldest first. The first is the main process.
    pub processes: Vec<ProcessId>,
    /// Opt-in, opt-out and settings made by people.
    pub choice: OperatorChoice,
}
