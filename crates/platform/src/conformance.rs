//! Checks that every implementation of the seam must pass, on a machine that changes as little as it can.

use crate::{Clock, Effectors, PlatformError, SampleRequest, Sensors};
use homeostat_model::{Direction, Nanoseconds};

/// Checks that a fresh implementation describes a machine and delivers samples that hold together.
/// Returns the list of broken promises; empty when all hold.
pub fn sensing(platform: &mut dyn Sensors) -> Vec<String> {
    let mut broken = Vec::new();
    let mut check = |ok: bool, what: &str| {
        if !ok {
            broken.push(what.to_owned());
        }
    };
    match platform.machine() {
        Ok(machine) => {
            check(!machine.cpus.is_empty(), "a machine has at least one CPU");
            check(
                !machine.nodes.is_empty(),
                "a machine has at least one memory node",
            );
            check(machine.memory.0 > 0, "a machine has memory");
            check(
                machine.page_size.0.is_power_of_two(),
                "the page size is a power of two",
            );
            check(!machine.boot_id.is_empty(), "the boot has an id");
            check(
                machine.cpus.windows(2).all(|w| w[0].id < w[1].id),
                "CPUs are listed in ascending order, each once",
            );
        }
        Err(e) => check(false, &format!("machine() succeeds: {e}")),
    }
    let first = platform.sample(&SampleRequest {
        scan: true,
        detail: vec![],
    });
    let second = platform.sample(&SampleRequest {
        scan: true,
        detail: vec![],
    });
    match (first, second) {
        (Ok(a), Ok(b)) => {
            check(a.at <= b.at, "time does not go back");
            check(
                a.workloads.is_some() && b.workloads.is_some(),
                "a scan lists the workloads",
            );
            for s in [&a, &b] {
                if let Some(list) = &s.workloads {
                    let mut ids: Vec<_> = list.iter().map(|w| &w.id).collect();
                    let n = ids.len();
                    ids.sort();
                    ids.dedup();
                    check(ids.len() == n, "workload ids are unique");
                    check(
                        list.iter().all(|w| !w.processes.is_empty()),
                        "a workload has a process",
                    );
                }
            }
            let quiet = platform.sample(&SampleRequest::default());
            check(
                quiet.is_ok_and(|s| s.workloads.is_none()),
                "a sample without a scan does not list workloads",
            );
        }
        (Err(e), _) | (_, Err(e)) => check(false, &format!("sample() succeeds: {e}")),
    }
    check(
        platform.find_meters(&"no such workload".into()).is_err(),
        "find_meters of an unknown workload is an error",
    );
    check(
        platform.inspect_memory(&"no such workload".into()).is_err(),
        "inspect_memory of an unknown workload is an error",
    );
    check(
        platform.inspect_locality(&"no such workload".into()).is_err(),
        "inspect_locality of an unknown workload is an error",
    );
    check(
        platform.take_lost_meters().is_empty(),
        "a meter that was never opened is not lost",
    );
    broken.extend(placing(platform));
    broken
}

/// Workloads whose places are looked at in a check.
const PLACED: usize = 3;

/// Checks that places are places of the machine. Where the machine cannot tell them there is nothing to check.
fn placing(platform: &mut dyn Sensors) -> Vec<String> {
    let Ok(machine) = platform.machine() else {
        return Vec::new();
    };
    let scanned = platform.sample(&SampleRequest {
        scan: true,
        detail: vec![],
    });
    let workloads = scanned.ok().and_then(|s| s.workloads).unwrap_or_default();
    let mut broken = Vec::new();
    for workload in workloads.iter().take(PLACED) {
        // It may have ended, or be somebody else's.
        let Ok(found) = platform.inspect_locality(&workload.id) else {
            continue;
        };
        let mut check = |ok: bool, what: &str| {
            if !ok {
                broken.push(format!("{}: {what}", workload.id));
            }
        };
        check(
            found.workload == workload.id,
            "places are those of the workload that was asked for",
        );
        check(
            found.running.iter().all(|(llc, cpus)| {
                cpus.is_finite() && *cpus >= 0.0 && machine.cpus.iter().any(|c| c.llc == *llc)
            }),
            "threads run on caches of the machine",
        );
        check(
            found
                .private
                .keys()
                .chain(found.shared.keys())
                .chain(found.huge.keys())
                .all(|node| machine.nodes.iter().any(|n| n.id == *node)),
            "memory lies on nodes of the machine",
        );
        check(
            found.threads_of_busiest_process <= found.threads,
            "no process has more threads than its workload",
        );
    }
    broken
}

/// How often an effector may say "not now" in a row before that counts as a broken promise.
const BUSY_MAX: u32 = 20;
/// Wait after each.
const BUSY_WAIT: Nanoseconds = Nanoseconds::from_millis(250);
/// Longest pause between two slices, whatever the effector asks for.
const PAUSE_MAX: Nanoseconds = Nanoseconds::from_secs(1);
/// Slices in one direction.
const SLICES_MAX: u32 = 100_000;

/// Checks that an action can be applied, undone, undone again, and undone from the record alone by
/// `fresh`, an implementation that never saw it applied (as after a crash). Nothing waits: where "not now"
/// ([`PlatformError::Busy`]) is an answer that time may change, use [`acting_patiently`].
pub fn acting(
    platform: &mut dyn Effectors,
    fresh: &mut dyn Effectors,
    action: &homeostat_model::Action,
) -> Vec<String> {
    check_acting(platform, fresh, action, None)
}

