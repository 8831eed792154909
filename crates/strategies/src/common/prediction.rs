//! What a change of place is worth: a rough model of stalls, with an interval.
//!
//! Where the processor counts events, the shares of the cycles that are spent on memory, on other caches' lines and
//! on page-table walks are known and only their change is modelled. Without counters the shares are assumed, and the
//! interval starts at nothing. The trial decides either way; the prediction only keeps hopeless trials from being
//! made.

use super::domains::{Domains, LOCAL_DISTANCE};
use homeostat_model::{Bytes, Counters, Effect, LlcId, Locality, NodeId};
use std::collections::{BTreeMap, BTreeSet};

/// Latency of local memory (ns), and what a distance of 10 more adds up to the nearest and beyond the nearest
/// neighbours. Fitted to a POWER7 machine (115 / 230 / 375 ns at distances 10 / 20 / 40); used as ratios only.
const LOCAL_NS: f64 = 115.0;
const NEAR_DISTANCE: u32 = 20;
const PER_DISTANCE_NEAR: f64 = 11.5;
const PER_DISTANCE_FAR: f64 = 7.25;
/// A line from the cache of the same domain, and from another domain of the same node (ns).
const SAME_CACHE_NS: f64 = 30.0;
const OTHER_CACHE_NS: f64 = 100.0;
/// Service time of a link for the bursts that memory traffic comes in (ns); the queue is `s*r/(2(1-r))`.
const LINK_SERVICE_NS: f64 = 40.0;
/// Use of a link above which the queue formula says nothing.
const LINK_MAX: f64 = 0.99;
/// Misses grow with the number of caches that several programs' data are spread over, by this exponent: estimate
/// and upper end (.47 was fitted; the lower end is 0).
const FOOTPRINT: f64 = 0.25;
const FOOTPRINT_UPPER: f64 = 0.47;
/// Shares of the cycles assumed without counters, estimate and upper end: memory, other caches.
const ASSUMED: [(f64, f64); 2] = [(0.25, 0.6), (0.05, 0.2)];
/// Level of the interval. It is a judgement, not a calibrated figure.
const CONFIDENCE: f64 = 0.9;

/// Where threads run and memory lies, as shares that sum to 1 each.
#[derive(Clone, Debug, Default)]
pub(crate) struct Picture {
    /// Share of the running threads by domain.
    pub(crate) running: BTreeMap<LlcId, f64>,
    /// Share of the memory by node; of what is `apart`, nothing.
    pub(crate) memory: BTreeMap<NodeId, f64>,
    /// Share of the accesses that go to memory of the own process on the node where that process is kept: local whatever
    /// `running` and `memory` say of the workload as a whole. As inspected 0, since that is not known of each process.
    pub(crate) apart: f64,
}

impl Picture {
    /// As inspected.
    pub(crate) fn of(locality: &Locality) -> Self {
        Self {
            running: shares(locality.running.iter().map(|(l, c)| (*l, c.max(0.0)))),
            memory: shares(
                locality
                    .private
                    .iter()
                    .chain(&locality.shared)
                    .map(|(n, b)| (*n, b.0 as f64)),
            ),
            apart: 0.0,
        }
    }

    /// The same memory with the threads elsewhere.
    pub(crate) fn with_running(&self, running: impl Iterator<Item = (LlcId, f64)>) -> Self {
        Self {
            running: shares(running),
            memory: self.memory.clone(),
            apart: 0.0,
        }
    }

    /// The same threads, with a part of all memory moved: so much less on some nodes, all of it added to others, each
    /// of which gets the same part.
    pub(crate) fn with_moved(
        &self,
        from: &BTreeMap<NodeId, Bytes>,
        to: &BTreeSet<NodeId>,
        all: Bytes,
    ) -> Self {
        let mut out = self.clone();
        let mut moved = 0.0;
        for (node, bytes) in from {
            if let Some(share) = out.memory.get_mut(node) {
                let part = (bytes.0 as f64 / all.0.max(1) as f64).min(*share);
                *share -= part;
                moved += part;
            }
        }
        for node in to {
            *out.memory.entry(*node).or_default() += moved / to.len() as f64;
        }
        out
    }

