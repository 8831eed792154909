//! udev rules that set attributes of devices: `SUBSYSTEM=="block", KERNEL=="sd*", ATTR{queue/scheduler}="bfq"`, and
//! `SYSCTL{…}="…"`; commands of `RUN` that write a setting.
//!
//! A rule is followed for one device at a time, as udev does when the device appears: keys that match are looked at, `GOTO`
//! jumps. A key that a program, the device's database or an unknown parent answers cannot be told; so cannot what depends on it.

use super::{Applies, Form, Way, Written, files_of, joined_lines, pattern, shell, sysctl_path};
use crate::tree::{Tree, Unreadable};
use std::collections::BTreeMap;
use std::sync::Arc;

const DIRECTORIES: &[&str] = &[
    "/etc/udev/rules.d",
    "/run/udev/rules.d",
    "/usr/local/lib/udev/rules.d",
    "/usr/lib/udev/rules.d",
    "/lib/udev/rules.d",
];
/// Most parents of a device that are looked at.
const PARENTS_MAX: usize = 32;

pub(super) fn read(tree: &dyn Tree) -> Vec<Written> {
    let mut found = Vec::new();
    for (file, text) in files_of(tree, DIRECTORIES, ".rules") {
        let rules: Vec<(usize, Vec<Part>)> = joined_lines(&text)
            .into_iter()
            .filter(|(_, line)| !line.starts_with('#'))
            .filter_map(|(number, line)| Some((number, parts(&line)?)))
            .collect();
        let whole = Arc::new(File {
            name: file,
            rules: rules.iter().map(|(_, parts)| parts.clone()).collect(),
        });
        for (index, (number, parts)) in rules.iter().enumerate() {
            let rule = Rule {
                file: whole.clone(),
                index,
            };
            for mut written in assignments(parts, &whole.name, *number) {
                written.rule = Some(rule.clone());
                found.push(written);
            }
        }
    }
    found
}

/// `KEY{attribute}` operator `"value"`.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Part {
    key: String,
    attribute: String,
    operator: Operator,
    value: String,
    /// `i"…"`: without regard to case.
    any_case: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Operator {
    Match,
    NoMatch,
    Set,
}

/// The rules of one file.
#[derive(Debug, PartialEq, Eq)]
struct File {
    name: String,
    rules: Vec<Vec<Part>>,
}

/// One rule of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Rule {
    file: Arc<File>,
    index: usize,
}

impl Rule {
    /// Whether udev carries the rule out for a device.
    pub(super) fn applies(&self, device: &mut Option<Device>, tree: &dyn Tree) -> Applies {
        match device {
            Some(device) => device.follow(&self.file, tree).get(self.index).cloned(),
            None => None,
        }
        .unwrap_or_else(|| {
            Applies::Unknown("which device the rule is carried out for is not known".to_owned())
        })
    }

    /// The one device that a rule names, if it names one and asks nothing else that cannot be told.
    pub(super) fn names_device(&self) -> Option<&str> {
        let parts = self.file.rules.get(self.index)?;
        let plain = parts.iter().all(|p| {
            p.operator == Operator::Set
                || matches!(p.key.as_str(), "ACTION" | "SUBSYSTEM" | "KERNEL" | "ATTR")
        });
        let kernel = parts
            .iter()
            .find(|p| p.key == "KERNEL" && p.operator == Operator::Match)?;
        (plain && !pattern::is_pattern(&kernel.value) && !kernel.value.contains('|')).then_some(&kernel.value)
    }
}

/// The parts of a line; `None` when udev would not understand it.
fn parts(line: &str) -> Option<Vec<Part>> {
    let mut parts = Vec::new();
    let mut rest = line.trim_start_matches([',', ' ', '\t']);
    while !rest.is_empty() {
        let (before, after) = rest.split_once('"')?;
        let before = before.trim_end();
        let (before, any_case) = match before.strip_suffix('i') {
            Some(shorter) if shorter.ends_with('=') => (shorter, true),
            _ => (
                before
                    .strip_suffix('e')
                    .filter(|b| b.ends_with('='))
                    .unwrap_or(before),
                false,
            ),
        };
        let start = before.find(['=', '!', '+', '-', ':'])?;
        // An attribute may hold a dash.
        let start = match (before.find('{'), before.find('}')) {
            (Some(open), Some(close)) if open < start => {
                close + before.get(close..)?.find(['=', '!', '+', '-', ':'])?
            }
            _ => start,
        };
        let (name, operator) = before.split_at_checked(start)?;
        let (key, attribute) = match name.trim().split_once('{') {
            Some((key, attribute)) => (key, attribute.strip_suffix('}')?),
            None => (name.trim(), ""),
        };
        let operator = match operator.trim() {
            "==" => Operator::Match,
            "!=" => Operator::NoMatch,
            "=" | "+=" | ":=" => Operator::Set,
            "-=" => Operator::Set,
            _ => return None,
        };
        let mut end = None;
        let mut escaped = false;
        for (at, c) in after.char_indices() {
            match c {
                '\\' if !escaped => escaped = true,
                '"' if !escaped => {
                    end = Some(at);
                    break;
                }
                _ => escaped = false,
            }
        }
        let end = end?;
        parts.push(Part {
            key: key.to_owned(),
            attribute: attribute.to_owned(),
            operator,
            value: after.get(..end)?.replace("\\\"", "\""),
            any_case,
        });
        rest = after.get(end + 1..)?.trim_start_matches([',', ' ', '\t']);
    }
    Some(parts)
}

