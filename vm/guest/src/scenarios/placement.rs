//! Threads to the CPUs of a node, memory to the node; and everything back.
//!
//! The keepers start badly placed: their memory lies on one node because that is where it was touched first, and their
//! threads may run anywhere. No memory policy and no mask of a person is involved.

use super::Context;
use super::groups::Group;
use crate::driver::{Driver, Patient, Watch};
use crate::instruments::{Frames, Masks, PAGE, by_node, masks, numa_maps};
use crate::keeper::Keeper;
use crate::{Failure, crash, ensure};
use homeostat_kernel::Root;
use homeostat_linux::LinuxPlatform;
use homeostat_model::action::{PageMove, Target};
use homeostat_model::{Action, ActionId, Bytes, CpuId, Direction, NodeId, Progress, WorkloadId};
use homeostat_platform::{Sensors, conformance};
use homeostat_store::JournalOptions;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

/// Memory of a keeper in MiB.
pub(super) const MIB: u64 = 32;
const SMALL_MIB: u64 = 8;
/// Its threads besides the main one.
pub(super) const THREADS: u32 = 3;
/// Share of the pages that must arrive.
const ARRIVED_MIN: f64 = 0.99;

/// Keeps a workload's threads on these CPUs.
pub(super) fn threads_to(workload: WorkloadId, cpus: &BTreeSet<u32>) -> Action {
    Action {
        id: ActionId(1),
        effector: "thread_placement".into(),
        workload,
        target: Target::Cpus(cpus.iter().map(|c| CpuId(*c)).collect()),
        arguments: BTreeMap::new(),
        why: "scenario".into(),
    }
}

/// Moves so much of a workload's memory to a node, at most so many bytes per second.
pub(super) fn pages_to(workload: WorkloadId, node: u32, bytes: Bytes, bytes_per_second: u64) -> Action {
    Action {
        id: ActionId(1),
        effector: "page_placement".into(),
        workload,
        target: Target::Pages(PageMove {
            node: NodeId(node),
            bytes,
            shared: false,
        }),
        arguments: BTreeMap::from([
            ("bytes_per_second".to_owned(), bytes_per_second.to_string()),
            ("free_memory_min".to_owned(), "0".to_owned()),
            ("private_share_max".to_owned(), "1".to_owned()),
        ]),
        why: "scenario".into(),
    }
}

/// As fast as it goes.
pub(super) const UNPACED: u64 = 1 << 40;
/// More than a keeper has.
pub(super) const ALL: Bytes = Bytes::from_mib(1024);

/// Where a placement comes from and goes to: two nodes with memory, the goal with CPUs. `None` where there are not two.
pub(super) fn two_nodes(context: &Context) -> Result<(u32, u32), Failure> {
    let nodes = &context.expected.nodes;
    let home = nodes
        .iter()
        .find(|(_, n)| n.mib > 0 && !n.cpus.is_empty())
        .map(|(id, _)| *id);
    let away = nodes
        .iter()
        .rfind(|(_, n)| n.mib > 0 && !n.cpus.is_empty())
        .map(|(id, _)| *id);
    match (home, away) {
        (Some(home), Some(away)) if home != away => Ok((home, away)),
        _ => Err(Failure::Broken(
            "this shape has no two nodes with memory and CPUs".into(),
        )),
    }
}

/// A keeper in a unit of its own, with its memory on the CPUs' node.
pub(super) struct Kept {
    pub(super) keeper: Keeper,
    pub(super) driver: Driver,
    pub(super) workload: WorkloadId,
    pub(super) frames: Frames,
    // Dropped last: the group cannot be removed before its process is gone.
    _group: Option<Group>,
}

/// Starts a keeper whose memory lies on `node`, alone in a unit when `unit`.
pub(super) fn kept_on(context: &Context, node: u32, unit: bool) -> Result<Kept, Failure> {
    let keeper = Keeper::start(MIB, &context.expected.cpus_of(node), THREADS)?;
    kept(context, keeper, node, unit)
}

