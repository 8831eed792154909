//! # large_pages
//!
//! ## What
//! Converts the memory of a running process from small to large pages (x86: 4 KiB to 2 MiB; POWER: 64 KiB to 16 MiB),
//! from outside, without a restart and without its help: anonymous memory, and shared memory whose mapping is aligned
//! to the large page.
//!
//! ## Why it helps
//! A translation look-aside buffer of 1,500 to 3,000 entries reaches 6 to 12 MiB with 4 KiB pages and gigabytes with
//! 2 MiB pages, and a walk of the page table ends one level earlier. In a virtual machine each level of the walk is
//! itself translated, so a miss costs up to 24 memory accesses instead of 4, and the gain is larger. The 512 entries of a
//! POWER7 core reach 32 MiB with 64 KiB pages and 8 GiB with 16 MiB pages (seed 000 Table 1).
//!
//! ## When it hurts
//! * While a piece is converted, the threads that touch it wait (2 to 6 ms for a piece on frames used before,
//!   several times that when a virtual machine takes a frame from its host for the first time). The effector paces
//!   itself by measured time.
//! * Sparse memory grows: a large page fills the holes. Pieces with any hole are left alone.
//! * Memory that is used in one place out of many gains nothing and costs zeroing; copy-on-write after `fork`
//!   (snapshots of Redis, for example) copies 2 MiB at a time. The trial measures what is left after all that.
//!
//! ## Evidence
//! Size of the resident memory in full, aligned pieces that are not large yet, the share of it that was referenced,
//! and the load. Where event counters give the share of the cycles spent on page-table walks, the gain is predicted
//! from that; too little (`gain_min`) is not tried. No such counter is at hand on most virtual machines: there it is
//! predicted from size alone, with a wide interval (measured on this project's machines: 64 MiB +8 %, 512 MiB +10 %,
//! from 2 GiB +30 % for a pointer chase; Redis +14 to +20 %, a JVM +11 %). The trial decides, not the prediction.
//! Conversions of 16 MiB pages were measured on the simulated machine only.
//!
//! Where `transparent_hugepage/enabled` is `always`, the kernel gives private memory large pages at its first touch, and next
//! to nothing is left to convert: shared memory of one process, and memory whose large pages were split. Segments that
//! several processes map, as PostgreSQL's, are declined everywhere on Linux (see Undo).
//!
//! A part of up to `trial_max_mib` is switched on and off; the rest follows in stages. Where that part would show less
//! than `trial_gain`, twice as much is switched, and so on up to `trial_most_mib`. Where even that is so small a share of the whole that its
//! gain (`part_gain_min`) could not be seen, the trial is a one-way plan instead, in stages of 10, 25, 50 and
//! 100 %, and is split again as a whole when it fails.
//!
//! What people chose is honoured: `MADV_HUGEPAGE` and `MADV_NOHUGEPAGE` regions, locked memory, hugetlbfs,
//! `PR_SET_THP_DISABLE` (also by systemd's `MemoryTHP=`), and `transparent_hugepage/enabled = never`: collapse from
//! outside would ignore that switch, so it is checked here.
//!
//! ## Undo
//! `MADV_COLD` on one 4 KiB page of each converted piece splits the large page again, in a tenth of the time of the
//! conversion, and needs no swap. The frames stay physically contiguous, contents and access rights are untouched,
//! and pieces that were large before are left large. Shared memory that several processes map is the exception: the
//! kernel does not split a large page that more than one process maps, so such memory is left alone, with advice, unless
//! the machine can split it all the same (capability `process_madvise.split.shared`; the simulated machine has it).
//!
//! ## References
//! Seed 000 §3.3 (DSO large-page optimisation: 16 MiB pages from two cores of load and 16 GB of shared memory), seed 004
//! (page pinning),
//! Linux `Documentation/admin-guide/mm/transhuge.rst`, `madvise(2)`, `process_madvise(2)`.

use crate::common::domains::{Demand, Domains};
use crate::common::{AGE_HELP, age_min, capable, gain_min, prediction, too_young};
use homeostat_engine::{Declined, Opinion, Proposal, Seen, Setting, Strategy};
use homeostat_model::action::{MemoryTarget, Target};
use homeostat_model::{
    Advice, AdvisedSetting, Bytes, Effect, EffectorId, Machine, MemoryAdvice, MemoryKind, MemoryMap,
    MemoryRegion, Nanoseconds, StrategyId,
};
use std::collections::BTreeMap;

