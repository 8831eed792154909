//! The recent past of one workload: what was measured in each interval, bounded in time.

use crate::strategy::Load;
use homeostat_model::{MeterId, Nanoseconds, SpanHistogram, Spans};
use std::collections::{BTreeMap, VecDeque};

/// Most intervals kept; with one-second samples about twenty minutes.
const INTERVALS_MAX: usize = 1500;
/// Span over which the present load is judged.
pub(crate) const LOAD_SPAN: Nanoseconds = Nanoseconds::from_secs(30);
/// A machine is used up when less than this share of its CPU time is idle.
const MACHINE_IDLE_MIN: f64 = 0.05;
/// … and a workload is what uses it up when it takes at least this share of its CPUs.
const MACHINE_SHARE_MIN: f64 = 0.25;
/// A program that keeps n threads runnable all the time shows n CPUs of running and waiting to run; this far off
/// still counts. More would take an offered load of about n CPUs for one: then nothing that saves CPU time shows in
/// its work per second, while one that is saturated all the same shows in its work per CPU second what it gains.
const WHOLE_CPU_SLACK: f64 = 0.03;

/// Samples come on a beat, but not on the microsecond: an edge that is missed by less than this counts as met.
pub(crate) const EDGE_TOLERANCE: Nanoseconds = Nanoseconds::from_millis(100);

/// What was measured between two samples.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Interval {
    /// End of the interval.
    pub(crate) end: Nanoseconds,
    /// Its length in seconds.
    pub(crate) seconds: f64,
    /// CPU seconds used.
    pub(crate) cpu: f64,
    /// Seconds its threads waited for a CPU.
    pub(crate) wait: f64,
    /// Share of the machine's CPU time that was idle.
    pub(crate) machine_idle: f64,
    /// Processes that came or went.
    pub(crate) churn: u32,
    /// Minor and major page faults.
    pub(crate) faults: (u64, u64),
    /// Work by meter: counts and the seconds over which they were counted.
    pub(crate) work: BTreeMap<MeterId, (f64, f64)>,
    /// Share of the CPU time in which that was really counted, of meters that count in turns; of others it is 1.
    pub(crate) counted: BTreeMap<MeterId, f64>,
    /// How long before its end some of that may have been counted; of others nothing was.
    pub(crate) lags: BTreeMap<MeterId, Nanoseconds>,
    /// Spans of its threads from wait to wait, where they are followed.
    pub(crate) spans: Option<Spans>,
}

impl Interval {
    fn start(&self) -> Nanoseconds {
        self.end.saturating_sub(Nanoseconds::from_secs_f64(self.seconds))
    }

    /// What the meter told of it alone.
    pub(crate) fn sums(&self, meter: &MeterId) -> Option<Sums> {
        let mut sums = Sums::default();
        sums.add(self, meter).then_some(sums)
    }
}

/// The recent past.
#[derive(Clone, Debug, Default)]
pub(crate) struct Series {
    intervals: VecDeque<Interval>,
    /// How late meters told by their last readings, also where these are forgotten: a neighbour's meter is read while something is tried.
    lags: BTreeMap<MeterId, Nanoseconds>,
}

/// Sums over a span of time.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Sums {
    pub(crate) seconds: f64,
    pub(crate) cpu: f64,
    pub(crate) work: f64,
    /// Seconds over which work was counted.
    pub(crate) work_seconds: f64,
    pub(crate) intervals: usize,
    /// When the first of the intervals began; nothing without any.
    pub(crate) from: Option<Nanoseconds>,
}

impl Sums {
    /// Adds an interval if it carries a reading of the meter; whether it does.
    fn add(&mut self, i: &Interval, meter: &MeterId) -> bool {
        let Some((work, seconds)) = i.work.get(meter) else {
            return false;
        };
        self.seconds += i.seconds;
        self.cpu += i.cpu;
        self.work += work;
        self.work_seconds += seconds;
        self.intervals += 1;
        self.from.get_or_insert(i.start());
        true
    }
}

/// Spans over a span of time.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct SpanSums {
    /// What was measured in the intervals in which they were followed and the meter counted.
    pub(crate) sums: Sums,
    pub(crate) histogram: SpanHistogram,
    /// How many there were, with those that were not recorded.
    pub(crate) number: f64,
}

impl Series {
    pub(crate) fn push(&mut self, interval: Interval) {
        for meter in interval.work.keys() {
            match interval.lags.get(meter) {
                Some(lag) => self.lags.insert(meter.clone(), *lag),
                None => self.lags.remove(meter),
            };
        }
        if self.intervals.len() == INTERVALS_MAX {
            self.intervals.pop_front();
        }
        self.intervals.push_back(interval);
    }

