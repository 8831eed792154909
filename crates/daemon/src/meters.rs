//! Meters for people: which meters could count a workload's work, and how good each is in a live test. The stable JSON
//! shapes of `homeostat meter`, filled without a daemon. The same rules as in [`crate::api`] hold.

use crate::api::{Found, SCHEMA, find_named};
use homeostat_engine::{JudgedMeter, MeterInterval, Policy, judge_meters};
use homeostat_kernel::Root;
use homeostat_kernel::clock::MonotonicClock;
use homeostat_linux::LinuxPlatform;
pub use homeostat_meters::PointsWish;
use homeostat_meters::{ConfiguredMeter, MeterSettings, SpanBlocks};
use homeostat_model::{
    MachineSample, MeterCandidate, MeterClass, MeterId, Nanoseconds, Snapshot, Workload, WorkloadId,
    WorkloadSample,
};
use homeostat_platform::{Clock, PlatformError, SampleRequest, Sensors};
pub use homeostat_probes::end;
use homeostat_probes::known::{KnownMeter, known_meters};
pub use homeostat_probes::owed::{Mended, mend, write_breakpoints_down_in};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// Workloads that are listed when nobody asks for one: the largest users of CPU.
pub const SHOWN: usize = 12;
/// Seconds that a meter has to be watched at least before it can be judged.
pub const SECONDS_MIN: u32 = 14;
/// Seconds that a test watches where nobody says how many …
pub const SECONDS_USUAL: u32 = 45;
/// … and at most, while it searches for probe sites.
pub const SECONDS_USUAL_MAX: u32 = 120;
const RANKING: Nanoseconds = Nanoseconds::from_millis(300);
const BEAT: Nanoseconds = Nanoseconds::from_secs(1);
/// Found probe sites must have a reading within this many readings of the others, or count as lost.
const READ_WITHIN: usize = 10;
const NAP: Nanoseconds = Nanoseconds::from_millis(100);

/// Known meters of known programs (`homeostat meter known --json`).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Known {
    /// Version of these shapes.
    pub schema: u32,
    /// The table.
    pub meters: Vec<KnownMeter>,
    /// Meters that the configuration names.
    #[serde(default)]
    pub configured: Vec<NamedMeter>,
}

/// A meter that the configuration names.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NamedMeter {
    /// Workloads that it is for: an id, a program, or a pattern over either.
    pub workload: String,
    /// Name of the meter.
    pub meter: String,
    /// The unit of one count; absent if not configured.
    pub unit: Option<String>,
}

/// The table of what is known, and what the configuration adds to it.
pub fn known(settings: &MeterSettings) -> Known {
    let named = |(workload, entries): (&String, &Vec<ConfiguredMeter>)| -> Vec<NamedMeter> {
        entries
            .iter()
            .map(|entry| NamedMeter {
                workload: workload.clone(),
                meter: entry.meter.clone(),
                unit: entry.unit.clone(),
            })
            .collect()
    };
    Known {
        schema: SCHEMA,
        configured: settings.configured.iter().flat_map(named).collect(),
        meters: known_meters(),
    }
}

/// The meters of workloads (`homeostat meter list --json`).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Listing {
    /// Version of these shapes.
    pub schema: u32,
    /// The workloads, busiest first.
    pub workloads: Vec<WorkloadMeters>,
    /// Workloads that are not listed, because they use little.
    pub workloads_left_out: u32,
}

/// The meters of a workload, not yet tried.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct WorkloadMeters {
    /// Name.
    pub name: String,
    /// Program of its main process.
    pub program: String,
    /// Main process.
    pub pid: i64,
    /// CPUs that it uses (1.0 = one CPU busy all the time).
    pub cpus: f64,
    /// Its meters, those closest to the work first.
    pub meters: Vec<Candidate>,
}

/// A meter that was not tried.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Candidate {
    /// Name.
    pub id: String,
    /// `application`, `probe`, `kernel`, `points` or `hardware`.
    pub class: MeterClass,
    /// The unit of one count.
    pub unit: String,
    /// Cost to the workload of one count in nanoseconds; 0 = reading costs the workload nothing.
    pub cost_per_count_ns: u64,
    /// Why it cannot be used, with the remedy; absent when it can.
    pub refused: Option<String>,
}

