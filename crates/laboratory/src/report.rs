//! What a run looked like: the table before and after, curves in the terminal, one self-contained page of HTML.
//!
//! Everything here is drawn from [`Track`]s alone; nothing is computed anew and nothing is left out that the run saw.

use crate::run::{Arm, Line, Point, Track};
use crate::scenario::Window;
use serde::Serialize;
use std::fmt::Write;

/// A curve that is drawn: its name, its unit, and where it is found in a point.
struct Quantity {
    name: &'static str,
    unit: &'static str,
    /// Shares are drawn from 0 to 100.
    share: bool,
    of: fn(&Point) -> Option<f64>,
}

const QUANTITIES: &[Quantity] = &[
    Quantity {
        name: "throughput",
        unit: "per second",
        share: false,
        of: |p| Some(p.work_per_s),
    },
    Quantity {
        name: "locality",
        unit: "% of memory accesses",
        share: true,
        of: |p| p.local_share.map(|s| s * 100.0),
    },
    Quantity {
        name: "cores used",
        unit: "cores",
        share: false,
        of: |p| Some(p.cores),
    },
    Quantity {
        name: "page sizes",
        unit: "% of memory on large pages",
        share: true,
        of: |p| Some(p.large_share * 100.0),
    },
    Quantity {
        name: "prefetch",
        unit: "% of memory traffic",
        share: true,
        of: |p| p.prefetch_share.map(|s| s * 100.0),
    },
    Quantity {
        name: "response time",
        unit: "ms, 95th percentile",
        share: false,
        of: |p| p.response_p95_ms,
    },
];

/// One program before and after: means over the windows.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Comparison {
    /// The program.
    pub program: String,
    /// What one unit of its work is.
    pub unit: String,
    /// Means over the window before.
    pub before: Point,
    /// Means over the window after.
    pub after: Point,
    /// Relative change of work per second; `None` when there was none before.
    pub gain: Option<f64>,
}

/// Means of one program's points over a window, weighted by time; its `seconds` are those that points cover.
pub fn means(points: &[Point], window: Window) -> Point {
    let mut out = Point {
        at_s: window.to_s,
        ..Point::default()
    };
    let mut optional = [(0.0f64, 0.0f64); 6];
    for p in points {
        let from = (p.at_s - p.seconds).max(window.from_s);
        let seconds = p.at_s.min(window.to_s) - from;
        if seconds <= 1e-9 {
            continue;
        }
        out.seconds += seconds;
        out.work_per_s += p.work_per_s * seconds;
        out.cpus += p.cpus * seconds;
        out.cores += p.cores * seconds;
        out.large_share += p.large_share * seconds;
        let values = [
            p.local_share,
            p.prefetch_share,
            p.response_mean_ms,
            p.response_p95_ms,
            p.cycles_per_instruction,
            p.latency_ns,
        ];
        if out.type_response_ms.len() < p.type_response_ms.len() {
            out.type_response_ms.resize(p.type_response_ms.len(), 0.0);
        }
        for (sum, ms) in out.type_response_ms.iter_mut().zip(&p.type_response_ms) {
            *sum += ms * p.work_per_s * seconds;
        }
        for (sum, value) in optional.iter_mut().zip(values) {
            if let Some(v) = value.filter(|v| v.is_finite()) {
                sum.0 += v * seconds;
                sum.1 += seconds;
            }
        }
    }
    if out.work_per_s > 0.0 {
        for ms in &mut out.type_response_ms {
            *ms /= out.work_per_s;
        }
    }
    if out.seconds > 0.0 {
        for v in [
            &mut out.work_per_s,
            &mut out.cpus,
            &mut out.cores,
            &mut out.large_share,
        ] {
            *v /= out.seconds;
        }
    }
    let mean = |(sum, seconds): (f64, f64)| (seconds > 0.0).then(|| sum / seconds);
    let [local, prefetch, response_mean, response_p95, cpi, latency] = optional.map(mean);
    out.local_share = local;
    out.prefetch_share = prefetch;
    out.response_mean_ms = response_mean;
    out.response_p95_ms = response_p95;
    out.cycles_per_instruction = cpi;
    out.latency_ns = latency;
    out
}

