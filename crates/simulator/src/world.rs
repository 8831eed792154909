//! The simulated machine in time: programs run, load changes, people interfere, and all of it is integrated lazily.
//!
//! Rates change only when something changes: a load, a placement, a page that moved, a switch. Between two changes a
//! program's work is its rate times the time, second by second times its noise; so an hour in which nothing happens
//! costs less than a millisecond. What the optimizer itself costs is taken from the machine: CPU time when no CPU is
//! idle, and standstill while pages that are in use are moved or converted.

use crate::behaviour::{BurstCursor, Load, ProgramSpec, Response, ResponseTimes};
use crate::hardware::{Copying, Demand, Profile, Rate, Warm, solve_with};
use crate::layout::{Layout, LayoutError};
use crate::memory::{Memory, MemoryError, Segment, Shape};
use crate::noise::{CELL_NS, Draws, Noise};
use crate::scheduler::{Classes, Placed, Request, SchedulerKind, place_in};
use homeostat_model::{Bytes, CpuId, Nanoseconds, NodeId, ProcessId};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

/// Time constant with which threads reach the CPUs that they are restricted to, in seconds (experiments.md, CPU
/// affinity: 1.5 s).
pub const PLACEMENT_SETTLING_S: f64 = 1.5;
/// Accesses to memory of a running thread per second, for the chance that it meets a page on the move (assumed).
const ACCESSES_PER_S: f64 = 1e7;
/// Moments after a change of placement at which the rates are worked out again; after the last one it is over.
const SHIFT_STEPS_S: [f64; 9] = [0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.5, 7.5];
/// Most rounds to find how many threads are busy; each is a solution of the whole machine.
const ROUNDS_MAX: usize = 16;
/// Times the rates are worked out for a state at rest.
const REST_ROUNDS: u32 = 3;
/// Relative change of the busy threads below which they are found.
const ROUNDS_PRECISION: f64 = 1e-6;
/// Share of the busiest chip's threads from which on a chip counts as spanned in full.
const SPANNED_FROM: f64 = 0.25;
/// Requests of an open load that may wait, in seconds of its rate; more are turned away.
const BACKLOG_S: f64 = 30.0;
/// Largest share of a stretch of time that a program can stand still for us.
const LOST_MAX: f64 = 0.95;
/// How long after the end of a copy it is noticed: the next slice of a paced move comes within this time, in ns.
const COPY_END_NS: u64 = 2_000_000;
/// Clock ticks per second in start times.
const TICKS_PER_S: f64 = 100.0;
/// Start times are counted from long before the beginning, so that programs can be older than the run.
const EPOCH_S: f64 = 1e7;
/// Seconds since the epoch at the beginning of every run.
const UNIX_START: u64 = 1_700_000_000;
/// Most changes by people in one specification.
const EVENTS_MAX: usize = 100_000;
/// Most processes of one workload, forks included.
const PROCESSES_MAX: usize = 8192;

/// Something that a person, another tool, a program or the hardware does; never homeostat.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "what", rename_all = "kebab-case", deny_unknown_fields)]
pub enum PersonChange {
    /// Binds the threads of a program to CPUs, or frees them (`cpus` absent).
    BindThreads {
        /// Program or workload.
        program: String,
        /// CPUs; absent = all.
        #[serde(default)]
        cpus: Option<Vec<u32>>,
    },
    /// Binds the memory of a program to nodes and moves it there, or frees it (`nodes` absent; it then stays).
    BindMemory {
        /// Program or workload.
        program: String,
        /// Nodes; absent = all.
        #[serde(default)]
        nodes: Option<Vec<u32>>,
    },
    /// Moves a share of the memory of a program to a node, hottest first, without binding it.
    MovePages {
        /// Program or workload.
        program: String,
        /// Node.
        node: u32,
        /// Share of what lies elsewhere, 0..1.
        share: f64,
    },
    /// Puts a share of the memory of a program on large pages (0 = splits all).
    LargePages {
        /// Program or workload.
        program: String,
        /// Share of its full pieces, 0..1.
        share: f64,
    },
    /// Sets the system-wide switch of large pages: `always`, `madvise` or `never`.
    LargePageSwitch {
        /// Value.
        enabled: String,
    },
    /// Switches the hardware prefetch of CPUs on or off.
    Prefetch {
        /// CPUs; absent = all.
        #[serde(default)]
        cpus: Option<Vec<u32>>,
        /// On or off.
        on: bool,
    },
    /// Chooses whether homeostat may touch a program.
    Choose {
        /// Program or workload.
        program: String,
        /// Leave it alone.
        never: bool,
    },
    /// Starts a program that is not running.
    Start {
        /// Program or workload.
        program: String,
    },
    /// Ends a program.
    Stop {
        /// Program or workload.
        program: String,
    },
    /// Ends a program and starts it again.
    Restart {
        /// Program or workload.
        program: String,
    },
    /// A program executes itself anew in the same processes: its memory is another, what its threads are bound to stays.
    Execute {
        /// Program or workload.
        program: String,
    },
    /// A program forks.
    Fork {
        /// Program or workload.
        program: String,
        /// Processes that appear.
        processes: u32,
    },
    /// A program changes what it does.
    Phase {
        /// Program or workload.
        program: String,
        /// Name of the profile from now on; absent = as before.
        #[serde(default)]
        profile: Option<String>,
        /// Factor on the load from now on; absent = as before.
        #[serde(default)]
        load: Option<f64>,
    },
    /// CPUs go offline or come back.
    Cpus {
        /// CPUs.
        cpus: Vec<u32>,
        /// Online or offline.
        online: bool,
    },
    /// A memory node goes offline (its pages move elsewhere first) or comes back.
    Node {
        /// Node.
        node: u32,
        /// Online or offline.
        online: bool,
    },
    /// Another tuner runs or ends.
    OtherTuner {
        /// Its name.
        name: String,
        /// Whether it runs.
        running: bool,
    },
}

impl PersonChange {
    /// The program it is about.
    pub fn program(&self) -> Option<&str> {
        match self {
            Self::BindThreads { program, .. }
            | Self::BindMemory { program, .. }
            | Self::MovePages { program, .. }
            | Self::LargePages { program, .. }
            | Self::Choose { program, .. }
            | Self::Start { program }
            | Self::Stop { program }
            | Self::Restart { program }
            | Self::Execute { program }
            | Self::Fork { program, .. }
            | Self::Phase { program, .. } => Some(program),
            Self::LargePageSwitch { .. }
            | Self::Prefetch { .. }
            | Self::Cpus { .. }
            | Self::Node { .. }
            | Self::OtherTuner { .. } => None,
        }
    }
}

impl fmt::Display for PersonChange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let list = |n: &Option<Vec<u32>>| match n {
            Some(n) => n.iter().map(u32::to_string).collect::<Vec<_>>().join(","),
            None => "all".to_owned(),
        };
        let state = |on: &bool| if *on { "on" } else { "off" };
        match self {
            Self::BindThreads { program, cpus } => {
                write!(f, "a person binds {program} to CPUs {}", list(cpus))
            }
            Self::BindMemory { program, nodes } => {
                write!(
                    f,
                    "a person binds the memory of {program} to nodes {}",
                    list(nodes)
                )
            }
            Self::MovePages { program, node, share } => {
                write!(
                    f,
                    "a person moves {:.0} % of the remote memory of {program} to node {node}",
                    share * 100.0
                )
            }
            Self::LargePages { program, share } => {
                write!(
                    f,
                    "a person puts {:.0} % of {program} on large pages",
                    share * 100.0
                )
            }
            Self::LargePageSwitch { enabled } => write!(f, "a person sets large pages to {enabled}"),
            Self::Prefetch { cpus, on } => write!(
                f,
                "a person switches prefetch {} on CPUs {}",
                state(on),
                list(cpus)
            ),
            Self::Choose { program, never } => {
                write!(
                    f,
                    "a person says {} for {program}",
                    if *never { "never" } else { "as you like" }
                )
            }
            Self::Start { program } => write!(f, "{program} starts"),
            Self::Stop { program } => write!(f, "{program} ends"),
            Self::Restart { program } => write!(f, "{program} restarts"),
            Self::Execute { program } => write!(f, "{program} executes itself anew"),
            Self::Fork { program, processes } => write!(f, "{program} forks {processes} processes"),
            Self::Phase {
                program,
                profile,
                load,
            } => {
                write!(f, "{program} changes phase")?;
                if let Some(p) = profile {
                    write!(f, ", profile {p}")?;
                }
                match load {
                    Some(l) => write!(f, ", load {l}"),
                    None => Ok(()),
                }
            }
            Self::Cpus { cpus, online } => {
                write!(f, "CPUs {} go {}line", list(&Some(cpus.clone())), state(online))
            }
            Self::Node { node, online } => write!(f, "node {node} goes {}line", state(online)),
            Self::OtherTuner { name, running } => {
                write!(f, "{name} {}", if *running { "runs" } else { "ends" })
            }
        }
    }
}

/// A change at a time.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TimedChange {
    /// Seconds since the start.
    pub at_s: f64,
    /// What happens.
    pub change: PersonChange,
}

/// What the optimizer itself costs, in CPU time of this machine.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct OwnCost {
    /// One look at the machine, in microseconds.
    pub look_us: f64,
    /// Each process that is scanned.
    pub process_us: f64,
    /// Each workload that is looked at in detail.
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

