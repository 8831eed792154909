//! Compact sets of pages, for the undo record of a move.
//!
//! A **block** is 2 MiB of address space, with one bit a page. As text, blocks stand in ascending order, separated by
//! spaces. Each begins with the distance from the block before in hexadecimal. Then follows
//! * `*N`: this block and the next N − 1, all their pages.
//! * `:0-7,9`: these pages of the block, if that is short.
//! * `=` and 128 hexadecimal digits: one bit a page.
//!
//! So a contiguous gigabyte takes 5 bytes, and a gigabyte with every other page 66 KiB.

use homeostat_kernel::memory::{BASE_PAGE, PAGES_PER_PIECE, PIECE};

/// Words of 64 pages in a block.
const WORDS: usize = PAGES_PER_PIECE as usize / 64;
/// Most ranges of pages written as ranges. Longer lists are written as bits.
const RANGES_MAX: usize = 12;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Block {
    /// Number of the block: its first address divided by 2 MiB.
    pub(super) number: u64,
    bits: [u64; WORDS],
}

impl Block {
    pub(super) fn empty(number: u64) -> Self {
        Self {
            number,
            bits: [0; WORDS],
        }
    }

    pub(super) fn full(number: u64) -> Self {
        Self {
            number,
            bits: [u64::MAX; WORDS],
        }
    }

    pub(super) fn number_of(address: u64) -> u64 {
        address / PIECE
    }

    pub(super) fn start(&self) -> u64 {
        self.number * PIECE
    }

    pub(super) fn insert(&mut self, address: u64) {
        let page = (address % PIECE / BASE_PAGE) as usize;
        if let Some(word) = self.bits.get_mut(page / 64) {
            *word |= 1 << (page % 64);
        }
    }

    pub(super) fn count(&self) -> u64 {
        self.bits.iter().map(|w| u64::from(w.count_ones())).sum()
    }

    pub(super) fn addresses(&self) -> impl Iterator<Item = u64> + '_ {
        self.pages().map(|page| self.start() + page * BASE_PAGE)
    }

    fn pages(&self) -> impl Iterator<Item = u64> + '_ {
        self.bits.iter().zip(0u64..).flat_map(|(word, at)| {
            (0..64)
                .filter(move |bit| word >> bit & 1 == 1)
                .map(move |bit| at * 64 + bit)
        })
    }

    fn is_full(&self) -> bool {
        self.bits.iter().all(|w| *w == u64::MAX)
    }

    /// The pages as ranges, or as bits where that is shorter.
    fn text(&self) -> String {
        let pages: Vec<u64> = self.pages().collect();
        let ranges: Vec<String> = pages
            .chunk_by(|a, b| a + 1 == *b)
            .take(RANGES_MAX + 1)
            .filter_map(|run| match (run.first()?, run.last()?) {
                (first, last) if first == last => Some(first.to_string()),
                (first, last) => Some(format!("{first}-{last}")),
            })
            .collect();
        if ranges.len() <= RANGES_MAX {
            return format!(":{}", ranges.join(","));
        }
        self.bits
            .iter()
            .fold("=".to_owned(), |text, word| text + &format!("{word:016x}"))
    }

    /// The reverse of [`Block::text`], for the part after the distance.
    fn read(number: u64, text: &str) -> Option<Self> {
        let mut block = Self::empty(number);
        if let Some(ranges) = text.strip_prefix(':') {
            for range in ranges.split(',') {
                let (first, last) = range.split_once('-').unwrap_or((range, range));
                let (first, last): (u64, u64) = (first.parse().ok()?, last.parse().ok()?);
                if first > last || last >= u64::from(PAGES_PER_PIECE) {
                    return None;
                }
                for page in first..=last {
                    block.insert(page * BASE_PAGE);
                }
            }
            return Some(block);
        }
        let digits = text.strip_prefix('=')?;
        if digits.len() != WORDS * 16 || !digits.is_ascii() {
            return None;
        }
        for (index, word) in block.bits.iter_mut().enumerate() {
            *word = u64::from_str_radix(digits.get(index * 16..index * 16 + 16)?, 16).ok()?;
        }
        Some(block)
    }
}

pub(super) fn to_text(blocks: &[Block]) -> String {
    let mut parts = Vec::new();
    let mut before = 0;
    for run in blocks.chunk_by(|a, b| a.is_full() && b.is_full() && a.number + 1 == b.number) {
        let (Some(first), Some(last)) = (run.first(), run.last()) else {
            continue;
        };
        let distance = first.number - before;
        parts.push(if first.is_full() {
            format!("{distance:x}*{}", run.len())
        } else {
            format!("{distance:x}{}", first.text())
        });
        before = last.number;
    }
    parts.join(" ")
}

