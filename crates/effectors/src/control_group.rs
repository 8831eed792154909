//! Room that the control groups of a process leave it.
//!
//! `MADV_COLLAPSE` charges the new large page to the process's control group before it frees the old pages. In a group
//! at its limit the workload would pay for the conversion with its own memory.

use homeostat_kernel::Root;
use std::fs;
use std::path::{Path, PathBuf};

const DEPTH_MAX: usize = 32;

/// The least room in bytes over all groups of the process up to the root: limit − usage + cleanly droppable file cache.
/// `None` when no group limits it, or nothing can be read.
pub(super) fn room(root: &Root, pid: i32) -> Option<u64> {
    let text = fs::read_to_string(root.path(&format!("/proc/{pid}/cgroup"))).ok()?;
    text.lines()
        .filter_map(|line| {
            let mut fields = line.splitn(3, ':');
            let (_, controllers, path) = (fields.next()?, fields.next()?, fields.next()?);
            match controllers {
                "" => ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"]
                    .iter()
                    .map(|mount| root.path(mount))
                    .filter_map(|mount| {
                        least(
                            &mount,
                            path,
                            &["memory.max", "memory.high"],
                            "memory.current",
                            "inactive_file",
                        )
                    })
                    .min(),
                c if c.split(',').any(|name| name == "memory") => least(
                    &root.path("/sys/fs/cgroup/memory"),
                    path,
                    &["memory.limit_in_bytes"],
                    "memory.usage_in_bytes",
                    "total_inactive_file",
                ),
                _ => None,
            }
        })
        .min()
}

fn least(mount: &Path, path: &str, limits: &[&str], usage: &str, cache: &str) -> Option<u64> {
    let mut group: PathBuf = mount.join(path.trim_start_matches('/'));
    let mut least = None;
    for _ in 0..DEPTH_MAX {
        // "max" and a missing file (the root group has none) limit nothing.
        let limit = limits.iter().filter_map(|name| number(&group.join(name))).min();
        if let (Some(limit), Some(used)) = (limit, number(&group.join(usage))) {
            let droppable = statistic(&group.join("memory.stat"), cache).unwrap_or(0);
            let room = limit.saturating_sub(used.saturating_sub(droppable));
            least = Some(least.map_or(room, |l: u64| l.min(room)));
        }
        if group == mount || !group.pop() {
            break;
        }
    }
    least
}

fn number(path: &Path) -> Option<u64> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

fn statistic(path: &Path, name: &str) -> Option<u64> {
    let text = fs::read_to_string(path).ok()?;
    text.lines().find_map(|line| {
        let (key, value) = line.split_once(' ')?;
        (key == name).then(|| value.trim().parse().ok())?
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use homeostat_kernel::testing::tree;

    #[test]
    fn the_tightest_group_on_the_way_up_counts_and_cache_is_room() {
        let (_keep, root) = tree(&[
            ("proc/7/cgroup", "0::/a/b\n"),
            ("sys/fs/cgroup/a/memory.max", "1000\n"),
            ("sys/fs/cgroup/a/memory.high", "max\n"),
            ("sys/fs/cgroup/a/memory.current", "900\n"),
            ("sys/fs/cgroup/a/memory.stat", "anon 1\ninactive_file 50\n"),
            ("sys/fs/cgroup/a/b/memory.max", "max\n"),
            ("sys/fs/cgroup/a/b/memory.current", "900\n"),
        ]);
        assert_eq!(room(&root, 7), Some(150));
    }

    #[test]
    fn version_one_without_a_limit_leaves_plenty_and_no_group_is_no_answer() {
        let (_keep, root) = tree(&[
            ("proc/7/cgroup", "4:memory:/x\n1:cpu:/\n"),
            (
                "sys/fs/cgroup/memory/x/memory.limit_in_bytes",
                "9223372036854771712\n",
            ),
            ("sys/fs/cgroup/memory/x/memory.usage_in_bytes", "4096\n"),
            ("proc/8/cgroup", "garbage\n"),
        ]);
        assert!(room(&root, 7).unwrap() > 1 << 40);
        assert_eq!(room(&root, 8), None);
        assert_eq!(room(&root, 9), None);
    }
}
