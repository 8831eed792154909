//! The files whose code a process runs: where in them functions begin and end, and their bytes.
//!
//! Ranges of functions come from what unwinders need (`.eh_frame`, which survives `strip`), from Go's own table, and from
//! symbols. Nothing is run and nothing trusted: every number is checked.

use super::super::bounded::{Bounded, ReadAt};
use super::super::code_file::CodeFile;
use super::super::concern::{Refusal, Target};
use super::super::elf64::{self, Outline, Segment};
use super::super::go;
use super::super::ranges::Ranges;
use super::unwind;
use serde::{Deserialize, Serialize};
use std::os::unix::fs::FileExt;
use std::sync::Arc;

/// Code of one function that is read at most.
const FUNCTION_MAX: u64 = homeostat_points::code::FUNCTION_MAX as u64;
/// Sections of stubs through which functions of other files are called, and the bytes of one.
const STUBS: [&str; 3] = [".plt", ".plt.sec", ".plt.got"];
const STUB: u64 = 8;

/// What a file says of its own code.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::meters) struct CodeMap {
    /// Pieces of code.
    segments: Vec<Segment>,
    functions: Ranges,
    stubs: Vec<(u64, u64)>,
}

impl CodeMap {
    /// Looks into a file.
    ///
    /// # Errors
    /// A sentence: it is no executable of x86-64, or does not tell where its functions begin and end.
    pub(in crate::meters) fn read(file: &dyn ReadAt) -> Result<Self, String> {
        let file = Bounded::new(file).map_err(|e| e.to_string())?;
        let outline = Outline::read(&file)?;
        if !outline.x86_64 {
            return Err("not code of x86-64, the only kind that is taken apart".to_owned());
        }
        let segments: Vec<Segment> = outline.segments.iter().copied().filter(|s| s.code).collect();
        let functions = empty(&segments).map(|into| functions(&file, &outline, into));
        let functions = functions.filter(|f| f.len() > 0);
        if file.is_used_up() {
            return Err("its tables of functions are larger or more tangled than is read".to_owned());
        }
        Ok(Self {
            functions: functions.ok_or("it does not tell where its functions begin and end")?,
            segments,
            stubs: STUBS.iter().filter_map(|s| outline.range(s)).collect(),
        })
    }
}

/// The same in numbers, as a helper process tells it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Told {
    segments: Vec<Segment>,
    gaps: Vec<u32>,
    stubs: Vec<(u64, u64)>,
}

impl CodeMap {
    pub(in crate::meters) fn told(&self) -> Told {
        Told {
            segments: self.segments.clone(),
            gaps: self.functions.gaps(),
            stubs: self.stubs.clone(),
        }
    }

    /// Takes what a helper tells of a file of this length. `None`: nobody can have found that there.
    pub(in crate::meters) fn believed(told: Told, length: u64) -> Option<Self> {
        let in_file = |s: &Segment| {
            let end = s.offset.checked_add(s.size);
            s.code && s.address.checked_add(s.size).is_some() && end.is_some_and(|end| end <= length)
        };
        (told.segments.iter().all(in_file) && told.stubs.len() <= STUBS.len()).then_some(())?;
        Some(Self {
            functions: empty(&told.segments)?.with_gaps(&told.gaps)?,
            segments: told.segments,
            stubs: told.stubs,
        })
    }
}

/// No functions yet, in these pieces of code.
fn empty(segments: &[Segment]) -> Option<Ranges> {
    let code: Vec<(u64, u64)> = segments
        .iter()
        .map(|s| (s.address, s.address.saturating_add(s.size)))
        .collect();
    Ranges::of_code(&code)
}

fn functions(file: &Bounded<'_>, outline: &Outline, mut into: Ranges) -> Ranges {
    let section = |name: &str| outline.section(file, name);
    if let (Some((header, table)), Some((frames, data))) = (section(".eh_frame_hdr"), section(".eh_frame")) {
        let part = |address, data| unwind::Section { address, data };
        unwind::functions(part(header, table), part(frames, data), &mut into);
    }
    if let Some((_, data)) = go::SECTIONS.iter().find_map(|name| section(name)) {
        go::functions(data, go::Beginning::of(outline), &mut into);
    }
    if into.len() == 0 {
        for mut symbols in outline.symbols(file) {
            elf64::functions(&mut symbols.table, |f| {
                into.note(f.address, f.address.saturating_add(f.size));
                true
            });
        }
    }
    into.finish()
}

/// A file with code.
pub(super) struct Image {
    pub(super) file: Arc<CodeFile>,
    /// Of the mapping through which it was opened.
    pub(super) device_inode: ((u32, u32), u64),
    /// As the process sees it.
    pub(super) path: String,
    /// Its name without directories, for people.
    pub(super) name: String,
    code: CodeMap,
}

