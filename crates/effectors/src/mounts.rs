//! Which mounts of a process show a disk of this machine.
//!
//! Opening or querying a file of another machine, or of a program (FUSE), may hang. Safe to read: the list of mounts
//! (`/proc/PID/mountinfo`, proc_pid_mountinfo(5)), and the mount of an open file (`mnt_id` in `fdinfo`, Linux 3.15).

use homeostat_helper::storage::mounts_are_the_machines;
use homeostat_kernel::Root;
use homeostat_kernel::bytes::{lines, number, words};
use std::collections::BTreeMap;
use std::{fs, io};

/// File systems whose pages come from a disk of this machine. An unknown one may hide another machine or a program. An
/// overlay shows the files of others.
const ON_DISK: [&[u8]; 10] = [
    b"ext2",
    b"ext3",
    b"ext4",
    b"xfs",
    b"btrfs",
    b"f2fs",
    b"bcachefs",
    b"squashfs",
    b"erofs",
    b"jfs",
];

/// The root of containers: its files lie in another file system, hardly ever one of another machine.
const OVERLAY: &[u8] = b"overlay";

/// The mounts of a process that show a disk, with their kind of file system.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Mounts(BTreeMap<u64, &'static [u8]>);

impl Mounts {
    pub(super) fn of(root: &Root, pid: i32) -> io::Result<Self> {
        Ok(Self::parse(&read(root, pid)?, false))
    }

    /// The disk mounts of a process, and overlays on a disk that no unprivileged user can have mounted elsewhere.
    pub(super) fn with_overlays(root: &Root, pid: i32) -> io::Result<Self> {
        let overlays = !root.is_live() || mounts_are_the_machines(pid);
        Ok(Self::parse(&read(root, pid)?, overlays))
    }

    fn parse(text: &[u8], overlays: bool) -> Self {
        let on_disk = |line: &[u8]| {
            let kind = words(line).skip_while(|word| *word != b"-").nth(1)?;
            let known = ON_DISK.into_iter().chain(overlays.then_some(OVERLAY));
            let kind = known.into_iter().find(|known| *known == kind)?;
            Some((words(line).next().and_then(number)?, kind))
        };
        Self(lines(text).filter_map(on_disk).collect())
    }

    /// Whether an open file is on one of them, by its `fdinfo` text. False for a mount detached while the file is open.
    pub(super) fn have(&self, fdinfo: &[u8]) -> bool {
        self.mount_of(fdinfo).is_some()
    }

    /// The mount of an open file, by its `fdinfo` text, if it is one of these.
    pub(super) fn mount_of(&self, fdinfo: &[u8]) -> Option<u64> {
        let mount = lines(fdinfo).find_map(|line| number(line.strip_prefix(b"mnt_id:")?.trim_ascii()));
        mount.filter(|mount| self.0.contains_key(mount))
    }

    /// The kind of file system of an open file, if it is on one of these mounts.
    pub(super) fn kind_of(&self, fdinfo: &[u8]) -> Option<&'static [u8]> {
        self.0.get(&self.mount_of(fdinfo)?).copied()
    }
}

fn read(root: &Root, pid: i32) -> io::Result<Vec<u8>> {
    fs::read(root.path(&format!("/proc/{pid}/mountinfo")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn disks_are_told_from_other_machines_and_programs() {
        let text = b"21 1 98:0 / / rw,noatime shared:1 master:2 - ext4 /dev/vda rw,discard\n\
              22 21 0:4 / /proc rw - proc proc rw\n\
              23 21 0:50 / /mnt/ext4 rw - nfs4 host:/ext4 rw,hard\n\
              24 21 0:51 / /fuse rw - fuse.ext4 program rw\n\
              25 21 98:1 / /with\\040space rw - xfs /dev/vdb rw\n\
              26 21 0:52 / /x rw - overlay overlay rw\nno number - ext4 x\n27\n";
        let (ext4, xfs): (&[u8], &[u8]) = (b"ext4", b"xfs");
        assert_eq!(
            Mounts::parse(text, true),
            Mounts(BTreeMap::from([(21, ext4), (25, xfs), (26, OVERLAY)]))
        );
        let mounts = Mounts::parse(text, false);
        assert_eq!(mounts, Mounts(BTreeMap::from([(21, ext4), (25, xfs)])));
        assert_eq!(mounts.kind_of(b"mnt_id:\t25\n"), Some(xfs));
        assert_eq!(mounts.kind_of(b"mnt_id:\t23\n"), None);
        assert!(mounts.have(b"pos:\t0\nflags:\t0100000\nmnt_id:\t25\nino:\t7\n"));
        for other in ["mnt_id:\t23\n", "mnt_id:\t\n", "mnt_id:\t2\n", "ino:\t21\n", ""] {
            assert!(!mounts.have(other.as_bytes()), "{other}");
        }
    }

    #[test]
    fn where_a_file_of_this_build_lies_is_told_for_this_process() {
        let pid = i32::try_from(std::process::id()).unwrap();
        let mounts = Mounts::of(&Root::default(), pid).unwrap();
        let version = fs::File::open("/proc/version").unwrap();
        let number = std::os::fd::AsRawFd::as_raw_fd(&version);
        let fdinfo = fs::read(format!("/proc/self/fdinfo/{number}")).unwrap();
        assert!(!mounts.have(&fdinfo), "what the kernel makes up is on no disk");
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let _ = Mounts::parse(&bytes, true).have(&bytes);
        }
    }
}
