//! Redis and its relatives (Valkey, KeyDB, Dragonfly): `total_commands_processed` of `INFO stats`, less our own
//! commands, over a connection that stays open. One request per reading takes the server about 50 µs.

use crate::common::{is_program, not_mine, refused, usable};
use crate::connection::{Connection, Deadline, Endpoint, NotConnected};
use crate::listeners::{Says, Unanswered};
use crate::servers::{STRANGER, Servers, WAIT};
use crate::service::opener::{Ask, Got, ask};
use crate::{Meter, MeterKind, MeterSettings, listeners};
use homeostat_helper::storage;
use homeostat_kernel::Root;
use homeostat_kernel::process::is_shortage;
use homeostat_model::{MeterCandidate, MeterClass, MeterId, ProcessId, Workload};
use homeostat_platform::PlatformError;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

pub(super) const ID: &str = "redis";
pub(super) const UNIT: &str = "command";
pub(super) const PROGRAMS: [&str; 6] = [
    "redis-server",
    "valkey-server",
    "keydb-server",
    "dragonfly",
    "redis-check-rdb",
    "valkey-check-rdb",
];
/// Error codes with a specific remedy (redis.io, "Redis serialization protocol specification", simple errors).
const KNOWN_CODES: [&str; 6] = ["NOAUTH", "DENIED", "WRONGPASS", "NOPERM", "LOADING", "ERR"];
/// Most bytes of an answer: `INFO stats` has about 2 KiB.
const ANSWER_MAX: usize = 256 * 1024;

pub(super) struct Redis {
    settings: MeterSettings,
}

impl Redis {
    pub(super) fn new(settings: &MeterSettings) -> Self {
        Self {
            settings: settings.clone(),
        }
    }

    fn meter(&self, root: &Root, workload: &Workload) -> Result<Servers<Client>, PlatformError> {
        let client = Client {
            access: Access {
                root: root.clone(),
                password: self.settings.redis_password_file(workload).cloned(),
            },
            tallies: BTreeMap::new(),
        };
        Servers::open(root, workload, client)
    }
}

impl MeterKind for Redis {
    fn find(&mut self, root: &Root, workload: &Workload) -> Vec<MeterCandidate> {
        if !is_program(workload, &PROGRAMS) {
            return vec![];
        }
        match self.meter(root, workload) {
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
        Ok(Box::new(self.meter(root, workload)?))
    }
}

struct Server {
    endpoint: Endpoint,
    connection: Option<Connection>,
}

/// Command counts of a process, over all its sockets.
#[derive(Debug, Default)]
struct Tally {
    /// Our commands that the next answer includes.
    own: u64,
    /// The total at the last answer.
    all: u64,
    others: u64,
}

impl Tally {
    /// Takes an answer that includes `own` commands of ours. Returns the commands of others.
    fn take(&mut self, all: u64, own: u64) -> u64 {
        if all < self.all {
            // The counters were reset (CONFIG RESETSTAT). They now include our command that asked for this.
            *self = Self {
                own: 1,
                all,
                others: all,
            };
        } else {
            // If the server did not count one of our commands, the result still never decreases.
            self.all = all;
            self.others = self.others.max(all.saturating_sub(own));
        }
        self.others
    }
}

struct Client {
    access: Access,
    tallies: BTreeMap<ProcessId, Tally>,
}

impl crate::servers::Ask for Client {
    type Server = Server;

    fn find(&mut self, process: ProcessId, deadline: Deadline) -> Result<(Server, u64), Unanswered> {
        let Self { access, tallies } = self;
        let access = &*access;
        let tally = tallies.entry(process).or_default();
        let hint = "unixsocket in its configuration";
        listeners::first_that_answers(&access.root, process, refusal, hint, |endpoint| {
            let mut server = Server {
                endpoint,
                connection: None,
            };
            let count = access.ask(process, &mut server, tally, deadline)?;
            Ok((server, count))
        })
    }

    fn ask(
        &mut self,
        process: ProcessId,
        server: &mut Server,
        deadline: Deadline,
    ) -> Result<u64, Unanswered> {
        let tally = self.tallies.entry(process).or_default();
        self.access.ask(process, server, tally, deadline)
    }

