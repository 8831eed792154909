//! The report of a run: a table before and after, and terminal curves. It draws all of the [`Track`]s, nothing else.

use crate::run::{Arm, Line, Point, Track};
use crate::scenario::Window;
use serde::Serialize;
use std::fmt::Write;

/// A curve: its name, its unit, and its value in a point.
struct Quantity {
    name: &'static str,
    unit: &'static str,
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
    /// The unit of its work.
    pub unit: String,
    /// Means over the window before.
    pub before: Point,
    /// Means over the window after.
    pub after: Point,
    /// Relative change of work per second; `None` when there was none before.
    pub gain: Option<f64>,
}

/// Time-weighted means of a program's points over a window; `seconds` covers the points.
pub fn means(points: &[Point], window: Window) -> Point {
    let within = |p: &Point| p.at_s.min(window.to_s) - (p.at_s - p.seconds).max(window.from_s);
    let parts: Vec<(f64, &Point)> = points
        .iter()
        .map(|p| (within(p), p))
        .filter(|(seconds, _)| *seconds > 1e-9)
        .collect();
    let optional = |of: fn(&Point) -> Option<f64>| {
        let (mut sum, mut all) = (0.0, 0.0);
        for (seconds, p) in &parts {
            if let Some(v) = of(p).filter(|v| v.is_finite()) {
                sum += v * seconds;
                all += seconds;
            }
        }
        (all > 0.0).then(|| sum / all)
    };
    let mean = |of| optional(of).unwrap_or(0.0);
    Point {
        at_s: window.to_s,
        seconds: parts.iter().map(|(seconds, _)| seconds).sum(),
        work_per_s: mean(|p| Some(p.work_per_s)),
        cpus: mean(|p| Some(p.cpus)),
        cores: mean(|p| Some(p.cores)),
        large_share: mean(|p| Some(p.large_share)),
        local_share: optional(|p| p.local_share),
        prefetch_share: optional(|p| p.prefetch_share),
        response_mean_ms: optional(|p| p.response_mean_ms),
        response_p95_ms: optional(|p| p.response_p95_ms),
        cycles_per_instruction: optional(|p| p.cycles_per_instruction),
        latency_ns: optional(|p| p.latency_ns),
    }
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

/// The log of a run, a line each, as in the daemon's log.
pub fn story(lines: &[Line]) -> String {
    let mut out = String::new();
    for line in lines {
        out.push_str(&story_line(line));
        out.push('\n');
    }
    out
}

/// One line of the log.
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

/// Whether the line is a decision for the time axis.
fn is_mark(line: &Line) -> bool {
    match line.stage.as_str() {
        "trying" | "event" => true,
        // "Nothing further" is no decision to act.
        "improved" => !line.text.starts_with("nothing further"),
        "declined" => line.warning,
        _ => false,
    }
}

fn marks(lines: &[Line]) -> Vec<(char, &Line)> {
    ('a'..='z').zip(lines.iter().filter(|l| is_mark(l))).collect()
}

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

fn worth_drawing(q: &Quantity, tracks: &[&Track], program: &str) -> bool {
    points_of(tracks, program)
        .flat_map(|(_, points)| points.iter().filter_map(q.of))
        .any(|v| v.is_finite() && v > 0.0)
}

const PROGRAMS_DRAWN_MAX: usize = 8;

fn pen(arm: Arm, unicode: bool) -> char {
    match (arm, unicode) {
        (Arm::LeftAlone, _) => '.',
        (Arm::Manual, true) => '∘',
        (Arm::Manual, false) => 'o',
        (Arm::Homeostat, true) => '█',
        (Arm::Homeostat, false) => '#',
    }
}

const HEIGHT: usize = 10;
const LEFT: usize = 9;

/// Terminal curves, `width` characters wide: throughput, locality, cores, page sizes, prefetch of each program, with
/// decisions as letters on the time axis. ASCII only unless `unicode`.
pub fn plot(tracks: &[&Track], width: usize, unicode: bool) -> String {
    let Some(first) = tracks.first() else {
        return String::new();
    };
    let width = width.clamp(40, 200);
    let columns = width - LEFT - 2;
    let length = tracks.iter().map(|t| t.length_s).fold(0.0, f64::max).max(1.0);
    let column = |at: f64| ((at / length * columns as f64) as usize).min(columns - 1);
    let mut order: Vec<&Track> = tracks.to_vec();
    order.sort_by_key(|t| (t.arm == Arm::Homeostat, t.arm != Arm::LeftAlone));
    let story = tracks.iter().find(|t| t.arm == Arm::Homeostat);
    let marks = story.map_or_else(Vec::new, |t| marks(&t.story));
    let mut axis = vec![if unicode { '─' } else { '-' }; columns];
    for (letter, line) in &marks {
        axis[column(line.at_s)] = *letter;
    }
    let axis: String = axis.iter().collect();
    let (bar, corner) = if unicode { ('│', '└') } else { ('|', '+') };
    let mut out = String::new();
    for program in first.programs.iter().take(PROGRAMS_DRAWN_MAX) {
        for q in QUANTITIES {
            if !worth_drawing(q, &order, &program.program) {
                continue;
            }
            let of = if program.unit.is_empty() || q.unit != "per second" {
                q.unit.to_owned()
            } else {
                format!("{} per second", program.unit)
            };
            let _ = writeln!(out, "{}: {} ({of})", program.program, q.name);
            let top = top(q, &order, &program.program);
            let mut grid = vec![vec![' '; columns]; HEIGHT];
            for (arm, points) in points_of(&order, &program.program) {
                draw(&mut grid, q, points, top, pen(arm, unicode), column);
            }
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
            let (end, fill) = (moment(length), columns.saturating_sub(7));
            let _ = writeln!(out, "{:>LEFT$} {corner}{axis}", "");
            let _ = writeln!(out, "{:>LEFT$}  0:00:00{end:>fill$}\n", "");
        }
    }
    let legend = order
        .iter()
        .map(|t| format!("{} {}", pen(t.arm, unicode), t.arm.words()));
    let _ = writeln!(out, "{}", legend.collect::<Vec<_>>().join("   "));
    for (letter, line) in &marks {
        let who = line.workload.as_deref().unwrap_or("machine");
        let room = width.saturating_sub(16 + who.chars().count());
        let text: String = line.text.chars().take(room).collect();
        let _ = writeln!(out, "{letter} {:>8} {who}: {text}", moment(line.at_s));
    }
    out
}

/// Draws one curve. Each column is the mean of its points, so the resolution does not matter.
fn draw(
    grid: &mut [Vec<char>],
    q: &Quantity,
    points: &[Point],
    top: f64,
    pen: char,
    column: impl Fn(f64) -> usize,
) {
    let mut sums = vec![(0.0, 0u32); grid.first().map_or(0, Vec::len)];
    for p in points {
        if let Some(v) = (q.of)(p).filter(|v| v.is_finite()) {
            let c = column(p.at_s - p.seconds / 2.0);
            sums[c].0 += v;
            sums[c].1 += 1;
        }
    }
    let end = sums.iter().rposition(|s| s.1 > 0).map_or(0, |last| last + 1);
    let mut last: Option<usize> = None;
    for (c, (sum, n)) in sums.iter().take(end).enumerate() {
        if *n > 0 {
            let level = (sum / f64::from(*n) / top).clamp(0.0, 1.0);
            last = Some(HEIGHT - 1 - ((level * HEIGHT as f64) as usize).min(HEIGHT - 1));
        }
        if let Some(r) = last {
            grid[r][c] = pen;
        }
    }
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
    fn a_comparison_says_what_was_gained() {
        let (alone, with) = (track(Arm::LeftAlone, |_| 10.0), track(Arm::Homeostat, |_| 12.0));
        let all = Window {
            from_s: 0.0,
            to_s: 3600.0,
        };
        let comparisons = compare(&alone, all, &with, all);
        assert!((comparisons[0].gain.unwrap() - 0.2).abs() < 1e-9);
        assert!(before_after(&comparisons).contains("+20.0 %"));
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
