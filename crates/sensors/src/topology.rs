//! The shape of the machine: CPUs, cores, packages, last-level caches, NUMA nodes and their distances.
//!
//! Sources: `/sys/devices/system/{cpu,node}` (Linux Documentation/admin-guide/cputopology.rst,
//! ABI/stable/sysfs-devices-node), `/proc/cpuinfo`, `/proc/meminfo`. A hidden part (container, old kernel) has a simple
//! replacement: one core per CPU, one package, one cache per package, one node with all memory.
//!
//! [`read`] gives what the strategies need. [`describe`] adds, for people: all cache levels, kinds of cores, rated
//! memory speed (Documentation/admin-guide/mm/numaperf.rst), memory tiers (ABI/testing/sysfs-kernel-mm-memory-tiers),
//! nodes of devices.

use homeostat_kernel::bytes::{keyed, lines, list, number, size, words};
use homeostat_kernel::{Root, files};
use homeostat_model::{
    Bytes, Cache, CacheKind, Cpu, CpuId, Device, DeviceKind, LlcId, LogicalCpu, Machine, MemoryAccess,
    MemoryNode, MemoryTier, Nanoseconds, NodeId, NumaNode, SideCache, Topology,
};
use homeostat_platform::PlatformError;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// Most NUMA nodes that are read (`MAX_NUMNODES` of the largest kernels in use is 1024).
const NODES_MAX: usize = 1024;
const CACHES_MAX: u32 = 16;
const DEVICES_MAX: usize = 1024;
/// Most classes of access to a node's memory (two are defined).
const CLASSES_MAX: u32 = 4;
/// Least ratio between the rated performance of two kinds of cores. A field report has 208 for full cores and 119 for
/// compact ones, a ratio of 1.75. Ranks of equal cores differ by a few points of 255.
const COMPACT_STEP: f64 = 1.3;
/// Most directories climbed to find the node of a device: bridges nest a few levels deep.
const CLIMB_MAX: usize = 16;

/// Reads the machine without its capabilities. Impossible facts are repaired ([`Machine::repair`]).
///
/// # Errors
/// `Unsupported` when `/proc` is not there, `Malformed` when it does not report the amount of memory.
pub fn read(root: &Root) -> Result<Machine, PlatformError> {
    let (machine, _) = read_and_repair(root)?;
    if machine.memory.0 == 0 {
        return Err(PlatformError::Malformed {
            path: root.path("/proc/meminfo"),
            line: "MemTotal: 0 kB".into(),
        });
    }
    Ok(machine)
}

/// As [`read`], with a sentence for each repaired fact. Zero memory is allowed (some containers report it).
///
/// # Errors
/// As [`read`], except for zero memory.
pub fn read_and_repair(root: &Root) -> Result<(Machine, Vec<String>), PlatformError> {
    let mut machine = as_told(root)?;
    let told = machine.repair();
    Ok((machine, told))
}

fn as_told(root: &Root) -> Result<Machine, PlatformError> {
    let meminfo = files::required(root, "/proc/meminfo", files::SMALL_FILE_MAX)?;
    let memory =
        keyed(&meminfo, "MemTotal")
            .map(Bytes::from_kib)
            .ok_or_else(|| PlatformError::Malformed {
                path: root.path("/proc/meminfo"),
                line: String::from_utf8_lossy(lines(&meminfo).next().unwrap_or_default()).into_owned(),
            })?;
    let cpuinfo = files::bytes(root, "/proc/cpuinfo", files::LARGE_FILE_MAX).unwrap_or_default();
    let mut nodes = read_nodes(root);
    if nodes.is_empty() {
        nodes.push((
            NumaNode {
                id: NodeId(0),
                memory,
                distances: vec![10],
            },
            Vec::new(),
        ));
    }
    let (cpus, llc_size) = read_cpus(root, &cpuinfo, &nodes);
    Ok(Machine {
        kernel: homeostat_kernel::release::kernel_release(root),
        cpu_model: cpu_model(&cpuinfo),
        hypervisor: hypervisor(root, &cpuinfo),
        cpus,
        nodes: nodes.into_iter().map(|(node, _)| node).collect(),
        memory,
        page_size: page_size(root),
        huge_page_size: files::text(root, "/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
            .and_then(|t| number(t.as_bytes()))
            .map_or(Bytes::ZERO, Bytes),
        llc_size,
        boot_id: boot_id(root),
        capabilities: Vec::new(),
    })
}

/// CPUs taken out of general use, by method.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SetAside {
    /// Without load balancing since boot: `isolcpus=`.
    pub isolated: BTreeSet<u32>,
    /// Without the timer tick, `nohz_full=`: programs may run there, but the administrator wants them elsewhere.
    pub tickless: BTreeSet<u32>,
    /// Given to one control group alone, with or without load balancing: a cpuset partition (cgroup v2).
    pub partitioned: BTreeSet<u32>,
}

