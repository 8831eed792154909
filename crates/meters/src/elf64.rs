//! Outline of an executable file: segments and sections, by its headers.
//!
//! The program chooses its own file. So the outline is read within limits ([`Bounded`]), and every number is checked
//! against the file's size. Callers read tables later, one window at a time.

use crate::bounded::{Bounded, Region};
use serde::{Deserialize, Serialize};

/// Most program headers: linkers write a dozen.
const SEGMENTS_MAX: u16 = 256;
/// Most sections: linked programs have about forty.
const SECTIONS_MAX: u16 = 4096;
/// Longest section name that is looked up: `.data.rel.ro.gopclntab`.
const NAME_MAX: usize = 32;
const X86_64: u16 = 62;
const PT_LOAD: u32 = 1;
const PF_X: u32 = 1;
const SHT_SYMTAB: u32 = 2;
const SHT_STRTAB: u32 = 3;
const SHT_NOBITS: u32 = 8;
const SHT_DYNSYM: u32 = 11;
const SHF_COMPRESSED: u64 = 0x800;
const STT_FUNC: u8 = 2;
const SYMBOL: usize = 24;

/// A loaded part of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Segment {
    /// Address in memory.
    pub address: u64,
    /// Offset in the file.
    pub offset: u64,
    /// Bytes from the file.
    pub size: u64,
    /// Whether it is executable.
    pub code: bool,
}

impl Segment {
    /// Whether it contains an address.
    pub fn holds(&self, address: u64) -> bool {
        address
            .checked_sub(self.address)
            .is_some_and(|within| within < self.size)
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Section {
    /// Its number, by which others refer to it.
    number: u32,
    name: Vec<u8>,
    kind: u32,
    address: u64,
    offset: u64,
    size: u64,
    link: u32,
}

/// A symbol table and its names.
pub struct Symbols<'b> {
    /// The symbols.
    pub table: Region<'b>,
    /// Their names.
    pub names: Region<'b>,
}

/// A function of a symbol table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FunctionSymbol {
    /// Offset of its name among the names.
    pub name: u32,
    /// Address in memory.
    pub address: u64,
    /// 0 = unknown.
    pub size: u64,
}

/// The outline of a 64-bit little-endian executable.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outline {
    /// Code of x86-64.
    pub x86_64: bool,
    /// Entry address of the program.
    pub entry: u64,
    /// Loaded parts.
    pub segments: Vec<Segment>,
    sections: Vec<Section>,
}

impl Outline {
    /// Reads the outline of a file.
    ///
    /// # Errors
    /// A sentence: no such executable, or its headers do not fit it.
    pub fn read(file: &Bounded<'_>) -> Result<Self, String> {
        let head = file.read(0, 64).ok_or("it has no header of an executable")?;
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
        // Files with more than 65,000 sections have the number in the first section. Nobody links such a program.
        if section_count == 0 && long(40) != 0 {
            return Err("the number of its sections is missing".to_owned());
        }
        if (segment_count > 0 && short(54) != 56) || (section_count > 0 && short(58) != 64) {
            return Err("its headers have a size of their own".to_owned());
        }
        let table = |at, count: u16, each: usize| {
            file.read(at, usize::from(count) * each)
                .ok_or("its headers lie outside of the file")
        };
        let length = file.length();
        let segments = table(long(32), segment_count, 56)?
            .chunks_exact(56)
            .filter_map(|h| segment(h, length))
            .collect();
        let headers = table(long(40), section_count, 64)?;
        let headers = headers.chunks_exact(64);
        let mut names = headers.clone().nth(usize::from(short(62))).and_then(|h| {
            let (offset, size) = (u64_at(h, 24)?, u64_at(h, 32)?);
            file.region(offset, size)
        });
        Ok(Self {
            x86_64: short(18) == X86_64,
            entry: long(24),
            segments,
            sections: (0u32..)
                .zip(headers)
                .filter_map(|(number, h)| section(number, h, names.as_mut(), length))
                .collect(),
        })
    }

    fn named(&self, name: &str) -> Option<&Section> {
        self.sections.iter().find(|s| s.name == name.as_bytes())
    }

    /// Address of a section, and a reader of it.
    pub fn section<'b>(&self, file: &'b Bounded<'_>, name: &str) -> Option<(u64, Region<'b>)> {
        let section = self.named(name)?;
        Some((section.address, file.region(section.offset, section.size)?))
    }

    /// Address range of a section.
    pub fn range(&self, name: &str) -> Option<(u64, u64)> {
        let section = self.named(name)?;
        Some((section.address, section.address.checked_add(section.size)?))
    }

    /// The loader's symbol table, which survives `strip`, then the full one. Only the first table of each kind counts.
    pub fn symbols<'b>(&self, file: &'b Bounded<'_>) -> Vec<Symbols<'b>> {
        let first = |kind| {
            let table = self.sections.iter().find(|s| s.kind == kind)?;
            let names = self
                .sections
                .iter()
                .find(|s| s.number == table.link && s.kind == SHT_STRTAB)?;
            Some(Symbols {
                table: file.region(table.offset, table.size)?,
                names: file.region(names.offset, names.size)?,
            })
        };
        [SHT_DYNSYM, SHT_SYMTAB].into_iter().filter_map(first).collect()
    }

    /// File offset of an address, by the segments. `code`: in a segment with code, or in one without.
    pub fn file_offset(&self, address: u64, code: bool) -> Option<u64> {
        let segment = self
            .segments
            .iter()
            .find(|s| s.code == code && s.holds(address))?;
        segment.offset.checked_add(address.checked_sub(segment.address)?)
    }
}

