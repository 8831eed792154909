//! Files of `/proc` for which the kernel walks page tables: `smaps` and `numa_maps`.
//!
//! While the kernel writes a record, it holds the address space (`mmap_lock`) and walks every small page of the
//! mapping. The program's `mmap` calls wait meanwhile. So these files are read only if one hold covers few small pages
//! ([`WALK_MAX`]). `PAGEMAP_SCAN` counts them first, in short calls. `maps` needs no walk. One `read(2)` shows as many
//! records as fit into 4 KiB (the kernel's seq_file), or one if it asks for fewer bytes.

use crate::regions::{Mapping, parse_smaps, read_of};
use homeostat_kernel::memory::{BASE_PAGE, PIECE, Pagemap, PieceState};
use homeostat_kernel::{Root, bytes, files};
use homeostat_model::{Bytes, ProcessId};
use rustix::io::Errno;
use std::os::fd::OwnedFd;
use std::time::Instant;

/// Small pages that the kernel may walk under one hold. Measured: 18 to 59 ms per GiB of 4 KiB pages for `smaps` and
/// `numa_maps`, so at most 3.7 ms.
pub const WALK_MAX: Bytes = Bytes(64 * 1024 * 1024);
/// Bytes per read of `smaps`: fewer than any record has, so that one read walks one mapping. Measured: a record has 700
/// bytes, and at least 580 by the kernel's format since 5.4.
const SMAPS_STEP: usize = 512;
/// Most of one `maps` that is read, in bytes. Source: 65,530 mappings (`vm.max_map_count`) of about 100 bytes.
pub const MAPS_MAX: usize = 8 * 1024 * 1024;
/// Most of one `smaps` that is read, in bytes: about 3000 mappings.
const SMAPS_MAX: usize = 2 * 1024 * 1024;
/// Mappings that must be short before a line of `numa_maps` is read: one may be gone, and a later one is shown.
const LINES_AHEAD: usize = 4;
/// Least bytes of a line of `numa_maps`: `00400000 default` and the end of the line.
const LINE_MIN: usize = 16;
/// Longest line of `numa_maps` that is parsed: the path of a file (4 KiB) and a number for each node.
const LINE_MAX: usize = 16 * 1024;

/// The mappings of a process by `maps`, and whether there are more.
pub fn mappings(root: &Root, process: ProcessId) -> Option<(Vec<Mapping>, bool)> {
    first_mappings(root, process, MAPS_MAX)
}

fn first_mappings(root: &Root, process: ProcessId, limit: usize) -> Option<(Vec<Mapping>, bool)> {
    let mut buffer = Vec::new();
    read_of(root, process, "maps", &mut buffer, limit)
        .map(|text| (parse_smaps(text.beginning()), text.is_cut()))
}

/// Pages of a range in memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct InMemory {
    /// In small pages.
    pub small: Bytes,
    /// In pages mapped as large ones.
    pub large: Bytes,
}

impl InMemory {
    /// Adds a piece.
    pub fn add(&mut self, state: PieceState) {
        match state {
            PieceState::Huge => self.large.0 += PIECE,
            PieceState::Full => self.small.0 += PIECE,
            PieceState::Sparse { present, .. } => self.small.0 += u64::from(present) * BASE_PAGE,
            PieceState::Empty | PieceState::Unmapped => {}
        }
    }

    /// Most small pages of a mapping whose whole pieces were counted, but not its ends.
    pub fn small_at_most(&self, length: u64) -> u64 {
        (self.small.0 + 2 * PIECE).min(length)
    }
}

/// Whether the kernel may walk this mapping under one hold. Stops counting as soon as that is decided.
pub fn is_short(pagemap: Option<&mut Pagemap>, start: u64, end: u64) -> bool {
    if end - start <= WALK_MAX.0 {
        return true;
    }
    let Some(pagemap) = pagemap else { return false };
    let mut found = InMemory::default();
    let mut states = Vec::new();
    let (mut at, last) = (start.next_multiple_of(PIECE), end / PIECE * PIECE);
    while at < last {
        let count = ((last - at) / PIECE).min(WALK_MAX.0 / PIECE);
        if pagemap.piece_states(at, count, &mut states).is_err() {
            return false;
        }
        states.iter().for_each(|state| found.add(*state));
        if found.small_at_most(end - start) > WALK_MAX.0 {
            return false;
        }
        at += count * PIECE;
    }
    true
}

