//! Carries out one action as the runtime does: the journal first, then slices, then the notes; without a mind and so
//! without a verdict. The emulated machine shows no gain, so nothing here claims one.

use crate::{Failure, ensure};
use homeostat_kernel::Root;
use homeostat_kernel::clock::MonotonicClock;
use homeostat_linux::LinuxPlatform;
use homeostat_model::{Action, Direction, Progress, UndoRecord, Workload, WorkloadId};
use homeostat_platform::{Clock, Effectors, PlatformError, Reached, SampleRequest, Sensors};
use homeostat_runtime::RecoveryReport;
use homeostat_store::{Journal, JournalOptions};
use std::path::Path;
use std::time::Duration;

/// Scans until a process that was just started must have been seen.
const SCANS_MAX: u32 = 50;
/// Wait between two scans.
const SCAN_WAIT: Duration = Duration::from_millis(100);
/// Slices of one action: more than any scenario needs, so that a hang is a failure.
const SLICES_MAX: u32 = 200_000;
/// Times in a row that an effector may say "not now": a process that could not be looked at in time, as it happens on an
/// emulated CPU of a busy host, is not looked at again for half a minute, and then it may happen again.
const BUSY_MAX: u32 = 1800;
/// Wait after "not now".
const BUSY_WAIT: Duration = Duration::from_millis(100);

/// What the one who watches an action wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Watch {
    /// Go on.
    GoOn,
    /// Leave it where it is.
    Stop,
}

/// Effectors that wait when they are told "not now", as the runtime does: on an emulated CPU a busy process is looked at
/// more often than once before the look comes through.
#[derive(Debug)]
pub struct Patient<'a>(pub &'a mut LinuxPlatform);

impl Patient<'_> {
    fn insist<T>(
        &mut self,
        mut ask: impl FnMut(&mut LinuxPlatform) -> Result<T, PlatformError>,
    ) -> Result<T, PlatformError> {
        for _ in 1..BUSY_MAX {
            match ask(self.0) {
                Err(PlatformError::Busy { .. }) => std::thread::sleep(BUSY_WAIT),
                answer => return answer,
            }
        }
        ask(self.0)
    }
}

impl Effectors for Patient<'_> {
    fn prepare(&mut self, action: &Action) -> Result<UndoRecord, PlatformError> {
        self.insist(|platform| platform.prepare(action))
    }
    fn advance(&mut self, record: &UndoRecord, direction: Direction) -> Result<Progress, PlatformError> {
        self.insist(|platform| platform.advance(record, direction))
    }
    fn forget(&mut self, record: &UndoRecord) {
        self.0.forget(record);
    }
    fn inherit(&mut self, record: &UndoRecord, reached: Reached) {
        self.0.inherit(record, reached);
    }
}

/// The platform and the journal.
pub struct Driver {
    /// The machine.
    pub platform: LinuxPlatform,
    /// What is owed an undo.
    pub journal: Journal,
    boot_id: String,
}

impl std::fmt::Debug for Driver {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Driver")
            .field("platform", &self.platform)
            .finish_non_exhaustive()
    }
}

impl Driver {
    /// A fresh platform on the running kernel, and the journal in this directory, which is made when it is absent.
    ///
    /// # Errors
    /// The machine cannot be described, or the journal cannot be opened.
    pub fn open(directory: &Path, options: JournalOptions) -> Result<Self, Failure> {
        private_directory(directory)?;
        let (journal, _) = Journal::open(directory, options)?;
        let mut platform = LinuxPlatform::new(Root::default());
        let machine = platform
            .machine()
            .map_err(Failure::platform("describing the machine"))?;
        Ok(Self {
            platform,
            journal,
            boot_id: machine.boot_id,
        })
    }

    fn find(&mut self, fits: impl Fn(&Workload) -> bool, whom: &str) -> Result<Workload, Failure> {
        let request = SampleRequest {
            scan: true,
            detail: vec![],
        };
        for _ in 0..SCANS_MAX {
            let snapshot = self
                .platform
                .sample(&request)
                .map_err(Failure::platform("scanning"))?;
            if let Some(found) = snapshot.workloads.unwrap_or_default().into_iter().find(&fits) {
                return Ok(found);
            }
            std::thread::sleep(SCAN_WAIT);
        }
        Err(Failure::Broken(format!("no scan recognises {whom}")))
    }

