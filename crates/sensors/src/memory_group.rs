//! Control groups of the memory controller: a process's group, settings of others in it, and allowed changes.
//!
//! Version 1 has a hierarchy for memory alone (`/sys/fs/cgroup/memory`). A group below that of a process can take its
//! processes unnoticed, and the limits above still apply. In version 2 a group with processes can have no groups below
//! it that count memory, and the group tells systemd the unit. There a workload's exclusive group is limited in place.

use crate::group_view::GroupView;
use crate::grouping;
use crate::grouping::PlaceKind;
use homeostat_kernel::Root;
use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

/// Mount point of the memory hierarchy of version 1, if mounted.
const VERSION_ONE: &str = "/sys/fs/cgroup/memory";
/// Mount point of systemd's own hierarchy with version 1.
const SYSTEMD: &str = "/sys/fs/cgroup/systemd";
/// Possible mount points of the unified hierarchy.
const UNIFIED: [&str; 2] = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"];
const GROUPS_MAX: usize = 256;
/// Version 1 shows the largest number of whole pages if there is no limit; no real limit is above this.
pub const UNLIMITED_FROM: u64 = 1 << 60;

/// Version of the control groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Version {
    /// One hierarchy per controller.
    One,
    /// The unified hierarchy.
    Two,
}

impl Version {
    /// The file that limits a group, by reclaim from the group itself; `memory.high` of version 2 never ends a process.
    fn limit_file(self) -> &'static str {
        match self {
            Self::One => "memory.limit_in_bytes",
            Self::Two => "memory.high",
        }
    }
}

/// A group that counts memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryGroup {
    /// Absolute path below the root.
    pub path: String,
    /// Version of control groups.
    pub version: Version,
}

/// The memory hierarchy of this machine: its root and version.
pub fn hierarchy(root: &Root) -> Option<(&'static str, bool)> {
    if root.path(&format!("{VERSION_ONE}/cgroup.procs")).exists()
        && root.path(&format!("{VERSION_ONE}/memory.stat")).exists()
    {
        return Some((VERSION_ONE, true));
    }
    UNIFIED.into_iter().find_map(|mount| {
        let controllers = fs::read_to_string(root.path(&format!("{mount}/cgroup.controllers"))).ok()?;
        controllers
            .split_whitespace()
            .any(|name| name == "memory")
            .then_some((mount, false))
    })
}

impl MemoryGroup {
    /// The group of a process; `None` if there is none, or it is outside our namespace.
    pub fn of(root: &Root, pid: i32) -> Option<Self> {
        let (mount, is_version_one) = hierarchy(root)?;
        let text = fs::read_to_string(root.path(&format!("/proc/{pid}/cgroup"))).ok()?;
        let path = text.lines().find_map(|line| {
            let mut fields = line.splitn(3, ':');
            let (number, controllers, path) = (fields.next()?, fields.next()?, fields.next()?);
            let meant = if is_version_one {
                controllers.split(',').any(|name| name == "memory")
            } else {
                number == "0" && controllers.is_empty()
            };
            // A group outside our namespace is shown with "/../", and has no file here.
            (meant && path.starts_with('/') && !path.split('/').any(|part| part == "..")).then_some(path)
        })?;
        let group = Self {
            path: format!("{mount}{}", path.trim_end_matches('/')),
            version: if is_version_one {
                Version::One
            } else {
                Version::Two
            },
        };
        group.exists(root).then_some(group)
    }

    /// The group of that name below this one.
    pub fn below(&self, name: &str) -> Self {
        Self {
            path: format!("{}/{name}", self.path),
            version: self.version,
        }
    }

    /// Whether it is the root of the hierarchy, which has no limit.
    pub fn is_root(&self) -> bool {
        self.path == VERSION_ONE || UNIFIED.contains(&self.path.as_str())
    }

    /// The group above; the root has none.
    pub fn above(&self) -> Option<Self> {
        let (path, _) = self.path.rsplit_once('/').filter(|_| !self.is_root())?;
        Some(Self {
            path: path.to_owned(),
            version: self.version,
        })
    }

