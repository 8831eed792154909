//! The memory of a workload by region: mappings from `/proc/PID/maps`, their contents from the page tables.
//!
//! Short calls read the page tables ([`Pagemap`]), because the kernel holds the process's address space during each
//! call. `smaps` also shows the program's advice (`VmFlags`), but walks each mapping under one hold. So it is read up
//! to the first mapping that is too long ([`walks::smaps`]). The advice of later regions is unknown, and the kernel
//! itself refuses to convert memory kept in small pages. A captured machine has no page tables: there `smaps` is the
//! only source.

use crate::reader::{NotNow, Reader};
use crate::walks::InMemory;
use crate::{choice, walks};
use homeostat_kernel::bytes::{chosen, hexadecimal, keyed, lines, number, words};
use homeostat_kernel::files::{ProcessFile, Text};
use homeostat_kernel::memory::{PIECE, Pagemap, PieceState};
use homeostat_kernel::{Root, files};
use homeostat_model::{
    Bytes, MemoryAdvice, MemoryKind, MemoryMap, MemoryRegion, Pieces, ProcessId, Workload,
};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Most processes of one workload that are inspected, largest resident memory first.
pub const PROCESSES_MAX: usize = 16;
/// Most regions in one memory map.
pub const REGIONS_MAX: usize = 512;
/// No process begins after this time.
pub const TIME_MAX: Duration = Duration::from_millis(200);
/// Pieces in one read of the page tables, 1 GiB.
const PIECES_PER_LOOK: u64 = 512;
/// No read of the page tables begins after this time, enough for 100 GiB of small pages. Sanitizers and garbage
/// collectors reserve address space by the tebibyte, and before `PAGEMAP_SCAN` each piece is a read of its own.
const LOOK_TIME_MAX: Duration = Duration::from_millis(500);
/// Limit for reading the list of mappings of one process.
const MAPS_PATIENCE: Duration = Duration::from_secs(1);
/// Limit for reading the page tables: [`LOOK_TIME_MAX`] and some room.
const LOOK_PATIENCE: Duration = Duration::from_secs(1);
/// Most of one captured `smaps` that is read, in bytes: about 8000 mappings.
const SMAPS_MAX: usize = 8 * 1024 * 1024;
/// Most members whose resident memory is compared.
const MEMBERS_MAX: usize = 4096;

/// One mapping as the kernel describes it. Amounts are in KiB, as there.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Mapping {
    /// First address.
    pub start: u64,
    /// First address after it.
    pub end: u64,
    /// Whether it is shared (`s`) and not private (`p`).
    pub shared: bool,
    /// Offset in the file or segment.
    pub offset: u64,
    /// Device, as written (`fe:00`).
    pub device: String,
    /// Inode; 0 for private anonymous memory.
    pub inode: u64,
    /// Name; empty for plain anonymous memory.
    pub name: String,
    /// `Rss`.
    pub resident: u64,
    /// `Referenced`.
    pub referenced: u64,
    /// `AnonHugePages` + `ShmemPmdMapped` + `FilePmdMapped`.
    pub huge: u64,
    /// `Swap`.
    pub swapped: u64,
    /// `THPeligible`.
    pub eligible: bool,
    /// Whether the kernel reports `THPeligible`.
    pub tells_eligible: bool,
    /// Whether `VmFlags` were read.
    pub tells_flags: bool,
    /// `VmFlags`: `hg`.
    pub advised: bool,
    /// `nh`.
    pub refused: bool,
    /// `lo`.
    pub locked: bool,
    /// `ht`.
    pub hugetlb: bool,
    /// `io`, `pf` or `pm`: device memory, not ordinary pages.
    pub device_memory: bool,
    /// `um`, `uw`, `ui` or `mm`: userfaultfd or a driver decides about its pages.
    pub watched: bool,
}

/// An address range `55d0c0a00000-55d0c0c00000`.
pub fn parse_range(text: &[u8]) -> Option<(u64, u64)> {
    let dash = text.iter().position(|&b| b == b'-')?;
    let start = hexadecimal(text.get(..dash)?)?;
    let end = hexadecimal(text.get(dash + 1..)?)?;
    (start < end).then_some((start, end))
}

/// Whether a mapping with this name is shared memory without a file on disk.
pub fn is_shared_memory(name: &[u8]) -> bool {
    [
        &b"/SYSV"[..],
        b"/memfd:",
        b"/dev/zero",
        b"/dev/shm/",
        b"[anon_shmem",
    ]
    .iter()
    .any(|p| name.starts_with(p))
}

