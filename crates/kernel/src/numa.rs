//! CPUs on which threads may run, and NUMA nodes of the pages of other processes.
//!
//! Facts about the kernel that callers rely on (kernel/sched/syscalls.c, mm/migrate.c, mm/mempolicy.c, Linux 6.1 and
//! 6.18; `move_pages(2)`, `sched_setaffinity(2)`):
//! * [`affinity`] omits offline CPUs from the mask; `Cpus_allowed` in `/proc/PID/task/TID/status` is complete.
//!   [`set_affinity`] cuts a mask to the thread's cpuset, and fails only if nothing is left.
//! * `sched_setaffinity` takes no handle of a thread. Another thread can get the number between check and call only
//!   after all of `pid_max` was used meanwhile.
//! * `move_pages` ends at a page that it cannot move. Statuses of that batch and of all later pages are not written:
//!   here they are [`PageStatus::Untried`], and `nodes_of` finds their nodes.
//! * Moving one page of a large page moves the whole large page.

use homeostat_model::units::ranges;
use std::fmt;
use std::io;

/// Most CPUs in a mask: `NR_CPUS` of the largest kernels in use.
pub const CPUS_MAX: u32 = 8192;
/// Most NUMA nodes in a set: `MAX_NUMNODES` of the largest kernels in use.
pub const NODES_MAX: u32 = 1024;
/// Most pages in one call. Meanwhile the kernel holds the address space of the process for reading at each page.
pub const PAGES_PER_CALL_MAX: usize = 16 * 1024;

const MASK_WORDS: usize = CPUS_MAX as usize / 64;
/// Pointers and words of the kernel's interface have our size.
const _: () = assert!(size_of::<usize>() == size_of::<u64>());

/// Reason for the kernel's refusal, typed by the caller's remedy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NumaError {
    /// ESRCH: the process or thread is gone.
    #[error("no such process or thread (ESRCH)")]
    NoProcess,
    /// EPERM: `CAP_SYS_NICE` is needed, for pages also the right to trace the process.
    #[error("not permitted (EPERM)")]
    NotPermitted,
    /// EACCES: the cpuset of the process does not allow that node.
    #[error("the node is not allowed by the cpuset of the process (EACCES)")]
    NodeNotAllowed,
    /// ENODEV: there is no such node online.
    #[error("no such node online (ENODEV)")]
    NoNode,
    /// EINVAL: none of the CPUs is online and allowed, or an argument is out of range.
    #[error("none of it is online and allowed, or an argument is out of range (EINVAL)")]
    Invalid,
    /// EBUSY: a deadline thread needs more CPUs than the mask has.
    #[error("a deadline thread can not be restricted to so few CPUs (EBUSY)")]
    Busy,
    /// ENOMEM: the kernel is short of memory.
    #[error("the kernel is short of memory (ENOMEM)")]
    NoMemory,
    /// ENOSYS: the kernel is built without it.
    #[error("the kernel is built without it (ENOSYS)")]
    NotSupported,
    /// EINTR: a signal came first.
    #[error("interrupted (EINTR)")]
    Interrupted,
    /// Another error number.
    #[error("error number {0}")]
    Other(i32),
}

impl NumaError {
    fn from_errno(errno: i32) -> Self {
        match errno {
            libc::ESRCH => Self::NoProcess,
            libc::EPERM => Self::NotPermitted,
            libc::EACCES => Self::NodeNotAllowed,
            libc::ENODEV => Self::NoNode,
            libc::EINVAL => Self::Invalid,
            libc::EBUSY => Self::Busy,
            libc::ENOMEM => Self::NoMemory,
            libc::ENOSYS => Self::NotSupported,
            libc::EINTR => Self::Interrupted,
            other => Self::Other(other),
        }
    }

    fn last() -> Self {
        Self::from_errno(io::Error::last_os_error().raw_os_error().unwrap_or(0))
    }
}

/// A set of CPUs, of any number up to [`CPUS_MAX`].
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CpuMask {
    /// Lowest CPUs first; the last word is not zero, so that equal sets are equal values.
    words: Vec<u64>,
}

impl CpuMask {
    fn from_words(mut words: Vec<u64>) -> Self {
        words.truncate(words.iter().rposition(|w| *w != 0).map_or(0, |i| i + 1));
        Self { words }
    }

    /// The set of these CPUs; numbers from [`CPUS_MAX`] on are left out.
    pub fn of(cpus: impl IntoIterator<Item = u32>) -> Self {
        let mut words = Vec::new();
        for cpu in cpus.into_iter().filter(|cpu| *cpu < CPUS_MAX) {
            let at = cpu as usize / 64;
            if words.len() <= at {
                words.resize(at + 1, 0);
            }
            if let Some(word) = words.get_mut(at) {
                *word |= 1 << (cpu % 64);
            }
        }
        Self { words }
    }

