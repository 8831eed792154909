//! Counters through perf events (perf_event_open(2)): no sampling, one `read` per counter or group.
//!
//! Hardware counters are few and shared, so nothing here is pinned. Pinned counters (the NMI watchdog, a profiler) go
//! first, and the others are multiplexed. Missed time is extrapolated with its error ([`Count::relative_error`]).
//!
//! Closing a counter on a uprobe waits until no CPU is inside it: 75 to 95 ms each, in sequence (measured on Linux
//! 6.18). The meters close them in a separate thread.

use rustix::io::Errno;
use std::ffi::CStr;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

/// An event to count.
#[derive(Clone, Copy, Debug)]
pub enum Event<'a> {
    /// Executions of one instruction of a file that is mapped executable.
    Uprobe {
        /// Number of the `uprobe` event source, from `/sys/bus/event_source/devices/uprobe/type`.
        source: u32,
        /// The file in this process's view (`/proc/PID/exe` is possible).
        file: &'a CStr,
        /// Offset of the instruction in the file.
        offset: u64,
        /// Offset of the probe's semaphore in the file, 0 without one. The kernel raises it while counting.
        semaphore: u32,
    },
    /// Instructions completed in user mode.
    Instructions,
    /// CPU cycles in user mode.
    Cycles,
    /// Any event in the kernel's own encoding.
    Encoded(Encoding),
}

/// An event as `perf_event_open` takes it: event source (`type`) and its event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Encoding {
    /// Number of the event source: generic hardware, software, or from `/sys/bus/event_source/devices/*/type`.
    pub source: u32,
    /// The event.
    pub config: u64,
    /// Extension of the event, such as the offcore response register of Intel.
    pub config1: u64,
    /// Count in user mode only. Event sources outside the cores have no modes.
    pub user_only: bool,
}

impl Encoding {
    const fn generic(config: u64) -> Self {
        Self {
            source: PERF_TYPE_HARDWARE,
            config,
            config1: 0,
            user_only: true,
        }
    }
    /// One of `PERF_TYPE_SOFTWARE`; in all modes, because the kernel itself counts them.
    const fn software(config: u64) -> Self {
        Self {
            source: PERF_TYPE_SOFTWARE,
            config,
            config1: 0,
            user_only: false,
        }
    }
    /// One of `PERF_TYPE_HW_CACHE`: reads of a cache, all or those that missed.
    const fn cache(cache: u64, missed: bool) -> Self {
        Self {
            source: PERF_TYPE_HW_CACHE,
            config: cache | if missed { 1 << 16 } else { 0 },
            config1: 0,
            user_only: true,
        }
    }
    /// CPU cycles.
    pub const CYCLES: Self = Self::generic(0);
    /// Instructions completed.
    pub const INSTRUCTIONS: Self = Self::generic(1);
    /// Cycles stalled for lack of data or units, if the kernel knows such an event.
    pub const STALLED_CYCLES_BACKEND: Self = Self::generic(8);
    /// Reads of memory.
    pub const NODE_READS: Self = Self::cache(6, false);
    /// Reads of memory of another node.
    pub const NODE_READ_MISSES: Self = Self::cache(6, true);
    /// Time on a CPU in nanoseconds.
    pub const TASK_CLOCK: Self = Self::software(1);
    /// Page faults.
    pub const PAGE_FAULTS: Self = Self::software(2);
    /// Switches to another thread.
    pub const CONTEXT_SWITCHES: Self = Self::software(3);
}

/// Whose executions are counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// One thread and its later threads, wherever they run.
    Thread(i32),
    /// Every thread on one CPU.
    Cpu(u32),
}

/// Reason why a counter could not be opened, typed by the caller's remedy.
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
    /// Nanoseconds for which the count was requested.
    pub enabled_ns: u64,
    /// Nanoseconds counted: fewer than requested if hardware counters are multiplexed.
    pub running_ns: u64,
}

impl Count {
    /// The value extrapolated to the whole requested time.
    pub fn scaled(self) -> f64 {
        if self.running_ns == 0 || self.running_ns >= self.enabled_ns {
            self.value as f64
        } else {
            self.value as f64 * (self.enabled_ns as f64 / self.running_ns as f64)
        }
    }

    /// Share of the requested time that was counted, 0..1; 1 if no time was requested.
    pub fn coverage(self) -> f64 {
        if self.enabled_ns == 0 {
            1.0
        } else {
            (self.running_ns as f64 / self.enabled_ns as f64).min(1.0)
        }
    }

    /// Relative standard error of the extrapolated value: 0 if counted all the time, infinite if never.
    ///
    /// The kernel rotates the counters every [`TURN_NS`]. With `n` counted turns and a share `f` of the time covered,
    /// the mean errs by `cv·√((1−f)/n)`. The unknown variation `cv` is taken as 1: high for a steady program.
    pub fn relative_error(self) -> f64 {
        let missed = 1.0 - self.coverage();
        if missed <= 0.0 {
            return 0.0;
        }
        (missed * TURN_NS / self.running_ns as f64).sqrt()
    }
}

