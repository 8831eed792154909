use super::*;
use crate::layout::{Chip, Layout};
use crate::profiles::profile;
use crate::scheduler::{SchedulerKind, collisions, running_at};
use proptest::prelude::*;

/// Effective number of places among which shares are spread: 1 = all in one, n = evenly over n.
fn span(shares: &[f64]) -> f64 {
    let sum: f64 = shares.iter().sum();
    let squares: f64 = shares.iter().map(|s| s * s).sum();
    if squares > 0.0 { sum * sum / squares } else { 1.0 }
}

/// Gain in throughput when a thread needs 1/(1 + `cpi_gain`) of the cycles and `cpu_share` of its response time is
/// CPU time (9).
fn throughput_gain(cpi_gain: f64, cpu_share: f64) -> f64 {
    1.0 / (1.0 - cpu_share + cpu_share / (1.0 + cpi_gain)) - 1.0
}

/// Change of the response time of a kind of transaction that waits `stall_weight` times as much for memory as the mean
/// one, when the waiting cycles per instruction go from `before` to `after` (published for P8: by transaction type).
fn response_change(base: f64, before: f64, after: f64, stall_weight: f64) -> f64 {
    (base + stall_weight * after) / (base + stall_weight * before) - 1.0
}

/// Work per second that is done when `offered` arrives and the machine can do `capacity` (9).
fn capacity_limited(offered: f64, capacity: f64) -> f64 {
    offered.min(capacity)
}

/// Boards of like nodes of one chip each.
fn boards(generation: Generation, ghz: f64, boards: u32, nodes: u32, cores: u32) -> Layout {
    Layout {
        name: "test".to_owned(),
        generation,
        ghz,
        threads_per_core: 4,
        chips: (0..boards * nodes)
            .map(|n| Chip {
                cores,
                node: n,
                board: n / nodes,
            })
            .collect(),
        node_memory: vec![Bytes(64 << 30); (boards * nodes) as usize],
        small_page: Bytes::from_kib(64),
        large_page: Bytes::from_mib(16),
        shared_partition: false,
        split_shared: false,
    }
}
const fn d(local: f64, near: f64, far: f64) -> Distances {
    Distances { local, near, far }
}
/// A workload on all cores of all chips, `k` threads on each, with stated distances.
fn everywhere(layout: &Layout, profile: Profile, k: f64, memory: Distances, lines: Distances) -> Demand {
    let running = layout.chips.iter().map(|c| f64::from(c.cores) * k).collect();
    Demand {
        threads_per_core: k,
        reach: Some(Reach { memory, lines }),
        ..Demand::new(profile, running, vec![])
    }
}
fn one(layout: &Layout, demand: &Demand) -> (Rate, Solution) {
    let solution = solve(layout, std::slice::from_ref(demand), &mut Warm::default());
    assert!(solution.converged);
    (solution.rates[0], solution)
}
fn cpi(layout: &Layout, demand: &Demand) -> f64 {
    one(layout, demand).0.cpi
}
#[track_caller]
fn close(value: f64, oracle: f64, relative: f64) {
    assert!(
        (value / oracle - 1.0).abs() <= relative,
        "{value} is not {oracle} within {relative}"
    );
}
#[track_caller]
fn points(value: f64, oracle: f64) {
    assert!(
        (value - oracle).abs() <= 2e-4,
        "{value} is not {oracle} within .02 percentage points"
    );
}
fn program(name: &str) -> Profile {
    profile(name).unwrap()
}

const ONE_OF_FOUR: Distances = d(0.25, 0.75, 0.0);
const TWO_BY_TWO: Distances = d(0.25, 0.25, 0.5);
const HALVES: Distances = d(0.5, 0.5, 0.0);
const FAR_HALVES: Distances = d(0.5, 0.0, 0.5);

/// Gains of large pages, of prefetch off, and of both, as relative changes of cycles per instruction.
fn gains(layout: &Layout, demand: &Demand) -> [f64; 3] {
    let base = cpi(layout, demand);
    let large = Demand {
        large_share: 1.0,
        ..demand.clone()
    };
    let quiet = Demand {
        prefetch: 0.0,
        ..demand.clone()
    };
    let both = Demand {
        large_share: 1.0,
        prefetch: 0.0,
        ..demand.clone()
    };
    [large, quiet, both].map(|other| base / cpi(layout, &other) - 1.0)
}

