//! Summaries of cells, and the tables that people read.

use super::{Cell, CellKind, Revoked, Run, Shown};
use crate::exact::rate_at_most;
use homeostat_statistics::Decision;
use homeostat_statistics::robust::{mean, quantile};
use serde::Serialize;
use std::fmt::Write;

/// A share is above its level only if chance explains it once in a thousand times.
const CONFIDENCE: f64 = 0.999;

/// How an interval fares against the truth (points: 1 is 1 % of the work).
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Interval {
    /// Median width (points).
    pub width: f64,
    /// Share of intervals without the truth.
    pub misses: f64,
    /// Mean estimate minus the truth (points).
    pub bias: f64,
}

impl Interval {
    /// `None` without intervals.
    fn new(shown: impl Iterator<Item = Shown>, truth: f64) -> Option<Self> {
        let all: Vec<Shown> = shown.collect();
        let points = |of: fn(&Shown) -> f64| -> Vec<f64> { all.iter().map(|s| 100.0 * of(s)).collect() };
        let missed = all.iter().filter(|s| s.lower > truth || s.upper < truth).count();
        (!all.is_empty()).then(|| Self {
            width: quantile(&points(|s| s.upper - s.lower), 0.5),
            misses: missed as f64 / all.len() as f64,
            bias: mean(&points(|s| s.gain)) - 100.0 * truth,
        })
    }
}

/// What became of a cell's runs. Shares are of all runs unless said otherwise; a time of `None` is longer than any trial.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Summary {
    /// The cell.
    #[serde(flatten)]
    pub cell: Cell,
    /// Runs whose history allowed no trial.
    pub unmeasurable: f64,
    /// Accepted.
    pub accepted: f64,
    /// Ended as harmful.
    pub harmful: f64,
    /// Ended as not worth it.
    pub futile: f64,
    /// Accepted more often than the level allows, beyond chance.
    pub is_above_level: bool,
    /// Seconds to an accept: median, unaccepted runs as infinite.
    pub seconds_median: Option<f64>,
    /// The same, 90th percentile.
    pub seconds_p90: Option<f64>,
    /// Seconds to any end: median.
    pub end_median_s: Option<f64>,
    /// Measured part of a block: median (seconds).
    pub measured_s: f64,
    /// Scale of a pair's difference by the history: median (log units).
    pub scale: f64,
    /// Lost work of a trial: median and 90th percentile (seconds).
    pub lost_s: [f64; 2],
    /// What followed the accepts.
    #[serde(flatten)]
    pub after: Afterwards,
}

/// Why changes are revoked, as the tables list it.
const REASONS: [Revoked; 6] = [
    Revoked::Losses,
    Revoked::Mean,
    Revoked::Interval,
    Revoked::Detector,
    Revoked::Scar,
    Revoked::Unproven,
];

/// What followed the accepts of a cell.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Afterwards {
    /// Lost work of the fresh pairs: median (seconds).
    pub lost_fresh_s: f64,
    /// The trial's own interval.
    pub trial: Option<Interval>,
    /// The interval of the fresh pairs.
    pub fresh: Option<Interval>,
    /// Seconds of the fresh pairs: median.
    pub fresh_s: Option<f64>,
    /// The interval of all pairs up to the end of the probation.
    pub pooled: Option<Interval>,
    /// Seconds from accept to the end of the probation: median.
    pub pooled_s: Option<f64>,
    /// Pairs up to the end of the probation: median and 90th percentile of the kept.
    pub pairs: [Option<f64>; 2],
    /// Pairs until the gain was proven with the long washout: median and 90th percentile of the accepted; `None` is never.
    pub clear_pairs: [Option<f64>; 2],
    /// Revoked, as shares of the accepted, in the order of [`REASONS`].
    pub revoked: [f64; REASONS.len()],
    /// Accepted, and kept after the probation.
    pub kept: f64,
}

