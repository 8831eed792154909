//! # memory_affinity
//!
//! ## What
//! Moves the memory of a program to the nodes where `cache_affinity` keeps its threads: private memory first, then
//! shared memory. Where the threads are kept on several nodes and the machine can do it (capability
//! `placement.pages.spread`), what lies elsewhere is shared out evenly among them; what is on one of them stays, since
//! no other of them is nearer to all threads. Never to another place than where the threads are kept, and never by
//! itself: without placed threads, memory has no home. (Where threads gain nothing without their memory, `cache_affinity`
//! moves both in one change; then nothing is left to do here.)
//!
//! ## Why it helps
//! Every access to memory of another node waits longer (230 or 375 ns against 115 ns on POWER7, more when the link
//! is full), and takes room on the link from everybody else.
//!
//! ## When it hurts
//! * A page under move stops the thread that touches it (3 µs for 4 KiB), and the move takes CPU, memory and link
//!   bandwidth: it is paced (`pace_mib_per_s`, less when the busiest link is full).
//! * When the node has no room: other programs' memory would be pushed out. A plan is cut to what is free on the
//!   whole host and to what the node could hold at all; the effector looks at the free memory of the node itself.
//! * When the threads go elsewhere later: then the memory is moved back.
//! * Memory on large pages stays where it is, unless the machine can move it as it is (capability
//!   `placement.pages.large`): torn into small pages it would lose more than it gains.
//!
//! ## Evidence
//! Memory by node and kind, and where the threads are kept; with event counters also the share of the cycles that
//! wait for memory, and the share of local accesses. A plan is small enough to be switched back and forth in the
//! trial when it takes no longer than `switch_max_s`; else it is a one-way plan in stages of 10, 25, 50 and 100 % (in the
//! profile `aso-classic`: of 10 % of the private memory each five minutes, at most 70 % of it in one plan). Gains
//! were measured on the simulated machine only; the effector for real Linux machines (docs/placement.md) is
//! proven to move and to put back, not to gain.
//!
//! ## Undo
//! The pages that were moved are moved back to the nodes they came from, at the same pace.
//!
//! ## References
//! Seed 000 §3.2; seed 001 §6.1.1 (locality 40 % to 100 %, 350 to 170 ns), §6.1.2 and Example 6-21 (10 % each five
//! minutes, only with enough free memory); Linux `move_pages(2)`.

use crate::cache_affinity;
use crate::common::domains::Domains;
use crate::common::prediction::{self, Picture, Place};
use crate::common::{age_min, capable, gain_min, node_list, placed_by_a_person, too_young};
use homeostat_engine::{Declined, Opinion, Proposal, Seen, Setting, Strategy};
use homeostat_model::action::{PageMove, Target};
use homeostat_model::{Bytes, CpuId, EffectorId, Locality, Machine, Nanoseconds, NodeId, StrategyId};
use std::collections::{BTreeMap, BTreeSet};

const ID: &str = "memory_affinity";
const MIB: f64 = 1024.0 * 1024.0;
/// Moved memory is local at once; caches and the translation buffer refill within this time.
const SETTLING: Nanoseconds = Nanoseconds::from_millis(500);
/// The engine waits one and a half time constants for a change to take effect, so a switch that takes T seconds is announced
/// with a time constant of T/1.5.
const TIME_CONSTANTS: f64 = 1.5;
/// Shares of a one-way plan that are reached after each stage.
const STAGES: [f64; 4] = [0.10, 0.25, 0.50, 1.0];
/// Most stages of a plan with equal steps.
const STEPS_MAX: usize = 16;
/// The pace falls in proportion to what is left of the busiest link once it is fuller than this …
const LINK_FREE: f64 = 0.5;
/// … but not below this share, or memory would stay remote and keep the link full.
const PACE_LEAST: f64 = 0.25;
/// Capability of an effector that moves large pages as they are.
const LARGE: &str = "placement.pages.large";
/// Capability of an effector that shares pages out among several nodes.
const SPREAD: &str = "placement.pages.spread";
/// The smallest plan that is worth a trial.
const PLAN_MIN: Bytes = Bytes::from_mib(32);

