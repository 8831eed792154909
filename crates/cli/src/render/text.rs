//! Words, numbers and tables.

use homeostat_daemon::api::{Effect, Meter, WorkloadId};
use std::fmt::Write as _;

/// How to render.
#[derive(Clone, Debug)]
pub struct Look {
    /// Columns.
    pub width: usize,
    /// Whether colour is welcome.
    pub color: bool,
    /// Now, seconds since the epoch, for ages.
    pub now_unix: u64,
}

/// What a word means, shown by colour as well.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Tone {
    Plain,
    Heading,
    Good,
    Busy,
    Warn,
    Bad,
}

impl Look {
    /// The text in the colour of its tone; only ever additional to the words.
    pub(crate) fn paint(&self, tone: Tone, text: &str) -> String {
        let code = match tone {
            Tone::Plain => return text.to_owned(),
            Tone::Heading => "1",
            Tone::Good => "32",
            Tone::Busy => "36",
            Tone::Warn => "33",
            Tone::Bad => "31",
        };
        if self.color {
            format!("\x1b[{code}m{text}\x1b[0m")
        } else {
            text.to_owned()
        }
    }

    /// How long ago.
    pub(crate) fn ago(&self, unix: u64) -> String {
        hours_or_less(self.now_unix.saturating_sub(unix) as f64)
    }
}

/// An amount of memory.
pub fn bytes(b: u64) -> String {
    homeostat_model::Bytes(b).to_string()
}

/// A length of time in the unit that fits.
pub fn hours_or_less(seconds: f64) -> String {
    if seconds <= 0.0 {
        return "0 s".to_owned();
    }
    homeostat_model::Nanoseconds::from_secs_f64(seconds).to_string()
}

/// Harm exposure, which is in percent × seconds, as the length of time whose work was lost.
pub(crate) fn lost_work(percent_seconds: f64) -> String {
    hours_or_less(percent_seconds / 100.0)
}

/// A share in percent.
pub(crate) fn percent(share: f64, digits: usize) -> String {
    format!("{:.digits$} %", share * 100.0)
}

/// What is told of a meter that counts for a part of the time only, after its noise; nothing of others.
pub(crate) fn in_turns(meter: &Meter) -> String {
    let mut told = String::new();
    if meter.counted < 1.0 {
        told += &format!(
            ", counted in {} of its CPU time, the rest estimated",
            percent(meter.counted, 0)
        );
    }
    if meter.lag_s > 0.0 {
        told += &format!(" and told up to {:.0} s late", meter.lag_s.ceil());
    }
    told
}

/// A number with three significant digits and a thousands unit.
pub(crate) fn count(x: f64) -> String {
    let (scaled, unit) = match x.abs() {
        a if a >= 1e9 => (x / 1e9, " G"),
        a if a >= 1e6 => (x / 1e6, " M"),
        a if a >= 1e4 => (x / 1e3, " k"),
        _ => (x, ""),
    };
    let digits = match scaled.abs() {
        a if a >= 100.0 => 0,
        a if a >= 10.0 => 1,
        _ => 2,
    };
    format!("{scaled:.digits$}{unit}")
}

/// An effect with its interval in percent.
pub fn effect(e: &Effect) -> String {
    homeostat_model::effect_in_words(e.estimate, e.lower, e.upper)
}

/// `1 workload`, `3 workloads`.
pub(crate) fn plural(n: u64, word: &str) -> String {
    match (n, word.ends_with('s')) {
        (1, _) => format!("1 {word}"),
        (_, true) => format!("{n} {word}es"),
        (_, false) => format!("{n} {word}s"),
    }
}

/// The workloads of a trial, all named: `a`, `a and b as one change`.
pub(crate) fn all_of(first: &str, others: &[WorkloadId]) -> String {
    match others.split_last() {
        None => first.to_owned(),
        Some((last, between)) => {
            let mut names = vec![first];
            names.extend(between.iter().map(|name| &**name));
            format!("{} and {last} as one change", names.join(", "))
        }
    }
}

/// The workloads of a trial where there is little room: `a`, `a (+2)`.
pub(crate) fn first_of(first: &str, others: &[WorkloadId]) -> String {
    match others.len() {
        0 => first.to_owned(),
        n => format!("{first} (+{n})"),
    }
}

/// Breaks text at words; the indent goes before every line, and two more columns before all but the first.
pub(crate) fn wrap(text: &str, indent: &str, width: usize) -> String {
    let mut out = String::new();
    for paragraph in text.lines() {
        let mut line = String::from(indent);
        let mut empty = true;
        for word in paragraph.split_whitespace() {
            if !empty && visible(&line) + 1 + visible(word) > width {
                let _ = writeln!(out, "{line}");
                line = format!("{indent}  ");
                empty = true;
            }
            if !empty {
                line.push(' ');
            }
            line.push_str(word);
            empty = false;
        }
        let _ = writeln!(out, "{line}");
    }
    out
}

