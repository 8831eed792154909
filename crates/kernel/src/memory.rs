//! Memory of other processes: process handles that survive pid reuse, advice, and the state of large-page-sized pieces.
//!
//! Measured on Linux 6.18 (x86-64, `enabled=madvise`), checked by `tests/large_pages.rs` and the tests below:
//! * `PAGEMAP_SCAN` reports `PAGE_IS_HUGE` only for pages mapped by a PMD: the exact fact for address translation.
//!   After `MADV_COLLAPSE` a piece is one region *present + huge*; after `MADV_COLD` on one page, one region *present*.
//! * `/proc/kpageflags` bit 22 (THP) describes the *folio*, not the mapping: it is also set for a large folio mapped by
//!   PTEs. `MADV_COLD` splits the folio, so our undo clears the bit. A piece whose mapping alone was split (for example
//!   by `mprotect` of a part) keeps it. The fallback therefore also requires 512 consecutive frames from an aligned
//!   first one, and may still call such a piece huge.
//! * Pages in swap and mappings of the shared zero page do not count as present: conversion would add memory for both.

use rustix::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Size in bytes of the base page that this module supports (x86-64, and arm64 with 4 KiB granule).
pub const BASE_PAGE: u64 = 4096;
/// Size in bytes of a piece: one PMD mapping with 4 KiB base pages.
pub const PIECE: u64 = 2 * 1024 * 1024;
/// Base pages in a piece.
pub const PAGES_PER_PIECE: u16 = (PIECE / BASE_PAGE) as u16;
/// Most ranges in one vectored call (`UIO_MAXIOV` of the kernel).
pub const RANGES_PER_CALL_MAX: usize = 1024;
/// Address space per call. The kernel holds the process's address space (`mmap_lock`) for the whole call, and its
/// `mmap` calls wait. Measured: 0.3 ms for 64 MiB of small pages, so a machine 15 times slower stays below 5 ms.
const SLICE: u64 = 64 * 1024 * 1024;
/// Most pieces in one query: 64 GiB, to keep a query bounded.
pub const PIECES_PER_QUERY_MAX: u64 = 32 * 1024;

/// Advice for another process's memory (`linux/mman.h`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Advice {
    /// `MADV_COLLAPSE` (Linux 6.1): map the range by large pages now.
    Collapse,
    /// `MADV_COLD` (Linux 5.4): deactivate the range; on a part of a large page it splits the large page.
    Cold,
}

impl Advice {
    const fn number(self) -> libc::c_int {
        match self {
            Self::Collapse => 25,
            Self::Cold => 20,
        }
    }
}

/// Reason why the kernel refused an advice (`process_madvise(2)`, `madvise(2)`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AdviseError {
    /// EAGAIN: a page could not be isolated or locked just now; try again.
    #[error("pages are in use just now (EAGAIN)")]
    Again,
    /// EINVAL: the range cannot take it (misaligned shared memory, refused by the owner, not supported).
    #[error("the range can not take it (EINVAL)")]
    Invalid,
    /// ENOMEM: no large page could be allocated, or a part of the range is not mapped.
    #[error("no large page free, or the range is not mapped (ENOMEM)")]
    NoMemory,
    /// EBUSY: the memory control group of the process has no room for a large page.
    #[error("the memory control group is full (EBUSY)")]
    Busy,
    /// ESRCH: the process ended.
    #[error("the process ended (ESRCH)")]
    NoProcess,
    /// EPERM or EACCES: `CAP_SYS_NICE` and the right to trace the process are needed.
    #[error("not permitted (EPERM)")]
    NotPermitted,
    /// ENOSYS: the kernel has no `process_madvise`.
    #[error("the kernel has no process_madvise (ENOSYS)")]
    NotSupported,
    /// EINTR: a signal came first; nothing was done.
    #[error("interrupted (EINTR)")]
    Interrupted,
    /// Another error number.
    #[error("error number {0}")]
    Other(i32),
}

