//! # cache_affinity
//!
//! ## What
//! Keeps the threads of one program on the fewest last-level-cache domains that hold its load: one chip (core
//! complex), else several of one node, else several of one board. Different programs get different domains while there
//! is room, and are balanced over the domains when there is not. A program of several one-thread processes (a
//! process-based database, a pool of workers) is kept together as one of many threads is.
//!
//! Where the place alone gains little because the memory lies elsewhere, threads and memory go there in one change, if
//! the machine can do it (capability `placement.threads.memory`) and the memory can be moved back and forth in the trial:
//! neither half would prove anything by itself.
//!
//! A program of several processes with memory of their own that fits no part of the machine is split, where the machine
//! can do it (capability `placement.threads.split`): each process is kept on one domain, and its private memory goes to
//! that node in the same change.
//!
//! Another program that fills more than a board keeps all CPUs; where the machine can do it (capability
//! `placement.threads.grouped`), its threads are kept on their boards in groups that share data.
//!
//! ## Why it helps
//! Threads that share data find it in the cache that they share, instead of fetching the line from another chip
//! (30 ns against 150 to 290 ns on POWER7). Programs that keep to their own domain do not spread their data over
//! every cache of the machine. Memory that lies beside the domain is local to all threads, and what does not can
//! be brought there (`memory_affinity`).
//!
//! ## When it hurts
//! * When the domain is too small: threads wait for each other while CPUs elsewhere idle. Not proposed unless the
//!   whole demand, with that of the workloads already placed there, leaves head room (`utilisation_max`), or the
//!   machine is so full that the domain would be no fuller than the rest.
//! * When threads that had a core each must now share one: no more running threads per core than now, or than
//!   `threads_per_core_max` (two in the profile `aso-classic`, as ASO did), unless event counters say that it pays: what
//!   a thread computes takes longer on a shared core, what it waits for does not, and a program that waits for memory
//!   nearly all the time gains more from being near to it (`sharing_gain_min`; with a hardware thread for each that
//!   runs; a program that fits nowhere so is tried where its threads take turns, if that much is predicted all the same). Where a partition's idle cores go back to a shared pool, two threads on a core free another core; there only
//!   the head room counts.
//! * When the memory lies elsewhere and cannot follow; the prediction counts that, and the trial measures it.
//! * On a quiet machine the scheduler keeps threads at home by itself; binding by hand cost 5 % there (seed 000 §5.3).
//! * When processes that are kept on one domain each get unevenly busy: a domain then waits while another idles. Not
//!   proposed unless each could be as busy as the busiest.
//! * When processes share nothing: then only memory that comes near is a gain, not lines of other caches. What the
//!   counters do not show is not assumed of them. Processes that soon end (`process_life_min_s`) are not placed.
//!
//! ## Evidence
//! Where the threads ran and the memory lies; with event counters also the share of the cycles that wait for memory
//! and for lines of other caches, the share of local accesses, and how full the busiest link is. The prediction
//! scales these by the change of the mean latency between places (by NUMA distance); without counters the shares
//! are assumed and the interval starts at nothing. Too little predicted gain (`gain_min`) is not tried.
//! The constants are fitted to published POWER7 figures. Gains were measured on the simulated machine only; the
//! effector for real Linux machines (docs/placement.md) is proven to place and to put back, not to gain.
//!
//! What people chose is honoured: a program that a person or another tool bound (affinity mask, cpuset, `numactl`,
//! the unit's `CPUAffinity=` or `Nice=`) is left alone, and a placement is withdrawn when that happens later, or when
//! the demand has outgrown the domain for 20 seconds while CPUs elsewhere idle: then threads take a fifth longer, waiting for a CPU
//! included, than as many as ran before it was tried would in turns there, or than in the first minute after it was accepted.
//!
//! ## Undo
//! The affinity mask of each thread is set back to the one found; takes microseconds per thread.
//!
//! ## References
//! Seed 000 §3.1 and §4 (DSO: multi-threaded processes only, no predicted loss of response time; so still in the
//! profile `aso-classic`), §5.2 to §5.7 (results); seed 001 §6.1.1 (resource sets by hand), §6.1.2 and Example 6-19 (one chip per process after two
//! minutes); Linux `sched_setaffinity(2)`.

mod choice;
mod step;

use self::choice::{Candidate, FULL, Limits, Question, moved_to, name};
pub(crate) use self::step::{Ask, Step};
use crate::common::domains::{Demand, Domain, Domains, own_running};
use crate::common::prediction::{self, Picture};
use crate::common::{age_min, capable, cpu_list, gain_min, placed_by_a_person, too_young};
use crate::{consolidation, memory_affinity, relocation};
use homeostat_engine::{Declined, Held, Opinion, Proposal, RefusedPlace, Seen, Setting, Strategy};
use homeostat_model::action::Target;
use homeostat_model::{CpuId, EffectorId, Locality, Machine, Nanoseconds, NodeId, StrategyId};
use std::collections::{BTreeMap, BTreeSet};

const ID: &str = "cache_affinity";
/// Strategies that keep threads on CPUs.
const PLACING: [&str; 3] = [ID, consolidation::ID, relocation::ID];
/// Time constant with which a new placement takes effect: caches refill, the scheduler settles.
const SETTLING: Nanoseconds = Nanoseconds::from_millis(1500);
/// Capability of an effector that keeps each process of a workload on one domain, with its memory.
const SPLIT: &str = "placement.threads.split";
/// Running in the target already by this share means that there is nothing to do.
const TOGETHER: f64 = 0.97;
/// Threads take this much longer, waiting included, than those would in turns there that ran before, or than they did when it was
/// proven, when the place has become too small …
const OUTGROWN_WAIT: f64 = 0.2;
/// (however many those were: some may have been a queue, and no place is meant to be taken in more turns than this) …
const IN_TURNS_MAX: f64 = 3.0;
/// … and use this share of its CPUs …
const OUTGROWN_USE: f64 = 0.95;
/// … while less than this share of the machine's CPUs is busy.
const OUTGROWN_ELSEWHERE: f64 = 0.75;
/// A machine that is less busy by this share than when the waiting was proven has room that was not there then.
const OUTGROWN_ROOM: f64 = 0.15;

