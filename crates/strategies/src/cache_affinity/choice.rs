//! Which domains could hold a workload, and what it would be worth to keep it there.

use super::{
    OVERSUBSCRIPTION_MAX, SHARING_GAIN, STEADY_MIN, THREADS_PER_CORE_MAX, TOGETHER_BELOW, TOGETHER_GAIN,
    UTILISATION_MAX,
};
use crate::common::domains::{Demand, Domain, Domains};
use crate::common::prediction::{self, Picture, Place};
use crate::common::{cpu_list, node_list};
use crate::memory_affinity::{self, Move};
use homeostat_engine::Seen;
use homeostat_model::{Bytes, CpuId, Effect, Locality, Machine, NodeId};
use std::collections::{BTreeMap, BTreeSet};

/// A machine fuller than this is oversubscribed: then domains are balanced instead of kept below their head room.
pub(super) const FULL: f64 = 0.9;
/// Measured loads wobble: a domain may be this much fuller than the machine's mean without counting as a loss …
const WOBBLE: f64 = 1.05;
/// … and hold so many more threads per core than now (near a full core many more threads do little more work).
const DENSITY_WOBBLE: f64 = 1.25;
/// What sharing a domain with other placed work costs in the choice between domains, per share of the domain that
/// the others use: a tie-breaker of the size of usual gains, so that programs are kept apart and balanced.
const CROWDING: f64 = 0.15;
/// Of places that gain as much, the one to which less has to be moved: worth of a move of all the memory.
const MOVING: f64 = 0.01;
/// Threads and memory together in one place gain so many times as much as threads alone in another: then they go there.
const FAR_BETTER: f64 = 1.25;
/// Threads that would make this share of their accesses to other nodes are tried together with their memory.
const LEFT_BEHIND: f64 = 0.6;
/// Threads that a thread meets on its core by chance where one runs per core on average (of many on many cores, each
/// placed without knowing of the others, it is 1; the scheduler looks for an idle core first).
const MET_BY_CHANCE: f64 = 0.5;
/// Sets are looked at in which threads would have room only if each became so many times as fast.
const FASTER_MOST: f64 = 4.0;
/// Gains that differ by less are the same …
const FASTER_SAME: f64 = 0.01;
/// … and after so many rounds what is left of the difference does not matter.
const ROUNDS: usize = 8;
/// What a set in which threads share cores more than now must promise beyond one in which they do not.
const SHARING: f64 = 0.05;
/// Capability of an effector that places threads and their memory in one change.
pub(super) const WITH_MEMORY: &str = "placement.threads.memory";

/// A set of domains that could hold the workload.
pub(super) struct Candidate {
    pub(super) members: Vec<usize>,
    /// Share of its cores that is used afterwards, by this workload and the placed ones.
    pub(super) used: f64,
    /// How much fuller than the machine it becomes: each thread gets so much less time. 1 = no fuller.
    pub(super) slower: f64,
    /// Where threads share cores more than the limits allow.
    pub(super) sharing: Option<Sharing>,
    /// Where they share cores less than in the place that they would leave.
    relief: Option<Sharing>,
    /// Share of its cores that others use.
    pub(super) others: f64,
    pub(super) predicted: Effect,
    /// The part of the predicted gain that does not count on more room in the caches.
    pub(super) by_place: f64,
    /// Predicted gain less what crowding and moving cost.
    pub(super) value: f64,
    /// The memory that goes along.
    pub(super) moved: Option<Move>,
}

/// Threads that share cores more than the limits allow.
#[derive(Clone, Copy)]
pub(super) struct Sharing {
    /// How many times as many threads share a core as now.
    pub(super) times: f64,
    /// Threads of the workload that may run there, with a hardware thread for each.
    pub(super) room: f64,
    /// Running threads of others there.
    pub(super) others: f64,
    pub(super) cores: f64,
}

/// What a domain or set may become.
pub(super) struct Limits {
    pub(super) used: f64,
    pub(super) density: f64,
    pub(super) mean: f64,
}

