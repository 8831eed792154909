//! Which of the counted points can be trusted to count useful work, or that none can.
//!
//! All that is known of a point is how often it ran in some windows of time: some in which the program was left alone,
//! some in which probes on busy places made it a little slower (*burdened*). Points that keep a constant ratio to each
//! other count the same work; they form a cluster. The rules then are, in this order:
//!
//! 1. What waits instead of working, runs too rarely to be counted, does not follow the program's CPU time, or runs
//!    *more* for each CPU second while the program is slowed, is no measure of work.
//! 2. A cluster that keeps a constant ratio to something counted from outside (data segments received, read and write
//!    calls, voluntary switches, bytes), though the program knows nothing of the one and we nothing of the other, is
//!    the work.
//! 3. Clusters whose ratio does not move when the program is slowed are equal for our purpose: what one of them says
//!    about a change the other says, too. Among those that are not, the one that runs through the most functions is
//!    the work, or the steadiest, if it is so by far.
//! 4. Else none: a wrong meter is worse than none.
//!
//! Pure: the same counts give the same choice.

mod series;

use crate::HIT_COST;
use crate::code::Kind;
use serde::{Deserialize, Serialize};
use series::{Series, moments};
use std::collections::BTreeSet;

/// Points of one cluster keep their ratio to this (coefficient of variation over the windows), beside what rounding to
/// whole counts does.
const SAME_WORK: f64 = 0.02;
/// … and to a signal from outside to this.
const AGREES: f64 = 0.03;
/// A cluster is of interest when one of its points was on the stack in this share of the samples.
const COVERAGE_MIN: f64 = 0.15;
/// Work per CPU second may vary by this from window to window, beside rounding.
const UNSTEADY: f64 = 0.5;
/// Fewest executions in the shortest window: rounding to whole counts is then 2 %.
const COUNTS_MIN: f64 = 25.0;
/// Fewest windows.
const WINDOWS_MIN: usize = 6;
/// Windows that are counted at first …
pub const WINDOWS_FIRST: usize = 16;
/// … and at most, for what the first have left open.
pub const WINDOWS_MAX: usize = 48;
/// Standard errors by which something has to be told apart, and where it is asked again after more windows: whoever asks again and again is
/// told so at last.
const CERTAIN: f64 = 1.0;
const CERTAIN_AGAIN: f64 = 1.5;
/// A signal counts when it fires this often a second.
const SIGNAL_RATE_MIN: f64 = 20.0;
/// The program was slowed enough to learn from it when it lost this share of its CPU time.
const BURDEN_MIN: f64 = 0.02;
/// Two clusters say the same about a change when their ratio moves by less than this share of how much the program was
/// slowed.
const SAME_EFFECT: f64 = 0.2;
/// … less than this, where they are in one loop and chance explains how their ratio varies …
const SAME_EFFECT_BY_CHANCE: f64 = 0.5;
/// … at this level (one side, .05: the normal quantile).
const BY_CHANCE: f64 = 1.645;
/// A cluster is larger than another, or steadier, when it is so by this factor.
const BY_FAR: f64 = 1.6;
/// What stands only in the function of an interpreter falls with the work by more than this share of how much the program was slowed.
const FALLS: f64 = -0.5;
/// … and what runs seldom enough for a clock by more than this.
const FALLS_AT_ALL: f64 = -0.2;
/// … or varies by more than this for each second: a clock does not.
const TICKS: f64 = 0.1;
/// A program that spends more than this share of its time in loops that wait cannot be judged by CPU time.
const WAITING_MAX: f64 = 0.4;
/// … and more of its waits than this are for several connections at once.
const GATHERING_MAX: f64 = 0.05;
/// Then a point that counts requests runs so often at least for each count of a signal (3 % are for what is on its way).
const ONCE_MIN: f64 = 0.97;
/// Clocks of programs tick up to this often a second.
const CLOCK_RATE: f64 = 150.0;
/// Who counts charges a hit this many times what it was found to cost, at most.
const CHARGED_AT_MOST: f64 = 3.5;
/// Rates that are neither coarse nor dear (per second).
const RATE_GOOD: f64 = 100.0;

