//! Large pages on this kernel: Debian's has no `PAGEMAP_SCAN`, so the older way to look at page tables is used here.

use super::Context;
use crate::driver::{Driver, Patient};
use crate::instruments::rollup_kib;
use crate::keeper::Keeper;
use crate::{Failure, crash, ensure};
use homeostat_kernel::Root;
use homeostat_linux::LinuxPlatform;
use homeostat_model::action::{MemoryTarget, Target};
use homeostat_model::{Action, ActionId, WorkloadId};
use homeostat_platform::{Sensors, conformance};
use homeostat_store::JournalOptions;
use std::collections::BTreeMap;

const MIB: u64 = 32;

fn action(keeper: &Keeper, workload: WorkloadId) -> Action {
    Action {
        id: ActionId(1),
        effector: "large_pages".into(),
        workload,
        target: Target::Memory(vec![MemoryTarget {
            process: keeper.process,
            pieces: keeper.pieces(),
        }]),
        // The emulated machine is small, and nobody waits for its memory.
        arguments: BTreeMap::from([
            ("duty".to_owned(), "1".to_owned()),
            ("free_memory_min".to_owned(), "0".to_owned()),
        ]),
        why: "scenario".into(),
    }
}

/// Base and large pages of a process, in KiB.
fn pages(keeper: &Keeper) -> Result<(u64, u64), Failure> {
    Ok((
        rollup_kib(keeper.pid(), "Anonymous")?,
        rollup_kib(keeper.pid(), "AnonHugePages")?,
    ))
}

/// The promises of every platform's effectors; then: all pieces converted, and all taken back.
pub(super) fn come_and_go(context: &Context) -> Result<(), Failure> {
    let mut keeper = Keeper::start(MIB, &context.expected.cpus_of(0), 2)?;
    keeper.check()?;
    let found = pages(&keeper)?;
    ensure!(found.1 == 0, "{} KiB on large pages from the start", found.1);
    let mut driver = Driver::open(&context.directory.join("journal"), JournalOptions::default())?;
    let workload = driver.workload_of(keeper.pid())?;
    let action = action(&keeper, workload.id);

    let mut fresh = LinuxPlatform::new(Root::default());
    fresh
        .machine()
        .map_err(Failure::platform("describing the machine"))?;
    let broken = conformance::acting(
        &mut Patient(&mut driver.platform),
        &mut Patient(&mut fresh),
        &action,
    );
    ensure!(broken.is_empty(), "broken promises: {broken:?}");
    ensure!(
        pages(&keeper)? == found,
        "after the conformance suite: {:?}, found {found:?}",
        pages(&keeper)?
    );

    let record = driver.intend(&action)?;
    driver.apply(&record)?;
    let on = pages(&keeper)?;
    ensure!(
        on.1 >= MIB * 1024 * 9 / 10,
        "only {} of {} KiB became large pages",
        on.1,
        MIB * 1024
    );
    keeper.check()?;
    driver.undo(&record)?;
    ensure!(
        pages(&keeper)? == found,
        "after the undo: {:?}, found {found:?}",
        pages(&keeper)?
    );
    keeper.check()
}

/// kill -9 at every step of the journal.
pub(super) fn killed_at_every_step(context: &Context) -> Result<(), Failure> {
    let mut keeper = Keeper::start(MIB, &context.expected.cpus_of(0), 1)?;
    keeper.check()?;
    let mut driver = Driver::open(&context.directory.join("journal"), JournalOptions::default())?;
    let workload = driver.workload_of(keeper.pid())?;
    let action = action(&keeper, workload.id);
    let died = crash::at_every_step(&action, &context.directory, || {
        keeper.check()?;
        pages(&keeper)
    })?;
    context.note(&format!("killed at {died} points"));
    Ok(())
}
