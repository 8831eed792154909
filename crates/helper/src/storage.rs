//! Opens a file in the tree of a process only if the kernel itself serves its storage.

use crate::domain::{identity, namespace, our_users};
use homeostat_kernel::helper::owning_user_namespace;
use homeostat_kernel::process::is_ordinary_storage;
use rustix::fs::{FileType, Mode, OFlags, ResolveFlags, Stat};
use rustix::io::Errno;
use std::fs::File;
use std::io::Read;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;

/// Most bytes read of a list of mounts: a user may make some 100,000 (fs.mount-max).
const MOUNTS_MAX: u64 = 16 * 1024 * 1024;

/// Reason why a file is not opened.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// An error of the kernel.
    #[error("the file cannot be opened: {0}")]
    Kernel(Errno),
    /// A link, a device, a pipe, a socket.
    #[error("it is not a regular file")]
    Irregular,
    /// A file system that a program, another machine or the kernel itself serves.
    #[error("it does not lie on ordinary storage")]
    Storage,
    /// A mount by a user without rights over the machine.
    #[error("it lies on a file system that was mounted in a user namespace")]
    Mount,
}

impl From<Errno> for Refused {
    fn from(e: Errno) -> Self {
        Self::Kernel(e)
    }
}

/// Opens a regular file for reading, by its path below a directory. The last part of the path must not be a link, and
/// links on the way lead nowhere else. `process` is the `/proc` directory of the process in whose tree that is. The
/// check comes before the open, so that nothing that may wait is opened, and closing never waits.
pub fn open_below(tree: &OwnedFd, path: &Path, process: &OwnedFd) -> Result<(OwnedFd, Stat), Refused> {
    let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let found = rustix::fs::openat2(tree, path, flags, Mode::empty(), resolve)?;
    open_found(&found, Some(process))
}

/// Opens for reading an ordinary regular file that was found by its path alone.
pub fn open_found(found: &OwnedFd, process: Option<&OwnedFd>) -> Result<(OwnedFd, Stat), Refused> {
    let stat = check(found, process)?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
        return Err(Refused::Irregular);
    }
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    let name = format!("/proc/self/fd/{}", found.as_raw_fd());
    Ok((rustix::fs::open(name, flags, Mode::empty())?, stat))
}

/// The same for a file that a process runs or maps, perhaps by a descriptor from another tree. So its file system must
/// be mounted in the tree of the process or in ours.
pub fn open_mapped(found: &OwnedFd, process: &OwnedFd) -> Result<(OwnedFd, Stat), Refused> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let us = rustix::fs::open("/proc/self", flags, Mode::empty())?;
    if device_of_mount(process, found).is_none() && device_of_mount(&us, found).is_none() {
        return Err(Refused::Mount);
    }
    open_found(found, Some(process))
}

/// Checks that a file found by its path (`O_PATH`) is on ordinary storage, and returns its state.
pub fn check(found: &OwnedFd, process: Option<&OwnedFd>) -> Result<Stat, Refused> {
    // Facts of the kernel alone come first; another program may serve the file's own state.
    if let Some(process) = process {
        if !mounted_by_the_machine(process, found) {
            return Err(Refused::Mount);
        }
    }
    if !is_ordinary_storage(found) {
        return Err(Refused::Storage);
    }
    Ok(rustix::fs::fstat(found)?)
}

/// Whether a file's file system was mounted with rights over the machine: the process's mounts belong to our user
/// namespace, or the file system is also mounted in our own tree.
fn mounted_by_the_machine(process: &OwnedFd, found: &OwnedFd) -> bool {
    has_mounts_of_the_machine(process)
        || device_of_mount(process, found).is_some_and(|device| is_mounted_here(&device))
}

/// Whether a process's mounts were made with rights over the machine.
fn has_mounts_of_the_machine(process: impl AsFd) -> bool {
    let ours = || -> Result<bool, Errno> {
        let owner = owning_user_namespace(namespace(process, "ns/mnt")?)?;
        Ok(identity(owner)? == our_users()?)
    };
    ours().unwrap_or(false)
}

/// As [`has_mounts_of_the_machine`], by the number of the process. Only the kernel is asked.
pub fn mounts_are_the_machines(pid: i32) -> bool {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    rustix::fs::open(format!("/proc/{pid}"), flags, Mode::empty()).is_ok_and(has_mounts_of_the_machine)
}

/// The device of a file's file system, as `MAJOR:MINOR`.
fn device_of_mount(process: &OwnedFd, found: &OwnedFd) -> Option<String> {
    let about = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", found.as_raw_fd())).ok()?;
    let mount = about
        .lines()
        .find_map(|line| line.strip_prefix("mnt_id:"))?
        .trim();
    let file = rustix::fs::openat(
        process,
        "mountinfo",
        OFlags::RDONLY | OFlags::CLOEXEC,
        Mode::empty(),
    )
    .ok()?;
    let mut text = String::new();
    File::from(file).take(MOUNTS_MAX).read_to_string(&mut text).ok()?;
    device_of(&text, mount)
}

/// The device of a mount in `mountinfo`: field 3 of the line whose field 1 is the mount (proc_pid_mountinfo(5)).
fn device_of(text: &str, mount: &str) -> Option<String> {
    text.lines().find_map(|line| {
        let mut fields = line.split(' ');
        (fields.next()? == mount).then(|| fields.nth(1).map(str::to_owned))?
    })
}

fn is_mounted_here(device: &str) -> bool {
    std::fs::read_to_string("/proc/self/mountinfo")
        .is_ok_and(|mounts| mounts.lines().any(|line| line.split(' ').nth(2) == Some(device)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_device_of_a_mount() {
        let text = "22 28 0:20 / /sys rw - sysfs sysfs rw\n28 1 8:1 / / rw - ext4 /dev/sda1 rw\n";
        assert_eq!(device_of(text, "28").as_deref(), Some("8:1"));
        assert_eq!(device_of(text, "2"), None);
        assert_eq!(device_of("28", "28"), None);
    }

    #[test]
    fn only_ordinary_files_are_opened() {
        let own = rustix::fs::open("/proc/self", OFlags::RDONLY | OFlags::DIRECTORY, Mode::empty()).unwrap();
        let root = rustix::fs::open("/", OFlags::PATH, Mode::empty()).unwrap();
        let open = |path: &Path| open_below(&root, path, &own).map(|(file, _)| file);
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        std::fs::write(&file, "text").unwrap();
        let mut text = String::new();
        File::from(open(&file).unwrap())
            .read_to_string(&mut text)
            .unwrap();
        assert_eq!(text, "text");
        std::os::unix::fs::symlink(&file, dir.path().join("link")).unwrap();
        assert_eq!(open(&dir.path().join("link")).unwrap_err(), Refused::Irregular);
        rustix::fs::mknodat(
            rustix::fs::CWD,
            dir.path().join("fifo"),
            FileType::Fifo,
            Mode::RUSR | Mode::WUSR,
            0,
        )
        .unwrap();
        assert_eq!(open(&dir.path().join("fifo")).unwrap_err(), Refused::Irregular);
        assert_eq!(open(dir.path()).unwrap_err(), Refused::Irregular);
        assert_eq!(
            open(Path::new("/proc/self/cwd/file")).unwrap_err(),
            Refused::Kernel(Errno::LOOP)
        );
        assert_eq!(open(Path::new("/proc/uptime")).unwrap_err(), Refused::Storage);
        assert_eq!(
            open(&dir.path().join("none")).unwrap_err(),
            Refused::Kernel(Errno::NOENT)
        );
    }
}
