//! The last round of a search: the points that are left are counted in windows, in half of which the program is slowed
//! a little by probes on busy places. What keeps its ratios even then, and falls with the work, can be trusted.

use crate::discovery::compiled::Switches;
use crate::discovery::search::{CANDIDATES_MAX, COST_MAX, Search, Spot, TIME_MAX, hits_between};
use crate::discovery::signals::Signals;
use crate::turns::Urgent;
use homeostat_meters::cpu_time::{up_to_date, waiting};
use homeostat_points::choice::{Choice, Observation, Point, WINDOWS_FIRST as WINDOWS, WINDOWS_MAX, choose};
use homeostat_sensors::storage::Refusal;
use std::collections::BTreeSet;
use std::time::{Duration, Instant};

/// Length of a window of points that are cheap (CPU time of a program on one CPU), and of the shortest.
const WINDOW: f64 = 0.4;
const WINDOW_MIN: f64 = 0.1;
/// … and where more would cost the program more than a search may: what was spent before is not left for the windows. In so short a one
/// points are too rare to be judged that run less than some 600 times a second.
const WINDOW_SHORTEST: f64 = 0.04;
/// Share of what a search may still cost that the windows are meant to: rates are known roughly, and it costs between them, too.
const MEANT: f64 = 0.75;
/// Share of the CPU time up to which points are cheap.
const CHEAP: f64 = 0.03;
/// A program that is given little CPU time is waited for this many times as long.
const PATIENCE: f64 = 6.0;
/// Share of its CPU time that the program pays in half of them, in one piece at their beginning.
const BURDEN: f64 = 0.10;
/// … and share up to which it was left alone.
const ALONE: f64 = 0.005;
/// Most places that it pays for: the busiest.
const BURDEN_SPOTS: usize = 8;
/// How often it is looked whether it has paid enough: some places run a million times a second.
const BURDEN_BEAT: Duration = Duration::from_millis(2);

/// What a window of the last round has shown.
struct Window {
    seconds: f64,
    cpu: f64,
    counts: Vec<u64>,
    /// Hits of the places that are to slow the program.
    extra: u64,
    /// Of the signals from outside.
    outside: Vec<f64>,
}

/// What of the last round is charged so far.
struct Charged {
    /// Hits of each place.
    hits: Vec<u64>,
    /// CPU time of the program.
    cpu: f64,
    /// How often its threads were given a CPU.
    switches: Switches,
}

impl Search<'_> {
    /// Counts what is left in windows, in half of which the program is slowed a little by probes on busy places.
    pub(super) fn last_round(&mut self, busy: &[Spot]) -> Result<Observation, Refusal> {
        self.go_on()?;
        let points = self.spots.len();
        // Beyond the points: the numbers of their counters.
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
        // What was seen before windows were added.
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
                // Off, on, on, off: a drift falls on both alike.
                let slow = if matches!(window % 4, 1 | 2) { slow } else { &[] };
                if window % 4 == 0 {
                    let passed = observation.seconds.iter().sum::<f64>() + window as f64 * waiting();
                    let spent = (self.paid - before, passed);
                    let rest = WINDOWS - window % WINDOWS;
                    let planned = of_the_rest(length, spent, COST_MAX - self.paid, rest, waiting());
                    if planned < length && so_far.is_some() {
                        // In shorter ones what is rare could not be told any more.
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
        // Until they were off they were hit, however it ended.
        let paid = self.charge_all_since(&mut charged, &all);
        if let Err(refusal) = outcome.and(paid) {
            // What hindered the windows that were added takes nothing from those before, as long as it is the same program.
            self.may_be_read()?;
            observation = so_far.ok_or(refusal)?;
        }
        self.spots.truncate(points);
        Ok(observation)
    }

    /// Charges what has been done since then.
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

    /// A window of the last round: of the points, and of what slows the program in it.
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
        // Between the windows it is hit as well.
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

    /// Counts for the length of a window; the program pays for the slow places until it has paid its share.
    fn window(
        &mut self,
        mine: &[usize],
        slow: &[usize],
        length: f64,
        signals: &mut Signals,
    ) -> Result<Window, Refusal> {
        // What slowed it in the last window must not slow it in this one, unseen.
        let burden: Vec<usize> = (mine.len()..self.spots.len()).collect();
        self.are_off(&burden)?;
        // Who is run late after a tick reads an old clock, and the program pays for longer.
        let _urgent = Urgent::begin();
        up_to_date();
        // In this order at both ends: what is looked at last takes longest.
        let (counts, extra) = (self.read(mine), self.read(&burden));
        let (cpu, begun) = (self.cpu(), Instant::now());
        let outside = signals.read(self.workload);
        let mut slowing = if slow.is_empty() {
            None
        } else {
            Some(self.attach(slow)?)
        };
        // The signals may have taken a while, and are read at both ends.
        let counted = Instant::now();
        let share = BURDEN * length * self.cpus.max(0.02);
        loop {
            let used = self.cpu() - cpu;
            let elapsed = counted.elapsed().as_secs_f64();
            if elapsed >= length && (used >= 0.8 * length * self.cpus || elapsed >= PATIENCE * length) {
                break;
            }
            // The points may run far more often than they did before. What is on goes with the error.
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

    /// The busiest places that are not counted themselves.
    fn burden(&self, busy: &[Spot]) -> Vec<Spot> {
        let taken: BTreeSet<(usize, u64)> = self.spots.iter().map(|s| (s.image, s.offset)).collect();
        let mut candidates: Vec<&Spot> = busy
            .iter()
            .filter(|s| !taken.contains(&(s.image, s.offset)))
            .collect();
        candidates.sort_by(|a, b| b.rate.total_cmp(&a.rate).then(a.offset.cmp(&b.offset)));
        // Of the processor's breakpoints one is left for that.
        let most = if self.compiled.is_some() { 1 } else { BURDEN_SPOTS };
        let room = CANDIDATES_MAX.saturating_sub(self.spots.len()).min(most);
        candidates.into_iter().take(room).cloned().collect()
    }
}

/// Length of a window in seconds, of points that cost such a share of the CPU time of a program on so many CPUs, of which a search may
/// still take so much (seconds); for each window so many seconds are waited beside.
fn length(cost: f64, cpus: f64, left: f64, beside: f64) -> f64 {
    let wanted = WINDOW * (CHEAP / cost.max(1e-9)).clamp(WINDOW_MIN / WINDOW, 1.0);
    // Each second; half of the windows are slowed.
    let paid = (cost + BURDEN / 2.0) * cpus;
    wanted.min((MEANT * left / (WINDOWS as f64 * paid) - beside).max(WINDOW_SHORTEST))
}

/// What a program on so many CPUs may pay for its points each second (seconds of CPU time), so that all windows fit into what a search may
/// still take, even if they are the shortest.
pub(super) fn most_paid(cpus: f64, left: f64, beside: f64) -> f64 {
    (MEANT * left / (WINDOWS as f64 * (WINDOW_SHORTEST + beside)) - BURDEN / 2.0 * cpus).max(0.0)
}

/// Length of each of so many windows that are left, where those before have cost more than they were meant to: so much, in so many
/// seconds; of what the search may still take (seconds). For each window so many seconds are waited beside.
fn of_the_rest(length: f64, (spent, seconds): (f64, f64), left: f64, windows: usize, beside: f64) -> f64 {
    let cost = windows as f64 * spent / seconds;
    if cost > 0.0 {
        length.min((MEANT * left / cost - beside).max(WINDOW_SHORTEST))
    } else {
        length
    }
}

/// Whether as many windows again, which cost so much and take so long each, are within what a search may still take, and may last.
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
