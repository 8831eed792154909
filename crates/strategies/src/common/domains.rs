//! The machine as last-level-cache domains, and how much of each is asked for.
//!
//! Demand is counted in **cores**: a core with all its hardware threads busy is 1. A running thread is worth more of
//! a core when it runs alone than when it shares the core, by the law of [`Domains::core_use`].

use homeostat_engine::{Neighbour, Seen};
use homeostat_model::{CpuId, LlcId, Machine, NodeId};
use std::collections::{BTreeMap, BTreeSet};

/// One last-level-cache domain (POWER: a chip; EPYC: a core complex).
#[derive(Clone, Debug)]
pub(crate) struct Domain {
    pub(crate) id: LlcId,
    pub(crate) node: NodeId,
    /// Which board (book, drawer) its node is on.
    pub(crate) board: usize,
    pub(crate) cpus: Vec<CpuId>,
    pub(crate) cores: u32,
}

/// All domains of a machine.
#[derive(Clone, Debug)]
pub(crate) struct Domains {
    /// Ascending by id.
    pub(crate) list: Vec<Domain>,
    pub(crate) threads_per_core: f64,
    pub(crate) cores: u32,
    /// CPUs in general use.
    cpus: usize,
    /// Ascending by id.
    nodes: Vec<NodeRow>,
    /// Position of the domain of each CPU, ascending by CPU.
    domain_of: Vec<(CpuId, usize)>,
}

/// A node as the firmware's table of distances has it.
#[derive(Clone, Debug)]
struct NodeRow {
    id: NodeId,
    /// Its column in the rows of all nodes.
    column: usize,
    distances: Vec<u32>,
}

/// Distance of memory on the own node, as firmware tables count it (ACPI SLIT).
pub(crate) const LOCAL_DISTANCE: u32 = 10;
/// Distance assumed where the firmware gives none.
const REMOTE_DISTANCE: u32 = 20;

impl Domains {
    /// Reads them off the machine. CPUs that a person has set aside (`isolcpus=`, `nohz_full=`, a cpuset partition) are no
    /// room: a domain has fewer CPUs without them, and one of which all are set aside is none. A machine has thousands of CPUs and this is asked of each workload, so it sorts
    /// plain lists instead of growing maps.
    pub(crate) fn of(machine: &Machine) -> Self {
        let mut nodes: Vec<NodeRow> = machine
            .nodes
            .iter()
            .enumerate()
            .map(|(column, n)| NodeRow {
                id: n.id,
                column,
                distances: n.distances.clone(),
            })
            .collect();
        nodes.sort_by_key(|n| n.id);
        let mut out = Self {
            list: Vec::new(),
            threads_per_core: 1.0,
            cores: 0,
            cpus: machine.general_cpus().count(),
            nodes,
            domain_of: Vec::with_capacity(machine.cpus.len()),
        };
        let boards = out.boards();
        let mut by_llc: Vec<(LlcId, CpuId, u32, NodeId)> = machine
            .general_cpus()
            .map(|c| (c.llc, c.id, c.core, c.node))
            .collect();
        by_llc.sort_unstable();
        let mut numbers: Vec<u32> = Vec::new();
        for of_llc in by_llc.chunk_by(|a, b| a.0 == b.0) {
            let Some((id, _, _, node)) = of_llc.first().copied() else {
                continue;
            };
            numbers.clear();
            numbers.extend(of_llc.iter().map(|c| c.2));
            numbers.sort_unstable();
            numbers.dedup();
            let cores = numbers.len() as u32;
            let cpus: Vec<CpuId> = of_llc.iter().map(|c| c.1).collect();
            out.domain_of
                .extend(cpus.iter().map(|cpu| (*cpu, out.list.len())));
            out.cores += cores;
            out.list.push(Domain {
                id,
                node,
                board: boards.get(&node).copied().unwrap_or(0),
                cpus,
                cores,
            });
        }
        out.domain_of.sort_unstable();
        if out.cores > 0 {
            out.threads_per_core = (out.cpus as f64 / f64::from(out.cores)).max(1.0);
        }
        out
    }

    fn row(&self, node: NodeId) -> Option<&NodeRow> {
        let at = self.nodes.binary_search_by_key(&node, |n| n.id).ok()?;
        self.nodes.get(at)
    }

    /// Distance between two nodes; 10 = the same.
    pub(crate) fn distance(&self, a: NodeId, b: NodeId) -> u32 {
        if a == b {
            return LOCAL_DISTANCE;
        }
        self.row(b)
            .and_then(|to| self.row(a)?.distances.get(to.column))
            .copied()
            .unwrap_or(REMOTE_DISTANCE)
            .max(LOCAL_DISTANCE)
    }

