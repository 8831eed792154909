//! `fanotify(7)`: the kernel reports the writer of a file, also of `/proc/sys` and `/sys`. Needs CAP_SYS_ADMIN. Only
//! writes through the same mount of proc are reported (other mounts have other inodes), so users also poll.

use rustix::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};
use rustix::io::Errno;
use std::ffi::CStr;
use std::io;

/// Length of an event as the kernel writes it (`struct fanotify_event_metadata`, include/uapi/linux/fanotify.h).
const EVENT_BYTES: usize = 24;
const VERSION: u8 = 3;
const EVENTS_MAX: usize = 64;

/// A write.
#[derive(Debug)]
pub struct Written {
    /// The file, opened for reading; `None` when the kernel lost events because there were too many.
    pub file: Option<OwnedFd>,
    /// Writing process; 0 if it is invisible from here.
    pub pid: i32,
}

/// A group of watches.
#[derive(Debug)]
pub struct Fanotify(OwnedFd);

fn checked(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(result)
    }
}

impl Fanotify {
    /// A group without watches. Reading from it never blocks.
    ///
    /// # Errors
    /// As `fanotify_init(2)`: `PermissionDenied` without CAP_SYS_ADMIN, `Unsupported` on a kernel without it.
    pub fn new() -> io::Result<Self> {
        // SAFETY: no memory is passed; the result is checked before its use as a descriptor.
        let fd = unsafe {
            libc::fanotify_init(
                libc::FAN_CLASS_NOTIF | libc::FAN_CLOEXEC | libc::FAN_NONBLOCK,
                (libc::O_RDONLY | libc::O_CLOEXEC) as libc::c_uint,
            )
        };
        let fd = checked(fd)?;
        // SAFETY: the kernel just made this descriptor, without other users.
        Ok(Self(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    /// Reports writes to this file from now on.
    ///
    /// # Errors
    /// As `fanotify_mark(2)`.
    pub fn watch(&self, path: &CStr) -> io::Result<()> {
        use std::os::fd::AsRawFd;
        // SAFETY: the path is a string that ends with a zero and lives until the call returns.
        let result = unsafe {
            libc::fanotify_mark(
                self.0.as_raw_fd(),
                libc::FAN_MARK_ADD,
                libc::FAN_MODIFY,
                libc::AT_FDCWD,
                path.as_ptr(),
            )
        };
        checked(result).map(|_| ())
    }

    /// Writes since the last call; empty without one.
    ///
    /// # Errors
    /// As `read(2)`, but not for lack of events.
    pub fn read(&self) -> io::Result<Vec<Written>> {
        let mut buffer = [0u8; EVENT_BYTES * EVENTS_MAX];
        let length = match rustix::io::retry_on_intr(|| rustix::io::read(&self.0, &mut buffer[..])) {
            Ok(length) => length,
            Err(Errno::AGAIN) => return Ok(Vec::new()),
            Err(e) => return Err(e.into()),
        };
        let mut rest = buffer.get(..length).unwrap_or_default();
        let mut found = Vec::new();
        while let Some(event) = rest.get(..EVENT_BYTES) {
            let word = |at: usize| -> [u8; 4] {
                event
                    .get(at..at + 4)
                    .and_then(|b| b.try_into().ok())
                    .unwrap_or_default()
            };
            let event_length = u32::from_ne_bytes(word(0)) as usize;
            let version = event.get(4).copied().unwrap_or_default();
            if version != VERSION || event_length < EVENT_BYTES {
                return Err(io::Error::new(
                    io::ErrorKind::Unsupported,
                    format!("the kernel writes events of version {version}"),
                ));
            }
            let fd = i32::from_ne_bytes(word(16));
            // SAFETY: the kernel opened this descriptor for us with the event, and it is in no other event.
            let file = (fd >= 0).then(|| unsafe { OwnedFd::from_raw_fd(fd) });
            found.push(Written {
                file,
                pid: i32::from_ne_bytes(word(20)),
            });
            rest = rest.get(event_length..).unwrap_or_default();
        }
        Ok(found)
    }
}

impl AsFd for Fanotify {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
