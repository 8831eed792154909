//! Counts executions of many instructions at once: a BPF program attached to places of a file through one
//! `uprobe_multi` link (bpf(2); Linux 6.6). The cookie of a place is the number of its counter.
//!
//! Unlike one perf event per place ([`crate::perf`]), this opens and closes in bulk: the kernel waits once per link.
//! Link, program and map live as long as their descriptors, so the kernel keeps nothing after this process ends.
//!
//! Memory layouts are those of `union bpf_attr` and `struct bpf_insn` in include/uapi/linux/bpf.h.

use crate::perf::{OpenError, classify_thread};
use rustix::io::Errno;
use std::ffi::CStr;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::{Mutex, PoisonError};

/// Most places of one link.
pub const PLACES_MAX: usize = 512;
/// Most CPUs that a kernel can be built for (`CONFIG_NR_CPUS`: 8,192 on x86-64, less elsewhere).
const CPUS_MAX: usize = 8192;

const BPF_MAP_CREATE: libc::c_int = 0;
const BPF_MAP_LOOKUP_ELEM: libc::c_int = 1;
const BPF_PROG_LOAD: libc::c_int = 5;
const BPF_LINK_CREATE: libc::c_int = 28;
const BPF_MAP_TYPE_PERCPU_ARRAY: u32 = 6;
const BPF_PROG_TYPE_KPROBE: u32 = 2;
const BPF_TRACE_UPROBE_MULTI: u32 = 48;
const HELPER_LOOKUP: i32 = 1;
const HELPER_COOKIE: i32 = 174;

/// One instruction: operation, destination and source register, offset, number.
#[derive(Clone, Copy)]
struct Instruction(u8, u8, u8, i16, i32);

impl Instruction {
    fn encode(self) -> [u8; 8] {
        let Self(operation, destination, source, offset, number) = self;
        let [o0, o1] = offset.to_ne_bytes();
        let [n0, n1, n2, n3] = number.to_ne_bytes();
        // The two registers are bit fields, in the order of the bytes.
        let registers = if cfg!(target_endian = "little") {
            source << 4 | destination
        } else {
            destination << 4 | source
        };
        [operation, registers, o0, o1, n0, n1, n2, n3]
    }
}

/// The program: `counters[cookie] += 1`.
fn program(map: i32) -> Vec<u8> {
    [
        // r0 = bpf_get_attach_cookie(ctx); r1 holds the context from the start.
        Instruction(0x85, 0, 0, 0, HELPER_COOKIE),
        // *(u32 *)(r10 - 4) = r0
        Instruction(0x63, 10, 0, -4, 0),
        // r1 = the map (two slots; source 1 says that the number is a descriptor)
        Instruction(0x18, 1, 1, 0, map),
        Instruction(0, 0, 0, 0, 0),
        // r2 = r10 - 4
        Instruction(0xbf, 2, 10, 0, 0),
        Instruction(0x07, 2, 0, 0, -4),
        // r0 = bpf_map_lookup_elem(r1, r2)
        Instruction(0x85, 0, 0, 0, HELPER_LOOKUP),
        // if r0 == 0 goto the end
        Instruction(0x15, 0, 0, 2, 0),
        // *(u64 *)r0 += 1, atomically
        Instruction(0xb7, 1, 0, 0, 1),
        Instruction(0xdb, 0, 1, 0, 0),
        // return 0
        Instruction(0xb7, 0, 0, 0, 0),
        Instruction(0x95, 0, 0, 0, 0),
    ]
    .into_iter()
    .flat_map(Instruction::encode)
    .collect()
}

/// `union bpf_attr`, as zeroes with fields written into them.
#[repr(C, align(8))]
struct Attributes([u8; 128]);

impl Attributes {
    fn new() -> Self {
        Self([0; 128])
    }
    fn u32(mut self, at: usize, value: u32) -> Self {
        if let Some(place) = self.0.get_mut(at..at + 4) {
            place.copy_from_slice(&value.to_ne_bytes());
        }
        self
    }
    fn u64(mut self, at: usize, value: u64) -> Self {
        if let Some(place) = self.0.get_mut(at..at + 8) {
            place.copy_from_slice(&value.to_ne_bytes());
        }
        self
    }
    fn name(mut self, at: usize, name: &[u8]) -> Self {
        // At most 15 bytes and a zero.
        for (to, from) in self.0.iter_mut().skip(at).take(15).zip(name) {
            *to = *from;
        }
        self
    }
}

