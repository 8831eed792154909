//! What a person set is left alone, before and after.

use super::Context;
use super::placement::{ALL, Kept, UNPACED, kept_on, pages_to, threads_to, two_nodes};
use crate::driver::Patient;
use crate::instruments::{list, masks};
use crate::keeper::program;
use crate::{Failure, ensure};
use homeostat_model::Direction;
use homeostat_platform::{Effectors, PlatformError};
use std::collections::BTreeSet;
use std::process::Command;

/// Does what a person does: `taskset -p -c CPUS TID`.
pub(super) fn taskset(tid: i32, cpus: &BTreeSet<u32>) -> Result<(), Failure> {
    let output = Command::new(program("taskset")?)
        .args(["-p", "-c", &list(cpus), &tid.to_string()])
        .output()
        .map_err(Failure::system("starting taskset"))?;
    ensure!(
        output.status.success(),
        "taskset: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(())
}

fn one(cpus: &BTreeSet<u32>) -> BTreeSet<u32> {
    cpus.iter().rev().take(1).copied().collect()
}

/// A refusal because of a person, and nothing changed.
fn refused(kept: &mut Kept, action: &homeostat_model::Action, why: &str) -> Result<(), Failure> {
    let found = kept.found()?;
    match Patient(&mut kept.driver.platform).prepare(action) {
        Err(PlatformError::Conflict { .. }) => {}
        other => {
            return Err(Failure::Broken(format!(
                "{} {why}: expected a conflict, got {other:?}",
                action.effector
            )));
        }
    }
    ensure!(
        kept.found()? == found,
        "{} {why}: refused, and changed something",
        action.effector
    );
    Ok(())
}

/// `taskset` before: threads are not placed.
pub(super) fn bound_before(context: &Context) -> Result<(), Failure> {
    let (home, away) = two_nodes(context)?;
    let mut kept = kept_on(context, away, true)?;
    let pid = kept.keeper.pid();
    for tid in masks(pid)?.into_keys() {
        taskset(tid, &one(&context.expected.cpus_of(away)))?;
    }
    let to_home = threads_to(kept.workload.clone(), &context.expected.cpus_of(home));
    refused(&mut kept, &to_home, "of a program that taskset bound")?;
    kept.keeper.check()
}

/// `numactl --membind` before: pages are not moved.
pub(super) fn memory_bound_before(context: &Context) -> Result<(), Failure> {
    let (home, away) = two_nodes(context)?;
    let mut kept = super::placement::kept_bound(context, away)?;
    let pages = pages_to(kept.workload.clone(), home, ALL, UNPACED);
    refused(&mut kept, &pages, "of a program that numactl bound")?;
    kept.keeper.check()
}

/// `taskset` while a placement is in force: theirs stays, on that thread and after the undo; the others get back what
/// was found.
pub(super) fn bound_after(context: &Context) -> Result<(), Failure> {
    let (home, away) = two_nodes(context)?;
    let mut kept = kept_on(context, away, true)?;
    let pid = kept.keeper.pid();
    let (found, _) = kept.found()?;
    let action = threads_to(kept.workload.clone(), &context.expected.cpus_of(home));
    let record = kept.driver.intend(&action)?;
    kept.driver.apply(&record)?;
    let chosen = found
        .keys()
        .copied()
        .find(|tid| *tid != pid)
        .ok_or_else(|| Failure::Broken("the keeper has one thread".into()))?;
    let theirs = one(&context.expected.cpus_of(away));
    taskset(chosen, &theirs)?;
    // Applied again, as a trial does in each block that is on: the person's thread is not taken back.
    let again = Patient(&mut kept.driver.platform).advance(&record, Direction::Apply);
    ensure!(
        matches!(again, Err(PlatformError::Conflict { .. }) | Ok(_)),
        "placing again after taskset: {again:?}"
    );
    let now = masks(pid)?;
    ensure!(
        now.get(&chosen) == Some(&theirs),
        "thread {chosen} was taken from the person: {now:?}"
    );
    kept.driver.undo(&record)?;
    let after = masks(pid)?;
    for (tid, mask) in &found {
        let wanted = if *tid == chosen { &theirs } else { mask };
        ensure!(
            after.get(tid) == Some(wanted),
            "after the undo thread {tid} runs on {:?}, wanted {wanted:?}",
            after.get(tid)
        );
    }
    kept.keeper.check()
}
