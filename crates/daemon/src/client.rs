//! The client of the control socket for the command line, with timeouts and errors that say what to do.

use crate::api::{Explanation, Plan, Status, StoryLine};
use crate::control::{NAME, Switched};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

const REPLY_BYTES_MAX: u64 = 32 * 1024 * 1024;
/// Time limit of an answer: longer than the daemon waits for its loop.
const PATIENCE: Duration = Duration::from_secs(15);

/// Why a call failed.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// Nobody listens.
    #[error("no homeostat daemon answers at {}\n  hint: start it with `homeostat run`, or name its socket with --socket", .0.display())]
    NotRunning(PathBuf),
    /// The socket may not be opened.
    #[error("{}: permission denied\n  hint: reading the state needs root or the socket's group (control.group)", .0.display())]
    Denied(PathBuf),
    /// The caller may not do this.
    #[error("permission denied\n  hint: only {needs} may change what homeostat does")]
    NotAllowed {
        /// The required rights.
        needs: String,
    },
    /// No such workload.
    #[error("{}", workload_text(workload, near, *ambiguous))]
    WorkloadNotFound {
        /// The name that was asked for.
        workload: String,
        /// Names that come near, or are all meant.
        near: Vec<String>,
        /// Whether several are meant.
        ambiguous: bool,
    },
    /// No such action.
    #[error("no change with the number {action} is in force{}", in_force_text(in_force))]
    ActionNotFound {
        /// The number that was asked for.
        action: u64,
        /// The changes in force.
        in_force: Vec<u64>,
    },
    /// The configuration is not valid.
    #[error("the configuration is not valid; the old one stays in force\n{0}")]
    BadConfiguration(String),
    /// The daemon is busy.
    #[error("the daemon is busy: {0}\n  hint: try again in a moment")]
    Busy(String),
    /// Not understood.
    #[error("the daemon at {} answered something unexpected: {what}", socket.display())]
    Protocol {
        /// The socket.
        socket: PathBuf,
        /// The fault.
        what: String,
    },
    /// The daemon is there and says nothing.
    #[error(
        "the daemon at {} has not answered for {} s; whether it took the request is not known\n  hint: it is stopped or in \
         deep trouble: look at its log and at `ps`; with the daemon ended, `homeostat restore` undoes what it left",
        .0.display(),
        PATIENCE.as_secs()
    )]
    Silent(PathBuf),
    /// The connection broke.
    #[error("the connection to the daemon at {} broke: {source}", socket.display())]
    Broken {
        /// The socket.
        socket: PathBuf,
        /// Why.
        source: std::io::Error,
    },
}

fn workload_text(workload: &str, near: &[String], ambiguous: bool) -> String {
    if ambiguous {
        format!(
            "{workload:?} may be any of: {}\n  hint: give the whole name",
            near.join(", ")
        )
    } else if near.is_empty() {
        format!("no workload is called {workload:?}\n  hint: `homeostat status` lists them")
    } else {
        format!(
            "no workload is called {workload:?}\n  hint: did you mean {}?",
            near.join(" or ")
        )
    }
}

fn in_force_text(in_force: &[u64]) -> String {
    if in_force.is_empty() {
        "\n  hint: nothing is in force".to_owned()
    } else {
        let numbers: Vec<String> = in_force.iter().map(ToString::to_string).collect();
        format!("\n  hint: in force are {}", numbers.join(", "))
    }
}

/// A connection to the daemon.
pub struct Client {
    socket: PathBuf,
    reader: BufReader<UnixStream>,
}

#[derive(Deserialize)]
struct StatusReply {
    status: Status,
}
#[derive(Deserialize)]
struct ExplainReply {
    explanation: Explanation,
}
#[derive(Deserialize)]
struct PlanReply {
    plan: Plan,
}
#[derive(Deserialize)]
struct ActionsReply {
    actions: Vec<u64>,
}
#[derive(Deserialize)]
struct NotesReply {
    notes: Vec<String>,
}
/// A part of the log.
#[derive(Debug, Deserialize)]
pub struct StoryPart {
    /// The lines.
    pub lines: Vec<StoryLine>,
    /// First line of the next request.
    pub next: u64,
}
#[derive(Deserialize)]
struct Empty {}

