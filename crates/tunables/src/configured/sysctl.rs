//! sysctl.d(5), and `/etc/sysctl.conf`.
//!
//! All files are sorted by name, whatever their directory; one in a directory further up replaces those of the same name
//! below. The last line about a name wins; `-NAME` alone keeps patterns away from it. systemd-sysctl carries the lines out in
//! the order of the files, and a line that repeats the value of an earlier one leaves that one where it is.
//!
//! `/etc/sysctl.conf` is read last by `sysctl --system` of procps. systemd-sysctl does not read it, unless it is linked into
//! sysctl.d, as Debian up to 12 does. tuned applies `/run/sysctl.d`, `/etc/sysctl.d` and that file once more after its own.

use super::{Applies, Phase, Way, Written, files_of, sysctl_path};
use crate::tree::Tree;
use std::collections::BTreeMap;

const DIRECTORIES: &[&str] = &[
    "/etc/sysctl.d",
    "/run/sysctl.d",
    "/usr/local/lib/sysctl.d",
    "/usr/lib/sysctl.d",
    "/lib/sysctl.d",
];
/// What tuned applies again: the first of a name counts, and no patterns (`_apply_system_sysctl` in its plugin).
const REAPPLIED: &[&str] = &["/run/sysctl.d", "/etc/sysctl.d"];
const OLD: &str = "/etc/sysctl.conf";
const LINK: &str = "99-sysctl.conf";
const SYSTEMD: &[&str] = &["/usr/lib/systemd/systemd-sysctl", "/lib/systemd/systemd-sysctl"];

/// What sysctl.d says.
pub(super) struct Sysctl {
    /// The lines in order of effect.
    pub(super) written: Vec<Written>,
    /// Files that patterns are kept away from.
    pub(super) excluded: Vec<String>,
}

/// Reads all of it. `reapplied`: whether tuned applies it again.
pub(super) fn read(tree: &dyn Tree, reapplied: Option<Applies>) -> Sysctl {
    let mut files = files_of(tree, DIRECTORIES, ".conf");
    let has_systemd = SYSTEMD
        .iter()
        .any(|program| tree.read(program) != Err(crate::tree::Unreadable::Absent));
    let old = tree.text(OLD);
    let is_link = |path: &str, text: &str| path.ends_with(LINK) && old.as_deref() == Some(text);
    let is_linked = files.iter().any(|(path, text)| is_link(path, text));
    let mut sequence = Sequence::default();
    let mut excluded = Vec::new();
    if !has_systemd {
        files.retain(|(path, text)| !is_link(path, text));
        files.extend(old.clone().map(|text| (OLD.to_owned(), text)));
    }
    for (file, text) in &files {
        // The link is shown by the name that people know.
        let shown = if is_link(file, text) { OLD } else { file.as_str() };
        for (number, line) in lines(text) {
            match line {
                Line::Excluded(name) => {
                    let path = sysctl_path(name);
                    sequence.forget(&path);
                    excluded.push(path);
                }
                Line::Set {
                    name,
                    value,
                    optional,
                    ..
                } => {
                    let mut written = Written::new(Way::SysctlFile, sysctl_path(name), value, shown, number);
                    written.optional = optional;
                    sequence.add(written);
                }
            }
        }
    }
    let mut written = sequence.in_order();
    if let (true, false, Some(text)) = (has_systemd, is_linked, &old) {
        for (number, line) in lines(text) {
            if let Line::Set {
                name,
                value,
                optional,
                ..
            } = line
            {
                let mut unread = Written::new(Way::SysctlFile, sysctl_path(name), value, OLD, number);
                unread.optional = optional;
                unread.applies = Applies::No(UNREAD.to_owned());
                written.push(unread);
            }
        }
    }
    if let Some(applies) = reapplied {
        let again = files_of(tree, REAPPLIED, ".conf");
        for (file, text) in again.into_iter().chain(old.map(|text| (OLD.to_owned(), text))) {
            for (number, line) in lines(&text) {
                if let Line::Set { name, value, .. } = line {
                    let path = format!("/proc/sys/{}", name.replace('.', "/"));
                    let mut line = Written::new(Way::SysctlFile, path, value, &file, number);
                    line.phase = Phase::Reapplied;
                    line.optional = true;
                    line.applies = applies.clone();
                    if !super::pattern::is_pattern(&line.path) {
                        written.push(line);
                    }
                }
            }
        }
    }
    Sysctl { written, excluded }
}

