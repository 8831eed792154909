//! Where functions begin and end, as their compiler wrote it down for those who unwind stacks: `.eh_frame_hdr` and
//! `.eh_frame` (Linux Standard Base, *Exception Frames*; DWARF 5, section 6.4). It survives `strip`.
//!
//! The table of the header leads to one description per function, which has the function's own range. Only what table and
//! description agree on is taken.

use super::super::elf64::{u16_at, u32_at, u64_at};
use std::collections::BTreeMap;

/// Most functions of a file.
pub(super) const FUNCTIONS_MAX: usize = 1_000_000;
/// Most kinds of descriptions (CIE): linkers merge them to a few per library that was linked in.
const KINDS_MAX: usize = 65_536;
/// Longest augmentation string that is looked at.
const AUGMENTATION_MAX: usize = 16;

/// A section: its address and its bytes.
#[derive(Clone, Copy)]
pub(in crate::meters) struct Section<'a> {
    pub(in crate::meters) address: u64,
    pub(in crate::meters) data: &'a [u8],
}

/// How the addresses of a description are written.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Encoding {
    /// Bytes of a number.
    size: usize,
    /// Counted from where it stands.
    relative: bool,
}

impl Encoding {
    /// Of a byte `DW_EH_PE_*`; `None` for what compilers do not write for functions.
    fn of(byte: u8) -> Option<Self> {
        Some(Self {
            size: size_of_number(byte)?,
            relative: match byte & 0xf0 {
                0x00 => false,
                0x10 => true,
                _ => return None,
            },
        })
    }
}

/// Bytes that a number of this encoding takes.
fn size_of_number(byte: u8) -> Option<usize> {
    match byte & 0x0f {
        0x02 | 0x0a => Some(2),
        0x03 | 0x0b => Some(4),
        0x00 | 0x04 | 0x0c => Some(8),
        _ => None,
    }
}

/// Ranges of functions, from and to, in no order.
pub(in crate::meters) fn functions(header: Section<'_>, frames: Section<'_>) -> Vec<(u64, u64)> {
    let mut kinds = BTreeMap::new();
    table(header)
        .unwrap_or_default()
        .into_iter()
        .filter_map(|(start, description)| {
            let end = end(frames, start, description, &mut kinds)?;
            Some((start, end))
        })
        .collect()
}

/// The search table: pairs of start and address of the description, as signed offsets from the section's own address, in
/// the one encoding that linkers write (`datarel | sdata4`).
fn table(header: Section<'_>) -> Option<Vec<(u64, u64)>> {
    let [1, pointer, 0x03, 0x3b, ..] = header.data else {
        return None;
    };
    let count_at = 4 + size_of_number(*pointer)?;
    let count = u32_at(header.data, count_at)? as usize;
    let table = header.data.get(count_at.checked_add(4)?..)?;
    let address = |bytes: [u8; 4]| {
        header
            .address
            .wrapping_add_signed(i64::from(i32::from_le_bytes(bytes)))
    };
    Some(
        table
            .as_chunks::<8>()
            .0
            .iter()
            .take(count.min(FUNCTIONS_MAX))
            .map(|[a, b, c, d, e, f, g, h]| (address([*a, *b, *c, *d]), address([*e, *f, *g, *h])))
            .collect(),
    )
}

/// Bounds of a record that begins at a place in the section: of its contents behind the length.
fn record(data: &[u8], at: usize) -> Option<(usize, usize)> {
    let length = u32_at(data, at)?;
    // 0 ends the section; the long form is for sections beyond 4 GiB.
    if length == 0 || length == u32::MAX {
        return None;
    }
    let begin = at.checked_add(4)?;
    let end = begin.checked_add(usize::try_from(length).ok()?)?;
    (end <= data.len()).then_some((begin, end))
}

/// End of the function that starts there, from its description (FDE).
fn end(
    frames: Section<'_>,
    start: u64,
    description: u64,
    kinds: &mut BTreeMap<usize, Option<Encoding>>,
) -> Option<u64> {
    let at = usize::try_from(description.checked_sub(frames.address)?).ok()?;
    let (begin, end) = record(frames.data, at)?;
    let data = frames.data.get(..end)?;
    // How far back its kind (CIE) is described, counted from this number itself.
    let back = usize::try_from(u32_at(data, begin)?).ok()?;
    let kind = begin.checked_sub(back).filter(|_| back != 0)?;
    if kinds.len() >= KINDS_MAX {
        return None;
    }
    let encoding = (*kinds.entry(kind).or_insert_with(|| encoding(frames.data, kind)))?;
    let first = begin.checked_add(4)?;
    let number = |at: usize| match encoding.size {
        2 => u16_at(data, at).map(u64::from),
        4 => u32_at(data, at).map(u64::from),
        _ => u64_at(data, at),
    };
    // As the table has it, or one of them is wrong.
    let written = number(first)?;
    let begins = if encoding.relative {
        let signed = match encoding.size {
            2 => i64::from(written as u16 as i16),
            4 => i64::from(written as u32 as i32),
            _ => written as i64,
        };
        frames
            .address
            .wrapping_add(first as u64)
            .wrapping_add_signed(signed)
    } else {
        written
    };
    let length = number(first.checked_add(encoding.size)?)?;
    (begins == start && length > 0)
        .then(|| start.checked_add(length))
        .flatten()
}

