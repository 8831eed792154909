//! Code that no file holds: what a compiler makes while the program runs (JIT). Nothing says where its functions begin and end, and
//! the kernel puts its own breakpoints into files only. But where the clock interrupts the program an instruction begins, and the
//! processor has four breakpoints for each thread ([`sys::breakpoints`](homeostat_kernel::breakpoints)). So code is followed from there
//! ([`pieces`]), and the search counts four places at a time instead of hundreds ([`breakpoints`]). What is found is counted in turns
//! like any point ([`subject`]), and is lost when that code is made anew.
//!
//! Nothing of the program's memory is changed: whom breakpoints in files concern ([`concern`](crate::concern)) these do not. It is
//! read, though, and who reads memory that a program answers for (FUSE) waits for that, and could not even be killed: so before each
//! reading it is looked whose it is ([`storage`]), and a thread reads that is left behind when it does not come back.

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

/// Longest instruction of x86.
const INSTRUCTION_MAX: usize = 15;
/// What was seen of whose the memory is holds for so long.
const LOOK_HOLDS: Duration = Duration::from_millis(50);

/// An instruction in a program's memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Instruction {
    pub(super) address: u64,
    /// Its bytes: others mean that the code was made anew.
    pub(super) bytes: Vec<u8>,
    /// For people: `java+0x7f21c8a4e2b0`.
    pub(super) name: String,
}

/// The memory of a process that no file holds, for reading.
pub(super) struct Memory {
    root: Root,
    process: ProcessId,
    file: Arc<File>,
    /// Where that lies, and when it was looked.
    own: RefCell<(Instant, Vec<(u64, u64)>)>,
}

impl Memory {
    /// # Errors
    /// A sentence: it is gone, or may not be read, or has storage mapped that somebody answers for.
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

    /// As many bytes as can be read there, up to `most`; none where memory is of a file by now.
    ///
    /// # Errors
    /// A sentence: storage was mapped that somebody answers for, or reading did not come back in time.
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

    /// The instruction at an address, if there is one.
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

    /// Whether an instruction is still what it was.
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
