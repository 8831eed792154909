//! Before anybody else's program is looked into, a function of our own is counted: whether this kernel counts as it should,
//! and what a hit costs on this machine.

use super::super::code_file::{CodeFile, mappings};
use super::super::common::start_ticks;
use super::image::Image;
use crate::Root;
use crate::sys::bpf::Counters;
use crate::sys::perf::OpenError;
use homeostat_model::ProcessId;
use homeostat_points::HIT_COST;
use homeostat_points::code::{Candidate, Function, Surroundings};
use rustix::time::ClockId;
use std::hint::black_box;
use std::sync::{Mutex, PoisonError};

/// Calls of our function in one series.
const CALLS: u64 = 500;
/// Series with and without a probe, of which the middle one counts.
const SERIES: usize = 5;
/// Most places of our function that are tried.
const TRIES: usize = 4;
/// What a hit costs in a program that has more to do than ours: its caches hold other things than the kernel's way through
/// a probe, which our loop never leaves.
const COLD: f64 = 1.25;
/// Bounds of what is believed of a hit's cost (seconds).
const COST_MIN: f64 = 0.1e-6;
const COST_MAX: f64 = 50e-6;

/// The cost of a hit, once it is known; a lack of memory or descriptors is not remembered.
static KNOWN: Mutex<Option<Result<f64, String>>> = Mutex::new(None);

/// What a hit costs here, in seconds of the program's CPU time.
///
/// # Errors
/// A sentence: this kernel or this user cannot count so, or it does not count as it should.
pub(super) fn rehearse() -> Result<f64, String> {
    let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(known) = known.as_ref() {
        return known.clone();
    }
    match try_on_ourselves() {
        Ok(cost) => {
            *known = Some(Ok(cost));
            Ok(cost)
        }
        Err(Trouble::Now(why)) => Err(why),
        Err(Trouble::Always(why)) => {
            *known = Some(Err(why.clone()));
            Err(why)
        }
    }
}

/// The cost, if a search has found it out already.
pub(super) fn known_cost() -> f64 {
    let known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    match known.as_ref() {
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

fn try_on_ourselves() -> Result<f64, Trouble> {
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
        match cost_at(&counters, &image.file, offset) {
            Ok(cost) => return Ok(cost),
            Err(Trouble::Always(reason)) => why = reason,
            Err(now) => return Err(now),
        }
    }
    Err(never(why))
}

/// Counts one place of [`beat`]: in twice as many calls there must be twice as many hits, to the last one.
fn cost_at(counters: &Counters, file: &CodeFile, offset: u64) -> Result<f64, Trouble> {
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
    let probed = middle((0..SERIES).map(|_| series(CALLS)).collect());
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
    let image = Image::new(CodeFile::own()?, mapping.device_inode, "homeostat".to_owned())?;
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
        let cost = rehearse().unwrap();
        assert!((COST_MIN..=COST_MAX).contains(&cost));
        assert_eq!(known_cost(), cost);
        assert_eq!(rehearse(), Ok(cost), "it is not done again");
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
