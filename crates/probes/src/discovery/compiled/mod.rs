//! Probe sites in generated code (JIT), which no file holds.
//!
//! Generated code has no function table, and kernel probes work only in files. But sampled addresses are instruction
//! starts, and the processor has four hardware breakpoints per thread
//! ([`sys::breakpoints`](homeostat_kernel::breakpoints)). So decoding starts at samples ([`pieces`]), and the search
//! counts four addresses at a time instead of hundreds ([`breakpoints`]). A found site is counted in turns
//! ([`subject`]), and is lost when its code is replaced.
//!
//! The program's memory stays unchanged, so the safety checks for breakpoints in files ([`concern`](crate::concern)) do
//! not apply. But a read of memory backed by a program (FUSE) may block unkillably. So each read first checks what
//! backs the memory ([`storage`]), and runs on a thread that is abandoned if it does not return.

mod breakpoints;
mod few;
mod pieces;
mod runs;
mod subject;

pub use breakpoints::cost;
use breakpoints::cost_now;
pub(super) use breakpoints::{Counted, PLACES_MAX, Set, Sets, known_cost, rehearse, switch_cost};
pub(super) use few::best;
pub(super) use pieces::Pieces;
pub(super) use runs::{Switches, runs};
pub(super) use subject::{Compiled, threads_of};

use homeostat_kernel::Root;
use homeostat_kernel::process::{fault, open_process};
use homeostat_model::ProcessId;
use homeostat_sensors::patient::patiently;
use homeostat_sensors::storage::{Refusal, own_memory};
use rustix::fs::{Mode, OFlags};
use std::cell::RefCell;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::time::{Duration, Instant};

const INSTRUCTION_MAX: usize = 15;
/// Validity of a check of what backs the memory.
const LOOK_HOLDS: Duration = Duration::from_millis(50);

/// An instruction in a program's memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Instruction {
    pub(super) address: u64,
    /// Other bytes at the address mean that the code was replaced.
    pub(super) bytes: Vec<u8>,
    /// For people: `java+0x7f21c8a4e2b0`.
    pub(super) name: String,
}

/// Read access to the generated code of a process.
pub(super) struct Memory {
    root: Root,
    process: ProcessId,
    file: Arc<File>,
    /// Its ranges, and the time of the check.
    own: RefCell<(Instant, Vec<(u64, u64)>)>,
}

impl Memory {
    /// # Errors
    /// A sentence: the process ended, access is denied, or it maps storage that a program or another machine serves.
    pub(super) fn open(root: &Root, process: ProcessId) -> Result<Self, Refusal> {
        let looked = Instant::now();
        let own = own_memory(root, process)?;
        let dir = open_process(root, process).map_err(|e| Refusal::Now(e.to_string()))?;
        let flags = OFlags::RDONLY | OFlags::CLOEXEC;
        let opened = patiently(process.pid, move || {
            rustix::fs::openat(&dir, "mem", flags, Mode::empty())
        });
        let file = opened.map_err(Refusal::Now)?.map_err(|e| {
            let fault = fault(e, &format!("process {process}"), "reading its memory");
            Refusal::Now(fault.to_string())
        })?;
        Ok(Self {
            root: root.clone(),
            process,
            file: Arc::new(File::from(file)),
            own: RefCell::new((looked, own)),
        })
    }

    /// Reads up to `most` bytes. Empty if the memory now belongs to a file.
    ///
    /// # Errors
    /// A sentence: storage served by a program or another machine was mapped, or the read timed out.
    pub(super) fn read(&self, address: u64, most: usize) -> Result<Vec<u8>, Refusal> {
        let mut own = self.own.borrow_mut();
        if own.0.elapsed() >= LOOK_HOLDS {
            let looked = Instant::now();
            *own = (looked, own_memory(&self.root, self.process)?);
        }
        let Some((_, to)) = own.1.iter().find(|(from, to)| (*from..*to).contains(&address)) else {
            return Ok(Vec::new());
        };
        let most = most.min(usize::try_from(to - address).unwrap_or(usize::MAX));
        let file = Arc::clone(&self.file);
        patiently(self.process.pid, move || bytes_at(&file, address, most)).map_err(Refusal::Now)
    }

