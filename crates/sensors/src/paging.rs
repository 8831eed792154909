//! Memory reclaimed and brought back (`/proc/vmstat`), and memory by use (`/proc/meminfo`).
//!
//! Names as in Linux `include/linux/vm_event_item.h` and `mm/vmstat.c`; a name that a kernel lacks is zero. Before 5.9
//! there was one refault counter (`workingset_refault`): it counts as that of files, which nearly all of them were.

use homeostat_kernel::bytes::{keyed, lines, number, words};
use homeostat_kernel::{Root, files};
use homeostat_model::{Bytes, Paging};
use serde::{Deserialize, Serialize};

/// Parses `/proc/vmstat`: counts since boot.
pub fn parse(vmstat: &[u8]) -> Paging {
    let mut totals = Paging::default();
    for line in lines(vmstat) {
        let mut parts = words(line);
        let (Some(name), Some(count)) = (parts.next(), parts.next().and_then(number)) else {
            continue;
        };
        let field = match name {
            b"pgpgin" => {
                totals.read_in = Bytes::from_kib(count);
                continue;
            }
            b"pswpin" => &mut totals.swapped_in,
            b"pswpout" => &mut totals.swapped_out,
            b"pgmajfault" => &mut totals.faults_major,
            b"workingset_refault_anon" => &mut totals.refaults_anonymous,
            b"workingset_refault_file" | b"workingset_refault" => &mut totals.refaults_file,
            b"pgscan_kswapd" => &mut totals.scanned_background,
            b"pgscan_direct" => &mut totals.scanned_direct,
            b"pgsteal_kswapd" => &mut totals.stolen_background,
            b"pgsteal_direct" => &mut totals.stolen_direct,
            _ => continue,
        };
        *field = count;
    }
    totals
}

/// Counts since `before`; zero for a counter that went back.
pub fn since(now: &Paging, before: &Paging) -> Paging {
    let less = |field: fn(&Paging) -> u64| field(now).saturating_sub(field(before));
    Paging {
        read_in: now.read_in.saturating_sub(before.read_in),
        swapped_in: less(|p| p.swapped_in),
        swapped_out: less(|p| p.swapped_out),
        faults_major: less(|p| p.faults_major),
        refaults_anonymous: less(|p| p.refaults_anonymous),
        refaults_file: less(|p| p.refaults_file),
        scanned_background: less(|p| p.scanned_background),
        scanned_direct: less(|p| p.scanned_direct),
        stolen_background: less(|p| p.stolen_background),
        stolen_direct: less(|p| p.stolen_direct),
    }
}

/// Memory by use, now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryUse {
    /// All memory (`MemTotal`).
    pub total_bytes: Bytes,
    /// Unused (`MemFree`).
    pub free_bytes: Bytes,
    /// Available without swapping, by the kernel's estimate (`MemAvailable`).
    pub available_bytes: Bytes,
    /// Memory of programs without a file (`AnonPages`).
    pub anonymous_bytes: Bytes,
    /// Pages of files (`Cached` + `Buffers` − `Shmem`).
    pub file_bytes: Bytes,
    /// Pages of files used recently (`Active(file)`).
    pub file_active_bytes: Bytes,
    /// Pages of files not used recently (`Inactive(file)`): reclaimed first.
    pub file_inactive_bytes: Bytes,
    /// Pages of files mapped by programs (`Mapped`, with shared memory).
    pub mapped_bytes: Bytes,
    /// Shared memory and files in memory (`Shmem`).
    pub shared_bytes: Bytes,
    /// The kernel's own reclaimable memory (`SReclaimable`).
    pub kernel_reclaimable_bytes: Bytes,
    /// Pages that wait to be written (`Dirty` + `Writeback`).
    pub unwritten_bytes: Bytes,
    /// Total swap (`SwapTotal`).
    pub swap_total_bytes: Bytes,
    /// Swap in use.
    pub swap_used_bytes: Bytes,
    /// Memory promised to programs, used or not (`Committed_AS`).
    #[serde(default)]
    pub committed_bytes: Bytes,
    /// Most that may be promised under strict overcommit (`CommitLimit`; `vm.overcommit_memory` = 2).
    #[serde(default)]
    pub commit_limit_bytes: Bytes,
}

