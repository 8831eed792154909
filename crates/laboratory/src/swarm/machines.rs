//! The machines of a swarm and their programs, drawn from the seed.

use super::Options;
use crate::oracle::Subject;
use crate::scenario::{MachineSection, Scenario};
use homeostat_engine::Policy;
use homeostat_model::Bytes;
use homeostat_simulator::behaviour::{Load, ProgramSpec};
use homeostat_simulator::hardware::{Generation, Profile};
use homeostat_simulator::layout::{Chip, Layout};
use homeostat_simulator::noise::NoiseSpec;
use homeostat_simulator::scheduler::SchedulerKind;
use homeostat_statistics::simulation::Random;

struct Dice(Random);

impl Dice {
    fn between(&mut self, low: u64, high: u64) -> u64 {
        low + (self.0.uniform() * (high - low + 1) as f64) as u64
    }
    fn real(&mut self, low: f64, high: f64) -> f64 {
        low + self.0.uniform() * (high - low)
    }
    /// Even in the logarithm.
    fn scale(&mut self, low: f64, high: f64) -> f64 {
        self.real(low.ln(), high.ln()).exp()
    }
    fn chance(&mut self, p: f64) -> bool {
        self.0.uniform() < p
    }
    fn pick<T: Copy>(&mut self, from: &[T], or: T) -> T {
        let at = (self.0.uniform() * from.len() as f64) as usize;
        from.get(at).copied().unwrap_or(or)
    }
}

fn layout(dice: &mut Dice) -> Layout {
    let generation = dice.pick(
        &[
            Generation::Power7,
            Generation::Power7Plus,
            Generation::X86,
            Generation::X86,
        ],
        Generation::X86,
    );
    let x86 = generation == Generation::X86;
    let boards = dice.pick(&[1_u64, 1, 1, 2, 2, 4], 1);
    // Several caches on one node, as on many x86 machines.
    let chips_per_node = if x86 {
        dice.pick(&[1_u64, 1, 2, 4], 1).min(8 / boards)
    } else {
        1
    };
    let nodes_per_board = dice.between(1, 8 / (boards * chips_per_node));
    let cores = dice.between(2, 12) as u32;
    let mut chips = Vec::new();
    let mut node_memory = Vec::new();
    let memory = Bytes::from_mib(1024 * dice.pick(&[16_u64, 32, 64], 32));
    for board in 0..boards {
        for _ in 0..nodes_per_board {
            let node = node_memory.len() as u32;
            node_memory.push(memory);
            for _ in 0..chips_per_node {
                chips.push(Chip {
                    cores,
                    node,
                    board: board as u32,
                });
            }
        }
    }
    Layout {
        name: "swarm".into(),
        generation,
        ghz: dice.real(2.0, 4.2),
        threads_per_core: if x86 {
            dice.pick(&[1, 2], 2)
        } else {
            dice.pick(&[1, 2, 4], 4)
        },
        chips,
        node_memory,
        small_page: if x86 { Bytes(4096) } else { Bytes(65_536) },
        large_page: if x86 {
            Bytes::from_mib(2)
        } else {
            Bytes::from_mib(16)
        },
        shared_partition: false,
        split_shared: false,
    }
}

/// An unpublished profile, within the range of published ones.
fn profile(dice: &mut Dice, name: &str) -> Profile {
    let mut p = Profile::new(name, dice.scale(0.02, 6.0), 0.0, 0.0);
    if dice.chance(0.6) {
        p.mx = dice.scale(0.02, 1.0);
    }
    if dice.chance(0.7) {
        p.mt = dice.scale(0.05, 3.0);
    }
    p.several_instances = dice.chance(0.3);
    p.footprint = if dice.chance(0.5) {
        dice.real(0.0, 1.0)
    } else {
        0.0
    };
    if dice.chance(0.4) {
        p.prefetch_covered = dice.real(0.02, 0.85);
        // Fetched lines per remaining miss: useful ones over their share.
        let useful = dice.scale(0.1, 0.95);
        p.prefetch_lines = p.prefetch_covered / useful / (1.0 - p.prefetch_covered);
    }
    p.instructions_per_unit = 1e6;
    p
}

fn noise(dice: &mut Dice) -> NoiseSpec {
    NoiseSpec {
        cv: dice.scale(0.003, 0.04),
        correlation: dice.real(0.0, 0.8),
        heavy_tails: dice.real(0.0, 0.2),
        drift: if dice.chance(0.3) {
            dice.real(0.0, 0.03)
        } else {
            0.0
        },
        drift_period_s: dice.real(1800.0, 14_400.0),
        steps: if dice.chance(0.2) {
            dice.real(0.0, 0.02)
        } else {
            0.0
        },
        step_every_s: dice.real(600.0, 7200.0),
        stalls_per_hour: if dice.chance(0.2) {
            dice.real(0.0, 6.0)
        } else {
            0.0
        },
    }
}

fn named(dice: &mut Dice) -> &'static str {
    const ANY: &[&str] = &[
        "oltp",
        "process-database",
        "specjbb",
        "daytrader",
        "tradelite",
        "latency",
        "stream",
        "scattered",
        "compute",
    ];
    dice.pick(ANY, "oltp")
}

