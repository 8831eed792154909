//! `homeostat memory` as people read it.

use super::heading;
use super::text::{Look, bytes, plural, table, wrap};
use homeostat_daemon::memory::Memory;
use std::fmt::Write;

/// Whether memory is short and why, what it is used for, and the workloads.
pub fn memory(m: &Memory, look: &Look) -> String {
    let mut out = format!("Memory is {} (watched for {:.1} s)\n", m.verdict, m.interval_s);
    for why in &m.why {
        out.push_str(&wrap(why, "  ", look.width));
    }
    heading("Used for", look, &mut out);
    let mut rows = vec![
        ("programs (no file behind it)", m.anonymous_bytes),
        ("files, used lately", m.file_active_bytes),
        ("files, not used lately", m.file_inactive_bytes),
        ("shared memory", m.shared_bytes),
        ("kernel, can be given back", m.kernel_reclaimable_bytes),
        ("waits to be written", m.unwritten_bytes),
        ("free", m.free_bytes),
        ("could be had", m.available_bytes),
        ("all", m.total_bytes),
    ];
    if m.swap_total_bytes > 0 {
        rows.push(("swap in use", m.swap_used_bytes));
        rows.push(("swap in all", m.swap_total_bytes));
    }
    for (name, size) in rows {
        let _ = writeln!(out, "  {name:<30} {:>10}", bytes(size));
    }
    heading("Taken and brought back", look, &mut out);
    let r = &m.rates;
    let number = |x: f64| format!("{x:.0} a second");
    let share = |x: Option<f64>| x.map_or_else(|| "not known".to_owned(), |x| format!("{:.1} %", x * 100.0));
    let ratio = r.scans_per_steal.map_or_else(
        || "next to none was taken".to_owned(),
        |x| format!("{x:.1} (1 to 2 is healthy)"),
    );
    for (name, text) in [
        ("time stood still for memory", share(m.stalled_some)),
        ("… by all at once", share(m.stalled_full)),
        ("pages of files needed again", number(r.refaults_file_per_s)),
        (
            "pages of programs needed again",
            number(r.refaults_anonymous_per_s),
        ),
        ("faults that waited for storage", number(r.faults_major_per_s)),
        ("pages from swap", number(r.swapped_in_per_s)),
        ("pages to swap", number(r.swapped_out_per_s)),
        ("pages looked at for one taken", ratio),
    ] {
        let _ = writeln!(out, "  {name:<30} {text}");
    }
    heading("Workloads", look, &mut out);
    let rows: Vec<Vec<String>> = m
        .workloads
        .iter()
        .map(|w| {
            vec![
                w.name.clone(),
                bytes(w.resident_bytes),
                format!("{}/s", bytes(w.from_storage_bytes_per_s as u64)),
                w.from_memory
                    .map_or_else(|| "-".to_owned(), |x| format!("{:.0} %", x * 100.0)),
                format!("{:.0}", w.faults_major_per_s),
                w.remark.clone(),
            ]
        })
        .collect();
    out.push_str(&table(
        &["NAME", "RESIDENT", "STORAGE", "CACHED", "WAITS/S", "REMARK"],
        &rows,
        look,
    ));
    if m.workloads_left_out > 0 {
        let _ = writeln!(
            out,
            "  {} more: homeostat memory --all",
            plural(u64::from(m.workloads_left_out), "workload")
        );
    }
    out.push_str(&wrap(
        "STORAGE: read from storage on its behalf. CACHED: share of what it read that was in memory. WAITS/S: faults that \
         waited for storage.",
        "  ",
        look.width,
    ));
    out
}
