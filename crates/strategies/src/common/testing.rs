//! A machine and a workload to ask strategies about.

use homeostat_engine::{
    Declined, Held, Load, Neighbour, Opinion, Policy, Profile, Proposal, RefusedPlace, Seen, Strategy,
};
use homeostat_model::action::Target;
use homeostat_model::{
    Bytes, Capability, CapabilityState, Counters, Cpu, CpuId, Effect, Fingerprint, LlcId, Locality, Machine,
    MachineSample, MemoryMap, Nanoseconds, NodeId, NumaNode, OperatorChoice, ProcessId, Workload,
    WorkloadKind, WorkloadSample,
};
use std::collections::BTreeMap;

/// One last-level-cache domain of a machine.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Chip {
    pub(crate) cores: u32,
    pub(crate) node: u32,
    pub(crate) board: u32,
}

/// `count` chips of 8 cores, each a node of its own, `per_board` on a board.
pub(crate) fn chips(count: u32, per_board: u32) -> Vec<Chip> {
    (0..count)
        .map(|i| Chip {
            cores: 8,
            node: i,
            board: i / per_board,
        })
        .collect()
}

pub(crate) const GIB: u64 = 1 << 30;

/// A machine of those chips, CPUs numbered chip by chip, core by core, thread by thread; 64 GiB per node.
pub(crate) fn machine(chips: &[Chip], threads_per_core: u32) -> Machine {
    let mut cpus = Vec::new();
    let mut board_of: BTreeMap<u32, u32> = BTreeMap::new();
    for chip in chips {
        board_of.insert(chip.node, chip.board);
        let llc = LlcId(cpus.len() as u32);
        for _ in 0..chip.cores {
            let core = cpus.len() as u32;
            for _ in 0..threads_per_core {
                cpus.push(Cpu {
                    id: CpuId(cpus.len() as u32),
                    core,
                    package: chip.node,
                    llc,
                    node: NodeId(chip.node),
                    set_aside: false,
                });
            }
        }
    }
    let nodes: Vec<NumaNode> = board_of
        .iter()
        .map(|(node, board)| NumaNode {
            id: NodeId(*node),
            memory: Bytes(64 * GIB),
            distances: board_of
                .iter()
                .map(
                    |(other, other_board)| match (node == other, board == other_board) {
                        (true, _) => 10,
                        (_, true) => 20,
                        _ => 40,
                    },
                )
                .collect(),
        })
        .collect();
    let capabilities = [
        "locality",
        "placement.threads",
        "placement.pages",
        "prefetch.switch",
        "process_madvise.collapse",
        "process_madvise.split",
    ]
    .into_iter()
    .map(available)
    .collect();
    Machine {
        kernel: "simulated".into(),
        cpu_model: "test".into(),
        hypervisor: None,
        memory: Bytes(64 * GIB * nodes.len() as u64),
        nodes,
        cpus,
        page_size: Bytes(4096),
        huge_page_size: Bytes(2 << 20),
        llc_size: Bytes::from_mib(32),
        boot_id: "b".into(),
        capabilities,
    }
}

pub(crate) fn available(id: &str) -> Capability {
    Capability {
        id: homeostat_model::CapabilityId::new(id),
        state: CapabilityState::Available,
        detail: String::new(),
        cost_of_absence: String::new(),
        remedy: String::new(),
    }
}

/// Everything that a strategy may look at, to be changed by each test.
pub(crate) struct Scene {
    pub(crate) machine: Machine,
    pub(crate) machine_sample: MachineSample,
    pub(crate) workload: Workload,
    pub(crate) sample: WorkloadSample,
    pub(crate) load: Load,
    pub(crate) policy: Policy,
    pub(crate) memory: Option<MemoryMap>,
    pub(crate) locality: Option<Locality>,
    pub(crate) neighbours: Vec<Neighbour>,
    pub(crate) held: Vec<Held>,
    pub(crate) refused: Vec<RefusedPlace>,
}

