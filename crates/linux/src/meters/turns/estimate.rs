//! How much work was done between two readings, of what was counted for a part of the time.
//!
//! The CPU time of a program is known throughout, its hits only while the probes are there. What it did in the rest is taken
//! to have been done at the rate per CPU second that was counted: a ratio estimate. A program that works more while it is not
//! counted uses more CPU time meanwhile, so that most of what moves its work moves nothing here; what is left is how much the CPU
//! time of one unit of work varies, over as many units as were counted.
//!
//! * Whatever was counted between two readings speaks for the time between these two and for no other: what is counted in one
//!   block of an experiment never tells anything of the next.
//! * What the probes themselves took is not in the rate: `hits + hits ÷ (CPU while counted − hits × cost of a hit) × CPU of the
//!   rest`. (Left in, it would make the work of a program that pays 3 % while it is counted 3 % smaller, and its gain by a
//!   hundredth of that.)
//! * The bias of a ratio estimate is of the order of its relative variance: below 0.1 % where its noise is below 3 %.
//! * Where hardly any of the CPU time was counted nothing is told: there is no reading, rather than one of zero.

/// Of the CPU time that should have been counted this share is needed.
const ENOUGH: f64 = 0.25;
/// Less CPU time than this (seconds) is none.
const NO_CPU: f64 = 0.0005;
/// The probes cannot have taken more than this share of the time in which they were counted: the rest is the program's.
const TAKEN_MAX: f64 = 0.5;

/// What the clocks and counters say at a moment.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(in crate::meters) struct Moment {
    /// Seconds since some fixed moment.
    pub(in crate::meters) at: f64,
    /// CPU seconds of the program since then.
    pub(in crate::meters) cpu: f64,
    /// Hits since then.
    pub(in crate::meters) hits: u64,
}

/// A sum of pieces of time.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Piece {
    seconds: f64,
    cpu: f64,
    hits: u64,
}

impl Piece {
    fn add(&mut self, from: &Moment, to: &Moment) {
        self.seconds += (to.at - from.at).max(0.0);
        self.cpu += (to.cpu - from.cpu).max(0.0);
        self.hits = self.hits.saturating_add(to.hits.saturating_sub(from.hits));
    }
}

/// What a reading says.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(in crate::meters) struct Told {
    /// Work up to now, in hits; grows only.
    pub(in crate::meters) work: f64,
    /// Share of the CPU time since the reading before in which it was counted; the rest is estimated. `None`: too small a one to
    /// say anything, so that this reading is where the next begins.
    pub(in crate::meters) share: Option<f64>,
}

/// The books of one meter.
#[derive(Clone, Debug)]
pub(in crate::meters) struct Ledger {
    /// Seconds of CPU time that a hit costs.
    hit_cost: f64,
    on: bool,
    last: Moment,
    counted: Piece,
    passed: Piece,
    work: f64,
    /// The share that is meant to be counted.
    wanted: f64,
    /// Since the last reading not all was counted that ran while it was.
    lacking: bool,
}

impl Ledger {
    pub(in crate::meters) fn new(hit_cost: f64) -> Self {
        Self {
            hit_cost,
            on: false,
            last: Moment::default(),
            counted: Piece::default(),
            passed: Piece::default(),
            work: 0.0,
            wanted: 1.0,
            lacking: false,
        }
    }

    fn advance(&mut self, now: Moment) {
        if self.on {
            self.counted.add(&self.last, &now);
        } else {
            self.passed.add(&self.last, &now);
        }
        self.last = now;
    }

    /// From now on it is counted, or not; so much of the CPU time is meant to be counted.
    pub(in crate::meters) fn switch(&mut self, on: bool, wanted: f64, now: Moment) {
        self.advance(now);
        self.on = on;
        self.wanted = wanted;
    }

    /// What was done since the last reading is not known, for example because nothing could be counted.
    pub(in crate::meters) fn forget(&mut self, now: Moment) {
        self.advance(now);
        self.counted = Piece::default();
        self.passed = Piece::default();
        self.lacking = false;
    }

    /// Not all was counted of what has run while it was counted: the next reading says nothing, and is where the one after begins.
    pub(in crate::meters) fn lack(&mut self) {
        self.lacking = true;
    }

    /// A reading: the next one begins here.
    pub(in crate::meters) fn read(&mut self, now: Moment) -> Told {
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

    /// Work and counted share of what lies between two readings.
    fn between(&self, counted: &Piece, passed: &Piece) -> Option<(f64, f64)> {
        let hits = counted.hits as f64;
        if passed.seconds <= 0.0 {
            // To the hit.
            return Some((hits, 1.0));
        }
        let cpu = counted.cpu + passed.cpu;
        let seconds = counted.seconds + passed.seconds;
        if cpu < NO_CPU && hits == 0.0 {
            // Nothing was done in no time, whether it was counted or not.
            return Some((0.0, 1.0));
        }
        if counted.cpu < NO_CPU && hits > 0.0 {
            // Processes did it that are not known yet, so their CPU time is not either: by the clock.
            let share = (counted.seconds / seconds).clamp(0.0, 1.0);
            return (share >= ENOUGH * self.wanted).then(|| (hits / share.max(1e-6), share));
        }
        if counted.cpu < NO_CPU || counted.cpu < ENOUGH * self.wanted * cpu {
            return None;
        }
        let own = (counted.cpu - hits * self.hit_cost).max(TAKEN_MAX * counted.cpu);
        Some((hits + hits / own * passed.cpu, counted.cpu / cpu))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(at: f64, cpu: f64, hits: u64) -> Moment {
        Moment { at, cpu, hits }
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
}