/// Parses `/proc/meminfo`; absent lines are zero.
pub fn parse_use(meminfo: &[u8]) -> MemoryUse {
    let kib = |key: &str| Bytes::from_kib(keyed(meminfo, key).unwrap_or(0));
    MemoryUse {
        total_bytes: kib("MemTotal"),
        free_bytes: kib("MemFree"),
        available_bytes: kib("MemAvailable"),
        anonymous_bytes: kib("AnonPages"),
        file_bytes: (kib("Cached") + kib("Buffers")).saturating_sub(kib("Shmem")),
        file_active_bytes: kib("Active(file)"),
        file_inactive_bytes: kib("Inactive(file)"),
        mapped_bytes: kib("Mapped"),
        shared_bytes: kib("Shmem"),
        kernel_reclaimable_bytes: kib("SReclaimable"),
        unwritten_bytes: kib("Dirty") + kib("Writeback"),
        swap_total_bytes: kib("SwapTotal"),
        swap_used_bytes: kib("SwapTotal").saturating_sub(kib("SwapFree")),
        committed_bytes: kib("Committed_AS"),
        commit_limit_bytes: kib("CommitLimit"),
    }
}

/// Memory by use; `None` when `/proc/meminfo` cannot be read.
pub fn read_use(root: &Root) -> Option<MemoryUse> {
    files::bytes(root, "/proc/meminfo", files::SMALL_FILE_MAX).map(|text| parse_use(&text))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const VMSTAT: &[u8] =
        b"nr_free_pages 5\npgpgin 321\nworkingset_refault_anon 7\nworkingset_refault_file 43156199\npswpin 1\n\
        pswpout 2\npgmajfault 210656\npgsteal_kswapd 3\npgsteal_direct 4\npgscan_kswapd 5\npgscan_direct 6\n\
        pgscan_direct_throttle 9\n";

    #[test]
    fn counts_are_told_apart_by_their_whole_name() {
        let p = parse(VMSTAT);
        assert_eq!((p.refaults_anonymous, p.refaults_file), (7, 43_156_199));
        assert_eq!(p.read_in, Bytes::from_kib(321));
        assert_eq!((p.swapped_in, p.swapped_out, p.faults_major), (1, 2, 210_656));
        assert_eq!((p.stolen_background, p.stolen_direct), (3, 4));
        assert_eq!((p.scanned_background, p.scanned_direct), (5, 6));
        assert_eq!(parse(b"workingset_refault 12\n").refaults_file, 12);
    }

    #[test]
    fn differences_never_go_back() {
        let (now, before) = (parse(b"pswpin 10\npswpout 3\n"), parse(b"pswpin 4\npswpout 5\n"));
        let between = since(&now, &before);
        assert_eq!((between.swapped_in, between.swapped_out), (6, 0));
    }

    #[test]
    fn shared_memory_is_not_a_page_of_a_file() {
        let used = parse_use(
            b"MemTotal: 1000 kB\nMemFree: 100 kB\nBuffers: 50 kB\nCached: 400 kB\nShmem: 150 kB\n\
              Active(file): 120 kB\nSwapTotal: 80 kB\nSwapFree: 30 kB\nDirty: 4 kB\nWriteback: 2 kB\n\
              CommitLimit: 580 kB\nCommitted_AS: 2000 kB\n",
        );
        assert_eq!(used.file_bytes, Bytes::from_kib(300));
        assert_eq!(used.swap_used_bytes, Bytes::from_kib(50));
        assert_eq!(used.unwritten_bytes, Bytes::from_kib(6));
        assert_eq!(used.file_active_bytes, Bytes::from_kib(120));
        assert_eq!(
            (used.committed_bytes, used.commit_limit_bytes),
            (Bytes::from_kib(2000), Bytes::from_kib(580))
        );
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let _ = parse(&bytes);
            let _ = parse_use(&bytes);
        }
    }
}
