//! Memory counters of a control group (`memory.stat`), and whether the group, or a group above it, is full.
//!
//! Sources: Linux `Documentation/admin-guide/cgroup-v2.rst` (Memory Interface Files), `cgroup-v1/memory.rst` (5.2).
//! Both versions include the groups below (`total_…` in version 1). Shared memory is subtracted from file pages here.
//! Refaults and faults of version 1 are the group's alone, so that a program is not charged with losses of a reader in
//! a group below. In version 2 a group with processes has no such groups below it. Names that a kernel lacks are zero,
//! or `None` if whole versions lack them: `pgscan`, `pgsteal`, `pswpin`, `pswpout` in version 1. Its `pgpgin` and
//! `pgpgout` are charged and uncharged pages, not swap.

use crate::memory_group::MemoryGroup;
use crate::pressure;
use crate::pressure::Stalled;
use homeostat_kernel::bytes::{lines, number, words};
use homeostat_kernel::{Root, files};
use homeostat_model::Bytes;
use serde::{Deserialize, Serialize};

/// Memory counters of a group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GroupCounts {
    /// Memory without a file.
    pub anonymous: Bytes,
    /// Pages of files.
    pub file: Bytes,
    /// Pages of files on the active list.
    pub file_active: Bytes,
    /// Pages of files on the inactive list.
    pub file_inactive: Bytes,
    /// Shared memory, and files in memory.
    pub shared: Bytes,
    /// Pages of files that wait to be written.
    pub dirty: Bytes,
    /// Pages being written, also to swap.
    pub writeback: Bytes,
    /// Memory in swap, in version 1 (version 2 reports it elsewhere).
    pub swap: Bytes,
    /// Memory in swap and also in RAM; older kernels do not report it.
    pub swap_cached: Option<Bytes>,
    /// Pages of files needed again after reclaim, since the group was made.
    pub refaults_file: u64,
    /// Anonymous pages needed again after reclaim.
    pub refaults_anonymous: u64,
    /// Faults of its programs that waited for storage. The kernel does not separate their causes.
    pub faults_major: u64,
    /// Pages read from swap; only version 2 reports it, since Linux 6.13.
    pub swapped_in: Option<u64>,
    /// Pages written to swap, in the same versions.
    pub swapped_out: Option<u64>,
    /// Pages scanned for reclaim; only version 2 reports it.
    pub scanned: Option<u64>,
    /// Pages reclaimed; only version 2 reports it.
    pub stolen: Option<u64>,
}

impl GroupCounts {
    /// Pages that wait to be written, or are being written.
    pub fn unwritten(&self) -> Bytes {
        self.dirty + self.writeback
    }
}

/// A group that counts memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupMemory {
    /// Its directory.
    pub path: String,
    /// Its counters.
    pub counts: GroupCounts,
    /// Its limit (`memory.high` or `memory.limit_in_bytes`), if any.
    pub limit: Option<Bytes>,
    /// Time since its creation when all its programs were stalled on memory; only in version 2 (`memory.pressure`).
    pub stalled: Option<Stalled>,
    /// The nearest full group among this one and those above: new memory in it displaces other memory in it.
    pub full: Option<Full>,
}

/// A full group: it uses all that its limit allows.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Full {
    /// Its directory.
    pub path: String,
    /// Its limit.
    pub limit_bytes: Bytes,
}

/// Share of the limit from which a group is full: the kernel reclaims in batches, and usage stays below the limit.
const FULL_FROM: f64 = 0.96;

/// Parses `memory.stat` of either version.
pub fn parse(stat: &[u8]) -> GroupCounts {
    let mut out = GroupCounts::default();
    for line in lines(stat) {
        let mut parts = words(line);
        let (Some(name), Some(count)) = (parts.next(), parts.next().and_then(number)) else {
            continue;
        };
        // Version 1 has each name twice; the second is the sum over the groups below.
        match name {
            b"anon" | b"total_rss" => out.anonymous = Bytes(count),
            b"file" | b"total_cache" => out.file = Bytes(count),
            b"active_file" | b"total_active_file" => out.file_active = Bytes(count),
            b"inactive_file" | b"total_inactive_file" => out.file_inactive = Bytes(count),
            b"shmem" | b"total_shmem" => out.shared = Bytes(count),
            b"file_dirty" | b"total_dirty" => out.dirty = Bytes(count),
            b"file_writeback" | b"total_writeback" => out.writeback = Bytes(count),
            b"total_swap" => out.swap = Bytes(count),
            b"swapcached" | b"total_swapcached" => out.swap_cached = Some(Bytes(count)),
            b"workingset_refault_file" => out.refaults_file = count,
            b"workingset_refault_anon" => out.refaults_anonymous = count,
            b"pgmajfault" => out.faults_major = count,
            b"pswpin" => out.swapped_in = Some(count),
            b"pswpout" => out.swapped_out = Some(count),
            b"pgscan" => out.scanned = Some(count),
            b"pgsteal" => out.stolen = Some(count),
            _ => {}
        }
    }
    out.file = out.file.saturating_sub(out.shared);
    out
}

