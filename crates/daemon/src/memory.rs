//! Memory for people: whether it is short, who uses it, who reads files, who waits for pages, and who evicts whom.
//! Shortage is judged by pages taken and brought back, not by fill. The stable JSON shape of `homeostat memory`, filled
//! without a daemon except for growth. The same rules as in [`crate::api`] hold.

use crate::api::{self, SCHEMA};
use homeostat_kernel::clock::MonotonicClock;
use homeostat_kernel::{Root, files};
use homeostat_linux::LinuxPlatform;
use homeostat_model::{Bytes, Nanoseconds, Paging, Snapshot, WorkloadId, WorkloadSample};
use homeostat_platform::{Clock, PlatformError, SampleRequest, Sensors};
pub use homeostat_sensors::group_memory::Full;
use homeostat_sensors::group_memory::{GroupCounts, GroupMemory};
use homeostat_sensors::grouping::is_own_group;
pub use homeostat_sensors::paging::MemoryUse;
use homeostat_sensors::{group_memory, paging, topology};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::Path;

/// Workloads that are shown when nobody asks for more.
pub const SHOWN: usize = 12;
/// Refaults (pages per second) from which memory is short.
const REFAULTS_SHORT: f64 = 50.0;
/// Pages per second both to and from swap from which memory is short.
const SWAPS_SHORT: f64 = 5.0;
/// Share of the time stalled for memory from which memory is short …
const STALLED_SHORT: f64 = 0.10;
/// … and from which it is tight.
const STALLED_TIGHT: f64 = 0.01;
/// Pages scanned per page taken. Up to this, finding memory is easy (measured: 1 to 2 is healthy).
const SCANS_HEALTHY: f64 = 2.0;
/// Pages taken per second below which their ratio says nothing.
const STEALS_MIN: f64 = 10.0;
/// Bytes per second from storage from which a workload is a streaming reader.
const READER_MIN: f64 = 16.0 * 1024.0 * 1024.0;
/// A streaming reader finds at most this share in memory.
const FROM_MEMORY_MAX: f64 = 0.2;
const READS_ONCE: &str = "reads a lot once";
/// Major faults per second from which a workload waits for its pages.
const FAULTS_MIN: f64 = 5.0;
/// Bytes per second brought into full memory from which a workload evicts others.
const BRINGS_MIN: f64 = 4.0 * 1024.0 * 1024.0;
const PUSHERS_MAX: usize = 3;
const GROWTH: &str = "memory/growth/";
const GROUPS_MAX: usize = 256;

/// The output of `homeostat memory`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Memory {
    /// Version of this shape.
    pub schema: u32,
    /// Seconds watched.
    pub interval_s: f64,
    /// `enough`, `tight`, `short`, `short_in_a_group` (only below limits of control groups), or `unknown`.
    pub verdict: String,
    /// Why, with numbers.
    pub why: Vec<String>,
    /// Its use.
    #[serde(flatten)]
    pub used: MemoryUse,
    /// Share of the time in which at least one program stood still for memory; `null` without PSI.
    pub stalled_some: Option<f64>,
    /// Share of the time in which all did.
    pub stalled_full: Option<f64>,
    /// Pages that the kernel evicted and brought back.
    pub rates: Rates,
    /// Losers of needed pages, with the workloads that evict them.
    #[serde(default)]
    pub pushed_out: Vec<PushedOut>,
    /// Workloads whose memory grows for long, as a daemon has seen it; `null` where none runs.
    #[serde(default)]
    pub growing: Option<Vec<Growing>>,
    /// Workloads that read from storage, wait for it, or are large; those first that wait.
    pub workloads: Vec<WorkloadMemory>,
    /// Workloads that are not shown.
    pub workloads_left_out: u32,
}

