//! What homeostat itself uses. When the memory canary runs: while the engine wants it, and memory is plentiful.

use homeostat_helper::canary::Canary;
use homeostat_kernel::Root;
use homeostat_kernel::bytes::{number, words};
use homeostat_kernel::files::Kept;
use homeostat_model::{Bytes, CanaryReading, MachineSample, Nanoseconds};

/// Least available memory to start it: fifteen times its own.
const ROOM_TO_START: Bytes = Bytes::from_mib(1024);
/// Least available memory for it to go on.
const ROOM_TO_STAY: Bytes = Bytes::from_mib(512);
/// From this on lost file pages that come back are no shortage for it: its own would be a fiftieth of what is available.
const ROOM_PLENTY: Bytes = Bytes::from_mib(4096);
/// Share of the time in which some task waits for memory (PSI) from which it ends.
const STALLED_MAX: f64 = 0.1;
/// Time over which that is averaged: a change that makes large pages stalls programs for a moment.
const STALLED_OVER_S: f64 = 10.0;
/// Time without it after an end for want of memory, or after a fault.
const REST: Nanoseconds = Nanoseconds::from_secs(60);

/// The daemon's own memory, and the canary.
pub(crate) struct Own {
    /// `statm` of this process.
    memory: Kept,
    pub(crate) canary: Keeper,
}

impl Own {
    /// `may_run`: whether there may be a canary at all.
    pub(crate) fn new(may_run: bool) -> Self {
        Self {
            memory: Kept::new(&Root::default(), "/proc/self/statm"),
            canary: Keeper {
                may_run,
                ..Keeper::default()
            },
        }
    }

    /// Resident memory of this process, also with a captured machine.
    pub(crate) fn resident(&mut self, buffer: &mut Vec<u8>) -> Bytes {
        let text = self.memory.read(buffer, 256).unwrap_or_default();
        let pages = words(text).nth(1).and_then(number).unwrap_or(0);
        Bytes(pages.saturating_mul(rustix::param::page_size() as u64))
    }
}

/// The canary and its conditions.
#[derive(Debug, Default)]
pub(crate) struct Keeper {
    /// Whether the settings permit one, and the machine is the running one.
    may_run: bool,
    wanted: bool,
    running: Option<Canary>,
    /// Mean share of the time in which some task waited for memory.
    stalled: f64,
    /// Until when none starts, and why.
    rests: Option<(Nanoseconds, String)>,
}

impl Keeper {
    /// Whether it is wanted from now on. An unwanted one ends at once.
    pub(crate) fn keep(&mut self, wanted: bool) {
        self.wanted = wanted && self.may_run;
        if !self.wanted {
            self.running = None;
            self.stalled = 0.0;
        }
    }

    /// Its process number.
    pub(crate) fn pid(&self) -> Option<i32> {
        self.running.as_ref().map(Canary::pid)
    }

    /// Its reading, or why there is none; `None` while none is wanted.
    pub(crate) fn sample(
        &mut self,
        now: Nanoseconds,
        machine: &MachineSample,
        interval: Nanoseconds,
    ) -> Option<Result<CanaryReading, String>> {
        if !self.wanted {
            return None;
        }
        let part = (interval.as_secs_f64() / STALLED_OVER_S).min(1.0);
        self.stalled += part * (machine.stalled_for_memory(interval) - self.stalled);
        let read = self.read(now, machine, interval);
        if let Err(why) = &read {
            self.running = None;
            if self.rests.is_none() {
                self.rests = Some((now + REST, why.clone()));
            }
        }
        Some(read)
    }

    fn read(
        &mut self,
        now: Nanoseconds,
        machine: &MachineSample,
        interval: Nanoseconds,
    ) -> Result<CanaryReading, String> {
        if let Some((until, why)) = &self.rests {
            if now < *until {
                return Err(why.clone());
            }
            self.rests = None;
        }
        let least = if self.running.is_some() {
            ROOM_TO_STAY
        } else {
            ROOM_TO_START
        };
        if machine.memory_available < least {
            return Err(format!("less than {least} of memory is available"));
        }
        let is_short = machine.memory_available < ROOM_PLENTY && machine.is_short_of_memory(interval);
        if is_short || self.stalled >= STALLED_MAX {
            return Err("programs wait for memory".to_owned());
        }
        let canary = match self.running.take() {
            Some(canary) => canary,
            None => Canary::start().map_err(|why| why.to_string())?,
        };
        let canary = self.running.insert(canary);
        canary.read().map_err(|why| why.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use homeostat_model::{Paging, Pressure};

    const SECOND: Nanoseconds = Nanoseconds::from_secs(1);

    fn machine(available_mib: u64, stalled_ms: u64, refaults_file: u64) -> MachineSample {
        MachineSample {
            memory_available: Bytes::from_mib(available_mib),
            pressure_memory: Pressure {
                some: Nanoseconds::from_millis(stalled_ms),
                full: Nanoseconds::ZERO,
            },
            paging: Paging {
                refaults_file,
                ..Paging::default()
            },
            ..MachineSample::default()
        }
    }

    #[test]
    fn without_a_wish_or_a_permission_none_is_there() {
        let mut barred = Own::new(false).canary;
        barred.keep(true);
        assert_eq!(barred.sample(SECOND, &machine(8192, 0, 0), SECOND), None);
        let mut keeper = Own::new(true).canary;
        assert_eq!(keeper.sample(SECOND, &machine(8192, 0, 0), SECOND), None);
    }

    #[test]
    fn a_machine_short_of_memory_gets_none_and_says_why_for_a_minute() {
        for (machine, said) in [
            (machine(1000, 0, 0), "less than 1.00 GiB of memory is available"),
            (machine(2048, 0, 100), "programs wait for memory"),
        ] {
            let mut keeper = Own::new(true).canary;
            keeper.keep(true);
            let first = keeper.sample(SECOND, &machine, SECOND);
            assert_eq!(first, Some(Err(said.to_owned())));
            let later = keeper.sample(SECOND * 60, &super::tests::machine(8192, 0, 0), SECOND);
            assert_eq!(later, first, "the same reason, so that it is told once");
            assert_eq!(keeper.pid(), None);
        }
    }

    #[test]
    fn programs_that_wait_for_memory_end_it_and_a_moment_of_that_does_not() {
        let mut keeper = Own::new(true).canary;
        keeper.keep(true);
        let said = |keeper: &mut Keeper, stalled_ms| {
            let machine = machine(8192, stalled_ms, 100);
            keeper.sample(SECOND, &machine, SECOND).and_then(Result::err)
        };
        let waits = Some("programs wait for memory".to_owned());
        assert_ne!(said(&mut keeper, 900), waits);
        keeper.rests = None;
        assert_eq!(said(&mut keeper, 900), waits);
    }
}
