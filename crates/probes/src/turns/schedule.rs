//! Sets the share of the time that is counted, and places the window in each turn.

use crate::turns::{CHARGED, TAKEN_MAX};

/// Length of a turn, and the shortest wait of a window for an idle program (seconds).
pub(super) const TURN: f64 = 1.0;
const ON_MIN: f64 = 0.02;
/// A window waits for an idle program up to this multiple of its length, and up to this share of a turn.
const PATIENCE: f64 = 3.0;
const ON_MAX: f64 = 0.7;
/// Lower bound of the CPUs of an idle program.
const CPUS_MIN: f64 = 0.02;
/// The window begins within this share of the turn after the reading, so that it ends before the next reading.
const SPREAD: f64 = 0.5;
/// … and not before this (seconds), because the reader works meanwhile, perhaps on the program's CPU.
const AFTER: f64 = 0.02;
/// Largest factors by which the share of the next turn grows and shrinks.
const STEP_UP: f64 = 2.0;
const STEP_DOWN: f64 = 16.0;
/// Continuous counting becomes sampled after this many turns in a row above the limit …
const TURNS_OVER: u32 = 2;
/// … and continuous again if it would cost no more than this share of the limit.
const BACK: f64 = 0.8;
/// Largest share of sampled counting.
const PART_MAX: f64 = 0.9;
/// The distance of windows is averaged over about this many.
const SPACING_OF: f64 = 8.0;
/// A program that uses fewer CPUs than this is idle.
const RESTS: f64 = 0.002;
/// The next window waits if the debt exceeds the cost of this many windows, which is no chance.
const DEBTS: f64 = 4.0;
/// Windows are too far apart beyond this multiple of their validity: a trial must read six tenths of each block.
const FAR: f64 = 1.4;
/// Fraction of the golden ratio: its multiples leave no gap and never repeat.
const GOLDEN: f64 = 0.618_033_988_749_894_9;

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Share {
    value: f64,
    /// Turns in a row above the limit with continuous counting.
    over: u32,
}

impl Share {
    /// From 1 on, counting is continuous.
    pub(super) fn new(value: f64) -> Self {
        Self {
            value: value.min(1.0),
            over: 0,
        }
    }

    pub(super) fn always(self) -> bool {
        self.value >= 1.0
    }

    pub(super) fn value(self) -> f64 {
        self.value
    }

    /// Changes the value. The thresholds for entering and leaving continuous counting differ.
    pub(super) fn of(self, value: f64) -> Self {
        let always = value * BACK >= 1.0 || (self.always() && value >= 1.0);
        Self::new(if always { 1.0 } else { value.min(PART_MAX) })
    }

    /// The next share, after a turn whose counting cost this share of the CPU time and may cost `limit`. `whole`: the
    /// turn ran to its end.
    pub(super) fn next(self, cost: f64, limit: f64, whole: bool) -> Self {
        let wanted = if cost > 0.0 { limit / cost } else { STEP_UP };
        let value = self.value * wanted.clamp(1.0 / STEP_DOWN, STEP_UP);
        if !self.always() {
            return Self::new(if value * BACK >= 1.0 {
                1.0
            } else {
                value.min(PART_MAX)
            });
        }
        let over = if value < 1.0 { self.over + 1 } else { 0 };
        if over == 0 || (whole && over < TURNS_OVER) {
            Self { value: 1.0, over }
        } else {
            Self::new(value.min(PART_MAX))
        }
    }
}

/// Sets the distance between windows with a minimum length.
///
/// The distance follows running means of cost and CPU use, and hardly depends on the last window. Each window
/// represents the time until the next, so a longer time after a costly one would give it too much weight.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Spacing {
    pub(super) share_min: f64,
    /// Mean cost of a window per turn of its length (seconds of CPU time).
    dear: f64,
    /// Mean CPUs that the program uses from window to window.
    cpus: f64,
    /// Mean charge for hits, as a share of the CPU time of the window.
    while_on: f64,
    cost_max: f64,
    /// How long a window stays valid (seconds).
    speaks: f64,
    /// Start of the last turn, and the CPU time then.
    begun: Option<(f64, f64)>,
    /// CPUs that the program used in the turn before.
    used: Option<f64>,
    /// Debt of the windows (seconds of CPU time) …
    owed: f64,
    /// … repaid up to this CPU time of the program.
    earned: Option<f64>,
}

impl Spacing {
    /// Begins with windows of this share of a turn, at this initial distance (seconds).
    pub(super) fn new((share_min, apart): (f64, f64), cpus: f64, cost_max: f64, speaks: f64) -> Self {
        let cpus = cpus.max(CPUS_MIN);
        Self {
            share_min,
            dear: cost_max * cpus * apart / share_min,
            cpus,
            while_on: 0.0,
            cost_max,
            speaks,
            begun: None,
            used: None,
            owed: 0.0,
            earned: None,
        }
    }

    /// Begins a turn at a moment (seconds), with the CPU time of the program so far.
    pub(super) fn begins(&mut self, at: f64, cpu: f64) {
        let before = self.begun.replace((at, cpu));
        self.used = before.map(|(then, used)| (cpu - used).max(0.0) / (at - then).max(TURN / 20.0));
        self.earn(cpu);
    }

    /// Notes a window's cost (seconds of CPU time), its share, and its hits' share of CPU time if the program was
    /// active. A program idle only in the window costs as much as both parts together. A fully idle one says nothing.
    pub(super) fn note(&mut self, cost: f64, share: f64, while_on: Option<f64>) {
        if while_on.is_none() && self.used.is_none_or(|cpus| cpus < RESTS) {
            return;
        }
        self.dear += (cost / share - self.dear) / SPACING_OF;
        if let Some(used) = self.used {
            self.cpus += (used - self.cpus) / SPACING_OF;
        }
        if let Some(while_on) = while_on {
            self.while_on += (while_on - self.while_on) / SPACING_OF;
        }
    }