/// Every program of two tracks side by side, each over its window.
pub fn compare(
    before: &Track,
    before_window: Window,
    after: &Track,
    after_window: Window,
) -> Vec<Comparison> {
    before
        .programs
        .iter()
        .filter_map(|b| {
            let a = after.programs.iter().find(|a| a.program == b.program)?;
            let (mb, ma) = (means(&b.points, before_window), means(&a.points, after_window));
            Some(Comparison {
                program: b.program.clone(),
                unit: b.unit.clone(),
                gain: (mb.work_per_s > 0.0).then(|| ma.work_per_s / mb.work_per_s - 1.0),
                before: mb,
                after: ma,
            })
        })
        .collect()
}

/// A number with about four digits.
pub fn number(value: f64) -> String {
    let size = value.abs();
    if !value.is_finite() {
        "-".to_owned()
    } else if size >= 1000.0 {
        format!("{value:.0}")
    } else if size >= 100.0 {
        format!("{value:.1}")
    } else if size >= 1.0 || size == 0.0 {
        format!("{value:.2}")
    } else {
        format!("{value:.4}")
    }
}

fn optional(value: Option<f64>) -> String {
    value.map_or_else(|| "-".to_owned(), number)
}

fn percent(value: Option<f64>) -> String {
    value.map_or_else(|| "-".to_owned(), |v| format!("{:.1} %", v * 100.0))
}

/// A table with its columns aligned: the first to the left, the others to the right.
pub fn table(head: &[&str], rows: &[Vec<String>]) -> String {
    let mut width: Vec<usize> = head.iter().map(|h| h.chars().count()).collect();
    for row in rows {
        for (w, cell) in width.iter_mut().zip(row) {
            *w = (*w).max(cell.chars().count());
        }
    }
    let line = |cells: &[String]| {
        let mut out = String::new();
        for (i, (cell, w)) in cells.iter().zip(&width).enumerate() {
            let fill = " ".repeat(w.saturating_sub(cell.chars().count()));
            if i == 0 {
                let _ = write!(out, "  {cell}{fill}");
            } else {
                let _ = write!(out, "  {fill}{cell}");
            }
        }
        format!("{}\n", out.trim_end())
    };
    let mut out = line(&head.iter().map(|h| (*h).to_owned()).collect::<Vec<_>>());
    for row in rows {
        out.push_str(&line(row));
    }
    out
}

/// The table before and after.
pub fn before_after(comparisons: &[Comparison]) -> String {
    let mut rows = Vec::new();
    for c in comparisons {
        for (what, m) in [("before", &c.before), ("after", &c.after)] {
            rows.push(vec![
                format!("{} {what}", c.program),
                number(m.work_per_s),
                if what == "after" {
                    c.gain
                        .map_or_else(|| "-".to_owned(), |g| format!("{:+.1} %", g * 100.0))
                } else {
                    String::new()
                },
                number(m.cpus),
                number(m.cores),
                percent(m.local_share),
                percent(Some(m.large_share)),
                percent(m.prefetch_share),
                optional(m.response_p95_ms),
                optional(m.cycles_per_instruction),
            ]);
        }
    }
    table(
        &[
            "program", "work/s", "change", "CPUs", "cores", "local", "large", "prefetch", "p95 ms", "CPI",
        ],
        &rows,
    )
}

/// A moment of the run as people say it: `0:01:30`.
pub fn moment(seconds: f64) -> String {
    let s = seconds.max(0.0).round() as u64;
    format!("{}:{:02}:{:02}", s / 3600, s / 60 % 60, s % 60)
}

/// The story of a run, a line each, as the daemon's log would tell it.
pub fn story(lines: &[Line]) -> String {
    let mut out = String::new();
    for line in lines {
        out.push_str(&story_line(line));
        out.push('\n');
    }
    out
}

/// One line of the story.
pub fn story_line(line: &Line) -> String {
    let who = line.workload.as_deref().unwrap_or("machine");
    let warning = if line.warning { "warning: " } else { "" };
    format!(
        "{:>8}  {who} {}: {warning}{}",
        moment(line.at_s),
        line.stage,
        line.text
    )
}

/// Whether the line tells of a decision that belongs on the time axis.
fn is_mark(line: &Line) -> bool {
    match line.stage.as_str() {
        "trying" | "event" => true,
        // That there is nothing more to do is no decision to do something.
        "improved" => !line.text.starts_with("nothing further"),
        "declined" => line.warning,
        _ => false,
    }
}

