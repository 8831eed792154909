//! The shape of machines, from `fixtures/topologies`.
#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests")]

use homeostat_kernel::Root;
use homeostat_model::{Bytes, CacheKind, CpuId, DeviceKind, LlcId, NodeId, Topology};
use homeostat_sensors::topology;
use homeostat_sensors::topology::Online;
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
    assert_eq!(t.nodes[2].free_bytes, Bytes::from_mib(38 << 10));
    let groups = t.near_groups();
    assert_eq!(groups, [[NodeId(0), NodeId(1)], [NodeId(2), NodeId(3)]]);
    assert_eq!(t.last_level_caches().len(), 8);
    assert_eq!(t.last_level_caches()[1].size_bytes, Bytes::from_mib(32));
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
        (side.level, side.size_bytes, side.line_bytes),
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
    assert_eq!((t.nodes[1].memory_bytes, t.nodes[1].cpus.len()), (Bytes::ZERO, 4));
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
    assert_eq!(
        (t.nodes.len(), t.nodes[0].memory_bytes),
        (1, Bytes::from_mib(4096))
    );
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
    assert!(t.nodes.iter().any(|n| n.memory_bytes.0 > 0));
}

/// A machine of as many CPUs, with what a test adds.
struct Made(tempfile::TempDir);

impl Made {
    fn new(cpus: u32) -> Self {
        let made = Self(tempfile::tempdir().unwrap());
        made.put("proc/meminfo", "MemTotal: 16384000 kB\n");
        made.put("sys/devices/system/cpu/online", &format!("0-{}\n", cpus - 1));
        made
    }

    fn put(&self, path: &str, text: &str) {
        let path = self.0.path().join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }

    fn root(&self) -> Root {
        Root::new(self.0.path())
    }
}

#[test]
fn a_cache_that_spans_nodes_is_one_domain_at_each() {
    let made = Made::new(8);
    for node in 0..2 {
        let base = format!("sys/devices/system/node/node{node}");
        made.put(&format!("{base}/cpulist"), ["0-3\n", "4-7\n"][node]);
        made.put(
            &format!("{base}/meminfo"),
            &format!("Node {node} MemTotal: 8192000 kB\n"),
        );
        made.put(&format!("{base}/distance"), ["10 20\n", "20 10\n"][node]);
    }
    for cpu in 0..8 {
        let base = format!("sys/devices/system/cpu/cpu{cpu}/cache/index0");
        made.put(&format!("{base}/level"), "3\n");
        made.put(&format!("{base}/type"), "Unified\n");
        made.put(&format!("{base}/size"), "32768K\n");
        made.put(&format!("{base}/shared_cpu_list"), "0-7\n");
    }
    let (machine, told) = topology::read_and_repair(&made.root()).unwrap();
    let domains: Vec<u32> = machine.cpus.iter().map(|c| c.llc.0).collect();
    assert_eq!(domains, [0, 0, 0, 0, 4, 4, 4, 4]);
    assert!(
        told.len() == 1 && told[0].contains("span memory nodes"),
        "{told:?}"
    );
    let shape = topology::describe(&made.root()).unwrap();
    let caches: Vec<(Vec<u32>, u64)> = shape
        .caches
        .iter()
        .map(|c| (ids(&c.cpus), c.size_bytes.0 >> 20))
        .collect();
    assert_eq!(caches, [(vec![0, 1, 2, 3], 16), (vec![4, 5, 6, 7], 16)]);
}