    /// Reads a list such as `0-3,8`; `None` when it is not one. An empty text is the empty set.
    pub fn from_list(text: &str) -> Option<Self> {
        crate::bytes::list(text.as_bytes()).map(Self::of)
    }

    /// Reads 32-bit groups in hexadecimal, highest first: `ff,00000003` (`Cpus_allowed` of `/proc/PID/status`).
    pub fn from_hexadecimal(text: &str) -> Option<Self> {
        let groups: Vec<&str> = text.trim().split(',').collect();
        if groups.len() > CPUS_MAX as usize / 32 {
            return None;
        }
        let mut words = vec![0u64; groups.len().div_ceil(2)];
        for (index, group) in groups.iter().rev().enumerate() {
            if group.is_empty() || group.len() > 8 {
                return None;
            }
            let bits = u64::from(u32::from_str_radix(group, 16).ok()?);
            *words.get_mut(index / 2)? |= bits << (index % 2 * 32);
        }
        Some(Self::from_words(words))
    }

    /// The CPUs in ascending order.
    pub fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        self.words.iter().zip(0u32..).flat_map(|(word, at)| {
            (0..64)
                .filter(move |bit| word >> bit & 1 == 1)
                .map(move |bit| at * 64 + bit)
        })
    }

    /// How many CPUs it holds.
    pub fn count(&self) -> u32 {
        self.words.iter().map(|w| w.count_ones()).sum()
    }

    /// Whether it holds none.
    pub fn is_empty(&self) -> bool {
        self.words.is_empty()
    }

    /// Whether it holds that CPU.
    pub fn contains(&self, cpu: u32) -> bool {
        self.words
            .get(cpu as usize / 64)
            .is_some_and(|w| w >> (cpu % 64) & 1 == 1)
    }

    /// The CPUs in both.
    #[must_use]
    pub fn and(&self, other: &Self) -> Self {
        Self::from_words(self.words.iter().zip(&other.words).map(|(a, b)| a & b).collect())
    }

    /// The CPUs in either.
    #[must_use]
    pub fn or(&self, other: &Self) -> Self {
        let (long, short) = if self.words.len() >= other.words.len() {
            (self, other)
        } else {
            (other, self)
        };
        let mut words = long.words.clone();
        for (word, more) in words.iter_mut().zip(&short.words) {
            *word |= more;
        }
        Self { words }
    }

    /// The CPUs that the other does not hold.
    #[must_use]
    pub fn without(&self, other: &Self) -> Self {
        let mut words = self.words.clone();
        for (word, less) in words.iter_mut().zip(&other.words) {
            *word &= !less;
        }
        Self::from_words(words)
    }

    /// Whether the other holds all of it.
    pub fn is_within(&self, other: &Self) -> bool {
        self.without(other).is_empty()
    }
}

impl fmt::Display for CpuMask {
    /// In the kernel's format of lists: `0-3,8`; the empty set is the empty text.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&ranges(self.iter()))
    }
}

/// The CPUs on which a thread may run, of those online. A process's number is that of its main thread.
///
/// # Errors
/// [`NumaError::NoProcess`] when it is gone, or the number is not positive (which would mean the caller).
pub fn affinity(thread: i32) -> Result<CpuMask, NumaError> {
    if thread <= 0 {
        return Err(NumaError::NoProcess);
    }
    let mut words = [0u64; MASK_WORDS];
    // SAFETY: the kernel writes at most the length that is passed, that of `words`, which is live and writable.
    let written = unsafe {
        libc::syscall(
            libc::SYS_sched_getaffinity,
            thread,
            size_of_val(&words),
            words.as_mut_ptr(),
        )
    };
    if written < 0 {
        return Err(NumaError::last());
    }
    Ok(CpuMask::from_words(words.to_vec()))
}

/// Restricts a thread to these CPUs, as far as its cpuset allows. Its new threads and processes inherit the mask.
///
/// # Errors
/// [`NumaError::Invalid`] when none of them is online and allowed, or the kernel forbids it for that thread.
/// [`NumaError::NotPermitted`] without `CAP_SYS_NICE` for another user's thread. [`NumaError::NoProcess`] when it is
/// gone, or the number is not positive.
pub fn set_affinity(thread: i32, cpus: &CpuMask) -> Result<(), NumaError> {
    if thread <= 0 {
        return Err(NumaError::NoProcess);
    }
    let mut words = [0u64; MASK_WORDS];
    for (to, from) in words.iter_mut().zip(&cpus.words) {
        *to = *from;
    }
    // SAFETY: the kernel reads at most the passed length of the live `words`. A thread's CPUs do not concern Rust.
    let outcome = unsafe {
        libc::syscall(
            libc::SYS_sched_setaffinity,
            thread,
            size_of_val(&words),
            words.as_ptr(),
        )
    };
    if outcome < 0 {
        return Err(NumaError::last());
    }
    Ok(())
}