/// The same with less memory, alone in a unit: for what is done a few dozen times.
fn small_on(context: &Context, node: u32) -> Result<Kept, Failure> {
    let keeper = Keeper::start(SMALL_MIB, &context.expected.cpus_of(node), THREADS)?;
    kept(context, keeper, node, true)
}

/// The same, alone in a unit, started by a person with `numactl --membind`.
pub(super) fn kept_bound(context: &Context, node: u32) -> Result<Kept, Failure> {
    let bind = format!("--membind={node}");
    let cpus = context.expected.cpus_of(node);
    let keeper = Keeper::start_under(&["numactl", &bind], MIB, &cpus, THREADS)?;
    kept(context, keeper, node, true)
}

fn kept(context: &Context, keeper: Keeper, node: u32, unit: bool) -> Result<Kept, Failure> {
    let frames = Frames::read()?;
    let group = if unit {
        Some(Group::make("kept.service")?)
    } else {
        None
    };
    if let Some(group) = &group {
        group.enter(keeper.pid())?;
    }
    let on = by_node(&keeper.nodes(&frames)?);
    ensure!(
        on == BTreeMap::from([(node, keeper.pages)]),
        "the keeper's {} pages lie at {on:?}, wanted on node {node}",
        keeper.pages
    );
    let mut driver = Driver::open(&context.directory.join("journal"), JournalOptions::default())?;
    let workload = driver.workload_of(keeper.pid())?.id;
    Ok(Kept {
        keeper,
        driver,
        workload,
        frames,
        _group: group,
    })
}

impl Kept {
    /// Masks by thread, and the node of each page.
    pub(super) fn found(&self) -> Result<(Masks, Vec<Option<u32>>), Failure> {
        Ok((masks(self.keeper.pid())?, self.keeper.nodes(&self.frames)?))
    }
}

/// Broken promises of the effector on this action, under a number that no journal gives: numbers are never used twice.
fn conform(kept: &mut Kept, action: &Action) -> Result<Vec<String>, Failure> {
    let mut action = action.clone();
    // Older than the one that follows: it is undone by another's hands, and must not seem to lie over that.
    action.id = ActionId(0);
    Ok(conformance::acting(
        &mut Patient(&mut kept.driver.platform),
        &mut Patient(&mut fresh()?),
        &action,
    ))
}

fn fresh() -> Result<LinuxPlatform, Failure> {
    let mut fresh = LinuxPlatform::new(Root::default());
    fresh
        .machine()
        .map_err(Failure::platform("describing the machine"))?;
    Ok(fresh)
}

fn differ<K: Ord + Copy + std::fmt::Debug, V: PartialEq + std::fmt::Debug>(
    now: &BTreeMap<K, V>,
    wanted: impl Fn(&K, &V) -> bool,
) -> Vec<K> {
    now.iter()
        .filter(|(k, v)| !wanted(k, v))
        .map(|(k, _)| *k)
        .collect()
}

/// The promises of every platform's effectors; every thread goes where it shall, so do those born later, and all come
/// back to their masks.
pub(super) fn threads_come_and_go(context: &Context) -> Result<(), Failure> {
    let nodes = &context.expected.nodes;
    let (home, _) = nodes
        .iter()
        .rfind(|(_, n)| !n.cpus.is_empty())
        .ok_or_else(|| Failure::Broken("no node has CPUs".into()))?;
    threads_to_and_fro(context, &context.expected.cpus_of(*home))
}

/// The same to one of the last-level caches of a node.
pub(super) fn threads_share_a_cache(context: &Context) -> Result<(), Failure> {
    let cache = context
        .expected
        .caches
        .last()
        .ok_or_else(|| Failure::Broken("no cache".into()))?;
    threads_to_and_fro(context, cache)
}

