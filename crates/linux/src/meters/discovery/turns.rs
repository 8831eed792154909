//! The turns in which a point is counted: on all the time, or on for a part of each.
//!
//! What it costs is measured in every turn (hits on both places, for as long as the probes were really there, times what a hit
//! costs here) and held against all of the program's CPU time in the turn; the share of the next turn follows from that. So
//! the limit holds when the program's rate moves, too. A turn in which far more is hit than was expected is ended early, and
//! what it cost too much is made up for by a rest. What children do that are not counted is taken to cost as much.
//!
//! Before every turn it is looked whom the probes concern. While somebody stands still who would have to be waited for, what is on
//! stays on, what is off stays off, and it is looked again.

use super::super::code_file::executable;
use super::super::concern::keeper::Held;
use super::super::concern::{Files, Others, Refusal, threads};
use super::active::{DUTY_MIN, Lost, failed};
use super::children::{Children, FORKS_MAX, Unpaid};
use super::debt::Debt;
use super::place::{Patched, Place};
use super::search::{Attached, Found};
use super::urgency::Urgent;
use crate::Root;
use crate::sys::bpf::Counters;
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
/// Processes that get a link each.
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
/// Time between two looks at whether the code in memory is still that of the file.
const COMPARE_EVERY: Duration = Duration::from_secs(16);
/// Longest time in which nothing may be counted, after which it is given up.
const PAUSE_MAX: Duration = Duration::from_secs(60);

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
    /// Why nothing may be counted now.
    pub(super) paused: Option<String>,
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
                paused: None,
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
    root: Root,
    places: Vec<(Place, u32)>,
    files: Files,
    counters: Arc<Counters>,
    links: BTreeMap<ProcessId, Attached>,
    /// Processes whose memory was seen to agree with the file, and those where it does not.
    compared: BTreeMap<ProcessId, bool>,
    /// Programs whose processes are counted (device and inode).
    executables: BTreeSet<(u64, u64)>,
}

