//! A big reader kept to a little memory, in control groups of version 2: daemons beside each other, each with a program on
//! a mapped file and a reader in a slice that is too small for both. Each contains its reader, and it ends in another way:
//! kill -9 in mid-trial and `restore`, a person who sets the limit meanwhile, and a reader that ends while it is contained, whose
//! group is removed and made anew: by somebody who gives it the very limit that homeostat had set, and another reader in it.
//! That limit stays. A reader that is moved into a group made for it is in `root_reader.rs`; the same under multi-gen LRU in
//! `generations.rs`.
//!
//! The files are disks made of holes (`loop` over a sparse file in memory): reading them is reading from storage for the
//! kernel's books, and costs no memory but the page cache's. (Not `brd`: up to Linux 6.2 what it delivers is in no book.)
//! Such a disk does not wait, so what the program loses is small; the verdict is not asked for.

use super::Context;
use super::programs::Program;
use super::trials::HURRIED;
use crate::daemon::{Daemon, ask, json};
use crate::instruments::{mapped_mib, text, write};
use crate::{Failure, ensure};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

pub(super) const ROOT: &str = "/sys/fs/cgroup";
/// The reader's file, in MiB.
const READER_MIB: &str = "2048";
/// The module of such disks, as the host put it there, and the size of a disk: more than all memory, or a reader outside of a
/// slice would find its file there.
const MODULE: &str = "/modules/loop.ko";
const DISK_BYTES: u64 = 2 << 30;
/// What a person sets.
const THEIRS: &str = "104857600";
/// Nothing of what is looked for is large in an emulated machine.
const STRATEGY: &str = "\
cache_affinity = false
memory_affinity = false
numa_balancing = false
[policy.settings.file_cache]
faults_min = 1
loss_min_mib_per_s = 0.5
stream_min_mib_per_s = 1
limit_mib = 16
";
/// A process that was ended is gone after so long, and its group can be removed.
const REMOVED_WITHIN: Duration = Duration::from_secs(30);
pub(super) const TICK: Duration = Duration::from_millis(100);
/// Where the reader is, among the settings.
const READERS_GROUP: &str = "the reader's group";
/// From the containment on it is watched for so long whether anything is made again: the engine asks anew about a program
/// after a minute.
const WATCHED: Duration = Duration::from_secs(75);

/// What is in a room.
#[derive(Clone, Copy, Debug)]
pub(super) struct Size {
    /// Memory of the slice in MiB …
    pub(super) slice_mib: u64,
    /// … and of it the working set of the program.
    pub(super) worker_mib: u64,
}

/// A program that comes together with the reader does not get its pages here.
pub(super) const USUAL: Size = Size {
    slice_mib: 80,
    worker_mib: 56,
};

/// How a containment ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    /// kill -9 of the daemon, then `homeostat restore`.
    Killed,
    /// The daemon is stopped.
    Stopped,
    /// There is none, since the program loses nothing.
    Kept,
    /// A person sets the limit.
    Person,
    /// The reader ends, its group is removed, and somebody makes another one of that name with a limit.
    Removed,
}

impl End {
    /// Those that are tried with the lists of pages that the kernel has at the start.
    const USUAL: [Self; 3] = [Self::Killed, Self::Person, Self::Removed];

    fn name(self) -> &'static str {
        match self {
            Self::Killed => "killed",
            Self::Stopped => "stopped",
            Self::Kept => "kept",
            Self::Person => "person",
            Self::Removed => "removed",
        }
    }
}

/// Everything of a slice and its groups that can be set, and who is in them.
type Settings = BTreeMap<String, String>;

/// One daemon with a program and a reader.
pub(super) struct Room {
    end: End,
    pub(super) size: Size,
    slice: PathBuf,
    worker: Option<Program>,
    reader: Option<Program>,
    found: Settings,
    daemon: Option<Daemon>,
    directory: PathBuf,
    number: usize,
    /// Since when it is contained, and by which limit.
    contained: Option<(Instant, String)>,
    /// What is said of the end of its trial, once it is.
    outcome: Option<String>,
}

