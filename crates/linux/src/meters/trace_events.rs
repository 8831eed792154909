//! The kernel's list of trace events where tracefs is mounted nowhere, as in many containers and small systems.

use crate::Root;
use crate::sensors::topology::{kernel_release, kernel_version};
use rustix::fd::OwnedFd;
use rustix::fs::{Mode, OFlags, openat};
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsmount, fsopen};
use std::fs::File;
use std::io;

/// From this Linux on. The file system is one for the whole kernel, and before, to mount it once more set anew who may read
/// it (`mount_single` in `fs/super.c`), also where the machine's owner has it mounted and this is a container without it.
const HARMLESS_FROM: (u32, u32) = (6, 12);

/// The root of tracefs, mounted at no place (`fsopen(2)`, `fsmount(2)`): nobody else sees it, and it is gone when this is
/// closed. Read-only is this mount alone.
///
/// # Errors
/// As `fsopen(2)` and `fsmount(2)`: without `CAP_SYS_ADMIN`, where a filter of system calls refuses them, or without CONFIG_TRACING; and with a
/// kernel in which that would change something.
pub(crate) fn nowhere(root: &Root) -> io::Result<OwnedFd> {
    if kernel_version(&kernel_release(root)).is_none_or(|version| version < HARMLESS_FROM) {
        let (major, minor) = HARMLESS_FROM;
        let why = format!("before Linux {major}.{minor} that would change who may read it");
        return Err(io::Error::new(io::ErrorKind::Unsupported, why));
    }
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
        let root = match nowhere(&Root::default()) {
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
