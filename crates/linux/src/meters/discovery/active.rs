//! A progress point that is being counted.

use super::super::common::{fault, open_process};
use super::search::{Found, Place, tracer_of};
use crate::Root;
use crate::sys::bpf::{Counters, Link};
use crate::sys::perf::OpenError;
use crate::sys::probe::process_cpu_time;
use homeostat_model::{ProcessId, Workload};
use homeostat_platform::PlatformError;
use homeostat_points::HIT_COST;
use std::collections::{BTreeMap, VecDeque};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// Numbers of the two counters.
const POINT: u32 = 0;
const WITNESS: u32 = 1;
/// Processes that get a link each, where the file cannot be counted as a whole.
const PROCESSES_MAX: usize = 64;
/// New processes attached in one reading.
const ATTACH_MAX: usize = 4;
/// Length of a cycle of counting and not counting, and shortest time of counting in it.
const CYCLE: f64 = 1.0;
const ON_MIN: f64 = 0.05;
/// Counted for a smaller share of the time than this it would say nothing.
const DUTY_MIN: f64 = 0.01;
/// Hits of both places from which their ratio is compared.
const RATIO_HITS: u64 = 400;
/// The ratio of point and witness may move by this (logarithm): within a cluster it keeps to 2 %.
const RATIO_MOVED: f64 = 0.10;
/// Readings kept for that.
const RATIO_READINGS: usize = 12;
/// Readings without a hit, though the program works, after which the point is taken for lost.
const SILENT_MAX: u32 = 5;
/// A program works when it uses this share of a CPU (seconds of CPU time per reading of about a second).
const WORKS: f64 = 0.1;
/// Counting may cost this times the limit before it is given up: rates move.
const COST_SLACK: f64 = 4.0;

/// Why a point is no longer counted.
pub(super) enum Lost {
    /// The program is gone, or cannot be read now.
    Vanished(PlatformError),
    /// The point does not mean what it meant.
    Changed(String),
}

/// A point and its witness, being counted.
pub(super) struct Active {
    root: Root,
    main: ProcessId,
    executable: Option<(u64, u64)>,
    name: String,
    counting: Counting,
    silent: u32,
    cpu: f64,
    counts: [u64; 2],
    work: f64,
    /// CPU time and hits of the last readings, for the ratio and the cost.
    recent: VecDeque<(f64, [u64; 2])>,
    /// Ratio of point to witness when counting began (logarithm).
    ratio: Option<f64>,
    cost_max: f64,
}

enum Counting {
    /// All the time.
    Always(Probes),
    /// Part of the time, by a thread of its own.
    Cycles(Cycles),
}

/// Device and inode of the file that a process runs.
pub(super) fn executable(root: &Root, process: ProcessId) -> Option<(u64, u64)> {
    let dir = open_process(root, process).ok()?;
    let stat = rustix::fs::statat(&dir, "exe", rustix::fs::AtFlags::empty()).ok()?;
    Some((stat.st_dev, stat.st_ino))
}

fn failed(e: OpenError) -> PlatformError {
    let what = "counting a progress point".to_owned();
    match e {
        OpenError::Denied(errno) => PlatformError::Denied {
            what,
            needs: format!("run homeostat as root, or with CAP_BPF and CAP_PERFMON ({errno})"),
        },
        OpenError::Vanished => PlatformError::Vanished {
            target: "the process of a progress point".to_owned(),
        },
        OpenError::Unsupported(errno) => PlatformError::Unsupported {
            what,
            why: format!("the kernel says {errno}; choose another meter"),
        },
        OpenError::Busy(errno) => PlatformError::Busy {
            what,
            why: errno.to_string(),
        },
    }
}

fn cpu_of(processes: &[ProcessId]) -> f64 {
    processes
        .iter()
        .filter_map(|p| process_cpu_time(p.pid))
        .map(|ns| ns as f64 / 1e9)
        .sum()
}

/// The probes on both places.
struct Probes {
    places: Vec<(Place, u32)>,
    counters: Arc<Counters>,
    /// By process; 0 for a file as a whole.
    links: BTreeMap<i32, Vec<Link>>,
}

impl Probes {
    fn new(found: &Found) -> Result<Self, PlatformError> {
        let mut places = vec![(found.place.clone(), POINT)];
        places.extend(found.witness.clone().map(|w| (w, WITNESS)));
        Ok(Self {
            places,
            counters: Arc::new(Counters::new(2).map_err(failed)?),
            links: BTreeMap::new(),
        })
    }