impl SetAside {
    /// Reads them (ABI/testing/sysfs-devices-system-cpu, Documentation/admin-guide/cgroup-v2.rst).
    pub fn read(root: &Root) -> Self {
        Self {
            isolated: set(root, "/sys/devices/system/cpu/isolated").unwrap_or_default(),
            tickless: Self::tickless(root),
            partitioned: set(root, "/sys/devices/system/cpu/online")
                .map(|online| partitioned(root, &online))
                .unwrap_or_default(),
        }
    }

    /// Only the CPUs without the timer tick.
    pub fn tickless(root: &Root) -> BTreeSet<u32> {
        // "(null)" where the kernel supports it but has no such CPUs.
        set(root, "/sys/devices/system/cpu/nohz_full").unwrap_or_default()
    }

    /// Whether a CPU was set aside in any way.
    pub fn has(&self, cpu: u32) -> bool {
        self.isolated.contains(&cpu) || self.tickless.contains(&cpu) || self.partitioned.contains(&cpu)
    }

    /// All of them.
    pub fn all(&self) -> BTreeSet<u32> {
        let several = [&self.isolated, &self.tickless, &self.partitioned];
        several.into_iter().flatten().copied().collect()
    }
}

fn set(root: &Root, path: &str) -> Option<BTreeSet<u32>> {
    let cpus = files::text(root, path).and_then(|t| list(t.as_bytes()))?;
    Some(cpus.into_iter().collect())
}

/// CPUs that the root control group gave to partitions; none are seen in a container, whose root has a cpuset setting.
fn partitioned(root: &Root, online: &BTreeSet<u32>) -> BTreeSet<u32> {
    for mount in ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"] {
        let Some(effective) = files::text(root, &format!("{mount}/cpuset.cpus.effective")) else {
            continue;
        };
        let is_the_hosts = !root.path(&format!("{mount}/cpuset.cpus")).exists();
        if let Some(left) = list(effective.as_bytes()).filter(|left| is_the_hosts && !left.is_empty()) {
            let left: BTreeSet<u32> = left.into_iter().collect();
            return online.difference(&left).copied().collect();
        }
    }
    BTreeSet::new()
}

/// Facts that change when CPUs, nodes or memory come and go (hot-plug), or are set aside. They are cheap to read, and a
/// difference signals a new topology.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Online {
    cpus: Option<String>,
    nodes: Option<String>,
    nodes_with_memory: Option<String>,
    /// Changes when a cpuset partition is made or dissolved.
    set_aside: SetAside,
}

impl Online {
    /// Reads it.
    pub fn read(root: &Root) -> Self {
        Self {
            cpus: files::text(root, "/sys/devices/system/cpu/online"),
            nodes: files::text(root, "/sys/devices/system/node/online"),
            nodes_with_memory: files::text(root, "/sys/devices/system/node/has_memory"),
            set_aside: SetAside::read(root),
        }
    }
}

/// The id of this boot; where the kernel hides it (some containers), the boot time.
fn boot_id(root: &Root) -> String {
    files::text(root, "/proc/sys/kernel/random/boot_id")
        .filter(|t| !t.is_empty())
        .or_else(|| {
            let stat = files::bytes(root, "/proc/stat", files::LARGE_FILE_MAX)?;
            lines(&stat).find_map(|l| {
                let at = words(l.strip_prefix(b"btime ")?).next().and_then(number)?;
                Some(format!("boot-time-{at}"))
            })
        })
        .unwrap_or_default()
}

fn cpuinfo_value<'a>(cpuinfo: &'a [u8], key: &str) -> Option<&'a [u8]> {
    lines(cpuinfo).find_map(|line| {
        let (name, value) = line.split_at(line.iter().position(|&b| b == b':')?);
        (name.trim_ascii() == key.as_bytes()).then(|| value.get(1..).unwrap_or_default().trim_ascii())
    })
}

fn cpu_model(cpuinfo: &[u8]) -> String {
    ["model name", "cpu", "Model", "CPU part"]
        .iter()
        .find_map(|key| cpuinfo_value(cpuinfo, key))
        .filter(|v| !v.is_empty())
        .map_or_else(
            || "unknown".to_owned(),
            |v| String::from_utf8_lossy(v).into_owned(),
        )
}

