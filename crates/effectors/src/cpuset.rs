//! The cpuset of a control group: which CPUs it allows, and when it can serve as the means of a placement.

use homeostat_kernel::Root;
use homeostat_kernel::numa::CpuMask;
use homeostat_model::ProcessId;
use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

/// Possible mount points of the unified hierarchy.
const UNIFIED: [&str; 2] = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"];
/// Possible mount point of the cpuset hierarchy of version 1.
const VERSION_ONE: &str = "/sys/fs/cgroup/cpuset";
const DEPTH_MAX: usize = 32;
const GROUPS_MAX: usize = 256;

/// A group with a cpuset of its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Group {
    /// Absolute path below the root, `/sys/fs/cgroup/…`.
    pub(super) path: String,
    /// Version of the control groups, 1 or 2.
    pub(super) version: u8,
    /// Inode of the directory: another one means another group of the same name.
    pub(super) inode: u64,
}

/// The path in a line of `/proc/PID/cgroup`: of the cpuset controller (version 1), or of the unified hierarchy.
fn path_in(text: &str, version: u8) -> Option<&str> {
    text.lines().find_map(|line| {
        let mut fields = line.splitn(3, ':');
        let (number, controllers, path) = (fields.next()?, fields.next()?, fields.next()?);
        let meant = match version {
            1 => controllers.split(',').any(|name| name == "cpuset"),
            _ => number == "0" && controllers.is_empty(),
        };
        // A group outside of homeostat's namespace is shown with "/../", and has no file here.
        (meant && path.starts_with('/') && !path.split('/').any(|part| part == "..")).then_some(path)
    })
}

/// Directory and version of a process's innermost group with a cpuset. `None` in the root, or without one.
fn directory_of(root: &Root, pid: i32) -> Option<(String, u8)> {
    let text = fs::read_to_string(root.path(&format!("/proc/{pid}/cgroup"))).ok()?;
    if let Some(path) = path_in(&text, 1) {
        let path = path.trim_end_matches('/');
        return (!path.is_empty()).then(|| (format!("{VERSION_ONE}{path}"), 1));
    }
    let mut path = path_in(&text, 2)?.trim_end_matches('/');
    for _ in 0..DEPTH_MAX {
        if path.is_empty() {
            return None;
        }
        for mount in UNIFIED {
            let directory = format!("{mount}{path}");
            if root.path(&format!("{directory}/cpuset.cpus")).exists() {
                return Some((directory, 2));
            }
        }
        path = path.rsplit_once('/').map_or("", |(above, _)| above);
    }
    None
}

/// The CPUs that a process's cpuset allows, and the group's path. `None` in the root's cpuset, or if unreadable.
pub(super) fn allowed(root: &Root, pid: i32) -> Option<(CpuMask, String)> {
    let (directory, version) = directory_of(root, pid)?;
    let leaf = match version {
        1 => "cpuset.effective_cpus",
        _ => "cpuset.cpus.effective",
    };
    let text = fs::read_to_string(root.path(&format!("{directory}/{leaf}"))).ok()?;
    Some((CpuMask::from_list(text.trim())?, directory))
}

impl Group {
    /// The group whose cpuset can keep exactly these processes on CPUs without hiding or overwriting a person's
    /// setting. The error is the reason why there is none.
    pub(super) fn of_exactly(root: &Root, members: &[ProcessId]) -> Result<Self, String> {
        let mut of_all = None;
        for member in members {
            let of_one = directory_of(root, member.pid)
                .ok_or_else(|| format!("process {member} is in no group with a cpuset"))?;
            match &of_all {
                None => of_all = Some(of_one),
                Some(known) if *known == of_one => {}
                Some(_) => return Err("its processes are in several groups".into()),
            }
        }
        let (path, version) = of_all.ok_or("it has no processes")?;
        if !keeps_masks(&homeostat_kernel::release::kernel_release(root)) {
            return Err("kernels before 6.2 forget a thread's own mask when its cpuset changes".into());
        }
        let inode = fs::metadata(root.path(&path))
            .map_err(|e| format!("{path}: {e}"))?
            .ino();
        let group = Self { path, version, inode };
        group.check_choices(root)?;
        let known: BTreeSet<i32> = members.iter().map(|m| m.pid).collect();
        for pid in group.processes(root)? {
            if !known.contains(&pid) {
                return Err(format!("{} also holds process {pid}", group.path));
            }
        }
        Ok(group)
    }