/// Why a line of `/etc/sysctl.conf` does not count.
pub(crate) const UNREAD: &str =
    "systemd-sysctl does not read /etc/sysctl.conf: move the line to a file in /etc/sysctl.d";

/// The settings that a file of sysctls sets, for `sysctl -p FILE`: line, file and value.
pub(super) fn assignments(text: &str) -> Vec<(usize, String, String)> {
    lines(text)
        .filter_map(|(number, line)| match line {
            Line::Set {
                name,
                value,
                spaced: false,
                ..
            } => Some((number, sysctl_path(name), value.to_owned())),
            Line::Set { .. } | Line::Excluded(_) => None,
        })
        .collect()
}

enum Line<'t> {
    Set {
        name: &'t str,
        value: &'t str,
        optional: bool,
        /// White space stands between the dash and the name: `sysctl` takes it for a part of the name.
        spaced: bool,
    },
    Excluded(&'t str),
}

/// The lines that say something, as `parse_file()` of systemd-sysctl and procps read them.
fn lines(text: &str) -> impl Iterator<Item = (usize, Line<'_>)> {
    text.lines().enumerate().filter_map(|(index, line)| {
        // The mark that some editors put first is no white space for systemd; it then ignores the whole line.
        let line = line.trim_matches(WHITE);
        if line.is_empty() || line.starts_with(['#', ';']) {
            return None;
        }
        let found = match line.split_once('=') {
            Some((name, value)) => {
                let rest = name.strip_prefix('-');
                Line::Set {
                    name: rest.unwrap_or(name).trim_matches(WHITE),
                    value: value.trim_matches(WHITE),
                    optional: rest.is_some(),
                    spaced: rest.is_some_and(|r| r.starts_with(WHITE)),
                }
            }
            None => Line::Excluded(line.strip_prefix('-')?.trim_matches(WHITE)),
        };
        let name = match &found {
            Line::Set { name, .. } | Line::Excluded(name) => *name,
        };
        (!name.is_empty()).then_some((index + 1, found))
    })
}

/// White space of the tools that read configuration.
const WHITE: &[char] = &[' ', '\t', '\r', '\n'];

/// Lines in the order in which systemd-sysctl keeps them.
#[derive(Default)]
struct Sequence {
    written: BTreeMap<usize, Written>,
    by_path: BTreeMap<String, usize>,
    next: usize,
}

impl Sequence {
    fn add(&mut self, line: Written) {
        let before = self.by_path.get(&line.path).copied();
        let position = match before {
            Some(position) if self.written.get(&position).is_some_and(|w| w.value == line.value) => position,
            _ => {
                if let Some(position) = before {
                    self.written.remove(&position);
                }
                self.next += 1;
                self.next
            }
        };
        self.by_path.insert(line.path.clone(), position);
        self.written.insert(position, line);
    }

    /// A name that is excluded later is not set by what came before.
    fn forget(&mut self, path: &str) {
        if let Some(position) = self.by_path.remove(path) {
            self.written.remove(&position);
        }
    }

    fn in_order(self) -> Vec<Written> {
        self.written.into_values().collect()
    }
}

#[cfg(test)]
mod tests {
    use crate::configured::Configured;
    use crate::testing::Files;

    fn winner(list: &[(&str, &str)], path: &str) -> Option<(String, String)> {
        let tree = Files::new(list);
        let configured = Configured::read(&tree);
        configured
            .about(path, &tree)
            .last()
            .map(|c| (c.written.place(), c.written.value.clone()))
    }