const ID: &str = "large_pages";
const AGE_MIN: Setting = age_min(ID, 0.0, AGE_HELP);
const CORES_MIN: Setting = Setting {
    strategy: ID,
    name: "cores_min",
    default: 0.0,
    classic: 2.0,
    low: 0.0,
    high: 10_000.0,
    help: "cores in use from which a workload is considered, over the general floor (classic: two, seed 000 3.3)",
};
const RANGE_MIN: Setting = Setting {
    strategy: ID,
    name: "range_min_mib",
    default: 32.0,
    classic: 16_384.0,
    low: 2.0,
    high: 1e9,
    help: "convertible memory in MiB from which a gain can show above the noise: translation buffers reach 6 to 12 MiB \
           with 4 KiB pages (classic: 16 GB, seed 000 3.3)",
};
const PRIVATE_TOO: Setting = Setting {
    strategy: ID,
    name: "private_too",
    default: 1.0,
    classic: 0.0,
    low: 0.0,
    high: 1.0,
    help: "1: private and shared memory; 0: shared memory only (classic: System V segments only, seed 000 3.3)",
};
const TRIAL_MAX: Setting = Setting {
    strategy: ID,
    name: "trial_max_mib",
    default: 512.0,
    classic: 512.0,
    low: 32.0,
    high: 1e9,
    help: "memory in MiB that is switched on and off in a trial, the hottest first, so that a switch (0.3 s per GiB once frames \
           were used, paced to half the time) fits blocks of seconds; the rest follows in stages",
};
const PART_GAIN_MIN: Setting = Setting {
    strategy: ID,
    name: "part_gain_min",
    default: 0.015,
    classic: 0.015,
    low: 0.0,
    high: 1.0,
    help: "gain predicted for that part alone below which the whole is tried one way in stages instead (0.015 = 1.5 %)",
};
const TRIAL_MOST: Setting = Setting {
    strategy: ID,
    name: "trial_most_mib",
    default: 196_608.0,
    classic: 196_608.0,
    low: 32.0,
    high: 1e9,
    help: "of a program of which trial_max_mib would show too little, twice as much is tried, and so on up to so much memory in \
           MiB: a switch then takes a minute or two",
};
const TRIAL_GAIN: Setting = Setting {
    strategy: ID,
    name: "trial_gain",
    default: 0.08,
    classic: 0.08,
    low: 0.0,
    high: 1.0,
    help: "gain predicted for that part below which a larger one is tried: half the gain takes four times as long to prove, and \
           half the memory half as long to switch (0.08 = 8 %)",
};
const CHURN_MAX: Setting = Setting {
    strategy: ID,
    name: "churn_max",
    default: 0.2,
    classic: 0.2,
    low: 0.0,
    high: 1000.0,
    help: "processes that come or go per second above which their memory is gone before it pays",
};
const GAIN_MIN: Setting = Setting {
    help: "gain predicted from counters from which it is tried (0.01 = 1 %)",
    ..gain_min(ID)
};

/// Advice is given from this size.
const ADVICE_MIN: Bytes = Bytes::from_mib(32);
/// Cumulative shares of the whole that are reached after each stage of a one-way plan.
const WHOLE: [f64; 4] = [0.10, 0.25, 0.50, 1.0];
/// Most pieces of one action: what the Linux effector and a record of the journal take.
const PIECES_PER_ACTION_MAX: usize = 32 * 1024;
/// Shares of the rest that are reached after each stage.
const STAGES: [f64; 3] = [0.25, 0.5, 1.0];
/// The effect of a conversion is there at once; caches and the translation buffer refill within this time.
const SETTLING: Nanoseconds = Nanoseconds::from_millis(500);
/// Predicted gain by resident size in MiB: (size, gain). Fitted to the measurements named above, halved for
/// programs that do more than chase pointers.
const PREDICTION: [(f64, f64); 5] = [
    (32.0, 0.02),
    (64.0, 0.04),
    (512.0, 0.08),
    (2048.0, 0.15),
    (8192.0, 0.20),
];

/// The strategy.
pub(crate) struct LargePages;

impl Strategy for LargePages {
    fn id(&self) -> StrategyId {
        ID.into()
    }

    fn summary(&self) -> &'static str {
        "maps big, resident memory with large pages"
    }

    fn settings(&self) -> &'static [Setting] {
        &[
            AGE_MIN,
            CORES_MIN,
            RANGE_MIN,
            PRIVATE_TOO,
            TRIAL_MAX,
            TRIAL_MOST,
            TRIAL_GAIN,
            PART_GAIN_MIN,
            CHURN_MAX,
            GAIN_MIN,
        ]
    }

    fn applicable(&self, machine: &Machine) -> Result<(), String> {
        if machine.huge_page_size.0 == 0 {
            return Err("this kernel has no transparent huge pages".into());
        }
        capable(machine, &["process_madvise.collapse", "process_madvise.split"])
    }

    fn consider(&self, seen: &Seen<'_>) -> Opinion {
        if let Some(reason) = switched_off(seen) {
            return Opinion::Decline(Declined {
                advice: vec![Advice {
                    id: "large_pages/enabled-never".into(),
                    workload: None,
                    finding: reason.clone(),
                    remedy: "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled; programs that do not ask \
                             for large pages keep small ones until homeostat has proven a gain"
                        .into(),
                    risk: "none by itself: with madvise only programs that ask, and homeostat's trials, get them"
                        .into(),
                    setting: Some(AdvisedSetting {
                        path: "/sys/kernel/mm/transparent_hugepage/enabled".into(),
                        value: "madvise".into(),
                    }),
                }],
                reason,
            });
        }
        if let Some(why) = too_young(seen, AGE_MIN.value(seen.policy)) {
            return Opinion::Decline(Declined::because(why));
        }
        let least = range_min(seen);
        if seen.sample.resident.0 < least.0 {
            return Opinion::Decline(Declined::because(format!(
                "only {} resident: too small to gain from large pages (at least {least})",
                seen.sample.resident
            )));
        }
        let least = CORES_MIN.value(seen.policy);
        if least > 0.0 {
            let cores = Demand::of(seen, &Domains::of(seen.machine)).own_cores;
            if cores < least {
                return Opinion::Decline(Declined::because(format!(
                    "it uses {cores:.1} cores: too little to gain from large pages (at least {least})"
                )));
            }
        }
        if seen.load.churn > CHURN_MAX.value(seen.policy) {
            return Opinion::Decline(Declined::because(format!(
                "its processes are short-lived ({:.1} come or go per second): their memory is gone before it pays",
                seen.load.churn
            )));
        }
        let Some(memory) = seen.memory else {
            return Opinion::InspectMemory;
        };
        // Counters come with the places. What is in force already grows without asking again.
        let held = seen.held.iter().any(|h| h.strategy.as_str() == ID);
        if seen.locality.is_none() && !held && seen.machine.can("locality") {
            return Opinion::InspectLocality;
        }
        propose(seen, memory)
    }

    fn unwanted(&self, seen: &Seen<'_>) -> Option<String> {
        switched_off(seen).or_else(|| {
            let memory = seen.memory?;
            let process = memory.disabled.first()?;
            Some(format!(
                "large pages were switched off for process {process} (PR_SET_THP_DISABLE, MemoryTHP=), or its status could not \
                 be read whole"
            ))
        })
    }
}

