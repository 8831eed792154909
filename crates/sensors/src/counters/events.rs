//! Event sets of each processor.
//!
//! A set is a list of groups; the events of a group always run together, so their ratios are exact. The first event of
//! every group is cycles, the base of every share. A group has at most three general counters and the cycles: with
//! hyper-threading Intel has four, and the NMI watchdog takes one of them if it cannot have the fixed one.
//!
//! Encodings come from the makers' event lists in Linux (`tools/perf/pmu-events/arch/*`), by the names given here. An
//! event that a processor cannot count is absent and its result unknown: no guess from a neighbour model.

use crate::processor::{Maker, Processor};
use homeostat_kernel::bytes::{hexadecimal, number};
use homeostat_kernel::perf::{Encoding, PERF_TYPE_RAW};
use homeostat_kernel::{Root, files};

/// Meaning of an event in a set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum What {
    /// Cycles in user mode, not halted.
    Cycles,
    /// Instructions completed.
    Instructions,
    /// Cycles in which nothing ran and a load had missed the last-level cache of this package.
    MissStall,
    /// Cycles in which nothing completed because a load from any level had not.
    LoadStall,
    /// Cycles in which the back end stalled for memory (any level beyond the first cache).
    BackendMemoryStall,
    /// Cycles in which a page-table walk for a load was under way.
    LoadWalkCycles,
    /// Cycles in which a page-table walk for a store was under way.
    StoreWalkCycles,
    /// Data page-table walks.
    Walks,
    /// Demand loads that came from another level-2 or level-3 cache of the same cache domain.
    FromOwnCache,
    /// … from a cache of another domain of the same node.
    FromNearCache,
    /// … from a cache of another node (or package).
    FromFarCache,
    /// … from memory of the own node.
    FromNearMemory,
    /// … from memory of another node.
    FromFarMemory,
    /// Reads of memory on all nodes, as the generic event of Linux counts them.
    NodeReads,
    /// Reads of memory on other nodes.
    NodeReadMisses,
    /// Lines requested from beyond the last-level cache, by demand and prefetch.
    LinesAll,
    /// Lines requested from beyond the last-level cache by demand only.
    LinesDemand,
    /// Lines requested from beyond the last-level cache by a hardware prefetcher.
    LinesPrefetched,
    /// Requests of the hardware prefetchers that missed the level-2 cache.
    PrefetchMisses,
    /// Lines that a hardware prefetcher brought into the level-2 cache and that left it unused.
    PrefetchUseless,
}

/// Groups of events for one kind of processor.
#[derive(Clone, Debug, PartialEq)]
pub struct EventSet {
    /// The processors, for people.
    pub name: &'static str,
    /// The groups. The first event of each is [`What::Cycles`].
    pub groups: Vec<Vec<(What, Encoding)>>,
}

impl EventSet {
    /// The set of the processor below this root.
    pub fn of(root: &Root) -> Self {
        let processor = Processor::read(root);
        let own = processor.and_then(|p| match p.maker {
            Maker::Intel if p.family == 6 => intel(p.model, core_source(root)),
            Maker::Amd => amd(p.family, p.model),
            Maker::Arm => arm(root),
            Maker::Intel | Maker::Power | Maker::Other => None,
        });
        own.unwrap_or_else(generic)
    }

    /// Whether one of the groups counts it.
    pub fn counts(&self, what: What) -> bool {
        self.groups.iter().flatten().any(|(w, _)| *w == what)
    }

    /// Most descriptors for one thread.
    pub fn descriptors(&self) -> usize {
        self.groups.iter().map(Vec::len).sum()
    }
}

/// The event source of the cores in the tables: `cpu_core` on hybrid processors, else the usual one.
fn core_source(root: &Root) -> u32 {
    files::text(root, "/sys/bus/event_source/devices/cpu_core/type")
        .and_then(|t| number(t.as_bytes()))
        .and_then(|n| u32::try_from(n).ok())
        .unwrap_or(PERF_TYPE_RAW)
}

/// An x86 event: number, unit mask, threshold. AMD's numbers have four more bits, kept at bit 32.
const fn x86(source: u32, event: u64, mask: u64, threshold: u64) -> Encoding {
    Encoding {
        source,
        config: (event & 0xFF) | (mask << 8) | (threshold << 24) | ((event >> 8) << 32),
        config1: 0,
        user_only: true,
    }
}

