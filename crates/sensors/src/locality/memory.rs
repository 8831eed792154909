//! Memory of one process by NUMA node.
//!
//! A small process is **counted** from `/proc/PID/numa_maps` (proc_pid_numa_maps(5)). For that the kernel walks the
//! page tables and holds the address space for reading over each mapping: 20 ms per GiB (example `locality_cost`). The
//! process's `mmap` calls, and page faults behind them, wait meanwhile. [`WALK_MAX`] keeps that below 5 ms.
//!
//! A large process is **sampled**. `/proc/PID/maps` (no walk) gives its address ranges. `move_pages(2)` without a
//! target node reports the node of random pages, and holds the address space for 16 pages at a time. Ranges are cut
//! into cells, because most of an address space may be empty. Later rounds concentrate on cells with memory. A page
//! stands for `pages of its cell / pages asked in its cell`. The result is scaled by kind to `/proc/PID/status`.
//!
//! Memory policies (`numactl`, `mbind`) come from `numa_maps`. Of a sampled process only the first mapping is read: it
//! shows the process's policy, but none of single mappings. If that mapping is too large, the policy is hidden.

use crate::regions::{is_shared_memory, parse_range, read_of};
use crate::walks::{MAPS_MAX, Policy, WALK_MAX};
use crate::{numa_maps, walks};
use homeostat_kernel::Root;
use homeostat_kernel::bytes::{keyed, lines, words};
use homeostat_kernel::files::Directory;
use homeostat_kernel::memory::{PIECE, Pagemap, PieceState};
use homeostat_kernel::numa::{NumaError, PageCall, PageStatus};
use homeostat_model::{Bytes, MemoryByKind, NodeId, ProcessId};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Resident memory up to which a process is counted whole.
pub const EXACT_MAX: Bytes = WALK_MAX;
const CELLS_MAX: u64 = 512;
/// Pages of the smallest cell (2 MiB).
const CELL_PAGES_MIN: u64 = 512;
/// Pages asked in the first round, spread evenly.
const FIRST_ROUND: u64 = 4096;
const ROUND: u64 = 4096;
const PER_CALL: usize = 1024;
/// Most pages asked in all rounds.
const ASKED_MAX: u64 = 128 * 1024;
/// Half of the 95 % interval at which the sample is large enough.
pub const ERROR_WANTED: f64 = 0.009;
/// Most pages found that are checked for large pages.
const HUGE_LOOKS_MAX: usize = 512;
/// Two-sided 95 % of the normal distribution.
const Z95: f64 = 1.96;

/// Memory of one process by node.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ProcessMemory {
    /// By node and kind.
    pub nodes: BTreeMap<NodeId, MemoryByKind>,
    /// Memory policies that were chosen explicitly, with the memory under each.
    pub policies: BTreeMap<String, Bytes>,
    /// Whether reading its memory policy would hold up the process.
    pub policy_hidden: bool,
    /// Half of the 95 % interval of a node's share; zero when every page was counted.
    pub error: f64,
}

impl ProcessMemory {
    /// All of it.
    pub fn total(&self) -> Bytes {
        self.nodes.values().map(MemoryByKind::total).sum()
    }
}

/// Resident memory by kind, and the nodes and CPUs allowed, from `/proc/PID/status`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Resident {
    /// `RssAnon`.
    pub anonymous: Bytes,
    /// `RssShmem`.
    pub shared: Bytes,
    /// `RssFile`.
    pub file: Bytes,
    /// `HugetlbPages`.
    pub hugetlb: Bytes,
    /// `Mems_allowed_list`; `None` on kernels without NUMA or cpusets.
    pub nodes_allowed: Option<Vec<u32>>,
    /// `Cpus_allowed_list`.
    pub cpus_allowed: Option<Vec<u32>>,
}

impl Resident {
    /// Parses `/proc/PID/status`; `None` for a kernel thread or a zombie, which have no memory.
    pub fn parse(status: &[u8]) -> Option<Self> {
        let all = Bytes::from_kib(keyed(status, "VmRSS")?);
        let kib = |key| keyed(status, key).map(Bytes::from_kib);
        let list = |key: &str| {
            lines(status)
                .find_map(|l| l.strip_prefix(key.as_bytes())?.strip_prefix(b":"))
                .and_then(homeostat_kernel::bytes::list)
        };
        let (shared, file) = (
            kib("RssShmem").unwrap_or_default(),
            kib("RssFile").unwrap_or_default(),
        );
        Some(Self {
            // Before Linux 4.5 only the sum is reported.
            anonymous: kib("RssAnon").unwrap_or_else(|| all.saturating_sub(shared + file)),
            shared,
            file,
            hugetlb: kib("HugetlbPages").unwrap_or_default(),
            nodes_allowed: list("Mems_allowed_list"),
            cpus_allowed: list("Cpus_allowed_list"),
        })
    }

    /// All of it.
    pub fn total(&self) -> Bytes {
        self.anonymous + self.shared + self.file + self.hugetlb
    }

