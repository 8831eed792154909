//! Capabilities of places of threads and memory.

use super::memory::{lacking, no_scratch, other_pages, whole_large_pages};
use super::{List, Seen, captured, may_pass};
use homeostat_kernel::memory::{BASE_PAGE, ScratchMapping};
use homeostat_kernel::numa::{CpuMask, NumaError, PageCall, PageStatus};
use homeostat_kernel::privileges::{CAP_SYS_PTRACE, may};
use homeostat_kernel::root::Root;
use homeostat_kernel::{files, numa};
use homeostat_model::CapabilityState::{Available, Limited, Missing};
use homeostat_model::Machine;
use std::time::Instant;

impl List {
    /// Places of threads and memory, tried on ourselves.
    pub(super) fn locality(&mut self, root: &Root, machine: &Machine) {
        self.add(
            "locality",
            "where threads and memory are is not known: cache_affinity, memory_affinity and prefetch are off",
            if root.is_live() {
                probe_locality(root, machine)
            } else {
                captured()
            },
        );
    }

    /// Effectors of the placement strategies.
    pub(super) fn placing(&mut self, root: &Root, machine: &Machine) {
        let domains: std::collections::BTreeSet<_> = machine.general_cpus().map(|c| c.llc).collect();
        let with_memory: Vec<u32> = machine
            .nodes
            .iter()
            .filter(|n| n.memory.0 > 0)
            .map(|n| n.id.0)
            .collect();
        let threads = if domains.len() < 2 && machine.nodes.len() < 2 {
            Seen::new(
                Missing,
                "one last-level-cache domain, one NUMA node: there is nothing to place",
                "",
            )
        } else if root.is_live() {
            try_affinity(root)
        } else {
            captured()
        };
        let pages = if with_memory.len() < 2 {
            Seen::new(Missing, "one NUMA node with memory: all memory is there", "")
        } else if root.is_live() {
            try_page_moves(root, &with_memory)
        } else {
            captured()
        };
        self.add(
            "placement.threads.memory",
            "threads are placed first and their memory in a later trial: where neither gains without the other, nothing is",
            if threads.state == Available {
                pages.clone()
            } else {
                threads.clone()
            },
        );
        let split = if domains.len() < 2 {
            Seen::new(
                Missing,
                "one last-level-cache domain: there is nothing to split over",
                "",
            )
        } else {
            threads.clone()
        };
        self.add(
            "placement.threads.split",
            "processes that fit no part of the machine together keep all CPUs",
            split,
        );
        self.add(
            "placement.threads.grouped",
            "a program that fills more than a board keeps all CPUs",
            if threads.state == Available {
                Seen::new(Missing, homeostat_effectors::GROUPED_WHY_NOT, "")
            } else {
                threads.clone()
            },
        );
        self.add(
            "placement.threads",
            "threads are left to the scheduler: cache_affinity is off",
            threads,
        );
        self.add(
            "placement.pages.spread",
            "memory of a program that is kept on several nodes stays where it is",
            pages.clone(),
        );
        self.add(
            "placement.pages.large",
            "memory on large pages stays where it is",
            if pages.state == Available {
                whole_large_pages(root, &machine.kernel)
            } else {
                pages.clone()
            },
        );
        self.add(
            "placement.pages",
            "pages stay where they are: memory_affinity is off",
            pages,
        );
        let release = &machine.kernel;
        let unified = files::text(root, "/sys/fs/cgroup/cgroup.controllers")
            .or_else(|| files::text(root, "/sys/fs/cgroup/unified/cgroup.controllers"));
        let version = if unified.is_some_and(|list| list.split_whitespace().any(|name| name == "cpuset")) {
            Some(2)
        } else {
            root.path("/sys/fs/cgroup/cpuset/cpuset.cpus")
                .exists()
                .then_some(1)
        };
        let seen = match version {
            Some(version) if homeostat_effectors::keeps_masks(release) => Seen::new(
                Available,
                format!("cpuset controller of cgroup v{version}, kernel {release}"),
                "",
            ),
            Some(version) => Seen::new(
                Missing,
                format!(
                    "cpuset controller of cgroup v{version}, but kernel {release} forgets a thread's own mask when its \
                     cpuset changes"
                ),
                "run a kernel from 6.2",
            ),
            None => Seen::new(
                Missing,
                "no cpuset controller below /sys/fs/cgroup",
                "run a kernel with CONFIG_CPUSETS and mount the control groups",
            ),
        };
        self.add(
            "placement.cpuset",
            "processes that somebody outside of a placed workload starts in its control group are not placed with it",
            seen,
        );
        let value = files::text(root, homeostat_sensors::kernel_balancing::FILE);
        let seen = match (value, homeostat_sensors::kernel_balancing::configured(root)) {
            (None, _) => Seen::new(
                Missing,
                format!("{} is absent", homeostat_sensors::kernel_balancing::FILE),
                "run a kernel with CONFIG_NUMA_BALANCING",
            ),
            (Some(value), Some(place)) => Seen::new(
                Limited,
                format!("kernel.numa_balancing = {value}, set in {place}: a person's choice is kept"),
                "",
            ),
            (Some(value), None) => Seen::new(Available, format!("kernel.numa_balancing = {value}"), ""),
        };
        self.add(
            "numa_balancing",
            "automatic NUMA balancing of the kernel stays as it is and is not tried",
            seen,
        );
    }
}

