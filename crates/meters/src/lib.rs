//! What counts useful work without touching the program: what the program itself publishes, what the kernel counts for it, and
//! the processor's own counters.
//!
//! What a workload can mount, write or answer is opened and parsed by a helper process ([`service`]). Kinds of meters that count
//! inside a program are in `homeostat-probes`, behind the same traits.

pub mod bounded;
pub mod code_file;
pub mod code_map;
pub mod common;
mod connection;
pub mod cpu_time;
pub mod elf;
pub mod elf64;
pub mod go;
mod jvm;
pub mod kernel;
mod listeners;
mod memcached;
mod network;
pub mod owned;
pub mod parsers;
mod processor;
mod progress;
pub mod prometheus;
pub mod ranges;
mod redis;
mod remote;
mod servers;
pub mod service;
mod settings;
pub mod sockets;
mod spans;
pub mod tasks;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
mod unwind;
pub mod waits;

pub use settings::{ConfiguredMeter, MeterSettings, PROBE_COST_MAX, PointsWish};
pub use spans::{Follower, Quantile, SpanBlocks, Spans, SpansReport};

use homeostat_kernel::Root;
use homeostat_model::{MeterCandidate, MeterId, Nanoseconds, Workload};
use homeostat_platform::PlatformError;

/// One kind of meter: finds out whether it fits a workload, and opens it.
pub trait MeterKind {
    /// Which meters of this kind could count the workload's work; refusals carry the remedy. Must be cheap
    /// (a few milliseconds) and must not disturb the workload.
    fn find(&mut self, root: &Root, workload: &Workload) -> Vec<MeterCandidate>;
    /// Opens one of them.
    ///
    /// # Errors
    /// `Vanished`, `Denied`, `Unsupported`.
    fn open(
        &mut self,
        root: &Root,
        workload: &Workload,
        id: &MeterId,
    ) -> Result<Box<dyn Meter>, PlatformError>;
    /// How a meter of this kind came to be, where that took more than a look: for people.
    fn story(&self, _workload: &Workload, _id: &MeterId) -> Option<String> {
        None
    }
}

/// An open meter.
pub trait Meter {
    /// Cumulative count of work since some fixed moment. A value that is lower than the one before (restart,
    /// wrap) makes the sensor drop that interval. `workload` is its present state: processes may have come
    /// and gone since the meter was opened.
    ///
    /// # Errors
    /// `Busy` when it cannot be read for a moment; the sensor closes a meter that says nothing else for minutes. `Vanished`, or any
    /// other when [`Meter::is_over`]: it can be read no more, and why; the sensor closes it. Any other may pass as well: the sensor
    /// closes a meter that tells nothing else for a while.
    fn read(&mut self, workload: &Workload) -> Result<f64, PlatformError>;
    /// Whether its last error was its last word: nothing will ever be read of it again.
    fn is_over(&self) -> bool {
        false
    }
    /// Lets go of what it holds of processes that the workload has no more. Told at each scan, also where nobody reads it.
    fn forget_ended(&mut self, workload: &Workload) {
        let _ = workload;
    }
    /// Share of the time before the last reading in which work was really counted, 0..=1; the rest of that reading is estimated
    /// from it. `None`: in too little of it for the reading to say anything of the time since the one before.
    fn counted(&self) -> Option<f64> {
        Some(1.0)
    }
    /// How long before the last reading some of what tells it may have been counted; zero: it was counted since the reading before.
    fn lag(&self) -> Nanoseconds {
        Nanoseconds::ZERO
    }
}

/// What programs publish of themselves, those closest to the work first.
pub fn published(settings: &MeterSettings) -> Vec<Box<dyn MeterKind>> {
    let told: Vec<Box<dyn MeterKind>> = vec![
        Box::new(remote::Remote::new(remote::Kind::Progress, settings)),
        Box::new(remote::Remote::new(remote::Kind::Redis, settings)),
        Box::new(remote::Remote::new(remote::Kind::Memcached, settings)),
        Box::new(remote::Remote::new(remote::Kind::Prometheus, settings)),
        Box::new(jvm::Jvm),
    ];
    told.into_iter().map(of_its_user).collect()
}

/// What the kernel counts for a program: calls, and messages of its sockets.
pub fn by_kernel() -> Vec<Box<dyn MeterKind>> {
    vec![Box::new(kernel::Kernel), Box::new(sockets::Sockets)]
}

/// What the processor counts.
pub fn by_processor() -> Box<dyn MeterKind> {
    Box::new(processor::Processor)
}

/// A kind that sees the processes of the workload's user only.
pub fn of_its_user(kind: Box<dyn MeterKind>) -> Box<dyn MeterKind> {
    Box::new(owned::Owned(kind))
}
