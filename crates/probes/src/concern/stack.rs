//! Reads what a waiting thread does in the kernel, from its kernel stack and its system call.
//!
//! Both texts are readable with ptrace access (root, unless a security module forbids it), even under lockdown, because
//! they hold no memory. Reading takes some microseconds, and only threads in state `D` are read. A process in the
//! middle of an exec blocks readers, so the read has a time limit.

use homeostat_kernel::{Root, files};
use homeostat_sensors::reader::{PATIENCE, Reader};
use std::sync::{LazyLock, Mutex, PoisonError};

/// Separate from the reader of mappings, so that a hung read here does not block those.
static READER: LazyLock<Mutex<Reader>> = LazyLock::new(Mutex::default);

/// `CLONE_VM`: the child shares the address space, so none is copied.
const SHARED: u64 = 0x100;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Waits {
    /// Kernel functions, the innermost first. `None`: not visible on this kernel or to this user.
    stack: Option<String>,
    /// Number and arguments of its system call, with the same `None`.
    call: Option<String>,
}

/// Calls that wait without holding the address space, unless they touch memory.
const PLAIN: [libc::c_long; 20] = [
    libc::SYS_read,
    libc::SYS_pread64,
    libc::SYS_readv,
    libc::SYS_preadv,
    libc::SYS_write,
    libc::SYS_pwrite64,
    libc::SYS_writev,
    libc::SYS_pwritev,
    libc::SYS_fsync,
    libc::SYS_fdatasync,
    libc::SYS_sync_file_range,
    libc::SYS_syncfs,
    libc::SYS_openat,
    libc::SYS_newfstatat,
    libc::SYS_statx,
    libc::SYS_getdents64,
    libc::SYS_unlinkat,
    libc::SYS_renameat,
    libc::SYS_ftruncate,
    libc::SYS_fallocate,
];
/// Parts of names of functions that may hold an address space: page faults, pages pinned for others, changes of the
/// map, exit and exec. (32-bit programs have other call numbers, so their functions decide.)
const HOLDING: [&str; 17] = [
    "fault",
    "get_user_pages",
    "pin_user_pages",
    "gup",
    "mmap",
    "munmap",
    "mremap",
    "remap_file",
    "mprotect",
    "madvise",
    "brk",
    "exec",
    "exit_mm",
    "mmput",
    "copy_process",
    "dup_mm",
    "vm_area",
];

/// Functions in which a thread is frozen on its way out of the kernel.
const FROZEN: [&str; 2] = ["__refrigerator", "get_signal"];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Copies {
    Yes,
    /// Not visible.
    Perhaps,
    No,
}

impl Waits {
    pub(super) fn of(root: &Root, pid: i32, thread: i32) -> Self {
        let root = root.clone();
        let mut reader = READER.lock().unwrap_or_else(PoisonError::into_inner);
        let looked = reader.run(pid, PATIENCE, move || {
            let text = |file| {
                files::text(&root, &format!("/proc/{pid}/task/{thread}/{file}"))
                    .filter(|text| !text.trim().is_empty())
            };
            Self {
                stack: text("stack"),
                call: text("syscall"),
            }
        });
        looked.unwrap_or_default()
    }

    /// Whether it is copying an address space for a new process.
    pub(super) fn copies_memory(&self) -> Copies {
        if let Some(stack) = &self.stack {
            return if ["copy_process", "dup_mm"].iter().any(|name| stack.contains(name)) {
                Copies::Yes
            } else {
                Copies::No
            };
        }
        if self.call_may_copy() {
            Copies::Perhaps
        } else {
            Copies::No
        }
    }

    /// The same by its system call, if visible.
    fn call_may_copy(&self) -> bool {
        let Some(call) = &self.call else {
            return true;
        };
        let mut fields = call.split_ascii_whitespace();
        let number: Option<libc::c_long> = fields.next().and_then(|n| n.parse().ok());
        let flags = fields
            .next()
            .and_then(|n| u64::from_str_radix(n.trim_start_matches("0x"), 16).ok());
        match number {
            Some(libc::SYS_clone) => flags.is_none_or(|flags| flags & SHARED == 0),
            // Its arguments are in memory that is not read.
            Some(libc::SYS_clone3) => true,
            #[cfg(target_arch = "x86_64")]
            Some(libc::SYS_fork) => true,
            _ => false,
        }
    }

