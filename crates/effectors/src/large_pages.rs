//! Large pages for memory that a process already has, from outside, with an undo.
//!
//! **Apply** gives each 2 MiB piece `MADV_COLLAPSE`, one call a piece. The process stands still for at most that call,
//! if it touches that piece, and the kernel needs one free large page at a time. **Undo** gives one 4 KiB page of each
//! piece `MADV_COLD`: the kernel splits a large page that is advised in part (`madvise_cold_or_pageout_pte_range` in
//! mm/madvise.c). The undo moves and writes no page and needs no swap. The advised page loses its place among recently
//! used pages. It is the *last* page of the piece, because allocators keep headers and busy objects at the low end.
//!
//! Zero-filled pages change: on a split, Linux 6.12 and later map them to the shared zero page and free them. The
//! program reads the same zeros, has less resident memory, and takes a page fault when it writes there again.
//!
//! Rules, whatever the strategy proposes: a piece that was large stays large, holes stay empty, and pages shared by a
//! fork are not copied. `MADV_COLLAPSE` ignores the system-wide switch. So `enabled` = `never`, `PR_SET_THP_DISABLE`
//! and `MADV_NOHUGEPAGE` are [`PlatformError::Conflict`].

use crate::identity::{
    NAMESPACES, ProcessStat, boot_id, denied, namespaces, nanoseconds, of_another_boot, process_key,
    read_error, require_namespaces,
};
use crate::pacing::{PAUSE_MAX, Pressure, Slice};
use crate::{Effector, pacing};
use homeostat_kernel::Root;
use homeostat_kernel::memory::{
    AddressRange, Advice, AdviseError, BASE_PAGE, PAGES_PER_PIECE, PIECE, Pagemap, PieceState, pidfd_open,
    process_madvise, process_madvise_vectored,
};
use homeostat_model::action::{MemoryTarget, Target};
use homeostat_model::{Action, ActionId, Bytes, Direction, EffectorId, ProcessId, Progress, UndoRecord};
use homeostat_platform::PlatformError;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::time::Duration;

/// Most pieces in one action: 64 GiB. Larger workloads are converted in stages.
const PIECES_PER_ACTION_MAX: usize = 32 * 1024;
/// Most processes in one action. Each takes two open files while the action is under way.
const PROCESSES_PER_ACTION_MAX: usize = 128;
/// Pieces checked together before they are converted: 64 MiB, about 0.1 ms of page-table walk (1.2 ms/GiB).
const PIECES_PER_LOOK: usize = 32;
/// Pieces checked together without conversion: 512 MiB, a few milliseconds.
const PIECES_PER_CHECK: usize = 256;
/// Ranges in one undo call. The kernel holds the address space for reading during the call, which keeps out `mmap` and
/// `munmap`. Splitting takes 0.049 s/GiB, whether a call has 1 or 512 ranges (Linux 6.18, 2 vCPU). 8 take 0.9 ms.
const RANGES_PER_UNDO_CALL: usize = 8;
/// Pieces checked together before they are split: about 6 ms of splitting.
const PIECES_PER_SPLIT: usize = 64;
/// Attempts for a piece that is in use (EAGAIN), or was split again before the check.
const ATTEMPTS_MAX: u8 = 5;
/// Consecutive failures to get a large page (ENOMEM, EBUSY) before the action waits for better times.
const NO_MEMORY_MAX: u8 = 3;
/// Rounds of an undo before it waits until other processes unmap a piece.
const UNDO_ROUNDS_MAX: u8 = 6;
/// Room that the control group of a process must have below its limit. Each conversion is charged before the old pages
/// are freed, and the kernel would reclaim from a group at its limit.
const GROUP_ROOM_MIN: u64 = 64 * 1024 * 1024;

const ENABLED: &str = "/sys/kernel/mm/transparent_hugepage/enabled";

/// Converts memory to large pages and back.
pub(super) struct LargePages {
    root: Root,
    tasks: BTreeMap<ActionId, Task>,
}

impl LargePages {
    pub(super) fn new(root: Root) -> Self {
        Self {
            root,
            tasks: BTreeMap::new(),
        }
    }

    fn require_live(&self) -> Result<(), PlatformError> {
        if self.root.is_live() {
            return Ok(());
        }
        Err(unsupported(
            "the files below the root are not those of the running kernel",
        ))
    }
}

impl Effector for LargePages {
    fn id(&self) -> EffectorId {
        EffectorId::new("large_pages")
    }

    fn prepare(&mut self, action: &Action) -> Result<UndoRecord, PlatformError> {
        self.require_live()?;
        let settings = Settings::parse(action)?;
        let targets = checked_targets(action)?;
        require_kernel(&self.root)?;
        let mut found = BTreeMap::from([
            ("enabled".to_owned(), require_switch(&self.root)?),
            (NAMESPACES.to_owned(), namespaces(&self.root)),
        ]);
        let mut skipped = BTreeMap::<&'static str, u64>::new();
        let mut convertible = 0;
        let mut vanished = None;
        for target in targets {
            let mut process = match Process::open(&self.root, target.process, None) {
                Ok(process) => process,
                Err(error @ PlatformError::Vanished { .. }) => {
                    *skipped.entry(ENDED).or_default() += target.pieces.len() as u64;
                    vanished = Some(error);
                    continue;
                }
                Err(error) => return Err(error),
            };
            require_process_allows(&self.root, target.process)?;
            let seen = Survey::take(&mut process, target, &settings)?;
            convertible += seen.convertible.len();
            for (reason, count) in &seen.skipped {
                *skipped.entry(reason).or_default() += count;
            }
            seen.record(&mut found, &process, &self.root);
        }
        if convertible == 0 {
            if let Some(error) = vanished {
                return Err(error);
            }
        }
        for (reason, count) in skipped {
            found.insert(format!("skipped.{reason}"), count.to_string());
        }
        Ok(UndoRecord {
            action: action.clone(),
            boot_id: boot_id(&self.root)?,
            found,
        })
    }

