//! The shape of machines, from `fixtures/topologies`.
#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests")]

use homeostat_linux::Root;
use homeostat_linux::sensors::topology::{self, Online};
use homeostat_model::{Bytes, CacheKind, CpuId, DeviceKind, LlcId, NodeId, Topology};
use std::collections::BTreeSet;
use std::path::Path;

/// Puts a described machine up in a directory.
fn put_up(name: &str) -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    let file = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../fixtures/topologies")
        .join(format!("{name}.tree"));
    let text = std::fs::read_to_string(&file).unwrap_or_else(|e| panic!("{}: {e}", file.display()));
    for line in text.lines().filter(|l| !l.starts_with('#')) {
        let place = |path: &str| {
            let path = directory.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            path
        };
        if let Some((path, text)) = line.split_once('\t') {
            std::fs::write(place(path), text.replace("\\n", "\n") + "\n").unwrap();
        } else if let Some((path, target)) = line.split_once(" -> ") {
            std::os::unix::fs::symlink(target, place(path)).unwrap();
        } else {
            panic!("{name}: {line}");
        }
    }
    directory
}

fn shape(name: &str) -> Topology {
    let directory = put_up(name);
    topology::describe(&Root::new(directory.path())).unwrap()
}

fn ids(cpus: &[CpuId]) -> Vec<u32> {
    cpus.iter().map(|c| c.0).collect()
}

#[test]
fn a_hybrid_shows_its_kinds_of_cores_and_the_caches_that_each_has() {
    let t = shape("hybrid-3-kinds");
    let kinds: Vec<&str> = t.cpus.iter().map(|c| c.kind.as_deref().unwrap()).collect();
    assert_eq!(
        kinds,
        [["performance"; 4], ["efficiency"; 4]]
            .concat()
            .into_iter()
            .chain(["low_power"; 2])
            .collect::<Vec<_>>()
    );
    let cores: BTreeSet<u32> = t.cpus.iter().map(|c| c.core).collect();
    assert_eq!(cores.len(), 8, "two with two threads, six with one");
    let clusters: Vec<Option<u32>> = t.cpus.iter().map(|c| c.cluster).collect();
    assert_eq!(clusters[4..8], [Some(4); 4]);
    // The cluster of efficiency cores shares a second-level cache, the low-power cores have no third level.
    let of_cluster = t
        .caches
        .iter()
        .find(|c| c.level == 2 && c.cpus.len() == 4)
        .unwrap();
    assert_eq!((ids(&of_cluster.cpus), of_cluster.ways), (vec![4, 5, 6, 7], 16));
    let last: Vec<(u32, Vec<u32>)> = t
        .last_level_caches()
        .iter()
        .map(|c| (c.level, ids(&c.cpus)))
        .collect();
    assert_eq!(last, [(3, (0..8).collect()), (2, vec![8, 9])]);
    assert_eq!(
        t.caches
            .iter()
            .filter(|c| c.kind == CacheKind::Instruction)
            .count(),
        8
    );
    assert!(
        t.cpus
            .iter()
            .all(|c| c.die.is_none() && c.capacity.is_none() && !c.isolated && !c.tickless)
    );
    // The firmware does not tell where devices are.
    let devices: Vec<(DeviceKind, &str, Option<NodeId>)> = t
        .devices
        .iter()
        .map(|d| (d.kind, d.name.as_str(), d.node))
        .collect();
    assert_eq!(
        devices,
        [
            (DeviceKind::Block, "nvme0n1", None),
            (DeviceKind::Accelerator, "0000:00:02.0", None)
        ]
    );
}