    /// Its usage, with the groups below, and its limit; `None` without a limit, or if not reported.
    pub fn used_of_limit(&self, root: &Root) -> Option<(u64, u64)> {
        let (used, limits): (_, &[&str]) = match self.version {
            Version::One => ("memory.usage_in_bytes", &["memory.limit_in_bytes"]),
            Version::Two => ("memory.current", &["memory.high", "memory.max"]),
        };
        let value = |name: &&str| self.read(root, name).ok()?.parse::<u64>().ok();
        let limit = limits
            .iter()
            .filter_map(value)
            .min()
            .filter(|limit| *limit < UNLIMITED_FROM)?;
        Some((value(&used)?, limit))
    }

    /// Whether the directory exists.
    pub fn exists(&self, root: &Root) -> bool {
        self.inode(root).is_some()
    }

    /// Inode of the directory: another inode means another group of the same name.
    pub fn inode(&self, root: &Root) -> Option<u64> {
        let found = fs::metadata(root.path(&self.path)).ok()?;
        found.is_dir().then(|| found.ino())
    }

    fn file(&self, root: &Root, leaf: &str) -> PathBuf {
        root.path(&format!("{}/{leaf}", self.path))
    }

    fn read(&self, root: &Root, leaf: &str) -> io::Result<String> {
        Ok(fs::read_to_string(self.file(root, leaf))?.trim().to_owned())
    }

    fn write(&self, root: &Root, leaf: &str, text: &str) -> io::Result<()> {
        // Not `fs::write`: in a fake root it would create the file of a group that was just removed.
        let mut file = fs::OpenOptions::new()
            .write(true)
            .truncate(true)
            .open(self.file(root, leaf))?;
        io::Write::write_all(&mut file, format!("{text}\n").as_bytes())
    }

    /// Its limit in bytes; `None` if there is none.
    pub fn limit(&self, root: &Root) -> io::Result<Option<u64>> {
        let text = self.read(root, self.version.limit_file())?;
        if text == "max" {
            return Ok(None);
        }
        let limit: u64 = text
            .parse()
            .map_err(|_| io::Error::new(io::ErrorKind::InvalidData, text))?;
        Ok((limit < UNLIMITED_FROM).then_some(limit))
    }

    /// Sets or removes its limit. Version 1 reclaims any excess before it returns.
    pub fn set_limit(&self, root: &Root, bytes: Option<u64>) -> io::Result<()> {
        let text = match (bytes, self.version) {
            (Some(bytes), _) => bytes.to_string(),
            (None, Version::One) => "-1".to_owned(),
            (None, Version::Two) => "max".to_owned(),
        };
        self.write(root, self.version.limit_file(), &text)
    }

    /// Other limits set by somebody, in words; `None` if there is none.
    pub fn chosen(&self, root: &Root) -> Option<String> {
        let names: &[&str] = match self.version {
            Version::One => &[
                "memory.limit_in_bytes",
                "memory.memsw.limit_in_bytes",
                "memory.soft_limit_in_bytes",
            ],
            Version::Two => &["memory.high", "memory.max", "memory.swap.max", "memory.swap.high"],
        };
        let limited = names.iter().find_map(|name| {
            let text = self.read(root, name).ok()?;
            let limit: u64 = text.parse().ok()?;
            (limit < UNLIMITED_FROM).then(|| format!("{name} of {} is {limit}", self.path))
        });
        let kept = || {
            ["memory.low", "memory.min"].iter().find_map(|name| {
                let text = self.read(root, name).ok()?;
                (text != "0").then(|| format!("{name} of {} is {text}", self.path))
            })
        };
        limited.or_else(kept)
    }

    /// Whether a process at the limit waits instead of being killed. Version 1 only: `memory.high` kills nothing.
    pub fn spare_processes(&self, root: &Root, spared: bool) -> io::Result<()> {
        match self.version {
            Version::One => self.write(root, "memory.oom_control", if spared { "1" } else { "0" }),
            Version::Two => Ok(()),
        }
    }

    /// Whether a limit would make system calls fail, so that memory is reclaimed regularly instead.
    pub fn is_kept_by_hand(&self) -> bool {
        self.version == Version::One
    }

    /// Its anonymous and shared memory, which cannot be dropped.
    pub fn held(&self, root: &Root) -> Option<u64> {
        let text = self.read(root, "memory.stat").ok()?;
        let value = |name: &str| Self::statistic(&text, name);
        match self.version {
            Version::One => Some(value("total_rss")? + value("total_shmem").unwrap_or(0)),
            Version::Two => Some(value("anon")? + value("shmem").unwrap_or(0)),
        }
    }