/// All that a choice of place depends on.
pub(super) struct Question<'a> {
    pub(super) seen: &'a Seen<'a>,
    pub(super) locality: &'a Locality,
    pub(super) domains: &'a Domains,
    pub(super) demand: &'a Demand,
    pub(super) limits: Limits,
    pub(super) now: &'a Picture,
    pub(super) place: Place<'a>,
    /// Share of a set's hardware threads that may be used where threads share cores more than the limits allow; `None`
    /// where the price of that is not known.
    pub(super) threads_used: Option<f64>,
    /// Whether all its threads run all the time.
    pub(super) steady: bool,
    /// Whether sets are looked at that hold it only if the prediction comes true, or in which threads take turns.
    bold: bool,
    /// The domains that it would leave, if it is kept on some: those, or fewer of them, are no other place, and that threads share
    /// cores less elsewhere is a gain.
    left: Vec<usize>,
}

impl Limits {
    /// `mean`: share of the machine's cores that is used.
    fn of(seen: &Seen<'_>, domains: &Domains, demand: &Demand, steady: bool, mean: f64) -> Self {
        let policy = seen.policy;
        // Threads that all run all the time cannot collide more than they do now, as long as there is a core for each.
        let alone = if steady { 1.0 } else { 0.0 };
        let density = if pools_idle_cores(seen.machine) {
            // Every core that is left idle is given back, so only the head room counts.
            domains.running_on_core(UTILISATION_MAX.value(policy))
        } else {
            THREADS_PER_CORE_MAX.value(policy)
        };
        Self {
            used: if mean > FULL {
                (mean * OVERSUBSCRIPTION_MAX.value(policy)).max(UTILISATION_MAX.value(policy))
            } else {
                UTILISATION_MAX.value(policy).max(mean * WOBBLE).max(alone)
            },
            density: alone.max(demand.density * DENSITY_WOBBLE).max(density),
            mean,
        }
    }
}

impl<'a> Question<'a> {
    /// `mean`: share of the machine's cores that is used.
    pub(super) fn of(
        seen: &'a Seen<'a>,
        locality: &'a Locality,
        domains: &'a Domains,
        demand: &'a Demand,
        now: &'a Picture,
        mean: f64,
    ) -> Self {
        let policy = seen.policy;
        let steady = demand.own_running >= STEADY_MIN.value(policy) * f64::from(locality.threads.max(1));
        let counters = locality.counters.as_ref();
        let priced = counters.is_some_and(|c| c.memory_stall_share.is_finite());
        let known = priced && demand.density <= FULL * domains.threads_per_core;
        let most = if steady {
            1.0
        } else {
            UTILISATION_MAX.value(policy)
        };
        Self {
            seen,
            locality,
            domains,
            demand,
            limits: Limits::of(seen, domains, demand, steady, mean),
            now,
            place: Place::of(now, domains, counters, shares_memory(locality)),
            threads_used: known.then_some(most),
            steady,
            bold: false,
            left: Vec::new(),
        }
    }

    /// The same of a workload that is kept on these domains, and would leave them for others or more.
    pub(super) fn leaving(self, positions: Vec<usize>) -> Self {
        Self {
            left: positions,
            ..self
        }
    }

    /// Whether it would leave a place.
    pub(super) fn is_left(&self) -> bool {
        !self.left.is_empty()
    }

    /// The same, with sets that hold an offered load only if it becomes as much faster as is predicted (not only as much as
    /// is sure), without head room, or in which more threads want to run than there are hardware threads, so that they take
    /// turns. The trial is what decides, and whoever asks so has something to go back to, or fits nowhere else. Where threads
    /// take turns already, those there are counted as if there were none here; what that promises is not too much unless others who
    /// run everywhere cannot make way.
    pub(super) fn boldly(self) -> Self {
        let counters = self.locality.counters.as_ref();
        let priced = counters.is_some_and(|c| c.memory_stall_share.is_finite());
        Self {
            bold: true,
            threads_used: priced.then_some(1.0),
            ..self
        }
    }
}

