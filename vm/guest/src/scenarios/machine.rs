//! What homeostat says about the machine is what was built.

use super::Context;
use crate::instruments::numbers_in;
use crate::{Failure, ensure};
use homeostat_kernel::Root;
use homeostat_linux::LinuxPlatform;
use homeostat_platform::{Sensors, conformance};
use std::collections::{BTreeMap, BTreeSet};

/// Memory that firmware and kernel keep from a node: less is told than was built.
const KEPT_SHARE_MAX: f64 = 0.35;

/// CPUs, nodes, memory, distances and caches as built.
pub(super) fn topology(context: &Context) -> Result<(), Failure> {
    let expected = &context.expected;
    let machine = LinuxPlatform::new(Root::default())
        .machine()
        .map_err(Failure::platform("describing the machine"))?;
    // The kernel must have taken what QEMU offered: else the scenario proves nothing.
    let online = numbers_in("/sys/devices/system/node/online")?;
    ensure!(
        online == expected.nodes.keys().copied().collect(),
        "the kernel has nodes {online:?}"
    );

    let cpus: BTreeSet<u32> = machine.cpus.iter().map(|c| c.id.0).collect();
    ensure!(
        cpus == expected.cpus(),
        "CPUs {cpus:?}, built {:?}",
        expected.cpus()
    );
    let ids: BTreeSet<u32> = machine.nodes.iter().map(|n| n.id.0).collect();
    ensure!(ids == online, "nodes {ids:?}, built {online:?}");
    for (id, built) in &expected.nodes {
        let on: BTreeSet<u32> = machine
            .cpus
            .iter()
            .filter(|c| c.node.0 == *id)
            .map(|c| c.id.0)
            .collect();
        ensure!(
            on == built.cpus,
            "node {id} has CPUs {on:?}, built {:?}",
            built.cpus
        );
        let told = machine
            .nodes
            .iter()
            .find(|n| n.id.0 == *id)
            .map_or(0.0, |n| n.memory.as_mib_f64());
        let most = built.mib as f64;
        ensure!(
            told <= most && told >= most * (1.0 - KEPT_SHARE_MAX),
            "node {id} has {told:.0} MiB, built {most:.0}"
        );
    }
    for (node, row) in machine.nodes.iter().zip(&expected.distances) {
        ensure!(
            node.distances == *row,
            "node {} is {:?} away, built {row:?}",
            node.id,
            node.distances
        );
    }
    let mut caches: BTreeMap<u32, BTreeSet<u32>> = BTreeMap::new();
    for cpu in &machine.cpus {
        caches.entry(cpu.llc.0).or_default().insert(cpu.id.0);
    }
    let caches: BTreeSet<BTreeSet<u32>> = caches.into_values().collect();
    ensure!(
        caches == expected.caches,
        "caches are shared by {caches:?}, built {:?}",
        expected.caches
    );
    context.note(&format!("kernel {}, {}", machine.kernel, machine.cpu_model));
    Ok(())
}

/// The promises of every platform's sensors.
pub(super) fn sensing(_: &Context) -> Result<(), Failure> {
    let broken = conformance::sensing(&mut LinuxPlatform::new(Root::default()));
    ensure!(broken.is_empty(), "broken promises: {broken:?}");
    Ok(())
}
