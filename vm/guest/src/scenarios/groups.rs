//! Control groups, version 2 with all controllers, as on a plain Debian.

use super::Context;
use crate::driver::Driver;
use crate::instruments::{list, numbers_in, text, write};
use crate::keeper::Keeper;
use crate::{Failure, ensure};
use homeostat_model::WorkloadKind;
use homeostat_store::JournalOptions;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

const ROOT: &str = "/sys/fs/cgroup";

/// A control group of our own, removed when dropped.
#[derive(Debug)]
pub(super) struct Group {
    path: PathBuf,
}

impl Group {
    /// Makes one with cpuset and memory controllers.
    pub(super) fn make(name: &str) -> Result<Self, Failure> {
        write(
            Path::new(ROOT).join("cgroup.subtree_control"),
            "+cpuset +memory +cpu",
        )?;
        let path = Path::new(ROOT).join(name);
        // What a scenario that failed left behind.
        let _ = std::fs::remove_dir(&path);
        std::fs::create_dir(&path).map_err(Failure::system(format!("making {}", path.display())))?;
        Ok(Self { path })
    }

    /// Takes a process in.
    pub(super) fn enter(&self, pid: i32) -> Result<(), Failure> {
        write(self.path.join("cgroup.procs"), &pid.to_string())
    }

    /// A setting of the group.
    pub(super) fn set(&self, name: &str, value: &str) -> Result<(), Failure> {
        write(self.path.join(name), value)
    }

    /// What a setting of the group is.
    pub(super) fn get(&self, name: &str) -> Result<String, Failure> {
        text(self.path.join(name))
    }

    /// The CPUs on which its processes may run.
    pub(super) fn cpus(&self) -> Result<BTreeSet<u32>, Failure> {
        numbers_in(self.path.join("cpuset.cpus.effective"))
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // Its processes go back first; a group with processes cannot be removed.
        if let Ok(pids) = text(self.path.join("cgroup.procs")) {
            for pid in pids.lines() {
                let _ = std::fs::write(Path::new(ROOT).join("cgroup.procs"), pid);
            }
        }
        let _ = std::fs::remove_dir(&self.path);
    }
}

/// Two processes of one unit are one workload of that name, and looking at them changes nothing in the group.
pub(super) fn recognised_and_left_alone(context: &Context) -> Result<(), Failure> {
    let cpus = context.expected.cpus_of(0);
    let group = Group::make("kept.service")?;
    group.set("cpuset.cpus", &list(&cpus))?;
    group.set("cpuset.mems", "0")?;
    let keepers = [Keeper::start(8, &cpus, 1)?, Keeper::start(8, &cpus, 1)?];
    for keeper in &keepers {
        group.enter(keeper.pid())?;
    }
    ensure!(group.cpus()? == cpus, "the group runs on {:?}", group.cpus()?);
    let settings = [
        "cpuset.cpus",
        "cpuset.mems",
        "memory.max",
        "cpu.max",
        "cpu.weight",
    ];
    let found: Vec<String> = settings.iter().map(|s| group.get(s)).collect::<Result<_, _>>()?;

    let mut driver = Driver::open(&context.directory.join("journal"), JournalOptions::default())?;
    for keeper in &keepers {
        let workload = driver.workload_of(keeper.pid())?;
        ensure!(
            (workload.id.as_str(), workload.kind) == ("kept.service", WorkloadKind::Unit),
            "it is recognised as {} ({:?})",
            workload.id,
            workload.kind
        );
        ensure!(
            workload.processes.len() == keepers.len(),
            "{} has {} processes",
            workload.id,
            workload.processes.len()
        );
    }
    let after: Vec<String> = settings.iter().map(|s| group.get(s)).collect::<Result<_, _>>()?;
    ensure!(
        after == found,
        "the group's settings were {found:?} and are {after:?}"
    );
    Ok(())
}