impl Room {
    /// The slice with its two groups, and the program in one of them.
    pub(super) fn make(context: &Context, end: End, number: usize, size: Size) -> Result<Self, Failure> {
        let name = end.name();
        let slice = Path::new(ROOT).join(format!("tight-{name}.slice"));
        make(&slice)?;
        write(slice.join("cgroup.subtree_control"), "+memory")?;
        for unit in ["worker", "reader"] {
            make(&slice.join(format!("{name}-{unit}.service")))?;
        }
        let mut room = Self {
            end,
            size,
            slice,
            worker: None,
            reader: None,
            found: Settings::new(),
            daemon: None,
            directory: context.directory.join(name),
            number,
            contained: None,
            outcome: None,
        };
        room.allow(size.slice_mib)?;
        let worker = Program::start_reporting(
            "file-worker",
            &[
                &size.worker_mib.to_string(),
                "86400",
                "--file",
                &disk(2 * number),
                "--pause",
                "300",
                "--duty",
                "30",
                "--report",
                "1",
            ],
            &room.report(),
        )?;
        write(
            room.group("worker").join("cgroup.procs"),
            &worker.pid().to_string(),
        )?;
        room.worker = Some(worker);
        Ok(room)
    }

    /// Gives the slice so much memory.
    pub(super) fn allow(&mut self, mib: u64) -> Result<(), Failure> {
        self.size.slice_mib = mib;
        write(self.slice.join("memory.max"), &(mib << 20).to_string())
    }

    /// From now on everything must be as it is found here.
    pub(super) fn start_daemon(&mut self) -> Result<(), Failure> {
        self.found = self.settings()?;
        self.daemon = Some(Daemon::start(&self.directory, &configuration(self.end))?);
        Ok(())
    }

    /// Where the program writes what it has done.
    pub(super) fn report(&self) -> PathBuf {
        self.directory.with_extension("report")
    }

    /// Pages of the program's file that it has mapped, in MiB.
    pub(super) fn mapped_mib(&self) -> Result<u64, Failure> {
        self.worker.as_ref().map_or(Ok(0), |w| mapped_mib(w.pid()))
    }

    pub(super) fn group(&self, unit: &str) -> PathBuf {
        self.slice.join(format!("{}-{unit}.service", self.end.name()))
    }

    fn log(&self) -> String {
        crate::daemon::log(&self.directory)
    }

    pub(super) fn start_reader(&mut self) -> Result<(), Failure> {
        let disk = disk(2 * self.number + 1);
        let reader = Program::start(
            "file-reader",
            &[READER_MIB, "86400", "--file", &disk, "--duty", "10"],
        )?;
        write(
            self.group("reader").join("cgroup.procs"),
            &reader.pid().to_string(),
        )?;
        self.reader = Some(reader);
        Ok(())
    }

    /// All that can be set of the slice and its groups, who is in them, and where the reader is.
    fn settings(&self) -> Result<Settings, Failure> {
        let mut out = Settings::new();
        for group in [self.slice.clone(), self.group("worker"), self.group("reader")] {
            if !group.exists() {
                continue;
            }
            for file in [
                "memory.min",
                "memory.low",
                "memory.high",
                "memory.max",
                "memory.oom.group",
                "cgroup.subtree_control",
                "cgroup.procs",
            ] {
                let path = group.join(file);
                out.insert(path.display().to_string(), text(&path)?);
            }
        }
        if let Some(reader) = &self.reader {
            out.insert(READERS_GROUP.into(), group_of(reader.pid())?);
        }
        Ok(out)
    }

    /// What limits the reader now; `None` when nothing does.
    fn limit(&self) -> Result<Option<String>, Failure> {
        let high = text(self.group("reader").join("memory.high"))?;
        Ok((high != "max").then_some(high))
    }

