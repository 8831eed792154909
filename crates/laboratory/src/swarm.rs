//! Compares homeostat on random machines with the best fixed placement ([oracle](crate::oracle)), and with the same
//! seed left alone.
//!
//! One index is one machine. Its shape, programs, noise and random assignment follow from the swarm's seed and that
//! index. So `--seed S --from I --machines 1` shows it again. The world's noise-free speeds are measured; homeostat's
//! sensors and engine play no part.
//!
//! * **Share of the best**: merit of the last minutes over that of the best placement (geometric mean of the programs'
//!   speeds). The median over the last [`END_S`] ignores a probe at the end.
//! * **Harm exposure**: share of all programs' work lost against the seed left alone, by slower seconds and standstill.
//!   Gains of other seconds or programs do not offset it. `harm` covers only unaccepted trials, against the moment
//!   before each.
//! * **False accepts**: accepted experiments without a true gain, in the measure that judged. Noise-free speed of on
//!   blocks is compared with off blocks; of a rollout, just after with just before.

mod machines;
mod report;

pub use machines::{scenario, subjects};
pub use report::{Report, Summary};

use crate::oracle::{Oracle, Subject, merits, worth};
use crate::parallel;
use crate::run::{Arm, Laboratory, RunError};
use crate::scenario::Profile as Thresholds;
use homeostat_model::{ExperimentKind, ExperimentRecord, Nanoseconds, Verdict};
use homeostat_simulator::world::{World, WorldError};
use homeostat_store::history::{ExperimentFilter, HISTORY_FILE, History, HistoryError};
use report::{percentile, sorted};
use serde::{Deserialize, Serialize};
use std::rc::Rc;

/// The end of a run, in seconds: its median is the end state.
pub const END_S: f64 = 1200.0;
/// A true effect above this helped its program; below zero it harmed.
const NOTHING: f64 = 0.0;
const LOOK_S: f64 = 1.0;
/// Seconds before and after a rollout in which its effect is read.
const ROLLOUT_LOOK_S: f64 = 30.0;
const EXPERIMENTS_MAX: u32 = 2000;
/// The options of a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Options {
    /// Seed of the swarm.
    pub seed: u64,
    /// First machine.
    pub from: u64,
    /// Machines.
    pub count: u64,
    /// Simulated hours of each, at least 0.5.
    pub hours: f64,
    /// homeostat's thresholds.
    pub profile: Thresholds,
    /// Rough signals instead of the usual ones: [`homeostat_simulator::rough`].
    pub rough: bool,
}

impl Options {
    /// The command that runs one machine of the swarm again.
    pub fn reproduction(&self, index: u64) -> String {
        let mut command = format!(
            "homeostat-lab --swarm --seed {} --from {index} --machines 1 --hours {}",
            self.seed, self.hours
        );
        if self.profile == Thresholds::AsoClassic {
            command += " --profile aso-classic";
        }
        if self.rough {
            command += " --rough";
        }
        command
    }
}

impl Default for Options {
    fn default() -> Self {
        Self {
            seed: 1,
            from: 0,
            count: 1000,
            hours: 4.0,
            profile: Thresholds::Homeostat,
            rough: false,
        }
    }
}

/// Why a swarm could not be run.
#[derive(Debug, thiserror::Error)]
pub enum SwarmError {
    /// The options make no sense.
    #[error("{0}")]
    Options(String),
    /// A run failed.
    #[error("machine {index}: {source}")]
    Run {
        /// The machine.
        index: u64,
        /// Why.
        source: RunError,
    },
    /// A world refuses what the oracle wants.
    #[error("machine {index}: {source}")]
    World {
        /// The machine.
        index: u64,
        /// Why.
        source: WorldError,
    },
    /// The history of a run cannot be read.
    #[error("machine {index}: {source}")]
    History {
        /// The machine.
        index: u64,
        /// Why.
        source: HistoryError,
    },
}

/// One experiment of a run, as it really was.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Trial {
    /// Strategy.
    pub strategy: String,
    /// Program; of several that were tried as one change the first.
    pub workload: String,
    /// Verdict; `None` = it still ran at the end.
    pub verdict: Option<Verdict>,
    /// Level at which it was tested.
    pub alpha: f64,
    /// True effect on the program, in the measure that judged. For several: the log mean weighted by CPUs, as trials
    /// judge them. `None` if it was never on or never off.
    pub truth: Option<f64>,
    /// Work lost while it ran, in seconds of one program.
    pub lost_s: f64,
}

impl Trial {
    fn accepted(&self) -> bool {
        self.verdict == Some(Verdict::Accepted)
    }
    fn is_null(&self) -> bool {
        self.truth.is_some_and(|t| t <= NOTHING)
    }
}