#[test]
fn nodes_near_and_far_caches_and_devices_are_where_they_are() {
    let t = shape("server-4-nodes");
    assert_eq!(t.nodes.len(), 4);
    assert_eq!(ids(&t.nodes[1].cpus), [4, 5, 6, 7, 20, 21, 22, 23]);
    assert_eq!(t.nodes[1].distances[&NodeId(3)], 32);
    assert_eq!(t.nodes[2].free, Bytes::from_mib(38 << 10));
    let groups = t.near_groups();
    assert_eq!(groups, [[NodeId(0), NodeId(1)], [NodeId(2), NodeId(3)]]);
    assert_eq!(t.last_level_caches().len(), 8);
    assert_eq!(t.last_level_caches()[1].size, Bytes::from_mib(32));
    assert_eq!(ids(&t.offline), [32, 33]);
    let isolated: Vec<u32> = t
        .cpus
        .iter()
        .filter(|c| c.isolated && c.tickless)
        .map(|c| c.id.0)
        .collect();
    assert_eq!(isolated, [30, 31]);
    assert!(t.cpus.iter().all(|c| !c.partitioned));
    // A cluster that is a core says nothing.
    assert!(t.cpus.iter().all(|c| c.cluster.is_none() && c.die.is_none()));
    // Partitions, loop devices and the loopback interface are no devices at a place.
    let devices: Vec<(DeviceKind, &str, Option<u32>)> = t
        .devices
        .iter()
        .map(|d| (d.kind, d.name.as_str(), d.node.map(|n| n.0)))
        .collect();
    assert_eq!(
        devices,
        [
            (DeviceKind::Block, "nvme0n1", Some(2)),
            (DeviceKind::Network, "ens1f0", Some(1))
        ]
    );
}

#[test]
fn classes_of_memory_are_rated_and_tiered() {
    let t = shape("memory-classes");
    assert_eq!(
        t.nodes.iter().map(|n| n.cpus.len()).collect::<Vec<_>>(),
        [2, 2, 0, 0]
    );
    assert_eq!(
        t.nodes.iter().map(|n| n.tier).collect::<Vec<_>>(),
        [Some(4), Some(4), Some(2), Some(22)]
    );
    assert_eq!(t.tiers.iter().map(|t| t.id).collect::<Vec<_>>(), [2, 4, 22]);
    let fast = &t.nodes[2].access[1];
    assert_eq!(
        (fast.class, fast.initiators.as_slice()),
        (1, [NodeId(0)].as_slice())
    );
    assert_eq!(
        (fast.read_latency_ns, fast.read_bandwidth_mib_s),
        (Some(120), Some(400_000))
    );
    let slow = &t.nodes[3].access;
    assert_eq!(slow.len(), 1, "it has one class only");
    assert_eq!(
        (slow[0].write_latency_ns, slow[0].write_bandwidth_mib_s),
        (Some(260), None)
    );
    let side = &t.nodes[3].side_caches[0];
    assert_eq!(
        (side.level, side.size, side.line),
        (1, Bytes::from_mib(8 << 10), 64)
    );
    assert!(side.direct_mapped && side.write_back);
    assert_eq!(t.devices[0].node, Some(NodeId(1)));
}

#[test]
fn numbers_may_have_gaps_and_a_node_may_lack_memory_or_cpus() {
    let directory = put_up("sparse-numbers");
    let root = Root::new(directory.path());
    let t = topology::describe(&root).unwrap();
    assert_eq!(t.nodes.iter().map(|n| n.id.0).collect::<Vec<_>>(), [0, 8, 252]);
    assert_eq!(t.nodes[0].distances[&NodeId(252)], 80);
    assert_eq!((t.nodes[1].memory, t.nodes[1].cpus.len()), (Bytes::ZERO, 4));
    assert!(t.nodes[2].cpus.is_empty());
    let machine = topology::read(&root).unwrap();
    assert_eq!(
        machine.cpus.iter().find(|c| c.id == CpuId(9)).unwrap().node,
        NodeId(8)
    );
    assert_eq!(
        machine.cpus.iter().map(|c| c.core).collect::<BTreeSet<_>>().len(),
        2
    );
}

#[test]
fn what_is_not_described_is_not_guessed() {
    let directory = put_up("big-little");
    let root = Root::new(directory.path());
    let t = topology::describe(&root).unwrap();
    assert_eq!(
        t.cpus.iter().map(|c| c.capacity.unwrap()).collect::<Vec<_>>(),
        [446, 446, 446, 446, 1024, 1024]
    );
    assert_eq!(t.cpus[5].cluster, Some(4));
    assert!(t.caches.is_empty() && t.tiers.is_empty() && t.devices.is_empty());
    assert_eq!((t.nodes.len(), t.nodes[0].memory), (1, Bytes::from_mib(4096)));
    assert_eq!(t.last_level(), 0);
    // Caches that nobody describes divide nothing.
    let machine = topology::read(&root).unwrap();
    assert!(machine.cpus.iter().all(|c| c.llc == LlcId(0)));
}

