//! The opener of a helper: finds, checks and opens files for its speaker, and has the privileges for that. It serves
//! only processes of its own domain, whatever the speaker requests.

use crate::connection::{Deadline, Endpoint, NotConnected};
use crate::listeners::Listeners;
use crate::{code_file, connection, listeners, network, progress, redis};
use homeostat_helper::{Domain, Line, storage};
use homeostat_kernel::Root;
use homeostat_kernel::helper::exit_now;
use homeostat_kernel::process::open_process;
use homeostat_model::ProcessId;
use homeostat_platform::PlatformError;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use serde::{Deserialize, Serialize};
use std::cell::RefCell;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::time::Duration;

#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Ask {
    /// The progress file of a process.
    Progress {
        root: PathBuf,
        /// As the process sees it.
        directory: PathBuf,
        process: ProcessId,
    },
    /// Whether a process still runs.
    Living {
        /// Root of the machine's files.
        root: PathBuf,
        process: ProcessId,
    },
    /// The listening sockets of a process.
    Listeners {
        /// Root of the machine's files.
        root: PathBuf,
        process: ProcessId,
    },
    /// A connection to a server of a process.
    Connect {
        root: PathBuf,
        process: ProcessId,
        endpoint: Endpoint,
        within: Duration,
    },
    /// The password for the server of a process.
    Password {
        root: PathBuf,
        process: ProcessId,
        /// The file that a person named.
        file: PathBuf,
    },
    /// A connection to an address that a person named.
    Dial {
        address: SocketAddr,
        /// Time limit.
        within: Duration,
    },
    /// A file with code of a process.
    Code {
        /// Root of the machine's files.
        root: PathBuf,
        process: ProcessId,
        which: code_file::Which,
    },
    /// Resolves a path where homeostat runs, for a process that may run it.
    Behind(PathBuf, ProcessId),
    /// The machine's hosts(5) file.
    Hosts {
        /// Root of the machine's files.
        root: PathBuf,
    },
}

/// The reply, perhaps with a descriptor.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Got {
    /// The progress file, and the process id in its own namespace.
    Progress(Option<u32>),
    Code,
    Behind(Option<String>),
    Living,
    Listeners(Listeners),
    Connected(Result<(), NotConnected>),
    /// The file, or why the password is withheld.
    Password(Result<(), String>),
    Hosts,
}

type Answer = Result<Got, PlatformError>;

/// The line to the opener, in a speaker.
struct Link(Line);

thread_local! {
    static LINK: RefCell<Option<Link>> = const { RefCell::new(None) };
    /// The network of an opener.
    static HOME: RefCell<Option<OwnedFd>> = const { RefCell::new(None) };
}

/// Sets this thread's line to the opener.
pub(super) fn link(line: Line) {
    LINK.set(Some(Link(line)));
}

/// Asks the opener without a time limit. The daemon limits the wait, and kills both processes if no answer comes.
///
/// # Errors
/// The opener's own. `Busy`: the line broke. `Unsupported`: this process is no helper.
pub(crate) fn ask(what: &Ask) -> Result<(Got, Option<OwnedFd>), PlatformError> {
    LINK.with_borrow(|link| match link {
        Some(link) => {
            let (answer, descriptors) = link.exchange(what).map_err(broke_off)?;
            Ok((answer?, descriptors.into_iter().next()))
        }
        // A test of helpers, in one process.
        None if cfg!(test) => perform(what),
        None => Err(PlatformError::Unsupported {
            what: "opening what a workload publishes".to_owned(),
            why: "only a helper process does that".to_owned(),
        }),
    })
}

fn broke_off(errno: Errno) -> PlatformError {
    PlatformError::Busy {
        what: "opening what a workload publishes".to_owned(),
        why: format!("the helper process that opens has broken off ({errno})"),
    }
}

impl Link {
    fn exchange(&self, what: &Ask) -> Result<(Answer, Vec<OwnedFd>), Errno> {
        self.0.send(what, &[], None)?;
        self.0.receive_with(None)
    }
}

pub(super) fn serve(line: &Line, domain: Domain) -> Result<(), Errno> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC;
    HOME.set(Some(rustix::fs::open("/proc/self/ns/net", flags, Mode::empty())?));
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