// ---- the oracles of model-fit 8, with more digits from the reference program

#[test]
fn oracle_one_the_database_on_four_chips() {
    let layout = boards(Generation::Power7Plus, 3.72, 1, 4, 8);
    let demand = everywhere(
        &layout,
        program("oltp"),
        running_at(0.9, 4.0),
        ONE_OF_FOUR,
        ONE_OF_FOUR,
    );
    let (rate, machine) = one(&layout, &demand);
    close(rate.cpi, 3.160_766_465_8, 1e-9);
    close(rate.stall, 0.846_480_751_5, 1e-9);
    close(rate.latency_ns, 204.246_356_03, 1e-9);
    close(rate.line_ns, 117.483_709_885, 1e-9);
    close(rate.walk_ns, 160.454_920_82, 1e-9);
    close(rate.walks_cached, 0.251_319_087_5, 1e-9);
    close(rate.walks, 0.480_153_541_6, 1e-9);
    close(machine.memory_use[0], 0.123_584_790_95, 1e-9);
    close(machine.near_use[0], 0.154_936_478_53, 1e-9);
    assert_eq!(machine.far_use[0], 0.0);
    // Derived from where threads and memory are, it is the same.
    let spread = Demand {
        reach: None,
        memory: vec![1.0; 4],
        ..demand
    };
    close(cpi(&layout, &spread), rate.cpi, 1e-12);
}

#[test]
fn oracle_two_the_chase() {
    let layout = Layout::named("redbook-16").unwrap();
    let latency = program("latency");
    // Two programs of 30 threads; what is not local is distant.
    let at = |local: f64, spread: f64| {
        let reach = Some(Reach {
            memory: d(local, 0.0, 1.0 - local),
            lines: d(1.0, 0.0, 0.0),
        });
        let demand = Demand {
            spread,
            reach,
            ..Demand::new(latency.clone(), vec![30.0, 30.0], vec![])
        };
        let (rate, machine) = one(&layout, &demand);
        let per_second = 60.0 * rate.instructions_per_ns / latency.instructions_per_unit * 1e9;
        (per_second, rate, machine)
    };
    for (local, spread, tps, latency_ns, far) in [
        (0.4, 2.0, 8.896_007_594_8, 346.179_204_8, 0.823_742_507_5),
        (0.7, 1.0, 18.702_115_902, 224.545_089_24, 0.625_133_802_5),
        (1.0, 1.0, 24.799_440_544, 168.366_276_095, 0.0),
    ] {
        let (per_second, rate, machine) = at(local, spread);
        close(per_second, tps, 1e-9);
        close(rate.latency_ns, latency_ns, 1e-9);
        assert!((machine.far_use[0] - far).abs() < 1e-8);
    }
    // P15, model-fit 4.4: the way from 70 % local to all.
    for (local, tps) in [
        (0.75, 19.91),
        (0.80, 21.07),
        (0.85, 22.16),
        (0.90, 23.15),
        (0.95, 24.03),
    ] {
        close(at(local, 1.0).0, tps, 5e-4);
    }
    // The same as two workloads, each at home on one chip with seven tenths of its memory there.
    let each = |home: usize| {
        let mut running = vec![0.0; 2];
        running[home] = 30.0;
        let mut memory = vec![0.3; 2];
        memory[home] = 0.7;
        Demand::new(latency.clone(), running, memory)
    };
    let both = solve(&layout, &[each(0), each(1)], &mut Warm::default());
    for rate in &both.rates {
        close(
            30.0 * 2e9 * rate.instructions_per_ns / 16_777_216.0,
            18.702_115_902,
            1e-9,
        );
    }
}

#[test]
fn oracle_four_spread_and_contained() {
    let of = |cores: u32, memory, lines| {
        let layout = boards(Generation::Power7, 3.86, 2, 1, cores);
        one(
            &layout,
            &everywhere(&layout, program("oracle-oltp"), 4.0, memory, lines),
        )
    };
    let (before, machine) = of(4, d(0.59, 0.0, 0.41), FAR_HALVES);
    close(before.cpi, 7.413_824_762_7, 1e-9);
    close(before.latency_ns, 368.717_429_7, 1e-9);
    close(machine.far_use[0], 0.936_670_572_6, 1e-9);
    let (after, _) = of(8, d(0.998, 0.0, 0.002), d(0.998, 0.0, 0.002));
    close(after.cpi, 4.855_152_151_9, 1e-9);
    close(after.latency_ns, 130.867_412_7, 1e-9);
    // P16: 5100 to 6300 transactions, as instructions per transaction grow.
    let p = program("oracle-oltp");
    let tps = 5100.0 * before.cpi / after.cpi * p.instructions(before.cpi) / p.instructions(after.cpi);
    close(tps, 6300.0, 1e-3);
}