impl Client {
    /// Connects.
    ///
    /// # Errors
    /// [`ClientError::NotRunning`], [`ClientError::Denied`], [`ClientError::Broken`].
    pub fn connect(socket: &Path) -> Result<Self, ClientError> {
        let broken = |source| ClientError::Broken {
            socket: socket.to_owned(),
            source,
        };
        let stream = UnixStream::connect(socket).map_err(|e| match e.kind() {
            ErrorKind::NotFound | ErrorKind::ConnectionRefused => ClientError::NotRunning(socket.to_owned()),
            ErrorKind::PermissionDenied => ClientError::Denied(socket.to_owned()),
            _ => ClientError::Broken {
                socket: socket.to_owned(),
                source: e,
            },
        })?;
        stream.set_read_timeout(Some(PATIENCE)).map_err(broken)?;
        stream.set_write_timeout(Some(PATIENCE)).map_err(broken)?;
        Ok(Self {
            socket: socket.to_owned(),
            reader: BufReader::new(stream),
        })
    }

    fn send(&mut self, method: &str, parameters: &Value, more: bool) -> Result<(), ClientError> {
        let mut request = json!({"method": format!("{NAME}.{method}"), "parameters": parameters});
        if more {
            request["more"] = Value::Bool(true);
        }
        let mut bytes = request.to_string().into_bytes();
        bytes.push(0);
        let socket = self.socket.clone();
        self.reader
            .get_mut()
            .write_all(&bytes)
            .map_err(|source| lost(socket, source))
    }

    fn receive(&mut self) -> Result<(Value, bool), ClientError> {
        let socket = self.socket.clone();
        let mut bytes = Vec::new();
        let read = self
            .reader
            .by_ref()
            .take(REPLY_BYTES_MAX)
            .read_until(0, &mut bytes);
        read.map_err(|source| lost(socket.clone(), source))?;
        if bytes.pop() != Some(0) {
            let source = ErrorKind::UnexpectedEof.into();
            return Err(ClientError::Broken { socket, source });
        }
        let mut reply: Value = serde_json::from_slice(&bytes).map_err(|e| ClientError::Protocol {
            socket: socket.clone(),
            what: e.to_string(),
        })?;
        let parameters = reply.get_mut("parameters").map_or_else(|| json!({}), Value::take);
        match reply.get("error").and_then(Value::as_str) {
            None => Ok((parameters, reply.get("continues") == Some(&Value::Bool(true)))),
            Some(error) => Err(refusal(&socket, error, &parameters)),
        }
    }

    /// Calls a method and returns its answer as JSON.
    ///
    /// # Errors
    /// [`ClientError`].
    pub fn call_raw(&mut self, method: &str, parameters: &Value) -> Result<Value, ClientError> {
        self.send(method, parameters, false)?;
        Ok(self.receive()?.0)
    }

    fn call<T: DeserializeOwned>(&mut self, method: &str, parameters: &Value) -> Result<T, ClientError> {
        let answer = self.call_raw(method, parameters)?;
        self.understood(answer)
    }

    fn understood<T: DeserializeOwned>(&self, answer: Value) -> Result<T, ClientError> {
        serde_json::from_value(answer).map_err(|e| ClientError::Protocol {
            socket: self.socket.clone(),
            what: format!("{e}; is the daemon of another version?"),
        })
    }

    /// The whole state.
    ///
    /// # Errors
    /// [`ClientError`].
    pub fn status(&mut self) -> Result<Status, ClientError> {
        Ok(self.call::<StatusReply>("GetStatus", &json!({}))?.status)
    }

    /// All about one workload.
    ///
    /// # Errors
    /// [`ClientError`].
    pub fn explain(&mut self, workload: &str) -> Result<Explanation, ClientError> {
        Ok(self
            .call::<ExplainReply>("Explain", &json!({"workload": workload}))?
            .explanation)
    }

    /// Planned trials.
    ///
    /// # Errors
    /// [`ClientError`].
    pub fn plan(&mut self) -> Result<Plan, ClientError> {
        Ok(self.call::<PlanReply>("GetPlan", &json!({}))?.plan)
    }

    /// Undoes one change.
    ///
    /// # Errors
    /// [`ClientError`].
    pub fn undo(&mut self, action: u64) -> Result<(), ClientError> {
        self.call::<Empty>("Undo", &json!({"action": action})).map(|_| ())
    }

