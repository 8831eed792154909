//! Which pages of a file are in memory.

use rustix::fd::{AsFd, AsRawFd};
use std::io;

/// Longest range of one question, in bytes: an answer of 256 KiB, and some ten milliseconds.
pub const RANGE_MAX: u64 = 1 << 30;

/// Of each page of a part of a file whether it is in memory (`mincore(2)` of a mapping that nobody touches). `from` and
/// `length` are rounded to whole pages outwards; of a range that is longer than [`RANGE_MAX`] the beginning is told.
///
/// For files that the caller may neither own nor write the kernel says that all pages are there (since Linux 5.2).
///
/// # Errors
/// As `mmap(2)`, for example for a file that cannot be mapped or is not open for reading.
pub fn residency(file: impl AsFd, from: u64, length: u64) -> io::Result<Vec<bool>> {
    let page = rustix::param::page_size() as u64;
    let start = from / page * page;
    let end = from.saturating_add(length).min(start.saturating_add(RANGE_MAX));
    let bytes = end.saturating_sub(start).div_ceil(page) * page;
    if bytes == 0 {
        return Ok(Vec::new());
    }
    let too_large = || io::Error::from(io::ErrorKind::InvalidInput);
    let size = usize::try_from(bytes).map_err(|_| too_large())?;
    let offset = libc::off_t::try_from(start).map_err(|_| too_large())?;
    let mut answer = vec![0u8; size / page as usize];
    // SAFETY: a new mapping at an address that the kernel chooses, without access rights: no memory of ours is touched, and
    // nothing is ever read through it.
    let address = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            size,
            libc::PROT_NONE,
            libc::MAP_SHARED,
            file.as_fd().as_raw_fd(),
            offset,
        )
    };
    if address == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the range is the mapping just made, and `answer` has one byte for each of its pages.
    let asked = unsafe { libc::mincore(address, size, answer.as_mut_ptr()) };
    let failed = (asked != 0).then(io::Error::last_os_error);
    // SAFETY: the mapping made above, which nobody else knows of.
    unsafe { libc::munmap(address, size) };
    match failed {
        Some(error) => Err(error),
        None => Ok(answer.into_iter().map(|b| b & 1 == 1).collect()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn what_was_just_written_is_in_memory() {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&[1; 16 * 4096]).unwrap();
        let page = rustix::param::page_size() as u64;
        let pages = 16 * 4096 / page;
        let there = |from, length| {
            let pages = residency(&file, from, length).unwrap();
            pages.into_iter().filter(|p| *p).count() as u64
        };
        // Not written back yet, so it cannot have been taken.
        assert_eq!(there(0, 16 * 4096), pages);
        assert_eq!(there(page + 1, 1), 1, "whole pages");
        assert_eq!(there(0, 0), 0);
        assert_eq!(there(1 << 40, 1 << 20), 0, "beyond its end");
        let (reader, _writer) = std::io::pipe().unwrap();
        assert!(residency(&reader, 0, 4096).is_err());
    }
}
