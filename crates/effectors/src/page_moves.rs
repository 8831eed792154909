//! Moves pages between NUMA nodes in paced steps, and back to the nodes where they were found. Two effectors use it:
//! [`crate::page_placement`], and [`crate::thread_placement`] for memory that goes along with threads.
//!
//! The **plan** is in the journal before anything moves: for each process and pair of nodes, the pages to move
//! ([`crate::page_blocks`]). A plan has at most 32,768 pieces of 2 MiB and takes at most [`SURVEY_MAX`]. The next plan
//! takes the rest. **Apply** calls `move_pages` for some pages at a time: private memory first, the processes taking
//! turns by 2 MiB. One step is a tenth of the plan. Before each step the target nodes must have free memory for all of
//! it. **Undo** moves the same pages back to the node where each was found. Both end by checking every page.
//!
//! Left alone: hugetlbfs, files, and pages shared with a forked process. [`PlatformError::Conflict`] answers a memory
//! policy (`numactl`, `mbind`) and allowed nodes (`cpuset.mems`) that differ from homeostat's. Pages that somebody else
//! moved since (`migratepages`, numad, automatic NUMA balancing) stay. If these are more than half, Apply ends in a
//! conflict. Lasting interleaving is impossible from outside: `mbind`, `set_mempolicy` and `set_mempolicy_home_node`
//! act on the caller only. A program can be started under `numactl --interleave`.

use crate::identity::{
    NAMESPACES, ProcessStat, by_process, denied, malformed, namespaces, nanoseconds, process_key, read_error,
};
use crate::pacing::{PAUSE_MAX, Pressure, Slice};
use crate::page_blocks::Block;
use crate::thread_placement::POLICY_HIDDEN;
use crate::{pacing, page_blocks};
use homeostat_kernel::memory::{BASE_PAGE, PAGES_PER_PIECE, PIECE, PageFrame, Pagemap, PieceState};
use homeostat_kernel::numa::{NumaError, PageCall, PageStatus};
use homeostat_kernel::{Root, bytes, files, numa};
use homeostat_model::action::Target;
use homeostat_model::{
    Action, ActionId, Bytes, Direction, MemoryKind, ProcessId, Progress, UndoRecord, WorkloadId,
};
use homeostat_platform::PlatformError;
use homeostat_sensors::locality::memory;
use homeostat_sensors::locality::memory::Backing;
use homeostat_sensors::reader::Reader;
use homeostat_sensors::{numa_maps, walks};
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

/// Most pieces of 2 MiB in one action: 64 GiB. The record takes up to 140 bytes for each.
const BLOCKS_PER_ACTION_MAX: usize = 32 * 1024;
/// Most processes in one action: the ones with most memory elsewhere.
const PROCESSES_PER_ACTION_MAX: usize = 128;
/// Longest search for mappings, and again for pages, before the plan is taken as it is. The loop waits for it.
const SURVEY_MAX: Duration = Duration::from_millis(500);
const MAPS_PATIENCE: Duration = Duration::from_secs(1);
const SAMPLING_MAX: Duration = Duration::from_millis(30);
/// Pieces looked up together while planning: 64 MiB, about 0.1 ms of page-table walk.
const BLOCKS_PER_LOOK: u64 = 32;
/// Pages in one moving call. The kernel read-locks the address space meanwhile: some 3 µs a page, so about 0.2 ms.
const PAGES_PER_MOVE: usize = 64;
/// Attempts for the pages of a piece that are in use.
const ATTEMPTS_MAX: u8 = 5;
const STEPS: usize = 10;
/// Pauses for want of free memory at the node before the rest of the plan stays where it is.
const ROOM_PAUSES_MAX: u8 = 8;
const PAGES: u64 = PAGES_PER_PIECE as u64;
/// Free blocks of large-page size that stay at a node, because others allocate meanwhile.
const LARGE_SPARE: u64 = 4;
/// Least bytes per second if large pages move: one large page then causes a pause of two seconds.
const LARGE_RATE_MIN: u64 = 1024 * 1024;
const LARGE_PAGES: &str = "large_pages";
/// Share of the node that stays free, as a divisor, unless the action says otherwise.
const KEEP_FREE_SHARE: u64 = 50;

// Reasons why a page is left where it is. Stable: they appear in histories.
const ENDED: &str = "process ended";
const NO_ROOM: &str = "no free memory at the node";
const MOVED_BY_OTHERS: &str = "moved by somebody else";
const NOT_PRESENT: &str = "not in memory any more";
const LARGE: &str = "on a large page now";
const NO_LARGE_ROOM: &str = "no free large page at the node";
const DIVIDED: &str = "moved, but the kernel divided the large page";
const SHARED: &str = "shared with a forked process";
const IN_USE: &str = "in use at every attempt";
const NODE_GONE: &str = "the node is offline";
const NODE_FORBIDDEN: &str = "the cpuset does not allow the node any more";

pub(super) struct Wanted {
    pub(super) bytes: Bytes,
    pub(super) shared: bool,
    /// The target nodes, ascending. Memory on none of them is dealt out to them by pieces of 2 MiB.
    pub(super) homes: Vec<u32>,
    /// The target node of processes that have one of their own.
    pub(super) own_home: BTreeMap<ProcessId, u32>,
}

impl Wanted {
    fn homes_of(&self, id: ProcessId) -> &[u32] {
        self.own_home.get(&id).map_or(&self.homes, std::slice::from_ref)
    }

    /// The nodes as the end of a sentence.
    pub(super) fn names(&self) -> String {
        let list: Vec<String> = self.all().iter().map(u32::to_string).collect();
        let word = if list.len() == 1 { "node" } else { "nodes" };
        format!("{word} {}", list.join(","))
    }

    fn all(&self) -> BTreeSet<u32> {
        self.homes.iter().chain(self.own_home.values()).copied().collect()
    }
}

/// Plans moves, makes them and takes them back.
///
/// Exact: contents and addresses never change. After an undo each page of the plan that is in memory lies where it was
/// found. The node must be there, allowed by the process's cpuset, and have room. Else the undo stays owed. Not exact:
/// * The page frame on the node is another one.
/// * A page that the program freed and allocated again at the same address counts as the old one.
/// * Pages since merged into a large page go back together if all came from one node, and stay otherwise.
/// * Pages that Apply could not move, but that came to the target node by themselves, go back, too.
/// * The kernel moves a large folio whole, even if the plan names only a part of it.
pub(super) struct PageMoves {
    root: Root,
    tasks: BTreeMap<ActionId, Task>,
    /// The state in which each action was left.
    left: BTreeMap<ActionId, Direction>,
    reader: Reader,
}

impl PageMoves {
    pub(super) fn new(root: Root) -> Self {
        Self {
            root,
            tasks: BTreeMap::new(),
            left: BTreeMap::new(),
            reader: Reader::default(),
        }
    }

    /// Finds where the memory of the processes lies. Bounded in time; changes nothing.
    ///
    /// # Errors
    /// `Conflict` when somebody chose where memory lies; `Busy` when a process cannot be checked now; `Denied`.
    pub(super) fn look(&mut self, members: &[ProcessId]) -> Result<Seen, PlatformError> {
        let begun = Instant::now();
        let mut seen = Seen::default();
        for id in members {
            if begun.elapsed() >= SURVEY_MAX {
                seen.unseen += 1;
                continue;
            }
            match self.look_at(*id)? {
                Some(process) => seen.processes.push(process),
                None => seen.ended += 1,
            }
        }
        Ok(seen)
    }

