//! Safety check: memory for breakpoints. A page of code with a breakpoint becomes private and is charged to the
//! process's control group. At the group's limit, it could cause an out-of-memory kill.

use homeostat_kernel::{Root, files};
use homeostat_model::ProcessId;
use homeostat_sensors::group_memory;
use homeostat_sensors::memory_group::hierarchy;
use homeostat_sensors::storage::Refusal;

/// Required room: this multiple of the pages plus this many bytes, because the program needs memory, too.
const TIMES: u64 = 2;
const BESIDE: u64 = 8 * 1024 * 1024;
/// Most nested groups that are checked.
const GROUPS_MAX: usize = 32;

/// Checks that each memory group of these processes has room for this many pages per process.
///
/// # Errors
/// A sentence: one has too little room.
pub(super) fn allow(root: &Root, processes: &[ProcessId], pages: u64) -> Result<(), Refusal> {
    let needed = (processes.len() as u64)
        .saturating_mul(pages)
        .saturating_mul(TIMES * rustix::param::page_size() as u64)
        .saturating_add(BESIDE);
    let Some((mount, version_one)) = hierarchy(root) else {
        // Without memory accounting, nothing is limited.
        return Ok(());
    };
    for process in processes {
        for group in groups(root, *process, version_one) {
            let directory = format!("{mount}{group}");
            if let Some(left) = left(root, &directory, version_one) {
                if left < needed {
                    return Err(Refusal::Now(format!(
                        "{directory} is {} MiB below the most memory that it is permitted, and counting needs room for {} MiB: its \
                     processes could be ended for lack of memory",
                        left >> 20,
                        needed >> 20
                    )));
                }
            }
        }
    }
    Ok(())
}

/// The group of a process and its parents, without the root, which has no limit.
fn groups(root: &Root, process: ProcessId, version_one: bool) -> Vec<String> {
    let text = files::text(root, &format!("/proc/{}/cgroup", process.pid)).unwrap_or_default();
    let path = text.lines().find_map(|line| {
        let mut fields = line.splitn(3, ':');
        let (number, controllers, path) = (fields.next()?, fields.next()?, fields.next()?);
        let meant = if version_one {
            controllers.split(',').any(|name| name == "memory")
        } else {
            number == "0"
        };
        meant.then(|| path.trim_end_matches('/').to_owned())
    });
    let mut path = path.unwrap_or_default();
    let mut found = Vec::new();
    while let Some((above, _)) = path.clone().rsplit_once('/') {
        if found.len() >= GROUPS_MAX {
            break;
        }
        found.push(std::mem::replace(&mut path, above.to_owned()));
    }
    found
}

/// Bytes between a group's limit and its use without reclaimable file pages. `None`: no limit, or not visible.
fn left(root: &Root, directory: &str, version_one: bool) -> Option<u64> {
    let (most, used) = if version_one {
        ("memory.limit_in_bytes", "memory.usage_in_bytes")
    } else {
        ("memory.max", "memory.current")
    };
    let number = |file: &str| {
        files::text(root, &format!("{directory}/{file}"))?
            .trim()
            .parse::<u64>()
            .ok()
    };
    let (most, used) = (number(most)?, number(used)?);
    let stat = files::bytes(root, &format!("{directory}/memory.stat"), files::SMALL_FILE_MAX)?;
    let counts = group_memory::parse(&stat);
    let file = counts.file_active.0.saturating_add(counts.file_inactive.0);
    // Dirty pages cannot be reclaimed at once.
    let free = file.saturating_sub(counts.unwritten().0);
    Some(most.saturating_sub(used.saturating_sub(free)))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1024 * 1024;

    fn tree() -> (tempfile::TempDir, Root) {
        let tree = tempfile::tempdir().unwrap();
        let root = Root::new(tree.path());
        for (file, text) in [
            ("proc/7/cgroup", "0::/a/b\n".to_owned()),
            ("sys/fs/cgroup/cgroup.controllers", "cpu memory\n".to_owned()),
            ("sys/fs/cgroup/a/memory.max", format!("{}\n", 512 * MIB)),
            ("sys/fs/cgroup/a/memory.current", format!("{}\n", 500 * MIB)),
            // All but 100 MiB can be taken back.
            (
                "sys/fs/cgroup/a/memory.stat",
                format!(
                    "anon 1\nfile_dirty {MIB}\ninactive_file {}\nactive_file {MIB}\n",
                    400 * MIB
                ),
            ),
            ("sys/fs/cgroup/a/b/memory.max", "max\n".to_owned()),
            ("sys/fs/cgroup/a/b/memory.current", "1\n".to_owned()),
            ("sys/fs/cgroup/a/b/memory.stat", "anon 1\n".to_owned()),
        ] {
            let path = tree.path().join(file);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        (tree, root)
    }

    #[test]
    fn a_group_near_its_limit_is_left_alone_and_pages_of_files_are_room() {
        let (tree, root) = tree();
        let process = ProcessId {
            pid: 7,
            start_ticks: 1,
        };
        assert_eq!(groups(&root, process, false), ["/a/b", "/a"]);
        assert_eq!(left(&root, "/sys/fs/cgroup/a", false), Some(412 * MIB));
        assert_eq!(left(&root, "/sys/fs/cgroup/a/b", false), None);
        assert_eq!(allow(&root, &[process], 640), Ok(()));
        let anonymous = "anon 1\ninactive_file 4096\n";
        std::fs::write(tree.path().join("sys/fs/cgroup/a/memory.stat"), anonymous).unwrap();
        // 12 MiB are left: enough for two pages, not for 640.
        assert_eq!(allow(&root, &[process], 2), Ok(()));
        let why = allow(&root, &[process], 640).unwrap_err().to_string();
        assert!(why.contains("/sys/fs/cgroup/a is 12 MiB below"), "{why}");
    }

    #[test]
    fn without_groups_nothing_limits() {
        let empty = tempfile::tempdir().unwrap();
        let root = Root::new(empty.path());
        assert_eq!(
            allow(
                &root,
                &[ProcessId {
                    pid: 7,
                    start_ticks: 1
                }],
                640
            ),
            Ok(())
        );
    }
}
