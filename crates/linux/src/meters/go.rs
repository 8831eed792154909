//! Go's own table of functions (`runtime.pclntab`, versions 1.18 and later): where they begin and what they are called. The
//! program needs it itself, so it survives `-ldflags "-s -w"` and `strip`.
//!
//! Layout as in Go's `internal/abi` and `debug/gosym`: a header of eight bytes and eight words, then tables at the offsets that
//! the header gives.

use super::elf64::{u32_at, u64_at};

/// Names of the section.
pub(super) const SECTIONS: [&str; 2] = [".gopclntab", ".data.rel.ro.gopclntab"];
/// Most functions of a program.
const FUNCTIONS_MAX: usize = 1_000_000;

/// What the header says.
struct Header<'a> {
    count: usize,
    /// Address that functions are counted from.
    start: u64,
    names: &'a [u8],
    /// Pairs of offsets: of the function from `start`, and of its description from the beginning of this.
    functions: &'a [u8],
}

fn header(data: &[u8]) -> Option<Header<'_>> {
    // 1.18 and 1.20; 8-byte pointers.
    if !matches!(u32_at(data, 0)?, 0xffff_fff0 | 0xffff_fff1) || *data.get(7)? != 8 {
        return None;
    }
    let part = |at| data.get(usize::try_from(u64_at(data, at)?).ok()?..);
    Some(Header {
        count: usize::try_from(u64_at(data, 8)?).ok()?.min(FUNCTIONS_MAX),
        // Since 1.26 the start of the text is left for the program to fill in, and in programs that may lie anywhere it always
        // was. It is not the start of `.text` where C code comes first: no function is known then, rather than a wrong one.
        start: Some(u64_at(data, 24)?).filter(|start| *start != 0)?,
        names: part(32)?,
        functions: part(64)?,
    })
}

/// Ranges of functions, from and to, ascending. A function ends where the next begins; what fills the gap is no way that
/// its code goes. `None` where the table does not say where the code begins.
pub(in crate::meters) fn functions(data: &[u8]) -> Option<Vec<(u64, u64)>> {
    let header = header(data)?;
    // The last pair is the end of the code.
    let starts: Vec<u64> = header
        .functions
        .as_chunks::<8>()
        .0
        .iter()
        .take(header.count.saturating_add(1))
        .filter_map(|[a, b, c, d, ..]| {
            let offset = u64::from(u32::from_le_bytes([*a, *b, *c, *d]));
            header.start.checked_add(offset)
        })
        .collect();
    Some(
        starts
            .iter()
            .copied()
            .zip(starts.iter().copied().skip(1))
            .collect(),
    )
}

/// Address of the function with this name (`net/http.serverHandler.ServeHTTP`).
pub(in crate::meters) fn function(data: &[u8], name: &str) -> Option<u64> {
    let header = header(data)?;
    let is_it = |description: u32| {
        // The entry, then where the name stands.
        let at = usize::try_from(description).ok()?.checked_add(4)?;
        let at = usize::try_from(u32_at(header.functions, at)?).ok()?;
        let found = header.names.get(at..)?;
        let end = found.get(name.len())?;
        (*end == 0 && found.starts_with(name.as_bytes())).then_some(())
    };
    header
        .functions
        .as_chunks::<8>()
        .0
        .iter()
        .take(header.count)
        .find_map(|[a, b, c, d, e, f, g, h]| {
            is_it(u32::from_le_bytes([*e, *f, *g, *h]))?;
            let offset = u64::from(u32::from_le_bytes([*a, *b, *c, *d]));
            header.start.checked_add(offset)
        })
}

#[cfg(test)]
mod tests {
    use super::*;

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
            functions(&data),
            Some(vec![(0x40_1000, 0x40_1020), (0x40_1020, 0x40_1080)])
        );
        assert_eq!(function(&data, "main.a"), Some(0x40_1000));
        assert_eq!(function(&data, "main.ab"), Some(0x40_1020));
        assert_eq!(function(&data, "main"), None);
        assert_eq!(function(&data, ""), None);
        // Where the start of the code is left open, a function is nowhere, and not somewhere near it.
        let mut open = data.clone();
        open[24..32].fill(0);
        assert_eq!(function(&open, "main.ab"), None);
        assert_eq!(functions(&open), None);
    }

    #[test]
    fn damaged_tables_give_less_and_nothing_else() {
        let data = table();
        for cut in 0..data.len() {
            let _ = (functions(&data[..cut]), function(&data[..cut], "main.ab"));
        }
        for at in 0..data.len() {
            for value in [0xff, 0x7f] {
                let mut broken = data.clone();
                broken[at] = value;
                let _ = (functions(&broken), function(&broken, "main.ab"));
            }
        }
    }
}
