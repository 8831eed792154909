//! Estimates the work between two readings from hits that were counted for part of the time.
//!
//! CPU time is always known, hits only while probes are attached. A ratio estimate applies the counted rate per CPU
//! second to the rest. Load moves the CPU time too, so the error is mainly the variation of CPU time per unit of work.
//!
//! * Counts between two readings apply to that time only, so no block of an experiment informs the next.
//! * The rate excludes the time of hits, also of the witness: `hits + hits ÷ (CPU while counted − hits of both × cost
//!   of a hit) × CPU of the rest`. The rest excludes hits during attach and detach. Otherwise work at a 3 % counting
//!   cost would read 3 % low, and a gain a hundredth of that.
//! * The bias is of the order of the relative variance: below 0.1 % where the noise is below 3 %.
//! * If hardly any CPU time was counted, there is no reading, rather than a reading of zero.
//!
//! Windows seconds apart also represent the time until the next one, by the number of waits
//! ([`calibration`](crate::turns::calibration)) or at the last rate ([`LastWindow`]). Comparisons drop it.

use crate::turns::calibration::{Calibration, Waited};
use crate::turns::schedule::TURN;

/// Share of the planned CPU time that must be counted.
const ENOUGH: f64 = 0.25;
/// Less CPU time than this (seconds) counts as none.
const NO_CPU: f64 = 0.0005;
/// Largest share of the counted time that probes can have taken: the rest is the program's.
pub(crate) const TAKEN_MAX: f64 = 0.5;

#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Moment {
    /// Seconds since a fixed moment.
    pub(crate) at: f64,
    /// CPU seconds of the program since then.
    pub(crate) cpu: f64,
    /// Hits of the site since then.
    pub(crate) hits: u64,
    /// … and of its witness, which cost as much each and do not count as work.
    pub(crate) witnessed: u64,
    /// Number of waits of its threads since then, if asked and known.
    pub(crate) waited: Option<Waited>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Piece {
    seconds: f64,
    cpu: f64,
    hits: u64,
    witnessed: u64,
    waits: f64,
    /// The number of waits is unknown for a part of it.
    blind: bool,
}

impl Piece {
    fn add(&mut self, from: &Moment, to: &Moment) {
        self.seconds += (to.at - from.at).max(0.0);
        self.cpu += (to.cpu - from.cpu).max(0.0);
        self.hits = self.hits.saturating_add(to.hits.saturating_sub(from.hits));
        self.witnessed = self
            .witnessed
            .saturating_add(to.witnessed.saturating_sub(from.witnessed));
        match (from.waited, to.waited) {
            (Some(from), Some(to)) => self.waits += (to.waits - from.waits).max(0.0),
            _ => self.blind = true,
        }
    }

