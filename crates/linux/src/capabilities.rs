//! What this machine can sense and do, probed, not guessed.
//!
//! Every probe says how it was made and what was seen, what is lost without it, and what a person can do. Probes
//! change nothing outside this process: conversion and its undo are tried on two MiB of our own memory. On a captured
//! machine only what files tell is known; everything that needs a system call is missing there.

use homeostat_effectors;
use homeostat_effectors::prefetch::control;
use homeostat_effectors::prefetch::control::Obstacle;
use homeostat_kernel::bytes::{chosen, lines, words};
use homeostat_kernel::memory::{Advice, AdviseError, BASE_PAGE, PIECE, Pagemap, PieceState, ScratchMapping};
use homeostat_kernel::numa::{CpuMask, NumaError, PageCall, PageStatus};
use homeostat_kernel::perf::OpenError;
use homeostat_kernel::root::{Root, open_in};
use homeostat_kernel::{cache, files, memory, numa, probe};
use homeostat_model::units::ranges;
use homeostat_model::{Capability, CapabilityId, CapabilityState, Machine};
use homeostat_sensors::counters::others::{Profiler, watchdog};
use homeostat_sensors::counters::{Ability, links, others};
use homeostat_sensors::regions::gives_large_pages_to_all;
use homeostat_sensors::{memory_settings, pressure, topology};
use rustix::fs::{Mode, OFlags};
use std::os::fd::AsFd;
use std::path::Path;
use std::time::Instant;

/// `CAP_*` numbers of `include/uapi/linux/capability.h`.
const CAP_IPC_LOCK: u32 = 14;
const CAP_SYS_ADMIN: u32 = 21;
const CAP_SYS_NICE: u32 = 23;
/// Since Linux 5.8; before, CAP_SYS_ADMIN.
const CAP_PERFMON: u32 = 38;

use CapabilityState::{Available, Limited, Missing};
use homeostat_kernel::privileges::{CAP_SYS_PTRACE, may};

/// What one probe saw.
#[derive(Clone)]
struct Seen {
    state: CapabilityState,
    detail: String,
    remedy: &'static str,
    /// It failed for a reason that may pass by itself (memory short, a table full): another probe may tell otherwise.
    passing: bool,
}

impl Seen {
    fn new(state: CapabilityState, detail: impl Into<String>, remedy: &'static str) -> Self {
        Self {
            state,
            detail: detail.into(),
            remedy,
            passing: false,
        }
    }

    /// Marks a failure that may pass by itself.
    fn passing(mut self, passing: bool) -> Self {
        self.passing = passing;
        self
    }
}

/// How many CPUs nobody has set aside, and who the others are for.
fn cpus_in_general_use(root: &Root, machine: &Machine) -> Seen {
    let set_aside = topology::SetAside::read(root);
    let rows = [
        (&set_aside.isolated, "isolated (isolcpus=)"),
        (
            &set_aside.tickless,
            "without the timer tick (nohz_full=; progress points are not looked for in what may run there, and it is not counted in turns by its CPU time)",
        ),
        (&set_aside.partitioned, "in a partition of cpusets"),
    ];
    let told: Vec<String> = rows
        .iter()
        .filter(|(cpus, _)| !cpus.is_empty())
        .map(|(cpus, how)| format!("CPUs {} are {how}", ranges(cpus.iter().copied())))
        .collect();
    let (general, all) = (machine.general_cpus().count(), machine.cpus.len());
    if told.is_empty() {
        return Seen::new(Available, format!("all {all} CPUs"), "");
    }
    let detail = format!("{general} of {all} CPUs; {}", told.join("; "));
    // It is as a person wanted it: there is nothing to remedy.
    Seen::new(Limited, detail, "")
}

/// Whether control groups can be written: all that is ever written below `/sys`.
fn control_groups_writable(root: &Root) -> Seen {
    const ONE_OF: [&str; 3] = ["", "unified/", "memory/"];
    let lists = ONE_OF.map(|hierarchy| format!("/sys/fs/cgroup/{hierarchy}cgroup.procs"));
    let Some(list) = lists.iter().find(|list| root.path(list).exists()) else {
        return Seen::new(Missing, "/sys/fs/cgroup has no control groups", "mount cgroup2");
    };
    match rustix::fs::access(root.path(list), rustix::fs::Access::WRITE_OK) {
        Err(rustix::io::Errno::ROFS) => Seen::new(
            Missing,
            "/sys/fs/cgroup is mounted read-only",
            "run homeostat on the host, or a container with -v /sys:/sys",
        ),
        Err(e) if root.is_live() => Seen::new(Missing, format!("{list}: {e}"), "run homeostat as root"),
        _ => Seen::new(
            Available,
            "control groups below /sys/fs/cgroup can be written",
            "",
        ),
    }
}

/// Whether an error of the system may pass by itself.
fn may_pass(error: &std::io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(libc::ENOMEM | libc::EAGAIN | libc::EBUSY | libc::EINTR | libc::EMFILE | libc::ENFILE)
    )
}

/// What the probes saw.
#[derive(Debug)]
pub struct Probed {
    /// By name.
    pub capabilities: Vec<Capability>,
    /// Those that failed for a reason that may pass by itself, such as memory that was short; worth another probe.
    pub passing: Vec<CapabilityId>,
}

/// Probes everything. `machine` gives what the topology has told already.
pub fn probe(root: &Root, machine: &Machine) -> Probed {
    let mut list = List {
        capabilities: Vec::new(),
        passing: Vec::new(),
    };
    list.conversion(root);
    list.memory_sensors(root);
    list.time_sensors(root);
    list.event_sources(root);
    list.settings(root, machine);
    list.surroundings(root, machine);
    list.choices(root, machine);
    list.capabilities.sort_by(|a, b| a.id.cmp(&b.id));
    Probed {
        capabilities: list.capabilities,
        passing: list.passing,
    }
}

