//! How long a program takes to answer, seen from outside: spans of its threads from the moment at which they begin to run after
//! a wait to their next wait. In a server whose threads wait for requests that is the time in which a request, or what came
//! together, is worked at. What waited in a queue before the thread woke up is not in it.
//!
//! A span includes the time in which the thread was taken off its CPU: who asked waits for that, too.

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

/// Threads that are followed: those of the first processes.
const THREADS_MAX: usize = 64;
/// Blocks into which the time is divided for the noise.
const BLOCKS: usize = 8;
/// Fewest spans of a block.
const BLOCK_MIN: u64 = 20;
/// What a record of a start or a stop costs the program: 1.0 µs measured (`examples/span_cost`), most of which is the switching of
/// the event itself.
const RECORD_COST: Nanoseconds = Nanoseconds(1000);
/// Most of a program's CPU time that following may cost it …
const COST_MAX: f64 = 0.005;
/// … of which it is taken to use at least this share of a CPU: less would be judged by a few wake-ups.
const CPU_LEAST: f64 = 0.05;
/// CPU time of a program that is looked at before it is followed.
const LOOK_CPU: Nanoseconds = Nanoseconds::from_millis(20);
/// New threads are looked for at every so many readings.
const REFRESH_EVERY: u32 = 5;
/// Windows are as long as this share of what they may cost allows: the rest is for the seconds in which there is more.
const AIM: f64 = 0.8;
/// Longest and shortest windows, as shares of the time.
const SHARE_MAX: f64 = 0.35;
const SHARE_MIN: f64 = 0.01;
/// A window begins after this share of the interval …
const WINDOW_FROM: f64 = 0.02;
/// … and up to this much later.
const WINDOW_SPREAD: f64 = 0.5;
/// Multiples of it are spread evenly.
const GOLDEN: f64 = 0.618_033_988_749_895;
/// Threads that are recorded in a window: those that start most often.
const WINDOW_THREADS_MAX: usize = 16;
/// The records of a window are taken as often.
const WINDOW_SLICE: Duration = Duration::from_millis(5);

/// One thread on its way from wait to wait.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Way {
    /// When it began to run after a wait; unknown before the first wait.
    since: Option<u64>,
    /// When it was put onto its CPU.
    on_cpu: Option<u64>,
    waiting: bool,
}

impl Way {
    /// Takes a change; the length of the span that it ends. `ran` gets the time on a CPU that it ends.
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

/// A quantile and how much it varies.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Quantile {
    /// Seconds.
    pub seconds: f64,
    /// Standard deviation over blocks of the time, as a share; absent when the blocks hold too little.
    pub noise: Option<f64>,
}

/// What the spans were.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SpansReport {
    /// How many.
    pub count: u64,
    /// Half of them are shorter.
    pub median: Quantile,
    /// 99 of 100 are shorter.
    pub p99: Quantile,
}

/// Spans of a while, kept by the readings in which they were seen.
#[derive(Clone, Debug, Default)]
pub struct SpanBlocks {
    /// One for each reading.
    blocks: Vec<SpanHistogram>,
}

impl SpanBlocks {
    /// Adds what one reading has told.
    pub fn add(&mut self, spans: &Seen) {
        let mut block = SpanHistogram::default();
        block.add_spans(spans);
        self.push(block);
    }

    fn push(&mut self, block: SpanHistogram) {
        self.blocks.push(block);
        // Two blocks become one, so that their number stays.
        if self.blocks.len() >= 2 * BLOCKS * 64 {
            self.blocks = joined(&self.blocks, self.blocks.len() / 2);
        }
    }

    /// What has been seen so far; `None` while there was no span.
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

/// One of its threads.
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

    /// Takes what has happened since the last call.
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

/// What was taken at one time.
#[derive(Debug, Default)]
struct Taken {
    spans: SpanHistogram,
    /// Records that were made, with those for which there was no room.
    records: u64,
    /// Time on a CPU that was seen (nanoseconds).
    ran: u64,
}

impl Taken {
    fn seen(&self) -> Seen {
        Seen::of(&self.spans, Nanoseconds(self.ran))
    }
}

/// The spans of a workload's threads, being recorded.
pub struct Spans {
    root: Root,
    threads: BTreeMap<i32, Thread>,
    blocks: SpanBlocks,
    switches: Vec<Switch>,
}

impl Spans {
    /// Follows the threads that a workload has now.
    ///
    /// # Errors
    /// A sentence: this kernel or this user cannot, or it has too many threads.
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

