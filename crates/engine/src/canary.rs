//! Readings of the memory canary, and when it is wanted: see `CanaryReading`.

use crate::Engine;
use crate::series::EDGE_TOLERANCE;
use homeostat_model::{Bytes, CanaryReading, Nanoseconds};
use std::collections::VecDeque;

/// Most readings kept: six minutes of four a second.
const READINGS_MAX: usize = 1500;
/// Readings over which CPU use is shown.
const SHOWN: usize = 300;
/// Fewest loads that say how fast memory is: half a second of them.
const LOADS_MIN: u64 = 5000;

/// The readings of one run of the canary.
#[derive(Clone, Debug, Default)]
pub(crate) struct CanaryLog {
    /// End and length of the interval, and the reading.
    readings: VecDeque<(Nanoseconds, Nanoseconds, CanaryReading)>,
}

impl CanaryLog {
    pub(crate) fn push(&mut self, end: Nanoseconds, interval: Nanoseconds, reading: CanaryReading) {
        if self.readings.len() >= READINGS_MAX {
            self.readings.pop_front();
        }
        self.readings.push_back((end, interval, reading));
    }

    /// Its CPU use over the last readings, as a share of one CPU.
    pub(crate) fn cpu(&self) -> f64 {
        let (mut seconds, mut cpu) = (0.0, 0.0);
        for (_, interval, reading) in self.readings.iter().rev().take(SHOWN) {
            seconds += interval.as_secs_f64();
            cpu += reading.cpu.as_secs_f64();
        }
        if seconds > 0.0 { cpu / seconds } else { 0.0 }
    }

    /// Its resident memory.
    pub(crate) fn resident(&self) -> Bytes {
        self.readings.back().map_or(Bytes::ZERO, |(_, _, r)| r.resident)
    }

    /// How fast memory was in the intervals that lie wholly within `from..=to`: the logarithm of loads per CPU second.
    pub(crate) fn speed(&self, from: Nanoseconds, to: Nanoseconds) -> Option<f64> {
        let from = from.saturating_sub(EDGE_TOLERANCE);
        let (mut loads, mut loading) = (0, Nanoseconds::ZERO);
        for (end, interval, reading) in self.readings.iter().rev() {
            if end.saturating_sub(*interval) < from {
                break;
            }
            if *end <= to {
                loads += reading.loads;
                loading += reading.loading;
            }
        }
        let speed = loads as f64 / loading.as_secs_f64();
        (loads >= LOADS_MIN && loading.0 > 0).then(|| speed.ln())
    }
}

/// What homeostat itself uses.
#[derive(Clone, Debug, Default)]
pub(crate) struct OwnCost {
    /// Length of the interval and CPU time in it, in seconds.
    intervals: VecDeque<(f64, f64)>,
    pub(crate) resident: Bytes,
    pub(crate) canary: CanaryLog,
}

impl OwnCost {
    /// CPU use of the daemon over the last readings, as a share of one CPU.
    pub(crate) fn cpu(&self) -> f64 {
        let sums = self
            .intervals
            .iter()
            .fold((0.0, 0.0), |s, o| (s.0 + o.0, s.1 + o.1));
        sums.1 / sums.0
    }
}

/// Whether the canary runs: during trials and probes, but for those that protect a program from a loss of memory.
pub(crate) fn is_wanted(engine: &Engine) -> bool {
    let probes = || engine.guards.all().any(|g| g.looks_at().next().is_some());
    !engine.protects_on_trial() && (!engine.experiments.is_empty() || probes())
}

/// Takes what homeostat used, and the canary's reading. Tells once why there is none.
pub(crate) fn note_own_cost(
    engine: &mut Engine,
    cpu: Nanoseconds,
    resident: Bytes,
    reading: Option<Result<CanaryReading, String>>,
) {
    let interval = engine.machine_interval;
    let own = &mut engine.own;
    if own.intervals.len() >= SHOWN {
        own.intervals.pop_front();
    }
    own.intervals
        .push_back((interval.as_secs_f64(), cpu.as_secs_f64()));
    own.resident = resident;
    let now = engine.now;
    for e in engine.experiments.values_mut() {
        e.beside.own_cpu += cpu;
    }
    let trials = engine.experiments.values_mut().map(|e| &mut e.beside.canary);
    let logs = trials.chain([&mut own.canary]);
    match reading {
        Some(Ok(reading)) => logs.for_each(|log| log.push(now, interval, reading)),
        Some(Err(why)) => {
            logs.for_each(|log| log.readings.clear());
            engine.tell_host(format!("no memory canary: {why}; trials go on without it"), false);
        }
        None => logs.for_each(|log| log.readings.clear()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn speed_is_that_of_whole_intervals() {
        let mut log = CanaryLog::default();
        let quarter = Nanoseconds::from_millis(250);
        for index in 1..=40u64 {
            let reading = CanaryReading {
                loads: 2500,
                // Memory gets slower after five seconds.
                loading: Nanoseconds(2500 * if index <= 20 { 100 } else { 200 }),
                cpu: Nanoseconds::from_millis(1),
                resident: Bytes::from_mib(66),
            };
            log.push(quarter * index, quarter, reading);
        }
        let seconds = |from, to| log.speed(Nanoseconds::from_secs(from), Nanoseconds::from_secs(to));
        let slower = seconds(2, 3).zip(seconds(7, 8)).map(|(fast, slow)| fast - slow);
        assert!((slower.unwrap_or(0.0) - 2f64.ln()).abs() < 1e-9);
        assert_eq!(seconds(7, 7), None, "too few loads");
        assert_eq!(seconds(11, 12), None);
        assert!((log.cpu() - 0.004).abs() < 1e-9);
        assert_eq!(log.resident(), Bytes::from_mib(66));
    }
}