/// The meters of one workload, tried (`homeostat meter test --json`).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Test {
    /// Version of these shapes.
    pub schema: u32,
    /// The workload.
    pub name: String,
    /// Program of its main process.
    pub program: String,
    /// Main process.
    pub pid: i64,
    /// How long the meters were watched.
    pub seconds: f64,
    /// CPUs that it used meanwhile.
    pub cpus: f64,
    /// Its meters, those closest to the work first.
    pub meters: Vec<Tried>,
    /// Run-to-block times of its threads; absent if not measured, invisible, or without waits.
    pub spans: Option<Spans>,
    /// Why spans are absent, or end early.
    pub spans_unknown: Option<String>,
    /// Waits meanwhile.
    pub waits: Waits,
}

/// Waits of a workload's threads and of the machine during a test.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Waits {
    /// Run-queue wait of its threads, seconds per second: the mean number of ready threads without a CPU.
    /// [`Test::cpus`] is the number that ran. Absent where the kernel does not report it.
    pub runqueue_wait: Option<f64>,
    /// Share of the time in which something on the machine waited for a CPU (PSI `some`); absent without PSI.
    pub pressure_cpu: Option<f64>,
    /// … for memory that had to be freed or brought back.
    pub pressure_memory: Option<f64>,
    /// … for storage.
    pub pressure_io: Option<f64>,
}

/// Run-to-block times of a workload's threads, between two waits: in a server, the work time of a request.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Spans {
    /// How many were seen.
    pub count: u64,
    /// Threads that were followed.
    pub threads: u64,
    /// Share of CPU time with recording, 0 to 1. Below 1 if continuous recording would cost more than half a percent,
    /// and because the switch rate is checked first.
    pub recorded: f64,
    /// Median run-to-block time (seconds).
    pub median_s: f64,
    /// Relative standard deviation of the median over blocks of time; absent with too few spans.
    pub median_noise: Option<f64>,
    /// 99th percentile of the run-to-block time (seconds).
    pub p99_s: f64,
    /// Relative standard deviation of the 99th percentile over blocks of time; absent with too few spans.
    pub p99_noise: Option<f64>,
}

/// A meter that was tried.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Tried {
    /// Name.
    pub id: String,
    /// `application`, `probe`, `kernel`, `points` or `hardware`.
    pub class: MeterClass,
    /// The unit of one count.
    pub unit: String,
    /// Counts per second; absent when it was not opened.
    pub rate: Option<f64>,
    /// Coefficient of variation of work per CPU second over blocks of four seconds; absent if unknown.
    pub noise: Option<f64>,
    /// Smallest effect that a trial of 20 minutes could prove with it, as a share of the work; absent if unknown.
    pub detectable: Option<f64>,
    /// Share of the workload's CPU time that counting costs.
    pub cost: f64,
    /// Share of its CPU time in which it was counted, 0 to 1; the rest is extrapolated.
    pub counted: f64,
    /// Work in a reading may be this many seconds older than its end. A trial skips as many after each change. 0:
    /// nothing was counted before the reading began.
    #[serde(default)]
    pub lag_s: f64,
    /// Whether it is the one that homeostat would use.
    pub taken: bool,
    /// Why it was taken or not.
    pub why: String,
    /// How it was found, where that took a search.
    pub story: Option<String>,
    /// The readings in order; empty if not opened.
    pub readings: Vec<Reading>,
}

/// One reading of a meter.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Reading {
    /// When, on the machine's monotonic clock (seconds).
    pub at_s: f64,
    /// Counts since the reading before.
    pub work: f64,
    /// Time since the reading before (seconds).
    pub seconds: f64,
    /// CPU time that the workload used meanwhile (seconds).
    pub cpu_s: f64,
}

/// Looks at meters without a daemon. What it opens is closed when it is dropped.
pub struct Observer {
    policy: Policy,
    platform: LinuxPlatform,
    clock: MonotonicClock,
    workloads: Vec<Workload>,
    samples: BTreeMap<WorkloadId, WorkloadSample>,
}

impl Observer {
    /// Finds the workloads of this machine. `policy` judges the meters.
    ///
    /// # Errors
    /// Its processes cannot be listed.
    pub fn begin(settings: &MeterSettings, policy: &Policy) -> Result<Self, PlatformError> {
        let mut observer = Self {
            policy: policy.clone(),
            platform: LinuxPlatform::with_meters(Root::default(), settings),
            clock: MonotonicClock,
            workloads: Vec::new(),
            samples: BTreeMap::new(),
        };
        observer.scan()?;
        // CPU use needs a second scan.
        observer.clock.sleep(RANKING);
        observer.scan()?;
        Ok(observer)
    }

