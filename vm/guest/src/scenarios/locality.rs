//! What the sensor of places says is what the kernel says, and what `numastat` makes of it.

use super::Context;
use super::groups::Group;
use super::placement::two_nodes;
use crate::driver::Driver;
use crate::instruments::{PAGE, Pages, numa_maps, numa_maps_by_kind, numastat};
use crate::keeper::Keeper;
use crate::{Failure, ensure};
use homeostat_model::{NodeId, Places, WorkloadId};
use homeostat_platform::PlatformError;
use homeostat_store::JournalOptions;
use std::collections::BTreeMap;
use std::time::Duration;

/// How far the figures may be apart, relative.
const APART_MAX: f64 = 0.01;
/// A node that holds less of a process than this says nothing about per cents: the figures must agree within it.
const LITTLE: f64 = 64.0 * 1024.0;
/// Looks until everything has been read: an emulated CPU reads one process in the time that one look may take.
const LOOKS_MAX: u32 = 40;
const LOOK_WAIT: Duration = Duration::from_millis(250);
/// All processes were read, and nothing was taken to lie like the rest.
const COVERED_MIN: f64 = 0.999;
const MIB: f64 = 1024.0 * 1024.0;

/// Memory by node of one process against `/proc/PID/numa_maps` and `numastat -p`; then of a unit of two processes, one on
/// each node, whose files count once.
pub(super) fn agrees_with_the_kernel(context: &Context) -> Result<(), Failure> {
    let (home, away) = two_nodes(context)?;
    let group = Group::make("kept.service")?;
    let first = Keeper::start(48, &context.expected.cpus_of(home), 1)?;
    group.enter(first.pid())?;
    let mut driver = Driver::open(&context.directory.join("journal"), JournalOptions::default())?;

    let workload = driver.workload_of(first.pid())?.id;
    let told = by_node(&look(&mut driver, &workload)?, |m| m.total().0);
    let of_kernel = bytes(&numa_maps(first.pid())?);
    compare(context, "one process, numa_maps", &told, &of_kernel)?;
    let of_numastat = numastat(first.pid())?;
    let of_numastat = of_numastat
        .into_iter()
        .map(|(node, mib)| (node, mib * MIB))
        .collect();
    compare(context, "one process, numastat -p", &told, &of_numastat)?;

    let second = Keeper::start(32, &context.expected.cpus_of(away), 2)?;
    group.enter(second.pid())?;
    let both = driver.workload_of(second.pid())?;
    ensure!(
        both.id == workload && both.processes.len() == 2,
        "{} has {} processes",
        both.id,
        both.processes.len()
    );
    let places = look(&mut driver, &workload)?;
    let (mut private, files) = numa_maps_by_kind(first.pid())?;
    let (private_too, files_too) = numa_maps_by_kind(second.pid())?;
    for (node, pages) in private_too {
        *private.entry(node).or_default() += pages;
    }
    let told = by_node(&places, |m| m.anonymous.0);
    compare(context, "two processes, private", &told, &bytes(&private))?;
    let told = by_node(&places, |m| m.file.0);
    let most = [files, files_too]
        .into_iter()
        .max_by_key(|f| f.values().sum::<u64>());
    compare(
        context,
        "two processes, files once",
        &told,
        &bytes(&most.unwrap_or_default()),
    )?;
    ensure!(places.bound.is_none(), "said to be bound: {:?}", places.bound);
    Ok(())
}

/// Looks until all processes have been read.
fn look(driver: &mut Driver, workload: &WorkloadId) -> Result<Places, Failure> {
    let mut last = String::new();
    for _ in 0..LOOKS_MAX {
        match driver.platform.look_at_places(workload) {
            Ok(places) if places.memory_covered >= COVERED_MIN => return Ok(places),
            Ok(places) => last = format!("covered {:.3}", places.memory_covered),
            Err(busy @ PlatformError::Busy { .. }) => last = busy.to_string(),
            Err(fault) => return Err(Failure::platform("looking where it is")(fault)),
        }
        std::thread::sleep(LOOK_WAIT);
    }
    Err(Failure::Broken(format!(
        "not all of {workload} was read in {LOOKS_MAX} looks: {last}"
    )))
}

fn by_node(places: &Places, amount: impl Fn(&homeostat_model::MemoryByKind) -> u64) -> BTreeMap<u32, f64> {
    let amounts = places
        .memory
        .iter()
        .map(|(NodeId(node), m)| (*node, amount(m) as f64));
    amounts.collect()
}

fn bytes(pages: &Pages) -> BTreeMap<u32, f64> {
    pages.iter().map(|(node, n)| (*node, (n * PAGE) as f64)).collect()
}

fn compare(
    context: &Context,
    what: &str,
    told: &BTreeMap<u32, f64>,
    wanted: &BTreeMap<u32, f64>,
) -> Result<(), Failure> {
    let nodes = || told.keys().chain(wanted.keys());
    let of = |by: &BTreeMap<u32, f64>, node: u32| by.get(&node).copied().unwrap_or(0.0);
    let mut words = Vec::new();
    for node in nodes().collect::<std::collections::BTreeSet<_>>() {
        let (told, wanted) = (of(told, *node), of(wanted, *node));
        let apart = (told - wanted).abs();
        words.push(format!(
            "node {node} {:.0} and {:.0} KiB ({:.2} % apart)",
            told / 1024.0,
            wanted / 1024.0,
            apart / wanted.max(1.0) * 100.0
        ));
        ensure!(
            apart <= (wanted * APART_MAX).max(LITTLE),
            "{what}: node {node} has {told:.0} bytes, and {wanted:.0} are there"
        );
    }
    context.note(&format!("{what}: {}", words.join(", ")));
    Ok(())
}