    fn advance(&mut self, record: &UndoRecord, direction: Direction) -> Result<Progress, PlatformError> {
        self.require_live()?;
        require_namespaces(&self.root, record)?;
        if let Some(answer) = of_another_boot(&self.root, record, direction)? {
            return Ok(answer);
        }
        let known = self
            .tasks
            .get(&record.action.id)
            .is_some_and(|t| t.direction == direction && !t.done);
        if !known {
            self.tasks
                .insert(record.action.id, Task::new(&self.root, record, direction)?);
        }
        let Some(task) = self.tasks.get_mut(&record.action.id) else {
            return Err(unsupported("no task"));
        };
        let outcome = match direction {
            Direction::Apply => task.apply(&self.root),
            Direction::Undo => task.undo(&self.root),
        };
        if !matches!(&outcome, Ok(progress) if !progress.done) {
            // After a fault the next call starts over from what the machine shows. At the end the descriptors are
            // closed: a change may stay in force for weeks.
            self.tasks.remove(&record.action.id);
        }
        outcome
    }

    fn forget(&mut self, record: &UndoRecord) {
        self.tasks.remove(&record.action.id);
    }
}

// Reasons why a piece is left as it was. Stable: they appear in histories.
const ALREADY_HUGE: &str = "already huge";
const HOLES: &str = "has holes that would be filled";
const EMPTY: &str = "no page present";
const UNMAPPED: &str = "not mapped";
const ENDED: &str = "process ended";
const FORKED: &str = "pages shared with a forked process would be copied";
const SEVERAL: &str = "mapped by several processes, could not be undone";
const REFUSED: &str = "refused by the kernel (EINVAL), e.g. offset not aligned";
const IN_USE: &str = "pages in use at every attempt (EAGAIN)";
const NOT_HUGE: &str = "converted, but not huge when checked";

/// Arguments of an action, all optional:
/// * `slice_ms`: length of one slice, 1..=100, default 20.
/// * `duty`: share of wall time in conversion calls, 0.01..=1, default 0.5.
/// * `bytes_per_second`: upper bound. `several_mappers`: `allow` or `refuse`.
/// * `free_memory_min`: least MemAvailable in bytes, default the larger of 256 MiB and 2 % of MemTotal.
#[derive(Clone, Debug, PartialEq)]
struct Settings {
    slice: Duration,
    duty: f64,
    bytes_per_second: Option<u64>,
    free_memory_min: Option<u64>,
    several_mappers: bool,
}

impl Settings {
    fn parse(action: &Action) -> Result<Self, PlatformError> {
        let mut settings = Self {
            slice: Duration::from_millis(20),
            duty: 0.5,
            bytes_per_second: None,
            free_memory_min: None,
            several_mappers: false,
        };
        for (name, value) in &action.arguments {
            let wrong = |expected: &str| PlatformError::Rejected {
                what: format!("argument {name} of large_pages"),
                value: value.clone(),
                errno: format!("expected {expected}"),
            };
            match name.as_str() {
                "slice_ms" => {
                    let ms = value.parse().ok().filter(|ms| (1..=100).contains(ms));
                    settings.slice = Duration::from_millis(ms.ok_or_else(|| wrong("1 to 100 milliseconds"))?);
                }
                "duty" => {
                    let duty = value.parse().ok().filter(|d| (0.01..=1.0).contains(d));
                    settings.duty = duty.ok_or_else(|| wrong("a share from 0.01 to 1"))?;
                }
                "bytes_per_second" => {
                    let rate = value.parse().ok().filter(|rate| *rate >= PIECE / 10);
                    settings.bytes_per_second =
                        Some(rate.ok_or_else(|| wrong("a number of bytes, at least 209715"))?);
                }
                "free_memory_min" => {
                    settings.free_memory_min = Some(value.parse().map_err(|_| wrong("a number of bytes"))?);
                }
                "several_mappers" => {
                    settings.several_mappers = match value.as_str() {
                        "allow" => true,
                        "refuse" => false,
                        _ => return Err(wrong("allow or refuse")),
                    };
                }
                _ => {
                    return Err(wrong(
                        "slice_ms, duty, bytes_per_second, free_memory_min or several_mappers",
                    ));
                }
            }
        }
        Ok(settings)
    }

    /// How long to wait after a slice that spent `inside` in calls, took `elapsed` and converted `bytes`.
    fn pause(&self, inside: Duration, elapsed: Duration, bytes: u64) -> Duration {
        pacing::pause(self.duty, self.bytes_per_second, inside, elapsed, bytes)
    }

    /// Most pieces in one slice, so that the rate can be kept with the longest pause.
    fn pieces_per_slice(&self) -> u64 {
        self.bytes_per_second
            .map_or(u64::MAX, |rate| (rate * PAUSE_MAX.as_secs() / 2 / PIECE).max(1))
    }
}

/// The memory target of the action, if it can be carried out.
fn checked_targets(action: &Action) -> Result<&[MemoryTarget], PlatformError> {
    let rejected = |value: String, why: &str| PlatformError::Rejected {
        what: "target of large_pages".into(),
        value,
        errno: why.into(),
    };
    let targets = match &action.target {
        Target::Memory(targets) => targets,
        Target::Nothing => return Err(rejected("nothing".into(), "memory expected")),
        Target::Files(_) => return Err(rejected("files".into(), "memory expected")),
        Target::Cpus(_) => return Err(rejected("CPUs".into(), "memory expected")),
        Target::Pages(_) => return Err(rejected("a page move".into(), "pieces of memory expected")),
        Target::Reader(_) => return Err(rejected("a reader".into(), "pieces of memory expected")),
    };
    if targets.len() > PROCESSES_PER_ACTION_MAX {
        return Err(rejected(
            format!("{} processes", targets.len()),
            "too many for one action",
        ));
    }
    let pieces: usize = targets.iter().map(|t| t.pieces.len()).sum();
    if pieces > PIECES_PER_ACTION_MAX {
        return Err(rejected(format!("{pieces} pieces"), "too many for one action"));
    }
    let processes: BTreeSet<_> = targets.iter().map(|t| t.process).collect();
    if processes.len() != targets.len() {
        return Err(rejected("a process named twice".into(), "each process once"));
    }
    for target in targets {
        let highest = target.pieces.last().copied().unwrap_or(0);
        if !target.pieces.is_sorted_by(|a, b| a < b)
            || target.pieces.iter().any(|p| p % PIECE != 0)
            || highest.checked_add(PIECE).is_none()
        {
            return Err(rejected(
                format!("pieces of process {}", target.process),
                "multiples of 2 MiB in ascending order expected",
            ));
        }
    }
    Ok(targets)
}

