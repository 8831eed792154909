//! Large pages on the real machine: what the effector promises, checked on processes of our own.
//!
//! Each test starts this test binary again as its victim (the ignored test `victim`), which maps memory and obeys
//! one-word commands on its standard input. A victim ends with its standard input at the latest.
#![expect(unsafe_code, reason = "victims map memory by hand")]
#![expect(clippy::unwrap_used, clippy::panic, reason = "helpers of tests")]

use homeostat_effectors::Registry;
use homeostat_kernel::Root;
use homeostat_kernel::memory::{
    Advice, BASE_PAGE, PIECE, Pagemap, PieceState, ScratchMapping, pidfd_open, process_madvise,
};
use homeostat_model::action::{MemoryTarget, Target};
use homeostat_model::{Action, ActionId, Direction, ProcessId, Progress, UndoRecord};
use homeostat_platform::{Effectors, PlatformError, conformance};
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

// ---------------------------------------------------------------- the victim

/// Memory of a victim. Lives until the process ends.
struct Area {
    start: u64,
    pieces: u64,
}

impl Area {
    fn map(kind: &str, pieces: u64) -> Self {
        let file = std::env::var("VICTIM_FILE").ok().map(|path| {
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
        let reserve = ((pieces + 2) * PIECE) as usize;
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
        let aligned = (reserved as u64).next_multiple_of(PIECE);
        // A shift makes a shared mapping whose address and offset disagree modulo 2 MiB.
        let start = if kind == "shifted" {
            aligned + BASE_PAGE
        } else {
            aligned
        };
        let (at, length) = (start as usize as *mut libc::c_void, (pieces * PIECE) as usize);
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: replaces a part of the reservation just made, which nobody uses.
        let mapped = unsafe { libc::mmap(at, length, protection, flags | libc::MAP_FIXED, fd, 0) };
        assert_ne!(mapped, libc::MAP_FAILED);
        let area = Self { start, pieces };
        if kind == "nohuge" {
            area.refuse_large_pages();
        }
        area.fill();
        if kind == "zeros" {
            // Every seventh page holds zeros only, and the last piece nothing else.
            for (page, words) in area.words().chunks(512).enumerate() {
                if page % 7 == 0 || page as u64 / 512 == area.pieces - 1 {
                    words.iter().for_each(|w| w.store(0, Ordering::Relaxed));
                }
            }
        }
        // Of a shifted area the whole aligned pieces are what tests look at.
        if kind == "shifted" {
            Self {
                start: aligned + PIECE,
                pieces: pieces - 1,
            }
        } else {
            area
        }
    }

    fn refuse_large_pages(&self) {
        let start = self.start as usize as *mut libc::c_void;
        // SAFETY: the area belongs to us and stays mapped; MADV_NOHUGEPAGE does not change contents.
        let outcome = unsafe { libc::madvise(start, (self.pieces * PIECE) as usize, libc::MADV_NOHUGEPAGE) };
        assert_eq!(outcome, 0);
    }

    fn words(&self) -> &[AtomicU64] {
        let first = std::ptr::with_exposed_provenance::<AtomicU64>(self.start as usize);
        // SAFETY: the area is mapped readable and writable, aligned, and only used through atomics; the command
        // that unmaps it is the last that touches it.
        unsafe { std::slice::from_raw_parts(first, (self.pieces * PIECE / 8) as usize) }
    }

    /// Every word gets a value of its own.
    fn fill(&self) {
        for (i, word) in self.words().iter().enumerate() {
            word.store(value_of(i), Ordering::Relaxed);
        }
    }

    /// The one word of each page that the writer changes.
    fn written(&self) -> impl Iterator<Item = &AtomicU64> {
        self.words().iter().skip(WRITER_WORD).step_by(512)
    }

    /// Words that do not hold what `fill` put there, apart from the writer's.
    fn wrong(&self) -> usize {
        let others = self
            .words()
            .iter()
            .enumerate()
            .filter(|(i, _)| i % 512 != WRITER_WORD);
        others
            .filter(|(i, word)| word.load(Ordering::Relaxed) != value_of(*i))
            .count()
    }
}

const WRITER_WORD: usize = 77;

fn value_of(index: usize) -> u64 {
    (index as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15)
}

#[test]
#[ignore = "the process that the other tests work on"]
fn victim() {
    let Ok(what) = std::env::var("VICTIM") else { return };
    // SAFETY: takes plain numbers.
    unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
    let (kind, pieces) = what.split_once(':').unwrap();
    let area = Area::map(kind, pieces.parse().unwrap());
    if kind == "forked" {
        // SAFETY: the child calls nothing but async-signal-safe functions until it is killed with its parent.
        unsafe {
            let parent = libc::getpid();
            if libc::fork() == 0 {
                libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                // A parent that was killed before that line sends no signal any more.
                if libc::getppid() != parent {
                    libc::_exit(0);
                }
                loop {
                    libc::pause();
                }
            }
        }
    }
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let mut writer = (kind == "writer").then(|| {
            scope.spawn(|| {
                let mut rounds = 0;
                while !stop.load(Ordering::Relaxed) {
                    rounds += 1;
                    area.written()
                        .for_each(|word| word.store(rounds, Ordering::Relaxed));
                }
                rounds
            })
        });
        println!("\nvictim {}", area.start);
        for line in std::io::stdin().lines() {
            let answer = match line.unwrap().as_str() {
                "check" => {
                    stop.store(true, Ordering::Relaxed);
                    let rounds = writer.take().map(|writer| writer.join().unwrap());
                    let lost = rounds.map_or(0, |n| {
                        area.written().filter(|w| w.load(Ordering::Relaxed) != n).count()
                    });
                    area.wrong() + lost
                }
                // The first page of every second piece goes.
                "punch" => {
                    for piece in (0..area.pieces).step_by(2) {
                        let at = (area.start + piece * PIECE) as usize as *mut libc::c_void;
                        // SAFETY: inside the area; its words are atomics, and any value is valid in them.
                        assert_eq!(unsafe { libc::madvise(at, 4096, libc::MADV_DONTNEED) }, 0);
                    }
                    0
                }
                "unmap" => {
                    let at = area.start as usize as *mut libc::c_void;
                    // SAFETY: nobody looks at the area after this command.
                    assert_eq!(unsafe { libc::munmap(at, (area.pieces * PIECE) as usize) }, 0);
                    0
                }
                "nohuge" => {
                    area.refuse_large_pages();
                    0
                }
                "disable" => {
                    rustix::thread::disable_transparent_huge_pages(true).unwrap();
                    0
                }
                "exec" => {
                    use std::os::unix::process::CommandExt;
                    panic!("exec: {}", Command::new("sleep").arg("60").exec());
                }
                other => panic!("unknown command {other}"),
            };
            println!("\nvictim {answer}");
        }
        stop.store(true, Ordering::Relaxed);
    });
}

