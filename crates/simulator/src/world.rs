//! The simulated machine in time: programs run, load changes, people interfere. Integration is lazy. Rates change only
//! with a load, a placement, a moved page or a switch. Between changes a program's work is its rate times the time,
//! second by second, times its noise. So an hour without events costs less than a millisecond. The optimizer's cost is
//! charged: CPU time when no CPU is idle, and standstill while used pages are moved or converted.

mod changes;
mod people;
mod programs;
mod rates;
mod seen;
mod spec;

pub use changes::{PersonChange, TimedChange};
pub(crate) use programs::{Alive, Program, ticks};
pub use seen::{Pace, Settings, Totals};
pub use spec::{OwnCost, Surroundings, WorldError, WorldSpec};

use crate::behaviour::ProgramSpec;
use crate::hardware::Profile;
use crate::layout::Layout;
use crate::memory::Memory;
use crate::scheduler::SchedulerKind;
use homeostat_model::Nanoseconds;
use rates::Rates;
use std::collections::{BTreeMap, BTreeSet};

const UNIX_START: u64 = 1_700_000_000;

#[derive(Clone, Debug, PartialEq)]
enum Event {
    Start(usize),
    End(usize),
    Restart(usize, u64),
    Phase(usize, u64, usize),
    Modulate(usize, u64),
    Shift,
    /// The copy for this program that lasts until then is over.
    Copied(usize, u64),
    Change(PersonChange),
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
    rates: Rates,
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
        if let Some(first) = spec.complaints().into_iter().next() {
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
            rates: Rates::unknown(),
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
                    // Without memory for it, it does not start, as a shell would report.
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
            Event::Shift => self.rates.dirty = true,
            Event::Copied(p, until) => {
                if self.rates.movers.get(&p).is_some_and(|m| m.until == until) {
                    self.rates.movers.remove(&p);
                    self.rates.dirty = true;
                }
            }
            Event::Change(change) => {
                // Checked at the start; what has become impossible (the program is gone) does not happen.
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
        let (factor, until) = shape.at(now, &program.chance.draws, &mut program.chance.cursor);
        if program.modulation != factor {
            program.modulation = factor;
            self.rates.dirty = true;
        }
        let generation = program.generation;
        if until.is_finite() {
            self.schedule_s(until.max(now + 1e-3), Event::Modulate(p, generation));
        }
    }

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

    pub(crate) fn spec(&self, p: usize) -> Option<&ProgramSpec> {
        self.programs.get(p).and_then(|p| self.specs.get(p.spec))
    }

    pub(crate) fn find(&self, workload: &str) -> Option<usize> {
        self.by_name
            .get(workload)
            .copied()
            .filter(|p| self.programs.get(*p).is_some_and(|p| p.alive.is_some()))
    }

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
}
