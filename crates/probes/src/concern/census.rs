//! The process map scan: all processes and their mapped files, shared by all callers within some seconds.

use homeostat_kernel::Root;
use homeostat_kernel::privileges::{CAP_SYS_PTRACE, may};
use homeostat_kernel::process::{numbers_in, read_at, start_ticks, text_of};
use homeostat_meters::code_file::executable_at;
use homeostat_model::ProcessId;
use homeostat_sensors::patient::patiently;
use homeostat_sensors::storage::{DeviceInode, MAPS_MAX, Refusal, file_of};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Most scanned processes, without the kernel's own.
const SCAN_MAX: usize = 32_768;
/// Most numbers in `/proc`: the kernel's own limit of process ids.
const NUMBERS_MAX: usize = 1 << 22;
const FILES_MAX: usize = 65_536;
/// A scan is reused for this time …
const FRESH: Duration = Duration::from_secs(5);
/// … or for 200 times its duration, for at most half a percent of a CPU …
const REST: u32 = 200;
/// … but no longer than this.
const OLD: Duration = Duration::from_secs(60);
/// Most threads tried for the mappings of a process whose first thread has ended.
const THREADS_MAX: usize = 1024;
/// `PF_KTHREAD` in `stat` (include/linux/sched.h).
const KERNEL_THREAD: u64 = 0x0020_0000;
const CHECKPOINTER: &[u8] = b"criu";

static LAST: Mutex<Option<Arc<Census>>> = Mutex::new(None);

#[derive(Clone, Debug, PartialEq, Eq)]
struct Process {
    start_ticks: u64,
    parent: i32,
    executable: Option<(u64, u64)>,
}

#[derive(Debug)]
pub(crate) struct Census {
    taken: Instant,
    took: Duration,
    processes: BTreeMap<i32, Process>,
    /// Each file with one of its paths and the processes that map it.
    files: BTreeMap<DeviceInode, (String, Vec<i32>)>,
    /// Files by the last part of their path, and by the lower half of their inode, for layered file systems.
    names: BTreeMap<String, Vec<DeviceInode>>,
    numbers: BTreeMap<u32, Vec<DeviceInode>>,
    /// Processes whose mappings are unknown, and why.
    lacking: BTreeMap<i32, String>,
    /// Processes that are closed even to us, who may inspect any: they belong to a higher authority.
    closed: BTreeMap<i32, u64>,
    incomplete: Option<String>,
    checkpointer: Option<i32>,
}

/// The processes of a workload and their children with the same program, forked since the last scan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Family(BTreeSet<i32>);

impl Family {
    pub(super) fn has(&self, pid: i32) -> bool {
        self.0.contains(&pid)
    }

    pub(super) fn pids(&self) -> impl Iterator<Item = i32> + '_ {
        self.0.iter().copied()
    }
}

impl Census {
    /// The last scan if it may be reused, otherwise a new one.
    ///
    /// # Errors
    /// A sentence: processes cannot be listed.
    pub(crate) fn recent(root: &Root) -> Result<Arc<Self>, Refusal> {
        // Held during the scan, so that concurrent callers share it.
        let mut last = LAST.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(census) = last.as_ref().filter(|c| c.taken.elapsed() < c.serves()) {
            return Ok(census.clone());
        }
        let census = Arc::new(Self::look(root)?);
        *last = Some(census.clone());
        Ok(census)
    }

    /// A new scan.
    ///
    /// # Errors
    /// As of [`Self::recent`].
    pub(crate) fn fresh(root: &Root) -> Result<Arc<Self>, Refusal> {
        let mut last = LAST.lock().unwrap_or_else(PoisonError::into_inner);
        let census = Arc::new(Self::look(root)?);
        *last = Some(census.clone());
        Ok(census)
    }

    /// The last scan if it is recent, without a wait.
    pub(crate) fn last() -> Option<Arc<Self>> {
        let last = LAST.try_lock().ok()?;
        last.as_ref().filter(|c| c.taken.elapsed() < OLD).cloned()
    }

    fn serves(&self) -> Duration {
        FRESH.max(self.took.saturating_mul(REST)).min(OLD)
    }

