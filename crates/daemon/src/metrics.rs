//! The state as OpenMetrics text, and the endpoint that serves it.

pub mod endpoint;

use crate::api::{Budget, Effect, Experiment, Meter, Stage, Status, Verdict};
use crate::board::HANGS_AFTER;
use crate::printable;
use std::collections::BTreeSet;
use std::fmt::Write as _;

const LABEL_CHARS_MAX: usize = 200;

#[derive(Default)]
struct Text {
    out: String,
    series: BTreeSet<String>,
}

type Labels<'a> = &'a [(&'static str, &'a str)];

impl Text {
    fn family(&mut self, name: &str, kind: &str, unit: &str, help: &str) {
        self.series.clear();
        let _ = writeln!(self.out, "# TYPE {name} {kind}");
        if !unit.is_empty() {
            let _ = writeln!(self.out, "# UNIT {name} {unit}");
        }
        let _ = writeln!(self.out, "# HELP {name} {help}");
    }

    /// One number of the family. Only the first of equal series is written: scrapers refuse duplicates.
    fn sample(&mut self, name: &str, labels: Labels<'_>, value: f64) {
        let mut series = name.to_owned();
        for (i, (key, text)) in labels.iter().enumerate() {
            let _ = write!(series, "{}{key}=\"", if i == 0 { "{" } else { "," });
            for c in printable::for_log(text).chars().take(LABEL_CHARS_MAX) {
                match c {
                    '\\' => series.push_str("\\\\"),
                    '"' => series.push_str("\\\""),
                    '\n' => series.push_str("\\n"),
                    c => series.push(c),
                }
            }
            series.push('"');
        }
        if !labels.is_empty() {
            series.push('}');
        }
        if value.is_finite() && self.series.insert(series.clone()) {
            let _ = writeln!(self.out, "{series} {value}");
        }
    }

    fn gauge(&mut self, name: &str, unit: &str, help: &str, value: f64) {
        self.family(name, "gauge", unit, help);
        self.sample(name, &[], value);
    }

    fn counter(&mut self, name: &str, unit: &str, help: &str, value: f64) {
        self.family(name, "counter", unit, help);
        self.sample(&format!("{name}_total"), &[], value);
    }

    /// Estimate and ends of an interval, without unknown values.
    fn effects<'a>(&mut self, name: &str, help: &str, list: &[(Vec<(&'static str, &'a str)>, &'a Effect)]) {
        self.family(name, "gauge", "ratio", help);
        for (labels, effect) in list {
            for (bound, value) in [
                ("estimate", effect.estimate),
                ("lower", effect.lower),
                ("upper", effect.upper),
            ] {
                if let Some(value) = value {
                    let mut labels = labels.clone();
                    labels.push(("bound", bound));
                    self.sample(name, &labels, value);
                }
            }
        }
    }
}

/// The state as OpenMetrics text, version 1.0. Every family is declared, also those without a sample.
pub fn render(s: &Status) -> String {
    let mut t = Text::default();
    t.family("homeostat", "info", "", "The daemon.");
    t.sample(
        "homeostat_info",
        &[("version", &s.version), ("mode", &s.mode)],
        1.0,
    );
    t.gauge(
        "homeostat_paused",
        "",
        "1 while a person has paused it.",
        f64::from(u8::from(s.paused)),
    );
    t.gauge(
        "homeostat_on",
        "",
        "1 while it may act; 0 while it is switched off and advises only.",
        s.switch
            .as_ref()
            .map_or(f64::NAN, |switch| f64::from(u8::from(switch.on))),
    );
    t.gauge(
        "homeostat_state_time_seconds",
        "seconds",
        "When this was true, since the epoch.",
        s.at_unix as f64,
    );
    t.gauge(
        "homeostat_state_age_seconds",
        "seconds",
        &format!(
            "Time since the loop published this state. Above {} the loop hangs.",
            HANGS_AFTER.as_secs()
        ),
        s.view_age_s.unwrap_or(f64::NAN),
    );
    host(&mut t, s);
    workloads(&mut t, s);
    trials(&mut t, s);
    changes(&mut t, s);
    budget(&mut t, s);
    t.out.push_str("# EOF\n");
    t.out
}

