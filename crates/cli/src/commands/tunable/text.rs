//! Settings for people.

use crate::render::text::{Look, Tone, plural, table, wrap};
use homeostat_daemon::tunables::{Changed, Check, SetBy, Tunable, Tunables};
use std::fmt::Write as _;

/// Longer values are cut in tables; `show` has them whole.
const VALUE_MAX: usize = 28;

fn short(value: &str) -> String {
    if value.chars().count() > VALUE_MAX {
        let cut: String = value.chars().take(VALUE_MAX - 1).collect();
        format!("{cut}…")
    } else {
        value.to_owned()
    }
}

fn value_of(t: &Tunable) -> String {
    match (&t.value, t.state.as_str()) {
        (Some(value), _) if value.is_empty() => "(empty)".into(),
        (Some(value), _) => short(value),
        (None, state) => format!("({state})"),
    }
}

/// Who set it, with the time where it is known.
fn who(by: &SetBy, look: &Look) -> String {
    let mut text = by.text.clone();
    if let Some(at) = by.at_unix {
        // Less than a second ago is now.
        if look.now_unix.saturating_sub(at) == 0 {
            text.push_str(", just now");
        } else {
            let _ = write!(text, ", {} ago", look.ago(at));
        }
    }
    if let (Some(change), "command") = (by.change, by.kind.as_str()) {
        let _ = write!(text, " (change {change})");
    }
    text
}

fn set_by(t: &Tunable, look: &Look) -> String {
    t.set_by.as_ref().map_or_else(String::new, |by| who(by, look))
}

/// `homeostat tunable list`.
pub(super) fn list(found: &Tunables, look: &Look) -> String {
    if found.settings.is_empty() {
        return "No setting fits.\n".into();
    }
    let rows: Vec<Vec<String>> = found
        .settings
        .iter()
        .map(|t| {
            let tone = match (t.changed, &t.warning) {
                (_, Some(_)) => Tone::Bad,
                (Some(true), None) => Tone::Busy,
                _ => Tone::Plain,
            };
            vec![t.name.clone(), look.paint(tone, &value_of(t)), set_by(t, look)]
        })
        .collect();
    let mut out = table(&["SETTING", "VALUE", "SET BY"], &rows, look);
    let changed = found.settings.iter().filter(|t| t.changed == Some(true)).count();
    let _ = writeln!(
        out,
        "\n{}, of which {changed} not as Linux {} has them by itself.",
        plural(found.settings.len() as u64, "setting"),
        found.kernel
    );
    out.push_str(&warnings(found, look));
    out
}

fn warnings(found: &Tunables, look: &Look) -> String {
    let mut out = String::new();
    for t in &found.settings {
        if let (Some(value), Some(warning)) = (&t.value, &t.warning) {
            let text = format!("{} = {}: {warning}", t.name, short(value));
            out.push_str(&wrap(&look.paint(Tone::Warn, &text), "  ", look.width));
        }
    }
    out
}

/// `homeostat tunable diff`.
pub(super) fn diff(found: &Tunables, look: &Look) -> String {
    if found.settings.is_empty() {
        return format!(
            "Every setting whose default is known is as Linux {} has it.\n",
            found.kernel
        );
    }
    let rows: Vec<Vec<String>> = found
        .settings
        .iter()
        .map(|t| {
            vec![
                t.name.clone(),
                short(t.default.as_deref().unwrap_or("?")),
                look.paint(Tone::Busy, &value_of(t)),
                set_by(t, look),
            ]
        })
        .collect();
    let mut out = table(&["SETTING", "DEFAULT", "VALUE", "SET BY"], &rows, look);
    let _ = writeln!(
        out,
        "\n{} not as Linux {} has them by itself.",
        plural(found.settings.len() as u64, "setting"),
        found.kernel
    );
    out.push_str(&warnings(found, look));
    out
}

/// `homeostat tunable show`.
pub(super) fn show(found: &Tunables, look: &Look) -> String {
    let parts: Vec<String> = found
        .settings
        .iter()
        .map(|t| one(t, found.watched_since_unix, look))
        .collect();
    parts.join("\n")
}

