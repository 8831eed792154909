//! Meters for people: which could count the work of a workload, and how good each is, tried out live. The stable JSON
//! shapes of `homeostat meter`, and the observer that fills them without a daemon. The same rules as in [`crate::api`]
//! hold.

use crate::api::{Found, SCHEMA, find_named};
use homeostat_engine::{MeterInterval, Policy, judge_meters};
pub use homeostat_linux::meters::{Mended, end, mend, write_breakpoints_down_in};
use homeostat_linux::meters::{MeterSettings, known_meters};
use homeostat_linux::{LinuxPlatform, MonotonicClock, Root};
use homeostat_model::{
    MeterCandidate, MeterClass, MeterId, Nanoseconds, Workload, WorkloadId, WorkloadSample,
};
use homeostat_platform::{Clock, PlatformError, SampleRequest, Sensors};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Workloads that are listed when nobody asks for one: the largest users of CPU.
pub const SHOWN: usize = 12;
/// Seconds that a meter has to be watched at least before it can be judged.
pub const SECONDS_MIN: u32 = 14;
/// Time between the two scans that tell who is busy.
const RANKING: Nanoseconds = Nanoseconds::from_millis(300);
/// Time between two readings.
const BEAT: Nanoseconds = Nanoseconds::from_secs(1);
/// How often it is asked whether to go on.
const NAP: Nanoseconds = Nanoseconds::from_millis(100);

/// The classes of meters, those closest to the work first.
pub const CLASSES: [&str; 5] = ["application", "probe", "kernel", "points", "hardware"];

/// What counts the work of programs that are known (`homeostat meter known --json`).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Known {
    /// Version of these shapes.
    pub schema: u32,
    /// The table.
    pub meters: Vec<KnownMeter>,
}

/// A meter of a program that is known.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KnownMeter {
    /// Names of the program: process or executable file.
    pub programs: Vec<String>,
    /// Name of the meter.
    pub meter: String,
    /// What one count is.
    pub unit: String,
    /// What counting costs the program.
    pub cost: String,
    /// When it counts, and what it needs.
    pub remark: String,
}

/// The table of what is known.
pub fn known() -> Known {
    Known {
        schema: SCHEMA,
        meters: known_meters()
            .into_iter()
            .map(|m| KnownMeter {
                programs: m.programs.iter().map(|p| (*p).to_owned()).collect(),
                meter: m.meter,
                unit: m.unit.to_owned(),
                cost: m.cost.to_owned(),
                remark: m.remark.to_owned(),
            })
            .collect(),
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
    pub class: String,
    /// What one count is.
    pub unit: String,
    /// Cost to the workload of one count in nanoseconds; 0 = reading costs the workload nothing.
    pub cost_per_count_ns: u64,
    /// Why it can not be used, with the remedy; absent when it can.
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
    /// How long its threads run from the end of a wait to the next wait; absent when that was not looked at, cannot be seen,
    /// or they never waited.
    pub spans: Option<Spans>,
}

/// Spans of a workload's threads from the moment at which they begin to run after a wait to their next wait: in a server the
/// time that a request is worked at.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Spans {
    /// How many were seen.
    pub count: u64,
    /// Threads that were followed.
    pub threads: u64,
    /// Half of the spans are shorter (seconds).
    pub median_s: f64,
    /// Standard deviation of that over blocks of the time, as a share; absent when there were too few spans.
    pub median_noise: Option<f64>,
    /// 99 of 100 spans are shorter (seconds).
    pub p99_s: f64,
    /// Standard deviation of that over blocks of the time, as a share; absent when there were too few spans.
    pub p99_noise: Option<f64>,
}

/// A meter that was tried.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Tried {
    /// Name.
    pub id: String,
    /// `application`, `probe`, `kernel`, `points` or `hardware`.
    pub class: String,
    /// What one count is.
    pub unit: String,
    /// Counts per second; absent when it was not opened.
    pub rate: Option<f64>,
    /// Coefficient of variation of work per CPU second over blocks of four seconds; absent when not known.
    pub noise: Option<f64>,
    /// Smallest effect that a trial of 20 minutes could prove with it, as a share of the work; absent when not known.
    pub detectable: Option<f64>,
    /// Share of the workload's CPU time that counting costs.
    pub cost: f64,
    /// Share of its CPU time in which it was really counted, 0 to 1; the rest is estimated from it. 1: counted all the time.
    pub counted: f64,
    /// Whether it is the one that homeostat would use.
    pub taken: bool,
    /// Why it was taken or not.
    pub why: String,
    /// How it was found, where that took a search.
    pub story: Option<String>,
    /// What was read, in order; empty when it was not opened.
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