impl AdviseError {
    fn from_errno(errno: i32) -> Self {
        match errno {
            libc::EAGAIN => Self::Again,
            libc::EINVAL => Self::Invalid,
            libc::ENOMEM => Self::NoMemory,
            libc::EBUSY => Self::Busy,
            libc::ESRCH => Self::NoProcess,
            libc::EPERM | libc::EACCES => Self::NotPermitted,
            libc::ENOSYS => Self::NotSupported,
            libc::EINTR => Self::Interrupted,
            other => Self::Other(other),
        }
    }
}

/// A range of addresses in another process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AddressRange {
    /// First byte; a multiple of the base page.
    pub start: u64,
    /// Length in bytes.
    pub length: u64,
}

/// Opens a handle that never refers to a later process with this number. Check the start time afterwards.
///
/// # Errors
/// ESRCH when there is no such process, ENOSYS before Linux 5.3.
pub fn pidfd_open(pid: i32) -> io::Result<OwnedFd> {
    // `from_raw` asserts that the number is not negative.
    let pid = rustix::process::Pid::from_raw(pid.max(0))
        .ok_or_else(|| io::Error::from_raw_os_error(libc::ESRCH))?;
    Ok(rustix::process::pidfd_open(
        pid,
        rustix::process::PidfdFlags::empty(),
    )?)
}

/// Gives one range of another process an advice.
///
/// # Errors
/// See [`AdviseError`].
pub fn process_madvise(
    process: BorrowedFd<'_>,
    start: u64,
    length: u64,
    advice: Advice,
) -> Result<(), AdviseError> {
    process_madvise_vectored(process, &[AddressRange { start, length }], advice).map(|_| ())
}

/// Gives up to [`RANGES_PER_CALL_MAX`] ranges of another process an advice, in order, in one system call. Returns the
/// bytes advised. Fewer than requested: the range at which they end was refused (advise it alone for the reason).
///
/// # Errors
/// See [`AdviseError`]; then the first range was refused. Too many ranges are [`AdviseError::Invalid`].
pub fn process_madvise_vectored(
    process: BorrowedFd<'_>,
    ranges: &[AddressRange],
    advice: Advice,
) -> Result<u64, AdviseError> {
    if ranges.len() > RANGES_PER_CALL_MAX {
        return Err(AdviseError::Invalid);
    }
    let vector: Vec<libc::iovec> = ranges
        .iter()
        .map(|r| libc::iovec {
            iov_base: r.start as usize as *mut libc::c_void,
            iov_len: r.length as usize,
        })
        .collect();
    // SAFETY: process_madvise(2) reads the live `vector` of the passed length, and never follows its addresses in this
    // process. Neither advice changes contents of memory, so even a handle on ourselves keeps Rust's view valid.
    let done = unsafe {
        libc::syscall(
            libc::SYS_process_madvise,
            process.as_raw_fd(),
            vector.as_ptr(),
            vector.len(),
            advice.number(),
            0,
        )
    };
    u64::try_from(done)
        .map_err(|_| AdviseError::from_errno(io::Error::last_os_error().raw_os_error().unwrap_or(0)))
}

/// State of one aligned piece of the large-page size in the page tables of one process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PieceState {
    /// Mapped by one large page.
    Huge,
    /// All base pages present: conversion adds no memory.
    Full,
    /// Some base pages absent (never touched, zero page, or in swap): conversion would add memory for them.
    Sparse {
        /// Pages present; fewer than [`PAGES_PER_PIECE`].
        present: u16,
        /// Pages mapped to the shared zero page (Linux 6.12 and later do so when they split a large page, and free
        /// them). Always 0 in the fallback without `PAGEMAP_SCAN`.
        zero: u16,
    },
    /// Mapped, but no base page present, not even the zero page.
    Empty,
    /// Not mapped, or only in part.
    Unmapped,
}

// UAPI of PAGEMAP_SCAN: include/uapi/linux/fs.h, Linux 6.7; Documentation/admin-guide/mm/pagemap.rst.
const PAGE_IS_PRESENT: u64 = 1 << 3;
const PAGE_IS_PFNZERO: u64 = 1 << 5;
const PAGE_IS_HUGE: u64 = 1 << 6;
/// `_IOWR('f', 16, struct pm_scan_arg)`.
const PAGEMAP_SCAN: u64 = 0xC060_6610;
const _: () = assert!(size_of::<ScanArgument>() == 0x60 && size_of::<ScanRegion>() == 24);

