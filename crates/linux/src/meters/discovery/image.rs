//! The files whose code a process runs: where in them functions begin, and their bytes.
//!
//! Starts of functions come from what unwinders need (`.eh_frame_hdr`, which survives `strip`), from Go's own table,
//! and from symbols. Nothing is run and nothing trusted: every number is checked.

use object::read::{Object, ObjectSection, ObjectSegment, ObjectSymbol, ReadCache};
use object::{Architecture, SymbolKind};
use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

/// Largest table of a file that is read.
const TABLE_MAX: u64 = 64 * 1024 * 1024;
/// Most functions of a file.
const FUNCTIONS_MAX: usize = 4_000_000;
/// Code of one function that is read at most.
const FUNCTION_MAX: u64 = homeostat_points::code::FUNCTION_MAX as u64;

/// A piece of the file that is loaded as code.
#[derive(Clone, Copy, Debug)]
struct Segment {
    address: u64,
    offset: u64,
    size: u64,
}

/// A file with code.
pub(super) struct Image {
    file: File,
    /// Path by which the kernel finds it from our side.
    pub(super) path: PathBuf,
    /// Whether it is the main executable.
    pub(super) main: bool,
    pub(super) identity: (u64, u64),
    segments: Vec<Segment>,
    /// Addresses at which functions begin, ascending.
    starts: Vec<u64>,
}

impl Image {
    /// Looks into a file.
    ///
    /// # Errors
    /// A sentence: it cannot be read, is no executable of x86-64, or does not tell where its functions begin.
    pub(super) fn open(path: &Path, main: bool) -> Result<Self, String> {
        let say = |what: &dyn std::fmt::Display| format!("{}: {what}", path.display());
        let file = File::open(path).map_err(|e| say(&e))?;
        let meta = file.metadata().map_err(|e| say(&e))?;
        if !meta.is_file() {
            return Err(say(&"not a regular file"));
        }
        let copy = file.try_clone().map_err(|e| say(&e))?;
        let cache = ReadCache::new(copy);
        let elf = object::File::parse(&cache).map_err(|e| say(&e))?;
        if elf.architecture() != Architecture::X86_64 {
            return Err(say(&"not code of x86-64, the only kind that is taken apart"));
        }
        let segments: Vec<Segment> = elf
            .segments()
            .filter(|s| s.permissions().executable())
            .map(|s| Segment {
                address: s.address(),
                offset: s.file_range().0,
                size: s.file_range().1,
            })
            .collect();
        let mut starts = frame_starts(&elf);
        starts.extend(go_starts(&elf));
        if starts.is_empty() {
            starts = symbol_starts(&elf);
        }
        starts.retain(|a| segments.iter().any(|s| s.holds(*a)));
        starts.sort_unstable();
        starts.dedup();
        if starts.is_empty() {
            return Err(say(&"it does not tell where its functions begin"));
        }
        Ok(Self {
            file,
            path: path.to_owned(),
            main,
            identity: (meta.dev(), meta.ino()),
            segments,
            starts,
        })
    }

    /// Address, as the file numbers it, of a place in the file.
    pub(super) fn address(&self, offset: u64) -> Option<u64> {
        self.segments.iter().find_map(|s| {
            let within = offset.checked_sub(s.offset)?;
            (within < s.size).then(|| s.address + within)
        })
    }

    /// Place in the file of an address.
    pub(super) fn offset(&self, address: u64) -> Option<u64> {
        let segment = self.segments.iter().find(|s| s.holds(address))?;
        segment.offset.checked_add(address - segment.address)
    }

    /// Start of the function that an address lies in.
    pub(super) fn function(&self, address: u64) -> Option<u64> {
        let i = self.starts.partition_point(|s| *s <= address).checked_sub(1)?;
        self.starts.get(i).copied()
    }

    /// The code from the start of a function to the start of the next.
    pub(super) fn code(&self, start: u64) -> Option<Vec<u8>> {
        let segment = self.segments.iter().find(|s| s.holds(start))?;
        let next = self.starts.partition_point(|s| *s <= start);
        let end = self.starts.get(next).copied().unwrap_or(u64::MAX);
        let size = end
            .min(segment.address.saturating_add(segment.size))
            .checked_sub(start)?;
        if size == 0 || size > FUNCTION_MAX {
            return None;
        }
        let mut code = vec![0; usize::try_from(size).ok()?];
        self.file.read_exact_at(&mut code, self.offset(start)?).ok()?;
        Some(code)
    }
}

