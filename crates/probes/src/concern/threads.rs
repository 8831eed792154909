//! Safety check: whether a thread of a process stands still in the kernel, is traced, or is frozen.
//!
//! A thread that waits for a page may hold the address space. A wait for a disk shows as state `D`. A wait for a
//! program that serves a file system shows as `S`, like any sleep. But it is outside a system call (`syscall` reads
//! -1), where no thread sleeps by choice. A disk wait in a call that does not hold the address space (`fsync`, `read`)
//! blocks nobody, as its kernel stack shows ([`stack`](crate::concern::stack)).

use crate::concern::stack::Waits;
use homeostat_kernel::process::{numbers_in, open_process, status_of};
use homeostat_kernel::{Root, files};
use homeostat_model::ProcessId;
use homeostat_platform::PlatformError;
use homeostat_sensors::storage::Refusal;
use rustix::io::Errno;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

/// Most threads of a counted process: each is checked before a breakpoint comes or goes.
const THREADS_MAX: usize = 1024;
/// Most threads of other processes: the kernel's limit. A program beyond [`THREADS_MAX`] still gets its probes removed.
const THREADS_OF_OTHERS_MAX: usize = 1 << 22;
/// A thread that waited this long without running stands still. A disk takes less to write all its cached data.
pub(super) const STILL: Duration = Duration::from_secs(2);
pub(super) const BEAT: Duration = Duration::from_millis(20);

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Status {
    pub(crate) tracer: Option<i32>,
    pub(crate) shadow_stack: bool,
    pub(super) state: u8,
    /// Number of its waits.
    pub(super) switches: u64,
}

impl Status {
    pub(super) fn parse(text: &str) -> Self {
        let field = |name: &str| text.lines().find_map(|l| l.strip_prefix(name));
        Self {
            tracer: field("TracerPid:")
                .and_then(|t| t.trim().parse().ok())
                .filter(|t| *t != 0),
            shadow_stack: field("x86_Thread_features:")
                .is_some_and(|f| f.split_ascii_whitespace().any(|w| w == "shstk")),
            state: field("State:")
                .and_then(|s| s.trim_start().bytes().next())
                .unwrap_or(0),
            switches: field("voluntary_ctxt_switches:")
                .and_then(|n| n.trim().parse().ok())
                .unwrap_or(0),
        }
    }
}

/// Where a thread sleeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// Running, in a system call, or unknown on this kernel.
    Call,
    /// In the kernel outside a call: it touched a missing page.
    Page,
}

impl Place {
    /// Parses `syscall`: `running`, or a number, which is -1 outside of calls.
    fn parse(text: &str) -> Self {
        if text.split_ascii_whitespace().next() == Some("-1") {
            Self::Page
        } else {
            Self::Call
        }
    }
}

/// A waiting thread that may hold its address space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Waiting {
    process: ProcessId,
    thread: i32,
    switches: u64,
}

/// Whether this thread may hold its address space. `frozen`: it sleeps on its way out of the kernel and holds nothing.
fn may_hold(state: u8, place: Place, frozen: bool) -> bool {
    match state {
        b'D' => true,
        b'S' => place == Place::Page && !frozen,
        _ => false,
    }
}

/// The first threads that have not moved since.
fn unmoved(first: &[Waiting], now: &[Waiting]) -> Vec<Waiting> {
    first.iter().filter(|w| now.contains(w)).copied().collect()
}

/// Thread ids of a process, at most `most`. Empty: it has ended.
fn list(dir: &OwnedFd, process: ProcessId, most: usize) -> Result<Vec<i32>, Refusal> {
    match numbers_in(dir, "task", most) {
        Ok((_, true)) => Err(Refusal::Lasting(format!(
            "process {process} has more than {most} threads, too many to be looked at before each breakpoint"
        ))),
        Ok((threads, false)) => Ok(threads),
        Err(Errno::NOENT | Errno::SRCH) => Ok(Vec::new()),
        Err(e) => Err(Refusal::Now(format!(
            "the threads of process {process} cannot be listed: {e}"
        ))),
    }
}

