//! Attaches probes to a site and its witness, and checks that both keep their meaning.

use crate::concern::keeper::Held;
use crate::concern::{Files, Looked, Others, threads};
use crate::crowd::{AtOnce, Crowd};
use crate::discovery::active::failed;
use crate::discovery::place::{Patched, Place};
use crate::discovery::search::Found;
use crate::owed::{Entry, On, Owed};
use crate::turns::{COUNTED, Children, Lost, Subject, Unpaid, WITNESS, WORKED, Window};
use homeostat_kernel::Root;
use homeostat_kernel::bpf::{Counters, Link};
use homeostat_kernel::perf::OpenError;
use homeostat_meters::code_file::executable;
use homeostat_model::{ProcessId, Workload};
use homeostat_platform::PlatformError;
use homeostat_sensors::storage::Refusal;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Most processes that get a link.
const PROCESSES_MAX: usize = 64;
/// Fewest hits of both sites for comparing their ratio.
const RATIO_HITS: u64 = 400;
/// Largest move of the ratio of site and witness (logarithm): within a cluster it stays within 2 %.
const RATIO_MOVED: f64 = 0.10;
/// Turns over which the ratio is taken.
const RATIO_TURNS: usize = 12;
/// Turns without a hit, with the program active, after which the site is lost.
const SILENT_MAX: u32 = 5;
/// Interval between comparisons of the code in memory with the file.
const COMPARE_EVERY: Duration = Duration::from_secs(16);

type Attached = Held<Vec<Link>>;

pub(super) struct Probes {
    root: Root,
    name: String,
    main: ProcessId,
    executable: (u64, u64),
    places: Vec<(Place, u32)>,
    /// The site is known only from the main process's behaviour, so other processes get no probes.
    only_main: bool,
    files: Files,
    counters: Arc<Counters>,
    links: BTreeMap<ProcessId, Attached>,
    /// The clean-up log entry, from before the first probe. Declared after the links, to end after them.
    owed: Option<Arc<Owed>>,
    /// For each process that was compared: whether its memory agrees with the file.
    compared: BTreeMap<ProcessId, bool>,
    /// Counted programs (device and inode).
    executables: BTreeSet<(u64, u64)>,
    code_seen: Option<Instant>,
    watch: Watch,
    children: Children,
    at_once: AtOnce,
}

impl Probes {
    /// `places`: the site and its witness, if any. `main`: the searched process, which runs this `executable`.
    pub(super) fn new(
        root: &Root,
        found: &Found,
        places: Vec<Place>,
        main: ProcessId,
        executable: (u64, u64),
        crowd: Crowd,
        counters: Arc<Counters>,
    ) -> Self {
        let places: Vec<(Place, u32)> = places.into_iter().zip([COUNTED, WITNESS]).collect();
        Self {
            root: root.clone(),
            name: found.name().to_owned(),
            main,
            executable,
            files: Files {
                targets: places.iter().map(|(place, _)| place.target()).collect(),
                others: Others::None,
                pages: places.len() as u64,
                looked: Looked::default(),
            },
            only_main: places.iter().any(|(place, _)| place.seen),
            places,
            counters,
            links: BTreeMap::new(),
            owed: None,
            compared: BTreeMap::new(),
            executables: found.executables.clone(),
            code_seen: None,
            watch: Watch::default(),
            children: Children::default(),
            at_once: AtOnce::new(crowd, found.costs.clone()),
        }
    }

    fn runs_it(&self, process: ProcessId) -> bool {
        executable(&self.root, process).is_some_and(|e| self.executables.contains(&e))
    }

    /// Whether a process's code at the sites equals the file's. Compared once per process.
    fn agrees(&mut self, process: ProcessId) -> Result<bool, PlatformError> {
        if let Some(known) = self.compared.get(&process) {
            return Ok(*known);
        }
        let patched = Patched::look(&self.root, process)?;
        let agrees = self
            .places
            .iter()
            .all(|(p, _)| patched.agrees(&p.file, &p.device_inode, p.offset));
        self.compared.insert(process, agrees);
        Ok(agrees)
    }

    /// Logs the sites before the first breakpoint, once for all turns. Notes that some may be inserted.
    fn owe(&mut self, processes: &[ProcessId]) -> Result<On, Refusal> {
        if let Some(owed) = &self.owed {
            return owed.take();
        }
        let owed = Owed::begin(
            &self.root,
            self.places
                .iter()
                .map(|(place, _)| Entry::new(&place.target(), [(place.offset, 0)], processes))
                .collect::<Result<_, _>>()?,
        )?;
        self.owed = Some(owed.clone());
        owed.take()
    }

