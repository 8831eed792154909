//! The programs and machines of the published results by name, and where each of their numbers comes from.
//!
//! The numbers are data, so that the published table can print, beside each reproduced result, which of them were given
//! by the source, which were fitted to results, and which are assumed.

use crate::hardware::{Chase, Generation, Profile, Spin};
use crate::layout::MACHINES;
use homeostat_model::Bytes;
use serde::Serialize;

/// How a number came to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Origin {
    /// Stated by the published source.
    Given,
    /// Derived by hand from figures of the source.
    Read,
    /// Chosen so that published results come out.
    Fitted,
    /// From judgement; nothing published speaks for or against it.
    Assumed,
}

impl Origin {
    /// As the table prints it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Given => "given",
            Self::Read => "read",
            Self::Fitted => "fitted",
            Self::Assumed => "assumed",
        }
    }
}

/// One number of the model.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Figure {
    /// Whose: a machine generation, a machine, or a program.
    pub of: String,
    /// What.
    pub symbol: &'static str,
    /// How much.
    pub value: f64,
    /// In what; empty for a ratio.
    pub unit: &'static str,
    /// How it came to be.
    pub origin: Origin,
    /// From where, or from which results.
    pub source: &'static str,
}

/// Fitted jointly to the database rows: exposed misses of the last-level cache per 1000 instructions.
const DATABASE_M3: f64 = 0.892_187_681_789_152_8;
/// Lines taken from other caches.
const DATABASE_MX: f64 = 0.291_731_667_807_146_43;
/// TLB misses.
const DATABASE_MT: f64 = 0.486_995_420_165_673_4;
/// The process-based database against the threaded one.
const PROCESS_SCALE: f64 = 0.546_966_812_041_214_7;
/// Distant interventions of P8 after cache affinity; evenly spread they would be one half.
const DISTANT_AFTER: f64 = 0.137_279_609_296_843_6;

/// Symbol, value, unit, origin, source.
type Entry = (
    &'static str,
    fn(&Profile) -> f64,
    &'static str,
    Origin,
    &'static str,
);

struct Named {
    name: &'static str,
    rows: &'static str,
    build: fn(&mut Profile),
    figures: &'static [Entry],
}

use Origin::{Assumed, Fitted, Given, Read};
const PER_1000: &str = "per 1000 instructions";
const JOINT: &str = "P1, P8, P9, P10, P11, P12 jointly";