    /// Inactive file pages in it and in the groups below, in bytes: the kernel reclaims them first.
    pub fn unused_files(&self, root: &Root) -> Option<u64> {
        let name = match self.version {
            Version::One => "total_inactive_file",
            Version::Two => "inactive_file",
        };
        Self::statistic(&self.read(root, "memory.stat").ok()?, name)
    }

    fn statistic(text: &str, name: &str) -> Option<u64> {
        text.lines().find_map(|line| {
            let (key, value) = line.split_once(' ')?;
            (key == name).then(|| value.trim().parse::<u64>().ok())?
        })
    }

    /// Whether groups that count memory can be made below it.
    pub fn takes_groups(&self, root: &Root) -> bool {
        match self.version {
            Version::One => true,
            Version::Two => self
                .read(root, "cgroup.subtree_control")
                .is_ok_and(|text| text.split_whitespace().any(|name| name == "memory")),
        }
    }

    /// The processes in it, without those of the groups below.
    pub fn processes(&self, root: &Root) -> io::Result<BTreeSet<i32>> {
        let text = self.read(root, "cgroup.procs")?;
        Ok(text.lines().filter_map(|line| line.parse().ok()).collect())
    }

    /// The processes in it and in all groups below; `None` if there are too many groups.
    pub fn all_processes(&self, root: &Root) -> io::Result<Option<BTreeSet<i32>>> {
        let mut found = BTreeSet::new();
        let mut waiting = vec![self.clone()];
        let mut looked_at = 0;
        while let Some(group) = waiting.pop() {
            looked_at += 1;
            if looked_at > GROUPS_MAX {
                return Ok(None);
            }
            found.extend(group.processes(root)?);
            for entry in fs::read_dir(root.path(&group.path))? {
                let entry = entry?;
                if entry.file_type()?.is_dir() {
                    waiting.push(group.below(&entry.file_name().to_string_lossy()));
                }
            }
        }
        Ok(Some(found))
    }

    /// Moves a process into it; its memory stays counted where it is.
    pub fn take(&self, root: &Root, pid: i32) -> io::Result<()> {
        self.write(root, "cgroup.procs", &pid.to_string())
    }

    /// Makes the group.
    pub fn make(&self, root: &Root) -> io::Result<()> {
        fs::create_dir(root.path(&self.path))
    }

    /// Removes the group, and first its page cache: the kernel keeps a removed group until its last page is gone.
    pub fn remove(&self, root: &Root) -> io::Result<()> {
        // Best effort: pages in use stay, and do no harm.
        let _ = match self.version {
            Version::One => self.write(root, "memory.force_empty", "0"),
            Version::Two => {
                let used = self.read(root, "memory.current").unwrap_or_default();
                self.write(root, "memory.reclaim", &used)
            }
        };
        fs::remove_dir(root.path(&self.path))
    }
}

/// Reason why only the owner may change the groups of a process; `None` if we may.
pub fn hands_off(root: &Root, pid: i32) -> Option<String> {
    let text = fs::read(root.path(&format!("/proc/{pid}/cgroup"))).ok()?;
    let place = grouping::place(&text, &GroupView::new(root.clone()));
    (place.kind == PlaceKind::Container).then(|| format!("it runs in the container {}", place.name))
}

