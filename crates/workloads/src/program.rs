//! What the command lines of all programs have in common.

use crate::chain::ChainError;
use crate::session::SECONDS_MAX;
use crate::{Duty, FileError, MemoryError, Plan, SessionError};
use clap::{Args, Parser};
use std::fmt::Display;
use std::io;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

/// How long it runs, and what it tells meanwhile.
#[derive(Debug, Args)]
pub struct Timing {
    /// Time to run, in seconds, after everything has been prepared.
    #[arg(value_parser = clap::value_parser!(u64).range(1..=SECONDS_MAX))]
    seconds: u64,
    /// Print a line every so many seconds.
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=SECONDS_MAX))]
    report: Option<u64>,
}

impl Timing {
    /// The plan for so many threads.
    #[must_use]
    pub fn plan(&self, threads: usize) -> Plan {
        Plan {
            threads,
            duration: Duration::from_secs(self.seconds),
            report: self.report.map(Duration::from_secs),
        }
    }
}

/// How much of its time a thread works.
#[derive(Debug, Args)]
pub struct Share {
    /// CPU time to use, in percent of one CPU, per thread.
    #[arg(long, value_name = "PERCENT", default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=100))]
    duty: u32,
}

impl Share {
    /// The limit for the calling thread.
    #[must_use]
    pub fn duty(&self) -> Duty {
        Duty::new(self.duty, Duration::ZERO)
    }
}

/// The same, with pauses.
#[derive(Debug, Args)]
pub struct Pausing {
    #[command(flatten)]
    share: Share,
    /// Pause for so many milliseconds after every 100 ms of work, each thread by itself, as a program does that waits for people.
    /// Memory that is used all the time may stay; what lies idle meanwhile may go to swap, or to a reader.
    #[arg(long, value_name = "MS", value_parser = clap::value_parser!(u64).range(1..=60_000))]
    pause: Option<u64>,
}

impl Pausing {
    /// The limit for the calling thread.
    #[must_use]
    pub fn duty(&self) -> Duty {
        Duty::new(self.share.duty, Duration::from_millis(self.pause.unwrap_or(0)))
    }
}

/// Why a program ended before its time.
#[derive(Debug, thiserror::Error)]
pub enum ProgramError {
    /// No memory to work on.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// The memory holds no chain.
    #[error(transparent)]
    Chain(#[from] ChainError),
    /// No file to work on.
    #[error(transparent)]
    File(#[from] FileError),
    /// There is nothing in it.
    #[error("{} is empty: there is nothing to read; name another file or remove it", path.display())]
    Empty {
        /// Which.
        path: PathBuf,
    },
    /// There is too little in it.
    #[error("{} has {bytes} bytes, less than {mib} MiB; name another file or remove it", path.display())]
    Short {
        /// Which.
        path: PathBuf,
        /// What it has.
        bytes: u64,
        /// What it should have.
        mib: u64,
    },
    /// Where this program lies.
    #[error("cannot find this program's own file: {0}")]
    OwnProgram(io::Error),
    /// A child has nothing to look at.
    #[error("cannot look at the files of /: {0}")]
    Child(io::Error),
    /// The run failed.
    #[error(transparent)]
    Session(#[from] SessionError),
}

/// The `main` of a program: parses its arguments, runs it, and says why it could not.
pub fn main_of<A: Parser, E: Display>(name: &str, run: impl FnOnce(&A) -> Result<(), E>) -> ExitCode {
    match run(&A::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{name}: {error}");
            ExitCode::FAILURE
        }
    }
}
