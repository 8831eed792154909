//! Two processes of `latency`, each with its memory on another node and its threads anywhere: what the strategies
//! propose from what the sensors say is carried out, whole, and taken back.
//!
//! There is no trial and no verdict here: the emulation shows no gain, and none is claimed. What is proven is the chain
//! from sensor to strategy to effector on a real kernel; that the change pays is for the simulator and for real machines.

use super::Context;
use super::programs::{Latencies, Size};
use crate::driver::{Driver, Watch};
use crate::{Failure, ensure};
use homeostat_engine::{Held, Load, Opinion, Policy, Proposal, Seen, Strategy};
use homeostat_model::action::Target;
use homeostat_model::{
    Action, ActionId, Direction, Effect, Locality, Machine, MachineSample, Nanoseconds, Workload,
    WorkloadSample,
};
use homeostat_platform::{Clock, SampleRequest, Sensors};
use homeostat_store::JournalOptions;
use std::collections::BTreeSet;
use std::time::{Duration, Instant};

/// The threads of both together use less than one node has.
const SIZE: Size = Size {
    mib: 64,
    threads: 2,
    duty: 35,
};
/// Seconds over which load and places are looked at.
const LOOK: Duration = Duration::from_secs(4);
/// Looks until threads that the kernel keeps where they began have been seen on both nodes.
const LOOKS_MAX: u32 = 8;
/// The goal of the issue, of the memory that may be moved: pages of files stay where they are.
const LOCAL_MIN: f64 = 0.99;
/// From the first look to the last thread placed, the goal of the issue.
const PLACED_WITHIN: Duration = Duration::from_secs(60);

/// What was seen of the workload, ready for a strategy.
pub(super) struct Look {
    now: Nanoseconds,
    machine_sample: MachineSample,
    machine_interval: Nanoseconds,
    workload: Workload,
    sample: WorkloadSample,
    load: Load,
    pub(super) locality: Locality,
}

impl Look {
    pub(super) fn take(driver: &mut Driver, workload: &Workload) -> Result<Self, Failure> {
        let request = SampleRequest {
            scan: true,
            detail: vec![workload.id.clone()],
        };
        let platform = &mut driver.platform;
        let mut sample = || platform.sample(&request).map_err(Failure::platform("sampling"));
        sample()?;
        std::thread::sleep(LOOK);
        let snapshot = sample()?;
        let seen = snapshot.samples.into_iter().find(|s| s.id == workload.id);
        let seen = seen.ok_or_else(|| Failure::Broken(format!("no sample of {}", workload.id)))?;
        let now_known = snapshot
            .workloads
            .unwrap_or_default()
            .into_iter()
            .find(|w| w.id == workload.id);
        let locality = platform
            .inspect_locality(&workload.id)
            .map_err(Failure::platform("looking where it is"))?;
        let seconds = seen.interval.as_secs_f64().max(1e-9);
        Ok(Self {
            now: homeostat_kernel::clock::MonotonicClock.now(),
            machine_sample: snapshot.machine,
            machine_interval: snapshot.interval,
            workload: now_known.unwrap_or_else(|| workload.clone()),
            load: Load {
                known: true,
                cpus: seen.cpu.as_secs_f64() / seconds,
                runqueue_wait: seen.runqueue_wait.as_secs_f64() / seen.cpu.as_secs_f64().max(1e-9),
                saturated: false,
                churn: 0.0,
            },
            sample: seen,
            locality,
        })
    }

    pub(super) fn ask(
        &self,
        strategy: &dyn Strategy,
        machine: &Machine,
        policy: &Policy,
        held: &[Held],
    ) -> Opinion {
        strategy.consider(&Seen {
            now: self.now,
            policy,
            machine,
            machine_sample: &self.machine_sample,
            machine_interval: self.machine_interval,
            workload: &self.workload,
            sample: &self.sample,
            load: &self.load,
            memory: None,
            locality: Some(&self.locality),
            neighbours: &[],
            held,
            known: None,
            refused: &[],
        })
    }
}

/// The strategy of that name.
pub(super) fn strategy(id: &str) -> Result<Box<dyn Strategy>, Failure> {
    homeostat_strategies::all()
        .into_iter()
        .find(|s| s.id().as_str() == id)
        .ok_or_else(|| Failure::Broken(format!("there is no strategy {id}")))
}

fn proposal(opinion: Opinion, id: &str) -> Result<Proposal, Failure> {
    match opinion {
        Opinion::Propose(proposal) => Ok(*proposal),
        Opinion::Decline(declined) => Err(Failure::Broken(format!("{id} declines: {}", declined.reason))),
        other => Err(Failure::Broken(format!("{id} says {other:?}"))),
    }
}

/// The action that the mind would make of a part of a proposal.
pub(super) fn action(workload: &Workload, proposal: &Proposal, target: &Target) -> Action {
    Action {
        id: ActionId(1),
        effector: proposal.effector.clone(),
        workload: workload.id.clone(),
        target: target.clone(),
        arguments: proposal.arguments.clone(),
        why: proposal.hypothesis.clone(),
    }
}

