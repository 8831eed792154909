//! Opens sockets in the network namespace of a process.
//!
//! A socket belongs permanently to the network namespace of the thread that made it. For another namespace, a
//! short-lived thread enters it, makes the socket and ends, so no other thread leaves ours. This needs `CAP_SYS_ADMIN`,
//! also in the user namespace that owns it.
//!
//! An open socket keeps its namespace and devices alive, so it must be closed as soon as the process has ended.

use crate::service::opener;
use homeostat_kernel::process::{directory_of, is_shortage};
use homeostat_model::ProcessId;
use homeostat_platform::PlatformError;
use rustix::fs::{AtFlags, Mode, OFlags, Stat};
use rustix::io::Errno;
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use std::os::fd::{AsFd, OwnedFd};

/// File of a process for its network namespace.
const FILE: &str = "ns/net";
const STACK: usize = 64 * 1024;

/// Identity of a network namespace, unique while it exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Identity {
    device: u64,
    inode: u64,
}

impl From<&Stat> for Identity {
    fn from(stat: &Stat) -> Self {
        Self {
            device: stat.st_dev,
            inode: stat.st_ino,
        }
    }
}

impl Identity {
    pub(super) fn of(process: &OwnedFd) -> Result<Self, Errno> {
        rustix::fs::statat(process, FILE, AtFlags::empty()).map(|stat| Self::from(&stat))
    }

    pub(super) fn ours() -> Result<Self, Errno> {
        rustix::fs::stat("/proc/self/ns/net").map(|stat| Self::from(&stat))
    }
}

/// The network of a process. It keeps the namespace alive, so it must not be stored.
#[derive(Debug)]
pub(super) struct Network {
    identity: Identity,
    other: Option<OwnedFd>,
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum Fault {
    /// Entry is denied, or the namespace has gone.
    #[error(
        "it cannot be entered ({0}): homeostat must be root of the machine, with CAP_SYS_ADMIN, and RestrictNamespaces= of its \
         service must not forbid it"
    )]
    Entering(Errno),
    /// No thread was available. A retry may succeed.
    #[error("no thread can be had to enter it ({0})")]
    Thread(std::io::Error),
    /// It was entered, but the operation failed.
    #[error("{0}")]
    Making(Errno),
}

impl Fault {
    /// The error, if it says nothing permanent about the network: the process ended, or resources are short.
    pub(super) fn passing(&self, process: &str, what: &str) -> Option<PlatformError> {
        match self {
            Self::Entering(Errno::NOENT | Errno::SRCH) => Some(PlatformError::Vanished {
                target: process.to_owned(),
            }),
            Self::Entering(e) | Self::Making(e) if !is_shortage(*e) => None,
            Self::Entering(_) | Self::Making(_) | Self::Thread(_) => Some(PlatformError::Busy {
                what: what.to_owned(),
                why: self.to_string(),
            }),
        }
    }
}

impl Network {
    /// Of the process with this directory in `/proc`. The open file is the namespace itself, whatever happens to the
    /// process.
    pub(super) fn of(process: &OwnedFd) -> Result<Self, Errno> {
        let file = rustix::fs::openat(process, FILE, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
        let identity = Identity::from(&rustix::fs::fstat(&file)?);
        let is_ours = identity == Identity::ours()?;
        Ok(Self {
            identity,
            other: (!is_ours).then_some(file),
        })
    }

    pub(super) fn identity(&self) -> Identity {
        self.identity
    }

    pub(super) fn is_ours(&self) -> bool {
        self.other.is_none()
    }

    /// Runs an operation there: directly if it is ours, otherwise on a thread that has ended when this returns.
    pub(super) fn make<T: Send>(&self, make: impl FnOnce() -> Result<T, Errno> + Send) -> Result<T, Fault> {
        let Some(file) = &self.other else {
            return make().map_err(Fault::Making);
        };
        if opener::is_here() {
            // The opener has one thread and serves one request at a time.
            return opener::visit(file, make);
        }
        std::thread::scope(|scope| {
            let thread = std::thread::Builder::new()
                .name("network".to_owned())
                .stack_size(STACK)
                .spawn_scoped(scope, move || {
                    move_into_link_name_space(file.as_fd(), Some(LinkNameSpaceType::Network))
                        .map_err(Fault::Entering)?;
                    make().map_err(Fault::Making)
                })
                .map_err(Fault::Thread)?;
            let panicked = || Fault::Thread(std::io::Error::other("it ended early"));
            thread.join().unwrap_or_else(|_| Err(panicked()))
        })
    }
}

/// Runs an operation in a process's network, with kernel errors only.
pub(super) fn within<T: Send>(
    process: ProcessId,
    make: impl FnOnce() -> Result<T, Errno> + Send,
) -> Result<T, Errno> {
    Network::of(&directory_of(process)?)?
        .make(make)
        .map_err(|fault| match fault {
            Fault::Entering(e) | Fault::Making(e) => e,
            Fault::Thread(_) => Errno::AGAIN,
        })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Child, Command};
    use std::time::{Duration, Instant};

