//! Chooses the counted probe site that measures useful work, or none.
//!
//! The input is the count of each site per time window. In *burdened* windows, probes on busy places slow the program a
//! little. Sites that keep a constant ratio count the same work and form a cluster. The rules, in this order:
//!
//! 1. A cluster is rejected if it waits, runs rarely, ignores the CPU time, or runs *more* per CPU second when slowed.
//! 2. A cluster with a constant ratio to an independent external signal is the work. Signals are data segments
//!    received, read and write calls, voluntary switches and bytes.
//! 3. Clusters whose ratio stays constant under the slowdown are interchangeable. Otherwise the work is the cluster
//!    that spans by far the most functions, or is by far the steadiest.
//! 4. Otherwise no site is chosen: a wrong meter is worse than none.
//!
//! The choice is pure: equal counts give an equal choice.

mod series;

use crate::HIT_COST;
use crate::code::Kind;
use serde::{Deserialize, Serialize};
use series::{Series, moments};
use std::collections::BTreeSet;

/// Sites of one cluster keep their ratio to within this coefficient of variation, beyond rounding to whole counts.
const SAME_WORK: f64 = 0.02;
/// … and to an external signal to within this.
const AGREES: f64 = 0.03;
/// A cluster counts only if one of its sites was on the stack in this share of the samples.
const COVERAGE_MIN: f64 = 0.15;
/// Limit on the variation of work per CPU second between windows, beyond rounding.
const UNSTEADY: f64 = 0.5;
/// Fewest executions in the shortest window. Rounding to whole counts is then 2 %.
const COUNTS_MIN: f64 = 25.0;
const WINDOWS_MIN: usize = 6;
/// Number of windows at first …
pub const WINDOWS_FIRST: usize = 16;
/// … and at most, if the first windows leave the choice open.
pub const WINDOWS_MAX: usize = 48;
/// Standard errors that separate two values, at first and after more windows: repeated tests succeed by chance.
const CERTAIN: f64 = 1.0;
const CERTAIN_AGAIN: f64 = 1.5;
/// A signal counts from this rate per second.
const SIGNAL_RATE_MIN: f64 = 20.0;
/// Smallest loss of CPU time, as a share, from which a slowdown teaches something.
const BURDEN_MIN: f64 = 0.02;
/// Two clusters respond equally if their ratio moves by less than this share of the slowdown.
const SAME_EFFECT: f64 = 0.2;
/// … less than this, if both are in one loop and chance explains the variation of their ratio …
const SAME_EFFECT_BY_CHANCE: f64 = 0.5;
/// … at this level (one-sided, 0.05: the normal quantile).
const BY_CHANCE: f64 = 1.645;
/// A cluster is larger or steadier only by at least this factor.
const BY_FAR: f64 = 1.6;
/// A cluster known only from an interpreter's function must fall with the work by more than this share of the slowdown.
const FALLS: f64 = -0.5;
/// … and a cluster as slow as a clock by more than this.
const FALLS_AT_ALL: f64 = -0.2;
/// … or its rate per second must vary by more than this, which a clock's rate does not.
const TICKS: f64 = 0.1;
/// CPU time cannot judge a program that spends more than this share of it in waiting loops.
const WAITING_MAX: f64 = 0.4;
/// … or whose waits are for several connections at once in more than this share.
const GATHERING_MAX: f64 = 0.05;
/// Then a request counter runs at least this often per count of a signal (3 % may be in flight).
const ONCE_MIN: f64 = 0.97;
/// Highest tick rate of clocks in programs (per second).
const CLOCK_RATE: f64 = 150.0;
/// The charge for a hit is at most this multiple of its measured cost.
const CHARGED_AT_MOST: f64 = 3.5;
/// Preferred rate per second: neither coarse nor costly.
const RATE_GOOD: f64 = 100.0;

/// A probe site and its counts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Point {
    /// Function that contains it: equal numbers mean the same function.
    pub function: u64,
    /// What it counts.
    pub kind: PointKind,
    /// Start of the innermost loop around it in its function, if any.
    #[serde(default)]
    pub innermost_loop: Option<u64>,
    /// Share of the stack samples that contain the site, 0..1.
    pub coverage: f64,
    /// The same share for the interpreter function whose loop contains the site. 0: none.
    #[serde(default)]
    pub of_function: f64,
    /// The site is in a loop that seems to wait.
    pub waits: bool,
    /// Executions in each window.
    pub counts: Vec<u64>,
}

impl Point {
    /// Share of the samples that contain the site or its interpreter function.
    fn around(&self) -> f64 {
        self.coverage.max(self.of_function)
    }
}

/// [`Kind`] in its serialized form.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PointKind {
    /// Entries of a function.
    Entry,
    /// Calls from one place.
    Call,
    /// Iterations of a loop.
    Loop,
    /// Executions of a branch.
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