/// Size of the base page. On a captured machine: from a program's auxiliary vector, the kernel's configuration, or the
/// large page (a table of 8-byte entries fills a page).
pub fn page_size(root: &Root) -> Bytes {
    let own = Bytes(rustix::param::page_size() as u64);
    if root.is_live() {
        return own;
    }
    let by_vector = files::bytes(root, "/proc/self/auxv", files::SMALL_FILE_MAX)
        .or_else(|| files::bytes(root, "/proc/1/auxv", files::SMALL_FILE_MAX))
        .and_then(|vector| page_size_by_vector(&vector));
    let by_kernel =
        || homeostat_kernel::kernel_config::read(root).and_then(|text| page_size_by_config(&text));
    let by_large_page = || {
        let large = files::text(root, "/sys/kernel/mm/transparent_hugepage/hpage_pmd_size");
        let large = large.and_then(|t| number(t.as_bytes()))?;
        [4096u64, 16_384, 65_536]
            .into_iter()
            .find(|page| large_page_of(*page) == large)
    };
    by_vector
        .or_else(by_kernel)
        .or_else(by_large_page)
        .map_or(own, Bytes)
}

/// Large page of a page size: range of a page full of 8-byte entries (kernel's `PMD_SIZE` of x86-64 and arm64).
pub(super) fn large_page_of(page: u64) -> u64 {
    page.saturating_mul(page / 8)
}

/// `AT_PAGESZ` of an auxiliary vector of 64-bit words (getauxval(3)).
fn page_size_by_vector(vector: &[u8]) -> Option<u64> {
    const AT_PAGESZ: u64 = 6;
    let mut pairs = vector.chunks_exact(16).filter_map(|pair| {
        let (kind, value) = (pair.first_chunk()?, pair.last_chunk()?);
        Some((u64::from_le_bytes(*kind), u64::from_le_bytes(*value)))
    });
    pairs
        .find(|(kind, _)| *kind == AT_PAGESZ)
        .map(|(_, value)| value)
        .filter(|page| page.is_power_of_two() && (4096..=1 << 20).contains(page))
}

/// The page size by the kernel's configuration: `CONFIG_PAGE_SHIFT`, or a choice such as `CONFIG_ARM64_64K_PAGES`.
fn page_size_by_config(config: &[u8]) -> Option<u64> {
    let value = |name: &str| lines(config).find_map(|line| line.strip_prefix(name.as_bytes()));
    if let Some(shift) = value("CONFIG_PAGE_SHIFT=").and_then(number) {
        return (12..=20).contains(&shift).then(|| 1 << shift);
    }
    lines(config).find_map(|line| {
        let name = line.strip_prefix(b"CONFIG_")?.strip_suffix(b"=y")?;
        [("4K", 4096), ("16K", 16_384), ("64K", 65_536), ("256K", 262_144)]
            .into_iter()
            .find(|(size, _)| {
                let ends = [
                    format!("_{size}_PAGES"),
                    format!("_PAGE_SIZE_{size}B"),
                    format!("_{size}_3LEVEL"),
                ];
                ends.iter().any(|end| name.ends_with(end.as_bytes()))
                    || name == format!("PAGE_SIZE_{size}B").as_bytes()
            })
            .map(|(_, bytes)| bytes)
    })
}

/// The hypervisor's name, from firmware tables. On x86 the CPU flag `hypervisor` shows that there is one.
fn hypervisor(root: &Root, cpuinfo: &[u8]) -> Option<String> {
    let flags = cpuinfo_value(cpuinfo, "flags");
    let flagged = flags.is_some_and(|f| words(f).any(|w| w == b"hypervisor"));
    let xen = files::text(root, "/sys/hypervisor/type").filter(|t| !t.is_empty() && t != "none");
    if let Some(xen) = xen {
        return Some(xen);
    }
    let told = |path: &str| {
        let text = files::text(root, path)?;
        let text = text.trim_matches('\0').to_owned();
        (!text.is_empty()).then_some(text)
    };
    let vendor = told("/sys/class/dmi/id/sys_vendor");
    let product = told("/sys/class/dmi/id/product_name");
    let named = match (&vendor, &product) {
        (Some(vendor), Some(product)) => Some(format!("{vendor} {product}")),
        (Some(one), None) | (None, Some(one)) => Some(one.clone()),
        (None, None) => None,
    };
    if flagged {
        return Some(named.unwrap_or_else(|| "unknown".to_owned()));
    }
    if flags.is_some() {
        return None;
    }
    let board = told("/sys/class/dmi/id/board_vendor");
    let bios = told("/sys/class/dmi/id/bios_vendor");
    let firmware = [&vendor, &product, &board, &bios];
    // Clouds also rent whole machines, and the product name says so.
    let whole = product
        .as_deref()
        .is_some_and(|p| p.ends_with(".metal") || p.contains("-metal"));
    let is_virtual = firmware
        .iter()
        .filter_map(|field| field.as_deref())
        .any(|field| VIRTUAL_FIRMWARE.iter().any(|name| field.starts_with(name)));
    if is_virtual && !whole {
        return named.or_else(|| Some("unknown".to_owned()));
    }
    ["/proc/device-tree", "/sys/firmware/devicetree/base"]
        .iter()
        .find_map(|tree| {
            let compatible = told(&format!("{tree}/hypervisor/compatible"));
            compatible
                .map(|text| text.replace('\0', " "))
                .or_else(|| told(&format!("{tree}/ibm,partition-name")).map(|_| "PowerVM".to_owned()))
                .or_else(|| {
                    let model =
                        told(&format!("{tree}/compatible")).or_else(|| told(&format!("{tree}/model")))?;
                    let is_virtual = ["linux,dummy-virt", "qemu", "QEMU"]
                        .iter()
                        .any(|n| model.contains(n));
                    is_virtual.then(|| "QEMU".to_owned())
                })
        })
        .or_else(|| {
            // s390: "VM00 Control Program: KVM/Linux" below a hypervisor.
            let text = files::text(root, "/proc/sysinfo")?;
            let program = text
                .lines()
                .find_map(|l| l.trim().strip_prefix("VM00 Control Program:"));
            program.map(|name| name.trim().to_owned())
        })
}