    /// The same threads, each process on a domain of its own with its memory beside it: so much of all memory, which is
    /// where it is now by node.
    pub(crate) fn with_apart(&self, own: &BTreeMap<NodeId, Bytes>, all: Bytes) -> Self {
        let part = |bytes: Bytes| bytes.0 as f64 / all.0.max(1) as f64;
        let rest = self.memory.iter().map(|(node, share)| {
            let own = own.get(node).map_or(0.0, |b| part(*b));
            (*node, (share - own).max(0.0))
        });
        Self {
            running: self.running.clone(),
            memory: shares(rest),
            apart: own.values().map(|b| part(*b)).sum::<f64>().min(1.0),
        }
    }

    /// Share of the accesses that are local when every thread uses all memory alike, but for what is apart.
    pub(crate) fn local(&self, domains: &Domains) -> f64 {
        let shared: f64 = self
            .pairs(domains)
            .filter(|(_, distance)| *distance == LOCAL_DISTANCE)
            .map(|(share, _)| share)
            .sum();
        self.apart + (1.0 - self.apart) * shared
    }

    /// Every pair of a running place and a memory place: share of the accesses, distance.
    fn pairs<'a>(&'a self, domains: &'a Domains) -> impl Iterator<Item = (f64, u32)> + 'a {
        self.running.iter().flat_map(move |(llc, running)| {
            let node = domains.node_of(*llc);
            self.memory.iter().map(move |(other, memory)| {
                let distance = node.map_or(LOCAL_DISTANCE, |n| domains.distance(n, *other));
                (running * memory, distance)
            })
        })
    }

    /// How many domains it is spread over, counted by weight: 2.0 = evenly over two.
    pub(crate) fn spread(&self) -> f64 {
        let squares: f64 = self.running.values().map(|s| s * s).sum();
        if squares > 0.0 { 1.0 / squares } else { 1.0 }
    }

    /// Mean latency of a line that another running thread of the workload changed (ns). Pairs of threads are counted by
    /// node: there may be many caches.
    fn intervention(&self, domains: &Domains, queue: f64) -> f64 {
        let mut same_cache = 0.0;
        let mut by_node: BTreeMap<Option<NodeId>, f64> = BTreeMap::new();
        for (llc, share) in &self.running {
            same_cache += share * share;
            *by_node.entry(domains.node_of(*llc)).or_default() += share;
        }
        let mut sum = same_cache * (SAME_CACHE_NS - OTHER_CACHE_NS);
        for (a, share_a) in &by_node {
            for (b, share_b) in &by_node {
                let time = match (a, b) {
                    (Some(x), Some(y)) if x != y => {
                        SAME_CACHE_NS + latency(domains.distance(*x, *y)) - LOCAL_NS + queue
                    }
                    _ => OTHER_CACHE_NS,
                };
                sum += share_a * share_b * time;
            }
        }
        sum
    }
}

fn shares<K: Ord>(weights: impl Iterator<Item = (K, f64)>) -> BTreeMap<K, f64> {
    let mut out: BTreeMap<K, f64> = BTreeMap::new();
    for (key, weight) in weights {
        if weight.is_finite() && weight > 0.0 {
            *out.entry(key).or_default() += weight;
        }
    }
    let all: f64 = out.values().sum();
    out.values_mut().for_each(|v| *v /= all);
    out
}

/// Unloaded latency by distance (ns).
fn latency(distance: u32) -> f64 {
    let near = f64::from(distance.clamp(LOCAL_DISTANCE, NEAR_DISTANCE) - LOCAL_DISTANCE);
    let far = f64::from(distance.saturating_sub(NEAR_DISTANCE));
    LOCAL_NS + near * PER_DISTANCE_NEAR + far * PER_DISTANCE_FAR
}

/// Waiting time at a link of that use (ns).
fn queue(used: f64) -> f64 {
    // Unknown use is no reason to expect a queue.
    let used = if used.is_finite() {
        used.clamp(0.0, LINK_MAX)
    } else {
        0.0
    };
    LINK_SERVICE_NS * used / (2.0 * (1.0 - used))
}

