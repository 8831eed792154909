//! Programs: processes, threads, memory, load over time, and visibility, all from a scenario file. The *profile*
//! (`profiles`) says what a program does on the processor. [`Load`], [`Modulation`] and [`Phase`]s say what it does
//! over time.

use crate::noise::{Draws, NoiseSpec};
use homeostat_model::MeterClass;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

const INSTANCES_MAX: u32 = 10_000;
const PROCESSES_MAX: u32 = 4096;

/// The load that drives a program.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "arrival", rename_all = "kebab-case", deny_unknown_fields)]
pub enum Load {
    /// A fixed number of customers; each sends its next request after the last is done and a think time.
    Closed {
        /// Mean number of threads with work, when nothing is thought about. Default: all threads.
        #[serde(default)]
        customers: Option<f64>,
        /// Time of a customer between requests outside this program's CPU (disk, network), ms. Default: by `cpu_share`.
        #[serde(default)]
        think_ms: Option<f64>,
        /// CPU share of the response time at the start, before any change: sets the think time. Default: the profile's.
        #[serde(default)]
        cpu_share: Option<f64>,
    },
    /// Requests arrive at a rate that does not care how fast the program is.
    Open {
        /// Requests per second.
        #[serde(default)]
        per_s: Option<f64>,
        /// Mean number of busy threads at the start, before any change: sets the rate.
        #[serde(default)]
        busy: Option<f64>,
    },
}

impl Default for Load {
    fn default() -> Self {
        Self::Closed {
            customers: None,
            think_ms: None,
            cpu_share: None,
        }
    }
}

/// How the load changes over time: a factor on the rate (open) or on the customers (closed).
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(tag = "shape", rename_all = "kebab-case", deny_unknown_fields)]
pub enum Modulation {
    /// Always the same.
    #[default]
    Steady,
    /// Rises and falls once per period, between `low` and 1.
    Diurnal {
        /// Factor at the lowest point, 0..1.
        low: f64,
        /// Length of a period in seconds.
        period_s: f64,
    },
    /// Full for a while, then low for a while; lengths are drawn.
    Bursty {
        /// Factor between bursts, 0..1.
        low: f64,
        /// Mean length of a burst in seconds.
        on_s: f64,
        /// Mean time between bursts in seconds.
        off_s: f64,
    },
}

impl Modulation {
    /// The factor at a time, and its next change (seconds; infinite = never). `draws` name the lengths of bursts.
    /// `cursor` remembers the reached burst, to keep long runs cheap.
    pub(crate) fn at(&self, now_s: f64, draws: &Draws, cursor: &mut BurstCursor) -> (f64, f64) {
        match *self {
            Self::Steady => (1.0, f64::INFINITY),
            Self::Diurnal { low, period_s } => {
                let step = period_s / DIURNAL_STEPS;
                let index = (now_s / step + 1e-9).floor();
                let turn = (index + 0.5) / DIURNAL_STEPS;
                let height = 0.5 - 0.5 * (std::f64::consts::TAU * turn).cos();
                (low + (1.0 - low) * height, (index + 1.0) * step)
            }
            Self::Bursty { low, on_s, off_s } => {
                while cursor.until_s <= now_s {
                    let mean = if cursor.index % 2 == 0 { on_s } else { off_s };
                    // Exponential, but within bounds.
                    let length = -draws.uniform(cursor.index).ln() * mean;
                    cursor.until_s += length.clamp(mean * 0.1, mean * 5.0);
                    cursor.index += 1;
                }
                (if cursor.index % 2 == 1 { 1.0 } else { low }, cursor.until_s)
            }
        }
    }
}

/// Steps of constant load in a day.
const DIURNAL_STEPS: f64 = 48.0;

#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct BurstCursor {
    index: u64,
    until_s: f64,
}

/// A change of behaviour at a time after the start of the program.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Phase {
    /// Seconds after the start of the program.
    pub after_s: f64,
    /// Name of the profile from then on; absent = as before.
    #[serde(default)]
    pub profile: Option<String>,
    /// Factor on the load from then on; absent = as before.
    #[serde(default)]
    pub load: Option<f64>,
}

/// A stream of short processes (shell scripts, compilers, SDET).
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Churn {
    /// How long one process lives, in seconds.
    pub life_s: f64,
}