/// Sensors, both strategies, both effectors; then everything back.
pub(super) fn placed_by_the_strategies(context: &Context) -> Result<(), Failure> {
    let latencies = Latencies::start(context, "latency.service", SIZE)?;
    let found = latencies.masks()?;
    let (private_found, _) = latencies.pages()?;
    context.note(&format!("found: private pages by node {private_found:?}"));
    let mut driver = Driver::open(&context.directory.join("journal"), JournalOptions::default())?;
    let machine = driver
        .platform
        .machine()
        .map_err(Failure::platform("describing the machine"))?;
    let pid = latencies.pids().first().copied().unwrap_or(0);
    let workload = driver.workload_of(pid)?;
    let policy = Policy::default();
    let begin = Instant::now();

    let threads = strategy("cache_affinity")?;
    threads
        .applicable(&machine)
        .map_err(|why| Failure::Broken(format!("cache_affinity cannot work here: {why}")))?;
    let mut said = String::new();
    let mut proposed = None;
    for _ in 0..LOOKS_MAX {
        let look = Look::take(&mut driver, &workload)?;
        match proposal(
            look.ask(threads.as_ref(), &machine, &policy, &[]),
            "cache_affinity",
        ) {
            Ok(found) => {
                proposed = Some(found);
                break;
            }
            Err(failure) => said = failure.to_string(),
        }
    }
    let Some(first) = proposed else {
        return Err(Failure::Broken(said));
    };
    context.note(&first.hypothesis);
    let Target::Cpus(cpus) = &first.target else {
        return Err(Failure::Broken(format!("proposed {:?}", first.target)));
    };
    let cpus: BTreeSet<u32> = cpus.iter().map(|c| c.0).collect();
    let node = context.expected.nodes.iter().find(|(_, n)| n.cpus == cpus);
    let (node, _) = node.ok_or_else(|| Failure::Broken(format!("CPUs {cpus:?} are no node")))?;
    let share = || -> Result<f64, Failure> {
        let (private, _) = latencies.pages()?;
        let all: u64 = private.values().sum();
        Ok(private.get(node).copied().unwrap_or(0) as f64 / all.max(1) as f64)
    };
    let in_place = || -> Result<bool, Failure> {
        let now = latencies.masks()?;
        Ok(now.len() == found.len() && now.values().all(|mask| *mask == cpus))
    };
    let mut records = Vec::new();
    let (mut curve, mut took, mut moving) = (Vec::new(), None, Instant::now());
    let record = driver.intend(&action(&workload, &first, &first.target))?;
    driver.drive(&record, Direction::Apply, |_| {
        if took.is_none() && in_place()? {
            took = Some(begin.elapsed());
            moving = Instant::now();
        }
        curve.push((moving.elapsed().as_secs_f64(), share()?));
        Ok(Watch::GoOn)
    })?;
    driver.journal.applied(record.action.id)?;
    records.push(record);
    ensure!(
        in_place()?,
        "proposed CPUs {cpus:?}, threads run on {:?}",
        latencies.masks()?
    );
    let took = took.unwrap_or_else(|| begin.elapsed());
    ensure!(
        took <= PLACED_WITHIN,
        "placed after {} s, first look included",
        took.as_secs()
    );
    context.note(&format!("threads on {cpus:?} after {:.0} s", took.as_secs_f64()));

    // Threads and memory may have gone in one change; else the memory follows in a second.
    if share()? < LOCAL_MIN {
        let held = [Held {
            strategy: "cache_affinity".into(),
            target: first.target.clone(),
            effect: Effect { ..first.predicted },
            waited: 0.0,
            runnable: 0.0,
            machine_busy: 0.0,
        }];
        let memory = strategy("memory_affinity")?;
        memory
            .applicable(&machine)
            .map_err(|why| Failure::Broken(format!("memory_affinity cannot work here: {why}")))?;
        let look = Look::take(&mut driver, &workload)?;
        let second = proposal(
            look.ask(memory.as_ref(), &machine, &policy, &held),
            "memory_affinity",
        )?;
        context.note(&second.hypothesis);
        curve.clear();
        let begin = Instant::now();
        for target in std::iter::once(&second.target).chain(&second.stages) {
            let record = driver.intend(&action(&workload, &second, target))?;
            driver.drive(&record, Direction::Apply, |_| {
                curve.push((begin.elapsed().as_secs_f64(), share()?));
                Ok(Watch::GoOn)
            })?;
            driver.journal.applied(record.action.id)?;
            records.push(record);
        }
    }
    let points: Vec<String> = curve
        .iter()
        .step_by(curve.len().div_ceil(12).max(1))
        .map(|(at, share)| format!("{:.1}%@{at:.1}s", share * 100.0))
        .collect();
    let local = share()?;
    context.note(&format!(
        "share of private memory on node {node}: {} … {:.1}%",
        points.join(" "),
        local * 100.0
    ));
    ensure!(
        local >= LOCAL_MIN,
        "only {:.1} % of the private memory is local",
        local * 100.0
    );

    for record in records.iter().rev() {
        driver.undo(record)?;
    }
    let (after, (private, _)) = (latencies.masks()?, latencies.pages()?);
    ensure!(after == found, "masks are {after:?}, found {found:?}");
    for (node, count) in &private_found {
        let now = private.get(node).copied().unwrap_or(0);
        // Stacks and buffers that a living program touches meanwhile lie where it ran.
        ensure!(
            now.abs_diff(*count) <= count / 200 + 64,
            "node {node} has {now} private pages, found {count}"
        );
    }
    Ok(())
}
