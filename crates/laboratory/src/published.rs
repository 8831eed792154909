//! The published table: every row S of the published results, reproduced by homeostat's own decisions on a simulated
//! machine, beside what was published, with the deviation, the tolerance and the verdict.
//!
//! Every gain is that of a run in which the engine decided; the optimised state is never switched on by hand (the runs
//! "by hand" of P7, P14 and P15 are themselves published rows). homeostat's own cost is part of the machine's load. Rows that
//! are missed are shown as misses with the reason. P18 is a table of another report and is not measured.
//!
//! Every run is made with several seeds: a number is the median over them, shown with its range, and met or missed by the
//! median. Made again with rough signals ([`Scenario::roughen`]), it says whether the verdict depends on the machine being kind.
//!
//! How much a met row means is in the column *kind*: a fitted number agrees because a constant was chosen for it, a
//! predicted one because the model is right. *Left out* is the deviation of the model's answer when the row was left out
//! of the fit (model fit, section 4.2), where that was computed.

use crate::report::{PublishedCurve, PublishedPoint, means, number, table};
use crate::run::{Arm, Outcome, Point, Progress, RunError, run_all};
use crate::scenario::{self, Scenario, ScenarioError, Window};
use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt::{self, Write};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// How much of a reproduced number was put in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// A constant was fitted to this number.
    Fitted,
    /// It is one of several numbers that share fitted constants.
    PartlyFitted,
    /// It follows from constants fitted to other rows, but settings of the strategies or the engine were changed after
    /// this row was seen to be missed.
    Tuned,
    /// It follows from constants fitted to other rows.
    Predicted,
    /// The scenario puts it in; it checks the machine's books only.
    Input,
    /// It could not come out otherwise in this scenario.
    ByConstruction,
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Fitted => "fitted",
            Self::PartlyFitted => "partly fitted",
            Self::Tuned => "tuned",
            Self::Predicted => "predicted",
            Self::Input => "input",
            Self::ByConstruction => "by construction",
        })
    }
}

/// How far a reproduced number may be from the published one.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Tolerance {
    /// In the unit of the number.
    Within(f64),
    /// As a share of the published number.
    Share(f64),
    /// At most the published number (a goal).
    AtMost,
    /// At least the published number (a goal).
    AtLeast,
    /// Between the published number and this one.
    Until(f64),
}

impl Tolerance {
    /// Whether a number is met.
    fn met(self, published: f64, reproduced: f64) -> bool {
        match self {
            Self::Within(t) => (reproduced - published).abs() <= t,
            Self::Share(t) => (reproduced - published).abs() <= t * published.abs(),
            Self::AtMost => reproduced <= published,
            Self::AtLeast => reproduced >= published,
            Self::Until(end) => reproduced >= published.min(end) && reproduced <= published.max(end),
        }
    }
    /// How much farther off than pinned a missed number may be before it counts as worse: once more the tolerance, or, of a
    /// goal, a tenth of what was pinned.
    fn slack(self, published: f64, pinned: f64) -> f64 {
        match self {
            Self::Within(t) => t,
            Self::Share(t) => t * published.abs(),
            Self::AtMost | Self::AtLeast | Self::Until(_) => 0.1 * pinned.abs(),
        }
    }
    fn words(self, unit: &str) -> String {
        match self {
            Self::Within(t) if unit == "%" => format!("±{} points", plain(t)),
            Self::Within(t) => format!("±{}", plain(t)),
            Self::Share(t) => format!("±{} %", plain(t * 100.0)),
            Self::AtMost => "at most".into(),
            Self::AtLeast => "at least".into(),
            Self::Until(end) => format!("until {}", plain(end)),
        }
    }
}

/// Up to two decimals, without zeros at the end.
fn plain(value: f64) -> String {
    let text = format!("{value:.2}");
    let text = text.trim_end_matches('0').trim_end_matches('.');
    if text == "-0" { "0".into() } else { text.to_owned() }
}

/// The outcomes of the runs that the figures need, by the name of the run.
#[derive(Clone, Debug, Default)]
pub struct Results(BTreeMap<String, Outcome>);

/// All programs of a run in one point of time.
struct Together {
    /// End of the point.
    at_s: f64,
    work_per_s: f64,
    /// Share of local accesses of the program that has the smallest.
    least_local: Option<f64>,
    /// … and the largest.
    most_local: Option<f64>,
}

/// One published number and where its reproduction is found.
struct Figure {
    row: &'static str,
    source: &'static str,
    what: &'static str,
    unit: &'static str,
    published: f64,
    tolerance: Tolerance,
    kind: Kind,
    /// Deviation of the model with the row left out of the fit, in words; empty when it was not computed.
    left_out: &'static str,
    of: fn(&Results) -> Option<f64>,
}

/// One number, reproduced with several seeds.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Reproduced {
    /// What each seed gave, the scenario's own first; `None` when it gave nothing to measure, which counts as larger than
    /// any number: a time that was not reached.
    pub by_seed: Vec<Option<f64>>,
    /// The median of them.
    pub median: Option<f64>,
    /// The smallest.
    pub lowest: Option<f64>,
    /// The largest; `None` when a seed gave nothing to measure.
    pub highest: Option<f64>,
    /// Whether the median is within the tolerance.
    pub met: bool,
    /// How many seeds are by themselves.
    pub seeds_met: usize,
}

impl Reproduced {
    fn of(figure: &Figure, by_seed: Vec<Option<f64>>) -> Self {
        let mut sorted: Vec<f64> = by_seed.iter().map(|v| v.unwrap_or(f64::INFINITY)).collect();
        sorted.sort_by(f64::total_cmp);
        let at = |i: usize| sorted.get(i).copied().filter(|v| v.is_finite());
        let half = sorted.len() / 2;
        let median = match sorted.len() {
            0 => None,
            n if n % 2 == 1 => at(half),
            _ => at(half - 1).zip(at(half)).map(|(a, b)| 0.5 * (a + b)),
        };
        let met = |v: Option<f64>| v.is_some_and(|v| figure.tolerance.met(figure.published, v));
        Self {
            met: met(median),
            seeds_met: by_seed.iter().filter(|v| met(**v)).count(),
            lowest: at(0),
            highest: at(sorted.len().saturating_sub(1)),
            median,
            by_seed,
        }
    }

    /// `17.20 to 18.40`, or nothing when all seeds agree to the digits that are shown.
    fn range(&self, unit: &str) -> String {
        let [lowest, highest] = [self.lowest, self.highest].map(|v| value(v, unit, false));
        if lowest == highest {
            String::new()
        } else {
            format!("{lowest} to {highest}")
        }
    }
}

