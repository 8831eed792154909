//! Memory for people: whether it is short, judged by what is taken and brought back and not by how full it is; what it is
//! used for; who reads files, and who waits for pages. The stable JSON shape of `homeostat memory`, filled without a
//! daemon. The same rules as in [`crate::api`] hold.

use crate::api::SCHEMA;
use homeostat_linux::sensors::group_memory::{self, GroupCounts, GroupMemory};
use homeostat_linux::sensors::{files, paging};
use homeostat_linux::{LinuxPlatform, MonotonicClock, Root};
use homeostat_model::{Bytes, Nanoseconds, Paging, Snapshot, WorkloadId, WorkloadSample};
use homeostat_platform::{Clock, PlatformError, SampleRequest, Sensors};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::Path;

/// Workloads that are shown when nobody asks for more.
pub const SHOWN: usize = 12;
/// Pages per second that come back after they were taken, from which memory is short.
const REFAULTS_SHORT: f64 = 50.0;
/// Pages per second that go to swap and come back at the same time, from which memory is short.
const SWAPS_SHORT: f64 = 5.0;
/// Share of the time in which a program stands still for memory, from which memory is short …
const STALLED_SHORT: f64 = 0.10;
/// … and from which it is tight.
const STALLED_TIGHT: f64 = 0.01;
/// Pages looked at for each that could be taken: up to this it is easy to find memory (seed 001: 1 to 2 is healthy).
const SCANS_HEALTHY: f64 = 2.0;
/// Taken pages per second below which their ratio says nothing.
const STEALS_MIN: f64 = 10.0;
/// Bytes per second from storage from which a workload counts as a reader.
const READER_MIN: f64 = 16.0 * 1024.0 * 1024.0;
/// A reader finds at most this share of what it reads in memory.
const FROM_MEMORY_MAX: f64 = 0.2;
/// Faults per second that wait for storage from which a workload waits for its pages.
const FAULTS_MIN: f64 = 5.0;
/// Control groups that are looked at.
const GROUPS_MAX: usize = 256;

/// What `homeostat memory` says.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Memory {
    /// Version of this shape.
    pub schema: u32,
    /// Seconds watched.
    pub interval_s: f64,
    /// `enough`, `tight` or `short`.
    pub verdict: String,
    /// Why, with numbers.
    pub why: Vec<String>,
    /// All memory.
    pub total_bytes: u64,
    /// Used for nothing.
    pub free_bytes: u64,
    /// What could be had without swapping, by the kernel's estimate.
    pub available_bytes: u64,
    /// Memory of programs that no file backs.
    pub anonymous_bytes: u64,
    /// Pages of files.
    pub file_bytes: u64,
    /// … of which used lately.
    pub file_active_bytes: u64,
    /// … and not: what goes first.
    pub file_inactive_bytes: u64,
    /// Pages mapped by programs.
    pub mapped_bytes: u64,
    /// Shared memory, and files in memory.
    pub shared_bytes: u64,
    /// The kernel's own that it can give back.
    pub kernel_reclaimable_bytes: u64,
    /// Pages that wait to be written.
    pub unwritten_bytes: u64,
    /// Swap in all.
    pub swap_total_bytes: u64,
    /// Swap in use.
    pub swap_used_bytes: u64,
    /// Share of the time in which at least one program stood still for memory; `null` without PSI.
    pub stalled_some: Option<f64>,
    /// Share of the time in which all did.
    pub stalled_full: Option<f64>,
    /// What the kernel took and brought back.
    pub rates: Rates,
    /// Workloads that read from storage, wait for it, or are large; those first that wait.
    pub workloads: Vec<WorkloadMemory>,
    /// Workloads that are not shown.
    pub workloads_left_out: u32,
}

/// Pages per second, of the whole machine.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Rates {
    /// Read from swap.
    pub swapped_in_per_s: f64,
    /// Written to swap.
    pub swapped_out_per_s: f64,
    /// Faults that waited for storage.
    pub faults_major_per_s: f64,
    /// Anonymous pages that were needed again after they had been taken.
    pub refaults_anonymous_per_s: f64,
    /// Pages of files, likewise.
    pub refaults_file_per_s: f64,
    /// Pages looked at to find some that can be taken.
    pub scanned_per_s: f64,
    /// Pages taken.
    pub stolen_per_s: f64,
    /// Of those taken, the share that somebody had to wait for.
    pub stolen_directly: Option<f64>,
    /// Pages looked at for each that was taken; `null` where next to none was.
    pub scans_per_steal: Option<f64>,
}