    fn directory(pid: u32) -> OwnedFd {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        rustix::fs::open(format!("/proc/{pid}"), flags, Mode::empty()).unwrap()
    }

    /// The thread, and the network that it is in.
    fn whereabouts() -> Result<(std::thread::ThreadId, Identity), Errno> {
        let stat = rustix::fs::stat("/proc/thread-self/ns/net")?;
        Ok((std::thread::current().id(), Identity::from(&stat)))
    }

    #[test]
    fn in_our_own_network_no_thread_is_made() {
        let network = Network::of(&directory(std::process::id())).unwrap();
        assert!(network.is_ours());
        assert_eq!(network.identity(), Identity::ours().unwrap());
        assert_eq!(network.make(whereabouts).unwrap(), whereabouts().unwrap());
        let own = crate::testing::own();
        assert_eq!(
            within(own.processes[0], whereabouts).unwrap(),
            whereabouts().unwrap()
        );
    }

    #[test]
    fn nothing_is_made_in_the_network_of_a_process_that_is_gone() {
        let gone = ProcessId {
            pid: i32::MAX,
            start_ticks: 1,
        };
        assert_eq!(within(gone, whereabouts).unwrap_err(), Errno::NOENT);
        let mut child = Command::new("true").spawn().unwrap();
        let left = directory(child.id());
        child.wait().unwrap();
        assert!(Network::of(&left).is_err());
    }

    struct Ended(Child);
    impl Drop for Ended {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    #[test]
    fn another_network_is_entered_by_another_thread_only() {
        let mut other = match Command::new("unshare").args(["--net", "sleep", "600"]).spawn() {
            Ok(child) => Ended(child),
            Err(e) => {
                println!("skipped: no unshare: {e}");
                return;
            }
        };
        let process = directory(other.0.id());
        let before = whereabouts().unwrap();
        let begun = Instant::now();
        while Identity::of(&process).is_ok_and(|there| there == before.1) {
            if let Some(status) = other.0.try_wait().unwrap() {
                println!("skipped: no network namespace can be had here: {status}");
                return;
            }
            assert!(begun.elapsed() < Duration::from_secs(60));
            std::thread::sleep(Duration::from_millis(5));
        }
        let Ok(network) = Network::of(&process) else {
            println!("skipped: no network namespace can be had here");
            return;
        };
        assert!(!network.is_ours());
        let (thread, there) = network.make(whereabouts).unwrap();
        assert_eq!(there, network.identity());
        assert_ne!(there, before.1);
        assert_ne!(thread, before.0);
        assert_eq!(whereabouts().unwrap(), before, "this one has stayed");
        // What it was to make and could not is told as such.
        let made = network.make(|| Err::<(), _>(Errno::NODEV));
        assert!(matches!(made, Err(Fault::Making(Errno::NODEV))), "{made:?}");
        // It is there after its last process, as long as it is open; then nobody gets there any more.
        drop(other);
        assert_eq!(network.make(whereabouts).unwrap().1, network.identity());
        assert!(Network::of(&process).is_err());
    }
}