/// Checks that the process belongs to the domain.
fn check(what: &Ask, domain: Domain) -> Result<(), PlatformError> {
    let (root, process) = match what {
        Ask::Progress { root, process, .. }
        | Ask::Living { root, process }
        | Ask::Listeners { root, process }
        | Ask::Connect { root, process, .. }
        | Ask::Password { root, process, .. }
        | Ask::Code { root, process, .. } => (Root::new(root), *process),
        Ask::Behind(_, process) => (Root::default(), *process),
        // Only a person names these.
        Ask::Dial { .. } | Ask::Hosts { .. } => return Ok(()),
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
    let connected = |connected: Result<OwnedFd, NotConnected>| match connected {
        Ok(fd) => (Got::Connected(Ok(())), Some(fd)),
        Err(why) => (Got::Connected(Err(why)), None),
    };
    Ok(match what {
        Ask::Progress {
            root,
            directory,
            process,
        } => {
            let (file, pid) = progress::find_file(&Root::new(root), directory, *process)?;
            (Got::Progress(file.is_some().then_some(pid)), file)
        }
        Ask::Code { root, process, which } => {
            let file = code_file::find_file(&Root::new(root), *process, *which)?;
            (Got::Code, Some(file))
        }
        Ask::Behind(path, _) => {
            let behind = std::fs::canonicalize(path).ok();
            let behind = behind.and_then(|path| path.into_os_string().into_string().ok());
            (Got::Behind(behind), None)
        }
        Ask::Living { root, process } => {
            homeostat_kernel::process::living(&Root::new(root), *process)?;
            (Got::Living, None)
        }
        Ask::Listeners { root, process } => {
            let found = listeners::of_process(&Root::new(root), *process)?;
            (Got::Listeners(found), None)
        }
        Ask::Connect {
            root,
            process,
            endpoint,
            within,
        } => {
            let deadline = Deadline::after(*within);
            connected(connection::connect(
                &Root::new(root),
                *process,
                endpoint,
                deadline,
            ))
        }
        Ask::Dial { address, within } => connected(connection::dial(*address, Deadline::after(*within))),
        Ask::Password { root, process, file } => {
            let users = connection::users_of(&Root::new(root), *process)?;
            match redis::password_file(file, &users) {
                Ok(Ok(opened)) => (Got::Password(Ok(())), Some(opened)),
                Ok(Err(why)) => (Got::Password(Err(why)), None),
                Err(e) => {
                    return Err(homeostat_kernel::process::fault(
                        e,
                        "the password file",
                        "the password file",
                    ));
                }
            }
        }
        Ask::Hosts { root } => {
            let path = Root::new(root).path("/etc/hosts");
            let found = rustix::fs::open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty());
            let opened = found
                .map_err(storage::Refused::from)
                .and_then(|found| storage::open_found(&found, None));
            (Got::Hosts, opened.ok().map(|(file, _)| file))
        }
    })
}

/// Checks through the opener that a process still runs: see [`homeostat_kernel::process::living`].
pub(crate) fn living(root: &Root, process: ProcessId) -> Result<(), PlatformError> {
    let root = root.as_path().to_owned();
    ask(&Ask::Living { root, process }).map(|_| ())
}

/// Whether a process still runs. True if it is unreadable for a moment.
pub(crate) fn lives(root: &Root, process: ProcessId) -> bool {
    !matches!(living(root, process), Err(PlatformError::Vanished { .. }))
}

pub(crate) fn is_here() -> bool {
    HOME.with_borrow(Option::is_some)
}

/// Enters a network namespace, runs an operation there, and returns.
pub(crate) fn visit<T>(
    there: &OwnedFd,
    make: impl FnOnce() -> Result<T, Errno>,
) -> Result<T, network::Fault> {
    let enter =
        |network: &OwnedFd| move_into_link_name_space(network.as_fd(), Some(LinkNameSpaceType::Network));
    HOME.with_borrow(|home| {
        let home = home.as_ref().ok_or(network::Fault::Entering(Errno::NOSYS))?;
        enter(there).map_err(network::Fault::Entering)?;
        let made = make();
        if enter(home).is_err() {
            // Later connections would be made in the wrong network.
            exit_now(1);
        }
        made.map_err(network::Fault::Making)
    })
}