/// The group that counts the memory of a process; `None` if there is none in our view, or it reports nothing.
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

fn full(root: &Root, group: &MemoryGroup) -> Option<Full> {
    std::iter::successors(Some(group.clone()), MemoryGroup::above).find_map(|group| {
        let (used, limit) = group.used_of_limit(root)?;
        (used as f64 >= FULL_FROM * limit as f64).then_some(Full {
            path: group.path,
            limit_bytes: Bytes(limit),
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn version_two_counts_by_its_names() {
        // Names and their order as in Linux 6.13.
        let counts = parse(
            b"anon 1000\nfile 900\nkernel 7\nkernel_stack 1\nshmem 100\nfile_mapped 5\nfile_dirty 30\nfile_writeback 12\n\
              swapcached 8\ninactive_anon 1\nactive_anon 2\ninactive_file 500\nactive_file 300\nunevictable 0\n\
              workingset_refault_anon 4\nworkingset_refault_file 9\nworkingset_nodereclaim 0\npswpin 6\npswpout 7\n\
              pgscan 31\npgsteal 22\npgscan_kswapd 20\npgscan_direct 11\npgscan_khugepaged 0\npgsteal_kswapd 15\n\
              pgsteal_direct 7\npgsteal_khugepaged 0\npgfault 5000\npgmajfault 13\npgrefill 3\n",
        );
        let b = Bytes;
        assert_eq!(
            (counts.anonymous, counts.file, counts.shared),
            (b(1000), b(800), b(100))
        );
        assert_eq!((counts.file_active, counts.file_inactive), (b(300), b(500)));
        assert_eq!(
            (counts.dirty, counts.writeback, counts.unwritten()),
            (b(30), b(12), b(42))
        );
        assert_eq!((counts.refaults_file, counts.refaults_anonymous), (9, 4));
        assert_eq!((counts.faults_major, counts.swap_cached), (13, Some(b(8))));
        assert_eq!((counts.swapped_in, counts.swapped_out), (Some(6), Some(7)));
        assert_eq!((counts.scanned, counts.stolen), (Some(31), Some(22)));
        let older = parse(b"pgscan 31\npgsteal 22\npgmajfault 13\n");
        assert_eq!((older.swapped_in, older.swapped_out), (None, None));
    }

    #[test]
    fn version_one_counts_what_lies_below_too() {
        let counts = parse(
            b"cache 100\nrss 10\nrss_huge 0\nshmem 0\nmapped_file 2\ndirty 0\nwriteback 0\nworkingset_refault_anon 0\n\
              workingset_refault_file 1\nswap 0\nswapcached 0\npgpgin 42915\npgpgout 37830\npgfault 54314\npgmajfault 3\n\
              inactive_file 3\nactive_file 4\nhierarchical_memory_limit 9\ntotal_cache 1000\ntotal_rss 70\ntotal_shmem 200\n\
              total_dirty 5\ntotal_writeback 6\ntotal_workingset_refault_anon 2\ntotal_workingset_refault_file 8\n\
              total_swap 4096\ntotal_swapcached 64\ntotal_pgpgin 9082075\ntotal_pgpgout 8750939\ntotal_pgfault 9807189\n\
              total_pgmajfault 1444\ntotal_inactive_file 500\ntotal_active_file 300\n",
        );
        let b = Bytes;
        assert_eq!(
            (counts.anonymous, counts.file, counts.shared),
            (b(70), b(800), b(200))
        );
        assert_eq!((counts.file_active, counts.file_inactive), (b(300), b(500)));
        assert_eq!(
            (counts.dirty, counts.writeback, counts.unwritten()),
            (b(5), b(6), b(11))
        );
        assert_eq!(
            (
                counts.refaults_file,
                counts.refaults_anonymous,
                counts.faults_major
            ),
            (1, 0, 3),
            "what came back to the groups below is theirs, and so are their faults"
        );
        assert_eq!((counts.swap, counts.swap_cached), (b(4096), Some(b(64))));
        assert_eq!(
            (
                counts.scanned,
                counts.stolen,
                counts.swapped_in,
                counts.swapped_out
            ),
            (None, None, None, None),
            "not counted by group, which is not the same as nothing"
        );
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
            (full.path.as_str(), full.limit_bytes),
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
