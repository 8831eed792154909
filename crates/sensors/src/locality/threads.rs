//! The CPUs that the threads of a workload run on, and how far threads move between two dispatches.
//!
//! `/proc/PID/task/TID/stat` has each thread's CPU time and the CPU where it ran last (field 39, proc_pid_stat(5)).
//! [`ThreadWatch`] samples it and adds the CPU time since the last sample to the thread's present CPU. Some tens of
//! samples show where the workload runs. Recent samples count more ([`MEMORY`]).
//!
//! [`DispatchWatch`] counts dispatches and moves between CPUs by the kernel's counters per thread
//! (`/proc/PID/task/TID/sched`, else the context switches of `status`). Perf events, where allowed, show how far each
//! move went ([`homeostat_kernel::moves`]). Otherwise the distances come from the threads' places at each sample.

use crate::locality::Shape;
use homeostat_kernel::Root;
use homeostat_kernel::bytes::{keyed, lines, number, signed, words};
use homeostat_kernel::files::{Directory, ProcessFile, SMALL_FILE_MAX, Text};
use homeostat_kernel::moves::MoveWatch;
use homeostat_model::{LlcId, Nanoseconds, NodeId, NumaBalancing, ProcessId, Redispatches, Workload};
use std::collections::{BTreeMap, BTreeSet};

/// Most processes of one workload whose threads are sampled.
pub const PROCESSES_MAX: usize = 1024;
/// Most threads that are known of one workload.
pub const THREADS_MAX: usize = 16 * 1024;
/// Most threads read per sample, about 10 µs each; a larger workload is read in parts.
pub const THREADS_PER_LOOK: usize = 512;
/// Time constant in seconds with which earlier samples are forgotten.
pub const MEMORY: f64 = 120.0;
/// Most threads whose kernel counters are read per sample: the kernel takes some 25 µs to write `sched`.
const COUNTED_MAX: usize = 512;

/// The fields used of a thread's `stat`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ThreadStat {
    /// User and system time in clock ticks; a process's own `stat` has the sum of all its threads.
    pub cpu_ticks: u64,
    /// Threads of the process.
    pub threads: u32,
    /// Start time in clock ticks since boot.
    pub start_ticks: u64,
    /// CPU on which it ran last.
    pub cpu: u32,
}

/// Parses `/proc/PID/stat` or `/proc/PID/task/TID/stat`; `None` when it is cut or something else.
pub fn parse_thread_stat(text: &[u8]) -> Option<ThreadStat> {
    let close = text.iter().rposition(|&b| b == b')')?;
    let mut fields = words(text.get(close + 1..)?);
    // Fields of the manual from 3 on: 14 and 15 times, 20 threads, 22 start, 39 CPU.
    let user = number(fields.nth(11)?)?;
    let system = number(fields.next()?)?;
    let threads = u32::try_from(number(fields.nth(4)?)?).ok()?;
    let start_ticks = number(fields.nth(1)?)?;
    let cpu = u32::try_from(number(fields.nth(16)?)?).ok()?;
    Some(ThreadStat {
        cpu_ticks: user.saturating_add(system),
        threads,
        start_ticks,
        cpu,
    })
}

#[derive(Clone, Copy, Debug)]
struct Known {
    start_ticks: u64,
    cpu_ticks: u64,
    cpu_seconds: f64,
    cpu: u32,
    /// When it was last seen to have used CPU time.
    ran: Option<Nanoseconds>,
}