struct List {
    capabilities: Vec<Capability>,
    passing: Vec<CapabilityId>,
}

impl List {
    fn add(&mut self, id: &str, cost: &str, seen: Seen) {
        let lost = seen.state != Available;
        if lost && seen.passing {
            self.passing.push(CapabilityId::new(id));
        }
        self.capabilities.push(Capability {
            id: CapabilityId::new(id),
            state: seen.state,
            detail: seen.detail,
            cost_of_absence: if lost { cost.to_owned() } else { String::new() },
            remedy: if lost {
                seen.remedy.to_owned()
            } else {
                String::new()
            },
        });
    }

    /// A sensor that is one file which can be read.
    fn file(&mut self, root: &Root, id: &str, path: &str, cost: &str, remedy: &'static str) {
        let seen = match files::bytes(root, path, 4096) {
            Some(text) => Seen::new(Available, format!("read {} bytes of {path}", text.len()), ""),
            None => Seen::new(Missing, format!("{path} is absent or unreadable"), remedy),
        };
        self.add(id, cost, seen);
    }

    /// Choices of people that this kernel does not show, each with the kernel that matters and another way to say it.
    fn choices(&mut self, root: &Root, machine: &Machine) {
        let release = machine.kernel.as_str();
        let at_least = |version: (u32, u32)| kernel_version(release).is_some_and(|own| own >= version);
        let seen = if !at_least((6, 18)) {
            Seen::new(
                Available,
                format!("Linux {release} has no such choice (6.18 brought it)"),
                "",
            )
        } else if gives_large_pages_to_all(root) {
            Seen::new(
                Available,
                "transparent huge pages are given to all (enabled = always): THPeligible shows who refused them",
                "",
            )
        } else {
            Seen::new(
                Missing,
                format!(
                    "Linux {release} shows PR_THP_DISABLE_EXCEPT_ADVISED only where enabled = always; MemoryTHP= is read from the \
                     files of units"
                ),
                "set MemoryTHP= in the unit, or HOMEOSTAT_STRATEGIES=large_pages=off, where memory must stay on small pages",
            )
        };
        self.add(
            "choices.thp_except_advised",
            "a program that asked by prctl for large pages only where it advises them is not recognised",
            seen,
        );
        let seen = if at_least((5, 0)) || !root.is_live() {
            Seen::new(Available, "THP_enabled in /proc/PID/status shows it", "")
        } else {
            Seen::new(
                Missing,
                format!("Linux {release} does not show PR_SET_THP_DISABLE in /proc/PID/status (5.0 does)"),
                "set HOMEOSTAT_STRATEGIES=large_pages=off where large pages are refused by prctl",
            )
        };
        self.add(
            "choices.thp_disable",
            "a program that switched large pages off by prctl is not recognised",
            seen,
        );
        let seen = if at_least((5, 7)) {
            Seen::new(Available, "control groups keep the attribute user.homeostat", "")
        } else {
            Seen::new(
                Missing,
                format!("control groups of Linux {release} keep no attributes of users (those of 5.7 do)"),
                "set Environment=HOMEOSTAT=never in the unit, or a rule in the configuration",
            )
        };
        self.add(
            "choices.control_group",
            "nobody can opt out by an attribute of a control group",
            seen,
        );
    }

    fn conversion(&mut self, root: &Root) {
        let (collapse, split) = if let Some(other) = other_pages(rustix::param::page_size() as u64) {
            (other.clone(), other)
        } else if root.is_live() {
            try_conversion(root)
        } else {
            (captured(), captured())
        };
        self.add(
            "process_madvise.collapse",
            "memory of running programs cannot be converted to large pages: the large_pages strategy is off",
            collapse,
        );
        self.add(
            "process_madvise.split",
            "a conversion could not be undone, so none is tried: the large_pages strategy is off",
            split,
        );
    }

    fn memory_sensors(&mut self, root: &Root) {
        let scan = if root.is_live() {
            probe_pagemap(root)
        } else {
            captured()
        };
        self.add(
            "pagemap.scan",
            "without PAGEMAP_SCAN the state of pages is read entry by entry: slower; without pagemap not at all, and \
             nothing is converted",
            scan,
        );
        let kpageflags = readable(root, "/proc/kpageflags");
        self.add(
            "kpageflags",
            "on kernels before 6.7 large pages of other processes cannot be told from small ones",
            kpageflags,
        );
        let huge = files::text(root, "/sys/kernel/mm/transparent_hugepage/hpage_pmd_size");
        let seen = match huge {
            Some(size) => Seen::new(Available, format!("hpage_pmd_size {size} bytes"), ""),
            None => Seen::new(
                Missing,
                "/sys/kernel/mm/transparent_hugepage is absent",
                "run a kernel with CONFIG_TRANSPARENT_HUGEPAGE",
            ),
        };
        self.add(
            "transparent_huge_pages",
            "no memory can be mapped by large pages",
            seen,
        );
        let khugepaged = files::text(root, "/sys/kernel/mm/transparent_hugepage/khugepaged/full_scans");
        let seen = match khugepaged {
            Some(scans) => Seen::new(Available, format!("khugepaged/full_scans {scans}"), ""),
            None => Seen::new(Missing, "khugepaged's counters are absent", ""),
        };
        self.add(
            "khugepaged",
            "what the kernel converts by itself is not seen",
            seen,
        );
    }

