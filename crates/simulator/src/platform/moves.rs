//! Moves of memory: the effector `page_placement`, and what goes along with threads.

use super::arguments::{Along, LARGE, Pacing, argument, moves_large, numbers, rejected};
use super::slices::{Slice, Step, Turn, ended};
use super::{
    ALREADY_LARGE, MOVED_BY_OTHERS, NO_ROOM, STARTED, SimPlatform, alive, find, malformed, note_executions,
    same_memory,
};
use crate::memory::{MemoryError, move_cost};
use crate::world::{Alive, Program, World, ticks};
use homeostat_model::action::Target;
use homeostat_model::{Action, Bytes, Direction, NodeId, Progress, UndoRecord, WorkloadId};
use homeostat_platform::PlatformError;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

/// Default share of a node kept free when pages move there.
const KEEP_FREE_SHARE: f64 = 0.02;

impl SimPlatform {
    pub(super) fn prepare_pages(&self, action: &Action) -> Result<BTreeMap<String, String>, PlatformError> {
        Pacing::parse(action, &[SPREAD, LARGE])?;
        let large = moves_large(action)?;
        let world = self.world.borrow();
        let Target::Pages(wanted) = &action.target else {
            return Err(rejected(
                "target of page_placement",
                "no page move".into(),
                "a page move expected",
            ));
        };
        let home = spread(action, wanted.node)?;
        let mut room = Bytes::ZERO;
        for node in &home {
            let found = world.memory.node(*node).filter(|n| n.online).ok_or_else(|| {
                rejected(
                    "target of page_placement",
                    format!("node {node}"),
                    "the machine has no such node online",
                )
            })?;
            room = Bytes(room.0.max(found.available().0));
        }
        let p = find(&world, &action.workload)?;
        let (program, alive) = alive(&world, p, &action.workload)?;
        not_bound(&action.workload, program)?;
        let mut found = BTreeMap::from([(STARTED.to_owned(), ticks(alive.started_s).to_string())]);
        note_executions(&mut found, alive);
        let along = Along {
            bytes: wanted.bytes,
            shared: wanted.shared,
            large,
        };
        let plans = plan_moves(&world, alive, |_| &home, &along);
        if plans.is_empty() {
            return Err(PlatformError::Busy {
                what: format!("moving pages of {} to node {}", action.workload, wanted.node),
                why: "none of its movable memory lies elsewhere".into(),
            });
        }
        if room.0 < world.memory.piece().0 {
            return Err(PlatformError::Busy {
                what: format!("moving pages to node {}", wanted.node),
                why: format!("only {room} are free there"),
            });
        }
        for (index, plan) in plans {
            found.insert(format!("segment.{index}"), plan_text(&plan));
        }
        Ok(found)
    }

    pub(super) fn advance_pages(
        &mut self,
        record: &UndoRecord,
        direction: Direction,
    ) -> Result<Progress, PlatformError> {
        let pacing = Pacing::parse(&record.action, &[SPREAD, LARGE])?;
        let Target::Pages(wanted) = &record.action.target else {
            return Err(malformed(record, "target"));
        };
        let to = Some(wanted.node.0 as usize);
        let p = same_memory(&self.world.borrow(), record);
        match p {
            Some(p) => self.advance_moves(record, direction, &pacing, to, p),
            None => {
                let total = plan_of(record, to)?.len() as u64;
                ended(&record.action.workload, direction, total)
            }
        }
    }

    /// One slice of the moves in a record. Pieces go to `to` unless the record says otherwise.
    pub(super) fn advance_moves(
        &mut self,
        record: &UndoRecord,
        direction: Direction,
        pacing: &Pacing,
        to: Option<usize>,
        p: usize,
    ) -> Result<Progress, PlatformError> {
        let plan = plan_of(record, to)?;
        let large = moves_large(&record.action)?;
        let world = Rc::clone(&self.world);
        let mut world = world.borrow_mut();
        let total = plan.len() as u64;
        if direction == Direction::Apply && world.programs.get(p).is_some_and(|p| p.nodes.is_some()) {
            return Err(Self::conflict(
                record,
                "not bound".into(),
                "bound by a person".into(),
            ));
        }
        world.settle_now();
        let task = self.tasks.entry(record.action.id).or_default();
        task.head(direction);
        let mut mover = Mover {
            direction,
            large,
            keep_free: pacing.keep_free,
            no_room: None,
            copied: BTreeMap::new(),
        };
        let at = |m: Moved| (m.segment, m.piece);
        let mut slice = Slice::of(&mut world, p, (task, pacing), &plan, at, |turn, m| {
            mover.step(turn, m)
        });
        slice.copied = mover.copied;
        let no_room = mover.no_room;
        let at_end = task.cursor >= plan.len();
        let (finished, skipped) = (task.finished, task.skipped.clone());
        slice.spend(&mut world, p, pacing, at_end);
        let stuck = slice.copied.is_empty() && !at_end && no_room.is_some();
        let nothing = at_end
            && finished == 0
            && direction == Direction::Apply
            && skipped.get(NO_ROOM).is_some_and(|n| *n > 0);
        if stuck || nothing {
            let place = no_room
                .or(to)
                .map_or_else(|| "its nodes".to_owned(), |n| format!("node {n}"));
            self.tasks.remove(&record.action.id);
            return Err(PlatformError::Busy {
                what: format!("moving pages of {} to {place}", record.action.workload),
                why: slice.why.unwrap_or_else(|| NO_ROOM.to_owned()),
            });
        }
        drop(world);
        let progress = slice.progress(pacing, at_end, finished, total, skipped);
        if at_end {
            self.leave(record, direction);
        }
        Ok(progress)
    }
}