const AGE_MIN: Setting = age_min(
    ID,
    1200.0,
    "age in seconds from which a workload is considered, over the general floor (classic: ASO began after 20 minutes, \
     seed 001 6.1.2)",
);
const REMOTE_MIN: Setting = Setting {
    strategy: ID,
    name: "remote_share_min",
    default: 0.02,
    classic: 0.10,
    low: 0.0,
    high: 1.0,
    help: "share of the memory that must lie elsewhere (classic: one step of 10 %)",
};
const PLAN_SHARE_MAX: Setting = Setting {
    strategy: ID,
    name: "plan_share_max",
    default: 1.0,
    classic: 0.7,
    low: 0.01,
    high: 1.0,
    help: "share of the private memory that one plan may move at most; the rest, and shared memory, follow in later plans \
           (classic: 70 %)",
};
const SHARED_TOO: Setting = Setting {
    strategy: ID,
    name: "shared_too",
    default: 1.0,
    classic: 0.0,
    low: 0.0,
    high: 1.0,
    help: "1: shared memory follows private memory; 0: private memory only (classic, seed 001 6.1.2)",
};
const LARGE_TOO: Setting = Setting {
    strategy: ID,
    name: "large_too",
    default: 1.0,
    classic: 0.0,
    low: 0.0,
    high: 1.0,
    help: "1: memory on large pages is moved, too, where that can be done; 0: it stays (classic, seed 001 6.1.2)",
};
const PACE: Setting = Setting {
    strategy: ID,
    name: "pace_mib_per_s",
    default: 1024.0,
    classic: 1024.0,
    low: 1.0,
    high: 65_536.0,
    help: "most memory moved per second (MiB), less on a full link; 1024 is what one CPU moves in 4 KiB pages, and 32 GiB \
           in half a minute",
};
const STEP_SHARE: Setting = Setting {
    strategy: ID,
    name: "step_share",
    default: 1.0,
    classic: 0.10,
    low: 0.01,
    high: 1.0,
    help: "share of the memory moved per step_s at most; below 1 the stages of a plan are of this size \
           (classic: 10 % each five minutes, seed 001 6.1.2)",
};
const STEP_S: Setting = Setting {
    strategy: ID,
    name: "step_s",
    default: 1.0,
    classic: 300.0,
    low: 1.0,
    high: 86_400.0,
    help: "seconds in which step_share of the memory may be moved (classic: five minutes)",
};
const SWITCH_MAX: Setting = Setting {
    strategy: ID,
    name: "switch_max_s",
    default: 20.0,
    classic: 5.0,
    low: 0.0,
    high: 60.0,
    help: "a plan that takes at most so many seconds is switched back and forth in its trial and its probes; a longer one \
           is one-way, in stages",
};
const RESERVE: Setting = Setting {
    strategy: ID,
    name: "reserve_share",
    default: 0.05,
    classic: 0.05,
    low: 0.0,
    high: 0.9,
    help: "share of the node's memory that must stay free",
};
const GAIN_MIN: Setting = gain_min(ID);

/// The strategy.
pub(crate) struct MemoryAffinity;

impl Strategy for MemoryAffinity {
    fn id(&self) -> StrategyId {
        ID.into()
    }

    fn summary(&self) -> &'static str {
        "moves memory to the node where the program's threads are kept"
    }

    fn settings(&self) -> &'static [Setting] {
        &[
            AGE_MIN,
            REMOTE_MIN,
            PLAN_SHARE_MAX,
            SHARED_TOO,
            LARGE_TOO,
            PACE,
            STEP_SHARE,
            STEP_S,
            SWITCH_MAX,
            RESERVE,
            GAIN_MIN,
        ]
    }

    fn applicable(&self, machine: &Machine) -> Result<(), String> {
        if machine.nodes.len() < 2 {
            return Err("one memory node: all memory is local".into());
        }
        capable(machine, &["locality", "placement.threads", "placement.pages"])
    }

    fn consider(&self, seen: &Seen<'_>) -> Opinion {
        let Some(home) = home(seen) else {
            return decline("its threads are not kept anywhere, so its memory has no home".into());
        };
        if let Some(why) = too_young(seen, AGE_MIN.value(seen.policy)) {
            return decline(why);
        }
        let Some(locality) = seen.locality else {
            return Opinion::InspectLocality;
        };
        if let Some(why) = placed_by_a_person(seen) {
            return decline(format!(
                "left where it is, because a person or another tool chose: {why}"
            ));
        }
        let able = home.len() == 1 || seen.machine.can(SPREAD);
        if !able {
            return decline(format!(
                "its threads are kept on {} nodes, and this machine can move memory to one node only ({SPREAD} is \
                 missing): which of them would be a guess",
                home.len()
            ));
        }
        plan(seen, locality, &home)
    }

    fn unwanted(&self, seen: &Seen<'_>) -> Option<String> {
        if let Some(why) = placed_by_a_person(seen) {
            return Some(format!(
                "a person or another tool chose where it runs or its memory lies: {why}"
            ));
        }
        // Asked at every sample: so without looking at the whole machine.
        let moved = seen.held.iter().any(|h| h.strategy.as_str() == ID);
        let kept = || {
            cache_affinity::placement(seen)
                .is_some_and(|cpus| cpus.iter().any(|c| is_online(seen.machine, *c)))
        };
        (moved && !kept()).then(|| "its threads are not kept beside that memory any more".to_owned())
    }
}

fn decline(reason: String) -> Opinion {
    Opinion::Decline(Declined::because(reason))
}

/// Whether a CPU is there. CPUs are listed in order; if they were not, the slow way finds it.
fn is_online(machine: &Machine, cpu: CpuId) -> bool {
    machine.cpus.binary_search_by_key(&cpu, |c| c.id).is_ok() || machine.cpus.iter().any(|c| c.id == cpu)
}

