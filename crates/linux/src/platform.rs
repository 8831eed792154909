//! The real machine behind the `platform` traits.

use crate::canary::Own;
use crate::capabilities;
use homeostat_effectors::fetcher::Launch;
use homeostat_effectors::{KeepCounts, Registry};
use homeostat_kernel::Root;
use homeostat_kernel::clock::{MonotonicClock, read_clock};
use homeostat_kernel::numa::CpuMask;
use homeostat_kernel::process::lives;
use homeostat_meters::{Follower, Meter, MeterKind, MeterSettings};
use homeostat_model::action::Target;
use homeostat_model::{
    Action, Bytes, Direction, KernelBalancing, Locality, Machine, MemoryMap, MemorySetting, MeterCandidate,
    MeterId, MeterReading, Nanoseconds, Places, ProcessId, Progress, Snapshot, UndoRecord, Workload,
    WorkloadId, WorkloadSample,
};
use homeostat_platform::{Clock, Effectors, LostMeter, PlatformError, Reached, SampleRequest, Sensors};
use homeostat_sensors::counters::HardwareCounters;
use homeostat_sensors::host::{Host, tick_length};
use homeostat_sensors::kernel_balancing::BalancingWatch;
use homeostat_sensors::locality::LocalitySensor;
use homeostat_sensors::memory_settings::MemorySettings;
use homeostat_sensors::processes::ProcessTable;
use homeostat_sensors::reader::Reader;
use homeostat_sensors::reads::ReadSensor;
use homeostat_sensors::regions::Glance;
use homeostat_sensors::{reader, regions, topology};
use std::collections::{BTreeMap, BTreeSet};

/// Share of one CPU below which a scan ignores a workload, unless it is large.
const NOISE_CPU: f64 = 0.001;
/// Resident memory below which a scan ignores a workload, unless it is busy.
const NOISE_RESIDENT: Bytes = Bytes::from_mib(8);
/// Most processes of one workload whose memory a detailed sample reads: the oldest, which hold the data.
const GLANCE_MAX: usize = 64;
/// Interval of reading the kinds of memory of a process of unchanged size.
const GLANCE_REST: Nanoseconds = Nanoseconds::from_secs(10);
/// Most resident memory of one process whose page tables a sample walks: about 80 ms, in calls of 0.3 ms.
const ROLLUP_RESIDENT_MAX: Bytes = Bytes(16 * 1024 * 1024 * 1024);
/// Pause between walks of page tables, in multiples of their duration: at most 0.02 % of one CPU. Walks cost more while
/// pages are small, which would otherwise bias an experiment.
const ROLLUP_REST: u64 = 5000;
/// File refaults per second from which memory is short. Then the reads of workloads are sampled.
const REFAULTS_SHORT: f64 = 50.0;
/// Time for which memory counts as short afterwards.
const SHORT_FOR: Nanoseconds = Nanoseconds::from_secs(60);
/// Share of a CPU from which a workload's reads are sampled; less suffices if it waits for pages.
const READER_CPU: f64 = 0.01;
/// Share of a CPU from which a workload's reads are counted while memory is not short.
const COUNTED_CPU: f64 = 0.05;
const METERS_MAX: usize = 256;
/// Failed readings in a row after which an open meter is lost, if they also last for [`FAILING_MIN`].
const FAILURES_MIN: u32 = 3;
/// Least duration of failures: a server that is briefly busy, or an endpoint that restarts, ends no trial.
const FAILING_MIN: Nanoseconds = Nanoseconds::from_secs(10);
/// Least duration of failures that each promise a return.
const BUSY_MIN: Nanoseconds = Nanoseconds::from_secs(300);

struct OpenMeter {
    meter: Box<dyn Meter>,
    last: Option<(f64, Nanoseconds)>,
    /// Failed readings since the last good one, and the time of the first.
    failing: Option<(u32, Nanoseconds)>,
    /// Those of them that promised a return.
    busy: Option<(u32, Nanoseconds)>,
}

impl OpenMeter {
    fn new(meter: Box<dyn Meter>, last: Option<(f64, Nanoseconds)>) -> Self {
        Self {
            meter,
            last,
            failing: None,
            busy: None,
        }
    }

    /// Records a failed reading. Returns whether the meter is lost.
    fn fail(&mut self, why: &PlatformError, now: Nanoseconds) -> bool {
        // In any case the next interval begins anew.
        self.last = None;
        // A promise to return is believed for longer, and does not erase earlier failures.
        let is_busy = matches!(why, PlatformError::Busy { .. });
        let (row, least) = if is_busy {
            (&mut self.busy, BUSY_MIN)
        } else {
            (&mut self.failing, FAILING_MIN)
        };
        let (times, since) = row.map_or((1, now), |(times, since)| (times.saturating_add(1), since));
        *row = Some((times, since));
        let for_good = !is_busy && (matches!(why, PlatformError::Vanished { .. }) || self.meter.is_over());
        for_good || (times >= FAILURES_MIN && now.saturating_sub(since) >= least)
    }
}