/// Whether its threads work on common memory: threads of one process do, and processes that share a segment.
fn shares_memory(locality: &Locality) -> bool {
    locality.threads_of_busiest_process > 1 || locality.shared.values().any(|b| *b > Bytes::ZERO)
}

impl Question<'_> {
    pub(super) fn members(&self, positions: &[usize]) -> Vec<&Domain> {
        list(self.domains, positions)
    }

    /// Whether a place like this one was refused. One that did the workload itself no good speaks against all of its size, as
    /// far as less or the same goes along; one that a neighbour lost by, against the CPUs that it shares.
    fn was_refused(&self, members: &[usize], with_memory: bool) -> bool {
        self.seen.refused.iter().any(|r| {
            let there = self.domains.among(&r.cpus);
            if r.for_a_neighbour {
                there.keys().any(|at| members.contains(at))
            } else {
                there.len() == members.len() && (r.with_memory || !with_memory)
            }
        })
    }

    /// Whether all CPUs with something of their own for each process or thread were refused.
    pub(super) fn was_refused_everywhere(&self) -> bool {
        self.seen.refused.iter().any(|r| self.domains.is_all(&r.cpus))
    }

    /// The sets that could hold it. Not more than half of the whole machine: that is hardly a place of its own, and leaves
    /// others the worse part.
    pub(super) fn candidates(&self) -> Vec<Candidate> {
        let all: Vec<usize> = (0..self.domains.list.len()).collect();
        // Who has a place already may need most of the machine: its guard and its neighbours' tell.
        let most = if self.is_left() {
            all.len().saturating_sub(1)
        } else {
            all.len() / 2
        };
        let mut sets = sets(self, &all, most);
        sets.retain(|c| !self.is_left() || c.members.iter().any(|at| !self.left.contains(at)));
        sets
    }

    /// The same of some domains, and fewer than all of them.
    pub(super) fn candidates_among(&self, positions: &[usize]) -> Vec<Candidate> {
        sets(self, positions, positions.len().saturating_sub(1))
    }

    /// The best of these sets, with its memory where that is worth it.
    pub(super) fn best(&self, candidates: Vec<Candidate>) -> Option<Candidate> {
        let policy = self.seen.policy;
        let mut along = candidates_with_memory(self, &candidates);
        along.retain(|c| !self.was_refused(&c.members, true));
        let alone = candidates
            .into_iter()
            .filter(|c| self.pays(c) && !self.was_refused(&c.members, false))
            .reduce(better);
        let together = along.into_iter().filter(|c| self.pays(c)).reduce(better);
        match (alone, together) {
            (None, Some(together)) if together.by_place >= TOGETHER_GAIN.value(policy) => Some(together),
            (Some(alone), Some(together)) if is_worth_moving(self, &alone, &together) => Some(together),
            (alone, _) => alone,
        }
    }

    /// Whether threads that would share cores more than the limits allow have a hardware thread each and gain enough.
    fn pays(&self, c: &Candidate) -> bool {
        c.sharing.is_none_or(|s| {
            let fits = self.demand.own_running / (1.0 + self.faster(&c.predicted)) <= s.room;
            c.predicted.estimate >= SHARING_GAIN.value(self.seen.policy) && (fits || self.takes_turns())
        })
    }

    /// How much fewer of its threads run when it gains so much: a load that is offered needs fewer when each is faster.
    fn faster(&self, predicted: &Effect) -> f64 {
        if self.steady || self.seen.load.saturated {
            0.0
        } else if self.bold {
            predicted.estimate.max(0.0)
        } else {
            predicted.lower.max(0.0)
        }
    }

    /// Whether its threads may take turns on the hardware threads: whoever is saturated loses by it what is predicted, and an
    /// offered load would wait ever longer.
    pub(super) fn takes_turns(&self) -> bool {
        self.bold && (self.steady || self.seen.load.saturated)
    }

    /// How much longer each thread takes where more want to run than there are hardware threads.
    fn turns(&self, sharing: &Sharing) -> f64 {
        if self.takes_turns() {
            (self.demand.own_running / sharing.room.max(1.0)).max(1.0)
        } else {
            1.0
        }
    }

    /// What [`Question::gain`] says, with the price of sharing cores where they are shared. Work that is offered from outside
    /// runs fewer threads when each is faster, and so shares less: as many as the lower end of the gain leaves over.
    fn gain_there(
        &self,
        after: &Picture,
        slower: f64,
        sharing: Option<Sharing>,
        relief: Option<Sharing>,
    ) -> (Option<Sharing>, Effect, f64) {
        let Some(mut sharing) = sharing else {
            let (predicted, by_place) = self.gain(after, slower, relief);
            return (None, predicted, by_place);
        };
        let slower = slower * self.turns(&sharing);
        let mut faster = 0.0;
        sharing.times = self.times(sharing.others, sharing.cores, faster);
        let (mut predicted, mut by_place) = self.gain(after, slower, Some(sharing));
        for _ in 0..ROUNDS {
            let now = self.faster(&predicted);
            if now - faster < FASTER_SAME {
                break;
            }
            faster = now;
            sharing.times = self.times(sharing.others, sharing.cores, faster);
            (predicted, by_place) = self.gain(after, slower, Some(sharing));
        }
        (Some(sharing), predicted, by_place)
    }

    /// How much less its threads share cores on these domains than in the place that they would leave; `None` where they do not,
    /// or where its price is not known.
    fn relief(&self, members: &[usize], cores: f64) -> Option<Sharing> {
        let counters = self.locality.counters.as_ref();
        let priced = counters.is_some_and(|c| c.memory_stall_share.is_finite());
        if !self.is_left() || !priced {
            return None;
        }
        let others: f64 = members
            .iter()
            .filter_map(|i| self.demand.placed_running.get(*i))
            .sum();
        // The place that it would leave is counted with those that run everywhere, too.
        let others = others + self.demand.floating * cores;
        let times = self.times(others, cores, 0.0);
        (times < 1.0).then_some(Sharing {
            times,
            room: cores * self.domains.threads_per_core - others,
            others,
            cores,
        })
    }

    /// How many times as many threads share a core as now, when the workload's are so much faster.
    fn times(&self, others: f64, cores: f64, faster: f64) -> f64 {
        let threads = self.domains.threads_per_core;
        // Threads that come and go meet by chance on cores of which others are idle.
        let by_chance = if self.steady { 0.0 } else { MET_BY_CHANCE };
        let on_a_core = |density: f64| (density.max(1.0) + by_chance * density.min(1.0)).min(threads);
        let running = self.demand.own_running / (1.0 + faster);
        on_a_core((running + others) / cores) / on_a_core(self.demand.density)
    }

    /// The gain predicted of another picture, in domains that are so much fuller; and the part of it that does not
    /// count on more room in the caches.
    fn gain(&self, after: &Picture, slower: f64, sharing: Option<Sharing>) -> (Effect, f64) {
        let sharing = sharing.map_or(1.0, |s| s.times);
        let by_place = self.place.gain_sharing(after, false, sharing).estimate;
        let crowd = !self.seen.neighbours.is_empty();
        let mut predicted = self.place.gain_sharing(after, crowd, sharing);
        for end in [
            &mut predicted.estimate,
            &mut predicted.lower,
            &mut predicted.upper,
        ] {
            *end = (1.0 + *end) / slower - 1.0;
        }
        (predicted, (1.0 + by_place) / slower - 1.0)
    }
}