    fn as_found(&self, when: &str) -> Result<(), Failure> {
        let now = self.settings()?;
        let differ: Vec<String> = now
            .iter()
            .filter(|(key, value)| self.found.get(*key) != Some(value))
            .map(|(key, value)| format!("{key} is {value}, found {:?}", self.found.get(key)))
            .collect();
        ensure!(
            differ.is_empty(),
            "{}: {when} {}; the daemon's log:\n{}",
            self.end.name(),
            differ.join("; "),
            self.log()
        );
        Ok(())
    }

    /// Looks once, and does what is due.
    pub(super) fn turn(&mut self, context: &Context) -> Result<(), Failure> {
        let Some(daemon) = &mut self.daemon else {
            return Ok(());
        };
        daemon.must_live("its trial was over")?;
        if self.contained.is_some() {
            return self.wait_for_the_end(context);
        }
        let Some(limit) = self.limit()? else {
            return Ok(());
        };
        self.contained = Some((Instant::now(), limit.clone()));
        match self.end {
            End::Killed => self.kill(context, &limit),
            End::Stopped => self.stop(context, &format!("while the reader had {limit} bytes")),
            End::Kept => Err(Failure::Broken(format!(
                "the reader was kept to {limit} bytes for a program that loses nothing; the daemon's log:\n{}",
                self.log()
            ))),
            End::Person => write(self.group("reader").join("memory.high"), THEIRS),
            End::Removed => self.make_anew(&limit),
        }
    }

    /// The reader ends, and its group goes with it, as that of a unit does that is stopped. Somebody starts the unit again,
    /// with a limit of their own, which happens to be ours.
    fn make_anew(&mut self, limit: &str) -> Result<(), Failure> {
        self.remove_reader()?;
        let group = self.group("reader");
        make(&group)?;
        write(group.join("memory.high"), limit)?;
        self.start_reader()
    }

    fn remove_reader(&mut self) -> Result<(), Failure> {
        self.reader = None;
        let group = self.group("reader");
        let begin = Instant::now();
        while let Err(e) = std::fs::remove_dir(&group) {
            ensure!(
                begin.elapsed() < REMOVED_WITHIN,
                "{} cannot be removed: {e}",
                group.display()
            );
            std::thread::sleep(TICK);
        }
        Ok(())
    }

    fn kill(&mut self, context: &Context, limit: &str) -> Result<(), Failure> {
        let name = self.end.name();
        let Some(daemon) = self.daemon.take() else {
            return Ok(());
        };
        daemon.kill()?;
        let told = restore(&self.directory)?;
        ensure!(
            told == (1, 0),
            "{name}: restore after kill -9 has undone {} changes, and failed with {}",
            told.0,
            told.1
        );
        self.as_found("after kill -9 and restore")?;
        ensure!(
            restore(&self.directory)? == (0, 0),
            "{name}: restore found something the second time"
        );
        let left = made_groups()?;
        ensure!(
            left.is_empty(),
            "{name}: groups that were made are left: {left:?}"
        );
        context.note(&format!(
            "{name}: killed while the reader had {limit} bytes; restore put every value back"
        ));
        Ok(())
    }

    /// Stops the daemon: everything is as found.
    pub(super) fn stop(&mut self, context: &Context, when: &str) -> Result<(), Failure> {
        let name = self.end.name();
        let Some(daemon) = self.daemon.take() else {
            return Ok(());
        };
        let ended = daemon.stop()?;
        ensure!(
            ended.success(),
            "{name}: after SIGTERM it ended with {ended}; its log:\n{}",
            self.log()
        );
        self.as_found("after the daemon was stopped")?;
        ensure!(
            restore(&self.directory)? == (0, 0),
            "{name}: something was still owed"
        );
        let left = made_groups()?;
        ensure!(
            left.is_empty(),
            "{name}: groups that were made are left: {left:?}"
        );
        context.note(&format!("{name}: stopped {when}; every value is as found"));
        Ok(())
    }

