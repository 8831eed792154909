//! The control socket: Varlink over a Unix socket, whose kernel reports the caller's credentials. A message is a JSON
//! object and a zero byte. Requests are bounded in size and time. One thread accepts, one serves each connection, at
//! most [`CONNECTIONS_MAX`]. They read the [`Board`] and put requests into a bounded channel, so none touches the loop.

use crate::api::{Explanation, Found, Plan, Switch, find_workload};
use crate::board::Board;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::io::{BufRead, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Connections served at the same time.
pub const CONNECTIONS_MAX: usize = 8;
/// Connections reserved for root: other readers must not keep root from undoing.
pub const CONNECTIONS_OF_ROOT: usize = 2;
/// Time limit for the first request: programs ask as soon as they are connected.
const FIRST_REQUEST: Duration = Duration::from_secs(5);
/// Largest request: none of ours needs more than a workload's name.
pub const REQUEST_BYTES_MAX: usize = 64 * 1024;
/// Time limit between two requests.
const IDLE: Duration = Duration::from_secs(30);
/// Time limit for a complete request.
const REQUEST_PATIENCE: Duration = Duration::from_secs(10);
/// Time limit for reading an answer.
const WRITE_PATIENCE: Duration = Duration::from_secs(5);
/// Time limit of the loop's answer. It is busy for some tens of ms, unless the machine is in deep trouble.
const ANSWER_PATIENCE: Duration = Duration::from_secs(10);
/// Period of empty lists in a silent log, to notice a lost listener.
const FOLLOW_PULSE: Duration = Duration::from_secs(5);
/// Stack of a serving thread: JSON of a status nests six levels deep.
const STACK_BYTES: usize = 256 * 1024;
/// The interface as text; the introspection answers it.
pub const INTERFACE: &str = include_str!("io.homeostat.varlink");
/// Name of the interface.
pub const NAME: &str = "io.homeostat";
const SERVICE: &str = "org.varlink.service";
const SERVICE_INTERFACE: &str = "interface org.varlink.service

method GetInfo() -> (vendor: string, product: string, version: string, url: string, interfaces: []string)
method GetInterfaceDescription(interface: string) -> (description: string)

error InterfaceNotFound (interface: string)
error MethodNotFound (method: string)
error MethodNotImplemented (method: string)
error InvalidParameter (parameter: string)
";

/// A person's request to the loop.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ask {
    /// Start no new trial.
    Pause,
    /// Go on.
    Resume,
    /// Undo one action.
    Undo(u64),
    /// Undo everything.
    UndoAll,
    /// Set the switch: let homeostat act, or undo everything and only advise.
    Switch(bool),
    /// Read the configuration again.
    Reload,
    /// Publish the state as it is now.
    Look,
}

/// The loop's answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// The request was taken.
    Taken,
    /// The request was taken for these actions.
    Actions(Vec<u64>),
    /// The switch was asked for.
    Switched(Box<Switched>),
    /// No such action; these are in force.
    NoSuchAction(Vec<u64>),
    /// Reloaded; these changes need a restart.
    Reloaded(Vec<String>),
    /// The configuration is not valid.
    BadConfiguration(String),
}

/// The result of switching.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Switched {
    /// Whether it stood otherwise before.
    pub changed: bool,
    /// The changes that were in force, of which all are being undone if it is off.
    pub actions: Vec<u64>,
    /// Its present state.
    pub switch: Switch,
    /// Why it is not as it was asked for, or will not stay so over a restart.
    pub problem: Option<String>,
}

/// A request on its way to the loop.
#[derive(Debug)]
pub struct Errand {
    /// The request.
    pub ask: Ask,
    /// Channel for one answer, so the loop never waits for the caller.
    pub answer: SyncSender<Answer>,
}

/// Sends requests to the loop: false when its queue is full or it has ended.
pub type Post = Arc<dyn Fn(Errand) -> bool + Send + Sync>;

pub(crate) const GROUP_REMEDY: &str =
    "create it, or change control.group; a group that is not in /etc/group can be given by its number";