// ---- model-fit 4.1: the equations with the state before and after, row by row

#[test]
fn row_p1_cores_of_the_database() {
    let layout = boards(Generation::Power7, 3.86, 1, 2, 8);
    let at = |home: f64, k: f64| {
        let local = home * 0.607 + (1.0 - home) * (1.0 - 0.607);
        let lines = home * home + (1.0 - home) * (1.0 - home);
        let mut demand = everywhere(
            &layout,
            program("oltp"),
            k,
            d(local, 1.0 - local, 0.0),
            d(lines, 1.0 - lines, 0.0),
        );
        for running in &mut demand.running {
            *running *= 0.8;
        }
        demand.hot = 87e9;
        cpi(&layout, &demand)
    };
    let before = at(9.0 / 12.78, 1.0);
    close(before, 1.820_710_257_8, 1e-9);
    // Cores on the first domain until it is full, the rest on the other: the reference's iteration.
    let (mut home, mut cores) = (0.934, 0.0);
    for _ in 0..40 {
        let alone = at(home, 1.0);
        let used = 12.78 * alone / before;
        let pair = 2.0 * alone / at(home, 2.0);
        let room = 10.0 * 0.89 * (1.0 - 0.824 + 0.824 * pair);
        let rest = (used - room).max(0.0);
        home = used.min(room) / used;
        cores = 8.9 * (used / room).min(1.0) + rest;
    }
    close(cores, 10.0108, 1e-3);
    assert!(
        (cores / 9.7 - 1.0).abs() <= 0.05,
        "published 9.7, tolerance 5 %: {cores}"
    );
}

#[test]
fn row_p3_share_of_prefetch_in_the_traffic() {
    let layout = boards(Generation::Power7, 3.86, 1, 2, 8);
    let mut demand = everywhere(&layout, program("oltp"), 1.0, HALVES, HALVES);
    let (on, _) = one(&layout, &demand);
    demand.prefetch = 0.0;
    let (off, _) = one(&layout, &demand);
    assert!((on.counters.prefetch_share - 0.43).abs() < 0.005);
    assert!((off.counters.prefetch_share - 0.03).abs() < 0.005);
    assert!(off.counters.prefetch_useful_share < on.counters.prefetch_useful_share);
}

#[test]
fn rows_p5_and_p6_several_instances() {
    // Every instance on a chip of its own with 97 % of its memory there, against spread over all.
    let gain = |name: &str, chips: u32, cores: u32, k: f64, before: Distances| {
        let layout = boards(Generation::Power7, 3.55, 1, chips, cores);
        let spread = Demand {
            hot: 0.0,
            spread: f64::from(chips),
            ..everywhere(&layout, program(name), k, before, before)
        };
        let placed = d(0.97, 0.03, 0.0);
        let after = Demand {
            hot: 0.0,
            ..everywhere(&layout, program(name), k, placed, placed)
        };
        cpi(&layout, &spread) / cpi(&layout, &after) - 1.0
    };
    points(gain("specjbb", 2, 8, 4.0, HALVES), 0.271_67);
    points(gain("specjbb", 4, 8, 4.0, ONE_OF_FOUR), 0.388_33);
    let k = running_at(0.8, 4.0);
    points(gain("daytrader", 2, 4, k, HALVES), 0.395_01);
    points(gain("daytrader", 2, 8, k, HALVES), 0.484_99);
    // The same from where instances and memory are, without stating distances.
    let layout = boards(Generation::Power7, 3.55, 1, 2, 8);
    let spread = Demand {
        spread: span(&[1.0, 1.0]),
        threads_per_core: k,
        ..Demand::new(program("daytrader"), vec![8.0 * k; 2], vec![1.0, 1.0])
    };
    let placed = Demand {
        spread: 1.0,
        aligned: 0.94,
        ..spread.clone()
    };
    points(cpi(&layout, &spread) / cpi(&layout, &placed) - 1.0, 0.484_99);
}

