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

#[cfg(test)]
mod tests {
    use super::*;

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