    /// The memory of a process that may be moved. `None` when it ended.
    fn look_at(&mut self, id: ProcessId) -> Result<Option<ProcessSeen>, PlatformError> {
        let stat = match ProcessStat::read(&self.root, id) {
            Ok(stat) if stat.start_ticks == id.start_ticks && !stat.ended => stat,
            Ok(_) | Err(PlatformError::Vanished { .. }) => return Ok(None),
            Err(error) => return Err(error),
        };
        let nodes = allowed_nodes(&self.root, id)?;
        let root = self.root.clone();
        let (maps, policy, mut by_start) = self
            .reader
            .run(id.pid, MAPS_PATIENCE, move || {
                let deadline = Instant::now() + SURVEY_MAX;
                let (maps, _) = walks::mappings(&root, id).unwrap_or_default();
                let shown = walks::numa_maps(&root, id, &maps, usize::MAX, deadline).unwrap_or_default();
                let mut policy = (shown.count == 0 && !maps.is_empty()).then(|| POLICY_HIDDEN.to_owned());
                let mut nodes = BTreeMap::new();
                for area in numa_maps::areas(&shown.text) {
                    let chosen = area.chosen_policy();
                    policy = policy.or_else(|| {
                        chosen.map(|policy| format!("{policy} (numactl, or the program's own choice)"))
                    });
                    if !area.is_hugetlb && !area.nodes.is_empty() {
                        nodes.insert(area.start, area.nodes);
                    }
                }
                // Mappings too large to be counted are sampled.
                for mapping in maps.iter().skip(shown.count) {
                    let backing = match mapping.kind() {
                        Some(MemoryKind::Anonymous) => Backing::Anonymous,
                        Some(MemoryKind::Shared) => Backing::Shared,
                        Some(MemoryKind::File | MemoryKind::HugeTlb) | None => continue,
                    };
                    if policy.is_some() || Instant::now() >= deadline {
                        break;
                    }
                    let range = memory::Range {
                        start: mapping.start,
                        end: mapping.end,
                        backing,
                    };
                    let seed = mapping.start ^ id.start_ticks;
                    let sampled = memory::pages_by_node(id, range, seed, SAMPLING_MAX).unwrap_or_default();
                    if !sampled.is_empty() {
                        nodes.insert(mapping.start, sampled);
                    }
                }
                (maps, policy, nodes)
            })
            .map_err(|e| PlatformError::Busy {
                what: format!("looking where the memory of process {id} lies"),
                why: e.to_string(),
            })?;
        if let Some(found) = policy {
            return Err(PlatformError::Conflict {
                what: format!("memory policy of process {id}"),
                expected: "default".into(),
                found,
            });
        }
        let mut process = ProcessSeen {
            id,
            image: stat.image,
            nodes,
            mappings: Vec::new(),
        };
        for mapping in maps {
            let Some(nodes) = by_start.remove(&mapping.start) else {
                continue;
            };
            let shared = match mapping.kind() {
                Some(MemoryKind::Anonymous) => false,
                Some(MemoryKind::Shared) => true,
                Some(MemoryKind::File | MemoryKind::HugeTlb) | None => continue,
            };
            process.mappings.push(Mapping {
                start: mapping.start,
                end: mapping.end,
                segment: shared.then(|| (mapping.device.clone(), mapping.inode)),
                nodes,
            });
        }
        // Checked last: if the process is still the same one, everything read belongs to it.
        match ProcessStat::read(&self.root, id) {
            Ok(stat) if stat.start_ticks == id.start_ticks && stat.image == process.image => {
                Ok(Some(process))
            }
            Ok(_) | Err(PlatformError::Vanished { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// The plan: everything needed to move and to undo. Changes nothing.
    ///
    /// # Errors
    /// `Busy` when no node has room; `Vanished` when all processes have ended; `Rejected` when there is no such node.
    pub(super) fn survey(
        &mut self,
        action: &Action,
        seen: &Seen,
        settings: &Settings,
        wanted: &Wanted,
    ) -> Result<Survey, PlatformError> {
        let mut room = 0;
        for home in wanted.all() {
            let node = Node::read(&self.root, home)?;
            room = room.max(node.free.saturating_sub(settings.floor(&node)));
        }
        if seen.processes.is_empty() {
            return Err(vanished(&action.workload));
        }
        if room < PIECE {
            return Err(PlatformError::Busy {
                what: format!("moving pages to {}", wanted.names()),
                why: format!("only {} are free there beyond what shall stay free", Bytes(room)),
            });
        }
        let mut processes: Vec<Regions> = seen.processes.iter().map(|p| Regions::of(p, wanted)).collect();
        let private: u64 = processes.iter().map(|p| p.private_pages).sum();
        let most = (private as f64 * settings.private_share_max) as u64;
        let frames = FrameNodes::read(&self.root);
        let mut plan = Planner {
            root: &self.root,
            wanted,
            large: settings.large,
            left: wanted.bytes.0 / BASE_PAGE,
            blocks: 0,
            deadline: Instant::now() + SURVEY_MAX,
            call: PageCall::default(),
            frames,
            huge: 0,
            unseen: 0,
        };
        processes.sort_by_key(|p| (std::cmp::Reverse(p.away(false)), p.seen.id));
        processes.truncate(PROCESSES_PER_ACTION_MAX);
        let mut found = BTreeMap::from([(NAMESPACES.to_owned(), namespaces(&self.root))]);
        let mut planned = plan.private(&processes, most, &mut found)?;
        planned += plan.shared(&processes, &mut found)?;
        for (name, count) in [
            ("planned_bytes", planned * BASE_PAGE),
            ("huge_bytes_left", plan.huge * BASE_PAGE),
            ("unseen_bytes", plan.unseen * BASE_PAGE),
            ("processes_ended", seen.ended),
            ("processes_unseen", seen.unseen),
        ] {
            if count > 0 {
                found.insert(name.to_owned(), count.to_string());
            }
        }
        for process in &processes {
            let id = process.seen.id;
            if KINDS
                .iter()
                .any(|kind| found.contains_key(&process_key(kind.name, id)))
            {
                found.insert(process_key("image", id), process.seen.image.clone());
                found.insert(process_key("nodes", id), process.seen.nodes.clone());
            }
        }
        Ok(Survey {
            planned: Bytes(planned * BASE_PAGE),
            huge_left: Bytes(plan.huge * BASE_PAGE),
            found,
        })
    }

    pub(super) fn has_plan(record: &UndoRecord) -> bool {
        let of = |kind: &Kind| by_process(record, kind.name).next().is_some();
        KINDS.iter().any(of)
    }

    /// Next slice towards the named state. Boot and namespaces are those of the record.
    ///
    /// # Errors
    /// As [`crate::Effector::advance`].
    pub(super) fn advance(
        &mut self,
        record: &UndoRecord,
        direction: Direction,
        settings: &Settings,
    ) -> Result<Progress, PlatformError> {
        let id = record.action.id;
        if self.tasks.get(&id).is_none_or(|t| t.direction != direction) {
            // From here on the pages are no longer all as the other direction left them.
            let was_left_so = self.left.get(&id) == Some(&direction);
            if !was_left_so {
                self.left.remove(&id);
            }
            let task = Task::new(&self.root, record, direction, settings, was_left_so)?;
            self.tasks.insert(id, task);
        }
        let Some(task) = self.tasks.get_mut(&id) else {
            return Err(unsupported("no task"));
        };
        let outcome = task.advance(&self.root);
        if !matches!(&outcome, Ok(progress) if !progress.done) {
            // After a fault the next call starts over from what the machine shows.
            self.tasks.remove(&id);
        }
        if outcome.is_ok() && !self.tasks.contains_key(&id) {
            self.left.insert(id, direction);
        }
        outcome
    }

    pub(super) fn forget(&mut self, id: ActionId) {
        self.tasks.remove(&id);
        self.left.remove(&id);
    }
}

#[derive(Default)]
pub(super) struct Seen {
    processes: Vec<ProcessSeen>,
    /// Processes that had ended, and processes skipped for lack of time.
    ended: u64,
    unseen: u64,
}

impl Seen {
    /// Private pages of a process by node, as far as they were counted.
    pub(super) fn private_pages(&self, id: ProcessId) -> BTreeMap<u32, u64> {
        let mut by_node = BTreeMap::new();
        let process = self.processes.iter().find(|p| p.id == id);
        let mappings = process.map_or(&[][..], |p| &p.mappings);
        for (node, pages) in mappings
            .iter()
            .filter(|m| m.segment.is_none())
            .flat_map(|m| &m.nodes)
        {
            *by_node.entry(*node).or_default() += pages;
        }
        by_node
    }
}

struct ProcessSeen {
    id: ProcessId,
    image: String,
    nodes: String,
    mappings: Vec<Mapping>,
}

/// One mapping of base pages, large pages included.
struct Mapping {
    start: u64,
    end: u64,
    /// Device and inode of shared memory; `None` for private memory.
    segment: Option<(String, u64)>,
    nodes: Vec<(u32, u64)>,
}

pub(super) struct Survey {
    /// Entries for the undo record.
    pub(super) found: BTreeMap<String, String>,
    pub(super) planned: Bytes,
    /// Memory that stays because it is on large pages.
    pub(super) huge_left: Bytes,
}

/// One kind of pages in a record.
struct Kind {
    name: &'static str,
    shared: bool,
    large: bool,
}

/// All kinds, in the order in which they move.
const KINDS: [Kind; 4] = [
    Kind {
        name: "private",
        shared: false,
        large: false,
    },
    Kind {
        name: "private_large",
        shared: false,
        large: true,
    },
    Kind {
        name: "shared",
        shared: true,
        large: false,
    },
    Kind {
        name: "shared_large",
        shared: true,
        large: true,
    },
];

#[derive(Clone, Debug, PartialEq)]
pub(super) struct Settings {
    slice: Duration,
    duty: f64,
    bytes_per_second: Option<u64>,
    free_memory_min: Option<u64>,
    private_share_max: f64,
    /// Move large pages (2 MiB mappings), too: each whole, by naming its first page. Otherwise they stay.
    large: bool,
}

impl Settings {
    /// Reads the arguments. Names in `beside` belong to the effector itself.
    pub(super) fn parse(action: &Action, beside: &[&str]) -> Result<Self, PlatformError> {
        let mut settings = Self {
            slice: Duration::from_millis(20),
            duty: 0.5,
            bytes_per_second: None,
            free_memory_min: None,
            private_share_max: 1.0,
            large: false,
        };
        for (name, value) in &action.arguments {
            let wrong = |expected: &str| wrong_argument(action, name, expected);
            let share = || value.parse().ok().filter(|s| (0.01..=1.0).contains(s));
            match name.as_str() {
                "slice_ms" => {
                    let ms = value.parse().ok().filter(|ms| (1..=100).contains(ms));
                    settings.slice = Duration::from_millis(ms.ok_or_else(|| wrong("1 to 100 milliseconds"))?);
                }
                "duty" => settings.duty = share().ok_or_else(|| wrong("a share from 0.01 to 1"))?,
                "private_share_max" => {
                    settings.private_share_max = share().ok_or_else(|| wrong("a share from 0.01 to 1"))?;
                }
                "bytes_per_second" => {
                    let rate = value.parse().ok().filter(|rate| *rate >= 65_536);
                    settings.bytes_per_second =
                        Some(rate.ok_or_else(|| wrong("a number of bytes, at least 65536"))?);
                }
                "free_memory_min" => {
                    settings.free_memory_min = Some(value.parse().map_err(|_| wrong("a number of bytes"))?);
                }
                LARGE_PAGES if value == "move" => settings.large = true,
                LARGE_PAGES => return Err(wrong("move")),
                name if beside.contains(&name) => {}
                _ => {
                    return Err(wrong(
                        "slice_ms, duty, bytes_per_second, free_memory_min, private_share_max or large_pages",
                    ));
                }
            }
        }
        // One large page must not cause a pause longer than the longest pause.
        let slow = settings
            .bytes_per_second
            .is_some_and(|rate| rate < LARGE_RATE_MIN);
        if settings.large && slow {
            return Err(wrong_argument(
                action,
                "bytes_per_second",
                "at least 1048576 where large pages are moved",
            ));
        }
        Ok(settings)
    }

    fn floor(&self, node: &Node) -> u64 {
        self.free_memory_min.unwrap_or(node.total / KEEP_FREE_SHARE)
    }

    /// Most bytes in one slice: what the rate allows in its time, so that a burst is never longer than a slice.
    fn bytes_per_slice(&self) -> u64 {
        self.bytes_per_second.map_or(u64::MAX, |rate| {
            ((rate as f64 * self.slice.as_secs_f64()) as u64).max(BASE_PAGE)
        })
    }

    fn pause(&self, slice: &Slice) -> Duration {
        pacing::pause(
            self.duty,
            self.bytes_per_second,
            slice.inside,
            slice.started.elapsed(),
            slice.bytes,
        )
    }
}

pub(super) fn wrong_argument(action: &Action, name: &str, expected: &str) -> PlatformError {
    PlatformError::Rejected {
        what: format!("argument {name} of {}", action.effector),
        value: action.arguments.get(name).cloned().unwrap_or_default(),
        errno: format!("expected {expected}"),
    }
}

struct Node {
    total: u64,
    free: u64,
}

impl Node {
    /// Reads `/sys/devices/system/node/nodeN/meminfo`.
    ///
    /// # Errors
    /// `Rejected` when the node is not online or has no memory.
    fn read(root: &Root, node: u32) -> Result<Self, PlatformError> {
        let rejected = |why: &str| PlatformError::Rejected {
            what: "a node to move pages to".into(),
            value: format!("node {node}"),
            errno: why.to_owned(),
        };
        let path = format!("/sys/devices/system/node/node{node}/meminfo");
        let text = files::bytes(root, &path, files::SMALL_FILE_MAX)
            .ok_or_else(|| rejected("the machine has no such node online"))?;
        let node = Self::parse(&text).ok_or_else(|| PlatformError::Malformed {
            path: root.path(&path),
            line: String::from_utf8_lossy(bytes::lines(&text).next().unwrap_or_default()).into_owned(),
        })?;
        if node.total == 0 {
            return Err(rejected("the node has no memory"));
        }
        Ok(node)
    }

    /// `Node 0 MemFree:  123 kB`.
    fn parse(text: &[u8]) -> Option<Self> {
        let kib = |key: &[u8]| {
            bytes::lines(text).find_map(|line| {
                let mut words = bytes::words(line).skip_while(|word| *word != key).skip(1);
                words.next().and_then(bytes::number)
            })
        };
        Some(Self {
            total: kib(b"MemTotal:")?.saturating_mul(1024),
            free: kib(b"MemFree:")?.saturating_mul(1024),
        })
    }
}

pub(super) fn has_memory(root: &Root, node: u32) -> bool {
    Node::read(root, node).is_ok()
}

/// Free blocks of large-page size or more on a node, counted in large pages. Excludes the zone kept for old devices.
/// `/proc/buddyinfo` shows `Node 0, zone Normal 12 3 …`: free blocks by order from 0. Unknown counts as zero.
fn free_large_pages(root: &Root, node: u32) -> u64 {
    /// Order of a large page: 2^9 base pages.
    const ORDER: u32 = 9;
    let text = files::bytes(root, "/proc/buddyinfo", files::SMALL_FILE_MAX).unwrap_or_default();
    bytes::lines(&text)
        .filter_map(|line| {
            let mut words = bytes::words(line);
            let number = words.nth(1)?.strip_suffix(b",").and_then(bytes::number)?;
            let zone = words.nth(1)?;
            let orders = words.map(|w| bytes::number(w).unwrap_or(0));
            (number == u64::from(node) && zone != b"DMA").then(|| {
                orders
                    .zip(0u32..)
                    .filter(|(_, order)| *order >= ORDER)
                    .map(|(count, order)| count.saturating_mul(1 << (order - ORDER).min(32)))
                    .sum::<u64>()
            })
        })
        .sum()
}

/// `Mems_allowed_list` of a process.
///
/// # Errors
/// `Conflict` when it differs from homeostat's own: somebody chose the nodes (`cpuset.mems`).
fn allowed_nodes(root: &Root, id: ProcessId) -> Result<String, PlatformError> {
    let list = |path: &str| {
        let text = files::text(root, path)?;
        let line = text.lines().find_map(|l| l.strip_prefix("Mems_allowed_list:"))?;
        Some(line.trim().to_owned())
    };
    // Without CONFIG_CPUSETS this line is missing, and nobody can choose nodes.
    let nodes = list(&format!("/proc/{}/status", id.pid)).unwrap_or_default();
    let own = list("/proc/self/status").unwrap_or_default();
    // A zombie and a kernel thread have no such line either.
    if nodes == own || nodes.is_empty() {
        return Ok(nodes);
    }
    Err(PlatformError::Conflict {
        what: format!("nodes allowed to process {id}"),
        expected: own,
        found: format!("{nodes} (cpuset.mems)"),
    })
}

/// A mapping with memory outside its target nodes.
struct Region<'s> {
    mapping: &'s Mapping,
    /// Pages in memory.
    pages: u64,
    /// Pages of these that are outside the target nodes.
    away: u64,
}

struct Regions<'s> {
    seen: &'s ProcessSeen,
    list: Vec<Region<'s>>,
    private_pages: u64,
}

impl<'s> Regions<'s> {
    fn of(seen: &'s ProcessSeen, wanted: &Wanted) -> Self {
        let homes = wanted.homes_of(seen.id);
        let mut regions = Self {
            seen,
            list: Vec::new(),
            private_pages: 0,
        };
        for mapping in &seen.mappings {
            let shared = mapping.segment.is_some();
            let pages = |chosen: &dyn Fn(u32) -> bool| -> u64 {
                let of = mapping.nodes.iter().filter(|(node, _)| chosen(*node));
                of.map(|(_, pages)| pages).sum()
            };
            let all = pages(&|_| true);
            if !shared {
                regions.private_pages += all;
            }
            let away = pages(&|node| !homes.contains(&node));
            if away > 0 && (wanted.shared || !shared) {
                regions.list.push(Region {
                    mapping,
                    pages: all,
                    away,
                });
            }
        }
        regions
    }

    fn away(&self, shared: bool) -> u64 {
        let chosen = self.list.iter().filter(|r| r.is_shared() == shared);
        chosen.map(|r| r.away).sum()
    }
}

impl Region<'_> {
    fn is_shared(&self) -> bool {
        self.mapping.segment.is_some()
    }
}

/// Pages of one process by source node, target node, and whether they are on large pages.
type Lists = BTreeMap<(u32, u32, bool), Vec<Block>>;

struct Planner<'a> {
    root: &'a Root,
    wanted: &'a Wanted,
    large: bool,
    /// Pages that may still be planned.
    left: u64,
    blocks: usize,
    deadline: Instant,
    call: PageCall,
    frames: FrameNodes,
    /// Pages on large pages that stay.
    huge: u64,
    /// Pages skipped for lack of time or room.
    unseen: u64,
}

