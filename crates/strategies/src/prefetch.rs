//! # prefetch
//!
//! ## What
//! Switches the hardware prefetch off on the CPUs of a program whose prefetched lines are mostly never used and
//! whose links or memory controllers are full; on all CPUs when that program is most of the machine's load.
//!
//! ## Why it helps
//! A prefetcher that guesses wrong fills the links with lines that nobody asked for, and the lines that somebody asked
//! for wait behind them. On a published database 43 % of the memory traffic was prefetch; off, it was 3 %.
//!
//! ## When it hurts
//! * A program that reads in order loses much: every miss that was covered costs its full time. Not proposed when
//!   the counters say that the prefetcher covers misses; the trial sees the loss within a few blocks otherwise.
//! * Where no link is full there is nothing to gain (-0.1 % by the model), and nothing is tried (in the profile
//!   `aso-classic` it is, and the trial refuses it).
//! * It is a setting of CPUs, not of programs: whoever else runs there is switched, too. Not proposed where others
//!   do most of the work, nor while a program that a person excluded (`HOMEOSTAT=never`, a rule `never`) works on the machine:
//!   that one is not measured, so that nobody would see its loss. It is withdrawn when such a one begins to work, and when
//!   its own program has done nothing for five minutes, since then it can only cost others.
//!
//! ## Evidence
//! Event counters only: share of the traffic that is prefetch, share of the misses that it covers, use of the busiest
//! link, share of the cycles that wait for memory. The prediction weighs the shorter queue (including that a
//! faster program fills the link again) against the misses that are no longer covered. Without counters nothing is
//! predicted and nothing is tried; so it is where they leave one of these shares open (which of them a processor counts
//! is in docs/hardware.md: of those in use today only Intel's count the prefetched lines that nobody used). Large pages and this change help each other on a full link: each is tried after
//! the other is in force, and an accepted change is checked again by the guard's probes (`probe_every_s`; ASO checked
//! every 15 minutes). Gains were measured on the simulated machine only. On a real one the capability `prefetch.switch`
//! says whether there is a switch and what stands in the way of it.
//!
//! ## Undo
//! The setting found before is written back to each CPU; it takes effect at once. On x86 writing the register marks the
//! kernel as tainted until the next boot, which no undo takes back: it is only done where a person allowed it
//! (`msr.allow_writes=on`).
//!
//! ## References
//! Seed 000 §3.4 (DSO: at least eight cores of load and 16 GB; system-wide when more than half of the load has it),
//! §4 (43 % to 3 % of the traffic), §5.4; seed 001 §6.1.2 (DSCR).

use crate::cache_affinity;
use crate::common::domains::{Demand, Domains};
use crate::common::{
    AGE_HELP, age_min, capable, cpu_list, gain_min, placed_by_a_person, prediction, too_young,
};
use homeostat_engine::{Declined, Opinion, Proposal, Seen, Setting, Strategy};
use homeostat_model::action::Target;
use homeostat_model::{
    Advice, Bytes, Counters, CpuId, EffectorId, Locality, Machine, Nanoseconds, StrategyId,
};
use std::collections::BTreeMap;

const ID: &str = "prefetch";
const GIB: f64 = 1024.0 * 1024.0 * 1024.0;
/// The switch takes effect at once; the caches and the queues settle within this time.
const SETTLING: Nanoseconds = Nanoseconds::from_millis(500);
/// Domains that hold less than this share of the workload are not its own.
const OWN_DOMAIN: f64 = 0.05;

