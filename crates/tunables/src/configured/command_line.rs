//! The kernel's command line: `sysctl.NAME=VALUE` (from 5.8), parameters of modules as `MODULE.PARAMETER=VALUE`, and
//! the parameters that the kernel has names of their own for. The last one of a name wins. `hugepages=` is about the pool
//! that the `hugepagesz=` before it names, else about the default one.

use super::{Way, Written, sysctl_path};
use crate::tree::Tree;
use std::collections::BTreeMap;

/// Where the parameters with names of their own are found: path of such a line.
pub(crate) fn own(parameter: &str) -> String {
    format!("cmdline:{parameter}")
}

pub(super) fn read(tree: &dyn Tree) -> Vec<Written> {
    let text = tree.text("/proc/cmdline").unwrap_or_default();
    let mut found = Vec::new();
    let mut pools: BTreeMap<Option<u64>, (String, String)> = BTreeMap::new();
    let (mut pool, mut default) = (None, None);
    let line = |path: String, value: &str, word: &str| {
        let mut written = Written::new(Way::KernelCommandLine, path, value, "/proc/cmdline", 0);
        word.clone_into(&mut written.what);
        written
    };
    for word in words(&text) {
        // What follows is for init.
        if word == "--" {
            break;
        }
        let (name, value) = word.split_once('=').unwrap_or((word.as_str(), ""));
        match name {
            "hugepagesz" => pool = size(value),
            "default_hugepagesz" => default = size(value),
            "hugepages" => {
                pools.insert(pool, (sum_of_nodes(value), word.clone()));
                continue;
            }
            _ => {}
        }
        found.push(line(own(name), value, &word));
        if let Some(sysctl) = name
            .strip_prefix("sysctl.")
            .or_else(|| name.strip_prefix("sysctl/"))
        {
            found.push(line(sysctl_path(sysctl), value, &word));
        } else if let Some((module, parameter)) = name.split_once('.') {
            // The kernel takes - and _ for the same in both.
            let one = |t: &str| t.replace('-', "_");
            let path = format!("/sys/module/{}/parameters/{}", one(module), one(parameter));
            found.push(line(path, value, &word));
        }
    }
    let default = default.or_else(|| default_size(tree));
    for (pool, (count, word)) in pools {
        let size = pool.or(default);
        if let Some(bytes) = size {
            let path = format!(
                "/sys/kernel/mm/hugepages/hugepages-{}kB/nr_hugepages",
                bytes / 1024
            );
            found.push(line(path, &count, &word));
        }
        if pool.is_none() || size == default {
            found.push(line(own("hugepages"), &count, &word));
        }
    }
    found
}

/// Size of the default pool, by what the kernel says of it.
fn default_size(tree: &dyn Tree) -> Option<u64> {
    let text = tree.text("/proc/meminfo")?;
    let line = text.lines().find_map(|l| l.strip_prefix("Hugepagesize:"))?;
    let kib: u64 = line.split_whitespace().next()?.parse().ok()?;
    kib.checked_mul(1024)
}

/// A size with a unit, as `memparse()` takes it.
fn size(text: &str) -> Option<u64> {
    let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (digits, unit) = text.split_at_checked(end)?;
    let shift = match unit.chars().next().map(|c| c.to_ascii_lowercase()) {
        None => 0,
        Some('k') => 10,
        Some('m') => 20,
        Some('g') => 30,
        Some('t') => 40,
        Some(_) => return None,
    };
    digits.parse::<u64>().ok()?.checked_mul(1 << shift)
}

/// `0:2,1:4` is six pages on two nodes.
fn sum_of_nodes(text: &str) -> String {
    if !text.contains(':') {
        return text.to_owned();
    }
    let counts = text
        .split(',')
        .map(|part| part.split_once(':').and_then(|(_, n)| n.parse::<u64>().ok()));
    match counts.sum::<Option<u64>>() {
        Some(sum) => sum.to_string(),
        None => text.to_owned(),
    }
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

    fn has(text: &str, path: &str) -> Option<String> {
        let tree = Files::new(&[
            ("/proc/cmdline", text),
            ("/proc/meminfo", "Hugepagesize:       2048 kB\n"),
        ]);
        read(&tree).into_iter().rfind(|w| w.path == path).map(|w| w.value)
    }

    #[test]
    fn parameters_become_lines() {
        let text = "ro a=\"x y\" sysctl.vm.swappiness=1 zswap.enabled=1 intel-idle.max_cstate=1 -- foo=1\n";
        let is = |value: &str| Some(value.to_owned());
        assert_eq!(has(text, "cmdline:ro"), is(""));
        assert_eq!(has(text, "cmdline:a"), is("x y"));
        assert_eq!(has(text, "/proc/sys/vm/swappiness"), is("1"));
        assert_eq!(has(text, "/sys/module/zswap/parameters/enabled"), is("1"));
        assert_eq!(has(text, "/sys/module/intel_idle/parameters/max_cstate"), is("1"));
        assert_eq!(has(text, "cmdline:foo"), None);
        let tree = Files::new(&[("/proc/cmdline", text)]);
        assert_eq!(read(&tree)[1].place(), "kernel command line a=x y");
    }

    #[test]
    fn a_count_of_large_pages_belongs_to_the_pool_that_is_named_before_it() {
        let default = |text: &str| has(text, "cmdline:hugepages");
        let gib = |text: &str| has(text, "/sys/kernel/mm/hugepages/hugepages-1048576kB/nr_hugepages");
        let is = |value: &str| Some(value.to_owned());
        let two = "default_hugepagesz=2M hugepagesz=2M hugepages=512 hugepagesz=1G hugepages=4";
        assert_eq!((default(two), gib(two)), (is("512"), is("4")));
        let turned = "hugepagesz=1G hugepages=4 hugepagesz=2M hugepages=512";
        assert_eq!((default(turned), gib(turned)), (is("512"), is("4")));
        let only_large = "hugepagesz=1G hugepages=4";
        assert_eq!((default(only_large), gib(only_large)), (None, is("4")));
        let large_is_default = "default_hugepagesz=1G hugepagesz=1G hugepages=0:2,1:4";
        assert_eq!(
            (default(large_is_default), gib(large_is_default)),
            (is("6"), is("6"))
        );
        assert_eq!(default("hugepages=7"), is("7"));
    }
}