/// Why the control socket cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum ControlError {
    /// Somebody answers there already.
    #[error("another homeostat daemon answers at {}\n  hint: `homeostat status` shows it; stop it first", .0.display())]
    AlreadyRunning(PathBuf),
    /// The group is not known.
    #[error("the group {0:?} of the control socket does not exist\n  hint: {GROUP_REMEDY}")]
    NoSuchGroup(String),
    /// A file operation failed.
    #[error("{what} {}: {source}", path.display())]
    File {
        /// The attempt.
        what: &'static str,
        /// On which path.
        path: PathBuf,
        /// Why it failed.
        source: std::io::Error,
    },
}

/// Opens the socket for root and the group.
///
/// # Errors
/// [`ControlError`]; the caller decides whether to work without a socket.
pub fn bind(socket: &Path, group: &str) -> Result<UnixListener, ControlError> {
    let file = |what: &'static str, path: &Path| {
        let path = path.to_owned();
        move |source| ControlError::File { what, path, source }
    };
    let group = group_id(group).ok_or_else(|| ControlError::NoSuchGroup(group.to_owned()))?;
    if let Some(directory) = socket.parent() {
        std::fs::create_dir_all(directory).map_err(file("cannot create the directory", directory))?;
    }
    match UnixStream::connect(socket) {
        Ok(_) => return Err(ControlError::AlreadyRunning(socket.to_owned())),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => {}
        // Nobody listens: a killed daemon left the socket. Anything else here is not ours.
        Err(e) => {
            use std::os::unix::fs::FileTypeExt as _;
            let left_behind = e.kind() == std::io::ErrorKind::ConnectionRefused
                && std::fs::symlink_metadata(socket).is_ok_and(|m| m.file_type().is_socket());
            if !left_behind {
                return Err(file("will not replace what is not an old socket:", socket)(e));
            }
            std::fs::remove_file(socket).map_err(file("cannot remove the old socket", socket))?;
        }
    }
    // Only root may connect between bind and chmod.
    let umask = rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o177));
    let listener = UnixListener::bind(socket);
    rustix::process::umask(umask);
    let listener = listener.map_err(file("cannot listen on", socket))?;
    std::os::unix::fs::chown(socket, None, Some(group)).map_err(file("cannot give to its group", socket))?;
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o660);
    std::fs::set_permissions(socket, mode).map_err(file("cannot set the mode of", socket))?;
    Ok(listener)
}

pub(crate) fn group_id(group: &str) -> Option<u32> {
    if let Ok(number) = group.parse() {
        return Some(number);
    }
    if group == "root" {
        return Some(0);
    }
    let text = std::fs::read_to_string("/etc/group").ok()?;
    text.lines().find_map(|line| {
        let mut fields = line.split(':');
        (fields.next() == Some(group))
            .then(|| fields.nth(1)?.parse().ok())
            .flatten()
    })
}

struct Shared {
    board: Arc<Board>,
    post: Post,
    stopping: AtomicBool,
    peers: Mutex<Vec<Peer>>,
}

struct Peer {
    number: u64,
    /// Closes it from outside, when the daemon ends or root needs the place.
    stream: UnixStream,
    is_root: bool,
    /// Idle since then; `None` during a request.
    idle: Option<Instant>,
    /// Told to close, and ending.
    leaving: bool,
}

impl Shared {
    fn peers(&self) -> std::sync::MutexGuard<'_, Vec<Peer>> {
        self.peers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a place for a connection. For root, the longest idle connection is closed, those of others first.
    fn admit(&self, number: u64, stream: &UnixStream, is_root: bool) -> bool {
        let Ok(stream) = stream.try_clone() else {
            return false;
        };
        let mut peers = self.peers();
        let staying = peers.iter().filter(|p| !p.leaving).count();
        let others = peers.iter().filter(|p| !p.leaving && !p.is_root).count();
        if !is_root && (others >= CONNECTIONS_MAX - CONNECTIONS_OF_ROOT || staying >= CONNECTIONS_MAX) {
            return false;
        }
        if staying >= CONNECTIONS_MAX {
            let idlest = peers
                .iter_mut()
                .filter(|p| !p.leaving)
                .filter_map(|p| Some((p.is_root, p.idle?, p)))
                .min_by_key(|(is_root, since, _)| (*is_root, *since));
            let Some((_, _, peer)) = idlest else {
                return false;
            };
            peer.leaving = true;
            let _ = peer.stream.shutdown(std::net::Shutdown::Both);
        }
        // Closing connections keep a thread for a moment. Many at a time would be an attack.
        if peers.len() >= 2 * CONNECTIONS_MAX {
            return false;
        }
        peers.push(Peer {
            number,
            stream,
            is_root,
            idle: Some(Instant::now()),
            leaving: false,
        });
        true
    }