/// What surrounds the programs.
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
    /// Noise of the event counters from one look to the next, relative, 0..1.
    pub counter_cv: f64,
    /// By how much each event counter of each program is off, always: the standard deviation of the logarithm of its
    /// factor, 0..1.
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
    /// Profiles that the programs name, beside those that ship with the program.
    #[serde(default)]
    pub profiles: Vec<Profile>,
    /// Seed of all noise.
    #[serde(default)]
    pub seed: u64,
    /// What people do.
    #[serde(default)]
    pub events: Vec<TimedChange>,
    /// What surrounds the programs.
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
        /// What was asked for.
        name: String,
    },
    /// No such profile.
    #[error("program {program}: there is no profile {name:?}")]
    NoSuchProfile {
        /// Whose.
        program: String,
        /// What was asked for.
        name: String,
    },
    /// No such CPU or node.
    #[error("the machine has no {0}")]
    NoSuchPlace(String),
    /// A program does not fit into memory.
    #[error("{program} does not fit into memory: {source}")]
    Memory {
        /// Which.
        program: String,
        /// Why.
        source: MemoryError,
    },
    /// The last CPU or node cannot go, or memory cannot be moved away.
    #[error("{0}")]
    Impossible(String),
}

/// What a program did since the start of the run.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Totals {
    /// Seconds in which it ran.
    pub run_s: f64,
    /// Units of work.
    pub work: f64,
    /// CPU seconds, as the operating system counts them.
    pub cpu_s: f64,
    /// Seconds of cores consumed: in a shared partition a core that runs one thread is consumed whole.
    pub core_s: f64,
    /// Seconds that its threads waited for a CPU.
    pub wait_s: f64,
    /// Seconds that it stood still for moves and conversions, or lost to the optimizer.
    pub lost_s: f64,
    /// Integral over time of the share of accesses that are local.
    pub local_s: f64,
    /// … of the share of accesses that go to large pages.
    pub large_s: f64,
    /// … of the share of the memory traffic that is prefetch.
    pub prefetch_s: f64,
    /// … of cycles per instruction.
    pub cpi_s: f64,
    /// … of the latency of a load from memory, in nanoseconds.
    pub latency_ns_s: f64,
    /// Response times.
    pub responses: ResponseTimes,
}

impl Totals {
    fn add(&mut self, o: &Self) {
        for (a, b) in [
            (&mut self.run_s, o.run_s),
            (&mut self.work, o.work),
            (&mut self.cpu_s, o.cpu_s),
            (&mut self.core_s, o.core_s),
            (&mut self.wait_s, o.wait_s),
            (&mut self.lost_s, o.lost_s),
            (&mut self.local_s, o.local_s),
            (&mut self.large_s, o.large_s),
            (&mut self.prefetch_s, o.prefetch_s),
            (&mut self.cpi_s, o.cpi_s),
            (&mut self.latency_ns_s, o.latency_ns_s),
        ] {
            *a += b;
        }
        self.responses.merge(&o.responses);
    }
}

/// How fast a program is now, without noise.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Pace {
    /// Units of work per second.
    pub work_per_s: f64,
    /// Units per second that it could do at most where it is allowed to run.
    pub capacity_per_s: f64,
    /// Share of the work offered to it that it does: below 1 its requests wait ever longer. 1 for a closed load.
    pub served: f64,
    /// CPUs used.
    pub cpus: f64,
    /// Cores consumed.
    pub cores: f64,
    /// Threads that wait for a CPU.
    pub waiting: f64,
    /// Share of the accesses that are local.
    pub local_share: f64,
    /// Share of the accesses on large pages.
    pub large_share: f64,
}

/// Everything that an effector or a person can change, for comparing machines.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Settings {
    /// CPUs to which threads are restricted, by workload; free ones are absent.
    pub masks: BTreeMap<String, Vec<CpuId>>,
    /// Workloads whose threads are kept on their boards in groups, or (`NAME by process 0,0,1,1`) each of whose processes
    /// is kept on a chip.
    pub grouped: Vec<String>,
    /// Small pages (or their equivalent) by workload and node.
    pub pages: BTreeMap<String, BTreeMap<NodeId, u64>>,
    /// Pieces on large pages by workload.
    pub large: BTreeMap<String, u64>,
    /// A number over the place and kind of every piece, by workload: differs when any piece differs.
    pub pieces: BTreeMap<String, u64>,
    /// Start time of the main process by workload, in ticks: another one = it restarted and lost what was set on it.
    pub started: BTreeMap<String, u64>,
    /// CPUs whose hardware prefetch is off.
    pub prefetch_off: Vec<CpuId>,
    /// The switch of large pages.
    pub large_page_switch: String,
    /// CPUs that are offline.
    pub offline: Vec<CpuId>,
    /// Nodes that are offline.
    pub nodes_offline: Vec<NodeId>,
}

#[derive(Clone, Debug)]
pub(crate) struct Alive {
    /// Seconds since the start of the run; negative when it is older.
    pub(crate) started_s: f64,
    pub(crate) processes: Vec<ProcessId>,
    pub(crate) private: Vec<Segment>,
    pub(crate) shared: Option<Segment>,
    /// How often it executed itself anew.
    pub(crate) executions: u32,
}

impl Alive {
    pub(crate) fn segments(&self) -> impl Iterator<Item = &Segment> {
        self.private.iter().chain(&self.shared)
    }
    pub(crate) fn resident(&self) -> Bytes {
        self.segments().map(Segment::resident).sum()
    }
    /// Segment `index` in the order private by process, then shared.
    pub(crate) fn segment(&self, index: usize) -> Option<&Segment> {
        self.private.get(index).or_else(|| {
            (index == self.private.len())
                .then_some(self.shared.as_ref())
                .flatten()
        })
    }
    pub(crate) fn segment_count(&self) -> usize {
        self.private.len() + usize::from(self.shared.is_some())
    }
}

/// A workload: one instance of a program.
#[derive(Clone, Debug)]
pub(crate) struct Program {
    pub(crate) name: String,
    pub(crate) spec: usize,
    pub(crate) profile: Profile,
    pub(crate) alive: Option<Alive>,
    /// CPUs asked for; `None` = all.
    pub(crate) mask: Option<Vec<CpuId>>,
    /// Whether each thread is to stay on its board, in groups that share data.
    pub(crate) grouped: bool,
    /// The chip on which each process is kept, by its number; empty = wherever the mask allows.
    pub(crate) split: Vec<u32>,
    /// Whether a person asked for the mask.
    pub(crate) bound: bool,
    /// Nodes that a person bound the memory to.
    pub(crate) nodes: Option<Vec<u32>>,
    pub(crate) never: bool,
    pub(crate) totals: Totals,
    pub(crate) rate: Rate,
    pub(crate) placed: Option<Placed>,
    pub(crate) pace: Pace,
    noise: Noise,
    arrival: Noise,
    draws: Draws,
    cursor: BurstCursor,
    /// Factor of the modulation, of the phase, and of people.
    modulation: f64,
    load: f64,
    generation: u64,
    think_s: Option<f64>,
    offered: Option<f64>,
    busy: f64,
    unit_s: f64,
    response: Response,
    /// Units that arrive per second (open load).
    arrivals: Option<f64>,
    pending: f64,
    backlog: f64,
    debt_s: f64,
}

/// Where a workload's threads were, whether they were grouped by board, and whether each process had its chip.
type Place = (Option<Placed>, bool, bool);

#[derive(Clone, Debug, PartialEq)]
enum Event {
    Start(usize),
    End(usize),
    Restart(usize, u64),
    Phase(usize, u64, usize),
    Modulate(usize, u64),
    Shift,
    /// The copying for this program that was to last until then is over.
    Copied(usize, u64),
    Change(PersonChange),
}

/// Copying of memory for one program that is under way.
#[derive(Clone, Debug)]
struct Mover {
    /// When it ends, ns.
    until: u64,
    copies: Vec<Copying>,
}

/// The simulated machine. See the module's page.
#[derive(Clone, Debug)]
pub struct World {
    specs: Vec<ProgramSpec>,
    profiles: Vec<Profile>,
    layout: Layout,
    scheduler: SchedulerKind,
    surroundings: Surroundings,
    seed: u64,
    now_ns: u64,
    pub(crate) memory: Memory,
    pub(crate) programs: Vec<Program>,
    pub(crate) by_name: BTreeMap<String, usize>,
    online: Vec<bool>,
    prefetch_on: Vec<bool>,
    tuners: BTreeSet<String>,
    queue: BTreeMap<(u64, u64), Event>,
    serial: u64,
    next_pid: i32,
    dirty: bool,
    /// Rates are not worked out until everything is arranged.
    arranging: bool,
    /// How often the rates were worked out.
    solved: u64,
    warm: Warm,
    /// Where the threads were when a restriction changed, and when.
    shift: Option<(Vec<Place>, u64)>,
    /// Copying of memory under way, by program.
    movers: BTreeMap<usize, Mover>,
    own_cpu_s: f64,
    busy_s: f64,
}

