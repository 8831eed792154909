//! Who else is concerned: processes outside of the workload that have its files mapped, those that trace it, and whether one of
//! its own stands still.
//!
//! The kernel puts a breakpoint only into the address spaces that it was asked for. But to find them it goes through all that map
//! the file and locks each of them for a moment, and no process of the machine can fork meanwhile. One whose address space is
//! held by a request that is never answered (a hung network file system) would hold up everybody. So a file is counted in only
//! while nobody outside of the workload maps it, and no thread of the workload waits for a device without end.

use super::super::code_file::{Mapping, text_of};
use super::super::common::{numbers_in, open_process, parent, read_at};
use crate::Root;
use homeostat_model::{ProcessId, Workload};
use rustix::fs::{Mode, OFlags};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// Most processes that are looked at.
const SCAN_MAX: usize = 4096;
/// Most that is read of the list of mappings of each of them.
const MAPS_MAX: usize = 4 * 1024 * 1024;
/// Most files that are kept.
const FILES_MAX: usize = 65_536;
/// Most threads of a process that are looked at.
const THREADS_MAX: usize = 1024;
/// A thread that waits for a device, and has not run in so long, stands still.
const STILL: Duration = Duration::from_millis(100);

/// Device and inode, as a list of mappings gives them.
pub(super) type DeviceInode = ((u32, u32), u64);

/// What processes outside of a workload had mapped at one moment.
pub(super) struct Strangers {
    /// One process of each file.
    files: BTreeMap<DeviceInode, i32>,
    /// The same by inode alone, and by path: a file system of layers shows one file as several.
    inodes: BTreeMap<u64, i32>,
    paths: BTreeMap<String, i32>,
    /// Why that is not all.
    lacking: Option<String>,
}

impl Strangers {
    /// Looks at all processes but those of the workload and their children.
    ///
    /// # Errors
    /// A sentence: they cannot be listed.
    pub(super) fn look(root: &Root, workload: &Workload) -> Result<Self, String> {
        let own: BTreeSet<i32> = workload.processes.iter().map(|p| p.pid).collect();
        let unreadable = |e| format!("the list of processes cannot be read: {e}");
        let proc = rustix::fs::open(
            root.path("/proc"),
            OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC,
            Mode::empty(),
        )
        .map_err(unreadable)?;
        let (pids, more) = numbers_in(&proc, ".", SCAN_MAX).map_err(unreadable)?;
        let mut this = Self {
            files: BTreeMap::new(),
            inodes: BTreeMap::new(),
            paths: BTreeMap::new(),
            lacking: more.then(|| format!("there are more than {SCAN_MAX} processes")),
        };
        for pid in pids {
            // A child that the workload has just forked is its own, though no scan has seen it yet.
            if own.contains(&pid) || parent(&proc, pid).is_some_and(|p| own.contains(&p)) {
                continue;
            }
            // None: it has ended, or is the kernel's.
            let Some(text) = text_of(&proc, &format!("{pid}/maps"), MAPS_MAX) else {
                continue;
            };
            if text.len() >= MAPS_MAX {
                this.lacking = Some(format!(
                    "process {pid} has too many mappings to be looked through"
                ));
            }
            text.lines()
                .filter_map(file_of)
                .for_each(|(file, path)| this.add(file, path, pid));
        }
        Ok(this)
    }

    fn add(&mut self, file: DeviceInode, path: &str, pid: i32) {
        if self.files.contains_key(&file) {
            return;
        }
        if self.files.len() >= FILES_MAX {
            self.lacking = Some(format!("processes have more than {FILES_MAX} files mapped"));
            return;
        }
        self.files.insert(file, pid);
        self.inodes.entry(file.1).or_insert(pid);
        self.paths.entry(path.to_owned()).or_insert(pid);
    }

    /// Whether nobody outside of the workload has a file mapped. `layered`: it lies on a file system that shows one file as
    /// several; then a file of the same number or path is taken for the same.
    ///
    /// # Errors
    /// A sentence: somebody has, or that cannot be told.
    pub(super) fn allow(&self, file: &DeviceInode, path: &str, layered: bool) -> Result<(), String> {
        let same = self.files.get(file).or_else(|| {
            layered
                .then(|| self.inodes.get(&file.1).or_else(|| self.paths.get(path)))
                .flatten()
        });
        match (same, &self.lacking) {
            (Some(pid), _) => Err(format!(
                "{path} is used by process {pid}, too, which is not of this workload and would be held up while counting \
                 begins and ends"
            )),
            (None, Some(why)) => Err(format!("who else uses {path} cannot be told: {why}")),
            (None, None) => Ok(()),
        }
    }