static PROFILES: &[Named] = &[
    Named {
        name: "oltp",
        rows: "P1 P2 P3 P8 P9 P10 P12b",
        build: |p| {
            (p.m3, p.mx, p.mt) = (DATABASE_M3, DATABASE_MX, DATABASE_MT);
            p.kin = 1.0 - DISTANT_AFTER / 0.5;
            p.hot = Bytes(170_000_000_000);
        },
        figures: &[
            ("m3", |p| p.m3, PER_1000, Fitted, JOINT),
            ("mx", |p| p.mx, PER_1000, Fitted, JOINT),
            ("mt", |p| p.mt, PER_1000, Fitted, JOINT),
            ("kin", |p| p.kin, "", Fitted, "P8 affinity (3.26 %)"),
            (
                "hot",
                |p| p.hot.0 as f64,
                "B",
                Given,
                "P8: buffer pool of 170 GB; 87 GB in P1 (assumed)",
            ),
        ],
    },
    Named {
        name: "process-database",
        rows: "P11 P12",
        build: |p| {
            (p.m3, p.mx, p.mt) = (
                DATABASE_M3 * PROCESS_SCALE,
                DATABASE_MX * PROCESS_SCALE,
                DATABASE_MT * PROCESS_SCALE,
            );
            p.hot = Bytes(90_000_000_000);
        },
        figures: &[
            (
                "m3",
                |p| p.m3,
                PER_1000,
                Fitted,
                "one factor .547 on the database's three rates, P11 and P12",
            ),
            ("mx", |p| p.mx, PER_1000, Fitted, "as m3"),
            ("mt", |p| p.mt, PER_1000, Fitted, "as m3"),
            ("hot", |p| p.hot.0 as f64, "B", Given, "P11: 90 GB; 40 GB in P12"),
        ],
    },
    Named {
        name: "process-database-60",
        rows: "P11 at 60 % busy",
        build: |p| {
            (p.m3, p.mx, p.mt) = (
                DATABASE_M3 * PROCESS_SCALE,
                DATABASE_MX * PROCESS_SCALE,
                DATABASE_MT * PROCESS_SCALE,
            );
            p.cpu_share = 0.511_458_687_040_594;
            p.hot = Bytes(90_000_000_000);
        },
        figures: &[(
            "cpu_share",
            |p| p.cpu_share,
            "",
            Fitted,
            "P11 at 60 % busy (4.3 %); .40 to .62 fit",
        )],
    },
    Named {
        name: "oracle-oltp",
        rows: "P16",
        build: |p| {
            (p.m3, p.mx, p.mt) = (2.461_397_355_920_834, DATABASE_MX, 0.0);
            // 7.414 cycles before and 4.855 after: 1.236 times the instructions.
            p.spin = Some(Spin {
                reference: 7.413_824_762_72,
                exponent: 0.500_6,
            });
        },
        figures: &[
            ("m3", |p| p.m3, PER_1000, Fitted, "P16 CPI 7.5 and 4.8"),
            ("mx", |p| p.mx, PER_1000, Assumed, "taken from the other database"),
            (
                "spin exponent",
                |p| p.spin.map_or(0.0, |s| s.exponent),
                "",
                Fitted,
                "P16 5100 to 6300 TPS: 1.236 times the instructions per transaction",
            ),
        ],
    },
    Named {
        name: "specjbb",
        rows: "P5",
        build: |p| {
            p.m3 = 1.574_808_298_786_042_1;
            p.several_instances = true;
            p.hot = Bytes(8 << 30);
        },
        figures: &[
            (
                "m3",
                |p| p.m3,
                PER_1000,
                Fitted,
                "P5: one number for +24 and +42 %",
            ),
            ("hot", |p| p.hot.0 as f64, "B", Given, "8 GB per JVM"),
        ],
    },
    Named {
        name: "daytrader",
        rows: "P6",
        build: |p| {
            p.m3 = 2.301_915_689_571_562_7;
            p.several_instances = true;
            p.hot = Bytes(13 << 30);
        },
        figures: &[
            (
                "m3",
                |p| p.m3,
                PER_1000,
                Fitted,
                "P6: one number for +36 and +52 %",
            ),
            (
                "hot",
                |p| p.hot.0 as f64,
                "B",
                Given,
                "13 GB of heap per instance",
            ),
        ],
    },
    Named {
        name: "daytrader-17",
        rows: "P7",
        build: |p| {
            p.m3 = 2.301_915_689_571_562_7;
            p.several_instances = true;
            p.cpu_share = 0.056_776;
            p.hot = Bytes(13 << 30);
        },
        figures: &[(
            "cpu_share",
            |p| p.cpu_share,
            "",
            Fitted,
            "P7: -5 % when bound to one core per instance, with threads that collide there by chance",
        )],
    },
    Named {
        name: "tradelite",
        rows: "P13",
        build: |p| {
            (p.m3, p.mx) = (2.65, DATABASE_MX);
            p.several_instances = true;
        },
        figures: &[
            (
                "m3",
                |p| p.m3,
                PER_1000,
                Fitted,
                "P13: at least 2.42 for 60 %, 2.65 for 65 % more capacity",
            ),
            ("mx", |p| p.mx, PER_1000, Assumed, "taken from the database"),
        ],
    },
    Named {
        name: "latency",
        rows: "P14 P15",
        build: |p| {
            p.b = 0.0;
            p.several_instances = true;
            p.instructions_per_unit = 16_777_216.0;
            p.hot = Bytes(16 << 30);
            p.chase = Some(Chase {
                miss_share: 0.669_507_540_661_444_4,
                stride: Bytes(1024),
                hit_ns: 8.0,
                stride_gbps: 27.504_480_779_365_643,
            });
        },
        figures: &[
            (
                "miss_share",
                |p| p.chase.map_or(0.0, |c| c.miss_share),
                "of loads",
                Fitted,
                "P14, five numbers",
            ),
            (
                "stride_gbps",
                |p| p.chase.map_or(0.0, |c| c.stride_gbps),
                "GB/s",
                Fitted,
                "P14 latency 170 ns",
            ),
            ("hit_ns", |p| p.chase.map_or(0.0, |c| c.hit_ns), "ns", Assumed, ""),
            (
                "loads per transaction",
                |p| p.instructions_per_unit,
                "",
                Read,
                "one lap of 16 GiB in steps of 1 KiB",
            ),
        ],
    },
    Named {
        name: "sdet",
        rows: "P4",
        build: |p| p.m3 = 0.0,
        figures: &[(
            "m3",
            |p| p.m3,
            PER_1000,
            Assumed,
            "short processes: never eligible, nothing to fit",
        )],
    },
    Named {
        name: "stream",
        rows: "",
        build: |p| {
            // Prefetch that is worth its traffic: 85 % of the misses covered, 95 % of the fetched lines used.
            p.m3 = 8.0;
            p.prefetch_covered = 0.85;
            p.prefetch_lines = 0.85 / 0.95 / 0.15;
        },
        figures: &[(
            "m3",
            |p| p.m3,
            PER_1000,
            Assumed,
            "machine-model B.3: counter-case for prefetch",
        )],
    },
    Named {
        name: "scattered",
        rows: "",
        build: |p| {
            // Prefetch that is not: 10 % covered, 10 % used.
            p.m3 = 4.0;
            p.prefetch_covered = 0.10;
            p.prefetch_lines = 1.0 / 0.9;
        },
        figures: &[(
            "m3",
            |p| p.m3,
            PER_1000,
            Assumed,
            "machine-model B.3: gain case for prefetch",
        )],
    },
    Named {
        name: "compute",
        rows: "",
        build: |p| p.m3 = 0.02,
        figures: &[("m3", |p| p.m3, PER_1000, Assumed, "hardly touches memory")],
    },
];

