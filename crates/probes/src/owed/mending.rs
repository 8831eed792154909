//! Removes breakpoints that an earlier homeostat left in programs.
//!
//! The kernel still knows a breakpoint that it could not remove, though nobody counts there. Attaching and detaching a
//! counter there makes it remove all unused breakpoints of the place, also in children forked since.
//!
//! The log only says where to look. A place is mended only if a process that maps the file has a breakpoint in memory
//! there. The file must still hold the logged bytes, which are no breakpoint.

use crate::concern::census::Census;
use crate::concern::keeper::Held;
use crate::concern::{Files, Looked, Others, Target, threads};
use crate::owed::{Breakpoint, CODE, Entry, Owed, record};
use crate::uprobe::source;
use homeostat_kernel::Root;
use homeostat_kernel::bpf::{Counters, PLACES_MAX};
use homeostat_kernel::perf::Scope;
use homeostat_kernel::process::lives;
use homeostat_meters::code_file::{CodeFile, Memory};
use homeostat_meters::tasks::Counted;
use homeostat_model::ProcessId;
use homeostat_platform::PlatformError;
use homeostat_sensors::patient::patiently;
use std::path::Path;
use std::sync::Arc;

/// Breakpoint instruction of x86-64.
const INSTRUCTION: u8 = 0xcc;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    TakenOut(usize),
    /// This process still has a breakpoint, because another program counts there.
    Others(ProcessId),
}

/// What earlier homeostats left, as sentences for people.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Mended {
    /// Breakpoints that were removed now.
    pub taken_out: Vec<String>,
    /// Breakpoints that may remain. They stay in the log.
    pub left: Vec<String>,
}

/// Removes the breakpoints that ended homeostats logged in this state directory and left in programs.
pub fn mend(state_directory: &Path) -> Mended {
    let root = Root::default();
    let mut mended = Mended::default();
    let directory = record::directory_of(state_directory);
    let dir = match record::open_private(&directory) {
        Ok(dir) => dir,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return mended,
        Err(e) => {
            mended.left.push(format!("{}: {e}", directory.display()));
            return mended;
        }
    };
    let names = record::names(&dir).unwrap_or_else(|e| {
        mended
            .left
            .push(format!("{} cannot be listed: {e}", directory.display()));
        Vec::new()
    });
    for name in names {
        let mut record = match record::read(&dir, &name) {
            Ok(record) => record,
            Err(e) => {
                mended
                    .left
                    .push(format!("{}: {e}", directory.join(&name).display()));
                continue;
            }
        };
        // A running homeostat removes its breakpoints itself.
        if lives(&root, record.writer) {
            continue;
        }
        let now = record::boot_id();
        if now.is_ok_and(|now| now != record.boot) {
            record.owed.clear();
        }
        record.owed.retain(|entry| match mend_one(&root, entry) {
            Ok(Outcome::TakenOut(0)) => false,
            Ok(Outcome::Others(process)) => {
                mended.left.push(format!(
                    "process {process} has breakpoints in its memory of {} that stay: another tracer counts there; they are not \
                     looked for again",
                    entry.path
                ));
                false
            }
            Ok(Outcome::TakenOut(breakpoints)) => {
                mended.taken_out.push(format!(
                    "{breakpoints} breakpoint(s) that an earlier run had left in the memory of processes that run {} \
                     were taken out",
                    entry.path
                ));
                false
            }
            Err(why) => {
                mended
                    .left
                    .push(format!("breakpoints may be left in {}: {why}", entry.path));
                true
            }
        });
        let written = if record.owed.is_empty() {
            record::remove(&dir, &name)
        } else {
            record::write(&dir, &record, false)
        };
        if let Err(e) = written {
            mended
                .left
                .push(format!("{}: {e}", directory.join(&name).display()));
        }
    }
    mended
}

/// Whether a process may still have one of these breakpoints. On other processors than x86-64, the kernel's word
/// counts.
pub(super) fn is_left(entries: &[Entry]) -> bool {
    let root = Root::default();
    cfg!(target_arch = "x86_64")
        && entries.iter().any(|entry| {
            let mut processes = entry.processes.iter();
            processes.any(|process| left_in(&root, *process, entry) != Ok(Vec::new()))
        })
}

