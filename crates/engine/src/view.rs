//! What people see: a copy of the mind's state as plain data. The control socket, `status`, `explain` and the live
//! view all render this; none of them knows the engine.

use homeostat_model::{
    ActionId, Advice, Effect, ExperimentId, ExperimentKind, MeterCandidate, MeterId, Nanoseconds, StrategyId,
    Verdict, WorkloadId,
};
use serde::{Deserialize, Serialize};

/// Where a workload stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Stage {
    /// Seen, but not (yet) worth looking at: too young, too small, opted out.
    Ignored,
    /// Passed the floors; a work meter is being looked for and judged.
    Considered,
    /// Measured; passive history is being gathered.
    Observed,
    /// A change is proposed and waits for its turn (or for a person, when advising only).
    Proposed,
    /// An experiment runs.
    Trying,
    /// A change is in force and guarded.
    Improved,
    /// Nothing to do, with the reason.
    Declined,
}

impl std::fmt::Display for Stage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Ignored => "ignored",
            Self::Considered => "considered",
            Self::Observed => "observed",
            Self::Proposed => "proposed",
            Self::Trying => "trying",
            Self::Improved => "improved",
            Self::Declined => "declined",
        })
    }
}

/// One step of a decision chain.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DecisionView {
    /// Seconds since the epoch.
    pub unix_seconds: u64,
    /// Stage after this decision.
    pub stage: Stage,
    /// The sentence with its numbers.
    pub text: String,
}

/// The meter that counts a workload's work.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MeterView {
    /// Name.
    pub id: MeterId,
    /// What one count is.
    pub unit: String,
    /// Counts per second, recent.
    pub rate: f64,
    /// Coefficient of variation of the objective over blocks.
    pub noise: f64,
    /// Share of the workload's CPU time that reading costs it.
    pub cost: f64,
    /// Share of its CPU time in which it was really counted lately, 0 to 1; the rest is estimated from it. 1: counted all the time.
    pub counted: f64,
    /// How long before its end some of what a reading tells may have been counted. Nothing: all of it is of the reading's own time.
    pub lag: Nanoseconds,
    /// `work per second` or `work per CPU second`.
    pub objective: String,
    /// Why that one judges.
    pub objective_reason: String,
}

/// A proposal that waits.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ProposalView {
    /// Stable id, e.g. `large_pages/redis-server.service`.
    pub id: String,
    /// Strategy.
    pub strategy: StrategyId,
    /// What and why.
    pub hypothesis: String,
    /// Predicted gain.
    pub predicted: Effect,
    /// Risk.
    pub risk: String,
    /// How it would be tested.
    pub design: String,
}

/// One workload.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct WorkloadView {
    /// Name.
    pub id: WorkloadId,
    /// How it was recognised.
    pub kind: homeostat_model::WorkloadKind,
    /// Program.
    pub program: String,
    /// Identity in the history.
    pub fingerprint: String,
    /// Whose it is: `machine`, `user:1000`, or the name of a tenant.
    #[serde(default)]
    pub owner: String,
    /// Process ids, main first (at most 16).
    pub pids: Vec<i32>,
    /// Number of processes.
    pub processes: u32,
    /// Age in seconds.
    pub age_s: f64,
    /// CPUs used.
    pub cpus: f64,
    /// Resident bytes.
    pub resident_bytes: u64,
    /// Of which in large pages, when known.
    pub huge_bytes: Option<u64>,
    /// Stage.
    pub stage: Stage,
    /// Whether it is declined because a person had its change undone.
    #[serde(default)]
    pub undone: bool,
    /// The last sentence about it.
    pub summary: String,
    /// The meter, once chosen.
    pub meter: Option<MeterView>,
    /// The meters that were looked at, with refusals.
    pub meters: Vec<MeterCandidate>,
    /// The proposal that waits.
    pub proposal: Option<ProposalView>,
    /// The chain of decisions, oldest first, bounded.
    pub decisions: Vec<DecisionView>,
}

