//! The report data for `homeostat report` and its `--json`: what homeostat found, tried, gained and rejected. Sources:
//! the history and a running daemon. The same rules as in [`crate::api`] hold.

use crate::api::{Effect, Explanation, SCHEMA, Status, StoryLine};
use crate::report::PastExperiment;
use crate::wiring::{PastError, open_past};
use homeostat_engine::retrace::retrace;
use homeostat_model::{ActionId, Bytes, ExperimentRecord, Verdict, WorkloadId};
use homeostat_store::History;
pub use homeostat_store::history::DecisionRecord;
use homeostat_store::history::{self, ExperimentFilter, Filter};
use serde::{Deserialize, Serialize};
use std::path::Path;

const DECISIONS_MAX: u32 = 400;
const WINDOWS_MAX: u32 = 4000;

/// Everything about the past and the present.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Dossier {
    /// Version of these shapes.
    pub schema: u32,
    /// Version of the program that put it together.
    pub version: String,
    /// When, seconds since the epoch.
    pub at_unix: u64,
    /// The daemon's state; absent when none runs.
    pub status: Option<Status>,
    /// Its explanation of each sampled workload.
    pub explanations: Vec<Explanation>,
    /// Its latest lines, oldest first.
    pub story: Vec<StoryLine>,
    /// Experiments, newest first.
    pub experiments: Vec<Tried>,
    /// Windows of observation, oldest first.
    pub windows: Vec<Window>,
    /// Decisions, oldest first.
    pub decisions: Vec<DecisionRecord>,
    /// Unreadable parts, with the reason.
    pub notes: Vec<String>,
}

/// An experiment with everything that its verdict rests on.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Tried {
    /// The experiment, with its blocks.
    #[serde(flatten)]
    pub past: PastExperiment,
    /// The change that was tried; the number for `homeostat undo` while it is in force.
    pub action: ActionId,
    /// Results of a trial of several workloads, by workload.
    pub members: Vec<Member>,
    /// The recomputed estimate after each block. Absent if it differs from the record, and for staged rollouts.
    pub trace: Option<Vec<Known>>,
}

/// Result of a trial of several workloads for one of them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Member {
    /// The workload.
    pub workload: WorkloadId,
    /// Its recorded verdict.
    pub verdict: Verdict,
    /// Its own effect.
    pub effect: Option<Effect>,
}

/// The estimate after a block.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Known {
    /// Estimate with its interval.
    pub effect: Effect,
    /// Evidence for a gain (e-value).
    pub evidence: f64,
}

/// A window of observation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Window {
    /// The workload.
    pub workload: String,
    /// Start.
    pub started_unix: u64,
    /// Length.
    pub length_s: f64,
    /// The meter that counted work, if one was open.
    pub meter: Option<String>,
    /// Work per second, if it was counted.
    pub rate: Option<f64>,
    /// CPUs used.
    pub cpus: f64,
    /// Share of the time that its threads waited for a CPU.
    pub waited: f64,
    /// Resident memory at the end.
    pub resident_bytes: u64,
    /// Its part in large pages, if known.
    pub huge_bytes: Option<u64>,
}

impl Dossier {
    /// One without any past or present.
    pub fn empty(at_unix: u64) -> Self {
        Self {
            schema: SCHEMA,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            at_unix,
            status: None,
            explanations: Vec::new(),
            story: Vec::new(),
            experiments: Vec::new(),
            windows: Vec::new(),
            decisions: Vec::new(),
            notes: Vec::new(),
        }
    }

    /// Adds experiments with blocks, and decisions, from the history. `policy` recomputes the way to each verdict.
    ///
    /// # Errors
    /// As [`crate::wiring::past`].
    pub fn add_past(
        &mut self,
        state_directory: &Path,
        policy: &homeostat_engine::Policy,
        experiments: u32,
    ) -> Result<(), PastError> {
        let history: History = open_past(state_directory)?;
        let records = history.experiments(&ExperimentFilter {
            limit: experiments,
            ..ExperimentFilter::default()
        })?;
        self.experiments = records.iter().map(|r| tried(r, policy)).collect();
        let mut windows = history.windows(&Filter {
            limit: WINDOWS_MAX,
            ..Filter::default()
        })?;
        windows.reverse();
        self.windows = windows.iter().map(Into::into).collect();
        let mut decisions = history.decisions(&Filter {
            limit: DECISIONS_MAX,
            ..Filter::default()
        })?;
        decisions.reverse();
        self.decisions = decisions;
        Ok(())
    }
}

fn tried(record: &ExperimentRecord, policy: &homeostat_engine::Policy) -> Tried {
    Tried {
        past: record.into(),
        action: record.action,
        members: record
            .members
            .iter()
            .map(|m| Member {
                workload: m.workload.clone(),
                verdict: m.verdict,
                effect: m.effect.map(Into::into),
            })
            .collect(),
        trace: retrace(record, &policy.trial).map(|trace| {
            trace
                .into_iter()
                .map(|t| Known {
                    effect: t.effect.into(),
                    evidence: t.evidence,
                })
                .collect()
        }),
    }
}

impl From<&history::Window> for Window {
    fn from(w: &history::Window) -> Self {
        let (started_unix, w) = (w.started_unix, &w.seen);
        let seconds = w.length.as_secs_f64();
        let per_second = |x: f64| if seconds > 0.0 { x / seconds } else { 0.0 };
        Self {
            workload: w.workload.to_string(),
            started_unix,
            length_s: seconds,
            meter: w.meter.as_ref().map(ToString::to_string),
            rate: Some(per_second(w.work)).filter(|r| r.is_finite() && w.meter.is_some()),
            cpus: per_second(w.cpu.as_secs_f64()),
            waited: per_second(w.runqueue_wait.as_secs_f64()),
            resident_bytes: w.resident.0,
            huge_bytes: w.huge.map(|Bytes(b)| b),
        }
    }
}
