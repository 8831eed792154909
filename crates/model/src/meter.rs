//! How useful work is counted.

use crate::units::Nanoseconds;
use crate::{text_id, words};
use serde::{Deserialize, Serialize};

text_id!(
    /// Name of a way to count a workload's work, e.g. `progress`, `redis`, `uprobe:ReadyForQuery`, `io.write_calls`.
    MeterId
);

words!(
    /// How close a meter is to the work itself; lower is preferred.
    MeterClass {
        /// The program's own counter of finished work (progress file, Redis `INFO`, a Prometheus counter).
        Application = "application",
        /// Executions of a chosen function or static probe (uprobe, USDT).
        Probe = "probe",
        /// Kernel work that tends to follow useful work (read/write calls and bytes, voluntary switches, sockets).
        Kernel = "kernel",
        /// Executions of places in the program's code that were found to follow its work, without its help.
        Points = "points",
        /// Instructions and cycles. Never judges alone: the instruction count may change with the treatment.
        Hardware = "hardware",
    }
);

/// A meter that may be opened for a workload, or the reason why it can not.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MeterCandidate {
    /// Name.
    pub id: MeterId,
    /// Kind.
    pub class: MeterClass,
    /// What one count is: `operation`, `query`, `write call`.
    pub unit: String,
    /// Cost to the workload of one count; zero when reading costs the workload nothing.
    pub cost_per_count: Nanoseconds,
    /// After a change it may go on so long to tell some of the work by what was counted before it, so who compares leaves as long out. Zero:
    /// what is told of a time was counted in it.
    #[serde(default, skip_serializing_if = "is_none_at_all")]
    pub lag: Nanoseconds,
    /// Why it can not be used here, with the remedy; `None` when it can be opened.
    pub refused: Option<String>,
}

/// Work counted between two samples.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MeterReading {
    /// Which meter.
    pub meter: MeterId,
    /// Units of work done since the previous reading of this meter; never negative (a counter that went
    /// back, wrapped or restarted yields no reading).
    #[serde(with = "crate::units::any_number")]
    pub work: f64,
    /// Time between the two readings of this meter.
    pub interval: Nanoseconds,
    /// Share of the workload's CPU time in it during which work was really counted, 0 to 1; the rest of `work` is estimated.
    #[serde(default = "all_of_it", skip_serializing_if = "is_all_of_it")]
    pub counted: f64,
    /// Some of it may be told by what was counted so long before its end, so who compares leaves as long out after a change.
    #[serde(default, skip_serializing_if = "is_none_at_all")]
    pub lag: Nanoseconds,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde asks for a reference")]
fn is_none_at_all(time: &Nanoseconds) -> bool {
    *time == Nanoseconds::ZERO
}

/// Counted all the time.
fn all_of_it() -> f64 {
    1.0
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde asks for a reference")]
fn is_all_of_it(share: &f64) -> bool {
    *share >= 1.0
}
