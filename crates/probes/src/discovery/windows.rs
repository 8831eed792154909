//! Last round of a search: counts the remaining sites in windows, half of them burdened by probes on busy places. A
//! site can be trusted if it keeps its ratios even then, and falls with the work.

use crate::discovery::compiled::Switches;
use crate::discovery::search::{CANDIDATES_MAX, COST_MAX, Search, Spot, TIME_MAX, hits_between};
use crate::discovery::signals::Signals;
use crate::turns::Urgent;
use homeostat_meters::cpu_time::{up_to_date, waiting};
use homeostat_points::choice::{Choice, Observation, Point, WINDOWS_FIRST as WINDOWS, WINDOWS_MAX, choose};
use homeostat_sensors::storage::Refusal;
use std::collections::BTreeSet;
use std::time::{Duration, Instant};

/// Window length for cheap sites (CPU time of a program on one CPU), and the shortest.
const WINDOW: f64 = 0.4;
const WINDOW_MIN: f64 = 0.1;
/// … and the shortest if the budget demands it. In so short a window, sites below about 600 runs a second are too rare.
const WINDOW_SHORTEST: f64 = 0.04;
/// Share of the remaining budget planned for windows: rates are rough, and hits between windows cost, too.
const MEANT: f64 = 0.75;
/// Sites are cheap up to this share of the CPU time.
const CHEAP: f64 = 0.03;
/// The wait for a program with little CPU time grows up to this factor.
const PATIENCE: f64 = 6.0;
/// Share of CPU time lost in burdened windows, in one piece at the start.
const BURDEN: f64 = 0.10;
/// … and the largest share in free windows.
const ALONE: f64 = 0.005;
/// Most places used for the burden: the busiest.
const BURDEN_SPOTS: usize = 8;
/// Interval of checks whether the burden is paid: some places run a million times a second.
const BURDEN_BEAT: Duration = Duration::from_millis(2);

struct Window {
    seconds: f64,
    cpu: f64,
    counts: Vec<u64>,
    /// Hits of the burden's places.
    extra: u64,
    /// Counts of the external signals.
    outside: Vec<f64>,
}

struct Charged {
    hits: Vec<u64>,
    cpu: f64,
    /// How often its threads got a CPU.
    switches: Switches,
}