    fn keep(&mut self, processes: &BTreeSet<ProcessId>) {
        self.tallies.retain(|p, _| processes.contains(p));
    }
}

struct Access {
    root: Root,
    password: Option<PathBuf>,
}

impl Access {
    /// Commands that the server has processed for others. Reconnects once after a lost connection.
    fn ask(
        &self,
        process: ProcessId,
        server: &mut Server,
        tally: &mut Tally,
        deadline: Deadline,
    ) -> Result<u64, Unanswered> {
        let deadline = deadline.at_most(WAIT);
        let had = server.connection.is_some();
        let answer = match self.ask_once(process, server, tally, deadline) {
            Err(Fault::Connection(Errno::CONNRESET | Errno::PIPE)) if had => {
                self.ask_once(process, server, tally, deadline)
            }
            other => other,
        };
        answer.map_err(|fault| Unanswered::new(fault.says(), fault.into_platform(&server.endpoint)))
    }

    fn ask_once(
        &self,
        process: ProcessId,
        server: &mut Server,
        tally: &mut Tally,
        deadline: Deadline,
    ) -> Result<u64, Fault> {
        let mut connection = match server.connection.take() {
            Some(c) => c,
            None => self.connect(process, &server.endpoint, tally, deadline)?,
        };
        // The server writes the answer before it counts the request.
        let own = tally.own;
        let text = say(&mut connection, &[b"INFO", b"stats"], tally, deadline)?;
        let count = commands(&String::from_utf8_lossy(&text)).ok_or(Fault::Stranger)?;
        // Keep the connection only after a complete answer: a late answer must not be taken for the next.
        server.connection = Some(connection);
        Ok(tally.take(count, own))
    }

    /// Connects, and sends the password if there is one. The listener is verified by then.
    fn connect(
        &self,
        process: ProcessId,
        endpoint: &Endpoint,
        tally: &mut Tally,
        deadline: Deadline,
    ) -> Result<Connection, Fault> {
        let connect = || Connection::open(&self.root, process, endpoint, deadline).map_err(Fault::from);
        let Some(file) = &self.password else {
            return connect();
        };
        // The owner of that network may redirect the connection to somebody else.
        if endpoint.network.is_some() {
            let why = "its password is not told in another network namespace; give the server a Unix socket \
                       (unixsocket in its configuration)";
            return Err(Fault::Password(why.to_owned()));
        }
        let (got, opened) = ask(&Ask::Password {
            root: self.root.as_path().to_owned(),
            process,
            file: file.clone(),
        })?;
        let (Got::Password(Ok(())), Some(opened)) = (&got, opened) else {
            return Err(match got {
                Got::Password(Err(why)) => Fault::Password(why),
                _ => Fault::Stranger,
            });
        };
        let words = words(file, &opened)?;
        let mut connection = connect()?;
        let mut command = vec![b"AUTH".as_slice()];
        command.extend(words.iter().map(Vec::as_slice));
        match say(&mut connection, &command, tally, deadline) {
            Err(Fault::Error("ERR" | "")) => Err(Fault::NoPassword),
            said => said.map(|_| connection),
        }
    }
}

fn say(
    connection: &mut Connection,
    words: &[&[u8]],
    tally: &mut Tally,
    deadline: Deadline,
) -> Result<Vec<u8>, Fault> {
    connection.send(&request(words), deadline)?;
    // The server counts it, even if late, unless it refuses it or has closed the connection.
    tally.own += 1;
    let said = answer(connection, deadline);
    if said.as_ref().is_err_and(|fault| !fault.is_late()) {
        tally.own -= 1;
    }
    said
}

#[derive(Debug)]
pub(super) enum Fault {
    Connection(Errno),
    Error(&'static str),
    /// The server refuses the password, or the command for it.
    NoPassword,
    Stranger,
    Password(String),
    /// Somebody else has taken the connection.
    Gone,
    Process(PlatformError),
}
impl From<Errno> for Fault {
    fn from(e: Errno) -> Self {
        Self::Connection(e)
    }
}
impl From<NotConnected> for Fault {
    fn from(e: NotConnected) -> Self {
        match e {
            NotConnected::Kernel(e) => Self::Connection(Errno::from_raw_os_error(e)),
            NotConnected::Stranger => Self::Gone,
            NotConnected::Process(e) => Self::Process(e),
        }
    }
}
impl From<PlatformError> for Fault {
    fn from(e: PlatformError) -> Self {
        Self::Process(e)
    }
}

impl Fault {
    /// Whether the answer may still come.
    fn is_late(&self) -> bool {
        matches!(self, Self::Connection(e) if is_shortage(*e))
    }

    /// What the failure says about the server. A server that answers with an error exists.
    fn says(&self) -> Says {
        match self {
            Self::Stranger | Self::Connection(Errno::CONNRESET | Errno::PIPE) => Says::NoServer,
            Self::Error(_) | Self::NoPassword | Self::Password(_) => Says::NotAllowed,
            Self::Connection(_) | Self::Gone | Self::Process(_) => Says::Nothing,
        }
    }