impl Planner<'_> {
    /// Private memory: from each process in proportion to its memory elsewhere. Returns the pages planned.
    fn private(
        &mut self,
        processes: &[Regions<'_>],
        most: u64,
        found: &mut BTreeMap<String, String>,
    ) -> Result<u64, PlatformError> {
        let all: u64 = processes.iter().map(|p| p.away(false)).sum();
        let budget = most.min(self.left);
        let (mut planned, mut due) = (0, 0.0);
        for process in processes {
            // The next process makes up for what one process could not give.
            due += budget as f64 * process.away(false) as f64 / all.max(1) as f64;
            let share = (due.ceil() as u64).saturating_sub(planned).min(budget - planned);
            let regions = process.list.iter().filter(|r| !r.is_shared());
            planned += self.take(false, process.seen.id, regions, share, found)?;
        }
        self.left -= planned;
        Ok(planned)
    }

    /// Shared memory: each segment moves through the process that has most of it in memory.
    fn shared(
        &mut self,
        processes: &[Regions<'_>],
        found: &mut BTreeMap<String, String>,
    ) -> Result<u64, PlatformError> {
        let mut holder: BTreeMap<&(String, u64), (u64, ProcessId)> = BTreeMap::new();
        for process in processes {
            let mut held: BTreeMap<&(String, u64), u64> = BTreeMap::new();
            for region in &process.list {
                if let Some(segment) = &region.mapping.segment {
                    *held.entry(segment).or_default() += region.pages;
                }
            }
            for (segment, pages) in held {
                let best = holder.entry(segment).or_insert((pages, process.seen.id));
                if pages > best.0 {
                    *best = (pages, process.seen.id);
                }
            }
        }
        let mut planned = 0;
        for process in processes {
            let regions = process.list.iter().filter(|r| {
                let held = r.mapping.segment.as_ref().and_then(|s| holder.get(s));
                held.is_some_and(|(_, id)| *id == process.seen.id)
            });
            planned += self.take(true, process.seen.id, regions, self.left - planned, found)?;
        }
        self.left -= planned;
        Ok(planned)
    }

    /// Takes so many pages of these regions of a process into the plan.
    fn take<'r>(
        &mut self,
        shared: bool,
        id: ProcessId,
        regions: impl Iterator<Item = &'r Region<'r>>,
        pages: u64,
        found: &mut BTreeMap<String, String>,
    ) -> Result<u64, PlatformError> {
        let mut lists = Lists::new();
        let mut left = pages;
        let mut pagemap = None;
        for region in regions {
            if left == 0 {
                break;
            }
            if Instant::now() >= self.deadline || self.blocks >= BLOCKS_PER_ACTION_MAX {
                self.unseen += region.away;
                continue;
            }
            let open = match &mut pagemap {
                Some(open) => open,
                none => {
                    let open =
                        Pagemap::open(&self.root.path("/proc"), id.pid).map_err(|e| read_error(id, &e));
                    match open {
                        Ok(open) => none.insert(open),
                        Err(PlatformError::Vanished { .. }) => break,
                        Err(error) => return Err(error),
                    }
                }
            };
            match self.search(id, open, region, &mut left, &mut lists) {
                Ok(()) => {}
                Err(PlatformError::Vanished { .. }) => break,
                Err(error) => return Err(error),
            }
        }
        for kind in KINDS.iter().filter(|kind| kind.shared == shared) {
            let text = lists
                .iter()
                .filter(|((_, _, large), _)| *large == kind.large)
                .map(|((from, to, _), blocks)| format!("{from}>{to}@{}", page_blocks::to_text(blocks)))
                .collect::<Vec<_>>()
                .join(";");
            if !text.is_empty() {
                found.insert(process_key(kind.name, id), text);
            }
        }
        Ok(pages - left)
    }

    fn search(
        &mut self,
        id: ProcessId,
        pagemap: &mut Pagemap,
        region: &Region<'_>,
        left: &mut u64,
        lists: &mut Lists,
    ) -> Result<(), PlatformError> {
        let (first, last) = (
            Block::number_of(region.mapping.start),
            Block::number_of(region.mapping.end - 1),
        );
        let mut states = Vec::new();
        let mut addresses = Vec::new();
        let mut frames = Vec::new();
        let mut at = first;
        while at <= last && *left > 0 {
            if Instant::now() >= self.deadline || self.blocks >= BLOCKS_PER_ACTION_MAX {
                // In proportion to the address space that is left over.
                let part = (last - at + 1) as f64 / (last - first + 1) as f64;
                self.unseen += (region.away as f64 * part) as u64;
                return Ok(());
            }
            let count = (last - at + 1).min(BLOCKS_PER_LOOK);
            pagemap
                .piece_states(at * PIECE, count, &mut states)
                .map_err(|e| read_error(id, &e))?;
            for (number, state) in (at..).zip(&states) {
                match state {
                    PieceState::Huge => {
                        let whole = region.mapping.start <= number * PIECE
                            && (number + 1) * PIECE <= region.mapping.end;
                        if !self.large || !whole {
                            self.huge += PAGES;
                            continue;
                        }
                        pagemap
                            .frames(number * PIECE, &mut frames)
                            .map_err(|e| read_error(id, &e))?;
                        if let Some(from) = self.node_of_first(id, number * PIECE, &frames)? {
                            self.plan_large(id, lists, from, number, left);
                        }
                        continue;
                    }
                    PieceState::Empty => continue,
                    // A piece at the edge of a region is mapped in part.
                    PieceState::Full | PieceState::Sparse { .. } | PieceState::Unmapped => {}
                }
                let start = region.mapping.start.max(number * PIECE);
                let end = region.mapping.end.min((number + 1) * PIECE);
                pagemap
                    .frames(number * PIECE, &mut frames)
                    .map_err(|e| read_error(id, &e))?;
                addresses.clear();
                for address in (start..end).step_by(BASE_PAGE as usize) {
                    let page = (address % PIECE / BASE_PAGE) as usize;
                    let Some(frame) = frames.get(page).copied().flatten() else {
                        continue;
                    };
                    match self.frames.node_of(frame.number).filter(|_| frame.is_ordinary) {
                        Some(from) => self.plan(id, lists, from, address, left),
                        None => addresses.push(address),
                    }
                }
                // If the page frames do not show the node, the kernel is asked, at four times the cost.
                let statuses = self
                    .call
                    .nodes_of(id.pid, &addresses)
                    .map_err(|e| numa_error(id, e))?
                    .to_vec();
                for (address, status) in addresses.iter().zip(statuses) {
                    match status {
                        PageStatus::On(from) => self.plan(id, lists, from, *address, left),
                        PageStatus::Absent => self.unseen += 1,
                        _ => {}
                    }
                }
                if self.blocks >= BLOCKS_PER_ACTION_MAX {
                    break;
                }
            }
            at += count;
        }
        Ok(())
    }

    /// The node of the page at the head of these frames. `None` when it has left memory.
    fn node_of_first(
        &mut self,
        id: ProcessId,
        address: u64,
        frames: &[Option<PageFrame>],
    ) -> Result<Option<u32>, PlatformError> {
        let Some(frame) = frames.first().copied().flatten() else {
            return Ok(None);
        };
        if let Some(node) = self.frames.node_of(frame.number) {
            return Ok(Some(node));
        }
        let statuses = self
            .call
            .nodes_of(id.pid, &[address])
            .map_err(|e| numa_error(id, e))?;
        Ok(match statuses.first() {
            Some(PageStatus::On(node)) => Some(*node),
            _ => None,
        })
    }

    /// The target node for a page on node `from`. `None` when the page is in place.
    fn goal(&self, id: ProcessId, from: u32, number: u64) -> Option<u32> {
        let homes = self.wanted.homes_of(id);
        if homes.contains(&from) {
            return None;
        }
        homes.get(number as usize % homes.len().max(1)).copied()
    }

    /// Takes a page into the plan unless it is in place.
    fn plan(&mut self, id: ProcessId, lists: &mut Lists, from: u32, address: u64, left: &mut u64) {
        let number = Block::number_of(address);
        let Some(to) = self.goal(id, from, number).filter(|_| *left > 0) else {
            return;
        };
        let blocks = lists.entry((from, to, false)).or_default();
        if blocks.last().is_none_or(|b| b.number != number) {
            blocks.push(Block::empty(number));
            self.blocks += 1;
        }
        if let Some(block) = blocks.last_mut() {
            block.insert(address);
            *left -= 1;
        }
    }

    /// Takes a large page into the plan unless it is in place, or larger than the rest of the plan.
    fn plan_large(&mut self, id: ProcessId, lists: &mut Lists, from: u32, number: u64, left: &mut u64) {
        let Some(to) = self.goal(id, from, number).filter(|_| *left >= PAGES) else {
            return;
        };
        lists
            .entry((from, to, true))
            .or_default()
            .push(Block::full(number));
        self.blocks += 1;
        *left -= PAGES;
    }
}

