//! A big reader beside a program under multi-gen LRU (`/sys/kernel/mm/lru_gen/enabled`; Debian's kernel has it, off at boot),
//! in control groups of version 2 as in `file_cache.rs`. First without homeostat: what the program loses to the reader, and that
//! it comes back when the reader is kept to a little memory by hand. So nothing is proven by a reader that did no harm. Then
//! with two daemons: both contain the reader of their room. One is killed and `restore` follows; the other is stopped when the
//! program has its pages again.
//!
//! For comparison the same pair is looked at with multi-gen LRU off, which is told and not judged.

use super::Context;
use super::file_cache::{BACK_MIB, Disks, End, ROOT, Room, TICK, WORKER_MIB, watch};
use crate::instruments::{text, write};
use crate::{Failure, ensure};
use std::path::Path;
use std::time::{Duration, Instant};

const ENABLED: &str = "/sys/kernel/mm/lru_gen/enabled";
const MIN_TTL_MS: &str = "/sys/kernel/mm/lru_gen/min_ttl_ms";
/// All that the kernel has of it, and nothing.
const ON: &str = "7";
const OFF: &str = "0";
/// Memory of a slice at the start, and at least: room for the program and a reader that is contained. Where the edge is, over
/// which the program loses its pages, depends on how fast the emulation is; so less and less is there until it does.
const SLICE_MIB: u64 = 88;
const SLICE_MIN_MIB: u64 = 80;
const LESS_MIB: u64 = 4;
/// Of a CPU, what the reader uses, in percent.
const READER_DUTY: &str = "60";
/// What the reader gets by hand: about what homeostat gives it.
const BY_HAND_BYTES: u64 = 21 << 20;
/// The program has lost pages when so much less than its working set was mapped, and so many came back that had been taken.
const LOST_MIB: u64 = WORKER_MIB - 6;
const LOST_REFAULTS: u64 = 512;
/// It is looked at for so long alone or contained, and beside the reader.
const CALM: Duration = Duration::from_secs(4);
const BESIDE: Duration = Duration::from_secs(8);
/// It has its pages within this; seconds are usual.
const BACK_WITHIN: Duration = Duration::from_secs(180);

/// Counters of a group.
const REFAULTS: &str = "workingset_refault_file";
const MAJOR_FAULTS: &str = "pgmajfault";

/// Multi-gen LRU, switched back to what was found when dropped.
struct Generations {
    found: String,
}

impl Generations {
    fn find() -> Result<Self, Failure> {
        let ttl = text(MIN_TTL_MS)?;
        ensure!(ttl == "0", "{MIN_TTL_MS} is {ttl}, expected 0");
        Ok(Self {
            found: text(ENABLED)?,
        })
    }

    fn switch(&self, value: &str) -> Result<(), Failure> {
        write(ENABLED, value)
    }
}

impl Drop for Generations {
    fn drop(&mut self) {
        let _ = self.switch(&self.found);
    }
}

/// What became of the program in a stretch of time.
struct Figures {
    touches_per_s: f64,
    /// Pages that came back to it after they had been taken.
    refaults: u64,
    major_faults: u64,
    /// The least that was mapped.
    least_mib: u64,
}

impl Figures {
    fn of(room: &Room, stretch: Duration) -> Result<Self, Failure> {
        let begin = Instant::now();
        let (touches_before, seconds_before) = work(room)?;
        let refaults_before = counted(room, REFAULTS)?;
        let major_before = counted(room, MAJOR_FAULTS)?;
        let mut least_mib = room.mapped_mib()?;
        while begin.elapsed() < stretch {
            std::thread::sleep(TICK);
            least_mib = least_mib.min(room.mapped_mib()?);
        }
        let (touches, seconds) = work(room)?;
        let took = seconds - seconds_before;
        Ok(Self {
            // It reports once a second.
            touches_per_s: if took > 0.0 {
                (touches - touches_before) / took
            } else {
                0.0
            },
            refaults: counted(room, REFAULTS)?.saturating_sub(refaults_before),
            major_faults: counted(room, MAJOR_FAULTS)?.saturating_sub(major_before),
            least_mib,
        })
    }

    fn are_of_loss(&self) -> bool {
        self.least_mib <= LOST_MIB && self.refaults >= LOST_REFAULTS
    }
}

impl std::fmt::Display for Figures {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self {
            touches_per_s,
            refaults,
            major_faults,
            least_mib,
        } = self;
        write!(
            f,
            "{touches_per_s:.0} touches/s, {refaults} refaults, {major_faults} major faults, at least {least_mib} of {WORKER_MIB} MiB mapped"
        )
    }
}

