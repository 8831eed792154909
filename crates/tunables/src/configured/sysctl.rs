//! sysctl.d(5), and `/etc/sysctl.conf`, which `sysctl --system` reads last.
//!
//! All files are sorted by name, whatever their directory; one in a directory further up replaces those of the same name
//! below; the last line about a file wins, and one that names the file wins over patterns. `-NAME` alone keeps patterns
//! away from it.

use super::{Way, Written, files_of, pattern, sysctl_path};
use crate::tree::Tree;

const DIRECTORIES: &[&str] = &[
    "/etc/sysctl.d",
    "/run/sysctl.d",
    "/usr/local/lib/sysctl.d",
    "/usr/lib/sysctl.d",
    "/lib/sysctl.d",
];
const OLD: &str = "/etc/sysctl.conf";

/// The lines, and the files that patterns are kept away from.
pub(super) fn read(tree: &dyn Tree) -> (Vec<Written>, Vec<String>) {
    let mut files = files_of(tree, DIRECTORIES, ".conf");
    if let Some(text) = tree.text(OLD) {
        // Debian links it into sysctl.d; then it is one file, shown by the name that people know.
        files.retain(|(path, other)| !(path.ends_with("/99-sysctl.conf") && *other == text));
        files.push((OLD.to_owned(), text));
    }
    let mut found = Vec::new();
    let mut excluded = Vec::new();
    for (file, text) in files {
        for (index, line) in text.lines().enumerate() {
            let line = line.trim();
            if line.is_empty() || line.starts_with(['#', ';']) {
                continue;
            }
            let Some((name, value)) = line.split_once('=') else {
                if let Some(name) = line.strip_prefix('-') {
                    excluded.push(sysctl_path(name.trim()));
                }
                continue;
            };
            let name = name.trim();
            let name = name.strip_prefix('-').unwrap_or(name).trim();
            if !name.is_empty() {
                let path = sysctl_path(name);
                found.push(Written::new(
                    Way::SysctlFile,
                    path,
                    value.trim(),
                    &file,
                    index + 1,
                ));
            }
        }
    }
    // A pattern further down in the order must not hide a line that names the file.
    found.sort_by_key(|w| !pattern::is_pattern(&w.path));
    (found, excluded)
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
            .first()
            .map(|w| (w.place(), w.value.clone()))
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
