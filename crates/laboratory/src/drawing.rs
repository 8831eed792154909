//! Pictures of curves as SVG that stands by itself: panels in rows and columns, each with its own axes.

use crate::report::escape;
use std::fmt::Write;

/// Size of a panel, and of the margins in it.
const WIDTH: f64 = 300.0;
const HEIGHT: f64 = 170.0;
const LEFT: f64 = 48.0;
const RIGHT: f64 = 10.0;
const TOP: f64 = 26.0;
const BOTTOM: f64 = 34.0;
/// Height of the legend below the panels.
const LEGEND: f64 = 26.0;
const INK: &str = "#222";
const GRID: &str = "#ddd";

/// Colours of what is drawn in all pictures.
pub(crate) const WRITER: &str = "#5b8dc9";
pub(crate) const READER: &str = "#c0571b";
pub(crate) const OUT: &str = "#7b4b94";
pub(crate) const HELD: &str = "#3a7d44";
pub(crate) const NOBODY: &str = "#8a8a8a";

/// One axis: from, to, and what is written where.
#[derive(Clone, Debug)]
pub(crate) struct Axis {
    pub(crate) from: f64,
    pub(crate) to: f64,
    pub(crate) ticks: Vec<(f64, String)>,
}

impl Axis {
    /// With ticks at these values, which are written as they are.
    pub(crate) fn new(from: f64, to: f64, ticks: &[f64]) -> Self {
        Self {
            from,
            to,
            ticks: ticks.iter().map(|t| (*t, format!("{t}"))).collect(),
        }
    }

    /// One place for each word, at 0, 1, 2, …
    pub(crate) fn of_words(words: impl Iterator<Item = String>) -> Self {
        let ticks: Vec<(f64, String)> = words.enumerate().map(|(i, w)| (i as f64, w)).collect();
        Self {
            from: -0.3,
            to: ticks.len() as f64 - 0.7,
            ticks,
        }
    }

    fn share(&self, value: f64) -> f64 {
        ((value - self.from) / (self.to - self.from)).clamp(0.0, 1.0)
    }
}

/// A curve.
#[derive(Clone, Debug)]
pub(crate) struct Curve {
    pub(crate) colour: &'static str,
    pub(crate) points: Vec<(f64, f64)>,
    /// Whether the points themselves are marked: measured values that a line only connects.
    pub(crate) marked: bool,
}

/// One diagram.
#[derive(Clone, Debug)]
pub(crate) struct Panel {
    pub(crate) title: String,
    pub(crate) below: &'static str,
    pub(crate) x: Axis,
    pub(crate) y: Axis,
    /// A stretch of the horizontal axis that is shaded.
    pub(crate) shaded: Option<(f64, f64)>,
    pub(crate) curves: Vec<Curve>,
}

/// A picture of panels, `columns` in a row, with what the colours mean below.
pub(crate) fn picture(what: &str, columns: usize, panels: &[Panel], legend: &[(&str, &str)]) -> String {
    let columns = columns.max(1);
    let rows = panels.len().div_ceil(columns);
    let (width, height) = (WIDTH * columns as f64, HEIGHT * rows as f64 + LEGEND);
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" font-family=\"sans-serif\" font-size=\"10\" \
         fill=\"{INK}\">\n<title>{}</title>\n<rect width=\"{width}\" height=\"{height}\" fill=\"#fff\"/>\n",
        escape(what)
    );
    for (i, panel) in panels.iter().enumerate() {
        let (x, y) = ((i % columns) as f64 * WIDTH, (i / columns) as f64 * HEIGHT);
        draw(&mut out, panel, x, y);
    }
    let mut x = LEFT;
    let y = height - LEGEND / 2.0;
    for (colour, words) in legend {
        let _ = writeln!(
            out,
            "<rect x=\"{x:.0}\" y=\"{:.0}\" width=\"18\" height=\"3\" fill=\"{colour}\"/><text x=\"{:.0}\" y=\"{:.0}\">{}</text>",
            y - 3.0,
            x + 23.0,
            y + 2.0,
            escape(words)
        );
        x += 40.0 + 5.6 * words.chars().count() as f64;
    }
    out.push_str("</svg>\n");
    out
}