/// A victim seen from the test. Killed when dropped.
struct Victim {
    child: Child,
    input: ChildStdin,
    output: BufReader<std::process::ChildStdout>,
    start: u64,
    pieces: u64,
}

impl Victim {
    fn start(kind: &str, pieces: u64) -> Self {
        Self::start_on(kind, pieces, None)
    }

    fn start_on(kind: &str, pieces: u64, file: Option<&OwnedFd>) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args([
            "--exact",
            "victim",
            "--ignored",
            "--nocapture",
            "--test-threads=1",
        ]);
        command.env("VICTIM", format!("{kind}:{pieces}"));
        if let Some(file) = file {
            command.env(
                "VICTIM_FILE",
                format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd()),
            );
        }
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let input = child.stdin.take().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        let pieces = if kind == "shifted" { pieces - 1 } else { pieces };
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

    fn tell(&mut self, command: &str) -> u64 {
        writeln!(self.input, "{command}").unwrap();
        self.answer()
    }

    fn pid(&self) -> i32 {
        self.child.id() as i32
    }

    fn id(&self) -> ProcessId {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.pid())).unwrap();
        let after_name = &stat[stat.rfind(')').unwrap() + 2..];
        let start_ticks = after_name.split(' ').nth(19).unwrap().parse().unwrap();
        ProcessId {
            pid: self.pid(),
            start_ticks,
        }
    }

    fn target(&self) -> MemoryTarget {
        let pieces = (0..self.pieces).map(|i| self.start + i * PIECE).collect();
        MemoryTarget {
            process: self.id(),
            pieces,
        }
    }

    fn states(&self) -> Vec<PieceState> {
        let mut states = Vec::new();
        let mut pagemap = Pagemap::open(Path::new("/proc"), self.pid()).unwrap();
        pagemap
            .piece_states(self.start, self.pieces, &mut states)
            .unwrap();
        states
    }

    fn huge(&self) -> u64 {
        self.states().iter().filter(|s| **s == PieceState::Huge).count() as u64
    }

    /// Resident bytes of the area's mappings, exact (smaps walks the page tables). Not of the whole process: its
    /// program and libraries may be mapped in meanwhile.
    fn resident(&self) -> u64 {
        let text = std::fs::read_to_string(format!("/proc/{}/smaps", self.pid())).unwrap();
        let mut inside = false;
        let mut kib = 0;
        for line in text.lines() {
            let first = line.split(' ').next().unwrap();
            let address = |text| u64::from_str_radix(text, 16).ok();
            let area = first
                .split_once('-')
                .and_then(|(start, end)| address(start).zip(address(end)));
            if let Some((start, end)) = area {
                inside = start < self.start + self.pieces * PIECE && end > self.start;
            } else if inside {
                if let Some(rss) = line.strip_prefix("Rss:") {
                    kib += rss.trim().trim_end_matches(" kB").parse::<u64>().unwrap();
                }
            }
        }
        kib * 1024
    }

    fn signal(&self, signal: i32) {
        // SAFETY: takes plain numbers; the child is ours and not yet waited for, so its number is not reused.
        assert_eq!(unsafe { libc::kill(self.pid(), signal) }, 0);
    }

    fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Victim {
    fn drop(&mut self) {
        // It may have ended already; then there is nothing to end.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

// ---------------------------------------------------------------- helpers

/// Whether this machine lets the tests run; prints the reason when not.
fn machine_can() -> bool {
    let enabled = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled").unwrap_or_default();
    let reason = if enabled.contains("[madvise]") {
        let mut scratch = ScratchMapping::new(1).unwrap();
        scratch.touch(PIECE);
        let outcome = pidfd_open(std::process::id() as i32)
            .map(|own| process_madvise(own.as_fd(), scratch.address(), PIECE, Advice::Collapse));
        match outcome {
            Ok(Ok(())) => None,
            Ok(Err(e)) => Some(format!("MADV_COLLAPSE from outside: {e}")),
            Err(e) => Some(format!("pidfd_open: {e}")),
        }
    } else {
        Some(format!(
            "transparent_hugepage/enabled is {:?}, [madvise] wanted",
            enabled.trim()
        ))
    };
    if let Some(reason) = &reason {
        eprintln!("skipped: {reason}");
    }
    reason.is_none()
}

fn action(targets: Vec<MemoryTarget>) -> Action {
    Action {
        id: ActionId(1),
        effector: "large_pages".into(),
        workload: "victim".into(),
        target: Target::Memory(targets),
        // The default duty would only make the tests slower.
        arguments: BTreeMap::from([("duty".to_owned(), "1".to_owned())]),
        why: "test".into(),
    }
}

fn with_argument(mut action: Action, name: &str, value: impl ToString) -> Action {
    action.arguments.insert(name.to_owned(), value.to_string());
    action
}

fn registry() -> Registry {
    Registry::new(&Root::default())
}

/// Advances to the end; stalls are those of the whole way.
fn drive(
    platform: &mut dyn Effectors,
    record: &UndoRecord,
    direction: Direction,
) -> Result<Progress, PlatformError> {
    let mut sum = Progress::default();
    for _ in 0..10_000 {
        let progress = platform.advance(record, direction)?;
        let stalled = sum.stalled + progress.stalled;
        let longest_call = sum.longest_call.max(progress.longest_call);
        std::thread::sleep(Duration::from_nanos(progress.pause.0).min(Duration::from_millis(20)));
        sum = Progress {
            stalled,
            longest_call,
            ..progress
        };
        if sum.done {
            assert!(sum.verified);
            return Ok(sum);
        }
    }
    panic!("never done: {sum:?}");
}

fn skipped(progress: &Progress, reason: &str) -> u64 {
    progress.skipped.get(reason).copied().unwrap_or(0)
}

fn shared_file(pieces: u64) -> OwnedFd {
    let file = rustix::fs::memfd_create("homeostat-test", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&file, pieces * PIECE).unwrap();
    file
}

/// The rate that makes a slice convert one piece and then wait five seconds for the next.
const ONE_PIECE_PER_SLICE: u64 = PIECE / 5;

// ---------------------------------------------------------------- the promises

#[test]
fn conformance_on_private_memory() {
    if !machine_can() {
        return;
    }
    let victim = Victim::start("plain", 32);
    let broken = conformance::acting(&mut registry(), &mut registry(), &action(vec![victim.target()]));
    assert_eq!(broken, Vec::<String>::new());
    assert_eq!(victim.huge(), 0);
}

#[test]
fn apply_makes_all_pieces_huge_and_undo_restores_states_and_resident_bytes() {
    if !machine_can() {
        return;
    }
    let mut victim = Victim::start("plain", 32);
    let (states, resident) = (victim.states(), victim.resident());
    assert_eq!(
        (states.as_slice(), resident),
        ([PieceState::Full; 32].as_slice(), 32 * PIECE)
    );
    let mut platform = registry();
    let record = platform.prepare(&action(vec![victim.target()])).unwrap();
    assert_eq!(
        (victim.states(), victim.resident()),
        (states.clone(), resident),
        "prepare changes nothing"
    );
    for _ in 0..3 {
        let applied = drive(&mut platform, &record, Direction::Apply).unwrap();
        assert_eq!((applied.finished, applied.total), (32, 32));
        assert_eq!((victim.huge(), victim.resident()), (32, resident));
        assert!(applied.stalled >= applied.longest_call && applied.longest_call.0 > 0);
        let undone = drive(&mut platform, &record, Direction::Undo).unwrap();
        assert_eq!((undone.finished, undone.total), (32, 32));
        assert_eq!((victim.states(), victim.resident()), (states.clone(), resident));
    }
    assert_eq!(victim.tell("check"), 0);
}

#[test]
fn zero_filled_pages_that_the_kernel_frees_at_the_undo_do_not_stop_the_next_apply() {
    if !machine_can() {
        return;
    }
    let victim = Victim::start("zeros", 4);
    let mut registry = registry();
    let action = action(vec![victim.target()]);
    let record = registry.prepare(&action).unwrap();
    for round in 0..3 {
        let progress = drive(&mut registry, &record, Direction::Apply).unwrap();
        assert_eq!(
            (progress.finished, progress.total),
            (4, 4),
            "round {round}: {progress:?}"
        );
        assert_eq!(victim.states(), [PieceState::Huge; 4], "round {round}");
        drive(&mut registry, &record, Direction::Undo).unwrap();
        for state in victim.states() {
            let complete = match state {
                PieceState::Full => true,
                PieceState::Sparse { present, zero } => present + zero == 512,
                _ => false,
            };
            assert!(complete, "round {round}: {state:?}");
        }
    }
}

#[test]
fn an_undo_half_way_through_apply_reverts_what_was_done() {
    if !machine_can() {
        return;
    }
    let victim = Victim::start("plain", 16);
    let mut platform = registry();
    let wanted = with_argument(
        action(vec![victim.target()]),
        "bytes_per_second",
        ONE_PIECE_PER_SLICE,
    );
    let record = platform.prepare(&wanted).unwrap();
    for done in 1..=3 {
        let progress = platform.advance(&record, Direction::Apply).unwrap();
        assert_eq!(
            (progress.done, progress.finished, victim.huge()),
            (false, done, done)
        );
        assert!(progress.pause.as_secs_f64() > 4.0, "{:?}", progress.pause);
    }
    drive(&mut platform, &record, Direction::Undo).unwrap();
    assert_eq!(victim.states(), [PieceState::Full; 16]);
}

#[test]
fn pieces_that_were_huge_stay_huge_and_holes_stay_holes() {
    if !machine_can() {
        return;
    }
    let mut victim = Victim::start("plain", 16);
    victim.tell("punch");
    let handle = pidfd_open(victim.pid()).unwrap();
    for piece in [1, 3] {
        process_madvise(
            handle.as_fd(),
            victim.start + piece * PIECE,
            PIECE,
            Advice::Collapse,
        )
        .unwrap();
    }
    let (states, resident) = (victim.states(), victim.resident());
    assert_eq!(
        states
            .iter()
            .filter(|s| **s
                == PieceState::Sparse {
                    present: 511,
                    zero: 0
                })
            .count(),
        8
    );
    assert_eq!(victim.huge(), 2);
    let mut platform = registry();
    let record = platform.prepare(&action(vec![victim.target()])).unwrap();
    let applied = drive(&mut platform, &record, Direction::Apply).unwrap();
    assert_eq!((applied.finished, applied.total), (6, 16));
    let expected = [
        ("already huge".to_owned(), 2),
        ("has holes that would be filled".to_owned(), 8),
    ];
    assert_eq!(applied.skipped, BTreeMap::from(expected));
    assert_eq!(
        (victim.huge(), victim.resident()),
        (8, resident),
        "no memory was added"
    );
    drive(&mut registry(), &record, Direction::Undo).unwrap();
    assert_eq!((victim.states(), victim.resident()), (states, resident));
}

#[test]
fn a_piece_that_gets_a_hole_after_prepare_is_not_filled() {
    if !machine_can() {
        return;
    }
    let mut victim = Victim::start("plain", 8);
    let mut platform = registry();
    let record = platform.prepare(&action(vec![victim.target()])).unwrap();
    victim.tell("punch");
    let resident = victim.resident();
    let applied = drive(&mut platform, &record, Direction::Apply).unwrap();
    assert_eq!(
        (applied.finished, victim.huge(), victim.resident()),
        (4, 4, resident)
    );
}

#[test]
fn contents_survive_toggles_under_concurrent_writes() {
    if !machine_can() {
        return;
    }
    let mut victim = Victim::start("writer", 32);
    let mut platform = registry();
    let record = platform.prepare(&action(vec![victim.target()])).unwrap();
    for _ in 0..8 {
        let applied = drive(&mut platform, &record, Direction::Apply).unwrap();
        assert_eq!(applied.finished + applied.skipped.values().sum::<u64>(), 32);
        assert!(applied.finished >= 16, "{applied:?}");
        drive(&mut platform, &record, Direction::Undo).unwrap();
        assert_eq!(victim.huge(), 0);
    }
    assert_eq!(victim.tell("check"), 0);
}

#[test]
fn a_record_from_disk_undoes_in_a_new_process_and_twice() {
    if !machine_can() {
        return;
    }
    let victim = Victim::start("plain", 16);
    let mut platform = registry();
    let record = platform.prepare(&action(vec![victim.target()])).unwrap();
    drive(&mut platform, &record, Direction::Apply).unwrap();
    assert_eq!(victim.huge(), 16);
    drop(platform);
    let text = serde_json::to_string(&record).unwrap();
    let record: UndoRecord = serde_json::from_str(&text).unwrap();
    for _ in 0..2 {
        drive(&mut registry(), &record, Direction::Undo).unwrap();
        assert_eq!(victim.states(), [PieceState::Full; 16]);
    }
}

#[test]
fn a_target_killed_while_it_is_converted_has_vanished_and_needs_no_undo() {
    if !machine_can() {
        return;
    }
    let mut victim = Victim::start("plain", 16);
    let mut platform = registry();
    let wanted = with_argument(
        action(vec![victim.target()]),
        "bytes_per_second",
        ONE_PIECE_PER_SLICE,
    );
    let record = platform.prepare(&wanted).unwrap();
    assert!(!platform.advance(&record, Direction::Apply).unwrap().done);
    victim.kill();
    for _ in 0..2 {
        let error = platform.advance(&record, Direction::Apply).unwrap_err();
        assert!(matches!(error, PlatformError::Vanished { .. }), "{error}");
    }
    assert_eq!(
        drive(&mut platform, &record, Direction::Undo).unwrap().finished,
        0
    );
    drive(&mut registry(), &record, Direction::Undo).unwrap();
    assert!(matches!(
        platform.prepare(&wanted),
        Err(PlatformError::Vanished { .. })
    ));
}

#[test]
fn one_of_two_targets_may_vanish() {
    if !machine_can() {
        return;
    }
    let stays = Victim::start("plain", 8);
    let mut goes = Victim::start("plain", 8);
    let mut platform = registry();
    let record = platform
        .prepare(&action(vec![goes.target(), stays.target()]))
        .unwrap();
    goes.kill();
    let applied = drive(&mut platform, &record, Direction::Apply).unwrap();
    assert_eq!(
        (applied.finished, skipped(&applied, "process ended"), stays.huge()),
        (8, 8, 8)
    );
    drive(&mut platform, &record, Direction::Undo).unwrap();
    assert_eq!(stays.huge(), 0);
}

#[test]
fn a_reused_pid_and_another_boot_are_not_touched() {
    if !machine_can() {
        return;
    }
    let victim = Victim::start("plain", 8);
    let mut platform = registry();
    let record = platform.prepare(&action(vec![victim.target()])).unwrap();
    drive(&mut platform, &record, Direction::Apply).unwrap();

    // The record as it would be had another process had this number before.
    let now = format!(".{}", victim.id().start_ticks);
    let before = format!(".{}", victim.id().start_ticks - 1);
    let mut reused = record.clone();
    let mut target = victim.target();
    target.process.start_ticks -= 1;
    reused.action = action(vec![target]);
    reused.found = record
        .found
        .iter()
        .map(|(k, v)| (k.replace(&now, &before), v.clone()))
        .collect();
    assert_ne!(reused.found, record.found);
    drive(&mut registry(), &reused, Direction::Undo).unwrap();
    assert_eq!(victim.huge(), 8);
    assert!(matches!(
        registry().prepare(&reused.action),
        Err(PlatformError::Vanished { .. })
    ));
    let error = registry().advance(&reused, Direction::Apply).unwrap_err();
    assert!(matches!(error, PlatformError::Vanished { .. }), "{error}");

    let mut earlier = record;
    earlier.boot_id = "00000000-0000-0000-0000-000000000000".into();
    assert!(registry().advance(&earlier, Direction::Undo).unwrap().done);
    assert!(matches!(
        registry().advance(&earlier, Direction::Apply),
        Err(PlatformError::Vanished { .. })
    ));
    assert_eq!(victim.huge(), 8);
}

#[test]
fn another_program_in_the_same_process_is_not_touched() {
    if !machine_can() {
        return;
    }
    let mut victim = Victim::start("plain", 8);
    let mut platform = registry();
    let record = platform.prepare(&action(vec![victim.target()])).unwrap();
    drive(&mut platform, &record, Direction::Apply).unwrap();
    writeln!(victim.input, "exec").unwrap();
    let name = format!("/proc/{}/comm", victim.pid());
    while std::fs::read_to_string(&name).unwrap().trim() != "sleep" {
        std::thread::sleep(Duration::from_millis(5));
    }
    for platform in [&mut platform, &mut registry()] {
        let ended = drive(platform, &record, Direction::Undo).unwrap();
        assert_eq!((ended.finished, skipped(&ended, "process ended")), (0, 8));
        let error = platform.advance(&record, Direction::Apply).unwrap_err();
        assert!(matches!(error, PlatformError::Vanished { .. }), "{error}");
    }
}

#[test]
fn a_stopped_process_can_be_converted_and_restored() {
    if !machine_can() {
        return;
    }
    let mut victim = Victim::start("plain", 16);
    victim.signal(libc::SIGSTOP);
    let mut platform = registry();
    let record = platform.prepare(&action(vec![victim.target()])).unwrap();
    drive(&mut platform, &record, Direction::Apply).unwrap();
    assert_eq!(victim.huge(), 16);
    drive(&mut platform, &record, Direction::Undo).unwrap();
    assert_eq!(victim.states(), [PieceState::Full; 16]);
    victim.signal(libc::SIGCONT);
    assert_eq!(victim.tell("check"), 0);
}

#[test]
fn unmapped_memory_needs_no_undo() {
    if !machine_can() {
        return;
    }
    let mut victim = Victim::start("plain", 8);
    let mut platform = registry();
    let record = platform.prepare(&action(vec![victim.target()])).unwrap();
    drive(&mut platform, &record, Direction::Apply).unwrap();
    victim.tell("unmap");
    drive(&mut platform, &record, Direction::Undo).unwrap();
    let applied = drive(&mut registry(), &record, Direction::Apply).unwrap();
    assert_eq!((applied.finished, skipped(&applied, "not mapped")), (0, 8));
}

#[test]
fn shared_memory_mapped_once_is_converted_and_restored_again_and_again() {
    if !machine_can() {
        return;
    }
    let file = shared_file(16);
    let mut victim = Victim::start_on("plain", 16, Some(&file));
    let mut platform = registry();
    let record = platform.prepare(&action(vec![victim.target()])).unwrap();
    for _ in 0..3 {
        let applied = drive(&mut platform, &record, Direction::Apply).unwrap();
        assert_eq!((applied.finished, victim.huge()), (16, 16), "{applied:?}");
        drive(&mut platform, &record, Direction::Undo).unwrap();
        assert_eq!(victim.huge(), 0);
    }
    assert_eq!(victim.tell("check"), 0);
    // Touched again, it is mapped by base pages: not only the mapping, the large pages themselves were split.
    assert_eq!(victim.states(), [PieceState::Full; 16]);
}

#[test]
fn shared_memory_of_two_processes_is_left_alone() {
    if !machine_can() {
        return;
    }
    let file = shared_file(8);
    let first = Victim::start_on("plain", 8, Some(&file));
    let second = Victim::start_on("plain", 8, Some(&file));
    let mut platform = registry();
    let record = platform.prepare(&action(vec![first.target()])).unwrap();
    let applied = drive(&mut platform, &record, Direction::Apply).unwrap();
    let several = "mapped by several processes, could not be undone";
    assert_eq!((applied.finished, skipped(&applied, several)), (0, 8));
    assert_eq!((first.huge(), second.huge()), (0, 0));
}

#[test]
fn shared_memory_of_two_processes_converted_on_request_is_restored_when_one_is_left() {
    if !machine_can() {
        return;
    }
    let file = shared_file(8);
    let first = Victim::start_on("plain", 8, Some(&file));
    let mut second = Victim::start_on("plain", 8, Some(&file));
    let mut platform = registry();
    let wanted = with_argument(action(vec![first.target()]), "several_mappers", "allow");
    let record = platform.prepare(&wanted).unwrap();
    drive(&mut platform, &record, Direction::Apply).unwrap();
    assert_eq!(first.huge(), 8);
    // The other process maps the large pages at its next touch.
    assert_eq!(second.tell("check"), 0);
    assert_eq!(second.huge(), 8);
    match drive(&mut platform, &record, Direction::Undo) {
        Err(PlatformError::Busy { why, .. }) => assert!(why.contains("map them too"), "{why}"),
        Ok(_) => assert_eq!(
            first.huge(),
            0,
            "a kernel that splits large pages of several mappers"
        ),
        Err(other) => panic!("{other}"),
    }
    second.kill();
    drive(&mut platform, &record, Direction::Undo).unwrap();
    assert_eq!(first.huge(), 0);
}

#[test]
fn misaligned_shared_memory_is_refused_with_a_reason() {
    if !machine_can() {
        return;
    }
    let file = shared_file(8);
    let victim = Victim::start_on("shifted", 8, Some(&file));
    let mut platform = registry();
    let record = platform.prepare(&action(vec![victim.target()])).unwrap();
    let applied = drive(&mut platform, &record, Direction::Apply).unwrap();
    let refused = "refused by the kernel (EINVAL), e.g. offset not aligned";
    assert_eq!((applied.finished, skipped(&applied, refused)), (0, 7));
}

#[test]
fn pages_shared_with_a_forked_process_are_not_copied() {
    if !machine_can() {
        return;
    }
    let victim = Victim::start("forked", 8);
    let mut platform = registry();
    let record = platform.prepare(&action(vec![victim.target()])).unwrap();
    let applied = drive(&mut platform, &record, Direction::Apply).unwrap();
    let forked = "pages shared with a forked process would be copied";
    assert_eq!(
        (applied.finished, skipped(&applied, forked), victim.huge()),
        (0, 8, 0)
    );
}

#[test]
fn a_program_that_refuses_large_pages_wins() {
    if !machine_can() {
        return;
    }
    let conflict = |outcome: Result<Progress, PlatformError>, why: &str| match outcome {
        Err(PlatformError::Conflict { found, .. }) => assert_eq!(found, why),
        other => panic!("{other:?}"),
    };
    let mut platform = registry();
    let from_the_start = Victim::start("nohuge", 4);
    let record = platform.prepare(&action(vec![from_the_start.target()])).unwrap();
    conflict(drive(&mut platform, &record, Direction::Apply), "MADV_NOHUGEPAGE");
    assert_eq!(from_the_start.huge(), 0);

    let mut later = Victim::start("plain", 4);
    let record = platform.prepare(&action(vec![later.target()])).unwrap();
    later.tell("nohuge");
    conflict(
        drive(&mut registry(), &record, Direction::Apply),
        "MADV_NOHUGEPAGE",
    );
    assert_eq!(later.huge(), 0);

    let mut disabled = Victim::start("plain", 4);
    let record = platform.prepare(&action(vec![disabled.target()])).unwrap();
    disabled.tell("disable");
    conflict(
        drive(&mut registry(), &record, Direction::Apply),
        "PR_SET_THP_DISABLE",
    );
    let again = platform.prepare(&action(vec![disabled.target()]));
    conflict(again.map(|_| Progress::default()), "PR_SET_THP_DISABLE");
    assert_eq!(disabled.huge(), 0);
}

#[test]
fn a_choice_made_while_large_pages_are_on_stops_apply_and_not_the_undo() {
    if !machine_can() {
        return;
    }
    for choice in ["nohuge", "disable"] {
        let mut victim = Victim::start("plain", 4);
        let mut platform = registry();
        let slow = with_argument(
            action(vec![victim.target()]),
            "bytes_per_second",
            ONE_PIECE_PER_SLICE,
        );
        let record = platform.prepare(&slow).unwrap();
        platform.advance(&record, Direction::Apply).unwrap();
        victim.tell(choice);
        let error = drive(&mut platform, &record, Direction::Apply).unwrap_err();
        assert!(
            matches!(error, PlatformError::Conflict { .. }),
            "{choice}: {error}"
        );
        assert_eq!(victim.huge(), 1, "{choice}");
        drive(&mut platform, &record, Direction::Undo).unwrap();
        assert_eq!(victim.states(), [PieceState::Full; 4], "{choice}");
    }
}

#[test]
fn without_privilege_it_is_denied() {
    if !machine_can() {
        return;
    }
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: only root can become somebody else");
        return;
    }
    let victim = Victim::start("plain", 4);
    let wanted = action(vec![victim.target()]);
    let record = registry().prepare(&wanted).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // SAFETY: the raw system call changes this thread alone, which ends with the scope.
            let outcome = unsafe { libc::syscall(libc::SYS_setresuid, 65534, 65534, 65534) };
            assert_eq!(outcome, 0);
            for outcome in [
                registry().prepare(&wanted).map(|_| ()),
                registry().advance(&record, Direction::Apply).map(|_| ()),
                registry().advance(&record, Direction::Undo).map(|_| ()),
            ] {
                assert!(
                    matches!(outcome, Err(PlatformError::Denied { .. })),
                    "{outcome:?}"
                );
            }
        });
    });
    assert_eq!(victim.huge(), 0);
}