    /// What somebody gave the reader's group stays; fails when it is something else.
    fn theirs_stays(&self, when: &str) -> Result<(), Failure> {
        let theirs = match (self.end, &self.contained) {
            (End::Person, _) => THEIRS,
            (End::Removed, Some((_, limit))) => limit,
            _ => return Ok(()),
        };
        let now = text(self.group("reader").join("memory.high"))?;
        ensure!(
            now == theirs,
            "{}: {when} the limit that somebody set ({theirs}) became {now}; the daemon's log:\n{}",
            self.end.name(),
            self.log()
        );
        let Some(reader) = &self.reader else {
            return Ok(());
        };
        let place = group_of(reader.pid())?;
        ensure!(
            self.found.get(READERS_GROUP) == Some(&place),
            "{}: {when} the reader is in {place}",
            self.end.name()
        );
        Ok(())
    }

    fn wait_for_the_end(&mut self, context: &Context) -> Result<(), Failure> {
        let name = self.end.name();
        self.theirs_stays("meanwhile")?;
        if self.outcome.is_none() {
            // The log, not `status`: to start a program takes seconds here.
            let log = self.log();
            let outcome = log.lines().find(|l| l.contains("aborted by experiment"));
            self.outcome = outcome.map(|line| line.trim().to_owned());
        }
        let Some(outcome) = self.outcome.clone() else {
            return Ok(());
        };
        let is_watched = self.end == End::Removed;
        let watched = self.contained.as_ref().map(|(since, _)| since.elapsed());
        if is_watched && watched.is_some_and(|watched| watched < WATCHED) {
            return Ok(());
        }
        let Some(daemon) = self.daemon.take() else {
            return Ok(());
        };
        let ended = daemon.stop()?;
        ensure!(ended.success(), "{name}: after SIGTERM it ended with {ended}");
        ensure!(
            restore(&self.directory)? == (0, 0),
            "{name}: something was still owed"
        );
        self.theirs_stays("in the end")?;
        write(self.group("reader").join("memory.high"), "max")?;
        if self.end == End::Removed {
            // Another process than the one that was found.
            self.remove_reader()?;
        }
        self.as_found("in the end")?;
        context.note(&format!("{name}: withdrawn: {outcome}"));
        Ok(())
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        self.daemon = None;
        self.worker = None;
        self.reader = None;
        for unit in ["worker", "reader"] {
            let _ = std::fs::remove_dir(self.group(unit));
        }
        let _ = std::fs::remove_dir(&self.slice);
    }
}

fn configuration(end: End) -> String {
    let name = end.name();
    configuration_for(
        &format!("{name}-worker.service"),
        &format!("{name}-reader.service"),
    )
}

/// Only these two are the business of the daemon: the program and the reader, by the patterns of their names.
pub(super) fn configuration_for(worker: &str, reader: &str) -> String {
    let rule = |pattern: &str| format!("[[policy.workloads]]\nmatch = \"{pattern}\"\n");
    let never = |pattern: &str| format!("{}never = true\n", rule(pattern));
    // Who declines keeps its meter for so long: relief needs one.
    let hurried = HURRIED.replace("reconsider_s = 10\n", "reconsider_s = 600\n");
    format!(
        "{hurried}{STRATEGY}{}{}{}",
        rule(worker),
        rule(reader),
        never("*")
    )
}

/// Changes that `restore` has undone, and those that it could not undo.
pub(super) fn restore(directory: &Path) -> Result<(usize, usize), Failure> {
    let told = json(&ask(directory, &["restore", "--json"])?)?;
    let count = |key: &str| told[key].as_array().map_or(0, Vec::len);
    Ok((count("undone"), count("failed")))
}

pub(super) fn disk(number: usize) -> String {
    format!("/dev/loop{number}")
}

fn make(group: &Path) -> Result<(), Failure> {
    // What a scenario that failed left behind.
    let _ = std::fs::remove_dir(group);
    std::fs::create_dir(group).map_err(Failure::system(format!("making {}", group.display())))
}