    fn set_idle(&self, number: u64, idle: Option<Instant>) {
        if let Some(peer) = self.peers().iter_mut().find(|p| p.number == number) {
            peer.idle = idle;
        }
    }

    fn dismiss(&self, number: u64) {
        self.peers().retain(|p| p.number != number);
    }
}

/// The running server.
pub struct Server {
    shared: Arc<Shared>,
    listener: UnixListener,
    socket: PathBuf,
    accepting: Option<JoinHandle<()>>,
}

impl Server {
    /// Serves until [`Server::stop`].
    ///
    /// # Errors
    /// No thread could be started.
    pub fn start(
        listener: UnixListener,
        socket: &Path,
        board: Arc<Board>,
        post: Post,
    ) -> std::io::Result<Self> {
        let shared = Arc::new(Shared {
            board,
            post,
            stopping: AtomicBool::new(false),
            peers: Mutex::new(Vec::new()),
        });
        let accepting = {
            let (shared, listener) = (shared.clone(), listener.try_clone()?);
            std::thread::Builder::new()
                .name("control".into())
                .stack_size(STACK_BYTES)
                .spawn(move || accept(&shared, &listener))?
        };
        Ok(Self {
            shared,
            listener,
            socket: socket.to_owned(),
            accepting: Some(accepting),
        })
    }

    /// Closes the socket and all connections.
    pub fn stop(&mut self) {
        let Some(accepting) = self.accepting.take() else {
            return;
        };
        self.shared.stopping.store(true, Ordering::SeqCst);
        self.shared.board.close();
        // Ends a blocked accept(). An already closed socket gives an error that does not matter.
        let _ = rustix::net::shutdown(&self.listener, rustix::net::Shutdown::Both);
        let _ = accepting.join();
        for peer in self.shared.peers().drain(..) {
            let _ = peer.stream.shutdown(std::net::Shutdown::Read);
        }
        let _ = std::fs::remove_file(&self.socket);
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop();
    }
}

fn accept(shared: &Arc<Shared>, listener: &UnixListener) {
    let mut next: u64 = 0;
    while !shared.stopping.load(Ordering::SeqCst) {
        let stream = match listener.accept() {
            Ok((stream, _)) => stream,
            Err(e) if e.kind() == std::io::ErrorKind::Interrupted => continue,
            Err(_) if shared.stopping.load(Ordering::SeqCst) => return,
            Err(_) => {
                // Probably out of file descriptors: wait for closings instead of spinning.
                std::thread::sleep(Duration::from_millis(200));
                continue;
            }
        };
        // The kernel reports the caller. A caller unknown to it has gone.
        let Ok(caller) = rustix::net::sockopt::socket_peercred(&stream) else {
            continue;
        };
        let is_root = caller.uid.is_root();
        next += 1;
        let number = next;
        if !shared.admit(number, &stream, is_root) {
            refuse(stream, "all connections of the control socket are in use");
            continue;
        }
        let serving = shared.clone();
        let spawned = std::thread::Builder::new()
            .name("control-peer".into())
            .stack_size(STACK_BYTES)
            .spawn(move || {
                // On an error the peer is gone or speaks another language.
                let _ = serve(&serving, stream, number, is_root);
                serving.dismiss(number);
            });
        if spawned.is_err() {
            shared.dismiss(number);
        }
    }
}

fn refuse(mut stream: UnixStream, reason: &str) {
    let _ = stream.set_write_timeout(Some(Duration::from_millis(100)));
    let _ = send(
        &mut stream,
        &json!({"error": format!("{NAME}.Busy"), "parameters": {"reason": reason}}),
    );
}

fn send(stream: &mut UnixStream, message: &Value) -> std::io::Result<()> {
    stream.write_all(format!("{message}\0").as_bytes())
}

