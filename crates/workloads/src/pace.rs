//! Working only a part of the time, so that a workload can run beside others.
//!
//! The share is counted in CPU time of the calling thread, not in time on the clock: a thread that had to wait for
//! its processor does not sleep the longer for it.

use rustix::time::{ClockId, clock_gettime};
use std::time::{Duration, Instant};

/// Shorter sleeps are dominated by the cost of waking up.
const SLEEP_MIN: Duration = Duration::from_millis(2);
/// No single sleep keeps a program from noticing that it shall stop.
const SLEEP_MAX: Duration = Duration::from_millis(200);
/// Work between two pauses.
const BURST: Duration = Duration::from_millis(100);

/// Limits the calling thread to a percentage of one CPU, and lets it pause.
#[derive(Debug)]
pub struct Duty {
    percent: u32,
    pause: Duration,
    burst: Instant,
    cpu_before: Duration,
    owed: Duration,
}

impl Duty {
    /// A limit of `percent` of one CPU for the calling thread; 100 and more never sleep. After every 100 ms of work it pauses for
    /// `pause`, if that is any time.
    #[must_use]
    pub fn new(percent: u32, pause: Duration) -> Self {
        Self {
            percent: percent.max(1),
            pause,
            burst: Instant::now(),
            cpu_before: thread_cpu(),
            owed: Duration::ZERO,
        }
    }

    /// To be called after each small piece of work: sleeps as long as the share demands.
    pub fn rest(&mut self) {
        if self.percent < 100 {
            let cpu = thread_cpu();
            self.owed += owed_for(cpu.saturating_sub(self.cpu_before), self.percent);
            self.cpu_before = cpu;
        }
        if self.owed >= SLEEP_MIN {
            let begin = Instant::now();
            std::thread::sleep(self.owed.min(SLEEP_MAX));
            // What was overslept is worked off the next time.
            self.owed = self.owed.saturating_sub(begin.elapsed());
        }
        if !self.pause.is_zero() && self.burst.elapsed() >= BURST {
            std::thread::sleep(self.pause);
            self.burst = Instant::now();
        }
    }
}

fn owed_for(cpu: Duration, percent: u32) -> Duration {
    cpu.saturating_mul(100 - percent) / percent
}

/// CPU time of the calling thread since its start.
fn thread_cpu() -> Duration {
    duration_of(ClockId::ThreadCPUTime)
}

/// CPU time of this process since its start, all threads together, and of its children that have ended.
#[must_use]
pub fn process_cpu() -> Duration {
    duration_of(ClockId::ProcessCPUTime) + crate::sys::children_cpu()
}

fn duration_of(clock: ClockId) -> Duration {
    let time = clock_gettime(clock);
    // CPU clocks count from zero upwards; a negative field would be a broken kernel and reads as zero.
    Duration::new(
        u64::try_from(time.tv_sec).unwrap_or(0),
        u32::try_from(time.tv_nsec).unwrap_or(0),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rest_owed_keeps_the_share() {
        assert_eq!(owed_for(Duration::from_millis(10), 10), Duration::from_millis(90));
        assert_eq!(owed_for(Duration::from_millis(10), 50), Duration::from_millis(10));
        assert_eq!(owed_for(Duration::from_millis(99), 99), Duration::from_millis(1));
    }

    #[test]
    fn a_limited_thread_sleeps_for_most_of_the_time() {
        let begin = Instant::now();
        let cpu_begin = thread_cpu();
        let mut duty = Duty::new(10, Duration::ZERO);
        while thread_cpu() - cpu_begin < Duration::from_millis(20) {
            std::hint::black_box((0..10_000u64).sum::<u64>());
            duty.rest();
        }
        // 20 ms of work at 10 % take 200 ms on the clock; a busy machine only makes it longer. One sleep may be
        // still owed when the loop ends.
        assert!(
            begin.elapsed() >= Duration::from_millis(150),
            "{:?}",
            begin.elapsed()
        );
    }

    #[test]
    fn an_unlimited_thread_never_owes_sleep() {
        let mut duty = Duty::new(100, Duration::ZERO);
        std::hint::black_box((0..100_000u64).sum::<u64>());
        duty.rest();
        assert_eq!(duty.owed, Duration::ZERO);
    }
}
