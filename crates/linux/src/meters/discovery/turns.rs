//! The turns in which a point is counted: on all the time, or on for a part of each.
//!
//! What it costs is measured in every turn (hits on both places, for as long as the probes were really there, times what a hit
//! costs here) and held against all of the program's CPU time in the turn; the share of the next turn follows from that. So
//! the limit holds when the program's rate moves, too. A turn in which far more is hit than was expected is ended early.

use super::super::code_file::executable;
use super::active::{DUTY_MIN, Lost, failed};
use super::place::{Patched, Place};
use super::search::Found;
use super::strangers::{Strangers, standing_still, status};
use crate::Root;
use crate::sys::bpf::{Counters, Link};
use crate::sys::perf::OpenError;
use crate::sys::probe::process_cpu_time;
use homeostat_model::{ProcessId, Workload};
use homeostat_platform::PlatformError;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Numbers of the two counters.
pub(super) const POINT: u32 = 0;
const WITNESS: u32 = 1;
/// Processes that get a link each, where the file cannot be counted as a whole.
const PROCESSES_MAX: usize = 64;
/// Length of a turn, and shortest time of counting in it (seconds).
const TURN: f64 = 1.0;
const ON_MIN: f64 = 0.05;
/// How often it is looked what a turn has cost so far.
const BEAT: Duration = Duration::from_millis(20);
/// A turn may cost this times its share before it is ended early.
const BURST: f64 = 2.0;
/// A program that rested in the last turn may have begun to work since: it is taken to use so many CPUs at least.
const CPUS_MIN: f64 = 0.2;
/// The share of the next turn moves by this factor at most.
const STEP: f64 = 2.0;
/// Above this share the probes stay on.
const ALWAYS: f64 = 0.95;
/// Hits of both places from which their ratio is compared.
const RATIO_HITS: u64 = 400;
/// The ratio of point and witness may move by this (logarithm): within a cluster it keeps to 2 %.
const RATIO_MOVED: f64 = 0.10;
/// Turns kept for that.
const RATIO_TURNS: usize = 12;
/// Turns without a hit, though the program worked while it was counted, after which the point is taken for lost.
const SILENT_MAX: u32 = 5;
/// It worked when it used so much CPU time while it was counted (seconds).
const WORKED: f64 = 0.02;
/// Turns between two looks at who else uses its files, at what stands still in it, and at whether the code in memory is still
/// that of the file.
const STRANGERS_EVERY: u64 = 16;

/// What the thread has found out.
pub(super) struct Tally {
    /// Processes to be counted, as the last reading said.
    pub(super) workload: Workload,
    /// Whether the first turn has begun.
    pub(super) begun: bool,
    /// Hits, had they been counted all the time, up to the end of the last turn.
    pub(super) work: f64,
    /// CPU time at that moment, and hits per second of it.
    pub(super) cpu: f64,
    pub(super) per_cpu: f64,
    /// The probes stay on: the counter goes on from this.
    pub(super) always: bool,
    pub(super) counted: u64,
    pub(super) lost: Option<Lost>,
}

/// What the thread and the reader share.
pub(super) struct Shared {
    pub(super) tally: Mutex<Tally>,
}

impl Shared {
    pub(super) fn new(workload: Workload, cpu: f64) -> Self {
        Self {
            tally: Mutex::new(Tally {
                workload,
                begun: false,
                work: 0.0,
                cpu,
                per_cpu: 0.0,
                always: false,
                counted: 0,
                lost: None,
            }),
        }
    }
}

pub(super) fn held(mutex: &Mutex<Tally>) -> MutexGuard<'_, Tally> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// CPU time of processes in seconds.
pub(super) fn cpu_of(processes: &[ProcessId]) -> f64 {
    processes
        .iter()
        .filter_map(|p| process_cpu_time(p.pid))
        .map(|ns| ns as f64 / 1e9)
        .sum()
}