/// One machine of the swarm.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Case {
    /// Its index.
    pub index: u64,
    /// Merit of the best placement, relative to the machine left alone.
    pub best: f64,
    /// Merit at the end of homeostat's run, relative to the machine left alone.
    pub reached: f64,
    /// Share of the best that was reached; the best is at least what was reached.
    pub share: f64,
    /// Share of the best that leaving the machine alone reaches.
    pub alone: f64,
    /// Its experiments.
    pub trials: Vec<Trial>,
    /// Placebos among the experiments, not listed.
    pub placebos: u32,
    /// Placebos that were accepted.
    pub placebos_accepted: u32,
    /// Simulated hours.
    pub hours: f64,
    /// Work lost against the same seed left alone, as a share of all work of the run.
    pub exposure: f64,
    /// Work lost in trials that were not accepted, as a share of all work of the run.
    pub harm: f64,
}

// ---- what was seen --------------------------------------------------------------------------------------------------

/// Speeds while they stay the same.
struct Speeds {
    version: u64,
    work: Vec<f64>,
    cpus: Vec<f64>,
    merits: Vec<f64>,
    /// Merit of all, relative to the machine left alone.
    merit: f64,
}

struct Look {
    at_s: f64,
    speeds: Rc<Speeds>,
    /// Seconds lost to moves since the start, over all programs.
    lost_s: f64,
}

fn look(world: &mut World, at_s: f64, subjects: &[Subject], alone: &[f64], last: Option<&Look>) -> Look {
    let version = world.paces_version();
    let speeds = match last {
        Some(last) if last.speeds.version == version => Rc::clone(&last.speeds),
        _ => {
            let paces: Vec<_> = subjects.iter().map(|s| world.pace(&s.name)).collect();
            let merits = merits(world, subjects);
            let merit = worth(world, subjects, alone);
            Rc::new(Speeds {
                version,
                work: paces.iter().map(|p| p.work_per_s).collect(),
                cpus: paces.iter().map(|p| p.cpus).collect(),
                merit,
                merits,
            })
        }
    };
    Look {
        at_s,
        speeds,
        lost_s: subjects.iter().map(|s| world.lost_s(&s.name)).sum(),
    }
}

/// The subjects whose speeds judge an experiment, as the experiment does.
struct Judges {
    /// Subject, whether its work per CPU second counts, and its weight: its CPUs at the start.
    members: Vec<(usize, bool, f64)>,
}

impl Judges {
    fn of(record: &ExperimentRecord, looks: &[Look], subjects: &[Subject], from_s: f64) -> Option<Self> {
        let before = looks.partition_point(|l| l.at_s < from_s).saturating_sub(1);
        let first = looks.get(before)?;
        let (by_cpu, by_work) = (
            record.objective.contains("work per CPU second"),
            record.objective.contains("work per second"),
        );
        let names = std::iter::once(&record.workload).chain(record.others.iter().map(|(w, _)| w));
        let members = names
            .map(|name| {
                let subject = subjects.iter().position(|s| s.name == name.as_str())?;
                // If both are named, CPU time judges a program with an offered load.
                let closed = subjects.get(subject).is_some_and(|s| s.closed);
                let cpus = first.speeds.cpus.get(subject).copied().unwrap_or(0.0);
                Some((subject, by_cpu && !(by_work && closed), cpus.max(1e-3)))
            })
            .collect::<Option<Vec<_>>>()?;
        Some(Self { members })
    }

    /// Logarithm of the noise-free speed, weighted mean over the members.
    fn score(&self, look: &Look) -> Option<f64> {
        let (mut sum, mut weights) = (0.0, 0.0);
        for (subject, by_cpu, weight) in &self.members {
            let work = *look.speeds.work.get(*subject)?;
            let cpus = *look.speeds.cpus.get(*subject)?;
            let value = if *by_cpu { work / cpus } else { work };
            if !(value.is_finite() && value > 0.0) {
                return None;
            }
            sum += weight * value.ln();
            weights += weight;
        }
        (weights > 0.0).then(|| sum / weights)
    }
}