/// A point and what it counted.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Point {
    /// Which function it is in: equal numbers, same function.
    pub function: u64,
    /// What it counts.
    pub kind: PointKind,
    /// Where the innermost loop around it in its function begins, if there is one.
    #[serde(default)]
    pub innermost_loop: Option<u64>,
    /// Share of the samples of the stack in which it was seen, 0..1.
    pub coverage: f64,
    /// The same of the function of an interpreter, in whose loop it is taken to be; 0: it is in none.
    #[serde(default)]
    pub of_function: f64,
    /// It stands in a loop that seems to wait.
    pub waits: bool,
    /// Executions in each window.
    pub counts: Vec<u64>,
}

impl Point {
    /// Share of the samples in which it was seen, or what it is in.
    fn around(&self) -> f64 {
        self.coverage.max(self.of_function)
    }
}

/// As [`Kind`], for files.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PointKind {
    /// Entries of a function.
    Entry,
    /// Calls from one place.
    Call,
    /// Turns of a loop.
    Loop,
    /// Passages of a branch.
    Branch,
}

impl From<Kind> for PointKind {
    fn from(kind: Kind) -> Self {
        match kind {
            Kind::Entry => Self::Entry,
            Kind::Call => Self::Call,
            Kind::Loop => Self::Loop,
            Kind::Branch => Self::Branch,
        }
    }
}

/// Something the kernel counted in the same windows. Nearer to requests first.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Signal {
    /// What it is, for people: `TCP segments received`.
    pub name: String,
    /// It may be about waiting as well as about work (context switches): it decides only between clusters that are
    /// otherwise alike.
    pub weak: bool,
    /// Its count in each window.
    pub counts: Vec<f64>,
}

/// What was counted.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Observation {
    /// Length of each window in seconds.
    pub seconds: Vec<f64>,
    /// CPU seconds that the program used in each.
    pub cpu: Vec<f64>,
    /// Share of its CPU time that probes took in each, beside those of the points themselves.
    pub burden: Vec<f64>,
    /// Share of the samples in which the program was in a loop that waits, 0..1.
    pub waiting: f64,
    /// Of the moments at which its busiest threads were seen to wait in the kernel the share in which they waited for several
    /// connections at once (`epoll_wait`, `poll`, `select` and their like), 0..1. 0 where they were never seen to wait.
    #[serde(default)]
    pub gathering: f64,
    /// The points.
    pub points: Vec<Point>,
    /// The signals.
    pub signals: Vec<Signal>,
}

/// Limits on what may be chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Limits {
    /// Most of the program's CPU time that counting may cost, as a share.
    pub cost: f64,
    /// Fewest executions a second.
    pub rate_min: f64,
    /// Cost of a hit in seconds of the program's CPU time.
    pub hit_cost: f64,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            cost: 0.005,
            rate_min: 10.0,
            hit_cost: HIT_COST,
        }
    }
}

/// A point that counts the work.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Chosen {
    /// Its index.
    pub point: usize,
    /// Another of its cluster, in a different function where there is one: when their ratio moves, one of them has
    /// changed its meaning.
    pub witness: Option<usize>,
    /// All points of the cluster, by index.
    pub cluster: Vec<usize>,
    /// Executions per second.
    pub rate: f64,
    /// Coefficient of variation of executions per CPU second over the windows in which the program was left alone.
    pub noise: f64,
    /// Share of the time in which it may be counted without costing more than the limit.
    pub duty: f64,
    /// Why it can be trusted.
    pub reason: String,
}

/// The answer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Choice {
    /// This one.
    Chosen(Chosen),
    /// None, and why.
    Abstained(String),
    /// None by so many windows, and why; more of them, [`WINDOWS_MAX`] at most, may tell.
    Undecided(String),
}

/// What windows tell of a question.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Told {
    Yes,
    No,
    /// More of them may.
    NotYet,
}

/// Why a cluster is not the work.
struct Refused {
    why: String,
    /// It was not told apart by so many windows, and may be by more.
    open: bool,
}

impl From<String> for Refused {
    fn from(why: String) -> Self {
        Self { why, open: false }
    }
}