/// Turn of a shared counter: `perf_event_mux_interval_ms`, 4 ms on x86 since Linux 3.11.
pub const TURN_NS: f64 = 4e6;

/// An open counter. The kernel removes it when this process ends for any reason.
#[derive(Debug)]
pub struct Counter(OwnedFd);

/// Several counters that always run together, so that their ratios are exact even when multiplexed.
#[derive(Debug)]
pub struct Group {
    leader: OwnedFd,
    _members: Vec<OwnedFd>,
    /// For each requested event, its place in the kernel's answer.
    places: Vec<Option<usize>>,
}

/// Counts of a group.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GroupCount {
    /// Nanoseconds for which the counts were requested.
    pub enabled_ns: u64,
    /// Nanoseconds counted.
    pub running_ns: u64,
    /// For each requested event, in order; `None` for one that the machine cannot count in this group.
    pub values: Vec<Option<u64>>,
}

/// Most events in one group: no processor has more counters to run them together.
pub const GROUP_EVENTS_MAX: usize = 16;

/// `struct perf_event_attr` up to version 5 (112 bytes; include/uapi/linux/perf_event.h).
#[repr(C)]
#[derive(Default)]
pub(super) struct Attributes {
    pub(super) kind: u32,
    pub(super) size: u32,
    pub(super) config: u64,
    pub(super) sample_period: u64,
    pub(super) sample_type: u64,
    pub(super) read_format: u64,
    pub(super) flags: u64,
    /// Records, or bytes with the flag for a watermark.
    pub(super) wakeup: u32,
    pub(super) breakpoint_type: u32,
    pub(super) config1: u64,
    pub(super) config2: u64,
    pub(super) branch_sample_type: u64,
    pub(super) sample_registers_user: u64,
    pub(super) sample_stack_user: u32,
    pub(super) clock: i32,
    pub(super) sample_registers_interrupt: u64,
    pub(super) aux_watermark: u32,
    pub(super) sample_max_stack: u16,
    pub(super) reserved: u16,
}

const _: () = assert!(size_of::<Attributes>() == 112);

const PERF_TYPE_HARDWARE: u32 = 0;
pub(super) const PERF_TYPE_SOFTWARE: u32 = 1;
const PERF_TYPE_HW_CACHE: u32 = 3;
/// Raw events of the processor's own cores.
pub const PERF_TYPE_RAW: u32 = 4;
const PERF_FORMAT_TOTAL_TIME_ENABLED: u64 = 1;
const PERF_FORMAT_TOTAL_TIME_RUNNING: u64 = 2;
const PERF_FORMAT_GROUP: u64 = 8;
/// Bits of the flag word, in the order of the structure's bit fields.
const FLAG_DISABLED: u64 = 1;
const FLAG_INHERIT: u64 = 1 << 1;
const FLAG_EXCLUDE_KERNEL: u64 = 1 << 5;
const FLAG_EXCLUDE_HYPERVISOR: u64 = 1 << 6;
/// Inherit to threads only, since Linux 5.13. Forked processes are attached separately, and must not count twice.
const FLAG_INHERIT_THREAD: u64 = 1 << 35;
const PERF_FLAG_FD_CLOEXEC: libc::c_ulong = 8;
const PERF_EVENT_IOC_ENABLE: libc::c_ulong = 0x2400;
const PERF_EVENT_IOC_DISABLE: libc::c_ulong = 0x2401;

const TIMES: u64 = PERF_FORMAT_TOTAL_TIME_ENABLED | PERF_FORMAT_TOTAL_TIME_RUNNING;