/// A process that certainly is the one of the record: its pidfd is opened before its start time is compared.
struct Process {
    id: ProcessId,
    handle: OwnedFd,
    pagemap: Pagemap,
    image: String,
}

impl Process {
    /// Opens the process. If `image` is given, the process must still run it.
    fn open(root: &Root, id: ProcessId, image: Option<&str>) -> Result<Self, PlatformError> {
        let vanished = || PlatformError::Vanished {
            target: format!("process {id}"),
        };
        let handle = pidfd_open(id.pid).map_err(|e| match e.raw_os_error() {
            // EINVAL, ENOENT (Linux 6.15): the number now belongs to a thread of another process.
            Some(libc::ESRCH | libc::EINVAL | libc::ENOENT) => vanished(),
            Some(libc::ENOSYS) => unsupported("the kernel has no pidfd_open (Linux 5.3)"),
            Some(libc::EPERM | libc::EACCES) => denied(id),
            // Out of descriptors or memory: no sign that the process ended, so the undo stays owed.
            _ => PlatformError::Busy {
                what: format!("process {id}"),
                why: e.to_string(),
            },
        })?;
        let pagemap = Pagemap::open(&root.path("/proc"), id.pid).map_err(|e| read_error(id, &e))?;
        // Checked last: a process that took the number before the opening would have another start time.
        let stat = ProcessStat::read(root, id)?;
        if stat.start_ticks != id.start_ticks || stat.ended || image.is_some_and(|image| image != stat.image)
        {
            return Err(vanished());
        }
        Ok(Self {
            id,
            handle,
            pagemap,
            image: stat.image,
        })
    }

    /// Whether it still runs the same program. A file that cannot be read now (descriptors or memory are short) is no
    /// sign of the end. The handles reach this process or nobody in any case.
    fn is_alive(&self, root: &Root) -> bool {
        match ProcessStat::read(root, self.id) {
            Ok(stat) => stat.start_ticks == self.id.start_ticks && !stat.ended && stat.image == self.image,
            Err(error) => !matches!(error, PlatformError::Vanished { .. }),
        }
    }

    /// States of ascending pieces, by as few queries as possible.
    fn states(&mut self, pieces: &[u64], states: &mut Vec<PieceState>) -> Result<(), PlatformError> {
        let mut run_states = Vec::new();
        states.clear();
        for run in pieces.chunk_by(|a, b| a + PIECE == *b) {
            let first = run.first().copied().unwrap_or(0);
            self.pagemap
                .piece_states(first, run.len() as u64, &mut run_states)
                .map_err(|e| read_error(self.id, &e))?;
            states.extend_from_slice(&run_states);
        }
        Ok(())
    }
}

/// One process, as `prepare` saw it.
#[derive(Default)]
struct Survey {
    /// Indices into the target's pieces, for pieces whose 512 base pages were all present. Only these are ever touched.
    convertible: Vec<usize>,
    /// The convertible pieces in shared memory.
    shared: Vec<usize>,
    already_huge: u64,
    skipped: BTreeMap<&'static str, u64>,
}

impl Survey {
    fn take(
        process: &mut Process,
        target: &MemoryTarget,
        settings: &Settings,
    ) -> Result<Self, PlatformError> {
        let mut seen = Self::default();
        let mut states = Vec::new();
        for (chunk, pieces) in target.pieces.chunks(PIECES_PER_CHECK).enumerate() {
            process.states(pieces, &mut states)?;
            for (offset, (piece, state)) in pieces.iter().zip(&states).enumerate() {
                let index = chunk * PIECES_PER_CHECK + offset;
                let skip = match state {
                    PieceState::Full => {
                        let sharing = process
                            .pagemap
                            .sharing(*piece)
                            .map_err(|e| read_error(process.id, &e))?;
                        if sharing.file > 0 {
                            seen.shared.push(index);
                        }
                        match (sharing.shared, sharing.file) {
                            (0, _) => None,
                            (_, 0) => Some(FORKED),
                            _ if settings.several_mappers => None,
                            _ => Some(SEVERAL),
                        }
                    }
                    PieceState::Huge => {
                        seen.already_huge += 1;
                        Some(ALREADY_HUGE)
                    }
                    PieceState::Sparse { .. } => Some(HOLES),
                    PieceState::Empty => Some(EMPTY),
                    PieceState::Unmapped => Some(UNMAPPED),
                };
                match skip {
                    None => seen.convertible.push(index),
                    Some(reason) => *seen.skipped.entry(reason).or_default() += 1,
                }
            }
        }
        Ok(seen)
    }

    fn record(&self, found: &mut BTreeMap<String, String>, process: &Process, root: &Root) {
        let id = process.id;
        let mut note = |name: &str, value: String| {
            found.insert(process_key(name, id), value);
        };
        note("convertible", ranges_to_text(&self.convertible));
        note("shared", ranges_to_text(&self.shared));
        note("image", process.image.clone());
        note("huge_bytes", (self.already_huge * PIECE).to_string());
        // For people: the kernel's own counter, inexact by some pages per CPU.
        if let Some(pages) = fs::read_to_string(root.path(&format!("/proc/{}/statm", id.pid)))
            .ok()
            .and_then(|text| text.split_ascii_whitespace().nth(1)?.parse::<u64>().ok())
        {
            note("resident_bytes", (pages * BASE_PAGE).to_string());
        }
    }
}

