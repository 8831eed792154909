//! Capabilities of time and events, and of counters inside programs.

use super::{CAP_PERFMON, CAP_SYS_ADMIN, List, Seen, captured};
use homeostat_kernel::perf::OpenError;
use homeostat_kernel::privileges::may;
use homeostat_kernel::root::Root;
use homeostat_kernel::{files, probe};
use homeostat_model::CapabilityState::{Available, Limited, Missing};
use homeostat_sensors::counters::others::{Profiler, watchdog};
use homeostat_sensors::counters::{Ability, links, others};
use homeostat_sensors::pressure;
use std::time::Instant;

impl List {
    pub(super) fn time_sensors(&mut self, root: &Root) {
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

    pub(super) fn event_sources(&mut self, root: &Root) {
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
    pub(super) fn counters(&mut self, root: &Root, level: &str) {
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

    pub(super) fn points(&mut self, root: &Root) {
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
    }
}

/// Opens counters on ourselves: whether any are free, and which of the strategies' events work.
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