/// A decision on the time axis: a letter, and all lines of that moment.
struct Mark<'a> {
    letter: String,
    line: &'a Line,
}

/// Letters for the decisions, at most as many as can be told apart.
fn marks(lines: &[Line], most: usize) -> Vec<Mark<'_>> {
    lines
        .iter()
        .filter(|l| is_mark(l))
        .take(most)
        .enumerate()
        .map(|(i, line)| {
            let letter = char::from(b'a' + (i % 26) as u8);
            Mark {
                letter: if i < 26 {
                    letter.to_string()
                } else {
                    format!("{letter}{}", i / 26)
                },
                line,
            }
        })
        .collect()
}

/// Rounds up to a number that is easy to read on an axis.
fn ceiling(value: f64) -> f64 {
    if !(value > 0.0 && value.is_finite()) {
        return 1.0;
    }
    let power = 10f64.powf(value.log10().floor());
    [1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0]
        .iter()
        .map(|f| f * power)
        .find(|c| *c >= value * 0.999_999)
        .unwrap_or(10.0 * power)
}

/// The top of the axis for a quantity over all tracks.
fn top(q: &Quantity, tracks: &[&Track], program: &str) -> f64 {
    if q.share {
        return 100.0;
    }
    let largest = points_of(tracks, program)
        .flat_map(|(_, points)| points.iter().filter_map(q.of))
        .filter(|v| v.is_finite())
        .fold(0.0, f64::max);
    ceiling(largest)
}

fn points_of<'a>(tracks: &'a [&'a Track], program: &'a str) -> impl Iterator<Item = (Arm, &'a [Point])> {
    tracks.iter().filter_map(move |t| {
        let p = t.programs.iter().find(|p| p.program == program)?;
        Some((t.arm, p.points.as_slice()))
    })
}

/// Whether a curve shows anything: there are values, and not all are zero.
fn worth_drawing(q: &Quantity, tracks: &[&Track], program: &str) -> bool {
    points_of(tracks, program)
        .flat_map(|(_, points)| points.iter().filter_map(q.of))
        .any(|v| v.is_finite() && v > 0.0)
}

/// Programs drawn at most, in the order of the scenario.
const PROGRAMS_DRAWN_MAX: usize = 8;

/// The letter with which an arm is drawn in the terminal, later arms over earlier ones.
fn pen(arm: Arm, unicode: bool) -> char {
    match (arm, unicode) {
        (Arm::LeftAlone, _) => '.',
        (Arm::Manual, true) => '∘',
        (Arm::Manual, false) => 'o',
        (Arm::Homeostat, true) => '█',
        (Arm::Homeostat, false) => '#',
    }
}