/// One line of the table.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Entry {
    /// Row of the published results, such as `P8`.
    pub row: &'static str,
    /// Document and section.
    pub source: &'static str,
    /// What the number is.
    pub what: &'static str,
    /// Its unit.
    pub unit: &'static str,
    /// The published number (or the goal).
    pub published: f64,
    /// The median of what the runs gave; `None` when they gave nothing to measure.
    pub reproduced: Option<f64>,
    /// Reproduced less published, in the unit.
    pub deviation: Option<f64>,
    /// How far it may be off.
    pub tolerance: Tolerance,
    /// Whether the median is within the tolerance.
    pub met: bool,
    /// All seeds.
    pub seeds: Reproduced,
    /// All seeds with rough signals, when they were asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rough: Option<Reproduced>,
    /// Why not, where that is understood.
    pub reason: Option<String>,
    /// Whether it is on the list of known misses.
    pub known_miss: bool,
    /// Whether it is a known miss that is farther off than when the list was written.
    pub worse: bool,
    /// Fitted, partly fitted or predicted.
    pub kind: Kind,
    /// Deviation with the row left out of the fit.
    pub left_out: &'static str,
}

/// The whole table.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Published {
    /// Seeds of each run.
    pub seeds: u64,
    /// The lines, in the order of the rows.
    pub entries: Vec<Entry>,
    /// Two hours of P15 beside the published timeline, with the scenario's own seed.
    pub timeline: Vec<TimelinePoint>,
    /// What was decided in each run with the scenario's own seed: name of the run, and the lines that tell of trials and
    /// verdicts.
    pub decisions: BTreeMap<String, Vec<String>>,
    /// Simulated seconds of all runs together.
    pub simulated_s: f64,
}

/// How the table is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// Seeds of each run, 1 to [`SEEDS_MAX`]: the scenario's own, then that plus multiples of [`SEED_STEP`].
    pub seeds: u64,
    /// Seeds with which all is made again with rough signals; 0 = not at all.
    pub rough_seeds: u64,
    /// Runs at a time.
    pub threads: usize,
}

impl Default for Options {
    /// Five seeds, three of them also with rough signals, one run at a time.
    fn default() -> Self {
        Self {
            seeds: 5,
            rough_seeds: 3,
            threads: 1,
        }
    }
}

/// Most seeds of the table.
pub const SEEDS_MAX: u64 = 1000;
/// From one seed of a run to the next: larger than the seeds of the scenarios, so that no two runs share one.
pub const SEED_STEP: u64 = 10_000;

/// A moment of the P15 timeline.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TimelinePoint {
    /// Minutes since the start.
    pub minute: f64,
    /// What the Redbook shows there, in words; empty when it shows nothing.
    pub published: &'static str,
    /// Transactions per second with homeostat.
    pub homeostat: f64,
    /// Share of local accesses with homeostat.
    pub local_share: Option<f64>,
    /// Transactions per second when set by hand at the start.
    pub by_hand: f64,
    /// Transactions per second when left alone.
    pub left_alone: f64,
}

/// Why the table can not be made.
#[derive(Debug, thiserror::Error)]
pub enum PublishedError {
    /// A scenario of the program is broken.
    #[error("{0}")]
    Scenario(#[from] ScenarioError),
    /// A run failed.
    #[error("{run}: {source}")]
    Run {
        /// Which.
        run: String,
        /// Why.
        source: RunError,
    },
    /// It was broken off.
    #[error("broken off")]
    BrokenOff,
}

/// A run that the table needs: a scenario, and which strategies it may use.
struct Wanted {
    /// Name of the run.
    name: &'static str,
    scenario: &'static str,
    strategies: Option<&'static [&'static str]>,
    /// Only the world, without anybody who decides.
    alone: bool,
}

const AFFINITY: &[&str] = &["cache_affinity", "memory_affinity"];

const fn whole(name: &'static str) -> Wanted {
    Wanted {
        name,
        scenario: name,
        strategies: None,
        alone: false,
    }
}

const fn alone(name: &'static str) -> Wanted {
    Wanted {
        alone: true,
        ..whole(name)
    }
}

const fn affinity(name: &'static str, scenario: &'static str) -> Wanted {
    Wanted {
        name,
        scenario,
        strategies: Some(AFFINITY),
        alone: false,
    }
}

/// All runs. The longest first, so that two of them at a time end together.
const RUNS: &[Wanted] = &[
    whole("p15"),
    whole("p8"),
    affinity("p8/affinity", "p8"),
    whole("p10"),
    affinity("p10/affinity", "p10"),
    whole("p9"),
    affinity("p9/affinity", "p9"),
    whole("p1"),
    whole("p3"),
    whole("p4-8"),
    whole("p4-15"),
    whole("p5-16"),
    whole("p5-32"),
    whole("p6-8"),
    whole("p6-16"),
    whole("p7"),
    whole("p11-60"),
    whole("p11-90"),
    whole("p12a-1"),
    whole("p12a-2"),
    whole("p12b-1"),
    whole("p12b-2"),
    whole("p13-1"),
    whole("p13-2"),
    whole("p13-3"),
    alone("p16-spread"),
    alone("p16-contained"),
];

impl Results {
    fn outcome(&self, run: &str) -> Option<&Outcome> {
        self.0.get(run)
    }

    /// Gain of all programs of a run together, in percent: work per second after against before.
    fn gain(&self, run: &str) -> Option<f64> {
        let c = &self.outcome(run)?.comparisons;
        let before: f64 = c.iter().map(|c| c.before.work_per_s).sum();
        let after: f64 = c.iter().map(|c| c.after.work_per_s).sum();
        (before > 0.0).then(|| (after / before - 1.0) * 100.0)
    }

    /// What one run gains over another, in points of the work before.
    fn gain_over(&self, run: &str, other: &str) -> Option<f64> {
        Some(self.gain(run)? - self.gain(other)?)
    }

    /// Mean of the gains of several runs.
    fn mean_gain(&self, runs: &[&str]) -> Option<f64> {
        let gains: Vec<f64> = runs.iter().map(|r| self.gain(r)).collect::<Option<_>>()?;
        Some(gains.iter().sum::<f64>() / gains.len().max(1) as f64)
    }

    fn before(&self, run: &str) -> Option<&Point> {
        self.outcome(run)?.comparisons.first().map(|c| &c.before)
    }

    fn after(&self, run: &str) -> Option<&Point> {
        self.outcome(run)?.comparisons.first().map(|c| &c.after)
    }

