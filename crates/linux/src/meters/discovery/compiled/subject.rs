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
        if workload.processes.len() > 1 {
            return Err(Lost::Changed(
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
        self.set.switch(false);
        Ok(())
    }

    fn at_liberty(&mut self) -> bool {
        threads::at_liberty(&self.root, self.main).is_ok()
    }

    fn judge(&mut self, window: &Window) -> Result<(), String> {
        let name = self.places.first().map_or("", |p| p.name.as_str());
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
