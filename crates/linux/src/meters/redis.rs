//! Redis and its relatives (Valkey, KeyDB, Dragonfly): `total_commands_processed` of `INFO stats`, less our own
//! commands, over a connection that stays open. One question per reading, answered in about 50 µs by the server.

use super::common::{
    Cumulative, fault, is_program, not_mine, open_process, read_at, refused, usable, user_ids,
};
use super::connection::{Connection, Deadline, Endpoint};
use super::{Meter, MeterKind, MeterSettings, listeners};
use crate::Root;
use homeostat_model::{MeterCandidate, MeterClass, MeterId, ProcessId, Workload};
use homeostat_platform::PlatformError;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::Duration;

const ID: &str = "redis";
const UNIT: &str = "command";
const PROGRAMS: [&str; 6] = [
    "redis-server",
    "valkey-server",
    "keydb-server",
    "dragonfly",
    "redis-check-rdb",
    "valkey-check-rdb",
];
/// Longest wait for a connection, and for one answer.
const WAIT: Duration = Duration::from_millis(200);
/// Most servers of one workload that are asked.
const SERVERS_MAX: usize = 16;
/// Most bytes of an answer: `INFO stats` has about 2 KiB.
const ANSWER_MAX: usize = 256 * 1024;

/// The kind.
pub(super) struct Redis {
    settings: MeterSettings,
}

impl Redis {
    pub(super) fn new(settings: &MeterSettings) -> Self {
        Self {
            settings: settings.clone(),
        }
    }
}

impl MeterKind for Redis {
    fn find(&mut self, root: &Root, workload: &Workload) -> Vec<MeterCandidate> {
        if !is_program(workload, &PROGRAMS) {
            return vec![];
        }
        let password = self.settings.redis_password_file(workload).cloned();
        match RedisMeter::open(root, workload, password) {
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
        let password = self.settings.redis_password_file(workload).cloned();
        Ok(Box::new(RedisMeter::open(root, workload, password)?))
    }
}

struct Server {
    /// Whom the password may be told to.
    users: Vec<u32>,
    endpoint: Endpoint,
    connection: Option<Connection>,
    /// Commands of ours that the server has counted or will have counted before the next answer.
    own: u64,
}

struct RedisMeter {
    root: Root,
    password: Option<PathBuf>,
    servers: BTreeMap<ProcessId, Server>,
    /// Processes without a server socket (a child that saves the data set).
    silent: BTreeSet<ProcessId>,
    sum: Cumulative<ProcessId>,
}

impl RedisMeter {
    fn open(root: &Root, workload: &Workload, password: Option<PathBuf>) -> Result<Self, PlatformError> {
        let mut meter = Self {
            root: root.clone(),
            password,
            servers: BTreeMap::new(),
            silent: BTreeSet::new(),
            sum: Cumulative::new(),
        };
        meter.read(workload)?;
        Ok(meter)
    }

    /// Finds the socket of a process on which a Redis answers.
    fn find(&self, process: ProcessId) -> Result<(Server, u64), PlatformError> {
        let hint = "unixsocket in its configuration";
        let users = self.users(process)?;
        listeners::first_that_answers(&self.root, process, refusal, hint, |endpoint| {
            let mut server = Server {
                users: users.clone(),
                endpoint,
                connection: None,
                own: 0,
            };
            let count = self.ask(&mut server)?;
            Ok((server, count))
        })
    }

    /// Whom the password may be told to, if there is one: the users that the process runs as.
    fn users(&self, process: ProcessId) -> Result<Vec<u32>, PlatformError> {
        if self.password.is_none() {
            return Ok(Vec::new());
        }
        let target = format!("process {process}");
        let dir = open_process(&self.root, process)?;
        let mut buffer = [0u8; 8192];
        let n = read_at(&dir, "status", &mut buffer).map_err(|e| fault(e, &target, "its status file"))?;
        Ok(user_ids(&String::from_utf8_lossy(&buffer[..n])))
    }

