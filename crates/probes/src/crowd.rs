//! Concurrency: how many threads can hit a site at once, and what that costs beyond the measurements.
//!
//! The cost of a hit is measured with up to 16 threads, or known for few ([`uprobe`](crate::uprobe)). Beyond that it is
//! assumed to grow with the number of threads, as with one lock taken in turn. Kernels before 6.14 do take a lock per
//! hit: that of the address space. There, a thread that maps memory blocks all hitting threads. So on these kernels,
//! only programs with few concurrent threads are counted, unless a person names the function.

use homeostat_kernel::Root;
use homeostat_kernel::numa::{CpuMask, affinity};
use homeostat_kernel::probe::process_cpu_time;
use homeostat_kernel::process::{numbers_in, open_process};
use homeostat_kernel::release::{kernel_release, kernel_version};
use homeostat_meters::cpu_time::{Threads, all_ran};
use homeostat_meters::tasks::online_cpus;
use homeostat_model::ProcessId;
use homeostat_points::HIT_COST;
use homeostat_sensors::storage::Refusal;
use std::collections::{BTreeMap, BTreeSet};

/// Most threads with which the cost of a hit is measured.
pub(super) const MEASURED_MAX: usize = 16;
/// Most threads of one process that may hit at once on kernels with that lock.
const FEW: usize = 4;
/// The first kernel without that lock.
const WITHOUT_LOCK: (u32, u32) = (6, 14);

/// Most threads that are read one by one, at about 10 µs each. With more, all are assumed to run at once.
const THREADS_MAX: usize = 256;
/// Less run time than this (nanoseconds), some ticks of the CPU clock, does not show concurrency.
const RUN_MIN: u64 = 20_000_000;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Crowd {
    /// Of all processes, at most the number of CPUs.
    at_once: usize,
    /// Of the process with the most.
    in_one: usize,
    /// CPUs of the machine: the limit if more threads come.
    cpus: usize,
    locked: bool,
}

impl Crowd {
    pub(super) fn of(root: &Root, processes: &[ProcessId]) -> Self {
        // CPUs of the machine, because this process may be limited to few.
        let most = online_cpus(root).len().max(1);
        let (mut all, mut in_one) = (0, 0);
        for process in processes {
            let of_it = open_process(root, *process)
                .ok()
                .and_then(|dir| numbers_in(&dir, "task", most).ok())
                .map_or(1, |(threads, _)| threads.len());
            all += of_it;
            in_one = in_one.max(of_it);
        }
        Self {
            at_once: all.clamp(1, most),
            in_one: in_one.clamp(1, most),
            cpus: most,
            // An unknown kernel version may be an old one.
            locked: kernel_version(&kernel_release(root)).is_none_or(|version| version < WITHOUT_LOCK),
        }
    }

    /// Numbers of threads to measure for any concurrency: one, two and the maximum. Two, because a second thread may
    /// come and costs more than twice as much (measured: 0.7 µs and 1.6 µs).
    pub(super) fn telling(self) -> BTreeSet<usize> {
        BTreeSet::from([1, 2.min(self.cpus), self.measured()])
    }

    pub(super) fn measured(self) -> usize {
        self.at_once.min(MEASURED_MAX)
    }

    /// Factor on the measured cost.
    pub(super) fn beyond_the_measured(self) -> f64 {
        self.at_once as f64 / self.measured() as f64
    }

    /// Factor on the cost for few threads, where nothing was measured.
    pub(super) fn beyond_few(self) -> f64 {
        let few = if self.locked { FEW } else { MEASURED_MAX };
        (self.at_once as f64 / few as f64).max(1.0)
    }

    /// Checks that this kernel allows so many threads at a site that no person named.
    ///
    /// # Errors
    /// A sentence: too many.
    pub(super) fn allow(self) -> Result<(), Refusal> {
        if self.locked && self.in_one > FEW {
            return Err(Refusal::Lasting(format!(
                "{} of its threads can run at once, and this kernel locks their address space for each hit (Linux before {}.{}): \
                 no more than {FEW} are counted so",
                self.in_one, WITHOUT_LOCK.0, WITHOUT_LOCK.1
            )));
        }
        Ok(())
    }
}

