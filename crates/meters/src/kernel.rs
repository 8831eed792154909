//! Kernel counters that tend to follow useful work, for programs that expose no counter. They are read and write calls
//! and bytes from `/proc/PID/io`, which excludes `send` and `recv`, and voluntary context switches. Servers that wait
//! for each request have about one per request. The engine judges from the readings whether they are proportional to
//! the work.

use crate::common::{Cumulative, ENTRIES_MAX, PROCESSES_MAX, not_mine, refused, usable};
use crate::{Meter, MeterKind};
use homeostat_kernel::Root;
use homeostat_kernel::process::{fault, lives, now_ticks, numbers_in, open_process, read_at, status_of};
use homeostat_model::{MeterCandidate, MeterClass, MeterId, ProcessId, Workload};
use homeostat_platform::PlatformError;
use rustix::io::Errno;
use std::collections::BTreeSet;

/// Most threads of a workload whose switches are summed: each costs about 15 µs for a file per reading.
const THREADS_MAX: usize = 256;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Count {
    ReadCalls,
    WriteCalls,
    Bytes,
    VoluntarySwitches,
}
const ALL: [(Count, &str, &str); 4] = [
    (Count::ReadCalls, "io.read_calls", "read call"),
    (Count::WriteCalls, "io.write_calls", "write call"),
    (Count::Bytes, "io.bytes", "byte read or written"),
    (
        Count::VoluntarySwitches,
        "switches.voluntary",
        "voluntary context switch",
    ),
];

/// The meter kind.
pub struct Kernel;

impl MeterKind for Kernel {
    fn find(&mut self, root: &Root, workload: &Workload) -> Vec<MeterCandidate> {
        // One process stands for all: permission and kernel support are the same.
        let main = workload.processes.first().copied();
        let faults = refused(
            "faults.minor",
            MeterClass::Kernel,
            "page fault",
            "page faults change with what is tried (large pages take them away), so they never measure work; use \
             another meter",
        );
        ALL.iter()
            .map(|&(count, id, unit)| {
                let tried = main.ok_or_else(|| "it has no process".to_owned()).and_then(|p| {
                    if workload.processes.len() > PROCESSES_MAX {
                        return Err(format!(
                            "it has {} processes, more than the {PROCESSES_MAX} that are followed; split the \
                             workload into units",
                            workload.processes.len()
                        ));
                    }
                    if count == Count::VoluntarySwitches {
                        switches_are_few(root, workload)?;
                    }
                    read_process(root, p, count)
                        .map(|_| ())
                        .map_err(|e| e.to_string())
                });
                match tried {
                    Ok(()) => usable(id, MeterClass::Kernel, unit),
                    Err(why) => refused(id, MeterClass::Kernel, unit, why),
                }
            })
            .chain([faults])
            .collect()
    }

    fn open(
        &mut self,
        root: &Root,
        workload: &Workload,
        id: &MeterId,
    ) -> Result<Box<dyn Meter>, PlatformError> {
        let (count, ..) = *ALL
            .iter()
            .find(|(_, name, _)| *name == id.as_str())
            .ok_or_else(|| not_mine(id))?;
        let mut meter = KernelMeter {
            root: root.clone(),
            count,
            opened: now_ticks(root),
            seen: BTreeSet::new(),
            sum: Cumulative::new(),
        };
        meter.read(workload)?;
        Ok(Box::new(meter))
    }
}

fn switches_are_few(root: &Root, workload: &Workload) -> Result<(), String> {
    let mut threads = 0;
    for process in &workload.processes {
        let Ok(dir) = open_process(root, *process) else {
            continue;
        };
        threads += numbers_in(&dir, "task", THREADS_MAX + 1).map_or(0, |(tids, _)| tids.len());
        if threads > THREADS_MAX {
            return Err(format!(
                "it has more than {THREADS_MAX} threads, and adding up their switches would cost too much; use a \
                 counter of its own"
            ));
        }
    }
    Ok(())
}

/// A part of the sum: a process, or one of its threads.
type Key = (ProcessId, i32);

struct KernelMeter {
    root: Root,
    count: Count,
    opened: u64,
    /// Processes read before: all counts of their new threads are recent.
    seen: BTreeSet<ProcessId>,
    sum: Cumulative<Key>,
}

