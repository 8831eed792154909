//! Code that no file holds: what a compiler makes while the program runs (JIT). Nothing says where its functions begin and end, and
//! the kernel puts its own breakpoints into files only. But where the clock interrupts the program an instruction begins, and the
//! processor has four breakpoints for each thread ([`sys::breakpoints`](crate::sys::breakpoints)). So code is followed from there
//! ([`pieces`]), and the search counts four places at a time instead of hundreds ([`breakpoints`]). What is found is counted in turns
//! like any point ([`subject`]), and is lost when that code is made anew.
//!
//! Nothing of the program's memory is changed: whom breakpoints in files concern ([`concern`](super::super::concern)) these do not.

mod breakpoints;
mod few;
mod pieces;
mod subject;

pub use breakpoints::cost;
pub(super) use breakpoints::{Counted, PLACES_MAX, Set, Sets, known_cost};
pub(super) use few::best;
pub(super) use pieces::Pieces;
pub(super) use subject::{Compiled, threads_of};

use super::super::common::open_process;
use crate::Root;
use homeostat_model::ProcessId;
use homeostat_platform::PlatformError;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use std::fs::File;
use std::os::unix::fs::FileExt;

/// Longest instruction of x86.
const INSTRUCTION_MAX: usize = 15;

/// An instruction in a program's memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Instruction {
    pub(super) address: u64,
    /// Its bytes: others mean that the code was made anew.
    pub(super) bytes: Vec<u8>,
    /// For people: `java+0x7f21c8a4e2b0`.
    pub(super) name: String,
}

/// The memory of a process, for reading.
pub(super) struct Memory(File);

impl Memory {
    /// # Errors
    /// Gone, or not permitted.
    pub(super) fn open(root: &Root, process: ProcessId) -> Result<Self, PlatformError> {
        let dir = open_process(root, process)?;
        rustix::fs::openat(&dir, "mem", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
            .map(|fd| Self(File::from(fd)))
            .map_err(|e: Errno| {
                super::super::common::fault(e, &format!("process {process}"), "reading its memory")
            })
    }

    /// As many bytes as can be read there, up to `most`.
    pub(super) fn read(&self, address: u64, most: usize) -> Vec<u8> {
        let mut bytes = vec![0; most];
        let mut have = 0;
        while let Some(rest) = bytes.get_mut(have..).filter(|rest| !rest.is_empty()) {
            match self.0.read_at(rest, address.saturating_add(have as u64)) {
                Ok(0) | Err(_) => break,
                Ok(n) => have += n,
            }
        }
        bytes.truncate(have);
        bytes
    }

    /// The instruction at an address, if there is one.
    pub(super) fn instruction(&self, address: u64, name: String) -> Option<Instruction> {
        let mut bytes = self.read(address, INSTRUCTION_MAX);
        let length = homeostat_points::code::length(&bytes)?;
        bytes.truncate(length);
        Some(Instruction { address, bytes, name })
    }

    /// Whether an instruction is still what it was.
    pub(super) fn holds(&self, instruction: &Instruction) -> bool {
        self.read(instruction.address, instruction.bytes.len()) == instruction.bytes
    }
}