/// Share of the accesses that the counters and the map together say are local, and the mean latency of the others.
fn accesses(picture: &Picture, domains: &Domains, counted_local: Option<f64>, waiting: f64) -> f64 {
    let mut local = 0.0;
    let mut remote = 0.0;
    let mut remote_time = 0.0;
    for (share, distance) in picture.pairs(domains) {
        if distance == LOCAL_DISTANCE {
            local += share;
        } else {
            remote += share;
            remote_time += share * (latency(distance) + waiting);
        }
    }
    if local + remote <= 0.0 {
        return LOCAL_NS;
    }
    let apart = picture.apart;
    let away = if remote > 0.0 {
        remote_time / remote
    } else {
        latency(NEAR_DISTANCE) + waiting
    };
    let of_all = apart + (1.0 - apart) * local / (local + remote);
    let local = counted_local.unwrap_or(of_all).clamp(0.0, 1.0);
    local * LOCAL_NS + (1.0 - local) * away
}

/// What is known of a workload where it is now, to be compared with several places where it could be.
pub(crate) struct Place<'a> {
    domains: &'a Domains,
    counters: Option<&'a Counters>,
    /// Whether its threads share memory. If not, they take no lines from each other's caches unless the counters say so.
    shares: bool,
    /// Waiting time at the busiest link (ns).
    waiting: f64,
    /// Mean latency of memory (ns).
    memory: f64,
    /// Mean latency of a line of another thread (ns).
    lines: f64,
    spread: f64,
}

impl<'a> Place<'a> {
    /// Of a workload that runs like this.
    pub(crate) fn of(
        now: &Picture,
        domains: &'a Domains,
        counters: Option<&'a Counters>,
        shares: bool,
    ) -> Self {
        // Counters that do not tell how long it waits for memory predict no more than none would.
        let counters = counters.filter(|c| c.memory_stall_share.is_finite());
        let waiting = counters.map_or(0.0, |c| queue(c.busiest_link));
        let counted = counters
            .map(|c| c.local_share)
            .filter(|s| s.is_finite() && domains.list.len() > 1);
        Self {
            domains,
            counters,
            shares,
            waiting,
            memory: accesses(now, domains, counted, waiting),
            lines: now.intervention(domains, waiting).max(1.0),
            spread: now.spread(),
        }
    }

    /// Gain in instructions per cycle when it goes from here to another picture. `crowd`: whether other programs use the
    /// same caches, so that keeping each to fewer caches leaves more room for each.
    pub(crate) fn gain(&self, after: &Picture, crowd: bool) -> Effect {
        self.gain_sharing(after, crowd, 1.0)
    }

    /// The same where so many times as many threads share a core as now: what a thread computes takes so much longer, what
    /// it waits for does not.
    pub(crate) fn gain_sharing(&self, after: &Picture, crowd: bool, sharing: f64) -> Effect {
        let memory = accesses(after, self.domains, None, self.waiting) / self.memory;
        let caches = after.intervention(self.domains, self.waiting) / self.lines;
        let spread = if crowd { after.spread() / self.spread } else { 1.0 };
        let gain = |memory_share: f64, cache_share: f64, belief: f64, exponent: f64| {
            let memory = 1.0 + belief * (memory - 1.0);
            let caches = 1.0 + belief * (caches - 1.0);
            let rest = (1.0 - memory_share - cache_share).max(0.0);
            let cycles =
                rest * sharing + memory_share * memory * spread.powf(exponent) + cache_share * caches;
            1.0 / cycles.max(0.05) - 1.0
        };
        let share = |x: f64| if x.is_finite() { x.clamp(0.0, 0.95) } else { 0.0 };
        let (estimate, lower, upper) = match self.counters {
            Some(c) => {
                let memory_share = share(c.memory_stall_share);
                let cache_share = share(c.cache_to_cache_stall_share).min(0.95 - memory_share);
                (
                    gain(memory_share, cache_share, 1.0, FOOTPRINT),
                    gain(memory_share, cache_share, 0.5, 0.0),
                    gain(memory_share, cache_share, 1.0, FOOTPRINT_UPPER),
                )
            }
            None => {
                let lines = |share: f64| if self.shares { share } else { 0.0 };
                let estimate = gain(ASSUMED[0].0, lines(ASSUMED[1].0), 1.0, FOOTPRINT);
                let upper = gain(ASSUMED[0].1, lines(ASSUMED[1].1), 1.0, FOOTPRINT_UPPER);
                (estimate, estimate.min(0.0), upper)
            }
        };
        ordered(estimate, lower, upper)
    }
}