fn one(t: &Tunable, watched_since: Option<u64>, look: &Look) -> String {
    let mut out = String::new();
    let value = match (&t.value, t.state.as_str()) {
        (Some(value), _) if value.is_empty() => "(empty)".to_owned(),
        (Some(value), _) => value.clone(),
        (None, "absent") => "not on this machine".into(),
        (None, "denied") => "may not be read by this user".into(),
        (None, _) => "cannot be read".into(),
    };
    let _ = writeln!(out, "{} = {value}", look.paint(Tone::Heading, &t.name));
    out.push_str(&wrap(&t.what, "  ", look.width));
    out.push('\n');
    let mut row = |name: &str, text: String| {
        // The name stands in the first line only.
        let wrapped = wrap(&text, "", look.width.saturating_sub(14).max(20));
        for (index, line) in wrapped.lines().enumerate() {
            let label = if index == 0 { name } else { "" };
            let _ = writeln!(out, "  {label:<11} {}", line.trim());
        }
    };
    if t.value.is_some() {
        row("set by", set_by(t, look));
    }
    row(
        "default",
        match (&t.default, t.changed) {
            (Some(default), Some(true)) => format!("{default} (differs)"),
            (Some(default), _) => default.clone(),
            (None, _) => "not known here: it depends on the kernel's build, the device or the machine".into(),
        },
    );
    if let Some(boot) = &t.boot {
        let since = watched_since.map_or_else(String::new, |at| {
            format!(" ({} ago, when homeostat was started)", look.ago(at))
        });
        row("at start", format!("{boot}{since}"));
    }
    let unit = if t.unit.is_empty() {
        String::new()
    } else {
        format!(", unit: {}", t.unit)
    };
    row("values", format!("{}{unit}", t.values));
    row(
        "type",
        match t.r#type.as_str() {
            "boot" => "boot: on the kernel's command line only".into(),
            "restricted" => "restricted: a wrong value can stop the machine or take something away".into(),
            other => format!("{other}: takes effect while the machine runs"),
        },
    );
    row("file", t.path.clone());
    row("since", format!("Linux {}; {}", t.since, t.source));
    for line in &t.lines {
        let state = if line.in_force { "in force" } else { "not in force" };
        let note = if line.note.is_empty() { "" } else { "; " };
        row(
            "written",
            format!("{} in {}: {state}{note}{}", line.value, line.place, line.note),
        );
    }
    if let Some(strategy) = &t.strategy {
        if t.experiments.is_empty() {
            row(
                "experiments",
                format!("homeostat's strategy {strategy} may try it; none on record"),
            );
        }
        for e in &t.experiments {
            let effect = e
                .effect
                .map_or_else(String::new, |x| format!(", {:+.1} %", x * 100.0));
            let verdict = e.verdict.as_deref().unwrap_or("running");
            row(
                "experiment",
                format!(
                    "{} ({strategy}) on {}: {verdict}{effect}, {} ago",
                    e.id,
                    e.workload,
                    look.ago(e.ended_unix)
                ),
            );
        }
    }
    if let Some(warning) = &t.warning {
        row("careful", look.paint(Tone::Warn, warning));
    }
    out
}

/// `homeostat tunable set` and `unset`.
pub(crate) fn changed(done: &Changed, back: bool, look: &Look) -> String {
    if done.changes.is_empty() {
        return "Nothing is set by `homeostat tunable set`.\n".into();
    }
    let mut out = String::new();
    for c in &done.changes {
        let verb = match (done.dry_run, back) {
            (true, false) => "would be set",
            (true, true) => "would be put back",
            (false, false) => "set",
            (false, true) => "put back",
        };
        let text = if c.from == c.to {
            format!("{} = {}: unchanged", c.name, c.to)
        } else {
            format!("{} {verb} from {} to {}", c.name, c.from, c.to)
        };
        out.push_str(&wrap(&text, "", look.width));
        if !c.remark.is_empty() {
            out.push_str(&wrap(&c.remark, "  ", look.width));
        }
        if let (Some(change), false) = (c.change, back) {
            let text = format!(
                "change {change}, until the next boot; `homeostat tunable unset {}` puts it back",
                c.name
            );
            out.push_str(&wrap(&text, "  ", look.width));
        }
    }
    out
}

/// What stands at the end of a check that found something.
pub(super) fn summary(found: &Check) -> String {
    format!(
        "{} in {} settings",
        plural(found.findings.len() as u64, "finding"),
        found.looked_at
    )
}