/// One way to count the work of a program.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MeterSpec {
    /// Name, such as `progress` or `io.write_calls`.
    pub id: String,
    /// Kind.
    pub class: MeterClass,
    /// The unit of one count.
    #[serde(default = "operation")]
    pub unit: String,
    /// Counts per unit of work.
    #[serde(default = "one")]
    pub per_unit: f64,
    /// Noise of a reading, relative, for one second; falls with the root of the interval.
    #[serde(default)]
    pub cv: f64,
    /// Relative wandering of the count from the work: a slow error that no averaging removes, 0..0.5.
    #[serde(default)]
    pub bias: f64,
    /// Cost to the program of one count in nanoseconds.
    #[serde(default)]
    pub cost_ns: u64,
    /// Why it cannot be used; absent when it can.
    #[serde(default)]
    pub refused: Option<String>,
}

fn operation() -> String {
    "operation".into()
}
fn one() -> f64 {
    1.0
}

impl MeterSpec {
    fn new(id: &str, class: MeterClass, per_unit: f64, cv: f64) -> Self {
        Self {
            id: id.into(),
            class,
            unit: operation(),
            per_unit,
            cv,
            bias: 0.0,
            cost_ns: 0,
            refused: None,
        }
    }
    /// The usual meters: a counter of the program, and kernel work of two kinds that follows it.
    pub fn usual() -> Vec<Self> {
        vec![
            Self::new("progress", MeterClass::Application, 1.0, 0.002),
            Self::new("io.write_calls", MeterClass::Kernel, 1000.0, 0.02),
            Self::new("switches.voluntary", MeterClass::Kernel, 2000.0, 0.03),
        ]
    }
}

/// The choice of a program's owner.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Choice {
    /// Leave it alone.
    pub never: bool,
    /// Skip the age and size floors.
    pub always: bool,
    /// Strategy id to on/off.
    pub strategies: BTreeMap<String, bool>,
    /// CPUs to which the person bound its threads.
    pub cpus: Option<Vec<u32>>,
    /// Nodes to which the person bound its memory.
    pub nodes: Option<Vec<u32>>,
}

/// A program, or several of the same kind.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ProgramSpec {
    /// Name of the workload, or `NAME-1`, `NAME-2`, … with several instances.
    pub name: String,
    /// Name of the profile.
    pub profile: String,
    /// The unit of its work.
    pub unit: String,
    /// Workloads of this kind, 1..=10,000.
    pub instances: u32,
    /// Processes of each, 1..=4096.
    pub processes: u32,
    /// Threads of each process. One thread each and shared memory = a process-based program.
    pub threads: u32,
    /// Private memory of each process in MiB.
    pub private_mib: u64,
    /// Memory shared by the processes of an instance in MiB.
    pub shared_mib: u64,
    /// Share of the memory by node without any change. Empty: where the threads run (first touch).
    pub memory_on: Vec<f64>,
    /// How uneven the accesses to memory are: 1 = uniform, 3 = skewed.
    pub skew: f64,
    /// Share of the pieces of memory with holes, 0..1.
    pub sparse: f64,
    /// Share of the memory that is on large pages from the start, 0..1.
    pub large: f64,
    /// Share of unrestricted threads by chip, for a machine that did not spread evenly. Empty: by the scheduler.
    pub threads_on: Vec<f64>,
    /// Its load.
    pub load: Load,
    /// How the load changes.
    pub modulation: Modulation,
    /// Instructions for one unit of work; absent = the profile's.
    pub instructions_per_unit: Option<f64>,
    /// Start in seconds.
    pub start_s: f64,
    /// How old it is when it starts, in seconds.
    pub age_s: f64,
    /// End in seconds; absent = never.
    pub end_s: Option<f64>,
    /// Seconds between restarts; absent = never.
    pub restart_every_s: Option<f64>,
    /// Changes of behaviour.
    pub phases: Vec<Phase>,
    /// Short-lived processes instead of lasting ones.
    pub churn: Option<Churn>,
    /// How its work can be counted.
    pub meters: Vec<MeterSpec>,
    /// Noise of its speed.
    pub noise: NoiseSpec,
    /// Noise of what is offered to it (open load).
    pub arrival_noise: NoiseSpec,
    /// The owner's choice.
    pub choice: Choice,
}

impl Default for ProgramSpec {
    fn default() -> Self {
        Self {
            name: String::new(),
            profile: String::new(),
            unit: operation(),
            instances: 1,
            processes: 1,
            threads: 1,
            private_mib: 0,
            shared_mib: 0,
            memory_on: Vec::new(),
            skew: 1.0,
            sparse: 0.0,
            large: 0.0,
            threads_on: Vec::new(),
            load: Load::default(),
            modulation: Modulation::Steady,
            instructions_per_unit: None,
            start_s: 0.0,
            age_s: 0.0,
            end_s: None,
            restart_every_s: None,
            phases: Vec::new(),
            churn: None,
            meters: MeterSpec::usual(),
            noise: NoiseSpec::default(),
            arrival_noise: NoiseSpec::QUIET,
            choice: Choice::default(),
        }
    }
}