const AGE_MIN: Setting = age_min(
    ID,
    120.0,
    "age in seconds from which a workload is considered, over the general floor (classic: ASO placed after two minutes, \
     seed 001 Figure 6-6)",
);
const CPUS_MIN: Setting = Setting {
    strategy: ID,
    name: "cpus_min",
    default: 0.2,
    classic: 1.0,
    low: 0.0,
    high: 10_000.0,
    help: "CPUs in use from which a workload is considered (classic: multi-core workloads only, seed 000 3.1; those \
           of 5.2 used about one core)",
};
const THREADS_MIN: Setting = Setting {
    strategy: ID,
    name: "threads_min",
    default: 1.0,
    classic: 2.0,
    low: 1.0,
    high: 10_000.0,
    help: "threads of its busiest process from which a workload is considered (classic: only multi-threaded processes, \
           seed 000 3.1 and 5.5)",
};
const PROCESS_LIFE_MIN: Setting = Setting {
    strategy: ID,
    name: "process_life_min_s",
    default: 60.0,
    classic: 60.0,
    low: 0.0,
    high: 86_400.0,
    help: "mean life in seconds from which processes of one thread are placed: what ends sooner has no place of its own",
};
const UTILISATION_MAX: Setting = Setting {
    strategy: ID,
    name: "utilisation_max",
    default: 0.9,
    classic: 0.9,
    low: 0.1,
    high: 1.0,
    help: "share of the domain's cores that may be used afterwards, with what is placed there already, while the \
           machine has room (0.9: the fullest that was published)",
};
const THREADS_PER_CORE_MAX: Setting = Setting {
    strategy: ID,
    name: "threads_per_core_max",
    default: 0.9,
    classic: 2.0,
    low: 0.1,
    high: 8.0,
    help: "running threads per core that a placement may lead to where there were fewer before (classic: two, seed \
           000 Table 3)",
};
const SHARING_GAIN: Setting = Setting {
    strategy: ID,
    name: "sharing_gain_min",
    default: 0.1,
    classic: 10.0,
    low: 0.0,
    high: 10.0,
    help: "predicted gain, with the price of sharing cores taken off, from which more running threads per core than \
           threads_per_core_max are tried where event counters tell that price (0.1 = 10 %; classic: never)",
};
const STEADY_MIN: Setting = Setting {
    strategy: ID,
    name: "steady_min",
    default: 0.95,
    classic: 10.0,
    low: 0.0,
    high: 10.0,
    help: "share of a workload's threads that run at any time from which its demand cannot grow: it then needs no head \
           room, but a core each (0.95 = 95 %; classic: never)",
};
const OVERSUBSCRIPTION_MAX: Setting = Setting {
    strategy: ID,
    name: "oversubscription_max",
    default: 1.1,
    classic: 1.1,
    low: 1.0,
    high: 2.0,
    help: "on a full machine: how much fuller than the mean a domain may become, so that programs that do not divide \
           evenly can be balanced",
};
const MACHINE_BUSY_MIN: Setting = Setting {
    strategy: ID,
    name: "machine_busy_min",
    default: 0.2,
    classic: 0.2,
    low: 0.0,
    high: 1.0,
    help: "share of the machine's cores in use below which it is quiet and the scheduler keeps threads at home (seed \
           000 5.3: no benefit at 17 %)",
};
const QUIET_GAIN_MIN: Setting = Setting {
    strategy: ID,
    name: "quiet_gain_min",
    default: 0.05,
    classic: 10.0,
    low: 0.0,
    high: 10.0,
    help: "on a quiet machine: lower end of the predicted gain from which it is tried all the same (0.05 = 5 %; \
           classic: never)",
};
const GAIN_MIN: Setting = gain_min(ID);
const TOGETHER_BELOW: Setting = Setting {
    strategy: ID,
    name: "together_below",
    default: 0.05,
    classic: 0.0,
    low: 0.0,
    high: 10.0,
    help: "predicted gain of threads alone, without that of more room in caches, below which they are tried together with \
           their memory (0.05 = 5 %; classic: never, ASO moved memory long after threads)",
};
const TOGETHER_GAIN: Setting = Setting {
    strategy: ID,
    name: "together_gain_min",
    default: 0.03,
    classic: 10.0,
    low: 0.0,
    high: 10.0,
    help: "what moving the memory along must add to the predicted gain (0.03 = 3 %; classic: never)",
};

/// The strategy.
pub(crate) struct CacheAffinity;

impl Strategy for CacheAffinity {
    fn id(&self) -> StrategyId {
        ID.into()
    }

    fn summary(&self) -> &'static str {
        "keeps the threads of a program on the fewest last-level-cache domains that hold its load"
    }

    fn settings(&self) -> &'static [Setting] {
        &[
            AGE_MIN,
            CPUS_MIN,
            THREADS_MIN,
            PROCESS_LIFE_MIN,
            UTILISATION_MAX,
            THREADS_PER_CORE_MAX,
            SHARING_GAIN,
            STEADY_MIN,
            OVERSUBSCRIPTION_MAX,
            MACHINE_BUSY_MIN,
            QUIET_GAIN_MIN,
            GAIN_MIN,
            TOGETHER_BELOW,
            TOGETHER_GAIN,
        ]
    }

    fn applicable(&self, machine: &Machine) -> Result<(), String> {
        let domains: BTreeSet<_> = machine.general_cpus().map(|c| c.llc).collect();
        if domains.len() < 2 {
            return Err("all CPUs share one last-level cache: threads are together wherever they run".into());
        }
        capable(machine, &["locality", "placement.threads"])
    }

    fn consider(&self, seen: &Seen<'_>) -> Opinion {
        let policy = seen.policy;
        if let Some(held) = placement(seen) {
            return decline(format!(
                "its threads are placed already, on CPUs {}",
                cpu_list(held)
            ));
        }
        if let Some(why) = too_young(seen, AGE_MIN.value(policy)) {
            return decline(why);
        }
        let least = CPUS_MIN.value(policy);
        if seen.load.cpus < least {
            return decline(format!(
                "it uses {:.2} CPUs: too little for its place to matter (at least {least})",
                seen.load.cpus
            ));
        }
        let Some(locality) = seen.locality else {
            return Opinion::InspectLocality;
        };
        if let Some(why) = placed_by_a_person(seen) {
            return decline(format!(
                "left where it is, because a person or another tool chose: {why}"
            ));
        }
        let threads = locality.threads_of_busiest_process;
        if f64::from(threads) < THREADS_MIN.value(policy) {
            return decline(format!(
                "its processes have {threads} thread each: threads that share no process are not brought together"
            ));
        }
        if let Some(why) = short_lived(seen, threads) {
            return decline(why);
        }
        if own_running(seen) <= 0.0 || locality.running.is_empty() {
            return decline("it is not known where its threads ran".into());
        }
        after_refused(seen, choose(seen, locality))
    }

    fn knows_other_places(&self) -> bool {
        true
    }

    fn unwanted(&self, seen: &Seen<'_>) -> Option<String> {
        placed_by_a_person(seen)
            .map(|why| format!("a person or another tool chose where it runs or how it ranks: {why}"))
    }

    fn outgrown(&self, seen: &Seen<'_>) -> Option<String> {
        outgrown(seen)
    }
}

fn decline(reason: String) -> Opinion {
    Opinion::Decline(Declined::because(reason))
}

/// Processes of one thread that end before their place matters. (A program of many threads stays.)
fn short_lived(seen: &Seen<'_>, threads: u32) -> Option<String> {
    let least = PROCESS_LIFE_MIN.value(seen.policy);
    // Each process comes once and goes once.
    let life = 2.0 * seen.workload.processes.len() as f64 / seen.load.churn.max(1e-9);
    (threads < 2 && life < least).then(|| {
        format!(
            "its processes have one thread each and live for {}: they are gone before their place matters (at least {})",
            Nanoseconds::from_secs_f64(life),
            Nanoseconds::from_secs_f64(least)
        )
    })
}

/// The CPUs on which homeostat keeps the workload: the newest placement lies over the others.
pub(crate) fn placement<'a>(seen: &Seen<'a>) -> Option<&'a Vec<CpuId>> {
    newest(seen).map(|(cpus, _)| cpus)
}

/// The same, and the change.
fn newest<'a>(seen: &Seen<'a>) -> Option<(&'a Vec<CpuId>, &'a Held)> {
    seen.held.iter().rev().find_map(|h| match &h.target {
        Target::Cpus(cpus) if PLACING.contains(&h.strategy.as_str()) => Some((cpus, h)),
        _ => None,
    })
}

/// Whether the demand has outgrown the placement while there is room elsewhere. Threads that always run and were to take turns
/// there wait as long as their number says; those of an offered load that the place cannot hold are more and more.
fn outgrown(seen: &Seen<'_>) -> Option<String> {
    let (cpus, held) = newest(seen)?;
    // Those that are online: a place that lost CPUs is a smaller one than that which was proven.
    let given = seen.machine.online_among(cpus) as f64;
    let all = seen.machine.general_cpus().count() as f64;
    let interval = seen.machine_interval.as_secs_f64();
    if interval <= 0.0 || given >= all || given < 1.0 {
        return None;
    }
    let busy = seen.machine_sample.cpu_busy.as_secs_f64() / interval / all;
    // What it waited where nobody had room says nothing of a machine that has some.
    let as_full = busy + OUTGROWN_ROOM >= held.machine_busy;
    let (waited, runnable) = if as_full {
        (held.waited, held.runnable)
    } else {
        (0.0, 0.0)
    };
    let in_turns = (runnable / cpus.len() as f64).clamp(1.0, IN_TURNS_MAX);
    let wait = seen.load.runqueue_wait;
    // Longer than its own threads would in turns, or than it was when that was proven: the first tells of a place that never held an
    // offered load, the second of one that has become too small.
    let waits = 1.0 + wait >= in_turns.min(1.0 + waited) * (1.0 + OUTGROWN_WAIT);
    let full = seen.load.cpus >= OUTGROWN_USE * given && waits;
    (full && busy < OUTGROWN_ELSEWHERE).then(|| {
        format!(
            "its demand has outgrown CPUs {}: {:.1} of {given} in use, threads wait {:.0} % of the time they run, \
             and the machine is {:.0} % busy",
            cpu_list(cpus),
            seen.load.cpus,
            seen.load.runqueue_wait * 100.0,
            busy * 100.0
        )
    })
}