/// What the rule sets, for every device.
fn assignments(parts: &[Part], file: &str, number: usize) -> Vec<Written> {
    let mut found = Vec::new();
    let subsystem = parts
        .iter()
        .find(|p| p.key == "SUBSYSTEM" && p.operator == Operator::Match)
        .map_or("", |p| p.value.as_str());
    for part in parts.iter().filter(|p| p.operator == Operator::Set) {
        let (value, form) = substituted(&part.value);
        let mut add = |path: String, value: &str, form: Form| {
            let mut written = Written::new(Way::UdevRule, path, value, file, number);
            written.form = form;
            found.push(written);
        };
        match part.key.as_str() {
            "SYSCTL" if !part.attribute.is_empty() => add(sysctl_path(&part.attribute), &value, form),
            "ATTR" if !part.attribute.is_empty() && !part.attribute.starts_with(['[', '.']) => {
                for base in bases(subsystem) {
                    add(format!("{base}/*/{}", part.attribute), &value, form);
                }
            }
            "RUN" if matches!(part.attribute.as_str(), "" | "program") => {
                let command = ["%k", "$kernel", "$name"]
                    .iter()
                    .fold(part.value.clone(), |text, k| text.replace(k, "*"))
                    .replace("/sys%p", "/sys/block/*")
                    .replace("/sys$devpath", "/sys/block/*");
                for write in shell::writes(&command) {
                    let mut written = Written::new(Way::UdevRule, write.path, &write.value, file, number);
                    written.form = write.form;
                    written.applies = Applies::Unknown("a command of the rule writes it".to_owned());
                    found.push(written);
                }
            }
            _ => {}
        }
    }
    found
}

/// A value with what udev puts in for `$…` and `%…`, where that is known.
fn substituted(value: &str) -> (String, Form) {
    let plain = value.replace("$$", "\u{1}").replace("%%", "\u{2}");
    let form = if plain.contains(['$', '%']) {
        Form::Computed
    } else {
        Form::Plain
    };
    (plain.replace('\u{1}', "$").replace('\u{2}', "%"), form)
}

/// Where the devices of a subsystem have their directories.
fn bases(subsystem: &str) -> Vec<String> {
    if subsystem.is_empty() || pattern::is_pattern(subsystem) {
        // A rule that names no subsystem: the devices that the catalogue knows.
        return vec!["/sys/block".to_owned(), "/sys/class/net".to_owned()];
    }
    subsystem
        .split('|')
        .map(|one| match one {
            "block" => "/sys/block".to_owned(),
            "cpu" => "/sys/devices/system/cpu".to_owned(),
            "module" => "/sys/module".to_owned(),
            other => format!("/sys/class/{other}"),
        })
        .collect()
}

/// A device whose events are followed.
pub(super) struct Device {
    directory: String,
    subsystem: String,
    name: String,
    /// The device and its parents, nearest first, and whether these are all.
    parents: Option<(Vec<String>, bool)>,
    /// Whether each rule of a file is carried out, by the file's name.
    followed: BTreeMap<String, Vec<Applies>>,
}

impl Device {
    /// The device that has a file.
    pub(super) fn of(path: &str) -> Option<Self> {
        let parts: Vec<&str> = path.split('/').collect();
        let (depth, subsystem) = match parts.as_slice() {
            ["", "sys", "block", _, ..] => (4, "block"),
            ["", "sys", "module", _, ..] => (4, "module"),
            ["", "sys", "class", subsystem, _, ..] => (5, *subsystem),
            ["", "sys", "devices", "system", "cpu", _, ..] => (6, "cpu"),
            _ => return None,
        };
        Some(Self {
            directory: parts.get(..depth)?.join("/"),
            subsystem: subsystem.to_owned(),
            name: (*parts.get(depth - 1)?).to_owned(),
            parents: None,
            followed: BTreeMap::new(),
        })
    }

