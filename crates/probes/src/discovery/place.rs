//! A probe site in a file.

use crate::concern::Target;
use homeostat_kernel::Root;
use homeostat_meters::code_file::{CodeFile, Memory, executable};
use homeostat_model::ProcessId;
use homeostat_platform::PlatformError;
use std::sync::Arc;

#[derive(Clone, Debug)]
pub(super) struct Place {
    /// The file in which the site was found, held open for the kernel.
    pub(super) file: Arc<CodeFile>,
    pub(super) device_inode: ((u32, u32), u64),
    /// Path of the file as the process sees it.
    pub(super) path: String,
    pub(super) offset: u64,
    /// Only the process's behaviour shows that an instruction begins there, so other processes get no probes.
    pub(super) seen: bool,
    /// For people: `redis-server+0x85333`.
    pub(super) name: String,
}

impl Place {
    pub(super) fn target(&self) -> Target {
        Target {
            device_inode: self.device_inode,
            path: self.path.clone(),
            file: self.file.clone(),
        }
    }
}

/// Checks that a process still runs the same program.
///
/// # Errors
/// A sentence: it ended, or runs another program.
pub(super) fn same_program(root: &Root, process: ProcessId, identity: (u64, u64)) -> Result<(), String> {
    match executable(root, process) {
        Some(now) if now == identity => Ok(()),
        Some(_) => Err(format!("process {process} runs another program now")),
        None => Err(format!("process {process} has ended")),
    }
}

/// Memory of a process, for comparison with its files.
pub(super) struct Patched(Memory);

impl Patched {
    /// Opens the memory of a process.
    ///
    /// # Errors
    /// The process ended, or access is denied.
    pub(super) fn look(root: &Root, process: ProcessId) -> Result<Self, PlatformError> {
        Memory::open(root, process).map(Self)
    }

    /// Whether the code at an offset equals the file's, apart from our own breakpoints.
    pub(super) fn agrees(&self, file: &CodeFile, device_inode: &((u32, u32), u64), offset: u64) -> bool {
        file.bytes(offset)
            .is_some_and(|bytes| self.0.agrees(device_inode, offset, &bytes, crate::owed::is_on))
    }
}
