//! Places: `homeostat topology`, `homeostat locality`, and the placement scores of `homeostat plan`.

use super::heading;
use super::text::{Look, Tone, bytes, percent, plural, table, wrap};
use homeostat_daemon::places::{Locality, Score, Topology, WorkloadPlaces};
use homeostat_model::topology::last_level_caches;
use homeostat_model::units::ranges;
use homeostat_model::{Cache, CacheKind, CpuId, LogicalCpu, MemoryNode, Redispatches};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

/// Cores that are named one by one; of more the first and the last are.
const CORES_NAMED: usize = 8;

/// `homeostat topology`.
pub fn topology(t: &Topology, look: &Look) -> String {
    let mut out = String::new();
    out.push_str(&wrap(&summary(t), "", look.width));
    let virtual_machine = t.hypervisor.as_ref().map_or_else(String::new, |h| {
        format!("; a virtual machine ({h}): this is what its host lets it see")
    });
    // Most machines have pages of 4 KiB.
    let pages = match t.page_bytes {
        0 | 4096 => String::new(),
        other => format!(", pages of {}", bytes(other)),
    };
    out.push_str(&wrap(
        &format!("Linux {} on {}{pages}{virtual_machine}", t.kernel, t.cpu_model),
        "",
        look.width,
    ));
    for doubt in &t.doubts {
        out.push_str(&wrap(&format!("Not sure: {doubt}"), "", look.width));
    }
    for group in &t.near_groups {
        let nodes: Vec<&MemoryNode> = t.nodes.iter().filter(|n| group.contains(&n.id)).collect();
        let indent = if t.near_groups.len() > 1 {
            let _ = writeln!(
                out,
                "\n{}",
                look.paint(
                    Tone::Heading,
                    &match group.as_slice() {
                        [one] => format!("by itself: node {one}"),
                        several => format!("near each other: nodes {}", ranges(several.iter().copied())),
                    }
                )
            );
            "  "
        } else {
            ""
        };
        for node in nodes {
            out.push('\n');
            of_node(t, node, indent, look, &mut out);
        }
    }
    distances(t, look, &mut out);
    rated(t, look, &mut out);
    let homeless: Vec<String> = t
        .devices
        .iter()
        .filter(|d| d.node.is_none())
        .map(|d| format!("{} {}", d.kind, d.name))
        .collect();
    if !homeless.is_empty() {
        heading("Devices whose node the firmware does not tell", look, &mut out);
        out.push_str(&wrap(&homeless.join(", "), "  ", look.width));
    }
    out
}

fn summary(t: &Topology) -> String {
    let packages: BTreeSet<u32> = t.cpus.iter().map(|c| c.package).collect();
    let cores: BTreeSet<u32> = t.cpus.iter().map(|c| c.core).collect();
    let memory = if t.memory_bytes > 0 {
        bytes(t.memory_bytes)
    } else {
        "memory unknown".to_owned()
    };
    let mut text = format!(
        "{}, {}, {}; {}, {}",
        plural(packages.len() as u64, "package"),
        plural(cores.len() as u64, "core"),
        plural(t.cpus.len() as u64, "CPU"),
        plural(t.nodes.len() as u64, "memory node"),
        memory,
    );
    let last = last_level_caches(&t.caches);
    if !last.is_empty() {
        let sizes: BTreeSet<u64> = last.iter().map(|c| c.size_bytes.0).collect();
        let size = match sizes.iter().copied().collect::<Vec<_>>().as_slice() {
            [0] => String::new(),
            [one] => format!(" of {}", bytes(*one)),
            several => format!(
                " of {} to {}",
                bytes(several.first().copied().unwrap_or(0)),
                bytes(several.last().copied().unwrap_or(0))
            ),
        };
        let _ = write!(text, "; {}{size}", plural(last.len() as u64, "last-level cache"));
    }
    let those = |is: fn(&LogicalCpu) -> bool| t.cpus.iter().filter(|c| is(c)).map(|c| c.id).collect();
    let set_aside: Vec<CpuId> = those(|c| c.isolated || c.tickless || c.partitioned);
    let rows: [(&str, Vec<CpuId>); 4] = [
        ("isolated", those(|c| c.isolated)),
        ("without the timer tick", those(|c| c.tickless)),
        ("in a partition of cpusets", those(|c| c.partitioned)),
        ("switched off", t.offline.clone()),
    ];
    for (what, list) in rows {
        if !list.is_empty() {
            let _ = write!(text, "; CPUs {} are {what}", ranges(list));
        }
    }
    if !set_aside.is_empty() {
        let _ = write!(text, "; nothing is placed on CPUs {}", ranges(set_aside));
    }
    text
}

