//! The shape of the machine: CPUs, cores, packages, last-level caches, NUMA nodes and their distances.
//!
//! Sources: `/sys/devices/system/{cpu,node}` (Linux Documentation/admin-guide/cputopology.rst, ABI/stable/
//! sysfs-devices-node), `/proc/cpuinfo`, `/proc/meminfo`. Every part that a container or an old kernel hides has
//! a plain replacement: one core per CPU, one package, one node with all memory.

use super::bytes::{keyed, lines, list, number, size, words};
use super::files;
use crate::Root;
use homeostat_model::{Bytes, Cpu, CpuId, LlcId, Machine, Nanoseconds, NodeId, NumaNode};
use homeostat_platform::PlatformError;

/// Most NUMA nodes that are looked at (`MAX_NUMNODES` of the largest kernels in use is 1024).
const NODES_MAX: usize = 1024;
/// Most cache levels of one CPU.
const CACHES_MAX: u32 = 16;

/// Reads the machine, without its capabilities.
///
/// # Errors
/// `Unsupported` when `/proc` is not there, `Malformed` when it does not tell how much memory there is.
pub fn read(root: &Root) -> Result<Machine, PlatformError> {
    let meminfo = files::required(root, "/proc/meminfo", files::SMALL_FILE_MAX)?;
    let memory = keyed(&meminfo, "MemTotal")
        .map(Bytes::from_kib)
        .filter(|m| m.0 > 0)
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
        kernel: kernel_release(root),
        cpu_model: cpu_model(&cpuinfo),
        hypervisor: hypervisor(root, &cpuinfo),
        cpus,
        nodes: nodes.into_iter().map(|(node, _)| node).collect(),
        memory,
        page_size: Bytes(rustix::param::page_size() as u64),
        huge_page_size: files::text(root, "/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
            .and_then(|t| number(t.as_bytes()))
            .map_or(Bytes::ZERO, Bytes),
        llc_size,
        boot_id: boot_id(root),
        capabilities: Vec::new(),
    })
}

/// What changes when CPUs or nodes come and go (hot-plug): cheap to read, compared to notice a new topology.
pub fn online(root: &Root) -> (Option<String>, Option<String>) {
    (
        files::text(root, "/sys/devices/system/cpu/online"),
        files::text(root, "/sys/devices/system/node/online"),
    )
}

/// `uname -r` of the machine below the root.
pub fn kernel_release(root: &Root) -> String {
    files::text(root, "/proc/sys/kernel/osrelease")
        .or_else(|| {
            // "Linux version 6.1.0-13-amd64 (…": the third word.
            files::text(root, "/proc/version").and_then(|t| t.split_whitespace().nth(2).map(str::to_owned))
        })
        .filter(|t| !t.is_empty())
        .unwrap_or_else(|| "unknown".to_owned())
}

/// The id of this boot; where the kernel hides it (some containers), its boot time.
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

/// The hypervisor's name: the CPU flag `hypervisor` says that there is one, firmware tables say which.
fn hypervisor(root: &Root, cpuinfo: &[u8]) -> Option<String> {
    let flagged = cpuinfo_value(cpuinfo, "flags").is_some_and(|f| words(f).any(|w| w == b"hypervisor"));
    let xen = files::text(root, "/sys/hypervisor/type").filter(|t| !t.is_empty() && t != "none");
    if !flagged && xen.is_none() {
        return None;
    }
    xen.or_else(|| {
        let vendor = files::text(root, "/sys/class/dmi/id/sys_vendor").filter(|t| !t.is_empty())?;
        Some(
            match files::text(root, "/sys/class/dmi/id/product_name").filter(|t| !t.is_empty()) {
                Some(product) => format!("{vendor} {product}"),
                None => vendor,
            },
        )
    })
    .or_else(|| Some("unknown".to_owned()))
}

/// NUMA nodes with their CPUs.
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
                memory: node_memory(&meminfo),
                distances,
            },
            cpus,
        ));
    }
    nodes
}

/// `Node 0 MemTotal:       24684084 kB`.
fn node_memory(meminfo: &[u8]) -> Bytes {
    lines(meminfo)
        .find_map(|line| {
            let mut parts = words(line).skip_while(|w| *w != b"MemTotal:").skip(1);
            parts.next().and_then(number).map(Bytes::from_kib)
        })
        .unwrap_or(Bytes::ZERO)
}

/// Online CPUs and the size of the largest last-level cache.
fn read_cpus(root: &Root, cpuinfo: &[u8], nodes: &[(NumaNode, Vec<u32>)]) -> (Vec<Cpu>, Bytes) {
    let online = files::text(root, "/sys/devices/system/cpu/online")
        .and_then(|t| list(t.as_bytes()))
        .filter(|l| !l.is_empty())
        .unwrap_or_else(|| processors(root, cpuinfo));
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
        let (llc, llc_bytes) = last_level_cache(root, &base).unwrap_or((LlcId(core), Bytes::ZERO));
        largest = largest.max(llc_bytes);
        cpus.push(Cpu {
            id: CpuId(id),
            core,
            package,
            llc,
            node,
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

/// The highest-level data or unified cache of a CPU: its domain and size.
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

/// Time since boot of the machine below the root, including suspend: what `starttime` in `/proc/PID/stat` counts.
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