impl World {
    /// The world at its start. Programs with `start_s` = 0 run.
    ///
    /// # Errors
    /// [`WorldError`]: the layout, a program or an event makes no sense, or memory does not suffice.
    pub fn new(spec: WorldSpec) -> Result<Self, WorldError> {
        spec.layout.check()?;
        let mut wrong: Vec<String> = spec.programs.iter().flat_map(ProgramSpec::complaints).collect();
        if !["always", "madvise", "never"].contains(&spec.surroundings.large_page_switch.as_str()) {
            wrong.push(format!(
                "large_page_switch = {:?}: always, madvise or never",
                spec.surroundings.large_page_switch
            ));
        }
        for (name, value) in [
            ("counter_cv", spec.surroundings.counter_cv),
            ("counter_bias", spec.surroundings.counter_bias),
        ] {
            if !(0.0..=1.0).contains(&value) {
                wrong.push(format!("{name} = {value}: must be between 0 and 1"));
            }
        }
        if spec.events.len() > EVENTS_MAX {
            wrong.push(format!("{} events: at most {EVENTS_MAX}", spec.events.len()));
        }
        if let Some(first) = wrong.into_iter().next() {
            return Err(WorldError::Values(first));
        }
        let cpus = spec.layout.cpus() as usize;
        let memory = Memory::new(
            &spec.layout.node_memory,
            spec.layout.small_page,
            spec.layout.large_page,
            spec.surroundings.fragmentation,
        );
        let mut world = Self {
            memory,
            programs: Vec::new(),
            by_name: BTreeMap::new(),
            online: vec![true; cpus],
            prefetch_on: vec![true; cpus],
            tuners: BTreeSet::new(),
            queue: BTreeMap::new(),
            serial: 0,
            next_pid: 1000,
            dirty: true,
            arranging: false,
            solved: 0,
            warm: Warm::default(),
            shift: None,
            movers: BTreeMap::new(),
            own_cpu_s: 0.0,
            busy_s: 0.0,
            now_ns: 0,
            specs: spec.programs,
            profiles: spec.profiles,
            layout: spec.layout,
            scheduler: spec.scheduler,
            surroundings: spec.surroundings,
            seed: spec.seed,
        };
        for index in 0..world.specs.len() {
            world.install(index)?;
        }
        for index in 0..world.programs.len() {
            let Some(start_s) = world.spec(index).map(|s| s.start_s) else {
                continue;
            };
            if start_s <= 0.0 {
                world.start(index)?;
            } else {
                world.schedule_s(start_s, Event::Start(index));
            }
        }
        for event in spec.events {
            world.check_change(&event.change)?;
            world.schedule_s(event.at_s, Event::Change(event.change));
        }
        Ok(world)
    }

    fn install(&mut self, index: usize) -> Result<(), WorldError> {
        let Some(spec) = self.specs.get(index).cloned() else {
            return Ok(());
        };
        let profile = self.profile(&spec.name, &spec)?;
        for name in spec.workloads() {
            if self.by_name.contains_key(&name) {
                return Err(WorldError::Values(format!("two workloads are called {name}")));
            }
            let number = self.programs.len();
            let stream = number as u64 * 8;
            let mask = spec.choice.cpus.as_ref().map(|c| self.cpu_list(c)).transpose()?;
            if let Some(nodes) = &spec.choice.nodes {
                self.check_nodes(nodes)?;
            }
            self.programs.push(Program {
                name: name.clone(),
                spec: index,
                profile: profile.clone(),
                alive: None,
                grouped: false,
                split: Vec::new(),
                bound: mask.is_some(),
                mask,
                nodes: spec.choice.nodes.clone(),
                never: spec.choice.never,
                totals: Totals::default(),
                rate: Rate::default(),
                placed: None,
                pace: Pace::default(),
                noise: Noise::new(spec.noise, self.seed, stream, 0),
                arrival: Noise::new(spec.arrival_noise, self.seed, stream + 1, 0),
                draws: Draws::new(self.seed, stream + 2),
                cursor: BurstCursor::default(),
                modulation: 1.0,
                load: 1.0,
                generation: 0,
                think_s: None,
                offered: None,
                busy: 0.0,
                unit_s: 0.0,
                response: Response::default(),
                arrivals: None,
                pending: 0.0,
                backlog: 0.0,
                debt_s: 0.0,
            });
            self.by_name.insert(name, number);
        }
        Ok(())
    }

    fn profile(&self, program: &str, spec: &ProgramSpec) -> Result<Profile, WorldError> {
        let mut profile = self
            .profile_named(&spec.profile)
            .ok_or_else(|| WorldError::NoSuchProfile {
                program: program.to_owned(),
                name: spec.profile.clone(),
            })?;
        if let Some(instructions) = spec.instructions_per_unit {
            profile.instructions_per_unit = instructions;
        }
        Ok(profile)
    }

    fn profile_named(&self, name: &str) -> Option<Profile> {
        self.profiles
            .iter()
            .find(|p| p.name == name)
            .cloned()
            .or_else(|| crate::profiles::profile(name))
    }

    // ---- time ----------------------------------------------------------------------------------------------------

    /// Time since the start of the run.
    pub fn now(&self) -> Nanoseconds {
        Nanoseconds(self.now_ns)
    }

    /// Seconds since the epoch.
    pub fn unix_seconds(&self) -> u64 {
        UNIX_START + self.now_ns / 1_000_000_000
    }

    fn now_s(&self) -> f64 {
        self.now_ns as f64 / 1e9
    }

    fn schedule_s(&mut self, at_s: f64, event: Event) {
        let at = Nanoseconds::from_secs_f64(at_s).0.max(self.now_ns);
        self.serial += 1;
        self.queue.insert((at, self.serial), event);
    }

    /// Lets time pass. Going back is not possible: then nothing happens.
    pub fn advance_to(&mut self, until: Nanoseconds) {
        while let Some((&(at, serial), _)) = self.queue.first_key_value() {
            if at > until.0 {
                break;
            }
            self.pass(at);
            if let Some(event) = self.queue.remove(&(at, serial)) {
                self.happen(event);
            }
        }
        self.pass(until.0);
    }

    fn happen(&mut self, event: Event) {
        match event {
            Event::Start(p) => {
                if self.programs.get(p).is_some_and(|p| p.alive.is_none()) {
                    // Without memory for it, it does not start: a person would see the message of its shell.
                    let _refused = self.start(p);
                }
            }
            Event::End(p) => self.end(p),
            Event::Restart(p, generation) => {
                if self
                    .programs
                    .get(p)
                    .is_some_and(|p| p.generation == generation && p.alive.is_some())
                {
                    self.end(p);
                    let _refused = self.start(p);
                }
            }
            Event::Phase(p, generation, index) => {
                let phase = self.spec(p).and_then(|s| s.phases.get(index)).cloned();
                if let Some(phase) = phase {
                    if self.programs.get(p).is_some_and(|p| p.generation == generation) {
                        self.change_phase(p, phase.profile.as_deref(), phase.load);
                    }
                }
            }
            Event::Modulate(p, generation) => {
                if self
                    .programs
                    .get(p)
                    .is_some_and(|p| p.generation == generation && p.alive.is_some())
                {
                    self.modulate(p);
                }
            }
            Event::Shift => self.dirty = true,
            Event::Copied(p, until) => {
                if self.movers.get(&p).is_some_and(|m| m.until == until) {
                    self.movers.remove(&p);
                    self.dirty = true;
                }
            }
            Event::Change(change) => {
                // Checked when the world was made; what is impossible by now (a program that is gone) does not happen.
                let _refused = self.person(change);
            }
        }
    }

    fn modulate(&mut self, p: usize) {
        let now = self.now_s();
        let Some(shape) = self.spec(p).map(|s| s.modulation) else {
            return;
        };
        let Some(program) = self.programs.get_mut(p) else {
            return;
        };
        let (factor, until) = shape.at(now, &program.draws, &mut program.cursor);
        if program.modulation != factor {
            program.modulation = factor;
            self.dirty = true;
        }
        let generation = program.generation;
        if until.is_finite() {
            self.schedule_s(until.max(now + 1e-3), Event::Modulate(p, generation));
        }
    }

    /// Integrates to `until` with the present rates.
    fn pass(&mut self, until: u64) {
        if until <= self.now_ns {
            return;
        }
        self.settle();
        self.settle();
        for p in self.programs.iter_mut().filter(|p| p.alive.is_some()) {
            self.busy_s += p.run(self.now_ns, until);
        }
        self.now_ns = until;
    }

    // ---- rates -----------------------------------------------------------------------------------------------------

    fn effective(&self, p: &Program) -> Option<Vec<bool>> {
        let all_online = self.online.iter().all(|o| *o);
        match &p.mask {
            None if all_online => None,
            None => Some(self.online.clone()),
            Some(mask) => {
                let mut allowed = vec![false; self.online.len()];
                for cpu in mask {
                    if let Some(a) = allowed.get_mut(cpu.0 as usize) {
                        *a = self.online.get(cpu.0 as usize).copied().unwrap_or(false);
                    }
                }
                // The kernel breaks an affinity that leaves no CPU.
                Some(if allowed.iter().any(|a| *a) {
                    allowed
                } else {
                    self.online.clone()
                })
            }
        }
    }

    /// Whether its threads may not use every CPU that is online.
    fn is_bound(&self, p: &Program) -> bool {
        p.mask.as_ref().is_some_and(|mask| {
            let mut allowed = vec![false; self.online.len()];
            for cpu in mask {
                if let Some(a) = allowed.get_mut(cpu.0 as usize) {
                    *a = true;
                }
            }
            self.online.iter().zip(&allowed).any(|(online, a)| *online && !a)
        })
    }

    /// What is being copied now.
    fn copies(&self) -> Vec<Copying> {
        self.movers
            .values()
            .flat_map(|m| m.copies.iter().copied())
            .collect()
    }

