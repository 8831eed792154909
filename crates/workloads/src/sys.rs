//! The system calls that the standard library and rustix have no safe form for. All `unsafe` of this crate is here.

#![expect(
    unsafe_code,
    reason = "memory mappings and advice to another process need raw system calls"
)]

use rustix::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::io;
use std::ptr::{self, NonNull};
use std::sync::atomic::AtomicU64;

/// A mapping of this process, unmapped on drop. Its content is only ever reached as atomic words, so that any
/// number of threads may read and write it.
#[derive(Debug)]
pub(crate) struct Mapping {
    base: NonNull<libc::c_void>,
    bytes: usize,
}

// SAFETY: the mapping belongs to this value alone (`base` is never given out but as `&[AtomicU64]` bound to the
// borrow of self), and atomic words may be shared between threads and moved to another.
unsafe impl Send for Mapping {}
// SAFETY: as above: every access through `&Mapping` is atomic.
unsafe impl Sync for Mapping {}

/// Where the pages of a mapping come from.
#[derive(Debug)]
pub(crate) enum Source {
    /// Private anonymous memory.
    Anonymous,
    /// Private anonymous memory, mostly never touched: not charged against the machine's commit limit.
    Reserved,
    /// Shared mapping of this file from its beginning.
    File(OwnedFd),
    /// A System V shared memory segment that is removed when the last process detaches.
    SystemV,
}

impl Mapping {
    /// Maps `bytes` of memory, readable and writable, at an address that is a multiple of `align` (a power of two
    /// and a multiple of the page size).
    pub(crate) fn new(bytes: usize, align: usize, source: &Source) -> io::Result<Self> {
        assert!(
            bytes > 0 && align.is_power_of_two(),
            "a mapping needs a size and an alignment"
        );
        let reserved = bytes
            .checked_add(align)
            .ok_or_else(|| io::Error::from(io::ErrorKind::OutOfMemory))?;
        // SAFETY: a new mapping at an address of the kernel's choice touches no memory of this process.
        let start = unsafe {
            libc::mmap(
                ptr::null_mut(),
                reserved,
                libc::PROT_NONE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let address = start as usize;
        let aligned = address.next_multiple_of(align);
        let head = aligned - address;
        let target = start.wrapping_byte_add(head);
        let mapped = match source {
            Source::Anonymous => map_over(target, bytes, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1),
            Source::Reserved => map_over(
                target,
                bytes,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
            ),
            Source::File(file) => map_over(target, bytes, libc::MAP_SHARED, file.as_raw_fd()),
            Source::SystemV => attach_over(target, bytes),
        };
        let tail = reserved - head - bytes;
        // SAFETY: head and tail are parts of the reservation made above that nothing else was mapped over; on
        // failure the rest of the reservation goes too, which is either untouched or replaced by a mapping that
        // nobody has seen.
        unsafe {
            if mapped.is_err() {
                libc::munmap(start, reserved);
            } else {
                if head > 0 {
                    libc::munmap(start, head);
                }
                if tail > 0 {
                    libc::munmap(target.wrapping_byte_add(bytes), tail);
                }
            }
        }
        let base = mapped?;
        Ok(Self { base, bytes })
    }

    /// All of it, as words of eight bytes.
    pub(crate) fn words(&self) -> &[AtomicU64] {
        // SAFETY: `base` is page aligned and the mapping is readable and writable for `bytes` until drop; any bit
        // pattern is a valid AtomicU64; the slice lives no longer than the borrow of self.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr().cast::<AtomicU64>(), self.bytes / 8) }
    }

    /// Gives the kernel advice about all of it: one of the `MADV_` constants that do not change the content.
    pub(crate) fn advise(&self, advice: PageSizeAdvice) -> io::Result<()> {
        let number = match advice {
            PageSizeAdvice::Large => libc::MADV_HUGEPAGE,
            PageSizeAdvice::Small => libc::MADV_NOHUGEPAGE,
        };
        // SAFETY: the range is this mapping, and both advices change only how it is backed, not what it holds.
        let status = unsafe { libc::madvise(self.base.as_ptr(), self.bytes, number) };
        if status == 0 {
            Ok(())
        } else {
            Err(io::Error::last_os_error())
        }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the range was mapped in `new` and belongs to self; no slice of it outlives self. munmap also
        // detaches a System V segment.
        unsafe {
            libc::munmap(self.base.as_ptr(), self.bytes);
        }
    }
}

/// A program's advice about the page size of its own memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PageSizeAdvice {
    /// `MADV_HUGEPAGE`.
    Large,
    /// `MADV_NOHUGEPAGE`.
    Small,
}

fn map_over(
    target: *mut libc::c_void,
    bytes: usize,
    flags: libc::c_int,
    file: libc::c_int,
) -> io::Result<NonNull<libc::c_void>> {
    // SAFETY: the caller owns the reservation [target, target + bytes), which MAP_FIXED replaces and which nothing
    // refers to.
    let address = unsafe {
        libc::mmap(
            target,
            bytes,
            libc::PROT_READ | libc::PROT_WRITE,
            flags | libc::MAP_FIXED,
            file,
            0,
        )
    };
    if address == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    NonNull::new(address).ok_or_else(|| io::Error::from(io::ErrorKind::InvalidData))
}

fn attach_over(target: *mut libc::c_void, bytes: usize) -> io::Result<NonNull<libc::c_void>> {
    // SAFETY: creates a segment; no memory of this process is involved.
    let id = unsafe { libc::shmget(libc::IPC_PRIVATE, bytes, libc::IPC_CREAT | 0o600) };
    if id < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: SHM_REMAP replaces the caller's reservation [target, target + bytes), which nothing refers to; target
    // is a multiple of SHMLBA (a page on the supported machines).
    let address = unsafe { libc::shmat(id, target, libc::SHM_REMAP) };
    let attached = if address as isize == -1 {
        Err(io::Error::last_os_error())
    } else {
        Ok(address)
    };
    // SAFETY: marks the segment for removal at the last detach, so that it cannot outlive the program; with
    // IPC_RMID the third argument is not read.
    unsafe {
        libc::shmctl(id, libc::IPC_RMID, ptr::null_mut());
    }
    NonNull::new(attached?).ok_or_else(|| io::Error::from(io::ErrorKind::InvalidData))
}

/// Advice that a process's memory can be given from outside (`process_madvise(2)`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Advice {
    /// `MADV_COLLAPSE` (Linux 6.1): map the range by large pages now.
    Collapse,
    /// `MADV_COLD` (Linux 5.4): on a part of a large page it splits the large page.
    Cold,
}

