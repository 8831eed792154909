//! Simulated machines and settings, drawn from a seed.

use super::Subject;
use crate::checkers::{Limits, Picture, Speed, Speeds, Value};
use crate::faults::{Kind, PictureOf, pick};
use homeostat_engine::{Mode, Policy, Strategy};
use homeostat_model::{CpuId, Direction, Nanoseconds, NodeId, UndoRecord};
use homeostat_platform::Effectors;
use homeostat_simulator::behaviour::{Load, Modulation, ProgramSpec};
use homeostat_simulator::layout::Layout;
use homeostat_simulator::platform::{SimClock, SimPlatform};
use homeostat_simulator::rough::roughen;
use homeostat_simulator::scheduler::SchedulerKind;
use homeostat_simulator::world::{PersonChange, Settings, World, WorldError, WorldSpec};
use homeostat_statistics::simulation::Random;
use std::collections::BTreeSet;

/// A simulated machine drawn from a seed: a small layout with one to four programs that rest most of the day.
pub struct Drawn {
    platform: SimPlatform,
    names: Vec<String>,
    cpus: u32,
    nodes: u32,
    /// The program whose threads the last person bound.
    bound: Option<String>,
}

/// Layouts of a campaign: small for speed, and of every kind.
const LAYOUTS: &[&str] = &["small-2n", "small-1n", "x86-2s", "epyc-8llc", "power750-16"];
/// Profiles of a campaign: gains from placement, from memory, from large pages, and some without gains.
const PROFILES: &[&str] = &[
    "oltp",
    "specjbb",
    "daytrader",
    "process-database",
    "latency",
    "compute",
    "stream",
    "scattered",
];

/// Slices of an undo that is tried on a copy of the world.
const SLICES_MAX: u32 = 100_000;

impl Drawn {
    /// The machine of a seed.
    ///
    /// # Errors
    /// A layout or profile of the lists above is unknown (a test shows that all are known).
    pub fn new(seed: u64) -> Result<Self, WorldError> {
        Self::with_signals(seed, false)
    }

    /// The machine of a seed, with rough signals or the usual ones.
    ///
    /// # Errors
    /// As [`Drawn::new`].
    pub fn with_signals(seed: u64, rough: bool) -> Result<Self, WorldError> {
        let mut random = Random::new(seed ^ 0x4d41_4348_494e_4500);
        let name = pick(&mut random, LAYOUTS).copied().unwrap_or("x86-2s");
        let layout = Layout::named(name)?;
        let scheduler = if random.coin() {
            SchedulerKind::Linux
        } else {
            SchedulerKind::FanOut
        };
        let (cpus, nodes) = (layout.cpus(), layout.node_memory.len() as u32);
        let smallest = layout.node_memory.iter().map(|b| b.0 >> 20).min().unwrap_or(1024);
        let mut spec = WorldSpec::new(layout, scheduler);
        spec.seed = seed;
        let among = |random: &mut Random, list: &[f64]| pick(random, list).copied().unwrap_or(1.0);
        for index in 0..1 + random.next_u64() % 4 {
            let profile = pick(&mut random, PROFILES).copied().unwrap_or("compute");
            let threads = 1 + (random.next_u64() % u64::from(cpus)) as u32;
            let node = (random.next_u64() % u64::from(nodes)) as usize;
            let mut program = ProgramSpec {
                name: format!("{profile}-{index}"),
                profile: profile.to_owned(),
                threads,
                // Four of them fit on one node, with room for forks.
                private_mib: (256 << (random.next_u64() % 4)).min(smallest / 8),
                // A third of the programs have all their memory on one node, where it may be wrong.
                memory_on: if random.next_u64() % 3 == 0 {
                    (0..nodes as usize)
                        .map(|n| f64::from(u8::from(n == node)))
                        .collect()
                } else {
                    Vec::new()
                },
                skew: 1.0 + random.uniform() * 2.0,
                sparse: among(&mut random, &[0.0, 0.0, 0.3]),
                // Long rests, so that most simulated hours are cheap.
                modulation: Modulation::Bursty {
                    low: 0.0005,
                    on_s: 3600.0 * (0.5 + random.uniform() * 1.5),
                    off_s: 3600.0 * (8.0 + random.uniform() * 40.0),
                },
                load: Load::Closed {
                    customers: None,
                    think_ms: None,
                    cpu_share: Some(0.3 + 0.69 * random.uniform()),
                },
                age_s: 100.0,
                ..ProgramSpec::default()
            };
            program.choice.never = random.next_u64() % 16 == 0;
            spec.programs.push(program);
        }
        let names = spec.programs.iter().map(|p| p.name.clone()).collect();
        spec.surroundings.fragmentation = among(&mut random, &[0.0, 0.1, 0.5, 0.95]);
        if rough {
            roughen(&mut spec.programs, &mut spec.surroundings);
        }
        Ok(Self {
            platform: SimPlatform::new(World::new(spec)?),
            names,
            cpus,
            nodes,
            bound: None,
        })
    }