    /// Somebody copies memory of a program between nodes from now on for so long: `bytes` by the nodes from and to. It is
    /// spread evenly over that time, and takes its part of links and memory controllers from the programs. A new copy of
    /// the same program takes the place of the one before.
    pub(crate) fn copy(&mut self, p: usize, bytes: &BTreeMap<(usize, usize), u64>, seconds: f64) {
        if bytes.is_empty() || !(seconds > 0.0 && seconds.is_finite()) {
            return;
        }
        let until = self.now_ns + Nanoseconds::from_secs_f64(seconds).0;
        self.movers.insert(
            p,
            Mover {
                until,
                copies: bytes
                    .iter()
                    .map(|((from, to), bytes)| Copying {
                        from: *from,
                        to: *to,
                        gbps: *bytes as f64 / (seconds * 1e9),
                    })
                    .collect(),
            },
        );
        // A slice that follows at once replaces this one before the end is noticed: one solution instead of two.
        self.schedule_s((until + COPY_END_NS) as f64 / 1e9, Event::Copied(p, until));
        self.dirty = true;
    }

    /// Works out the rates after something changed.
    fn settle(&mut self) {
        if !self.dirty || self.arranging {
            return;
        }
        self.dirty = false;
        self.solved += 1;
        let alive: Vec<usize> = (0..self.programs.len())
            .filter(|p| self.programs[*p].alive.is_some())
            .collect();
        for p in &mut self.programs {
            p.flush();
            if p.alive.is_none() {
                p.placed = None;
                p.pace = Pace::default();
            }
        }
        if alive.is_empty() {
            return;
        }
        let fading = self.shift.as_ref().and_then(|(from, since)| {
            let age = (self.now_ns - since) as f64 / 1e9;
            let last = SHIFT_STEPS_S.last().copied().unwrap_or(0.0);
            (age < last).then(|| (from.clone(), (-age / PLACEMENT_SETTLING_S).exp()))
        });
        if fading.is_none() {
            self.shift = None;
        }
        let mut requests = Vec::with_capacity(alive.len());
        let mut demands = Vec::with_capacity(alive.len());
        let mut apart = Vec::with_capacity(alive.len());
        let mut limits: Vec<Limit> = Vec::with_capacity(alive.len());
        let mut bound = Vec::with_capacity(alive.len());
        for index in &alive {
            let Some((p, spec)) = self
                .programs
                .get(*index)
                .and_then(|p| Some((p, self.specs.get(p.spec)?)))
            else {
                continue;
            };
            let limit = Limit::of(p, spec);
            let lean = if !p.split.is_empty() {
                Some(self.by_chip(&p.split))
            } else {
                (!spec.threads_on.is_empty() && p.mask.is_none()).then(|| spec.threads_on.clone())
            };
            requests.push(Request {
                runnable: if p.busy > 0.0 {
                    p.busy.min(limit.threads)
                } else {
                    limit.start
                },
                allowed: self.effective(p),
                lean,
                chance: 0.0,
            });
            bound.push(self.is_bound(p));
            // Processes on the way to their chips are as far from their memory as before.
            let arrived = match &fading {
                Some((from, weight)) if !from.get(*index).is_some_and(|(_, _, split)| *split) => 1.0 - weight,
                _ => 1.0,
            };
            let mut demand = self.demand(p, arrived);
            let to = f64::from(u8::from(p.grouped));
            demand.grouped = match &fading {
                Some((from, weight)) => {
                    let before = from.get(*index).map_or(to, |(_, g, _)| f64::from(u8::from(*g)));
                    weight * before + (1.0 - weight) * to
                }
                None => to,
            };
            demands.push(demand);
            apart.push(!p.split.is_empty());
            limits.push(limit);
        }
        let mut placed = Vec::new();
        let mut solution = crate::hardware::Solution::default();
        let copies = self.copies();
        let mut classes = Classes::of(&self.layout, &requests);
        for _ in 0..ROUNDS_MAX {
            for ((request, limit), bound) in requests.iter_mut().zip(&limits).zip(&bound) {
                request.chance = if *bound {
                    limit.chance(request.runnable)
                } else {
                    0.0
                };
            }
            placed = place_in(&self.layout, self.scheduler, &requests, &mut classes);
            if let Some((from, weight)) = &fading {
                for (index, now) in alive.iter().zip(&mut placed) {
                    if let Some((Some(before), _, _)) = from.get(*index) {
                        *now = blend(before, now, *weight);
                    }
                }
            }
            for ((demand, placed), apart) in demands.iter_mut().zip(&placed).zip(&apart) {
                self.aim(demand, placed, *apart);
            }
            solution = solve_with(&self.layout, &demands, &copies, &mut self.warm);
            let mut moved: f64 = 0.0;
            for (((limit, request), placed), rate) in
                limits.iter().zip(&mut requests).zip(&placed).zip(&solution.rates)
            {
                let wanted = limit.busy(placed, unit_s(&limit.profile, rate));
                moved = moved.max((wanted - request.runnable).abs() / wanted.max(1e-9));
                request.runnable = wanted;
            }
            if moved < ROUNDS_PRECISION {
                break;
            }
        }
        let online = self.online.iter().filter(|o| **o).count() as f64;
        let running: f64 = placed.iter().map(Placed::running_threads).sum();
        let idle = (online - running).max(0.0);
        for ((((index, request), placed), rate), (demand, limit)) in alive
            .iter()
            .zip(&requests)
            .zip(placed)
            .zip(&solution.rates)
            .zip(demands.iter().zip(&limits))
        {
            let room = self
                .programs
                .get(*index)
                .and_then(|p| self.effective(p))
                .map_or(online, |a| a.iter().filter(|a| **a).count() as f64);
            if let Some(p) = self.programs.get_mut(*index) {
                // Calibrated at full load; what it is now follows from that.
                self.dirty |= p.load * p.modulation != 1.0
                    && matches!(limit.drive, Drive::FindRate | Drive::FindThink { .. });
                p.adopt(limit, request.runnable, placed, *rate, demand, room, idle);
            }
        }
    }

    /// Share of the processes by chip.
    fn by_chip(&self, split: &[u32]) -> Vec<f64> {
        let mut chips = vec![0.0; self.layout.chips.len()];
        for chip in split {
            if let Some(c) = chips.get_mut(*chip as usize) {
                *c += 1.0;
            }
        }
        chips
    }

    /// What a program asks of the machine, apart from where it runs. Where each process has a chip of its own, its private
    /// memory on the node of that chip is `aligned` with it, as far as it has `arrived` (0..1).
    fn demand(&self, p: &Program, arrived: f64) -> Demand {
        let nodes = self.memory.nodes().len();
        let mut memory = vec![0.0; nodes];
        let mut large = 0.0;
        let mut resident = 0.0;
        let mut aligned = 0.0;
        if let Some(alive) = &p.alive {
            resident = alive.resident().0 as f64;
            for (s, chip) in alive.private.iter().zip(&p.split) {
                let node = self
                    .layout
                    .chips
                    .get(*chip as usize)
                    .map_or(0, |c| c.node as usize);
                let own = s.weight_on().get(node).copied().unwrap_or(0.0);
                let own = arrived * own * s.bytes.0 as f64 / resident.max(1.0);
                aligned += own;
                // The rest is shared out by what lies elsewhere.
                if let Some(m) = memory.get_mut(node) {
                    *m -= own;
                }
            }
            for s in alive.segments() {
                let share = s.bytes.0 as f64 / resident.max(1.0);
                for (to, from) in memory.iter_mut().zip(s.weight_on()) {
                    *to += share * from;
                }
                large += share * s.large_weight();
            }
        }
        for m in &mut memory {
            *m = m.max(0.0);
        }
        let mut demand = Demand::new(p.profile.clone(), Vec::new(), memory);
        demand.aligned = aligned.clamp(0.0, 1.0);
        demand.own_lines = p.alive.as_ref().is_some_and(|a| a.shared.is_none());
        if demand.hot <= 0.0 {
            demand.hot = resident;
        }
        demand.large_share = large.clamp(0.0, 1.0);
        demand
    }

    /// Where it runs; `apart`: each process on a chip of its own.
    fn aim(&self, demand: &mut Demand, placed: &Placed, apart: bool) {
        let threads = placed.running_threads();
        demand.running.clone_from(&placed.running);
        demand.threads_per_core = placed
            .mean_threads_per_core()
            .clamp(1.0, f64::from(self.layout.threads_per_core));
        demand.spread = if apart {
            1.0
        } else {
            chips_spanned(&placed.running)
        };
        let mut on = 0.0;
        for (chip, running) in placed.running.iter().enumerate() {
            if let Some(cpus) = self.layout.cpus_of_chip(chip) {
                let all = f64::from(cpus.end - cpus.start).max(1.0);
                let switched = cpus
                    .filter(|c| self.prefetch_on.get(*c as usize).copied().unwrap_or(true))
                    .count();
                on += running * switched as f64 / all;
            }
        }
        demand.prefetch = if threads > 0.0 {
            (on / threads).clamp(0.0, 1.0)
        } else {
            1.0
        };
    }

    /// Marks that rates have to be worked out again.
    pub(crate) fn touch(&mut self) {
        self.dirty = true;
    }