    /// Means of a whole run of an arm.
    fn overall(&self, run: &str, arm: Arm) -> Option<Point> {
        let track = self.outcome(run)?.track(arm)?;
        Some(means(
            &track.programs.first()?.points,
            Window {
                from_s: 0.0,
                to_s: track.length_s,
            },
        ))
    }

    /// Change of the mean response time in percent.
    fn response_change(&self, run: &str) -> Option<f64> {
        let (b, a) = (
            self.before(run)?.response_mean_ms?,
            self.after(run)?.response_mean_ms?,
        );
        (b > 0.0).then(|| (a / b - 1.0) * 100.0)
    }

    /// First moment (seconds) from which on all programs of homeostat's run hold a bound in nine of ten points of the next
    /// five minutes: blocks of a trial in which the change is off count as not held, single probes of the guard do not matter.
    fn held_from(&self, run: &str, bound: f64, of: fn(&Point) -> Option<f64>) -> Option<f64> {
        const NEXT_S: f64 = 300.0;
        let programs = &self.outcome(run)?.track(Arm::Homeostat)?.programs;
        let mut latest: f64 = 0.0;
        for program in programs {
            let points = &program.points;
            let first = (0..points.len()).find(|i| {
                let next: Vec<&Point> = points
                    .iter()
                    .skip(*i)
                    .take_while(|p| p.at_s - points.get(*i).map_or(0.0, |f| f.at_s) <= NEXT_S)
                    .collect();
                let holds = |p: &&&Point| of(p).is_some_and(|v| v >= bound);
                let held = next.iter().filter(holds).count();
                next.first().is_some_and(|p| holds(&p)) && held * 10 >= next.len() * 9
            })?;
            latest = latest.max(points.get(first).map(|p| p.at_s - p.seconds)?);
        }
        Some(latest)
    }

    /// All programs of an arm together, point by point.
    fn together(&self, run: &str, arm: Arm) -> Option<Vec<Together>> {
        let programs = &self.outcome(run)?.track(arm)?.programs;
        let first = programs.first()?;
        Some(
            first
                .points
                .iter()
                .enumerate()
                .map(|(i, p)| {
                    let here = || programs.iter().filter_map(|q| q.points.get(i));
                    Together {
                        at_s: p.at_s,
                        work_per_s: here().map(|q| q.work_per_s).sum(),
                        least_local: here().filter_map(|q| q.local_share).min_by(f64::total_cmp),
                        most_local: here().filter_map(|q| q.local_share).max_by(f64::total_cmp),
                    }
                })
                .collect(),
        )
    }

    /// Work of all programs of an arm over the whole run.
    fn transactions(&self, run: &str, arm: Arm) -> Option<f64> {
        let programs = &self.outcome(run)?.track(arm)?.programs;
        Some(
            programs
                .iter()
                .flat_map(|p| &p.points)
                .map(|p| p.work_per_s * p.seconds)
                .sum(),
        )
    }

    /// Work of an arm against that of another over the whole run, in percent.
    fn against(&self, run: &str, arm: Arm, other: Arm) -> Option<f64> {
        let (a, b) = (self.transactions(run, arm)?, self.transactions(run, other)?);
        (b > 0.0).then(|| (a / b - 1.0) * 100.0)
    }

    /// Work per second of all programs when the threads are placed and the memory is not yet moved: the median of the
    /// points at which 67 to 73 % of the accesses are local.
    fn once_placed(&self, run: &str) -> Option<f64> {
        let mut rates: Vec<f64> = self
            .together(run, Arm::Homeostat)?
            .into_iter()
            .filter(|t| t.least_local.is_some_and(|l| l >= 0.67) && t.most_local.is_some_and(|l| l <= 0.73))
            .map(|t| t.work_per_s)
            .collect();
        rates.sort_by(f64::total_cmp);
        rates.get(rates.len() / 2).copied()
    }
}

/// Mean share of the hardware threads of a core that are charged, as published in Table 3.
fn thread_use(results: &Results, arm: Arm, cpu: usize) -> Option<f64> {
    results.outcome("p1")?.track(arm)?.thread_use.get(cpu).copied()
}

/// Largest deviation of eight hardware threads from a published table, in processors.
fn table_deviation(results: &Results, arm: Arm, published: [f64; 8]) -> Option<f64> {
    // CPUs 0..3 of the first domain and 24..27: in this layout the second domain starts at CPU 40 (ten cores of four).
    let cpus = [0, 1, 2, 3, 40, 41, 42, 43];
    let mut worst: f64 = 0.0;
    for (cpu, published) in cpus.into_iter().zip(published) {
        worst = worst.max((thread_use(results, arm, cpu)? - published).abs());
    }
    Some(worst)
}

/// Published use of the hardware threads of one core of each domain (Table 3), in processors.
const TABLE_3_BEFORE: [f64; 8] = [0.57, 0.11, 0.11, 0.11, 0.39, 0.08, 0.08, 0.08];
const TABLE_3_AFTER: [f64; 8] = [0.41, 0.33, 0.07, 0.08, 0.01, 0.0, 0.0, 0.0];

const PAPER: &str = "DSO white paper";
const REDBOOK: &str = "Redbook";

use Kind::{ByConstruction, Fitted, Input, PartlyFitted, Predicted, Tuned};
use Tolerance::{AtLeast, AtMost, Share, Until, Within};

const fn figure(
    row: &'static str,
    what: &'static str,
    unit: &'static str,
    published: f64,
    tolerance: Tolerance,
    kind: Kind,
    of: fn(&Results) -> Option<f64>,
) -> Figure {
    Figure {
        row,
        source: PAPER,
        what,
        unit,
        published,
        tolerance,
        kind,
        left_out: "",
        of,
    }
}

impl Figure {
    const fn left_out(self, left_out: &'static str) -> Self {
        Self { left_out, ..self }
    }
    const fn from(self, source: &'static str) -> Self {
        Self { source, ..self }
    }
}

/// A number that is missed, and why.
struct KnownMiss {
    row: &'static str,
    what: &'static str,
    /// The value of the default seeds that was farthest off when this was written: a number that gets much worse
    /// ([`Tolerance::slack`]) fails the test like one that was met and is missed.
    pinned: f64,
    reason: &'static str,
}

const fn miss(row: &'static str, what: &'static str, pinned: f64, reason: &'static str) -> KnownMiss {
    KnownMiss {
        row,
        what,
        pinned,
        reason,
    }
}