/// The time of a sample.
#[derive(Clone, Copy, Debug)]
pub struct Moment {
    /// CLOCK_MONOTONIC.
    pub now: Nanoseconds,
    /// Time since boot, on the clock of start times.
    pub uptime: Nanoseconds,
    /// Length of a clock tick.
    pub tick: Nanoseconds,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Distance {
    Core,
    Cache,
    Node,
    Other,
}

fn distance(shape: &Shape, from: u32, to: u32) -> Distance {
    match (shape.place(from), shape.place(to)) {
        (Some(a), Some(b)) if a.core == b.core => Distance::Core,
        (Some(a), Some(b)) if a.llc == b.llc => Distance::Cache,
        (Some(a), Some(b)) if a.node == b.node => Distance::Node,
        (Some(_), Some(_)) => Distance::Other,
        // A CPU that went offline meanwhile: its place is no longer known.
        _ => Distance::Core,
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Distances([u64; 4]);

impl Distances {
    fn add(&mut self, distance: Distance) {
        self.0[distance as usize] += 1;
    }

    fn sum(self) -> u64 {
        self.0.iter().sum()
    }
}

/// The threads of one workload over time.
#[derive(Debug, Default)]
pub struct ThreadWatch {
    threads: BTreeMap<(i32, i32), Known>,
    /// CPU seconds by CPU, old ones forgotten with [`MEMORY`].
    seconds: BTreeMap<u32, f64>,
    /// Time watched, forgotten with [`MEMORY`], too.
    elapsed: f64,
    begun: Option<Nanoseconds>,
    last: Option<Nanoseconds>,
    /// Age of the oldest thread at the last sample, in seconds.
    age: f64,
    /// First thread of the next sample, in a workload with more threads than one sample reads.
    next: usize,
    found_moved: Distances,
}

/// CPUs that the threads of a workload run on.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Running {
    /// Time watched; zero after the first sample.
    pub watched: Nanoseconds,
    /// CPUs used, by last-level-cache domain. After the first sample: the mean over the threads' lives, where they are.
    pub by_cache: BTreeMap<LlcId, f64>,
    /// Threads that ran.
    pub threads: u32,
    /// Threads of the busiest process.
    pub threads_of_busiest_process: u32,
}

impl ThreadWatch {
    /// Takes one sample. Threads and processes that end meanwhile are absent.
    pub fn look(&mut self, root: &Root, workload: &Workload, at: Moment, shape: &Shape) {
        let now = at.now;
        let Ok(proc) = Directory::open(root, "/proc") else {
            return;
        };
        let mut buffer = Vec::new();
        let listed = list(root, &proc, workload, &mut buffer);
        let living: BTreeSet<(i32, i32)> = listed
            .iter()
            .map(|(process, thread)| (process.pid, *thread))
            .collect();
        self.threads.retain(|key, _| living.contains(key));
        let since = self.last.map_or(0.0, |last| (now - last).as_secs_f64());
        let kept = (-since / MEMORY).exp();
        self.elapsed = self.elapsed * kept + since;
        self.seconds.values_mut().for_each(|s| *s *= kept);
        let count = listed.len();
        self.age = 0.0;
        let start = if count > THREADS_PER_LOOK {
            self.next % count
        } else {
            0
        };
        for (process, thread) in listed
            .iter()
            .cycle()
            .skip(start)
            .take(count.min(THREADS_PER_LOOK))
        {
            let Some(stat) = read(&proc, process.pid, *thread, &mut buffer) else {
                continue;
            };
            self.take((process.pid, *thread), &stat, at, shape);
        }
        self.next = start + THREADS_PER_LOOK;
        self.begun.get_or_insert(now);
        self.last = Some(now);
    }

    fn take(&mut self, key: (i32, i32), stat: &ThreadStat, at: Moment, shape: &Shape) {
        let (now, tick) = (at.now, at.tick);
        self.age = self.age.max((at.uptime - tick * stat.start_ticks).as_secs_f64());
        let before = self
            .threads
            .get(&key)
            .copied()
            .filter(|known| known.start_ticks == stat.start_ticks);
        let used = match (before, self.last) {
            (Some(known), _) => stat.cpu_ticks.saturating_sub(known.cpu_ticks),
            // Born since the last sample: all its time was used since. A thread only new to us cannot have used more.
            (None, Some(last)) if self.threads.len() < THREADS_PER_LOOK => {
                stat.cpu_ticks.min((now - last).0 / tick.0.max(1))
            }
            (None, _) => 0,
        };
        if used > 0 {
            *self.seconds.entry(stat.cpu).or_default() += (tick * used).as_secs_f64();
        }
        if let Some(known) = before {
            if known.cpu != stat.cpu && used > 0 {
                self.found_moved.add(distance(shape, known.cpu, stat.cpu));
            }
        }
        if before.is_none() && self.threads.len() >= THREADS_MAX {
            return;
        }
        self.threads.insert(
            key,
            Known {
                start_ticks: stat.start_ticks,
                cpu_ticks: stat.cpu_ticks,
                cpu_seconds: (tick * stat.cpu_ticks).as_secs_f64(),
                cpu: stat.cpu,
                ran: if used > 0 {
                    Some(now)
                } else {
                    before.and_then(|k| k.ran)
                },
            },
        );
    }

    /// The CPUs they run on, as far as seen.
    pub fn running(&self, shape: &Shape) -> Running {
        let watched = match (self.begun, self.last) {
            (Some(begun), Some(last)) => last - begun,
            _ => Nanoseconds::ZERO,
        };
        let seen = self.elapsed > 0.0;
        let recently = |ran: Nanoseconds| self.last.is_some_and(|last| (last - ran).as_secs_f64() <= MEMORY);
        let mut by_cache: BTreeMap<LlcId, f64> = BTreeMap::new();
        let mut by_process: BTreeMap<i32, (u32, u64)> = BTreeMap::new();
        for ((process, _), known) in &self.threads {
            let ran = if seen {
                known.ran.is_some_and(recently)
            } else {
                known.cpu_ticks > 0
            };
            if !ran {
                continue;
            }
            let (threads, ticks) = by_process.entry(*process).or_default();
            *threads += 1;
            *ticks = ticks.saturating_add(known.cpu_ticks);
            if !seen && self.age > 0.0 {
                if let Some(place) = shape.place(known.cpu) {
                    *by_cache.entry(place.llc).or_default() += known.cpu_seconds / self.age;
                }
            }
        }
        if seen {
            for (cpu, seconds) in self.seconds.iter().filter(|(_, s)| **s > 0.0) {
                if let Some(place) = shape.place(*cpu) {
                    *by_cache.entry(place.llc).or_default() += seconds / self.elapsed;
                }
            }
        }
        Running {
            watched,
            by_cache,
            threads: by_process.values().map(|(threads, _)| threads).sum(),
            threads_of_busiest_process: by_process
                .values()
                .max_by_key(|(_, ticks)| *ticks)
                .map_or(0, |(threads, _)| *threads),
        }
    }

    fn last_cpus(&self) -> impl Iterator<Item = (i32, u32)> + '_ {
        self.threads
            .iter()
            .map(|((_, thread), known)| (*thread, known.cpu))
    }

    /// The threads that are known, by process and thread.
    pub fn known(&self) -> impl Iterator<Item = (i32, i32)> + '_ {
        self.threads.keys().copied()
    }
}