/// The kinds of memory of a process at their last reading.
#[derive(Clone, Copy)]
struct Glanced {
    at: Nanoseconds,
    resident_pages: u64,
    glance: Glance,
}

#[derive(Clone, Copy)]
struct Rollup {
    at: Nanoseconds,
    took: Nanoseconds,
    private: Bytes,
    shared: Bytes,
}

/// This machine, or a captured one.
pub struct LinuxPlatform {
    root: Root,
    clock: MonotonicClock,
    host: Host,
    balancing: BalancingWatch,
    balanced: Option<KernelBalancing>,
    memory_settings: MemorySettings,
    memory_set: Vec<MemorySetting>,
    /// Opened at the first sample, so that a machine without /proc is an error with its reason, not a panic.
    processes: Option<ProcessTable>,
    workloads: BTreeMap<WorkloadId, Workload>,
    other_tuners: Vec<String>,
    kinds: Vec<Box<dyn MeterKind>>,
    meters: BTreeMap<(WorkloadId, MeterId), OpenMeter>,
    lost: Vec<LostMeter>,
    /// Workloads whose run-to-block times are followed.
    spans: BTreeMap<WorkloadId, Follower>,
    rollups: BTreeMap<ProcessId, Rollup>,
    /// Processes whose large pages were split by an undo after their last walk: their number is unknown.
    split_since: BTreeSet<ProcessId>,
    glances: BTreeMap<ProcessId, Glanced>,
    /// Windows of the processor's event counters.
    counters: HardwareCounters,
    nodes: usize,
    locality: LocalitySensor,
    effectors: Registry,
    /// Masks set by another homeostat on this machine, by workload.
    recognised: BTreeMap<WorkloadId, Vec<CpuMask>>,
    /// For reads under the lock of a process's address space.
    reader: Reader,
    reads: ReadSensor,
    /// Whether reads are also sampled while memory is not short.
    always_reads: bool,
    short: Option<Nanoseconds>,
    before: Option<(Nanoseconds, Nanoseconds)>,
    buffer: Vec<u8>,
    /// What homeostat itself uses, and its memory canary.
    own: Own,
    /// Something failed in the last probe for a reason that may pass by itself.
    probe_again: bool,
    machine_changed: bool,
}

impl std::fmt::Debug for LinuxPlatform {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LinuxPlatform")
            .field("root", &self.root)
            .field("workloads", &self.workloads.len())
            .field("meters", &self.meters.len())
            .finish_non_exhaustive()
    }
}

impl Drop for LinuxPlatform {
    fn drop(&mut self) {
        self.meters.clear();
        // A counter that takes longer to close ends with the process.
        homeostat_probes::wait_until_off();
    }
}

impl LinuxPlatform {
    /// The machine below `root`; `/` is the running one. Nothing is read yet. Meters have their default settings.
    pub fn new(root: Root) -> Self {
        Self::with_meters(root, &MeterSettings::default())
    }

    /// As [`LinuxPlatform::new`], with a person's settings of meters.
    pub fn with_meters(root: Root, settings: &MeterSettings) -> Self {
        Self {
            clock: MonotonicClock,
            host: Host::new(root.clone()),
            balancing: BalancingWatch::new(root.clone()),
            balanced: None,
            memory_settings: MemorySettings::new(root.clone()),
            memory_set: Vec::new(),
            processes: None,
            workloads: BTreeMap::new(),
            other_tuners: Vec::new(),
            kinds: crate::kinds(settings),
            meters: BTreeMap::new(),
            lost: Vec::new(),
            spans: BTreeMap::new(),
            rollups: BTreeMap::new(),
            split_since: BTreeSet::new(),
            glances: BTreeMap::new(),
            counters: HardwareCounters::default(),
            nodes: 1,
            locality: LocalitySensor::new(root.clone()),
            effectors: Registry::new(&root),
            recognised: BTreeMap::new(),
            reader: Reader::default(),
            reads: ReadSensor::new(root.clone()),
            always_reads: false,
            short: None,
            before: None,
            buffer: Vec::new(),
            own: Own::new(settings.canary && root.is_live()),
            probe_again: false,
            machine_changed: false,
            root,
        }
    }

    /// Prepares a protection from streaming readers, so that nothing has to be started while memory is short.
    pub fn stand_by(&mut self) {
        self.effectors.stand_by();
    }

    /// Starts the process that reads lost pages back in the control groups of others; without it none are brought back.
    ///
    /// # Errors
    /// The reason, for people.
    pub fn start_fetcher(&mut self, launch: &Launch) -> Result<(), String> {
        self.effectors.start_fetcher(launch)
    }

    /// Whether a part of the last probe ([`Sensors::machine`]) failed for a passing reason, or the machine changed.
    pub fn should_be_probed_again(&self) -> bool {
        self.probe_again || self.machine_changed
    }

    /// Whether CPUs or nodes came or went since the last probe, at the last scan.
    pub fn machine_changed(&self) -> bool {
        self.machine_changed
    }

