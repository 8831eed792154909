//! Hardware event counters of a workload: where its cycles go, where its lines come from, traffic of prefetch. They
//! predict, and they prove a mechanism, but never judge an experiment.
//!
//! A workload with detailed sampling is counted in *windows*. Groups of events run in sequence ([`PHASE`] each), on up
//! to [`THREADS_MAX`] threads and their new threads. Then the counters close and rest for [`REST`]. So our groups never
//! multiplex with each other, few descriptors are open, and the program pays for counters at most a tenth of the time.
//!
//! Hardware counters belong to the first user. Nothing is pinned, and counters give way to a running profiler
//! ([`others`]). If others' events leave a group too little time for extrapolation within [`ERROR_MAX`], its figures
//! are unknown. Unknown figures are NaN, and the strategies that need them decline.

pub mod events;
pub mod links;
pub mod others;

use self::events::{EventSet, What};
use self::links::Links;
use self::others::Profiler;
use homeostat_kernel::Root;
use homeostat_kernel::perf::{Count, Encoding, Group, GroupCount, OpenError, Scope};
use homeostat_kernel::process::{numbers_in, open_process};
use homeostat_model::{Counters, Nanoseconds, Workload, WorkloadId};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Counting time of each group of events.
pub const PHASE: Nanoseconds = Nanoseconds::from_secs(2);
/// Rest of a workload between two windows.
pub const REST: Nanoseconds = Nanoseconds::from_secs(90);
/// Age up to which a window describes the present.
const FRESH: Nanoseconds = Nanoseconds::from_secs(300);
/// A window closes this long after its workload's last sample.
const ABANDONED: Nanoseconds = Nanoseconds::from_secs(10);
/// Most threads counted in a window; of more, an even sample.
pub const THREADS_MAX: usize = 64;
/// Longest time to open counters in one call. The remaining threads are not counted in this phase.
const OPENING_MAX: Duration = Duration::from_millis(15);
const PROCESSES_MAX: usize = 256;
const WINDOWS_MAX: usize = 2;
const REMEMBERED_MAX: usize = 256;
/// Largest standard error from multiplexing (see [`Count::relative_error`]) with which a figure is known.
pub const ERROR_MAX: f64 = 0.1;
/// Least counting time of a group, in all threads together.
const COUNTED_MIN_NS: u64 = 20_000_000;

/// Latencies (ns) that split stalls, where counted as one, among sources of lines: own cache, other cache, near and far
/// memory. A two-socket x86 machine of 2020 (specification, machine-model B.2); used as ratios only.
const OWN_CACHE_NS: f64 = 15.0;
const OTHER_CACHE_NS: f64 = 100.0;
const NEAR_MEMORY_NS: f64 = 90.0;
const FAR_MEMORY_NS: f64 = 145.0;
/// Cycles of a page-table walk if only walks are counted (same source). Nested paging makes walks longer.
const WALK_CYCLES: f64 = 35.0;

#[derive(Clone, Debug, Default, PartialEq)]
struct Totals {
    values: BTreeMap<What, f64>,
    /// Nanoseconds requested and counted, over all threads.
    enabled_ns: u64,
    running_ns: u64,
}

impl Totals {
    fn add(&mut self, group: &[(What, Encoding)], counted: &GroupCount) {
        self.enabled_ns = self.enabled_ns.saturating_add(counted.enabled_ns);
        self.running_ns = self.running_ns.saturating_add(counted.running_ns);
        for (i, (what, _)) in group.iter().enumerate() {
            if let Some(count) = counted.count(i).filter(|c| c.running_ns > 0) {
                *self.values.entry(*what).or_default() += count.scaled();
            }
        }
    }

    fn is_known(&self) -> bool {
        let time = Count {
            value: 0,
            enabled_ns: self.enabled_ns,
            running_ns: self.running_ns,
        };
        self.running_ns >= COUNTED_MIN_NS && time.relative_error() <= ERROR_MAX
    }
}