fn list(root: &Root, proc: &Directory, workload: &Workload, buffer: &mut Vec<u8>) -> Vec<(ProcessId, i32)> {
    let mut found = Vec::new();
    for process in workload.processes.iter().take(PROCESSES_MAX) {
        let stat = proc
            .read_record(ProcessFile::new(process.pid, "stat").name(), buffer)
            .ok()
            .and_then(parse_thread_stat)
            .filter(|stat| stat.start_ticks == process.start_ticks);
        match stat {
            Some(stat) if stat.threads <= 1 => found.push((*process, process.pid)),
            Some(_) => {
                let Ok(task) = std::fs::read_dir(root.path(&format!("/proc/{}/task", process.pid))) else {
                    continue;
                };
                let room = THREADS_MAX.saturating_sub(found.len());
                let mut threads: Vec<i32> = task
                    .take(room)
                    .filter_map(|e| e.ok()?.file_name().to_str()?.parse().ok())
                    .collect();
                threads.sort_unstable();
                found.extend(threads.into_iter().map(|thread| (*process, thread)));
            }
            None => {}
        }
    }
    found
}

fn read(proc: &Directory, process: i32, thread: i32, buffer: &mut Vec<u8>) -> Option<ThreadStat> {
    let leaf = format!("task/{thread}/stat");
    proc.read_record(ProcessFile::new(process, &leaf).name(), buffer)
        .ok()
        .and_then(parse_thread_stat)
}

/// The kernel's counters of one thread's scheduling.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SchedCounts {
    /// Times that it was dispatched.
    pub dispatches: u64,
    /// Times that it changed CPU; `None` if not reported.
    pub migrations: Option<u64>,
    /// Pages that automatic NUMA balancing migrated for it.
    pub pages_migrated: Option<u64>,
    /// The node that the kernel prefers for it.
    pub preferred: Option<NodeId>,
}