/// A workload whose pages are taken while it needs them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PushedOut {
    /// Its name.
    pub name: String,
    /// Faults per second that waited for storage.
    pub faults_major_per_s: f64,
    /// Pages per second that its control group needed again after eviction; `null` without a group of its own.
    pub refaults_per_s: Option<f64>,
    /// The control group that is full; `null`: the machine is.
    pub within: Option<String>,
    /// How much memory there is in it.
    pub within_bytes: u64,
    /// The largest inflows into the same memory. Empty: it has too little for itself.
    pub by: Vec<Pusher>,
}

/// A workload that brings in pages and so evicts others'. The kernel does not count who took whose page.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Pusher {
    /// Its name.
    pub name: String,
    /// Bytes per second that it brings in: read from storage on its behalf, or its growth if larger.
    pub brings_bytes_per_s: f64,
    /// Growth of the file pages in its control group, bytes per second; `null` without a group of its own.
    #[serde(default)]
    pub file_grows_bytes_per_s: Option<f64>,
}

/// A workload whose own memory (anonymous) has grown for long, and may leak.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Growing {
    /// Its name.
    pub name: String,
    /// By how much, since when, and how long memory lasts.
    pub finding: String,
    /// The remedy.
    pub remedy: String,
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
    /// Pages scanned for eviction.
    pub scanned_per_s: f64,
    /// Pages taken.
    pub stolen_per_s: f64,
    /// Share of the evictions that somebody had to wait for.
    pub stolen_directly: Option<f64>,
    /// Pages scanned per eviction; `null` with next to none.
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
    /// Bytes per second by which it grew; less than zero where it shrank.
    #[serde(default)]
    pub grows_bytes_per_s: f64,
    /// Share of what it got by read calls that was in memory; `null` when it read next to nothing.
    pub from_memory: Option<f64>,
    /// Faults per second that waited for storage.
    pub faults_major_per_s: f64,
    /// `reads a lot once`, `waits for its pages`, or nothing.
    pub remark: String,
    /// Counts of its first process's control group; `null` without one.
    pub group: Option<Group>,
}

/// A control group that counts memory. The group that first uses a page is charged, also after the program has ended.
/// Pages that another group read before are not counted here.
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
    /// Bytes per second by which its pages of files grew; less than zero where they shrank.
    #[serde(default)]
    pub file_grows_bytes_per_s: f64,
    /// Shared memory, and files in memory.
    pub shared_bytes: u64,
    /// Pages that wait to be written, or are being written.
    pub unwritten_bytes: u64,
    /// … of which wait …
    #[serde(default)]
    pub dirty_bytes: u64,
    /// … and are being written.
    #[serde(default)]
    pub writeback_bytes: u64,
    /// Pages of files a second that were needed again after they had been taken from it.
    pub refaults_file_per_s: f64,
    /// Pages of programs, likewise: most of them are read from swap.
    pub refaults_anonymous_per_s: f64,
    /// Faults per second of its programs that waited for storage.
    #[serde(default)]
    pub faults_major_per_s: f64,
    /// Pages per second from swap; `null` in version 1, before Linux 6.13, and with only one sample.
    #[serde(default)]
    pub swapped_in_per_s: Option<f64>,
    /// Pages per second written to swap, likewise.
    #[serde(default)]
    pub swapped_out_per_s: Option<f64>,
    /// Its pages scanned per second for eviction; `null` in version 1, and with only one sample.
    #[serde(default)]
    pub scanned_per_s: Option<f64>,
    /// Pages per second taken from it, likewise.
    #[serde(default)]
    pub stolen_per_s: Option<f64>,
    /// Pages scanned per eviction, likewise; also `null` with next to none.
    #[serde(default)]
    pub scans_per_steal: Option<f64>,
    /// Its part in swap.
    #[serde(default)]
    pub swap_bytes: u64,
    /// … and in memory, too; `null` where the kernel does not report it.
    #[serde(default)]
    pub swap_cached_bytes: Option<u64>,
    /// Share of the time in which at least one of its programs stalled for memory; `null` in version 1 and without PSI.
    #[serde(default)]
    pub stalled_some: Option<f64>,
    /// … in which all did.
    #[serde(default)]
    pub stalled_full: Option<f64>,
    /// Its limit; `null` without one.
    pub limit_bytes: Option<u64>,
    /// The nearest of this group and its parents that has reached its limit; `null` without one.
    #[serde(default)]
    pub full: Option<Full>,
}