/// The probes on both places.
pub(super) struct Probes {
    places: Vec<(Place, u32)>,
    counters: Arc<Counters>,
    links: BTreeMap<ProcessId, Vec<Link>>,
    /// Processes whose memory was seen to agree with the file, and those where it does not.
    compared: BTreeMap<ProcessId, bool>,
    /// Programs whose processes are counted (device and inode).
    executables: BTreeSet<(u64, u64)>,
}

impl Probes {
    pub(super) fn new(found: &Found, counters: Arc<Counters>) -> Self {
        let mut places = vec![(found.place.clone(), POINT)];
        places.extend(found.witness.clone().map(|w| (w, WITNESS)));
        Self {
            places,
            counters,
            links: BTreeMap::new(),
            compared: BTreeMap::new(),
            executables: found.executables.clone(),
        }
    }

    /// Whether what a process runs at the places is what the files hold. Looked at once for each process.
    fn agrees(&mut self, root: &Root, process: ProcessId) -> Result<bool, PlatformError> {
        if let Some(known) = self.compared.get(&process) {
            return Ok(*known);
        }
        let patched = Patched::look(root, process)?;
        let probed: Vec<u64> = self.places.iter().map(|(p, _)| p.offset).collect();
        let agrees = self
            .places
            .iter()
            .all(|(p, _)| patched.agrees(&p.file, &p.device_inode, p.offset, &probed));
        self.compared.insert(process, agrees);
        Ok(agrees)
    }

    /// Attaches to what is not yet counted, and lets go of what is gone.
    fn attach(&mut self, root: &Root, processes: &[ProcessId]) -> Result<(), PlatformError> {
        let main = *processes.first().ok_or_else(|| failed(OpenError::Vanished))?;
        if !self.agrees(root, main)? {
            return Err(PlatformError::Unsupported {
                what: "counting a progress point".to_owned(),
                why: format!("the code of process {main} in memory is not that of its file any more"),
            });
        }
        let there: BTreeSet<ProcessId> = processes.iter().copied().collect();
        // The kernel's probes outlive an exec: a process that runs another program now is let go of in every turn.
        let executables = self.executables.clone();
        let runs_it = |process| executable(root, process).is_some_and(|e| executables.contains(&e));
        self.links
            .retain(|process, _| there.contains(process) && runs_it(*process));
        self.compared.retain(|process, _| there.contains(process));
        for process in processes.iter().take(PROCESSES_MAX) {
            // Of several processes one may run another program, or have code of its own.
            if self.links.contains_key(process)
                || !runs_it(*process)
                || !self.agrees(root, *process).unwrap_or(false)
            {
                continue;
            }
            match self.link(process.pid) {
                Ok(links) => {
                    self.links.insert(*process, links);
                }
                Err(PlatformError::Vanished { .. }) => {}
                Err(e) => return Err(e),
            }
        }
        if self.links.is_empty() {
            return Err(failed(OpenError::Vanished));
        }
        Ok(())
    }

    /// Whether its files are still such that counting in them concerns nobody else, and gives nobody anything.
    fn allowed(&self, strangers: &Strangers) -> Result<(), String> {
        for (place, _) in &self.places {
            strangers.allow(&place.device_inode, &place.path, place.file.is_layered())?;
            place.file.still_plain(&place.path)?;
        }
        Ok(())
    }

    fn link(&self, process: i32) -> Result<Vec<Link>, PlatformError> {
        let mut links = Vec::new();
        let mut rest = self.places.as_slice();
        while let Some(((first, number), others)) = rest.split_first() {
            // Both in one file go into one link.
            let mut places = vec![(first.offset, *number)];
            let mut left = others;
            while let Some(((next, number), after)) = left
                .split_first()
                .filter(|((n, _), _)| Arc::ptr_eq(&n.file, &first.file))
            {
                places.push((next.offset, *number));
                left = after;
            }
            links.push(
                self.counters
                    .attach(first.file.kernel_path(), &places, Some(process))
                    .map_err(failed)?,
            );
            rest = left;
        }
        Ok(links)
    }