/// A block of a running trial, and what was known after it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct BlockView {
    /// Whether the change was on.
    pub on: bool,
    /// Whether the circuit breaker ended it.
    pub broken: bool,
    /// Natural logarithm of the objective, oriented so that more is better.
    pub score: f64,
    /// Estimate after this block.
    pub effect: Effect,
    /// Evidence for a gain after this block (e-value).
    pub evidence: f64,
}

/// A running experiment.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ExperimentView {
    /// Number.
    pub id: ExperimentId,
    /// Kind.
    pub kind: ExperimentKind,
    /// Strategy.
    pub strategy: StrategyId,
    /// Workload; of several that are tried as one change the first.
    pub workload: WorkloadId,
    /// The others of those.
    pub others: Vec<WorkloadId>,
    /// `preparing`, `washout`, `measuring`, `reverting`.
    pub phase: String,
    /// Share of the preparation done, 0..1.
    pub prepared: f64,
    /// Blocks measured so far.
    pub blocks: u32,
    /// The latest of them, oldest first, bounded.
    pub latest: Vec<BlockView>,
    /// Whether the change is on now.
    pub on: bool,
    /// Block length in seconds: washout and measured part.
    pub washout_s: f64,
    /// Measured part.
    pub measured_s: f64,
    /// Estimate so far.
    pub effect: Option<Effect>,
    /// Evidence for a gain (e-value) and what it must reach.
    pub evidence: f64,
    /// Needed.
    pub evidence_needed: f64,
    /// Seconds since it began.
    pub elapsed_s: f64,
    /// Longest it may take.
    pub budget_s: f64,
    /// Seconds for which the workload stood still so far while the change was made and undone.
    #[serde(default)]
    pub stalled_s: f64,
    /// Memory that the change added at most so far.
    #[serde(default)]
    pub bloat_bytes: u64,
    /// Harm exposure so far in percent × seconds; zero for a placebo.
    #[serde(default)]
    pub harm_exposure: f64,
    /// CPU seconds that homeostat used while it ran.
    #[serde(default)]
    pub own_cpu_s: f64,
}

/// A change in force.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ChangeView {
    /// The action; the number for `homeostat undo`.
    pub action: ActionId,
    /// Strategy, if known (a change kept over a restart may only know its effector).
    pub strategy: StrategyId,
    /// Workload.
    pub workload: WorkloadId,
    /// What was changed.
    pub text: String,
    /// Proven gain.
    pub effect: Option<Effect>,
    /// Since when (seconds since the epoch).
    pub since_unix: u64,
    /// What the guard says: probation k of n, next probe, alarms.
    pub guard: String,
    /// Whether it is on at this moment (a probe switches it off for some seconds).
    pub on: bool,
}

/// The host in the interval of the last sample.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct HostView {
    /// Online CPUs.
    pub cpus: u32,
    /// Of which busy.
    pub cpus_busy: f64,
    /// Of which the hypervisor gave to others.
    pub cpus_stolen: f64,
    /// Memory in bytes.
    pub memory_bytes: u64,
    /// Of which available to programs.
    pub memory_available_bytes: u64,
    /// Share of the time in which at least one task waited for a CPU.
    pub pressure_cpu: f64,
    /// … for memory.
    pub pressure_memory: f64,
    /// … for input or output.
    pub pressure_io: f64,
}

/// How well contained readers have been kept small in control groups of version 1, where no limit stays: what they use is looked
/// at many times a second, and taken away. All of them since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeptSmallView {
    /// Readers that are kept small now.
    pub readers: u64,
    /// How often one was looked at …
    pub looks: u64,
    /// … found more than a quarter above what it is meant to use …
    pub above: u64,
    /// … and left with more than it is meant to use, since the kernel had found nothing more to take.
    pub stuck: u64,
}

