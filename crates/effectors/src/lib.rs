//! The changes that homeostat can make, one file each. To add one: a file here, a line in [`Registry::new`].

mod aftercare;
mod bringing_back;
mod control_group;
mod cpuset;
pub mod fetcher;
mod giving_back;
mod identity;
mod keeper;
mod large_pages;
mod lost_parts;
mod memory_containment;
mod mounts;
mod numa_balancing;
mod pacing;
mod page_blocks;
mod page_dropping;
mod page_moves;
mod page_placement;
mod placebo;
pub mod prefetch;
mod setting;
mod thread_placement;

pub use keeper::KeepCounts;

pub use cpuset::keeps_masks;
pub use thread_placement::GROUPED_WHY_NOT;

use homeostat_kernel::Root;
use homeostat_kernel::numa::CpuMask;
use homeostat_model::{Action, Direction, EffectorId, ProcessId, Progress, UndoRecord, Workload, WorkloadId};
use homeostat_platform::{PlatformError, Reached};
use homeostat_sensors::settings::Holder;
use std::collections::BTreeMap;

/// One kind of change. See `homeostat_platform::Effectors` for the contract of each method.
pub trait Effector {
    /// Stable name.
    fn id(&self) -> EffectorId;
    /// The data needed to revert the action. Changes nothing.
    fn prepare(&mut self, action: &Action) -> Result<UndoRecord, PlatformError>;
    /// As [`Effector::prepare`], if the target names no processes. `members`: the workload's, oldest first.
    fn prepare_for(&mut self, action: &Action, members: &[ProcessId]) -> Result<UndoRecord, PlatformError> {
        let _ = members;
        self.prepare(action)
    }
    /// Next slice towards the named state.
    fn advance(&mut self, record: &UndoRecord, direction: Direction) -> Result<Progress, PlatformError>;
    /// Forget in-memory state about the action.
    fn forget(&mut self, record: &UndoRecord);
    /// After a scan of the processes: applies the changes in force to newcomers. Returns for each workload on which
    /// somebody has since chosen otherwise the sentence about it. At most a few milliseconds.
    fn review(&mut self, workloads: &BTreeMap<WorkloadId, Workload>) -> Vec<(WorkloadId, String)> {
        let _ = workloads;
        Vec::new()
    }
    /// At every sample: continues changes that are ongoing work, not a state. At most some 20 ms.
    fn tick(&mut self) {}
    /// Starts early the threads that it needs when memory is short. Failed ones start on demand.
    fn stand_by(&mut self) {}
    /// Starts the process that reads files in the control groups of others, if needed here. The error is for people.
    fn start_fetcher(&mut self, launch: fetcher::Launch) -> Result<(), String> {
        let _ = launch;
        Ok(())
    }
    /// A process of homeostat that may be in anybody's control group.
    fn helper(&self) -> Option<i32> {
        None
    }
    /// Takes over a change that an earlier process left in force: see [`homeostat_platform::Effectors::adopt`].
    fn adopt(&mut self, record: &UndoRecord) {
        let _ = record;
    }
    /// How an earlier process left an action that is owed an undo: see [`homeostat_platform::Effectors::inherit`].
    fn inherit(&mut self, record: &UndoRecord, reached: Reached) {
        let _ = (record, reached);
    }
    /// Whose value a host setting (a file) has, as far as this effector knows.
    fn holder(&self, file: &str) -> Holder {
        let _ = file;
        Holder::Unknown
    }
    /// The masks that an action gives to threads, by its record.
    fn masks_of(&self, record: &UndoRecord) -> Vec<CpuMask> {
        let _ = record;
        Vec::new()
    }
    /// The masks given to threads of a workload, each once, so that a sensor does not take them for a person's.
    fn placed_on(&self, workload: &WorkloadId) -> Vec<CpuMask> {
        let _ = workload;
        Vec::new()
    }
    /// Sentences for people about its own work since the last call, as in [`Effector::tick`], each with its workload.
    fn told(&mut self) -> Vec<(WorkloadId, String)> {
        Vec::new()
    }
    /// How well groups have been kept small, if this effector does that.
    fn kept_small(&self) -> Option<KeepCounts> {
        None
    }
}

/// All effectors of this machine.
pub struct Registry {
    effectors: Vec<Box<dyn Effector>>,
}