    /// The same as memory of one node.
    pub fn on_one_node(&self) -> MemoryByKind {
        MemoryByKind {
            anonymous: self.anonymous,
            shared: self.shared,
            file: self.file,
            hugetlb: self.hugetlb,
            huge: self.hugetlb,
        }
    }
}

/// What backs a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Backing {
    /// Private memory without a file.
    Anonymous,
    /// Shared memory without a file on disk.
    Shared,
    /// A file.
    File,
    /// Reserved huge pages.
    HugeTlb,
}

impl Backing {
    /// How much of the memory it backs.
    pub fn amount(self, memory: &MemoryByKind) -> Bytes {
        match self {
            Self::Anonymous => memory.anonymous,
            Self::Shared => memory.shared,
            Self::File => memory.file,
            Self::HugeTlb => memory.hugetlb,
        }
    }

    /// Field that adds up this kind of memory.
    pub fn place(self, memory: &mut MemoryByKind) -> &mut Bytes {
        match self {
            Self::Anonymous => &mut memory.anonymous,
            Self::Shared => &mut memory.shared,
            Self::File => &mut memory.file,
            Self::HugeTlb => &mut memory.hugetlb,
        }
    }

    fn resident(self, resident: &Resident) -> Bytes {
        match self {
            Self::Anonymous => resident.anonymous,
            Self::Shared => resident.shared,
            Self::File => resident.file,
            Self::HugeTlb => resident.hugetlb,
        }
    }
}

/// Adds up the mappings of a `numa_maps`.
pub fn parse_numa_maps(text: &[u8], page: Bytes) -> ProcessMemory {
    let mut memory = ProcessMemory::default();
    for area in numa_maps::areas(text) {
        let pages = area.pages();
        if pages == 0 {
            continue;
        }
        // Before Linux 3.14 the only default size of reserved pages is 2 MiB.
        let unit = match area.page_kib {
            Some(kib) => Bytes::from_kib(kib),
            None if area.is_hugetlb => Bytes(PIECE),
            None => page,
        };
        let bytes = |pages: u64| Bytes(pages.saturating_mul(unit.0));
        let backing = match area.file {
            _ if area.is_hugetlb => Backing::HugeTlb,
            None => Backing::Anonymous,
            Some(name) if is_shared_memory(name) => Backing::Shared,
            Some(_) => Backing::File,
        };
        // Written pages of a private file mapping are anonymous, without a node in the line: assigned in proportion.
        let written = if backing == Backing::Anonymous || area.is_hugetlb {
            0
        } else {
            area.anonymous.min(pages)
        };
        for (node, count) in &area.nodes {
            let own = (u128::from(*count) * u128::from(written) / u128::from(pages)) as u64;
            let memory = memory.nodes.entry(NodeId(*node)).or_default();
            memory.anonymous += bytes(own);
            *backing.place(memory) += bytes(count - own);
            if area.is_hugetlb {
                memory.huge += bytes(*count);
            }
        }
        if let Some(policy) = area.chosen_policy() {
            *memory.policies.entry(policy.to_owned()).or_default() += bytes(pages);
        }
    }
    memory
}

/// A range of addresses that may hold memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    /// First address.
    pub start: u64,
    /// First address after it.
    pub end: u64,
    /// What backs it.
    pub backing: Backing,
}

/// The ranges of a `maps` that may hold memory: without inaccessible ranges (reservations) and the kernel's own pages.
pub fn parse_maps(text: &[u8]) -> Vec<Range> {
    let mut found: Vec<Range> = Vec::new();
    for line in lines(text) {
        let mut parts = words(line);
        let (Some(range), Some(permissions)) = (parts.next().and_then(parse_range), parts.next()) else {
            continue;
        };
        let name = parts.nth(3).unwrap_or_default();
        if permissions.len() != 4
            || permissions.starts_with(b"---")
            || [&b"[vdso]"[..], b"[vsyscall]"].contains(&name)
            || name.starts_with(b"[vvar")
        {
            continue;
        }
        let backing = if name.starts_with(b"/anon_hugepage") {
            Backing::HugeTlb
        } else if is_shared_memory(name) {
            Backing::Shared
        } else if name.starts_with(b"/") || permissions.ends_with(b"s") {
            Backing::File
        } else {
            Backing::Anonymous
        };
        match found.last_mut() {
            Some(last) if last.end == range.0 && last.backing == backing => last.end = range.1,
            _ => found.push(Range {
                start: range.0,
                end: range.1,
                backing,
            }),
        }
    }
    found
}

/// A stream of numbers that is the same for the same seed (SplitMix64).
#[derive(Clone, Copy, Debug)]
pub struct Draws(u64);