    /// Restricts the threads of a workload, or frees them. They get there with a time constant of
    /// [`PLACEMENT_SETTLING_S`].
    pub(crate) fn set_mask(&mut self, p: usize, mask: Option<Vec<CpuId>>, grouped: bool, person: bool) {
        self.settle();
        self.begin_shift();
        if let Some(program) = self.programs.get_mut(p) {
            program.bound = person && mask.is_some();
            program.mask = mask;
            program.grouped = grouped;
            program.split.clear();
        }
        self.dirty = true;
    }

    /// Keeps each process of a workload on a chip of its own, by number; they get there as [`Self::set_mask`] says, which
    /// sets them free again.
    pub(crate) fn set_split(&mut self, p: usize, chips: Vec<u32>) {
        if let Some(program) = self.programs.get_mut(p) {
            program.split = chips;
        }
        self.dirty = true;
    }

    fn begin_shift(&mut self) {
        let from = self
            .programs
            .iter()
            .map(|p| (p.placed.clone(), p.grouped, !p.split.is_empty()))
            .collect();
        self.shift = Some((from, self.now_ns));
        let now = self.now_s();
        for step in SHIFT_STEPS_S {
            self.schedule_s(now + step, Event::Shift);
        }
    }

    // ---- programs --------------------------------------------------------------------------------------------------

    pub(crate) fn spec(&self, p: usize) -> Option<&ProgramSpec> {
        self.programs.get(p).and_then(|p| self.specs.get(p.spec))
    }

    pub(crate) fn find(&self, workload: &str) -> Option<usize> {
        self.by_name
            .get(workload)
            .copied()
            .filter(|p| self.programs.get(*p).is_some_and(|p| p.alive.is_some()))
    }

    /// The workloads of a program, or the workload of that name.
    fn members(&self, name: &str) -> Result<Vec<usize>, WorldError> {
        if let Some(p) = self.by_name.get(name) {
            return Ok(vec![*p]);
        }
        let found: Vec<usize> = (0..self.programs.len())
            .filter(|p| self.spec(*p).is_some_and(|s| s.name == name))
            .collect();
        if found.is_empty() {
            Err(WorldError::NoSuchProgram {
                name: name.to_owned(),
            })
        } else {
            Ok(found)
        }
    }

    fn start(&mut self, p: usize) -> Result<(), WorldError> {
        let now_s = self.now_s();
        let Some(spec) = self.spec(p).cloned() else {
            return Ok(());
        };
        let first = self.programs.get(p).is_some_and(|p| p.generation == 0);
        let started_s = if first { now_s - spec.age_s } else { now_s };
        let mut processes = Vec::new();
        for _ in 0..spec.processes {
            processes.push(self.new_process(started_s));
        }
        let name = self.programs.get(p).map(|p| p.name.clone()).unwrap_or_default();
        let shares = self.first_touch(p, &spec);
        let shape = Shape {
            shares,
            skew: spec.skew,
            sparse: spec.sparse,
            large: spec.large,
        };
        let mut alive = Alive {
            started_s,
            processes,
            private: Vec::new(),
            shared: None,
            executions: 0,
        };
        let refused = |source| WorldError::Memory {
            program: name.clone(),
            source,
        };
        let outcome = self.allocate(&spec, &shape, &mut alive);
        if let Err(source) = outcome {
            for s in alive.segments() {
                self.memory.release(s);
            }
            return Err(refused(source));
        }
        if let Some(program) = self.programs.get_mut(p) {
            program.alive = Some(alive);
            program.generation += 1;
            program.busy = 0.0;
            program.backlog = 0.0;
            program.debt_s = 0.0;
            program.load = 1.0;
            if !first {
                // A new process: what was set on the old one is gone, unless whoever starts it sets it again.
                program.mask = None;
                program.bound = false;
                program.grouped = false;
                program.split.clear();
            }
        }
        let generation = self.programs.get(p).map_or(0, |p| p.generation);
        if let Some(cpus) = &spec.choice.cpus {
            let mask = self.cpu_list(cpus)?;
            if let Some(program) = self.programs.get_mut(p) {
                program.mask = Some(mask);
                program.bound = true;
            }
        }
        for (index, phase) in spec.phases.iter().enumerate() {
            self.schedule_s(now_s + phase.after_s, Event::Phase(p, generation, index));
        }
        if let Some(end) = spec.end_s {
            if end > now_s {
                self.schedule_s(end, Event::End(p));
            }
        }
        if let Some(every) = spec.restart_every_s {
            self.schedule_s(now_s + every, Event::Restart(p, generation));
        }
        self.dirty = true;
        self.modulate(p);
        Ok(())
    }

    /// As if it restarted, but in the same processes, whose threads stay where they were put.
    fn execute(&mut self, p: usize) -> Result<(), WorldError> {
        let Some(program) = self.programs.get_mut(p) else {
            return Ok(());
        };
        let Some(before) = &program.alive else {
            return Ok(());
        };
        let (started_s, processes) = (before.started_s, before.processes.clone());
        let executions = before.executions.saturating_add(1);
        let (mask, bound, grouped) = (program.mask.clone(), program.bound, program.grouped);
        let split = program.split.clone();
        self.end(p);
        self.start(p)?;
        if let Some(program) = self.programs.get_mut(p) {
            (program.mask, program.bound, program.grouped) = (mask, bound, grouped);
            program.split = split;
            if let Some(alive) = &mut program.alive {
                (alive.started_s, alive.processes) = (started_s, processes);
                alive.executions = executions;
            }
        }
        Ok(())
    }

    fn new_process(&mut self, started_s: f64) -> ProcessId {
        let pid = self.next_pid;
        self.next_pid = if pid >= 4_000_000 { 1000 } else { pid + 1 };
        ProcessId {
            pid,
            start_ticks: ticks(started_s),
        }
    }

    fn allocate(&mut self, spec: &ProgramSpec, shape: &Shape, alive: &mut Alive) -> Result<(), MemoryError> {
        const PRIVATE: u64 = 0x7f00_0000_0000;
        const SHARED: u64 = 0x7a00_0000_0000;
        if spec.private_mib > 0 {
            for _ in 0..spec.processes {
                alive.private.push(self.memory.allocate(
                    PRIVATE,
                    Bytes::from_mib(spec.private_mib),
                    false,
                    shape,
                )?);
            }
        }
        if spec.shared_mib > 0 {
            alive.shared =
                Some(
                    self.memory
                        .allocate(SHARED, Bytes::from_mib(spec.shared_mib), true, shape)?,
                );
        }
        Ok(())
    }

    /// Share of the memory by node: as given, bound, or where the threads run first.
    fn first_touch(&self, p: usize, spec: &ProgramSpec) -> Vec<f64> {
        let nodes = self.memory.nodes().len();
        if let Some(bound) = self.programs.get(p).and_then(|p| p.nodes.as_ref()) {
            return (0..nodes)
                .map(|n| f64::from(u8::from(bound.contains(&(n as u32)))))
                .collect();
        }
        if !spec.memory_on.is_empty() {
            return spec.memory_on.clone();
        }
        let mut shares = vec![0.0; nodes];
        for (index, chip) in self.layout.chips.iter().enumerate() {
            let weight = if spec.threads_on.is_empty() {
                f64::from(chip.cores)
            } else {
                spec.threads_on.get(index).copied().unwrap_or(0.0)
            };
            if let Some(s) = shares.get_mut(chip.node as usize) {
                *s += weight;
            }
        }
        shares
    }

    fn end(&mut self, p: usize) {
        let Some(program) = self.programs.get_mut(p) else {
            return;
        };
        program.flush();
        if let Some(alive) = program.alive.take() {
            for s in alive.segments() {
                self.memory.release(s);
            }
            self.dirty = true;
        }
    }

    fn change_phase(&mut self, p: usize, profile: Option<&str>, load: Option<f64>) {
        let found = profile.and_then(|name| self.profile_named(name));
        let instructions = self.spec(p).and_then(|s| s.instructions_per_unit);
        if let Some(program) = self.programs.get_mut(p) {
            if let Some(mut found) = found {
                if let Some(instructions) = instructions {
                    found.instructions_per_unit = instructions;
                }
                program.profile = found;
            }
            if let Some(load) = load {
                program.load = load.max(0.0);
            }
            self.dirty = true;
        }
    }

    // ---- people ----------------------------------------------------------------------------------------------------

    fn cpu_list(&self, cpus: &[u32]) -> Result<Vec<CpuId>, WorldError> {
        let all: BTreeSet<u32> = cpus.iter().copied().collect();
        match all.iter().find(|c| **c as usize >= self.online.len()) {
            Some(cpu) => Err(WorldError::NoSuchPlace(format!("CPU {cpu}"))),
            None if all.is_empty() => Err(WorldError::Values("an empty list of CPUs".into())),
            None => Ok(all.into_iter().map(CpuId).collect()),
        }
    }

    fn check_nodes(&self, nodes: &[u32]) -> Result<(), WorldError> {
        match nodes.iter().find(|n| self.memory.node(**n as usize).is_none()) {
            Some(node) => Err(WorldError::NoSuchPlace(format!("node {node}"))),
            None if nodes.is_empty() => Err(WorldError::Values("an empty list of nodes".into())),
            None => Ok(()),
        }
    }

