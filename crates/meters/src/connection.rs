//! Connections to a workload's servers, with limits on waits and sizes. A helper's opener connects, its speaker talks.

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

/// Longest wait for a connection. A local server accepts or refuses at once. Callers wait little longer.
const CONNECTING: Duration = Duration::from_millis(150);

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) enum Address {
    /// A path below the root directory of a process.
    Path {
        process: ProcessId,
        path: String,
    },
    Abstract(Vec<u8>),
    Tcp(SocketAddr),
}

impl Address {
    /// Whether the address depends on the network namespace. A path does not.
    pub(super) fn belongs_to_a_network(&self) -> bool {
        !matches!(self, Self::Path { .. })
    }

    /// Whether an error shows a local shortage, and says nothing about the server.
    pub(super) fn is_shortage(&self, errno: Errno) -> bool {
        match self {
            // For IPv4 loopback, our end has no free port. Others may be absent for good: `::1` where IPv6 is off.
            Self::Tcp(address) if errno == Errno::ADDRNOTAVAIL => {
                address.is_ipv4() && address.ip().is_loopback()
            }
            Self::Path { .. } | Self::Abstract(_) | Self::Tcp(_) => is_shortage(errno),
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) struct Endpoint {
    pub(super) address: Address,
    /// A process in the server's network, if that is not ours.
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

/// End time of an operation.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Deadline(Instant);

impl Deadline {
    pub(crate) fn after(time: Duration) -> Self {
        Self(Instant::now() + time)
    }

    /// The same, but at most this long from now.
    pub(super) fn at_most(self, time: Duration) -> Self {
        Self(self.0.min(Instant::now() + time))
    }

    /// Time left, at most the opener's limit.
    fn left(self) -> Duration {
        self.0.saturating_duration_since(Instant::now()).min(CONNECTING)
    }

    /// Fails after the deadline. Without it, a peer that always has data ready would never end.
    fn check(self) -> Result<(), Errno> {
        if Instant::now() < self.0 {
            Ok(())
        } else {
            Err(Errno::TIMEDOUT)
        }
    }

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

#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum NotConnected {
    /// Error number of the kernel.
    Kernel(i32),
    /// Somebody else listens there, or the path is no socket of the process's user.
    Stranger,
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

#[derive(Debug)]
pub(super) struct Connection {
    fd: OwnedFd,
    pending: Vec<u8>,
}

fn stream_socket(family: AddressFamily, protocol: Option<Protocol>) -> Result<OwnedFd, Errno> {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    rustix::net::socket_with(family, SocketType::STREAM, flags, protocol)
}

type Begun = (OwnedFd, Result<(), Errno>);

/// Connects to a path below the root directory of exactly this process, not of a later one with its number. Follows no
/// link. The socket must belong to one of these users, because whoever binds a name may replace it by another's socket.
fn begin_by_path(process: ProcessId, path: &str, users: &[u32]) -> Result<Begun, NotConnected> {
    let open = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let dir = directory_of(process)?;
    let root = rustix::fs::openat(&dir, "root", OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
    let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_SYMLINKS;
    let look_up =
        |path: &str| rustix::fs::openat2(&root, path.trim_start_matches('/'), open, Mode::empty(), resolve);
    let file = match (look_up(path), path.strip_prefix("/var/run/")) {
        // `/var/run` is a link on nearly every machine (Filesystem Hierarchy Standard 3.0, section 5.13).
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
    // Messages are small: do not wait to fill a segment.
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

fn finish((fd, connected): Begun, deadline: Deadline) -> Result<OwnedFd, Errno> {
    match connected {
        Ok(()) => {}
        // (A Unix socket with a full queue returns EAGAIN: the server is busy, and there is no wait.)
        Err(Errno::INPROGRESS) => {
            deadline.wait(&fd, PollFlags::OUT)?;
            sockopt::socket_error(&fd)??;
        }
        Err(e) => return Err(e),
    }
    Ok(fd)
}

pub(crate) fn users_of(root: &Root, process: ProcessId) -> Result<Vec<u32>, PlatformError> {
    let dir = open_process(root, process)?;
    let target = format!("process {process}");
    let status = status_of(&dir, "status").map_err(|e| fault(e, &target, "its status file"))?;
    Ok(user_ids(&status))
}

/// Connects to a server of a process, and to nobody else. Before anything is sent, it verifies that a user of the
/// process listens there, or that a socket of the process did before and after the connection. Runs in an opener.
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

/// Connects to an address that a person named. Runs in an opener.
pub(crate) fn dial(address: SocketAddr, deadline: Deadline) -> Result<OwnedFd, NotConnected> {
    Ok(finish(begin_tcp(tcp_socket(address)?, address)?, deadline)?)
}

impl Connection {
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

    /// Connects to an address that a person named, through the opener.
    pub(super) fn dial(address: SocketAddr, deadline: Deadline) -> Result<Self, NotConnected> {
        let within = deadline.left();
        Self::by(&Ask::Dial { address, within }, deadline)
    }

    fn by(what: &Ask, deadline: Deadline) -> Result<Self, NotConnected> {
        // Do not begin without time left.
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

    /// A closed connection with this received data.
    pub(super) fn received(bytes: &[u8]) -> Result<Self, Errno> {
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let (fd, _closed) = rustix::net::socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        Ok(Self {
            fd,
            pending: bytes.to_vec(),
        })
    }

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

    /// Receives more. 0: end of the stream.
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

    /// The next line without its end, at most `limit` bytes.
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

    /// Exactly `count` bytes, which the caller has limited.
    pub(super) fn exactly(&mut self, count: usize, deadline: Deadline) -> Result<Vec<u8>, Errno> {
        while self.pending.len() < count {
            if self.receive(deadline)? == 0 {
                return Err(Errno::CONNRESET);
            }
        }
        Ok(self.pending.drain(..count).collect())
    }

    /// Everything up to the end of the stream. More than `limit` bytes is an error.
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