/// Ascending indices as `0-5,7,9-10`.
fn ranges_to_text(indices: &[usize]) -> String {
    let runs = indices.chunk_by(|a, b| a + 1 == *b).filter_map(|run| {
        let (first, last) = (run.first()?, run.last()?);
        Some(if first == last {
            first.to_string()
        } else {
            format!("{first}-{last}")
        })
    });
    runs.collect::<Vec<_>>().join(",")
}

/// The reverse of [`ranges_to_text`]. `None` unless ascending and below `limit`.
fn ranges_from_text(text: &str, limit: usize) -> Option<Vec<usize>> {
    let mut indices = Vec::new();
    for run in text.split(',').filter(|run| !run.is_empty()) {
        let (first, last) = run.split_once('-').unwrap_or((run, run));
        let (first, last): (usize, usize) = (first.parse().ok()?, last.parse().ok()?);
        if first > last || last >= limit || indices.last().is_some_and(|previous| *previous >= first) {
            return None;
        }
        indices.extend(first..=last);
    }
    Some(indices)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Pending { attempts: u8 },
    Done { attempts: u8 },
    Skipped(&'static str),
}

struct Piece {
    address: u64,
    shared: bool,
    stage: Stage,
}

struct ProcessTask {
    /// `None` once it is known to be gone.
    process: Option<Process>,
    pieces: Vec<Piece>,
}

/// The way to one direction of one action. Everything in it can be rebuilt from the record and the machine.
struct Task {
    direction: Direction,
    settings: Settings,
    processes: Vec<ProcessTask>,
    total: u64,
    found_skipped: BTreeMap<String, u64>,
    enabled: String,
    /// Next piece to check: index of the process, index of the piece.
    cursor: (usize, usize),
    rounds: u8,
    checking: bool,
    done: bool,
    flags_checked: bool,
    no_memory: u8,
    pressure: Pressure,
    bloat: u64,
}

impl Task {
    fn new(root: &Root, record: &UndoRecord, direction: Direction) -> Result<Self, PlatformError> {
        let targets = checked_targets(&record.action)?;
        let mut processes = Vec::with_capacity(targets.len());
        let mut alive = 0;
        for target in targets {
            let found = |name: &str| {
                record
                    .found
                    .get(&process_key(name, target.process))
                    .map(String::as_str)
            };
            let indices = |name: &str| {
                let text = found(name).unwrap_or("");
                ranges_from_text(text, target.pieces.len()).ok_or_else(|| PlatformError::Malformed {
                    path: format!("undo record {}", record.action.id).into(),
                    line: format!("{} = {text}", process_key(name, target.process)),
                })
            };
            let convertible = indices("convertible")?;
            let shared: BTreeSet<usize> = indices("shared")?.into_iter().collect();
            let process = match Process::open(root, target.process, found("image")) {
                Ok(process) => Some(process),
                Err(PlatformError::Vanished { .. }) => None,
                Err(error) => return Err(error),
            };
            let stage = match process {
                Some(_) => Stage::Pending { attempts: 0 },
                None => Stage::Skipped(ENDED),
            };
            alive += usize::from(process.is_some());
            let pieces = convertible
                .into_iter()
                .filter_map(|index| Some((index, *target.pieces.get(index)?)))
                .map(|(index, address)| Piece {
                    address,
                    shared: shared.contains(&index),
                    stage,
                })
                .collect();
            processes.push(ProcessTask { process, pieces });
        }
        if direction == Direction::Apply {
            if alive == 0 && !processes.is_empty() {
                return Err(PlatformError::Vanished {
                    target: format!("workload {}", record.action.workload),
                });
            }
            for process in processes.iter().filter_map(|p| p.process.as_ref()) {
                require_process_allows(root, process.id)?;
            }
        }
        Ok(Self {
            direction,
            settings: Settings::parse(&record.action)?,
            processes,
            total: targets.iter().map(|t| t.pieces.len() as u64).sum(),
            found_skipped: record
                .found
                .iter()
                .filter_map(|(name, count)| {
                    Some((name.strip_prefix("skipped.")?.to_owned(), count.parse().ok()?))
                })
                .collect(),
            enabled: record.found.get("enabled").cloned().unwrap_or_default(),
            cursor: (0, 0),
            rounds: 0,
            checking: false,
            done: false,
            flags_checked: false,
            no_memory: 0,
            pressure: Pressure::default(),
            bloat: 0,
        })
    }

    fn apply(&mut self, root: &Root) -> Result<Progress, PlatformError> {
        self.drop_ended(root);
        if self.processes.iter().all(|p| p.process.is_none()) && !self.processes.is_empty() {
            return Err(PlatformError::Vanished {
                target: "every process of the action".into(),
            });
        }
        let enabled = require_switch(root)?;
        if self.enabled.is_empty() {
            self.enabled = enabled;
        }
        let mut slice = Slice::start();
        if !self.checking {
            self.require_memory(root)?;
            if let Some(pause) = self.pressure.pause(root, "conversion to large pages")? {
                return Ok(self.progress(&slice, pause));
            }
        }
        let mut pause_more = Duration::ZERO;
        let pieces_max = self.settings.pieces_per_slice();
        while slice.started.elapsed() < self.settings.slice {
            if self.checking {
                if self.check_some()? {
                    if self.is_pending() {
                        self.checking = false;
                    } else {
                        self.done = true;
                    }
                    break;
                }
            } else if !self.convert_some(root, &mut slice)? {
                self.rounds += 1;
                self.cursor = (0, 0);
                if self.is_pending() {
                    // Gives the holders of the pages time to let go, longer each time.
                    pause_more = Duration::from_millis(5) * (1 << self.rounds.min(6));
                    break;
                }
                self.checking = true;
            }
            if slice.longest > self.settings.slice / 2 || slice.bytes / PIECE >= pieces_max {
                break;
            }
        }
        let pause = self
            .settings
            .pause(slice.inside, slice.started.elapsed(), slice.bytes)
            .max(pause_more);
        Ok(self.progress(&slice, pause))
    }

    /// Checks and converts the next pieces until the slice ends. `false` at the end of the pass.
    ///
    /// Pages shared with another process are left alone: converting would copy anonymous pages that a fork shares.
    /// Shared memory that two processes map by a large page cannot be split from outside (Linux 6.18:
    /// `folio_maybe_mapped_shared` ends `MADV_COLD` early; tested). An action may allow it by `several_mappers`; its
    /// undo is then [`PlatformError::Busy`] while several map it.
    fn convert_some(&mut self, root: &Root, slice: &mut Slice) -> Result<bool, PlatformError> {
        let Some((index, window)) = self.next_window(PIECES_PER_LOOK) else {
            return Ok(false);
        };
        let pieces_max = self.settings.pieces_per_slice();
        let Some(task) = self.processes.get_mut(index) else {
            return Ok(false);
        };
        let Some(process) = &mut task.process else {
            return Ok(false);
        };
        let addresses: Vec<u64> = window
            .iter()
            .filter_map(|i| Some(task.pieces.get(*i)?.address))
            .collect();
        let mut states = Vec::new();
        process.states(&addresses, &mut states)?;
        for (i, state) in window.iter().zip(&states) {
            let Some(piece) = task.pieces.get_mut(*i) else {
                break;
            };
            self.cursor = (index, i + 1);
            let Stage::Pending { attempts } = piece.stage else {
                continue;
            };
            let zero = freed_by_our_undo(*state);
            piece.stage = match (state, piece.shared) {
                (PieceState::Huge, _) => Stage::Done { attempts },
                (PieceState::Unmapped, _) => Stage::Skipped(UNMAPPED),
                (PieceState::Sparse { .. }, false) if zero.is_none() => Stage::Skipped(HOLES),
                (PieceState::Empty, false) => Stage::Skipped(EMPTY),
                // After an undo, shared pages stay in memory but are mapped again only on access. The split freed
                // zero-filled private pages (see `freed_by_our_undo`).
                (PieceState::Sparse { .. } | PieceState::Empty | PieceState::Full, _) => {
                    let sharing = process
                        .pagemap
                        .sharing(piece.address)
                        .map_err(|e| read_error(process.id, &e))?;
                    // Checked again just before the conversion: the window's check may be some calls old. Since then
                    // the program may have freed pages, or become another program.
                    if !piece.shared && sharing.exclusive + sharing.shared < PAGES_PER_PIECE {
                        piece.stage = Stage::Skipped(HOLES);
                        continue;
                    }
                    // The zero page counts as shared, but nobody gets a copy of it.
                    if sharing.shared > zero.unwrap_or(0) && sharing.file == 0 {
                        piece.stage = Stage::Skipped(FORKED);
                        continue;
                    }
                    if sharing.shared > zero.unwrap_or(0) && !self.settings.several_mappers {
                        piece.stage = Stage::Skipped(SEVERAL);
                        continue;
                    }
                    let outcome = slice.timed(|| {
                        process_madvise(process.handle.as_fd(), piece.address, PIECE, Advice::Collapse)
                    });
                    match outcome {
                        Ok(()) => {
                            slice.bytes += PIECE;
                            self.no_memory = 0;
                            Stage::Done {
                                attempts: attempts + 1,
                            }
                        }
                        Err(AdviseError::Again | AdviseError::Interrupted) if attempts + 1 < ATTEMPTS_MAX => {
                            Stage::Pending {
                                attempts: attempts + 1,
                            }
                        }
                        Err(AdviseError::Again | AdviseError::Interrupted) => Stage::Skipped(IN_USE),
                        Err(error @ (AdviseError::NoMemory | AdviseError::Busy)) => {
                            self.no_memory += 1;
                            if self.no_memory >= NO_MEMORY_MAX {
                                return Err(PlatformError::Busy {
                                    what: format!("large pages for process {}", process.id),
                                    why: error.to_string(),
                                });
                            }
                            Stage::Pending { attempts }
                        }
                        Err(AdviseError::Invalid) => {
                            // For shared memory the kernel also refuses what `shmem_enabled` forbids.
                            if !self.flags_checked && sharing.file == 0 {
                                self.flags_checked = true;
                                let handle = process.handle.as_fd();
                                require_mapping_allows(root, process.id, handle, piece.address)?;
                            }
                            Stage::Skipped(REFUSED)
                        }
                        Err(AdviseError::NoProcess) => {
                            end_process(task);
                            return Ok(true);
                        }
                        Err(error) => return Err(advise_error(process.id, error)),
                    }
                }
            };
            if slice.started.elapsed() >= self.settings.slice
                || slice.longest > self.settings.slice / 2
                || slice.bytes / PIECE >= pieces_max
            {
                break;
            }
        }
        Ok(true)
    }

    /// Reads back some of the converted pieces. `true` when all have been read.
    fn check_some(&mut self) -> Result<bool, PlatformError> {
        let (index, from) = self.cursor;
        let Some(task) = self.processes.get_mut(index) else {
            self.cursor = (0, 0);
            return Ok(true);
        };
        let until = task.pieces.len().min(from + PIECES_PER_CHECK);
        self.cursor = if until == task.pieces.len() {
            (index + 1, 0)
        } else {
            (index, until)
        };
        let Some(process) = &mut task.process else {
            return Ok(false);
        };
        let Some(pieces) = task.pieces.get_mut(from..until) else {
            return Ok(false);
        };
        let addresses: Vec<u64> = pieces.iter().map(|p| p.address).collect();
        let mut states = Vec::new();
        process.states(&addresses, &mut states)?;
        for (piece, state) in pieces.iter_mut().zip(&states) {
            if let Stage::Done { attempts } = piece.stage {
                if *state != PieceState::Huge {
                    piece.stage = match attempts {
                        ATTEMPTS_MAX.. => Stage::Skipped(NOT_HUGE),
                        attempts => Stage::Pending { attempts },
                    };
                }
            }
        }
        Ok(false)
    }

    fn undo(&mut self, root: &Root) -> Result<Progress, PlatformError> {
        self.drop_ended(root);
        let mut slice = Slice::start();
        let mut pause = Duration::ZERO;
        while slice.started.elapsed() < self.settings.slice {
            if self.split_some(&mut slice)? {
                continue;
            }
            self.cursor = (0, 0);
            if !self.is_pending() {
                self.done = true;
                break;
            }
            self.rounds += 1;
            if self.rounds > UNDO_ROUNDS_MAX {
                let left = self
                    .pieces()
                    .filter(|p| matches!(p.stage, Stage::Pending { .. }))
                    .count();
                return Err(PlatformError::Busy {
                    what: format!("splitting {left} large pages"),
                    why: "others map them too, or they are pinned or locked; possible when that ends".into(),
                });
            }
            // Only a check follows the first pass. Later passes wait for other mappers to go.
            if self.rounds > 1 {
                pause = Duration::from_millis(5) * (1 << self.rounds.min(6));
                break;
            }
        }
        Ok(self.progress(&slice, pause))
    }

    /// Checks the next pieces and splits the large ones. `false` at the end of the pass. A piece is done once it is
    /// seen not to be large: after a split, in the next pass.
    fn split_some(&mut self, slice: &mut Slice) -> Result<bool, PlatformError> {
        let Some((index, window)) = self.next_window(PIECES_PER_SPLIT) else {
            return Ok(false);
        };
        let Some(task) = self.processes.get_mut(index) else {
            return Ok(false);
        };
        let Some(process) = &mut task.process else {
            return Ok(false);
        };
        let addresses: Vec<u64> = window
            .iter()
            .filter_map(|i| Some(task.pieces.get(*i)?.address))
            .collect();
        let mut states = Vec::new();
        process.states(&addresses, &mut states)?;
        let mut ranges = Vec::with_capacity(window.len());
        for (i, state) in window.iter().zip(&states) {
            let Some(piece) = task.pieces.get_mut(*i) else {
                break;
            };
            if *state == PieceState::Huge {
                ranges.push(AddressRange {
                    start: piece.address + PIECE - BASE_PAGE,
                    length: BASE_PAGE,
                });
            } else {
                piece.stage = Stage::Done { attempts: 0 };
            }
            self.cursor = (index, i + 1);
        }
        let mut left = ranges.as_slice();
        while !left.is_empty() {
            let batch = left.get(..RANGES_PER_UNDO_CALL).unwrap_or(left);
            let outcome =
                slice.timed(|| process_madvise_vectored(process.handle.as_fd(), batch, Advice::Cold));
            let advised = match outcome {
                Ok(bytes) => (bytes / BASE_PAGE) as usize,
                Err(AdviseError::NoProcess) => {
                    end_process(task);
                    return Ok(true);
                }
                Err(error @ (AdviseError::NotPermitted | AdviseError::NotSupported)) => {
                    return Err(advise_error(process.id, error));
                }
                // The first range was refused: unmapped or changed since the check. The next pass finds out.
                Err(_) => 0,
            };
            // In a batch cut short, the range at its end was refused: go on behind it.
            let passed = if advised >= batch.len() {
                batch.len()
            } else {
                advised + 1
            };
            left = left.get(passed..).unwrap_or(&[]);
        }
        Ok(true)
    }

    /// The next pending pieces of one process, at most `count`, by index. Moves the cursor to the process.
    fn next_window(&mut self, count: usize) -> Option<(usize, Vec<usize>)> {
        loop {
            let (index, from) = self.cursor;
            let task = self.processes.get(index)?;
            let window: Vec<usize> = task
                .pieces
                .iter()
                .enumerate()
                .skip(from)
                .filter(|(_, p)| matches!(p.stage, Stage::Pending { .. }))
                .map(|(i, _)| i)
                .take(count)
                .collect();
            if !window.is_empty() {
                return Some((index, window));
            }
            self.cursor = (index + 1, 0);
        }
    }

    fn drop_ended(&mut self, root: &Root) {
        for task in &mut self.processes {
            if task
                .process
                .as_ref()
                .is_some_and(|process| !process.is_alive(root))
            {
                end_process(task);
            }
        }
    }

    fn pieces(&self) -> impl Iterator<Item = &Piece> {
        self.processes.iter().flat_map(|p| &p.pieces)
    }

    fn is_pending(&self) -> bool {
        self.pieces().any(|p| matches!(p.stage, Stage::Pending { .. }))
    }

    fn require_memory(&self, root: &Root) -> Result<(), PlatformError> {
        let path = root.path("/proc/meminfo");
        let text = fs::read_to_string(&path).unwrap_or_default();
        let kib = |name: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(name))?;
            line.trim_start_matches(':')
                .split_ascii_whitespace()
                .next()?
                .parse::<u64>()
                .ok()
        };
        let (Some(total), Some(available)) = (kib("MemTotal"), kib("MemAvailable")) else {
            return Err(PlatformError::Malformed {
                path,
                line: text.lines().next().unwrap_or("").to_owned(),
            });
        };
        let floor = self
            .settings
            .free_memory_min
            .unwrap_or_else(|| (256 * 1024 * 1024).max(total * 1024 / 50));
        if available * 1024 < floor {
            return Err(PlatformError::Busy {
                what: "conversion to large pages".into(),
                why: format!(
                    "{} of memory available, at least {} wanted",
                    Bytes(available * 1024),
                    Bytes(floor)
                ),
            });
        }
        for process in self.processes.iter().filter_map(|p| p.process.as_ref()) {
            let pid = process.id.pid;
            if let Some(room) = crate::control_group::room(root, pid) {
                if room < GROUP_ROOM_MIN {
                    return Err(PlatformError::Busy {
                        what: format!("conversion to large pages of process {pid}"),
                        why: format!(
                            "its control group has {} left below its memory limit, at least {} wanted",
                            Bytes(room),
                            Bytes(GROUP_ROOM_MIN)
                        ),
                    });
                }
            }
        }
        Ok(())
    }

    fn progress(&self, slice: &Slice, pause: Duration) -> Progress {
        let mut skipped = self.found_skipped.clone();
        let mut finished = 0;
        for piece in self.pieces() {
            match piece.stage {
                Stage::Done { .. } => finished += 1,
                Stage::Skipped(reason) => *skipped.entry(reason.to_owned()).or_default() += 1,
                Stage::Pending { .. } => {}
            }
        }
        Progress {
            done: self.done,
            finished,
            total: self.total,
            skipped,
            stalled: nanoseconds(slice.inside),
            longest_call: nanoseconds(slice.longest),
            pause: nanoseconds(pause),
            bloat: Bytes(self.bloat),
            verified: self.done,
        }
    }
}

