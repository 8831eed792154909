//! Resolves addresses of a program to files, functions and candidates, with a cache.

use crate::concern::census::{Census, Family};
use crate::discovery::image::Image;
use crate::discovery::place::Patched;
use homeostat_kernel::Root;
use homeostat_kernel::process::{fault, open_process};
use homeostat_meters::code_file::{CodeFile, Layout, Mapping, layout};
use homeostat_model::{ProcessId, Workload};
use homeostat_points::code::{Candidate, Function};
use homeostat_sensors::storage::Refusal;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::SystemTime;

/// Most code decoded per search, in bytes: a hostile program may have endless functions.
const CODE_MAX: usize = 4 * 1024 * 1024;
const IMAGES_MAX: usize = 128;
/// Most functions of all files together, eight bytes each.
const FUNCTIONS_MAX: usize = 1024 * 1024;

/// A resolved address.
#[derive(Clone)]
pub(super) struct Frame {
    pub(super) image: usize,
    pub(super) function: u64,
    /// The sample is in a loop that waits.
    pub(super) waits: bool,
    pub(super) candidates: Vec<Candidate>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Code {
    File,
    /// Mapped into every process by the kernel.
    Kernel,
    /// Generated at run time: in no mapping of a file's code.
    Compiled,
    /// The mappings of the process could not be read.
    Unknown,
}

pub(super) struct Atlas {
    /// Time of reading the mappings, before the first sample.
    begun: SystemTime,
    /// `None`: the mappings could not be read.
    maps: BTreeMap<ProcessId, Option<Layout>>,
    numbers: BTreeMap<((u32, u32), u64), usize>,
    /// `None`: the file could not be parsed.
    pub(super) images: Vec<Option<Image>>,
    pub(super) left_out: BTreeSet<String>,
    /// By file and function: addresses at which an instruction was about to run.
    seen: BTreeMap<(usize, u64), BTreeSet<u64>>,
    functions: BTreeMap<(usize, u64), Option<Function>>,
    frames: BTreeMap<(usize, u64, bool), Option<Frame>>,
    decoded: usize,
    census: Arc<Census>,
    family: Family,
    /// A file was left out for a reason that may pass.
    pub(super) passing: bool,
}

impl Atlas {
    /// Reads the mappings of the processes. The process map scan excludes files that other processes map.
    pub(super) fn new(root: &Root, processes: &[ProcessId], census: Arc<Census>) -> Self {
        Self {
            begun: SystemTime::now(),
            maps: processes.iter().map(|p| (*p, layout(root, *p))).collect(),
            numbers: BTreeMap::new(),
            images: Vec::new(),
            left_out: BTreeSet::new(),
            seen: BTreeMap::new(),
            functions: BTreeMap::new(),
            frames: BTreeMap::new(),
            decoded: 0,
            family: census.family(processes),
            census,
            passing: false,
        }
    }

    fn mapping(&self, process: ProcessId, address: u64) -> Option<&Mapping> {
        self.maps
            .get(&process)?
            .as_ref()?
            .files
            .iter()
            .find(|m| (m.start..m.end).contains(&address))
    }

    pub(super) fn is_code(&self, process: ProcessId, address: u64) -> bool {
        self.mapping(process, address).is_some()
    }

    /// Whether a process has code at an address, of a file or generated.
    pub(super) fn may_be_code(&self, process: ProcessId, address: u64) -> bool {
        let compiled = || {
            self.compiled(process)
                .iter()
                .any(|(from, to)| (*from..*to).contains(&address))
        };
        self.is_code(process, address) || compiled()
    }

    pub(super) fn compiled(&self, process: ProcessId) -> &[(u64, u64)] {
        self.maps
            .get(&process)
            .and_then(Option::as_ref)
            .map_or(&[], |layout| &layout.compiled)
    }

    pub(super) fn code(&self, process: ProcessId, address: u64) -> Code {
        match self.maps.get(&process).and_then(Option::as_ref) {
            None => Code::Unknown,
            Some(_) if self.is_code(process, address) => Code::File,
            Some(layout)
                if layout
                    .kernel
                    .iter()
                    .any(|(from, to)| (*from..*to).contains(&address)) =>
            {
                Code::Kernel
            }
            Some(_) => Code::Compiled,
        }
    }

