//! The process that the tests work on.

use homeostat_kernel::memory::{BASE_PAGE, PIECE};
use homeostat_kernel::numa::{CpuMask, PageCall, PageStatus, set_affinity};
use homeostat_model::ProcessId;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};

const NAME: &str = "HOMEOSTAT_TEST_VICTIM";
const FILE: &str = "HOMEOSTAT_TEST_VICTIM_FILE";

/// Memory of a victim, aligned to 2 MiB. Lives until the process ends.
struct Area {
    start: u64,
    length: u64,
}

impl Area {
    /// Maps `pieces` of 2 MiB of private memory, or of the file named in the environment.
    fn map(pieces: u64) -> Self {
        let file = std::env::var(FILE).ok().map(|path| {
            std::fs::OpenOptions::new()
                .read(true)
                .write(true)
                .open(path)
                .unwrap()
        });
        let (flags, fd) = match &file {
            Some(file) => (libc::MAP_SHARED, file.as_raw_fd()),
            None => (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1),
        };
        let reserve = ((pieces + 1) * PIECE) as usize;
        // SAFETY: reserves fresh address space of the kernel's choice.
        let reserved = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                reserve,
                0,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        assert_ne!(reserved, libc::MAP_FAILED);
        let start = (reserved as u64).next_multiple_of(PIECE);
        let length = pieces * PIECE;
        let at = start as usize as *mut libc::c_void;
        // SAFETY: replaces a part of the reservation just made, which nobody uses.
        let mapped = unsafe {
            libc::mmap(
                at,
                length as usize,
                libc::PROT_READ | libc::PROT_WRITE,
                flags | libc::MAP_FIXED,
                fd,
                0,
            )
        };
        assert_ne!(mapped, libc::MAP_FAILED);
        let area = Self { start, length };
        area.advise(0, pieces, libc::MADV_NOHUGEPAGE);
        area
    }

    fn advise(&self, first: u64, pieces: u64, advice: i32) {
        let at = (self.start + first * PIECE) as usize as *mut libc::c_void;
        // SAFETY: inside the area; only advice that keeps the contents, or after which any value is valid in the
        // atomics that are read there.
        let outcome = unsafe { libc::madvise(at, (pieces * PIECE) as usize, advice) };
        assert_eq!(outcome, 0, "advice {advice}");
    }

    /// `mbind(2)`: the area may take pages of that node only.
    fn bind(&self, node: u32) {
        let mask = node_mask(node);
        // SAFETY: the kernel reads the mask, which lives across the call; the area stays mapped with its contents.
        let outcome = unsafe {
            libc::syscall(
                libc::SYS_mbind,
                self.start,
                self.length,
                2,
                mask.as_ptr(),
                1025u64,
                0,
            )
        };
        assert_eq!(outcome, 0, "{}", std::io::Error::last_os_error());
    }

    fn words(&self) -> &[AtomicU64] {
        let first = std::ptr::with_exposed_provenance::<AtomicU64>(self.start as usize);
        // SAFETY: the area is mapped readable and writable, aligned, stays mapped, and is only used through atomics.
        unsafe { std::slice::from_raw_parts(first, (self.length / 8) as usize) }
    }

    /// Touches every page of the pieces from the node given, with a value of its own.
    fn fill(&self, first: u64, pieces: u64, node: Option<u32>) {
        if let Some(node) = node {
            policy(2, Some(node));
        }
        let per_piece = (PIECE / 8) as usize;
        for (i, word) in self
            .words()
            .iter()
            .enumerate()
            .skip(first as usize * per_piece)
            .take(pieces as usize * per_piece)
            .step_by(512)
        {
            word.store(value_of(i), Ordering::Relaxed);
        }
        if node.is_some() {
            policy(0, None);
        }
    }

    fn wrong(&self) -> u64 {
        let words = self.words().iter().enumerate().step_by(512);
        words
            .filter(|(i, word)| word.load(Ordering::Relaxed) != value_of(*i))
            .count() as u64
    }
}

fn value_of(index: usize) -> u64 {
    (index as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15)
}

