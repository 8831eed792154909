//! Perf counters on the threads of a workload, or on all CPUs.
//!
//! A counter on a thread covers threads created later, but neither older threads nor forked processes. So each present
//! thread gets a counter. New processes get theirs when a reading finds them, without their earlier work. A counter per
//! CPU covers every process there, which fits a probe on a program that only this workload runs.

use crate::code_file::CodeFile;
use crate::common::PROCESSES_MAX;
use homeostat_kernel::perf::{Count, Counter, Event, OpenError, Scope};
use homeostat_kernel::process::{fault, numbers_in, open_process};
use homeostat_kernel::{Root, bytes, files};
use homeostat_model::{ProcessId, Workload};
use homeostat_platform::PlatformError;
use homeostat_sensors::counters::ERROR_MAX;
use std::collections::BTreeMap;
use std::sync::Arc;

/// What is counted, with its resources.
#[derive(Clone, Debug)]
pub enum Counted {
    /// Hits of a breakpoint in a file.
    Uprobe {
        /// Number of the kernel's event source.
        source: u32,
        /// The file in which the place was found, held open for the kernel.
        file: Arc<CodeFile>,
        /// Offset in the file.
        offset: u64,
        /// Offset of the semaphore that enables a static probe. 0: none.
        semaphore: u32,
    },
    /// Instructions in user mode.
    Instructions,
    /// Cycles in user mode.
    Cycles,
}

impl Counted {
    fn event(&self) -> Event<'_> {
        match self {
            Self::Uprobe {
                source,
                file,
                offset,
                semaphore,
            } => Event::Uprobe {
                source: *source,
                file: file.kernel_path(),
                offset: *offset,
                semaphore: *semaphore,
            },
            Self::Instructions => Event::Instructions,
            Self::Cycles => Event::Cycles,
        }
    }

    /// Opens a counter.
    ///
    /// # Errors
    /// `Denied`, `Vanished`, `Unsupported`, `Busy`.
    pub fn open(&self, scope: Scope) -> Result<Counter, PlatformError> {
        Counter::open(self.event(), scope).map_err(|e| {
            let what = match self {
                Self::Uprobe { .. } => "counting through a uprobe",
                Self::Instructions | Self::Cycles => "counting through the processor's counters",
            }
            .to_owned();
            match e {
                OpenError::Denied(errno) => PlatformError::Denied {
                    what,
                    needs: format!(
                        "run homeostat as root, or with CAP_PERFMON and CAP_SYS_ADMIN ({errno}; kernel lockdown and \
                         security modules may refuse as well)"
                    ),
                },
                OpenError::Vanished => PlatformError::Vanished { target: format!("{scope:?}") },
                OpenError::Unsupported(errno) => PlatformError::Unsupported {
                    what,
                    why: format!("the kernel says {errno}; choose another meter"),
                },
                OpenError::Busy(errno) => PlatformError::Busy { what, why: errno.to_string() },
            }
        })
    }
}

/// Safety checks around breakpoints.
pub trait Care: Send + Sync {
    /// Whether a breakpoint may be inserted now.
    ///
    /// # Errors
    /// `Busy`, `Unsupported`: it may not.
    fn may_attach(&self) -> Result<(), PlatformError>;
    /// Closes the counters of these processes.
    fn close(&self, root: &Root, processes: &[ProcessId], counters: Vec<Counter>);
}

/// Limits on counters.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Most counters in all.
    pub counters: usize,
    /// Most processes attached in one reading.
    pub attach: usize,
}

/// Counters on the threads of each process.
pub struct TaskCounters {
    root: Root,
    events: Vec<Counted>,
    limits: Limits,
    attached: BTreeMap<ProcessId, Vec<Counter>>,
    ended: f64,
    /// Safety checks, for breakpoints.
    care: Option<Arc<dyn Care>>,
}

impl TaskCounters {
    /// Attaches to all threads of the workload.
    pub fn open(
        root: &Root,
        workload: &Workload,
        events: Vec<Counted>,
        limits: Limits,
    ) -> Result<Self, PlatformError> {
        Self::open_with(root, workload, events, limits, None)
    }

    /// The same for breakpoints, with safety checks.
    pub fn open_with(
        root: &Root,
        workload: &Workload,
        events: Vec<Counted>,
        limits: Limits,
        care: Option<Arc<dyn Care>>,
    ) -> Result<Self, PlatformError> {
        let mut counters = Self {
            root: root.clone(),
            events,
            limits,
            attached: BTreeMap::new(),
            ended: 0.0,
            care,
        };
        counters.attach(workload, usize::MAX)?;
        if counters.attached.is_empty() {
            return Err(PlatformError::Vanished {
                target: workload.id.to_string(),
            });
        }
        Ok(counters)
    }

    fn close(&self, counters: Vec<Counter>) {
        match &self.care {
            None => drop(counters),
            Some(care) => {
                let processes: Vec<ProcessId> = self.attached.keys().copied().collect();
                care.close(&self.root, &processes, counters);
            }
        }
    }

