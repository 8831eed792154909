//! What `--json` prints and the control socket answers: the stable shape of homeostat's state.
//!
//! These types are converted from [`View`] by hand and never derived from it, so that the mind may change without
//! breaking anybody's script. The same shapes stand in `io.homeostat.varlink`; a test keeps the two in step.
//! A number that is not known is absent (`null`). Times end in `_s` (seconds) or `_unix` (seconds since the
//! epoch), sizes in `_bytes`, relative values are shares (`0.05` is five percent).

use crate::board::{self, Board};
use homeostat_engine::view::{ChangeView, ExperimentView, OutcomeView, View, WorkloadView};
use homeostat_engine::{Stage, Story};
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// Version of the shapes in this module. Raised when a field is removed or changes its meaning; new fields may
/// come without a new number.
pub const SCHEMA: u32 = 1;

/// An estimated relative change with its interval.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
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
fn finite(x: f64) -> Option<f64> {
    x.is_finite().then_some(x)
}

/// Also turns −0 into 0.
fn finite_or_zero(x: f64) -> f64 {
    if x.is_finite() { x + 0.0 } else { 0.0 }
}

/// The whole state, briefly (`homeostat status --json`, `io.homeostat.GetStatus`).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Status {
    /// Version of these shapes: [`SCHEMA`].
    pub schema: u32,
    /// Version of the daemon.
    pub version: String,
    /// Process id of the daemon.
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

/// The host in the interval of the last sample.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
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

/// A workload, briefly.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Workload {
    /// Name, unique on the host while it runs.
    pub name: String,
    /// `unit`, `container`, `cgroup`, `shared_segment` or `process_group`.
    pub kind: String,
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
    pub stage: String,
    /// Whether it is declined because a person had its change undone.
    #[serde(default)]
    pub undone: bool,
    /// The last sentence about it.
    pub summary: String,
    /// The meter that counts its work, once chosen.
    pub meter: Option<Meter>,
    /// The proposal that waits.
    pub proposal: Option<Proposal>,
}

/// Whether a sentence needs no stage before it: it begins with the stage, or a person decided and not homeostat.
pub fn is_said_by(stage: &str, text: &str) -> bool {
    text.strip_prefix(stage).is_some_and(|rest| rest.starts_with(':'))
        || text.starts_with(homeostat_engine::UNDONE_BY_A_PERSON)
}

/// What older versions, which did not count in turns, say by saying nothing.
fn always() -> f64 {
    1.0
}

/// The meter that counts a workload's work.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Meter {
    /// Name.
    pub id: String,
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

/// A meter that was looked at.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MeterCandidate {
    /// Name.
    pub id: String,
    /// What one count is.
    pub unit: String,
    /// Cost to the workload of one count in nanoseconds; 0 = reading costs the workload nothing.
    pub cost_per_count_ns: u64,
    /// Why it can not be used, with the remedy; absent when it can.
    pub refused: Option<String>,
}

/// A proposal.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Proposal {
    /// Stable id, e.g. `large_pages/redis-server.service`.
    pub id: String,
    /// Strategy.
    pub strategy: String,
    /// What and why.
    pub hypothesis: String,
    /// Gain predicted.
    pub predicted: Effect,
    /// What it may cost.
    pub risk: String,
    /// How it would be tested.
    pub design: String,
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
    pub id: u64,
    /// `switchback`, `staged_rollout` or `placebo`.
    pub kind: String,
    /// Strategy.
    pub strategy: String,
    /// Workload.
    pub workload: String,
    /// The other workloads, when several are tried as one change.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub others: Vec<String>,
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
    pub action: u64,
    /// Strategy.
    pub strategy: String,
    /// Workload.
    pub workload: String,
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

/// An experiment that ended.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Outcome {
    /// Number.
    pub id: u64,
    /// Workload.
    pub workload: String,
    /// The other workloads, when several are tried as one change.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub others: Vec<String>,
    /// Strategy.
    pub strategy: String,
    /// `accepted`, `rejected`, `harmful`, `inconclusive` or `aborted`.
    pub verdict: String,
    /// Estimate.
    pub effect: Option<Effect>,
    /// Blocks it took.
    pub blocks: u32,
    /// When it ended.
    pub ended_unix: u64,
    /// Why.
    pub reason: String,
}

/// Something a person could do.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Advice {
    /// Stable id.
    pub id: String,
    /// For which workload; absent = the host.
    pub workload: Option<String>,
    /// What was found.
    pub finding: String,
    /// What to do.
    pub remedy: String,
    /// What it costs or risks.
    pub risk: String,
    /// The setting of the kernel that does it, where one does (`homeostat advice apply ID`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub setting: Option<AdvisedSetting>,
}