impl Meter for KernelMeter {
    fn read(&mut self, workload: &Workload) -> Result<f64, PlatformError> {
        let processes: BTreeSet<ProcessId> = workload.processes.iter().take(PROCESSES_MAX).copied().collect();
        let mut why = None;
        let mut spoilt = None;
        let mut living = BTreeSet::new();
        let mut unread = BTreeSet::new();
        let mut parts = 0;
        for process in &processes {
            match read_process(&self.root, *process, self.count) {
                Ok(counts) => {
                    let whole = process.start_ticks > self.opened || self.seen.contains(process);
                    for (tid, value) in counts {
                        // Beyond the limit only known threads are followed, so the sum stays smooth.
                        parts += 1;
                        if parts <= ENTRIES_MAX || self.sum.knows(&(*process, tid)) {
                            self.sum.set(&(*process, tid), value as f64, whole);
                            living.insert((*process, tid));
                        }
                    }
                    self.seen.insert(*process);
                }
                // Ended since the last scan: its count stays in the sum.
                Err(PlatformError::Vanished { .. }) => {}
                Err(_) if !lives(&self.root, *process) => {}
                Err(e) => {
                    unread.insert(*process);
                    if matches!(e, PlatformError::Busy { .. }) || self.seen.contains(process) {
                        spoilt = Some(e);
                    } else {
                        why = Some(e);
                    }
                }
            }
        }
        // An unreadable process has not ended. If it were forgotten, its whole count would be added again later.
        self.sum
            .retain(|key| living.contains(key) || unread.contains(&key.0));
        self.seen.retain(|p| processes.contains(p));
        // A missing part would appear in the next reading. A process that was never read has no such part.
        if let Some(e) = spoilt {
            return Err(e);
        }
        if living.is_empty() {
            return Err(why.unwrap_or_else(|| PlatformError::Vanished {
                target: workload.id.to_string(),
            }));
        }
        Ok(self.sum.total())
    }
}

/// Voluntary context switches of each thread of a process.
///
/// # Errors
/// It ended, or is unreadable.
pub(super) fn voluntary_switches(root: &Root, process: ProcessId) -> Result<Vec<(i32, u64)>, PlatformError> {
    read_process(root, process, Count::VoluntarySwitches)
}

fn read_process(root: &Root, process: ProcessId, count: Count) -> Result<Vec<(i32, u64)>, PlatformError> {
    let dir = open_process(root, process)?;
    let target = format!("process {process}");
    let path = |file: &str| format!("/proc/{process}/{file}");
    if count != Count::VoluntarySwitches {
        let mut buffer = [0u8; 1024];
        let n = read_at(&dir, "io", &mut buffer).map_err(|e| fault(e, &target, &path("io")))?;
        let text = String::from_utf8_lossy(&buffer[..n]);
        let value = parse_io(&text, count).ok_or_else(|| PlatformError::Malformed {
            path: path("io").into(),
            line: text.lines().next().unwrap_or_default().to_owned(),
        })?;
        return Ok(vec![(0, value)]);
    }
    let (tids, _) = numbers_in(&dir, "task", ENTRIES_MAX).map_err(|e| fault(e, &target, &path("task")))?;
    let mut counts = Vec::with_capacity(tids.len());
    for tid in tids {
        let file = format!("task/{tid}/status");
        let status = match status_of(&dir, &file) {
            Ok(status) => status,
            // A thread may end meanwhile.
            Err(Errno::NOENT | Errno::SRCH) => continue,
            Err(e) => return Err(fault(e, &target, &path(&file))),
        };
        if let Some(value) = parse_switches(&status) {
            counts.push((tid, value));
        }
    }
    if counts.is_empty() {
        Err(PlatformError::Vanished { target })
    } else {
        Ok(counts)
    }
}

fn parse_io(text: &str, count: Count) -> Option<u64> {
    let field = |name: &str| -> Option<u64> {
        text.lines()
            .find_map(|l| l.strip_prefix(name)?.strip_prefix(": "))?
            .trim()
            .parse()
            .ok()
    };
    match count {
        Count::ReadCalls => field("syscr"),
        Count::WriteCalls => field("syscw"),
        Count::Bytes => Some(field("rchar")?.saturating_add(field("wchar")?)),
        Count::VoluntarySwitches => None,
    }
}

