//! The effector `large_pages`.

use super::arguments::{Pacing, cpus_text, numbers, rejected};
use super::slices::{Slice, Step, Turn, ended};
use super::{
    ALREADY_LARGE, CHANGED_BY_OTHERS, ENDED, HOLES, NOT_MAPPED, SEVERAL, STARTED, SimPlatform, alive, find,
    malformed, note_executions, same_memory, vanished,
};
use crate::world::{Alive, World, ticks};
use homeostat_model::action::{MemoryTarget, Target};
use homeostat_model::{Action, CpuId, Direction, Progress, UndoRecord};
use homeostat_platform::PlatformError;
use std::collections::BTreeMap;
use std::rc::Rc;

/// Most pieces in one action, as on Linux.
pub(super) const PIECES_PER_ACTION_MAX: usize = 32 * 1024;

impl SimPlatform {
    pub(super) fn prepare_large(&self, action: &Action) -> Result<BTreeMap<String, String>, PlatformError> {
        let pacing = Pacing::parse(action, &[])?;
        let world = self.world.borrow();
        let targets = memory_targets(&world, action)?;
        require_switch(&world)?;
        let p = find(&world, &action.workload)?;
        let (_, alive) = alive(&world, p, &action.workload)?;
        let several = alive.processes.len() > 1 && !world.layout().split_shared;
        let mut found = BTreeMap::from([(STARTED.to_owned(), ticks(alive.started_s).to_string())]);
        note_executions(&mut found, alive);
        let mut skipped: BTreeMap<&str, u64> = BTreeMap::new();
        let mut convertible = 0;
        for target in targets {
            let Some(process) = alive.processes.iter().position(|id| *id == target.process) else {
                *skipped.entry(ENDED).or_default() += target.pieces.len() as u64;
                continue;
            };
            let mut usable = Vec::new();
            for address in &target.pieces {
                match locate(alive, process, *address) {
                    None => *skipped.entry(NOT_MAPPED).or_default() += 1,
                    Some((index, piece)) => match alive.segment(index) {
                        Some(s) if s.is_large(piece) => *skipped.entry(ALREADY_LARGE).or_default() += 1,
                        Some(s) if s.is_sparse(piece) => *skipped.entry(HOLES).or_default() += 1,
                        Some(s) if s.shared && several && !pacing.several_mappers => {
                            *skipped.entry(SEVERAL).or_default() += 1;
                        }
                        _ => usable.push((index, piece)),
                    },
                }
            }
            convertible += usable.len();
            for (index, piece) in usable {
                let text = found.entry(format!("segment.{index}")).or_default();
                if !text.is_empty() {
                    text.push(',');
                }
                text.push_str(&piece.to_string());
            }
        }
        if convertible == 0 && skipped.contains_key(ENDED) {
            return Err(vanished(&action.workload));
        }
        for text in found
            .iter_mut()
            .filter(|(k, _)| k.starts_with("segment."))
            .map(|(_, v)| v)
        {
            if let Some(mut list) = numbers(text) {
                list.sort_unstable();
                list.dedup();
                *text = cpus_text(&list.into_iter().map(CpuId).collect::<Vec<_>>());
            }
        }
        for (reason, count) in skipped {
            found.insert(format!("skipped.{reason}"), count.to_string());
        }
        Ok(found)
    }

