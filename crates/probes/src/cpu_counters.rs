//! Breakpoints of perf counters on threads or CPUs, attached and detached with the safety checks.

use crate::concern::Files;
use crate::concern::keeper::Held;
use crate::owed::On;
use homeostat_kernel::Root;
use homeostat_kernel::perf::{Counter, Scope};
use homeostat_meters::tasks::{Care, Counted, online_cpus, sum};
use homeostat_model::{ProcessId, Workload};
use homeostat_platform::PlatformError;

/// Files with breakpoints of thread counters, and the mark that they are active.
pub(crate) struct InFiles(pub(crate) Files, pub(crate) On);

impl Care for InFiles {
    fn may_attach(&self) -> Result<(), PlatformError> {
        self.1
            .may_attach()
            .map_err(|why| why.error("counting each thread"))
    }

    fn close(&self, root: &Root, processes: &[ProcessId], counters: Vec<Counter>) {
        close_with_care(root, &self.0, processes, counters, self.1.clone());
    }
}

/// Detaches probes on a separate thread, when that blocks nobody. They stop counting at once.
fn close_with_care(root: &Root, files: &Files, processes: &[ProcessId], counters: Vec<Counter>, on: On) {
    if counters.is_empty() {
        return;
    }
    for counter in &counters {
        counter.disable();
    }
    let held = Held::new(root, files, processes, counters, on);
    // If no thread can be made, they are released here, which is only slower.
    let _ = std::thread::Builder::new()
        .name("perf-close".to_owned())
        .stack_size(256 * 1024)
        .spawn(move || drop(held));
}

pub(super) struct CpuCounters {
    counters: Vec<Counter>,
    root: Root,
    files: Files,
    processes: Vec<ProcessId>,
    on: On,
}

impl CpuCounters {
    /// One for each event on each online CPU, for probes in these files of these processes.
    pub(super) fn open_probes(
        root: &Root,
        workload: &Workload,
        events: &[Counted],
        files: &Files,
        on: On,
    ) -> Result<Self, PlatformError> {
        let cpus = online_cpus(root);
        let mut this = Self {
            counters: Vec::new(),
            root: root.clone(),
            files: files.clone(),
            processes: workload.processes.clone(),
            on,
        };
        for cpu in cpus {
            for event in events {
                this.on
                    .may_attach()
                    .map_err(|why| why.error("counting on each CPU"))?;
                this.counters.push(event.open(Scope::Cpu(cpu))?);
            }
        }
        Ok(this)
    }

    pub(super) fn read(&self) -> Result<f64, PlatformError> {
        sum(&self.counters)
    }
}

impl Drop for CpuCounters {
    fn drop(&mut self) {
        let counters = std::mem::take(&mut self.counters);
        close_with_care(
            &self.root,
            &self.files,
            &self.processes,
            counters,
            self.on.clone(),
        );
    }
}
