//! Looks for the progress points of a process: what was seen, what was counted, what was chosen.
//!
//! `cargo run -p homeostat-linux --example points -- PID [--observation]`
#![allow(clippy::print_stdout, clippy::unwrap_used, clippy::expect_used)]

use homeostat_kernel::Root;
use homeostat_model::{Fingerprint, OperatorChoice, ProcessId, Workload, WorkloadId, WorkloadKind};
use homeostat_probes::discovery::find_points;

fn start_ticks(pid: i32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit_once(')')?
        .1
        .split_ascii_whitespace()
        .nth(19)?
        .parse()
        .ok()
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let processes: Vec<ProcessId> = arguments
        .iter()
        .filter_map(|a| a.parse().ok())
        .filter_map(|pid| {
            Some(ProcessId {
                pid,
                start_ticks: start_ticks(pid)?,
            })
        })
        .collect();
    let Some(main) = processes.first() else {
        println!("which process? points PID [PID...] [--observation]");
        return;
    };
    let executable = std::fs::read_link(format!("/proc/{main}/exe"))
        .map(|p| p.to_string_lossy().into_owned())
        .unwrap_or_default();
    let program = executable.rsplit('/').next().unwrap_or_default().to_owned();
    let workload = Workload {
        id: WorkloadId::from(program.as_str()),
        kind: WorkloadKind::ProcessGroup,
        former: None,
        owner: homeostat_model::Owner::Machine,
        others: Vec::new(),
        fingerprint: Fingerprint::from(program.as_str()),
        program,
        executable,
        processes,
        choice: OperatorChoice::default(),
    };
    let report = find_points(&Root::default(), &workload);
    println!("{}", report.account);
    match (&report.result, &report.reason) {
        (Ok(place), reason) => println!("point {place}: {}", reason.as_deref().unwrap_or("")),
        (Err(why), _) => println!("none: {why}"),
    }
    if let Some(seen) = report
        .observation
        .filter(|_| arguments.iter().any(|a| a == "--observation"))
    {
        println!("{}", serde_json::to_string(&seen).expect("numbers and texts"));
    }
}
