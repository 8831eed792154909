//! The stable JSON shapes of what the command line reads without the daemon: the doctor's findings and the past. The
//! same rules as in [`crate::api`] hold.

use crate::api::{Effect, SCHEMA, Switch, finite};
pub use homeostat_model::Capability;
use homeostat_model::{
    ExperimentId, ExperimentKind, ExperimentRecord, Fingerprint, Machine, MeterId, NotExcluded, OffLevel,
    StrategyId, Verdict, WorkloadId,
};
use serde::{Deserialize, Serialize};

/// A strategy and whether this machine can do it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StrategyState {
    /// Stable name.
    pub id: String,
    /// One line for people.
    pub summary: String,
    /// Why this machine cannot do it; absent when it can.
    pub refused: Option<String>,
}

/// The doctor's findings (`homeostat doctor --json`).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Diagnosis {
    /// Version of these shapes.
    pub schema: u32,
    /// Kernel release.
    pub kernel: String,
    /// CPU model.
    pub cpu_model: String,
    /// Hypervisor, if the CPU says so.
    pub hypervisor: Option<String>,
    /// Online CPUs.
    pub cpus: u64,
    /// NUMA nodes.
    pub nodes: u64,
    /// Memory.
    pub memory_bytes: u64,
    /// Size of a large page; 0 when the kernel has none.
    pub huge_page_bytes: u64,
    /// Sensors and effectors, by name.
    pub capabilities: Vec<Capability>,
    /// The strategies.
    pub strategies: Vec<StrategyState>,
    /// Whether a daemon started now would act; absent if this user may not know, and for another machine.
    #[serde(default)]
    pub switch: Option<Switch>,
}

impl Diagnosis {
    /// The probed machine, with each strategy's answer.
    pub fn new(machine: &Machine, strategies: Vec<StrategyState>) -> Self {
        let mut capabilities = machine.capabilities.clone();
        capabilities.sort_by(|a, b| a.id.cmp(&b.id));
        Self {
            schema: SCHEMA,
            kernel: machine.kernel.clone(),
            cpu_model: machine.cpu_model.clone(),
            hypervisor: machine.hypervisor.clone(),
            cpus: machine.cpus.len() as u64,
            nodes: machine.nodes.len() as u64,
            memory_bytes: machine.memory.0,
            huge_page_bytes: machine.huge_page_size.0,
            capabilities,
            strategies,
            switch: None,
        }
    }

    /// Whether anything can be improved on this machine.
    pub fn can_act(&self) -> bool {
        self.strategies.iter().any(|s| s.refused.is_none())
    }
}

/// A block of an experiment.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Block {
    /// Position, from 0.
    pub index: u32,
    /// Whether the change was on.
    pub on: bool,
    /// Start of the measured part, in seconds since boot (CLOCK_MONOTONIC), to compare a block with other logs. Absent
    /// in records of an earlier homeostat.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub measured_from_s: Option<f64>,
    /// Length of the measured part.
    pub measured_s: f64,
    /// Work in the measured part.
    pub work: Option<f64>,
    /// CPU time in the measured part.
    pub cpu_s: f64,
    /// Natural logarithm of the objective, oriented so that more is better.
    pub score: Option<f64>,
    /// Whether the circuit breaker ended it.
    pub broken: bool,
}

/// An experiment of the past (`homeostat history --json`).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PastExperiment {
    /// Number.
    pub id: ExperimentId,
    /// `switchback`, `staged_rollout` or `placebo`.
    pub kind: ExperimentKind,
    /// Strategy.
    pub strategy: StrategyId,
    /// Workload.
    pub workload: WorkloadId,
    /// The other workloads, when several were tried as one change.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub others: Vec<WorkloadId>,
    /// Its identity over restarts.
    pub fingerprint: Fingerprint,
    /// The machine's identity.
    pub machine: String,
    /// The change and its reason.
    pub hypothesis: String,
    /// Gain predicted.
    pub predicted: Effect,
    /// Meter that judged.
    pub meter: MeterId,
    /// Objective in words.
    pub objective: String,
    /// Seed of the random assignment.
    pub seed: u64,
    /// Level of the test.
    pub alpha: f64,
    /// Unmeasured start of a block.
    pub washout_s: f64,
    /// Measured part of a block.
    pub measured_s: f64,
    /// Start.
    pub started_unix: u64,
    /// End.
    pub ended_unix: u64,
    /// Verdict; absent while it runs, or when the daemon died in it.
    pub verdict: Option<Verdict>,
    /// Why.
    pub reason: String,
    /// Estimate.
    pub effect: Option<Effect>,
    /// Run-to-block times of the tried workloads.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub spans: Vec<TrialSpans>,
    /// Whether meters of kernel work by which it was judged kept their meaning.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub meanings: Vec<TrialMeaning>,
    /// The level without the change against the level before the trial; absent where the two do not compare.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub off_level: Option<OffLevel>,
    /// Losses that an accepted trial does not exclude, the largest first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub not_excluded: Vec<NotExcluded>,
    /// Evidence for a gain (e-value).
    pub evidence: Option<f64>,
    /// Time the workload stood still for our changes.
    pub stalled_s: f64,
    /// Memory added while on.
    pub bloat_bytes: u64,
    /// Harm exposure in percent × seconds.
    pub harm_exposure: Option<f64>,
    /// The blocks, if they were asked for.
    pub blocks: Vec<Block>,
}

