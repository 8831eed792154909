//! Plots as SVG inside the page: no script, no picture file. Colours come from the style sheet by class, so that they
//! follow light, dark and paper. All are 360 units wide: that is how wide a phone is, so letters keep their size.

use super::html::Html;
use crate::render::text::count;

/// Width of every plot.
const WIDTH: f64 = 360.0;
/// Height of a plot.
const HEIGHT: f64 = 176.0;
/// Room for the numbers at the left.
const LEFT: f64 = 52.0;
/// Room at the right.
const RIGHT: f64 = 10.0;
/// Room above.
const TOP: f64 = 10.0;
/// Room for the numbers below.
const BOTTOM: f64 = 24.0;
/// Lines across a plot, about.
const TICKS: f64 = 4.0;

/// A coordinate with one decimal: finer than any screen.
fn at(x: f64) -> String {
    let rounded = (x * 10.0).round() / 10.0;
    // Minus zero is two bytes too many.
    format!("{}", rounded + 0.0)
}

/// From values to the places of a plot.
#[derive(Clone, Copy)]
pub(super) struct Axes {
    x: (f64, f64),
    y: (f64, f64),
}

impl Axes {
    fn x(&self, x: f64) -> f64 {
        let span = (self.x.1 - self.x.0).max(f64::MIN_POSITIVE);
        LEFT + (WIDTH - LEFT - RIGHT) * ((x - self.x.0) / span).clamp(0.0, 1.0)
    }

    fn y(&self, y: f64) -> f64 {
        let span = (self.y.1 - self.y.0).max(f64::MIN_POSITIVE);
        let share = ((y - self.y.0) / span).clamp(0.0, 1.0);
        HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * share
    }
}

/// Round numbers between two ends.
fn ticks(low: f64, high: f64) -> Vec<f64> {
    let span = high - low;
    if !(span.is_finite() && span > 0.0) {
        return Vec::new();
    }
    let rough = span / TICKS;
    let power = 10f64.powf(rough.log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0]
        .into_iter()
        .map(|m| m * power)
        .find(|s| *s >= rough)
        .unwrap_or(10.0 * power);
    let first = (low / step).ceil() as i64;
    (first..first + 12)
        .map(|i| i as f64 * step)
        .take_while(|t| *t <= high + step * 1e-9)
        .collect()
}

/// A point of the plot of blocks.
pub(super) struct Dot {
    /// Whether the change was on.
    pub(super) on: bool,
    /// Whether the circuit breaker ended the block.
    pub(super) broken: bool,
    /// Percent against the mean of the off blocks; `None` when nothing could be measured.
    pub(super) percent: Option<f64>,
}

/// An estimate in percent; ends that are not known are `None`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Span {
    pub(super) estimate: f64,
    pub(super) lower: Option<f64>,
    pub(super) upper: Option<f64>,
}

fn frame(h: &mut Html, label: &str, height: f64, inner: impl FnOnce(&mut Html)) {
    let view = format!("0 0 {} {}", at(WIDTH), at(height));
    h.element(
        "svg",
        &[
            ("viewBox", &view),
            ("role", "img"),
            ("aria-label", label),
            ("class", "plot"),
        ],
        |h| {
            h.leaf("title", &[], label);
            inner(h);
        },
    );
}

fn line(h: &mut Html, class: &str, from: (f64, f64), to: (f64, f64)) {
    let (x1, y1, x2, y2) = (at(from.0), at(from.1), at(to.0), at(to.1));
    h.open(
        "line",
        &[
            ("class", class),
            ("x1", &x1),
            ("y1", &y1),
            ("x2", &x2),
            ("y2", &y2),
        ],
    )
    .close("line");
}

fn label(h: &mut Html, class: &str, place: (f64, f64), anchor: &str, text: &str) {
    let (x, y) = (at(place.0), at(place.1));
    h.leaf(
        "text",
        &[("class", class), ("x", &x), ("y", &y), ("text-anchor", anchor)],
        text,
    );
}

