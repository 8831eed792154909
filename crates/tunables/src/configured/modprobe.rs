//! `options MODULE PARAMETER=VALUE …` of modprobe.d(5). They count when a module is loaded, from the copy in the initial file
//! system if it is loaded there, and never for what is built into the kernel.

use super::{Applies, Way, Written, files_of, joined_lines};
use crate::tree::Tree;
use std::collections::BTreeSet;

const DIRECTORIES: &[&str] = &[
    "/etc/modprobe.d",
    "/run/modprobe.d",
    "/usr/local/lib/modprobe.d",
    "/usr/lib/modprobe.d",
    "/lib/modprobe.d",
];

pub(super) fn read(tree: &dyn Tree) -> Vec<Written> {
    let mut found = Vec::new();
    let built_in = built_in(tree);
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
                let mut written =
                    Written::new(Way::ModuleOptions, path, value.trim_matches('"'), &file, number);
                written.applies = if built_in.contains(&module) {
                    Applies::No(format!("{module} is built into this kernel"))
                } else {
                    Applies::Unknown("it counts when the module is loaded".to_owned())
                };
                found.push(written);
            }
        }
    }
    found
}

/// Modules that are part of the kernel.
fn built_in(tree: &dyn Tree) -> BTreeSet<String> {
    let release = tree.text("/proc/sys/kernel/osrelease").unwrap_or_default();
    let text = ["/usr/lib/modules", "/lib/modules"]
        .iter()
        .find_map(|d| tree.text(&format!("{d}/{}/modules.builtin", release.trim())))
        .unwrap_or_default();
    text.lines()
        .filter_map(|l| l.rsplit('/').next()?.strip_suffix(".ko"))
        .map(|name| name.replace('-', "_"))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Files;

    #[test]
    fn options_of_modules_become_lines() {
        let tree = Files::new(&[
            (
                "/etc/modprobe.d/kvm.conf",
                "# options kvm x=1\noptions kvm halt_poll_ns=0 \\\n  nx_huge_pages=off\nblacklist floppy\noptions zswap enabled=1\n",
            ),
            ("/proc/sys/kernel/osrelease", "6.12.0\n"),
            ("/lib/modules/6.12.0/modules.builtin", "kernel/mm/zswap.ko\n"),
        ]);
        let found = read(&tree);
        assert_eq!(found.len(), 3);
        assert_eq!(found[0].path, "/sys/module/kvm/parameters/halt_poll_ns");
        assert_eq!(found[0].place(), "/etc/modprobe.d/kvm.conf:2");
        assert_eq!(found[1].value, "off");
        assert!(matches!(found[0].applies, Applies::Unknown(_)));
        assert!(matches!(found[2].applies, Applies::No(_)));
    }
}
