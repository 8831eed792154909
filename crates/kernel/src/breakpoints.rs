//! Hardware breakpoints: executions of one instruction by one thread, counted through the processor's debug registers
//! (`PERF_TYPE_BREAKPOINT`; perf_event_open(2)). Nothing of the program's memory is changed, so code that no file holds can be
//! counted, and a wrong address is never hit. A thread has four of them, which debuggers want as well. The kernel takes them back when
//! the descriptor is closed, however this process ends; who is forked, and threads that come later, do not inherit them.

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
    /// [`OpenError`]; `Busy` where all of the thread's breakpoints are taken.
    pub fn open(thread: i32, address: u64) -> Result<Self, OpenError> {
        let mut attributes = Attributes {
            kind: PERF_TYPE_BREAKPOINT,
            breakpoint_type: HW_BREAKPOINT_X,
            config1: address,
            // The kernel wants the length of a word for instructions.
            config2: size_of::<libc::c_long>() as u64,
            flags: FLAG_DISABLED | FLAG_EXCLUDE_KERNEL | FLAG_EXCLUDE_HYPERVISOR,
            ..Attributes::default()
        };
        // The address is the program's: the kernel follows it nowhere.
        attributes.open(thread, -1, -1).map(Self).map_err(classify_thread)
    }

    /// Counts from now on, or no more. False: the kernel refused.
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
        // No bytes for an event in the error state.
        if n == buffer.len() {
            Ok(u64::from_ne_bytes(buffer))
        } else {
            Err(Errno::IO)
        }
    }
}
