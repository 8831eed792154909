//! A daemon that is killed while it keeps a reader to a little memory, in control groups of version 1, where its own threads do that
//! from moment to moment: the reader goes on with nothing that limits it, and what the journal says is put back.
//!
//! The daemon is played by this program, started again, with the daemon's own journal on a disk, effectors and threads: when a real one
//! contains a reader is a matter of what goes on beside it. What puts back is what `homeostat restore` does.
//!
//! Needs root and a memory hierarchy that can be written; says so when it skips.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "helpers of tests"
)]

use homeostat_daemon::wiring;
use homeostat_effectors::Registry;
use homeostat_kernel::Root;
use homeostat_kernel::cache::residency;
use homeostat_model::action::{FileReader, Target};
use homeostat_model::{Action, Bytes, Direction, ProcessId};
use homeostat_platform::Effectors;
use homeostat_runtime::RecoveryReport;
use homeostat_store::journal::{self, OwedState};
use homeostat_store::{Journal, JournalOptions};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader, Read, Seek, Write};
use std::os::unix::process::parent_id;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const VERSION_ONE: &str = "/sys/fs/cgroup/memory";
/// What version 1 shows where nothing limits is above this.
const UNLIMITED_FROM: u64 = 1 << 60;
/// Names the file that the reader below reads.
const READS: &str = "HOMEOSTAT_TEST_READS";
/// Names the state directory of the daemon below …
const STATE: &str = "HOMEOSTAT_TEST_STATE";
/// … and the process that it contains.
const CONTAINS: &str = "HOMEOSTAT_TEST_CONTAINS";
/// Names the process of the test, with which both end. It may be gone before they look for the first time who has started them.
const TEST: &str = "HOMEOSTAT_TEST_PROCESS";
/// Begins the names of the groups and of the directory of a test; the number of its process follows.
const OURS: &str = "homeostat-test-killed-";
/// What the daemon says when it has contained it.
const CONTAINED: &str = "contained";
/// Twice what is left to the reader.
const FILE_BYTES: u64 = 64 << 20;
const LIMIT: Bytes = Bytes::from_mib(32);
/// Daemons that are killed, one after the other.
const KILLS: usize = 6;
/// Nothing here takes long; a busy machine may.
const PATIENCE: Duration = Duration::from_secs(120);
/// A directory that is older than this is no longer that of a test.
const LEFT_AFTER: Duration = Duration::from_secs(3600);

/// The process of the test that has started this one.
fn test_process() -> u32 {
    std::env::var(TEST).unwrap().parse().unwrap()
}

/// Reads a file over and over as long as the test lives; an error ends it.
#[test]
fn the_reader_that_is_contained() {
    let Some(path) = std::env::var_os(READS) else {
        return;
    };
    let test = test_process();
    let mut file = fs::File::open(path).unwrap();
    let mut buffer = vec![0; 256 << 10];
    while parent_id() == test {
        if file.read(&mut buffer).unwrap() == 0 {
            file.rewind().unwrap();
        }
    }
}

