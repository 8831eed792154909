//! The frame of every workload: threads that work, a counter that others can read, a line per interval, an end.
//!
//! The work is counted per thread in the shared counters of `homeostat-progress`, so that an observer sees it move
//! while nothing is printed. Where these cannot be made (no permission, no such directory), the program says so and
//! counts for itself alone: a workload must run without homeostat.

use crate::MIB;
use crate::pace::process_cpu;
use homeostat_progress::Publisher;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use signal_hook::consts::signal::{SIGINT, SIGTERM};
use std::io::{self, Write};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Most threads of one workload (Example C-3 of the Redbook: `MAX_NUMBER_OF_THREADS`).
pub const THREADS_MAX: usize = 256;

/// The longest time to run, in seconds: 30 days.
pub const SECONDS_MAX: u64 = 30 * 24 * 3600;

/// How long and with how many threads, and what is told meanwhile.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    /// Threads that work.
    pub threads: usize,
    /// Time to run.
    pub duration: Duration,
    /// Time between two lines; none: only the summary.
    pub report: Option<Duration>,
}

/// Why a workload could not run.
#[derive(Debug, thiserror::Error)]
pub enum SessionError {
    /// Signals cannot be received.
    #[error("cannot prepare for SIGTERM: {0}")]
    Signals(io::Error),
    /// A thread could not be started.
    #[error("cannot start a thread: {0}; ask for fewer threads")]
    Thread(io::Error),
    /// A worker could not go on; all others were stopped.
    #[error("cannot go on working: {0}")]
    Work(io::Error),
    /// Nobody takes the output any more.
    #[error("cannot write the report: {0}")]
    Output(io::Error),
}

/// One counter per thread, each on a cache line of its own.
#[repr(align(128))]
#[derive(Debug, Default)]
struct Slot(AtomicU64);

/// The work done so far, by thread.
#[derive(Debug)]
pub struct Work {
    unit: &'static str,
    slots: Vec<Slot>,
    publisher: Option<Publisher>,
}

impl Work {
    /// Counters for so many threads, published under this name with this unit (singular, as `load`).
    #[must_use]
    pub fn publish(name: &str, unit: &'static str, threads: usize) -> Self {
        let slots: Vec<Slot> = (0..threads.max(1)).map(|_| Slot::default()).collect();
        let publisher = match Publisher::create(name, unit, slots.len()) {
            Ok(publisher) => Some(publisher),
            Err(error) => {
                eprintln!("{name}: progress is not published: {error}");
                None
            }
        };
        Self {
            unit,
            slots,
            publisher,
        }
    }

    /// Adds units done by this thread.
    pub fn add(&self, thread: usize, units: u64) {
        if let Some(slot) = self.slots.get(thread) {
            slot.0.fetch_add(units, Ordering::Relaxed);
        }
        if let Some(publisher) = &self.publisher {
            publisher.counter(thread).add(units);
        }
    }

    /// Units done by all threads.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.slots.iter().map(|slot| slot.0.load(Ordering::Relaxed)).sum()
    }

    /// What is counted, in the singular.
    #[must_use]
    pub const fn unit(&self) -> &'static str {
        self.unit
    }
}

/// An interval of a run, or all of it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Outcome {
    /// Length of the interval.
    pub elapsed: Duration,
    /// Units of work done in it.
    pub work: u64,
    /// CPU time used in it by the whole process.
    pub cpu: Duration,
}

impl Outcome {
    /// Units of work per second.
    #[must_use]
    pub fn work_per_s(&self) -> f64 {
        ratio(self.work as f64, self.elapsed.as_secs_f64())
    }

    /// CPU time per unit of work, in nanoseconds.
    #[must_use]
    pub fn cpu_ns_per_unit(&self) -> f64 {
        ratio(self.cpu.as_secs_f64() * 1e9, self.work as f64)
    }

    /// MiB, for programs whose unit is a byte, as IBM's autotune was tested with: in all, and in 10 seconds.
    #[must_use]
    pub fn mebibytes(&self) -> String {
        let mib = MIB as f64;
        format!(
            "mib={:.1} mib_per_10s={:.1}",
            self.work as f64 / mib,
            self.work_per_s() * 10.0 / mib
        )
    }

