//! Function ranges of a file with code, from unwind tables (`.eh_frame`, which survives `strip`), Go's own table, and
//! symbols. Every number is checked, because the file is untrusted. Nothing of it is executed.

use crate::bounded::{Bounded, ReadAt};
use crate::elf64::{self, Outline, Segment};
use crate::ranges::Ranges;
use crate::{go, unwind};
use serde::{Deserialize, Serialize};

/// Sections of stubs through which functions of other files are called.
const STUBS: [&str; 3] = [".plt", ".plt.sec", ".plt.got"];
/// Size of a stub in bytes.
pub const STUB: u64 = 8;

/// Code and functions of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CodeMap {
    /// Loaded parts with code.
    pub segments: Vec<Segment>,
    /// Range of each function.
    pub functions: Ranges,
    /// Sections of stubs, from and to.
    pub stubs: Vec<(u64, u64)>,
}

impl CodeMap {
    /// Reads a file.
    ///
    /// # Errors
    /// A sentence: it is no x86-64 executable, or function ranges are missing.
    pub fn read(file: &dyn ReadAt) -> Result<Self, String> {
        let file = Bounded::new(file).map_err(|e| e.to_string())?;
        let outline = Outline::read(&file)?;
        if !outline.x86_64 {
            return Err("not code of x86-64, the only kind that is taken apart".to_owned());
        }
        let segments: Vec<Segment> = outline.segments.iter().copied().filter(|s| s.code).collect();
        let functions = empty(&segments).map(|into| functions(&file, &outline, into));
        let functions = functions.filter(|f| !f.is_empty());
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

/// The map as numbers, for a helper's message.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Told {
    segments: Vec<Segment>,
    gaps: Vec<u32>,
    stubs: Vec<(u64, u64)>,
}

impl CodeMap {
    /// Converts to numbers for a message.
    pub fn told(&self) -> Told {
        Told {
            segments: self.segments.clone(),
            gaps: self.functions.gaps(),
            stubs: self.stubs.clone(),
        }
    }

    /// Checks a helper's map of a file of this length. `None`: it is impossible.
    pub fn believed(told: Told, length: u64) -> Option<Self> {
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

/// No functions yet, in these parts.
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
    if into.is_empty() {
        for mut symbols in outline.symbols(file) {
            elf64::functions(&mut symbols.table, |f| {
                into.note(f.address, f.address.saturating_add(f.size));
                true
            });
        }
    }
    into.finish()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::code_file::CodeFile;

    #[test]
    fn what_a_helper_tells_is_believed_where_the_file_can_hold_it() {
        let file = match CodeFile::own() {
            Ok(file) => file,
            Err(why) => {
                eprintln!("skipped: {why}");
                return;
            }
        };
        let own = file.code_map("own").unwrap();
        let length = std::fs::metadata("/proc/self/exe").unwrap().len();
        let told = own.told();
        let text = serde_json::to_vec(&told).unwrap();
        assert!(
            text.len() < own.functions.len() * 16,
            "it stays short: {}",
            text.len()
        );
        let told_again: Told = serde_json::from_slice(&text).unwrap();
        assert_eq!(CodeMap::believed(told_again, length).as_ref(), Some(&own));
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
}
