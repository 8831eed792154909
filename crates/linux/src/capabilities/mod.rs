//! Abilities of this machine to sense and act, probed, not guessed. Every probe reports its method and result, the loss
//! without the ability, and a remedy. Probes change nothing outside this process: conversion and its undo use two MiB
//! of our own memory. On a captured machine only files are read, and abilities that need a system call are missing.

mod choices;
mod counting;
mod memory;
mod placing;
mod settings;
mod surroundings;

use homeostat_kernel::files;
use homeostat_kernel::root::Root;
use homeostat_model::CapabilityState::{Available, Missing};
use homeostat_model::{Capability, CapabilityId, CapabilityState, Machine};
use rustix::fs::OFlags;

/// `CAP_*` numbers of `include/uapi/linux/capability.h`.
const CAP_IPC_LOCK: u32 = 14;
const CAP_SYS_ADMIN: u32 = 21;
const CAP_SYS_NICE: u32 = 23;
/// Since Linux 5.8; before, CAP_SYS_ADMIN.
const CAP_PERFMON: u32 = 38;

#[derive(Clone)]
struct Seen {
    state: CapabilityState,
    detail: String,
    remedy: &'static str,
    /// It failed for a reason that may pass by itself (memory short, a table full), so another probe may differ.
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

    fn passing(mut self, passing: bool) -> Self {
        self.passing = passing;
        self
    }
}

fn may_pass(error: &std::io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(libc::ENOMEM | libc::EAGAIN | libc::EBUSY | libc::EINTR | libc::EMFILE | libc::ENFILE)
    )
}

/// Results of the probes.
#[derive(Debug)]
pub struct Probed {
    /// By name.
    pub capabilities: Vec<Capability>,
    /// Those that failed for a reason that may pass by itself, such as short memory; worth another probe.
    pub passing: Vec<CapabilityId>,
}

/// Probes everything. `machine` has the facts of the topology.
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
    list.neighbours(root, machine);
    list.groups(root);
    list.processes(root);
    list.points(root);
    list.resident(root);
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

fn kernel_version(release: &str) -> Option<(u32, u32)> {
    let mut parts = release.split(['.', '-']);
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}

fn captured() -> Seen {
    Seen::new(Missing, "not probed: this is a captured machine", "")
}

fn readable(root: &Root, path: &str) -> Seen {
    // The kernel returns whole entries of 8 bytes, and refuses other amounts.
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

    fn file(&mut self, root: &Root, id: &str, path: &str, cost: &str, remedy: &'static str) {
        let seen = match files::bytes(root, path, 4096) {
            Some(text) => Seen::new(Available, format!("read {} bytes of {path}", text.len()), ""),
            None => Seen::new(Missing, format!("{path} is absent or unreadable"), remedy),
        };
        self.add(id, cost, seen);
    }
}

#[cfg(test)]
mod tests {
    use super::choices::control_groups_writable;
    use super::memory::{advice_may_pass, no_scratch, other_pages, try_conversion};
    use super::*;
    use homeostat_kernel::memory::AdviseError;

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