/// A workload that was asked for, or why it is not there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Choice {
    /// There it is.
    One(WorkloadId),
    /// There is none, but these have similar names.
    Near(Vec<String>),
    /// It could be any of these.
    Several(Vec<String>),
}

/// Looks at meters without a daemon. What it opens is closed when it is dropped.
pub struct Observer {
    platform: LinuxPlatform,
    clock: MonotonicClock,
    workloads: Vec<Workload>,
    samples: BTreeMap<WorkloadId, WorkloadSample>,
}

impl Observer {
    /// Finds the workloads of this machine.
    ///
    /// # Errors
    /// Its processes can not be listed.
    pub fn begin(settings: &MeterSettings) -> Result<Self, PlatformError> {
        let mut observer = Self {
            platform: LinuxPlatform::with_meters(Root::default(), settings),
            clock: MonotonicClock,
            workloads: Vec::new(),
            samples: BTreeMap::new(),
        };
        observer.scan()?;
        // Who is busy is known from the second scan on.
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
    pub fn find(&self, name: &str) -> Choice {
        match find_named(&self.workloads, name) {
            Found::One(w) => Choice::One(w.id.clone()),
            Found::Near(near) => Choice::Near(near),
            Found::Several(several) => Choice::Several(several),
        }
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
        self.samples.get(id).map_or(0.0, |s| {
            let seconds = s.interval.as_secs_f64();
            if seconds > 0.0 {
                s.cpu.as_secs_f64() / seconds
            } else {
                0.0
            }
        })
    }

    /// Which meters could count the work of one workload, or of the busiest. Nothing is opened.
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
                // One of many may end while we look.
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

    /// Opens all meters of a workload, reads them once a second, and judges them as the engine would. `seen` is told
    /// of every reading; false ends it early. `classes`: only those, unless it is empty.
    ///
    /// # Errors
    /// The workload has gone.
    pub fn test(
        &mut self,
        id: &WorkloadId,
        classes: &[String],
        length: Nanoseconds,
        mut seen: impl FnMut(&Test) -> bool,
    ) -> Result<Test, PlatformError> {
        let workload = self.workload(id)?;
        let mut candidates = self.platform.find_meters(id)?;
        candidates.retain(|c| classes.is_empty() || classes.iter().any(|k| k == class(c.class)));
        for candidate in candidates.iter_mut().filter(|c| c.refused.is_none()) {
            if let Err(e) = self.platform.open_meter(id, &candidate.id) {
                candidate.refused = Some(e.to_string());
            }
        }
        // Without it the meters are shown all the same.
        let mut spans = classes
            .is_empty()
            .then(|| homeostat_linux::meters::Spans::open(&Root::default(), &workload).ok())
            .flatten();
        let mut intervals: Vec<MeterInterval> = Vec::new();
        let mut ends: Vec<Nanoseconds> = Vec::new();
        let begun = self.clock.now();
        let mut next = begun + BEAT;
        let mut go_on = true;
        while go_on && self.clock.now().saturating_sub(begun) < length {
            while self.clock.now() < next {
                self.clock.sleep(NAP.min(next.saturating_sub(self.clock.now())));
            }
            next += BEAT;
            let snapshot = self.platform.sample(&SampleRequest {
                // New processes of the workload are found by a scan.
                scan: intervals.len() % 5 == 4,
                detail: vec![id.clone()],
            })?;
            if let Some(workloads) = snapshot.workloads {
                self.workloads = workloads;
            }
            let Some(sample) = snapshot.samples.into_iter().find(|s| s.id == *id) else {
                return Err(PlatformError::Vanished {
                    target: format!("workload {id}"),
                });
            };
            // The first sample spans the time before the meters were open.
            if sample.interval.0 > 0 && !sample.meters.is_empty() {
                intervals.push(interval(&sample));
                ends.push(self.clock.now());
            }
            if let Some(spans) = &mut spans {
                spans.read();
            }
            let mut test = Test::new(&workload, &candidates, &intervals, &ends);
            test.spans = spans.as_ref().and_then(Spans::of);
            go_on = seen(&test);
        }
        for candidate in &candidates {
            self.platform.close_meter(id, &candidate.id);
        }
        self.add_findings(id, &mut candidates);
        let mut test = Test::new(&workload, &candidates, &intervals, &ends);
        test.spans = spans.as_ref().and_then(Spans::of);
        for (tried, candidate) in test.meters.iter_mut().zip(&candidates) {
            tried.story = self.platform.meter_story(id, &candidate.id);
        }
        Ok(test)
    }
}

impl Observer {
    /// A search that opening a meter began has ended meanwhile: what it found, or why it found nothing.
    fn add_findings(&mut self, id: &WorkloadId, candidates: &mut [MeterCandidate]) {
        let Ok(now) = self.platform.find_meters(id) else {
            return;
        };
        for candidate in candidates.iter_mut().filter(|c| c.class == MeterClass::Points) {
            if let Some(found) = now.iter().find(|n| n.id == candidate.id) {
                candidate.unit.clone_from(&found.unit);
                candidate.refused = candidate.refused.take().or_else(|| found.refused.clone());
            }
        }
    }
}

fn interval(sample: &WorkloadSample) -> MeterInterval {
    MeterInterval {
        seconds: sample.interval.as_secs_f64(),
        cpu: sample.cpu.as_secs_f64(),
        work: sample
            .meters
            .iter()
            .filter(|m| m.interval.0 > 0 && m.work.is_finite() && m.work >= 0.0)
            .map(|m| (m.meter.clone(), (m.work, m.interval.as_secs_f64())))
            .collect(),
        counted: sample
            .meters
            .iter()
            .filter(|m| m.counted < 1.0)
            .map(|m| (m.meter.clone(), m.counted.max(0.0)))
            .collect(),
    }
}

fn class(class: MeterClass) -> &'static str {
    match class {
        MeterClass::Application => "application",
        MeterClass::Probe => "probe",
        MeterClass::Kernel => "kernel",
        MeterClass::Points => "points",
        MeterClass::Hardware => "hardware",
    }
}

