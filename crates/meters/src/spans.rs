//! Measures a program's run-to-block time from outside: from a thread's first run after a wait to its next wait. In a
//! server whose threads wait for requests, this is the time of work on a request or on several together. Time in a
//! queue before the wake-up is excluded. Preempted time is included, because the client waits for it, too.

use crate::cpu_time::ran;
use homeostat_kernel::Root;
use homeostat_kernel::perf::OpenError;
use homeostat_kernel::process::{numbers_in, open_process, read_at};
use homeostat_kernel::switches::{Change, Switch, Switches};
use homeostat_model::{Nanoseconds, SpanHistogram, Spans as Seen, Workload};
use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::time::{Duration, Instant};

/// Most recorded threads: those of the first processes.
const THREADS_MAX: usize = 64;
/// Blocks of time for the noise.
const BLOCKS: usize = 8;
/// Fewest spans of a block.
const BLOCK_MIN: u64 = 20;
/// Cost of recording a start or stop: 1.0 µs measured (`examples/span_cost`), mostly for the switch event itself.
const RECORD_COST: Nanoseconds = Nanoseconds(1000);
/// Most of a program's CPU time that recording may cost …
const COST_MAX: f64 = 0.005;
/// … with at least this share of a CPU as the base. Otherwise a few wake-ups would decide.
const CPU_LEAST: f64 = 0.05;
/// CPU time of a program to observe before recording.
const LOOK_CPU: Nanoseconds = Nanoseconds::from_millis(20);
/// Readings between searches for new threads.
const REFRESH_EVERY: u32 = 5;
/// Windows use this share of the budget. The rest is for busier seconds.
const AIM: f64 = 0.8;
/// Longest and shortest windows, as shares of the time.
const SHARE_MAX: f64 = 0.35;
const SHARE_MIN: f64 = 0.01;
/// A window begins after this share of the interval …
const WINDOW_FROM: f64 = 0.02;
/// … plus up to this much.
const WINDOW_SPREAD: f64 = 0.5;
/// Golden ratio: its multiples are spread evenly.
const GOLDEN: f64 = 0.618_033_988_749_895;
/// Most threads recorded in a window: those that start most often.
const WINDOW_THREADS_MAX: usize = 16;
/// Interval for taking a window's records.
const WINDOW_SLICE: Duration = Duration::from_millis(5);

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Way {
    /// Start of the run after a wait. Unknown before the first wait.
    since: Option<u64>,
    on_cpu: Option<u64>,
    waiting: bool,
}

impl Way {
    /// Applies a change. Returns the length of a span that it ends, and adds finished CPU time to `ran`.
    fn take(&mut self, switch: Switch, ran: &mut u64) -> Option<u64> {
        if let (Change::Waits | Change::Preempted, Some(on)) = (switch.change, self.on_cpu.take()) {
            *ran = ran.saturating_add(switch.time.saturating_sub(on));
        }
        match switch.change {
            Change::Runs => {
                self.on_cpu = Some(switch.time);
                if std::mem::take(&mut self.waiting) {
                    self.since = Some(switch.time);
                }
                None
            }
            Change::Waits => {
                self.waiting = true;
                switch.time.checked_sub(self.since.take()?)
            }
            Change::Preempted => None,
            Change::Lost(_) => {
                *self = Self::default();
                None
            }
        }
    }
}

/// A quantile and its noise.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Quantile {
    /// Seconds.
    pub seconds: f64,
    /// Standard deviation over blocks, as a share. `None`: too few spans per block.
    pub noise: Option<f64>,
}

/// Summary of the spans.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SpansReport {
    /// Number of spans.
    pub count: u64,
    /// The 50 % quantile.
    pub median: Quantile,
    /// The 99 % quantile.
    pub p99: Quantile,
}

/// Spans, by reading.
#[derive(Clone, Debug, Default)]
pub struct SpanBlocks {
    blocks: Vec<SpanHistogram>,
}

impl SpanBlocks {
    /// Adds the spans of one reading.
    pub fn add(&mut self, spans: &Seen) {
        let mut block = SpanHistogram::default();
        block.add_spans(spans);
        self.push(block);
    }

    fn push(&mut self, block: SpanHistogram) {
        self.blocks.push(block);
        // Merges pairs, so that the number of blocks stays bounded.
        if self.blocks.len() >= 2 * BLOCKS * 64 {
            self.blocks = joined(&self.blocks, self.blocks.len() / 2);
        }
    }