#[test]
fn row_p7_nothing_to_gain_and_something_to_lose() {
    // The reference holds the number of running threads, so that its CPU share of the response time is .1059; the
    // world closes the loop (threads that collide are more at a time) and its profile has less.
    let layout = boards(Generation::Power7, 3.55, 1, 2, 8);
    let p = Profile {
        cpu_share: 0.1059,
        ..program("daytrader-17")
    };
    // By default a thread finds its memory at home unless the machine is busy: 1 - U (1 - 1/D).
    let at = |k: f64, aligned: f64| {
        let local = aligned + (1.0 - aligned) / 2.0;
        let spread = span(&[local, 1.0 - local]);
        Demand {
            threads_per_core: k,
            aligned,
            spread,
            ..Demand::new(p.clone(), vec![8.0 * 0.2 * k; 2], vec![1.0, 1.0])
        }
    };
    let gain = cpi(&layout, &at(1.0, 0.83))
        / cpi(
            &layout,
            &Demand {
                spread: 1.0,
                ..at(1.0, 0.94)
            },
        )
        - 1.0;
    points(gain, 0.072_275);
    points(throughput_gain(gain, p.cpu_share), 0.007_2);
    // Bound to one core per instance: 1.088 threads on average that collide.
    let speeds: Vec<f64> = (1..=4)
        .map(|k| 1.0 / cpi(&layout, &at(f64::from(k), 0.83)))
        .collect();
    let slow = collisions(1.088, 1, &speeds);
    close(slow, 1.497_31, 1e-3);
    points(throughput_gain(1.0 / slow - 1.0, p.cpu_share), -0.05);
}

#[test]
fn row_p8_affinity_large_pages_and_prefetch() {
    let layout = boards(Generation::Power7, 4.0, 2, 2, 8);
    let k = running_at(0.85, 4.0);
    let before = everywhere(&layout, program("oltp"), k, TWO_BY_TWO, TWO_BY_TWO);
    let grouped = Demand {
        reach: None,
        memory: vec![1.0; 4],
        grouped: 1.0,
        ..before.clone()
    };
    let affinity = cpi(&layout, &before) / cpi(&layout, &grouped) - 1.0;
    points(affinity, 0.032_592);
    let [large, quiet, both] = gains(&layout, &grouped);
    points(large, 0.072_4);
    points(quiet, 0.084_26);
    points(both * (1.0 + affinity), 0.231_703);
    // Response times by kind of transaction: .4 to very many times the mean wait.
    let base = 0.9 * k;
    let after = Demand {
        large_share: 1.0,
        prefetch: 0.0,
        ..grouped
    };
    let (s0, s1) = (cpi(&layout, &before) - base, cpi(&layout, &after) - base);
    for (weight, published) in [(0.4, -0.122), (1.0, -0.209), (5.0, -0.337), (1e6, -0.399)] {
        let change = response_change(base, s0, s1, weight);
        assert!((change - published).abs() < 1e-3, "{weight}: {change}");
    }
}

#[test]
fn rows_p9_p10_p11_large_pages_and_prefetch() {
    let p9 = boards(Generation::Power7Plus, 3.72, 1, 4, 8);
    let k = running_at(0.9, 4.0);
    let [large, quiet, both] = gains(
        &p9,
        &everywhere(&p9, program("oltp"), k, ONE_OF_FOUR, ONE_OF_FOUR),
    );
    points(large, 0.083_548);
    points(quiet, -0.000_932);
    points(both, 0.081_949);

    // The reference counts two near peers for P10, and one link per pair for the state before as well.
    let p10 = boards(Generation::Power7Plus, 3.72, 2, 3, 8);
    let home = d(0.25, 0.72, 0.03);
    let before = everywhere(&p10, program("oltp"), k, TWO_BY_TWO, TWO_BY_TWO);
    let after = everywhere(&p10, program("oltp"), k, home, home);
    let affinity = cpi(&p10, &before) / cpi(&p10, &after) - 1.0;
    points(affinity, 0.137_554);
    points(gains(&p10, &after)[2] * (1.0 + affinity), 0.095_557);

    let p11 = boards(Generation::Power7Plus, 3.7, 1, 2, 8);
    let at = |used: f64| {
        everywhere(
            &p11,
            program("process-database"),
            running_at(used, 4.0),
            HALVES,
            HALVES,
        )
    };
    points(gains(&p11, &at(0.9))[2], 0.037_723);
    let busy_60 = gains(&p11, &at(0.6))[2];
    points(
        throughput_gain(busy_60, program("process-database-60").cpu_share),
        0.043,
    );
}