/// Names that [`profile`] knows.
pub fn names() -> Vec<&'static str> {
    PROFILES.iter().map(|p| p.name).collect()
}

/// The program of that name; `None` when there is none (see [`names`]).
pub fn profile(name: &str) -> Option<Profile> {
    let named = PROFILES.iter().find(|p| p.name == name)?;
    let mut profile = Profile::new(named.name, 0.0, 0.0, 0.0);
    (named.build)(&mut profile);
    Some(profile)
}

/// For which published rows a program or machine is made, as `P1 P2`; empty when for none.
pub fn rows(name: &str) -> &'static str {
    let program = PROFILES.iter().find(|p| p.name == name).map(|p| p.rows);
    program
        .or_else(|| MACHINES.iter().find(|m| m.name == name).map(|m| m.rows))
        .unwrap_or("")
}

/// What is known and what is assumed of a machine, in words; empty when there is no such machine.
pub fn machine_status(name: &str) -> &'static str {
    MACHINES.iter().find(|m| m.name == name).map_or("", |m| m.status)
}

/// Every number of the model that is not a law of arithmetic, with its source: the constants of each generation, then
/// the programs, then the machines.
pub fn figures() -> Vec<Figure> {
    let mut all = Vec::new();
    for generation in [Generation::Power7, Generation::Power7Plus, Generation::X86] {
        constants(generation, &mut all);
    }
    for named in PROFILES {
        if let Some(profile) = profile(named.name) {
            for (symbol, value, unit, origin, source) in named.figures {
                let (of, value) = (named.name.to_owned(), value(&profile));
                all.push(Figure {
                    of,
                    symbol,
                    value,
                    unit,
                    origin: *origin,
                    source,
                });
            }
            if profile.chase.is_none() {
                let (of, value) = (named.name.to_owned(), profile.b);
                all.push(Figure {
                    of,
                    symbol: "b",
                    value,
                    unit: "cycles per instruction",
                    origin: Assumed,
                    source: "scale: the same for every program",
                });
            }
        }
    }
    for machine in MACHINES {
        let layout = machine.layout();
        for (symbol, value, unit) in [
            ("clock", machine.ghz, "GHz"),
            ("chips", layout.chips.len() as f64, ""),
            ("cores", f64::from(layout.cores()), ""),
        ] {
            // A machine's status says in words which of these are given; what is not all given counts as assumed.
            let origin = if machine.status.contains("assumed") {
                Assumed
            } else {
                Given
            };
            let of = machine.name.to_owned();
            all.push(Figure {
                of,
                symbol,
                value,
                unit,
                origin,
                source: machine.status,
            });
        }
    }
    all
}

