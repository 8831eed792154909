//! Before anybody else's program is looked into, a function of our own is counted: whether this kernel counts as it should,
//! and what a hit costs on this machine.

use super::super::code_file::{CodeFile, mappings};
use super::super::common::{numbers_in, open_process, start_ticks};
use super::image::Image;
use crate::Root;
use crate::sys::bpf::Counters;
use crate::sys::perf::OpenError;
use homeostat_model::ProcessId;
use homeostat_points::HIT_COST;
use homeostat_points::code::{Candidate, Function, Surroundings};
use rustix::time::ClockId;
use std::collections::BTreeMap;
use std::hint::black_box;
use std::num::NonZero;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Calls of our function in one series.
const CALLS: u64 = 500;
/// Series with and without a probe, of which the middle one counts.
const SERIES: usize = 5;
/// Most places of our function that are tried.
const TRIES: usize = 4;
/// What a hit costs in a program that has more to do than ours: its caches hold other things than the kernel's way through
/// a probe, which our loop never leaves.
const COLD: f64 = 1.25;
/// Bounds of what is believed of a hit's cost (seconds). The lower one is what it costs at least where a program's caches hold
/// other things (measured: 0.6 to 0.8 µs), however fast our own loop is.
const COST_MIN: f64 = 0.7e-6;
const COST_MAX: f64 = 50e-6;
/// Threads that are rehearsed with at most: on many CPUs at once the kernel's own locks are what a hit costs.
const THREADS_MAX: usize = 16;
/// Longest wait of those threads for each other; a machine that cannot run them by then is too busy to be measured.
const START_MAX: Duration = Duration::from_secs(5);

/// The cost of a hit by the number of threads that hit at once, once it is known; a lack of memory or descriptors is not
/// remembered.
static KNOWN: Mutex<BTreeMap<usize, Result<f64, String>>> = Mutex::new(BTreeMap::new());

/// How many threads of these processes can hit places at once: as many as there are CPUs, at most [`THREADS_MAX`].
pub(super) fn threads_of(root: &Root, processes: &[ProcessId]) -> usize {
    let cpus = std::thread::available_parallelism().map_or(1, NonZero::get);
    let most = cpus.min(THREADS_MAX);
    let mut threads = 0;
    for process in processes {
        let of_it = open_process(root, *process)
            .ok()
            .and_then(|dir| numbers_in(&dir, "task", most).ok());
        threads += of_it.map_or(1, |t| t.0.len());
    }
    threads.clamp(1, most)
}

/// What a hit costs here when so many threads hit at once, in seconds of the program's CPU time.
///
/// # Errors
/// A sentence: this kernel or this user cannot count so, or it does not count as it should.
pub(super) fn rehearse(threads: usize) -> Result<f64, String> {
    let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(known) = known.get(&threads) {
        return known.clone();
    }
    match try_on_ourselves(threads) {
        Ok(cost) => {
            known.insert(threads, Ok(cost));
            Ok(cost)
        }
        Err(Trouble::Now(why)) => Err(why),
        Err(Trouble::Always(why)) => {
            known.insert(threads, Err(why.clone()));
            Err(why)
        }
    }
}

/// The cost with so many threads, if a search has found it out already.
pub(super) fn known_cost(threads: usize) -> f64 {
    let known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    match known.get(&threads) {
        Some(Ok(cost)) => *cost,
        _ => HIT_COST,
    }
}

enum Trouble {
    Now(String),
    Always(String),
}

/// What is counted: a loop with a jump back, that no compiler removes.
#[inline(never)]
fn beat(turns: u64) -> u64 {
    let mut sum = 0;
    for i in 0..black_box(turns) {
        sum = black_box(sum ^ i);
    }
    sum
}