/// The process is gone: its handles are closed, its remaining work is void.
fn end_process(task: &mut ProcessTask) {
    task.process = None;
    for piece in &mut task.pieces {
        if matches!(piece.stage, Stage::Pending { .. }) {
            piece.stage = Stage::Skipped(ENDED);
        }
    }
}

fn require_kernel(root: &Root) -> Result<(), PlatformError> {
    let path = root.path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size");
    let size = fs::read_to_string(&path).map_err(|e| unsupported(&format!("{}: {e}", path.display())))?;
    match size.trim().parse::<u64>() {
        Ok(PIECE) => Ok(()),
        Ok(other) => Err(unsupported(&format!(
            "the large page is {other} bytes, only 2 MiB is supported"
        ))),
        Err(_) => Err(PlatformError::Malformed { path, line: size }),
    }
}

/// The mode in force. An error where large pages are off, because `MADV_COLLAPSE` would ignore that.
fn require_switch(root: &Root) -> Result<String, PlatformError> {
    let path = root.path(ENABLED);
    let text = fs::read_to_string(&path).map_err(|e| unsupported(&format!("{}: {e}", path.display())))?;
    let mode = text
        .split_once('[')
        .and_then(|(_, rest)| rest.split_once(']'))
        .map(|(mode, _)| mode.to_owned());
    match mode {
        Some(mode) if mode == "never" => Err(PlatformError::Conflict {
            what: ENABLED.into(),
            expected: "always or madvise".into(),
            found: mode,
        }),
        Some(mode) => Ok(mode),
        None => Err(PlatformError::Malformed { path, line: text }),
    }
}

