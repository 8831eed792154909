//! Hardware breakpoints count executions of one instruction by one thread, through debug registers
//! (`PERF_TYPE_BREAKPOINT`; perf_event_open(2)). The program's memory is unchanged: code without a file can be counted,
//! and a wrong address is never hit. Debuggers want some of a thread's four, too. Closing the descriptor frees one,
//! also at the end of this process. Forked processes and later threads do not inherit them.

use crate::perf::{Attributes, OpenError, classify_thread};
use rustix::io::Errno;
use std::os::fd::{AsRawFd, OwnedFd};

/// Breakpoints that a thread of x86-64 can have at once.
pub const PER_THREAD: usize = 4;

/// include/uapi/linux/perf_event.h and hw_breakpoint.h.
const PERF_TYPE_BREAKPOINT: u32 = 5;
const HW_BREAKPOINT_X: u32 = 4;
const FLAG_DISABLED: u64 = 1;
const FLAG_EXCLUDE_KERNEL: u64 = 1 << 5;
const FLAG_EXCLUDE_HYPERVISOR: u64 = 1 << 6;
const PERF_EVENT_IOC_ENABLE: libc::c_ulong = 0x2400;
const PERF_EVENT_IOC_DISABLE: libc::c_ulong = 0x2401;

/// A breakpoint of a thread.
#[derive(Debug)]
pub struct Breakpoint(OwnedFd);

impl Breakpoint {
    /// Takes one of the thread's breakpoints for an address; it does not count yet.
    ///
    /// # Errors
    /// [`OpenError`]; `Busy` if all of the thread's breakpoints are taken.
    pub fn open(thread: i32, address: u64) -> Result<Self, OpenError> {
        let mut attributes = Attributes {
            kind: PERF_TYPE_BREAKPOINT,
            breakpoint_type: HW_BREAKPOINT_X,
            config1: address,
            // For instructions the kernel requires the length of a word.
            config2: size_of::<libc::c_long>() as u64,
            flags: FLAG_DISABLED | FLAG_EXCLUDE_KERNEL | FLAG_EXCLUDE_HYPERVISOR,
            ..Attributes::default()
        };
        attributes.open(thread, -1, -1).map(Self).map_err(classify_thread)
    }

    /// Starts or stops counting. False: the kernel refused.
    pub fn set(&self, on: bool) -> bool {
        let what = if on {
            PERF_EVENT_IOC_ENABLE
        } else {
            PERF_EVENT_IOC_DISABLE
        };
        // SAFETY: an ioctl without argument on our own descriptor of a perf event.
        unsafe { libc::ioctl(self.0.as_raw_fd(), what, 0) == 0 }
    }

    /// Executions while it counted; also of a thread that has ended.
    ///
    /// # Errors
    /// As `read(2)`.
    pub fn read(&self) -> Result<u64, Errno> {
        let mut buffer = [0u8; 8];
        let n = rustix::io::retry_on_intr(|| rustix::io::read(&self.0, &mut buffer))?;
        if n == buffer.len() {
            Ok(u64::from_ne_bytes(buffer))
        } else {
            Err(Errno::IO)
        }
    }
}