/// Numbers that are missed, and why. A number that is missed and not here fails the test.
const KNOWN_MISSES: &[KnownMiss] = &[
    miss(
        "P2",
        "use of hardware threads after, largest deviation",
        0.0263,
        "the first thread of a core is charged .43 instead of .41: the original's attachment is soft, and the cores that \
         the published 9.7 leave on the second domain (Figure 9: most of it idle, but not all) run on the first here, where \
         homeostat's mask holds them",
    ),
    miss(
        "P3",
        "prefetch in the memory traffic, with homeostat",
        42.99,
        "homeostat predicts a loss of 0.3 % from switching the prefetcher off on a machine whose links are 29 % full, and \
         does not try; the source gives the fall of the traffic and no gain. The thresholds of the original (aso-classic) \
         would try it, but a trial keeps what does more work: saving traffic at no loss would be an objective of its own \
         (experiments.md A.3, resource-saving actions), which the engine does not have",
    ),
    miss(
        "P6",
        "throughput, 16 cores",
        46.67,
        "the fit itself gives 48.5 %, just inside; all four are placed and moved after twelve minutes, and the guard's probes \
         take the rest",
    ),
    miss(
        "P10",
        "throughput, affinity",
        2.51,
        "a demand of 29 cores does not fit a book of 16, so only threads that share data are grouped by book. The 13 % of \
         the fit assume that 97 % of all accesses stay in the book of the thread although threads run in both: no \
         placement of one shared pool does that on this machine",
    ),
    miss(
        "P10",
        "throughput, large pages and prefetch",
        13.35,
        "without that state (97 % of the accesses near) latencies are longer, walks of the page table with them, and \
         removing the walks gains more than published",
    ),
    miss("P10", "throughput, all", 15.86, "see affinity"),
    miss(
        "P15",
        "goal: threads placed after",
        90.0,
        "ten seconds until the CPU use is known, twelve of readings until the meter is trusted, then at least twelve blocks of \
         four seconds, half of them off: the first trial is at the level .001, and no coin can more than double the evidence; in blocks of three seconds it took 26 of them, 100 s",
    ),
];

impl Figure {
    fn known_miss(&self) -> Option<&'static KnownMiss> {
        KNOWN_MISSES
            .iter()
            .find(|m| m.row == self.row && m.what == self.what)
    }

    /// Whether a number is farther off than it was pinned, in the direction of the miss.
    fn worse(&self, pinned: f64, value: Option<f64>) -> bool {
        let Some(value) = value else { return true };
        let slack = self.tolerance.slack(self.published, pinned);
        let off = |v: f64| match self.tolerance {
            Tolerance::AtMost => v - self.published,
            Tolerance::AtLeast => self.published - v,
            _ => (v - self.published).abs(),
        };
        off(value) > off(pinned) + slack
    }
}