/// The result of a window.
#[derive(Clone, Debug, PartialEq)]
pub struct Reading {
    /// The figures; NaN where unknown.
    pub counters: Counters,
    /// When the window ended.
    pub at: Nanoseconds,
    /// Threads that were counted at its beginning.
    pub threads: usize,
    /// Smallest share of the requested time that a group counted: below 1, others used the counters.
    pub coverage: f64,
}

/// Figures from the phases' counts. `nodes`: memory nodes of the machine; `busiest_link` from [`Links`].
fn figures(totals: &[Totals], nodes: usize, busiest_link: Option<f64>) -> Option<Counters> {
    let known = || totals.iter().filter(|t| t.is_known());
    // Values of one group, so that they were counted at the same time.
    let together = |whats: &[What]| -> Option<Vec<f64>> {
        known().find_map(|t| whats.iter().map(|w| t.values.get(w).copied()).collect())
    };
    let share = |what: What| {
        together(&[what, What::Cycles]).and_then(|v| match v[..] {
            [value, cycles] if cycles > 0.0 => Some(value / cycles),
            _ => None,
        })
    };
    let cycles_per_instruction = together(&[What::Cycles, What::Instructions]).and_then(|v| match v[..] {
        [cycles, instructions] if instructions > 0.0 => Some(cycles / instructions),
        _ => None,
    })?;
    let (memory, caches) = stalls(&share);
    let walks = match (share(What::LoadWalkCycles), share(What::StoreWalkCycles)) {
        (Some(loads), stores) => Some(loads + stores.unwrap_or(0.0)),
        (None, _) => share(What::Walks).map(|walks| walks * WALK_CYCLES),
    };
    let local = if nodes <= 1 {
        Some(1.0)
    } else {
        let part = |near: What, far: What| {
            together(&[near, far]).and_then(|v| match v[..] {
                [near, far] if near + far > 0.0 => Some((near, far)),
                _ => None,
            })
        };
        part(What::FromNearMemory, What::FromFarMemory)
            .map(|(near, far)| near / (near + far))
            .or_else(|| part(What::NodeReads, What::NodeReadMisses).map(|(all, far)| 1.0 - far / all))
            .or_else(|| part(What::LinesDemand, What::FromFarMemory).map(|(all, far)| 1.0 - far / all))
    };
    let prefetch = prefetch(&together);
    let unknown = |x: Option<f64>| {
        x.filter(|x| x.is_finite())
            .map_or(f64::NAN, |x| x.clamp(0.0, 1.0))
    };
    Some(Counters {
        cycles_per_instruction,
        memory_stall_share: unknown(memory),
        cache_to_cache_stall_share: unknown(caches),
        table_walk_share: unknown(walks),
        local_share: unknown(local),
        prefetch_share: unknown(prefetch.map(|p| p.0)),
        prefetch_useful_share: unknown(prefetch.map(|p| p.1)),
        busiest_link: unknown(busiest_link),
    })
}

/// Shares of the cycles that waited for memory and for other domains' caches.
fn stalls(share: &impl Fn(What) -> Option<f64>) -> (Option<f64>, Option<f64>) {
    // Weighted by deliveries and latency of each place.
    let weight = |what: What, ns: f64| share(what).map(|per_cycle| per_cycle * ns);
    let near_memory = weight(What::FromNearMemory, NEAR_MEMORY_NS);
    let far_memory = weight(What::FromFarMemory, FAR_MEMORY_NS);
    let near_cache = weight(What::FromNearCache, OTHER_CACHE_NS);
    let far_cache = weight(What::FromFarCache, FAR_MEMORY_NS);
    let own_cache = weight(What::FromOwnCache, OWN_CACHE_NS);
    let split = |stall: f64, others: f64| match (near_memory, far_memory, far_cache) {
        (Some(near), Some(far), Some(cache)) => {
            let memory = near + far;
            let caches = cache + near_cache.unwrap_or(0.0);
            let all = memory + caches + others;
            if all > 0.0 {
                (Some(stall * memory / all), Some(stall * caches / all))
            } else {
                (Some(0.0), Some(0.0))
            }
        }
        // All of it is beyond the last-level cache; the share of other caches is unknown.
        _ => (Some(stall), None),
    };
    if let Some(stall) = share(What::MissStall) {
        return split(stall, 0.0);
    }
    match (share(What::LoadStall), own_cache) {
        (Some(stall), Some(own)) => split(stall, own),
        // Without the places the stall includes all levels: more than memory's part, so it is unusable.
        (Some(_), None) => (None, None),
        (None, _) => (share(What::BackendMemoryStall), None),
    }
}

