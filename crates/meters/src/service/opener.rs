//! The part of a helper that opens: it finds, checks and opens for its speaker, and has the privileges for that.
//!
//! It serves the processes of its own domain only, whatever its speaker asks for.

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
    /// Whether a process runs still.
    Living {
        /// Where the machine's files are.
        root: PathBuf,
        /// Which.
        process: ProcessId,
    },
    /// What a process listens on.
    Listeners {
        /// Where the machine's files are.
        root: PathBuf,
        /// Which.
        process: ProcessId,
    },
    /// A connection to a server of a process.
    Connect {
        /// Where the machine's files are.
        root: PathBuf,
        /// Whose.
        process: ProcessId,
        /// Where it listens.
        endpoint: Endpoint,
        /// How long that may take.
        within: Duration,
    },
    /// The password for the server of a process.
    Password {
        /// Where the machine's files are.
        root: PathBuf,
        /// Whose server.
        process: ProcessId,
        /// The file that a person has named.
        file: PathBuf,
    },
    /// A connection to an address that a person has named.
    Dial {
        /// The address.
        address: SocketAddr,
        /// How long that may take.
        within: Duration,
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
    /// The machine's list of names.
    Hosts {
        /// Where the machine's files are.
        root: PathBuf,
    },
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
    /// It lives.
    Living,
    /// What it listens on.
    Listeners(Listeners),
    /// The connection, or why there is none.
    Connected(Result<(), NotConnected>),
    /// The file, or why its password is told to nobody.
    Password(Result<(), String>),
    /// The file.
    Hosts,
}

type Answer = Result<Got, PlatformError>;

/// What this process asks by, if it is a speaker.
struct Link(Line);

thread_local! {
    static LINK: RefCell<Option<Link>> = const { RefCell::new(None) };
    /// The network of an opener.
    static HOME: RefCell<Option<OwnedFd>> = const { RefCell::new(None) };
}

/// From now on this thread asks by that line.
pub(super) fn link(line: Line) {
    LINK.set(Some(Link(line)));
}

/// Asks the opener, and waits as long as it takes: the daemon bounds the wait, and kills both where an answer does not come.
///
/// # Errors
/// Its own; `Busy` when it has broken off. In a process that is no helper everything is `Unsupported`.
pub(crate) fn ask(what: &Ask) -> Result<(Got, Option<OwnedFd>), PlatformError> {
    LINK.with_borrow(|link| match link {
        Some(link) => {
            let (answer, descriptors) = link.exchange(what).map_err(broke_off)?;
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

/// Serves a speaker, until that ends.
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

/// Whether the process is one of the domain's.
fn check(what: &Ask, domain: Domain) -> Result<(), PlatformError> {
    let (root, process) = match what {
        Ask::Progress { root, process, .. }
        | Ask::Living { root, process }
        | Ask::Listeners { root, process }
        | Ask::Connect { root, process, .. }
        | Ask::Password { root, process, .. }
        | Ask::Code { root, process, .. } => (Root::new(root), *process),
        Ask::Behind(_, process) => (Root::default(), *process),
        // What only a person names.
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

/// Makes sure that a process runs still, by the opener: see [`homeostat_kernel::process::living`].
pub(crate) fn living(root: &Root, process: ProcessId) -> Result<(), PlatformError> {
    let root = root.as_path().to_owned();
    ask(&Ask::Living { root, process }).map(|_| ())
}

/// Whether a process runs still. One that cannot be looked at for a moment is taken to.
pub(crate) fn lives(root: &Root, process: ProcessId) -> bool {
    !matches!(living(root, process), Err(PlatformError::Vanished { .. }))
}

/// Whether this process is an opener.
pub(crate) fn is_here() -> bool {
    HOME.with_borrow(Option::is_some)
}

/// Enters a network namespace, makes something there, and comes back.
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
            // What it connected to from now on would be another's.
            exit_now(1);
        }
        made.map_err(network::Fault::Making)
    })
}