    fn check_change(&self, change: &PersonChange) -> Result<(), WorldError> {
        if let Some(program) = change.program() {
            self.members(program)?;
        }
        match change {
            PersonChange::BindThreads { cpus: Some(cpus), .. }
            | PersonChange::Prefetch { cpus: Some(cpus), .. }
            | PersonChange::Cpus { cpus, .. } => self.cpu_list(cpus).map(|_| ()),
            PersonChange::BindMemory {
                nodes: Some(nodes), ..
            } => self.check_nodes(nodes),
            PersonChange::MovePages { node, .. } | PersonChange::Node { node, .. } => {
                self.check_nodes(&[*node])
            }
            PersonChange::Phase {
                program,
                profile: Some(name),
                ..
            } if self.profile_named(name).is_none() => Err(WorldError::NoSuchProfile {
                program: program.clone(),
                name: name.clone(),
            }),
            PersonChange::LargePageSwitch { enabled }
                if !["always", "madvise", "never"].contains(&enabled.as_str()) =>
            {
                Err(WorldError::Values(format!(
                    "large pages {enabled:?}: always, madvise or never"
                )))
            }
            _ => Ok(()),
        }
    }

    /// Something happens that is not homeostat's doing.
    ///
    /// # Errors
    /// It is about something that does not exist, or impossible.
    pub fn person(&mut self, change: PersonChange) -> Result<(), WorldError> {
        self.check_change(&change)?;
        let members = change
            .program()
            .map(|name| self.members(name))
            .transpose()?
            .unwrap_or_default();
        match change {
            PersonChange::BindThreads { cpus, .. } => {
                let mask = cpus.map(|c| self.cpu_list(&c)).transpose()?;
                for p in members {
                    self.set_mask(p, mask.clone(), false, true);
                }
            }
            PersonChange::BindMemory { nodes, .. } => {
                for p in members {
                    if let Some(nodes) = &nodes {
                        self.move_share(p, nodes, 1.0);
                    }
                    if let Some(program) = self.programs.get_mut(p) {
                        program.nodes.clone_from(&nodes);
                    }
                }
            }
            PersonChange::MovePages { node, share, .. } => {
                for p in members {
                    self.move_share(p, &[node], share.clamp(0.0, 1.0));
                }
            }
            PersonChange::LargePages { share, .. } => {
                for p in members {
                    self.large_share(p, share.clamp(0.0, 1.0));
                }
            }
            PersonChange::LargePageSwitch { enabled } => self.surroundings.large_page_switch = enabled,
            PersonChange::Prefetch { cpus, on } => {
                let cpus = match cpus {
                    Some(cpus) => self.cpu_list(&cpus)?,
                    None => (0..self.online.len() as u32).map(CpuId).collect(),
                };
                self.set_prefetch(&cpus, on);
            }
            PersonChange::Choose { never, .. } => {
                for p in members {
                    if let Some(program) = self.programs.get_mut(p) {
                        program.never = never;
                    }
                }
            }
            PersonChange::Start { .. } => {
                for p in members {
                    if self.programs.get(p).is_some_and(|p| p.alive.is_none()) {
                        self.start(p)?;
                    }
                }
            }
            PersonChange::Stop { .. } => {
                for p in members {
                    self.end(p);
                }
            }
            PersonChange::Restart { .. } => {
                for p in members {
                    self.end(p);
                    self.start(p)?;
                }
            }
            PersonChange::Execute { .. } => {
                for p in members {
                    self.execute(p)?;
                }
            }
            PersonChange::Fork { processes, .. } => {
                for p in members {
                    self.fork(p, processes)?;
                }
            }
            PersonChange::Phase { profile, load, .. } => {
                for p in members {
                    self.change_phase(p, profile.as_deref(), load);
                }
            }
            PersonChange::Cpus { cpus, online } => self.set_online(&cpus, online)?,
            PersonChange::Node { node, online } => self.set_node_online(node as usize, online)?,
            PersonChange::OtherTuner { name, running } => {
                if running {
                    self.tuners.insert(name);
                } else {
                    self.tuners.remove(&name);
                }
            }
        }
        Ok(())
    }

    fn move_share(&mut self, p: usize, nodes: &[u32], share: f64) {
        self.settle();
        let memory = &mut self.memory;
        let Some(alive) = self.programs.get_mut(p).and_then(|p| p.alive.as_mut()) else {
            return;
        };
        for s in alive.private.iter_mut().chain(&mut alive.shared) {
            let remote: Vec<usize> = (0..s.pieces())
                .filter(|i| !nodes.contains(&(s.node_of(*i) as u32)))
                .collect();
            let count = (remote.len() as f64 * share).round() as usize;
            for (turn, piece) in remote.into_iter().take(count).enumerate() {
                for offset in 0..nodes.len() {
                    let to = nodes
                        .get((turn + offset) % nodes.len())
                        .map_or(0, |n| *n as usize);
                    // What has no room stays where it is, as with `migratepages`.
                    if memory.move_piece(s, piece, to).is_ok() {
                        break;
                    }
                }
            }
        }
        self.dirty = true;
    }

    fn large_share(&mut self, p: usize, share: f64) {
        self.large_share_of(p, share, true);
    }

    fn large_share_of(&mut self, p: usize, share: f64, shared_too: bool) {
        self.settle();
        let memory = &mut self.memory;
        let Some(alive) = self.programs.get_mut(p).and_then(|p| p.alive.as_mut()) else {
            return;
        };
        let shared = alive.shared.iter_mut().filter(|_| shared_too);
        for s in alive.private.iter_mut().chain(shared) {
            let wanted = (s.pieces() as f64 * share).round() as usize;
            for piece in 0..s.pieces() {
                if piece < wanted {
                    // Without a free block it stays small, as with khugepaged.
                    let _refused = memory.convert(s, piece);
                } else {
                    memory.split(s, piece);
                }
            }
        }
        self.dirty = true;
    }

    fn fork(&mut self, p: usize, processes: u32) -> Result<(), WorldError> {
        let Some(spec) = self.spec(p).cloned() else {
            return Ok(());
        };
        let now_s = self.now_s();
        let shape = Shape {
            shares: self.first_touch(p, &spec),
            skew: spec.skew,
            sparse: spec.sparse,
            large: 0.0,
        };
        for _ in 0..processes {
            let Some(name) = self.programs.get(p).map(|p| p.name.clone()) else {
                return Ok(());
            };
            if self
                .programs
                .get(p)
                .and_then(|p| p.alive.as_ref())
                .is_none_or(|a| a.processes.len() >= PROCESSES_MAX)
            {
                return Ok(());
            }
            let process = self.new_process(now_s);
            let segment = if spec.private_mib > 0 {
                let made =
                    self.memory
                        .allocate(0x7f00_0000_0000, Bytes::from_mib(spec.private_mib), false, &shape);
                Some(made.map_err(|source| WorldError::Memory {
                    program: name,
                    source,
                })?)
            } else {
                None
            };
            if let Some(alive) = self.programs.get_mut(p).and_then(|p| p.alive.as_mut()) {
                alive.processes.push(process);
                alive.private.extend(segment);
            }
        }
        self.dirty = true;
        Ok(())
    }

    fn set_online(&mut self, cpus: &[u32], online: bool) -> Result<(), WorldError> {
        self.settle();
        let mut then = self.online.clone();
        for cpu in cpus {
            if let Some(o) = then.get_mut(*cpu as usize) {
                *o = online;
            }
        }
        if !then.iter().any(|o| *o) {
            return Err(WorldError::Impossible("the last CPU cannot go offline".into()));
        }
        self.online = then;
        self.begin_shift();
        self.dirty = true;
        Ok(())
    }

    fn set_node_online(&mut self, node: usize, online: bool) -> Result<(), WorldError> {
        self.settle();
        if online {
            self.memory.set_online(node, true);
            return Ok(());
        }
        let others: Vec<u32> = (0..self.memory.nodes().len() as u32)
            .filter(|n| *n as usize != node && self.memory.node(*n as usize).is_some_and(|n| n.online))
            .collect();
        if others.is_empty() {
            return Err(WorldError::Impossible(
                "the last memory node cannot go offline".into(),
            ));
        }
        for p in 0..self.programs.len() {
            self.move_share(p, &others, 1.0);
        }
        let left = self
            .programs
            .iter()
            .filter_map(|p| p.alive.as_ref())
            .flat_map(Alive::segments)
            .any(|s| s.pages_on().get(node).is_some_and(|n| *n > 0));
        if left {
            return Err(WorldError::Impossible(format!(
                "the memory of node {node} does not fit elsewhere"
            )));
        }
        self.memory.set_online(node, false);
        Ok(())
    }

    pub(crate) fn set_prefetch(&mut self, cpus: &[CpuId], on: bool) {
        self.settle();
        for cpu in cpus {
            if let Some(p) = self.prefetch_on.get_mut(cpu.0 as usize) {
                *p = on;
            }
        }
        self.dirty = true;
    }

    // ---- the optimizer's own cost ----------------------------------------------------------------------------------

    /// The optimizer used this much CPU time. Where no CPU is idle the programs lose it.
    pub fn charge(&mut self, seconds: f64) {
        if !(seconds > 0.0 && seconds.is_finite()) {
            return;
        }
        self.settle();
        self.own_cpu_s += seconds;
        self.busy_s += seconds;
        let online = self.online.iter().filter(|o| **o).count().max(1) as f64;
        let cores = online / f64::from(self.layout().threads_per_core.max(1));
        let dispatched: f64 = self
            .programs
            .iter()
            .filter_map(|p| p.placed.as_ref())
            .map(|p| p.cores_dispatched.iter().sum::<f64>())
            .sum();
        // With almost all cores busy the chance grows that there is none to spare. A core that runs something already has
        // a thread to spare, but what runs there gets slower by as much.
        let full = ((dispatched / cores - 0.85) / 0.15).clamp(0.0, 1.0);
        for p in self.programs.iter_mut().filter(|p| p.alive.is_some()) {
            p.debt_s += seconds * full / online;
        }
    }