fn parse_header(line: &[u8]) -> Option<Mapping> {
    let mut parts = words(line);
    let (start, end) = parse_range(parts.next()?)?;
    let permissions = parts.next()?;
    if permissions.len() != 4 {
        return None;
    }
    let offset = hexadecimal(parts.next()?)?;
    let device = String::from_utf8_lossy(parts.next()?).into_owned();
    let inode = number(parts.next()?)?;
    // The name is the rest of the line: file names hold spaces.
    let name = match parts.next() {
        Some(first) => {
            let at = (first.as_ptr() as usize).saturating_sub(line.as_ptr() as usize);
            String::from_utf8_lossy(line.get(at..).unwrap_or_default().trim_ascii()).into_owned()
        }
        None => String::new(),
    };
    Some(Mapping {
        start,
        end,
        shared: permissions.get(3) == Some(&b's'),
        offset,
        device,
        inode,
        name,
        ..Mapping::default()
    })
}

/// Parses `smaps`. Unknown lines are skipped. A cut text yields the mappings before the cut, the last one in part.
pub fn parse_smaps(text: &[u8]) -> Vec<Mapping> {
    let mut found: Vec<Mapping> = Vec::new();
    for line in lines(text) {
        // Most lines are `Key: value`; a header starts with a hexadecimal range.
        let first = words(line).next().unwrap_or_default();
        if !first.ends_with(b":") {
            if let Some(mapping) = parse_header(line) {
                found.push(mapping);
            }
            continue;
        }
        let Some(mapping) = found.last_mut() else { continue };
        let mut parts = words(line).skip(1);
        let mut value = || parts.next().and_then(number).unwrap_or(0);
        match first {
            b"Rss:" => mapping.resident = value(),
            b"Referenced:" => mapping.referenced = value(),
            b"AnonHugePages:" | b"ShmemPmdMapped:" | b"FilePmdMapped:" => {
                mapping.huge = mapping.huge.saturating_add(value());
            }
            b"Swap:" => mapping.swapped = value(),
            b"THPeligible:" => {
                mapping.eligible = value() == 1;
                mapping.tells_eligible = true;
            }
            b"VmFlags:" => {
                mapping.tells_flags = true;
                for flag in words(line).skip(1) {
                    match flag {
                        b"hg" => mapping.advised = true,
                        b"nh" => mapping.refused = true,
                        b"lo" => mapping.locked = true,
                        b"ht" => mapping.hugetlb = true,
                        b"io" | b"pf" | b"pm" => mapping.device_memory = true,
                        b"um" | b"uw" | b"ui" | b"mm" => mapping.watched = true,
                        _ => {}
                    }
                }
            }
            _ => {}
        }
    }
    found
}

impl Mapping {
    /// What backs it; `None` for the kernel's own pages (vdso) and device memory.
    pub fn kind(&self) -> Option<MemoryKind> {
        if self.hugetlb {
            return Some(MemoryKind::HugeTlb);
        }
        if self.device_memory
            || matches!(
                self.name.as_str(),
                "[vdso]" | "[vvar]" | "[vvar_vclock]" | "[vsyscall]"
            )
        {
            return None;
        }
        let shared_memory = is_shared_memory(self.name.as_bytes());
        Some(if self.shared && shared_memory {
            MemoryKind::Shared
        } else if self.name.starts_with('/') || self.shared {
            MemoryKind::File
        } else {
            MemoryKind::Anonymous
        })
    }

    /// Whether the kernel refuses large pages to plain memory although all memory may have them. Then the process chose
    /// that (`PR_THP_DISABLE_EXCEPT_ADVISED`, which its status does not show).
    fn is_excepted(&self) -> bool {
        let is_plain = self.inode == 0 && (self.name.is_empty() || self.name == "[heap]");
        let fits = (self.end / PIECE).saturating_sub(self.start.div_ceil(PIECE)) > 0;
        is_plain
            && fits
            && self.tells_eligible
            && !self.eligible
            && !(self.shared || self.advised || self.refused || self.hugetlb || self.device_memory)
            && !self.watched
    }

