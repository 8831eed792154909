//! What goes into the mind and what comes out: closed enums, so that a new case breaks the build and not the night.

use crate::policy::Policy;
use crate::view::Stage;
use homeostat_model::{
    Action, ActionId, Direction, Effect, ExperimentId, ExperimentRecord, Locality, Machine, MemoryMap,
    MeterCandidate, MeterId, Nanoseconds, Progress, ProvenReader, Snapshot, StrategyId, WindowRecord,
    WorkloadId,
};
use serde::{Deserialize, Serialize};

/// What a fault means for the mind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum FaultKind {
    /// This machine cannot do it.
    Unsupported,
    /// A privilege is missing.
    Denied,
    /// The target is gone.
    Vanished,
    /// Somebody else changed it: the person wins.
    Conflict,
    /// The kernel refused.
    Rejected,
    /// Text was not understood.
    Malformed,
    /// Not now.
    Busy,
    /// The journal could not be written: nothing may be changed.
    Journal,
}

/// A fault of the machine as the mind sees it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fault {
    /// What to make of it.
    pub kind: FaultKind,
    /// The message for people.
    pub text: String,
}

/// What a person asked for.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum OperatorRequest {
    /// Start no new trial; running ones are undone, changes in force stay.
    Pause,
    /// Go on.
    Resume,
    /// Undo one action.
    Undo(ActionId),
    /// Undo one action because somebody else has taken hold of what it set; the sentence says who.
    Yield(ActionId, String),
    /// Undo everything.
    UndoAll,
    /// End: everything is undone, unless it is to be kept.
    Stop {
        /// Leave accepted changes in force.
        keep: bool,
    },
    /// New settings.
    Configure(Box<Policy>),
    /// The machine as probed again: what failed for a passing reason at the start (memory short, a file table full)
    /// may work now.
    Machine(Box<Machine>),
}

/// Everything that can happen to the mind.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Event {
    /// A sample was taken.
    Sampled(Box<Snapshot>),
    /// A sample was due and could not be taken.
    Unseen,
    /// Memory was inspected.
    MemoryInspected(WorkloadId, Result<MemoryMap, Fault>),
    /// The places of threads and memory were inspected.
    LocalityInspected(WorkloadId, Result<Locality, Fault>),
    /// Meters were looked for.
    MetersFound(WorkloadId, Result<Vec<MeterCandidate>, Fault>),
    /// A meter was opened.
    MeterOpened(WorkloadId, MeterId, Result<(), Fault>),
    /// An open meter can be read no more, and is closed. Comes before the sample that found it out.
    MeterLost(WorkloadId, MeterId, Fault),
    /// A slice of an action was carried out; more to do.
    Advanced(ActionId, Direction, Progress),
    /// An action reached the state it was sent to, or cannot. After a failed `Apply` the undo is still owed
    /// unless the journal never took the record (`FaultKind::Journal`, or a refusal before the first slice).
    Settled(ActionId, Direction, Result<Progress, Fault>),
    /// A person asked for something.
    Operator(OperatorRequest),
}

/// A line of the story that the log tells.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Story {
    /// About whom; `None` = the host.
    pub workload: Option<WorkloadId>,
    /// Stage the line belongs to.
    pub stage: Stage,
    /// The sentence.
    pub text: String,
    /// Whether an operator should look at it.
    pub warning: bool,
}

/// A decision to remember.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DecisionRecord {
    /// About whom.
    pub workload: Option<WorkloadId>,
    /// Stage.
    pub stage: Stage,
    /// Sentence.
    pub text: String,
}

/// Everything the mind can ask for. Each carries, or is preceded by, the sentence that justifies it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Command {
    /// Look into the memory of a workload.
    InspectMemory(WorkloadId),
    /// Look where the threads and the memory of a workload are.
    InspectLocality(WorkloadId),
    /// Look for meters.
    FindMeters(WorkloadId),
    /// Open a meter.
    OpenMeter(WorkloadId, MeterId),
    /// Close a meter.
    CloseMeter(WorkloadId, MeterId),
    /// Make a change for the first time: prepare, journal, act.
    Apply(Box<Action>),
    /// Drive a change that is in the journal to on or off.
    Switch(ActionId, Direction),
    /// The change is undone and will not be made again: close its journal record.
    Close(ActionId),
    /// Leave the change in force over the end of the daemon.
    Keep(ActionId),
    /// Journal a coin before its block starts.
    NoteCoin {
        /// Experiment.
        experiment: ExperimentId,
        /// Block.
        block: u32,
        /// On or off.
        on: bool,
    },
    /// The coins that were journalled for this experiment so far are of no use any more: their blocks are over.
    DropCoins(ExperimentId),
    /// Remember an experiment (again at every change of its state that matters).
    RecordExperiment(Box<ExperimentRecord>),
    /// Remember a decision.
    RecordDecision(DecisionRecord),
    /// Remember a window.
    RecordWindow(WindowRecord),
    /// Tell people.
    Tell(Story),
    /// Everything is settled after a stop: the runtime may end.
    Finished,
}

