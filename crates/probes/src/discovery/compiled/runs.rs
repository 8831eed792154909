//! Counts how often threads get a CPU, from `schedstat`. Each time, the kernel loads and later unloads a thread's
//! hardware breakpoints, which costs the same with or without hits.

use homeostat_kernel::process::read_at;
use homeostat_meters::cpu_time::ran;
use std::collections::BTreeMap;
use std::os::fd::AsFd;

/// How often each of these threads of a process got a CPU. Ended threads are missing. All are missing on kernels
/// without `schedstat`, where no search can find busy threads.
pub(crate) fn runs(process: impl AsFd, threads: impl IntoIterator<Item = i32>) -> BTreeMap<i32, u64> {
    let mut buffer = [0u8; 128];
    let times = |thread| {
        let n = read_at(&process, &format!("task/{thread}/schedstat"), &mut buffer).ok()?;
        Some((thread, ran(buffer.get(..n)?)?.times))
    };
    threads.into_iter().filter_map(times).collect()
}

/// How often threads got a CPU while they had breakpoints.
#[derive(Debug, Default)]
pub(crate) struct Switches {
    last: BTreeMap<i32, u64>,
    total: u64,
}

impl Switches {
    /// Reads the threads that have breakpoints. A new thread counts from here on, a vanished one to the last reading.
    pub(crate) fn look(&mut self, now: BTreeMap<i32, u64>) {
        for (thread, times) in &now {
            let before = self.last.get(thread).unwrap_or(times);
            self.total = self.total.saturating_add(times.saturating_sub(*before));
        }
        self.last = now;
    }

    /// The number since the last call.
    pub(crate) fn take(&mut self) -> u64 {
        std::mem::take(&mut self.total)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn switches_count_from_the_first_look_at_a_thread_to_the_last() {
        let mut switches = Switches::default();
        switches.look(BTreeMap::from([(1, 100), (2, 50)]));
        assert_eq!(switches.take(), 0, "what was before is not ours");
        switches.look(BTreeMap::from([(1, 130), (3, 70)]));
        switches.look(BTreeMap::from([(1, 131), (3, 75)]));
        assert_eq!(switches.take(), 36);
        assert_eq!(switches.take(), 0);
        // The breakpoints are given back, and taken again later. A number that is another thread's does not count back.
        switches.look(BTreeMap::new());
        switches.look(BTreeMap::from([(1, 900), (3, 80)]));
        switches.look(BTreeMap::from([(1, 901), (3, 2)]));
        assert_eq!(switches.take(), 1);
    }

    #[test]
    fn runs_are_the_third_number_and_who_has_ended_has_none() {
        let tree = tempfile::tempdir().unwrap();
        for (thread, text) in [(5, "1000 2000 30\n"), (6, "odd\n"), (7, "")] {
            let path = tree.path().join(format!("task/{thread}"));
            std::fs::create_dir_all(&path).unwrap();
            std::fs::write(path.join("schedstat"), text).unwrap();
        }
        let directory = std::fs::File::open(tree.path()).unwrap();
        assert_eq!(runs(&directory, [5, 6, 7, 8]), BTreeMap::from([(5, 30)]));
    }
}