/// The node of a page, or the reason why it is unknown or the page was not moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PageStatus {
    /// It lies on that node.
    On(u32),
    /// ENOENT: not in memory (never touched, or in swap).
    Absent,
    /// EFAULT: not mapped, or the shared zero page.
    Unmapped,
    /// EACCES: several processes map it, and only pages of one process were to be moved.
    Shared,
    /// EBUSY: in use just now (locked, being written, or not on a list of pages that can be moved).
    InUse,
    /// ENOMEM: the node has no free page.
    NoMemory,
    /// The call ended before this page.
    Untried,
    /// Another error number.
    Other(i32),
}

/// Initial value of the status array; no error number or node has this value.
const UNTRIED: i32 = i32::MIN;

impl PageStatus {
    fn from_status(status: i32) -> Self {
        match u32::try_from(status) {
            Ok(node) => Self::On(node),
            Err(_) if status == UNTRIED => Self::Untried,
            Err(_) => match status.saturating_neg() {
                libc::ENOENT => Self::Absent,
                libc::EFAULT => Self::Unmapped,
                libc::EACCES => Self::Shared,
                libc::EBUSY => Self::InUse,
                libc::ENOMEM => Self::NoMemory,
                other => Self::Other(other),
            },
        }
    }
}

/// `MPOL_MF_MOVE`: only pages that no other process maps; `MPOL_MF_MOVE_ALL`: all (`linux/mempolicy.h`).
const MPOL_MF_MOVE: libc::c_int = 1 << 1;
const MPOL_MF_MOVE_ALL: libc::c_int = 1 << 2;

/// Buffers for calls about pages: a second call allocates nothing.
#[derive(Clone, Debug, Default)]
pub struct PageCall {
    nodes: Vec<i32>,
    raw: Vec<i32>,
    statuses: Vec<PageStatus>,
}

impl PageCall {
    /// The nodes of these pages of a process (any address within a page). Moves nothing.
    ///
    /// # Errors
    /// [`NumaError`]; more than [`PAGES_PER_CALL_MAX`] pages are [`NumaError::Invalid`].
    pub fn nodes_of(&mut self, process: i32, addresses: &[u64]) -> Result<&[PageStatus], NumaError> {
        self.call(process, addresses, None, 0)?;
        Ok(&self.statuses)
    }

    /// Moves these pages of a process to a node. Returns the number not moved, with the status of each page; the module
    /// header says which statuses are missing. `several_mappers`: also pages that other processes map.
    ///
    /// # Errors
    /// [`NumaError`]; more than [`PAGES_PER_CALL_MAX`] pages are [`NumaError::Invalid`].
    pub fn move_to(
        &mut self,
        process: i32,
        addresses: &[u64],
        node: u32,
        several_mappers: bool,
    ) -> Result<(u64, &[PageStatus]), NumaError> {
        let node = i32::try_from(node).map_err(|_| NumaError::NoNode)?;
        let flags = if several_mappers {
            MPOL_MF_MOVE_ALL
        } else {
            MPOL_MF_MOVE
        };
        let left = self.call(process, addresses, Some(node), flags)?;
        Ok((left, &self.statuses))
    }

    fn call(
        &mut self,
        process: i32,
        addresses: &[u64],
        to: Option<i32>,
        flags: libc::c_int,
    ) -> Result<u64, NumaError> {
        if process <= 0 {
            return Err(NumaError::NoProcess);
        }
        if addresses.len() > PAGES_PER_CALL_MAX {
            return Err(NumaError::Invalid);
        }
        self.statuses.clear();
        if addresses.is_empty() {
            return Ok(0);
        }
        self.raw.clear();
        self.raw.resize(addresses.len(), UNTRIED);
        self.nodes.clear();
        let nodes = match to {
            Some(node) => {
                self.nodes.resize(addresses.len(), node);
                self.nodes.as_ptr()
            }
            None => std::ptr::null(),
        };
        // SAFETY: the kernel reads `addresses.len()` pointers and, unless null, node numbers, and writes at most as
        // many statuses. All three arrays have that length and live across the call. The addresses belong to the other
        // process and are never followed here. A move changes neither address nor contents.
        let left = unsafe {
            libc::syscall(
                libc::SYS_move_pages,
                process,
                addresses.len(),
                addresses.as_ptr(),
                nodes,
                self.raw.as_mut_ptr(),
                flags,
            )
        };
        let left = match u64::try_from(left) {
            Ok(left) => left,
            Err(_) => match NumaError::last() {
                // Before Linux 4.17: none of the pages could be moved, as their statuses show.
                NumaError::Other(libc::ENOENT) => addresses.len() as u64,
                error => return Err(error),
            },
        };
        self.statuses
            .extend(self.raw.iter().map(|s| PageStatus::from_status(*s)));
        Ok(left)
    }
}