pub(super) fn parse_switches(status: &str) -> Option<u64> {
    status
        .lines()
        .find_map(|l| l.strip_prefix("voluntary_ctxt_switches:"))?
        .trim()
        .parse()
        .ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const IO: &str = "rchar: 1000\nwchar: 234\nsyscr: 10\nsyscw: 20\nread_bytes: 0\nwrite_bytes: 0\ncancelled_write_bytes: 0\n";

    fn tree(processes: &[(i32, u64, &str)]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("proc")).unwrap();
        std::fs::write(dir.path().join("proc/uptime"), "0.50 0.10\n").unwrap();
        for (pid, start, io) in processes {
            let p = dir.path().join(format!("proc/{pid}/task/{pid}"));
            std::fs::create_dir_all(&p).unwrap();
            let stat = format!("{pid} (a b) S 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 {start} 0 0\n");
            std::fs::write(dir.path().join(format!("proc/{pid}/stat")), stat).unwrap();
            std::fs::write(dir.path().join(format!("proc/{pid}/io")), io).unwrap();
            std::fs::write(p.join("status"), "Name:\tx\nvoluntary_ctxt_switches:\t7\n").unwrap();
        }
        dir
    }

    fn workload(processes: &[(i32, u64)]) -> Workload {
        crate::testing::workload(
            "w",
            processes
                .iter()
                .map(|&(pid, start_ticks)| ProcessId { pid, start_ticks })
                .collect(),
        )
    }

    #[test]
    fn io_lines() {
        assert_eq!(parse_io(IO, Count::ReadCalls), Some(10));
        assert_eq!(parse_io(IO, Count::WriteCalls), Some(20));
        assert_eq!(parse_io(IO, Count::Bytes), Some(1234));
        assert_eq!(parse_io("syscr: x", Count::ReadCalls), None);
        assert_eq!(parse_io("", Count::Bytes), None);
    }

    #[test]
    fn the_sum_survives_exits_and_counts_newcomers_whole() {
        let dir = tree(&[(10, 5, IO), (11, 6, IO)]);
        let root = Root::new(dir.path());
        let both = workload(&[(10, 5), (11, 6)]);
        let mut meter = Kernel
            .open(&root, &both, &MeterId::from("io.write_calls"))
            .unwrap();
        assert_eq!(meter.read(&both).unwrap(), 0.0);
        std::fs::write(
            dir.path().join("proc/10/io"),
            IO.replace("syscw: 20", "syscw: 25"),
        )
        .unwrap();
        assert_eq!(meter.read(&both).unwrap(), 5.0);
        // Process 10 ends, a process of the same number starts: not ours until a scan says so.
        std::fs::write(
            dir.path().join("proc/10/stat"),
            "10 (x) S 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 99 0\n",
        )
        .unwrap();
        assert_eq!(meter.read(&both).unwrap(), 5.0);
        // After the scan the new process counts from zero: it began after the meter was opened.
        assert_eq!(meter.read(&workload(&[(11, 6), (10, 99)])).unwrap(), 30.0);
        std::fs::remove_dir_all(dir.path().join("proc")).unwrap();
        assert!(matches!(meter.read(&both), Err(PlatformError::Vanished { .. })));
    }

    #[test]
    fn a_process_that_cannot_be_read_for_a_moment_spoils_the_sum_and_is_not_counted_anew() {
        // The third one is never read.
        let dir = tree(&[(10, 5, IO), (11, 6, IO), (12, 7, "nonsense")]);
        let root = Root::new(dir.path());
        let all = workload(&[(10, 5), (11, 6), (12, 7)]);
        let mut meter = Kernel
            .open(&root, &all, &MeterId::from("io.write_calls"))
            .unwrap();
        let write = |text: &str| std::fs::write(dir.path().join("proc/10/io"), text).unwrap();
        write(&IO.replace("syscw: 20", "syscw: 25"));
        assert_eq!(meter.read(&all).unwrap(), 5.0);
        write("nonsense");
        assert!(matches!(meter.read(&all), Err(PlatformError::Malformed { .. })));
        write(&IO.replace("syscw: 20", "syscw: 26"));
        assert_eq!(meter.read(&all).unwrap(), 6.0);
    }

    #[test]
    fn refusals_have_reasons() {
        let dir = tree(&[(10, 5, "nonsense")]);
        let root = Root::new(dir.path());
        let found = Kernel.find(&root, &workload(&[(10, 5)]));
        assert_eq!(found.len(), 5);
        assert!(found[0].refused.as_deref().unwrap().contains("not understood"));
        assert_eq!(found[3].refused, None);
        assert!(
            Kernel
                .find(&root, &workload(&[]))
                .iter()
                .all(|c| c.refused.is_some())
        );
        assert!(
            Kernel
                .find(&root, &workload(&[(10, 6)]))
                .iter()
                .all(|c| c.refused.is_some())
        );
        assert!(
            Kernel
                .open(&root, &workload(&[(10, 5)]), &MeterId::from("io.nothing"))
                .is_err()
        );
    }

    #[test]
    fn a_captured_tree_gives_switches() {
        let dir = tree(&[(10, 5, IO)]);
        let w = workload(&[(10, 5)]);
        let counts = read_process(&Root::new(dir.path()), w.processes[0], Count::VoluntarySwitches).unwrap();
        assert_eq!(counts, [(10, 7)]);
    }
}