enum Incoming {
    Request(Vec<u8>),
    TooLong,
    End,
}

fn serve(shared: &Arc<Shared>, stream: UnixStream, number: u64, is_root: bool) -> std::io::Result<()> {
    stream.set_write_timeout(Some(WRITE_PATIENCE))?;
    let desk = Desk {
        shared: shared.clone(),
        may_change: is_root,
    };
    let mut reader = std::io::BufReader::with_capacity(4096, stream.try_clone()?);
    let mut writer = stream;
    let mut patience = FIRST_REQUEST;
    while !shared.stopping.load(Ordering::SeqCst) {
        shared.set_idle(number, Some(Instant::now()));
        let incoming = next_request(&mut reader, patience)?;
        shared.set_idle(number, None);
        patience = IDLE;
        match incoming {
            Incoming::End => break,
            Incoming::TooLong => {
                refuse(writer, "the request is longer than 64 KiB");
                break;
            }
            Incoming::Request(request) => desk.answer(&request, &mut writer)?,
        }
    }
    Ok(())
}

/// Reads up to the closing zero of a message, within bounds of size and time. `patience`: for the first byte.
fn next_request(
    reader: &mut std::io::BufReader<UnixStream>,
    patience: Duration,
) -> std::io::Result<Incoming> {
    let mut request = Vec::new();
    // Only the first byte may take its time.
    reader.get_ref().set_read_timeout(Some(patience))?;
    if reader.fill_buf()?.is_empty() {
        return Ok(Incoming::End);
    }
    let deadline = Instant::now() + REQUEST_PATIENCE;
    loop {
        let room = (REQUEST_BYTES_MAX + 1).saturating_sub(request.len()) as u64;
        let buffered = reader.fill_buf()?.len() as u64;
        if buffered == 0 {
            return Ok(Incoming::End);
        }
        reader
            .by_ref()
            .take(buffered.min(room))
            .read_until(0, &mut request)?;
        if request.last() == Some(&0) {
            request.pop();
            return Ok(Incoming::Request(request));
        }
        if request.len() > REQUEST_BYTES_MAX {
            return Ok(Incoming::TooLong);
        }
        if Instant::now() > deadline {
            return Ok(Incoming::End);
        }
        reader.get_ref().set_read_timeout(Some(REQUEST_PATIENCE))?;
    }
}

struct Desk {
    shared: Arc<Shared>,
    may_change: bool,
}

#[derive(Deserialize)]
struct Request {
    method: String,
    parameters: Option<Value>,
    #[serde(default)]
    more: bool,
    #[serde(default)]
    oneway: bool,
}

/// The parameters of the answer, or an error with its parameters.
type Outcome = Result<Value, (String, Value)>;

impl Request {
    fn parameter<T: DeserializeOwned>(&self, name: &str) -> Result<T, (String, Value)> {
        let given = self.parameters.as_ref().map_or(Value::Null, |p| p[name].clone());
        serde_json::from_value(given)
            .map_err(|_| (format!("{SERVICE}.InvalidParameter"), json!({"parameter": name})))
    }

    fn method_not_found(&self) -> Outcome {
        Err((
            format!("{SERVICE}.MethodNotFound"),
            json!({"method": self.method}),
        ))
    }

    fn introspect(&self, method: &str) -> Outcome {
        match method {
            "GetInfo" => Ok(json!({
                "vendor": "homeostat",
                "product": "homeostat",
                "version": env!("CARGO_PKG_VERSION"),
                "url": env!("CARGO_PKG_REPOSITORY"),
                "interfaces": [SERVICE, NAME],
            })),
            "GetInterfaceDescription" => match self.parameter::<String>("interface")?.as_str() {
                NAME => Ok(json!({"description": INTERFACE})),
                SERVICE => Ok(json!({"description": SERVICE_INTERFACE})),
                _ => Err((
                    format!("{SERVICE}.InvalidParameter"),
                    json!({"parameter": "interface"}),
                )),
            },
            _ => self.method_not_found(),
        }
    }
}

fn error(name: &str, parameters: Value) -> Outcome {
    Err((format!("{NAME}.{name}"), parameters))
}