/// `struct page_region`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct ScanRegion {
    start: u64,
    end: u64,
    categories: u64,
}

/// `struct pm_scan_arg`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct ScanArgument {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    vec: u64,
    vec_len: u64,
    max_pages: u64,
    category_inverted: u64,
    category_mask: u64,
    category_anyof_mask: u64,
    return_mask: u64,
}

/// Regions fetched by one scan call: 24 KiB of buffer. A fully populated GiB is one region.
const REGIONS_PER_CALL: usize = 1024;

/// The page tables of one process, by `/proc/PID/pagemap`. Keeps its buffers: a second query allocates nothing.
#[derive(Debug)]
pub struct Pagemap {
    file: File,
    path: PathBuf,
    scan_works: bool,
    regions: Vec<ScanRegion>,
    entries: Vec<u8>,
    flags: Option<File>,
    proc: PathBuf,
    longest_call: Duration,
    /// Most address space of one call (bytes).
    largest_call: u64,
}

impl Pagemap {
    /// Opens the page tables of a process below a `/proc` directory. The file stays with the process of that moment.
    ///
    /// # Errors
    /// ENOENT or ESRCH when the process is gone, EACCES without the right to trace it, ENOTSUP for other page sizes.
    pub fn open(proc: &Path, pid: i32) -> io::Result<Self> {
        if rustix::param::page_size() as u64 != BASE_PAGE {
            return Err(io::Error::from_raw_os_error(libc::ENOTSUP));
        }
        let path = proc.join(pid.to_string()).join("pagemap");
        Ok(Self {
            file: File::open(&path)?,
            path,
            scan_works: true,
            regions: Vec::new(),
            entries: Vec::new(),
            flags: None,
            proc: proc.to_owned(),
            longest_call: Duration::ZERO,
            largest_call: 0,
        })
    }

    /// Never use `PAGEMAP_SCAN`, as on kernels before 6.7.
    #[must_use]
    pub fn without_scan(mut self) -> Self {
        self.scan_works = false;
        self
    }

    /// Whether states come from `PAGEMAP_SCAN` (exact) and not from the fallback. Valid after the first query.
    pub fn is_exact(&self) -> bool {
        self.scan_works
    }

    /// Duration of the longest system call: the longest time for which the address space was held.
    pub fn longest_call(&self) -> Duration {
        self.longest_call
    }

    /// The file that is read, for messages.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// States of `count` consecutive pieces from `start` (a multiple of [`PIECE`]); replaces the contents of `states`.
    /// All pieces are [`PieceState::Unmapped`] when the process has ended.
    ///
    /// # Errors
    /// EINVAL for an unaligned start or more than [`PIECES_PER_QUERY_MAX`] pieces; otherwise the kernel's error.
    pub fn piece_states(&mut self, start: u64, count: u64, states: &mut Vec<PieceState>) -> io::Result<()> {
        let end = count
            .checked_mul(PIECE)
            .and_then(|length| start.checked_add(length));
        let (Some(end), true) = (end, start % PIECE == 0 && count <= PIECES_PER_QUERY_MAX) else {
            return Err(io::Error::from_raw_os_error(libc::EINVAL));
        };
        states.clear();
        if self.scan_works {
            match self.scan(start, end, states) {
                Ok(()) => return Ok(()),
                Err(e) if matches!(e.raw_os_error(), Some(libc::ENOTTY | libc::ENOSYS)) => {
                    self.scan_works = false;
                    states.clear();
                }
                Err(e) => return Err(e),
            }
        }
        for index in 0..count {
            let state = self.read_piece(start + index * PIECE)?;
            states.push(state);
        }
        Ok(())
    }