/// Watches for `length` and reports. Changes nothing. Root sees the reads of every workload, others only their own.
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
    let uptime = topology::uptime(&root);
    // The first sample starts the counts, the second finds each file position.
    platform.sample(&scan)?;
    clock.sleep(Nanoseconds(length.0 / 4));
    let begun = platform.sample(&scan)?;
    let before = groups(&root, &begun);
    let resident: BTreeMap<&WorkloadId, u64> = begun.samples.iter().map(|s| (&s.id, s.resident.0)).collect();
    clock.sleep(Nanoseconds(length.0 - length.0 / 4));
    let snapshot = platform.sample(&scan)?;
    let after = groups(&root, &snapshot);
    let seconds = snapshot.interval.as_secs_f64();
    let used = paging::read_use(&root).ok_or_else(|| files::is_missing(&root.path("/proc/meminfo")))?;
    let has_pressure = homeostat_sensors::pressure::read(&root, "memory").is_some();
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
            ..row(sample, resident.get(&sample.id).copied())
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
    let pushed_out = pushed_out(&rates, used.total_bytes.0, &workloads);
    let left_out = workloads.len().saturating_sub(most);
    workloads.truncate(most);
    let stands_still = !root.is_live() && topology::uptime(&root) == uptime;
    let (verdict, why) = if used.total_bytes.0 == 0 {
        ("unknown", vec!["/proc/meminfo tells no memory at all".into()])
    } else if stands_still {
        let why = "this is the image of a machine: its counters stand still";
        ("unknown", vec![why.into()])
    } else {
        judge(&rates, stalled_some, &workloads)
    };
    Ok(Memory {
        schema: SCHEMA,
        interval_s: seconds,
        verdict: verdict.into(),
        why,
        used,
        stalled_some,
        stalled_full: share(snapshot.machine.pressure_memory.full),
        rates,
        pushed_out,
        growing: None,
        workloads,
        workloads_left_out: u32::try_from(left_out).unwrap_or(u32::MAX),
    })
}

fn groups(root: &Root, snapshot: &Snapshot) -> BTreeMap<WorkloadId, GroupMemory> {
    let all = snapshot.workloads.as_deref().unwrap_or_default();
    all.iter()
        .filter(|w| snapshot.samples.iter().any(|s| s.id == w.id))
        .take(GROUPS_MAX)
        .filter_map(|w| Some((w.id.clone(), group_memory::of(root, w.processes.first()?.pid)?)))
        .collect()
}