/// The setting of the kernel that does what an advice says.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AdvisedSetting {
    /// File of the setting below `/proc/sys` or `/sys`.
    pub path: String,
    /// The value.
    pub value: String,
}

impl From<&homeostat_model::Advice> for Advice {
    fn from(a: &homeostat_model::Advice) -> Self {
        Self {
            id: a.id.clone(),
            workload: a.workload.as_ref().map(ToString::to_string),
            finding: a.finding.clone(),
            remedy: a.remedy.clone(),
            risk: a.risk.clone(),
            setting: a.setting.as_ref().map(|s| AdvisedSetting {
                path: s.path.clone(),
                value: s.value.clone(),
            }),
        }
    }
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
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Budget {
    /// Own CPU use as a share of one CPU over the last minutes.
    pub own_cpu: f64,
    /// Own resident memory.
    pub own_resident_bytes: u64,
    /// Page faults of the loop since it began that took no reading from storage …
    #[serde(default)]
    pub own_faults_minor: u64,
    /// … and that waited for storage.
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
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
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
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
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

/// One step of the chain from observation to verdict.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Decision {
    /// When.
    pub at_unix: u64,
    /// Stage after it.
    pub stage: String,
    /// The sentence with its numbers.
    pub text: String,
}

/// All about one workload (`homeostat explain --json`, `io.homeostat.Explain`).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Explanation {
    /// Version of these shapes: [`SCHEMA`].
    pub schema: u32,
    /// The workload.
    pub workload: Workload,
    /// The meters that were looked at, with refusals.
    pub meters: Vec<MeterCandidate>,
    /// The chain of decisions, oldest first.
    pub decisions: Vec<Decision>,
    /// Its running experiments.
    pub experiments: Vec<Experiment>,
    /// Its changes in force.
    pub in_force: Vec<Change>,
    /// Its experiments that ended, newest first.
    pub outcomes: Vec<Outcome>,
    /// Advice for it.
    pub advice: Vec<Advice>,
}

/// What would be tried, and why not the rest (`homeostat plan --json`, `io.homeostat.GetPlan`).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Plan {
    /// Version of these shapes: [`SCHEMA`].
    pub schema: u32,
    /// Why nothing at all can be done on this host; empty when something can.
    pub machine_refusals: Vec<String>,
    /// Workloads with a proposal that waits.
    pub proposed: Vec<Workload>,
    /// Workloads on which something is being tried, or on which a change is in force.
    pub active: Vec<Workload>,
    /// Workloads that are still being measured.
    pub undecided: Vec<Workload>,
    /// Workloads for which there is nothing to do, with the reason in `summary`.
    pub declined: Vec<Workload>,
    /// What a person could do.
    pub advice: Vec<Advice>,
}

/// A line of the story (`homeostat run --log json`, `io.homeostat.Follow`).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StoryLine {
    /// Version of these shapes: [`SCHEMA`].
    pub schema: u32,
    /// When, seconds since the epoch.
    pub at_unix: u64,
    /// About which workload; absent = the host.
    pub workload: Option<String>,
    /// Stage the line belongs to.
    pub stage: String,
    /// The sentence.
    pub text: String,
    /// Whether an operator should look at it.
    pub warning: bool,
}

impl StoryLine {
    /// A line that was told at that time.
    pub fn new(at_unix: u64, story: &Story) -> Self {
        Self {
            schema: SCHEMA,
            at_unix,
            workload: story.workload.as_ref().map(ToString::to_string),
            stage: story.stage.to_string(),
            text: story.text.clone(),
            warning: story.warning,
        }
    }

    /// The line for people, without the time: about whom, the stage unless the sentence begins with it, the sentence.
    pub fn sentence(&self) -> String {
        match &self.workload {
            Some(workload) if is_said_by(&self.stage, &self.text) => {
                format!("{workload} {}", self.text)
            }
            Some(workload) => format!("{workload} {}: {}", self.stage, self.text),
            None => self.text.clone(),
        }
    }
}

/// The name that a closed enum of the model has in JSON.
fn word<T: Serialize>(value: &T) -> String {
    match serde_json::to_value(value) {
        Ok(serde_json::Value::String(s)) => s,
        Ok(other) => other.to_string(),
        Err(_) => String::new(),
    }
}