/// `THP_enabled: 0` in `/proc/PID/status` is `PR_SET_THP_DISABLE`.
fn require_process_allows(root: &Root, id: ProcessId) -> Result<(), PlatformError> {
    let text =
        fs::read_to_string(root.path(&format!("/proc/{}/status", id.pid))).map_err(|e| read_error(id, &e))?;
    let disabled = text
        .lines()
        .any(|l| l.strip_prefix("THP_enabled:").is_some_and(|v| v.trim() == "0"));
    if !disabled {
        return Ok(());
    }
    Err(PlatformError::Conflict {
        what: format!("use of large pages by process {id}"),
        expected: "allowed".into(),
        found: "PR_SET_THP_DISABLE".into(),
    })
}

/// After the kernel refused a piece: did the program ask for that (`MADV_NOHUGEPAGE`)? The kernel checks the mapping
/// before it looks for pieces in the range. One base page holds none (Linux 6.1 to 6.18, `madvise_collapse`).
fn require_mapping_allows(
    root: &Root,
    id: ProcessId,
    handle: BorrowedFd<'_>,
    address: u64,
) -> Result<(), PlatformError> {
    require_process_allows(root, id)?;
    match process_madvise(handle, address, BASE_PAGE, Advice::Collapse) {
        Err(AdviseError::Invalid) => Err(PlatformError::Conflict {
            what: format!("use of large pages by process {id} at {address:#x}"),
            expected: "allowed".into(),
            found: "MADV_NOHUGEPAGE".into(),
        }),
        _ => Ok(()),
    }
}

