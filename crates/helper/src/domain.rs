//! Whose a process is: the user who answers for what it does, and whose helpers it may keep waiting.
//!
//! In a user namespace a user may have many numbers (65,536 of `/etc/subuid`). So all of them are one domain: that of the
//! user who made the namespace. Root makes namespaces for others (containers); there each number stands for itself.

use homeostat_kernel::Root;
use homeostat_kernel::helper::{namespace_maker, parent_namespace};
use homeostat_kernel::process::{fault, open_process, status_of, user_ids};
use homeostat_model::ProcessId;
use homeostat_platform::PlatformError;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use std::os::fd::{AsFd, OwnedFd};

/// Namespaces may lie in each other 32 deep (include/linux/user_namespace.h).
const DEPTH_MAX: usize = 33;

/// A user who answers for processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Domain(pub u32);

impl std::fmt::Display for Domain {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "user {}", self.0)
    }
}

impl Domain {
    /// That of a process.
    pub fn of(root: &Root, process: ProcessId) -> Result<Self, PlatformError> {
        let dir = open_process(root, process)?;
        Self::of_directory(root, &dir, process)
    }

    /// That of the process whose directory below `/proc` this is.
    pub fn of_directory(root: &Root, dir: &OwnedFd, process: ProcessId) -> Result<Self, PlatformError> {
        if root.is_live() {
            if let Some(maker) = maker(dir).filter(|maker| *maker != 0) {
                return Ok(Self(maker));
            }
        }
        let target = format!("process {process}");
        let status = status_of(dir, "status").map_err(|e| fault(e, &target, "its status file"))?;
        // The real user: a program with the set-user-id bit is still his who has started it.
        match user_ids(&status).first() {
            Some(user) => Ok(Self(*user)),
            None => Err(PlatformError::Unsupported {
                what: format!("reading what {target} publishes"),
                why: "its status names no user".to_owned(),
            }),
        }
    }
}

/// Which file of the kernel a namespace is.
pub(super) fn identity(namespace: impl AsFd) -> Result<(u64, u64), Errno> {
    rustix::fs::fstat(namespace).map(|stat| (stat.st_dev, stat.st_ino))
}

/// A namespace of the process whose directory below `/proc` this is.
pub(super) fn namespace(dir: impl AsFd, name: &str) -> Result<OwnedFd, Errno> {
    rustix::fs::openat(dir, name, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
}

/// Our own user namespace.
pub(super) fn our_users() -> Result<(u64, u64), Errno> {
    rustix::fs::stat("/proc/self/ns/user").map(|stat| (stat.st_dev, stat.st_ino))
}

/// Who made the user namespace of the process, of those that lie in each other the outermost below ours.
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
