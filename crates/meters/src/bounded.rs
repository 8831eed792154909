//! Reads a file of the workload's choice within limits.
//!
//! A hostile file claims any size and points anywhere. So a [`Region`] holds only one window of it, and all regions of
//! a file share one allowance of bytes. Each refill is charged for its bytes and for the call, so scattered reads end
//! as early as large ones. The result does not depend on a clock.

use std::cell::Cell;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// Bytes that one query of a file may read.
///
/// Measured: all names and symbols of Node 18 take 16 MiB, those of the compiler library of Rust 1.95 (155 MB) 27 MiB.
/// Builds of larger programs with full symbols take a multiple.
const ALLOWANCE: u64 = 256 * 1024 * 1024;
/// Bytes of a refill for sequential reads, and for jumps.
const LONG: u64 = 64 * 1024;
const SHORT: u64 = 4096;

/// A file, or bytes in memory.
pub trait ReadAt {
    /// Its size.
    fn length(&self) -> io::Result<u64>;
    /// Reads at an offset, possibly less than asked for.
    fn read_at(&self, buffer: &mut [u8], at: u64) -> io::Result<usize>;
}

impl ReadAt for File {
    fn length(&self) -> io::Result<u64> {
        // A system call that the helper process may make.
        let size = rustix::fs::fstat(self)?.st_size;
        Ok(u64::try_from(size).unwrap_or(0))
    }
    fn read_at(&self, buffer: &mut [u8], at: u64) -> io::Result<usize> {
        FileExt::read_at(self, buffer, at)
    }
}

impl ReadAt for &[u8] {
    fn length(&self) -> io::Result<u64> {
        Ok(self.len() as u64)
    }
    fn read_at(&self, buffer: &mut [u8], at: u64) -> io::Result<usize> {
        let rest = usize::try_from(at).ok().and_then(|at| self.get(at..));
        let rest = rest.unwrap_or_default();
        let n = rest.len().min(buffer.len());
        if let (Some(to), Some(from)) = (buffer.get_mut(..n), rest.get(..n)) {
            to.copy_from_slice(from);
        }
        Ok(n)
    }
}

/// A file with an allowance.
pub struct Bounded<'f> {
    file: &'f dyn ReadAt,
    length: u64,
    left: Cell<u64>,
}

impl<'f> Bounded<'f> {
    /// Begins with the full allowance.
    pub fn new(file: &'f dyn ReadAt) -> io::Result<Self> {
        Ok(Self {
            length: file.length()?,
            file,
            left: Cell::new(ALLOWANCE),
        })
    }

    /// Size in bytes.
    pub fn length(&self) -> u64 {
        self.length
    }

    /// Whether the allowance is used up. A missing result may then be in the unread rest.
    pub fn is_used_up(&self) -> bool {
        self.left.get() == 0
    }

    /// The bytes at an offset. `None`: beyond the end, or the allowance is used up.
    pub fn read(&self, at: u64, size: usize) -> Option<Vec<u8>> {
        let mut bytes = Vec::new();
        self.fill(&mut bytes, at, size)?;
        Some(bytes)
    }

    fn fill(&self, bytes: &mut Vec<u8>, at: u64, size: usize) -> Option<()> {
        bytes.clear();
        (at.checked_add(size as u64)? <= self.length).then_some(())?;
        let charge = (size as u64).saturating_add(SHORT);
        let Some(left) = self.left.get().checked_sub(charge) else {
            self.left.set(0);
            return None;
        };
        self.left.set(left);
        bytes.resize(size, 0);
        let mut used = 0;
        while let Some(rest) = bytes.get_mut(used..).filter(|rest| !rest.is_empty()) {
            match self.file.read_at(rest, at.checked_add(used as u64)?) {
                Ok(n) if n > 0 => used += n,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Ok(_) | Err(_) => {
                    bytes.clear();
                    return None;
                }
            }
        }
        Some(())
    }

