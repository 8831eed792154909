//! Use of the memory controllers, from the best source that works:
//! 1. AMD from Zen 4: each controller counts its clocks and those with a busy data bus (event source `amd_umc_N`,
//!    events 0x00 and 0x14; AMD PPR, UMC performance monitors).
//! 2. Intel servers: each channel counts its clocks and its reads and writes of a line (event source `uncore_imc_N`,
//!    driver's events `clockticks`, `cas_count_read`, `cas_count_write`). A line of 64 bytes takes four clocks: a
//!    channel has 8 bytes and two transfers per clock.
//! 3. Memory bandwidth monitoring (resctrl), if a person mounted it: bytes per second between each last-level cache and
//!    memory, relative to the firmware's bandwidth of the node (HMAT).
//!
//! None of them counts links between packages. A machine with links fuller than its controllers looks emptier than it
//! is, and a change that needs a full link is not tried.

use homeostat_kernel::bytes::{hexadecimal, list, number};
use homeostat_kernel::perf::{Encoding, Group, GroupCount, OpenError, Scope};
use homeostat_kernel::{Root, files};
use homeostat_model::Nanoseconds;
use std::collections::BTreeMap;

const DEVICES: &str = "/sys/bus/event_source/devices";
const RESCTRL: &str = "/sys/fs/resctrl";
/// Most controllers counted: 12 channels of 4 packages.
const CONTROLLERS_MAX: usize = 48;
const GROUPS_MAX: usize = 64;
/// Clocks of a channel per line.
const CLOCKS_PER_LINE: f64 = 4.0;
/// A controller that seems fuller than this counts something else.
const FULL_MAX: f64 = 1.1;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// clocks, clocks with data.
    Umc,
    /// clocks, reads, writes.
    Imc,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Controller {
    kind: Kind,
    cpu: u32,
    events: Vec<Encoding>,
}

/// The controllers of this machine, each with a CPU of its package for reading.
fn controllers(root: &Root) -> Vec<Controller> {
    let mut found = Vec::new();
    for device in files::names(root, DEVICES) {
        let kind = if is_numbered(&device, "amd_umc_") {
            Kind::Umc
        } else if is_numbered(&device, "uncore_imc_") {
            Kind::Imc
        } else {
            continue;
        };
        let base = format!("{DEVICES}/{device}");
        let Some(source) = files::text(root, &format!("{base}/type"))
            .and_then(|t| number(t.as_bytes()))
            .and_then(|n| u32::try_from(n).ok())
        else {
            continue;
        };
        let event = |config| Encoding {
            source,
            config,
            config1: 0,
            user_only: false,
        };
        let named =
            |name: &str| files::text(root, &format!("{base}/events/{name}")).and_then(|t| config_of(&t));
        let configs = match kind {
            Kind::Umc => Some(vec![0x00, 0x14]),
            Kind::Imc => ["clockticks", "cas_count_read", "cas_count_write"]
                .iter()
                .map(|n| named(n))
                .collect(),
        };
        let (Some(configs), Some(cpus)) = (
            configs,
            files::text(root, &format!("{base}/cpumask")).and_then(|t| list(t.as_bytes())),
        ) else {
            continue;
        };
        for cpu in cpus {
            found.push(Controller {
                kind,
                cpu,
                events: configs.iter().map(|c| event(*c)).collect(),
            });
        }
    }
    found.truncate(CONTROLLERS_MAX);
    found
}

/// `uncore_imc_3`, not `uncore_imc_free_running_3`.
fn is_numbered(device: &str, prefix: &str) -> bool {
    device
        .strip_prefix(prefix)
        .is_some_and(|n| !n.is_empty() && n.bytes().all(|b| b.is_ascii_digit()))
}

/// `event=0x04,umask=0x03` in the encoding of uncore event sources; `None` with any other word.
fn config_of(text: &str) -> Option<u64> {
    let mut config = 0;
    for part in text.trim().split(',') {
        let (name, value) = part.split_once('=')?;
        let value = hexadecimal(value.strip_prefix("0x")?.as_bytes())?;
        config |= match name {
            "event" if value <= 0xFF => value,
            "umask" if value <= 0xFF => value << 8,
            _ => return None,
        };
    }
    Some(config)
}

