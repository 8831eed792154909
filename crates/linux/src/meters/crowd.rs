//! How many threads can hit a place at once, and what a hit costs them that was not measured.
//!
//! What a hit costs is measured on up to sixteen threads, or known for few ([`uprobe`](super::uprobe)). Beyond that nothing is known;
//! it is taken to grow with their number, as if all that it costs were one lock that they wait for one after the other. Kernels before
//! 6.14 do take one: that of the address space, for each hit. There a thread that maps memory keeps all waiting that hit meanwhile; so on
//! those only programs are counted of whose threads few can run at once, unless a person names the function.

use super::common::{numbers_in, open_process};
use super::concern::Refusal;
use super::tasks::online_cpus;
use crate::Root;
use crate::sensors::topology::{kernel_release, kernel_version};
use homeostat_model::ProcessId;

/// Threads that a hit's cost is measured with at most.
pub(super) const MEASURED_MAX: usize = 16;
/// Threads of one process that hit at once on kernels that lock its address space for each hit.
const FEW: usize = 4;
/// The first kernel that does not.
const WITHOUT_LOCK: (u32, u32) = (6, 14);

/// Threads that can hit places at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Crowd {
    /// Of all processes: as many as there are CPUs, at most.
    at_once: usize,
    /// Of the one with the most.
    in_one: usize,
    /// The kernel locks their address space for each hit.
    locked: bool,
}

impl Crowd {
    /// Those of these processes.
    pub(super) fn of(root: &Root, processes: &[ProcessId]) -> Self {
        // Those of the machine: ourselves we may be bound to few.
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
            // A kernel that does not say which it is may be an old one.
            locked: kernel_version(&kernel_release(root)).is_none_or(|version| version < WITHOUT_LOCK),
        }
    }

    /// What a hit costs on average while so many run at once on average ([`overlap`]), in seconds: between what it costs one and two of
    /// them where it is at most two, and as much as all of them at once make it cost where it is more. `cost`: what it was measured to
    /// cost so many; of all that are [`telling`](Self::telling).
    pub(super) fn cost_at(self, overlap: f64, cost: impl Fn(usize) -> f64) -> f64 {
        if self.measured() < 2 || overlap > 2.0 {
            return cost(self.measured()) * self.beyond_the_measured();
        }
        let (alone, two) = (cost(1), cost(2));
        alone + (overlap.max(1.0) - 1.0) * (two - alone).max(0.0)
    }

    /// How many at once tell what it costs, however many run at once: all of them, and few.
    pub(super) fn telling(self) -> impl Iterator<Item = usize> {
        (1..=2.min(self.measured())).chain([self.measured()])
    }

    /// How many of them a hit's cost is measured with.
    pub(super) fn measured(self) -> usize {
        self.at_once.min(MEASURED_MAX)
    }

    /// So many times what was measured a hit costs.
    pub(super) fn beyond_the_measured(self) -> f64 {
        self.at_once as f64 / self.measured() as f64
    }

    /// So many times what it costs few threads a hit costs, where nothing was measured.
    pub(super) fn beyond_few(self) -> f64 {
        let few = if self.locked { FEW } else { MEASURED_MAX };
        (self.at_once as f64 / few as f64).max(1.0)
    }

    /// Whether so many threads may hit at once on this kernel, in what no person has named.
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

/// How many threads may have run at once at most, on average over the CPU time that each used: as if whoever ran for the shorter time
/// ran while the other did. Many that share a CPU by turns look as many as they are; one beside idle ones is one.
pub(super) fn overlap(used: impl Iterator<Item = u64>) -> f64 {
    let mut used: Vec<u64> = used.collect();
    used.sort_unstable_by(|a, b| b.cmp(a));
    let all: u64 = used.iter().sum();
    if all == 0 {
        return 1.0;
    }
    // Each pair overlaps for what the shorter one ran, which counts for both.
    let weighted: f64 = (0..)
        .zip(&used)
        .map(|(n, ns)| (1.0 + 2.0 * f64::from(n)) * *ns as f64)
        .sum();
    weighted / all as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_overlap_as_long_as_the_shorter_one_runs() {
        assert_eq!(overlap([].into_iter()), 1.0);
        assert_eq!(overlap([7, 0, 0].into_iter()), 1.0);
        assert_eq!(
            overlap([5, 5].into_iter()),
            2.0,
            "by turns or at once: it cannot be told"
        );
        assert_eq!(overlap([3; 16].into_iter()), 16.0);
        assert_eq!(overlap([10, 90].into_iter()), 1.2);
    }

    #[test]
    fn a_hit_costs_what_those_make_it_cost_that_run_at_once() {
        let cost = |threads| if threads == 1 { 1.0 } else { 1.5 * threads as f64 };
        let all = crowd(4, 4, false);
        for (overlap, expected) in [
            (0.5, 1.0),
            (1.0, 1.0),
            (1.25, 1.5),
            (2.0, 3.0),
            (2.01, 6.0),
            (9.0, 6.0),
        ] {
            assert_eq!(all.cost_at(overlap, cost), expected, "{overlap}");
        }
        assert_eq!(crowd(1, 1, false).cost_at(1.0, cost), 1.0);
        assert_eq!(crowd(64, 64, false).cost_at(3.0, cost), 4.0 * 24.0);
        let telling = |n| crowd(n, n, false).telling().collect::<Vec<_>>();
        assert_eq!(
            (telling(1), telling(2), telling(64)),
            (vec![1, 1], vec![1, 2, 2], vec![1, 2, MEASURED_MAX])
        );
    }

    fn crowd(at_once: usize, in_one: usize, locked: bool) -> Crowd {
        Crowd {
            at_once,
            in_one,
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
}
