//! CPU time of processes that come and go, also of threads that run on and on.
//!
//! The kernel adds what a thread has used to the clock of its process when the thread stops running, and at each tick (1 to 10 ms,
//! `CONFIG_HZ`). Of a thread that has a CPU for itself the clock is a tick old at most, which is noise of some percent in a window of 30 to
//! 100 ms; and a bias, too: putting a breakpoint into a program interrupts it, which brings its clock up to date, and nothing does when a
//! window ends. (Measured with ticks of 4 ms: windows of 86 ms had 1.3 ms of CPU time too little, so that a program's work was told 1.4 %
//! too high; docs/meters.md.) For those threads the kernel is asked by a clock of `perf_event_open(2)`, which is read on the CPU where the
//! thread runs. Threads that stop often are up to date without, and such a clock costs each stop a microsecond.

use super::common::{numbers_in, open_process, read_at};
use crate::Root;
use crate::sensors::bytes::{number, words};
use crate::sys::perf::{Counter, Encoding, Event, Scope};
use crate::sys::probe::process_cpu_time;
use homeostat_model::ProcessId;
use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

/// A thread runs on and on when it used this share of the program's CPU time …
const BUSY: f64 = 0.02;
/// … and was taken off its CPU no more often than this, on average.
const AT_A_TIME: Duration = Duration::from_millis(2);
/// One that has a clock keeps it down to this part of either: what a change does to a program must not move its clocks from one kind to
/// the other at each little.
const KEEPS: u32 = 4;
/// Less time than this between two looks does not tell.
const LOOK_MIN: Duration = Duration::from_millis(100);
/// So many threads have a clock at most, those that use the most. Of programs with more threads than are looked at the clocks are as the
/// kernel keeps them.
const CLOCKS_MAX: usize = 64;
const THREADS_MAX: usize = 256;
/// What such a clock costs its thread each time that it stops and goes on (seconds of CPU time; measured between two processes that wake
/// each other: .9 µs, quartiles .7 and 1.2).
const STOP_COST: f64 = 1e-6;
/// A tick between the reading of two clocks of one thread would be taken for time that it has run: they are read again, so often.
const TRIES: usize = 3;

/// What a thread has run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Ran {
    /// Time on a CPU (nanoseconds).
    pub(super) ns: u64,
    /// Times that it was given one.
    pub(super) times: u64,
}

/// What `schedstat` of a thread says: time on a CPU, time of waiting for one (nanoseconds), and times that it was given one.
pub(super) fn ran(schedstat: &[u8]) -> Option<Ran> {
    let mut numbers = words(schedstat).map(number);
    let ns = numbers.next()??;
    let times = numbers.nth(1)??;
    Some(Ran { ns, times })
}

/// What threads have run, by process and number.
pub(super) type Threads = BTreeMap<(ProcessId, i32), Ran>;

