//! What the sensors saw in one interval. Everything cumulative is delivered as the difference since the
//! previous sample, so that exits, restarts and counter wraps are dealt with in one place: the sensor.

use crate::canary::CanaryReading;
use crate::meter::MeterReading;
use crate::spans::Spans;
use crate::units::{Bytes, Nanoseconds};
use crate::workload::{Workload, WorkloadId};
use serde::{Deserialize, Serialize};

/// Stall time from `/proc/pressure`, as time in this interval.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pressure {
    /// At least one task was stalled.
    pub some: Nanoseconds,
    /// All non-idle tasks were stalled.
    pub full: Nanoseconds,
}

/// A mode of `/sys/kernel/mm/transparent_hugepage/{enabled,shmem_enabled,defrag}`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct PageSizeSetting(pub String);

/// Transparent-huge-page settings of the host.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HugePageSettings {
    /// `enabled`: always, madvise, never; empty when absent.
    pub enabled: PageSizeSetting,
    /// `shmem_enabled`.
    pub shmem_enabled: PageSizeSetting,
    /// `defrag`.
    pub defrag: PageSizeSetting,
    /// Where `enabled` was set when it is not the kernel's own default and not ours: the file and line
    /// (kernel command line, tmpfiles.d, sysfs.d), or `at run time`.
    pub enabled_set_by: Option<String>,
    /// `khugepaged/full_scans` and `pages_collapsed`, cumulative.
    pub khugepaged_pages_collapsed: u64,
}

/// Automatic NUMA balancing of the kernel, and what it did lately on the whole host.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct KernelBalancing {
    /// `/proc/sys/kernel/numa_balancing`: 0 off, 1 on, 2 memory tiering, 3 both.
    pub value: u8,
    /// Who set that value when it is neither the kernel's own default nor ours: the file (kernel command line, sysctl.d,
    /// a profile of tuned), or `at run time`.
    pub set_by: Option<String>,
    /// Whether homeostat holds the setting at this value now.
    pub ours: bool,
    /// What follows was counted over so much of the past, at most five minutes, with the setting as it is now. Zero when it
    /// was looked at once only.
    pub window: Nanoseconds,
    /// CPU time spent busy by all CPUs together in the window.
    pub cpu_busy: Nanoseconds,
    /// Faults taken to find out from where a page is used.
    pub hint_faults: u64,
    /// Of which the page was on the node of the thread.
    pub hint_faults_local: u64,
    /// Pages migrated.
    pub pages_migrated: u64,
}

/// What the kernel did in an interval to find free memory, and to bring back what it had taken; in pages
/// (`/proc/vmstat`). What a control group does within its own limit counts in the refaults and faults only.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Paging {
    /// Read from storage (`pgpgin`), in bytes; swap counts, too.
    #[serde(skip_serializing_if = "is_nothing")]
    pub read_in: Bytes,
    /// Pages read from swap (`pswpin`).
    pub swapped_in: u64,
    /// Pages written to swap (`pswpout`).
    pub swapped_out: u64,
    /// Faults that waited for storage (`pgmajfault`), in number.
    pub faults_major: u64,
    /// Anonymous pages that were needed again soon after they had been taken (`workingset_refault_anon`).
    pub refaults_anonymous: u64,
    /// Pages of files, likewise (`workingset_refault_file`).
    pub refaults_file: u64,
    /// Pages looked at in the background (`pgscan_kswapd`) …
    pub scanned_background: u64,
    /// … and by whoever needed memory and had to wait (`pgscan_direct`).
    pub scanned_direct: u64,
    /// Pages taken in the background (`pgsteal_kswapd`) …
    pub stolen_background: u64,
    /// … and by whoever needed memory and had to wait (`pgsteal_direct`).
    pub stolen_direct: u64,
}

/// A setting that says how the kernel finds free memory, and whose value it has.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemorySetting {
    /// Its file, absolute below the root.
    pub path: String,
    /// Its value now.
    pub value: u64,
    /// Who set it when it is neither what the kernel sets by itself nor ours: the file and line, or `at run time`. A value
    /// that somebody wrote down counts also where it is the kernel's own.
    pub set_by: Option<String>,
    /// Whether homeostat holds it at this value now.
    pub ours: bool,
}

/// What a workload read from files in an interval. While memory is short all of it is looked at, of those that use CPU time or
/// wait for pages. Else only what was called for and what came from storage, at a look at all processes and of those that use
/// a twentieth of a CPU; what was not looked at is zero.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Reads {
    /// Bytes that came from storage on its behalf (`read_bytes` of `/proc/PID/io`): by read calls, read-ahead, and faults
    /// on mapped files.
    pub from_storage: Bytes,
    /// Bytes that it got by read calls (`rchar`), from pipes and terminals, too.
    pub called: Bytes,
    /// Read calls (`syscr`).
    pub calls: u64,
    /// Bytes by which the positions of its open files moved forward: what was read from beginning to end. Files that were
    /// opened and closed again in between, or read around to their beginning, are not in it.
    pub in_sequence: Bytes,
    /// Of `from_storage`, what processes may have read that have ended: when a process is waited for, all that it read in its
    /// life counts to the one that waited, as if that one had read it now.
    #[serde(skip_serializing_if = "is_nothing")]
    pub by_ended: Bytes,
}

