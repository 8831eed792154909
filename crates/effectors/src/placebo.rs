//! A change that changes nothing. An experiment that accepts it is a false accept, so it measures homeostat's own
//! error. It takes the path of every other effector (record, slices, verification), only without an effect.

use crate::Effector;
use homeostat_kernel::Root;
use homeostat_model::action::Target;
use homeostat_model::{Action, Direction, EffectorId, Progress, UndoRecord};
use homeostat_platform::PlatformError;
use std::collections::BTreeMap;

pub(super) struct Placebo {
    root: Root,
}

impl Placebo {
    pub(super) fn new(root: Root) -> Self {
        Self { root }
    }
}

impl Effector for Placebo {
    fn id(&self) -> EffectorId {
        EffectorId::new("placebo")
    }

    fn prepare(&mut self, action: &Action) -> Result<UndoRecord, PlatformError> {
        match &action.target {
            Target::Nothing => Ok(UndoRecord {
                action: action.clone(),
                boot_id: crate::identity::boot_id(&self.root)?,
                found: BTreeMap::new(),
            }),
            target @ (Target::Memory(_)
            | Target::Files(_)
            | Target::Cpus(_)
            | Target::Pages(_)
            | Target::Reader(_)) => Err(PlatformError::Rejected {
                what: "placebo".into(),
                value: format!("{target:?}").chars().take(80).collect(),
                errno: "a placebo has no target".into(),
            }),
        }
    }

    fn advance(&mut self, _record: &UndoRecord, _direction: Direction) -> Result<Progress, PlatformError> {
        Ok(Progress {
            done: true,
            verified: true,
            ..Progress::default()
        })
    }

    fn forget(&mut self, _record: &UndoRecord) {}
}