fn program(dice: &mut Dice, layout: &Layout, n: usize, busy: f64, memory: f64, profile: &str) -> ProgramSpec {
    // One process with many threads, processes on a shared segment, or a few with threads.
    let wanted = (busy.ceil() as u64).clamp(1, 2048);
    let (processes, threads) = match dice.between(0, 2) {
        0 => (1, wanted),
        1 => (wanted.min(128), 1),
        _ => {
            let p = dice.between(1, wanted.min(4));
            (p, wanted.div_ceil(p))
        }
    };
    let shared = if processes > 1 {
        dice.pick(&[0.0, 0.5, 0.9], 0.9)
    } else {
        0.0
    };
    let private_mib = ((1.0 - shared) * memory / processes as f64).max(4.0) as u64;
    let nodes = layout.node_memory.len();
    let memory_on = match dice.between(0, 3) {
        0 | 1 => Vec::new(),
        2 => {
            let home = dice.between(0, nodes as u64 - 1) as usize;
            (0..nodes).map(|n| if n == home { 1.0 } else { 0.0 }).collect()
        }
        _ => (0..nodes).map(|_| dice.real(0.05, 1.0)).collect(),
    };
    let load = match dice.between(0, 3) {
        0 | 1 => Load::Closed {
            customers: None,
            think_ms: Some(0.0),
            cpu_share: None,
        },
        2 => Load::Closed {
            customers: None,
            think_ms: None,
            cpu_share: Some(dice.real(0.3, 0.95)),
        },
        _ => Load::Open {
            per_s: None,
            busy: Some((busy * dice.real(0.3, 0.8)).max(0.1)),
        },
    };
    ProgramSpec {
        name: format!("program-{n}"),
        profile: profile.to_owned(),
        processes: processes as u32,
        threads: threads as u32,
        private_mib,
        shared_mib: (shared * memory) as u64,
        memory_on,
        skew: dice.pick(&[1.0, 1.0, 2.0], 1.0),
        sparse: if dice.chance(0.3) {
            dice.real(0.0, 0.3)
        } else {
            0.0
        },
        large: if dice.chance(0.15) { 1.0 } else { 0.0 },
        load,
        age_s: 600.0,
        noise: noise(dice),
        ..ProgramSpec::default()
    }
}

/// The machine of that index, with its programs.
pub fn scenario(options: &Options, index: u64) -> Scenario {
    // Any two indices of any two seeds are far apart.
    let seed = options
        .seed
        .wrapping_mul(0x9e37_79b9_7f4a_7c15)
        .wrapping_add(index.wrapping_mul(0xbf58_476d_1ce4_e5b9));
    let mut dice = Dice(Random::new(seed));
    let layout = layout(&mut dice);
    let count = dice.between(1, 6) as usize;
    let cpus = f64::from(layout.cpus());
    let all_busy = cpus * dice.scale(0.15, 1.3);
    let weights: Vec<f64> = (0..count).map(|_| dice.scale(0.2, 1.0)).collect();
    let sum: f64 = weights.iter().sum();
    let all_memory: f64 = layout.node_memory.iter().map(|b| b.as_mib_f64()).sum();
    let mut profiles = Vec::new();
    let mut programs = Vec::new();
    for (n, weight) in weights.iter().enumerate() {
        let name = if dice.chance(0.5) {
            named(&mut dice).to_owned()
        } else {
            let own = profile(&mut dice, &format!("random-{n}"));
            let name = own.name.clone();
            profiles.push(own);
            name
        };
        let most = (all_memory * 0.5 / count as f64).min(16_384.0);
        let memory = dice.scale(256.0, most.max(257.0));
        programs.push(program(
            &mut dice,
            &layout,
            n,
            all_busy * weight / sum,
            memory,
            &name,
        ));
    }
    let mut scenario = Scenario {
        name: format!("swarm-{}-{index}", options.seed),
        title: "one machine of a swarm".into(),
        source: String::new(),
        rows: Vec::new(),
        hours: options.hours,
        seed,
        resolution_s: 600.0,
        machine: MachineSection {
            named: None,
            layout: Some(layout),
            scheduler: dice.pick(
                &[SchedulerKind::Linux, SchedulerKind::FanOut],
                SchedulerKind::Linux,
            ),
            split_shared: false,
        },
        surroundings: homeostat_simulator::world::Surroundings::default(),
        profiles,
        programs,
        events: Vec::new(),
        by_hand: Vec::new(),
        windows: None,
        strategies: None,
        profile: options.profile,
        policy: Policy::default(),
    };
    if options.rough {
        scenario.roughen();
    }
    scenario
}

/// The programs of a scenario as the oracle sees them.
pub fn subjects(scenario: &Scenario) -> Vec<Subject> {
    scenario
        .programs
        .iter()
        .map(|p| Subject {
            name: p.name.clone(),
            closed: matches!(p.load, Load::Closed { .. }),
        })
        .collect()
}