/// The true effect of an accepted rollout: speed just after it against just before. Within its slots both sides contain
/// the parts of earlier stages, and a rollback has no after.
fn rolled_out(record: &ExperimentRecord, looks: &[Look], judges: &Judges, span_s: (f64, f64)) -> Option<f64> {
    let middle = |from_s: f64, to_s: f64| {
        let first = looks.partition_point(|l| l.at_s < from_s);
        let values = looks
            .iter()
            .skip(first)
            .take_while(|l| l.at_s <= to_s)
            .filter_map(|l| judges.score(l));
        Some(percentile(&sorted(values), 0.5)).filter(|x| x.is_finite())
    };
    if record.verdict != Some(Verdict::Accepted) {
        return None;
    }
    let before = middle(span_s.0 - ROLLOUT_LOOK_S, span_s.0 - LOOK_S)?;
    let after = middle(span_s.1 + LOOK_S, span_s.1 + ROLLOUT_LOOK_S)?;
    Some((after - before).exp() - 1.0)
}

/// The true effect of an experiment: mean speed in the measured parts of on blocks against off blocks.
fn truth(
    record: &ExperimentRecord,
    looks: &[Look],
    subjects: &[Subject],
    origin_s: f64,
    span_s: (f64, f64),
) -> Option<f64> {
    let judges = Judges::of(record, looks, subjects, span_s.0)?;
    if record.kind == ExperimentKind::StagedRollout {
        return rolled_out(record, looks, &judges, span_s);
    }
    let mut sums = [(0.0, 0_u32); 2];
    for block in &record.blocks {
        let from = block.measured_from.as_secs_f64() - origin_s;
        let to = from + block.measured.as_secs_f64();
        let first = looks.partition_point(|l| l.at_s < from);
        for l in looks.iter().skip(first).take_while(|l| l.at_s <= to) {
            if let (Some(score), Some(sum)) = (judges.score(l), sums.get_mut(usize::from(block.on))) {
                sum.0 += score;
                sum.1 += 1;
            }
        }
    }
    let [(off, n_off), (on, n_on)] = sums;
    (n_off > 0 && n_on > 0).then(|| (on / f64::from(n_on) - off / f64::from(n_off)).exp() - 1.0)
}

/// Seconds of one program's work lost during a trial, against the moment before it.
fn lost(looks: &[Look], from_s: f64, to_s: f64) -> f64 {
    let first = looks.partition_point(|l| l.at_s < from_s);
    let Some(before) = first.checked_sub(1).and_then(|i| looks.get(i)) else {
        return 0.0;
    };
    let mut lost = 0.0;
    let mut last = before;
    for l in looks.iter().skip(first).take_while(|l| l.at_s <= to_s) {
        lost += slower(&l.speeds.merits, &before.speeds.merits) * (l.at_s - last.at_s)
            + (l.lost_s - last.lost_s).max(0.0);
        last = l;
    }
    lost
}

/// Slowdown of the programs, in shares of one's work. Gains of others do not count.
fn slower(now: &[f64], before: &[f64]) -> f64 {
    now.iter()
        .zip(before)
        .filter(|(_, b)| **b > 0.0)
        .map(|(now, b)| (1.0 - now / b).max(0.0))
        .sum()
}

/// Seconds of one program's work lost in the run against the machine left alone, whose speeds are steady.
fn exposed(looks: &[Look], alone: &[f64]) -> f64 {
    let (mut lost, mut at_s) = (0.0, 0.0);
    for l in looks {
        lost += slower(&l.speeds.merits, alone) * (l.at_s - at_s);
        at_s = l.at_s;
    }
    lost + looks.last().map_or(0.0, |l| l.lost_s)
}

// ---- one machine ----------------------------------------------------------------------------------------------------

