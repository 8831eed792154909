//! What a strategy is: one kind of optimisation that looks and suggests, and never acts.

use crate::policy::Policy;
use homeostat_model::action::Target;
use homeostat_model::{
    Advice, Effect, EffectorId, Machine, MachineSample, MemoryMap, Nanoseconds, StrategyId, Workload,
    WorkloadSample,
};
use std::collections::BTreeMap;

/// Rates of a workload over its recent history.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Load {
    /// CPUs used on average (1.0 = one CPU busy all the time).
    pub cpus: f64,
    /// Share of time its threads waited for a CPU, relative to the time they ran.
    pub runqueue_wait: f64,
    /// Whether it uses all the CPU it can get: then work per second judges, else CPU time per unit of work.
    pub saturated: bool,
    /// Processes that came or went per second.
    pub churn: f64,
}

/// All that a strategy may look at.
pub struct Seen<'a> {
    /// Time since boot.
    pub now: Nanoseconds,
    /// Settings.
    pub policy: &'a Policy,
    /// The host.
    pub machine: &'a Machine,
    /// The host in the last interval.
    pub machine_sample: &'a MachineSample,
    /// The workload.
    pub workload: &'a Workload,
    /// The workload in the last interval.
    pub sample: &'a WorkloadSample,
    /// Its recent load.
    pub load: &'a Load,
    /// Its memory, if it was inspected for this decision.
    pub memory: Option<&'a MemoryMap>,
    /// Gain proven earlier for this kind of workload on this kind of machine.
    pub known: Option<Effect>,
}

/// What a strategy says.
#[derive(Clone, Debug, PartialEq)]
pub enum Opinion {
    /// Try this.
    Propose(Box<Proposal>),
    /// Not for this workload, for a reason a person can read.
    Decline(Declined),
    /// Ask again with the memory map.
    InspectMemory,
}

/// A reasoned refusal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Declined {
    /// Why, with numbers.
    pub reason: String,
    /// What a person could do about it, if anything.
    pub advice: Vec<Advice>,
}

impl Declined {
    /// A refusal without advice.
    pub fn because(reason: impl Into<String>) -> Self {
        Self {
            reason: reason.into(),
            advice: Vec::new(),
        }
    }
}

/// A hypothesis and the change that tests it.
#[derive(Clone, Debug, PartialEq)]
pub struct Proposal {
    /// What and why, in a sentence with numbers.
    pub hypothesis: String,
    /// Predicted relative gain.
    pub predicted: Effect,
    /// Who carries the change out.
    pub effector: EffectorId,
    /// The part that is tried.
    pub target: Target,
    /// The parts that follow in order once the tried part has proven a gain.
    pub stages: Vec<Target>,
    /// Further arguments of the action.
    pub arguments: BTreeMap<String, String>,
    /// Whether the change can be switched back cheaply.
    pub reversible: bool,
    /// Time constant with which the effect sets in after the change is made.
    pub settling: Nanoseconds,
    /// What it may cost, in a sentence.
    pub risk: String,
    /// Advice that goes with it (for parts that homeostat may not touch).
    pub advice: Vec<Advice>,
}

/// One kind of optimisation. Pure: the same view gives the same opinion.
pub trait Strategy: Send + Sync {
    /// Stable name.
    fn id(&self) -> StrategyId;
    /// One line for people.
    fn summary(&self) -> &'static str;
    /// Whether this machine can do it at all; else why not and the remedy.
    ///
    /// # Errors
    /// The reason, for people.
    fn applicable(&self, machine: &Machine) -> Result<(), String>;
    /// Its opinion on one workload.
    fn consider(&self, seen: &Seen<'_>) -> Opinion;
    /// Whether a person has chosen otherwise since a change was accepted: then it is withdrawn, for the reason
    /// returned. Asked at every sample without the memory map, and at every review with it.
    fn unwanted(&self, _seen: &Seen<'_>) -> Option<String> {
        None
    }
}