    /// Adds sampled addresses as starts for decoding. Call before any lookup, with samples taken after this atlas was
    /// made. Probes depend on them, so they must be certain. The same part of the file was mapped before and after the
    /// samples. The file is older than the samples, and the process's memory equals the file.
    pub(super) fn learn(&mut self, root: &Root, workload: &Workload, addresses: &BTreeSet<(ProcessId, u64)>) {
        let mut by_process: BTreeMap<ProcessId, BTreeSet<u64>> = BTreeMap::new();
        for (process, address) in addresses {
            by_process.entry(*process).or_default().insert(*address);
        }
        for (process, addresses) in by_process {
            let (Some(now), Ok(patched)) = (layout(root, process), Patched::look(root, process)) else {
                continue;
            };
            for address in addresses {
                let stayed = |then: &Mapping| now.files.contains(then);
                if !self.mapping(process, address).is_some_and(stayed) {
                    continue;
                }
                let place = self.locate(root, workload, process, address);
                if let Some((image, at)) = place {
                    if let Some(start) = self.certain(image, at, &patched) {
                        self.seen.entry((image, start)).or_default().insert(at);
                    }
                }
            }
        }
    }

    /// Start of the function of a sampled address, if the process ran the file's code there.
    fn certain(&self, image: usize, at: u64, patched: &Patched) -> Option<u64> {
        let image = self.images.get(image)?.as_ref()?;
        let same = image.file.is_older_than(self.begun)
            && patched.agrees(&image.file, &image.device_inode, image.offset(at)?);
        image.function(at).filter(|_| same)
    }

    /// The file and the file-relative address of a process's address.
    fn locate(
        &mut self,
        root: &Root,
        workload: &Workload,
        process: ProcessId,
        address: u64,
    ) -> Option<(usize, u64)> {
        let mapping = self.mapping(process, address)?.clone();
        let offset = (address - mapping.start).checked_add(mapping.offset)?;
        let image = self.image(root, workload, process, &mapping);
        let at = self.images.get(image)?.as_ref()?.address(offset)?;
        Some((image, at))
    }

    /// Resolves an address: a sampled instruction, or a return address. `None`: any other word of a stack.
    pub(super) fn resolve(
        &mut self,
        root: &Root,
        workload: &Workload,
        process: ProcessId,
        address: u64,
        returns: bool,
    ) -> Option<Frame> {
        let (image, at) = self.locate(root, workload, process, address)?;
        if let Some(known) = self.frames.get(&(image, at, returns)) {
            return known.clone();
        }
        let frame = self.look(image, at, returns);
        self.frames.insert((image, at, returns), frame.clone());
        frame
    }

    fn image(&mut self, root: &Root, workload: &Workload, process: ProcessId, mapping: &Mapping) -> usize {
        if let Some(number) = self.numbers.get(&mapping.device_inode) {
            return *number;
        }
        let image = if self.images.len() < IMAGES_MAX {
            self.open(root, workload, process, mapping)
        } else {
            Err(Refusal::Lasting(format!("more than {IMAGES_MAX} files")))
        };
        let number = self.images.len();
        // Remembers also that a file could not be parsed.
        if let Err(why) = &image {
            self.passing |= matches!(why, Refusal::Now(_));
            self.left_out.insert(why.to_string());
        }
        self.images.push(image.ok());
        self.numbers.insert(mapping.device_inode, number);
        number
    }

    fn open(
        &self,
        root: &Root,
        workload: &Workload,
        process: ProcessId,
        mapping: &Mapping,
    ) -> Result<Image, Refusal> {
        self.census
            .allow(&self.family, &mapping.device_inode, &mapping.path)?;
        let known: usize = self.images.iter().flatten().map(Image::functions).sum();
        if known > FUNCTIONS_MAX {
            return Err(format!("more than {FUNCTIONS_MAX} functions in all files").into());
        }
        let file = CodeFile::mapped(root, process, mapping)?;
        let main = is_main(root, process, mapping);
        let name = if main {
            workload.program.clone()
        } else {
            mapping.path.rsplit('/').next().unwrap_or_default().to_owned()
        };
        Image::new(file, mapping.device_inode, &mapping.path, name)
    }

    fn look(&mut self, image: usize, at: u64, returns: bool) -> Option<Frame> {
        let file = self.images.get(image)?.as_ref()?;
        // A return address may be the first address behind its function.
        let start = match file.function(at) {
            Some(start) if !(returns && start == at) => start,
            _ if returns => file.function(at.checked_sub(1)?)?,
            _ => return None,
        };
        let (decoded, seen) = (&mut self.decoded, &self.seen);
        let function = self
            .functions
            .entry((image, start))
            .or_insert_with(|| {
                let code = file.code(start)?;
                *decoded = decoded.saturating_add(code.len());
                if *decoded > CODE_MAX {
                    return None;
                }
                let seen: Vec<u64> = seen.get(&(image, start)).into_iter().flatten().copied().collect();
                Function::decode(start, &code, &|a| file.begins(a), &seen)
            })
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

fn is_main(root: &Root, process: ProcessId, mapping: &Mapping) -> bool {
    open_process(root, process)
        .and_then(|dir| {
            rustix::fs::readlinkat(&dir, "exe", Vec::new()).map_err(|e| fault(e, &process.to_string(), "exe"))
        })
        .is_ok_and(|exe| exe.to_bytes() == mapping.path.as_bytes())
}
