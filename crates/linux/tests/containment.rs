//! Keeping a reader to a little memory, on this machine's control groups: made, undone and undone again, also from the
//! record alone after a crash at any step, and never against what somebody chose.
//!
//! Needs root and a memory hierarchy that can be written; says so when it skips.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "helpers of tests"
)]

use homeostat_effectors::fetcher::Launch;
use homeostat_effectors::{Registry, fetcher};
use homeostat_kernel::Root;
use homeostat_kernel::cache::{is_told, pages_of, residency};
use homeostat_model::action::{FileReader, Target};
use homeostat_model::{
    Action, ActionId, Bytes, Direction, ProcessId, Progress, UndoRecord, Workload, WorkloadKind,
};
use homeostat_platform::{Effectors, PlatformError, conformance};
use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

const VERSION_ONE: &str = "/sys/fs/cgroup/memory";

/// A group of version 1, below another one, with two programs in it that do nothing; all is gone on drop.
struct Scene {
    above: PathBuf,
    group: PathBuf,
    children: Vec<Child>,
}

impl Scene {
    /// `None` where the machine has no such groups, or they cannot be written.
    fn new(name: &str) -> Option<Self> {
        let above = Path::new(VERSION_ONE).join(format!("homeostat-test-{name}-{}", std::process::id()));
        let group = above.join("programs");
        if !Path::new(VERSION_ONE).join("memory.stat").exists() || fs::create_dir_all(&group).is_err() {
            eprintln!("skipped: needs root and control groups of version 1 that count memory");
            return None;
        }
        let mut scene = Self {
            above,
            group,
            children: Vec::new(),
        };
        for _ in 0..2 {
            let child = Command::new("sleep")
                .arg("600")
                .stdin(Stdio::null())
                .spawn()
                .unwrap();
            fs::write(scene.group.join("cgroup.procs"), child.id().to_string()).unwrap();
            scene.children.push(child);
        }
        Some(scene)
    }

    fn processes(&self) -> Vec<ProcessId> {
        self.children.iter().map(|c| process(c.id())).collect()
    }

    fn action(&self, id: u64) -> Action {
        Action {
            id: ActionId(id),
            effector: "memory_containment".into(),
            workload: "victim".into(),
            target: Target::Reader(FileReader {
                workload: "reader".into(),
                processes: self.processes(),
                limit: Bytes::from_mib(32),
            }),
            arguments: BTreeMap::new(),
            why: "test".into(),
        }
    }

    /// The groups below ours.
    fn below(&self) -> Vec<PathBuf> {
        fs::read_dir(&self.group)
            .unwrap()
            .map(|e| e.unwrap().path())
            .filter(|p| p.is_dir())
            .collect()
    }

    fn inside(&self, group: &Path) -> Vec<u32> {
        let text = fs::read_to_string(group.join("cgroup.procs")).unwrap();
        let mut found: Vec<u32> = text.lines().map(|l| l.parse().unwrap()).collect();
        found.sort_unstable();
        found
    }

    /// Reads files whole, as somebody of the group: the kernel counts their pages for it.
    fn fill(&self, files: &[&Path]) {
        let script = "echo $$ > \"$0/cgroup.procs\" && cat \"$@\" > /dev/null";
        let done = Command::new("sh")
            .args(["-c", script])
            .arg(&self.group)
            .args(files)
            .status();
        assert!(done.unwrap().success());
    }

    /// Limits the group above so that it uses this share of its limit, percent.
    fn limit_above(&self, share: u64) {
        let used = fs::read_to_string(self.above.join("memory.usage_in_bytes")).unwrap();
        let limit = used.trim().parse::<u64>().unwrap() * 100 / share;
        fs::write(self.above.join("memory.limit_in_bytes"), limit.to_string()).unwrap();
    }

    /// Nothing of ours is left, and everybody is where he was.
    fn is_as_found(&self) -> bool {
        let mut all: Vec<u32> = self.children.iter().map(Child::id).collect();
        all.sort_unstable();
        self.below().is_empty() && self.inside(&self.group) == all
    }
}

impl Drop for Scene {
    fn drop(&mut self) {
        for child in &mut self.children {
            let _ = child.kill();
            let _ = child.wait();
        }
        for _ in 0..100 {
            for below in fs::read_dir(&self.group).into_iter().flatten().flatten() {
                if below.path().is_dir() {
                    let _ = fs::remove_dir(below.path());
                }
            }
            let _ = fs::remove_dir(&self.group);
            if fs::remove_dir(&self.above).is_ok() {
                return;
            }
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
    }
}

fn process(pid: u32) -> ProcessId {
    let text = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let after = &text[text.rfind(')').unwrap() + 2..];
    ProcessId {
        pid: pid.try_into().unwrap(),
        start_ticks: after.split(' ').nth(19).unwrap().parse().unwrap(),
    }
}

/// A shell that reads two files as far as it is told, or begins them anew, and is a child of the scene.
struct Reader {
    told: ChildStdin,
    says: BufReader<ChildStdout>,
}

impl Reader {
    fn start(scene: &mut Scene, first: &Path, second: &Path) -> Self {
        let script = "exec 3<\"$0\" 4<\"$1\"; \
            while read -r n; do if [ \"$n\" = anew ]; then exec 3<\"$0\" 4<\"$1\"; \
            else head -c \"$n\" <&3 >/dev/null; head -c \"$n\" <&4 >/dev/null; fi; echo; done";
        let mut child = Command::new("sh")
            .args(["-c", script])
            .args([first, second])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (told, says) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        fs::write(scene.group.join("cgroup.procs"), child.id().to_string()).unwrap();
        scene.children.push(child);
        Self {
            told,
            says: BufReader::new(says),
        }
    }

