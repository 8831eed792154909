//! Traffic of the workload's TCP connections, from the kernel's socket diagnostics (netlink `sock_diag`, `struct
//! tcp_info`). It counts bytes acknowledged and received, and data segments received: about one per request of a
//! request-response protocol. Unix sockets have no such counters.
//!
//! Traffic between the last reading and a connection's close is missed, so the meter fits long connections. The kernel
//! answers per network namespace, so each namespace of the workload's processes is asked. Ours is asked too, because a
//! service manager may have made a process's socket there.

use crate::common::{Cumulative, ENTRIES_MAX, PROCESSES_MAX, not_mine, refused, usable};
use crate::listeners::socket_inodes;
use crate::network::{Fault, Identity, Network};
use crate::{Meter, MeterKind};
use homeostat_kernel::Root;
use homeostat_kernel::process::{fault, is_shortage, lives, open_process};
use homeostat_model::{MeterCandidate, MeterClass, MeterId, ProcessId, Workload};
use homeostat_platform::PlatformError;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, netlink};
use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::OwnedFd;

/// Most connections read at once, over all networks (about 1 µs each).
const CONNECTIONS_MAX: usize = 20_000;
/// Most networks of one workload.
const NETWORKS_MAX: usize = 4;
/// Most messages of one answer, a limit independent of the kernel.
const MESSAGES_MAX: usize = 10_000;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Count {
    Bytes,
    Segments,
}
const ALL: [(Count, &str, &str); 2] = [
    (Count::Bytes, "sockets.bytes", "byte sent or received"),
    (
        Count::Segments,
        "sockets.segments",
        "TCP segment received with data",
    ),
];

/// The meter kind.
pub struct Sockets;

impl MeterKind for Sockets {
    fn find(&mut self, root: &Root, workload: &Workload) -> Vec<MeterCandidate> {
        let tried = Inquiry::new(root)
            .connections(workload, unsupported)
            .and_then(|found| {
                if found.connections.is_empty() {
                    // It may have one later.
                    return Err(busy(
                        "the workload has no TCP connection (Unix sockets have no counters); use a counter of its own",
                    ));
                }
                Ok(())
            })
            .map_err(|e| e.to_string());
        ALL.iter()
            .map(|&(_, id, unit)| match &tried {
                Ok(()) => usable(id, MeterClass::Kernel, unit),
                Err(why) => refused(id, MeterClass::Kernel, unit, why.clone()),
            })
            .collect()
    }

    fn open(
        &mut self,
        root: &Root,
        workload: &Workload,
        id: &MeterId,
    ) -> Result<Box<dyn Meter>, PlatformError> {
        let (count, ..) = *ALL
            .iter()
            .find(|(_, name, _)| *name == id.as_str())
            .ok_or_else(|| not_mine(id))?;
        let mut meter = SocketMeter {
            count,
            inquiry: Inquiry::new(root),
            first: true,
            sum: Cumulative::new(),
        };
        meter.count(workload, unsupported)?;
        Ok(Box::new(meter))
    }
}

const COUNTING: &str = "counting the traffic of sockets";

fn unsupported(why: &str) -> PlatformError {
    PlatformError::Unsupported {
        what: COUNTING.to_owned(),
        why: why.to_owned(),
    }
}

fn busy(why: &str) -> PlatformError {
    PlatformError::Busy {
        what: COUNTING.to_owned(),
        why: why.to_owned(),
    }
}

/// Error for too many connections: a new meter is refused, and an open one waits for fewer.
type TooMany = fn(&str) -> PlatformError;

struct SocketsOf {
    inodes: BTreeSet<u64>,
    networks: BTreeMap<Identity, There>,
}

struct There {
    /// Directory in `/proc` of one of them.
    directory: OwnedFd,
    /// Processes of the workload with sockets.
    processes: BTreeSet<ProcessId>,
}