/// One workload.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct WorkloadMemory {
    /// Its name.
    pub name: String,
    /// Resident memory.
    pub resident_bytes: u64,
    /// Bytes per second that storage delivered to it.
    pub from_storage_bytes_per_s: f64,
    /// Share of what it got by read calls that was in memory; `null` when it read next to nothing.
    pub from_memory: Option<f64>,
    /// Faults per second that waited for storage.
    pub faults_major_per_s: f64,
    /// `reads a lot once`, `waits for its pages`, or nothing.
    pub remark: String,
    /// What the control group of its first process counts; `null` where none does.
    pub group: Option<Group>,
}

/// A control group that counts memory. Pages are counted where they were first used: what a program reads of files is in its
/// group, also when it has ended, and what another group read before is not.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Group {
    /// Its directory.
    pub path: String,
    /// Memory that no file backs.
    pub anonymous_bytes: u64,
    /// Pages of files.
    pub file_bytes: u64,
    /// … of which used lately.
    pub file_active_bytes: u64,
    /// … and not.
    pub file_inactive_bytes: u64,
    /// Shared memory, and files in memory.
    pub shared_bytes: u64,
    /// Pages that wait to be written.
    pub unwritten_bytes: u64,
    /// Pages of files a second that were needed again after they had been taken from it.
    pub refaults_file_per_s: f64,
    /// Pages of programs, likewise.
    pub refaults_anonymous_per_s: f64,
    /// What limits it; `null` where nothing does.
    pub limit_bytes: Option<u64>,
}

/// Watches for so long and tells what was seen. Changes nothing. As root it sees what every workload reads, else only those
/// of the user.
///
/// # Errors
/// When the processes or `/proc/meminfo` cannot be read.
pub fn watch(root: Option<&Path>, length: Nanoseconds, most: usize) -> Result<Memory, PlatformError> {
    let root = root.map_or_else(Root::default, Root::new);
    let clock = MonotonicClock;
    let mut platform = LinuxPlatform::new(root.clone());
    platform.look_at_reads(true);
    let scan = SampleRequest {
        scan: true,
        detail: Vec::new(),
    };
    // The first look begins the counts, the second learns where in its files everybody is.
    platform.sample(&scan)?;
    clock.sleep(Nanoseconds(length.0 / 4));
    let before = groups(&root, &platform.sample(&scan)?);
    clock.sleep(Nanoseconds(length.0 - length.0 / 4));
    let snapshot = platform.sample(&scan)?;
    let after = groups(&root, &snapshot);
    let seconds = snapshot.interval.as_secs_f64();
    let used = paging::read_use(&root).ok_or_else(|| files::is_missing(&root.path("/proc/meminfo")))?;
    let has_pressure = homeostat_linux::sensors::pressure::read(&root, "memory").is_some();
    let share = |time: Nanoseconds| {
        (has_pressure && seconds > 0.0).then(|| (time.as_secs_f64() / seconds).clamp(0.0, 1.0))
    };
    let stalled_some = share(snapshot.machine.pressure_memory.some);
    let rates = rates(&snapshot.machine.paging, seconds);
    let mut workloads: Vec<WorkloadMemory> = snapshot
        .samples
        .iter()
        .map(|sample| WorkloadMemory {
            group: after
                .get(&sample.id)
                .map(|group| since(group, before.get(&sample.id), seconds)),
            ..row(sample)
        })
        .collect();
    workloads.sort_by(|a, b| {
        let key = |w: &WorkloadMemory| {
            (
                w.faults_major_per_s >= FAULTS_MIN,
                w.from_storage_bytes_per_s >= 1e6,
            )
        };
        key(b)
            .cmp(&key(a))
            .then(b.resident_bytes.cmp(&a.resident_bytes))
            .then_with(|| a.name.cmp(&b.name))
    });
    let left_out = workloads.len().saturating_sub(most);
    workloads.truncate(most);
    let (verdict, why) = judge(&rates, stalled_some, &workloads);
    Ok(Memory {
        schema: SCHEMA,
        interval_s: seconds,
        verdict: verdict.into(),
        why,
        total_bytes: used.total.0,
        free_bytes: used.free.0,
        available_bytes: used.available.0,
        anonymous_bytes: used.anonymous.0,
        file_bytes: used.file.0,
        file_active_bytes: used.file_active.0,
        file_inactive_bytes: used.file_inactive.0,
        mapped_bytes: used.mapped.0,
        shared_bytes: used.shared.0,
        kernel_reclaimable_bytes: used.kernel_reclaimable.0,
        unwritten_bytes: used.unwritten.0,
        swap_total_bytes: used.swap_total.0,
        swap_used_bytes: used.swap_used.0,
        stalled_some,
        stalled_full: share(snapshot.machine.pressure_memory.full),
        rates,
        workloads,
        workloads_left_out: u32::try_from(left_out).unwrap_or(u32::MAX),
    })
}