    /// Follows threads that have come since, and forgets those that have gone.
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

    /// Takes what has happened since the last call. To be called about once a second: what does not fit between is lost.
    pub fn read(&mut self) {
        let taken = self.take();
        self.blocks.push(taken.spans);
    }

    /// What has been seen so far; `None` while there was no span.
    pub fn report(&self) -> Option<SpansReport> {
        self.blocks.report()
    }
}

/// The threads of a workload with the directories of their processes, by number.
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

/// How often its threads were put onto a CPU, and how long they ran there in nanoseconds (`schedstat`), by thread.
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

/// Follows the spans of a workload in a trial: first looks how often its threads switch. Where that costs it little they are
/// recorded all the time, else in windows, for a part of each interval, so that it costs as much as it may; and not at all where
/// the windows would be too short.
pub struct Follower {
    root: Root,
    state: State,
}

enum State {
    /// What is seen first, before anything is recorded.
    Looking(Option<Runs>),
    Following {
        spans: Spans,
        readings: u32,
    },
    InWindows(Windows),
    Refused(String),
}

impl Follower {
    /// Nobody is followed yet.
    pub fn new(root: &Root) -> Self {
        Self {
            root: root.clone(),
            state: State::Looking(None),
        }
    }

    /// Threads whose starts and stops are recorded, all the time or in windows; `None` while none are.
    pub fn threads(&self) -> Option<usize> {
        match &self.state {
            State::Following { spans, .. } => Some(spans.threads.len()),
            State::InWindows(windows) => Some(windows.threads.len().min(WINDOW_THREADS_MAX)),
            State::Looking(_) | State::Refused(_) => None,
        }
    }

    /// With each sample of it, in which it used so much CPU time over so long: the spans that were recorded since the last one, or
    /// why they are not. `None` while that is not known.
    pub fn sample(
        &mut self,
        workload: &Workload,
        cpu: Nanoseconds,
        interval: Nanoseconds,
    ) -> Option<Result<Seen, String>> {
        match self.proceed(workload, cpu, interval) {
            Ok(seen) => seen.map(Ok),
            Err(why) => {
                // What was open is closed with this.
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
                    // It is closed at once; whether it may go on in windows is looked at.
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

/// What was seen of threads before anything is recorded.
struct Look {
    /// Share of their CPU time that it would cost to record all their starts and stops.
    cost: f64,
    /// The threads, those that start most often first.
    threads: Vec<i32>,
    runs: Runs,
}

/// Whether enough was seen of how often its threads switch, and what.
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
        // A start and a stop each time.
        cost: cost(all.saturating_mul(2).max(1), Nanoseconds(ran), Nanoseconds::ZERO),
        threads: threads.into_iter().map(|(_, thread)| thread).collect(),
        runs,
    }))
}

/// What share of its CPU time so many records cost a program.
fn cost(records: u64, cpu: Nanoseconds, interval: Nanoseconds) -> f64 {
    records as f64 * RECORD_COST.as_secs_f64() / charged(cpu, interval)
}

/// The CPU time in seconds that a share is taken of.
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

/// A window that is to be made.
struct Order {
    threads: Vec<i32>,
    after: Duration,
    length: Duration,
    /// It ends with so many records.
    records_max: u64,
}

/// Records in windows, in a thread of its own, which ends when this is dropped and the window is over.
struct Windows {
    orders: Sender<Order>,
    windows: Receiver<Result<Taken, String>>,
    /// Share of the time.
    share: f64,
    turn: u32,
    ordered: bool,
    /// The window that is under way was not over with the interval it was made for.
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

    /// The next window: within the interval that begins now, at a time of it that is in step with nothing the program does.
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
        // What began in an interval before this one may be of another block.
        Ok((!std::mem::take(&mut self.stale)).then(|| taken.seen()))
    }
}

/// Records for a while.
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

/// The same in so many blocks, as evenly as it goes.
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