    /// The part that every line has, in `key=value` words.
    #[must_use]
    pub fn words(&self) -> String {
        format!(
            "work={} work_per_s={:.1} cpu_s={:.6}",
            self.work,
            self.work_per_s(),
            self.cpu.as_secs_f64()
        )
    }
}

fn ratio(of: f64, per: f64) -> f64 {
    if per > 0.0 { of / per } else { 0.0 }
}

/// A run in progress: when it began and whether it shall stop.
#[derive(Debug)]
pub struct Session {
    stopping: Arc<AtomicBool>,
    wake: UnixStream,
    waker: UnixStream,
}

impl Session {
    /// Prepares to be stopped by SIGTERM and SIGINT. To be called first, so that a signal during a long preparation
    /// is not missed.
    ///
    /// # Errors
    /// When the signal handlers cannot be installed.
    pub fn prepare() -> Result<Self, SessionError> {
        let (wake, waker) = UnixStream::pair().map_err(SessionError::Signals)?;
        let stopping = Arc::new(AtomicBool::new(false));
        for signal in [SIGTERM, SIGINT] {
            // The flag before the pipe: who is woken must find it set.
            signal_hook::flag::register(signal, Arc::clone(&stopping)).map_err(SessionError::Signals)?;
            let end = waker.try_clone().map_err(SessionError::Signals)?;
            signal_hook::low_level::pipe::register(signal, end).map_err(SessionError::Signals)?;
        }
        Ok(Self {
            stopping,
            wake,
            waker,
        })
    }

    /// Whether the program shall stop. Workers ask after each small piece of work.
    #[must_use]
    pub fn stopping(&self) -> bool {
        self.stopping.load(Ordering::Relaxed)
    }

    /// Runs `worker(thread)` on every thread until the time is over, a signal comes or all workers have returned,
    /// and prints. `extra` adds words to a line. Returns the whole run.
    ///
    /// # Errors
    /// When a thread cannot be started, a worker fails or the output cannot be written; all workers have ended then.
    pub fn run(
        &self,
        plan: Plan,
        work: &Work,
        worker: impl Fn(usize) -> io::Result<()> + Sync,
        extra: impl Fn(&Outcome) -> String,
    ) -> Result<Outcome, SessionError> {
        say(&format!(
            "ready pid={} threads={} unit={}",
            std::process::id(),
            plan.threads,
            work.unit
        ))?;
        let begin = Mark::now(work);
        let running = AtomicUsize::new(plan.threads);
        let failed = Mutex::new(None);
        let result = std::thread::scope(|scope| {
            let (running, failed) = (&running, &failed);
            let worker = &worker;
            for thread in 0..plan.threads {
                let started = std::thread::Builder::new()
                    .name(format!("worker-{thread}"))
                    .spawn_scoped(scope, move || {
                        if let Err(error) = worker(thread) {
                            failed
                                .lock()
                                .unwrap_or_else(PoisonError::into_inner)
                                .get_or_insert(error);
                            self.stop();
                        }
                        if running.fetch_sub(1, Ordering::AcqRel) == 1 {
                            self.stop();
                        }
                    });
                if let Err(error) = started {
                    self.stop();
                    return Err(SessionError::Thread(error));
                }
            }
            let told = self.tell(plan, work, begin, &extra);
            self.stop();
            told
        });
        result?;
        if let Some(error) = failed.into_inner().unwrap_or_else(PoisonError::into_inner) {
            return Err(SessionError::Work(error));
        }
        let whole = begin.until(Mark::now(work));
        let line = format!(
            "summary seconds={:.3} {} {}",
            whole.elapsed.as_secs_f64(),
            whole.words(),
            extra(&whole)
        );
        say(line.trim_end())?;
        Ok(whole)
    }