fn cache_name(cache: &Cache) -> String {
    let kind = match cache.kind {
        CacheKind::Data => "d",
        CacheKind::Instruction => "i",
        CacheKind::Unified => "",
    };
    let size = if cache.size_bytes.0 > 0 {
        format!(" {}", bytes(cache.size_bytes.0))
    } else {
        String::new()
    };
    format!("L{}{kind}{size}", cache.level)
}

fn of_node(t: &Topology, node: &MemoryNode, indent: &str, look: &Look, out: &mut String) {
    let cpus = if node.cpus.is_empty() {
        "no CPUs".to_owned()
    } else {
        format!("CPUs {}", ranges(node.cpus.iter().copied()))
    };
    let memory = match node.memory_bytes.0 {
        0 => "no memory".to_owned(),
        all => format!("{} ({} free)", bytes(all), bytes(node.free_bytes.0)),
    };
    let tier = node
        .tier
        .map_or_else(String::new, |tier| format!(", memory tier {tier}"));
    let _ = writeln!(
        out,
        "{indent}{}: {cpus}, {memory}{tier}",
        look.paint(Tone::Heading, &format!("node {}", node.id))
    );
    for cache in &node.side_caches {
        let _ = writeln!(
            out,
            "{indent}  memory-side cache L{}: {}, {}, {}",
            cache.level,
            bytes(cache.size_bytes.0),
            if cache.direct_mapped {
                "direct-mapped"
            } else {
                "associative"
            },
            if cache.write_back {
                "write-back"
            } else {
                "write-through"
            },
        );
    }
    let here: Vec<&LogicalCpu> = t.cpus.iter().filter(|c| c.node == node.id).collect();
    let packages: BTreeSet<u32> = here.iter().map(|c| c.package).collect();
    for package in packages {
        let _ = writeln!(out, "{indent}  package {package}");
        let inside: Vec<&LogicalCpu> = here.iter().copied().filter(|c| c.package == package).collect();
        let ids: BTreeSet<CpuId> = inside.iter().map(|c| c.id).collect();
        let mut left = ids.clone();
        for cache in last_level_caches(&t.caches) {
            let shared: BTreeSet<CpuId> = cache.cpus.iter().copied().filter(|c| left.contains(c)).collect();
            if shared.is_empty() {
                continue;
            }
            left.retain(|c| !shared.contains(c));
            let _ = writeln!(
                out,
                "{indent}    {}: CPUs {}",
                cache_name(cache),
                ranges(shared.iter().copied())
            );
            let members: Vec<&LogicalCpu> = inside
                .iter()
                .copied()
                .filter(|c| shared.contains(&c.id))
                .collect();
            cores(t, &members, cache.level, &format!("{indent}      "), look, out);
        }
        if !left.is_empty() {
            let members: Vec<&LogicalCpu> = inside.iter().copied().filter(|c| left.contains(&c.id)).collect();
            cores(t, &members, u32::MAX, &format!("{indent}    "), look, out);
        }
    }
    let devices: Vec<String> = t
        .devices
        .iter()
        .filter(|d| d.node == Some(node.id))
        .map(|d| format!("{} {}", d.kind, d.name))
        .collect();
    if !devices.is_empty() {
        out.push_str(&wrap(&devices.join(", "), &format!("{indent}  "), look.width));
    }
}