    /// The instruction at an address, if valid.
    ///
    /// # Errors
    /// As of [`Self::read`].
    pub(super) fn instruction(&self, address: u64, name: String) -> Result<Option<Instruction>, Refusal> {
        let mut bytes = self.read(address, INSTRUCTION_MAX)?;
        let Some(length) = homeostat_points::code::length(&bytes) else {
            return Ok(None);
        };
        bytes.truncate(length);
        Ok(Some(Instruction { address, bytes, name }))
    }

    /// Whether an instruction is unchanged.
    ///
    /// # Errors
    /// As of [`Self::read`].
    pub(super) fn holds(&self, instruction: &Instruction) -> Result<bool, Refusal> {
        Ok(self.read(instruction.address, instruction.bytes.len())? == instruction.bytes)
    }
}

fn bytes_at(file: &File, address: u64, most: usize) -> Vec<u8> {
    let mut bytes = vec![0; most];
    let mut have = 0;
    while let Some(rest) = bytes.get_mut(have..).filter(|rest| !rest.is_empty()) {
        match file.read_at(rest, address.saturating_add(have as u64)) {
            Ok(0) | Err(_) => break,
            Ok(n) => have += n,
        }
    }
    bytes.truncate(have);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_read_only_as_long_as_nobody_answers_for_it() {
        let tree = tempfile::tempdir().unwrap();
        let put = |file: &str, text: &str| {
            let path = tree.path().join("proc").join(file);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        let code = "0123456789";
        put(
            "7/stat",
            "7 (a) S 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 42 20 21",
        );
        put("7/mem", &format!("{}{code}", "\0".repeat(0x1000)));
        put(
            "7/mountinfo",
            "27 1 254:0 / / rw - ext4 /dev/vda rw\n28 27 0:250 / /far rw - fuse.x x rw\n",
        );
        let maps =
            |file: &str| format!("1000-1008 r-xp 00000000 {file}\n2000-3000 r-xp 00000000 fe:00 7 /bin/a\n");
        put("7/maps", &maps("00:00 0 "));
        let root = Root::new(tree.path());
        let process = ProcessId {
            pid: 7,
            start_ticks: 42,
        };
        let memory = Memory::open(&root, process).unwrap();
        assert_eq!(memory.read(0x1000, 4).unwrap(), b"0123");
        assert_eq!(memory.read(0x1004, 9).unwrap(), b"4567", "not beyond its end");
        assert_eq!(memory.read(0x2000, 4).unwrap(), b"", "that is a file's");
        let place = Instruction {
            address: 0x1000,
            bytes: b"0123".to_vec(),
            name: String::new(),
        };
        assert!(memory.holds(&place).unwrap());
        // It has mapped something over it since.
        for (file, holds) in [
            ("fe:00 9 /lib/b", Ok(false)),
            ("00:fb 9 /dev/x", Ok(false)),
            ("00:fa 9 /far/x", Err("fuse.x")),
            ("00:fa 9 /memfd:x (deleted)", Err("fuse.x")),
        ] {
            put("7/maps", &maps(file));
            put(
                "7/mountinfo",
                "27 1 254:0 / / rw - ext4 /dev/vda rw\n28 27 0:250 / /far rw - fuse.x x rw\n29 27 0:251 / /dev rw - devtmpfs d rw\n",
            );
            std::thread::sleep(LOOK_HOLDS);
            match (memory.holds(&place), holds) {
                (Ok(found), Ok(expected)) => assert_eq!(found, expected, "{file}"),
                (Err(Refusal::Lasting(why)), Err(expected)) => assert!(why.contains(expected), "{why}"),
                (found, _) => panic!("{file}: {found:?}"),
            }
        }
        assert!(Memory::open(&root, process).is_err());
    }
}
