//! A change of the machine and the record that reverts it.
//!
//! Data only, and generic on purpose: a new strategy with a new effector adds one file to `strategies/`, one to
//! `effectors/src/` and nothing here.

use crate::setting::is_one_setting;
use crate::text_id;
use crate::units::{Bytes, CpuId, Nanoseconds, NodeId};
use crate::workload::{ProcessId, WorkloadId};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

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
        self.0.fmt(f)
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
    /// after them; what lies where the later change would bring it stays, so that two moves to the same nodes, as the parts of a
    /// rollout are, have nothing to do with each other. It is never converted twice. A setting that has two names is one thing. Of one workload only: what
    /// is one for all, a setting of the host or the prefetcher of a CPU, is never held by two at different values, since its effector
    /// refuses the second one.
    pub fn lies_over(&self, earlier: &Self) -> bool {
        self.id > earlier.id
            && self.workload == earlier.workload
            && match (&self.target, &earlier.target) {
                (Target::Cpus(_), Target::Cpus(_)) => self.effector == earlier.effector,
                (Target::Cpus(_), Target::Pages(_)) => self.takes_memory_along(),
                (Target::Pages(_), Target::Pages(_)) => {
                    self.effector == earlier.effector && !self.moves_to_any_of(earlier.homes().as_ref())
                }
                (Target::Files(own), Target::Files(others)) => {
                    let is_shared = |path: &String| others.iter().any(|other| is_one_setting(path, other));
                    self.effector == earlier.effector && own.iter().any(is_shared)
                }
                _ => false,
            }
    }

    /// The nodes to which it moves pages, one or those of `spread_over`; what lies on any of them stays. `None`: it moves
    /// none, or does not say where to in a way that is known here.
    pub fn homes(&self) -> Option<BTreeSet<NodeId>> {
        let Target::Pages(to) = &self.target else {
            return None;
        };
        let further = self.arguments.get("spread_over").into_iter();
        let further = further.flat_map(|list| list.split(','));
        std::iter::once(Some(to.node))
            .chain(further.map(|node| node.trim().parse().ok().map(NodeId)))
            .collect()
    }

    /// Whether it is a move of pages that stay where they are if they lie on one of these nodes.
    pub fn moves_to_any_of(&self, nodes: Option<&BTreeSet<NodeId>>) -> bool {
        match (self.homes(), nodes) {
            (Some(own), Some(nodes)) => nodes.is_subset(&own),
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

    #[test]
    fn pages_are_moved_on_by_a_later_move_to_other_nodes_only() {
        let action = |id: u64, node: u32, spread: Option<&str>| Action {
            id: ActionId(id),
            effector: "page_placement".into(),
            workload: "w".into(),
            target: Target::Pages(PageMove {
                node: NodeId(node),
                bytes: Bytes::from_mib(1),
                shared: false,
            }),
            arguments: spread
                .map(|list| ("spread_over".to_owned(), list.to_owned()))
                .into_iter()
                .collect(),
            why: "test".into(),
        };
        let over = |later: (u32, Option<&str>), earlier: (u32, Option<&str>)| {
            action(2, later.0, later.1).lies_over(&action(1, earlier.0, earlier.1))
        };
        assert!(!over((0, None), (0, None)) && over((1, None), (0, None)));
        assert!(!over((0, Some("0,2")), (0, Some("2,0"))));
        // What lies on one of two nodes stays there; of two, what lies on the other goes to the one.
        assert!(!over((0, Some("0,2")), (2, None)) && over((0, None), (0, Some("0,2"))));
        // Who does not say it in a way that is understood may have moved anything.
        assert!(over((0, Some("all")), (0, None)) && over((0, None), (0, Some("0-2"))));
    }
}