/// Beginnings of virtual firmware fields: systemd's `src/basic/virt.c`, `detect_vm_dmi_vendor`; Google, Microsoft.
const VIRTUAL_FIRMWARE: [&str; 17] = [
    "KVM",
    "OpenStack",
    "KubeVirt",
    "Amazon EC2",
    "QEMU",
    "VMware",
    "VMW",
    "innotek GmbH",
    "VirtualBox",
    "Xen",
    "Bochs",
    "Parallels",
    "BHYVE",
    "Hyper-V",
    "Apple Virtualization",
    "Google Compute Engine",
    "Virtual Machine",
];

fn read_nodes(root: &Root) -> Vec<(NumaNode, Vec<u32>)> {
    let mut nodes = Vec::new();
    for id in files::numbered(root, "/sys/devices/system/node", "node")
        .into_iter()
        .take(NODES_MAX)
    {
        let base = format!("/sys/devices/system/node/node{id}");
        let meminfo =
            files::bytes(root, &format!("{base}/meminfo"), files::SMALL_FILE_MAX).unwrap_or_default();
        let distances: Vec<u32> = files::text(root, &format!("{base}/distance"))
            .map(|t| {
                words(t.as_bytes())
                    .filter_map(|w| number(w).and_then(|n| u32::try_from(n).ok()))
                    .collect()
            })
            .unwrap_or_default();
        let cpus = files::text(root, &format!("{base}/cpulist"))
            .and_then(|t| list(t.as_bytes()))
            .unwrap_or_default();
        nodes.push((
            NumaNode {
                id: NodeId(id),
                memory: NodeAmounts::parse(&meminfo).total,
                distances,
            },
            cpus,
        ));
    }
    nodes
}

fn read_cpus(root: &Root, cpuinfo: &[u8], nodes: &[(NumaNode, Vec<u32>)]) -> (Vec<Cpu>, Bytes) {
    let online = files::text(root, "/sys/devices/system/cpu/online")
        .and_then(|t| list(t.as_bytes()))
        .filter(|l| !l.is_empty())
        .unwrap_or_else(|| processors(root, cpuinfo));
    let set_aside = SetAside::read(root);
    let first_node = nodes.first().map_or(NodeId(0), |(n, _)| n.id);
    let mut largest = Bytes::ZERO;
    let mut cpus = Vec::with_capacity(online.len());
    for id in online {
        let base = format!("/sys/devices/system/cpu/cpu{id}");
        let first_of = |leaf: &str| {
            files::text(root, &format!("{base}/{leaf}")).and_then(|t| list(t.as_bytes())?.first().copied())
        };
        let core = first_of("topology/core_cpus_list")
            .or_else(|| first_of("topology/thread_siblings_list"))
            .unwrap_or(id);
        // A package id of -1 (unknown, some ARM and virtual machines) counts as package 0.
        let package = files::text(root, &format!("{base}/topology/physical_package_id"))
            .and_then(|t| number(t.as_bytes()))
            .and_then(|n| u32::try_from(n).ok())
            .unwrap_or(0);
        let node = nodes
            .iter()
            .find(|(_, cpus)| cpus.binary_search(&id).is_ok())
            .map_or(first_node, |(n, _)| n.id);
        // Without described caches, CPUs of one package and node count as sharing one: the places look the same.
        let (llc, llc_bytes) = last_level_cache(root, &base).unwrap_or_else(|| {
            let first = cpus
                .iter()
                .find(|c: &&Cpu| c.package == package && c.node == node);
            (first.map_or(LlcId(id), |c| c.llc), Bytes::ZERO)
        });
        largest = largest.max(llc_bytes);
        cpus.push(Cpu {
            id: CpuId(id),
            core,
            package,
            llc,
            node,
            set_aside: set_aside.has(id),
        });
    }
    (cpus, largest)
}