    /// Summary so far. `None`: no span yet.
    pub fn report(&self) -> Option<SpansReport> {
        let mut all = SpanHistogram::default();
        self.blocks.iter().for_each(|b| all.merge(b));
        let blocks = joined(&self.blocks, BLOCKS);
        Some(SpansReport {
            count: all.total(),
            median: quantile(&all, &blocks, 0.5)?,
            p99: quantile(&all, &blocks, 0.99)?,
        })
    }
}

struct Thread {
    switches: Switches,
    way: Way,
}

impl Thread {
    fn open(thread: i32) -> Result<Option<Self>, String> {
        match Switches::open(thread) {
            Ok(switches) => Ok(Some(Self {
                switches,
                way: Way::default(),
            })),
            Err(OpenError::Vanished) => Ok(None),
            Err(e) => Err(format!(
                "its waits cannot be seen ({e}); run homeostat as root, or with CAP_PERFMON"
            )),
        }
    }

    fn read(&mut self, switches: &mut Vec<Switch>, into: &mut Taken) {
        switches.clear();
        self.switches.read(switches);
        for switch in switches {
            let records = match switch.change {
                Change::Lost(records) => records,
                Change::Runs | Change::Waits | Change::Preempted => 1,
            };
            into.records = into.records.saturating_add(records);
            if let Some(span) = self.way.take(*switch, &mut into.ran) {
                into.spans.add(span);
            }
        }
    }
}

#[derive(Debug, Default)]
struct Taken {
    spans: SpanHistogram,
    /// Number of records, including lost ones.
    records: u64,
    /// Observed CPU time (nanoseconds).
    ran: u64,
}

impl Taken {
    fn seen(&self) -> Seen {
        Seen::of(&self.spans, Nanoseconds(self.ran))
    }
}

/// The recorded spans of a workload's threads.
pub struct Spans {
    root: Root,
    threads: BTreeMap<i32, Thread>,
    blocks: SpanBlocks,
    switches: Vec<Switch>,
}

impl Spans {
    /// Records the workload's present threads.
    ///
    /// # Errors
    /// A sentence: unsupported by this kernel or user, or too many threads.
    pub fn open(root: &Root, workload: &Workload) -> Result<Self, String> {
        if !root.is_live() {
            return Err("this is a captured tree, not the running machine".to_owned());
        }
        let mut spans = Self {
            root: root.clone(),
            threads: BTreeMap::new(),
            blocks: SpanBlocks::default(),
            switches: Vec::new(),
        };
        spans.refresh(workload)?;
        if spans.threads.is_empty() {
            return Err("it has ended".to_owned());
        }
        Ok(spans)
    }

    fn refresh(&mut self, workload: &Workload) -> Result<(), String> {
        let living: BTreeSet<i32> = threads(&self.root, workload)?
            .into_iter()
            .map(|(id, _)| id)
            .collect();
        self.threads.retain(|id, _| living.contains(id));
        for id in living {
            if self.threads.contains_key(&id) {
                continue;
            }
            if let Some(thread) = Thread::open(id)? {
                self.threads.insert(id, thread);
            }
        }
        Ok(())
    }

    fn take(&mut self) -> Taken {
        let mut taken = Taken::default();
        for thread in self.threads.values_mut() {
            thread.read(&mut self.switches, &mut taken);
        }
        taken
    }

    /// Takes the changes since the last call. Call it about once a second: the buffer loses what does not fit.
    pub fn read(&mut self) {
        let taken = self.take();
        self.blocks.push(taken.spans);
    }

    /// Summary so far. `None`: no span yet.
    pub fn report(&self) -> Option<SpansReport> {
        self.blocks.report()
    }
}

/// Threads of a workload by id, each with its process's directory.
fn threads(root: &Root, workload: &Workload) -> Result<Vec<(i32, Arc<OwnedFd>)>, String> {
    let mut all = Vec::new();
    for process in &workload.processes {
        let Ok(dir) = open_process(root, *process) else {
            continue;
        };
        let Ok((found, more)) = numbers_in(&dir, "task", THREADS_MAX) else {
            continue;
        };
        let dir = Arc::new(dir);
        all.extend(found.into_iter().map(|thread| (thread, Arc::clone(&dir))));
        if more || all.len() > THREADS_MAX {
            return Err(format!(
                "it has more than {THREADS_MAX} threads, which would cost too much to follow"
            ));
        }
    }
    Ok(all)
}

/// By thread: number of runs and run time in nanoseconds (`schedstat`).
type Runs = BTreeMap<i32, (u64, u64)>;