    /// Every visible fact about the places of a workload; strategies get a summary ([`Sensors::inspect_locality`]).
    ///
    /// # Errors
    /// As there.
    pub fn look_at_places(&mut self, workload: &WorkloadId) -> Result<Places, PlatformError> {
        let workload = self.known(workload)?.clone();
        let mut own = self.effectors.placed_on(&workload.id);
        own.extend(self.recognised.get(&workload.id).into_iter().flatten().cloned());
        let mut places = self
            .locality
            .look(&workload, self.clock.now(), &mut self.reader, &own)?;
        places.counters = self.counters(&workload.id).map(|reading| reading.counters);
        Ok(places)
    }

    /// For an observer next to a daemon: masks of these changes are no person's choice. Unlike [`Effectors::adopt`],
    /// unsupervised.
    pub fn recognise<'r>(&mut self, in_force: impl IntoIterator<Item = &'r UndoRecord>) {
        self.recognised.clear();
        for record in in_force {
            let masks = self.effectors.masks_of(record);
            if !masks.is_empty() {
                let known = self.recognised.entry(record.action.workload.clone()).or_default();
                known.extend(masks);
            }
        }
    }

    /// The sensor of places, to watch dispatches live.
    pub fn locality(&mut self) -> &mut LocalitySensor {
        &mut self.locality
    }

    /// Origin of a meter that was found by a search, for people.
    pub fn meter_story(&self, workload: &WorkloadId, meter: &MeterId) -> Option<String> {
        let workload = self.workloads.get(workload)?;
        self.kinds.iter().find_map(|kind| kind.story(workload, meter))
    }

    /// Threads of a workload whose run-to-block times are recorded; `None` without any.
    pub fn threads_followed(&self, workload: &WorkloadId) -> Option<usize> {
        self.spans.get(workload).and_then(Follower::threads)
    }

    /// Whether the last sample had stall times (PSI) of the CPU, memory, and I/O.
    pub fn tells_pressure(&self) -> [bool; 3] {
        self.host.tells_pressure()
    }

    /// Whether the kernel reports run-queue waits of threads (`schedstat`, CONFIG_SCHED_INFO).
    pub fn tells_runqueue_wait(&self) -> bool {
        std::fs::exists(self.root.path("/proc/self/schedstat")).unwrap_or(false)
    }

    /// Side effects of changes since the last call: sentences for people, with their workload.
    pub fn told(&mut self) -> Vec<(WorkloadId, String)> {
        self.effectors.told()
    }

    /// Counts of limiting readers since the start without a kernel limit (control groups of version 1).
    pub fn kept_small(&self) -> KeepCounts {
        self.effectors.kept_small()
    }

    /// The event counters of a workload in their last window; `None` without a recent one.
    pub fn counters(&self, workload: &WorkloadId) -> Option<&homeostat_sensors::counters::Reading> {
        self.counters.latest(workload, self.clock.now())
    }

    fn known(&self, workload: &WorkloadId) -> Result<&Workload, PlatformError> {
        self.workloads
            .get(workload)
            .ok_or_else(|| PlatformError::Vanished {
                target: format!("workload {workload}"),
            })
    }

    fn table(&mut self) -> Result<&mut ProcessTable, PlatformError> {
        match &mut self.processes {
            Some(table) => Ok(table),
            none => Ok(none.insert(ProcessTable::new(self.root.clone())?)),
        }
    }

    /// Time since boot, on the clock of start times.
    fn uptime(&self) -> Nanoseconds {
        if self.root.is_live() {
            return read_clock(homeostat_kernel::clock::ClockId::Boottime);
        }
        topology::uptime(&self.root).unwrap_or_else(|| self.clock.now())
    }

    /// Scans all processes. Returns the workloads and the samples of those above the noise floor.
    fn scan(&mut self, detail: &[WorkloadId]) -> Result<(Vec<Workload>, Vec<WorkloadSample>), PlatformError> {
        let uptime = self.uptime();
        let now = self.clock.now();
        let short = self.is_short(now);
        self.table()?;
        // The table exists; this form of access allows the other sensors meanwhile.
        let Some(table) = self.processes.as_mut() else {
            return Ok((Vec::new(), Vec::new()));
        };
        table.pass(uptime)?;
        let mut workloads = table.workloads(self.effectors.helper().into_iter().chain(self.own.canary.pid()));
        let mut samples = Vec::new();
        for workload in &workloads {
            let detailed = detail.contains(&workload.id);
            let mut sample = table.sample(workload, now, uptime, detailed);
            if short && reads_perhaps(&sample) {
                sample.reads = self
                    .reads
                    .look(workload, ticks(uptime), |process| table.children_cpu(process));
            } else if !short && sample.interval.0 > 0 && uses_cpu(&sample, COUNTED_CPU) {
                sample.reads = self
                    .reads
                    .count(workload, ticks(uptime), |process| table.children_cpu(process));
            }
            let busy = sample.cpu.as_secs_f64() > sample.interval.as_secs_f64() * NOISE_CPU;
            if detailed || busy || sample.resident >= NOISE_RESIDENT {
                // A detailed sample reads it by kind.
                if !detailed {
                    sample.anonymous = table.weigh(workload, now);
                    // It was read after the total, which is smaller in a growing workload.
                    sample.resident = sample.resident.max(sample.anonymous);
                }
                samples.push(sample);
            }
        }
        table.finish_pass(now);
        self.other_tuners = table.other_tuners();
        self.other_tuners
            .extend(homeostat_sensors::tuners::in_kernel(&self.root));
        self.workloads = workloads.iter().map(|w| (w.id.clone(), w.clone())).collect();
        // A person's choice against a change of ours counts like any other found by a scan.
        for (id, sentence) in self.effectors.review(&self.workloads) {
            if let Some(workload) = workloads.iter_mut().find(|w| w.id == id) {
                workload.choice.tuned.push(sentence.clone());
            }
            if let Some(workload) = self.workloads.get_mut(&id) {
                workload.choice.tuned.push(sentence);
            }
        }
        self.counters.yield_to(
            self.processes
                .as_ref()
                .map(ProcessTable::profilers)
                .unwrap_or_default(),
        );
        let living = &self.workloads;
        self.counters.retain(|workload| living.contains_key(workload));
        self.meters
            .retain(|(workload, _), _| living.contains_key(workload));
        for ((owner, _), open) in &mut self.meters {
            if let Some(workload) = living.get(owner) {
                open.meter.forget_ended(workload);
            }
        }
        self.spans.retain(|workload, _| living.contains_key(workload));
        if let Some(table) = &self.processes {
            self.rollups.retain(|process, _| table.is_known(*process));
            self.split_since.retain(|process| table.is_known(*process));
            self.glances.retain(|process, _| table.is_known(*process));
            self.reads.retain(|process| table.is_known(process));
            self.locality
                .retain(|id| living.contains_key(id), |process| table.is_known(process));
        }
        self.machine_changed = self.locality.machine_changed();
        for sample in samples.iter_mut().filter(|s| detail.contains(&s.id)) {
            if let Some(workload) = self.workloads.get(&sample.id).cloned() {
                self.add_detail(&workload, sample);
            }
        }
        Ok((workloads, samples))
    }

    fn sample_detail(&mut self, detail: &[WorkloadId]) -> Result<Vec<WorkloadSample>, PlatformError> {
        let mut samples = Vec::new();
        for id in detail {
            let Some(workload) = self.workloads.get(id).cloned() else {
                continue;
            };
            let uptime = self.uptime();
            let clock = self.clock;
            let table = self.table()?;
            table.refresh(&workload, uptime);
            if !workload.processes.iter().any(|p| table.is_known(*p)) {
                continue;
            }
            let mut sample = table.sample(&workload, clock.now(), uptime, true);
            if self.is_short(clock.now()) && reads_perhaps(&sample) {
                let table = self.processes.as_ref();
                let children_cpu = |process| table.map_or(0, |table| table.children_cpu(process));
                sample.reads = self.reads.look(&workload, ticks(uptime), children_cpu);
            }
            self.add_detail(&workload, &mut sample);
            samples.push(sample);
        }
        samples.sort_by(|a, b| a.id.cmp(&b.id));
        samples.dedup_by(|a, b| a.id == b.id);
        Ok(samples)
    }

    /// Whether reads are sampled: memory is short, or was recently.
    fn is_short(&self, now: Nanoseconds) -> bool {
        self.always_reads || self.short.is_some_and(|at| now - at < SHORT_FOR)
    }

    /// Adds memory by kind and the readings of the open meters.
    fn add_detail(&mut self, workload: &Workload, sample: &mut WorkloadSample) {
        self.read_meters(workload, sample);
        if let Some(follower) = self.spans.get_mut(&workload.id) {
            sample.spans = follower.sample(workload, sample.cpu, sample.interval);
        }
        self.locality.follow(workload, self.clock.now());
        let mut private_huge = Bytes::ZERO;
        let mut shared_huge = Bytes::ZERO;
        let mut huge_known = false;
        for process in workload.processes.iter().take(GLANCE_MAX) {
            let Some(glance) = self.glance(*process) else {
                continue;
            };
            sample.anonymous += glance.anonymous;
            sample.shared = sample.shared.max(glance.shared);
            if glance.resident > ROLLUP_RESIDENT_MAX {
                continue;
            }
            // Memory smaller than a large page contains none, so its page tables are not walked. Half of one, because
            // per-CPU counters are added up only occasionally.
            if (glance.anonymous + glance.shared).0 < self.host.large_page().0 / 2 {
                huge_known = true;
                continue;
            }
            if let Some(rollup) = self.rollup(*process) {
                private_huge += rollup.private;
                shared_huge = shared_huge.max(rollup.shared);
                huge_known = true;
            }
        }
        // The total was read before its kinds: in a growing workload it would be smaller than its parts.
        sample.resident = sample.resident.max(sample.anonymous + sample.shared);
        sample.huge = huge_known.then(|| private_huge + shared_huge);
        // Last, so that all data of one sample is read at one time.
        self.counters
            .follow(&self.root, workload, self.nodes, self.clock.now());
    }

    /// The memory of a process by kind; read anew after a change of size, or after a while.
    fn glance(&mut self, process: ProcessId) -> Option<Glance> {
        let now = self.clock.now();
        let resident_pages = self.processes.as_ref()?.resident_pages(process);
        if let Some(done) = self.glances.get(&process) {
            if resident_pages == Some(done.resident_pages) && now.saturating_sub(done.at) < GLANCE_REST {
                return Some(done.glance);
            }
        }
        let glance = regions::glance(&self.root, process, &mut self.buffer)?;
        if let Some(resident_pages) = resident_pages {
            let done = Glanced {
                at: now,
                resident_pages,
                glance,
            };
            self.glances.insert(process, done);
        }
        Some(glance)
    }

    fn rollup(&mut self, process: ProcessId) -> Option<Rollup> {
        let begin = self.clock.now();
        if let Some(done) = self.rollups.get(&process) {
            if begin - done.at < done.took * ROLLUP_REST {
                return (!self.split_since.contains(&process)).then_some(*done);
            }
        }
        let root = self.root.clone();
        // Takes the process's mmap_lock. If it fails, the share of large pages is unknown in this sample.
        let (private, shared) = self
            .reader
            .run(process.pid, reader::PATIENCE, move || {
                regions::in_large_pages(&root, process, reader::PATIENCE / 2)
            })
            .ok()??;
        let done = Rollup {
            at: begin,
            took: self.clock.now() - begin,
            private,
            shared,
        };
        self.split_since.remove(&process);
        self.rollups.insert(process, done);
        Some(done)
    }

    fn read_meters(&mut self, workload: &Workload, sample: &mut WorkloadSample) {
        let mut ended = Vec::new();
        for ((owner, id), open) in &mut self.meters {
            if owner != &workload.id {
                continue;
            }
            match open.meter.read(workload) {
                Ok(count) => {
                    open.failing = None;
                    open.busy = None;
                    let at = self.clock.now();
                    let counted = open.meter.counted();
                    if let Some((before, then)) = open.last.replace((count, at)) {
                        // Without a count, the next interval still begins here.
                        if let Some(counted) = counted {
                            let work = count - before;
                            // A counter that went back was restarted: this interval is lost.
                            if work >= 0.0 && work.is_finite() && at > then {
                                sample.meters.push(MeterReading {
                                    meter: id.clone(),
                                    work,
                                    interval: at - then,
                                    counted,
                                    lag: open.meter.lag(),
                                });
                            }
                        }
                    }
                }
                Err(e) => {
                    if open.fail(&e, self.clock.now()) {
                        ended.push((id.clone(), e));
                    }
                }
            }
        }
        if ended.is_empty() {
            return;
        }
        // A workload ends with its main process, and so do its meters: that loss is not reported.
        let is_there = workload
            .processes
            .first()
            .is_some_and(|main| lives(&self.root, *main));
        for (id, why) in ended {
            self.meters.remove(&(workload.id.clone(), id.clone()));
            if is_there {
                self.lost.push(LostMeter {
                    workload: workload.id.clone(),
                    meter: id,
                    why,
                });
            }
        }
    }
}