    /// Fails if somebody has chosen anything about this cpuset.
    fn check_choices(&self, root: &Root) -> Result<(), String> {
        let read = |leaf: &str| {
            fs::read_to_string(root.path(&format!("{}/{leaf}", self.path)))
                .map(|text| text.trim().to_owned())
                .unwrap_or_default()
        };
        let cpus = self.cpus(root).map_err(|e| format!("{}: {e}", self.path))?;
        if self.version == 1 {
            let above = self.path.rsplit_once('/').map_or("", |(above, _)| above);
            let parent = fs::read_to_string(root.path(&format!("{above}/cpuset.cpus"))).unwrap_or_default();
            if cpus != parent.trim() {
                return Err(format!("{} was set to CPUs {cpus}", self.path));
            }
            if read("cpuset.cpu_exclusive") == "1" {
                return Err(format!("{} is exclusive", self.path));
            }
            return Ok(());
        }
        if !cpus.is_empty() || !read("cpuset.cpus.exclusive").is_empty() {
            return Err(format!("{} was set to CPUs {cpus}", self.path));
        }
        match read("cpuset.cpus.partition").as_str() {
            "" | "member" => {}
            kind => return Err(format!("{} is a partition ({kind})", self.path)),
        }
        match read("cgroup.type").as_str() {
            "" | "domain" => Ok(()),
            kind => Err(format!("{} is {kind}", self.path)),
        }
    }

    /// Processes of the group and of all groups below it. Fails if somebody set the cpuset of a lower group.
    fn processes(&self, root: &Root) -> Result<Vec<i32>, String> {
        let mut found = Vec::new();
        let mut waiting = vec![root.path(&self.path)];
        let mut looked_at = 0;
        while let Some(directory) = waiting.pop() {
            looked_at += 1;
            if looked_at > GROUPS_MAX {
                return Err(format!("more than {GROUPS_MAX} groups below {}", self.path));
            }
            let failed = |e: io::Error| format!("{}: {e}", directory.display());
            let text = fs::read_to_string(directory.join("cgroup.procs")).map_err(failed)?;
            found.extend(text.lines().filter_map(|line| line.parse::<i32>().ok()));
            for entry in fs::read_dir(&directory).map_err(failed)? {
                let entry = entry.map_err(failed)?;
                if !entry.file_type().map_err(failed)?.is_dir() {
                    continue;
                }
                let below = entry.path();
                let set = fs::read_to_string(below.join("cpuset.cpus")).unwrap_or_default();
                if !set.trim().is_empty() {
                    return Err(format!(
                        "{} below it was set to CPUs {}",
                        below.display(),
                        set.trim()
                    ));
                }
                waiting.push(below);
            }
        }
        Ok(found)
    }

    /// Whether the directory is still that of the same group.
    pub(super) fn exists(&self, root: &Root) -> bool {
        fs::metadata(root.path(&self.path)).is_ok_and(|m| m.ino() == self.inode)
    }

    fn file(&self, root: &Root) -> PathBuf {
        root.path(&format!("{}/cpuset.cpus", self.path))
    }

    /// Content of `cpuset.cpus`. Empty if nothing was set (version 2).
    pub(super) fn cpus(&self, root: &Root) -> io::Result<String> {
        Ok(fs::read_to_string(self.file(root))?.trim().to_owned())
    }

    /// Writes `cpuset.cpus`. The kernel moves the threads at once.
    pub(super) fn set_cpus(&self, root: &Root, list: &str) -> io::Result<()> {
        // `fs::write` would create the file if the group has just been removed from a fake root.
        let mut file = fs::OpenOptions::new()
            .write(true)
            .truncate(true)
            .open(self.file(root))?;
        io::Write::write_all(&mut file, format!("{list}\n").as_bytes())
    }
}

/// Whether the kernel remembers a thread's own request while a cpuset cuts its mask (`user_cpus_ptr`, Linux 6.2).
pub fn keeps_masks(release: &str) -> bool {
    homeostat_kernel::release::kernel_version(release).is_some_and(|version| version >= (6, 2))
}

#[cfg(test)]
mod tests {
    use super::*;
    use homeostat_kernel::testing::tree;

    fn process(pid: i32) -> ProcessId {
        ProcessId { pid, start_ticks: 1 }
    }

    const RELEASE: (&str, &str) = ("proc/sys/kernel/osrelease", "6.18.1\n");

    #[test]
    fn releases_are_told_apart_by_number() {
        for (release, keeps) in [
            ("6.1.0-56-amd64", false),
            ("6.2.0", true),
            ("6.18.44-fc", true),
            ("7.0-rc1", true),
            ("5.14.0-503.el9", false),
            ("unknown", false),
            ("", false),
        ] {
            assert_eq!(keeps_masks(release), keeps, "{release}");
        }
    }