    fn scan(&mut self, start: u64, end: u64, states: &mut Vec<PieceState>) -> io::Result<()> {
        self.regions.resize(REGIONS_PER_CALL, ScanRegion::default());
        let mut tally = Tally::default();
        let mut from = start;
        let mut piece = start;
        let mut counted = start;
        // Each call ends or advances by at least one page per region: the bound only guards against a faulty kernel.
        while from < end {
            let slice_end = end.min(from.saturating_add(SLICE));
            let mut argument = ScanArgument {
                size: size_of::<ScanArgument>() as u64,
                start: from,
                end: slice_end,
                vec: self.regions.as_mut_ptr() as u64,
                vec_len: self.regions.len() as u64,
                return_mask: PAGE_IS_PRESENT | PAGE_IS_PFNZERO | PAGE_IS_HUGE,
                ..ScanArgument::default()
            };
            let begun = Instant::now();
            // SAFETY: the request number encodes the size of the live, writable `argument` (asserted above). Its `vec`
            // points to `vec_len` writable, unshared `struct page_region`. Without flags the call only reads.
            let filled = unsafe {
                libc::ioctl(
                    self.file.as_raw_fd(),
                    PAGEMAP_SCAN as libc::Ioctl,
                    &raw mut argument,
                )
            };
            self.longest_call = self.longest_call.max(begun.elapsed());
            self.largest_call = self.largest_call.max(slice_end - from);
            let filled = usize::try_from(filled).map_err(|_| io::Error::last_os_error());
            let filled = match filled {
                Ok(n) => n.min(self.regions.len()),
                Err(e) if e.raw_os_error() == Some(libc::ESRCH) => 0,
                Err(e) if e.raw_os_error() == Some(libc::EINTR) => continue,
                Err(e) => return Err(e),
            };
            for region in self.regions.iter().take(filled) {
                let mut at = region.start.max(from);
                let stop = region.end.min(slice_end);
                while at < stop {
                    while piece + PIECE <= at {
                        states.push(tally.take());
                        piece += PIECE;
                    }
                    let until = stop.min(piece + PIECE);
                    tally.add((until - at) / BASE_PAGE, region.categories);
                    at = until;
                }
                counted = counted.max(stop);
            }
            // Linux 6.18 sometimes returns a walk_end before the end of the last region: never count pages again.
            let walked = if filled == 0 {
                slice_end
            } else {
                argument.walk_end.max(counted)
            };
            if walked <= from {
                return Err(io::Error::other("PAGEMAP_SCAN did not advance"));
            }
            from = walked;
        }
        while piece < end {
            states.push(tally.take());
            piece += PIECE;
        }
        Ok(())
    }

    /// Reads the pagemap entries of one piece into the buffer; `false` when there are none.
    fn read_entries(&mut self, piece: u64) -> io::Result<bool> {
        self.entries.resize(usize::from(PAGES_PER_PIECE) * 8, 0);
        let begun = Instant::now();
        let read = self.file.read_exact_at(&mut self.entries, piece / BASE_PAGE * 8);
        self.longest_call = self.longest_call.max(begun.elapsed());
        match read {
            Ok(()) => Ok(true),
            Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => Ok(false),
            Err(e) if e.raw_os_error() == Some(libc::ESRCH) => Ok(false),
            Err(e) => Err(e),
        }
    }