/// A kernel counter over the same windows. Counters closer to requests come first.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Signal {
    /// Name for people: `TCP segments received`.
    pub name: String,
    /// The signal may reflect waits as well as work (context switches). It only breaks ties between clusters.
    pub weak: bool,
    /// Its count in each window.
    pub counts: Vec<f64>,
}

/// Everything that was counted.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Observation {
    /// Length of each window in seconds.
    pub seconds: Vec<f64>,
    /// CPU seconds of the program in each window.
    pub cpu: Vec<f64>,
    /// Share of the CPU time lost in each window to burden probes, without the probes of the sites themselves.
    pub burden: Vec<f64>,
    /// Share of the samples in a waiting loop, 0..1.
    pub waiting: f64,
    /// Share of the busiest threads' waits that are for several connections at once (`epoll_wait`, `poll`, `select` and
    /// similar), 0..1. 0 if the threads were never seen waiting.
    #[serde(default)]
    pub gathering: f64,
    /// The points.
    pub points: Vec<Point>,
    /// The signals.
    pub signals: Vec<Signal>,
}

/// Limits of the choice.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Limits {
    /// Largest share of the program's CPU time that counting may cost.
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

/// A site that counts the work.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Chosen {
    /// Its index.
    pub point: usize,
    /// A second site, in another function if possible. If their ratio moves, one of the two has changed its meaning.
    pub witness: Option<usize>,
    /// All sites of the cluster, by index.
    pub cluster: Vec<usize>,
    /// Executions per second.
    pub rate: f64,
    /// Coefficient of variation of executions per CPU second over the free windows.
    pub noise: f64,
    /// Share of the time in which the site may be counted within the cost limit.
    pub duty: f64,
    /// Why the site can be trusted.
    pub reason: String,
}

/// The result.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Choice {
    /// A site is chosen.
    Chosen(Chosen),
    /// No site is chosen, for this reason.
    Abstained(String),
    /// No site is chosen yet. More windows, [`WINDOWS_MAX`] at most, may decide.
    Undecided(String),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Told {
    Yes,
    No,
    /// More windows may decide.
    NotYet,
}

struct Refused {
    why: String,
    /// More windows may change this answer.
    open: bool,
}

impl From<String> for Refused {
    fn from(why: String) -> Self {
        Self { why, open: false }
    }
}

struct Cluster {
    members: Vec<usize>,
    functions: usize,
    coverage: f64,
    /// Only the coverage of an interpreter's function makes the cluster relevant.
    by_function: bool,
    /// Sum over the members, each scaled to the same weight.
    series: Series,
    /// Variation of work per CPU second within windows of one kind.
    noise: f64,
    /// Variation of the count per second over the free windows, regardless of CPU time.
    by_the_clock: f64,
    /// Change of work per CPU second under the slowdown, and its standard error (logarithms).
    response: Option<(f64, f64)>,
    /// The best signal with a constant ratio: its index and the variation of the ratio.
    agrees: Option<(usize, f64)>,
    /// A weak signal agrees with the cluster.
    agrees_weakly: bool,
}

struct Judge<'a> {
    seen: &'a Observation,
    limits: Limits,
    /// Mean share of CPU time lost in the burdened windows.
    burden: f64,
}

