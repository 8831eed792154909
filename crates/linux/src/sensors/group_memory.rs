//! What a control group counts of memory (`memory.stat`): its own memory, its pages of files, and what came back that had
//! been taken from it; how long its programs stood still for memory, and whether it, or a group above it, is full.
//!
//! Sources: Linux `Documentation/admin-guide/cgroup-v2.rst` (Memory Interface Files), `cgroup-v1/memory.rst` (5.2). In both
//! versions what is in the groups below is counted in (`total_…` in version 1), and pages of files hold shared memory, which is
//! taken off here. What came back is that of the group alone in version 1, so that a program is not told to lose what a reader in
//! a group below it loses; in version 2 a group with processes has no such groups below it. A name that a kernel lacks counts
//! nothing.

use super::bytes::{lines, number, words};
use super::files;
use super::pressure::{self, Stalled};
use crate::Root;
use crate::effectors::memory_group::MemoryGroup;
use homeostat_model::Bytes;

/// What a group counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GroupCounts {
    /// Memory that no file backs.
    pub anonymous: Bytes,
    /// Pages of files …
    pub file: Bytes,
    /// … of which used lately …
    pub file_active: Bytes,
    /// … and not.
    pub file_inactive: Bytes,
    /// Shared memory, and files in memory.
    pub shared: Bytes,
    /// Pages that wait to be written, or are being written.
    pub unwritten: Bytes,
    /// What is in swap, in version 1 (version 2 tells it elsewhere).
    pub swap: Bytes,
    /// Pages of files that were needed again after they had been taken, since the group was made.
    pub refaults_file: u64,
    /// Pages of programs, likewise.
    pub refaults_anonymous: u64,
}

/// A group that counts memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupMemory {
    /// Its directory.
    pub path: String,
    /// What it counts.
    pub counts: GroupCounts,
    /// What limits it (`memory.high` or `memory.limit_in_bytes`), if anything does.
    pub limit: Option<Bytes>,
    /// How long its programs stood still for memory since it was made; version 2 alone tells (`memory.pressure`).
    pub stalled: Option<Stalled>,
    /// Of this group and those above it the nearest that is full: what is brought into it is taken from what is in it.
    pub full: Option<Full>,
}

/// A group that is full: it uses what its limit allows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Full {
    /// Its directory.
    pub path: String,
    /// Its limit.
    pub limit: Bytes,
}

/// A group that uses this share of its limit is full: the kernel takes some pages at a time, so that a group at its limit is a little
/// below it for most of the time.
const FULL_FROM: f64 = 0.96;

/// Parses `memory.stat` of either version.
pub fn parse(stat: &[u8]) -> GroupCounts {
    let mut out = GroupCounts::default();
    for line in lines(stat) {
        let mut parts = words(line);
        let (Some(name), Some(count)) = (parts.next(), parts.next().and_then(number)) else {
            continue;
        };
        let field = match name {
            b"anon" | b"total_rss" => &mut out.anonymous,
            b"file" | b"total_cache" => &mut out.file,
            b"active_file" | b"total_active_file" => &mut out.file_active,
            b"inactive_file" | b"total_inactive_file" => &mut out.file_inactive,
            b"shmem" | b"total_shmem" => &mut out.shared,
            b"total_swap" => &mut out.swap,
            b"file_dirty" | b"file_writeback" | b"total_dirty" | b"total_writeback" => {
                out.unwritten = Bytes(out.unwritten.0.saturating_add(count));
                continue;
            }
            b"workingset_refault_file" => {
                out.refaults_file = count;
                continue;
            }
            b"workingset_refault_anon" => {
                out.refaults_anonymous = count;
                continue;
            }
            _ => continue,
        };
        // Version 1 has each twice; the sum over the groups below comes second.
        *field = Bytes(count);
    }
    out.file = out.file.saturating_sub(out.shared);
    out
}

/// The group that counts the memory of a process; `None` where there is none, it lies outside of our view, or tells nothing.
pub fn of(root: &Root, pid: i32) -> Option<GroupMemory> {
    let group = MemoryGroup::of(root, pid)?;
    let stat = files::bytes(
        root,
        &format!("{}/memory.stat", group.path),
        files::SMALL_FILE_MAX,
    )?;
    let beside = |leaf: &str| files::bytes(root, &format!("{}/{leaf}", group.path), files::SMALL_FILE_MAX);
    let mut counts = parse(&stat);
    if let Some(swap) = beside("memory.swap.current")
        .as_deref()
        .and_then(|text| number(words(text).next()?))
    {
        counts.swap = Bytes(swap);
    }
    Some(GroupMemory {
        counts,
        limit: group.limit(root).ok().flatten().map(Bytes),
        stalled: beside("memory.pressure").map(|text| pressure::parse(&text)),
        full: full(root, &group),
        path: group.path,
    })
}