/// Whether the memory should go along: the place alone gains little that is sure, and much more with it. A place that is
/// tried for the room in its caches alone, and gains none, would leave the memory where it is for long. So it is with
/// threads that would go to another place without their memory, where it can only follow them: by far the best place for
/// both comes before a good one for the threads. And threads that leave most of their memory behind ask for all of it over
/// the few links of their new node, which may be full then: nobody can tell beforehand.
fn is_worth_moving(question: &Question<'_>, alone: &Candidate, together: &Candidate) -> bool {
    let policy = question.seen.policy;
    let there = moved_to(question.now, &question.members(&alone.members));
    let left_behind = 1.0 - there.local(question.domains) >= LEFT_BEHIND;
    let more = together.by_place - alone.by_place >= TOGETHER_GAIN.value(policy);
    // A place of its own with its memory before a place that it shares.
    let surer = alone.sharing.is_some()
        && together.sharing.is_none()
        && together.predicted.lower > alone.predicted.lower;
    let elsewhere =
        alone.members != together.members && 1.0 + together.by_place >= (1.0 + alone.by_place) * FAR_BETTER;
    more && (alone.by_place < TOGETHER_BELOW.value(policy) || elsewhere || left_behind || surer)
}

/// The domains at these positions.
pub(super) fn list<'a>(domains: &'a Domains, positions: &[usize]) -> Vec<&'a Domain> {
    positions.iter().filter_map(|i| domains.list.get(*i)).collect()
}

