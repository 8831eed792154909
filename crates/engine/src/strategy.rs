//! What a strategy is: one kind of optimisation that looks and suggests, and never acts.

use crate::controller::Controller;
use crate::policy::{Policy, Profile};
use homeostat_model::action::Target;
use homeostat_model::{
    Advice, Bytes, CpuId, Effect, EffectorId, Locality, Machine, MachineSample, MemoryMap, Nanoseconds,
    ProcessId, Reads, StrategyId, Verdict, Workload, WorkloadId, WorkloadKind, WorkloadSample,
};
use std::collections::BTreeMap;

/// A threshold or pace of a strategy: a number with a name, a unit and a range, that the configuration may set in
/// `[settings.STRATEGY]` and that has one value in homeostat's own profile and one in the profile `aso-classic`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Setting {
    /// Strategy it belongs to.
    pub strategy: &'static str,
    /// Name, with the unit as suffix where it has one.
    pub name: &'static str,
    /// Value in homeostat's own profile.
    pub default: f64,
    /// Value in the profile `aso-classic`.
    pub classic: f64,
    /// Smallest allowed value.
    pub low: f64,
    /// Largest allowed value.
    pub high: f64,
    /// One sentence for people: what it does, its unit, and where the classic value comes from.
    pub help: &'static str,
}

impl Setting {
    /// Its value under these settings.
    pub fn value(&self, policy: &Policy) -> f64 {
        policy
            .settings
            .get(self.strategy)
            .and_then(|s| s.get(self.name))
            .copied()
            .unwrap_or(match policy.profile {
                Profile::Homeostat | Profile::AutotuneClassic => self.default,
                Profile::AsoClassic => self.classic,
            })
    }
}

/// Rates of a workload over its recent history.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Load {
    /// Whether it was seen at least twice: until then the rest of this is zero.
    pub known: bool,
    /// CPUs used on average (1.0 = one CPU busy all the time).
    pub cpus: f64,
    /// Share of time its threads waited for a CPU, relative to the time they ran.
    pub runqueue_wait: f64,
    /// Whether it uses all the CPU it can get: then work per second judges, else CPU time per unit of work.
    pub saturated: bool,
    /// Processes that came or went per second.
    pub churn: f64,
}

/// Another workload of the host, for strategies that place several.
#[derive(Clone, Debug, PartialEq)]
pub struct Neighbour {
    /// Whose.
    pub id: WorkloadId,
    /// CPUs used on average.
    pub cpus: f64,
    /// Resident memory.
    pub resident: Bytes,
    /// CPUs on which homeostat placed it, when it did (in force or on trial) or means to (proposed).
    pub placed: Option<Vec<CpuId>>,
    /// What it read from files in its last interval; nothing while memory is not short.
    pub reads: Reads,
    /// Length of that interval.
    pub interval: Nanoseconds,
    /// How it was recognised.
    pub kind: WorkloadKind,
    /// Its processes, oldest first.
    pub processes: Vec<ProcessId>,
    /// Why nobody is to touch it: a person said so, or what its program reads was over so far before a trial showed anything.
    pub left_alone: Option<String>,
    /// Whether a trial has proven that what it reads costs the workload in question its memory.
    pub is_proven: bool,
    /// What it has read from storage since it is looked at, if it was proven to take anybody's memory; zero for others. So
    /// much of what nobody uses may be its own pages.
    pub read_so_far: Bytes,
}

/// A change of homeostat that is in force for the workload.
#[derive(Clone, Debug, PartialEq)]
pub struct Held {
    /// Whose idea it was.
    pub strategy: StrategyId,
    /// What was changed.
    pub target: Target,
    /// Its proven effect.
    pub effect: Effect,
    /// How long its threads waited for a CPU soon after it was accepted, relative to the time they ran; 0 where that is not
    /// known yet.
    pub waited: f64,
    /// How many of its threads ran or waited for a CPU before a place was tried, on average; 0 where that is not known.
    pub runnable: f64,
    /// Share of the machine's CPUs that was busy soon after it was accepted; 0 where that is not known yet.
    pub machine_busy: f64,
}

/// A place that was tried for the workload and refused. Another one may serve all the same.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RefusedPlace {
    /// The CPUs.
    pub cpus: Vec<CpuId>,
    /// Whether its memory went along.
    pub with_memory: bool,
    /// How the trial ended.
    pub verdict: Verdict,
    /// Whether it ended because a neighbour lost by it.
    pub for_a_neighbour: bool,
}

