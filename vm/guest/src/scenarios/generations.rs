//! A big reader beside a program under multi-gen LRU (`/sys/kernel/mm/lru_gen/enabled`; Debian's kernel has it, off at boot),
//! in control groups of version 2 as in `file_cache.rs`.
//!
//! The pair of that file loses nothing: the program gets its pages beside the reader and keeps them, so the daemon contains
//! nobody. That is asked for. A program that is as large as its slice but for a little does lose its pages to the reader, which
//! is seen first without homeostat, so that nothing is proven by a reader that does no harm. There two daemons contain the
//! reader of their room: one is killed and `restore` follows, the other is stopped. That the program has its pages again is asked
//! for under a limit set by hand, and not of homeostat: it leaves a reader 16 MiB and twice its own, more than there is here.

use super::Context;
use super::file_cache::{Disks, End, ROOT, Room, Size, TICK, USUAL, watch};
use crate::instruments::{text, write};
use crate::{Failure, ensure};
use std::path::Path;
use std::time::{Duration, Instant};

const ENABLED: &str = "/sys/kernel/mm/lru_gen/enabled";
const MIN_TTL_MS: &str = "/sys/kernel/mm/lru_gen/min_ttl_ms";
/// All that the kernel has of it.
const ON: &str = "7";
/// Over which edge the program loses its pages depends on how fast the emulation is; so less and less is there until it does.
const EDGE: Size = Size {
    slice_mib: 80,
    worker_mib: 64,
};
const SLICE_MIN_MIB: u64 = 70;
const LESS_MIB: u64 = 2;
/// What the reader gets by hand: then the program has room.
const BY_HAND_BYTES: u64 = 8 << 20;
/// So many pages came back to the program that had been taken: a program that keeps its pages has hardly any, and one that
/// loses them more in a second.
const LOST_REFAULTS: u64 = 512;
/// The program is looked at for so long alone, and beside the reader.
const ALONE: Duration = Duration::from_secs(4);
const BESIDE: Duration = Duration::from_secs(10);
/// … and where it keeps its pages, with a daemon that must not do anything.
const KEPT: Duration = Duration::from_secs(20);
/// It has its pages within this; seconds are usual.
const THERE_WITHIN: Duration = Duration::from_secs(180);
/// All of its file but for so much is mapped then, in MiB.
const MISSING_MIB: u64 = 2;

/// Counters of a group.
const REFAULTS: &str = "workingset_refault_file";
const MAJOR_FAULTS: &str = "pgmajfault";

/// Multi-gen LRU, switched back to what was found when dropped.
struct Generations {
    found: String,
}

impl Generations {
    fn on() -> Result<Self, Failure> {
        let ttl = text(MIN_TTL_MS)?;
        ensure!(ttl == "0", "{MIN_TTL_MS} is {ttl}, expected 0");
        let generations = Self {
            found: text(ENABLED)?,
        };
        write(ENABLED, ON)?;
        Ok(generations)
    }
}

impl Drop for Generations {
    fn drop(&mut self) {
        let _ = write(ENABLED, &self.found);
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
        self.refaults >= LOST_REFAULTS
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
            "{touches_per_s:.0} touches/s, {refaults} refaults, {major_faults} major faults, at least {least_mib} MiB mapped"
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
fn wait_until_there(context: &Context, room: &mut Room, when: &str) -> Result<(), Failure> {
    let begin = Instant::now();
    let wanted = room.size.worker_mib - MISSING_MIB;
    loop {
        let mapped = room.mapped_mib()?;
        if mapped >= wanted {
            return Ok(());
        }
        ensure!(
            begin.elapsed() < THERE_WITHIN,
            "{when} {mapped} of {wanted} MiB are mapped after {} s",
            THERE_WITHIN.as_secs()
        );
        room.turn(context)?;
        std::thread::sleep(TICK);
    }
}

/// A program that keeps its pages, a program that loses them.
pub(super) fn reader_is_contained(context: &Context) -> Result<(), Failure> {
    let _disks = Disks::make(context)?;
    write(Path::new(ROOT).join("cgroup.subtree_control"), "+memory")?;
    let _generations = Generations::on()?;
    let enabled = text(ENABLED)?;
    ensure!(enabled != "0x0000", "multi-gen LRU stays off");
    pages_are_kept(context)?;
    reader_is_contained_at_the_edge(context)?;
    let now = text(ENABLED)?;
    ensure!(now == enabled, "{ENABLED} became {now}");
    Ok(())
}

/// Program and reader start together, beside the daemon.
fn pages_are_kept(context: &Context) -> Result<(), Failure> {
    let mut room = Room::make(context, End::Kept, 0, USUAL)?;
    room.start_reader()?;
    room.start_daemon()?;
    wait_until_there(context, &mut room, "beside the reader")?;
    let begin = Instant::now();
    let mut beside = Figures::of(&room, ALONE)?;
    while begin.elapsed() < KEPT {
        room.turn(context)?;
        beside = Figures::of(&room, ALONE)?;
        ensure!(
            !beside.are_of_loss(),
            "the program loses pages to the reader: {beside}"
        );
    }
    context.note(&format!("{:?}, beside the reader: {beside}", USUAL));
    room.stop(context, "when nothing was to be done")
}

/// Program and reader have nearly no room beside each other.
fn reader_is_contained_at_the_edge(context: &Context) -> Result<(), Failure> {
    let mut room = Room::make(context, End::Stopped, 0, EDGE)?;
    wait_until_there(context, &mut room, "alone")?;
    let alone = Figures::of(&room, ALONE)?;
    context.note(&format!("{EDGE:?}, alone: {alone}"));
    ensure!(
        !alone.are_of_loss(),
        "the slice is too small for the program alone: {alone}"
    );
    room.start_reader()?;
    loop {
        let beside = Figures::of(&room, BESIDE)?;
        context.note(&format!("{:?}, beside the reader: {beside}", room.size));
        if beside.are_of_loss() {
            break;
        }
        let less = room.size.slice_mib - LESS_MIB;
        ensure!(
            less >= SLICE_MIN_MIB,
            "the program keeps its pages beside the reader: there is nothing to contain"
        );
        room.allow(less)?;
    }
    let limit = room.group("reader").join("memory.high");
    write(&limit, &BY_HAND_BYTES.to_string())?;
    let begin = Instant::now();
    wait_until_there(context, &mut room, "with the reader kept to 8 MiB by hand")?;
    let back = begin.elapsed().as_secs_f64();
    let by_hand = Figures::of(&room, ALONE)?;
    context.note(&format!(
        "the reader kept to {BY_HAND_BYTES} bytes by hand: its pages are back after {back:.0} s, then {by_hand}"
    ));
    write(&limit, "max")?;

    let mut other = Room::make(context, End::Killed, 1, room.size)?;
    other.start_reader()?;
    let mut rooms = [room, other];
    for room in &mut rooms {
        room.start_daemon()?;
    }
    watch(context, &mut rooms)
}
