//! Finds the sockets on which a process listens: inodes of its descriptors, looked up in its network tables.

use crate::common::ENTRIES_MAX;
use crate::connection::{Address, Endpoint};
use crate::network::{Fault, Identity, Network};
use crate::service::opener;
use crate::service::opener::{Ask, Got};
use homeostat_kernel::Root;
use homeostat_kernel::process::{fault, is_shortage, numbers_in, open_process, read_full};
use homeostat_model::ProcessId;
use homeostat_platform::PlatformError;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::OwnedFd;

/// Most bytes read of a network table. Listening TCP sockets come first in it.
const TABLE_MAX: usize = 1024 * 1024;

/// Listening sockets of a process, local and cheap ones first.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Listeners {
    pub(super) endpoints: Vec<Endpoint>,
    /// Why other sockets are unreachable, if any: the process is in another network namespace that cannot be entered.
    pub(super) out_of_reach: Option<String>,
    /// More descriptors exist than were read.
    pub(super) more: bool,
}

/// Finds the listening stream sockets of a process. Runs in an opener.
pub(crate) fn of_process(root: &Root, process: ProcessId) -> Result<Listeners, PlatformError> {
    let dir = open_process(root, process)?;
    let target = format!("process {process}");
    let failed = |e| fault(e, &target, &format!("the sockets of {target}"));
    let (inodes, more) = socket_inodes(&dir).map_err(failed)?;
    let unix = table(&dir, "net/unix").map_err(failed)?;
    let mut addresses = unix_listeners(&String::from_utf8_lossy(&unix), &inodes, process);
    let mut tcp: Vec<SocketAddr> = Vec::new();
    // These tables show the process's own network.
    for name in ["net/tcp", "net/tcp6"] {
        let text = table(&dir, name).map_err(failed)?;
        let found = tcp_listeners(&String::from_utf8_lossy(&text), &inodes);
        tcp.extend(found.into_iter().map(|(_, address)| address));
    }
    // The client port comes before ports derived from it (a Redis cluster bus is at port + 10 000).
    tcp.sort_by_key(|address| (!address.ip().is_loopback(), address.port(), address.is_ipv6()));
    addresses.extend(tcp.into_iter().map(Address::Tcp));
    let mut network = None;
    let mut out_of_reach = None;
    if addresses.iter().any(Address::belongs_to_a_network) {
        match other_network(&dir, process) {
            Ok(other) => network = other,
            Err(e) => {
                if let Some(passing) =
                    e.passing(&target, &format!("asking {target} in its network namespace"))
                {
                    return Err(passing);
                }
                addresses.retain(|address| !address.belongs_to_a_network());
                out_of_reach = Some(e.to_string());
            }
        }
    }
    let endpoints = addresses
        .into_iter()
        .take(TRIED_MAX)
        .map(|address| Endpoint {
            network: network.filter(|_| address.belongs_to_a_network()),
            address,
        })
        .collect();
    Ok(Listeners {
        endpoints,
        out_of_reach,
        more,
    })
}

/// A process's sockets that listen at this address, in the given network or else in ours. Empty if it is not in it.
pub(super) fn sockets_at(
    root: &Root,
    process: ProcessId,
    network: Option<ProcessId>,
    address: SocketAddr,
) -> Result<BTreeSet<u64>, PlatformError> {
    let dir = open_process(root, process)?;
    let target = format!("process {process}");
    let failed = |e| fault(e, &target, &format!("the sockets of {target}"));
    let is_there = match network {
        Some(whose) => whose == process,
        None => Identity::of(&dir).map_err(failed)? == Identity::ours().map_err(failed)?,
    };
    if !is_there {
        return Ok(BTreeSet::new());
    }
    let (inodes, _) = socket_inodes(&dir).map_err(failed)?;
    let name = if address.is_ipv4() { "net/tcp" } else { "net/tcp6" };
    let text = table(&dir, name).map_err(failed)?;
    let found = tcp_listeners(&String::from_utf8_lossy(&text), &inodes);
    Ok(found
        .into_iter()
        .filter(|(_, at)| *at == address)
        .map(|(inode, _)| inode)
        .collect())
}

/// The process, if its network is not ours and can be entered. `None`: it is ours.
fn other_network(dir: &OwnedFd, process: ProcessId) -> Result<Option<ProcessId>, Fault> {
    let network = Network::of(dir).map_err(Fault::Entering)?;
    if network.is_ours() {
        return Ok(None);
    }
    // Only an attempt shows whether it may be entered.
    network.make(|| Ok(())).map(|()| Some(process))
}