/// The cores below a cache, alike ones together.
fn cores(t: &Topology, members: &[&LogicalCpu], below: u32, indent: &str, look: &Look, out: &mut String) {
    let mut of_core: BTreeMap<u32, Vec<&LogicalCpu>> = BTreeMap::new();
    for cpu in members {
        of_core.entry(cpu.core).or_default().push(cpu);
    }
    let mut alike: BTreeMap<String, Vec<String>> = BTreeMap::new();
    let mut order: Vec<String> = Vec::new();
    for cpus in of_core.values() {
        let Some(first) = cpus.first() else { continue };
        let mut kind = String::new();
        if let Some(name) = &first.kind {
            let _ = write!(kind, " ({})", name.replace('_', " "));
        }
        if let Some(capacity) = first.capacity {
            let _ = write!(kind, " (speed {capacity} of 1024)");
        }
        let mut caches: Vec<String> = Vec::new();
        let mut own: Vec<&Cache> = t
            .caches
            .iter()
            .filter(|c| c.level < below && c.cpus.contains(&first.id))
            .collect();
        own.sort_by_key(|c| (std::cmp::Reverse(c.level), c.kind.as_str()));
        for cache in own {
            let shared: BTreeSet<u32> = t
                .cpus
                .iter()
                .filter(|c| cache.cpus.contains(&c.id))
                .map(|c| c.core)
                .collect();
            let by = if shared.len() > 1 {
                format!(" shared by {} cores", shared.len())
            } else {
                String::new()
            };
            caches.push(format!("{}{by}", cache_name(cache)));
        }
        let threads = plural(cpus.len() as u64, "CPU");
        let caches = if caches.is_empty() {
            String::new()
        } else {
            format!(", each with {}", caches.join(", "))
        };
        let key = format!("of {threads}{kind}{caches}");
        let names: Vec<String> = cpus.iter().map(|c| c.id.to_string()).collect();
        if !alike.contains_key(&key) {
            order.push(key.clone());
        }
        alike.entry(key).or_default().push(names.join(","));
    }
    for key in order {
        let Some(names) = alike.get(&key) else { continue };
        let list = if names.len() <= CORES_NAMED {
            names.join(" ")
        } else {
            format!(
                "{} … {}",
                names.iter().take(2).cloned().collect::<Vec<_>>().join(" "),
                names.last().cloned().unwrap_or_default()
            )
        };
        let line = format!("{} {key}: {list}", plural(names.len() as u64, "core"));
        out.push_str(&wrap(&line, indent, look.width));
    }
}

fn distances(t: &Topology, look: &Look, out: &mut String) {
    if t.nodes.len() < 2 || t.nodes.iter().all(|n| n.distances.is_empty()) {
        return;
    }
    heading("Distances between nodes (10 = the own node)", look, out);
    let titles: Vec<String> = std::iter::once("NODE".to_owned())
        .chain(t.nodes.iter().map(|n| n.id.to_string()))
        .collect();
    let rows: Vec<Vec<String>> = t
        .nodes
        .iter()
        .map(|from| {
            std::iter::once(from.id.to_string())
                .chain(
                    t.nodes
                        .iter()
                        .map(|to| from.distances.get(&to.id).map_or("?".into(), ToString::to_string)),
                )
                .collect()
        })
        .collect();
    let titles: Vec<&str> = titles.iter().map(String::as_str).collect();
    out.push_str(&table(&titles, &rows, look));
}

fn rated(t: &Topology, look: &Look, out: &mut String) {
    let figure = |x: Option<u32>, unit: &str| x.map_or_else(|| "?".to_owned(), |n| format!("{n} {unit}"));
    let rows: Vec<Vec<String>> = t
        .nodes
        .iter()
        .flat_map(|n| n.access.iter().map(move |a| (n, a)))
        .map(|(node, a)| {
            vec![
                node.id.to_string(),
                ranges(a.initiators.iter().copied()),
                if a.class == 1 { "CPUs".into() } else { "any".into() },
                figure(a.read_latency_ns, "ns"),
                figure(a.write_latency_ns, "ns"),
                figure(a.read_bandwidth_mib_s, "MiB/s"),
                figure(a.write_bandwidth_mib_s, "MiB/s"),
            ]
        })
        .collect();
    if rows.is_empty() {
        return;
    }
    heading("Memory as the firmware rates it", look, out);
    out.push_str(&table(
        &[
            "NODE",
            "BEST FROM",
            "INITIATORS",
            "READ",
            "WRITE",
            "READ",
            "WRITE",
        ],
        &rows,
        look,
    ));
}

fn share(x: Option<f64>) -> String {
    x.map_or_else(|| "?".to_owned(), |x| percent(x, 0))
}

fn score(s: Option<&Score>, look: &Look) -> String {
    match s {
        None => "?".to_owned(),
        Some(s) if s.best >= s.now + 0.5 => look.paint(Tone::Warn, &format!("{:.0} of {:.0}", s.now, s.best)),
        Some(s) => format!("{:.0} of {:.0}", s.now, s.best),
    }
}

