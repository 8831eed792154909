//! Memory that a workload works on: its kind, its alignment and what the program itself asked for.
//!
//! Every region begins at a multiple of 2 MiB, whatever its kind, so that large pages are possible: whether they
//! help is what the workloads are there to show.

use crate::LARGE_PAGE_BYTES;
use crate::sys::{Mapping, PageSizeAdvice, Source};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use std::io;
use std::sync::atomic::AtomicU64;

/// Kind of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Backing {
    /// Private anonymous memory, as malloc gives.
    Anon,
    /// A shared mapping of a memfd, as many runtimes use between their processes.
    Memfd,
    /// A System V shared memory segment, as databases use.
    Sysv,
}

/// What the program itself asks for, before the first touch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PageAdvice {
    /// Nothing: the system's setting decides.
    None,
    /// Large pages (`MADV_HUGEPAGE`).
    Large,
    /// Base pages for good (`MADV_NOHUGEPAGE`).
    Small,
}

/// Why memory could not be had.
#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    /// A size of zero, or one that does not fit the address space.
    #[error("{mib} MiB is not a possible size; ask for at least 1 MiB and at most what the machine has")]
    Size {
        /// MiB asked for.
        mib: u64,
    },
    /// The kernel refused to map it.
    #[error("cannot map {mib} MiB of memory: {source}; ask for less")]
    Map {
        /// MiB asked for.
        mib: u64,
        /// The kernel's answer.
        source: io::Error,
    },
    /// The kernel refused the advice.
    #[error("cannot ask for this page size: {source}; is the kernel built without transparent large pages?")]
    Advise {
        /// The kernel's answer.
        source: io::Error,
    },
}

/// A region of memory, 2 MiB aligned, gone on drop.
#[derive(Debug)]
pub struct Region {
    mapping: Mapping,
}

impl Region {
    /// Maps `mib` MiB and passes the advice on. No page is touched.
    ///
    /// # Errors
    /// When the size is impossible or the kernel refuses.
    pub fn map(mib: u64, backing: Backing, advice: PageAdvice) -> Result<Self, MemoryError> {
        let bytes = bytes_of(mib)?;
        let map = |source| MemoryError::Map { mib, source };
        let source = match backing {
            Backing::Anon => Source::Anonymous,
            Backing::Memfd => {
                let file =
                    memfd_create("homeostat-workload", MemfdFlags::CLOEXEC).map_err(|e| map(e.into()))?;
                ftruncate(&file, bytes as u64).map_err(|e| map(e.into()))?;
                Source::File(file)
            }
            Backing::Sysv => Source::SystemV,
        };
        let mapping = Mapping::new(bytes, LARGE_PAGE_BYTES, &source).map_err(map)?;
        let advised = match advice {
            PageAdvice::None => Ok(()),
            PageAdvice::Large => mapping.advise(PageSizeAdvice::Large),
            PageAdvice::Small => mapping.advise(PageSizeAdvice::Small),
        };
        advised.map_err(|source| MemoryError::Advise { source })?;
        Ok(Self { mapping })
    }

    /// Maps the first `mib` MiB of a file, shared. The file must be open for reading and writing, and nobody may cut it
    /// short meanwhile: that would end the program (SIGBUS).
    ///
    /// # Errors
    /// When the size is impossible or the kernel refuses.
    pub fn of_file(file: std::fs::File, mib: u64) -> Result<Self, MemoryError> {
        let mapping = Mapping::new(bytes_of(mib)?, LARGE_PAGE_BYTES, &Source::File(file.into()))
            .map_err(|source| MemoryError::Map { mib, source })?;
        Ok(Self { mapping })
    }

    /// Reserves `mib` MiB of anonymous address space that may be larger than the machine's memory: for programs
    /// that touch little of it.
    ///
    /// # Errors
    /// When the size is impossible or the kernel refuses.
    pub fn reserve(mib: u64) -> Result<Self, MemoryError> {
        let mapping = Mapping::new(bytes_of(mib)?, LARGE_PAGE_BYTES, &Source::Reserved)
            .map_err(|source| MemoryError::Map { mib, source })?;
        Ok(Self { mapping })
    }