impl Sensors for LinuxPlatform {
    fn machine(&mut self) -> Result<Machine, PlatformError> {
        let mut machine = topology::read(&self.root)?;
        let probed = capabilities::probe(&self.root, &machine);
        machine.capabilities = probed.capabilities;
        self.nodes = machine.nodes.len();
        self.locality.set_machine(&machine);
        self.machine_changed = false;
        self.probe_again = !probed.passing.is_empty();
        Ok(machine)
    }

    fn sample(&mut self, request: &SampleRequest) -> Result<Snapshot, PlatformError> {
        self.lost.clear();
        let at = self.clock.now();
        let own_cpu_total = read_clock(homeostat_kernel::clock::ClockId::ProcessCPUTime);
        let mut machine = self.host.sample(request.scan)?;
        if request.scan {
            let holder = self.effectors.holder(homeostat_sensors::kernel_balancing::FILE);
            self.balanced = self.balancing.look(at, self.host.cpu_busy(), holder);
            let effectors = &self.effectors;
            self.memory_set = self.memory_settings.look(at, |file| effectors.holder(file));
        }
        machine.numa_balancing.clone_from(&self.balanced);
        machine.memory_settings.clone_from(&self.memory_set);
        let interval = self.before.map_or(Nanoseconds::ZERO, |(before, _)| at - before);
        let paging = &machine.paging;
        let refaults = paging.refaults_file.saturating_add(paging.refaults_anonymous) as f64;
        if interval.0 > 0 && refaults >= REFAULTS_SHORT * interval.as_secs_f64() {
            self.short = Some(at);
        }
        let (workloads, samples) = if request.scan {
            let (workloads, samples) = self.scan(&request.detail)?;
            (Some(workloads), samples)
        } else {
            (None, self.sample_detail(&request.detail)?)
        };
        self.counters.sweep(self.clock.now());
        self.effectors.tick();
        machine.other_tuners.clone_from(&self.other_tuners);
        let canary = self.own.canary.sample(self.clock.now(), &machine, interval);
        let (at_before, own_before) = self.before.unwrap_or((at, own_cpu_total));
        self.before = Some((at, own_cpu_total));
        Ok(Snapshot {
            at,
            unix_seconds: self.clock.unix_seconds(),
            interval: at - at_before,
            machine,
            workloads,
            samples,
            own_cpu: own_cpu_total - own_before,
            own_resident: self.own.resident(&mut self.buffer),
            canary,
        })
    }