/// How near to the best a picture is, 0..1: time per access of a program whose threads share one cache beside all of its
/// memory, relative to the time here. Links are taken as idle: their use would change with the placement.
pub(crate) fn nearness(
    picture: &Picture,
    domains: &Domains,
    counters: Option<&Counters>,
    threads_share: bool,
) -> f64 {
    let share = |x: f64| if x.is_finite() { x.clamp(0.0, 0.95) } else { 0.0 };
    let counted = counters
        .map(|c| (share(c.memory_stall_share), share(c.cache_to_cache_stall_share)))
        .filter(|(memory, caches)| memory + caches > 0.0);
    let (of_memory, mut of_caches) = counted.unwrap_or((ASSUMED[0].0, ASSUMED[1].0));
    if !threads_share {
        of_caches = 0.0;
    }
    let memory = accesses(picture, domains, None, 0.0) / LOCAL_NS;
    let caches = picture.intervention(domains, 0.0) / SAME_CACHE_NS;
    let best = of_memory + of_caches;
    if best <= 0.0 {
        return 1.0;
    }
    (best / (of_memory * memory + of_caches * caches)).clamp(0.0, 1.0)
}

/// Gain when the threads that share data are kept on one board each, with as many threads on each board as now: lines of
/// other caches come from farther away less often. How much of the sharing is among such threads is not known before
/// it is tried: half is the estimate, all the upper end.
pub(crate) fn of_grouping(now: &Picture, domains: &Domains, counters: Option<&Counters>) -> Effect {
    let counters = counters.filter(|c| c.cache_to_cache_stall_share.is_finite());
    let waiting = counters.map_or(0.0, |c| queue(c.busiest_link));
    let board_of: BTreeMap<LlcId, usize> = domains.list.iter().map(|d| (d.id, d.board)).collect();
    let mut boards: BTreeMap<usize, BTreeMap<LlcId, f64>> = BTreeMap::new();
    for (llc, share) in &now.running {
        if let Some(board) = board_of.get(llc) {
            *boards.entry(*board).or_default().entry(*llc).or_default() += share;
        }
    }
    let grouped: f64 = boards
        .into_values()
        .map(|running| {
            let weight: f64 = running.values().sum();
            weight
                * now
                    .with_running(running.into_iter())
                    .intervention(domains, waiting)
        })
        .sum();
    let ratio = grouped / now.intervention(domains, waiting).max(1.0);
    let gain = |share: f64, part: f64| {
        let saved = share.clamp(0.0, 0.95) * part * (1.0 - ratio).max(0.0);
        1.0 / (1.0 - saved) - 1.0
    };
    let share = |x: f64| if x.is_finite() { x } else { 0.0 };
    match counters {
        Some(c) => {
            let share = share(c.cache_to_cache_stall_share);
            ordered(gain(share, 0.5), 0.0, gain(share, 1.0))
        }
        None => ordered(gain(ASSUMED[1].0, 0.5), 0.0, gain(ASSUMED[1].1, 1.0)),
    }
}