impl Draws {
    /// The stream of that seed.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// From 0 to below `limit`; 0 for 0.
    fn below(&mut self, limit: u64) -> u64 {
        ((u128::from(self.next()) * u128::from(limit)) >> 64) as u64
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Found {
    cell: usize,
    address: u64,
    node: u32,
    backing: Backing,
}

/// What sampling found.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Sample {
    /// Share of the memory by node and what backs it; the shares sum to 1.
    pub shares: BTreeMap<(NodeId, Backing), f64>,
    /// Pages asked for.
    pub asked: u64,
    /// Of which in memory.
    pub found: u64,
    /// Pages in memory that the pages found stand for.
    pub pages: f64,
    /// Half of the 95 % interval of a node's share.
    pub error: f64,
    /// Share of each node's memory on large pages.
    pub huge: BTreeMap<NodeId, f64>,
}

/// Asks the kernel for the nodes of pages: one status per address.
pub trait Ask {
    /// Fills `statuses` in the order of `addresses`.
    ///
    /// # Errors
    /// [`NumaError`].
    fn ask(&mut self, addresses: &[u64], statuses: &mut Vec<PageStatus>) -> Result<(), NumaError>;
    /// Whether the page lies on a large page; `None` if that cannot be known.
    fn is_huge(&mut self, address: u64) -> Option<bool>;
}

struct Live {
    process: i32,
    call: PageCall,
    pagemap: Option<Pagemap>,
    states: Vec<PieceState>,
}

impl Ask for Live {
    fn ask(&mut self, addresses: &[u64], statuses: &mut Vec<PageStatus>) -> Result<(), NumaError> {
        statuses.clear();
        statuses.extend_from_slice(self.call.nodes_of(self.process, addresses)?);
        Ok(())
    }

    fn is_huge(&mut self, address: u64) -> Option<bool> {
        let pagemap = self.pagemap.as_mut()?;
        pagemap
            .piece_states(address / PIECE * PIECE, 1, &mut self.states)
            .ok()?;
        self.states.first().map(|state| *state == PieceState::Huge)
    }
}

struct Cells<'r> {
    ranges: &'r [Range],
    before: Vec<u64>,
    page: u64,
    pages: u64,
    per_cell: u64,
}

impl<'r> Cells<'r> {
    fn new(ranges: &'r [Range], page: u64) -> Self {
        let mut before = Vec::with_capacity(ranges.len());
        let mut pages: u64 = 0;
        for range in ranges {
            before.push(pages);
            pages = pages.saturating_add((range.end - range.start) / page.max(1));
        }
        Self {
            ranges,
            before,
            page,
            pages,
            per_cell: pages.div_ceil(CELLS_MAX).max(CELL_PAGES_MIN),
        }
    }

    fn count(&self) -> usize {
        self.pages.div_ceil(self.per_cell) as usize
    }

    fn pages_of(&self, cell: usize) -> u64 {
        let start = cell as u64 * self.per_cell;
        self.pages.saturating_sub(start).min(self.per_cell)
    }

    fn address(&self, cell: usize, page: u64) -> Option<(u64, Backing)> {
        let index = cell as u64 * self.per_cell + page;
        let at = self.before.partition_point(|b| *b <= index).checked_sub(1)?;
        let (range, before) = (self.ranges.get(at)?, self.before.get(at)?);
        Some((range.start + (index - before) * self.page, range.backing))
    }
}

/// How far a sample goes.
#[derive(Clone, Copy, Debug)]
pub struct Depth {
    /// No call begins after this time.
    pub budget: Duration,
    /// Most rounds: one is enough for the share of large pages.
    pub rounds: u32,
}

/// Samples the memory in these ranges until the error is small enough, or the depth or the most pages are reached.
///
/// # Errors
/// [`NumaError`] of the first call that failed.
pub fn sample(
    ranges: &[Range],
    page: Bytes,
    ask: &mut dyn Ask,
    draws: &mut Draws,
    depth: Depth,
) -> Result<Sample, NumaError> {
    let begun = Instant::now();
    let cells = Cells::new(ranges, page.0);
    let count = cells.count();
    let mut asked = vec![0u64; count];
    let mut hits = vec![0u64; count];
    let mut found: Vec<Found> = Vec::new();
    let mut sample = Sample::default();
    let mut statuses = Vec::new();
    let mut batch: Vec<u64> = Vec::with_capacity(PER_CALL);
    let mut told: Vec<(usize, Backing)> = Vec::with_capacity(PER_CALL);
    let mut round = 0;
    'rounds: while count > 0 && sample.asked < ASKED_MAX {
        for (cell, wanted) in allotment(&cells, &asked, &hits, round).into_iter().enumerate() {
            let pages = cells.pages_of(cell);
            for step in 0..wanted {
                // One random page in each equal part of the cell, so that the sample covers it evenly.
                let from = pages * step / wanted;
                let to = (pages * (step + 1) / wanted).max(from + 1);
                let Some((address, backing)) = cells.address(cell, from + draws.below(to - from)) else {
                    continue;
                };
                batch.push(address);
                told.push((cell, backing));
                if batch.len() == PER_CALL {
                    ask.ask(&batch, &mut statuses)?;
                    take(&batch, &told, &statuses, &mut asked, &mut hits, &mut found);
                    batch.clear();
                    told.clear();
                    if begun.elapsed() > depth.budget {
                        break 'rounds;
                    }
                }
            }
        }
        if !batch.is_empty() {
            ask.ask(&batch, &mut statuses)?;
            take(&batch, &told, &statuses, &mut asked, &mut hits, &mut found);
            batch.clear();
            told.clear();
        }
        sample.asked = asked.iter().sum();
        weigh(&cells, &asked, &found, &mut sample);
        round += 1;
        if sample.error <= ERROR_WANTED || round >= depth.rounds || begun.elapsed() > depth.budget {
            break;
        }
    }
    sample.asked = asked.iter().sum();
    weigh(&cells, &asked, &found, &mut sample);
    look_for_huge(&cells, &asked, &found, ask, &mut sample);
    Ok(sample)
}