/// What homeostat spent and may spend.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct BudgetView {
    /// Own CPU use, share of one CPU, over the last minutes.
    pub own_cpu: f64,
    /// Own resident memory in bytes.
    pub own_resident_bytes: u64,
    /// Page faults of the loop since it began that took no reading from storage. This and the next two are filled in by
    /// whoever runs the loop; the mind knows nothing of them.
    #[serde(default)]
    pub own_faults_minor: u64,
    /// Page faults of the loop since it began that waited for storage.
    #[serde(default)]
    pub own_faults_major: u64,
    /// Seconds since it began in which the loop waited for a CPU.
    #[serde(default)]
    pub own_waited_s: f64,
    /// How well contained readers have been kept small, where no limit does it; filled in likewise.
    #[serde(default)]
    pub kept_small: KeptSmallView,
    /// Experiments started in the last hour and the most allowed.
    pub experiments_last_hour: u32,
    /// Limit.
    pub experiments_per_hour_max: u32,
    /// Harm exposure of the last 24 hours in percent × seconds, with that of the trials that run.
    pub harm_exposure_day: f64,
    /// Limit.
    pub harm_exposure_per_day_max: f64,
    /// What owners other than the machine have used of both, and the most that each may use.
    #[serde(default)]
    pub owners: Vec<OwnerBudgetView>,
    /// Time workloads stood still for our changes, seconds, since start.
    pub stalled_s: f64,
    /// Memory added by changes in force.
    pub bloat_bytes: u64,
}

/// What one owner has used of the budgets, and its limits.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct OwnerBudgetView {
    /// Whose: `user:1000`, or the name of a tenant.
    pub owner: String,
    /// Experiments started in the last hour.
    pub experiments_last_hour: u32,
    /// Limit.
    pub experiments_per_hour_max: u32,
    /// Harm exposure of the last 24 hours in percent × seconds.
    pub harm_exposure_day: f64,
    /// Limit.
    pub harm_exposure_per_day_max: f64,
}

/// What placebo experiments say about us.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct CalibrationView {
    /// Placebo experiments that ended with a verdict (history included).
    pub placebos: u32,
    /// Of which accepted: false accepts.
    pub false_accepts: u32,
    /// Tries so far in this epoch of false-discovery control, and accepts.
    pub tries: u32,
    /// Accepts.
    pub accepts: u32,
    /// Level of the next try.
    pub alpha_next: f64,
}

/// An experiment that ended, briefly.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct OutcomeView {
    /// Number.
    pub id: ExperimentId,
    /// Workload; of several that were tried as one change the first.
    pub workload: WorkloadId,
    /// The others of those.
    pub others: Vec<WorkloadId>,
    /// Strategy.
    pub strategy: StrategyId,
    /// Verdict.
    pub verdict: Verdict,
    /// Estimate.
    pub effect: Option<Effect>,
    /// Blocks it took.
    pub blocks: u32,
    /// Seconds since the epoch.
    pub unix_seconds: u64,
    /// Why.
    pub reason: String,
}

/// Everything.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct View {
    /// Seconds since the epoch of the last step.
    pub unix_seconds: u64,
    /// `act`, `advise-only`, `calibrate`.
    pub mode: String,
    /// Whether an operator paused it.
    pub paused: bool,
    /// The host in one line.
    pub machine: String,
    /// Its load.
    pub host: HostView,
    /// Why nothing at all can be done here, if so (no strategy is applicable).
    pub machine_refusals: Vec<String>,
    /// Workloads, busiest first.
    pub workloads: Vec<WorkloadView>,
    /// Number of workloads below the floors that are not listed.
    pub workloads_ignored: u32,
    /// Running experiments.
    pub experiments: Vec<ExperimentView>,
    /// Changes in force.
    pub in_force: Vec<ChangeView>,
    /// Latest outcomes, newest first, bounded.
    pub outcomes: Vec<OutcomeView>,
    /// Advice.
    pub advice: Vec<Advice>,
    /// Budgets.
    pub budget: BudgetView,
    /// Calibration.
    pub calibration: CalibrationView,
}
