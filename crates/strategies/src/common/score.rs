//! How well workloads are placed, as one number: now, and at best on this machine (feature C3, after the current and the
//! best possible affinity score of POWER's Dynamic Platform Optimizer).
//!
//! **The score.** 100 × (time per access of a program whose threads share one cache beside all of its memory) / (time per
//! access here). Time per access is the mean latency over all pairs of a running thread and a piece of memory, and, for
//! programs with several running threads in a process, over all pairs of threads that share lines; the two are weighted
//! by the shares of the cycles that event counters tell, else by those that the predictions assume. Two nodes at twice
//! the latency, threads and memory spread evenly over both: 58; all memory on the other node: 55.
//!
//! **The best.** Workloads in order of priority, then size, are given the place with the best score that still has room for
//! their running threads; then what may be moved of their memory goes beside them, as far as the node has room. It is
//! what could be had at most, not what is worth its price: that is for the strategies to predict and for trials to prove.
//! What a person placed stays where it is.

use super::domains::Domains;
use super::prediction::{self, Picture};
use homeostat_model::{Bytes, CpuId, Locality, Machine, NodeId};
use std::collections::{BTreeMap, BTreeSet};

/// Share of a domain's hardware threads that may be used: more, and threads wait for each other.
const FILL_MAX: f64 = 0.9;
/// Share of a node's memory that must stay free.
const RESERVE: f64 = 0.05;
/// A place is worth naming when it is better than now by at least this.
const BETTER_MIN: f64 = 0.5;

/// A workload whose placement is to be scored.
#[derive(Clone, Copy, Debug)]
pub struct Scored<'a> {
    /// Where it is.
    pub locality: &'a Locality,
    /// CPUs that it uses (1.0 = one CPU busy all the time).
    pub cpus: f64,
    /// Larger goes first when places are given out.
    pub priority: i32,
}

/// The placement of one workload.
#[derive(Clone, Debug, PartialEq)]
pub struct PlacementScore {
    /// Score now, 0..100.
    pub now: f64,
    /// Best score that can be had with all workloads at their places, 0..100; never below `now`.
    pub best: f64,
    /// CPUs of the best place; empty when it is not better than now.
    pub cpus: Vec<CpuId>,
    /// Node to which memory would go.
    pub node: Option<NodeId>,
    /// Memory that would be moved there.
    pub moved: Bytes,
    /// Why the best is not better than it is.
    pub limit: String,
}

