//! Sockets in the network of a process. A socket belongs for good to the network namespace of the thread that made it. So one
//! that is wanted in another than ours is made by a thread that enters that namespace, makes it, and ends: no thread that does
//! anything else ever leaves ours. It takes `CAP_SYS_ADMIN`, also in the user namespace that the other one belongs to.
//!
//! A socket that is open keeps its namespace there, and so the devices that were moved into it: it is to be closed as soon as
//! the process is gone.

use crate::service::opener;
use homeostat_kernel::process::{directory_of, is_shortage};
use homeostat_model::ProcessId;
use homeostat_platform::PlatformError;
use rustix::fs::{AtFlags, Mode, OFlags, Stat};
use rustix::io::Errno;
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use std::os::fd::{AsFd, OwnedFd};

/// The file of a process that stands for its network namespace.
const FILE: &str = "ns/net";
/// Stack of a thread that makes a few system calls.
const STACK: usize = 64 * 1024;

/// Which network namespace: no two that are there at the same time have the same.
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
    /// That of the process whose directory below `/proc` this is.
    pub(super) fn of(process: &OwnedFd) -> Result<Self, Errno> {
        rustix::fs::statat(process, FILE, AtFlags::empty()).map(|stat| Self::from(&stat))
    }

    /// That of our own.
    pub(super) fn ours() -> Result<Self, Errno> {
        rustix::fs::stat("/proc/self/ns/net").map(|stat| Self::from(&stat))
    }
}

/// The network of a process. Keeps it there itself, so it is not to be held.
#[derive(Debug)]
pub(super) struct Network {
    identity: Identity,
    /// The namespace, where it is another than ours.
    other: Option<OwnedFd>,
}

/// Why nothing was made in a network.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Fault {
    /// Its namespace may not be entered, or is gone.
    #[error(
        "it cannot be entered ({0}): homeostat must be root of the machine, with CAP_SYS_ADMIN, and RestrictNamespaces= of its \
         service must not forbid it"
    )]
    Entering(Errno),
    /// There is none to go there. It may be there at the next try.
    #[error("no thread can be had to enter it ({0})")]
    Thread(std::io::Error),
    /// It was entered, and there it cannot be made.
    #[error("{0}")]
    Making(Errno),
}

impl Fault {
    /// The error of doing something there for a process, where it says nothing lasting of its network: the process is gone, or
    /// something is short here.
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
    /// That of the process whose directory below `/proc` this is. The file that is opened is the namespace itself, whatever
    /// becomes of the process.
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

    /// Makes something there: at once where it is ours, else on a thread that lives for nothing else and has ended when this
    /// returns.
    pub(super) fn make<T: Send>(&self, make: impl FnOnce() -> Result<T, Errno> + Send) -> Result<T, Fault> {
        let Some(file) = &self.other else {
            return make().map_err(Fault::Making);
        };
        if opener::is_here() {
            // It has one thread, and does one thing at a time.
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

/// Makes something in the network of this process, for who knows errors of the kernel only.
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
