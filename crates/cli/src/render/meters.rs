//! `homeostat meter` as people read it.

use super::heading;
use super::text::{Look, Tone, percent, plural, table, wrap};
use homeostat_daemon::meters::{Known, Listing, Test, Tried};
use std::fmt::Write;

/// A number of counts a second, short.
fn rate(x: f64) -> String {
    match x {
        _ if x >= 1e9 => format!("{:.1} G", x / 1e9),
        _ if x >= 1e7 => format!("{:.1} M", x / 1e6),
        _ if x >= 1e5 => format!("{:.0} k", x / 1e3),
        _ if x >= 100.0 => format!("{x:.0}"),
        _ if x > 0.0 => format!("{x:.1}"),
        _ => "0".to_owned(),
    }
}

fn share(x: Option<f64>) -> String {
    x.map_or_else(|| "-".to_owned(), |x| percent(x, 1))
}

/// A time in seconds, in the unit that suits it.
fn time(seconds: f64) -> String {
    match seconds {
        _ if seconds >= 1.0 => format!("{seconds:.2} s"),
        _ if seconds >= 1e-3 => format!("{:.2} ms", seconds * 1e3),
        _ => format!("{:.1} µs", seconds * 1e6),
    }
}

/// Meters that were tried, those that can be used first.
pub fn meter_test(t: &Test, look: &Look) -> String {
    let mut out = format!(
        "{} (process {}, {}): {:.2} CPUs, watched for {:.0} s\n",
        t.name, t.pid, t.program, t.cpus, t.seconds
    );
    match t.meters.iter().find(|m| m.taken) {
        Some(m) => {
            let _ = writeln!(
                out,
                "{} {}, in units of: {}",
                look.paint(Tone::Good, "its work is counted by"),
                m.id,
                m.unit
            );
        }
        None => {
            let text = "none of its meters can be trusted so far, so it would not be touched";
            let _ = writeln!(out, "{}", look.paint(Tone::Warn, text));
        }
    }
    let opened: Vec<&Tried> = t.meters.iter().filter(|m| m.rate.is_some()).collect();
    if !opened.is_empty() {
        heading("Tried", look, &mut out);
        let rows: Vec<Vec<String>> = opened
            .iter()
            .map(|m| {
                vec![
                    format!("{} {}", if m.taken { "*" } else { " " }, m.id),
                    m.rate.map_or_else(|| "-".to_owned(), rate),
                    share(m.noise),
                    share(m.detectable),
                    percent(m.cost, 2),
                    if m.counted < 1.0 {
                        percent(m.counted, 0)
                    } else {
                        "always".to_owned()
                    },
                    m.why.clone(),
                ]
            })
            .collect();
        let titles = [
            "  METER",
            "PER SECOND",
            "NOISE",
            "PROVABLE",
            "COST",
            "COUNTED",
            "WHY",
        ];
        out.push_str(&table(&titles, &rows, look));
        out.push_str(&wrap(
            "NOISE: how much work per CPU second varies over blocks of 4 s. PROVABLE: smallest effect that a trial of 20 \
             minutes could prove with it. COST: share of the program's CPU time. COUNTED: in so much of its CPU time; the rest is \
             estimated from that, where counting all the time would cost more than 0.5 %.",
            "  ",
            look.width,
        ));
        for m in opened.iter().filter(|m| m.lag_s > 0.0) {
            let text = format!(
                "{} is counted every few seconds, and what it tells of the time between may be up to {:.0} s old: a trial leaves \
                 that out after each change.",
                m.id, m.lag_s
            );
            out.push_str(&wrap(&text, "  ", look.width));
        }
    }
    spans(t, look, &mut out);
    for m in &t.meters {
        if let Some(story) = &m.story {
            heading(&format!("How {} was found", m.id), look, &mut out);
            out.push_str(&wrap(story, "  ", look.width));
        }
    }
    let shut: Vec<Vec<String>> = t
        .meters
        .iter()
        .filter(|m| m.rate.is_none())
        .map(|m| vec![m.id.clone(), m.why.clone()])
        .collect();
    if !shut.is_empty() {
        heading("Could not be opened", look, &mut out);
        out.push_str(&table(&["METER", "WHY"], &shut, look));
    }
    out
}

