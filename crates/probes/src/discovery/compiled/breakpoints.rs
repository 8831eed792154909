//! Hardware breakpoints on threads at a few addresses, and their cost here: per hit, and per run of such a thread.

use crate::turns::Urgent;
use homeostat_kernel::breakpoints::{Breakpoint, PER_THREAD};
use homeostat_kernel::perf::OpenError;
use homeostat_sensors::storage::Refusal;
use rustix::thread::CpuSet;
use rustix::time::ClockId;
use std::collections::{BTreeMap, BTreeSet};
use std::hint::black_box;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

pub(crate) const PLACES_MAX: usize = PER_THREAD;
/// Calls of our own function per series, and number of series with and without a breakpoint.
const CALLS: u64 = 500;
const SERIES: usize = 7;
/// Factor for a real program, with more in its caches than ours.
const COLD: f64 = 1.25;
/// Cost of a hit (seconds): measured in a virtual machine, lower bound, and the limit above which nothing is counted.
const COST_ELSEWHERE: f64 = 8.5e-6;
const COST_MIN: f64 = 1e-6;
const COST_MAX: f64 = 200e-6;
/// Validity of a measured cost. In a virtual machine the host handles each hit, and the cost moved between 8 and 25 µs
/// within hours. A measurement takes about 30 to 90 ms of our CPU time, plus at most 0.4 s for context switches.
const FRESH: Duration = Duration::from_secs(600);
/// Validity of a failure or an excessive cost. A lost site is searched again only later than that.
const FRESH_TROUBLE: Duration = Duration::from_secs(60);
/// Failures needed to discard a known cost, and their distance, so that a noisy half minute discards nothing.
const TROUBLES_MAX: u32 = 3;
const TROUBLES_APART: Duration = Duration::from_secs(20);
/// After this time, the series so far must do.
const SERIES_TIME: Duration = Duration::from_millis(200);
/// Breakpoints per thread while context switches are measured: a site and its witness.
const SWITCHED: usize = 2;
/// Switches of a thread per series, and the time limit of all series.
const ROUNDS: usize = 200;
const ROUNDS_TIME: Duration = Duration::from_millis(400);
/// Fewest series of each kind.
const SERIES_MIN: usize = 3;
/// Cost of a context switch with two breakpoints (seconds): default (2.2 to 3.2 µs in a virtual machine), lower bound.
const SWITCH_ELSEWHERE: f64 = 3e-6;
const SWITCH_MIN: f64 = 0.3e-6;

/// Breakpoints at the same addresses on each of some threads.
#[derive(Debug)]
pub(crate) struct Set {
    addresses: Vec<u64>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    on: bool,
    threads: BTreeMap<i32, Vec<Placed>>,
    /// Hits at each address of threads that are no longer counted.
    ended: Vec<u64>,
    /// A breakpoint could not be read since the threads were last set.
    unread: bool,
}

#[derive(Debug)]
struct Placed {
    breakpoint: Breakpoint,
    last: Last,
}

/// Last reading of a breakpoint. A failed reading is not a count of zero.
#[derive(Debug, Default)]
struct Last(u64);

impl Last {
    /// Notes a reading. False: it failed, and the old value stays.
    fn note<E>(&mut self, read: Result<u64, E>) -> bool {
        match read {
            Ok(hits) => {
                self.0 = hits;
                true
            }
            Err(_) => false,
        }
    }
}

impl State {
    fn leave(&mut self, gone: impl Fn(i32) -> bool) {
        let (gone, stays) = std::mem::take(&mut self.threads)
            .into_iter()
            .partition(|(thread, _)| gone(*thread));
        self.threads = stays;
        let gone: BTreeMap<i32, Vec<Placed>> = gone;
        for placed in gone.into_values() {
            for (sum, mut placed) in self.ended.iter_mut().zip(placed) {
                placed.breakpoint.set(false);
                self.unread |= !placed.last.note(placed.breakpoint.read());
                *sum = sum.saturating_add(placed.last.0);
            }
        }
    }
}