    /// Nodes that are nearer to each other than the farthest pair of the machine share a board. With one remote
    /// distance only, there are no boards: the whole machine counts as one.
    fn boards(&self) -> BTreeMap<NodeId, usize> {
        let nodes: Vec<NodeId> = self.nodes.iter().map(|n| n.id).collect();
        let mut remote: BTreeSet<u32> = BTreeSet::new();
        for a in &nodes {
            for b in &nodes {
                if a != b {
                    remote.insert(self.distance(*a, *b));
                }
            }
        }
        let far = if remote.len() > 1 {
            remote.last().copied().unwrap_or(u32::MAX)
        } else {
            u32::MAX
        };
        let mut board_of: BTreeMap<NodeId, usize> = BTreeMap::new();
        let mut boards = 0;
        for node in &nodes {
            let found = board_of
                .iter()
                .find(|(other, _)| self.distance(*node, **other) < far)
                .map(|(_, board)| *board);
            let board = found.unwrap_or_else(|| {
                boards += 1;
                boards - 1
            });
            board_of.insert(*node, board);
        }
        board_of
    }

    /// Node of a cache domain.
    pub(crate) fn node_of(&self, id: LlcId) -> Option<NodeId> {
        let at = self.list.binary_search_by_key(&id, |d| d.id).ok()?;
        self.list.get(at).map(|d| d.node)
    }

    /// The domains to which CPUs belong, with how many of their CPUs are in the list.
    pub(crate) fn among(&self, cpus: &[CpuId]) -> BTreeMap<usize, usize> {
        let mut out = BTreeMap::new();
        // Lists of CPUs are in order: the next one is mostly the one that follows, in the same domain.
        let mut next = 0;
        let mut run: Option<(usize, usize)> = None;
        for cpu in cpus {
            let at = match self.domain_of.get(next) {
                Some((id, _)) if id == cpu => Ok(next),
                _ => self.domain_of.binary_search_by_key(cpu, |(id, _)| *id),
            };
            let Some((_, domain)) = at.ok().and_then(|at| self.domain_of.get(at)) else {
                continue;
            };
            next = at.map_or(0, |at| at + 1);
            run = match run {
                Some((same, count)) if same == *domain => Some((same, count + 1)),
                Some((other, count)) => {
                    *out.entry(other).or_insert(0) += count;
                    Some((*domain, 1))
                }
                None => Some((*domain, 1)),
            };
        }
        if let Some((domain, count)) = run {
            *out.entry(domain).or_insert(0) += count;
        }
        out
    }

    /// The nodes to which CPUs belong.
    pub(crate) fn nodes_among(&self, cpus: &[CpuId]) -> BTreeSet<NodeId> {
        self.among(cpus)
            .keys()
            .filter_map(|i| self.list.get(*i).map(|d| d.node))
            .collect()
    }

    /// Whether the list holds every CPU that is in general use.
    pub(crate) fn is_all(&self, cpus: &[CpuId]) -> bool {
        cpus.len() >= self.cpus
    }

    /// Share of a full core's work that `running` threads on it do: k/(k+1) relative to a full core, linear below
    /// one thread, time slicing (above 1) beyond all hardware threads. With four threads per core one thread does
    /// .625, two .833, three .9375 of a full core (`model-fit.md` 2.1: .63 and .85 were published); with two
    /// threads per core one does .75.
    pub(crate) fn core_use(&self, running: f64) -> f64 {
        let threads = self.threads_per_core;
        let full = (threads + 1.0) / threads;
        if running <= 0.0 {
            0.0
        } else if running <= 1.0 {
            running * full / 2.0
        } else if running <= threads {
            full * running / (running + 1.0)
        } else {
            running / threads
        }
    }

    /// Share of a core that a running thread is worth where so many run on each.
    fn worth(&self, density: f64) -> f64 {
        if density > 0.0 {
            self.core_use(density).min(1.0) / density
        } else {
            self.core_use(1.0)
        }
    }

    /// Running threads on a core of which that share is used: the inverse of [`Self::core_use`].
    pub(crate) fn running_on_core(&self, used: f64) -> f64 {
        let threads = self.threads_per_core;
        let full = (threads + 1.0) / threads;
        if used <= 0.0 {
            0.0
        } else if used <= full / 2.0 {
            2.0 * used / full
        } else if used < 1.0 {
            used / (full - used)
        } else {
            used * threads
        }
    }
}