/// Parses `/proc/PID/task/TID/sched`; `None` when it is something else.
pub fn parse_sched(text: &[u8]) -> Option<SchedCounts> {
    let mut counts = SchedCounts::default();
    let mut known = false;
    for line in lines(text) {
        let Some(colon) = line.iter().position(|&b| b == b':') else {
            continue;
        };
        let (key, value) = (
            line.get(..colon)?.trim_ascii(),
            line.get(colon + 1..)?.trim_ascii(),
        );
        match key {
            b"nr_switches" => {
                counts.dispatches = number(value)?;
                known = true;
            }
            b"se.nr_migrations" => counts.migrations = number(value),
            b"numa_pages_migrated" => counts.pages_migrated = number(value),
            b"numa_preferred_nid" => {
                counts.preferred = signed(value).and_then(|n| u32::try_from(n).ok()).map(NodeId);
            }
            _ => {}
        }
    }
    known.then_some(counts)
}

/// Dispatches from the context switches of `/proc/PID/task/TID/status`, where there is no `sched`.
pub fn parse_switches(status: &[u8]) -> Option<SchedCounts> {
    let voluntary = keyed(status, "voluntary_ctxt_switches")?;
    let forced = keyed(status, "nonvoluntary_ctxt_switches")?;
    Some(SchedCounts {
        dispatches: voluntary.saturating_add(forced),
        ..SchedCounts::default()
    })
}

/// Dispatches of workloads since each was last asked about.
#[derive(Debug, Default)]
pub struct DispatchWatch {
    moves: Option<MoveWatch>,
    lost: bool,
    /// Last CPU on which each thread of interest arrived.
    cpus: BTreeMap<i32, u32>,
    /// Moves by process, since the last query about its workload.
    seen: BTreeMap<i32, Distances>,
    counts: BTreeMap<(i32, i32), SchedCounts>,
}

impl DispatchWatch {
    /// Begins to watch. Returns the reason if single moves cannot be seen.
    pub fn begin(&mut self, root: &Root, shape: &Shape) -> Option<String> {
        if !root.is_live() {
            return Some("this is a captured machine".to_owned());
        }
        match MoveWatch::open(shape.cpus()) {
            Ok(moves) => {
                self.moves = Some(moves);
                None
            }
            Err(error) => Some(format!(
                "moves between CPUs cannot be seen one by one: {error}; run homeostat as root"
            )),
        }
    }

    /// Empties the rings. Call it ten times a second, so that they do not overflow.
    pub fn poll(&mut self, shape: &Shape) {
        let Some(moves) = &mut self.moves else { return };
        let moves = moves.read();
        self.lost |= moves.lost > 0;
        for moved in moves.list {
            // The last arrival gives the source of the move; it is unknown for a new thread.
            if let Some(from) = self.cpus.insert(moved.thread, moved.to) {
                if from != moved.to {
                    self.seen
                        .entry(moved.process)
                        .or_default()
                        .add(distance(shape, from, moved.to));
                }
            }
        }
        /// Most threads remembered: ended ones stay until there are too many.
        const CPUS_KEPT: usize = 256 * 1024;
        if self.cpus.len() > CPUS_KEPT {
            self.cpus.clear();
        }
    }