fn constants(generation: Generation, all: &mut Vec<Figure>) {
    let c = generation.constants();
    let mut add = |symbol, value, unit, origin, source| {
        all.push(Figure {
            of: generation.name().to_owned(),
            symbol,
            value,
            unit,
            origin,
            source,
        });
    };
    const X86_SOURCE: &str = "machine-model B.2, column x86";
    match generation {
        Generation::Power7 => {
            add("line", c.line, "B", Given, "");
            add("L3", c.cache_bytes, "B per chip", Given, "");
            add("local", c.local_ns, "ns", Assumed, "");
            add("near", c.near_ns, "ns", Assumed, "");
            add(
                "distant",
                c.far_ns,
                "ns",
                Assumed,
                "340 to 375 fit P14 about equally, 375 best",
            );
            add("line, same chip", c.line_local_ns, "ns", Assumed, "");
            add("walk, table in cache", c.walk_ns, "ns", Assumed, "");
            add("covered by prefetch", c.covered_ns, "ns", Assumed, "");
            add("memory", c.memory_gbps, "GB/s per node", Assumed, "");
            add("memory service", c.memory_service_ns, "ns", Assumed, "");
            add(
                "near link",
                c.near_gbps,
                "GB/s per direction",
                Fitted,
                "P5 and P6; 22.4 raw in a vendor manual",
            );
            add(
                "distant link",
                c.far_gbps,
                "GB/s per node",
                Fitted,
                "P14; 41 % of the raw figure in a vendor manual",
            );
            add(
                "burst",
                c.near_gbps * c.near_service_ns,
                "B",
                Assumed,
                "three lines",
            );
            add(
                "tau",
                c.tau,
                "lines per exposed miss",
                Fitted,
                "P8, by grid; 3 to 4 works",
            );
            add(
                "alpha",
                c.alpha,
                "",
                Read,
                "P14; used for P5, P6, P13 and the cache of POWER7+",
            );
            add(
                "beta",
                c.table_cache_share,
                "of the L3",
                Fitted,
                "chosen from .25 and .5",
            );
            add("theta", c.theta, "", Assumed, "");
            add("E", c.tlb_small, "translations per core", Given, "");
            add(
                "prefetch lines",
                0.754,
                "per demand miss",
                Fitted,
                "P3: 43 % of the traffic",
            );
            add(
                "prefetch residue",
                c.prefetch_residue,
                "",
                Fitted,
                "P3: 3 % of the traffic",
            );
            add(
                "cov",
                0.02,
                "of demand misses",
                Assumed,
                "\"small increase of demand misses\"; .05 equally good",
            );
        }
        Generation::Power7Plus => {
            add(
                "L3",
                c.cache_bytes,
                "B per chip",
                Given,
                "all else as POWER7; assumed for the four-core chip",
            );
        }
        Generation::X86 => {
            add("line", c.line, "B", Given, "");
            add("L3", c.cache_bytes, "B per chip", Assumed, "");
            add("local", c.local_ns, "ns", Assumed, X86_SOURCE);
            add("near", c.near_ns, "ns", Assumed, X86_SOURCE);
            add("distant", c.far_ns, "ns", Assumed, "");
            add("line, same chip", c.line_local_ns, "ns", Assumed, X86_SOURCE);
            add("line, same node", c.line_node_ns, "ns", Assumed, "");
            add("line, near", c.line_near_ns, "ns", Assumed, X86_SOURCE);
            add("line, distant", c.line_far_ns, "ns", Assumed, "");
            add(
                "walk, table in cache",
                c.walk_ns,
                "ns",
                Assumed,
                "35 cycles, machine-model B.2",
            );
            add("memory", c.memory_gbps, "GB/s per node", Assumed, X86_SOURCE);
            add(
                "near link",
                c.near_gbps,
                "GB/s per direction",
                Assumed,
                X86_SOURCE,
            );
            add("distant link", c.far_gbps, "GB/s per node", Assumed, "");
            add(
                "E, small pages",
                c.tlb_small,
                "translations per core",
                Assumed,
                X86_SOURCE,
            );
            add(
                "E, large pages",
                c.tlb_large,
                "translations per core",
                Assumed,
                X86_SOURCE,
            );
            add(
                "page table",
                c.table_bytes,
                "B per page",
                Given,
                "radix tables: eight bytes per entry",
            );
            add("alpha, beta, theta, tau", c.alpha, "", Assumed, "as POWER7");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout;

    #[test]
    fn every_program_is_sound_and_its_figures_are_its_numbers() {
        for name in names() {
            let p = profile(name).unwrap();
            assert_eq!(p.name, name);
            for number in [p.b, p.m3, p.mx, p.mt, p.prefetch_lines, p.instructions_per_unit] {
                assert!(number.is_finite() && number >= 0.0, "{name}");
            }
            for part in [p.prefetch_covered, p.kin, p.cpu_share] {
                assert!((0.0..=1.0).contains(&part), "{name}");
            }
            let written = serde_json::to_string(&p).unwrap();
            assert_eq!(serde_json::from_str::<Profile>(&written).unwrap(), p);
        }
        assert!(profile("nonesuch").is_none());
        let m3 = figures()
            .into_iter()
            .find(|f| f.of == "specjbb" && f.symbol == "m3")
            .unwrap();
        assert_eq!(m3.value, profile("specjbb").unwrap().m3);
    }

    #[test]
    fn every_published_row_has_a_machine_and_a_program_and_every_figure_a_source_or_is_assumed_or_given() {
        let has =
            |row: &str, names: &[&str]| names.iter().any(|n| rows(n).split([' ', ',']).any(|r| r == row));
        for row in [
            "P1", "P2", "P3", "P4", "P5", "P6", "P7", "P8", "P9", "P10", "P11", "P12a", "P12b", "P13", "P14",
            "P15", "P16",
        ] {
            assert!(has(row, &layout::names()), "no machine for {row}");
            let program = if row == "P12a" { "P12" } else { row };
            assert!(has(program, &names()), "no program for {row}");
        }
        for f in figures() {
            assert!(f.value.is_finite(), "{f:?}");
            assert!(
                !f.source.is_empty() || matches!(f.origin, Assumed | Given),
                "{f:?}"
            );
        }
    }

    #[test]
    fn spinning_takes_what_the_published_throughput_leaves() {
        let p = profile("oracle-oltp").unwrap();
        let ratio = p.instructions(4.855_15) / p.instructions(7.413_82);
        assert!((ratio - 1.2361).abs() < 1e-3, "{ratio}");
    }
}