/// Whether this strategy may be used on the workload, by what people chose: `cache_affinity` moves memory along with
/// threads only where memory may be moved.
pub(crate) fn is_allowed(seen: &Seen<'_>) -> bool {
    let w = seen.workload;
    let rule = seen.policy.rule_for(&[w.id.as_str(), &w.program, &w.executable]);
    [
        Some(&seen.policy.strategies),
        Some(&w.choice.strategies),
        rule.map(|r| &r.strategies),
    ]
    .into_iter()
    .flatten()
    .all(|choice| choice.get(ID) != Some(&false))
        && too_young(seen, AGE_MIN.value(seen.policy)).is_none()
}

/// The nodes on which `cache_affinity` keeps the threads.
fn home(seen: &Seen<'_>) -> Option<BTreeSet<NodeId>> {
    let cpus = cache_affinity::placement(seen)?;
    let nodes = Domains::of(seen.machine).nodes_among(cpus);
    (!nodes.is_empty()).then_some(nodes)
}

/// What lies elsewhere and can be moved.
#[derive(Default)]
struct Away {
    private: BTreeMap<NodeId, Bytes>,
    shared: BTreeMap<NodeId, Bytes>,
    huge: Bytes,
}

impl Away {
    /// Memory on other nodes than these. Large pages that stay are taken off private and shared memory in proportion,
    /// since the inspection does not say which they are.
    fn from(locality: &Locality, home: &BTreeSet<NodeId>, large_too: bool) -> Self {
        let mut out = Self::default();
        for other in prediction::memory_nodes(locality) {
            if home.contains(&other) {
                continue;
            }
            let of = |m: &BTreeMap<NodeId, Bytes>| m.get(&other).copied().unwrap_or(Bytes::ZERO);
            let huge = if large_too {
                Bytes::ZERO
            } else {
                of(&locality.huge)
            };
            let (private, shared) = (of(&locality.private), of(&locality.shared));
            let all = (private + shared).0.max(1) as f64;
            let small = 1.0 - (huge.0 as f64 / all).min(1.0);
            let part = |b: Bytes| Bytes((b.0 as f64 * small) as u64);
            out.private.insert(other, part(private));
            out.shared.insert(other, part(shared));
            out.huge += Bytes(huge.0.min((private + shared).0));
        }
        out
    }
}

fn total(by_node: &BTreeMap<NodeId, Bytes>) -> Bytes {
    by_node.values().copied().sum()
}

/// A move of memory to the nodes where the threads are, or are to be.
pub(crate) struct Move {
    /// How much of what lies elsewhere.
    pub(crate) bytes: Bytes,
    /// Whether shared memory follows private memory.
    pub(crate) shared: bool,
    /// Whether large pages are moved, too.
    large: bool,
    /// Bytes per second.
    pub(crate) pace: f64,
    /// How long it takes.
    pub(crate) seconds: f64,
    /// Whether it is short enough to be switched back and forth.
    pub(crate) quick: bool,
    /// Where threads and memory are then.
    pub(crate) after: Picture,
    /// What cannot be moved, as the end of a sentence; mostly nothing.
    stays: String,
    /// All that could ever be moved, wherever it is.
    all: Bytes,
}

/// Whether memory on large pages is moved as it is.
fn large_too(seen: &Seen<'_>) -> bool {
    LARGE_TOO.value(seen.policy) >= 0.5 && seen.machine.can(LARGE)
}

/// What would be moved to the nodes where the threads of `now` are, or why nothing is.
pub(crate) fn planned(
    seen: &Seen<'_>,
    locality: &Locality,
    now: &Picture,
    home: &BTreeSet<NodeId>,
) -> Result<Move, String> {
    let policy = seen.policy;
    let resident = prediction::resident(locality);
    let large = large_too(seen);
    let away = Away::from(locality, home, large);
    let private = total(&away.private);
    let all_private: Bytes = total(&locality.private);
    let most_private = Bytes((all_private.0 as f64 * PLAN_SHARE_MAX.value(policy)) as u64);
    // Private memory goes first: while there is more of it than one plan may take, shared memory waits for a later plan.
    let shared_too = SHARED_TOO.value(policy) >= 0.5 && private.0 <= most_private.0;
    let shared = if shared_too {
        total(&away.shared)
    } else {
        Bytes::ZERO
    };
    let remote = (private + shared).0 as f64 / resident.0.max(1) as f64;
    let stays = if away.huge.0 > 0 {
        format!("; {} elsewhere is on large pages and stays there", away.huge)
    } else {
        String::new()
    };
    let least = REMOTE_MIN.value(policy);
    if (private + shared).0 < PLAN_MIN.0 || remote < least {
        return Err(format!(
            "{} ({:.1} %) of its memory lies elsewhere than {} and could be moved (at least {PLAN_MIN} and {:.0} %){stays}",
            private + shared,
            remote * 100.0,
            node_list(home),
            least * 100.0
        ));
    }
    let room = room(seen, locality, home);
    let bytes = Bytes((private.0.min(most_private.0) + shared.0).min(room.0));
    if bytes.0 < PLAN_MIN.0 {
        return Err(format!(
            "{} has room for {room} more of it at most, and {} lie elsewhere: not moved without free memory",
            node_list(home),
            private + shared
        ));
    }
    // Of what the plan draws on: shared memory counts where it follows.
    let all = all_private
        + if shared_too {
            total(&locality.shared)
        } else {
            Bytes::ZERO
        };
    let pace = pace(seen, locality, all);
    let seconds = bytes.0 as f64 / pace;
    Ok(Move {
        bytes,
        shared: shared_too,
        large,
        pace,
        seconds,
        quick: STEP_SHARE.value(policy) >= 1.0 && seconds <= SWITCH_MAX.value(policy),
        after: now.with_moved(&taken(&away, bytes, shared_too), home, resident),
        stays,
        all,
    })
}

