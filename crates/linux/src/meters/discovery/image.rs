//! The files whose code a process runs: where in them functions begin and end, and their bytes.
//!
//! Ranges of functions come from what unwinders need (`.eh_frame`, which survives `strip`), from Go's own table, and from
//! symbols. Nothing is run and nothing trusted: every number is checked.

use super::super::code_file::CodeFile;
use super::super::concern::Target;
use super::super::elf64::{Outline, Segment};
use super::super::go;
use super::unwind::{self, FUNCTIONS_MAX};
use std::os::unix::fs::FileExt;
use std::sync::Arc;

/// Largest table of a file that is read.
const TABLE_MAX: u64 = 64 * 1024 * 1024;
/// Code of one function that is read at most.
const FUNCTION_MAX: u64 = homeostat_points::code::FUNCTION_MAX as u64;
/// Sections of stubs through which functions of other files are called, and the bytes of one.
const STUBS: [&str; 3] = [".plt", ".plt.sec", ".plt.got"];
const STUB: u64 = 8;

/// A file with code.
pub(super) struct Image {
    pub(super) file: Arc<CodeFile>,
    /// Of the mapping through which it was opened.
    pub(super) device_inode: ((u32, u32), u64),
    /// As the process sees it.
    pub(super) path: String,
    /// Its name without directories, for people.
    pub(super) name: String,
    segments: Vec<Segment>,
    /// Ranges of functions, ascending, none of them over another's start.
    functions: Vec<(u64, u64)>,
    stubs: Vec<(u64, u64)>,
}

impl Image {
    /// Looks into a file.
    ///
    /// # Errors
    /// A sentence: it is no executable of x86-64, or does not tell where its functions begin and end.
    pub(super) fn new(
        file: CodeFile,
        device_inode: ((u32, u32), u64),
        path: &str,
        name: String,
    ) -> Result<Self, String> {
        let outline = Outline::read(file.file()).map_err(|e| format!("{name}: {e}"))?;
        if !outline.x86_64 {
            return Err(format!(
                "{name}: not code of x86-64, the only kind that is taken apart"
            ));
        }
        let segments: Vec<Segment> = outline.segments.iter().copied().filter(|s| s.code).collect();
        let functions = in_order(ranges(&file, &outline), &segments);
        if functions.is_empty() {
            return Err(format!(
                "{name}: it does not tell where its functions begin and end"
            ));
        }
        Ok(Self {
            file: Arc::new(file),
            device_inode,
            path: path.to_owned(),
            name,
            segments,
            functions,
            stubs: STUBS.iter().filter_map(|s| outline.range(s)).collect(),
        })
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
        self.segments.iter().find_map(|s| {
            let within = offset.checked_sub(s.offset)?;
            (within < s.size).then_some(())?;
            s.address.checked_add(within)
        })
    }

    /// Place in the file of an address.
    pub(super) fn offset(&self, address: u64) -> Option<u64> {
        let segment = self.segments.iter().find(|s| s.holds(address))?;
        segment.offset.checked_add(address.checked_sub(segment.address)?)
    }

    /// Start of the function that an address lies in.
    pub(super) fn function(&self, address: u64) -> Option<u64> {
        let i = self
            .functions
            .partition_point(|(start, _)| *start <= address)
            .checked_sub(1)?;
        let (start, end) = self.functions.get(i)?;
        (address < *end).then_some(*start)
    }

    /// Whether a function, or the stub of one, begins at an address.
    pub(super) fn begins(&self, address: u64) -> bool {
        self.functions
            .binary_search_by_key(&address, |(start, _)| *start)
            .is_ok()
            || self
                .stubs
                .iter()
                .any(|(from, to)| (*from..*to).contains(&address) && (address - from).is_multiple_of(STUB))
    }

    /// The code of a function.
    pub(super) fn code(&self, start: u64) -> Option<Vec<u8>> {
        let i = self.functions.binary_search_by_key(&start, |f| f.0).ok()?;
        let size = self.functions.get(i)?.1.checked_sub(start)?;
        if size == 0 || size > FUNCTION_MAX {
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

/// Ascending, each within a segment and before the start of the next.
fn in_order(mut ranges: Vec<(u64, u64)>, segments: &[Segment]) -> Vec<(u64, u64)> {
    ranges.retain(|(start, end)| {
        start < end
            && segments
                .iter()
                .any(|s| s.holds(*start) && s.holds(end.saturating_sub(1)))
    });
    ranges.sort_unstable();
    ranges.dedup_by_key(|r| r.0);
    let starts: Vec<u64> = ranges.iter().skip(1).map(|r| r.0).collect();
    for (range, next) in ranges.iter_mut().zip(starts) {
        range.1 = range.1.min(next);
    }
    ranges
}

fn ranges(file: &CodeFile, outline: &Outline) -> Vec<(u64, u64)> {
    let section = |name: &str| outline.contents(file.file(), name, TABLE_MAX);
    let mut found = Vec::new();
    if let (Some((header, table)), Some((frames, data))) = (section(".eh_frame_hdr"), section(".eh_frame")) {
        let part = |address, data| unwind::Section { address, data };
        found = unwind::functions(part(header, &table), part(frames, &data));
    }
    let go = go::SECTIONS
        .iter()
        .find_map(|name| section(name))
        .and_then(|(_, data)| go::functions(&data, go::Beginning::of(outline)));
    found.extend(go.unwrap_or_default());
    if found.is_empty() {
        found = outline.functions(file.file(), TABLE_MAX);
        found.truncate(FUNCTIONS_MAX);
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use homeostat_points::code::Function;

    #[test]
    fn ranges_are_put_in_order_and_do_not_overlap() {
        let segment = Segment {
            address: 0x100,
            offset: 0,
            size: 0x100,
            code: true,
        };
        let given = vec![
            (0x180, 0x190),
            (0x100, 0x150),
            (0x140, 0x160),
            (0x1f0, 0x210),
            (0x90, 0x110),
            (0x170, 0x170),
        ];
        assert_eq!(
            in_order(given, &[segment]),
            [(0x100, 0x140), (0x140, 0x160), (0x180, 0x190)]
        );
    }

    fn own() -> Option<Image> {
        let found = CodeFile::own().and_then(|file| Image::new(file, ((0, 0), 0), "/own", "own".to_owned()));
        match found {
            Ok(own) => Some(own),
            Err(why) => {
                eprintln!("skipped: {why}");
                None
            }
        }
    }

    #[test]
    fn this_program_tells_where_its_functions_begin_and_end() {
        let Some(own) = own() else { return };
        assert!(own.functions.len() > 100);
        let (mut tried, mut understood) = (0, 0);
        for (start, end) in own.functions.iter().step_by(own.functions.len() / 200 + 1) {
            let offset = own.offset(*start).unwrap();
            assert_eq!(own.address(offset), Some(*start));
            assert_eq!(own.function(*start), Some(*start));
            assert_eq!(own.function(end - 1), Some(*start));
            assert!(own.begins(*start));
            let Some(code) = own.code(*start) else { continue };
            assert_eq!(code.len() as u64, end - start);
            tried += 1;
            understood += usize::from(Function::decode(*start, &code, &|a| own.begins(a), &[]).is_some());
        }
        assert!(understood * 10 > tried * 9, "{understood} of {tried} functions");
    }
}