/// (Share of the memory traffic that is unused prefetch, share of the demand misses that prefetch covered.)
fn prefetch(together: &impl Fn(&[What]) -> Option<Vec<f64>>) -> Option<(f64, f64)> {
    let lines = together(&[What::LinesAll, What::LinesDemand])
        .and_then(|v| match v[..] {
            [all, demand] => Some((demand, (all - demand).max(0.0))),
            _ => None,
        })
        .or_else(|| {
            together(&[What::LinesDemand, What::LinesPrefetched]).and_then(|v| match v[..] {
                [demand, prefetched] => Some((demand, prefetched)),
                _ => None,
            })
        });
    let (demand, prefetched) = lines?;
    if demand + prefetched <= 0.0 || prefetched <= 0.0 {
        return Some((0.0, 0.0));
    }
    // A useful line would be fetched anyway, so only useless lines are savings. Without that split, both are unknown.
    let useless = together(&[What::PrefetchMisses, What::PrefetchUseless]).and_then(|v| match v[..] {
        [misses, useless] if misses > 0.0 => Some((useless / misses).clamp(0.0, 1.0)),
        _ => None,
    })?;
    let covered = prefetched * (1.0 - useless);
    let covers = if covered + demand > 0.0 {
        covered / (covered + demand)
    } else {
        0.0
    };
    Some((prefetched * useless / (demand + prefetched), covers))
}

#[derive(Debug)]
struct Window {
    began: Nanoseconds,
    touched: Nanoseconds,
    threads: usize,
    links: Links,
    phase: usize,
    groups: Vec<(Group, GroupCount)>,
    totals: Vec<Totals>,
}

/// Counts workloads in windows. One per platform.
#[derive(Debug, Default)]
pub struct HardwareCounters {
    set: Option<EventSet>,
    impossible: Option<String>,
    windows: BTreeMap<WorkloadId, Window>,
    readings: BTreeMap<WorkloadId, Reading>,
    /// When a workload's last window ended, with or without a result.
    ended: BTreeMap<WorkloadId, Nanoseconds>,
    profilers: Vec<Profiler>,
}

impl HardwareCounters {
    /// As [`HardwareCounters::default`], with another set of events: any that the kernel counts.
    pub fn with_events(set: EventSet) -> Self {
        Self {
            set: Some(set),
            ..Self::default()
        }
    }

    /// Profilers that run now. Our counters give way to them.
    pub fn yield_to(&mut self, profilers: Vec<Profiler>) {
        if !profilers.is_empty() {
            self.windows.clear();
        }
        self.profilers = profilers;
    }

    /// Reason why nothing is counted on this machine, once known.
    pub fn impossible(&self) -> Option<&str> {
        self.impossible.as_deref()
    }

    /// Continues the window of a workload, or begins one when due, at each detailed sample. `nodes`: memory nodes.
    pub fn follow(&mut self, root: &Root, workload: &Workload, nodes: usize, now: Nanoseconds) {
        if self.impossible.is_some() || !self.profilers.is_empty() || !root.is_live() {
            return;
        }
        let set = self.set.get_or_insert_with(|| EventSet::of(root)).clone();
        if let Some(window) = self.windows.get_mut(&workload.id) {
            window.touched = now;
            if now - window.began < PHASE {
                return;
            }
            if window.next(root, workload, &set, now) {
                return;
            }
            if let Some(window) = self.windows.remove(&workload.id) {
                self.end(root, workload.id.clone(), &window, nodes, now);
            }
            return;
        }
        let rests = self.ended.get(&workload.id).is_some_and(|at| now - *at < REST);
        if rests || self.windows.len() >= WINDOWS_MAX {
            return;
        }
        match open_groups(root, workload, set.groups.first().map_or(&[][..], Vec::as_slice)) {
            Ok(groups) if groups.is_empty() => {}
            Ok(groups) => {
                let window = Window {
                    began: now,
                    touched: now,
                    threads: groups.len(),
                    links: Links::begin(root, now),
                    phase: 0,
                    groups,
                    totals: Vec::new(),
                };
                self.windows.insert(workload.id.clone(), window);
            }
            Err(OpenError::Busy(_) | OpenError::Vanished) => self.note_end(workload.id.clone(), now),
            // The same for every workload, so it is not tried again.
            Err(e @ (OpenError::Denied(_) | OpenError::Unsupported(_))) => {
                self.impossible = Some(e.to_string())
            }
        }
    }

