//! What the guest must find and what it shall run: the words `vm.…=` of the kernel's command line, which `vm/vm-test`
//! wrote from the same table as the arguments of QEMU.

use crate::Failure;
use crate::instruments::numbers;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// A node as it was built.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExpectedNode {
    /// Its CPUs.
    pub cpus: BTreeSet<u32>,
    /// Its memory in MiB.
    pub mib: u64,
}

/// The machine as it was built.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Expected {
    /// Name of the shape.
    pub shape: String,
    /// By number of the node.
    pub nodes: BTreeMap<u32, ExpectedNode>,
    /// By number of the node: distance to each node.
    pub distances: Vec<Vec<u32>>,
    /// CPUs that share a last-level cache.
    pub caches: BTreeSet<BTreeSet<u32>>,
    /// CPUs that the kernel was told to leave out (`isolcpus=`).
    pub set_aside: BTreeSet<u32>,
    /// Longest time for all scenarios.
    pub limit: Duration,
    /// What shall run, in order.
    pub scenarios: Vec<String>,
}

impl Expected {
    /// From the text of `/proc/cmdline`.
    ///
    /// # Errors
    /// A word is missing or not understood.
    pub fn parse(command_line: &str) -> Result<Self, Failure> {
        let words: BTreeMap<&str, &str> = command_line
            .split_whitespace()
            .filter_map(|word| word.strip_prefix("vm.")?.split_once('='))
            .collect();
        let word = |name: &str| {
            words
                .get(name)
                .copied()
                .ok_or_else(|| Failure::Broken(format!("the kernel's command line has no vm.{name}=")))
        };
        let wrong = |name: &str, text: &str| Failure::Broken(format!("vm.{name}={text} is not understood"));
        let mut nodes = BTreeMap::new();
        for text in word("nodes")?.split(';') {
            let node = parse_node(text).ok_or_else(|| wrong("nodes", text))?;
            nodes.insert(node.0, node.1);
        }
        let mut distances = Vec::new();
        for row in word("distances")?.split(';') {
            let row: Option<Vec<u32>> = row.split(',').map(|n| n.parse().ok()).collect();
            distances.push(row.ok_or_else(|| wrong("distances", word("distances").unwrap_or_default()))?);
        }
        let caches: Option<BTreeSet<BTreeSet<u32>>> = word("caches")?.split(';').map(numbers).collect();
        let limit = word("limit_s")?;
        Ok(Self {
            shape: word("shape")?.to_owned(),
            nodes,
            distances,
            caches: caches.ok_or_else(|| wrong("caches", word("caches").unwrap_or_default()))?,
            set_aside: match words.get("set_aside") {
                None => BTreeSet::new(),
                Some(text) => numbers(text).ok_or_else(|| wrong("set_aside", text))?,
            },
            limit: Duration::from_secs(limit.parse().map_err(|_| wrong("limit_s", limit))?),
            scenarios: word("scenarios")?.split(',').map(str::to_owned).collect(),
        })
    }

    /// All CPUs.
    pub fn cpus(&self) -> BTreeSet<u32> {
        self.nodes.values().flat_map(|n| n.cpus.iter().copied()).collect()
    }

    /// The CPUs on which a program runs that nobody bound.
    pub fn general_cpus(&self) -> BTreeSet<u32> {
        self.cpus().difference(&self.set_aside).copied().collect()
    }

    /// Those of a node; none when there is no such node.
    pub fn general_cpus_of(&self, node: u32) -> BTreeSet<u32> {
        self.cpus_of(node).difference(&self.set_aside).copied().collect()
    }

    /// CPUs of a node; none when there is no such node.
    pub fn cpus_of(&self, node: u32) -> BTreeSet<u32> {
        self.nodes.get(&node).map(|n| n.cpus.clone()).unwrap_or_default()
    }
}

/// `1:2-3:512`: number, CPUs, MiB.
fn parse_node(text: &str) -> Option<(u32, ExpectedNode)> {
    let mut parts = text.split(':');
    let number = parts.next()?.parse().ok()?;
    let cpus = numbers(parts.next()?)?;
    let mib = parts.next()?.parse().ok()?;
    parts
        .next()
        .is_none()
        .then_some((number, ExpectedNode { cpus, mib }))
}

#[cfg(test)]
mod tests {
    use super::*;

    const LINE: &str = "console=ttyS0 quiet vm.shape=x vm.nodes=0:0-1:512;1::256 vm.distances=10,20;20,10 \
                        vm.caches=0-1 vm.limit_s=300 vm.scenarios=a,b kernelcore=384M\n";

    #[test]
    fn the_command_line_says_what_was_built() {
        let expected = Expected::parse(LINE).unwrap();
        assert_eq!(expected.shape, "x");
        assert_eq!(expected.cpus(), BTreeSet::from([0, 1]));
        assert_eq!(expected.nodes[&1].cpus, BTreeSet::new(), "a node without CPUs");
        assert_eq!((expected.nodes[&0].mib, expected.nodes[&1].mib), (512, 256));
        assert_eq!(expected.distances, [[10, 20], [20, 10]]);
        assert_eq!(expected.caches, BTreeSet::from([BTreeSet::from([0, 1])]));
        assert_eq!(expected.limit, Duration::from_secs(300));
        assert_eq!(expected.scenarios, ["a", "b"]);
        assert_eq!(expected.general_cpus(), expected.cpus());
        let isolated = format!("{LINE} vm.set_aside=1");
        let expected = Expected::parse(&isolated).unwrap();
        assert_eq!(expected.general_cpus(), BTreeSet::from([0]));
        assert_eq!(expected.general_cpus_of(0), BTreeSet::from([0]));
    }

    #[test]
    fn what_is_missing_or_wrong_is_said() {
        for (from, to, said) in [
            ("vm.caches=0-1", "", "vm.caches"),
            ("10,20;20,10", "10,far;20,10", "vm.distances"),
            ("0:0-1:512", "0:0-1", "vm.nodes"),
            ("=300", "=soon", "vm.limit_s"),
        ] {
            let failure = Expected::parse(&LINE.replace(from, to)).unwrap_err().to_string();
            assert!(failure.contains(said), "{failure}");
        }
    }
}
