//! Helper processes open and parse everything that a workload can mount, write, replace or answer, not the daemon.
//!
//! * At its start, with one thread, the daemon forks a *mother* with one socket, who touches no workload and forks
//!   helpers.
//! * A helper is a pair of processes for one *domain* (a user). The *opener* finds, checks and opens files and connects
//!   to servers, with the four capabilities for that. The *speaker* has no capability, may open nothing, and gets
//!   descriptors from the opener. It holds the meters, parses data, and answers with numbers and sentences.
//! * Both have only their sockets open (no lock or journal of the daemon), a filter of system calls, and limits of
//!   memory, CPU time and descriptors. Both end with the daemon.
//! * The daemon waits at most [`PATIENCE`]; an answer may still come until [`GRACE`]. A later or broken helper is
//!   killed and its domain rests. The next helper opens the meters anew, and the sensor drops one interval.
//! * A helper that cannot be killed (its file system hangs) is *stuck*. A domain with [`STUCK_OF_ONE`] of them, or any
//!   domain at [`STUCK_MAX`], is not read until one returns.
//! * A helper for one request ([`call_apart`]) opens files with code. The daemon gets the file only from local storage.
//! * The mother also forks the memory [`canary`], a process that measures the machine's memory.
//! * Opener and speaker run the program's [`Service`]. Without a mother (tests, commands) the first use forks one.

pub mod canary;
mod domain;
mod mother;
mod pool;
pub mod storage;
mod wire;

pub use domain::Domain;
pub use mother::confine_speaker;
pub use pool::{Pool, Refusal, call, call_apart, refused, start, tell};
pub use wire::Line;

use rustix::io::Errno;
use std::time::Duration;

/// Longest wait for an answer of a helper. Servers have 400 ms for theirs.
pub const PATIENCE: Duration = Duration::from_millis(500);
/// A late answer may come within this time, without a wait; meanwhile the domain is not read. A busy or slow machine
/// takes seconds (measured: an emulated one of two CPUs answers within 2 s).
pub const GRACE: Duration = Duration::from_secs(5);
/// Most helpers that cannot be killed.
pub const STUCK_MAX: usize = 4;
/// Most helpers of one domain that cannot be killed.
pub const STUCK_OF_ONE: usize = 2;

/// Work of the two processes of a helper. A program has one service.
#[derive(Debug)]
pub struct Service {
    /// The opener serves its speaker on this line, for the processes of this domain, until the line ends.
    pub open: fn(&Line, Domain) -> Result<(), Errno>,
    /// The speaker serves the daemon on the first line, and its opener serves it on the second, until the daemon ends.
    pub speak: fn(&Line, Line) -> Result<(), Errno>,
}