/// Who asks for how much of the machine.
#[derive(Clone, Debug)]
pub(crate) struct Demand {
    /// Cores that the workload asks for.
    pub(crate) own: f64,
    /// Running threads of the workload.
    pub(crate) own_running: f64,
    /// Cores on which at least one of its threads runs, as a partition would be charged for them: what people mean by
    /// "it uses eight cores".
    pub(crate) own_cores: f64,
    /// Cores asked for by all workloads together, this one included.
    pub(crate) total: f64,
    /// Running threads per core of the whole machine.
    pub(crate) density: f64,
    /// Cores asked for by placed neighbours, by position of the domain.
    pub(crate) placed: Vec<f64>,
    /// Running threads of placed neighbours, by position of the domain.
    pub(crate) placed_running: Vec<f64>,
    /// Running threads per core of neighbours that are placed nowhere: they run everywhere.
    pub(crate) floating: f64,
}

impl Demand {
    /// Reads it off what is seen. Neighbours that homeostat placed load their domains in proportion to the CPUs
    /// they were given there; the others go where there is room.
    pub(crate) fn of(seen: &Seen<'_>, domains: &Domains) -> Self {
        let own_running = own_running(seen);
        let others: f64 = seen.neighbours.iter().map(|n| n.cpus.max(0.0)).sum();
        let cores = f64::from(domains.cores).max(1.0);
        let density = (own_running + others) / cores;
        let worth = domains.worth(density);
        let mut placed_running = vec![0.0; domains.list.len()];
        for neighbour in seen.neighbours {
            for (domain, share) in placed_shares(neighbour, domains) {
                if let Some(load) = placed_running.get_mut(domain) {
                    *load += neighbour.cpus.max(0.0) * share;
                }
            }
        }
        let floating = (others - placed_running.iter().sum::<f64>()).max(0.0) / cores;
        Self {
            floating,
            own: own_running * worth,
            own_running,
            own_cores: own_running / density.max(1.0),
            total: (own_running + others) * worth,
            density,
            placed: placed_running.iter().map(|threads| threads * worth).collect(),
            placed_running,
        }
    }

    /// The same for a workload that is kept on some of the domains: as densely as threads run there.
    pub(crate) fn on(&self, domains: &Domains, positions: &[usize]) -> Self {
        let cores: u32 = positions
            .iter()
            .filter_map(|i| domains.list.get(*i))
            .map(|d| d.cores)
            .sum();
        let here: f64 = positions.iter().filter_map(|i| self.placed_running.get(*i)).sum();
        let density = (self.own_running + here) / f64::from(cores.max(1)) + self.floating;
        let worth = domains.worth(density);
        Self {
            own: self.own_running * worth,
            own_cores: self.own_running / density.max(1.0),
            density,
            placed: self
                .placed_running
                .iter()
                .map(|threads| threads * worth)
                .collect(),
            ..self.clone()
        }
    }

    /// Share of the machine's cores that is used.
    pub(crate) fn busy(&self, domains: &Domains) -> f64 {
        self.total / f64::from(domains.cores).max(1.0)
    }
}

/// Running threads of the workload: by place where that was inspected, else from its CPU time.
pub(crate) fn own_running(seen: &Seen<'_>) -> f64 {
    let by_place: f64 = seen
        .locality
        .map_or(0.0, |l| l.running.values().filter(|c| c.is_finite()).sum());
    if by_place > 0.0 {
        by_place
    } else {
        seen.load.cpus.max(0.0)
    }
}