/// All that a strategy may look at.
#[derive(Clone, Copy)]
pub struct Seen<'a> {
    /// Time since boot.
    pub now: Nanoseconds,
    /// Settings.
    pub policy: &'a Policy,
    /// The host.
    pub machine: &'a Machine,
    /// The host in the last interval.
    pub machine_sample: &'a MachineSample,
    /// Length of that interval.
    pub machine_interval: Nanoseconds,
    /// The workload.
    pub workload: &'a Workload,
    /// The workload in the last interval.
    pub sample: &'a WorkloadSample,
    /// Its recent load.
    pub load: &'a Load,
    /// Its memory, if it was inspected for this decision.
    pub memory: Option<&'a MemoryMap>,
    /// Where its threads and memory are, if that was inspected for this decision.
    pub locality: Option<&'a Locality>,
    /// The other workloads above the floors, biggest CPU use first.
    pub neighbours: &'a [Neighbour],
    /// What is already in force for this workload, in the order in which it was accepted.
    pub held: &'a [Held],
    /// Gain proven earlier for this kind of workload on this kind of machine.
    pub known: Option<Effect>,
    /// Places that this strategy proposed for it and that were refused, oldest first.
    pub refused: &'a [RefusedPlace],
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
    /// Ask again with the places of threads and memory.
    InspectLocality,
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
    /// Whether it acts on other workloads as they act on it (where threads run, where memory is), so that it is tried as
    /// one change together with what the same strategy proposes for them.
    pub joint: bool,
    /// Whether it protects from a loss that happens now: it is made at once, without passive history, and proven then.
    pub urgent: bool,
    /// Whether it gives CPUs to threads that wait for one where they are kept: then the work per second judges, whatever judges
    /// this program else. What waits uses no CPU time, so that more room does not show in the work per CPU second.
    pub makes_room: bool,
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
    /// Its thresholds and paces.
    fn settings(&self) -> &'static [Setting] {
        &[]
    }
    /// Whether this machine can do it at all; else why not and the remedy.
    ///
    /// # Errors
    /// The reason, for people.
    fn applicable(&self, machine: &Machine) -> Result<(), String>;
    /// Whether it works in this profile; else why not.
    ///
    /// # Errors
    /// The reason, for people.
    fn works_in(&self, _profile: Profile) -> Result<(), String> {
        Ok(())
    }
    /// Whether it is of use on this machine in this profile; else the first reason why not.
    ///
    /// # Errors
    /// The reason, for people.
    fn usable(&self, machine: &Machine, profile: Profile) -> Result<(), String> {
        self.works_in(profile).and_then(|()| self.applicable(machine))
    }
    /// The loop that moves settings of the whole host, for a strategy that is one; begun anew each time.
    fn controller(&self, _policy: &Policy) -> Option<Box<dyn Controller>> {
        None
    }
    /// Its opinion on one workload.
    fn consider(&self, seen: &Seen<'_>) -> Opinion;
    /// Whether it proposes places, and another one after one was refused ([`Seen::refused`]): then a refused place does not yet
    /// end its back-off for this workload.
    fn knows_other_places(&self) -> bool {
        false
    }
    /// Whether what it changes is a setting of CPUs or of the whole host, which reaches whoever runs there: then nothing of it
    /// is tried or kept while a program works that a person excluded, nor kept while its own workload does nothing.
    fn reaches_others(&self) -> bool {
        false
    }
    /// Whether it protects from losses of memory: then it is asked as soon as memory is short, and what it proposes as
    /// urgent comes before everything else.
    fn relieves(&self) -> bool {
        false
    }
    /// Whether a person has chosen otherwise since a change was accepted: then it is withdrawn, for the reason
    /// returned. Asked at every sample without the memory map, and at every review with it.
    fn unwanted(&self, _seen: &Seen<'_>) -> Option<String> {
        None
    }
    /// The same of one change, for strategies of which a workload may have several: what ended another one is no reason to
    /// withdraw this one.
    fn unwanted_change(&self, seen: &Seen<'_>, _change: &Target) -> Option<String> {
        self.unwanted(seen)
    }
    /// Whether an accepted change leaves the workload less than it asks for by now: then it is withdrawn, for the reason
    /// returned, when that has been so for 20 seconds without a probe. Asked at every sample; a single one may show a load that
    /// waited while the change was off and catches up.
    fn outgrown(&self, _seen: &Seen<'_>) -> Option<String> {
        None
    }
}