    fn speeds_in(&self, world: &mut World) -> Speeds {
        let mut speeds = Speeds::new();
        for name in &self.names {
            let pace = world.pace(name);
            if pace.work_per_s > 0.0 && pace.cpus > 0.0 {
                let speed = Speed {
                    work: pace.work_per_s,
                    per_cpu: pace.work_per_s / pace.cpus,
                    cpus: pace.cpus,
                };
                speeds.insert(name.clone(), speed);
            }
        }
        speeds
    }

    fn some_cpus(&self, random: &mut Random) -> Vec<u32> {
        let from = (random.next_u64() % u64::from(self.cpus)) as u32;
        let n = 1 + (random.next_u64() % u64::from(self.cpus)) as u32;
        (from..(from + n).min(self.cpus)).collect()
    }

    /// A setting that homeostat may also have changed.
    fn a_persons(&self, program: String, node: u32, random: &mut Random) -> PersonChange {
        match random.next_u64() % 8 {
            0 | 1 => PersonChange::BindThreads {
                cpus: (random.next_u64() % 4 != 0).then(|| self.some_cpus(random)),
                program,
            },
            2 => PersonChange::BindMemory {
                program,
                nodes: random.coin().then(|| vec![node]),
            },
            3 => PersonChange::MovePages {
                program,
                node,
                share: random.uniform(),
            },
            4 => PersonChange::LargePages {
                program,
                share: random.uniform(),
            },
            5 => PersonChange::LargePageSwitch {
                enabled: pick(random, &["always", "madvise", "never"])
                    .map_or_else(String::new, |s| (*s).to_owned()),
            },
            6 => PersonChange::Prefetch {
                cpus: random.coin().then(|| self.some_cpus(random)),
                on: random.coin(),
            },
            _ => PersonChange::Choose {
                program,
                never: random.coin(),
            },
        }
    }

    fn person(&self, change: PersonChange) -> Option<String> {
        let text = change.to_string();
        // Impossible changes (the last CPU, memory that does not fit) do not happen.
        self.platform.person(change).is_ok().then_some(text)
    }
}

/// A machine's settings as a picture. Program settings carry the main process's start: a new process is untouched.
fn picture_of(settings: &Settings, cpu_count: u32, node_count: u32) -> Picture {
    let mut out = Picture::new();
    let whose = |name: &str| {
        format!(
            "{name}@{}",
            settings.started.get(name).copied().unwrap_or_default()
        )
    };
    let list = |cpus: &[CpuId]| cpus.iter().map(|c| c.0.to_string()).collect::<Vec<_>>().join(",");
    for name in settings.started.keys() {
        let mask = settings
            .masks
            .get(name)
            .map_or_else(|| "all".to_owned(), |m| list(m));
        out.insert(format!("{}/mask", whose(name)), Value::Setting(mask));
        // By board, or each process on its chip.
        let grouped = settings.grouped.iter().find_map(|g| {
            let rest = g.strip_prefix(name.as_str())?;
            (rest.is_empty() || rest.starts_with(' ')).then(|| format!("grouped{rest}"))
        });
        let grouped = grouped.unwrap_or_else(|| "all".to_owned());
        out.insert(format!("{}/grouped", whose(name)), Value::Setting(grouped));
    }
    for (name, nodes) in &settings.pages {
        for node in 0..node_count {
            let pages = nodes.get(&NodeId(node)).copied().unwrap_or_default();
            out.insert(
                format!("{}/pages/{node}", whose(name)),
                Value::Amount(i128::from(pages)),
            );
        }
    }
    for (name, pieces) in &settings.large {
        out.insert(
            format!("{}/large", whose(name)),
            Value::Amount(i128::from(*pieces)),
        );
    }
    let off: BTreeSet<u32> = settings.prefetch_off.iter().map(|c| c.0).collect();
    for cpu in 0..cpu_count {
        let state = if off.contains(&cpu) { "off" } else { "on" };
        out.insert(format!("prefetch/{cpu}"), Value::Setting(state.to_owned()));
    }
    out.insert(
        "large-page-switch".into(),
        Value::Setting(settings.large_page_switch.clone()),
    );
    out
}

impl Subject for Drawn {
    type Platform = SimPlatform;
    type Clock = SimClock;

    fn platform(&self) -> SimPlatform {
        self.platform.clone()
    }
    fn clock(&self) -> SimClock {
        self.platform.clock()
    }
    fn picture(&self) -> PictureOf {
        let (platform, cpus, nodes) = (self.platform.clone(), self.cpus, self.nodes);
        std::rc::Rc::new(move || picture_of(&platform.settings(), cpus, nodes))
    }
    fn strategies(&self) -> Vec<Box<dyn Strategy>> {
        homeostat_strategies::all()
    }
    fn advance_to(&mut self, at: Nanoseconds) {
        self.platform.advance_to(at);
    }
    fn speeds(&self) -> Speeds {
        self.platform.with_world(|world| self.speeds_in(world))
    }
    fn harm_per_day_max(&self) -> f64 {
        Limits::default().harm_per_day
    }
    fn speeds_without(&self, undone: &[&UndoRecord]) -> Speeds {
        let mut copy = SimPlatform::new(self.platform.with_world(|world| world.clone()));
        for record in undone.iter().rev() {
            // From the record alone, as after a crash.
            for _ in 0..SLICES_MAX {
                match copy.advance(record, Direction::Undo) {
                    Ok(progress) if !progress.done => {}
                    Ok(_) | Err(_) => break,
                }
            }
        }
        copy.with_world(|world| {
            world.come_to_rest();
            self.speeds_in(world)
        })
    }
    fn restarted(&mut self) {
        // A new daemon process knows nothing of the earlier effectors.
        self.platform = self.platform.fresh();
    }