    /// Scans all processes now.
    ///
    /// # Errors
    /// As of [`Self::recent`].
    pub(crate) fn look(root: &Root) -> Result<Self, Refusal> {
        let unreadable = |e| Refusal::Now(format!("the list of processes cannot be read: {e}"));
        let begun = Instant::now();
        let proc = rustix::fs::open(
            root.path("/proc"),
            OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC,
            Mode::empty(),
        )
        .map_err(unreadable)?;
        let (pids, more) = numbers_in(&proc, ".", NUMBERS_MAX).map_err(unreadable)?;
        let mut this = Self::empty(begun);
        let may_look = may_look_at_any(root);
        if more {
            this.incomplete = Some(format!("there are more than {NUMBERS_MAX} processes"));
        }
        for pid in pids {
            if this.processes.len() + this.lacking.len() + this.closed.len() >= SCAN_MAX {
                this.incomplete = Some(format!("there are more than {SCAN_MAX} processes"));
                break;
            }
            match Sight::of(&proc, pid) {
                Sight::Nobody => {}
                Sight::Unknown(why) => {
                    this.lacking.insert(pid, why);
                }
                Sight::Closed(start_ticks) if may_look => {
                    this.closed.insert(pid, start_ticks);
                }
                Sight::Closed(_) => {
                    this.lacking.insert(
                        pid,
                        "its list of mappings cannot be read: permission denied; run homeostat as root"
                            .to_owned(),
                    );
                }
                Sight::Seen { process, name, maps } => this.add(pid, process, &name, maps),
            }
        }
        this.took = begun.elapsed();
        Ok(this)
    }

    fn empty(taken: Instant) -> Self {
        Self {
            taken,
            took: Duration::ZERO,
            processes: BTreeMap::new(),
            files: BTreeMap::new(),
            names: BTreeMap::new(),
            numbers: BTreeMap::new(),
            lacking: BTreeMap::new(),
            closed: BTreeMap::new(),
            incomplete: None,
            checkpointer: None,
        }
    }

    fn add(&mut self, pid: i32, process: Process, name: &[u8], maps: Result<String, String>) {
        if name == CHECKPOINTER {
            self.checkpointer = Some(pid);
        }
        self.processes.insert(pid, process);
        match maps {
            Ok(text) => {
                for (file, path) in text.lines().filter_map(file_of) {
                    self.add_file(pid, file, path);
                }
            }
            Err(why) => {
                self.lacking.insert(pid, why);
            }
        }
    }

    fn add_file(&mut self, pid: i32, file: DeviceInode, path: &str) {
        if let Some((_, users)) = self.files.get_mut(&file) {
            if users.last() != Some(&pid) {
                users.push(pid);
            }
            return;
        }
        if self.files.len() >= FILES_MAX {
            self.incomplete = Some(format!("processes have more than {FILES_MAX} files mapped"));
            return;
        }
        self.files.insert(file, (path.to_owned(), vec![pid]));
        self.names
            .entry(last_part(path).to_owned())
            .or_default()
            .push(file);
        self.numbers.entry(file.1 as u32).or_default().push(file);
    }

    pub(super) fn checkpointer(&self) -> Option<i32> {
        self.checkpointer
    }

    /// Processes of which only the state is visible.
    pub(super) fn closed(&self) -> Vec<ProcessId> {
        self.closed
            .iter()
            .map(|(pid, start_ticks)| ProcessId {
                pid: *pid,
                start_ticks: *start_ticks,
            })
            .collect()
    }

    /// These processes, and their children that run one of their programs.
    pub(crate) fn family(&self, processes: &[ProcessId]) -> Family {
        let mut family: BTreeSet<i32> = processes
            .iter()
            .filter(|p| {
                self.processes
                    .get(&p.pid)
                    .is_none_or(|seen| seen.start_ticks == p.start_ticks)
            })
            .map(|p| p.pid)
            .collect();
        let programs: BTreeSet<(u64, u64)> = family
            .iter()
            .filter_map(|pid| self.processes.get(pid)?.executable)
            .collect();
        loop {
            let children: Vec<i32> = self
                .processes
                .iter()
                .filter(|(pid, seen)| {
                    !family.contains(pid)
                        && family.contains(&seen.parent)
                        && seen.executable.is_some_and(|e| programs.contains(&e))
                })
                .map(|(pid, _)| *pid)
                .collect();
            if children.is_empty() {
                return Family(family);
            }
            family.extend(children);
        }
    }

    /// The processes that run a program (device and inode), all that were seen.
    pub(crate) fn running(&self, program: (u64, u64)) -> Vec<ProcessId> {
        let pids = self
            .processes
            .iter()
            .filter(|(_, seen)| seen.executable == Some(program))
            .map(|(pid, _)| *pid);
        self.ids(pids)
    }

    pub(crate) fn ids(&self, pids: impl Iterator<Item = i32>) -> Vec<ProcessId> {
        pids.filter_map(|pid| {
            let start_ticks = self.processes.get(&pid)?.start_ticks;
            Some(ProcessId { pid, start_ticks })
        })
        .collect()
    }