/// Cost of a hit at the actual concurrency: of a dozen threads, perhaps one works.
pub(super) struct AtOnce {
    crowd: Crowd,
    /// Measured cost of a hit by number of threads (seconds of CPU time of each).
    costs: BTreeMap<usize, f64>,
    /// The last sample that showed something.
    last: Option<Look>,
    /// The last sample showed nothing.
    vain: bool,
    cost: f64,
}

impl AtOnce {
    /// `costs` covers [`telling`](Crowd::telling). Before the first sample, all threads count as concurrent.
    pub(super) fn new(crowd: Crowd, costs: BTreeMap<usize, f64>) -> Self {
        let mut at_once = Self {
            crowd,
            costs,
            last: None,
            vain: false,
            cost: 0.0,
        };
        at_once.cost = at_once.cost_of(f64::INFINITY);
        at_once
    }

    pub(super) fn costs(&self) -> &BTreeMap<usize, f64> {
        &self.costs
    }

    /// Cost of a hit by the last sample (seconds of CPU time).
    pub(super) fn cost(&self) -> f64 {
        self.cost
    }

    pub(super) fn are_now(&mut self, crowd: Crowd) {
        self.crowd = crowd;
    }

    /// Starts an interval, or continues the old one if the last sample showed nothing.
    pub(super) fn begin(&mut self, root: &Root, processes: impl Iterator<Item = ProcessId>) {
        if !std::mem::replace(&mut self.vain, false) {
            self.last = Some(Look::take(root, processes));
        }
    }

    /// Ends an interval and returns its cost of a hit. If hardly anything ran, the cost stays and the interval goes on.
    pub(super) fn look(&mut self, root: &Root, processes: impl Iterator<Item = ProcessId>) -> f64 {
        let now = Look::take(root, processes);
        let Some(last) = &self.last else {
            self.last = Some(now);
            return self.cost;
        };
        if let Some(ran) = now.since(last) {
            self.cost = self.price(&ran, cpus_of(&ran.threads));
            self.last = Some(now);
        } else {
            self.vain = true;
        }
        self.cost
    }

    /// Cost of a hit at this concurrency, limited to `cpus`.
    fn price(&self, ran: &WhoRan, cpus: f64) -> f64 {
        let overlap = ran.overlap.min(cpus);
        // An unseen thread may have run beside any seen one.
        let unseen = (ran.unseen * (1.0 + overlap)).min(1.0);
        unseen * self.cost_of(f64::INFINITY) + (1.0 - unseen) * self.cost_of(overlap)
    }

    /// Mean cost of a hit at a mean concurrency, interpolated between the measured numbers.
    fn cost_of(&self, overlap: f64) -> f64 {
        let overlap = overlap.clamp(1.0, self.crowd.at_once as f64);
        let known = |(threads, cost): (&usize, &f64)| (*threads as f64, *cost);
        let below = self.costs.range(..=overlap as usize).next_back().map(known);
        let above = self.costs.range(overlap.ceil() as usize..).next().map(known);
        match (below, above) {
            (Some((few, cost)), Some((many, more))) if many > few => {
                cost + (overlap - few) / (many - few) * (more - cost).max(0.0)
            }
            (Some((few, cost)), None) => cost * overlap / few,
            (Some((_, cost)), Some(_)) | (None, Some((_, cost))) => cost,
            (None, None) => HIT_COST * self.crowd.beyond_few(),
        }
    }
}

/// Upper bound of the mean concurrency, weighted by CPU time: each shorter run counts as overlapping every longer one.
/// Threads that share a CPU in turn appear concurrent. The bound assumes hits in proportion to CPU time. It is too low
/// if the hits come from a thread that runs rarely and always beside another hitting thread.
fn overlap(mut used: Vec<u64>) -> f64 {
    used.sort_unstable_by(|a, b| b.cmp(a));
    let all: u64 = used.iter().sum();
    if all == 0 {
        return 1.0;
    }
    // Each pair overlaps for the shorter time, which counts for both.
    let weighted: f64 = (0..)
        .zip(&used)
        .map(|(n, ns)| (1.0 + 2.0 * f64::from(n)) * *ns as f64)
        .sum();
    weighted / all as f64
}

#[derive(Debug)]
struct Look {
    /// CPU time of each process (nanoseconds), before its threads were read …
    before: BTreeMap<ProcessId, u64>,
    /// Run time of each thread. `None`: too many threads.
    threads: Option<Threads>,
    /// … and after, because a tick may come between.
    after: BTreeMap<ProcessId, u64>,
}