/// Removes the rest of an entry.
///
/// # Errors
/// A sentence: why some may remain.
fn mend_one(root: &Root, entry: &Entry) -> Result<Outcome, String> {
    if !cfg!(target_arch = "x86_64") {
        return Err("what a breakpoint looks like on this processor is not known".to_owned());
    }
    let census = Census::fresh(root).map_err(|why| why.to_string())?;
    census.all_seen(&entry.processes, entry.device_inode.1)?;
    let users = census.ids(census.users(&entry.device_inode, &entry.path).into_iter());
    let mut found = 0;
    for process in &users {
        let left = left_in(root, *process, entry)?;
        if !left.is_empty() {
            found += left.len();
            take_out(root, *process, entry, &left)?;
        }
    }
    for process in &users {
        if !left_in(root, *process, entry)?.is_empty() {
            return Ok(Outcome::Others(*process));
        }
    }
    Ok(Outcome::TakenOut(found))
}

/// The breakpoints that a process has in memory.
///
/// # Errors
/// A sentence: unknown.
fn left_in(root: &Root, process: ProcessId, entry: &Entry) -> Result<Vec<Breakpoint>, String> {
    let memory = match Memory::open_all(root, process) {
        Ok(memory) => memory,
        Err(PlatformError::Vanished { .. }) => return Ok(Vec::new()),
        Err(e) => return Err(e.to_string()),
    };
    let entry = entry.clone();
    // Another thread may hold the address space while it waits for a page.
    let looked = patiently(process.pid, move || {
        let mut left = Vec::new();
        for breakpoint in entry.breakpoints {
            if breakpoint.code.first() != Some(&INSTRUCTION)
                && memory.holds(&entry.device_inode, breakpoint.offset, INSTRUCTION)?
            {
                left.push(breakpoint);
            }
        }
        Ok(left)
    });
    match looked.and_then(|left| left) {
        // The process ended, and its memory with it.
        Err(_) if !lives(root, process) => Ok(Vec::new()),
        other => other,
    }
}

/// Makes the kernel remove the breakpoints left in a process.
fn take_out(root: &Root, process: ProcessId, entry: &Entry, left: &[Breakpoint]) -> Result<(), String> {
    let memory = Memory::open_all(root, process).map_err(|e| e.to_string())?;
    let mapping = left
        .iter()
        .find_map(|b| memory.mapping_of(&entry.device_inode, b.offset))
        .ok_or_else(|| format!("process {process} does not have it mapped any more"))?;
    let file = Arc::new(CodeFile::mapped(root, process, mapping)?);
    for breakpoint in left {
        let code = file.bytes(breakpoint.offset);
        if code.and_then(|c| c.first_chunk::<CODE>().copied()) != Some(breakpoint.code) {
            return Err("the file was changed since".to_owned());
        }
    }
    let files = Files {
        targets: vec![Target {
            device_inode: entry.device_inode,
            path: entry.path.clone(),
            file: file.clone(),
        }],
        others: Others::LookedAt,
        pages: left.len() as u64,
        looked: Looked::default(),
    };
    threads::at_liberty(root, process).map_err(|why| why.to_string())?;
    let places: Vec<(u64, u32)> = left.iter().map(|b| (b.offset, b.semaphore)).collect();
    // The old record stays until this succeeds.
    let owed = Owed::unwritten(Vec::new()).map_err(|why| why.to_string())?;
    let on = owed.take().map_err(|why| why.to_string())?;
    match Counters::new(1) {
        Ok(counters) => {
            for places in places.chunks(PLACES_MAX) {
                files.settled(root, &[process]).map_err(|why| why.to_string())?;
                let link = counters
                    .attach_static(file.kernel_path(), places, 0, Some(process.pid))
                    .map_err(|e| e.to_string())?;
                Held::new(root, &files, &[process], link, on.clone())
                    .let_go()
                    .map_err(|why| why.to_string())?;
            }
        }
        // Kernels that cannot count many places at once.
        Err(_) => {
            let source = source(root)?;
            for (offset, semaphore) in places {
                files.settled(root, &[process]).map_err(|why| why.to_string())?;
                let event = Counted::Uprobe {
                    source,
                    file: file.clone(),
                    offset,
                    semaphore,
                };
                let counter = event
                    .open(Scope::Thread(process.pid))
                    .map_err(|e| e.to_string())?;
                Held::new(root, &files, &[process], counter, on.clone())
                    .let_go()
                    .map_err(|why| why.to_string())?;
            }
        }
    }
    Ok(())
}
