//! Capabilities of memory: large pages, resident memory, evicted pages.

use super::{CAP_IPC_LOCK, CAP_SYS_NICE, List, Seen, captured, may_pass, readable};
use homeostat_kernel::memory::{Advice, AdviseError, BASE_PAGE, PIECE, Pagemap, PieceState, ScratchMapping};
use homeostat_kernel::privileges::{CAP_SYS_PTRACE, may};
use homeostat_kernel::root::{Root, open_in};
use homeostat_kernel::{cache, files, memory};
use homeostat_model::CapabilityState::{Available, Limited, Missing};
use homeostat_sensors::memory_settings;
use rustix::fs::{Mode, OFlags};
use std::os::fd::AsFd;
use std::path::Path;
use std::time::Instant;

impl List {
    pub(super) fn conversion(&mut self, root: &Root) {
        let (collapse, split) = if let Some(other) = other_pages(rustix::param::page_size() as u64) {
            (other.clone(), other)
        } else if root.is_live() {
            try_conversion(root)
        } else {
            (captured(), captured())
        };
        self.add(
            "process_madvise.collapse",
            "memory of running programs cannot be converted to large pages: the large_pages strategy is off",
            collapse,
        );
        self.add(
            "process_madvise.split",
            "a conversion could not be undone, so none is tried: the large_pages strategy is off",
            split,
        );
    }

    pub(super) fn memory_sensors(&mut self, root: &Root) {
        let scan = if root.is_live() {
            probe_pagemap(root)
        } else {
            captured()
        };
        self.add(
            "pagemap.scan",
            "without PAGEMAP_SCAN the state of pages is read entry by entry: slower; without pagemap not at all, and \
             nothing is converted",
            scan,
        );
        let kpageflags = readable(root, "/proc/kpageflags");
        self.add(
            "kpageflags",
            "on kernels before 6.7 large pages of other processes cannot be told from small ones",
            kpageflags,
        );
        let huge = files::text(root, "/sys/kernel/mm/transparent_hugepage/hpage_pmd_size");
        let seen = match huge {
            Some(size) => Seen::new(Available, format!("hpage_pmd_size {size} bytes"), ""),
            None => Seen::new(
                Missing,
                "/sys/kernel/mm/transparent_hugepage is absent",
                "run a kernel with CONFIG_TRANSPARENT_HUGEPAGE",
            ),
        };
        self.add(
            "transparent_huge_pages",
            "no memory can be mapped by large pages",
            seen,
        );
        let khugepaged = files::text(root, "/sys/kernel/mm/transparent_hugepage/khugepaged/full_scans");
        let seen = match khugepaged {
            Some(scans) => Seen::new(Available, format!("khugepaged/full_scans {scans}"), ""),
            None => Seen::new(Missing, "khugepaged's counters are absent", ""),
        };
        self.add(
            "khugepaged",
            "what the kernel converts by itself is not seen",
            seen,
        );
    }

    pub(super) fn resident(&mut self, root: &Root) {
        let seen = match open_in_itself() {
            Ok(()) => Seen::new(Available, "openat2 opens files below a directory", ""),
            Err(e) => Seen::new(
                Missing,
                format!("openat2: {e}"),
                "Linux 5.6 or later; in a unit, no RestrictSUIDSGID=",
            ),
        };
        self.add(
            "files.below",
            "progress files of programs and sockets in containers cannot be opened",
            seen,
        );
        let seen = match cache::is_told() {
            Ok(()) => Seen::new(
                Available,
                "cachestat and mincore report what is in memory of a file",
                "",
            ),
            Err(e) => Seen::new(
                Missing,
                e.to_string(),
                "Linux 6.5 or later; in a service manager's filter of system calls, one that knows cachestat and mincore",
            ),
        };
        self.add(
            "memory.taken",
            "what a program lost to a reader is not read for it when that is contained: a program that reads single pages may need \
             minutes to come back",
            seen,
        );
        let seen = match memory_settings::can_be_moved(root) {
            Ok(files) => {
                let names: Vec<&str> = files.iter().filter_map(|f| f.rsplit('/').next()).collect();
                Seen::new(Available, names.join(", "), "")
            }
            Err(why) => Seen::new(Missing, why, "run as root on the host, with /proc/sys writable"),
        };
        self.add(
            "memory.settings",
            "the profile autotune-classic has nothing to move",
            seen,
        );
        let seen = if !root.is_live() {
            captured()
        } else if may(root, CAP_IPC_LOCK) {
            Seen::new(Available, "CAP_IPC_LOCK is held", "")
        } else {
            let limit = rustix::process::getrlimit(rustix::process::Resource::Memlock).current;
            match limit {
                None => Seen::new(Available, "RLIMIT_MEMLOCK is unlimited", ""),
                Some(n) => Seen::new(
                    Missing,
                    format!("no CAP_IPC_LOCK and RLIMIT_MEMLOCK is {n} bytes"),
                    "run homeostat as root or set LimitMEMLOCK=infinity in its unit",
                ),
            }
        };
        self.add(
            "mlockall",
            "under memory pressure homeostat itself may be paged out and react late",
            seen,
        );
    }
}