    fn note_end(&mut self, id: WorkloadId, now: Nanoseconds) {
        if self.ended.len() >= REMEMBERED_MAX {
            self.ended.retain(|_, at| now - *at < REST);
        }
        if self.ended.len() < REMEMBERED_MAX {
            self.ended.insert(id, now);
        }
    }

    fn end(&mut self, root: &Root, id: WorkloadId, window: &Window, nodes: usize, now: Nanoseconds) {
        self.note_end(id.clone(), now);
        let Some(counters) = figures(&window.totals, nodes, window.links.busiest(root, now)) else {
            self.readings.remove(&id);
            return;
        };
        let coverage = window
            .totals
            .iter()
            .filter(|t| t.enabled_ns > 0)
            .map(|t| t.running_ns as f64 / t.enabled_ns as f64)
            .fold(1.0, f64::min);
        if self.readings.len() >= REMEMBERED_MAX {
            self.readings.retain(|_, r| now - r.at < FRESH);
        }
        if self.readings.len() < REMEMBERED_MAX {
            self.readings.insert(
                id,
                Reading {
                    counters,
                    at: now,
                    threads: window.threads,
                    coverage,
                },
            );
        }
    }

    /// Closes windows of workloads that are no longer sampled. Call it at each sample.
    pub fn sweep(&mut self, now: Nanoseconds) {
        self.windows.retain(|_, w| now - w.touched < ABANDONED);
    }

    /// Forgets workloads that are gone.
    pub fn retain(&mut self, lives: impl Fn(&WorkloadId) -> bool) {
        self.windows.retain(|id, _| lives(id));
        self.readings.retain(|id, _| lives(id));
        self.ended.retain(|id, _| lives(id));
    }

    /// Result of a workload's last window, unless it is too old.
    pub fn latest(&self, workload: &WorkloadId, now: Nanoseconds) -> Option<&Reading> {
        self.readings.get(workload).filter(|r| now - r.at < FRESH)
    }
}

impl Window {
    /// Ends the phase and begins the next one; false when there is none.
    fn next(&mut self, root: &Root, workload: &Workload, set: &EventSet, now: Nanoseconds) -> bool {
        let mut totals = Totals::default();
        if let Some(events) = set.groups.get(self.phase) {
            for (group, begin) in &self.groups {
                if let Ok(count) = group.read() {
                    totals.add(events, &count.since(begin));
                }
            }
        }
        self.totals.push(totals);
        self.groups.clear();
        self.phase += 1;
        let Some(events) = set.groups.get(self.phase) else {
            return false;
        };
        self.began = now;
        // A group that cannot be opened now is unknown; later phases may work.
        self.groups = open_groups(root, workload, events).unwrap_or_default();
        true
    }
}