fn runs(root: &Root, workload: &Workload) -> Result<Runs, String> {
    let mut buffer = [0u8; 128];
    let read = |(thread, dir): (i32, Arc<OwnedFd>)| {
        let n = read_at(dir.as_ref(), &format!("task/{thread}/schedstat"), &mut buffer).ok()?;
        let ran = ran(buffer.get(..n)?)?;
        Some((thread, (ran.times, ran.ns)))
    };
    Ok(threads(root, workload)?.into_iter().filter_map(read).collect())
}

/// Records the spans of a workload in a trial. First it observes how often the threads switch. Then it records
/// continuously if that is cheap, or in a window of each interval, or not at all if windows would be too short.
pub struct Follower {
    root: Root,
    state: State,
}

enum State {
    /// Observation before recording.
    Looking(Option<Runs>),
    Following {
        spans: Spans,
        readings: u32,
    },
    InWindows(Windows),
    Refused(String),
}

impl Follower {
    /// Begins without recording.
    pub fn new(root: &Root) -> Self {
        Self {
            root: root.clone(),
            state: State::Looking(None),
        }
    }

    /// Number of recorded threads. `None`: not recording.
    pub fn threads(&self) -> Option<usize> {
        match &self.state {
            State::Following { spans, .. } => Some(spans.threads.len()),
            State::InWindows(windows) => Some(windows.threads.len().min(WINDOW_THREADS_MAX)),
            State::Looking(_) | State::Refused(_) => None,
        }
    }

    /// Call with each sample of the workload, in which it used `cpu` over `interval`. Returns the spans recorded since
    /// the last call, or why there are none. `None`: not known yet.
    pub fn sample(
        &mut self,
        workload: &Workload,
        cpu: Nanoseconds,
        interval: Nanoseconds,
    ) -> Option<Result<Seen, String>> {
        match self.proceed(workload, cpu, interval) {
            Ok(seen) => seen.map(Ok),
            Err(why) => {
                // This closes what was open.
                self.state = State::Refused(why.clone());
                Some(Err(why))
            }
        }
    }

    fn proceed(
        &mut self,
        workload: &Workload,
        cpu: Nanoseconds,
        interval: Nanoseconds,
    ) -> Result<Option<Seen>, String> {
        match &mut self.state {
            State::Looking(before) => {
                let Some(look) = look(&self.root, workload, before)? else {
                    return Ok(None);
                };
                let share = COST_MAX / look.cost;
                self.state = if share >= 1.0 {
                    State::Following {
                        spans: Spans::open(&self.root, workload)?,
                        readings: 0,
                    }
                } else {
                    State::InWindows(Windows::begin(look, share * AIM, cpu, interval)?)
                };
                Ok(None)
            }
            State::Following { spans, readings } => {
                *readings += 1;
                let taken = spans.take();
                if cost(taken.records, cpu, interval) > COST_MAX {
                    // Closes it at once, and then checks whether windows are affordable.
                    self.state = State::Looking(None);
                } else if *readings % REFRESH_EVERY == 0 {
                    spans.refresh(workload)?;
                }
                Ok(Some(taken.seen()))
            }
            State::InWindows(windows) => windows.sample(&self.root, workload, cpu, interval),
            State::Refused(why) => Err(why.clone()),
        }
    }
}

struct Look {
    /// Cost of recording all starts and stops, as a share of their CPU time.
    cost: f64,
    /// The threads that start most often come first.
    threads: Vec<i32>,
    runs: Runs,
}

/// The observation, if it is long enough.
fn look(root: &Root, workload: &Workload, before: &mut Option<Runs>) -> Result<Option<Look>, String> {
    if !root.is_live() {
        return Err("this is a captured tree, not the running machine".to_owned());
    }
    let runs = runs(root, workload)?;
    let Some(before) = before else {
        *before = Some(runs);
        return Ok(None);
    };
    let (mut all, mut ran) = (0u64, 0u64);
    let mut threads = Vec::new();
    for (thread, (times, time)) in &runs {
        let (times_before, time_before) = before.get(thread).copied().unwrap_or_default();
        let times = times.saturating_sub(times_before);
        all = all.saturating_add(times);
        ran = ran.saturating_add(time.saturating_sub(time_before));
        threads.push((std::cmp::Reverse(times), *thread));
    }
    if ran < LOOK_CPU.0 {
        return Ok(None);
    }
    threads.sort_unstable();
    Ok(Some(Look {
        // One start and one stop each.
        cost: cost(all.saturating_mul(2).max(1), Nanoseconds(ran), Nanoseconds::ZERO),
        threads: threads.into_iter().map(|(_, thread)| thread).collect(),
        runs,
    }))
}