/// CPU numbers where sysfs is not mounted: `/proc/cpuinfo`, else the `cpuN` lines of `/proc/stat`, else one.
fn processors(root: &Root, cpuinfo: &[u8]) -> Vec<u32> {
    let mut found: Vec<u32> = lines(cpuinfo)
        .filter_map(|l| l.strip_prefix(b"processor"))
        .filter_map(|l| {
            let digits = l.trim_ascii().strip_prefix(b":")?.trim_ascii();
            number(digits).and_then(|n| u32::try_from(n).ok())
        })
        .collect();
    if found.is_empty() {
        let stat = files::bytes(root, "/proc/stat", files::LARGE_FILE_MAX).unwrap_or_default();
        found = lines(&stat)
            .filter_map(|l| words(l).next()?.strip_prefix(b"cpu").and_then(number))
            .filter_map(|n| u32::try_from(n).ok())
            .collect();
    }
    if found.is_empty() {
        found.push(0);
    }
    found.sort_unstable();
    found.dedup();
    found
}

fn last_level_cache(root: &Root, cpu: &str) -> Option<(LlcId, Bytes)> {
    let mut best: Option<(u64, LlcId, Bytes)> = None;
    for index in 0..CACHES_MAX {
        let base = format!("{cpu}/cache/index{index}");
        let Some(level) = files::text(root, &format!("{base}/level")).and_then(|t| number(t.as_bytes()))
        else {
            break;
        };
        if files::text(root, &format!("{base}/type")).is_some_and(|t| t == "Instruction") {
            continue;
        }
        let Some(first) = files::text(root, &format!("{base}/shared_cpu_list"))
            .and_then(|t| list(t.as_bytes())?.first().copied())
        else {
            continue;
        };
        let bytes = files::text(root, &format!("{base}/size"))
            .and_then(|t| size(t.as_bytes()))
            .unwrap_or(0);
        if best.as_ref().is_none_or(|(l, _, _)| level > *l) {
            best = Some((level, LlcId(first), Bytes(bytes)));
        }
    }
    best.map(|(_, id, bytes)| (id, bytes))
}

/// Every visible fact about the machine's shape.
///
/// # Errors
/// As [`read`].
pub fn describe(root: &Root) -> Result<Topology, PlatformError> {
    let (machine, _) = read_and_repair(root)?;
    let set = |path: &str| -> BTreeSet<u32> {
        files::text(root, path)
            .and_then(|t| list(t.as_bytes()))
            .unwrap_or_default()
            .into_iter()
            .collect()
    };
    let set_aside = SetAside::read(root);
    let kinds = kinds_of_cores(root);
    let mut cpus: Vec<LogicalCpu> = machine
        .cpus
        .iter()
        .map(|cpu| {
            let base = format!("/sys/devices/system/cpu/cpu{}", cpu.id);
            let small = |leaf: &str| {
                files::text(root, &format!("{base}/{leaf}"))
                    .and_then(|t| number(t.as_bytes()))
                    .and_then(|n| u32::try_from(n).ok())
            };
            LogicalCpu {
                id: cpu.id,
                core: cpu.core,
                cluster: files::text(root, &format!("{base}/topology/cluster_cpus_list"))
                    .and_then(|t| list(t.as_bytes())?.first().copied()),
                die: small("topology/die_id"),
                package: cpu.package,
                node: cpu.node,
                kind: kinds.get(&cpu.id.0).map(|k| (*k).to_owned()),
                capacity: small("cpu_capacity"),
                isolated: set_aside.isolated.contains(&cpu.id.0),
                tickless: set_aside.tickless.contains(&cpu.id.0),
                partitioned: set_aside.partitioned.contains(&cpu.id.0),
            }
        })
        .collect();
    forget_what_tells_nothing(&mut cpus);
    let mut caches = caches(root, &cpus);
    one_cache_per_node(&mut caches, &machine);
    Ok(Topology {
        caches,
        nodes: memory_nodes(root, &machine),
        tiers: tiers(root),
        devices: devices(root),
        offline: set("/sys/devices/system/cpu/offline")
            .into_iter()
            .map(CpuId)
            .collect(),
        cpus,
    })
}

