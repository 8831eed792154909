//! A big reader that is in no group of its own: program and reader are both in the root group of control groups of version
//! 2, on a machine whose memory is nearly used up. The daemon makes a group for the reader, and is killed in mid-trial;
//! `restore` brings the reader back and removes the group. Once more with swap that is full, where the daemon is stopped and
//! puts everything back itself.
//!
//! The memory of the machine is taken by this scenario itself: without swap, or when that is full, nobody can take it back. Limits of groups would
//! not do: what a process of the root group reads is counted nowhere else, so it presses on the whole machine only.

use super::Context;
use super::file_cache::{Disks, ROOT, busybox, configuration_for, disk, group_of, made_groups, restore};
use super::programs::Program;
use crate::daemon::{self, Daemon};
use crate::instruments::{mapped_mib, text, write};
use crate::{Failure, ensure};
use std::path::{Path, PathBuf};
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
/// Swap in MiB, and what counts as full of it: the kernel keeps a few pages of each CPU.
const SWAP_MIB: u64 = 16;
/// The disk that swap is on: one that neither program nor reader has.
const SWAP_DISK: usize = 3;
const SWAP_FULL_MIB: u64 = 1;
/// … and still does when the reader is contained: programs that end free a little.
const SWAP_STILL_FULL_MIB: u64 = 4;
/// Swap is full after so long; memory is pushed out in such steps, and so much more than swap takes.
const FILL: Duration = Duration::from_secs(120);
const FILL_MIB: u64 = 4;
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
    meminfo_mib("MemAvailable:")
}

fn meminfo_mib(key: &str) -> Result<u64, Failure> {
    let meminfo = text("/proc/meminfo")?;
    let kib = meminfo.lines().find_map(|line| {
        let value = line.strip_prefix(key)?;
        value.split_whitespace().next()?.parse::<u64>().ok()
    });
    kib.map(|kib| kib / 1024)
        .ok_or_else(|| Failure::Broken(format!("no {key} in /proc/meminfo")))
}

/// A little swap on a disk whose file is in memory, all of it there from the beginning; taken off when dropped.
///
/// The file is in a `ramfs`, which is never pushed out. Pages of a `tmpfs` are: into this very swap, and the thread of
/// the disk then waits for ever for a page that only it can write.
struct Swap {
    disk: String,
    memory: PathBuf,
}

impl Swap {
    fn on(context: &Context) -> Result<Self, Failure> {
        let swap = Self {
            disk: disk(SWAP_DISK),
            memory: context.directory.join("swap"),
        };
        std::fs::create_dir(&swap.memory).map_err(Failure::system("making a directory for swap"))?;
        let memory = swap.memory.display().to_string();
        busybox(&["mount", "-t", "ramfs", "ramfs", &memory])?;
        let file = swap.memory.join("disk");
        std::fs::write(&file, vec![1u8; (SWAP_MIB << 20) as usize])
            .map_err(Failure::system("making a file for swap"))?;
        let _ = busybox(&["losetup", "-d", &swap.disk]);
        busybox(&["losetup", &swap.disk, &file.display().to_string()])?;
        busybox(&["mkswap", &swap.disk])?;
        busybox(&["swapon", &swap.disk])?;
        Ok(swap)
    }

    /// Takes memory that is at once pushed out, until the swap is full: in a group of its own, so that nothing else is
    /// pushed out for it. Then the rest but for so much as is left to program and reader. Returns the ballast.
    fn fill() -> Result<Vec<Ballast>, Failure> {
        let (root, group) = (Path::new(ROOT), Path::new(ROOT).join("swapped"));
        let own = std::process::id().to_string();
        std::fs::create_dir(&group).map_err(Failure::system("making a group"))?;
        write(group.join("cgroup.procs"), &own)?;
        let mut ballast = vec![Ballast::of(SWAP_MIB + FILL_MIB)];
        let begin = Instant::now();
        while meminfo_mib("SwapFree:")? > SWAP_FULL_MIB {
            ensure!(
                begin.elapsed() < FILL,
                "after {} s {} MiB of swap are still free",
                FILL.as_secs(),
                meminfo_mib("SwapFree:")?
            );
            // An error when less could be pushed out; what counts is what is free.
            let _ = std::fs::write(group.join("memory.reclaim"), format!("{FILL_MIB}M"));
            std::thread::sleep(TICK);
        }
        write(root.join("cgroup.procs"), &own)?;
        std::fs::remove_dir(&group).map_err(Failure::system("removing a group"))?;
        ballast.push(Ballast::but_for(LEFT_MIB)?);
        Ok(ballast)
    }
}