/// Points that count the same work.
struct Cluster {
    members: Vec<usize>,
    functions: usize,
    coverage: f64,
    /// It is of interest only for what stands in the function of an interpreter.
    by_function: bool,
    /// Sum over the members, each scaled to the same weight.
    series: Series,
    /// Variation of work per CPU second within windows of one kind.
    noise: f64,
    /// Variation of what was counted in a second, whoever had the CPU meanwhile, in those in which the program was left alone.
    by_the_clock: f64,
    /// How much work per CPU second moved when the program was slowed, and the standard error of that (logarithms).
    response: Option<(f64, f64)>,
    /// The nearest signal that keeps a constant ratio to it: its index and how constant.
    agrees: Option<(usize, f64)>,
    /// Whether one that is weak does.
    agrees_weakly: bool,
}

struct Judge<'a> {
    seen: &'a Observation,
    limits: Limits,
    /// Mean share of CPU time lost in the windows in which the program was slowed.
    burden: f64,
}

/// Chooses.
pub fn choose(seen: &Observation, limits: Limits) -> Choice {
    let windows = seen.seconds.len();
    let whole = seen.cpu.len() == windows
        && seen.burden.len() == windows
        && seen.points.iter().all(|p| p.counts.len() == windows)
        && seen.signals.iter().all(|s| s.counts.len() == windows);
    if windows < WINDOWS_MIN || !whole {
        return Choice::Abstained(format!(
            "only {windows} windows were counted (at least {WINDOWS_MIN} needed)"
        ));
    }
    if seen.cpu.iter().any(|c| *c <= 0.0) || seen.seconds.iter().any(|s| *s <= 0.0) {
        return Choice::Abstained(
            "the program rested in between; a point can be judged only at work".to_owned(),
        );
    }
    if seen.waiting > WAITING_MAX {
        return Choice::Abstained(format!(
            "it spends {:.0} % of its time in loops that only wait (limit {:.0} %), so its CPU time is no measure of \
             effort",
            seen.waiting * 100.0,
            WAITING_MAX * 100.0
        ));
    }
    let burdened: Vec<f64> = seen.burden.iter().copied().filter(|b| *b > 0.0).collect();
    let judge = Judge {
        seen,
        limits,
        burden: moments(&burdened).0,
    };
    judge.choose()
}