impl Look {
    fn take(root: &Root, processes: impl Iterator<Item = ProcessId>) -> Self {
        let time = |process: ProcessId| Some((process, process_cpu_time(process.pid)?));
        let before: BTreeMap<ProcessId, u64> = processes.filter_map(time).collect();
        let (threads, whole) = all_ran(root, before.keys().copied(), THREADS_MAX);
        Self {
            after: before.keys().copied().filter_map(time).collect(),
            before,
            threads: whole.then_some(threads),
        }
    }

    /// Who has run since then. `None`: hardly anything ran.
    fn since(&self, then: &Self) -> Option<WhoRan> {
        let nobody_seen = Some(WhoRan {
            overlap: 1.0,
            unseen: 1.0,
            threads: Vec::new(),
        });
        if !self.before.keys().eq(then.after.keys()) {
            // A process came or ended, so its run time is unknown.
            return nobody_seen;
        }
        let used = self.before.values().zip(then.after.values());
        // The interval between the two readings of threads, unless one has ended: no more than they show.
        let used: u64 = used.map(|(now, then)| now.saturating_sub(*then)).sum();
        if used < RUN_MIN {
            return None;
        }
        let Some((now, then)) = self.threads.as_ref().zip(then.threads.as_ref()) else {
            return nobody_seen;
        };
        let ran: Vec<(i32, u64)> = now
            .iter()
            .map(|(thread, ran)| {
                let before = then.get(thread).map_or(0, |ran| ran.ns);
                (thread.1, ran.ns.saturating_sub(before))
            })
            .filter(|(_, ns)| *ns > 0)
            .collect();
        let seen: u64 = ran.iter().map(|(_, ns)| ns).sum();
        Some(WhoRan {
            unseen: used.saturating_sub(seen) as f64 / used as f64,
            threads: ran.iter().map(|(thread, _)| *thread).collect(),
            overlap: overlap(ran.into_iter().map(|(_, ns)| ns).collect()),
        })
    }
}

#[derive(Debug, PartialEq)]
struct WhoRan {
    /// Mean concurrency of the seen threads, as an upper bound.
    overlap: f64,
    /// Share of the CPU time of threads that ended or were too many to read.
    unseen: f64,
    threads: Vec<i32>,
}

