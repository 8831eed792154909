//! Checks that every implementation of the seam must pass, on a machine that changes as little as it can.

use crate::{Effectors, SampleRequest, Sensors};
use homeostat_model::Direction;

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

/// Checks that an action can be applied, undone, undone again, and undone from the record alone by
/// `fresh`, an implementation that never saw it applied (as after a crash).
pub fn acting(
    platform: &mut dyn Effectors,
    fresh: &mut dyn Effectors,
    action: &homeostat_model::Action,
) -> Vec<String> {
    let mut broken = Vec::new();
    let record = match platform.prepare(action) {
        Ok(r) => r,
        Err(e) => return vec![format!("prepare() succeeds: {e}")],
    };
    if record.action != *action {
        broken.push("the undo record carries the action".to_owned());
    }
    let mut drive = |p: &mut dyn Effectors, direction, what: &str| {
        for _ in 0..100_000 {
            match p.advance(&record, direction) {
                Ok(progress) if progress.done => return,
                Ok(_) => {}
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
