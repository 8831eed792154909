//! CPUs that a person took out of general use: by `isolcpus=` on the kernel's command line, and by a partition of cpusets.
//! They are told, they are no room, and a program that has the others is not taken for one that somebody bound.

use super::Context;
use super::badly_placed::{self, Look};
use super::groups::Group;
use super::programs::{Latencies, Size, set_masks};
use crate::daemon::{ask, json};
use crate::driver::{Driver, Watch};
use crate::instruments::{list, write};
use crate::{Failure, ensure};
use homeostat_engine::{Opinion, Policy};
use homeostat_kernel::Root;
use homeostat_linux::LinuxPlatform;
use homeostat_model::action::Target;
use homeostat_model::{Direction, Machine};
use homeostat_platform::Sensors;
use homeostat_store::JournalOptions;
use std::collections::BTreeSet;

/// The threads of both together use less than the CPUs in general use of one node.
const SIZE: Size = Size {
    mib: 32,
    threads: 2,
    duty: 25,
};
const LOOKS_MAX: u32 = 8;

fn machine() -> Result<Machine, Failure> {
    LinuxPlatform::new(Root::default())
        .machine()
        .map_err(Failure::platform("describing the machine"))
}

fn set_aside(machine: &Machine) -> BTreeSet<u32> {
    let those = machine.cpus.iter().filter(|c| c.set_aside);
    those.map(|c| c.id.0).collect()
}

/// What `homeostat topology` and `homeostat doctor` say.
fn told(context: &Context, isolated: &BTreeSet<u32>) -> Result<(), Failure> {
    let topology = json(&ask(&context.directory, &["topology", "--json"])?)?;
    let cpus = topology["cpus"].as_array().cloned().unwrap_or_default();
    let found: BTreeSet<u32> = cpus
        .iter()
        .filter(|c| c["isolated"] == true)
        .filter_map(|c| u32::try_from(c["id"].as_u64()?).ok())
        .collect();
    ensure!(found == *isolated, "topology says that {found:?} are isolated");
    let text = ask(&context.directory, &["topology"])?.stdout;
    let text = String::from_utf8_lossy(&text)
        .split_whitespace()
        .collect::<Vec<_>>()
        .join(" ");
    let sentence = format!("nothing is placed on CPUs {}", list(isolated));
    ensure!(
        text.contains(&sentence),
        "topology does not say {sentence:?}: {text}"
    );
    let doctor = json(&ask(&context.directory, &["doctor", "--json"])?)?;
    let capabilities = doctor["capabilities"].as_array().cloned().unwrap_or_default();
    let general = capabilities.iter().find(|c| c["id"] == "cpus.general");
    let detail = general.and_then(|c| c["detail"].as_str()).unwrap_or_default();
    let all = context.expected.cpus().len();
    let wanted = format!("{} of {all} CPUs", all - isolated.len());
    ensure!(
        detail.contains(&wanted) && detail.contains("isolcpus="),
        "doctor says {detail:?} of the CPUs in general use"
    );
    Ok(())
}

/// Told, no room, and nobody's choice about a program.
pub(super) fn are_no_room(context: &Context) -> Result<(), Failure> {
    let isolated = context.expected.set_aside.clone();
    ensure!(!isolated.is_empty(), "this shape sets no CPU aside");
    let found = set_aside(&machine()?);
    ensure!(
        found == isolated,
        "CPUs {found:?} are set aside, built {isolated:?}"
    );
    write(context.directory.join("homeostat.toml"), "")?;
    told(context, &isolated)?;
    placed_beside_them(context)?;
    partition(context, &isolated)
}

