//! The program's own progress counter: the file that crate `homeostat-progress` or its C header publishes.
//!
//! Anybody may write into the directory, so nothing in it is believed: the file must be a regular one, found
//! without following a link, owned by the user of the process (or root), and name the process by number and
//! start time. It is read, never mapped: a file that shrinks cannot hurt.

use super::common::{
    Cumulative, fault, is_ordinary_storage, is_shortage, not_mine, now_ticks, open_process, read_at, refused,
    usable, user_ids,
};
use super::{Meter, MeterKind, MeterSettings};
use crate::Root;
use homeostat_model::{MeterCandidate, MeterClass, MeterId, ProcessId, Workload};
use homeostat_platform::PlatformError;
use homeostat_progress::layout::{self, Header};
use rustix::fs::{FileType, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

const ID: &str = "progress";

/// The kind.
pub(super) struct Progress {
    directory: PathBuf,
}

impl Progress {
    pub(super) fn new(settings: &MeterSettings) -> Self {
        Self {
            directory: settings.progress_directory.clone(),
        }
    }
}

impl MeterKind for Progress {
    fn find(&mut self, root: &Root, workload: &Workload) -> Vec<MeterCandidate> {
        let mut why = None;
        for process in workload.processes.iter().take(super::common::PROCESSES_MAX) {
            match File::open(root, &self.directory, *process) {
                Ok(Some(file)) => {
                    let unit = if file.header.unit.is_empty() {
                        "count"
                    } else {
                        &file.header.unit
                    };
                    return vec![usable(ID, MeterClass::Application, unit)];
                }
                Ok(None) => {}
                Err(e) => why = Some(e.to_string()),
            }
        }
        let why = why.unwrap_or_else(|| {
            format!(
                "the program publishes no progress counter in {}; one line with the homeostat-progress crate or \
                 homeostat_progress.h makes its work countable exactly and at no cost",
                self.directory.display()
            )
        });
        vec![refused(ID, MeterClass::Application, "count", why)]
    }

    fn open(
        &mut self,
        root: &Root,
        workload: &Workload,
        id: &MeterId,
    ) -> Result<Box<dyn Meter>, PlatformError> {
        if id.as_str() != ID {
            return Err(not_mine(id));
        }
        let mut meter = ProgressMeter {
            root: root.clone(),
            directory: self.directory.clone(),
            opened: now_ticks(root),
            files: std::collections::BTreeMap::new(),
            sum: Cumulative::new(),
            buffer: Vec::new(),
        };
        meter.read(workload)?;
        Ok(Box::new(meter))
    }
}

/// An open, checked file.
struct File {
    fd: OwnedFd,
    header: Header,
}

impl File {
    /// The file of a process; `None` when it publishes none.
    fn open(root: &Root, directory: &Path, process: ProcessId) -> Result<Option<Self>, PlatformError> {
        let dir = open_process(root, process)?;
        let mut buffer = [0u8; 8192];
        let target = format!("process {process}");
        let n = read_at(&dir, "status", &mut buffer).map_err(|e| fault(e, &target, "its status file"))?;
        let status = String::from_utf8_lossy(&buffer[..n]);
        let pid = innermost_pid(&status).unwrap_or(process.pid as u32);
        let name = layout::file_name(pid, process.start_ticks);

        // As the process sees the directory (it may live in a container); links in its tree lead nowhere else.
        let relative = directory.strip_prefix("/").unwrap_or(directory).join(&name);
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
        let opened = rustix::fs::openat(
            &dir,
            "root",
            OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC,
            Mode::empty(),
        )
        .and_then(|tree| {
            rustix::fs::openat2(
                &tree,
                &relative,
                flags,
                Mode::empty(),
                ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS,
            )
        });
        let opened = match opened {
            // No permission to look through the process's root, or a tree without it: our own view.
            Err(Errno::ACCESS | Errno::PERM | Errno::NOSYS | Errno::NOENT) => rustix::fs::open(
                root.path(&directory.join(&name).to_string_lossy()),
                flags,
                Mode::empty(),
            ),
            other => other,
        };
        let fd = match opened {
            Ok(fd) => fd,
            Err(Errno::NOENT) => return Ok(None),
            Err(e) if is_shortage(e) => return Err(fault(e, &target, "its progress file")),
            Err(e) => return Err(refuse(process, &format!("the file cannot be opened: {e}"))),
        };
        let stat = rustix::fs::fstat(&fd).map_err(|e| refuse(process, &e.to_string()))?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return Err(refuse(process, "it is not a regular file"));
        }
        if stat.st_uid != 0 && !user_ids(&status).contains(&stat.st_uid) {
            return Err(refuse(
                process,
                &format!("it belongs to user {}, not to the process's", stat.st_uid),
            ));
        }
        // A workload can mount what it likes there. Files of the kernel have no size, and reading one may wait, or take
        // something away from its real reader; a file in user space may answer when it likes.
        if !is_ordinary_storage(&fd) {
            return Err(refuse(process, "it does not lie on ordinary storage"));
        }
        if u64::try_from(stat.st_size).unwrap_or(0) < layout::HEADER_SIZE as u64 {
            return Err(refuse(process, "it is shorter than its header"));
        }
        let mut head = [0u8; layout::HEADER_SIZE];
        let n = pread_full(&fd, &mut head).map_err(|e| refuse(process, &e.to_string()))?;
        let header = Header::parse(&head[..n], u64::try_from(stat.st_size).unwrap_or(0))
            .map_err(|e| refuse(process, &e.to_string()))?;
        if (header.pid, header.start_ticks) != (pid, process.start_ticks) {
            return Err(refuse(process, "it names another process"));
        }
        Ok(Some(Self { fd, header }))
    }

    fn sum(&self, buffer: &mut Vec<u8>) -> Result<u64, Errno> {
        buffer.resize(layout::HEADER_SIZE + self.header.slots * layout::SLOT_STRIDE, 0);
        let n = pread_full(&self.fd, buffer)?;
        layout::sum_slots(&buffer[..n], self.header.slots).ok_or(Errno::IO)
    }
}