impl Reads {
    /// What it reads from storage here and there, as one does whose pages were taken: not in order, and not by processes that have ended.
    #[must_use]
    pub fn here_and_there(&self) -> Bytes {
        self.from_storage
            .saturating_sub(self.by_ended)
            .saturating_sub(self.in_sequence)
    }
}

/// Whether there is nothing to tell: recordings are long enough.
fn is_nothing<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

/// The machine in one interval.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MachineSample {
    /// CPU time spent busy by all CPUs together in the interval (user, nice, system, irq, softirq).
    pub cpu_busy: Nanoseconds,
    /// CPU time stolen by the hypervisor.
    pub cpu_steal: Nanoseconds,
    /// MemFree.
    pub memory_free: Bytes,
    /// MemAvailable.
    pub memory_available: Bytes,
    /// Free memory in blocks of at least one large page (`/proc/buddyinfo`).
    pub memory_free_in_huge_blocks: Bytes,
    /// AnonHugePages of the host.
    pub anonymous_huge: Bytes,
    /// ShmemHugePages of the host.
    pub shared_huge: Bytes,
    /// Swap in use.
    pub swap_used: Bytes,
    /// Pages of files (`Cached` + `Buffers` − `Shmem`); zero when not known.
    #[serde(default, skip_serializing_if = "is_nothing")]
    pub memory_file: Bytes,
    /// Of which not used lately (`Inactive(file)`): what goes first. Zero when not known.
    #[serde(default, skip_serializing_if = "is_nothing")]
    pub memory_file_inactive: Bytes,
    /// Pressure stall: CPU (only `some` is meaningful host-wide).
    pub pressure_cpu: Pressure,
    /// Pressure stall: memory.
    pub pressure_memory: Pressure,
    /// Pressure stall: I/O.
    pub pressure_io: Pressure,
    /// Large-page settings.
    pub huge_pages: HugePageSettings,
    /// Other tuners that run (tuned, numad, bpftune, …), by name.
    pub other_tuners: Vec<String>,
    /// Automatic NUMA balancing; `None` where the kernel has none or there is one node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub numa_balancing: Option<KernelBalancing>,
    /// What memory was taken and brought back.
    #[serde(default, skip_serializing_if = "is_nothing")]
    pub paging: Paging,
    /// The settings of how memory is found that a controller may move, as the last scan saw them; none where there are none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub memory_settings: Vec<MemorySetting>,
}

/// From this many pages a second that are needed again after they were taken, programs are pushed out of memory …
const REFAULTS_SHORT: f64 = 50.0;
/// … or from so many, where tasks wait for memory for a good part of the time: a disk that needs 50 ms for a page that is
/// asked for beside a reader serves 20 a second, and whoever needs them does nothing else than wait.
const REFAULTS_SHORT_STALLED: f64 = 5.0;
/// That part of the time (PSI `some` of memory, which counts waiting for pages that were taken).
const STALLED_SHORT: f64 = 0.1;

impl MachineSample {
    /// Pages per second that were needed again after they were taken, of files and programs; 0 for an interval without length.
    #[must_use]
    pub fn refaults_per_s(&self, interval: Nanoseconds) -> f64 {
        let pages = self
            .paging
            .refaults_file
            .saturating_add(self.paging.refaults_anonymous);
        let seconds = interval.as_secs_f64();
        if seconds > 0.0 {
            pages as f64 / seconds
        } else {
            0.0
        }
    }

    /// Share of the interval in which some task waited for memory (PSI `some`), 0 to 1; 0 where the kernel does not tell.
    #[must_use]
    pub fn stalled_for_memory(&self, interval: Nanoseconds) -> f64 {
        self.pressure_memory.some.share_of(interval)
    }

    /// Whether memory is short: what is needed is taken, and comes back.
    #[must_use]
    pub fn is_short_of_memory(&self, interval: Nanoseconds) -> bool {
        let refaults = self.refaults_per_s(interval);
        refaults >= REFAULTS_SHORT
            || refaults >= REFAULTS_SHORT_STALLED && self.stalled_for_memory(interval) >= STALLED_SHORT
    }
}

