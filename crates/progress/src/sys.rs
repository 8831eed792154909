//! The shared mapping of the file: the one place of this crate with `unsafe`.
#![expect(
    unsafe_code,
    reason = "a shared mapping has no safe wrapper in the standard library"
)]

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::ptr::NonNull;
use std::sync::atomic::AtomicU64;

/// A shared, writable mapping of a whole file.
#[derive(Debug)]
pub(crate) struct Mapping {
    start: NonNull<u8>,
    length: usize,
}

// SAFETY: the mapping is plain memory that stays valid until drop; it is only touched through atomics.
unsafe impl Send for Mapping {}
// SAFETY: as above; shared access goes through `&AtomicU64` alone.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Gives the file that length, with its blocks reserved, and maps it.
    ///
    /// The blocks are reserved first: on a full file system a store into a hole would end the program with
    /// SIGBUS, while this fails with an error.
    pub(crate) fn new(file: &File, length: usize) -> io::Result<Self> {
        let size = libc::off_t::try_from(length).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
        // SAFETY: takes a valid descriptor and numbers; touches no memory of ours.
        let error = unsafe { libc::posix_fallocate(file.as_raw_fd(), 0, size) };
        if error != 0 {
            return Err(io::Error::from_raw_os_error(error));
        }
        // SAFETY: a new mapping at an address of the kernel's choice; no existing memory is replaced.
        let start = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                length,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                file.as_raw_fd(),
                0,
            )
        };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        match NonNull::new(start.cast::<u8>()) {
            Some(start) => Ok(Self { start, length }),
            None => Err(io::Error::other("the kernel mapped address zero")),
        }
    }

    /// The aligned `u64` at that byte offset; `None` outside the mapping or unaligned.
    pub(crate) fn counter(&self, offset: usize) -> Option<&AtomicU64> {
        if offset % 8 != 0 || offset.checked_add(8)? > self.length {
            return None;
        }
        // SAFETY: inside the mapping (checked above) and aligned, since mappings start at a page; every access
        // to these bytes in this process is atomic, and the reference does not outlive `self`.
        Some(unsafe { AtomicU64::from_ptr(self.start.as_ptr().add(offset).cast::<u64>()) })
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: exactly the mapping made in `new`; no reference into it outlives `self`.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.length) };
    }
}

/// The effective user id of this process.
pub(crate) fn effective_uid() -> u32 {
    // SAFETY: takes nothing and cannot fail.
    unsafe { libc::geteuid() }
}
