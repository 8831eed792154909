//! What reading costs. Prints, asserts nothing: `cargo test -p homeostat-linux --test meters -- --ignored costs`.

use super::*;
use std::time::Instant;

#[test]
#[ignore = "a measurement, for people"]
fn costs_of_reading() {
    let own = workload("own", &[std::process::id()]);
    let dir = tempfile::tempdir().unwrap();
    let _publisher = homeostat_progress::Publisher::create_in(dir.path(), "own", "turn", 16).unwrap();
    let settings = MeterSettings {
        progress_directory: dir.path().to_owned(),
        ..MeterSettings::default()
    };
    let mut meters = Meters::new(&settings);
    for id in [
        "progress",
        "io.bytes",
        "switches.voluntary",
        "sockets.bytes",
        "instructions",
    ] {
        report(&mut meters, &own, id);
    }
    // COSTS=redis-server:4711,postgres:4712 names further processes.
    for part in std::env::var("COSTS").unwrap_or_default().split(',') {
        let Some((name, pid)) = part.split_once(':') else {
            continue;
        };
        let w = workload(name, &[pid.parse().unwrap()]);
        let start = Instant::now();
        let found: Vec<_> = meters
            .0
            .iter_mut()
            .flat_map(|k| k.find(&Root::default(), &w))
            .collect();
        println!("{name}: find {:?}", start.elapsed());
        let start = Instant::now();
        let _: Vec<_> = meters
            .0
            .iter_mut()
            .flat_map(|k| k.find(&Root::default(), &w))
            .collect();
        println!("{name}: find again {:?}", start.elapsed());
        for c in found.iter().filter(|c| c.refused.is_none()) {
            report(&mut meters, &w, c.id.as_str());
        }
        for c in found {
            println!("  {} [{}] {} {:?}", c.id, c.unit, c.cost_per_count, c.refused);
        }
    }
}

fn report(meters: &mut Meters, w: &Workload, id: &str) {
    let start = Instant::now();
    match meters.open(w, id) {
        Ok(mut m) => {
            let opened = start.elapsed();
            let mut times: Vec<_> = (0..200)
                .map(|_| {
                    let start = Instant::now();
                    let _ = m.read(w);
                    start.elapsed()
                })
                .collect();
            times.sort_unstable();
            let start = Instant::now();
            drop(m);
            println!(
                "{}: {id}: open {opened:?}, read median {:?} max {:?}, close {:?}",
                w.id,
                times[100],
                times[199],
                start.elapsed()
            );
        }
        Err(e) => println!("{}: {id}: {e}", w.id),
    }
}

/// What one hit costs the program, at the places that a function may begin with.
#[test]
#[ignore = "a measurement, for people"]
fn costs_of_hits() {
    let dir = tempfile::tempdir().unwrap();
    let variants: [(&str, &[&str]); 3] = [
        ("push", &["-fcf-protection=none", "-fno-omit-frame-pointer"]),
        (
            "endbr64, push",
            &["-fcf-protection=full", "-fno-omit-frame-pointer"],
        ),
        (
            "endbr64, other",
            &["-fcf-protection=full", "-fomit-frame-pointer", "-DLEAF"],
        ),
    ];
    for (n, (what, flags)) in variants.iter().enumerate() {
        let name = format!("hits{n}");
        let symbol = if n == 2 { "inner" } else { "work" };
        let Some(mut c) = probes::start(dir.path(), &name, flags) else {
            return;
        };
        let turn = |c: &mut Servant| {
            let mut times: Vec<_> = (0..5)
                .map(|_| {
                    let start = Instant::now();
                    assert_eq!(c.order("w20000"), "done");
                    start.elapsed().as_nanos() as f64 / 20_000.0
                })
                .collect();
            times.sort_by(f64::total_cmp);
            times[2]
        };
        let w = workload(&name, &[c.pid()]);
        let id = format!("uprobe:{name}:{symbol}");
        let mut meters = Meters::configured(&name, &[&id]);
        let told = meters.find(&w, &id).unwrap().cost_per_count.0;
        let off = turn(&mut c);
        let mut m = meters.open(&w, &id).unwrap();
        let on = turn(&mut c);
        let hits = m.read(&w).unwrap() / 100_000.0;
        println!(
            "{what}: {:.0} ns a hit measured, {told} ns told",
            (on - off) / hits
        );
    }
}

/// Prints the readings of all usable meters of a process and its children each second:
/// `WATCH=redis-server WATCH_PID=4711 SECONDS=5 cargo test -p homeostat-linux --test meters -- --ignored --nocapture watch`.
#[test]
#[ignore = "a measurement, for people"]
fn watch() {
    let (Ok(name), Ok(pid)) = (std::env::var("WATCH"), std::env::var("WATCH_PID")) else {
        return;
    };
    let pid = pid.parse().unwrap();
    let seconds: u32 = std::env::var("SECONDS")
        .ok()
        .and_then(|s| s.parse().ok())
        .unwrap_or(5);
    let mut meters = Meters::plain();
    let w = workload(&name, &family(pid));
    let ids: Vec<String> = meters
        .0
        .iter_mut()
        .flat_map(|k| k.find(&Root::default(), &w))
        .filter(|c| c.refused.is_none())
        .map(|c| c.id.to_string())
        .collect();
    println!("{} processes of {name}", w.processes.len());
    let mut open: Vec<_> = ids
        .iter()
        .filter_map(|id| {
            meters
                .open(&w, id)
                .map_err(|e| println!("{id}: {e}"))
                .ok()
                .map(|m| (id, m, None))
        })
        .collect();
    for _ in 0..=seconds {
        let w = workload(&name, &family(pid));
        for (id, m, last) in &mut open {
            let start = Instant::now();
            let now = m.read(&w);
            let cost = start.elapsed();
            match now {
                Ok(now) => {
                    if let Some((before, then)) = last.replace((now, start)) {
                        let rate = (now - before) / (start - then).as_secs_f64();
                        println!("{id}: {rate:.0}/s (read {cost:?})");
                    }
                }
                Err(e) => println!("{id}: {e}"),
            }
        }
        std::thread::sleep(std::time::Duration::from_secs(1));
    }
}

/// A process and its children.
fn family(pid: u32) -> Vec<u32> {
    let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
    std::iter::once(pid)
        .chain(children.split_whitespace().filter_map(|p| p.parse().ok()))
        .collect()
}