    fn into_platform(self, endpoint: &Endpoint) -> PlatformError {
        let what = format!("the server at {endpoint}");
        match self {
            Self::Connection(e @ (Errno::TIMEDOUT | Errno::AGAIN)) => PlatformError::Busy {
                what: format!("asking {what}"),
                why: format!("no answer in time ({e})"),
            },
            Self::Connection(e) if endpoint.address.is_shortage(e) => PlatformError::Busy {
                what: format!("asking {what}"),
                why: e.to_string(),
            },
            Self::Connection(e @ (Errno::CONNREFUSED | Errno::NOENT)) => refusal(
                &what,
                &format!("nobody takes connections there ({e}); let it listen again"),
            ),
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
            // The process lives and may listen again.
            Self::Gone => refusal(&what, STRANGER),
            Self::Process(e) => e,
            Self::NoPassword => refusal(
                &what,
                "it refuses the password; correct the password in the file named under redis_password_files, or remove it if the \
                 server wants none",
            ),
            Self::Error(kind) => {
                let (says, remedy) = match kind {
                    "NOAUTH" => (
                        "it wants a password",
                        "name a file with its password under redis_password_files in the configuration",
                    ),
                    "DENIED" => (
                        "it is in protected mode",
                        "name a file with its password under redis_password_files in the configuration",
                    ),
                    "WRONGPASS" => (
                        "it refuses the password",
                        "correct the password in the file named under redis_password_files",
                    ),
                    "NOPERM" => (
                        "it does not allow its user the command INFO",
                        "allow it (ACL SETUSER … +info)",
                    ),
                    "LOADING" => {
                        return PlatformError::Busy {
                            what: format!("asking {what}"),
                            why: "it loads its data; wait until it has".to_owned(),
                        };
                    }
                    _ => (
                        "it refuses the command INFO",
                        "allow the command INFO on this server",
                    ),
                };
                refusal(&what, &format!("{says}; {remedy}"))
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

/// A command in Redis's protocol: an array of strings with their lengths.
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
            // Only the first word, the code, is used. The rest may be a secret if the server is not what it seems.
            let code = text.split(|c| !c.is_ascii_uppercase()).next().unwrap_or_default();
            let code = KNOWN_CODES.iter().find(|known| known.as_bytes() == code);
            Err(Fault::Error(code.copied().unwrap_or_default()))
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

/// Opens a password file. Others must not be able to read it, and the server's user must own it. Otherwise a process
/// could get a password by choosing its name. Runs in an opener.
pub(crate) fn password_file(file: &Path, users: &[u32]) -> Result<Result<OwnedFd, String>, Errno> {
    let fail = |why: String| Ok(Err(format!("the password file {}: {why}", file.display())));
    let found = match rustix::fs::open(file, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()) {
        Ok(found) => found,
        Err(e) if is_shortage(e) => return Err(e),
        Err(e) => return fail(format!("{e}; correct the path in the configuration")),
    };
    let (opened, stat) = match storage::open_found(&found, None) {
        Ok(opened) => opened,
        Err(storage::Refused::Kernel(e)) if is_shortage(e) => return Err(e),
        Err(e) => return fail(format!("{e}; correct the path in the configuration")),
    };
    if stat.st_mode & 0o007 != 0 {
        return fail("every user may access it; chmod 600 it".to_owned());
    }
    if !users.contains(&stat.st_uid) {
        let server = users
            .get(1)
            .or(users.first())
            .map_or("?".to_owned(), u32::to_string);
        return fail(format!(
            "it belongs to user {}, and only a server of that user is told the password; this one runs as user {server}: if it \
             is yours, chown {server} it",
            stat.st_uid
        ));
    }
    Ok(Ok(opened))
}

/// The words of a password file: `PASSWORD` or `USER PASSWORD`.
fn words(file: &Path, opened: &OwnedFd) -> Result<Vec<Vec<u8>>, Fault> {
    let fail = |why: String| Fault::Password(format!("the password file {}: {why}", file.display()));
    let mut buffer = [0u8; 4096];
    let n = homeostat_kernel::process::read_full(opened, &mut buffer).map_err(|e| fail(e.to_string()))?;
    if n == buffer.len() {
        return Err(fail("it is too long for a password".to_owned()));
    }
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
    use super::*;
    use crate::connection::Address;
    use crate::testing::own;
    use std::io::{Read, Write};
    use std::net::TcpStream;
    use std::process::{Child, Command};
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::time::{Duration, Instant};

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

    fn read_password(file: &Path, users: &[u32]) -> Result<Vec<Vec<u8>>, Fault> {
        let opened = password_file(file, users).unwrap().map_err(Fault::Password)?;
        words(file, &opened)
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
            read_password(&file, &[0, own, 4242])
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
            read_password(&dir.path().join("none"), &[own]),
            Err(Fault::Password(_))
        ));
        write("secret", 0o600).ok();
        let Err(Fault::Password(why)) = read_password(&file, &[own + 1; 4]) else {
            unreachable!("a stranger is told nothing");
        };
        assert!(why.contains(&format!("chown {}", own + 1)), "{why}");
    }

    #[test]
    fn commands_of_ours_are_taken_off_and_nobodys_are_taken_back() {
        let mut tally = Tally::default();
        assert_eq!(tally.take(100, 0), 100);
        tally.own = 1;
        assert_eq!(tally.take(111, 1), 110);
        // Three questions that were taken for late and were never counted.
        assert_eq!(tally.take(112, 4), 110);
        assert_eq!(tally.take(120, 5), 115);
        // It counts anew.
        assert_eq!(tally.take(7, 6), 7);
        assert_eq!(tally.own, 1);
        assert_eq!(tally.take(9, 1), 8);
    }

    struct Sleeper(Child);

    impl Sleeper {
        fn start(user: Option<u32>) -> Self {
            use std::os::unix::process::CommandExt;
            let mut command = Command::new("sleep");
            command.arg("600");
            if let Some(user) = user {
                command.uid(user);
            }
            Self(command.spawn().unwrap())
        }

        fn process(&self) -> ProcessId {
            let stat = std::fs::read(format!("/proc/{}/stat", self.0.id())).unwrap();
            ProcessId {
                pid: i32::try_from(self.0.id()).unwrap(),
                start_ticks: homeostat_kernel::process::start_ticks(&stat).unwrap(),
            }
        }
    }

    impl Drop for Sleeper {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    /// What comes of connecting to that process there, as soon as it is not late.
    fn connect(access: &Access, process: ProcessId, endpoint: &Endpoint) -> Result<Connection, Fault> {
        let begun = Instant::now();
        loop {
            let deadline = Deadline::after(Duration::from_secs(60));
            let connected = access.connect(process, endpoint, &mut Tally::default(), deadline);
            match connected {
                Err(fault) if fault.is_late() && begun.elapsed() < Duration::from_secs(120) => {
                    std::thread::sleep(Duration::from_millis(10));
                }
                other => return other,
            }
        }
    }

    /// What was said by those who have come, one at least: whoever was late came again.
    fn heard<S: Read>(
        wait: impl Fn(bool) -> std::io::Result<()>,
        accept: impl Fn() -> std::io::Result<S>,
    ) -> Vec<u8> {
        let mut said = Vec::new();
        wait(true).unwrap();
        let mut came = accept().unwrap();
        wait(false).unwrap();
        loop {
            came.read_to_end(&mut said).unwrap();
            match accept() {
                Ok(another) => came = another,
                Err(e) => {
                    assert_eq!(e.kind(), std::io::ErrorKind::WouldBlock, "{e}");
                    return said;
                }
            }
        }
    }

    #[test]
    fn the_password_is_told_to_nobody_but_the_server_that_it_is_for() {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("p");
        std::fs::write(&file, "secret\n").unwrap();
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o600)).unwrap();
        let access = Access {
            root: Root::default(),
            password: Some(file.clone()),
        };
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = Endpoint::here(Address::Tcp(listener.local_addr().unwrap()));
        let connected = AtomicBool::new(false);
        let told = std::thread::scope(|scope| {
            let server = scope.spawn(|| {
                let mut told = String::new();
                // Whoever was late comes again.
                loop {
                    let (mut stream, _) = listener.accept().unwrap();
                    if connected.load(Ordering::Acquire) {
                        return told;
                    }
                    let mut request = [0u8; 256];
                    let n = stream.read(&mut request).unwrap_or(0);
                    told.push_str(&String::from_utf8_lossy(&request[..n]));
                    // It may have stopped to wait.
                    let _ = stream.write_all(b"+OK\r\n");
                }
            });
            let came = connect(&access, own().processes[0], &endpoint);
            connected.store(true, Ordering::Release);
            // Nobody comes any more: this ends it.
            drop(TcpStream::connect(listener.local_addr().unwrap()).unwrap());
            let told = server.join().unwrap();
            came.unwrap();
            told
        });
        assert!(told.contains("AUTH") && told.contains("secret"), "{told}");

        // Another has taken the port of this server, which runs still, as the same user.
        let server = Sleeper::start(None);
        let refused = connect(&access, server.process(), &endpoint);
        assert!(matches!(refused, Err(Fault::Gone)), "{refused:?}");
        listener.set_nonblocking(true).unwrap();
        assert!(listener.accept().is_err(), "nobody has even come");
        // Or it has ended.
        let gone = server.process();
        drop(server);
        let refused = connect(&access, gone, &endpoint);
        assert!(
            matches!(refused, Err(Fault::Process(PlatformError::Vanished { .. }))),
            "{refused:?}"
        );

        if !rustix::process::geteuid().is_root() {
            println!("skipped: only root can start a server as another user");
            return;
        }
        let user = 65_534;
        let server = Sleeper::start(Some(user));
        std::os::unix::fs::chown(&file, Some(user), None).unwrap();
        let path = dir.path().join("s");
        let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
        let endpoint = Endpoint::here(Address::Path {
            process: server.process(),
            path: path.to_str().unwrap().to_owned(),
        });
        // A socket of ours.
        let refused = connect(&access, server.process(), &endpoint);
        assert!(matches!(refused, Err(Fault::Gone)), "{refused:?}");
        listener.set_nonblocking(true).unwrap();
        assert!(listener.accept().is_err(), "nobody has even come");
        // It is given away, and we listen at it still.
        std::os::unix::fs::chown(&path, Some(user), None).unwrap();
        let refused = connect(&access, server.process(), &endpoint);
        assert!(matches!(refused, Err(Fault::Gone)), "{refused:?}");
        let said = heard(
            |wait| listener.set_nonblocking(!wait),
            || listener.accept().map(|(stream, _)| stream),
        );
        assert_eq!(said, b"");
        // A link to one of its own.
        let link = dir.path().join("link");
        std::os::unix::fs::symlink(&path, &link).unwrap();
        let endpoint = Endpoint::here(Address::Path {
            process: server.process(),
            path: link.to_str().unwrap().to_owned(),
        });
        let refused = connect(&access, server.process(), &endpoint);
        assert!(matches!(refused, Err(Fault::Gone)), "{refused:?}");
        assert!(listener.accept().is_err(), "nobody has even come");
    }

    #[test]
    fn refusals_name_the_remedy() {
        let e = Endpoint::here(Address::Abstract(b"x".to_vec()));
        let told = |text: &str| {
            let mut connection = Connection::received(format!("-{text}\r\n").as_bytes()).unwrap();
            answer(&mut connection, Deadline::after(Duration::from_secs(60))).unwrap_err()
        };
        let say = |text: &str| told(text).into_platform(&e).to_string();
        assert!(say("NOAUTH Authentication required.").contains("redis_password_files"));
        assert!(say("DENIED Redis is running in protected mode").contains("redis_password_files"));
        assert!(say("WRONGPASS invalid").contains("correct the password"));
        assert!(say("NOPERM this user").contains("ACL"));
        assert!(matches!(
            told("LOADING Redis is loading").into_platform(&e),
            PlatformError::Busy { .. }
        ));
        // What it says besides is nobody's business.
        assert!(!say("ERR the root password is hunter2").contains("hunter2"));
        assert!(!say("hunter2").contains("hunter2"));
        for errno in [Errno::TIMEDOUT, Errno::MFILE] {
            let error = Fault::Connection(errno).into_platform(&e);
            assert!(matches!(error, PlatformError::Busy { .. }), "{error}");
        }
        // No port is left here; but `::1` may be no address of this machine at all.
        let no_address = |at: &str| {
            let endpoint = Endpoint::here(Address::Tcp(at.parse().unwrap()));
            Fault::Connection(Errno::ADDRNOTAVAIL).into_platform(&endpoint)
        };
        let short = no_address("127.0.0.1:6379");
        assert!(matches!(short, PlatformError::Busy { .. }), "{short}");
        let lasting = no_address("[::1]:6379");
        assert!(matches!(lasting, PlatformError::Unsupported { .. }), "{lasting}");
        let refused = Fault::Connection(Errno::CONNREFUSED).into_platform(&e);
        assert!(matches!(refused, PlatformError::Unsupported { .. }), "{refused}");
        assert!(matches!(
            Fault::Gone.into_platform(&e),
            PlatformError::Unsupported { .. }
        ));
        assert!(Fault::Stranger.into_platform(&e).to_string().contains("TLS"));
    }
}