impl Drop for Swap {
    fn drop(&mut self) {
        let _ = busybox(&["swapoff", &self.disk]);
        let _ = busybox(&["losetup", "-d", &self.disk]);
        let _ = busybox(&["umount", &self.memory.display().to_string()]);
    }
}

/// How it ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    /// kill -9 in mid-trial, then `restore`.
    Killed,
    /// The daemon is stopped.
    Stopped,
}

/// Contained, killed, restored.
pub(super) fn reader_of_the_root_group_is_contained(context: &Context) -> Result<(), Failure> {
    let _disks = Disks::make(context)?;
    let room = Room::start(context)?;
    let ballast = vec![Ballast::but_for(LEFT_MIB)?];
    room.contain_and_end(context, ballast, End::Killed)
}

/// The same on a machine whose swap is full: contained, stopped, everything as found.
pub(super) fn reader_is_contained_while_swap_is_full(context: &Context) -> Result<(), Failure> {
    let _disks = Disks::make(context)?;
    let _swap = Swap::on(context)?;
    let room = Room::start(context)?;
    let ballast = Swap::fill()?;
    // Should the rest not end, it is told how far it came.
    context.note("swap is full");
    room.contain_and_end(context, ballast, End::Stopped)
}

/// The daemon, and the program that is settled in memory.
struct Room {
    worker: Program,
    daemon: Daemon,
    directory: PathBuf,
}

impl Room {
    fn start(context: &Context) -> Result<Self, Failure> {
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
        let daemon = Daemon::start(&directory, &configuration_for("file-worker*", "file-reader*"))?;
        let begin = Instant::now();
        while mapped_mib(worker.pid())? < 40 && begin.elapsed() < SETTLE {
            std::thread::sleep(TICK);
        }
        Ok(Self {
            worker,
            daemon,
            directory,
        })
    }

    /// A reader comes; `ballast` is what is taken of the memory already.
    fn contain_and_end(
        mut self,
        context: &Context,
        mut ballast: Vec<Ballast>,
        end: End,
    ) -> Result<(), Failure> {
        let mut remains = LEFT_MIB;
        let reader = Program::start(
            "file-reader",
            &[READER_MIB, "86400", "--file", &disk(1), "--duty", "60"],
        )?;
        let started = Instant::now();
        let patience = context.expected.limit * 2 / 5;
        let mut taken = Instant::now();
        self.daemon.wait_until("the reader is contained", patience, |_| {
            if taken.elapsed() >= LESS_EVERY && remains >= LEFT_MIN_MIB + LESS_MIB {
                ballast.push(Ballast::of(LESS_MIB));
                remains -= LESS_MIB;
                taken = Instant::now();
            }
            Ok(group_of(reader.pid())?.starts_with("/homeostat-reader-") && limited()?)
        })?;
        let after = started.elapsed();
        context.note(&format!("contained after {:.0} s", after.as_secs_f64()));
        let swap_free = meminfo_mib("SwapFree:")?;
        ensure!(
            end != End::Stopped || swap_free <= SWAP_STILL_FULL_MIB,
            "{swap_free} MiB of swap are free again before the daemon is stopped: nothing is shown of swap that is full"
        );
        let how = match end {
            End::Killed => {
                drop(ballast);
                self.daemon.kill()?;
                let told = restore(&self.directory)?;
                ensure!(
                    told == (1, 0),
                    "restore after kill -9 has undone {} changes, and failed with {}",
                    told.0,
                    told.1
                );
                "by restore after kill -9".to_owned()
            }
            End::Stopped => {
                // Memory and swap are full until everything is put back.
                let ended = self.daemon.stop()?;
                drop(ballast);
                let log = daemon::log(&self.directory);
                ensure!(ended.success(), "after SIGTERM it ended with {ended}: {log}");
                ensure!(!log.contains("panicked"), "it panicked: {log}");
                let told = restore(&self.directory)?;
                ensure!(told == (0, 0), "something was still owed: {told:?}");
                format!("when it was stopped, with {swap_free} MiB of swap free")
            }
        };
        let now = group_of(reader.pid())?;
        ensure!(now == "/", "in the end the reader is in {now}");
        let left = made_groups()?;
        ensure!(left.is_empty(), "groups that were made are left: {left:?}");
        drop(self.worker);
        context.note(&format!(
            "moved into a group of its own {:.0} s after its start, with {remains} MiB left, and back {how}",
            after.as_secs_f64()
        ));
        Ok(())
    }
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