/// One `perf_event_open`; with a leader, as a member of its group. The flags are added to those of event and scope.
fn open_event(
    event: Event<'_>,
    scope: Scope,
    read_format: u64,
    flags: u64,
    leader: Option<&OwnedFd>,
) -> Result<OwnedFd, OpenError> {
    let mut attributes = Attributes {
        read_format,
        flags,
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
        Event::Instructions => attributes.encode(Encoding::INSTRUCTIONS),
        Event::Cycles => attributes.encode(Encoding::CYCLES),
        Event::Encoded(encoding) => attributes.encode(encoding),
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
    let group = leader.map_or(-1, AsRawFd::as_raw_fd);
    // `event` borrows the path in the attributes, and `leader` keeps the group's descriptor open.
    attributes.open(pid, cpu, group).map_err(|e| classify(e, scope))
}

impl Attributes {
    /// `perf_event_open(2)`. Memory behind the attributes' addresses must be alive; `group` is -1 or an open event.
    ///
    /// # Errors
    /// The kernel's error.
    pub(super) fn open(&mut self, pid: i32, cpu: i32, group: i32) -> Result<OwnedFd, Errno> {
        self.size = size_of::<Self>() as u32;
        // SAFETY: `self` is a whole perf_event_attr of the stated size that lives across the call. Its only address is
        // a path's, which the kernel reads safely (EFAULT). It refuses a descriptor that is no event (EBADF, EINVAL).
        let fd = unsafe {
            libc::syscall(
                libc::SYS_perf_event_open,
                &raw const *self,
                pid,
                cpu,
                group,
                PERF_FLAG_FD_CLOEXEC,
            )
        };
        match i32::try_from(fd) {
            // SAFETY: the kernel just made this descriptor for us, without other users.
            Ok(fd) if fd >= 0 => Ok(unsafe { OwnedFd::from_raw_fd(fd) }),
            _ => Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::INVAL)),
        }
    }

    fn encode(&mut self, encoding: Encoding) {
        self.kind = encoding.source;
        self.config = encoding.config;
        self.config1 = encoding.config1;
        if encoding.user_only {
            self.flags |= FLAG_EXCLUDE_KERNEL | FLAG_EXCLUDE_HYPERVISOR;
        }
    }
}

fn read_words<const N: usize>(fd: &OwnedFd) -> Result<([u64; N], usize), Errno> {
    let mut buffer = [[0u8; 8]; N];
    let n = rustix::io::retry_on_intr(|| rustix::io::read(fd, buffer.as_flattened_mut()))?;
    Ok((buffer.map(u64::from_ne_bytes), n))
}

impl Group {
    /// Opens the events as one group, counting from now on, without events that cannot be counted with those before.
    ///
    /// # Errors
    /// [`OpenError`]: the first event cannot be counted, the thread is gone, a privilege or a descriptor is missing.
    pub fn open(events: &[Encoding], scope: Scope) -> Result<Self, OpenError> {
        let Some((first, others)) = events.split_first().filter(|_| events.len() <= GROUP_EVENTS_MAX) else {
            return Err(OpenError::Unsupported(Errno::INVAL));
        };
        let format = TIMES | PERF_FORMAT_GROUP;
        // Started as a whole, at the end: later members would start at the next turn (Linux 6.18), with wrong ratios.
        let leader = open_event(Event::Encoded(*first), scope, format, FLAG_DISABLED, None)?;
        let mut members = Vec::with_capacity(others.len());
        let mut places = vec![Some(0)];
        for event in others {
            match open_event(Event::Encoded(*event), scope, format, 0, Some(&leader)) {
                Ok(member) => {
                    members.push(member);
                    places.push(Some(members.len()));
                }
                Err(OpenError::Unsupported(_)) => places.push(None),
                Err(e) => return Err(e),
            }
        }
        // SAFETY: an ioctl without argument on our own event. It cannot fail; else readings would show no counted time.
        unsafe { libc::ioctl(leader.as_raw_fd(), PERF_EVENT_IOC_ENABLE, 0) };
        Ok(Self {
            leader,
            _members: members,
            places,
        })
    }

    /// Reads all its counters at one time.
    ///
    /// # Errors
    /// As `read(2)`; `IO` when the group lost its place on the processor permanently.
    pub fn read(&self) -> Result<GroupCount, Errno> {
        const WORDS: usize = 3 + GROUP_EVENTS_MAX;
        let (words, n) = read_words::<WORDS>(&self.leader)?;
        let [count, enabled_ns, running_ns, values @ ..] = &words;
        let delivered = usize::try_from(*count).unwrap_or(usize::MAX);
        // The kernel answers 0 bytes for a group in the error state.
        if n < 24 || delivered > GROUP_EVENTS_MAX || n != (3 + delivered) * 8 {
            return Err(Errno::IO);
        }
        Ok(GroupCount {
            enabled_ns: *enabled_ns,
            running_ns: *running_ns,
            values: self
                .places
                .iter()
                .map(|place| {
                    place
                        .filter(|p| *p < delivered)
                        .and_then(|p| values.get(p).copied())
                })
                .collect(),
        })
    }

    /// Descriptors that it holds.
    pub fn descriptors(&self) -> usize {
        self.places.iter().flatten().count()
    }
}

impl GroupCount {
    /// Counts since an earlier reading of the same group.
    pub fn since(&self, earlier: &Self) -> Self {
        Self {
            enabled_ns: self.enabled_ns.saturating_sub(earlier.enabled_ns),
            running_ns: self.running_ns.saturating_sub(earlier.running_ns),
            values: self
                .values
                .iter()
                .zip(&earlier.values)
                .map(|(now, then)| Some((*now)?.saturating_sub((*then)?)))
                .collect(),
        }
    }