    fn is(place: &str, value: &str) -> Option<(String, String)> {
        Some((place.to_owned(), value.to_owned()))
    }

    const SWAPPINESS: &str = "/proc/sys/vm/swappiness";

    #[test]
    fn the_last_file_by_name_wins_whatever_its_directory() {
        assert_eq!(
            winner(
                &[
                    ("/usr/lib/sysctl.d/90-x.conf", "vm.swappiness=1\n"),
                    ("/etc/sysctl.d/10-x.conf", "vm.swappiness=2\n"),
                ],
                SWAPPINESS
            ),
            is("/usr/lib/sysctl.d/90-x.conf:1", "1")
        );
    }

    #[test]
    fn a_file_of_the_same_name_further_up_replaces_the_other_even_when_empty() {
        let list = [
            ("/usr/lib/sysctl.d/50-x.conf", "vm.swappiness=1\n"),
            ("/run/sysctl.d/50-x.conf", "vm.swappiness=2\n"),
        ];
        assert_eq!(winner(&list, SWAPPINESS), is("/run/sysctl.d/50-x.conf:1", "2"));
        assert_eq!(
            winner(&[list[0], list[1], ("/etc/sysctl.d/50-x.conf", "")], SWAPPINESS),
            None
        );
    }

    #[test]
    fn the_old_file_is_read_last_and_its_link_is_the_same_file() {
        let text = "\n# x\nvm.swappiness = 7\n";
        assert_eq!(
            winner(
                &[
                    ("/etc/sysctl.conf", text),
                    ("/etc/sysctl.d/99-sysctl.conf", text),
                    ("/etc/sysctl.d/zz.conf", "vm.swappiness=8\n"),
                ],
                SWAPPINESS
            ),
            is("/etc/sysctl.conf:3", "7")
        );
    }

    #[test]
    fn systemd_reads_the_old_file_only_where_it_is_linked() {
        let old = ("/etc/sysctl.conf", "vm.swappiness = 10\n");
        let app = ("/etc/sysctl.d/50-app.conf", "vm.swappiness = 40\n");
        let systemd = ("/usr/lib/systemd/systemd-sysctl", "");
        let link = ("/etc/sysctl.d/99-sysctl.conf", "vm.swappiness = 10\n");
        let later = ("/etc/sysctl.d/zz.conf", "vm.swappiness = 8\n");
        assert_eq!(winner(&[old, app], SWAPPINESS), is("/etc/sysctl.conf:1", "10"));
        assert_eq!(
            winner(&[old, app, systemd], SWAPPINESS),
            is("/etc/sysctl.d/50-app.conf:1", "40")
        );
        assert_eq!(
            winner(&[old, app, systemd, link], SWAPPINESS),
            is("/etc/sysctl.conf:1", "10")
        );
        assert_eq!(
            winner(&[old, app, systemd, link, later], SWAPPINESS),
            is("/etc/sysctl.d/zz.conf:1", "8")
        );
    }

    #[test]
    fn a_line_that_names_the_file_wins_over_patterns_and_some_are_kept_away_from_them() {
        let path = |device: &str| format!("/proc/sys/net/ipv4/conf/{device}/rp_filter");
        let list = [
            (
                "/etc/sysctl.d/10.conf",
                "net.ipv4.conf.hub0.rp_filter=0\n-net.ipv4.conf.all.rp_filter\n",
            ),
            ("/etc/sysctl.d/20.conf", "; x\n-net.ipv4.conf.*.rp_filter=2\n"),
        ];
        assert_eq!(winner(&list, &path("hub0")), is("/etc/sysctl.d/10.conf:1", "0"));
        assert_eq!(winner(&list, &path("eth0")), is("/etc/sysctl.d/20.conf:2", "2"));
        assert_eq!(winner(&list, &path("all")), None);
    }
}