    /// As [`Self::allow`], of a mapping.
    ///
    /// # Errors
    /// As of [`Self::allow`].
    pub(super) fn allow_mapping(&self, mapping: &Mapping, layered: bool) -> Result<(), String> {
        self.allow(&mapping.device_inode, &mapping.path, layered)
    }
}

/// The file of a line of a list of mappings: `start-end perms offset device inode path`. The kernel goes through all mappings of
/// the file, also those that hold data.
fn file_of(line: &str) -> Option<(DeviceInode, &str)> {
    let mut fields = line.splitn(6, ' ').skip(3);
    let (major, minor) = fields.next()?.split_once(':')?;
    let inode = fields.next()?.parse().ok().filter(|i| *i != 0)?;
    let number = |s: &str| u32::from_str_radix(s, 16).ok();
    Some((
        ((number(major)?, number(minor)?), inode),
        fields.next().unwrap_or_default().trim_start(),
    ))
}

/// A thread of these processes that waits for a device and does not go on.
pub(super) fn standing_still(root: &Root, processes: &[ProcessId]) -> Option<(ProcessId, i32)> {
    let waits = |process: ProcessId, thread: i32| {
        status(root, process, &format!("task/{thread}/status")).filter(|s| s.waits_for_device)
    };
    let mut waiting: Vec<(ProcessId, i32, u64)> = Vec::new();
    for process in processes {
        let threads = open_process(root, *process)
            .ok()
            .and_then(|dir| numbers_in(&dir, "task", THREADS_MAX).ok());
        for thread in threads.map(|t| t.0).unwrap_or_default() {
            waiting.extend(waits(*process, thread).map(|s| (*process, thread, s.switches)));
        }
    }
    if waiting.is_empty() {
        return None;
    }
    std::thread::sleep(STILL);
    waiting
        .into_iter()
        .find(|(process, thread, switches)| waits(*process, *thread).is_some_and(|s| s.switches == *switches))
        .map(|(process, thread, _)| (process, thread))
}

/// What the kernel says of a process that matters here.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Status {
    /// Process that traces it (ptrace).
    pub(super) tracer: Option<i32>,
    /// Whether one of its threads has a shadow stack.
    pub(super) shadow_stack: bool,
    /// It waits for a device, and no signal wakes it (state `D`).
    waits_for_device: bool,
    /// Times that it began to wait.
    switches: u64,
}

/// Looks at a process, or at one of its threads (`task/TID/status`). `None`: it is gone.
pub(super) fn status(root: &Root, process: ProcessId, file: &str) -> Option<Status> {
    let dir = open_process(root, process).ok()?;
    let mut buffer = [0u8; 8192];
    let n = read_at(&dir, file, &mut buffer).ok()?;
    Some(parse_status(&String::from_utf8_lossy(buffer.get(..n)?)))
}

fn parse_status(text: &str) -> Status {
    let field = |name: &str| text.lines().find_map(|l| l.strip_prefix(name));
    Status {
        tracer: field("TracerPid:")
            .and_then(|t| t.trim().parse().ok())
            .filter(|t| *t != 0),
        shadow_stack: field("x86_Thread_features:")
            .is_some_and(|f| f.split_ascii_whitespace().any(|w| w == "shstk")),
        waits_for_device: field("State:").is_some_and(|s| s.trim_start().starts_with('D')),
        switches: field("voluntary_ctxt_switches:")
            .and_then(|n| n.trim().parse().ok())
            .unwrap_or(0),
    }
}

/// Process that traces a process.
pub(super) fn tracer_of(root: &Root, process: ProcessId) -> Option<i32> {
    status(root, process, "status")?.tracer
}

