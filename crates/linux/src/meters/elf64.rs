//! The outline of an executable file: where its headers say that segments and sections are.
//!
//! A program chooses its own file, so this is read before anything larger is: piece by piece, each of a bounded size, every
//! number checked against the size of the file. What a general reader of such files would take into memory on its word (a
//! symbol table of ten gigabytes in a file with holes) is refused here.

use std::fs::File;
use std::os::unix::fs::FileExt;

/// Most program headers: linkers write a dozen.
const SEGMENTS_MAX: u16 = 256;
/// Most sections: linked programs have some forty.
const SECTIONS_MAX: u16 = 4096;
/// Largest table of the sections' names.
const NAMES_MAX: u64 = 1024 * 1024;
/// `EM_X86_64`.
const X86_64: u16 = 62;
const PT_LOAD: u32 = 1;
const PF_X: u32 = 1;
const SHT_SYMTAB: u32 = 2;
const SHT_NOBITS: u32 = 8;
const SHT_DYNSYM: u32 = 11;
const STT_FUNC: u8 = 2;

/// A piece of the file that is loaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Segment {
    pub(super) address: u64,
    pub(super) offset: u64,
    /// Bytes of it that come from the file.
    pub(super) size: u64,
    pub(super) code: bool,
}

impl Segment {
    pub(super) fn holds(&self, address: u64) -> bool {
        address
            .checked_sub(self.address)
            .is_some_and(|within| within < self.size)
    }
}

/// A section that lies in the file as a whole.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Section {
    name: Vec<u8>,
    kind: u32,
    address: u64,
    offset: u64,
    size: u64,
}

/// The outline of a 64-bit little-endian executable.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Outline {
    /// Code of x86-64.
    pub(super) x86_64: bool,
    /// Address at which the program is begun.
    pub(super) entry: u64,
    pub(super) segments: Vec<Segment>,
    sections: Vec<Section>,
}

impl Outline {
    /// Reads the outline of a file.
    ///
    /// # Errors
    /// A sentence: it is no such executable, or its headers do not fit it.
    pub(super) fn read(file: &File) -> Result<Self, String> {
        let length = file.metadata().map_err(|e| e.to_string())?.len();
        let head = bytes_at(file, length, 0, 64).ok_or("it has no header of an executable")?;
        if head.get(..6) != Some(&[0x7f, b'E', b'L', b'F', 2, 1]) {
            return Err("it is no 64-bit little-endian executable".to_owned());
        }
        let short = |at| u16_at(&head, at).unwrap_or(0);
        let long = |at| u64_at(&head, at).unwrap_or(0);
        let (segment_count, section_count) = (short(56), short(60));
        if segment_count > SEGMENTS_MAX || section_count > SECTIONS_MAX {
            return Err(format!(
                "it has {segment_count} program headers and {section_count} sections (at most {SEGMENTS_MAX} and \
                 {SECTIONS_MAX} are read)"
            ));
        }
        // The number may also stand in the first section, for files with more than 65,000: nobody links such a program.
        if section_count == 0 && long(40) != 0 {
            return Err("the number of its sections is missing".to_owned());
        }
        if (segment_count > 0 && short(54) != 56) || (section_count > 0 && short(58) != 64) {
            return Err("its headers have a size of their own".to_owned());
        }
        let table = |at, count: u16, each: u64| {
            bytes_at(file, length, at, u64::from(count) * each).ok_or("its headers lie outside of the file")
        };
        let segments = table(long(32), segment_count, 56)?
            .as_chunks::<56>()
            .0
            .iter()
            .filter_map(|h| segment(h, length))
            .collect();
        let headers = table(long(40), section_count, 64)?;
        let headers = headers.as_chunks::<64>().0;
        let names = headers
            .get(usize::from(short(62)))
            .and_then(|h| bytes_within(file, length, h, NAMES_MAX))
            .unwrap_or_default();
        Ok(Self {
            x86_64: short(18) == X86_64,
            entry: long(24),
            segments,
            sections: headers
                .iter()
                .filter_map(|h| section(h, &names, length))
                .collect(),
        })
    }

    fn named(&self, name: &str) -> Option<&Section> {
        self.sections.iter().find(|s| s.name == name.as_bytes())
    }

    /// Address and contents of a section, if it is there and not larger than that.
    pub(super) fn contents(&self, file: &File, name: &str, most: u64) -> Option<(u64, Vec<u8>)> {
        let section = self.named(name).filter(|s| s.size <= most)?;
        Some((section.address, contents(file, section)?))
    }

