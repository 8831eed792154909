//! `homeostat memory` as people read it.

use super::heading;
use super::text::{Look, bytes, plural, table, wrap};
use homeostat_daemon::memory::{Group, Memory, Pusher};
use std::collections::BTreeMap;
use std::fmt::Write;

/// Bytes, and bytes a second, below which nothing is told of what happens within a group: it would be told of nearly all.
const TOLD_MIN: u64 = 1024 * 1024;

/// Whether memory is short and why, what it is used for, and the workloads.
pub fn memory(m: &Memory, look: &Look) -> String {
    let answer = match m.verdict.as_str() {
        "short_in_a_group" => "Memory is enough for the machine, and short in a control group".to_owned(),
        "unknown" => "Whether memory is short is not known".to_owned(),
        verdict => format!("Memory is {verdict}"),
    };
    let mut out = format!("{answer} (watched for {:.1} s)\n", m.interval_s);
    for why in &m.why {
        out.push_str(&wrap(why, "  ", look.width));
    }
    heading("Used for", look, &mut out);
    let mut rows = vec![
        ("programs (no file behind it)", m.used.anonymous_bytes.0),
        ("files, used lately", m.used.file_active_bytes.0),
        ("files, not used lately", m.used.file_inactive_bytes.0),
        ("shared memory", m.used.shared_bytes.0),
        ("kernel, can be given back", m.used.kernel_reclaimable_bytes.0),
        ("waits to be written", m.used.unwritten_bytes.0),
        ("free", m.used.free_bytes.0),
        ("could be had", m.used.available_bytes.0),
        ("all", m.used.total_bytes.0),
    ];
    if m.used.swap_total_bytes.0 > 0 {
        rows.push(("swap in use", m.used.swap_used_bytes.0));
        rows.push(("swap in all", m.used.swap_total_bytes.0));
    }
    for (name, size) in rows {
        let _ = writeln!(out, "  {name:<30} {:>10}", bytes(size));
    }
    let most = m.used.total_bytes.0.saturating_add(m.used.swap_total_bytes.0);
    if m.used.committed_bytes.0 > most {
        let text = format!(
            "programs were promised {}, memory and swap are {}: if they use all of what they were promised, the kernel \
             ends some",
            bytes(m.used.committed_bytes.0),
            bytes(most)
        );
        out.push_str(&wrap(&text, "  ", look.width));
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
    pushed_out(m, look, &mut out);
    growing(m, look, &mut out);
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
    groups(m, look, &mut out);
    out
}

/// Who loses what it needs, and to whom.
fn pushed_out(m: &Memory, look: &Look, out: &mut String) {
    if m.pushed_out.is_empty() {
        return;
    }
    heading("Who pushes whom out", look, out);
    for p in &m.pushed_out {
        let mut loses = Vec::new();
        if p.faults_major_per_s > 0.0 {
            loses.push(format!(
                "waits for storage {:.0} times a second",
                p.faults_major_per_s
            ));
        }
        if let Some(pages) = p.refaults_per_s.filter(|pages| *pages > 0.0) {
            loses.push(format!("needs {pages:.0} pages a second again"));
        }
        let within = match &p.within {
            Some(group) => format!("{} ({group})", bytes(p.within_bytes)),
            None => format!("the memory of the machine ({})", bytes(p.within_bytes)),
        };
        let by: Vec<String> = p.by.iter().map(brings).collect();
        let by = if by.is_empty() {
            format!("it has too little for itself in {within}: nobody else brings in much")
        } else {
            format!("within {within} {}", by.join(", "))
        };
        out.push_str(&wrap(
            &format!("{} {}; {by}", p.name, loses.join(" and ")),
            "  ",
            look.width,
        ));
    }
    out.push_str(&wrap(
        "The kernel does not count who took whose page: named is who brings most into the same memory, which is full.",
        "  ",
        look.width,
    ));
}

/// What one brings in, and by how much the pages of files in its group grow meanwhile: what is read and stays.
fn brings(by: &Pusher) -> String {
    let mut text = format!("{} brings in {}/s", by.name, bytes(by.brings_bytes_per_s as u64));
    if let Some(grows) = by.file_grows_bytes_per_s.filter(|x| *x >= TOLD_MIN as f64) {
        let _ = write!(
            text,
            " (pages of files in its group grow by {}/s)",
            bytes(grows as u64)
        );
    }
    text
}

/// Whose memory grows and grows, where a daemon has watched.
fn growing(m: &Memory, look: &Look, out: &mut String) {
    let Some(all) = m.growing.as_ref().filter(|all| !all.is_empty()) else {
        return;
    };
    heading("May leak", look, out);
    for g in all {
        out.push_str(&wrap(&format!("{}: {}", g.name, g.finding), "  ", look.width));
        out.push_str(&wrap(&g.remedy, "    ", look.width));
    }
}

/// What the control groups of these workloads count, each group once.
fn groups(m: &Memory, look: &Look, out: &mut String) {
    let mut all: BTreeMap<&str, (&Group, Vec<&str>)> = BTreeMap::new();
    for w in &m.workloads {
        if let Some(group) = &w.group {
            let entry = all.entry(&group.path).or_insert((group, Vec::new()));
            entry.1.push(&w.name);
        }
    }
    if all.is_empty() {
        return;
    }
    heading("Their control groups", look, out);
    // Columns that say nothing on this machine would only take room.
    let has_swap = all.values().any(|(g, _)| g.swap_bytes > 0);
    let tells_stalls = all.values().any(|(g, _)| g.stalled_some.is_some());
    let rows: Vec<Vec<String>> = all
        .values()
        .map(|(g, names)| {
            let mut row = vec![
                of_whom(names),
                bytes(g.anonymous_bytes),
                bytes(g.file_active_bytes),
                bytes(g.file_inactive_bytes),
            ];
            if has_swap {
                row.push(bytes(g.swap_bytes));
            }
            row.push(g.limit_bytes.map_or_else(|| "-".to_owned(), bytes));
            row.push(format!(
                "{:.0}",
                g.refaults_file_per_s + g.refaults_anonymous_per_s
            ));
            if tells_stalls {
                row.push(
                    g.stalled_some
                        .map_or_else(|| "-".to_owned(), |x| format!("{:.1} %", x * 100.0)),
                );
            }
            row
        })
        .collect();
    let mut titles = vec!["OF", "PROGRAMS", "FILES USED", "FILES NOT"];
    titles.extend(has_swap.then_some("SWAP"));
    titles.extend(["LIMIT", "BACK/S"]);
    titles.extend(tells_stalls.then_some("STALLED"));
    out.push_str(&table(&titles, &rows, look));
    let mut legend = String::from(
        "PROGRAMS: memory with no file behind it. FILES USED, NOT: pages of files used lately, and not. These with the groups \
         below. BACK/S: pages needed again after they had been taken from the group.",
    );
    if tells_stalls {
        legend.push_str(" STALLED: share of the time in which one of its programs stood still for memory.");
    }
    out.push_str(&wrap(&legend, "  ", look.width));
    let within: Vec<String> = all
        .values()
        .map(|(g, names)| (of_whom(names), happens(g)))
        .filter(|(_, told)| !told.is_empty())
        .map(|(name, told)| format!("{name}: {}", told.join("; ")))
        .collect();
    if within.is_empty() {
        return;
    }
    heading("Within their control groups", look, out);
    for line in within {
        out.push_str(&wrap(&line, "  ", look.width));
    }
}

/// Whose group it is, where there is little room.
fn of_whom(names: &[&str]) -> String {
    let first = names.first().copied().unwrap_or_default();
    match names.len() {
        0 | 1 => first.to_owned(),
        n => format!("{first} and {} more", n - 1),
    }
}

/// What happens within a group, in the words that are used of the machine; nothing of what does not happen or is not counted.
fn happens(g: &Group) -> Vec<String> {
    let mut told = Vec::new();
    for (rate, what) in [
        (Some(g.faults_major_per_s), "faults that waited for storage"),
        (g.swapped_in_per_s, "pages from swap"),
        (g.swapped_out_per_s, "pages to swap"),
    ] {
        // What is less is written as 0.
        if let Some(rate) = rate.filter(|x| *x > 0.5) {
            told.push(format!("{rate:.0} {what} a second"));
        }
    }
    if let Some(ratio) = g.scans_per_steal {
        told.push(format!(
            "{ratio:.1} pages looked at for one taken (1 to 2 is healthy)"
        ));
    }
    let grows = g.file_grows_bytes_per_s;
    if grows.abs() >= TOLD_MIN as f64 {
        let how = if grows > 0.0 { "grow" } else { "shrink" };
        told.push(format!("pages of files {how} by {}/s", bytes(grows.abs() as u64)));
    }
    for (size, what) in [(g.dirty_bytes, "dirty"), (g.writeback_bytes, "in writeback")] {
        if size >= TOLD_MIN {
            told.push(format!("{} {what}", bytes(size)));
        }
    }
    told
}

#[cfg(test)]
mod tests {
    use super::super::text::Look;
    use super::*;
    use homeostat_daemon::memory::{Growing, MemoryUse, PushedOut, Rates, WorkloadMemory};
    use homeostat_model::Bytes;

    fn seen(workloads: Vec<WorkloadMemory>) -> Memory {
        Memory {
            schema: 1,
            interval_s: 4.0,
            verdict: "enough".into(),
            why: Vec::new(),
            used: MemoryUse {
                total_bytes: Bytes(1 << 30),
                ..MemoryUse::default()
            },
            stalled_some: None,
            stalled_full: None,
            rates: Rates {
                swapped_in_per_s: 0.0,
                swapped_out_per_s: 0.0,
                faults_major_per_s: 0.0,
                refaults_anonymous_per_s: 0.0,
                refaults_file_per_s: 0.0,
                scanned_per_s: 0.0,
                stolen_per_s: 0.0,
                stolen_directly: None,
                scans_per_steal: None,
            },
            pushed_out: Vec::new(),
            growing: None,
            workloads,
            workloads_left_out: 0,
        }
    }

    fn workload(name: &str, path: Option<&str>) -> WorkloadMemory {
        WorkloadMemory {
            name: name.into(),
            resident_bytes: 1 << 20,
            from_storage_bytes_per_s: 0.0,
            grows_bytes_per_s: 0.0,
            from_memory: None,
            faults_major_per_s: 0.0,
            remark: String::new(),
            group: path.map(|path| Group {
                path: path.into(),
                anonymous_bytes: 3 << 20,
                file_bytes: 12 << 20,
                file_active_bytes: 5 << 20,
                file_inactive_bytes: 7 << 20,
                file_grows_bytes_per_s: 0.0,
                shared_bytes: 0,
                unwritten_bytes: 0,
                dirty_bytes: 0,
                writeback_bytes: 0,
                refaults_file_per_s: 40.0,
                refaults_anonymous_per_s: 2.0,
                faults_major_per_s: 0.0,
                swapped_in_per_s: None,
                swapped_out_per_s: None,
                scanned_per_s: None,
                stolen_per_s: None,
                scans_per_steal: None,
                swap_bytes: 0,
                swap_cached_bytes: None,
                stalled_some: None,
                stalled_full: None,
                limit_bytes: None,
                full: None,
            }),
        }
    }

    #[test]
    fn each_group_is_told_once_and_machines_without_say_nothing() {
        let look = Look {
            width: 100,
            color: false,
            now_unix: 0,
        };
        let text = memory(&seen(vec![workload("a", None)]), &look);
        assert!(!text.contains("control groups"), "{text}");
        let text = memory(
            &seen(vec![
                workload("db", Some("/x")),
                workload("db-backup", Some("/x")),
                workload("web", Some("/y")),
            ]),
            &look,
        );
        assert_eq!(text.matches("db and 1 more").count(), 1, "{text}");
        let web = text.lines().rfind(|l| l.trim_start().starts_with("web")).unwrap();
        for part in ["3.0 MiB", "5.0 MiB", "7.0 MiB", "42"] {
            assert!(web.contains(part), "{web}");
        }
    }

    #[test]
    fn what_happens_within_a_group_is_told_where_something_does() {
        let look = Look {
            width: 300,
            color: false,
            now_unix: 0,
        };
        let quiet = workload("web", Some("/y"));
        assert!(!memory(&seen(vec![quiet.clone()]), &look).contains("Within"));
        let mut busy = workload("db", Some("/x"));
        busy.group = busy.group.map(|group| Group {
            faults_major_per_s: 120.4,
            swapped_in_per_s: Some(30.0),
            swapped_out_per_s: Some(0.2),
            scans_per_steal: Some(3.12),
            file_grows_bytes_per_s: -12.0 * 1048576.0,
            dirty_bytes: 4 << 20,
            writeback_bytes: 4096,
            ..group
        });
        let text = memory(&seen(vec![busy, quiet]), &look);
        let within = text.split_once("Within their control groups\n").unwrap().1;
        assert_eq!(
            within,
            "  db: 120 faults that waited for storage a second; 30 pages from swap a second; 3.1 pages looked at for one taken \
             (1 to 2 is healthy); pages of files shrink by 12.0 MiB/s; 4.0 MiB dirty\n"
        );
    }

    #[test]
    fn a_promise_of_more_than_there_is_is_told() {
        let look = Look {
            width: 200,
            color: false,
            now_unix: 0,
        };
        let mut m = seen(Vec::new());
        m.used.swap_total_bytes.0 = 1 << 30;
        m.used.committed_bytes.0 = 2 << 30;
        assert!(!memory(&m, &look).contains("promised"));
        m.used.committed_bytes.0 = 3 << 30;
        let text = memory(&m, &look);
        assert!(
            text.contains("programs were promised 3.00 GiB, memory and swap are 2.00 GiB"),
            "{text}"
        );
    }

    #[test]
    fn who_pushes_whom_out_and_who_grows_is_told_where_there_is_somebody() {
        let look = Look {
            width: 200,
            color: false,
            now_unix: 0,
        };
        let mut m = seen(vec![workload("db", None)]);
        for heading in ["Who pushes whom out", "May leak"] {
            assert!(!memory(&m, &look).contains(heading));
        }
        let lost = |within: Option<&str>, by: &[&str]| PushedOut {
            name: "db".into(),
            faults_major_per_s: 146.2,
            refaults_per_s: Some(900.0),
            within: within.map(Into::into),
            within_bytes: 256 << 20,
            by: by
                .iter()
                .map(|name| Pusher {
                    name: (*name).into(),
                    brings_bytes_per_s: 450.0 * 1048576.0,
                    file_grows_bytes_per_s: Some(430.0 * 1048576.0),
                })
                .collect(),
        };
        m.pushed_out = vec![lost(Some("/both"), &["tar"]), lost(None, &[])];
        m.growing = Some(vec![Growing {
            name: "web".into(),
            finding: "its own memory has grown".into(),
            remedy: "find out".into(),
        }]);
        let text = memory(&m, &look);
        for part in [
            "db waits for storage 146 times a second and needs 900 pages a second again; within 256.0 MiB (/both) tar brings in \
             450.0 MiB/s (pages of files in its group grow by 430.0 MiB/s)",
            "it has too little for itself in the memory of the machine (256.0 MiB): nobody else brings in much",
            "web: its own memory has grown",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
    }
}