    fn tell(
        &self,
        plan: Plan,
        work: &Work,
        begin: Mark,
        extra: &impl Fn(&Outcome) -> String,
    ) -> Result<(), SessionError> {
        let end = begin.at + plan.duration;
        let mut last = begin;
        let mut due = plan.report.map(|every| begin.at + every);
        loop {
            let next = due.map_or(end, |due| due.min(end));
            if self.wait_until(next) {
                return Ok(());
            }
            let now = Instant::now();
            if let (Some(at), Some(every)) = (due, plan.report) {
                if now >= at {
                    let mark = Mark::now(work);
                    let interval = last.until(mark);
                    let line = format!(
                        "report t_s={:.3} interval_s={:.6} {} {}",
                        (mark.at - begin.at).as_secs_f64(),
                        interval.elapsed.as_secs_f64(),
                        interval.words(),
                        extra(&interval)
                    );
                    say(line.trim_end())?;
                    last = mark;
                    due = Some(next_due(at, every, mark.at));
                }
            }
            if now >= end {
                return Ok(());
            }
        }
    }

    /// Waits; true when the program shall stop.
    fn wait_until(&self, at: Instant) -> bool {
        while !self.stopping() {
            let left = at.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            // poll is woken by a high-resolution timer; the time limit of a socket would be rounded to 32 ms.
            let timeout = Timespec {
                tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
                tv_nsec: i64::from(left.subsec_nanos()),
            };
            let mut woken = [PollFd::new(&self.wake, PollFlags::IN)];
            match poll(&mut woken, Some(&timeout)) {
                // A signal that is not ours, or the time is over: the conditions above decide.
                Ok(0) | Err(Errno::INTR) => {}
                // Woken by a signal or by the last worker; or nothing can wake us, and then it is better to end.
                Ok(_) | Err(_) => return true,
            }
        }
        true
    }

    fn stop(&self) {
        self.stopping.store(true, Ordering::Relaxed);
        // A full pipe means that the reader is being woken already.
        let _woken = (&self.waker).write(&[0]);
    }
}

/// The next time in the grid of report times that has not passed: a late line shifts no later one.
fn next_due(due: Instant, every: Duration, now: Instant) -> Instant {
    let mut next = due + every;
    if next <= now {
        let missed = now.saturating_duration_since(due).as_nanos() / every.as_nanos().max(1);
        next = due + every.saturating_mul(u32::try_from(missed).unwrap_or(u32::MAX).saturating_add(1));
    }
    next
}

/// What has been done at a moment.
#[derive(Clone, Copy, Debug)]
struct Mark {
    at: Instant,
    work: u64,
    cpu: Duration,
}

impl Mark {
    fn now(work: &Work) -> Self {
        Self {
            at: Instant::now(),
            work: work.total(),
            cpu: process_cpu(),
        }
    }

    fn until(self, later: Self) -> Outcome {
        Outcome {
            elapsed: later.at.saturating_duration_since(self.at),
            work: later.work.saturating_sub(self.work),
            cpu: later.cpu.saturating_sub(self.cpu),
        }
    }
}

fn say(line: &str) -> Result<(), SessionError> {
    let mut out = io::stdout().lock();
    writeln!(out, "{line}")
        .and_then(|()| out.flush())
        .map_err(SessionError::Output)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn report_times_stay_on_their_grid() {
        let begin = Instant::now();
        let second = Duration::from_secs(1);
        let at = |ms| begin + Duration::from_millis(ms);
        assert_eq!(next_due(at(1000), second, at(1003)), at(2000));
        assert_eq!(next_due(at(1000), second, at(3500)), at(4000));
        assert_eq!(next_due(at(1000), second, at(4000)), at(5000));
    }

    #[test]
    fn words_are_keys_and_values() {
        let outcome = Outcome {
            elapsed: Duration::from_secs(2),
            work: 10,
            cpu: Duration::from_millis(500),
        };
        assert_eq!(outcome.words(), "work=10 work_per_s=5.0 cpu_s=0.500000");
        assert!((outcome.cpu_ns_per_unit() - 5e7).abs() < 1e-3);
    }

    #[test]
    fn an_empty_interval_divides_by_nothing() {
        let nothing = Outcome {
            elapsed: Duration::ZERO,
            work: 0,
            cpu: Duration::ZERO,
        };
        assert_eq!((nothing.work_per_s(), nothing.cpu_ns_per_unit()), (0.0, 0.0));
    }
}
