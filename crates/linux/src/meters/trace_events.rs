//! The kernel's list of trace events where tracefs is mounted nowhere, as in many containers and small systems.

use rustix::fd::OwnedFd;
use rustix::fs::{Mode, OFlags, openat};
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsmount, fsopen};
use std::fs::File;
use std::io;

/// The root of tracefs, mounted at no place (`fsopen(2)`, `fsmount(2)`, Linux 5.2): nobody else sees it, and it is gone when this is
/// closed. Read-only is this mount alone: the file system itself is the one that others may have mounted.
///
/// # Errors
/// As `fsopen(2)` and `fsmount(2)`: without `CAP_SYS_ADMIN`, where a filter of system calls refuses them, or without CONFIG_TRACING.
pub(crate) fn nowhere() -> io::Result<OwnedFd> {
    let context = fsopen("tracefs", FsOpenFlags::FSOPEN_CLOEXEC)?;
    fsconfig_create(&context)?;
    let attributes = MountAttrFlags::MOUNT_ATTR_RDONLY
        | MountAttrFlags::MOUNT_ATTR_NOSUID
        | MountAttrFlags::MOUNT_ATTR_NODEV
        | MountAttrFlags::MOUNT_ATTR_NOEXEC;
    Ok(fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, attributes)?)
}

/// Opens a file below such a root for reading.
///
/// # Errors
/// As `openat(2)`.
pub(crate) fn open_below(root: &OwnedFd, path: &str) -> io::Result<File> {
    let file = openat(
        root,
        path,
        OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW,
        Mode::empty(),
    )?;
    Ok(file.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;

    #[test]
    fn an_event_has_a_number_and_nothing_stays_mounted() {
        let mounts = || std::fs::read_to_string("/proc/self/mountinfo").unwrap();
        let before = mounts();
        let root = match nowhere() {
            Ok(root) => root,
            Err(e) => {
                eprintln!("skipped: {e}");
                return;
            }
        };
        let mut text = String::new();
        let path = "events/sched/sched_switch/id";
        open_below(&root, path)
            .unwrap()
            .read_to_string(&mut text)
            .unwrap();
        assert!(text.trim().parse::<u64>().unwrap() > 0, "{text}");
        let missing = open_below(&root, "events/no/such/id").unwrap_err();
        assert_eq!(missing.kind(), io::ErrorKind::NotFound);
        let mut flags = OFlags::WRONLY;
        flags.insert(OFlags::CLOEXEC);
        assert!(
            openat(&root, "tracing_on", flags, Mode::empty()).is_err(),
            "read-only"
        );
        assert_eq!(mounts(), before);
    }
}