    /// The workload to which the process belongs.
    ///
    /// # Errors
    /// No scan recognises it.
    pub fn workload_of(&mut self, pid: i32) -> Result<Workload, Failure> {
        self.find(
            |w| w.processes.iter().any(|p| p.pid == pid),
            &format!("process {pid}"),
        )
    }

    /// The workload of that name.
    ///
    /// # Errors
    /// No scan recognises it.
    pub fn workload(&mut self, id: &WorkloadId) -> Result<Workload, Failure> {
        self.find(|w| w.id == *id, id.as_str())
    }

    /// Prepares the action and puts its undo on disk. Nothing has changed yet.
    ///
    /// # Errors
    /// The effector refuses, or the journal cannot be written.
    pub fn intend(&mut self, action: &Action) -> Result<UndoRecord, Failure> {
        let mut action = action.clone();
        action.id = self.journal.next_action_id();
        let record = Patient(&mut self.platform)
            .prepare(&action)
            .map_err(Failure::platform(format!("preparing {}", action.effector)))?;
        self.journal.intend(&record)?;
        Ok(record)
    }

    /// Drives an action until it is done or the watcher has seen enough; the last progress.
    ///
    /// # Errors
    /// Any fault but "not now", or no end.
    pub fn drive(
        &mut self,
        record: &UndoRecord,
        direction: Direction,
        mut watch: impl FnMut(&Progress) -> Result<Watch, Failure>,
    ) -> Result<Progress, Failure> {
        for _ in 0..SLICES_MAX {
            let progress =
                Patient(&mut self.platform)
                    .advance(record, direction)
                    .map_err(Failure::platform(format!(
                        "{direction:?} of {}",
                        record.action.effector
                    )))?;
            if watch(&progress)? == Watch::Stop || progress.done {
                return Ok(progress);
            }
            std::thread::sleep(Duration::from_nanos(progress.pause.0));
        }
        Err(Failure::Broken(format!(
            "{direction:?} of {} does not end",
            record.action.effector
        )))
    }

    /// Makes the change, whole, and notes it.
    ///
    /// # Errors
    /// As [`Driver::drive`].
    pub fn apply(&mut self, record: &UndoRecord) -> Result<Progress, Failure> {
        let progress = self.drive(record, Direction::Apply, |_| Ok(Watch::GoOn))?;
        self.journal.applied(record.action.id)?;
        Ok(progress)
    }

    /// Takes the change back, whole, and closes it.
    ///
    /// # Errors
    /// As [`Driver::drive`].
    pub fn undo(&mut self, record: &UndoRecord) -> Result<Progress, Failure> {
        self.journal.undoing(record.action.id)?;
        let progress = self.drive(record, Direction::Undo, |_| Ok(Watch::GoOn))?;
        self.platform.forget(record);
        self.journal.closed(record.action.id)?;
        Ok(progress)
    }

    /// Undoes all that is owed, as a daemon that starts after a crash.
    ///
    /// # Errors
    /// Something could not be undone, or is owed afterwards.
    pub fn restore(&mut self) -> Result<RecoveryReport, Failure> {
        let clock = MonotonicClock;
        let report = homeostat_runtime::restore(
            &mut self.journal,
            &mut self.platform,
            &clock as &dyn Clock,
            &self.boot_id,
            false,
        );
        ensure!(report.complete(), "not everything was undone: {report:?}");
        let owed = self.journal.owed().count();
        ensure!(owed == 0, "{owed} undos are owed after the restore");
        Ok(report)
    }
}

/// Makes a directory that only root may enter, as the journal wants it.
///
/// # Errors
/// It cannot be made.
pub fn private_directory(path: &Path) -> Result<(), Failure> {
    use std::os::unix::fs::DirBuilderExt;
    std::fs::DirBuilder::new()
        .mode(0o700)
        .recursive(true)
        .create(path)
        .map_err(Failure::system(format!("making {}", path.display())))
}
