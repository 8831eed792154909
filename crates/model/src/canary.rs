//! Readings of the memory canary: a process of homeostat that measures how fast the machine's memory is in a trial.

use crate::units::{Bytes, Nanoseconds};
use serde::{Deserialize, Serialize};

/// What the canary did since the previous sample.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CanaryReading {
    /// Dependent loads, each of which misses the caches. Zero while its memory is being filled.
    pub loads: u64,
    /// CPU time of these loads.
    pub loading: Nanoseconds,
    /// CPU time of its process.
    pub cpu: Nanoseconds,
    /// Resident memory of its process.
    pub resident: Bytes,
}
