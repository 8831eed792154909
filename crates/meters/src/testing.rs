//! Workloads for tests.
#![expect(clippy::unwrap_used, reason = "a test that lacks its own files is to fail")]

use homeostat_model::{Fingerprint, OperatorChoice, ProcessId, Workload, WorkloadId, WorkloadKind};

/// A workload of a program.
pub fn workload(program: &str, processes: Vec<ProcessId>) -> Workload {
    Workload {
        id: WorkloadId::from(program),
        kind: WorkloadKind::ProcessGroup,
        former: None,
        owner: homeostat_model::Owner::Machine,
        others: Vec::new(),
        fingerprint: Fingerprint::from(program),
        program: program.to_owned(),
        executable: format!("/usr/bin/{program}"),
        processes,
        choice: OperatorChoice::default(),
    }
}

/// This test program itself, as a workload.
pub fn own() -> Workload {
    let stat = std::fs::read("/proc/self/stat").unwrap();
    let start_ticks = homeostat_kernel::process::start_ticks(&stat).unwrap();
    workload(
        "own",
        vec![ProcessId {
            pid: std::process::id() as i32,
            start_ticks,
        }],
    )
}