impl Afterwards {
    fn new(runs: &[Run], truth: f64) -> Self {
        let after: Vec<_> = runs.iter().filter_map(|r| r.after.as_ref()).collect();
        let revoked = |why: Revoked| {
            let those = after.iter().filter(|a| a.revoked == Some(why));
            those.count() as f64 / after.len().max(1) as f64
        };
        let kept: Vec<f64> = after
            .iter()
            .filter(|a| a.is_kept())
            .map(|a| f64::from(a.pairs))
            .collect();
        let clear: Vec<f64> = after
            .iter()
            .map(|a| a.clear_pairs.map_or(f64::INFINITY, f64::from))
            .collect();
        // Of the accepted: other runs have no fresh pairs.
        let lost: Vec<f64> = runs
            .iter()
            .filter(|r| r.after.is_some())
            .map(|r| r.lost_fresh_s)
            .collect();
        Self {
            lost_fresh_s: quantile(&lost, 0.5),
            trial: Interval::new(after.iter().map(|a| a.trial), truth),
            fresh: Interval::new(after.iter().filter_map(|a| a.fresh), truth),
            fresh_s: finite(quantile(
                &after
                    .iter()
                    .filter(|a| a.fresh.is_some())
                    .map(|a| a.fresh_s)
                    .collect::<Vec<_>>(),
                0.5,
            )),
            pooled: Interval::new(after.iter().filter_map(|a| a.pooled), truth),
            pooled_s: finite(quantile(
                &after
                    .iter()
                    .filter(|a| a.is_kept())
                    .map(|a| a.pooled_s)
                    .collect::<Vec<_>>(),
                0.5,
            )),
            pairs: [0.5, 0.9].map(|p| finite(quantile(&kept, p))),
            clear_pairs: [0.5, 0.9].map(|p| finite(quantile(&clear, p))),
            revoked: REASONS.map(revoked),
            kept: after.iter().filter(|a| a.is_kept()).count() as f64 / runs.len().max(1) as f64,
        }
    }
}

fn finite(x: f64) -> Option<f64> {
    x.is_finite().then_some(x)
}

impl Summary {
    pub(super) fn new(cell: &Cell, runs: &[Run]) -> Self {
        let n = runs.len().max(1) as f64;
        let share = |is: &dyn Fn(&Run) -> bool| runs.iter().filter(|r| is(r)).count() as f64 / n;
        let decided = |d: Decision| share(&|r| r.decision == Some(d));
        let tried: Vec<&Run> = runs.iter().filter(|r| r.decision.is_some()).collect();
        let of = |what: &dyn Fn(&Run) -> f64| -> Vec<f64> { tried.iter().map(|r| what(r)).collect() };
        let to_accept: Vec<f64> = runs
            .iter()
            .map(|r| {
                if r.after.is_some() {
                    r.seconds
                } else {
                    f64::INFINITY
                }
            })
            .collect();
        let (k, total) = (
            runs.iter().filter(|r| r.after.is_some()).count() as u64,
            runs.len() as u64,
        );
        Self {
            unmeasurable: share(&|r| r.decision.is_none()),
            accepted: decided(Decision::Benefit),
            harmful: decided(Decision::Harm),
            futile: decided(Decision::Futile),
            is_above_level: cell.kind == CellKind::Null
                && 1.0 - rate_at_most(total - k, total, CONFIDENCE) > cell.alpha,
            seconds_median: finite(quantile(&to_accept, 0.5)),
            seconds_p90: finite(quantile(&to_accept, 0.9)),
            end_median_s: finite(quantile(&of(&|r| r.seconds), 0.5)),
            measured_s: quantile(&of(&|r| r.measured_s), 0.5),
            scale: quantile(&of(&|r| r.scale), 0.5),
            lost_s: [0.5, 0.9].map(|p| quantile(&of(&|r| r.lost_s), p)),
            after: Afterwards::new(runs, cell.injected.gain),
            cell: cell.clone(),
        }
    }