fn threads_to_and_fro(context: &Context, cpus: &BTreeSet<u32>) -> Result<(), Failure> {
    for unit in [false, true] {
        let mut kept = kept_on(context, 0, unit)?;
        let found = masks(kept.keeper.pid())?;
        let all = context.expected.cpus();
        ensure!(
            differ(&found, |_, mask| *mask == all).is_empty(),
            "the keeper's threads start on {found:?}"
        );
        let action = threads_to(kept.workload.clone(), cpus);
        let broken = conform(&mut kept, &action)?;
        ensure!(
            broken.is_empty(),
            "broken promises (in a unit: {unit}): {broken:?}"
        );
        let after = masks(kept.keeper.pid())?;
        ensure!(
            after == found,
            "after the conformance suite {after:?}, found {found:?}"
        );

        let record = kept.driver.intend(&action)?;
        ensure!(masks(kept.keeper.pid())? == found, "preparing changed the masks");
        let progress = kept.driver.apply(&record)?;
        ensure!(progress.verified, "the placement was not verified: {progress:?}");
        let newcomer = kept.keeper.thread()?;
        let placed = masks(kept.keeper.pid())?;
        ensure!(
            placed.contains_key(&newcomer) && placed.len() == found.len() + 1,
            "thread {newcomer} is not among {placed:?}"
        );
        let strays = differ(&placed, |_, mask| mask == cpus);
        ensure!(
            strays.is_empty(),
            "threads {strays:?} are not on {cpus:?}: {placed:?}"
        );
        kept.driver.undo(&record)?;
        let after = masks(kept.keeper.pid())?;
        let strays = differ(&after, |tid, mask| found.get(tid).unwrap_or(&all) == mask);
        ensure!(
            strays.is_empty(),
            "threads {strays:?} did not get back their mask: {after:?}, found {found:?}"
        );
        kept.keeper.check()?;
    }
    Ok(())
}

/// The promises of every platform's effectors; then memory moves to the other node in steps, and back page by page.
pub(super) fn pages_come_and_go(context: &Context) -> Result<(), Failure> {
    let (home, away) = two_nodes(context)?;
    pages_to_and_fro(context, away, home)
}

/// To a node that has memory and no CPUs, and back.
pub(super) fn pages_to_a_node_without_cpus(context: &Context) -> Result<(), Failure> {
    let far = context
        .expected
        .nodes
        .iter()
        .find(|(_, n)| n.cpus.is_empty() && n.mib > 0);
    let (far, _) = far.ok_or_else(|| Failure::Broken("no node is without CPUs".into()))?;
    pages_to_and_fro(context, 0, *far)
}

fn pages_to_and_fro(context: &Context, from: u32, to: u32) -> Result<(), Failure> {
    let mut kept = kept_on(context, from, true)?;
    let found = kept.found()?;
    let action = pages_to(kept.workload.clone(), to, ALL, UNPACED);
    let broken = conform(&mut kept, &action)?;
    ensure!(broken.is_empty(), "broken promises: {broken:?}");
    ensure!(
        kept.found()? == found,
        "after the conformance suite pages are elsewhere"
    );
    kept.keeper.check()?;

    // Paced, so that the way can be seen.
    let action = pages_to(kept.workload.clone(), to, ALL, (MIB << 20) / 2);
    let record = kept.driver.intend(&action)?;
    ensure!(kept.found()? == found, "preparing moved pages");
    let (keeper, frames) = (&kept.keeper, &kept.frames);
    let share = || -> Result<f64, Failure> {
        let there = by_node(&keeper.nodes(frames)?).get(&to).copied().unwrap_or(0);
        Ok(there as f64 / keeper.pages as f64)
    };
    let mut curve = Vec::new();
    let begin = Instant::now();
    kept.driver.drive(&record, Direction::Apply, |_| {
        let now = share()?;
        // A point for each further tenth.
        if now >= 0.1 * (curve.len() + 1) as f64 {
            curve.push(format!(
                "{:.0}%@{:.1}s",
                now * 100.0,
                begin.elapsed().as_secs_f64()
            ));
        }
        Ok(Watch::GoOn)
    })?;
    context.note(&format!("share of local pages: {}", curve.join(" ")));
    let arrived = share()?;
    ensure!(
        arrived >= ARRIVED_MIN,
        "only {:.1} % of the pages arrived",
        arrived * 100.0
    );
    kept.driver.journal.applied(record.action.id)?;
    kept.keeper.check()?;
    kept.driver.undo(&record)?;
    let after = kept.found()?;
    ensure!(
        after == found,
        "the undo left pages at {:?}, found {:?}",
        by_node(&after.1),
        by_node(&found.1)
    );
    kept.keeper.check()
}

