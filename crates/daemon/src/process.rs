//! The daemon as a process that still works when the machine is in trouble.

use crate::settings::Service;
use rustix::mm::MlockAllFlags;

/// Score of the out-of-memory killer: −500 of −1000..1000 halves our badness; we hold the undo of every change.
const OOM_SCORE_ADJ: &str = "-500";
/// Nice value: our loop is short, and late when everybody else is busy.
const NICE: i32 = -5;

/// Locks memory as far as the settings want and the kernel permits. Returns what was refused, for people.
///
/// Only after the capabilities were probed: the probe of the undo splits a large page of our own, and the kernel
/// refuses MADV_COLD on locked memory (EINVAL, `madvise(2)`), so a locked daemon would believe that the machine can
/// not undo.
pub fn lock_memory(service: &Service) -> Vec<String> {
    let mut refused = Vec::new();
    if service.lock_memory {
        // ONFAULT: lock what is used, do not fault in what is only mapped.
        let flags = MlockAllFlags::CURRENT | MlockAllFlags::FUTURE | MlockAllFlags::ONFAULT;
        if let Err(e) = rustix::mm::mlockall(flags) {
            refused.push(format!(
                "memory is not locked ({e}): homeostat may be slow when memory is short; it needs CAP_IPC_LOCK"
            ));
        }
    }
    refused
}

/// Raises the priority as far as the settings want and the kernel permits. Returns what was refused, for people.
pub fn raise_priority(service: &Service) -> Vec<String> {
    let mut refused = Vec::new();
    if service.raise_priority {
        if let Err(e) = rustix::process::setpriority_process(None, NICE) {
            refused.push(format!("the priority is not raised ({e}): it needs CAP_SYS_NICE"));
        }
        if let Err(e) = std::fs::write("/proc/self/oom_score_adj", OOM_SCORE_ADJ) {
            refused.push(format!(
                "not protected from the out-of-memory killer ({e}): it needs CAP_SYS_RESOURCE"
            ));
        }
    }
    refused
}

/// Files that may be open: the meters of a busy host and the watch over settings need some hundred each.
const FILES: u64 = 8192;

/// Raises the soft limit of open files towards [`FILES`], as far as the hard one allows. Nothing is lost where it cannot
/// be: what needs more files then says so.
pub fn raise_file_limit() {
    use rustix::process::{Resource, getrlimit, setrlimit};
    let mut limit = getrlimit(Resource::Nofile);
    let wanted = limit.maximum.map_or(FILES, |hard| hard.min(FILES));
    if limit.current.is_some_and(|soft| soft < wanted) {
        limit.current = Some(wanted);
        let _ = setrlimit(Resource::Nofile, limit);
    }
}