fn unsupported(why: &str) -> PlatformError {
    PlatformError::Unsupported {
        what: "conversion to large pages".into(),
        why: why.to_owned(),
    }
}

fn advise_error(id: ProcessId, error: AdviseError) -> PlatformError {
    match error {
        AdviseError::NotPermitted => denied(id),
        AdviseError::NotSupported => unsupported("the kernel has no process_madvise (Linux 5.10)"),
        AdviseError::NoProcess => PlatformError::Vanished {
            target: format!("process {id}"),
        },
        error => PlatformError::Rejected {
            what: format!("process_madvise of process {id}"),
            value: "MADV_COLLAPSE".into(),
            errno: error.to_string(),
        },
    }
}

/// Number of shared zero pages in a piece that was full in the record and is complete otherwise. When a large page is
/// split, Linux 6.12 and later free zero-filled pages that way (`try_to_map_unused_to_zeropage` in mm/migrate.c).
/// Converting it again brings back no more memory than was found.
fn freed_by_our_undo(state: PieceState) -> Option<u16> {
    match state {
        PieceState::Sparse { present, zero } if present + zero == PAGES_PER_PIECE => Some(zero),
        PieceState::Sparse { .. }
        | PieceState::Huge
        | PieceState::Full
        | PieceState::Empty
        | PieceState::Unmapped => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn action(arguments: &[(&str, &str)]) -> Action {
        Action {
            id: ActionId(7),
            effector: "large_pages".into(),
            workload: "w".into(),
            target: Target::Memory(vec![]),
            arguments: arguments
                .iter()
                .map(|(k, v)| ((*k).to_owned(), (*v).to_owned()))
                .collect(),
            why: String::new(),
        }
    }

    #[test]
    fn index_ranges_survive_the_record() {
        assert_eq!(ranges_to_text(&[0, 1, 2, 5, 7, 8]), "0-2,5,7-8");
        assert_eq!(ranges_to_text(&[]), "");
        for bits in 0u32..256 {
            let indices: Vec<usize> = (0..8).filter(|i| bits >> i & 1 == 1).collect();
            assert_eq!(ranges_from_text(&ranges_to_text(&indices), 8), Some(indices));
        }
    }

    #[test]
    fn damaged_index_ranges_are_refused() {
        for text in [
            "8",
            "0-8",
            "3-1",
            "1,1",
            "2,1",
            "0-2,2",
            "x",
            "1-",
            "-1",
            "0-18446744073709551615",
        ] {
            assert_eq!(ranges_from_text(text, 8), None, "{text}");
        }
    }

    #[test]
    fn a_damaged_record_is_malformed_and_an_empty_one_undoes_nothing() {
        let id = ProcessId {
            pid: i32::MAX,
            start_ticks: 1,
        };
        let mut record = UndoRecord {
            action: action(&[]),
            boot_id: boot_id(&Root::default()).unwrap(),
            found: BTreeMap::new(),
        };
        record.action.target = Target::Memory(vec![MemoryTarget {
            process: id,
            pieces: vec![PIECE],
        }]);
        let mut effector = LargePages::new(Root::default());
        let nothing = effector.advance(&record, Direction::Undo).unwrap();
        assert_eq!((nothing.done, nothing.finished, nothing.total), (true, 0, 1));
        record.found.insert(process_key("convertible", id), "0-9".into());
        let error = effector.advance(&record, Direction::Undo).unwrap_err();
        assert!(matches!(error, PlatformError::Malformed { .. }), "{error}");
    }

    #[test]
    fn the_pause_keeps_duty_and_rate() {
        let ms = Duration::from_millis;
        let settings = |arguments: &[(&str, &str)]| Settings::parse(&action(arguments)).unwrap();
        assert_eq!(settings(&[]).pause(ms(10), ms(12), PIECE), ms(10));
        assert_eq!(settings(&[("duty", "1")]).pause(ms(10), ms(12), PIECE), ms(0));
        assert_eq!(
            settings(&[("duty", "0.1")])
                .pause(ms(10), ms(12), PIECE)
                .as_millis(),
            90
        );
        // 2 MiB at 20 MiB/s take 100 ms, of which 12 are over.
        let rate = settings(&[("bytes_per_second", "20971520")]);
        assert_eq!(rate.pause(ms(10), ms(12), PIECE), ms(88));
        assert_eq!(rate.pause(ms(0), ms(1), 0), ms(0));
        assert_eq!(
            settings(&[("duty", "0.01")]).pause(ms(5_000), ms(5_000), PIECE),
            PAUSE_MAX
        );
        // Whatever the rate, the pieces of a slice fit into the longest pause.
        for rate in [PIECE / 10, PIECE, 100 * PIECE] {
            let text = rate.to_string();
            let limited = settings(&[("bytes_per_second", &text)]).pieces_per_slice();
            assert!(
                limited == 1 || limited * PIECE <= rate * PAUSE_MAX.as_secs(),
                "{rate}: {limited}"
            );
        }
    }

    #[test]
    fn what_the_administrator_switched_off_stays_off() {
        let tree = tempfile::tempdir().unwrap();
        let root = Root::new(tree.path());
        assert!(matches!(
            require_switch(&root),
            Err(PlatformError::Unsupported { .. })
        ));
        assert!(matches!(
            require_kernel(&root),
            Err(PlatformError::Unsupported { .. })
        ));
        let directory = root.path("/sys/kernel/mm/transparent_hugepage");
        fs::create_dir_all(&directory).unwrap();
        let set = |file: &str, text: &str| fs::write(directory.join(file), text).unwrap();
        set("enabled", "always madvise [never]\n");
        assert!(
            matches!(require_switch(&root), Err(PlatformError::Conflict { found, .. }) if found == "never")
        );
        set("enabled", "always [madvise] never\n");
        assert_eq!(require_switch(&root), Ok("madvise".to_owned()));
        set("enabled", "[always] madvise never\n");
        assert_eq!(require_switch(&root), Ok("always".to_owned()));
        set("enabled", "always madvise never\n");
        assert!(matches!(
            require_switch(&root),
            Err(PlatformError::Malformed { .. })
        ));
        set("hpage_pmd_size", "2097152\n");
        assert_eq!(require_kernel(&root), Ok(()));
        set("hpage_pmd_size", "536870912\n");
        assert!(matches!(
            require_kernel(&root),
            Err(PlatformError::Unsupported { .. })
        ));
    }

    #[test]
    fn a_process_that_is_there_is_found_and_one_that_is_not_has_vanished() {
        let root = Root::default();
        let pid = std::process::id() as i32;
        let stat = ProcessStat::read(&root, ProcessId { pid, start_ticks: 0 }).unwrap();
        let id = ProcessId {
            pid,
            start_ticks: stat.start_ticks,
        };
        assert!(
            Process::open(&root, id, Some(&stat.image))
                .unwrap()
                .is_alive(&root)
        );
        let later = ProcessId {
            pid,
            start_ticks: stat.start_ticks + 1,
        };
        for (id, image) in [
            (later, None),
            (id, Some("1-2")),
            (ProcessId { pid: i32::MAX, ..id }, None),
        ] {
            let outcome = Process::open(&root, id, image).map(|_| ());
            assert!(
                matches!(outcome, Err(PlatformError::Vanished { .. })),
                "{outcome:?}"
            );
        }
    }
}