const AGE_MIN: Setting = age_min(ID, 0.0, AGE_HELP);
const CORES_MIN: Setting = Setting {
    strategy: ID,
    name: "cores_min",
    default: 0.0,
    classic: 8.0,
    low: 0.0,
    high: 10_000.0,
    help: "cores in use from which a workload is considered (classic: eight, seed 000 3.4)",
};
const MEMORY_MIN: Setting = Setting {
    strategy: ID,
    name: "memory_min_gib",
    default: 0.0,
    classic: 16.0,
    low: 0.0,
    high: 1e6,
    help: "resident memory in GiB from which a workload is considered (classic: 16 of shared memory, seed 000 3.4)",
};
const PREFETCH_SHARE_MIN: Setting = Setting {
    strategy: ID,
    name: "prefetch_share_min",
    default: 0.1,
    classic: 0.1,
    low: 0.0,
    high: 1.0,
    help: "share of the memory traffic that must be prefetch (published case: 0.43)",
};
const SYSTEM_SHARE_MIN: Setting = Setting {
    strategy: ID,
    name: "system_share_min",
    default: 0.5,
    classic: 0.5,
    low: 0.0,
    high: 1.0,
    help: "share of the machine's load above which the switch is made on all CPUs (classic: half, seed 000 3.4)",
};
const GAIN_MIN: Setting = Setting {
    classic: -0.02,
    low: -1.0,
    help: "predicted gain from which it is tried (0.01 = 1 %; classic: ASO went by the counters of traffic and let the \
           experiment decide)",
    ..gain_min(ID)
};

/// The strategy.
pub(crate) struct Prefetch;

impl Strategy for Prefetch {
    fn id(&self) -> StrategyId {
        ID.into()
    }

    fn summary(&self) -> &'static str {
        "switches hardware prefetch off where it fills a busy link with lines that nobody uses"
    }

    fn settings(&self) -> &'static [Setting] {
        &[
            AGE_MIN,
            CORES_MIN,
            MEMORY_MIN,
            PREFETCH_SHARE_MIN,
            SYSTEM_SHARE_MIN,
            GAIN_MIN,
        ]
    }

    fn applicable(&self, machine: &Machine) -> Result<(), String> {
        capable(machine, &["locality", "prefetch.switch"])
    }

    fn consider(&self, seen: &Seen<'_>) -> Opinion {
        let policy = seen.policy;
        if seen.held.iter().any(|h| h.strategy.as_str() == ID) {
            return decline("hardware prefetch is off for it already".into());
        }
        if let Some(theirs) = set_by_a_person(seen) {
            return decline(theirs.to_owned());
        }
        if let Some(why) = too_young(seen, AGE_MIN.value(policy)) {
            return decline(why);
        }
        let least = MEMORY_MIN.value(policy);
        let resident = seen.sample.resident;
        if (resident.0 as f64) < least * GIB {
            return decline(format!(
                "{resident} resident: too small for prefetch to be tuned (at least {})",
                Bytes((least * GIB) as u64)
            ));
        }
        let Some(locality) = seen.locality else {
            return Opinion::InspectLocality;
        };
        let domains = Domains::of(seen.machine);
        let demand = Demand::of(seen, &domains);
        let least = CORES_MIN.value(policy);
        if demand.own_cores < least {
            return decline(format!(
                "it uses {:.1} cores: too little for prefetch to be tuned (at least {least})",
                demand.own_cores
            ));
        }
        let Some(counters) = locality.counters.as_ref() else {
            return decline(
                "no event counters say what the hardware prefetch does for it: nothing is predicted".into(),
            );
        };
        if let Some((what, remedy)) = unknown(counters) {
            return Opinion::Decline(Declined {
                reason: format!(
                    "the event counters of this machine do not tell {what}: nothing is predicted"
                ),
                advice: vec![Advice {
                    id: "prefetch/counters".into(),
                    workload: None,
                    finding: format!("the event counters of this machine do not tell {what}"),
                    remedy: remedy.into(),
                    risk: "none for the programs".into(),
                    setting: None,
                }],
            });
        }
        propose(seen, locality, counters, &domains, &demand)
    }

    fn reaches_others(&self) -> bool {
        true
    }

    fn unwanted(&self, seen: &Seen<'_>) -> Option<String> {
        if let Some(theirs) = set_by_a_person(seen) {
            return Some(theirs.to_owned());
        }
        // Where it is kept decides on which CPUs the switch was made.
        let on_part = seen.held.iter().any(|h| {
            h.strategy.as_str() == ID
                && matches!(&h.target, Target::Cpus(cpus) if cpus.len() < seen.machine.general_cpus().count())
        });
        placed_by_a_person(seen)
            .filter(|_| on_part)
            .map(|why| format!("a person or another tool chose where it runs: {why}"))
    }
}

