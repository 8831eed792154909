//! CPUs and memory that go away in the middle of a change.

use super::Context;
use super::placement::{ALL, Kept, MIB, kept_on, pages_to, threads_to, two_nodes};
use crate::driver::Watch;
use crate::instruments::{by_node, masks, text, write};
use crate::{Failure, ensure};
use homeostat_model::{Direction, UndoRecord};
use homeostat_platform::{Effectors, PlatformError};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// Tries to take a memory block away, and the wait between them.
const TAKE_TRIES: u32 = 20;
const TAKE_WAIT: Duration = Duration::from_millis(500);

/// CPUs that are off; on again when dropped.
struct Off(BTreeSet<u32>);

impl Off {
    fn switch(cpus: BTreeSet<u32>) -> Result<Self, Failure> {
        let off = Self(cpus);
        for cpu in &off.0 {
            write(format!("/sys/devices/system/cpu/cpu{cpu}/online"), "0")?;
        }
        Ok(off)
    }

    fn back(self) -> Result<(), Failure> {
        for cpu in &self.0 {
            write(format!("/sys/devices/system/cpu/cpu{cpu}/online"), "1")?;
        }
        Ok(())
    }
}

impl Drop for Off {
    fn drop(&mut self) {
        for cpu in &self.0 {
            let _ = std::fs::write(format!("/sys/devices/system/cpu/cpu{cpu}/online"), "1");
        }
    }
}

/// First one CPU of the target goes, then all: the effector may refuse to go on, but the undo always works and leaves
/// the masks as found.
pub(super) fn cpus_leave(context: &Context) -> Result<(), Failure> {
    let (_, away) = two_nodes(context)?;
    let target = context.expected.cpus_of(away);
    let some: BTreeSet<u32> = target.iter().take(1).copied().collect();
    for gone in [some, target.clone()] {
        let mut kept = kept_on(context, 0, true)?;
        let (found, _) = kept.found()?;
        let action = threads_to(kept.workload.clone(), &target);
        let record = kept.driver.intend(&action)?;
        kept.driver.apply(&record)?;
        let all_gone = gone == target;
        let off = Off::switch(gone)?;
        let again = kept.driver.platform.advance(&record, Direction::Apply);
        // Where some CPUs are left the placement still holds. Where none is, the kernel has let the threads go, and whoever
        // did that wins.
        ensure!(
            matches!(
                again,
                Ok(_)
                    | Err(PlatformError::Conflict { .. }
                        | PlatformError::Busy { .. }
                        | PlatformError::Rejected { .. })
            ),
            "placing again with CPUs gone (all: {all_gone}): {again:?}"
        );
        kept.driver.undo(&record)?;
        off.back()?;
        let after = masks(kept.keeper.pid())?;
        ensure!(
            after == found,
            "CPUs came back (all were gone: {all_gone}), masks are {after:?}, found {found:?}"
        );
        kept.keeper.check()?;
    }
    Ok(())
}

/// A move of half of the pages to `away` that is not at its end: the record, and the pages by node then.
fn half_way(kept: &mut Kept, away: u32) -> Result<(UndoRecord, BTreeMap<u32, u64>), Failure> {
    // Slow enough that some of it is left.
    let action = pages_to(kept.workload.clone(), away, ALL, (MIB << 20) / 2);
    let record = kept.driver.intend(&action)?;
    let (keeper, frames) = (&kept.keeper, &kept.frames);
    let progress = kept.driver.drive(&record, Direction::Apply, |_| {
        let there = by_node(&keeper.nodes(frames)?).get(&away).copied().unwrap_or(0);
        Ok(if there * 2 >= keeper.pages {
            Watch::Stop
        } else {
            Watch::GoOn
        })
    })?;
    let pages = by_node(&kept.keeper.nodes(&kept.frames)?);
    ensure!(
        !progress.done && pages.len() == 2 && pages.values().sum::<u64>() == kept.keeper.pages,
        "not in the middle of a move: {progress:?}, pages by node {pages:?}"
    );
    Ok((record, pages))
}