/// Cost of this many records, as a share of the CPU time.
fn cost(records: u64, cpu: Nanoseconds, interval: Nanoseconds) -> f64 {
    records as f64 * RECORD_COST.as_secs_f64() / charged(cpu, interval)
}

/// CPU time in seconds that is the base of the share.
fn charged(cpu: Nanoseconds, interval: Nanoseconds) -> f64 {
    cpu.as_secs_f64().max(CPU_LEAST * interval.as_secs_f64())
}

fn too_dear(cost: f64) -> String {
    format!(
        "its threads start and stop {:.0} times per second of its CPU time: to record that would cost it {:.1} % of it while it is done, and \
         a long enough part of the time is more than {:.1} % of it",
        cost / RECORD_COST.as_secs_f64(),
        cost * 100.0,
        COST_MAX * 100.0
    )
}

struct Order {
    threads: Vec<i32>,
    after: Duration,
    length: Duration,
    /// The window ends early at this number of records.
    records_max: u64,
}

/// Records windows on a separate thread. It ends after the current window when this is dropped.
struct Windows {
    orders: Sender<Order>,
    windows: Receiver<Result<Taken, String>>,
    share: f64,
    turn: u32,
    ordered: bool,
    /// The current window outlasted its interval.
    stale: bool,
    threads: Vec<i32>,
    runs: Runs,
}

impl Windows {
    fn begin(look: Look, share: f64, cpu: Nanoseconds, interval: Nanoseconds) -> Result<Self, String> {
        if share < SHARE_MIN {
            return Err(too_dear(look.cost));
        }
        let (orders, todo) = channel();
        let (done, windows) = channel();
        std::thread::Builder::new()
            .name("spans".into())
            .spawn(move || {
                while let Ok(order) = todo.recv() {
                    if done.send(window(&order)).is_err() {
                        break;
                    }
                }
            })
            .map_err(|e| format!("no thread can be made to follow it ({e})"))?;
        let mut begun = Self {
            orders,
            windows,
            share: share.min(SHARE_MAX),
            turn: 0,
            ordered: false,
            stale: false,
            threads: look.threads,
            runs: look.runs,
        };
        begun.order(cpu, interval);
        Ok(begun)
    }

    /// Requests the next window within the interval that begins now, at a time unrelated to the program's rhythm.
    fn order(&mut self, cpu: Nanoseconds, interval: Nanoseconds) {
        self.turn = self.turn.wrapping_add(1);
        let length = interval.as_secs_f64().clamp(0.1, 1.0);
        let after = (WINDOW_FROM + WINDOW_SPREAD * (f64::from(self.turn) * GOLDEN).fract()) * length;
        let affordable = COST_MAX * charged(cpu, interval) / RECORD_COST.as_secs_f64();
        self.ordered = self
            .orders
            .send(Order {
                threads: self.threads.iter().take(WINDOW_THREADS_MAX).copied().collect(),
                after: Duration::from_secs_f64(after),
                length: Duration::from_secs_f64(self.share * length),
                records_max: affordable as u64,
            })
            .is_ok();
    }

    fn sample(
        &mut self,
        root: &Root,
        workload: &Workload,
        cpu: Nanoseconds,
        interval: Nanoseconds,
    ) -> Result<Option<Seen>, String> {
        let taken = match self.windows.try_recv() {
            Ok(taken) => taken?,
            Err(TryRecvError::Empty) if self.ordered => {
                self.stale = true;
                return Ok(None);
            }
            Err(_) => return Err("the thread that followed it has ended".to_owned()),
        };
        if self.turn % REFRESH_EVERY == 0 {
            if let Some(look) = look(root, workload, &mut Some(std::mem::take(&mut self.runs)))? {
                (self.threads, self.runs) = (look.threads, look.runs);
            }
        }
        let cost = cost(taken.records.max(1), cpu, interval);
        let wanted = self.share * AIM * COST_MAX / cost;
        if wanted < SHARE_MIN / 2.0 {
            return Err(too_dear(cost / self.share));
        }
        self.share = wanted.min(2.0 * self.share).min(SHARE_MAX);
        self.order(cpu, interval);
        // A window from an earlier interval may belong to another block.
        Ok((!std::mem::take(&mut self.stale)).then(|| taken.seen()))
    }
}

