//! The pace of effectors that make a program wait: slices, share of time, byte rate, and a halt when memory is short.

use crate::identity::full_stall_microseconds;
use homeostat_kernel::Root;
use homeostat_platform::PlatformError;
use std::time::{Duration, Instant};

pub(super) const PAUSE_MAX: Duration = Duration::from_secs(10);
/// Slices skipped for memory pressure before the action reports that it has to wait.
const PRESSURE_PAUSES_MAX: u8 = 8;
/// Share of wall time with all tasks of the machine stalled on memory. Above this nothing is moved or converted.
const PRESSURE_FULL_MAX: f64 = 0.05;

pub(super) struct Slice {
    pub(super) started: Instant,
    /// Time inside calls.
    pub(super) inside: Duration,
    /// The longest call.
    pub(super) longest: Duration,
    pub(super) bytes: u64,
}

impl Slice {
    pub(super) fn start() -> Self {
        Self {
            started: Instant::now(),
            inside: Duration::ZERO,
            longest: Duration::ZERO,
            bytes: 0,
        }
    }

    pub(super) fn timed<T>(&mut self, call: impl FnOnce() -> T) -> T {
        let before = Instant::now();
        let outcome = call();
        let took = before.elapsed();
        self.inside += took;
        self.longest = self.longest.max(took);
        outcome
    }
}

/// The wait after a slice that spent `inside` in calls, took `elapsed` and handled `bytes`. It keeps calls below the
/// share `duty` of the time, and the rate below `bytes_per_second`.
pub(super) fn pause(
    duty: f64,
    bytes_per_second: Option<u64>,
    inside: Duration,
    elapsed: Duration,
    bytes: u64,
) -> Duration {
    let for_duty = inside.mul_f64((1.0 - duty) / duty);
    let for_rate = bytes_per_second
        .map(|rate| Duration::from_secs_f64(bytes as f64 / rate as f64).saturating_sub(elapsed))
        .unwrap_or_default();
    for_duty.max(for_rate).min(PAUSE_MAX)
}

/// Watches the memory stalls of the whole machine between slices.
#[derive(Default)]
pub(super) struct Pressure {
    before: Option<(Instant, u64)>,
    pauses: u8,
}

impl Pressure {
    /// How long to wait because the whole machine is stalled on memory. `None` to go on.
    ///
    /// # Errors
    /// `Busy` when it has lasted for too long.
    pub(super) fn pause(&mut self, root: &Root, what: &str) -> Result<Option<Duration>, PlatformError> {
        let Some(total) = full_stall_microseconds(root) else {
            return Ok(None);
        };
        let now = Instant::now();
        let Some((before, stalled)) = self.before.replace((now, total)) else {
            return Ok(None);
        };
        let elapsed = now.duration_since(before).as_micros().max(1) as f64;
        if total.saturating_sub(stalled) as f64 / elapsed <= PRESSURE_FULL_MAX {
            self.pauses = 0;
            return Ok(None);
        }
        self.pauses += 1;
        if self.pauses > PRESSURE_PAUSES_MAX {
            return Err(PlatformError::Busy {
                what: what.to_owned(),
                why: "tasks are stalled on memory (/proc/pressure/memory)".into(),
            });
        }
        Ok(Some(Duration::from_millis(50) * (1 << self.pauses.min(5))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn stalls_of_the_whole_machine_halt_and_then_end_the_work() {
        let tree = tempfile::tempdir().unwrap();
        let root = Root::new(tree.path());
        let mut pressure = Pressure::default();
        assert_eq!(pressure.pause(&root, "moving"), Ok(None), "no PSI, no halt");
        fs::create_dir_all(root.path("/proc/pressure")).unwrap();
        let mut total = 0;
        let mut look = |pressure: &mut Pressure, more: u64| {
            total += more;
            let text = format!("some avg10=0.00 total={total}\nfull avg10=0.00 total={total}\n");
            fs::write(root.path("/proc/pressure/memory"), text).unwrap();
            pressure.pause(&root, "moving")
        };
        assert_eq!(look(&mut pressure, 0), Ok(None), "the first look only begins");
        // An hour of stall since the last look, whenever that was.
        let hour = 3_600_000_000;
        let first = look(&mut pressure, hour).unwrap().unwrap();
        let second = look(&mut pressure, hour).unwrap().unwrap();
        assert!(second > first);
        assert_eq!(look(&mut pressure, 0), Ok(None), "it is over");
        for _ in 0..PRESSURE_PAUSES_MAX {
            assert!(look(&mut pressure, hour).unwrap().is_some());
        }
        assert!(matches!(
            look(&mut pressure, hour),
            Err(PlatformError::Busy { .. })
        ));
    }
}
