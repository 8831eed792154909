//! Activity of NUMA nodes: busy CPUs, sources of new memory, and work of automatic NUMA balancing.
//!
//! Sources: the `cpuN` lines of `/proc/stat`, `/sys/devices/system/node/nodeN/{meminfo,numastat}`
//! (Documentation/admin-guide/numastat.rst), `/proc/vmstat`. Differences are since the previous sample.

use crate::host;
use crate::locality::Shape;
use crate::topology::NodeAmounts;
use homeostat_kernel::bytes::{lines, number, words};
use homeostat_kernel::{Root, files};
use homeostat_model::{Nanoseconds, NodeId};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// One node in one interval.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct NodeActivity {
    /// Present use of its memory.
    pub amounts: NodeAmounts,
    /// Busy CPUs of the node (1.0 = one all the time); `None` at the first sample.
    pub busy: Option<f64>,
    /// Pages allocated on this node for programs that ran on it.
    pub pages_local: u64,
    /// Pages allocated on this node for programs that ran elsewhere.
    pub pages_to_others: u64,
    /// Pages allocated on this node although another one was preferred.
    pub pages_missed: u64,
}

/// Work of automatic NUMA balancing on the host in one interval.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostBalancing {
    /// Faults taken to learn which thread uses a page.
    pub hint_faults: u64,
    /// Hint faults whose page was on the node of the thread.
    pub hint_faults_local: u64,
    /// Pages migrated.
    pub pages_migrated: u64,
}

/// Busy time of each CPU in clock ticks from `/proc/stat`: everything but idle and I/O wait.
pub fn parse_busy(stat: &[u8]) -> BTreeMap<u32, u64> {
    lines(stat)
        .filter_map(|line| {
            let mut parts = words(line);
            let cpu = parts.next()?.strip_prefix(b"cpu").and_then(number)?;
            let mut field = [0u64; 8];
            for (slot, word) in field.iter_mut().zip(parts) {
                *slot = number(word)?;
            }
            let [user, nice, system, _idle, _iowait, irq, softirq, steal] = field;
            let busy = [nice, system, irq, softirq, steal]
                .iter()
                .fold(user, |sum, x| sum.saturating_add(*x));
            Some((u32::try_from(cpu).ok()?, busy))
        })
        .collect()
}

fn value(text: &[u8], key: &str) -> Option<u64> {
    lines(text).find_map(|line| {
        let mut parts = words(line);
        (parts.next()? == key.as_bytes()).then(|| parts.next().and_then(number))?
    })
}

#[derive(Clone, Debug, Default)]
struct Counters {
    busy: BTreeMap<u32, u64>,
    /// By node: local, to others, missed.
    pages: BTreeMap<NodeId, [u64; 3]>,
    balancing: Option<HostBalancing>,
}

/// Samples the nodes.
#[derive(Debug)]
pub struct NodeWatch {
    root: Root,
    before: Option<(Nanoseconds, Counters)>,
}

impl NodeWatch {
    /// A sensor without samples.
    pub fn new(root: Root) -> Self {
        Self { root, before: None }
    }