    /// The effect in words.
    fn effect(&self) -> String {
        let injected = self.cell.injected;
        match self.cell.kind {
            CellKind::Null => "none".into(),
            CellKind::Gain | CellKind::Loss => format!("{:+.0} %", 100.0 * injected.gain),
            CellKind::Scar => format!("scar {:.0} % {} s", 100.0 * injected.scar, injected.scar_s),
            CellKind::Onset => format!(
                "{:+.0} % tau {}{}",
                100.0 * injected.gain,
                injected.onset_s,
                if self.cell.known_onset_s > 0.0 {
                    " known"
                } else {
                    ""
                }
            ),
        }
    }

    fn level(&self) -> String {
        match self.cell.number {
            Some(number) => format!("{:.5} (try {number})", self.cell.alpha),
            None => format!("{:.5}", self.cell.alpha),
        }
    }

    fn head(&self) -> Vec<String> {
        let objective = match self.cell.objective {
            super::Objective::Cpu => "",
            super::Objective::Wall => " (wall)",
        };
        vec![
            format!("{}{objective}", self.cell.record),
            self.effect(),
            self.level(),
        ]
    }
}

/// Cells that were accepted more often than their level allows.
pub fn complaints(cells: &[Summary]) -> Vec<String> {
    cells
        .iter()
        .filter(|c| c.is_above_level)
        .map(|c| {
            format!(
                "{}: {:.4} of the schedules were accepted without an effect, level {}",
                c.cell.record,
                c.accepted,
                c.level()
            )
        })
        .collect()
}

/// Columns as wide as their widest cell, two spaces apart.
fn columns(out: &mut String, title: &str, head: &[&str], rows: &[Vec<String>]) {
    if rows.is_empty() {
        return;
    }
    let head: Vec<String> = head.iter().map(|h| (*h).to_owned()).collect();
    let width = |i: usize| {
        let cells = rows.iter().chain([&head]).filter_map(|r| r.get(i));
        cells.map(|c| c.chars().count()).max().unwrap_or(0)
    };
    let _ = writeln!(out, "{title}\n");
    for row in [&head].into_iter().chain(rows) {
        let mut line = String::new();
        for (i, cell) in row.iter().enumerate() {
            let _ = write!(line, "{cell:<0$}  ", width(i));
        }
        let _ = writeln!(out, "{}", line.trim_end());
    }
    out.push('\n');
}

fn percent(share: f64) -> String {
    format!("{:.1} %", 100.0 * share)
}

fn or_never(value: Option<f64>) -> String {
    value.map_or("-".into(), |v| format!("{v:.0}"))
}

fn interval(i: Option<&Interval>) -> [String; 3] {
    i.map_or(["-".into(), "-".into(), "-".into()], |i| {
        [
            format!("{:.1}", i.width),
            percent(i.misses),
            format!("{:+.2}", i.bias),
        ]
    })
}

/// The tables of a report.
pub fn text(cells: &[Summary]) -> String {
    let mut out = String::new();
    verdicts(&mut out, cells);
    intervals(&mut out, cells);
    afterwards(&mut out, cells);
    out
}

/// How often and how fast trials end.
fn verdicts(out: &mut String, cells: &[Summary]) {
    let verdicts = cells.iter().map(|c| {
        let mark = if c.is_above_level { " ABOVE LEVEL" } else { "" };
        let mut row = c.head();
        row.extend([
            format!("{:.2} %{mark}", 100.0 * c.accepted),
            format!("{} / {}", or_never(c.seconds_median), or_never(c.seconds_p90)),
            percent(c.harmful),
            percent(c.futile),
            or_never(c.end_median_s),
            format!("{} s", c.measured_s),
            percent(c.scale),
            format!("{:.1} / {:.1}", c.lost_s[0], c.lost_s[1]),
            percent(c.unmeasurable),
        ]);
        row
    });
    columns(
        out,
        "Verdicts. Seconds to an accept: median / 90th percentile of all runs; -: longer than a trial. Lost work in s.",
        &[
            "record", "effect", "level", "accepted", "seconds", "harmful", "futile", "end s", "block",
            "noise", "lost s", "no trial",
        ],
        &verdicts.collect::<Vec<_>>(),
    );
}