    fn scan(&mut self) -> Result<(), PlatformError> {
        let snapshot = self.platform.sample(&SampleRequest {
            scan: true,
            detail: Vec::new(),
        })?;
        self.workloads = snapshot.workloads.unwrap_or_default();
        self.samples = snapshot.samples.into_iter().map(|s| (s.id.clone(), s)).collect();
        Ok(())
    }

    /// A workload by its name, its program, or one of its processes.
    pub fn find(&self, name: &str) -> Found<'_, Workload> {
        find_named(&self.workloads, name)
    }

    fn workload(&self, id: &WorkloadId) -> Result<Workload, PlatformError> {
        self.workloads
            .iter()
            .find(|w| w.id == *id)
            .cloned()
            .ok_or_else(|| PlatformError::Vanished {
                target: format!("workload {id}"),
            })
    }

    fn cpus(&self, id: &WorkloadId) -> f64 {
        self.samples.get(id).map_or(0.0, |s| s.cpu.share_of(s.interval))
    }

    /// The meters that could count a workload's work, or the busiest workloads'. Opens nothing.
    ///
    /// # Errors
    /// The workload has gone.
    pub fn list(&mut self, one: Option<&WorkloadId>, most: usize) -> Result<Listing, PlatformError> {
        let mut ids: Vec<WorkloadId> = match one {
            Some(id) => vec![self.workload(id)?.id],
            None => self.samples.keys().cloned().collect(),
        };
        ids.sort_by(|a, b| self.cpus(b).total_cmp(&self.cpus(a)).then(a.cmp(b)));
        let left_out = ids.len().saturating_sub(most);
        ids.truncate(most);
        let mut workloads = Vec::new();
        for id in ids {
            let workload = self.workload(&id)?;
            let meters = match self.platform.find_meters(&id) {
                Ok(found) => found,
                // One of many workloads may end meanwhile.
                Err(PlatformError::Vanished { .. }) if one.is_none() => continue,
                Err(e) => return Err(e),
            };
            workloads.push(WorkloadMeters {
                cpus: self.cpus(&id),
                name: id.to_string(),
                pid: workload.processes.first().map_or(0, |p| i64::from(p.pid)),
                program: workload.program,
                meters: meters.iter().map(Candidate::of).collect(),
            });
        }
        Ok(Listing {
            schema: SCHEMA,
            workloads,
            workloads_left_out: u32::try_from(left_out).unwrap_or(u32::MAX),
        })
    }

    /// Opens all meters of a workload, reads them once a second for `length`, and judges them as the engine would.
    /// `None`: [`SECONDS_USUAL`], up to [`SECONDS_USUAL_MAX`] while probe sites are searched or too new. `seen` gets
    /// every reading; false ends the test. `classes`: only those. Empty: all but [`MeterClass::Hardware`]. A per-thread
    /// event is loaded at each thread switch, which costs a server that waits several percent (docs/meters.md) and
    /// would spoil the other meters.
    ///
    /// # Errors
    /// The workload has gone.
    pub fn test(
        &mut self,
        id: &WorkloadId,
        classes: &[String],
        length: Option<Nanoseconds>,
        mut seen: impl FnMut(&Test) -> bool,
    ) -> Result<Test, PlatformError> {
        let workload = self.workload(id)?;
        let mut candidates = self.platform.find_meters(id)?;
        candidates.retain(|c| match classes {
            [] => c.class != MeterClass::Hardware,
            some => some.iter().any(|k| k == c.class.as_str()),
        });
        for candidate in candidates.iter_mut().filter(|c| c.refused.is_none()) {
            if let Err(e) = self.platform.open_meter(id, &candidate.id) {
                candidate.refused = Some(e.to_string());
            }
        }
        // Recording spans costs too, and a request for classes wants only them.
        let follows = classes.is_empty();
        self.platform
            .follow_spans(if follows { std::slice::from_ref(id) } else { &[] });
        let mut course = Course {
            tells_runqueue_wait: self.platform.tells_runqueue_wait(),
            ..Course::default()
        };
        if !follows {
            course.spans_unknown =
                Some("not looked at, because certain meters only were asked for".to_owned());
        }
        // This sample takes what came before the meters opened.
        self.sample(id, false)?;
        let begun = self.clock.now();
        let mut next = begun + BEAT;
        let mut go_on = true;
        while go_on {
            let so_far = self.clock.now().saturating_sub(begun);
            let points: Vec<&MeterId> = candidates
                .iter()
                .filter(|c| c.class == MeterClass::Points && c.refused.is_none())
                .map(|c| &c.id)
                .collect();
            for &one in &points {
                if self.platform.meter_story(id, one).is_some() {
                    course.search_ended(one);
                }
            }
            let lost = self.platform.take_lost_meters().into_iter();
            course.lost.extend(lost.map(|l| l.meter));
            if is_over(length, so_far, || points.iter().any(|one| course.waits_for(one))) {
                break;
            }
            while self.clock.now() < next {
                self.clock.sleep(NAP.min(next.saturating_sub(self.clock.now())));
            }
            next += BEAT;
            // A scan finds new processes of the workload.
            let (snapshot, sample) = match self.sample(id, course.readings % 5 == 4) {
                // Keep what was seen in the promised time.
                Err(PlatformError::Vanished { .. })
                    if length.is_none() && so_far >= seconds(SECONDS_USUAL) =>
                {
                    break;
                }
                other => other?,
            };
            course.take(
                &snapshot,
                &sample,
                self.clock.now(),
                self.platform.tells_pressure(),
            );
            course.threads = self.platform.threads_followed(id).or(course.threads);
            go_on = seen(&Test::new(&workload, &candidates, &course, &self.policy));
        }
        for candidate in &candidates {
            self.platform.close_meter(id, &candidate.id);
        }
        self.platform.follow_spans(&[]);
        self.add_findings(id, &mut candidates);
        let mut test = Test::new(&workload, &candidates, &course, &self.policy);
        for (tried, candidate) in test.meters.iter_mut().zip(&candidates) {
            tried.story = self.platform.meter_story(id, &candidate.id);
        }
        Ok(test)
    }

    fn sample(&mut self, id: &WorkloadId, scan: bool) -> Result<(Snapshot, WorkloadSample), PlatformError> {
        let mut snapshot = self.platform.sample(&SampleRequest {
            scan,
            detail: vec![id.clone()],
        })?;
        if let Some(workloads) = snapshot.workloads.take() {
            self.workloads = workloads;
        }
        let own = snapshot.samples.iter().find(|s| s.id == *id).cloned();
        let sample = own.ok_or_else(|| PlatformError::Vanished {
            target: format!("workload {id}"),
        })?;
        Ok((snapshot, sample))
    }
}