    /// All of it, as words of eight bytes, zero until written.
    #[must_use]
    pub fn words(&self) -> &[AtomicU64] {
        self.mapping.words()
    }
}

fn bytes_of(mib: u64) -> Result<usize, MemoryError> {
    mib.checked_mul(crate::MIB)
        .and_then(|bytes| usize::try_from(bytes).ok())
        .filter(|bytes| (1..=isize::MAX as usize / 2).contains(bytes))
        .ok_or(MemoryError::Size { mib })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::Ordering::Relaxed;

    #[test]
    fn every_kind_is_aligned_zero_and_writable_to_its_last_word() {
        for backing in [Backing::Anon, Backing::Memfd, Backing::Sysv] {
            let region = Region::map(3, backing, PageAdvice::None).unwrap();
            let words = region.words();
            assert_eq!(words.as_ptr() as usize % LARGE_PAGE_BYTES, 0, "{backing:?}");
            assert_eq!(words.len(), 3 * 1024 * 1024 / 8);
            assert_eq!(words[words.len() - 1].load(Relaxed), 0);
            words[words.len() - 1].store(7, Relaxed);
            words[0].store(5, Relaxed);
            assert_eq!(
                (words[0].load(Relaxed), words[words.len() - 1].load(Relaxed)),
                (5, 7)
            );
        }
    }

    #[test]
    fn a_dropped_region_is_unmapped() {
        // Shared kinds have an inode of their own; by the address alone a mapping of another test could be meant.
        for backing in [Backing::Memfd, Backing::Sysv] {
            let region = Region::map(4, backing, PageAdvice::None).unwrap();
            let address = format!("{:x}-", region.words().as_ptr() as usize);
            let maps = || std::fs::read_to_string("/proc/self/maps").unwrap();
            let file = |line: &str| line.split_whitespace().skip(3).collect::<Vec<_>>().join(" ");
            let own = maps()
                .lines()
                .find(|line| line.starts_with(&address))
                .map(file)
                .unwrap();
            drop(region);
            assert!(
                !maps().lines().map(file).any(|other| other == own),
                "{backing:?}: {own}"
            );
        }
    }

    #[test]
    fn no_system_v_segment_outlives_its_region() {
        const BYTES: &str = "5242880";
        let segments = || -> std::collections::BTreeSet<String> {
            let table = std::fs::read_to_string("/proc/sysvipc/shm").unwrap();
            let fields = table
                .lines()
                .map(|line| line.split_whitespace().collect::<Vec<_>>());
            // key shmid perms size cpid ...
            let pid = std::process::id().to_string();
            fields
                .filter(|f| f[3] == BYTES && f[4] == pid)
                .map(|f| f[1].to_owned())
                .collect()
        };
        let region = Region::map(5, Backing::Sysv, PageAdvice::None).unwrap();
        assert_eq!(segments().len(), 1);
        drop(region);
        assert_eq!(segments().len(), 0);
    }

    #[test]
    fn impossible_sizes_are_refused() {
        for mib in [0, u64::MAX, 1 << 44] {
            assert!(matches!(
                Region::map(mib, Backing::Anon, PageAdvice::None),
                Err(MemoryError::Size { .. })
            ));
        }
        assert!(matches!(
            Region::map(1 << 41, Backing::Anon, PageAdvice::None),
            Err(MemoryError::Map { .. })
        ));
    }

    #[test]
    fn advice_shows_in_the_flags_of_the_mapping() {
        for (advice, flag) in [(PageAdvice::Large, " hg"), (PageAdvice::Small, " nh")] {
            let region = Region::map(2, Backing::Memfd, advice).unwrap();
            let address = format!("{:x}-", region.words().as_ptr() as usize);
            let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
            let flags = smaps
                .lines()
                .skip_while(|line| !line.starts_with(&address))
                .find(|line| line.starts_with("VmFlags:"))
                .unwrap();
            assert!(flags.contains(flag), "{flags}");
        }
    }
}