/// Contains a process as the daemon does, says so, and goes on until it is killed.
#[test]
fn the_daemon_that_is_killed() {
    let (Some(state), Ok(reader)) = (std::env::var_os(STATE), std::env::var(CONTAINS)) else {
        return;
    };
    let test = test_process();
    let begun = Instant::now();
    let wait = |time: Duration| {
        assert!(begun.elapsed() < PATIENCE, "it is not contained");
        std::thread::sleep(time);
    };
    let (mut journal, _) = Journal::open(Path::new(&state), JournalOptions::default()).unwrap();
    let id = journal.next_action_id();
    let mut effectors = Registry::new(&Root::default());
    let action = Action {
        id,
        effector: "memory_containment".into(),
        workload: "victim".into(),
        target: Target::Reader(FileReader {
            workload: "reader".into(),
            processes: vec![process(reader.parse().unwrap())],
            limit: LIMIT,
        }),
        arguments: BTreeMap::new(),
        why: "test".into(),
    };
    let record = effectors.prepare(&action).unwrap();
    journal.intend(&record).unwrap();
    loop {
        let made = effectors.advance(&record, Direction::Apply).unwrap();
        if made.done {
            assert!(made.verified && made.finished == 1, "{made:?}");
            break;
        }
        wait(Duration::from_nanos(made.pause.0));
    }
    journal.applied(id).unwrap();
    while effectors.kept_small().looks < 20 {
        effectors.tick();
        wait(Duration::from_millis(5));
    }
    println!("\n{CONTAINED}");
    while parent_id() == test {
        effectors.tick();
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// This program again, in which only that test is run.
fn again(test: &str) -> Command {
    let mut program = Command::new(std::env::current_exe().unwrap());
    program
        .args(["--exact", test, "--nocapture"])
        .env(TEST, std::process::id().to_string())
        .stdin(Stdio::null());
    program
}

fn process(pid: u32) -> ProcessId {
    let text = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let after = &text[text.rfind(')').unwrap() + 2..];
    ProcessId {
        pid: pid.try_into().unwrap(),
        start_ticks: after.split(' ').nth(19).unwrap().parse().unwrap(),
    }
}

/// What tests have left in this directory that were killed themselves, as far as nobody has the number of their process now.
fn left_in(place: &Path) -> Vec<PathBuf> {
    let maker = |path: &Path| -> Option<u32> {
        let name = path.file_name()?.to_str()?.strip_prefix(OURS)?;
        name.split('-').next()?.parse().ok()
    };
    let is_gone = |pid: u32| !Path::new("/proc").join(pid.to_string()).exists();
    let entries = fs::read_dir(place).into_iter().flatten().flatten();
    entries
        .map(|e| e.path())
        .filter(|path| path.is_dir() && maker(path).is_some_and(is_gone))
        .collect()
}

/// Whether a directory is older than any that a test still uses: its process may live where we do not see it, in another container
/// with the same disk.
fn is_old(directory: &Path) -> bool {
    let changed = fs::metadata(directory).and_then(|about| about.modified());
    changed.is_ok_and(|then| then.elapsed().is_ok_and(|age| age > LEFT_AFTER))
}

/// A group and all below it, the lowest first.
fn with_those_below(group: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(group).into_iter().flatten().flatten();
    let below = entries.map(|e| e.path()).filter(|p| p.is_dir());
    let mut all: Vec<PathBuf> = below.flat_map(|group| with_those_below(&group)).collect();
    all.push(group.to_owned());
    all
}

/// Removes the groups of a test that was killed. A reader of it that is still there is ended; where anybody else is in one of them
/// they stay.
fn remove_left(group: &Path) {
    let groups = with_those_below(group);
    let mut readers = Vec::new();
    for group in &groups {
        let text = fs::read_to_string(group.join("cgroup.procs")).unwrap_or_default();
        for line in text.lines() {
            let held = line.parse().ok().and_then(Pid::from_raw).and_then(|pid| {
                // Held first: what is looked at then is what is ended, or nothing is.
                let held = pidfd_open(pid, PidfdFlags::empty()).ok()?;
                is_reader(pid).then_some(held)
            });
            let Some(held) = held else {
                eprintln!("{} stays: process {line} is in it", group.display());
                return;
            };
            readers.push(held);
        }
    }
    for reader in readers {
        let _ = pidfd_send_signal(&reader, Signal::KILL);
    }
    for _ in 0..100 {
        let left = groups
            .iter()
            .filter(|group| fs::remove_dir(group).is_err() && group.exists());
        if left.count() == 0 {
            return;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    eprintln!("{} stays: it cannot be removed", group.display());
}

/// Whether a process is the reader of such a test, by what it was started with.
fn is_reader(pid: Pid) -> bool {
    let words = |file: &str| fs::read(format!("/proc/{}/{file}", pid.as_raw_nonzero())).unwrap_or_default();
    let has = |words: &[u8], is_it: &dyn Fn(&[u8]) -> bool| words.split(|byte| *byte == 0).any(is_it);
    let begins = format!("{READS}=");
    has(&words("environ"), &|word| word.starts_with(begins.as_bytes()))
        && has(&words("cmdline"), &|word| word == b"the_reader_that_is_contained")
}

/// A group of version 1, below another one; both are gone on drop.
struct Groups {
    above: PathBuf,
    group: PathBuf,
}

impl Groups {
    /// `None` where the machine has no such groups, or they cannot be written.
    fn new() -> Option<Self> {
        for left in left_in(Path::new(VERSION_ONE)) {
            remove_left(&left);
        }
        let above = Path::new(VERSION_ONE).join(format!("{OURS}{}", std::process::id()));
        let group = above.join("programs");
        if !Path::new(VERSION_ONE).join("memory.stat").exists() || fs::create_dir_all(&group).is_err() {
            eprintln!("skipped: needs root and control groups of version 1 that count memory");
            return None;
        }
        Some(Self { above, group })
    }

    /// The groups below ours.
    fn below(&self) -> Vec<PathBuf> {
        let entries = fs::read_dir(&self.group).into_iter().flatten().flatten();
        entries.map(|e| e.path()).filter(|p| p.is_dir()).collect()
    }
}

impl Drop for Groups {
    fn drop(&mut self) {
        for _ in 0..100 {
            for below in self.below() {
                let _ = fs::remove_dir(below);
            }
            let _ = fs::remove_dir(&self.group);
            if fs::remove_dir(&self.above).is_ok() {
                return;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

fn inside(group: &Path) -> Vec<u32> {
    let text = fs::read_to_string(group.join("cgroup.procs")).unwrap();
    text.lines().map(|l| l.parse().unwrap()).collect()
}

fn limit(group: &Path) -> u64 {
    let text = fs::read_to_string(group.join("memory.limit_in_bytes")).unwrap();
    text.trim().parse().unwrap()
}

/// A reader in a group of its own. It ends before the group goes.
struct Scene {
    reader: Child,
    file: PathBuf,
    groups: Groups,
}

impl Scene {
    /// `None` where it cannot be, also where the file system keeps the pages of files in memory whatever is dropped.
    fn new(disk: &Path) -> Option<Self> {
        let groups = Groups::new()?;
        let path = disk.join("file");
        let mut file = fs::File::create(&path).unwrap();
        for _ in 0..FILE_BYTES >> 20 {
            file.write_all(&[1; 1 << 20]).unwrap();
        }
        file.sync_all().unwrap();
        drop_pages(&path);
        let file = fs::File::open(&path).unwrap();
        if residency(&file, 0, FILE_BYTES).unwrap().contains(&true) {
            eprintln!("skipped: this file system keeps the pages of files in memory");
            return None;
        }
        let reader = again("the_reader_that_is_contained")
            .env(READS, &path)
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let scene = Self {
            reader,
            file: path,
            groups,
        };
        let procs = scene.groups.group.join("cgroup.procs");
        fs::write(procs, scene.reader.id().to_string()).unwrap();
        Some(scene)
    }

    /// What the reader has read so far, in bytes.
    fn has_read(&self) -> u64 {
        let text = fs::read_to_string(format!("/proc/{}/io", self.reader.id())).unwrap();
        let bytes = text.lines().find_map(|line| line.strip_prefix("rchar: "));
        bytes.unwrap().parse().unwrap()
    }

    /// Waits until the reader has read a part of its file more.
    fn goes_on(&mut self) {
        const PART: u64 = 16 << 20;
        let begun = Instant::now();
        let before = self.has_read();
        while self.has_read() < before + PART {
            let ended = self.reader.try_wait().unwrap();
            assert!(ended.is_none(), "the reader has ended: {ended:?}");
            assert!(begun.elapsed() < PATIENCE, "the reader stands still");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Nothing of homeostat is left, and the reader is where it was, with no limit.
    fn is_as_found(&self) -> bool {
        self.groups.below().is_empty()
            && inside(&self.groups.group) == [self.reader.id()]
            && limit(&self.groups.group) >= UNLIMITED_FROM
    }
}

impl Drop for Scene {
    fn drop(&mut self) {
        let _ = self.reader.kill();
        let _ = self.reader.wait();
    }
}

fn drop_pages(path: &Path) {
    let file = fs::File::open(path).unwrap();
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
}

/// A daemon that has contained a process.
struct Daemon(Child);

impl Daemon {
    fn contains(state: &Path, reader: u32) -> Self {
        let child = again("the_daemon_that_is_killed")
            .env(STATE, state)
            .env(CONTAINS, reader.to_string())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut daemon = Self(child);
        let said = BufReader::new(daemon.0.stdout.take().unwrap());
        let mut lines = said.lines().map_while(Result::ok);
        assert!(lines.any(|line| line == CONTAINED), "it has ended");
        daemon
    }

    /// By SIGKILL; it is gone when this returns.
    fn kill(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_killed_daemon_leaves_its_reader_unlimited_and_what_it_owed_is_put_back_from_the_disk() {
    let program = std::env::current_exe().unwrap();
    let beside = program.parent().unwrap();
    for left in left_in(beside).into_iter().filter(|left| is_old(left)) {
        let _ = fs::remove_dir_all(left);
    }
    let name = format!("{OURS}{}-", std::process::id());
    let disk = tempfile::Builder::new().prefix(&name).tempdir_in(beside).unwrap();
    let Some(mut scene) = Scene::new(disk.path()) else {
        return;
    };
    let state = disk.path().join("state");
    let page = rustix::param::page_size() as u64;
    let mut limited = 0;
    for _ in 0..KILLS {
        let mut daemon = Daemon::contains(&state, scene.reader.id());
        // What it read before counts where it was read: from here on it grows where it is kept small.
        drop_pages(&scene.file);
        scene.goes_on();
        daemon.kill();

        let found = journal::read(&state).unwrap();
        assert_eq!(found.owed.len(), 1, "{found:?}");
        let (id, owed) = found.owed.first_key_value().unwrap();
        assert_eq!(owed.state, OwedState::Applied);
        let group = PathBuf::from(&owed.record.found["group"]);
        assert_eq!(inside(&group), [scene.reader.id()]);
        let left = limit(&group);
        if left < UNLIMITED_FROM {
            // It died in the microseconds of a limit, which is known by its value.
            assert!((left + page) % (1 << 20) == 0, "{left}");
            limited += 1;
        }
        scene.goes_on();

        let restored = wiring::restore(&state, false, true).unwrap();
        let undone: Vec<_> = restored.report.undone.iter().map(|(id, _)| *id).collect();
        assert_eq!(undone, [*id]);
        assert!(restored.report.complete() && !restored.damaged, "{restored:?}");
        assert!(scene.is_as_found(), "{restored:?}");
        assert!(!group.exists());
        let found = journal::read(&state).unwrap();
        assert!(found.owed.is_empty() && found.is_whole(), "{found:?}");
        let once_more = wiring::restore(&state, false, true).unwrap();
        assert_eq!(once_more.report, RecoveryReport::default());
        scene.goes_on();
    }
    assert!(limited < KILLS, "each time a limit was left in force");
}
