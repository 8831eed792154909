//! Capabilities about choices of a person or another tool: large pages, control groups.

use super::{List, Seen, kernel_version};
use homeostat_kernel::root::Root;
use homeostat_model::CapabilityState::{Available, Limited, Missing};
use homeostat_model::Machine;
use homeostat_model::units::ranges;
use homeostat_sensors::regions::gives_large_pages_to_all;
use homeostat_sensors::topology;

impl List {
    /// Choices of people that this kernel does not show, with the kernel that does and another way to make them.
    pub(super) fn choices(&mut self, root: &Root, machine: &Machine) {
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
}

/// Whether control groups can be written.
pub(super) fn control_groups_writable(root: &Root) -> Seen {
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

/// Number of CPUs in general use, and the purpose of the others.
pub(super) fn cpus_in_general_use(root: &Root, machine: &Machine) -> Seen {
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
    // A person wants it this way, so there is no remedy.
    Seen::new(Limited, detail, "")
}