/// What an opinion says, and which places were refused before it.
fn after_refused(seen: &Seen<'_>, opinion: Opinion) -> Opinion {
    if seen.refused.is_empty() {
        return opinion;
    }
    let of = |r: &RefusedPlace| {
        let memory = if r.with_memory { " with its memory" } else { "" };
        let whose = if r.for_a_neighbour { " for a neighbour" } else { "" };
        format!("CPUs {}{memory} ({}{whose})", cpu_list(&r.cpus), r.verdict)
    };
    let places: Vec<String> = seen.refused.iter().map(of).collect();
    let refused = format!("; refused before: {}", places.join(", "));
    match opinion {
        Opinion::Propose(mut p) => {
            p.hypothesis.push_str(&refused);
            Opinion::Propose(p)
        }
        Opinion::Decline(mut d) => {
            d.reason.push_str(&refused);
            Opinion::Decline(d)
        }
        other => other,
    }
}

fn choose(seen: &Seen<'_>, locality: &Locality) -> Opinion {
    let policy = seen.policy;
    let domains = Domains::of(seen.machine);
    if domains.list.len() < 2 {
        return decline("all online CPUs share one last-level cache".into());
    }
    let demand = Demand::of(seen, &domains);
    let now = Picture::of(locality);
    let question = Question::of(seen, locality, &domains, &demand, &now, demand.busy(&domains));
    let best = question.best(question.candidates());
    // A program that fits nowhere: threads that always run may take turns where much is promised for that, an offered load, whose
    // requests would wait, only where it is sure.
    let squeezed = || {
        let bold = Question::of(seen, locality, &domains, &demand, &now, demand.busy(&domains)).boldly();
        let most = SHARING_GAIN.value(policy);
        bold.best(bold.candidates())
            .filter(|c| bold.takes_turns() || c.predicted.lower >= most)
    };
    match best.or_else(squeezed) {
        Some(best) if seen.known.is_some() || best.predicted.estimate >= GAIN_MIN.value(policy) => {
            let surer = best
                .sharing
                .and_then(|_| split(&question))
                .filter(|o| matches!(o, Opinion::Propose(p) if p.predicted.lower > best.predicted.lower));
            surer.unwrap_or_else(|| propose(&question, best, &GAIN_MIN))
        }
        best => split(&question)
            .or_else(|| Some(propose(&question, best?, &GAIN_MIN)))
            .or_else(|| {
                let open = !question.was_refused_everywhere();
                open.then(|| grouping(seen, locality, &domains, &now))?
            })
            .unwrap_or_else(|| decline(too_big(&domains, &demand, &question.limits))),
    }
}

/// The proposal to use that set, or why it is not made.
fn propose(question: &Question<'_>, best: Candidate, gain_min: &Setting) -> Opinion {
    let Question {
        seen,
        domains,
        demand,
        limits,
        now,
        ..
    } = question;
    let policy = seen.policy;
    let members = question.members(&best.members);
    let inside: f64 = members.iter().filter_map(|d| now.running.get(&d.id)).sum();
    let mut cpus: Vec<CpuId> = members.iter().flat_map(|d| d.cpus.iter().copied()).collect();
    cpus.sort();
    if inside >= TOGETHER && best.moved.is_none() && !question.is_left() {
        return decline(format!(
            "{:.0} % of it runs on CPUs {} already",
            inside * 100.0,
            cpu_list(&cpus)
        ));
    }
    let gain = seen.known.unwrap_or(best.predicted);
    if seen.known.is_none() {
        let least = gain_min.value(policy);
        if gain.estimate < least {
            return decline(format!(
                "no benefit predicted from keeping it on {} ({gain}; at least {:+.1} %)",
                name(&members, &cpus),
                least * 100.0
            ));
        }
        let quiet = MACHINE_BUSY_MIN.value(policy);
        if limits.mean < quiet && gain.lower < QUIET_GAIN_MIN.value(policy) {
            return decline(format!(
                "the machine is {:.0} % busy and the scheduler keeps threads at home: no sure benefit from keeping it \
                 on {} ({gain})",
                limits.mean * 100.0,
                name(&members, &cpus)
            ));
        }
    }
    let (after, along) = match &best.moved {
        Some(m) => (
            m.after.clone(),
            format!(
                "; {} of its memory go{} there in the same change, in {}",
                m.bytes,
                if m.shared { "" } else { " (private only)" },
                Nanoseconds::from_secs_f64(m.seconds)
            ),
        ),
        None => (moved_to(now, &members), String::new()),
    };
    let holds = match best.sharing {
        Some(s) => format!("{:.1} times as many threads on a core as now", s.times),
        None => format!("{:.0} % of its cores used", best.used * 100.0),
    };
    let hypothesis = format!(
        "{:.1} running threads are spread over {:.1} of {} last-level caches; {} holds them with {holds}{along}; memory \
         then local {:.0} % (predicted {gain})",
        demand.own_running,
        now.spread(),
        domains.list.len(),
        name(&members, &cpus),
        after.local(domains) * 100.0,
    );
    let mut risk = format!(
        "when its load grows it waits for {} CPUs while others idle, until the placement is withdrawn",
        cpus.len()
    );
    // Where its threads wait for the CPUs of the place before.
    let makes_room = placement(seen).is_some_and(|kept| {
        let full = seen.load.cpus >= OUTGROWN_USE * kept.len() as f64;
        cpus.len() > kept.len() && full && seen.load.runqueue_wait >= OUTGROWN_WAIT
    });
    let mut arguments = BTreeMap::new();
    let mut settling = SETTLING;
    if let Some(m) = &best.moved {
        risk = format!("{risk}; {}", m.risk());
        settling = m.settling(SETTLING);
        let kinds = if m.shared { "all" } else { "private" };
        arguments.extend([
            ("memory".to_owned(), kinds.to_owned()),
            ("memory_bytes".to_owned(), m.bytes.0.to_string()),
            ("bytes_per_second".to_owned(), format!("{:.0}", m.pace)),
        ]);
        arguments.extend(m.of_large_pages());
    }
    Opinion::Propose(Box::new(Proposal {
        hypothesis,
        predicted: gain,
        effector: EffectorId::from("thread_placement"),
        target: Target::Cpus(cpus),
        stages: Vec::new(),
        arguments,
        reversible: true,
        joint: true,
        urgent: false,
        makes_room,
        settling,
        risk,
        advice: Vec::new(),
    }))
}