    fn disturb(&mut self, kind: Kind, random: &mut Random) -> Option<(String, bool)> {
        let program = pick(random, &self.names)?.clone();
        let node = (random.next_u64() % u64::from(self.nodes)) as u32;
        let change = match kind {
            Kind::PersonChanges => self.a_persons(program, node, random),
            Kind::OtherTuner => {
                let running = random.coin();
                let name = "numad".to_owned();
                self.person(PersonChange::OtherTuner { name, running })?;
                if running {
                    PersonChange::MovePages {
                        program,
                        node,
                        share: 0.5,
                    }
                } else {
                    PersonChange::BindThreads {
                        program,
                        cpus: Some(self.some_cpus(random)),
                    }
                }
            }
            Kind::CpuOffline => PersonChange::Cpus {
                cpus: self.some_cpus(random),
                online: false,
            },
            Kind::NodeOffline => PersonChange::Node { node, online: false },
            Kind::ProgramEnds => PersonChange::Stop { program },
            Kind::ProgramRestarts => PersonChange::Restart { program },
            Kind::ProgramForks => PersonChange::Fork {
                program,
                processes: 1 + (random.next_u64() % 3) as u32,
            },
            Kind::PhaseChange => PersonChange::Phase {
                program,
                profile: random
                    .coin()
                    .then(|| pick(random, PROFILES).map_or_else(String::new, |s| (*s).to_owned())),
                load: Some(random.uniform()),
            },
            _ => return None,
        };
        self.bound = match &change {
            PersonChange::BindThreads { program, .. } => Some(program.clone()),
            _ => None,
        };
        // An administrator who takes a node away moves all its memory, also what homeostat moved.
        let person = matches!(kind, Kind::PersonChanges | Kind::OtherTuner | Kind::NodeOffline);
        Some((self.person(change)?, person))
    }

    fn written(&self) -> Option<String> {
        let program = self.bound.as_ref()?;
        let started = self.platform.settings().started.get(program).copied()?;
        Some(format!("{program}@{started}/mask"))
    }

    fn has_no_way_back(&self, record: &UndoRecord) -> bool {
        self.platform.has_no_way_back(record)
    }

    fn heal(&mut self) {
        let cpus = (0..self.cpus).collect();
        self.person(PersonChange::Cpus { cpus, online: true });
        for node in 0..self.nodes {
            self.person(PersonChange::Node { node, online: true });
        }
    }
}

/// Settings of a life: short enough for many trials, with all budgets drawn.
pub(super) fn settings(random: &mut Random) -> Policy {
    let among = |random: &mut Random, list: &[f64]| pick(random, list).copied().unwrap_or(60.0);
    Policy {
        seed: random.next_u64(),
        scan_interval_s: among(random, &[10.0, 30.0, 60.0]),
        detail_interval_s: among(random, &[1.0, 2.0, 5.0]),
        detail_workloads_max: 1 + (random.next_u64() % 8) as usize,
        experiment_max_s: among(random, &[600.0, 1200.0, 3600.0]),
        backoff_rejected_s: among(random, &[600.0, 7200.0, 86_400.0]),
        backoff_inconclusive_s: among(random, &[600.0, 7200.0, 21_600.0]),
        backoff_harmful_s: among(random, &[3600.0, 86_400.0]),
        reconsider_s: among(random, &[120.0, 600.0, 3600.0]),
        placebo_every_s: among(random, &[0.0, 3600.0, 21_600.0]),
        probation_pairs: 2 + (random.next_u64() % 10) as u32,
        probe_every_s: among(random, &[900.0, 1800.0, 7200.0]),
        experiments_per_hour_max: 1 + (random.next_u64() % 20) as u32,
        ..Policy::default()
    }
}

/// A change of a running daemon's configuration by an operator.
pub(super) fn reconfigured(policy: &Policy, random: &mut Random) -> Policy {
    let mut policy = Policy {
        seed: policy.seed,
        ..match random.next_u64() % 3 {
            0 => policy.clone(),
            _ => settings(random),
        }
    };
    policy.mode = match random.next_u64() % 8 {
        0 => Mode::AdviseOnly,
        1 => Mode::Calibrate,
        _ => Mode::Act,
    };
    policy
}

pub(super) fn limits(policy: &Policy, harm_per_day: f64) -> Limits {
    Limits {
        starts_per_hour: policy.experiments_per_hour_max,
        trial: Nanoseconds::from_secs_f64(policy.experiment_max_s) + Nanoseconds::from_secs(1800),
        harm_per_day,
        ..Limits::default()
    }
}