/// Of a group and those above it the nearest that is full.
fn full(root: &Root, group: &MemoryGroup) -> Option<Full> {
    std::iter::successors(Some(group.clone()), MemoryGroup::above).find_map(|group| {
        let (used, limit) = group.used_of_limit(root)?;
        (used as f64 >= FULL_FROM * limit as f64).then_some(Full {
            path: group.path,
            limit: Bytes(limit),
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn version_two_counts_by_its_names() {
        let counts = parse(
            b"anon 1000\nfile 900\nkernel 7\nshmem 100\nfile_mapped 5\nfile_dirty 30\nfile_writeback 12\n\
              inactive_anon 1\nactive_anon 2\ninactive_file 500\nactive_file 300\nworkingset_refault_anon 4\n\
              workingset_refault_file 9\n",
        );
        let b = Bytes;
        assert_eq!(
            (counts.anonymous, counts.file, counts.shared),
            (b(1000), b(800), b(100))
        );
        assert_eq!((counts.file_active, counts.file_inactive), (b(300), b(500)));
        assert_eq!(
            (counts.unwritten, counts.refaults_file, counts.refaults_anonymous),
            (b(42), 9, 4)
        );
    }

    #[test]
    fn version_one_counts_what_lies_below_too() {
        let counts = parse(
            b"cache 100\nrss 10\nshmem 0\ndirty 0\nworkingset_refault_file 1\ninactive_file 3\nactive_file 4\n\
              hierarchical_memory_limit 9\ntotal_cache 1000\ntotal_rss 70\ntotal_shmem 200\ntotal_swap 4096\ntotal_dirty 5\n\
              total_writeback 6\ntotal_workingset_refault_anon 2\ntotal_workingset_refault_file 8\n\
              total_inactive_file 500\ntotal_active_file 300\n",
        );
        let b = Bytes;
        assert_eq!(
            (counts.anonymous, counts.file, counts.shared),
            (b(70), b(800), b(200))
        );
        assert_eq!((counts.file_active, counts.file_inactive), (b(300), b(500)));
        assert_eq!(
            (counts.unwritten, counts.refaults_file, counts.refaults_anonymous),
            (b(11), 1, 0),
            "what came back to the groups below is theirs"
        );
        assert_eq!(counts.swap, b(4096));
    }

    #[test]
    fn a_process_is_counted_in_its_group() {
        let tree = tempfile::tempdir().unwrap();
        for (path, text) in [
            ("sys/fs/cgroup/cgroup.controllers", "memory\n"),
            ("proc/7/cgroup", "0::/a.slice/b.service\n"),
            ("proc/8/cgroup", "0::/none\n"),
            ("sys/fs/cgroup/a.slice/b.service/memory.stat", "anon 5\nfile 6\n"),
            ("sys/fs/cgroup/a.slice/b.service/memory.high", "1048576\n"),
            ("sys/fs/cgroup/a.slice/b.service/memory.max", "max\n"),
            ("sys/fs/cgroup/a.slice/b.service/memory.current", "700000\n"),
            ("sys/fs/cgroup/a.slice/b.service/memory.swap.current", "8192\n"),
            (
                "sys/fs/cgroup/a.slice/b.service/memory.pressure",
                "some avg10=0.00 avg60=0.00 avg300=0.00 total=7\n",
            ),
            ("sys/fs/cgroup/a.slice/memory.high", "max\n"),
            ("sys/fs/cgroup/a.slice/memory.max", "1000000\n"),
            ("sys/fs/cgroup/a.slice/memory.current", "990000\n"),
        ] {
            let file = tree.path().join(path);
            std::fs::create_dir_all(file.parent().unwrap()).unwrap();
            std::fs::write(file, text).unwrap();
        }
        let root = Root::new(tree.path());
        let group = of(&root, 7).unwrap();
        assert_eq!(group.path, "/sys/fs/cgroup/a.slice/b.service");
        assert_eq!((group.counts.file, group.limit), (Bytes(6), Some(Bytes(1 << 20))));
        assert_eq!(group.counts.swap, Bytes(8192));
        assert_eq!(group.stalled.unwrap().some, homeostat_model::Nanoseconds(7000));
        let full = group.full.unwrap();
        assert_eq!(
            (full.path.as_str(), full.limit),
            ("/sys/fs/cgroup/a.slice", Bytes(1_000_000)),
            "its own limit is not reached, that of the slice is"
        );
        assert_eq!(of(&root, 8), None);
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let _ = parse(&bytes);
        }
    }
}