/// kill -9 at every step of the journal while threads are placed.
pub(super) fn threads_killed_at_every_step(context: &Context) -> Result<(), Failure> {
    let (_, away) = two_nodes(context)?;
    let kept = small_on(context, 0)?;
    let action = threads_to(kept.workload.clone(), &context.expected.cpus_of(away));
    killed_at_every_step(context, kept, &action)
}

/// kill -9 at every step of the journal while pages move.
pub(super) fn pages_killed_at_every_step(context: &Context) -> Result<(), Failure> {
    let (home, away) = two_nodes(context)?;
    let kept = small_on(context, away)?;
    // Slow enough that the first slice is not all.
    let action = pages_to(kept.workload.clone(), home, ALL, 4 * (SMALL_MIB << 20));
    killed_at_every_step(context, kept, &action)
}

fn killed_at_every_step(context: &Context, mut kept: Kept, action: &Action) -> Result<(), Failure> {
    let died = crash::at_every_step(action, &context.directory, || {
        kept.keeper.check()?;
        kept.found()
    })?;
    context.note(&format!("killed at {died} points"));
    Ok(())
}

/// At no moment has more been moved than the budget allows since the beginning, but for one slice.
pub(super) fn pages_keep_to_their_budget(context: &Context) -> Result<(), Failure> {
    /// Bytes per second: the whole takes four seconds.
    const BUDGET: u64 = (MIB << 20) / 4;
    let (home, away) = two_nodes(context)?;
    let mut kept = kept_on(context, away, true)?;
    let action = pages_to(kept.workload.clone(), home, ALL, BUDGET);
    for direction in [Direction::Apply, Direction::Undo] {
        let owed = kept.driver.journal.owed().next().map(|owed| owed.record.clone());
        let record = match owed {
            Some(record) => record,
            None => kept.driver.intend(&action)?,
        };
        let goal = if direction == Direction::Apply { home } else { away };
        // All of the process, also what lies outside of the kept memory.
        let pid = kept.keeper.pid();
        let there =
            || -> Result<u64, Failure> { Ok(numa_maps(pid)?.get(&goal).copied().unwrap_or(0) * PAGE) };
        let before = there()?;
        let begin = Instant::now();
        let (mut slices, mut moved, mut largest, mut excess) = (0u32, 0u64, 0u64, 0i64);
        kept.driver.drive(&record, direction, |_: &Progress| {
            // What the slices before this one moved has had its pauses, so it must be within the budget by now.
            let allowed = (BUDGET as f64 * begin.elapsed().as_secs_f64()) as i64;
            excess = excess.max(moved as i64 - allowed);
            let now = there()?.saturating_sub(before);
            largest = largest.max(now.saturating_sub(moved));
            moved = now;
            slices += 1;
            Ok(Watch::GoOn)
        })?;
        let seconds = begin.elapsed().as_secs_f64();
        context.note(&format!(
            "{direction:?}: {} MiB in {seconds:.1} s in {slices} slices of at most {} KiB, budget {} MiB/s",
            moved >> 20,
            largest >> 10,
            BUDGET >> 20
        ));
        ensure!(
            excess <= 0,
            "{direction:?}: {excess} bytes more than the budget of {BUDGET} bytes per second allows"
        );
        ensure!(
            slices > 4,
            "{direction:?} took {slices} slices: too few to see a pace"
        );
    }
    Ok(())
}
