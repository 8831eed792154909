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
/// Share of the time in which some task waits for memory (PSI) from which it ends.
const STALLED_MAX: f64 = 0.1;
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
    /// Until when none starts, and why.
    rests: Option<(Nanoseconds, String)>,
}

impl Keeper {
    /// Whether it is wanted from now on. An unwanted one ends at once.
    pub(crate) fn keep(&mut self, wanted: bool) {
        self.wanted = wanted && self.may_run;
        if !self.wanted {
            self.running = None;
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
        if machine.is_short_of_memory(interval) || machine.stalled_for_memory(interval) >= STALLED_MAX {
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
            (machine(8192, 200, 0), "programs wait for memory"),
            (machine(8192, 0, 100), "programs wait for memory"),
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
}