    fn time_sensors(&mut self, root: &Root) {
        self.file(
            root,
            "process.io",
            "/proc/self/io",
            "who reads files, and whom that costs memory, is not seen: the file_cache strategy is off",
            "run a kernel with CONFIG_TASK_IO_ACCOUNTING, as root",
        );
        let seen = match pressure::read(root, "memory") {
            Some(stalled) => Seen::new(
                Available,
                format!("/proc/pressure/memory: some {} since boot", stalled.some),
                "",
            ),
            None => Seen::new(
                Missing,
                "/proc/pressure/memory is absent or unreadable",
                "boot with psi=1 on a kernel with CONFIG_PSI",
            ),
        };
        self.add(
            "psi",
            "stall time cannot serve as a guardrail; only work and CPU time do",
            seen,
        );
        self.file(
            root,
            "schedstat",
            "/proc/self/schedstat",
            "time on a run queue is unknown: contention for CPUs shows only as lost work",
            "run a kernel with CONFIG_SCHED_INFO",
        );
        let seen = if root.is_live() {
            let begin = Instant::now();
            match probe::process_cpu_time(1) {
                Some(ns) => Seen::new(
                    Available,
                    format!(
                        "process 1 used {:.3} s; the call took {} ns",
                        ns as f64 / 1e9,
                        begin.elapsed().as_nanos()
                    ),
                    "",
                ),
                None => Seen::new(Limited, "the CPU clock of process 1 cannot be read", ""),
            }
        } else {
            captured()
        };
        self.add(
            "process_cpu_clock",
            "CPU time is known to 10 ms only, and every process is read at each scan",
            seen,
        );
        let seen = match files::text(root, "/proc/sys/kernel/task_delayacct") {
            Some(v) if v == "1" => Seen::new(Available, "kernel.task_delayacct = 1", ""),
            Some(v) => Seen::new(
                Limited,
                format!("kernel.task_delayacct = {v}: only CPU delay is counted"),
                "sysctl kernel.task_delayacct=1 counts block-I/O and swap delays too",
            ),
            None => Seen::new(
                Missing,
                "/proc/sys/kernel/task_delayacct is absent",
                "run a kernel with CONFIG_TASK_DELAY_ACCT",
            ),
        };
        self.add(
            "taskstats",
            "delays by cause (block I/O, swap, thrashing) are unknown",
            seen,
        );
    }

    fn event_sources(&mut self, root: &Root) {
        let level =
            files::text(root, "/proc/sys/kernel/perf_event_paranoid").unwrap_or_else(|| "absent".into());
        let may_trace = may(root, CAP_PERFMON) || may(root, CAP_SYS_ADMIN);
        let uprobe = files::text(root, "/sys/bus/event_source/devices/uprobe/type");
        let seen = match uprobe {
            Some(kind) if may_trace => Seen::new(
                Available,
                format!("event source uprobe has type {kind}, paranoid level {level}"),
                "",
            ),
            Some(kind) => Seen::new(
                Missing,
                format!("event source uprobe has type {kind}, but CAP_PERFMON and CAP_SYS_ADMIN are missing"),
                "run homeostat as root or give it CAP_PERFMON",
            ),
            None => Seen::new(
                Missing,
                "/sys/bus/event_source/devices/uprobe is absent",
                "run a kernel with CONFIG_UPROBE_EVENTS",
            ),
        };
        self.add(
            "uprobe",
            "functions and static probes of programs cannot be counted",
            seen,
        );
        self.counters(root, &level);
        let btf = root.path("/sys/kernel/btf/vmlinux").exists();
        let seen = if btf {
            Seen::new(
                Available,
                "/sys/kernel/btf/vmlinux is there; no program is loaded for the probe",
                "",
            )
        } else {
            Seen::new(
                Missing,
                "/sys/kernel/btf/vmlinux is absent",
                "run a kernel with CONFIG_DEBUG_INFO_BTF",
            )
        };
        self.add(
            "bpf",
            "bulk sensors by BPF iterators are not possible; files are read instead",
            seen,
        );
    }

    /// Event counters of the processor and of its memory controllers.
    fn counters(&mut self, root: &Root, level: &str) {
        const COST: &str = "cycles, stalls, page-table walks and remote accesses are unknown: gains of large pages are \
                            predicted from size alone, those of placement from assumed shares";
        const DETAIL_COST: &str = "what is not counted is not predicted: without stalls placement assumes shares, without \
                                   page-table walks large pages go by size, without useless prefetch the prefetch \
                                   strategy declines";
        let devices = files::names(root, "/sys/bus/event_source/devices");
        let pmu = devices.iter().find(|d| {
            *d == "cpu" || d.starts_with("cpu_") || d.starts_with("armv8") || d.starts_with("riscv")
        });
        let (main, detail) = match pmu {
            None => {
                let missing = format!("no CPU among the event sources: {}", devices.join(", "));
                let remedy = "on a virtual machine ask for a virtual PMU (KVM: -cpu host,pmu=on)";
                (
                    Seen::new(Missing, missing, remedy),
                    Seen::new(Missing, "no hardware counters", remedy),
                )
            }
            Some(name) if !root.is_live() => (
                Seen::new(
                    Available,
                    format!("event source {name}, paranoid level {level}"),
                    "",
                ),
                captured(),
            ),
            Some(name) => count_ourselves(root, name, level),
        };
        self.add("hardware_counters", COST, main);
        self.add("counters.memory", DETAIL_COST, detail);
        let links = match links::describe(root) {
            Ok(detail) if !root.is_live() || may(root, CAP_PERFMON) || may(root, CAP_SYS_ADMIN) => {
                Seen::new(Available, detail, "")
            }
            Ok(detail) => Seen::new(
                Missing,
                format!("{detail}, but CAP_PERFMON and CAP_SYS_ADMIN are missing"),
                "run homeostat as root or give it CAP_PERFMON",
            ),
            Err(why) => Seen::new(
                Missing,
                why,
                "on bare metal: mount -t resctrl resctrl /sys/fs/resctrl where the CPU flags have cqm_mbm_total",
            ),
        };
        self.add(
            "counters.links",
            "how full the memory controllers are is unknown: the prefetch strategy declines, and page moves are not slowed \
             down on a full machine",
            links,
        );
    }

