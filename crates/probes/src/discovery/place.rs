//! A place in a program that is counted.

use crate::concern::Target;
use homeostat_kernel::Root;
use homeostat_meters::code_file::{CodeFile, Memory, executable};
use homeostat_model::ProcessId;
use homeostat_platform::PlatformError;
use std::sync::Arc;

/// A place to be counted.
#[derive(Clone, Debug)]
pub(super) struct Place {
    /// The file, held open: what it was found in is what the kernel is given.
    pub(super) file: Arc<CodeFile>,
    /// Of the mapping through which the file was opened.
    pub(super) device_inode: ((u32, u32), u64),
    /// Path of the file as the process sees it.
    pub(super) path: String,
    /// Offset of the instruction.
    pub(super) offset: u64,
    /// That an instruction begins there is known from what its process did: nothing to rest on for others.
    pub(super) seen: bool,
    /// For people: `redis-server+0x85333`.
    pub(super) name: String,
}

impl Place {
    /// As a file in which something is counted.
    pub(super) fn target(&self) -> Target {
        Target {
            device_inode: self.device_inode,
            path: self.path.clone(),
            file: self.file.clone(),
        }
    }
}

/// Whether a process still runs the program that it ran before.
///
/// # Errors
/// A sentence: it is gone, or runs another one.
pub(super) fn same_program(root: &Root, process: ProcessId, identity: (u64, u64)) -> Result<(), String> {
    match executable(root, process) {
        Some(now) if now == identity => Ok(()),
        Some(_) => Err(format!("process {process} runs another program now")),
        None => Err(format!("process {process} has ended")),
    }
}

/// What a process has in its memory, beside its files.
pub(super) struct Patched(Memory);

impl Patched {
    /// Looks at a process.
    ///
    /// # Errors
    /// Gone, or not permitted.
    pub(super) fn look(root: &Root, process: ProcessId) -> Result<Self, PlatformError> {
        Memory::open(root, process).map(Self)
    }

    /// Whether the code at a place is that of the file, but for what we count there at present.
    pub(super) fn agrees(&self, file: &CodeFile, device_inode: &((u32, u32), u64), offset: u64) -> bool {
        file.bytes(offset)
            .is_some_and(|bytes| self.0.agrees(device_inode, offset, &bytes, crate::owed::is_on))
    }
}