    /// Dispatches of the workload since the last query (none at the first), and work of automatic NUMA balancing.
    pub fn ask(
        &mut self,
        root: &Root,
        workload: &Workload,
        shape: &Shape,
        threads: &mut ThreadWatch,
    ) -> (Option<Redispatches>, Option<NumaBalancing>) {
        self.poll(shape);
        for (thread, cpu) in threads.last_cpus() {
            self.cpus.entry(thread).or_insert(cpu);
        }
        let Ok(proc) = Directory::open(root, "/proc") else {
            return (None, None);
        };
        let mut buffer = Vec::new();
        let (mut dispatches, mut migrations) = (0u64, Some(0u64));
        let mut balancing: Option<NumaBalancing> = None;
        let mut compared = false;
        let keys: Vec<(i32, i32)> = threads.known().take(COUNTED_MAX).collect();
        for key in &keys {
            let Some(now) = counts_of(&proc, *key, &mut buffer) else {
                continue;
            };
            if let Some(pages) = now.pages_migrated {
                let balancing = balancing.get_or_insert_default();
                balancing.pages_migrated = balancing.pages_migrated.saturating_add(pages);
                if let Some(node) = now.preferred {
                    *balancing.preferred.entry(node).or_default() += 1;
                }
            }
            let Some(before) = self.counts.insert(*key, now) else {
                continue;
            };
            compared = true;
            dispatches = dispatches.saturating_add(now.dispatches.saturating_sub(before.dispatches));
            migrations = match (migrations, now.migrations, before.migrations) {
                (Some(sum), Some(now), Some(before)) => Some(sum.saturating_add(now.saturating_sub(before))),
                _ => None,
            };
        }
        let own: BTreeSet<i32> = workload.processes.iter().map(|p| p.pid).collect();
        let living: BTreeSet<(i32, i32)> = keys.into_iter().collect();
        self.counts
            .retain(|key, _| !own.contains(&key.0) || living.contains(key));
        let mut moved = Distances::default();
        for process in &own {
            if let Some(seen) = self.seen.remove(process) {
                for (sum, n) in moved.0.iter_mut().zip(seen.0) {
                    *sum += n;
                }
            }
        }
        // With more threads than are counted, moves and dispatches would be of different threads.
        let every_move_seen =
            self.moves.is_some() && !std::mem::take(&mut self.lost) && threads.known().count() <= COUNTED_MAX;
        if self.moves.is_none() {
            moved = std::mem::take(&mut threads.found_moved);
        }
        if !compared {
            return (None, balancing);
        }
        (
            redispatches(dispatches, migrations, moved, every_move_seen),
            balancing,
        )
    }
}

/// Shares of the dispatches by distance. If single moves are hidden, the kernel's count is split as sampled moves.
fn redispatches(
    dispatches: u64,
    migrations: Option<u64>,
    moved: Distances,
    every_move_seen: bool,
) -> Option<Redispatches> {
    let moves = match (every_move_seen, migrations) {
        (true, _) => moved.sum(),
        (false, Some(counted)) if counted == 0 || moved.sum() > 0 => counted,
        (false, _) => return None,
    };
    let all = dispatches.max(moves).max(1) as f64;
    let each = moves as f64 / moved.sum().max(1) as f64;
    let [core, cache, node, other] = moved.0.map(|n| n as f64 * each / all);
    let away = cache + node + other;
    debug_assert!(core + away <= 1.0 + 1e-9);
    Some(Redispatches {
        dispatches: dispatches as f64,
        same_core: (1.0 - away).max(0.0),
        same_cache: cache,
        same_node: node,
        other_node: other,
        every_move_seen,
    })
}

fn counts_of(proc: &Directory, (process, thread): (i32, i32), buffer: &mut Vec<u8>) -> Option<SchedCounts> {
    /// `sched` has some forty lines of sixty characters.
    const TEXT_MAX: usize = 16 * 1024;
    let leaf = format!("task/{thread}/sched");
    if let Ok(text) = proc.read(ProcessFile::new(process, &leaf).name(), buffer, TEXT_MAX) {
        if let Some(counts) = text.whole().and_then(parse_sched) {
            return Some(counts);
        }
    }
    let leaf = format!("task/{thread}/status");
    proc.read(ProcessFile::new(process, &leaf).name(), buffer, SMALL_FILE_MAX)
        .ok()
        .and_then(Text::whole)
        .and_then(parse_switches)
}

#[cfg(test)]
mod tests {
    use super::*;
    use homeostat_model::{Cpu, CpuId};
    use proptest::prelude::*;

    const STAT: &[u8] = b"42 (a) R (b c) S 7 42 9 0 -1 4194560 11 0 12 0 100 50 -1 3 20 0 4 0 5000 1 77 1 1 1 99 0 0 0 0 0 0 0 0 0 17 3 0 0 0 0 0 0\n";

    #[test]
    fn a_thread_tells_its_time_and_its_cpu() {
        assert_eq!(
            parse_thread_stat(STAT),
            Some(ThreadStat {
                cpu_ticks: 150,
                threads: 4,
                start_ticks: 5000,
                cpu: 3
            })
        );
        assert_eq!(parse_thread_stat(&STAT[..100]), None);
    }