/// Gain when large pages remove page-table walks: `part` is the share of the memory that is converted. A faster program
/// asks more of its links, so on a full link most of what is saved is lost again to waiting.
pub(crate) fn of_walks(counters: &Counters, part: f64) -> Effect {
    let share = |x: f64| if x.is_finite() { x.clamp(0.0, 0.95) } else { 0.0 };
    let walks = share(counters.table_walk_share);
    let stall = share(counters.memory_stall_share).min(0.95 - walks);
    let memory = Latencies::of(counters);
    let gain = |removed: f64| {
        let saved = walks * part.clamp(0.0, 1.0) * removed;
        settle(|gain| {
            let longer =
                memory.at(counters.busiest_link * (1.0 + gain)) / memory.at(counters.busiest_link) - 1.0;
            1.0 / (1.0 - saved + stall * longer.max(0.0)).max(0.05) - 1.0
        })
    };
    // A walk does not vanish altogether: the large pages of a very large range miss the buffer, too, if rarely.
    ordered(gain(0.8), gain(0.4), gain(1.0))
}

/// Mean latency of memory as a function of the use of the busiest link.
struct Latencies {
    unloaded: f64,
    weight: f64,
}

impl Latencies {
    fn of(counters: &Counters) -> Self {
        let local = if counters.local_share.is_finite() {
            counters.local_share.clamp(0.0, 1.0)
        } else {
            1.0
        };
        Self {
            unloaded: local * LOCAL_NS
                + (1.0 - local) * (latency(NEAR_DISTANCE) + latency(2 * NEAR_DISTANCE)) / 2.0,
            // The busiest link is one between nodes unless nearly all accesses are local: then it is a memory
            // controller.
            weight: if local > LOCAL_MOST { 1.0 } else { 1.0 - local },
        }
    }

    fn at(&self, used: f64) -> f64 {
        self.unloaded + self.weight * queue(if used.is_finite() { used } else { 0.0 })
    }
}

/// The gain that brings about itself, by bisection: what a faster program makes of its own speed falls with the speed.
fn settle(next: impl Fn(f64) -> f64) -> f64 {
    let (mut low, mut high) = (-0.95, GAIN_MOST);
    for _ in 0..HALVINGS {
        let gain = (low + high) / 2.0;
        if next(gain) > gain {
            low = gain
        } else {
            high = gain
        }
    }
    (low + high) / 2.0
}

/// Gain when the hardware prefetch is switched off: less traffic makes the queue at the busiest link shorter, and
/// the misses that were covered now cost their full time.
pub(crate) fn of_no_prefetch(counters: &Counters) -> Effect {
    let stall = counters.memory_stall_share.clamp(0.0, 0.95);
    let useful = counters.prefetch_useful_share.clamp(0.0, 1.0);
    let share = counters.prefetch_share.clamp(0.0, 1.0);
    let memory = Latencies::of(counters);
    let before = (1.0 - useful) * memory.at(counters.busiest_link) + useful * COVERED_NS;
    let gain = |sharpness: f64| {
        settle(|gain| {
            let traffic = (1.0 - share * (1.0 - PREFETCH_LEFT)) * (1.0 + gain);
            let saved = (before - memory.at(counters.busiest_link * traffic)) / before.max(1.0);
            let sharpness = if saved > 0.0 { sharpness } else { 1.0 };
            1.0 / (1.0 - stall * saved * sharpness).max(0.05) - 1.0
        })
    };
    ordered(gain(1.0), gain(0.5), gain(1.5))
}

/// Share of local accesses above which links between nodes do not matter.
const LOCAL_MOST: f64 = 0.9;
/// A miss that the prefetcher covered (ns).
const COVERED_NS: f64 = 12.0;
/// Share of the prefetch traffic that is left when it is off (published: 3 of 43 %).
const PREFETCH_LEFT: f64 = 0.041;
/// No single change makes a program faster than this (20 = 21 times as fast).
const GAIN_MOST: f64 = 20.0;
const HALVINGS: usize = 50;

fn ordered(estimate: f64, a: f64, b: f64) -> Effect {
    Effect {
        estimate,
        lower: a.min(b).min(estimate),
        upper: a.max(b).max(estimate),
        confidence: CONFIDENCE,
    }
}

/// Sum of the memory of a workload.
pub(crate) fn resident(locality: &Locality) -> Bytes {
    locality
        .private
        .values()
        .chain(locality.shared.values())
        .copied()
        .sum()
}