/// Reads `smaps`, one record per hold, up to the first mapping that is too long to walk, or the deadline. The record
/// before it ends at `THPeligible`: its last byte would start the next walk. `walked`: most small pages of each
/// mapping, in order.
pub fn smaps(root: &Root, process: ProcessId, walked: &[u64], deadline: Instant) -> Option<Vec<Mapping>> {
    let file = open(root, process, c"smaps")?;
    let mut text = Vec::new();
    let mut room = [0u8; SMAPS_STEP];
    let (mut shown, mut line, mut tells) = (0, 0, true);
    while text.len() < SMAPS_MAX && Instant::now() < deadline {
        // The kernel walks the next mapping if less is left of the last record than is asked for.
        let is_long = walked.get(shown).is_some_and(|walked| *walked > WALK_MAX.0);
        if is_long && tells {
            break;
        }
        let room = room
            .get_mut(..if is_long { 1 } else { SMAPS_STEP })
            .unwrap_or_default();
        let Ok(n @ 1..) = rustix::io::retry_on_intr(|| rustix::io::read(&file, &mut *room)) else {
            break;
        };
        text.extend_from_slice(room.get(..n).unwrap_or_default());
        while let Some(length) = text
            .get(line..)
            .and_then(|rest| rest.iter().position(|b| *b == b'\n'))
        {
            let first = text.get(line..).and_then(|rest| bytes::words(rest).next());
            let first = first.unwrap_or_default();
            shown += usize::from(!first.ends_with(b":"));
            tells = [&b"THPeligible:"[..], b"ProtectionKey:", b"VmFlags:"].contains(&first);
            line += length + 1;
        }
    }
    Some(parse_smaps(&text))
}

/// The first mappings of a process in `numa_maps`.
#[derive(Debug, Default)]
pub struct Leading {
    /// Lines of `numa_maps`.
    pub text: Vec<u8>,
    /// Number of mappings of the list in the text.
    pub count: usize,
}

/// Whether somebody chose the nodes of a process's memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Policy {
    /// Not chosen, or the kernel has no NUMA.
    Default,
    /// By `numactl`, `mbind` or `set_mempolicy`.
    Chosen(String),
    /// The first mapping is too large to read without holding up the process.
    Hidden,
}

/// The memory policy by the first `most` mappings. A mapping without its own policy shows that of the process.
pub fn policy(root: &Root, process: ProcessId, most: usize, deadline: Instant) -> Policy {
    let leading = if root.is_live() {
        // A line of `maps` exceeds 64 bytes only by the name of a file.
        let limit = most.saturating_mul(256).clamp(4096, MAPS_MAX);
        let Some((mappings, _)) = first_mappings(root, process, limit) else {
            return Policy::Default;
        };
        numa_maps(root, process, &mappings, most, deadline)
    } else {
        let mut buffer = Vec::new();
        let text = read_of(root, process, "numa_maps", &mut buffer, MAPS_MAX);
        text.map(|text| Leading {
            text: text.beginning().to_owned(),
            count: 1,
        })
    };
    let Some(leading) = leading else {
        return Policy::Default;
    };
    let chosen = crate::numa_maps::areas(&leading.text).find_map(|a| a.chosen_policy().map(str::to_owned));
    match chosen {
        Some(policy) => Policy::Chosen(policy),
        None if leading.count == 0 => Policy::Hidden,
        None => Policy::Default,
    }
}