#[derive(Debug, Default)]
struct Course {
    readings: u32,
    intervals: Vec<MeterInterval>,
    /// Number of intervals when a search for probe sites had ended.
    searched: BTreeMap<MeterId, usize>,
    lost: BTreeSet<MeterId>,
    ends: Vec<Nanoseconds>,
    /// Watched time, CPU time used, and run-queue wait of its threads.
    time: Nanoseconds,
    cpu: Nanoseconds,
    runqueue_wait: Nanoseconds,
    tells_runqueue_wait: bool,
    /// The same for the machine: time, and waits for CPU, memory, storage. Absent where not reported.
    machine_time: Nanoseconds,
    stalled: [Option<Nanoseconds>; 3],
    spans: SpanBlocks,
    /// CPU time of the workload with recording.
    recorded: Nanoseconds,
    threads: Option<usize>,
    spans_unknown: Option<String>,
}

impl Course {
    fn search_ended(&mut self, id: &MeterId) {
        self.searched.entry(id.clone()).or_insert(self.intervals.len());
    }

    /// Whether probe sites are still searched, or too new to judge.
    fn waits_for(&self, id: &MeterId) -> bool {
        if self.lost.contains(id) {
            return false;
        }
        let Some(ended) = self.searched.get(id) else {
            return true;
        };
        let is_read = |i: &&MeterInterval| i.work.contains_key(id);
        let since = self.intervals.get(*ended..).unwrap_or_default();
        let latest = since.iter().rev().take(READ_WITHIN);
        (since.len() < READ_WITHIN || latest.filter(is_read).count() > 0)
            && since.iter().filter(is_read).count() < homeostat_engine::readings_wanted(lag_of(id, since))
    }