fn path(h: &mut Html, class: &str, points: &[(f64, f64)], closed: bool) {
    let mut d = String::new();
    for (i, (x, y)) in points.iter().enumerate() {
        d.push_str(if i == 0 { "M" } else { "L" });
        d.push_str(&at(*x));
        d.push(' ');
        d.push_str(&at(*y));
    }
    if closed {
        d.push('Z');
    }
    h.open("path", &[("class", class), ("d", &d)]).close("path");
}

/// Lines across with their numbers at the left.
fn grid(h: &mut Html, axes: &Axes, values: &[f64], text: impl Fn(f64) -> String) {
    for value in values {
        let y = axes.y(*value);
        line(h, "grid", (LEFT, y), (WIDTH - RIGHT, y));
        label(h, "tick", (LEFT - 6.0, y + 3.5), "end", &text(*value));
    }
}

/// Block numbers below, from 1.
fn block_numbers(h: &mut Html, axes: &Axes, blocks: usize) {
    let mut numbers: Vec<f64> = ticks(1.0, blocks as f64)
        .into_iter()
        .filter(|t| t.fract() == 0.0 && *t >= 1.0)
        .collect();
    if numbers.first().is_none_or(|first| *first > 1.0) {
        numbers.insert(0, 1.0);
    }
    for n in numbers {
        label(h, "tick", (axes.x(n), HEIGHT - 8.0), "middle", &format!("{n}"));
    }
}

fn signed(value: f64) -> String {
    if value == 0.0 {
        "0".into()
    } else if value.fract() == 0.0 {
        format!("{value:+}").replace('-', "\u{2212}")
    } else {
        format!("{value:+.1}").replace('-', "\u{2212}")
    }
}

/// Both ends of what has to be seen, with a little air; never so near to each other that noise looks like an effect.
fn around(values: impl Iterator<Item = f64>, least: f64) -> (f64, f64) {
    let (mut low, mut high) = (0f64, 0f64);
    for v in values.filter(|v| v.is_finite()) {
        low = low.min(v);
        high = high.max(v);
    }
    let missing = (least - (high - low)).max(0.0) / 2.0;
    let (low, high) = (low - missing, high + missing);
    let air = (high - low) * 0.06;
    (low - air, high + air)
}

/// The work in each block against the mean of the off blocks: filled dots on, rings off, crosses cut short.
pub(super) fn blocks(h: &mut Html, name: &str, dots: &[Dot]) {
    let axes = Axes {
        x: (0.5, dots.len() as f64 + 0.5),
        y: around(dots.iter().filter_map(|d| d.percent), 4.0),
    };
    frame(h, name, HEIGHT, |h| {
        grid(h, &axes, &ticks(axes.y.0, axes.y.1), |v| {
            format!("{} %", signed(v))
        });
        block_numbers(h, &axes, dots.len());
        for (on, class) in [(false, "mean off"), (true, "mean on")] {
            let values: Vec<f64> = dots
                .iter()
                .filter(|d| d.on == on && !d.broken)
                .filter_map(|d| d.percent)
                .collect();
            if !values.is_empty() {
                let mean = values.iter().sum::<f64>() / values.len() as f64;
                line(h, class, (LEFT, axes.y(mean)), (WIDTH - RIGHT, axes.y(mean)));
            }
        }
        let radius = if dots.len() > 120 { "2" } else { "3.6" };
        for (i, dot) in dots.iter().enumerate() {
            let x = axes.x(i as f64 + 1.0);
            match dot.percent {
                Some(percent) if !dot.broken => {
                    let (x, y) = (at(x), at(axes.y(percent)));
                    let class = if dot.on { "dot on" } else { "dot off" };
                    h.open(
                        "circle",
                        &[("class", class), ("cx", &x), ("cy", &y), ("r", radius)],
                    )
                    .close("circle");
                }
                _ => {
                    let y = dot.percent.map_or(HEIGHT - BOTTOM - 4.0, |p| axes.y(p));
                    line(h, "broken", (x - 4.0, y - 4.0), (x + 4.0, y + 4.0));
                    line(h, "broken", (x - 4.0, y + 4.0), (x + 4.0, y - 4.0));
                }
            }
        }
    });
}