#[test]
fn row_p12_two_partitions_each() {
    let k = running_at(0.8, 4.0);
    let both = |layout: &Layout, name: &str, hot: f64, memory, lines| {
        gains(
            layout,
            &Demand {
                hot,
                ..everywhere(layout, program(name), k, memory, lines)
            },
        )[2]
    };
    let far = boards(Generation::Power7, 3.86, 2, 1, 8);
    let near = boards(Generation::Power7, 3.86, 1, 2, 8);
    let a = both(&far, "process-database", 40e9, FAR_HALVES, FAR_HALVES);
    let b = both(&near, "process-database", 40e9, d(0.6, 0.4, 0.0), HALVES);
    points((a + b) / 2.0, 0.069_553);
    let far = boards(Generation::Power7Plus, 4.42, 2, 2, 4);
    let near = boards(Generation::Power7Plus, 4.42, 1, 4, 4);
    let a = both(&far, "oltp", 52e9, TWO_BY_TWO, TWO_BY_TWO);
    let b = both(&near, "process-database", 40e9, HALVES, ONE_OF_FOUR);
    points((a + b) / 2.0, 0.083);
}

#[test]
fn row_p13_capacity_of_tiles() {
    let layout = boards(Generation::Power7, 3.55, 1, 4, 8);
    let before = Demand {
        spread: 4.0,
        ..everywhere(&layout, program("tradelite"), 4.0, ONE_OF_FOUR, ONE_OF_FOUR)
    };
    let placed = d(0.97, 0.03, 0.0);
    let after = everywhere(&layout, program("tradelite"), 4.0, placed, placed);
    let ratio = cpi(&layout, &before) / cpi(&layout, &after);
    close(ratio, 1.650_778, 1e-4);
    let capacity = 2.0 / 1.1;
    for (offered, gain) in [(1.0, 0.0), (2.0, 0.10), (3.0, 0.65)] {
        points(
            capacity_limited(offered, 1.65 * capacity) / capacity_limited(offered, capacity) - 1.0,
            gain,
        );
    }
    points(
        capacity_limited(3.0, ratio * capacity) / capacity_limited(3.0, capacity) - 1.0,
        0.65,
    );
}

// ---- the reference's bisection, for what the rows above do not cover: one workload on like chips

fn bisection(layout: &Layout, demand: &Demand) -> f64 {
    let c = layout.constants();
    let p = &demand.profile;
    let reach = demand.reach.unwrap();
    let (m, x) = (reach.memory, reach.lines);
    let board = layout.chips[0].board;
    let peers = (layout.chips.iter().filter(|c| c.board == board).count() - 1).max(1) as f64;
    let left = if demand.prefetch > 0.5 {
        1.0
    } else {
        c.prefetch_residue
    };
    let (cov, pf) = (p.prefetch_covered * left, p.prefetch_lines * left);
    let m3 = p.m3 / 1000.0 * (c.cache_bytes / REFERENCE_CACHE).powf(-c.alpha);
    let large = demand.large_share;
    let cover = |page: Bytes| 1.0 - (c.tlb_small * page.0 as f64 / demand.hot).min(1.0).sqrt();
    let mt = p.mt / 1000.0 * ((1.0 - large) * cover(layout.small_page) + large * cover(layout.large_page));
    let table = c.table_bytes
        * demand.hot
        * ((1.0 - large) / layout.small_page.0 as f64 + large / layout.large_page.0 as f64);
    let h = (c.table_cache_share * c.cache_bytes / table).min(1.0).sqrt();
    let q = |ts: f64, r: f64| ts * r.min(0.995) / (2.0 * (1.0 - r.min(0.995)));
    let f = |v: f64| {
        let ips = demand.running[0] * layout.ghz / v;
        let tr = ips * c.line * c.tau * m3 * (1.0 - cov) * (1.0 + pf);
        let ti = ips * c.line * p.mx / 1000.0;
        let qm = q(c.memory_service_ns, tr / c.memory_gbps);
        let qn = q(
            c.near_service_ns,
            (tr * m.near + ti * x.near) / peers / c.near_gbps,
        );
        let qd = q(c.far_service_ns, (tr * m.far + ti * x.far) / c.far_gbps);
        let latency =
            m.local * (c.local_ns + qm) + m.near * (c.near_ns + qm + qn) + m.far * (c.far_ns + qm + qd);
        let line = x.local * c.line_local_ns + x.near * (c.line_near_ns + qn) + x.far * (c.line_far_ns + qd);
        let walk = h * c.walk_ns + (1.0 - h) * latency;
        let s = m3 * ((1.0 - cov) * latency + cov * c.covered_ns) + p.mx / 1000.0 * line + mt * walk;
        p.b * demand.threads_per_core + layout.ghz * s
    };
    let (mut low, mut high) = (0.05, 4000.0);
    for _ in 0..100 {
        let v = 0.5 * (low + high);
        if f(v) > v { low = v } else { high = v }
    }
    0.5 * (low + high)
}