    /// The files that a process has mapped: device and inode, and a path.
    ///
    /// # Errors
    /// A sentence: unknown.
    pub(crate) fn mapped_by(&self, process: ProcessId) -> Result<Vec<(DeviceInode, &str)>, Refusal> {
        if let Some(why) = self.lacking.get(&process.pid) {
            return Err(Refusal::Now(format!(
                "what process {process} has mapped cannot be told: {why}"
            )));
        }
        Ok(self
            .files
            .iter()
            .filter(|(_, (_, users))| users.contains(&process.pid))
            .map(|(file, (path, _))| (*file, path.as_str()))
            .collect())
    }

    /// Checks that the mappings are known of each of these processes, and of whoever may run the file with this inode.
    ///
    /// # Errors
    /// A sentence: the process whose mappings are unknown.
    pub(crate) fn all_seen(&self, processes: &[ProcessId], inode: u64) -> Result<(), String> {
        if let Some(why) = &self.incomplete {
            return Err(why.clone());
        }
        let concerns = |pid: &i32| {
            let program = self.processes.get(pid).and_then(|seen| seen.executable);
            processes.iter().any(|p| p.pid == *pid) || program.is_none_or(|(_, number)| number == inode)
        };
        match self.lacking.iter().find(|(pid, _)| concerns(pid)) {
            Some((pid, why)) => Err(format!("what process {pid} has mapped cannot be told: {why}")),
            None => Ok(()),
        }
    }

    /// Processes that map a file, or one that may be the same.
    pub(crate) fn users(&self, file: &DeviceInode, path: &str) -> BTreeSet<i32> {
        let alike = self.names.get(last_part(path)).into_iter().flatten();
        let numbered = self.numbers.get(&(file.1 as u32)).into_iter().flatten();
        std::iter::once(file)
            .chain(alike)
            .chain(numbered)
            .filter_map(|other| {
                let (other_path, users) = self.files.get(other)?;
                may_be_same(file, path, other, other_path).then_some(users)
            })
            .flatten()
            .copied()
            .collect()
    }

    /// Checks that nobody outside the family maps a file.
    ///
    /// # Errors
    /// A sentence: somebody does, or that is unknown.
    pub(crate) fn allow(&self, family: &Family, file: &DeviceInode, path: &str) -> Result<(), Refusal> {
        if let Some(pid) = self
            .users(file, path)
            .into_iter()
            .find(|pid| !family.0.contains(pid))
        {
            return Err(Refusal::Lasting(format!(
                "{path} is mapped by process {pid}, too, which is not of this workload and would be held up while counting \
                 begins and ends"
            )));
        }
        let unknown = self.incomplete.clone().or_else(|| {
            let (pid, why) = self.lacking.first_key_value()?;
            Some(format!("process {pid}: {why}"))
        });
        match unknown {
            Some(why) => Err(Refusal::Now(format!(
                "who else maps {path} cannot be told ({why})"
            ))),
            None => Ok(()),
        }
    }
}

fn last_part(path: &str) -> &str {
    let path = path.strip_suffix(" (deleted)").unwrap_or(path);
    path.rsplit('/').next().unwrap_or_default()
}

/// Whether two files may be the same: a layered file system has its own device, and perhaps its own inode and path.
fn may_be_same(file: &DeviceInode, path: &str, other: &DeviceInode, other_path: &str) -> bool {
    if file == other {
        return true;
    }
    // One file system has one inode per file, and two block devices hold different files.
    if file.0 == other.0 || (file.0.0 != 0 && other.0.0 != 0) {
        return false;
    }
    // The upper half of an inode may encode the layer.
    if file.1 as u32 == other.1 as u32 {
        return true;
    }
    // One process's `/usr/bin/x` is another's path below the directory of the layer.
    let strip = |p: &'_ str| p.strip_suffix(" (deleted)").unwrap_or(p).to_owned();
    let (path, other) = (strip(path), strip(other_path));
    path.starts_with('/') && other.starts_with('/') && (path.ends_with(&other) || other.ends_with(&path))
}

/// The initial user namespace, whose capabilities apply to the machine (`PROC_USER_INIT_INO`).
const USERS_OF_THE_MACHINE: &str = "user:[4026531837]";

/// Whether we hold CAP_SYS_PTRACE on the machine. Then only a security module closes a process to us, and not for a
/// user.
fn may_look_at_any(root: &Root) -> bool {
    let users = std::fs::read_link(root.link_path("/proc/self/ns/user"));
    if users.is_ok_and(|name| name.as_os_str() != USERS_OF_THE_MACHINE) {
        return false;
    }
    may(root, CAP_SYS_PTRACE)
}