/// Most sockets of one server that are tried.
const TRIED_MAX: usize = 3;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Says {
    /// No server: the process listens on nothing, or something else answers.
    NoServer,
    /// Neither that a server exists nor that none does.
    Nothing,
    /// The server exists and denies access.
    NotAllowed,
    NotNow,
}

#[derive(Debug)]
pub(super) struct Unanswered {
    pub(super) says: Says,
    pub(super) error: PlatformError,
}

impl Unanswered {
    /// `Busy` errors always mean [`Says::NotNow`].
    pub(super) fn new(says: Says, error: PlatformError) -> Self {
        let is_busy = matches!(error, PlatformError::Busy { .. });
        Self {
            says: if is_busy { Says::NotNow } else { says },
            error,
        }
    }

    /// Of the errors of several sockets, the highest rank is reported.
    fn rank(&self) -> Says {
        self.says.max(Says::Nothing)
    }
}

impl From<PlatformError> for Unanswered {
    fn from(error: PlatformError) -> Self {
        Self::new(Says::Nothing, error)
    }
}

/// Chooses which of two sockets' errors to report, the first if equal. Only both together mean that there is no server.
fn more_telling(one: Unanswered, other: Unanswered) -> Unanswered {
    if other.rank() > one.rank() {
        return other;
    }
    Unanswered {
        says: one.says.max(other.says),
        ..one
    }
}

/// Asks on the sockets of a process until one answers. `refusal` makes the error of this kind of server from the
/// request and the reason. `unix_socket` says how to give the server a Unix socket.
///
/// # Errors
/// If several fail, the most informative error. So an unrelated port or a disabled address family does not hide that
/// the server wants a password.
pub(super) fn first_that_answers<T>(
    root: &Root,
    process: ProcessId,
    refusal: fn(&str, &str) -> PlatformError,
    unix_socket: &str,
    mut ask: impl FnMut(Endpoint) -> Result<T, Unanswered>,
) -> Result<T, Unanswered> {
    let what = format!("process {process}");
    if !root.is_live() {
        return Err(refusal(&what, "this is a captured tree, not the running machine").into());
    }
    let (got, _) = opener::ask(&Ask::Listeners {
        root: root.as_path().to_owned(),
        process,
    })?;
    let Got::Listeners(found) = got else {
        return Err(refusal(&what, "the helper process has answered something else").into());
    };
    let mut failed: Option<Unanswered> = None;
    for endpoint in found.endpoints {
        match ask(endpoint) {
            Ok(answer) => return Ok(answer),
            Err(e) => {
                failed = Some(match failed {
                    Some(before) => more_telling(before, e),
                    None => e,
                });
            }
        }
    }
    if let Some(failed) = failed {
        return Err(failed);
    }
    let none = match found.out_of_reach {
        Some(why) => refusal(
            &what,
            &format!(
                "its socket is in another network namespace, and {why}; give the server a Unix socket ({unix_socket})"
            ),
        ),
        None if found.more => refusal(
            &what,
            &format!(
                "it listens on no stream socket among its first {ENTRIES_MAX} descriptors, and no more are looked at; open one \
                 for the local host when it starts"
            ),
        ),
        None => refusal(
            &what,
            "it listens on no stream socket; open one for the local host",
        ),
    };
    Err(Unanswered::new(Says::NoServer, none))
}

/// Socket inodes among a process's lowest descriptors, where listeners usually are. The flag: there are more.
pub(super) fn socket_inodes(process: &OwnedFd) -> Result<(BTreeSet<u64>, bool), Errno> {
    let (fds, more) = numbers_in(process, "fd", ENTRIES_MAX)?;
    let list = rustix::fs::openat(
        process,
        "fd",
        OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC,
        Mode::empty(),
    )?;
    let mut inodes = BTreeSet::new();
    let mut buffer = Vec::with_capacity(64);
    for fd in fds {
        buffer.clear();
        let link = match rustix::fs::readlinkat(&list, fd.to_string(), std::mem::take(&mut buffer)) {
            Ok(link) => link,
            Err(e) if is_shortage(e) => return Err(e),
            // A descriptor may be closed meanwhile.
            Err(_) => continue,
        };
        if let Some(inode) = link.to_str().ok().and_then(socket_inode) {
            inodes.insert(inode);
        }
        buffer = link.into_bytes();
    }
    Ok((inodes, more))
}

