//! A machine with its programs, as it is specified.

use super::TimedChange;
use crate::behaviour::ProgramSpec;
use crate::hardware::Profile;
use crate::layout::{Layout, LayoutError};
use crate::memory::MemoryError;
use crate::scheduler::SchedulerKind;
use serde::{Deserialize, Serialize};

const EVENTS_MAX: usize = 100_000;

/// The optimizer's cost in CPU time of this machine.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct OwnCost {
    /// One sample of the machine, in microseconds.
    pub look_us: f64,
    /// Each process that is scanned.
    pub process_us: f64,
    /// Each workload sampled in detail, in microseconds.
    pub detail_us: f64,
    /// Resident memory of the daemon in MiB.
    pub resident_mib: u64,
}

impl Default for OwnCost {
    /// Measured: `tools/bench-own-cost` on two virtual CPUs.
    fn default() -> Self {
        Self {
            look_us: 60.0,
            process_us: 2.0,
            detail_us: 300.0,
            resident_mib: 8,
        }
    }
}

/// The programs' surroundings.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Surroundings {
    /// Share of the free memory that is not in blocks of a large page, 0..1.
    pub fragmentation: f64,
    /// The switch of large pages as found: `always`, `madvise` or `never`.
    pub large_page_switch: String,
    /// Cost of the optimizer.
    pub own_cost: OwnCost,
    /// Whether the processor's event counters can be read.
    pub counters: bool,
    /// Relative noise of the event counters between samples, 0..1.
    pub counter_cv: f64,
    /// Constant bias of each event counter of each program: standard deviation of its factor's logarithm, 0..1.
    pub counter_bias: f64,
}

impl Default for Surroundings {
    fn default() -> Self {
        Self {
            fragmentation: 0.1,
            large_page_switch: "madvise".into(),
            own_cost: OwnCost::default(),
            counters: true,
            counter_cv: 0.02,
            counter_bias: 0.0,
        }
    }
}

/// A machine with its programs, at the start.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WorldSpec {
    /// The machine.
    pub layout: Layout,
    /// How its kernel places threads.
    pub scheduler: SchedulerKind,
    /// Its programs.
    #[serde(default)]
    pub programs: Vec<ProgramSpec>,
    /// Profiles that the programs name, in addition to the shipped ones.
    #[serde(default)]
    pub profiles: Vec<Profile>,
    /// Seed of all noise.
    #[serde(default)]
    pub seed: u64,
    /// Changes by people.
    #[serde(default)]
    pub events: Vec<TimedChange>,
    /// The programs' surroundings.
    #[serde(default)]
    pub surroundings: Surroundings,
}

impl WorldSpec {
    /// A machine with nothing on it.
    pub fn new(layout: Layout, scheduler: SchedulerKind) -> Self {
        Self {
            layout,
            scheduler,
            programs: Vec::new(),
            profiles: Vec::new(),
            seed: 0,
            events: Vec::new(),
            surroundings: Surroundings::default(),
        }
    }

    pub(super) fn complaints(&self) -> Vec<String> {
        let mut wrong: Vec<String> = self.programs.iter().flat_map(ProgramSpec::complaints).collect();
        if !["always", "madvise", "never"].contains(&self.surroundings.large_page_switch.as_str()) {
            wrong.push(format!(
                "large_page_switch = {:?}: always, madvise or never",
                self.surroundings.large_page_switch
            ));
        }
        for (name, value) in [
            ("counter_cv", self.surroundings.counter_cv),
            ("counter_bias", self.surroundings.counter_bias),
        ] {
            if !(0.0..=1.0).contains(&value) {
                wrong.push(format!("{name} = {value}: must be between 0 and 1"));
            }
        }
        if self.events.len() > EVENTS_MAX {
            wrong.push(format!("{} events: at most {EVENTS_MAX}", self.events.len()));
        }
        wrong
    }
}

/// Why a world cannot be, or cannot change like that.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum WorldError {
    /// The machine makes no sense.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// Values out of range.
    #[error("{0}")]
    Values(String),
    /// No such program.
    #[error("there is no program or workload {name:?}")]
    NoSuchProgram {
        /// The requested name.
        name: String,
    },
    /// No such profile.
    #[error("program {program}: there is no profile {name:?}")]
    NoSuchProfile {
        /// The program.
        program: String,
        /// The requested name.
        name: String,
    },
    /// No such CPU or node.
    #[error("the machine has no {0}")]
    NoSuchPlace(String),
    /// A program does not fit into memory.
    #[error("{program} does not fit into memory: {source}")]
    Memory {
        /// The program.
        program: String,
        /// Why.
        source: MemoryError,
    },
    /// The last CPU or node cannot go, or memory cannot be moved away.
    #[error("{0}")]
    Impossible(String),
}