fn window(order: &Order) -> Result<Taken, String> {
    std::thread::sleep(order.after);
    let begun = Instant::now();
    let mut threads = Vec::new();
    for thread in &order.threads {
        threads.extend(Thread::open(*thread)?);
    }
    let (mut taken, mut switches) = (Taken::default(), Vec::new());
    loop {
        let left = order.length.saturating_sub(begun.elapsed());
        std::thread::sleep(left.min(WINDOW_SLICE));
        for thread in &mut threads {
            thread.read(&mut switches, &mut taken);
        }
        if left <= WINDOW_SLICE || taken.records >= order.records_max {
            return Ok(taken);
        }
    }
}

fn joined(blocks: &[SpanHistogram], count: usize) -> Vec<SpanHistogram> {
    let each = blocks.len().div_ceil(count.max(1)).max(1);
    blocks
        .chunks(each)
        .map(|chunk| {
            let mut sum = SpanHistogram::default();
            chunk.iter().for_each(|b| sum.merge(b));
            sum
        })
        .collect()
}

fn quantile(all: &SpanHistogram, blocks: &[SpanHistogram], share: f64) -> Option<Quantile> {
    let each: Vec<f64> = blocks
        .iter()
        .filter(|b| b.total() >= BLOCK_MIN)
        .filter_map(|b| b.quantile(share))
        .collect();
    let n = each.len() as f64;
    let mean = each.iter().sum::<f64>() / n;
    let noise = (each.len() >= BLOCKS / 2 && mean > 0.0).then(|| {
        let squares: f64 = each.iter().map(|v| (v - mean) * (v - mean)).sum();
        (squares / (n - 1.0)).sqrt() / mean
    });
    Some(Quantile {
        seconds: all.quantile(share)? / 1e9,
        noise,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn way(changes: &[(u64, Change)]) -> Vec<u64> {
        let (mut way, mut ran) = (Way::default(), 0);
        changes
            .iter()
            .filter_map(|(time, change)| {
                let switch = Switch {
                    time: *time,
                    change: *change,
                };
                way.take(switch, &mut ran)
            })
            .collect()
    }

    #[test]
    fn a_span_goes_from_the_end_of_a_wait_to_the_next_wait() {
        use Change::{Lost, Preempted, Runs, Waits};
        // Before the first wait nothing is known of its beginning.
        assert_eq!(
            way(&[(5, Waits), (10, Runs), (17, Waits), (20, Runs), (21, Waits)]),
            [7, 1]
        );
        // To be taken off the CPU in between does not end it.
        assert_eq!(
            way(&[(0, Waits), (10, Runs), (12, Preempted), (30, Runs), (35, Waits)]),
            [25]
        );
        // What was lost in between is not guessed.
        assert_eq!(
            way(&[
                (0, Waits),
                (10, Runs),
                (0, Lost(7)),
                (30, Runs),
                (35, Waits),
                (40, Runs),
                (44, Waits)
            ]),
            [4]
        );
    }

    #[test]
    fn the_noise_is_that_of_the_blocks() {
        let block = |value: u64| {
            let mut h = SpanHistogram::default();
            (0..BLOCK_MIN).for_each(|_| h.add(value));
            h
        };
        let spans = |values: &[u64]| {
            let mut spans = SpanBlocks::default();
            values.iter().for_each(|v| {
                spans.add(&Seen::of(&block(*v), Nanoseconds::from_millis(1)));
            });
            spans
        };
        let steady = spans(&[1000; 16]).report().unwrap();
        assert_eq!(steady.count, 16 * BLOCK_MIN);
        assert_eq!(steady.median.noise, Some(0.0));
        let rough = spans(&[1000, 1000, 2000, 2000].repeat(4)).report().unwrap();
        assert!(rough.median.noise.unwrap() > 0.25, "{rough:?}");
        assert_eq!(spans(&[1000; 2]).report().unwrap().p99.noise, None);
        assert_eq!(spans(&[]).report(), None);
    }

    #[test]
    fn windows_that_would_be_too_short_are_not_begun() {
        let look = |cost| Look {
            cost,
            threads: vec![1],
            runs: Runs::new(),
        };
        let (cpu, interval) = (Nanoseconds::from_millis(500), Nanoseconds::from_secs(1));
        let refused = Windows::begin(look(0.9), AIM * COST_MAX / 0.9, cpu, interval).err();
        let why = refused.expect("half a percent of the time");
        assert!(why.contains("900000 times") && why.contains("90.0 %"), "{why}");
        // Some 2,500 records in half a second of CPU time, and as many for a program that hardly uses any as for a twentieth.
        assert!((cost(2_500, cpu, interval) - COST_MAX).abs() < 1e-12);
        assert_eq!(
            cost(10, Nanoseconds::ZERO, interval),
            cost(10, Nanoseconds::from_millis(50), interval)
        );
    }
}