impl Desk {
    fn ask(&self, ask: Ask) -> Outcome {
        if !self.may_change {
            return error("PermissionDenied", json!({"needs": "root"}));
        }
        let busy = |reason: &str| error("Busy", json!({"reason": reason}));
        let (answer, reply): (SyncSender<Answer>, Receiver<Answer>) = sync_channel(1);
        let undone = if let Ask::Undo(action) = ask { action } else { 0 };
        if !(self.shared.post)(Errand { ask, answer }) {
            return busy("the daemon has too many requests or is stopping");
        }
        match reply.recv_timeout(ANSWER_PATIENCE) {
            Ok(Answer::Taken) => Ok(json!({})),
            Ok(Answer::Actions(actions)) => Ok(json!({"actions": actions})),
            Ok(Answer::Switched(switched)) => Ok(json!(switched)),
            Ok(Answer::Reloaded(notes)) => Ok(json!({"notes": notes})),
            Ok(Answer::NoSuchAction(in_force)) => {
                error("ActionNotFound", json!({"action": undone, "in_force": in_force}))
            }
            Ok(Answer::BadConfiguration(message)) => error("BadConfiguration", json!({"message": message})),
            Err(RecvTimeoutError::Timeout) => busy("the daemon did not answer in time"),
            Err(RecvTimeoutError::Disconnected) => busy("the daemon is stopping"),
        }
    }

    fn explain(&self, workload: &str) -> Outcome {
        let view = self.shared.board.fresh_view();
        let not_found = |near: Vec<String>, ambiguous: bool| {
            error(
                "WorkloadNotFound",
                json!({"workload": workload, "near": near, "ambiguous": ambiguous}),
            )
        };
        match find_workload(&view, workload) {
            Found::One(found) => Ok(json!({"explanation": Explanation::new(&view, found)})),
            Found::Near(near) => not_found(near, false),
            Found::Several(several) => not_found(several, true),
        }
    }

    fn follow(&self, stream: &mut UnixStream, mut since: u64, many: bool) -> std::io::Result<()> {
        loop {
            let patience = if many { FOLLOW_PULSE } else { Duration::ZERO };
            let (lines, next, more) = self.shared.board.story_since(since, patience);
            since = next;
            let parameters = json!({"lines": lines, "next": next});
            if !(many && more) {
                return send(stream, &json!({"parameters": parameters}));
            }
            send(stream, &json!({"continues": true, "parameters": parameters}))?;
        }
    }

    /// Answers one request. A malformed request is an error and ends the connection.
    fn answer(&self, request: &[u8], stream: &mut UnixStream) -> std::io::Result<()> {
        let request: Request = serde_json::from_slice(request)?;
        let outcome = match request.method.rsplit_once('.') {
            Some((NAME, method)) => match method {
                "Follow" => match request.parameter::<Option<u64>>("since") {
                    Ok(since) => return self.follow(stream, since.unwrap_or(0), request.more),
                    Err(e) => Err(e),
                },
                _ => self.call(method, &request),
            },
            Some((SERVICE, method)) => request.introspect(method),
            other => {
                let interface = other.map_or(request.method.as_str(), |(interface, _)| interface);
                Err((
                    format!("{SERVICE}.InterfaceNotFound"),
                    json!({"interface": interface}),
                ))
            }
        };
        if request.oneway {
            return Ok(());
        }
        send(
            stream,
            &match outcome {
                Ok(parameters) => json!({"parameters": parameters}),
                Err((error, parameters)) => json!({"error": error, "parameters": parameters}),
            },
        )
    }

    fn call(&self, method: &str, request: &Request) -> Outcome {
        let board = &self.shared.board;
        match method {
            "GetStatus" => Ok(json!({"status": board.status()})),
            "GetPlan" => Ok(json!({"plan": Plan::new(&board.fresh_view())})),
            "Explain" => self.explain(&request.parameter::<String>("workload")?),
            "Undo" => self.ask(Ask::Undo(request.parameter("action")?)),
            "UndoAll" => self.ask(Ask::UndoAll),
            "Pause" => self.ask(Ask::Pause),
            "Resume" => self.ask(Ask::Resume),
            "Switch" => self.ask(Ask::Switch(request.parameter("on")?)),
            "Reload" => self.ask(Ask::Reload),
            _ => request.method_not_found(),
        }
    }
}