    const SCHED: &[u8] = b"cat (11457, #threads: 1)\n-------------------\n\
se.exec_start                                :        460350.267036\n\
se.nr_migrations                             :                   12\n\
nr_switches                                  :                  345\n\
nr_voluntary_switches                        :                    1\n\
numa_pages_migrated                          :                    7\n\
numa_preferred_nid                           :                   -1\n\
current_node=0, numa_group_id=0\n";

    #[test]
    fn the_kernels_counts_are_read() {
        assert_eq!(
            parse_sched(SCHED),
            Some(SchedCounts {
                dispatches: 345,
                migrations: Some(12),
                pages_migrated: Some(7),
                preferred: None
            })
        );
        assert_eq!(parse_sched(b"nothing\n"), None);
        let status = b"Name:\tx\nvoluntary_ctxt_switches:\t5\nnonvoluntary_ctxt_switches:\t6\n";
        assert_eq!(parse_switches(status).map(|c| c.dispatches), Some(11));
    }

    /// Two nodes of two caches of two cores of two CPUs: CPU n and n+8 are siblings.
    fn shape() -> Shape {
        let cpus: Vec<Cpu> = (0..16)
            .map(|id| Cpu {
                id: CpuId(id),
                core: id % 8,
                package: 0,
                llc: LlcId(id % 8 / 2 * 2),
                node: NodeId(id % 8 / 4),
                set_aside: false,
            })
            .collect();
        Shape::of(&cpus)
    }

    #[test]
    fn cpus_are_told_apart_by_what_they_share() {
        let shape = shape();
        assert_eq!(distance(&shape, 0, 8), Distance::Core);
        assert_eq!(distance(&shape, 0, 9), Distance::Cache);
        assert_eq!(distance(&shape, 0, 2), Distance::Node);
        assert_eq!(distance(&shape, 0, 4), Distance::Other);
        assert_eq!(distance(&shape, 0, 99), Distance::Core);
    }

    #[test]
    fn shares_of_dispatches_sum_to_one() {
        let seen = redispatches(1000, Some(50), Distances([10, 20, 30, 40]), true).unwrap();
        assert_eq!(
            (seen.same_core, seen.same_cache, seen.same_node, seen.other_node),
            (0.91, 0.02, 0.03, 0.04)
        );
        // Not each seen: the kernel's 500 moves, shared out as the 10 that were found.
        let taken = redispatches(1000, Some(500), Distances([0, 5, 0, 5]), false).unwrap();
        assert_eq!(
            (taken.same_core, taken.same_cache, taken.other_node),
            (0.5, 0.25, 0.25)
        );
        assert!(!taken.every_move_seen);
        assert_eq!(redispatches(1000, Some(500), Distances::default(), false), None);
        let still = redispatches(0, Some(0), Distances::default(), false).unwrap();
        assert_eq!((still.same_core, still.dispatches), (1.0, 0.0));
    }

    struct Tree(tempfile::TempDir);
    impl Tree {
        fn new() -> Self {
            Self(tempfile::tempdir().unwrap())
        }
        fn write(&self, path: &str, text: &str) {
            let path = self.0.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        fn thread(&self, pid: i32, tid: i32, threads: u32, ticks: u64, cpu: u32) {
            let text = format!(
                "{tid} (w) S 1 1 1 0 -1 0 0 0 0 0 {ticks} 0 0 0 20 0 {threads} 0 100 1 1 1 1 1 1 0 0 0 0 0 0 0 0 0 17 {cpu} 0\n"
            );
            self.write(&format!("proc/{pid}/task/{tid}/stat"), &text);
            if pid == tid {
                self.write(&format!("proc/{pid}/stat"), &text);
            }
        }
        fn root(&self) -> Root {
            Root::new(self.0.path())
        }
    }

    fn workload(pids: &[i32]) -> Workload {
        Workload {
            id: "w".into(),
            kind: homeostat_model::WorkloadKind::ProcessGroup,
            former: None,
            owner: homeostat_model::Owner::Machine,
            others: Vec::new(),
            fingerprint: homeostat_model::Fingerprint::new("w"),
            program: "w".into(),
            executable: String::new(),
            processes: pids
                .iter()
                .map(|pid| ProcessId {
                    pid: *pid,
                    start_ticks: 100,
                })
                .collect(),
            choice: homeostat_model::OperatorChoice::default(),
        }
    }