/// How the addresses of descriptions of a kind are written: from its augmentation. `None`: not understood, or of frames
/// that signals make, which nobody calls.
fn encoding(data: &[u8], at: usize) -> Option<Encoding> {
    let (begin, end) = record(data, at)?;
    let data = data.get(..end)?;
    // A kind has 0 where a description says which kind it is of.
    (u32_at(data, begin)? == 0).then_some(())?;
    let version = *data.get(begin.checked_add(4)?)?;
    let mut rest = data.get(begin.checked_add(5)?..)?;
    let length = rest.iter().take(AUGMENTATION_MAX).position(|c| *c == 0)?;
    let augmentation = rest.get(..length)?;
    rest = rest.get(length + 1..)?;
    // Code and data alignment, and the register of the return address.
    skip_number(&mut rest)?;
    skip_number(&mut rest)?;
    match version {
        1 => rest = rest.get(1..)?,
        3 => skip_number(&mut rest)?,
        _ => return None,
    }
    let Some((b'z', letters)) = augmentation.split_first() else {
        // Without letters all is absolute.
        return augmentation.is_empty().then_some(Encoding {
            size: 8,
            relative: false,
        });
    };
    skip_number(&mut rest)?;
    let mut found = Encoding {
        size: 8,
        relative: false,
    };
    for letter in letters {
        match letter {
            b'R' => {
                let (byte, after) = rest.split_first()?;
                found = Encoding::of(*byte)?;
                rest = after;
            }
            b'P' => {
                let (byte, after) = rest.split_first()?;
                rest = after.get(size_of_number(*byte)?..)?;
            }
            b'L' => rest = rest.get(1..)?,
            b'B' | b'G' => {}
            // Frames of signals, and what is not known.
            _ => return None,
        }
    }
    Some(found)
}

/// Passes over a LEB128 number of at most ten bytes.
fn skip_number(rest: &mut &[u8]) -> Option<()> {
    let length = rest.iter().take(10).position(|b| b & 0x80 == 0)?;
    *rest = rest.get(length + 1..)?;
    Some(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEADER: u64 = 0x1000;
    const FRAMES: u64 = 0x2000;

    /// A kind and two descriptions: of 0x8000 (0x30 bytes) and of 0x8100 (0x10 bytes).
    fn frames() -> Vec<u8> {
        let mut b: Vec<u8> = Vec::new();
        // Length, 0, version, "zR", alignments, register, length of the letters' data, pcrel | sdata4.
        b.extend(12u32.to_le_bytes());
        b.extend(0u32.to_le_bytes());
        b.extend([1, b'z', b'R', 0, 1, 0x78, 16, 1]);
        let last = b.len() - 4;
        b[0..4].copy_from_slice(&(last as u32 + 1).to_le_bytes());
        b.push(0x1b);
        for (start, length) in [(0x8000u64, 0x30u32), (0x8100, 0x10)] {
            let at = b.len();
            b.extend(12u32.to_le_bytes());
            b.extend((at as u32 + 4).to_le_bytes());
            let here = FRAMES + b.len() as u64;
            b.extend((start.wrapping_sub(here) as u32).to_le_bytes());
            b.extend(length.to_le_bytes());
        }
        b
    }

    fn header(starts: &[(u64, u64)]) -> Vec<u8> {
        let mut b = vec![1, 0x1b, 0x03, 0x3b, 0, 0, 0, 0];
        b.extend((starts.len() as u32).to_le_bytes());
        for (start, description) in starts {
            for n in [start, description] {
                b.extend((n.wrapping_sub(HEADER) as u32).to_le_bytes());
            }
        }
        b
    }

    fn found(header: &[u8], frames: &[u8]) -> Vec<(u64, u64)> {
        functions(
            Section {
                address: HEADER,
                data: header,
            },
            Section {
                address: FRAMES,
                data: frames,
            },
        )
    }

    #[test]
    fn functions_have_the_range_that_their_description_gives() {
        let frames = frames();
        let (first, second) = (FRAMES + 17, FRAMES + 33);
        let good = header(&[(0x8000, first), (0x8100, second)]);
        assert_eq!(found(&good, &frames), [(0x8000, 0x8030), (0x8100, 0x8110)]);
        // Where table and description do not agree, nothing is believed.
        let crossed = header(&[(0x8000, second), (0x8100, second)]);
        assert_eq!(found(&crossed, &frames), [(0x8100, 0x8110)]);
        assert!(found(&header(&[(0x8000, FRAMES - 1), (0x8000, FRAMES)]), &frames).is_empty());
        // Another encoding of the table is not guessed at.
        let mut other = good.clone();
        other[3] = 0x0b;
        assert!(found(&other, &frames).is_empty());
    }

    #[test]
    fn damaged_tables_give_less_and_nothing_else() {
        let frames = frames();
        let good = header(&[(0x8000, FRAMES + 17), (0x8100, FRAMES + 33)]);
        for cut in 0..frames.len() {
            assert!(found(&good, &frames[..cut]).len() <= 2);
        }
        for cut in 0..good.len() {
            assert!(found(&good[..cut], &frames).len() <= 2);
        }
        for at in 0..frames.len() {
            for value in [0, 0x7f, 0xff] {
                let mut broken = frames.clone();
                broken[at] = value;
                for (start, end) in found(&good, &broken) {
                    assert!(start < end && [0x8000, 0x8100].contains(&start));
                }
            }
        }
        let mut endless = good;
        endless[8..12].copy_from_slice(&u32::MAX.to_le_bytes());
        assert_eq!(found(&endless, &frames).len(), 2);
    }
}