/// Runs one machine of the swarm.
///
/// # Errors
/// [`SwarmError`]; the machine cannot be built or read.
pub fn one(options: &Options, index: u64) -> Result<Case, SwarmError> {
    let failed = |source| SwarmError::Run { index, source };
    let refused = |source| SwarmError::World { index, source };
    let scenario = scenario(options, index);
    let subjects = subjects(&scenario);
    let spec = scenario.world().map_err(|why| {
        failed(RunError::Scenario {
            scenario: scenario.name.clone(),
            why,
        })
    })?;
    let mut base = World::new(spec).map_err(refused)?;
    base.advance_to(Nanoseconds::from_secs(1));
    let mut oracle = Oracle::new(&base, &subjects);
    let best = oracle.best().map_err(refused)?;
    let alone = oracle.alone().to_vec();

    let mut laboratory = Laboratory::new(&scenario, Arm::Homeostat).map_err(failed)?;
    let origin = laboratory.platform().now();
    let unix = laboratory.platform().with_world(|w| w.unix_seconds()) as f64;
    let length_s = scenario.hours * 3600.0;
    let mut looks: Vec<Look> = Vec::new();
    let mut at_s = 0.0;
    while at_s < length_s {
        at_s += LOOK_S;
        laboratory.run_until(at_s).map_err(failed)?;
        let platform = laboratory.platform();
        let seen = platform.with_world(|w| look(w, at_s, &subjects, &alone, looks.last()));
        looks.push(seen);
    }
    // Keep what is in force at the end for the history; undo nothing.
    laboratory.crash();
    let history = History::open_read_only(&laboratory.directory().join(HISTORY_FILE))
        .and_then(|h| {
            h.experiments(&ExperimentFilter {
                limit: EXPERIMENTS_MAX,
                blocks: true,
                ..ExperimentFilter::default()
            })
        })
        .map_err(|source| SwarmError::History { index, source })?;
    let (placebos, real): (Vec<_>, Vec<_>) = history
        .into_iter()
        .partition(|e| e.kind == ExperimentKind::Placebo);
    // Oldest first, so that sums do not depend on the history's order.
    let mut real: Vec<(f64, ExperimentRecord)> = real
        .into_iter()
        .map(|e| (e.started_unix as f64 - unix, e))
        .collect();
    real.sort_by(|(a, _), (b, _)| a.total_cmp(b));
    let trials: Vec<Trial> = real
        .iter()
        .map(|(from_s, e)| {
            let to_s = match e.verdict {
                Some(_) => e.ended_unix as f64 - unix + 1.0,
                None => length_s,
            };
            Trial {
                strategy: e.strategy.to_string(),
                workload: e.workload.to_string(),
                verdict: e.verdict,
                alpha: e.alpha,
                truth: truth(e, &looks, &subjects, origin.as_secs_f64(), (*from_s, to_s)),
                lost_s: lost(&looks, *from_s, to_s),
            }
        })
        .collect();
    let end = looks.partition_point(|l| l.at_s < length_s - END_S);
    let reached = percentile(&sorted(looks.iter().skip(end).map(|l| l.speeds.merit)), 0.5);
    // A state that homeostat reached is a placement, too.
    let most = best.merit.max(reached);
    let lost_s: f64 = trials
        .iter()
        .filter(|t| t.verdict.is_some() && !t.accepted())
        .fold(0.0, |sum, t| sum + t.lost_s);
    let work_s = length_s * subjects.len().max(1) as f64;
    Ok(Case {
        index,
        best: most,
        reached,
        share: reached / most,
        alone: 1.0 / most,
        placebos: placebos.len() as u32,
        placebos_accepted: placebos
            .iter()
            .filter(|e| e.verdict == Some(Verdict::Accepted))
            .count() as u32,
        hours: scenario.hours,
        exposure: exposed(&looks, &alone) / work_s,
        harm: lost_s / work_s,
        trials,
    })
}