impl Segment {
    fn holds(&self, address: u64) -> bool {
        address
            .checked_sub(self.address)
            .is_some_and(|within| within < self.size)
    }
}

/// Contents of a section, if it is there and not too large.
fn section<'d>(elf: &object::File<'d, &'d ReadCache<File>>, name: &str) -> Option<(u64, &'d [u8])> {
    let section = elf.section_by_name(name)?;
    (section.size() <= TABLE_MAX).then_some(())?;
    Some((section.address(), section.data().ok()?))
}

/// The search table of `.eh_frame_hdr` (Linux Standard Base, *Exception Frames*): pairs of signed offsets from the
/// section's own address, in the one encoding that linkers write (`datarel | sdata4`).
fn frame_starts<'d>(elf: &object::File<'d, &'d ReadCache<File>>) -> Vec<u64> {
    section(elf, ".eh_frame_hdr")
        .and_then(|(address, data)| frame_table(address, data))
        .unwrap_or_default()
}

pub(in crate::meters) fn frame_table(address: u64, data: &[u8]) -> Option<Vec<u64>> {
    let [1, pointer, 0x03, 0x3b, ..] = data else {
        return None;
    };
    // The pointer to .eh_frame takes 4 bytes in every 4-byte encoding, 8 in the two others.
    let count_at = match pointer & 0x0f {
        0x03 | 0x0b => 8,
        0x00 | 0x04 | 0x0c => 12,
        _ => return None,
    };
    let count = u32_at(data, count_at)? as usize;
    let table = data.get(count_at + 4..)?;
    Some(
        table
            .as_chunks::<8>()
            .0
            .iter()
            .take(count.min(FUNCTIONS_MAX))
            .map(|[a, b, c, d, ..]| {
                let offset = i64::from(i32::from_le_bytes([*a, *b, *c, *d]));
                address.wrapping_add_signed(offset)
            })
            .collect(),
    )
}

/// Go's table of functions (`runtime.pclntab`, versions 1.18 and later): a header, and pairs of offsets.
fn go_starts<'d>(elf: &object::File<'d, &'d ReadCache<File>>) -> Vec<u64> {
    let text = elf.section_by_name(".text").map_or(0, |s| s.address());
    [".gopclntab", ".data.rel.ro.gopclntab"]
        .iter()
        .find_map(|name| section(elf, name))
        .and_then(|(_, data)| go_table(text, data))
        .unwrap_or_default()
}

pub(in crate::meters) fn go_table(text: u64, data: &[u8]) -> Option<Vec<u64>> {
    // 1.18 and 1.20; 8-byte pointers.
    if !matches!(u32_at(data, 0)?, 0xffff_fff0 | 0xffff_fff1) || *data.get(7)? != 8 {
        return None;
    }
    let count = usize::try_from(u64_at(data, 8)?).ok()?;
    // Since 1.26 the start of the text is left for the program to fill in.
    let start = match u64_at(data, 24)? {
        0 => text,
        start => start,
    };
    let table = data.get(usize::try_from(u64_at(data, 64)?).ok()?..)?;
    Some(
        table
            .as_chunks::<8>()
            .0
            .iter()
            .take(count.min(FUNCTIONS_MAX))
            .map(|[a, b, c, d, ..]| start.wrapping_add(u64::from(u32::from_le_bytes([*a, *b, *c, *d]))))
            .collect(),
    )
}

fn symbol_starts<'d>(elf: &object::File<'d, &'d ReadCache<File>>) -> Vec<u64> {
    let small = |name| elf.section_by_name(name).map_or(0, |s| s.size()) <= TABLE_MAX;
    if !small(".symtab") || !small(".strtab") {
        return Vec::new();
    }
    elf.symbols()
        .chain(elf.dynamic_symbols())
        .filter(|s| s.is_definition() && s.kind() == SymbolKind::Text && s.address() > 0)
        .map(|s| s.address())
        .take(FUNCTIONS_MAX)
        .collect()
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(
        bytes.get(at..at.checked_add(4)?)?.try_into().ok()?,
    ))
}
fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(
        bytes.get(at..at.checked_add(8)?)?.try_into().ok()?,
    ))
}

/// A piece of a process's address space that holds code of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::meters) struct Mapping {
    pub(super) start: u64,
    pub(super) end: u64,
    /// Offset of its start in the file.
    pub(super) offset: u64,
    pub(super) device_inode: (String, u64),
    pub(super) path: String,
}

