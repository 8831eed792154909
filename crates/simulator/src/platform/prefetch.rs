//! The effector `prefetch`.

use super::arguments::{cpus_text, numbers, target_cpus};
use super::{SWITCH_S, SimPlatform, done, left_alone, malformed};
use homeostat_model::{Action, CpuId, Direction, Progress, UndoRecord};
use homeostat_platform::PlatformError;
use std::collections::BTreeMap;

impl SimPlatform {
    pub(super) fn prepare_prefetch(
        &self,
        action: &Action,
    ) -> Result<BTreeMap<String, String>, PlatformError> {
        let world = self.world.borrow();
        let cpus = target_cpus(&world, action)?;
        let on: Vec<CpuId> = cpus.into_iter().filter(|c| world.has_prefetch(*c)).collect();
        if on.is_empty() {
            return Err(PlatformError::Conflict {
                what: "hardware prefetch".into(),
                expected: "on".into(),
                found: "off on all of these CPUs already".into(),
            });
        }
        Ok(BTreeMap::from([("on".to_owned(), cpus_text(&on))]))
    }

    pub(super) fn advance_prefetch(
        &mut self,
        record: &UndoRecord,
        direction: Direction,
    ) -> Result<Progress, PlatformError> {
        let mut world = self.world.borrow_mut();
        let cpus: Vec<CpuId> = record
            .found
            .get("on")
            .and_then(|t| numbers(t))
            .ok_or_else(|| malformed(record, "on"))?
            .into_iter()
            .map(CpuId)
            .collect();
        let on = cpus.iter().filter(|c| world.has_prefetch(**c)).count();
        let left = self.tasks.entry(record.action.id).or_default().left;
        match direction {
            Direction::Apply => {
                if left == Some(Direction::Apply) && on > 0 {
                    return Err(Self::conflict(
                        record,
                        "off".into(),
                        format!("on for {on} of {} CPUs", cpus.len()),
                    ));
                }
                // Off although we left it on: somebody else chose the same value.
                if left == Some(Direction::Undo) && on < cpus.len() {
                    return Err(Self::conflict(
                        record,
                        "on".into(),
                        format!("off for {} of {} CPUs", cpus.len() - on, cpus.len()),
                    ));
                }
                if on > 0 {
                    world.set_prefetch(&cpus, false);
                    world.charge(SWITCH_S);
                }
            }
            Direction::Undo => {
                if left == Some(Direction::Undo) && on < cpus.len() {
                    return Ok(left_alone());
                }
                if on < cpus.len() {
                    world.set_prefetch(&cpus, true);
                    world.charge(SWITCH_S);
                }
            }
        }
        drop(world);
        self.leave(record, direction);
        Ok(done())
    }
}