    fn counted(&self) -> [u64; 2] {
        [POINT, WITNESS].map(|n| self.counters.read(n).unwrap_or(0))
    }
}

/// What the turns have shown of the two places.
#[derive(Default)]
pub(super) struct Watch {
    silent: u32,
    recent: VecDeque<[u64; 2]>,
    /// Ratio of point to witness when counting began (logarithm).
    ratio: Option<f64>,
}

impl Watch {
    /// Whether the point still means what it meant, after a turn with so much CPU time and so many hits while it was
    /// counted.
    fn judge(&mut self, name: &str, used: f64, hits: [u64; 2]) -> Result<(), String> {
        if hits[0] > 0 {
            self.silent = 0;
        } else if used >= WORKED {
            self.silent += 1;
        }
        if self.silent >= SILENT_MAX {
            return Err(format!(
                "{name} has not run in {SILENT_MAX} turns of counting though the program worked"
            ));
        }
        self.recent.push_back(hits);
        if self.recent.len() > RATIO_TURNS {
            self.recent.pop_front();
        }
        let [point, witness] = [0, 1].map(|i| {
            self.recent
                .iter()
                .fold(0u64, |sum, turn| sum.saturating_add(turn[i]))
        });
        if point < RATIO_HITS || witness < RATIO_HITS {
            return Ok(());
        }
        let ratio = (point as f64 / witness as f64).ln();
        let first = *self.ratio.get_or_insert(ratio);
        if (ratio - first).abs() > RATIO_MOVED {
            return Err(format!(
                "{name} and its witness have moved apart by {:.0} %: one of them has changed its meaning",
                ((ratio - first).exp() - 1.0).abs() * 100.0
            ));
        }
        Ok(())
    }
}

/// The share of the next turn: what a turn has cost of the CPU time, and the share of it in which it was counted.
fn next_share(share: f64, cost: f64, limit: f64) -> f64 {
    let factor = if cost > 0.0 { limit / cost } else { STEP };
    (share * factor.clamp(1.0 / STEP, STEP)).min(1.0)
}

/// The thread of a point.
pub(super) struct Turns {
    pub(super) root: Root,
    pub(super) main: ProcessId,
    pub(super) executable: (u64, u64),
    pub(super) probes: Probes,
    pub(super) shared: Arc<Shared>,
    /// Seconds of CPU time of a hit.
    pub(super) hit_cost: f64,
    /// Share of the CPU time that counting may cost.
    pub(super) cost_max: f64,
    /// Share of the time in which it is counted.
    pub(super) duty: f64,
    pub(super) name: String,
    /// CPUs that the program used in the last turn.
    pub(super) cpus: f64,
    pub(super) watch: Watch,
    pub(super) number: u64,
}

impl Turns {
    /// Counts until somebody ends it, or the point is lost.
    pub(super) fn run(mut self, stopped: &Receiver<()>) {
        loop {
            match self.turn(stopped) {
                Ok(true) => {}
                Ok(false) => return,
                Err(lost) => {
                    // Off before it is told.
                    self.probes.links.clear();
                    held(&self.shared.tally).lost = Some(lost);
                    return;
                }
            }
        }
    }