    /// A reader of a part of the file. `None`: beyond the end.
    pub fn region(&self, start: u64, size: u64) -> Option<Region<'_>> {
        (start.checked_add(size)? <= self.length).then(|| Region {
            bounded: self,
            start,
            size,
            at: 0,
            window: Vec::new(),
        })
    }
}

/// A part of a file, with one window in memory.
pub struct Region<'b> {
    bounded: &'b Bounded<'b>,
    start: u64,
    size: u64,
    /// Start of the window, relative to the part.
    at: u64,
    window: Vec<u8>,
}

impl<'b> Region<'b> {
    /// Size in bytes.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Another reader of the same part, with its own window.
    pub fn another(&self) -> Region<'b> {
        Region {
            bounded: self.bounded,
            start: self.start,
            size: self.size,
            at: 0,
            window: Vec::new(),
        }
    }

    /// The bytes at an offset in the part.
    pub fn bytes(&mut self, at: u64, count: usize) -> Option<&[u8]> {
        let end = at.checked_add(count as u64)?;
        (end <= self.size).then_some(())?;
        let held = self.at.saturating_add(self.window.len() as u64);
        if at < self.at || end > held {
            let follows = !self.window.is_empty() && at >= self.at && at <= held.saturating_add(SHORT);
            let refill = if follows { LONG } else { SHORT };
            let refill = refill.min(self.size - at).max(count as u64);
            self.at = at;
            let place = self.start.checked_add(at)?;
            self.bounded
                .fill(&mut self.window, place, usize::try_from(refill).ok()?)?;
        }
        let from = usize::try_from(at - self.at).ok()?;
        self.window.get(from..from.checked_add(count)?)
    }

    /// The bytes at an offset, at most `most`.
    pub fn up_to(&mut self, at: u64, most: usize) -> Option<&[u8]> {
        let left = self.size.checked_sub(at)?;
        self.bytes(at, usize::try_from(left.min(most as u64)).ok()?)
    }

    /// The byte at an offset.
    pub fn u8(&mut self, at: u64) -> Option<u8> {
        self.bytes(at, 1)?.first().copied()
    }

    /// The little-endian number of two bytes at an offset.
    pub fn u16(&mut self, at: u64) -> Option<u16> {
        Some(u16::from_le_bytes(self.bytes(at, 2)?.try_into().ok()?))
    }

    /// The little-endian number of four bytes at an offset.
    pub fn u32(&mut self, at: u64) -> Option<u32> {
        Some(u32::from_le_bytes(self.bytes(at, 4)?.try_into().ok()?))
    }

    /// The little-endian number of eight bytes at an offset.
    pub fn u64(&mut self, at: u64) -> Option<u64> {
        Some(u64::from_le_bytes(self.bytes(at, 8)?.try_into().ok()?))
    }

    /// Visits each record of a table until `each` returns false. `None`: the table cannot be read to its end.
    pub fn records<const SIZE: usize>(&mut self, mut each: impl FnMut(&[u8; SIZE]) -> bool) -> Option<()> {
        let (size, mut at) = (SIZE as u64, 0);
        let step = (LONG / size).max(1) * size;
        let end = self.size / size * size;
        while at < end {
            let take = step.min(end - at);
            let bytes = self.bytes(at, usize::try_from(take).ok()?)?;
            let mut records = bytes.chunks_exact(SIZE).filter_map(|record| record.first_chunk());
            if !records.all(&mut each) {
                return Some(());
            }
            at += take;
        }
        Some(())
    }

    /// Offsets of a text in the part. `None`: more than `most`, or the part cannot be read to its end.
    pub fn positions(&mut self, text: &[u8], most: usize) -> Option<Vec<u64>> {
        let step = usize::try_from(LONG).ok()?;
        // The end of a piece is read again with the next piece, because the text may cross the border.
        let overlap = text.len().checked_sub(1).filter(|overlap| *overlap < step / 2)?;
        let finder = memchr::memmem::Finder::new(text);
        let (mut found, mut at) = (Vec::new(), 0);
        loop {
            let bytes = self.up_to(at, step)?;
            for position in finder.find_iter(bytes) {
                found.push(at + position as u64);
                if found.len() > most {
                    return None;
                }
            }
            let read = bytes.len() as u64;
            if at + read >= self.size {
                return Some(found);
            }
            at += read - overlap as u64;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_region_gives_what_the_file_holds_and_nothing_else() {
        let file: Vec<u8> = (0..200_000u32).map(|i| (i % 251) as u8).collect();
        let file = &file[..];
        let bounded = Bounded::new(&file).unwrap();
        let mut region = bounded.region(100, 150_000).unwrap();
        for at in [0u64, 1, 4090, 4096, 70_000, 3, 149_999, 64 * 1024 - 1] {
            let count = (150_000 - at).min(9) as usize;
            let from = 100 + at as usize;
            assert_eq!(region.bytes(at, count).unwrap(), &file[from..from + count]);
        }
        assert_eq!(region.bytes(149_999, 2), None);
        assert_eq!(region.bytes(u64::MAX, 2), None);
        assert!(bounded.region(100_000, 100_001).is_none());
        assert!(bounded.region(u64::MAX, 2).is_none());
        assert_eq!(bounded.read(199_999, 1).unwrap(), [file[199_999]]);
        assert!(bounded.read(199_999, 2).is_none());
        assert!(!bounded.is_used_up());
    }

    #[test]
    fn a_text_is_found_across_the_borders_of_pieces() {
        let mut file = vec![b'.'; 300_000];
        let places = [0u64, 65_530, 65_536, 131_066, 299_994];
        for at in places {
            file[at as usize..at as usize + 6].copy_from_slice(b"needle");
        }
        let file = &file[..];
        let bounded = Bounded::new(&file).unwrap();
        let mut region = bounded.region(0, 300_000).unwrap();
        assert_eq!(region.positions(b"needle", 5).unwrap(), places);
        assert_eq!(region.positions(b"needle", 4), None);
        assert!(region.positions(b"nothing", 4).unwrap().is_empty());
        assert_eq!(region.positions(b"", 4), None);
    }

    #[test]
    fn records_are_whole_and_can_be_left_early() {
        let file: Vec<u8> = (0..100_007u32).map(|i| (i / 24) as u8).collect();
        let file = &file[..];
        let bounded = Bounded::new(&file).unwrap();
        let mut region = bounded.region(0, 100_007).unwrap();
        let mut count = 0;
        region
            .records::<24>(|record| {
                assert!(record.iter().all(|b| *b == count as u8));
                count += 1;
                true
            })
            .unwrap();
        assert_eq!(count, 100_007 / 24);
        let mut count = 0;
        region
            .records::<24>(|_| {
                count += 1;
                count < 5
            })
            .unwrap();
        assert_eq!(count, 5);
    }

    #[test]
    fn jumps_and_long_reads_end_with_the_allowance() {
        struct Endless;
        impl ReadAt for Endless {
            fn length(&self) -> io::Result<u64> {
                Ok(u64::MAX / 2)
            }
            fn read_at(&self, buffer: &mut [u8], _: u64) -> io::Result<usize> {
                Ok(buffer.len())
            }
        }
        let bounded = Bounded::new(&Endless).unwrap();
        let mut region = bounded.region(0, u64::MAX / 2).unwrap();
        let jumps = (0..).take_while(|i| region.u64(i * 1_000_000).is_some()).count() as u64;
        assert_eq!(jumps, ALLOWANCE / (2 * SHORT));
        assert!(bounded.is_used_up());
        let bounded = Bounded::new(&Endless).unwrap();
        let mut region = bounded.region(0, u64::MAX / 2).unwrap();
        let mut records = 0u64;
        assert_eq!(
            region.records::<24>(|_| {
                records += 1;
                true
            }),
            None
        );
        assert!(records * 24 < ALLOWANCE);
        assert!(region.window.len() as u64 <= LONG);
    }
}