/// How long the threads of a workload ran in a trial from the end of a wait to the next wait.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TrialSpans {
    /// The workload.
    pub workload: String,
    /// In a sentence.
    pub text: String,
    /// Why they could not be judged, or not to the end; absent where they were.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unseen: Option<String>,
    /// Blocks with the change in which they were measured.
    pub blocks_on: u32,
    /// Blocks without.
    pub blocks_off: u32,
    /// Half of them are shorter.
    pub median: Option<SpanChange>,
    /// 99 of 100 are shorter.
    pub p99: Option<SpanChange>,
}

/// Length of a share of the spans with and without the change.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SpanChange {
    /// With it (seconds).
    pub on_s: f64,
    /// Without (seconds).
    pub off_s: f64,
    /// Standard deviation between the blocks that were off, as a share.
    pub noise: f64,
    /// By how much longer they were with it.
    pub longer: Effect,
    /// The same for each unit of work that was done in them.
    pub longer_for_its_work: Effect,
}

impl From<&homeostat_model::SpansAccount> for TrialSpans {
    fn from(s: &homeostat_model::SpansAccount) -> Self {
        let change = |c: &homeostat_model::SpanChange| SpanChange {
            on_s: c.on_s,
            off_s: c.off_s,
            noise: c.noise,
            longer: c.longer.into(),
            longer_for_its_work: c.longer_for_its_work.into(),
        };
        Self {
            workload: s.workload.to_string(),
            text: s.to_string(),
            unseen: s.unseen.clone(),
            blocks_on: s.blocks_on,
            blocks_off: s.blocks_off,
            median: s.median.as_ref().map(change),
            p99: s.p99.as_ref().map(change),
        }
    }
}

/// Validity of a kernel meter in a trial: its ratio to the second meter that had confirmed it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TrialMeaning {
    /// The workload.
    pub workload: String,
    /// In a sentence.
    pub text: String,
    /// The kind that judged.
    pub judge: String,
    /// The second meter's kind.
    pub beside: String,
    /// Why the two could not be compared, or not to the end; absent where they were.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unwatched: Option<String>,
    /// Blocks with the change in which both were read.
    pub blocks_on: u32,
    /// Blocks without.
    pub blocks_off: u32,
    /// By how much the ratio was another with the change than without.
    pub change: Option<Effect>,
    /// The same of the last blocks of both arms against those before.
    pub drift: Option<Effect>,
    /// Slots of a rollout in which both were read; the blocks are those of its round trips.
    #[serde(default)]
    pub slots: u32,
    /// How far the ratio moves with the share of the change in force, for the whole change.
    #[serde(default)]
    pub staged: Option<Effect>,
}

impl From<&homeostat_model::MeaningAccount> for TrialMeaning {
    fn from(m: &homeostat_model::MeaningAccount) -> Self {
        Self {
            workload: m.workload.to_string(),
            text: m.to_string(),
            judge: m.judge.to_string(),
            beside: m.beside.to_string(),
            unwatched: m.unwatched.clone(),
            blocks_on: m.blocks_on,
            blocks_off: m.blocks_off,
            change: m.change.map(Into::into),
            drift: m.drift.map(Into::into),
            slots: m.slots,
            staged: m.staged.map(Into::into),
        }
    }
}

/// The past (`homeostat history --json`).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Past {
    /// Version of these shapes.
    pub schema: u32,
    /// Experiments, newest first.
    pub experiments: Vec<PastExperiment>,
}

impl From<&ExperimentRecord> for PastExperiment {
    fn from(e: &ExperimentRecord) -> Self {
        Self {
            id: e.id,
            kind: e.kind,
            strategy: e.strategy.clone(),
            workload: e.workload.clone(),
            others: e.others.iter().map(|(workload, _)| workload.clone()).collect(),
            fingerprint: e.fingerprint.clone(),
            machine: e.machine.clone(),
            hypothesis: e.hypothesis.clone(),
            predicted: e.predicted.into(),
            meter: e.meter.clone(),
            objective: e.objective.clone(),
            seed: e.seed,
            alpha: e.alpha,
            washout_s: e.washout.as_secs_f64(),
            measured_s: e.measured.as_secs_f64(),
            started_unix: e.started_unix,
            ended_unix: e.ended_unix,
            verdict: e.verdict,
            reason: e.reason.clone(),
            effect: e.known_effect().map(Into::into),
            spans: e.spans.iter().map(Into::into).collect(),
            meanings: e.meanings.iter().map(Into::into).collect(),
            off_level: e.off_level,
            not_excluded: e.not_excluded.clone(),
            evidence: finite(e.evidence),
            stalled_s: e.stalled.as_secs_f64(),
            bloat_bytes: e.bloat.0,
            harm_exposure: finite(e.harm_exposure),
            blocks: e
                .blocks
                .iter()
                .map(|b| Block {
                    index: b.index,
                    on: b.on,
                    measured_from_s: Some(b.measured_from.as_secs_f64()),
                    measured_s: b.measured.as_secs_f64(),
                    work: finite(b.work),
                    cpu_s: b.cpu.as_secs_f64(),
                    score: finite(b.score),
                    broken: b.broken,
                })
                .collect(),
        }
    }
}