/// What would be moved if each process were kept on one node with its private memory beside it, with that share of the
/// processes on each node; or why nothing is. Whose memory is where is not known: as much of each process's as of all.
pub(crate) fn planned_apart(
    seen: &Seen<'_>,
    locality: &Locality,
    now: &Picture,
    shares: &BTreeMap<NodeId, f64>,
) -> Result<Move, String> {
    let policy = seen.policy;
    let resident = prediction::resident(locality);
    // Nobody is at home anywhere yet, so all memory counts as away.
    let large = large_too(seen);
    let own = Away::from(locality, &BTreeSet::new(), large).private;
    let all = total(&own);
    let most = total(&locality.private).0 as f64 * PLAN_SHARE_MAX.value(policy);
    let by_chance: f64 = shares
        .iter()
        .map(|(node, share)| share * own.get(node).map_or(0.0, |b| b.0 as f64))
        .sum();
    let bytes = Bytes(all.0.saturating_sub(by_chance as u64));
    let remote = bytes.0 as f64 / resident.0.max(1) as f64;
    if bytes.0 < PLAN_MIN.0 || remote < REMOTE_MIN.value(policy) || bytes.0 as f64 > most {
        return Err(format!(
            "{bytes} ({:.1} %) of its memory lie elsewhere than the processes would be",
            remote * 100.0
        ));
    }
    for (node, share) in shares {
        let wanted = Bytes((share * all.0 as f64) as u64);
        let more = wanted.saturating_sub(own.get(node).copied().unwrap_or(Bytes::ZERO));
        let room = room(seen, locality, &BTreeSet::from([*node]));
        if more.0 > room.0 {
            return Err(format!(
                "node {node} has room for {room} more of it at most, and {more} belong there"
            ));
        }
    }
    let pace = pace(seen, locality, total(&locality.private));
    let seconds = bytes.0 as f64 / pace;
    Ok(Move {
        bytes,
        shared: false,
        large,
        pace,
        seconds,
        quick: STEP_SHARE.value(policy) >= 1.0 && seconds <= SWITCH_MAX.value(policy),
        after: now.with_apart(&own, resident),
        stays: String::new(),
        all: total(&locality.private),
    })
}

fn plan(seen: &Seen<'_>, locality: &Locality, home: &BTreeSet<NodeId>) -> Opinion {
    let policy = seen.policy;
    let domains = Domains::of(seen.machine);
    let now = kept(&Picture::of(locality), seen, &domains);
    let (plan, node) = match (planned(seen, locality, &now, home), home.first()) {
        (Ok(plan), Some(node)) => (plan, *node),
        (Err(why), _) => return decline(why),
        (_, None) => return decline("its threads are kept on no node that is there".into()),
    };
    let Move {
        bytes, pace, stays, ..
    } = &plan;
    let predicted = Place::of(&now, &domains, locality.counters.as_ref(), true).gain(&plan.after, false);
    let gain = seen.known.unwrap_or(predicted);
    let least = GAIN_MIN.value(policy);
    if seen.known.is_none() && gain.estimate < least {
        return decline(format!(
            "no benefit predicted from moving {bytes} to {} ({gain}; at least {:+.1} %){stays}",
            node_list(home),
            least * 100.0
        ));
    }
    let reversible = plan.quick;
    let mut moves = if reversible {
        vec![*bytes]
    } else {
        parts(*bytes, plan.all, STEP_SHARE.value(policy))
    }
    .into_iter()
    .map(|bytes| {
        Target::Pages(PageMove {
            node,
            bytes,
            shared: plan.shared,
        })
    });
    let Some(target) = moves.next() else {
        return decline("nothing to move".into());
    };
    let hypothesis = format!(
        "{bytes} of its {} lie elsewhere than its threads on {}; moved there in {}, memory is local {:.0} % instead of \
         {:.0} % (predicted {gain}){stays}",
        prediction::resident(locality),
        node_list(home),
        Nanoseconds::from_secs_f64(plan.seconds),
        plan.after.local(&domains) * 100.0,
        now.local(&domains) * 100.0,
    );
    let mut arguments = BTreeMap::from([("bytes_per_second".to_owned(), format!("{pace:.0}"))]);
    arguments.extend(plan.of_large_pages());
    if home.len() > 1 {
        let list: Vec<String> = home.iter().map(ToString::to_string).collect();
        arguments.insert("spread_over".to_owned(), list.join(","));
    }
    Opinion::Propose(Box::new(Proposal {
        hypothesis,
        predicted: gain,
        effector: EffectorId::from("page_placement"),
        target,
        stages: moves.collect(),
        arguments,
        reversible,
        joint: true,
        urgent: false,
        makes_room: false,
        settling: if reversible {
            plan.settling(SETTLING)
        } else {
            SETTLING
        },
        risk: plan.risk(),
        advice: Vec::new(),
    }))
}