/// Node by page frame, from sysfs (Documentation/admin-guide/mm/memory-hotplug.rst). Empty without memory blocks.
#[derive(Debug, Default)]
struct FrameNodes {
    frames_per_block: u64,
    nodes: BTreeMap<u64, u32>,
}

impl FrameNodes {
    fn read(root: &Root) -> Self {
        let size = files::text(root, "/sys/devices/system/memory/block_size_bytes");
        let Some(size) = size.and_then(|text| bytes::hexadecimal(text.as_bytes())) else {
            return Self::default();
        };
        let mut nodes = BTreeMap::new();
        // A block may begin on one node and end on another.
        let mut divided = BTreeSet::new();
        for node in files::numbered(root, "/sys/devices/system/node", "node") {
            let directory = format!("/sys/devices/system/node/node{node}");
            for block in files::numbered(root, &directory, "memory") {
                if nodes.insert(u64::from(block), node).is_some() {
                    divided.insert(u64::from(block));
                }
            }
        }
        nodes.retain(|block, _| !divided.contains(block));
        Self {
            frames_per_block: size / BASE_PAGE,
            nodes,
        }
    }

    /// `None` when it is not known. The kernel shows frame 0 for hidden frames.
    fn node_of(&self, frame: u64) -> Option<u32> {
        let block = (frame != 0).then(|| frame.checked_div(self.frames_per_block))??;
        self.nodes.get(&block).copied()
    }
}

