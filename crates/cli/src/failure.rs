//! How a command can fail, and the exit code that scripts rely on.

use crate::terminal::Terminal;
use homeostat_daemon::client::ClientError;
use std::error::Error;
use std::process::ExitCode;

/// Kind of failure; the number is the exit code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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
}

/// A failure, or the quiet end of a reader.
#[derive(Debug)]
pub enum Failure {
    /// Something to report.
    Report(Kind, String),
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
            if let Some(io) = e.downcast_ref::<std::io::Error>()
                && io.kind() == std::io::ErrorKind::PermissionDenied
            {
                kind = Kind::Permission;
            }
            cause = e.source();
        }
        let mut message = error.to_string();
        if kind == Kind::Permission && !message.contains("hint:") {
            message.push_str("\n  hint: run it as root");
        }
        Self::Report(kind, message)
    }

    /// Says it on standard error.
    pub fn report(&self, terminal: &Terminal) {
        if let Self::Report(_, message) = self {
            terminal.complain(message);
        }
    }

    /// The exit code.
    pub fn exit_code(&self) -> ExitCode {
        match self {
            Self::Report(kind, _) => ExitCode::from(*kind as u8),
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
            ClientError::BadConfiguration(_)
            | ClientError::Busy(_)
            | ClientError::Protocol { .. }
            | ClientError::Broken { .. } => Kind::Failed,
        };
        Self::Report(kind, e.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