/// Curves in the terminal, `width` characters wide: throughput, locality, cores, page sizes, prefetch of each program,
/// with the decisions as letters on the time axis. ASCII only unless `unicode`.
pub fn plot(tracks: &[&Track], width: usize, unicode: bool) -> String {
    const HEIGHT: usize = 10;
    const LEFT: usize = 9;
    let Some(first) = tracks.first() else {
        return String::new();
    };
    let columns = width.clamp(40, 200) - LEFT - 2;
    let length = tracks.iter().map(|t| t.length_s).fold(0.0, f64::max).max(1.0);
    let column = |at: f64| ((at / length * columns as f64) as usize).min(columns - 1);
    let mut order: Vec<&Track> = tracks.to_vec();
    order.sort_by_key(|t| t.arm != Arm::LeftAlone);
    order.sort_by_key(|t| t.arm == Arm::Homeostat);
    let story = tracks
        .iter()
        .find(|t| t.arm == Arm::Homeostat)
        .map_or(&[][..], |t| t.story.as_slice());
    let marks = marks(story, 26);
    let mut out = String::new();
    for program in first.programs.iter().take(PROGRAMS_DRAWN_MAX) {
        for q in QUANTITIES {
            if !worth_drawing(q, &order, &program.program) {
                continue;
            }
            let top = top(q, &order, &program.program);
            let mut grid = vec![vec![' '; columns]; HEIGHT];
            for (arm, points) in points_of(&order, &program.program) {
                // Mean of the points that fall into a column: what is drawn does not depend on the resolution.
                let mut sums = vec![(0.0, 0u32); columns];
                for p in points {
                    if let Some(v) = (q.of)(p).filter(|v| v.is_finite()) {
                        let c = column(p.at_s - p.seconds / 2.0);
                        sums[c].0 += v;
                        sums[c].1 += 1;
                    }
                }
                let mut last: Option<usize> = None;
                for (c, (sum, n)) in sums.iter().enumerate() {
                    let row = if *n > 0 {
                        let level = (sum / f64::from(*n) / top).clamp(0.0, 1.0);
                        Some(HEIGHT - 1 - ((level * HEIGHT as f64) as usize).min(HEIGHT - 1))
                    } else {
                        last.filter(|_| sums.iter().skip(c).any(|s| s.1 > 0))
                    };
                    if let Some(r) = row {
                        grid[r][c] = pen(arm, unicode);
                    }
                    last = row.or(last);
                }
            }
            let of = if program.unit.is_empty() || q.unit != "per second" {
                q.unit.to_owned()
            } else {
                format!("{} per second", program.unit)
            };
            let _ = writeln!(out, "{}: {} ({of})", program.program, q.name);
            let bar = if unicode { '│' } else { '|' };
            for (r, row) in grid.iter().enumerate() {
                let label = match r {
                    0 => number(top),
                    r if r == HEIGHT - 1 => "0".to_owned(),
                    r if r == HEIGHT / 2 => number(top * (HEIGHT - 1 - r) as f64 / (HEIGHT - 1) as f64),
                    _ => String::new(),
                };
                let cells: String = row.iter().collect();
                let _ = writeln!(out, "{label:>LEFT$} {bar}{}", cells.trim_end());
            }
            let mut axis = vec![if unicode { '─' } else { '-' }; columns];
            for m in &marks {
                if let Some(c) = m.letter.chars().next() {
                    axis[column(m.line.at_s)] = c;
                }
            }
            let corner = if unicode { '└' } else { '+' };
            let _ = writeln!(out, "{:>LEFT$} {corner}{}", "", axis.iter().collect::<String>());
            let end = moment(length);
            let _ = writeln!(
                out,
                "{:>LEFT$}  0:00:00{end:>fill$}\n",
                "",
                fill = columns.saturating_sub(7).max(end.len())
            );
        }
    }
    let legend: Vec<String> = order
        .iter()
        .map(|t| format!("{} {}", pen(t.arm, unicode), t.arm.words()))
        .collect();
    let _ = writeln!(out, "{}", legend.join("   "));
    for m in &marks {
        let who = m.line.workload.as_deref().unwrap_or("machine");
        let text: String = m
            .line
            .text
            .chars()
            .take(width.clamp(40, 200).saturating_sub(16 + who.chars().count()))
            .collect();
        let _ = writeln!(out, "{} {:>8} {who}: {text}", m.letter, moment(m.line.at_s));
    }
    out
}

/// Text that may stand in HTML.
pub(crate) fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            c => out.push(c),
        }
    }
    out
}

/// Look of every page, light and dark.
pub(crate) const STYLE: &str = "\
:root{color-scheme:light dark;--ink:#1d2430;--paper:#fff;--soft:#667;--rule:#d8dbe2;--alone:#8a8f9c;--manual:#c47a12;--homeostat:#1668b8}\
@media(prefers-color-scheme:dark){:root{--ink:#e6e8ee;--paper:#14171d;--soft:#98a;--rule:#333a46;--alone:#7c8291;--manual:#e0a34a;--homeostat:#5aa7f0}}\
body{font:15px/1.45 system-ui,sans-serif;color:var(--ink);background:var(--paper);margin:2rem auto;max-width:66rem;padding:0 1rem}\
h1{font-size:1.5rem}h2{font-size:1.1rem;margin-top:2rem}h3{font-size:.95rem;margin:.9rem 0 .1rem;font-weight:600}\
p.source{color:var(--soft)}svg{width:100%;height:auto;display:block}svg text{font-size:11px;fill:var(--soft)}\
.axis{stroke:var(--rule);stroke-width:1}.mark{stroke:var(--soft);stroke-width:1;stroke-dasharray:2 3}\
polyline{fill:none;stroke-width:1.6}.alone{stroke:var(--alone)}.manual{stroke:var(--manual)}.homeostat{stroke:var(--homeostat)}\
circle.published{fill:none;stroke:var(--ink);stroke-width:1.4}\
table{border-collapse:collapse;width:100%}td,th{padding:.2rem .6rem;border-bottom:1px solid var(--rule);text-align:right}\
td:first-child,th:first-child{text-align:left}td.text{text-align:left}.key span{margin-right:1.4rem}.warning{color:#b3261e}";