    fn turn(&mut self, stopped: &Receiver<()>) -> Result<bool, Lost> {
        let workload = held(&self.shared.tally).workload.clone();
        let processes = &workload.processes;
        self.check(&workload)?;
        let always = self.duty >= ALWAYS;
        let (began, begun) = (cpu_of(processes), Instant::now());
        let before = self.probes.counted();
        match self.probes.attach(&self.root, processes) {
            // For a lack of memory or descriptors the next turn may do better, if there was ever one that could.
            Ok(()) => {}
            Err(PlatformError::Busy { .. }) if self.number > 0 => {}
            Err(e @ PlatformError::Unsupported { .. }) => return Err(Lost::Changed(e.to_string())),
            Err(e) => return Err(Lost::Vanished(e)),
        }
        let (start, at_start) = (cpu_of(processes), self.probes.counted());
        self.begin(always, at_start[0]);
        let on = if always {
            TURN
        } else {
            (TURN * self.duty).max(ON_MIN)
        };
        let go_on = self.count_for(on, at_start, stopped);
        let (end, at_end) = (cpu_of(processes), self.probes.counted());
        if !always || !go_on {
            self.probes.links.clear();
        }
        if !go_on {
            return Ok(false);
        }
        let off = if always {
            0.0
        } else {
            (on / self.duty - on).max(0.0)
        };
        if off > 0.0 && !wait(stopped, Duration::from_secs_f64(off)) {
            return Ok(false);
        }
        let now = cpu_of(processes);
        self.cpus = (now - began).max(0.0) / begun.elapsed().as_secs_f64().max(ON_MIN);
        let used = (end - start).max(0.0);
        let hits = [0, 1].map(|i| at_end[i].saturating_sub(at_start[i]));
        self.end(always, used, hits[0], (now - began).max(0.0), now, at_end[0]);
        self.watch.judge(&self.name, used, hits).map_err(Lost::Changed)?;
        let paid: u64 = self
            .probes
            .counted()
            .iter()
            .zip(before)
            .fold(0, |sum, (after, before)| {
                sum.saturating_add(after.saturating_sub(before))
            });
        self.share_of_the_next(paid, now - began)?;
        self.number += 1;
        Ok(true)
    }

    /// Notes that the probes are on. From here a reading goes on from the counter, when they stay on.
    fn begin(&self, always: bool, counted: u64) {
        let mut tally = held(&self.shared.tally);
        if always && !tally.always {
            // What was done since the last turn ended, at its rate.
            let cpu = cpu_of(&tally.workload.processes);
            tally.work += tally.per_cpu * (cpu - tally.cpu).max(0.0);
            tally.cpu = cpu;
            tally.counted = counted;
        }
        tally.always = always;
        if !tally.begun {
            tally.begun = true;
            tally.cpu = cpu_of(&tally.workload.processes);
            tally.counted = counted;
        }
    }

    /// Adds a turn.
    fn end(&self, always: bool, used: f64, hits: u64, whole: f64, now: f64, counted: u64) {
        let mut tally = held(&self.shared.tally);
        if used > 0.0 {
            tally.per_cpu = hits as f64 / used;
        }
        if always {
            tally.work += counted.saturating_sub(tally.counted) as f64;
            tally.counted = counted;
        } else {
            tally.work += tally.per_cpu * whole;
        }
        tally.cpu = now;
    }

    /// Counts for so many seconds, less when it comes to cost too much. False: it is over.
    fn count_for(&self, seconds: f64, at_start: [u64; 2], stopped: &Receiver<()>) -> bool {
        let begun = Instant::now();
        let budget = BURST * self.cost_max * self.cpus.max(CPUS_MIN) * (seconds / self.duty).max(TURN);
        loop {
            let left = seconds - begun.elapsed().as_secs_f64();
            if left <= 0.0 {
                return true;
            }
            if !wait(stopped, BEAT.min(Duration::from_secs_f64(left))) {
                return false;
            }
            let now = self.probes.counted();
            let hits: u64 = now
                .iter()
                .zip(at_start)
                .fold(0, |sum, (n, s)| sum.saturating_add(n.saturating_sub(s)));
            if hits as f64 * self.hit_cost > budget {
                return true;
            }
        }
    }

    fn share_of_the_next(&mut self, paid: u64, cpu: f64) -> Result<(), Lost> {
        // A program that hardly ran says nothing about its rate.
        if cpu < WORKED {
            return Ok(());
        }
        let cost = paid as f64 * self.hit_cost / cpu;
        self.duty = next_share(self.duty, cost, self.cost_max);
        if self.duty < DUTY_MIN / STEP {
            return Err(Lost::Changed(format!(
                "counting at {} has come to cost {:.1} % of its CPU time (limit {:.1} %), too much even part of the time",
                self.name,
                cost * 100.0,
                self.cost_max * 100.0
            )));
        }
        if self.duty < ALWAYS {
            // On again with the next turn, for its share.
            self.probes.links.clear();
        }
        Ok(())
    }