    /// Present base pages of the piece that only this process maps (pagemap bits 63 = present, 56 = exclusively mapped,
    /// Linux 4.2), and shared ones. Conversion copies anonymous pages shared with a fork, so each adds memory.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn sharing(&mut self, piece: u64) -> io::Result<Sharing> {
        let mut sharing = Sharing::default();
        if self.read_entries(piece)? {
            for entry in entries(&self.entries).filter(|e| e >> 63 == 1) {
                if entry >> 56 & 1 == 1 {
                    sharing.exclusive += 1;
                } else {
                    sharing.shared += 1;
                }
                if entry >> 61 & 1 == 1 {
                    sharing.file += 1;
                }
            }
        }
        Ok(sharing)
    }

    /// The page frames of the base pages of a piece, `None` for one not in memory; replaces the contents of `frames`.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn frames(&mut self, piece: u64, frames: &mut Vec<Option<PageFrame>>) -> io::Result<()> {
        frames.clear();
        if self.read_entries(piece)? {
            frames.extend(entries(&self.entries).map(|entry| {
                (entry >> 63 == 1).then_some(PageFrame {
                    number: entry & ((1 << 55) - 1),
                    is_ordinary: entry >> 56 & 1 == 1 || entry >> 61 & 1 == 1,
                })
            }));
        }
        frames.resize(PAGES_PER_PIECE.into(), None);
        Ok(())
    }

    /// The fallback: pagemap entries and `/proc/kpageflags`. A piece that is not mapped is reported as empty.
    fn read_piece(&mut self, piece: u64) -> io::Result<PieceState> {
        if !self.read_entries(piece)? {
            return Ok(PieceState::Unmapped);
        }
        let mut present: u16 = 0;
        let mut consecutive = true;
        let mut first = None;
        for (index, entry) in entries(&self.entries).enumerate() {
            if entry >> 63 == 1 {
                present += 1;
                let frame = entry & ((1 << 55) - 1);
                let expected = *first.get_or_insert(frame) + index as u64;
                consecutive &= frame == expected;
            }
        }
        Ok(match present {
            0 => PieceState::Empty,
            PAGES_PER_PIECE => {
                let frame = first.unwrap_or(0);
                // Without CAP_SYS_ADMIN frame numbers read as zero: large pages would pass for small or undone ones.
                if frame == 0 {
                    return Err(io::Error::from_raw_os_error(libc::EPERM));
                }
                if consecutive && frame % u64::from(PAGES_PER_PIECE) == 0 && self.is_thp(frame)? {
                    PieceState::Huge
                } else {
                    PieceState::Full
                }
            }
            present => PieceState::Sparse { present, zero: 0 },
        })
    }

    fn is_thp(&mut self, frame: u64) -> io::Result<bool> {
        let flags = match &mut self.flags {
            Some(open) => open,
            none => none.insert(File::open(self.proc.join("kpageflags"))?),
        };
        let mut word = [0; 8];
        flags.read_exact_at(&mut word, frame * 8)?;
        let word = u64::from_ne_bytes(word);
        // Bit 24 is the zero page, here the huge one: it belongs to no process, and cannot be split.
        Ok(word >> 22 & 1 == 1 && word >> 24 & 1 == 0)
    }
}

/// The frame in which a page lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageFrame {
    /// Its number; 0 when the kernel does not show it (no `CAP_SYS_ADMIN`).
    pub number: u64,
    /// Certainly a page of its own: part of a file or shared memory, or mapped by no other process (not the zero page).
    pub is_ordinary: bool,
}

/// Mappers of the base pages of a piece.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sharing {
    /// Present pages that only this process maps.
    pub exclusive: u16,
    /// Present pages that other processes map, too.
    pub shared: u16,
    /// Present pages that belong to a file or to shared memory (pagemap bit 61).
    pub file: u16,
}

fn entries(bytes: &[u8]) -> impl Iterator<Item = u64> + '_ {
    bytes
        .chunks_exact(8)
        .filter_map(|word| word.first_chunk())
        .map(|word| u64::from_ne_bytes(*word))
}

#[derive(Default)]
struct Tally {
    mapped: u64,
    present: u64,
    zero: u64,
    huge: u64,
}

impl Tally {
    fn add(&mut self, pages: u64, categories: u64) {
        self.mapped += pages;
        // The huge zero page (recognisable since Linux 6.16) belongs to no process, and cannot be split.
        if categories & (PAGE_IS_HUGE | PAGE_IS_PFNZERO) == PAGE_IS_HUGE {
            self.huge += pages;
        }
        // The shared zero page occupies nothing: like a hole, its conversion adds memory.
        if categories & (PAGE_IS_PRESENT | PAGE_IS_PFNZERO) == PAGE_IS_PRESENT {
            self.present += pages;
        }
        if categories & PAGE_IS_PFNZERO != 0 {
            self.zero += pages;
        }
    }
    fn take(&mut self) -> PieceState {
        let all = u64::from(PAGES_PER_PIECE);
        let seen = std::mem::take(self);
        if seen.mapped < all {
            PieceState::Unmapped
        } else if seen.huge == all {
            PieceState::Huge
        } else if seen.present == all {
            PieceState::Full
        } else if seen.present + seen.zero == 0 {
            PieceState::Empty
        } else {
            PieceState::Sparse {
                present: seen.present as u16,
                zero: seen.zero as u16,
            }
        }
    }
}

/// A private anonymous mapping of our own, aligned to the piece, to probe the kernel; unmapped when dropped.
#[derive(Debug)]
pub struct ScratchMapping {
    mapping: *mut libc::c_void,
    mapped: usize,
    address: u64,
    pieces: u64,
}

