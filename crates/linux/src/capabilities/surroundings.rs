//! Capabilities about other programs on the machine, and the visible facts about them.

use super::{List, Seen};
use homeostat_kernel::bytes::{lines, words};
use homeostat_kernel::files;
use homeostat_kernel::privileges::{CAP_SYS_PTRACE, may};
use homeostat_kernel::root::Root;
use homeostat_model::CapabilityState::{Available, Limited, Missing};
use homeostat_model::Machine;
use std::time::Instant;

impl List {
    pub(super) fn neighbours(&mut self, root: &Root, machine: &Machine) {
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

    pub(super) fn groups(&mut self, root: &Root) {
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
    }

    pub(super) fn processes(&mut self, root: &Root) {
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
    }
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
