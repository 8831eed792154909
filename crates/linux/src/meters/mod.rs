//! How useful work is counted, one file per kind of meter. To add one: a file here, a line in [`kinds`].

use crate::Root;
use homeostat_model::{MeterCandidate, MeterId, Workload};
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
    fn open(&mut self, root: &Root, workload: &Workload, id: &MeterId) -> Result<Box<dyn Meter>, PlatformError>;
}

/// An open meter.
pub trait Meter {
    /// Cumulative count of work since some fixed moment. A value that is lower than the one before (restart,
    /// wrap) makes the sensor drop that interval. `workload` is its present state: processes may have come
    /// and gone since the meter was opened.
    ///
    /// # Errors
    /// `Vanished` when it can no longer be read: the sensor closes it.
    fn read(&mut self, workload: &Workload) -> Result<f64, PlatformError>;
}