impl Search<'_> {
    /// Counts the remaining sites in windows, half of them burdened.
    pub(super) fn last_round(&mut self, busy: &[Spot]) -> Result<Observation, Refusal> {
        self.go_on()?;
        let points = self.spots.len();
        // The burden's counters are numbered after the sites.
        let burden = self.burden(busy);
        self.spots.extend(burden);
        let all: Vec<usize> = (0..self.spots.len()).collect();
        let (mine, slow) = all.split_at(points);
        let mut signals = Signals::open(self.root, self.workload);
        let mut observation = Observation {
            waiting: self.waiting,
            gathering: self.gathering,
            points: self.spots.iter().take(points).map(point).collect(),
            signals: signals.names(),
            ..Observation::default()
        };
        let cpus = self.cpus.max(0.02);
        let cost = self.spots.iter().take(points).map(|s| s.rate).sum::<f64>() * self.hit_cost() / cpus;
        let mut length = length(cost, cpus, COST_MAX - self.paid, waiting());
        let (before, begun) = (self.paid, Instant::now());
        let mut charged = Charged {
            hits: self.read(&all),
            cpu: self.cpu(),
            switches: self.runs(),
        };
        // Result before more windows were added.
        let mut so_far = None;
        let outcome = self.attach(mine).and_then(|attached| {
            let mut outcome = Ok(());
            for window in 0..WINDOWS_MAX {
                if window > 0 && window % WINDOWS == 0 {
                    let each = (
                        (self.paid - before) / window as f64,
                        begun.elapsed() / window as u32,
                    );
                    let undecided = matches!(choose(&observation, self.limits), Choice::Undecided(_));
                    if !undecided || !may_be_added(each, COST_MAX - self.paid, self.begun.elapsed()) {
                        break;
                    }
                    so_far = Some(observation.clone());
                }
                // Free, burdened, burdened, free: a drift affects both kinds equally.
                let slow = if matches!(window % 4, 1 | 2) { slow } else { &[] };
                if window % 4 == 0 {
                    let passed = observation.seconds.iter().sum::<f64>() + window as f64 * waiting();
                    let spent = (self.paid - before, passed);
                    let rest = WINDOWS - window % WINDOWS;
                    let planned = of_the_rest(length, spent, COST_MAX - self.paid, rest, waiting());
                    if planned < length && so_far.is_some() {
                        // Shorter windows could not measure rare sites.
                        break;
                    }
                    length = planned;
                }
                outcome =
                    self.one_of_the_last((mine, slow), length, &mut charged, &mut signals, &mut observation);
                if outcome.is_err() {
                    break;
                }
            }
            let off = attached.let_go();
            outcome.and(off)
        });
        // Hits until detachment are charged, whatever the outcome.
        let paid = self.charge_all_since(&mut charged, &all);
        if let Err(refusal) = outcome.and(paid) {
            // A failure in added windows leaves the earlier ones valid, if the program is the same.
            self.may_be_read()?;
            observation = so_far.ok_or(refusal)?;
        }
        self.spots.truncate(points);
        Ok(observation)
    }

    fn charge_all_since(&mut self, charged: &mut Charged, all: &[usize]) -> Result<(), Refusal> {
        let now = self.read(all);
        let hits = hits_between(&charged.hits, &now);
        charged.hits = now;
        let cpu = self.cpu();
        let used = cpu - std::mem::replace(&mut charged.cpu, cpu);
        self.charge(hits);
        self.charge_switches(&mut charged.switches);
        self.charge_children(hits, used)
    }

    /// Counts one window of the sites, with the burden if any.
    fn one_of_the_last(
        &mut self,
        (mine, slow): (&[usize], &[usize]),
        length: f64,
        charged: &mut Charged,
        signals: &mut Signals,
        observation: &mut Observation,
    ) -> Result<(), Refusal> {
        self.go_on()?;
        let seen = self.window(mine, slow, length, signals)?;
        // Hits between windows are charged, too.
        let all: Vec<usize> = (0..self.spots.len()).collect();
        self.charge_all_since(charged, &all)?;
        observation.seconds.push(seen.seconds);
        observation.cpu.push(seen.cpu);
        let burden = if seen.cpu > 0.0 {
            seen.extra as f64 * self.hit_cost() / seen.cpu
        } else {
            0.0
        };
        observation.burden.push(burden);
        for (point, count) in observation.points.iter_mut().zip(seen.counts) {
            point.counts.push(count);
        }
        for (signal, count) in observation.signals.iter_mut().zip(seen.outside) {
            signal.counts.push(count);
        }
        Ok(())
    }

    /// Counts for the length of a window. The burden stays on until the program has paid its share.
    fn window(
        &mut self,
        mine: &[usize],
        slow: &[usize],
        length: f64,
        signals: &mut Signals,
    ) -> Result<Window, Refusal> {
        // The burden of the last window must not reach unseen into this one.
        let burden: Vec<usize> = (mine.len()..self.spots.len()).collect();
        self.are_off(&burden)?;
        // A late wake-up after a tick reads an old clock, and costs the program more.
        let _urgent = Urgent::begin();
        up_to_date();
        // The same order at both ends: the last reading takes longest.
        let (counts, extra) = (self.read(mine), self.read(&burden));
        let (cpu, begun) = (self.cpu(), Instant::now());
        let outside = signals.read(self.workload);
        let mut slowing = if slow.is_empty() {
            None
        } else {
            Some(self.attach(slow)?)
        };
        // The signals may take a while, and are read at both ends.
        let counted = Instant::now();
        let share = BURDEN * length * self.cpus.max(0.02);
        loop {
            let used = self.cpu() - cpu;
            let elapsed = counted.elapsed().as_secs_f64();
            if elapsed >= length && (used >= 0.8 * length * self.cpus || elapsed >= PATIENCE * length) {
                break;
            }
            // The sites may run far more often than before. An error detaches the probes.
            let hits = hits_between(&counts, &self.read(mine));
            let of_slow = hits_between(&extra, &self.read(&burden));
            self.go_on_after(hits.saturating_add(of_slow))?;
            self.at_liberty()?;
            if slowing.is_none() {
                std::thread::sleep(Duration::from_secs_f64(length / 20.0));
                continue;
            }
            std::thread::sleep(BURDEN_BEAT);
            let paid = hits_between(&extra, &self.read(&burden)) as f64 * self.hit_cost();
            if paid >= share {
                if let Some(attached) = slowing.take() {
                    self.let_go(attached);
                }
            }
        }
        up_to_date();
        let (counts, extra) = (
            difference(&self.read(mine), &counts),
            hits_between(&extra, &self.read(&burden)),
        );
        let (cpu, seconds) = (self.cpu() - cpu, begun.elapsed().as_secs_f64());
        if slow.is_empty() && extra as f64 * self.hit_cost() > ALONE * cpu {
            return Err(Refusal::Now(
                "breakpoints that had slowed it for a moment were on for longer: perhaps somebody stands still".to_owned(),
            ));
        }
        let now = signals.read(self.workload).into_iter();
        if let Some(attached) = slowing {
            self.let_go(attached);
        }
        Ok(Window {
            seconds,
            cpu,
            counts,
            extra: if slow.is_empty() { 0 } else { extra },
            outside: now
                .zip(outside)
                .map(|(now, then)| (now - then).max(0.0))
                .collect(),
        })
    }

    /// The busiest places that are not sites themselves.
    fn burden(&self, busy: &[Spot]) -> Vec<Spot> {
        let taken: BTreeSet<(usize, u64)> = self.spots.iter().map(|s| (s.image, s.offset)).collect();
        let mut candidates: Vec<&Spot> = busy
            .iter()
            .filter(|s| !taken.contains(&(s.image, s.offset)))
            .collect();
        candidates.sort_by(|a, b| b.rate.total_cmp(&a.rate).then(a.offset.cmp(&b.offset)));
        // One hardware breakpoint is reserved for the burden.
        let most = if self.compiled.is_some() { 1 } else { BURDEN_SPOTS };
        let room = CANDIDATES_MAX.saturating_sub(self.spots.len()).min(most);
        candidates.into_iter().take(room).cloned().collect()
    }
}

