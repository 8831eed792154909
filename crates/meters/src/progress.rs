//! Reads a program's own progress counter, from a file that crate `homeostat-progress` or its C header publishes.
//!
//! Anybody may write into the directory, so the file is untrusted. It must be a regular file, opened without following
//! a link, owned by the process's user or root, and name the process by number and start time. Its storage must be
//! ordinary, and mounted by somebody with rights over the machine. It is never mapped, because it may shrink. All this
//! runs in a helper process (`homeostat_helper`).

use crate::common::{Cumulative, not_mine, refused, usable};
use crate::service::opener::{Ask, Got, ask};
use crate::{Meter, MeterKind, MeterSettings};
use homeostat_helper::storage::{Refused, open_below};
use homeostat_kernel::Root;
use homeostat_kernel::process::{fault, is_shortage, now_ticks, open_process, status_of, user_ids};
use homeostat_model::{MeterCandidate, MeterClass, MeterId, ProcessId, Workload};
use homeostat_platform::PlatformError;
use homeostat_progress::layout::{self, Header};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

pub(super) const ID: &str = "progress";

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
        for process in workload.processes.iter().take(crate::common::PROCESSES_MAX) {
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

struct File {
    fd: OwnedFd,
    header: Header,
}

impl File {
    /// Asks the opener for the file of a process. `None`: it publishes none.
    fn open(root: &Root, directory: &Path, process: ProcessId) -> Result<Option<Self>, PlatformError> {
        let (got, fd) = ask(&Ask::Progress {
            root: root.as_path().to_owned(),
            directory: directory.to_owned(),
            process,
        })?;
        let Got::Progress(Some(pid)) = got else {
            return Ok(None);
        };
        let Some(fd) = fd else {
            return Err(refuse(process, "its descriptor was lost on the way"));
        };
        let size = rustix::fs::fstat(&fd)
            .map_err(|e| refuse(process, &e.to_string()))?
            .st_size;
        let size = u64::try_from(size).unwrap_or(0);
        if size < layout::HEADER_SIZE as u64 {
            return Err(refuse(process, "it is shorter than its header"));
        }
        let mut head = [0u8; layout::HEADER_SIZE];
        let n = pread_full(&fd, &mut head).map_err(|e| refuse(process, &e.to_string()))?;
        let header = Header::parse(&head[..n], size).map_err(|e| refuse(process, &e.to_string()))?;
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

/// Finds and opens the file of a process, and returns the process id in its own namespace. Runs in an opener.
pub(crate) fn find_file(
    root: &Root,
    directory: &Path,
    process: ProcessId,
) -> Result<(Option<OwnedFd>, u32), PlatformError> {
    let dir = open_process(root, process)?;
    let target = format!("process {process}");
    let status = status_of(&dir, "status").map_err(|e| fault(e, &target, "its status file"))?;
    let pid = innermost_pid(&status).unwrap_or(process.pid as u32);
    let name = layout::file_name(pid, process.start_ticks);

    // The directory as the process sees it, perhaps in a container.
    let relative = directory.strip_prefix("/").unwrap_or(directory).join(&name);
    let tree = |path: &Path, below: &OwnedFd| {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        rustix::fs::openat(below, path, flags, Mode::empty())
    };
    let opened = tree(Path::new("root"), &dir)
        .map_err(Refused::from)
        .and_then(|tree| open_below(&tree, &relative, &dir));
    let opened = match opened {
        // Without access to the process's root, or in a tree without it, our own view is used.
        Err(Refused::Kernel(Errno::ACCESS | Errno::PERM | Errno::NOSYS | Errno::NOENT)) => {
            tree(root.as_path(), &dir)
                .map_err(Refused::from)
                .and_then(|tree| open_below(&tree, &relative, &dir))
        }
        other => other,
    };
    let (fd, stat) = match opened {
        Ok(opened) => opened,
        Err(Refused::Kernel(Errno::NOENT)) => return Ok((None, pid)),
        Err(Refused::Kernel(e)) if is_shortage(e) => return Err(fault(e, &target, "its progress file")),
        Err(why) => return Err(refuse(process, &why.to_string())),
    };
    if stat.st_uid != 0 && !user_ids(&status).contains(&stat.st_uid) {
        let why = format!("it belongs to user {}, not to the process's", stat.st_uid);
        return Err(refuse(process, &why));
    }
    Ok((Some(fd), pid))
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

/// The process id in its own namespace: the last number of `NSpid`.
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
            .take(crate::common::PROCESSES_MAX)
            .copied()
            .collect();
        // The open file still has the last counts of an ended process.
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
                // A restarted worker may publish a file soon.
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
        let own = crate::testing::own().processes[0];
        let mut read = |processes| meter.read(&crate::testing::workload("w", processes));
        let none = read(vec![own, gone]).unwrap_err();
        assert!(matches!(none, PlatformError::Unsupported { .. }), "{none}");
        assert!(matches!(read(vec![gone]), Err(PlatformError::Vanished { .. })));
    }
}