/// Kinds of cores by CPU: Intel's hybrids have one event source per kind, with its list of CPUs.
fn kinds_of_cores(root: &Root) -> BTreeMap<u32, &'static str> {
    let mut kinds = BTreeMap::new();
    for (source, kind) in [
        ("cpu_core", "performance"),
        ("cpu_atom", "efficiency"),
        ("cpu_lowpower", "low_power"),
    ] {
        let cpus = files::text(root, &format!("/sys/bus/event_source/devices/{source}/cpus"))
            .or_else(|| files::text(root, &format!("/sys/devices/{source}/cpus")))
            .and_then(|t| list(t.as_bytes()))
            .unwrap_or_default();
        kinds.extend(cpus.into_iter().map(|cpu| (cpu, kind)));
    }
    if kinds.is_empty() {
        kinds = compact_cores(root);
    }
    kinds
}

/// AMD's compact cores: firmware rates their highest performance far lower (ACPI CPPC); equal cores differ little.
fn compact_cores(root: &Root) -> BTreeMap<u32, &'static str> {
    let online = set(root, "/sys/devices/system/cpu/online").unwrap_or_default();
    let rated: BTreeMap<u32, u64> = online
        .into_iter()
        .filter_map(|cpu| {
            let path = format!("/sys/devices/system/cpu/cpu{cpu}/acpi_cppc/highest_perf");
            let rated = files::text(root, &path).and_then(|t| number(t.as_bytes()))?;
            (rated > 0).then_some((cpu, rated))
        })
        .collect();
    let levels: BTreeSet<u64> = rated.values().copied().collect();
    let levels: Vec<u64> = levels.into_iter().collect();
    let step = levels
        .windows(2)
        .filter_map(|pair| match pair {
            [below, above] if *above as f64 >= *below as f64 * COMPACT_STEP => Some(*above),
            _ => None,
        })
        .max();
    let Some(fast) = step else {
        return BTreeMap::new();
    };
    rated
        .into_iter()
        .map(|(cpu, rated)| (cpu, if rated >= fast { "performance" } else { "compact" }))
        .collect()
}

/// Removes levels without information: one die per package, one speed for all, a cluster equal to a core or a package.
fn forget_what_tells_nothing(cpus: &mut [LogicalCpu]) {
    let dies: BTreeSet<(u32, Option<u32>)> = cpus.iter().map(|c| (c.package, c.die)).collect();
    let packages: BTreeSet<u32> = cpus.iter().map(|c| c.package).collect();
    let capacities: BTreeSet<Option<u32>> = cpus.iter().map(|c| c.capacity).collect();
    let mut cores_of: BTreeMap<u32, BTreeSet<u32>> = BTreeMap::new();
    let mut clusters_of: BTreeMap<u32, BTreeSet<u32>> = BTreeMap::new();
    for cpu in cpus.iter() {
        if let Some(cluster) = cpu.cluster {
            cores_of.entry(cluster).or_default().insert(cpu.core);
            clusters_of.entry(cpu.package).or_default().insert(cluster);
        }
    }
    // On hybrids a cluster is one big core here and four small ones there, so all clusters are kept.
    let larger = cores_of.values().any(|cores| cores.len() > 1);
    let smaller = clusters_of.values().any(|clusters| clusters.len() > 1);
    for cpu in cpus {
        if dies.len() <= packages.len() {
            cpu.die = None;
        }
        if capacities.len() < 2 {
            cpu.capacity = None;
        }
        if !(larger && smaller) {
            cpu.cluster = None;
        }
    }
}

/// Each cache once, whichever of its CPUs reports it.
fn caches(root: &Root, cpus: &[LogicalCpu]) -> Vec<Cache> {
    let mut found: BTreeMap<(u32, CacheKind, u32), Cache> = BTreeMap::new();
    for cpu in cpus {
        for index in 0..CACHES_MAX {
            let base = format!("/sys/devices/system/cpu/cpu{}/cache/index{index}", cpu.id);
            let text = |leaf: &str| files::text(root, &format!("{base}/{leaf}"));
            let small = |leaf: &str| {
                text(leaf)
                    .and_then(|t| number(t.as_bytes()))
                    .and_then(|n| u32::try_from(n).ok())
            };
            let Some(level) = small("level") else { break };
            let kind = match text("type").as_deref() {
                Some("Instruction") => CacheKind::Instruction,
                Some("Data") => CacheKind::Data,
                _ => CacheKind::Unified,
            };
            let shared = text("shared_cpu_list")
                .and_then(|t| list(t.as_bytes()))
                .filter(|l| !l.is_empty())
                .unwrap_or_else(|| vec![cpu.id.0]);
            let first = shared.first().copied().unwrap_or(cpu.id.0);
            found.entry((level, kind, first)).or_insert_with(|| Cache {
                level,
                kind,
                size_bytes: Bytes(text("size").and_then(|t| size(t.as_bytes())).unwrap_or(0)),
                line_bytes: small("coherency_line_size").unwrap_or(0),
                ways: small("ways_of_associativity").unwrap_or(0),
                cpus: shared.into_iter().map(CpuId).collect(),
            });
        }
    }
    found.into_values().collect()
}