fn scratch_state(root: &Root, scratch: &ScratchMapping) -> Result<PieceState, Seen> {
    let unreadable = |e: std::io::Error| {
        Seen::new(
            Missing,
            format!("reading /proc/self/pagemap: {e}"),
            "run homeostat as root",
        )
        .passing(may_pass(&e))
    };
    let pid = i32::try_from(std::process::id()).map_err(|e| unreadable(std::io::Error::other(e)))?;
    let mut states = Vec::new();
    Pagemap::open(&root.path("/proc"), pid)
        .and_then(|mut p| p.piece_states(scratch.address(), 1, &mut states))
        .map_err(unreadable)?;
    states
        .first()
        .copied()
        .ok_or_else(|| unreadable(std::io::Error::other("the page tables say nothing")))
}

/// Whether the kernel may take the advice at another time.
pub(super) fn advice_may_pass(error: AdviseError) -> bool {
    matches!(
        error,
        AdviseError::NoMemory | AdviseError::Again | AdviseError::Busy | AdviseError::Interrupted
    )
}

/// Converts one piece of our own memory through a handle on ourselves, and undoes it.
pub(super) fn try_conversion(root: &Root) -> (Seen, Seen) {
    let failed = |seen: Seen| {
        let second =
            Seen::new(Missing, "not probed: conversion does not work", seen.remedy).passing(seen.passing);
        (seen, second)
    };
    let pid = i32::try_from(std::process::id()).unwrap_or(0);
    let handle = match memory::pidfd_open(pid) {
        Ok(handle) => handle,
        Err(e) => {
            let seen = Seen::new(Missing, format!("pidfd_open: {e}"), "run a kernel from 6.1");
            return failed(seen.passing(may_pass(&e)));
        }
    };
    let mut scratch = match ScratchMapping::new(1) {
        Ok(scratch) => scratch,
        Err(e) => return failed(no_scratch(&e)),
    };
    scratch.touch(PIECE);
    let begin = Instant::now();
    if let Err(e) = memory::process_madvise(handle.as_fd(), scratch.address(), PIECE, Advice::Collapse) {
        let passing = advice_may_pass(e);
        return failed(
            Seen::new(
                Missing,
                format!("MADV_COLLAPSE of 2 MiB of our own: {e}"),
                if passing {
                    "free some memory; it is probed again after a while"
                } else {
                    "run a kernel from 6.1 with large pages"
                },
            )
            .passing(passing),
        );
    }
    let took = begin.elapsed().as_micros();
    match scratch_state(root, &scratch) {
        Ok(PieceState::Huge) => {}
        // Reclaim may have split it again.
        Ok(other) => {
            let detail = format!("after MADV_COLLAPSE the piece is {other:?}, not huge");
            return failed(Seen::new(Missing, detail, "it is probed again after a while").passing(true));
        }
        Err(seen) => return failed(seen),
    }
    let lacking = lacking(root);
    let collapse = if lacking.is_empty() {
        Seen::new(
            Available,
            format!("2 MiB of our own converted in {took} us and verified"),
            "",
        )
    } else {
        Seen::new(
            Missing,
            format!(
                "works on our own memory ({took} us), but for that of others {} is missing",
                lacking.join(", ")
            ),
            "run homeostat as root or give it CAP_SYS_NICE and CAP_SYS_PTRACE",
        )
    };
    let begin = Instant::now();
    let cold = memory::process_madvise(handle.as_fd(), scratch.address(), BASE_PAGE, Advice::Cold);
    let took = begin.elapsed().as_micros();
    let split = match (cold, scratch_state(root, &scratch)) {
        (Ok(()), Ok(PieceState::Full)) => Seen::new(
            Available,
            format!("MADV_COLD on 4 KiB split the 2 MiB in {took} us, verified"),
            "",
        ),
        (Ok(()), Ok(other)) => Seen::new(
            Missing,
            format!("after MADV_COLD the piece is {other:?}, not split"),
            "run another kernel",
        ),
        (Err(e), _) => Seen::new(
            Missing,
            format!("MADV_COLD of our own memory: {e}"),
            "run a kernel from 5.10",
        )
        .passing(advice_may_pass(e)),
        (Ok(()), Err(seen)) => seen,
    };
    (collapse, split)
}