    /// Whether each rule of a file is carried out for this device.
    fn follow(&mut self, file: &File, tree: &dyn Tree) -> Vec<Applies> {
        if let Some(known) = self.followed.get(&file.name) {
            return known.clone();
        }
        // Where jumps that may be taken lead to, and whether udev may come from the rule right before.
        let mut goals: Vec<usize> = Vec::new();
        let mut through = true;
        let mut found = Vec::with_capacity(file.rules.len());
        for (index, parts) in file.rules.iter().enumerate() {
            if !(through || goals.contains(&index)) {
                found.push(Applies::No("a rule before it jumps over it".to_owned()));
                continue;
            }
            let holds = self.matches(parts, tree);
            let goal = parts
                .iter()
                .find(|p| p.key == "GOTO" && p.operator == Operator::Set)
                .and_then(|goto| {
                    (index + 1..file.rules.len()).find(|later| {
                        file.rules.get(*later).is_some_and(|parts| {
                            parts.iter().any(|p| p.key == "LABEL" && p.value == goto.value)
                        })
                    })
                });
            let is_sure = goals.iter().all(|goal| *goal <= index);
            through = match goal {
                Some(goal) if !matches!(holds, Applies::No(_)) => {
                    goals.push(goal);
                    holds != Applies::Yes
                }
                _ => true,
            };
            found.push(if is_sure {
                holds
            } else {
                holds.and(Applies::Unknown("a rule before it may jump over it".to_owned()))
            });
        }
        self.followed.insert(file.name.clone(), found.clone());
        found
    }

    fn matches(&mut self, parts: &[Part], tree: &dyn Tree) -> Applies {
        let mut all = Applies::Yes;
        for part in parts {
            all = all.and(self.matches_one(part, tree));
            if matches!(all, Applies::No(_)) {
                return all;
            }
        }
        let asked: Vec<&Part> = parts.iter().filter(|p| is_about_parents(p)).collect();
        if asked.is_empty() {
            return all;
        }
        all.and(self.parents_match(&asked, tree))
    }

    fn matches_one(&self, part: &Part, tree: &dyn Tree) -> Applies {
        let unknown = |why: &str| Applies::Unknown(format!("{} {why}", shown(part)));
        let compared = |value: &str| holds(part, value);
        if part.operator == Operator::Set {
            // What a program or the database answers decides, too.
            return match part.key.as_str() {
                "IMPORT" | "PROGRAM" => unknown("asks a program or the device's database"),
                _ => Applies::Yes,
            };
        }
        if is_about_parents(part) {
            return Applies::Yes;
        }
        match part.key.as_str() {
            // At the start of the machine udev is told of every device as if it had appeared.
            "ACTION" => match (compared("add"), compared("change")) {
                (no @ Applies::No(_), Applies::No(_)) => no,
                (Applies::No(_), _) => unknown("holds when the device changes"),
                (other, _) => other,
            },
            "KERNEL" => compared(&self.name),
            "SUBSYSTEM" => compared(&self.subsystem),
            "ATTR" => self.attribute(part, &self.directory, tree),
            "ENV" => {
                let text = tree
                    .text(&format!("{}/uevent", self.directory))
                    .unwrap_or_default();
                let given = text.lines().find_map(|l| {
                    let (key, value) = l.split_once('=')?;
                    (key == part.attribute).then_some(value)
                });
                match (given, part.attribute.as_str()) {
                    (Some(value), _) => compared(value),
                    (None, "SUBSYSTEM") => compared(&self.subsystem),
                    (None, "DEVTYPE") if self.subsystem == "block" => compared("disk"),
                    (None, _) => unknown("is not known"),
                }
            }
            "SYSCTL" => match tree.text(&sysctl_path(&part.attribute)) {
                Some(value) => compared(value.trim_end()),
                None => Applies::No(format!("{} is absent", part.attribute)),
            },
            "TEST" if part.attribute.is_empty() && !part.value.contains(['$', '%', '*', '?', '[']) => {
                let path = if part.value.starts_with('/') {
                    part.value.clone()
                } else {
                    format!("{}/{}", self.directory, part.value)
                };
                let is_there = tree.read(&path) != Err(Unreadable::Absent) || !tree.names(&path).is_empty();
                if is_there == (part.operator == Operator::Match) {
                    Applies::Yes
                } else {
                    Applies::No(format!("{} does not hold", shown(part)))
                }
            }
            _ => unknown("is not known"),
        }
    }