    /// Addresses that a section takes.
    pub(super) fn range(&self, name: &str) -> Option<(u64, u64)> {
        let section = self.named(name)?;
        Some((section.address, section.address.checked_add(section.size)?))
    }

    /// The larger of the two symbol tables, in bytes.
    pub(super) fn symbols_size(&self) -> u64 {
        self.symbol_tables().map(|s| s.size).max().unwrap_or(0)
    }

    fn symbol_tables(&self) -> impl Iterator<Item = &Section> {
        self.sections
            .iter()
            .filter(|s| matches!(s.kind, SHT_SYMTAB | SHT_DYNSYM))
    }

    /// Addresses of functions by the symbol tables, from and to; of tables that are not larger than that.
    pub(super) fn functions(&self, file: &File, most: u64) -> Vec<(u64, u64)> {
        let mut found = Vec::new();
        for section in self.symbol_tables().filter(|s| s.size <= most) {
            let symbols = contents(file, section).unwrap_or_default();
            found.extend(symbols.as_chunks::<24>().0.iter().filter_map(|s| function(s)));
        }
        found
    }
}

fn contents(file: &File, section: &Section) -> Option<Vec<u8>> {
    let mut data = vec![0; usize::try_from(section.size).ok()?];
    file.read_exact_at(&mut data, section.offset).ok()?;
    Some(data)
}

/// A loaded piece; what would lie outside of the file is left out.
fn segment(header: &[u8], length: u64) -> Option<Segment> {
    let (kind, flags) = (u32_at(header, 0)?, u32_at(header, 4)?);
    let (offset, address, size) = (u64_at(header, 8)?, u64_at(header, 16)?, u64_at(header, 32)?);
    (kind == PT_LOAD && offset.checked_add(size)? <= length && address.checked_add(size).is_some()).then_some(
        Segment {
            address,
            offset,
            size,
            code: flags & PF_X != 0,
        },
    )
}

fn section(header: &[u8], names: &[u8], length: u64) -> Option<Section> {
    let (kind, address) = (u32_at(header, 4)?, u64_at(header, 16)?);
    let (offset, size) = (u64_at(header, 24)?, u64_at(header, 32)?);
    if kind == SHT_NOBITS || offset.checked_add(size)? > length {
        return None;
    }
    let name = names.get(usize::try_from(u32_at(header, 0)?).ok()?..)?;
    // The names of sections are short; a longer one is none that is asked for.
    let name = name.split(|c| *c == 0).next()?;
    Some(Section {
        name: name.get(..name.len().min(64))?.to_vec(),
        kind,
        address,
        offset,
        size,
    })
}

/// A symbol of a function: `name u32, info u8, other u8, section u16, value u64, size u64`.
fn function(symbol: &[u8]) -> Option<(u64, u64)> {
    let (start, size) = (u64_at(symbol, 8)?, u64_at(symbol, 16)?);
    let defined = u16_at(symbol, 6)? != 0 && start != 0 && size != 0;
    (defined && symbol.get(4)? & 0x0f == STT_FUNC).then_some((start, start.checked_add(size)?))
}

/// Contents of the section with this header.
fn bytes_within(file: &File, length: u64, header: &[u8], most: u64) -> Option<Vec<u8>> {
    let (offset, size) = (u64_at(header, 24)?, u64_at(header, 32)?);
    (size <= most).then_some(())?;
    bytes_at(file, length, offset, size)
}

fn bytes_at(file: &File, length: u64, at: u64, size: u64) -> Option<Vec<u8>> {
    (at.checked_add(size)? <= length).then_some(())?;
    let mut bytes = vec![0; usize::try_from(size).ok()?];
    file.read_exact_at(&mut bytes, at).ok()?;
    Some(bytes)
}

pub(super) fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_le_bytes(
        bytes.get(at..at.checked_add(2)?)?.try_into().ok()?,
    ))
}

pub(super) fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(
        bytes.get(at..at.checked_add(4)?)?.try_into().ok()?,
    ))
}