    #[test]
    fn the_innermost_group_with_a_cpuset_counts() {
        let (_keep, root) = tree(&[
            ("proc/7/cgroup", "0::/system.slice/a.service\n"),
            ("proc/8/cgroup", "0::/user.slice/x\n"),
            ("proc/9/cgroup", "3:cpuset:/docker/abc\n0::/x\n"),
            ("proc/10/cgroup", "3:cpuset:/\n0::/system.slice/a.service\n"),
            ("proc/11/cgroup", "0::/../../other\n"),
            ("sys/fs/cgroup/system.slice/cpuset.cpus", "\n"),
            ("sys/fs/cgroup/system.slice/cpuset.cpus.effective", "0-3\n"),
            ("sys/fs/cgroup/cpuset/docker/abc/cpuset.cpus", "0-1\n"),
            ("sys/fs/cgroup/cpuset/docker/abc/cpuset.effective_cpus", "0-1\n"),
        ]);
        let list = |pid| allowed(&root, pid).map(|(mask, _)| mask.to_string());
        assert_eq!(list(7).as_deref(), Some("0-3"));
        assert_eq!(list(8), None);
        assert_eq!(list(9).as_deref(), Some("0-1"));
        assert_eq!(list(10), None, "the root of the hierarchy restricts nobody");
        assert_eq!(list(11), None);
        assert_eq!(list(12), None);
    }

    #[test]
    fn a_group_serves_only_when_it_is_the_workload_s_own_and_nobody_set_it() {
        let base = [
            RELEASE,
            ("proc/7/cgroup", "0::/a.service\n"),
            ("proc/8/cgroup", "0::/a.service/below\n"),
            ("sys/fs/cgroup/a.service/cpuset.cpus", "\n"),
            ("sys/fs/cgroup/a.service/cpuset.cpus.partition", "member\n"),
            ("sys/fs/cgroup/a.service/cgroup.type", "domain\n"),
            ("sys/fs/cgroup/a.service/cgroup.procs", "7\n"),
            ("sys/fs/cgroup/a.service/below/cgroup.procs", "8\n"),
        ];
        let outcome = |change: &[(&str, &str)], pids: &[i32]| {
            let (_keep, root) = tree(&base);
            for (path, text) in change {
                fs::write(root.path(path), text).unwrap();
            }
            let members: Vec<ProcessId> = pids.iter().map(|p| process(*p)).collect();
            Group::of_exactly(&root, &members)
        };
        let group = outcome(&[], &[7, 8]).unwrap();
        assert_eq!(
            (group.path.as_str(), group.version),
            ("/sys/fs/cgroup/a.service", 2)
        );
        let refused = |change: &[(&str, &str)], pids: &[i32], why: &str| {
            let reason = outcome(change, pids).unwrap_err();
            assert!(reason.contains(why), "{reason}");
        };
        refused(&[], &[7], "also holds process 8");
        refused(&[], &[], "no processes");
        refused(&[], &[7, 9], "in no group");
        refused(
            &[("sys/fs/cgroup/a.service/cpuset.cpus", "0-1\n")],
            &[7, 8],
            "was set to",
        );
        refused(
            &[("sys/fs/cgroup/a.service/cpuset.cpus.partition", "root\n")],
            &[7, 8],
            "partition",
        );
        refused(
            &[("sys/fs/cgroup/a.service/cgroup.type", "threaded\n")],
            &[7, 8],
            "threaded",
        );
        refused(&[("proc/sys/kernel/osrelease", "6.1.0\n")], &[7, 8], "before 6.2");
        let reason = {
            let (_keep, root) = tree(&base);
            fs::write(root.path("sys/fs/cgroup/a.service/below/cpuset.cpus"), "1\n").unwrap();
            // Where the inner group has a cpuset, the process in it is in another group.
            Group::of_exactly(&root, &[process(7), process(8)]).unwrap_err()
        };
        assert!(reason.contains("several groups"), "{reason}");
    }

    #[test]
    fn a_group_of_version_one_serves_when_it_is_a_copy_of_its_parent() {
        let files = [
            RELEASE,
            ("proc/7/cgroup", "3:cpuset:/docker/abc\n"),
            ("sys/fs/cgroup/cpuset/docker/cpuset.cpus", "0-3\n"),
            ("sys/fs/cgroup/cpuset/docker/abc/cpuset.cpus", "0-3\n"),
            ("sys/fs/cgroup/cpuset/docker/abc/cpuset.cpu_exclusive", "0\n"),
            ("sys/fs/cgroup/cpuset/docker/abc/cgroup.procs", "7\n"),
        ];
        let (_keep, root) = tree(&files);
        let group = Group::of_exactly(&root, &[process(7)]).unwrap();
        assert_eq!(group.version, 1);
        group.set_cpus(&root, "0-1").unwrap();
        assert_eq!(group.cpus(&root).unwrap(), "0-1");
        assert!(group.exists(&root));
        assert!(
            Group::of_exactly(&root, &[process(7)])
                .unwrap_err()
                .contains("was set to")
        );
        fs::remove_dir_all(root.path(&group.path)).unwrap();
        assert!(!group.exists(&root) && group.set_cpus(&root, "0").is_err());
    }
}
