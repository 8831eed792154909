//! Functions and bytes of the files whose code a process runs.
//!
//! Function ranges come from unwind tables (`.eh_frame`, which survives `strip`), Go's own table, and symbols. Every
//! number is checked, because the file is untrusted. Nothing of it is executed.

use crate::concern::Target;
use homeostat_meters::code_file::CodeFile;
use homeostat_meters::code_map::{CodeMap, STUB};
use homeostat_sensors::storage::Refusal;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

/// Most code that is read of one function.
const FUNCTION_MAX: u64 = homeostat_points::code::FUNCTION_MAX as u64;
pub(super) struct Image {
    pub(super) file: Arc<CodeFile>,
    pub(super) device_inode: ((u32, u32), u64),
    /// As the process sees it.
    pub(super) path: String,
    pub(super) name: String,
    code: CodeMap,
}

impl Image {
    /// Parses a file.
    ///
    /// # Errors
    /// As of [`CodeMap::read`], or no helper process was available.
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

    pub(super) fn functions(&self) -> usize {
        self.code.functions.len()
    }

    pub(super) fn target(&self) -> Target {
        Target {
            device_inode: self.device_inode,
            path: self.path.clone(),
            file: self.file.clone(),
        }
    }

    /// File-relative address of an offset.
    pub(super) fn address(&self, offset: u64) -> Option<u64> {
        self.code.segments.iter().find_map(|s| {
            let within = offset.checked_sub(s.offset)?;
            (within < s.size).then_some(())?;
            s.address.checked_add(within)
        })
    }

    /// Offset of a file-relative address.
    pub(super) fn offset(&self, address: u64) -> Option<u64> {
        let segment = self.code.segments.iter().find(|s| s.holds(address))?;
        segment.offset.checked_add(address.checked_sub(segment.address)?)
    }

    pub(super) fn function(&self, address: u64) -> Option<u64> {
        self.code.functions.around(address).map(|range| range.0)
    }

    /// Whether a function, or a stub of one, begins at an address.
    pub(super) fn begins(&self, address: u64) -> bool {
        self.function(address) == Some(address)
            || self
                .code
                .stubs
                .iter()
                .any(|(from, to)| (*from..*to).contains(&address) && (address - from) % STUB == 0)
    }

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
