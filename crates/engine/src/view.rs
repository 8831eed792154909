//! What people see: a copy of the engine's state as plain data. It is the stable shape of what `--json` prints and the control
//! socket answers, so a change here changes what people script against. The same shapes stand in `io.homeostat.varlink`; a
//! test keeps the two in step.
//!
//! A number that is not known is absent (`null`). Times end in `_s` (seconds) or `_unix` (seconds since the epoch), sizes in
//! `_bytes`, relative values are shares (`0.05` is five percent).

use homeostat_model::{
    ActionId, Advice, ExperimentId, ExperimentKind, MeterCandidate, MeterId, NotExcluded, OffLevel,
    StrategyId, Verdict, WorkloadId, WorkloadKind, words,
};
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// Version of these shapes. Raised when a field is removed or changes its meaning; new fields may come without a new number.
pub const SCHEMA: u32 = 1;

words!(
    /// Where a workload stands.
    Stage {
        /// Seen, but not (yet) worth looking at: too young, too small, opted out.
        Ignored = "ignored",
        /// Passed the floors; a work meter is being looked for and judged.
        Considered = "considered",
        /// Measured; passive history is being gathered.
        Observed = "observed",
        /// A change is proposed and waits for its turn (or for a person, when advising only).
        Proposed = "proposed",
        /// An experiment runs.
        Trying = "trying",
        /// A change is in force and guarded.
        Improved = "improved",
        /// Nothing to do, with the reason.
        Declined = "declined",
    }
);

/// An estimated relative change with its interval.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Effect {
    /// Best estimate as a share; 0.05 = five percent better.
    pub estimate: Option<f64>,
    /// Lower end of the interval; absent while it is unbounded.
    pub lower: Option<f64>,
    /// Upper end of the interval; absent while it is unbounded.
    pub upper: Option<f64>,
    /// Confidence of the interval, 0..1.
    pub confidence: f64,
}

impl From<homeostat_model::Effect> for Effect {
    fn from(e: homeostat_model::Effect) -> Self {
        Self {
            estimate: finite(e.estimate),
            // The engine counts in logarithms: a lower end of minus infinity there is a share of exactly -1 here.
            lower: finite(e.lower).filter(|share| *share > -1.0),
            upper: finite(e.upper),
            confidence: e.confidence,
        }
    }
}

/// JSON has no infinity: an unbounded number is absent.
pub fn finite(x: f64) -> Option<f64> {
    x.is_finite().then_some(x)
}

/// Also turns −0 into 0.
pub(crate) fn finite_or_zero(x: f64) -> f64 {
    if x.is_finite() { x + 0.0 } else { 0.0 }
}

/// One step of the chain from observation to verdict.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Decision {
    /// When.
    pub at_unix: u64,
    /// Stage after it.
    pub stage: Stage,
    /// The sentence with its numbers.
    pub text: String,
}

/// The meter that counts a workload's work.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Meter {
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
    #[serde(default = "always")]
    pub counted: f64,
    /// Some of what it tells may have been counted so many seconds before, so a trial leaves as many out after each change; 0:
    /// nothing was.
    #[serde(default)]
    pub lag_s: f64,
    /// `work per second` or `work per CPU second`.
    pub objective: String,
    /// Why that one judges.
    pub objective_reason: String,
}

/// What older versions, which did not count in turns, say by saying nothing.
fn always() -> f64 {
    1.0
}

/// A proposal.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Proposal {
    /// Stable id, e.g. `large_pages/redis-server.service`.
    pub id: String,
    /// Strategy.
    pub strategy: StrategyId,
    /// What and why.
    pub hypothesis: String,
    /// Gain predicted.
    pub predicted: Effect,
    /// What it may cost.
    pub risk: String,
    /// How it would be tested.
    pub design: String,
}

/// A workload, briefly.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Workload {
    /// Name, unique on the host while it runs.
    pub name: WorkloadId,
    /// `unit`, `container`, `cgroup`, `shared_segment` or `process_group`.
    pub kind: WorkloadKind,
    /// Program of its main process.
    pub program: String,
    /// Identity in the history.
    pub fingerprint: String,
    /// Whose it is: `machine` (root's), `user:1000`, or the name of a tenant such as a pod.
    #[serde(default)]
    pub owner: String,
    /// Process ids, main first, at most 16.
    pub pids: Vec<i64>,
    /// Number of its processes.
    pub processes: u32,
    /// Age of its oldest process.
    pub age_s: f64,
    /// CPUs it uses (1.0 = one CPU busy all the time).
    pub cpus: f64,
    /// Resident memory.
    pub resident_bytes: u64,
    /// Of which in large pages, when known.
    pub huge_bytes: Option<u64>,
    /// `ignored`, `considered`, `observed`, `proposed`, `trying`, `improved` or `declined`.
    pub stage: Stage,
    /// Whether it is declined because a person had its change undone.
    #[serde(default)]
    pub undone: bool,
    /// The last sentence about it.
    pub summary: String,
    /// The meter that counts its work, once chosen.
    pub meter: Option<Meter>,
    /// The proposal that waits.
    pub proposal: Option<Proposal>,
    /// The meters that were looked at, with refusals. These are told in an explanation only; copies share
    /// them.
    #[serde(skip)]
    pub meters: Arc<[MeterCandidate]>,
    /// The chain of decisions, oldest first, bounded; likewise.
    #[serde(skip)]
    pub decisions: Arc<[Decision]>,
}

