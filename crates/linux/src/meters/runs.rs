//! How often threads are given a CPU, as `schedstat` tells.
//!
//! Each time the kernel loads the breakpoints of a thread into the processor, and takes them out when it loses the CPU: that costs
//! as much whether they are hit or not. And a server that waits for each request is given a CPU once for each, which tells how
//! much it did while nothing of it was counted ([`Runs`]).

use super::common::{numbers_in, open_process, read_at};
use crate::Root;
use crate::sensors::bytes::{number, words};
use homeostat_model::ProcessId;
use std::collections::BTreeMap;
use std::os::fd::AsFd;

/// Times that each of these threads of a process was given a CPU. One that has ended is left out, and all are where this kernel does
/// not tell; there no search finds who is busy.
pub(super) fn runs(process: impl AsFd, threads: impl IntoIterator<Item = i32>) -> BTreeMap<i32, u64> {
    let mut buffer = [0u8; 128];
    let times = |thread| {
        let n = read_at(&process, &format!("task/{thread}/schedstat"), &mut buffer).ok()?;
        let times = words(buffer.get(..n)?).nth(2).and_then(number)?;
        Some((thread, times))
    };
    threads.into_iter().filter_map(times).collect()
}

/// How often threads were given a CPU while they had breakpoints.
#[derive(Debug, Default)]
pub(super) struct Switches {
    last: BTreeMap<i32, u64>,
    total: u64,
}

impl Switches {
    /// Looks at those that have breakpoints now. What one does that was not there at the last look counts from here on, and what one
    /// did that is not there any more up to the last look.
    pub(super) fn look(&mut self, now: BTreeMap<i32, u64>) {
        for (thread, times) in &now {
            let before = self.last.get(thread).unwrap_or(times);
            self.total = self.total.saturating_add(times.saturating_sub(*before));
        }
        self.last = now;
    }

    /// How often, since this was asked last.
    pub(super) fn take(&mut self) -> u64 {
        std::mem::take(&mut self.total)
    }
}

/// Most threads that [`Runs`] looks at: each costs a file of some 4 µs.
const THREADS_MAX: usize = 64;

/// How often the threads of processes that come and go were given a CPU.
#[derive(Debug, Default)]
pub(super) struct Runs {
    switches: Switches,
    total: u64,
}

impl Runs {
    /// How often since the first look; of a thread that came later, since it was seen first. `None`: there are too many of them, or the kernel
    /// does not tell; then all that follows begins anew.
    pub(super) fn read(&mut self, root: &Root, processes: &[ProcessId]) -> Option<u64> {
        let now = Self::now(root, processes);
        if now.is_none() {
            self.switches = Switches::default();
        }
        self.switches.look(now?);
        self.total = self.total.saturating_add(self.switches.take());
        Some(self.total)
    }

    fn now(root: &Root, processes: &[ProcessId]) -> Option<BTreeMap<i32, u64>> {
        let mut all = BTreeMap::new();
        for process in processes {
            // One that is gone has no threads.
            let Ok(dir) = open_process(root, *process) else {
                continue;
            };
            let (threads, more) = numbers_in(&dir, "task", THREADS_MAX).ok()?;
            if more || all.len() + threads.len() > THREADS_MAX {
                return None;
            }
            all.extend(runs(&dir, threads));
        }
        (!all.is_empty()).then_some(all)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_of_threads_add_up_and_too_many_say_nothing() {
        let tree = tempfile::tempdir().unwrap();
        let process = ProcessId {
            pid: 7,
            start_ticks: 9,
        };
        let mut stat = b"7 (x) S".to_vec();
        (4..22).for_each(|_| stat.extend_from_slice(b" 0"));
        stat.extend_from_slice(b" 9 0 0\n");
        let put = |thread: usize, times: u64| {
            let dir = tree.path().join(format!("proc/7/task/{thread}"));
            std::fs::create_dir_all(&dir).unwrap();
            std::fs::write(dir.join("schedstat"), format!("1 2 {times}\n")).unwrap();
        };
        put(7, 10);
        put(8, 100);
        std::fs::write(tree.path().join("proc/7/stat"), stat).unwrap();
        let root = Root::new(tree.path());
        let mut seen = Runs::default();
        assert_eq!(seen.read(&root, &[process]), Some(0));
        put(8, 130);
        put(9, 5);
        assert_eq!(seen.read(&root, &[process]), Some(30));
        put(9, 6);
        assert_eq!(seen.read(&root, &[process]), Some(31));
        let other = ProcessId {
            start_ticks: 10,
            ..process
        };
        assert_eq!(seen.read(&root, &[other]), None, "another process by now");
        put(9, 60);
        assert_eq!(
            seen.read(&root, &[process]),
            Some(31),
            "what was done meanwhile is not known"
        );
        (10..80).for_each(|thread| put(thread, 1));
        assert_eq!(seen.read(&root, &[process]), None);
    }

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