struct Mover {
    direction: Direction,
    large: bool,
    /// Memory that stays free on a node; default: the usual share.
    keep_free: Option<Bytes>,
    no_room: Option<usize>,
    /// Copied bytes by source and destination node.
    copied: BTreeMap<(usize, usize), u64>,
}

impl Mover {
    fn step(&mut self, turn: Turn<'_>, m: Moved) -> Step {
        let (memory, segment, piece) = (turn.memory, turn.segment, m.piece);
        let (source, goal) = match self.direction {
            Direction::Apply => (m.from, m.to),
            Direction::Undo => (m.to, m.from),
        };
        let here = segment.node_of(piece);
        if here == goal {
            return Step::Nothing;
        }
        // Somebody else moved it since: it stays theirs.
        if here != source || turn.left == Some(self.direction) {
            return Step::Skip(MOVED_BY_OTHERS);
        }
        if self.direction == Direction::Apply && segment.is_large(piece) && !self.large {
            return Step::Skip(ALREADY_LARGE);
        }
        let keep_free = match self.direction {
            Direction::Apply => self.keep_free.unwrap_or_else(|| {
                Bytes((memory.node(goal).map_or(0, |n| n.total.0) as f64 * KEEP_FREE_SHARE) as u64)
            }),
            Direction::Undo => Bytes::ZERO,
        };
        let bytes = segment.bytes_in(piece);
        let has_room = memory.has_room(goal, bytes, keep_free);
        match (
            has_room.then(|| memory.move_piece(segment, piece, goal)),
            self.direction,
        ) {
            (Some(Ok(ns)), _) => {
                *self.copied.entry((here, goal)).or_default() += bytes.0;
                let pages = segment.pages_in(piece).max(1);
                let page_s = move_cost(1, bytes.0 / pages) / 1e9;
                Step::Worked(ns, bytes.0, (page_s, turn.weight / pages as f64, pages))
            }
            (None, Direction::Apply) => {
                self.no_room = Some(goal);
                Step::Skip(NO_ROOM)
            }
            (Some(Err(MemoryError::NoMemory { .. } | MemoryError::Offline(_))), Direction::Apply) => {
                Step::Skip(NO_ROOM)
            }
            (failed, _) => {
                self.no_room = Some(goal);
                Step::Stop(failed.and_then(Result::err).map(|e| e.to_string()))
            }
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Moved {
    pub(super) segment: usize,
    pub(super) piece: usize,
    pub(super) from: usize,
    pub(super) to: usize,
}

/// Argument of `page_placement`, such as `0,2`: the pages are shared evenly among these nodes, the target's included.
const SPREAD: &str = "spread_over";

/// Runs of pieces of a segment for several nodes: enough to share the hot pieces, few enough for a short record.
const RUNS: usize = 64;

/// The nodes of a page move: the target's, and those of [`SPREAD`].
fn spread(action: &Action, node: NodeId) -> Result<BTreeSet<usize>, PlatformError> {
    let mut home = BTreeSet::from([node.0 as usize]);
    if let Some(text) = action.arguments.get(SPREAD) {
        let list = numbers(text).filter(|l| l.contains(&node.0)).ok_or_else(|| {
            rejected(
                &argument(action, SPREAD),
                text.clone(),
                "expected nodes such as 0,2, the target's among them",
            )
        })?;
        home.extend(list.into_iter().map(|n| n as usize));
    }
    Ok(home)
}

pub(super) fn not_bound(workload: &WorkloadId, program: &Program) -> Result<(), PlatformError> {
    match &program.nodes {
        Some(nodes) => Err(PlatformError::Conflict {
            what: format!("memory of {workload}"),
            expected: "not bound".into(),
            found: format!("bound by a person to nodes {nodes:?}"),
        }),
        None => Ok(()),
    }
}

/// The moves to the nodes of each segment: hottest first, private memory before shared. Processes alternate, so that a
/// part of the whole is a part of each. Several nodes get runs of pieces alternately while they have room.
pub(super) fn plan_moves<'a>(
    world: &World,
    alive: &Alive,
    home_of: impl Fn(usize) -> &'a BTreeSet<usize>,
    along: &Along,
) -> BTreeMap<usize, Vec<Moved>> {
    let mut room: Vec<u64> = world.memory.nodes().iter().map(|n| n.available().0).collect();
    let mut left = along.bytes.0;
    let mut plans: BTreeMap<usize, Vec<Moved>> = BTreeMap::new();
    for shared in [false, true] {
        let mut cursors: Vec<(usize, usize)> = (0..alive.segment_count())
            .filter(|i| along.shared || *i < alive.private.len())
            .filter(|i| alive.segment(*i).is_some_and(|s| s.shared == shared))
            .map(|i| (i, 0))
            .collect();
        while left > 0 && !cursors.is_empty() {
            for (index, cursor) in &mut cursors {
                let Some(segment) = alive.segment(*index) else {
                    continue;
                };
                let home = home_of(*index);
                while *cursor < segment.pieces()
                    && (home.contains(&segment.node_of(*cursor))
                        || (segment.is_large(*cursor) && !along.large))
                {
                    *cursor += 1;
                }
                if *cursor >= segment.pieces() || left == 0 {
                    *cursor = usize::MAX;
                    continue;
                }
                let plan = plans.entry(*index).or_default();
                let size = segment.bytes_in(*cursor).0;
                let run = (segment.pieces() / RUNS).max(1);
                let turn = *index + plan.len() / run;
                let Some(to) = next_node(home, &mut room, turn, size) else {
                    return plans;
                };
                plan.push(Moved {
                    segment: *index,
                    piece: *cursor,
                    from: segment.node_of(*cursor),
                    to,
                });
                left = left.saturating_sub(size);
                *cursor += 1;
            }
            cursors.retain(|(_, c)| *c != usize::MAX);
        }
    }
    plans
}

/// The next node with room. If none has any, the node whose turn it is: the move counts what does not fit.
fn next_node(home: &BTreeSet<usize>, room: &mut [u64], turn: usize, size: u64) -> Option<usize> {
    let first = turn.checked_rem(home.len())?;
    let mut turns = home.iter().cycle().skip(first).take(home.len());
    let fits = turns.find(|n| room.get(**n).is_some_and(|left| *left >= size));
    let node = *fits.or_else(|| home.iter().nth(first))?;
    let left = room.get_mut(node)?;
    *left = left.saturating_sub(size);
    Some(node)
}

/// Pieces with their source and destination node, as `0-99@1>0,100@0>2`.
pub(super) fn plan_text(plan: &[Moved]) -> String {
    plan.chunk_by(|a, b| a.piece + 1 == b.piece && (a.from, a.to) == (b.from, b.to))
        .filter_map(|run| {
            let (first, last) = (run.first()?, run.last()?);
            let pieces = if first.piece == last.piece {
                first.piece.to_string()
            } else {
                format!("{}-{}", first.piece, last.piece)
            };
            Some(format!("{pieces}@{}>{}", first.from, first.to))
        })
        .collect::<Vec<_>>()
        .join(",")
}

/// The plan of a page move, in its order. Pieces without a destination in the record (`0-99@1`) go to `to`.
pub(super) fn plan_of(record: &UndoRecord, to: Option<usize>) -> Result<Vec<Moved>, PlatformError> {
    let mut all: Vec<(usize, usize, Moved)> = Vec::new();
    for (name, text) in record.found.iter().filter(|(k, _)| k.starts_with("segment.")) {
        let wrong = || malformed(record, name);
        let segment: usize = name.trim_start_matches("segment.").parse().map_err(|_| wrong())?;
        let mut turn = 0;
        for part in text.split(',').filter(|p| !p.is_empty()) {
            let (range, nodes) = part.split_once('@').ok_or_else(wrong)?;
            let (from, to) = match nodes.split_once('>') {
                Some((from, to)) => (from, Some(to.parse().map_err(|_| wrong())?)),
                None => (nodes, to),
            };
            let from: usize = from.parse().map_err(|_| wrong())?;
            let to = to.ok_or_else(wrong)?;
            for piece in numbers(range).ok_or_else(wrong)? {
                let piece = piece as usize;
                all.push((
                    turn,
                    segment,
                    Moved {
                        segment,
                        piece,
                        from,
                        to,
                    },
                ));
                turn += 1;
            }
        }
    }
    all.sort_unstable_by_key(|(turn, segment, m)| (*turn, *segment, m.piece, m.from));
    Ok(all.into_iter().map(|(_, _, m)| m).collect())
}