/// How a placed neighbour spreads over domains. A placement on the whole machine is none.
fn placed_shares(neighbour: &Neighbour, domains: &Domains) -> Vec<(usize, f64)> {
    let Some(cpus) = neighbour.placed.as_ref() else {
        return Vec::new();
    };
    if domains.is_all(cpus) {
        return Vec::new();
    }
    let among = domains.among(cpus);
    let all: usize = among.values().sum();
    among
        .into_iter()
        .map(|(domain, count)| (domain, count as f64 / all.max(1) as f64))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::common::testing::{Chip, machine};

    fn power(chips: usize, boards: u32) -> Domains {
        let per_board = chips as u32 / boards;
        let chips: Vec<Chip> = (0..chips as u32)
            .map(|i| Chip {
                cores: 8,
                node: i,
                board: i / per_board,
            })
            .collect();
        Domains::of(&machine(&chips, 4))
    }

    #[test]
    fn the_smt_law_is_the_published_one_and_its_inverse_agrees() {
        let domains = power(2, 1);
        for (running, used) in [(1.0, 0.625), (2.0, 0.8333), (3.0, 0.9375), (4.0, 1.0), (8.0, 2.0)] {
            assert!((domains.core_use(running) - used).abs() < 1e-4, "{running}");
        }
        // model-fit 2.1: k(U) at .60 .80 .85 .90 1.
        for (used, running) in [(0.8, 1.778), (0.85, 2.125), (0.9, 2.571), (1.0, 4.0)] {
            assert!((domains.running_on_core(used) - running).abs() < 1e-3, "{used}");
        }
        for step in 0..80 {
            let running = f64::from(step) * 0.1;
            assert!((domains.running_on_core(domains.core_use(running)) - running).abs() < 1e-9);
        }
    }

    #[test]
    fn boards_are_found_by_distance() {
        let two_books = power(4, 2);
        assert_eq!(
            two_books.list.iter().map(|d| d.board).collect::<Vec<_>>(),
            [0, 0, 1, 1]
        );
        let one_board = power(4, 1);
        assert!(one_board.list.iter().all(|d| d.board == 0));
        assert_eq!(two_books.threads_per_core, 4.0);
        assert_eq!(two_books.cores, 32);
    }

    #[test]
    fn cpus_are_found_in_their_domains_in_any_order() {
        let domains = power(3, 1);
        let list = |numbers: &[u32]| -> Vec<CpuId> { numbers.iter().map(|n| CpuId(*n)).collect() };
        for (cpus, expected) in [
            (list(&[0, 1, 2, 40, 41, 70]), vec![(0, 3), (1, 2), (2, 1)]),
            (list(&[70, 2, 41, 0, 40, 1]), vec![(0, 3), (1, 2), (2, 1)]),
            (list(&[31, 32, 4000, 33, 31]), vec![(0, 2), (1, 2)]),
            (list(&[4000]), vec![]),
            (list(&[]), vec![]),
        ] {
            let found: Vec<(usize, usize)> = domains.among(&cpus).into_iter().collect();
            assert_eq!(found, expected, "{cpus:?}");
        }
        assert_eq!(domains.node_of(LlcId(32)), Some(NodeId(1)));
        assert_eq!(domains.node_of(LlcId(33)), None);
        let nodes: Vec<NodeId> = domains.nodes_among(&list(&[95, 0])).into_iter().collect();
        assert_eq!(nodes, [NodeId(0), NodeId(2)]);
    }

    #[test]
    fn cpus_that_were_set_aside_are_no_room() {
        let chips: Vec<Chip> = (0..3)
            .map(|node| Chip {
                cores: 4,
                node,
                board: 0,
            })
            .collect();
        let mut machine = machine(&chips, 2);
        // One core of the first chip, one thread of a core of the second, all of the third.
        for cpu in &mut machine.cpus {
            cpu.set_aside = matches!(cpu.id.0, 0 | 1 | 8 | 16..);
        }
        let domains = Domains::of(&machine);
        let found: Vec<(u32, u32, usize)> = domains
            .list
            .iter()
            .map(|d| (d.id.0, d.cores, d.cpus.len()))
            .collect();
        assert_eq!(found, [(0, 3, 6), (8, 4, 7)]);
        assert_eq!(domains.cores, 7);
        assert!((domains.threads_per_core - 13.0 / 7.0).abs() < 1e-12);
        let general: Vec<CpuId> = machine.general_cpus().map(|c| c.id).collect();
        assert!(domains.is_all(&general) && !domains.is_all(&general[1..]));
        assert_eq!(domains.node_of(LlcId(16)), None);
        assert!(domains.nodes_among(&[CpuId(0), CpuId(20)]).is_empty());
        // Its memory is as far as before.
        assert_eq!(domains.distance(NodeId(0), NodeId(2)), REMOTE_DISTANCE);
    }

    #[test]
    fn a_machine_without_distances_counts_other_nodes_as_remote() {
        let mut bare = machine(
            &[
                Chip {
                    cores: 2,
                    node: 0,
                    board: 0,
                },
                Chip {
                    cores: 2,
                    node: 1,
                    board: 0,
                },
            ],
            2,
        );
        for node in &mut bare.nodes {
            node.distances.clear();
        }
        let domains = Domains::of(&bare);
        assert_eq!(domains.distance(NodeId(0), NodeId(1)), REMOTE_DISTANCE);
        assert_eq!(domains.distance(NodeId(1), NodeId(1)), LOCAL_DISTANCE);
    }
}