/// Every published number of the rows S, and the goals of P4, P7 and P15.
fn figures() -> Vec<Figure> {
    vec![
        figure(
            "P1",
            "cores consumed, before",
            "cores",
            12.7,
            Share(0.05),
            Input,
            |r| Some(r.before("p1")?.cores),
        ),
        figure(
            "P1",
            "cores consumed, after",
            "cores",
            9.7,
            Share(0.05),
            PartlyFitted,
            |r| Some(r.after("p1")?.cores),
        )
        .left_out("+4.1 %"),
        figure("P1", "throughput", "%", 0.0, Within(1.0), ByConstruction, |r| {
            r.gain("p1")
        }),
        figure(
            "P2",
            "use of hardware threads before, largest deviation",
            "processors",
            0.0,
            Within(0.02),
            Input,
            |r| table_deviation(r, Arm::LeftAlone, TABLE_3_BEFORE),
        ),
        figure(
            "P2",
            "use of hardware threads after, largest deviation",
            "processors",
            0.0,
            Within(0.02),
            PartlyFitted,
            |r| table_deviation(r, Arm::Homeostat, TABLE_3_AFTER),
        ),
        figure(
            "P3",
            "prefetch in the memory traffic, before",
            "%",
            43.0,
            Within(3.0),
            Fitted,
            |r| Some(r.before("p3")?.prefetch_share? * 100.0),
        ),
        figure(
            "P3",
            "prefetch in the memory traffic, switched off by hand",
            "%",
            3.0,
            Within(3.0),
            Fitted,
            |r| Some(r.overall("p3", Arm::Manual)?.prefetch_share? * 100.0),
        ),
        figure(
            "P3",
            "prefetch in the memory traffic, with homeostat",
            "%",
            3.0,
            Within(3.0),
            Predicted,
            |r| Some(r.after("p3")?.prefetch_share? * 100.0),
        ),
        figure(
            "P4",
            "throughput, 8 cores",
            "%",
            0.0,
            Within(0.3),
            Predicted,
            |r| r.gain("p4-8"),
        ),
        figure(
            "P4",
            "throughput, 15 cores",
            "%",
            0.0,
            Within(0.3),
            Predicted,
            |r| r.gain("p4-15"),
        ),
        figure(
            "P5",
            "throughput, 16 cores",
            "%",
            24.0,
            Within(4.0),
            PartlyFitted,
            |r| r.gain("p5-16"),
        ),
        figure(
            "P5",
            "throughput, 32 cores",
            "%",
            42.0,
            Within(4.0),
            PartlyFitted,
            |r| r.gain("p5-32"),
        )
        .left_out("-5.0 points"),
        figure(
            "P6",
            "throughput, 8 cores",
            "%",
            36.0,
            Within(4.0),
            PartlyFitted,
            |r| r.gain("p6-8"),
        )
        .left_out("+5.3 points"),
        figure(
            "P6",
            "throughput, 16 cores",
            "%",
            52.0,
            Within(4.0),
            PartlyFitted,
            |r| r.gain("p6-16"),
        ),
        figure(
            "P7",
            "throughput, bound by hand",
            "%",
            -5.0,
            Within(1.0),
            Fitted,
            |r| r.against("p7", Arm::Manual, Arm::LeftAlone),
        ),
        figure(
            "P7",
            "throughput, optimizer",
            "%",
            0.0,
            Within(1.0),
            Predicted,
            |r| r.against("p7", Arm::Homeostat, Arm::LeftAlone),
        ),
        figure(
            "P8",
            "throughput, affinity",
            "%",
            3.26,
            Within(2.0),
            Fitted,
            |r| r.gain("p8/affinity"),
        )
        .left_out("-0.2 points"),
        figure(
            "P8",
            "throughput, large pages and prefetch",
            "%",
            23.31,
            Within(2.0),
            Fitted,
            |r| r.gain_over("p8", "p8/affinity"),
        )
        .left_out("-5.4 points"),
        figure("P8", "throughput, all", "%", 26.57, Within(2.0), Fitted, |r| {
            r.gain("p8")
        }),
        figure(
            "P8",
            "response time, mean",
            "%",
            -12.0,
            Until(-39.0),
            PartlyFitted,
            |r| r.response_change("p8"),
        ),
        figure(
            "P9",
            "throughput, large pages and prefetch",
            "%",
            8.3,
            Within(2.0),
            Tuned,
            |r| r.gain("p9"),
        )
        .left_out("-0.2 points"),
        figure(
            "P9",
            "throughput, affinity",
            "%",
            0.0,
            Within(2.0),
            Predicted,
            |r| r.gain("p9/affinity"),
        ),
        figure(
            "P10",
            "throughput, affinity",
            "%",
            13.0,
            Within(2.0),
            PartlyFitted,
            |r| r.gain("p10/affinity"),
        )
        .left_out("+3.0 points"),
        figure(
            "P10",
            "throughput, large pages and prefetch",
            "%",
            9.0,
            Within(2.0),
            Tuned,
            |r| r.gain_over("p10", "p10/affinity"),
        )
        .left_out("+1.0 points"),
        figure(
            "P10",
            "throughput, all",
            "%",
            22.0,
            Within(2.0),
            PartlyFitted,
            |r| r.gain("p10"),
        ),
        figure(
            "P11",
            "throughput at 60 % busy",
            "%",
            4.3,
            Within(1.0),
            Fitted,
            |r| r.gain("p11-60"),
        ),
        figure(
            "P11",
            "throughput at 90 % busy",
            "%",
            4.3,
            Within(1.0),
            PartlyFitted,
            |r| r.gain("p11-90"),
        )
        .left_out("-1.0 points"),
        figure(
            "P12",
            "throughput, first pair of partitions",
            "%",
            6.0,
            Within(2.0),
            PartlyFitted,
            |r| r.mean_gain(&["p12a-1", "p12a-2"]),
        )
        .left_out("+2.1 points"),
        figure(
            "P12",
            "throughput, second pair of partitions",
            "%",
            8.1,
            Within(2.0),
            Tuned,
            |r| r.mean_gain(&["p12b-1", "p12b-2"]),
        )
        .left_out("+0.3 points"),
        figure(
            "P13",
            "throughput, one tile",
            "%",
            0.0,
            Within(4.0),
            ByConstruction,
            |r| r.gain("p13-1"),
        ),
        figure(
            "P13",
            "throughput, two tiles",
            "%",
            10.0,
            Within(4.0),
            Fitted,
            |r| r.gain("p13-2"),
        ),
        figure(
            "P13",
            "throughput, three tiles",
            "%",
            63.6,
            Within(4.0),
            Tuned,
            |r| r.gain("p13-3"),
        ),
        figure(
            "P14",
            "transactions in two hours, left alone",
            "",
            65_402.0,
            Share(0.05),
            Fitted,
            |r| r.transactions("p15", Arm::LeftAlone),
        )
        .from(REDBOOK),
        figure(
            "P14",
            "transactions in two hours, by hand",
            "",
            182_291.0,
            Share(0.05),
            Fitted,
            |r| r.transactions("p15", Arm::Manual),
        )
        .from(REDBOOK),
        figure(
            "P14",
            "latency left alone",
            "ns",
            350.0,
            Share(0.05),
            Fitted,
            |r| r.overall("p15", Arm::LeftAlone)?.latency_ns,
        )
        .from(REDBOOK),
        figure("P14", "latency by hand", "ns", 170.0, Share(0.05), Fitted, |r| {
            r.overall("p15", Arm::Manual)?.latency_ns
        })
        .from(REDBOOK),
        figure(
            "P15",
            "transactions per second once placed",
            "TPS",
            18.0,
            Share(0.05),
            PartlyFitted,
            |r| r.once_placed("p15"),
        )
        .from(REDBOOK),
        figure(
            "P15",
            "goal: threads placed after",
            "s",
            60.0,
            AtMost,
            Tuned,
            |r| r.held_from("p15", 0.65, |p| p.local_share),
        )
        .from("issue 4"),
        figure(
            "P15",
            "goal: memory local after",
            "min",
            10.0,
            AtMost,
            Tuned,
            |r| r.held_from("p15", 0.97, |p| p.local_share).map(|s| s / 60.0),
        )
        .from("issue 4"),
        figure(
            "P15",
            "goal: two hours, against placement by hand",
            "%",
            -2.0,
            AtLeast,
            Tuned,
            |r| r.against("p15", Arm::Homeostat, Arm::Manual),
        )
        .from("issue 4"),
        figure(
            "P16",
            "cycles per instruction, spread",
            "",
            7.5,
            Share(0.05),
            PartlyFitted,
            |r| r.overall("p16-spread", Arm::LeftAlone)?.cycles_per_instruction,
        )
        .from(REDBOOK),
        figure(
            "P16",
            "cycles per instruction, contained",
            "",
            4.8,
            Share(0.05),
            PartlyFitted,
            |r| r.overall("p16-contained", Arm::LeftAlone)?.cycles_per_instruction,
        )
        .from(REDBOOK),
        figure(
            "P16",
            "transactions per second, spread",
            "TPS",
            5100.0,
            Share(0.05),
            Fitted,
            |r| r.transactions("p16-spread", Arm::LeftAlone).map(|t| t / 3600.0),
        )
        .from(REDBOOK),
        figure(
            "P16",
            "transactions per second, contained",
            "TPS",
            6300.0,
            Share(0.05),
            Fitted,
            |r| {
                r.transactions("p16-contained", Arm::LeftAlone)
                    .map(|t| t / 3600.0)
            },
        )
        .from(REDBOOK),
    ]
}