    /// Cost while attached, as a share of the CPU time.
    pub(super) fn cost(&self) -> f64 {
        self.dear / self.cpus.max(CPUS_MIN) / TURN
    }

    fn wanted(&self) -> f64 {
        self.cost_max / self.cost().max(1e-12)
    }

    /// Length of a window, as a share of a turn.
    pub(super) fn share(&self) -> f64 {
        self.wanted().max(self.share_min)
    }

    /// Turns from one window to the next, at least one.
    pub(super) fn turns(&self) -> f64 {
        (self.share_min / self.wanted()).max(1.0)
    }

    /// Seconds between the starts of two turns with windows. 0: each turn has one.
    pub(super) fn apart(&self) -> f64 {
        let turns = self.turns();
        if turns > 1.0 { turns * TURN } else { 0.0 }
    }

    /// Whether windows are too far apart for regular readings, or hits take so much time that estimates are low.
    pub(super) fn is_too_far(&self) -> bool {
        self.turns() * TURN > FAR * self.speaks || self.while_on > CHARGED * TAKEN_MAX
    }

    /// Adds to the debt, or repays it by a negative cost (seconds of CPU time).
    pub(super) fn owe(&mut self, cost: f64) {
        self.owed = (self.owed + cost).max(0.0);
    }

    /// Repays debt from the program's CPU time up to now (seconds).
    pub(super) fn earn(&mut self, cpu: f64) {
        let before = self.earned.replace(cpu).unwrap_or(cpu);
        self.owe(-self.cost_max * (cpu - before).max(0.0));
    }

    /// Whether the debt delays the next window, which is already this late (seconds).
    pub(super) fn owes(&self, late: f64) -> bool {
        self.owed > DEBTS * self.dear * self.share().min(1.0) && late < self.speaks
    }
}

/// Start of the window in a turn, in seconds after the reading. It never repeats, so periodic work averages out.
pub(super) fn begins_at(turn: u64) -> f64 {
    // Large products lose their fraction to rounding, so the sequence restarts after about a day.
    let place = ((turn % 100_000) as f64 * GOLDEN).fract();
    AFTER + place * SPREAD * TURN
}

/// CPU time that a window counts, and its longest duration (seconds).
pub(super) fn window(share: f64, cpus: f64) -> (f64, f64) {
    let length = share * TURN;
    (
        length * cpus.max(CPUS_MIN),
        (PATIENCE * length)
            .clamp(ON_MIN, ON_MAX * TURN)
            .max(length.min(TURN)),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_share_of_the_next_turn_follows_from_what_the_last_cost() {
        let limit = 0.005;
        let next = |share: f64, cost| Share::new(share).next(cost, limit, true).value();
        // Twice the limit: half the share. A little below it: a little more. Free: at most twice as much.
        assert!((next(0.4, 0.010) - 0.2).abs() < 1e-12);
        assert!((next(0.4, 0.004) - 0.5).abs() < 1e-12);
        assert!((next(0.2, 0.0) - 0.4).abs() < 1e-12);
        assert_eq!(next(0.9, 0.0), 1.0);
        // A program whose rate grows tenfold: in the next turn the cost is at the limit again.
        let share = Share::new(0.5).next(0.05, limit, true);
        assert!((share.value() * 0.1 - limit).abs() < 1e-9);
    }

    #[test]
    fn a_cost_at_the_limit_does_not_go_to_and_fro() {
        let limit = 0.005;
        // All the time would cost 90 % of the limit: it stays as it is, either way.
        for begin in [1.0, 0.7] {
            let mut share = Share::new(begin);
            for _ in 0..20 {
                let before = share.always();
                share = share.next(0.0045 * share.value(), limit, true);
                assert_eq!(before, share.always(), "{share:?}");
            }
        }
        // One turn that cost too much is not enough; two are, and one that had to be cut short is.
        let once = Share::new(1.0).next(0.03, limit, true);
        assert!(once.always());
        assert!(once.next(0.001, limit, true).next(0.03, limit, true).always());
        let twice = once.next(0.03, limit, true);
        assert!((twice.value() - 1.0 / 6.0).abs() < 1e-9, "{twice:?}");
        assert!(!Share::new(1.0).next(0.03, limit, false).always());
    }

    #[test]
    fn windows_lie_everywhere_in_the_first_half_of_a_turn_and_seldom_at_one_place() {
        let mut places: Vec<f64> = (0..40).map(begins_at).collect();
        assert!(places.iter().all(|p| (AFTER..=AFTER + SPREAD * TURN).contains(p)));
        places.sort_by(f64::total_cmp);
        let gaps: Vec<f64> = places.windows(2).map(|w| w[1] - w[0]).collect();
        assert!(gaps.iter().all(|g| *g > 0.004 && *g < 0.03), "{gaps:?}");
        // A program that does something every second, or half of one, is met at all its phases alike.
        let late = (0..1000)
            .filter(|t| begins_at(*t) > AFTER + SPREAD * TURN / 2.0)
            .count();
        assert!((490..=510).contains(&late), "{late}");
    }

    #[test]
    fn a_window_is_as_long_as_its_share_and_waits_for_a_program_that_rests() {
        let (cpu, most) = window(0.16, 2.0);
        assert!((cpu - 0.32).abs() < 1e-12 && (most - 0.48).abs() < 1e-12);
        assert!(window(0.01, 1.0).1 >= ON_MIN);
        assert!(window(0.6, 1.0).1 <= ON_MAX * TURN);
    }
}