impl Set {
    /// At these addresses, at most as many as a thread has breakpoints. On no thread yet.
    pub(crate) fn new(addresses: Vec<u64>) -> Self {
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

    /// Attaches to exactly these threads. Skips ended ones.
    ///
    /// # Errors
    /// `Busy`: somebody else uses the breakpoints of a thread.
    pub(crate) fn be_on(&self, threads: &BTreeSet<i32>) -> Result<(), OpenError> {
        let mut state = self.hold();
        state.leave(|thread| !threads.contains(&thread));
        state.unread = false;
        for thread in threads {
            if state.threads.contains_key(thread) {
                continue;
            }
            let place = |address: &u64| {
                let breakpoint = Breakpoint::open(*thread, *address)?;
                let last = Last::default();
                Ok(Placed { breakpoint, last })
            };
            let opened: Result<Vec<Placed>, OpenError> = self.addresses.iter().map(place).collect();
            match opened {
                Ok(all) => {
                    if state.on {
                        for placed in &all {
                            placed.breakpoint.set(true);
                        }
                    }
                    state.threads.insert(*thread, all);
                }
                Err(OpenError::Vanished) => {}
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }

    pub(crate) fn threads(&self) -> BTreeSet<i32> {
        self.hold().threads.keys().copied().collect()
    }

    /// Whether a breakpoint could not be read since the threads were last set.
    pub(crate) fn is_unread(&self) -> bool {
        self.hold().unread
    }

    pub(crate) fn switch(&self, on: bool) {
        let mut state = self.hold();
        state.on = on;
        for placed in state.threads.values().flatten() {
            // Failure means an ended thread, which has nothing to count.
            placed.breakpoint.set(on);
        }
    }

    /// Frees all breakpoints and keeps their counts.
    pub(crate) fn close(&self) {
        self.hold().leave(|_| true);
    }

    /// Cumulative hits at each address, as far as readable.
    pub(crate) fn read(&self) -> Vec<u64> {
        let mut state = self.hold();
        let State {
            threads,
            ended,
            unread,
            ..
        } = &mut *state;
        let mut sums = ended.clone();
        for all in threads.values_mut() {
            for (sum, placed) in sums.iter_mut().zip(all) {
                *unread |= !placed.last.note(placed.breakpoint.read());
                *sum = sum.saturating_add(placed.last.0);
            }
        }
        sums
    }
}

/// A count of some candidates. Dropping it frees the breakpoints.
#[derive(Debug)]
pub(crate) struct Counted(Arc<Set>);

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.close();
    }
}

/// All counts of a search, by candidate number.
#[derive(Debug, Default)]
pub(crate) struct Sets {
    threads: BTreeSet<i32>,
    sets: Mutex<Vec<(Vec<usize>, Arc<Set>)>>,
}

impl Sets {
    pub(crate) fn on(threads: impl Iterator<Item = i32>) -> Self {
        Self {
            threads: threads.collect(),
            sets: Mutex::default(),
        }
    }

    pub(crate) fn threads(&self) -> impl Iterator<Item = i32> + '_ {
        self.threads.iter().copied()
    }

