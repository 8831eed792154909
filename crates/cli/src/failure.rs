//! How a command can fail, and the exit code that scripts rely on.

use crate::terminal::Terminal;
use homeostat_daemon::api::SCHEMA;
use homeostat_daemon::client::ClientError;
use homeostat_daemon::settings::{SettingsError, SettingsErrors};
use serde::Serialize;
use std::error::Error;
use std::process::ExitCode;

/// Kind of failure; the number is the exit code.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// Anything else.
    Failed = 1,
    /// The command line or the configuration makes no sense.
    Usage = 2,
    /// No daemon runs.
    NotRunning = 3,
    /// No such workload, change or experiment.
    NotFound = 4,
    /// A privilege is missing.
    Permission = 5,
    /// The loop of the daemon hangs, so the state that was shown is old.
    Hangs = 6,
}

/// A failure, or the quiet end of a reader.
#[derive(Debug)]
pub enum Failure {
    /// Something to report.
    Report(Kind, String),
    /// The configuration is not valid: every complaint with its place.
    Configuration(SettingsErrors),
    /// Whoever read our output has gone away: not our problem.
    ReaderGone,
}

impl Failure {
    /// A failure without a better kind.
    pub fn failed(message: impl Into<String>) -> Self {
        Self::Report(Kind::Failed, message.into())
    }

    /// An error, with its kind found from its causes.
    pub fn from_error(error: &(dyn Error + 'static)) -> Self {
        let mut cause: Option<&(dyn Error + 'static)> = Some(error);
        let mut kind = Kind::Failed;
        while let Some(e) = cause {
            if let Some(io) = e.downcast_ref::<std::io::Error>() {
                if io.kind() == std::io::ErrorKind::PermissionDenied {
                    kind = Kind::Permission;
                }
            }
            cause = e.source();
        }
        let mut message = error.to_string();
        if kind == Kind::Permission && !message.contains("hint:") {
            message.push_str("\n  hint: run it as root");
        }
        Self::Report(kind, message)
    }

    /// Says it on standard error: text, or with `--json` one line with an object ([`Said`]).
    pub fn report(&self, terminal: &Terminal) {
        match self {
            Self::Report(kind, message) => terminal.complain(&Said::error(*kind, message, &[])),
            Self::Configuration(errors) => {
                terminal.complain(&Said::error(Kind::Usage, &errors.to_string(), &errors.0));
            }
            Self::ReaderGone => {}
        }
    }

    /// The exit code.
    pub fn exit_code(&self) -> ExitCode {
        match self {
            Self::Report(kind, _) => ExitCode::from(*kind as u8),
            Self::Configuration(_) => ExitCode::from(Kind::Usage as u8),
            Self::ReaderGone => ExitCode::SUCCESS,
        }
    }
}

impl From<ClientError> for Failure {
    fn from(e: ClientError) -> Self {
        let kind = match &e {
            ClientError::NotRunning(_) => Kind::NotRunning,
            ClientError::Denied(_) | ClientError::NotAllowed { .. } => Kind::Permission,
            ClientError::WorkloadNotFound { .. } | ClientError::ActionNotFound { .. } => Kind::NotFound,
            ClientError::BadConfiguration(_) => Kind::Usage,
            ClientError::Busy(_)
            | ClientError::Protocol { .. }
            | ClientError::Silent(_)
            | ClientError::Broken { .. } => Kind::Failed,
        };
        Self::Report(kind, e.to_string())
    }
}

/// What stands on standard error with `--json`, one object a line:
/// `{"schema": 1, "error": {"kind": …, "exit_code": …, "message": …, "hint": …, "places": […]}}`, or with `warning`
/// instead of `error` where the command goes on.
#[derive(Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub struct Said<'a> {
    schema: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<Problem<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    warning: Option<Problem<'a>>,
    /// The same for people.
    #[serde(skip)]
    text: &'a str,
}

/// An error or a warning in JSON.
#[derive(Debug, Serialize)]
struct Problem<'a> {
    /// `failed`, `usage`, `not_running`, `not_found`, `permission` or `hangs`; absent in a warning.
    #[serde(skip_serializing_if = "Option::is_none")]
    kind: Option<Kind>,
    /// Exit code of the program; absent in a warning.
    #[serde(skip_serializing_if = "Option::is_none")]
    exit_code: Option<u8>,
    /// What is wrong.
    message: String,
    /// What to do about it; null when nothing is known.
    hint: Option<String>,
    /// Where in the configuration, as in `homeostat config check --json`; absent when it is not about that.
    #[serde(skip_serializing_if = "<[_]>::is_empty")]
    places: &'a [SettingsError],
}