struct ProcessTask {
    id: ProcessId,
    image: String,
    nodes: String,
    /// `None` once it is known to be gone.
    pagemap: Option<Pagemap>,
}

impl ProcessTask {
    /// Opens what is needed. A process that is gone, or runs another program, stays closed.
    fn open(root: &Root, id: ProcessId, image: &str, nodes: &str) -> Result<Self, PlatformError> {
        let mut process = Self {
            id,
            image: image.to_owned(),
            nodes: nodes.to_owned(),
            pagemap: None,
        };
        // Opened before its start time is compared: a process that had taken the number would differ.
        let pagemap = match Pagemap::open(&root.path("/proc"), id.pid).map_err(|e| read_error(id, &e)) {
            Ok(pagemap) => pagemap,
            Err(PlatformError::Vanished { .. }) => return Ok(process),
            Err(error) => return Err(error),
        };
        if process.is_same(root) {
            process.pagemap = Some(pagemap);
        }
        Ok(process)
    }

    /// Whether it still runs the same program. A file that cannot be read now is no sign of the end.
    fn is_same(&self, root: &Root) -> bool {
        match ProcessStat::read(root, self.id) {
            Ok(stat) => stat.start_ticks == self.id.start_ticks && !stat.ended && stat.image == self.image,
            Err(error) => !matches!(error, PlatformError::Vanished { .. }),
        }
    }
}

/// Pages of one process with one source node and one target node.
struct List {
    process: usize,
    shared: bool,
    /// On large pages when they were found.
    large: bool,
    from: u32,
    to: u32,
    blocks: Vec<Block>,
}

/// The way to one direction. Everything in it can be rebuilt from the record and the machine.
struct Task {
    workload: WorkloadId,
    direction: Direction,
    /// All of it was left in this state before, so somebody else moved every page that is elsewhere now.
    was_left_so: bool,
    settings: Settings,
    processes: Vec<ProcessTask>,
    lists: Vec<List>,
    /// Index of the list and of the block in it: private memory first, the lists taking turns.
    order: Vec<(usize, usize)>,
    at: usize,
    /// Attempts for the block at `at`, and its pages that the kernel refuses for good.
    attempts: u8,
    refused: BTreeSet<u64>,
    /// Why pages of a block stayed, by its place in the order.
    stuck: BTreeMap<usize, &'static str>,
    checking: bool,
    /// Pages at their target: an estimate while moving, a count in the final check.
    finished: u64,
    skipped: BTreeMap<&'static str, u64>,
    total: u64,
    call: PageCall,
    /// Pages of the block checked last, where they are, and which of them were hidden.
    addresses: Vec<u64>,
    seen: Vec<PageStatus>,
    touched: BTreeSet<u64>,
    pressure: Pressure,
    room_pauses: u8,
    /// Bytes handled by moving calls.
    moved: u64,
    /// Large pages for which there is room, by node, as seen in this slice.
    large_room: BTreeMap<u32, u64>,
    /// The kernel divided a large page while moving it.
    divided: bool,
}

/// Outcome of one visit to a block.
enum Visit {
    Settled,
    /// Some of it was moved. Another visit checks the rest.
    Again,
    /// The slice has no time or budget for more.
    Over,
    /// None of it could be moved: the pages are in use.
    InUse,
    /// No free memory at the target node.
    NoRoom,
}

impl Task {
    fn new(
        root: &Root,
        record: &UndoRecord,
        direction: Direction,
        settings: &Settings,
        was_left_so: bool,
    ) -> Result<Self, PlatformError> {
        let (mut processes, mut lists): (Vec<ProcessTask>, Vec<List>) = (Vec::new(), Vec::new());
        let text = |name: &str, id| {
            record
                .found
                .get(&process_key(name, id))
                .map_or("", String::as_str)
        };
        // Records of the first version name only the source node. The action's target names the node of all pages.
        let to_all = match &record.action.target {
            Target::Pages(wanted) => Some(wanted.node.0),
            _ => None,
        };
        for Kind { name, shared, large } in KINDS {
            for entry in by_process(record, name) {
                let (id, value) = entry?;
                let process = match processes.iter().position(|p| p.id == id) {
                    Some(known) => known,
                    None => {
                        processes.push(ProcessTask::open(root, id, text("image", id), text("nodes", id))?);
                        processes.len() - 1
                    }
                };
                for part in value.split(';') {
                    let wrong = || malformed(record, &process_key(name, id));
                    let (nodes, blocks) = part.split_once('@').ok_or_else(wrong)?;
                    let (from, to) = match nodes.split_once('>') {
                        Some((from, to)) => (from, to.parse().ok()),
                        None => (nodes, to_all),
                    };
                    lists.push(List {
                        process,
                        shared,
                        large,
                        from: from.parse().map_err(|_| wrong())?,
                        to: to.ok_or_else(wrong)?,
                        blocks: page_blocks::from_text(blocks, BLOCKS_PER_ACTION_MAX).ok_or_else(wrong)?,
                    });
                }
            }
        }
        if direction == Direction::Apply {
            if processes.iter().all(|p| p.pagemap.is_none()) {
                return Err(vanished(&record.action.workload));
            }
            for process in processes.iter().filter(|p| p.pagemap.is_some()) {
                let now = allowed_nodes(root, process.id)?;
                if now != process.nodes {
                    return Err(PlatformError::Conflict {
                        what: format!("nodes allowed to process {}", process.id),
                        expected: process.nodes.clone(),
                        found: now,
                    });
                }
            }
        }
        let mut order: Vec<(usize, usize)> = lists
            .iter()
            .enumerate()
            .flat_map(|(list, l)| (0..l.blocks.len()).map(move |block| (list, block)))
            .collect();
        order.sort_by_key(|(list, block)| (lists.get(*list).is_some_and(|l| l.shared), *block, *list));
        let total = lists.iter().flat_map(|l| &l.blocks).map(Block::count).sum();
        Ok(Self {
            workload: record.action.workload.clone(),
            direction,
            was_left_so,
            settings: settings.clone(),
            processes,
            lists,
            order,
            at: 0,
            attempts: 0,
            refused: BTreeSet::new(),
            stuck: BTreeMap::new(),
            checking: false,
            finished: 0,
            skipped: BTreeMap::new(),
            total,
            call: PageCall::default(),
            addresses: Vec::new(),
            seen: Vec::new(),
            touched: BTreeSet::new(),
            pressure: Pressure::default(),
            room_pauses: 0,
            moved: 0,
            large_room: BTreeMap::new(),
            divided: false,
        })
    }

