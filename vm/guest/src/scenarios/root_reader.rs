//! A big reader that is in no group of its own: program and reader are both in the root group of control groups of version
//! 2, on a machine whose memory is nearly used up. The daemon makes a group for the reader, and is killed in mid-trial;
//! `restore` brings the reader back and removes the group.
//!
//! The memory of the machine is taken by this scenario itself: without swap nobody can take it back. Limits of groups would
//! not do: what a process of the root group reads is counted nowhere else, so it presses on the whole machine only.

use super::Context;
use super::file_cache::{Disks, ROOT, configuration_for, disk, group_of, made_groups, restore};
use super::programs::Program;
use crate::daemon::Daemon;
use crate::instruments::{text, write};
use crate::{Failure, ensure};
use std::path::Path;
use std::time::{Duration, Instant};

/// Working set of the program, and the reader's file, in MiB.
const WORKER_MIB: &str = "56";
const READER_MIB: &str = "2048";
/// What is left for both at the start, in MiB, and at least. With 104 the program was seen to keep its pages, and nobody was
/// contained for seven minutes, rightly; with 72 it loses them.
const LEFT_MIB: u64 = 72;
const LEFT_MIN_MIB: u64 = 40;
/// How fast pages are lost depends on how fast the emulation is: after so long so much less is left.
const LESS_EVERY: Duration = Duration::from_secs(45);
const LESS_MIB: u64 = 8;
/// The program has its pages after so long, at most.
const SETTLE: Duration = Duration::from_secs(60);
const TICK: Duration = Duration::from_millis(100);

/// Memory that nobody gets.
struct Ballast(#[expect(dead_code, reason = "it is there to be there")] Vec<u8>);

impl Ballast {
    /// Takes what is available but for so much.
    fn but_for(mib: u64) -> Result<Self, Failure> {
        Ok(Self::of(available_mib()?.saturating_sub(mib)))
    }

    fn of(mib: u64) -> Self {
        // Not zeroes: those would be pages that are not there.
        Self(vec![1; (mib << 20) as usize])
    }
}

fn available_mib() -> Result<u64, Failure> {
    let meminfo = text("/proc/meminfo")?;
    let kib = meminfo.lines().find_map(|line| {
        let value = line.strip_prefix("MemAvailable:")?;
        value.split_whitespace().next()?.parse::<u64>().ok()
    });
    kib.map(|kib| kib / 1024)
        .ok_or_else(|| Failure::Broken("no MemAvailable in /proc/meminfo".into()))
}

/// Pages of files in memory, in MiB.
fn mapped_mib(pid: i32) -> Result<u64, Failure> {
    let status = text(format!("/proc/{pid}/status"))?;
    let kib = status.lines().find_map(|line| {
        let value = line.strip_prefix("RssFile:")?;
        value.split_whitespace().next()?.parse::<u64>().ok()
    });
    kib.map(|kib| kib / 1024)
        .ok_or_else(|| Failure::Broken(format!("no RssFile in /proc/{pid}/status")))
}

/// Contained, killed, restored.
pub(super) fn reader_of_the_root_group_is_contained(context: &Context) -> Result<(), Failure> {
    let _disks = Disks::make(context)?;
    write(Path::new(ROOT).join("cgroup.subtree_control"), "+memory")?;
    let worker = Program::start(
        "file-worker",
        &[
            WORKER_MIB,
            "86400",
            "--file",
            &disk(0),
            "--pause",
            "300",
            "--duty",
            "30",
        ],
    )?;
    let directory = context.directory.join("daemon");
    let mut daemon = Daemon::start(&directory, &configuration_for("file-worker*", "file-reader*"))?;
    let begin = Instant::now();
    while mapped_mib(worker.pid())? < 40 && begin.elapsed() < SETTLE {
        std::thread::sleep(TICK);
    }
    let mut ballast = vec![Ballast::but_for(LEFT_MIB)?];
    let mut remains = LEFT_MIB;
    let reader = Program::start(
        "file-reader",
        &[READER_MIB, "86400", "--file", &disk(1), "--duty", "60"],
    )?;
    let started = Instant::now();
    let patience = context.expected.limit * 2 / 5;
    let mut taken = Instant::now();
    daemon.wait_until("the reader is contained", patience, |_| {
        if taken.elapsed() >= LESS_EVERY && remains >= LEFT_MIN_MIB + LESS_MIB {
            ballast.push(Ballast::of(LESS_MIB));
            remains -= LESS_MIB;
            taken = Instant::now();
        }
        Ok(group_of(reader.pid())?.starts_with("/homeostat-reader-") && limited()?)
    })?;
    let after = started.elapsed();
    drop(ballast);
    daemon.kill()?;
    let told = restore(&directory)?;
    ensure!(
        told == (1, 0),
        "restore after kill -9 has undone {} changes, and failed with {}",
        told.0,
        told.1
    );
    let now = group_of(reader.pid())?;
    ensure!(now == "/", "after restore the reader is in {now}");
    let left = made_groups()?;
    ensure!(left.is_empty(), "groups that were made are left: {left:?}");
    context.note(&format!(
        "moved into a group of its own {:.0} s after its start, with {remains} MiB left, and back by restore after kill -9",
        after.as_secs_f64()
    ));
    Ok(())
}

/// Whether a group that was made has its limit.
fn limited() -> Result<bool, Failure> {
    for group in made_groups()? {
        let high = text(Path::new(ROOT).join(group).join("memory.high"))?;
        if high.trim() != "max" {
            return Ok(true);
        }
    }
    Ok(false)
}