    /// CPU time without the time of hits, at this cost each (seconds).
    fn own(&self, hit_cost: f64) -> f64 {
        let taken = (self.hits as f64 + self.witnessed as f64) * hit_cost;
        (self.cpu - taken).max(TAKEN_MAX * self.cpu)
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Told {
    /// Cumulative work, in hits. Never decreases.
    pub(crate) work: f64,
    /// Share of the CPU time since the last reading that was counted. `None`: too little, so a new period begins here.
    pub(crate) share: Option<f64>,
}

#[derive(Clone, Debug)]
pub(crate) struct Ledger {
    /// Seconds of CPU time.
    hit_cost: f64,
    on: bool,
    last: Moment,
    counted: Piece,
    passed: Piece,
    work: f64,
    /// Planned share of the time.
    wanted: f64,
    /// Some activity since the last reading was not counted while probes were attached.
    lacking: bool,
    rest: Rest,
}

/// Basis for estimating the uncounted work.
#[derive(Clone, Debug)]
enum Rest {
    /// Counts between the same two readings.
    SameReading,
    LastWindow(LastWindow),
    Waits(ByWaits),
}

#[derive(Clone, Debug)]
struct ByWaits {
    calibration: Calibration,
    /// Number of waits at the start of the window, and its time.
    begun: Option<(Waited, f64)>,
}

/// The rate of the last valid window.
#[derive(Clone, Debug)]
struct LastWindow {
    /// How long the rate stays valid after its window (seconds).
    speaks: f64,
    begun: Option<Moment>,
    /// End of the last window, valid or not.
    ended: Option<Moment>,
    /// Hits per second of the program's CPU time without hits, and the end of that window.
    known: Option<(f64, f64)>,
}

impl LastWindow {
    /// Ends a window with this planned share of CPU time.
    fn window(&mut self, now: &Moment, wanted: f64, hit_cost: f64) {
        let (begun, ended) = (self.begun.take(), self.ended.replace(*now));
        let Some(begun) = begun else {
            return;
        };
        let mut piece = Piece::default();
        piece.add(&begun, now);
        // CPUs in use, since the last window if there is one, because that period is longer.
        let since = ended.unwrap_or(begun);
        let cpus = (now.cpu - since.cpu).max(0.0) / (now.at - since.at).max(1e-6);
        // A window in which the program was idle shows nothing.
        if piece.cpu >= NO_CPU && piece.cpu >= ENOUGH * wanted * cpus * TURN {
            self.known = Some((piece.hits as f64 / piece.own(hit_cost), now.at));
        }
    }

    /// The current rate, if a recent window gives one.
    fn rate(&self, now: f64) -> Option<f64> {
        let (rate, at) = self.known?;
        (now - at <= self.speaks).then_some(rate)
    }
}

impl Ledger {
    pub(crate) fn new(hit_cost: f64) -> Self {
        Self {
            hit_cost,
            on: false,
            last: Moment::default(),
            counted: Piece::default(),
            passed: Piece::default(),
            work: 0.0,
            wanted: 1.0,
            lacking: false,
            rest: Rest::SameReading,
        }
    }

    /// For windows seconds apart, with the last one as the basis. It stays valid for `speaks` seconds.
    pub(crate) fn by_last_window(hit_cost: f64, speaks: f64) -> Self {
        Self {
            rest: Rest::LastWindow(LastWindow {
                speaks,
                begun: None,
                ended: None,
                known: None,
            }),
            ..Self::new(hit_cost)
        }
    }

    /// For waits as the basis. A window stays valid for `speaks` seconds.
    pub(crate) fn by_waits(hit_cost: f64, speaks: f64) -> Self {
        Self {
            rest: Rest::Waits(ByWaits {
                calibration: Calibration::new(speaks),
                begun: None,
            }),
            ..Self::new(hit_cost)
        }
    }

    /// Sets the cost of a hit in the ending window (seconds of CPU time). A reading has used the older cost for its
    /// part.
    pub(crate) fn costs(&mut self, hit_cost: f64) {
        self.hit_cost = hit_cost;
    }

    pub(crate) fn is_on(&self) -> bool {
        self.on
    }

    pub(crate) fn is_by_waits(&self) -> bool {
        matches!(self.rest, Rest::Waits(_))
    }

    /// Whether each reading has its own window and uses only that.
    pub(crate) fn is_by_reading(&self) -> bool {
        matches!(self.rest, Rest::SameReading)
    }

    /// Whether the next moment needs the number of waits: not in continuous counting.
    pub(crate) fn asks_for_waits(&self) -> bool {
        self.is_by_waits() && self.wanted < 1.0
    }

    /// Whether waits can be the basis, by the windows so far.
    ///
    /// # Errors
    /// A sentence: they cannot.
    pub(crate) fn judge_waits(&self) -> Result<(), String> {
        match &self.rest {
            Rest::Waits(waits) => waits.calibration.judge(),
            Rest::SameReading | Rest::LastWindow(_) => Ok(()),
        }
    }

    /// Excuses windows with few hits: the program was idle, or windows are growing.
    pub(crate) fn excuse(&mut self) {
        if let Rest::Waits(waits) = &mut self.rest {
            waits.calibration.excuse();
        }
    }

    fn advance(&mut self, mut now: Moment) {
        if let (Some(before), Some(waited)) = (self.last.waited, &mut now.waited) {
            // A thread that read first may report last.
            waited.waits = waited.waits.max(before.waits);
        }
        if now.waited.is_none() {
            if let Rest::Waits(waits) = &mut self.rest {
                // The window would lack waits that were unknown for a moment.
                waits.begun = None;
            }
        }
        if self.on {
            self.counted.add(&self.last, &now);
        } else {
            self.passed.add(&self.last, &now);
        }
        self.last = now;
    }

    /// Switches counting on or off, with this planned share of CPU time.
    pub(crate) fn switch(&mut self, on: bool, wanted: f64, now: Moment) {
        self.advance(now);
        match &mut self.rest {
            Rest::SameReading => {}
            Rest::LastWindow(last) => {
                // A continuous window counts as one window per turn.
                if self.on {
                    last.window(&now, self.wanted, self.hit_cost);
                }
                if on {
                    last.begun = Some(now);
                }
            }
            Rest::Waits(waits) => {
                let here = now.waited.map(|waited| (waited, now.at));
                if on && !self.on {
                    waits.begun = here;
                } else if self.on {
                    if let Some((begun, ended)) = waits.begun.take().zip(here) {
                        waits.calibration.window(begun, ended);
                    }
                }
            }
        }
        self.on = on;
        self.wanted = wanted;
    }

    /// Discards the period since the last reading, for example because nothing could be counted.
    pub(crate) fn forget(&mut self, now: Moment) {
        self.advance(now);
        self.counted = Piece::default();
        self.passed = Piece::default();
        self.lacking = false;
        if let Rest::LastWindow(last) = &mut self.rest {
            last.begun = last.begun.map(|_| now);
        }
    }

    /// Some activity was not counted: the next reading is void, and the following period begins there.
    pub(crate) fn lack(&mut self) {
        self.lacking = true;
        match &mut self.rest {
            Rest::SameReading => {}
            Rest::LastWindow(last) => last.begun = None,
            Rest::Waits(waits) => waits.begun = None,
        }
    }

    /// Takes a reading. The next period begins here.
    pub(crate) fn read(&mut self, now: Moment) -> Told {
        self.advance(now);
        let counted = std::mem::take(&mut self.counted);
        let passed = std::mem::take(&mut self.passed);
        let lacking = std::mem::take(&mut self.lacking);
        let told = self.between(&counted, &passed).filter(|_| !lacking);
        let share = told.map(|(work, share)| {
            self.work += work.max(0.0);
            share
        });
        Told {
            work: self.work,
            share,
        }
    }

    /// Work and counted share between two readings.
    fn between(&self, counted: &Piece, passed: &Piece) -> Option<(f64, f64)> {
        let hits = counted.hits as f64;
        if passed.seconds <= 0.0 {
            // Exact.
            return Some((hits, 1.0));
        }
        let cpu = counted.cpu + passed.cpu;
        let seconds = counted.seconds + passed.seconds;
        if cpu < NO_CPU && hits == 0.0 {
            // Without CPU time, no work was done.
            return Some((0.0, 1.0));
        }
        let share = if cpu > 0.0 { counted.cpu / cpu } else { 0.0 };
        match &self.rest {
            Rest::SameReading => {}
            Rest::LastWindow(last) => {
                let rate = last.rate(self.last.at)?;
                return Some((hits + rate * passed.own(self.hit_cost), share));
            }
            Rest::Waits(waits) => {
                let ratio = waits.calibration.hits_per_wait(self.last.at)?;
                return (!passed.blind).then_some((hits + ratio * passed.waits, share));
            }
        }
        if counted.cpu < NO_CPU && hits > 0.0 {
            // Processes that are not known yet did the work, so their CPU time is unknown: estimate by the clock.
            let share = (counted.seconds / seconds).clamp(0.0, 1.0);
            return (share >= ENOUGH * self.wanted).then(|| (hits / share.max(1e-6), share));
        }
        if counted.cpu < NO_CPU || counted.cpu < ENOUGH * self.wanted * cpu {
            return None;
        }
        // Attach and detach cause hits in the uncounted time, too.
        let rate = hits / counted.own(self.hit_cost);
        Some((hits + rate * passed.own(self.hit_cost), share))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(at: f64, cpu: f64, hits: u64) -> Moment {
        Moment {
            at,
            cpu,
            hits,
            witnessed: 0,
            waited: None,
        }
    }

    #[test]
    fn what_is_counted_all_the_time_is_told_to_the_hit() {
        let mut ledger = Ledger::new(1e-6);
        ledger.switch(true, 1.0, at(0.0, 0.0, 0));
        ledger.forget(at(0.5, 0.1, 70));
        assert_eq!(
            ledger.read(at(1.0, 0.2, 77)),
            Told {
                work: 7.0,
                share: Some(1.0)
            }
        );
        // Also of a program that has used no CPU time that anybody knows of.
        assert_eq!(ledger.read(at(2.0, 0.2, 78)).work, 8.0);
    }

    #[test]
    fn the_rest_is_taken_to_go_on_at_the_rate_per_cpu_second() {
        let mut ledger = Ledger::new(0.0);
        ledger.switch(false, 0.2, at(0.0, 0.0, 0));
        ledger.switch(true, 0.2, at(0.3, 0.3, 0));
        ledger.switch(false, 0.2, at(0.5, 0.5, 2_000));
        // It used twice the CPU time after it was counted.
        let told = ledger.read(at(1.0, 1.5, 2_000));
        assert!((told.work - 15_000.0).abs() < 1e-6, "{told:?}");
        assert!((told.share.unwrap() - 0.2 / 1.5).abs() < 1e-9);
    }

    #[test]
    fn what_the_probes_took_is_not_the_programs() {
        // 20 µs of CPU time for a unit, and 1 µs more while it is counted.
        let mut ledger = Ledger::new(1e-6);
        ledger.switch(true, 0.2, at(0.0, 0.0, 0));
        ledger.switch(false, 0.2, at(0.21, 0.21, 10_000));
        let told = ledger.read(at(1.01, 1.01, 10_000));
        assert!((told.work - 50_000.0).abs() < 1e-6, "{told:?}");
    }

    #[test]
    fn what_the_witness_took_is_not_the_programs_either() {
        // 20 µs of CPU time for a unit, and while it is counted 1 µs more for itself and 1 µs for each of three hits of its witness.
        let mut ledger = Ledger::new(1e-6);
        ledger.switch(true, 0.2, at(0.0, 0.0, 0));
        let end = Moment {
            witnessed: 30_000,
            ..at(0.24, 0.24, 10_000)
        };
        ledger.switch(false, 0.2, end);
        let told = ledger.read(Moment {
            at: 1.04,
            cpu: 1.04,
            ..end
        });
        assert!((told.work - 50_000.0).abs() < 1e-6, "{told:?}");
        // They are hits of the window, not of all time.
        ledger.switch(
            true,
            0.2,
            Moment {
                at: 2.0,
                cpu: 2.0,
                ..end
            },
        );
        let end = Moment {
            witnessed: 60_000,
            ..at(2.24, 2.24, 20_000)
        };
        ledger.switch(false, 0.2, end);
        let told = ledger.read(Moment {
            at: 3.04,
            cpu: 3.04,
            ..end
        });
        // 10,000 in the window, and 2 − .24 s of rest at 50,000 a second.
        assert!((told.work - 50_000.0 - 98_000.0).abs() < 1e-6, "{told:?}");
    }

    #[test]
    fn what_is_hit_while_the_probes_come_and_go_is_taken_off_the_rest() {
        // 20 µs for a unit; 1 µs more for each hit, in the window and for 50 ms before and after it.
        let mut ledger = Ledger::new(1e-6);
        ledger.switch(false, 0.2, at(0.0, 0.0, 0));
        ledger.switch(true, 0.2, at(0.0525, 0.0525, 2_500));
        ledger.switch(false, 0.2, at(0.2625, 0.2625, 12_500));
        let told = ledger.read(at(1.0625, 1.0625, 15_000));
        // 10,000 of the window, and .8525 s of the rest less the 5 ms that 5,000 hits took, at 50,000 a second.
        assert!((told.work - 10_000.0 - 42_375.0).abs() < 1e-6, "{told:?}");
    }

    #[test]
    fn the_price_of_a_window_is_known_at_its_end() {
        let mut ledger = Ledger::new(9e-6);
        ledger.switch(true, 0.2, at(0.0, 0.0, 0));
        ledger.costs(1e-6);
        ledger.switch(false, 0.2, at(0.21, 0.21, 10_000));
        assert!((ledger.read(at(1.01, 1.01, 10_000)).work - 50_000.0).abs() < 1e-6);
    }

    #[test]
    fn a_window_speaks_for_the_time_between_two_readings_only() {
        let mut ledger = Ledger::new(0.0);
        ledger.switch(true, 0.2, at(0.0, 0.0, 0));
        ledger.switch(false, 0.2, at(0.2, 0.2, 200));
        assert!((ledger.read(at(1.0, 1.0, 200)).work - 1_000.0).abs() < 1e-9);
        // No window: no reading, and the work stays where it was.
        let none = ledger.read(at(2.0, 2.0, 200));
        assert_eq!((none.work.round(), none.share), (1_000.0, None));
        // Twice as fast now; a reading in the middle of a window divides it.
        ledger.switch(true, 0.2, at(2.5, 2.5, 200));
        assert!((ledger.read(at(2.7, 2.7, 600)).work - 2_400.0).abs() < 1e-6);
        ledger.switch(false, 0.2, at(2.8, 2.8, 800));
        let told = ledger.read(at(3.2, 3.2, 800));
        assert!((told.work - 3_400.0).abs() < 1e-6, "{told:?}");
    }

    #[test]
    fn time_in_which_not_all_was_counted_tells_nothing_not_even_that_less_was_done() {
        let mut ledger = Ledger::new(0.0);
        // All the time, and in turns.
        ledger.switch(true, 1.0, at(0.0, 0.0, 0));
        assert_eq!(ledger.read(at(1.0, 1.0, 100)).work, 100.0);
        ledger.lack();
        let told = ledger.read(at(2.0, 2.0, 150));
        assert_eq!((told.work, told.share), (100.0, None));
        assert_eq!(ledger.read(at(3.0, 3.0, 250)).work, 200.0);
        ledger.switch(false, 0.5, at(3.0, 3.0, 250));
        ledger.switch(true, 0.5, at(3.2, 3.2, 250));
        ledger.lack();
        ledger.switch(false, 0.5, at(3.7, 3.7, 260));
        assert_eq!(ledger.read(at(4.0, 4.0, 260)).share, None);
        // What is forgotten anyway lacks nothing.
        ledger.lack();
        ledger.forget(at(5.0, 5.0, 260));
        ledger.switch(true, 0.5, at(5.0, 5.0, 260));
        assert_eq!(ledger.read(at(6.0, 6.0, 360)).work, 300.0);
    }

    #[test]
    fn a_window_that_has_missed_the_work_says_nothing_and_an_idle_program_did_nothing() {
        let mut ledger = Ledger::new(0.0);
        ledger.switch(true, 0.2, at(0.0, 0.0, 0));
        ledger.switch(false, 0.2, at(0.2, 0.001, 1));
        assert_eq!(ledger.read(at(1.0, 0.5, 1)).share, None);
        assert_eq!(
            ledger.read(at(2.0, 0.5, 1)),
            Told {
                work: 0.0,
                share: Some(1.0)
            }
        );
    }

    #[test]
    fn hits_of_processes_that_nobody_knows_are_told_by_the_clock() {
        let mut ledger = Ledger::new(0.0);
        ledger.switch(true, 0.25, at(0.0, 0.0, 0));
        ledger.switch(false, 0.25, at(0.25, 0.0, 50));
        let told = ledger.read(at(1.0, 0.0, 50));
        assert_eq!((told.work, told.share), (200.0, Some(0.25)));
    }

    /// Windows of 25 ms some seconds apart; the program uses a CPU for itself, of which a unit takes 20 µs, and a hit 1 µs.
    #[test]
    fn the_last_window_tells_the_rest_for_a_while() {
        let mut ledger = Ledger::by_last_window(1e-6, 5.0);
        ledger.switch(true, 0.025, at(0.0, 0.0, 0));
        ledger.forget(at(0.0, 0.0, 0));
        // A reading divides the first window, in which all was counted.
        assert_eq!(ledger.read(at(0.01, 0.0105, 500)).share, Some(1.0));
        ledger.switch(false, 0.025, at(0.02625, 0.02625, 1_250));
        let mut before = ledger.read(at(1.0, 1.0, 1_250)).work;
        for second in 2..=4 {
            let told = ledger.read(at(f64::from(second), f64::from(second), 1_250));
            assert!((told.work - before - 50_000.0).abs() < 1e-6, "{told:?}");
            assert_eq!(told.share, Some(0.0));
            before = told.work;
        }
        // Half as much is done from then on; what a window shows is told from the reading that follows it.
        ledger.switch(true, 0.025, at(4.5, 4.5, 1_250));
        ledger.switch(false, 0.025, at(4.525_625, 4.525_625, 1_875));
        let told = ledger.read(at(5.0, 5.0, 1_875));
        // Of the second 0.625 ms were the hits'.
        assert!((told.work - before - 24_984.375).abs() < 1e-6, "{told:?}");
        assert!(told.share.is_some_and(|share| share > 0.02 && share < 0.03));
        // It speaks for five seconds.
        for second in 6..=9 {
            let now = f64::from(second);
            assert!(ledger.read(at(now, now, 1_875)).share.is_some(), "{second}");
        }
        assert_eq!(ledger.read(at(10.0, 10.0, 1_875)).share, None);
    }

    #[test]
    fn a_window_in_which_the_program_rested_or_something_lacked_changes_no_rate() {
        let windows = |cpu: f64, lacks: bool| {
            let mut ledger = Ledger::by_last_window(0.0, 9.0);
            ledger.switch(true, 0.025, at(0.0, 0.0, 0));
            ledger.switch(false, 0.025, at(0.025, 0.025, 1_000));
            let _ = ledger.read(at(1.0, 1.0, 1_000));
            ledger.switch(true, 0.025, at(4.0, 4.0, 1_000));
            if lacks {
                ledger.lack();
            }
            ledger.switch(false, 0.025, at(4.025, 4.0 + cpu, 1_001));
            let _ = ledger.read(at(5.0, 5.0, 1_001));
            let before = ledger.read(at(6.0, 6.0, 1_001)).work;
            ledger.read(at(7.0, 7.0, 1_001)).work - before
        };
        assert!(
            (windows(0.025, false) - 40.0).abs() < 1e-6,
            "{}",
            windows(0.025, false)
        );
        assert!((windows(0.005, false) - 40_000.0).abs() < 1e-6);
        assert!((windows(0.025, true) - 40_000.0).abs() < 1e-6);
        // One that goes on all the time is as many windows as turns, and the last of them ends in the midst of a turn.
        let mut ledger = Ledger::by_last_window(0.0, 9.0);
        for (at_s, hits) in [(0.0, 0), (1.0, 1_000), (2.0, 3_000)] {
            ledger.switch(true, 1.0, at(at_s, at_s, hits));
        }
        ledger.switch(false, 1.0, at(2.5, 2.5, 5_000));
        let _ = ledger.read(at(3.0, 3.0, 5_000));
        let before = ledger.read(at(4.0, 4.0, 5_000)).work;
        assert!((ledger.read(at(5.0, 5.0, 5_000)).work - before - 4_000.0).abs() < 1e-6);
        // What was done in a pause is not known, nor is what it began with.
        let mut ledger = Ledger::by_last_window(0.0, 9.0);
        ledger.switch(true, 0.025, at(0.0, 0.0, 0));
        ledger.forget(at(3.0, 3.0, 10));
        ledger.switch(false, 0.025, at(3.025, 3.025, 1_010));
        let told = ledger.read(at(4.025, 4.025, 1_010));
        assert!((told.work - 41_000.0).abs() < 1e-6, "{told:?}");
    }

    fn waited(at: f64, cpu: f64, hits: u64, waits: f64) -> Moment {
        Moment {
            waited: Some(Waited {
                waits,
                hits: hits as f64,
                took: 0.001,
            }),
            ..self::at(at, cpu, hits)
        }
    }

    #[test]
    fn the_rest_is_told_by_waits_also_where_no_window_was() {
        let mut ledger = Ledger::by_waits(1e-6, 10.0);
        assert!(ledger.is_by_waits() && !ledger.asks_for_waits() && ledger.judge_waits().is_ok());
        ledger.switch(false, 0.1, waited(0.0, 0.0, 0, 0.0));
        assert!(ledger.asks_for_waits());
        // Nothing was ever counted.
        assert_eq!(ledger.read(waited(1.0, 0.5, 0, 5_000.0)).share, None);
        ledger.switch(true, 0.1, waited(1.2, 0.6, 0, 6_000.0));
        // A reading in the middle of the first window: of it nothing is known yet, all of it tells the ratio.
        assert_eq!(ledger.read(waited(1.25, 0.64, 500, 6_625.0)).share, None);
        ledger.switch(false, 0.1, waited(1.3, 0.68, 1_000, 7_250.0));
        // 8,000 of 10,000 waits: whatever CPU time that took.
        let told = ledger.read(waited(2.25, 2.0, 1_000, 16_000.0));
        assert!((told.work - (500.0 + 0.8 * 8_750.0)).abs() < 1e-6, "{told:?}");
        assert!((told.share.unwrap() - 0.04 / 1.36).abs() < 1e-9);
        // No window: none of the CPU time was counted, and the work is known.
        let told = ledger.read(waited(3.25, 3.0, 1_000, 26_000.0));
        assert!((told.work - (7_500.0 + 8_000.0)).abs() < 1e-6, "{told:?}");
        assert_eq!(told.share, Some(0.0));
        // Idle.
        assert_eq!(ledger.read(waited(4.25, 3.0, 1_000, 26_000.0)).share, Some(1.0));
        // How often it waited is not known of a part of it.
        assert_eq!(ledger.read(at(5.25, 3.5, 1_000)).share, None);
        assert_eq!(ledger.read(waited(6.25, 4.0, 1_000, 46_000.0)).share, None);
        assert_eq!(ledger.read(waited(7.25, 4.5, 1_000, 56_000.0)).share, Some(0.0));
        // The ratio is too old.
        assert_eq!(ledger.read(waited(12.0, 9.0, 1_000, 99_000.0)).share, None);
    }

    #[test]
    fn a_window_that_lacks_something_does_not_tell_the_ratio() {
        let mut ledger = Ledger::by_waits(1e-6, 10.0);
        ledger.switch(true, 0.1, waited(0.0, 0.0, 0, 0.0));
        ledger.switch(false, 0.1, waited(0.1, 0.1, 1_000, 1_000.0));
        ledger.switch(true, 0.1, waited(4.0, 2.0, 1_000, 21_000.0));
        ledger.lack();
        ledger.switch(false, 0.1, waited(4.1, 2.1, 1_100, 22_000.0));
        assert_eq!(ledger.read(waited(5.0, 3.0, 1_100, 32_000.0)).share, None);
        let told = ledger.read(waited(6.0, 4.0, 1_100, 42_000.0));
        assert!(
            (told.work - 10_000.0).abs() < 1e-6,
            "one for each wait still: {told:?}"
        );
        // It does several at one wait now.
        for n in 0..3u32 {
            let (at, hits, waits) = (f64::from(n), u64::from(n) * 2_000, f64::from(n) * 11_000.0);
            assert_eq!(ledger.judge_waits().is_ok(), n < 2, "of three windows two tell");
            ledger.switch(
                true,
                0.1,
                waited(7.0 + at, 5.0 + at, 1_100 + hits, 52_000.0 + waits),
            );
            ledger.switch(
                false,
                0.1,
                waited(7.1 + at, 5.1 + at, 3_100 + hits, 53_000.0 + waits),
            );
            assert_eq!(
                ledger
                    .read(waited(7.5 + at, 5.5 + at, 3_100 + hits, 57_000.0 + waits))
                    .share,
                None
            );
        }
        assert!(ledger.judge_waits().unwrap_err().contains("2.00 times"));
    }

    #[test]
    fn what_is_counted_all_the_time_needs_no_waits() {
        let mut ledger = Ledger::by_waits(1e-6, 10.0);
        ledger.switch(true, 1.0, at(0.0, 0.0, 0));
        let told = ledger.read(at(1.0, 0.5, 900));
        assert_eq!((told.work, told.share), (900.0, Some(1.0)));
    }
}