fn refuse(process: ProcessId, why: &str) -> PlatformError {
    PlatformError::Unsupported {
        what: format!("the progress file of process {process}"),
        why: format!("{why}; let the program publish it anew"),
    }
}

fn pread_full(fd: &OwnedFd, buffer: &mut [u8]) -> Result<usize, Errno> {
    let mut used = 0;
    while used < buffer.len() {
        match rustix::io::pread(fd, &mut buffer[used..], used as u64) {
            Ok(0) => break,
            Ok(n) => used += n,
            Err(Errno::INTR) => {}
            Err(e) => return Err(e),
        }
    }
    Ok(used)
}

/// The process id as the process itself sees it: the last number of `NSpid`.
fn innermost_pid(status: &str) -> Option<u32> {
    status
        .lines()
        .find_map(|l| l.strip_prefix("NSpid:"))?
        .split_ascii_whitespace()
        .last()?
        .parse()
        .ok()
}

struct ProgressMeter {
    root: Root,
    directory: PathBuf,
    opened: u64,
    files: std::collections::BTreeMap<ProcessId, File>,
    sum: Cumulative<ProcessId>,
    buffer: Vec<u8>,
}

impl Meter for ProgressMeter {
    fn read(&mut self, workload: &Workload) -> Result<f64, PlatformError> {
        let processes: std::collections::BTreeSet<ProcessId> = workload
            .processes
            .iter()
            .take(super::common::PROCESSES_MAX)
            .copied()
            .collect();
        // The last counts of an ended process are still in its file, which we hold open.
        for (process, file) in &self.files {
            if let Ok(sum) = file.sum(&mut self.buffer) {
                self.sum
                    .set(process, sum as f64, process.start_ticks > self.opened);
            }
        }
        self.files.retain(|p, _| processes.contains(p));
        self.sum.retain(|p| processes.contains(p));
        let mut why = None;
        let mut gone = true;
        for process in &processes {
            if self.files.contains_key(process) {
                continue;
            }
            let opened = File::open(&self.root, &self.directory, *process);
            gone &= matches!(opened, Err(PlatformError::Vanished { .. }));
            match opened {
                Ok(Some(file)) => {
                    if let Ok(sum) = file.sum(&mut self.buffer) {
                        self.sum
                            .set(process, sum as f64, process.start_ticks > self.opened);
                        self.files.insert(*process, file);
                    }
                }
                Ok(None) | Err(PlatformError::Vanished { .. }) => {}
                Err(e) => why = Some(e),
            }
        }
        if self.files.is_empty() {
            let target = format!("the progress counter of {}", workload.id);
            return Err(match why {
                Some(why) => why,
                None if gone => PlatformError::Vanished { target },
                // A worker that is started anew may publish its own in a moment.
                None => PlatformError::Unsupported {
                    what: target,
                    why: "none of its processes publishes one now; let one publish it anew".to_owned(),
                },
            });
        }
        Ok(self.sum.total())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn status_lines() {
        let status = "Name:\tx\nUid:\t1\t2\t3\t4\nNSpid:\t100\t7\n";
        assert_eq!(innermost_pid(status), Some(7));
        assert_eq!(user_ids(status), [1, 2, 3, 4]);
        assert_eq!(innermost_pid("Name: x"), None);
        assert!(user_ids("").is_empty());
    }

    #[test]
    fn who_lives_and_publishes_nothing_may_yet() {
        let empty = tempfile::tempdir().unwrap();
        let mut meter = ProgressMeter {
            root: Root::default(),
            directory: empty.path().to_owned(),
            opened: 0,
            files: std::collections::BTreeMap::new(),
            sum: Cumulative::new(),
            buffer: Vec::new(),
        };
        let gone = ProcessId {
            pid: i32::MAX,
            start_ticks: 1,
        };
        let own = super::super::tests::own().processes[0];
        let mut read = |processes| meter.read(&super::super::tests::workload("w", processes));
        let none = read(vec![own, gone]).unwrap_err();
        assert!(matches!(none, PlatformError::Unsupported { .. }), "{none}");
        assert!(matches!(read(vec![gone]), Err(PlatformError::Vanished { .. })));
    }
}