/// A badly placed pair of processes is offered the CPUs of a node that are in general use, and gets its masks back.
fn placed_beside_them(context: &Context) -> Result<(), Failure> {
    let latencies = Latencies::start(context, "latency.service", SIZE)?;
    // A kernel before 6.2 gives what enters a group with a cpuset all of its CPUs, isolated ones among them; elsewhere a
    // program that nobody bound has all but those.
    let general = context.expected.general_cpus();
    for pid in latencies.pids() {
        set_masks(pid, &general)?;
    }
    let found = latencies.masks()?;
    let mut driver = Driver::open(&context.directory.join("journal"), JournalOptions::default())?;
    let machine = driver
        .platform
        .machine()
        .map_err(Failure::platform("describing the machine"))?;
    let workload = driver.workload_of(latencies.pids().first().copied().unwrap_or(0))?;
    let strategy = badly_placed::strategy("cache_affinity")?;
    let mut said = String::new();
    for _ in 0..LOOKS_MAX {
        let look = Look::take(&mut driver, &workload)?;
        ensure!(
            look.locality.bound.is_none(),
            "taken for bound: {:?}",
            look.locality.bound
        );
        let proposal = match look.ask(strategy.as_ref(), &machine, &Policy::default(), &[]) {
            Opinion::Propose(proposal) => proposal,
            other => {
                said = format!("{other:?}");
                continue;
            }
        };
        context.note(&proposal.hypothesis);
        let Target::Cpus(cpus) = &proposal.target else {
            return Err(Failure::Broken(format!("proposed {:?}", proposal.target)));
        };
        let cpus: BTreeSet<u32> = cpus.iter().map(|c| c.0).collect();
        let nodes = context.expected.nodes.keys();
        let free: Vec<BTreeSet<u32>> = nodes.map(|n| context.expected.general_cpus_of(*n)).collect();
        ensure!(
            free.contains(&cpus),
            "CPUs {cpus:?} are proposed; in general use are {free:?}"
        );
        let record = driver.intend(&badly_placed::action(&workload, &proposal, &proposal.target))?;
        driver.drive(&record, Direction::Apply, |_| Ok(Watch::GoOn))?;
        driver.journal.applied(record.action.id)?;
        let now = latencies.masks()?;
        ensure!(
            now.values().all(|mask| *mask == cpus),
            "wanted on {cpus:?}, runs on {now:?}"
        );
        driver.undo(&record)?;
        let now = latencies.masks()?;
        ensure!(now == found, "masks are {now:?}, found {found:?}");
        return Ok(());
    }
    Err(Failure::Broken(format!(
        "cache_affinity proposes nothing: {said}"
    )))
}

/// A partition of cpusets is made and dissolved while homeostat looks.
fn partition(context: &Context, isolated: &BTreeSet<u32>) -> Result<(), Failure> {
    let free = context.expected.general_cpus();
    let taken = BTreeSet::from_iter(free.iter().next_back().copied());
    let group = Group::make("partition")?;
    group.set("cpuset.cpus", &list(&taken))?;
    group.set("cpuset.cpus.partition", "root")?;
    let kind = group.get("cpuset.cpus.partition")?;
    ensure!(kind == "root", "the kernel made no partition: {kind}");
    let both: BTreeSet<u32> = isolated.union(&taken).copied().collect();
    let mut platform = LinuxPlatform::new(Root::default());
    let seen = platform
        .machine()
        .map_err(Failure::platform("describing the machine"))?;
    ensure!(
        set_aside(&seen) == both,
        "with a partition of {taken:?} CPUs {:?} are set aside",
        set_aside(&seen)
    );
    group.set("cpuset.cpus.partition", "member")?;
    let request = homeostat_platform::SampleRequest {
        scan: true,
        detail: Vec::new(),
    };
    platform.sample(&request).map_err(Failure::platform("sampling"))?;
    ensure!(
        platform.machine_changed(),
        "a partition that is gone is not noticed"
    );
    let seen = set_aside(&machine()?);
    ensure!(seen == *isolated, "without it CPUs {seen:?} are set aside");
    context.note(&format!(
        "isolated {isolated:?}; a partition of {taken:?} seen and seen gone"
    ));
    Ok(())
}
