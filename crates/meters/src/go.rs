//! Go's function table (`runtime.pclntab`, versions 1.18 and later): ranges and names. The program needs it at run
//! time, so it survives `-ldflags "-s -w"` and `strip`.
//!
//! Layout as in Go's `internal/abi` and `debug/gosym`: a header of eight bytes and eight words, then tables at the
//! offsets in the header. It is read through windows ([`Region`]), and only the result is kept.

use crate::bounded::Region;
use crate::elf64::Outline;
use crate::ranges::Ranges;

/// Names of the section.
pub const SECTIONS: [&str; 2] = [".gopclntab", ".data.rel.ro.gopclntab"];
const FUNCTIONS_MAX: u64 = 1_000_000;
/// Most matches of a name among all names. It occurs once.
const PLACES_MAX: usize = 1024;
/// Prefix of the functions at which the kernel or the loader starts a Go program (`_rt0_amd64_linux`).
const ENTRY: &[u8] = b"_rt0_";
/// … and suffix of those that the loader calls in a library (`_rt0_amd64_linux_lib`), where no program starts.
const ENTRY_OF_LIBRARY: &[u8] = b"_lib";
/// Bytes of such a name that are read.
const ENTRY_MAX: usize = 64;

/// Start of a program, by its own headers.
#[derive(Clone, Copy, Debug)]
pub struct Beginning {
    /// Address of the section `.text`.
    pub text: u64,
    /// Entry address.
    pub entry: u64,
}

impl Beginning {
    /// From a file with such a section.
    pub fn of(outline: &Outline) -> Option<Self> {
        Some(Self {
            text: outline.range(".text")?.0,
            entry: outline.entry,
        })
    }
}

struct Table<'b> {
    count: u64,
    /// Base address of the functions.
    start: u64,
    names_at: u64,
    /// Start of the pairs of offsets: of the function from `start`, and of its description from here.
    functions_at: u64,
    pairs: Region<'b>,
    descriptions: Region<'b>,
    names: Region<'b>,
}

impl<'b> Table<'b> {
    fn new(mut data: Region<'b>, beginning: Option<Beginning>) -> Option<Self> {
        // 1.18 and 1.20; 8-byte pointers.
        if !matches!(data.u32(0)?, 0xffff_fff0 | 0xffff_fff1) || data.u8(7)? != 8 {
            return None;
        }
        let mut table = Self {
            count: data.u64(8)?.min(FUNCTIONS_MAX),
            start: data.u64(24)?,
            names_at: data.u64(32)?,
            functions_at: data.u64(64)?,
            descriptions: data.another(),
            names: data.another(),
            pairs: data,
        };
        if table.start != 0 {
            return Some(table);
        }
        // Since Go 1.26 the program fills in the start of the code, as position-independent programs always did. It is
        // the start of `.text`, unless C code comes first. Then the entry is not Go's, and no function is known.
        let Beginning { text, entry } = beginning?;
        let offset = u32::try_from(entry.checked_sub(text)?).ok()?;
        let at = (0..table.count).find_map(|i| {
            let (at, description) = table.pair(i)?;
            (at == offset).then_some(description)
        })?;
        let name = table.name(at)?;
        let name_at = table.names_at.checked_add(u64::from(name))?;
        is_entry(table.names.up_to(name_at, ENTRY_MAX)?).then_some(())?;
        table.start = text;
        Some(table)
    }

    /// A function: its offset from `start`, and the offset of its description.
    fn pair(&mut self, i: u64) -> Option<(u32, u32)> {
        let at = self.functions_at.checked_add(i.checked_mul(8)?)?;
        Some((self.pairs.u32(at)?, self.pairs.u32(at.checked_add(4)?)?))
    }

    /// Offset of a function's name among the names.
    fn name(&mut self, description: u32) -> Option<u32> {
        // The entry, followed by the offset of the name.
        let at = self.functions_at.checked_add(u64::from(description))?;
        self.descriptions.u32(at.checked_add(4)?)
    }

    fn address(&self, offset: u32) -> Option<u64> {
        self.start.checked_add(u64::from(offset))
    }
}

/// Whether a program starts in the function whose name begins here.
fn is_entry(name: &[u8]) -> bool {
    let name = name.split(|b| *b == 0).next().unwrap_or_default();
    name.starts_with(ENTRY) && !name.ends_with(ENTRY_OF_LIBRARY)
}

/// Adds function ranges, each up to the next start, as padding is never executed. None if the code's start is unknown.
pub fn functions(data: Region<'_>, beginning: Option<Beginning>, into: &mut Ranges) -> Option<()> {
    let mut table = Table::new(data, beginning)?;
    let (first, _) = table.pair(0)?;
    let mut start = table.address(first)?;
    for i in 1..=table.count {
        // The end of the code follows the last pair.
        let at = table.functions_at.checked_add(i.checked_mul(8)?)?;
        let next = table.pairs.u32(at)?;
        let next = table.address(next)?;
        into.note(start, next);
        start = next;
    }
    Some(())
}