#[test]
fn compact_cores_are_told_from_full_ones_and_ranks_of_equal_cores_are_not_kinds() {
    let kinds = |rated: &[u32]| {
        let made = Made::new(rated.len() as u32);
        for (cpu, rated) in rated.iter().enumerate() {
            let path = format!("sys/devices/system/cpu/cpu{cpu}/acpi_cppc/highest_perf");
            made.put(&path, &format!("{rated}\n"));
        }
        let cpus = topology::describe(&made.root()).unwrap().cpus;
        cpus.into_iter().map(|c| c.kind).collect::<Vec<_>>()
    };
    let (full, compact) = (Some("performance".to_owned()), Some("compact".to_owned()));
    assert_eq!(
        kinds(&[208, 208, 119, 119]),
        [full.clone(), full, compact.clone(), compact]
    );
    assert_eq!(
        kinds(&[
            231, 226, 221, 216, 211, 206, 201, 196, 191, 186, 181, 176, 171, 166
        ]),
        vec![None; 14]
    );
    assert_eq!(kinds(&[196, 196, 0, 196]), vec![None; 4]);
}

#[test]
fn an_arm_machine_tells_its_pages_and_its_hypervisor_by_other_ways_than_x86() {
    let made = Made::new(2);
    let cpu = "processor\t: 0\nBogoMIPS\t: 2100.00\nFeatures\t: fp asimd\nCPU part\t: 0xd40\n";
    made.put("proc/cpuinfo", cpu);
    made.put("proc/sys/kernel/osrelease", "6.8.0-64k\n");
    made.put(
        "boot/config-6.8.0-64k",
        "CONFIG_ARM64=y\nCONFIG_ARM64_64K_PAGES=y\n",
    );
    let read = || topology::read(&made.root()).unwrap();
    assert_eq!((read().page_size, read().hypervisor), (Bytes(65_536), None));
    made.put("sys/class/dmi/id/sys_vendor", "Amazon EC2\n");
    made.put("sys/class/dmi/id/product_name", "m7g.xlarge\n");
    assert_eq!(read().hypervisor.as_deref(), Some("Amazon EC2 m7g.xlarge"));
    made.put("sys/class/dmi/id/product_name", "m7g.metal\n");
    assert_eq!(read().hypervisor, None, "a whole machine is rented");
    // By the device tree; and pages by their large page, by the configuration, and by a program.
    std::fs::remove_dir_all(made.0.path().join("sys/class/dmi")).unwrap();
    made.put("proc/device-tree/hypervisor/compatible", "linux,kvm\0");
    assert_eq!(read().hypervisor.as_deref(), Some("linux,kvm"));
    std::fs::remove_dir_all(made.0.path().join("boot")).unwrap();
    made.put("sys/kernel/mm/transparent_hugepage/hpage_pmd_size", "33554432\n");
    assert_eq!(read().page_size, Bytes(16_384));
    made.put("boot/config-6.8.0-64k", "CONFIG_PAGE_SHIFT=12\n");
    assert_eq!(read().page_size, Bytes(4096));
    let words = [33u64, 0x7fff_0000, 6, 65_536, 0, 0];
    let vector: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    std::fs::create_dir_all(made.0.path().join("proc/self")).unwrap();
    std::fs::write(made.0.path().join("proc/self/auxv"), vector).unwrap();
    assert_eq!(read().page_size, Bytes(65_536));
}

#[test]
fn memory_that_is_told_as_nothing_is_unknown_and_one_node_is_held_against_all() {
    let made = Made::new(1);
    let node = "sys/devices/system/node/node0/meminfo";
    made.put(node, "Node 0 MemTotal: 8192000 kB\n");
    let (machine, told) = topology::read_and_repair(&made.root()).unwrap();
    assert_eq!(machine.nodes[0].memory, Bytes::from_kib(16_384_000));
    assert!(
        told.len() == 1 && told[0].contains("the latter counts"),
        "{told:?}"
    );
    made.put(
        "proc/meminfo",
        "MemTotal:              0 kB\nMemFree:         -766260 kB\n",
    );
    let (machine, told) = topology::read_and_repair(&made.root()).unwrap();
    assert_eq!(
        (machine.memory, machine.nodes[0].memory),
        (Bytes::ZERO, Bytes::ZERO)
    );
    assert!(told.len() == 1 && told[0].contains("cannot be told"), "{told:?}");
    assert!(
        topology::read(&made.root()).is_err(),
        "nothing is decided on such a machine"
    );
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
