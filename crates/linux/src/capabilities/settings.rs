//! Capabilities of settings of the kernel.

use super::choices::{control_groups_writable, cpus_in_general_use};
use super::{List, Seen};
use homeostat_effectors::prefetch::control;
use homeostat_effectors::prefetch::control::Obstacle;
use homeostat_kernel::bytes::chosen;
use homeostat_kernel::files;
use homeostat_kernel::root::Root;
use homeostat_model::CapabilityState::{Available, Limited, Missing};
use homeostat_model::Machine;

impl List {
    pub(super) fn settings(&mut self, root: &Root, machine: &Machine) {
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
}