/// Address of the function with this name (`net/http.serverHandler.ServeHTTP`).
pub fn function(data: Region<'_>, name: &str, beginning: Option<Beginning>) -> Option<u64> {
    let mut everything = data.another();
    let mut table = Table::new(data, beginning)?;
    let ended = [name.as_bytes(), b"\0"].concat();
    let places = everything.positions(&ended, PLACES_MAX)?;
    let names_at = table.names_at;
    let is_it = |table: &mut Table<'_>, description| {
        let at = names_at.checked_add(u64::from(table.name(description)?))?;
        places.binary_search(&at).is_ok().then_some(())
    };
    (0..table.count).find_map(|i| {
        let (at, description) = table.pair(i)?;
        is_it(&mut table, description)?;
        table.address(at)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bounded::Bounded;

    fn functions(data: &[u8], beginning: Option<Beginning>) -> Option<Vec<(u64, u64)>> {
        let file = Bounded::new(&data).unwrap();
        let mut found = Ranges::of_code(&[(0x40_0000, 0x50_0000)]).unwrap();
        super::functions(file.region(0, data.len() as u64)?, beginning, &mut found)?;
        Some(found.finish().iter().collect())
    }

    fn function(data: &[u8], name: &str, beginning: Option<Beginning>) -> Option<u64> {
        let file = Bounded::new(&data).unwrap();
        super::function(file.region(0, data.len() as u64)?, name, beginning)
    }

    /// Two functions, `main.a` of 0x20 bytes and `main.ab` of 0x60.
    fn table() -> Vec<u8> {
        let mut data = vec![0xf1, 0xff, 0xff, 0xff, 0, 0, 1, 8];
        for n in [2u64, 1, 0x40_1000, 72, 0, 0, 0, 72 + 16] {
            data.extend(n.to_le_bytes());
        }
        data.extend(b"main.ab\0main.a\0\0");
        // Offsets of the functions and of their descriptions, the end, then the descriptions: entry, place of the name.
        for n in [0u32, 24, 0x20, 32, 0x80, 0, 0, 8, 0x20, 0] {
            data.extend(n.to_le_bytes());
        }
        data
    }

    #[test]
    fn functions_are_found_by_place_and_by_name() {
        let data = table();
        assert_eq!(
            functions(&data, None),
            Some(vec![(0x40_1000, 0x40_1020), (0x40_1020, 0x40_1080)])
        );
        assert_eq!(function(&data, "main.a", None), Some(0x40_1000));
        assert_eq!(function(&data, "main.ab", None), Some(0x40_1020));
        assert_eq!(function(&data, "main", None), None);
        assert_eq!(function(&data, "", None), None);
        // Where the start of the code is left open, a function is nowhere, and not somewhere near it.
        let mut open = data.clone();
        open[24..32].fill(0);
        assert_eq!(function(&open, "main.ab", None), None);
        assert_eq!(functions(&open, None), None);
    }

    /// The program begins in the first function.
    const THERE: Option<Beginning> = Some(Beginning {
        text: 0x40_1000,
        entry: 0x40_1000,
    });

    #[test]
    fn the_start_of_the_code_is_found_where_the_program_begins() {
        let mut data = table();
        data[24..32].fill(0);
        // It begins in a function of another name: C code may come first.
        assert_eq!(functions(&data, THERE), None);
        // `main.a`, the first one by place, has the second name.
        data[80..87].copy_from_slice(b"_rt0_x\0");
        assert_eq!(
            functions(&data, THERE),
            Some(vec![(0x40_1000, 0x40_1020), (0x40_1020, 0x40_1080)])
        );
        assert_eq!(function(&data, "main.ab", THERE), Some(0x40_1020));
        assert!(is_entry(b"_rt0_amd64_linux\0_lib\0"));
        assert!(!is_entry(b"_rt0_amd64_linux_lib\0main.a\0"));
        for (text, entry) in [
            (0x40_1000, 0x40_1020),
            (0x40_0fe0, 0x40_1000),
            (0x40_1010, 0x40_1000),
            (0, u64::MAX),
        ] {
            assert_eq!(
                functions(&data, Some(Beginning { text, entry })),
                None,
                "{text:#x} {entry:#x}"
            );
        }
    }

    #[test]
    fn damaged_tables_give_less_and_nothing_else() {
        let data = table();
        for cut in 0..data.len() {
            let _ = (
                functions(&data[..cut], None),
                function(&data[..cut], "main.ab", None),
            );
        }
        for at in 0..data.len() {
            for value in [0xff, 0x7f] {
                let mut broken = data.clone();
                broken[at] = value;
                let _ = (functions(&broken, THERE), function(&broken, "main.ab", THERE));
            }
        }
    }
}