    pub(super) fn advance_large(
        &mut self,
        record: &UndoRecord,
        direction: Direction,
    ) -> Result<Progress, PlatformError> {
        let pacing = Pacing::parse(&record.action, &[])?;
        let world = Rc::clone(&self.world);
        let mut world = world.borrow_mut();
        let plan = plan_of(record)?;
        let found_skipped: BTreeMap<String, u64> = record
            .found
            .iter()
            .filter_map(|(k, v)| Some((k.strip_prefix("skipped.")?.to_owned(), v.parse().ok()?)))
            .collect();
        let total = plan.len() as u64 + found_skipped.values().sum::<u64>();
        let Some(p) = same_memory(&world, record) else {
            return ended(&record.action.workload, direction, total);
        };
        if direction == Direction::Apply {
            require_switch(&world)?;
        }
        world.settle_now();
        let task = self.tasks.entry(record.action.id).or_default();
        task.head(direction);
        let split_shared = world.layout().split_shared;
        let size = world.memory.piece().0;
        let work = |turn: Turn<'_>, (_, piece): (usize, usize)| {
            let is_large = turn.segment.is_large(piece);
            if turn.left == Some(direction) && is_large != (direction == Direction::Apply) {
                return Step::Skip(CHANGED_BY_OTHERS);
            }
            let ns = match direction {
                Direction::Apply if !is_large => match turn.memory.convert(turn.segment, piece) {
                    Ok(ns) => ns,
                    Err(error) => return Step::Refused(error.to_string()),
                },
                Direction::Undo if is_large && turn.segment.shared && turn.several && !split_shared => {
                    return Step::Stop(Some("other processes map it, too".to_owned()));
                }
                Direction::Undo if is_large => turn.memory.split(turn.segment, piece),
                Direction::Apply | Direction::Undo => return Step::Nothing,
            };
            Step::Worked(ns, size, (ns / 1e9, turn.weight, 1))
        };
        let slice = Slice::of(&mut world, p, (task, &pacing), &plan, |step| step, work);
        let at_end = task.cursor >= plan.len();
        let finished = task.finished;
        let mut skipped = found_skipped;
        for (reason, count) in &task.skipped {
            *skipped.entry(reason.clone()).or_default() += count;
        }
        slice.spend(&mut world, p, &pacing, at_end);
        drop(world);
        if let Some(why) = slice.why {
            self.tasks.remove(&record.action.id);
            return Err(PlatformError::Busy {
                what: format!("large pages for {}", record.action.workload),
                why,
            });
        }
        let progress = slice.progress(&pacing, at_end, finished, total, skipped);
        if at_end {
            self.leave(record, direction);
        }
        Ok(progress)
    }
}

fn plan_of(record: &UndoRecord) -> Result<Vec<(usize, usize)>, PlatformError> {
    let mut plan: Vec<(usize, usize)> = Vec::new();
    for (name, text) in record.found.iter().filter(|(k, _)| k.starts_with("segment.")) {
        let index = name
            .trim_start_matches("segment.")
            .parse()
            .map_err(|_| malformed(record, name))?;
        let pieces = numbers(text).ok_or_else(|| malformed(record, name))?;
        plan.extend(pieces.into_iter().map(|p| (index, p as usize)));
    }
    Ok(plan)
}

fn require_switch(world: &World) -> Result<(), PlatformError> {
    let enabled = &world.surroundings().large_page_switch;
    if enabled == "never" {
        return Err(PlatformError::Conflict {
            what: "transparent_hugepage/enabled".into(),
            expected: "madvise or always".into(),
            found: enabled.clone(),
        });
    }
    Ok(())
}

fn memory_targets<'a>(world: &World, action: &'a Action) -> Result<&'a [MemoryTarget], PlatformError> {
    let what = "target of large_pages";
    let Target::Memory(targets) = &action.target else {
        return Err(rejected(what, "no memory".into(), "memory expected"));
    };
    let pieces: usize = targets.iter().map(|t| t.pieces.len()).sum();
    if pieces > PIECES_PER_ACTION_MAX {
        return Err(rejected(
            what,
            format!("{pieces} pieces"),
            "too many for one action",
        ));
    }
    let size = world.memory.piece().0;
    for target in targets {
        if !target.pieces.is_sorted_by(|a, b| a < b) || target.pieces.iter().any(|p| p % size != 0) {
            let whose = format!("pieces of process {}", target.process);
            return Err(rejected(
                what,
                whose,
                "multiples of the large page size in ascending order expected",
            ));
        }
    }
    Ok(targets)
}

fn locate(alive: &Alive, process: usize, address: u64) -> Option<(usize, usize)> {
    let private = alive
        .private
        .get(process)
        .and_then(|s| Some((process, s.piece_at(address)?)));
    private.or_else(|| Some((alive.private.len(), alive.shared.as_ref()?.piece_at(address)?)))
}