impl Scene {
    /// A multi-threaded, memory-bound workload that runs with `cpus` threads spread evenly over the machine, with
    /// `gib` GiB of private memory spread evenly over the nodes.
    pub(crate) fn new(machine: Machine, cpus: f64, gib: f64) -> Self {
        let mut running: BTreeMap<LlcId, f64> = BTreeMap::new();
        for cpu in &machine.cpus {
            *running.entry(cpu.llc).or_default() += cpus / machine.cpus.len() as f64;
        }
        let bytes = (gib * GIB as f64) as u64;
        let nodes = machine.nodes.len() as u64;
        let private: BTreeMap<NodeId, Bytes> = machine
            .nodes
            .iter()
            .map(|n| (n.id, Bytes(bytes / nodes)))
            .collect();
        let processes = vec![ProcessId {
            pid: 10,
            start_ticks: 1,
        }];
        Self {
            machine_sample: MachineSample {
                memory_free: machine.memory.saturating_sub(Bytes(bytes)),
                ..MachineSample::default()
            },
            workload: Workload {
                id: "w".into(),
                kind: WorkloadKind::ProcessGroup,
                former: None,
                owner: homeostat_model::Owner::Machine,
                others: Vec::new(),
                fingerprint: Fingerprint::new("w"),
                program: "w".into(),
                executable: "/w".into(),
                processes,
                choice: OperatorChoice::default(),
            },
            sample: WorkloadSample {
                id: "w".into(),
                interval: Nanoseconds::from_secs(1),
                age: Nanoseconds::from_secs(3600),
                processes: 1,
                threads: 30,
                cpu: Nanoseconds::from_secs_f64(cpus),
                cpu_busiest: Nanoseconds::from_secs_f64(cpus),
                runqueue_wait: Nanoseconds::ZERO,
                faults_minor: 0,
                faults_major: 0,
                churn: 0,
                resident: Bytes(bytes),
                anonymous: Bytes(bytes),
                shared: Bytes::ZERO,
                huge: None,
                meters: vec![],
                reads: homeostat_model::Reads::default(),
                spans: None,
                executions: 0,
            },
            load: Load {
                cpus,
                saturated: true,
                ..Load::default()
            },
            policy: Policy::default(),
            memory: None,
            locality: Some(Locality {
                workload: "w".into(),
                threads: 30,
                threads_of_busiest_process: 30,
                running,
                private,
                shared: BTreeMap::new(),
                huge: BTreeMap::new(),
                bound: None,
                counters: Some(Counters {
                    cycles_per_instruction: 3.0,
                    memory_stall_share: 0.5,
                    cache_to_cache_stall_share: 0.05,
                    table_walk_share: 0.05,
                    local_share: 1.0 / nodes as f64,
                    prefetch_share: 0.2,
                    prefetch_useful_share: 0.3,
                    busiest_link: 0.4,
                }),
            }),
            neighbours: vec![],
            held: vec![],
            refused: vec![],
            machine,
        }
    }

    /// With the thresholds of ASO.
    pub(crate) fn classic(mut self) -> Self {
        self.policy.profile = Profile::AsoClassic;
        self
    }

    /// The same scene after a change.
    pub(crate) fn with(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }

    pub(crate) fn locality(&mut self) -> &mut Locality {
        self.locality.as_mut().unwrap()
    }

    pub(crate) fn counters(&mut self) -> &mut Counters {
        self.locality().counters.as_mut().unwrap()
    }

    /// Other workloads: CPUs used and, if placed, on which chip.
    pub(crate) fn neighbour(&mut self, cpus: f64, chip: Option<usize>) {
        let placed = chip.map(|chip| {
            let mut ids: Vec<LlcId> = self.machine.cpus.iter().map(|c| c.llc).collect();
            ids.dedup();
            self.machine
                .cpus
                .iter()
                .filter(|c| c.llc == ids[chip])
                .map(|c| c.id)
                .collect()
        });
        self.neighbours.push(Neighbour {
            id: format!("n{}", self.neighbours.len()).as_str().into(),
            cpus,
            resident: Bytes(GIB),
            placed,
            reads: homeostat_model::Reads::default(),
            interval: Nanoseconds::from_secs(1),
            kind: WorkloadKind::ProcessGroup,
            processes: vec![],
            left_alone: None,
            is_proven: false,
            read_so_far: Bytes::ZERO,
        });
    }

    /// Puts a change of homeostat in force on CPUs.
    pub(crate) fn hold(&mut self, strategy: &str, target: Target) {
        self.held.push(Held {
            strategy: strategy.into(),
            target,
            effect: Effect {
                estimate: 0.2,
                lower: 0.1,
                upper: 0.3,
                confidence: 0.9,
            },
            waited: 0.0,
            runnable: 0.0,
            machine_busy: 0.0,
        });
    }

    pub(crate) fn ask<T>(&self, question: impl FnOnce(&Seen<'_>) -> T) -> T {
        question(&Seen {
            now: Nanoseconds::from_secs(4000),
            policy: &self.policy,
            machine: &self.machine,
            machine_sample: &self.machine_sample,
            machine_interval: self.sample.interval,
            workload: &self.workload,
            sample: &self.sample,
            load: &self.load,
            memory: self.memory.as_ref(),
            locality: self.locality.as_ref(),
            neighbours: &self.neighbours,
            held: &self.held,
            known: None,
            refused: &self.refused,
        })
    }

    pub(crate) fn opinion(&self, strategy: &dyn Strategy) -> Opinion {
        self.ask(|seen| strategy.consider(seen))
    }

    pub(crate) fn proposal(&self, strategy: &dyn Strategy) -> Proposal {
        match self.opinion(strategy) {
            Opinion::Propose(p) => *p,
            other => panic!("expected a proposal, got {other:?}"),
        }
    }

    pub(crate) fn declined(&self, strategy: &dyn Strategy) -> Declined {
        match self.opinion(strategy) {
            Opinion::Decline(d) => d,
            other => panic!("expected a refusal, got {other:?}"),
        }
    }

    pub(crate) fn reason(&self, strategy: &dyn Strategy) -> String {
        self.declined(strategy).reason
    }

    pub(crate) fn outgrown(&self, strategy: &dyn Strategy) -> Option<String> {
        self.ask(|seen| strategy.outgrown(seen))
    }

    pub(crate) fn unwanted(&self, strategy: &dyn Strategy) -> Option<String> {
        self.ask(|seen| strategy.unwanted(seen))
    }
}