    /// Whether it is still the same program, and nobody else's to look into.
    fn check(&mut self, workload: &Workload) -> Result<(), Lost> {
        let changed = |why: String| Err(Lost::Changed(why));
        let vanished = || {
            Lost::Vanished(PlatformError::Vanished {
                target: format!("process {}", self.main),
            })
        };
        status(&self.root, self.main, "status").ok_or_else(vanished)?;
        for process in workload.processes.iter().take(PROCESSES_MAX) {
            if let Some(tracer) = status(&self.root, *process, "status").and_then(|s| s.tracer) {
                return changed(format!(
                    "process {tracer} has begun to trace process {process}: the probes were removed"
                ));
            }
        }
        match executable(&self.root, self.main) {
            None => return Err(vanished()),
            Some(now) if now != self.executable => {
                return changed(format!("process {} runs another program now", self.main));
            }
            Some(_) => {}
        }
        if !self.number.is_multiple_of(STRANGERS_EVERY) {
            return Ok(());
        }
        self.probes.compared.clear();
        if let Some((process, thread)) = standing_still(&self.root, &workload.processes) {
            return changed(format!(
                "thread {thread} of process {process} waits for a device and does not go on: the probes were removed"
            ));
        }
        let strangers = Strangers::look(&self.root, workload).map_err(Lost::Changed)?;
        self.probes.allowed(&strangers).map_err(Lost::Changed)
    }
}

/// Waits; false: somebody wants it to end.
fn wait(stopped: &Receiver<()>, time: Duration) -> bool {
    stopped.recv_timeout(time) == Err(RecvTimeoutError::Timeout)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_share_of_the_next_turn_follows_from_what_the_last_cost() {
        let limit = 0.005;
        // Twice the limit: half the share. A little below it: a little more. Free: at most twice as much.
        assert!((next_share(0.4, 0.010, limit) - 0.2).abs() < 1e-12);
        assert!((next_share(0.4, 0.004, limit) - 0.5).abs() < 1e-12);
        assert!((next_share(0.4, 0.0, limit) - 0.8).abs() < 1e-12);
        assert_eq!(next_share(0.9, 0.0, limit), 1.0);
        // A program whose rate grows tenfold: within a few turns the cost is at the limit again.
        let (mut share, per_share) = (0.5, 0.1);
        for _ in 0..6 {
            share = next_share(share, share * per_share, limit);
        }
        assert!((share * per_share - limit).abs() < 1e-9);
    }

    #[test]
    fn silence_is_counted_in_turns_in_which_the_program_worked() {
        let mut watch = Watch::default();
        // It rests, or is counted for too short a time to have run.
        for _ in 0..100 {
            assert!(watch.judge("x", WORKED / 2.0, [0, 0]).is_ok());
        }
        for _ in 1..SILENT_MAX {
            assert!(watch.judge("x", 1.0, [0, 0]).is_ok());
        }
        assert!(watch.judge("x", 1.0, [0, 0]).unwrap_err().contains("has not run"));
        let mut watch = Watch::default();
        for turn in 0..100 {
            let hits = u64::from(turn % 3 == 0);
            assert!(watch.judge("x", 1.0, [hits, 0]).is_ok());
        }
    }

    #[test]
    fn a_point_that_leaves_its_witness_is_lost() {
        let mut watch = Watch::default();
        for _ in 0..30 {
            assert!(watch.judge("x", 1.0, [1000, 500]).is_ok());
        }
        let mut lost = None;
        for turn in 0..RATIO_TURNS {
            if let Err(why) = watch.judge("x", 1.0, [1000, 250]) {
                lost = Some((turn, why));
                break;
            }
        }
        assert!(lost.unwrap().1.contains("moved apart"));
        // Few hits say nothing.
        let mut watch = Watch::default();
        for turn in 0..100u64 {
            assert!(watch.judge("x", 1.0, [turn % 7, 3]).is_ok());
        }
    }
}
