//! System calls for helper processes: fork, a separate table of descriptors, and a filter of system calls.

use rustix::io::Errno;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

/// Forks a process with one thread that runs `child`, and returns its process id. The child ends with `child`, without
/// the program's exit handlers and without a return to the caller's code. A panic ends it with status 101.
///
/// # Errors
/// The kernel made no process.
pub fn fork(child: impl FnOnce()) -> Result<i32, Errno> {
    // SAFETY: the C library's fork handlers make allocation safe; the child takes no lock, and leaves by `_exit`.
    match unsafe { libc::fork() } {
        -1 => Err(last()),
        0 => {
            let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(child));
            exit_now(if outcome.is_ok() { 0 } else { 101 })
        }
        pid => Ok(pid),
    }
}

/// Ends this process at once.
pub fn exit_now(status: i32) -> ! {
    // SAFETY: takes a number and does not return.
    unsafe { libc::_exit(status) }
}

/// Closes all descriptors of this process but the standard and given ones.
///
/// # Errors
/// The kernel has no `close_range` (before Linux 5.9) and `/proc/self/fd` cannot be read.
pub fn close_all_but(kept: &[&OwnedFd]) -> Result<(), Errno> {
    let mut kept: Vec<u32> = kept
        .iter()
        .filter_map(|fd| fd.as_raw_fd().try_into().ok())
        .collect();
    kept.sort_unstable();
    let mut from = 3;
    for fd in kept.into_iter().chain([u32::MAX]) {
        if fd > from {
            close_between(from, if fd == u32::MAX { fd } else { fd - 1 })?;
        }
        from = fd.saturating_add(1).max(from);
    }
    Ok(())
}

/// Replaces standard input, output and error of this process by that file.
///
/// # Errors
/// The kernel refuses.
pub fn standard_is(file: &OwnedFd) -> Result<(), Errno> {
    for standard in 0..3 {
        // SAFETY: takes numbers; owners of the standard descriptors do not depend on the file behind them.
        if unsafe { libc::dup2(file.as_raw_fd(), standard) } < 0 {
            return Err(last());
        }
    }
    Ok(())
}

fn close_between(first: u32, last_one: u32) -> Result<(), Errno> {
    // SAFETY: takes numbers. Owners of these descriptors are no longer used in this process.
    let done = unsafe { libc::syscall(libc::SYS_close_range, first, last_one, 0) };
    if done == 0 {
        return Ok(());
    }
    if last() != Errno::NOSYS {
        return Err(last());
    }
    let list: Vec<i32> = std::fs::read_dir("/proc/self/fd")
        .map_err(|_| Errno::NOSYS)?
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .collect();
    for fd in list {
        if u32::try_from(fd).is_ok_and(|fd| (first..=last_one).contains(&fd)) {
            // SAFETY: takes a number; as above.
            unsafe { libc::close(fd) };
        }
    }
    Ok(())
}

/// From now on the kernel reaps children; signals of a terminal or service manager are ignored, others default.
pub fn plain_signals() {
    for signal in 1..=31 {
        let handler = match signal {
            libc::SIGCHLD
            | libc::SIGINT
            | libc::SIGTERM
            | libc::SIGHUP
            | libc::SIGQUIT
            | libc::SIGPIPE
            | libc::SIGUSR1
            | libc::SIGUSR2
            | libc::SIGTSTP => libc::SIG_IGN,
            _ => libc::SIG_DFL,
        };
        // SAFETY: installs no function of ours.
        unsafe { libc::signal(signal, handler) };
    }
    // SAFETY: the set is initialised by `sigemptyset` before it is used.
    unsafe {
        let mut none: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut none);
        libc::sigprocmask(libc::SIG_SETMASK, &raw const none, std::ptr::null_mut());
    }
}

/// The user namespace that owns a namespace, given by its file.
///
/// # Errors
/// `EPERM`: it is not below the caller's own.
pub fn owning_user_namespace(namespace: impl AsFd) -> Result<OwnedFd, Errno> {
    const NS_GET_USERNS: libc::c_ulong = 0xb701;
    descriptor_of(namespace, NS_GET_USERNS)
}

/// The parent of a user namespace.
///
/// # Errors
/// `EPERM`: it is the caller's own, or not below it.
pub fn parent_namespace(namespace: impl AsFd) -> Result<OwnedFd, Errno> {
    const NS_GET_PARENT: libc::c_ulong = 0xb702;
    descriptor_of(namespace, NS_GET_PARENT)
}

fn descriptor_of(namespace: impl AsFd, request: libc::c_ulong) -> Result<OwnedFd, Errno> {
    // SAFETY: these requests take no argument and return a new descriptor.
    let fd = unsafe { libc::ioctl(namespace.as_fd().as_raw_fd(), request as _) };
    if fd < 0 {
        return Err(last());
    }
    // SAFETY: nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// The user who made a user namespace, by its number in the caller's.
///
/// # Errors
/// It is no user namespace.
pub fn namespace_maker(namespace: impl AsFd) -> Result<u32, Errno> {
    const NS_GET_OWNER_UID: libc::c_ulong = 0xb704;
    let mut user: libc::uid_t = 0;
    // SAFETY: the kernel writes one user id there.
    let done = unsafe {
        libc::ioctl(
            namespace.as_fd().as_raw_fd(),
            NS_GET_OWNER_UID as _,
            &raw mut user,
        )
    };
    if done < 0 { Err(last()) } else { Ok(user) }
}

/// Limits this thread and its children to these calls; others fail with `EPERM`, those of other architectures kill.
///
/// # Errors
/// The kernel has no filters, or new privileges were not given up before.
pub fn allow_only(calls: &[libc::c_long]) -> Result<(), Errno> {
    #[cfg(target_arch = "x86_64")]
    const ARCHITECTURE: u32 = 0xc000_003e;
    #[cfg(target_arch = "aarch64")]
    const ARCHITECTURE: u32 = 0xc000_00b7;
    // Offsets in `struct seccomp_data` (include/uapi/linux/seccomp.h).
    const NUMBER: u32 = 0;
    const ARCH: u32 = 4;
    const LOAD: u16 = 0x20;
    const EQUAL: u16 = 0x15;
    const RETURN: u16 = 0x06;
    let instruction = |code, jt, jf, k| libc::sock_filter { code, jt, jf, k };
    let mut program = vec![
        instruction(LOAD, 0, 0, ARCH),
        instruction(EQUAL, 1, 0, ARCHITECTURE),
        instruction(RETURN, 0, 0, libc::SECCOMP_RET_KILL_PROCESS),
        instruction(LOAD, 0, 0, NUMBER),
    ];
    for call in calls {
        let Ok(number) = u32::try_from(*call) else {
            continue;
        };
        program.push(instruction(EQUAL, 0, 1, number));
        program.push(instruction(RETURN, 0, 0, libc::SECCOMP_RET_ALLOW));
    }
    let refused = libc::SECCOMP_RET_ERRNO | libc::EPERM.unsigned_abs();
    program.push(instruction(RETURN, 0, 0, refused));
    let filter = libc::sock_fprog {
        len: u16::try_from(program.len()).map_err(|_| Errno::INVAL)?,
        filter: program.as_mut_ptr(),
    };
    // SAFETY: the kernel copies the program, which lives until the call returns.
    let done = unsafe {
        libc::prctl(
            libc::PR_SET_SECCOMP,
            libc::c_ulong::from(libc::SECCOMP_MODE_FILTER),
            &raw const filter,
        )
    };
    if done == 0 { Ok(()) } else { Err(last()) }
}

fn last() -> Errno {
    Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)
}
