//! Counting through perf events (perf_event_open(2)): never sampling, one `read` per counter.
//!
//! Closing a counter on a uprobe or tracepoint waits for the kernel to be sure that no CPU is inside it: 75 to
//! 95 ms each, one after the other (measured on Linux 6.18). [`close_in_background`] keeps that out of the loop.

use rustix::io::Errno;
use std::ffi::CStr;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

/// What is counted.
#[derive(Clone, Copy, Debug)]
pub enum Event<'a> {
    /// Executions of one instruction of a file that is mapped executable.
    Uprobe {
        /// Number of the `uprobe` event source, from `/sys/bus/event_source/devices/uprobe/type`.
        source: u32,
        /// The file, as this process sees it (`/proc/PID/exe` will do).
        file: &'a CStr,
        /// Offset of the instruction in the file.
        offset: u64,
        /// Offset of the probe's semaphore in the file; 0 = it has none. The kernel raises it while counting.
        semaphore: u32,
    },
    /// Passages of a kernel tracepoint, by the number in its `id` file.
    Tracepoint(u64),
    /// Instructions completed in user mode.
    Instructions,
    /// CPU cycles in user mode.
    Cycles,
}

/// Whose executions are counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// One thread and the threads that it makes later, wherever they run.
    Thread(i32),
    /// Everything that runs on one CPU.
    Cpu(u32),
}

/// Why a counter could not be opened, typed by what the caller should do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OpenError {
    /// A privilege is missing.
    #[error("not permitted ({0})")]
    Denied(Errno),
    /// The thread is gone.
    #[error("the thread is gone")]
    Vanished,
    /// This machine, or this instruction, cannot be counted.
    #[error("not supported here ({0})")]
    Unsupported(Errno),
    /// Out of descriptors, memory or counters for now.
    #[error("not possible now ({0})")]
    Busy(Errno),
}

/// A value and the time it covers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Count {
    /// Events counted.
    pub value: u64,
    /// Nanoseconds that the counter was wanted.
    pub enabled_ns: u64,
    /// Nanoseconds that it really counted; less than wanted when hardware counters are shared out in turns.
    pub running_ns: u64,
}

impl Count {
    /// The value extrapolated to the whole time it was wanted.
    pub fn scaled(self) -> f64 {
        if self.running_ns == 0 || self.running_ns >= self.enabled_ns {
            self.value as f64
        } else {
            self.value as f64 * (self.enabled_ns as f64 / self.running_ns as f64)
        }
    }
}

/// An open counter. The kernel removes it when this process ends, however it ends.
#[derive(Debug)]
pub struct Counter(OwnedFd);

/// `struct perf_event_attr` up to version 5 (112 bytes; include/uapi/linux/perf_event.h).
#[repr(C)]
#[derive(Default)]
struct Attributes {
    kind: u32,
    size: u32,
    config: u64,
    sample_period: u64,
    sample_type: u64,
    read_format: u64,
    flags: u64,
    wakeup_events: u32,
    breakpoint_type: u32,
    config1: u64,
    config2: u64,
    branch_sample_type: u64,
    sample_registers_user: u64,
    sample_stack_user: u32,
    clock: i32,
    sample_registers_interrupt: u64,
    aux_watermark: u32,
    sample_max_stack: u16,
    reserved: u16,
}

const PERF_TYPE_HARDWARE: u32 = 0;
const PERF_TYPE_TRACEPOINT: u32 = 2;
const PERF_COUNT_HW_CPU_CYCLES: u64 = 0;
const PERF_COUNT_HW_INSTRUCTIONS: u64 = 1;
const PERF_FORMAT_TOTAL_TIME_ENABLED: u64 = 1;
const PERF_FORMAT_TOTAL_TIME_RUNNING: u64 = 2;
/// Bits of the flag word, in the order of the structure's bit fields.
const FLAG_INHERIT: u64 = 1 << 1;
const FLAG_EXCLUDE_KERNEL: u64 = 1 << 5;
const FLAG_EXCLUDE_HYPERVISOR: u64 = 1 << 6;
/// Inherit to threads only, since Linux 5.13. Forked processes are attached on their own, and must not be
/// counted twice.
const FLAG_INHERIT_THREAD: u64 = 1 << 35;
const PERF_FLAG_FD_CLOEXEC: libc::c_ulong = 8;
const PERF_EVENT_IOC_DISABLE: libc::c_ulong = 0x2401;