impl Image {
    /// Looks into a file.
    ///
    /// # Errors
    /// As of [`CodeMap::read`]; or no helper process could look into it now.
    pub(super) fn new(
        file: CodeFile,
        device_inode: ((u32, u32), u64),
        path: &str,
        name: String,
    ) -> Result<Self, Refusal> {
        let code = file.code_map(&name)?;
        Ok(Self {
            file: Arc::new(file),
            device_inode,
            path: path.to_owned(),
            name,
            code,
        })
    }

    /// How many functions it has.
    pub(super) fn functions(&self) -> usize {
        self.code.functions.len()
    }

    /// As a file in which something is counted.
    pub(super) fn target(&self) -> Target {
        Target {
            device_inode: self.device_inode,
            path: self.path.clone(),
            file: self.file.clone(),
        }
    }

    /// Address, as the file numbers it, of a place in the file.
    pub(super) fn address(&self, offset: u64) -> Option<u64> {
        self.code.segments.iter().find_map(|s| {
            let within = offset.checked_sub(s.offset)?;
            (within < s.size).then_some(())?;
            s.address.checked_add(within)
        })
    }

    /// Place in the file of an address.
    pub(super) fn offset(&self, address: u64) -> Option<u64> {
        let segment = self.code.segments.iter().find(|s| s.holds(address))?;
        segment.offset.checked_add(address.checked_sub(segment.address)?)
    }

    /// Start of the function that an address lies in.
    pub(super) fn function(&self, address: u64) -> Option<u64> {
        self.code.functions.around(address).map(|range| range.0)
    }

    /// Whether a function, or the stub of one, begins at an address.
    pub(super) fn begins(&self, address: u64) -> bool {
        self.function(address) == Some(address)
            || self
                .code
                .stubs
                .iter()
                .any(|(from, to)| (*from..*to).contains(&address) && (address - from) % STUB == 0)
    }

    /// The code of a function.
    pub(super) fn code(&self, start: u64) -> Option<Vec<u8>> {
        let (_, end) = self.code.functions.around(start).filter(|f| f.0 == start)?;
        let size = end.checked_sub(start)?;
        if size > FUNCTION_MAX {
            return None;
        }
        let mut code = vec![0; usize::try_from(size).ok()?];
        self.file
            .file()
            .read_exact_at(&mut code, self.offset(start)?)
            .ok()?;
        Some(code)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use homeostat_points::code::Function;

    fn own() -> Option<Image> {
        let image = |file| Image::new(file, ((0, 0), 0), "/own", "own".to_owned()).map_err(|e| e.to_string());
        let found = CodeFile::own().and_then(image);
        match found {
            Ok(own) => Some(own),
            Err(why) => {
                eprintln!("skipped: {why}");
                None
            }
        }
    }

    #[test]
    fn what_a_helper_tells_is_believed_where_the_file_can_hold_it() {
        let Some(own) = own() else { return };
        let length = std::fs::metadata("/proc/self/exe").unwrap().len();
        let told = own.code.told();
        let text = serde_json::to_vec(&told).unwrap();
        assert!(
            text.len() < own.functions() * 16,
            "it stays short: {}",
            text.len()
        );
        let told_again: Told = serde_json::from_slice(&text).unwrap();
        assert_eq!(CodeMap::believed(told_again, length).as_ref(), Some(&own.code));
        let wrong = |change: &dyn Fn(&mut Told)| {
            let mut wrong = told.clone();
            change(&mut wrong);
            assert_eq!(CodeMap::believed(wrong, length), None);
        };
        wrong(&|told| told.segments[0].offset = length);
        wrong(&|told| told.segments[0].size = u64::MAX);
        wrong(&|told| told.segments[0].code = false);
        wrong(&|told| told.segments.clear());
        wrong(&|told| told.gaps[0] = u32::MAX);
        wrong(&|told| told.gaps.push(1));
        wrong(&|told| told.stubs = vec![(0, 1); 4]);
    }

    #[test]
    fn this_program_tells_where_its_functions_begin_and_end() {
        let Some(own) = own() else { return };
        assert!(own.functions() > 100);
        let (mut tried, mut understood) = (0, 0);
        for (start, end) in own.code.functions.iter().step_by(own.functions() / 200 + 1) {
            let offset = own.offset(start).unwrap();
            assert_eq!(own.address(offset), Some(start));
            assert_eq!(own.function(start), Some(start));
            assert_eq!(own.function(end - 1), Some(start));
            assert!(own.begins(start));
            let Some(code) = own.code(start) else { continue };
            assert_eq!(code.len() as u64, end - start);
            tried += 1;
            understood += usize::from(Function::decode(start, &code, &|a| own.begins(a), &[]).is_some());
        }
        assert!(understood * 10 > tried * 9, "{understood} of {tried} functions");
    }
}