/// The control group of each workload that is shown, by its first process.
fn groups(root: &Root, snapshot: &Snapshot) -> BTreeMap<WorkloadId, GroupMemory> {
    let all = snapshot.workloads.as_deref().unwrap_or_default();
    all.iter()
        .filter(|w| snapshot.samples.iter().any(|s| s.id == w.id))
        .take(GROUPS_MAX)
        .filter_map(|w| Some((w.id.clone(), group_memory::of(root, w.processes.first()?.pid)?)))
        .collect()
}

/// A group, and what came back in it since it was looked at before.
fn since(now: &GroupMemory, before: Option<&GroupMemory>, seconds: f64) -> Group {
    let before = before.filter(|b| b.path == now.path);
    let per_s = |of: fn(&GroupCounts) -> u64| match before {
        Some(before) if seconds > 0.0 => of(&now.counts).saturating_sub(of(&before.counts)) as f64 / seconds,
        _ => 0.0,
    };
    let counts = &now.counts;
    Group {
        path: now.path.clone(),
        anonymous_bytes: counts.anonymous.0,
        file_bytes: counts.file.0,
        file_active_bytes: counts.file_active.0,
        file_inactive_bytes: counts.file_inactive.0,
        shared_bytes: counts.shared.0,
        unwritten_bytes: counts.unwritten.0,
        refaults_file_per_s: per_s(|c| c.refaults_file),
        refaults_anonymous_per_s: per_s(|c| c.refaults_anonymous),
        limit_bytes: now.limit.map(|limit| limit.0),
    }
}

fn rates(paging: &Paging, seconds: f64) -> Rates {
    let per_s = |count: u64| {
        if seconds > 0.0 {
            count as f64 / seconds
        } else {
            0.0
        }
    };
    let stolen = per_s(paging.stolen_background.saturating_add(paging.stolen_direct));
    let scanned = per_s(paging.scanned_background.saturating_add(paging.scanned_direct));
    Rates {
        swapped_in_per_s: per_s(paging.swapped_in),
        swapped_out_per_s: per_s(paging.swapped_out),
        faults_major_per_s: per_s(paging.faults_major),
        refaults_anonymous_per_s: per_s(paging.refaults_anonymous),
        refaults_file_per_s: per_s(paging.refaults_file),
        scanned_per_s: scanned,
        stolen_per_s: stolen,
        stolen_directly: (stolen >= STEALS_MIN).then(|| per_s(paging.stolen_direct) / stolen),
        scans_per_steal: (stolen >= STEALS_MIN).then(|| scanned / stolen),
    }
}

fn row(sample: &WorkloadSample) -> WorkloadMemory {
    let seconds = sample.interval.as_secs_f64();
    let per_s = |count: u64| {
        if seconds > 0.0 {
            count as f64 / seconds
        } else {
            0.0
        }
    };
    let reads = &sample.reads;
    let storage = per_s(reads.from_storage.0);
    let from_memory = (reads.called.0 >= Bytes::from_mib(1).0)
        .then(|| (1.0 - reads.from_storage.0 as f64 / reads.called.0 as f64).max(0.0));
    let faults = per_s(sample.faults_major);
    let remark = if faults >= FAULTS_MIN {
        "waits for its pages"
    } else if storage >= READER_MIN && from_memory.is_some_and(|share| share <= FROM_MEMORY_MAX) {
        "reads a lot once"
    } else {
        ""
    };
    WorkloadMemory {
        name: sample.id.to_string(),
        resident_bytes: sample.resident.0,
        from_storage_bytes_per_s: storage,
        from_memory,
        faults_major_per_s: faults,
        remark: remark.into(),
        group: None,
    }
}

