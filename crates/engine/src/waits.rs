//! What was waited for in a trial: a CPU, by the threads of those that are tried (run-queue delay), and a CPU, memory or storage, by
//! anything on the machine (PSI `some`). It stands beside the spans of the trial and decides nothing.
//!
//! A thread that is taken off its CPU waits within its span, and one that is woken waits before it: so spans also get longer where
//! more is waited for a CPU, and a program answers later where no span got longer. Each is a share of the time of a block, and
//! the blocks with the change are compared with those without by Welch's test: shares may be zero, so it is their difference that is told.
//!
//! What was zero in every block is taken for what the kernel does not tell (no `schedstat`, no PSI): these count nanoseconds and
//! microseconds, and where something runs it waits now and then. Nothing is told of it.

use crate::blocks::COVERAGE_MIN;
use crate::panel::GUARDRAIL_BLOCKS;
use crate::series::Series;
use homeostat_model::{Nanoseconds, WaitChange, WaitsAccount, WorkloadId};
use homeostat_statistics::robust::{mean, student_t_limit};
use homeostat_statistics::trimmed::welch;

/// What the interval of a difference leaves out at either end: it is one of 95 %.
const TAIL: f64 = 0.025;

/// What a block showed, as shares of its time.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Seen {
    /// For a CPU, by its threads all together.
    runqueue: f64,
    /// For a CPU, for memory and for storage, by anything on the machine.
    pressure: [f64; 3],
}

impl Seen {
    /// Of the measured part of a block; `None` where too little of it was sampled.
    fn of(series: &Series, from: Nanoseconds, to: Nanoseconds) -> Option<Self> {
        let sums = series.waits(from, to);
        let is_measured = sums.seconds > 0.0 && sums.seconds >= COVERAGE_MIN * (to - from).as_secs_f64();
        is_measured.then(|| Self {
            runqueue: sums.runqueue / sums.seconds,
            pressure: sums.pressure.map(|waited| waited / sums.seconds),
        })
    }
}

/// What one workload that is tried, and the machine meanwhile, waited for.
#[derive(Clone, Debug)]
pub(crate) struct Waits {
    workload: WorkloadId,
    on: Vec<Seen>,
    off: Vec<Seen>,
}

impl Waits {
    pub(crate) fn new(workload: WorkloadId) -> Self {
        Self {
            workload,
            on: Vec::new(),
            off: Vec::new(),
        }
    }

    pub(crate) fn workload(&self) -> &WorkloadId {
        &self.workload
    }

    /// Reads the measured part of a block that ended.
    pub(crate) fn observe(&mut self, series: &Series, on: bool, from: Nanoseconds, to: Nanoseconds) {
        let arm = if on { &mut self.on } else { &mut self.off };
        arm.extend(Seen::of(series, from, to));
    }

    /// What was seen, for people, also of the machine if that is wanted; `None` with too few blocks, and where nothing is told.
    fn account(&self, with_machine: bool) -> Option<WaitsAccount> {
        if self.on.len() < GUARDRAIL_BLOCKS || self.off.len() < GUARDRAIL_BLOCKS {
            return None;
        }
        let ever = |waited: fn(&Seen) -> bool| self.on.iter().chain(&self.off).any(waited);
        let runqueue_wait = if ever(|s| s.runqueue > 0.0) {
            self.change(|s| s.runqueue)
        } else {
            None
        };
        let tells = with_machine && ever(|s| s.pressure.iter().any(|waited| *waited > 0.0));
        let [pressure_cpu, pressure_memory, pressure_io] = if tells {
            [
                self.change(|s| s.pressure[0]),
                self.change(|s| s.pressure[1]),
                self.change(|s| s.pressure[2]),
            ]
        } else {
            [None; 3]
        };
        (runqueue_wait.is_some() || tells).then(|| WaitsAccount {
            workload: self.workload.clone(),
            blocks_on: u32::try_from(self.on.len()).unwrap_or(u32::MAX),
            blocks_off: u32::try_from(self.off.len()).unwrap_or(u32::MAX),
            runqueue_wait,
            pressure_cpu,
            pressure_memory,
            pressure_io,
        })
    }

    fn change(&self, share: fn(&Seen) -> f64) -> Option<WaitChange> {
        let of = |arm: &[Seen]| arm.iter().map(share).collect::<Vec<f64>>();
        let (on, off) = (of(&self.on), of(&self.off));
        let found = welch(&on, &off)?;
        let reach = student_t_limit(TAIL, found.freedom) * found.error;
        Some(WaitChange {
            on: mean(&on),
            off: mean(&off),
            more: found.change,
            lower: found.change - reach,
            upper: found.change + reach,
        })
    }
}

