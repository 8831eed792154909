//! The effector `thread_placement`.

use super::arguments::{
    BESIDE, Beside, Pacing, cpus_text, mask_from, mask_text, numbers, rejected, target_cpus,
};
use super::moves::{not_bound, plan_moves, plan_text};
use super::{
    ENDED, STARTED, SWITCH_S, SimPlatform, alive, done, find, left_alone, malformed, note_executions,
    same_memory, same_processes, vanished,
};
use crate::world::{Alive, World, ticks};
use homeostat_model::action::Target;
use homeostat_model::{Action, ActionId, CpuId, Direction, Progress, UndoRecord, WorkloadId};
use homeostat_platform::PlatformError;
use std::collections::{BTreeMap, BTreeSet};

impl SimPlatform {
    pub(super) fn prepare_threads(&self, action: &Action) -> Result<BTreeMap<String, String>, PlatformError> {
        let world = self.world.borrow();
        let cpus = target_cpus(&world, action)?;
        let p = find(&world, &action.workload)?;
        let (program, alive) = alive(&world, p, &action.workload)?;
        if program.bound {
            return Err(PlatformError::Conflict {
                what: format!("threads of {}", action.workload),
                expected: "not bound".into(),
                found: format!(
                    "bound by a person to CPUs {}",
                    mask_text(program.mask.as_deref(), program.grouped)
                ),
            });
        }
        let mut found = BTreeMap::from([
            (STARTED.to_owned(), ticks(alive.started_s).to_string()),
            (
                "mask".to_owned(),
                mask_text(program.mask.as_deref(), program.grouped),
            ),
        ]);
        note_executions(&mut found, alive);
        let Beside { split, memory, .. } = Beside::parse(action)?;
        let mut own: Vec<BTreeSet<usize>> = Vec::new();
        if split {
            if !program.split.is_empty() {
                return Err(PlatformError::Busy {
                    what: format!("processes of {}", action.workload),
                    why: "each is kept on a chip already".into(),
                });
            }
            let chips = assign(&world, alive, &cpus);
            own = chips
                .iter()
                .filter_map(|c| world.layout().chips.get(*c as usize))
                .map(|c| BTreeSet::from([c.node as usize]))
                .collect();
            found.insert(SPLIT.to_owned(), split_text(&chips));
        }
        if let Some(along) = memory {
            not_bound(&action.workload, program)?;
            let home = nodes_of(&world, &cpus)?;
            let of = |segment: usize| own.get(segment).unwrap_or(&home);
            for (index, plan) in plan_moves(&world, alive, of, &along) {
                found.insert(format!("segment.{index}"), plan_text(&plan));
            }
        }
        Ok(found)
    }

    pub(super) fn advance_threads(
        &mut self,
        record: &UndoRecord,
        direction: Direction,
    ) -> Result<Progress, PlatformError> {
        let action = &record.action;
        let found = Place::found(record)?;
        let Some(p) = same_processes(&self.world.borrow(), record) else {
            return match direction {
                Direction::Undo => Ok(Progress {
                    skipped: BTreeMap::from([(ENDED.to_owned(), 1)]),
                    finished: 0,
                    ..done()
                }),
                Direction::Apply => Err(vanished(&action.workload)),
            };
        };
        // As on Linux: a change under another is not moved. Reapplied before its undo could begin, it is on.
        if let Some(later) = self.over(action) {
            if direction == Direction::Apply && self.is_left_on(action.id) {
                return Ok(done());
            }
            return Err(PlatformError::Busy {
                what: format!("placement of the threads of {}", action.workload),
                why: format!("action {later} lies over it"),
            });
        }
        self.placed.insert(action.id, action.workload.clone());
        let is_left = !self.set_threads(record, direction, p, found)?;
        let threads = if is_left { left_alone() } else { done() };
        let with_memory = Beside::parse(action).is_ok_and(|b| b.memory.is_some());
        if is_left && !with_memory {
            self.placed.remove(&action.id);
            return Ok(threads);
        }
        self.owes_memory.remove(&action.id);
        if direction == Direction::Undo {
            // As on Linux: the change under it can go now, although memory may lack room for long.
            self.placed.remove(&action.id);
        }
        if with_memory {
            return self
                .bring_memory(record, direction, p)
                .map(|pages| both(threads, pages));
        }
        self.leave(record, direction);
        Ok(done())
    }