/// Pages to ask in each cell: evenly at first, later in proportion to the memory that the cell seems to hold.
fn allotment(cells: &Cells<'_>, asked: &[u64], hits: &[u64], round: u32) -> Vec<u64> {
    let weights: Vec<f64> = (0..cells.count())
        .map(|cell| {
            let pages = cells.pages_of(cell) as f64;
            let (n, h) = (
                asked.get(cell).copied().unwrap_or(0) as f64,
                hits.get(cell).copied().unwrap_or(0) as f64,
            );
            // Half a hit for cells without hits: a cell that looks empty is still sampled sometimes.
            if round == 0 {
                pages
            } else {
                pages * (h + 0.5) / (n + 1.0)
            }
        })
        .collect();
    let all: f64 = weights.iter().sum();
    let size = if round == 0 { FIRST_ROUND } else { ROUND } as f64;
    weights
        .iter()
        .enumerate()
        .map(|(cell, weight)| {
            let wanted = (size * weight / all.max(f64::MIN_POSITIVE)).round() as u64;
            // At least once for each cell, or it could not stand for its pages.
            let least = u64::from(round == 0);
            wanted.max(least).min(cells.pages_of(cell))
        })
        .collect()
}

fn take(
    batch: &[u64],
    told: &[(usize, Backing)],
    statuses: &[PageStatus],
    asked: &mut [u64],
    hits: &mut [u64],
    found: &mut Vec<Found>,
) {
    for ((address, (cell, backing)), status) in batch.iter().zip(told).zip(statuses) {
        if let Some(n) = asked.get_mut(*cell) {
            *n += 1;
        }
        if let PageStatus::On(node) = status {
            if let Some(n) = hits.get_mut(*cell) {
                *n += 1;
            }
            found.push(Found {
                cell: *cell,
                address: *address,
                node: *node,
                backing: *backing,
            });
        }
    }
}

/// Pages that each page found in a cell stands for.
fn weight(cells: &Cells<'_>, asked: &[u64], cell: usize) -> f64 {
    cells.pages_of(cell) as f64 / asked.get(cell).copied().unwrap_or(0).max(1) as f64
}

fn weigh(cells: &Cells<'_>, asked: &[u64], found: &[Found], sample: &mut Sample) {
    let mut sums: BTreeMap<(NodeId, Backing), f64> = BTreeMap::new();
    let mut by_node: BTreeMap<NodeId, f64> = BTreeMap::new();
    let (mut all, mut squares) = (0.0, 0.0);
    for page in found {
        let weight = weight(cells, asked, page.cell);
        *sums.entry((NodeId(page.node), page.backing)).or_default() += weight;
        *by_node.entry(NodeId(page.node)).or_default() += weight;
        all += weight;
        squares += weight * weight;
    }
    sample.found = found.len() as u64;
    if all <= 0.0 {
        sample.error = 1.0;
        return;
    }
    sums.values_mut().for_each(|sum| *sum /= all);
    sample.pages = all;
    // Number of equally weighted pages with the same precision (Kish).
    let effective = all * all / squares;
    // If all pages lie on one node, "none elsewhere" holds up to three in so many (rule of three).
    let widest = by_node
        .values()
        .map(|sum| {
            let share = sum / all;
            Z95 * (share * (1.0 - share) / effective).sqrt()
        })
        .fold(3.0 / effective, f64::max);
    sample.error = widest.min(1.0);
    sample.shares = sums;
}

fn look_for_huge(cells: &Cells<'_>, asked: &[u64], found: &[Found], ask: &mut dyn Ask, sample: &mut Sample) {
    let step = found.len().div_ceil(HUGE_LOOKS_MAX).max(1);
    let mut seen: BTreeMap<NodeId, (f64, f64)> = BTreeMap::new();
    for page in found.iter().step_by(step) {
        let Some(huge) = ask.is_huge(page.address) else {
            return;
        };
        let weight = weight(cells, asked, page.cell);
        let (sum, all) = seen.entry(NodeId(page.node)).or_default();
        *all += weight;
        if huge {
            *sum += weight;
        }
    }
    sample.huge = seen
        .into_iter()
        .filter(|(_, (_, all))| *all > 0.0)
        .map(|(node, (sum, all))| (node, sum / all))
        .collect();
}