/// For a program of several processes with memory of their own: all CPUs stay allowed, and each process is kept on one
/// domain with its memory. `None` where that cannot be done, where a domain could become too full, or without a benefit.
fn split(question: &Question<'_>) -> Option<Opinion> {
    let Question {
        seen,
        locality,
        domains,
        demand,
        limits,
        now,
        place,
        ..
    } = question;
    let policy = seen.policy;
    let processes = seen.workload.processes.len() as f64;
    let may = seen.machine.can(SPLIT) && memory_affinity::is_allowed(seen);
    if !may || question.was_refused_everywhere() || processes < 2.0 || demand.own_running <= 0.0 {
        return None;
    }
    let cores = f64::from(domains.cores).max(1.0);
    let mut shares: BTreeMap<NodeId, f64> = BTreeMap::new();
    for domain in &domains.list {
        *shares.entry(domain.node).or_default() += f64::from(domain.cores) / cores;
    }
    let used = fullest(question, processes)?;
    let collides = limits.mean <= FULL && domains.running_on_core(used) > limits.density;
    if shares.len() < 2 || used > limits.used || collides {
        return None;
    }
    let everywhere = now.with_running(domains.list.iter().map(|d| (d.id, f64::from(d.cores))));
    let moved = memory_affinity::planned_apart(seen, locality, &everywhere, &shares)
        .ok()
        .filter(|m| m.quick)?;
    let gain = place.gain(&moved.after, false);
    let quiet = limits.mean < MACHINE_BUSY_MIN.value(policy) && gain.lower < QUIET_GAIN_MIN.value(policy);
    if gain.estimate < TOGETHER_GAIN.value(policy).max(GAIN_MIN.value(policy)) || quiet {
        return None;
    }
    let mut arguments = BTreeMap::from([
        ("split_by".to_owned(), "process".to_owned()),
        ("memory".to_owned(), "private".to_owned()),
        ("memory_bytes".to_owned(), moved.bytes.0.to_string()),
        ("bytes_per_second".to_owned(), format!("{:.0}", moved.pace)),
    ]);
    arguments.extend(moved.of_large_pages());
    Some(Opinion::Propose(Box::new(Proposal {
        hypothesis: format!(
            "its {processes} processes run on all of {} last-level caches; each kept on one, with its private memory ({} \
             move in {}), memory is local {:.0} % instead of {:.0} %, and the fullest domain has {:.0} % of its cores \
             used (predicted {gain})",
            domains.list.len(),
            moved.bytes,
            Nanoseconds::from_secs_f64(moved.seconds),
            moved.after.local(domains) * 100.0,
            now.local(domains) * 100.0,
            used * 100.0
        ),
        predicted: gain,
        effector: EffectorId::from("thread_placement"),
        target: Target::Cpus(seen.machine.general_cpus().map(|c| c.id).collect()),
        stages: Vec::new(),
        arguments,
        reversible: true,
        joint: true,
        urgent: false,
        makes_room: false,
        settling: moved.settling(SETTLING),
        risk: format!(
            "a domain whose processes get busier waits while another one idles, until the placement is withdrawn; {}",
            moved.risk()
        ),
        advice: Vec::new(),
    })))
}

/// Share of the cores of the fullest domain that is used when the processes are dealt out to the domains by their cores:
/// as if each were as busy as the busiest is.
fn fullest(question: &Question<'_>, processes: f64) -> Option<f64> {
    let (sample, demand) = (question.seen.sample, question.demand);
    let share = sample.cpu_busiest.as_secs_f64() / sample.cpu.as_secs_f64();
    // A busiest process that cannot be told from the whole says nothing of the others.
    let busiest = demand.own * if share.is_finite() { share.min(1.0) } else { 1.0 };
    let cores = f64::from(question.domains.cores).max(1.0);
    let floating = (demand.total - demand.own - demand.placed.iter().sum::<f64>()).max(0.0);
    let of = |(at, domain): (usize, &Domain)| {
        let here = f64::from(domain.cores);
        let own = (processes * here / cores).ceil() * busiest;
        let placed = demand.placed.get(at).copied().unwrap_or(0.0);
        (own + placed) / here.max(1.0) + floating / cores
    };
    question.domains.list.iter().enumerate().map(of).reduce(f64::max)
}

/// For a program that fills more than a board: all CPUs stay allowed, and each thread is kept on the board where it is,
/// with those that it shares data with. `None` where that cannot be done or has nothing to bring together: which of
/// several processes share data with each other more than with the rest is not to be seen.
fn grouping(seen: &Seen<'_>, locality: &Locality, domains: &Domains, now: &Picture) -> Option<Opinion> {
    if locality.threads_of_busiest_process < 2 || !seen.machine.can("placement.threads.grouped") {
        return None;
    }
    let boards: BTreeSet<usize> = domains
        .list
        .iter()
        .filter(|d| now.running.get(&d.id).is_some_and(|share| *share > 0.0))
        .map(|d| d.board)
        .collect();
    if boards.len() < 2 {
        return None;
    }
    let predicted = prediction::of_grouping(now, domains, locality.counters.as_ref());
    let gain = seen.known.unwrap_or(predicted);
    let least = GAIN_MIN.value(seen.policy);
    if seen.known.is_none() && gain.estimate < least {
        return Some(decline(format!(
            "it fills more than a board, and no benefit is predicted from keeping its threads to {} boards by group ({gain}; \
             at least {:+.1} %)",
            boards.len(),
            least * 100.0
        )));
    }
    Some(Opinion::Propose(Box::new(Proposal {
        hypothesis: format!(
            "its {:.1} running threads fill more than a board; kept on their board in groups that share data, they wait \
             less for lines of the other {} (predicted {gain})",
            own_running(seen),
            if boards.len() == 2 { "board" } else { "boards" },
        ),
        predicted: gain,
        effector: EffectorId::from("thread_placement"),
        target: Target::Cpus(seen.machine.general_cpus().map(|c| c.id).collect()),
        stages: Vec::new(),
        arguments: BTreeMap::from([("group_by".to_owned(), "board".to_owned())]),
        reversible: true,
        joint: true,
        urgent: false,
        makes_room: false,
        settling: SETTLING,
        risk: "a board whose group grows waits while another one idles, until the placement is withdrawn"
            .into(),
        advice: Vec::new(),
    })))
}

/// Why no set will do, with the numbers of the biggest single domain.
fn too_big(domains: &Domains, demand: &Demand, limits: &Limits) -> String {
    let free = domains
        .list
        .iter()
        .enumerate()
        .map(|(i, d)| f64::from(d.cores) - demand.placed.get(i).copied().unwrap_or(0.0))
        .fold(0.0, f64::max);
    format!(
        "its demand of {:.1} cores ({:.1} running threads) does not fit part of the machine without loss of response \
         time: at most {free:.1} cores are free in one last-level-cache domain, {:.0} % of a domain may be used, with \
         {:.1} running threads per core",
        demand.own,
        demand.own_running,
        limits.used * 100.0,
        limits.density
    )
}

#[cfg(test)]
mod tests {
    use super::choice::WITH_MEMORY;
    use super::*;
    use crate::common::testing::{Chip, Scene, available, chips, machine};
    use homeostat_model::{Bytes, Counters, NodeId, ProcessId, Verdict};

    fn cpus(proposal: &Proposal) -> Vec<u32> {
        match &proposal.target {
            Target::Cpus(cpus) => cpus.iter().map(|c| c.0).collect(),
            other => panic!("{other:?}"),
        }
    }

    fn chip(number: u32) -> Vec<u32> {
        (number * 32..(number + 1) * 32).collect()
    }

    fn memory_on(scene: &mut Scene, shares: &[f64]) {
        let total = scene.sample.resident.0 as f64;
        scene.locality().private = shares
            .iter()
            .enumerate()
            .map(|(node, share)| (NodeId(node as u32), Bytes((share * total) as u64)))
            .collect();
    }

    /// Two programs of 30 threads on two chips of 8 cores with 4 threads each, as in seed 001 6.1.
    fn latency() -> Scene {
        Scene::new(machine(&chips(2, 1), 4), 30.0, 16.0).with(|s| {
            memory_on(s, &[0.3, 0.7]);
            s.neighbour(30.0, None);
        })
    }