fn draw(out: &mut String, panel: &Panel, left: f64, top: f64) {
    let (x0, x1) = (left + LEFT, left + WIDTH - RIGHT);
    let (y0, y1) = (top + HEIGHT - BOTTOM, top + TOP);
    let x = |value: f64| x0 + (x1 - x0) * panel.x.share(value);
    let y = |value: f64| y0 + (y1 - y0) * panel.y.share(value);
    let _ = writeln!(
        out,
        "<text x=\"{x0:.1}\" y=\"{:.1}\" font-size=\"11\">{}</text>",
        y1 - 8.0,
        escape(&panel.title)
    );
    if let Some((from, to)) = panel.shaded {
        let _ = writeln!(
            out,
            "<rect x=\"{:.1}\" y=\"{y1:.1}\" width=\"{:.1}\" height=\"{:.1}\" fill=\"#f2efe6\"/>",
            x(from),
            x(to) - x(from),
            y0 - y1
        );
    }
    for (value, words) in &panel.y.ticks {
        let at = y(*value);
        let _ = writeln!(
            out,
            "<line x1=\"{x0:.1}\" x2=\"{x1:.1}\" y1=\"{at:.1}\" y2=\"{at:.1}\" stroke=\"{GRID}\"/><text x=\"{:.1}\" y=\"{:.1}\" \
             text-anchor=\"end\">{}</text>",
            x0 - 4.0,
            at + 3.5,
            escape(words)
        );
    }
    for (value, words) in &panel.x.ticks {
        let _ = writeln!(
            out,
            "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>",
            x(*value),
            y0 + 12.0,
            escape(words)
        );
    }
    let _ = writeln!(
        out,
        "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>",
        (x0 + x1) / 2.0,
        y0 + 25.0,
        escape(panel.below)
    );
    for curve in &panel.curves {
        let points: Vec<String> = curve
            .points
            .iter()
            .map(|(at, value)| format!("{:.1},{:.1}", x(*at), y(*value)))
            .collect();
        let _ = writeln!(
            out,
            "<polyline points=\"{}\" fill=\"none\" stroke=\"{}\" stroke-width=\"1.4\"/>",
            points.join(" "),
            curve.colour
        );
        if curve.marked {
            for (at, value) in &curve.points {
                let _ = writeln!(
                    out,
                    "<circle cx=\"{:.1}\" cy=\"{:.1}\" r=\"2.4\" fill=\"{}\"/>",
                    x(*at),
                    y(*value),
                    curve.colour
                );
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_picture_is_well_formed_and_what_lies_outside_stays_inside() {
        let panel = Panel {
            title: "speed < 1 & more".into(),
            below: "s",
            x: Axis::new(0.0, 10.0, &[0.0, 10.0]),
            y: Axis::new(0.0, 1.0, &[0.5]),
            shaded: Some((2.0, 4.0)),
            curves: vec![Curve {
                colour: WRITER,
                points: vec![(0.0, 0.0), (20.0, 7.0)],
                marked: true,
            }],
        };
        let svg = picture(
            "a test",
            2,
            &[panel.clone(), panel.clone(), panel],
            &[(WRITER, "writer")],
        );
        assert!(svg.contains("speed &lt; 1 &amp; more"));
        assert!(svg.contains("viewBox=\"0 0 600 366\""), "{svg}");
        // The right upper corner of the first panel.
        assert!(svg.contains("290.0,26.0"), "{svg}");
        assert_eq!(svg.matches("<polyline").count(), 3);
        assert_eq!(svg.matches("<text").count(), svg.matches("</text>").count());
    }
}