    /// Begins to count addresses by candidate number. `there`: present threads of the process.
    ///
    /// # Errors
    /// As of [`Set::be_on`]. `Vanished`: all threads have ended.
    pub(crate) fn count(&self, places: &[(usize, u64)], there: &BTreeSet<i32>) -> Result<Counted, OpenError> {
        let set = Arc::new(Set::new(places.iter().map(|p| p.1).collect()));
        let counted = Counted(Arc::clone(&set));
        // The id of an ended thread may belong to another process by now.
        set.be_on(&self.threads.intersection(there).copied().collect())?;
        if set.threads().is_empty() && !places.is_empty() {
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

    /// Forgets the counts, because the numbers get another meaning.
    pub(crate) fn renumber(&self) {
        self.sets.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }

    /// Cumulative hits by candidate number.
    pub(crate) fn read(&self, numbers: &[usize]) -> Vec<u64> {
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

/// The function on which breakpoints are tested.
#[inline(never)]
fn beat(turns: u64) -> u64 {
    let mut sum = 0;
    for i in 0..black_box(turns) {
        sum = black_box(sum ^ i);
    }
    sum
}

/// CPU time of this thread (seconds).
fn clock() -> f64 {
    let time = rustix::time::clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

fn series() -> f64 {
    let function: fn(u64) -> u64 = black_box(beat);
    let begun = clock();
    for _ in 0..CALLS {
        black_box(function(2));
    }
    clock() - begun
}

/// Cost of a hit here, in seconds of the program's CPU time: the last measurement, or a new one on this process.
///
/// # Errors
/// A sentence: hardware breakpoints are missing here, or count wrongly.
pub fn cost() -> Result<f64, String> {
    let last = known().as_ref().map(|known| known.costs.clone());
    last.unwrap_or_else(costs)
        .map(|costs| costs.hit)
        .map_err(|trouble| trouble.why)
}

/// The same, for a search.
///
/// # Errors
/// A sentence, and whether the reason may pass.
pub(crate) fn rehearse() -> Result<f64, Refusal> {
    Ok(costs()?.hit)
}

/// The same, for a running count. `None`: another thread is measuring, without a wait for it.
///
/// # Errors
/// As above.
pub(crate) fn cost_now() -> Result<Option<f64>, Refusal> {
    let measuring = match MEASURING.try_lock() {
        Ok(measuring) => measuring,
        Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
        Err(TryLockError::WouldBlock) => return Ok(None),
    };
    Ok(Some(costs_by(&measuring)?.hit))
}

fn costs() -> Result<Costs, Trouble> {
    // Other callers wait for this measurement. Readers of the known cost do not.
    costs_by(&MEASURING.lock().unwrap_or_else(PoisonError::into_inner))
}

fn costs_by(_measuring: &MutexGuard<'_, ()>) -> Result<Costs, Trouble> {
    let before = known().clone();
    let (now, costs) = asked(before, Instant::now(), try_on_ourselves);
    *known() = now;
    costs
}

#[derive(Clone, Debug)]
struct Measured {
    at: Instant,
    costs: Result<Costs, Trouble>,
    /// Number of failures since then, and the time of the last.
    troubles: Option<(u32, Instant)>,
}

impl Measured {
    fn holds(&self, at: Instant) -> bool {
        let (since, fresh) = match (&self.costs, self.troubles) {
            (Ok(_), None) => (self.at, FRESH),
            (Ok(_), Some((_, last))) => (last, TROUBLES_APART),
            (Err(_), _) => (self.at, FRESH_TROUBLE),
        };
        at.saturating_duration_since(since) < fresh
    }

    fn troubles_now(&self) -> u32 {
        self.troubles.map_or(0, |(before, _)| before) + 1
    }
}

/// New state and answer after a request at this moment.
fn asked(
    before: Option<Measured>,
    at: Instant,
    measure: impl FnOnce() -> Result<Costs, Trouble>,
) -> (Option<Measured>, Result<Costs, Trouble>) {
    let found = match (before, measure) {
        (Some(known), _) if known.holds(at) => known,
        (before, measure) => match (before, measure()) {
            // Another user has the breakpoints for a while: the known cost stays, and a retry follows.
            (None, Err(trouble)) if trouble.passes => return (None, Err(trouble)),
            (Some(known), Err(trouble)) if trouble.passes => known,
            (Some(known), Err(_)) if known.costs.is_ok() && known.troubles_now() < TROUBLES_MAX => Measured {
                troubles: Some((known.troubles_now(), at)),
                ..known
            },
            (_, costs) => Measured {
                at,
                costs,
                troubles: None,
            },
        },
    };
    let costs = found.costs.clone();
    (Some(found), costs)
}

/// Seconds of the program's CPU time.
#[derive(Clone, Copy, Debug)]
struct Costs {
    hit: f64,
    /// Per context switch of a thread with two breakpoints.
    switch: f64,
}

#[derive(Clone, Debug)]
struct Trouble {
    why: String,
    passes: bool,
}

impl From<Trouble> for Refusal {
    fn from(trouble: Trouble) -> Self {
        if trouble.passes {
            Self::Now(trouble.why)
        } else {
            Self::Lasting(trouble.why)
        }
    }
}

/// The known cost of a hit, or the default.
pub(crate) fn known_cost() -> f64 {
    last_known().map_or(COLD * COST_ELSEWHERE, |costs| costs.hit)
}

/// Cost of a context switch with this many breakpoints (seconds of CPU time, partly of the next thread).
pub(crate) fn switch_cost(breakpoints: usize) -> f64 {
    let of_two = last_known().map_or(COLD * SWITCH_ELSEWHERE, |costs| costs.switch);
    of_two * breakpoints.max(SWITCHED) as f64 / SWITCHED as f64
}

/// Held for a moment only.
static KNOWN: Mutex<Option<Measured>> = Mutex::new(None);
/// Held by the thread that measures.
static MEASURING: Mutex<()> = Mutex::new(());

fn known() -> MutexGuard<'static, Option<Measured>> {
    KNOWN.lock().unwrap_or_else(PoisonError::into_inner)
}

fn last_known() -> Option<Costs> {
    known().as_ref()?.costs.as_ref().ok().copied()
}

fn middle(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times.get(times.len() / 2).copied().unwrap_or(0.0)
}

fn try_on_ourselves() -> Result<Costs, Trouble> {
    let thread = rustix::thread::gettid().as_raw_nonzero().get();
    let address = black_box(beat as fn(u64) -> u64) as usize as u64;
    let breakpoint = Breakpoint::open(thread, address).map_err(|e| Trouble {
        why: format!(
            "the processor's breakpoints, which code that no file holds is counted with, cannot be used ({e})"
        ),
        passes: matches!(e, OpenError::Busy(_)),
    })?;
    let (mut with, mut without) = (Vec::new(), Vec::new());
    let begun = Instant::now();
    for number in 0..SERIES {
        if number >= SERIES_MIN && begun.elapsed() > SERIES_TIME {
            break;
        }
        without.push(series());
        let read = || {
            breakpoint.read().map_err(|e| Trouble {
                why: format!("the processor's breakpoints cannot be read ({e})"),
                passes: true,
            })
        };
        let before = read()?;
        if !breakpoint.set(true) {
            return Err(Trouble {
                why: "the processor's breakpoints cannot be put on".to_owned(),
                passes: true,
            });
        }
        with.push(series());
        breakpoint.set(false);
        let hits = read()?.saturating_sub(before);
        if hits != CALLS {
            return Err(Trouble {
                why: format!(
                    "the processor's breakpoints do not count as they should ({hits} hits of {CALLS})"
                ),
                passes: false,
            });
        }
    }
    let hit = believed(COLD * (middle(with) - middle(without)) / CALLS as f64)?;
    // A CPU too busy for the measurement is no reason to lower the charge.
    let untold = || {
        last_known()
            .map_or(0.0, |costs| costs.switch)
            .max(COLD * SWITCH_ELSEWHERE)
    };
    let switch = switching().map_or_else(untold, |switch| COLD * switch.max(SWITCH_MIN));
    Ok(Costs { hit, switch })
}

/// The accepted cost of a hit.
///
/// # Errors
/// Above the limit: a lower charge would exceed the budget.
fn believed(cost: f64) -> Result<f64, Trouble> {
    if cost > COST_MAX {
        return Err(Trouble {
            why: format!(
                "a hit of the processor's breakpoints costs {:.0} µs here, too much to count with (limit {:.0} µs)",
                cost * 1e6,
                COST_MAX * 1e6
            ),
            passes: false,
        });
    }
    Ok(cost.max(COST_MIN))
}

/// Measures a context switch of a thread with breakpoints that are never hit (seconds of CPU time). Two threads on one
/// CPU exchange a byte, and one of them has breakpoints or not. `None`: impossible, or the CPU is too busy.
fn switching() -> Option<f64> {
    let (one, other) = UnixStream::pair().ok()?;
    for end in [&one, &other] {
        end.set_read_timeout(Some(ROUNDS_TIME)).ok()?;
    }
    let cpu = rustix::thread::sched_getcpu();
    let thread = || std::thread::Builder::new().stack_size(128 * 1024);
    std::thread::scope(|scope| {
        let _answering = thread().spawn_scoped(scope, move || answer(other, cpu)).ok()?;
        thread()
            .spawn_scoped(scope, move || ask(one, cpu))
            .ok()?
            .join()
            .ok()?
    })
}

fn stay_on(cpu: usize) -> Option<()> {
    let mut set = CpuSet::new();
    (cpu < CpuSet::MAX_CPU).then(|| set.set(cpu))?;
    rustix::thread::sched_setaffinity(None, &set).ok()
}

/// Answers each byte with the CPU time of this thread, until the peer closes.
fn answer(mut stream: UnixStream, cpu: usize) {
    let _urgent = Urgent::begin();
    if stay_on(cpu).is_none() {
        return;
    }
    while stream.read_exact(&mut [0]).is_ok() && stream.write_all(&clock().to_ne_bytes()).is_ok() {}
}

/// The measuring side of [`switching`].
fn ask(mut stream: UnixStream, cpu: usize) -> Option<f64> {
    let _urgent = Urgent::begin();
    stay_on(cpu)?;
    let thread = rustix::thread::gettid().as_raw_nonzero().get();
    // This thread never runs the function, and the other address is data.
    let never = [
        beat as fn(u64) -> u64 as usize as u64,
        (&raw const KNOWN) as usize as u64,
    ];
    let breakpoints: Vec<Breakpoint> = never
        .iter()
        .take(SWITCHED)
        .map(|address| Breakpoint::open(thread, *address).ok())
        .collect::<Option<_>>()?;
    let begun = Instant::now();
    let mut round = || {
        let mut clock_of_other = [0; 8];
        stream.write_all(&[0]).ok()?;
        stream.read_exact(&mut clock_of_other).ok()?;
        (begun.elapsed() < ROUNDS_TIME).then(|| f64::from_ne_bytes(clock_of_other) + clock())
    };
    // CPU time of both threads, because the next thread pays for unloading the breakpoints.
    let mut series = |on: bool| {
        for breakpoint in &breakpoints {
            breakpoint.set(on);
        }
        let first = round()?;
        (1..ROUNDS).try_for_each(|_| round().map(drop))?;
        Some(round()? - first)
    };
    let (mut with, mut without) = (Vec::new(), Vec::new());
    for _ in 0..SERIES {
        let (Some(off), Some(on)) = (series(false), series(true)) else {
            break;
        };
        without.push(off);
        with.push(on);
    }
    let enough = with.len() >= SERIES_MIN;
    enough.then(|| (middle(with) - middle(without)) / ROUNDS as f64)
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
        assert_eq!(set.read(), [CALLS, 0]);
        set.switch(false);
        series();
        assert_eq!(set.read(), [CALLS, 0]);
        set.switch(true);
        set.be_on(&BTreeSet::new()).unwrap();
        assert!(set.threads().is_empty() && !set.is_unread());
        series();
        assert_eq!(set.read(), [CALLS, 0], "of threads that left it stays known");
        assert!(matches!(
            Breakpoint::open(i32::MAX, address),
            Err(OpenError::Vanished)
        ));
    }

    #[test]
    fn what_a_hit_costs_is_found_out_anew_after_a_while() {
        let of = |hit| Costs { hit, switch: 1e-6 };
        let trouble = |passes| Trouble {
            why: "why".into(),
            passes,
        };
        let begun = Instant::now();
        let after = |seconds| begun + Duration::from_secs(seconds);
        let never = || -> Result<Costs, Trouble> { panic!("measured though it is known") };

        // Somebody has them: nothing is remembered.
        let (known, costs) = asked(None, begun, || Err(trouble(true)));
        assert!(known.is_none() && costs.is_err());

        let (known, costs) = asked(known, begun, || Ok(of(8e-6)));
        assert_eq!(costs.map(|c| c.hit).ok(), Some(8e-6));
        let (known, costs) = asked(known, after(599), never);
        assert_eq!(costs.map(|c| c.hit).ok(), Some(8e-6));

        // Somebody has them now: what was known holds, and the next time it is tried again.
        let (known, costs) = asked(known, after(600), || Err(trouble(true)));
        assert_eq!(costs.map(|c| c.hit).ok(), Some(8e-6));
        let (known, costs) = asked(known, after(601), || Ok(of(25e-6)));
        assert_eq!(costs.map(|c| c.hit).ok(), Some(25e-6));

        // One moment in which it is too dear takes back nothing, and is looked at again soon.
        let (known, costs) = asked(known, after(1_300), || Err(trouble(false)));
        assert_eq!(costs.map(|c| c.hit).ok(), Some(25e-6));
        let (known, costs) = asked(known, after(1_319), never);
        assert_eq!(costs.map(|c| c.hit).ok(), Some(25e-6));
        let (known, costs) = asked(known, after(1_320), || Ok(of(30e-6)));
        assert_eq!(costs.map(|c| c.hit).ok(), Some(30e-6));
        let (mut known, _) = asked(known, after(1_345), never);
        for time in 1..TROUBLES_MAX {
            let (now, costs) = asked(known, after(2_000 + 20 * u64::from(time)), || Err(trouble(false)));
            assert!(costs.is_ok());
            known = now;
        }
        let (known, costs) = asked(known, after(2_060), || Err(trouble(false)));
        assert!(costs.is_err());
        // Nor is it too dear for ever.
        let (known, costs) = asked(known, after(2_119), never);
        assert!(costs.is_err());
        let (_, costs) = asked(known, after(2_120), || Ok(of(9e-6)));
        assert_eq!(costs.map(|c| c.hit).ok(), Some(9e-6));
    }

    #[test]
    fn what_cannot_be_read_has_not_counted_nothing() {
        let mut last = Last::default();
        assert!(last.note::<()>(Ok(7)));
        assert!(!last.note(Err(())));
        assert_eq!(last.0, 7);
    }

    #[test]
    fn a_hit_that_costs_more_than_it_is_worth_is_not_charged_as_less() {
        assert_eq!(believed(8.5e-6).ok(), Some(8.5e-6));
        assert_eq!(believed(-1e-6).ok(), Some(COST_MIN));
        let trouble = believed(300e-6).unwrap_err();
        assert!(trouble.why.contains("300 µs"), "{}", trouble.why);
        assert!(matches!(Refusal::from(trouble), Refusal::Lasting(_)));
        // Somebody has them for a while: that is no reason to rest for an hour.
        let busy = Trouble {
            why: "busy".to_owned(),
            passes: true,
        };
        assert_eq!(Refusal::from(busy), Refusal::Now("busy".to_owned()));
    }

    #[test]
    fn what_a_switch_costs_is_measured_or_assumed() {
        if let Err(why) = cost() {
            eprintln!("skipped: {why}");
            return;
        }
        eprintln!("{:?}", switching().map(|seconds| seconds * 1e6));
        let two = switch_cost(SWITCHED);
        assert!((COLD * SWITCH_MIN..1e-3).contains(&two), "{two}");
        assert_eq!(switch_cost(PLACES_MAX), 2.0 * two);
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