impl Registry {
    /// All effectors, acting on the machine below `root`.
    pub fn new(root: &Root) -> Self {
        Self {
            effectors: vec![
                Box::new(large_pages::LargePages::new(root.clone())),
                Box::new(memory_containment::MemoryContainment::new(root.clone())),
                Box::new(numa_balancing::NumaBalancing::new(root.clone())),
                Box::new(page_dropping::PageDropping::new(root.clone())),
                Box::new(page_placement::PagePlacement::new(root.clone())),
                Box::new(placebo::Placebo::new(root.clone())),
                Box::new(prefetch::Prefetch::new(root.clone())),
                Box::new(setting::Setting::new(root.clone())),
                Box::new(thread_placement::ThreadPlacement::new(root.clone())),
            ],
        }
    }

    /// Starts early what is needed when memory is short.
    pub fn stand_by(&mut self) {
        self.effectors.iter_mut().for_each(|effector| effector.stand_by());
    }

    /// Starts the process that reads lost pages in the control groups of others. Without it nothing is read again.
    ///
    /// # Errors
    /// Why it cannot be started, for people.
    pub fn start_fetcher(&mut self, launch: &fetcher::Launch) -> Result<(), String> {
        self.effectors
            .iter_mut()
            .try_for_each(|effector| effector.start_fetcher(launch.clone()))
    }

    /// A process of homeostat that may be in anybody's control group, and belongs to nobody.
    pub fn helper(&self) -> Option<i32> {
        self.effectors.iter().find_map(|effector| effector.helper())
    }

    /// As [`homeostat_platform::Effectors::prepare`], with the processes of the action's workload, oldest first.
    ///
    /// # Errors
    /// As there.
    pub fn prepare_for(
        &mut self,
        action: &Action,
        members: &[ProcessId],
    ) -> Result<UndoRecord, PlatformError> {
        self.find(&action.effector)?.prepare_for(action, members)
    }

    /// Reviews the changes in force after a scan: see [`Effector::review`].
    pub fn review(&mut self, workloads: &BTreeMap<WorkloadId, Workload>) -> Vec<(WorkloadId, String)> {
        self.effectors
            .iter_mut()
            .flat_map(|effector| effector.review(workloads))
            .collect()
    }

    /// Continues the changes in force that are ongoing work: see [`Effector::tick`].
    pub fn tick(&mut self) {
        for effector in &mut self.effectors {
            effector.tick();
        }
    }

    /// Whose value a host setting (a file) has.
    pub fn holder(&self, file: &str) -> Holder {
        let mut known = self.effectors.iter().map(|effector| effector.holder(file));
        known.find(|h| *h != Holder::Unknown).unwrap_or_default()
    }

    /// The masks that an action gives to threads, by its record. None if it is of another boot or not understood.
    pub fn masks_of(&self, record: &UndoRecord) -> Vec<CpuMask> {
        let effector = self.effectors.iter().find(|e| e.id() == record.action.effector);
        effector.map(|e| e.masks_of(record)).unwrap_or_default()
    }

    /// The masks that homeostat has given to threads of a workload, each once.
    pub fn placed_on(&self, workload: &WorkloadId) -> Vec<CpuMask> {
        self.effectors
            .iter()
            .flat_map(|effector| effector.placed_on(workload))
            .collect()
    }

    /// Sentences for people about work in addition to the changes since the last call, each with its workload.
    pub fn told(&mut self) -> Vec<(WorkloadId, String)> {
        self.effectors
            .iter_mut()
            .flat_map(|effector| effector.told())
            .collect()
    }

    /// How well control groups have been kept small since the start.
    pub fn kept_small(&self) -> KeepCounts {
        let told = self.effectors.iter().find_map(|effector| effector.kept_small());
        told.unwrap_or_default()
    }

    fn find(&mut self, id: &EffectorId) -> Result<&mut dyn Effector, PlatformError> {
        for effector in &mut self.effectors {
            if effector.id() == *id {
                return Ok(effector.as_mut());
            }
        }
        Err(PlatformError::Unsupported {
            what: format!("effector {id}"),
            why: "this version of homeostat does not have it; run the version that made the change".into(),
        })
    }
}

impl homeostat_platform::Effectors for Registry {
    fn prepare(&mut self, action: &Action) -> Result<UndoRecord, PlatformError> {
        self.find(&action.effector)?.prepare(action)
    }
    fn advance(&mut self, record: &UndoRecord, direction: Direction) -> Result<Progress, PlatformError> {
        self.find(&record.action.effector)?.advance(record, direction)
    }
    fn forget(&mut self, record: &UndoRecord) {
        if let Ok(effector) = self.find(&record.action.effector) {
            effector.forget(record);
        }
    }
    fn adopt(&mut self, record: &UndoRecord) {
        if let Ok(effector) = self.find(&record.action.effector) {
            effector.adopt(record);
        }
    }
    fn inherit(&mut self, record: &UndoRecord, reached: Reached) {
        if let Ok(effector) = self.find(&record.action.effector) {
            effector.inherit(record, reached);
        }
    }
}