/// A group, and what happened in it since the last sample.
fn since(now: &GroupMemory, before: Option<&GroupMemory>, seconds: f64) -> Group {
    let before = before.filter(|b| b.path == now.path);
    let per_s = |of: fn(&GroupCounts) -> u64| match before {
        Some(before) if seconds > 0.0 => of(&now.counts).saturating_sub(of(&before.counts)) as f64 / seconds,
        _ => 0.0,
    };
    // Uncounted or sampled once is unknown, not zero.
    let if_counted = |of: fn(&GroupCounts) -> Option<u64>| {
        let count = of(&now.counts)?.saturating_sub(of(&before?.counts)?);
        (seconds > 0.0).then(|| count as f64 / seconds)
    };
    let (scanned, stolen) = (if_counted(|c| c.scanned), if_counted(|c| c.stolen));
    let stalled = before.and_then(|b| {
        let (now, before) = (now.stalled?, b.stalled?);
        let share = |time: Nanoseconds| (time.as_secs_f64() / seconds).clamp(0.0, 1.0);
        let stalled = now.since(before);
        (seconds > 0.0).then(|| (share(stalled.some), share(stalled.full)))
    });
    let counts = &now.counts;
    Group {
        path: now.path.clone(),
        anonymous_bytes: counts.anonymous.0,
        file_bytes: counts.file.0,
        file_active_bytes: counts.file_active.0,
        file_inactive_bytes: counts.file_inactive.0,
        file_grows_bytes_per_s: match before {
            Some(before) if seconds > 0.0 => (counts.file.0 as f64 - before.counts.file.0 as f64) / seconds,
            _ => 0.0,
        },
        shared_bytes: counts.shared.0,
        unwritten_bytes: counts.unwritten().0,
        dirty_bytes: counts.dirty.0,
        writeback_bytes: counts.writeback.0,
        refaults_file_per_s: per_s(|c| c.refaults_file),
        refaults_anonymous_per_s: per_s(|c| c.refaults_anonymous),
        faults_major_per_s: per_s(|c| c.faults_major),
        swapped_in_per_s: if_counted(|c| c.swapped_in),
        swapped_out_per_s: if_counted(|c| c.swapped_out),
        scanned_per_s: scanned,
        stolen_per_s: stolen,
        scans_per_steal: scanned
            .zip(stolen)
            .filter(|(_, stolen)| *stolen >= STEALS_MIN)
            .map(|(scanned, stolen)| scanned / stolen),
        swap_bytes: counts.swap.0,
        swap_cached_bytes: counts.swap_cached.map(|size| size.0),
        stalled_some: stalled.map(|s| s.0),
        stalled_full: stalled.map(|s| s.1),
        limit_bytes: now.limit.map(|limit| limit.0),
        full: now.full.clone(),
    }
}

impl Memory {
    /// Adds what a daemon has seen to grow.
    pub fn add_growing(&mut self, advice: &[api::Advice]) {
        let told = advice.iter().filter_map(|a| {
            Some(Growing {
                name: a.id.strip_prefix(GROWTH)?.to_owned(),
                finding: a.finding.clone(),
                remedy: a.remedy.clone(),
            })
        });
        self.growing = Some(told.collect());
    }
}

/// Losers of needed pages, and the largest inflows into the same memory: the nearest full group, or the machine.
fn pushed_out(rates: &Rates, total: u64, workloads: &[WorkloadMemory]) -> Vec<PushedOut> {
    let full = |w: &WorkloadMemory| w.group.as_ref().and_then(|group| group.full.clone());
    let brings = |w: &WorkloadMemory| w.from_storage_bytes_per_s.max(w.grows_bytes_per_s);
    let losers = workloads.iter().filter_map(|loser| {
        let shared = |path: &str| {
            workloads
                .iter()
                .filter(|w| w.group.as_ref().is_some_and(|g| g.path == path))
                .count()
                > 1
        };
        let refaults = loser.group.as_ref().filter(|group| !shared(&group.path));
        let refaults = refaults.map(|group| group.refaults_file_per_s + group.refaults_anonymous_per_s);
        // A streaming reader of a large file evicts and brings back its own pages.
        let loses = loser.faults_major_per_s >= FAULTS_MIN
            || refaults.is_some_and(|pages| pages >= REFAULTS_SHORT) && loser.remark != READS_ONCE;
        let within = full(loser);
        if !loses || (within.is_none() && rates.stolen_per_s < STEALS_MIN) {
            return None;
        }
        let mut by: Vec<Pusher> = workloads
            .iter()
            .filter(|w| w.name != loser.name && full(w) == within && brings(w) >= BRINGS_MIN)
            // If both wait for pages, neither is blamed for the other.
            .filter(|w| w.faults_major_per_s < FAULTS_MIN || w.grows_bytes_per_s >= BRINGS_MIN)
            .map(|w| Pusher {
                name: w.name.clone(),
                brings_bytes_per_s: brings(w),
                file_grows_bytes_per_s: w
                    .group
                    .as_ref()
                    .filter(|group| !shared(&group.path))
                    .map(|group| group.file_grows_bytes_per_s),
            })
            .collect();
        by.sort_by(|a, b| b.brings_bytes_per_s.total_cmp(&a.brings_bytes_per_s));
        by.truncate(PUSHERS_MAX);
        Some(PushedOut {
            name: loser.name.clone(),
            faults_major_per_s: loser.faults_major_per_s,
            refaults_per_s: refaults,
            within_bytes: within.as_ref().map_or(total, |group| group.limit_bytes.0),
            within: within.map(|group| group.path),
            by,
        })
    });
    losers.collect()
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

/// The row of a workload, with its resident memory when the watch began.
fn row(sample: &WorkloadSample, resident: Option<u64>) -> WorkloadMemory {
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
        READS_ONCE
    } else {
        ""
    };
    WorkloadMemory {
        name: sample.id.to_string(),
        resident_bytes: sample.resident.0,
        from_storage_bytes_per_s: storage,
        grows_bytes_per_s: match resident {
            Some(before) if seconds > 0.0 => (sample.resident.0 as f64 - before as f64) / seconds,
            _ => 0.0,
        },
        from_memory,
        faults_major_per_s: faults,
        remark: remark.into(),
        group: None,
    }
}