/// How good the shown gains are.
fn intervals(out: &mut String, cells: &[Summary]) {
    let shown = cells
        .iter()
        .filter(|c| c.after.fresh.is_some() && c.cell.injected.gain > 0.0);
    let shown = shown.map(|c| {
        let mut row = c.head();
        row.extend(interval(c.after.trial.as_ref()));
        row.extend(interval(c.after.fresh.as_ref()));
        row.extend([or_never(c.after.fresh_s), format!("{:.1}", c.after.lost_fresh_s)]);
        row.extend(interval(c.after.pooled.as_ref()));
        row.push(or_never(c.after.pooled_s));
        row
    });
    columns(
        out,
        "Intervals after an accept: width, misses and bias (points) of the trial, the fresh pairs, and with the probation.",
        &[
            "record", "effect", "level", "trial", "miss", "bias", "fresh", "miss", "bias", "s", "lost s",
            "pooled", "miss", "bias", "s",
        ],
        &shown.collect::<Vec<_>>(),
    );
}

/// What the guard makes of accepted changes.
fn afterwards(out: &mut String, cells: &[Summary]) {
    let scars = cells.iter().filter(|c| c.accepted > 0.0).map(|c| {
        let mut row = c.head();
        row.extend([
            percent(c.accepted),
            format!(
                "{} / {}",
                or_never(c.after.clear_pairs[0]),
                or_never(c.after.clear_pairs[1])
            ),
            format!("{} / {}", or_never(c.after.pairs[0]), or_never(c.after.pairs[1])),
            c.after
                .revoked
                .map(|share| format!("{:.0}", 100.0 * share))
                .join("/"),
            percent(c.after.kept),
        ]);
        row
    });
    columns(
        out,
        "After an accept, in probe pairs: until the gain is proven with the long washout, and until the end of the probation of \
         the kept (median / 90th percentile). Revoked (% of the accepted): losses/mean/interval/detector/scar/unproven. Kept: of \
         all runs.",
        &[
            "record",
            "effect",
            "level",
            "accepted",
            "clear pairs",
            "probation",
            "revoked",
            "kept",
        ],
        &scars.collect::<Vec<_>>(),
    );
}

/// The table for operators, in Markdown: seconds to a proof by gain and record, the quietest record first.
pub fn operators(cells: &[Summary]) -> String {
    let gains: Vec<&Summary> = cells.iter().filter(|c| c.cell.kind == CellKind::Gain).collect();
    let mut effects: Vec<String> = Vec::new();
    let mut records: Vec<(f64, &str)> = Vec::new();
    for c in &gains {
        if !effects.contains(&c.effect()) {
            effects.push(c.effect());
        }
        if !records.iter().any(|(_, name)| *name == c.cell.record) {
            records.push((c.scale, &c.cell.record));
        }
    }
    records.sort_by(|a, b| a.0.total_cmp(&b.0));
    let mut out = format!("| record | noise | {} |\n|---|---|", effects.join(" | "));
    out += &"---|".repeat(effects.len());
    out.push('\n');
    for (noise, name) in records {
        let _ = write!(out, "| {name} | {:.1} % |", 100.0 * noise);
        for effect in &effects {
            let cell = gains
                .iter()
                .find(|c| c.cell.record == name && c.effect() == *effect);
            let _ = match cell {
                Some(c) => write!(
                    out,
                    " {} / {} |",
                    or_never(c.seconds_median),
                    or_never(c.seconds_p90)
                ),
                None => write!(out, " |"),
            };
        }
        out.push('\n');
    }
    out
}