impl From<&WorkloadView> for Workload {
    fn from(w: &WorkloadView) -> Self {
        Self {
            name: w.id.to_string(),
            kind: word(&w.kind),
            program: w.program.clone(),
            fingerprint: w.fingerprint.clone(),
            owner: w.owner.clone(),
            pids: w.pids.iter().map(|p| i64::from(*p)).collect(),
            processes: w.processes,
            age_s: finite_or_zero(w.age_s),
            cpus: finite_or_zero(w.cpus),
            resident_bytes: w.resident_bytes,
            huge_bytes: w.huge_bytes,
            stage: w.stage.to_string(),
            undone: w.undone,
            summary: w.summary.clone(),
            meter: w.meter.as_ref().map(|m| Meter {
                id: m.id.to_string(),
                unit: m.unit.clone(),
                rate: finite_or_zero(m.rate),
                noise: finite_or_zero(m.noise),
                cost: finite_or_zero(m.cost),
                counted: finite_or_zero(m.counted),
                lag_s: m.lag.as_secs_f64(),
                objective: m.objective.clone(),
                objective_reason: m.objective_reason.clone(),
            }),
            proposal: w.proposal.as_ref().map(|p| Proposal {
                id: p.id.clone(),
                strategy: p.strategy.to_string(),
                hypothesis: p.hypothesis.clone(),
                predicted: p.predicted.into(),
                risk: p.risk.clone(),
                design: p.design.clone(),
            }),
        }
    }
}

impl From<&ExperimentView> for Experiment {
    fn from(e: &ExperimentView) -> Self {
        Self {
            id: e.id.0,
            kind: word(&e.kind),
            strategy: e.strategy.to_string(),
            workload: e.workload.to_string(),
            others: e.others.iter().map(ToString::to_string).collect(),
            phase: e.phase.clone(),
            prepared: finite_or_zero(e.prepared),
            blocks: e.blocks,
            latest: e
                .latest
                .iter()
                .map(|b| TrialBlock {
                    on: b.on,
                    broken: b.broken,
                    score: finite(b.score),
                    effect: b.effect.into(),
                    evidence: finite_or_zero(b.evidence),
                })
                .collect(),
            on: e.on,
            washout_s: finite_or_zero(e.washout_s),
            measured_s: finite_or_zero(e.measured_s),
            effect: e.effect.map(Into::into),
            evidence: finite_or_zero(e.evidence),
            evidence_needed: finite_or_zero(e.evidence_needed),
            elapsed_s: finite_or_zero(e.elapsed_s),
            budget_s: finite_or_zero(e.budget_s),
            stalled_s: finite_or_zero(e.stalled_s),
            bloat_bytes: e.bloat_bytes,
            lost_work_s: finite_or_zero(e.harm_exposure / 100.0),
            own_cpu_s: finite_or_zero(e.own_cpu_s),
        }
    }
}

impl From<&ChangeView> for Change {
    fn from(c: &ChangeView) -> Self {
        Self {
            action: c.action.0,
            strategy: c.strategy.to_string(),
            workload: c.workload.to_string(),
            text: c.text.clone(),
            effect: c.effect.map(Into::into),
            since_unix: c.since_unix,
            guard: c.guard.clone(),
            on: c.on,
        }
    }
}

impl From<&OutcomeView> for Outcome {
    fn from(o: &OutcomeView) -> Self {
        Self {
            id: o.id.0,
            workload: o.workload.to_string(),
            others: o.others.iter().map(ToString::to_string).collect(),
            strategy: o.strategy.to_string(),
            verdict: o.verdict.to_string(),
            effect: o.effect.map(Into::into),
            blocks: o.blocks,
            ended_unix: o.unix_seconds,
            reason: o.reason.clone(),
        }
    }
}

impl Status {
    /// The latest state of this daemon.
    pub fn latest(board: &Board) -> Self {
        let (view, age) = board.fresh_view_with_age();
        Self {
            view_age_s: age.map(|age| age.as_secs_f64()),
            switch: board.switch(),
            ..Self::new(&view, std::process::id(), &board.notes())
        }
    }

    /// The age of this state, where the loop of the daemon should long have published a newer one.
    pub fn hangs_for(&self) -> Option<Duration> {
        let age = Duration::try_from_secs_f64(self.view_age_s?).unwrap_or(Duration::MAX);
        (age > board::HANGS_AFTER).then_some(age)
    }

