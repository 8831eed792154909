//! Function ranges from the compiler's unwind tables: `.eh_frame_hdr` and `.eh_frame` (Linux Standard Base, *Exception
//! Frames*; DWARF 5, section 6.4). They survive `strip`.
//!
//! The table of the header points to one description (FDE) per function, which has the function's range. Only ranges on
//! which table and description agree are used.

use crate::bounded::Region;
use crate::ranges::{FUNCTIONS_MAX, Ranges};
use std::collections::BTreeMap;

/// Most kinds of descriptions (CIE): linkers merge them to a few per linked library.
const KINDS_MAX: usize = 16_384;
/// Most bytes read of a CIE: the numbers and the augmentation come first.
const KIND_MAX: usize = 64;
/// Longest augmentation string.
const AUGMENTATION_MAX: usize = 16;

pub(crate) struct Section<'b> {
    pub(crate) address: u64,
    pub(crate) data: Region<'b>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
struct Encoding {
    size: usize,
    /// Relative to the address of the number itself.
    relative: bool,
}

impl Encoding {
    /// From a byte `DW_EH_PE_*`. `None`: not used by compilers for functions.
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

/// Size of a number in bytes.
fn size_of_number(byte: u8) -> Option<usize> {
    match byte & 0x0f {
        0x02 | 0x0a => Some(2),
        0x03 | 0x0b => Some(4),
        0x00 | 0x04 | 0x0c => Some(8),
        _ => None,
    }
}

/// Adds function ranges, unsorted.
pub(crate) fn functions(mut header: Section<'_>, frames: Section<'_>, into: &mut Ranges) -> Option<()> {
    // The search table: pairs of start and address of the description, as signed offsets from the section's own
    // address, in the one encoding that linkers write (`datarel | sdata4`).
    let [1, pointer, 0x03, 0x3b] = *header.data.bytes(0, 4)? else {
        return None;
    };
    let count_at = 4 + size_of_number(pointer)? as u64;
    let count = u64::from(header.data.u32(count_at)?).min(FUNCTIONS_MAX as u64);
    let mut descriptions = Descriptions {
        kinds: BTreeMap::new(),
        of_kinds: frames.data.another(),
        frames,
    };
    for i in 0..count {
        let at = count_at + 4 + 8 * i;
        let (start, description) = (header.data.u32(at)?, header.data.u32(at + 4)?);
        let address = |offset: u32| header.address.wrapping_add_signed(i64::from(offset as i32));
        let (start, description) = (address(start), address(description));
        if let Some(end) = descriptions.end(start, description) {
            into.note(start, end);
        }
    }
    Some(())
}

/// Bounds of a record's contents after its length field.
fn record(data: &mut Region<'_>, at: u64) -> Option<(u64, u64)> {
    let length = data.u32(at)?;
    // 0 ends the section; the long form is for sections beyond 4 GiB.
    if length == 0 || length == u32::MAX {
        return None;
    }
    let begin = at.checked_add(4)?;
    let end = begin.checked_add(u64::from(length))?;
    (end <= data.size()).then_some((begin, end))
}

/// The descriptions of functions (FDE), with a cache of their kinds (CIE).
struct Descriptions<'b> {
    frames: Section<'b>,
    /// A second reader of the section, because kinds are far from the descriptions.
    of_kinds: Region<'b>,
    kinds: BTreeMap<u64, Option<Encoding>>,
}

impl Descriptions<'_> {
    /// End of the function with this start, from its description.
    fn end(&mut self, start: u64, description: u64) -> Option<u64> {
        let at = description.checked_sub(self.frames.address)?;
        let (begin, end) = record(&mut self.frames.data, at)?;
        // Distance back to its CIE, from this number itself.
        let back = u64::from(self.frames.data.u32(begin)?);
        let kind = begin.checked_sub(back).filter(|_| back != 0)?;
        let encoding = self.encoding(kind)?;
        let first = begin.checked_add(4)?;
        let second = first.checked_add(encoding.size as u64)?;
        // It must match the table.
        let written = self.number(first, end, encoding.size)?;
        let begins = if encoding.relative {
            let signed = match encoding.size {
                2 => i64::from(written as u16 as i16),
                4 => i64::from(written as u32 as i32),
                _ => written as i64,
            };
            self.frames
                .address
                .wrapping_add(first)
                .wrapping_add_signed(signed)
        } else {
            written
        };
        let length = self.number(second, end, encoding.size)?;
        (begins == start && length > 0)
            .then(|| start.checked_add(length))
            .flatten()
    }

    /// A number within the bounds of a record.
    fn number(&mut self, at: u64, end: u64, size: usize) -> Option<u64> {
        (at.checked_add(size as u64)? <= end).then_some(())?;
        match size {
            2 => self.frames.data.u16(at).map(u64::from),
            4 => self.frames.data.u32(at).map(u64::from),
            _ => self.frames.data.u64(at),
        }
    }

    fn encoding(&mut self, kind: u64) -> Option<Encoding> {
        if let Some(known) = self.kinds.get(&kind) {
            return *known;
        }
        if self.kinds.len() >= KINDS_MAX {
            return None;
        }
        let found = record(&mut self.of_kinds, kind).and_then(|(begin, end)| {
            let most = usize::try_from(end - begin).ok()?.min(KIND_MAX);
            encoding(self.of_kinds.bytes(begin, most)?)
        });
        self.kinds.insert(kind, found);
        found
    }
}

/// Address encoding of a CIE, from its augmentation. `None`: unknown, or a signal frame, which nobody calls.
fn encoding(data: &[u8]) -> Option<Encoding> {
    // A CIE has 0 where an FDE has its distance to the CIE.
    let (0, rest) = data
        .split_first_chunk()
        .map(|(id, rest)| (u32::from_le_bytes(*id), rest))?
    else {
        return None;
    };
    let (version, mut rest) = rest.split_first()?;
    let length = rest.iter().take(AUGMENTATION_MAX).position(|c| *c == 0)?;
    let augmentation = rest.get(..length)?;
    rest = rest.get(length + 1..)?;
    // Code and data alignment, and the register of the return address.
    skip_number(&mut rest)?;
    skip_number(&mut rest)?;
    match *version {
        1 => rest = rest.get(1..)?,
        3 => skip_number(&mut rest)?,
        _ => return None,
    }
    let Some((b'z', letters)) = augmentation.split_first() else {
        // Without augmentation, all addresses are absolute.
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
            // Signal frames and unknown augmentations.
            _ => return None,
        }
    }
    Some(found)
}

/// Skips a LEB128 number of at most ten bytes.
fn skip_number(rest: &mut &[u8]) -> Option<()> {
    let length = rest.iter().take(10).position(|b| b & 0x80 == 0)?;
    *rest = rest.get(length + 1..)?;
    Some(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bounded::Bounded;

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
        let (of_header, of_frames) = (Bounded::new(&header).unwrap(), Bounded::new(&frames).unwrap());
        let mut into = Ranges::of_code(&[(0, 1 << 20)]).unwrap();
        functions(
            Section {
                address: HEADER,
                data: of_header.region(0, header.len() as u64).unwrap(),
            },
            Section {
                address: FRAMES,
                data: of_frames.region(0, frames.len() as u64).unwrap(),
            },
            &mut into,
        );
        into.finish().iter().collect()
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