impl Move {
    /// Time constant of a change that this move is part of, at least `least`.
    pub(crate) fn settling(&self, least: Nanoseconds) -> Nanoseconds {
        least.max(Nanoseconds::from_secs_f64(self.seconds / TIME_CONSTANTS))
    }

    /// The argument that says so to the effector, where large pages are moved.
    pub(crate) fn of_large_pages(&self) -> Option<(String, String)> {
        self.large.then(|| ("large_pages".to_owned(), "move".to_owned()))
    }

    /// What it may cost, in a sentence.
    pub(crate) fn risk(&self) -> String {
        format!(
            "threads that touch a page under move wait for it; {:.0} MiB/s of memory bandwidth while it lasts",
            self.pace / MIB
        )
    }
}

/// Where the memory is, with the threads where they are kept. An inspection covers the time before the placement,
/// too, so where the threads ran is taken from the placement.
fn kept(picture: &Picture, seen: &Seen<'_>, domains: &Domains) -> Picture {
    let Some(cpus) = cache_affinity::placement(seen) else {
        return picture.clone();
    };
    let among = domains.among(cpus);
    picture.with_running(
        among
            .iter()
            .filter_map(|(position, count)| Some((domains.list.get(*position)?.id, *count as f64))),
    )
}

/// What a plan of so many bytes takes from where: private memory first, the farthest nodes' not before the others',
/// since the effector goes by kind.
fn taken(away: &Away, bytes: Bytes, shared_too: bool) -> BTreeMap<NodeId, Bytes> {
    let mut out: BTreeMap<NodeId, Bytes> = BTreeMap::new();
    let mut left = bytes;
    let kinds = [(&away.private, true), (&away.shared, shared_too)];
    for (by_node, _) in kinds.into_iter().filter(|(_, wanted)| *wanted) {
        let all = total(by_node).0.max(1) as f64;
        let part = (left.0 as f64 / all).min(1.0);
        let mut used = Bytes::ZERO;
        for (node, amount) in by_node {
            let amount = Bytes((amount.0 as f64 * part) as u64);
            used += amount;
            *out.entry(*node).or_default() += amount;
        }
        left = left.saturating_sub(used);
    }
    out
}

/// How much more the nodes could hold: no more than is free on the host, nor than their size less what the workload has
/// there already and less the reserve. What others hold there is for the effector to see.
fn room(seen: &Seen<'_>, locality: &Locality, home: &BTreeSet<NodeId>) -> Bytes {
    let share = RESERVE.value(seen.policy);
    let mut left = Bytes::ZERO;
    let mut reserves = Bytes::ZERO;
    for node in seen.machine.nodes.iter().filter(|n| home.contains(&n.id)) {
        let on = |m: &BTreeMap<NodeId, Bytes>| m.get(&node.id).copied().unwrap_or(Bytes::ZERO);
        let reserve = Bytes((node.memory.0 as f64 * share) as u64);
        reserves += reserve;
        left += node
            .memory
            .saturating_sub(reserve)
            .saturating_sub(on(&locality.private) + on(&locality.shared));
    }
    Bytes(
        left.0
            .min(seen.machine_sample.memory_free.saturating_sub(reserves).0),
    )
}

/// Bytes per second.
fn pace(seen: &Seen<'_>, locality: &Locality, all: Bytes) -> f64 {
    let policy = seen.policy;
    let by_step = all.0 as f64 * STEP_SHARE.value(policy) / STEP_S.value(policy).max(1.0);
    let link = locality
        .counters
        .as_ref()
        .map(|c| c.busiest_link)
        .filter(|r| r.is_finite())
        .unwrap_or(0.0);
    let free = ((1.0 - link) / (1.0 - LINK_FREE)).clamp(PACE_LEAST, 1.0);
    (PACE.value(policy) * MIB * free).min(by_step.max(MIB)).max(MIB)
}