    fn settings(&mut self, root: &Root, machine: &Machine) {
        for (id, leaf, without) in [
            (
                "thp_mode",
                "enabled",
                "the administrator's choice is kept: such memory is left on small pages",
            ),
            (
                "thp_shared_mode",
                "shmem_enabled",
                "this setting is kept, also where it is the kernel's default: shared memory is left on small pages",
            ),
        ] {
            let path = format!("/sys/kernel/mm/transparent_hugepage/{leaf}");
            let mode = files::bytes(root, &path, 4096).and_then(|b| chosen(&b).map(str::to_owned));
            let seen = match mode.as_deref() {
                Some("never" | "deny") => Seen::new(
                    Limited,
                    format!("{path} is {}", mode.as_deref().unwrap_or_default()),
                    if leaf == "enabled" {
                        "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
                    } else {
                        "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled, then restart the programs"
                    },
                ),
                Some(mode) => Seen::new(Available, format!("{path} is {mode}"), ""),
                None => Seen::new(Missing, format!("{path} is absent"), ""),
            };
            self.add(id, without, seen);
        }
        self.add(
            "sysfs.writable",
            "readers cannot be limited, and workloads with a cpuset of their own cannot be placed",
            control_groups_writable(root),
        );
        let lockdown = files::bytes(root, "/sys/kernel/security/lockdown", 4096);
        let mode = lockdown.as_deref().and_then(chosen).map(str::to_owned);
        let seen = match mode.as_deref() {
            Some("none") => Seen::new(Available, "lockdown is none", ""),
            Some(mode) => Seen::new(
                Limited,
                format!("lockdown is {mode}"),
                "boot without Secure Boot lockdown",
            ),
            None => Seen::new(
                Limited,
                "/sys/kernel/security/lockdown is not readable: the level is unknown",
                "mount -t securityfs securityfs /sys/kernel/security",
            ),
        };
        self.add(
            "lockdown_free",
            "debugfs and MSR writes may be refused: on x86 the prefetch strategy is off, the others do not depend on them",
            seen,
        );
        let seen = if machine.nodes.len() > 1 {
            Seen::new(Available, format!("{} NUMA nodes", machine.nodes.len()), "")
        } else {
            Seen::new(Missing, "one NUMA node", "")
        };
        self.add(
            "numa",
            "nothing to place: strategies about memory nodes do not apply",
            seen,
        );
        self.add(
            "cpus.general",
            "programs are placed on the other CPUs only, which alone count as room",
            cpus_in_general_use(root, machine),
        );
        self.locality(root, machine);
        self.placing(root, machine);
        let seen = match control::probe(root) {
            Ok((_, detail)) => Seen::new(Available, detail, ""),
            Err(Obstacle::Impossible(why)) => Seen::new(Missing, why, ""),
            Err(Obstacle::Remediable(what, remedy)) => Seen::new(Missing, what, remedy),
        };
        self.add(
            "prefetch.switch",
            "the prefetcher stays as the firmware set it: prefetch is off",
            seen,
        );
    }

