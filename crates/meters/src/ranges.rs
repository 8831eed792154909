//! Function ranges of a file, in eight bytes each. A hostile file can describe as many functions as fit its tables. So
//! ranges are relative to the start of the file's code, in 32 bits, and their number is limited.

/// Most functions of a file. Measured: Node 18 has 76,000, the compiler library of Rust 1.95 has 107,000.
pub const FUNCTIONS_MAX: usize = 512 * 1024;

/// Function ranges, sorted and free of overlap once finished.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ranges {
    base: u64,
    /// Code ranges, from and to.
    code: Vec<(u64, u64)>,
    /// Start relative to the base, and length.
    functions: Vec<(u32, u32)>,
}

impl Ranges {
    /// For a file with these code ranges, from and to. `None`: no code, or a span of more than 4 GiB.
    pub fn of_code(code: &[(u64, u64)]) -> Option<Self> {
        let base = code.iter().map(|c| c.0).min()?;
        let end = code.iter().map(|c| c.1).max()?;
        u32::try_from(end.checked_sub(base)?).ok()?;
        Some(Self {
            base,
            code: code.to_vec(),
            functions: Vec::new(),
        })
    }

    /// Adds a function if it is entirely within the code and there is room.
    pub fn note(&mut self, start: u64, end: u64) {
        let in_code = |c: &(u64, u64)| c.0 <= start && end <= c.1;
        if start >= end || self.functions.len() >= FUNCTIONS_MAX || !self.code.iter().any(in_code) {
            return;
        }
        // Both fit, because they are within the code.
        if let (Ok(start), Ok(length)) = (u32::try_from(start - self.base), u32::try_from(end - start)) {
            self.functions.push((start, length));
        }
    }

    /// Whether there is no function.
    pub fn is_empty(&self) -> bool {
        self.functions.is_empty()
    }

    /// Number of functions.
    pub fn len(&self) -> usize {
        self.functions.len()
    }

    /// Sorts the functions and cuts each at the next start. Of several with one start, the shortest stays.
    pub fn finish(mut self) -> Self {
        self.functions.sort_unstable();
        self.functions.dedup_by_key(|f| f.0);
        let mut next = u32::MAX;
        for (start, length) in self.functions.iter_mut().rev() {
            *length = (*length).min(next - *start);
            next = *start;
        }
        self.functions.shrink_to_fit();
        self
    }

    /// The ranges, from and to.
    pub fn iter(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        let range = |(start, length): &(u32, u32)| {
            let start = self.base.saturating_add(u64::from(*start));
            (start, start.saturating_add(u64::from(*length)))
        };
        self.functions.iter().map(range)
    }

    /// The function around an address, from and to.
    pub fn around(&self, address: u64) -> Option<(u64, u64)> {
        let within = u32::try_from(address.checked_sub(self.base)?).ok()?;
        let i = self
            .functions
            .partition_point(|(start, _)| *start <= within)
            .checked_sub(1)?;
        let (start, length) = *self.functions.get(i)?;
        (within - start < length).then(|| {
            let start = self.base.saturating_add(u64::from(start));
            (start, start.saturating_add(u64::from(length)))
        })
    }

    /// The functions as small numbers, for another process: for each, the gap before it and its length.
    pub fn gaps(&self) -> Vec<u32> {
        let mut last = 0;
        let mut gaps = Vec::with_capacity(self.functions.len() * 2);
        for (start, length) in &self.functions {
            gaps.extend([start.saturating_sub(last), *length]);
            last = start.saturating_add(*length);
        }
        gaps
    }

    /// Takes functions from another process. `None`: too many, or not in the code.
    pub fn with_gaps(mut self, gaps: &[u32]) -> Option<Self> {
        let pairs = gaps.chunks_exact(2);
        if !pairs.remainder().is_empty() {
            return None;
        }
        self.functions.reserve_exact(pairs.len().min(FUNCTIONS_MAX));
        let mut last = self.base;
        for pair in pairs {
            let [gap, length] = pair else {
                return None;
            };
            let start = last.checked_add(u64::from(*gap))?;
            last = start.checked_add(u64::from(*length))?;
            let before = self.functions.len();
            self.note(start, last);
            (self.functions.len() > before).then_some(())?;
        }
        Some(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CODE: [(u64, u64); 2] = [(0x100, 0x200), (0x300, 0x400)];

    fn noted(given: &[(u64, u64)]) -> Ranges {
        let mut ranges = Ranges::of_code(&CODE).unwrap();
        for (start, end) in given {
            ranges.note(*start, *end);
        }
        ranges.finish()
    }

    #[test]
    fn ranges_are_put_in_order_and_do_not_overlap() {
        let found = noted(&[
            (0x180, 0x190),
            (0x100, 0x150),
            (0x140, 0x160),
            (0x140, 0x170),
            (0x1f0, 0x210),
            (0x1f0, 0x310),
            (0x90, 0x110),
            (0x170, 0x170),
            (0x300, 0x400),
        ]);
        let all: Vec<(u64, u64)> = found.iter().collect();
        assert_eq!(
            all,
            [(0x100, 0x140), (0x140, 0x160), (0x180, 0x190), (0x300, 0x400)]
        );
        assert_eq!(found.around(0x13f), Some((0x100, 0x140)));
        assert_eq!(found.around(0x140), Some((0x140, 0x160)));
        for nowhere in [0, 0xff, 0x160, 0x190, 0x400, u64::MAX] {
            assert_eq!(found.around(nowhere), None, "{nowhere:#x}");
        }
    }

    #[test]
    fn ranges_pass_to_another_process_and_wrong_ones_are_refused() {
        let found = noted(&[(0x100, 0x140), (0x140, 0x160), (0x300, 0x400)]);
        let gaps = found.gaps();
        assert_eq!(gaps, [0, 0x40, 0, 0x20, 0x1a0, 0x100]);
        let empty = || Ranges::of_code(&CODE).unwrap();
        assert_eq!(empty().with_gaps(&gaps), Some(found));
        assert_eq!(empty().with_gaps(&[]), Some(empty()));
        // Half a function, an empty one, and some outside of the code.
        for wrong in [
            &[0][..],
            &[0, 0],
            &[0xf0, 0x20],
            &[0, 0x100, 0, 1],
            &[u32::MAX, 1],
        ] {
            assert_eq!(empty().with_gaps(wrong), None, "{wrong:?}");
        }
    }

    #[test]
    fn there_is_a_limit_to_their_number_and_to_their_spread() {
        let mut ranges = Ranges::of_code(&[(0, 1 << 32)]).unwrap_or_default();
        assert_eq!(ranges.len(), 0);
        ranges = Ranges::of_code(&[(0, u64::from(u32::MAX))]).unwrap();
        for i in 0..FUNCTIONS_MAX as u64 + 10 {
            ranges.note(i * 2, i * 2 + 1);
        }
        assert_eq!(ranges.len(), FUNCTIONS_MAX);
        assert_eq!(Ranges::of_code(&[(0, 1), (1 << 32, (1 << 32) + 1)]), None);
        assert_eq!(Ranges::of_code(&[]), None);
    }
}
