//! CPU time of processes that come and go, and waits until the kernel's CPU clocks are accurate.
//!
//! The kernel updates a process's CPU clock when a thread stops running, and at each tick (1 to 10 ms, `CONFIG_HZ`).
//! For a thread with its own CPU it is up to a tick old. This is noise of some percent in windows of 20 to 100 ms, and
//! a bias: inserting a breakpoint interrupts the program and updates its clock, the end of a window does not. (At 4 ms
//! ticks, windows of 86 ms lacked 1.2 ms; docs/meters.md.) So a window begins and ends right after a tick
//! ([`up_to_date`]).
//!
//! Clocks stay up to a tick old with `skew_tick` (CPUs tick apart), on a CPU stopped by the host, and where a reading
//! divides a window (one part lacks what the other gains). On a CPU without ticks (`nohz_full`), a lone thread's clock
//! is up to a second old, so such programs get no windows by CPU time ([`ticks`]).
//!
//! A `perf_event_open(2)` clock per thread is always current, but includes steal time, some varying percent on a busy
//! host. The kernel's clock excludes it with `CONFIG_PARAVIRT_TIME_ACCOUNTING`.

use crate::common::ENTRIES_MAX;
use homeostat_kernel::Root;
use homeostat_kernel::bytes::{number, words};
use homeostat_kernel::numa::{CpuMask, NumaError, affinity};
use homeostat_kernel::probe::process_cpu_time;
use homeostat_kernel::process::{numbers_in, open_process, read_at};
use homeostat_model::ProcessId;
use homeostat_sensors::topology::SetAside;
use rustix::time::{ClockId, clock_getres, clock_gettime};
use std::collections::BTreeMap;
use std::time::Duration;

/// After this time, all CPUs have finished their tick.
const AFTER_TICK: Duration = Duration::from_micros(150);
/// Interval of checks for a late tick, and their limit in ticks.
const BEAT: Duration = Duration::from_micros(200);
const TICKS_MAX: u32 = 2;
/// A wake-up later than this share of a tick waits for the next tick, once.
const LATE: f64 = 0.25;
/// Average wait at both ends of a window together, in ticks.
const TICKS: f64 = 1.5;
/// Longest tick of any kernel.
const TICK_MAX: Duration = Duration::from_millis(10);

/// Run time of a thread.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ran {
    /// Time on a CPU (nanoseconds).
    pub ns: u64,
    /// Number of times on a CPU.
    pub times: u64,
}

/// Parses a thread's `schedstat`: time on a CPU, time waiting for one (nanoseconds), and number of runs.
pub fn ran(schedstat: &[u8]) -> Option<Ran> {
    let mut numbers = words(schedstat).map(number);
    let ns = numbers.next()??;
    let times = numbers.nth(1)??;
    Some(Ran { ns, times })
}

/// Run times of threads, by process and thread id.
pub type Threads = BTreeMap<(ProcessId, i32), Ran>;

/// Run times of the threads of these processes, at most `most`, and whether that was all.
pub fn all_ran(root: &Root, processes: impl IntoIterator<Item = ProcessId>, most: usize) -> (Threads, bool) {
    let mut all = BTreeMap::new();
    let mut buffer = [0u8; 128];
    for process in processes {
        let Ok(dir) = open_process(root, process) else {
            continue;
        };
        let Ok((threads, more)) = numbers_in(&dir, "task", most) else {
            continue;
        };
        for thread in threads {
            let ran = read_at(&dir, &format!("task/{thread}/schedstat"), &mut buffer)
                .ok()
                .and_then(|n| ran(buffer.get(..n)?));
            all.extend(ran.map(|ran| ((process, thread), ran)));
        }
        if more || all.len() > most {
            return (all, false);
        }
    }
    (all, true)
}

/// CPU time of processes that come and go.
#[derive(Debug, Default)]
pub struct CpuTime {
    last: BTreeMap<ProcessId, u64>,
    /// Seconds since the first reading, and for a later process since it was seen first.
    total: f64,
}

impl CpuTime {
    /// CPU seconds of these processes, including ended ones.
    pub fn read(&mut self, processes: &[ProcessId]) -> f64 {
        let mut now = BTreeMap::new();
        let mut grown = 0u64;
        for process in processes {
            if let Some(cpu) = process_cpu_time(process.pid) {
                let before = self.last.get(process).copied().unwrap_or(cpu);
                grown = grown.saturating_add(cpu.saturating_sub(before));
                now.insert(*process, cpu);
            }
        }
        self.last = now;
        self.total += grown as f64 / 1e9;
        self.total
    }
}