impl Judge<'_> {
    fn counts(&self, point: usize) -> Series {
        let counts = self.seen.points.get(point).map(|p| p.counts.as_slice());
        Series(counts.unwrap_or_default().iter().map(|c| *c as f64).collect())
    }

    fn seconds(&self) -> f64 {
        self.seen.seconds.iter().sum()
    }

    fn rate(&self, point: usize) -> f64 {
        self.counts(point).0.iter().sum::<f64>() / self.seconds()
    }

    /// Share of the program's CPU time that counting a point costs.
    fn cost(&self, point: usize) -> f64 {
        self.counts(point).0.iter().sum::<f64>() * self.limits.hit_cost / self.seen.cpu.iter().sum::<f64>()
    }

    fn choose(&self) -> Choice {
        // What runs a few times in a window keeps any ratio, within rounding.
        let shortest = self.seen.seconds.iter().copied().fold(f64::INFINITY, f64::min);
        let least = self.limits.rate_min.max(COUNTS_MIN / shortest);
        let frequent: Vec<usize> = (0..self.seen.points.len())
            .filter(|p| self.rate(*p) >= least)
            .collect();
        if frequent.is_empty() {
            return Choice::Abstained(format!(
                "none of {} places that were seen at work runs at least {least:.0} times a second and can be counted",
                self.seen.points.len(),
            ));
        }
        let clusters = self.clusters(frequent);
        let mut eligible = Vec::new();
        let mut refusals = Vec::new();
        for cluster in clusters {
            match self.refusal(&cluster) {
                None => eligible.push(cluster),
                Some(refused) => refusals.push((cluster.members.len(), refused)),
            }
        }
        if eligible.is_empty() {
            refusals.sort_by(|a, b| b.0.cmp(&a.0).then_with(|| a.1.why.cmp(&b.1.why)));
            let list: Vec<String> = refusals
                .iter()
                .take(3)
                .map(|(size, refused)| format!("{} {}", points(*size), refused.why))
                .collect();
            let none = format!("no cluster of points can be trusted: {}", list.join("; "));
            // A signal from outside is asked of such a program in the end, and was not seen to agree.
            return if refusals.iter().any(|r| r.1.open) && !self.gathers() {
                Choice::Undecided(none)
            } else {
                Choice::Abstained(none)
            };
        }
        self.among(eligible)
    }

    /// Groups the points that keep their ratios, the most telling first.
    fn clusters(&self, mut points: Vec<usize>) -> Vec<Cluster> {
        // The leader of a cluster is what the others are compared with: one with many counts, of much of the stack.
        points.sort_by(|a, b| {
            let weight = |p: &usize| {
                let coverage = self.seen.points.get(*p).map_or(0.0, Point::around);
                (coverage.min(1.0) * 10.0).floor() + self.counts(*p).mean().max(1.0).log10().min(3.0)
            };
            weight(b).total_cmp(&weight(a)).then(a.cmp(b))
        });
        let mut groups: Vec<(Series, Vec<usize>)> = Vec::new();
        for point in points {
            let counts = self.counts(point);
            let group = groups
                .iter_mut()
                .find(|(leader, _)| counts.variation(leader) <= SAME_WORK);
            match group {
                Some((_, members)) => members.push(point),
                None => groups.push((counts, vec![point])),
            }
        }
        groups
            .into_iter()
            .map(|(_, members)| self.cluster(members))
            .collect()
    }

    fn cluster(&self, mut members: Vec<usize>) -> Cluster {
        members.sort_unstable();
        let of = |m: &usize| self.seen.points.get(*m);
        let functions: BTreeSet<u64> = members.iter().filter_map(of).map(|p| p.function).collect();
        let most = |share: fn(&Point) -> f64| {
            let working = members.iter().filter_map(of).filter(|p| !p.waits);
            working.map(share).fold(0.0, f64::max)
        };
        let (coverage, own) = (most(Point::around), most(|p| p.coverage));
        // The member with the most counts says it with the least rounding.
        let series = members
            .iter()
            .map(|m| self.counts(*m))
            .max_by(|a, b| a.mean().total_cmp(&b.mean()))
            .unwrap_or(Series(Vec::new()));
        let work: Option<Vec<f64>> = series.ratios(&self.seen.cpu);
        let (noise, response) = match &work {
            Some(work) => self.steadiness(work, series.rounding()),
            None => (f64::INFINITY, None),
        };
        // Of the first windows only: it is no question of how many there are.
        let by_the_clock = series.ratios(&self.seen.seconds).map_or(f64::INFINITY, |rates| {
            let first = rates.get(..WINDOWS_FIRST).unwrap_or(&rates);
            self.steadiness(first, series.rounding()).0
        });
        let agreement = |(i, signal): (usize, &Signal)| {
            let rate = signal.counts.iter().sum::<f64>() / self.seconds();
            if rate < SIGNAL_RATE_MIN {
                return None;
            }
            let variation = series.variation(&Series(signal.counts.clone()));
            (variation <= AGREES).then_some((i, variation))
        };
        let signals = || self.seen.signals.iter().enumerate();
        let agrees = signals().filter(|(_, s)| !s.weak).find_map(agreement);
        let agrees_weakly = signals().filter(|(_, s)| s.weak).any(|s| agreement(s).is_some());
        Cluster {
            members,
            functions: functions.len(),
            coverage,
            by_function: coverage >= COVERAGE_MIN && own < COVERAGE_MIN,
            series,
            noise,
            by_the_clock,
            response,
            agrees,
            agrees_weakly,
        }
    }

    /// Splits logarithms of something per window into those left alone and those burdened.
    fn split(&self, values: &[f64]) -> (Vec<f64>, Vec<f64>) {
        let pairs = values.iter().zip(&self.seen.burden);
        let alone = pairs
            .clone()
            .filter(|(_, b)| **b <= 0.0)
            .map(|(v, _)| *v)
            .collect();
        let burdened = pairs.filter(|(_, b)| **b > 0.0).map(|(v, _)| *v).collect();
        (alone, burdened)
    }

    /// Variation within the windows of one kind, and the move between the kinds with its standard error.
    fn steadiness(&self, work: &[f64], rounding: f64) -> (f64, Option<(f64, f64)>) {
        let (alone, burdened) = self.split(work);
        let (mean, spread) = moments(&alone);
        let noise = (spread * spread - rounding * rounding).max(0.0).sqrt();
        if burdened.len() < 2 || self.burden < BURDEN_MIN {
            return (noise, None);
        }
        let (slowed, spread_slowed) = moments(&burdened);
        let error = (spread * spread / alone.len() as f64
            + spread_slowed * spread_slowed / burdened.len() as f64)
            .sqrt();
        (noise, Some((slowed - mean, error)))
    }

    /// So many standard errors have to be between what is told apart.
    fn certain(&self) -> f64 {
        if self.seen.seconds.len() > WINDOWS_FIRST {
            CERTAIN_AGAIN
        } else {
            CERTAIN
        }
    }

    /// Whether that is less than `room` once as many windows were counted as may be.
    fn may_be_told(&self, error: f64, room: f64) -> bool {
        let windows = self.seen.seconds.len();
        windows < WINDOWS_MAX && CERTAIN_AGAIN * error * (windows as f64 / WINDOWS_MAX as f64).sqrt() < room
    }

    /// Whether it may fall as the work does, and yet be seen to fall by more than such a share of that.
    fn may_fall(&self, cluster: &Cluster, share: f64) -> bool {
        cluster.response.is_some_and(|(moved, error)| {
            moved - 2.0 * error < -self.burden && self.may_be_told(error, (1.0 + share) * self.burden)
        })
    }

    /// Why a cluster cannot be the work.
    fn refusal(&self, cluster: &Cluster) -> Option<Refused> {
        let waits = |m: &usize| self.seen.points.get(*m).is_none_or(|p| p.waits);
        if cluster.members.iter().all(waits) {
            return Some("in loops that only wait".to_owned().into());
        }
        if !cluster.noise.is_finite() {
            return Some(
                "silent for a while though the program was at work"
                    .to_owned()
                    .into(),
            );
        }
        if cluster.noise > UNSTEADY {
            return Some(
                format!(
                    "not steady (executions per CPU second vary by {:.0} %)",
                    cluster.noise * 100.0
                )
                .into(),
            );
        }
        if let Some((moved, error)) = cluster.response {
            if moved > 3.0 * error && moved > 0.5 * self.burden {
                return Some(format!(
                "waiting or polling (run {:.1} % more often per CPU second while the program is slowed by {:.1} %)",
                moved * 100.0,
                self.burden * 100.0
            ).into());
            }
        }
        // What runs by a clock is steady, and so is what runs by CPU time: neither is work.
        let slow = cluster.members.iter().all(|m| self.rate(*m) < CLOCK_RATE);
        match cluster.response {
            Some((moved, error)) if moved - 2.0 * error > -0.3 * self.burden => {
                return Some(format!(
                    "running by a clock (their rate per CPU second moves by {:+.1} % while the program is slowed by {:.1} %)",
                    moved * 100.0,
                    self.burden * 100.0
                ).into());
            }
            Some((moved, error)) if moved + self.certain() * error < FALLS_AT_ALL * self.burden => {}
            _ if slow && cluster.agrees.is_none() => {
                return Some(Refused {
                    why: format!(
                        "perhaps running by a clock (less than {CLOCK_RATE:.0} times a second, and not seen to fall while the \
                         program is slowed)"
                    ),
                    open: self.may_fall(cluster, FALLS_AT_ALL)
                        && (cluster.coverage >= COVERAGE_MIN || cluster.agrees_weakly),
                });
            }
            _ => {}
        }
        if cluster.coverage < COVERAGE_MIN && cluster.agrees.is_none() && !cluster.agrees_weakly {
            return Some(
                format!(
                    "of little weight (on the stack {:.0} % of the time at most)",
                    cluster.coverage * 100.0
                )
                .into(),
            );
        }
        // In the function of an interpreter there is more than its operations: what it does when a clock has asked for it, or memory is
        // used up. What falls with the work is as good as that, and what varies runs by no clock.
        let falls = cluster
            .response
            .is_some_and(|(moved, error)| moved + self.certain() * error < FALLS * self.burden);
        if cluster.by_function && !falls && cluster.by_the_clock <= TICKS && cluster.agrees.is_none() {
            return Some(Refused {
                why: format!(
                    "in the loop of an interpreter, perhaps by a clock (they vary by {:.0} % from second to second, and were not seen to \
                     fall with the work while the program is slowed)",
                    cluster.by_the_clock * 100.0
                ),
                open: self.may_fall(cluster, FALLS),
            });
        }
        None
    }

    /// Whether two clusters say the same about a change that makes the program faster or slower.
    fn same_effect(&self, a: &Cluster, b: &Cluster) -> bool {
        let Some(ratios) = a.series.ratios(&b.series.0) else {
            return false;
        };
        let (alone, burdened) = self.split(&ratios);
        if burdened.len() < 2 || self.burden < BURDEN_MIN {
            return false;
        }
        let ((before, spread_before), (after, spread_after)) = (moments(&alone), moments(&burdened));
        let error = (spread_before * spread_before / alone.len() as f64
            + spread_after * spread_after / burdened.len() as f64)
            .sqrt();
        (after - before).abs() + self.certain() * error <= SAME_EFFECT * self.burden
    }

    /// Whether one of two clusters in one loop is what chance picks of the other's passages: a branch that is taken for some of the data and
    /// not for others. It is never hit more often, their ratio varies by no more than a coin for each passage would make it vary (with some
    /// hundred counts in a window that is several times what [`SAME_WORK`] allows), and that ratio hardly moves while the program is slowed, as
    /// it does where the one comes by time, or finds the more work the rarer it looks. (Of a loop of Node's: half of its turns, ±5 % from
    /// window to window.)
    fn part_by_chance(&self, a: &Cluster, b: &Cluster) -> Told {
        let (whole, part) = whole_and_part(a, b);
        let Some(of_whole) = self.in_the_loop_of(whole, part) else {
            return Told::No;
        };
        let windows: Vec<(f64, f64)> = (of_whole.0.into_iter())
            .zip(part.series.0.iter().copied())
            .collect();
        // At the edge of a window one of them may have been read before the other.
        let within = |(all, some): &(f64, f64)| *all > 0.0 && *some <= all + 1.0;
        if !windows.iter().all(within) {
            return Told::No;
        }
        let of_kind = |slowed: bool| {
            let pairs = windows.iter().zip(&self.seen.burden);
            let of_kind = pairs.filter(|(_, burden)| (**burden > 0.0) == slowed);
            of_kind.fold((0.0, 0.0), |sum, (w, _)| (sum.0 + w.0, sum.1 + w.1))
        };
        let (alone, slowed) = (of_kind(false), of_kind(true));
        let share = (alone.1 + slowed.1) / (alone.0 + slowed.0);
        if self.burden < BURDEN_MIN || alone.1 <= 0.0 || slowed.1 <= 0.0 || share >= 1.0 {
            return Told::No;
        }
        let squares: f64 = windows
            .iter()
            .map(|(all, some)| (some - share * all).powi(2) / (all * share * (1.0 - share)))
            .sum();
        let freedom = windows.len() as f64 - 1.0;
        if squares > chi_squared_limit(freedom) {
            return Told::No;
        }
        let moved = ((slowed.1 / slowed.0) / (alone.1 / alone.0)).ln();
        // What a coin does, or more where more was seen.
        let coin = ((1.0 - share) / share * (1.0 / alone.0 + 1.0 / slowed.0)).sqrt();
        let error = coin * (squares / freedom).sqrt().max(1.0);
        let room = SAME_EFFECT_BY_CHANCE * self.burden;
        if moved.abs() + self.certain() * error <= room {
            Told::Yes
        } else if moved.abs() <= 2.0 * error && self.may_be_told(error, room / CERTAIN_AGAIN) {
            Told::NotYet
        } else {
            Told::No
        }
    }

    /// What was counted of the whole in the innermost loop in which all places of the part are, where it was hit most often: a coin is for
    /// these passages, and not for the turns of a loop within it. `None`: they have no such loop in common.
    fn in_the_loop_of(&self, whole: &Cluster, part: &Cluster) -> Option<Series> {
        let place = |m: &usize| {
            let point = self.seen.points.get(*m)?;
            Some((point.function, point.innermost_loop?))
        };
        let the_loop = place(part.members.first()?)?;
        let is_there = |m: &&usize| place(m) == Some(the_loop);
        if !part.members.iter().all(|m| is_there(&m)) {
            return None;
        }
        let there = whole.members.iter().filter(is_there);
        there
            .map(|m| self.counts(*m))
            .max_by(|a, b| a.mean().total_cmp(&b.mean()))
    }

    /// Leaves of each cluster what runs at least once for each count of the signal that it keeps to; for programs that wait for several
    /// connections at once. As long as a turn of their loop serves as many of them turns keep to requests, and may be in one cluster with
    /// them; they run less often. (So lighttpd's: a fifth of a turn for each read, constant to .6 % while it was searched, and wrong by
    /// 79 % later; docs/meters.md.)
    fn without_turns(&self, clusters: &mut [Cluster]) {
        for cluster in clusters {
            let Some((signal, _)) = cluster.agrees else {
                continue;
            };
            let total = |counts: &[f64]| counts.iter().sum::<f64>();
            let signal = self
                .seen
                .signals
                .get(signal)
                .map_or(f64::INFINITY, |s| total(&s.counts));
            cluster
                .members
                .retain(|m| total(&self.counts(*m).0) >= ONCE_MIN * signal);
            if cluster.members.is_empty() {
                cluster.agrees = None;
            }
        }
    }

    /// Whether its busiest threads wait for several connections at once.
    fn gathers(&self) -> bool {
        self.seen.gathering > GATHERING_MAX
    }

    fn among(&self, mut eligible: Vec<Cluster>) -> Choice {
        let gathers = self.gathers();
        if gathers {
            self.without_turns(&mut eligible);
        }
        // A signal from outside decides; the nearest to requests first, then the cluster that keeps to it best.
        let agreeing = (0..eligible.len())
            .filter_map(|i| eligible.get(i).and_then(|c| c.agrees).map(|a| (i, a)))
            .min_by(|(i, a), (j, b)| a.0.cmp(&b.0).then(a.1.total_cmp(&b.1)).then(i.cmp(j)));
        if let Some((best, (signal, variation))) = agreeing {
            let name = self.seen.signals.get(signal).map_or("", |s| s.name.as_str());
            let why = format!("keeps a constant ratio to {name} (±{:.1} %)", variation * 100.0);
            return self.take(&eligible.swap_remove(best), &why);
        }
        // All that is in the loop of such a program may run once for a turn, which serves one connection or many, and more of them the
        // busier it is. (Unbound under questions by UDP: such points were wrong by 43 % between three loads; docs/meters.md.) Slowing it
        // does not always show that: with as many clients waiting as before a turn serves as many.
        if gathers {
            return Choice::Abstained(format!(
                "it waits for several connections at once ({:.0} % of its waits), so that a turn of its loop may serve one request or \
                 many, and nothing from outside tells turns from requests",
                self.seen.gathering * 100.0
            ));
        }
        eligible.sort_by(|a, b| {
            b.functions
                .cmp(&a.functions)
                .then(b.members.len().cmp(&a.members.len()))
                .then(a.noise.total_cmp(&b.noise))
        });
        let others = eligible.split_off(1);
        let Some(first) = eligible.pop() else {
            return Choice::Abstained("no cluster is left".to_owned());
        };
        let by_chance = |o: &Cluster| self.part_by_chance(&first, o);
        let (equal, rivals): (Vec<Cluster>, Vec<Cluster>) = others
            .into_iter()
            .partition(|o| self.same_effect(&first, o) || by_chance(o) == Told::Yes);
        let outweighed = |rival: &Cluster| {
            // What an interpreter does beside its operations may run through any number of functions.
            (first.functions as f64 >= BY_FAR * rival.functions as f64
                && (!first.by_function || rival.by_function))
                || rival.noise > BY_FAR * first.noise + 0.005
                || (first.agrees_weakly && !rival.agrees_weakly)
        };
        let weighty = |m: &usize| self.seen.points.get(*m).is_some_and(|p| p.around() >= 0.5);
        let carries_weight = first.functions >= 2 || first.members.iter().any(weighty);
        let rivals_left = || rivals.iter().filter(|r| !outweighed(r));
        if let Some(rival) = rivals_left().next() {
            let open = carries_weight && rivals_left().all(|r| by_chance(r) == Told::NotYet);
            let why = format!(
                "two clusters of points that do not keep their ratio could be the work ({} of {} functions, ±{:.1} % per \
                 CPU second; {} of {} functions, ±{:.1} %), and nothing from outside decides between them",
                points(first.members.len()),
                first.functions,
                first.noise * 100.0,
                points(rival.members.len()),
                rival.functions,
                rival.noise * 100.0,
            );
            return if open {
                Choice::Undecided(why)
            } else {
                Choice::Abstained(why)
            };
        }
        if !carries_weight {
            return Choice::Abstained(
                "the points that are steady lie all in one function that is not at work most of the time"
                    .to_owned(),
            );
        }
        let why = match (rivals.len(), equal.len()) {
            (0, 0) => "all steady points keep their ratios".to_owned(),
            (0, _) => "all clusters move together".to_owned(),
            _ => "it runs through more functions, or more steadily, than the others".to_owned(),
        };
        // Of those that say the same the steadiest.
        let best = equal
            .iter()
            .filter(|c| c.noise < first.noise / BY_FAR && c.functions * 2 >= first.functions)
            .min_by(|a, b| a.noise.total_cmp(&b.noise));
        if let Some(best) = best {
            return self.take(best, &why);
        }
        // Of what chance picks and what it picks from the latter, unless it would be left without a witness.
        let whole = equal
            .iter()
            .find(|c| c.series.mean() > first.series.mean() && by_chance(c) == Told::Yes);
        match whole.map(|whole| self.take(whole, &why)) {
            Some(Choice::Chosen(chosen)) if chosen.witness.is_some() => Choice::Chosen(chosen),
            _ => self.take(&first, &why),
        }
    }

    /// The member of a cluster that is counted: neither coarse nor dear.
    fn take(&self, cluster: &Cluster, why: &str) -> Choice {
        let usable = cluster
            .members
            .iter()
            .copied()
            .filter(|m| self.seen.points.get(*m).is_some_and(|p| !p.waits));
        let badness = |m: usize| {
            let (rate, cost) = (self.rate(m), self.cost(m));
            let coarse = (RATE_GOOD / rate).max(1.0).log10();
            let dear = (cost / self.limits.cost).max(1.0).log10();
            coarse + dear
        };
        let Some(point) = usable.clone().min_by(|a, b| {
            badness(*a)
                .total_cmp(&badness(*b))
                .then(self.rate(*a).total_cmp(&self.rate(*b)))
                .then(a.cmp(b))
        }) else {
            return Choice::Abstained("the points of the best cluster only wait".to_owned());
        };
        let function = |m: usize| self.seen.points.get(m).map(|p| p.function);
        // What is counted all the time is not to be counted in turns, with all the noise of that, for the sake of its witness.
        let all_the_time = |cost: f64| CHARGED_AT_MOST * cost <= self.limits.cost;
        let is_dear =
            |m: usize| all_the_time(self.cost(point)) && !all_the_time(self.cost(point) + self.cost(m));
        let witness = usable
            .filter(|m| *m != point && badness(*m) <= badness(point) + 0.5)
            .min_by(|a, b| {
                is_dear(*a)
                    .cmp(&is_dear(*b))
                    .then((function(*a) == function(point)).cmp(&(function(*b) == function(point))))
                    .then(self.rate(*a).total_cmp(&self.rate(*b)))
                    .then(a.cmp(b))
            });
        let cost = self.cost(point) + witness.map_or(0.0, |w| self.cost(w));
        let slowed = if cluster.response.is_some() {
            format!(
                ", also while the program is slowed by {:.1} %",
                self.burden * 100.0
            )
        } else {
            String::new()
        };
        Choice::Chosen(Chosen {
            point,
            witness,
            rate: self.rate(point),
            noise: cluster.noise,
            duty: (self.limits.cost / cost.max(1e-12)).min(1.0),
            reason: format!(
                "{} in {} keep a constant ratio{slowed}; {why}",
                points(cluster.members.len()),
                plural(cluster.functions, "function")
            ),
            cluster: cluster.members.clone(),
        })
    }
}

/// The one that was hit more often first.
fn whole_and_part<'a>(a: &'a Cluster, b: &'a Cluster) -> (&'a Cluster, &'a Cluster) {
    if a.series.mean() >= b.series.mean() {
        (a, b)
    } else {
        (b, a)
    }
}

/// What chi-squared exceeds by chance at the level [`BY_CHANCE`] (Wilson and Hilferty's approximation).
fn chi_squared_limit(freedom: f64) -> f64 {
    let spread = 2.0 / (9.0 * freedom);
    freedom * (1.0 - spread + BY_CHANCE * spread.sqrt()).powi(3)
}

fn points(n: usize) -> String {
    plural(n, "point")
}

fn plural(n: usize, what: &str) -> String {
    if n == 1 {
        format!("1 {what}")
    } else {
        format!("{n} {what}s")
    }
}

#[cfg(test)]
mod tests;