    fn take(
        &mut self,
        snapshot: &Snapshot,
        sample: &WorkloadSample,
        now: Nanoseconds,
        tells_pressure: [bool; 3],
    ) {
        self.readings += 1;
        if sample.interval.0 > 0 && !sample.meters.is_empty() {
            self.intervals.push(MeterInterval::of(sample));
            self.ends.push(now);
        }
        self.time += sample.interval;
        self.cpu += sample.cpu;
        self.runqueue_wait += sample.runqueue_wait;
        self.machine_time += snapshot.interval;
        let stalled = some_stalled(&snapshot.machine);
        for ((sum, told), more) in self.stalled.iter_mut().zip(tells_pressure).zip(stalled) {
            // A sum with a missing part is unknown.
            let before = if self.readings == 1 {
                Some(Nanoseconds::ZERO)
            } else {
                *sum
            };
            *sum = before.filter(|_| told).map(|sum| sum + more);
        }
        match &sample.spans {
            Some(Ok(spans)) => {
                self.spans.add(spans);
                self.recorded += spans.cpu;
                self.spans_unknown = None;
            }
            Some(Err(why)) => self.spans_unknown = Some(why.clone()),
            None => {}
        }
    }

    fn spans(&self) -> Option<Spans> {
        let seen = self.spans.report()?;
        Some(Spans {
            count: seen.count,
            threads: self.threads.unwrap_or(0) as u64,
            recorded: self.recorded.share_of(self.cpu).min(1.0),
            median_s: seen.median.seconds,
            median_noise: seen.median.noise,
            p99_s: seen.p99.seconds,
            p99_noise: seen.p99.noise,
        })
    }

    fn spans_unknown(&self) -> Option<String> {
        if self.spans_unknown.is_some() || self.spans().is_some() {
            return self.spans_unknown.clone();
        }
        let why = if self.recorded.0 > 0 {
            "none of its threads ended a wait and began another in the time that was recorded"
        } else {
            "not known so far: it is looked at first how often its threads wait, in 20 ms of its CPU time"
        };
        Some(why.to_owned())
    }

    fn waits(&self) -> Waits {
        let [cpu, memory, io] = self
            .stalled
            .map(|stalled| stalled.map(|stalled| stalled.share_of(self.machine_time)));
        Waits {
            runqueue_wait: self
                .tells_runqueue_wait
                .then(|| self.runqueue_wait.share_of(self.time)),
            pressure_cpu: cpu,
            pressure_memory: memory,
            pressure_io: io,
        }
    }
}

fn some_stalled(machine: &MachineSample) -> [Nanoseconds; 3] {
    [
        machine.pressure_cpu.some,
        machine.pressure_memory.some,
        machine.pressure_io.some,
    ]
}

impl Observer {
    /// Adds the result of a search that opening a meter began and that has ended.
    fn add_findings(&mut self, id: &WorkloadId, candidates: &mut [MeterCandidate]) {
        let Ok(now) = self.platform.find_meters(id) else {
            return;
        };
        for candidate in candidates.iter_mut().filter(|c| c.class == MeterClass::Points) {
            if let Some(found) = now.iter().find(|n| n.id == candidate.id) {
                candidate.unit.clone_from(&found.unit);
                candidate.cost_per_count = found.cost_per_count;
                candidate.refused = candidate.refused.take().or_else(|| found.refused.clone());
            }
        }
    }
}

/// Whether a test has watched for long enough; `waits`: for probe sites.
fn is_over(length: Option<Nanoseconds>, so_far: Nanoseconds, waits: impl FnOnce() -> bool) -> bool {
    match length {
        Some(length) => so_far >= length,
        None if so_far < seconds(SECONDS_USUAL) => false,
        None => so_far >= seconds(SECONDS_USUAL_MAX) || !waits(),
    }
}

fn seconds(number: u32) -> Nanoseconds {
    Nanoseconds::from_secs(u64::from(number))
}

fn lag_of(meter: &MeterId, intervals: &[MeterInterval]) -> Nanoseconds {
    let lags = intervals.iter().filter_map(|i| i.lags.get(meter));
    lags.max().copied().unwrap_or_default()
}