    /// Sets a placement's mask or the found one. False if somebody else has set another, which stays.
    fn set_threads(
        &mut self,
        record: &UndoRecord,
        direction: Direction,
        p: usize,
        found: Place,
    ) -> Result<bool, PlatformError> {
        let mut world = self.world.borrow_mut();
        let program = world
            .programs
            .get(p)
            .ok_or_else(|| vanished(&record.action.workload))?;
        let now = Place {
            mask: program.mask.clone(),
            grouped: program.grouped,
            split: program.split.clone(),
        };
        let ours = Place::ours(record, found.split.clone());
        let is_ours = !program.bound && now == ours;
        let is_found = !program.bound
            && (&now.mask, now.grouped) == (&found.mask, found.grouped)
            && (found.split.is_empty() || now.split.is_empty());
        let task = self.tasks.entry(record.action.id).or_default();
        // The mask is part of the first slice.
        let set = task.left == Some(Direction::Apply) || task.way == Some(Direction::Apply);
        match direction {
            Direction::Apply => {
                let cpus = target_cpus(&world, &record.action)?;
                // The found mask although we left ours: somebody else restored it.
                if !is_ours && (set || !is_found) {
                    return Err(Self::conflict(
                        record,
                        cpus_text(&cpus),
                        mask_text(now.mask.as_deref(), now.grouped),
                    ));
                }
                if !is_ours {
                    world.set_mask(p, Some(cpus), ours.grouped, false);
                    world.set_split(p, found.split);
                    world.charge(SWITCH_S);
                }
            }
            Direction::Undo if is_ours => {
                world.set_mask(p, found.mask, found.grouped, false);
                world.charge(SWITCH_S);
            }
            Direction::Undo => return Ok(is_found),
        }
        Ok(true)
    }

    fn bring_memory(
        &mut self,
        record: &UndoRecord,
        direction: Direction,
        p: usize,
    ) -> Result<Progress, PlatformError> {
        let (id, workload) = (record.action.id, &record.action.workload);
        if direction == Direction::Undo {
            let above = |(later, of): &(&ActionId, &WorkloadId)| **later > id && *of == workload;
            let later = self.owes_memory.iter().rev().find(above);
            let later = later.map(|(later, _)| *later);
            self.owes_memory.insert(id, workload.clone());
            if let Some(later) = later {
                return Err(PlatformError::Busy {
                    what: format!("memory of {workload} that action {id} moved"),
                    why: format!("what action {later} moved on goes back first"),
                });
            }
        }
        let pacing = Pacing::parse(&record.action, &BESIDE)?;
        let is_same = same_memory(&self.world.borrow(), record).is_some();
        let pages = if is_same {
            self.advance_moves(record, direction, &pacing, None, p)?
        } else {
            left_alone()
        };
        if pages.done {
            self.owes_memory.remove(&id);
        }
        Ok(pages)
    }
}

#[derive(PartialEq)]
struct Place {
    mask: Option<Vec<CpuId>>,
    grouped: bool,
    /// The chip of each process; empty = any.
    split: Vec<u32>,
}

impl Place {
    /// The found state, for the chips that the change gives.
    fn found(record: &UndoRecord) -> Result<Self, PlatformError> {
        let text = record.found.get("mask");
        let (mask, grouped) = text
            .and_then(|t| mask_from(t))
            .ok_or_else(|| malformed(record, "mask"))?;
        let split = record.found.get(SPLIT).map(|text| split_from(text));
        Ok(Self {
            mask,
            grouped,
            split: split
                .unwrap_or(Some(Vec::new()))
                .ok_or_else(|| malformed(record, SPLIT))?,
        })
    }