    fn region(&self, process: ProcessId, kind: MemoryKind) -> MemoryRegion {
        // A large page of shared memory maps a large page of the segment: both must begin at the same place.
        let aligned = kind == MemoryKind::Anonymous || self.start % PIECE == self.offset % PIECE;
        MemoryRegion {
            process,
            start: self.start,
            length: Bytes(self.end - self.start),
            kind,
            name: self.name.clone(),
            resident: Bytes::from_kib(self.resident),
            referenced: Bytes::from_kib(self.referenced),
            huge: Bytes::from_kib(self.huge),
            swapped: Bytes::from_kib(self.swapped),
            advice: if self.refused {
                MemoryAdvice::NoHugePage
            } else if self.advised {
                MemoryAdvice::HugePage
            } else {
                MemoryAdvice::None
            },
            locked: self.locked,
            eligible: self.eligible,
            aligned,
            mappers: 1,
            pieces: Pieces::default(),
            convertible: Vec::new(),
        }
    }
}

/// Inspects the memory of a workload. Processes that end meanwhile are absent from the result.
///
/// # Errors
/// A process that keeps its address space locked would make us wait.
pub fn inspect(root: &Root, workload: &Workload, reader: &mut Reader) -> Result<MemoryMap, NotNow> {
    let begun = Instant::now();
    let mut map = MemoryMap {
        workload: workload.id.clone(),
        disabled: Vec::new(),
        regions: Vec::new(),
        truncated: false,
    };
    let largest = largest_processes(root, workload, &mut map);
    // Shared memory and files by device, inode and offset, named through the process that maps most.
    let mut named_once: BTreeMap<(String, u64, u64), usize> = BTreeMap::new();
    let all_may_have = gives_large_pages_to_all(root);
    let main = largest.first().map_or(0, |(process, _)| process.pid);
    let mut members = Vec::new();
    for (process, locked) in largest {
        if begun.elapsed() > TIME_MAX {
            map.truncated = true;
            break;
        }
        let own_root = root.clone();
        let read = reader.run(process.pid, MAPS_PATIENCE, move || {
            if own_root.is_live() {
                return walks::mappings(&own_root, process);
            }
            let mut buffer = Vec::new();
            read_of(&own_root, process, "smaps", &mut buffer, SMAPS_MAX)
                .map(|text| (parse_smaps(text.beginning()), text.is_cut()))
        })?;
        let Some((mappings, cut)) = read else { continue };
        map.truncated |= cut;
        // A live machine's `maps` does not show that: see [`look_into`].
        if all_may_have && !map.disabled.contains(&process) && mappings.iter().any(Mapping::is_excepted) {
            map.disabled.push(process);
        }
        if root.is_live() {
            let bounds = mappings.iter().map(|m| (m.start, m.end)).collect();
            members.push(Member {
                process,
                locked,
                mappings: bounds,
            });
        }
        for mapping in mappings {
            let Some(kind) = mapping.kind() else { continue };
            if mapping.end - mapping.start < PIECE {
                continue;
            }
            let region = mapping.region(process, kind);
            if kind == MemoryKind::Anonymous {
                map.regions.push(region);
                continue;
            }
            let key = (mapping.device, mapping.inode, mapping.offset);
            match named_once.get(&key).and_then(|i| map.regions.get_mut(*i)) {
                Some(known) if known.resident >= region.resident => known.mappers += 1,
                Some(known) => {
                    let mappers = known.mappers + 1;
                    *known = region;
                    known.mappers = mappers;
                }
                None => {
                    named_once.insert(key, map.regions.len());
                    map.regions.push(region);
                }
            }
        }
    }
    if root.is_live() {
        let root = root.clone();
        map = reader.run(main, LOOK_PATIENCE, move || {
            look_into(&root, &mut map, &members);
            map
        })?;
    }
    if map.regions.len() > REGIONS_MAX {
        map.regions
            .sort_by_key(|r| (std::cmp::Reverse(r.resident), r.process, r.start));
        map.regions.truncate(REGIONS_MAX);
        map.truncated = true;
    }
    map.regions.sort_by_key(|r| (r.process, r.start));
    Ok(map)
}

/// Whether the kernel gives large pages to all suitable memory that did not refuse them.
pub fn gives_large_pages_to_all(root: &Root) -> bool {
    const BASE: &str = "/sys/kernel/mm/transparent_hugepage";
    let is = |file: &str, wanted: &[&str]| {
        files::text(root, &format!("{BASE}/{file}"))
            .is_some_and(|text| chosen(text.as_bytes()).is_some_and(|word| wanted.contains(&word)))
    };
    let own = "hugepages-2048kB/enabled";
    is("enabled", &["always"])
        && (is(own, &["always", "inherit"]) || files::text(root, &format!("{BASE}/{own}")).is_none())
}