/// Finds the places of our own thread and memory, and whether those of others may be read.
fn probe_locality(root: &Root, machine: &Machine) -> Seen {
    let begin = Instant::now();
    let own = files::bytes(root, "/proc/self/stat", 4096)
        .and_then(|text| homeostat_sensors::locality::threads::parse_thread_stat(&text));
    let Some(own) = own else {
        return Seen::new(Missing, "/proc/self/stat does not tell the CPU", "mount proc");
    };
    let nodes = machine.nodes.len().max(1);
    let numa_maps = root.path("/proc/self/numa_maps");
    let by_node = match std::fs::File::open(&numa_maps) {
        Ok(_) => {
            let scratch = match ScratchMapping::new(1) {
                Ok(mut scratch) => {
                    scratch.touch(BASE_PAGE);
                    scratch
                }
                Err(e) => return no_scratch(&e),
            };
            let pid = i32::try_from(std::process::id()).unwrap_or(0);
            match PageCall::default().nodes_of(pid, &[scratch.address()]) {
                Ok([PageStatus::On(node)]) => Ok(*node),
                Ok(other) => Err(format!("move_pages says {other:?} of a page of our own")),
                Err(e) => Err(format!("move_pages: {e}")),
            }
        }
        Err(e) => Err(format!("/proc/self/numa_maps: {e}")),
    };
    let took = begin.elapsed().as_micros();
    match by_node {
        Ok(node) if may(root, CAP_SYS_PTRACE) => Seen::new(
            Available,
            format!(
                "our own thread is on CPU {}, a page of ours on node {node} of {nodes}; found in {took} us",
                own.cpu
            ),
            "",
        ),
        Ok(_) => Seen::new(
            Missing,
            "works on ourselves, but for others CAP_SYS_PTRACE is missing",
            "run homeostat as root or give it CAP_SYS_PTRACE",
        ),
        // All memory is on the one node, and threads report their CPU anyhow.
        Err(_) if nodes < 2 => Seen::new(
            Available,
            format!(
                "our own thread is on CPU {}; one node, so all memory is on it",
                own.cpu
            ),
            "",
        ),
        Err(why) => Seen::new(
            Missing,
            format!("{nodes} nodes, but {why}"),
            "run a kernel with CONFIG_NUMA and CONFIG_MIGRATION",
        ),
    }
}

