//! Estimates the counting cost of forked children that are not counted.
//!
//! A forked child inherits the breakpoints and pays for each hit, but the kernel counts only the requested processes.
//! The process scan adds long-lived children to the workload. Until then, and for short-lived children, the estimate
//! assumes the hit rate per CPU second of the counted processes.

use homeostat_kernel::Root;
use homeostat_kernel::probe::process_cpu_time;
use homeostat_kernel::process::{numbers_in, open_process, read_at, start_ticks, text_of};
use homeostat_meters::code_file::executable;
use homeostat_model::ProcessId;
use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::OwnedFd;

const CHILDREN_MAX: usize = 1024;
/// Most bytes read of a list of children: about 100,000 of them.
const CHILDREN_TEXT_MAX: usize = 1 << 20;
/// Threads of a process whose children are read.
const THREADS_MAX: usize = 1024;
/// Most forks per turn: each fork copies the pages with breakpoints.
pub(crate) const FORKS_MAX: usize = 20;

#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Unpaid {
    /// Seconds of CPU time.
    pub(crate) cpu: f64,
    pub(crate) forks: usize,
}

#[derive(Clone, Debug, Default)]
pub(crate) struct Children {
    /// CPU time of each living child (seconds).
    living: BTreeMap<ProcessId, f64>,
    /// CPU time of the ended and reaped children of each counted process (seconds).
    ended: BTreeMap<ProcessId, f64>,
    looked: bool,
}

impl Children {
    /// Activity since the last call, zero in the first. `programs`: those whose breakpoints a child may inherit.
    pub(crate) fn since(
        &mut self,
        root: &Root,
        counted: &[ProcessId],
        programs: &BTreeSet<(u64, u64)>,
    ) -> Unpaid {
        let mut living = BTreeMap::new();
        let mut ended = BTreeMap::new();
        for parent in counted {
            let Ok(dir) = open_process(root, *parent) else {
                continue;
            };
            ended.extend(cpu_of_ended(&dir).map(|cpu| (*parent, cpu)));
            for child in children_of(&dir) {
                if living.len() >= CHILDREN_MAX {
                    break;
                }
                // A child that runs another program has lost the breakpoints.
                let Some(child) = identity(root, child) else {
                    continue;
                };
                if !counted.contains(&child) && executable(root, child).is_some_and(|e| programs.contains(&e))
                {
                    living.extend(process_cpu_time(child.pid).map(|ns| (child, ns as f64 / 1e9)));
                }
            }
        }
        let unpaid = if self.looked {
            self.difference(&living, &ended)
        } else {
            Unpaid::default()
        };
        *self = Self {
            living,
            ended,
            looked: true,
        };
        unpaid
    }

    fn difference(&self, living: &BTreeMap<ProcessId, f64>, ended: &BTreeMap<ProcessId, f64>) -> Unpaid {
        let grown = |now: &BTreeMap<ProcessId, f64>, then: &BTreeMap<ProcessId, f64>, new: f64| -> f64 {
            now.iter()
                .map(|(p, cpu)| cpu - then.get(p).copied().unwrap_or(new * cpu))
                .map(|grown| grown.max(0.0))
                .sum()
        };
        Unpaid {
            // New children did all their work since the last call. Children reaped before the count began do not
            // matter.
            cpu: grown(living, &self.living, 0.0) + grown(ended, &self.ended, 1.0),
            forks: living.keys().filter(|c| !self.living.contains_key(c)).count(),
        }
    }
}

fn identity(root: &Root, pid: i32) -> Option<ProcessId> {
    let mut buffer = [0u8; 1024];
    let file = std::fs::File::open(root.path(&format!("/proc/{pid}/stat"))).ok()?;
    let n = homeostat_kernel::process::read_full(&file, &mut buffer).ok()?;
    let start_ticks = start_ticks(buffer.get(..n)?)?;
    Some(ProcessId { pid, start_ticks })
}

