//! Keeps this program's heap, top of stack and code in memory.
//!
//! Freed memory must be requested again. Under pressure the program waits there, because the kernel has to reclaim a
//! page. Code that never ran is on disk, and its first run would be during a protection, when the disk is busy.

use crate::bytes::{hexadecimal, lines, number, words};
use std::ops::Range;

/// Size (bytes) from which the C library maps blocks separately: glibc's maximum (`HEAP_MAX_SIZE / 2`, malloc/arena.c).
#[cfg(target_env = "gnu")]
const MAPPED_FROM: libc::c_int = 32 << 20;
#[cfg(target_env = "gnu")]
const GROWN_BY: libc::c_int = 1 << 20;
/// Stack that is touched: more than the loop's deepest use, less than any limit (usually 8 MiB).
const STACK: usize = 256 * 1024;
/// Smallest page size.
const PAGE: usize = 4096;

/// Makes the allocator keep freed memory, from now on, for all threads (`mallopt(3)`); true only with glibc.
#[cfg(target_env = "gnu")]
pub fn keep_heap() -> bool {
    let settings = [
        // A peak beyond this is given back: it would stay locked.
        (libc::M_TRIM_THRESHOLD, MAPPED_FROM),
        (libc::M_MMAP_THRESHOLD, MAPPED_FROM),
        (libc::M_TOP_PAD, GROWN_BY),
    ];
    settings.iter().all(|(name, value)| {
        // SAFETY: takes two numbers and no memory of ours, and locks the allocator itself; a bad value is refused.
        unsafe { libc::mallopt(*name, *value) == 1 }
    })
}

/// Does nothing on another C library.
#[cfg(not(target_env = "gnu"))]
pub fn keep_heap() -> bool {
    false
}

/// Touches this much heap and frees it, so that this thread's heap can later grow without a page fault; useful only
/// after [`keep_heap`]. Returns whether there was enough: a program that can do without must not end for lack of it.
pub fn touch_heap(bytes: usize) -> bool {
    let mut room: Vec<u8> = Vec::new();
    if room.try_reserve_exact(bytes).is_err() {
        return false;
    }
    for byte in room.spare_capacity_mut().iter_mut().step_by(PAGE) {
        byte.write(1);
    }
    std::hint::black_box(&mut room);
    true
}

/// Touches the next part of the stack of this thread.
#[inline(never)]
pub fn touch_stack() {
    let mut room = [0u8; STACK];
    std::hint::black_box(&mut room);
}

/// Executable mappings of the file behind this address of the program.
pub fn parse_code(maps: &[u8], address: usize) -> Vec<Range<usize>> {
    let mapping = |line| {
        let mut parts = words(line);
        let range = parts.next()?;
        let permissions = parts.next()?;
        let file = (parts.nth(1)?, parts.next().and_then(number)?);
        let at = range.iter().position(|&b| b == b'-')?;
        let start = usize::try_from(hexadecimal(range.get(..at)?)?).ok()?;
        let end = usize::try_from(hexadecimal(range.get(at + 1..)?)?).ok()?;
        let is_code = permissions.contains(&b'x') && !permissions.contains(&b'w');
        (start < end && is_code).then_some((start..end, file))
    };
    let all: Vec<_> = lines(maps).filter_map(mapping).collect();
    let own = all.iter().find(|(range, _)| range.contains(&address));
    let is_own = |(_, file): &&(Range<usize>, _)| own.is_some_and(|(_, own)| own == file);
    all.iter()
        .filter(is_own)
        .map(|(range, _)| range.clone())
        .collect()
}

/// Brings this program's code into memory and keeps it there (`mlock(2)`), up to `most` bytes. Returns the amount.
///
/// # Errors
/// As `mlock(2)` (without CAP_IPC_LOCK the limit of locked memory counts), or when `/proc/self/maps` cannot be read.
/// `NotFound` when it does not show the code, `FileTooLarge` beyond `most`.
pub fn lock_code(most: usize) -> std::io::Result<usize> {
    let maps = std::fs::read("/proc/self/maps")?;
    let code = parse_code(&maps, lock_code as *const () as usize);
    let bytes: usize = code.iter().map(ExactSizeIterator::len).sum();
    if bytes == 0 {
        return Err(std::io::ErrorKind::NotFound.into());
    }
    if bytes > most {
        return Err(std::io::ErrorKind::FileTooLarge.into());
    }
    for range in code {
        // SAFETY: locking changes no memory. An unmapped range is an error; one mapped anew is locked harmlessly.
        if unsafe { libc::mlock(range.start as *const libc::c_void, range.len()) } != 0 {
            return Err(std::io::Error::last_os_error());
        }
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn code_is_what_is_executed_of_the_program() {
        let maps = b"55d0a0000000-55d0a0100000 r--p 00000000 fe:00 12   /usr/bin/homeostat\n\
            55d0a0100000-55d0a0900000 r-xp 00100000 fe:00 12   /usr/bin/homeostat\n\
            55d0a0900000-55d0a0a00000 rw-p 00900000 fe:00 12   /usr/bin/homeostat\n\
            55d0a1000000-55d0a2000000 rw-p 00000000 00:00 0    [heap]\n\
            7f0000000000-7f0000001000 ---p 00000000 fe:00 13   /lib/libc.so.6\n\
            7f0000001000-7f0000002000 r-xp 00001000 fe:00 13   /lib/libc.so.6\n\
            7ffc00000000-7ffc00002000 r-xp 00000000 00:00 0    [vdso]\nrubbish\n";
        let (program, library) = (
            0x55d0_a010_0000..0x55d0_a090_0000,
            0x7f00_0000_1000..0x7f00_0000_2000,
        );
        assert_eq!(parse_code(maps, 0x55d0_a020_0000), [program]);
        assert_eq!(parse_code(maps, 0x7f00_0000_1800), [library]);
        assert_eq!(parse_code(maps, 0x1000), Vec::new());
    }

    #[test]
    fn more_code_than_is_allowed_is_not_locked() {
        let error = lock_code(1).unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::FileTooLarge);
    }

    #[test]
    fn heap_that_there_is_not_is_told_and_ends_nobody() {
        touch_stack();
        assert!(touch_heap(1 << 20) && touch_heap(0));
        // More than any address space has, and more than a vector may hold.
        assert!(!touch_heap(isize::MAX as usize) && !touch_heap(usize::MAX));
    }
}