    fn read(&mut self, bytes: u64) {
        self.tell(&bytes.to_string());
    }

    fn begin_anew(&mut self) {
        self.tell("anew");
    }

    fn tell(&mut self, what: &str) {
        writeln!(self.told, "{what}").unwrap();
        self.says.read_line(&mut String::new()).unwrap();
    }
}

fn registry() -> Registry {
    Registry::new(&Root::default())
}

fn drive(
    registry: &mut Registry,
    record: &UndoRecord,
    direction: Direction,
) -> Result<Progress, PlatformError> {
    for _ in 0..500 {
        match registry.advance(record, direction) {
            Ok(p) if !p.done => std::thread::sleep(std::time::Duration::from_nanos(p.pause.0)),
            answer => return answer,
        }
    }
    panic!("it does not end");
}

fn limit(group: &Path) -> u64 {
    let text = fs::read_to_string(group.join("memory.limit_in_bytes")).unwrap();
    text.trim().parse().unwrap()
}

fn kill_is_disabled(group: &Path) -> bool {
    let text = fs::read_to_string(group.join("memory.oom_control")).unwrap();
    text.contains("oom_kill_disable 1")
}

#[test]
fn a_reader_is_contained_and_everything_is_as_it_was() {
    let Some(scene) = Scene::new("life") else { return };
    let action = scene.action(1);
    assert_eq!(
        conformance::acting_patiently(
            &mut registry(),
            &mut registry(),
            &action,
            &homeostat_kernel::clock::MonotonicClock
        ),
        Vec::<String>::new()
    );
    assert!(scene.is_as_found());
    let mut effectors = registry();
    let record = effectors.prepare(&action).unwrap();
    assert!(scene.is_as_found(), "preparing changes nothing");
    let made = drive(&mut effectors, &record, Direction::Apply).unwrap();
    assert_eq!((made.finished, made.total, made.verified), (2, 2, true));
    let group = scene.below().pop().unwrap();
    assert_eq!(scene.inside(&group).len(), 2);
    // No limit stays: one would have the reader's system calls fail when it grows.
    assert!((0..50).any(|_| limit(&group) > 1 << 60));
    assert!(
        kill_is_disabled(&group),
        "nobody dies of one that is there for a moment"
    );
    drive(&mut effectors, &record, Direction::Undo).unwrap();
    assert!(scene.is_as_found());
}

#[test]
fn a_crash_at_any_step_is_undone_from_the_record_alone() {
    let Some(scene) = Scene::new("crash") else { return };
    let record = registry().prepare(&scene.action(2)).unwrap();
    let group = PathBuf::from(&record.found["group"]);
    let steps: [&dyn Fn(); 4] = [
        &|| {},
        &|| fs::create_dir(&group).unwrap(),
        &|| fs::write(group.join("memory.limit_in_bytes"), (32u64 << 20).to_string()).unwrap(),
        &|| fs::write(group.join("cgroup.procs"), scene.children[0].id().to_string()).unwrap(),
    ];
    for crashed_after in 0..steps.len() {
        for step in &steps[..=crashed_after] {
            step();
        }
        for _ in 0..2 {
            drive(&mut registry(), &record, Direction::Undo).unwrap();
            assert!(scene.is_as_found(), "after step {crashed_after}");
        }
    }
    // Half undone: the limit is gone, the processes are not.
    let mut effectors = registry();
    drive(&mut effectors, &record, Direction::Apply).unwrap();
    fs::write(group.join("memory.limit_in_bytes"), "-1").unwrap();
    drive(&mut registry(), &record, Direction::Undo).unwrap();
    assert!(scene.is_as_found());
}

#[test]
fn who_changes_the_limit_or_moves_the_reader_wins() {
    let Some(scene) = Scene::new("person") else { return };
    let mut effectors = registry();
    let record = effectors.prepare(&scene.action(3)).unwrap();
    let group = PathBuf::from(&record.found["group"]);
    let workloads = BTreeMap::from([(
        "reader".into(),
        Workload {
            id: "reader".into(),
            kind: WorkloadKind::ProcessGroup,
            former: None,
            owner: homeostat_model::Owner::Machine,
            others: Vec::new(),
            fingerprint: homeostat_model::Fingerprint::new("reader"),
            program: "sleep".into(),
            executable: String::new(),
            processes: scene.processes(),
            choice: Default::default(),
        },
    )]);
    drive(&mut effectors, &record, Direction::Apply).unwrap();
    assert_eq!(effectors.review(&workloads), []);
    fs::write(
        scene.group.join("cgroup.procs"),
        scene.children[0].id().to_string(),
    )
    .unwrap();
    let said = effectors.review(&workloads);
    assert!(said.len() == 1 && said[0].1.contains("moved out"), "{said:?}");
    assert_eq!(said[0].0.as_str(), "victim");
    drive(&mut effectors, &record, Direction::Undo).unwrap();
    assert!(scene.is_as_found());

    drive(&mut effectors, &record, Direction::Apply).unwrap();
    // For a while only: nobody keeps the group small any more, and that is said.
    fs::write(group.join("memory.limit_in_bytes"), (48u64 << 20).to_string()).unwrap();
    std::thread::sleep(std::time::Duration::from_millis(500));
    fs::write(group.join("memory.limit_in_bytes"), "-1").unwrap();
    assert!(
        effectors.review(&workloads)[0]
            .1
            .contains("limited by somebody else")
    );
    drive(&mut effectors, &record, Direction::Undo).unwrap();
    assert!(scene.is_as_found());

    drive(&mut effectors, &record, Direction::Apply).unwrap();
    fs::write(group.join("memory.limit_in_bytes"), (48u64 << 20).to_string()).unwrap();
    assert!(effectors.review(&workloads)[0].1.contains("changed to 50331648"));
    assert!(matches!(
        effectors.advance(&record, Direction::Apply),
        Err(PlatformError::Conflict { .. })
    ));
    let undone = drive(&mut effectors, &record, Direction::Undo).unwrap();
    assert_eq!(undone.finished, 0);
    assert_eq!(limit(&group), 48 << 20, "theirs stays");
    assert!(!kill_is_disabled(&group), "and with it what follows from a limit");
    assert_eq!(scene.inside(&group).len(), 2);
    for child in &scene.children {
        fs::write(scene.group.join("cgroup.procs"), child.id().to_string()).unwrap();
    }
}

#[test]
fn a_reader_that_ended_is_no_reader_and_one_that_was_born_since_joins() {
    let Some(mut scene) = Scene::new("birth") else {
        return;
    };
    let mut effectors = registry();
    let mut action = scene.action(4);
    let record = effectors.prepare(&action).unwrap();
    let group = PathBuf::from(&record.found["group"]);
    drive(&mut effectors, &record, Direction::Apply).unwrap();
    let mut workload = Workload {
        id: "reader".into(),
        kind: WorkloadKind::ProcessGroup,
        former: None,
        owner: homeostat_model::Owner::Machine,
        others: Vec::new(),
        fingerprint: homeostat_model::Fingerprint::new("reader"),
        program: "sleep".into(),
        executable: String::new(),
        processes: scene.processes(),
        choice: Default::default(),
    };
    let born = Command::new("sleep")
        .arg("600")
        .stdin(Stdio::null())
        .spawn()
        .unwrap();
    fs::write(scene.group.join("cgroup.procs"), born.id().to_string()).unwrap();
    workload.processes.push(process(born.id()));
    scene.children.push(born);
    assert_eq!(
        effectors.review(&BTreeMap::from([("reader".into(), workload)])),
        []
    );
    assert_eq!(scene.inside(&group).len(), 3);
    for child in &mut scene.children {
        child.kill().unwrap();
        child.wait().unwrap();
    }
    let said = effectors.review(&BTreeMap::new());
    assert!(said[0].1.contains("has ended"), "{said:?}");
    drive(&mut effectors, &record, Direction::Undo).unwrap();
    assert!(scene.below().is_empty());
    // Prepared again there is nobody, and another process of the same number is not meant.
    assert!(matches!(
        effectors.prepare(&action),
        Err(PlatformError::Vanished { .. })
    ));
    action.target = Target::Reader(FileReader {
        workload: "reader".into(),
        processes: vec![ProcessId {
            pid: std::process::id().try_into().unwrap(),
            start_ticks: 1,
        }],
        limit: Bytes::from_mib(32),
    });
    assert!(matches!(
        effectors.prepare(&action),
        Err(PlatformError::Vanished { .. })
    ));
    scene.children.clear();
}

/// Names the file that the program below reads again and again.
const STREAMS: &str = "HOMEOSTAT_TEST_STREAMS";
/// So much memory it takes at once when it is told a line, in bytes.
const GROWS: usize = 128 << 20;

/// A reader that grows when it is told to: by a system call that writes into new memory, and by touching it. Says what came of it.
#[test]
fn the_reader_that_grows() {
    let Some(path) = std::env::var_os(STREAMS) else {
        return;
    };
    let (tell, told) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        for line in std::io::stdin().lines() {
            if line.is_err() || tell.send(()).is_err() {
                return;
            }
        }
    });
    let mut file = fs::File::open(path).unwrap();
    let mut buffer = vec![0; 256 << 10];
    let mut kept = Vec::new();
    loop {
        match std::io::Read::read(&mut file, &mut buffer) {
            Ok(0) => std::io::Seek::rewind(&mut file).unwrap(),
            Ok(_) => {}
            Err(e) => println!("\nread: {e}"),
        }
        if told.try_recv().is_ok() {
            let mut memory = vec![0u8; GROWS];
            let done = std::io::Read::read_exact(&mut fs::File::open("/dev/zero").unwrap(), &mut memory);
            kept.push(memory);
            kept.push(vec![1; GROWS]);
            println!("\ngrown: {done:?}");
        }
    }
}

