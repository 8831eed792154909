//! The last round of a search: the points that are left are counted in windows, in half of which the program is slowed
//! a little by probes on busy places. What keeps its ratios even then can be trusted.

use super::search::{CANDIDATES_MAX, Search, Spot};
use super::signals::Signals;
use crate::sys::bpf::Link;
use homeostat_points::HIT_COST;
use homeostat_points::choice::{Observation, Point};
use std::collections::BTreeSet;
use std::time::{Duration, Instant};

/// Windows of the last round.
const WINDOWS: usize = 16;
const WINDOW: Duration = Duration::from_millis(400);
/// Share of its CPU time by which the program is slowed in half of them.
const BURDEN: f64 = 0.06;
/// At this share (and so many seconds of CPU time) they are taken off.
const BURDEN_MAX: f64 = 0.15;
const BURDEN_GRACE: f64 = 0.003;
/// … and how long and at what cost it is made sure of.
const BURDEN_TIME: Duration = Duration::from_millis(60);
const BURDEN_PAY: Duration = Duration::from_millis(10);

/// What a window of the last round has shown.
struct Window {
    seconds: f64,
    cpu: f64,
    counts: Vec<u64>,
    /// Hits of the places that are to slow the program.
    extra: u64,
    too_much: bool,
}

impl Search<'_> {
    /// Counts what is left in windows, in half of which the program is slowed a little by probes on busy places.
    pub(super) fn last_round(&mut self, busy: &[Spot]) -> Result<Observation, String> {
        self.go_on()?;
        let points = self.spots.len();
        // Beyond the points: the numbers of their counters.
        let burden = self.burden(busy);
        self.spots.extend(burden);
        self.fit_burden(points)?;
        let all: Vec<usize> = (0..self.spots.len()).collect();
        let (mine, slow) = all.split_at(points);
        let mut signals = Signals::open(self.root, self.workload);
        let mut observation = Observation {
            waiting: self.waiting,
            points: self.spots.iter().take(points).map(point).collect(),
            signals: signals.names(),
            ..Observation::default()
        };
        let links = self.attach(mine)?;
        let mut slowing: Option<Vec<Link>> = None;
        let mut slow = slow.to_vec();
        let mut window = 0;
        while window < WINDOWS {
            // Off, on, on, off: a drift falls on both alike.
            let on = matches!(window % 4, 1 | 2) && !slow.is_empty();
            if on && slowing.is_none() {
                slowing = Some(self.attach(&slow)?);
            } else if !on {
                slowing = None;
            }
            self.go_on()?;
            let outside = signals.read(self.workload);
            let seen = self.window(mine, &slow);
            let now = signals.read(self.workload);
            self.hits += seen.counts.iter().sum::<u64>() + seen.extra;
            if seen.too_much {
                // Busier than they seemed: then without them, and this window does not count.
                slowing = None;
                slow.clear();
                continue;
            }
            window += 1;
            observation.seconds.push(seen.seconds);
            observation.cpu.push(seen.cpu);
            // Only what was meant: stray hits while the probes go are nothing.
            let burden = if on && seen.cpu > 0.0 {
                seen.extra as f64 * HIT_COST / seen.cpu
            } else {
                0.0
            };
            observation.burden.push(burden);
            for (point, count) in observation.points.iter_mut().zip(seen.counts) {
                point.counts.push(count);
            }
            for ((signal, now), then) in observation.signals.iter_mut().zip(now).zip(outside) {
                signal.counts.push((now - then).max(0.0));
            }
        }
        drop((links, slowing));
        self.spots.truncate(points);
        Ok(observation)
    }

    /// Counts for the length of a window, or until those that are to slow the program do so too much.
    fn window(&self, mine: &[usize], slow: &[usize]) -> Window {
        let (counts, extra) = (self.read(mine), self.read(slow));
        let (cpu, begun) = (self.cpu(), Instant::now());
        let difference = |now: Vec<u64>, then: &[u64]| -> Vec<u64> {
            now.iter().zip(then).map(|(n, t)| n.saturating_sub(*t)).collect()
        };
        let mut too_much = false;
        while begun.elapsed() < WINDOW && !too_much {
            std::thread::sleep(WINDOW / 10);
            let paid = difference(self.read(slow), &extra).iter().sum::<u64>() as f64 * HIT_COST;
            too_much = paid > BURDEN_MAX * (self.cpu() - cpu) + BURDEN_GRACE;
        }
        Window {
            seconds: begun.elapsed().as_secs_f64(),
            cpu: self.cpu() - cpu,
            counts: difference(self.read(mine), &counts),
            extra: difference(self.read(slow), &extra).iter().sum(),
            too_much,
        }
    }

    /// Busy places whose probes together slow the program by about [`BURDEN`].
    fn burden(&self, busy: &[Spot]) -> Vec<Spot> {
        let cpus = self.cpus.max(0.02);
        let wanted = BURDEN * cpus / HIT_COST;
        let taken: BTreeSet<(usize, u64)> = self.spots.iter().map(|s| (s.image, s.offset)).collect();
        let mut candidates: Vec<&Spot> = busy
            .iter()
            .filter(|s| !taken.contains(&(s.image, s.offset)) && s.rate <= wanted * 1.5)
            .collect();
        candidates.sort_by(|a, b| b.rate.total_cmp(&a.rate).then(a.offset.cmp(&b.offset)));
        let mut together = 0.0;
        let mut chosen = Vec::new();
        let room = CANDIDATES_MAX.saturating_sub(self.spots.len());
        for spot in candidates.into_iter().take(room) {
            if together + spot.rate <= wanted * 3.0 {
                together += spot.rate;
                chosen.push(spot.clone());
            }
        }
        // Too little to be felt is only noise.
        if together < wanted * 0.3 {
            Vec::new()
        } else {
            chosen
        }
    }

    /// The rates of busy places are known roughly: measures them together and leaves out what is too much.
    fn fit_burden(&mut self, points: usize) -> Result<(), String> {
        let slow: Vec<usize> = (points..self.spots.len()).collect();
        if slow.is_empty() {
            return Ok(());
        }
        let rates = self.count(&slow, BURDEN_TIME, BURDEN_PAY)?;
        let wanted = BURDEN * self.cpus.max(0.02) / HIT_COST;
        let mut together = 0.0;
        let mut fits: Vec<Spot> = Vec::new();
        let slowing = self.spots.split_off(points);
        for (mut spot, rate) in slowing.into_iter().zip(rates) {
            if together + rate <= wanted * 1.3 {
                together += rate;
                spot.rate = rate;
                fits.push(spot);
            }
        }
        // Too little to be felt is only noise.
        if together >= wanted * 0.3 {
            self.spots.extend(fits);
        }
        Ok(())
    }
}

fn point(spot: &Spot) -> Point {
    Point {
        function: spot.function,
        kind: spot.candidate.kind.into(),
        coverage: spot.coverage,
        waits: spot.candidate.waits,
        counts: Vec::new(),
    }
}