fn at(clock: ClockId) -> Duration {
    Duration::try_from(clock_gettime(clock)).unwrap_or_default()
}

/// Time between two ticks. `None`: unknown, or implausibly long.
pub fn tick() -> Option<Duration> {
    Duration::try_from(clock_getres(ClockId::MonotonicCoarse))
        .ok()
        .filter(|length| *length <= TICK_MAX)
}

/// Average wait at both ends of a window together, including late ticks (seconds).
pub fn waiting() -> f64 {
    TICKS * tick().map_or(0.0, |tick| tick.as_secs_f64())
}

/// Waits for the kernel's next tick (some milliseconds), after which all CPU clocks are current. Read them at once.
pub fn up_to_date() {
    let Some(length) = tick() else {
        return;
    };
    for _ in 0..2 {
        // This clock advances with the ticks, at a constant distance.
        let ticked = || at(ClockId::MonotonicCoarse);
        let begun = at(ClockId::Monotonic);
        let last = ticked();
        // The tick had not come by then.
        let mut before = begun.max(last + length);
        std::thread::sleep(before.saturating_sub(begun));
        loop {
            let now = at(ClockId::Monotonic);
            if ticked() != last {
                break;
            }
            if now.saturating_sub(begun) >= TICKS_MAX * length {
                // No tick came.
                before = begun;
                break;
            }
            before = before.max(now);
            std::thread::sleep(BEAT);
        }
        std::thread::sleep(AFTER_TICK);
        if in_time(at(ClockId::Monotonic).saturating_sub(before), length) {
            return;
        }
    }
}

/// Whether the tick that was last absent this long ago has just come.
fn in_time(ago: Duration, length: Duration) -> bool {
    ago <= AFTER_TICK + 2 * BEAT + length.mul_f64(LATE)
}