impl ProgramSpec {
    /// Faults, each with name, value and range.
    pub fn complaints(&self) -> Vec<String> {
        let mut wrong = Vec::new();
        let mut range = |name: &str, value: f64, low: f64, high: f64| {
            if !(value >= low && value <= high) {
                wrong.push(format!("{name} = {value}: must be between {low} and {high}"));
            }
        };
        range(
            "instances",
            f64::from(self.instances),
            1.0,
            f64::from(INSTANCES_MAX),
        );
        range(
            "processes",
            f64::from(self.processes),
            1.0,
            f64::from(PROCESSES_MAX),
        );
        range("threads", f64::from(self.threads), 1.0, 65_536.0);
        range("private_mib", self.private_mib as f64, 0.0, 4e6);
        range("shared_mib", self.shared_mib as f64, 0.0, 4e6);
        range("skew", self.skew, 1.0, 10.0);
        range("sparse", self.sparse, 0.0, 1.0);
        range("large", self.large, 0.0, 1.0);
        range("start_s", self.start_s, 0.0, 1e9);
        range("age_s", self.age_s, 0.0, 1e9);
        for share in self.memory_on.iter().chain(&self.threads_on) {
            range("memory_on, threads_on", *share, 0.0, 1e9);
        }
        if let Some(end) = self.end_s {
            range("end_s", end, self.start_s, 1e9);
        }
        if let Some(every) = self.restart_every_s {
            range("restart_every_s", every, 1.0, 1e9);
        }
        if let Some(instructions) = self.instructions_per_unit {
            range("instructions_per_unit", instructions, 1.0, 1e18);
        }
        if let Some(churn) = self.churn {
            range("churn.life_s", churn.life_s, 0.001, 60.0);
        }
        match self.load {
            Load::Closed {
                customers,
                think_ms,
                cpu_share,
            } => {
                range("load.customers", customers.unwrap_or(1.0), 0.0, 1e6);
                range("load.think_ms", think_ms.unwrap_or(0.0), 0.0, 1e9);
                range("load.cpu_share", cpu_share.unwrap_or(1.0), 0.001, 1.0);
            }
            Load::Open { per_s, busy } => {
                range("load.per_s", per_s.unwrap_or(0.0), 0.0, 1e12);
                range("load.busy", busy.unwrap_or(0.0), 0.0, 1e6);
            }
        }
        match self.modulation {
            Modulation::Steady => {}
            Modulation::Diurnal { low, period_s } => {
                range("modulation.low", low, 0.0, 1.0);
                range("modulation.period_s", period_s, 60.0, 1e9);
            }
            Modulation::Bursty { low, on_s, off_s } => {
                range("modulation.low", low, 0.0, 1.0);
                range("modulation.on_s", on_s, 0.1, 1e9);
                range("modulation.off_s", off_s, 0.1, 1e9);
            }
        }
        for phase in &self.phases {
            range("phases.after_s", phase.after_s, 0.0, 1e9);
            range("phases.load", phase.load.unwrap_or(1.0), 0.0, 1e6);
        }
        for meter in &self.meters {
            range("meters.per_unit", meter.per_unit, 0.0, 1e15);
            range("meters.cv", meter.cv, 0.0, 10.0);
            range("meters.bias", meter.bias, 0.0, 0.5);
        }
        if let Load::Open { per_s, busy } = self.load {
            if per_s.is_some() == busy.is_some() {
                wrong.push("load: an open load needs either per_s or busy".into());
            }
        }
        if self.name.is_empty() || self.name.contains(char::is_whitespace) {
            wrong.push(format!("name = {:?}: a name without spaces is needed", self.name));
        }
        wrong.extend(self.noise.complaints());
        wrong.extend(self.arrival_noise.complaints());
        wrong
            .iter()
            .map(|w| format!("program {}: {w}", self.name))
            .collect()
    }

    /// Names of its workloads.
    pub fn workloads(&self) -> Vec<String> {
        if self.instances == 1 {
            vec![self.name.clone()]
        } else {
            (1..=self.instances)
                .map(|i| format!("{}-{i}", self.name))
                .collect()
        }
    }
}