fn range_min(seen: &Seen<'_>) -> Bytes {
    Bytes::from_mib(RANGE_MIN.value(seen.policy) as u64)
}

/// A size as people say it: `2 MiB`.
fn size_name(bytes: Bytes) -> String {
    if bytes.0 >= 1 << 20 && bytes.0 % (1 << 20) == 0 {
        format!("{} MiB", bytes.0 >> 20)
    } else {
        format!("{} KiB", bytes.0 >> 10)
    }
}

/// The choice of a person that forbids large pages, for the workload or for the whole host.
fn switched_off(seen: &Seen<'_>) -> Option<String> {
    if let Some(set) = seen
        .workload
        .choice
        .tuned
        .iter()
        .find(|t| t.starts_with("MemoryTHP="))
    {
        return Some(format!("large pages were switched off by a person: {set}"));
    }
    let settings = &seen.machine_sample.huge_pages;
    (settings.enabled.0 == "never").then(|| {
        let set = match settings.enabled_set_by.as_deref() {
            None => "the kernel's own default".to_owned(),
            // "at run time", where nothing on the machine says by whom.
            Some(when) if when.starts_with("at ") => format!("set {when}"),
            Some(by) => format!("set by {by}"),
        };
        format!("transparent huge pages are switched off (enabled = never, {set})")
    })
}

/// What becomes of the pieces of a workload.
#[derive(Default)]
struct Tally {
    huge: u64,
    sparse: u64,
    refused: BTreeMap<&'static str, Bytes>,
}