fn node_mask(node: u32) -> [u64; 16] {
    std::array::from_fn(|i| {
        if node as usize / 64 == i {
            1 << (node % 64)
        } else {
            0
        }
    })
}

/// `set_mempolicy(2)` of the calling thread: 0 default, 2 bind.
fn policy(mode: i32, node: Option<u32>) {
    let mask = node_mask(node.unwrap_or(0));
    let (pointer, bits) = match node {
        Some(_) => (mask.as_ptr(), 1025u64),
        None => (std::ptr::null(), 0),
    };
    // SAFETY: the kernel reads the mask, which lives across the call.
    let outcome = unsafe { libc::syscall(libc::SYS_set_mempolicy, mode, pointer, bits) };
    assert_eq!(outcome, 0, "{}", std::io::Error::last_os_error());
}

fn sleeper() {
    std::thread::spawn(|| {
        loop {
            std::thread::park();
        }
    });
}

/// Forks a process that waits to be killed with its parent; returns its number.
fn fork() -> u64 {
    // SAFETY: the child calls nothing but async-signal-safe functions until it is killed with its parent.
    unsafe {
        let parent = libc::getpid();
        let child = libc::fork();
        if child == 0 {
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
            // A parent that was killed before that line sends no signal any more.
            if libc::getppid() != parent {
                libc::_exit(0);
            }
            loop {
                libc::pause();
            }
        }
        u64::try_from(child).unwrap()
    }
}

#[test]
#[ignore = "the process that the other tests work on"]
fn victim() {
    let Ok(what) = std::env::var(NAME) else { return };
    // SAFETY: takes plain numbers.
    unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
    let mut numbers = what.split(':').map(|n| n.parse::<u64>().unwrap());
    let (threads, pieces) = (numbers.next().unwrap(), numbers.next().unwrap());
    for _ in 0..threads {
        sleeper();
    }
    let area = Area::map(pieces.max(1));
    println!("\nvictim {}", area.start);
    for line in std::io::stdin().lines() {
        let line = line.unwrap();
        let mut words = line.split(' ');
        let command = words.next().unwrap();
        let numbers: Vec<u64> = words.map(|w| w.parse().unwrap()).collect();
        let answer = match (command, numbers.as_slice()) {
            ("thread", []) => {
                sleeper();
                0
            }
            ("fork", []) => fork(),
            // The calling thread binds itself; other numbers are those of other threads.
            ("bind", [thread, cpu]) => {
                set_affinity(*thread as i32, &CpuMask::of([*cpu as u32])).unwrap();
                0
            }
            ("policy", [node]) => {
                area.bind(*node as u32);
                0
            }
            ("fill", [first, pieces]) => {
                area.fill(*first, *pieces, None);
                0
            }
            ("fill", [first, pieces, node]) => {
                area.fill(*first, *pieces, Some(*node as u32));
                0
            }
            ("huge", [first, pieces]) => {
                area.advise(*first, *pieces, libc::MADV_HUGEPAGE);
                area.advise(*first, *pieces, 25);
                0
            }
            ("drop", [first, pieces]) => {
                area.advise(*first, *pieces, libc::MADV_DONTNEED);
                0
            }
            ("check", []) => area.wrong(),
            ("exec", []) => {
                use std::os::unix::process::CommandExt;
                panic!("exec: {}", Command::new("sleep").arg("60").exec());
            }
            other => panic!("unknown command {other:?}"),
        };
        println!("\nvictim {answer}");
    }
}

/// A victim seen from the test. Killed when dropped.
pub(crate) struct Victim {
    child: Child,
    input: ChildStdin,
    output: BufReader<std::process::ChildStdout>,
    /// First address of its area.
    pub(crate) start: u64,
    pieces: u64,
}

impl Victim {
    /// With so many threads besides its own two, and an area of so many pieces.
    pub(crate) fn start(threads: u64, pieces: u64) -> Self {
        Self::start_on(threads, pieces, None)
    }

    /// On a file that other victims may map, too.
    pub(crate) fn start_on(threads: u64, pieces: u64, file: Option<&OwnedFd>) -> Self {
        Self::start_with(threads, pieces, file, None)
    }