fn host(t: &mut Text, s: &Status) {
    let h = &s.host;
    t.gauge("homeostat_host_cpus", "", "Online CPUs.", f64::from(h.cpus));
    t.gauge(
        "homeostat_host_cpus_busy",
        "",
        "CPUs that were busy.",
        h.cpus_busy,
    );
    t.gauge(
        "homeostat_host_cpus_stolen",
        "",
        "CPUs that the hypervisor gave to others.",
        h.cpus_stolen,
    );
    t.gauge(
        "homeostat_host_memory_bytes",
        "bytes",
        "Memory.",
        h.memory_bytes as f64,
    );
    t.gauge(
        "homeostat_host_memory_available_bytes",
        "bytes",
        "Memory available to programs.",
        h.memory_available_bytes as f64,
    );
    let name = "homeostat_host_pressure_ratio";
    t.family(
        name,
        "gauge",
        "ratio",
        "Share of the time in which at least one task waited for the resource.",
    );
    for (resource, value) in [
        ("cpu", h.pressure_cpu),
        ("memory", h.pressure_memory),
        ("io", h.pressure_io),
    ] {
        t.sample(name, &[("resource", resource)], value);
    }
}

fn workloads(t: &mut Text, s: &Status) {
    let name = "homeostat_workloads";
    t.family(name, "gauge", "", "Workloads by stage.");
    for stage in Stage::ALL {
        let listed = s.workloads.iter().filter(|w| w.stage == *stage).count() as f64;
        let more = if *stage == Stage::Ignored {
            f64::from(s.workloads_ignored)
        } else {
            0.0
        };
        t.sample(name, &[("stage", stage.as_str())], listed + more);
    }
    let seen = || s.workloads.iter().filter(|w| w.stage != Stage::Ignored);
    let name = "homeostat_workload_cpus";
    t.family(name, "gauge", "", "CPUs that the workload uses.");
    for w in seen() {
        t.sample(name, &[("workload", &w.name)], w.cpus);
    }
    let name = "homeostat_workload_resident_bytes";
    t.family(name, "gauge", "bytes", "Resident memory of the workload.");
    for w in seen() {
        t.sample(name, &[("workload", &w.name)], w.resident_bytes as f64);
    }
    let name = "homeostat_workload_large_page_bytes";
    t.family(
        name,
        "gauge",
        "bytes",
        "Resident memory of the workload in large pages.",
    );
    for w in seen() {
        if let Some(huge) = w.huge_bytes {
            t.sample(name, &[("workload", &w.name)], huge as f64);
        }
    }
    let name = "homeostat_workload_work_rate";
    t.family(
        name,
        "gauge",
        "",
        "Work of the workload per second, in units of its meter.",
    );
    for w in seen() {
        if let Some(m) = &w.meter {
            t.sample(
                name,
                &[("workload", &w.name), ("meter", &m.id), ("unit", &m.unit)],
                m.rate,
            );
        }
    }
    type Of = fn(&Meter) -> f64;
    let figures: [(&str, &str, &str, Of); 4] = [
        (
            "homeostat_workload_meter_cost_ratio",
            "ratio",
            "Share of the workload's CPU time that counting its work costs it, by hits and their price.",
            |m| m.cost,
        ),
        (
            "homeostat_workload_meter_counted_ratio",
            "ratio",
            "Share of the workload's CPU time in which its work was really counted; the rest is estimated.",
            |m| m.counted,
        ),
        (
            "homeostat_workload_meter_lag_seconds",
            "seconds",
            "How long before some of what the workload's meter tells may have been counted; 0: nothing was.",
            |m| m.lag_s,
        ),
        (
            "homeostat_workload_meter_noise_ratio",
            "ratio",
            "Coefficient of variation of the workload's work per CPU second over blocks, when its meter was taken.",
            |m| m.noise,
        ),
    ];
    for (name, unit, help, of) in figures {
        t.family(name, "gauge", unit, help);
        // Declined workloads are not counted any more.
        for w in seen().filter(|w| w.stage != Stage::Declined) {
            if let Some(m) = &w.meter {
                t.sample(name, &[("workload", &w.name), ("meter", &m.id)], of(m));
            }
        }
    }
}