/// (boards, nodes per board, cores, k, m3, mx, mt, shares, large pages, prefetch)
fn single() -> impl Strategy<Value = (Layout, Demand)> {
    (
        (1_u32..3, 1_u32..4, 1_u32..12, 1.0..4.0_f64),
        (0.0..6.0_f64, 0.0..2.0_f64, 0.0..2.0_f64),
        (0.1..1.0_f64, 0.0..1.0_f64, 0.0..1.0_f64),
        (0.0..1.0_f64, any::<bool>(), 1e9..3e11_f64, any::<bool>()),
    )
        .prop_map(
            |((nb, nn, cores, k), (m3, mx, mt), (l, n, f), (large_share, prefetch, hot, plus))| {
                let generation = if plus {
                    Generation::Power7Plus
                } else {
                    Generation::Power7
                };
                let layout = boards(generation, 3.7, nb, nn, cores);
                let n = if nn > 1 { n } else { 0.0 };
                let f = if nb > 1 { f } else { 0.0 };
                let sum = l + n + f;
                let shares = d(l / sum, n / sum, f / sum);
                let demand = Demand {
                    hot,
                    large_share,
                    prefetch: if prefetch { 1.0 } else { 0.0 },
                    ..everywhere(&layout, Profile::new("any", m3, mx, mt), k, shares, shares)
                };
                (layout, demand)
            },
        )
}

const SHAPES: [&str; 6] = [
    "power7-10+6",
    "power795-32",
    "x86-2s",
    "epyc-8llc",
    "epyc-2s-8llc",
    "redbook-16",
];