fn socket_inode(link: &str) -> Option<u64> {
    link.strip_prefix("socket:[")?.strip_suffix(']')?.parse().ok()
}

/// A network table of a process. Empty if the kernel has none (no IPv6) or hides it.
fn table(process: &OwnedFd, name: &str) -> Result<Vec<u8>, Errno> {
    let file = match rustix::fs::openat(process, name, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()) {
        Ok(file) => file,
        Err(e) if is_shortage(e) => return Err(e),
        Err(_) => return Ok(Vec::new()),
    };
    let mut text = vec![0; 16 * 1024];
    let mut used = 0;
    loop {
        match read_full(&file, &mut text[used..]) {
            Ok(n @ 1..) => used += n,
            Err(e) if is_shortage(e) => return Err(e),
            Ok(0) | Err(_) => break,
        }
        if used == text.len() && used < TABLE_MAX {
            text.resize(used * 2, 0);
        }
    }
    text.truncate(used);
    Ok(text)
}

/// Lines `Num: RefCount Protocol Flags Type St Inode Path`. Flag bit 16: listening (`__SO_ACCEPTCON`,
/// include/linux/net.h). Type 1: stream.
pub(super) fn unix_listeners(text: &str, inodes: &BTreeSet<u64>, process: ProcessId) -> Vec<Address> {
    let mut found: BTreeMap<u64, Address> = BTreeMap::new();
    for line in text.lines().skip(1) {
        let mut rest = line;
        let mut field = || {
            let (field, tail) = rest
                .trim_start()
                .split_once(' ')
                .unwrap_or((rest.trim_start(), ""));
            rest = tail;
            field
        };
        let (_number, _references, _protocol) = (field(), field(), field());
        let (flags, kind, _state, inode) = (field(), field(), field(), field());
        // The rest, blanks included, is the path.
        let path = rest;
        let (Ok(flags), Ok(inode)) = (u32::from_str_radix(flags, 16), inode.parse::<u64>()) else {
            continue;
        };
        if flags & 0x1_0000 == 0 || kind != "0001" || !inodes.contains(&inode) {
            continue;
        }
        if let Some(name) = path.strip_prefix('@') {
            found.insert(inode, Address::Abstract(name.as_bytes().to_vec()));
        } else if path.starts_with('/') {
            found.insert(
                inode,
                Address::Path {
                    process,
                    path: path.to_owned(),
                },
            );
        }
    }
    found.into_values().collect()
}

/// Inodes and addresses from lines `sl local remote st … inode …`, with the address in hexadecimal words of the
/// machine's byte order. State 0A: listening (include/net/tcp_states.h).
pub(super) fn tcp_listeners(text: &str, inodes: &BTreeSet<u64>) -> Vec<(u64, SocketAddr)> {
    let mut found = Vec::new();
    for line in text.lines().skip(1) {
        let fields: Vec<&str> = line.split_ascii_whitespace().collect();
        let (Some(local), Some(&state), Some(inode)) = (fields.get(1), fields.get(3), fields.get(9)) else {
            continue;
        };
        let Some(inode) = inode.parse::<u64>().ok().filter(|i| inodes.contains(i)) else {
            continue;
        };
        if state == "0A" {
            if let Some(address) = parse_address(local) {
                found.push((inode, address));
            }
        }
    }
    found
}

