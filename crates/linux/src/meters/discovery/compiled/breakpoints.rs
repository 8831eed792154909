//! Breakpoints of the processor on some threads, at a few places, and what one costs on this machine.

use super::super::super::turns::Hits;
use crate::sys::breakpoints::{Breakpoint, PER_THREAD};
use crate::sys::perf::OpenError;
use rustix::time::ClockId;
use std::collections::{BTreeMap, BTreeSet};
use std::hint::black_box;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

/// Places that are counted at once.
pub(in crate::meters::discovery) const PLACES_MAX: usize = PER_THREAD;
/// Calls of our own function in one series, and how many series with and without a breakpoint.
const CALLS: u64 = 500;
const SERIES: usize = 7;
/// What a hit costs in a program that has more to do than ours.
const COLD: f64 = 1.25;
/// What a hit costs in a virtual machine (measured, seconds), and bounds of what is believed of that.
const COST_ELSEWHERE: f64 = 8.5e-6;
const COST_MIN: f64 = 1e-6;
const COST_MAX: f64 = 200e-6;

/// Breakpoints at the same places on each of some threads.
#[derive(Debug)]
pub(in crate::meters::discovery) struct Set {
    addresses: Vec<u64>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    on: bool,
    threads: BTreeMap<i32, Vec<Breakpoint>>,
    /// Hits at each place, of threads that are not counted any more.
    ended: Vec<u64>,
}

impl State {
    fn leave(&mut self, gone: impl Fn(i32) -> bool) {
        let (gone, stays) = std::mem::take(&mut self.threads)
            .into_iter()
            .partition(|(thread, _)| gone(*thread));
        self.threads = stays;
        let gone: BTreeMap<i32, Vec<Breakpoint>> = gone;
        for breakpoints in gone.into_values() {
            for (sum, breakpoint) in self.ended.iter_mut().zip(breakpoints) {
                breakpoint.set(false);
                *sum = sum.saturating_add(breakpoint.read().unwrap_or(0));
            }
        }
    }
}

impl Set {
    /// At these places, as many as a thread has breakpoints at most; on no thread yet.
    pub(in crate::meters::discovery) fn new(addresses: Vec<u64>) -> Self {
        let state = State {
            ended: vec![0; addresses.len()],
            ..State::default()
        };
        Self {
            addresses,
            state: Mutex::new(state),
        }
    }

    fn hold(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Is on these threads from now on, and on no other. One that has ended is passed over.
    ///
    /// # Errors
    /// `Busy` where somebody else has the breakpoints of a thread.
    pub(in crate::meters::discovery) fn be_on(&self, threads: &BTreeSet<i32>) -> Result<(), OpenError> {
        let mut state = self.hold();
        state.leave(|thread| !threads.contains(&thread));
        for thread in threads {
            if state.threads.contains_key(thread) {
                continue;
            }
            let opened: Result<Vec<Breakpoint>, OpenError> = self
                .addresses
                .iter()
                .map(|a| Breakpoint::open(*thread, *a))
                .collect();
            match opened {
                Ok(breakpoints) => {
                    if state.on {
                        for breakpoint in &breakpoints {
                            breakpoint.set(true);
                        }
                    }
                    state.threads.insert(*thread, breakpoints);
                }
                Err(OpenError::Vanished) => {}
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }

    /// On how many threads it is.
    pub(in crate::meters::discovery) fn threads(&self) -> usize {
        self.hold().threads.len()
    }

    /// Counts from now on, or no more.
    pub(in crate::meters::discovery) fn switch(&self, on: bool) {
        let mut state = self.hold();
        state.on = on;
        for breakpoint in state.threads.values().flatten() {
            // One whose thread has ended has nothing to count.
            breakpoint.set(on);
        }
    }

    /// Gives all breakpoints back; what they have counted stays known.
    pub(in crate::meters::discovery) fn close(&self) {
        self.hold().leave(|_| true);
    }

    /// Cumulative hits at each place.
    pub(in crate::meters::discovery) fn read(&self) -> Vec<u64> {
        let state = self.hold();
        let mut sums = state.ended.clone();
        for breakpoints in state.threads.values() {
            for (sum, breakpoint) in sums.iter_mut().zip(breakpoints) {
                *sum = sum.saturating_add(breakpoint.read().unwrap_or(0));
            }
        }
        sums
    }
}

impl Hits for Set {
    fn hits(&self) -> [u64; 2] {
        let read = self.read();
        [0, 1].map(|i| read.get(i).copied().unwrap_or(0))
    }
}

/// Counting some candidates of a search. Its end gives the breakpoints back.
#[derive(Debug)]
pub(in crate::meters::discovery) struct Counted(Arc<Set>);

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.close();
    }
}

/// All that a search has counted, by the number of the candidate.
#[derive(Debug, Default)]
pub(in crate::meters::discovery) struct Sets {
    threads: BTreeSet<i32>,
    sets: Mutex<Vec<(Vec<usize>, Arc<Set>)>>,
}

impl Sets {
    /// On these threads.
    pub(in crate::meters::discovery) fn on(threads: impl Iterator<Item = i32>) -> Self {
        Self {
            threads: threads.collect(),
            sets: Mutex::default(),
        }
    }