/// Columns that a text takes; colour takes none.
pub(crate) fn visible(text: &str) -> usize {
    let mut columns = 0;
    let mut escape = false;
    for c in text.chars() {
        match (escape, c) {
            (false, '\x1b') => escape = true,
            (true, 'm') => escape = false,
            (true, _) => {}
            (false, _) => columns += 1,
        }
    }
    columns
}

/// Room that the last column of a table is given at least, if it needs it.
const LAST_MIN: usize = 20;

/// A table whose last column is broken over lines where it does not fit, and goes below its row where there is hardly room for
/// it. A first cell that leaves no room for the others stands on a line of its own.
pub(crate) fn table(titles: &[&str], rows: &[Vec<String>], look: &Look) -> String {
    let mut widths: Vec<usize> = titles.iter().map(|t| t.chars().count()).collect();
    for row in rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(visible(cell));
        }
    }
    let last = titles.len().saturating_sub(1);
    let fixed = |widths: &[usize]| 2 + widths.iter().take(last).map(|w| w + 2).sum::<usize>();
    // What is short is not broken, what is long can go below.
    let tail = widths.last().copied().filter(|w| *w <= LAST_MIN);
    let too_much = (fixed(&widths) + tail.unwrap_or(0)).saturating_sub(look.width);
    if let (Some(first), Some(title)) = (widths.first_mut(), titles.first()) {
        if last > 0 {
            *first = first.saturating_sub(too_much).max(title.chars().count());
        }
    }
    let fixed = fixed(&widths);
    // When the fixed columns leave too little, the last one goes below its row.
    let below = fixed + tail.unwrap_or(LAST_MIN) > look.width;
    let mut out = String::new();
    let mut header = String::from("  ");
    for (i, title) in titles.iter().enumerate() {
        if i < last {
            let _ = write!(header, "{title:width$}  ", width = widths[i]);
        } else if !below {
            header.push_str(title);
        }
    }
    let _ = writeln!(out, "{}", header.trim_end());
    for row in rows {
        let mut line = String::from("  ");
        for (cell, width) in row.iter().take(last).zip(&widths) {
            line.push_str(cell);
            if visible(cell) > *width {
                let _ = writeln!(out, "{line}");
                line = " ".repeat(width + 4);
            } else {
                line.push_str(&" ".repeat(width - visible(cell) + 2));
            }
        }
        let tail = row.get(last).map_or("", String::as_str);
        if below {
            let _ = writeln!(out, "{}", line.trim_end());
            if !tail.is_empty() {
                out.push_str(&wrap(tail, "      ", look.width));
            }
            continue;
        }
        let room = look.width - fixed;
        let wrapped = wrap(tail, "", room.saturating_sub(2).max(18));
        let mut lines = wrapped.lines();
        let _ = writeln!(
            out,
            "{}",
            format!("{line}{}", lines.next().unwrap_or_default()).trim_end()
        );
        for more in lines {
            let _ = writeln!(out, "{}{}", " ".repeat(fixed), more.trim_start());
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn how_a_meter_counts_is_told_of_those_that_do_not_count_all_of_it() {
        let meter = |counted, lag_s| Meter {
            id: "points".into(),
            unit: "turn".into(),
            rate: 50_000.0,
            noise: 0.05,
            cost: 0.003,
            counted,
            lag_s,
            objective: "work per second".into(),
            objective_reason: "it uses all the CPU it can get".into(),
        };
        assert_eq!(in_turns(&meter(1.0, 0.0)), "");
        assert_eq!(
            in_turns(&meter(0.3, 0.0)),
            ", counted in 30 % of its CPU time, the rest estimated"
        );
        assert_eq!(
            in_turns(&meter(0.011, 4.02)),
            ", counted in 1 % of its CPU time, the rest estimated and told up to 5 s late"
        );
    }

    #[test]
    fn no_line_is_wider_than_the_terminal() {
        let rows = vec![
            vec!["a".into(), "word ".repeat(40)],
            vec!["a long name of a workload.service".into(), "x ".repeat(100)],
        ];
        for width in [40, 60, 100] {
            for color in [false, true] {
                let text = table(
                    &["NAME", "WHY"],
                    &rows,
                    &Look {
                        width,
                        color,
                        now_unix: 0,
                    },
                );
                for line in text.lines() {
                    assert!(visible(line) <= width, "{width}: {line}");
                }
            }
        }
    }

    #[test]
    fn numbers_are_short() {
        assert_eq!(
            [1.234, 12.34, 9_999.0, 12_345.0, 2.5e8].map(count),
            ["1.23", "12.3", "9999", "12.3 k", "250 M"]
        );
        assert_eq!(plural(1, "process"), "1 process");
        assert_eq!(plural(2, "process"), "2 processes");
    }

    #[test]
    fn colour_is_only_added() {
        let look = |color| Look {
            width: 80,
            color,
            now_unix: 0,
        };
        assert_eq!(look(false).paint(Tone::Bad, "x"), "x");
        assert_eq!(visible(&look(true).paint(Tone::Bad, "x")), 1);
    }
}