impl Workload {
    /// Its stage for people: what a person had undone was not declined.
    pub fn stage_word(&self) -> &'static str {
        if self.undone {
            "undone"
        } else {
            self.stage.as_str()
        }
    }
}

/// A block of a running trial, and what was known after it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TrialBlock {
    /// Whether the change was on.
    pub on: bool,
    /// Whether the circuit breaker ended it.
    pub broken: bool,
    /// Natural logarithm of the objective, oriented so that more is better.
    pub score: Option<f64>,
    /// Estimate after this block.
    pub effect: Effect,
    /// Evidence for a gain after this block (e-value).
    pub evidence: f64,
}

/// A running experiment.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Experiment {
    /// Number, for `homeostat history --blocks`.
    pub id: ExperimentId,
    /// `switchback`, `staged_rollout` or `placebo`.
    pub kind: ExperimentKind,
    /// Strategy.
    pub strategy: StrategyId,
    /// Workload.
    pub workload: WorkloadId,
    /// The other workloads, when several are tried as one change.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub others: Vec<WorkloadId>,
    /// `preparing`, `washout`, `measuring` or `reverting`.
    pub phase: String,
    /// Share of the preparation that is done, 0..1.
    pub prepared: f64,
    /// Blocks measured so far.
    pub blocks: u32,
    /// The latest of them, oldest first, at most 60.
    #[serde(default)]
    pub latest: Vec<TrialBlock>,
    /// Whether the change is on now.
    pub on: bool,
    /// Unmeasured start of a block.
    pub washout_s: f64,
    /// Measured part of a block.
    pub measured_s: f64,
    /// Estimate so far.
    pub effect: Option<Effect>,
    /// Evidence for a gain (e-value).
    pub evidence: f64,
    /// What the evidence must reach.
    pub evidence_needed: f64,
    /// Time since it began.
    pub elapsed_s: f64,
    /// Longest it may take.
    pub budget_s: f64,
    /// Time for which the workload stood still so far while the change was made and undone.
    #[serde(default)]
    pub stalled_s: f64,
    /// Memory that the change added at most so far.
    #[serde(default)]
    pub bloat_bytes: u64,
    /// What it has cost so far: seconds of the workload's work.
    #[serde(default)]
    pub lost_work_s: f64,
    /// CPU time that homeostat used while it ran.
    #[serde(default)]
    pub own_cpu_s: f64,
}

/// A change in force.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Change {
    /// Number, for `homeostat undo`.
    pub action: ActionId,
    /// Strategy, if known (a change kept over a restart may only know its effector).
    pub strategy: StrategyId,
    /// Workload.
    pub workload: WorkloadId,
    /// What was changed.
    pub text: String,
    /// Proven gain.
    pub effect: Option<Effect>,
    /// Since when.
    pub since_unix: u64,
    /// What the guard says.
    pub guard: String,
    /// Whether it is on at this moment: a probe switches it off for some seconds.
    pub on: bool,
}

/// The host in the interval of the last sample.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Host {
    /// Online CPUs.
    pub cpus: u32,
    /// Of which busy.
    pub cpus_busy: f64,
    /// Of which the hypervisor gave to others.
    pub cpus_stolen: f64,
    /// Memory.
    pub memory_bytes: u64,
    /// Of which available to programs.
    pub memory_available_bytes: u64,
    /// Share of the time in which at least one task waited for a CPU.
    pub pressure_cpu: f64,
    /// Share of the time in which at least one task waited for memory.
    pub pressure_memory: f64,
    /// Share of the time in which at least one task waited for input or output.
    pub pressure_io: f64,
}

/// How well contained readers have been kept small in control groups of version 1, all of them since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeptSmall {
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
pub struct Budget {
    /// Own CPU use as a share of one CPU over the last minutes.
    pub own_cpu: f64,
    /// Own resident memory.
    pub own_resident_bytes: u64,
    /// CPU use of the memory canary while it runs, as a share of one CPU over the last minutes; 0 while it is off.
    #[serde(default)]
    pub canary_cpu: f64,
    /// Resident memory of the memory canary; 0 while it is off.
    #[serde(default)]
    pub canary_resident_bytes: u64,
    /// Page faults of the loop since it began that took no reading from storage. This and the next three are filled
    /// in by whoever runs the loop; the mind knows nothing of them.
    #[serde(default)]
    pub own_faults_minor: u64,
    /// Page faults of the loop since it began that waited for storage.
    #[serde(default)]
    pub own_faults_major: u64,
    /// Seconds since it began in which the loop waited for a CPU.
    #[serde(default)]
    pub own_waited_s: f64,
    /// How well contained readers have been kept small, where no limit does it (control groups of version 1).
    #[serde(default)]
    pub kept_small: KeptSmall,
    /// Experiments started in the last hour.
    pub experiments_last_hour: u32,
    /// Most experiments per hour.
    pub experiments_per_hour_max: u32,
    /// Harm exposure of the last 24 hours in percent × seconds, with that of the trials that run.
    pub harm_exposure_day: f64,
    /// Most harm exposure per day.
    pub harm_exposure_per_day_max: f64,
    /// What owners other than the machine have used of both, and the most that each may use.
    #[serde(default)]
    pub owners: Vec<OwnerBudget>,
    /// Time that workloads stood still for our changes, since start.
    pub stalled_s: f64,
    /// Memory added by changes in force.
    pub bloat_bytes: u64,
}

