//! The user responsible for a process, whose helpers the process may keep waiting. In a user namespace a user may have
//! many numbers (65,536 of `/etc/subuid`), so they all are one domain: that of the namespace's maker. Root makes
//! namespaces for others (containers), where each number stands for itself.

use homeostat_kernel::Root;
use homeostat_kernel::helper::{namespace_maker, parent_namespace};
use homeostat_kernel::process::{fault, open_process, status_of, user_ids};
use homeostat_model::ProcessId;
use homeostat_platform::PlatformError;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use std::os::fd::{AsFd, OwnedFd};

/// Namespaces nest up to 32 deep (include/linux/user_namespace.h).
const DEPTH_MAX: usize = 33;

/// A user responsible for processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Domain(pub u32);

impl std::fmt::Display for Domain {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "user {}", self.0)
    }
}

impl Domain {
    /// The domain of a process.
    pub fn of(root: &Root, process: ProcessId) -> Result<Self, PlatformError> {
        let dir = open_process(root, process)?;
        Self::of_directory(root, &dir, process)
    }

    /// The domain of the process with this directory below `/proc`.
    pub fn of_directory(root: &Root, dir: &OwnedFd, process: ProcessId) -> Result<Self, PlatformError> {
        if root.is_live() {
            if let Some(maker) = maker(dir).filter(|maker| *maker != 0) {
                return Ok(Self(maker));
            }
        }
        let target = format!("process {process}");
        let status = status_of(dir, "status").map_err(|e| fault(e, &target, "its status file"))?;
        // The real user: a program with the set-user-id bit belongs to its starter.
        match user_ids(&status).first() {
            Some(user) => Ok(Self(*user)),
            None => Err(PlatformError::Unsupported {
                what: format!("reading what {target} publishes"),
                why: "its status names no user".to_owned(),
            }),
        }
    }
}

pub(super) fn identity(namespace: impl AsFd) -> Result<(u64, u64), Errno> {
    rustix::fs::fstat(namespace).map(|stat| (stat.st_dev, stat.st_ino))
}

pub(super) fn namespace(dir: impl AsFd, name: &str) -> Result<OwnedFd, Errno> {
    rustix::fs::openat(dir, name, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
}

pub(super) fn our_users() -> Result<(u64, u64), Errno> {
    rustix::fs::stat("/proc/self/ns/user").map(|stat| (stat.st_dev, stat.st_ino))
}

/// Maker of the process's user namespace: of nested ones, of the outermost below ours.
fn maker(dir: &OwnedFd) -> Option<u32> {
    let ours = our_users().ok()?;
    let mut here = namespace(dir, "ns/user").ok()?;
    if identity(&here).ok()? == ours {
        return None;
    }
    for _ in 0..DEPTH_MAX {
        match parent_namespace(&here) {
            Ok(parent) if identity(&parent).ok()? != ours => here = parent,
            _ => break,
        }
    }
    namespace_maker(&here).ok()
}