#[test]
fn too_little_memory_is_busy_and_nothing_changes() {
    if !machine_can() {
        return;
    }
    let victim = Victim::start("plain", 4);
    let wanted = with_argument(action(vec![victim.target()]), "free_memory_min", 1u64 << 60);
    let mut platform = registry();
    let record = platform.prepare(&wanted).unwrap();
    let error = platform.advance(&record, Direction::Apply).unwrap_err();
    assert!(matches!(error, PlatformError::Busy { .. }), "{error}");
    assert_eq!(victim.huge(), 0);
    drive(&mut platform, &record, Direction::Undo).unwrap();
}

#[test]
fn impossible_actions_are_rejected() {
    let process = ProcessId {
        pid: 1,
        start_ticks: 1,
    };
    let rejected = |wanted: &Action| {
        let outcome = registry().prepare(wanted);
        assert!(
            matches!(outcome, Err(PlatformError::Rejected { .. })),
            "{outcome:?}"
        );
    };
    let with = |pieces: Vec<u64>| action(vec![MemoryTarget { process, pieces }]);
    rejected(&with(vec![PIECE + BASE_PAGE]));
    rejected(&with(vec![2 * PIECE, PIECE]));
    rejected(&with(vec![PIECE, PIECE]));
    rejected(&with(vec![u64::MAX - PIECE + 1]));
    rejected(&with((1..40_000).map(|i| i * PIECE).collect()));
    let twice = MemoryTarget {
        process,
        pieces: vec![PIECE],
    };
    rejected(&action(vec![twice.clone(), twice]));
    rejected(&Action {
        target: Target::Nothing,
        ..with(vec![])
    });
    let wrong = [
        ("duty", "0"),
        ("duty", "NaN"),
        ("slice_ms", "0"),
        ("bytes_per_second", "1"),
        ("no such thing", ""),
    ];
    for (name, value) in wrong {
        rejected(&with_argument(with(vec![PIECE]), name, value));
    }
}

#[test]
fn a_captured_machine_is_never_acted_on() {
    let mut platform = Registry::new(&Root::new("some/captured/tree"));
    let outcome = platform.prepare(&action(vec![]));
    assert!(
        matches!(outcome, Err(PlatformError::Unsupported { .. })),
        "{outcome:?}"
    );
}

#[test]
fn the_placebo_keeps_the_contract() {
    let placebo = Action {
        effector: "placebo".into(),
        target: Target::Nothing,
        ..action(vec![])
    };
    assert_eq!(
        conformance::acting(&mut registry(), &mut registry(), &placebo),
        Vec::<String>::new()
    );
    let record = registry().prepare(&placebo).unwrap();
    assert!(record.found.is_empty() && !record.boot_id.is_empty());
    assert!(registry().advance(&record, Direction::Apply).unwrap().verified);
    let wrong = Action {
        effector: "placebo".into(),
        ..action(vec![])
    };
    assert!(matches!(
        registry().prepare(&wrong),
        Err(PlatformError::Rejected { .. })
    ));
}