/// Not so under a limit: system calls of a group of version 1 fail where there is no room.
#[test]
fn a_contained_reader_keeps_little_of_what_it_reads_and_may_grow_all_the_same() {
    let Some(mut scene) = Scene::new("growth") else {
        return;
    };
    let tree = tempfile::tempdir_in(std::env::current_exe().unwrap().parent().unwrap()).unwrap();
    let Some(big) = file_on_disk(tree.path(), "big", 256) else {
        return;
    };
    for child in &mut scene.children {
        child.kill().unwrap();
        child.wait().unwrap();
    }
    let mut reader = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "the_reader_that_grows", "--nocapture"])
        .env(STREAMS, &big)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    fs::write(scene.group.join("cgroup.procs"), reader.id().to_string()).unwrap();
    let mut told = reader.stdin.take().unwrap();
    let said = BufReader::new(reader.stdout.take().unwrap());
    scene.children = vec![reader];
    let mut effectors = registry();
    let record = effectors.prepare(&scene.action(7)).unwrap();
    drive(&mut effectors, &record, Direction::Apply).unwrap();
    let group = scene.below().pop().unwrap();
    let used = || -> u64 {
        let text = fs::read_to_string(group.join("memory.usage_in_bytes")).unwrap();
        text.trim().parse::<u64>().unwrap() >> 20
    };
    // What it read before counts where it was read.
    rustix::fs::fadvise(
        fs::File::open(&big).unwrap(),
        0,
        None,
        rustix::fs::Advice::DontNeed,
    )
    .unwrap();
    std::thread::sleep(std::time::Duration::from_millis(500));
    let mut seen: Vec<u64> = (0..50)
        .map(|_| {
            std::thread::sleep(std::time::Duration::from_millis(10));
            used()
        })
        .collect();
    seen.sort_unstable();
    // 32 MiB; how far it is over that for a moment is a matter of speed.
    assert!(
        seen[25] < 160,
        "of 256 MiB that it reads again and again: {seen:?}"
    );
    let kept = effectors.kept_small();
    assert!(kept.groups == 1 && kept.looks > 10, "{kept:?}");
    for _ in 0..3 {
        writeln!(told).unwrap();
    }
    let mut grown = 0;
    for line in said.lines() {
        let line = line.unwrap();
        assert!(!line.contains("read: "), "{line}");
        if line.contains("grown: ") {
            assert!(line.contains("grown: Ok"), "{line}");
            grown += 1;
        }
        if grown == 3 {
            break;
        }
    }
    assert_eq!(grown, 3);
    drive(&mut effectors, &record, Direction::Undo).unwrap();
    assert_eq!(effectors.kept_small().groups, 0);
    assert!(scene.is_as_found());
}