/// The first share that the prediction needs and the counters leave open, and what a person can do about it.
fn unknown(counters: &Counters) -> Option<(&'static str, &'static str)> {
    [
        (
            counters.memory_stall_share,
            "how long it waits for memory",
            "see homeostat doctor (hardware_counters, counters.memory) for what the processor lacks or who else uses it",
        ),
        (
            counters.prefetch_share,
            "how much of its memory traffic is useless prefetch",
            "if you suspect it, switch the prefetcher off by hand for a while (docs/hardware.md) and compare its work",
        ),
        (
            counters.prefetch_useful_share,
            "how many of its misses prefetch covers",
            "if you suspect it, switch the prefetcher off by hand for a while (docs/hardware.md) and compare its work",
        ),
        (
            counters.busiest_link,
            "how full the memory controllers are",
            "mount -t resctrl resctrl /sys/fs/resctrl, where the processor monitors bandwidth and the firmware states what \
             the memory can deliver; or see homeostat doctor (counters.links)",
        ),
    ]
    .into_iter()
    .find(|(share, ..)| !share.is_finite())
    .map(|(_, what, remedy)| (what, remedy))
}

/// What somebody else wrote to the switch while it was off, as the effector found it.
fn set_by_a_person<'s>(seen: &'s Seen<'_>) -> Option<&'s str> {
    seen.workload
        .choice
        .tuned
        .iter()
        .map(String::as_str)
        .find(|t| t.contains("hardware prefetch"))
}

fn decline(reason: String) -> Opinion {
    Opinion::Decline(Declined::because(reason))
}

fn propose(
    seen: &Seen<'_>,
    locality: &Locality,
    counters: &Counters,
    domains: &Domains,
    demand: &Demand,
) -> Opinion {
    let policy = seen.policy;
    let traffic = format!(
        "prefetch is {:.0} % of its memory traffic and covers {:.0} % of its misses; the busiest link is {:.0} % full",
        counters.prefetch_share * 100.0,
        counters.prefetch_useful_share * 100.0,
        counters.busiest_link * 100.0
    );
    let least = PREFETCH_SHARE_MIN.value(policy);
    if counters.prefetch_share < least {
        return decline(format!(
            "{traffic}: nothing to save (at least {:.0} %)",
            least * 100.0
        ));
    }
    let gain = seen.known.unwrap_or_else(|| prediction::of_no_prefetch(counters));
    let least = GAIN_MIN.value(policy);
    if seen.known.is_none() && gain.estimate < least {
        return decline(format!(
            "{traffic}: no benefit predicted from switching it off ({gain}; at least {:+.1} %)",
            least * 100.0
        ));
    }
    let system = demand.own / demand.total.max(1e-9);
    // Of one that is kept on a part of the machine the other CPUs' prefetch is others'.
    let everywhere = cache_affinity::placement(seen).is_none_or(|kept| domains.is_all(kept));
    let cpus = if everywhere && system > SYSTEM_SHARE_MIN.value(policy) {
        seen.machine.general_cpus().map(|c| c.id).collect()
    } else {
        own_cpus(seen, locality, domains)
    };
    if cpus.is_empty() {
        return decline("it is not known where its threads ran".into());
    }
    let own = own_share(demand, domains, &cpus);
    if own < 0.5 {
        return decline(format!(
            "{traffic}, but others do {:.0} % of the work on its CPUs, and the switch is one of CPUs",
            (1.0 - own) * 100.0
        ));
    }
    Opinion::Propose(Box::new(Proposal {
        hypothesis: format!(
            "{traffic}: off on CPUs {}, the lines that are asked for wait less (predicted {gain})",
            cpu_list(&cpus)
        ),
        predicted: gain,
        effector: EffectorId::from("prefetch"),
        target: Target::Cpus(cpus),
        stages: Vec::new(),
        arguments: BTreeMap::new(),
        reversible: true,
        joint: false,
        urgent: false,
        makes_room: false,
        settling: SETTLING,
        risk: "whoever else reads memory in order on those CPUs gets slower".into(),
        advice: Vec::new(),
    }))
}

/// The CPUs where the workload is kept, else those of the domains where it runs.
fn own_cpus(seen: &Seen<'_>, locality: &Locality, domains: &Domains) -> Vec<CpuId> {
    if let Some(kept) = cache_affinity::placement(seen) {
        return kept.clone();
    }
    let all: f64 = locality.running.values().sum();
    let mut cpus: Vec<CpuId> = domains
        .list
        .iter()
        .filter(|d| {
            locality
                .running
                .get(&d.id)
                .is_some_and(|c| *c >= OWN_DOMAIN * all)
        })
        .flat_map(|d| d.cpus.iter().copied())
        .collect();
    cpus.sort();
    cpus
}