/// Response times of a stretch of steady load: an M/M/c queue of requests.
///
/// A request waits with probability `waits` for an exponential time, then an exponential service follows (Kleinrock,
/// *Queueing Systems* I, §3.5). The probability follows from Sakasegawa's approximation of the mean wait (1977).
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Response {
    /// Mean time of service in seconds.
    pub service_s: f64,
    /// Probability that a request waits.
    pub waits: f64,
    /// Mean wait of those that wait, in seconds.
    pub wait_s: f64,
}

impl Response {
    /// For an open load that keeps `servers` threads busy for the share `used` of their time (0..1).
    pub fn open(service_s: f64, servers: f64, used: f64) -> Self {
        let c = servers.max(1.0);
        let rho = used.clamp(0.0, 0.999);
        let mean_wait = service_s * rho.powf((2.0 * (c + 1.0)).sqrt() - 1.0) / (c * (1.0 - rho));
        // Waiting requests wait service / (c (1 - rho)) on average.
        let wait_s = service_s / (c * (1.0 - rho));
        Self {
            service_s,
            waits: if wait_s > 0.0 {
                (mean_wait / wait_s).clamp(0.0, 1.0)
            } else {
                0.0
            },
            wait_s,
        }
    }

    /// For a closed load: the customers wait for each other.
    pub fn closed(service_s: f64, queued_s: f64) -> Self {
        Self {
            service_s,
            waits: if queued_s > 0.0 { 1.0 } else { 0.0 },
            wait_s: queued_s.max(0.0),
        }
    }

    /// Mean in seconds.
    pub fn mean_s(&self) -> f64 {
        self.service_s + self.waits * self.wait_s
    }

    /// Share of the requests done within this time.
    pub fn within(&self, seconds: f64) -> f64 {
        let (s, w) = (self.service_s.max(1e-15), self.wait_s);
        let served = 1.0 - (-seconds / s).exp();
        if self.waits <= 0.0 || w <= 0.0 {
            return served;
        }
        let both = if (s - w).abs() < 1e-6 * s {
            1.0 - (1.0 + seconds / s) * (-seconds / s).exp()
        } else {
            1.0 - (s * (-seconds / s).exp() - w * (-seconds / w).exp()) / (s - w)
        };
        ((1.0 - self.waits) * served + self.waits * both).clamp(0.0, 1.0)
    }
}

/// Response times of a program over a time: a histogram with 12 classes per decade from 1 µs to 1000 s.
#[derive(Clone, Debug, PartialEq)]
pub struct ResponseTimes {
    counts: Vec<f64>,
    sum_s: f64,
}

const CLASSES_PER_DECADE: f64 = 12.0;
const CLASSES: usize = 109;
const SHORTEST_S: f64 = 1e-6;

impl Default for ResponseTimes {
    fn default() -> Self {
        Self {
            counts: vec![0.0; CLASSES],
            sum_s: 0.0,
        }
    }
}

impl ResponseTimes {
    /// Adds requests with these response times.
    pub fn add(&mut self, requests: f64, response: &Response) {
        if requests <= 0.0 {
            return;
        }
        self.sum_s += requests * response.mean_s();
        let mut before = 0.0;
        for (class, count) in self.counts.iter_mut().enumerate() {
            let within = if class + 1 == CLASSES {
                1.0
            } else {
                response.within(upper(class))
            };
            *count += requests * (within - before).max(0.0);
            before = within;
        }
    }
    /// Adds the requests of another program.
    pub fn merge(&mut self, other: &Self) {
        self.sum_s += other.sum_s;
        for (a, b) in self.counts.iter_mut().zip(&other.counts) {
            *a += b;
        }
    }
    /// Requests in all.
    pub fn requests(&self) -> f64 {
        self.counts.iter().sum()
    }
    /// Mean in seconds; zero without requests.
    pub fn mean_s(&self) -> f64 {
        let n = self.requests();
        if n > 0.0 { self.sum_s / n } else { 0.0 }
    }
    /// Seconds within which this share of the requests is done (to a twelfth of a decade, interpolated).
    pub fn percentile_s(&self, share: f64) -> f64 {
        let wanted = self.requests() * share.clamp(0.0, 1.0);
        let mut below = 0.0;
        for (class, count) in self.counts.iter().enumerate() {
            if below + count >= wanted && *count > 0.0 {
                let part = ((wanted - below) / count).clamp(0.0, 1.0);
                return upper(class) * 10f64.powf((part - 1.0) / CLASSES_PER_DECADE);
            }
            below += count;
        }
        0.0
    }
    /// Additions since an earlier state of the same histogram.
    pub fn since(&self, earlier: &Self) -> Self {
        Self {
            counts: self
                .counts
                .iter()
                .zip(&earlier.counts)
                .map(|(a, b)| (a - b).max(0.0))
                .collect(),
            sum_s: (self.sum_s - earlier.sum_s).max(0.0),
        }
    }
}