    fn attach(&mut self, workload: &Workload, limit: usize) -> Result<(), PlatformError> {
        let new: Vec<ProcessId> = workload
            .processes
            .iter()
            .filter(|p| !self.attached.contains_key(p))
            .take(limit)
            .copied()
            .collect();
        for process in new {
            match self.attach_process(process) {
                Ok(counters) => {
                    self.attached.insert(process, counters);
                }
                Err(PlatformError::Vanished { .. }) => {}
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }

    fn attach_process(&self, process: ProcessId) -> Result<Vec<Counter>, PlatformError> {
        let dir = open_process(&self.root, process)?;
        let vanished = || PlatformError::Vanished {
            target: format!("process {process}"),
        };
        let (threads, more) = numbers_in(&dir, "task", self.limits.counters)
            .map_err(|e| fault(e, &format!("process {process}"), "the list of its threads"))?;
        let have: usize = self.attached.values().map(Vec::len).sum();
        if more || have + threads.len() * self.events.len() > self.limits.counters {
            return Err(PlatformError::Unsupported {
                what: "counting each thread".to_owned(),
                why: format!(
                    "the workload has more than {} threads, and each needs a counter; choose another meter",
                    self.limits.counters / self.events.len().max(1)
                ),
            });
        }
        let mut counters = Vec::new();
        for thread in threads {
            for event in &self.events {
                let permitted = self.care.as_ref().map_or(Ok(()), |care| care.may_attach());
                match permitted.and_then(|()| event.open(Scope::Thread(thread))) {
                    Ok(counter) => counters.push(counter),
                    Err(PlatformError::Vanished { .. }) => {}
                    Err(e) => {
                        self.close(counters);
                        return Err(e);
                    }
                }
            }
        }
        if counters.is_empty() {
            Err(vanished())
        } else {
            Ok(counters)
        }
    }

    /// Sum over all counters, including those of ended processes. New processes are counted from now on.
    pub fn read(&mut self, workload: &Workload) -> Result<f64, PlatformError> {
        self.drop_ended(workload)?;
        self.attach_new(workload)?;
        self.sum()
    }

    /// The same, without attaching to new processes.
    pub fn read_attached(&mut self, workload: &Workload) -> Result<f64, PlatformError> {
        self.drop_ended(workload)?;
        self.sum()
    }

    /// Whether some processes of the workload are not counted.
    pub fn lacks(&self, workload: &Workload) -> bool {
        workload.processes.iter().any(|p| !self.attached.contains_key(p))
    }

    /// Attaches to new processes, a limited number at a time.
    pub fn attach_new(&mut self, workload: &Workload) -> Result<(), PlatformError> {
        match self.attach(workload, self.limits.attach) {
            // Without any counter, the error matters.
            Err(e) if self.attached.is_empty() => Err(e),
            // Beyond the limit the rest is not counted, and the engine sees a meter out of proportion.
            Ok(()) | Err(PlatformError::Unsupported { .. } | PlatformError::Busy { .. }) => Ok(()),
            Err(e) => Err(e),
        }
    }

    fn drop_ended(&mut self, workload: &Workload) -> Result<(), PlatformError> {
        let gone: Vec<ProcessId> = self
            .attached
            .keys()
            .filter(|p| !workload.processes.contains(p))
            .copied()
            .collect();
        let mut close = Vec::new();
        for process in gone {
            if let Some(counters) = self.attached.remove(&process) {
                self.ended += sum(&counters)?;
                close.extend(counters);
            }
        }
        self.close(close);
        Ok(())
    }

    fn sum(&self) -> Result<f64, PlatformError> {
        if self.attached.is_empty() {
            return Err(PlatformError::Vanished {
                target: "the workload".to_owned(),
            });
        }
        let mut total = self.ended;
        for counters in self.attached.values() {
            total += sum(counters)?;
        }
        Ok(total)
    }
}

impl Drop for TaskCounters {
    fn drop(&mut self) {
        let counters: Vec<Counter> = self.attached.values_mut().flat_map(std::mem::take).collect();
        self.close(counters);
    }
}

/// Sum of counters, including those shared with others.
///
/// # Errors
/// `Busy`: others use the hardware counters as well.
pub fn sum(counters: &[Counter]) -> Result<f64, PlatformError> {
    let mut total = 0.0;
    let mut time = Count::default();
    for counter in counters {
        let count = counter
            .read()
            .map_err(|e| fault(e, "a perf counter", "reading a perf counter"))?;
        total += count.scaled();
        time.enabled_ns = time.enabled_ns.saturating_add(count.enabled_ns);
        time.running_ns = time.running_ns.saturating_add(count.running_ns);
    }
    // The kernel multiplexes hardware counters. A counter with too little time has no valid count.
    if time.relative_error() > ERROR_MAX {
        return Err(PlatformError::Busy {
            what: "counting through the processor's counters".to_owned(),
            why: format!(
                "others use them as well: ours counted {:.0} % of the time",
                time.coverage() * 100.0
            ),
        });
    }
    Ok(total)
}

/// Online CPUs, from `/sys/devices/system/cpu/online` (`0-3,8`).
pub fn online_cpus(root: &Root) -> Vec<u32> {
    files::text(root, "/sys/devices/system/cpu/online")
        .map(|text| parse_cpus(&text))
        .unwrap_or_default()
}

fn parse_cpus(text: &str) -> Vec<u32> {
    bytes::list(text.as_bytes()).unwrap_or_default()
}

/// Threads of the whole workload, counted up to `limit`.
pub fn threads(root: &Root, workload: &Workload, limit: usize) -> usize {
    let mut count = 0;
    for process in workload.processes.iter().take(PROCESSES_MAX) {
        let Ok(dir) = open_process(root, *process) else {
            continue;
        };
        count += numbers_in(&dir, "task", limit).map_or(0, |(t, more)| t.len() + usize::from(more));
        if count > limit {
            break;
        }
    }
    count
}

#[cfg(test)]
mod tests {
    use super::parse_cpus;

    #[test]
    fn cpu_lists() {
        assert_eq!(parse_cpus("0-3,8\n"), [0, 1, 2, 3, 8]);
        assert_eq!(parse_cpus("0"), [0]);
        assert!(parse_cpus("").is_empty() && parse_cpus("x-y").is_empty());
        assert!(parse_cpus("0-4294967295,0-4294967295").len() <= 8192);
    }
}