    fn advance(&mut self, root: &Root) -> Result<Progress, PlatformError> {
        for process in &mut self.processes {
            if process.pagemap.is_some() && !process.is_same(root) {
                process.pagemap = None;
            }
        }
        if self.direction == Direction::Apply && self.processes.iter().all(|p| p.pagemap.is_none()) {
            return Err(vanished(&self.workload));
        }
        let mut slice = Slice::start();
        self.large_room.clear();
        let mut budget = self.settings.bytes_per_slice();
        let mut pause_more = Duration::ZERO;
        if !self.checking {
            let what = format!("moving pages of {}", self.workload);
            // An undo waits neither for less pressure nor for room: it frees as much as it takes.
            if self.direction == Direction::Apply {
                if let Some(pause) = self.pressure.pause(root, &what)? {
                    return Ok(self.progress(&slice, pause, false));
                }
                match self.room(root)? {
                    Some(room) => budget = budget.min(room),
                    None => {
                        if let Some(pause) = self.wait_for_room()? {
                            return Ok(self.progress(&slice, pause, false));
                        }
                    }
                }
            }
            let step = self.step();
            while self.at < self.order.len() && self.step() == step {
                match self.visit(root, &mut slice, budget)? {
                    Visit::Settled => self.next_block(),
                    Visit::Again => {}
                    Visit::Over => break,
                    Visit::InUse => {
                        // Gives the holders of the pages time to let go, longer each time.
                        pause_more = Duration::from_millis(5) * (1 << self.attempts.min(6));
                        break;
                    }
                    Visit::NoRoom if self.direction == Direction::Undo => {
                        return Err(PlatformError::Busy {
                            what: format!("moving pages of {} back", self.workload),
                            why: "no free memory at the node where they were found".into(),
                        });
                    }
                    Visit::NoRoom => {
                        pause_more = self.wait_for_room()?.unwrap_or_default();
                        break;
                    }
                }
                if self.is_over(&slice, budget) {
                    break;
                }
            }
            if self.at >= self.order.len() {
                self.begin_check();
            }
        } else {
            while self.at < self.order.len() && slice.started.elapsed() < self.settings.slice {
                self.check()?;
                self.at += 1;
            }
            if self.at >= self.order.len() {
                return self.end();
            }
        }
        let pause = self.settings.pause(&slice).max(pause_more);
        Ok(self.progress(&slice, pause, false))
    }

    /// How long to wait for free memory at the node. `None` when the wait is over, and the rest stays.
    ///
    /// # Errors
    /// `Busy` when nothing of the plan could be moved.
    fn wait_for_room(&mut self) -> Result<Option<Duration>, PlatformError> {
        self.room_pauses += 1;
        if self.room_pauses <= ROOM_PAUSES_MAX {
            return Ok(Some(Duration::from_millis(100) * (1 << self.room_pauses.min(6))));
        }
        if self.moved == 0 && self.finished == 0 {
            return Err(PlatformError::Busy {
                what: format!("moving pages of {}", self.workload),
                why: NO_ROOM.into(),
            });
        }
        for at in self.at..self.order.len() {
            self.stuck.insert(at, NO_ROOM);
        }
        self.at = self.order.len();
        Ok(None)
    }

    /// Which tenth of the plan is under way.
    fn step(&self) -> usize {
        self.at * STEPS / self.order.len().max(1)
    }

    fn is_over(&self, slice: &Slice, budget: u64) -> bool {
        slice.started.elapsed() >= self.settings.slice
            || slice.longest > self.settings.slice / 2
            || slice.bytes + BASE_PAGE > budget
    }

    fn next_block(&mut self) {
        self.at += 1;
        self.attempts = 0;
        self.refused.clear();
    }

    /// Bytes that may be moved now. `None` when a node has no room for the rest of this step.
    fn room(&self, root: &Root) -> Result<Option<u64>, PlatformError> {
        let step = self.step();
        let mut wanted: BTreeMap<u32, u64> = BTreeMap::new();
        let rest = self
            .order
            .iter()
            .enumerate()
            .skip(self.at)
            .take_while(|(at, _)| at * STEPS / self.order.len().max(1) == step);
        for (_, (list, block)) in rest {
            if let Some(list) = self.lists.get(*list) {
                if let Some(block) = list.blocks.get(*block) {
                    *wanted.entry(list.to).or_default() += block.count() * BASE_PAGE;
                }
            }
        }
        let mut least = u64::MAX;
        for (to, wanted) in wanted {
            let node = Node::read(root, to).map_err(|_| PlatformError::Vanished {
                target: format!("node {to}"),
            })?;
            let room = node.free.saturating_sub(self.settings.floor(&node));
            if room < wanted.max(BASE_PAGE) {
                return Ok(None);
            }
            least = least.min(room);
        }
        Ok(Some(least))
    }

    fn begin_check(&mut self) {
        self.checking = true;
        self.at = 0;
        self.finished = 0;
    }

    /// Source and target node of a list in this direction.
    fn way(&self, list: &List) -> (u32, u32) {
        match self.direction {
            Direction::Apply => (list.from, list.to),
            Direction::Undo => (list.to, list.from),
        }
    }