    fn link(&self, process: ProcessId, on: &On) -> Result<Attached, PlatformError> {
        let mut links = Vec::new();
        let mut outcome = Ok(());
        let mut rest = self.places.as_slice();
        while let Some(((first, number), others)) = rest.split_first() {
            // Sites in one file share a link.
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
        // After an error, the links made so far are released as usual.
        let attached = Held::new(&self.root, &self.files, &[process], links, on.clone());
        outcome.map(|()| attached)
    }
}

impl Subject for Probes {
    fn name(&self) -> &str {
        &self.name
    }

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
        if self.code_seen.is_none_or(|then| then.elapsed() >= COMPARE_EVERY) {
            self.code_seen = Some(Instant::now());
            self.compared.clear();
        }
        if self.only_main
            && workload
                .processes
                .iter()
                .any(|p| *p != self.main && self.runs_it(*p))
        {
            return Err(Lost::Paused(
                "several processes run its program now, and where instructions begin is known from what one of them did".to_owned(),
            ));
        }
        let looked_at = workload
            .processes
            .get(..PROCESSES_MAX)
            .unwrap_or(&workload.processes);
        // Threads may have been added since the search.
        let crowd = Crowd::of(&self.root, looked_at);
        self.at_once.are_now(crowd);
        let allowed = crowd
            .allow()
            .and_then(|()| self.files.allow(&self.root, looked_at));
        allowed.map_err(|why| match why {
            Refusal::Now(why) => Lost::Paused(why),
            Refusal::Lasting(why) => Lost::Changed(why),
        })
    }

    fn attach(&mut self, processes: &[ProcessId]) -> Result<(), PlatformError> {
        let main = *processes.first().ok_or_else(|| failed(OpenError::Vanished))?;
        // Compare before any probe of ours is inserted: a difference now is somebody else's.
        for process in processes.iter().take(PROCESSES_MAX) {
            let _ = self.agrees(*process);
        }
        if !self.agrees(main)? {
            return Err(PlatformError::Unsupported {
                what: "counting a progress point".to_owned(),
                why: format!("the code of process {main} in memory is not that of its file any more"),
            });
        }
        let on = self
            .owe(processes)
            .map_err(|why| why.error("counting a progress point"))?;
        let there: BTreeSet<ProcessId> = processes.iter().copied().collect();
        // Kernel probes survive an exec, so each turn releases processes that now run another program.
        let (root, executables) = (self.root.clone(), self.executables.clone());
        let runs_it = |process| executable(&root, process).is_some_and(|e| executables.contains(&e));
        self.links
            .retain(|process, _| there.contains(process) && runs_it(*process));
        self.compared.retain(|process, _| there.contains(process));
        for process in processes.iter().take(PROCESSES_MAX) {
            // One of several processes may run another program, or have patched code.
            if self.links.contains_key(process)
                || (self.only_main && *process != self.main)
                || !runs_it(*process)
                || !self.agrees(*process).unwrap_or(false)
            {
                continue;
            }
            match self.link(*process, &on) {
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

    fn at_liberty(&mut self) -> bool {
        threads::at_liberty(&self.root, self.main).is_ok()
    }

    fn judge(&mut self, window: &Window) -> Result<(), String> {
        self.watch.judge(&self.name, window.cpu, window.hits)
    }

    fn unpaid(&mut self, processes: &[ProcessId]) -> Unpaid {
        self.children.since(&self.root, processes, &self.executables)
    }

    fn begin(&mut self) {
        self.at_once.begin(&self.root, self.links.keys().copied());
    }

    fn hit_cost(&mut self) -> Option<f64> {
        Some(self.at_once.look(&self.root, self.links.keys().copied()))
    }

    fn allowance(&self) -> f64 {
        0.0
    }
}

#[derive(Default)]
pub(super) struct Watch {
    silent: u32,
    recent: VecDeque<[u64; 2]>,
    /// Initial ratio of site to witness (logarithm).
    ratio: Option<f64>,
}

impl Watch {
    /// Checks that the site keeps its meaning, after a turn with this CPU time and these hits while counted.
    pub(super) fn judge(&mut self, name: &str, used: f64, hits: [u64; 2]) -> Result<(), String> {
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
        // With a known ratio, the hits expected from the other site suffice: one of the two may have stopped.
        let expected = |other: u64, sign: f64| self.ratio.map_or(0.0, |r| other as f64 * (sign * r).exp());
        let enough = |own: u64, expected: f64| own >= RATIO_HITS || expected >= RATIO_HITS as f64;
        if !enough(point, expected(witness, 1.0)) || !enough(witness, expected(point, -1.0)) {
            return Ok(());
        }
        let ratio = (point.max(1) as f64 / witness.max(1) as f64).ln();
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

#[cfg(test)]
mod tests {
    use super::*;

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
        // Also when it does not run at all any more, or the point hardly does.
        for hits in [[1000, 0], [2, 500]] {
            let mut watch = Watch::default();
            assert!(watch.judge("x", 1.0, [1000, 500]).is_ok());
            let lost = (0..RATIO_TURNS + 1).find_map(|_| watch.judge("x", 1.0, hits).err());
            assert!(lost.is_some_and(|why| why.contains("moved apart")), "{hits:?}");
        }
        // Few hits say nothing.
        let mut watch = Watch::default();
        for turn in 0..100u64 {
            assert!(watch.judge("x", 1.0, [turn % 7, 3]).is_ok());
        }
    }
}