/// The reverse of [`to_text`]. `None` unless ascending and at most `limit` blocks.
pub(super) fn from_text(text: &str, limit: usize) -> Option<Vec<Block>> {
    /// More address space than a process can have.
    const NUMBER_MAX: u64 = u64::MAX / PIECE;
    let mut blocks: Vec<Block> = Vec::new();
    for part in text.split(' ').filter(|part| !part.is_empty()) {
        let at = part.find(['*', ':', '='])?;
        let (distance, rest) = part.split_at(at);
        let distance = u64::from_str_radix(distance, 16).ok()?;
        let before = blocks.last().map(|b| b.number);
        // The first may be block 0, any other comes after the one before it.
        if before.is_some() && distance == 0 {
            return None;
        }
        let number = before.unwrap_or(0).checked_add(distance)?;
        if let Some(count) = rest.strip_prefix('*') {
            let count: u64 = count.parse().ok().filter(|n| (1..=limit as u64).contains(n))?;
            let end = number.checked_add(count).filter(|end| *end <= NUMBER_MAX)?;
            blocks.extend((number..end).map(Block::full));
        } else {
            if number >= NUMBER_MAX {
                return None;
            }
            blocks.push(Block::read(number, rest)?);
        }
        if blocks.len() > limit {
            return None;
        }
    }
    Some(blocks)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    fn blocks_of(pages: &BTreeSet<u64>) -> Vec<Block> {
        let mut blocks: Vec<Block> = Vec::new();
        for page in pages {
            let address = page * BASE_PAGE;
            let number = Block::number_of(address);
            if blocks.last().is_none_or(|b| b.number != number) {
                blocks.push(Block::empty(number));
            }
            blocks.last_mut().unwrap().insert(address);
        }
        blocks
    }

    #[test]
    fn whole_gigabytes_are_short_and_scattered_pages_are_bounded() {
        let gigabyte: BTreeSet<u64> = (0x10_0000..0x10_0000 + 262_144).collect();
        let text = to_text(&blocks_of(&gigabyte));
        assert_eq!(text, "800*512");
        let every_other: BTreeSet<u64> = gigabyte.into_iter().filter(|p| p % 2 == 0).collect();
        let blocks = blocks_of(&every_other);
        let text = to_text(&blocks);
        assert!(text.len() < 512 * 140, "{}", text.len());
        assert_eq!(from_text(&text, 512), Some(blocks));
        assert_eq!(from_text(&text, 511), None, "more than the limit");
        assert_eq!(to_text(&[]), "");
        assert_eq!(from_text("", 1), Some(Vec::new()));
    }

    #[test]
    fn damaged_texts_are_refused() {
        for text in [
            "x*1",
            "1",
            "1*0",
            "1*9",
            "1:512",
            "1:3-1",
            "1:",
            "1:1,",
            "1=00",
            "1*1 0*1",
            "1:1 0:2",
            "ffffffffffffffff*1",
            "ffffffffffffffff:1",
            "1*1 ffffffffffffffff*1",
            "1==",
        ] {
            assert_eq!(from_text(text, 8), None, "{text}");
        }
        let not_hexadecimal = format!("1={}", "g".repeat(128));
        assert_eq!(from_text(&not_hexadecimal, 8), None);
    }

    proptest! {
        #[test]
        fn any_set_of_pages_reads_back(pages in proptest::collection::btree_set(0u64..4096, 0..600),
                                       run in 0u64..4000, length in 0u64..1500) {
            let mut pages = pages;
            pages.extend(run..run + length);
            let blocks = blocks_of(&pages);
            let text = to_text(&blocks);
            let back = from_text(&text, 16).unwrap();
            prop_assert_eq!(&back, &blocks);
            let addresses: Vec<u64> = back.iter().flat_map(Block::addresses).collect();
            prop_assert_eq!(addresses, pages.iter().map(|p| p * BASE_PAGE).collect::<Vec<_>>());
            prop_assert_eq!(back.iter().map(Block::count).sum::<u64>(), pages.len() as u64);
        }

        #[test]
        fn no_text_makes_it_panic(text in "[0-9a-f*:=, -]{0,80}") {
            let _ = from_text(&text, 64);
        }
    }
}