    /// The nodes since the previous sample, and the work of automatic NUMA balancing (`None` if the kernel lacks it).
    pub fn look(
        &mut self,
        nodes: &[NodeId],
        shape: &Shape,
        now: Nanoseconds,
    ) -> (BTreeMap<NodeId, NodeActivity>, Option<HostBalancing>) {
        let mut counters = Counters::default();
        let stat = files::bytes(&self.root, "/proc/stat", files::LARGE_FILE_MAX).unwrap_or_default();
        counters.busy = parse_busy(&stat);
        let mut amounts = BTreeMap::new();
        for node in nodes {
            let base = format!("/sys/devices/system/node/node{node}");
            let meminfo = files::bytes(&self.root, &format!("{base}/meminfo"), files::SMALL_FILE_MAX)
                .unwrap_or_default();
            amounts.insert(*node, NodeAmounts::parse(&meminfo));
            let numastat = files::bytes(&self.root, &format!("{base}/numastat"), files::SMALL_FILE_MAX)
                .unwrap_or_default();
            let of = |key| value(&numastat, key).unwrap_or(0);
            counters
                .pages
                .insert(*node, [of("local_node"), of("other_node"), of("numa_miss")]);
        }
        let vmstat = files::bytes(&self.root, "/proc/vmstat", files::SMALL_FILE_MAX).unwrap_or_default();
        counters.balancing = value(&vmstat, "numa_hint_faults").map(|hint_faults| HostBalancing {
            hint_faults,
            hint_faults_local: value(&vmstat, "numa_hint_faults_local").unwrap_or(0),
            pages_migrated: value(&vmstat, "numa_pages_migrated").unwrap_or(0),
        });
        let before = self.before.replace((now, counters.clone()));
        let (then, before) = match before {
            Some((then, before)) => (Some(then), before),
            None => (None, counters.clone()),
        };
        let tick = host::tick_length() as f64;
        let seconds = then.map_or(0.0, |then| (now - then).as_secs_f64());
        let activity = nodes
            .iter()
            .map(|node| {
                let ticks: u64 = shape
                    .cpus()
                    .filter(|cpu| shape.place(*cpu).is_some_and(|p| p.node == *node))
                    .filter_map(|cpu| {
                        let (now, before) = (counters.busy.get(&cpu)?, before.busy.get(&cpu)?);
                        Some(now.saturating_sub(*before))
                    })
                    .sum();
                let pages = |i: usize| {
                    let of = |c: &Counters| c.pages.get(node).and_then(|p| p.get(i)).copied().unwrap_or(0);
                    of(&counters).saturating_sub(of(&before))
                };
                let activity = NodeActivity {
                    amounts: amounts.get(node).copied().unwrap_or_default(),
                    busy: (seconds > 0.0).then(|| ticks as f64 * tick / 1e9 / seconds),
                    pages_local: pages(0),
                    pages_to_others: pages(1),
                    pages_missed: pages(2),
                };
                (*node, activity)
            })
            .collect();
        let balancing = match (counters.balancing, before.balancing) {
            (Some(now), Some(before)) => Some(HostBalancing {
                hint_faults: now.hint_faults.saturating_sub(before.hint_faults),
                hint_faults_local: now.hint_faults_local.saturating_sub(before.hint_faults_local),
                pages_migrated: now.pages_migrated.saturating_sub(before.pages_migrated),
            }),
            _ => None,
        };
        (activity, balancing)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use homeostat_model::{Bytes, Cpu, CpuId, LlcId};
    use proptest::prelude::*;

    #[test]
    fn busy_time_is_read_for_each_cpu() {
        let stat = b"cpu  10 1 5 100 50 2 3 4 0 0\ncpu0 10 1 5 100 50 2 3 4 0 0\ncpu3 7 0 0 9\nintr 5\n";
        assert_eq!(parse_busy(stat), BTreeMap::from([(0, 25), (3, 7)]));
    }

    #[test]
    fn nodes_are_told_apart_over_an_interval() {
        let tree = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = tree.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        write("proc/stat", "cpu 0\ncpu0 100 0 0 0\ncpu1 100 0 0 0\n");
        write(
            "proc/vmstat",
            "numa_hint_faults 10\nnuma_hint_faults_local 4\nnuma_pages_migrated 1\n",
        );
        write(
            "sys/devices/system/node/node1/meminfo",
            "Node 1 MemTotal: 100 kB\nNode 1 MemFree: 40 kB\nNode 1 FilePages: 7 kB\n",
        );
        write(
            "sys/devices/system/node/node1/numastat",
            "numa_hit 9\nnuma_miss 1\nlocal_node 5\nother_node 4\n",
        );
        let cpu = |id, node| Cpu {
            id: CpuId(id),
            core: id,
            package: 0,
            llc: LlcId(id),
            node: NodeId(node),
            set_aside: false,
        };
        let shape = Shape::of(&[cpu(0, 0), cpu(1, 1)]);
        let mut watch = NodeWatch::new(Root::new(tree.path()));
        let nodes = [NodeId(0), NodeId(1)];
        let (first, balancing) = watch.look(&nodes, &shape, Nanoseconds::from_secs(1));
        assert_eq!((first[&NodeId(1)].busy, first[&NodeId(1)].pages_local), (None, 0));
        assert_eq!(first[&NodeId(1)].amounts.free, Bytes::from_kib(40));
        assert_eq!(balancing, Some(HostBalancing::default()));
        write("proc/stat", "cpu 0\ncpu0 100 0 0 0\ncpu1 150 0 50 0\n");
        write(
            "proc/vmstat",
            "numa_hint_faults 30\nnuma_hint_faults_local 14\nnuma_pages_migrated 4\n",
        );
        write(
            "sys/devices/system/node/node1/numastat",
            "numa_hit 9\nnuma_miss 3\nlocal_node 15\nother_node 9\n",
        );
        let (second, balancing) = watch.look(&nodes, &shape, Nanoseconds::from_secs(3));
        let one = &second[&NodeId(1)];
        assert_eq!(
            (one.pages_local, one.pages_to_others, one.pages_missed),
            (10, 5, 2)
        );
        let expected = 100.0 * host::tick_length() as f64 / 1e9 / 2.0;
        assert!((one.busy.unwrap() - expected).abs() < 1e-9);
        assert_eq!(second[&NodeId(0)].busy, Some(0.0));
        assert_eq!(
            balancing,
            Some(HostBalancing {
                hint_faults: 20,
                hint_faults_local: 10,
                pages_migrated: 3
            })
        );
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = parse_busy(&bytes);
            let _ = value(&bytes, "numa_hit");
        }
    }
}