/// CPU time of this thread in seconds.
fn clock() -> f64 {
    let time = rustix::time::clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

/// The CPU time of a series, the mean over so many threads that run theirs at once: the middle one of several.
fn together(threads: usize) -> Result<f64, Trouble> {
    let ready = AtomicUsize::new(0);
    let meet = |turn: usize| {
        ready.fetch_add(1, Ordering::SeqCst);
        let begun = Instant::now();
        while ready.load(Ordering::SeqCst) < turn * threads {
            if begun.elapsed() > START_MAX {
                return false;
            }
            std::thread::yield_now();
        }
        true
    };
    let run = || {
        let turn = |turn| meet(turn).then(|| series(CALLS));
        (1..=SERIES).map(turn).collect::<Option<Vec<f64>>>()
    };
    let times: Option<Vec<Vec<f64>>> = std::thread::scope(|scope| {
        let others: Vec<_> = (1..threads)
            .map(|_| {
                std::thread::Builder::new()
                    .stack_size(128 * 1024)
                    .spawn_scoped(scope, run)
            })
            .collect();
        // One that could not be made is waited for in vain by the others, for as long as they wait.
        let own = run();
        let theirs = others.into_iter().map(|thread| thread.ok()?.join().ok()?);
        std::iter::once(own).chain(theirs).collect()
    });
    let times = times.ok_or_else(|| {
        Trouble::Now(format!(
            "the machine is too busy to run {threads} threads at once; it is tried again later"
        ))
    })?;
    let of_series = |i: usize| times.iter().filter_map(|t| t.get(i)).sum::<f64>() / times.len() as f64;
    Ok(middle((0..SERIES).map(of_series).collect()))
}

/// Calls of [`beat`], and the CPU time that they took.
fn series(calls: u64) -> f64 {
    let function: fn(u64) -> u64 = black_box(beat);
    let begun = clock();
    for _ in 0..calls {
        black_box(function(2));
    }
    clock() - begun
}

fn middle(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times.get(times.len() / 2).copied().unwrap_or(0.0)
}

fn try_on_ourselves(threads: usize) -> Result<f64, Trouble> {
    let never = |why: String| {
        Trouble::Always(format!(
            "a place in homeostat's own code could not be counted ({why})"
        ))
    };
    let (image, candidates) = own_places().map_err(never)?;
    let counters = Counters::new(1).map_err(|e| trouble(&e))?;
    let mut why = "none of its instructions can be counted".to_owned();
    for candidate in candidates.into_iter().take(TRIES) {
        let Some(offset) = image.offset(candidate.address) else {
            continue;
        };
        match cost_at(&counters, &image.file, offset, threads) {
            Ok(cost) => return Ok(cost),
            Err(Trouble::Always(reason)) => why = reason,
            Err(now) => return Err(now),
        }
    }
    Err(never(why))
}

/// Counts one place of [`beat`]: in twice as many calls there must be twice as many hits, to the last one.
fn cost_at(counters: &Counters, file: &CodeFile, offset: u64, threads: usize) -> Result<f64, Trouble> {
    let own = i32::try_from(std::process::id()).map_err(|e| Trouble::Always(e.to_string()))?;
    let count = || counters.read(0).map_err(|e| Trouble::Now(e.to_string()));
    let alone = middle((0..SERIES).map(|_| series(CALLS)).collect());
    let link = counters
        .attach(file.kernel_path(), &[(offset, 0)], Some(own))
        .map_err(|e| trouble(&e))?;
    let start = count()?;
    series(CALLS);
    let once = count()?.saturating_sub(start);
    series(2 * CALLS);
    let twice = count()?.saturating_sub(start).saturating_sub(once);
    let probed = together(threads)?;
    drop(link);
    let behind = count()?;
    series(CALLS);
    let after = count()?.saturating_sub(behind);
    if once < CALLS || twice != 2 * once || after != 0 {
        return Err(Trouble::Always(format!(
            "in {CALLS}, {} and, when it was over, {CALLS} calls {once}, {twice} and {after} hits were counted",
            2 * CALLS
        )));
    }
    // A call hits the place more than once, if it lies in the loop.
    Ok(((probed - alone) / once as f64 * COLD).clamp(COST_MIN, COST_MAX))
}

fn trouble(e: &OpenError) -> Trouble {
    let why = super::search::refusal(e);
    match e {
        OpenError::Busy(_) | OpenError::Vanished => Trouble::Now(why),
        OpenError::Denied(_) | OpenError::Unsupported(_) => Trouble::Always(why),
    }
}

/// What may be counted of [`beat`], the surest first.
fn own_places() -> Result<(Image, Vec<Candidate>), String> {
    let stat = std::fs::read("/proc/self/stat").map_err(|e| format!("/proc/self/stat: {e}"))?;
    let process = ProcessId {
        pid: i32::try_from(std::process::id()).map_err(|e| e.to_string())?,
        start_ticks: start_ticks(&stat).ok_or("/proc/self/stat is not understood")?,
    };
    let address = beat as fn(u64) -> u64 as usize as u64;
    let mapping = mappings(&Root::default(), process)
        .into_iter()
        .find(|m| (m.start..m.end).contains(&address))
        .ok_or("its mapping is not to be seen")?;
    let image = Image::new(
        CodeFile::own()?,
        mapping.device_inode,
        &mapping.path,
        "homeostat".to_owned(),
    )?;
    let place = (address - mapping.start)
        .checked_add(mapping.offset)
        .and_then(|offset| image.address(offset))
        .ok_or("its place in the file is not to be seen")?;
    let start = image
        .function(place)
        .ok_or("the file does not tell where it begins")?;
    let code = image.code(start).ok_or("its code cannot be read")?;
    let known = Surroundings {
        begins: &|a| image.begins(a),
        seen: &[],
        calls: false,
    };
    let function = Function::decode(start, &code, &known).ok_or("its code cannot be taken apart")?;
    let mut found: Vec<Candidate> = (start..start.saturating_add(code.len() as u64))
        .filter(|at| function.is_boundary(*at))
        .flat_map(|at| function.around(at, false))
        .collect();
    found.sort_unstable();
    found.dedup_by_key(|c| c.address);
    Ok((image, found))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_function_of_ours_can_be_taken_apart() {
        if !cfg!(target_arch = "x86_64") {
            println!("skipped: code of x86-64 only");
            return;
        }
        let (image, found) = own_places().unwrap();
        assert!(!found.is_empty());
        assert!(
            found
                .iter()
                .all(|c| c.certain && image.offset(c.address).is_some())
        );
    }

    #[test]
    fn what_a_hit_costs_is_found_out_on_ourselves_and_nothing_is_left() {
        let (image, found) = match own_places() {
            Ok(own) => own,
            Err(why) => {
                println!("skipped: {why}");
                return;
            }
        };
        if let Err(e) = Counters::new(1).and_then(|c| c.reliable()) {
            println!("skipped: this kernel or this user cannot count many places ({e})");
            return;
        }
        let cost = rehearse(1).unwrap();
        assert!((COST_MIN..=COST_MAX).contains(&cost));
        assert_eq!(known_cost(1), cost);
        assert_eq!(rehearse(1), Ok(cost), "it is not done again");
        // On a machine that is too busy for two threads at once there is a sentence, and no cost.
        match rehearse(2) {
            Ok(cost) => assert!((COST_MIN..=COST_MAX).contains(&cost)),
            Err(why) => assert!(why.contains("busy"), "{why}"),
        }
        assert_eq!(known_cost(1), cost);
        let memory = std::fs::read("/proc/self/stat").ok().and_then(|stat| {
            let process = ProcessId {
                pid: std::process::id() as i32,
                start_ticks: start_ticks(&stat)?,
            };
            super::super::place::Patched::look(&Root::default(), process).ok()
        });
        let memory = memory.unwrap();
        for candidate in found {
            let offset = image.offset(candidate.address).unwrap();
            assert!(memory.agrees(&image.file, &image.device_inode, offset, &[]));
        }
    }
}
