//! Safety check: whether a thread on the machine is stuck in a fork.
//!
//! A fork that copies an address space holds a kernel lock. Inserting or removing a breakpoint in any program needs
//! this lock exclusively, and blocks all forks meanwhile. So one stuck fork would block every fork on the machine:
//! * A fork waits while another thread of its process waits for hung storage: state `D` within a fork.
//! * A fork gets no CPU, at idle priority beside spinning threads or with `cpu.max` used up (before Linux 6.18): state
//!   `R`, repeatedly within a fork. A running thread shows no stack, and makes progress.
//!
//! The scan reads all threads, of most processes the only one. It is reused for a tenth of a second, or for 200 times
//! its duration. Before an insertion it is reused for at most one second, and before the first insertion never. Every
//! caller checks the threads seen forking again.

use crate::concern::stack::{Copies, Waits};
use crate::concern::threads::{BEAT, STILL, Status};
use homeostat_kernel::process::{numbers_in, read_at, start_ticks};
use homeostat_kernel::{Root, files};
use homeostat_model::ProcessId;
use homeostat_sensors::storage::Refusal;
use rustix::fs::{Mode, OFlags};
use std::os::fd::OwnedFd;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Most numbers in `/proc` or threads of a process: the kernel's own limit.
const NUMBERS_MAX: usize = 1 << 22;
/// A scan is reused for this time …
const FRESH: Duration = Duration::from_millis(100);
/// … or for 200 times its duration, for at most half a percent of a CPU …
const REST: u32 = 200;
/// … but no longer than this.
const OLD: Duration = Duration::from_secs(60);
/// `PF_KTHREAD` in `stat` (include/linux/sched.h).
const KERNEL_THREAD: u64 = 0x0020_0000;

/// Oldest scan for an insertion.
const ATTACH: Duration = Duration::from_secs(1);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Before {
    /// The first insertion: needs a new scan.
    First,
    /// Another insertion: possible forks count, and a scan is reused for at most a second.
    Attaching,
    /// A removal: only visible forks count. Invisible ones might never end, and the breakpoints would stay for ever.
    Removing,
}

/// A thread that waited or had no CPU within a fork.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Forking {
    process: ProcessId,
    thread: i32,
    switches: u64,
    /// Its stack shows the fork. Otherwise the fork is only possible.
    seen: bool,
}

#[derive(Clone, Debug)]
struct Look {
    taken: Instant,
    took: Duration,
    forking: Vec<Forking>,
}

static LAST: Mutex<Option<Look>> = Mutex::new(None);

/// Checks that no thread of the machine is stuck in a fork. Waits up to two seconds, with a check every 20 ms.
///
/// # Errors
/// A sentence: one is stuck, or that is unknown.
pub(super) fn settled(root: &Root, before: Before) -> Result<(), Refusal> {
    let mut left = recent(root, before)?;
    if before == Before::Removing {
        left.retain(|forking| forking.seen);
    }
    let begun = Instant::now();
    loop {
        left.retain(|forking| forking.is_the_same_still(root));
        let Some(first) = left.first() else {
            return Ok(());
        };
        if begun.elapsed() >= STILL {
            return Err(Refusal::Now(format!(
                "thread {} of process {} has been making a process for {} s and does not go on: nobody could make one while a \
                 breakpoint comes or goes",
                first.thread,
                first.process,
                STILL.as_secs()
            )));
        }
        std::thread::sleep(BEAT);
    }
}

/// The forking threads, from a reused or new scan.
fn recent(root: &Root, before: Before) -> Result<Vec<Forking>, Refusal> {
    let oldest = match before {
        Before::First => Duration::ZERO,
        Before::Attaching => ATTACH,
        Before::Removing => OLD,
    };
    let mut last = LAST.lock().unwrap_or_else(PoisonError::into_inner);
    let serves = |look: &&Look| {
        root.is_live() && look.taken.elapsed() < FRESH.max(look.took.saturating_mul(REST)).min(oldest)
    };
    if let Some(look) = last.as_ref().filter(serves) {
        return Ok(look.forking.clone());
    }
    let taken = Instant::now();
    let forking = look(root)?;
    if root.is_live() {
        *last = Some(Look {
            taken,
            took: taken.elapsed(),
            forking: forking.clone(),
        });
    }
    Ok(forking)
}