    /// As `numactl --membind=NODE` would start it.
    pub(crate) fn start_bound(node: u32) -> Self {
        Self::start_with(0, 0, None, Some(node))
    }

    fn start_with(threads: u64, pieces: u64, file: Option<&OwnedFd>, bound: Option<u32>) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args([
            "--exact",
            "victim::victim",
            "--ignored",
            "--nocapture",
            "--test-threads=1",
        ]);
        command.env(NAME, format!("{threads}:{pieces}"));
        if let Some(file) = file {
            command.env(
                FILE,
                format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd()),
            );
        }
        if let Some(node) = bound {
            use std::os::unix::process::CommandExt;
            let bind = move || {
                policy(2, Some(node));
                Ok(())
            };
            // SAFETY: between fork and exec nothing is called but the one system call; it does not fail on a node that is
            // there.
            unsafe { command.pre_exec(bind) };
        }
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let input = child.stdin.take().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        let mut victim = Self {
            child,
            input,
            output,
            start: 0,
            pieces,
        };
        victim.start = victim.answer();
        victim
    }

    fn answer(&mut self) -> u64 {
        let mut line = String::new();
        loop {
            line.clear();
            assert_ne!(self.output.read_line(&mut line).unwrap(), 0, "the victim ended");
            if let Some(answer) = line.trim_end().strip_prefix("victim ") {
                if let Ok(number) = answer.parse() {
                    return number;
                }
            }
        }
    }

    pub(crate) fn tell(&mut self, command: &str) -> u64 {
        self.send(command);
        self.answer()
    }

    /// For a command that has no answer.
    pub(crate) fn send(&mut self, command: &str) {
        writeln!(self.input, "{command}").unwrap();
    }

    pub(crate) fn pid(&self) -> i32 {
        self.child.id() as i32
    }

    pub(crate) fn id(&self) -> ProcessId {
        id_of(self.pid())
    }

    pub(crate) fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Where each page of the area lies.
    pub(crate) fn nodes(&self) -> Vec<PageStatus> {
        let mut call = PageCall::default();
        let mut all = Vec::new();
        for piece in 0..self.pieces {
            let start = self.start + piece * PIECE;
            let addresses: Vec<u64> = (start..start + PIECE).step_by(BASE_PAGE as usize).collect();
            all.extend_from_slice(call.nodes_of(self.pid(), &addresses).unwrap());
        }
        all
    }

    /// Moves some pieces as a person with `migratepages` would.
    pub(crate) fn moved_by_a_person(&self, first: u64, pieces: u64, node: u32) {
        let mut call = PageCall::default();
        for piece in first..first + pieces {
            let start = self.start + piece * PIECE;
            let addresses: Vec<u64> = (start..start + PIECE).step_by(BASE_PAGE as usize).collect();
            let (left, _) = call.move_to(self.pid(), &addresses, node, true).unwrap();
            assert_eq!(left, 0);
        }
    }
}

impl Drop for Victim {
    fn drop(&mut self) {
        // It may have ended already; then there is nothing to end.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A process with its start time.
pub(crate) fn id_of(pid: i32) -> ProcessId {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let after_name = &stat[stat.rfind(')').unwrap() + 2..];
    let start_ticks = after_name.split(' ').nth(19).unwrap().parse().unwrap();
    ProcessId { pid, start_ticks }
}

/// `Cpus_allowed_list` of every thread of a process, whole.
pub(crate) fn masks(pid: i32) -> Vec<(i32, String)> {
    let mut found: Vec<(i32, String)> = std::fs::read_dir(format!("/proc/{pid}/task"))
        .unwrap()
        .filter_map(|entry| {
            let name = entry.unwrap().file_name().into_string().unwrap();
            let status = std::fs::read_to_string(format!("/proc/{pid}/task/{name}/status")).ok()?;
            let list = status
                .lines()
                .find_map(|line| line.strip_prefix("Cpus_allowed_list:"))?;
            Some((name.parse().ok()?, list.trim().to_owned()))
        })
        .collect();
    found.sort();
    found
}
