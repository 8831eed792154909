//! kill -9 at every step of the journal, on the real machine: restart, and the machine is as it was found.
//!
//! The parent starts a *victim* (64 MiB of memory it rewrites) and, for each fault point, a *child*: this test binary
//! again, which carries out an action on the victim through the runtime's own code and is killed by SIGKILL at that
//! point. Then a fresh journal and fresh effectors restore, and the victim's pieces must be in the states found before.

use crate::recovery::restore;
use homeostat_linux::sys::memory::{PIECE, Pagemap, PieceState};
use homeostat_linux::{LinuxPlatform, MonotonicClock, Root};
use homeostat_model::action::{MemoryTarget, Target};
use homeostat_model::{Action, Direction, ExperimentId, ProcessId};
use homeostat_platform::{Clock, Effectors};
use homeostat_store::journal::{Coin, FAULT_POINTS, Note};
use homeostat_store::{Journal, JournalOptions};
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};

const VICTIM: &str = "HOMEOSTAT_TEST_VICTIM";
const CRASH: &str = "HOMEOSTAT_TEST_CRASH";
const PIECES: usize = 32;

/// The victim: touches its memory for ever, in this test binary started again.
#[test]
#[ignore = "started by the crash test, not by itself"]
fn crash_victim() {
    if std::env::var_os(VICTIM).is_none() {
        return;
    }
    let piece = PIECE as usize;
    let mut memory = vec![0u8; (PIECES + 1) * piece];
    let start = memory.as_ptr() as usize;
    let aligned = start.next_multiple_of(piece) - start;
    for (i, byte) in memory.iter_mut().enumerate().step_by(4096) {
        *byte = content(i);
    }
    println!("READY {:x}", start + aligned);
    std::io::stdout().flush().unwrap();
    let mut line = String::new();
    let mut counter = 0usize;
    // Ends when the parent closes the pipe or says so; checks its own contents at the end.
    while std::io::stdin().read_line(&mut line).is_ok_and(|n| n > 0) {
        if line.trim() == "check" {
            let broken = memory
                .iter()
                .enumerate()
                .step_by(4096)
                .filter(|(i, b)| **b != content(*i))
                .count();
            println!("BROKEN {broken}");
            std::io::stdout().flush().unwrap();
        }
        counter += 1;
        assert!(counter < 10_000);
        line.clear();
    }
}

/// What stands at the start of each page. Never zero: the kernel frees zero-filled pages when it splits a large page.
fn content(index: usize) -> u8 {
    (index / 4096) as u8 | 1
}

/// The child: applies and undoes through the journal, and dies at the named point.
#[test]
#[ignore = "started by the crash test, not by itself"]
fn crash_child() {
    let Ok(plan) = std::env::var(CRASH) else { return };
    let mut parts = plan.split(' ');
    let mut next = || parts.next().unwrap().to_owned();
    let (point, directory, pid, start_ticks, address) = (next(), next(), next(), next(), next());
    let wanted = point.clone();
    let options = JournalOptions {
        fault: Some(Box::new(move |at: &'static str| {
            if at == wanted {
                kill_self();
            }
            Ok(())
        })),
        compact_bytes: Some(1),
    };
    let (mut journal, _) = Journal::open(Path::new(&directory), options).unwrap();
    let process = ProcessId {
        pid: pid.parse().unwrap(),
        start_ticks: start_ticks.parse().unwrap(),
    };
    let first = u64::from_str_radix(&address, 16).unwrap();
    let pieces: Vec<u64> = (0..PIECES as u64).map(|i| first + i * PIECE).collect();
    let action = Action {
        id: journal.next_action_id(),
        effector: "large_pages".into(),
        workload: "victim".into(),
        target: Target::Memory(vec![MemoryTarget { process, pieces }]),
        arguments: std::collections::BTreeMap::from([("duty".to_owned(), "1".to_owned())]),
        why: "crash test".into(),
    };
    let mut platform = LinuxPlatform::new(Root::default());
    let record = platform.prepare(&action).unwrap();
    journal.intend(&record).unwrap();
    let drive = |platform: &mut LinuxPlatform, direction, die_after: Option<u32>| {
        let mut slices = 0;
        loop {
            let progress = platform.advance(&record, direction).unwrap();
            slices += 1;
            if die_after.is_some_and(|n| slices >= n) {
                kill_self();
            }
            if progress.done {
                return;
            }
        }
    };
    journal
        .note(Note::Coin(Coin {
            experiment: ExperimentId(1),
            block: 0,
            on: true,
        }))
        .unwrap();
    drive(
        &mut platform,
        Direction::Apply,
        (point == "own.first_slice_of_apply").then_some(1),
    );
    journal.applied(record.action.id).unwrap();
    if point == "own.applied" {
        kill_self();
    }
    journal.undoing(record.action.id).unwrap();
    drive(
        &mut platform,
        Direction::Undo,
        (point == "own.first_slice_of_undo").then_some(1),
    );
    journal.closed(record.action.id).unwrap();
    println!("SURVIVED");
}

