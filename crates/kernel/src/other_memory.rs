//! Reads memory of another process (`process_vm_readv(2)`). A fatal signal ends the wait, unlike with `/proc/PID/mem`.

use std::io;

/// Longest list of places in one call, `UIO_MAXIOV`.
pub const PLACES_MAX: usize = 1024;

/// Reads `length` bytes at each address into `into`, up to the first unreadable place. Returns the bytes read.
///
/// # Errors
/// As of the call; `InvalidInput` if `into` is shorter than all places together.
pub fn read(pid: i32, addresses: &[u64], length: usize, into: &mut [u8]) -> io::Result<usize> {
    let wanted = addresses.len().checked_mul(length);
    if wanted.is_none_or(|wanted| wanted > into.len()) || addresses.len() > PLACES_MAX {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let there: Vec<libc::iovec> = addresses
        .iter()
        .map(|address| libc::iovec {
            iov_base: *address as usize as *mut libc::c_void,
            iov_len: length,
        })
        .collect();
    let here = libc::iovec {
        iov_base: into.as_mut_ptr().cast(),
        iov_len: into.len(),
    };
    // SAFETY: the kernel writes at most the length of the borrowed `into`, and never follows `there` in this process.
    let done = unsafe {
        libc::process_vm_readv(
            pid,
            &raw const here,
            1,
            there.as_ptr(),
            there.len() as libc::c_ulong,
            0,
        )
    };
    usize::try_from(done).map_err(|_| io::Error::last_os_error())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_memory_is_read_and_what_is_not_there_is_an_error() {
        let text = b"abcdefgh".to_vec();
        let at = text.as_ptr() as u64;
        let pid = std::process::id() as i32;
        let mut into = [0; 4];
        assert_eq!(read(pid, &[at + 4, at], 2, &mut into).unwrap(), 4);
        assert_eq!(&into, b"efab");
        assert!(read(pid, &[8], 2, &mut into).is_err());
        assert!(read(pid, &[at, at, at], 2, &mut into).is_err());
    }
}