/// The sample scaled to the resident memory of each kind.
fn scale(sample: &Sample, resident: &Resident) -> ProcessMemory {
    let mut memory = ProcessMemory {
        error: sample.error,
        ..ProcessMemory::default()
    };
    let of_node: BTreeMap<NodeId, f64> =
        sample
            .shares
            .iter()
            .fold(BTreeMap::new(), |mut sums, ((node, _), share)| {
                *sums.entry(*node).or_default() += share;
                sums
            });
    for backing in [
        Backing::Anonymous,
        Backing::Shared,
        Backing::File,
        Backing::HugeTlb,
    ] {
        let bytes = backing.resident(resident).0 as f64;
        let own: BTreeMap<NodeId, f64> = sample
            .shares
            .iter()
            .filter(|((_, b), _)| *b == backing)
            .map(|((node, _), share)| (*node, *share))
            .collect();
        let all: f64 = own.values().sum();
        // A kind without a sampled page is small, and is assumed to lie as the rest does.
        let (shares, all) = if all > 0.0 { (&own, all) } else { (&of_node, 1.0) };
        for (node, share) in shares {
            *backing.place(memory.nodes.entry(*node).or_default()) += Bytes((bytes * share / all) as u64);
        }
    }
    for (node, on) in &mut memory.nodes {
        let huge = sample.huge.get(node).copied().unwrap_or(0.0);
        let small = on.total().saturating_sub(on.hugetlb);
        on.huge = on.hugetlb + Bytes((small.0 as f64 * huge) as u64);
    }
    memory
}

/// How a process is read.
#[derive(Clone, Copy, Debug)]
pub struct Reading {
    /// Resident memory up to which a process is counted whole.
    pub exact_max: Bytes,
    /// How long sampling may take.
    pub budget: Duration,
    /// Seed of the random pages.
    pub seed: u64,
    /// Whether large pages may be in use on this host; otherwise they are not looked for.
    pub huge: bool,
}

/// Reason why the memory of a process is not known by node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MemoryError {
    /// It ended.
    #[error("it ended")]
    Vanished,
    /// `numa_maps` is there but may not be read.
    #[error("/proc/PID/numa_maps may not be read")]
    Denied,
    /// The kernel reports nothing by node: it is built without NUMA.
    #[error("the kernel is built without NUMA (no /proc/PID/numa_maps)")]
    NoNuma,
    /// Sampling failed.
    #[error("asking for the nodes of pages: {0}")]
    Sampling(NumaError),
    /// Its list of mappings is longer than the limit for one reading.
    #[error("/proc/PID/maps is longer than {MAPS_MAX} bytes")]
    TooLong,
}

/// Reads the memory of a process by node. It may block on the process's `mmap_lock`, so run it in the reader thread.
///
/// # Errors
/// [`MemoryError`].
pub fn read(
    root: &Root,
    process: ProcessId,
    resident: &Resident,
    how: &Reading,
) -> Result<ProcessMemory, MemoryError> {
    let page = crate::topology::page_size(root);
    let directory =
        Directory::open(root, &format!("/proc/{}", process.pid)).map_err(|_| MemoryError::Vanished)?;
    match directory.open_file(c"numa_maps") {
        Ok(_) => {}
        Err(rustix::io::Errno::NOENT) if directory.open_file(c"stat").is_ok() => {
            return Err(MemoryError::NoNuma);
        }
        Err(rustix::io::Errno::ACCESS | rustix::io::Errno::PERM) => return Err(MemoryError::Denied),
        Err(_) => return Err(MemoryError::Vanished),
    }
    let mut buffer = Vec::new();
    // Reading a captured process holds nobody up.
    let small = resident.total() <= how.exact_max || !root.is_live();
    let mut counted = if small {
        let text = read_of(root, process, "numa_maps", &mut buffer, MAPS_MAX).ok_or(MemoryError::Vanished)?;
        text.whole().map(|text| parse_numa_maps(text, page))
    } else {
        None
    };
    if !root.is_live() {
        return counted.ok_or(MemoryError::Vanished);
    }
    // numa_maps does not distinguish large pages, so a sample finds them.
    if counted.is_none() || how.huge {
        let text = read_of(root, process, "maps", &mut buffer, MAPS_MAX).ok_or(MemoryError::Vanished)?;
        let ranges = parse_maps(text.whole().ok_or(MemoryError::TooLong)?);
        let mut live = Live {
            process: process.pid,
            call: PageCall::default(),
            pagemap: how
                .huge
                .then(|| Pagemap::open(&root.path("/proc"), process.pid).ok())
                .flatten(),
            states: Vec::new(),
        };
        let depth = Depth {
            budget: how.budget,
            rounds: if counted.is_some() { 1 } else { u32::MAX },
        };
        let sampled = sample(&ranges, page, &mut live, &mut Draws::new(how.seed), depth);
        match (&mut counted, sampled) {
            (Some(counted), Ok(sampled)) => {
                for (node, on) in &mut counted.nodes {
                    let huge = sampled.huge.get(node).copied().unwrap_or(0.0);
                    let rest = on.total().saturating_sub(on.hugetlb);
                    on.huge = on.hugetlb + Bytes((rest.0 as f64 * huge) as u64);
                }
            }
            // The count stands. Its share of large pages is then unknown and taken as zero.
            (Some(_), Err(_)) => {}
            (None, Ok(sampled)) if sampled.found > 0 => {
                let mut memory = scale(&sampled, resident);
                match walks::policy(root, process, 1, Instant::now() + how.budget) {
                    Policy::Chosen(policy) => {
                        memory.policies.insert(policy, resident.total());
                    }
                    Policy::Hidden => memory.policy_hidden = true,
                    Policy::Default => {}
                }
                counted = Some(memory);
            }
            (None, Ok(_)) => return Err(MemoryError::Vanished),
            (None, Err(NumaError::NoProcess)) => return Err(MemoryError::Vanished),
            (None, Err(NumaError::NotPermitted)) => return Err(MemoryError::Denied),
            (None, Err(NumaError::NotSupported)) => return Err(MemoryError::NoNuma),
            (None, Err(error)) => return Err(MemoryError::Sampling(error)),
        }
    }
    counted.ok_or(MemoryError::Vanished)
}