fn children_of(dir: &OwnedFd) -> Vec<i32> {
    let Ok((threads, _)) = numbers_in(dir, "task", THREADS_MAX) else {
        return Vec::new();
    };
    let mut found = Vec::new();
    for thread in threads {
        let Ok(text) = text_of(dir, &format!("task/{thread}/children"), CHILDREN_TEXT_MAX) else {
            continue;
        };
        found.extend(
            text.split_ascii_whitespace()
                .filter_map(|n| n.parse::<i32>().ok()),
        );
        if found.len() >= CHILDREN_MAX {
            break;
        }
    }
    found
}

/// CPU time of the reaped children of a process (seconds): fields 16 and 17 of `stat`, proc_pid_stat(5).
fn cpu_of_ended(dir: &OwnedFd) -> Option<f64> {
    let mut buffer = [0u8; 1024];
    let n = read_at(dir, "stat", &mut buffer).ok()?;
    ended(buffer.get(..n)?, rustix::param::clock_ticks_per_second())
}

fn ended(stat: &[u8], ticks_per_second: u64) -> Option<f64> {
    let after_name = stat.iter().rposition(|&c| c == b')')? + 1;
    let mut fields = std::str::from_utf8(stat.get(after_name..)?)
        .ok()?
        .split_ascii_whitespace()
        .skip(13);
    let mut next = || fields.next()?.parse::<i64>().ok();
    let ticks = next()?.saturating_add(next()?).max(0);
    Some(ticks as f64 / ticks_per_second.max(1) as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(pid: i32) -> ProcessId {
        ProcessId { pid, start_ticks: 1 }
    }

    #[test]
    fn what_children_do_is_told_by_those_that_live_and_those_that_were_waited_for() {
        let first = Children {
            living: BTreeMap::from([(id(11), 1.0)]),
            ended: BTreeMap::from([(id(1), 5.0)]),
            looked: true,
        };
        let unpaid = first.difference(
            &BTreeMap::from([(id(11), 1.5), (id(12), 0.25)]),
            &BTreeMap::from([(id(1), 5.5), (id(2), 100.0)]),
        );
        assert!((unpaid.cpu - 1.25).abs() < 1e-9, "{unpaid:?}");
        assert_eq!(unpaid.forks, 1);
        assert_eq!(first.difference(&first.living, &first.ended), Unpaid::default());
    }

    #[test]
    fn the_time_of_ended_children_is_found_behind_any_name() {
        let tail = " S 1 2 3 4 5 6 7 8 9 10 11 12 50 70 15 16 17 18 4242";
        assert_eq!(ended(format!("12 (a) b){tail}").as_bytes(), 100), Some(1.2));
        assert_eq!(ended(b"12 (a) S 1", 100), None);
    }

    #[test]
    fn a_child_of_ours_that_runs_another_program_is_not_ours_to_pay_for() {
        let stat = std::fs::read("/proc/self/stat").unwrap();
        let own = ProcessId {
            pid: std::process::id() as i32,
            start_ticks: start_ticks(&stat).unwrap(),
        };
        let root = Root::default();
        let programs = BTreeSet::from([executable(&root, own).unwrap()]);
        let mut children = Children::default();
        assert_eq!(children.since(&root, &[own], &programs), Unpaid::default());
        let Ok(mut child) = std::process::Command::new("sleep").arg("600").spawn() else {
            println!("skipped: no sleep to start");
            return;
        };
        let pid = child.id() as i32;
        let seen = children_of(&open_process(&root, own).unwrap()).contains(&pid);
        children.since(&root, &[own], &programs);
        let counted = children.living.contains_key(&identity(&root, pid).unwrap());
        let _ = child.kill();
        let _ = child.wait();
        if std::path::Path::new("/proc/thread-self/children").exists() {
            assert!(seen);
        }
        assert!(!counted);
    }
}