    fn look_at_reads(&mut self, wanted: bool) {
        self.always_reads = wanted;
    }

    fn keep_canary(&mut self, wanted: bool) {
        self.own.canary.keep(wanted);
    }

    fn follow_spans(&mut self, workloads: &[WorkloadId]) {
        self.spans.retain(|id, _| workloads.contains(id));
        for id in workloads {
            self.spans
                .entry(id.clone())
                .or_insert_with(|| Follower::new(&self.root));
        }
    }

    fn inspect_memory(&mut self, workload: &WorkloadId) -> Result<MemoryMap, PlatformError> {
        let workload = self.known(workload)?.clone();
        regions::inspect(&self.root, &workload, &mut self.reader).map_err(|not_now| PlatformError::Busy {
            what: format!("inspecting the memory of {}", workload.id),
            why: not_now.to_string(),
        })
    }

    fn inspect_locality(&mut self, workload: &WorkloadId) -> Result<Locality, PlatformError> {
        self.look_at_places(workload).map(|places| places.summary())
    }

    fn find_meters(&mut self, workload: &WorkloadId) -> Result<Vec<MeterCandidate>, PlatformError> {
        let workload = self.known(workload)?.clone();
        let mut found: Vec<MeterCandidate> = Vec::new();
        for kind in &mut self.kinds {
            found.extend(kind.find(&self.root, &workload));
        }
        found.sort_by(|a, b| (a.class, &a.id).cmp(&(b.class, &b.id)));
        Ok(found)
    }