/// Judges by rates: refaults are a shortage, full memory is not. Refaults below a group's limit are its own shortage.
fn judge(rates: &Rates, stalled: Option<f64>, workloads: &[WorkloadMemory]) -> (&'static str, Vec<String>) {
    let full = |w: &&WorkloadMemory| w.group.as_ref().is_some_and(|group| group.full.is_some());
    let (inside, outside): (Vec<&WorkloadMemory>, Vec<&WorkloadMemory>) = workloads.iter().partition(full);
    let groups: BTreeMap<&str, &Group> = inside
        .iter()
        .filter_map(|w| w.group.as_ref())
        .map(|group| (group.path.as_str(), group))
        .collect();
    let of_groups = |value: fn(&Group) -> f64| groups.values().map(|group| value(group)).sum::<f64>();
    let mut rates = *rates;
    rates.refaults_anonymous_per_s -= of_groups(|g| g.refaults_anonymous_per_s);
    rates.refaults_file_per_s -= of_groups(|g| g.refaults_file_per_s);
    rates.swapped_in_per_s -= of_groups(|g| g.swapped_in_per_s.unwrap_or(0.0));
    rates.swapped_out_per_s -= of_groups(|g| g.swapped_out_per_s.unwrap_or(0.0));
    let mut limited: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for w in &inside {
        let Some(group) = &w.group else { continue };
        let back = group.refaults_file_per_s + group.refaults_anonymous_per_s;
        let suffers =
            w.faults_major_per_s >= FAULTS_MIN || (back >= REFAULTS_SHORT && w.remark != READS_ONCE);
        if let Some(at) = group.full.as_ref().filter(|g| suffers && !is_own_group(&g.path)) {
            limited.entry(&at.path).or_default().push(&w.name);
        }
    }
    // Stalls count for the whole machine, so a limited group may cause them.
    let stalled = stalled.filter(|_| limited.is_empty());
    let (verdict, mut why) = judge_machine(&rates, stalled, &outside);
    let told = limited.into_iter().map(|(group, names)| {
        format!(
            "{group} uses all that its limit allows, and {} needs again what was taken there",
            names.join(", ")
        )
    });
    let told: Vec<String> = told.collect();
    match (verdict, told.is_empty()) {
        (_, true) => (verdict, why),
        ("enough", false) => ("short_in_a_group", told),
        (_, false) => {
            why.extend(told);
            (verdict, why)
        }
    }
}

