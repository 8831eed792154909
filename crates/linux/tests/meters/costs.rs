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
        "syscalls.sendto",
    ] {
        report(&mut meters, &own, id);
    }
    for name in ["redis-server", "memcached", "postgres"] {
        let Some(pid) = running(name) else { continue };
        let w = workload(name, &[pid]);
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

/// A process of that name, if one runs.
fn running(name: &str) -> Option<u32> {
    std::fs::read_dir("/proc").unwrap().flatten().find_map(|e| {
        let pid: u32 = e.file_name().to_str()?.parse().ok()?;
        let comm = std::fs::read_to_string(e.path().join("comm")).ok()?;
        (comm.trim() == name).then_some(pid)
    })
}
