//! How long a program takes to answer, seen from outside: spans of its threads from the moment at which they begin to run after
//! a wait to their next wait. In a server whose threads wait for requests that is the time in which a request, or what came
//! together, is worked at. What waited in a queue before the thread woke up is not in it.
//!
//! A span includes the time in which the thread was taken off its CPU: who asked waits for that, too.

use crate::Root;
use crate::meters::common::{numbers_in, open_process};
use crate::sys::perf::OpenError;
use crate::sys::switches::{Change, Switch, Switches};
use homeostat_model::Workload;

/// Threads that are followed: those of the first processes.
const THREADS_MAX: usize = 64;
/// Pieces of each power of two: a span is known to 1/16, 6 %.
const PIECES: u64 = 16;
/// Powers of two from one nanosecond on: 2^40 is a quarter of an hour.
const POWERS: usize = 40;
/// Blocks into which the time is divided for the noise.
const BLOCKS: usize = 8;
/// Fewest spans of a block.
const BLOCK_MIN: u64 = 20;

/// A histogram whose pieces grow with what they hold: each power of two is divided evenly.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Histogram {
    counts: Vec<u64>,
    total: u64,
}

impl Histogram {
    fn new() -> Self {
        Self {
            counts: vec![0; (POWERS + 1) * PIECES as usize],
            total: 0,
        }
    }

    fn piece(value: u64) -> usize {
        let value = value.max(PIECES);
        let power = u64::from(value.ilog2()) - 4;
        // 16 values of each power: those above its leading bit.
        (power * PIECES + (value >> power) - PIECES) as usize
    }

    /// Middle of a piece.
    fn middle(piece: usize) -> f64 {
        let (power, within) = (piece as u64 / PIECES, piece as u64 % PIECES);
        ((PIECES + within) as f64 + 0.5) * (1u64 << power.min(50)) as f64
    }

    fn add(&mut self, value: u64) {
        let last = self.counts.len().saturating_sub(1);
        if let Some(count) = self.counts.get_mut(Self::piece(value).min(last)) {
            *count = count.saturating_add(1);
            self.total = self.total.saturating_add(1);
        }
    }

    fn merge(&mut self, other: &Self) {
        for (mine, theirs) in self.counts.iter_mut().zip(&other.counts) {
            *mine = mine.saturating_add(*theirs);
        }
        self.total = self.total.saturating_add(other.total);
    }

    /// The value below which this share lies, in nanoseconds.
    fn quantile(&self, share: f64) -> Option<f64> {
        let wanted = (self.total as f64 * share).ceil().max(1.0) as u64;
        let mut sum = 0u64;
        self.counts.iter().enumerate().find_map(|(piece, count)| {
            sum = sum.saturating_add(*count);
            (*count > 0 && sum >= wanted).then(|| Self::middle(piece))
        })
    }
}

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
            Change::Unknown => {
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

/// The spans of a workload's threads, being recorded.
pub struct Spans {
    threads: Vec<(Switches, Way)>,
    /// One for each reading.
    blocks: Vec<Histogram>,
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
        let mut threads = Vec::new();
        for process in &workload.processes {
            let Ok((found, more)) = open_process(root, *process)
                .map_err(|e| e.to_string())
                .and_then(|dir| numbers_in(&dir, "task", THREADS_MAX).map_err(|e| e.to_string()))
            else {
                continue;
            };
            for thread in found {
                match Switches::open(thread) {
                    Ok(switches) => threads.push((switches, Way::default())),
                    Err(OpenError::Vanished) => {}
                    Err(e) => {
                        return Err(format!(
                            "its waits cannot be seen ({e}); run homeostat as root, or with CAP_PERFMON"
                        ));
                    }
                }
            }
            if more || threads.len() > THREADS_MAX {
                return Err(format!(
                    "it has more than {THREADS_MAX} threads, which would cost too much to follow"
                ));
            }
        }
        if threads.is_empty() {
            return Err("it has ended".to_owned());
        }
        Ok(Self {
            threads,
            blocks: Vec::new(),
            switches: Vec::new(),
        })
    }

    /// Takes what has happened since the last call. To be called about once a second: what does not fit between is lost.
    pub fn read(&mut self) {
        let mut block = Histogram::new();
        for (switches, way) in &mut self.threads {
            self.switches.clear();
            switches.read(&mut self.switches);
            for span in self.switches.iter().filter_map(|s| way.take(*s)) {
                block.add(span);
            }
        }
        // Two blocks become one, so that their number stays.
        self.blocks.push(block);
        if self.blocks.len() >= 2 * BLOCKS * 64 {
            self.blocks = joined(&self.blocks, self.blocks.len() / 2);
        }
    }

    /// What has been seen so far; `None` while there was no span.
    pub fn report(&self) -> Option<SpansReport> {
        let mut all = Histogram::new();
        self.blocks.iter().for_each(|b| all.merge(b));
        let blocks = joined(&self.blocks, BLOCKS);
        Some(SpansReport {
            count: all.total,
            threads: self.threads.len(),
            median: quantile(&all, &blocks, 0.5)?,
            p99: quantile(&all, &blocks, 0.99)?,
        })
    }
}

/// The same in so many blocks, as evenly as it goes.
fn joined(blocks: &[Histogram], count: usize) -> Vec<Histogram> {
    let each = blocks.len().div_ceil(count.max(1)).max(1);
    blocks
        .chunks(each)
        .map(|chunk| {
            let mut sum = Histogram::new();
            chunk.iter().for_each(|b| sum.merge(b));
            sum
        })
        .collect()
}

fn quantile(all: &Histogram, blocks: &[Histogram], share: f64) -> Option<Quantile> {
    let each: Vec<f64> = blocks
        .iter()
        .filter(|b| b.total >= BLOCK_MIN)
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

    #[test]
    fn a_histogram_keeps_what_it_is_told_to_six_percent() {
        for value in [
            1u64,
            15,
            16,
            17,
            31,
            32,
            100,
            999,
            12_345,
            1_000_000,
            123_456_789,
            1 << 39,
        ] {
            let mut h = Histogram::new();
            h.add(value);
            let told = h.quantile(0.5).unwrap();
            let off = (told / (value.max(16) as f64) - 1.0).abs();
            assert!(off <= 0.07, "{value}: {told}");
        }
        let mut h = Histogram::new();
        h.add(u64::MAX);
        assert!(h.quantile(0.99).unwrap() > 1e12);
        assert_eq!(Histogram::new().quantile(0.5), None);
    }

    #[test]
    fn quantiles_are_those_of_the_values() {
        let mut h = Histogram::new();
        (1..=1000u64).for_each(|v| h.add(v * 1000));
        for (share, value) in [(0.5, 500_000.0), (0.99, 990_000.0)] {
            let told = h.quantile(share).unwrap();
            assert!((told / value - 1.0f64).abs() < 0.07, "{share}: {told}");
        }
    }

    proptest::proptest! {
        #[test]
        fn larger_values_lie_in_no_smaller_piece(a in 0u64..1 << 41, b in 0u64..1 << 41) {
            let (a, b) = (a.min(b), a.max(b));
            proptest::prop_assert!(Histogram::piece(a) <= Histogram::piece(b));
        }
    }

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
        use Change::{Preempted, Runs, Unknown, Waits};
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
                (0, Unknown),
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
            let mut h = Histogram::new();
            (0..BLOCK_MIN).for_each(|_| h.add(value));
            h
        };
        let spans = |values: &[u64]| Spans {
            threads: Vec::new(),
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