    /// The program's threads may meet memory that is locked for so long, to which this share of its accesses goes.
    pub(crate) fn stall(&mut self, p: usize, seconds: f64, weight: f64) {
        if let Some(program) = self.programs.get_mut(p) {
            if seconds > 0.0 {
                // A thread runs until its first access to the locked memory, then waits for the rest of the time.
                let accesses = ACCESSES_PER_S * weight.clamp(0.0, 1.0) * seconds;
                let share = if accesses > 1e-6 {
                    1.0 - (1.0 - (-accesses).exp()) / accesses
                } else {
                    accesses / 2.0
                };
                program.debt_s += seconds * share;
            }
        }
    }

    /// As `stall`, for so many stretches of memory of the same kind one after the other.
    pub(crate) fn stall_often(&mut self, p: usize, seconds: f64, weight: f64, count: u64) {
        let before = self.programs.get(p).map_or(0.0, |p| p.debt_s);
        self.stall(p, seconds, weight);
        if let Some(program) = self.programs.get_mut(p) {
            program.debt_s = before + (program.debt_s - before) * count as f64;
        }
    }

    /// CPU time that the optimizer used so far.
    pub fn own_cpu(&self) -> Nanoseconds {
        Nanoseconds::from_secs_f64(self.own_cpu_s)
    }

    // ---- what can be seen ------------------------------------------------------------------------------------------

    /// The machine's shape.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }
    pub(crate) fn surroundings(&self) -> &Surroundings {
        &self.surroundings
    }
    pub(crate) fn seed(&self) -> u64 {
        self.seed
    }
    pub(crate) fn is_online(&self, cpu: CpuId) -> bool {
        self.online.get(cpu.0 as usize).copied().unwrap_or(false)
    }
    pub(crate) fn has_prefetch(&self, cpu: CpuId) -> bool {
        self.prefetch_on.get(cpu.0 as usize).copied().unwrap_or(false)
    }
    pub(crate) fn tuners(&self) -> Vec<String> {
        self.tuners.iter().cloned().collect()
    }
    pub(crate) fn busy_s(&self) -> f64 {
        self.busy_s
    }
    /// Threads that wait for a CPU now.
    pub(crate) fn waiting(&self) -> f64 {
        self.programs.iter().map(|p| p.pace.waiting).sum()
    }
    /// Names of the programs' workloads that run now.
    pub fn workloads(&self) -> Vec<String> {
        self.programs
            .iter()
            .filter(|p| p.alive.is_some())
            .map(|p| p.name.clone())
            .collect()
    }

    /// What a program (all its instances) or a workload did since the start; zeros for an unknown name.
    pub fn totals(&mut self, name: &str) -> Totals {
        let mut sum = Totals::default();
        for p in self.members(name).unwrap_or_default() {
            if let Some(program) = self.programs.get_mut(p) {
                program.flush();
                sum.add(&program.totals);
            }
        }
        sum
    }

    /// How fast a workload is now, without noise; zeros when it does not run.
    pub fn pace(&mut self, workload: &str) -> Pace {
        self.settle();
        self.find(workload)
            .and_then(|p| self.programs.get(p))
            .map(|p| p.pace.clone())
            .unwrap_or_default()
    }

    /// A number that is another one whenever any [`World::pace`] may be another one.
    pub fn paces_version(&mut self) -> u64 {
        self.settle();
        self.solved
    }

    /// Seconds that a program (all its instances) or a workload stood still for moves and conversions, or lost to the
    /// optimizer, since the start; zero for an unknown name.
    pub fn lost_s(&self, name: &str) -> f64 {
        let members = self.members(name).unwrap_or_default();
        members
            .into_iter()
            .filter_map(|p| self.programs.get(p))
            .fold(0.0, |sum, p| sum + p.totals.lost_s)
    }

    /// Threads are at once where they are allowed to be, and the rates are those of that state. No time passes: this
    /// is for trying placements on a copy of the world.
    pub fn come_to_rest(&mut self) {
        self.shift = None;
        self.queue.retain(|_, event| *event != Event::Shift);
        // Each round starts from the busy threads that the last one found.
        for _ in 0..REST_ROUNDS {
            self.dirty = true;
            self.settle();
        }
    }

    /// A copy of the world in which all of this is arranged at once and at rest. Rates are worked out only then.
    ///
    /// # Errors
    /// What `arrange` answers.
    pub fn at_rest_after(
        &self,
        arrange: impl FnOnce(&mut Self) -> Result<(), WorldError>,
    ) -> Result<Self, WorldError> {
        let mut copy = self.clone();
        copy.arranging = true;
        arrange(&mut copy)?;
        copy.arranging = false;
        copy.come_to_rest();
        Ok(copy)
    }

    /// Puts all memory of a program on large pages that could be taken off them again: what several processes map only
    /// where the machine can split it. What finds no free block stays small.
    ///
    /// # Errors
    /// There is no such program.
    pub fn large_pages_undoable(&mut self, program: &str) -> Result<(), WorldError> {
        let split_shared = self.layout.split_shared;
        for p in self.members(program)? {
            let alone = self
                .programs
                .get(p)
                .and_then(|p| p.alive.as_ref())
                .is_none_or(|a| a.processes.len() <= 1);
            self.large_share_of(p, 1.0, split_shared || alone);
        }
        Ok(())
    }

    /// Where a workload runs now: threads by chip; empty when it does not run.
    pub fn running(&mut self, workload: &str) -> Vec<f64> {
        self.settle();
        self.find(workload)
            .and_then(|p| self.programs.get(p)?.placed.as_ref())
            .map(|p| p.running.clone())
            .unwrap_or_default()
    }

    /// Processor use by CPU as accounting shows it, 0..1, of all programs together.
    pub fn cpu_use(&mut self) -> Vec<f64> {
        self.settle();
        let mut sum = vec![0.0; self.online.len()];
        for placed in self.programs.iter().filter_map(|p| p.placed.as_ref()) {
            for (s, u) in sum.iter_mut().zip(&placed.cpu_use) {
                *s += u;
            }
        }
        sum
    }

    pub(crate) fn settle_now(&mut self) {
        self.settle();
    }

    /// Memory by node: total, free.
    pub fn nodes(&self) -> Vec<(Bytes, Bytes)> {
        self.memory.nodes().iter().map(|n| (n.total, n.free())).collect()
    }

    /// Resident memory of a workload.
    pub fn resident(&self, workload: &str) -> Bytes {
        self.find(workload)
            .and_then(|p| self.programs.get(p)?.alive.as_ref())
            .map_or(Bytes::ZERO, Alive::resident)
    }

    /// Everything that an effector or a person can change.
    pub fn settings(&self) -> Settings {
        let mut s = Settings {
            prefetch_off: (0..self.prefetch_on.len() as u32)
                .map(CpuId)
                .filter(|c| !self.has_prefetch(*c))
                .collect(),
            large_page_switch: self.surroundings.large_page_switch.clone(),
            offline: (0..self.online.len() as u32)
                .map(CpuId)
                .filter(|c| !self.is_online(*c))
                .collect(),
            nodes_offline: (0..self.memory.nodes().len())
                .filter(|n| self.memory.node(*n).is_some_and(|n| !n.online))
                .map(|n| NodeId(n as u32))
                .collect(),
            ..Settings::default()
        };
        for p in &self.programs {
            let Some(alive) = &p.alive else { continue };
            if let Some(mask) = &p.mask {
                s.masks.insert(p.name.clone(), mask.clone());
            }
            if p.grouped {
                s.grouped.push(p.name.clone());
            }
            if !p.split.is_empty() {
                let chips: Vec<String> = p.split.iter().map(u32::to_string).collect();
                s.grouped
                    .push(format!("{} by process {}", p.name, chips.join(",")));
            }
            let pages = s.pages.entry(p.name.clone()).or_default();
            for segment in alive.segments() {
                for (node, n) in segment.pages_on().iter().enumerate().filter(|(_, n)| **n > 0) {
                    *pages.entry(NodeId(node as u32)).or_default() += n;
                }
            }
            s.large
                .insert(p.name.clone(), alive.segments().map(Segment::large_pieces).sum());
            s.pieces.insert(
                p.name.clone(),
                alive
                    .segments()
                    .fold(0, |h: u64, x| h.rotate_left(7) ^ x.digest()),
            );
            s.started.insert(p.name.clone(), ticks(alive.started_s));
        }
        s
    }
}

/// Clock ticks of a start time.
pub(crate) fn ticks(started_s: f64) -> u64 {
    ((started_s + EPOCH_S).max(0.0) * TICKS_PER_S) as u64
}

/// Seconds of one running thread for one unit of work.
fn unit_s(profile: &Profile, rate: &Rate) -> f64 {
    if rate.instructions_per_ns > 0.0 {
        profile.instructions(rate.cpi) / rate.instructions_per_ns / 1e9
    } else {
        f64::INFINITY
    }
}