/// Makes all runs and holds them against what was published. `go_on` sees the progress and may break it off by answering
/// false.
///
/// # Errors
/// [`PublishedError`].
pub fn run(
    options: &Options,
    go_on: &(dyn Fn(&str, f64) -> bool + Sync),
) -> Result<Published, PublishedError> {
    let figures = figures();
    let seeds = options.seeds.clamp(1, SEEDS_MAX);
    let mut usual: Vec<Vec<Option<f64>>> = vec![Vec::new(); figures.len()];
    let mut rough = usual.clone();
    let mut published = Published {
        seeds,
        entries: Vec::new(),
        timeline: Vec::new(),
        decisions: BTreeMap::new(),
        simulated_s: 0.0,
    };
    // Seed by seed, so that only the curves of one seed are held at a time.
    let rough_seeds = options.rough_seeds.min(SEEDS_MAX);
    for (is_rough, seeds, numbers) in [(false, seeds, &mut usual), (true, rough_seeds, &mut rough)] {
        for turn in 0..seeds {
            let results = results(
                &Turn {
                    seed: turn * SEED_STEP,
                    rough: is_rough,
                    label: format!(
                        "seed {} of {seeds}{}",
                        turn + 1,
                        if is_rough { ", rough signals" } else { "" }
                    ),
                },
                options.threads,
                go_on,
            )?;
            for (figure, numbers) in figures.iter().zip(numbers.iter_mut()) {
                numbers.push((figure.of)(&results).filter(|v| v.is_finite()));
            }
            published.simulated_s += results.simulated_s();
            if turn == 0 && !is_rough {
                published.timeline = timeline(&results).unwrap_or_default();
                published.decisions = results.decisions();
            }
        }
    }
    published.entries = figures
        .iter()
        .zip(usual.into_iter().zip(rough))
        .map(|(figure, (usual, rough))| Entry::of(figure, usual, (rough_seeds > 0).then_some(rough)))
        .collect();
    Ok(published)
}

/// One time through all runs.
struct Turn {
    /// Added to the seed of each scenario.
    seed: u64,
    rough: bool,
    label: String,
}

fn results(
    turn: &Turn,
    threads: usize,
    go_on: &(dyn Fn(&str, f64) -> bool + Sync),
) -> Result<Results, PublishedError> {
    let next = AtomicUsize::new(0);
    let stop = AtomicBool::new(false);
    let collected: Mutex<Vec<(&'static str, Result<Outcome, PublishedError>)>> = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..threads.clamp(1, RUNS.len()) {
            scope.spawn(|| {
                while let Some(wanted) = RUNS.get(next.fetch_add(1, Ordering::Relaxed)) {
                    if stop.load(Ordering::Relaxed) {
                        return;
                    }
                    let label = format!("{}, {}", wanted.name, turn.label);
                    let outcome = outcome(wanted, turn, &|done| {
                        go_on(&label, done) && !stop.load(Ordering::Relaxed)
                    });
                    if outcome.is_err() {
                        stop.store(true, Ordering::Relaxed);
                    }
                    collected
                        .lock()
                        .unwrap_or_else(std::sync::PoisonError::into_inner)
                        .push((wanted.name, outcome));
                }
            });
        }
    });
    let mut results = Results::default();
    let collected = collected
        .into_inner()
        .unwrap_or_else(std::sync::PoisonError::into_inner);
    // The first error that is not the consequence of another one.
    let mut broken_off = false;
    for (name, outcome) in collected {
        match outcome {
            Ok(outcome) => {
                results.0.insert(name.to_owned(), outcome);
            }
            Err(PublishedError::BrokenOff) => broken_off = true,
            Err(e) => return Err(e),
        }
    }
    if broken_off {
        return Err(PublishedError::BrokenOff);
    }
    Ok(results)
}

fn outcome(wanted: &Wanted, turn: &Turn, go_on: &dyn Fn(f64) -> bool) -> Result<Outcome, PublishedError> {
    let mut scenario: Scenario = scenario::find(wanted.scenario)?;
    scenario.seed += turn.seed;
    if turn.rough {
        scenario.roughen();
    }
    if let Some(strategies) = wanted.strategies {
        scenario.strategies = Some(strategies.iter().map(|s| (*s).to_owned()).collect());
    }
    let mut watch = |p: Progress<'_>| go_on(p.at_s / p.length_s);
    let failed = |source| PublishedError::Run {
        run: wanted.name.to_owned(),
        source,
    };
    let outcome = if wanted.alone {
        let track = crate::run::run(&scenario, Arm::LeftAlone, &mut watch).map_err(failed)?;
        Outcome {
            scenario: scenario.name.clone(),
            title: scenario.title.clone(),
            source: scenario.source.clone(),
            tracks: vec![track],
            comparisons: Vec::new(),
        }
    } else {
        run_all(&scenario, &mut watch).map_err(failed)?
    };
    if outcome.tracks.iter().any(|t| t.broken_off) {
        return Err(PublishedError::BrokenOff);
    }
    Ok(outcome)
}

impl Entry {
    fn of(f: &Figure, usual: Vec<Option<f64>>, rough: Option<Vec<Option<f64>>>) -> Self {
        let seeds = Reproduced::of(f, usual);
        let known = f.known_miss();
        let reason = if seeds.met {
            None
        } else {
            Some(known.map_or_else(
                || match seeds.median {
                    None => "the run gave nothing to measure".to_owned(),
                    Some(_) => "not understood yet".to_owned(),
                },
                |m| m.reason.to_owned(),
            ))
        };
        Self {
            row: f.row,
            source: f.source,
            what: f.what,
            unit: f.unit,
            published: f.published,
            reproduced: seeds.median,
            deviation: seeds.median.map(|v| v - f.published),
            tolerance: f.tolerance,
            met: seeds.met,
            worse: known.is_some_and(|m| f.worse(m.pinned, seeds.median)),
            rough: rough.map(|r| Reproduced::of(f, r)),
            seeds,
            reason,
            known_miss: known.is_some(),
            kind: f.kind,
            left_out: f.left_out,
        }
    }
}

impl Results {
    /// Simulated seconds of all runs.
    fn simulated_s(&self) -> f64 {
        self.0.values().flat_map(|o| &o.tracks).map(|t| t.length_s).sum()
    }

    /// The lines that tell of trials and verdicts, by run.
    fn decisions(&self) -> BTreeMap<String, Vec<String>> {
        self.0
            .iter()
            .filter_map(|(name, outcome)| {
                let lines: Vec<String> = outcome
                    .track(Arm::Homeostat)?
                    .story
                    .iter()
                    .filter(|l| matches!(l.stage.as_str(), "trying" | "improved" | "declined"))
                    .map(crate::report::story_line)
                    .collect();
                Some((name.clone(), lines))
            })
            .collect()
    }
}

/// What the Redbook's Figures 6-5 and 6-6 and their text show, by minute.
const ASO: &[(f64, &str)] = &[
    (0.5, "8 TPS, 40 % local"),
    (2.0, "18 TPS: threads placed"),
    (5.0, ""),
    (10.0, ""),
    (20.0, "70 % local: the first pages move, 10 % every five minutes"),
    (25.0, "80 % local"),
    (30.0, "90 % local"),
    (45.0, "done"),
    (60.0, ""),
    (90.0, ""),
    (120.0, "over two hours 8 % less than by hand"),
];

