//! When it is counted, and for how long: the share of the CPU time, and where in a turn its window lies.

use crate::turns::{CHARGED, TAKEN_MAX};

/// Length of a turn, and the least that a window waits for a program to work (seconds).
pub(super) const TURN: f64 = 1.0;
const ON_MIN: f64 = 0.02;
/// A window that waits for a program to work lasts so many times as long as it should, and no longer than so much of a turn.
const PATIENCE: f64 = 3.0;
const ON_MAX: f64 = 0.7;
/// A program that rests is waited for as if it used so many CPUs.
const CPUS_MIN: f64 = 0.02;
/// The window begins within this share of the turn, which begins with a reading: so that it has ended by the next one.
const SPREAD: f64 = 0.5;
/// … and not before this (seconds): who reads works meanwhile, perhaps on the program's CPU.
const AFTER: f64 = 0.02;
/// The share of the next turn grows by this factor at most, and falls by this one.
const STEP_UP: f64 = 2.0;
const STEP_DOWN: f64 = 16.0;
/// Probes that stay on all the time are taken off in turns when they have cost more than they may in so many turns one after the
/// other …
const TURNS_OVER: u32 = 2;
/// … and stay on again when they would cost no more than this share of what they may.
const BACK: f64 = 0.8;
/// What is counted in turns is counted for this share of them at most.
const PART_MAX: f64 = 0.9;
/// How far apart windows are follows from about so many of them.
const SPACING_OF: f64 = 8.0;
/// A program that uses fewer CPUs than this rests.
const RESTS: f64 = 0.002;
/// The next one waits when more is owed than so many of them cost: that is no chance.
const DEBTS: f64 = 4.0;
/// Windows that are farther apart than so many times as long as they speak are too few: of a trial's block six tenths must be read.
const FAR: f64 = 1.4;
/// The golden ratio's part behind the point: its multiples leave no gap and repeat nothing.
const GOLDEN: f64 = 0.618_033_988_749_894_9;

/// The share of the CPU time in which it is counted.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Share {
    value: f64,
    /// Turns, one after the other, in which probes that stay on cost too much.
    over: u32,
}

impl Share {
    /// From 1 on it is counted all the time.
    pub(super) fn new(value: f64) -> Self {
        Self {
            value: value.min(1.0),
            over: 0,
        }
    }

    /// Whether the probes stay on.
    pub(super) fn always(self) -> bool {
        self.value >= 1.0
    }

    pub(super) fn value(self) -> f64 {
        self.value
    }

    /// This one from now on; it goes back to all the time, and from there, at other values.
    pub(super) fn of(self, value: f64) -> Self {
        let always = value * BACK >= 1.0 || (self.always() && value >= 1.0);
        Self::new(if always { 1.0 } else { value.min(PART_MAX) })
    }

    /// The next turn's, after one in which counting has cost this share of the CPU time, of which it may cost `limit`. `whole`: the
    /// turn was counted to its end.
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

/// How far apart windows are that are not to be shorter than some share of a turn.
///
/// That follows from running means of what they have cost and of the CPU time that the program uses, and so hardly from the last one: where
/// windows are some seconds apart each is told of the time until the next, and a longer time for a dear window would count what is dear
/// more often than it is.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Spacing {
    pub(super) share_min: f64,
    /// What a window has cost for each turn of its length (seconds of CPU time), as a mean.
    dear: f64,
    /// CPUs that the program uses, from one window to the next, as a mean.
    cpus: f64,
    /// What hits cost while it is on, a share of the CPU time of the window, as a mean; charged.
    while_on: f64,
    /// Share of its CPU time that counting may cost.
    cost_max: f64,
    /// So long a window speaks for what follows (seconds).
    speaks: f64,
    /// When the last turn began, and the CPU time then.
    begun: Option<(f64, f64)>,
    /// CPUs that it used in the turn before.
    used: Option<f64>,
    /// What windows have cost more than they may (seconds of CPU time) …
    owed: f64,
    /// … with all that was earned until the program had used so much.
    earned: Option<f64>,
}

impl Spacing {
    /// Windows of such a share of a turn, so far apart at first (seconds), of a program that uses so many CPUs.
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

    /// A turn begins at this moment (seconds), and the program has used so much CPU time until then.
    pub(super) fn begins(&mut self, at: f64, cpu: f64) {
        let before = self.begun.replace((at, cpu));
        self.used = before.map(|(then, used)| (cpu - used).max(0.0) / (at - then).max(TURN / 20.0));
        self.earn(cpu);
    }

    /// A window of such a share has cost so much (seconds of CPU time), hits as much of the CPU time while it was on, where the program worked
    /// then. One that rests in a window and works between is as dear as both together; one that rests altogether says nothing.
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

    /// What counting costs while it is on: a share of the CPU time.
    pub(super) fn cost(&self) -> f64 {
        self.dear / self.cpus.max(CPUS_MIN) / TURN
    }

    /// Share of the time in which it may be counted.
    fn wanted(&self) -> f64 {
        self.cost_max / self.cost().max(1e-12)
    }

    /// How long a window is: a share of a turn.
    pub(super) fn share(&self) -> f64 {
        self.wanted().max(self.share_min)
    }

    /// Turns from one window to the next, one at least.
    pub(super) fn turns(&self) -> f64 {
        (self.share_min / self.wanted()).max(1.0)
    }

    /// Seconds from the beginning of a turn with a window to that of the next one; 0: each has one.
    pub(super) fn apart(&self) -> f64 {
        let turns = self.turns();
        if turns > 1.0 { turns * TURN } else { 0.0 }
    }

    /// Whether windows are so far apart that there is no reading for a good part of the time, or hits take so much of it that what is told
    /// is too small.
    pub(super) fn is_too_far(&self) -> bool {
        self.turns() * TURN > FAR * self.speaks || self.while_on > CHARGED * TAKEN_MAX
    }

    /// More is owed, or less.
    pub(super) fn owe(&mut self, cost: f64) {
        self.owed = (self.owed + cost).max(0.0);
    }

    /// The program has used so much CPU time by now (seconds), some of which makes up for what is owed.
    pub(super) fn earn(&mut self, cpu: f64) {
        let before = self.earned.replace(cpu).unwrap_or(cpu);
        self.owe(-self.cost_max * (cpu - before).max(0.0));
    }

    /// Whether so much is owed that the next window, which is so late already (seconds), has to wait.
    pub(super) fn owes(&self, late: f64) -> bool {
        self.owed > DEBTS * self.dear * self.share().min(1.0) && late < self.speaks
    }
}

/// Where in a turn the window begins, in seconds after the reading: never the same place twice, so that what the program does once
/// a second is not counted, or missed, each time.
pub(super) fn begins_at(turn: u64) -> f64 {
    // The part behind the point of large products is worn away: they begin anew after a day.
    let place = ((turn % 100_000) as f64 * GOLDEN).fract();
    AFTER + place * SPREAD * TURN
}

/// The CPU time that a window counts, of a program that uses so many CPUs, and the longest that it waits for that (seconds).
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