/// The control group of a process, as the kernel names it.
pub(super) fn group_of(pid: i32) -> Result<String, Failure> {
    let groups = text(format!("/proc/{pid}/cgroup"))?;
    let path = groups.lines().find_map(|line| line.strip_prefix("0::"));
    path.map(str::to_owned)
        .ok_or_else(|| Failure::Broken(format!("process {pid} is in no group: {groups}")))
}

/// The groups that homeostat made below the root.
pub(super) fn made_groups() -> Result<Vec<String>, Failure> {
    let entries = std::fs::read_dir(ROOT).map_err(Failure::system("listing the groups"))?;
    Ok(entries
        .filter_map(Result::ok)
        .map(|e| e.file_name().to_string_lossy().into_owned())
        .filter(|name| name.starts_with("homeostat-reader-"))
        .collect())
}

/// Runs a command of busybox.
pub(super) fn busybox(arguments: &[&str]) -> Result<(), Failure> {
    let done = Command::new("/bin/busybox")
        .args(arguments)
        .output()
        .map_err(Failure::system("starting busybox"))?;
    ensure!(
        done.status.success(),
        "{}: {}",
        arguments.join(" "),
        String::from_utf8_lossy(&done.stderr)
    );
    Ok(())
}

/// Disks of holes, two for each room; taken apart when dropped.
pub(super) struct Disks;

impl Disks {
    const COUNT: usize = 2 * End::USUAL.len();

    pub(super) fn make(context: &Context) -> Result<Self, Failure> {
        if !Path::new("/sys/module/loop").exists() {
            busybox(&["insmod", MODULE, &format!("max_loop={}", Self::COUNT)])?;
        }
        let disks = Self;
        for number in 0..Self::COUNT {
            let path = context.directory.join(format!("disk{number}"));
            let file = std::fs::File::create(&path).map_err(Failure::system("making a file of holes"))?;
            file.set_len(DISK_BYTES)
                .map_err(Failure::system("making a file of holes"))?;
            busybox(&["losetup", &disk(number), &path.display().to_string()])?;
        }
        Ok(disks)
    }
}

impl Drop for Disks {
    fn drop(&mut self) {
        for number in 0..Self::COUNT {
            let _ = busybox(&["losetup", "-d", &disk(number)]);
        }
    }
}

/// Containments and their ends.
pub(super) fn reader_is_contained(context: &Context) -> Result<(), Failure> {
    let _disks = Disks::make(context)?;
    write(Path::new(ROOT).join("cgroup.subtree_control"), "+memory")?;
    let mut rooms = Vec::new();
    for (number, end) in End::USUAL.into_iter().enumerate() {
        let mut room = Room::make(context, end, number, USUAL)?;
        room.start_reader()?;
        room.start_daemon()?;
        rooms.push(room);
    }
    watch(context, &mut rooms)
}

/// Until every room's daemon has ended as it is to.
pub(super) fn watch(context: &Context, rooms: &mut [Room]) -> Result<(), Failure> {
    let begin = Instant::now();
    // The supervisor ends this scenario when its time is over; a little before that the logs can still be told.
    let patience = context.expected.limit * 2 / 5;
    loop {
        for room in rooms.iter_mut() {
            room.turn(context)?;
        }
        let open: Vec<&Room> = rooms.iter().filter(|r| r.daemon.is_some()).collect();
        if open.is_empty() {
            return Ok(());
        }
        ensure!(
            begin.elapsed() < patience,
            "not over within {} s: {}",
            patience.as_secs(),
            open.iter()
                .map(|r| format!(
                    "{} (contained: {}, {:?} MiB of the program's file mapped), its log:\n{}",
                    r.end.name(),
                    r.contained.is_some(),
                    r.mapped_mib().ok(),
                    r.log()
                ))
                .collect::<String>()
        );
        std::thread::sleep(TICK);
    }
}
