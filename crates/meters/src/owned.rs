//! Restricts meters to the workload's own user.
//!
//! Another user's process in the same group publishes what that user likes. So meters that read a process's own
//! statements see only processes of the main process's user and of root. The kernel's meters of a group see all.

use crate::{Meter, MeterKind};
use homeostat_kernel::Root;
use homeostat_model::{MeterCandidate, MeterId, Nanoseconds, ProcessId, Workload};
use homeostat_platform::PlatformError;
use std::borrow::Cow;
use std::collections::BTreeSet;

/// A meter kind that sees only processes of the main one's user and root's.
pub(super) struct Owned(pub(super) Box<dyn MeterKind>);

/// The workload without the processes of other users.
fn own(workload: &Workload) -> Cow<'_, Workload> {
    if workload.others.is_empty() {
        return Cow::Borrowed(workload);
    }
    let others: BTreeSet<ProcessId> = workload.others.iter().copied().collect();
    Cow::Owned(Workload {
        processes: workload
            .processes
            .iter()
            .filter(|p| !others.contains(p))
            .copied()
            .collect(),
        ..workload.clone()
    })
}

impl MeterKind for Owned {
    fn find(&mut self, root: &Root, workload: &Workload) -> Vec<MeterCandidate> {
        let mut found = self.0.find(root, &own(workload));
        if !workload.others.is_empty() {
            for why in found.iter_mut().filter_map(|c| c.refused.as_mut()) {
                why.push_str(&format!(
                    " ({} of its processes belong to other users than its main process; what they publish is not taken for its work)",
                    workload.others.len()
                ));
            }
        }
        found
    }

    fn open(
        &mut self,
        root: &Root,
        workload: &Workload,
        id: &MeterId,
    ) -> Result<Box<dyn Meter>, PlatformError> {
        let meter = self.0.open(root, &own(workload), id)?;
        Ok(Box::new(OwnedMeter(meter)))
    }

    fn story(&self, workload: &Workload, id: &MeterId) -> Option<String> {
        self.0.story(&own(workload), id)
    }
}

struct OwnedMeter(Box<dyn Meter>);

impl Meter for OwnedMeter {
    fn read(&mut self, workload: &Workload) -> Result<f64, PlatformError> {
        self.0.read(&own(workload))
    }
    fn is_over(&self) -> bool {
        self.0.is_over()
    }
    fn forget_ended(&mut self, workload: &Workload) {
        self.0.forget_ended(&own(workload));
    }
    fn counted(&self) -> Option<f64> {
        self.0.counted()
    }
    fn lag(&self) -> Nanoseconds {
        self.0.lag()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;
    use std::rc::Rc;

    /// Notes which processes a kind is asked about.
    struct Noted(Rc<RefCell<Vec<Vec<i32>>>>);

    impl Noted {
        fn note(&self, workload: &Workload) {
            let pids = workload.processes.iter().map(|p| p.pid).collect();
            self.0.borrow_mut().push(pids);
        }
    }

    impl MeterKind for Noted {
        fn find(&mut self, _: &Root, workload: &Workload) -> Vec<MeterCandidate> {
            self.note(workload);
            vec![crate::common::refused(
                "noted",
                homeostat_model::MeterClass::Application,
                "count",
                "it publishes nothing",
            )]
        }
        fn open(
            &mut self,
            _: &Root,
            workload: &Workload,
            _: &MeterId,
        ) -> Result<Box<dyn Meter>, PlatformError> {
            self.note(workload);
            Ok(Box::new(Noted(self.0.clone())))
        }
    }

    impl Meter for Noted {
        fn read(&mut self, workload: &Workload) -> Result<f64, PlatformError> {
            self.note(workload);
            Ok(0.0)
        }
    }

    #[test]
    fn what_other_users_publish_is_never_asked_for() {
        let process = |pid: i32| ProcessId { pid, start_ticks: 1 };
        let workload = Workload {
            others: vec![process(8), process(9)],
            ..crate::testing::workload("w", vec![process(7), process(8), process(9), process(10)])
        };
        let asked = Rc::new(RefCell::new(Vec::new()));
        let mut kind = Owned(Box::new(Noted(asked.clone())));
        let found = kind.find(&Root::default(), &workload);
        assert!(
            found[0]
                .refused
                .as_deref()
                .unwrap()
                .contains("2 of its processes belong to other users")
        );
        let mut meter = kind
            .open(&Root::default(), &workload, &MeterId::from("noted"))
            .unwrap();
        meter.read(&workload).unwrap();
        assert_eq!(*asked.borrow(), [vec![7, 10], vec![7, 10], vec![7, 10]]);
    }
}