    /// The state of a daemon with that process id.
    pub fn new(view: &View, pid: u32, notes: &[String]) -> Self {
        let b = &view.budget;
        let c = &view.calibration;
        Self {
            schema: SCHEMA,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            pid: i64::from(pid),
            at_unix: view.unix_seconds,
            view_age_s: None,
            mode: view.mode.clone(),
            paused: view.paused,
            switch: None,
            machine: view.machine.clone(),
            host: Host {
                cpus: view.host.cpus,
                cpus_busy: finite_or_zero(view.host.cpus_busy),
                cpus_stolen: finite_or_zero(view.host.cpus_stolen),
                memory_bytes: view.host.memory_bytes,
                memory_available_bytes: view.host.memory_available_bytes,
                pressure_cpu: finite_or_zero(view.host.pressure_cpu),
                pressure_memory: finite_or_zero(view.host.pressure_memory),
                pressure_io: finite_or_zero(view.host.pressure_io),
            },
            machine_refusals: view.machine_refusals.clone(),
            workloads: view.workloads.iter().map(Into::into).collect(),
            workloads_ignored: view.workloads_ignored,
            experiments: view.experiments.iter().map(Into::into).collect(),
            in_force: view.in_force.iter().map(Into::into).collect(),
            outcomes: view.outcomes.iter().map(Into::into).collect(),
            advice: view.advice.iter().map(Into::into).collect(),
            budget: Budget {
                own_cpu: finite_or_zero(b.own_cpu),
                own_resident_bytes: b.own_resident_bytes,
                own_faults_minor: b.own_faults_minor,
                own_faults_major: b.own_faults_major,
                own_waited_s: finite_or_zero(b.own_waited_s),
                kept_small: KeptSmall {
                    readers: b.kept_small.readers,
                    looks: b.kept_small.looks,
                    above: b.kept_small.above,
                    stuck: b.kept_small.stuck,
                },
                experiments_last_hour: b.experiments_last_hour,
                experiments_per_hour_max: b.experiments_per_hour_max,
                harm_exposure_day: finite_or_zero(b.harm_exposure_day),
                harm_exposure_per_day_max: finite_or_zero(b.harm_exposure_per_day_max),
                owners: b
                    .owners
                    .iter()
                    .map(|o| OwnerBudget {
                        owner: o.owner.clone(),
                        experiments_last_hour: o.experiments_last_hour,
                        experiments_per_hour_max: o.experiments_per_hour_max,
                        harm_exposure_day: finite_or_zero(o.harm_exposure_day),
                        harm_exposure_per_day_max: finite_or_zero(o.harm_exposure_per_day_max),
                    })
                    .collect(),
                stalled_s: finite_or_zero(b.stalled_s),
                bloat_bytes: b.bloat_bytes,
            },
            calibration: Calibration {
                placebos: c.placebos,
                false_accepts: c.false_accepts,
                tries: c.tries,
                accepts: c.accepts,
                alpha_next: finite_or_zero(c.alpha_next),
            },
            notes: notes.to_vec(),
        }
    }
}

impl Explanation {
    /// All about one workload of the view.
    pub fn new(view: &View, workload: &WorkloadView) -> Self {
        let id = &workload.id;
        Self {
            schema: SCHEMA,
            workload: workload.into(),
            meters: workload
                .meters
                .iter()
                .map(|m| MeterCandidate {
                    id: m.id.to_string(),
                    unit: m.unit.clone(),
                    cost_per_count_ns: m.cost_per_count.0,
                    refused: m.refused.clone(),
                })
                .collect(),
            decisions: workload
                .decisions
                .iter()
                .map(|d| Decision {
                    at_unix: d.unix_seconds,
                    stage: d.stage.to_string(),
                    text: d.text.clone(),
                })
                .collect(),
            experiments: view
                .experiments
                .iter()
                .filter(|e| e.workload == *id || e.others.contains(id))
                .map(Into::into)
                .collect(),
            in_force: view
                .in_force
                .iter()
                .filter(|c| c.workload == *id)
                .map(Into::into)
                .collect(),
            outcomes: view
                .outcomes
                .iter()
                .filter(|o| o.workload == *id || o.others.contains(id))
                .map(Into::into)
                .collect(),
            advice: view
                .advice
                .iter()
                .filter(|a| a.workload.as_ref() == Some(id))
                .map(Into::into)
                .collect(),
        }
    }
}

