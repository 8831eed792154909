//! udev rules that set attributes of devices: `SUBSYSTEM=="block", KERNEL=="sd*", ATTR{queue/scheduler}="bfq"`, and
//! `SYSCTL{…}="…"`. Conditions on attributes are looked at; conditions that cannot be checked from outside (environment,
//! drivers, programs) are taken to hold: a rule explains a value only when it says that value.

use super::{Condition, Way, Written, files_of, joined_lines, sysctl_path};
use crate::tree::Tree;

const DIRECTORIES: &[&str] = &[
    "/etc/udev/rules.d",
    "/run/udev/rules.d",
    "/usr/local/lib/udev/rules.d",
    "/usr/lib/udev/rules.d",
    "/lib/udev/rules.d",
];

pub(super) fn read(tree: &dyn Tree) -> Vec<Written> {
    let mut found = Vec::new();
    for (file, text) in files_of(tree, DIRECTORIES, ".rules") {
        for (number, line) in joined_lines(&text) {
            if !line.starts_with('#') {
                rule(&line, &file, number, &mut found);
            }
        }
    }
    found
}

/// `KEY{attribute}` operator `"value"`.
struct Part<'l> {
    key: &'l str,
    attribute: &'l str,
    operator: &'l str,
    value: &'l str,
}

fn parts(line: &str) -> Vec<Part<'_>> {
    let mut parts = Vec::new();
    let mut rest = line;
    while let Some((before, after)) = rest.split_once('"') {
        let Some((value, next)) = after.split_once('"') else {
            break;
        };
        rest = next;
        let before = before.trim_start_matches([',', ' ', '\t']).trim_end();
        let end = before.find(['=', '!', '+', '-', ':']).unwrap_or(before.len());
        let (name, operator) = before.split_at(end);
        let name = name.trim();
        let (key, attribute) = match name.split_once('{') {
            Some((key, attribute)) => (key, attribute.trim_end_matches('}')),
            None => (name, ""),
        };
        parts.push(Part {
            key,
            attribute,
            // i"…" compares without regard to case.
            operator: operator.trim().trim_end_matches(['i', 'e']),
            value,
        });
    }
    parts
}

fn rule(line: &str, file: &str, number: usize, found: &mut Vec<Written>) {
    let parts = parts(line);
    let matched = |key: &str| {
        parts
            .iter()
            .find(|p| p.key == key && p.operator == "==")
            .map(|p| p.value)
    };
    let subsystem = matched("SUBSYSTEM").unwrap_or_default();
    let kernel = matched("KERNEL").unwrap_or("*");
    let conditions: Vec<Condition> = parts
        .iter()
        .filter(|p| p.key == "ATTR" && matches!(p.operator, "==" | "!="))
        .map(|p| Condition {
            attribute: p.attribute.to_owned(),
            value: p.value.to_owned(),
            negated: p.operator == "!=",
        })
        .collect();
    for part in parts.iter().filter(|p| matches!(p.operator, "=" | ":=" | "+=")) {
        match part.key {
            "SYSCTL" => found.push(Written::new(
                Way::UdevRule,
                sysctl_path(part.attribute),
                part.value,
                file,
                number,
            )),
            "ATTR" if !part.attribute.is_empty() => {
                for base in bases(subsystem) {
                    for name in kernel.split('|') {
                        let path = format!("{base}/{name}/{}", part.attribute);
                        let mut written = Written::new(Way::UdevRule, path, part.value, file, number);
                        written.conditions = (part.attribute.to_owned(), conditions.clone());
                        found.push(written);
                    }
                }
            }
            _ => {}
        }
    }
}

/// Where the devices of a subsystem have their directories.
fn bases(subsystem: &str) -> &'static [&'static str] {
    match subsystem {
        "block" => &["/sys/block"],
        "net" => &["/sys/class/net"],
        "cpu" => &["/sys/devices/system/cpu"],
        "module" => &["/sys/module"],
        // A rule that names no subsystem: the devices that the catalogue knows.
        "" => &["/sys/block", "/sys/class/net"],
        _ => &[],
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::configured::Configured;
    use crate::testing::Files;

    #[test]
    fn a_rule_sets_the_attribute_of_the_devices_that_fit_its_conditions() {
        let tree = Files::new(&[
            (
                "/etc/udev/rules.d/60-disk.rules",
                "# x\nACTION==\"add|change\", SUBSYSTEM==\"block\", KERNEL==\"sd[a-z]|vd*\", \\\n  \
                 ATTR{queue/rotational}==\"0\", ATTR{queue/scheduler}=\"none\"\n\
                 SUBSYSTEM==\"net\", KERNEL==\"eth*\", ENV{X}!=\"y\", ATTR{tx_queue_len}=\"5000\"\n\
                 SUBSYSTEM==\"module\", KERNEL==\"nf_conntrack\", SYSCTL{net.netfilter.nf_conntrack_max}=\"1000\"\n",
            ),
            ("/sys/block/sda/queue/rotational", "1\n"),
            ("/sys/block/vda/queue/rotational", "0\n"),
        ]);
        let configured = Configured::read(&tree);
        let place = |path: &str| configured.about(path, &tree).first().map(|w| w.place());
        let rules = "/etc/udev/rules.d/60-disk.rules";
        assert_eq!(
            place("/sys/block/vda/queue/scheduler"),
            Some(format!("{rules}:2"))
        );
        assert_eq!(place("/sys/block/sda/queue/scheduler"), None);
        assert_eq!(place("/sys/block/nvme0n1/queue/scheduler"), None);
        assert_eq!(
            place("/sys/class/net/eth0/tx_queue_len"),
            Some(format!("{rules}:4"))
        );
        assert_eq!(
            place("/proc/sys/net/netfilter/nf_conntrack_max"),
            Some(format!("{rules}:5"))
        );
    }

    #[test]
    fn rubbish_sets_nothing() {
        for line in [
            "\"",
            "ATTR{x=\"1\"",
            "=\"\"",
            "ATTR{}=\"1\"",
            "SUBSYSTEM==\"block\"",
        ] {
            let mut found = Vec::new();
            rule(line, "f", 1, &mut found);
            assert!(found.len() <= 2, "{line}: {found:?}");
        }
    }
}