/// A thread's file, at most as long as its `status`. `None`: the thread has ended.
fn small(dir: &OwnedFd, file: &str) -> Result<Option<String>, Errno> {
    match status_of(dir, file) {
        Ok(text) => Ok(Some(text)),
        Err(Errno::NOENT | Errno::SRCH) => Ok(None),
        Err(e) => Err(e),
    }
}

fn directory(root: &Root, process: ProcessId) -> Result<Option<OwnedFd>, Refusal> {
    match open_process(root, process) {
        Ok(dir) => Ok(Some(dir)),
        Err(PlatformError::Vanished { .. }) => Ok(None),
        Err(e) => Err(Refusal::Now(format!(
            "process {process} cannot be looked at: {e}"
        ))),
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Look {
    /// The state only, which everybody may read.
    State,
    /// Also where threads sleep.
    Place,
    /// … and tracers.
    Untraced,
}

/// Waiting threads of a process that may hold its address space.
fn waiting(root: &Root, process: ProcessId, look: Look) -> Result<Vec<Waiting>, Refusal> {
    let Some(dir) = directory(root, process)? else {
        return Ok(Vec::new());
    };
    let unreadable = |thread, e| {
        Refusal::Now(format!(
            "thread {thread} of process {process} cannot be looked at: {e}"
        ))
    };
    let mut found = Vec::new();
    let mut is_frozen = None;
    let most = if look == Look::Untraced {
        THREADS_MAX
    } else {
        THREADS_OF_OTHERS_MAX
    };
    for thread in list(&dir, process, most)? {
        let text = small(&dir, &format!("task/{thread}/status")).map_err(|e| unreadable(thread, e))?;
        let Some(status) = text.map(|t| Status::parse(&t)) else {
            continue;
        };
        if let Some(tracer) = status.tracer.filter(|_| look == Look::Untraced) {
            return Err(Refusal::Now(format!(
                "thread {thread} of process {process} is being traced by process {tracer}: nothing is counted in it while it is"
            )));
        }
        let place = if status.state == b'S' && look != Look::State {
            // Kernels without this file show only disk waits.
            small(&dir, &format!("task/{thread}/syscall"))
                .map_err(|e| unreadable(thread, e))?
                .map_or(Place::Call, |t| Place::parse(&t))
        } else {
            Place::Call
        };
        if status.state == b'D' && look != Look::State && Waits::of(root, process.pid, thread).holds_nothing()
        {
            continue;
        }
        if may_hold(status.state, place, false)
            && may_hold(
                status.state,
                place,
                *is_frozen.get_or_insert_with(|| frozen(root, process)),
            )
        {
            found.push(Waiting {
                process,
                thread,
                switches: status.switches,
            });
        }
    }
    Ok(found)
}

/// Checks that no thread of these processes stands still in the kernel. Waits up to [`STILL`] for threads to go on.
///
/// # Errors
/// A sentence: one stands still, or that is unknown.
pub(crate) fn settled(root: &Root, processes: &[ProcessId]) -> Result<(), Refusal> {
    settle(root, processes, Look::Place)
}

/// The same, and that none is traced.
///
/// # Errors
/// A sentence: one stands still or is traced, or that is unknown.
pub(crate) fn quiet(root: &Root, processes: &[ProcessId]) -> Result<(), Refusal> {
    settle(root, processes, Look::Untraced)
}

/// The same as [`settled`], by the threads' states only.
///
/// # Errors
/// As of [`settled`].
pub(crate) fn settled_by_state(root: &Root, processes: &[ProcessId]) -> Result<(), Refusal> {
    settle(root, processes, Look::State)
}

fn settle(root: &Root, processes: &[ProcessId], look: Look) -> Result<(), Refusal> {
    let mut left = Vec::new();
    for process in processes {
        left.extend(waiting(root, *process, look)?);
    }
    let begun = Instant::now();
    while let Some(first) = left.first().copied() {
        if begun.elapsed() >= STILL {
            return Err(Refusal::Now(format!(
                "thread {} of process {} has been waiting in the kernel for {} s and does not go on",
                first.thread,
                first.process,
                STILL.as_secs()
            )));
        }
        std::thread::sleep(BEAT);
        let mut now = Vec::new();
        let mut asked: Vec<ProcessId> = left.iter().map(|w| w.process).collect();
        asked.dedup();
        for process in asked {
            now.extend(waiting(root, process, look)?);
        }
        left = unmoved(&left, &now);
    }
    Ok(())
}

/// A cheap check that a process's first thread is neither traced nor frozen. A checkpointer begins with that.
///
/// # Errors
/// A sentence: it is.
pub(crate) fn at_liberty(root: &Root, process: ProcessId) -> Result<(), Refusal> {
    if let Some(tracer) = tracer_of(root, process) {
        return Err(Refusal::Now(format!(
            "process {process} is being traced by process {tracer}: nothing is counted in it while it is"
        )));
    }
    if frozen(root, process) {
        return Err(Refusal::Now(format!(
            "the control group of process {process} is frozen, perhaps to keep its state: nothing is counted in it while it is"
        )));
    }
    Ok(())
}

pub(crate) fn tracer_of(root: &Root, process: ProcessId) -> Option<i32> {
    let dir = open_process(root, process).ok()?;
    Status::parse(&small(&dir, "status").ok()??).tracer
}

/// Whether the control group of a process is frozen, or about to be.
fn frozen(root: &Root, process: ProcessId) -> bool {
    let text = files::text(root, &format!("/proc/{}/cgroup", process.pid)).unwrap_or_default();
    text.lines().any(|line| {
        let mut fields = line.splitn(3, ':');
        let (Some(number), Some(controllers), Some(path)) = (fields.next(), fields.next(), fields.next())
        else {
            return false;
        };
        let says = |file: String| files::text(root, &file).unwrap_or_default();
        if number == "0" {
            ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"].iter().any(|mount| {
                says(format!("{mount}{path}/cgroup.events"))
                    .lines()
                    .any(|l| l == "frozen 1")
            })
        } else {
            controllers.split(',').any(|c| c == "freezer")
                && matches!(
                    says(format!("/sys/fs/cgroup/freezer{path}/freezer.state")).trim(),
                    "FROZEN" | "FREEZING"
                )
        }
    })
}