impl ScratchMapping {
    /// Maps this many pieces, untouched.
    ///
    /// # Errors
    /// ENOMEM when there is no room; EINVAL for 0 or more than 512 pieces.
    pub fn new(pieces: u64) -> io::Result<Self> {
        if pieces == 0 || pieces > 512 {
            return Err(io::Error::from_raw_os_error(libc::EINVAL));
        }
        // One more piece, so that an aligned start is certainly inside.
        let mapped = ((pieces + 1) * PIECE) as usize;
        // SAFETY: a fresh anonymous mapping at an address of the kernel's choice touches no existing object.
        let mapping = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                mapped,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        if mapping == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        // The daemon locks its memory (mlockall with MCL_FUTURE). The kernel refuses MADV_COLD for locked memory
        // (EINVAL).
        // SAFETY: changes a flag of the mapping just made; its contents and extent stay.
        let unlocked = unsafe { libc::munlock(mapping, mapped) };
        if unlocked != 0 {
            let error = io::Error::last_os_error();
            // SAFETY: the mapping just made, without other users.
            unsafe { libc::munmap(mapping, mapped) };
            return Err(error);
        }
        Ok(Self {
            mapping,
            mapped,
            address: (mapping as u64).next_multiple_of(PIECE),
            pieces,
        })
    }

    /// First address, a multiple of [`PIECE`].
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Usable length in bytes.
    pub fn length(&self) -> u64 {
        self.pieces * PIECE
    }

    /// Writes one byte to every base page of the first `length` bytes (at most [`ScratchMapping::length`]).
    pub fn touch(&mut self, length: u64) {
        for offset in (0..length.min(self.length())).step_by(BASE_PAGE as usize) {
            // SAFETY: the address lies inside this value's writable mapping, mapped until drop, without references.
            unsafe {
                std::ptr::with_exposed_provenance_mut::<u8>((self.address + offset) as usize)
                    .write_volatile(1)
            };
        }
    }
}