    /// Where threads and memory are: tried on ourselves.
    fn locality(&mut self, root: &Root, machine: &Machine) {
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

    /// The hands of the placement strategies.
    fn placing(&mut self, root: &Root, machine: &Machine) {
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

    fn surroundings(&mut self, root: &Root, machine: &Machine) {
        let tuners = running_tuners(root);
        let seen = if tuners.is_empty() {
            Seen::new(Available, "no other tuner runs", "")
        } else {
            let list: Vec<String> = tuners
                .iter()
                .map(|t| format!("{t} ({})", homeostat_sensors::tuners::works_on(t)))
                .collect();
            Seen::new(
                Limited,
                format!("{}: what they set is left to them", list.join(", ")),
                "",
            )
        };
        self.add(
            "tuners",
            "homeostat does not change what another tuner looks after",
            seen,
        );
        let groups = files::bytes(root, "/proc/self/cgroup", 16 * 1024).unwrap_or_default();
        let unified = lines(&groups).any(|l| l.starts_with(b"0::"));
        let old = lines(&groups).filter(|l| !l.starts_with(b"0::")).count();
        let seen = match (unified, old) {
            (true, 0) => Seen::new(Available, "cgroup v2", ""),
            (true, n) => Seen::new(
                Limited,
                format!("cgroup v2 beside {n} v1 hierarchies"),
                "boot with systemd.unified_cgroup_hierarchy=1",
            ),
            (false, 0) => Seen::new(
                Missing,
                "no cgroups",
                "run a kernel with CONFIG_CGROUPS and mount cgroup2",
            ),
            (false, n) => Seen::new(
                Limited,
                format!("{n} cgroup v1 hierarchies"),
                "boot with systemd.unified_cgroup_hierarchy=1",
            ),
        };
        self.add(
            "cgroup2",
            "limits by control group are not possible or only in part",
            seen,
        );
        let seen = match homeostat_sensors::memory_group::hierarchy(root) {
            Some((mount, is_version_one)) => {
                let version = if is_version_one { 1 } else { 2 };
                Seen::new(Available, format!("version {version}, at {mount}"), "")
            }
            None => Seen::new(
                Missing,
                "no control groups count memory",
                "mount cgroup2, and boot without cgroup_disable=memory",
            ),
        };
        self.add(
            "memory.groups",
            "a reader of files cannot be kept to a little memory: the file_cache strategy is off",
            seen,
        );
        let seen = match homeostat_probes::why_no_points(root) {
            None => Seen::new(
                Available,
                "nobody is here now who is not trusted with them, which is what meters.progress_points = \"auto\" asks",
                "",
            ),
            Some(why) => Seen::new(
                Missing,
                why,
                "meters.progress_points = true, where everybody who logs in is trusted (docs/security.md)",
            ),
        };
        self.add(
            "points.auto",
            "programs that tell nothing of their work are not measured by places in their code, unless the configuration asks for it",
            seen,
        );
        // Of a captured machine nobody can try it.
        if root.is_live() {
            let seen = match homeostat_probes::why_not_in_turns() {
                None if cfg!(target_arch = "x86_64") => Seen::new(
                    Available,
                    "the kernel counts many places of a file at once, by process (uprobe_multi)",
                    "",
                ),
                None => Seen::new(
                    Limited,
                    "functions are counted in turns; points are found in code of x86-64 only",
                    "name a meter in the configuration",
                ),
                Some(e) => Seen::new(
                    Missing,
                    format!("uprobe_multi by process: {e}"),
                    "run as root with Linux 6.10 or later (or a stable 6.6 to 6.9 of then)",
                )
                .passing(matches!(e, OpenError::Busy(_))),
            };
            self.add(
                "points.files",
                "programs that tell nothing of their work are not measured by places in their files; functions that are known are counted \
                 all the time, and not at all where that costs more than policy.meter_cost_max",
                seen,
            );
            let seen = match homeostat_probes::discovery::cost_in_compiled_code() {
                Ok(seconds) => Seen::new(
                    Available,
                    format!(
                        "the processor's breakpoints count, at {:.1} µs a hit",
                        seconds * 1e6
                    ),
                    "",
                ),
                Err(why) => Seen::new(
                    Missing,
                    why,
                    "run as root on x86-64; a virtual machine may have to be given debug registers",
                ),
            };
            self.add(
                "points.compiled",
                "programs that compile code while they run (JIT) and tell nothing of their work are not measured by places in that code",
                seen,
            );
        }
        let seen = match open_in_itself() {
            Ok(()) => Seen::new(Available, "openat2 opens files below a directory", ""),
            Err(e) => Seen::new(
                Missing,
                format!("openat2: {e}"),
                "Linux 5.6 or later; in a unit, no RestrictSUIDSGID=",
            ),
        };
        self.add(
            "files.below",
            "progress files of programs and sockets in containers cannot be opened",
            seen,
        );
        let seen = match cache::is_told() {
            Ok(()) => Seen::new(
                Available,
                "cachestat and mincore report what is in memory of a file",
                "",
            ),
            Err(e) => Seen::new(
                Missing,
                e.to_string(),
                "Linux 6.5 or later; in a service manager's filter of system calls, one that knows cachestat and mincore",
            ),
        };
        self.add(
            "memory.taken",
            "what a program lost to a reader is not read for it when that is contained: a program that reads single pages may need \
             minutes to come back",
            seen,
        );
        let seen = match memory_settings::can_be_moved(root) {
            Ok(files) => {
                let names: Vec<&str> = files.iter().filter_map(|f| f.rsplit('/').next()).collect();
                Seen::new(Available, names.join(", "), "")
            }
            Err(why) => Seen::new(Missing, why, "run as root on the host, with /proc/sys writable"),
        };
        self.add(
            "memory.settings",
            "the profile autotune-classic has nothing to move",
            seen,
        );
        let msr = root.path("/dev/cpu/0/msr").exists();
        let seen = if msr {
            Seen::new(Available, "/dev/cpu/0/msr is there", "")
        } else {
            Seen::new(Missing, "/dev/cpu/0/msr is absent", "modprobe msr")
        };
        self.add(
            "msr",
            "on x86 hardware prefetchers can neither be looked at nor switched",
            seen,
        );
        let seen = if !root.is_live() {
            captured()
        } else if may(root, CAP_IPC_LOCK) {
            Seen::new(Available, "CAP_IPC_LOCK is held", "")
        } else {
            let limit = rustix::process::getrlimit(rustix::process::Resource::Memlock).current;
            match limit {
                None => Seen::new(Available, "RLIMIT_MEMLOCK is unlimited", ""),
                Some(n) => Seen::new(
                    Missing,
                    format!("no CAP_IPC_LOCK and RLIMIT_MEMLOCK is {n} bytes"),
                    "run homeostat as root or set LimitMEMLOCK=infinity in its unit",
                ),
            }
        };
        self.add(
            "mlockall",
            "under memory pressure homeostat itself may be paged out and react late",
            seen,
        );
        let begin = Instant::now();
        let processes = files::numbered(root, "/proc", "").len();
        let seen = match files::bytes(root, "/proc/1/stat", 4096) {
            Some(_) => Seen::new(
                Available,
                format!(
                    "{processes} processes listed in {} us, with process 1",
                    begin.elapsed().as_micros()
                ),
                "",
            ),
            None => Seen::new(
                Limited,
                format!("/proc/1 is not readable; {processes} processes listed (container, or hidepid)"),
                "mount proc without hidepid, or run homeostat on the host",
            ),
        };
        self.add(
            "process_list",
            "only a part of the processes is seen, so neighbours cannot be guarded",
            seen,
        );
        let mounts = files::bytes(root, "/proc/self/mounts", files::LARGE_FILE_MAX).unwrap_or_default();
        let hidden = lines(&mounts).find_map(|line| {
            let mut parts = words(line).skip(1);
            if parts.next()? != b"/proc" {
                return None;
            }
            let options = parts.nth(1)?;
            options
                .split(|&b| b == b',')
                .find_map(|o| o.strip_prefix(b"hidepid="))
                .map(<[u8]>::to_vec)
        });
        let seen = match hidden {
            Some(v) if !matches!(v.as_slice(), b"0" | b"off") => Seen::new(
                if may(root, CAP_SYS_PTRACE) {
                    Available
                } else {
                    Limited
                },
                format!("/proc is mounted with hidepid={}", String::from_utf8_lossy(&v)),
                "mount -o remount,hidepid=0 /proc, or add homeostat's group with gid=",
            ),
            _ => Seen::new(Available, "/proc is mounted without hidepid", ""),
        };
        self.add("proc.unhidden", "processes of other users are invisible", seen);
        let scope = files::text(root, "/proc/sys/kernel/yama/ptrace_scope");
        let seen = match scope.as_deref() {
            Some("3") => Seen::new(
                Limited,
                "kernel.yama.ptrace_scope = 3",
                "cannot be lowered before a reboot",
            ),
            None => Seen::new(Available, "no Yama: ordinary ptrace permissions hold", ""),
            Some(s) => Seen::new(
                if may(root, CAP_SYS_PTRACE) {
                    Available
                } else {
                    Limited
                },
                format!("kernel.yama.ptrace_scope = {s}"),
                "run homeostat with CAP_SYS_PTRACE",
            ),
        };
        self.add("ptrace", "the memory of programs may not be readable", seen);
        let seen = match &machine.hypervisor {
            None => Seen::new(Available, "the CPU does not report a hypervisor", ""),
            Some(name) => Seen::new(
                Limited,
                format!("virtual machine ({name}); stolen CPU time is in every sample"),
                "",
            ),
        };
        self.add(
            "bare_metal",
            "large pages of the guest help fully only when the host backs it by large pages",
            seen,
        );
    }
}

/// Opens counters on ourselves: whether there are any for us, and which of the events that strategies ask for.
fn count_ourselves(root: &Root, device: &str, level: &str) -> (Seen, Seen) {
    let ability = Ability::probe(root);
    if let Some(refused) = ability.refused {
        let seen = |detail: String| {
            let (state, remedy) = match refused {
                OpenError::Denied(_) => (
                    Missing,
                    "run homeostat as root or give it CAP_PERFMON; or sysctl kernel.perf_event_paranoid=2",
                ),
                OpenError::Busy(_) => (
                    Limited,
                    "end what else uses the counters; it is probed again after a while",
                ),
                OpenError::Unsupported(_) | OpenError::Vanished => (
                    Missing,
                    "on a virtual machine ask for a virtual PMU (KVM: -cpu host,pmu=on)",
                ),
            };
            Seen::new(state, detail, remedy).passing(matches!(refused, OpenError::Busy(_)))
        };
        return (
            seen(format!("event source {device} does not count for us: {refused}")),
            seen("no hardware counters".to_owned()),
        );
    }
    let mut others = Vec::new();
    if watchdog(root) {
        others.push("the NMI watchdog holds a counter of each CPU (kernel.nmi_watchdog = 1)".to_owned());
    }
    let profilers: Vec<String> = running_profilers(root)
        .into_iter()
        .map(|p| {
            let how = if p.direct {
                ", which programs the counters itself"
            } else {
                ""
            };
            format!("{} runs{how}: ours wait until it ends", p.name)
        })
        .collect();
    let waits = !profilers.is_empty();
    others.extend(profilers);
    let beside = if others.is_empty() {
        String::new()
    } else {
        format!("; {}", others.join("; "))
    };
    let (counted, lacking) = ability.figures();
    let main = Seen::new(
        if waits { Limited } else { Available },
        format!(
            "cycles and instructions of our own thread counted by {device}, paranoid level {level}{beside}"
        ),
        "end the profiler",
    );
    let detail = format!("{}: {}", ability.set, counted.join(", "));
    let detail = if lacking.is_empty() {
        Seen::new(Available, detail, "")
    } else {
        Seen::new(
            Limited,
            format!("{detail}; not counted: {}", lacking.join(", ")),
            "",
        )
    };
    (main, detail)
}

/// Other tuners among the first processes of the list, and in the kernel.
fn running_tuners(root: &Root) -> Vec<String> {
    /// Most processes whose name is read for this: some 20 ms.
    const LOOKED_AT_MAX: usize = 4096;
    let mut found: Vec<String> = files::numbered(root, "/proc", "")
        .into_iter()
        .take(LOOKED_AT_MAX)
        .filter_map(|pid| {
            let comm = files::text(root, &format!("/proc/{pid}/comm"))?;
            if let Some(tuner) = homeostat_sensors::tuners::by_program(&comm) {
                return Some(tuner.to_owned());
            }
            // A script runs under the name of its interpreter.
            if !["python", "bash", "sh", "perl"]
                .iter()
                .any(|i| comm.starts_with(i))
            {
                return None;
            }
            let line = files::bytes(root, &format!("/proc/{pid}/cmdline"), 4096)?;
            let words: Vec<&[u8]> = line.split(|&b| b == 0).take(8).collect();
            homeostat_sensors::tuners::by_argument(&words).map(str::to_owned)
        })
        .collect();
    found.extend(homeostat_sensors::tuners::in_kernel(root));
    found.sort_unstable();
    found.dedup();
    found
}

/// Profilers among the first processes of the list.
fn running_profilers(root: &Root) -> Vec<Profiler> {
    /// Most processes whose name is read for this: some 20 ms.
    const LOOKED_AT_MAX: usize = 4096;
    let mut found: Vec<Profiler> = files::numbered(root, "/proc", "")
        .into_iter()
        .take(LOOKED_AT_MAX)
        .filter_map(|pid| others::by_program(&files::text(root, &format!("/proc/{pid}/comm"))?))
        .collect();
    found.sort_unstable();
    found.dedup();
    found
}

/// Looks where our own thread and memory are, and whether those of others may be looked at.
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
        // All memory is on the one node, and threads tell their CPU anyhow.
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

/// Major and minor number of a kernel's release.
fn kernel_version(release: &str) -> Option<(u32, u32)> {
    let mut parts = release.split(['.', '-']);
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}

/// What is made of pages of 4 KiB and large pages of 2 MiB is not done with others.
fn other_pages(page: u64) -> Option<Seen> {
    (page != BASE_PAGE).then(|| {
        let detail = format!(
            "the pages of this kernel have {} KiB, and only 4 KiB are supported",
            page >> 10
        );
        Seen::new(Missing, detail, "")
    })
}

fn captured() -> Seen {
    Seen::new(Missing, "not probed: this is a captured machine", "")
}

fn readable(root: &Root, path: &str) -> Seen {
    // The kernel gives whole entries of 8 bytes, and refuses other amounts.
    let mut entry = [0u8; 8];
    let file = root.open(path, OFlags::RDONLY);
    match file.and_then(|file| rustix::io::read(&file, &mut entry)) {
        Ok(8) => Seen::new(Available, format!("read 8 bytes of {path}"), ""),
        Ok(n) => Seen::new(Missing, format!("{path} gave {n} bytes"), ""),
        Err(error) => Seen::new(
            Missing,
            format!("{path} cannot be read: {error}"),
            "run homeostat with CAP_SYS_ADMIN",
        ),
    }
}

/// State of the first piece of our scratch memory.
fn scratch_state(root: &Root, scratch: &ScratchMapping) -> Result<PieceState, Seen> {
    let unreadable = |e: std::io::Error| {
        Seen::new(
            Missing,
            format!("reading /proc/self/pagemap: {e}"),
            "run homeostat as root",
        )
        .passing(may_pass(&e))
    };
    let pid = i32::try_from(std::process::id()).map_err(|e| unreadable(std::io::Error::other(e)))?;
    let mut states = Vec::new();
    Pagemap::open(&root.path("/proc"), pid)
        .and_then(|mut p| p.piece_states(scratch.address(), 1, &mut states))
        .map_err(unreadable)?;
    states
        .first()
        .copied()
        .ok_or_else(|| unreadable(std::io::Error::other("the page tables say nothing")))
}

/// Whether the kernel may take the advice another time.
fn advice_may_pass(error: AdviseError) -> bool {
    matches!(
        error,
        AdviseError::NoMemory | AdviseError::Again | AdviseError::Busy | AdviseError::Interrupted
    )
}

/// Converts one piece of our own memory through a handle on ourselves, and undoes it.
fn try_conversion(root: &Root) -> (Seen, Seen) {
    let failed = |seen: Seen| {
        let second =
            Seen::new(Missing, "not probed: conversion does not work", seen.remedy).passing(seen.passing);
        (seen, second)
    };
    let pid = i32::try_from(std::process::id()).unwrap_or(0);
    let handle = match memory::pidfd_open(pid) {
        Ok(handle) => handle,
        Err(e) => {
            let seen = Seen::new(Missing, format!("pidfd_open: {e}"), "run a kernel from 6.1");
            return failed(seen.passing(may_pass(&e)));
        }
    };
    let mut scratch = match ScratchMapping::new(1) {
        Ok(scratch) => scratch,
        Err(e) => return failed(no_scratch(&e)),
    };
    scratch.touch(PIECE);
    let begin = Instant::now();
    if let Err(e) = memory::process_madvise(handle.as_fd(), scratch.address(), PIECE, Advice::Collapse) {
        let passing = advice_may_pass(e);
        return failed(
            Seen::new(
                Missing,
                format!("MADV_COLLAPSE of 2 MiB of our own: {e}"),
                if passing {
                    "free some memory; it is probed again after a while"
                } else {
                    "run a kernel from 6.1 with large pages"
                },
            )
            .passing(passing),
        );
    }
    let took = begin.elapsed().as_micros();
    match scratch_state(root, &scratch) {
        Ok(PieceState::Huge) => {}
        // Reclaim may have split it again.
        Ok(other) => {
            let detail = format!("after MADV_COLLAPSE the piece is {other:?}, not huge");
            return failed(Seen::new(Missing, detail, "it is probed again after a while").passing(true));
        }
        Err(seen) => return failed(seen),
    }
    let lacking = lacking(root);
    let collapse = if lacking.is_empty() {
        Seen::new(
            Available,
            format!("2 MiB of our own converted in {took} us and verified"),
            "",
        )
    } else {
        Seen::new(
            Missing,
            format!(
                "works on our own memory ({took} us), but for that of others {} is missing",
                lacking.join(", ")
            ),
            "run homeostat as root or give it CAP_SYS_NICE and CAP_SYS_PTRACE",
        )
    };
    let begin = Instant::now();
    let cold = memory::process_madvise(handle.as_fd(), scratch.address(), BASE_PAGE, Advice::Cold);
    let took = begin.elapsed().as_micros();
    let split = match (cold, scratch_state(root, &scratch)) {
        (Ok(()), Ok(PieceState::Full)) => Seen::new(
            Available,
            format!("MADV_COLD on 4 KiB split the 2 MiB in {took} us, verified"),
            "",
        ),
        (Ok(()), Ok(other)) => Seen::new(
            Missing,
            format!("after MADV_COLD the piece is {other:?}, not split"),
            "run another kernel",
        ),
        (Err(e), _) => Seen::new(
            Missing,
            format!("MADV_COLD of our own memory: {e}"),
            "run a kernel from 5.10",
        )
        .passing(advice_may_pass(e)),
        (Ok(()), Err(seen)) => seen,
    };
    (collapse, split)
}

/// What the rights that a change of other processes needs are, of which some are missing.
fn lacking(root: &Root) -> Vec<&'static str> {
    [(CAP_SYS_NICE, "CAP_SYS_NICE"), (CAP_SYS_PTRACE, "CAP_SYS_PTRACE")]
        .into_iter()
        .filter(|(number, _)| !may(root, *number))
        .map(|(_, name)| name)
        .collect()
}

/// Restricts a thread of our own, which ends with the probe, to one CPU, and sets it free again.
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

/// Whether the kernel moves large pages whole.
fn whole_large_pages(root: &Root, release: &str) -> Seen {
    /// Processors whose kernels can (`ARCH_ENABLE_THP_MIGRATION`); others divide a large page to move it.
    const ABLE: [&str; 4] = ["x86_64", "aarch64", "powerpc64", "s390x"];
    if !root.path("/sys/kernel/mm/transparent_hugepage").exists() {
        return Seen::new(Missing, "the kernel has no transparent huge pages", "");
    }
    // Before 5.8 nothing tells whether it did (`thp_migration_split` in /proc/vmstat).
    if homeostat_kernel::release::kernel_version(release).is_none_or(|version| version < (5, 8)) {
        return Seen::new(
            Missing,
            format!("kernel {release} may divide large pages when they move"),
            "run a kernel from 5.8",
        );
    }
    let architecture = std::env::consts::ARCH;
    if !ABLE.contains(&architecture) {
        return Seen::new(
            Missing,
            format!("kernels for {architecture} divide large pages when they move"),
            "",
        );
    }
    Seen::new(
        Available,
        format!(
            "kernel {release} moves them whole while the node has free ones, which is looked at each time"
        ),
        "",
    )
}

/// Moves some pages of our own to another node and back.
fn try_page_moves(root: &Root, nodes: &[u32]) -> Seen {
    if let Some(other) = other_pages(rustix::param::page_size() as u64) {
        return other;
    }
    /// Pages that are moved.
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

/// Not even two pieces of memory for the probe.
fn no_scratch(error: &std::io::Error) -> Seen {
    let detail = format!("no scratch memory: {error}");
    Seen::new(
        Missing,
        detail,
        "free some memory; it is probed again after a while",
    )
    .passing(may_pass(error))
}

/// Whether a file is opened below a directory that is the root for all links in it.
fn open_in_itself() -> Result<(), rustix::io::Errno> {
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    let itself = rustix::fs::open("/proc/self", flags | OFlags::DIRECTORY, Mode::empty())?;
    open_in(itself.as_fd(), Path::new("status"), flags).map(drop)
}

fn probe_pagemap(root: &Root) -> Seen {
    let pid = i32::try_from(std::process::id()).unwrap_or(0);
    let scratch = match ScratchMapping::new(1) {
        Ok(s) => s,
        Err(e) => return no_scratch(&e),
    };
    let mut states = Vec::new();
    let begin = Instant::now();
    match Pagemap::open(&root.path("/proc"), pid).and_then(|mut p| {
        p.piece_states(scratch.address(), 1, &mut states)
            .map(|()| p.is_exact())
    }) {
        Ok(true) => Seen::new(
            Available,
            format!(
                "PAGEMAP_SCAN of 2 MiB of our own took {} us",
                begin.elapsed().as_micros()
            ),
            "",
        ),
        Ok(false) => Seen::new(
            Limited,
            "no PAGEMAP_SCAN; pagemap is read entry by entry",
            "run a kernel from 6.7",
        ),
        Err(e) => Seen::new(
            Missing,
            format!("/proc/self/pagemap: {e}"),
            "run homeostat as root",
        )
        .passing(may_pass(&e)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn large_pages_are_refused_where_pages_are_not_of_4_kib() {
        assert!(other_pages(4096).is_none());
        let refused = other_pages(65_536).unwrap();
        assert_eq!(refused.state, Missing);
        assert_eq!(
            refused.detail,
            "the pages of this kernel have 64 KiB, and only 4 KiB are supported"
        );
    }

    #[test]
    fn what_may_pass_is_remembered_for_another_probe() {
        let short = std::io::Error::from_raw_os_error(libc::ENOMEM);
        let absent = std::io::Error::from_raw_os_error(libc::ENOSYS);
        assert!(may_pass(&short) && !may_pass(&absent));
        assert!(advice_may_pass(AdviseError::NoMemory) && !advice_may_pass(AdviseError::NotSupported));
        let mut list = List {
            capabilities: Vec::new(),
            passing: Vec::new(),
        };
        list.add("a", "", no_scratch(&short));
        list.add("b", "", no_scratch(&absent));
        list.add("c", "", Seen::new(Available, "", "").passing(true));
        assert_eq!(list.passing, [CapabilityId::new("a")]);
        assert_eq!(list.capabilities.len(), 3);
    }

    #[test]
    fn control_groups_are_found_in_each_version_of_their_hierarchy() {
        let tree = tempfile::tempdir().unwrap();
        let root = Root::new(tree.path());
        std::fs::create_dir_all(tree.path().join("sys/fs/cgroup/memory")).unwrap();
        assert_eq!(control_groups_writable(&root).state, Missing);
        for list in ["memory/cgroup.procs", "cgroup.procs"] {
            let file = tree.path().join("sys/fs/cgroup").join(list);
            std::fs::write(&file, "").unwrap();
            assert_eq!(control_groups_writable(&root).state, Available, "{list}");
            std::fs::remove_file(file).unwrap();
        }
    }

    #[test]
    fn the_probe_works_again_after_memory_was_locked() {
        // The daemon locks its memory after the first probe; a later one must not fail for that.
        let root = Root::default();
        if !rustix::process::geteuid().is_root() {
            println!("skipped: others have a limit of locked memory, which other tests would run into");
            return;
        }
        let (collapse, split) = try_conversion(&root);
        if collapse.state != Available || split.state != Available {
            println!("skipped: {}; {}", collapse.detail, split.detail);
            return;
        }
        let flags = rustix::mm::MlockAllFlags::FUTURE | rustix::mm::MlockAllFlags::ONFAULT;
        if rustix::mm::mlockall(flags).is_err() {
            println!("skipped: memory can not be locked");
            return;
        }
        let (collapse, split) = try_conversion(&root);
        let unlocked = rustix::mm::munlockall();
        assert_eq!(
            (collapse.state, split.state),
            (Available, Available),
            "{} {}",
            collapse.detail,
            split.detail
        );
        unlocked.unwrap();
    }
}