struct Member {
    process: ProcessId,
    /// `VmLck`.
    locked: Bytes,
    /// Bounds of all its mappings.
    mappings: Vec<(u64, u64)>,
}

/// The members with most resident memory, and the locked part of each. Also notes those with large pages disabled.
fn largest_processes(root: &Root, workload: &Workload, map: &mut MemoryMap) -> Vec<(ProcessId, Bytes)> {
    let mut buffer = Vec::new();
    let mut sizes: Vec<(u64, ProcessId, Bytes)> = Vec::new();
    map.truncated |= workload.processes.len() > MEMBERS_MAX;
    for process in workload.processes.iter().take(MEMBERS_MAX) {
        let Some(status) = read_of(root, *process, "status", &mut buffer, files::SMALL_FILE_MAX) else {
            continue;
        };
        if choice::may_refuse_large_pages(status) {
            map.disabled.push(*process);
        }
        // A kernel thread or zombie has no VmRSS.
        if let Some(resident) = keyed(status.beginning(), "VmRSS") {
            let locked = Bytes::from_kib(keyed(status.beginning(), "VmLck").unwrap_or(0));
            sizes.push((resident, *process, locked));
        }
    }
    sizes.sort_by_key(|(size, process, _)| (std::cmp::Reverse(*size), *process));
    if sizes.len() > PROCESSES_MAX {
        map.truncated = true;
        sizes.truncate(PROCESSES_MAX);
    }
    sizes
        .into_iter()
        .map(|(_, process, locked)| (process, locked))
        .collect()
}

/// Reads a file of a process, after a check that the process is still the same.
pub(crate) fn read_of<'b>(
    root: &Root,
    process: ProcessId,
    leaf: &str,
    buffer: &'b mut Vec<u8>,
    limit: usize,
) -> Option<Text<'b>> {
    // An open directory stays with this process even if its number is reused: open, check, then read.
    let directory = files::Directory::open(root, &format!("/proc/{}", process.pid)).ok()?;
    let stat = directory
        .read_record(c"stat", buffer)
        .ok()
        .and_then(crate::processes::parse_stat)?;
    if stat.start_ticks != process.start_ticks {
        return None;
    }
    // "0/leaf" without the number is the name inside the directory.
    let name = ProcessFile::new(0, leaf);
    let inside = std::ffi::CStr::from_bytes_until_nul(name.name().to_bytes_with_nul().get(2..)?).ok()?;
    directory.read(inside, buffer, limit).ok()
}

/// Adds the page tables' facts and the program's advice to each region. Convertible and small regions come first, so
/// that reserved address space does not use up the time.
fn look_into(root: &Root, map: &mut MemoryMap, members: &[Member]) {
    let deadline = Instant::now() + LOOK_TIME_MAX;
    let all_may_have = gives_large_pages_to_all(root);
    let mut order: Vec<usize> = (0..map.regions.len()).collect();
    order.sort_by_key(|i| map.regions.get(*i).map(|r| (!is_candidate(r), r.length)));
    let mut open: BTreeMap<ProcessId, Option<Pagemap>> = BTreeMap::new();
    let mut found: BTreeMap<(ProcessId, u64), InMemory> = BTreeMap::new();
    for index in order {
        let Some(region) = map.regions.get_mut(index) else {
            continue;
        };
        let pagemap = open
            .entry(region.process)
            .or_insert_with(|| Pagemap::open(&root.path("/proc"), region.process.pid).ok());
        let Some(pagemap) = pagemap else { continue };
        if let Some(memory) = look_into_pieces(pagemap, region, deadline) {
            found.insert((region.process, region.start), memory);
        } else {
            map.truncated = true;
        }
    }
    for member in members {
        let walked: Vec<u64> = member
            .mappings
            .iter()
            .map(|(start, end)| {
                let memory = found.get(&(member.process, *start));
                memory.map_or(end - start, |memory| memory.small_at_most(end - start))
            })
            .collect();
        let flags = walks::smaps(root, member.process, &walked, deadline).unwrap_or_default();
        if all_may_have && !map.disabled.contains(&member.process) && flags.iter().any(Mapping::is_excepted) {
            map.disabled.push(member.process);
        }
        let flags: BTreeMap<u64, Mapping> = flags.into_iter().map(|m| (m.start, m)).collect();
        let own = map.regions.iter_mut().filter(|r| r.process == member.process);
        for region in own {
            match flags
                .get(&region.start)
                .filter(|m| m.tells_flags && m.end - m.start == region.length.0)
            {
                Some(mapping) => {
                    let kind = mapping.kind().unwrap_or(MemoryKind::File);
                    let told = mapping.region(member.process, kind);
                    region.kind = kind;
                    region.referenced = told.referenced;
                    region.swapped = told.swapped;
                    region.advice = told.advice;
                    region.locked = told.locked;
                    region.eligible = told.eligible;
                }
                None => {
                    region.referenced = region.resident;
                    region.advice = MemoryAdvice::Unknown;
                    // A process locks all its memory, or at least this much.
                    region.locked = member.locked >= region.length;
                    region.eligible = true;
                }
            }
        }
    }
}