/// Whether cores that a partition leaves idle go back to a shared pool, so that fewer used cores are a gain.
fn pools_idle_cores(machine: &Machine) -> bool {
    machine.can("cores.shared_pool")
}

/// The threads on the members of a set, spread by their cores.
pub(super) fn moved_to(now: &Picture, members: &[&Domain]) -> Picture {
    now.with_running(members.iter().map(|d| (d.id, f64::from(d.cores))))
}

fn better(a: Candidate, b: Candidate) -> Candidate {
    // Greater value first; of equal ones the smaller set, then the emptier, then the lower number: `a` came first.
    let order = a
        .value
        .total_cmp(&b.value)
        .then(b.members.len().cmp(&a.members.len()))
        .then(b.used.total_cmp(&a.used));
    if order == std::cmp::Ordering::Less { b } else { a }
}

/// Those of these domains, each by itself, that hold the demand; and per node, per board and of all of them the smallest set
/// that does, made of the best domains, up to `most` of all.
fn sets(question: &Question<'_>, positions: &[usize], most: usize) -> Vec<Candidate> {
    let domains = question.domains;
    let mut out: Vec<Candidate> = positions
        .iter()
        .filter_map(|position| candidate(vec![*position], question))
        .collect();
    // Who would leave a place for the room elsewhere may need more than the smallest set that holds it.
    let serves = |c: &Candidate| {
        c.sharing.is_none() && !question.is_left() && !question.was_refused(&c.members, false)
    };
    if out.iter().any(serves) {
        return out;
    }
    let mut groups: BTreeMap<(u8, usize), Vec<usize>> = BTreeMap::new();
    for position in positions {
        let Some(domain) = domains.list.get(*position) else {
            continue;
        };
        groups
            .entry((0, domain.node.0 as usize))
            .or_default()
            .push(*position);
        groups.entry((1, domain.board)).or_default().push(*position);
        groups.entry((2, 0)).or_default().push(*position);
    }
    for group in groups.into_values() {
        let mut order: Vec<(f64, usize)> = group
            .into_iter()
            .filter_map(|position| {
                let domain = domains.list.get(position)?;
                let memory = question.now.memory.get(&domain.node).copied().unwrap_or(0.0);
                let crowded = question.demand.placed.get(position).copied().unwrap_or(0.0)
                    / f64::from(domain.cores.max(1));
                Some((memory - crowded, position))
            })
            .collect();
        order.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
        let most = if order.len() == positions.len() {
            most
        } else {
            order.len()
        };
        for size in 2..=most {
            let members: Vec<usize> = order.iter().take(size).map(|(_, p)| *p).collect();
            if let Some(found) = candidate(members, question) {
                let enough = serves(&found);
                out.push(found);
                if enough {
                    break;
                }
            }
        }
    }
    out
}

