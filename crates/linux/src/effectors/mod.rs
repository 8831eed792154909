//! What can be changed, one file each. To add one: a file here, a line in [`Registry::new`].

mod control_group;
mod large_pages;
mod placebo;

use crate::Root;
use homeostat_model::{Action, Direction, EffectorId, Progress, UndoRecord};
use homeostat_platform::PlatformError;

/// One kind of change. See `homeostat_platform::Effectors` for the contract of each method.
pub trait Effector {
    /// Stable name.
    fn id(&self) -> EffectorId;
    /// What will be needed to revert the action; changes nothing.
    fn prepare(&mut self, action: &Action) -> Result<UndoRecord, PlatformError>;
    /// Next slice towards the named state.
    fn advance(&mut self, record: &UndoRecord, direction: Direction) -> Result<Progress, PlatformError>;
    /// Forget in-memory state about the action.
    fn forget(&mut self, record: &UndoRecord);
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
                Box::new(placebo::Placebo::new(root.clone())),
            ],
        }
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
}
