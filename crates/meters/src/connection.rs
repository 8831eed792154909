//! A connection to a server of a workload: every wait is bounded, and so is what is read. The opener of a helper process
//! connects, its speaker speaks.

use crate::service::opener::{Ask, Got, ask};
use crate::{listeners, network};
use homeostat_helper::storage;
use homeostat_kernel::Root;
use homeostat_kernel::process::{
    directory_of, fault, is_shortage, living, open_process, status_of, user_ids,
};
use homeostat_model::ProcessId;
use homeostat_platform::PlatformError;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fs::{FileType, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, Protocol, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType, ipproto, sockopt,
};
use serde::{Deserialize, Serialize};
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, OwnedFd};
use std::time::{Duration, Instant};

/// Longest wait for a connection. A server on this machine takes or refuses one at once, and the opener is waited for not
/// much longer.
const CONNECTING: Duration = Duration::from_millis(150);

/// Where a server listens.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) enum Address {
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
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) struct Endpoint {
    /// Where it listens.
    pub(super) address: Address,
    /// The process whose network that is in, where it is another than ours.
    pub(super) network: Option<ProcessId>,
}

#[cfg(test)]
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
pub(crate) struct Deadline(Instant);

impl Deadline {
    pub(crate) fn after(time: Duration) -> Self {
        Self(Instant::now() + time)
    }

    /// The same, but so long from now at most.
    pub(super) fn at_most(self, time: Duration) -> Self {
        Self(self.0.min(Instant::now() + time))
    }