fn look(root: &Root) -> Result<Vec<Forking>, Refusal> {
    let unreadable = |e| Refusal::Now(format!("the list of processes cannot be read: {e}"));
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let proc = rustix::fs::open(root.path("/proc"), flags, Mode::empty()).map_err(unreadable)?;
    let (pids, _) = numbers_in(&proc, ".", NUMBERS_MAX).map_err(unreadable)?;
    let mut found = Vec::new();
    for pid in pids {
        // An ended process forks no more.
        let Some(stat) = Stat::read(&proc, &format!("{pid}/stat")) else {
            continue;
        };
        if stat.flags & KERNEL_THREAD != 0 {
            continue;
        }
        let process = ProcessId {
            pid,
            start_ticks: stat.start_ticks,
        };
        if stat.threads <= 1 {
            found.extend(may_stand_still(stat.state).then_some((process, pid)));
            continue;
        }
        let (threads, _) = numbers_in(&proc, &format!("{pid}/task"), NUMBERS_MAX).unwrap_or_default();
        found.extend(
            threads
                .into_iter()
                .filter(|thread| {
                    Stat::read(&proc, &format!("{pid}/task/{thread}/stat"))
                        .is_some_and(|s| may_stand_still(s.state))
                })
                .map(|thread| (process, thread)),
        );
    }
    Ok(found
        .into_iter()
        .filter_map(|(process, thread)| Forking::look(root, process, thread))
        .collect())
}

fn may_stand_still(state: u8) -> bool {
    matches!(state, b'D' | b'R')
}

impl Forking {
    /// The thread, if it waits or lacks a CPU within a fork.
    fn look(root: &Root, process: ProcessId, thread: i32) -> Option<Self> {
        let status = || {
            let text = files::text(root, &format!("/proc/{}/task/{thread}/status", process.pid))?;
            Some(Status::parse(&text)).filter(|s| may_stand_still(s.state))
        };
        let Status { state, switches, .. } = status()?;
        let copies = Waits::of(root, process.pid, thread).copies_memory();
        let seen = copies == Copies::Yes;
        // A running thread shows neither stack nor call, so state `R` without a visible stack proves nothing.
        let counts = seen || (state == b'D' && copies == Copies::Perhaps);
        // The stack belongs to a single wait if the number of waits is unchanged. Preemptions do not matter.
        (counts && status()?.switches == switches).then_some(Self {
            process,
            thread,
            switches,
            seen,
        })
    }

    fn is_the_same_still(&self, root: &Root) -> bool {
        Self::look(root, self.process, self.thread).as_ref() == Some(self)
    }
}

#[derive(Debug, PartialEq, Eq)]
struct Stat {
    state: u8,
    flags: u64,
    threads: u64,
    start_ticks: u64,
}

impl Stat {
    fn read(proc: &OwnedFd, file: &str) -> Option<Self> {
        let mut buffer = [0u8; 1024];
        let n = read_at(proc, file, &mut buffer).ok()?;
        Self::parse(buffer.get(..n)?)
    }

