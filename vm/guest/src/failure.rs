//! Why a scenario failed.

use homeostat_platform::PlatformError;
use homeostat_store::JournalError;

/// Why a scenario failed: the sentence is all that the person who reads the log has.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// A promise did not hold.
    #[error("{0}")]
    Broken(String),
    /// The guest itself did not do what was asked of it.
    #[error("{what}: {source}")]
    System {
        /// What was tried.
        what: String,
        /// What the operating system said.
        source: std::io::Error,
    },
    /// A sensor or effector reported a fault where none was expected.
    #[error("{what}: {source}")]
    Platform {
        /// What was tried.
        what: String,
        /// The fault.
        source: PlatformError,
    },
    /// The journal reported a fault where none was expected.
    #[error("journal: {0}")]
    Journal(#[from] JournalError),
    /// What should be JSON is not.
    #[error("JSON: {0}")]
    Json(#[from] serde_json::Error),
}

impl Failure {
    /// For `map_err`: an error of the operating system while this was tried.
    pub fn system(what: impl Into<String>) -> impl FnOnce(std::io::Error) -> Self {
        let what = what.into();
        move |source| Self::System { what, source }
    }

    /// For `map_err`: an error of a system call while this was tried.
    pub fn call(what: impl Into<String>) -> impl FnOnce(rustix::io::Errno) -> Self {
        let what = what.into();
        move |errno| Self::System {
            what,
            source: errno.into(),
        }
    }

    /// For `map_err`: a fault of the platform while this was tried.
    pub fn platform(what: impl Into<String>) -> impl FnOnce(PlatformError) -> Self {
        let what = what.into();
        move |source| Self::Platform { what, source }
    }
}

/// Ends the scenario with a sentence unless the condition holds.
#[macro_export]
macro_rules! ensure {
    ($condition:expr, $($sentence:tt)+) => {
        let holds: bool = $condition;
        if !holds {
            return Err($crate::Failure::Broken(format!($($sentence)+)));
        }
    };
}