/// Pages of one range by node, estimated by a sample.
///
/// # Errors
/// [`NumaError`] of the first call that failed.
pub fn pages_by_node(
    process: ProcessId,
    range: Range,
    seed: u64,
    budget: Duration,
) -> Result<Vec<(u32, u64)>, NumaError> {
    let mut live = Live {
        process: process.pid,
        call: PageCall::default(),
        pagemap: None,
        states: Vec::new(),
    };
    let depth = Depth {
        budget,
        rounds: u32::MAX,
    };
    let page = Bytes(rustix::param::page_size() as u64);
    let sampled = sample(&[range], page, &mut live, &mut Draws::new(seed), depth)?;
    let pages = |share: f64| (share * sampled.pages).round() as u64;
    let shares = sampled.shares.iter();
    Ok(shares.map(|((node, _), share)| (node.0, pages(*share))).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const NUMA_MAPS: &[u8] = b"5628057b0000 default file=/usr/bin/head mapped=10 mapmax=3 N0=8 N1=2 kernelpagesize_kB=4\n\
5628057bc000 default file=/usr/lib/a\\040b.so anon=4 dirty=4 mapped=8 active=0 N0=6 N1=2 kernelpagesize_kB=4\n\
562806000000 bind:1 heap anon=100 dirty=100 N1=100 kernelpagesize_kB=4\n\
7f0000000000 default file=/SYSV0052e2c1\\040(deleted) mapped=50 N0=20 N2=30 kernelpagesize_kB=4\n\
7f1000000000 interleave:0-1 file=/anon_hugepage\\040(deleted) huge anon=3 dirty=3 N0=2 N1=1 kernelpagesize_kB=2048\n\
7f2000000000 prefer (many):0-1 anon=1 dirty=1 N3=1 kernelpagesize_kB=64\n\
7f2100000000 default\n\
7ffc00000000 default stack anon=3 dirty=3 N0=3 kernelpagesize_kB=4\n\
rubbish\n";

    #[test]
    fn numa_maps_are_counted_by_node_and_kind() {
        let memory = parse_numa_maps(NUMA_MAPS, Bytes(4096));
        let kib = |n: u64| Bytes::from_kib(n);
        let zero = memory.nodes[&NodeId(0)];
        // Of 8 pages of the library 4 were written: 3 of the 6 on node 0 are taken for private.
        assert_eq!(zero.anonymous, kib(4 * (3 + 3)));
        assert_eq!(zero.file, kib(4 * (8 + 3)));
        assert_eq!(zero.shared, kib(4 * 20));
        assert_eq!(zero.hugetlb, kib(2 * 2048));
        assert_eq!(zero.huge, kib(2 * 2048));
        assert_eq!(memory.nodes[&NodeId(1)].anonymous, kib(4 * 101));
        assert_eq!(memory.nodes[&NodeId(2)].shared, kib(120));
        assert_eq!(memory.nodes[&NodeId(3)].anonymous, kib(64));
        // As numastat -p adds up: every page of every line.
        assert_eq!(memory.total(), kib(4 * (10 + 8 + 100 + 50 + 3) + 3 * 2048 + 64));
        let policies: Vec<(&str, u64)> = memory
            .policies
            .iter()
            .map(|(p, b)| (p.as_str(), b.0 / 1024))
            .collect();
        assert_eq!(
            policies,
            [
                ("bind:1", 400),
                ("interleave:0-1", 6144),
                ("prefer(many):0-1", 64)
            ]
        );
        assert_eq!(memory.error, 0.0);
    }

    #[test]
    fn ranges_leave_out_what_nobody_may_touch() {
        let text = b"00400000-00401000 r-xp 00000000 fe:00 77 /usr/bin/a\n\
7f0000000000-7f0000100000 rw-p 00000000 00:00 0 \n\
7f0000100000-7f0000200000 rw-p 00000000 00:00 0 [anon:heap]\n\
7f0000200000-7f1000000000 ---p 00000000 00:00 0 \n\
7f1000000000-7f1000200000 rw-s 00000000 00:01 5 /memfd:x (deleted)\n\
7f2000000000-7f2000200000 rw-s 00000000 00:0f 5 /anon_hugepage (deleted)\n\
7ffc00000000-7ffc00004000 r--p 00000000 00:00 0 [vvar]\n\
7ffc00004000-7ffc00006000 r-xp 00000000 00:00 0 [vdso]\n\
broken";
        let found: Vec<(u64, Backing)> = parse_maps(text)
            .iter()
            .map(|r| ((r.end - r.start) / 4096, r.backing))
            .collect();
        assert_eq!(
            found,
            [
                (1, Backing::File),
                (512, Backing::Anonymous),
                (512, Backing::Shared),
                (512, Backing::HugeTlb)
            ]
        );
    }

    #[test]
    fn status_tells_amounts_and_what_is_allowed() {
        let status = b"Name:\tx\nVmRSS:\t 60 kB\nRssAnon:\t 10 kB\nRssFile:\t 30 kB\nRssShmem:\t 20 kB\n\
HugetlbPages:\t 2048 kB\nCpus_allowed_list:\t0-3\nMems_allowed:\t1\nMems_allowed_list:\t0\n";
        let resident = Resident::parse(status).unwrap();
        assert_eq!(resident.total(), Bytes::from_kib(60 + 2048));
        assert_eq!(resident.cpus_allowed, Some(vec![0, 1, 2, 3]));
        assert_eq!(resident.nodes_allowed, Some(vec![0]));
        assert_eq!(Resident::parse(b"Name:\tkthreadd\n"), None);
        let old = Resident::parse(b"VmRSS:\t 60 kB\n").unwrap();
        assert_eq!((old.anonymous, old.nodes_allowed), (Bytes::from_kib(60), None));
    }

    /// Memory laid out by a rule, with the truth at hand.
    struct Laid<F: Fn(u64) -> PageStatus> {
        rule: F,
        calls: usize,
    }
    impl<F: Fn(u64) -> PageStatus> Ask for Laid<F> {
        fn ask(&mut self, addresses: &[u64], statuses: &mut Vec<PageStatus>) -> Result<(), NumaError> {
            self.calls += 1;
            statuses.clear();
            statuses.extend(addresses.iter().map(|a| (self.rule)(*a)));
            Ok(())
        }
        fn is_huge(&mut self, address: u64) -> Option<bool> {
            Some((address >> 21) % 2 == 0)
        }
    }

    const GIB: u64 = 1 << 30;
    const LONG: Depth = Depth {
        budget: Duration::from_secs(60),
        rounds: u32::MAX,
    };

    fn share(sample: &Sample, node: u32) -> f64 {
        let of = |((n, _), share): (&(NodeId, Backing), &f64)| if n.0 == node { *share } else { 0.0 };
        sample.shares.iter().map(of).sum()
    }

    fn anonymous(start: u64, length: u64) -> Range {
        Range {
            start,
            end: start + length,
            backing: Backing::Anonymous,
        }
    }

    #[test]
    fn a_hundred_gibibytes_are_sampled_within_one_percent() {
        // 70 GiB on node 0, then 30 on node 1, in pieces of 1 GiB each third of which is empty.
        let rule = |address: u64| {
            if address / GIB % 3 == 2 {
                PageStatus::Absent
            } else if address < 70 * GIB {
                PageStatus::On(0)
            } else {
                PageStatus::On(1)
            }
        };
        let truth = {
            let of = |node| (0..100).filter(|g| rule(g * GIB) == PageStatus::On(node)).count() as f64;
            of(1) / (of(0) + of(1))
        };
        let mut covered = 0;
        for seed in 0..40 {
            let mut laid = Laid { rule, calls: 0 };
            let ranges = [anonymous(0, 100 * GIB)];
            let found = sample(&ranges, Bytes(4096), &mut laid, &mut Draws::new(seed), LONG).unwrap();
            assert!(
                found.error <= ERROR_WANTED && found.asked <= ASKED_MAX,
                "{found:?}"
            );
            let off = (share(&found, 1) - truth).abs();
            covered += u32::from(off <= found.error);
            assert!(off < 0.01, "seed {seed}: {off}");
            assert!(laid.calls < 40, "{}", laid.calls);
            let huge = found.huge[&NodeId(0)];
            assert!((huge - 0.5).abs() < 0.12, "{huge}");
        }
        // At least 95 % of the intervals hold the truth; even sampling makes it more.
        assert!(covered >= 36, "{covered} of 40");
    }

    #[test]
    fn memory_in_a_vast_reservation_is_found() {
        // 8 GiB in the middle of 4 TiB, half on each of two nodes; and a range without anything.
        let at = 2048 * GIB;
        let rule = |address: u64| match address {
            a if a < at || a >= at + 8 * GIB => PageStatus::Absent,
            a if a < at + 4 * GIB => PageStatus::On(0),
            _ => PageStatus::On(1),
        };
        let ranges = [anonymous(0, 4096 * GIB), anonymous(8192 * GIB, GIB)];
        let mut laid = Laid { rule, calls: 0 };
        let found = sample(&ranges, Bytes(4096), &mut laid, &mut Draws::new(1), LONG).unwrap();
        assert!(
            (share(&found, 0) - 0.5).abs() <= found.error.max(0.02),
            "{found:?}"
        );
        assert!(found.error < 0.02, "{}", found.error);
    }

    #[test]
    fn nothing_found_is_said_and_one_node_is_never_certain() {
        let ranges = [anonymous(0, GIB)];
        let none = sample(
            &ranges,
            Bytes(4096),
            &mut Laid {
                rule: |_| PageStatus::Absent,
                calls: 0,
            },
            &mut Draws::new(1),
            LONG,
        )
        .unwrap();
        assert_eq!((none.found, none.error), (0, 1.0));
        let one = sample(
            &ranges,
            Bytes(4096),
            &mut Laid {
                rule: |_| PageStatus::On(3),
                calls: 0,
            },
            &mut Draws::new(1),
            LONG,
        )
        .unwrap();
        assert_eq!(share(&one, 3), 1.0);
        assert!(one.error > 0.0 && one.error < 0.001, "{}", one.error);
        assert_eq!(
            sample(
                &[],
                Bytes(4096),
                &mut Laid {
                    rule: |_| PageStatus::On(0),
                    calls: 0
                },
                &mut Draws::new(1),
                LONG
            )
            .unwrap()
            .asked,
            0
        );
    }

    #[test]
    fn the_same_seed_asks_for_the_same_pages() {
        let rule = |address: u64| PageStatus::On((address / 4096 % 3) as u32);
        let of = |seed| {
            let mut laid = Laid { rule, calls: 0 };
            sample(
                &[anonymous(0, 3 * GIB)],
                Bytes(4096),
                &mut laid,
                &mut Draws::new(seed),
                LONG,
            )
            .unwrap()
        };
        assert_eq!(of(7), of(7));
        assert_ne!(of(7).shares, of(8).shares);
    }

    #[test]
    fn a_sample_is_scaled_to_what_is_resident_of_each_kind() {
        let mut taken = Sample {
            error: 0.01,
            ..Sample::default()
        };
        taken.shares.insert((NodeId(0), Backing::Anonymous), 0.3);
        taken.shares.insert((NodeId(1), Backing::Anonymous), 0.1);
        taken.shares.insert((NodeId(1), Backing::Shared), 0.6);
        taken.huge.insert(NodeId(1), 0.5);
        let resident = Resident {
            anonymous: Bytes(4000),
            shared: Bytes(1000),
            file: Bytes(100),
            ..Resident::default()
        };
        let memory = scale(&taken, &resident);
        assert_eq!(memory.nodes[&NodeId(0)].anonymous, Bytes(3000));
        assert_eq!(memory.nodes[&NodeId(1)].anonymous, Bytes(1000));
        assert_eq!(memory.nodes[&NodeId(1)].shared, Bytes(1000));
        // No page of a file was drawn: taken to lie as everything else does.
        assert_eq!(memory.nodes[&NodeId(0)].file, Bytes(30));
        assert_eq!(memory.nodes[&NodeId(1)].huge, Bytes((1000 + 1000 + 70) / 2));
        assert_eq!(memory.error, 0.01);
    }

    proptest! {
        #[test]
        fn no_bytes_make_a_parser_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let _ = parse_numa_maps(&bytes, Bytes(4096));
            let _ = parse_maps(&bytes);
            let _ = Resident::parse(&bytes);
        }

        #[test]
        fn a_cut_at_any_place_counts_no_more_than_the_whole(cut in 0..NUMA_MAPS.len()) {
            let whole = parse_numa_maps(NUMA_MAPS, Bytes(4096)).total();
            // A line that was cut inside its page size is taken in base pages, never more than it is.
            prop_assert!(parse_numa_maps(&NUMA_MAPS[..cut], Bytes(4096)).total() <= whole);
        }

        #[test]
        fn any_ranges_can_be_sampled(
            parts in proptest::collection::vec((1u64..2000, 0u64..5000), 0..30),
            seed in any::<u64>(),
        ) {
            let mut at = 4096;
            let mut ranges = Vec::new();
            for (pages, gap) in parts {
                at += gap * 4096;
                ranges.push(anonymous(at, pages * 4096));
                at += pages * 4096;
            }
            let held = ranges.clone();
            let mut laid = Laid {
                rule: move |address| {
                    assert!(held.iter().any(|r| (r.start..r.end).contains(&address)), "outside");
                    PageStatus::On(u32::from(address % 8192 == 0))
                },
                calls: 0,
            };
            let found = sample(&ranges, Bytes(4096), &mut laid, &mut Draws::new(seed), LONG).unwrap();
            let all: f64 = found.shares.values().sum();
            prop_assert!(ranges.is_empty() || (all - 1.0).abs() < 1e-9);
            prop_assert_eq!(found.found, found.asked);
        }
    }
}