/// All CPUs of the target go in the middle of a move: memory needs no CPU beside it, so the move goes on to its end, and
/// back.
pub(super) fn cpus_leave_while_pages_move(context: &Context) -> Result<(), Failure> {
    let (home, away) = two_nodes(context)?;
    let mut kept = kept_on(context, home, true)?;
    let found = kept.found()?;
    let (record, half) = half_way(&mut kept, away)?;
    let off = Off::switch(context.expected.cpus_of(away))?;
    kept.keeper.check()?;
    let end = kept.driver.drive(&record, Direction::Apply, |_| Ok(Watch::GoOn));
    let pages = by_node(&kept.keeper.nodes(&kept.frames)?);
    context.note(&format!(
        "pages by node {half:?}, and {pages:?} after the CPUs of node {away} had gone"
    ));
    ensure!(
        matches!(
            end,
            Ok(_)
                | Err(Failure::Platform {
                    source: PlatformError::Conflict { .. } | PlatformError::Rejected { .. },
                    ..
                })
        ),
        "going on without the CPUs of node {away}: {end:?}"
    );
    ensure!(
        pages.values().sum::<u64>() == kept.keeper.pages,
        "pages are missing: {pages:?}"
    );
    kept.keeper.check()?;
    kept.driver.undo(&record)?;
    off.back()?;
    kept.keeper.check()?;
    let after = kept.found()?;
    ensure!(
        after == found,
        "the undo left masks {:?} and pages {:?}, found {:?} and {:?}",
        after.0,
        by_node(&after.1),
        found.0,
        by_node(&found.1)
    );
    Ok(())
}

/// A block of memory of the target goes in the middle of a move. The kernel takes its pages elsewhere; nothing is lost,
/// and the undo brings the rest back.
pub(super) fn memory_leaves(context: &Context) -> Result<(), Failure> {
    let (home, away) = two_nodes(context)?;
    let mut kept = kept_on(context, home, true)?;
    let (found, _) = kept.found()?;
    let (record, before) = half_way(&mut kept, away)?;
    // The block that holds most of what has arrived goes first.
    let (pid, frames) = (kept.keeper.pid(), &kept.frames);
    let held = by_node(&frames.blocks_of_pages(pid, kept.keeper.address, kept.keeper.pages)?);
    let pages_of = |block: u64| held.get(&block).copied().unwrap_or(0);
    let mut blocks = frames.blocks_of(away);
    blocks.sort_by_key(|block| std::cmp::Reverse(pages_of(*block)));
    let block = take_block(&blocks)?;
    let evicted = pages_of(block);
    ensure!(
        evicted > 0,
        "block {block} went, which held nothing; held by block: {held:?}"
    );
    kept.keeper.check()?;
    let after = by_node(&kept.keeper.nodes(&kept.frames)?);
    context.note(&format!(
        "block {block} of node {away} gone with {evicted} pages: pages by node {before:?}, then {after:?}"
    ));
    ensure!(
        after.values().sum::<u64>() == kept.keeper.pages,
        "pages are missing: {after:?}"
    );
    // Going on may work (other blocks have room) or wait; it must not lose anything.
    let on = kept.driver.platform.advance(&record, Direction::Apply);
    ensure!(
        matches!(
            on,
            Ok(_) | Err(PlatformError::Busy { .. } | PlatformError::Conflict { .. })
        ),
        "going on without the block: {on:?}"
    );
    kept.keeper.check()?;
    kept.driver.undo(&record)?;
    kept.keeper.check()?;
    write(
        format!("/sys/devices/system/memory/memory{block}/state"),
        "online_movable",
    )?;
    let (masks, nodes) = kept.found()?;
    let left = by_node(&nodes).get(&away).copied().unwrap_or(0);
    ensure!(left == 0, "{left} pages stayed on node {away}");
    ensure!(masks == found, "masks are {masks:?}, found {found:?}");
    Ok(())
}

/// Takes the first of these memory blocks away that the kernel lets go, and returns its number. It refuses those that hold
/// its own data, and now and then others while somebody holds a page of them.
fn take_block(blocks: &[u64]) -> Result<u64, Failure> {
    let mut said = Vec::new();
    for _ in 0..TAKE_TRIES {
        said.clear();
        for block in blocks {
            let path = format!("/sys/devices/system/memory/memory{block}/state");
            match write(&path, "offline") {
                Ok(()) => {
                    let state = text(&path)?;
                    ensure!(state == "offline", "block {block} is {state}");
                    return Ok(*block);
                }
                Err(failure) => said.push(failure.to_string()),
            }
        }
        std::thread::sleep(TAKE_WAIT);
    }
    Err(Failure::Broken(format!(
        "the kernel lets no memory block go: {said:?}"
    )))
}
