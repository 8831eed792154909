//! The page cache of a file: pages in memory, and pages evicted.

use rustix::fd::{AsFd, AsRawFd};
use std::io;

/// Longest range of one query, in bytes: an answer of 256 KiB, and some ten milliseconds.
pub const RANGE_MAX: u64 = 1 << 30;

/// A mapped part of a file, never accessed; dropping it unmaps.
struct Mapping {
    address: *mut libc::c_void,
    size: usize,
}

impl Mapping {
    /// Maps this many bytes from there, both in whole pages.
    fn new(file: impl AsFd, from: u64, bytes: u64, protection: libc::c_int) -> io::Result<Self> {
        let too_large = || io::Error::from(io::ErrorKind::InvalidInput);
        let size = usize::try_from(bytes).map_err(|_| too_large())?;
        let offset = libc::off_t::try_from(from).map_err(|_| too_large())?;
        // SAFETY: a new mapping at an address of the kernel's choice, touching no memory of ours, never accessed.
        let address = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                size,
                protection,
                libc::MAP_SHARED,
                file.as_fd().as_raw_fd(),
                offset,
            )
        };
        if address == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(Self { address, size })
    }

    fn residency(&self) -> io::Result<Vec<bool>> {
        let mut answer = vec![0u8; self.size / rustix::param::page_size()];
        // SAFETY: the range is the mapping, and `answer` has one byte for each of its pages.
        let asked = unsafe { libc::mincore(self.address, self.size, answer.as_mut_ptr()) };
        match asked {
            0 => Ok(answer.into_iter().map(|b| b & 1 == 1).collect()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    fn advise(&self, length: usize, advice: libc::c_int) -> io::Result<()> {
        // SAFETY: a range of the mapping, without other references, never read or written.
        let answer = unsafe { libc::madvise(self.address, length.min(self.size), advice) };
        (answer == 0).then_some(()).ok_or_else(io::Error::last_os_error)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping that was made, without other users.
        unsafe { libc::munmap(self.address, self.size) };
    }
}

/// Whether each page of a part of a file is in memory (`mincore(2)` of an untouched mapping), in whole pages, at most
/// [`RANGE_MAX`]. All pages of a file that the caller may neither own nor write seem present (since Linux 5.2).
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
    Mapping::new(file, start, bytes, libc::PROT_NONE)?.residency()
}

/// Size of the unit (folio) of [`read_as_unit`], in bytes. The kernel reads the range of one PMD entry, so that must
/// have this size (`/sys/kernel/mm/transparent_hugepage/hpage_pmd_size`); with pages of 16 and 64 KiB it is larger.
pub const UNIT: u64 = 2 << 20;

/// Reads [`UNIT`] bytes of a file, from a multiple of that, as one unit of memory. With `MADV_HUGEPAGE` on the mapping,
/// the kernel reads the whole unit at its first page (`do_sync_mmap_readahead` in Linux `mm/filemap.c`, since 5.18).
/// Otherwise its read-ahead begins with small units. If some pages are present, or no unit is free, smaller units are
/// read, or only the first page. So `before`, called when only the read is left, can drop present pages.
///
/// Waits for the disk. False: not all of it is present (or it is unreadable). All pages of a file that the caller may
/// neither own nor write seem present. `MADV_POPULATE_READ` (Linux 5.14) requests the page instead of an access: beyond
/// the end of a file that was cut meanwhile it returns an error, not a signal.
///
/// # Errors
/// As `mmap(2)` and `madvise(2)`, before `before`: `EINVAL` without such an advice, `EACCES` if it may not be mapped.
pub fn read_as_unit(file: impl AsFd, from: u64, before: impl FnOnce()) -> io::Result<bool> {
    let mapping = Mapping::new(file, from, UNIT, libc::PROT_READ)?;
    mapping.advise(mapping.size, libc::MADV_HUGEPAGE)?;
    mapping.advise(mapping.size, libc::MADV_RANDOM)?;
    before();
    let is_read = mapping
        .advise(rustix::param::page_size(), libc::MADV_POPULATE_READ)
        .is_ok();
    Ok(is_read
        && mapping
            .residency()
            .is_ok_and(|pages| pages.into_iter().all(|there| there)))
}

/// Pages of a part of a file in memory, and pages evicted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pages {
    /// In memory.
    pub cached: u64,
    /// Pages in memory that wait to be written, or are being written.
    pub unwritten: u64,
    /// Evicted under memory pressure and not read again, not dropped, while the kernel has memory for marks.
    pub evicted: u64,
}

/// Number of the system call, the same on every machine (arch/*/tools/syscall*.tbl, since Linux 5.1).
const CACHESTAT: libc::c_long = 451;

/// `struct cachestat_range` (include/uapi/linux/mman.h).
#[repr(C)]
struct Range {
    from: u64,
    length: u64,
}

