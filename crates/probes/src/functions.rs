//! Counts functions and static probes by BPF, which attaches many places at once: continuously, or sampled if that
//! costs too much ([`turns`](crate::turns)). One link counts a whole workload, and comes and goes in milliseconds. It
//! is detached soon after anybody traces the first thread of a process of the workload, or freezes it.

use crate::concern::keeper::Held;
use crate::concern::{Files, threads};
use crate::owed::{Entry, On, Owed};
use crate::turns::{Beginning, COUNTED, Children, Counting, Lost, Rest, Subject, Unpaid, Window};
use homeostat_kernel::Root;
use homeostat_kernel::bpf::{Counters, Link};
use homeostat_kernel::perf::OpenError;
use homeostat_meters::Meter;
use homeostat_meters::code_file::CodeFile;
use homeostat_meters::waits::Waits;
use homeostat_model::{Nanoseconds, ProcessId, Workload};
use homeostat_platform::PlatformError;
use homeostat_sensors::storage::Refusal;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Interval between full safety checks. In between, attach and detach only check that nobody stands still.
const LOOK_EVERY: Duration = Duration::from_secs(5);
/// Interval between checks for tracers and freezers while counting.
const LIBERTY_EVERY: Duration = Duration::from_millis(200);
/// Most processes per check, besides the main one: debuggers often attach to a process that serves a connection. Each
/// takes 20 to 40 µs (estimate) to read a few small files, so the checks stay at 0.1 % of a CPU per workload. Of ten
/// processes, each is checked every 0.6 s. Of 64, each is checked every 3.2 s.
const OTHERS_AT_ONCE: usize = 4;
/// Most processes that get a link each.
const LINKS_MAX: usize = 32;
/// Acceptable cost in a turn (seconds of CPU time): half a percent of a CPU.
const ALLOWANCE: f64 = 0.005;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Whose {
    /// Those of the workload's processes, with a link each. Children outside the workload are not counted.
    Processes,
    /// Everybody's: nobody else runs this program (device and inode).
    Everybody((u64, u64)),
}

pub(super) struct Plan {
    pub(super) id: String,
    /// The file in which the places were found, held open for the kernel.
    pub(super) file: Arc<CodeFile>,
    /// Offsets of the places and of their semaphores.
    pub(super) sites: Vec<(u64, u32)>,
    pub(super) files: Files,
    pub(super) whose: Whose,
    pub(super) cost: Nanoseconds,
    pub(super) cost_max: f64,
    /// Cost of each attach and detach without hits (seconds per CPU that the program uses). If it is not zero, the
    /// number of waits of its threads estimates the uncounted time.
    pub(super) coming_and_going: f64,
}

pub(super) struct Functions {
    id: String,
    counting: Counting,
}

impl Functions {
    /// Begins to count.
    ///
    /// # Errors
    /// As of a meter that is opened.
    pub(super) fn begin(root: &Root, workload: &Workload, plan: Plan) -> Result<Self, PlatformError> {
        let counters = Arc::new(Counters::new(1).map_err(|e| failed(&plan.id, e))?);
        let rest = if plan.coming_and_going > 0.0 {
            Rest::Waits {
                coming_and_going: plan.coming_and_going,
                waits: Waits::begin(root, workload),
            }
        } else {
            Rest::CpuTime
        };
        let (id, hit_cost, cost_max) = (plan.id.clone(), plan.cost.as_secs_f64(), plan.cost_max);
        let sites = Sites {
            root: root.clone(),
            plan,
            counters: counters.clone(),
            links: BTreeMap::new(),
            owed: None,
            looked: None,
            at_liberty: None,
            round: Round::default(),
            disturbed: false,
            strange: false,
            children: Children::default(),
        };
        let how = Beginning {
            root: root.clone(),
            counters,
            hit_cost,
            cost_max,
            // The first turn shows the cost, and ends early if it is high.
            share: 1.0,
            cpus: 0.0,
            rest,
        };
        Ok(Self {
            id,
            counting: Counting::begin(workload, sites, how)?,
        })
    }

    fn busy(&self, why: String) -> PlatformError {
        PlatformError::Busy {
            what: format!("meter {}", self.id),
            why,
        }
    }
}

impl Meter for Functions {
    fn read(&mut self, workload: &Workload) -> Result<f64, PlatformError> {
        match self.counting.read(workload) {
            Ok(Some(work)) => Ok(work),
            Ok(None) => Err(self.busy("its probes are being put on".to_owned())),
            Err(Lost::Paused(why)) => Err(self.busy(why)),
            Err(Lost::Vanished(e)) => Err(e),
            Err(Lost::Changed(why)) => Err(PlatformError::Unsupported {
                what: format!("meter {}", self.id),
                why,
            }),
        }
    }

