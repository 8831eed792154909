//! The kernel's command line: `sysctl.NAME=VALUE` (from 5.8), parameters of modules as `MODULE.PARAMETER=VALUE`, and
//! the parameters that the kernel has names of their own for. The last one of a name wins.

use super::{Way, Written, sysctl_path};
use crate::tree::Tree;

/// Where the parameters with names of their own are found: path of such a line.
pub(crate) fn own(parameter: &str) -> String {
    format!("cmdline:{parameter}")
}

pub(super) fn read(tree: &dyn Tree) -> Vec<Written> {
    let text = tree.text("/proc/cmdline").unwrap_or_default();
    let mut found = Vec::new();
    for word in words(&text) {
        // What follows is for init.
        if word == "--" {
            break;
        }
        let (name, value) = word.split_once('=').unwrap_or((word.as_str(), ""));
        let mut add = |path: String| {
            let mut written = Written::new(Way::KernelCommandLine, path, value, "/proc/cmdline", 0);
            written.what.clone_from(&word);
            found.push(written);
        };
        add(own(name));
        if let Some(sysctl) = name
            .strip_prefix("sysctl.")
            .or_else(|| name.strip_prefix("sysctl/"))
        {
            add(sysctl_path(sysctl));
        } else if let Some((module, parameter)) = name.split_once('.') {
            // The kernel takes - and _ for the same in both.
            let one = |t: &str| t.replace('-', "_");
            add(format!(
                "/sys/module/{}/parameters/{}",
                one(module),
                one(parameter)
            ));
        }
    }
    found
}

/// Words, where quotation marks keep blanks together.
fn words(text: &str) -> Vec<String> {
    let mut words = vec![String::new()];
    let mut quoted = false;
    for c in text.chars() {
        match c {
            '"' => quoted = !quoted,
            c if c.is_whitespace() && !quoted => words.push(String::new()),
            c => {
                if let Some(word) = words.last_mut() {
                    word.push(c);
                }
            }
        }
    }
    words.retain(|w| !w.is_empty());
    words
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Files;

    #[test]
    fn parameters_become_lines() {
        let tree = Files::new(&[(
            "/proc/cmdline",
            "ro a=\"x y\" sysctl.vm.swappiness=1 zswap.enabled=1 intel-idle.max_cstate=1 -- foo=1\n",
        )]);
        let found = read(&tree);
        let has = |path: &str, value: &str| found.iter().any(|w| w.path == path && w.value == value);
        assert!(has("cmdline:ro", ""));
        assert!(has("cmdline:a", "x y"));
        assert!(has("/proc/sys/vm/swappiness", "1"));
        assert!(has("/sys/module/zswap/parameters/enabled", "1"));
        assert!(has("/sys/module/intel_idle/parameters/max_cstate", "1"));
        assert!(!found.iter().any(|w| w.path == "cmdline:foo"));
        assert_eq!(found[1].place(), "kernel command line a=x y");
    }
}