fn propose(seen: &Seen<'_>, memory: &MemoryMap) -> Opinion {
    let piece = seen.machine.huge_page_size.0.max(1);
    let policy = seen.policy;
    let scope = Scope {
        split_shared: seen.machine.can("process_madvise.split.shared"),
        private_too: PRIVATE_TOO.value(policy) >= 0.5,
    };
    let mut tally = Tally::default();
    let mut advice = Vec::new();
    let mut usable: Vec<&MemoryRegion> = Vec::new();
    for region in &memory.regions {
        tally.huge += u64::from(region.pieces.huge);
        let refusal = if memory.disabled.contains(&region.process) {
            Some("the process or its unit switched large pages off (PR_SET_THP_DISABLE, MemoryTHP=)")
        } else {
            refusal(region, scope)
        };
        match refusal {
            Some(why) => {
                *tally.refused.entry(why).or_default() += region.resident.saturating_sub(region.huge);
                if region.kind == MemoryKind::Shared && !region.aligned && region.resident.0 >= ADVICE_MIN.0 {
                    advice.push(alignment_advice(seen, region));
                } else if region.kind == MemoryKind::Shared
                    && region.mappers > 1
                    && region.resident.saturating_sub(region.huge).0 >= ADVICE_MIN.0
                {
                    advice.push(several_mappers_advice(seen, region));
                }
            }
            None => {
                tally.sparse += u64::from(region.pieces.sparse);
                if !region.convertible.is_empty() {
                    usable.push(region);
                }
            }
        }
    }
    let convertible: u64 = usable.iter().map(|r| r.convertible.len() as u64).sum();
    let bytes = Bytes(convertible * piece);
    let least = range_min(seen);
    if bytes.0 < least.0 {
        return Opinion::Decline(Declined {
            reason: nothing_to_do(bytes, least, &tally, piece),
            advice,
        });
    }
    usable.sort_by(|a, b| heat(b).total_cmp(&heat(a)).then(a.start.cmp(&b.start)));
    let share = bytes.0 as f64 / seen.sample.resident.0.max(1) as f64;
    // Not every processor counts page-table walks.
    let counters = seen
        .locality
        .and_then(|l| l.counters.as_ref())
        .filter(|c| c.table_walk_share.is_finite());
    let predicted = counters.map_or_else(|| predict(bytes, share), |c| prediction::of_walks(c, share));
    let gain = seen.known.unwrap_or(predicted);
    let most = trial_size(seen, bytes, gain.estimate);
    let part = (most.0 as f64 / bytes.0 as f64).min(1.0);
    // A one-way plan for less than that could not be proven either.
    let least = if part < 1.0 {
        GAIN_MIN.value(policy).max(PART_GAIN_MIN.value(policy))
    } else {
        GAIN_MIN.value(policy)
    };
    if let Some(counters) = counters {
        if seen.known.is_none() && gain.estimate < least {
            let link = if counters.busiest_link.is_finite() {
                format!(
                    ", and the busiest link is {:.0} % full",
                    counters.busiest_link * 100.0
                )
            } else {
                String::new()
            };
            return Opinion::Decline(Declined {
                reason: format!(
                    "no benefit predicted from large pages for {bytes}: page-table walks take {:.1} % of its cycles{link} \
                 ({gain}; at least {:+.1} %)",
                    counters.table_walk_share * 100.0,
                    least * 100.0
                ),
                advice,
            });
        }
    }
    // A part whose own gain drowns in the noise proves nothing about the whole.
    let whole = part < 1.0 && gain.estimate * part < PART_GAIN_MIN.value(policy);
    let first = if whole {
        (convertible as f64 * WHOLE[0]).ceil() as usize
    } else {
        (most.0 / piece) as usize
    };
    let (trial, rest) = split(&usable, first.clamp(1, PIECES_PER_ACTION_MAX));
    let trial_bytes = Bytes(pieces_in(&trial) * piece);
    let done = pieces_in(&trial) as f64 / convertible.max(1) as f64;
    let stages = if whole {
        let shares: Vec<f64> = WHOLE[1..]
            .iter()
            .map(|upto| ((upto - done) / (1.0 - done).max(1e-9)).clamp(0.0, 1.0))
            .collect();
        stages(&rest, &shares)
    } else {
        stages(&rest, &STAGES)
    };
    let hypothesis = format!(
        "{trial_bytes}{} of its {} resident memory is full, in use and mapped by {} pages; {} pages save translation \
         misses (predicted {gain})",
        match (rest.is_empty(), whole) {
            (true, _) => String::new(),
            (false, false) => format!(" (of {bytes}, the hottest first)"),
            (false, true) => format!(" (first of {bytes}, all of it in stages)"),
        },
        seen.sample.resident,
        size_name(seen.machine.page_size),
        size_name(Bytes(piece)),
    );
    Opinion::Propose(Box::new(Proposal {
        hypothesis,
        predicted: gain,
        effector: EffectorId::from("large_pages"),
        target: Target::Memory(trial),
        stages,
        arguments: BTreeMap::new(),
        reversible: !whole,
        joint: false,
        urgent: false,
        makes_room: false,
        settling: SETTLING,
        risk: "short pauses while pieces are converted, paced; no memory is added".into(),
        advice,
    }))
}

/// How much of `bytes` is switched on and off in the trial: little, unless so little of it would not show.
fn trial_size(seen: &Seen<'_>, bytes: Bytes, gain: f64) -> Bytes {
    let mib = |setting: Setting| Bytes::from_mib(setting.value(seen.policy) as u64);
    let most = mib(TRIAL_MOST).0.min(bytes.0);
    let mut part = mib(TRIAL_MAX).0;
    while part < most && gain * part as f64 / (bytes.0 as f64) < TRIAL_GAIN.value(seen.policy) {
        part *= 2;
    }
    // Page tables save most when the last of them fit the cache: most of it shows less than its share, the whole shows all.
    Bytes(if part > most / 2 { part.max(most) } else { part })
}

/// What may be converted here.
#[derive(Clone, Copy)]
struct Scope {
    /// Large pages that several processes map can be split again.
    split_shared: bool,
    private_too: bool,
}

/// Why a region is left alone.
fn refusal(region: &MemoryRegion, scope: Scope) -> Option<&'static str> {
    match (region.kind, region.advice) {
        (MemoryKind::HugeTlb, _) => Some("hugetlbfs: already large"),
        (MemoryKind::File, _) => Some("file-backed"),
        (_, MemoryAdvice::NoHugePage) => Some("the program asked for small pages (MADV_NOHUGEPAGE)"),
        (_, MemoryAdvice::HugePage) => Some("the program manages its large pages itself (MADV_HUGEPAGE)"),
        _ if region.locked => Some("locked by the program (mlock)"),
        (MemoryKind::Shared, _) if !region.aligned => Some("shared memory not aligned to large pages"),
        (MemoryKind::Anonymous, _) if !scope.private_too => Some("private memory (private_too = 0)"),
        (MemoryKind::Shared, _) if region.mappers > 1 && !scope.split_shared => Some(
            "shared memory mapped by several processes: large pages in it could not be taken back while they run",
        ),
        _ => None,
    }
}

fn nothing_to_do(bytes: Bytes, least: Bytes, tally: &Tally, piece: u64) -> String {
    let mut parts = vec![format!("{bytes} to convert (at least {least})")];
    if tally.huge > 0 {
        parts.push(format!("{} is in large pages already", Bytes(tally.huge * piece)));
    }
    if tally.sparse > 0 {
        parts.push(format!(
            "{} of {} pieces have holes that a large page would fill",
            Bytes(tally.sparse * piece),
            size_name(Bytes(piece))
        ));
    }
    for (why, amount) in &tally.refused {
        if amount.0 >= piece {
            parts.push(format!("{amount}: {why}"));
        }
    }
    parts.join("; ")
}