/// One workload in one interval.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct WorkloadSample {
    /// Whose.
    pub id: WorkloadId,
    /// Time since the previous sample of this workload.
    pub interval: Nanoseconds,
    /// Age of its oldest process.
    pub age: Nanoseconds,
    /// Processes and threads now.
    pub processes: u32,
    /// Threads now.
    pub threads: u32,
    /// CPU time used in the interval, including that of processes that ended in it as far as known.
    pub cpu: Nanoseconds,
    /// CPU time of the busiest thread-group in the interval.
    pub cpu_busiest: Nanoseconds,
    /// Time its threads waited on a run queue (schedstat), in the interval.
    pub runqueue_wait: Nanoseconds,
    /// Minor and major page faults in the interval.
    pub faults_minor: u64,
    /// Major page faults in the interval.
    pub faults_major: u64,
    /// Processes that appeared or ended in the interval.
    pub churn: u32,
    /// Resident memory now, sum over processes (shared memory counted once where known); never less than `anonymous` and
    /// `shared` together.
    pub resident: Bytes,
    /// Of which anonymous; zero when it was not looked at: always in detail, else about once a minute.
    pub anonymous: Bytes,
    /// Of which shared memory.
    pub shared: Bytes,
    /// Of which mapped by large pages; `None` when not sampled in detail.
    pub huge: Option<Bytes>,
    /// Readings of the meters that are open, in order of meter id.
    pub meters: Vec<MeterReading>,
    /// What it read from files.
    #[serde(default, skip_serializing_if = "is_nothing")]
    pub reads: Reads,
    /// The spans of its threads from the end of a wait to the next wait, or why they cannot be followed; `None` where nobody
    /// asked, and until it is known what that would cost.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub spans: Option<Result<Spans, String>>,
    /// How often its main process was seen to execute a program since it was first seen: more than at the sample before says that
    /// another program, or the same one anew, runs in the same process.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub executions: u32,
}

impl WorkloadSample {
    /// One in which nothing was seen of a workload; who sees something fills it in.
    #[must_use]
    pub fn empty(id: WorkloadId, interval: Nanoseconds) -> Self {
        Self {
            id,
            interval,
            age: Nanoseconds::ZERO,
            processes: 0,
            threads: 0,
            cpu: Nanoseconds::ZERO,
            cpu_busiest: Nanoseconds::ZERO,
            runqueue_wait: Nanoseconds::ZERO,
            faults_minor: 0,
            faults_major: 0,
            churn: 0,
            resident: Bytes::ZERO,
            anonymous: Bytes::ZERO,
            shared: Bytes::ZERO,
            huge: None,
            meters: Vec::new(),
            reads: Reads::default(),
            spans: None,
            executions: 0,
        }
    }
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde asks for a reference")]
fn is_zero(number: &u32) -> bool {
    *number == 0
}

/// One observation of the whole machine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Snapshot {
    /// When (since boot).
    pub at: Nanoseconds,
    /// When (seconds since the epoch), for people and the history only; never decides.
    pub unix_seconds: u64,
    /// Time since the previous snapshot.
    pub interval: Nanoseconds,
    /// The machine.
    pub machine: MachineSample,
    /// The workloads, when this snapshot includes a scan of all processes; else `None` = as before.
    pub workloads: Option<Vec<Workload>>,
    /// Samples: all workloads above the noise floor after a scan, else those asked for in detail.
    pub samples: Vec<WorkloadSample>,
    /// Own cost: CPU time that the daemon used in the interval.
    pub own_cpu: Nanoseconds,
    /// Own resident memory.
    pub own_resident: Bytes,
    /// What the memory canary did in the interval, or why there is none; `None` while none is wanted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub canary: Option<Result<CanaryReading, String>>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_short_when_pages_come_back_or_few_do_and_tasks_wait_for_them() {
        let second = Nanoseconds::from_secs(2);
        let seen = |refaults_file, refaults_anonymous, stalled_ms| MachineSample {
            pressure_memory: Pressure {
                some: Nanoseconds::from_millis(stalled_ms),
                full: Nanoseconds::ZERO,
            },
            paging: Paging {
                refaults_file,
                refaults_anonymous,
                ..Paging::default()
            },
            ..MachineSample::default()
        };
        assert_eq!(seen(300, 100, 0).refaults_per_s(second), 200.0);
        assert_eq!(seen(300, 100, 0).refaults_per_s(Nanoseconds::ZERO), 0.0);
        assert_eq!(seen(0, 0, 500).stalled_for_memory(second), 0.25);
        assert_eq!(seen(0, 0, 500).stalled_for_memory(Nanoseconds::ZERO), 0.0);
        let short = |of: MachineSample| of.is_short_of_memory(second);
        assert!(short(seen(60, 40, 0)) && !short(seen(60, 39, 0)));
        // A slow disk: 20 pages a second, and the program does nothing but wait for them.
        assert!(short(seen(40, 0, 1900)) && short(seen(10, 0, 200)));
        assert!(!short(seen(40, 0, 199)) && !short(seen(9, 0, 2000)));
        // Waiting by itself may be for large pages that are made.
        assert!(!short(seen(0, 0, 2000)));
    }
}
