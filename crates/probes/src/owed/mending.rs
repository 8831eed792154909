//! Taking out what an earlier homeostat has left in programs.
//!
//! A breakpoint that the kernel could not take out is known to it still, without anybody who counts there. Who counts at the same
//! place and lets go of it has the kernel take out all breakpoints of the place that nobody counts with any more, in whatever
//! process they are: the program in which they were left, and children that it has forked since.
//!
//! What is written down says only where to look. Something is done where a process that maps the file has a breakpoint in its memory
//! and the file holds, at that place, what it held then, and something else than a breakpoint.

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

/// What came of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    /// So many breakpoints were taken out.
    TakenOut(usize),
    /// This process has a breakpoint still that nobody's end has left: somebody else counts there.
    Others(ProcessId),
}

/// What was found of earlier homeostats, as sentences for people.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Mended {
    /// Breakpoints that were left in programs, and were taken out now.
    pub taken_out: Vec<String>,
    /// What may still be left: it stays written down.
    pub left: Vec<String>,
}

/// Looks at what homeostats that have ended have written down in this state directory, and takes out what they left in programs.
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
        // What it counts with it takes out itself.
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

/// Whether a breakpoint of these may be in the memory of one of the processes that they were put into. Where it is not known what
/// one looks like, the kernel's word is taken for that.
pub(super) fn is_left(entries: &[Entry]) -> bool {
    let root = Root::default();
    cfg!(target_arch = "x86_64")
        && entries.iter().any(|entry| {
            let mut processes = entry.processes.iter();
            processes.any(|process| left_in(&root, *process, entry) != Ok(Vec::new()))
        })
}

/// Takes out what is left of an entry.
///
/// # Errors
/// A sentence: why some may be left still.
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

/// Which of the breakpoints a process has in its memory.
///
/// # Errors
/// A sentence: that cannot be seen.
fn left_in(root: &Root, process: ProcessId, entry: &Entry) -> Result<Vec<Breakpoint>, String> {
    let memory = match Memory::open_all(root, process) {
        Ok(memory) => memory,
        Err(PlatformError::Vanished { .. }) => return Ok(Vec::new()),
        Err(e) => return Err(e.to_string()),
    };
    let entry = entry.clone();
    // Its memory may be held by who waits for a page.
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
        // It has ended meanwhile, and its memory with it.
        Err(_) if !lives(root, process) => Ok(Vec::new()),
        other => other,
    }
}

/// Has the kernel take out breakpoints that are left in a process.
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
    // The writer's own record says where they are, until this has succeeded.
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