/// Number of chips that the threads of one instance span. A chip counts in full when at least a quarter as much runs
/// there as on the busiest: then the instance's working set is in its cache too (assumed; model-fit P14 counts two chips
/// at shares of .25 and .75).
fn chips_spanned(running: &[f64]) -> f64 {
    let most = running.iter().copied().fold(0.0, f64::max);
    if most <= 0.0 {
        return 1.0;
    }
    running.iter().map(|r| (r / most / SPANNED_FROM).min(1.0)).sum()
}

fn blend(before: &Placed, now: &Placed, weight: f64) -> Placed {
    let mix = |a: &[f64], b: &[f64]| -> Vec<f64> {
        let n = a.len().max(b.len());
        let at = |v: &[f64], i: usize| v.get(i).copied().unwrap_or(0.0);
        (0..n)
            .map(|i| weight * at(a, i) + (1.0 - weight) * at(b, i))
            .collect()
    };
    Placed {
        running: mix(&before.running, &now.running),
        threads_per_core: mix(&before.threads_per_core, &now.threads_per_core),
        cores_dispatched: mix(&before.cores_dispatched, &now.cores_dispatched),
        cpu_use: mix(&before.cpu_use, &now.cpu_use),
        consumed_cores: weight * before.consumed_cores + (1.0 - weight) * now.consumed_cores,
        waiting: weight * before.waiting + (1.0 - weight) * now.waiting,
    }
}

/// What limits the number of busy threads of a program.
struct Limit {
    profile: Profile,
    /// Threads there are.
    threads: f64,
    /// Busy threads to start the search from.
    start: f64,
    drive: Drive,
}

enum Drive {
    /// Customers with a think time in seconds.
    Closed { customers: f64, think_s: f64 },
    /// Requests per second.
    Open { per_s: f64 },
    /// As many busy threads as the start: the think time follows from the CPU share of the response time.
    FindThink { share: f64 },
    /// As many busy threads as the start: the rate of arrivals follows.
    FindRate,
}

impl Limit {
    fn of(p: &Program, spec: &ProgramSpec) -> Self {
        let alive = p.alive.as_ref().map_or(0, |a| a.processes.len());
        let threads = alive as f64 * f64::from(spec.threads);
        let factor = p.load * p.modulation;
        let (start, drive) = match spec.load {
            Load::Closed {
                customers,
                think_ms,
                cpu_share,
            } => {
                let n = customers.unwrap_or(threads) * factor;
                let share = cpu_share.unwrap_or(p.profile.cpu_share).clamp(0.001, 1.0);
                match (think_ms, p.think_s) {
                    (Some(ms), _) => (
                        n.min(threads),
                        Drive::Closed {
                            customers: n,
                            think_s: ms / 1e3,
                        },
                    ),
                    (None, Some(think_s)) => (
                        n.min(threads),
                        Drive::Closed {
                            customers: n,
                            think_s,
                        },
                    ),
                    (None, None) => ((n * share).min(threads), Drive::FindThink { share }),
                }
            }
            Load::Open { per_s, busy } => match (per_s, p.offered) {
                (Some(x), _) | (None, Some(x)) => (threads.min(1.0), Drive::Open { per_s: x * factor }),
                (None, None) => (busy.unwrap_or(0.0).min(threads), Drive::FindRate),
            },
        };
        Self {
            profile: p.profile.clone(),
            threads,
            start,
            drive,
        }
    }

    /// How far the number of busy threads varies by chance ([`Request::chance`]) when so many are busy on average: those
    /// of customers who think come and go, and so do requests from outside; where nobody ever pauses, the number is
    /// always the same.
    fn chance(&self, busy: f64) -> f64 {
        let most = match self.drive {
            Drive::Closed { customers, .. } => customers.min(self.threads),
            Drive::FindThink { share } => return 1.0 - share,
            Drive::Open { .. } | Drive::FindRate => self.threads,
        };
        if most > 0.0 {
            (1.0 - busy / most).clamp(0.0, 1.0)
        } else {
            0.0
        }
    }

    /// Busy threads when a unit takes so long and they are placed like this.
    fn busy(&self, placed: &Placed, unit_s: f64) -> f64 {
        let running = placed.running_threads();
        let stretch = if running > 0.0 {
            ((running + placed.waiting) / running).max(1.0)
        } else {
            1.0
        };
        let wanted = match self.drive {
            Drive::FindThink { .. } | Drive::FindRate => self.start,
            Drive::Closed { customers, think_s } if think_s <= 0.0 => customers,
            Drive::Closed { customers, think_s } => {
                let busy_s = unit_s * stretch;
                customers * busy_s / (busy_s + think_s)
            }
            Drive::Open { per_s } => per_s * unit_s * stretch,
        };
        if wanted.is_finite() {
            wanted.clamp(0.0, self.threads)
        } else {
            self.threads
        }
    }
}

impl Program {
    /// Takes over the rates that were worked out.
    #[expect(clippy::too_many_arguments, reason = "all of it is one result")]
    fn adopt(
        &mut self,
        limit: &Limit,
        busy: f64,
        placed: Placed,
        rate: Rate,
        demand: &Demand,
        room: f64,
        idle: f64,
    ) {
        let unit_s = unit_s(&limit.profile, &rate);
        let running = placed.running_threads();
        let possible = if unit_s.is_finite() && unit_s > 0.0 {
            running / unit_s
        } else {
            0.0
        };
        let stretch = if running > 0.0 {
            ((running + placed.waiting) / running).max(1.0)
        } else {
            1.0
        };
        // How many of its threads could run if there were work for them.
        let most = limit.threads.min(room).min(running + idle).max(running);
        let capacity = if unit_s.is_finite() && unit_s > 0.0 {
            most / unit_s
        } else {
            0.0
        };
        let closed = Response::closed(unit_s, unit_s * (stretch - 1.0));
        let mut arrivals = None;
        let (work, response) = match limit.drive {
            Drive::Open { per_s } => {
                arrivals = Some(per_s);
                let used = per_s / capacity.max(1e-30);
                (
                    per_s.min(possible.max(capacity)),
                    Response::open(unit_s, most.max(1.0), used),
                )
            }
            Drive::Closed { .. } => (possible, closed),
            // Calibrated by the state in which the program was found.
            Drive::FindThink { share } => {
                if unit_s.is_finite() {
                    self.think_s = Some(unit_s * stretch * (1.0 - share) / share);
                }
                (possible, closed)
            }
            Drive::FindRate => {
                if unit_s.is_finite() {
                    self.offered = Some(possible);
                }
                arrivals = Some(possible);
                (
                    possible,
                    Response::open(unit_s, most.max(1.0), possible / capacity.max(1e-30)),
                )
            }
        };
        self.arrivals = arrivals;
        self.pace = Pace {
            work_per_s: work,
            capacity_per_s: capacity.max(work),
            served: arrivals.filter(|a| *a > 0.0).map_or(1.0, |a| (work / a).min(1.0)),
            cpus: work * unit_s,
            cores: placed.consumed_cores,
            waiting: placed.waiting,
            local_share: rate.local,
            large_share: demand.large_share,
        };
        if !self.pace.cpus.is_finite() {
            self.pace.cpus = running;
        }
        self.busy = busy;
        self.unit_s = unit_s;
        self.response = response;
        self.rate = rate;
        self.placed = Some(placed);
    }

    /// Runs with the present rates. Returns the CPU seconds.
    fn run(&mut self, from: u64, until: u64) -> f64 {
        let span_s = (until - from) as f64 / 1e9;
        let lost = self.debt_s.min(span_s * LOST_MAX);
        self.debt_s -= lost;
        let useful = 1.0 - lost / span_s;
        let (mut work, mut cpu) = (0.0, 0.0);
        let mut at = from;
        while at < until {
            let cell = at / CELL_NS;
            let end = ((cell + 1) * CELL_NS).min(until);
            let dt = (end - at) as f64 / 1e9;
            let speed = self.noise.at(cell);
            match self.arrivals {
                Some(per_s) => {
                    let wanted = per_s * self.arrival.at(cell) * dt + self.backlog;
                    let done = wanted.min(self.pace.capacity_per_s * speed * dt * useful);
                    self.backlog = (wanted - done).clamp(0.0, per_s * BACKLOG_S);
                    work += done;
                    cpu += done * self.unit_s / speed.max(1e-3);
                }
                None => {
                    work += self.pace.work_per_s * speed * dt * useful;
                    cpu += self.pace.cpus * dt * useful;
                }
            }
            at = end;
        }
        if !cpu.is_finite() {
            cpu = 0.0;
        }
        let usual = self.pace.cpus * span_s;
        let t = &mut self.totals;
        t.run_s += span_s;
        t.work += work;
        t.cpu_s += cpu;
        t.core_s += if usual > 0.0 {
            self.pace.cores * span_s * cpu / usual
        } else {
            0.0
        };
        t.wait_s += self.pace.waiting * span_s;
        t.lost_s += lost;
        t.local_s += self.rate.local * span_s;
        t.large_s += self.pace.large_share * span_s;
        t.prefetch_s += self.rate.counters.prefetch_share * span_s;
        t.cpi_s += self.rate.cpi * span_s;
        t.latency_ns_s += self.rate.latency_ns * span_s;
        self.pending += work;
        cpu
    }

    /// Books the response times of the work since the rates last changed.
    fn flush(&mut self) {
        let work = std::mem::take(&mut self.pending);
        if work > 0.0 && self.response.service_s.is_finite() {
            self.totals.responses.add(work, &self.response);
        }
    }
}