/// Restricts a thread of our own, which ends with the probe, to one CPU, and frees it again.
fn try_affinity(root: &Root) -> Seen {
    let probe = || {
        let thread = rustix::thread::gettid().as_raw_nonzero().get();
        let found = numa::affinity(thread)?;
        let one = CpuMask::of(found.iter().take(1));
        let begin = Instant::now();
        numa::set_affinity(thread, &one)?;
        let seen = numa::affinity(thread)?;
        numa::set_affinity(thread, &found)?;
        let back = numa::affinity(thread)?;
        Ok::<_, NumaError>((seen == one && back == found, begin.elapsed().as_micros()))
    };
    let outcome = std::thread::Builder::new()
        .name("probe".into())
        .spawn(probe)
        .map(std::thread::JoinHandle::join);
    let outcome: Result<(bool, u128), NumaError> = match outcome {
        Ok(Ok(outcome)) => outcome,
        Ok(Err(_)) => return Seen::new(Missing, "the probing thread ended early", ""),
        Err(e) => {
            return Seen::new(Missing, format!("no thread for the probe: {e}"), "").passing(may_pass(&e));
        }
    };
    match (outcome, lacking(root)) {
        (Ok((true, took)), missing) if missing.is_empty() => Seen::new(
            Available,
            format!("a thread of our own was restricted and set free in {took} us, verified"),
            "",
        ),
        (Ok((true, _)), missing) => Seen::new(
            Missing,
            format!(
                "works on our own threads, but for those of others {} is missing",
                missing.join(", ")
            ),
            "run homeostat as root or give it CAP_SYS_NICE and CAP_SYS_PTRACE",
        ),
        (Ok((false, _)), _) => Seen::new(
            Missing,
            "sched_setaffinity of our own thread did not last",
            "run homeostat on the host, not in a container that forbids it",
        ),
        (Err(e), _) => Seen::new(
            Missing,
            format!("sched_setaffinity of our own thread: {e}"),
            "run homeostat on the host, not in a container that forbids it",
        ),
    }
}

fn try_page_moves(root: &Root, nodes: &[u32]) -> Seen {
    if let Some(other) = other_pages(rustix::param::page_size() as u64) {
        return other;
    }
    const PAGES: u64 = 16;
    let mut scratch = match ScratchMapping::new(1) {
        Ok(scratch) => scratch,
        Err(e) => return no_scratch(&e),
    };
    scratch.touch(PAGES * BASE_PAGE);
    let pid = i32::try_from(std::process::id()).unwrap_or(0);
    let addresses: Vec<u64> = (0..PAGES).map(|i| scratch.address() + i * BASE_PAGE).collect();
    let mut call = PageCall::default();
    let begin = Instant::now();
    let mut probe = || {
        let home = match call.nodes_of(pid, &addresses)?.first() {
            Some(PageStatus::On(home)) => *home,
            _ => return Ok(None),
        };
        let mut on = |node: u32| {
            call.move_to(pid, &addresses, node, false)?;
            let seen = call.nodes_of(pid, &addresses)?;
            Ok::<bool, NumaError>(seen.iter().all(|s| *s == PageStatus::On(node)))
        };
        for other in nodes.iter().filter(|n| **n != home) {
            if on(*other)? {
                return Ok(on(home)?.then_some((home, *other)));
            }
        }
        Ok(None)
    };
    let outcome: Result<Option<(u32, u32)>, NumaError> = probe();
    let took = begin.elapsed().as_micros();
    match (outcome, lacking(root)) {
        (Ok(Some((home, other))), missing) if missing.is_empty() => Seen::new(
            Available,
            format!(
                "{PAGES} pages of our own went from node {home} to node {other} and back in {took} us, verified"
            ),
            "",
        ),
        (Ok(Some(_)), missing) => Seen::new(
            Missing,
            format!(
                "works on our own memory, but for that of others {} is missing",
                missing.join(", ")
            ),
            "run homeostat as root or give it CAP_SYS_NICE and CAP_SYS_PTRACE",
        ),
        (Ok(None), _) => Seen::new(
            Missing,
            "pages of our own could not be moved to any other node and back",
            "free some memory on each node; it is probed again after a while",
        )
        .passing(true),
        (Err(e), _) => Seen::new(
            Missing,
            format!("move_pages of our own memory: {e}"),
            "run a kernel with CONFIG_NUMA and CONFIG_MIGRATION, outside of a container that forbids move_pages",
        )
        .passing(e == NumaError::NoMemory),
    }
}