/// A cache reported to span nodes is listed at each of them, with its share by CPUs.
fn one_cache_per_node(caches: &mut Vec<Cache>, machine: &Machine) {
    let node_of: BTreeMap<CpuId, NodeId> = machine.cpus.iter().map(|c| (c.id, c.node)).collect();
    *caches = std::mem::take(caches)
        .into_iter()
        .flat_map(|cache| {
            let mut parts: BTreeMap<Option<NodeId>, Vec<CpuId>> = BTreeMap::new();
            for cpu in &cache.cpus {
                parts.entry(node_of.get(cpu).copied()).or_default().push(*cpu);
            }
            let all = cache.cpus.len().max(1) as u64;
            let part = move |cpus: Vec<CpuId>| Cache {
                size_bytes: Bytes(cache.size_bytes.0 * cpus.len() as u64 / all),
                cpus,
                ..cache.clone()
            };
            parts.into_values().map(part).collect::<Vec<_>>()
        })
        .collect();
    caches.sort_by_key(|c| (c.level, c.kind, c.cpus.first().copied()));
}

fn memory_nodes(root: &Root, machine: &Machine) -> Vec<MemoryNode> {
    let tier_of: BTreeMap<NodeId, u32> = tiers(root)
        .iter()
        .flat_map(|t| t.nodes.iter().map(|n| (*n, t.id)))
        .collect();
    let order: Vec<NodeId> = machine.nodes.iter().map(|n| n.id).collect();
    machine
        .nodes
        .iter()
        .map(|node| {
            let base = format!("/sys/devices/system/node/node{}", node.id);
            let meminfo =
                files::bytes(root, &format!("{base}/meminfo"), files::SMALL_FILE_MAX).unwrap_or_default();
            let amounts = NodeAmounts::parse(&meminfo);
            MemoryNode {
                id: node.id,
                memory_bytes: node.memory,
                free_bytes: amounts.free,
                cpus: machine
                    .cpus
                    .iter()
                    .filter(|c| c.node == node.id)
                    .map(|c| c.id)
                    .collect(),
                distances: order
                    .iter()
                    .copied()
                    .zip(node.distances.iter().copied())
                    .collect(),
                access: access(root, &base),
                side_caches: side_caches(root, &base),
                tier: tier_of.get(&node.id).copied(),
            }
        })
        .collect()
}

/// Amounts of a node's memory by use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NodeAmounts {
    /// `MemTotal`.
    pub total: Bytes,
    /// `MemFree`.
    pub free: Bytes,
    /// `FilePages`: caches of files, shared memory among them.
    pub file_cache: Bytes,
}

impl NodeAmounts {
    /// Parses `/sys/devices/system/node/nodeN/meminfo`; what is not there is zero.
    pub fn parse(meminfo: &[u8]) -> Self {
        let of = |key: &[u8]| {
            lines(meminfo)
                .find_map(|line| {
                    let mut parts = words(line).skip_while(|w| *w != key).skip(1);
                    parts.next().and_then(number).map(Bytes::from_kib)
                })
                .unwrap_or(Bytes::ZERO)
        };
        Self {
            total: of(b"MemTotal:"),
            free: of(b"MemFree:"),
            file_cache: of(b"FilePages:"),
        }
    }
}

/// Rated latency and bandwidth by class (`accessN/initiators`).
fn access(root: &Root, node: &str) -> Vec<MemoryAccess> {
    let mut found = Vec::new();
    for class in 0..CLASSES_MAX {
        let base = format!("{node}/access{class}/initiators");
        let initiators: Vec<NodeId> = files::numbered(root, &base, "node")
            .into_iter()
            .map(NodeId)
            .collect();
        // Zero means that the firmware gave no figure.
        let figure = |leaf: &str| {
            files::text(root, &format!("{base}/{leaf}"))
                .and_then(|t| number(t.as_bytes()))
                .and_then(|n| u32::try_from(n).ok())
                .filter(|n| *n > 0)
        };
        let rated = MemoryAccess {
            class,
            initiators,
            read_latency_ns: figure("read_latency"),
            write_latency_ns: figure("write_latency"),
            read_bandwidth_mib_s: figure("read_bandwidth"),
            write_bandwidth_mib_s: figure("write_bandwidth"),
        };
        let silent = MemoryAccess {
            class,
            ..MemoryAccess::default()
        };
        if rated != silent {
            found.push(rated);
        }
    }
    found
}