/// As [`judge`], for memory outside full groups.
fn judge_machine(
    rates: &Rates,
    stalled: Option<f64>,
    workloads: &[&WorkloadMemory],
) -> (&'static str, Vec<String>) {
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
    // A limited workload brings its own pages back all the time.
    let of_contained: BTreeMap<&str, f64> = workloads
        .iter()
        .filter_map(|w| w.group.as_ref())
        .filter(|group| is_own_group(&group.path))
        .map(|group| (group.path.as_str(), group.refaults_file_per_s))
        .collect();
    let refaults_file = rates.refaults_file_per_s - of_contained.values().sum::<f64>();
    if refaults_file >= REFAULTS_SHORT {
        let text =
            format!("{refaults_file:.0} pages of files a second are needed again after they were taken");
        // A streaming reader of a file larger than memory brings back its own pages and harms nobody.
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
            grows_bytes_per_s: 0.0,
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
    fn what_a_contained_reader_brings_back_is_no_shortage() {
        let mut r = quiet();
        r.refaults_file_per_s = 5000.0;
        let contained =
            |refaults| in_group(reader("tar", 1.0), "/memory/homeostat-reader-1-7", refaults, None);
        assert_eq!(judge(&r, None, &[contained(4990.0), waiting()]).0, "enough");
        assert_eq!(judge(&r, None, &[contained(100.0), waiting()]).0, "short");
    }

    #[test]
    fn a_group_at_its_limit_is_short_and_the_machine_is_not() {
        let mut r = quiet();
        r.refaults_file_per_s = 5000.0;
        let limited = in_group(waiting(), "/db", 4990.0, Some("/db"));
        let (verdict, why) = judge(&r, Some(0.3), std::slice::from_ref(&limited));
        assert!(
            verdict == "short_in_a_group" && why[0].contains("/db uses all"),
            "{why:?}"
        );
        // What others lose is the machine's.
        r.refaults_file_per_s = 9000.0;
        assert_eq!(judge(&r, None, &[limited, waiting()]).0, "short");
    }

    fn in_group(mut w: WorkloadMemory, path: &str, refaults: f64, full: Option<&str>) -> WorkloadMemory {
        let group = GroupMemory {
            path: path.into(),
            counts: GroupCounts::default(),
            limit: None,
            stalled: None,
            full: full.map(|path| Full {
                path: path.into(),
                limit_bytes: Bytes(256),
            }),
        };
        w.group = Some(Group {
            refaults_file_per_s: refaults,
            ..since(&group, None, 1.0)
        });
        w
    }

    fn reader(name: &str, from_storage: f64) -> WorkloadMemory {
        WorkloadMemory {
            name: name.into(),
            from_storage_bytes_per_s: from_storage,
            from_memory: Some(0.0),
            faults_major_per_s: 0.0,
            remark: READS_ONCE.into(),
            ..waiting()
        }
    }

    #[test]
    fn who_brings_the_most_into_the_memory_that_is_full_pushes_out_who_waits() {
        let mut all = [
            in_group(waiting(), "/both", 900.0, Some("/both")),
            in_group(reader("tar", 50e6), "/both/tar", 9e5, Some("/both")),
            in_group(reader("grep", 90e6), "/both/grep", 0.0, Some("/both")),
            in_group(reader("little", 1e5), "/both/little", 0.0, Some("/both")),
            in_group(reader("elsewhere", 900e6), "/elsewhere", 9e5, Some("/elsewhere")),
            in_group(reader("contained", 900e6), "/both/own", 9e5, Some("/both/own")),
        ];
        if let Some(group) = &mut all[2].group {
            group.file_grows_bytes_per_s = 80e6;
        }
        let told = pushed_out(&quiet(), 1000, &all);
        assert_eq!(
            told.len(),
            1,
            "readers that bring back their own pages lose nothing: {told:?}"
        );
        assert_eq!(
            (
                told[0].name.as_str(),
                told[0].within.as_deref(),
                told[0].within_bytes,
                told[0].refaults_per_s
            ),
            ("db", Some("/both"), 256, Some(900.0))
        );
        let by: Vec<&str> = told[0].by.iter().map(|p| p.name.as_str()).collect();
        assert_eq!(by, ["grep", "tar"]);
        assert_eq!(told[0].by[0].file_grows_bytes_per_s, Some(80e6));
        // What grows in a group of several is nobody's own.
        all[4] = in_group(reader("beside", 1e5), "/both/grep", 0.0, Some("/both"));
        let told = pushed_out(&quiet(), 1000, &all);
        assert_eq!(told[0].by[0].file_grows_bytes_per_s, None);
    }

    #[test]
    fn of_a_machine_that_takes_no_pages_nobody_is_pushed_out() {
        // A program that starts reads its pages for the first time: it waits, and has lost nothing.
        let all = [waiting(), reader("tar", 50e6)];
        assert_eq!(pushed_out(&quiet(), 1000, &all), []);
        let mut taking = quiet();
        taking.stolen_per_s = 1000.0;
        let told = pushed_out(&taking, 1000, &all);
        assert_eq!((told[0].within.as_deref(), told[0].within_bytes), (None, 1000));
        assert_eq!(told[0].by[0].name, "tar");
        // Who waits for its own pages is none who pushes, unless it grows.
        let mut other = waiting();
        other.name = "other".into();
        other.from_storage_bytes_per_s = 50e6;
        assert_eq!(pushed_out(&taking, 1000, &[waiting(), other.clone()])[0].by, []);
        other.grows_bytes_per_s = 60e6;
        let told = pushed_out(&taking, 1000, &[waiting(), other]);
        assert_eq!(told[0].by[0].brings_bytes_per_s, 60e6);
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
            stalled: None,
            full: None,
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
    fn what_a_kernel_does_not_count_of_a_group_is_not_told_to_be_nothing() {
        let group = |stat: &[u8]| GroupMemory {
            path: "/a".into(),
            counts: group_memory::parse(stat),
            limit: None,
            stalled: None,
            full: None,
        };
        let before = group(b"file 9437184\npswpin 5\npswpout 5\npgscan 1000\npgsteal 500\npgmajfault 1\n");
        let now = group(
            b"file 1048576\nfile_dirty 8192\nfile_writeback 4096\nswapcached 12288\npswpin 25\npswpout 5\n\
              pgscan 1400\npgsteal 600\npgmajfault 201\n",
        );
        let told = since(&now, Some(&before), 2.0);
        assert_eq!(
            (
                told.faults_major_per_s,
                told.swapped_in_per_s,
                told.swapped_out_per_s
            ),
            (100.0, Some(10.0), Some(0.0))
        );
        assert_eq!(told.scanned_per_s, Some(200.0));
        assert_eq!(told.stolen_per_s, Some(50.0));
        assert_eq!(told.scans_per_steal, Some(4.0));
        assert_eq!(told.file_grows_bytes_per_s, -4_194_304.0, "shrank");
        assert_eq!(
            (told.dirty_bytes, told.writeback_bytes, told.unwritten_bytes),
            (8192, 4096, 12288)
        );
        assert_eq!(told.swap_cached_bytes, Some(12288));
        let idle = since(&before, Some(&before), 2.0);
        assert_eq!((idle.stolen_per_s, idle.scans_per_steal), (Some(0.0), None));
        let moved = since(&now, None, 2.0);
        assert_eq!((moved.scanned_per_s, moved.file_grows_bytes_per_s), (None, 0.0));
        let version_one = |faults: u64| {
            let stat = format!("pgpgin 7\npgmajfault {faults}\ntotal_cache 4096\ntotal_dirty 4096\n");
            group(stat.as_bytes())
        };
        let told = since(&version_one(50), Some(&version_one(10)), 2.0);
        assert_eq!((told.faults_major_per_s, told.dirty_bytes), (20.0, 4096));
        assert_eq!((told.scanned_per_s, told.stolen_per_s), (None, None));
        assert_eq!((told.swapped_in_per_s, told.swapped_out_per_s), (None, None));
        assert_eq!(told.scans_per_steal, None);
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