impl Candidate {
    fn of(c: &MeterCandidate) -> Self {
        Self {
            id: c.id.to_string(),
            class: c.class,
            unit: c.unit.clone(),
            cost_per_count_ns: c.cost_per_count.0,
            refused: c.refused.clone(),
        }
    }
}

/// Why a meter was taken or not; `counted_of`: percentage of the CPU time in which it counted.
fn why(judged: &JudgedMeter, taken: Option<&JudgedMeter>, counted_of: impl Fn(&MeterId) -> f64) -> String {
    if let Some(why) = &judged.refused {
        return why.clone();
    }
    let Some(taken) = taken else {
        return "good, but another is closer to the work or steadier".to_owned();
    };
    if let (Some(by), None, true) = (&judged.vouched_by, &taken.stands_for, judged.chosen) {
        return format!(
            "taken: counted to the last unit; it varies by more than kernel work may, but as much as {by} does, to which it keeps a \
             constant ratio"
        );
    }
    match (&taken.stands_for, judged.chosen) {
        (Some(function), true) => format!(
            "taken: counted to the last unit, and keeps a constant ratio to {function}, which was counted in {:.0} % of the CPU time \
             only",
            counted_of(function)
        ),
        (None, true) => "taken: nothing closer to the work can be counted".to_owned(),
        (Some(function), false) if *function == judged.id => format!(
            "good, but it was counted in {:.0} % of the CPU time only, and {} says the same, counted to the last unit",
            counted_of(function),
            taken.id
        ),
        (Some(function), false) => format!(
            "good, but {function} is closer to the work or steadier, and {} says the same as that",
            taken.id
        ),
        (None, false) => format!("good, but {} is closer to the work or steadier", taken.id),
    }
}

impl Test {
    fn new(workload: &Workload, candidates: &[MeterCandidate], course: &Course, policy: &Policy) -> Self {
        let (intervals, ends) = (&course.intervals, &course.ends);
        let seconds: f64 = intervals.iter().map(|i| i.seconds).sum();
        let judged = judge_meters(candidates, intervals, policy);
        let taken = judged.iter().flatten().find(|j| j.chosen).cloned();
        let counted_of = |id: &MeterId| {
            let found = judged.iter().flatten().find(|j| j.id == *id);
            found.map_or(1.0, |j| j.counted) * 100.0
        };
        let whys: Vec<Option<String>> = judged
            .iter()
            .map(|j| j.as_ref().map(|j| why(j, taken.as_ref(), counted_of)))
            .collect();
        let finite = |x: f64| Some(x).filter(|x| x.is_finite());
        // A late meter needs more.
        let needed = |id: &MeterId| {
            let of = |lag| homeostat_engine::readings_wanted(lag);
            policy.meter_samples_min * of(lag_of(id, intervals)) / of(Nanoseconds::ZERO)
        };
        let meters = candidates
            .iter()
            .zip(&judged)
            .zip(whys)
            .map(|((c, judged), why)| {
                let opened = c.refused.is_none();
                let why =
                    why.unwrap_or_else(|| format!("not judged yet: {} readings are needed", needed(&c.id)));
                let rate = |work: f64| if seconds > 0.0 { work / seconds } else { 0.0 };
                let counted = || {
                    intervals
                        .iter()
                        .filter_map(|i| i.work.get(&c.id).map(|w| w.0))
                        .sum::<f64>()
                };
                let judged = judged.as_ref();
                Tried {
                    id: c.id.to_string(),
                    class: c.class,
                    unit: c.unit.clone(),
                    // A sum of nothing would be -0.
                    rate: opened.then(|| judged.map_or_else(|| rate(counted() + 0.0), |j| j.rate)),
                    noise: judged.and_then(|j| finite(j.noise)),
                    detectable: judged.and_then(|j| finite(j.detectable)),
                    cost: judged.map_or(0.0, |j| j.cost),
                    counted: judged.map_or(1.0, |j| j.counted),
                    lag_s: lag_of(&c.id, intervals).as_secs_f64(),
                    taken: judged.is_some_and(|j| j.chosen),
                    why,
                    story: None,
                    readings: readings(&c.id, intervals, ends),
                }
            })
            .collect();
        Self {
            schema: SCHEMA,
            name: workload.id.to_string(),
            program: workload.program.clone(),
            pid: workload.processes.first().map_or(0, |p| i64::from(p.pid)),
            seconds: course.time.as_secs_f64(),
            cpus: course.cpu.share_of(course.time),
            meters,
            spans: course.spans(),
            spans_unknown: course.spans_unknown(),
            waits: course.waits(),
        }
    }
}