/// Reads one byte of each page of a process, like the process itself. Automatic NUMA balancing hides pages until an
/// access. Linux 6.1 to 6.5 then reports [`PageStatus::Absent`] and does not move them (`gup_can_follow_protnone` in
/// mm/gup.c). The read shows them again, perhaps on another node. Returns the number of readable pages.
///
/// # Errors
/// [`NumaError::NotPermitted`] without the right to trace the process, [`NumaError::NoProcess`] when it is gone.
pub fn touch(process: i32, addresses: &[u64]) -> Result<usize, NumaError> {
    const PAGES_PER_READ_MAX: usize = 1024;
    if process <= 0 {
        return Err(NumaError::NoProcess);
    }
    let mut read = 0;
    let mut bytes = [0u8; PAGES_PER_READ_MAX];
    for part in addresses.chunks(PAGES_PER_READ_MAX) {
        let mut left = part;
        while !left.is_empty() {
            let here = libc::iovec {
                iov_base: bytes.as_mut_ptr().cast(),
                iov_len: left.len(),
            };
            let there: Vec<libc::iovec> = left
                .iter()
                .map(|address| libc::iovec {
                    iov_base: *address as usize as *mut libc::c_void,
                    iov_len: 1,
                })
                .collect();
            // SAFETY: the kernel writes at most `iov_len` bytes to the unshared `bytes`; `there` is never followed
            // here.
            let done = unsafe {
                libc::process_vm_readv(
                    process,
                    &raw const here,
                    1,
                    there.as_ptr(),
                    there.len() as libc::c_ulong,
                    0,
                )
            };
            let done = match usize::try_from(done) {
                Ok(done) => done,
                Err(_) => match NumaError::last() {
                    NumaError::Other(libc::EFAULT) => 0,
                    NumaError::Interrupted => continue,
                    error => return Err(error),
                },
            };
            read += done;
            // The call ends at the first unreadable page, so continue behind it.
            left = left.get(done.max(1)..).unwrap_or_default();
            if done > 0 && !left.is_empty() {
                left = left.get(1..).unwrap_or_default();
            }
        }
    }
    Ok(read)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::{BASE_PAGE, ScratchMapping};
    use proptest::prelude::*;

    fn own() -> i32 {
        std::process::id() as i32
    }

    fn own_thread() -> i32 {
        rustix::thread::gettid().as_raw_nonzero().get()
    }

    #[test]
    fn masks_are_read_and_written_as_the_kernel_does() {
        for (hexadecimal, list) in [
            ("3", "0-1"),
            ("ffffffff,ffffffff", "0-63"),
            ("ff,00000003", "0-1,32-39"),
            ("00000001,00000000,00000000", "64"),
            ("00000000,00000000", ""),
        ] {
            let mask = CpuMask::from_hexadecimal(hexadecimal).unwrap();
            assert_eq!(mask.to_string(), list, "{hexadecimal}");
            assert_eq!(CpuMask::from_list(list), Some(mask));
        }
        for wrong in ["", "x", "1,", "123456789", "-1"] {
            assert_eq!(CpuMask::from_hexadecimal(wrong), None, "{wrong}");
        }
        assert_eq!(CpuMask::from_list("3-1"), None);
        assert!(CpuMask::of([CPUS_MAX, u32::MAX]).is_empty());
    }

    proptest! {
        #[test]
        fn sets_obey_the_laws_of_sets(a in proptest::collection::btree_set(0u32..300, 0..40),
                                      b in proptest::collection::btree_set(0u32..300, 0..40)) {
            let (x, y) = (CpuMask::of(a.iter().copied()), CpuMask::of(b.iter().copied()));
            prop_assert_eq!(x.iter().collect::<Vec<_>>(), a.iter().copied().collect::<Vec<_>>());
            prop_assert_eq!(x.and(&y), CpuMask::of(a.intersection(&b).copied()));
            prop_assert_eq!(x.or(&y), CpuMask::of(a.union(&b).copied()));
            prop_assert_eq!(x.without(&y), CpuMask::of(a.difference(&b).copied()));
            prop_assert_eq!(x.is_within(&y), a.is_subset(&b));
            prop_assert_eq!(x.count() as usize, a.len());
            prop_assert_eq!(CpuMask::from_list(&x.to_string()), Some(x.clone()));
            prop_assert!(a.iter().all(|cpu| x.contains(*cpu)));
        }

        #[test]
        fn no_text_makes_a_mask_panic(text in ".{0,60}") {
            let _ = CpuMask::from_hexadecimal(&text);
            let _ = CpuMask::from_list(&text);
        }
    }

    #[test]
    fn a_thread_is_restricted_and_set_free_again() {
        // A thread of its own: the others of the test process stay as they are.
        std::thread::spawn(|| {
            let thread = own_thread();
            let found = affinity(thread).unwrap();
            assert!(!found.is_empty());
            let one = CpuMask::of(found.iter().take(1));
            set_affinity(thread, &one).unwrap();
            assert_eq!(affinity(thread), Ok(one));
            // CPUs that do not exist are cut off; only such CPUs are refused.
            set_affinity(thread, &found.or(&CpuMask::of([CPUS_MAX - 1]))).unwrap();
            assert_eq!(affinity(thread), Ok(found));
            assert_eq!(
                set_affinity(thread, &CpuMask::of([CPUS_MAX - 1])),
                Err(NumaError::Invalid)
            );
            assert_eq!(set_affinity(thread, &CpuMask::default()), Err(NumaError::Invalid));
        })
        .join()
        .unwrap();
    }

    #[test]
    fn numbers_that_mean_nobody_or_ourselves_are_refused() {
        for thread in [0, -1, i32::MAX] {
            assert_eq!(affinity(thread), Err(NumaError::NoProcess), "{thread}");
            assert_eq!(
                set_affinity(thread, &CpuMask::of([0])),
                Err(NumaError::NoProcess),
                "{thread}"
            );
            assert_eq!(
                PageCall::default().nodes_of(thread, &[0]).map(<[_]>::len),
                Err(NumaError::NoProcess)
            );
        }
        let many = vec![0; PAGES_PER_CALL_MAX + 1];
        assert_eq!(
            PageCall::default().nodes_of(own(), &many).map(<[_]>::len),
            Err(NumaError::Invalid)
        );
    }

    #[test]
    fn pages_tell_their_node_and_stay_on_it() {
        let mut scratch = match ScratchMapping::new(1) {
            Ok(scratch) => scratch,
            Err(error) => panic!("{error}"),
        };
        let touched = 16;
        scratch.touch(touched * BASE_PAGE);
        let addresses: Vec<u64> = (0..touched + 4)
            .map(|i| scratch.address() + i * BASE_PAGE)
            .collect();
        let mut call = PageCall::default();
        let seen = match call.nodes_of(own(), &addresses) {
            Ok(seen) => seen.to_vec(),
            Err(NumaError::NotSupported) => {
                eprintln!("skipped: a kernel without page migration");
                return;
            }
            Err(error) => panic!("{error}"),
        };
        let PageStatus::On(node) = seen[0] else {
            panic!("{seen:?}");
        };
        assert!(
            seen[..touched as usize]
                .iter()
                .all(|s| matches!(s, PageStatus::On(_)))
        );
        if seen.iter().all(|s| matches!(s, PageStatus::On(_))) {
            eprintln!("skipped the rest: large pages are always given here");
            return;
        }
        assert_eq!(seen[touched as usize..], [PageStatus::Absent; 4]);
        // To the node where they are: nothing to do, and nothing goes wrong.
        let (left, statuses) = call.move_to(own(), &addresses[..8], node, false).unwrap();
        assert_eq!((left, statuses), (0, [PageStatus::On(node); 8].as_slice()));
        // An address that is not mapped, and a node that is not there.
        assert_eq!(call.nodes_of(own(), &[0]).unwrap(), [PageStatus::Unmapped]);
        assert_eq!(
            call.move_to(own(), &addresses[..1], NODES_MAX - 1, false)
                .map(|(left, _)| left),
            Err(NumaError::NoNode)
        );
        assert!(call.nodes_of(own(), &[]).unwrap().is_empty());
        // Reading passes over what can not be read, wherever it stands.
        let mixed = [0, addresses[0], 0, 0, addresses[1], addresses[2], 0];
        assert_eq!(touch(own(), &mixed), Ok(3));
        assert_eq!(touch(own(), &[]), Ok(0));
        assert_eq!(touch(0, &mixed), Err(NumaError::NoProcess));
    }
}