/// Window length (seconds) for sites with this cost, as a share of the CPU time of a program on `cpus` CPUs. `left`:
/// remaining budget (seconds of CPU time). `beside`: wait per window (seconds).
fn length(cost: f64, cpus: f64, left: f64, beside: f64) -> f64 {
    let wanted = WINDOW * (CHEAP / cost.max(1e-9)).clamp(WINDOW_MIN / WINDOW, 1.0);
    // Per second. Half of the windows are burdened.
    let paid = (cost + BURDEN / 2.0) * cpus;
    wanted.min((MEANT * left / (WINDOWS as f64 * paid) - beside).max(WINDOW_SHORTEST))
}

/// Most cost of the sites per second (seconds of CPU time) with which all windows, at their shortest, fit `left`.
pub(super) fn most_paid(cpus: f64, left: f64, beside: f64) -> f64 {
    (MEANT * left / (WINDOWS as f64 * (WINDOW_SHORTEST + beside)) - BURDEN / 2.0 * cpus).max(0.0)
}

/// Length of the remaining windows if earlier ones cost more than planned: `spent` in `seconds`. `left`: remaining
/// budget (seconds of CPU time). `beside`: wait per window (seconds).
fn of_the_rest(length: f64, (spent, seconds): (f64, f64), left: f64, windows: usize, beside: f64) -> f64 {
    let cost = windows as f64 * spent / seconds;
    if cost > 0.0 {
        length.min((MEANT * left / cost - beside).max(WINDOW_SHORTEST))
    } else {
        length
    }
}

/// Whether another set of windows of this cost and duration fits the budget and the time limit.
fn may_be_added((paid, time): (f64, Duration), left: f64, so_far: Duration) -> bool {
    WINDOWS as f64 * paid <= MEANT * left && so_far + time * WINDOWS as u32 <= TIME_MAX
}

fn difference(now: &[u64], then: &[u64]) -> Vec<u64> {
    now.iter().zip(then).map(|(n, t)| n.saturating_sub(*t)).collect()
}