fn any_demand() -> impl Strategy<Value = Demand> {
    (
        (
            0.0..30.0_f64,
            0.0..3.0_f64,
            0.0..3.0_f64,
            0.0..2.0_f64,
            0.0..0.9_f64,
        ),
        proptest::collection::vec(0.0..32.0_f64, 0..8),
        proptest::collection::vec(0.0..1.0_f64, 0..8),
        (
            1.0..4.0_f64,
            0.0..3e11_f64,
            0.0..1.0_f64,
            0.0..1.0_f64,
            1.0..8.0_f64,
            0.0..1.0_f64,
            0.0..1.0_f64,
        ),
        any::<bool>(),
    )
        .prop_map(
            |((m3, mx, mt, footprint, covered), running, memory, (k, hot, large, pf, s, a, gr), chase)| {
                let mut profile = Profile::new("any", m3, mx, mt);
                profile.footprint = footprint;
                profile.prefetch_covered = covered;
                profile.several_instances = true;
                profile.kin = 0.7;
                if chase {
                    profile.chase = program("latency").chase;
                }
                Demand {
                    threads_per_core: k,
                    hot,
                    large_share: large,
                    prefetch: pf,
                    spread: s,
                    aligned: a,
                    grouped: gr,
                    ..Demand::new(profile, running, memory)
                }
            },
        )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn for_one_workload_it_is_the_bisection((layout, demand) in single()) {
        let (rate, machine) = one(&layout, &demand);
        let highest = machine.memory_use.iter().chain(&machine.near_use).chain(&machine.far_use).fold(0.0_f64, |a, b| a.max(*b));
        prop_assert!(highest < 1.0, "a use of {} cannot last", highest);
        // Beyond this use the reference stops its queue; demand may then exceed capacity.
        if highest < 0.995 {
            let reference = bisection(&layout, &demand);
            prop_assert!((rate.cpi / reference - 1.0).abs() < 1e-9, "{} and {}", rate.cpi, reference);
        }
        let parts = rate.counters;
        let stalls = parts.memory_stall_share + parts.cache_to_cache_stall_share + parts.table_walk_share;
        prop_assert!((stalls - rate.stall / rate.cpi).abs() < 1e-9, "{} {}", stalls, rate.stall / rate.cpi);
    }

    #[test]
    fn speeds_are_finite_in_any_order_and_from_any_start(
        shape in 0..SHAPES.len(), demands in proptest::collection::vec(any_demand(), 1..10), turn in 0_usize..10
    ) {
        let layout = Layout::named(SHAPES[shape]).unwrap();
        let mut warm = Warm::default();
        let first = solve(&layout, &demands, &mut warm);
        prop_assert!(first.converged);
        for use_ in first.memory_use.iter().chain(&first.near_use).chain(&first.far_use) {
            prop_assert!((0.0..1.0).contains(use_), "use {}", use_);
        }
        for rate in &first.rates {
            prop_assert!(rate.cpi.is_finite() && rate.cpi > 0.0 && rate.instructions_per_ns > 0.0);
            prop_assert!((rate.local + rate.near + rate.far - 1.0).abs() < 1e-9);
        }
        let again = solve(&layout, &demands, &mut warm);
        let mut turned = demands.clone();
        let turn = turn % turned.len();
        turned.rotate_left(turn);
        let other = solve(&layout, &turned, &mut warm);
        for i in 0..demands.len() {
            let moved = other.rates[(i + demands.len() - turn) % demands.len()].cpi;
            prop_assert!((first.rates[i].cpi / again.rates[i].cpi - 1.0).abs() < 1e-9);
            prop_assert!((first.rates[i].cpi / moved - 1.0).abs() < 1e-9, "{} {}", first.rates[i].cpi, moved);
        }
    }

    #[test]
    fn more_local_memory_and_more_large_pages_are_never_slower(
        shape in 0..SHAPES.len(), demand in any_demand(), more in 0.0..1.0_f64
    ) {
        let layout = Layout::named(SHAPES[shape]).unwrap();
        // Like chips with like memory, so that no controller gets more than its share.
        let even = Demand { running: vec![8.0; layout.chips.len()], memory: vec![], ..demand };
        let base = cpi(&layout, &even);
        let local = Demand { aligned: even.aligned + (1.0 - even.aligned) * more, ..even.clone() };
        prop_assert!(cpi(&layout, &local) <= base * (1.0 + 1e-9));
        let large = Demand { large_share: even.large_share + (1.0 - even.large_share) * more, ..even.clone() };
        prop_assert!(cpi(&layout, &large) <= base * (1.0 + 1e-9));
    }

    #[test]
    fn a_competitor_never_makes_it_faster(
        shape in 0..SHAPES.len(), demand in any_demand(), competitor in any_demand(), copies in 1_usize..4
    ) {
        let layout = Layout::named(SHAPES[shape]).unwrap();
        // Several unlike workloads may help each other by getting in a third one's way; one and its copies cannot.
        let alone = solve(&layout, &vec![demand.clone(); copies], &mut Warm::default());
        let mut all = vec![demand; copies];
        all.push(competitor);
        let together = solve(&layout, &all, &mut Warm::default());
        for i in 0..copies {
            prop_assert!(together.rates[i].cpi >= alone.rates[i].cpi * (1.0 - 1e-9), "{} {} {} {}", together.rates[i].cpi, alone.rates[i].cpi, together.converged, alone.converged);
        }
    }
}

#[test]
fn prefetch_that_is_useful_is_worth_its_traffic_and_prefetch_that_is_not_is_none() {
    // machine-model B.3, T4: off must lose clearly in the one case and win a little in the other.
    let layout = Layout::named("power770-12a-far").unwrap();
    let at = |name: &str, prefetch: f64| {
        let demand = Demand {
            prefetch,
            threads_per_core: 4.0,
            ..Demand::new(program(name), vec![32.0; 2], vec![1.0, 1.0])
        };
        cpi(&layout, &demand)
    };
    assert!(at("stream", 0.0) > 1.1 * at("stream", 1.0));
    assert!(at("scattered", 0.0) < at("scattered", 1.0));
}

