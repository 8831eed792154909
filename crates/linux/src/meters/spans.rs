//! How long a program takes to answer, seen from outside: spans of its threads from the moment at which they begin to run after
//! a wait to their next wait. In a server whose threads wait for requests that is the time in which a request, or what came
//! together, is worked at. What waited in a queue before the thread woke up is not in it.
//!
//! A span includes the time in which the thread was taken off its CPU: who asked waits for that, too.

use crate::Root;
use crate::meters::common::{numbers_in, open_process, read_at};
use crate::sensors::bytes::{number, words};
use crate::sys::perf::OpenError;
use crate::sys::switches::{Change, Switch, Switches};
use homeostat_model::{Nanoseconds, SpanHistogram, Spans as Seen, Workload};
use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::OwnedFd;
use std::sync::Arc;

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

/// One thread on its way from wait to wait.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Way {
    /// When it began to run after a wait; unknown before the first wait.
    since: Option<u64>,
    waiting: bool,
}

impl Way {
    /// Takes a change; the length of the span that it ends.
    fn take(&mut self, switch: Switch) -> Option<u64> {
        match switch.change {
            Change::Runs => {
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
    /// Threads that were followed.
    pub threads: usize,
    /// Half of them are shorter.
    pub median: Quantile,
    /// 99 of 100 are shorter.
    pub p99: Quantile,
}

/// One of its threads.
struct Thread {
    switches: Switches,
    way: Way,
}

/// What was taken at one time.
#[derive(Debug, Default)]
struct Taken {
    spans: SpanHistogram,
    /// Records that were read.
    records: u64,
    /// Records for which there was no room.
    lost: u64,
}

/// The spans of a workload's threads, being recorded.
pub struct Spans {
    root: Root,
    threads: BTreeMap<i32, Thread>,
    /// One for each reading.
    blocks: Vec<SpanHistogram>,
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
            blocks: Vec::new(),
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
            match Switches::open(id) {
                Ok(switches) => {
                    let way = Way::default();
                    self.threads.insert(id, Thread { switches, way });
                }
                Err(OpenError::Vanished) => {}
                Err(e) => {
                    return Err(format!(
                        "its waits cannot be seen ({e}); run homeostat as root, or with CAP_PERFMON"
                    ));
                }
            }
        }
        Ok(())
    }

    fn take(&mut self) -> Taken {
        let mut taken = Taken::default();
        for Thread { switches, way } in self.threads.values_mut() {
            self.switches.clear();
            switches.read(&mut self.switches);
            for switch in &self.switches {
                match switch.change {
                    Change::Lost(records) => taken.lost = taken.lost.saturating_add(records),
                    Change::Runs | Change::Waits | Change::Preempted => taken.records += 1,
                }
                if let Some(span) = way.take(*switch) {
                    taken.spans.add(span);
                }
            }
        }
        taken
    }

    /// Takes what has happened since the last call. To be called about once a second: what does not fit between is lost.
    pub fn read(&mut self) {
        let taken = self.take();
        // Two blocks become one, so that their number stays.
        self.blocks.push(taken.spans);
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
            threads: self.threads.len(),
            median: quantile(&all, &blocks, 0.5)?,
            p99: quantile(&all, &blocks, 0.99)?,
        })
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
        let mut fields = words(buffer.get(..n)?).map(number);
        let (ran, _, times) = (fields.next()??, fields.next()??, fields.next()??);
        Some((thread, (times, ran)))
    };
    Ok(threads(root, workload)?.into_iter().filter_map(read).collect())
}

/// Follows the spans of a workload in a trial: first looks how often its threads switch, follows them where that costs it
/// little, and stops at once where it turns out to cost more.
pub(crate) struct Follower {
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
    Refused(String),
}

impl Follower {
    pub(crate) fn new(root: &Root) -> Self {
        Self {
            root: root.clone(),
            state: State::Looking(None),
        }
    }