    fn attribute(&self, part: &Part, directory: &str, tree: &dyn Tree) -> Applies {
        // `[subsystem/device]attribute` is about another device.
        if let Some((other, attribute)) = part.attribute.strip_prefix('[').and_then(|a| a.split_once(']')) {
            return match tree.text(&format!(
                "/sys/class/{other}/{}",
                attribute.trim_start_matches('/')
            )) {
                Some(value) => holds(part, value.trim_end()),
                None => Applies::Unknown(format!("{} is not known", shown(part))),
            };
        }
        match tree.text(&format!("{directory}/{}", part.attribute)) {
            Some(value) => holds(part, value.trim_end()),
            // udev takes a missing attribute for one that does not match, also with `!=`.
            None => Applies::No(format!("{} is absent", part.attribute)),
        }
    }

    /// The keys that ask for a parent: one device of the chain must answer all of them.
    fn parents_match(&mut self, asked: &[&Part], tree: &dyn Tree) -> Applies {
        let (chain, is_whole) = self
            .parents
            .get_or_insert_with(|| chain(&self.directory, tree))
            .clone();
        let mut all = if is_whole {
            Applies::No("no parent of the device fits".to_owned())
        } else {
            Applies::Unknown("the parents of the device are not known".to_owned())
        };
        for (index, directory) in chain.iter().enumerate() {
            let mut here = Applies::Yes;
            for part in asked {
                let link = |leaf: &str| {
                    let target = tree.real_path(&format!("{directory}/{leaf}"))?;
                    target.rsplit('/').next().map(str::to_owned)
                };
                let name = directory.rsplit('/').next().unwrap_or_default();
                let value = match part.key.as_str() {
                    "KERNELS" => Some(if index == 0 {
                        self.name.clone()
                    } else {
                        name.to_owned()
                    }),
                    "SUBSYSTEMS" if index == 0 => Some(self.subsystem.clone()),
                    "SUBSYSTEMS" => link("subsystem"),
                    "DRIVERS" => Some(link("driver").unwrap_or_default()),
                    _ => {
                        here = here.and(self.attribute(part, directory, tree));
                        continue;
                    }
                };
                here = here.and(match value {
                    Some(value) => holds(part, &value),
                    None => Applies::Unknown(format!("{} is not known", shown(part))),
                });
            }
            all = either(all, here);
        }
        all
    }
}

/// A device and its parents, nearest first, and whether these are all of them.
fn chain(directory: &str, tree: &dyn Tree) -> (Vec<String>, bool) {
    let Some(real) = tree
        .real_path(directory)
        .filter(|r| r.starts_with("/sys/devices/"))
    else {
        return (vec![directory.to_owned()], false);
    };
    let mut found = vec![real.clone()];
    let mut at = real.as_str();
    while let Some((parent, _)) = at.rsplit_once('/') {
        if parent == "/sys/devices" || found.len() >= PARENTS_MAX {
            break;
        }
        if tree.read(&format!("{parent}/uevent")) != Err(Unreadable::Absent) {
            found.push(parent.to_owned());
        }
        at = parent;
    }
    (found, true)
}

fn is_about_parents(part: &Part) -> bool {
    part.operator != Operator::Set
        && matches!(part.key.as_str(), "KERNELS" | "SUBSYSTEMS" | "DRIVERS" | "ATTRS")
}

fn either(a: Applies, b: Applies) -> Applies {
    match (a, b) {
        (Applies::Yes, _) | (_, Applies::Yes) => Applies::Yes,
        (unknown @ Applies::Unknown(_), _) | (_, unknown @ Applies::Unknown(_)) => unknown,
        (no @ Applies::No(_), Applies::No(_)) => no,
    }
}

/// Whether a value fits the pattern of a key. A star of udev goes over slashes.
fn holds(part: &Part, value: &str) -> Applies {
    if part.value.contains(['$', '%']) {
        return Applies::Unknown(format!("{} is computed", shown(part)));
    }
    let form = |text: &str| {
        let flat = text.replace('/', "\u{1}");
        if part.any_case { flat.to_lowercase() } else { flat }
    };
    let fits = pattern::fits_any(&form(&part.value), &form(value));
    if fits == (part.operator == Operator::Match) {
        Applies::Yes
    } else {
        Applies::No(format!("{} does not hold", shown(part)))
    }
}

