//! The system calls of every service. systemd names them in groups; a container's profile names each.

/// Groups of systemd that a unit gets before the rows of the table (`systemd-analyze syscall-filter`).
pub(super) const GROUPS: &[&str] = &["@system-service"];
/// Removed from the groups: unused by homeostat, or named in the table.
pub(super) const REMOVED: &[&str] = &[
    "@aio",
    "@ipc",
    "@keyring",
    "@resources",
    "@setuid",
    "kcmp",
    "name_to_handle_at",
    "personality",
    "ptrace",
    "setns",
    "unshare",
    "userfaultfd",
];
/// Added to the groups: pipes for program output, and calls that older systemd releases lack in their groups.
pub(super) const ADDED: &[&str] = &[
    "capset",
    "close_range",
    "openat2",
    "pidfd_open",
    "pidfd_send_signal",
    "pipe",
    "pipe2",
];
/// The same by name, on 64-bit machines. The container engine skips names that a machine lacks.
pub(super) const NAMES: &str = "\
accept accept4 access alarm arch_prctl bind brk capget capset chdir chmod chown clock_getres clock_gettime clock_nanosleep clone \
clone3 close close_range connect copy_file_range creat dup dup2 dup3 epoll_create epoll_create1 epoll_ctl epoll_pwait epoll_pwait2 \
epoll_wait eventfd eventfd2 execve execveat exit exit_group faccessat faccessat2 fadvise64 fallocate fchdir fchmod fchmodat \
fchmodat2 fchown fchownat fcntl fdatasync fgetxattr flistxattr flock fork fremovexattr fsetxattr fstat fstatfs fsync ftruncate \
futex futex_waitv futimesat get_mempolicy get_robust_list getcpu getcwd getdents getdents64 getegid geteuid getgid getgroups \
getitimer getpeername getpgid getpgrp getpid getppid getpriority getrandom getresgid getresuid getrlimit getrusage getsid \
getsockname getsockopt gettid gettimeofday getuid getxattr inotify_add_watch inotify_init inotify_init1 inotify_rm_watch ioctl \
ioprio_get kill lchown lgetxattr link linkat listen listxattr llistxattr lremovexattr lseek lsetxattr lstat madvise membarrier \
mkdir mkdirat mlock mlock2 mlockall mmap mprotect mremap msync munlock munlockall munmap nanosleep newfstatat open openat openat2 \
pause pidfd_open pidfd_send_signal pipe pipe2 poll ppoll prctl pread64 preadv preadv2 prlimit64 pselect6 pwrite64 pwritev pwritev2 \
read readahead readlink readlinkat readv recvfrom recvmmsg recvmsg removexattr rename renameat renameat2 restart_syscall rmdir \
rseq rt_sigaction rt_sigpending rt_sigprocmask rt_sigqueueinfo rt_sigreturn rt_sigsuspend rt_sigtimedwait rt_tgsigqueueinfo \
sched_get_priority_max sched_get_priority_min sched_getaffinity sched_getattr sched_getparam sched_getscheduler \
sched_rr_get_interval sched_yield select sendfile sendmmsg sendmsg sendto set_robust_list set_tid_address setitimer setpgid setsid \
setsockopt setxattr shutdown sigaltstack signalfd signalfd4 socket socketpair splice stat statfs statx symlink symlinkat sync \
sync_file_range syncfs sysinfo tee tgkill time timer_create timer_delete timer_getoverrun timer_gettime timer_settime \
timerfd_create timerfd_gettime timerfd_settime times tkill truncate umask uname unlink unlinkat utime utimensat utimes vfork \
vmsplice wait4 waitid write writev";