/// The estimate after each block with its interval.
pub(super) fn estimate(h: &mut Html, name: &str, spans: &[Span]) {
    // The first intervals say that nothing is known yet; the picture is for what came then.
    let last = spans.last().copied();
    let reach = last
        .and_then(|s| Some((s.upper? - s.lower?).abs()))
        .map_or(40.0, |w| (w * 3.0).clamp(6.0, 400.0));
    let centre = last.map_or(0.0, |s| s.estimate);
    let seen = spans
        .iter()
        .flat_map(|s| [Some(s.estimate), s.lower, s.upper])
        .flatten()
        .map(|v| v.clamp(centre - reach, centre + reach));
    let axes = Axes {
        x: (1.0, (spans.len() as f64).max(2.0)),
        y: around(seen, 4.0),
    };
    frame(h, name, HEIGHT, |h| {
        grid(h, &axes, &ticks(axes.y.0, axes.y.1), |v| {
            format!("{} %", signed(v))
        });
        block_numbers(h, &axes, spans.len());
        let place = |i: usize, v: Option<f64>, open: f64| (axes.x(i as f64 + 1.0), axes.y(v.unwrap_or(open)));
        let mut band: Vec<(f64, f64)> = spans
            .iter()
            .enumerate()
            .map(|(i, s)| place(i, s.upper, axes.y.1))
            .collect();
        band.extend(
            spans
                .iter()
                .enumerate()
                .rev()
                .map(|(i, s)| place(i, s.lower, axes.y.0)),
        );
        path(h, "band", &band, true);
        line(h, "zero", (LEFT, axes.y(0.0)), (WIDTH - RIGHT, axes.y(0.0)));
        let curve: Vec<(f64, f64)> = spans
            .iter()
            .enumerate()
            .map(|(i, s)| place(i, Some(s.estimate), 0.0))
            .collect();
        path(h, "curve on", &curve, false);
        if let Some((x, y)) = curve.last() {
            let (x, y) = (at(*x), at(*y));
            h.open(
                "circle",
                &[("class", "dot on"), ("cx", &x), ("cy", &y), ("r", "3.6")],
            )
            .close("circle");
        }
    });
}

/// The evidence after each block on a logarithmic axis, and what it has to reach.
pub(super) fn evidence(h: &mut Html, name: &str, values: &[f64], needed: f64) {
    let log = |v: f64| v.max(1e-12).log10();
    let low = values.iter().map(|v| log(*v)).fold(0.0, f64::min).max(-4.0);
    let high = values.iter().map(|v| log(*v)).fold(log(needed), f64::max);
    let axes = Axes {
        x: (1.0, (values.len() as f64).max(2.0)),
        y: (low - 0.3, high + 0.3),
    };
    frame(h, name, HEIGHT, |h| {
        let all: Vec<f64> = ((low.ceil() as i32)..=(high.floor() as i32))
            .map(f64::from)
            .collect();
        let every = all.len().div_ceil(5).max(1);
        let shown: Vec<f64> = all
            .into_iter()
            .filter(|p| (*p as i32) % every as i32 == 0)
            .collect();
        grid(h, &axes, &shown, power);
        block_numbers(h, &axes, values.len());
        let y = axes.y(log(needed));
        line(h, "needed", (LEFT, y), (WIDTH - RIGHT, y));
        label(
            h,
            "note",
            (LEFT + 4.0, y - 5.0),
            "start",
            &format!("needed: {}", count(needed)),
        );
        let curve: Vec<(f64, f64)> = values
            .iter()
            .enumerate()
            .map(|(i, v)| (axes.x(i as f64 + 1.0), axes.y(log(*v))))
            .collect();
        path(h, "curve on", &curve, false);
        if let Some((x, y)) = curve.last() {
            let (x, y) = (at(*x), at(*y));
            h.open(
                "circle",
                &[("class", "dot on"), ("cx", &x), ("cy", &y), ("r", "3.6")],
            )
            .close("circle");
        }
    });
}