    /// Undoes everything; returns what was in force.
    ///
    /// # Errors
    /// [`ClientError`].
    pub fn undo_all(&mut self) -> Result<Vec<u64>, ClientError> {
        Ok(self.call::<ActionsReply>("UndoAll", &json!({}))?.actions)
    }

    /// Sets the switch; off undoes everything. Returns when the daemon has taken the request.
    ///
    /// # Errors
    /// [`ClientError`].
    pub fn switch(&mut self, on: bool) -> Result<Switched, ClientError> {
        self.call("Switch", &json!({"on": on}))
    }

    /// Starts no new trial.
    ///
    /// # Errors
    /// [`ClientError`].
    pub fn pause(&mut self) -> Result<(), ClientError> {
        self.call::<Empty>("Pause", &json!({})).map(|_| ())
    }

    /// Goes on.
    ///
    /// # Errors
    /// [`ClientError`].
    pub fn resume(&mut self) -> Result<(), ClientError> {
        self.call::<Empty>("Resume", &json!({})).map(|_| ())
    }

    /// Reads the configuration again; returns what needs a restart.
    ///
    /// # Errors
    /// [`ClientError`].
    pub fn reload(&mut self) -> Result<Vec<String>, ClientError> {
        Ok(self.call::<NotesReply>("Reload", &json!({}))?.notes)
    }

    /// The log since that line, without waiting.
    ///
    /// # Errors
    /// [`ClientError`].
    pub fn story(&mut self, since: u64) -> Result<StoryPart, ClientError> {
        self.call("Follow", &json!({"since": since}))
    }

    /// Passes each part of the log to `each`, until it returns false or the daemon ends.
    ///
    /// # Errors
    /// [`ClientError`].
    pub fn follow(mut self, since: u64, mut each: impl FnMut(StoryPart) -> bool) -> Result<(), ClientError> {
        self.send("Follow", &json!({"since": since}), true)?;
        loop {
            let (answer, more) = self.receive()?;
            let part = self.understood(answer)?;
            if !each(part) || !more {
                return Ok(());
            }
        }
    }
}

/// Why nothing more comes. A socket timeout reads as "would block".
fn lost(socket: PathBuf, source: std::io::Error) -> ClientError {
    match source.kind() {
        ErrorKind::WouldBlock | ErrorKind::TimedOut => ClientError::Silent(socket),
        _ => ClientError::Broken { socket, source },
    }
}

fn refusal(socket: &Path, error: &str, parameters: &Value) -> ClientError {
    let text = |key: &str| {
        parameters
            .get(key)
            .and_then(Value::as_str)
            .unwrap_or_default()
            .to_owned()
    };
    let list = |key: &str| {
        parameters
            .get(key)
            .and_then(Value::as_array)
            .cloned()
            .unwrap_or_default()
    };
    match error.strip_prefix("io.homeostat.").unwrap_or_default() {
        "PermissionDenied" => ClientError::NotAllowed { needs: text("needs") },
        "WorkloadNotFound" => ClientError::WorkloadNotFound {
            workload: text("workload"),
            near: list("near")
                .iter()
                .filter_map(Value::as_str)
                .map(str::to_owned)
                .collect(),
            ambiguous: parameters.get("ambiguous") == Some(&Value::Bool(true)),
        },
        "ActionNotFound" => ClientError::ActionNotFound {
            action: parameters
                .get("action")
                .and_then(Value::as_u64)
                .unwrap_or_default(),
            in_force: list("in_force").iter().filter_map(Value::as_u64).collect(),
        },
        "BadConfiguration" => ClientError::BadConfiguration(text("message")),
        "Busy" => ClientError::Busy(text("reason")),
        _ => ClientError::Protocol {
            socket: socket.to_owned(),
            what: format!("{error} {parameters}"),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_daemon_that_says_nothing_is_told_from_a_broken_connection() {
        let silent = lost("/run/s".into(), ErrorKind::WouldBlock.into());
        assert!(matches!(silent, ClientError::Silent(_)));
        assert!(
            silent.to_string().contains("has not answered for 15 s"),
            "{silent}"
        );
        let broken = lost("/run/s".into(), ErrorKind::ConnectionReset.into());
        assert!(matches!(broken, ClientError::Broken { .. }));
    }
}