/// The curves that the Redbook shows for P15, for the page of a run.
pub fn aso_curves() -> Vec<PublishedCurve> {
    let points = |list: &[(f64, f64)]| {
        list.iter()
            .map(|(minute, value)| PublishedPoint {
                at_s: minute * 60.0,
                value: *value,
            })
            .collect()
    };
    vec![
        PublishedCurve {
            // The figure counts both processes; a curve here is one of them.
            curve: "throughput".into(),
            points: points(&[(0.5, 4.0), (2.0, 9.0)]),
        },
        PublishedCurve {
            curve: "locality".into(),
            points: points(&[
                (0.5, 40.0),
                (20.0, 70.0),
                (25.0, 80.0),
                (30.0, 90.0),
                (45.0, 100.0),
            ]),
        },
    ]
}

fn timeline(results: &Results) -> Option<Vec<TimelinePoint>> {
    let with = results.together("p15", Arm::Homeostat)?;
    let manual = results.together("p15", Arm::Manual)?;
    let alone = results.together("p15", Arm::LeftAlone)?;
    // The mean of the minute that ends there.
    let mean = |points: &[Together], minute: f64| {
        let last: Vec<&Together> = points
            .iter()
            .filter(|p| p.at_s <= minute * 60.0 + 1.0 && p.at_s > (minute - 1.0) * 60.0 + 1.0)
            .collect();
        let n = last.len().max(1) as f64;
        let rate = last.iter().map(|p| p.work_per_s).sum::<f64>() / n;
        let local: Vec<f64> = last.iter().filter_map(|p| p.least_local).collect();
        let local = (!local.is_empty()).then(|| local.iter().sum::<f64>() / local.len() as f64);
        (rate, local)
    };
    Some(
        ASO.iter()
            .map(|(minute, published)| {
                let (homeostat, local_share) = mean(&with, *minute);
                TimelinePoint {
                    minute: *minute,
                    published,
                    homeostat,
                    local_share,
                    by_hand: mean(&manual, *minute).0,
                    left_alone: mean(&alone, *minute).0,
                }
            })
            .collect(),
    )
}

fn value(v: Option<f64>, unit: &str, sign: bool) -> String {
    match v {
        None => "-".into(),
        Some(v) if sign && unit == "%" => format!("{v:+.2}"),
        Some(v) if sign => format!("{}{}", if v >= 0.0 { "+" } else { "-" }, number(v.abs())),
        Some(v) if unit == "%" => format!("{v:.2}"),
        Some(v) => number(v),
    }
}

impl Published {
    /// How many lines are met, and how many there are.
    pub fn met(&self) -> (usize, usize) {
        (self.entries.iter().filter(|e| e.met).count(), self.entries.len())
    }

    /// Lines that are missed and not on the list of known misses, or farther off than they are known to be.
    pub fn unexpected(&self) -> Vec<&Entry> {
        self.entries
            .iter()
            .filter(|e| !e.met && (!e.known_miss || e.worse))
            .collect()
    }

    /// How many lines are met with rough signals; `None` when that was not asked for.
    pub fn met_rough(&self) -> Option<usize> {
        self.entries
            .iter()
            .map(|e| e.rough.as_ref().map(|r| usize::from(r.met)))
            .sum()
    }

    /// The table for a terminal.
    pub fn text(&self) -> String {
        let rows: Vec<Vec<String>> = self.entries.iter().map(Entry::cells).collect();
        let mut out = table(&HEAD, &rows);
        if self.met_rough().is_some() {
            out.push_str("\n  With rough signals\n");
            out.push_str(&table(
                &ROUGH_HEAD,
                &self
                    .entries
                    .iter()
                    .filter_map(Entry::rough_cells)
                    .collect::<Vec<_>>(),
            ));
        }
        out.push('\n');
        for e in &self.entries {
            if let Some(reason) = &e.reason {
                let _ = writeln!(out, "  missed: {} {}: {reason}", e.row, e.what);
            }
            if e.worse && !e.met {
                let _ = writeln!(
                    out,
                    "  WORSE: {} {}: farther off than it was known to be",
                    e.row, e.what
                );
            }
        }
        let (met, all) = self.met();
        let rough = self
            .met_rough()
            .map_or_else(String::new, |n| format!(", {n} with rough signals"));
        let _ = writeln!(
            out,
            "\n  {met} of {all} numbers met by the median of {} seeds{rough}. P17 is measured on real machines; P18 and P19 are not measured.\n",
            self.seeds
        );
        out.push_str("  P15, transactions per second of both programs\n");
        let rows: Vec<Vec<String>> = self.timeline.iter().map(TimelinePoint::cells).collect();
        out.push_str(&table(&TIMELINE_HEAD, &rows));
        out
    }
}

const HEAD: [&str; 14] = [
    "row",
    "number",
    "unit",
    "published",
    "reproduced",
    "range",
    "deviation",
    "tolerance",
    "verdict",
    "seeds",
    "rough",
    "kind",
    "left out",
    "source",
];

const ROUGH_HEAD: [&str; 6] = ["number", "published", "median", "range", "verdict", "seeds"];

const TIMELINE_HEAD: [&str; 6] = [
    "minute",
    "homeostat",
    "local",
    "by hand",
    "left alone",
    "published (ASO)",
];

/// A verdict as it is printed.
fn verdict(met: bool) -> String {
    if met { "met".into() } else { "MISSED".into() }
}

impl Entry {
    /// Which number it is, in one cell.
    fn name(&self) -> String {
        format!("{}, {}", self.row, self.what)
    }

    fn cells(&self) -> Vec<String> {
        vec![
            self.row.into(),
            self.what.into(),
            self.unit.into(),
            number(self.published),
            value(self.reproduced, self.unit, false),
            self.seeds.range(self.unit),
            value(self.deviation, self.unit, true),
            self.tolerance.words(self.unit),
            verdict(self.met),
            of_seeds(&self.seeds),
            self.rough.as_ref().map_or_else(String::new, |r| verdict(r.met)),
            self.kind.to_string(),
            self.left_out.into(),
            self.source.into(),
        ]
    }

    fn rough_cells(&self) -> Option<Vec<String>> {
        let r = self.rough.as_ref()?;
        Some(vec![
            self.name(),
            number(self.published),
            value(r.median, self.unit, false),
            r.range(self.unit),
            verdict(r.met),
            of_seeds(r),
        ])
    }
}