impl<'a> Said<'a> {
    /// Why the command fails.
    pub fn error(kind: Kind, text: &'a str, places: &'a [SettingsError]) -> Self {
        Self {
            schema: SCHEMA,
            error: Some(Problem {
                kind: Some(kind),
                exit_code: Some(kind as u8),
                ..Problem::new(text, places)
            }),
            warning: None,
            text,
        }
    }

    /// Something beside the output.
    pub fn warning(text: &'a str) -> Self {
        Self {
            schema: SCHEMA,
            error: None,
            warning: Some(Problem::new(text, &[])),
            text,
        }
    }

    /// For people, after `homeostat: `.
    pub fn text(&self) -> String {
        match self.warning {
            Some(_) => format!("warning: {}", self.text),
            None => self.text.to_owned(),
        }
    }
}

impl<'a> Problem<'a> {
    /// Splits the hint from the text. Complaints about the configuration have one each, in `places`.
    fn new(text: &str, places: &'a [SettingsError]) -> Self {
        let (message, hint) = match text.split_once("\n  hint: ") {
            Some((message, hint)) if places.is_empty() => (message, Some(hint.to_owned())),
            _ if places.is_empty() => (text, None),
            _ => ("the configuration is not valid", None),
        };
        Self {
            kind: None,
            exit_code: None,
            message: message.to_owned(),
            hint,
            places,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_have_one_shape_in_json() {
        let json = |said: Said<'_>| serde_json::to_value(said).unwrap();
        assert_eq!(
            json(Said::error(
                Kind::NotFound,
                "no such thing\n  hint: look again",
                &[]
            )),
            serde_json::json!({"schema": 1, "error": {
                "kind": "not_found", "exit_code": 4, "message": "no such thing", "hint": "look again"
            }})
        );
        assert_eq!(
            json(Said::warning("careful")),
            serde_json::json!({"schema": 1, "warning": {"message": "careful", "hint": null}})
        );
        let place = SettingsError {
            file: "f".into(),
            line: 1,
            column: 2,
            key: "k".into(),
            value: "v".into(),
            problem: "p".into(),
            remedy: "r".into(),
        };
        let error = json(Said::error(Kind::Usage, "f:1:2: k = v: p\n  hint: r", &[place]));
        assert_eq!(error["error"]["places"][0]["remedy"], "r");
        assert_eq!(error["error"]["hint"], serde_json::Value::Null);
    }

    #[test]
    fn a_missing_permission_is_found_below_other_errors() {
        #[derive(Debug)]
        struct Outer(std::io::Error);
        impl std::fmt::Display for Outer {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("outer")
            }
        }
        impl Error for Outer {
            fn source(&self) -> Option<&(dyn Error + 'static)> {
                Some(&self.0)
            }
        }
        let denied = Outer(std::io::ErrorKind::PermissionDenied.into());
        assert!(
            matches!(Failure::from_error(&denied), Failure::Report(Kind::Permission, m) if m.contains("root"))
        );
        let other = Outer(std::io::ErrorKind::NotFound.into());
        assert!(matches!(Failure::from_error(&other), Failure::Report(Kind::Failed, m) if m == "outer"));
    }
}