#[test]
fn crowded_caches_and_lines_between_chips_of_a_node_cost_something() {
    let layout = Layout::named("epyc-8llc").unwrap();
    let mut profile = Profile::new("p", 2.0, 0.5, 0.0);
    let apart = |n: usize| {
        let mut running = vec![0.0; 8];
        running[..n].fill(8.0 / n as f64);
        Demand::new(profile.clone(), running, vec![])
    };
    // One node: all memory is local wherever the threads are, but lines travel between its chips.
    let (packed, _) = one(&layout, &apart(1));
    let (spread, _) = one(&layout, &apart(8));
    assert_eq!((packed.local, spread.local), (1.0, 1.0));
    assert!(spread.line_ns > packed.line_ns && spread.cpi > packed.cpi);
    assert_eq!(packed.line_ns, X86.line_local_ns);
    profile.footprint = 1.0;
    let home = Demand::new(profile.clone(), vec![8.0], vec![]);
    let away = Demand::new(profile, vec![0.0, 8.0], vec![]);
    let shared = solve(&layout, &[home.clone(), home.clone()], &mut Warm::default()).rates[0].misses;
    let apart = solve(&layout, &[home, away], &mut Warm::default()).rates[0].misses;
    close(shared / apart, 1.5_f64.powf(0.47), 1e-9);
}

#[test]
fn copying_takes_its_part_of_links_and_controllers() {
    // Two distant chips whose links are busy: the chase of P14.
    let layout = Layout::named("redbook-16").unwrap();
    let demand = Demand {
        spread: 2.0,
        ..Demand::new(program("latency"), vec![30.0, 30.0], vec![1.0, 1.0])
    };
    let at = |copies: &[Copying]| {
        let solution = solve_with(
            &layout,
            std::slice::from_ref(&demand),
            copies,
            &mut Warm::default(),
        );
        assert!(solution.converged, "{copies:?}");
        solution
    };
    let copy = |gbps| Copying { from: 1, to: 0, gbps };
    let quiet = at(&[]);
    assert_eq!(
        quiet,
        solve(&layout, std::slice::from_ref(&demand), &mut Warm::default())
    );
    let busy = at(&[copy(1.0)]);
    // The link of the node that it goes to, and both memories; what the program gets less of them, it asks less.
    assert!(busy.far_use[0] > quiet.far_use[0] && busy.far_use[1] < quiet.far_use[1]);
    assert!(busy.rates[0].cpi > 1.01 * quiet.rates[0].cpi);
    assert!(busy.rates[0].latency_ns > quiet.rates[0].latency_ns);
    assert!(busy.rates[0].counters.busiest_link > quiet.rates[0].counters.busiest_link);
    // More costs more, and two copies are as one of both together; but it never takes more than half.
    assert!(at(&[copy(2.0)]).rates[0].cpi > busy.rates[0].cpi);
    close(at(&[copy(0.5), copy(0.5)]).rates[0].cpi, busy.rates[0].cpi, 1e-9);
    let most = at(&[copy(1e6)]);
    close(
        most.rates[0].cpi,
        at(&[copy(100.0), copy(100.0)]).rates[0].cpi,
        1e-9,
    );
    assert!(most.far_use[0] < 1.0);
    // Nothing runs but the copier.
    let alone = solve_with(&layout, &[], &[copy(1.0)], &mut Warm::default());
    assert!(alone.rates.is_empty() && alone.converged);
    // What the machine does not have is not copied.
    assert_eq!(
        at(&[Copying {
            from: 0,
            to: 7,
            gbps: 1.0
        }]),
        quiet
    );
    // On one board it is the near link.
    let near = Layout::named("power750-16").unwrap();
    let of = |copies: &[Copying]| {
        solve_with(&near, std::slice::from_ref(&demand), copies, &mut Warm::default()).near_use[0]
    };
    assert!(of(&[copy(4.0)]) > of(&[]) + 0.1);
}

#[test]
fn what_is_no_number_counts_as_nothing() {
    let layout = Layout::named("x86-2s").unwrap();
    let mut demand = Demand::new(
        Profile::new("p", f64::NAN, -1.0, f64::INFINITY),
        vec![f64::NAN, 4.0],
        vec![-1.0],
    );
    demand.spread = f64::NAN;
    demand.aligned = 7.0;
    let (rate, _) = one(&layout, &demand);
    close(rate.cpi, 0.9, 1e-12);
    assert!(solve(&layout, &[], &mut Warm::default()).rates.is_empty());
    // At rest: how fast it would be.
    let (rest, machine) = one(&layout, &Demand::new(program("oltp"), vec![], vec![]));
    assert!(rest.cpi > 0.9 && machine.memory_use.iter().all(|u| *u == 0.0));
    assert_eq!(SchedulerKind::default(), SchedulerKind::Linux);
}