/// Whether a process, or one of its first so many threads, has a shadow stack. One that cannot be looked at counts as one
/// that has.
pub(in crate::meters) fn has_shadow_stack(root: &Root, process: ProcessId, threads_max: usize) -> bool {
    let threads = open_process(root, process)
        .ok()
        .and_then(|dir| numbers_in(&dir, "task", threads_max).ok());
    let Some((threads, _)) = threads else {
        return true;
    };
    threads.into_iter().any(|thread| {
        // A thread that ended meanwhile needs none.
        status(root, process, &format!("task/{thread}/status")).is_some_and(|s| s.shadow_stack)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use homeostat_model::{Fingerprint, OperatorChoice, WorkloadId, WorkloadKind};

    #[test]
    fn tracers_and_shadow_stacks_are_seen_in_a_status() {
        let text = "Name:\ta\nState:\tD (disk sleep)\nTracerPid:\t42\nx86_Thread_features:\tshstk wrss \n\
                    voluntary_ctxt_switches:\t7\nnonvoluntary_ctxt_switches:\t9\n";
        assert_eq!(
            parse_status(text),
            Status {
                tracer: Some(42),
                shadow_stack: true,
                waits_for_device: true,
                switches: 7,
            }
        );
        // A name that says so is a name.
        let text = "Name:\tTracerPid:\nState:\tS (sleeping)\nTracerPid:\t0\nx86_Thread_features:\t\n\
                    x86_Thread_features_locked:\tshstk\n";
        assert_eq!(parse_status(text), Status::default());
        assert_eq!(parse_status(""), Status::default());
    }

    #[test]
    fn lines_of_mappings_name_their_file() {
        let line = "7f00-7f10 rw-p 00001000 fd:0a 1234                       /a b (deleted)";
        assert_eq!(file_of(line), Some((((0xfd, 0x0a), 1234), "/a b (deleted)")));
        assert_eq!(
            file_of("7f00-7f10 rw-p 00000000 00:00 0                  [heap]"),
            None
        );
        assert_eq!(file_of("7f00-7f10 rw-p 00000000 00:00 0 "), None);
        for bad in [
            "",
            "7f00",
            "7f00-7f10 rw-p 0 fd 1 /x",
            "7f00-7f10 rw-p 0 zz:0 1 /x",
        ] {
            assert_eq!(file_of(bad), None, "{bad}");
        }
    }

    #[test]
    fn a_file_of_layers_is_known_by_its_number_or_its_path() {
        let mut strangers = Strangers {
            files: BTreeMap::new(),
            inodes: BTreeMap::new(),
            paths: BTreeMap::new(),
            lacking: None,
        };
        strangers.add(((0, 50), 7), "/usr/bin/x", 11);
        assert!(
            strangers
                .allow(&((0, 50), 7), "/y", false)
                .unwrap_err()
                .contains("process 11")
        );
        assert_eq!(strangers.allow(&((0, 51), 7), "/usr/bin/x", false), Ok(()));
        assert!(strangers.allow(&((0, 51), 7), "/y", true).is_err());
        assert!(strangers.allow(&((0, 51), 8), "/usr/bin/x", true).is_err());
        assert_eq!(strangers.allow(&((0, 51), 8), "/y", true), Ok(()));
        strangers.lacking = Some("why".to_owned());
        assert!(
            strangers
                .allow(&((0, 51), 8), "/y", true)
                .unwrap_err()
                .contains("why")
        );
    }

    #[test]
    fn a_file_that_another_process_runs_is_told_from_one_that_is_the_workloads_alone() {
        let root = Root::default();
        let directory = tempfile::tempdir().unwrap();
        let program = directory.path().join("sleep");
        if !["/bin/sleep", "/usr/bin/sleep"]
            .iter()
            .any(|p| std::fs::copy(p, &program).is_ok())
        {
            println!("skipped: no sleep to copy");
            return;
        }
        let mut first = std::process::Command::new(&program).arg("600").spawn().unwrap();
        let process = |child: &std::process::Child| {
            let stat = std::fs::read(format!("/proc/{}/stat", child.id())).unwrap();
            ProcessId {
                pid: i32::try_from(child.id()).unwrap(),
                start_ticks: super::super::super::common::start_ticks(&stat).unwrap(),
            }
        };
        let workload = Workload {
            id: WorkloadId::from("one"),
            kind: WorkloadKind::ProcessGroup,
            fingerprint: Fingerprint::from("one"),
            program: "sleep".to_owned(),
            executable: program.display().to_string(),
            processes: vec![process(&first)],
            choice: OperatorChoice::default(),
        };
        // A process that was just forked has not come to its program yet.
        let mapped = |child: &std::process::Child| {
            for _ in 0..6_000 {
                let text = std::fs::read_to_string(format!("/proc/{}/maps", child.id())).unwrap_or_default();
                let found = super::super::super::code_file::code_mappings(&text)
                    .into_iter()
                    .find(|m| std::path::Path::new(&m.path) == program);
                if let Some(found) = found {
                    return found;
                }
                std::thread::sleep(Duration::from_millis(10));
            }
            panic!("{} was not executed", program.display());
        };
        let mapping = mapped(&first);
        let allowed = || {
            Strangers::look(&root, &workload)
                .unwrap()
                .allow_mapping(&mapping, false)
        };
        let alone = allowed();
        let mut second = std::process::Command::new(&program).arg("600").spawn().unwrap();
        mapped(&second);
        let shared = allowed();
        let still = standing_still(&root, &workload.processes);
        for child in [&mut first, &mut second] {
            let _ = child.kill();
            let _ = child.wait();
        }
        assert_eq!(alone, Ok(()));
        assert!(shared.unwrap_err().contains(&format!("process {}", second.id())));
        assert_eq!(still, None, "it sleeps, and waits for no device");
    }
}