/// Share of the load on those CPUs that is the workload's: against the neighbours that are placed there, and those
/// that run everywhere.
fn own_share(demand: &Demand, domains: &Domains, cpus: &[CpuId]) -> f64 {
    let all_cores = f64::from(domains.cores).max(1.0);
    let mut cores = 0.0;
    let mut placed_here = 0.0;
    for position in domains.among(cpus).keys() {
        cores += domains.list.get(*position).map_or(0.0, |d| f64::from(d.cores));
        placed_here += demand.placed.get(*position).copied().unwrap_or(0.0);
    }
    let placed: f64 = demand.placed.iter().sum();
    let floating = (demand.total - demand.own - placed).max(0.0);
    let others = placed_here + floating * cores / all_cores;
    demand.own / (demand.own + others).max(1e-9)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::common::testing::{Scene, chips, machine};

    /// A database that fills the links between two boards (seed 000 5.4, model-fit 4.3).
    fn database() -> Scene {
        Scene::new(machine(&chips(4, 2), 4), 68.0, 170.0).with(|s| {
            let c = s.counters();
            c.memory_stall_share = 0.45;
            c.local_share = 0.25;
            c.prefetch_share = 0.43;
            c.prefetch_useful_share = 0.02;
            c.busiest_link = 0.86;
        })
    }

    fn cpus(p: &Proposal) -> usize {
        match &p.target {
            Target::Cpus(cpus) => cpus.len(),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn useless_prefetch_on_a_full_link_is_switched_off_everywhere_when_it_is_most_of_the_load() {
        let p = database().proposal(&Prefetch);
        assert_eq!(cpus(&p), 128);
        assert!(p.reversible && p.effector.as_str() == "prefetch");
        assert!(
            p.predicted.estimate > 0.03 && p.predicted.lower > 0.0,
            "{}",
            p.hypothesis
        );
    }

    #[test]
    fn a_smaller_program_is_switched_on_its_own_chip_only() {
        let scene = database().with(|s| {
            s.load.cpus = 28.0;
            s.locality().running = BTreeMap::from([(homeostat_model::LlcId(32), 28.0)]);
            s.neighbour(30.0, Some(0));
            s.neighbour(30.0, Some(2));
        });
        let p = scene.proposal(&Prefetch);
        assert_eq!(p.target, Target::Cpus((32..64).map(CpuId).collect()));
        // Where others do most of the work, the CPUs are theirs.
        let guest = scene.with(|s| {
            s.load.cpus = 4.0;
            s.locality().running = BTreeMap::from([(homeostat_model::LlcId(0), 4.0)]);
        });
        assert!(guest.reason(&Prefetch).contains("others do"));
    }

    #[test]
    fn where_it_is_kept_decides_on_the_cpus() {
        let scene = database().with(|s| {
            s.hold("cache_affinity", Target::Cpus((96..128).map(CpuId).collect()));
            s.load.cpus = 28.0;
            s.locality().running = BTreeMap::from([(homeostat_model::LlcId(96), 28.0)]);
            s.neighbour(60.0, None);
        });
        let mut taken = scene;
        taken.neighbours[0].placed = Some((0..96).map(CpuId).collect());
        assert_eq!(
            taken.proposal(&Prefetch).target,
            Target::Cpus((96..128).map(CpuId).collect())
        );
    }

    #[test]
    fn of_a_program_that_is_kept_on_a_part_the_other_cpus_are_left_alone_however_large_it_is() {
        let kept: Vec<CpuId> = (0..64).map(CpuId).collect();
        let scene = database().with(|s| s.hold("cache_affinity", Target::Cpus(kept.clone())));
        assert_eq!(scene.proposal(&Prefetch).target, Target::Cpus(kept));
        // A placement of each process by itself names all CPUs.
        let all: Vec<CpuId> = (0..128).map(CpuId).collect();
        let split = database().with(|s| s.hold("cache_affinity", Target::Cpus(all.clone())));
        assert_eq!(split.proposal(&Prefetch).target, Target::Cpus(all));
    }

    #[test]
    fn idle_links_useful_prefetch_and_no_counters_mean_no_trial() {
        let idle = database().with(|s| s.counters().busiest_link = 0.15);
        assert!(idle.reason(&Prefetch).contains("no benefit predicted"));
        let useful = database().with(|s| s.counters().prefetch_useful_share = 0.85);
        assert!(useful.reason(&Prefetch).contains("no benefit predicted"));
        let none = database().with(|s| s.counters().prefetch_share = 0.03);
        assert!(none.reason(&Prefetch).contains("nothing to save"));
        let blind = database().with(|s| s.locality().counters = None);
        assert!(blind.reason(&Prefetch).contains("no event counters"));
    }

    #[test]
    fn what_the_counters_leave_open_is_not_guessed() {
        type Field = fn(&mut Counters) -> &mut f64;
        let fields: [(Field, &str); 4] = [
            (|c| &mut c.memory_stall_share, "waits for memory"),
            (|c| &mut c.prefetch_share, "useless prefetch"),
            (|c| &mut c.prefetch_useful_share, "covers"),
            (|c| &mut c.busiest_link, "memory controllers"),
        ];
        for (field, words) in fields {
            for strange in [f64::NAN, f64::INFINITY] {
                for scene in [database(), database().classic()] {
                    let scene = scene.with(|s| *field(s.counters()) = strange);
                    match scene.opinion(&Prefetch) {
                        Opinion::Decline(d) => {
                            assert!(d.reason.contains(words), "{}", d.reason);
                            assert_eq!(d.advice.len(), 1);
                        }
                        other => panic!("{words}: {other:?}"),
                    }
                }
            }
        }
    }

    #[test]
    fn the_classic_floors_are_eight_cores_and_sixteen_gigabytes() {
        database().classic().proposal(&Prefetch);
        let small = database().with(|s| s.sample.resident = Bytes(13 << 30));
        assert!(small.classic().reason(&Prefetch).contains("13.00 GiB"));
        let few = |s: &mut Scene| {
            s.load.cpus = 6.0;
            for running in s.locality().running.values_mut() {
                *running = 1.5;
            }
        };
        assert!(
            database()
                .with(few)
                .classic()
                .reason(&Prefetch)
                .contains("6.0 cores")
        );
        database().with(few).proposal(&Prefetch);
        // On an idle link ASO would still have tried; a strongly useful prefetch is left on by both.
        let idle = |s: &mut Scene| s.counters().busiest_link = 0.15;
        database().with(idle).classic().proposal(&Prefetch);
        let useful = |s: &mut Scene| s.counters().prefetch_useful_share = 0.85;
        assert!(
            database()
                .with(useful)
                .classic()
                .reason(&Prefetch)
                .contains("no benefit predicted")
        );
    }

    #[test]
    fn it_is_not_tried_twice_and_withdrawn_when_a_person_places_the_program() {
        let held = database().with(|s| s.hold(ID, Target::Cpus((0..32).map(CpuId).collect())));
        assert!(held.reason(&Prefetch).contains("off for it already"));
        assert_eq!(held.unwanted(&Prefetch), None);
        let mut theirs = database();
        theirs
            .workload
            .choice
            .tuned
            .push("hardware prefetch of CPU 3 was set by somebody else: msr 0x1a4 is 0x1, not 0xf".into());
        assert!(
            theirs
                .unwanted(&Prefetch)
                .is_some_and(|why| why.contains("CPU 3"))
        );
        assert!(theirs.reason(&Prefetch).contains("somebody else"));
        let bound = held.with(|s| s.locality().bound = Some("cpuset of the container".into()));
        assert!(bound.unwanted(&Prefetch).is_some());
    }

    #[test]
    fn machines_without_the_switch_are_not_served() {
        let mut blind = machine(&chips(2, 1), 4);
        assert_eq!(Prefetch.applicable(&blind), Ok(()));
        blind.capabilities.retain(|c| c.id.as_str() != "prefetch.switch");
        assert!(
            Prefetch
                .applicable(&blind)
                .unwrap_err()
                .contains("prefetch.switch")
        );
    }
}