    fn open_meter(&mut self, workload: &WorkloadId, meter: &MeterId) -> Result<(), PlatformError> {
        let workload = self.known(workload)?.clone();
        let key = (workload.id.clone(), meter.clone());
        if self.meters.contains_key(&key) {
            return Ok(());
        }
        if self.meters.len() >= METERS_MAX {
            return Err(PlatformError::Busy {
                what: format!("opening meter {meter}"),
                why: format!("{METERS_MAX} meters are open already; close one first"),
            });
        }
        // Only the meter's own kind is asked; others would refuse it with another reason.
        for kind in &mut self.kinds {
            let offers = kind
                .find(&self.root, &workload)
                .into_iter()
                .find(|c| c.id == *meter);
            let Some(candidate) = offers else { continue };
            if let Some(why) = candidate.refused {
                return Err(PlatformError::Unsupported {
                    what: format!("meter {meter}"),
                    why,
                });
            }
            let mut open = kind.open(&self.root, &workload, meter)?;
            // The first difference starts here, or with the first reading of a meter that has to be found first.
            let last = match open.read(&workload) {
                Ok(count) => Some((count, self.clock.now())),
                Err(PlatformError::Busy { .. }) => None,
                Err(e) => return Err(e),
            };
            self.meters.insert(key, OpenMeter::new(open, last));
            return Ok(());
        }
        Err(PlatformError::Unsupported {
            what: format!("meter {meter} for {}", workload.id),
            why: "no kind of meter offers it; `homeostat explain` lists those that fit".into(),
        })
    }

    fn close_meter(&mut self, workload: &WorkloadId, meter: &MeterId) {
        self.meters.remove(&(workload.clone(), meter.clone()));
    }

    fn take_lost_meters(&mut self) -> Vec<LostMeter> {
        std::mem::take(&mut self.lost)
    }
}

impl Effectors for LinuxPlatform {
    fn prepare(&mut self, action: &Action) -> Result<UndoRecord, PlatformError> {
        match self.workloads.get(&action.workload) {
            Some(workload) => self.effectors.prepare_for(action, &workload.processes),
            None => self.effectors.prepare(action),
        }
    }
    fn advance(&mut self, record: &UndoRecord, direction: Direction) -> Result<Progress, PlatformError> {
        let progress = self.effectors.advance(record, direction)?;
        if let (true, Target::Memory(memory)) = (progress.done, &record.action.target) {
            for target in memory {
                match direction {
                    // The next walk is short: it covers large pages.
                    Direction::Apply => {
                        self.rollups.remove(&target.process);
                        self.split_since.remove(&target.process);
                    }
                    Direction::Undo => {
                        self.split_since.insert(target.process);
                    }
                }
            }
        }
        Ok(progress)
    }
    fn forget(&mut self, record: &UndoRecord) {
        self.effectors.forget(record);
    }
    fn adopt(&mut self, record: &UndoRecord) {
        self.effectors.adopt(record);
    }
    fn inherit(&mut self, record: &UndoRecord, reached: Reached) {
        self.effectors.inherit(record, reached);
    }
}

/// A time since boot on the clock of start times, in clock ticks.
fn ticks(uptime: Nanoseconds) -> u64 {
    uptime.0 / tick_length().max(1)
}