/// An offcore event of Intel with the request and response bits of its second register.
const fn offcore(source: u32, event: u64, bits: u64) -> Encoding {
    Encoding {
        config1: bits,
        ..x86(source, event, 1, 0)
    }
}

/// Models whose events are those of the tables below. Numbers as in Linux arch/x86/include/asm/intel-family.h.
fn intel(model: u32, source: u32) -> Option<EventSet> {
    struct Generation {
        name: &'static str,
        /// (load, store) event of page-table walks.
        walks: (u64, u64),
        prefetch_miss_mask: u64,
        lines_out: u64,
        /// (event, all reads, demand reads) of the offcore responses beyond the last-level cache.
        offcore: Option<(u64, u64, u64)>,
        /// Whether loads from other packages are counted separately: servers only.
        packages: bool,
    }
    let generation = match model {
        0x55 => Generation {
            name: "Intel Skylake or Cascade Lake server",
            walks: (0x08, 0x49),
            prefetch_miss_mask: 0x38,
            lines_out: 0xF2,
            // OFFCORE_RESPONSE: demand data, ownership, code; prefetch into L2, L3 and L1 besides; L3_MISS.ANY_SNOOP.
            offcore: Some((0xB7, 0x3F_BC00_07F7, 0x3F_BC00_0007)),
            packages: true,
        },
        0x4E | 0x5E | 0x8E | 0x9E | 0xA5 | 0xA6 => Generation {
            name: "Intel Skylake client",
            walks: (0x08, 0x49),
            prefetch_miss_mask: 0x38,
            lines_out: 0xF2,
            offcore: None,
            packages: false,
        },
        0x6A | 0x6C => Generation {
            name: "Intel Ice Lake server",
            walks: (0x08, 0x49),
            prefetch_miss_mask: 0x30,
            lines_out: 0xF2,
            // OCR.READS_TO_CORE.L3_MISS, and its demand part.
            offcore: Some((0xB7, 0x3F_3FC0_0477, 0x3F_3FC0_0007)),
            packages: true,
        },
        0x8F | 0xCF => Generation {
            name: "Intel Sapphire or Emerald Rapids",
            walks: (0x12, 0x13),
            prefetch_miss_mask: 0x30,
            lines_out: 0x26,
            offcore: Some((0x2A, 0x3F_3FC0_4477, 0x3F_3FC0_0007)),
            packages: true,
        },
        _ => return None,
    };
    let event = |e, m, c| x86(source, e, m, c);
    let cycles = (What::Cycles, event(0x3C, 0, 0));
    let (load, store) = generation.walks;
    let mut groups = vec![
        vec![
            cycles,
            (What::Instructions, event(0xC0, 0, 0)),
            // CYCLE_ACTIVITY.STALLS_L3_MISS
            (What::MissStall, event(0xA3, 0x06, 6)),
            // DTLB_LOAD_MISSES.WALK_ACTIVE, DTLB_STORE_MISSES.WALK_ACTIVE
            (What::LoadWalkCycles, event(load, 0x10, 1)),
            (What::StoreWalkCycles, event(store, 0x10, 1)),
        ],
        vec![
            cycles,
            // L2_RQSTS.PF_MISS or HWPF_MISS, L2_LINES_OUT.USELESS_HWPF
            (
                What::PrefetchMisses,
                event(0x24, generation.prefetch_miss_mask, 0),
            ),
            (What::PrefetchUseless, event(generation.lines_out, 0x04, 0)),
        ],
    ];
    if generation.packages {
        // MEM_LOAD_L3_MISS_RETIRED.LOCAL_DRAM, REMOTE_DRAM, REMOTE_HITM and REMOTE_FWD
        groups.push(vec![
            cycles,
            (What::FromNearMemory, event(0xD3, 0x01, 0)),
            (What::FromFarMemory, event(0xD3, 0x02, 0)),
            (What::FromFarCache, event(0xD3, 0x0C, 0)),
        ]);
    }
    if let Some((number, all, demand)) = generation.offcore {
        groups.push(vec![
            cycles,
            (What::LinesAll, offcore(source, number, all)),
            (What::LinesDemand, offcore(source, number, demand)),
        ]);
    }
    Some(EventSet {
        name: generation.name,
        groups,
    })
}