    /// Moves pages of the current block until it is settled or the slice is over.
    fn visit(&mut self, root: &Root, slice: &mut Slice, budget: u64) -> Result<Visit, PlatformError> {
        let Some((list, block)) = self.order.get(self.at).and_then(|(list, block)| {
            let list = self.lists.get(*list)?;
            Some((list, *list.blocks.get(*block)?))
        }) else {
            return Ok(Visit::Settled);
        };
        let (source, goal) = self.way(list);
        let (shared, large, index) = (list.shared, list.large, list.process);
        let Some(id) = self.look(&block, index)? else {
            return Ok(Visit::Settled);
        };
        let already = self.seen.iter().filter(|s| **s == PageStatus::On(goal)).count() as u64;
        let waiting: Vec<u64> = self
            .addresses
            .iter()
            .zip(&self.seen)
            .filter(|(address, status)| match status {
                PageStatus::On(node) if *node == source => !self.refused.contains(address),
                // Reading the page may have made the kernel bring it to homeostat's own node.
                PageStatus::On(node) => *node != goal && self.touched.contains(address),
                _ => false,
            })
            .map(|(address, _)| *address)
            .collect();
        if waiting.is_empty() || self.was_left_so {
            // Waiting pages were left at their target, so somebody else moved them.
            self.finished += already;
            return Ok(Visit::Settled);
        }
        if self.attempts >= ATTEMPTS_MAX {
            self.stuck.insert(self.at, IN_USE);
            self.finished += already;
            return Ok(Visit::Settled);
        }
        self.attempts += 1;
        let mut states = Vec::new();
        if let Some(pagemap) = self.processes.get_mut(index).and_then(|p| p.pagemap.as_mut()) {
            pagemap
                .piece_states(block.start(), 1, &mut states)
                .map_err(|e| read_error(id, &e))?;
        }
        let mut unit = BASE_PAGE;
        let mut batches: Vec<&[u64]> = waiting.chunks(PAGES_PER_MOVE).collect();
        if states.first() == Some(&PieceState::Huge) {
            // A large page moves whole: forward if the plan says so, and back if all of it came from there.
            let stays = if self.refused.contains(&block.start()) {
                Some(SHARED)
            } else if waiting.len() as u64 != PAGES || (self.direction == Direction::Apply && !large) {
                Some(LARGE)
            } else if self.direction == Direction::Apply && !self.has_large_room(root, goal) {
                Some(NO_LARGE_ROOM)
            } else {
                None
            };
            if let Some(reason) = stays {
                self.stuck.insert(self.at, reason);
                self.finished += already;
                return Ok(Visit::Settled);
            }
            batches = vec![waiting.get(..1).unwrap_or_default()];
            unit = PIECE;
        }
        // An undo moves pages whoever maps them: a process forked since may share them now.
        let several = shared || self.direction == Direction::Undo;
        let mut progressed = false;
        for batch in batches {
            // The pause after the slice makes up for a page larger than the budget.
            let room = budget.saturating_sub(slice.bytes) / BASE_PAGE;
            if room == 0 {
                // Lack of budget is not a failed attempt.
                self.attempts = 0;
                return Ok(Visit::Over);
            }
            let batch = batch.get(..room as usize).unwrap_or(batch);
            let refused = self.refused.len();
            let call = &mut self.call;
            let outcome = slice.timed(move || call.move_to(id.pid, batch, goal, several));
            let moved = match outcome {
                Ok((left, statuses)) => {
                    for (address, status) in batch.iter().zip(statuses) {
                        if *status == PageStatus::Shared {
                            self.refused.insert(*address);
                            self.stuck.insert(self.at, SHARED);
                        }
                    }
                    // `move_pages` counts untried pages as left, and pages it could not isolate as not left. The
                    // statuses are right unless the call ended early.
                    let there = statuses.iter().filter(|s| **s == PageStatus::On(goal)).count() as u64;
                    if left == 0 {
                        there
                    } else {
                        there.max((batch.len() as u64).saturating_sub(left))
                    }
                }
                Err(NumaError::NoProcess) => {
                    self.close(index);
                    return Ok(Visit::Settled);
                }
                Err(NumaError::NoMemory) => return Ok(Visit::NoRoom),
                Err(NumaError::NoNode | NumaError::NodeNotAllowed) if self.direction == Direction::Undo => {
                    // Nobody can bring these pages back. They stay, which loses nothing.
                    let is_there = Node::read(root, goal).is_ok();
                    let reason = if is_there { NODE_FORBIDDEN } else { NODE_GONE };
                    self.stuck.insert(self.at, reason);
                    self.finished += already;
                    return Ok(Visit::Settled);
                }
                Err(NumaError::NoNode) => {
                    return Err(PlatformError::Vanished {
                        target: format!("node {goal}"),
                    });
                }
                Err(error) => return Err(numa_error(id, error)),
            };
            if moved > 0 || self.refused.len() > refused {
                progressed = true;
                self.attempts = 0;
                self.room_pauses = 0;
            }
            slice.bytes += moved * unit;
            self.moved += moved * unit;
            if unit == PIECE && moved > 0 && !self.is_whole(index, &block)? {
                self.divided = true;
            }
            if self.is_over(slice, budget) {
                return Ok(Visit::Over);
            }
        }
        Ok(if progressed { Visit::Again } else { Visit::InUse })
    }

    /// Whether a node has a free block for a large page. Takes it off the count.
    ///
    /// The kernel divides a large page if the target has no free block of that size (`migrate_pages` with the reason
    /// `MR_SYSCALL`, Linux 6.1 to 6.18). So a large page moves only while `/proc/buddyinfo` shows blocks to spare. Once
    /// one was divided all the same, Apply moves no more of them. An undo goes on, and counts the divided ones.
    fn has_large_room(&mut self, root: &Root, node: u32) -> bool {
        if self.divided {
            return false;
        }
        let left = self
            .large_room
            .entry(node)
            .or_insert_with(|| free_large_pages(root, node).saturating_sub(LARGE_SPARE));
        let has = *left > 0;
        *left = left.saturating_sub(1);
        has
    }

    fn is_whole(&mut self, process: usize, block: &Block) -> Result<bool, PlatformError> {
        let Some((id, pagemap)) = self
            .processes
            .get_mut(process)
            .and_then(|p| Some((p.id, p.pagemap.as_mut()?)))
        else {
            return Ok(false);
        };
        let mut states = Vec::new();
        pagemap
            .piece_states(block.start(), 1, &mut states)
            .map_err(|e| read_error(id, &e))?;
        Ok(states.first() == Some(&PieceState::Huge))
    }

    /// Finds where the pages of a block are. `None`: the process is gone.
    ///
    /// Automatic NUMA balancing hides pages for a while to see who touches them. Linux 6.1 to 6.5 neither shows the
    /// node of a hidden page nor moves it. Reading a byte of it shows it again. So the plan uses page frames.
    fn look(&mut self, block: &Block, process: usize) -> Result<Option<ProcessId>, PlatformError> {
        let Some((id, pagemap)) = self
            .processes
            .get_mut(process)
            .and_then(|p| Some((p.id, p.pagemap.as_mut()?)))
        else {
            return Ok(None);
        };
        self.addresses.clear();
        self.addresses.extend(block.addresses());
        self.touched.clear();
        let mut look = |seen: &mut Vec<PageStatus>| {
            seen.clear();
            match self.call.nodes_of(id.pid, &self.addresses) {
                Ok(statuses) => seen.extend_from_slice(statuses),
                Err(NumaError::NoProcess) => return Ok(false),
                Err(error) => return Err(numa_error(id, error)),
            }
            Ok(true)
        };
        let mut alive = look(&mut self.seen)?;
        if alive && self.seen.contains(&PageStatus::Absent) {
            let mut frames = Vec::new();
            pagemap
                .frames(block.start(), &mut frames)
                .map_err(|e| read_error(id, &e))?;
            let hidden: Vec<u64> = self
                .addresses
                .iter()
                .zip(&self.seen)
                .filter(|(address, status)| {
                    let page = (**address % PIECE / BASE_PAGE) as usize;
                    **status == PageStatus::Absent && frames.get(page).is_some_and(Option::is_some)
                })
                .map(|(address, _)| *address)
                .collect();
            if !hidden.is_empty() {
                match numa::touch(id.pid, &hidden) {
                    Ok(_) => {}
                    Err(NumaError::NoProcess) => alive = false,
                    Err(error) => return Err(numa_error(id, error)),
                }
                alive = alive && look(&mut self.seen)?;
                self.touched.extend(hidden);
            }
        }
        if !alive {
            self.close(process);
            return Ok(None);
        }
        Ok(Some(id))
    }

    /// The process is gone, so its remaining work is void.
    fn close(&mut self, process: usize) {
        if let Some(process) = self.processes.get_mut(process) {
            process.pagemap = None;
        }
    }

    /// Checks where the pages of the current block are.
    fn check(&mut self) -> Result<(), PlatformError> {
        let Some((list, block)) = self.order.get(self.at).and_then(|(list, block)| {
            let list = self.lists.get(*list)?;
            Some((list, list.blocks.get(*block)?))
        }) else {
            return Ok(());
        };
        let (source, goal) = self.way(list);
        let (block, index, large) = (*block, list.process, list.large);
        if self.look(&block, index)?.is_none() {
            *self.skipped.entry(ENDED).or_default() += block.count();
            return Ok(());
        }
        // At the target, but no longer in one piece.
        let divided = self.divided && large && !self.is_whole(index, &block)?;
        for status in &self.seen {
            let reason = match status {
                PageStatus::On(node) if *node == goal && divided => DIVIDED,
                PageStatus::On(node) if *node == goal => {
                    self.finished += 1;
                    continue;
                }
                PageStatus::On(node) if *node == source => {
                    self.stuck.get(&self.at).copied().unwrap_or(MOVED_BY_OTHERS)
                }
                PageStatus::On(_) => MOVED_BY_OTHERS,
                PageStatus::Absent | PageStatus::Unmapped => NOT_PRESENT,
                _ => IN_USE,
            };
            *self.skipped.entry(reason).or_default() += 1;
        }
        Ok(())
    }

    fn end(&mut self) -> Result<Progress, PlatformError> {
        let by_others = self.skipped.get(MOVED_BY_OTHERS).copied().unwrap_or(0);
        if self.direction == Direction::Apply && by_others * 2 > self.total {
            return Err(PlatformError::Conflict {
                what: format!("memory of {}", self.workload),
                expected: "where it was moved".into(),
                found: format!(
                    "{} of {} moved elsewhere",
                    Bytes(by_others * BASE_PAGE),
                    Bytes(self.total * BASE_PAGE)
                ),
            });
        }
        let in_use = self.skipped.get(IN_USE).copied().unwrap_or(0);
        if self.direction == Direction::Undo && in_use > 0 {
            return Err(PlatformError::Busy {
                what: format!("moving {in_use} pages of {} back", self.workload),
                why: "they are locked, pinned or being written; possible when that ends".into(),
            });
        }
        Ok(self.progress(&Slice::start(), Duration::ZERO, true))
    }