    /// Commands that the server has processed for others. Reconnects once when the connection was lost.
    fn ask(&self, server: &mut Server) -> Result<u64, PlatformError> {
        let had = server.connection.is_some();
        match self.ask_once(server) {
            Err(Fault::Connection(_)) if had => self.ask_once(server),
            other => other,
        }
        .map_err(|fault| fault.into_platform(&server.endpoint))
    }

    fn ask_once(&self, server: &mut Server) -> Result<u64, Fault> {
        let deadline = Deadline::after(WAIT);
        let mut connection = match server.connection.take() {
            Some(c) => c,
            None => {
                // Who rules that network may lead what is said there to somebody else.
                if self.password.is_some() && server.endpoint.network.is_some() {
                    let why = "its password is not told in another network namespace; give the server a Unix \
                               socket (unixsocket in its configuration)";
                    return Err(Fault::Password(why.to_owned()));
                }
                let mut c = Connection::open(&server.endpoint, deadline)?;
                if let Some(file) = &self.password {
                    let words = password(file, &server.users)?;
                    let mut command = vec![b"AUTH".as_slice()];
                    command.extend(words.iter().map(Vec::as_slice));
                    server.own += 1;
                    c.send(&request(&command), deadline)?;
                    answer(&mut c, deadline)?;
                }
                c
            }
        };
        connection.send(&request(&[b"INFO", b"stats"]), deadline)?;
        let text = answer(&mut connection, deadline)?;
        let count = commands(&String::from_utf8_lossy(&text)).ok_or(Fault::Stranger)?;
        // Kept only after a whole answer: a late one must not be taken for the next.
        server.connection = Some(connection);
        // The answer was written before its own question was counted.
        let others = count.saturating_sub(server.own);
        server.own += 1;
        Ok(others)
    }
}

impl Meter for RedisMeter {
    fn read(&mut self, workload: &Workload) -> Result<f64, PlatformError> {
        let processes: BTreeSet<ProcessId> = workload.processes.iter().take(SERVERS_MAX).copied().collect();
        self.servers.retain(|p, _| processes.contains(p));
        self.silent.retain(|p| processes.contains(p));
        self.sum.retain(|p| processes.contains(p));
        let mut why = None;
        let mut answered = 0;
        let mut servers = std::mem::take(&mut self.servers);
        for process in &processes {
            let count = match servers.get_mut(process) {
                Some(server) => self.ask(server),
                None if self.silent.contains(process) => continue,
                None => self.find(*process).map(|(server, count)| {
                    servers.insert(*process, server);
                    count
                }),
            };
            match count {
                Ok(count) => {
                    answered += 1;
                    self.sum.set(process, count as f64, false);
                }
                // One server that does not answer in time spoils the sum of this interval.
                Err(e @ PlatformError::Busy { .. }) => {
                    self.servers = servers;
                    return Err(e);
                }
                Err(e) => {
                    if servers.remove(process).is_none() {
                        self.silent.insert(*process);
                    }
                    // The main process speaks for the workload.
                    if why.is_none() || Some(process) == workload.processes.first() {
                        why = Some(e);
                    }
                }
            }
        }
        self.servers = servers;
        if answered == 0 {
            return Err(why.unwrap_or_else(|| PlatformError::Vanished {
                target: workload.id.to_string(),
            }));
        }
        Ok(self.sum.total())
    }
}

/// What can go wrong in one question.
pub(super) enum Fault {
    Connection(Errno),
    /// The server's own words.
    Error(String),
    /// Not the protocol of Redis.
    Stranger,
    Password(String),
}
impl From<Errno> for Fault {
    fn from(e: Errno) -> Self {
        Self::Connection(e)
    }
}

impl Fault {
    fn into_platform(self, endpoint: &Endpoint) -> PlatformError {
        let what = format!("the server at {endpoint}");
        match self {
            Self::Connection(e @ (Errno::TIMEDOUT | Errno::AGAIN)) => PlatformError::Busy {
                what: format!("asking {what}"),
                why: format!("no answer within {} ms ({e})", WAIT.as_millis()),
            },
            Self::Connection(Errno::CONNREFUSED | Errno::NOENT) => PlatformError::Vanished { target: what },
            Self::Connection(Errno::CONNRESET | Errno::PIPE) => refusal(
                &what,
                "it closed the connection (a TLS port?); open a plain port or a Unix socket for the local host",
            ),
            Self::Connection(e) => refusal(&what, &format!("{e}; open a Unix socket for the local host")),
            Self::Stranger => refusal(
                &what,
                "it does not answer like a Redis (a TLS port?); open a plain port or a Unix socket for the local host",
            ),
            Self::Password(why) => refusal(&what, &why),
            Self::Error(text) => {
                let remedy = if text.starts_with("NOAUTH") || text.starts_with("DENIED") {
                    "name a file with its password under redis_password_files in the configuration"
                } else if text.starts_with("WRONGPASS") || text.starts_with("ERR invalid password") {
                    "correct the password in the file named under redis_password_files"
                } else if text.starts_with("ERR") && text.contains("AUTH") {
                    "the server wants no password; remove it from redis_password_files"
                } else if text.starts_with("NOPERM") {
                    "allow the user the command INFO (ACL SETUSER … +info)"
                } else if text.starts_with("LOADING") {
                    "wait until it has loaded its data"
                } else {
                    "allow the command INFO on this server"
                };
                let why = format!("it says \"{text}\"; {remedy}");
                if text.starts_with("LOADING") {
                    PlatformError::Busy {
                        what: format!("asking {what}"),
                        why,
                    }
                } else {
                    refusal(&what, &why)
                }
            }
        }
    }
}

fn refusal(what: &str, why: &str) -> PlatformError {
    PlatformError::Unsupported {
        what: format!("counting the commands of {what}"),
        why: why.to_owned(),
    }
}

/// A command in the protocol of Redis: an array of strings with their lengths.
fn request(words: &[&[u8]]) -> Vec<u8> {
    let mut bytes = format!("*{}\r\n", words.len()).into_bytes();
    for word in words {
        bytes.extend_from_slice(format!("${}\r\n", word.len()).as_bytes());
        bytes.extend_from_slice(word);
        bytes.extend_from_slice(b"\r\n");
    }
    bytes
}

/// One answer: a simple string (`+`), an error (`-`) or a string with its length (`$`).
pub(super) fn answer(connection: &mut Connection, deadline: Deadline) -> Result<Vec<u8>, Fault> {
    let line = connection.line(4096, deadline).map_err(|e| match e {
        Errno::MSGSIZE => Fault::Stranger,
        e => Fault::Connection(e),
    })?;
    match line.split_first() {
        Some((b'+', text)) => Ok(text.to_vec()),
        Some((b'-', text)) => {
            let text: String = String::from_utf8_lossy(text)
                .chars()
                .filter(|c| !c.is_control())
                .take(200)
                .collect();
            Err(Fault::Error(text))
        }
        Some((b'$', length)) => {
            let length: usize = std::str::from_utf8(length)
                .ok()
                .and_then(|l| l.parse().ok())
                .ok_or(Fault::Stranger)?;
            if length > ANSWER_MAX {
                return Err(Fault::Stranger);
            }
            let mut text = connection.exactly(length + 2, deadline)?;
            text.truncate(length);
            Ok(text)
        }
        _ => Err(Fault::Stranger),
    }
}

pub(super) fn commands(info: &str) -> Option<u64> {
    info.lines()
        .find_map(|l| l.strip_prefix("total_commands_processed:"))?
        .trim()
        .parse()
        .ok()
}

/// The words of a password file: `PASSWORD` or `USER PASSWORD`. Others must not be able to read it, and who owns it is whom
/// it is told to: a process chooses its own name, and must not get a password by it.
fn password(file: &Path, users: &[u32]) -> Result<Vec<Vec<u8>>, Fault> {
    let fail = |why: String| Fault::Password(format!("the password file {}: {why}", file.display()));
    let fd = rustix::fs::open(
        file,
        OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK,
        Mode::empty(),
    )
    .map_err(|e| fail(format!("{e}; correct the path in the configuration")))?;
    let stat = rustix::fs::fstat(&fd).map_err(|e| fail(e.to_string()))?;
    if stat.st_mode & 0o007 != 0 {
        return Err(fail("every user may access it; chmod 600 it".to_owned()));
    }
    if !users.contains(&stat.st_uid) {
        let server = users
            .get(1)
            .or(users.first())
            .map_or("?".to_owned(), u32::to_string);
        return Err(fail(format!(
            "it belongs to user {}, and only a server of that user is told the password; this one runs as user {server}: if it \
             is yours, chown {server} it",
            stat.st_uid
        )));
    }
    let mut buffer = [0u8; 4096];
    let n = super::common::read_full(&fd, &mut buffer).map_err(|e| fail(e.to_string()))?;
    let line = buffer[..n].split(|&c| c == b'\n').next().unwrap_or_default();
    let words: Vec<Vec<u8>> = line
        .split(u8::is_ascii_whitespace)
        .filter(|w| !w.is_empty())
        .map(<[u8]>::to_vec)
        .collect();
    if words.is_empty() || words.len() > 2 {
        return Err(fail(
            "one line with PASSWORD or USER PASSWORD is expected".to_owned(),
        ));
    }
    Ok(words)
}

#[cfg(test)]
mod tests {
    use super::super::connection::Address;
    use super::*;

