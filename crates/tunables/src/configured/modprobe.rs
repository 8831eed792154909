//! `options MODULE PARAMETER=VALUE …` of modprobe.d(5).

use super::{Way, Written, files_of, joined_lines};
use crate::tree::Tree;

const DIRECTORIES: &[&str] = &[
    "/etc/modprobe.d",
    "/run/modprobe.d",
    "/usr/local/lib/modprobe.d",
    "/usr/lib/modprobe.d",
    "/lib/modprobe.d",
];

pub(super) fn read(tree: &dyn Tree) -> Vec<Written> {
    let mut found = Vec::new();
    for (file, text) in files_of(tree, DIRECTORIES, ".conf") {
        for (number, line) in joined_lines(&text) {
            let mut words = line.split_whitespace();
            if words.next() != Some("options") {
                continue;
            }
            let Some(module) = words.next() else { continue };
            let module = module.replace('-', "_");
            for word in words {
                let (parameter, value) = word.split_once('=').unwrap_or((word, "1"));
                let path = format!("/sys/module/{module}/parameters/{}", parameter.replace('-', "_"));
                found.push(Written::new(
                    Way::ModuleOptions,
                    path,
                    value.trim_matches('"'),
                    &file,
                    number,
                ));
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Files;

    #[test]
    fn options_of_modules_become_lines() {
        let tree = Files::new(&[(
            "/etc/modprobe.d/kvm.conf",
            "# options kvm x=1\noptions kvm halt_poll_ns=0 \\\n  nx_huge_pages=off\nblacklist floppy\n",
        )]);
        let found = read(&tree);
        assert_eq!(found.len(), 2);
        assert_eq!(found[0].path, "/sys/module/kvm/parameters/halt_poll_ns");
        assert_eq!(found[0].place(), "/etc/modprobe.d/kvm.conf:2");
        assert_eq!(found[1].value, "off");
    }
}