pub(super) fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(
        bytes.get(at..at.checked_add(8)?)?.try_into().ok()?,
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(bytes: &[u8]) -> File {
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(bytes, 0).unwrap();
        file
    }

    /// One segment of code, a section of names, one of symbols, one called `.text`.
    fn small() -> Vec<u8> {
        let mut b = vec![0u8; 64];
        b[..6].copy_from_slice(&[0x7f, b'E', b'L', b'F', 2, 1]);
        let put = |b: &mut Vec<u8>, at: usize, n: u64, size: usize| {
            if b.len() < at + size {
                b.resize(at + size, 0);
            }
            b[at..at + size].copy_from_slice(&n.to_le_bytes()[..size]);
        };
        for (at, n, size) in [
            (18, 62, 2),
            (32, 64, 8),
            (40, 512, 8),
            (54, 56, 2),
            (56, 1, 2),
            (58, 64, 2),
            (60, 3, 2),
        ] {
            put(&mut b, at, n, size);
        }
        for (at, n, size) in [(0, 1, 4), (4, 5, 4), (8, 0, 8), (16, 0x1000, 8), (32, 0x300, 8)] {
            put(&mut b, 64 + at, n, size);
        }
        b.resize(512, 0);
        b[256..256 + 16].copy_from_slice(b"\0.names\0.text\0\0\0");
        // A symbol of a function, and one of data.
        for (at, n, size) in [(4, 2, 1), (6, 1, 2), (8, 0x1010, 8), (16, 0x20, 8)] {
            put(&mut b, 300 + at, n, size);
        }
        for (at, n, size) in [(4, 1, 1), (6, 1, 2), (8, 0x2010, 8), (16, 0x20, 8)] {
            put(&mut b, 324 + at, n, size);
        }
        for (i, (name, kind, address, offset, size)) in [
            (1u64, 3u64, 0u64, 256u64, 16u64),
            (8, 1, 0x1000, 0, 64),
            (0, 2, 0, 300, 48),
        ]
        .into_iter()
        .enumerate()
        {
            let at = 512 + i * 64;
            put(&mut b, at, name, 4);
            put(&mut b, at + 4, kind, 4);
            put(&mut b, at + 16, address, 8);
            put(&mut b, at + 24, offset, 8);
            put(&mut b, at + 32, size, 8);
            put(&mut b, at + 56, 0, 8);
        }
        b.resize(0x400, 0);
        b
    }

    #[test]
    fn segments_sections_and_functions_are_found() {
        let f = file(&small());
        let outline = Outline::read(&f).unwrap();
        assert!(outline.x86_64);
        assert_eq!(
            outline.segments,
            [Segment {
                address: 0x1000,
                offset: 0,
                size: 0x300,
                code: true
            }]
        );
        assert_eq!(outline.range(".text"), Some((0x1000, 0x1040)));
        assert_eq!(outline.contents(&f, ".text", 64).unwrap().1.len(), 64);
        assert!(outline.contents(&f, ".text", 63).is_none(), "larger than wanted");
        assert_eq!(outline.functions(&f, 48), [(0x1010, 0x1030)]);
        assert_eq!(outline.symbols_size(), 48);
    }

    #[test]
    fn a_table_that_the_file_does_not_hold_is_not_read() {
        let mut b = small();
        // The size of the symbol table: more than memory holds, then more than the file has.
        for size in [u64::MAX, 1 << 40, 0x1000] {
            b[512 + 128 + 32..512 + 128 + 40].copy_from_slice(&size.to_le_bytes());
            let f = file(&b);
            let outline = Outline::read(&f).unwrap();
            assert!(outline.functions(&f, u64::MAX).is_empty());
        }
        // In a file with a hole of that size the outline tells it, so that nobody reads it.
        let f = file(&b);
        b[512 + 128 + 32..512 + 128 + 40].copy_from_slice(&(1u64 << 34).to_le_bytes());
        f.write_all_at(&b, 0).unwrap();
        f.set_len(1 << 35).unwrap();
        let outline = Outline::read(&f).unwrap();
        assert_eq!(outline.symbols_size(), 1 << 34);
        assert!(outline.functions(&f, 1 << 20).is_empty());
    }

    #[test]
    fn damaged_headers_are_refused_or_harmless() {
        let good = small();
        for cut in 0..good.len() {
            let _ = Outline::read(&file(&good[..cut]));
        }
        for at in 0..good.len() {
            for value in [0xff, 0x7f, 0] {
                let mut b = good.clone();
                b[at] = value;
                let f = file(&b);
                if let Ok(outline) = Outline::read(&f) {
                    let _ = outline.functions(&f, 1 << 20);
                    let _ = outline.contents(&f, ".text", 1 << 20);
                }
            }
        }
        let mut many = good.clone();
        many[60..62].copy_from_slice(&0xffffu16.to_le_bytes());
        assert!(Outline::read(&file(&many)).unwrap_err().contains("sections"));
        let mut none = good;
        none[60..62].copy_from_slice(&0u16.to_le_bytes());
        assert!(Outline::read(&file(&none)).unwrap_err().contains("missing"));
    }
}
