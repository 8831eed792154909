//! Functions and static probes where the kernel counts many places at once by BPF: all the time, or in turns where that would cost
//! the program too much ([`turns`](crate::turns)). One link counts a whole workload; it comes and goes in milliseconds. It goes soon
//! after somebody has begun to trace the first thread of a process of the workload, whichever that is, or to freeze it.

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

/// Time between two looks at everybody whom the probes concern; between them it is looked before each breakpoint comes or goes that
/// nobody of those stands still.
const LOOK_EVERY: Duration = Duration::from_secs(5);
/// Time between two looks, while it is counted, at whether somebody has begun to look into the program.
const LIBERTY_EVERY: Duration = Duration::from_millis(200);
/// Most processes beside the main one that are looked at each time: a debugger is often put on one that serves a connection. Each takes
/// the reading of a few small files (20 to 40 µs by estimate), so that the looks stay at a thousandth of a CPU for each workload. Of ten processes each
/// is looked at every .6 s, of 64 every 3.2 s.
const OTHERS_AT_ONCE: usize = 4;
/// Most processes that get a link each.
const LINKS_MAX: usize = 32;
/// Cost in a turn (seconds of CPU time) that nobody minds: half of a hundredth of a CPU.
const ALLOWANCE: f64 = 0.005;

/// Whose hits are counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Whose {
    /// Those of the workload's processes, each with a link of its own; not those of children that are not yet part of it.
    Processes,
    /// Of everybody who runs the file: nobody else runs this program (device and inode).
    Everybody((u64, u64)),
}

/// What is to be counted.
pub(super) struct Plan {
    /// The name of the meter.
    pub(super) id: String,
    /// Held open: what the places were found in is what the kernel is given.
    pub(super) file: Arc<CodeFile>,
    /// Offsets of the places, and of their semaphores.
    pub(super) sites: Vec<(u64, u32)>,
    pub(super) files: Files,
    pub(super) whose: Whose,
    /// Cost of a hit.
    pub(super) cost: Nanoseconds,
    /// Share of the program's CPU time that counting may cost.
    pub(super) cost_max: f64,
    /// CPU time that each coming and going takes beside the hits (seconds for each CPU that the program uses). Where that is something the
    /// time between windows is told by how often its threads waited.
    pub(super) coming_and_going: f64,
}

/// The meter.
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
            // What it costs shows in the first turn, which ends when that is much.
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

/// The places, and the links that count them.
struct Sites {
    root: Root,
    plan: Plan,
    counters: Arc<Counters>,
    /// By process; `None`: of everybody.
    links: BTreeMap<Option<ProcessId>, Held<Vec<Link>>>,
    /// That they may be on, from before the first. After them, so that it ends when they are off.
    owed: Option<Arc<Owed>>,
    /// When everybody was looked at last, and which processes the workload had.
    looked: Option<(Instant, Vec<ProcessId>)>,
    /// When it was looked last whether somebody has begun to look into the program.
    at_liberty: Option<Instant>,
    round: Round,
    /// Somebody has: all is looked at before anything is counted again, and nothing but that look says that it may be.
    disturbed: bool,
    /// At the last look somebody else ran the program.
    strange: bool,
    children: Children,
}

/// Which processes are looked at this time, so that each is some time.
#[derive(Default)]
struct Round {
    /// Of those beside the main one, the first that is looked at next.
    next: usize,
}

impl Round {
    /// The main process, and of the others those whose time it is.
    fn next_of(&mut self, processes: &[ProcessId]) -> Vec<ProcessId> {
        let Some((main, others)) = processes.split_first() else {
            return Vec::new();
        };
        // Where some have come or gone, everybody has been looked at since: it may begin anywhere.
        let from = self.next.checked_rem(others.len()).unwrap_or(0);
        let count = OTHERS_AT_ONCE.min(others.len());
        self.next = from + count;
        let those = others.iter().cycle().skip(from).take(count);
        std::iter::once(main).chain(those).copied().collect()
    }
}

impl Sites {
    /// Whom the links concern.
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
                // It may be a child of the workload's whose parent has ended, in the moment before it executes another program.
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

    /// Writes down where breakpoints will be, before the first of them; once for all turns. Notes that some may be in.
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
            // Nothing is about to be put on.
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
            // Those who are looked at next may be others, and say nothing of this one.
            return false;
        }
        if self.at_liberty.is_some_and(|then| then.elapsed() < LIBERTY_EVERY) {
            return true;
        }
        self.at_liberty = Some(Instant::now());
        // One that has ended is traced by nobody.
        let now = match &self.looked {
            Some((_, processes)) => self.round.next_of(processes),
            None => Vec::new(),
        };
        let root = &self.root;
        self.disturbed = now.iter().any(|p| threads::at_liberty(root, *p).is_err());
        !self.disturbed
    }

    fn judge(&mut self, _window: &Window) -> Result<(), String> {
        // Whether the place is reached at all is judged from the readings.
        Ok(())
    }

    fn unpaid(&mut self, processes: &[ProcessId]) -> Unpaid {
        match self.plan.whose {
            // All hits are counted, whoever made them.
            Whose::Everybody(_) => Unpaid::default(),
            Whose::Processes => Unpaid {
                // Children have copied the page with the breakpoint all along, with whatever counts there.
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