/// Visits each function defined in a symbol table until `each` returns false. `None`: the table is cut.
pub fn functions(table: &mut Region<'_>, mut each: impl FnMut(FunctionSymbol) -> bool) -> Option<()> {
    table.records::<SYMBOL>(|symbol| function(symbol).is_none_or(&mut each))
}

/// A loaded part. `None` if it is outside the file.
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

/// `None` for a section outside the file, or a compressed one: nothing is unpacked.
fn section(number: u32, header: &[u8], names: Option<&mut Region<'_>>, length: u64) -> Option<Section> {
    let (kind, flags, address) = (u32_at(header, 4)?, u64_at(header, 8)?, u64_at(header, 16)?);
    let (offset, size) = (u64_at(header, 24)?, u64_at(header, 32)?);
    if kind == SHT_NOBITS || flags & SHF_COMPRESSED != 0 || offset.checked_add(size)? > length {
        return None;
    }
    // Others may refer to a section without a name.
    let name = names.and_then(|names| {
        let name = names.up_to(u64::from(u32_at(header, 0)?), NAME_MAX)?;
        Some(name.split(|c| *c == 0).next()?.to_vec())
    });
    Some(Section {
        number,
        name: name.unwrap_or_default(),
        kind,
        address,
        offset,
        size,
        link: u32_at(header, 40)?,
    })
}