impl Spans {
    fn of(spans: &homeostat_linux::meters::Spans) -> Option<Self> {
        let seen = spans.report()?;
        Some(Self {
            count: seen.count,
            threads: seen.threads as u64,
            median_s: seen.median.seconds,
            median_noise: seen.median.noise,
            p99_s: seen.p99.seconds,
            p99_noise: seen.p99.noise,
        })
    }
}

impl Candidate {
    fn of(c: &MeterCandidate) -> Self {
        Self {
            id: c.id.to_string(),
            class: class(c.class).to_owned(),
            unit: c.unit.clone(),
            cost_per_count_ns: c.cost_per_count.0,
            refused: c.refused.clone(),
        }
    }
}

impl Test {
    fn new(
        workload: &Workload,
        candidates: &[MeterCandidate],
        intervals: &[MeterInterval],
        ends: &[Nanoseconds],
    ) -> Self {
        let policy = Policy::default();
        let seconds: f64 = intervals.iter().map(|i| i.seconds).sum();
        let cpu: f64 = intervals.iter().map(|i| i.cpu).sum();
        let judged = judge_meters(candidates, intervals, &policy);
        let taken = judged.iter().flatten().find(|j| j.chosen).map(|j| j.id.clone());
        let finite = |x: f64| Some(x).filter(|x| x.is_finite());
        let meters = candidates
            .iter()
            .zip(judged)
            .map(|(c, judged)| {
                let opened = c.refused.is_none();
                let why = match &judged {
                    None => format!("not judged yet: {} readings are needed", policy.meter_samples_min),
                    Some(j) => match &j.refused {
                        Some(why) => why.clone(),
                        None if j.chosen => "taken: nothing closer to the work can be counted".to_owned(),
                        None => format!(
                            "good, but {} is closer to the work or steadier",
                            taken.as_ref().map_or("another", |t| t.as_str())
                        ),
                    },
                };
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
                    class: class(c.class).to_owned(),
                    unit: c.unit.clone(),
                    // A sum of nothing would be -0.
                    rate: opened.then(|| judged.map_or_else(|| rate(counted() + 0.0), |j| j.rate)),
                    noise: judged.and_then(|j| finite(j.noise)),
                    detectable: judged.and_then(|j| finite(j.detectable)),
                    cost: judged.map_or(0.0, |j| j.cost),
                    counted: judged.map_or(1.0, |j| j.counted),
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
            seconds,
            cpus: if seconds > 0.0 { cpu / seconds } else { 0.0 },
            meters,
            spans: None,
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