    /// Drops what ended before `before`.
    pub(crate) fn forget(&mut self, before: Nanoseconds) {
        while self.intervals.front().is_some_and(|i| i.end < before) {
            self.intervals.pop_front();
        }
    }

    pub(crate) fn clear(&mut self) {
        self.intervals.clear();
        self.lags.clear();
    }

    /// Intervals that ended after `since`, oldest first.
    pub(crate) fn since(&self, since: Nanoseconds) -> impl Iterator<Item = &Interval> {
        let first = self.intervals.partition_point(|i| i.end <= since);
        self.intervals.range(first..)
    }

    /// Intervals that carry a reading of the meter, ended after `since`, oldest first: (work, seconds, cpu).
    pub(crate) fn readings(&self, meter: &MeterId, since: Nanoseconds) -> Vec<(f64, f64, f64)> {
        self.since(since)
            .filter_map(|i| i.work.get(meter).map(|w| (w.0, w.1, i.cpu)))
            .collect()
    }

    /// Share of the CPU time in which the meter really counted since `since`, 0..1: the mean over its readings by their CPU time.
    pub(crate) fn counted(&self, meter: &MeterId, since: Nanoseconds) -> f64 {
        let (mut cpu, mut counted) = (0.0, 0.0);
        for i in self.since(since).filter(|i| i.work.contains_key(meter)) {
            cpu += i.cpu;
            counted += i.cpu * i.counted.get(meter).copied().unwrap_or(1.0);
        }
        if cpu > 0.0 { counted / cpu } else { 1.0 }
    }

    /// Of the work that the meter told since `since`, what was really counted.
    pub(crate) fn hits(&self, meter: &MeterId, since: Nanoseconds) -> f64 {
        let of = |i: &Interval| {
            let (work, _) = i.work.get(meter)?;
            Some(work * i.counted.get(meter).copied().unwrap_or(1.0))
        };
        self.since(since).filter_map(of).sum()
    }

    /// How long before it ended some of what a reading of the meter tells may have been counted, by the last one.
    pub(crate) fn lag(&self, meter: &MeterId) -> Nanoseconds {
        self.lags.get(meter).copied().unwrap_or_default()
    }

    /// Sums over the intervals that lie wholly within `from..=to` and carry a reading of the meter.
    ///
    /// Starts are allowed [`EDGE_TOLERANCE`].
    pub(crate) fn sums(&self, meter: &MeterId, from: Nanoseconds, to: Nanoseconds) -> Sums {
        let mut sums = Sums::default();
        for i in self.within(from, to) {
            sums.add(i, meter);
        }
        sums
    }

    /// The same over those of them in which its spans were followed, with the spans.
    pub(crate) fn spans(&self, meter: &MeterId, from: Nanoseconds, to: Nanoseconds) -> SpanSums {
        let mut all = SpanSums::default();
        for i in self.within(from, to) {
            if let Some(spans) = &i.spans {
                if all.sums.add(i, meter) {
                    all.histogram.add_spans(spans);
                    all.number += spans.number(i.cpu);
                }
            }
        }
        all
    }

    /// Intervals that lie wholly within `from..=to`; starts are allowed [`EDGE_TOLERANCE`].
    fn within(&self, from: Nanoseconds, to: Nanoseconds) -> impl Iterator<Item = &Interval> {
        self.since(from.saturating_sub(EDGE_TOLERANCE))
            .filter(move |i| i.start() + EDGE_TOLERANCE >= from && i.end <= to)
    }

    /// The load over the last half minute.
    ///
    /// *Saturated* means that the program would do more work if it got faster: it keeps a whole number of threads
    /// runnable all the time, or it is what uses the machine up. Otherwise its work is limited by what is offered
    /// to it, work per second would not move, and CPU time per unit of work judges.
    pub(crate) fn load(&self, now: Nanoseconds, machine_cpus: usize) -> Load {
        let mut seconds = 0.0;
        let mut cpu = 0.0;
        let mut wait = 0.0;
        let mut idle = 0.0;
        let mut churn = 0.0;
        for i in self.since(now.saturating_sub(LOAD_SPAN)) {
            seconds += i.seconds;
            cpu += i.cpu;
            wait += i.wait;
            idle += i.machine_idle * i.seconds;
            churn += f64::from(i.churn);
        }
        if seconds <= 0.0 {
            return Load::default();
        }
        let cpus = cpu / seconds;
        let demand = (cpu + wait) / seconds;
        let machine_used_up =
            idle / seconds < MACHINE_IDLE_MIN && cpus >= MACHINE_SHARE_MIN * machine_cpus as f64;
        Load {
            known: true,
            cpus,
            runqueue_wait: if cpu > 0.0 { wait / cpu } else { 0.0 },
            saturated: keeps_threads_busy(demand, Some(machine_cpus)) || machine_used_up,
            churn: churn / seconds,
        }
    }
}