/// Use of a controller from its counts, 0..1.
fn use_of(kind: Kind, count: &GroupCount) -> Option<f64> {
    let value = |i| count.count(i).map(|c| c.value as f64);
    let clocks = value(0).filter(|c| *c > 0.0)?;
    let busy = match kind {
        Kind::Umc => value(1)? / 2.0,
        Kind::Imc => (value(1)? + value(2)?) * CLOCKS_PER_LINE,
    };
    let used = busy / clocks;
    (used <= FULL_MAX).then_some(used.min(1.0))
}

/// Memory controllers being watched.
#[derive(Debug)]
pub struct Links {
    began: Nanoseconds,
    controllers: Vec<(Kind, Group, GroupCount)>,
    bytes: BTreeMap<u32, u64>,
}

impl Links {
    /// Begins to watch. On machines without a source, nothing is watched.
    pub fn begin(root: &Root, now: Nanoseconds) -> Self {
        let mut watched = Vec::new();
        for controller in controllers(root) {
            if !root.is_live() {
                break;
            }
            match Group::open(&controller.events, Scope::Cpu(controller.cpu)) {
                Ok(group) => {
                    if let Ok(count) = group.read() {
                        watched.push((controller.kind, group, count));
                    }
                }
                // The other controllers would fail the same way.
                Err(OpenError::Denied(_)) => break,
                Err(_) => {}
            }
        }
        let bytes = if watched.is_empty() {
            bytes_by_node(root)
        } else {
            BTreeMap::new()
        };
        Self {
            began: now,
            controllers: watched,
            bytes,
        }
    }

    /// Use of the fullest controller or node since the beginning, 0..1; `None` if nothing could be watched.
    pub fn busiest(&self, root: &Root, now: Nanoseconds) -> Option<f64> {
        let mut counted = self
            .controllers
            .iter()
            .filter_map(|(kind, group, begin)| use_of(*kind, &group.read().ok()?.since(begin)));
        let monitored = || {
            let seconds = (now - self.began).as_secs_f64();
            let after = if self.bytes.is_empty() {
                BTreeMap::new()
            } else {
                bytes_by_node(root)
            };
            after
                .into_iter()
                .filter_map(|(node, bytes)| {
                    let moved = bytes.checked_sub(*self.bytes.get(&node)?)?;
                    let most = bandwidth(root, node)?;
                    (seconds > 0.0).then(|| (moved as f64 / seconds / most).min(1.0))
                })
                .collect::<Vec<f64>>()
        };
        let fullest = |uses: &mut dyn Iterator<Item = f64>| uses.reduce(f64::max);
        fullest(&mut counted).or_else(|| fullest(&mut monitored().into_iter()))
    }
}

/// What can be watched on this machine, in words; `Err` with what is missing.
pub fn describe(root: &Root) -> Result<String, String> {
    let found = controllers(root);
    if !found.is_empty() {
        return Ok(format!(
            "{} memory channels with counters of their own",
            found.len()
        ));
    }
    let monitored = domains(root);
    if monitored.is_empty() {
        return Err(format!(
            "no event source of a memory controller (amd_umc_N, uncore_imc_N), and no bandwidth monitoring in {RESCTRL}"
        ));
    }
    let rated = files::numbered(root, "/sys/devices/system/node", "node")
        .into_iter()
        .filter(|n| bandwidth(root, *n).is_some())
        .count();
    if rated == 0 {
        return Err(format!(
            "{} caches with bandwidth monitoring, but the firmware does not state what the nodes can do (HMAT)",
            monitored.len()
        ));
    }
    Ok(format!(
        "{} caches with bandwidth monitoring, {rated} nodes with a stated bandwidth",
        monitored.len()
    ))
}

/// Bytes per second from a node's memory to its own CPUs, from the firmware (HMAT), which states MiB.
fn bandwidth(root: &Root, node: u32) -> Option<f64> {
    let path = format!("/sys/devices/system/node/node{node}/access0/initiators/read_bandwidth");
    let mib = number(files::text(root, &path)?.as_bytes()).filter(|n| *n > 0)?;
    Some(mib as f64 * 1024.0 * 1024.0)
}

fn domains(root: &Root) -> Vec<(String, u32)> {
    files::names(root, &format!("{RESCTRL}/mon_data"))
        .into_iter()
        .filter_map(|name| {
            let id = name.strip_prefix("mon_L3_")?.parse().ok()?;
            let path = root.path(&format!("{RESCTRL}/mon_data/{name}/mbm_total_bytes"));
            path.exists().then_some((name, id))
        })
        .collect()
}