/// bpf(2).
///
/// # Safety
/// Addresses in the attributes point to live memory, as long as the command reads or writes there.
unsafe fn bpf(command: libc::c_int, attributes: &Attributes) -> Result<libc::c_int, Errno> {
    // SAFETY: the attributes live across the call and have the stated size; the caller vouches for their pointers.
    let result = unsafe {
        libc::syscall(
            libc::SYS_bpf,
            command,
            &raw const attributes.0,
            size_of::<Attributes>() as libc::c_uint,
        )
    };
    match i32::try_from(result) {
        Ok(n) if n >= 0 => Ok(n),
        _ => Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::INVAL)),
    }
}

/// Possible CPUs by the kernel's list (`0-7`): it writes a counter for each. `None`: no list, or too many.
fn possible_cpus(list: &str) -> Option<usize> {
    last_cpu(list)?.checked_add(1).filter(|cpus| *cpus <= CPUS_MAX)
}

fn last_cpu(list: &str) -> Option<usize> {
    list.trim().rsplit(['-', ',']).next()?.parse().ok()
}

/// One of the three commands that return a new descriptor.
///
/// # Safety
/// As of [`bpf`]; the command is one of those.
unsafe fn descriptor(command: libc::c_int, attributes: &Attributes) -> Result<OwnedFd, Errno> {
    // SAFETY: as the caller vouches.
    let fd = unsafe { bpf(command, attributes) }?;
    // SAFETY: a descriptor made for us, without other users.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Result of two impossible links: on a directory (`EBADF` if known), on process -1 (`EINVAL` if by process).
fn verdict(directory: Option<Errno>, nobody: Option<Errno>) -> Result<(), OpenError> {
    match (directory, nobody) {
        (Some(Errno::BADF), Some(Errno::INVAL)) => Ok(()),
        (Some(Errno::BADF), other) => Err(OpenError::Unsupported(other.unwrap_or(Errno::INVAL))),
        (Some(other), _) => Err(match classify_thread(other) {
            OpenError::Vanished => OpenError::Unsupported(other),
            known => known,
        }),
        (None, _) => Err(OpenError::Unsupported(Errno::INVAL)),
    }
}

/// Counters by number, and the program that raises them. Each CPU has its own counter, so that CPUs do not contend.
#[derive(Debug)]
pub struct Counters {
    map: OwnedFd,
    program: OwnedFd,
    size: u32,
    /// Buffer of a reading: room for more CPUs than any kernel can be built for.
    values: Mutex<Vec<u64>>,
    cpus: usize,
}

/// Places being counted; dropping it removes the breakpoints (one wait of some 40 ms for all of them).
#[derive(Debug)]
pub struct Link {
    _link: OwnedFd,
}

impl Counters {
    /// Creates `size` counters, all zero.
    ///
    /// # Errors
    /// [`OpenError`]: `Denied` without CAP_BPF and CAP_PERFMON. `Unsupported` before Linux 6.6, and with too many CPUs.
    pub fn new(size: u32) -> Result<Self, OpenError> {
        let cpus = std::fs::read_to_string("/sys/devices/system/cpu/possible")
            .ok()
            .and_then(|text| possible_cpus(&text))
            .ok_or(OpenError::Unsupported(Errno::TOOBIG))?;
        let attributes = Attributes::new()
            .u32(0, BPF_MAP_TYPE_PERCPU_ARRAY)
            .u32(4, 4)
            .u32(8, 8)
            .u32(12, size.max(1))
            .name(28, b"homeostat");
        // SAFETY: the attributes hold no addresses; the command makes a map.
        let map = unsafe { descriptor(BPF_MAP_CREATE, &attributes) }.map_err(classify_thread)?;
        let code = program(map.as_raw_fd());
        // The kernel checks the licence of the program: both of this project's are compatible.
        let license = c"Dual MIT/GPL";
        let attributes = Attributes::new()
            .u32(0, BPF_PROG_TYPE_KPROBE)
            .u32(4, (code.len() / 8) as u32)
            .u64(8, code.as_ptr() as u64)
            .u64(16, license.as_ptr() as u64)
            .name(48, b"homeostat")
            .u32(68, BPF_TRACE_UPROBE_MULTI);
        // SAFETY: code of the stated length and a text that ends with a zero, both alive here; it makes a program.
        let program = unsafe { descriptor(BPF_PROG_LOAD, &attributes) }.map_err(classify_thread)?;
        Ok(Self {
            map,
            program,
            size: size.max(1),
            values: Mutex::new(vec![0; CPUS_MAX]),
            cpus,
        })
    }

    /// Whether this kernel and this user can count many places at once, and by process.
    ///
    /// # Errors
    /// As of [`Self::new`] and [`Self::reliable`].
    pub fn possible() -> Result<(), OpenError> {
        Self::new(1)?.reliable()
    }

    /// How many counters there are.
    pub fn size(&self) -> u32 {
        self.size
    }

    /// Counts places of a file (offset and number of the counter) from now on: of one process (all threads, no
    /// children) or all.
    ///
    /// # Errors
    /// [`OpenError`]: `Vanished` when there is no such process, `Unsupported` when one of the places cannot be probed.
    pub fn attach(
        &self,
        file: &CStr,
        places: &[(u64, u32)],
        process: Option<i32>,
    ) -> Result<Link, OpenError> {
        if places.is_empty() || places.len() > PLACES_MAX || places.iter().any(|p| p.1 >= self.size) {
            return Err(OpenError::Unsupported(Errno::INVAL));
        }
        let offsets: Vec<u64> = places.iter().map(|p| p.0).collect();
        let cookies: Vec<u64> = places.iter().map(|p| u64::from(p.1)).collect();
        self.attach_all(file, &offsets, &cookies, &[], process)
    }

    /// Counts static probes with one counter: offsets, each with that of its semaphore (0 = none), raised meanwhile.
    ///
    /// # Errors
    /// As of [`Self::attach`].
    pub fn attach_static(
        &self,
        file: &CStr,
        sites: &[(u64, u32)],
        number: u32,
        process: Option<i32>,
    ) -> Result<Link, OpenError> {
        if sites.is_empty() || sites.len() > PLACES_MAX || number >= self.size {
            return Err(OpenError::Unsupported(Errno::INVAL));
        }
        let offsets: Vec<u64> = sites.iter().map(|s| s.0).collect();
        let cookies = vec![u64::from(number); sites.len()];
        let semaphores: Vec<u64> = sites.iter().map(|s| u64::from(s.1)).collect();
        let none = semaphores.iter().all(|s| *s == 0);
        self.attach_all(
            file,
            &offsets,
            &cookies,
            if none { &[] } else { &semaphores },
            process,
        )
    }

    fn attach_all(
        &self,
        file: &CStr,
        offsets: &[u64],
        cookies: &[u64],
        semaphores: &[u64],
        process: Option<i32>,
    ) -> Result<Link, OpenError> {
        let process = match process.map(u32::try_from) {
            None => 0,
            Some(Ok(pid)) if pid > 0 => pid,
            Some(_) => return Err(OpenError::Vanished),
        };
        let link = self
            .link(file, offsets, cookies, semaphores, process)
            .map_err(classify_thread)?;
        Ok(Link { _link: link })
    }

    fn link(
        &self,
        file: &CStr,
        offsets: &[u64],
        cookies: &[u64],
        semaphores: &[u64],
        process: u32,
    ) -> Result<OwnedFd, Errno> {
        let mut count = offsets.len().min(cookies.len());
        let semaphores = if semaphores.is_empty() {
            0
        } else {
            count = count.min(semaphores.len());
            semaphores.as_ptr() as u64
        };
        let attributes = Attributes::new()
            .u32(0, self.program.as_raw_fd() as u32)
            .u32(8, BPF_TRACE_UPROBE_MULTI)
            .u64(16, file.as_ptr() as u64)
            .u64(24, offsets.as_ptr() as u64)
            .u64(32, semaphores)
            .u64(40, cookies.as_ptr() as u64)
            .u32(48, count as u32)
            .u32(56, process);
        // SAFETY: a path that ends with a zero and lists of at least the stated length (no address: none), all alive.
        unsafe { descriptor(BPF_LINK_CREATE, &attributes) }
    }

    /// Whether this kernel counts many places at once, and by process. The first such kernels counted only a thread.
    ///
    /// # Errors
    /// [`OpenError`]: `Unsupported` when it does not, or not so.
    pub fn reliable(&self) -> Result<(), OpenError> {
        // Neither makes a link: a directory holds no code, and no process is -1.
        let directory = self.link(c"/", &[0], &[0], &[], 0).err();
        let nobody = self.link(c"/", &[0], &[0], &[], u32::MAX).err();
        verdict(directory, nobody)
    }

    /// The present value of a counter.
    ///
    /// # Errors
    /// As `bpf(2)`: `NOENT` for a number beyond the size.
    pub fn read(&self, number: u32) -> Result<u64, Errno> {
        let mut values = self.values.lock().unwrap_or_else(PoisonError::into_inner);
        let attributes = Attributes::new()
            .u32(0, self.map.as_raw_fd() as u32)
            .u64(8, (&raw const number) as u64)
            .u64(16, values.as_mut_ptr() as u64);
        // SAFETY: a key of four bytes, and eight bytes for each CPU that a kernel can be built for, held by the lock.
        unsafe { bpf(BPF_MAP_LOOKUP_ELEM, &attributes) }?;
        Ok(values.iter().take(self.cpus).fold(0u64, |sum, value| {
            // SAFETY: an element of the vector; volatile, because the kernel wrote it behind the compiler's back.
            sum.wrapping_add(unsafe { std::ptr::read_volatile(value) })
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_program_is_made_of_whole_instructions_and_names_its_map() {
        let code = program(0x1234);
        assert_eq!(code.len() % 8, 0);
        assert_eq!(code[2 * 8..2 * 8 + 8], [0x18, 0x11, 0, 0, 0x34, 0x12, 0, 0]);
        assert_eq!(code[code.len() - 8], 0x95);
    }

    #[test]
    fn the_last_cpu_of_a_list_is_found() {
        assert_eq!(last_cpu("0-7\n"), Some(7));
        assert_eq!(last_cpu("0\n"), Some(0));
        assert_eq!(last_cpu("0-3,8-11"), Some(11));
        assert_eq!(last_cpu("\n"), None);
        assert_eq!(possible_cpus("0-7\n"), Some(8));
        assert_eq!(possible_cpus("0-8191"), Some(CPUS_MAX));
        // There would be no room for what the kernel writes.
        assert_eq!(possible_cpus("0-8192"), None);
        assert_eq!(possible_cpus(""), None);
    }

    #[test]
    fn kernels_that_count_threads_for_processes_are_not_used() {
        let says = |directory, nobody| verdict(Some(directory), Some(nobody));
        assert_eq!(says(Errno::BADF, Errno::INVAL), Ok(()));
        // Linux 6.6 to 6.9: the process is not looked at before the path.
        assert!(matches!(
            says(Errno::BADF, Errno::BADF),
            Err(OpenError::Unsupported(_))
        ));
        // Before 6.6 there are no such links.
        assert!(matches!(
            says(Errno::INVAL, Errno::INVAL),
            Err(OpenError::Unsupported(_))
        ));
        assert!(matches!(
            says(Errno::PERM, Errno::PERM),
            Err(OpenError::Denied(_))
        ));
        assert!(matches!(
            says(Errno::NOMEM, Errno::INVAL),
            Err(OpenError::Busy(_))
        ));
        assert!(verdict(None, Some(Errno::INVAL)).is_err());
    }

    #[test]
    fn counters_begin_at_zero_where_they_can_be_made_at_all() {
        let counters = match Counters::new(3) {
            Ok(counters) => counters,
            Err(OpenError::Denied(_) | OpenError::Unsupported(_) | OpenError::Busy(_)) => {
                eprintln!("skipped: this kernel or this user cannot load a BPF program");
                return;
            }
            Err(e) => panic!("{e}"),
        };
        assert_eq!(counters.size(), 3);
        assert_eq!((0..3).map(|n| counters.read(n).unwrap()).sum::<u64>(), 0);
        assert!(counters.read(3).is_err());
        let none = c"/no/such/file";
        assert!(counters.attach(none, &[(0, 0)], None).is_err());
        assert!(counters.attach(none, &[], None).is_err());
        assert!(
            counters.attach(none, &[(0, 3)], None).is_err(),
            "a counter that is not there"
        );
        assert!(matches!(
            counters.attach(none, &[(0, 0)], Some(-1)),
            Err(OpenError::Vanished)
        ));
    }
}
