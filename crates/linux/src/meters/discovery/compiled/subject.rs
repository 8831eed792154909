//! A point in code that no file holds, while it is counted.

use super::super::super::code_file::executable;
use super::super::super::common::{ENTRIES_MAX, numbers_in, open_process};
use super::super::super::concern::{Refusal, threads};
use super::super::super::turns::{Lost, Subject, Unpaid, Window};
use super::super::active::failed;
use super::super::probes::Watch;
use super::{Instruction, Memory, Set};
use crate::Root;
use crate::sys::perf::OpenError;
use homeostat_model::{ProcessId, Workload};
use homeostat_platform::PlatformError;
use std::collections::BTreeSet;
use std::sync::Arc;

/// Most threads that get breakpoints: each takes two descriptors.
pub(in crate::meters::discovery) const THREADS_MAX: usize = 128;

/// The breakpoints on the point and its witness.
pub(in crate::meters::discovery) struct Compiled {
    root: Root,
    main: ProcessId,
    executable: (u64, u64),
    /// The point, and its witness.
    places: Vec<Instruction>,
    set: Arc<Set>,
    watch: Watch,
    pace: Pace,
}

/// Whether the point still runs as it did at first. A compiler leaves the old code where it is, and a thread that is in it may stay there
/// for long while all others run the new one: then it hardly runs, and its witness in the same code as little.
#[derive(Default)]
struct Pace {
    /// Hits and CPU time of the first windows.
    first: (u64, f64),
    /// Windows one after the other in which it hardly ran.
    slow: u32,
}

/// Hits in the first windows from which its rate is known.
const FIRST_HITS: u64 = 400;
/// It hardly runs at less than this share of that rate: more than what is tried changes it by.
const HARDLY: f64 = 0.25;
/// … in so many windows one after the other, each long enough for so many hits at the old rate.
const SLOW_MAX: u32 = 3;
const EXPECTED_MIN: f64 = 20.0;

impl Pace {
    fn judge(&mut self, name: &str, window: &Window) -> Result<(), String> {
        if self.first.0 < FIRST_HITS {
            self.first.0 = self.first.0.saturating_add(window.hits[0]);
            self.first.1 += window.cpu;
            return Ok(());
        }
        let expected = self.first.0 as f64 / self.first.1.max(1e-9) * window.cpu;
        if expected < EXPECTED_MIN {
            return Ok(());
        }
        self.slow = if (window.hits[0] as f64) < HARDLY * expected {
            self.slow + 1
        } else {
            0
        };
        if self.slow < SLOW_MAX {
            return Ok(());
        }
        Err(format!(
            "{name} has run less than a quarter as often as at first in {SLOW_MAX} turns of counting: its code was probably made anew"
        ))
    }
}

impl Compiled {
    /// `places`: the point and, if there is one, its witness.
    pub(in crate::meters::discovery) fn new(
        root: &Root,
        main: ProcessId,
        executable: (u64, u64),
        places: Vec<Instruction>,
    ) -> Self {
        Self {
            root: root.clone(),
            main,
            executable,
            set: Arc::new(Set::new(places.iter().map(|p| p.address).collect())),
            places,
            watch: Watch::default(),
            pace: Pace::default(),
        }
    }

    /// Where its hits are read.
    pub(in crate::meters::discovery) fn hits(&self) -> Arc<Set> {
        Arc::clone(&self.set)
    }
}

/// Threads of a process.
///
/// # Errors
/// Gone, or more than can be counted.
pub(in crate::meters::discovery) fn threads_of(
    root: &Root,
    process: ProcessId,
) -> Result<BTreeSet<i32>, PlatformError> {
    let dir = open_process(root, process)?;
    let (threads, _) = numbers_in(&dir, "task", ENTRIES_MAX).map_err(|_| failed(OpenError::Vanished))?;
    if threads.len() > THREADS_MAX {
        return Err(PlatformError::Unsupported {
            what: "counting a progress point".to_owned(),
            why: format!(
                "process {process} has {} threads; in code that no file holds at most {THREADS_MAX} are counted",
                threads.len()
            ),
        });
    }
    Ok(threads.into_iter().collect())
}

impl Subject for Compiled {
    fn name(&self) -> &str {
        self.places.first().map_or("", |p| &p.name)
    }

    fn check(&mut self, workload: &Workload) -> Result<(), Lost> {
        match executable(&self.root, self.main) {
            None => {
                return Err(Lost::Vanished(PlatformError::Vanished {
                    target: format!("process {}", self.main),
                }));
            }
            Some(now) if now != self.executable => {
                return Err(Lost::Changed(format!(
                    "process {} runs another program now",
                    self.main
                )));
            }
            Some(_) => {}
        }
        if workload.processes != [self.main] {
            // It may be a child for a moment.
            return Err(Lost::Paused(
                "it has several processes now, and code that one of them has made is counted in that one only"
                    .to_owned(),
            ));
        }
        let memory = Memory::open(&self.root, self.main).map_err(Lost::Vanished)?;
        if let Some(place) = self.places.iter().find(|p| !memory.holds(p)) {
            return Err(Lost::Changed(format!("the code at {} was made anew", place.name)));
        }
        threads::at_liberty(&self.root, self.main).map_err(|why| Lost::Paused(why.to_string()))
    }

    fn attach(&mut self, _: &[ProcessId]) -> Result<(), PlatformError> {
        let threads = threads_of(&self.root, self.main)?;
        self.set.be_on(&threads).map_err(failed)?;
        if self.set.threads() == 0 {
            return Err(failed(OpenError::Vanished));
        }
        self.set.switch(true);
        Ok(())
    }

    fn off(&mut self) -> Result<(), Refusal> {
        // Also of those that are not on a thread has four only, and others want them.
        self.set.close();
        Ok(())
    }

    fn at_liberty(&mut self) -> bool {
        threads::at_liberty(&self.root, self.main).is_ok()
    }

    fn judge(&mut self, window: &Window) -> Result<(), String> {
        let name = self.places.first().map_or("", |p| p.name.as_str());
        self.pace.judge(name, window)?;
        self.watch.judge(name, window.cpu, window.hits)
    }

    fn unpaid(&mut self, _: &[ProcessId]) -> Unpaid {
        // Children do not inherit them.
        Unpaid::default()
    }

    fn allowance(&self) -> f64 {
        0.0
    }
}

impl Drop for Compiled {
    fn drop(&mut self) {
        // Whoever reads holds the set, too.
        self.set.close();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_point_that_hardly_runs_any_more_is_lost() {
        let window = |cpu, hits| Window { cpu, hits: [hits, 0] };
        let mut pace = Pace::default();
        for _ in 0..20 {
            assert!(pace.judge("x", &window(0.1, 100)).is_ok());
        }
        // A change makes it slower; it rests; one thread is late.
        for _ in 0..20 {
            assert!(pace.judge("x", &window(0.1, 40)).is_ok());
            assert!(pace.judge("x", &window(0.01, 0)).is_ok());
            assert!(pace.judge("x", &window(0.1, 5)).is_ok());
        }
        assert!(pace.judge("x", &window(0.1, 50)).is_ok());
        for _ in 1..SLOW_MAX {
            assert!(pace.judge("x", &window(0.1, 5)).is_ok());
        }
        assert!(
            pace.judge("x", &window(0.1, 5))
                .unwrap_err()
                .contains("made anew")
        );
    }
}