    #[test]
    fn the_protocol() {
        assert_eq!(
            request(&[b"INFO", b"stats"]),
            b"*2\r\n$4\r\nINFO\r\n$5\r\nstats\r\n"
        );
        let info = "# Stats\r\ntotal_connections_received:1\r\ntotal_commands_processed:42\r\n";
        assert_eq!(commands(info), Some(42));
        assert_eq!(commands("# Stats"), None);
    }

    #[test]
    fn password_files() {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("p");
        let own = rustix::process::geteuid().as_raw();
        let write = |text: &str, mode| {
            std::fs::write(&file, text).unwrap();
            std::fs::set_permissions(&file, std::fs::Permissions::from_mode(mode)).unwrap();
            password(&file, &[0, own, 4242])
        };
        assert_eq!(write("secret\n", 0o600).ok(), Some(vec![b"secret".to_vec()]));
        assert_eq!(
            write("me secret\nmore", 0o640).ok(),
            Some(vec![b"me".to_vec(), b"secret".to_vec()])
        );
        for (text, mode) in [("", 0o600), ("a b c", 0o600), ("secret", 0o644)] {
            assert!(matches!(write(text, mode), Err(Fault::Password(_))));
        }
        assert!(matches!(
            password(&dir.path().join("none"), &[own]),
            Err(Fault::Password(_))
        ));
        write("secret", 0o600).ok();
        let Err(Fault::Password(why)) = password(&file, &[own + 1; 4]) else {
            unreachable!("a stranger is told nothing");
        };
        assert!(why.contains(&format!("chown {}", own + 1)), "{why}");
    }

    #[test]
    fn refusals_name_the_remedy() {
        let e = Endpoint::here(Address::Abstract(b"x".to_vec()));
        let say = |text: &str| Fault::Error(text.to_owned()).into_platform(&e).to_string();
        assert!(say("NOAUTH Authentication required.").contains("redis_password_files"));
        assert!(say("DENIED Redis is running in protected mode").contains("redis_password_files"));
        assert!(say("WRONGPASS invalid").contains("correct the password"));
        assert!(say("NOPERM this user").contains("ACL"));
        assert!(matches!(
            Fault::Error("LOADING Redis is loading".into()).into_platform(&e),
            PlatformError::Busy { .. }
        ));
        assert!(Fault::Stranger.into_platform(&e).to_string().contains("TLS"));
    }
}