/// `homeostat tunable check`.
pub(super) fn check(found: &Check, look: &Look) -> String {
    let mut out = String::new();
    if let Some(other) = &found.compared_with {
        let _ = writeln!(out, "Compared with {other}.");
    }
    if found.findings.is_empty() {
        let _ = writeln!(out, "Nothing found in {} settings.", found.looked_at);
        return out;
    }
    for (kind, title) in [
        ("differs", "Different values"),
        (
            "missing_here",
            "Set there, and not known to this kernel or machine",
        ),
        ("missing_there", "Changed here, and not known there"),
        ("ignored", "Written down, and ignored by this kernel"),
        ("not_in_force", "Written down, and not in force"),
        ("conflict", "Written down twice, with different values"),
        ("works_against", "Works against this machine"),
    ] {
        let of: Vec<_> = found.findings.iter().filter(|f| f.kind == kind).collect();
        if of.is_empty() {
            continue;
        }
        let _ = writeln!(out, "\n{}", look.paint(Tone::Heading, title));
        for f in of {
            let mut text = f.name.clone();
            if let (Some(here), Some(there)) = (&f.here, &f.there) {
                let _ = write!(text, ": {here} here, {there} there");
            } else if let Some(there) = &f.there {
                let _ = write!(text, " = {there} there");
            } else if let (Some(here), true) = (&f.here, f.place.is_empty()) {
                let _ = write!(text, " = {here} here");
            }
            if f.place.starts_with("= ") {
                let _ = write!(text, " {}", f.place);
            } else if !f.place.is_empty() {
                let _ = write!(text, " ({})", f.place);
            }
            out.push_str(&wrap(&text, "  ", look.width));
            if !f.text.is_empty() {
                out.push_str(&wrap(&f.text, "      ", look.width));
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn look(width: usize) -> Look {
        Look {
            width,
            color: false,
            now_unix: 1_000,
        }
    }

    fn tunable() -> Tunable {
        Tunable {
            name: "vm.swappiness".into(),
            path: "/proc/sys/vm/swappiness".into(),
            group: "vm".into(),
            value: Some("0".into()),
            state: "set".into(),
            default: Some("60".into()),
            changed: Some(true),
            boot: Some("60".into()),
            values: "0 to 200".into(),
            unit: "relative cost".into(),
            r#type: "dynamic".into(),
            since: "2.6".into(),
            what: "How dear swapping is held to be.".into(),
            source: "Documentation/admin-guide/sysctl/vm.rst".into(),
            set_by: Some(SetBy {
                kind: "run_time".into(),
                text: "at run time by sysctl (pid 7, user 0)".into(),
                at_unix: Some(940),
                change: None,
            }),
            lines: vec![homeostat_daemon::tunables::Line {
                kind: "sysctl_file".into(),
                place: "/etc/sysctl.d/10-db.conf:2".into(),
                value: "10".into(),
                in_force: false,
                note: String::new(),
            }],
            strategy: None,
            experiments: vec![],
            warning: Some("swaps only when it is too late".into()),
        }
    }

    fn found() -> Tunables {
        Tunables {
            schema: 1,
            kernel: "6.12".into(),
            watched_since_unix: Some(400),
            settings: vec![tunable()],
        }
    }

    #[test]
    fn one_setting_is_shown_with_everything_that_is_known() {
        let text = show(&found(), &look(80));
        for part in [
            "vm.swappiness = 0",
            "set by      at run time by sysctl (pid 7, user 0), 60.0 s ago",
            "default     60 (differs)",
            "values      0 to 200, unit: relative cost",
            "written     10 in /etc/sysctl.d/10-db.conf:2: not in force",
            "careful     swaps only when it is too late",
        ] {
            assert!(text.contains(part), "{part}\n{text}");
        }
    }

    #[test]
    fn no_line_is_wider_than_the_terminal() {
        for width in [60, 80, 120] {
            let look = look(width);
            for text in [
                list(&found(), &look),
                diff(&found(), &look),
                show(&found(), &look),
            ] {
                for line in text.lines() {
                    assert!(line.chars().count() <= width, "{width}: {line}");
                }
            }
        }
    }

    #[test]
    fn nothing_is_said_in_words() {
        let empty = Tunables {
            settings: vec![],
            ..found()
        };
        assert!(list(&empty, &look(80)).contains("No setting fits"));
        assert!(diff(&empty, &look(80)).contains("as Linux 6.12 has it"));
    }
}