/// The parts of a one-way plan.
fn parts(bytes: Bytes, all: Bytes, step_share: f64) -> Vec<Bytes> {
    if step_share >= 1.0 {
        let mut done = 0;
        return STAGES
            .iter()
            .map(|share| {
                let upto = (bytes.0 as f64 * share) as u64;
                let part = Bytes(upto.saturating_sub(done));
                done = upto.max(done);
                part
            })
            .collect();
    }
    let step = ((all.0 as f64 * step_share) as u64).max(PLAN_MIN.0 / 2);
    let step = step.max(bytes.0.div_ceil(STEPS_MAX as u64));
    // What is left over after whole steps is a step of its own only when it is half of one.
    let steps = ((bytes.0 as f64 / step as f64).round() as u64).max(1);
    (0..steps)
        .map(|at| {
            Bytes(if at + 1 == steps {
                bytes.0 - step * at
            } else {
                step
            })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::common::testing::{GIB, Scene, available, chips, machine};
    use homeostat_engine::WorkloadRule;
    use homeostat_model::LlcId;

    fn gib(n: f64) -> Bytes {
        Bytes((n * GIB as f64) as u64)
    }

    /// 30 threads kept on chip 0 of two, so much private memory in all, of which that share on node 1.
    fn kept(total: f64, away: f64) -> Scene {
        Scene::new(machine(&chips(2, 1), 4), 30.0, total).with(|s| {
            s.hold("cache_affinity", Target::Cpus((0..32).map(CpuId).collect()));
            let locality = s.locality();
            locality.running = BTreeMap::from([(LlcId(0), 30.0)]);
            locality.private = BTreeMap::from([
                (NodeId(0), gib(total * (1.0 - away))),
                (NodeId(1), gib(total * away)),
            ]);
            s.counters().local_share = 1.0 - away;
        })
    }

    fn moves(p: &Proposal) -> Vec<PageMove> {
        std::iter::once(&p.target)
            .chain(&p.stages)
            .map(|t| match t {
                Target::Pages(m) => *m,
                other => panic!("{other:?}"),
            })
            .collect()
    }

    fn pace_of(p: &Proposal) -> f64 {
        p.arguments["bytes_per_second"].parse().unwrap()
    }

    #[test]
    fn little_memory_is_switched_back_and_forth() {
        let p = kept(4.0, 0.3).proposal(&MemoryAffinity);
        assert!(p.reversible && p.stages.is_empty(), "{}", p.hypothesis);
        assert_eq!(p.effector.as_str(), "page_placement");
        let one = moves(&p)[0];
        assert_eq!((one.node, one.shared), (NodeId(0), true));
        assert!(one.bytes.0.abs_diff(gib(1.2).0) < 1 << 20, "{}", one.bytes);
        // A washout of that many time constants covers the move.
        assert!(TIME_CONSTANTS * p.settling.as_secs_f64() >= one.bytes.0 as f64 / pace_of(&p) - 0.01);
        assert!(
            p.predicted.estimate > 0.05 && p.predicted.lower > 0.0,
            "{}",
            p.predicted
        );
    }

    #[test]
    fn much_memory_goes_one_way_in_stages_and_is_there_within_minutes() {
        let p = kept(48.0, 0.5).proposal(&MemoryAffinity);
        assert!(!p.reversible);
        let all = moves(&p);
        let total: u64 = all.iter().map(|m| m.bytes.0).sum();
        let mut reached = 0.0;
        for (part, share) in all.iter().zip([0.10, 0.25, 0.5, 1.0]) {
            reached += part.bytes.0 as f64 / total as f64;
            assert!((reached - share).abs() < 1e-6, "{reached} {share}");
        }
        assert_eq!(all.len(), 4);
        assert!(total.abs_diff(gib(24.0).0) < 1 << 20);
        assert!(
            gib(32.0).0 as f64 / pace_of(&p) <= 480.0,
            "32 GiB within 8 minutes"
        );
    }

    #[test]
    fn a_full_link_slows_the_move_but_does_not_stop_it() {
        let idle = kept(4.0, 0.3).proposal(&MemoryAffinity);
        let full = kept(4.0, 0.3)
            .with(|s| s.counters().busiest_link = 0.99)
            .proposal(&MemoryAffinity);
        assert!(pace_of(&full) < 0.5 * pace_of(&idle));
        assert!(
            gib(32.0).0 as f64 / pace_of(&full) <= 480.0,
            "32 GiB within 8 minutes even then"
        );
    }

    #[test]
    fn the_classic_plan_is_ten_percent_of_private_memory_each_five_minutes() {
        let p = kept(16.0, 0.3).classic().proposal(&MemoryAffinity);
        assert!(!p.reversible);
        let all = moves(&p);
        assert_eq!(all.len(), 3, "30 % in steps of 10 %");
        assert!(all[0].bytes.0.abs_diff(gib(1.6).0) < 1 << 20, "{}", all[0].bytes);
        assert!(!all[0].shared);
        assert!((pace_of(&p) - gib(1.6).0 as f64 / 300.0).abs() < 2.0);
        // At most 70 % of the private memory in one plan; homeostat moves all of it.
        let total = |s: Scene| {
            moves(&s.proposal(&MemoryAffinity))
                .iter()
                .map(|m| m.bytes.0)
                .sum::<u64>()
        };
        assert!(total(kept(16.0, 0.9).classic()).abs_diff(gib(11.2).0) < 1 << 20);
        assert!(total(kept(16.0, 0.9)).abs_diff(gib(14.4).0) < 1 << 20);
        let young = |s: &mut Scene| s.sample.age = Nanoseconds::from_secs(600);
        assert!(
            kept(16.0, 0.3)
                .with(young)
                .classic()
                .reason(&MemoryAffinity)
                .contains("20.0 min")
        );
        kept(16.0, 0.3).with(young).proposal(&MemoryAffinity);
    }

    #[test]
    fn what_is_too_much_for_one_plan_follows_in_the_next_and_shared_memory_last() {
        let scene = |away: f64, shared: f64| {
            kept(16.0, away).with(|s| {
                s.locality().shared = BTreeMap::from([(NodeId(1), gib(shared))]);
                let half = BTreeMap::from([(PLAN_SHARE_MAX.name.to_owned(), 0.5)]);
                s.policy.settings.insert(ID.to_owned(), half);
            })
        };
        let plan = |s: &Scene| {
            let all = moves(&s.proposal(&MemoryAffinity));
            assert!(all.iter().all(|m| m.shared == all[0].shared));
            (all.iter().map(|m| m.bytes.0).sum::<u64>(), all[0].shared)
        };
        // 12.8 GiB of 16 elsewhere: 8 of them now, all private.
        let first = plan(&scene(0.8, 2.0));
        assert!(first.0.abs_diff(gib(8.0).0) < 1 << 20 && !first.1, "{first:?}");
        // Where that has moved, the rest goes, and shared memory with it.
        let second = plan(&scene(0.3, 2.0));
        assert!(
            second.0.abs_diff(gib(4.8 + 2.0).0) < 1 << 20 && second.1,
            "{second:?}"
        );
    }

    #[test]
    fn shared_memory_follows_private_memory_and_large_pages_stay() {
        let scene = kept(8.0, 0.25).with(|s| {
            s.locality().shared = BTreeMap::from([(NodeId(1), gib(2.0))]);
            s.locality().huge = BTreeMap::from([(NodeId(1), gib(1.0))]);
        });
        let bytes = |s: &Scene| {
            moves(&s.proposal(&MemoryAffinity))
                .iter()
                .map(|m| m.bytes.0)
                .sum::<u64>()
        };
        // 2 private and 2 shared, a quarter of each on large pages.
        assert!(bytes(&scene).abs_diff(gib(3.0).0) < 1 << 20);
        let huge = scene.with(|s| {
            s.locality().huge = BTreeMap::from([(NodeId(1), gib(4.0))]);
        });
        let text = huge.reason(&MemoryAffinity);
        assert!(text.contains("on large pages and stays there"), "{text}");
        // Where they can be moved as they are they go along.
        let able = huge.with(|s| s.machine.capabilities.push(available(LARGE)));
        assert!(bytes(&able).abs_diff(gib(4.0).0) < 1 << 20);
        assert_eq!(able.proposal(&MemoryAffinity).arguments["large_pages"], "move");
        assert!(able.classic().reason(&MemoryAffinity).contains("stays there"));
    }

    #[test]
    fn a_program_of_shared_memory_alone_is_not_moved_at_a_crawl() {
        let scene = kept(4.0, 0.3).with(|s| {
            let locality = s.locality();
            locality.shared = std::mem::take(&mut locality.private);
        });
        let p = scene.proposal(&MemoryAffinity);
        assert!(pace_of(&p) > 512.0 * MIB, "{}", p.hypothesis);
        assert!(scene.classic().reason(&MemoryAffinity).contains("could be moved"));
    }

    #[test]
    fn nothing_moves_without_kept_threads_nor_beyond_their_node() {
        let loose = kept(4.0, 0.3).with(|s| s.held.clear());
        assert!(loose.reason(&MemoryAffinity).contains("no home"));
        let wide = kept(4.0, 0.3).with(|s| {
            s.held.clear();
            s.hold("cache_affinity", Target::Cpus((0..64).map(CpuId).collect()));
        });
        assert!(wide.reason(&MemoryAffinity).contains("2 nodes"));
        let wide = wide.with(|s| s.machine.capabilities.push(available(SPREAD)));
        assert!(
            wide.reason(&MemoryAffinity)
                .contains("lies elsewhere than nodes 0,1")
        );
        assert!(kept(4.0, 0.0).reason(&MemoryAffinity).contains("lies elsewhere"));
    }

    /// Kept on the first two of four nodes, its memory evenly on all.
    fn wide() -> Scene {
        Scene::new(machine(&chips(4, 4), 4), 30.0, 16.0).with(|s| {
            s.hold("cache_affinity", Target::Cpus((0..64).map(CpuId).collect()));
            s.machine.capabilities.push(available(SPREAD));
            s.locality().running = BTreeMap::from([(LlcId(0), 15.0), (LlcId(32), 15.0)]);
            s.counters().local_share = 0.25;
        })
    }

    #[test]
    fn memory_of_threads_on_several_nodes_is_shared_out_among_them() {
        let p = wide().proposal(&MemoryAffinity);
        assert_eq!(p.arguments["spread_over"], "0,1");
        let all = moves(&p);
        assert_eq!(all[0].node, NodeId(0));
        let bytes: u64 = all.iter().map(|m| m.bytes.0).sum();
        assert!(bytes.abs_diff(gib(8.0).0) < 1 << 20, "{}", p.hypothesis);
        assert!(
            p.hypothesis.contains("local 50 % instead of 25 %"),
            "{}",
            p.hypothesis
        );
        assert!(
            p.predicted.estimate > 0.05 && p.predicted.lower > 0.0,
            "{}",
            p.predicted
        );
        // One node needs no such argument.
        assert!(
            !kept(4.0, 0.3)
                .proposal(&MemoryAffinity)
                .arguments
                .contains_key("spread_over")
        );
        // The room of both counts.
        let tight = wide().with(|s| s.machine_sample.memory_free = gib(8.4));
        let bytes: u64 = moves(&tight.proposal(&MemoryAffinity))
            .iter()
            .map(|m| m.bytes.0)
            .sum();
        assert!(
            bytes.abs_diff(gib(2.0).0) < 1 << 20,
            "5 % of twice 64 GiB stay free: {bytes}"
        );
    }

    #[test]
    fn memory_that_is_on_one_of_the_nodes_already_stays() {
        let there = wide().with(|s| {
            s.locality().private = BTreeMap::from([(NodeId(0), gib(15.0)), (NodeId(1), gib(1.0))]);
        });
        let text = there.reason(&MemoryAffinity);
        assert!(
            text.contains("0 B (0.0 %) of its memory lies elsewhere than nodes 0,1"),
            "{text}"
        );
        let without = wide().with(|s| s.machine.capabilities.retain(|c| c.id.as_str() != SPREAD));
        assert!(without.reason(&MemoryAffinity).contains(SPREAD));
    }

    #[test]
    fn whoever_switched_it_off_is_heard_by_those_who_ask() {
        let off = || BTreeMap::from([(ID.to_owned(), false)]);
        let ask = |s: &Scene| s.ask(is_allowed);
        assert!(ask(&kept(4.0, 0.3)));
        assert!(!ask(&kept(4.0, 0.3).with(|s| s.policy.strategies = off())));
        assert!(!ask(
            &kept(4.0, 0.3).with(|s| s.workload.choice.strategies = off())
        ));
        let rule = |pattern: &str| WorkloadRule {
            pattern: pattern.to_owned(),
            strategies: off(),
            ..WorkloadRule::default()
        };
        assert!(!ask(&kept(4.0, 0.3).with(|s| s.policy.workloads.push(rule("w*")))));
        assert!(ask(&kept(4.0, 0.3).with(|s| s.policy.workloads.push(rule("x*")))));
        let young = kept(4.0, 0.3).with(|s| s.sample.age = Nanoseconds::from_secs(60));
        assert!(ask(&young) && !ask(&young.classic()));
    }

    #[test]
    fn a_node_without_room_is_not_filled() {
        let full = kept(40.0, 0.5).with(|s| s.machine_sample.memory_free = gib(1.0));
        assert!(full.reason(&MemoryAffinity).contains("has room for"));
        let part = kept(40.0, 0.5).with(|s| s.machine_sample.memory_free = gib(8.2));
        let total: u64 = moves(&part.proposal(&MemoryAffinity))
            .iter()
            .map(|m| m.bytes.0)
            .sum();
        assert!(
            total.abs_diff(gib(5.0).0) < 1 << 20,
            "5 % of 64 GiB stay free: {total}"
        );
    }

    #[test]
    fn a_program_that_does_not_wait_for_memory_is_not_moved() {
        let calm = kept(4.0, 0.3).with(|s| {
            s.counters().memory_stall_share = 0.01;
            s.counters().cache_to_cache_stall_share = 0.0;
        });
        assert!(calm.reason(&MemoryAffinity).contains("no benefit predicted"));
    }

    #[test]
    fn a_persons_choice_and_lost_threads_take_it_back() {
        let scene = kept(4.0, 0.3).with(|s| {
            let moved = PageMove {
                node: NodeId(0),
                bytes: gib(1.2),
                shared: true,
            };
            s.hold(ID, Target::Pages(moved));
        });
        assert_eq!(scene.unwanted(&MemoryAffinity), None);
        let lost = scene.with(|s| s.held.retain(|h| h.strategy.as_str() == ID));
        assert!(lost.unwanted(&MemoryAffinity).unwrap().contains("not kept"));
        let bound = kept(4.0, 0.3).with(|s| s.locality().bound = Some("numactl --membind=1".into()));
        assert!(bound.unwanted(&MemoryAffinity).is_some());
        assert!(bound.reason(&MemoryAffinity).contains("numactl"));
    }

    #[test]
    fn machines_with_one_node_or_without_the_means_are_not_served() {
        assert!(MemoryAffinity.applicable(&machine(&chips(1, 1), 4)).is_err());
        let mut blind = machine(&chips(2, 1), 4);
        assert_eq!(MemoryAffinity.applicable(&blind), Ok(()));
        blind.capabilities.retain(|c| c.id.as_str() != "placement.pages");
        assert!(
            MemoryAffinity
                .applicable(&blind)
                .unwrap_err()
                .contains("placement.pages")
        );
    }
}