fn point(spot: &Spot) -> Point {
    Point {
        function: spot.function,
        kind: spot.candidate.kind.into(),
        innermost_loop: spot.candidate.innermost_loop,
        coverage: spot.own,
        of_function: if spot.coverage > spot.own {
            spot.coverage
        } else {
            0.0
        },
        waits: spot.candidate.waits,
        counts: Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_are_shorter_the_dearer_points_are_and_the_less_is_left() {
        // What the points may cost fits, and the windows are the shortest then.
        for (cpus, beside) in [(1.0, 0.0), (4.0, 0.006), (16.0, 0.015)] {
            let most = most_paid(cpus, 0.9, beside);
            let paid = WINDOWS as f64 * (WINDOW_SHORTEST + beside) * (most + BURDEN / 2.0 * cpus);
            assert!(most == 0.0 || (paid - MEANT * 0.9).abs() < 1e-9, "{most}");
            assert!(most == 0.0 || (length(most / cpus, cpus, 0.9, beside) - WINDOW_SHORTEST).abs() < 1e-9);
        }
        assert!(most_paid(1.0, 0.9, 0.006) > 0.5 && most_paid(100.0, 0.9, 0.006) == 0.0);
        assert_eq!(length(0.001, 1.0, 1.0, 0.0), WINDOW);
        assert_eq!(length(2.0 * CHEAP, 1.0, 1.0, 0.0), WINDOW / 2.0);
        assert_eq!(length(0.3, 1.0, 1.0, 0.0), WINDOW_MIN);
        let short = length(0.45, 1.0, 0.8, 0.0);
        assert!((WINDOW_SHORTEST..WINDOW_MIN).contains(&short), "{short}");
        assert!(WINDOWS as f64 * short * (0.45 + BURDEN / 2.0) <= MEANT * 0.8 + 1e-9);
        assert_eq!(
            length(0.45, 1.0, 0.01, 0.0),
            WINDOW_SHORTEST,
            "it stops where nothing is left"
        );
        assert!((length(0.45, 1.0, 0.8, 0.01) - (short - 0.01)).abs() < 1e-9);
        assert!(
            length(0.3, 4.0, 1.0, 0.0) < length(0.3, 1.0, 1.0, 0.0),
            "on four CPUs four times is paid"
        );
    }

    #[test]
    fn windows_are_added_only_within_what_is_left_of_a_search() {
        let half = Duration::from_millis(500);
        let added = |paid, left, seconds| may_be_added((paid, half), left, Duration::from_secs(seconds));
        // Sixteen of .02 s are .32 s, and .75 of .45 s is .34.
        assert!(added(0.02, 0.45, 20));
        assert!(!added(0.02, 0.42, 20));
        // Eight seconds more.
        assert!(added(0.0, 0.0, 32) && !added(0.0, 0.0, 33));
    }

    #[test]
    fn the_rest_of_the_windows_is_shorter_where_the_first_have_cost_more_than_they_were_meant_to() {
        assert_eq!(of_the_rest(0.4, (0.0, 0.0), 0.9, 16, 0.0), 0.4, "none was yet");
        assert_eq!(
            of_the_rest(0.4, (0.0, 1.6), 0.9, 12, 0.0),
            0.4,
            "they cost nothing"
        );
        assert_eq!(
            of_the_rest(0.4, (0.05, 1.6), 0.85, 12, 0.0),
            0.4,
            "as they were meant to"
        );
        // .17 of each second, of which 4.8 would be left: .82 where .66 may be.
        let rest = of_the_rest(0.4, (0.272, 1.6), 0.66, 12, 0.0);
        assert!((12.0 * rest * 0.17 - MEANT * 0.66).abs() < 1e-9, "{rest}");
        let waited_for = of_the_rest(0.4, (0.272, 1.6), 0.66, 12, 0.006);
        assert!((waited_for - (rest - 0.006)).abs() < 1e-9);
        assert_eq!(of_the_rest(0.4, (0.9, 1.6), 0.01, 12, 0.0), WINDOW_SHORTEST);
        assert_eq!(of_the_rest(0.04, (0.9, 0.2), 0.01, 4, 0.0), 0.04, "never longer");
    }
}