impl Counter {
    /// Opens a counter; it counts from now on.
    ///
    /// # Errors
    /// [`OpenError`].
    pub fn open(event: Event<'_>, scope: Scope) -> Result<Self, OpenError> {
        let mut attributes = Attributes {
            size: size_of::<Attributes>() as u32,
            read_format: PERF_FORMAT_TOTAL_TIME_ENABLED | PERF_FORMAT_TOTAL_TIME_RUNNING,
            ..Attributes::default()
        };
        match event {
            Event::Uprobe {
                source,
                file,
                offset,
                semaphore,
            } => {
                attributes.kind = source;
                attributes.config = u64::from(semaphore) << 32;
                attributes.config1 = file.as_ptr() as u64;
                attributes.config2 = offset;
            }
            Event::Tracepoint(id) => {
                attributes.kind = PERF_TYPE_TRACEPOINT;
                attributes.config = id;
            }
            Event::Instructions => {
                attributes.kind = PERF_TYPE_HARDWARE;
                attributes.config = PERF_COUNT_HW_INSTRUCTIONS;
                attributes.flags = FLAG_EXCLUDE_KERNEL | FLAG_EXCLUDE_HYPERVISOR;
            }
            Event::Cycles => {
                attributes.kind = PERF_TYPE_HARDWARE;
                attributes.config = PERF_COUNT_HW_CPU_CYCLES;
                attributes.flags = FLAG_EXCLUDE_KERNEL | FLAG_EXCLUDE_HYPERVISOR;
            }
        }
        let (pid, cpu) = match scope {
            Scope::Thread(tid) => {
                attributes.flags |= FLAG_INHERIT | FLAG_INHERIT_THREAD;
                (tid, -1)
            }
            Scope::Cpu(cpu) => (
                -1,
                i32::try_from(cpu).map_err(|_| OpenError::Unsupported(Errno::INVAL))?,
            ),
        };
        // SAFETY: `attributes` is a whole perf_event_attr of the stated size, and the path it points to (if any)
        // is borrowed by `event` for the length of the call; the kernel copies both.
        let fd = unsafe {
            libc::syscall(
                libc::SYS_perf_event_open,
                &raw const attributes,
                pid,
                cpu,
                -1,
                PERF_FLAG_FD_CLOEXEC,
            )
        };
        match i32::try_from(fd) {
            // SAFETY: a descriptor that the kernel just made for us and nobody else knows.
            Ok(fd) if fd >= 0 => Ok(Self(unsafe { OwnedFd::from_raw_fd(fd) })),
            _ => Err(classify(
                Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::INVAL),
                scope,
            )),
        }
    }

    /// Reads it.
    ///
    /// # Errors
    /// As `read(2)`.
    pub fn read(&self) -> Result<Count, Errno> {
        let mut bytes = [0u8; 24];
        let n = loop {
            match rustix::io::read(&self.0, &mut bytes) {
                Err(Errno::INTR) => {}
                other => break other?,
            }
        };
        // The kernel answers 0 bytes for a counter in the error state (a hardware counter that lost its place).
        if n != bytes.len() {
            return Err(Errno::IO);
        }
        let number = |at: usize| {
            let mut x = [0; 8];
            x.copy_from_slice(&bytes[at..at + 8]);
            u64::from_ne_bytes(x)
        };
        Ok(Count {
            value: number(0),
            enabled_ns: number(8),
            running_ns: number(16),
        })
    }

    /// Stops counting; the value stays readable. Cheap, unlike closing.
    pub fn disable(&self) {
        // SAFETY: an ioctl without argument on our own descriptor. It cannot fail on a perf event, and if it
        // did, closing would stop the counter as well.
        unsafe { libc::ioctl(self.0.as_raw_fd(), PERF_EVENT_IOC_DISABLE, 0) };
    }
}

fn classify(errno: Errno, scope: Scope) -> OpenError {
    match errno {
        Errno::ACCESS | Errno::PERM => OpenError::Denied(errno),
        Errno::SRCH if matches!(scope, Scope::Thread(_)) => OpenError::Vanished,
        Errno::MFILE | Errno::NFILE | Errno::NOMEM | Errno::NOSPC | Errno::BUSY | Errno::AGAIN => {
            OpenError::Busy(errno)
        }
        _ => OpenError::Unsupported(errno),
    }
}

/// Closes counters on a thread of its own, for the reason given in the head of this file. They stop counting at
/// once; their breakpoints go one after the other.
pub fn close_in_background(counters: Vec<Counter>) {
    if counters.is_empty() {
        return;
    }
    for counter in &counters {
        counter.disable();
    }
    // When no thread can be made, the closure, and with it the counters, is dropped here: slower, not wrong.
    let _ = std::thread::Builder::new()
        .name("perf-close".to_owned())
        .stack_size(64 * 1024)
        .spawn(move || drop(counters));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_structure_has_the_size_of_the_kernel_interface() {
        assert_eq!(size_of::<Attributes>(), 112);
    }

    #[test]
    fn scaling_fills_the_time_a_counter_was_not_running() {
        assert_eq!(
            Count {
                value: 10,
                enabled_ns: 100,
                running_ns: 50
            }
            .scaled(),
            20.0
        );
        assert_eq!(
            Count {
                value: 10,
                enabled_ns: 100,
                running_ns: 100
            }
            .scaled(),
            10.0
        );
        assert_eq!(
            Count {
                value: 0,
                enabled_ns: 100,
                running_ns: 0
            }
            .scaled(),
            0.0
        );
    }

    #[test]
    fn errors_tell_what_to_do() {
        let thread = Scope::Thread(1);
        assert!(matches!(classify(Errno::ACCESS, thread), OpenError::Denied(_)));
        assert_eq!(classify(Errno::SRCH, thread), OpenError::Vanished);
        assert!(matches!(
            classify(Errno::NOENT, thread),
            OpenError::Unsupported(_)
        ));
        assert!(matches!(classify(Errno::MFILE, thread), OpenError::Busy(_)));
        assert!(matches!(
            classify(Errno::SRCH, Scope::Cpu(0)),
            OpenError::Unsupported(_)
        ));
    }

    #[test]
    fn a_thread_that_does_not_exist_is_vanished_or_denied() {
        // Beyond the largest process id (include/linux/threads.h: 2^22).
        match Counter::open(Event::Instructions, Scope::Thread(1 << 23)) {
            Err(OpenError::Vanished | OpenError::Denied(_) | OpenError::Unsupported(_)) => {}
            other => panic!("{other:?}"),
        }
    }
}