/// Whether a program that runs and waits to run on so many CPUs keeps a whole number of threads runnable all the time: a few, since with
/// many any number is nearly whole, or as many as the machine has CPUs.
pub(crate) fn keeps_threads_busy(demand: f64, machine_cpus: Option<usize>) -> bool {
    let whole = demand.round();
    whole >= 1.0
        && (whole - demand).abs() <= WHOLE_CPU_SLACK * whole
        && (whole <= 4.0 || machine_cpus.is_some_and(|cpus| whole as usize >= cpus))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn series(cpus: f64, idle: f64) -> Series {
        let mut s = Series::default();
        for t in 1..=40u64 {
            s.push(Interval {
                end: Nanoseconds::from_secs(t),
                seconds: 1.0,
                cpu: cpus,
                wait: 0.0,
                machine_idle: idle,
                churn: 0,
                faults: (0, 0),
                work: BTreeMap::from([(MeterId::new("m"), (100.0, 1.0))]),
                counted: BTreeMap::new(),
                lags: BTreeMap::new(),
                spans: None,
            });
        }
        s
    }

    #[test]
    fn one_busy_thread_is_saturated_and_a_half_busy_one_is_not() {
        let now = Nanoseconds::from_secs(40);
        assert!(series(0.98, 0.5).load(now, 8).saturated);
        assert!(!series(0.5, 0.5).load(now, 8).saturated);
        assert!(!series(0.17, 0.5).load(now, 8).saturated);
        assert!(series(0.5, 0.01).load(now, 2).saturated, "no idle CPU is left");
        assert!(
            !series(0.1, 0.01).load(now, 2).saturated,
            "others use the machine up"
        );
        assert!(
            !series(5.1, 0.5).load(now, 16).saturated,
            "five of sixteen may be chance"
        );
    }

    #[test]
    fn sums_take_whole_intervals_only() {
        let s = series(0.5, 0.5);
        let meter = MeterId::new("m");
        let sums = s.sums(&meter, Nanoseconds::from_secs(10), Nanoseconds::from_secs(15));
        assert_eq!(sums.intervals, 5);
        assert_eq!(sums.work, 500.0);
        assert_eq!(sums.cpu, 2.5);
        let none = s.sums(
            &MeterId::new("other"),
            Nanoseconds::ZERO,
            Nanoseconds::from_secs(99),
        );
        assert_eq!(none, Sums::default());
    }

    #[test]
    fn what_was_really_counted_is_added_up_reading_by_reading() {
        let meter = MeterId::new("m");
        let mut s = Series::default();
        // Ten times the work, a tenth of it counted.
        for (t, work, counted) in [(1, 100.0, Some(0.2)), (2, 1000.0, Some(0.02)), (3, 7.0, None)] {
            s.push(Interval {
                end: Nanoseconds::from_secs(t),
                seconds: 1.0,
                cpu: 1.0,
                work: BTreeMap::from([(meter.clone(), (work, 1.0))]),
                counted: counted.map(|c| (meter.clone(), c)).into_iter().collect(),
                ..Interval::default()
            });
        }
        assert!((s.hits(&meter, Nanoseconds::ZERO) - 47.0).abs() < 1e-9);
        assert!((s.hits(&meter, Nanoseconds::from_secs(2)) - 7.0).abs() < 1e-9);
    }

    #[test]
    fn memory_is_bounded() {
        let mut s = Series::default();
        for t in 0..(INTERVALS_MAX as u64 + 100) {
            s.push(Interval {
                end: Nanoseconds::from_secs(t),
                seconds: 1.0,
                cpu: 0.0,
                wait: 0.0,
                machine_idle: 1.0,
                churn: 0,
                faults: (0, 0),
                work: BTreeMap::new(),
                counted: BTreeMap::new(),
                lags: BTreeMap::new(),
                spans: None,
            });
        }
        assert_eq!(s.intervals.len(), INTERVALS_MAX);
    }
}
