//! Who else is concerned: processes outside of the workload that have its files mapped, and those that trace it.
//!
//! The kernel puts a breakpoint only into the address spaces that it was asked for. But to find them it goes through all that
//! map the file and locks each of them for a moment, so a library that half of the host uses is left out.

use super::super::code_file::{Mapping, text_of};
use super::super::common::{numbers_in, open_process, read_at};
use crate::Root;
use homeostat_model::{ProcessId, Workload};
use rustix::fs::{Mode, OFlags};
use std::collections::BTreeSet;

/// A library that more processes outside of the workload have mapped is left out.
const STRANGERS_MAX: usize = 16;
/// Most processes that are looked at.
const SCAN_MAX: usize = 4096;
/// Most that is read of the list of mappings of each of them.
const MAPS_MAX: usize = 256 * 1024;

/// Whether few processes outside of the workload have a library mapped.
///
/// # Errors
/// A sentence: there are more.
pub(super) fn few(root: &Root, workload: &Workload, mapping: &Mapping) -> Result<(), String> {
    let own: BTreeSet<i32> = workload.processes.iter().map(|p| p.pid).collect();
    let proc = rustix::fs::open(
        root.path("/proc"),
        OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC,
        Mode::empty(),
    )
    .map_err(|e| format!("the list of processes cannot be read: {e}"))?;
    let (pids, more) =
        numbers_in(&proc, ".", SCAN_MAX).map_err(|e| format!("the list of processes cannot be read: {e}"))?;
    let ((major, minor), inode) = mapping.device_inode;
    let sought = format!(" {major:02x}:{minor:02x} {inode} ");
    let strangers = pids
        .into_iter()
        .filter(|pid| !own.contains(pid))
        .filter(|pid| {
            text_of(&proc, &format!("{pid}/maps"), MAPS_MAX).is_some_and(|text| text.contains(&sought))
        })
        .take(STRANGERS_MAX + 1)
        .count();
    if more || strangers > STRANGERS_MAX {
        return Err(format!(
            "{} is used by more than {STRANGERS_MAX} processes of others, which counting in it would disturb",
            mapping.path
        ));
    }
    Ok(())
}

/// What the kernel says of a process that matters here.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Status {
    /// Process that traces it (ptrace).
    pub(super) tracer: Option<i32>,
    /// Whether one of its threads has a shadow stack.
    pub(super) shadow_stack: bool,
}

/// Looks at a process, or at one of its threads (`task/TID/status`). `None`: it is gone.
pub(super) fn status(root: &Root, process: ProcessId, file: &str) -> Option<Status> {
    let dir = open_process(root, process).ok()?;
    let mut buffer = [0u8; 8192];
    let n = read_at(&dir, file, &mut buffer).ok()?;
    Some(parse_status(&String::from_utf8_lossy(buffer.get(..n)?)))
}

fn parse_status(text: &str) -> Status {
    let field = |name: &str| text.lines().find_map(|l| l.strip_prefix(name));
    Status {
        tracer: field("TracerPid:")
            .and_then(|t| t.trim().parse().ok())
            .filter(|t| *t != 0),
        shadow_stack: field("x86_Thread_features:")
            .is_some_and(|f| f.split_ascii_whitespace().any(|w| w == "shstk")),
    }
}

/// Process that traces a process.
pub(super) fn tracer_of(root: &Root, process: ProcessId) -> Option<i32> {
    status(root, process, "status")?.tracer
}

/// Whether a process, or one of its first so many threads, has a shadow stack. One that cannot be looked at counts as one
/// that has.
pub(in crate::meters) fn has_shadow_stack(root: &Root, process: ProcessId, threads_max: usize) -> bool {
    let threads = open_process(root, process)
        .ok()
        .and_then(|dir| numbers_in(&dir, "task", threads_max).ok());
    let Some((threads, _)) = threads else {
        return true;
    };
    threads.into_iter().any(|thread| {
        // A thread that ended meanwhile needs none.
        status(root, process, &format!("task/{thread}/status")).is_some_and(|s| s.shadow_stack)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use homeostat_model::{Fingerprint, OperatorChoice, WorkloadId, WorkloadKind};

    #[test]
    fn tracers_and_shadow_stacks_are_seen_in_a_status() {
        let text = "Name:\ta\nTracerPid:\t42\nx86_Thread_features:\tshstk wrss \n";
        assert_eq!(
            parse_status(text),
            Status {
                tracer: Some(42),
                shadow_stack: true
            }
        );
        // A name that says so is a name.
        let text =
            "Name:\tTracerPid:\nTracerPid:\t0\nx86_Thread_features:\t\nx86_Thread_features_locked:\tshstk\n";
        assert_eq!(parse_status(text), Status::default());
        assert_eq!(parse_status(""), Status::default());
    }

    #[test]
    fn a_library_of_the_whole_host_is_told_from_one_of_few() {
        let root = Root::default();
        let none = Workload {
            id: WorkloadId::from("none"),
            kind: WorkloadKind::ProcessGroup,
            fingerprint: Fingerprint::from("none"),
            program: "none".to_owned(),
            executable: "/none".to_owned(),
            processes: vec![],
            choice: OperatorChoice::default(),
        };
        let mut children = Vec::new();
        // As many processes of one file as there may be, and then one more.
        let directory = tempfile::tempdir().unwrap();
        let program = directory.path().join("sleep");
        let Some(sleep) = ["/bin/sleep", "/usr/bin/sleep"]
            .iter()
            .find(|p| std::fs::copy(p, &program).is_ok())
        else {
            println!("skipped: no sleep to copy");
            return;
        };
        let start = |children: &mut Vec<std::process::Child>| {
            let child = std::process::Command::new(&program).arg("600").spawn();
            children.push(child.unwrap());
        };
        for _ in 0..STRANGERS_MAX {
            start(&mut children);
        }
        let pid = children[0].id();
        let mapping = || {
            // The process may not have come to its program yet.
            for _ in 0..6_000 {
                let text = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap_or_default();
                let found = super::super::super::code_file::code_mappings(&text)
                    .into_iter()
                    .find(|m| std::path::Path::new(&m.path) == program);
                if let Some(found) = found {
                    return found;
                }
                std::thread::sleep(std::time::Duration::from_millis(10));
            }
            panic!("{sleep} was not executed");
        };
        let mapping = mapping();
        assert_eq!(few(&root, &none, &mapping), Ok(()));
        start(&mut children);
        let mut refused = false;
        for _ in 0..6_000 {
            refused = few(&root, &none, &mapping).is_err();
            if refused {
                break;
            }
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        for child in &mut children {
            let _ = child.kill();
            let _ = child.wait();
        }
        assert!(refused);
    }
}