    /// Attaches to what is not yet counted, and lets go of what is gone.
    fn attach(&mut self, processes: &[ProcessId], most: usize) -> Result<(), PlatformError> {
        if self.places.iter().all(|(p, _)| p.whole_file) {
            if self.links.is_empty() {
                let links = self.link(None)?;
                self.links.insert(0, links);
            }
            return Ok(());
        }
        self.links
            .retain(|pid, _| processes.iter().any(|p| p.pid == *pid));
        let new: Vec<i32> = processes
            .iter()
            .map(|p| p.pid)
            .filter(|pid| !self.links.contains_key(pid))
            .take(most.min(PROCESSES_MAX.saturating_sub(self.links.len())))
            .collect();
        for pid in new {
            match self.link(Some(pid)) {
                Ok(links) => {
                    self.links.insert(pid, links);
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

    fn link(&self, process: Option<i32>) -> Result<Vec<Link>, PlatformError> {
        let mut links = Vec::new();
        let mut rest = self.places.as_slice();
        while let Some(((first, number), others)) = rest.split_first() {
            // Both in one file go into one link.
            let mut places = vec![(first.offset, *number)];
            let mut left = others;
            while let Some(((next, number), after)) =
                left.split_first().filter(|((n, _), _)| n.file == first.file)
            {
                places.push((next.offset, *number));
                left = after;
            }
            links.push(
                self.counters
                    .attach(&first.file, &places, process)
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

impl Drop for Probes {
    fn drop(&mut self) {
        // The kernel takes some 40 ms, for which the loop does not wait. When no thread can be made the links are
        // dropped here: slower, not wrong.
        let links = std::mem::take(&mut self.links);
        if !links.is_empty() {
            let _ = std::thread::Builder::new()
                .name("points-close".to_owned())
                .stack_size(64 * 1024)
                .spawn(move || drop(links));
        }
    }
}

/// What the thread of a point that is counted part of the time has found out.
#[derive(Clone, Copy, Default)]
struct Tally {
    /// Hits, had they been counted all the time, and CPU time up to which that holds.
    work: f64,
    cpu: f64,
    /// Hits per second of CPU time in the last cycle.
    per_cpu: f64,
    /// Hits that were really counted.
    counts: [u64; 2],
    failed: bool,
}

struct Cycles {
    tally: Arc<Mutex<Tally>>,
    duty: f64,
    processes: Arc<Mutex<Vec<ProcessId>>>,
    /// Its end wakes the thread up.
    stop: Option<Sender<()>>,
}

impl Cycles {
    fn begin(mut probes: Probes, processes: Vec<ProcessId>, duty: f64) -> Result<Self, PlatformError> {
        let tally = Arc::new(Mutex::new(Tally {
            cpu: cpu_of(&processes),
            ..Tally::default()
        }));
        let shared = Arc::new(Mutex::new(processes));
        let (stop, stopped) = std::sync::mpsc::channel();
        let (tally_there, shared_there) = (tally.clone(), shared.clone());
        std::thread::Builder::new()
            .name("points".to_owned())
            .spawn(
                move || {
                    while cycle(&mut probes, &shared_there, &tally_there, duty, &stopped) {}
                },
            )
            .map_err(|e| PlatformError::Busy {
                what: "starting to count a progress point".to_owned(),
                why: e.to_string(),
            })?;
        Ok(Self {
            tally,
            duty,
            processes: shared,
            stop: Some(stop),
        })
    }
}

impl Drop for Cycles {
    fn drop(&mut self) {
        // The thread finds its channel closed and lets go of the probes; the removal takes some 40 ms, for which the
        // loop does not wait.
        drop(self.stop.take());
    }
}

fn held<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Counts for a part of a second, then not. False: it is over.
fn cycle(
    probes: &mut Probes,
    processes: &Mutex<Vec<ProcessId>>,
    tally: &Mutex<Tally>,
    duty: f64,
    stopped: &Receiver<()>,
) -> bool {
    let of = held(processes).clone();
    let on = (CYCLE * duty).max(ON_MIN);
    let off = (on / duty - on).max(0.0);
    let began = cpu_of(&of);
    let before = probes.counted();
    if probes.attach(&of, usize::MAX).is_err() {
        held(tally).failed = true;
        return false;
    }
    let wait = |seconds: f64| {
        stopped.recv_timeout(Duration::from_secs_f64(seconds)) == Err(RecvTimeoutError::Timeout)
    };
    let (start, at_start) = (cpu_of(&of), probes.counted());
    let go_on = wait(on);
    let (end, at_end) = (cpu_of(&of), probes.counted());
    probes.links.clear();
    if !go_on || !wait(off) {
        return false;
    }
    let now = cpu_of(&of);
    let hits = at_end[0].saturating_sub(at_start[0]) as f64;
    let paid = probes.counted();
    let mut tally = held(tally);
    if end > start {
        tally.per_cpu = hits / (end - start);
        tally.work += tally.per_cpu * (now - began).max(0.0);
    }
    tally.cpu = now;
    for (sum, (after, before)) in tally.counts.iter_mut().zip(paid.iter().zip(before)) {
        *sum += after.saturating_sub(before);
    }
    true
}

impl Active {
    /// Begins to count.
    ///
    /// # Errors
    /// As of a meter that is opened.
    pub(super) fn open(
        root: &Root,
        workload: &Workload,
        found: &Found,
        cost_max: f64,
    ) -> Result<Self, PlatformError> {
        let main = *workload
            .processes
            .first()
            .ok_or_else(|| failed(OpenError::Vanished))?;
        if let Some(tracer) = tracer_of(root, main) {
            return Err(PlatformError::Busy {
                what: format!("counting a progress point of process {main}"),
                why: format!("process {tracer} traces it"),
            });
        }
        let duty = found.chosen.duty;
        if duty < DUTY_MIN {
            return Err(PlatformError::Unsupported {
                what: format!("counting at {}", found.place.name),
                why: format!(
                    "{:.0} hits a second would cost {:.0} % of its CPU time, too much even part of the time; choose \
                     another meter",
                    found.chosen.rate,
                    100.0 * cost_max / duty
                ),
            });
        }
        let mut probes = Probes::new(found)?;
        let processes = workload.processes.clone();
        let counting = if duty >= 0.999 {
            probes.attach(&processes, usize::MAX)?;
            Counting::Always(probes)
        } else {
            Counting::Cycles(Cycles::begin(probes, processes.clone(), duty)?)
        };
        Ok(Self {
            root: root.clone(),
            main,
            executable: executable(root, main),
            name: found.place.name.clone(),
            counting,
            silent: 0,
            cpu: cpu_of(&processes),
            counts: [0; 2],
            work: 0.0,
            recent: VecDeque::new(),
            ratio: None,
            cost_max,
        })
    }

    /// Cumulative hits; of a point that is counted part of the time, those that this share of all would be.
    pub(super) fn read(&mut self, workload: &Workload) -> Result<f64, Lost> {
        self.check()?;
        let cpu = cpu_of(&workload.processes);
        let (work, counts) = match &mut self.counting {
            Counting::Always(probes) => {
                match probes.attach(&workload.processes, ATTACH_MAX) {
                    Ok(()) | Err(PlatformError::Busy { .. }) => {}
                    Err(e) => return Err(Lost::Vanished(e)),
                }
                let counts = probes.counted();
                (counts[0] as f64, counts)
            }
            Counting::Cycles(cycles) => {
                held(&cycles.processes).clone_from(&workload.processes);
                let tally = *held(&cycles.tally);
                if tally.failed {
                    return Err(Lost::Vanished(failed(OpenError::Vanished)));
                }
                // Since the last cycle ended at its rate.
                let work = tally.work + tally.per_cpu * (cpu - tally.cpu).max(0.0);
                (work * cycles.duty, tally.counts)
            }
        };
        let used = (cpu - self.cpu).max(0.0);
        self.cpu = cpu;
        let hits = [0, 1].map(|i| counts[i].saturating_sub(self.counts[i]));
        self.counts = counts;
        self.work = self.work.max(work);
        self.judge(used, hits)?;
        Ok(self.work)
    }

    /// Whether it is still the same program, and nobody else's to look into.
    fn check(&self) -> Result<(), Lost> {
        if let Some(tracer) = tracer_of(&self.root, self.main) {
            return Err(Lost::Changed(format!(
                "process {tracer} has begun to trace process {}: the probes were removed",
                self.main
            )));
        }
        match executable(&self.root, self.main) {
            None => Err(Lost::Vanished(fault(
                rustix::io::Errno::SRCH,
                &format!("process {}", self.main),
                &self.name,
            ))),
            now if now != self.executable => Err(Lost::Changed(format!(
                "process {} runs another program now",
                self.main
            ))),
            _ => Ok(()),
        }
    }

    /// Whether the point still means what it meant, and costs what it may.
    fn judge(&mut self, used: f64, hits: [u64; 2]) -> Result<(), Lost> {
        self.silent = if hits[0] == 0 && used >= WORKS {
            self.silent + 1
        } else {
            0
        };
        if self.silent >= SILENT_MAX {
            return Err(Lost::Changed(format!(
                "{} has not run in {SILENT_MAX} readings though the program works",
                self.name
            )));
        }
        self.recent.push_back((used, hits));
        if self.recent.len() > RATIO_READINGS {
            self.recent.pop_front();
        }
        let cpu: f64 = self.recent.iter().map(|r| r.0).sum();
        let [point, witness] = [0, 1].map(|i| self.recent.iter().map(|r| r.1[i]).sum::<u64>());
        let cost = (point + witness) as f64 * HIT_COST / cpu.max(1e-9);
        if self.recent.len() == RATIO_READINGS && cpu > WORKS && cost > COST_SLACK * self.cost_max {
            return Err(Lost::Changed(format!(
                "counting at {} has come to cost {:.1} % of its CPU time (limit {:.1} %)",
                self.name,
                cost * 100.0,
                self.cost_max * 100.0
            )));
        }
        if point < RATIO_HITS || witness < RATIO_HITS {
            return Ok(());
        }
        let ratio = (point as f64 / witness as f64).ln();
        let first = *self.ratio.get_or_insert(ratio);
        if (ratio - first).abs() > RATIO_MOVED {
            return Err(Lost::Changed(format!(
                "{} and its witness have moved apart by {:.0} %: one of them has changed its meaning",
                self.name,
                ((ratio - first).exp() - 1.0).abs() * 100.0
            )));
        }
        Ok(())
    }
}
