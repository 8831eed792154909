//! kill -9 at every step of the journal, on the real machine: restart, and the machine is as it was found.
//!
//! The parent starts a *victim* (64 MiB of memory it rewrites, and some threads) and, for each fault point, a *child*: this
//! test binary again, which carries out an action on the victim through the runtime's own code and is killed by SIGKILL
//! at that point. Then a fresh journal and fresh effectors restore, and the victim must be as it was found: its pieces in
//! their states, its threads with their masks, its pages on their nodes.

use crate::Runtime;
use crate::recovery::restore;
use homeostat_effectors::Registry;
use homeostat_engine::Policy;
use homeostat_kernel::Root;
use homeostat_kernel::clock::MonotonicClock;
use homeostat_kernel::memory::{BASE_PAGE, PIECE, Pagemap, PieceState};
use homeostat_kernel::numa::{PageCall, PageStatus};
use homeostat_linux::LinuxPlatform;
use homeostat_model::action::{MemoryTarget, PageMove, Target};
use homeostat_model::{
    Action, ActionId, Bytes, CpuId, Direction, ExperimentId, Machine, Nanoseconds, NodeId, ProcessId,
};
use homeostat_platform::{Clock, Effectors, PlatformError, SampleRequest, Sensors};
use homeostat_store::journal::{Coin, FAULT_POINTS, Note};
use homeostat_store::{HistoryOptions, Journal, JournalOptions, ResilientHistory};
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};

const VICTIM: &str = "HOMEOSTAT_TEST_VICTIM";
const CRASH: &str = "HOMEOSTAT_TEST_CRASH";
/// The kind of victim that takes small pages only.
const SMALL: &str = "small";
const PIECES: usize = 32;

