//! The part of a helper that opens: it finds, checks and opens for its speaker, and has the privileges for that.
//!
//! It serves the processes of its own domain only, whatever its speaker asks for.

use super::OPENING;
use super::domain::Domain;
use super::wire::Line;
use crate::Root;
use crate::meters::common::open_process;
use crate::meters::{code_file, progress};
use homeostat_model::ProcessId;
use homeostat_platform::PlatformError;
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use std::cell::RefCell;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::time::Instant;

/// What a speaker asks for.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Ask {
    /// The progress file of a process.
    Progress {
        /// Where the machine's files are.
        root: PathBuf,
        /// The directory, as the process sees it.
        directory: PathBuf,
        /// Whose.
        process: ProcessId,
    },
    /// A file with code of a process.
    Code {
        /// Where the machine's files are.
        root: PathBuf,
        /// Whose.
        process: ProcessId,
        /// Which.
        which: code_file::Which,
    },
    /// What a path leads to where homeostat runs, for a process that may run it.
    Behind(PathBuf, ProcessId),
}

/// What was asked for; a descriptor may come with it.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Got {
    /// The progress file, and the number of the process in its own namespace.
    Progress(Option<u32>),
    /// The file comes with it.
    Code,
    /// See [`Ask::Behind`].
    Behind(Option<String>),
}

type Answer = Result<Got, PlatformError>;

/// What this process asks by, if it is a speaker.
struct Link {
    line: Line,
    /// An answer was late: it may come yet, and would be taken for the next.
    late: bool,
}

thread_local! {
    static LINK: RefCell<Option<Link>> = const { RefCell::new(None) };
}

/// From now on this thread asks by that line.
pub(super) fn link(line: Line) {
    LINK.set(Some(Link { line, late: false }));
}

/// Whether the opener let us wait: nothing can be asked any more.
pub(super) fn is_late() -> bool {
    LINK.with_borrow(|link| link.as_ref().is_some_and(|link| link.late))
}

/// Asks the opener.
///
/// # Errors
/// Its own; `Busy` when it is late. In a process that is no helper everything is `Unsupported`.
pub(crate) fn ask(what: &Ask) -> Result<(Got, Option<OwnedFd>), PlatformError> {
    LINK.with_borrow_mut(|link| match link {
        Some(link) if link.late => Err(late(Errno::TIMEDOUT)),
        Some(link) => {
            let answer = link.exchange(what);
            link.late = answer.is_err();
            let (answer, descriptors) = answer.map_err(late)?;
            Ok((answer?, descriptors.into_iter().next()))
        }
        // A test of what helpers do, in one process.
        None if cfg!(test) => perform(what),
        None => Err(PlatformError::Unsupported {
            what: "opening what a workload publishes".to_owned(),
            why: "only a helper process does that".to_owned(),
        }),
    })
}

fn late(errno: Errno) -> PlatformError {
    PlatformError::Busy {
        what: "opening what a workload publishes".to_owned(),
        why: format!("a file system or a lock of the workload does not answer in time ({errno})"),
    }
}

impl Link {
    fn exchange(&self, what: &Ask) -> Result<(Answer, Vec<OwnedFd>), Errno> {
        let deadline = Some(Instant::now() + OPENING);
        self.line.send(what, &[], deadline)?;
        self.line.receive_with(deadline)
    }
}

/// Serves a speaker, until that ends.
pub(super) fn serve(line: &Line, domain: Domain) -> Result<(), Errno> {
    loop {
        let what: Ask = line.receive(None)?;
        let answer = check(&what, domain).and_then(|()| perform(&what));
        match answer {
            Ok((got, descriptor)) => {
                let descriptors: Vec<_> = descriptor.iter().map(AsFd::as_fd).collect();
                line.send(&Answer::Ok(got), &descriptors, None)?;
            }
            Err(e) => line.send(&Answer::Err(e), &[], None)?,
        }
    }
}

/// Whether the process is one of the domain's.
fn check(what: &Ask, domain: Domain) -> Result<(), PlatformError> {
    let (root, process) = match what {
        Ask::Progress { root, process, .. } | Ask::Code { root, process, .. } => (Root::new(root), *process),
        Ask::Behind(_, process) => (Root::default(), *process),
    };
    let whose = Domain::of_directory(&root, &open_process(&root, process)?, process)?;
    if whose == domain {
        return Ok(());
    }
    Err(PlatformError::Unsupported {
        what: format!("reading what process {process} publishes"),
        why: format!("it belongs to {whose}, and the workload to {domain}"),
    })
}

fn perform(what: &Ask) -> Result<(Got, Option<OwnedFd>), PlatformError> {
    match what {
        Ask::Progress {
            root,
            directory,
            process,
        } => {
            let (file, pid) = progress::find_file(&Root::new(root), directory, *process)?;
            Ok((Got::Progress(file.is_some().then_some(pid)), file))
        }
        Ask::Code { root, process, which } => {
            let file = code_file::find_file(&Root::new(root), *process, *which)?;
            Ok((Got::Code, Some(file)))
        }
        Ask::Behind(path, _) => {
            let behind = std::fs::canonicalize(path).ok();
            let behind = behind.and_then(|path| path.into_os_string().into_string().ok());
            Ok((Got::Behind(behind), None))
        }
    }
}