/// `4 of 5`.
fn of_seeds(r: &Reproduced) -> String {
    format!("{} of {}", r.seeds_met, r.by_seed.len())
}

impl TimelinePoint {
    fn cells(&self) -> Vec<String> {
        vec![
            plain(self.minute),
            number(self.homeostat),
            self.local_share
                .map_or_else(|| "-".into(), |s| format!("{:.0} %", s * 100.0)),
            number(self.by_hand),
            number(self.left_alone),
            self.published.into(),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use homeostat_simulator::noise::NoiseSpec;

    #[test]
    fn tolerances_hold_what_they_say() {
        assert!(Within(2.0).met(10.0, 11.9) && !Within(2.0).met(10.0, 12.1));
        assert!(Share(0.05).met(-100.0, -104.0) && !Share(0.05).met(-100.0, -106.0));
        assert!(AtMost.met(60.0, 59.0) && !AtMost.met(60.0, 61.0));
        assert!(AtLeast.met(-2.0, -1.0) && !AtLeast.met(-2.0, -3.0));
        assert!(
            Until(-39.0).met(-12.0, -20.0)
                && !Until(-39.0).met(-12.0, -11.0)
                && !Until(-39.0).met(-12.0, -40.0)
        );
    }

    #[test]
    fn every_run_is_a_scenario_and_every_row_has_a_number() {
        for wanted in RUNS {
            let scenario = scenario::find(wanted.scenario).unwrap();
            assert!(!scenario.rows.is_empty(), "{}", wanted.name);
        }
        let figures = figures();
        for row in 1..=16 {
            let row = format!("P{row}");
            assert!(figures.iter().any(|f| f.row == row), "{row}");
        }
    }

    #[test]
    fn every_known_miss_is_a_number_of_the_table_and_missed_where_it_is_pinned() {
        let figures = figures();
        for m in KNOWN_MISSES {
            let figure = figures.iter().find(|f| f.row == m.row && f.what == m.what);
            let figure = figure.unwrap_or_else(|| panic!("{} {}", m.row, m.what));
            assert!(!m.reason.is_empty(), "{} {}", m.row, m.what);
            assert!(
                !figure.tolerance.met(figure.published, m.pinned),
                "{} {}: pinned at {} it would be met",
                m.row,
                m.what,
                m.pinned
            );
        }
    }

    fn a_figure(tolerance: Tolerance) -> Figure {
        Figure {
            tolerance,
            ..figure("P0", "test", "%", 10.0, Within(1.0), Predicted, |_| None)
        }
    }

    #[test]
    fn a_number_is_judged_by_its_median_and_shows_its_range() {
        let f = a_figure(Within(1.0));
        let of = |values: &[f64]| Reproduced::of(&f, values.iter().copied().map(Some).collect());
        let five = of(&[12.0, 10.5, 9.5, 10.2, 30.0]);
        assert_eq!(
            (five.median, five.lowest, five.highest),
            (Some(10.5), Some(9.5), Some(30.0))
        );
        assert!(five.met && five.seeds_met == 3);
        assert_eq!(five.range("%"), "9.50 to 30.00");
        assert_eq!(of(&[10.5, 12.5]).median, Some(11.5));
        assert!(!of(&[10.5, 12.5]).met);
        assert_eq!(of(&[10.001, 10.002]).range("%"), "");
        // What was never reached is later than any time.
        let never = Reproduced::of(&a_figure(AtMost), vec![None, Some(9.0), Some(8.0)]);
        assert!(never.met && never.seeds_met == 2 && never.highest.is_none());
        let never = Reproduced::of(&a_figure(AtMost), vec![None, Some(9.0), None]);
        assert!(!never.met && never.median.is_none() && never.lowest == Some(9.0));
        assert!(!Reproduced::of(&f, Vec::new()).met);
    }

    #[test]
    fn a_missed_number_that_gets_worse_is_found() {
        let f = a_figure(Within(1.0));
        // Pinned three points below: one more tolerance is allowed, and any way nearer.
        for (value, worse) in [
            (7.0, false),
            (6.1, false),
            (5.9, true),
            (9.9, false),
            (13.9, false),
            (14.1, true),
        ] {
            assert_eq!(f.worse(7.0, Some(value)), worse, "{value}");
        }
        assert!(f.worse(7.0, None));
        let goal = a_figure(AtMost);
        assert!(
            !goal.worse(210.0, Some(230.0))
                && goal.worse(210.0, Some(232.0))
                && !goal.worse(210.0, Some(5.0))
        );
        let goal = a_figure(AtLeast);
        assert!(
            !goal.worse(-5.0, Some(-5.4)) && goal.worse(-5.0, Some(-5.6)) && !goal.worse(-5.0, Some(50.0))
        );
        let share = a_figure(Share(0.05));
        assert!(!share.worse(9.0, Some(8.6)) && share.worse(9.0, Some(8.4)));
    }

    #[test]
    fn rough_signals_change_what_is_seen_and_nothing_else() {
        let plain = scenario::find("p1").unwrap();
        let mut rough = plain.clone();
        rough.roughen();
        assert_eq!(rough.programs[0].noise, NoiseSpec::ROUGH);
        assert_eq!(rough.programs[0].arrival_noise, NoiseSpec::ROUGH, "an open load");
        assert!(rough.surroundings.counter_bias > 0.0);
        assert!(rough.programs[0].meters[0].cv > plain.programs[0].meters[0].cv);
        rough.surroundings = plain.surroundings.clone();
        rough.programs.clone_from(&plain.programs);
        assert_eq!(rough, plain);
        assert!(NoiseSpec::ROUGH.complaints().is_empty());
        let mut closed = scenario::find("p8").unwrap();
        closed.roughen();
        assert_eq!(closed.programs[0].arrival_noise, NoiseSpec::QUIET);
    }

    #[test]
    fn published_rows_that_were_met_stay_met() {
        let options = Options {
            seeds: 1,
            rough_seeds: 0,
            threads: 2,
        };
        let published = run(&options, &|_, _| true).unwrap();
        eprintln!("{}", published.text());
        let mut wrong: Vec<String> = published
            .unexpected()
            .iter()
            .map(|e| format!("{}: {:?} of {}", e.name(), e.reproduced, e.published))
            .collect();
        // A known miss that is met now leaves the list.
        wrong.extend(
            published
                .entries
                .iter()
                .filter(|e| e.met && e.known_miss)
                .map(|e| {
                    format!(
                        "{}: {:?} is met: take it off KNOWN_MISSES",
                        e.name(),
                        e.reproduced
                    )
                }),
        );
        assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    }
}