/// Nodes on which the workload has memory.
pub(crate) fn memory_nodes(locality: &Locality) -> BTreeSet<NodeId> {
    locality
        .private
        .iter()
        .chain(&locality.shared)
        .filter(|(_, b)| b.0 > 0)
        .map(|(n, _)| *n)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::common::testing::{Chip, machine};

    fn two_chips(boards: u32) -> Domains {
        let chips: Vec<Chip> = (0..2)
            .map(|i| Chip {
                cores: 8,
                node: i,
                board: i % boards,
            })
            .collect();
        Domains::of(&machine(&chips, 4))
    }

    fn of_place(
        now: &Picture,
        after: &Picture,
        domains: &Domains,
        counters: Option<&Counters>,
        crowd: bool,
    ) -> Effect {
        Place::of(now, domains, counters, true).gain(after, crowd)
    }

    fn picture(running: &[(u32, f64)], memory: &[(u32, f64)]) -> Picture {
        Picture {
            running: running.iter().map(|(l, s)| (LlcId(*l), *s)).collect(),
            memory: memory.iter().map(|(n, s)| (NodeId(*n), *s)).collect(),
            apart: 0.0,
        }
    }

    #[test]
    fn placing_beside_the_memory_is_a_gain_and_beside_none_of_it_a_loss() {
        let domains = two_chips(1);
        let now = picture(&[(0, 0.5), (32, 0.5)], &[(0, 0.7), (1, 0.3)]);
        let good = now.with_running([(LlcId(0), 1.0)].into_iter());
        let bad = now.with_running([(LlcId(32), 1.0)].into_iter());
        let counters = Counters {
            memory_stall_share: 0.5,
            local_share: 0.5,
            ..Counters::default()
        };
        let gain = of_place(&now, &good, &domains, Some(&counters), false);
        assert!(
            gain.estimate > 0.05 && gain.lower > 0.0 && gain.upper >= gain.estimate,
            "{gain}"
        );
        assert!(of_place(&now, &bad, &domains, Some(&counters), false).estimate < 0.0);
        // What the counters leave open is as without counters; an unknown use of the links is no full link.
        let open = Counters {
            memory_stall_share: f64::NAN,
            ..counters
        };
        let blind = of_place(&now, &good, &domains, None, false);
        assert_eq!(of_place(&now, &good, &domains, Some(&open), false), blind);
        let link = Counters {
            busiest_link: f64::NAN,
            ..counters
        };
        assert_eq!(of_place(&now, &good, &domains, Some(&link), false), gain);
        // What the counters call local already cannot be gained again.
        let home = Counters {
            local_share: 0.97,
            ..counters
        };
        assert!(of_place(&now, &good, &domains, Some(&home), false).estimate < 0.0);
    }

    #[test]
    fn sharing_a_core_costs_what_is_computed_and_not_what_is_waited_for() {
        let domains = two_chips(1);
        let now = picture(&[(0, 1.0)], &[(0, 1.0)]);
        let of = |stall: f64| {
            let counters = Counters {
                memory_stall_share: stall,
                local_share: 1.0,
                ..Counters::default()
            };
            Place::of(&now, &domains, Some(&counters), true)
                .gain_sharing(&now, false, 2.0)
                .estimate
        };
        assert!((of(0.0) + 0.5).abs() < 1e-9);
        assert!((of(0.9) - (1.0 / 1.1 - 1.0)).abs() < 1e-9);
    }

    #[test]
    fn lines_that_threads_share_and_caches_that_programs_share_count() {
        let domains = two_chips(1);
        let now = picture(&[(0, 0.5), (32, 0.5)], &[(0, 0.5), (1, 0.5)]);
        let after = now.with_running([(LlcId(0), 1.0)].into_iter());
        let sharing = Counters {
            cache_to_cache_stall_share: 0.2,
            local_share: 0.5,
            ..Counters::default()
        };
        assert!(of_place(&now, &after, &domains, Some(&sharing), false).estimate > 0.1);
        let private = Counters {
            memory_stall_share: 0.5,
            local_share: 0.5,
            ..Counters::default()
        };
        let alone = of_place(&now, &after, &domains, Some(&private), false);
        let crowd = of_place(&now, &after, &domains, Some(&private), true);
        assert!(
            alone.estimate.abs() < 1e-9 && crowd.estimate > 0.05,
            "{alone} {crowd}"
        );
    }

    #[test]
    fn grouping_by_board_saves_far_lines_only() {
        let sharing = Counters {
            cache_to_cache_stall_share: 0.1,
            busiest_link: 0.5,
            ..Counters::default()
        };
        let four = |per_board: u32| Domains::of(&machine(&crate::common::testing::chips(4, per_board), 4));
        let everywhere = picture(&[(0, 0.25), (32, 0.25), (64, 0.25), (96, 0.25)], &[]);
        let gain = of_grouping(&everywhere, &four(2), Some(&sharing));
        assert!(
            gain.estimate > 0.01 && gain.upper < 0.1 && gain.lower == 0.0,
            "{gain}"
        );
        assert_eq!(of_grouping(&everywhere, &four(4), Some(&sharing)).upper, 0.0);
    }

    #[test]
    fn without_counters_the_interval_starts_at_nothing() {
        let domains = two_chips(1);
        let now = picture(&[(0, 0.5), (32, 0.5)], &[(0, 0.9), (1, 0.1)]);
        let after = now.with_running([(LlcId(0), 1.0)].into_iter());
        let gain = of_place(&now, &after, &domains, None, false);
        assert!(
            gain.lower == 0.0 && gain.estimate > 0.0 && gain.upper > gain.estimate,
            "{gain}"
        );
    }

    #[test]
    fn pairs_of_threads_counted_by_node_are_all_pairs() {
        // Two nodes of two caches each, and one cache that the machine does not know.
        let chips: Vec<Chip> = (0..4)
            .map(|i| Chip {
                cores: 8,
                node: i / 2,
                board: 0,
            })
            .collect();
        let domains = Domains::of(&machine(&chips, 4));
        let shares = [(0, 0.3), (32, 0.2), (64, 0.25), (96, 0.15), (7, 0.1)];
        let mut sum = 0.0;
        for (a, share_a) in shares {
            for (b, share_b) in shares {
                let time = match (a, b) {
                    _ if a == b => SAME_CACHE_NS,
                    _ if a == 7 || b == 7 || a / 64 == b / 64 => OTHER_CACHE_NS,
                    _ => SAME_CACHE_NS + latency(NEAR_DISTANCE) - LOCAL_NS + 9.0,
                };
                sum += share_a * share_b * time;
            }
        }
        let found = picture(&shares, &[]).intervention(&domains, 9.0);
        assert!((found - sum).abs() < 1e-9, "{found} {sum}");
    }

    #[test]
    fn processes_that_share_nothing_are_not_assumed_to_share_lines() {
        let domains = two_chips(1);
        let now = picture(&[(0, 0.5), (32, 0.5)], &[(0, 0.5), (1, 0.5)]);
        let after = now.with_running([(LlcId(0), 1.0)].into_iter());
        let gain = |counters: Option<&Counters>, shares| {
            Place::of(&now, &domains, counters, shares).gain(&after, false)
        };
        assert!(gain(None, true).estimate > 0.01);
        assert!(gain(None, false).upper.abs() < 1e-9);
        // What was counted is there, whoever shares it.
        let counted = Counters {
            cache_to_cache_stall_share: 0.2,
            local_share: 0.5,
            ..Counters::default()
        };
        assert_eq!(gain(Some(&counted), true), gain(Some(&counted), false));
    }

    #[test]
    fn memory_apart_is_local_and_the_rest_is_as_it_was() {
        let domains = two_chips(1);
        let gib = |n: u64| Bytes(n << 30);
        let now = picture(&[(0, 0.5), (32, 0.5)], &[(0, 0.75), (1, 0.25)]);
        // Of 16 GiB, 6 on node 0 and 2 on node 1 are the processes' own.
        let own = BTreeMap::from([(NodeId(0), gib(6)), (NodeId(1), gib(2))]);
        let after = now.with_apart(&own, gib(16));
        assert!((after.apart - 0.5).abs() < 1e-9 && (after.memory[&NodeId(0)] - 0.75).abs() < 1e-9);
        assert!((after.local(&domains) - 0.75).abs() < 1e-9);
        let counters = Counters {
            memory_stall_share: 0.5,
            local_share: 0.5,
            ..Counters::default()
        };
        let place = Place::of(&now, &domains, Some(&counters), true);
        let half = place.gain(&after, false).estimate;
        // All of it.
        let own = BTreeMap::from([(NodeId(0), gib(12)), (NodeId(1), gib(4))]);
        let whole = now.with_apart(&own, gib(16));
        assert!((whole.local(&domains) - 1.0).abs() < 1e-9);
        let all = place.gain(&whole, false).estimate;
        assert!(half > 0.05 && all > half, "{half} {all}");
        assert!(place.gain(&now, false).estimate.abs() < 1e-9);
    }

    #[test]
    fn memory_that_moves_to_several_nodes_is_shared_out_evenly() {
        let gib = |n: u64| Bytes(n << 30);
        let now = picture(&[(0, 1.0)], &[(0, 0.5), (1, 0.25), (2, 0.25)]);
        let from = BTreeMap::from([(NodeId(0), gib(4)), (NodeId(1), gib(9))]);
        let to = BTreeSet::from([NodeId(2), NodeId(3)]);
        let after = now.with_moved(&from, &to, gib(16));
        // A quarter from node 0; of node 1 no more than there is.
        let expected = [(0, 0.25), (1, 0.0), (2, 0.5), (3, 0.25)];
        for (node, share) in expected {
            assert!((after.memory[&NodeId(node)] - share).abs() < 1e-9, "{after:?}");
        }
    }

    #[test]
    fn walks_that_are_removed_come_back_as_time() {
        let idle = Counters {
            table_walk_share: 0.10,
            memory_stall_share: 0.3,
            local_share: 0.25,
            ..Counters::default()
        };
        let gain = of_walks(&idle, 1.0);
        assert!((gain.estimate - (1.0 / 0.92 - 1.0)).abs() < 1e-6, "{gain}");
        assert!(of_walks(&idle, 0.1).estimate < 0.01);
        // On a full link the faster program mostly waits longer (model-fit 4.3: P8 7 % instead of 13).
        let p8 = Counters {
            table_walk_share: 0.143,
            busiest_link: 0.86,
            ..idle
        };
        let gain = of_walks(&p8, 1.0);
        assert!(gain.estimate > 0.04 && gain.estimate < 0.10, "{gain}");
        let full = Counters {
            busiest_link: 0.97,
            ..p8
        };
        assert!(of_walks(&full, 1.0).estimate < 0.03);
        for strange in [f64::NAN, f64::INFINITY, -1.0] {
            let strange = Counters {
                table_walk_share: strange,
                memory_stall_share: strange,
                local_share: strange,
                busiest_link: strange,
                ..idle
            };
            assert!(of_walks(&strange, 1.0).upper.abs() < 1e-9);
        }
    }

    #[test]
    fn prefetch_off_pays_on_a_full_link_only() {
        // The published machines (model-fit 4.3): link .86 full, 8.4 % of gain; link nearly idle, -.1 %.
        let full = Counters {
            memory_stall_share: 0.45,
            local_share: 0.25,
            prefetch_share: 0.43,
            prefetch_useful_share: 0.02,
            busiest_link: 0.86,
            ..Counters::default()
        };
        let gain = of_no_prefetch(&full);
        assert!(gain.estimate > 0.03 && gain.estimate < 0.20, "{gain}");
        let idle = Counters {
            busiest_link: 0.1,
            ..full
        };
        assert!(of_no_prefetch(&idle).estimate < 0.01);
        // A program that the prefetcher serves well loses much (machine-model B.3: 1.82 to 4.37 CPI).
        let served = Counters {
            prefetch_useful_share: 0.85,
            prefetch_share: 0.5,
            busiest_link: 0.5,
            ..full
        };
        assert!(of_no_prefetch(&served).upper < -0.3);
    }
}
