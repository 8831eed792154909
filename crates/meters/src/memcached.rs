//! memcached: the `cmd_*` and result counters of its `stats` command, over a connection that stays open.

use crate::common::{is_program, not_mine, refused, usable};
use crate::connection::{Connection, Deadline, Endpoint, NotConnected};
use crate::listeners::{Says, Unanswered};
use crate::servers::{Ask, STRANGER, Servers, WAIT};
use crate::{Meter, MeterKind, listeners};
use homeostat_kernel::Root;
use homeostat_model::{MeterCandidate, MeterClass, MeterId, ProcessId, Workload};
use homeostat_platform::PlatformError;
use rustix::io::Errno;

pub(super) const ID: &str = "memcached";
pub(super) const UNIT: &str = "operation";
/// Most lines of an answer; `stats` has about 90.
const LINES_MAX: usize = 1000;
/// Exactly one of these counts each operation (memcached doc/protocol.txt). `cas` counts as a set.
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

pub(super) const PROGRAMS: [&str; 1] = ["memcached"];

pub(super) struct Memcached;

impl MeterKind for Memcached {
    fn find(&mut self, root: &Root, workload: &Workload) -> Vec<MeterCandidate> {
        if !is_program(workload, &PROGRAMS) {
            return vec![];
        }
        match Servers::open(root, workload, Client { root: root.clone() }) {
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
        let client = Client { root: root.clone() };
        Ok(Box::new(Servers::open(root, workload, client)?))
    }
}

struct Server {
    endpoint: Endpoint,
    connection: Option<Connection>,
}

struct Client {
    root: Root,
}

impl Ask for Client {
    type Server = Server;

    fn find(&mut self, process: ProcessId, deadline: Deadline) -> Result<(Server, u64), Unanswered> {
        listeners::first_that_answers(&self.root, process, refusal, "option -s", |endpoint| {
            let mut server = Server {
                endpoint,
                connection: None,
            };
            let count = ask(&self.root, process, &mut server, deadline)?;
            Ok((server, count))
        })
    }

    fn ask(
        &mut self,
        process: ProcessId,
        server: &mut Server,
        deadline: Deadline,
    ) -> Result<u64, Unanswered> {
        ask(&self.root, process, server, deadline)
    }
}

/// Asks, and reconnects once after a lost connection.
fn ask(root: &Root, process: ProcessId, server: &mut Server, deadline: Deadline) -> Result<u64, Unanswered> {
    let deadline = deadline.at_most(WAIT);
    let had = server.connection.is_some();
    let lost = [
        NotConnected::from(Errno::CONNRESET),
        NotConnected::from(Errno::PIPE),
    ];
    let answer = match ask_once(root, process, server, deadline) {
        Err(e) if had && lost.contains(&e) => ask_once(root, process, server, deadline),
        other => other,
    };
    answer.map_err(|e| {
        let what = format!("the server at {}", server.endpoint);
        let e = match e {
            NotConnected::Kernel(e) => Errno::from_raw_os_error(e),
            NotConnected::Process(error) => return Unanswered::from(error),
            NotConnected::Stranger => return Unanswered::from(refusal(&what, STRANGER)),
        };
        let says = match e {
            // The peer closed the connection, or did not answer like memcached.
            Errno::CONNRESET | Errno::PIPE | Errno::PROTO | Errno::MSGSIZE => Says::NoServer,
            _ => Says::Nothing,
        };
        let error = match e {
            Errno::TIMEDOUT | Errno::AGAIN => PlatformError::Busy {
                what: format!("asking {what}"),
                why: format!("no answer in time ({e})"),
            },
            e if server.endpoint.address.is_shortage(e) => PlatformError::Busy {
                what: format!("asking {what}"),
                why: e.to_string(),
            },
            Errno::CONNREFUSED | Errno::NOENT => refusal(
                &what,
                &format!("nobody takes connections there ({e}); let it listen again"),
            ),
            _ => refusal(
                &what,
                "it does not answer `stats` in text (TLS, SASL or binary protocol only?); open a plain Unix socket \
                 (option -s)",
            ),
        };
        Unanswered::new(says, error)
    })
}

fn ask_once(
    root: &Root,
    process: ProcessId,
    server: &mut Server,
    deadline: Deadline,
) -> Result<u64, NotConnected> {
    let mut connection = match server.connection.take() {
        Some(c) => c,
        None => Connection::open(root, process, &server.endpoint, deadline)?,
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
