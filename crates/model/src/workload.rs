//! What an operator would name: a unit, a container, a group of processes of one program.

use crate::{text_id, words};
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

words!(
    /// How the processes of a workload were found to belong together.
    WorkloadKind {
        /// A systemd unit.
        Unit = "unit",
        /// A container (a cgroup that a container runtime made).
        Container = "container",
        /// Another cgroup with processes of its own.
        Cgroup = "cgroup",
        /// Processes attached to one shared memory segment.
        SharedSegment = "shared_segment",
        /// Processes of one executable under one session or parent.
        ProcessGroup = "process_group",
    }
);

/// What the person in charge of the workload chose.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct OperatorChoice {
    /// `HOMEOSTAT=never`, or a label in the configuration: leave it alone. Holds where the choice was made.
    pub never: Option<String>,
    /// `HOMEOSTAT=always`: skip the age and size floors. Holds where the choice was made.
    pub always: Option<String>,
    /// Why nobody can tell whether `never` was said; `None` where that is known. The workload is left alone meanwhile.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unknown: Option<String>,
    /// `HOMEOSTAT_STRATEGIES=large_pages=off,…`: strategy id to on/off.
    pub strategies: BTreeMap<String, bool>,
    /// Settings that a person or another tool made on this workload and that homeostat must respect,
    /// each as a sentence (for example `MemoryTHP=disable in the unit`).
    pub tuned: Vec<String>,
}

/// Whose a workload is. Workloads of two owners are strangers to each other: neither is changed for the other's sake.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(into = "String", from = "String")]
pub enum Owner {
    /// Root's: system units, containers that root's runtimes made, accounts of services.
    #[default]
    Machine,
    /// A user's: what runs in the user's slice or sessions, or in a group that was delegated to the user.
    User(u32),
    /// Somebody who rents a part of the machine: a pod, a virtual machine, a system container. The text names it.
    Tenant(String),
}

impl Owner {
    /// Whether it is root's.
    pub fn is_machine(&self) -> bool {
        *self == Self::Machine
    }
}

impl fmt::Display for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Machine => f.write_str("machine"),
            Self::User(user) => write!(f, "user:{user}"),
            Self::Tenant(name) => f.write_str(name),
        }
    }
}

impl From<Owner> for String {
    fn from(owner: Owner) -> Self {
        owner.to_string()
    }
}

impl From<String> for Owner {
    fn from(text: String) -> Self {
        if text == "machine" {
            return Self::Machine;
        }
        match text.strip_prefix("user:").and_then(|user| user.parse().ok()) {
            Some(user) => Self::User(user),
            None => Self::Tenant(text),
        }
    }
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
    /// The fingerprint under which an earlier version knew it, where that was another one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub former: Option<Fingerprint>,
    /// Whose it is.
    #[serde(default, skip_serializing_if = "Owner::is_machine")]
    pub owner: Owner,
    /// Name of the program (`comm` of the main process).
    pub program: String,
    /// Path of the main executable; empty if unreadable.
    pub executable: String,
    /// Its processes, oldest first. The first is the main process.
    pub processes: Vec<ProcessId>,
    /// Those of its processes that belong to another user than the main process, and not to root. Their own counters are
    /// not taken for the workload's.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub others: Vec<ProcessId>,
    /// Opt-in, opt-out and settings made by people.
    pub choice: OperatorChoice,
}