/// The code of files in a list of mappings; what has no file (JIT code, the kernel's own page) or can be written is
/// left out.
pub(in crate::meters) fn code_mappings(text: &str) -> Vec<Mapping> {
    text.lines().filter_map(mapping).collect()
}

/// `start-end perms offset device inode path`.
fn mapping(line: &str) -> Option<Mapping> {
    let mut fields = line.splitn(6, ' ');
    let (start, end) = fields.next()?.split_once('-')?;
    let permissions = fields.next()?.as_bytes();
    let offset = fields.next()?;
    let device = fields.next()?;
    let inode: u64 = fields.next()?.parse().ok()?;
    let path = fields.next()?.trim_start();
    if permissions.get(2) != Some(&b'x')
        || permissions.get(1) == Some(&b'w')
        || inode == 0
        || !path.starts_with('/')
        || path.starts_with("/memfd:")
        || path.starts_with("/dev/")
    {
        return None;
    }
    let hex = |s: &str| u64::from_str_radix(s, 16).ok();
    Some(Mapping {
        start: hex(start)?,
        end: hex(end)?,
        offset: hex(offset)?,
        device_inode: (device.to_owned(), inode),
        path: path.to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn code_of_files_is_told_from_other_mappings() {
        let text = "\
55d0-55e0 r-xp 00002000 fe:00 1234                       /usr/bin/a b
55e0-55f0 r--p 00002000 fe:00 1234                       /usr/bin/a b
7000-7100 r-xp 00000000 00:00 0                          [vdso]
7100-7200 rwxp 00000000 fe:00 99                         /tmp/jit
7200-7300 r-xp 00000000 00:01 98                         /memfd:code (deleted)
7300-7400 rwxp 00000000 00:00 0
nonsense
";
        let found = code_mappings(text);
        assert_eq!(
            found,
            [Mapping {
                start: 0x55d0,
                end: 0x55e0,
                offset: 0x2000,
                device_inode: ("fe:00".to_owned(), 1234),
                path: "/usr/bin/a b".to_owned(),
            }]
        );
    }

    #[test]
    fn the_unwinders_table_tells_where_functions_begin() {
        let mut data = vec![1, 0x1b, 0x03, 0x3b];
        for n in [-16i32, 2, -256, 0, 64, 0] {
            data.extend(n.to_le_bytes());
        }
        assert_eq!(frame_table(0x1000, &data), Some(vec![0xf00, 0x1040]));
        for cut in 0..data.len() {
            let _ = frame_table(0x1000, &data[..cut]);
        }
        // Another encoding is not guessed at.
        data[3] = 0x0b;
        assert_eq!(frame_table(0x1000, &data), None);
    }

    #[test]
    fn gos_table_tells_where_functions_begin() {
        let mut data = vec![0xf1, 0xff, 0xff, 0xff, 0, 0, 1, 8];
        for n in [2u64, 1, 0x40_1000, 0, 0, 0, 0, 72] {
            data.extend(n.to_le_bytes());
        }
        for n in [0u32, 7, 0x20, 9, 0x80, 0] {
            data.extend(n.to_le_bytes());
        }
        assert_eq!(go_table(0, &data), Some(vec![0x40_1000, 0x40_1020]));
        for cut in 0..data.len() {
            let _ = go_table(0, &data[..cut]);
        }
        for at in 0..data.len() {
            let mut broken = data.clone();
            broken[at] = 0xff;
            let _ = go_table(0, &broken);
        }
    }

    #[test]
    fn this_program_tells_where_its_functions_begin() {
        let own = match Image::open(Path::new("/proc/self/exe"), true) {
            Ok(own) => own,
            Err(why) if cfg!(target_arch = "x86_64") => panic!("{why}"),
            Err(why) => {
                eprintln!("skipped: {why}");
                return;
            }
        };
        assert!(own.starts.len() > 100);
        let mut understood = 0;
        for start in own.starts.iter().step_by(own.starts.len() / 50) {
            let offset = own.offset(*start).unwrap();
            assert_eq!(own.address(offset), Some(*start));
            assert_eq!(own.function(*start), Some(*start));
            let code = own.code(*start);
            understood += usize::from(
                code.and_then(|c| homeostat_points::code::Function::decode(*start, &c))
                    .is_some(),
            );
        }
        assert!(understood > 40);
        assert!(Image::open(Path::new("/proc/self/status"), true).is_err());
        assert!(Image::open(Path::new("/proc"), true).is_err());
    }
}