/// The set as a candidate, when it holds the demand without a predicted loss of response time.
fn candidate(members: Vec<usize>, question: &Question<'_>) -> Option<Candidate> {
    let Question {
        domains,
        demand,
        limits,
        ..
    } = question;
    let list = question.members(&members);
    let cores: f64 = list.iter().map(|d| f64::from(d.cores)).sum();
    let others: f64 = members.iter().filter_map(|i| demand.placed.get(*i)).sum();
    if cores <= 0.0 {
        return None;
    }
    let used = (others + demand.own) / cores;
    // On a full machine threads share cores anyway, and being fuller counts as slower below.
    let collides = limits.mean <= FULL && domains.running_on_core(used) > limits.density;
    let sharing = if used > limits.used || collides {
        Some(sharing(&members, cores, question)?)
    } else {
        None
    };
    // A domain that becomes fuller than the machine was gives each thread less time; one in which threads share cores has
    // a hardware thread for each.
    let slower = match sharing {
        Some(_) => 1.0,
        None => (used.max(1e-9) / limits.mean.max(FULL)).max(1.0),
    };
    let relief = if sharing.is_none() {
        question.relief(&members, cores)
    } else {
        None
    };
    let after = moved_to(question.now, &list);
    let (sharing, predicted, by_place) = question.gain_there(&after, slower, sharing, relief);
    Some(Candidate {
        value: value(&predicted, others / cores, sharing),
        others: others / cores,
        members,
        used,
        slower,
        sharing,
        relief,
        predicted,
        by_place,
        moved: None,
    })
}

/// What sharing cores would mean if the workload were kept on these domains. `None` where its price is not known, or where
/// even much faster threads would find no room.
fn sharing(members: &[usize], cores: f64, question: &Question<'_>) -> Option<Sharing> {
    let Question {
        domains,
        demand,
        threads_used,
        ..
    } = question;
    let others: f64 = members.iter().filter_map(|i| demand.placed_running.get(*i)).sum();
    let room = cores * domains.threads_per_core * (*threads_used)? - others;
    (demand.own_running <= FASTER_MOST * room).then_some(Sharing {
        times: 1.0,
        room,
        others,
        cores,
    })
}

/// What a set is worth in the choice between several.
fn value(predicted: &Effect, others: f64, sharing: Option<Sharing>) -> f64 {
    predicted.estimate - CROWDING * others - sharing.map_or(0.0, |_| SHARING)
}

/// The same sets with the memory moved there, where that can be done in one change that is switched back and forth.
fn candidates_with_memory(question: &Question<'_>, candidates: &[Candidate]) -> Vec<Candidate> {
    let seen = question.seen;
    let may = seen.machine.can(WITH_MEMORY) && memory_affinity::is_allowed(seen);
    if !may {
        return Vec::new();
    }
    let resident = prediction::resident(question.locality).0.max(1) as f64;
    candidates
        .iter()
        .filter_map(|c| {
            let members = question.members(&c.members);
            let home: BTreeSet<NodeId> = members.iter().map(|d| d.node).collect();
            let threads = moved_to(question.now, &members);
            let moved = memory_affinity::planned(seen, question.locality, &threads, &home)
                .ok()
                .filter(|m| m.quick)?;
            let (sharing, predicted, by_place) =
                question.gain_there(&moved.after, c.slower, c.sharing, c.relief);
            let moving = MOVING * moved.bytes.0 as f64 / resident;
            Some(Candidate {
                value: value(&predicted, c.others, sharing) - moving,
                members: c.members.clone(),
                moved: Some(moved),
                sharing,
                predicted,
                by_place,
                ..*c
            })
        })
        .collect()
}

/// A set as people would name it.
pub(super) fn name(members: &[&Domain], cpus: &[CpuId]) -> String {
    format!(
        "CPUs {} ({} last-level-cache domain{} of {})",
        cpu_list(cpus),
        members.len(),
        if members.len() == 1 { "" } else { "s" },
        node_list(&members.iter().map(|d| d.node).collect())
    )
}