impl Drop for ScratchMapping {
    fn drop(&mut self) {
        // SAFETY: exactly the mapping made in `new`, without other users.
        unsafe { libc::munmap(self.mapping, self.mapped) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fd::AsFd;

    fn own() -> (OwnedFd, Pagemap) {
        let pid = std::process::id() as i32;
        (
            pidfd_open(pid).unwrap(),
            Pagemap::open(Path::new("/proc"), pid).unwrap(),
        )
    }

    fn states(pagemap: &mut Pagemap, scratch: &ScratchMapping) -> Vec<PieceState> {
        let mut states = Vec::new();
        pagemap
            .piece_states(scratch.address(), scratch.length() / PIECE, &mut states)
            .unwrap();
        states
    }

    /// Prints why and returns true when this kernel or user can not run the check.
    fn cannot(outcome: Result<(), AdviseError>) -> bool {
        match outcome {
            Err(e @ (AdviseError::NotSupported | AdviseError::NotPermitted | AdviseError::NoMemory)) => {
                eprintln!("skipped: {e}");
                true
            }
            other => {
                other.unwrap();
                false
            }
        }
    }

    #[test]
    fn states_follow_touch_collapse_and_cold() {
        use PieceState::{Empty, Full, Huge, Sparse};
        let (process, mut pagemap) = own();
        let mut scratch = ScratchMapping::new(4).unwrap();
        assert_eq!(states(&mut pagemap, &scratch), [Empty; 4]);
        scratch.touch(2 * PIECE + 3 * BASE_PAGE);
        if states(&mut pagemap, &scratch)[0] == Huge {
            eprintln!("skipped: large pages are always given here");
            return;
        }
        assert_eq!(
            states(&mut pagemap, &scratch),
            [Full, Full, Sparse { present: 3, zero: 0 }, Empty]
        );
        if cannot(process_madvise(
            process.as_fd(),
            scratch.address(),
            PIECE,
            Advice::Collapse,
        )) {
            return;
        }
        assert_eq!(
            states(&mut pagemap, &scratch),
            [Huge, Full, Sparse { present: 3, zero: 0 }, Empty]
        );
        assert!(pagemap.is_exact() || !Path::new("/proc/kpageflags").exists());
        let last = scratch.address() + PIECE - BASE_PAGE;
        process_madvise(process.as_fd(), last, BASE_PAGE, Advice::Cold).unwrap();
        assert_eq!(
            states(&mut pagemap, &scratch),
            [Full, Full, Sparse { present: 3, zero: 0 }, Empty]
        );
    }

    #[test]
    fn the_fallback_agrees_with_the_scan() {
        let (process, mut exact) = own();
        let mut fallback = Pagemap::open(Path::new("/proc"), std::process::id() as i32)
            .unwrap()
            .without_scan();
        let mut scratch = ScratchMapping::new(4).unwrap();
        scratch.touch(2 * PIECE + 3 * BASE_PAGE);
        if cannot(process_madvise(
            process.as_fd(),
            scratch.address(),
            PIECE,
            Advice::Collapse,
        )) {
            return;
        }
        if !rustix::process::geteuid().is_root() {
            eprintln!("skipped: frame numbers are for root only");
            return;
        }
        assert_eq!(states(&mut fallback, &scratch), states(&mut exact, &scratch));
        process_madvise(process.as_fd(), scratch.address(), BASE_PAGE, Advice::Cold).unwrap();
        assert_eq!(states(&mut fallback, &scratch), states(&mut exact, &scratch));
        assert!(!fallback.is_exact());
    }

    #[test]
    fn one_call_holds_the_address_space_for_at_most_a_slice() {
        let (_, mut pagemap) = own();
        let scratch = ScratchMapping::new(4 * SLICE / PIECE).unwrap();
        assert_eq!(states(&mut pagemap, &scratch).len() as u64, 4 * SLICE / PIECE);
        if pagemap.is_exact() {
            assert_eq!(pagemap.largest_call, 64 << 20);
        }
    }

    #[test]
    fn holes_between_mappings_are_unmapped() {
        let (_, mut pagemap) = own();
        let scratch = ScratchMapping::new(2).unwrap();
        // The first page of the address space is never mapped (vm.mmap_min_addr).
        let mut states = Vec::new();
        pagemap.piece_states(0, 1, &mut states).unwrap();
        assert_eq!(states, [PieceState::Unmapped]);
        pagemap.piece_states(scratch.address(), 2, &mut states).unwrap();
        assert_eq!(states, [PieceState::Empty; 2]);
    }

    #[test]
    fn many_regions_take_many_calls() {
        let (_, mut pagemap) = own();
        let scratch = ScratchMapping::new(8).unwrap();
        // Every other page: 2,048 regions of present pages, more than one call returns.
        for offset in (0..scratch.length()).step_by(2 * BASE_PAGE as usize) {
            // SAFETY: inside the mapping owned by `scratch`, which outlives the loop.
            unsafe {
                std::ptr::with_exposed_provenance_mut::<u8>((scratch.address() + offset) as usize)
                    .write_volatile(1);
            };
        }
        let expected = PieceState::Sparse {
            present: PAGES_PER_PIECE / 2,
            zero: 0,
        };
        if states(&mut pagemap, &scratch)[0] == PieceState::Huge {
            eprintln!("skipped: large pages are always given here");
            return;
        }
        assert_eq!(states(&mut pagemap, &scratch), [expected; 8]);
    }

    #[test]
    fn wrong_questions_are_errors() {
        let (process, mut pagemap) = own();
        let mut states = Vec::new();
        assert!(pagemap.piece_states(BASE_PAGE, 1, &mut states).is_err());
        assert!(
            pagemap
                .piece_states(0, PIECES_PER_QUERY_MAX + 1, &mut states)
                .is_err()
        );
        assert!(
            pagemap
                .piece_states(u64::MAX - PIECE + 1, 2, &mut states)
                .is_err()
        );
        let many = vec![AddressRange { start: 0, length: 0 }; RANGES_PER_CALL_MAX + 1];
        assert_eq!(
            process_madvise_vectored(process.as_fd(), &many, Advice::Cold),
            Err(AdviseError::Invalid)
        );
        assert!(pidfd_open(0).is_err());
        assert!(pidfd_open(-5).is_err());
        assert!(ScratchMapping::new(0).is_err());
    }
}