/// Reads `numa_maps` by mapping, up to the first that is too long to walk, `most` mappings, or the deadline. `mappings`
/// come from `maps`. `None` if the kernel has no such file (no NUMA) or does not show it.
pub fn numa_maps(
    root: &Root,
    process: ProcessId,
    mappings: &[Mapping],
    most: usize,
    deadline: Instant,
) -> Option<Leading> {
    let file = open(root, process, c"numa_maps")?;
    let mut pagemap = Pagemap::open(&root.path("/proc"), process.pid).ok();
    let mut leading = Leading::default();
    let mut next = 0;
    let mut checked = 0;
    while next < mappings.len().min(most) {
        while checked < mappings.len().min(next + LINES_AHEAD) {
            let Some(mapping) = mappings.get(checked) else {
                break;
            };
            if Instant::now() >= deadline || !is_short(pagemap.as_mut(), mapping.start, mapping.end) {
                return Some(leading);
            }
            checked += 1;
        }
        let begin = leading.text.len();
        if !read_line(&file, &mut leading.text).ok()? {
            // It ended, or has fewer mappings now.
            return (next > 0).then_some(leading);
        }
        let line = leading.text.get(begin..).unwrap_or_default();
        let shown = bytes::words(line).next().and_then(bytes::hexadecimal)?;
        next = mappings.partition_point(|mapping| mapping.start <= shown);
        leading.count = next;
    }
    Some(leading)
}

/// Appends one line; `false` at the end of the file. The first read asks for less than any line, so that the kernel
/// shows one mapping. The rest comes byte by byte out of the kernel's buffer.
fn read_line(file: &OwnedFd, text: &mut Vec<u8>) -> Result<bool, Errno> {
    let mut room = [0u8; LINE_MIN];
    let mut n = rustix::io::retry_on_intr(|| rustix::io::read(file, &mut room))?;
    let begin = text.len();
    while n > 0 {
        text.extend_from_slice(room.get(..n).unwrap_or_default());
        if text.last() == Some(&b'\n') || text.len() - begin >= LINE_MAX {
            break;
        }
        let one = room.get_mut(..1).unwrap_or_default();
        n = rustix::io::retry_on_intr(|| rustix::io::read(file, &mut *one))?;
    }
    Ok(text.len() > begin)
}

/// Opens a file of a process, after a check that the process is still the same.
fn open(root: &Root, process: ProcessId, leaf: &std::ffi::CStr) -> Option<OwnedFd> {
    let directory = files::Directory::open(root, &format!("/proc/{}", process.pid)).ok()?;
    let mut buffer = Vec::new();
    let stat = directory.read_record(c"stat", &mut buffer).ok();
    let stat = stat.and_then(crate::processes::parse_stat)?;
    if stat.start_ticks != process.start_ticks {
        return None;
    }
    directory.open_file(leaf).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use homeostat_kernel::memory::ScratchMapping;
    use std::time::Duration;

    fn own() -> ProcessId {
        let stat = std::fs::read("/proc/self/stat").unwrap();
        ProcessId {
            pid: std::process::id() as i32,
            start_ticks: crate::processes::parse_stat(&stat).unwrap().start_ticks,
        }
    }

    #[test]
    fn a_mapping_with_many_small_pages_is_never_walked_under_one_hold() {
        let length = 2 * WALK_MAX.0;
        let mut scratch = ScratchMapping::new(length / PIECE).unwrap();
        let (start, end) = (scratch.address(), scratch.address() + length);
        let mut pagemap = Pagemap::open(std::path::Path::new("/proc"), own().pid).unwrap();
        assert!(is_short(None, start, start + WALK_MAX.0));
        assert!(
            !is_short(None, start, end),
            "nobody knows how much of it is there"
        );
        assert!(is_short(Some(&mut pagemap), start, end), "nothing of it is there");
        scratch.touch(length);
        let mut found = InMemory::default();
        let mut states = Vec::new();
        pagemap.piece_states(start, length / PIECE, &mut states).unwrap();
        states.iter().for_each(|state| found.add(*state));
        assert_eq!(
            is_short(Some(&mut pagemap), start, end),
            found.small_at_most(length) <= WALK_MAX.0
        );
    }

    #[test]
    fn smaps_ends_before_the_first_mapping_that_is_too_long() {
        let deadline = Instant::now() + Duration::from_secs(60);
        let shown = |walked: &[u64]| smaps(&Root::default(), own(), walked, deadline).unwrap().len();
        let long = WALK_MAX.0 + 1;
        assert!(shown(&[]) > 3);
        assert_eq!((shown(&[0, 0, long]), shown(&[long])), (2, 0));
    }
}