/// The victim: touches its memory for ever, in this test binary started again.
#[test]
#[ignore = "started by the crash test, not by itself"]
fn crash_victim() {
    let Ok(what) = std::env::var(VICTIM) else { return };
    if what == SMALL {
        // A machine may give large pages to everybody, and those are not moved.
        rustix::thread::disable_transparent_huge_pages(true).unwrap();
    }
    for _ in 0..3 {
        std::thread::spawn(|| {
            loop {
                std::thread::park();
            }
        });
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
    let (what, place) = (next(), next().parse().unwrap());
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
    let action = action(&what, journal.next_action_id(), process, first, place);
    let mut platform = Registry::new(&Root::default());
    let record = platform.prepare_for(&action, &[process]).unwrap();
    journal.intend(&record).unwrap();
    let drive = |platform: &mut Registry, direction, die_after: Option<u32>| {
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
    journal.put_back(record.action.id).unwrap();
    journal.closed(record.action.id).unwrap();
    println!("SURVIVED");
}

/// The change that the child makes: `place` is the CPU or the node of the target.
fn action(what: &str, id: ActionId, process: ProcessId, first: u64, place: u32) -> Action {
    let (target, arguments): (Target, &[(&str, &str)]) = match what {
        "large_pages" => {
            let pieces = (0..PIECES as u64).map(|i| first + i * PIECE).collect();
            (
                Target::Memory(vec![MemoryTarget { process, pieces }]),
                &[("duty", "1")],
            )
        }
        "thread_placement" => (Target::Cpus(vec![CpuId(place)]), &[]),
        "page_placement" => (
            Target::Pages(PageMove {
                node: NodeId(place),
                bytes: Bytes(2 * PIECES as u64 * PIECE),
                shared: false,
            }),
            // In many slices, so that the first is not the whole.
            &[
                ("duty", "1"),
                ("private_share_max", "1"),
                ("bytes_per_second", "134217728"),
            ],
        ),
        other => panic!("{other}"),
    };
    Action {
        id,
        effector: what.into(),
        workload: "victim".into(),
        target,
        arguments: arguments
            .iter()
            .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
            .collect(),
        why: "crash test".into(),
    }
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
    fn start(kind: &str) -> Self {
        let mut child = again("crash_victim")
            .env(VICTIM, kind)
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

    /// The CPUs of each thread, and the CPUs of the main thread as numbers.
    fn masks(&self) -> Vec<(String, String)> {
        let tasks = format!("/proc/{}/task", self.process.pid);
        let mut found: Vec<(String, String)> = std::fs::read_dir(&tasks)
            .unwrap()
            .map(|entry| {
                let thread = entry.unwrap().file_name().into_string().unwrap();
                let status = std::fs::read_to_string(format!("{tasks}/{thread}/status")).unwrap();
                let line = status
                    .lines()
                    .find_map(|l| l.strip_prefix("Cpus_allowed_list:"))
                    .unwrap();
                (thread, line.trim().to_owned())
            })
            .collect();
        found.sort();
        found
    }

    /// The node of each page.
    fn nodes(&self) -> Vec<PageStatus> {
        let mut call = PageCall::default();
        let mut found = Vec::new();
        for piece in 0..PIECES as u64 {
            let start = self.address + piece * PIECE;
            let pages: Vec<u64> = (start..start + PIECE).step_by(BASE_PAGE as usize).collect();
            found.extend_from_slice(call.nodes_of(self.process.pid, &pages).unwrap());
        }
        found
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

fn machine() -> Machine {
    LinuxPlatform::new(Root::default()).machine().unwrap()
}

/// Kills a child that makes this change at each step; what is seen of the victim must be the same after each.
fn at_every_step<T: PartialEq + std::fmt::Debug>(
    what: &str,
    place: u32,
    victim: &mut Victim,
    boot_id: &str,
    seen: impl Fn(&Victim) -> T,
) {
    let found = seen(victim);
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
            "{} {} {} {} {:x} {what} {place}",
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
        let report = restore(&mut journal, &mut platform, &clock, boot_id, false);
        assert!(report.complete(), "{point}: {report:?}");
        assert!(clock.now() >= before);
        assert_eq!(journal.owed().count(), 0, "{point}");
        let now = seen(victim);
        let start = |state: &T| format!("{state:?}").chars().take(2000).collect::<String>();
        assert!(now == found, "{point}: {} and not {}", start(&now), start(&found));
        assert_eq!(victim.broken_bytes(), 0, "{point}: contents");
    }
    assert!(died >= 8, "only {died} fault points were reached");
}

#[test]
fn killed_at_every_step_the_machine_is_as_it_was_found() {
    let machine = machine();
    if !machine.can("process_madvise.collapse") || !machine.can("process_madvise.split") {
        println!("skipped: this kernel or user cannot convert memory from outside");
        return;
    }
    let mut victim = Victim::start("plain");
    // Once round, so that the victim's own buffers are there before anything is compared.
    assert_eq!(victim.broken_bytes(), 0);
    let found = victim.states();
    if found.contains(&PieceState::Huge) {
        println!("skipped: this machine gives large pages to everybody (transparent_hugepage/enabled)");
        return;
    }
    assert!(found.iter().all(|s| *s == PieceState::Full), "{found:?}");
    at_every_step("large_pages", 0, &mut victim, &machine.boot_id, |v| {
        (v.states(), v.resident_kib())
    });
}

#[test]
fn killed_at_every_step_the_threads_have_the_masks_that_were_found() {
    let machine = machine();
    if machine.cpus.len() < 2 || !rustix::process::geteuid().is_root() {
        println!("skipped: one CPU only, or not root");
        return;
    }
    let mut victim = Victim::start("plain");
    assert_eq!(victim.broken_bytes(), 0);
    let everywhere = victim.masks();
    assert!(everywhere.len() >= 4, "{everywhere:?}");
    let last = machine.cpus.last().map_or(0, |c| c.id.0);
    if everywhere.iter().any(|(_, list)| *list == last.to_string()) {
        println!("skipped: this test is bound to one CPU");
        return;
    }
    at_every_step(
        "thread_placement",
        last,
        &mut victim,
        &machine.boot_id,
        Victim::masks,
    );
}

/// A program that is nobody's child here: descendants of homeostat itself are no workloads.
struct Orphan(ProcessId);

impl Orphan {
    fn start() -> Self {
        let told = Command::new("sh")
            .args(["-c", "sleep 600 >/dev/null 2>&1 & echo $!"])
            .output()
            .unwrap();
        let pid = String::from_utf8(told.stdout).unwrap().trim().parse().unwrap();
        let mut orphan = Self(ProcessId { pid, start_ticks: 0 });
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
        let after_name = stat.rsplit_once(')').unwrap().1;
        orphan.0.start_ticks = after_name.split_whitespace().nth(19).unwrap().parse().unwrap();
        orphan
    }

    fn mask(&self) -> String {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.0.pid)).unwrap();
        let mask = status.lines().find_map(|l| l.strip_prefix("Cpus_allowed_list:"));
        mask.unwrap().trim().to_owned()
    }
}

impl Drop for Orphan {
    fn drop(&mut self) {
        if let Some(pid) = rustix::process::Pid::from_raw(self.0.pid) {
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
        }
    }
}

/// Stopped with the changes kept, and started again: what homeostat has set is not taken for a person's choice.
#[test]
fn what_was_kept_is_known_again_after_a_restart() {
    let machine = machine();
    if machine.cpus.len() < 2 || !rustix::process::geteuid().is_root() {
        println!("skipped: one CPU only, or not root");
        return;
    }
    let victim = Orphan::start();
    let found = victim.mask();
    let last = machine.cpus.last().map_or(0, |c| c.id.0);
    // The workload that holds the victim, and what is seen to restrict it.
    let look = |platform: &mut LinuxPlatform| {
        let scan = SampleRequest {
            scan: true,
            detail: Vec::new(),
        };
        let workloads = platform.sample(&scan).unwrap().workloads.unwrap();
        let holder = workloads
            .into_iter()
            .find(|w| w.processes.contains(&victim.0))
            .expect("the victim belongs to a workload");
        // A busy machine may not look in time.
        let places = loop {
            match platform.look_at_places(&holder.id) {
                Err(PlatformError::Busy { .. }) => MonotonicClock.sleep(Nanoseconds::from_millis(100)),
                places => break places.unwrap(),
            }
        };
        (holder.id, places.bound)
    };
    let mut platform = LinuxPlatform::new(Root::default());
    let (workload, bound) = look(&mut platform);
    if let Some(bound) = bound {
        println!("skipped: what this test runs in is restricted already: {bound}");
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let options = || (directory.path(), JournalOptions::default());
    let (mut journal, _) = Journal::open(options().0, options().1).unwrap();
    let mut action = action("thread_placement", journal.next_action_id(), victim.0, 0, last);
    action.workload = workload;
    let record = Registry::new(&Root::default())
        .prepare_for(&action, &[victim.0])
        .unwrap();
    journal.intend(&record).unwrap();
    while !platform.advance(&record, Direction::Apply).unwrap().done {}
    journal.applied(action.id).unwrap();
    journal.kept(action.id).unwrap();
    drop((journal, platform));

    let (_, bound) = look(&mut LinuxPlatform::new(Root::default()));
    assert!(
        bound.is_some_and(|b| b.contains(&format!("CPUs {last}"))),
        "nobody told it"
    );
    let (journal, _) = Journal::open(options().0, options().1).unwrap();
    let history = ResilientHistory::open(
        &directory.path().join("history.db"),
        HistoryOptions::default(),
        MonotonicClock.unix_seconds(),
    );
    let (mut runtime, report) = Runtime::start(
        LinuxPlatform::new(Root::default()),
        MonotonicClock,
        journal,
        history,
        Vec::new(),
        Policy::default(),
    )
    .unwrap();
    assert_eq!((report.kept.len(), report.undone.len()), (1, 0), "{report:?}");
    assert_eq!(look(runtime.platform()).1, None);
    drop(runtime);
    let (mut journal, _) = Journal::open(options().0, options().1).unwrap();
    let mut platform = LinuxPlatform::new(Root::default());
    let report = restore(
        &mut journal,
        &mut platform,
        &MonotonicClock,
        &machine.boot_id,
        true,
    );
    assert!(report.complete(), "{report:?}");
    assert_eq!(victim.mask(), found);
}

#[test]
fn killed_at_every_step_the_pages_are_on_the_nodes_where_they_were_found() {
    let machine = machine();
    if !machine.can("placement.pages") {
        println!(
            "skipped: {}",
            machine
                .capability("placement.pages")
                .map_or("not probed", |c| c.detail.as_str())
        );
        return;
    }
    let mut victim = Victim::start(SMALL);
    assert_eq!(victim.broken_bytes(), 0);
    let Some(PageStatus::On(home)) = victim.nodes().first().copied() else {
        panic!("{:?}", victim.nodes().first());
    };
    let elsewhere = machine
        .nodes
        .iter()
        .find(|n| n.memory.0 > 0 && n.id.0 != home)
        .map(|n| n.id.0)
        .unwrap();
    at_every_step(
        "page_placement",
        elsewhere,
        &mut victim,
        &machine.boot_id,
        Victim::nodes,
    );
}