/// Checks that all threads of these processes may run only on CPUs with ticks.
///
/// # Errors
/// A sentence: a thread may run on a CPU that stops its tick for a lone thread.
pub fn ticks(root: &Root, processes: &[ProcessId]) -> Result<(), String> {
    let tickless = SetAside::tickless(root);
    if tickless.is_empty() {
        return Ok(());
    }
    let without = CpuMask::of(tickless);
    for process in processes {
        let threads = open_process(root, *process)
            .ok()
            .and_then(|dir| numbers_in(&dir, "task", ENTRIES_MAX).ok())
            .map_or_else(Vec::new, |(threads, _)| threads);
        for thread in threads {
            let shared = match affinity(thread) {
                Ok(mask) => mask.and(&without),
                // An ended thread runs nowhere.
                Err(NumaError::NoProcess) => continue,
                Err(e) => {
                    return Err(format!(
                        "whether thread {thread} of process {process} may run on a CPU without timer ticks (nohz_full=) is not known: {e}"
                    ));
                }
            };
            if let Some(cpu) = shared.iter().next() {
                return Err(format!(
                    "thread {thread} of process {process} may run on CPU {cpu}, which has no timer ticks while one thread runs there alone \
                     (nohz_full=), so that the kernel tells its CPU time a second late"
                ));
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use homeostat_kernel::numa::CPUS_MAX;

    fn id(pid: i32) -> ProcessId {
        ProcessId { pid, start_ticks: 1 }
    }

    #[test]
    fn time_on_a_cpu_is_the_first_number_and_times_the_third() {
        assert_eq!(ran(b"1000 2000 30\n"), Some(Ran { ns: 1000, times: 30 }));
        for odd in [&b""[..], b"1000", b"1000 2000", b"1000 2000 x", b"-1 2 3"] {
            assert_eq!(ran(odd), None);
        }
    }

    #[test]
    fn threads_are_read_up_to_so_many() {
        let tree = tempfile::tempdir().unwrap();
        for pid in [100, 200] {
            let stat = format!("{pid} (a) S 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 1 20 21");
            for thread in pid..pid + 3 {
                let task = tree.path().join(format!("proc/{pid}/task/{thread}"));
                std::fs::create_dir_all(&task).unwrap();
                std::fs::write(task.join("schedstat"), format!("{thread} 0 7\n")).unwrap();
            }
            std::fs::write(tree.path().join(format!("proc/{pid}/stat")), stat).unwrap();
        }
        let root = Root::new(tree.path());
        let read = |processes: &[i32], most| {
            let (threads, whole) = all_ran(&root, processes.iter().map(|pid| id(*pid)), most);
            (threads.len(), whole)
        };
        assert_eq!(read(&[100, 200], 6), (6, true));
        assert_eq!(
            read(&[100, 300], 6),
            (3, true),
            "one that has ended has no threads"
        );
        assert!(!read(&[100, 200], 5).1);
        assert!(!read(&[100], 2).1);
    }

    #[test]
    fn a_tick_is_waited_for() {
        let now = || (at(ClockId::MonotonicCoarse), at(ClockId::Monotonic));
        let Some(length) = tick() else {
            println!("skipped: no kernel of which the ticks are known");
            return;
        };
        assert!(!length.is_zero());
        let (ticked, begun) = now();
        up_to_date();
        let (after, ended) = now();
        // On a machine that is held up none may come.
        assert!(after > ticked || ended - begun >= TICKS_MAX * length);
        // Of many that are not late one tick is waited for, wherever the clock is behind it.
        let fewest = (0..20).map(|_| {
            let (before, _) = now();
            up_to_date();
            (now().0.saturating_sub(before).as_secs_f64() / length.as_secs_f64()).round() as u32
        });
        assert!(fewest.min().is_some_and(|ticks| ticks <= 1));
    }

    #[test]
    fn who_is_run_a_quarter_of_a_tick_late_waits_for_the_next() {
        let us = Duration::from_micros;
        for (length, late) in [(1_000, 250), (4_000, 1_000), (10_000, 2_500)] {
            // One beat until it is seen, one behind it, and as long as a thread needs to wake up.
            let usual = us(150 + 200 + 100);
            assert!(in_time(usual, us(length)), "{length}");
            assert!(in_time(us(150 + 400 + late), us(length)));
            assert!(!in_time(us(150 + 400 + late + 1), us(length)));
        }
    }

    #[test]
    fn who_may_run_without_ticks_is_named() {
        let tree = tempfile::tempdir().unwrap();
        let write = |file: &str, text: &str| {
            let path = tree.path().join(file);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        // Ourselves: what the kernel says of where a thread may run is not in files.
        let own = std::process::id() as i32;
        write(
            &format!("proc/{own}/stat"),
            &format!("{own} (a) S 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 1 20 21"),
        );
        write(&format!("proc/{own}/task/{own}/stat"), "");
        let root = Root::new(tree.path());
        let with = |list: &str| {
            write("sys/devices/system/cpu/nohz_full", list);
            ticks(&root, &[id(own)])
        };
        assert_eq!(ticks(&root, &[id(own)]), Ok(()), "the kernel cannot");
        assert_eq!(with("(null)\n"), Ok(()));
        assert_eq!(with("\n"), Ok(()));
        let here = affinity(own).unwrap();
        if let Some(elsewhere) = (0..CPUS_MAX).find(|cpu| !here.contains(*cpu)) {
            assert_eq!(with(&format!("{elsewhere}\n")), Ok(()));
        }
        let mine = here.iter().next().unwrap();
        let why = with(&format!("{mine}\n")).unwrap_err();
        assert!(
            why.contains(&format!("CPU {mine},")) && why.contains("nohz_full"),
            "{why}"
        );
        assert_eq!(ticks(&root, &[id(i32::MAX)]), Ok(()), "one that has ended");
    }

    #[test]
    fn the_cpu_time_of_processes_that_come_and_go_never_goes_back() {
        let own = ProcessId {
            pid: std::process::id() as i32,
            start_ticks: 1,
        };
        let mut time = CpuTime::default();
        assert_eq!(time.read(&[own]), 0.0, "what was before is not ours");
        let mut x = 0u64;
        for i in 0..2_000_000u64 {
            x = std::hint::black_box(x ^ i);
        }
        let worked = time.read(&[own]);
        assert!(worked > 0.0, "{x}");
        assert_eq!(time.read(&[]), worked);
        assert_eq!(time.read(&[own]), worked, "seen again, it begins anew");
    }
}