    fn at(second: u64) -> Moment {
        Moment {
            now: Nanoseconds::from_secs(second),
            uptime: Nanoseconds::from_secs(36 + second),
            tick: Nanoseconds::from_millis(10),
        }
    }

    #[test]
    fn cpu_time_is_added_where_the_thread_is_found() {
        let tree = Tree::new();
        tree.thread(10, 10, 2, 1000, 0);
        tree.thread(10, 11, 2, 3000, 4);
        let shape = shape();
        let workload = workload(&[10, 99]);
        let mut watch = ThreadWatch::default();
        watch.look(&tree.root(), &workload, at(5), &shape);
        let first = watch.running(&shape);
        assert_eq!(first.watched, Nanoseconds::ZERO);
        assert_eq!(
            first.by_cache,
            BTreeMap::from([(LlcId(0), 0.25), (LlcId(4), 0.75)])
        );
        assert_eq!((first.threads, first.threads_of_busiest_process), (2, 2));
        // In one second the first thread ran 0.5 s, now on cache 2; the second did not run.
        tree.thread(10, 10, 2, 1050, 2);
        watch.look(&tree.root(), &workload, at(6), &shape);
        let second = watch.running(&shape);
        assert_eq!(second.watched, Nanoseconds::from_secs(1));
        assert_eq!(second.by_cache, BTreeMap::from([(LlcId(2), 0.5)]));
        assert_eq!((second.threads, second.threads_of_busiest_process), (1, 1));
        assert_eq!(watch.found_moved, Distances([0, 0, 1, 0]));
        // A new thread, and later the end of all.
        tree.thread(10, 12, 3, 100, 5);
        watch.look(&tree.root(), &workload, at(7), &shape);
        let third = watch.running(&shape);
        assert!((third.by_cache[&LlcId(4)] - 0.5).abs() < 0.01, "{third:?}");
        std::fs::remove_dir_all(tree.0.path().join("proc/10")).unwrap();
        watch.look(&tree.root(), &workload, at(8), &shape);
        assert_eq!(watch.running(&shape).threads, 0);
    }

    #[test]
    fn a_number_that_was_given_to_another_thread_adds_nothing_of_its_past() {
        let tree = Tree::new();
        tree.thread(10, 10, 1, 1000, 0);
        let shape = shape();
        let mut watch = ThreadWatch::default();
        watch.look(&tree.root(), &workload(&[10]), at(1), &shape);
        let text = std::fs::read_to_string(tree.0.path().join("proc/10/stat")).unwrap();
        tree.write("proc/10/stat", &text.replace(" 0 100 1 ", " 0 200 1 "));
        watch.look(&tree.root(), &workload(&[10]), at(2), &shape);
        assert_eq!(
            watch.running(&shape).threads,
            0,
            "it is not that process any more"
        );
    }

    #[test]
    fn more_threads_than_fit_in_a_look_are_gone_through_by_and_by() {
        let tree = Tree::new();
        let many = THREADS_PER_LOOK as i32 + 100;
        for tid in 0..many {
            tree.thread(10, 10 + tid, many as u32, 100, 0);
        }
        let shape = shape();
        let mut watch = ThreadWatch::default();
        watch.look(&tree.root(), &workload(&[10]), at(1), &shape);
        assert_eq!(watch.threads.len(), THREADS_PER_LOOK);
        watch.look(&tree.root(), &workload(&[10]), at(2), &shape);
        assert_eq!(watch.threads.len(), many as usize);
        assert!(
            watch.running(&shape).by_cache.is_empty(),
            "a first sight is no difference"
        );
    }

    proptest! {
        #[test]
        fn no_bytes_make_a_parser_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let _ = parse_thread_stat(&bytes);
            let _ = parse_sched(&bytes);
            let _ = parse_switches(&bytes);
        }

        #[test]
        fn a_cut_line_is_refused_or_says_the_same(cut in 0..STAT.len()) {
            if let Some(stat) = parse_thread_stat(&STAT[..cut]) {
                prop_assert_eq!((stat.cpu_ticks, stat.start_ticks, stat.cpu), (150, 5000, 3));
            }
        }
    }
}