fn power(exponent: f64) -> String {
    match exponent as i32 {
        e @ 0..=3 => format!("{}", 10u32.pow(e.unsigned_abs())),
        e @ -3..=-1 => format!("{}", 10f64.powi(e)),
        e => format!("1e{e}"),
    }
}

/// One interval on an axis that it shares with others: `low` and `high` are the ends of that axis in percent.
pub(super) fn interval(h: &mut Html, name: &str, span: Span, axis: (f64, f64), class: &str) {
    const BAR: f64 = 22.0;
    let x = |v: f64| {
        let width = (axis.1 - axis.0).max(f64::MIN_POSITIVE);
        4.0 + (WIDTH - 8.0) * ((v - axis.0) / width).clamp(0.0, 1.0)
    };
    frame(h, name, BAR, |h| {
        line(h, "grid", (4.0, BAR / 2.0), (WIDTH - 4.0, BAR / 2.0));
        line(h, "zero", (x(0.0), 1.0), (x(0.0), BAR - 1.0));
        let (from, to) = (x(span.lower.unwrap_or(axis.0)), x(span.upper.unwrap_or(axis.1)));
        let (left, width) = (at(from), at((to - from).max(1.0)));
        let class_of_bar = format!("bar {class}");
        h.open(
            "rect",
            &[
                ("class", &class_of_bar),
                ("x", &left),
                ("y", "7"),
                ("width", &width),
                ("height", "8"),
                ("rx", "2"),
            ],
        )
        .close("rect");
        let centre = at(x(span.estimate));
        let class_of_point = format!("point {class}");
        h.open(
            "circle",
            &[
                ("class", &class_of_point),
                ("cx", &centre),
                ("cy", "11"),
                ("r", "5"),
            ],
        )
        .close("circle");
    });
}

/// One axis for all intervals: it holds every estimate, and the ends as far as they are of that order.
pub(super) fn shared_axis(spans: &[Span]) -> (f64, f64) {
    let reach = spans.iter().map(|s| s.estimate.abs()).fold(5.0, f64::max) * 2.0;
    let ends = spans
        .iter()
        .flat_map(|s| [Some(s.estimate), s.lower, s.upper])
        .flatten()
        .map(|v| v.clamp(-reach, reach));
    around(ends, 10.0)
}

/// A series over time.
pub(super) struct Series<'a> {
    /// Class of the line in the style sheet.
    pub(super) class: &'a str,
    /// Whether the area below it is filled.
    pub(super) filled: bool,
    /// Time (seconds since the epoch) and value.
    pub(super) points: Vec<(f64, f64)>,
}

