//! The published table: every row S of the published results, reproduced by homeostat's own decisions on a simulated
//! machine, beside what was published, with the deviation, the tolerance and the verdict.
//!
//! Every gain is that of a run in which the engine decided; the optimised state is never switched on by hand (the runs
//! "by hand" of P7, P14 and P15 are themselves published rows). homeostat's own cost is part of the machine's load. Rows that
//! are missed are shown as misses with the reason. P18 is a table of another report; it belongs to `homeostat compare`.
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

/// All kinds, in the order in which they are counted on the page.
const KINDS: [Kind; 6] = [
    Kind::Predicted,
    Kind::Tuned,
    Kind::PartlyFitted,
    Kind::Fitted,
    Kind::Input,
    Kind::ByConstruction,
];

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
    /// What the run gave; `None` when it gave nothing to measure.
    pub reproduced: Option<f64>,
    /// Reproduced less published, in the unit.
    pub deviation: Option<f64>,
    /// How far it may be off.
    pub tolerance: Tolerance,
    /// Whether it is within the tolerance.
    pub met: bool,
    /// Why not, where that is understood.
    pub reason: Option<String>,
    /// Whether it is on the list of known misses.
    pub known_miss: bool,
    /// Fitted, partly fitted or predicted.
    pub kind: Kind,
    /// Deviation with the row left out of the fit.
    pub left_out: &'static str,
}

/// The whole table.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Published {
    /// The lines, in the order of the rows.
    pub entries: Vec<Entry>,
    /// Two hours of P15 beside the published timeline.
    pub timeline: Vec<TimelinePoint>,
    /// What was decided in each run: name of the run, and the lines that tell of trials and verdicts.
    pub decisions: BTreeMap<String, Vec<String>>,
    /// Simulated seconds of all runs together.
    pub simulated_s: f64,
}

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

/// Numbers that are missed, and why: row, number, reason. A number that is missed and not here fails the test.
const KNOWN_MISSES: &[(&str, &str, &str)] = &[
    (
        "P2",
        "use of hardware threads after, largest deviation",
        "the first thread of a core is charged .43 instead of .41: the load that the published table \
         still shows on the second domain runs on the first here",
    ),
    (
        "P3",
        "prefetch in the memory traffic, with homeostat",
        "homeostat predicts a loss of 0.3 % from switching the prefetcher off on a machine whose links \
         are 29 % full, and does not try; the original switched it off to save traffic",
    ),
    (
        "P5",
        "throughput, 32 cores",
        "late in the run trials are no clean measure of one JVM: the gain is common to all, and once most are \
         placed the rest gain nothing by themselves and are not accepted; not understood in full: the number moves \
         by twenty points with changes of the engine",
    ),
    (
        "P6",
        "throughput, 8 cores",
        "two of four instances are placed and moved; the scheduler then keeps the other two apart by \
         itself, so that their placement gains nothing by itself, is rejected, and their memory gets no \
         home",
    ),
    ("P6", "throughput, 16 cores", "as on 8 cores"),
    (
        "P7",
        "throughput, bound by hand",
        "the simulated world runs threads as means over time; that threads bound to one core collide by \
         chance (`scheduler::collisions`) is not applied in it",
    ),
    (
        "P10",
        "throughput, affinity",
        "the demand of 29 cores does not fit one book, so its memory cannot be brought to its threads; \
         only threads that share data are grouped by board (the 13 % of the fit assume 97 % of the \
         accesses in one book)",
    ),
    (
        "P10",
        "throughput, large pages and prefetch",
        "the links of the book that holds all the memory are 98 % full with prefetch on, fuller than in the fit \
         (which moves 97 % of the accesses there first), so switching it off gains more than published",
    ),
    ("P10", "throughput, all", "see affinity"),
    (
        "P11",
        "throughput at 90 % busy",
        "proven +3.5 % in the trial (the model: 3.8 %); the guard's probes, minutes each for 90 GB, take \
         the rest",
    ),
    (
        "P13",
        "throughput, three tiles",
        "all twelve programs are placed and moved after three and a half hours, each by a trial of its \
         own; confined to a chip they run on fewer, fuller cores than in the fit, so the capacity stays \
         below three tiles",
    ),
    (
        "P15",
        "goal: threads placed after",
        "two placements are proven one after the other; the second takes six minutes, because the first \
         has already moved most of its threads",
    ),
    (
        "P15",
        "goal: memory local after",
        "two placements and two moves are four trials in a row",
    ),
    (
        "P15",
        "goal: two hours, against placement by hand",
        "the time of the four trials (the original, which proves nothing, loses 8 %)",
    ),
];