    fn ours(record: &UndoRecord, split: Vec<u32>) -> Self {
        let cpus: BTreeSet<CpuId> = match &record.action.target {
            Target::Cpus(cpus) => cpus.iter().copied().collect(),
            _ => BTreeSet::new(),
        };
        Self {
            mask: Some(cpus.into_iter().collect()),
            grouped: Beside::parse(&record.action).is_ok_and(|b| b.grouped),
            split,
        }
    }
}

fn nodes_of(world: &World, cpus: &[CpuId]) -> Result<BTreeSet<usize>, PlatformError> {
    let layout = world.layout();
    let mut home = BTreeSet::new();
    for (chip, of_chip) in layout.chips.iter().enumerate() {
        let range = layout.cpus_of_chip(chip).unwrap_or_default();
        if cpus.iter().any(|c| range.contains(&c.0)) {
            home.insert(of_chip.node as usize);
        }
    }
    match home
        .iter()
        .find(|n| !world.memory.node(**n).is_some_and(|n| n.online))
    {
        Some(node) => Err(rejected(
            "target of thread_placement",
            format!("node {node}"),
            "memory cannot go there: the node is offline",
        )),
        None => Ok(home),
    }
}

const SPLIT: &str = "split";

/// Processes and their chips, as `0-15@0,16-31@1`.
fn split_text(chips: &[u32]) -> String {
    let mut first = 0;
    let runs = chips.chunk_by(|a, b| a == b).map(|run| {
        let last = first + run.len() - 1;
        let text = format!("{first}-{last}@{}", run.first().copied().unwrap_or(0));
        first = last + 1;
        text
    });
    runs.collect::<Vec<_>>().join(",")
}

fn split_from(text: &str) -> Option<Vec<u32>> {
    let mut chips = Vec::new();
    for run in text.split(',').filter(|r| !r.is_empty()) {
        let (processes, chip) = run.split_once('@')?;
        let chip: u32 = chip.parse().ok()?;
        chips.extend(numbers(processes)?.into_iter().map(|_| chip));
    }
    Some(chips)
}

/// A chip for each process: most of its private memory, filled by cores; of equals the emptiest, then the first.
fn assign(world: &World, alive: &Alive, cpus: &[CpuId]) -> Vec<u32> {
    let layout = world.layout();
    let chips: Vec<(usize, f64)> = layout
        .chips
        .iter()
        .enumerate()
        .filter(|(at, _)| {
            let range = layout.cpus_of_chip(*at).unwrap_or_default();
            cpus.iter().any(|c| range.contains(&c.0))
        })
        .map(|(at, chip)| (at, f64::from(chip.cores)))
        .collect();
    let cores: f64 = chips.iter().map(|(_, cores)| cores).sum();
    let mut left: Vec<(usize, f64)> = chips
        .into_iter()
        .map(|(at, of_chip)| (at, (alive.processes.len() as f64 * of_chip / cores).ceil()))
        .collect();
    let pages = |process: usize, chip: usize| -> u64 {
        let node = layout.chips.get(chip).map_or(0, |c| c.node as usize);
        let on = alive.private.get(process).map(|s| s.pages_on());
        on.and_then(|on| on.get(node)).copied().unwrap_or(0)
    };
    let mut out = Vec::with_capacity(alive.processes.len());
    for process in 0..alive.processes.len() {
        let best = left
            .iter_mut()
            .filter(|(_, left)| *left >= 1.0)
            .reduce(|best, next| {
                let order = pages(process, best.0)
                    .cmp(&pages(process, next.0))
                    .then(best.1.total_cmp(&next.1));
                if order == std::cmp::Ordering::Less {
                    next
                } else {
                    best
                }
            });
        if let Some((chip, left)) = best {
            *left -= 1.0;
            out.push(*chip as u32);
        }
    }
    out
}

/// Progress of threads and memory together: the mask counts as one piece.
fn both(threads: Progress, mut memory: Progress) -> Progress {
    memory.finished += threads.finished;
    memory.total += threads.total;
    for (reason, count) in threads.skipped {
        *memory.skipped.entry(reason).or_default() += count;
    }
    memory
}