fn upper(class: usize) -> f64 {
    SHORTEST_S * 10f64.powf((class as f64 + 1.0) / CLASSES_PER_DECADE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_server_is_the_textbook_queue() {
        // M/M/1 at 80 %: mean 5 service times, response exponential with that mean.
        let r = Response::open(0.010, 1.0, 0.8);
        assert!((r.mean_s() - 0.050).abs() < 1e-9, "{}", r.mean_s());
        assert!((r.waits - 0.8).abs() < 1e-9);
        for t in [0.01, 0.05, 0.2] {
            assert!((r.within(t) - (1.0 - (-t / 0.05f64).exp())).abs() < 1e-9, "{t}");
        }
    }

    #[test]
    fn many_servers_wait_less_and_overload_is_finite() {
        let (few, many) = (Response::open(0.01, 2.0, 0.9), Response::open(0.01, 64.0, 0.9));
        assert!(many.mean_s() < few.mean_s() && many.mean_s() >= 0.01);
        assert!(Response::open(0.01, 8.0, 7.0).mean_s().is_finite());
    }

    #[test]
    fn percentiles_of_an_exponential_come_out() {
        let mut times = ResponseTimes::default();
        times.add(
            1000.0,
            &Response {
                service_s: 0.020,
                waits: 0.0,
                wait_s: 0.0,
            },
        );
        let early = times.clone();
        times.add(
            500.0,
            &Response {
                service_s: 0.200,
                waits: 0.0,
                wait_s: 0.0,
            },
        );
        assert!((early.mean_s() - 0.020).abs() < 1e-9);
        for (share, exact) in [(0.5, 0.01386), (0.95, 0.0599), (0.99, 0.0921)] {
            let found = early.percentile_s(share);
            assert!((found / exact - 1.0).abs() < 0.03, "{share}: {found} {exact}");
        }
        assert!((times.since(&early).mean_s() - 0.2).abs() < 1e-9);
        assert!((times.since(&early).requests() - 500.0).abs() < 1e-6);
    }

    #[test]
    fn bursts_are_the_same_however_often_they_are_asked_for() {
        let shape = Modulation::Bursty {
            low: 0.1,
            on_s: 5.0,
            off_s: 20.0,
        };
        let draws = Draws::new(1, 2);
        let mut cursor = BurstCursor::default();
        let mut time_on = 0.0;
        let mut now = 0.0;
        let mut path = vec![];
        while now < 10_000.0 {
            let (factor, until) = shape.at(now, &draws, &mut cursor);
            assert!(until > now);
            time_on += if factor == 1.0 { until - now } else { 0.0 };
            path.push((factor, until));
            now = until;
        }
        assert!((0.1..0.3).contains(&(time_on / now)), "{}", time_on / now);
        let mut cursor = BurstCursor::default();
        let (factor, until) = shape.at(9_000.0, &draws, &mut cursor);
        let expected = path.iter().find(|p| p.1 > 9_000.0).unwrap();
        assert_eq!((factor, until), *expected);
    }

    #[test]
    fn a_day_has_a_night() {
        let day = Modulation::Diurnal {
            low: 0.2,
            period_s: 86_400.0,
        };
        let (night, _) = day.at(10.0, &Draws::new(0, 0), &mut BurstCursor::default());
        let (noon, until) = day.at(43_200.0, &Draws::new(0, 0), &mut BurstCursor::default());
        assert!(
            night < 0.21 && noon > 0.99 && until == 45_000.0,
            "{night} {noon} {until}"
        );
    }

    #[test]
    fn wrong_programs_are_named_with_value_and_range() {
        let spec = ProgramSpec {
            name: "two words".into(),
            instances: 0,
            load: Load::Open {
                per_s: Some(1.0),
                busy: Some(1.0),
            },
            ..ProgramSpec::default()
        };
        let text = spec.complaints().join("\n");
        for part in ["instances = 0", "either per_s or busy", "without spaces"] {
            assert!(text.contains(part), "{part}: {text}");
        }
        let good = ProgramSpec {
            name: "x".into(),
            ..ProgramSpec::default()
        };
        assert!(good.complaints().is_empty(), "{:?}", good.complaints());
        let several = ProgramSpec { instances: 2, ..good };
        assert_eq!(several.workloads(), ["x-1", "x-2"]);
    }
}
