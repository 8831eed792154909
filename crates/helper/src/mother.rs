//! The mother: a small process that forks helpers, without data of workloads.

use crate::wire::Line;
use crate::{Domain, Service, canary};
use homeostat_kernel::helper::{allow_only, close_all_but, exit_now, fork, plain_signals, standard_is};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::process::{
    DumpableBehavior, Pid, PidfdFlags, Resource, Rlimit, Signal, WaitId, WaitIdOptions, getrlimit,
    pidfd_open, pidfd_send_signal, set_dumpable_behavior, set_parent_process_death_signal, setrlimit, waitid,
};
use rustix::thread::{CapabilitySet, CapabilitySets, capabilities, set_capabilities, set_no_new_privs};
use serde::{Deserialize, Serialize};
use std::os::fd::{AsFd, OwnedFd};

/// Most seconds of CPU time of a helper's process in its life: weeks at 50 µs a reading. Then it is replaced.
const CPU_SECONDS: u64 = 60;
/// Most memory of a helper's process beyond the program's at its start: a page of metrics has 8 MiB, held twice.
const MEMORY: u64 = 64 * 1024 * 1024;
/// Most descriptors: one progress file for each process (512) of each measured workload (8).
const DESCRIPTORS: u64 = 4096;

/// Capabilities of the opener: inspect any process, traverse any directory, connect to any socket (which requires write
/// permission), and enter the network namespace of a container.
const OF_OPENER: CapabilitySet = CapabilitySet::SYS_PTRACE
    .union(CapabilitySet::DAC_READ_SEARCH)
    .union(CapabilitySet::DAC_OVERRIDE)
    .union(CapabilitySet::SYS_ADMIN);

/// Request of the daemon to the mother.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Make {
    /// Make a helper for this domain.
    Helper(Domain),
    /// Make a memory canary.
    Canary,
}

/// Answer of the mother.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Answer {
    /// With it come the daemon's end of the line and a descriptor for each process.
    Made,
    /// The canary's process number. With it come the daemon's end of the line, a descriptor for the process, and the
    /// file with its counts.
    Canary(i32),
    Failed(i32),
}

/// The daemon's handle of a mother. Dropping it ends the mother and her helpers.
#[derive(Debug)]
pub(super) struct Mother {
    /// Our end of the line to the mother.
    pub(super) line: Line,
    /// A descriptor for the mother's process.
    pub(super) process: OwnedFd,
}

impl Drop for Mother {
    fn drop(&mut self) {
        // An error means that she has ended. She opens no file of a workload, so nothing keeps her from ending.
        let _ = pidfd_send_signal(&self.process, Signal::KILL);
        let _ = waitid(WaitId::PidFd(self.process.as_fd()), WaitIdOptions::EXITED);
    }
}

pub(super) fn fork_mother(service: &'static Service) -> Result<Mother, Errno> {
    let (ours, hers) = Line::pair()?;
    let us = rustix::process::getpid();
    // The kernel sends the signal when the forking *thread* ends. So this is only for a main thread, which ends last.
    let dies_with_us = rustix::thread::gettid() == us;
    let pid = fork(|| {
        let _ = begin(&[&hers.0], c"homeostat-mother", dies_with_us.then_some(us))
            .and_then(|()| keep_only(OF_OPENER))
            .and_then(|()| be_mother(&hers, service));
    })?;
    Ok(Mother {
        line: ours,
        process: descriptor_of(pid)?,
    })
}

fn descriptor_of(pid: i32) -> Result<OwnedFd, Errno> {
    let pid = Pid::from_raw(pid).ok_or(Errno::SRCH)?;
    pidfd_open(pid, PidfdFlags::empty())
}