/// AMD from Zen 2. None of them counts useless prefetched lines.
fn amd(family: u32, model: u32) -> Option<EventSet> {
    let (name, zen) = match (family, model) {
        (0x17, 0x30..) => ("AMD Zen 2", 2),
        // Models by generation (Linux arch/x86/kernel/cpu/amd.c).
        (0x19, 0x00..=0x0F | 0x20..=0x5F) => ("AMD Zen 3", 3),
        (0x19, 0x10..=0x1F | 0x60..=0xAF) => ("AMD Zen 4", 4),
        (0x1A, 0x00..=0x2F | 0x40..=0x4F | 0x60..=0x7F) => ("AMD Zen 5", 5),
        _ => return None,
    };
    let event = |e, m| x86(PERF_TYPE_RAW, e, m, 0);
    let cycles = (What::Cycles, event(0x76, 0));
    let mut first = vec![
        cycles,
        (What::Instructions, event(0xC0, 0)),
        // LS_L1_D_TLB_MISS, all that missed the second level
        (What::Walks, event(0x45, 0xF0)),
    ];
    if zen >= 4 {
        // EX_NO_RETIRE.LOAD_NOT_COMPLETE
        first.push((What::LoadStall, event(0xD6, 0xA2)));
    }
    // LS_DMND_FILLS_FROM_SYS (LS_REFILLS_FROM_SYS on Zen 2, which does not separate near caches from own ones)
    let mut sources = vec![
        cycles,
        (What::FromNearMemory, event(0x43, 0x08)),
        (What::FromFarMemory, event(0x43, 0x40)),
        (What::FromFarCache, event(0x43, 0x10)),
        (What::FromOwnCache, event(0x43, 0x02)),
    ];
    if zen >= 3 {
        sources.push((What::FromNearCache, event(0x43, 0x04)));
    }
    Some(EventSet {
        name,
        groups: vec![
            first,
            sources,
            vec![
                cycles,
                (What::LinesDemand, event(0x43, 0x48)),
                // L2_PF_MISS_L2_L3: of the level-2 prefetchers on Zen 2, of both levels from Zen 3.
                (
                    What::LinesPrefetched,
                    event(0x72, if zen >= 3 { 0xFF } else { 0x1F }),
                ),
            ],
        ],
    })
}

/// Arm: the driver lists the core's architectural events by name in sysfs.
fn arm(root: &Root) -> Option<EventSet> {
    let device = files::names(root, "/sys/bus/event_source/devices")
        .into_iter()
        .find(|d| d.starts_with("armv8"))?;
    let base = format!("/sys/bus/event_source/devices/{device}");
    let source = u32::try_from(number(files::text(root, &format!("{base}/type"))?.as_bytes())?).ok()?;
    let named = |name: &str| {
        let text = files::text(root, &format!("{base}/events/{name}"))?;
        let config = hexadecimal(text.strip_prefix("event=0x")?.as_bytes())?;
        Some(Encoding {
            source,
            config,
            config1: 0,
            user_only: true,
        })
    };
    let cycles = (What::Cycles, named("cpu_cycles")?);
    let group = |wanted: &[(What, &str)]| {
        let mut group = vec![cycles];
        group.extend(
            wanted
                .iter()
                .filter_map(|(what, name)| Some((*what, named(name)?))),
        );
        group
    };
    let groups: Vec<_> = [
        group(&[
            (What::Instructions, "inst_retired"),
            (What::BackendMemoryStall, "stall_backend_mem"),
            (What::Walks, "dtlb_walk"),
        ]),
        group(&[
            (What::LinesDemand, "ll_cache_miss_rd"),
            (What::FromFarMemory, "remote_access"),
        ]),
    ]
    .into_iter()
    .filter(|g| g.len() > 1)
    .collect();
    (!groups.is_empty()).then_some(EventSet {
        name: "Arm, by the names of its driver",
        groups,
    })
}

