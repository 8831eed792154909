//! `/etc/sysfs.conf` and `/etc/sysfs.d` of sysfsutils: `kernel/mm/ksm/run = 1`. Its script reads the files one after another,
//! cuts comments off, and takes one word for the value; names are patterns of the shell.

use super::{Way, Written, files_of};
use crate::tree::Tree;

pub(super) fn read(tree: &dyn Tree) -> Vec<Written> {
    let mut files: Vec<(String, String)> = tree
        .text("/etc/sysfs.conf")
        .map(|text| ("/etc/sysfs.conf".to_owned(), text))
        .into_iter()
        .collect();
    files.extend(files_of(tree, &["/etc/sysfs.d"], ".conf"));
    let mut found = Vec::new();
    for (file, text) in files {
        for (index, line) in text.lines().enumerate() {
            let line = line.split('#').next().unwrap_or_default();
            let Some((name, value)) = line.split_once('=') else {
                continue;
            };
            let name = name.trim();
            // `mode a = 0644` and `owner a = x` are about permissions; several words are an error of syntax.
            let mut words = value.split_whitespace();
            let (Some(value), None) = (words.next(), words.next()) else {
                continue;
            };
            if name.contains(char::is_whitespace) || name.is_empty() {
                continue;
            }
            let name = name.strip_prefix("/sys/").unwrap_or(name);
            found.push(Written::new(
                Way::SysfsFile,
                format!("/sys/{name}"),
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
    fn lines_of_sysfsutils_are_understood() {
        let tree = Files::new(&[
            (
                "/etc/sysfs.conf",
                "mode kernel/mm/ksm/run = 0644\nkernel/mm/ksm/run = 1 # merge\n",
            ),
            (
                "/etc/sysfs.d/b.conf",
                "#x = 1\n/sys/kernel/mm/ksm/sleep_millisecs=5\nx = two words\n",
            ),
        ]);
        let found = read(&tree);
        assert_eq!(found.len(), 2);
        assert_eq!(found[0].path, "/sys/kernel/mm/ksm/run");
        assert_eq!(
            (found[0].place().as_str(), found[0].value.as_str()),
            ("/etc/sysfs.conf:2", "1")
        );
        assert_eq!(found[1].value, "5");
    }
}
