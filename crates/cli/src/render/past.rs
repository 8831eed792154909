//! Experiments of the past.

use super::text::{
    Look, all_of, bytes, count, effect, first_of, hours_or_less, lost_work, percent, plural, table, wrap,
};
use super::{limits, verdict_tone};
use homeostat_daemon::api::ExperimentKind;
use homeostat_daemon::report::{Past, PastExperiment};
use std::fmt::Write as _;

/// `homeostat history`.
pub fn past(p: &Past, look: &Look) -> String {
    if p.experiments.is_empty() {
        return "No experiment yet. `homeostat status` shows what is being looked at.\n".into();
    }
    let rows: Vec<Vec<String>> = p
        .experiments
        .iter()
        .map(|e| {
            let verdict = e.verdict.as_deref().unwrap_or("unfinished");
            vec![
                e.id.to_string(),
                look.ago(e.started_unix) + " ago",
                first_of(&e.workload, &e.others),
                if e.kind == ExperimentKind::Placebo {
                    "placebo".into()
                } else {
                    e.strategy.to_string()
                },
                look.paint(verdict_tone(verdict), verdict),
                e.effect.as_ref().map_or_else(String::new, effect),
                why(e),
            ]
        })
        .collect();
    let mut out = table(
        &["NO", "WHEN", "WORKLOAD", "TRIED", "VERDICT", "EFFECT", "WHY"],
        &rows,
        look,
    );
    let _ = writeln!(
        out,
        "\nEvery block of one: homeostat history --blocks {}",
        p.experiments[0].id
    );
    out
}

/// Why it ended as it did. One without a verdict runs, or was cut off by a crash or a power loss.
fn why(e: &PastExperiment) -> String {
    match (&e.verdict, e.reason.is_empty()) {
        (None, true) => "no verdict: it still runs, or a crash or a power loss cut it off".into(),
        _ => e.reason.clone(),
    }
}

/// `homeostat history --blocks`.
pub fn experiment(e: &PastExperiment, look: &Look) -> String {
    let mut out = String::new();
    let verdict = e.verdict.as_deref().unwrap_or("unfinished");
    let _ = writeln!(
        out,
        "Experiment {} ({} of {}) on {}: {} {}",
        e.id,
        e.kind.replace('_', " "),
        e.strategy,
        all_of(&e.workload, &e.others),
        look.paint(verdict_tone(verdict), verdict),
        e.effect.as_ref().map_or_else(String::new, effect)
    );
    if !e.reason.is_empty() {
        out.push_str(&wrap(&e.reason, "  ", look.width));
    }
    out.push_str(&wrap(
        &format!("hypothesis: {}; predicted {}", e.hypothesis, effect(&e.predicted)),
        "  ",
        look.width,
    ));
    out.push_str(&wrap(
        &format!("judged by {} of {}", e.objective, e.meter),
        "  ",
        look.width,
    ));
    let spans = e.spans.iter().map(|s| (&s.workload, &s.text));
    let meanings = e.meanings.iter().map(|m| (&m.workload, &m.text));
    for (workload, text) in spans.chain(meanings) {
        let text = if e.others.is_empty() {
            text.clone()
        } else {
            format!("{workload}: {text}")
        };
        out.push_str(&wrap(&text, "  ", look.width));
    }
    for line in limits(e.off_level.as_ref(), &e.not_excluded) {
        out.push_str(&wrap(&line, "  ", look.width));
    }
    let _ = writeln!(
        out,
        "  {} of {} + {} washout; level {}; evidence {}; took {}",
        plural(e.blocks.len() as u64, "block"),
        hours_or_less(e.measured_s),
        hours_or_less(e.washout_s),
        percent(e.alpha, 2),
        e.evidence.map_or_else(|| "?".into(), count),
        hours_or_less(e.ended_unix.saturating_sub(e.started_unix) as f64),
    );
    let _ = writeln!(
        out,
        "  cost: {} of standstill, {} of memory added, {} of lost work",
        hours_or_less(e.stalled_s),
        bytes(e.bloat_bytes),
        e.harm_exposure.map_or_else(|| "unknown".into(), lost_work),
    );
    let first = e.blocks.first().and_then(|b| b.measured_from_s).unwrap_or(0.0);
    let rows: Vec<Vec<String>> = e
        .blocks
        .iter()
        .map(|b| {
            vec![
                b.index.to_string(),
                if b.on { "on" } else { "off" }.into(),
                b.measured_from_s
                    .map_or_else(|| "?".into(), |from| format!("{:.1}", from - first)),
                format!("{:.1}", b.measured_s),
                b.work.map_or_else(|| "?".into(), count),
                format!("{:.2}", b.cpu_s),
                b.score.map_or_else(|| "?".into(), |s| format!("{s:.4}")),
                if b.broken {
                    "ended by the circuit breaker".into()
                } else {
                    String::new()
                },
            ]
        })
        .collect();
    out.push('\n');
    out.push_str(&table(
        &["BLOCK", "ARM", "FROM S", "SECONDS", "WORK", "CPU S", "SCORE", ""],
        &rows,
        look,
    ));
    out
}