/// CPUs on which any of these threads may run, which limits the concurrency.
fn cpus_of(threads: &[i32]) -> f64 {
    let of_all = threads.iter().try_fold(CpuMask::default(), |all, thread| {
        Some(all.or(&affinity(*thread).ok()?))
    });
    match of_all {
        Some(cpus) if !cpus.is_empty() => f64::from(cpus.count()),
        // A thread has ended, or none ran.
        _ => f64::INFINITY,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use homeostat_meters::cpu_time::Ran;

    #[test]
    fn threads_overlap_as_long_as_the_shorter_one_runs() {
        assert_eq!(overlap(vec![]), 1.0);
        assert_eq!(overlap(vec![7, 0, 0]), 1.0);
        assert_eq!(overlap(vec![5, 5]), 2.0, "by turns or at once: it cannot be told");
        assert_eq!(overlap(vec![3; 16]), 16.0);
        assert_eq!(overlap(vec![10, 90]), 1.2);
    }

    #[test]
    fn a_hit_costs_what_those_make_it_cost_that_run_at_once() {
        let costs = |threads: &[usize]| {
            let cost = |n: &usize| if *n == 1 { 1.0 } else { 1.5 * *n as f64 };
            threads.iter().map(|n| (*n, cost(n))).collect()
        };
        let cost =
            |n, known: &[usize], overlap| AtOnce::new(crowd(n, n, false), costs(known)).cost_of(overlap);
        for (overlap, expected) in [
            (0.5, 1.0),
            (1.0, 1.0),
            (1.25, 1.5),
            (2.0, 3.0),
            (3.0, 4.5),
            (4.0, 6.0),
            (9.0, 6.0),
        ] {
            assert_eq!(cost(4, &[1, 2, 4], overlap), expected, "{overlap}");
        }
        assert_eq!(cost(1, &[1], 5.0), 1.0);
        assert_eq!(
            cost(64, &[1, 2, 16], 32.0),
            48.0,
            "beyond what was measured as if by one lock"
        );
        assert_eq!(cost(4, &[1], 3.0), 3.0, "threads have come since");
        assert_eq!(cost(4, &[4], 1.0), 6.0);
        assert_eq!(cost(4, &[], 4.0), HIT_COST);
        assert_eq!(
            AtOnce::new(crowd(4, 4, false), costs(&[1, 2, 4])).cost(),
            6.0,
            "nobody has looked"
        );
        let telling = |n| Vec::from_iter(crowd(n, n, false).telling());
        assert_eq!(
            (telling(1), telling(2), telling(64)),
            (vec![1, 2], vec![1, 2], vec![1, 2, MEASURED_MAX])
        );
        let alone = Crowd {
            cpus: 1,
            ..crowd(1, 1, false)
        };
        assert_eq!(Vec::from_iter(alone.telling()), [1]);
    }

    fn crowd(at_once: usize, in_one: usize, locked: bool) -> Crowd {
        Crowd {
            at_once,
            in_one,
            cpus: 8,
            locked,
        }
    }

    #[test]
    fn what_was_not_measured_is_taken_to_grow_with_the_threads() {
        for threads in [1, 4, 16] {
            assert_eq!(crowd(threads, threads, false).measured(), threads);
            assert_eq!(crowd(threads, threads, false).beyond_the_measured(), 1.0);
            assert_eq!(crowd(threads, threads, false).beyond_few(), 1.0);
        }
        assert_eq!(crowd(64, 64, false).measured(), MEASURED_MAX);
        assert_eq!(crowd(64, 64, false).beyond_the_measured(), 4.0);
        assert_eq!(crowd(64, 64, false).beyond_few(), 4.0);
        assert_eq!(crowd(64, 64, true).beyond_few(), 16.0);
    }

    #[test]
    fn on_kernels_that_lock_at_each_hit_few_threads_of_a_process_are_counted() {
        assert_eq!(crowd(512, 512, false).allow(), Ok(()));
        assert_eq!(crowd(64, 4, true).allow(), Ok(()), "sixteen processes of four");
        let why = crowd(8, 5, true).allow().unwrap_err();
        assert!(
            matches!(&why, Refusal::Lasting(text) if text.contains("6.14")),
            "{why}"
        );
    }

    #[test]
    fn threads_are_counted_up_to_the_cpus_and_the_kernel_is_asked_its_version() {
        let tree = tempfile::tempdir().unwrap();
        let write = |file: &str, text: &str| {
            let path = tree.path().join(file);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        let process = |pid: i32, threads: i32| {
            let stat = format!("{pid} (a) S 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 42 20 21");
            write(&format!("proc/{pid}/stat"), &stat);
            for thread in pid..pid + threads {
                write(&format!("proc/{pid}/task/{thread}/stat"), &stat);
            }
            ProcessId { pid, start_ticks: 42 }
        };
        let processes = [process(100, 3), process(200, 30), process(300, 1)];
        write("sys/devices/system/cpu/online", "0-7\n");
        for (release, locked) in [("6.13.9-amd64\n", true), ("6.14.0\n", false), ("7.0.1\n", false)] {
            write("proc/sys/kernel/osrelease", release);
            let root = Root::new(tree.path());
            assert_eq!(Crowd::of(&root, &processes), crowd(8, 8, locked), "{release}");
            assert_eq!(Crowd::of(&root, &processes[..1]), crowd(3, 3, locked));
        }
    }

    #[test]
    fn who_has_run_is_told_by_threads_and_what_was_not_seen_to() {
        const MS: u64 = 1_000_000;
        let id = |pid| ProcessId { pid, start_ticks: 1 };
        // CPU time of processes 1, 2, …, and of threads of the first (milliseconds).
        let look = |processes: &[u64], threads: Option<&[u64]>| Look {
            before: (1..).zip(processes).map(|(pid, ms)| (id(pid), ms * MS)).collect(),
            after: (1..).zip(processes).map(|(pid, ms)| (id(pid), ms * MS)).collect(),
            threads: threads.map(|all| {
                let all = (1..).zip(all);
                let ran = |ms: &u64| Ran {
                    ns: ms * MS,
                    times: 1,
                };
                all.map(|(thread, ms)| ((id(1), thread), ran(ms))).collect()
            }),
        };
        let before = look(&[1_000], Some(&[700, 300]));
        // How many at once, and how much of the CPU time by nobody that was seen.
        let ran = |processes, threads| {
            let ran = look(processes, threads).since(&before)?;
            Some((ran.overlap, ran.unseen, ran.threads.len()))
        };
        assert_eq!(ran(&[1_100], Some(&[800, 300])), Some((1.0, 0.0, 1)));
        assert_eq!(ran(&[1_100], Some(&[750, 350])), Some((2.0, 0.0, 2)));
        assert_eq!(
            ran(&[1_100], Some(&[750, 300, 50])),
            Some((2.0, 0.0, 2)),
            "one was born and ran"
        );
        assert_eq!(ran(&[1_009], Some(&[709, 300])), None, "too little to tell");
        assert_eq!(
            ran(&[1_400], Some(&[800, 300])),
            Some((1.0, 0.75, 1)),
            "one has ended and ran"
        );
        assert_eq!(
            ran(&[1_100], Some(&[810, 300])),
            Some((1.0, 0.0, 1)),
            "a tick came between the two"
        );
        assert_eq!(
            ran(&[1_100, 9_000], Some(&[800, 300])),
            Some((1.0, 1.0, 0)),
            "a process has come"
        );
        let of_two = look(&[1_000, 9_000], Some(&[700, 300]));
        let ended = look(&[1_100], Some(&[800, 300])).since(&of_two);
        assert_eq!(ended.map(|ran| ran.unseen), Some(1.0), "a process has ended");
        let late = Look {
            before: BTreeMap::from([(id(1), 900 * MS)]),
            ..look(&[1_000], Some(&[700, 300]))
        };
        let ran_since = look(&[1_100], Some(&[800, 300])).since(&late);
        assert_eq!(
            ran_since.map(|ran| ran.unseen),
            Some(0.0),
            "a tick came while it was looked"
        );
        assert_eq!(ran(&[1_100], None), Some((1.0, 1.0, 0)), "too many threads");
    }

    #[test]
    fn who_was_not_seen_may_have_run_beside_those_that_were() {
        let at_once = AtOnce::new(crowd(4, 4, false), BTreeMap::from([(1, 1.0), (2, 3.0), (4, 7.0)]));
        let price = |overlap, unseen, cpus| {
            let threads = Vec::new();
            at_once.price(
                &WhoRan {
                    overlap,
                    unseen,
                    threads,
                },
                cpus,
            )
        };
        assert_eq!(price(1.0, 0.0, 4.0), 1.0);
        assert_eq!(price(2.0, 0.0, 4.0), 3.0);
        assert_eq!(price(2.0, 0.0, 1.0), 1.0, "they are bound to one CPU");
        assert_eq!(
            price(1.0, 0.25, 4.0),
            4.0,
            "half of the time as if all ran at once"
        );
        assert_eq!(price(1.0, 0.5, 4.0), 7.0);
        assert_eq!(price(2.0, 1.0, 4.0), 7.0);
    }

    #[test]
    fn no_more_run_at_once_than_there_are_cpus_for_them() {
        let own = rustix::thread::gettid().as_raw_nonzero().get();
        let cpus = f64::from(affinity(own).unwrap().count());
        assert_eq!(cpus_of(&[own]), cpus);
        assert_eq!(cpus_of(&[own, own]), cpus);
        assert_eq!(cpus_of(&[]), f64::INFINITY);
        assert_eq!(cpus_of(&[own, i32::MAX]), f64::INFINITY, "one has ended");
    }

    #[test]
    fn a_hit_costs_what_was_measured_before_where_hardly_anything_ran() {
        let costs = BTreeMap::from([(1, 1.0), (2, 3.0), (4, 6.0)]);
        let mut at_once = AtOnce::new(crowd(4, 4, false), costs);
        let nobody = || std::iter::empty();
        let root = Root::default();
        assert_eq!(at_once.look(&root, nobody()), 6.0, "the first look tells nothing");
        assert_eq!(at_once.look(&root, nobody()), 6.0);
        assert_eq!(at_once.cost(), 6.0);
        // A window that begins goes on with that one: it is looked at nobody new.
        let own = rustix::process::getpid().as_raw_nonzero().get();
        let somebody = || {
            std::iter::once(ProcessId {
                pid: own,
                start_ticks: 1,
            })
        };
        at_once.begin(&root, somebody());
        assert_eq!(at_once.last.as_ref().map(|look| look.before.len()), Some(0));
        at_once.begin(&root, somebody());
        assert_eq!(at_once.last.as_ref().map(|look| look.before.len()), Some(1));
    }
}