fn readings(id: &MeterId, intervals: &[MeterInterval], ends: &[Nanoseconds]) -> Vec<Reading> {
    intervals
        .iter()
        .zip(ends)
        .filter_map(|(interval, end)| {
            let (work, seconds) = *interval.work.get(id)?;
            Some(Reading {
                at_s: end.as_secs_f64(),
                work,
                seconds,
                cpu_s: interval.cpu,
            })
        })
        .collect()
}

impl std::fmt::Debug for Observer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Observer")
            .field("workloads", &self.workloads.len())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use homeostat_model::{MeterReading, Pressure, SpanHistogram};

    fn sample(meters: &[(&str, f64)], spans: Option<Result<u64, String>>) -> WorkloadSample {
        let json = serde_json::json!({
            "id": "server", "interval": 1_000_000_000, "age": 0, "processes": 1, "threads": 2,
            "cpu": 800_000_000, "cpu_busiest": 800_000_000, "runqueue_wait": 250_000_000,
            "faults_minor": 0, "faults_major": 0, "churn": 0, "resident": 0, "anonymous": 0, "shared": 0, "meters": [],
        });
        let mut sample: WorkloadSample = serde_json::from_value(json).unwrap();
        sample.meters = meters
            .iter()
            .map(|(id, work)| MeterReading {
                meter: (*id).into(),
                work: *work,
                interval: Nanoseconds::from_secs(1),
                counted: 1.0,
                lag: Nanoseconds::ZERO,
            })
            .collect();
        sample.spans = spans.map(|told| {
            told.map(|count| {
                let mut histogram = SpanHistogram::default();
                (0..count).for_each(|_| histogram.add(50_000));
                homeostat_model::Spans::of(&histogram, Nanoseconds::from_millis(200))
            })
        });
        sample
    }

    fn snapshot() -> Snapshot {
        let stalled = |ms| Pressure {
            some: Nanoseconds::from_millis(ms),
            full: Nanoseconds::ZERO,
        };
        Snapshot {
            at: Nanoseconds::ZERO,
            unix_seconds: 0,
            interval: Nanoseconds::from_secs(1),
            machine: MachineSample {
                pressure_cpu: stalled(120),
                pressure_memory: stalled(0),
                pressure_io: stalled(30),
                ..MachineSample::default()
            },
            workloads: None,
            samples: Vec::new(),
            own_cpu: Nanoseconds::ZERO,
            own_resident: homeostat_model::Bytes::ZERO,
            canary: None,
        }
    }

    #[test]
    fn what_the_configuration_names_is_told_beside_what_is_known() {
        let counts = |meter: &str, unit: Option<&str>| ConfiguredMeter {
            meter: meter.to_owned(),
            unit: unit.map(str::to_owned),
        };
        let settings = MeterSettings {
            configured: [
                (
                    "shop*".to_owned(),
                    vec![counts("a", Some("order")), counts("b", None)],
                ),
                ("web".to_owned(), vec![counts("a", None)]),
            ]
            .into(),
            ..MeterSettings::default()
        };
        let known = known(&settings);
        let rows: Vec<(&str, &str, Option<&str>)> = known
            .configured
            .iter()
            .map(|row| (row.workload.as_str(), row.meter.as_str(), row.unit.as_deref()))
            .collect();
        let expected = [
            ("shop*", "a", Some("order")),
            ("shop*", "b", None),
            ("web", "a", None),
        ];
        assert_eq!(rows, expected);
        assert!(!known.meters.is_empty());
    }

    #[test]
    fn a_test_goes_on_for_points_only_where_nobody_said_how_long() {
        let over = |length, so_far, waits| is_over(length, seconds(so_far), || waits);
        for waits in [false, true] {
            assert!(!over(Some(seconds(60)), 59, waits) && over(Some(seconds(60)), 60, waits));
            assert!(!over(None, SECONDS_USUAL - 1, waits));
            assert_eq!(over(None, SECONDS_USUAL, waits), !waits);
            assert!(over(None, SECONDS_USUAL_MAX, waits));
        }
    }

    #[test]
    fn points_are_waited_for_until_they_were_read_for_long_enough_or_are_not() {
        let points = MeterId::from("points");
        let (read, unread) = (
            sample(&[("points", 3.0)], None),
            sample(&[("io.bytes", 5.0)], None),
        );
        let mut seen = course(&vec![unread.clone(); 40], [true; 3]);
        assert!(seen.waits_for(&points), "they are looked for");
        seen.search_ended(&points);
        assert!(seen.waits_for(&points), "they may be about to be read");
        let mut more = |sample: &WorkloadSample, times: usize| {
            for _ in 0..times {
                seen.take(&snapshot(), sample, Nanoseconds::ZERO, [true; 3]);
                seen.search_ended(&points);
            }
            seen.waits_for(&points)
        };
        assert!(more(&unread, 3));
        assert!(more(
            &read,
            homeostat_engine::readings_wanted(Nanoseconds::ZERO) - 1
        ));
        assert!(more(&unread, READ_WITHIN - 1), "they pause");
        assert!(!more(&unread, 1), "they are lost");
        assert!(!more(&read, 1), "that was long enough");
    }

    #[test]
    fn a_search_that_found_nothing_is_not_waited_for() {
        let points = MeterId::from("points");
        let mut seen = course(&[], [true; 3]);
        seen.search_ended(&points);
        for _ in 0..READ_WITHIN {
            assert!(seen.waits_for(&points));
            seen.take(
                &snapshot(),
                &sample(&[("io.bytes", 5.0)], None),
                Nanoseconds::ZERO,
                [true; 3],
            );
        }
        assert!(!seen.waits_for(&points));
        let mut called_off = Course::default();
        assert!(called_off.waits_for(&points));
        called_off.lost.insert(points.clone());
        assert!(!called_off.waits_for(&points));
    }

    fn course(samples: &[WorkloadSample], pressure: [bool; 3]) -> Course {
        let mut course = Course {
            tells_runqueue_wait: true,
            ..Course::default()
        };
        for sample in samples {
            course.take(&snapshot(), sample, Nanoseconds::ZERO, pressure);
        }
        course
    }

    #[test]
    fn what_the_kernel_does_not_tell_is_absent_and_not_zero() {
        let samples = vec![sample(&[], None); 4];
        let all = course(&samples, [true; 3]).waits();
        assert_eq!(
            all,
            Waits {
                runqueue_wait: Some(0.25),
                pressure_cpu: Some(0.12),
                pressure_memory: Some(0.0),
                pressure_io: Some(0.03),
            }
        );
        let mut without = course(&samples, [false, true, false]);
        without.tells_runqueue_wait = false;
        assert_eq!(
            without.waits(),
            Waits {
                pressure_memory: Some(0.0),
                ..Waits::default()
            }
        );
        // It cannot be told of a part of the time either.
        without.take(&snapshot(), &samples[0], Nanoseconds::ZERO, [true; 3]);
        assert_eq!(without.waits().pressure_cpu, None);
    }

    #[test]
    fn spans_tell_in_what_share_of_the_cpu_time_they_were_recorded() {
        let (looked, told) = (sample(&[], None), sample(&[], Some(Ok(300))));
        let early = course(std::slice::from_ref(&looked), [true; 3]);
        assert_eq!(early.spans(), None);
        assert!(early.spans_unknown().unwrap().contains("first"));
        let later = course(&[looked, told.clone(), told.clone(), told.clone()], [true; 3]);
        let spans = later.spans().unwrap();
        // 0.2 s of 0.8 s, in three of four readings.
        assert_eq!(spans.count, 900);
        assert!((spans.recorded - 0.1875).abs() < 1e-9, "{spans:?}");
        assert_eq!(later.spans_unknown(), None);
        // What was given up in the course of it keeps what was seen.
        let dear = course(&[told, sample(&[], Some(Err("too dear".into())))], [true; 3]);
        assert!(dear.spans().is_some());
        assert_eq!(dear.spans_unknown().as_deref(), Some("too dear"));
        let never = course(&[sample(&[], Some(Ok(0)))], [true; 3]);
        assert_eq!(never.spans(), None);
        assert!(never.spans_unknown().unwrap().starts_with("none of its threads"));
    }
}