fn side_caches(root: &Root, node: &str) -> Vec<SideCache> {
    files::numbered(root, &format!("{node}/memory_side_cache"), "index")
        .into_iter()
        .take(CACHES_MAX as usize)
        .filter_map(|level| {
            let figure = |leaf: &str| {
                files::text(root, &format!("{node}/memory_side_cache/index{level}/{leaf}"))
                    .and_then(|t| number(t.as_bytes()))
            };
            Some(SideCache {
                level,
                size_bytes: Bytes(figure("size")?),
                line_bytes: figure("line_size")
                    .and_then(|n| u32::try_from(n).ok())
                    .unwrap_or(0),
                direct_mapped: figure("indexing") == Some(0),
                write_back: figure("write_policy") == Some(0),
            })
        })
        .collect()
}

fn tiers(root: &Root) -> Vec<MemoryTier> {
    const DIRECTORY: &str = "/sys/devices/virtual/memory_tiering";
    files::numbered(root, DIRECTORY, "memory_tier")
        .into_iter()
        .map(|id| MemoryTier {
            id,
            nodes: files::text(root, &format!("{DIRECTORY}/memory_tier{id}/nodelist"))
                .and_then(|t| list(t.as_bytes()))
                .unwrap_or_default()
                .into_iter()
                .map(NodeId)
                .collect(),
        })
        .filter(|tier| !tier.nodes.is_empty())
        .collect()
}

/// Disks, network interfaces and accelerators with their node. Devices only in software (loop, bridges) have none.
fn devices(root: &Root) -> Vec<Device> {
    let mut found = Vec::new();
    for (class, kind) in [
        ("/sys/class/block", DeviceKind::Block),
        ("/sys/class/net", DeviceKind::Network),
    ] {
        for name in files::names(root, class).into_iter().take(DEVICES_MAX) {
            let here = format!("{class}/{name}");
            let Ok(real) = std::fs::canonicalize(root.path(&here)) else {
                continue;
            };
            let is_virtual = real.components().any(|part| part.as_os_str() == "virtual");
            let is_partition = root.path(&format!("{here}/partition")).exists();
            if !is_virtual && !is_partition {
                let node = node_above(root, &real);
                found.push(Device { kind, name, node });
            }
        }
    }
    for address in files::names(root, "/sys/bus/pci/devices")
        .into_iter()
        .take(DEVICES_MAX)
    {
        let here = format!("/sys/bus/pci/devices/{address}");
        let class = files::text(root, &format!("{here}/class")).unwrap_or_default();
        // PCI Code and ID Assignment Specification: 03 displays, 12 processing accelerators, 0b40 co-processors.
        let class = class.strip_prefix("0x").unwrap_or(&class);
        if ["03", "12", "0b40"].iter().any(|c| class.starts_with(c)) {
            let node = std::fs::canonicalize(root.path(&here))
                .ok()
                .and_then(|real| node_above(root, &real));
            found.push(Device {
                kind: DeviceKind::Accelerator,
                name: address,
                node,
            });
        }
    }
    found.sort();
    found.truncate(DEVICES_MAX);
    found
}

/// The node of the nearest ancestor that has one; -1 means that the firmware does not report it.
fn node_above(root: &Root, device: &Path) -> Option<NodeId> {
    let top = std::fs::canonicalize(root.path("/sys")).ok()?;
    device
        .ancestors()
        .take(CLIMB_MAX)
        .take_while(|at| at.starts_with(&top))
        .find_map(|at| {
            let text = std::fs::read(at.join("numa_node")).ok()?;
            // On a physical bus the first answer counts, even if it is "unknown".
            Some(number(text.trim_ascii()).and_then(|n| u32::try_from(n).ok()))
        })?
        .map(NodeId)
}

/// Time since boot of the machine below the root, with suspend: the clock of `starttime` in `/proc/PID/stat`.
pub fn uptime(root: &Root) -> Option<Nanoseconds> {
    if root.is_live() {
        let t = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
        let seconds = u64::try_from(t.tv_sec).ok()?;
        return Some(Nanoseconds(
            seconds
                .saturating_mul(1_000_000_000)
                .saturating_add(u64::try_from(t.tv_nsec).ok()?),
        ));
    }
    let text = files::text(root, "/proc/uptime")?;
    let seconds: f64 = text.split_whitespace().next()?.parse().ok()?;
    Some(Nanoseconds::from_secs_f64(seconds))
}
