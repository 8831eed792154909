//! The clocks of the machine.

use homeostat_model::Nanoseconds;
use homeostat_platform::Clock;
pub use rustix::time::ClockId;
use rustix::time::clock_gettime;

/// CLOCK_MONOTONIC, CPU time of the calling thread, and the calendar for people.
#[derive(Clone, Copy, Debug, Default)]
pub struct MonotonicClock;

/// What a clock of the kernel shows.
pub fn read_clock(clock: ClockId) -> Nanoseconds {
    let t = clock_gettime(clock);
    let seconds = u64::try_from(t.tv_sec).unwrap_or(0);
    Nanoseconds(
        seconds
            .saturating_mul(1_000_000_000)
            .saturating_add(u64::try_from(t.tv_nsec).unwrap_or(0)),
    )
}

impl Clock for MonotonicClock {
    fn now(&self) -> Nanoseconds {
        read_clock(ClockId::Monotonic)
    }
    fn cpu_time(&self) -> Nanoseconds {
        read_clock(ClockId::ThreadCPUTime)
    }
    fn unix_seconds(&self) -> u64 {
        read_clock(ClockId::Realtime).0 / 1_000_000_000
    }
    fn sleep(&self, length: Nanoseconds) {
        std::thread::sleep(std::time::Duration::from_nanos(length.0));
    }
}
