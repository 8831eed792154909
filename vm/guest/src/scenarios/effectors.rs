//! The effectors that no other scenario drives by themselves: settings of the host, the limit of a reader's control group, the
//! dropping of what a reader left behind. Each is made, killed at every step of the journal, and put back. An emulated
//! processor has no register of prefetchers: that effector must refuse, and say why.

use super::Context;
use super::groups::Group;
use crate::driver::Driver;
use crate::instruments::text;
use crate::keeper::Keeper;
use crate::{Failure, crash, ensure};
use homeostat_model::action::{FileReader, Target};
use homeostat_model::{Action, ActionId, Bytes, CpuId, WorkloadId};
use homeostat_store::JournalOptions;
use std::collections::BTreeMap;

const BALANCING: &str = "/proc/sys/kernel/numa_balancing";
const SWAPPINESS: &str = "/proc/sys/vm/swappiness";
/// None that a Debian has.
const SWAPPINESS_WANTED: &str = "33";
/// Enough for a keeper of 8 MiB with its program.
const LIMIT_MIB: u64 = 64;

fn action(effector: &str, workload: &WorkloadId, target: Target, value: Option<&str>) -> Action {
    Action {
        id: ActionId(1),
        effector: effector.into(),
        workload: workload.clone(),
        target,
        arguments: value
            .map(|value| BTreeMap::from([("value".to_owned(), value.to_owned())]))
            .unwrap_or_default(),
        why: "scenario".into(),
    }
}

/// A value of the host goes to what is wanted and comes back: by undo, and after kill -9 at every step.
pub(super) fn settings_killed_at_every_step(context: &Context) -> Result<(), Failure> {
    let mut keeper = Keeper::start(8, &context.expected.cpus_of(0), 1)?;
    keeper.check()?;
    let journal = context.directory.join("journal");
    let mut driver = Driver::open(&journal, JournalOptions::default())?;
    let workload = driver.workload_of(keeper.pid())?.id;
    let other = if text(BALANCING)?.trim() == "0" { "1" } else { "0" };
    for (effector, file, value) in [
        ("setting", SWAPPINESS, SWAPPINESS_WANTED),
        ("numa_balancing", BALANCING, other),
    ] {
        let found = text(file)?;
        let action = action(effector, &workload, Target::Files(vec![file.into()]), Some(value));
        let record = driver.intend(&action)?;
        driver.apply(&record)?;
        ensure!(
            text(file)?.trim() == value,
            "{file} is {}, wanted {value}",
            text(file)?
        );
        driver.undo(&record)?;
        ensure!(
            text(file)? == found,
            "after the undo {file} is {}, found {found}",
            text(file)?
        );
        let died = crash::at_every_step(&action, &context.directory.join(effector), || text(file))?;
        context.note(&format!("{effector}: killed at {died} points"));
    }
    Ok(())
}

/// A reader's group is limited and let go again; then what it read is dropped for a while, which leaves nothing to put back.
pub(super) fn reader_limited_killed_at_every_step(context: &Context) -> Result<(), Failure> {
    let cpus = context.expected.cpus_of(0);
    let (protected, limited) = (Group::make("protected.service")?, Group::make("copying.service")?);
    let mut keepers = [Keeper::start(8, &cpus, 1)?, Keeper::start(8, &cpus, 1)?];
    for (group, keeper) in [&protected, &limited].into_iter().zip(&mut keepers) {
        group.enter(keeper.pid())?;
        keeper.check()?;
    }
    let mut driver = Driver::open(&context.directory.join("journal"), JournalOptions::default())?;
    let workload = driver.workload_of(keepers[0].pid())?.id;
    let reader = FileReader {
        workload: driver.workload_of(keepers[1].pid())?.id,
        processes: vec![keepers[1].process],
        limit: Bytes::from_mib(LIMIT_MIB),
    };
    let limits = || -> Result<Vec<String>, Failure> {
        ["memory.high", "memory.max", "memory.low", "cgroup.procs"]
            .iter()
            .map(|name| limited.get(name))
            .collect()
    };
    for effector in ["memory_containment", "page_dropping"] {
        let found = limits()?;
        let action = action(effector, &workload, Target::Reader(reader.clone()), None);
        let record = driver.intend(&action)?;
        driver.apply(&record)?;
        let limit = limited.get("memory.high")?;
        let wanted = if effector == "memory_containment" {
            Bytes::from_mib(LIMIT_MIB).0.to_string()
        } else {
            "max".into()
        };
        ensure!(
            limit.trim() == wanted,
            "{effector}: memory.high is {limit}, wanted {wanted}"
        );
        driver.undo(&record)?;
        ensure!(
            limits()? == found,
            "{effector}: after the undo {:?}, found {found:?}",
            limits()?
        );
        let died = crash::at_every_step(&action, &context.directory.join(effector), limits)?;
        context.note(&format!("{effector}: killed at {died} points"));
    }
    for keeper in &mut keepers {
        keeper.check()?;
    }
    Ok(())
}

/// No register of prefetchers: nothing is begun, and the reason names what is missing.
pub(super) fn prefetch_declined(context: &Context) -> Result<(), Failure> {
    let keeper = Keeper::start(8, &context.expected.cpus_of(0), 1)?;
    let mut driver = Driver::open(&context.directory.join("journal"), JournalOptions::default())?;
    let workload = driver.workload_of(keeper.pid())?.id;
    let cpus = context.expected.cpus().into_iter().map(CpuId).collect();
    match driver.intend(&action("prefetch", &workload, Target::Cpus(cpus), None)) {
        Ok(record) => Err(Failure::Broken(format!("prefetch begins here: {record:?}"))),
        Err(why) => {
            let why = why.to_string();
            ensure!(
                ["hypervisor", "virtual", "processor", "/dev/cpu", "msr"]
                    .iter()
                    .any(|word| why.contains(word)),
                "prefetch is declined without the reason: {why}"
            );
            context.note(&why);
            Ok(())
        }
    }
}