impl Probes {
    pub(super) fn new(root: &Root, found: &Found, counters: Arc<Counters>) -> Self {
        let mut places = vec![(found.place.clone(), POINT)];
        places.extend(found.witness.clone().map(|w| (w, WITNESS)));
        Self {
            root: root.clone(),
            files: Files {
                targets: places.iter().map(|(place, _)| place.target()).collect(),
                others: Others::None,
                pages: places.len() as u64,
            },
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
            match self.link(*process) {
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

    /// Takes them off, unless somebody stands still: then they stay.
    fn off(&mut self) -> Result<(), Refusal> {
        if self.links.is_empty() {
            return Ok(());
        }
        let processes: Vec<ProcessId> = self.links.keys().copied().collect();
        self.files.settled(&self.root, &processes)?;
        for attached in std::mem::take(&mut self.links).into_values() {
            attached.take_off_now();
        }
        Ok(())
    }

    fn link(&self, process: ProcessId) -> Result<Attached, PlatformError> {
        let mut links = Vec::new();
        let mut outcome = Ok(());
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
            match self
                .counters
                .attach(first.file.kernel_path(), &places, Some(process.pid))
            {
                Ok(link) => links.push(link),
                Err(e) => {
                    outcome = Err(failed(e));
                    break;
                }
            }
            rest = left;
        }
        // What was attached before something went wrong is let go of like all else.
        let attached = Held::new(&self.root, &self.files, &[process], links);
        outcome.map(|()| attached)
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
    pub(super) children: Children,
    pub(super) debt: Debt,
    /// Since when nothing may be counted.
    pub(super) paused: Option<Instant>,
    /// When the code in memory was compared with that of the file.
    pub(super) compared: Option<Instant>,
    pub(super) number: u64,
}

impl Turns {
    /// Counts until somebody ends it, or the point is lost.
    pub(super) fn run(mut self, stopped: &Receiver<()>) {
        loop {
            match self.turn(stopped) {
                Ok(true) => {}
                // What is still on is let go of by its own end.
                Ok(false) => return,
                Err(lost) => {
                    // Off before it is told.
                    drop(std::mem::take(&mut self.probes.links));
                    held(&self.shared.tally).lost = Some(lost);
                    return;
                }
            }
        }
    }

    fn turn(&mut self, stopped: &Receiver<()>) -> Result<bool, Lost> {
        let workload = held(&self.shared.tally).workload.clone();
        let processes = &workload.processes;
        match self.check(&workload) {
            Ok(()) => self.resume(processes),
            Err(Lost::Paused(why)) => return self.pause(why, stopped),
            Err(lost) => return Err(lost),
        }
        let always = self.duty >= ALWAYS;
        let (began, begun) = (cpu_of(processes), Instant::now());
        let before = self.probes.counted();
        let urgent = Urgent::begin();
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
        let how = self.count_for(on, at_start, stopped);
        let (end, at_end) = (cpu_of(processes), self.probes.counted());
        if !always || how != Counted::Whole {
            // Where that cannot be done now, the next turn looks again.
            let _ = self.probes.off();
        }
        drop(urgent);
        if how == Counted::Stopped {
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
        let paid = self.since(before);
        self.number += 1;
        self.pay(processes, paid, now - began, stopped)
    }

    /// Hits of both places since an earlier reading.
    fn since(&self, before: [u64; 2]) -> u64 {
        self.probes
            .counted()
            .iter()
            .zip(before)
            .fold(0, |sum, (after, before)| {
                sum.saturating_add(after.saturating_sub(before))
            })
    }

    /// Nothing may be counted: off, unless somebody stands still, and again in a while.
    fn pause(&mut self, why: String, stopped: &Receiver<()>) -> Result<bool, Lost> {
        let since = *self.paused.get_or_insert_with(Instant::now);
        let off = self.probes.off();
        if off.is_ok() && since.elapsed() > PAUSE_MAX {
            return Err(Lost::Changed(format!(
                "nothing could be counted for {} s: {why}",
                PAUSE_MAX.as_secs()
            )));
        }
        held(&self.shared.tally).paused = Some(why);
        Ok(wait(stopped, Duration::from_secs_f64(TURN)))
    }

    /// Goes on after a pause: what was done in it is not known.
    fn resume(&mut self, processes: &[ProcessId]) {
        if self.paused.take().is_none() {
            return;
        }
        let counted = self.probes.counted()[POINT as usize];
        let mut tally = held(&self.shared.tally);
        tally.paused = None;
        tally.cpu = cpu_of(processes);
        tally.counted = counted;
    }

    /// What the turn has cost: a rest, if that was far too much, and the share of the next one.
    fn pay(
        &mut self,
        processes: &[ProcessId],
        paid: u64,
        cpu: f64,
        stopped: &Receiver<()>,
    ) -> Result<bool, Lost> {
        let unpaid = self
            .children
            .since(&self.root, processes, &self.probes.executables);
        let cost = cost_of(paid as f64 * self.hit_cost, cpu, unpaid)
            .map_err(|why| Lost::Changed(format!("counting at {} was given up: {why}", self.name)))?;
        self.debt.add(cost, cpu, self.cost_max);
        self.share_of_the_next(cost, cpu)?;
        let rest = self.debt.rest(self.cpus, self.cost_max).map_err(|seconds| {
            Lost::Changed(format!(
                "counting at {} has cost {:.2} s of its CPU time in one turn, which it would take {seconds:.0} s to make up for",
                self.name, cost
            ))
        })?;
        if rest == 0.0 {
            return Ok(true);
        }
        let _ = self.probes.off();
        {
            // From here a reading goes on at the rate of the last turn.
            let mut tally = held(&self.shared.tally);
            tally.always = false;
        }
        let before = cpu_of(processes);
        if !wait(stopped, Duration::from_secs_f64(rest)) {
            return Ok(false);
        }
        self.debt.add(0.0, cpu_of(processes) - before, self.cost_max);
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

    /// Counts for so many seconds, less when it comes to cost too much, or somebody else comes to look into the program.
    fn count_for(&self, seconds: f64, at_start: [u64; 2], stopped: &Receiver<()>) -> Counted {
        let begun = Instant::now();
        let budget = BURST * self.cost_max * self.cpus.max(CPUS_MIN) * (seconds / self.duty).max(TURN);
        loop {
            let left = seconds - begun.elapsed().as_secs_f64();
            if left <= 0.0 {
                return Counted::Whole;
            }
            if !wait(stopped, BEAT.min(Duration::from_secs_f64(left))) {
                return Counted::Stopped;
            }
            if self.since(at_start) as f64 * self.hit_cost > budget {
                return Counted::Part;
            }
            // Who is frozen may be about to be written to disk, with the breakpoints in its memory.
            if threads::at_liberty(&self.root, self.main).is_err() {
                return Counted::Part;
            }
        }
    }

    /// The share of the next turn, of what this one has cost of the CPU time (seconds).
    fn share_of_the_next(&mut self, cost: f64, cpu: f64) -> Result<(), Lost> {
        // A program that hardly ran says nothing about its rate.
        if cpu < WORKED {
            return Ok(());
        }
        let cost = cost / cpu;
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
            // On again with the next turn, for its share. Where that cannot be done now, the next turn looks again.
            let _ = self.probes.off();
        }
        Ok(())
    }

    /// Whether it is still the same program, and whether anything may be counted in it now.
    fn check(&mut self, workload: &Workload) -> Result<(), Lost> {
        let vanished = || {
            Lost::Vanished(PlatformError::Vanished {
                target: format!("process {}", self.main),
            })
        };
        match executable(&self.root, self.main) {
            None => return Err(vanished()),
            Some(now) if now != self.executable => {
                return Err(Lost::Changed(format!(
                    "process {} runs another program now",
                    self.main
                )));
            }
            Some(_) => {}
        }
        if self.compared.is_none_or(|then| then.elapsed() >= COMPARE_EVERY) {
            self.compared = Some(Instant::now());
            self.probes.compared.clear();
        }
        let looked_at = workload
            .processes
            .get(..PROCESSES_MAX)
            .unwrap_or(&workload.processes);
        self.probes
            .files
            .allow(&self.root, looked_at)
            .map_err(|why| match why {
                Refusal::Now(why) => Lost::Paused(why),
                Refusal::Lasting(why) => Lost::Changed(why),
            })
    }
}

/// How the time of counting in a turn ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Counted {
    Whole,
    /// Before its time: the probes go at once.
    Part,
    /// Nobody wants to know any more.
    Stopped,
}

/// What a turn has cost in all (seconds of CPU time): of the counted processes, which used `cpu` seconds, and of their children.
///
/// # Errors
/// A sentence: children do more than the counted processes, or are made too often.
fn cost_of(counted: f64, cpu: f64, unpaid: Unpaid) -> Result<f64, String> {
    if unpaid.forks > FORKS_MAX {
        return Err(format!(
            "{} processes were forked in a turn, each of which has to copy what is counted with",
            unpaid.forks
        ));
    }
    if unpaid.cpu > cpu.max(WORKED) {
        return Err(format!(
            "children that are not counted used {:.2} s of CPU time while it used {cpu:.2} s, and paid for it as well",
            unpaid.cpu
        ));
    }
    Ok(if cpu > 0.0 {
        counted * (1.0 + unpaid.cpu / cpu)
    } else {
        counted
    })
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
    fn what_children_do_is_paid_for_too() {
        let unpaid = |cpu, forks| Unpaid { cpu, forks };
        assert_eq!(cost_of(0.004, 1.0, Unpaid::default()), Ok(0.004));
        assert_eq!(cost_of(0.004, 1.0, unpaid(0.5, 1)), Ok(0.006));
        assert_eq!(cost_of(0.004, 0.0, Unpaid::default()), Ok(0.004));
        assert!(
            cost_of(0.004, 1.0, unpaid(1.5, 1))
                .unwrap_err()
                .contains("children")
        );
        assert!(
            cost_of(0.0, 1.0, unpaid(0.0, FORKS_MAX + 1))
                .unwrap_err()
                .contains("forked")
        );
        // A parent that only waits: what is done is done by children.
        assert!(cost_of(0.0, 0.0, unpaid(0.5, 1)).is_err());
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