fn workload_sockets(root: &Root, workload: &Workload, too_many: TooMany) -> Result<SocketsOf, PlatformError> {
    if !root.is_live() {
        return Err(unsupported("this is a captured tree, not the running machine"));
    }
    let mut inodes = BTreeSet::new();
    let mut networks: BTreeMap<Identity, There> = BTreeMap::new();
    let mut seen = false;
    for process in workload.processes.iter().take(PROCESSES_MAX) {
        let dir = match open_process(root, *process) {
            Ok(dir) => dir,
            Err(PlatformError::Vanished { .. }) => continue,
            Err(e) => return Err(e),
        };
        let found = Identity::of(&dir).and_then(|network| Ok((network, socket_inodes(&dir)?)));
        match found {
            Ok((_, (_, true))) => {
                return Err(too_many(&format!(
                    "process {process} has more than {ENTRIES_MAX} descriptors, too many to look through for each reading; \
                     use a counter of its own"
                )));
            }
            Ok((network, (sockets, false))) => {
                seen = true;
                if sockets.is_empty() {
                    continue;
                }
                inodes.extend(sockets);
                let there = networks.entry(network).or_insert_with(|| There {
                    directory: dir,
                    processes: BTreeSet::new(),
                });
                there.processes.insert(*process);
                if networks.len() > NETWORKS_MAX {
                    return Err(too_many(&format!(
                        "the workload is in more than {NETWORKS_MAX} network namespaces; use a counter of its own"
                    )));
                }
            }
            Err(Errno::NOENT | Errno::SRCH) => {}
            // The kernel returns this also for a process that ends meanwhile.
            Err(Errno::ACCESS) if !lives(root, *process) => {}
            Err(e) => {
                return Err(fault(
                    e,
                    &format!("process {process}"),
                    &format!("the sockets of process {process}"),
                ));
            }
        }
    }
    if !seen {
        return Err(PlatformError::Vanished {
            target: workload.id.to_string(),
        });
    }
    let failed = |e| fault(e, "homeostat", "our own network namespace");
    let ours = Identity::ours().map_err(failed)?;
    if networks.keys().any(|network| *network != ours) {
        if let Entry::Vacant(place) = networks.entry(ours) {
            // A socket made in our network and handed over (socket activation) stays there, with its connections.
            let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
            place.insert(There {
                directory: rustix::fs::open("/proc/self", flags, Mode::empty()).map_err(failed)?,
                processes: BTreeSet::new(),
            });
        }
    }
    Ok(SocketsOf { inodes, networks })
}

struct Found {
    /// Its sockets of any kind.
    inodes: BTreeSet<u64>,
    connections: Vec<Connection>,
}

struct Inquiry {
    root: Root,
    open: BTreeMap<Identity, Diagnostics>,
    /// The processes in these networks at the last query.
    processes: BTreeMap<Identity, BTreeSet<ProcessId>>,
}

impl Inquiry {
    fn new(root: &Root) -> Self {
        Self {
            root: root.clone(),
            open: BTreeMap::new(),
            processes: BTreeMap::new(),
        }
    }

    fn connections(&mut self, workload: &Workload, too_many: TooMany) -> Result<Found, PlatformError> {
        let sockets = workload_sockets(&self.root, workload, too_many)?;
        self.open
            .retain(|network, _| sockets.networks.contains_key(network));
        self.processes = sockets
            .networks
            .iter()
            .map(|(network, there)| (*network, there.processes.clone()))
            .collect();
        let mut connections = Vec::new();
        let mut looked = 0;
        for (network, there) in &sockets.networks {
            let diagnostics = match self.open.entry(*network) {
                Entry::Occupied(open) => open.into_mut(),
                Entry::Vacant(place) => place.insert(Diagnostics::open(&enter(*network, &there.directory)?)?),
            };
            match diagnostics.connections(&sockets.inodes, &mut looked, too_many) {
                Ok(found) => connections.extend(found),
                Err(e) => {
                    // The rest of the answer would be taken for the next one.
                    self.open.remove(network);
                    return Err(e);
                }
            }
        }
        Ok(Found {
            inodes: sockets.inodes,
            connections,
        })
    }

    /// Closes networks without a process of the workload that was seen there. Ours stays anyhow.
    fn forget_ended(&mut self, workload: &Workload) {
        let left: BTreeSet<ProcessId> = workload.processes.iter().copied().collect();
        let ours = Identity::ours().ok();
        let processes = &self.processes;
        self.open.retain(|network, _| {
            Some(*network) == ours
                || processes
                    .get(network)
                    .is_some_and(|were| !were.is_disjoint(&left))
        });
    }
}

/// Enters the network in which the process was just seen.
fn enter(seen: Identity, process: &OwnedFd) -> Result<Network, PlatformError> {
    match Network::of(process) {
        Ok(network) if network.identity() == seen => Ok(network),
        Ok(_) | Err(Errno::NOENT | Errno::SRCH | Errno::ACCESS) => Err(busy(
            "a process has just ended, or gone to another network namespace",
        )),
        Err(e) => Err(fault(e, "a process of the workload", "its network namespace")),
    }
}

struct SocketMeter {
    count: Count,
    inquiry: Inquiry,
    first: bool,
    /// By inode: the kernel reuses a number only long after.
    sum: Cumulative<u64>,
}