fn shown(part: &Part) -> String {
    if part.attribute.is_empty() {
        part.key.clone()
    } else {
        format!("{}{{{}}}", part.key, part.attribute)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::configured::{Candidate, Configured};
    use crate::testing::Files;

    /// The lines about a file: number, and whether it is sure that each applies.
    fn about(rules: &str, files: &[(&str, &str)], path: &str) -> Vec<(usize, bool)> {
        let mut all = vec![("/etc/udev/rules.d/60-disk.rules", rules)];
        all.extend(files);
        let tree = Files::new(&all);
        let configured = Configured::read(&tree);
        let of = |c: Candidate<'_>| (c.written.line, c.applies == Applies::Yes);
        configured.about(path, &tree).into_iter().map(of).collect()
    }

    #[test]
    fn a_rule_sets_the_attribute_of_the_devices_that_fit_its_conditions() {
        let rules = "# x\nACTION==\"add|change\", SUBSYSTEM==\"block\", KERNEL==\"sd[a-z]|vd*\", \\\n  \
             ATTR{queue/rotational}==\"0\", ATTR{queue/scheduler}=\"none\"\n\
             SUBSYSTEM==\"net\", KERNEL==\"eth*\", ENV{X}!=\"y\", ATTR{tx_queue_len}=\"5000\"\n\
             SUBSYSTEM==\"module\", KERNEL==\"nf_conntrack\", SYSCTL{net.netfilter.nf_conntrack_max}=\"1000\"\n";
        let files = [
            ("/sys/block/sda/queue/rotational", "1\n"),
            ("/sys/block/vda/queue/rotational", "0\n"),
        ];
        let lines = |path: &str| about(rules, &files, path);
        assert_eq!(lines("/sys/block/vda/queue/scheduler"), [(2, true)]);
        assert_eq!(lines("/sys/block/sda/queue/scheduler"), []);
        assert_eq!(lines("/sys/block/nvme0n1/queue/scheduler"), []);
        assert_eq!(lines("/sys/class/net/eth0/tx_queue_len"), [(4, false)]);
        assert_eq!(lines("/proc/sys/net/netfilter/nf_conntrack_max"), [(5, false)]);
    }

    #[test]
    fn jumps_are_followed_and_events_that_do_not_come_at_boot_are_told_from_others() {
        let rules = "SUBSYSTEM!=\"block\", GOTO=\"end\"\n\
             ENV{DM}==\"1\", GOTO=\"dm\"\n\
             KERNEL==\"sd*\", GOTO=\"end\"\n\
             ATTR{queue/scheduler}=\"kyber\"\n\
             LABEL=\"dm\"\n\
             ACTION==\"change\", ATTR{queue/scheduler}=\"bfq\"\n\
             ACTION==\"remove\", ATTR{queue/scheduler}=\"none\"\n\
             LABEL=\"end\"\n\
             ATTR{queue/scheduler}=\"mq-deadline\"\n";
        assert_eq!(
            about(rules, &[], "/sys/block/vda/queue/scheduler"),
            [(4, false), (6, false), (9, true)]
        );
        assert_eq!(
            about(rules, &[], "/sys/block/sda/queue/scheduler"),
            [(6, false), (9, true)]
        );
    }

    #[test]
    fn what_a_parent_must_be_is_not_known_where_parents_are_not() {
        let rules = "KERNEL==\"sd*\", ATTRS{queue/rotational}==\"0\", ATTR{queue/scheduler}=\"none\"\n\
             KERNEL==\"sd*\", SUBSYSTEMS==\"usb\", ATTR{queue/scheduler}=\"bfq\"\n\
             KERNEL==\"sd*\", SUBSYSTEMS==\"block\", ATTR{queue/scheduler}=\"kyber\"\n";
        let files = [("/sys/block/sda/queue/rotational", "0\n")];
        assert_eq!(
            about(rules, &files, "/sys/block/sda/queue/scheduler"),
            [(1, true), (2, false), (3, true)]
        );
    }

    #[test]
    fn a_command_of_a_rule_is_followed() {
        let rules = "SUBSYSTEM==\"block\", KERNEL==\"vd*\", RUN+=\"/bin/sh -c 'echo 64 > /sys/block/%k/queue/nr_requests'\"\n";
        assert_eq!(
            about(rules, &[], "/sys/block/vda/queue/nr_requests"),
            [(1, false)]
        );
        assert_eq!(about(rules, &[], "/sys/block/sda/queue/nr_requests"), []);
    }

    #[test]
    fn rubbish_sets_nothing() {
        for line in [
            "\"",
            "ATTR{x=\"1\"",
            "=\"\"",
            "ATTR{}=\"1\"",
            "SUBSYSTEM==\"block\"",
            "ATTR{a}=\"1",
        ] {
            let found = parts(line).map(|p| assignments(&p, "f", 1)).unwrap_or_default();
            assert_eq!(found, [], "{line}");
        }
    }
}