    /// State is field 3, flags field 9, the number of threads field 20.
    fn parse(stat: &[u8]) -> Option<Self> {
        let after_name = stat.iter().rposition(|&c| c == b')')? + 1;
        let mut fields = std::str::from_utf8(stat.get(after_name..)?)
            .ok()?
            .split_ascii_whitespace();
        Some(Self {
            state: *fields.next()?.as_bytes().first()?,
            flags: fields.nth(5)?.parse().ok()?,
            threads: fields.nth(10)?.parse().ok()?,
            start_ticks: start_ticks(stat)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use homeostat_meters::code_file::executable;
    use std::io::{BufRead, BufReader, Write};
    use std::process::{Child, Command, Stdio};

    #[test]
    fn state_flags_threads_and_start_are_found_behind_any_name() {
        let tail = " D 1 2 3 4 5 2097216 7 8 9 10 11 12 13 14 15 16 17 18 4242 20 21";
        for name in ["a", "a) S 1 2 (b", "((("] {
            let stat = format!("12 ({name}){tail}");
            assert_eq!(
                Stat::parse(stat.as_bytes()),
                Some(Stat {
                    state: b'D',
                    flags: 2_097_216,
                    threads: 17,
                    start_ticks: 4242
                }),
                "{name}"
            );
        }
        assert_eq!(Stat::parse(b"12 (a) S 1"), None);
    }

    /// Forks while somebody watches for that (itself, by no more than a file descriptor) who answers only when a line comes.
    const PROGRAM: &str = r#"
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <pthread.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

static int fd;

static void *answer(void *p)
{
    char c;
    struct uffd_msg message;
    read(0, &c, 1);
    read(fd, &message, sizeof message);
    return p;
}

int main(void)
{
    char c;
    pthread_t t;
    struct uffdio_api api = {.api = UFFD_API, .features = UFFD_FEATURE_EVENT_FORK};
    char *page = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    struct uffdio_register range = {{(unsigned long)page, 4096}, UFFDIO_REGISTER_MODE_MISSING, 0};
    fd = syscall(SYS_userfaultfd, O_CLOEXEC);
    if (fd < 0 || ioctl(fd, UFFDIO_API, &api) || ioctl(fd, UFFDIO_REGISTER, &range)) {
        write(1, "none\n", 5);
        return 0;
    }
    pthread_create(&t, NULL, answer, NULL);
    write(1, "here\n", 5);
    if (fork() == 0)
        _exit(0);
    wait(NULL);
    write(1, "over\n", 5);
    read(0, &c, 1);
    return 0;
}
"#;

    struct Stuck(Child, BufReader<std::process::ChildStdout>);

    impl Stuck {
        fn answer(&mut self) -> String {
            let mut line = String::new();
            self.1.read_line(&mut line).unwrap();
            line.trim().to_owned()
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
    fn whoever_stands_still_in_a_fork_is_waited_for() {
        let directory = tempfile::tempdir().unwrap();
        let (source, program) = (directory.path().join("fork.c"), directory.path().join("fork"));
        std::fs::write(&source, PROGRAM).unwrap();
        let built = Command::new("cc")
            .args(["-std=gnu99", "-w", "-pthread", "-o"])
            .args([&program, &source])
            .status();
        if !built.is_ok_and(|s| s.success()) {
            println!("skipped: no C compiler, or no header of the kernel");
            return;
        }
        let mut child = Command::new(&program)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        let mut stuck = Stuck(child, output);
        if stuck.answer() != "here" {
            println!("skipped: this kernel or this user cannot watch for forks (userfaultfd)");
            return;
        }
        let root = Root::default();
        let pid = i32::try_from(stuck.0.id()).unwrap();
        let ours = |found: &[Forking]| found.iter().any(|f| f.process.pid == pid);
        let begun = Instant::now();
        while !ours(&look(&root).unwrap()) {
            assert!(begun.elapsed() < Duration::from_secs(60), "it never waits");
            std::thread::sleep(Duration::from_millis(1));
        }
        // What it waits for may change while it is looked at.
        let why = loop {
            match settled(&root, Before::First) {
                Err(why) => break why,
                Ok(()) => assert!(begun.elapsed() < Duration::from_secs(120), "it is not seen"),
            }
            std::thread::sleep(Duration::from_millis(20));
        };
        assert!(
            matches!(&why, Refusal::Now(text) if text.contains(&pid.to_string())),
            "{why}"
        );
        assert!(settled(&root, Before::Removing).is_err(), "it is seen to fork");
        stuck.0.stdin.as_mut().unwrap().write_all(b"\n").unwrap();
        assert_eq!(stuck.answer(), "over");
        assert!(!ours(&look(&root).unwrap()));
        let stat = std::fs::read(format!("/proc/{pid}/stat")).unwrap();
        let process = ProcessId {
            pid,
            start_ticks: start_ticks(&stat).unwrap(),
        };
        assert!(executable(&root, process).is_some(), "it has survived");
    }

    #[test]
    fn who_waits_in_a_fork_is_seen_in_a_captured_tree() {
        let tree = tempfile::tempdir().unwrap();
        let write = |file: &str, text: &str| {
            let path = tree.path().join("proc").join(file);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        let stat = |threads: u32, flags: u32| {
            format!("7 (a) D 1 2 3 4 5 {flags} 7 8 9 10 11 12 13 14 15 16 {threads} 18 4242 20 21")
        };
        let status = "State:\tD (disk sleep)\nvoluntary_ctxt_switches:\t5\n";
        let stack = "[<0>] dup_mmap+0xa6/0x6a0\n[<0>] copy_process+0xd4b/0x1c40\n";
        for (pid, thread, threads, flags) in [(7, 7, 1, 0), (8, 9, 2, 0), (10, 10, 1, 0x0020_0000)] {
            write(&format!("{pid}/stat"), &stat(threads, flags));
            write(&format!("{pid}/task/{thread}/stat"), &stat(threads, flags));
            write(&format!("{pid}/task/{thread}/status"), status);
            write(&format!("{pid}/task/{thread}/stack"), stack);
        }
        let root = Root::new(tree.path());
        let found: Vec<(i32, i32)> = look(&root)
            .unwrap()
            .iter()
            .map(|f| (f.process.pid, f.thread))
            .collect();
        assert_eq!(found, [(7, 7), (8, 9)], "the kernel's own threads copy nothing");
        write("7/task/7/stack", "[<0>] do_fsync+0x38/0x70\n");
        write("8/task/9/status", "State:\tS (sleeping)\n");
        assert_eq!(look(&root).unwrap(), []);
        assert_eq!(settled(&root, Before::Attaching), Ok(()));
        // One that could run and gets no CPU holds up everybody as well; one that runs, whose stack is not seen, gets on.
        for file in ["8/stat", "8/task/9/stat"] {
            write(file, &stat(2, 0).replace(" D ", " R "));
        }
        let running = "State:\tR (running)\nvoluntary_ctxt_switches:\t5\n";
        write("8/task/9/status", running);
        let found = look(&root).unwrap();
        assert_eq!(
            found.iter().map(|f| (f.thread, f.seen)).collect::<Vec<_>>(),
            [(9, true)]
        );
        let why = settled(&root, Before::Removing).unwrap_err();
        assert!(
            matches!(&why, Refusal::Now(text) if text.contains("thread 9 of process 8")),
            "{why}"
        );
        for its_stack in ["", "[<0>] exit_to_user_mode_loop+0x80/0x130\n"] {
            write("8/task/9/stack", its_stack);
            assert_eq!(look(&root).unwrap(), [], "{its_stack:?}");
        }
        std::fs::remove_file(tree.path().join("proc/8/task/9/stack")).unwrap();
        assert_eq!(
            settled(&root, Before::Attaching),
            Ok(()),
            "nothing is known of it"
        );
        // Who cannot be seen keeps breakpoints from being put in, and not from being taken out.
        std::fs::remove_file(tree.path().join("proc/7/task/7/stack")).unwrap();
        assert_eq!(settled(&root, Before::Removing), Ok(()));
        assert!(settled(&root, Before::Attaching).is_err());
    }
}