    fn progress(&self, slice: &Slice, pause: Duration, done: bool) -> Progress {
        Progress {
            done,
            finished: self.finished,
            total: self.total,
            skipped: if done {
                self.skipped
                    .iter()
                    .map(|(reason, count)| ((*reason).to_owned(), *count))
                    .collect()
            } else {
                BTreeMap::new()
            },
            stalled: nanoseconds(slice.inside),
            longest_call: nanoseconds(slice.longest),
            pause: nanoseconds(pause.min(PAUSE_MAX)),
            bloat: Bytes::ZERO,
            verified: done,
        }
    }
}

fn unsupported(why: &str) -> PlatformError {
    PlatformError::Unsupported {
        what: "moving pages between nodes".into(),
        why: why.to_owned(),
    }
}

fn vanished(workload: &WorkloadId) -> PlatformError {
    PlatformError::Vanished {
        target: format!("workload {workload}"),
    }
}

fn numa_error(id: ProcessId, error: NumaError) -> PlatformError {
    match error {
        NumaError::NotPermitted => denied(id),
        NumaError::NoProcess => PlatformError::Vanished {
            target: format!("process {id}"),
        },
        NumaError::NotSupported => {
            unsupported("the kernel has no move_pages (CONFIG_NUMA, CONFIG_MIGRATION)")
        }
        NumaError::NodeNotAllowed => PlatformError::Conflict {
            what: format!("nodes allowed to process {id}"),
            expected: "the node of the action".into(),
            found: error.to_string(),
        },
        NumaError::NoMemory | NumaError::Interrupted | NumaError::Busy => PlatformError::Busy {
            what: format!("moving pages of process {id}"),
            why: error.to_string(),
        },
        error => PlatformError::Rejected {
            what: format!("move_pages of process {id}"),
            value: "a batch of pages".into(),
            errno: error.to_string(),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use homeostat_model::NodeId;
    use homeostat_model::action::PageMove;

    fn action(arguments: &[(&str, &str)]) -> Action {
        Action {
            id: ActionId(7),
            effector: "page_placement".into(),
            workload: "w".into(),
            target: Target::Pages(PageMove {
                node: NodeId(0),
                bytes: Bytes::from_mib(64),
                shared: true,
            }),
            arguments: arguments
                .iter()
                .map(|(k, v)| ((*k).to_owned(), (*v).to_owned()))
                .collect(),
            why: String::new(),
        }
    }

    #[test]
    fn the_budget_bounds_every_slice_and_the_pause_after_it() {
        let settings = |arguments: &[(&str, &str)]| Settings::parse(&action(arguments), &[]).unwrap();
        for rate in [65_536u64, 1 << 20, 100 << 20, 1 << 30] {
            let text = rate.to_string();
            let paced = settings(&[("bytes_per_second", &text), ("duty", "1")]);
            let most = paced.bytes_per_slice();
            assert!(
                most as f64 <= (rate as f64 * 0.02).max(BASE_PAGE as f64),
                "{rate}"
            );
            let slice = Slice {
                bytes: most,
                ..Slice::start()
            };
            let pause = paced.pause(&slice);
            let needed = Duration::from_secs_f64(most as f64 / rate as f64);
            assert!(
                pause + slice.started.elapsed() >= needed,
                "{rate}: {pause:?} of {needed:?}"
            );
        }
        assert_eq!(settings(&[]).bytes_per_slice(), u64::MAX);
    }

    #[test]
    fn arguments_out_of_range_are_rejected() {
        for (name, value) in [
            ("duty", "0"),
            ("duty", "NaN"),
            ("slice_ms", "101"),
            ("bytes_per_second", "65535"),
            ("private_share_max", "1.1"),
            ("free_memory_min", "-1"),
            ("large_pages", "stay"),
            ("spread_over", "0"),
        ] {
            let outcome = Settings::parse(&action(&[(name, value)]), &[]);
            assert!(
                matches!(outcome, Err(PlatformError::Rejected { .. })),
                "{name}={value}: {outcome:?}"
            );
        }
        assert!(Settings::parse(&action(&[("spread_over", "0")]), &["spread_over"]).is_ok());
        // A large page takes its time at that pace, and pauses are bounded.
        let large = |rate: &str| {
            Settings::parse(
                &action(&[("large_pages", "move"), ("bytes_per_second", rate)]),
                &[],
            )
        };
        assert!(large("1048575").is_err());
        let settings = large("1048576").unwrap();
        let slice = Slice {
            bytes: PIECE,
            ..Slice::start()
        };
        let pause = settings.pause(&slice);
        assert!(
            pause > Duration::from_millis(1900) && pause < PAUSE_MAX,
            "{pause:?}"
        );
    }

    #[test]
    fn free_large_pages_of_a_node_are_counted_without_the_zone_of_old_devices() {
        let tree = tempfile::tempdir().unwrap();
        let root = Root::new(tree.path());
        assert_eq!(free_large_pages(&root, 0), 0, "not known");
        std::fs::create_dir_all(root.path("/proc")).unwrap();
        let text = "\
Node 0, zone      DMA      0      0      0      0      0      0      0      0      1      1      3
Node 0, zone    DMA32     12     10      9      8      7      6      5      4      3      2      5
Node 0, zone   Normal   1000    900    800    700    600    500    400    300    200      1      0
Node 1, zone   Normal      1      1      1      1      1      1      1      1      1      0      0
Node 11, zone  Normal      0      0      0      0      0      0      0      0      0      0      7
";
        std::fs::write(root.path("/proc/buddyinfo"), text).unwrap();
        let counts = [0, 1, 2, 11].map(|node| free_large_pages(&root, node));
        assert_eq!(counts, [2 + 2 * 5 + 1, 0, 0, 14]);
    }

    #[test]
    fn the_free_memory_of_a_node_is_read_and_a_node_without_memory_is_no_target() {
        let tree = tempfile::tempdir().unwrap();
        let root = Root::new(tree.path());
        assert!(matches!(
            Node::read(&root, 0),
            Err(PlatformError::Rejected { .. })
        ));
        let directory = root.path("/sys/devices/system/node/node3");
        std::fs::create_dir_all(&directory).unwrap();
        let set = |text: &str| std::fs::write(directory.join("meminfo"), text).unwrap();
        set("Node 3 MemTotal:       2048 kB\nNode 3 MemFree:         100 kB\nNode 3 MemUsed: 1948 kB\n");
        let node = Node::read(&root, 3).unwrap();
        assert_eq!((node.total, node.free), (2048 * 1024, 100 * 1024));
        let settings = Settings::parse(&action(&[]), &[]).unwrap();
        assert_eq!(settings.floor(&node), 2048 * 1024 / 50);
        set("Node 3 MemTotal:       0 kB\nNode 3 MemFree:         0 kB\n");
        assert!(matches!(
            Node::read(&root, 3),
            Err(PlatformError::Rejected { .. })
        ));
        set("rubbish\n");
        assert!(matches!(
            Node::read(&root, 3),
            Err(PlatformError::Malformed { .. })
        ));
    }

    #[test]
    fn frames_belong_to_the_node_of_their_memory_block() {
        let tree = tempfile::tempdir().unwrap();
        let root = Root::new(tree.path());
        assert_eq!(
            FrameNodes::read(&root).node_of(1),
            None,
            "no memory blocks in sysfs"
        );
        for block in [
            "node0/memory0",
            "node1/memory1",
            "node0/memory33",
            "node0/memory4",
            "node1/memory4",
        ] {
            std::fs::create_dir_all(root.path(&format!("/sys/devices/system/node/{block}"))).unwrap();
        }
        std::fs::create_dir_all(root.path("/sys/devices/system/memory")).unwrap();
        let size = root.path("/sys/devices/system/memory/block_size_bytes");
        std::fs::write(&size, "8000000\n").unwrap();
        let nodes = FrameNodes::read(&root);
        let per_block = 0x800_0000 / BASE_PAGE;
        for (frame, node) in [
            (1, Some(0)),
            (per_block - 1, Some(0)),
            (per_block, Some(1)),
            (2 * per_block, None),
            (4 * per_block, None),
            (33 * per_block + 5, Some(0)),
            (u64::MAX, None),
            // The number that stands for one that is not shown.
            (0, None),
        ] {
            assert_eq!(nodes.node_of(frame), node, "{frame}");
        }
        std::fs::write(&size, "0\n").unwrap();
        assert_eq!(FrameNodes::read(&root).node_of(1), None);
    }
}