    /// One of the events with the times of the group, for extrapolation.
    pub fn count(&self, event: usize) -> Option<Count> {
        Some(Count {
            value: self.values.get(event).copied().flatten()?,
            enabled_ns: self.enabled_ns,
            running_ns: self.running_ns,
        })
    }
}

impl Counter {
    /// Opens a counter; it counts from now on.
    ///
    /// # Errors
    /// [`OpenError`].
    pub fn open(event: Event<'_>, scope: Scope) -> Result<Self, OpenError> {
        open_event(event, scope, TIMES, 0, None).map(Self)
    }

    /// Reads it.
    ///
    /// # Errors
    /// As `read(2)`.
    pub fn read(&self) -> Result<Count, Errno> {
        let ([value, enabled_ns, running_ns], n) = read_words::<3>(&self.0)?;
        // The kernel answers 0 bytes for a counter in the error state (a hardware counter that lost its place).
        if n != 24 {
            return Err(Errno::IO);
        }
        Ok(Count {
            value,
            enabled_ns,
            running_ns,
        })
    }

    /// Stops counting; the value stays readable. Cheap, unlike closing.
    pub fn disable(&self) {
        // SAFETY: an ioctl without argument on our own perf event. It cannot fail, and closing also stops the counter.
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

/// Reason why an event of a thread could not be opened.
pub(super) fn classify_thread(errno: Errno) -> OpenError {
    classify(errno, Scope::Thread(0))
}

#[cfg(test)]
mod tests {
    use super::*;

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
    fn the_error_of_turns_falls_with_their_number_and_is_none_without_turns() {
        let of = |running_ns| {
            Count {
                value: 1,
                enabled_ns: 1_000_000_000,
                running_ns,
            }
            .relative_error()
        };
        assert_eq!(of(1_000_000_000), 0.0);
        // 62.5 turns of 4 ms, three quarters missed.
        assert!((of(250_000_000) - (0.75f64 / 62.5).sqrt()).abs() < 1e-12);
        assert!(of(10_000_000) > of(100_000_000) && of(0).is_infinite());
        assert_eq!(Count::default().relative_error(), 0.0);
        assert_eq!(Count::default().coverage(), 1.0);
    }

    /// A group over events that every kernel counts.
    fn software() -> Group {
        let events = [
            Encoding::TASK_CLOCK,
            Encoding::PAGE_FAULTS,
            Encoding::CONTEXT_SWITCHES,
        ];
        Group::open(
            &events,
            Scope::Thread(rustix::thread::gettid().as_raw_nonzero().get()),
        )
        .unwrap()
    }

    #[test]
    fn a_group_counts_its_events_together() {
        let group = software();
        assert_eq!(group.descriptors(), 3);
        let before = group.read().unwrap();
        let pages = 300;
        let memory = crate::memory::ScratchMapping::new(1);
        if let Ok(mut memory) = memory {
            memory.touch(pages * 4096);
        }
        let mut x = 0u64;
        for i in 0..2_000_000u64 {
            x = std::hint::black_box(x ^ i);
        }
        let counted = group.read().unwrap().since(&before);
        assert!(counted.count(0).unwrap().value > 100_000, "{counted:?} {x}");
        // All members count from the beginning, also those that the kernel would only add at its next turn.
        assert!(counted.count(1).unwrap().value >= 1, "{counted:?}");
        assert_eq!(counted.count(0).unwrap().coverage(), 1.0);
        assert!(counted.count(3).is_none());
    }

    #[test]
    fn an_event_that_the_machine_lacks_is_left_out_of_its_group() {
        let nonsense = Encoding {
            source: 1,
            config: 9_999,
            config1: 0,
            user_only: false,
        };
        let me = Scope::Thread(rustix::thread::gettid().as_raw_nonzero().get());
        let group = Group::open(&[Encoding::TASK_CLOCK, nonsense, Encoding::PAGE_FAULTS], me).unwrap();
        let count = group.read().unwrap();
        assert_eq!(count.values.len(), 3);
        assert!(count.values[0].is_some() && count.values[1].is_none() && count.values[2].is_some());
        assert!(matches!(
            Group::open(&[nonsense], me),
            Err(OpenError::Unsupported(_))
        ));
        assert!(matches!(Group::open(&[], me), Err(OpenError::Unsupported(_))));
    }

    #[test]
    fn threads_made_later_count_for_the_thread_that_made_them() {
        let group = software();
        let before = group.read().unwrap();
        let worker = std::thread::spawn(|| {
            let mut x = 0u64;
            for i in 0..20_000_000u64 {
                x = std::hint::black_box(x ^ i);
            }
            x
        });
        let x = worker.join().unwrap();
        let after = group.read().unwrap().since(&before);
        // The clock of this thread alone, which only waited, would be far below.
        assert!(after.count(0).unwrap().value > 2_000_000, "{after:?} {x}");
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