/// What one owner has used of the budgets, and its limits.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct OwnerBudget {
    /// Whose: `user:1000`, or the name of a tenant.
    pub owner: String,
    /// Experiments started in the last hour.
    pub experiments_last_hour: u32,
    /// Most experiments per hour.
    pub experiments_per_hour_max: u32,
    /// Harm exposure of the last 24 hours in percent × seconds.
    pub harm_exposure_day: f64,
    /// Most harm exposure per day.
    pub harm_exposure_per_day_max: f64,
}

/// What placebo experiments say about homeostat.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Calibration {
    /// Placebo experiments that ended with a verdict, history included.
    pub placebos: u32,
    /// Of which accepted: false accepts.
    pub false_accepts: u32,
    /// Tries under false-discovery control.
    pub tries: u32,
    /// Of which accepted.
    pub accepts: u32,
    /// Level of the next try.
    pub alpha_next: f64,
}

/// An experiment that ended.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Outcome {
    /// Number.
    pub id: ExperimentId,
    /// Workload.
    pub workload: WorkloadId,
    /// The other workloads, when several are tried as one change.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub others: Vec<WorkloadId>,
    /// Strategy.
    pub strategy: StrategyId,
    /// `accepted`, `rejected`, `harmful`, `inconclusive` or `aborted`.
    pub verdict: Verdict,
    /// Estimate.
    pub effect: Option<Effect>,
    /// Blocks it took.
    pub blocks: u32,
    /// When it ended.
    pub ended_unix: u64,
    /// Why.
    pub reason: String,
    /// The level without the change against the level before the trial; absent where the two do not compare.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub off_level: Option<OffLevel>,
    /// Losses that an accepted trial does not exclude, the largest first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub not_excluded: Vec<NotExcluded>,
}

/// Whether homeostat may act, who says so, and how that is changed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Switch {
    /// Whether it tries changes and keeps what is proven to help. Otherwise it advises and changes nothing.
    pub on: bool,
    /// Who says so: `default`, `switch`, `configuration` or `command line`.
    pub by: String,
    /// Since when the switch stands so; absent where that is not known.
    pub since_unix: Option<u64>,
    /// Who says so and since when, in words.
    pub why: String,
    /// How it is changed: a command, or what to do.
    pub change: String,
}

impl Switch {
    /// One line for people: whether it acts, why, and how that is changed.
    pub fn sentence(&self) -> String {
        let (why, change) = (&self.why, &self.change);
        let (state, other) = match self.on {
            true => (
                "on: it tries changes and keeps what is proven to help",
                "Undo all",
            ),
            false => ("off: it advises and changes nothing", "Let it act"),
        };
        format!("homeostat is {state} ({why}). {other}: {change}")
    }
}

/// The whole state, briefly (`homeostat status --json`, `io.homeostat.GetStatus`).
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Status {
    /// Version of these shapes: [`SCHEMA`].
    pub schema: u32,
    /// Version of the daemon.
    pub version: String,
    /// Process id of the daemon. It, the age, the switch and the notes are filled in by whoever runs the mind.
    pub pid: i64,
    /// When this was true, seconds since the epoch.
    pub at_unix: u64,
    /// Seconds since the loop published this; absent before the first time.
    #[serde(default)]
    pub view_age_s: Option<f64>,
    /// `act`, `advise-only` or `calibrate`.
    pub mode: String,
    /// Whether an operator paused it.
    pub paused: bool,
    /// Whether it may act, and how that is changed; absent in what an earlier version or a recording says.
    #[serde(default)]
    pub switch: Option<Switch>,
    /// The host in one line.
    pub machine: String,
    /// Its load.
    #[serde(default)]
    pub host: Host,
    /// Why nothing at all can be done on this host; empty when something can.
    pub machine_refusals: Vec<String>,
    /// Workloads, busiest first.
    pub workloads: Vec<Workload>,
    /// Number of workloads below the floors of the configuration, which are not listed.
    pub workloads_ignored: u32,
    /// Running experiments.
    pub experiments: Vec<Experiment>,
    /// Changes in force.
    pub in_force: Vec<Change>,
    /// Experiments that ended, newest first.
    pub outcomes: Vec<Outcome>,
    /// What a person could do and homeostat may not.
    pub advice: Vec<Advice>,
    /// What homeostat spent and may spend.
    pub budget: Budget,
    /// What placebo experiments say about homeostat's own errors.
    pub calibration: Calibration,
    /// What is wrong or limited in the daemon itself, such as a history that can not be written.
    pub notes: Vec<String>,
}