fn class(arm: Arm) -> &'static str {
    match arm {
        Arm::LeftAlone => "alone",
        Arm::Manual => "manual",
        Arm::Homeostat => "homeostat",
    }
}

/// A point that was published for a curve: moment in seconds, value.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct PublishedPoint {
    /// Seconds since the start.
    pub at_s: f64,
    /// Value in the unit of the curve.
    pub value: f64,
}

/// Published points of one curve (`throughput`, `locality`) of one program.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PublishedCurve {
    /// Name of the curve, as the page calls it.
    pub curve: String,
    /// The points.
    pub points: Vec<PublishedPoint>,
}

/// One self-contained page: curves of every program as SVG, decisions on the time axis, the table, the story.
pub fn html(
    title: &str,
    source: &str,
    tracks: &[&Track],
    comparisons: &[Comparison],
    published: &[PublishedCurve],
) -> String {
    let mut out = format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><meta name=\"viewport\" content=\"width=device-width\">\
         <title>{0}</title><style>{STYLE}</style></head><body>\n<h1>{0}</h1>\n<p class=\"source\">{1}</p>\n<p class=\"key\">",
        escape(title),
        escape(source)
    );
    for t in tracks {
        let _ = write!(
            out,
            "<span><svg style=\"display:inline;width:2rem\" viewBox=\"0 0 20 8\"><polyline class=\"{}\" points=\"0,4 20,4\"/></svg> {}</span>",
            class(t.arm),
            t.arm.words()
        );
    }
    if !published.is_empty() {
        out.push_str("<span>○ published</span>");
    }
    out.push_str("</p>\n");
    let story = tracks
        .iter()
        .find(|t| t.arm == Arm::Homeostat)
        .map_or(&[][..], |t| t.story.as_slice());
    let marks = marks(story, 104);
    if let Some(first) = tracks.first() {
        let length = tracks.iter().map(|t| t.length_s).fold(0.0, f64::max).max(1.0);
        for program in first.programs.iter().take(PROGRAMS_DRAWN_MAX) {
            let _ = writeln!(out, "<h2>{}</h2>", escape(&program.program));
            for q in QUANTITIES {
                if worth_drawing(q, tracks, &program.program) {
                    chart(
                        &mut out,
                        q,
                        &program.program,
                        &program.unit,
                        tracks,
                        &marks,
                        length,
                        published,
                    );
                }
            }
        }
        let hidden = first.programs.len().saturating_sub(PROGRAMS_DRAWN_MAX);
        if hidden > 0 {
            let _ = writeln!(out, "<p>{hidden} further programs are in the table only.</p>");
        }
    }
    out.push_str("<h2>Before and after</h2>\n<table><tr><th>program</th><th>work per second</th><th>change</th><th>CPUs</th><th>cores</th><th>local</th><th>large pages</th><th>prefetch</th><th>p95 ms</th></tr>\n");
    for c in comparisons {
        for (what, m) in [("before", &c.before), ("after", &c.after)] {
            let change = match (what, c.gain) {
                ("after", Some(g)) => format!("{:+.1} %", g * 100.0),
                _ => String::new(),
            };
            let _ = writeln!(
                out,
                "<tr><td>{} {what}</td><td>{}</td><td>{change}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td></tr>",
                escape(&c.program),
                number(m.work_per_s),
                number(m.cpus),
                number(m.cores),
                percent(m.local_share),
                percent(Some(m.large_share)),
                percent(m.prefetch_share),
                optional(m.response_p95_ms)
            );
        }
    }
    out.push_str("</table>\n<h2>What happened</h2>\n<table>\n");
    for line in story {
        let letter = marks
            .iter()
            .find(|m| std::ptr::eq(m.line, line))
            .map_or("", |m| m.letter.as_str());
        let _ = writeln!(
            out,
            "<tr><td>{}</td><td>{letter}</td><td class=\"text\">{}</td><td class=\"text\">{}</td><td class=\"text{}\">{}</td></tr>",
            moment(line.at_s),
            escape(line.workload.as_deref().unwrap_or("machine")),
            escape(&line.stage),
            if line.warning { " warning" } else { "" },
            escape(&line.text)
        );
    }
    out.push_str("</table>\n</body></html>\n");
    out
}