/// First steps of every process here.
fn begin(kept: &[&OwnedFd], name: &std::ffi::CStr, parent: Option<Pid>) -> Result<(), Errno> {
    plain_signals();
    if let Some(parent) = parent {
        set_parent_process_death_signal(Some(Signal::KILL))?;
        if rustix::process::getppid() != Some(parent) {
            exit_now(0);
        }
    }
    close_all_but(kept)?;
    // No end of a pipe stays open because of us.
    let nothing = rustix::fs::open("/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
    standard_is(&nothing)?;
    rustix::thread::set_name(name)?;
    rustix::process::chdir("/")?;
    set_dumpable_behavior(DumpableBehavior::NotDumpable)?;
    set_no_new_privs(true)
}

fn keep_only(kept: CapabilitySet) -> Result<(), Errno> {
    let permitted = capabilities(None)?.permitted & kept;
    set_capabilities(
        None,
        CapabilitySets {
            effective: permitted,
            permitted,
            inheritable: CapabilitySet::empty(),
        },
    )
}

fn be_mother(line: &Line, service: &Service) -> Result<(), Errno> {
    loop {
        // An error means that the daemon has ended.
        let made = match line.receive(None)? {
            Make::Helper(domain) => make(domain, service)
                .map(|(ours, [opener, speaker])| (Answer::Made, [ours.0, opener, speaker])),
            Make::Canary => make_canary().map(|(pid, descriptors)| (Answer::Canary(pid), descriptors)),
        };
        match made {
            Ok((answer, [ours, one, other])) => {
                line.send(&answer, &[ours.as_fd(), one.as_fd(), other.as_fd()], None)?;
            }
            Err(e) => line.send(&Answer::Failed(e.raw_os_error()), &[], None)?,
        }
    }
}

/// Forks a memory canary. Returns its process number, the daemon's end of its line, a descriptor for the process, and
/// the file with its counts.
fn make_canary() -> Result<(i32, [OwnedFd; 3]), Errno> {
    let us = rustix::process::getpid();
    let (daemon, to_daemon) = Line::pair()?;
    let counts = canary::counts_file()?;
    let pid = fork(|| {
        let _ = begin(&[&to_daemon.0, &counts], c"homeostat-memory", Some(us))
            .and_then(|()| canary::prepare())
            .and_then(|own| {
                limit(canary::MEMORY, canary::CPU_SECONDS, canary::COUNTS_BYTES)?;
                keep_only(CapabilitySet::empty())?;
                let memory = canary::Memory::reserve()?;
                allow_only(canary::CALLS)?;
                canary::serve(&to_daemon, &counts, &own, memory)
            });
    })?;
    Ok((pid, [daemon.0, descriptor_of(pid)?, counts]))
}

fn make(domain: Domain, service: &Service) -> Result<(Line, [OwnedFd; 2]), Errno> {
    let us = rustix::process::getpid();
    let (daemon, to_daemon) = Line::pair()?;
    let (to_opener, to_speaker) = Line::pair()?;
    let opener = fork(|| {
        let _ = begin(&[&to_speaker.0], c"homeostat-open", Some(us))
            .and_then(|()| limit(MEMORY, CPU_SECONDS, 0))
            .and_then(|()| allow_only(&[USUAL, OPENING].concat()))
            .and_then(|()| (service.open)(&to_speaker, domain));
    })?;
    let opener = descriptor_of(opener)?;
    let speaker = fork(|| {
        let _ = begin(&[&to_daemon.0, &to_opener.0], c"homeostat-speak", Some(us))
            .and_then(|()| limit(MEMORY, CPU_SECONDS, 0))
            .and_then(|()| confine_speaker())
            .and_then(|()| (service.speak)(&to_daemon, to_opener));
    })?;
    Ok((daemon, [opener, descriptor_of(speaker)?]))
}

/// Restricts a speaker to its needs: no capability, and system calls on open descriptors.
pub fn confine_speaker() -> Result<(), Errno> {
    set_no_new_privs(true)?;
    keep_only(CapabilitySet::empty())?;
    allow_only(USUAL)
}

/// Limits this process: bytes beyond the program's memory at its start, seconds of CPU time, bytes of a file.
fn limit(memory: u64, cpu_seconds: u64, file: u64) -> Result<(), Errno> {
    let set = |resource, most: u64| {
        let may = getrlimit(resource).maximum.unwrap_or(u64::MAX);
        let most = Some(most.min(may));
        setrlimit(
            resource,
            Rlimit {
                current: most,
                maximum: most,
            },
        )
    };
    // Field 1 is the size in pages (proc_pid_statm(5)).
    let pages: u64 = std::fs::read_to_string("/proc/self/statm")
        .ok()
        .and_then(|text| text.split(' ').next()?.parse().ok())
        .ok_or(Errno::IO)?;
    set(Resource::As, pages * rustix::param::page_size() as u64 + memory)?;
    set(Resource::Cpu, cpu_seconds)?;
    set(Resource::Nofile, DESCRIPTORS)?;
    set(Resource::Core, 0)?;
    set(Resource::Fsize, file)
}

/// Calls of both processes: their lines, memory, clocks, and an end. Neither may write to a file.
const USUAL: &[libc::c_long] = &[
    libc::SYS_read,
    libc::SYS_pread64,
    libc::SYS_recvfrom,
    libc::SYS_recvmsg,
    libc::SYS_sendmsg,
    libc::SYS_sendto,
    libc::SYS_close,
    libc::SYS_ppoll,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_poll,
    libc::SYS_fstat,
    libc::SYS_lseek,
    libc::SYS_getsockopt,
    libc::SYS_brk,
    libc::SYS_mmap,
    libc::SYS_munmap,
    libc::SYS_mremap,
    libc::SYS_madvise,
    libc::SYS_mprotect,
    libc::SYS_futex,
    libc::SYS_clock_gettime,
    libc::SYS_clock_nanosleep,
    libc::SYS_restart_syscall,
    libc::SYS_getrandom,
    libc::SYS_getpid,
    libc::SYS_gettid,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_sigaltstack,
    libc::SYS_exit,
    libc::SYS_exit_group,
];

/// Further calls of the opener: files of `/proc`, paths, connections, namespaces.
const OPENING: &[libc::c_long] = &[
    #[cfg(target_arch = "x86_64")]
    libc::SYS_open,
    libc::SYS_openat,
    libc::SYS_openat2,
    libc::SYS_readlinkat,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_readlink,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_stat,
    libc::SYS_newfstatat,
    libc::SYS_statx,
    libc::SYS_fstatfs,
    libc::SYS_getdents64,
    libc::SYS_fcntl,
    libc::SYS_ioctl,
    libc::SYS_socket,
    libc::SYS_connect,
    libc::SYS_setsockopt,
    libc::SYS_setns,
    libc::SYS_geteuid,
];