/// Whether a workload's reads matter: it works, or waits for pages.
fn reads_perhaps(sample: &WorkloadSample) -> bool {
    sample.faults_major > 0 || uses_cpu(sample, READER_CPU)
}

fn uses_cpu(sample: &WorkloadSample, share: f64) -> bool {
    sample.cpu.as_secs_f64() >= share * sample.interval.as_secs_f64()
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Answering<F> {
        answer: F,
        over: bool,
    }

    impl<F: FnMut() -> Result<f64, PlatformError>> Meter for Answering<F> {
        fn read(&mut self, _: &Workload) -> Result<f64, PlatformError> {
            (self.answer)()
        }
        fn is_over(&self) -> bool {
            self.over
        }
    }

    /// A meter that answers in this way.
    fn answering(answer: impl FnMut() -> Result<f64, PlatformError> + 'static) -> Box<dyn Meter> {
        Box::new(Answering { answer, over: false })
    }

    /// The same, and every error is its last word.
    fn over(answer: impl FnMut() -> Result<f64, PlatformError> + 'static) -> Box<dyn Meter> {
        Box::new(Answering { answer, over: true })
    }

    fn refused() -> PlatformError {
        PlatformError::Unsupported {
            what: "asking its server".into(),
            why: "it has too many clients".into(),
        }
    }

    const PROGRAM: &str = "p10[10]";

    /// A machine with one process.
    fn host() -> tempfile::TempDir {
        let host = tempfile::tempdir().unwrap();
        let proc = host.path().join("proc");
        std::fs::create_dir_all(proc.join("10")).unwrap();
        for (file, text) in [
            ("meminfo", "MemTotal: 1000000 kB\n"),
            ("uptime", "1000.00 1.00\n"),
            (
                "10/stat",
                "10 (p10) S 1 10 10 0 -1 0 0 0 0 0 50 0 0 0 20 0 1 0 100 1 4000 0 1 1 200\n",
            ),
        ] {
            std::fs::write(proc.join(file), text).unwrap();
        }
        std::os::unix::fs::symlink("/bin/p", proc.join("10/exe")).unwrap();
        host
    }

    /// Has these meters of the process read once: those that are open then, and what was lost.
    fn read(
        platform: &mut LinuxPlatform,
        meters: Vec<(&'static str, Box<dyn Meter>)>,
    ) -> (Vec<String>, Vec<LostMeter>) {
        let mut request = SampleRequest {
            scan: true,
            detail: vec![],
        };
        platform.sample(&request).unwrap();
        for (id, meter) in meters {
            let open = OpenMeter::new(meter, None);
            platform.meters.insert((PROGRAM.into(), id.into()), open);
        }
        request.scan = false;
        request.detail.push(PROGRAM.into());
        platform.sample(&request).unwrap();
        let open = platform.meters.keys().map(|(_, id)| id.to_string()).collect();
        (open, platform.take_lost_meters())
    }

    #[test]
    fn a_meter_that_is_lost_is_closed_and_told_once_with_its_reason() {
        let host = host();
        let mut platform = LinuxPlatform::new(Root::new(host.path()));
        let anew = || PlatformError::Unsupported {
            what: "meter points".into(),
            why: "its code was made anew".into(),
        };
        let not_now = || PlatformError::Busy {
            what: "meter paused".into(),
            why: "it is traced".into(),
        };
        let (open, lost) = read(
            &mut platform,
            vec![
                ("kept", answering(|| Ok(1.0))),
                ("paused", over(move || Err(not_now()))),
                ("points", over(move || Err(anew()))),
            ],
        );
        assert_eq!(open, ["kept", "paused"]);
        let expected = LostMeter {
            workload: PROGRAM.into(),
            meter: "points".into(),
            why: anew(),
        };
        assert_eq!(lost, [expected]);
        let (open, lost) = read(&mut platform, vec![]);
        assert_eq!((open.len(), lost), (2, vec![]));
    }

    #[test]
    fn a_meter_that_fails_once_is_kept_and_one_that_fails_for_ten_seconds_is_lost() {
        let host = host();
        let mut platform = LinuxPlatform::new(Root::new(host.path()));
        let mut readings = 0.0;
        // It fails in the second reading only.
        let hiccup = move || {
            readings += 1.0;
            if readings == 2.0 {
                Err(refused())
            } else {
                Ok(readings)
            }
        };
        let meters = vec![
            ("hiccup", answering(hiccup)),
            ("refused", answering(|| Err(refused()))),
        ];
        let (open, lost) = read(&mut platform, meters);
        assert_eq!((open.len(), lost), (2, vec![]));
        let key = |id: &str| -> (WorkloadId, MeterId) { (PROGRAM.into(), id.into()) };
        assert!(platform.meters[&key("hiccup")].last.is_some());
        let (open, lost) = read(&mut platform, vec![]);
        assert_eq!((open.len(), lost), (2, vec![]));
        let hiccup = &platform.meters[&key("hiccup")];
        assert!(hiccup.last.is_none() && hiccup.failing.is_some_and(|(times, _)| times == 1));
        let (open, lost) = read(&mut platform, vec![]);
        assert_eq!((open.len(), lost), (2, vec![]), "three times, but not for long");
        let hiccup = &platform.meters[&key("hiccup")];
        assert!(hiccup.last.is_some() && hiccup.failing.is_none());
        // As if the first time had been ten seconds ago.
        let refused_one = platform.meters.get_mut(&key("refused")).unwrap();
        let (times, since) = refused_one.failing.unwrap();
        assert_eq!(times, 3);
        refused_one.failing = Some((times, since.saturating_sub(FAILING_MIN)));
        let expected = LostMeter {
            workload: PROGRAM.into(),
            meter: "refused".into(),
            why: refused(),
        };
        let (open, lost) = read(&mut platform, vec![]);
        assert_eq!((open, lost), (vec!["hiccup".to_owned()], vec![expected]));
        let (open, lost) = read(&mut platform, vec![]);
        assert_eq!((open.len(), lost), (1, vec![]), "told once");
    }

    #[test]
    fn a_meter_that_is_busy_for_five_minutes_is_lost_with_what_it_said_last() {
        let host = host();
        let mut platform = LinuxPlatform::new(Root::new(host.path()));
        let mut readings = 0;
        let said = |times: i32| PlatformError::Busy {
            what: "meter busy".into(),
            why: format!("said {times} times"),
        };
        let busy = move || {
            readings += 1;
            Err(said(readings))
        };
        let mut once = 0;
        // It was busy as well, until it was read.
        let back = move || {
            once += 1;
            if once == 3 { Ok(1.0) } else { Err(said(once)) }
        };
        let meters = vec![("back", answering(back)), ("busy", answering(busy))];
        let (open, lost) = read(&mut platform, meters);
        assert_eq!((open.len(), lost), (2, vec![]));
        let (open, lost) = read(&mut platform, vec![]);
        assert_eq!((open.len(), lost), (2, vec![]));
        for open in platform.meters.values_mut() {
            let (times, since) = open.busy.unwrap();
            assert_eq!(times, 2);
            if since < BUSY_MIN {
                println!("skipped: this machine has not run for five minutes yet");
                return;
            }
            // As if the first time had been five minutes ago.
            open.busy = Some((times, since.saturating_sub(BUSY_MIN)));
        }
        let expected = LostMeter {
            workload: PROGRAM.into(),
            meter: "busy".into(),
            why: said(3),
        };
        let (open, lost) = read(&mut platform, vec![]);
        assert_eq!((open, lost), (vec!["back".to_owned()], vec![expected]));
        let (open, lost) = read(&mut platform, vec![]);
        assert_eq!((open.len(), lost), (1, vec![]), "it has begun anew");
    }

    #[test]
    fn it_is_lost_when_it_has_failed_three_times_on_end_and_for_ten_seconds() {
        let seconds = Nanoseconds::from_secs;
        let mut open = OpenMeter::new(answering(|| Ok(0.0)), None);
        for (at, lost) in [(100, false), (101, false), (109, false), (110, true)] {
            assert_eq!(open.fail(&refused(), seconds(at)), lost, "{at}");
        }
        let mut seldom = OpenMeter::new(answering(|| Ok(0.0)), None);
        for (at, lost) in [(100, false), (160, false), (220, true)] {
            assert_eq!(seldom.fail(&refused(), seconds(at)), lost, "{at}");
        }
        // What says that it will be back is not counted, and does not end the row.
        let not_now = PlatformError::Busy {
            what: "asking its server".into(),
            why: "no answer in time".into(),
        };
        let mut between = OpenMeter::new(answering(|| Ok(0.0)), None);
        for (why, at, lost) in [
            (&refused(), 100, false),
            (&not_now, 101, false),
            (&refused(), 102, false),
            (&not_now, 120, false),
            (&refused(), 121, true),
        ] {
            assert_eq!(between.fail(why, seconds(at)), lost, "{at}");
        }
        // Nor is it believed for ever.
        let mut busy = OpenMeter::new(over(|| Ok(0.0)), None);
        for (at, lost) in [(100, false), (101, false), (399, false), (400, true)] {
            assert_eq!(busy.fail(&not_now, seconds(at)), lost, "{at}");
        }
        let gone = PlatformError::Vanished {
            target: "process 10".into(),
        };
        let mut ended = OpenMeter::new(answering(|| Ok(0.0)), None);
        assert!(
            ended.fail(&gone, seconds(1)),
            "nothing can be read of it ever again"
        );
        let mut last_word = OpenMeter::new(over(|| Ok(0.0)), None);
        assert!(last_word.fail(&refused(), seconds(1)));
    }

    #[test]
    fn a_meter_that_ends_with_its_workload_is_not_lost() {
        let host = host();
        let mut platform = LinuxPlatform::new(Root::new(host.path()));
        let process = host.path().join("proc/10");
        // The process ends while its meter is read.
        let ends = move || {
            std::fs::remove_dir_all(&process).unwrap();
            Err(PlatformError::Vanished {
                target: "process 10".into(),
            })
        };
        let (open, lost) = read(&mut platform, vec![("progress", answering(ends))]);
        assert_eq!((open.len(), lost), (0, vec![]));
    }
}