/// Series over time from zero upwards; `marked` are stretches of time to be seen behind them.
pub(super) fn over_time(
    h: &mut Html,
    name: &str,
    series: &[Series<'_>],
    marked: &[(f64, f64)],
    text: impl Fn(f64) -> String,
) {
    let all = || series.iter().flat_map(|s| &s.points);
    let first = all().map(|p| p.0).fold(f64::INFINITY, f64::min);
    let last = all().map(|p| p.0).fold(f64::NEG_INFINITY, f64::max);
    let most = all().map(|p| p.1).fold(0.0, f64::max);
    // Nothing, or a single moment.
    if first >= last {
        return;
    }
    let axes = Axes {
        x: (first, last),
        y: (0.0, if most > 0.0 { most * 1.08 } else { 1.0 }),
    };
    frame(h, name, HEIGHT, |h| {
        for (from, to) in marked.iter().filter(|m| m.1 > first && m.0 < last) {
            let (left, right) = (axes.x(*from), axes.x(*to));
            let (x, width) = (at(left), at((right - left).max(1.5)));
            let (y, height) = (at(TOP), at(HEIGHT - TOP - BOTTOM));
            h.open(
                "rect",
                &[
                    ("class", "marked"),
                    ("x", &x),
                    ("y", &y),
                    ("width", &width),
                    ("height", &height),
                ],
            )
            .close("rect");
        }
        grid(h, &axes, &byte_or_round_ticks(axes.y.1), text);
        for s in series {
            let points: Vec<(f64, f64)> = s.points.iter().map(|p| (axes.x(p.0), axes.y(p.1))).collect();
            let class = format!("curve {}", s.class);
            if s.filled {
                if let (Some(a), Some(b)) = (points.first().copied(), points.last().copied()) {
                    let floor = axes.y(0.0);
                    let mut area = points.clone();
                    area.extend([(b.0, floor), (a.0, floor)]);
                    let class = format!("area {}", s.class);
                    path(h, &class, &area, true);
                }
            }
            path(h, &class, &points, false);
        }
        let ago = |seconds: f64| homeostat_model::Nanoseconds::from_secs_f64(seconds).to_string();
        label(
            h,
            "tick",
            (LEFT, HEIGHT - 8.0),
            "start",
            &format!("{} before", ago(last - first)),
        );
        label(h, "tick", (WIDTH - RIGHT, HEIGHT - 8.0), "end", "last seen");
    });
}

fn byte_or_round_ticks(high: f64) -> Vec<f64> {
    // Amounts of memory are round in powers of two.
    if high > 4.0 * 1024.0 * 1024.0 {
        let step = 2f64.powf((high / TICKS).log2().ceil());
        return (0..=4)
            .map(|i| f64::from(i) * step)
            .take_while(|v| *v <= high)
            .collect();
    }
    ticks(0.0, high)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_and_few() {
        assert_eq!(ticks(0.0, 10.0), [0.0, 5.0, 10.0]);
        assert_eq!(ticks(-1.0, 1.0), [-1.0, -0.5, 0.0, 0.5, 1.0]);
        assert!(ticks(0.0, f64::INFINITY).is_empty());
        assert!(ticks(1.0, 1.0).is_empty());
        for high in [0.013, 3.7, 812.0, 5e9] {
            assert!((2..=6).contains(&ticks(0.0, high).len()), "{high}");
        }
    }

    #[test]
    fn a_plot_of_anything_stays_inside_its_frame() {
        let span = |estimate, lower, upper| Span {
            estimate,
            lower,
            upper,
        };
        let wild = [
            span(0.0, None, None),
            span(1e12, Some(-1e12), Some(f64::MAX)),
            span(-5.0, Some(-8.0), Some(2.0)),
        ];
        let mut h = Html::default();
        estimate(&mut h, "x", &wild);
        evidence(&mut h, "x", &[1.0, 0.0, 1e300, f64::MIN_POSITIVE], 1000.0);
        blocks(
            &mut h,
            "x",
            &[Dot {
                on: true,
                broken: true,
                percent: None,
            }],
        );
        interval(&mut h, "x", wild[1], shared_axis(&wild), "good");
        over_time(
            &mut h,
            "x",
            &[Series {
                class: "on",
                filled: true,
                points: vec![(0.0, 1.0), (9.0, 2.0)],
            }],
            &[(-5.0, 50.0)],
            |v| v.to_string(),
        );
        let text = h.finish();
        assert!(!text.contains("NaN") && !text.contains("inf"), "{text}");
        let numbers = text
            .split(['"', ' ', 'M', 'L', 'Z'])
            .filter_map(|n| n.parse::<f64>().ok());
        for n in numbers {
            assert!((-10.0..=370.0).contains(&n), "{n} in {text}");
        }
    }
}