/// `homeostat locality`.
pub fn locality(l: &Locality, look: &Look) -> String {
    let mut out = String::new();
    nodes(l, look, &mut out);
    heading("Workloads", look, &mut out);
    if l.workloads.is_empty() {
        out.push_str("  none\n");
    } else {
        let rows: Vec<Vec<String>> = l
            .workloads
            .iter()
            .map(|w| {
                let resident: u64 = w.memory.iter().map(resident_of).sum();
                let of =
                    |part: fn(&Redispatches) -> f64| share(w.dispatches.as_ref().map(|d| part(&d.shares)));
                vec![
                    w.name.clone(),
                    format!("{:.2}", w.cpus),
                    bytes(resident),
                    share(w.local),
                    share(w.near),
                    share(w.far),
                    of(|d| d.same_core),
                    of(|d| d.same_cache),
                    of(|d| d.same_node),
                    of(|d| d.other_node),
                    score(w.score.as_ref(), look),
                    remark(w),
                ]
            })
            .collect();
        out.push_str(&table(
            &[
                "NAME", "CPUS", "MEMORY", "LOCAL", "NEAR", "FAR", "CORE", "CACHE", "NODE", "OTHER", "SCORE",
                "REMARK",
            ],
            &rows,
            look,
        ));
    }
    if l.workloads_left_out > 0 {
        let _ = writeln!(
            out,
            "  {} that use less: homeostat locality --all",
            plural(u64::from(l.workloads_left_out), "workload")
        );
    }
    out.push_str(&wrap(
        "LOCAL, NEAR, FAR: memory on the node of the threads, on a near one, on a far one. CORE, CACHE, NODE, OTHER: \
         dispatches on the same core as before, on the same last-level cache, on the same node, elsewhere. SCORE: \
         placement now, of the best that can be had here (100 = all threads on one cache beside all memory).",
        "  ",
        look.width,
    ));
    notes(l, look, &mut out);
    out
}

fn resident_of(m: &homeostat_daemon::places::MemoryPlace) -> u64 {
    m.kinds.total().0
}

fn remark(w: &WorkloadPlaces) -> String {
    if let Some(why) = &w.unknown {
        return why.clone();
    }
    if let Some(bound) = &w.bound {
        return bound.clone();
    }
    w.score.as_ref().map_or_else(String::new, |s| {
        if s.cpus.is_empty() {
            s.limit.clone()
        } else {
            better_place(s)
        }
    })
}

/// What the best place is.
fn better_place(s: &Score) -> String {
    let mut text = format!("best on CPUs {}", s.cpus);
    if let Some(node) = s.node.filter(|_| s.moved_bytes > 0) {
        let _ = write!(text, " with {} moved to node {node}", bytes(s.moved_bytes));
    }
    if !s.limit.is_empty() {
        let _ = write!(text, "; {}", s.limit);
    }
    text
}

fn nodes(l: &Locality, look: &Look, out: &mut String) {
    let _ = writeln!(
        out,
        "{}",
        look.paint(
            Tone::Heading,
            &format!(
                "{} in {:.1} s",
                plural(l.nodes.len() as u64, "memory node"),
                l.interval_s
            )
        )
    );
    let rows: Vec<Vec<String>> = l
        .nodes
        .iter()
        .map(|n| {
            let pages = n.pages_local + n.pages_to_others;
            vec![
                n.id.to_string(),
                if n.cpus.is_empty() {
                    "-".into()
                } else {
                    n.cpus.clone()
                },
                format!("{:.2}", n.busy_cpus),
                bytes(n.memory_bytes),
                bytes(n.free_bytes),
                bytes(n.file_cache_bytes),
                if pages == 0 {
                    "-".into()
                } else {
                    percent(n.pages_local as f64 / pages as f64, 0)
                },
            ]
        })
        .collect();
    out.push_str(&table(
        &[
            "NODE",
            "CPUS",
            "BUSY",
            "MEMORY",
            "FREE",
            "FILE CACHE",
            "NEW PAGES LOCAL",
        ],
        &rows,
        look,
    ));
    if let Some(b) = l.balancing.filter(|b| b.hint_faults + b.pages_migrated > 0) {
        let _ = writeln!(
            out,
            "  automatic NUMA balancing: {} hinting faults, {} local; {} pages migrated",
            b.hint_faults,
            percent(b.hint_faults_local as f64 / b.hint_faults.max(1) as f64, 0),
            b.pages_migrated
        );
    }
}

fn notes(l: &Locality, look: &Look, out: &mut String) {
    for note in &l.notes {
        out.push_str(&wrap(&format!("note: {note}"), "  ", look.width));
    }
}

/// `homeostat locality WORKLOAD`.
pub fn locality_of_one(l: &Locality, look: &Look) -> String {
    let mut out = String::new();
    for w in &l.workloads {
        let _ = writeln!(
            out,
            "{} ({}, process {}): {:.2} CPUs, {} ran in {:.1} s",
            look.paint(Tone::Heading, &w.name),
            w.program,
            w.pid,
            w.cpus,
            plural(u64::from(w.threads), "thread"),
            l.interval_s
        );
        if let Some(why) = &w.unknown {
            out.push_str(&wrap(
                &format!("its places are not known: {why}"),
                "  ",
                look.width,
            ));
            continue;
        }
        if let Some(bound) = &w.bound {
            out.push_str(&wrap(&format!("left alone: {bound}"), "  ", look.width));
        }
        of_one(w, look, &mut out);
    }
    notes(l, look, &mut out);
    out
}

