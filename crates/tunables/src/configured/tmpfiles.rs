//! Lines of tmpfiles.d(5) that write into files: `w /sys/kernel/mm/ksm/run - - - - 1`.
//!
//! Of several lines with the same path the first counts, in the order of the files' names; later ones are ignored as
//! duplicates unless they say the very same, or are `w+`. Paths are compared as they stand there, so that a pattern and
//! a name are two, and both are carried out. `w!` counts at boot only: a later `systemd-tmpfiles --create` leaves it out,
//! and then another line may be the first.

use super::{Applies, Form, Way, Written, files_of};
use crate::tree::Tree;
use std::collections::BTreeMap;

const DIRECTORIES: &[&str] = &[
    "/etc/tmpfiles.d",
    "/run/tmpfiles.d",
    "/usr/local/lib/tmpfiles.d",
    "/usr/lib/tmpfiles.d",
];

struct Line {
    written: Written,
    /// Everything but the path, by which two lines are the same.
    same: (String, Vec<String>),
    appends: bool,
    only_at_boot: bool,
}

pub(super) fn read(tree: &dyn Tree) -> Vec<Written> {
    let release = tree.text("/proc/sys/kernel/osrelease").unwrap_or_default();
    let mut lines = Vec::new();
    for (file, text) in files_of(tree, DIRECTORIES, ".conf") {
        for (index, line) in text.lines().enumerate() {
            lines.extend(parse(line.trim(), &file, index + 1, release.trim()));
        }
    }
    let mut found = carried_out(lines.iter());
    let at_boot: Vec<(String, usize)> = found.iter().map(|w| (w.file.clone(), w.line)).collect();
    // What only a later run would write.
    for mut written in carried_out(lines.iter().filter(|l| !l.only_at_boot)) {
        if !at_boot.contains(&(written.file.clone(), written.line)) {
            written.applies = Applies::Unknown(
                "it counts when `systemd-tmpfiles --create` runs again after the start".to_owned(),
            );
            found.push(written);
        }
    }
    found
}

/// The lines that one run carries out, in its order: path by path, as each first appears.
fn carried_out<'l>(lines: impl Iterator<Item = &'l Line>) -> Vec<Written> {
    let mut order: Vec<&str> = Vec::new();
    let mut kept: BTreeMap<&str, Vec<&Line>> = BTreeMap::new();
    for line in lines {
        let of = kept.entry(&line.written.path).or_insert_with(|| {
            order.push(&line.written.path);
            Vec::new()
        });
        let is_duplicate = of.iter().any(|before| before.same != line.same);
        if !is_duplicate || line.appends {
            of.push(line);
        }
    }
    order
        .into_iter()
        .filter_map(|path| kept.get(path))
        .flatten()
        .map(|line| line.written.clone())
        .collect()
}

fn parse(line: &str, file: &str, number: usize, release: &str) -> Option<Line> {
    let mut rest = line;
    let kind = field(&mut rest)?;
    let mut marks = kind.chars();
    if marks.next() != Some('w') {
        return None;
    }
    let marks: Vec<char> = marks.collect();
    if marks
        .iter()
        .any(|m| !matches!(m, '!' | '-' | '=' | '~' | '^' | '+' | '$'))
    {
        return None;
    }
    let path = field(&mut rest)?;
    // Mode, user, group and age; all the rest is the value.
    let fields: Vec<String> = (0..4).map_while(|_| field(&mut rest)).collect();
    let argument = rest.trim_matches([' ', '\t']);
    if argument.is_empty() || argument == "-" {
        return None;
    }
    let (path, path_is_known) = specifiers(&path, release);
    let (value, is_known) = specifiers(&unescaped(argument), release);
    let path = format!(
        "/{}",
        path.split('/')
            .filter(|p| !p.is_empty())
            .collect::<Vec<_>>()
            .join("/")
    );
    if !path_is_known || !(path.starts_with("/sys/") || path.starts_with("/proc/sys/")) {
        return None;
    }
    let value = value.strip_suffix('\n').unwrap_or(&value);
    let mut written = Written::new(Way::Tmpfiles, path, value, file, number);
    written.optional = marks.contains(&'-');
    if !is_known || marks.contains(&'~') || marks.contains(&'^') {
        written.form = Form::Computed;
    }
    Some(Line {
        same: (value.to_owned(), fields),
        appends: marks.contains(&'+'),
        only_at_boot: marks.contains(&'!'),
        written,
    })
}