    #[test]
    fn two_programs_get_a_chip_each_the_one_where_their_memory_is() {
        let first = latency().proposal(&CacheAffinity);
        assert_eq!(cpus(&first), chip(1));
        assert_eq!(first.effector.as_str(), "thread_placement");
        assert!(first.reversible && first.stages.is_empty() && first.settling == SETTLING);
        assert!(
            first.predicted.estimate > 0.05 && first.predicted.lower > 0.0,
            "{}",
            first.hypothesis
        );
        // The second one has its memory on the same chip, but there is no room left.
        let second = latency().with(|s| {
            s.neighbours.clear();
            s.neighbour(30.0, Some(1));
            memory_on(s, &[0.5, 0.5]);
        });
        assert_eq!(cpus(&second.proposal(&CacheAffinity)), chip(0));
    }

    /// 10 + 6 cores, 12.8 running threads on as many cores (seed 000 section 4).
    fn fanned_out() -> Scene {
        let two = [
            Chip {
                cores: 10,
                node: 0,
                board: 0,
            },
            Chip {
                cores: 6,
                node: 1,
                board: 0,
            },
        ];
        Scene::new(machine(&two, 4), 12.8, 87.0).with(|s| {
            memory_on(s, &[0.607, 0.393]);
            s.counters().local_share = 0.52;
        })
    }

    #[test]
    fn two_threads_on_a_core_only_where_that_frees_cores_or_in_the_classic_profile() {
        let text = fanned_out().reason(&CacheAffinity);
        assert!(
            text.contains("does not fit part of the machine without loss of response time"),
            "{text}"
        );
        let pool = fanned_out().with(|s| s.machine.capabilities.push(available("cores.shared_pool")));
        assert_eq!(cpus(&pool.proposal(&CacheAffinity)), (0..40).collect::<Vec<_>>());
        assert_eq!(
            cpus(&fanned_out().classic().proposal(&CacheAffinity)),
            (0..40).collect::<Vec<_>>()
        );
    }

    #[test]
    fn programs_of_a_full_machine_are_balanced_over_the_chips() {
        // 16 programs of one core each on 16 cores (seed 000 5.2): placed one after the other.
        let mut placed: Vec<usize> = Vec::new();
        for done in 0..16 {
            let scene = Scene::new(machine(&chips(2, 2), 4), 4.0, 8.0).with(|s| {
                for at in 0..15 {
                    s.neighbour(4.0, placed.get(at).copied());
                }
            });
            let proposal = scene.proposal(&CacheAffinity);
            assert!(
                proposal.predicted.estimate > 0.01,
                "{done}: {}",
                proposal.hypothesis
            );
            placed.push(usize::from(cpus(&proposal)[0] >= 32));
        }
        assert_eq!(placed.iter().filter(|c| **c == 0).count(), 8, "{placed:?}");
    }

    #[test]
    fn programs_that_do_not_divide_evenly_are_not_crowded_on_one_chip() {
        let scene = Scene::new(machine(&chips(2, 2), 4), 20.0, 8.0).with(|s| {
            s.neighbour(20.0, Some(0));
            s.neighbour(20.0, Some(1));
        });
        assert!(scene.reason(&CacheAffinity).contains("does not fit"));
    }

    #[test]
    fn a_quiet_machine_is_left_alone_unless_the_gain_is_sure() {
        // Four programs, 17 % busy together: the scheduler keeps threads at home (seed 000 5.3).
        let quiet = |local: f64| {
            Scene::new(machine(&chips(2, 2), 4), 1.09, 13.0).with(|s| {
                for _ in 0..3 {
                    s.neighbour(1.09, None);
                }
                s.counters().local_share = local;
            })
        };
        let text = quiet(0.915).reason(&CacheAffinity);
        assert!(
            text.contains("no benefit predicted") || text.contains("17 % busy"),
            "{text}"
        );
        let beside = |s: &mut Scene| memory_on(s, &[0.96, 0.04]);
        let text = quiet(0.915).with(beside).reason(&CacheAffinity);
        assert!(text.contains("17 % busy"), "{text}");
        let sure = quiet(0.5).with(beside);
        assert_eq!(cpus(&sure.proposal(&CacheAffinity)), chip(0));
        assert!(
            quiet(0.5)
                .with(beside)
                .classic()
                .reason(&CacheAffinity)
                .contains("17 % busy")
        );
    }

    #[test]
    fn a_demand_that_fills_the_machine_is_not_squeezed() {
        // 90 % busy on four chips of one board (seed 000 5.4): k(.90) = 2.57 threads per core.
        let scene = Scene::new(machine(&chips(4, 4), 4), 82.3, 200.0);
        let text = scene.reason(&CacheAffinity);
        assert!(
            text.contains("28.8 cores") && text.contains("does not fit"),
            "{text}"
        );
    }

    #[test]
    fn a_demand_too_big_for_a_chip_gets_the_board_where_its_memory_is() {
        let scene = Scene::new(machine(&chips(8, 4), 4), 24.0, 100.0).with(|s| {
            memory_on(s, &[0.0, 0.0, 0.0, 0.0, 0.25, 0.25, 0.25, 0.25]);
            s.counters().local_share = 0.125;
        });
        let proposal = scene.proposal(&CacheAffinity);
        assert_eq!(
            cpus(&proposal),
            (128..256).collect::<Vec<_>>(),
            "{}",
            proposal.hypothesis
        );
    }

    #[test]
    fn a_program_of_two_boards_is_grouped_by_board_where_that_can_be_done() {
        // 85 % busy on two books of two chips (seed 000 5.4).
        let scene = Scene::new(machine(&chips(4, 2), 4), 68.0, 170.0)
            .with(|s| s.counters().cache_to_cache_stall_share = 0.08);
        assert!(scene.reason(&CacheAffinity).contains("does not fit"));
        let able = scene.with(|s| {
            s.machine
                .capabilities
                .push(available("placement.threads.grouped"))
        });
        let p = able.proposal(&CacheAffinity);
        assert_eq!(cpus(&p).len(), 128);
        assert_eq!(p.arguments["group_by"], "board");
        let calm = able.with(|s| s.counters().cache_to_cache_stall_share = 0.01);
        assert!(calm.reason(&CacheAffinity).contains("no benefit is predicted"));
        // One board has nothing to group.
        let one = Scene::new(machine(&chips(4, 4), 4), 82.3, 170.0).with(|s| {
            s.machine
                .capabilities
                .push(available("placement.threads.grouped"))
        });
        assert!(one.reason(&CacheAffinity).contains("does not fit"));
    }

    #[test]
    fn a_few_core_complexes_of_one_node_and_not_less_than_one() {
        let epyc: Vec<Chip> = (0..8)
            .map(|_| Chip {
                cores: 8,
                node: 0,
                board: 0,
            })
            .collect();
        let scene = |running: f64| {
            Scene::new(machine(&epyc, 2), running, 4.0).with(|s| {
                s.counters().cache_to_cache_stall_share = 0.2;
                s.neighbour(20.0, None);
            })
        };
        assert_eq!(cpus(&scene(12.0).proposal(&CacheAffinity)).len(), 2 * 16);
        assert_eq!(cpus(&scene(5.0).proposal(&CacheAffinity)).len(), 16);
    }

    #[test]
    fn siblings_are_not_made_to_share_a_core_while_there_is_room_elsewhere() {
        let scene = |placed: Option<usize>| {
            Scene::new(machine(&chips(4, 4), 2), 6.0, 8.0).with(|s| s.neighbour(6.0, placed))
        };
        for taken in 0..4 {
            let target = cpus(&scene(Some(taken)).proposal(&CacheAffinity));
            assert_ne!(target[0] as usize / 16, taken);
        }
        // Nor when every chip holds another program of that size.
        let crowded = scene(Some(0)).with(|s| {
            for chip in 1..4 {
                s.neighbour(6.0, Some(chip));
            }
        });
        assert!(crowded.reason(&CacheAffinity).contains("does not fit"));
    }

