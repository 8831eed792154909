//! What addresses of a program mean: which file, which function, and what can be counted around them. Looked up once.

use super::super::common::{fault, open_process, read_at};
use super::image::{Image, Mapping, code_mappings};
use crate::Root;
use homeostat_model::ProcessId;
use homeostat_points::code::{Candidate, Function};
use std::collections::BTreeMap;

/// Most that is read of a list of mappings.
const MAPS_MAX: usize = 4 * 1024 * 1024;

/// An address of the program, understood.
#[derive(Clone)]
pub(super) struct Frame {
    pub(super) image: usize,
    /// Start of its function.
    pub(super) function: u64,
    /// At work in a loop that waits.
    pub(super) waits: bool,
    pub(super) candidates: Vec<Candidate>,
}

/// What was looked up already.
#[derive(Default)]
pub(super) struct Atlas {
    maps: BTreeMap<ProcessId, Vec<Mapping>>,
    /// By device and inode as the kernel writes them.
    numbers: BTreeMap<(String, u64), usize>,
    /// `None` for a file that cannot be looked into.
    pub(super) images: Vec<Option<Image>>,
    functions: BTreeMap<(usize, u64), Option<Function>>,
    frames: BTreeMap<(usize, u64, bool), Option<Frame>>,
}

impl Atlas {
    /// What an address of a process is: an instruction at work, or where a call returns to. `None` for everything
    /// else that lies on a stack.
    pub(super) fn resolve(
        &mut self,
        root: &Root,
        process: ProcessId,
        address: u64,
        returns: bool,
    ) -> Option<Frame> {
        let maps = self
            .maps
            .entry(process)
            .or_insert_with(|| mappings(root, process));
        let mapping = maps.iter().find(|m| (m.start..m.end).contains(&address))?.clone();
        let image = self.image(root, process, &mapping);
        let at = self
            .images
            .get(image)?
            .as_ref()?
            .address(address - mapping.start + mapping.offset)?;
        if let Some(known) = self.frames.get(&(image, at, returns)) {
            return known.clone();
        }
        let frame = self.look(image, at, returns);
        self.frames.insert((image, at, returns), frame.clone());
        frame
    }

    fn image(&mut self, root: &Root, process: ProcessId, mapping: &Mapping) -> usize {
        if let Some(number) = self.numbers.get(&mapping.device_inode) {
            return *number;
        }
        let main = is_main(root, process, mapping);
        let path = if main {
            root.path(&format!("/proc/{process}/exe"))
        } else {
            root.path(&format!("/proc/{process}/root{}", mapping.path))
        };
        let number = self.images.len();
        // A file that cannot be looked into is remembered as such.
        self.images.push(Image::open(&path, main).ok());
        self.numbers.insert(mapping.device_inode.clone(), number);
        number
    }

    fn look(&mut self, image: usize, at: u64, returns: bool) -> Option<Frame> {
        let file = self.images.get(image)?.as_ref()?;
        let start = file.function(at)?;
        // Where a call returns to may be the first address behind its function.
        let start = if returns && start == at {
            file.function(at.checked_sub(1)?)?
        } else {
            start
        };
        let function = self
            .functions
            .entry((image, start))
            .or_insert_with(|| Function::decode(start, &file.code(start)?))
            .as_ref()?;
        let fits = if returns {
            function.returns_to(at)
        } else {
            function.is_boundary(at)
        };
        if !fits {
            return None;
        }
        Some(Frame {
            image,
            function: start,
            waits: !returns && function.waits_at(at),
            candidates: function.around(at, returns),
        })
    }
}

/// Whether a mapping is of the process's main executable.
fn is_main(root: &Root, process: ProcessId, mapping: &Mapping) -> bool {
    open_process(root, process)
        .and_then(|dir| {
            rustix::fs::readlinkat(&dir, "exe", Vec::new()).map_err(|e| fault(e, &process.to_string(), "exe"))
        })
        .is_ok_and(|exe| exe.to_bytes() == mapping.path.as_bytes())
}

/// Code that a process has mapped.
fn mappings(root: &Root, process: ProcessId) -> Vec<Mapping> {
    let text = open_process(root, process).ok().and_then(|dir| {
        let mut buffer = vec![0; 64 * 1024];
        loop {
            let n = read_at(&dir, "maps", &mut buffer).ok()?;
            if n < buffer.len() || n >= MAPS_MAX {
                buffer.truncate(n);
                return Some(buffer);
            }
            buffer.resize(n * 2, 0);
        }
    });
    text.map(|t| code_mappings(&String::from_utf8_lossy(&t)))
        .unwrap_or_default()
}