/// Hotter first: the share that was referenced lately, then size.
fn heat(region: &MemoryRegion) -> f64 {
    let resident = region.resident.0.max(1) as f64;
    let referenced = (region.referenced.0 as f64 / resident).min(1.0);
    // Referenced share decides in steps of a tenth; within a step the larger region goes first.
    (referenced * 10.0).floor() + (resident / 1e15).min(0.99)
}

/// The first `most` pieces, and the rest, in order of heat.
fn split(regions: &[&MemoryRegion], most: usize) -> (Vec<MemoryTarget>, Vec<MemoryTarget>) {
    let mut first: BTreeMap<_, Vec<u64>> = BTreeMap::new();
    let mut rest: BTreeMap<_, Vec<u64>> = BTreeMap::new();
    let mut left = most;
    for region in regions {
        let take = region.convertible.len().min(left);
        left -= take;
        first
            .entry(region.process)
            .or_default()
            .extend(&region.convertible[..take]);
        rest.entry(region.process)
            .or_default()
            .extend(&region.convertible[take..]);
    }
    (targets(first), targets(rest))
}

fn targets(by_process: BTreeMap<homeostat_model::ProcessId, Vec<u64>>) -> Vec<MemoryTarget> {
    by_process
        .into_iter()
        .filter(|(_, pieces)| !pieces.is_empty())
        .map(|(process, mut pieces)| {
            pieces.sort_unstable();
            pieces.dedup();
            MemoryTarget { process, pieces }
        })
        .collect()
}

fn pieces_in(targets: &[MemoryTarget]) -> u64 {
    targets.iter().map(|t| t.pieces.len() as u64).sum()
}

/// Cuts the rest at these cumulative shares of it, and where an action would get too big.
fn stages(rest: &[MemoryTarget], shares: &[f64]) -> Vec<Target> {
    let all: Vec<(homeostat_model::ProcessId, u64)> = rest
        .iter()
        .flat_map(|t| t.pieces.iter().map(|p| (t.process, *p)))
        .collect();
    let mut out = Vec::new();
    let mut done = 0;
    for share in shares {
        let upto = (((all.len() as f64) * share).ceil() as usize).clamp(done, all.len());
        for part in all[done..upto].chunks(PIECES_PER_ACTION_MAX) {
            let mut by_process: BTreeMap<_, Vec<u64>> = BTreeMap::new();
            for (process, piece) in part {
                by_process.entry(*process).or_default().push(*piece);
            }
            out.push(Target::Memory(targets(by_process)));
        }
        done = upto;
    }
    out
}

/// Gain by size, interpolated on a logarithmic scale, scaled by the share of memory that can be converted.
fn predict(bytes: Bytes, share: f64) -> Effect {
    let size = bytes.as_mib_f64().max(PREDICTION[0].0).log2();
    let mut gain = PREDICTION[PREDICTION.len() - 1].1;
    for pair in PREDICTION.windows(2) {
        let (x0, y0, x1, y1) = (pair[0].0.log2(), pair[0].1, pair[1].0.log2(), pair[1].1);
        if size <= x1 {
            gain = y0 + (y1 - y0) * ((size - x0) / (x1 - x0)).clamp(0.0, 1.0);
            break;
        }
    }
    let estimate = gain * share.clamp(0.0, 1.0);
    Effect {
        estimate,
        lower: 0.0,
        upper: 2.5 * estimate,
        confidence: 0.9,
    }
}

fn alignment_advice(seen: &Seen<'_>, region: &MemoryRegion) -> Advice {
    let workload = &seen.workload.id;
    let shmem = &seen.machine_sample.huge_pages.shmem_enabled.0;
    let first = if shmem == "never" {
        "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled, then restart the program: its segment is \
         then mapped at a 2 MiB boundary, with small pages, and homeostat can try"
    } else {
        "restart the program: with shmem_enabled set, a new segment is mapped at a 2 MiB boundary"
    };
    Advice {
        id: format!("large_pages/shared-memory-alignment/{workload}"),
        workload: Some(workload.clone()),
        finding: format!(
            "{} of shared memory ({}) starts at {:#x}, not at a multiple of {}: the kernel refuses to convert it",
            region.resident,
            if region.name.is_empty() {
                "unnamed"
            } else {
                &region.name
            },
            region.start,
            size_name(seen.machine.huge_page_size),
        ),
        remedy: first.into(),
        risk: "a restart of the program; the setting alone changes nothing for running programs".into(),
        setting: (shmem == "never").then(|| AdvisedSetting {
            path: "/sys/kernel/mm/transparent_hugepage/shmem_enabled".into(),
            value: "advise".into(),
        }),
    }
}