/// Bytes between the caches of each node and memory since boot, over all groups. A group that comes or goes makes one
/// difference wrong; the caller drops a negative one.
fn bytes_by_node(root: &Root) -> BTreeMap<u32, u64> {
    let domains = domains(root);
    if domains.is_empty() {
        return BTreeMap::new();
    }
    let nodes = nodes_of_caches(root);
    let mut groups = vec![RESCTRL.to_owned()];
    groups.extend(
        files::names(root, RESCTRL)
            .into_iter()
            .map(|n| format!("{RESCTRL}/{n}"))
            .filter(|g| {
                root.path(&format!("{g}/mon_data")).is_dir() && root.path(&format!("{g}/tasks")).is_file()
            })
            .take(GROUPS_MAX),
    );
    let mut sums = BTreeMap::new();
    for (name, id) in domains {
        let Some(node) = nodes.get(&id) else { continue };
        for group in &groups {
            // "Unavailable" and "Error" are possible answers.
            let bytes = files::text(root, &format!("{group}/mon_data/{name}/mbm_total_bytes"))
                .and_then(|t| number(t.as_bytes()));
            if let Some(bytes) = bytes {
                let sum: &mut u64 = sums.entry(*node).or_default();
                *sum = sum.saturating_add(bytes);
            }
        }
    }
    sums
}