/// Chooses a site from the counts.
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

    fn cost(&self, point: usize) -> f64 {
        self.counts(point).0.iter().sum::<f64>() * self.limits.hit_cost / self.seen.cpu.iter().sum::<f64>()
    }

    fn choose(&self) -> Choice {
        // A site with few counts per window keeps any ratio, within rounding.
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
            // The last criterion for such a program is an external signal, and no signal agreed.
            return if refusals.iter().any(|r| r.1.open) && !self.gathers() {
                Choice::Undecided(none)
            } else {
                Choice::Abstained(none)
            };
        }
        self.among(eligible)
    }

    /// Groups the sites that keep their ratios, the most significant cluster first.
    fn clusters(&self, mut points: Vec<usize>) -> Vec<Cluster> {
        // The other sites are compared with the leader of a cluster, so the leader needs many counts and wide coverage.
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
        // The member with the most counts has the least rounding.
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
        // Only the first windows, so that the result does not depend on their number.
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

    /// Splits logarithms per window into free and burdened windows.
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

    /// Variation within the windows of one kind, and the difference between the kinds with its standard error.
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

    /// Standard errors that must separate two values.
    fn certain(&self) -> f64 {
        if self.seen.seconds.len() > WINDOWS_FIRST {
            CERTAIN_AGAIN
        } else {
            CERTAIN
        }
    }

    /// Whether the error can fall below `room` with [`WINDOWS_MAX`] windows.
    fn may_be_told(&self, error: f64, room: f64) -> bool {
        let windows = self.seen.seconds.len();
        windows < WINDOWS_MAX && CERTAIN_AGAIN * error * (windows as f64 / WINDOWS_MAX as f64).sqrt() < room
    }

    /// Whether the cluster may fall like the work, and more windows can show a fall by more than this share.
    fn may_fall(&self, cluster: &Cluster, share: f64) -> bool {
        cluster.response.is_some_and(|(moved, error)| {
            moved - 2.0 * error < -self.burden && self.may_be_told(error, (1.0 + share) * self.burden)
        })
    }

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
        // Sites driven by a clock are as steady as sites driven by CPU time. Neither is work.
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
        // An interpreter's function contains more than operations, such as work on a timer or when memory is used up. A
        // cluster that falls with the work is acceptable, and a cluster that varies is not driven by a clock.
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

    /// Whether two clusters respond equally to a change that makes the program faster or slower.
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

    /// Whether one of two clusters in one loop is a random part of the other: a branch that only some of the data
    /// takes. Three conditions hold. The part never has more hits. Their ratio varies no more than independent coin
    /// flips per pass would (with some hundred counts per window, several times what [`SAME_WORK`] allows). The ratio
    /// hardly moves under the slowdown, unlike a part that is driven by time or finds more work the less often it
    /// looks. Example: a branch in a loop of Node.js takes half of the iterations, ±5 % between windows.
    fn part_by_chance(&self, a: &Cluster, b: &Cluster) -> Told {
        let (whole, part) = whole_and_part(a, b);
        let Some(of_whole) = self.in_the_loop_of(whole, part) else {
            return Told::No;
        };
        let windows: Vec<(f64, f64)> = (of_whole.0.into_iter())
            .zip(part.series.0.iter().copied())
            .collect();
        // At the edge of a window, one counter may be read before the other.
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
        // The error of coin flips, or more where more was observed.
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

    /// Counts of the whole at its busiest site in the innermost loop that contains all sites of the part. Coin flips
    /// apply to these passes, not to iterations of a nested loop. `None`: no such loop.
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

    /// Keeps in each cluster the sites that run at least once per count of its signal, if the program has an event
    /// loop. Iterations of the loop run less often, and stay proportional only while each serves equally many requests.
    /// In lighttpd, 0.2 iterations per read were constant to 0.6 % in the search, and wrong by 79 % later
    /// (docs/meters.md).
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

    /// Whether the busiest threads wait for several connections at once.
    fn gathers(&self) -> bool {
        self.seen.gathering > GATHERING_MAX
    }

    fn among(&self, mut eligible: Vec<Cluster>) -> Choice {
        let gathers = self.gathers();
        if gathers {
            self.without_turns(&mut eligible);
        }
        // An external signal decides: first the closest to requests, then the cluster with the most constant ratio.
        let agreeing = (0..eligible.len())
            .filter_map(|i| eligible.get(i).and_then(|c| c.agrees).map(|a| (i, a)))
            .min_by(|(i, a), (j, b)| a.0.cmp(&b.0).then(a.1.total_cmp(&b.1)).then(i.cmp(j)));
        if let Some((best, (signal, variation))) = agreeing {
            let name = self.seen.signals.get(signal).map_or("", |s| s.name.as_str());
            let why = format!("keeps a constant ratio to {name} (±{:.1} %)", variation * 100.0);
            return self.take(&eligible.swap_remove(best), &why);
        }
        // Every site in an event loop may run once per iteration, which serves more connections the busier the program
        // is. For Unbound with UDP queries, such sites were wrong by 43 % between three loads (docs/meters.md). The
        // slowdown may miss this: with equally many clients waiting, an iteration serves equally many.
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
            // Work of an interpreter outside its operations may span any number of functions.
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
        // The steadiest of the interchangeable clusters.
        let best = equal
            .iter()
            .filter(|c| c.noise < first.noise / BY_FAR && c.functions * 2 >= first.functions)
            .min_by(|a, b| a.noise.total_cmp(&b.noise));
        if let Some(best) = best {
            return self.take(best, &why);
        }
        // Of a random part and its whole, the whole, unless that leaves no second site.
        let whole = equal
            .iter()
            .find(|c| c.series.mean() > first.series.mean() && by_chance(c) == Told::Yes);
        match whole.map(|whole| self.take(whole, &why)) {
            Some(Choice::Chosen(chosen)) if chosen.witness.is_some() => Choice::Chosen(chosen),
            _ => self.take(&first, &why),
        }
    }

    /// Takes the member of a cluster that is neither coarse nor costly.
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
        // A site that can be counted continuously must not become sampled, and so noisier, because of its second site.
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

fn whole_and_part<'a>(a: &'a Cluster, b: &'a Cluster) -> (&'a Cluster, &'a Cluster) {
    if a.series.mean() >= b.series.mean() {
        (a, b)
    } else {
        (b, a)
    }
}

/// Upper limit of chi-squared at the level [`BY_CHANCE`] (Wilson and Hilferty's approximation).
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
