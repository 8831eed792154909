//! Meters that count useful work without touching the program: counters of the program, the kernel and the processor.
//!
//! A helper process opens and parses everything that a workload can mount, write or answer ([`service`]). Meters that
//! count inside a program are in `homeostat-probes`, behind the same traits.

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

/// A meter kind: finds the meters of a workload and opens them.
pub trait MeterKind {
    /// Meters of this kind that could count the workload's work. Refusals carry the remedy. Must be cheap (a few
    /// milliseconds) and must not disturb the workload.
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
    /// Log of how a meter was found, for people, if it took a search.
    fn story(&self, _workload: &Workload, _id: &MeterId) -> Option<String> {
        None
    }
}

/// An open meter.
pub trait Meter {
    /// Cumulative count of work since a fixed moment. A lower value than before (restart, wrap) makes the sensor drop
    /// that interval. `workload` is the present state: processes may have come and gone since the opening.
    ///
    /// # Errors
    /// `Busy`: unreadable for a moment. `Vanished`, or any error with [`Meter::is_over`]: final, and the sensor closes
    /// the meter. Other errors may pass as well. The sensor closes a meter that gives only errors for minutes.
    fn read(&mut self, workload: &Workload) -> Result<f64, PlatformError>;
    /// Whether its last error is final.
    fn is_over(&self) -> bool {
        false
    }
    /// Releases resources of processes that left the workload. Called at each scan, even if nobody reads the meter.
    fn forget_ended(&mut self, workload: &Workload) {
        let _ = workload;
    }
    /// Share of the time before the last reading that was really counted, 0..=1. The rest of that reading is an
    /// estimate. `None`: too little was counted, and the reading is invalid for the time since the one before.
    fn counted(&self) -> Option<f64> {
        Some(1.0)
    }
    /// Largest age of counts in the last reading. Zero: all are newer than the reading before.
    fn lag(&self) -> Nanoseconds {
        Nanoseconds::ZERO
    }
}

/// Counters that programs publish, those closest to the work first.
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

/// The kernel's counters for a program: calls, and traffic of its sockets.
pub fn by_kernel() -> Vec<Box<dyn MeterKind>> {
    vec![Box::new(kernel::Kernel), Box::new(sockets::Sockets)]
}

/// The processor's counters.
pub fn by_processor() -> Box<dyn MeterKind> {
    Box::new(processor::Processor)
}

/// Restricts a kind to processes of the workload's own user and of root.
pub fn of_its_user(kind: Box<dyn MeterKind>) -> Box<dyn MeterKind> {
    Box::new(owned::Owned(kind))
}