/// How often to look, and at whom in detail.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SamplingPlan {
    /// Time between scans of all processes.
    pub scan_every: Nanoseconds,
    /// Time between detailed samples.
    pub detail_every: Nanoseconds,
    /// Whom to sample in detail; empty = no detailed sampling.
    pub detail: Vec<WorkloadId>,
    /// Time between samples of those of them that are compared with a change on and off.
    #[serde(default)]
    pub quick_every: Nanoseconds,
    /// Who these are; empty = nobody.
    #[serde(default)]
    pub quick: Vec<WorkloadId>,
    /// Memory has just become short, or somebody reads much: scans may cost more until it is known who it is.
    pub in_a_hurry: bool,
    /// Whether it is to be looked at what workloads read, also while memory is not short.
    pub reads: bool,
    /// Longest time between two looks at the host; `None` = as the rest comes.
    pub host_every: Option<Nanoseconds>,
    /// Whose spans from wait to wait are to be followed: those that are tried, and those beside whom that is; also in a guard's probes.
    pub spans: Vec<WorkloadId>,
    /// Whether the memory canary runs: a change is tried, and memory is plentiful.
    #[serde(default)]
    pub canary: bool,
}

/// What the history knows about one kind of workload and one strategy.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Prior {
    /// Identity.
    pub fingerprint: homeostat_model::Fingerprint,
    /// Strategy.
    pub strategy: StrategyId,
    /// The last verdict that says something about the effect.
    pub verdict: homeostat_model::Verdict,
    /// Its estimate.
    pub effect: Option<Effect>,
    /// When (seconds since the epoch).
    pub unix_seconds: u64,
    /// How many times in a row it was not accepted.
    pub failures: u32,
    /// Time constant of its effect, where that was measured.
    #[serde(default)]
    pub settling: Option<Nanoseconds>,
}

/// A try that used up a level.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "AttemptForm")]
pub struct Attempt {
    /// The kind of change ([`Attempt::of`]).
    pub of: String,
    /// Whether it was accepted and still stands.
    pub accepted: bool,
}

impl Attempt {
    /// The name of a kind of change: a kind of workload and a strategy.
    pub fn of(fingerprint: &homeostat_model::Fingerprint, strategy: &StrategyId) -> String {
        format!("{fingerprint} {strategy}")
    }
}

/// Recordings of earlier versions have only whether it was accepted.
#[derive(Deserialize)]
#[serde(untagged)]
enum AttemptForm {
    Accepted(bool),
    Whole { of: String, accepted: bool },
}

impl From<AttemptForm> for Attempt {
    fn from(form: AttemptForm) -> Self {
        match form {
            AttemptForm::Accepted(accepted) => Self {
                of: String::new(),
                accepted,
            },
            AttemptForm::Whole { of, accepted } => Self { of, accepted },
        }
    }
}

/// What was known when the mind started.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Memory {
    /// Priors.
    pub priors: Vec<Prior>,
    /// Placebos that ended with a verdict, and accepted ones.
    pub placebos: u32,
    /// False accepts among them.
    pub false_accepts: u32,
    /// Tries for false-discovery control, oldest first.
    pub tries: Vec<Attempt>,
    /// Harm exposure of the last 24 hours in percent × seconds, as far as it was written down.
    #[serde(default)]
    pub exposure: f64,
    /// First free experiment number.
    pub next_experiment: u64,
    /// First free action number.
    pub next_action: u64,
    /// Changes that were left in force by an earlier run, on purpose.
    pub kept: Vec<Action>,
    /// Readers that were proven to take a program's memory.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub readers: Vec<ProvenReader>,
}