/// Events that Linux itself defines for any processor.
fn generic() -> EventSet {
    let cycles = (What::Cycles, Encoding::CYCLES);
    EventSet {
        name: "generic events of the kernel",
        groups: vec![
            vec![cycles, (What::Instructions, Encoding::INSTRUCTIONS)],
            vec![
                cycles,
                (What::NodeReads, Encoding::NODE_READS),
                (What::NodeReadMisses, Encoding::NODE_READ_MISSES),
            ],
        ],
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use homeostat_kernel::perf::GROUP_EVENTS_MAX;

    fn tree(files: &[(&str, &str)]) -> (tempfile::TempDir, Root) {
        let directory = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = directory.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        let root = Root::new(directory.path());
        (directory, root)
    }

    #[test]
    fn encodings_are_those_of_the_published_lists() {
        // perf list --details cycle_activity.stalls_l3_miss: cpu/event=0xa3,umask=0x6,cmask=0x6/
        assert_eq!(x86(4, 0xA3, 0x06, 6).config, 0x0600_06A3);
        // Twelve bits of event number, the upper four at bit 32: de_no_dispatch_per_slot.backend_stalls is 0x1a0, 0x1e.
        assert_eq!(x86(4, 0x1A0, 0x1E, 0).config, 0x1_0000_1EA0);
        let all = offcore(4, 0x2A, 0x3F_3FC0_4477);
        assert_eq!((all.config, all.config1), (0x12A, 0x3F_3FC0_4477));
    }

    #[test]
    fn every_set_begins_its_groups_with_cycles_and_fits() {
        let mut sets: Vec<EventSet> = [0x55, 0x9E, 0x6A, 0x8F]
            .iter()
            .filter_map(|m| intel(*m, 4))
            .collect();
        sets.extend(
            [(0x17, 0x31), (0x19, 0x01), (0x19, 0x11), (0x1A, 0x02)].map(|(f, m)| amd(f, m).unwrap()),
        );
        sets.push(generic());
        assert_eq!(sets.len(), 9);
        for set in &sets {
            assert!(set.counts(What::Instructions), "{}", set.name);
            for group in &set.groups {
                assert_eq!(group.first().map(|g| g.0), Some(What::Cycles), "{}", set.name);
                // Six general counters on AMD, four beside the fixed ones of cycles and instructions on Intel.
                let general = group
                    .iter()
                    .filter(|(w, _)| !matches!(w, What::Cycles | What::Instructions))
                    .count();
                assert!((1..=GROUP_EVENTS_MAX).contains(&group.len()));
                assert!(
                    general <= if set.name.starts_with("AMD") { 5 } else { 3 },
                    "{}",
                    set.name
                );
                let mut whats: Vec<What> = group.iter().map(|g| g.0).collect();
                whats.sort();
                whats.dedup();
                assert_eq!(whats.len(), group.len(), "{}: the same twice", set.name);
            }
        }
        assert!(intel(0x3F, 4).is_none() && amd(0x17, 0x01).is_none() && amd(0x15, 2).is_none());
    }

    #[test]
    fn hybrid_processors_are_counted_on_their_performance_cores() {
        let (_keep, root) = tree(&[
            (
                "proc/cpuinfo",
                "vendor_id : GenuineIntel\ncpu family : 6\nmodel : 143\nflags : fpu\n",
            ),
            ("sys/bus/event_source/devices/cpu_core/type", "10\n"),
        ]);
        let set = EventSet::of(&root);
        assert!(set.groups.iter().flatten().all(|(_, e)| e.source == 10));
    }

    #[test]
    fn arm_is_read_from_the_names_of_its_driver_and_unknown_processors_are_generic() {
        let base = "sys/bus/event_source/devices/armv8_pmuv3_0";
        let (_keep, root) = tree(&[
            ("proc/cpuinfo", "CPU implementer : 0x41\nCPU part : 0xd40\n"),
            (&format!("{base}/type"), "8\n"),
            (&format!("{base}/events/cpu_cycles"), "event=0x0011\n"),
            (&format!("{base}/events/inst_retired"), "event=0x0008\n"),
            (&format!("{base}/events/stall_backend_mem"), "event=0x4005\n"),
            (&format!("{base}/events/remote_access"), "rubbish\n"),
        ]);
        let set = EventSet::of(&root);
        assert!(set.counts(What::BackendMemoryStall) && !set.counts(What::FromFarMemory));
        assert_eq!(set.groups.len(), 1);
        let (_keep, root) = tree(&[]);
        assert_eq!(EventSet::of(&root), generic());
    }
}