#[test]
fn a_group_that_was_removed_while_it_was_in_force_owes_nothing() {
    let Some(mut scene) = Scene::new("removed") else {
        return;
    };
    let mut effectors = registry();
    let record = effectors.prepare(&scene.action(6)).unwrap();
    let group = PathBuf::from(&record.found["group"]);
    drive(&mut effectors, &record, Direction::Apply).unwrap();
    assert!(group.exists());
    for child in &mut scene.children {
        child.kill().unwrap();
        child.wait().unwrap();
    }
    // As a service manager does with the groups of a unit that has ended.
    for _ in 0..200 {
        if fs::remove_dir(&group).is_ok() {
            break;
        }
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    assert!(!group.exists());
    let said = effectors.review(&BTreeMap::new());
    assert!(said.len() == 1 && said[0].1.contains("has ended"), "{said:?}");
    assert!(matches!(
        drive(&mut effectors, &record, Direction::Apply),
        Err(PlatformError::Vanished { .. })
    ));
    // By this process and by a fresh one, as often as anybody likes.
    for _ in 0..2 {
        assert!(drive(&mut effectors, &record, Direction::Undo).unwrap().done);
        assert!(drive(&mut registry(), &record, Direction::Undo).unwrap().done);
    }
    assert!(scene.below().is_empty());
}

/// A file of so many MiB on a disk, none of it in memory; `None` where the file system keeps
/// the pages of files in memory whatever is dropped.
fn file_on_disk(tree: &Path, name: &str, mib: u64) -> Option<PathBuf> {
    let path = tree.join(name);
    let mut file = fs::File::create(&path).unwrap();
    for _ in 0..mib {
        file.write_all(&[1; 1 << 20]).unwrap();
    }
    file.sync_all().unwrap();
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
    if in_memory(&path, 0, mib) > 0 {
        eprintln!("skipped: this file system keeps the pages of files in memory");
        return None;
    }
    Some(path)
}

/// How many percent of a part of a file are in memory, from and to in MiB.
fn in_memory(path: &Path, from: u64, to: u64) -> usize {
    let file = fs::File::open(path).unwrap();
    let pages = residency(&file, from << 20, (to - from) << 20).unwrap();
    100 * pages.iter().filter(|there| **there).count() / pages.len()
}

/// The same to the nearest ten percent: what somebody holds at that moment, or has taken off its list to look at it, stays
/// when the kernel is told to drop it (DAMON, compaction and reclaim do so, with some pages at a time).
fn about_in_memory(path: &Path, from: u64, to: u64) -> usize {
    (in_memory(path, from, to) + 5) / 10 * 10
}

#[test]
fn what_the_reader_brought_before_is_given_back_but_not_what_somebody_else_has_open() {
    let Some(mut scene) = Scene::new("give-back") else {
        return;
    };
    let beside = std::env::current_exe().unwrap();
    let tree = tempfile::tempdir_in(beside.parent().unwrap()).unwrap();
    let (Some(alone), Some(shared)) = (
        file_on_disk(tree.path(), "alone", 32),
        file_on_disk(tree.path(), "shared", 32),
    ) else {
        return;
    };
    scene.fill(&[&alone, &shared]);
    let mut reader = Reader::start(&mut scene, &alone, &shared);
    reader.read(23 << 20);
    // A program that has nothing to do with the reader.
    let mut other = Command::new("sleep")
        .arg("600")
        .stdin(Stdio::from(fs::File::open(&shared).unwrap()))
        .spawn()
        .unwrap();
    let gives_back = |id, value: &str| Action {
        arguments: BTreeMap::from([("give_back".to_owned(), value.to_owned())]),
        ..scene.action(id)
    };
    let mut effectors = registry();
    let as_before = |path| (about_in_memory(path, 0, 22), about_in_memory(path, 22, 32));
    let told = |made: &Progress, what: &str| made.skipped.keys().any(|why| why.contains(what));

    // Told not to, it drops nothing.
    let record = effectors.prepare(&gives_back(7, "0")).unwrap();
    let made = drive(&mut effectors, &record, Direction::Apply).unwrap();
    assert!(made.verified && made.skipped.is_empty(), "{made:?}");
    drive(&mut effectors, &record, Direction::Undo).unwrap();
    assert_eq!((as_before(&alone), as_before(&shared)), ((100, 100), (100, 100)));

    // Nor where no group is full, and what was left behind takes nobody's room.
    scene.limit_above(80);
    let record = effectors.prepare(&gives_back(8, "1")).unwrap();
    let made = drive(&mut effectors, &record, Direction::Apply).unwrap();
    assert!(made.verified && made.skipped.is_empty(), "{made:?}");
    drive(&mut effectors, &record, Direction::Undo).unwrap();
    assert_eq!((as_before(&alone), as_before(&shared)), ((100, 100), (100, 100)));

    scene.limit_above(93);
    // A host that is busy beyond measure lets nobody look at a process in time, and it is not asked again for a while.
    let contained = |effectors: &mut Registry, record: &UndoRecord| {
        let mut made = drive(effectors, record, Direction::Apply).unwrap();
        for _ in 0..60 {
            if !told(&made, "cannot be inspected now") {
                break;
            }
            std::thread::sleep(std::time::Duration::from_secs(1));
            made = drive(effectors, record, Direction::Apply).unwrap();
        }
        made
    };
    let record = effectors.prepare(&gives_back(9, "1")).unwrap();
    let made = contained(&mut effectors, &record);
    assert_eq!((made.finished, made.total, made.verified), (3, 3, true));
    if told(&made, "not all processes can be seen") {
        eprintln!("skipped: {:?}", made.skipped);
    } else {
        // What lies behind it is gone, what is ahead and what was read last is not, nor is what the other one has open.
        assert_eq!(as_before(&alone), (0, 100), "{made:?}");
        assert_eq!(as_before(&shared), (100, 100), "{made:?}");
        assert!(told(&made, "another process has it open"), "{made:?}");
        assert_eq!(made.skipped.len(), 1, "{made:?}");
        // The reader goes on where it was, and what it left while it was released goes the next time.
        drive(&mut effectors, &record, Direction::Undo).unwrap();
        reader.read(4 << 20);
        other.kill().unwrap();
        other.wait().unwrap();
        scene.limit_above(93);
        drive(&mut effectors, &record, Direction::Apply).unwrap();
        assert_eq!(
            (about_in_memory(&alone, 0, 26), about_in_memory(&alone, 26, 32)),
            (0, 100)
        );
        assert_eq!(
            (about_in_memory(&shared, 0, 26), about_in_memory(&shared, 26, 32)),
            (0, 100)
        );
        // It begins anew while it is released: what it had read lies ahead of it, and goes as well.
        drive(&mut effectors, &record, Direction::Undo).unwrap();
        scene.limit_above(10);
        scene.fill(&[&alone, &shared]);
        reader.begin_anew();
        reader.read(4 << 20);
        scene.limit_above(93);
        assert_eq!(about_in_memory(&alone, 0, 32), 100);
        let _ = effectors.told();
        contained(&mut effectors, &record);
        // It was seen to have read as far as that; what is being read ahead for it stays.
        for file in [&alone, &shared] {
            assert_eq!(
                (about_in_memory(file, 0, 2), about_in_memory(file, 18, 26)),
                (0, 0)
            );
            assert_eq!(
                (about_in_memory(file, 2, 18), about_in_memory(file, 26, 32)),
                (100, 100)
            );
        }
        let said = effectors.told();
        let Some((victim, sentence)) = said.last() else {
            panic!("{said:?}");
        };
        assert_eq!(victim, &scene.action(9).workload);
        assert!(sentence.contains("reader is contained"), "{sentence}");
        assert!(
            sentence.contains("also ahead of it where it has begun anew"),
            "{sentence}"
        );
    }
    let _ = other.kill();
    let _ = other.wait();
    drive(&mut effectors, &record, Direction::Undo).unwrap();
    assert!(scene.is_as_found());
}

#[test]
fn a_group_that_somebody_limited_and_impossible_wishes_are_refused() {
    let Some(scene) = Scene::new("choice") else { return };
    let mut effectors = registry();
    fs::write(
        scene.group.join("memory.limit_in_bytes"),
        (256u64 << 20).to_string(),
    )
    .unwrap();
    let refused = effectors.prepare(&scene.action(5));
    assert!(
        matches!(refused, Err(PlatformError::Conflict { .. })),
        "{refused:?}"
    );
    fs::write(scene.group.join("memory.limit_in_bytes"), "-1").unwrap();
    effectors.prepare(&scene.action(5)).unwrap();
    let with = |change: &dyn Fn(&mut FileReader)| {
        let mut action = scene.action(6);
        let Target::Reader(reader) = &mut action.target else {
            panic!("another target");
        };
        change(reader);
        action
    };
    for wrong in [
        with(&|r| r.limit = Bytes::from_mib(1)),
        with(&|r| r.limit = Bytes((32 << 20) + 1)),
        with(&|r| r.processes.clear()),
        with(&|r| r.workload = "victim".into()),
        Action {
            target: Target::Nothing,
            ..scene.action(6)
        },
        Action {
            arguments: BTreeMap::from([("x".to_owned(), "1".to_owned())]),
            ..scene.action(6)
        },
        Action {
            arguments: BTreeMap::from([("give_back".to_owned(), "2".to_owned())]),
            ..scene.action(6)
        },
    ] {
        let refused = effectors.prepare(&wrong);
        assert!(
            matches!(refused, Err(PlatformError::Rejected { .. })),
            "{refused:?}"
        );
    }
    assert!(scene.is_as_found());
}

/// What a registry is told to start: this program again, in which only the test below is run.
fn fetcher() -> Launch {
    Launch {
        program: std::env::current_exe().unwrap(),
        arguments: ["--exact", "the_process_that_reads_for_others", "--nocapture"]
            .map(Into::into)
            .to_vec(),
    }
}

/// Started by hand, its standard input is no socket that a daemon holds.
#[test]
fn the_process_that_reads_for_others() {
    let socket = rustix::net::sockopt::socket_type(std::io::stdin());
    if socket == Ok(rustix::net::SocketType::SEQPACKET) {
        fetcher::serve().unwrap();
    } else {
        assert!(fetcher::serve().is_err());
    }
}

/// Names the file of which the program below reads single pages.
const READS: &str = "HOMEOSTAT_TEST_READS";

/// Two hundred pages a second, one at a time and all over the file, until it is ended.
#[test]
fn the_program_that_reads_single_pages() {
    let Some(path) = std::env::var_os(READS) else {
        return;
    };
    let file = fs::File::open(path).unwrap();
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::Random).unwrap();
    let pages = file.metadata().unwrap().len() >> 12;
    for turn in 0u64.. {
        // A prime number of pages further: each page once in so many turns.
        let at = (turn * 7919 % pages) << 12;
        std::os::unix::fs::FileExt::read_exact_at(&file, &mut [0; 4096], at).unwrap();
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
}

/// A program in a group of its own beside that of the reader, with a file open of which the kernel has taken everything.
struct Victim {
    above: PathBuf,
    group: PathBuf,
    child: Child,
    file: PathBuf,
    /// What a reader reads that takes its pages.
    big: PathBuf,
}

/// What a program lost of its file, in percent of that.
#[derive(Clone, Copy, Debug)]
struct Loss {
    left: usize,
    /// What the kernel tells it has taken. It may have forgotten some: in a small group it has little memory for such marks.
    known: usize,
}

impl Loss {
    /// More than this is there when what is known to be lost was brought back. Not all: what is taken while it is brought back is not looked for again.
    fn without(&self) -> usize {
        self.left + self.known * 3 / 4
    }
}

impl Victim {
    const MIB: u64 = 48;

    /// One that only has its file open.
    fn new(scene: &Scene, tree: &Path) -> Option<Self> {
        Self::with(scene, tree, |file| {
            let mut sleep = Command::new("sleep");
            sleep.arg("600").stdin(Stdio::from(fs::File::open(file).unwrap()));
            sleep
        })
    }

    fn with(scene: &Scene, tree: &Path, program: impl FnOnce(&Path) -> Command) -> Option<Self> {
        let file = file_on_disk(tree, "lost", Self::MIB)?;
        let group = scene.above.join("victim");
        fs::create_dir(&group).unwrap();
        let child = program(&file).spawn().unwrap();
        fs::write(group.join("cgroup.procs"), child.id().to_string()).unwrap();
        let big = tree.join("big");
        fs::File::create(&big).unwrap().set_len(512 << 20).unwrap();
        let victim = Self {
            above: scene.above.clone(),
            group,
            child,
            file,
            big,
        };
        Some(victim)
    }

    /// It reads its file, and a big reader takes most of it, which the kernel still tells. (What is dropped on request leaves no mark, and where a whole group is
    /// emptied the marks go as well.)
    fn loses(&self) -> Loss {
        let mut losses = Vec::new();
        // How much is to be taken for the kernel to tell it depends on what else goes on: on a busy machine 24 MiB were too few five times on end.
        for attempt in 0..20 {
            let loss = self.loses_once(24 + 4 * (attempt % 4));
            if loss.left < 70 && loss.known >= 20 {
                return loss;
            }
            losses.push(loss);
        }
        panic!("the kernel takes too little, or forgets what it takes: {losses:?}");
    }

    /// Beside a reader in a group of so many MiB.
    fn loses_once(&self, mib: u64) -> Loss {
        let limit = |text: &str| fs::write(self.above.join("memory.limit_in_bytes"), text).unwrap();
        let reads = |group: &Path, file: &Path| {
            let script = "echo $$ > \"$0/cgroup.procs\" && cat \"$1\" > /dev/null";
            let done = Command::new("sh")
                .args(["-c", script])
                .args([group, file])
                .status();
            assert!(done.unwrap().success());
        };
        reads(&self.group, &self.file);
        // Also of what was read twice, and counts as used: less than the file has.
        limit(&(mib << 20).to_string());
        reads(&self.above.join("programs"), &self.big);
        limit("-1");
        let left = in_memory(&self.file, 0, Self::MIB);
        let big = fs::File::open(&self.big).unwrap();
        rustix::fs::fadvise(&big, 0, None, rustix::fs::Advice::DontNeed).unwrap();
        let known = self.is_known_to_have_lost();
        Loss { left, known }
    }

    /// How many percent of its file the kernel tells it has taken.
    fn is_known_to_have_lost(&self) -> usize {
        let file = fs::File::open(&self.file).unwrap();
        let pages = pages_of(&file, 0, Self::MIB << 20).unwrap();
        (100 * pages.evicted / (Self::MIB << 8)) as usize
    }

    /// How many percent of its file are in memory, as soon as it is more than this, or after a while.
    fn has(&self, hoped: usize) -> usize {
        for _ in 0..500 {
            let has = in_memory(&self.file, 0, Self::MIB);
            if has > hoped {
                return has;
            }
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
        in_memory(&self.file, 0, Self::MIB)
    }

    /// Pages of files that are counted in its group, in MiB.
    fn counted(&self) -> u64 {
        let text = fs::read_to_string(self.group.join("memory.stat")).unwrap();
        let bytes = text.lines().find_map(|line| line.strip_prefix("cache ")).unwrap();
        bytes.parse::<u64>().unwrap() >> 20
    }
}

impl Drop for Victim {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        for _ in 0..100 {
            if fs::remove_dir(&self.group).is_ok() {
                return;
            }
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
    }
}

/// Where a program can lose pages and have them brought back, and a directory of this build for its files; `None` where that cannot be.
fn where_it_is_told(name: &str) -> Option<(Scene, tempfile::TempDir)> {
    let scene = Scene::new(name)?;
    if let Err(e) = is_told() {
        eprintln!("skipped: cachestat: {e}");
        return None;
    }
    let beside = std::env::current_exe().unwrap();
    let tree = tempfile::tempdir_in(beside.parent().unwrap()).unwrap();
    Some((scene, tree))
}

#[test]
fn what_the_program_lost_is_brought_back_into_its_own_group_as_far_as_there_is_room() {
    let Some((scene, tree)) = where_it_is_told("bring-back") else {
        return;
    };
    let Some(victim) = Victim::new(&scene, tree.path()) else {
        return;
    };
    let members = [process(victim.child.id())];
    let action = |id, value: &str| Action {
        arguments: BTreeMap::from([("bring_back".to_owned(), value.to_owned())]),
        ..scene.action(id)
    };
    let mut effectors = registry();
    let mut loss = victim.loses();
    // With nobody to read it, and with one who is told not to, nothing is.
    let record = effectors.prepare_for(&action(21, "1"), &members).unwrap();
    drive(&mut effectors, &record, Direction::Apply).unwrap();
    drive(&mut effectors, &record, Direction::Undo).unwrap();
    effectors.start_fetcher(&fetcher()).unwrap();
    let record = effectors.prepare_for(&action(22, "0"), &members).unwrap();
    drive(&mut effectors, &record, Direction::Apply).unwrap();
    drive(&mut effectors, &record, Direction::Undo).unwrap();
    assert_eq!(victim.has(100), loss.left);

    let record = effectors.prepare_for(&action(23, "1"), &members).unwrap();
    let helper = effectors.helper().unwrap();
    let home = fs::read_to_string(format!("/proc/{helper}/cgroup")).unwrap();
    // Each time that the reader is contained.
    for _ in 0..2 {
        let made = drive(&mut effectors, &record, Direction::Apply).unwrap();
        assert!(made.verified && made.skipped.is_empty(), "{made:?}");
        let has = victim.has(loss.without());
        assert!(has > loss.without(), "{has} %: {loss:?}");
        let counted = victim.counted();
        assert!(
            counted >= Victim::MIB * loss.without() as u64 / 100,
            "not where it was counted before: {counted} MiB"
        );
        drive(&mut effectors, &record, Direction::Undo).unwrap();
        assert!(scene.is_as_found());
        assert_eq!(scene.inside(&victim.group), [victim.child.id()]);
        assert_eq!(effectors.helper(), Some(helper));
        assert_eq!(
            fs::read_to_string(format!("/proc/{helper}/cgroup")).unwrap(),
            home,
            "it is back home"
        );
        loss = victim.loses();
    }

    // The limit of the group above leaves room for a part of what it works on.
    let limit = |text: &str| fs::write(scene.above.join("memory.limit_in_bytes"), text).unwrap();
    limit(&(24u64 << 20).to_string());
    let file = fs::File::open(&victim.file).unwrap();
    for at in (0..Victim::MIB << 20).step_by(2 << 20) {
        std::os::unix::fs::FileExt::read_exact_at(&file, &mut [0; 1], at).unwrap();
    }
    let there_or_known_to_be_lost =
        || in_memory(&victim.file, 0, Victim::MIB) + victim.is_known_to_have_lost();
    let before = there_or_known_to_be_lost();
    let made = drive(&mut effectors, &record, Direction::Apply).unwrap();
    assert!(made.skipped.keys().any(|why| why.contains("no room")), "{made:?}");
    assert!(victim.has(60) <= 60, "of 48 MiB in 24");
    // Where not all fits nothing is dropped, which the kernel would not know as lost any more. In percent; it forgets some by itself.
    let after = there_or_known_to_be_lost();
    assert!(after + 10 >= before, "{after} %, before {before} %: {made:?}");
    drive(&mut effectors, &record, Direction::Undo).unwrap();

    // One that was killed is started again when it is needed.
    limit("-1");
    let loss = victim.loses();
    let killed = Command::new("kill").args(["-9", &helper.to_string()]).status();
    assert!(killed.unwrap().success());
    let made = drive(&mut effectors, &record, Direction::Apply).unwrap();
    let has = victim.has(loss.without());
    assert!(has > loss.without(), "{has} %: {loss:?}, {made:?}");
    let another = effectors.helper().unwrap();
    assert_ne!(another, helper);
    drive(&mut effectors, &record, Direction::Undo).unwrap();
    // It goes with the daemon.
    drop(effectors);
    // Until this process ends the kernel keeps a note of how it ended.
    let is_there =
        || fs::read_to_string(format!("/proc/{another}/stat")).is_ok_and(|stat| !stat.contains(") Z "));
    for _ in 0..500 {
        if !is_there() {
            break;
        }
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    assert!(!is_there());
    assert!(scene.is_as_found());
}

#[test]
fn what_the_program_loses_while_the_reader_is_contained_is_brought_back_as_well() {
    let Some((scene, tree)) = where_it_is_told("bring-back-again") else {
        return;
    };
    let reads = |file: &Path| {
        let mut program = Command::new(std::env::current_exe().unwrap());
        program
            .args(["--exact", "the_program_that_reads_single_pages", "--nocapture"])
            .env(READS, file)
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        program
    };
    let Some(victim) = Victim::with(&scene, tree.path(), reads) else {
        return;
    };
    let members = [process(victim.child.id())];
    let mut effectors = registry();
    effectors.start_fetcher(&fetcher()).unwrap();
    let action = Action {
        arguments: BTreeMap::from([("bring_back".to_owned(), "1".to_owned())]),
        ..scene.action(31)
    };
    let record = effectors.prepare_for(&action, &members).unwrap();
    drive(&mut effectors, &record, Direction::Apply).unwrap();
    let loss = victim.loses();
    // By itself it would need a minute and more: in this time it brings back two fifths of what it lacks.
    let begun = std::time::Instant::now();
    let mut has = 0;
    while has <= loss.without() && begun.elapsed() < std::time::Duration::from_secs(25) {
        effectors.tick();
        std::thread::sleep(std::time::Duration::from_millis(100));
        has = in_memory(&victim.file, 0, Victim::MIB);
    }
    let lacks = victim.is_known_to_have_lost();
    assert!(
        has > loss.without(),
        "{has} % are there, {lacks} % are known to be lost; before: {loss:?}"
    );
    drive(&mut effectors, &record, Direction::Undo).unwrap();
    assert_eq!(scene.inside(&victim.group), [victim.child.id()]);
    assert!(scene.is_as_found());
    // What is not in force any more is not looked after.
    let loss = victim.loses();
    for _ in 0..40 {
        effectors.tick();
        std::thread::sleep(std::time::Duration::from_millis(100));
    }
    let has = in_memory(&victim.file, 0, Victim::MIB);
    assert!(has <= loss.without(), "{has} %: {loss:?}");
}
