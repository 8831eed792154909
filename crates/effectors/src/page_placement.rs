//! Moves memory of a workload to one node, or deals it out to several, and back. See [`crate::page_moves`].
//!
//! Arguments of the action, all optional:
//! * `slice_ms`: length of one slice, 1..=100, default 20. `duty`: share of wall time in calls, 0.01..=1, default 0.5.
//! * `bytes_per_second`: upper bound, at least 65536. `free_memory_min`: bytes kept free on the node, default 2 %.
//! * `private_share_max`: share of private memory that one plan may move, 0.01..=1, default 1. The strategy chooses it.
//! * `spread_over`: nodes such as `0,2`, the target's among them. Memory elsewhere is dealt out by 2 MiB.
//! * `large_pages`: `move` moves large pages, too, each whole. Then `bytes_per_second` is at least 1048576.

use crate::Effector;
use crate::identity::{boot_id, of_another_boot, require_namespaces};
use crate::page_moves::{PageMoves, Settings, Wanted, wrong_argument};
use homeostat_kernel::{Root, bytes};
use homeostat_model::action::Target;
use homeostat_model::{Action, Bytes, Direction, EffectorId, ProcessId, Progress, UndoRecord};
use homeostat_platform::PlatformError;
use std::collections::{BTreeMap, BTreeSet};

const NODES_PER_ACTION_MAX: usize = 64;
/// Arguments that are not about the pace.
const SPREAD_OVER: &str = "spread_over";

pub(super) struct PagePlacement {
    root: Root,
    moves: PageMoves,
}

impl PagePlacement {
    pub(super) fn new(root: Root) -> Self {
        Self {
            moves: PageMoves::new(root.clone()),
            root,
        }
    }

    fn require_live(&self) -> Result<(), PlatformError> {
        if self.root.is_live() {
            return Ok(());
        }
        Err(PlatformError::Unsupported {
            what: "moving pages between nodes".into(),
            why: "the files below the root are not those of the running kernel".into(),
        })
    }
}

impl Effector for PagePlacement {
    fn id(&self) -> EffectorId {
        EffectorId::new("page_placement")
    }

    fn prepare(&mut self, action: &Action) -> Result<UndoRecord, PlatformError> {
        self.prepare_for(action, &[])
    }

    fn prepare_for(&mut self, action: &Action, members: &[ProcessId]) -> Result<UndoRecord, PlatformError> {
        self.require_live()?;
        let settings = Settings::parse(action, &[SPREAD_OVER])?;
        let wanted = wanted(action)?;
        let seen = self.moves.look(members)?;
        let survey = self.moves.survey(action, &seen, &settings, &wanted)?;
        if survey.planned == Bytes::ZERO {
            return Err(PlatformError::Busy {
                what: format!("moving pages of {} to {}", action.workload, wanted.names()),
                why: format!(
                    "none of its movable memory lies elsewhere ({} on large pages stay)",
                    survey.huge_left
                ),
            });
        }
        Ok(UndoRecord {
            action: action.clone(),
            boot_id: boot_id(&self.root)?,
            found: survey.found,
        })
    }

    fn advance(&mut self, record: &UndoRecord, direction: Direction) -> Result<Progress, PlatformError> {
        self.require_live()?;
        require_namespaces(&self.root, record)?;
        if let Some(answer) = of_another_boot(&self.root, record, direction)? {
            return Ok(answer);
        }
        let settings = Settings::parse(&record.action, &[SPREAD_OVER])?;
        self.moves.advance(record, direction, &settings)
    }

    fn forget(&mut self, record: &UndoRecord) {
        self.moves.forget(record.action.id);
    }
}

fn wanted(action: &Action) -> Result<Wanted, PlatformError> {
    let Target::Pages(target) = &action.target else {
        return Err(PlatformError::Rejected {
            what: "target of page_placement".into(),
            value: "no page move".into(),
            errno: "a page move expected".into(),
        });
    };
    let mut homes = BTreeSet::from([target.node.0]);
    if let Some(list) = action.arguments.get(SPREAD_OVER) {
        let list = bytes::list(list.as_bytes())
            .filter(|list| list.contains(&target.node.0) && list.len() <= NODES_PER_ACTION_MAX)
            .ok_or_else(|| {
                wrong_argument(action, SPREAD_OVER, "nodes such as 0,2, the target's among them")
            })?;
        homes.extend(list);
    }
    Ok(Wanted {
        bytes: target.bytes,
        shared: target.shared,
        homes: homes.into_iter().collect(),
        own_home: BTreeMap::new(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::identity::process_key;
    use homeostat_model::action::PageMove;
    use homeostat_model::{ActionId, NodeId};

    fn action(arguments: &[(&str, &str)]) -> Action {
        Action {
            id: ActionId(7),
            effector: "page_placement".into(),
            workload: "w".into(),
            target: Target::Pages(PageMove {
                node: NodeId(0),
                bytes: Bytes::from_mib(64),
                shared: true,
            }),
            arguments: arguments
                .iter()
                .map(|(k, v)| ((*k).to_owned(), (*v).to_owned()))
                .collect(),
            why: String::new(),
        }
    }

    #[test]
    fn memory_goes_to_the_target_or_to_the_nodes_that_it_is_spread_over() {
        assert_eq!(wanted(&action(&[])).unwrap().homes, [0]);
        assert_eq!(wanted(&action(&[("spread_over", "2,0")])).unwrap().homes, [0, 2]);
        for value in ["1,2", "0-64", "0,x"] {
            let outcome = wanted(&action(&[("spread_over", value)]));
            assert!(matches!(outcome, Err(PlatformError::Rejected { .. })), "{value}");
        }
        let mut wrong = action(&[]);
        wrong.target = Target::Nothing;
        assert!(matches!(wanted(&wrong), Err(PlatformError::Rejected { .. })));
    }

    #[test]
    fn a_damaged_record_is_malformed_and_one_of_an_ended_process_has_nothing_to_undo() {
        let gone = ProcessId {
            pid: i32::MAX,
            start_ticks: 1,
        };
        let root = Root::default();
        let mut record = UndoRecord {
            action: action(&[]),
            boot_id: boot_id(&root).unwrap(),
            found: BTreeMap::from([(process_key("private", gone), "1>0@800*2;2>0@7:1-3".to_owned())]),
        };
        let mut effector = PagePlacement::new(root);
        let mut last = Progress::default();
        for _ in 0..10 {
            last = effector.advance(&record, Direction::Undo).unwrap();
            if last.done {
                break;
            }
        }
        assert!(last.done && last.verified, "{last:?}");
        assert_eq!((last.finished, last.total), (0, 1027));
        assert_eq!(last.skipped, BTreeMap::from([("process ended".to_owned(), 1027)]));
        assert!(matches!(
            effector.advance(&record, Direction::Apply),
            Err(PlatformError::Vanished { .. })
        ));
        // As the first version wrote it: all pages go to the node of the target.
        record
            .found
            .insert(process_key("private", gone), "1@800*2".into());
        let outcome = PagePlacement::new(Root::default()).advance(&record, Direction::Undo);
        assert!(outcome.is_ok(), "{outcome:?}");
        for damaged in ["1", "1>@800*2", "x>0@800*2", "1>0@800*99999", "1>0@800*2;"] {
            record.found.insert(process_key("private", gone), damaged.into());
            let outcome = PagePlacement::new(Root::default()).advance(&record, Direction::Undo);
            assert!(
                matches!(outcome, Err(PlatformError::Malformed { .. })),
                "{damaged}: {outcome:?}"
            );
        }
    }
}