/// `struct cachestat` (include/uapi/linux/mman.h).
#[repr(C)]
#[derive(Default)]
struct CacheStat {
    cached: u64,
    dirty: u64,
    writeback: u64,
    evicted: u64,
    recently_evicted: u64,
}

/// Pages of a part of a file in memory, and pages evicted (`cachestat(2)`, Linux 6.5). It never waits for a disk. Its
/// time grows with pages and marks: some milliseconds for 1 GiB of single pages.
///
/// # Errors
/// As `cachestat(2)`: `ENOSYS` before Linux 6.5, `EOPNOTSUPP` for huge pages. `EPERM` for another user's file that the
/// caller may not write (Linux 6.13), or if a filter of system calls does not know it.
pub fn pages_of(file: impl AsFd, from: u64, length: u64) -> io::Result<Pages> {
    if length == 0 {
        // For the kernel, zero means up to the end.
        return Ok(Pages::default());
    }
    let range = Range { from, length };
    let mut found = CacheStat::default();
    // SAFETY: both structures have the kernel's layout and outlive the call; it reads the first, writes the second.
    let answer = unsafe {
        libc::syscall(
            CACHESTAT,
            file.as_fd().as_raw_fd(),
            std::ptr::from_ref(&range),
            std::ptr::from_mut(&mut found),
            0,
        )
    };
    if answer != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(Pages {
        cached: found.cached,
        unwritten: found.dirty.saturating_add(found.writeback),
        evicted: found.evicted,
    })
}

/// Whether [`pages_of`] and [`residency`] work here, tried on our executable.
///
/// # Errors
/// As there, with the name of the system call.
pub fn is_told() -> io::Result<()> {
    let own = std::fs::File::open("/proc/self/exe")?;
    let named = |call: &'static str| move |e: io::Error| io::Error::new(e.kind(), format!("{call}: {e}"));
    pages_of(&own, 0, 1).map_err(named("cachestat"))?;
    residency(&own, 0, 1).map_err(named("mincore"))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn what_was_just_written_is_counted() {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&[1; 16 * 4096]).unwrap();
        let page = rustix::param::page_size() as u64;
        let all = match pages_of(&file, 0, 16 * 4096) {
            Err(e) if e.raw_os_error() == Some(libc::ENOSYS) => {
                eprintln!("skipped: cachestat is not there (before Linux 6.5)");
                return;
            }
            all => all.unwrap(),
        };
        assert_eq!(all.cached, 16 * 4096 / page);
        assert_eq!(pages_of(&file, 1 << 40, 1 << 20).unwrap(), Pages::default());
        assert_eq!(
            pages_of(&file, 0, 0).unwrap(),
            Pages::default(),
            "nothing, and not all"
        );
    }

    #[test]
    fn one_unit_is_read_whole_and_nothing_else() {
        let beside = std::env::current_exe().unwrap();
        let directory = beside.parent().unwrap();
        /// `EXT4_SUPER_MAGIC` (include/uapi/linux/magic.h), since Linux 6.16 (`lost_parts`).
        const EXT4: u64 = 0xEF53;
        let kind = rustix::fs::statfs(directory).unwrap().f_type as u64;
        let since = crate::release::kernel_version(&crate::release::kernel_release(&crate::Root::default()));
        let size = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size");
        if kind != EXT4 || since < Some((6, 16)) || size.ok().as_deref() != Some("2097152\n") {
            eprintln!("skipped: the tests do not lie on an ext4 that keeps large units");
            return;
        }
        let mut file = tempfile::tempfile_in(directory).unwrap();
        file.write_all(&vec![1; 3 * UNIT as usize + 4096]).unwrap();
        file.sync_all().unwrap();
        let there = |unit: u64| {
            let pages = residency(&file, unit * UNIT, UNIT).unwrap();
            pages.iter().filter(|there| **there).count() as u64 * rustix::param::page_size() as u64
        };
        // What somebody holds at that moment (DAMON, compaction) stays, so it is said again.
        let is_dropped = || {
            rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
            [there(0), there(1), there(2)] == [0; 3]
        };
        assert!((0..100).any(|_| is_dropped()));
        let mut is_called = false;
        assert!(read_as_unit(&file, UNIT, || is_called = true).unwrap() && is_called);
        // Without the advices it is one page, or what is read around it.
        assert_eq!([there(0), there(1), there(2)], [0, UNIT, 0]);
        // Beyond the end there is nothing to be read, and nobody is sent a signal.
        file.set_len(UNIT).unwrap();
        assert!(!read_as_unit(&file, UNIT, || ()).unwrap());
        // Where it cannot be mapped nothing is done before.
        let called = || unreachable!("nothing can be read");
        assert!(read_as_unit(&file, 1 << 63, called).is_err());
        assert!(read_as_unit(std::fs::File::open("/proc/version").unwrap(), 0, called).is_err());
    }

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
        let (socket, _other_end) = std::os::unix::net::UnixStream::pair().unwrap();
        assert!(residency(&socket, 0, 4096).is_err());
    }
}
