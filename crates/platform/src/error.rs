//! Faults of the machine, typed by what the caller should do.

use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// A fault of a sensor or effector. The variant tells the caller what to do, not only what happened.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
pub enum PlatformError {
    /// This machine cannot do it: stop proposing it here.
    #[error("{what} is not supported on this machine: {why}")]
    Unsupported {
        /// What was asked for.
        what: String,
        /// Why it is impossible, with the remedy if there is one.
        why: String,
    },
    /// A privilege is missing: tell the operator, once.
    #[error("{what}: permission denied\n  hint: {needs}")]
    Denied {
        /// What was asked for, with the path or call.
        what: String,
        /// What privilege or setting would allow it.
        needs: String,
    },
    /// The process or workload is gone. Normal: end quietly.
    #[error("{target} no longer exists")]
    Vanished {
        /// Who is gone.
        target: String,
    },
    /// Somebody else changed it: the person wins, give up ownership.
    #[error("{what} was changed by somebody else: expected {expected}, found {found}")]
    Conflict {
        /// The setting.
        what: String,
        /// What we had written.
        expected: String,
        /// What is there now.
        found: String,
    },
    /// The kernel refused a value that should have been right: a bug in our range check, or a new kernel.
    #[error("{what}: the kernel refused {value}: {errno}")]
    Rejected {
        /// The file or call.
        what: String,
        /// What was written.
        value: String,
        /// The error in words.
        errno: String,
    },
    /// The kernel's or a program's text was not understood: keep the line for the report.
    #[error("{}: not understood: {line:?}", path.display())]
    Malformed {
        /// Which file.
        path: PathBuf,
        /// The line.
        line: String,
    },
    /// Not now: free memory, pressure or another holder stands in the way; try again later.
    #[error("{what} is not possible now: {why}")]
    Busy {
        /// What was asked for.
        what: String,
        /// What stands in the way.
        why: String,
    },
}