/// Judged by rates: full memory is no shortage, memory that comes back is.
fn judge(rates: &Rates, stalled: Option<f64>, workloads: &[WorkloadMemory]) -> (&'static str, Vec<String>) {
    let mut short = Vec::new();
    let mut tight = Vec::new();
    let swaps = rates.swapped_in_per_s.min(rates.swapped_out_per_s);
    if swaps >= SWAPS_SHORT {
        short.push(format!(
            "pages go to swap ({:.0} a second) and come back ({:.0}) at the same time",
            rates.swapped_out_per_s, rates.swapped_in_per_s
        ));
    }
    if rates.refaults_anonymous_per_s >= REFAULTS_SHORT {
        short.push(format!(
            "{:.0} pages of programs a second are needed again after they were taken",
            rates.refaults_anonymous_per_s
        ));
    }
    let waiting: Vec<&str> = workloads
        .iter()
        .filter(|w| w.faults_major_per_s >= FAULTS_MIN)
        .map(|w| w.name.as_str())
        .collect();
    if rates.refaults_file_per_s >= REFAULTS_SHORT {
        let text = format!(
            "{:.0} pages of files a second are needed again after they were taken",
            rates.refaults_file_per_s
        );
        // A reader that goes round a file too large for memory brings back its own pages, and harms nobody.
        if waiting.is_empty() {
            tight.push(text);
        } else {
            short.push(format!("{text}, and {} waits for them", waiting.join(", ")));
        }
    }
    if let Some(share) = stalled.filter(|s| *s >= STALLED_TIGHT) {
        let text = format!(
            "programs stand still for memory {:.1} % of the time",
            share * 100.0
        );
        if share >= STALLED_SHORT {
            short.push(text);
        } else {
            tight.push(text);
        }
    }
    if let Some(ratio) = rates.scans_per_steal.filter(|r| *r > SCANS_HEALTHY) {
        tight.push(format!(
            "{ratio:.1} pages are looked at for each that can be taken (1 to {SCANS_HEALTHY:.0} is healthy)"
        ));
    }
    if let Some(share) = rates.stolen_directly.filter(|s| *s > 0.1) {
        tight.push(format!(
            "programs have to find {:.0} % of the memory that they need themselves",
            share * 100.0
        ));
    }
    match (short.is_empty(), tight.is_empty()) {
        (true, true) => (
            "enough",
            vec!["nothing that is needed is taken and brought back".into()],
        ),
        (true, false) => ("tight", tight),
        (false, _) => {
            short.extend(tight);
            ("short", short)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn quiet() -> Rates {
        rates(&Paging::default(), 1.0)
    }

    fn waiting() -> WorkloadMemory {
        WorkloadMemory {
            name: "db".into(),
            resident_bytes: 1,
            from_storage_bytes_per_s: 0.0,
            from_memory: None,
            faults_major_per_s: 100.0,
            remark: String::new(),
            group: None,
        }
    }

    #[test]
    fn a_shortage_is_judged_by_what_comes_back() {
        assert_eq!(judge(&quiet(), Some(0.0), &[]).0, "enough");
        let mut r = quiet();
        r.refaults_file_per_s = 5000.0;
        assert_eq!(
            judge(&r, None, &[]).0,
            "tight",
            "a reader that goes round harms nobody"
        );
        let (verdict, why) = judge(&r, None, &[waiting()]);
        assert!(verdict == "short" && why[0].contains("db waits"), "{why:?}");
        let mut r = quiet();
        r.swapped_out_per_s = 900.0;
        assert_eq!(
            judge(&r, None, &[]).0,
            "enough",
            "what goes and stays away was not needed"
        );
        r.swapped_in_per_s = 900.0;
        assert_eq!(judge(&r, None, &[]).0, "short");
        assert_eq!(judge(&quiet(), Some(0.02), &[]).0, "tight");
        assert_eq!(judge(&quiet(), Some(0.2), &[]).0, "short");
    }

    #[test]
    fn what_came_back_in_a_group_is_counted_between_two_looks_at_the_same_group() {
        let group = |path: &str, refaults_file| GroupMemory {
            path: path.into(),
            counts: GroupCounts {
                refaults_file,
                file: Bytes(7),
                ..GroupCounts::default()
            },
            limit: Some(Bytes(9)),
        };
        let (before, now) = (group("/a", 100), group("/a", 400));
        let told = since(&now, Some(&before), 3.0);
        assert_eq!(
            (told.refaults_file_per_s, told.file_bytes, told.limit_bytes),
            (100.0, 7, Some(9))
        );
        for other in [None, Some(&group("/b", 0))] {
            assert_eq!(
                since(&now, other, 3.0).refaults_file_per_s,
                0.0,
                "moved meanwhile"
            );
        }
    }

    #[test]
    fn the_ratio_of_scans_to_steals_needs_steals() {
        let with = |scanned, stolen| {
            rates(
                &Paging {
                    scanned_background: scanned,
                    stolen_background: stolen,
                    stolen_direct: stolen,
                    ..Paging::default()
                },
                2.0,
            )
        };
        assert_eq!(with(100, 2).scans_per_steal, None);
        assert_eq!(with(8000, 1000).scans_per_steal, Some(4.0));
        assert_eq!(with(8000, 1000).stolen_directly, Some(0.5));
        assert_eq!(judge(&with(8000, 1000), None, &[]).0, "tight");
    }
}