fn of_one(w: &WorkloadPlaces, look: &Look, out: &mut String) {
    heading("Memory by node", look, out);
    let resident: u64 = w.memory.iter().map(resident_of).sum();
    let rows: Vec<Vec<String>> = w
        .memory
        .iter()
        .map(|m| {
            let all = resident_of(m);
            vec![
                m.node.to_string(),
                percent(all as f64 / resident.max(1) as f64, 1),
                bytes(all),
                bytes(m.kinds.anonymous.0),
                bytes(m.kinds.shared.0),
                bytes(m.kinds.file.0),
                bytes(m.kinds.hugetlb.0),
                bytes(m.kinds.huge.0),
            ]
        })
        .collect();
    out.push_str(&table(
        &[
            "NODE",
            "SHARE",
            "ALL",
            "PRIVATE",
            "SHARED",
            "FILES",
            "HUGETLB",
            "ON LARGE PAGES",
        ],
        &rows,
        look,
    ));
    let how = if w.memory_error > 0.0 {
        format!("sampled: each share ± {} (95 %)", percent(w.memory_error, 1))
    } else {
        "every page was counted".to_owned()
    };
    let covered = if w.memory_covered < 0.999 {
        format!(
            "; {} of it was looked at so far, the rest is taken to lie alike",
            percent(w.memory_covered, 0)
        )
    } else {
        String::new()
    };
    out.push_str(&wrap(&format!("{how}{covered}"), "  ", look.width));
    heading("Threads", look, out);
    let rows: Vec<Vec<String>> = w
        .running
        .iter()
        .map(|r| {
            vec![
                r.node.to_string(),
                r.cache.to_string(),
                format!("{:.2}", r.cpus),
                w.preferred
                    .get(&r.node)
                    .map_or_else(String::new, |n| format!("kernel prefers the node for {n}")),
            ]
        })
        .collect();
    out.push_str(&table(
        &["NODE", "LAST-LEVEL CACHE OF CPU", "CPUS USED", ""],
        &rows,
        look,
    ));
    match &w.dispatches {
        Some(d) => {
            let how = if d.shares.every_move_seen {
                "each move was seen"
            } else {
                "moves were counted; how far they went is an estimate"
            };
            out.push_str(&wrap(
                &format!(
                    "{:.0} dispatches per second: {} on the same core, {} on the same cache, {} on the same node, {} on \
                     another node ({how})",
                    d.per_second,
                    percent(d.shares.same_core, 1),
                    percent(d.shares.same_cache, 1),
                    percent(d.shares.same_node, 1),
                    percent(d.shares.other_node, 1)
                ),
                "  ",
                look.width,
            ));
        }
        None => out.push_str("  how its dispatches went is not known\n"),
    }
    heading("Placement", look, out);
    let _ = writeln!(
        out,
        "  memory local {}, near {}, far {}, if every thread used all of it alike",
        share(w.local),
        share(w.near),
        share(w.far)
    );
    if let Some(local) = w.counted_local {
        let _ = writeln!(
            out,
            "  counted: {} of the cache misses were served by the own node",
            percent(local, 0)
        );
    }
    if let Some(pages) = w.pages_migrated.filter(|p| *p > 0) {
        let _ = writeln!(
            out,
            "  automatic NUMA balancing migrated {pages} pages for it so far"
        );
    }
    match &w.score {
        Some(s) => {
            let what = if s.cpus.is_empty() {
                s.limit.clone()
            } else {
                better_place(s)
            };
            let text = format!("score {:.0} of at best {:.0}; {what}", s.now, s.best);
            out.push_str(&wrap(text.trim_end_matches("; "), "  ", look.width));
        }
        None => out.push_str("  no score: where its threads ran is not known (they did not run)\n"),
    }
}

/// The placement scores for `homeostat plan`.
pub fn placement(l: &Locality, look: &Look) -> String {
    let mut out = String::new();
    heading("Placement now, and at best (0 to 100)", look, &mut out);
    let rows: Vec<Vec<String>> = l
        .workloads
        .iter()
        .filter(|w| w.score.is_some() || w.unknown.is_some())
        .map(|w| vec![w.name.clone(), score(w.score.as_ref(), look), remark(w)])
        .collect();
    if rows.is_empty() {
        out.push_str("  nothing that runs\n");
    } else {
        out.push_str(&table(&["NAME", "SCORE", "WHAT THE BEST WOULD BE"], &rows, look));
    }
    out
}