impl SocketMeter {
    fn count(&mut self, workload: &Workload, too_many: TooMany) -> Result<f64, PlatformError> {
        let found = self.inquiry.connections(workload, too_many)?;
        Ok(self.add(found))
    }

    fn add(&mut self, mut found: Found) -> f64 {
        for c in &found.connections {
            let value = match self.count {
                Count::Bytes => c.bytes,
                Count::Segments => c.segments,
            };
            // A connection made after the opening of the meter counts in full.
            self.sum.set(&c.inode, value as f64, !self.first);
        }
        // The kernel's table changes during the walk, so a live connection may be missing. While its socket exists,
        // keep it: otherwise it would count in full again.
        found.inodes.extend(found.connections.iter().map(|c| c.inode));
        self.sum.retain(|inode| found.inodes.contains(inode));
        self.first = false;
        self.sum.total()
    }
}

impl Meter for SocketMeter {
    fn read(&mut self, workload: &Workload) -> Result<f64, PlatformError> {
        self.count(workload, busy)
    }

    fn forget_ended(&mut self, workload: &Workload) {
        self.inquiry.forget_ended(workload);
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Connection {
    inode: u64,
    bytes: u64,
    segments: u64,
}

struct Diagnostics(OwnedFd);

const SOCK_DIAG_BY_FAMILY: u16 = 20;
const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;
const NLM_F_REQUEST_DUMP: u16 = 0x301;
const IPPROTO_TCP: u8 = 6;
const INET_DIAG_INFO: u16 = 2;
/// All states in which data flows or may still be counted: established, and closing in either direction.
const STATES: u32 = 1 << 1 | 1 << 4 | 1 << 5 | 1 << 8 | 1 << 9;
/// Offsets in `struct tcp_info` (include/uapi/linux/tcp.h).
const BYTES_ACKED: usize = 120;
const BYTES_RECEIVED: usize = 128;
const DATA_SEGMENTS_IN: usize = 152;
const MESSAGE_HEADER: usize = 16;
/// Size of `struct inet_diag_msg`, and offset of the inode in it (include/uapi/linux/inet_diag.h).
const DIAGNOSTIC_SIZE: usize = 72;
const DIAGNOSTIC_INODE: usize = 68;

impl Diagnostics {
    fn open(network: &Network) -> Result<Self, PlatformError> {
        let socket = || {
            rustix::net::socket_with(
                AddressFamily::NETLINK,
                SocketType::DGRAM,
                SocketFlags::CLOEXEC,
                Some(netlink::SOCK_DIAG),
            )
        };
        let fd = network.make(socket).map_err(|e| {
            e.passing("a process of the workload", COUNTING)
                .unwrap_or_else(|| match &e {
                    Fault::Making(e) => unsupported(&format!(
                        "the kernel has no socket diagnostics ({e}); it needs CONFIG_INET_DIAG"
                    )),
                    Fault::Entering(_) | Fault::Thread(_) => unsupported(&format!(
                        "the workload has a network namespace of its own, and {e}; use a counter of its own"
                    )),
                })
        })?;
        // The kernel answers at once. The limit is a precaution.
        rustix::net::sockopt::set_socket_timeout(
            &fd,
            rustix::net::sockopt::Timeout::Recv,
            Some(std::time::Duration::from_millis(200)),
        )
        .map_err(|e| unsupported(&e.to_string()))?;
        Ok(Self(fd))
    }

    /// The TCP connections among these inodes. `looked`: total of connections read, before and after.
    fn connections(
        &self,
        inodes: &BTreeSet<u64>,
        looked: &mut usize,
        too_many: TooMany,
    ) -> Result<Vec<Connection>, PlatformError> {
        let mut found = Vec::new();
        for family in [AddressFamily::INET, AddressFamily::INET6] {
            self.dump(family.as_raw() as u8, |c| {
                *looked += 1;
                if inodes.contains(&c.inode) {
                    found.push(c);
                }
                *looked <= CONNECTIONS_MAX
            })
            .map_err(|e| match e {
                e if is_shortage(e) => PlatformError::Busy {
                    what: "listing the connections of a network".to_owned(),
                    why: e.to_string(),
                },
                Errno::TOOBIG => too_many(&format!(
                    "where it is there are more than {CONNECTIONS_MAX} connections, too many to list for each reading; use a \
                     counter of its own"
                )),
                e => unsupported(&format!("the kernel says {e}; it needs CONFIG_INET_DIAG")),
            })?;
        }
        Ok(found)
    }

    fn dump(&self, family: u8, mut each: impl FnMut(Connection) -> bool) -> Result<(), Errno> {
        let mut request = Vec::with_capacity(72);
        request.extend_from_slice(&72u32.to_ne_bytes());
        request.extend_from_slice(&SOCK_DIAG_BY_FAMILY.to_ne_bytes());
        request.extend_from_slice(&NLM_F_REQUEST_DUMP.to_ne_bytes());
        request.extend_from_slice(&[0; 8]);
        request.extend_from_slice(&[family, IPPROTO_TCP, 1 << (INET_DIAG_INFO - 1), 0]);
        request.extend_from_slice(&STATES.to_ne_bytes());
        // The socket to find: any.
        request.resize(72, 0);
        rustix::net::sendto(
            &self.0,
            &request,
            SendFlags::empty(),
            &SocketAddrNetlink::new(0, 0),
        )?;
        let mut buffer = vec![0u8; 32 * 1024];
        let mut too_many = false;
        for _ in 0..MESSAGES_MAX {
            let (n, _) = rustix::net::recv(&self.0, buffer.as_mut_slice(), RecvFlags::empty())?;
            match messages(&buffer[..n], &mut |c| too_many |= !each(c)) {
                // Read the answer to its end even then, because the rest would be taken for the next answer.
                Ok(true) => return if too_many { Err(Errno::TOOBIG) } else { Ok(()) },
                Ok(false) => {}
                Err(e) => return Err(e),
            }
        }
        Err(Errno::TOOBIG)
    }
}

/// Reads the messages of one datagram. True: end of the answer.
pub(super) fn messages(mut data: &[u8], each: &mut impl FnMut(Connection)) -> Result<bool, Errno> {
    while data.len() >= MESSAGE_HEADER {
        let length = u32_at(data, 0).unwrap_or(0) as usize;
        let kind = u16_at(data, 4).unwrap_or(0);
        let Some(body) = data.get(MESSAGE_HEADER..length) else {
            return Err(Errno::BADMSG);
        };
        match kind {
            NLMSG_DONE => return Ok(true),
            NLMSG_ERROR => {
                let code = u32_at(body, 0).map_or(0, |c| (c as i32).wrapping_neg());
                // The kernel's error numbers end at 4095. The fuzzer found larger ones.
                return Err(if (1..4096).contains(&code) {
                    Errno::from_raw_os_error(code)
                } else {
                    Errno::BADMSG
                });
            }
            _ => {
                if let Some(c) = connection(body) {
                    each(c);
                }
            }
        }
        data = data.get(length.next_multiple_of(4)..).unwrap_or_default();
    }
    Ok(false)
}

fn connection(body: &[u8]) -> Option<Connection> {
    let inode = u64::from(u32_at(body, DIAGNOSTIC_INODE)?);
    let mut attributes = body.get(DIAGNOSTIC_SIZE..)?;
    while attributes.len() >= 4 {
        let length = usize::from(u16_at(attributes, 0)?);
        let value = attributes.get(4..length)?;
        if u16_at(attributes, 2)? == INET_DIAG_INFO {
            return Some(Connection {
                inode,
                bytes: u64_at(value, BYTES_ACKED)?.saturating_add(u64_at(value, BYTES_RECEIVED)?),
                segments: u64::from(u32_at(value, DATA_SEGMENTS_IN)?),
            });
        }
        attributes = attributes.get(length.next_multiple_of(4)..).unwrap_or_default();
    }
    None
}

fn u16_at(b: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_ne_bytes(b.get(at..at + 2)?.try_into().ok()?))
}
fn u32_at(b: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(b.get(at..at + 4)?.try_into().ok()?))
}
fn u64_at(b: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_ne_bytes(b.get(at..at + 8)?.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};

    #[test]
    fn bytes_of_a_connection_of_ours_are_counted_exactly() {
        let own = crate::testing::own();
        let root = Root::default();
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let mut client = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut server, _) = listener.accept().unwrap();
        let inode = |fd: &dyn std::os::fd::AsRawFd| {
            std::fs::metadata(format!("/proc/self/fd/{}", fd.as_raw_fd()))
                .unwrap()
                .ino()
        };
        use std::os::unix::fs::MetadataExt;
        let wanted = BTreeSet::from([inode(&client)]);
        let directory = open_process(&root, own.processes[0]).unwrap();
        let diagnostics = Diagnostics::open(&Network::of(&directory).unwrap()).unwrap();
        let ask = || diagnostics.connections(&wanted, &mut 0, unsupported).unwrap();
        let before = ask();
        let mut buffer = [0u8; 1000];
        for _ in 0..7 {
            client.write_all(&[1; 1000]).unwrap();
            server.read_exact(&mut buffer).unwrap();
            server.write_all(&[2; 10]).unwrap();
            client.read_exact(&mut buffer[..10]).unwrap();
        }
        // The last answer acknowledged everything the client had sent.
        let after = ask();
        assert_eq!(before.len(), 1);
        assert_eq!(after[0].bytes - before[0].bytes, 7 * 1010);
        assert_eq!(after[0].segments - before[0].segments, 7);
        assert!(Sockets.find(&root, &own).iter().all(|c| c.refused.is_none()));
        let mut meter = Sockets
            .open(&root, &own, &MeterId::from("sockets.bytes"))
            .unwrap();
        let first = meter.read(&own).unwrap();
        drop((client, server));
        let mut again = meter.read(&own).unwrap();
        assert!(again >= first, "a closed connection stays in the sum");
        again = meter.read(&own).unwrap();
        assert!(again >= first);
    }

    #[test]
    fn a_connection_that_a_list_leaves_out_is_not_counted_twice() {
        let mut meter = SocketMeter {
            count: Count::Bytes,
            inquiry: Inquiry::new(&Root::default()),
            first: true,
            sum: Cumulative::new(),
        };
        let mut add = |inodes: &[u64], connections: &[(u64, u64)]| {
            meter.add(Found {
                inodes: inodes.iter().copied().collect(),
                connections: connections
                    .iter()
                    .map(|&(inode, bytes)| Connection {
                        inode,
                        bytes,
                        segments: 0,
                    })
                    .collect(),
            })
        };
        assert_eq!(add(&[7], &[(7, 100)]), 0.0);
        assert_eq!(
            add(&[7, 8], &[(7, 150), (8, 1000)]),
            1050.0,
            "who comes counts whole"
        );
        assert_eq!(add(&[7, 8], &[(7, 160)]), 1060.0);
        assert_eq!(add(&[7, 8], &[(7, 160), (8, 1010)]), 1070.0);
        // What has ended stays in the sum.
        assert_eq!(add(&[7], &[(7, 160)]), 1070.0);
    }

    #[test]
    fn more_connections_than_are_looked_at_are_too_many_for_all_networks_together() {
        let own = crate::testing::own();
        let root = Root::default();
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let _client = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let directory = open_process(&root, own.processes[0]).unwrap();
        let diagnostics = Diagnostics::open(&Network::of(&directory).unwrap()).unwrap();
        let mut looked = CONNECTIONS_MAX;
        let refused = diagnostics
            .connections(&BTreeSet::new(), &mut looked, unsupported)
            .unwrap_err();
        assert!(matches!(refused, PlatformError::Unsupported { .. }), "{refused}");
        let later = diagnostics
            .connections(&BTreeSet::new(), &mut looked, busy)
            .unwrap_err();
        assert!(matches!(later, PlatformError::Busy { .. }), "{later}");
    }

    #[test]
    fn broken_answers_are_errors_or_nothing() {
        let mut message = vec![0u8; MESSAGE_HEADER + DIAGNOSTIC_SIZE + 4];
        let length = message.len() as u32;
        message[..4].copy_from_slice(&length.to_ne_bytes());
        message[4..6].copy_from_slice(&SOCK_DIAG_BY_FAMILY.to_ne_bytes());
        for at in 0..message.len() {
            for value in [0u8, 1, 3, 0x7f, 0xff] {
                let mut m = message.clone();
                m[at] = value;
                let mut count = 0;
                let _ = messages(&m, &mut |_| count += 1);
                assert_eq!(count, 0);
            }
        }
        assert_eq!(messages(&message[..20], &mut |_| {}), Err(Errno::BADMSG));
        // An error: its number, negative. One that no error has (found by fuzzing) is a broken answer.
        for (number, expected) in [
            (-1, Errno::PERM),
            (-4096, Errno::BADMSG),
            (i32::MIN, Errno::BADMSG),
            (5, Errno::BADMSG),
        ] {
            let mut error = [0u8; MESSAGE_HEADER + 4];
            error[0] = error.len() as u8;
            error[4..6].copy_from_slice(&NLMSG_ERROR.to_ne_bytes());
            error[MESSAGE_HEADER..].copy_from_slice(&i32::to_ne_bytes(number));
            assert_eq!(messages(&error, &mut |_| {}), Err(expected), "{number}");
        }
    }
}