/// Parses bytes as the list of mappings and as the `stat` of a process.
pub(super) fn parse(bytes: &[u8]) {
    let mut census = Census::empty(Instant::now());
    let process = Process {
        start_ticks: 1,
        parent: 1,
        executable: None,
    };
    let text = String::from_utf8_lossy(bytes).into_owned();
    let files: Vec<(DeviceInode, String)> = text
        .lines()
        .filter_map(file_of)
        .map(|(file, path)| (file, path.to_owned()))
        .collect();
    census.add(7, process, b"x", Ok(text));
    for (file, path) in files.iter().take(64) {
        let _ = census.users(file, path);
    }
    let _ = Basics::parse(bytes);
}

enum Sight {
    /// Ended, or a kernel thread.
    Nobody,
    /// Present, but unreadable.
    Unknown(String),
    /// Present, but closed to us. The start time.
    Closed(u64),
    Seen {
        process: Process,
        name: Vec<u8>,
        maps: Result<String, String>,
    },
}

impl Sight {
    fn of(proc: &OwnedFd, pid: i32) -> Self {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let dir = match rustix::fs::openat(proc, pid.to_string(), flags, Mode::empty()) {
            Ok(dir) => dir,
            Err(e) => return Self::unless_gone(e),
        };
        let mut buffer = [0u8; 1024];
        let stat = match read_at(&dir, "stat", &mut buffer) {
            Ok(n) => buffer.get(..n).unwrap_or_default(),
            Err(e) => return Self::unless_gone(e),
        };
        let Some(basics) = Basics::parse(stat) else {
            return Self::Unknown("its stat is not understood".to_owned());
        };
        if basics.flags & KERNEL_THREAD != 0 {
            return Self::Nobody;
        }
        let (maps, executable) = match patiently(pid, move || (maps_of(&dir), executable_at(&dir))) {
            Ok((Ok(Some(text)), executable)) => (Ok(text), executable),
            Ok((Ok(None), _)) => return Self::Nobody,
            Ok((Err(Errno::ACCESS | Errno::PERM), _)) => return Self::Closed(basics.start_ticks),
            Ok((Err(e), executable)) => (
                Err(format!("its list of mappings cannot be read: {e}")),
                executable,
            ),
            Err(why) => (Err(why), None),
        };
        Self::Seen {
            process: Process {
                start_ticks: basics.start_ticks,
                parent: basics.parent,
                executable,
            },
            name: basics.name,
            maps,
        }
    }

    fn unless_gone(e: Errno) -> Self {
        match e {
            Errno::NOENT | Errno::SRCH => Self::Nobody,
            e => Self::Unknown(format!("it cannot be looked at: {e}")),
        }
    }
}

/// The list of mappings of a process. `None`: it has ended. Other threads provide it if the first has ended.
fn maps_of(dir: &OwnedFd) -> Result<Option<String>, Errno> {
    match text_of(dir, "maps", MAPS_MAX) {
        Ok(text) if !text.is_empty() => return Ok(Some(text)),
        Ok(_) | Err(Errno::NOENT | Errno::SRCH) => {}
        Err(e) => return Err(e),
    }
    let threads = match numbers_in(dir, "task", THREADS_MAX) {
        Ok((threads, _)) => threads,
        Err(Errno::NOENT | Errno::SRCH) => return Ok(None),
        Err(e) => return Err(e),
    };
    for thread in threads {
        match text_of(dir, &format!("task/{thread}/maps"), MAPS_MAX) {
            Ok(text) if !text.is_empty() => return Ok(Some(text)),
            Ok(_) | Err(Errno::NOENT | Errno::SRCH) => {}
            Err(e) => return Err(e),
        }
    }
    Ok(None)
}

#[derive(Debug, PartialEq, Eq)]
struct Basics {
    name: Vec<u8>,
    parent: i32,
    flags: u64,
    start_ticks: u64,
}

impl Basics {
    fn parse(stat: &[u8]) -> Option<Self> {
        let begin = stat.iter().position(|&c| c == b'(')? + 1;
        let end = stat.iter().rposition(|&c| c == b')')?;
        let rest = std::str::from_utf8(stat.get(end + 1..)?).ok()?;
        let mut fields = rest.split_ascii_whitespace();
        // State; parent is field 4, flags field 9.
        let parent = fields.nth(1)?.parse().ok()?;
        let flags = fields.nth(4)?.parse().ok()?;
        Some(Self {
            name: stat.get(begin..end)?.to_vec(),
            parent,
            flags,
            start_ticks: start_ticks(stat)?,
        })
    }
}

#[cfg(test)]
mod tests;