impl Plan {
    /// What the view says would be tried.
    pub fn new(view: &View) -> Self {
        let of = |stages: &[Stage]| -> Vec<Workload> {
            view.workloads
                .iter()
                .filter(|w| stages.contains(&w.stage))
                .map(Into::into)
                .collect()
        };
        Self {
            schema: SCHEMA,
            machine_refusals: view.machine_refusals.clone(),
            proposed: of(&[Stage::Proposed]),
            active: of(&[Stage::Trying, Stage::Improved]),
            undecided: of(&[Stage::Considered, Stage::Observed]),
            declined: of(&[Stage::Declined, Stage::Ignored]),
            advice: view.advice.iter().map(Into::into).collect(),
        }
    }

    /// Whether every workload that was looked at is decided. CPU use is known from the second scan on, and on a busy
    /// machine scans are far apart: until some program is seen to have run, nothing is.
    pub fn is_settled(&self) -> bool {
        let ran = |list: &[Workload]| list.iter().any(|w| w.cpus > 0.0);
        self.undecided.is_empty() && (ran(&self.proposed) || ran(&self.active) || ran(&self.declined))
    }
}

/// The answer to the question for a workload by whatever a person calls it.
#[derive(Clone, Debug, PartialEq)]
pub enum Found<'a, T = WorkloadView> {
    /// It is this one.
    One(&'a T),
    /// Nothing has that name; these come near (at most five).
    Near(Vec<String>),
    /// Several are meant.
    Several(Vec<String>),
}

/// What a person may call a workload by.
pub trait Named {
    /// Its name.
    fn name(&self) -> &str;
    /// The program of its main process.
    fn program(&self) -> &str;
    /// Whether the process is one of its own.
    fn has_process(&self, pid: i32) -> bool;
}

impl Workload {
    /// Its stage for people: what a person had undone was not declined.
    pub fn stage_word(&self) -> &str {
        if self.undone { "undone" } else { &self.stage }
    }
}

impl Named for WorkloadView {
    fn name(&self) -> &str {
        self.id.as_str()
    }
    fn program(&self) -> &str {
        &self.program
    }
    fn has_process(&self, pid: i32) -> bool {
        self.pids.contains(&pid)
    }
}

/// Finds a workload of the view; see [`find_named`].
pub fn find_workload<'a>(view: &'a View, name: &str) -> Found<'a> {
    find_named(&view.workloads, name)
}

/// Finds a workload by its name, else by process id, else by program, else by the start of its name.
pub fn find_named<'a, T: Named>(all: &'a [T], name: &str) -> Found<'a, T> {
    if let Some(w) = all.iter().find(|w| w.name() == name) {
        return Found::One(w);
    }
    let pid: Option<i32> = name.parse().ok();
    let ways: [&dyn Fn(&T) -> bool; 4] = [
        &|w| pid.is_some_and(|p| w.has_process(p)),
        &|w| w.name().strip_suffix(".service") == Some(name),
        &|w| w.program() == name,
        &|w| name.len() >= 2 && w.name().starts_with(name),
    ];
    for way in ways {
        let hits: Vec<&T> = all.iter().filter(|w| way(w)).collect();
        match hits.as_slice() {
            [] => {}
            [one] => return Found::One(one),
            several => return Found::Several(several.iter().map(|w| w.name().to_owned()).collect()),
        }
    }
    Found::Near(near_names(name, all.iter().map(Named::name)))
}

/// The names that look most like `wanted`, nearest first, at most five.
pub fn near_names<'a>(wanted: &str, names: impl Iterator<Item = &'a str>) -> Vec<String> {
    let wanted = wanted.to_lowercase();
    let mut ranked: Vec<(usize, &str)> = names
        .filter_map(|name| {
            let lower = name.to_lowercase();
            let distance = if !wanted.is_empty() && (lower.contains(&wanted) || wanted.contains(&lower)) {
                0
            } else {
                edit_distance(&wanted, &lower)
            };
            // More than half of the letters differ: no help to anybody.
            (distance * 2 <= wanted.chars().count().max(lower.chars().count())).then_some((distance, name))
        })
        .collect();
    ranked.sort();
    ranked
        .into_iter()
        .take(5)
        .map(|(_, name)| name.to_owned())
        .collect()
}

/// Levenshtein distance; names longer than 128 characters are cut.
fn edit_distance(a: &str, b: &str) -> usize {
    let a: Vec<char> = a.chars().take(128).collect();
    let b: Vec<char> = b.chars().take(128).collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, ca) in a.iter().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, cb) in b.iter().enumerate() {
            let above = row[j + 1];
            row[j + 1] = (diagonal + usize::from(ca != cb)).min(above + 1).min(row[j] + 1);
            diagonal = above;
        }
    }
    row[b.len()]
}