/// The missing rights among those for a change of other processes.
pub(super) fn lacking(root: &Root) -> Vec<&'static str> {
    [(CAP_SYS_NICE, "CAP_SYS_NICE"), (CAP_SYS_PTRACE, "CAP_SYS_PTRACE")]
        .into_iter()
        .filter(|(number, _)| !may(root, *number))
        .map(|(_, name)| name)
        .collect()
}

/// Whether the kernel moves large pages whole.
pub(super) fn whole_large_pages(root: &Root, release: &str) -> Seen {
    /// Processors whose kernels can (`ARCH_ENABLE_THP_MIGRATION`); others split a large page to move it.
    const ABLE: [&str; 4] = ["x86_64", "aarch64", "powerpc64", "s390x"];
    if !root.path("/sys/kernel/mm/transparent_hugepage").exists() {
        return Seen::new(Missing, "the kernel has no transparent huge pages", "");
    }
    // Before 5.8 no counter shows it (`thp_migration_split` in /proc/vmstat).
    if homeostat_kernel::release::kernel_version(release).is_none_or(|version| version < (5, 8)) {
        return Seen::new(
            Missing,
            format!("kernel {release} may divide large pages when they move"),
            "run a kernel from 5.8",
        );
    }
    let architecture = std::env::consts::ARCH;
    if !ABLE.contains(&architecture) {
        return Seen::new(
            Missing,
            format!("kernels for {architecture} divide large pages when they move"),
            "",
        );
    }
    Seen::new(
        Available,
        format!(
            "kernel {release} moves them whole while the node has free ones, which is looked at each time"
        ),
        "",
    )
}

/// Not even two pieces of memory for the probe.
pub(super) fn no_scratch(error: &std::io::Error) -> Seen {
    let detail = format!("no scratch memory: {error}");
    Seen::new(
        Missing,
        detail,
        "free some memory; it is probed again after a while",
    )
    .passing(may_pass(error))
}

/// Whether a file is opened below a directory that is the root for all links in it.
fn open_in_itself() -> Result<(), rustix::io::Errno> {
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    let itself = rustix::fs::open("/proc/self", flags | OFlags::DIRECTORY, Mode::empty())?;
    open_in(itself.as_fd(), Path::new("status"), flags).map(drop)
}

fn probe_pagemap(root: &Root) -> Seen {
    let pid = i32::try_from(std::process::id()).unwrap_or(0);
    let scratch = match ScratchMapping::new(1) {
        Ok(s) => s,
        Err(e) => return no_scratch(&e),
    };
    let mut states = Vec::new();
    let begin = Instant::now();
    match Pagemap::open(&root.path("/proc"), pid).and_then(|mut p| {
        p.piece_states(scratch.address(), 1, &mut states)
            .map(|()| p.is_exact())
    }) {
        Ok(true) => Seen::new(
            Available,
            format!(
                "PAGEMAP_SCAN of 2 MiB of our own took {} us",
                begin.elapsed().as_micros()
            ),
            "",
        ),
        Ok(false) => Seen::new(
            Limited,
            "no PAGEMAP_SCAN; pagemap is read entry by entry",
            "run a kernel from 6.7",
        ),
        Err(e) => Seen::new(
            Missing,
            format!("/proc/self/pagemap: {e}"),
            "run homeostat as root",
        )
        .passing(may_pass(&e)),
    }
}

/// Refuses other page sizes where 4 KiB pages and large pages of 2 MiB are required.
pub(super) fn other_pages(page: u64) -> Option<Seen> {
    (page != BASE_PAGE).then(|| {
        let detail = format!(
            "the pages of this kernel have {} KiB, and only 4 KiB are supported",
            page >> 10
        );
        Seen::new(Missing, detail, "")
    })
}