/// As [`acting`], with the pauses that the effector asks for. "Not now" is no broken promise: it is asked again a bounded
/// number of times, as the runtime does.
pub fn acting_patiently(
    platform: &mut dyn Effectors,
    fresh: &mut dyn Effectors,
    action: &homeostat_model::Action,
    clock: &dyn Clock,
) -> Vec<String> {
    check_acting(platform, fresh, action, Some(clock))
}

fn check_acting(
    platform: &mut dyn Effectors,
    fresh: &mut dyn Effectors,
    action: &homeostat_model::Action,
    clock: Option<&dyn Clock>,
) -> Vec<String> {
    let mut broken = Vec::new();
    let record = match patiently(clock, || platform.prepare(action)) {
        Ok(r) => r,
        Err(e) => return vec![format!("prepare() succeeds: {e}")],
    };
    if record.action != *action {
        broken.push("the undo record carries the action".to_owned());
    }
    let mut drive = |p: &mut dyn Effectors, direction, what: &str| {
        for _ in 0..SLICES_MAX {
            match patiently(clock, || p.advance(&record, direction)) {
                Ok(progress) if progress.done => return,
                Ok(progress) => {
                    if let Some(clock) = clock {
                        clock.sleep(progress.pause.min(PAUSE_MAX));
                    }
                }
                Err(e) => {
                    broken.push(format!("{what} succeeds: {e}"));
                    return;
                }
            }
        }
        broken.push(format!("{what} ends"));
    };
    drive(platform, Direction::Apply, "apply");
    drive(platform, Direction::Apply, "a second apply");
    drive(platform, Direction::Undo, "undo");
    drive(platform, Direction::Undo, "a second undo");
    drive(platform, Direction::Apply, "apply after undo");
    drive(fresh, Direction::Undo, "undo from the record alone");
    broken
}

/// Asks until the answer is another than "not now", as long as there is time.
fn patiently<T>(
    clock: Option<&dyn Clock>,
    mut ask: impl FnMut() -> Result<T, PlatformError>,
) -> Result<T, PlatformError> {
    let mut answer = ask();
    if let Some(clock) = clock {
        for _ in 0..BUSY_MAX {
            if !matches!(answer, Err(PlatformError::Busy { .. })) {
                break;
            }
            clock.sleep(BUSY_WAIT);
            answer = ask();
        }
    }
    answer
}

#[cfg(test)]
mod tests {
    use super::*;
    use homeostat_model::action::Target;
    use homeostat_model::{Action, ActionId, Progress, UndoRecord};
    use std::cell::Cell;
    use std::collections::BTreeMap;

    /// Says "not now" so often before each answer.
    struct Hesitant {
        refusals: u32,
        left: u32,
    }

    impl Hesitant {
        fn new(refusals: u32) -> Self {
            Self {
                refusals,
                left: refusals,
            }
        }

        fn answer<T>(&mut self, value: T) -> Result<T, PlatformError> {
            if self.left > 0 {
                self.left -= 1;
                return Err(PlatformError::Busy {
                    what: "anything".into(),
                    why: "not now".into(),
                });
            }
            self.left = self.refusals;
            Ok(value)
        }
    }

    impl Effectors for Hesitant {
        fn prepare(&mut self, action: &Action) -> Result<UndoRecord, PlatformError> {
            self.answer(UndoRecord {
                action: action.clone(),
                boot_id: "boot".into(),
                found: BTreeMap::new(),
            })
        }
        fn advance(&mut self, _: &UndoRecord, _: Direction) -> Result<Progress, PlatformError> {
            self.answer(Progress {
                done: true,
                verified: true,
                ..Progress::default()
            })
        }
        fn forget(&mut self, _: &UndoRecord) {}
    }

    struct Counted(Cell<u64>);

    impl Clock for Counted {
        fn now(&self) -> Nanoseconds {
            Nanoseconds(self.0.get())
        }
        fn unix_seconds(&self) -> u64 {
            0
        }
        fn sleep(&self, length: Nanoseconds) {
            self.0.set(self.0.get() + length.0);
        }
    }

    #[test]
    fn not_now_is_no_broken_promise_unless_it_never_ends() {
        let action = Action {
            id: ActionId(1),
            effector: "hesitant".into(),
            workload: "w".into(),
            target: Target::Nothing,
            arguments: BTreeMap::new(),
            why: String::new(),
        };
        let clock = Counted(Cell::new(0));
        let patient = |refusals| {
            acting_patiently(
                &mut Hesitant::new(refusals),
                &mut Hesitant::new(refusals),
                &action,
                &clock,
            )
        };
        assert_eq!(patient(3), Vec::<String>::new());
        assert_eq!(
            clock.now(),
            Nanoseconds(BUSY_WAIT.0 * 3 * 7),
            "each of seven answers was waited for"
        );
        let broken = patient(BUSY_MAX + 1);
        assert!(broken.len() == 1 && broken[0].contains("prepare"), "{broken:?}");
        let broken = acting(&mut Hesitant::new(1), &mut Hesitant::new(0), &action);
        assert!(broken.len() == 1 && broken[0].contains("not now"), "{broken:?}");
    }
}