fn is_candidate(region: &MemoryRegion) -> bool {
    matches!(region.kind, MemoryKind::Anonymous | MemoryKind::Shared) && region.aligned
}

/// Reads the state of a region's pieces; `None` if time ran out.
fn look_into_pieces(pagemap: &mut Pagemap, region: &mut MemoryRegion, deadline: Instant) -> Option<InMemory> {
    let candidate = is_candidate(region);
    let mut memory = InMemory::default();
    let mut states: Vec<PieceState> = Vec::new();
    let mut at = region.start.next_multiple_of(PIECE);
    let end = (region.start + region.length.0) / PIECE * PIECE;
    let mut complete = true;
    while at < end {
        if Instant::now() >= deadline {
            complete = false;
            break;
        }
        let count = ((end - at) / PIECE).min(PIECES_PER_LOOK);
        if pagemap.piece_states(at, count, &mut states).is_err() {
            break;
        }
        for (state, address) in states.iter().zip((at..).step_by(PIECE as usize)) {
            memory.add(*state);
            if !candidate {
                continue;
            }
            match state {
                PieceState::Huge => region.pieces.huge += 1,
                PieceState::Full => {
                    region.pieces.full += 1;
                    region.convertible.push(address);
                }
                PieceState::Sparse { .. } => region.pieces.sparse += 1,
                PieceState::Empty => region.pieces.empty += 1,
                PieceState::Unmapped => {}
            }
        }
        at += count * PIECE;
    }
    region.resident = memory.small + memory.large;
    region.huge = memory.large;
    complete.then_some(memory)
}

/// Memory of one process in brief.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Glance {
    /// `RssAnon`.
    pub anonymous: Bytes,
    /// `RssShmem`.
    pub shared: Bytes,
    /// Resident in total.
    pub resident: Bytes,
}

/// Parses the resident memory by kind from `/proc/PID/status`: counters, so the cost does not depend on the size.
pub fn parse_glance(status: &[u8]) -> Glance {
    let kib = |key| Bytes::from_kib(keyed(status, key).unwrap_or(0));
    Glance {
        anonymous: kib("RssAnon"),
        shared: kib("RssShmem"),
        resident: kib("VmRSS"),
    }
}

/// Memory mapped by large pages from `smaps_rollup`: private and shared.
pub fn parse_rollup(rollup: &[u8]) -> Option<(Bytes, Bytes)> {
    let private = Bytes::from_kib(keyed(rollup, "AnonHugePages")?);
    Some((
        private,
        Bytes::from_kib(keyed(rollup, "ShmemPmdMapped").unwrap_or(0)),
    ))
}

/// Reads [`Glance`] from the status of a process.
pub fn glance(root: &Root, process: ProcessId, buffer: &mut Vec<u8>) -> Option<Glance> {
    read_of(root, process, "status", buffer, files::SMALL_FILE_MAX)
        .and_then(Text::whole)
        .map(parse_glance)
}