#[expect(
    clippy::too_many_arguments,
    reason = "one caller; a struct would only repeat the names"
)]
fn chart(
    out: &mut String,
    q: &Quantity,
    program: &str,
    unit: &str,
    tracks: &[&Track],
    marks: &[Mark<'_>],
    length: f64,
    published: &[PublishedCurve],
) {
    const WIDTH: f64 = 1000.0;
    const HEIGHT: f64 = 170.0;
    const LEFT: f64 = 62.0;
    const BOTTOM: f64 = 22.0;
    const TOP: f64 = 16.0;
    let curve = published.iter().find(|c| c.curve == q.name);
    let largest = curve.map_or(0.0, |c| c.points.iter().map(|p| p.value).fold(0.0, f64::max));
    let top = top(q, tracks, program).max(ceiling(largest));
    let x = |at: f64| LEFT + (WIDTH - LEFT - 4.0) * (at / length).clamp(0.0, 1.0);
    let y = |v: f64| HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * (v / top).clamp(0.0, 1.0);
    let of = if unit.is_empty() || q.unit != "per second" {
        q.unit.to_owned()
    } else {
        format!("{unit} per second")
    };
    let _ = writeln!(
        out,
        "<h3>{} <small>({})</small></h3>\n<svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\">",
        q.name,
        escape(&of)
    );
    for i in 0..=2 {
        let v = top * f64::from(i) / 2.0;
        let _ = writeln!(
            out,
            "<line class=\"axis\" x1=\"{LEFT}\" x2=\"{WIDTH}\" y1=\"{0:.1}\" y2=\"{0:.1}\"/><text x=\"{1}\" y=\"{2:.1}\" text-anchor=\"end\">{3}</text>",
            y(v),
            LEFT - 6.0,
            y(v) + 4.0,
            number(v)
        );
    }
    for i in 0..=4 {
        let at = length * f64::from(i) / 4.0;
        let anchor = match i {
            0 => "start",
            4 => "end",
            _ => "middle",
        };
        let _ = writeln!(
            out,
            "<text x=\"{:.1}\" y=\"{}\" text-anchor=\"{anchor}\">{}</text>",
            x(at),
            HEIGHT - 6.0,
            moment(at)
        );
    }
    for m in marks {
        let at = x(m.line.at_s);
        let who = m.line.workload.as_deref().unwrap_or("machine");
        let _ = writeln!(
            out,
            "<g><title>{} {}: {}</title><line class=\"mark\" x1=\"{at:.1}\" x2=\"{at:.1}\" y1=\"{TOP}\" y2=\"{:.1}\"/><text x=\"{at:.1}\" y=\"11\" text-anchor=\"middle\">{}</text></g>",
            moment(m.line.at_s),
            escape(who),
            escape(&m.line.text),
            HEIGHT - BOTTOM,
            m.letter
        );
    }
    for (arm, points) in points_of(tracks, program) {
        let mut line = String::new();
        for p in points {
            if let Some(v) = (q.of)(p).filter(|v| v.is_finite()) {
                let _ = write!(line, "{:.1},{:.1} ", x(p.at_s - p.seconds / 2.0), y(v));
            }
        }
        let _ = writeln!(
            out,
            "<polyline class=\"{}\" points=\"{}\"/>",
            class(arm),
            line.trim_end()
        );
    }
    if let Some(curve) = curve {
        for p in &curve.points {
            let _ = writeln!(
                out,
                "<circle class=\"published\" cx=\"{:.1}\" cy=\"{:.1}\" r=\"4\"><title>published: {} at {}</title></circle>",
                x(p.at_s),
                y(p.value),
                number(p.value),
                moment(p.at_s)
            );
        }
    }
    out.push_str("</svg>\n");
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::ProgramTrack;

    fn track(arm: Arm, rate: impl Fn(f64) -> f64) -> Track {
        let points = (1..=60)
            .map(|i| {
                let at_s = f64::from(i) * 60.0;
                Point {
                    at_s,
                    seconds: 60.0,
                    work_per_s: rate(at_s),
                    cpus: 8.0,
                    cores: 4.0,
                    local_share: Some(0.5),
                    ..Point::default()
                }
            })
            .collect();
        Track {
            arm,
            seed: 1,
            length_s: 3600.0,
            programs: vec![ProgramTrack {
                program: "db <1>".into(),
                unit: "transactions".into(),
                points,
            }],
            story: vec![Line {
                at_s: 1800.0,
                workload: Some("db <1>".into()),
                stage: "improved".into(),
                text: "memory & threads".into(),
                warning: false,
            }],
            ..Track::default()
        }
    }

    #[test]
    fn means_weigh_by_time_and_split_points_at_the_edges() {
        let t = track(Arm::Homeostat, |at| if at <= 1800.0 { 10.0 } else { 20.0 });
        let over = |from_s, to_s| means(&t.programs[0].points, Window { from_s, to_s });
        assert!((over(0.0, 1800.0).work_per_s - 10.0).abs() < 1e-9);
        assert!((over(0.0, 3600.0).work_per_s - 15.0).abs() < 1e-9);
        // Half of the last slow minute, one and a half fast ones.
        let edge = over(1770.0, 1890.0);
        assert!((edge.work_per_s - 17.5).abs() < 1e-9 && (edge.seconds - 120.0).abs() < 1e-9);
        assert_eq!(over(0.0, 60.0).local_share, Some(0.5));
        assert_eq!(
            over(0.0, 60.0).latency_ns,
            None,
            "what was never seen has no mean"
        );
        assert_eq!(over(9000.0, 9100.0).seconds, 0.0);
    }

    #[test]
    fn the_curve_stands_where_the_numbers_are() {
        let (alone, with) = (
            track(Arm::LeftAlone, |_| 10.0),
            track(Arm::Homeostat, |at| if at <= 1800.0 { 10.0 } else { 20.0 }),
        );
        let text = plot(&[&alone, &with], 71, false);
        let rows: Vec<&str> = text.lines().skip(1).take(10).collect();
        // Sixty columns: the right half of homeostat's curve is in the top row, the left half in the middle one.
        assert_eq!(rows[0].matches('#').count(), 30, "{text}");
        assert!(
            rows[0]
                .trim_start_matches(|c: char| c != '|')
                .starts_with("|          "),
            "{text}"
        );
        assert!(rows[4].contains('#') && rows[4].ends_with('.'), "{text}");
        assert!(text.is_ascii(), "{text}");
        let axis = text.lines().nth(11).unwrap();
        assert_eq!(axis.find('a'), Some(10 + 1 + 30), "{axis}");
    }

    #[test]
    fn the_page_is_whole_and_escapes_what_programs_are_called() {
        let (alone, with) = (track(Arm::LeftAlone, |_| 10.0), track(Arm::Homeostat, |_| 12.0));
        let all = Window {
            from_s: 0.0,
            to_s: 3600.0,
        };
        let comparisons = compare(&alone, all, &with, all);
        assert!((comparisons[0].gain.unwrap() - 0.2).abs() < 1e-9);
        let page = html(
            "a run",
            "here",
            &[&alone, &with],
            &comparisons,
            &[PublishedCurve {
                curve: "throughput".into(),
                points: vec![PublishedPoint {
                    at_s: 120.0,
                    value: 18.0,
                }],
            }],
        );
        assert!(page.contains("db &lt;1&gt;") && !page.contains("db <1>"));
        assert!(page.contains("memory &amp; threads"));
        assert_eq!(page.matches("<svg").count(), page.matches("</svg>").count());
        // Three quantities of the one program have values: throughput, locality, cores.
        assert_eq!(page.matches("role=\"img\"").count(), 3);
        assert_eq!(page.matches("circle class=\"published\"").count(), 1);
        assert!(!page.contains("http"), "self-contained: {page}");
        assert!(page.contains("+20.0 %"));
    }

    #[test]
    fn axes_end_at_readable_numbers() {
        for (value, expected) in [
            (0.0, 1.0),
            (1.0, 1.0),
            (7.2, 8.0),
            (18.7, 20.0),
            (101.0, 120.0),
            (0.031, 0.04),
        ] {
            assert!(
                (ceiling(value) - expected).abs() < 1e-9,
                "{value} -> {}",
                ceiling(value)
            );
        }
        assert_eq!(moment(3661.4), "1:01:01");
    }
}