/// A symbol of a function: `name u32, info u8, other u8, section u16, value u64, size u64`.
fn function(symbol: &[u8; SYMBOL]) -> Option<FunctionSymbol> {
    let address = u64_at(symbol, 8)?;
    let defined = u16_at(symbol, 6)? != 0 && address != 0;
    (defined && symbol.get(4)? & 0x0f == STT_FUNC).then_some(FunctionSymbol {
        name: u32_at(symbol, 0)?,
        address,
        size: u64_at(symbol, 16)?,
    })
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_le_bytes(
        bytes.get(at..at.checked_add(2)?)?.try_into().ok()?,
    ))
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

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A section of an executable that is made up.
    pub(crate) struct Made<'a> {
        pub(crate) name: &'a str,
        pub(crate) kind: u32,
        pub(crate) flags: u64,
        pub(crate) address: u64,
        pub(crate) link: u32,
        pub(crate) data: Vec<u8>,
    }

    impl<'a> Made<'a> {
        pub(crate) fn new(name: &'a str, kind: u32, data: Vec<u8>) -> Self {
            Self {
                name,
                kind,
                flags: 0,
                address: 0,
                link: 0,
                data,
            }
        }
    }

    /// Where the code of such an executable is loaded, and where it begins in the file.
    pub(crate) const ADDRESS: u64 = 0x1000;
    pub(crate) const CODE: u64 = 0xb0;

    /// An executable of one segment of code and one of data, and these sections; the first is number 1.
    pub(crate) fn made(code: &[u8], sections: &[Made<'_>]) -> Vec<u8> {
        let mut b = vec![0u8; CODE as usize];
        b.extend(code);
        let loaded = b.len() as u64;
        let mut names = vec![0u8];
        let mut headers = vec![0u8; 64];
        for section in sections {
            headers.extend((names.len() as u32).to_le_bytes());
            headers.extend(section.kind.to_le_bytes());
            for n in [
                section.flags,
                section.address,
                b.len() as u64,
                section.data.len() as u64,
            ] {
                headers.extend(n.to_le_bytes());
            }
            headers.extend(section.link.to_le_bytes());
            headers.extend([0; 20]);
            names.extend(section.name.bytes().chain([0]));
            b.extend(&section.data);
        }
        headers.extend([0, 0, 0, 0, 3, 0, 0, 0]);
        for n in [0, 0, b.len() as u64, names.len() as u64, 0, 0, 0] {
            headers.extend(n.to_le_bytes());
        }
        b.extend(names);
        let headers_at = b.len() as u64;
        b.extend(headers);
        let count = sections.len() as u16 + 2;
        let mut put = |at: usize, bytes: &[u8]| b[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, &[0x7f, b'E', b'L', b'F', 2, 1]);
        put(18, &X86_64.to_le_bytes());
        put(24, &ADDRESS.to_le_bytes());
        put(32, &64u64.to_le_bytes());
        put(40, &headers_at.to_le_bytes());
        for (at, n) in [(54, 56u16), (56, 2), (58, 64), (60, count), (62, count - 1)] {
            put(at, &n.to_le_bytes());
        }
        for (at, flags, from, address, size) in [
            (64, 5u32, CODE, ADDRESS, loaded - CODE),
            (120, 6, 0, 0x10_0000, CODE),
        ] {
            put(at, &1u32.to_le_bytes());
            put(at + 4, &flags.to_le_bytes());
            put(at + 8, &from.to_le_bytes());
            put(at + 16, &address.to_le_bytes());
            put(at + 32, &size.to_le_bytes());
        }
        b
    }

    /// A table of symbols of functions: where its name stands, address, size.
    pub(crate) fn table(symbols: &[(u32, u64, u64)]) -> Vec<u8> {
        let mut b = vec![0; SYMBOL];
        for (name, address, size) in symbols {
            b.extend(name.to_le_bytes());
            b.extend([STT_FUNC, 0, 1, 0]);
            b.extend(address.to_le_bytes());
            b.extend(size.to_le_bytes());
        }
        b
    }

    fn small() -> Vec<u8> {
        let mut symbols = table(&[(1, ADDRESS + 4, 2), (3, 0, 2), (3, ADDRESS, 2)]);
        // The last one is of data.
        let last = symbols.len() - 20;
        symbols[last] = 1;
        let link = |made: Made<'static>| Made { link: 1, ..made };
        made(
            &[0x90; 16],
            &[
                Made::new(".strtab", SHT_STRTAB, b"\0a\0b\0".to_vec()),
                link(Made::new(".symtab", SHT_SYMTAB, symbols)),
                Made::new(".data", 1, vec![7; 9]),
            ],
        )
    }

    fn outline(bytes: &[u8]) -> Result<Outline, String> {
        Outline::read(&Bounded::new(&bytes).unwrap())
    }

    fn all(bytes: &[u8]) -> Vec<FunctionSymbol> {
        let file = Bounded::new(&bytes).unwrap();
        let mut found = Vec::new();
        for mut symbols in Outline::read(&file).unwrap().symbols(&file) {
            functions(&mut symbols.table, |f| {
                found.push(f);
                true
            });
        }
        found
    }

    /// Where a number in the header of a section stands.
    fn header(bytes: &[u8], section: usize, field: usize) -> usize {
        u64_at(bytes, 40).unwrap() as usize + section * 64 + field
    }

    #[test]
    fn segments_sections_and_functions_are_found() {
        let bytes = small();
        let outline = outline(&bytes).unwrap();
        assert!(outline.x86_64);
        assert_eq!(
            outline.segments.first(),
            Some(&Segment {
                address: ADDRESS,
                offset: CODE,
                size: 16,
                code: true
            })
        );
        let file = &bytes[..];
        let file = Bounded::new(&file).unwrap();
        let (_, mut data) = outline.section(&file, ".data").unwrap();
        assert_eq!(data.bytes(0, 9).unwrap(), [7; 9]);
        assert_eq!(data.bytes(1, 9), None);
        assert!(outline.section(&file, ".dat").is_none());
        let found = FunctionSymbol {
            name: 1,
            address: ADDRESS + 4,
            size: 2,
        };
        assert_eq!(all(&bytes), [found]);
        assert_eq!(outline.file_offset(ADDRESS + 4, true), Some(CODE + 4));
        assert_eq!(outline.file_offset(ADDRESS + 4, false), None);
        assert_eq!(outline.file_offset(ADDRESS + 16, true), None);
    }

    #[test]
    fn a_table_that_the_file_does_not_hold_or_packs_is_not_read() {
        let with = |field, value: &[u8]| {
            let mut b = small();
            let at = header(&b, 2, field);
            b[at..at + value.len()].copy_from_slice(value);
            all(&b).len()
        };
        assert_eq!(with(32, &48u64.to_le_bytes()), 1);
        for size in [u64::MAX, 1 << 40, 0x1000] {
            assert_eq!(with(32, &size.to_le_bytes()), 0, "{size:#x}");
        }
        assert_eq!(with(8, &SHF_COMPRESSED.to_le_bytes()), 0);
        // Names of symbols are in a table of names: not in the symbols themselves in a circle, and not nowhere.
        for link in [2u32, 0, 77, u32::MAX] {
            assert_eq!(with(40, &link.to_le_bytes()), 0, "{link}");
        }
    }

    #[test]
    fn damaged_headers_are_refused_or_harmless() {
        let good = small();
        for cut in 0..good.len() {
            let _ = outline(&good[..cut]);
        }
        for at in 0..good.len() {
            for value in [0xff, 0x7f, 0] {
                let mut b = good.clone();
                b[at] = value;
                if outline(&b).is_ok() {
                    all(&b);
                }
            }
        }
        let mut many = good.clone();
        many[60..62].copy_from_slice(&0xffffu16.to_le_bytes());
        assert!(outline(&many).unwrap_err().contains("sections"));
        let mut none = good;
        none[60..62].copy_from_slice(&0u16.to_le_bytes());
        assert!(outline(&none).unwrap_err().contains("missing"));
    }
}