    /// As many processes as threads.
    fn one_thread_each(s: &mut Scene) {
        s.locality().threads_of_busiest_process = 1;
        s.workload.processes = (0..30).map(|pid| ProcessId { pid, start_ticks: 1 }).collect();
    }

    fn on_a_segment(s: &mut Scene) {
        let locality = s.locality();
        locality.shared = std::mem::take(&mut locality.private);
    }

    #[test]
    fn processes_on_a_shared_segment_are_placed_as_threads_are() {
        let scene = latency().with(one_thread_each).with(on_a_segment);
        assert_eq!(cpus(&scene.proposal(&CacheAffinity)), chip(1));
        // ASO left them alone.
        assert!(scene.classic().reason(&CacheAffinity).contains("1 thread each"));
    }

    #[test]
    fn processes_that_share_nothing_are_placed_beside_their_memory_or_not_at_all() {
        let scene = |memory: [f64; 2]| {
            Scene::new(machine(&chips(2, 1), 4), 6.0, 16.0)
                .with(one_thread_each)
                .with(|s| {
                    memory_on(s, &memory);
                    s.locality().counters = None;
                    s.neighbour(8.0, Some(1));
                })
        };
        // Lines of other caches are assumed of threads that share memory only.
        let alone = |s: &mut Scene| s.neighbours.clear();
        let half = scene([0.5, 0.5]).with(alone);
        assert!(half.reason(&CacheAffinity).contains("no benefit predicted"));
        cpus(
            &scene([0.5, 0.5])
                .with(alone)
                .with(on_a_segment)
                .proposal(&CacheAffinity),
        );
        assert_eq!(cpus(&scene([0.9, 0.1]).proposal(&CacheAffinity)), chip(0));
    }

    #[test]
    fn processes_that_soon_end_are_not_placed() {
        let churn = |per_second: f64| {
            latency()
                .with(one_thread_each)
                .with(on_a_segment)
                .with(|s| s.load.churn = per_second)
        };
        // 30 processes, each of which comes and goes: every 59 and every 61 seconds.
        let text = churn(60.0 / 59.0).reason(&CacheAffinity);
        assert!(text.contains("live for 59"), "{text}");
        churn(60.0 / 61.0).proposal(&CacheAffinity);
        // Threads of one process stay, whatever it forks.
        latency().with(|s| s.load.churn = 50.0).proposal(&CacheAffinity);
    }

    /// Six threads with their memory evenly on all nodes: a place alone is worth nothing.
    fn evenly_spread() -> Scene {
        Scene::new(machine(&chips(4, 4), 4), 6.0, 8.0).with(|s| {
            s.counters().cache_to_cache_stall_share = 0.0;
            s.machine.capabilities.push(available(WITH_MEMORY));
        })
    }

    #[test]
    fn memory_goes_along_where_the_place_alone_gains_nothing() {
        let p = evenly_spread().proposal(&CacheAffinity);
        assert_eq!(cpus(&p), chip(0), "{}", p.hypothesis);
        assert_eq!(p.effector.as_str(), "thread_placement");
        assert!(p.reversible && p.stages.is_empty());
        assert_eq!(p.arguments["memory"], "all");
        let (bytes, pace): (f64, f64) = (
            p.arguments["memory_bytes"].parse().unwrap(),
            p.arguments["bytes_per_second"].parse().unwrap(),
        );
        assert!((bytes / (6.0 * (1_u64 << 30) as f64) - 1.0).abs() < 0.01);
        // A washout of three time constants covers the move.
        assert!(1.5 * p.settling.as_secs_f64() >= bytes / pace - 0.01);
        assert!(p.predicted.lower > 0.1, "{}", p.predicted);
        assert!(
            p.hypothesis
                .contains("6.00 GiB of its memory go there in the same change")
                && p.hypothesis.contains("memory then local 100 %"),
            "{}",
            p.hypothesis
        );
        // Of several places, the one where most of it is already.
        let uneven = evenly_spread().with(|s| memory_on(s, &[0.2, 0.2, 0.4, 0.2]));
        let uneven = uneven.with(|s| s.counters().local_share = 0.4);
        assert_eq!(cpus(&uneven.proposal(&CacheAffinity)), chip(2));
        // And on large pages it stays where it is, but where they can be moved.
        let large = evenly_spread().with(|s| {
            let locality = s.locality();
            locality.huge = locality.private.clone();
        });
        assert!(large.reason(&CacheAffinity).contains("no benefit predicted"));
        let large = large.with(|s| s.machine.capabilities.push(available("placement.pages.large")));
        assert_eq!(large.proposal(&CacheAffinity).arguments["large_pages"], "move");
    }

    #[test]
    fn a_refused_place_leaves_those_of_another_size_or_for_a_neighbours_sake_elsewhere() {
        let refused = |cpus: Vec<u32>, with_memory: bool, for_a_neighbour: bool| {
            evenly_spread().with(|s| {
                s.refused.push(RefusedPlace {
                    cpus: cpus.into_iter().map(CpuId).collect(),
                    with_memory,
                    verdict: Verdict::Harmful,
                    for_a_neighbour,
                });
            })
        };
        // It gained nothing for itself on one chip with its memory: no other chip alone, neither with nor without.
        let larger = refused(chip(0), true, false).opinion(&CacheAffinity);
        if let Opinion::Propose(p) = &larger {
            assert!(cpus(p).len() > chip(0).len(), "{}", p.hypothesis);
        }
        // Threads alone gained nothing there: with the memory is another matter.
        let p = refused(chip(0), false, false).proposal(&CacheAffinity);
        assert_eq!((cpus(&p), p.arguments["memory"].as_str()), (chip(0), "all"));
        // A neighbour lost by it there: another chip of the same size.
        let p = refused(chip(0), true, true).proposal(&CacheAffinity);
        assert_eq!(cpus(&p).len(), chip(0).len());
        assert!(
            cpus(&p).iter().all(|cpu| !chip(0).contains(cpu)),
            "{}",
            p.hypothesis
        );
    }

    #[test]
    fn memory_does_not_go_along_where_it_need_not_or_must_not() {
        let nothing = |s: Scene| {
            let text = s.reason(&CacheAffinity);
            assert!(text.contains("no benefit predicted"), "{text}");
        };
        nothing(evenly_spread().with(|s| s.machine.capabilities.retain(|c| c.id.as_str() != WITH_MEMORY)));
        nothing(evenly_spread().with(|s| s.counters().memory_stall_share = 0.02));
        nothing(evenly_spread().with(|s| s.machine_sample.memory_free = Bytes(0)));
        let off = BTreeMap::from([("memory_affinity".to_owned(), false)]);
        nothing(evenly_spread().with(|s| s.policy.strategies = off.clone()));
        nothing(evenly_spread().with(|s| s.workload.choice.strategies = off.clone()));
        nothing(evenly_spread().classic());
        // More than can be moved back and forth.
        nothing(evenly_spread().with(|s| {
            for bytes in s.locality().private.values_mut() {
                *bytes = Bytes(12 << 30);
            }
        }));
        // Where the place alone is worth a trial, memory comes later.
        let beside = evenly_spread().with(|s| memory_on(s, &[0.7, 0.1, 0.1, 0.1]));
        assert!(beside.proposal(&CacheAffinity).arguments.is_empty());
    }