fn several_mappers_advice(seen: &Seen<'_>, region: &MemoryRegion) -> Advice {
    let workload = &seen.workload.id;
    Advice {
        id: format!("large_pages/shared-memory-of-several/{workload}"),
        workload: Some(workload.clone()),
        finding: format!(
            "{} of shared memory ({}) is mapped with small pages by {} processes; the kernel cannot split a large page \
             that several processes map, so homeostat could not undo the conversion and does not try it",
            region.resident,
            if region.name.is_empty() { "unnamed" } else { &region.name },
            region.mappers,
        ),
        remedy: "let the program have large pages from the start: its own setting (PostgreSQL: huge_pages = on with \
                 vm.nr_hugepages), or echo within_size > /sys/kernel/mm/transparent_hugepage/shmem_enabled and restart \
                 it; compare its throughput before and after"
            .into(),
        risk: "a restart of the program; memory that it reserves but does not use may become resident".into(),
        setting: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::common::testing::{Scene, available, chips};
    use homeostat_engine::{Load, Policy};
    use homeostat_model::sample::PageSizeSetting;
    use homeostat_model::{
        Capability, CapabilityState, Fingerprint, MachineSample, OperatorChoice, Pieces, ProcessId, Workload,
        WorkloadKind, WorkloadSample,
    };

    const PIECE: u64 = 2 << 20;
    const PROCESS: ProcessId = ProcessId {
        pid: 10,
        start_ticks: 1,
    };

    fn machine() -> Machine {
        let capability = |id: &str| Capability {
            id: id.into(),
            state: CapabilityState::Available,
            detail: String::new(),
            cost_of_absence: String::new(),
            remedy: String::new(),
        };
        Machine {
            kernel: "6.18".into(),
            cpu_model: "test".into(),
            hypervisor: None,
            cpus: vec![],
            nodes: vec![],
            memory: Bytes::from_mib(65536),
            page_size: Bytes(4096),
            huge_page_size: Bytes(PIECE),
            llc_size: Bytes::from_mib(32),
            boot_id: "b".into(),
            capabilities: vec![
                capability("process_madvise.collapse"),
                capability("process_madvise.split"),
            ],
        }
    }

    fn region(pieces: u64) -> MemoryRegion {
        let bytes = Bytes(pieces * PIECE);
        MemoryRegion {
            process: PROCESS,
            start: 0x7f00_0000_0000,
            length: bytes,
            kind: MemoryKind::Anonymous,
            name: String::new(),
            resident: bytes,
            referenced: bytes,
            huge: Bytes::ZERO,
            swapped: Bytes::ZERO,
            advice: MemoryAdvice::None,
            locked: false,
            eligible: true,
            aligned: true,
            mappers: 1,
            pieces: Pieces {
                full: pieces as u32,
                ..Pieces::default()
            },
            convertible: (0..pieces).map(|i| 0x7f00_0000_0000 + i * PIECE).collect(),
        }
    }

    fn opinion(
        regions: Vec<MemoryRegion>,
        change: impl FnOnce(&mut MachineSample, &mut MemoryMap, &mut Load),
    ) -> Opinion {
        opinion_where(&[], regions, change)
    }

    fn opinion_where(
        tuned: &[&str],
        regions: Vec<MemoryRegion>,
        change: impl FnOnce(&mut MachineSample, &mut MemoryMap, &mut Load),
    ) -> Opinion {
        let machine = machine();
        let mut sample = MachineSample::default();
        sample.huge_pages.enabled = PageSizeSetting("madvise".into());
        sample.huge_pages.shmem_enabled = PageSizeSetting("never".into());
        let resident: Bytes = regions.iter().map(|r| r.resident).sum();
        let mut memory = MemoryMap {
            workload: "w".into(),
            disabled: vec![],
            regions,
            truncated: false,
        };
        let mut load = Load {
            cpus: 1.0,
            saturated: true,
            ..Load::default()
        };
        change(&mut sample, &mut memory, &mut load);
        let workload = Workload {
            id: "w".into(),
            kind: WorkloadKind::ProcessGroup,
            former: None,
            owner: homeostat_model::Owner::Machine,
            others: Vec::new(),
            fingerprint: Fingerprint::new("w"),
            program: "w".into(),
            executable: "/w".into(),
            processes: vec![PROCESS],
            choice: OperatorChoice {
                tuned: tuned.iter().map(|t| (*t).to_owned()).collect(),
                ..OperatorChoice::default()
            },
        };
        let workload_sample = WorkloadSample {
            id: "w".into(),
            interval: Nanoseconds::from_secs(1),
            age: Nanoseconds::from_secs(100),
            processes: 1,
            threads: 1,
            cpu: Nanoseconds::from_secs(1),
            cpu_busiest: Nanoseconds::from_secs(1),
            runqueue_wait: Nanoseconds::ZERO,
            faults_minor: 0,
            faults_major: 0,
            churn: 0,
            resident,
            anonymous: resident,
            shared: Bytes::ZERO,
            huge: None,
            meters: vec![],
            reads: homeostat_model::Reads::default(),
            spans: None,
            executions: 0,
        };
        LargePages.consider(&Seen {
            now: Nanoseconds::from_secs(100),
            policy: &Policy::default(),
            machine: &machine,
            machine_sample: &sample,
            machine_interval: Nanoseconds::from_secs(1),
            workload: &workload,
            sample: &workload_sample,
            load: &load,
            memory: Some(&memory),
            locality: None,
            neighbours: &[],
            held: &[],
            known: None,
            refused: &[],
        })
    }

    fn reason(opinion: Opinion) -> String {
        match opinion {
            Opinion::Decline(d) => d.reason,
            other => panic!("expected a refusal, got {other:?}"),
        }
    }

    fn proposal(opinion: Opinion) -> Proposal {
        match opinion {
            Opinion::Propose(p) => *p,
            other => panic!("expected a proposal, got {other:?}"),
        }
    }

    #[test]
    fn full_small_pages_are_proposed_with_a_gain_that_grows_with_size() {
        let small = proposal(opinion(vec![region(32)], |_, _, _| {}));
        let large = proposal(opinion(vec![region(2048)], |_, _, _| {}));
        assert!(small.predicted.estimate > 0.0 && large.predicted.estimate > small.predicted.estimate);
        assert!(small.reversible && small.stages.is_empty());
        match small.target {
            Target::Memory(t) => assert_eq!(t[0].pieces.len(), 32),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_very_large_workload_is_tried_on_a_part_and_the_rest_follows_in_stages() {
        let p = proposal(opinion(vec![region(8192)], |_, _, _| {}));
        let count = |t: &Target| match t {
            Target::Memory(m) => pieces_in(m),
            _ => 0,
        };
        // Doubled until the part by itself promises enough.
        let share = count(&p.target) as f64 / 8192.0;
        assert!(p.predicted.estimate * share >= TRIAL_GAIN.default);
        assert!(p.predicted.estimate * share / 2.0 < TRIAL_GAIN.default);
        assert_eq!(count(&p.target) % ((TRIAL_MAX.default as u64) << 20 >> 21), 0);
        assert_eq!(p.stages.len(), 3);
        assert_eq!(count(&p.target) + p.stages.iter().map(count).sum::<u64>(), 8192);
    }

    #[test]
    fn what_people_chose_is_left_alone() {
        let mut advised = region(64);
        advised.advice = MemoryAdvice::HugePage;
        let mut refused = region(64);
        refused.advice = MemoryAdvice::NoHugePage;
        let mut locked = region(64);
        locked.locked = true;
        let text = reason(opinion(vec![advised, refused, locked], |_, _, _| {}));
        assert!(
            text.contains("MADV_HUGEPAGE") && text.contains("MADV_NOHUGEPAGE") && text.contains("mlock"),
            "{text}"
        );
        assert!(
            reason(opinion(vec![region(64)], |s, _, _| s.huge_pages.enabled.0 =
                "never".into()))
            .contains("never")
        );
        assert!(reason(opinion(vec![region(64)], |_, m, _| m.disabled.push(PROCESS))).contains("MemoryTHP"));
        let by_unit = "MemoryTHP=madvise in /etc/systemd/system/x.service.d/y.conf";
        let opinion = opinion_where(&[by_unit], vec![region(64)], |_, _, _| {});
        assert!(reason(opinion).contains("by a person: MemoryTHP=madvise"));
    }

    #[test]
    fn unaligned_shared_memory_is_advice_not_action() {
        let mut shared = region(640);
        shared.kind = MemoryKind::Shared;
        shared.aligned = false;
        match opinion(vec![shared], |_, _, _| {}) {
            Opinion::Decline(d) => {
                assert_eq!(d.advice[0].id, "large_pages/shared-memory-alignment/w");
                assert!(d.advice[0].remedy.contains("shmem_enabled"));
            }
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn shared_memory_of_several_processes_is_advice_because_it_could_not_be_undone() {
        let mut shared = region(640);
        shared.kind = MemoryKind::Shared;
        shared.mappers = 9;
        match opinion(vec![shared], |_, _, _| {}) {
            Opinion::Decline(d) => assert_eq!(d.advice[0].id, "large_pages/shared-memory-of-several/w"),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn sparse_memory_and_short_lived_processes_are_declined_with_the_reason() {
        let mut sparse = region(640);
        sparse.convertible.clear();
        sparse.pieces = Pieces {
            sparse: 640,
            ..Pieces::default()
        };
        assert!(reason(opinion(vec![sparse], |_, _, _| {})).contains("holes"));
        assert!(reason(opinion(vec![region(64)], |_, _, l| l.churn = 5.0)).contains("short-lived"));
    }

    #[test]
    fn hotter_regions_go_first() {
        let mut cold = region(4096);
        cold.referenced = Bytes::ZERO;
        let mut hot = region(2048);
        hot.start = 0x6000_0000_0000;
        hot.convertible = (0..2048).map(|i| hot.start + i * PIECE).collect();
        let p = proposal(opinion(vec![cold, hot], |_, _, _| {}));
        match p.target {
            Target::Memory(t) => {
                assert!(t[0].pieces.iter().filter(|a| **a < 0x7000_0000_0000).count() == 2048);
            }
            other => panic!("{other:?}"),
        }
    }

    /// A big segment shared by the processes of a database, on a machine with 16 MiB pages, counters, and the means to
    /// split what several processes map.
    fn database(pieces: u64) -> Scene {
        let mut power = crate::common::testing::machine(&chips(2, 1), 4);
        power.huge_page_size = Bytes(16 << 20);
        power.page_size = Bytes(64 << 10);
        power.capabilities.push(available("process_madvise.split.shared"));
        let mut shared = region(pieces);
        shared.kind = MemoryKind::Shared;
        shared.mappers = 40;
        let bytes = Bytes(pieces * (16 << 20));
        shared.resident = bytes;
        shared.referenced = bytes;
        shared.length = bytes;
        shared.convertible = (0..pieces).map(|i| 0x7f00_0000_0000 + i * (16 << 20)).collect();
        Scene::new(power, 20.0, bytes.0 as f64 / (1 << 30) as f64).with(|s| {
            s.counters().table_walk_share = 0.09;
            s.memory = Some(MemoryMap {
                workload: "w".into(),
                disabled: vec![],
                regions: vec![shared],
                truncated: false,
            });
        })
    }

    fn count(target: &Target) -> u64 {
        match target {
            Target::Memory(m) => pieces_in(m),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn segments_of_several_processes_are_converted_where_they_can_be_split() {
        let p = database(320).proposal(&LargePages);
        assert!(p.reversible && count(&p.target) == 320, "{}", p.hypothesis);
        assert!(
            p.hypothesis.contains("64 KiB pages; 16 MiB pages"),
            "{}",
            p.hypothesis
        );
        assert!(p.advice.is_empty());
        let linux = database(320).with(|s| {
            s.machine
                .capabilities
                .retain(|c| c.id.as_str() != "process_madvise.split.shared");
        });
        assert_eq!(
            linux.declined(&LargePages).advice[0].id,
            "large_pages/shared-memory-of-several/w"
        );
    }

    #[test]
    fn counters_of_page_walks_predict_the_gain_and_forbid_hopeless_trials() {
        let p = database(320).proposal(&LargePages);
        assert!(
            (0.07..1.0 / (1.0 - 0.09 * 0.8) - 1.0).contains(&p.predicted.estimate),
            "{}",
            p.predicted
        );
        let calm = database(320).with(|s| s.counters().table_walk_share = 0.002);
        assert!(calm.reason(&LargePages).contains("no benefit predicted"));
        // Counters that do not count walks say as much as none.
        let open = database(320).with(|s| s.counters().table_walk_share = f64::NAN);
        let none = database(320).with(|s| s.locality().counters = None);
        assert_eq!(
            open.proposal(&LargePages).predicted,
            none.proposal(&LargePages).predicted
        );
        // Without counters size predicts, and is not believed so firmly.
        let blind = database(320).with(|s| s.locality().counters = None);
        assert_eq!(blind.proposal(&LargePages).predicted.lower, 0.0);
    }

    #[test]
    fn places_are_asked_for_where_they_bring_counters_but_not_to_grow_what_is_in_force() {
        let blind = database(320).with(|s| s.locality = None);
        assert_eq!(blind.opinion(&LargePages), Opinion::InspectLocality);
        let held = blind.with(|s| s.hold(ID, Target::Memory(vec![])));
        held.proposal(&LargePages);
        let first = database(320).with(|s| s.memory = None);
        assert_eq!(first.opinion(&LargePages), Opinion::InspectMemory);
    }

    #[test]
    fn a_part_is_as_big_as_its_gain_needs_to_show_or_the_whole_goes_one_way() {
        // 170 GB: six of them are worth 0.3 %, so all of it is tried.
        let p = database(10_133).proposal(&LargePages);
        assert!(p.reversible);
        assert_eq!(count(&p.target), 10_133);
        // Where no more than a small part may be switched, it would not show.
        let p = database(10_133)
            .with(|s| {
                let few = BTreeMap::from([("trial_most_mib".to_owned(), 6144.0)]);
                s.policy.settings.insert(ID.to_owned(), few);
            })
            .proposal(&LargePages);
        assert!(!p.reversible, "{}", p.hypothesis);
        let parts: Vec<u64> = std::iter::once(&p.target).chain(&p.stages).map(count).collect();
        assert_eq!(parts.iter().sum::<u64>(), 10_133);
        let mut reached = 0;
        for (part, share) in parts.iter().zip(WHOLE) {
            reached += part;
            assert!((reached as f64 / 10_133.0 - share).abs() < 1e-3, "{parts:?}");
        }
        assert_eq!(parts.len(), 4);
        // Nor is a plan for a gain that stages could not show: a full link eats it (P10).
        let full = database(10_133).with(|s| s.counters().busiest_link = 0.98);
        assert!(full.reason(&LargePages).contains("98 % full"));
    }

    #[test]
    fn no_action_is_bigger_than_an_effector_takes() {
        let p = database(400_000).proposal(&LargePages);
        let parts: Vec<u64> = std::iter::once(&p.target).chain(&p.stages).map(count).collect();
        assert_eq!(parts.iter().sum::<u64>(), 400_000);
        assert!(
            parts.iter().all(|p| *p <= PIECES_PER_ACTION_MAX as u64 && *p > 0),
            "{parts:?}"
        );
    }

    #[test]
    fn the_classic_floors_are_two_cores_and_sixteen_gigabytes_of_shared_memory() {
        let big = database(1100).classic();
        big.proposal(&LargePages);
        // 8 GB per program (seed 000 5.2).
        assert!(
            database(512)
                .classic()
                .reason(&LargePages)
                .contains("at least 16.00 GiB")
        );
        let lazy = database(1100).classic().with(|s| {
            s.load.cpus = 1.0;
            for running in s.locality().running.values_mut() {
                *running = 0.5;
            }
        });
        assert!(lazy.reason(&LargePages).contains("1.0 cores"));
        let private = database(1100).classic().with(|s| {
            for region in s.memory.iter_mut().flat_map(|m| &mut m.regions) {
                region.kind = MemoryKind::Anonymous;
                region.mappers = 1;
            }
        });
        assert!(private.reason(&LargePages).contains("private memory"));
    }
}
