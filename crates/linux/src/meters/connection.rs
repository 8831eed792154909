//! A connection that never hangs the loop: every wait is bounded, and so is what is read.

use super::common::{directory_of, is_shortage};
use super::network;
use super::patient::look_up;
use homeostat_model::ProcessId;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fs::{Mode, OFlags, ResolveFlags};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, Protocol, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType, ipproto, sockopt,
};
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, OwnedFd};
use std::time::{Duration, Instant};

/// Where a server listens.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Address {
    /// A path as the server sees it, below that process's root directory.
    Path {
        /// Process whose root the path is below.
        process: ProcessId,
        /// The path.
        path: String,
    },
    /// A name in the abstract namespace.
    Abstract(Vec<u8>),
    /// An address.
    Tcp(SocketAddr),
}

impl Address {
    /// Whether it means something else in another network. A path leads there from any.
    pub(super) fn belongs_to_a_network(&self) -> bool {
        !matches!(self, Self::Path { .. })
    }

    /// Whether an error of asking there says that something is short here and now, and nothing of who is asked.
    pub(super) fn is_shortage(&self, errno: Errno) -> bool {
        match self {
            // No port is left for our end. Elsewhere it may as well be that this machine has no such address, as long as it runs:
            // of `::1` where IPv6 is switched off.
            Self::Tcp(address) if errno == Errno::ADDRNOTAVAIL => {
                address.is_ipv4() && address.ip().is_loopback()
            }
            Self::Path { .. } | Self::Abstract(_) | Self::Tcp(_) => is_shortage(errno),
        }
    }
}

/// Where a server can be asked.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Endpoint {
    /// Where it listens.
    pub(super) address: Address,
    /// The process whose network that is in, where it is another than ours.
    pub(super) network: Option<ProcessId>,
}

impl Endpoint {
    /// In our network.
    pub(super) fn here(address: Address) -> Self {
        Self {
            address,
            network: None,
        }
    }
}

impl std::fmt::Display for Endpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.address {
            Address::Path { path, .. } => f.write_str(path),
            Address::Abstract(name) => write!(f, "@{}", String::from_utf8_lossy(name)),
            Address::Tcp(address) => address.fmt(f),
        }?;
        match self.network {
            Some(process) => write!(f, " in the network of process {process}"),
            None => Ok(()),
        }
    }
}

/// Time left of an operation.
#[derive(Clone, Copy, Debug)]
pub(super) struct Deadline(Instant);

impl Deadline {
    pub(super) fn after(time: Duration) -> Self {
        Self(Instant::now() + time)
    }

    /// The same, but so long from now at most.
    pub(super) fn at_most(self, time: Duration) -> Self {
        Self(self.0.min(Instant::now() + time))
    }

    /// Whether there is time left: whoever has always something ready is not waited for, and would never come to an end.
    fn check(self) -> Result<(), Errno> {
        if Instant::now() < self.0 {
            Ok(())
        } else {
            Err(Errno::TIMEDOUT)
        }
    }

    /// Waits until the socket is ready.
    fn wait(self, fd: &OwnedFd, flags: PollFlags) -> Result<(), Errno> {
        loop {
            let left = self.0.saturating_duration_since(Instant::now());
            let left = Timespec {
                tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
                tv_nsec: i64::from(left.subsec_nanos()),
            };
            match rustix::event::poll(&mut [PollFd::new(fd, flags)], Some(&left)) {
                Ok(0) => return Err(Errno::TIMEDOUT),
                Ok(_) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(e) => return Err(e),
            }
        }
    }
}

/// A connected stream socket.
#[derive(Debug)]
pub(super) struct Connection {
    fd: OwnedFd,
    /// Received and not yet consumed.
    pending: Vec<u8>,
}

fn stream_socket(family: AddressFamily, protocol: Option<Protocol>) -> Result<OwnedFd, Errno> {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    rustix::net::socket_with(family, SocketType::STREAM, flags, protocol)
}

/// A socket, and what came of connecting it.
type Begun = (OwnedFd, Result<(), Errno>);

/// Connects to a path below the root directory of a process: of that one, not of a later one with its number.
fn begin_by_path(process: ProcessId, path: &str) -> Result<Begun, Errno> {
    let open = OFlags::PATH | OFlags::CLOEXEC;
    let root = rustix::fs::openat(directory_of(process)?, "root", open, Mode::empty())?;
    let relative = path.trim_start_matches('/');
    // Through a descriptor: a socket address holds 108 bytes, and the name may be in a container.
    let file = rustix::fs::openat2(&root, relative, open, Mode::empty(), ResolveFlags::IN_ROOT)?;
    let name = format!("/proc/self/fd/{}", file.as_raw_fd());
    let fd = stream_socket(AddressFamily::UNIX, None)?;
    let connected = rustix::net::connect(&fd, &SocketAddrUnix::new(name)?);
    Ok((fd, connected))
}