/// Gives one advice about one range of another process, `bytes` long at `address` there. Returns the bytes advised.
///
/// # Errors
/// What `process_madvise(2)` reports, as the operating system's error.
pub fn advise_process(process: BorrowedFd<'_>, address: u64, bytes: u64, advice: Advice) -> io::Result<u64> {
    let number: libc::c_int = match advice {
        // The number of MADV_COLLAPSE and MADV_COLD in linux/mman.h, the same on all supported machines.
        Advice::Collapse => 25,
        Advice::Cold => 20,
    };
    let range = libc::iovec {
        iov_base: address as *mut libc::c_void,
        iov_len: bytes as usize,
    };
    // SAFETY: the kernel reads one iovec from `range`, which lives through the call. The address it names lies in
    // the other process, and neither advice changes what is stored there.
    let advised = unsafe {
        libc::syscall(
            libc::SYS_process_madvise,
            process.as_raw_fd(),
            &raw const range,
            1usize,
            number,
            0u32,
        )
    };
    u64::try_from(advised).map_err(|_| io::Error::last_os_error())
}

/// CPU time of the children of this process that have ended and were waited for.
pub(crate) fn children_cpu() -> std::time::Duration {
    let mut usage = std::mem::MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: the kernel writes one rusage; all zeroes, its content when the call fails, is a valid rusage too.
    let usage = unsafe {
        libc::getrusage(libc::RUSAGE_CHILDREN, usage.as_mut_ptr());
        usage.assume_init()
    };
    let of = |time: libc::timeval| {
        std::time::Duration::from_secs(u64::try_from(time.tv_sec).unwrap_or(0))
            + std::time::Duration::from_micros(u64::try_from(time.tv_usec).unwrap_or(0))
    };
    of(usage.ru_utime) + of(usage.ru_stime)
}