/// What was seen of all of them, for people. Of the machine it is told once.
pub(crate) fn accounts(all: &[Waits]) -> Vec<WaitsAccount> {
    let mut accounts: Vec<WaitsAccount> = Vec::new();
    for waits in all {
        let is_told = accounts.iter().any(|a| a.pressure_cpu.is_some());
        accounts.extend(waits.account(!is_told));
    }
    accounts
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::series::Interval;

    const BLOCK: Nanoseconds = Nanoseconds::from_secs(10);

    /// Adds a block of ten seconds of which so many were sampled, in each of which so much was waited.
    fn block(waits: &mut Waits, on: bool, sampled: u64, runqueue: f64, pressure: [f64; 3]) {
        let mut series = Series::default();
        for end in 1..=sampled {
            series.push(Interval {
                end: Nanoseconds::from_secs(end),
                seconds: 1.0,
                wait: runqueue,
                pressure,
                ..Interval::default()
            });
        }
        waits.observe(&series, on, Nanoseconds::ZERO, BLOCK);
    }

    /// So many blocks of each arm. With the change everything is waited for twice as long.
    fn trial(name: &str, blocks: u32, runqueue: f64, pressure: [f64; 3]) -> Waits {
        let mut waits = Waits::new(WorkloadId::new(name));
        for k in 0..blocks {
            let wobble = 1.0 + 0.1 * f64::from(k % 3);
            block(&mut waits, false, 10, runqueue * wobble, pressure);
            block(
                &mut waits,
                true,
                10,
                2.0 * runqueue * wobble,
                pressure.map(|p| 2.0 * p),
            );
        }
        waits
    }

    #[test]
    fn the_arms_are_compared_by_their_difference() {
        let seen = trial("server", 6, 0.10, [0.2, 0.0, 0.01]);
        let told = accounts(&[seen]);
        let account = &told[0];
        assert_eq!(told.len(), 1);
        assert_eq!((account.blocks_on, account.blocks_off), (6, 6));
        let own = account.runqueue_wait.unwrap();
        assert!(
            (own.on - 0.22).abs() < 1e-9 && (own.off - 0.11).abs() < 1e-9,
            "{own:?}"
        );
        assert!((own.more - 0.11).abs() < 1e-9, "{own:?}");
        // Standard error .00816 with 7.4 degrees of freedom, of which 95 % lie within 2.34.
        for reach in [own.upper - own.more, own.more - own.lower] {
            assert!((reach / 0.0191 - 1.0).abs() < 0.03, "{own:?}");
        }
        let cpu = account.pressure_cpu.unwrap();
        assert!(
            (cpu.on - 0.4).abs() < 1e-9 && (cpu.lower - 0.2).abs() < 1e-9,
            "{cpu:?}"
        );
        assert!((account.pressure_io.unwrap().more - 0.01).abs() < 1e-9);
        // Where some of it is told, nothing is something to tell.
        let memory = account.pressure_memory.unwrap();
        assert_eq!((memory.on, memory.off, memory.upper), (0.0, 0.0, 0.0));
    }

    #[test]
    fn nothing_is_told_of_what_the_kernel_does_not_tell() {
        let told = |runqueue, pressure| accounts(&[trial("server", 3, runqueue, pressure)]);
        assert!(told(0.0, [0.0; 3]).is_empty());
        let without_psi = told(0.1, [0.0; 3]);
        assert!(without_psi[0].runqueue_wait.is_some());
        assert_eq!(without_psi[0].pressure_cpu, None);
        assert_eq!(without_psi[0].pressure_memory, None);
        assert_eq!(without_psi[0].pressure_io, None);
        let without_schedstat = told(0.0, [0.1, 0.0, 0.0]);
        assert_eq!(without_schedstat[0].runqueue_wait, None);
        assert!(without_schedstat[0].pressure_memory.is_some());
    }

    #[test]
    fn few_blocks_and_blocks_that_were_hardly_sampled_say_nothing() {
        assert!(accounts(&[trial("server", 2, 0.1, [0.1; 3])]).is_empty());
        let mut seen = trial("server", 2, 0.1, [0.1; 3]);
        for on in [false, true] {
            block(&mut seen, on, 5, 0.1, [0.1; 3]);
        }
        assert!(accounts(std::slice::from_ref(&seen)).is_empty());
        for on in [false, true] {
            block(&mut seen, on, 7, 0.1, [0.1; 3]);
        }
        assert_eq!(accounts(&[seen])[0].blocks_on, 3);
    }

    #[test]
    fn of_the_machine_it_is_told_once() {
        let told = accounts(&[
            // It came late.
            trial("a", 1, 0.1, [0.1; 3]),
            trial("b", 3, 0.1, [0.1; 3]),
            trial("c", 3, 0.1, [0.1; 3]),
        ]);
        let of: Vec<(&str, bool)> = told
            .iter()
            .map(|a| (a.workload.as_str(), a.pressure_cpu.is_some()))
            .collect();
        assert_eq!(of, [("b", true), ("c", false)]);
    }
}