    /// Begins to count places by their numbers and addresses. `there`: threads that the process has now.
    ///
    /// # Errors
    /// As of [`Set::be_on`]; `Vanished`: all threads have ended.
    pub(in crate::meters::discovery) fn count(
        &self,
        places: &[(usize, u64)],
        there: &BTreeSet<i32>,
    ) -> Result<Counted, OpenError> {
        let set = Arc::new(Set::new(places.iter().map(|p| p.1).collect()));
        let counted = Counted(Arc::clone(&set));
        // Numbers of threads that have ended may be others' by now.
        set.be_on(&self.threads.intersection(there).copied().collect())?;
        if set.threads() == 0 && !places.is_empty() {
            return Err(OpenError::Vanished);
        }
        set.switch(true);
        let numbers = places.iter().map(|p| p.0).collect();
        self.sets
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push((numbers, set));
        Ok(counted)
    }

    /// Forgets what was counted: the numbers will mean others.
    pub(in crate::meters::discovery) fn renumber(&self) {
        self.sets.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }

    /// Cumulative hits by these numbers.
    pub(in crate::meters::discovery) fn read(&self, numbers: &[usize]) -> Vec<u64> {
        let sets = self.sets.lock().unwrap_or_else(PoisonError::into_inner);
        let mut sums: BTreeMap<usize, u64> = BTreeMap::new();
        for (of, set) in sets.iter() {
            for (number, hits) in of.iter().zip(set.read()) {
                let sum = sums.entry(*number).or_default();
                *sum = sum.saturating_add(hits);
            }
        }
        numbers
            .iter()
            .map(|n| sums.get(n).copied().unwrap_or(0))
            .collect()
    }
}

/// What is counted for trying it out.
#[inline(never)]
fn beat(turns: u64) -> u64 {
    let mut sum = 0;
    for i in 0..black_box(turns) {
        sum = black_box(sum ^ i);
    }
    sum
}

/// CPU time of this thread for a series of calls (seconds).
fn series() -> f64 {
    let clock = || {
        let time = rustix::time::clock_gettime(ClockId::ThreadCPUTime);
        time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
    };
    let function: fn(u64) -> u64 = black_box(beat);
    let begun = clock();
    for _ in 0..CALLS {
        black_box(function(2));
    }
    clock() - begun
}

/// What a hit costs on this machine, in seconds of the program's CPU time; found out once, on ourselves.
///
/// # Errors
/// A sentence: there are no such breakpoints here, or they do not count as they should.
pub fn cost() -> Result<f64, String> {
    if let Some(known) = KNOWN.get() {
        return known.clone();
    }
    match try_on_ourselves() {
        // Somebody has them for a while: it is tried again.
        Err(Trouble { why, passes: true }) => Err(why),
        found => KNOWN.get_or_init(|| found.map_err(|trouble| trouble.why)).clone(),
    }
}

/// Why they cannot be used, and whether that passes.
struct Trouble {
    why: String,
    passes: bool,
}

/// The same, if it has been found out already; else what it is elsewhere.
pub(in crate::meters::discovery) fn known_cost() -> f64 {
    match KNOWN.get() {
        Some(Ok(cost)) => *cost,
        _ => COLD * COST_ELSEWHERE,
    }
}

static KNOWN: OnceLock<Result<f64, String>> = OnceLock::new();

fn try_on_ourselves() -> Result<f64, Trouble> {
    let thread = rustix::thread::gettid().as_raw_nonzero().get();
    let address = black_box(beat as fn(u64) -> u64) as usize as u64;
    let breakpoint = Breakpoint::open(thread, address).map_err(|e| Trouble {
        why: format!(
            "the processor's breakpoints, which code that no file holds is counted with, cannot be used ({e})"
        ),
        passes: matches!(e, OpenError::Busy(_)),
    })?;
    let middle = |mut times: Vec<f64>| {
        times.sort_by(f64::total_cmp);
        times.get(times.len() / 2).copied().unwrap_or(0.0)
    };
    let (mut with, mut without) = (Vec::new(), Vec::new());
    for _ in 0..SERIES {
        without.push(series());
        let before = breakpoint.read().unwrap_or(0);
        breakpoint.set(true);
        with.push(series());
        breakpoint.set(false);
        let hits = breakpoint.read().unwrap_or(0).saturating_sub(before);
        if hits != CALLS {
            return Err(Trouble {
                why: format!(
                    "the processor's breakpoints do not count as they should ({hits} hits of {CALLS})"
                ),
                passes: false,
            });
        }
    }
    let cost = COLD * (middle(with) - middle(without)) / CALLS as f64;
    Ok(cost.clamp(COST_MIN, COST_MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Data: an address that is never executed.
    static NEVER: u64 = 0;

    fn never() -> u64 {
        (&raw const NEVER) as usize as u64
    }

    #[test]
    fn a_set_counts_its_threads_while_it_is_on_and_keeps_what_it_has_counted() {
        if let Err(why) = cost() {
            eprintln!("skipped: {why}");
            return;
        }
        let thread = rustix::thread::gettid().as_raw_nonzero().get();
        let address = black_box(beat as fn(u64) -> u64) as usize as u64;
        let set = Set::new(vec![address, never()]);
        set.be_on(&BTreeSet::from([thread])).unwrap();
        series();
        assert_eq!(set.read(), [0, 0], "not on yet");
        set.switch(true);
        series();
        assert_eq!(set.hits(), [CALLS, 0]);
        set.switch(false);
        series();
        assert_eq!(set.hits(), [CALLS, 0]);
        set.switch(true);
        set.be_on(&BTreeSet::new()).unwrap();
        assert_eq!(set.threads(), 0);
        series();
        assert_eq!(set.read(), [CALLS, 0], "of threads that left it stays known");
        assert!(matches!(
            Breakpoint::open(i32::MAX, address),
            Err(OpenError::Vanished)
        ));
    }

    #[test]
    fn what_a_search_counts_is_added_up_by_number_and_no_more_than_a_thread_has_can_be_taken() {
        if let Err(why) = cost() {
            eprintln!("skipped: {why}");
            return;
        }
        let thread = rustix::thread::gettid().as_raw_nonzero().get();
        let address = black_box(beat as fn(u64) -> u64) as usize as u64;
        let sets = Sets::on([thread, i32::MAX].into_iter());
        let there = BTreeSet::from([thread]);
        for turn in 1..3 {
            let counted = sets.count(&[(7, address), (2, never())], &there).unwrap();
            series();
            drop(counted);
            series();
            assert_eq!(sets.read(&[2, 7, 5]), [0, turn * CALLS, 0]);
        }
        let taken: Vec<Breakpoint> = (0..PER_THREAD as u64)
            .map(|i| Breakpoint::open(thread, never() + i).unwrap())
            .collect();
        assert!(matches!(
            sets.count(&[(1, address)], &there),
            Err(OpenError::Busy(_))
        ));
        drop(taken);
        assert!(sets.count(&[(1, address)], &there).is_ok(), "given back at once");
    }
}