    fn counted(&self) -> Option<f64> {
        self.counting.share()
    }

    fn lag(&self) -> Nanoseconds {
        self.counting.lag()
    }

    fn is_over(&self) -> bool {
        self.counting.is_over()
    }
}

fn failed(id: &str, e: OpenError) -> PlatformError {
    let what = format!("meter {id}");
    match e {
        OpenError::Denied(errno) => PlatformError::Denied {
            what,
            needs: format!("run homeostat as root, or with CAP_BPF and CAP_PERFMON ({errno})"),
        },
        OpenError::Vanished => PlatformError::Vanished {
            target: format!("the workload of {what}"),
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

struct Sites {
    root: Root,
    plan: Plan,
    counters: Arc<Counters>,
    /// By process. `None`: a link for everybody.
    links: BTreeMap<Option<ProcessId>, Held<Vec<Link>>>,
    /// The clean-up log entry, from before the first probe. Declared after the links, to end after them.
    owed: Option<Arc<Owed>>,
    /// Time of the last full check, and the workload's processes then.
    looked: Option<(Instant, Vec<ProcessId>)>,
    /// Time of the last check for tracers and freezers.
    at_liberty: Option<Instant>,
    round: Round,
    /// A tracer or freezer was seen. Only a full check permits counting again.
    disturbed: bool,
    /// The last check found another process that runs the program.
    strange: bool,
    children: Children,
}

/// Selects the processes to check in rotation.
#[derive(Default)]
struct Round {
    /// The first of the others to check next.
    next: usize,
}

impl Round {
    /// The main process, and the next few of the others.
    fn next_of(&mut self, processes: &[ProcessId]) -> Vec<ProcessId> {
        let Some((main, others)) = processes.split_first() else {
            return Vec::new();
        };
        // If the list changed, a full check has run since, so the rotation may start anywhere.
        let from = self.next.checked_rem(others.len()).unwrap_or(0);
        let count = OTHERS_AT_ONCE.min(others.len());
        self.next = from + count;
        let those = others.iter().cycle().skip(from).take(count);
        std::iter::once(main).chain(those).copied().collect()
    }
}

impl Sites {
    fn concerned(&self) -> Vec<ProcessId> {
        self.looked.as_ref().map_or_else(Vec::new, |(_, p)| p.clone())
    }

    fn look(&mut self, workload: &Workload) -> Result<(), Lost> {
        let first = self.looked.is_none();
        let allowed = if first {
            self.plan.files.allow_first(&self.root, &workload.processes)
        } else {
            self.plan.files.allow(&self.root, &workload.processes)
        };
        allowed.map_err(|why| match why {
            Refusal::Now(why) => Lost::Paused(why),
            Refusal::Lasting(why) => Lost::Changed(why),
        })?;
        if let Whose::Everybody(program) = self.plan.whose {
            let stranger = crate::uprobe::stranger_of(&self.root, workload, program);
            let again = std::mem::replace(&mut self.strange, stranger.is_some());
            if let Some(pid) = stranger {
                // It may be an orphaned child of the workload, just before it executes another program.
                return Err(if again {
                    Lost::Vanished(PlatformError::Vanished {
                        target: format!(
                            "the workload's sole use of its program (process {pid} runs it too), so its meter"
                        ),
                    })
                } else {
                    Lost::Paused(format!("process {pid} runs its program, too"))
                });
            }
        }
        self.looked = Some((Instant::now(), workload.processes.clone()));
        self.disturbed = false;
        Ok(())
    }

    /// Logs the places before the first breakpoint, once for all turns. Notes that some may be inserted.
    fn owe(&mut self) -> Result<On, Refusal> {
        if let Some(owed) = &self.owed {
            return owed.take();
        }
        let processes = self.concerned();
        let entries = self.plan.files.targets.iter();
        let owed = Owed::begin(
            &self.root,
            entries
                .map(|target| Entry::new(target, self.plan.sites.iter().copied(), &processes))
                .collect::<Result<_, _>>()?,
        )?;
        self.owed = Some(owed.clone());
        owed.take()
    }

    fn link(&mut self, process: Option<ProcessId>) -> Result<Held<Vec<Link>>, PlatformError> {
        let what = format!("meter {}", self.plan.id);
        let on = self.owe().map_err(|why| why.error(&what))?;
        let link = self
            .counters
            .attach_static(
                self.plan.file.kernel_path(),
                &self.plan.sites,
                COUNTED,
                process.map(|p| p.pid),
            )
            .map_err(|e| failed(&self.plan.id, e))?;
        let concerned = process.map_or_else(|| self.concerned(), |p| vec![p]);
        Ok(Held::new(
            &self.root,
            &self.plan.files,
            &concerned,
            vec![link],
            on,
        ))
    }
}

impl Subject for Sites {
    fn name(&self) -> &str {
        &self.plan.id
    }

    fn check(&mut self, workload: &Workload) -> Result<(), Lost> {
        let due = self
            .looked
            .as_ref()
            .is_none_or(|(at, processes)| at.elapsed() >= LOOK_EVERY || *processes != workload.processes);
        if due || self.disturbed {
            return self.look(workload);
        }
        if !self.links.is_empty() {
            // Nothing is about to be attached.
            return Ok(());
        }
        self.plan
            .files
            .settled_still(&self.root, &workload.processes)
            .map_err(|why| Lost::Paused(why.to_string()))
    }

    fn attach(&mut self, processes: &[ProcessId]) -> Result<(), PlatformError> {
        if processes.is_empty() {
            return Err(failed(&self.plan.id, OpenError::Vanished));
        }
        if matches!(self.plan.whose, Whose::Everybody(_)) {
            if self.links.is_empty() {
                let link = self.link(None)?;
                self.links.insert(None, link);
            }
            return Ok(());
        }
        let there: BTreeSet<ProcessId> = processes.iter().copied().collect();
        self.links
            .retain(|process, _| process.is_some_and(|p| there.contains(&p)));
        for process in processes.iter().take(LINKS_MAX) {
            if self.links.contains_key(&Some(*process)) {
                continue;
            }
            match self.link(Some(*process)) {
                Ok(link) => {
                    self.links.insert(Some(*process), link);
                }
                Err(PlatformError::Vanished { .. }) => {}
                Err(e) => return Err(e),
            }
        }
        if self.links.is_empty() {
            return Err(failed(&self.plan.id, OpenError::Vanished));
        }
        Ok(())
    }

    fn off(&mut self) -> Result<(), Refusal> {
        if self.links.is_empty() {
            return Ok(());
        }
        self.plan.files.settled(&self.root, &self.concerned())?;
        for link in std::mem::take(&mut self.links).into_values() {
            link.take_off_now();
        }
        Ok(())
    }

    fn at_liberty(&mut self) -> bool {
        if self.disturbed {
            // The next processes in the rotation may be others, and say nothing about this one.
            return false;
        }
        if self.at_liberty.is_some_and(|then| then.elapsed() < LIBERTY_EVERY) {
            return true;
        }
        self.at_liberty = Some(Instant::now());
        // Nobody traces an ended process.
        let now = match &self.looked {
            Some((_, processes)) => self.round.next_of(processes),
            None => Vec::new(),
        };
        let root = &self.root;
        self.disturbed = now.iter().any(|p| threads::at_liberty(root, *p).is_err());
        !self.disturbed
    }

    fn judge(&mut self, _window: &Window) -> Result<(), String> {
        // Readings show whether the place is reached at all.
        Ok(())
    }

    fn unpaid(&mut self, processes: &[ProcessId]) -> Unpaid {
        match self.plan.whose {
            // All hits are counted, whoever made them.
            Whose::Everybody(_) => Unpaid::default(),
            Whose::Processes => Unpaid {
                // A fork copies the page with the breakpoint anyway, whatever counts there.
                forks: 0,
                ..self.children.since(
                    &self.root,
                    processes,
                    &BTreeSet::from([self.plan.file.identity()]),
                )
            },
        }
    }

    fn allowance(&self) -> f64 {
        ALLOWANCE
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn processes(count: i32) -> Vec<ProcessId> {
        (1..=count).map(|pid| ProcessId { pid, start_ticks: 1 }).collect()
    }

    #[test]
    fn the_main_process_is_looked_at_each_time_and_each_of_64_in_sixteen_looks() {
        let all = processes(64);
        let mut round = Round::default();
        let mut seen = BTreeSet::new();
        for _ in 0..16 {
            let now = round.next_of(&all);
            assert_eq!(now.first(), all.first());
            assert!(now.len() <= 1 + OTHERS_AT_ONCE);
            seen.extend(now);
        }
        assert_eq!(seen.len(), all.len());
    }

    #[test]
    fn of_few_each_is_looked_at_each_time_and_once_also_after_others_have_gone() {
        let all = processes(40);
        let mut round = Round::default();
        for count in [40, 40, 5, 2, 1, 0, 5] {
            let mut now = round.next_of(&all[..count]);
            assert_eq!(now.len(), count.min(1 + OTHERS_AT_ONCE));
            now.sort_unstable();
            now.dedup();
            assert_eq!(now.len(), count.min(1 + OTHERS_AT_ONCE), "{now:?}");
            assert!(now.iter().all(|p| all[..count].contains(p)), "{now:?}");
        }
    }
}