    /// With each sample of it, in which it used so much CPU time over so long: the spans that have ended since the last one, or
    /// why they are not followed. `None` while that is not known.
    pub(crate) fn sample(
        &mut self,
        workload: &Workload,
        cpu: Nanoseconds,
        interval: Nanoseconds,
    ) -> Option<Result<Seen, String>> {
        let result = match &mut self.state {
            State::Looking(before) => match look(&self.root, workload, before) {
                Ok(None) => return None,
                Ok(Some(())) => match Spans::open(&self.root, workload) {
                    Ok(spans) => {
                        self.state = State::Following { spans, readings: 0 };
                        return None;
                    }
                    Err(why) => Err(why),
                },
                Err(why) => Err(why),
            },
            State::Following { spans, readings } => {
                *readings += 1;
                let taken = spans.take();
                affordable(taken.records.saturating_add(taken.lost), cpu, interval)
                    .and_then(|()| match readings.is_multiple_of(REFRESH_EVERY) {
                        true => spans.refresh(workload),
                        false => Ok(()),
                    })
                    .map(|()| Seen::of(&taken.spans, taken.records, taken.lost))
            }
            State::Refused(why) => Err(why.clone()),
        };
        if let Err(why) = &result {
            // What was open is closed with this.
            self.state = State::Refused(why.clone());
        }
        Some(result)
    }
}

/// Whether enough was seen of how often its threads switch, and they may be followed.
fn look(root: &Root, workload: &Workload, before: &mut Option<Runs>) -> Result<Option<()>, String> {
    if !root.is_live() {
        return Err("this is a captured tree, not the running machine".to_owned());
    }
    let now = runs(root, workload)?;
    let Some(before) = before else {
        *before = Some(now);
        return Ok(None);
    };
    let (mut times, mut ran) = (0u64, 0u64);
    for (thread, (t, r)) in &now {
        let (t0, r0) = before.get(thread).copied().unwrap_or_default();
        times = times.saturating_add(t.saturating_sub(t0));
        ran = ran.saturating_add(r.saturating_sub(r0));
    }
    if ran < LOOK_CPU.0 {
        return Ok(None);
    }
    // A start and a stop each time.
    affordable(times.saturating_mul(2), Nanoseconds(ran), Nanoseconds::ZERO).map(Some)
}

/// Whether so many records cost a program that used so much CPU time little enough.
fn affordable(records: u64, cpu: Nanoseconds, interval: Nanoseconds) -> Result<(), String> {
    let cpu = cpu.as_secs_f64().max(CPU_LEAST * interval.as_secs_f64());
    let cost = records as f64 * RECORD_COST.as_secs_f64();
    if cost <= COST_MAX * cpu {
        return Ok(());
    }
    Err(format!(
        "its threads start and stop {:.0} times per second of its CPU time: following that would cost it {:.1} % of it, and may cost \
         {:.1} %",
        records as f64 / cpu,
        cost / cpu * 100.0,
        COST_MAX * 100.0
    ))
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
        let mut way = Way::default();
        changes
            .iter()
            .filter_map(|(time, change)| {
                way.take(Switch {
                    time: *time,
                    change: *change,
                })
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
        let spans = |values: &[u64]| Spans {
            root: Root::default(),
            threads: BTreeMap::new(),
            blocks: values.iter().map(|v| block(*v)).collect(),
            switches: Vec::new(),
        };
        let steady = spans(&[1000; 16]).report().unwrap();
        assert_eq!(steady.count, 16 * BLOCK_MIN);
        assert_eq!(steady.median.noise, Some(0.0));
        let rough = spans(&[1000, 1000, 2000, 2000].repeat(4)).report().unwrap();
        assert!(rough.median.noise.unwrap() > 0.25, "{rough:?}");
        assert_eq!(spans(&[1000; 2]).report().unwrap().p99.noise, None);
        assert_eq!(spans(&[]).report(), None);
    }
}
