//! memcached: the `cmd_*` and result counters of its `stats` command, over a connection that stays open.

use super::common::{Cumulative, is_program, not_mine, refused, usable};
use super::connection::{Connection, Deadline, Endpoint};
use super::{Meter, MeterKind, listeners};
use crate::Root;
use homeostat_model::{MeterCandidate, MeterClass, MeterId, ProcessId, Workload};
use homeostat_platform::PlatformError;
use rustix::io::Errno;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

const ID: &str = "memcached";
const UNIT: &str = "operation";
const WAIT: Duration = Duration::from_millis(200);
const SERVERS_MAX: usize = 16;
/// Most lines of an answer; `stats` has about 90.
const LINES_MAX: usize = 1000;
/// Each operation is counted in exactly one of these (memcached doc/protocol.txt); `cas` is counted as a set.
const COUNTERS: [&str; 9] = [
    "cmd_get",
    "cmd_set",
    "cmd_touch",
    "delete_hits",
    "delete_misses",
    "incr_hits",
    "incr_misses",
    "decr_hits",
    "decr_misses",
];

/// The kind.
pub(super) struct Memcached;

impl MeterKind for Memcached {
    fn find(&mut self, root: &Root, workload: &Workload) -> Vec<MeterCandidate> {
        if !is_program(workload, &["memcached"]) {
            return vec![];
        }
        match MemcachedMeter::open(root, workload) {
            Ok(_) => vec![usable(ID, MeterClass::Application, UNIT)],
            Err(e) => vec![refused(ID, MeterClass::Application, UNIT, e.to_string())],
        }
    }

    fn open(
        &mut self,
        root: &Root,
        workload: &Workload,
        id: &MeterId,
    ) -> Result<Box<dyn Meter>, PlatformError> {
        if id.as_str() != ID {
            return Err(not_mine(id));
        }
        Ok(Box::new(MemcachedMeter::open(root, workload)?))
    }
}

struct Server {
    endpoint: Endpoint,
    connection: Option<Connection>,
}

struct MemcachedMeter {
    root: Root,
    servers: BTreeMap<ProcessId, Server>,
    sum: Cumulative<ProcessId>,
}

impl MemcachedMeter {
    fn open(root: &Root, workload: &Workload) -> Result<Self, PlatformError> {
        let mut meter = Self {
            root: root.clone(),
            servers: BTreeMap::new(),
            sum: Cumulative::new(),
        };
        meter.read(workload)?;
        Ok(meter)
    }

    fn find(&self, process: ProcessId) -> Result<(Server, u64), PlatformError> {
        listeners::first_that_answers(&self.root, process, refusal, "option -s", |endpoint| {
            let mut server = Server {
                endpoint,
                connection: None,
            };
            let count = ask(&mut server)?;
            Ok((server, count))
        })
    }
}

impl Meter for MemcachedMeter {
    fn read(&mut self, workload: &Workload) -> Result<f64, PlatformError> {
        let processes: BTreeSet<ProcessId> = workload.processes.iter().take(SERVERS_MAX).copied().collect();
        self.servers.retain(|p, _| processes.contains(p));
        self.sum.retain(|p| processes.contains(p));
        let mut why = None;
        for process in &processes {
            let count = match self.servers.get_mut(process) {
                Some(server) => ask(server),
                None => self.find(*process).map(|(server, count)| {
                    self.servers.insert(*process, server);
                    count
                }),
            };
            match count {
                Ok(count) => self.sum.set(process, count as f64, false),
                Err(e @ PlatformError::Busy { .. }) => return Err(e),
                Err(e) => {
                    self.servers.remove(process);
                    why = Some(e);
                }
            }
        }
        if self.servers.is_empty() {
            return Err(why.unwrap_or_else(|| PlatformError::Vanished {
                target: workload.id.to_string(),
            }));
        }
        Ok(self.sum.total())
    }
}

/// Asks; reconnects once when the connection was lost.
fn ask(server: &mut Server) -> Result<u64, PlatformError> {
    let had = server.connection.is_some();
    match ask_once(server) {
        Err(Errno::CONNRESET | Errno::PIPE) if had => ask_once(server),
        other => other,
    }
    .map_err(|e| {
        let what = format!("the server at {}", server.endpoint);
        match e {
            Errno::TIMEDOUT | Errno::AGAIN => PlatformError::Busy {
                what: format!("asking {what}"),
                why: format!("no answer within {} ms", WAIT.as_millis()),
            },
            Errno::CONNREFUSED | Errno::NOENT => PlatformError::Vanished { target: what },
            _ => refusal(
                &what,
                "it does not answer `stats` in text (TLS, SASL or binary protocol only?); open a plain Unix socket \
                 (option -s)",
            ),
        }
    })
}

fn ask_once(server: &mut Server) -> Result<u64, Errno> {
    let deadline = Deadline::after(WAIT);
    let mut connection = match server.connection.take() {
        Some(c) => c,
        None => Connection::open(&server.endpoint, deadline)?,
    };
    connection.send(b"stats\r\n", deadline)?;
    let sum = answer(&mut connection, deadline)?;
    server.connection = Some(connection);
    Ok(sum)
}

/// Sum of the counters in an answer to `stats`.
pub(super) fn answer(connection: &mut Connection, deadline: Deadline) -> Result<u64, Errno> {
    let mut sum = 0u64;
    let mut seen = 0;
    for _ in 0..LINES_MAX {
        let line = connection.line(4096, deadline)?;
        if line == b"END" {
            return if seen == 0 { Err(Errno::PROTO) } else { Ok(sum) };
        }
        let line = String::from_utf8_lossy(&line);
        let Some((name, value)) = line.strip_prefix("STAT ").and_then(|l| l.split_once(' ')) else {
            return Err(Errno::PROTO);
        };
        if COUNTERS.contains(&name) {
            seen += 1;
            sum = sum.wrapping_add(value.parse().map_err(|_| Errno::PROTO)?);
        }
    }
    Err(Errno::PROTO)
}

fn refusal(what: &str, why: &str) -> PlatformError {
    PlatformError::Unsupported {
        what: format!("counting the operations of {what}"),
        why: why.to_owned(),
    }
}