/// Whether a process, or one of its first threads, has a shadow stack. True if unreadable.
pub(crate) fn has_shadow_stack(root: &Root, process: ProcessId, threads_max: usize) -> bool {
    let Ok(dir) = open_process(root, process) else {
        return true;
    };
    let Ok((threads, _)) = numbers_in(&dir, "task", threads_max) else {
        return true;
    };
    threads.into_iter().any(|thread| {
        match small(&dir, &format!("task/{thread}/status")) {
            Ok(Some(text)) => Status::parse(&text).shadow_stack,
            // An ended thread needs none.
            Ok(None) => false,
            Err(_) => true,
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{BufRead, BufReader, Write};
    use std::process::{Child, Command, Stdio};

    #[test]
    fn tracers_states_and_shadow_stacks_are_seen_in_a_status() {
        let text = "Name:\ta\nState:\tD (disk sleep)\nTracerPid:\t42\nx86_Thread_features:\tshstk wrss \n\
                    voluntary_ctxt_switches:\t7\nnonvoluntary_ctxt_switches:\t9\n";
        assert_eq!(
            Status::parse(text),
            Status {
                tracer: Some(42),
                shadow_stack: true,
                state: b'D',
                switches: 7,
            }
        );
        // A name that says so is a name.
        let text = "Name:\tTracerPid:\nState:\tS (sleeping)\nTracerPid:\t0\nx86_Thread_features:\t\n\
                    x86_Thread_features_locked:\tshstk\n";
        let status = Status::parse(text);
        assert_eq!(
            (status.tracer, status.shadow_stack, status.state),
            (None, false, b'S')
        );
        assert_eq!(Status::parse(""), Status::default());
    }

    #[test]
    fn who_sleeps_outside_of_a_call_may_hold_its_address_space() {
        assert_eq!(Place::parse("-1 0x7ffd 0x401000\n"), Place::Page);
        assert_eq!(
            Place::parse("0 0x3 0x7f 0x1000 0x0 0x0 0x0 0x7ffd 0x401000\n"),
            Place::Call
        );
        assert_eq!(Place::parse("running\n"), Place::Call);
        assert!(may_hold(b'D', Place::Call, true));
        assert!(may_hold(b'S', Place::Page, false));
        assert!(!may_hold(b'S', Place::Page, true));
        assert!(!may_hold(b'S', Place::Call, false));
        for harmless in [b'R', b'T', b't', b'Z', b'I', 0] {
            assert!(!may_hold(harmless, Place::Page, false));
        }
    }

    #[test]
    fn who_ran_meanwhile_does_not_stand_still() {
        let waits = |thread, switches| Waiting {
            process: ProcessId {
                pid: 1,
                start_ticks: 1,
            },
            thread,
            switches,
        };
        let first = [waits(1, 5), waits(2, 9), waits(3, 1)];
        // The second waits for the disk again, the third does not.
        assert_eq!(unmoved(&first, &[waits(1, 5), waits(2, 10)]), [waits(1, 5)]);
        assert_eq!(unmoved(&first, &[]), []);
    }

    #[test]
    fn a_frozen_group_is_seen_in_either_version() {
        let tree = tempfile::tempdir().unwrap();
        let write = |file: &str, text: &str| {
            let path = tree.path().join(file);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        let root = Root::new(tree.path());
        let process = ProcessId {
            pid: 7,
            start_ticks: 1,
        };
        assert!(!frozen(&root, process));
        write("proc/7/cgroup", "0::/a/b\n");
        write("sys/fs/cgroup/a/b/cgroup.events", "populated 1\nfrozen 0\n");
        assert!(!frozen(&root, process));
        write("sys/fs/cgroup/a/b/cgroup.events", "populated 1\nfrozen 1\n");
        assert!(frozen(&root, process));
        write("proc/7/cgroup", "3:freezer:/x\n0::/\n");
        assert!(!frozen(&root, process));
        write("sys/fs/cgroup/freezer/x/freezer.state", "FREEZING\n");
        assert!(frozen(&root, process));
    }

    /// `vfork`: the parent waits until its child, which waits for a line, ends. `page`: it touches a page for which somebody
    /// answers (itself, by no more than the file descriptor), who gives it when a line comes.
    const PROGRAM: &str = r#"
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

static char *page;

static void *touch(void *p)
{
    (void)p;
    return (void *)(long)*(volatile char *)page;
}

int main(int argc, char **argv)
{
    char c;
    (void)argc;
    if (strcmp(argv[1], "vfork") == 0) {
        write(1, "here\n", 5);
        if (vfork() == 0) {
            read(0, &c, 1);
            _exit(0);
        }
        write(1, "over\n", 5);
        read(0, &c, 1);
        return 0;
    }
    int fd = syscall(SYS_userfaultfd, O_CLOEXEC);
    struct uffdio_api api = {.api = UFFD_API};
    page = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    struct uffdio_register range = {{(unsigned long)page, 4096}, UFFDIO_REGISTER_MODE_MISSING, 0};
    if (fd < 0 || ioctl(fd, UFFDIO_API, &api) || ioctl(fd, UFFDIO_REGISTER, &range)) {
        write(1, "none\n", 5);
        return 0;
    }
    pthread_t t;
    pthread_create(&t, NULL, touch, NULL);
    write(1, "here\n", 5);
    read(0, &c, 1);
    struct uffdio_zeropage zero = {{(unsigned long)page, 4096}, 0, 0};
    ioctl(fd, UFFDIO_ZEROPAGE, &zero);
    pthread_join(t, NULL);
    write(1, "over\n", 5);
    read(0, &c, 1);
    return 0;
}
"#;

    struct Stuck(Child, BufReader<std::process::ChildStdout>);

    impl Stuck {
        /// `None`, with a printed reason, where there is no compiler or the kernel does not permit it.
        fn start(program: &std::path::Path, how: &str) -> Option<Self> {
            let mut child = Command::new(program)
                .arg(how)
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .spawn()
                .unwrap();
            let output = BufReader::new(child.stdout.take().unwrap());
            let mut this = Self(child, output);
            if this.answer() != "here" {
                println!("skipped: this kernel or this user cannot answer for pages (userfaultfd)");
                return None;
            }
            Some(this)
        }
        fn answer(&mut self) -> String {
            let mut line = String::new();
            self.1.read_line(&mut line).unwrap();
            line.trim().to_owned()
        }
        fn process(&self) -> ProcessId {
            let stat = std::fs::read(format!("/proc/{}/stat", self.0.id())).unwrap();
            ProcessId {
                pid: i32::try_from(self.0.id()).unwrap(),
                start_ticks: homeostat_kernel::process::start_ticks(&stat).unwrap(),
            }
        }
        fn go_on(&mut self) {
            self.0.stdin.as_mut().unwrap().write_all(b"\n").unwrap();
            assert_eq!(self.answer(), "over");
        }
    }

    impl Drop for Stuck {
        fn drop(&mut self) {
            let _ = self.0.stdin.take();
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    #[test]
    fn a_process_that_stands_still_is_waited_for_and_settles_when_it_goes_on() {
        let directory = tempfile::tempdir().unwrap();
        let (source, program) = (directory.path().join("still.c"), directory.path().join("still"));
        std::fs::write(&source, PROGRAM).unwrap();
        let built = Command::new("cc")
            .args(["-std=gnu99", "-w", "-pthread", "-o"])
            .args([&program, &source])
            .status();
        if !built.is_ok_and(|s| s.success()) {
            println!("skipped: no C compiler, or no header of the kernel");
            return;
        }
        let root = Root::default();
        for how in ["vfork", "page"] {
            let Some(mut stuck) = Stuck::start(&program, how) else {
                continue;
            };
            let process = stuck.process();
            // It says that it is here a moment before it waits.
            let begun = Instant::now();
            while waiting(&root, process, Look::Place).unwrap().is_empty() {
                assert!(begun.elapsed() < Duration::from_secs(60), "{how}: it never waits");
                std::thread::sleep(Duration::from_millis(1));
            }
            let why = settled(&root, &[process]).unwrap_err();
            assert!(
                matches!(&why, Refusal::Now(text) if text.contains(&process.pid.to_string())),
                "{how}: {why}"
            );
            stuck.go_on();
            // It waits for a line now, as anybody may.
            assert_eq!(settled(&root, &[process]), Ok(()), "{how}");
            assert_eq!(quiet(&root, &[process]), Ok(()), "{how}");
        }
    }

    #[test]
    fn a_process_that_is_gone_holds_up_nobody() {
        let gone = ProcessId {
            pid: i32::MAX,
            start_ticks: 1,
        };
        assert_eq!(settled(&Root::default(), &[gone]), Ok(()));
        assert_eq!(quiet(&Root::default(), &[gone]), Ok(()));
        assert!(has_shadow_stack(&Root::default(), gone, 1));
    }

    #[test]
    fn too_many_threads_are_refused() {
        let tree = tempfile::tempdir().unwrap();
        for thread in 1..=THREADS_MAX + 1 {
            std::fs::create_dir_all(tree.path().join(format!("task/{thread}"))).unwrap();
        }
        let dir = rustix::fs::open(
            tree.path(),
            rustix::fs::OFlags::RDONLY | rustix::fs::OFlags::DIRECTORY,
            rustix::fs::Mode::empty(),
        )
        .unwrap();
        let process = ProcessId {
            pid: 7,
            start_ticks: 1,
        };
        let why = list(&dir, process, THREADS_MAX).unwrap_err();
        assert!(
            matches!(&why, Refusal::Lasting(text) if text.contains("1024 threads")),
            "{why}"
        );
        // Who has come to have so many is still looked at before what is on is taken off.
        let all = list(&dir, process, THREADS_OF_OTHERS_MAX).unwrap();
        assert_eq!(all.len(), THREADS_MAX + 1);
        std::fs::remove_dir(tree.path().join("task/1")).unwrap();
        assert_eq!(list(&dir, process, THREADS_MAX).unwrap().len(), THREADS_MAX);
    }
}