    /// Whether it waits without holding its address space, or is frozen on its way out of the kernel (state `D` in
    /// control groups version 1). False if unknown.
    pub(super) fn holds_nothing(&self) -> bool {
        let (Some(stack), Some(call)) = (&self.stack, &self.call) else {
            return false;
        };
        if FROZEN.iter().all(|name| stack.contains(name)) {
            return !HOLDING.iter().any(|name| stack.contains(name));
        }
        let number = call.split_ascii_whitespace().next().and_then(|n| n.parse().ok());
        number.is_some_and(|number: libc::c_long| PLAIN.contains(&number))
            && !HOLDING.iter().any(|name| stack.contains(name))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn waits(stack: &str, call: &str) -> Waits {
        let text = |t: &str| Some(t.to_owned()).filter(|t| !t.is_empty());
        Waits {
            stack: text(stack),
            call: text(call),
        }
    }

    const FSYNC: &str = "[<0>] jbd2_log_wait_commit+0xd3/0x150\n[<0>] ext4_sync_file+0x1a0/0x380\n[<0>] do_fsync+0x38/0x70\n\
                         [<0>] __x64_sys_fsync+0x10/0x20\n[<0>] do_syscall_64+0x5d/0x90\n";
    const WRITE: &str = "[<0>] folio_wait_bit_common+0x13a/0x350\n[<0>] filemap_fault+0x58a/0xb00\n[<0>] __do_fault+0x31/0x130\n\
                         [<0>] do_user_addr_fault+0x1d4/0x6a0\n[<0>] fault_in_readable+0x60/0xe0\n\
                         [<0>] generic_perform_write+0xd2/0x210\n[<0>] __x64_sys_write+0x15/0x20\n";
    const FORK: &str = "[<0>] rwsem_down_write_slowpath+0x27e/0x550\n[<0>] dup_mmap+0xa6/0x6a0\n[<0>] copy_process+0xd4b/0x1c40\n\
                        [<0>] kernel_clone+0x9b/0x3d0\n[<0>] __do_sys_clone+0x65/0x90\n";
    const VFORK: &str =
        "[<0>] kernel_clone+0x27c/0x3d0\n[<0>] __do_sys_vfork+0x4d/0x70\n[<0>] do_syscall_64+0x5d/0x90\n";

    #[test]
    fn who_waits_for_a_disk_alone_holds_nothing_and_who_touches_a_page_on_the_way_may() {
        let call = |n| format!("{n} 0x3 0x0 0x0 0x0 0x0 0x0 0x7ffd 0x401000\n");
        assert!(waits(FSYNC, &call(libc::SYS_fsync)).holds_nothing());
        assert!(!waits(WRITE, &call(libc::SYS_write)).holds_nothing());
        assert!(!waits(FSYNC, &call(libc::SYS_mmap)).holds_nothing());
        assert!(!waits(FSYNC, "-1 0x7ffd 0x401000\n").holds_nothing());
        // What cannot be seen may hold something.
        assert!(!waits("", &call(libc::SYS_fsync)).holds_nothing());
        assert!(!waits(FSYNC, "").holds_nothing());
        // Frozen on its way out, and in the middle of a page fault.
        let frozen = "[<0>] __refrigerator+0xd6/0x170\n[<0>] get_signal+0x8f1/0x930\n[<0>] exit_to_user_mode_loop+0x80/0x130\n";
        assert!(waits(frozen, &call(libc::SYS_mmap)).holds_nothing());
        assert!(!waits(&format!("{frozen}{WRITE}"), &call(libc::SYS_write)).holds_nothing());
        assert!(!waits(VFORK, &call(libc::SYS_clone)).holds_nothing());
    }

    #[test]
    fn who_copies_an_address_space_is_told_from_who_shares_it() {
        assert_eq!(waits(FORK, "").copies_memory(), Copies::Yes);
        assert_eq!(waits(VFORK, "").copies_memory(), Copies::No);
        assert_eq!(waits(FSYNC, "").copies_memory(), Copies::No);
        // Without the stack the call tells what it cannot be.
        let clone = |flags: u64| {
            format!(
                "{} {flags:#x} 0x0 0x0 0x0 0x0 0x0 0x7ffd 0x4010\n",
                libc::SYS_clone
            )
        };
        let by_call = |call: &str| waits("", call).copies_memory();
        assert_eq!(by_call(&clone(0x0120_0011)), Copies::Perhaps);
        assert_eq!(by_call(&clone(0x4111)), Copies::No);
        assert_eq!(
            by_call(&format!("{} 0x7ffd 0x58\n", libc::SYS_clone3)),
            Copies::Perhaps
        );
        assert_eq!(by_call(&format!("{} 0x3\n", libc::SYS_fsync)), Copies::No);
        assert_eq!(by_call(""), Copies::Perhaps);
    }
}