/// Memory of a process in large pages, private and shared; `None` if that cannot be known in time.
pub fn in_large_pages(root: &Root, process: ProcessId, time: Duration) -> Option<(Bytes, Bytes)> {
    if !root.is_live() {
        let mut buffer = Vec::new();
        return read_of(root, process, "smaps_rollup", &mut buffer, files::SMALL_FILE_MAX)
            .and_then(Text::whole)
            .and_then(parse_rollup);
    }
    let deadline = Instant::now() + time;
    let mut pagemap = Pagemap::open(&root.path("/proc"), process.pid).ok()?;
    let (mut private, mut shared) = (Bytes::ZERO, Bytes::ZERO);
    for mapping in walks::mappings(root, process)?.0 {
        let sum = match mapping.kind() {
            Some(MemoryKind::Anonymous) => &mut private,
            Some(MemoryKind::Shared) => &mut shared,
            _ => continue,
        };
        let mut region = mapping.region(process, MemoryKind::File);
        *sum += look_into_pieces(&mut pagemap, &mut region, deadline)?.large;
    }
    Some((private, shared))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const SMAPS: &str = "\
7f0000200000-7f0040200000 rw-p 00000000 00:00 0 \n\
Size:            1048576 kB\nRss:             1000000 kB\nReferenced:       900000 kB\n\
AnonHugePages:      2048 kB\nShmemPmdMapped:        0 kB\nSwap:                  4 kB\n\
THPeligible:           1\nVmFlags: rd wr mr mw me ac sd hg lo \n\
7f1000001000-7f1008001000 rw-s 00000000 00:01 32769                      /SYSV0052e2c1 (deleted)\n\
Rss:              131072 kB\nTHPeligible:           0\nVmFlags: rd wr sh mr mw me ms sd nh \n\
7f2000000000-7f2000400000 r--p 00000000 fe:00 77 /opt/a file/with spaces.so\n\
Rss: 4096 kB\n\
7ffc00000000-7ffc00004000 r--p 00000000 00:00 0                          [vvar]\nVmFlags: rd mr pf io de dd \n\
7f3000000000-7f3000400000 rw-s 00000000 00:0f 5 /anon_hugepage (deleted)\nVmFlags: rd wr sh ht \n";

    #[test]
    fn every_kind_of_mapping_is_told_apart() {
        let found = parse_smaps(SMAPS.as_bytes());
        let kinds: Vec<_> = found.iter().map(Mapping::kind).collect();
        assert_eq!(
            kinds,
            [
                Some(MemoryKind::Anonymous),
                Some(MemoryKind::Shared),
                Some(MemoryKind::File),
                None,
                Some(MemoryKind::HugeTlb)
            ]
        );
        let process = ProcessId {
            pid: 1,
            start_ticks: 2,
        };
        let heap = found[0].region(process, MemoryKind::Anonymous);
        assert_eq!(heap.resident, Bytes::from_kib(1_000_000));
        assert_eq!(heap.huge, Bytes::from_kib(2048));
        assert_eq!(heap.swapped, Bytes::from_kib(4));
        assert_eq!(heap.advice, MemoryAdvice::HugePage);
        assert!(heap.locked && heap.eligible && heap.aligned);
        let segment = found[1].region(process, MemoryKind::Shared);
        assert_eq!(segment.advice, MemoryAdvice::NoHugePage);
        assert!(!segment.aligned && !segment.eligible);
        assert_eq!(segment.name, "/SYSV0052e2c1 (deleted)");
        assert_eq!(found[2].name, "/opt/a file/with spaces.so");
    }

    #[test]
    fn a_segment_whose_offset_and_address_agree_is_aligned() {
        let text = b"7f0000100000-7f0000900000 rw-s 00100000 00:01 5 /memfd:x (deleted)\n";
        let found = parse_smaps(text);
        assert!(
            found[0]
                .region(
                    ProcessId {
                        pid: 1,
                        start_ticks: 1
                    },
                    MemoryKind::Shared
                )
                .aligned
        );
    }

    #[test]
    fn ranges_that_run_backwards_are_refused() {
        assert_eq!(parse_range(b"2000-1000"), None);
        assert_eq!(parse_range(b"1000-1000"), None);
        assert_eq!(parse_range(b"1000"), None);
    }

    #[test]
    fn status_and_rollup() {
        let g =
            parse_glance(b"Name:\tx\nVmRSS:\t 30 kB\nRssAnon:\t 10 kB\nRssFile:\t 0 kB\nRssShmem:\t 20 kB\n");
        assert_eq!(g.anonymous, Bytes::from_kib(10));
        assert_eq!(g.shared, Bytes::from_kib(20));
        assert_eq!(parse_rollup(b"Rss: 1 kB\n"), None);
        assert_eq!(
            parse_rollup(b"AnonHugePages: 2048 kB\nShmemPmdMapped: 4096 kB\n"),
            Some((Bytes::from_mib(2), Bytes::from_mib(4)))
        );
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
            let _ = parse_smaps(&bytes);
            let _ = parse_range(&bytes);
        }

        #[test]
        fn a_cut_at_any_place_keeps_the_mappings_before_it(cut in 0..SMAPS.len()) {
            let whole = parse_smaps(SMAPS.as_bytes());
            let part = parse_smaps(&SMAPS.as_bytes()[..cut]);
            prop_assert!(part.len() <= whole.len());
            let complete = part.len().saturating_sub(1);
            prop_assert_eq!(&part[..complete], &whole[..complete]);
        }
    }
}