/// Touches that the program has reported so far, and the seconds that they took.
fn work(room: &Room) -> Result<(f64, f64), Failure> {
    let told = text(room.report())?;
    let sum = |key: &str| -> f64 {
        let values = told.split_whitespace().filter_map(|word| word.strip_prefix(key));
        values.filter_map(|value| value.parse::<f64>().ok()).sum()
    };
    Ok((sum("work="), sum("interval_s=")))
}

/// A counter of the program's group.
fn counted(room: &Room, key: &str) -> Result<u64, Failure> {
    let path = room.group("worker").join("memory.stat");
    let value = text(&path)?.lines().find_map(|line| {
        let (name, value) = line.split_once(' ')?;
        (name == key).then(|| value.parse().ok())?
    });
    value.ok_or_else(|| Failure::Broken(format!("no {key} in {}", path.display())))
}

/// Waits until the program has its pages; fails when it never has.
fn wait_until_back(room: &Room, when: &str) -> Result<Duration, Failure> {
    let begin = Instant::now();
    loop {
        let mapped = room.mapped_mib()?;
        if mapped >= BACK_MIB {
            return Ok(begin.elapsed());
        }
        ensure!(
            begin.elapsed() < BACK_WITHIN,
            "{when} {mapped} of {WORKER_MIB} MiB are mapped after {} s",
            BACK_WITHIN.as_secs()
        );
        std::thread::sleep(TICK);
    }
}

/// A room whose program has settled in memory, and what it does alone.
fn settled(context: &Context, end: End, number: usize, slice_mib: u64) -> Result<(Room, Figures), Failure> {
    let room = Room::make(context, end, number, slice_mib, READER_DUTY)?;
    wait_until_back(&room, "alone")?;
    let alone = Figures::of(&room, CALM)?;
    Ok((room, alone))
}

/// Loss and return by hand, then containments and their ends.
pub(super) fn reader_is_contained(context: &Context) -> Result<(), Failure> {
    let _disks = Disks::make(context)?;
    write(Path::new(ROOT).join("cgroup.subtree_control"), "+memory")?;
    let generations = Generations::find()?;
    generations.switch(ON)?;
    let enabled = text(ENABLED)?;
    ensure!(enabled != "0x0000", "multi-gen LRU stays off");

    let (mut room, alone) = settled(context, End::Stopped, 0, SLICE_MIB)?;
    context.note(&format!("multi-gen LRU {enabled}, alone: {alone}"));
    ensure!(
        !alone.are_of_loss(),
        "the slice is too small for the program alone: {alone}"
    );
    room.start_reader()?;
    let mut slice_mib = SLICE_MIB;
    let beside = loop {
        let beside = Figures::of(&room, BESIDE)?;
        if beside.are_of_loss() {
            break beside;
        }
        context.note(&format!(
            "beside the reader in {slice_mib} MiB, no loss: {beside}"
        ));
        ensure!(
            slice_mib >= SLICE_MIN_MIB + LESS_MIB,
            "the program keeps its pages beside the reader: there is nothing to contain"
        );
        slice_mib -= LESS_MIB;
        room.allow(slice_mib)?;
    };
    context.note(&format!("beside the reader in {slice_mib} MiB: {beside}"));

    let limit = room.group("reader").join("memory.high");
    write(&limit, &BY_HAND_BYTES.to_string())?;
    let back = wait_until_back(&room, "with the reader contained by hand")?;
    let contained = Figures::of(&room, CALM)?;
    context.note(&format!(
        "contained by hand: its pages are back after {:.1} s, then {contained}",
        back.as_secs_f64()
    ));
    write(&limit, "max")?;

    let (mut other, _) = settled(context, End::Killed, 1, slice_mib)?;
    other.start_reader()?;
    let mut rooms = [room, other];
    for room in &mut rooms {
        room.start_daemon()?;
    }
    watch(context, &mut rooms)?;
    drop(rooms);
    let now = text(ENABLED)?;
    ensure!(now == enabled, "{ENABLED} became {now}");

    generations.switch(OFF)?;
    let (mut room, alone) = settled(context, End::Stopped, 0, slice_mib)?;
    room.start_reader()?;
    let beside = Figures::of(&room, BESIDE)?;
    context.note(&format!(
        "for comparison with multi-gen LRU off, alone: {alone}; beside the reader: {beside}"
    ));
    Ok(())
}
