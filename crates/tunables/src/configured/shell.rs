//! Commands that write settings: `ExecStart=` and its like in systemd units, and rc.local. Understood are
//! `sysctl -w NAME=VALUE`, `echo VALUE > FILE` and `echo VALUE | tee FILE`, also inside `sh -c '…'`. Whether a unit was
//! started is not looked at: a line explains a value only when it says that value.

use super::{Way, Written, files_of, joined_lines, sysctl_path};
use crate::tree::Tree;

const UNITS: &[&str] = &[
    "/etc/systemd/system",
    "/run/systemd/system",
    "/usr/local/lib/systemd/system",
    "/usr/lib/systemd/system",
    "/lib/systemd/system",
];
const SCRIPTS: &[&str] = &["/etc/rc.local", "/etc/rc.d/rc.local"];

pub(super) fn read(tree: &dyn Tree) -> Vec<Written> {
    let mut found = Vec::new();
    let mut add = |way: Way, file: &str, number: usize, command: &str, what: &str| {
        for (path, value) in writes(command) {
            let mut written = Written::new(way, path, &value, file, number);
            what.clone_into(&mut written.what);
            found.push(written);
        }
    };
    let mut units = files_of(tree, UNITS, ".service");
    for directory in UNITS {
        for name in tree
            .names(directory)
            .into_iter()
            .filter(|n| n.ends_with(".service.d"))
        {
            units.extend(files_of(tree, &[&format!("{directory}/{name}")], ".conf"));
        }
    }
    for (file, text) in units {
        let unit = file.rsplit('/').next().unwrap_or_default().to_owned();
        for (number, line) in joined_lines(&text) {
            let Some((key, command)) = line.split_once('=') else {
                continue;
            };
            if matches!(key.trim(), "ExecStart" | "ExecStartPre" | "ExecStartPost") {
                add(Way::SystemdUnit, &file, number, command, &unit);
            }
        }
    }
    for file in SCRIPTS {
        for (number, line) in joined_lines(&tree.text(file).unwrap_or_default()) {
            if !line.starts_with('#') {
                add(Way::BootScript, file, number, &line, "rc.local");
            }
        }
    }
    found
}

/// What a line of shell writes, as far as it is understood.
fn writes(command: &str) -> Vec<(String, String)> {
    let spaced = command
        .replace(">>", " > ")
        .replace('>', " > ")
        .replace('|', " | ");
    let spaced = spaced.replace(';', " ; ").replace("&&", " ; ");
    let words: Vec<&str> = spaced
        .split_whitespace()
        .map(|w| w.trim_matches(['"', '\'', '`', '(', ')', '{', '}']))
        .collect();
    let mut found = Vec::new();
    for part in words.split(|w| *w == ";") {
        if let Some(at) = part.iter().position(|w| *w == "sysctl" || w.ends_with("/sysctl")) {
            for word in part.iter().skip(at + 1).filter(|w| !w.starts_with('-')) {
                if let Some((name, value)) = word.split_once('=') {
                    found.push((sysctl_path(name), value.to_owned()));
                }
            }
        }
        let Some(at) = part
            .iter()
            .position(|w| matches!(*w, "echo" | "printf") || w.ends_with("/echo"))
        else {
            continue;
        };
        let rest = part.get(at + 1..).unwrap_or_default();
        let Some(end) = rest.iter().position(|w| matches!(*w, ">" | "|")) else {
            continue;
        };
        let value: Vec<&str> = rest
            .iter()
            .take(end)
            .copied()
            .filter(|w| !matches!(*w, "-n" | "-e"))
            .collect();
        let file = rest
            .iter()
            .skip(end + 1)
            .find(|w| w.starts_with("/sys/") || w.starts_with("/proc/sys/"));
        if let Some(file) = file {
            found.push(((*file).to_owned(), value.join(" ")));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Files;

    #[test]
    fn commands_that_write_are_understood() {
        for (command, path, value) in [
            (
                "/sbin/sysctl -q -w vm.swappiness=1",
                "/proc/sys/vm/swappiness",
                "1",
            ),
            (
                "/bin/sh -c 'echo never > /sys/kernel/mm/transparent_hugepage/enabled'",
                "/sys/kernel/mm/transparent_hugepage/enabled",
                "never",
            ),
            (
                "sh -c \"echo 1 | tee -a /sys/kernel/mm/ksm/run\"",
                "/sys/kernel/mm/ksm/run",
                "1",
            ),
            (
                "echo -n 5 >/proc/sys/vm/page-cluster",
                "/proc/sys/vm/page-cluster",
                "5",
            ),
        ] {
            assert_eq!(
                writes(command),
                [(path.to_owned(), value.to_owned())],
                "{command}"
            );
        }
        for nothing in [
            "",
            "echo hello",
            "echo > ",
            "sysctl vm.swappiness",
            "cat /proc/sys/vm/swappiness",
        ] {
            assert_eq!(writes(nothing), [], "{nothing}");
        }
        assert_eq!(
            writes("echo 1 > /sys/a; echo 2 > /sys/b && sysctl a.b=3").len(),
            3
        );
    }

    #[test]
    fn units_their_drop_ins_and_rc_local_are_read() {
        let tree = Files::new(&[
            (
                "/etc/systemd/system/thp.service",
                "[Service]\nType=oneshot\nExecStart=/bin/sh -c 'echo never > /sys/kernel/mm/transparent_hugepage/defrag'\n",
            ),
            (
                "/etc/systemd/system/x.service.d/more.conf",
                "[Service]\nExecStartPre=-/usr/sbin/sysctl -w net.core.somaxconn=1024\n",
            ),
            (
                "/etc/rc.local",
                "#!/bin/sh\n# echo 1 > /sys/a\necho 1 > /sys/kernel/mm/ksm/run\n",
            ),
        ]);
        let found = read(&tree);
        let places: Vec<String> = found.iter().map(Written::place).collect();
        assert_eq!(
            places,
            [
                "/etc/systemd/system/thp.service:3",
                "/etc/systemd/system/x.service.d/more.conf:2",
                "/etc/rc.local:3"
            ]
        );
    }
}