fn parse_address(text: &str) -> Option<SocketAddr> {
    let (ip, port) = text.split_once(':')?;
    let port = u16::from_str_radix(port, 16).ok()?;
    let word = |at: usize| {
        u32::from_str_radix(ip.get(at * 8..at * 8 + 8)?, 16)
            .ok()
            .map(u32::to_ne_bytes)
    };
    let ip = match ip.len() {
        8 => IpAddr::from(word(0)?),
        32 => {
            let mut bytes = [0u8; 16];
            for i in 0..4 {
                bytes[i * 4..i * 4 + 4].copy_from_slice(&word(i)?);
            }
            IpAddr::from(bytes)
        }
        _ => return None,
    };
    // A socket bound to all addresses is reachable by loopback, too.
    let ip = match ip {
        IpAddr::V4(a) if a.is_unspecified() => IpAddr::V4(Ipv4Addr::LOCALHOST),
        IpAddr::V6(a) if a.is_unspecified() => IpAddr::V6(Ipv6Addr::LOCALHOST),
        other => other,
    };
    Some(SocketAddr::new(ip, port))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tcp_tables() {
        let text = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n   \
                    0: 0100007F:18EB 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 77 1 x\n   \
                    1: 00000000:18EC 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 78 1 x\n   \
                    2: 0100007F:18EB 0100007F:AAAA 01 00000000:00000000 00:00000000 00000000     0        0 77 1 x\n\
                    garbage\n";
        let all = BTreeSet::from([77, 78]);
        let found = tcp_listeners(text, &all);
        assert_eq!(
            found,
            [
                (77, "127.0.0.1:6379".parse().unwrap()),
                (78, "127.0.0.1:6380".parse().unwrap())
            ]
        );
        assert!(tcp_listeners(text, &BTreeSet::from([79])).is_empty());
        assert_eq!(
            parse_address("00000000000000000000000001000000:0050"),
            Some("[::1]:80".parse().unwrap())
        );
        assert_eq!(
            parse_address("00000000000000000000000000000000:0050"),
            Some("[::1]:80".parse().unwrap())
        );
        assert_eq!(parse_address("0100007F"), None);
        assert_eq!(parse_address("01:50"), None);
    }

    #[test]
    fn unix_tables() {
        let text = "Num       RefCount Protocol Flags    Type St Inode Path\n\
                    0000000000000000: 00000002 00000000 00010000 0001 01 500 /run/my redis/r.sock\n\
                    0000000000000000: 00000002 00000000 00010000 0001 01   501 @abstract\n\
                    0000000000000000: 00000003 00000000 00000000 0001 03 502 /run/x\n\
                    0000000000000000: 00000002 00000000 00010000 0005 01 503 /run/seqpacket\n\
                    0000000000000000: 00000003 00000000 00000000 0001 03 504\n";
        let all = (500..=504).collect();
        let process = ProcessId {
            pid: 9,
            start_ticks: 1,
        };
        assert_eq!(
            unix_listeners(text, &all, process),
            [
                Address::Path {
                    process,
                    path: "/run/my redis/r.sock".into()
                },
                Address::Abstract(b"abstract".to_vec())
            ]
        );
    }

    #[test]
    fn of_several_errors_the_most_telling_one_is_told() {
        let unsupported = |why: &str| PlatformError::Unsupported {
            what: "asking it".to_owned(),
            why: why.to_owned(),
        };
        let busy = || PlatformError::Busy {
            what: "asking it".to_owned(),
            why: "late".to_owned(),
        };
        let stranger = || Unanswered::new(Says::NoServer, unsupported("a stranger"));
        let nobody = || Unanswered::from(unsupported("nobody"));
        let password = || Unanswered::new(Says::NotAllowed, unsupported("a password"));
        let late = || Unanswered::from(busy());
        let told = |one: Unanswered, other: Unanswered| {
            let told = more_telling(one, other);
            (told.says, told.error)
        };
        assert_eq!(
            told(password(), nobody()),
            (Says::NotAllowed, unsupported("a password"))
        );
        assert_eq!(
            told(stranger(), password()),
            (Says::NotAllowed, unsupported("a password"))
        );
        assert_eq!(told(password(), late()), (Says::NotNow, busy()));
        assert_eq!(told(late(), password()), (Says::NotNow, busy()));
        // The first one, and yet there may be a server.
        assert_eq!(
            told(stranger(), nobody()),
            (Says::Nothing, unsupported("a stranger"))
        );
        assert_eq!(told(nobody(), stranger()), (Says::Nothing, unsupported("nobody")));
        assert_eq!(told(stranger(), stranger()).0, Says::NoServer);
    }

    #[test]
    fn own_listeners_are_found() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let _unix = std::os::unix::net::UnixListener::bind(&path).unwrap();
        let tcp = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let own = crate::testing::own().processes[0];
        let root = Root::default();
        let found = of_process(&root, own).unwrap();
        for address in [
            Address::Tcp(tcp.local_addr().unwrap()),
            Address::Path {
                process: own,
                path: path.to_str().unwrap().to_owned(),
            },
        ] {
            let endpoint = Endpoint::here(address);
            assert!(found.endpoints.contains(&endpoint), "{endpoint}");
        }
        assert_eq!(found.out_of_reach, None);
        let address = tcp.local_addr().unwrap();
        let listening = sockets_at(&root, own, None, address).unwrap();
        assert_eq!(listening.len(), 1);
        assert_eq!(sockets_at(&root, own, None, address), Ok(listening));
        drop(tcp);
        assert_eq!(sockets_at(&root, own, None, address), Ok(BTreeSet::new()));
    }
}
