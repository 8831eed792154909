//! Helper processes: everything that a workload can mount, write, replace or answer is opened and parsed there, and never
//! by the daemon.
//!
//! * At its start, with one thread, the daemon forks a *mother*. The mother keeps one socket and nothing else, touches
//!   nothing of a workload, and forks helpers when the daemon asks for one.
//! * A helper is a pair of processes for one *domain* (the user whom its workloads belong to). The *opener* finds, checks
//!   and opens files and connects to servers. It has the four capabilities that this takes, and no other. The *speaker*
//!   has no capability, may open nothing, and gets descriptors from the opener. It holds the meters, parses what they read,
//!   and answers the daemon with numbers and sentences.
//! * Both have a table of descriptors of their own with their sockets only, a filter of system calls, and limits of
//!   memory, CPU time and descriptors. No lock, journal or socket of the daemon is open there, and both end with it.
//! * The daemon asks by messages of JSON, and waits for [`PATIENCE`] at most. The answer may come yet for [`GRACE`], without
//!   anybody waiting for it. A helper that is later or breaks off is killed and abandoned, and the domain rests. Its meters are opened anew in the next helper, at a lower count, by which the
//!   sensor drops one interval. One that cannot even be killed (its file system does not answer) is *stuck*. A domain with
//!   [`STUCK_OF_ONE`] of them, or any when there are [`STUCK_MAX`], is read no more until one comes back; the others are.
//! * Files with code are found, opened and looked into by a helper that is made for that one question ([`call_apart`]). The
//!   daemon gets the file itself only where it lies on storage that the machine answers for.
//! * Where a program has made no mother, the first use forks one: so do tests and commands for a person.
//!
//! What opener and speaker do is a [`Service`] of the program's.

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
/// An answer that is late may come yet for so long: a machine that is busy or slow takes seconds (measured: an emulated one of
/// two CPUs answers within 2 s). Meanwhile nobody waits for it, and the domain is not read.
pub const GRACE: Duration = Duration::from_secs(5);
/// Most helpers that cannot be killed.
pub const STUCK_MAX: usize = 4;
/// Most of one domain.
pub const STUCK_OF_ONE: usize = 2;

/// What the two processes of a helper do. A program has one.
#[derive(Debug)]
pub struct Service {
    /// The opener serves its speaker on this line, for the processes of this domain, until that ends.
    pub open: fn(&Line, Domain) -> Result<(), Errno>,
    /// The speaker serves the daemon on the first line, and asks its opener by the second, until the daemon ends.
    pub speak: fn(&Line, Line) -> Result<(), Errno>,
}