    /// Time left, at most as long as the opener is waited for.
    fn left(self) -> Duration {
        self.0.saturating_duration_since(Instant::now()).min(CONNECTING)
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

/// Why nobody is connected.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum NotConnected {
    /// The kernel says so.
    Kernel(i32),
    /// Somebody else listens there, or what lies there is no socket of the process's user.
    Stranger,
    /// The process cannot be looked at.
    Process(PlatformError),
}

impl From<Errno> for NotConnected {
    fn from(e: Errno) -> Self {
        Self::Kernel(e.raw_os_error())
    }
}

impl From<PlatformError> for NotConnected {
    fn from(e: PlatformError) -> Self {
        Self::Process(e)
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

/// Connects to a path below the root directory of a process: of that one, not of a later one with its number. No link is
/// followed, and the socket must belong to one of these users: who binds a name may put another's in its place.
fn begin_by_path(process: ProcessId, path: &str, users: &[u32]) -> Result<Begun, NotConnected> {
    let open = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let dir = directory_of(process)?;
    let root = rustix::fs::openat(&dir, "root", OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
    let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_SYMLINKS;
    let look_up =
        |path: &str| rustix::fs::openat2(&root, path.trim_start_matches('/'), open, Mode::empty(), resolve);
    let file = match (look_up(path), path.strip_prefix("/var/run/")) {
        // A link on nearly every machine (Filesystem Hierarchy Standard 3.0, section 5.13).
        (Err(Errno::LOOP), Some(name)) => look_up(&format!("/run/{name}")),
        (found, _) => found,
    };
    let file = match file {
        Err(Errno::LOOP) => return Err(NotConnected::Stranger),
        other => other?,
    };
    let stat = storage::check(&file, Some(&dir)).map_err(|why| match why {
        storage::Refused::Kernel(e) => NotConnected::from(e),
        _ => NotConnected::Stranger,
    })?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::Socket || !users.contains(&stat.st_uid) {
        return Err(NotConnected::Stranger);
    }
    // Through a descriptor: a socket address holds 108 bytes, and the name may be in a container.
    let name = format!("/proc/self/fd/{}", file.as_raw_fd());
    let fd = stream_socket(AddressFamily::UNIX, None)?;
    let connected = rustix::net::connect(&fd, &SocketAddrUnix::new(name)?);
    Ok((fd, connected))
}

fn begin_tcp(fd: OwnedFd, address: SocketAddr) -> Result<Begun, Errno> {
    // Small questions and answers: never wait to fill a segment.
    sockopt::set_tcp_nodelay(&fd, true)?;
    let connected = rustix::net::connect(&fd, &address);
    Ok((fd, connected))
}

fn tcp_socket(address: SocketAddr) -> Result<OwnedFd, Errno> {
    let family = if address.is_ipv4() {
        AddressFamily::INET
    } else {
        AddressFamily::INET6
    };
    stream_socket(family, Some(ipproto::TCP))
}

/// Waits for what was begun.
fn finish((fd, connected): Begun, deadline: Deadline) -> Result<OwnedFd, Errno> {
    match connected {
        Ok(()) => {}
        // (A Unix socket with a full queue answers EAGAIN: the server is busy, and we do not wait.)
        Err(Errno::INPROGRESS) => {
            deadline.wait(&fd, PollFlags::OUT)?;
            sockopt::socket_error(&fd)??;
        }
        Err(e) => return Err(e),
    }
    Ok(fd)
}

/// The users that a process runs as.
pub(crate) fn users_of(root: &Root, process: ProcessId) -> Result<Vec<u32>, PlatformError> {
    let dir = open_process(root, process)?;
    let target = format!("process {process}");
    let status = status_of(&dir, "status").map_err(|e| fault(e, &target, "its status file"))?;
    Ok(user_ids(&status))
}

/// Connects to a server of a process, and to nobody else: before anything is sent it is known that a user of the process
/// listens there, or that a socket of the process does, before and after. Works in an opener.
pub(crate) fn connect(
    root: &Root,
    process: ProcessId,
    endpoint: &Endpoint,
    deadline: Deadline,
) -> Result<OwnedFd, NotConnected> {
    let users = users_of(root, process)?;
    let make = |family: AddressFamily| {
        let make = move || stream_socket(family, None);
        match endpoint.network {
            None => make(),
            Some(process) => network::within(process, make),
        }
    };
    let is_users = |fd: &OwnedFd| -> Result<bool, Errno> {
        Ok(users.contains(&sockopt::socket_peercred(fd)?.uid.as_raw()))
    };
    let (fd, is_it) = match &endpoint.address {
        Address::Path { process: of, path } => {
            if *of != process {
                return Err(NotConnected::Stranger);
            }
            let fd = finish(begin_by_path(process, path, &users)?, deadline)?;
            let is_it = is_users(&fd)?;
            (fd, is_it)
        }
        Address::Abstract(name) => {
            let fd = make(AddressFamily::UNIX)?;
            let connected = rustix::net::connect(&fd, &SocketAddrUnix::new_abstract_name(name)?);
            let fd = finish((fd, connected), deadline)?;
            let is_it = is_users(&fd)?;
            (fd, is_it)
        }
        Address::Tcp(address) => {
            let before = listeners::sockets_at(root, process, endpoint.network, *address)?;
            if before.is_empty() {
                return Err(NotConnected::Stranger);
            }
            let fd = match endpoint.network {
                None => tcp_socket(*address)?,
                Some(process) => network::within(process, || tcp_socket(*address))?,
            };
            let fd = finish(begin_tcp(fd, *address)?, deadline)?;
            let after = listeners::sockets_at(root, process, endpoint.network, *address)?;
            (fd, !after.is_disjoint(&before))
        }
    };
    living(root, process)?;
    if is_it {
        Ok(fd)
    } else {
        Err(NotConnected::Stranger)
    }
}

/// Connects to an address that a person has named. Works in an opener.
pub(crate) fn dial(address: SocketAddr, deadline: Deadline) -> Result<OwnedFd, NotConnected> {
    Ok(finish(begin_tcp(tcp_socket(address)?, address)?, deadline)?)
}

impl Connection {
    /// Connects to a server of a process, by the opener.
    pub(super) fn open(
        root: &Root,
        process: ProcessId,
        endpoint: &Endpoint,
        deadline: Deadline,
    ) -> Result<Self, NotConnected> {
        Self::by(
            &Ask::Connect {
                root: root.as_path().to_owned(),
                process,
                endpoint: endpoint.clone(),
                within: deadline.left(),
            },
            deadline,
        )
    }

    /// Connects to an address that a person has named, by the opener.
    pub(super) fn dial(address: SocketAddr, deadline: Deadline) -> Result<Self, NotConnected> {
        let within = deadline.left();
        Self::by(&Ask::Dial { address, within }, deadline)
    }

    fn by(what: &Ask, deadline: Deadline) -> Result<Self, NotConnected> {
        // None begins when there is no time left.
        deadline.check()?;
        match ask(what)? {
            (Got::Connected(Ok(())), Some(fd)) => Ok(Self {
                fd,
                pending: Vec::new(),
            }),
            (Got::Connected(Err(why)), _) => Err(why),
            _ => Err(Errno::PROTO.into()),
        }
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