/// What the threads of these processes have run, of so many at most; whether that was all.
pub(super) fn all_ran(
    root: &Root,
    processes: impl IntoIterator<Item = ProcessId>,
    most: usize,
) -> (Threads, bool) {
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
pub(super) struct CpuTime {
    last: BTreeMap<ProcessId, u64>,
    /// Since the first look, as the kernel's clocks say (nanoseconds); of a process that came later, since it was seen first.
    total: u64,
    /// Of threads that run on and on.
    clocks: Vec<Clock>,
    /// By how much those that have gone were ahead of the kernel's: also by what the machine's host took meanwhile, which only they count.
    gone: i64,
    /// What was told last (nanoseconds): it never goes back.
    told: u64,
    /// What its threads had run when it was looked which of them run on, and when that was.
    looked: Option<(Instant, Threads)>,
}

impl CpuTime {
    /// Seconds since the first reading.
    pub(super) fn read(&mut self, processes: &[ProcessId]) -> f64 {
        let mut behind = self.behind();
        for attempt in 1..=TRIES {
            let now: BTreeMap<ProcessId, u64> = processes
                .iter()
                .filter_map(|process| Some((*process, process_cpu_time(process.pid)?)))
                .collect();
            self.clocks.iter_mut().for_each(Clock::look_ahead);
            let since = self.behind();
            if since != behind && attempt < TRIES {
                behind = since;
                continue;
            }
            let grown = now
                .iter()
                .map(|(process, cpu)| cpu.saturating_sub(self.last.get(process).copied().unwrap_or(*cpu)))
                .sum::<u64>();
            self.last = now;
            self.total = self.total.saturating_add(grown);
            let ahead = self.gone + self.clocks.iter().map(|clock| clock.ahead).sum::<i64>();
            self.told = self.told.max(self.total.saturating_add_signed(ahead));
            break;
        }
        self.told as f64 / 1e9
    }

    /// What the kernel's clocks say of the threads that have one of their own.
    fn behind(&mut self) -> Vec<u64> {
        self.keep(Clock::look);
        self.clocks.iter().map(|clock| clock.behind).collect()
    }

    fn keep(&mut self, mut stays: impl FnMut(&mut Clock) -> bool) {
        let gone = &mut self.gone;
        self.clocks.retain_mut(|clock| {
            let stays = stays(clock);
            *gone += if stays { 0 } else { clock.ahead };
            stays
        });
    }

    /// Looks which threads have run on and on since the last look, and gives each a clock. Not while something is being counted: until
    /// such a clock has come, and when one has gone, the time may be off by a tick.
    pub(super) fn follow(&mut self, root: &Root, processes: &[ProcessId]) {
        let now = Instant::now();
        if self
            .looked
            .as_ref()
            .is_some_and(|(then, _)| now - *then < LOOK_MIN)
        {
            return;
        }
        let (threads, whole) = all_ran(root, processes.iter().copied(), THREADS_MAX);
        if !whole {
            self.forget();
            return;
        }
        if let Some((_, before)) = &self.looked {
            let has_clock = |thread| self.clocks.iter().any(|clock| clock.thread == thread);
            let run_on = running_on(before, &threads, has_clock);
            self.keep(|clock| run_on.contains(&clock.thread));
            let new = run_on
                .into_iter()
                .filter(|thread| !self.clocks.iter().any(|clock| clock.thread == *thread))
                .filter_map(|thread| Clock::open(root, thread));
            self.clocks.extend(new.collect::<Vec<_>>());
        }
        self.looked = Some((now, threads));
    }

    /// What the clocks have cost their threads since the last question (seconds of CPU time).
    pub(super) fn cost(&mut self) -> f64 {
        let stops = |clock: &mut Clock| {
            clock
                .times
                .saturating_sub(std::mem::replace(&mut clock.charged, clock.times))
        };
        self.clocks.iter_mut().map(stops).sum::<u64>() as f64 * STOP_COST
    }

    /// No thread has a clock of its own any more.
    pub(super) fn forget(&mut self) {
        self.keep(|_| false);
        self.looked = None;
    }
}

/// Threads that run on and on, by what all had run before and later: those that used most, and so many at most.
fn running_on(
    before: &Threads,
    after: &Threads,
    has_clock: impl Fn((ProcessId, i32)) -> bool,
) -> Vec<(ProcessId, i32)> {
    let ran: Vec<(Duration, u64, (ProcessId, i32))> = after
        .iter()
        .filter_map(|(thread, now)| {
            let then = before.get(thread)?;
            let ran = Duration::from_nanos(now.ns.saturating_sub(then.ns));
            Some((ran, now.times.saturating_sub(then.times), *thread))
        })
        .collect();
    let all: Duration = ran.iter().map(|(ran, ..)| *ran).sum();
    let mut run_on: Vec<(Duration, (ProcessId, i32))> = ran
        .into_iter()
        .filter(|(ran, times, thread)| {
            let keeps = if has_clock(*thread) { KEEPS } else { 1 };
            let times = u32::try_from(*times).unwrap_or(u32::MAX).max(1);
            !ran.is_zero() && *ran * keeps >= all.mul_f64(BUSY) && *ran * keeps / times >= AT_A_TIME
        })
        .map(|(ran, _, thread)| (ran, thread))
        .collect();
    run_on.sort_unstable_by(|a, b| b.cmp(a));
    run_on.truncate(CLOCKS_MAX);
    run_on.into_iter().map(|(_, thread)| thread).collect()
}

/// Two clocks of one thread: the kernel's, and one that is up to date.
#[derive(Debug)]
struct Clock {
    thread: (ProcessId, i32),
    schedstat: File,
    counter: Counter,
    /// What the kernel's clock said at the last look, and when the other one was opened (nanoseconds).
    behind: u64,
    opened: u64,
    /// So much more than the kernel's clock has the other one counted since then (nanoseconds).
    ahead: i64,
    /// Times that the thread was given a CPU, and up to which of them the clock is charged.
    times: u64,
    charged: u64,
}

impl Clock {
    /// None where the kernel will not, or the thread has ended: its clock is then what the kernel keeps.
    fn open(root: &Root, thread: (ProcessId, i32)) -> Option<Self> {
        let (process, id) = thread;
        // Whose number this thread has.
        open_process(root, process).ok()?;
        let schedstat = File::open(root.path(&format!("/proc/{}/task/{id}/schedstat", process.pid))).ok()?;
        let counter = Counter::open(Event::Encoded(Encoding::TASK_CLOCK), Scope::ThreadAlone(id)).ok()?;
        let mut clock = Self {
            thread,
            schedstat,
            counter,
            behind: 0,
            opened: 0,
            ahead: 0,
            times: 0,
            charged: 0,
        };
        clock.look().then_some(())?;
        clock.opened = clock.behind;
        clock.charged = clock.times;
        Some(clock)
    }

    /// Looks at the kernel's clock. False: the thread has ended.
    fn look(&mut self) -> bool {
        let mut buffer = [0u8; 128];
        let now = self
            .schedstat
            .read_at(&mut buffer, 0)
            .ok()
            .and_then(|n| ran(buffer.get(..n)?));
        let Some(now) = now else {
            return false;
        };
        (self.behind, self.times) = (now.ns, now.times);
        true
    }

    /// Looks how far ahead of that the other one is.
    fn look_ahead(&mut self) {
        if let Ok(count) = self.counter.read() {
            self.ahead = count.value as i64 - self.behind.saturating_sub(self.opened) as i64;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::common::start_ticks;
    use super::*;

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
    fn a_thread_runs_on_that_is_busy_and_seldom_stops() {
        let threads = |all: &[(i32, u64, u64)]| -> Threads {
            all.iter()
                .map(|(thread, ms, times)| {
                    let ran = Ran {
                        ns: ms * 1_000_000,
                        times: *times,
                    };
                    ((id(1), *thread), ran)
                })
                .collect()
        };
        let before = threads(&[
            (1, 500, 10),
            (2, 500, 10),
            (3, 500, 10),
            (4, 500, 10),
            (6, 9, 9),
            (7, 5, 5),
        ]);
        // It stops every 2 ms, never stops, stops every 1.9 ms, hardly runs; one is new, one has gone, and one rests.
        let after = threads(&[
            (1, 1_500, 510),
            (2, 1_600, 10),
            (3, 1_450, 510),
            (4, 540, 11),
            (5, 900, 1),
            (7, 5, 5),
        ]);
        let run_on = |has: &[i32]| -> Vec<i32> {
            let has_clock = |(_, thread): (ProcessId, i32)| has.contains(&thread);
            let found = running_on(&before, &after, has_clock);
            found.into_iter().map(|(_, thread)| thread).collect()
        };
        assert_eq!(run_on(&[]), [2, 1], "who uses most comes first");
        assert_eq!(
            run_on(&[3, 4, 7]),
            [2, 1, 3, 4],
            "who has a clock keeps it for longer"
        );
        let many = |ms| threads(&(1..=100).map(|n| (n, ms, 1)).collect::<Vec<_>>());
        assert_eq!(running_on(&many(0), &many(50), |_| true).len(), CLOCKS_MAX);
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

    /// Works until it is dropped.
    struct Worker(std::process::Child);

    impl Drop for Worker {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    #[test]
    fn the_clock_of_a_thread_that_runs_on_is_that_of_the_kernel_up_to_a_tick() {
        let Ok(child) = std::process::Command::new("sh")
            .args(["-c", "while :; do :; done"])
            .spawn()
        else {
            println!("skipped: no sh to start");
            return;
        };
        let worker = Worker(child);
        let pid = worker.0.id() as i32;
        let stat = std::fs::read(format!("/proc/{pid}/stat")).unwrap();
        let process = ProcessId {
            pid,
            start_ticks: start_ticks(&stat).unwrap(),
        };
        let (root, mut time) = (Root::default(), CpuTime::default());
        let begun = Instant::now();
        time.follow(&root, &[process]);
        while time.clocks.is_empty() {
            if begun.elapsed() > Duration::from_secs(10) {
                println!("skipped: it is given no CPU, or perf_event_open is refused");
                return;
            }
            std::thread::sleep(2 * LOOK_MIN);
            time.follow(&root, &[process]);
        }
        let (first, kernel) = (time.read(&[process]), process_cpu_time(pid).unwrap());
        std::thread::sleep(Duration::from_millis(300));
        let (last, kernel) = (time.read(&[process]), process_cpu_time(pid).unwrap() - kernel);
        let difference = last - first - kernel as f64 / 1e9;
        // Two ticks of the slowest kernel, and what the machine's host may have taken meanwhile.
        assert!(difference.abs() < 0.1, "{difference}");
        assert_eq!(time.clocks.len(), 1);
        drop(worker);
        let end = time.read(&[process]);
        assert!(end >= last && time.clocks.is_empty());
        time.forget();
        assert_eq!(time.read(&[process]), end);
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