impl Figure {
    fn known_miss(&self) -> Option<&'static str> {
        KNOWN_MISSES
            .iter()
            .find(|(row, what, _)| *row == self.row && *what == self.what)
            .map(|(_, _, reason)| *reason)
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
            Predicted,
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
            Predicted,
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
            Predicted,
            |r| r.held_from("p15", 0.65, |p| p.local_share),
        )
        .from("issue 4"),
        figure(
            "P15",
            "goal: memory local after",
            "min",
            10.0,
            AtMost,
            Predicted,
            |r| r.held_from("p15", 0.97, |p| p.local_share).map(|s| s / 60.0),
        )
        .from("issue 4"),
        figure(
            "P15",
            "goal: two hours, against placement by hand",
            "%",
            -2.0,
            AtLeast,
            Predicted,
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

/// Makes all runs, `threads` at a time, and holds them against what was published. `go_on` sees the progress and may
/// break it off by answering false.
///
/// # Errors
/// [`PublishedError`].
pub fn run(threads: usize, go_on: &(dyn Fn(&str, f64) -> bool + Sync)) -> Result<Published, PublishedError> {
    let results = results(threads, go_on)?;
    Ok(table_of(&results))
}

fn results(threads: usize, go_on: &(dyn Fn(&str, f64) -> bool + Sync)) -> Result<Results, PublishedError> {
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
                    let outcome = outcome(wanted, &|done| {
                        go_on(wanted.name, done) && !stop.load(Ordering::Relaxed)
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

fn outcome(wanted: &Wanted, go_on: &dyn Fn(f64) -> bool) -> Result<Outcome, PublishedError> {
    let mut scenario: Scenario = scenario::find(wanted.scenario)?;
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

fn table_of(results: &Results) -> Published {
    let entries = figures()
        .into_iter()
        .map(|f| {
            let reproduced = (f.of)(results).filter(|v| v.is_finite());
            let met = reproduced.is_some_and(|v| f.tolerance.met(f.published, v));
            let reason = if met {
                None
            } else {
                Some(f.known_miss().map_or_else(
                    || match reproduced {
                        None => "the run gave nothing to measure".to_owned(),
                        Some(_) => "not understood yet".to_owned(),
                    },
                    str::to_owned,
                ))
            };
            Entry {
                row: f.row,
                source: f.source,
                what: f.what,
                unit: f.unit,
                published: f.published,
                reproduced,
                deviation: reproduced.map(|v| v - f.published),
                tolerance: f.tolerance,
                met,
                reason,
                known_miss: f.known_miss().is_some(),
                kind: f.kind,
                left_out: f.left_out,
            }
        })
        .collect();
    let decisions = results
        .0
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
        .collect();
    Published {
        entries,
        timeline: timeline(results).unwrap_or_default(),
        decisions,
        simulated_s: results
            .0
            .values()
            .flat_map(|o| &o.tracks)
            .map(|t| t.length_s)
            .sum(),
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

    /// Lines that are missed and not on the list of known misses.
    pub fn unexpected(&self) -> Vec<&Entry> {
        self.entries.iter().filter(|e| !e.met && !e.known_miss).collect()
    }

    /// The table for a terminal.
    pub fn text(&self) -> String {
        let rows: Vec<Vec<String>> = self.entries.iter().map(Entry::cells).collect();
        let mut out = table(&HEAD, &rows);
        out.push('\n');
        for e in &self.entries {
            if let Some(reason) = &e.reason {
                let _ = writeln!(out, "  missed: {} {}: {reason}", e.row, e.what);
            }
        }
        let (met, all) = self.met();
        let _ = writeln!(
            out,
            "\n  {met} of {all} numbers met. P17 and P19 are measured on real machines; P18 is held against `homeostat compare`.\n"
        );
        out.push_str("  P15, transactions per second of both programs\n");
        let rows: Vec<Vec<String>> = self.timeline.iter().map(TimelinePoint::cells).collect();
        out.push_str(&table(&TIMELINE_HEAD, &rows));
        out
    }

    /// The page of the documentation.
    pub fn markdown(&self) -> String {
        let mut out = String::from(PAGE_HEAD);
        out.push_str(&markdown_table(
            &HEAD,
            &self.entries.iter().map(Entry::cells).collect::<Vec<_>>(),
        ));
        let (met, all) = self.met();
        out.push_str("\n| kind | met | of |\n|---|---|---|\n");
        for kind in KINDS {
            let of: Vec<_> = self.entries.iter().filter(|e| e.kind == kind).collect();
            let met = of.iter().filter(|e| e.met).count();
            let _ = writeln!(out, "| {kind} | {met} | {} |", of.len());
        }
        let _ = write!(
            out,
            "\n{met} of {all} numbers met, {:.0} simulated hours. P17 and P19 are measured on real machines \
             (`results.md`); P18 is the table that `homeostat compare` is held against.\n\n## Misses\n\n",
            self.simulated_s / 3600.0
        );
        for e in &self.entries {
            if let Some(reason) = &e.reason {
                let _ = writeln!(out, "* **{}, {}**: {reason}.", e.row, e.what);
            }
        }
        out.push_str("\n## Two hours of P15\n\nTransactions per second of both programs, means of the minute that ends there.\n\n");
        out.push_str(&markdown_table(
            &TIMELINE_HEAD,
            &self.timeline.iter().map(TimelinePoint::cells).collect::<Vec<_>>(),
        ));
        out.push_str("\n## What was decided in each run\n\n");
        for (name, lines) in &self.decisions {
            let _ = write!(out, "### {name}\n\n```text\n");
            for line in lines.iter().take(DECISIONS_SHOWN_MAX) {
                let _ = writeln!(out, "{line}");
            }
            if lines.len() > DECISIONS_SHOWN_MAX {
                let _ = writeln!(out, "… and {} further lines", lines.len() - DECISIONS_SHOWN_MAX);
            }
            out.push_str("```\n\n");
        }
        out
    }
}

/// Decisions of one run on the page.
const DECISIONS_SHOWN_MAX: usize = 12;

const PAGE_HEAD: &str = "\
# The published results, reproduced

Made by `homeostat simulate --published`; a test fails when a number that was met is missed, and when a verdict here is not
in step (`HOMEOSTAT_UPDATE_DOCS=1 cargo test -p homeostat-laboratory published`).

Every gain is that of a run in which homeostat's engine decided: it proposed, tried, proved and kept, with its default \
settings (rows that name one strategy switch the others off). No optimised state is set in the arm of homeostat. Gains are \
those of the end of a run, most often its last quarter, against the same seed left alone; the trials before that cost work, \
which `homeostat simulate NAME` shows. One seed per run: rows of many small programs (P5, P6, P13) vary by several points \
from seed to seed.

*Kind* says how much a met number means: *fitted* and *partly fitted* agree because a constant was chosen for them; *input* and \
*by construction* check the books of the machine; *tuned* follows from constants fitted elsewhere, but the engine was \
changed after the row was seen to be missed (below); *predicted* is left. *Left out* is the deviation of the model's answer \
when the row was left out of the fit, where that was computed: several rows fail that test, so they are not evidence for \
the model.

What these rows do not show: that a Linux machine gets these gains. The sensors and effectors for placement, page moves and \
prefetch exist on the simulated machine only; so does the ability to split large pages that several processes map (P11, P12) \
and to group the threads of a program by board (the affinity of P8, whose size is a constant of the workload). The machine's \
counters have 2 % noise and no bias, programs count their work with 0.2 % noise, the load is steady with 1.5 % noise and no \
steps: kinder than most machines. Copy traffic of moves is not charged to the links.

## Record of choices

Changed after misses were seen, most recent last: P5, resident memory of a JVM 7.5 to 6 GiB (a full node leaves no room for a \
move); P7, threads start at home; large_pages tries a very large pool as a whole (`trial_most_mib` 192 GiB, `trial_gain`, \
`part_gain_min` 2 to 1.5 %) and the longest washout went from 60 to 180 s, since the page tables of a pool save most when the \
last of them fit the cache: that turned P8, P9, P11 at 60 % and P12 from missed to met; moves of up to 20 s (5 before) are \
switched back and forth, which helped P15; probes of a guard are as rare as they are dear.

P16 is a placement that the firmware made: there homeostat decides nothing, and the row checks the machine only; so do the \
lines \"by hand\". The goals of P15 are those of this project, not of the source.

";

const HEAD: [&str; 11] = [
    "row",
    "number",
    "unit",
    "published",
    "reproduced",
    "deviation",
    "tolerance",
    "verdict",
    "kind",
    "left out",
    "source",
];

const TIMELINE_HEAD: [&str; 6] = [
    "minute",
    "homeostat",
    "local",
    "by hand",
    "left alone",
    "published (ASO)",
];

impl Entry {
    fn cells(&self) -> Vec<String> {
        vec![
            self.row.into(),
            self.what.into(),
            self.unit.into(),
            number(self.published),
            value(self.reproduced, self.unit, false),
            value(self.deviation, self.unit, true),
            self.tolerance.words(self.unit),
            if self.met { "met".into() } else { "MISSED".into() },
            self.kind.to_string(),
            self.left_out.into(),
            self.source.into(),
        ]
    }
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

fn markdown_table(head: &[&str], rows: &[Vec<String>]) -> String {
    let mut out = format!("| {} |\n|{}\n", head.join(" | "), "---|".repeat(head.len()));
    for row in rows {
        let _ = writeln!(out, "| {} |", row.join(" | "));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

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
    fn every_known_miss_is_a_number_of_the_table() {
        let figures = figures();
        for (row, what, reason) in KNOWN_MISSES {
            assert!(
                figures.iter().any(|f| f.row == *row && f.what == *what),
                "{row} {what}"
            );
            assert!(!reason.is_empty(), "{row} {what}: {reason}");
        }
    }

    #[test]
    fn published_rows_that_were_met_stay_met() {
        let published = run(2, &|_, _| true).unwrap();
        eprintln!("{}", published.text());
        let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/published.md");
        if std::env::var_os("HOMEOSTAT_UPDATE_DOCS").is_some() {
            std::fs::write(page, published.markdown()).unwrap();
        }
        let missed: Vec<String> = published
            .unexpected()
            .iter()
            .map(|e| {
                format!(
                    "{} {}: {:?} instead of {}",
                    e.row, e.what, e.reproduced, e.published
                )
            })
            .collect();
        assert!(missed.is_empty(), "{}", missed.join("\n"));
        // The decisions on the page change with every change of the engine; what is met and missed must not.
        let written = std::fs::read_to_string(page).unwrap();
        for e in &published.entries {
            let line = written
                .lines()
                .find(|l| l.starts_with(&format!("| {} | {} |", e.row, e.what)))
                .unwrap_or_default();
            assert_eq!(
                line.contains("| met |"),
                e.met,
                "{} {}: docs/published.md is not in step: run this test with HOMEOSTAT_UPDATE_DOCS=1: {line}",
                e.row,
                e.what
            );
        }
    }
}