#[test]
fn a_cpu_that_goes_is_noticed() {
    let directory = put_up("big-little");
    let root = Root::new(directory.path());
    let before = Online::read(&root);
    assert_eq!(before, Online::read(&root));
    std::fs::write(directory.path().join("sys/devices/system/cpu/online"), "0-4\n").unwrap();
    assert_ne!(before, Online::read(&root));
    assert_eq!(topology::read(&root).unwrap().cpus.len(), 5);
}

#[test]
fn captured_hosts_and_the_running_machine_can_be_described() {
    for host in [
        "server-2n2p-smt",
        "container-blind",
        "old-kernel-3.10",
        "small-vm",
    ] {
        let path = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("../../fixtures/hosts")
            .join(host);
        let t = topology::describe(&Root::new(path)).unwrap();
        assert!(!t.cpus.is_empty() && !t.nodes.is_empty(), "{host}");
    }
    let t = topology::describe(&Root::default()).unwrap();
    let known: BTreeSet<CpuId> = t.cpus.iter().map(|c| c.id).collect();
    for cache in &t.caches {
        assert!(cache.cpus.iter().any(|cpu| known.contains(cpu)), "{cache:?}");
    }
    assert!(t.nodes.iter().any(|n| n.memory.0 > 0));
}

/// The CPUs that are no room.
fn set_aside(root: &Root) -> Vec<u32> {
    let machine = topology::read(root).unwrap();
    let all = machine.cpus.iter().filter(|c| c.set_aside);
    all.map(|c| c.id.0).collect()
}

#[test]
fn cpus_that_were_set_aside_are_known_however_that_was_done() {
    let directory = put_up("server-4-nodes");
    let root = Root::new(directory.path());
    assert_eq!(set_aside(&root), [30, 31]);
    let machine = topology::read(&root).unwrap();
    assert_eq!(machine.general_cpus().count(), machine.cpus.len() - 2);
    // A kernel that can do without the tick and was not told to.
    let cpu = directory.path().join("sys/devices/system/cpu");
    std::fs::write(cpu.join("nohz_full"), "(null)\n").unwrap();
    assert_eq!(set_aside(&root), [30, 31]);
    std::fs::write(cpu.join("isolated"), "\n").unwrap();
    assert_eq!(set_aside(&root), Vec::<u32>::new());
    std::fs::write(cpu.join("nohz_full"), "8-9\n").unwrap();
    assert_eq!(set_aside(&root), [8, 9]);
    std::fs::write(cpu.join("nohz_full"), "\n").unwrap();

    // A partition of cpusets is made while we run, and is noticed.
    let before = Online::read(&root);
    let groups = directory.path().join("sys/fs/cgroup");
    std::fs::create_dir_all(&groups).unwrap();
    std::fs::write(groups.join("cpuset.cpus.effective"), "0-27\n").unwrap();
    assert_eq!(set_aside(&root), [28, 29, 30, 31]);
    assert_ne!(Online::read(&root), before);
    let t = topology::describe(&root).unwrap();
    let partitioned = t.cpus.iter().filter(|c| c.partitioned);
    assert_eq!(partitioned.map(|c| c.id.0).collect::<Vec<_>>(), [28, 29, 30, 31]);
    // A container that was given some CPUs sees a root of its own: the others are not known to be a partition's.
    std::fs::write(groups.join("cpuset.cpus"), "0-27\n").unwrap();
    assert_eq!(set_aside(&root), Vec::<u32>::new());
    std::fs::remove_file(groups.join("cpuset.cpus")).unwrap();
    std::fs::write(groups.join("cpuset.cpus.effective"), "rubbish\n").unwrap();
    assert_eq!(set_aside(&root), Vec::<u32>::new());
}