    #[test]
    fn threads_that_always_run_need_a_core_each_and_no_head_room() {
        // Eight cores with two threads each; eight threads, one on every core of a chip.
        let scene = |threads: u32| {
            Scene::new(machine(&chips(4, 4), 2), 8.0, 8.0).with(|s| {
                s.locality().threads = threads;
                s.counters().cache_to_cache_stall_share = 0.2;
                s.neighbour(8.0, None);
            })
        };
        assert_eq!(cpus(&scene(8).proposal(&CacheAffinity)).len(), 16);
        // Of twice as many threads half wait, and may run at any time; what that costs, nobody knows here.
        let two = scene(16)
            .with(|s| s.locality().counters = None)
            .proposal(&CacheAffinity);
        assert_eq!(cpus(&two).len(), 32, "{}", two.hypothesis);
        // ASO let two share a core anyway.
        assert_eq!(cpus(&scene(16).classic().proposal(&CacheAffinity)).len(), 16);
        // A chip that others use in part has no core for each.
        let taken = scene(8).with(|s| {
            s.locality().counters = None;
            for chip in 0..4 {
                s.neighbour(1.0, Some(chip));
            }
        });
        let target = taken.opinion(&CacheAffinity);
        assert!(
            !matches!(&target, Opinion::Propose(p) if cpus(p).len() == 16),
            "{target:?}"
        );
    }

    /// Twelve threads that always run and do little but wait for memory, which lies on four boards.
    fn chase() -> Scene {
        Scene::new(machine(&chips(4, 1), 4), 12.0, 1.0).with(|s| {
            s.locality().threads = 12;
            s.counters().memory_stall_share = 0.95;
            s.counters().cache_to_cache_stall_share = 0.0;
            s.machine.capabilities.push(available(WITH_MEMORY));
            s.neighbour(12.0, None);
        })
    }

    #[test]
    fn threads_that_wait_for_memory_share_cores_beside_it() {
        let p = chase().proposal(&CacheAffinity);
        assert_eq!(cpus(&p).len(), 32, "{}", p.hypothesis);
        assert!(
            p.hypothesis
                .contains("1.5 times as many threads on a core as now")
                && p.hypothesis.contains("memory then local 100 %"),
            "{}",
            p.hypothesis
        );
        assert!(p.predicted.estimate > 0.5, "{}", p.predicted);
        // Beside its memory already, without a move.
        let beside = chase().with(|s| memory_on(s, &[0.0, 1.0, 0.0, 0.0]));
        let p = beside.proposal(&CacheAffinity);
        assert_eq!((cpus(&p), p.arguments.len()), (chip(1), 0), "{}", p.hypothesis);
    }

    #[test]
    fn threads_do_not_share_cores_where_that_costs_more_or_nobody_knows() {
        let keeps_apart = |s: Scene| match s.opinion(&CacheAffinity) {
            Opinion::Propose(p) => assert!(cpus(&p).len() > 32, "{}", p.hypothesis),
            Opinion::Decline(_) => {}
            other => panic!("{other:?}"),
        };
        keeps_apart(chase().with(|s| s.counters().memory_stall_share = 0.2));
        keeps_apart(chase().with(|s| s.locality().counters = None));
        // Without a hardware thread for each of those that run there.
        keeps_apart(chase().with(|s| {
            s.neighbours.clear();
            (0..4).for_each(|chip| s.neighbour(21.0, Some(chip)));
        }));
        // Nor without head room for a load that may grow.
        let offered = |running: f64| {
            let grows = Scene::new(machine(&chips(4, 1), 4), running, 1.0);
            grows.with(|s| {
                s.load.saturated = false;
                s.locality().threads = 64;
                *s.counters() = Counters {
                    memory_stall_share: 0.95,
                    cache_to_cache_stall_share: 0.0,
                    ..*s.counters()
                };
                memory_on(s, &[0.9, 0.1, 0.0, 0.0]);
                s.machine_sample.memory_free = Bytes(0);
            })
        };
        assert_eq!(cpus(&offered(20.0).proposal(&CacheAffinity)), chip(0));
        keeps_apart(offered(60.0));
    }

    #[test]
    fn offered_work_runs_fewer_threads_when_each_is_faster_and_so_shares_cores_less() {
        let small = [0, 1, 2, 3].map(|i| Chip {
            cores: 2,
            node: i,
            board: i,
        });
        let scene = |saturated: bool| {
            Scene::new(machine(&small, 2), 3.0, 1.0).with(|s| {
                s.load.saturated = saturated;
                s.locality().threads = 6;
                s.counters().memory_stall_share = 0.8;
                memory_on(s, &[1.0, 0.0, 0.0, 0.0]);
                s.neighbour(1.0, None);
            })
        };
        let (offered, saturated) = (
            scene(false).proposal(&CacheAffinity),
            scene(true).proposal(&CacheAffinity),
        );
        let chip = (0..4).collect::<Vec<_>>();
        assert_eq!((cpus(&offered), cpus(&saturated)), (chip.clone(), chip));
        assert!(
            offered.predicted.estimate > saturated.predicted.estimate + 0.02,
            "{} and {}",
            offered.hypothesis,
            saturated.hypothesis
        );
    }

    #[test]
    fn processes_that_could_each_have_a_place_do_not_share_one() {
        let p = Scene::new(machine(&chips(4, 4), 4), 44.0, 1.0)
            .with(|s| {
                s.machine.capabilities.push(available(SPLIT));
                s.locality().threads = 44;
                s.locality().threads_of_busiest_process = 1;
                s.workload.processes = (0..44).map(|pid| ProcessId { pid, start_ticks: 1 }).collect();
                s.sample.cpu_busiest = Nanoseconds(s.sample.cpu.0 / 44);
                s.counters().memory_stall_share = 0.9;
                s.counters().cache_to_cache_stall_share = 0.0;
                memory_on(s, &[0.4, 0.4, 0.1, 0.1]);
            })
            .proposal(&CacheAffinity);
        assert_eq!(
            p.arguments.get("split_by").map(String::as_str),
            Some("process"),
            "{}",
            p.hypothesis
        );
    }

    #[test]
    fn threads_that_would_leave_their_memory_behind_take_it_along() {
        let scene = |shares: &[f64]| {
            Scene::new(machine(&chips(4, 4), 4), 5.0, 1.0).with(|s| {
                s.counters().cache_to_cache_stall_share = 0.3;
                s.machine.capabilities.push(available(WITH_MEMORY));
                memory_on(s, shares);
                s.neighbour(12.0, None);
            })
        };
        // Lines of other caches promise enough for the threads alone; three quarters of the memory would be far away.
        let p = scene(&[0.25; 4]).proposal(&CacheAffinity);
        assert_eq!(
            p.arguments.get("memory").map(String::as_str),
            Some("all"),
            "{}",
            p.hypothesis
        );
        let p = scene(&[0.55, 0.15, 0.15, 0.15]).proposal(&CacheAffinity);
        assert_eq!(p.arguments.get("memory"), None, "{}", p.hypothesis);
    }

    /// 64 workers with private memory that fill 80 % of a machine of two nodes.
    fn workers() -> Scene {
        Scene::new(machine(&chips(2, 2), 4), 28.4, 8.0).with(|s| {
            s.machine.capabilities.push(available(SPLIT));
            s.locality().threads_of_busiest_process = 1;
            s.workload.processes = (0..64).map(|pid| ProcessId { pid, start_ticks: 1 }).collect();
            s.sample.cpu_busiest = Nanoseconds(s.sample.cpu.0 / 64);
            s.counters().cache_to_cache_stall_share = 0.0;
        })
    }

    #[test]
    fn processes_with_memory_of_their_own_that_fill_the_machine_are_kept_on_one_domain_each() {
        let p = workers().proposal(&CacheAffinity);
        assert_eq!(cpus(&p), (0..64).collect::<Vec<_>>());
        assert_eq!(p.arguments["split_by"], "process");
        assert_eq!(p.arguments["memory"], "private");
        let bytes: f64 = p.arguments["memory_bytes"].parse().unwrap();
        assert!((bytes / 4e9 - 1.0).abs() < 0.1, "half of 8 GiB: {bytes}");
        assert!(
            p.hypothesis.contains("local 100 % instead of 50 %") && p.predicted.estimate > 0.1,
            "{}",
            p.hypothesis
        );
        assert!(1.5 * p.settling.as_secs_f64() >= bytes / 1024.0 / 1024.0 / 1024.0 - 0.01);
    }