/// Whether the group of a process, or one above it, is delegated (`Delegate=` in a unit) to an owner of the subtree.
/// systemd notes that in its own hierarchy, which in version 1 differs from that of memory.
pub fn is_delegated(root: &Root, pid: i32, group: &MemoryGroup) -> bool {
    let text = fs::read_to_string(root.path(&format!("/proc/{pid}/cgroup"))).unwrap_or_default();
    let noted = text.lines().filter_map(|line| {
        let mut fields = line.splitn(3, ':');
        let (number, controllers, path) = (fields.next()?, fields.next()?, fields.next()?);
        let mounts: &[&str] = match (number, controllers) {
            (_, "name=systemd") => &[SYSTEMD],
            ("0", "") => &UNIFIED,
            _ => &[],
        };
        let is_inside = path.starts_with('/') && !path.split('/').any(|part| part == "..");
        is_inside.then(|| {
            mounts
                .iter()
                .map(move |mount| (*mount, path.trim_end_matches('/').to_owned()))
        })
    });
    let memory = std::iter::once(("", group.path.clone()));
    noted.flatten().chain(memory).any(|(mount, path)| {
        let ends = path.match_indices('/').map(|(at, _)| at).filter(|at| *at > 0);
        let all = ends.chain(std::iter::once(path.len()));
        all.filter_map(|end| path.get(..end)).any(|path| {
            ["trusted.delegate", "user.delegate"].iter().any(|name| {
                let mut value = [0u8; 8];
                rustix::fs::getxattr(root.path(&format!("{mount}{path}")), *name, &mut value)
                    .is_ok_and(|length| value.get(..length) == Some(b"1".as_slice()))
            })
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use homeostat_kernel::testing::tree;

    const ONE: [(&str, &str); 2] = [
        ("sys/fs/cgroup/memory/cgroup.procs", "1\n"),
        ("sys/fs/cgroup/memory/memory.stat", "cache 1\n"),
    ];

    fn group(root: &Root, pid: i32) -> Option<String> {
        MemoryGroup::of(root, pid).map(|g| g.path)
    }

    #[test]
    fn version_one_goes_by_its_memory_hierarchy() {
        let (_keep, root) = tree(ONE.iter().chain(&[
            ("proc/7/cgroup", "4:memory:/a/b\n0::/unit\n"),
            ("proc/8/cgroup", "4:memory:/\n"),
            ("proc/9/cgroup", "4:memory:/../x\n"),
            (
                "sys/fs/cgroup/memory/a/b/memory.limit_in_bytes",
                "9223372036854771712\n",
            ),
        ]));
        assert_eq!(group(&root, 7).as_deref(), Some("/sys/fs/cgroup/memory/a/b"));
        assert_eq!(group(&root, 8).as_deref(), Some("/sys/fs/cgroup/memory"));
        assert!(MemoryGroup::of(&root, 8).unwrap().is_root());
        assert_eq!(group(&root, 9), None, "outside of our namespace");
        assert_eq!(group(&root, 10), None);
        let inner = MemoryGroup::of(&root, 7).unwrap();
        assert_eq!(inner.limit(&root).unwrap(), None, "no limit is a large number");
        inner.set_limit(&root, Some(5 << 20)).unwrap();
        assert_eq!(inner.limit(&root).unwrap(), Some(5 << 20));
        assert!(inner.chosen(&root).unwrap().contains("5242880"));
    }

    #[test]
    fn version_two_is_the_unified_hierarchy_with_the_memory_controller() {
        let (_keep, root) = tree(&[
            ("sys/fs/cgroup/cgroup.controllers", "cpu memory io\n"),
            ("sys/fs/cgroup/cgroup.subtree_control", "cpu memory\n"),
            ("proc/7/cgroup", "0::/system.slice/backup.service\n"),
            ("sys/fs/cgroup/system.slice/backup.service/memory.high", "max\n"),
            ("sys/fs/cgroup/system.slice/backup.service/memory.low", "0\n"),
            ("sys/fs/cgroup/system.slice/backup.service/cgroup.procs", "7\n"),
            (
                "sys/fs/cgroup/system.slice/backup.service/inner/cgroup.procs",
                "8\n",
            ),
            (
                "sys/fs/cgroup/system.slice/backup.service/memory.stat",
                "anon 100\nfile 7\nshmem 5\n",
            ),
        ]);
        let group = MemoryGroup::of(&root, 7).unwrap();
        assert_eq!(group.version, Version::Two);
        assert_eq!(
            (group.limit(&root).unwrap(), group.held(&root)),
            (None, Some(105))
        );
        assert!(group.chosen(&root).is_none() && !group.takes_groups(&root));
        assert_eq!(group.all_processes(&root).unwrap(), Some(BTreeSet::from([7, 8])));
        fs::write(group.file(&root, "memory.low"), "1048576\n").unwrap();
        assert!(group.chosen(&root).unwrap().contains("memory.low"));
        let (_keep, without) = tree(&[("sys/fs/cgroup/cgroup.controllers", "cpu io\n")]);
        assert_eq!(hierarchy(&without), None);
    }

    #[test]
    fn what_runs_in_a_container_is_left_to_it() {
        let id = "0123456789abcdef".repeat(4);
        let (_keep, root) = tree(&[
            ("proc/7/cgroup", format!("4:memory:/docker/{id}\n").as_str()),
            ("proc/8/cgroup", "4:memory:/system.slice/a.service\n"),
        ]);
        assert!(hands_off(&root, 7).unwrap().contains("docker"));
        assert_eq!(hands_off(&root, 8), None);
    }

    /// The names by which systemd notes that a group was delegated: as root, and as a user.
    const NOTES: [&str; 2] = ["trusted.delegate", "user.delegate"];

    /// Notes that of a group; false where the file system takes no such notes.
    fn delegate(root: &Root, path: &str, name: &str, value: &[u8]) -> bool {
        let noted = rustix::fs::setxattr(root.path(path), name, value, rustix::fs::XattrFlags::empty());
        if let Err(e) = noted {
            eprintln!("skipped: {name} cannot be noted of a directory here: {e}");
        }
        noted.is_ok()
    }

    #[test]
    fn what_was_delegated_is_told_by_a_note_on_its_group_or_on_one_above() {
        for name in NOTES {
            let (_keep, root) = tree(&[
                ("sys/fs/cgroup/cgroup.controllers", "cpu memory io\n"),
                ("sys/fs/cgroup/a.slice/cgroup.procs", "10\n"),
                ("sys/fs/cgroup/a.slice/m.service/cgroup.procs", "7\n"),
                ("sys/fs/cgroup/a.slice/m.service/in/deep/cgroup.procs", "8\n"),
                ("sys/fs/cgroup/a.slice/m.service2/cgroup.procs", "9\n"),
                ("proc/7/cgroup", "0::/a.slice/m.service\n"),
                ("proc/8/cgroup", "0::/a.slice/m.service/in/deep\n"),
                ("proc/9/cgroup", "0::/a.slice/m.service2\n"),
                ("proc/10/cgroup", "0::/a.slice\n"),
            ]);
            let told = || {
                [7, 8, 9, 10].map(|pid| {
                    let group = MemoryGroup::of(&root, pid).unwrap();
                    is_delegated(&root, pid, &group)
                })
            };
            assert_eq!(told(), [false; 4]);
            let delegate = |value: &[u8]| {
                let group = "/sys/fs/cgroup/a.slice/m.service";
                delegate(&root, group, name, value)
            };
            // Somebody's note of that name that says something else, a long one also.
            for other in [&b"0"[..], b"", b"11", b"1 of many words"] {
                if delegate(other) {
                    assert_eq!(told(), [false; 4], "{name} {other:?}");
                }
            }
            // Its own processes and those of all groups below it, and nobody beside it or above.
            if delegate(b"1") {
                assert_eq!(told(), [true, true, false, false], "{name}");
            }
        }
    }

    #[test]
    fn with_version_one_the_note_may_be_in_another_hierarchy_than_that_of_memory() {
        for name in NOTES {
            for (mount, line) in [("systemd", "1:name=systemd:"), ("unified", "0::")] {
                let unit = "/a.slice/m.service";
                let inside = format!("4:memory:/apart\n{line}{unit}/x.scope\n");
                // A name that leads out of our own view of the groups, and back to the same one.
                let outside = format!("4:memory:/apart\n{line}/../{mount}{unit}/x.scope\n");
                let of_another = format!("4:memory:/apart\n7:name=other,cpu:{unit}/x.scope\n");
                let (_keep, root) = tree(ONE.iter().chain(&[
                    ("sys/fs/cgroup/memory/apart/cgroup.procs", "7\n"),
                    ("proc/7/cgroup", inside.as_str()),
                    ("proc/8/cgroup", outside.as_str()),
                    ("proc/9/cgroup", of_another.as_str()),
                ]));
                let noted = format!("/sys/fs/cgroup/{mount}{unit}");
                fs::create_dir_all(root.path(&format!("{noted}/x.scope"))).unwrap();
                // Of a process that has ended only its group of memory is known.
                const ENDED: i32 = 10;
                let group = MemoryGroup::of(&root, 7).unwrap();
                let told = || [7, 8, 9, ENDED].map(|pid| is_delegated(&root, pid, &group));
                assert_eq!(told(), [false; 4]);
                if delegate(&root, &noted, name, b"1") {
                    assert_eq!(told(), [true, false, false, false], "{name} {mount}");
                }
                // By somebody who made the group of memory himself.
                if delegate(&root, &group.path, name, b"1") {
                    assert_eq!(told(), [true; 4], "{name} {mount}");
                }
            }
        }
    }
}