/// How long its threads work at once, and what is waited for.
fn spans(t: &Test, look: &Look, out: &mut String) {
    heading("How long it works at once, and what is waited for", look, out);
    let mut say = |text: &str| out.push_str(&wrap(text, "  ", look.width));
    if let Some(spans) = &t.spans {
        // Whole percents would tell "100 %" of what a look before was left out of, and nothing of short windows.
        let recorded = percent(spans.recorded, if spans.recorded < 0.1 { 1 } else { 0 });
        say(&format!(
            "Half of the times from the end of a wait of one of its threads to its next wait are within {} (± {}), 99 of \
             100 within {} (± {}): {} in {}, recorded in {recorded} of its CPU time. In a server whose threads wait for requests this is \
             the time that a request is worked at.",
            time(spans.median_s),
            share(spans.median_noise),
            time(spans.p99_s),
            share(spans.p99_noise),
            plural(spans.count, "time"),
            plural(spans.threads, "thread"),
        ));
    }
    if let Some(why) = &t.spans_unknown {
        let what = if t.spans.is_some() {
            "Not all the time"
        } else {
            "No times from wait to wait"
        };
        say(&format!("{what}: {why}."));
    }
    say(&match t.waits.runqueue_wait {
        Some(wait) => format!(
            "Of its threads {:.2} ran and {wait:.2} waited for a CPU at any time (on average).",
            t.cpus
        ),
        None => "How long its threads waited for a CPU this kernel does not tell (schedstat).".to_owned(),
    });
    let pressure = [
        ("a CPU", t.waits.pressure_cpu),
        ("memory", t.waits.pressure_memory),
        ("storage", t.waits.pressure_io),
    ];
    let told: Vec<String> = pressure
        .iter()
        .filter_map(|(what, share)| Some(format!("for {what} in {}", percent((*share)?, 1))))
        .collect();
    say(&match told.split_last() {
        None => "What the machine waited for this kernel does not tell (PSI).".to_owned(),
        Some((last, [])) => format!("Something on the machine waited {last} of the time (PSI some)."),
        Some((last, before)) => format!(
            "Something on the machine waited {} and {last} of the time (PSI some).",
            before.join(", ")
        ),
    });
}

/// Meters of workloads, not tried.
pub fn meter_list(l: &Listing, one: bool, look: &Look) -> String {
    let mut out = String::new();
    for w in &l.workloads {
        heading(
            &format!(
                "{} (process {}, {}): {:.2} CPUs",
                w.name, w.pid, w.program, w.cpus
            ),
            look,
            &mut out,
        );
        let rows: Vec<Vec<String>> = w
            .meters
            .iter()
            // All reasons for one; for many only what can be used.
            .filter(|m| one || m.refused.is_none())
            .map(|m| {
                let remark = match &m.refused {
                    Some(why) => format!("not usable: {why}"),
                    None if m.cost_per_count_ns > 0 => {
                        format!(
                            "{}; costs {:.1} µs each",
                            m.unit,
                            m.cost_per_count_ns as f64 / 1e3
                        )
                    }
                    None => m.unit.clone(),
                };
                vec![m.id.to_string(), m.class.to_string(), remark]
            })
            .collect();
        if rows.is_empty() {
            out.push_str("  nothing can count its work\n");
        } else {
            out.push_str(&table(&["METER", "CLASS", "COUNTS"], &rows, look));
        }
    }
    if l.workloads_left_out > 0 {
        let _ = writeln!(
            out,
            "\n{} more: homeostat meter list --all",
            plural(u64::from(l.workloads_left_out), "workload")
        );
    }
    out.push_str("\nhow good they are: homeostat meter test WORKLOAD\n");
    out
}

/// What the configuration adds.
fn configured(k: &Known, look: &Look, out: &mut String) {
    if k.configured.is_empty() {
        return;
    }
    heading("Configured", look, out);
    let rows: Vec<Vec<String>> = k
        .configured
        .iter()
        .map(|c| {
            let unit = c.unit.clone().unwrap_or_else(|| "not said".to_owned());
            vec![c.workload.clone(), c.meter.clone(), unit]
        })
        .collect();
    out.push_str(&table(&["WORKLOAD", "METER", "UNIT"], &rows, look));
    if k.configured.iter().any(|c| c.unit.is_none()) {
        out.push_str(&wrap(
            "UNIT: where it is not said, what is known of a function, else a hit, and of a Prometheus metric a count.",
            "  ",
            look.width,
        ));
    }
}

/// Programs that are known, and what is configured.
pub fn known_meters(k: &Known, look: &Look) -> String {
    let rows: Vec<Vec<String>> = k
        .meters
        .iter()
        .map(|m| {
            let (name, others) = match m.programs.split_first() {
                Some((name, others)) => (name.clone(), others),
                None => (String::new(), &[][..]),
            };
            let also = match others {
                [] => String::new(),
                others => format!(" Also {}.", others.join(", ")),
            };
            vec![
                name,
                m.meter.clone(),
                m.unit.clone(),
                format!("{}. Costs {}.{also}", m.remark, m.cost),
            ]
        })
        .collect();
    let mut out = table(
        &["PROGRAM", "METER", "UNIT", "WHEN AND AT WHAT COST"],
        &rows,
        look,
    );
    configured(k, look, &mut out);
    out.push_str("\nothers: name a meter under [meters.configured] (docs/configuration.md)\n");
    out
}