/// The next field, out of its quotation marks, and what follows it.
fn field(rest: &mut &str) -> Option<String> {
    let text = rest.trim_start_matches([' ', '\t']);
    let mut quote = None;
    let mut escaped = false;
    let mut raw = String::new();
    let mut end = text.len();
    for (at, c) in text.char_indices() {
        match (quote, c) {
            (_, c) if escaped => {
                raw.push(c);
                escaped = false;
            }
            (_, '\\') => escaped = true,
            (Some(q), c) if q == c => quote = None,
            (None, '"' | '\'') => quote = Some(c),
            (None, ' ' | '\t') => {
                end = at;
                break;
            }
            (_, c) => raw.push(c),
        }
    }
    *rest = text.get(end..).unwrap_or_default();
    (end > 0).then_some(raw)
}

/// Escapes as in C.
fn unescaped(text: &str) -> String {
    let mut out = String::new();
    let mut chars = text.chars().peekable();
    while let Some(c) = chars.next() {
        if c != '\\' {
            out.push(c);
            continue;
        }
        match chars.next() {
            Some('n') => out.push('\n'),
            Some('t') => out.push('\t'),
            Some('r') => out.push('\r'),
            Some('s') => out.push(' '),
            Some('x') => {
                let digits: String = chars.clone().take(2).collect();
                match u8::from_str_radix(&digits, 16) {
                    Ok(byte) if digits.len() == 2 => {
                        out.push(char::from(byte));
                        chars.next();
                        chars.next();
                    }
                    _ => out.push_str("\\x"),
                }
            }
            Some(other) => out.push(other),
            None => out.push('\\'),
        }
    }
    out
}

/// Specifiers that can be told from outside; whether all could.
fn specifiers(text: &str, release: &str) -> (String, bool) {
    let mut out = String::new();
    let mut is_known = true;
    let mut chars = text.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        match chars.next() {
            Some('%') => out.push('%'),
            Some('v') if !release.is_empty() => out.push_str(release),
            _ => is_known = false,
        }
    }
    (out, is_known)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Files;

    fn said(list: &[(&str, &str)]) -> Vec<(String, String, bool)> {
        read(&Files::new(list))
            .into_iter()
            .map(|w| (w.place(), w.value.clone(), w.applies == Applies::Yes))
            .collect()
    }

    fn line(place: &str, value: &str, certain: bool) -> (String, String, bool) {
        (place.to_owned(), value.to_owned(), certain)
    }

    #[test]
    fn only_lines_that_write_settings_count() {
        let found = said(&[
            (
                "/etc/tmpfiles.d/a.conf",
                "# w /sys/x - - - - 1\nd /run/x\nw! /sys/kernel/mm/ksm/run - - - - 1\nw /etc/x - - - - 1\n\
                 w+ /proc/sys/net/ipv4/tcp_rmem - - - - 4096 87380 1000\\n\n",
            ),
            (
                "/usr/lib/tmpfiles.d/a.conf",
                "w /sys/kernel/mm/ksm/run - - - - 2\n",
            ),
        ]);
        assert_eq!(
            found,
            [
                line("/etc/tmpfiles.d/a.conf:3", "1", true),
                line("/etc/tmpfiles.d/a.conf:5", "4096 87380 1000", true),
            ]
        );
    }

    #[test]
    fn of_one_path_the_first_line_counts_and_what_counts_at_boot_only_may_not() {
        let found = said(&[
            ("/etc/tmpfiles.d/10-a.conf", "w! /sys/a - - - - never\n"),
            (
                "/usr/lib/tmpfiles.d/b.conf",
                "w /sys/a - - - - always\nw /sys/* - - - - third\n",
            ),
        ]);
        assert_eq!(
            found,
            [
                line("/etc/tmpfiles.d/10-a.conf:1", "never", true),
                line("/usr/lib/tmpfiles.d/b.conf:2", "third", true),
                line("/usr/lib/tmpfiles.d/b.conf:1", "always", false),
            ]
        );
    }
}