/// Scores workloads together, in the order given. `None` for one whose threads or memory are not known.
pub fn placement_scores(machine: &Machine, workloads: &[Scored<'_>]) -> Vec<Option<PlacementScore>> {
    let domains = Domains::of(machine);
    let mut order: Vec<usize> = (0..workloads.len()).collect();
    order.sort_by(|a, b| {
        let key = |i: &usize| workloads.get(*i).map_or((0, 0.0), |w| (w.priority, w.cpus));
        let ((pa, ca), (pb, cb)) = (key(a), key(b));
        pb.cmp(&pa).then(cb.total_cmp(&ca)).then(a.cmp(b))
    });
    let mut room = Room::of(machine, &domains);
    let mut scores: Vec<Option<PlacementScore>> = vec![None; workloads.len()];
    // What a person placed keeps its room before anybody else is given any.
    for fixed in [true, false] {
        for index in &order {
            let Some(workload) = workloads
                .get(*index)
                .filter(|w| w.locality.bound.is_some() == fixed)
            else {
                continue;
            };
            if let Some(slot) = scores.get_mut(*index) {
                *slot = place(workload, &domains, &mut room);
            }
        }
    }
    scores
}

/// What is left to give out.
struct Room {
    /// Running threads by position of the domain.
    threads: Vec<f64>,
    memory: BTreeMap<NodeId, Bytes>,
}

impl Room {
    fn of(machine: &Machine, domains: &Domains) -> Self {
        Self {
            threads: domains
                .list
                .iter()
                .map(|d| d.cpus.len() as f64 * FILL_MAX)
                .collect(),
            memory: machine
                .nodes
                .iter()
                .map(|n| (n.id, Bytes((n.memory.0 as f64 * (1.0 - RESERVE)) as u64)))
                .collect(),
        }
    }

    fn in_domains(&self, members: &[usize]) -> f64 {
        members.iter().filter_map(|i| self.threads.get(*i)).sum()
    }

    /// Takes so many running threads from the members, in proportion to what they have.
    fn take(&mut self, members: &[usize], threads: f64) {
        let all = self.in_domains(members).max(f64::MIN_POSITIVE);
        for index in members {
            if let Some(left) = self.threads.get_mut(*index) {
                *left = (*left - threads * *left / all).max(0.0);
            }
        }
    }

    fn take_memory(&mut self, on: &BTreeMap<NodeId, f64>, resident: Bytes) {
        for (node, share) in on {
            if let Some(left) = self.memory.get_mut(node) {
                *left = left.saturating_sub(Bytes((resident.0 as f64 * share) as u64));
            }
        }
    }
}

fn score(picture: &Picture, domains: &Domains, workload: &Scored<'_>) -> f64 {
    let several = workload.locality.threads_of_busiest_process > 1;
    100.0 * prediction::nearness(picture, domains, workload.locality.counters.as_ref(), several)
}

fn place(workload: &Scored<'_>, domains: &Domains, room: &mut Room) -> Option<PlacementScore> {
    let locality = workload.locality;
    let resident = prediction::resident(locality);
    let now = Picture::of(locality);
    if now.running.is_empty() || now.memory.is_empty() {
        return None;
    }
    let score_now = score(&now, domains, workload);
    let stay = |limit: &str| PlacementScore {
        now: score_now,
        best: score_now,
        cpus: Vec::new(),
        node: None,
        moved: Bytes::ZERO,
        limit: limit.to_owned(),
    };
    let running: f64 = locality.running.values().sum();
    let threads = workload.cpus.max(running);
    let here: Vec<usize> = positions(domains, &now);
    if locality.bound.is_some() {
        room.take(&here, threads);
        room.take_memory(&now.memory, resident);
        return Some(stay("a person or another tool placed it"));
    }
    let mut best: Option<Candidate> = None;
    for members in sets(domains) {
        if room.in_domains(&members) < threads {
            continue;
        }
        let candidate = candidate(workload, &now, resident, domains, members, room);
        // Of equals the smaller set, then the one with less to move, then the first.
        let better = best.as_ref().is_none_or(|b| {
            let equal = (candidate.score - b.score).abs() <= 1e-9;
            let smaller = (candidate.members.len(), candidate.moved) < (b.members.len(), b.moved);
            if equal { smaller } else { candidate.score > b.score }
        });
        if better {
            best = Some(candidate);
        }
    }
    let Some(best) = best.filter(|b| b.score >= score_now + BETTER_MIN) else {
        room.take(&here, threads);
        room.take_memory(&now.memory, resident);
        return Some(stay(if score_now >= 100.0 - BETTER_MIN {
            ""
        } else {
            "no part of the machine with room for it is better"
        }));
    };
    room.take(&best.members, threads);
    room.take_memory(&best.after.memory, resident);
    let mut cpus: Vec<CpuId> = best
        .members
        .iter()
        .filter_map(|i| domains.list.get(*i))
        .flat_map(|d| d.cpus.iter().copied())
        .collect();
    cpus.sort();
    Some(PlacementScore {
        now: score_now,
        best: best.score,
        cpus,
        node: best.node.filter(|_| best.moved.0 > 0),
        moved: best.moved,
        limit: best.limit,
    })
}

/// Domains on which it runs now.
fn positions(domains: &Domains, picture: &Picture) -> Vec<usize> {
    (0..domains.list.len())
        .filter(|i| {
            domains
                .list
                .get(*i)
                .is_some_and(|d| picture.running.contains_key(&d.id))
        })
        .collect()
}

/// Every single domain, then those of each node, of each board, and all.
fn sets(domains: &Domains) -> Vec<Vec<usize>> {
    let mut groups: BTreeMap<(u8, usize), Vec<usize>> = BTreeMap::new();
    for (position, domain) in domains.list.iter().enumerate() {
        groups.entry((0, position)).or_default().push(position);
        groups
            .entry((1, domain.node.0 as usize))
            .or_default()
            .push(position);
        groups.entry((2, domain.board)).or_default().push(position);
        groups.entry((3, 0)).or_default().push(position);
    }
    groups.into_values().collect()
}

struct Candidate {
    members: Vec<usize>,
    score: f64,
    after: Picture,
    node: Option<NodeId>,
    moved: Bytes,
    limit: String,
}

/// The workload on these domains, with what may be moved of its memory on the node that has most of them.
fn candidate(
    workload: &Scored<'_>,
    now: &Picture,
    resident: Bytes,
    domains: &Domains,
    members: Vec<usize>,
    room: &Room,
) -> Candidate {
    let list: Vec<_> = members.iter().filter_map(|i| domains.list.get(*i)).collect();
    let there = now.with_running(list.iter().map(|d| (d.id, d.cpus.len() as f64)));
    let mut by_node: BTreeMap<NodeId, usize> = BTreeMap::new();
    for domain in &list {
        *by_node.entry(domain.node).or_default() += domain.cpus.len();
    }
    // Several nodes have no one home for the memory: it stays where it is.
    let home = match by_node.keys().collect::<Vec<_>>().as_slice() {
        [one] => Some(**one),
        _ => None,
    };
    let (mut moved, mut from) = (Bytes::ZERO, BTreeMap::new());
    let mut limit = String::new();
    if let Some(home) = home {
        let here = there.memory.get(&home).copied().unwrap_or(0.0);
        let mut left = room
            .memory
            .get(&home)
            .copied()
            .unwrap_or(Bytes::ZERO)
            .saturating_sub(Bytes((resident.0 as f64 * here) as u64));
        let mut stays = Bytes::ZERO;
        for node in prediction::memory_nodes(workload.locality) {
            if node == home {
                continue;
            }
            let small = small_pages(workload.locality, node);
            stays += on_node(workload.locality, node).saturating_sub(small);
            let part = small.min(left);
            if part < small {
                limit = format!("node {home} has no room for all of its memory");
            }
            left = left.saturating_sub(part);
            moved += part;
            from.insert(node, part);
        }
        if limit.is_empty() && stays.0 > 0 {
            limit = format!("{stays} on large pages stay where they are");
        }
    } else {
        limit = "it needs more than one node".to_owned();
    }
    let after = match home {
        Some(home) if moved.0 > 0 => there.with_moved(&from, &BTreeSet::from([home]), resident),
        _ => there,
    };
    Candidate {
        score: score(&after, domains, workload),
        members,
        after,
        node: home,
        moved,
        limit,
    }
}

fn on_node(locality: &Locality, node: NodeId) -> Bytes {
    let of = |m: &BTreeMap<NodeId, Bytes>| m.get(&node).copied().unwrap_or_default();
    of(&locality.private) + of(&locality.shared)
}

/// What lies on a node in small pages: large ones are not moved for affinity.
fn small_pages(locality: &Locality, node: NodeId) -> Bytes {
    on_node(locality, node).saturating_sub(locality.huge.get(&node).copied().unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::common::testing::{chips, machine};
    use homeostat_model::LlcId;

    const GIB: u64 = 1 << 30;

    fn locality(running: &[(u32, f64)], memory: &[(u32, u64)]) -> Locality {
        Locality {
            workload: "w".into(),
            threads: 8,
            threads_of_busiest_process: 8,
            running: running.iter().map(|(l, c)| (LlcId(*l), *c)).collect(),
            private: memory.iter().map(|(n, b)| (NodeId(*n), Bytes(*b))).collect(),
            shared: BTreeMap::new(),
            huge: BTreeMap::new(),
            bound: None,
            counters: None,
        }
    }

    fn scored(locality: &Locality) -> Scored<'_> {
        Scored {
            locality,
            cpus: locality.running.values().sum(),
            priority: 0,
        }
    }

    /// Two nodes of one chip with eight cores of four threads.
    fn two() -> Machine {
        machine(&chips(2, 1), 4)
    }

    #[test]
    fn together_beside_its_memory_is_a_hundred_and_elsewhere_is_less() {
        let machine = two();
        let of = |l: &Locality| placement_scores(&machine, &[scored(l)])[0].clone().unwrap();
        let home = of(&locality(&[(0, 4.0)], &[(0, GIB)]));
        assert_eq!((home.now, home.best, home.cpus.len()), (100.0, 100.0, 0));
        let away = of(&locality(&[(0, 4.0)], &[(1, GIB)]));
        let spread = of(&locality(&[(0, 2.0), (32, 2.0)], &[(0, GIB / 2), (1, GIB / 2)]));
        assert!(away.now > 30.0 && away.now < 70.0, "{away:?}");
        assert!(spread.now > 30.0 && spread.now < 70.0, "{spread:?}");
        for found in [&away, &spread] {
            assert!(found.best > 99.9, "{found:?}");
        }
        // Threads go to the memory where that is all of it.
        assert_eq!((away.cpus[0], away.moved), (CpuId(32), Bytes::ZERO));
        assert_eq!(spread.moved, Bytes(GIB / 2));
        assert!(spread.node.is_some());
    }

    #[test]
    fn a_program_of_one_thread_is_scored_by_its_memory_alone() {
        let machine = two();
        let mut wandering = locality(&[(0, 0.5), (32, 0.5)], &[(0, GIB)]);
        let several = placement_scores(&machine, &[scored(&wandering)])[0]
            .clone()
            .unwrap();
        wandering.threads_of_busiest_process = 1;
        let one = placement_scores(&machine, &[scored(&wandering)])[0]
            .clone()
            .unwrap();
        assert!(one.now > several.now, "{} {}", one.now, several.now);
    }

    #[test]
    fn what_a_person_placed_stays_and_keeps_its_room() {
        let machine = two();
        let mut bound = locality(&[(0, 28.0)], &[(1, GIB)]);
        bound.bound = Some("taskset".into());
        let other = locality(&[(0, 2.0), (32, 6.0)], &[(0, GIB)]);
        let scores = placement_scores(&machine, &[scored(&other), scored(&bound)]);
        let bound = scores[1].as_ref().unwrap();
        assert_eq!((bound.now, bound.cpus.len()), (bound.best, 0));
        assert!(bound.limit.contains("person"));
        // Beside its memory there is no room any more: the memory comes to the other node.
        let other = scores[0].as_ref().unwrap();
        assert_eq!((other.cpus[0], other.node), (CpuId(32), Some(NodeId(1))));
    }

    #[test]
    fn places_are_given_out_by_priority_then_size_and_never_twice() {
        let machine = two();
        let memory = [(0, GIB)];
        let big = locality(&[(0, 12.0), (32, 12.0)], &memory);
        let small = locality(&[(0, 10.0), (32, 10.0)], &memory);
        let first = |a: i32, b: i32| {
            let list = [
                Scored {
                    priority: a,
                    ..scored(&small)
                },
                Scored {
                    priority: b,
                    ..scored(&big)
                },
            ];
            let scores = placement_scores(&machine, &list);
            (
                scores[0].as_ref().unwrap().cpus[0].0,
                scores[1].as_ref().unwrap().cpus[0].0,
            )
        };
        assert_eq!(first(0, 0), (32, 0));
        assert_eq!(first(1, 0), (0, 32));
    }

    #[test]
    fn what_fits_nowhere_or_may_not_be_moved_is_said() {
        let machine = two();
        let of = |l: &Locality| placement_scores(&machine, &[scored(l)])[0].clone().unwrap();
        let all = of(&locality(&[(0, 30.0), (32, 30.0)], &[(0, GIB), (1, GIB)]));
        assert_eq!(all.best, all.now);
        assert!(!all.limit.is_empty(), "{all:?}");
        let mut large = locality(&[(0, 2.0), (32, 2.0)], &[(0, GIB), (1, GIB)]);
        large.huge = BTreeMap::from([(NodeId(1), Bytes(GIB)), (NodeId(0), Bytes(GIB))]);
        let large = of(&large);
        assert!(
            large.best < 99.0 && large.limit.contains("large pages"),
            "{large:?}"
        );
        let huge = machine.nodes[0].memory;
        let full = of(&locality(&[(0, 2.0), (32, 2.0)], &[(0, huge.0), (1, huge.0)]));
        assert!(full.limit.contains("no room"), "{full:?}");
        assert_eq!(
            placement_scores(&machine, &[scored(&locality(&[], &[(0, GIB)]))]),
            [None]
        );
    }

    #[test]
    fn the_best_is_never_below_now_and_both_lie_between_0_and_100() {
        let machine = machine(&chips(4, 2), 2);
        for case in 0u32..400 {
            let draw =
                |salt: u32, most: u32| (case.wrapping_mul(2_654_435_761).rotate_left(salt) >> 8) % most;
            let found = locality(
                &[
                    (0, f64::from(draw(1, 9))),
                    (32, f64::from(draw(5, 9))),
                    (48, f64::from(draw(9, 3)) + 0.1),
                ],
                &[
                    (0, u64::from(draw(3, 100)) << 24),
                    (3, (u64::from(draw(7, 100)) << 24) + 1),
                ],
            );
            for score in placement_scores(&machine, &[scored(&found), scored(&found)])
                .into_iter()
                .flatten()
            {
                assert!(
                    score.now > 0.0 && score.best <= 100.0 + 1e-9 && score.best >= score.now,
                    "{score:?}"
                );
            }
        }
    }
}