/// Runs a swarm in parallel. `go_on` sees each machine, in order; false ends it. Threads do not matter.
///
/// # Errors
/// [`SwarmError`]: that of the first machine that failed.
pub fn run(
    options: &Options,
    threads: usize,
    go_on: &mut dyn FnMut(&Case) -> bool,
) -> Result<Report, SwarmError> {
    if !(0.5..=744.0).contains(&options.hours) {
        return Err(SwarmError::Options(format!(
            "{} hours: must be 0.5 to 744",
            options.hours
        )));
    }
    let mut report = Report {
        options: options.clone(),
        cases: Vec::new(),
    };
    let mut failure = None;
    let indices = options.from..options.from.saturating_add(options.count);
    parallel::in_order(
        indices,
        threads,
        &|index| one(options, index),
        &mut |_, case| match case {
            Ok(case) => {
                let more = go_on(&case);
                report.cases.push(case);
                more
            }
            Err(e) => {
                failure = Some(e);
                false
            }
        },
    );
    failure.map_or(Ok(report), Err)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    #[test]
    fn machines_of_the_swarm_are_valid_and_all_shapes_occur() {
        let options = Options::default();
        let (mut chips, mut boards, mut threads, mut programs) =
            (BTreeMap::new(), BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
        for index in 0..300 {
            let s = scenario(&options, index);
            let l = s.machine.layout.clone().unwrap();
            l.check().unwrap();
            for p in &s.programs {
                assert_eq!(p.complaints(), Vec::<String>::new());
            }
            let spec = s.world().unwrap();
            World::new(spec).unwrap();
            *chips.entry(l.chips.len()).or_insert(0) += 1;
            *boards
                .entry(l.chips.iter().map(|c| c.board).max().unwrap() + 1)
                .or_insert(0) += 1;
            *threads.entry(l.threads_per_core).or_insert(0) += 1;
            *programs.entry(s.programs.len()).or_insert(0) += 1;
        }
        assert_eq!(
            chips.keys().copied().collect::<Vec<_>>(),
            (1..=8).collect::<Vec<_>>()
        );
        assert_eq!(boards.keys().copied().collect::<Vec<_>>(), [1, 2, 4]);
        assert_eq!(threads.keys().copied().collect::<Vec<_>>(), [1, 2, 4]);
        assert_eq!(
            programs.keys().copied().collect::<Vec<_>>(),
            (1..=6).collect::<Vec<_>>()
        );
    }

    #[test]
    fn a_machine_is_the_same_every_time() {
        let options = Options {
            hours: 0.5,
            ..Options::default()
        };
        let first = one(&options, 5).unwrap();
        assert!(!first.trials.is_empty(), "a machine on which something happens");
        assert_eq!(first, one(&options, 5).unwrap());
    }

    #[test]
    fn a_small_swarm_gains_harms_little_and_accepts_nothing_false() {
        const MACHINES: u64 = 24;
        let options = Options {
            count: MACHINES,
            hours: 0.5,
            ..Options::default()
        };
        let report = run(&options, 2, &mut |_| true).unwrap();
        let s = report.summary();
        let text = report.text();
        assert_eq!(s.machines as u64, MACHINES);
        assert!(s.accepted >= 20, "{text}");
        assert!(
            s.share.median > s.alone.median && s.share.p5 >= s.alone.p5,
            "{text}"
        );
        assert!(s.false_accepts as f64 <= report::bound(s.allowed), "{text}");
        // In a run this short trials weigh more than in the hours of the full swarm, where the goal is 0.2 %.
        assert!(s.harm <= 0.004, "{text}");
        assert!(s.experiments_per_hour_max <= 20.0, "{text}");
        assert_eq!(s.worse_than_alone, 0, "{text}");
        for case in &report.cases {
            assert!(
                case.share > 0.0 && case.share <= 1.0 && case.alone <= 1.0,
                "{case:?}"
            );
            assert!(case.exposure >= 0.0, "{case:?}");
        }
    }

    #[test]
    fn what_was_lost_is_counted_against_the_moment_before() {
        let at = |at_s: f64, merit: f64, lost_s: f64| Look {
            at_s,
            speeds: Rc::new(Speeds {
                version: at_s as u64,
                work: vec![merit],
                cpus: vec![1.0],
                merits: vec![merit],
                merit: merit / 10.0,
            }),
            lost_s,
        };
        let looks = [
            at(1.0, 10.0, 0.0),
            at(2.0, 10.0, 0.0),
            at(3.0, 8.0, 0.0),
            at(4.0, 12.0, 0.5),
            at(5.0, 5.0, 0.5),
            at(6.0, 1.0, 0.5),
        ];
        // A fifth of a second's work, half a second of standstill, half a second's work; gains do not count against it.
        let sum = lost(&looks, 2.5, 5.0);
        assert!((sum - (0.2 + 0.5 + 0.5)).abs() < 1e-12, "{sum}");
        assert_eq!(lost(&looks, 0.5, 5.0), 0.0, "there is no moment before");
        // Against a machine that would do ten all the time; the gain of the fourth second is not set against the rest.
        let all = exposed(&looks, &[10.0]);
        assert!((all - (0.2 + 0.5 + 0.9 + 0.5)).abs() < 1e-12, "{all}");
    }

    #[test]
    fn what_comes_of_a_swarm_does_not_depend_on_the_threads() {
        let options = Options {
            count: 3,
            hours: 0.5,
            ..Options::default()
        };
        let one = run(&options, 1, &mut |_| true).unwrap();
        assert_eq!(one.cases.iter().map(|c| c.index).collect::<Vec<_>>(), [0, 1, 2]);
        assert_eq!(one, run(&options, 3, &mut |_| true).unwrap());
    }

    #[test]
    fn rough_signals_change_what_is_seen_and_not_the_machine() {
        let usual = Options::default();
        let rough = Options {
            rough: true,
            ..usual.clone()
        };
        for index in 0..10 {
            let (a, b) = (scenario(&usual, index), scenario(&rough, index));
            assert_eq!(a.machine, b.machine);
            for (p, q) in a.programs.iter().zip(&b.programs) {
                assert!(q.noise.cv >= p.noise.cv && q.noise.cv >= 0.03, "{q:?}");
                let calm = |s: &homeostat_simulator::behaviour::ProgramSpec| {
                    homeostat_simulator::behaviour::ProgramSpec {
                        noise: Default::default(),
                        arrival_noise: Default::default(),
                        meters: Vec::new(),
                        ..s.clone()
                    }
                };
                assert_eq!(calm(p), calm(q));
            }
        }
    }
}