fn kill_self() -> ! {
    let me = rustix::process::getpid();
    let _ = rustix::process::kill_process(me, rustix::process::Signal::KILL);
    loop {
        std::thread::park();
    }
}

struct Victim {
    child: Child,
    out: BufReader<std::process::ChildStdout>,
    process: ProcessId,
    address: u64,
}

impl Victim {
    fn start() -> Self {
        let mut child = again("crash_victim")
            .env(VICTIM, "1")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut out = BufReader::new(child.stdout.take().unwrap());
        let address = loop {
            let mut line = String::new();
            assert!(out.read_line(&mut line).unwrap() > 0, "the victim ended early");
            if let Some((_, hex)) = line.split_once("READY ") {
                break u64::from_str_radix(hex.trim(), 16).unwrap();
            }
        };
        let pid = child.id() as i32;
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
        let after_name = stat.rsplit_once(')').unwrap().1;
        let start_ticks = after_name.split_whitespace().nth(19).unwrap().parse().unwrap();
        Self {
            child,
            out,
            process: ProcessId { pid, start_ticks },
            address,
        }
    }

    fn states(&self) -> Vec<PieceState> {
        let mut states = Vec::new();
        let mut pagemap = Pagemap::open(Path::new("/proc"), self.process.pid).unwrap();
        pagemap
            .piece_states(self.address, PIECES as u64, &mut states)
            .unwrap();
        states
    }

    fn resident_kib(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.process.pid)).unwrap();
        let line = status.lines().find(|l| l.starts_with("RssAnon:")).unwrap();
        line.split_whitespace().nth(1).unwrap().parse().unwrap()
    }

    fn broken_bytes(&mut self) -> usize {
        self.child.stdin.as_mut().unwrap().write_all(b"check\n").unwrap();
        loop {
            let mut line = String::new();
            assert!(self.out.read_line(&mut line).unwrap() > 0);
            if let Some((_, n)) = line.split_once("BROKEN ") {
                return n.trim().parse().unwrap();
            }
        }
    }
}

impl Drop for Victim {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn again(test: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args([
        &format!("crash_tests::{test}"),
        "--exact",
        "--ignored",
        "--nocapture",
        "--test-threads=1",
    ]);
    command
}

#[test]
fn killed_at_every_step_the_machine_is_as_it_was_found() {
    let machine = {
        use homeostat_platform::Sensors;
        LinuxPlatform::new(Root::default()).machine().unwrap()
    };
    if !machine.can("process_madvise.collapse") || !machine.can("process_madvise.split") {
        println!("skipped: this kernel or user cannot convert memory from outside");
        return;
    }
    let mut victim = Victim::start();
    // Once round, so that the victim's own buffers are there before anything is compared.
    assert_eq!(victim.broken_bytes(), 0);
    let found = victim.states();
    let resident = victim.resident_kib();
    if found.contains(&PieceState::Huge) {
        println!("skipped: this machine gives large pages to everybody (transparent_hugepage/enabled)");
        return;
    }
    assert!(found.iter().all(|s| *s == PieceState::Full), "{found:?}");
    let own = [
        "own.first_slice_of_apply",
        "own.applied",
        "own.first_slice_of_undo",
        "own.never",
    ];
    let mut died = 0;
    for point in FAULT_POINTS.iter().chain(&own) {
        let directory = tempfile::tempdir().unwrap();
        let plan = format!(
            "{} {} {} {} {:x}",
            point,
            directory.path().display(),
            victim.process.pid,
            victim.process.start_ticks,
            victim.address
        );
        let output = again("crash_child").env(CRASH, plan).output().unwrap();
        let text =
            String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
        let killed = !output.status.success();
        died += usize::from(killed);
        assert!(killed || text.contains("SURVIVED"), "{point}: {text}");
        assert!(!killed || !text.contains("panicked"), "{point}: {text}");

        let (mut journal, _) = Journal::open(directory.path(), JournalOptions::default()).unwrap();
        let mut platform = LinuxPlatform::new(Root::default());
        let clock = MonotonicClock;
        let before = clock.now();
        let report = restore(&mut journal, &mut platform, &clock, &machine.boot_id, false);
        assert!(report.complete(), "{point}: {report:?}");
        assert!(clock.now() >= before);
        assert_eq!(journal.owed().count(), 0, "{point}");
        assert_eq!(victim.states(), found, "{point}: states of the pieces");
        assert_eq!(victim.resident_kib(), resident, "{point}: resident memory");
        assert_eq!(victim.broken_bytes(), 0, "{point}: contents");
    }
    assert!(died >= 8, "only {died} fault points were reached");
}