    #[test]
    fn processes_are_not_split_without_benefit_means_or_balance() {
        let whole = |s: Scene| {
            let text = s.reason(&CacheAffinity);
            assert!(text.contains("does not fit"), "{text}");
        };
        whole(workers().with(|s| s.machine.capabilities.retain(|c| c.id.as_str() != SPLIT)));
        // Shared memory does not follow a process.
        whole(workers().with(on_a_segment));
        whole(workers().with(|s| s.counters().memory_stall_share = 0.02));
        whole(workers().with(|s| s.workload.processes.truncate(1)));
        // One of them does a third of the work.
        whole(workers().with(|s| s.sample.cpu_busiest = Nanoseconds(s.sample.cpu.0 / 3)));
        // All of the memory lies on one node, and the other has no room for half of it.
        whole(workers().with(|s| {
            memory_on(s, &[1.0, 0.0]);
            s.machine_sample.memory_free = Bytes(4 << 30);
        }));
        let off = BTreeMap::from([("memory_affinity".to_owned(), false)]);
        whole(workers().with(|s| s.policy.strategies = off));
        assert!(
            workers()
                .classic()
                .reason(&CacheAffinity)
                .contains("1 thread each")
        );
    }

    #[test]
    fn processes_are_not_grouped_by_board() {
        let scene = Scene::new(machine(&chips(4, 2), 4), 68.0, 170.0).with(|s| {
            s.counters().cache_to_cache_stall_share = 0.08;
            s.machine
                .capabilities
                .push(available("placement.threads.grouped"));
        });
        scene.proposal(&CacheAffinity);
        let processes = scene.with(one_thread_each).with(on_a_segment);
        assert!(processes.reason(&CacheAffinity).contains("does not fit"));
    }

    #[test]
    fn what_a_person_bound_is_left_alone_and_a_placement_withdrawn() {
        let bound = latency().with(|s| s.locality().bound = Some("taskset -c 0-7".into()));
        assert!(bound.reason(&CacheAffinity).contains("taskset -c 0-7"));
        assert!(bound.unwanted(&CacheAffinity).is_some());
        let ranked = latency().with(|s| s.workload.choice.tuned.push("Nice=10 in the unit".into()));
        assert!(ranked.reason(&CacheAffinity).contains("Nice=10"));
        assert!(ranked.unwanted(&CacheAffinity).is_some());
        let other = latency().with(|s| {
            s.workload
                .choice
                .tuned
                .push("MemoryTHP=disable in the unit".into())
        });
        other.proposal(&CacheAffinity);
        assert_eq!(latency().unwanted(&CacheAffinity), None);
    }

    #[test]
    fn a_placement_that_was_outgrown_is_withdrawn() {
        let kept: Vec<CpuId> = (0..32).map(CpuId).collect();
        let scene = latency().with(|s| {
            s.neighbours.clear();
            s.hold(ID, Target::Cpus(kept.clone()));
            s.load.cpus = 31.5;
            s.load.runqueue_wait = 0.5;
            s.machine_sample.cpu_busy = Nanoseconds::from_secs(33);
        });
        assert!(
            scene
                .reason(&CacheAffinity)
                .contains("placed already, on CPUs 0-31")
        );
        let why = scene.outgrown(&CacheAffinity).unwrap();
        assert!(why.contains("outgrown"), "{why}");
        assert_eq!(scene.unwanted(&CacheAffinity), None, "no person asked for it");
        // Where as many ran before it was tried, it is as it was meant to be.
        let as_proven = latency().with(|s| {
            s.neighbours.clear();
            s.hold(ID, Target::Cpus(kept.clone()));
            s.held[0].waited = 0.4;
            s.held[0].runnable = 43.0;
            s.load.cpus = 31.5;
            s.load.runqueue_wait = 0.5;
            s.machine_sample.cpu_busy = Nanoseconds::from_secs(33);
        });
        assert_eq!(as_proven.outgrown(&CacheAffinity), None);
        // A place that lost CPUs is a smaller one than that in which they were meant to take turns.
        let lost = as_proven.with(|s| {
            s.machine.cpus.retain(|c| !(16..32).contains(&c.id.0));
            s.load.cpus = 15.9;
            s.load.runqueue_wait = 1.7;
            s.machine_sample.cpu_busy = Nanoseconds::from_secs(17);
        });
        let why = lost.outgrown(&CacheAffinity).unwrap();
        assert!(why.contains("15.9 of 16 in use"), "{why}");
        // Not when threads do not wait, nor when there is no room elsewhere.
        let calm = latency().with(|s| {
            s.hold(ID, Target::Cpus(kept.clone()));
            s.load.cpus = 31.5;
        });
        assert_eq!(calm.outgrown(&CacheAffinity), None);
        let full = scene.with(|s| s.machine_sample.cpu_busy = Nanoseconds::from_secs(62));
        assert_eq!(full.outgrown(&CacheAffinity), None);
    }

    #[test]
    fn together_already_means_nothing_to_do() {
        let scene = latency().with(|s| {
            let running = s.locality().running.clone();
            let last = *running.keys().last().unwrap();
            s.locality().running = BTreeMap::from([(last, 30.0)]);
            s.counters().local_share = 0.5;
        });
        assert!(scene.reason(&CacheAffinity).contains("already"));
    }

    #[test]
    fn the_classic_floors_are_the_published_ones() {
        let young = |s: &mut Scene| s.sample.age = Nanoseconds::from_secs(60);
        latency().with(young).proposal(&CacheAffinity);
        assert!(
            latency()
                .with(young)
                .classic()
                .reason(&CacheAffinity)
                .contains("considered from 2.0 min")
        );
        let small = |s: &mut Scene| s.load.cpus = 0.5;
        latency().with(small).proposal(&CacheAffinity);
        assert!(
            latency()
                .with(small)
                .classic()
                .reason(&CacheAffinity)
                .contains("0.50 CPUs")
        );
        // A setting of the configuration wins over both.
        let set = latency().with(|s| {
            let own = BTreeMap::from([("cpus_min".to_owned(), 100.0)]);
            s.policy.settings.insert(ID.into(), own);
        });
        assert!(set.reason(&CacheAffinity).contains("at least 100"));
    }

    #[test]
    fn places_are_asked_for_before_anything_is_said() {
        let blind = latency().with(|s| s.locality = None);
        assert_eq!(blind.opinion(&CacheAffinity), Opinion::InspectLocality);
    }

    #[test]
    fn machines_with_one_cache_or_without_the_means_are_not_served() {
        let one = machine(&chips(1, 1), 4);
        assert!(
            CacheAffinity
                .applicable(&one)
                .unwrap_err()
                .contains("one last-level cache")
        );
        let mut blind = machine(&chips(2, 1), 4);
        blind
            .capabilities
            .retain(|c| c.id.as_str() != "placement.threads");
        assert!(
            CacheAffinity
                .applicable(&blind)
                .unwrap_err()
                .contains("placement.threads")
        );
        assert_eq!(CacheAffinity.applicable(&machine(&chips(2, 1), 4)), Ok(()));
    }

    #[test]
    fn no_neighbour_reading_however_strange_makes_a_proposal_without_cpus() {
        for strange in [f64::NAN, f64::INFINITY, -3.0, 0.0] {
            let scene = latency().with(|s| {
                s.neighbours[0].cpus = strange;
                s.counters().memory_stall_share = strange;
                s.counters().local_share = strange;
                s.counters().busiest_link = strange;
            });
            match scene.opinion(&CacheAffinity) {
                Opinion::Propose(p) => {
                    assert!(
                        !cpus(&p).is_empty() && p.predicted.estimate.is_finite(),
                        "{strange}: {p:?}"
                    );
                }
                Opinion::Decline(d) => assert!(!d.reason.is_empty()),
                other => panic!("{other:?}"),
            }
        }
    }
}
