//! The kernel's ring of records of a perf event (perf_event_open(2), "MMAP layout"). Records beyond its size are lost.

use rustix::io::Errno;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

/// Places of `data_head` and `data_tail` in `struct perf_event_mmap_page`.
const HEAD_AT: usize = 1024;
const TAIL_AT: usize = 1032;

pub(super) struct Ring {
    _event: OwnedFd,
    /// Start of the mapping: one page of state, then the records.
    base: NonNull<u8>,
    length: usize,
    page: usize,
}

impl Drop for Ring {
    fn drop(&mut self) {
        // SAFETY: exactly the range that `map` mapped; no reference into it outlives a call of `read`.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.length) };
    }
}

impl Ring {
    /// Maps a ring of this many bytes, a power of two, over an event.
    ///
    /// # Errors
    /// The error of mmap(2), most often the limit of locked memory.
    pub(super) fn map(event: OwnedFd, bytes: usize) -> Result<Self, Errno> {
        let page = rustix::param::page_size();
        let length = page + bytes.next_multiple_of(page);
        // SAFETY: maps fresh address space of the kernel's choice over our own descriptor.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                length,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                event.as_raw_fd(),
                0,
            )
        };
        if base == libc::MAP_FAILED {
            let error = Errno::from_io_error(&io::Error::last_os_error());
            return Err(error.unwrap_or(Errno::INVAL));
        }
        let base = NonNull::new(base.cast()).ok_or(Errno::FAULT)?;
        Ok(Self {
            _event: event,
            base,
            length,
            page,
        })
    }

    fn word(&self, at: usize) -> &AtomicU64 {
        // SAFETY: `at` is one of the two aligned constants above, in the mapped first page; both sides use atomics.
        unsafe { &*self.base.as_ptr().add(at).cast::<AtomicU64>() }
    }

    /// Takes the records since the last call.
    pub(super) fn read(&mut self) -> Vec<u8> {
        // Acquire: the records before the head are written before it.
        let head = self.word(HEAD_AT).load(Ordering::Acquire);
        let tail = self.word(TAIL_AT).load(Ordering::Relaxed);
        let size = (self.length - self.page) as u64;
        let used = head.wrapping_sub(tail).min(size);
        let mut records = vec![0u8; used as usize];
        let start = (tail % size) as usize;
        let first = records.len().min(size as usize - start);
        // SAFETY: both pieces lie in the data part of the mapping (`start + first <= size`, and the rest begins at its
        // start and is shorter than `size`); the kernel does not write between tail and head.
        unsafe {
            let data = self.base.as_ptr().add(self.page);
            std::ptr::copy_nonoverlapping(data.add(start), records.as_mut_ptr(), first);
            std::ptr::copy_nonoverlapping(data, records.as_mut_ptr().add(first), records.len() - first);
        }
        // Release: the records are copied.
        self.word(TAIL_AT).store(head, Ordering::Release);
        records
    }
}

/// One record: `struct perf_event_header` (type, misc, size), then the rest.
pub(super) struct Record<'a> {
    pub(super) kind: u32,
    pub(super) misc: u16,
    bytes: &'a [u8],
}

impl Record<'_> {
    /// The number at an offset from the start of the header.
    pub(super) fn u32(&self, at: usize) -> Option<u32> {
        Some(u32::from_ne_bytes(*self.bytes.get(at..)?.first_chunk()?))
    }

    /// The number at an offset from the start of the header.
    pub(super) fn u64(&self, at: usize) -> Option<u64> {
        Some(u64::from_ne_bytes(*self.bytes.get(at..)?.first_chunk()?))
    }

    /// Bytes at an offset from the start of the header.
    pub(super) fn bytes(&self, range: std::ops::Range<usize>) -> Option<&[u8]> {
        self.bytes.get(range)
    }
}

/// The records of a piece of the ring, up to the first that is cut or has no length.
pub(super) fn records(mut left: &[u8]) -> impl Iterator<Item = Record<'_>> {
    std::iter::from_fn(move || {
        let [k0, k1, k2, k3, m0, m1, l0, l1] = *left.first_chunk::<8>()?;
        let (bytes, behind) = left.split_at_checked(u16::from_ne_bytes([l0, l1]).into())?;
        left = behind;
        (bytes.len() >= 8).then_some(Record {
            kind: u32::from_ne_bytes([k0, k1, k2, k3]),
            misc: u16::from_ne_bytes([m0, m1]),
            bytes,
        })
    })
}