/// One group on each of the workload's threads, or on an even sample, with the count so far.
///
/// # Errors
/// The reason for the last failure if none could be opened.
fn open_groups(
    root: &Root,
    workload: &Workload,
    events: &[(What, Encoding)],
) -> Result<Vec<(Group, GroupCount)>, OpenError> {
    let encodings: Vec<Encoding> = events.iter().map(|e| e.1).collect();
    let mut threads = Vec::new();
    for process in workload.processes.iter().take(PROCESSES_MAX) {
        if let Ok(dir) = open_process(root, *process) {
            if let Ok((list, _)) = numbers_in(&dir, "task", THREADS_LISTED_MAX) {
                threads.extend(list);
            }
        }
    }
    let step = threads.len().div_ceil(THREADS_MAX).max(1);
    let mut groups = Vec::new();
    let mut failed = None;
    let begun = Instant::now();
    for thread in threads.iter().step_by(step) {
        if begun.elapsed() > OPENING_MAX {
            break;
        }
        match Group::open(&encodings, Scope::Thread(*thread)) {
            Ok(group) => {
                if let Ok(count) = group.read() {
                    groups.push((group, count));
                }
            }
            Err(OpenError::Vanished) => {}
            Err(e) => {
                failed = Some(e);
                break;
            }
        }
    }
    match failed {
        Some(e) if groups.is_empty() => Err(e),
        _ => Ok(groups),
    }
}

const THREADS_LISTED_MAX: usize = 4096;

/// Events that this machine can count, tested by opening counters on ourselves; none stays open.
#[derive(Clone, Debug, PartialEq)]
pub struct Ability {
    /// The name of the set of events.
    pub set: &'static str,
    /// Events of it that could be opened.
    pub works: Vec<What>,
    /// Events of it that could not.
    pub fails: Vec<What>,
    /// Reason if not even cycles and instructions could be opened.
    pub refused: Option<OpenError>,
}

impl Ability {
    /// Tries every group of the processor's set on the calling thread.
    pub fn probe(root: &Root) -> Self {
        let set = EventSet::of(root);
        let me = Scope::Thread(rustix::thread::gettid().as_raw_nonzero().get());
        let mut ability = Self {
            set: set.name,
            works: Vec::new(),
            fails: Vec::new(),
            refused: None,
        };
        for group in &set.groups {
            let encodings: Vec<Encoding> = group.iter().map(|e| e.1).collect();
            let opened = Group::open(&encodings, me).and_then(|g| g.read().map_err(OpenError::Busy));
            for (i, (what, _)) in group.iter().enumerate() {
                let worked = matches!(&opened, Ok(count) if count.values.get(i).copied().flatten().is_some());
                if worked {
                    ability.works.push(*what);
                } else {
                    ability.fails.push(*what);
                }
            }
            if let Err(e) = opened {
                ability.refused.get_or_insert(e);
            }
        }
        ability.works.sort_unstable();
        ability.works.dedup();
        ability.fails.sort_unstable();
        ability.fails.dedup();
        if ability.counts(What::Cycles) && ability.counts(What::Instructions) {
            ability.refused = None;
        }
        ability
    }

    /// Whether it can be counted.
    pub fn counts(&self, what: What) -> bool {
        self.works.contains(&what)
    }

    /// Available and missing figures of [`Counters`], in words.
    pub fn figures(&self) -> (Vec<&'static str>, Vec<&'static str>) {
        let any = |list: &[What]| list.iter().any(|w| self.counts(*w));
        let all = |list: &[What]| list.iter().all(|w| self.counts(*w));
        let memory = self.counts(What::MissStall)
            || self.counts(What::BackendMemoryStall)
            || all(&[What::LoadStall, What::FromOwnCache]);
        let lines =
            all(&[What::LinesAll, What::LinesDemand]) || all(&[What::LinesDemand, What::LinesPrefetched]);
        let table = [
            ("cycles per instruction", all(&[What::Cycles, What::Instructions])),
            ("stalls for memory", memory),
            ("page-table walks", any(&[What::LoadWalkCycles, What::Walks])),
            (
                "local and remote memory",
                all(&[What::FromNearMemory, What::FromFarMemory])
                    || all(&[What::NodeReads, What::NodeReadMisses]),
            ),
            (
                "lines from other caches",
                memory && self.counts(What::FromFarCache),
            ),
            (
                "useless prefetch",
                lines && all(&[What::PrefetchMisses, What::PrefetchUseless]),
            ),
        ];
        let pick = |wanted: bool| {
            table
                .iter()
                .filter(|(_, has)| *has == wanted)
                .map(|(n, _)| *n)
                .collect()
        };
        (pick(true), pick(false))
    }
}

#[cfg(test)]
mod tests;