/// Node of each level-3 cache, by the number of the cache.
fn nodes_of_caches(root: &Root) -> BTreeMap<u32, u32> {
    let mut found = BTreeMap::new();
    for node in files::numbered(root, "/sys/devices/system/node", "node") {
        let mut cpus = files::text(root, &format!("/sys/devices/system/node/node{node}/cpulist"))
            .and_then(|t| list(t.as_bytes()))
            .unwrap_or_default();
        // One CPU of each cache suffices.
        while let Some(cpu) = cpus.first().copied() {
            let base = format!("/sys/devices/system/cpu/cpu{cpu}/cache/index3");
            let id = files::text(root, &format!("{base}/id"))
                .and_then(|t| number(t.as_bytes()))
                .and_then(|n| u32::try_from(n).ok());
            if let Some(id) = id {
                found.insert(id, node);
            }
            let shared = files::text(root, &format!("{base}/shared_cpu_list"))
                .and_then(|t| list(t.as_bytes()))
                .unwrap_or_default();
            cpus.retain(|c| *c != cpu && !shared.contains(c));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Tree(tempfile::TempDir);
    impl Tree {
        fn new(files: &[(&str, &str)]) -> Self {
            let tree = Self(tempfile::tempdir().unwrap());
            files.iter().for_each(|(path, text)| tree.write(path, text));
            tree
        }
        fn write(&self, path: &str, text: &str) {
            let path = self.0.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        fn root(&self) -> Root {
            Root::new(self.0.path())
        }
    }

    fn count(values: &[u64]) -> GroupCount {
        GroupCount {
            enabled_ns: 1,
            running_ns: 1,
            values: values.iter().map(|v| Some(*v)).collect(),
        }
    }

    #[test]
    fn the_use_of_a_controller_is_its_share_of_busy_clocks() {
        assert_eq!(use_of(Kind::Umc, &count(&[1000, 900])), Some(0.45));
        assert_eq!(use_of(Kind::Imc, &count(&[1000, 100, 50])), Some(0.6));
        // Nothing counted, or what cannot be: unknown.
        assert_eq!(use_of(Kind::Imc, &count(&[0, 1, 1])), None);
        assert_eq!(use_of(Kind::Umc, &count(&[1000, 2500])), None);
        assert_eq!(use_of(Kind::Umc, &count(&[1000])), None);
        assert_eq!(use_of(Kind::Umc, &count(&[1000, 2100])), Some(1.0));
    }

    #[test]
    fn controllers_are_found_by_their_event_sources() {
        let imc = "sys/bus/event_source/devices/uncore_imc_1";
        let tree = Tree::new(&[
            (&format!("{imc}/type"), "24\n"),
            (&format!("{imc}/cpumask"), "0,28\n"),
            (&format!("{imc}/events/clockticks"), "event=0x00\n"),
            (&format!("{imc}/events/cas_count_read"), "event=0x04,umask=0x03\n"),
            (
                &format!("{imc}/events/cas_count_write"),
                "event=0x04,umask=0x0c\n",
            ),
            (
                "sys/bus/event_source/devices/uncore_imc_free_running_0/type",
                "30\n",
            ),
            ("sys/bus/event_source/devices/amd_umc_0/type", "40\n"),
            ("sys/bus/event_source/devices/amd_umc_0/cpumask", "0\n"),
            // Without the events that are needed it is not used.
            ("sys/bus/event_source/devices/uncore_imc_2/type", "25\n"),
            ("sys/bus/event_source/devices/uncore_imc_2/cpumask", "0\n"),
        ]);
        let found = controllers(&tree.root());
        assert_eq!(found.len(), 3);
        assert_eq!((found[0].kind, found[0].events[1].config), (Kind::Umc, 0x14));
        assert_eq!(found[2].cpu, 28);
        assert_eq!(
            found[1].events.iter().map(|e| e.config).collect::<Vec<_>>(),
            [0, 0x0304, 0x0C04]
        );
        assert!(describe(&tree.root()).unwrap().contains("3 memory channels"));
        for text in ["event=0x04,thresh=1", "event=4", "event=0x104", ""] {
            assert_eq!(config_of(text), None, "{text}");
        }
    }

    #[test]
    fn bandwidth_monitoring_is_summed_over_groups_and_set_against_the_firmware_s_figures() {
        let cache = |cpu: u32, id: u32, shared: &str| {
            let base = format!("sys/devices/system/cpu/cpu{cpu}/cache/index3");
            [
                (format!("{base}/id"), format!("{id}\n")),
                (format!("{base}/shared_cpu_list"), format!("{shared}\n")),
            ]
        };
        let tree = Tree::new(&[
            ("sys/devices/system/node/node0/cpulist", "0-3\n"),
            ("sys/devices/system/node/node1/cpulist", "4-5\n"),
            (
                "sys/devices/system/node/node0/access0/initiators/read_bandwidth",
                "1000\n",
            ),
            ("sys/fs/resctrl/mon_data/mon_L3_00/mbm_total_bytes", "1048576\n"),
            ("sys/fs/resctrl/mon_data/mon_L3_01/mbm_total_bytes", "0\n"),
            ("sys/fs/resctrl/mon_data/mon_L3_02/mbm_total_bytes", "5\n"),
            ("sys/fs/resctrl/batch/tasks", ""),
            ("sys/fs/resctrl/batch/mon_data/mon_L3_01/mbm_total_bytes", "0\n"),
            (
                "sys/fs/resctrl/batch/mon_data/mon_L3_00/mbm_total_bytes",
                "Unavailable\n",
            ),
        ]);
        for (path, text) in [cache(0, 0, "0-1"), cache(2, 1, "2-3"), cache(4, 2, "4-5")]
            .iter()
            .flatten()
        {
            tree.write(path, text);
        }
        let root = tree.root();
        let links = Links::begin(&root, Nanoseconds::from_millis(0));
        assert_eq!(links.bytes, BTreeMap::from([(0, 1_048_576), (1, 5)]));
        // In two seconds: 300 MiB by one cache and 700 MiB by a group on the other: half of what node 0 can do.
        tree.write(
            "sys/fs/resctrl/mon_data/mon_L3_00/mbm_total_bytes",
            &format!("{}\n", 301 << 20),
        );
        tree.write(
            "sys/fs/resctrl/batch/mon_data/mon_L3_01/mbm_total_bytes",
            &format!("{}\n", 700 << 20),
        );
        let used = links.busiest(&root, Nanoseconds::from_millis(2000)).unwrap();
        assert!((used - 0.5).abs() < 1e-9, "{used}");
        // Without the firmware's figure nothing is said.
        std::fs::remove_file(
            tree.0
                .path()
                .join("sys/devices/system/node/node0/access0/initiators/read_bandwidth"),
        )
        .unwrap();
        assert_eq!(links.busiest(&root, Nanoseconds::from_millis(2000)), None);
        assert!(describe(&root).unwrap_err().contains("HMAT"));
    }

    #[test]
    fn a_machine_without_either_knows_nothing() {
        let tree = Tree::new(&[]);
        let links = Links::begin(&tree.root(), Nanoseconds::from_millis(0));
        assert_eq!(links.busiest(&tree.root(), Nanoseconds::from_millis(2000)), None);
        assert!(describe(&tree.root()).unwrap_err().contains("resctrl"));
    }
}