impl Connection {
    /// Connects.
    pub(super) fn open(endpoint: &Endpoint, deadline: Deadline) -> Result<Self, Errno> {
        // The look-up of a path has a time of its own: none begins when there is none left.
        deadline.check()?;
        let socket = |family: AddressFamily, protocol: Option<Protocol>| {
            let make = move || stream_socket(family, protocol);
            match endpoint.network {
                None => make(),
                Some(process) => network::within(process, make),
            }
        };
        let (fd, connected) = match &endpoint.address {
            Address::Path { process, path } => {
                let (process, path) = (*process, path.clone());
                // The path is looked up on whatever file systems the process has there: one that does not answer (FUSE, a dead
                // server) keeps the thread that waits for it, not us.
                look_up(process.pid, move || begin_by_path(process, &path)).map_err(|_| Errno::TIMEDOUT)??
            }
            Address::Abstract(name) => {
                let fd = socket(AddressFamily::UNIX, None)?;
                let connected = rustix::net::connect(&fd, &SocketAddrUnix::new_abstract_name(name)?);
                (fd, connected)
            }
            Address::Tcp(address) => {
                let family = if address.is_ipv4() {
                    AddressFamily::INET
                } else {
                    AddressFamily::INET6
                };
                let fd = socket(family, Some(ipproto::TCP))?;
                // Small questions and answers: never wait to fill a segment.
                sockopt::set_tcp_nodelay(&fd, true)?;
                let connected = rustix::net::connect(&fd, address);
                (fd, connected)
            }
        };
        match connected {
            Ok(()) => {}
            // (A Unix socket with a full queue answers EAGAIN: the server is busy, and we do not wait.)
            Err(Errno::INPROGRESS) => {
                deadline.wait(&fd, PollFlags::OUT)?;
                sockopt::socket_error(&fd)??;
            }
            Err(e) => return Err(e),
        }
        Ok(Self {
            fd,
            pending: Vec::new(),
        })
    }

    /// The user who listens at the other end of a Unix socket, as the kernel noted it when the listening began.
    pub(super) fn peer_user(&self) -> Result<u32, Errno> {
        Ok(sockopt::socket_peercred(&self.fd)?.uid.as_raw())
    }

    /// A connection on which this has been received, and that has ended.
    pub(super) fn received(bytes: &[u8]) -> Result<Self, Errno> {
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let (fd, _closed) = rustix::net::socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        Ok(Self {
            fd,
            pending: bytes.to_vec(),
        })
    }

    /// Sends all of it.
    pub(super) fn send(&mut self, mut bytes: &[u8], deadline: Deadline) -> Result<(), Errno> {
        while !bytes.is_empty() {
            deadline.check()?;
            match rustix::net::send(&self.fd, bytes, SendFlags::NOSIGNAL) {
                Ok(n) => bytes = &bytes[n..],
                Err(Errno::AGAIN) => deadline.wait(&self.fd, PollFlags::OUT)?,
                Err(Errno::INTR) => {}
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }

    /// Receives more; 0 at the end of the stream.
    fn receive(&mut self, deadline: Deadline) -> Result<usize, Errno> {
        let mut chunk = [0u8; 16 * 1024];
        loop {
            deadline.check()?;
            match rustix::net::recv(&self.fd, &mut chunk, RecvFlags::empty()) {
                Ok((n, _)) => {
                    self.pending.extend_from_slice(&chunk[..n]);
                    return Ok(n);
                }
                Err(Errno::AGAIN) => deadline.wait(&self.fd, PollFlags::IN)?,
                Err(Errno::INTR) => {}
                Err(e) => return Err(e),
            }
        }
    }

    /// The next line without its end; at most `limit` bytes.
    pub(super) fn line(&mut self, limit: usize, deadline: Deadline) -> Result<Vec<u8>, Errno> {
        let mut searched = 0;
        loop {
            if let Some(at) = self.pending[searched..].iter().position(|&c| c == b'\n') {
                let mut line: Vec<u8> = self.pending.drain(..=searched + at).collect();
                line.pop();
                if line.last() == Some(&b'\r') {
                    line.pop();
                }
                return Ok(line);
            }
            searched = self.pending.len();
            if searched > limit {
                return Err(Errno::MSGSIZE);
            }
            if self.receive(deadline)? == 0 {
                return Err(Errno::CONNRESET);
            }
        }
    }

    /// Exactly that many bytes; the caller has checked the number.
    pub(super) fn exactly(&mut self, count: usize, deadline: Deadline) -> Result<Vec<u8>, Errno> {
        while self.pending.len() < count {
            if self.receive(deadline)? == 0 {
                return Err(Errno::CONNRESET);
            }
        }
        Ok(self.pending.drain(..count).collect())
    }

    /// Everything to the end of the stream; more than `limit` bytes is an error.
    pub(super) fn rest(&mut self, limit: usize, deadline: Deadline) -> Result<Vec<u8>, Errno> {
        loop {
            if self.pending.len() > limit {
                return Err(Errno::MSGSIZE);
            }
            if self.receive(deadline)? == 0 {
                return Ok(std::mem::take(&mut self.pending));
            }
        }
    }
}
