//! Lines of tmpfiles.d(5) that write into files: `w /sys/kernel/mm/ksm/run - - - - 1`.

use super::{Way, Written, files_of};
use crate::tree::Tree;

const DIRECTORIES: &[&str] = &[
    "/etc/tmpfiles.d",
    "/run/tmpfiles.d",
    "/usr/local/lib/tmpfiles.d",
    "/usr/lib/tmpfiles.d",
];

pub(super) fn read(tree: &dyn Tree) -> Vec<Written> {
    let mut found = Vec::new();
    for (file, text) in files_of(tree, DIRECTORIES, ".conf") {
        for (index, line) in text.lines().enumerate() {
            let mut fields = line.split_whitespace();
            // w, w+, and either with the marks !, -, = and so on.
            let kind = fields.next().unwrap_or_default();
            if !kind.starts_with('w') {
                continue;
            }
            let Some(path) = fields.next() else { continue };
            if !(path.starts_with("/sys/") || path.starts_with("/proc/sys/")) {
                continue;
            }
            // After mode, user, group and age all the rest is the value.
            let value: Vec<&str> = fields.skip(4).collect();
            let value = value.join(" ");
            let value = value.strip_suffix("\\n").unwrap_or(&value);
            found.push(Written::new(
                Way::Tmpfiles,
                path.to_owned(),
                value,
                &file,
                index + 1,
            ));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Files;

    #[test]
    fn only_lines_that_write_settings_count() {
        let tree = Files::new(&[
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
        let found = read(&tree);
        assert_eq!(found.len(), 2);
        assert_eq!(
            (found[0].place().as_str(), found[0].value.as_str()),
            ("/etc/tmpfiles.d/a.conf:3", "1")
        );
        assert_eq!(found[1].value, "4096 87380 1000");
    }
}
