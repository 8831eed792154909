//! A change of the machine and the record that reverts it.
//!
//! Data only, and generic on purpose: a new strategy with a new effector adds one file to `strategies/`, one to
//! `linux/src/effectors/` and nothing here.

use crate::setting::is_one_setting;
use crate::text_id;
use crate::units::{Bytes, CpuId, Nanoseconds, NodeId};
use crate::workload::{ProcessId, WorkloadId};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

text_id!(
    /// Name of an effector, e.g. `large_pages`; stable forever, journals refer to it.
    EffectorId
);

/// Number of an action on this machine; never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ActionId(pub u64);
impl std::fmt::Display for ActionId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// Pieces of memory of one process, each of the large-page size.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryTarget {
    /// Whose.
    pub process: ProcessId,
    /// Start addresses, ascending, aligned to the large page size.
    pub pieces: Vec<u64>,
}

/// A move of pages of a workload to one node: private memory first, then shared, hottest first where that is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PageMove {
    /// Where to.
    pub node: NodeId,
    /// How much of what lies elsewhere, at most. Pages on large pages stay where they are.
    pub bytes: Bytes,
    /// Whether shared memory may be moved too.
    pub shared: bool,
}

/// A reader of files that is kept to a little memory, so that what it reads pushes nobody else's pages out.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileReader {
    /// Whose reading is contained. It is another workload than that for whose sake the action is taken.
    pub workload: WorkloadId,
    /// Its processes, oldest first.
    pub processes: Vec<ProcessId>,
    /// Memory left to it and to the pages that it reads, together.
    pub limit: Bytes,
}

/// What an action works on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Target {
    /// Nothing: a placebo.
    Nothing,
    /// Memory of processes.
    Memory(Vec<MemoryTarget>),
    /// CPUs: the ones on which the workload's threads are to run, or whose setting is changed.
    Cpus(Vec<CpuId>),
    /// Pages of the workload on the way to a node.
    Pages(PageMove),
    /// Another workload that reads files.
    Reader(FileReader),
    /// Host-wide or cgroup settings by absolute path below the root.
    Files(Vec<String>),
}

/// One change. Applied and undone as a whole, in slices.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Action {
    /// Number.
    pub id: ActionId,
    /// Who carries it out.
    pub effector: EffectorId,
    /// For which workload.
    pub workload: WorkloadId,
    /// On what.
    pub target: Target,
    /// Further arguments by name (for example a pacing limit), in the effector's own words.
    pub arguments: BTreeMap<String, String>,
    /// One sentence with the numbers that justify it.
    pub why: String,
}

impl Action {
    /// Whether this one may set the same thing as an earlier one, on top of it. What it found is then what the earlier one had
    /// set: it is undone before that, and made again after it. Memory that was moved may be moved on, with threads that go elsewhere or
    /// after them; it is never converted twice. A setting that has two names is one thing. Of one workload only: what
    /// is one for all, a setting of the host or the prefetcher of a CPU, is never held by two at different values, since its effector
    /// refuses the second one.
    pub fn lies_over(&self, earlier: &Self) -> bool {
        self.id > earlier.id
            && self.workload == earlier.workload
            && match (&self.target, &earlier.target) {
                (Target::Cpus(_), Target::Cpus(_)) => self.effector == earlier.effector,
                (Target::Cpus(_), Target::Pages(_)) => self.takes_memory_along(),
                (Target::Pages(_), Target::Pages(_)) => self.effector == earlier.effector,
                (Target::Files(own), Target::Files(others)) => {
                    let is_shared = |path: &String| others.iter().any(|other| is_one_setting(path, other));
                    self.effector == earlier.effector && own.iter().any(is_shared)
                }
                _ => false,
            }
    }

    /// Whether memory goes along with the threads that it places (`memory` = `all` or `private`).
    pub fn takes_memory_along(&self) -> bool {
        matches!(self.target, Target::Cpus(_)) && self.arguments.contains_key("memory")
    }
}

/// What is needed to revert an action, written to disk before the action is taken.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UndoRecord {
    /// The action, whole.
    pub action: Action,
    /// Boot in which it was taken; void in another boot.
    pub boot_id: String,
    /// The values found before, by name, in the effector's own words.
    pub found: BTreeMap<String, String>,
}

/// Which way an effector goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Direction {
    /// Make the change.
    Apply,
    /// Revert it.
    Undo,
}

/// How far one slice of an action got.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Progress {
    /// True when there is nothing left to do in this direction.
    pub done: bool,
    /// Units finished so far (for memory: pieces).
    pub finished: u64,
    /// Units in all.
    pub total: u64,
    /// Units that could not be done and are left as they were, by reason.
    pub skipped: BTreeMap<String, u64>,
    /// Time spent inside system calls that stall the workload, in this slice.
    pub stalled: Nanoseconds,
    /// Longest single call of this slice.
    pub longest_call: Nanoseconds,
    /// How long the effector asks to wait before the next slice (pacing).
    pub pause: Nanoseconds,
    /// Memory that the change added so far (holes filled).
    pub bloat: Bytes,
    /// True when the result was verified by reading it back.
    pub verified: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_a_pair_of_settings_the_later_change_lies_over_the_earlier_whichever_names_they_have() {
        let action = |id: u64, file: &str| Action {
            id: ActionId(id),
            effector: "setting".into(),
            workload: "host".into(),
            target: Target::Files(vec![file.to_owned()]),
            arguments: BTreeMap::new(),
            why: "test".into(),
        };
        let earlier = action(1, "/proc/sys/vm/dirty_background_ratio");
        let later = action(2, "/proc/sys/vm/dirty_background_bytes");
        assert!(later.lies_over(&earlier) && !earlier.lies_over(&later));
        assert!(!action(2, "/proc/sys/vm/dirty_bytes").lies_over(&earlier));
    }
}