fn trials(t: &mut Text, s: &Status) {
    let ids: Vec<String> = s.experiments.iter().map(|e| e.id.to_string()).collect();
    let labels = |i: usize| -> Vec<(&'static str, &str)> {
        let e = &s.experiments[i];
        vec![
            ("experiment", &ids[i]),
            ("kind", e.kind.as_str()),
            ("strategy", &e.strategy),
            ("workload", &e.workload),
        ]
    };
    let name = "homeostat_trial_blocks";
    t.family(name, "gauge", "", "Blocks of the running trial so far.");
    for (i, e) in s.experiments.iter().enumerate() {
        t.sample(name, &labels(i), f64::from(e.blocks));
    }
    let effects: Vec<_> = s
        .experiments
        .iter()
        .enumerate()
        .filter_map(|(i, e)| Some((labels(i), e.effect.as_ref()?)))
        .collect();
    t.effects(
        "homeostat_trial_effect_ratio",
        "Estimate so far of the running trial, with its interval.",
        &effects,
    );
    let name = "homeostat_trial_evidence";
    t.family(name, "gauge", "", "Evidence for a gain so far (e-value).");
    for (i, e) in s.experiments.iter().enumerate() {
        t.sample(name, &labels(i), e.evidence);
    }
    let name = "homeostat_trial_evidence_needed";
    t.family(name, "gauge", "", "What the evidence must reach.");
    for (i, e) in s.experiments.iter().enumerate() {
        t.sample(name, &labels(i), e.evidence_needed);
    }
    /// Name, unit, help, value.
    type Price = (&'static str, &'static str, &'static str, fn(&Experiment) -> f64);
    let prices: [Price; 4] = [
        (
            "homeostat_trial_stalled_seconds",
            "seconds",
            "Time for which the workload of the running trial stood still so far for the change.",
            |e| e.stalled_s,
        ),
        (
            "homeostat_trial_lost_work_seconds",
            "seconds",
            "Seconds of its work that the running trial has cost the workload so far.",
            |e| e.lost_work_s,
        ),
        (
            "homeostat_trial_added_memory_bytes",
            "bytes",
            "Memory that the change on trial added at most so far.",
            |e| e.bloat_bytes as f64,
        ),
        (
            "homeostat_trial_own_cpu_seconds",
            "seconds",
            "CPU time that homeostat has used while the running trial ran.",
            |e| e.own_cpu_s,
        ),
    ];
    for (name, unit, help, of) in prices {
        t.family(name, "gauge", unit, help);
        for (i, e) in s.experiments.iter().enumerate() {
            t.sample(name, &labels(i), of(e));
        }
    }
    let name = "homeostat_outcomes";
    t.family(
        name,
        "gauge",
        "",
        "Ended experiments that `homeostat status` still lists, by verdict.",
    );
    for verdict in Verdict::ALL {
        let count = s.outcomes.iter().filter(|o| o.verdict == *verdict).count();
        t.sample(name, &[("verdict", verdict.as_str())], count as f64);
    }
}

fn changes(t: &mut Text, s: &Status) {
    let ids: Vec<String> = s.in_force.iter().map(|c| c.action.to_string()).collect();
    let labels = |i: usize| -> Vec<(&'static str, &str)> {
        let c = &s.in_force[i];
        vec![
            ("action", &ids[i]),
            ("strategy", &c.strategy),
            ("workload", &c.workload),
        ]
    };
    let name = "homeostat_change_on";
    t.family(
        name,
        "gauge",
        "",
        "Changes in force: 1, or 0 while a probe has switched it off.",
    );
    for (i, c) in s.in_force.iter().enumerate() {
        t.sample(name, &labels(i), f64::from(u8::from(c.on)));
    }
    let effects: Vec<_> = s
        .in_force
        .iter()
        .enumerate()
        .filter_map(|(i, c)| Some((labels(i), c.effect.as_ref()?)))
        .collect();
    t.effects(
        "homeostat_change_effect_ratio",
        "Gain of the change in force, with its interval.",
        &effects,
    );
}

/// What homeostat and its canary use.
fn own_cost(t: &mut Text, b: &Budget) {
    t.gauge(
        "homeostat_own_cpu_ratio",
        "ratio",
        "Own CPU use, as a share of one CPU.",
        b.own_cpu,
    );
    t.gauge(
        "homeostat_own_resident_bytes",
        "bytes",
        "Own resident memory.",
        b.own_resident_bytes as f64,
    );
    t.gauge(
        "homeostat_canary_cpu_ratio",
        "ratio",
        "CPU use of the memory canary, as a share of one CPU; 0 while it is off.",
        b.canary_cpu,
    );
    t.gauge(
        "homeostat_canary_resident_bytes",
        "bytes",
        "Resident memory of the memory canary; 0 while it is off.",
        b.canary_resident_bytes as f64,
    );
    let name = "homeostat_own_page_faults";
    t.family(
        name,
        "counter",
        "",
        "Page faults of the loop since it began, by whether they waited for storage (major) or not (minor).",
    );
    for (kind, count) in [("minor", b.own_faults_minor), ("major", b.own_faults_major)] {
        t.sample(&format!("{name}_total"), &[("kind", kind)], count as f64);
    }
    t.counter(
        "homeostat_own_cpu_waiting_seconds",
        "seconds",
        "Time in which the loop waited for a CPU since it began.",
        b.own_waited_s,
    );
}

fn budget(t: &mut Text, s: &Status) {
    let b = &s.budget;
    let c = &s.calibration;
    own_cost(t, b);
    let kept = b.kept_small;
    t.gauge(
        "homeostat_kept_small_readers",
        "",
        "Readers that are kept small from moment to moment now (control groups of version 1).",
        kept.readers as f64,
    );
    for (name, help, count) in [
        ("homeostat_kept_small_looks", "Looks at such readers.", kept.looks),
        (
            "homeostat_kept_small_above",
            "Looks that found one more than a quarter above what it is meant to use.",
            kept.above,
        ),
        (
            "homeostat_kept_small_stuck",
            "Looks that left one with more than it is meant to use, since the kernel had found nothing more to take.",
            kept.stuck,
        ),
    ] {
        t.counter(name, "", help, count as f64);
    }
    t.gauge(
        "homeostat_trials_last_hour",
        "",
        "Experiments begun in the last hour.",
        f64::from(b.experiments_last_hour),
    );
    t.gauge(
        "homeostat_trials_per_hour_max",
        "",
        "Most experiments in an hour.",
        f64::from(b.experiments_per_hour_max),
    );
    // OpenMetrics uses ratios and seconds.
    t.gauge(
        "homeostat_harm_exposure_day_seconds",
        "seconds",
        "Harm exposure of the last 24 hours: seconds of a workload's work that trials have cost.",
        b.harm_exposure_day / 100.0,
    );
    t.gauge(
        "homeostat_harm_exposure_day_max_seconds",
        "seconds",
        "Most harm exposure in 24 hours.",
        b.harm_exposure_per_day_max / 100.0,
    );
    t.counter(
        "homeostat_stalled_seconds",
        "seconds",
        "Time that workloads stood still for changes.",
        b.stalled_s,
    );
    t.gauge(
        "homeostat_added_memory_bytes",
        "bytes",
        "Memory added by changes in force.",
        b.bloat_bytes as f64,
    );
    t.counter(
        "homeostat_tries",
        "",
        "Tries under false-discovery control, history included.",
        f64::from(c.tries),
    );
    t.counter(
        "homeostat_accepts",
        "",
        "Of which accepted.",
        f64::from(c.accepts),
    );
    t.counter(
        "homeostat_placebos",
        "",
        "Placebo experiments that were judged.",
        f64::from(c.placebos),
    );
    t.counter(
        "homeostat_false_accepts",
        "",
        "Of which accepted by mistake.",
        f64::from(c.false_accepts),
    );
    t.gauge(
        "homeostat_alpha_next",
        "",
        "Level of the next test.",
        c.alpha_next,
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_can_not_leave_its_label() {
        let mut t = Text::default();
        t.sample("x", &[("workload", "a\"} 1\n# EOF\n\\\x1b[2J")], 0.5);
        assert_eq!(
            t.out,
            "x{workload=\"a\\\"} 1\\\\n# EOF\\\\n\\\\\\\\u{1b}[2J\"} 0.5\n"
        );
    }
}
