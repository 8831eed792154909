//! The active profile of tuned: sections `[sysctl]`, `[sysfs]`, `[vm]`, `[cpu]` and `[disk]`, following `include=`.
//!
//! What a profile sets wins over what it includes. Values with variables of tuned (`${…}`) are not known here and explain
//! nothing; `>N` means at least N and is known only when it says the value itself.

use super::{Way, Written, sysctl_path};
use crate::tree::Tree;

/// Most profiles, and deepest chain of `include=`, that are followed.
const PROFILES_MAX: usize = 8;
const DEPTH_MAX: u32 = 8;
const PLACES: &[&str] = &[
    "/etc/tuned",
    "/etc/tuned/profiles",
    "/usr/lib/tuned",
    "/usr/lib/tuned/profiles",
];

pub(super) fn read(tree: &dyn Tree) -> Vec<Written> {
    let active = tree.text("/etc/tuned/active_profile").unwrap_or_default();
    let mut found = Vec::new();
    for profile in active.split_whitespace().take(PROFILES_MAX) {
        follow(tree, profile, profile, 0, &mut found);
    }
    found
}

/// What a profile includes comes first, so that its own lines win.
fn follow(tree: &dyn Tree, active: &str, name: &str, depth: u32, found: &mut Vec<Written>) {
    if depth >= DEPTH_MAX || name.is_empty() || name.contains("..") || name.contains('/') {
        return;
    }
    let Some((file, text)) = PLACES.iter().find_map(|place| {
        let path = format!("{place}/{name}/tuned.conf");
        tree.text(&path).map(|text| (path, text))
    }) else {
        return;
    };
    let mut section = String::new();
    let mut own = Vec::new();
    for (index, line) in text.lines().enumerate() {
        let line = line.trim();
        if let Some(name) = line.strip_prefix('[').and_then(|l| l.strip_suffix(']')) {
            name.clone_into(&mut section);
            continue;
        }
        let Some((key, value)) = line.split_once('=') else {
            continue;
        };
        let (key, value) = (key.trim(), value.split('#').next().unwrap_or_default().trim());
        if key.starts_with(['#', ';']) {
            continue;
        }
        if key == "include" && matches!(section.as_str(), "main" | "") {
            for included in value
                .split([',', ' '])
                .filter(|i| !i.is_empty())
                .take(PROFILES_MAX)
            {
                // A leading minus: no error when it is missing.
                follow(tree, active, included.trim_start_matches('-'), depth + 1, found);
            }
            continue;
        }
        for path in paths(&section, key) {
            let way = if path.starts_with("/proc/sys/") {
                Way::TunedSysctl
            } else {
                Way::TunedProfile
            };
            let value = value.trim_start_matches('>').trim_matches('"');
            let mut written = Written::new(way, path, value, &file, index + 1);
            active.clone_into(&mut written.what);
            own.push(written);
        }
    }
    found.extend(own);
}

/// The files that a key of a section is about.
fn paths(section: &str, key: &str) -> Vec<String> {
    let one = |path: &str| vec![path.to_owned()];
    match (section, key) {
        ("sysctl", name) => vec![sysctl_path(name)],
        ("sysfs", path) if path.starts_with("/sys/") => one(path),
        (_, "transparent_hugepages" | "transparent_hugepage") => {
            one("/sys/kernel/mm/transparent_hugepage/enabled")
        }
        ("vm", "transparent_hugepage.defrag") => one("/sys/kernel/mm/transparent_hugepage/defrag"),
        ("vm", "dirty_ratio" | "dirty_background_ratio" | "dirty_bytes" | "dirty_background_bytes") => {
            vec![format!("/proc/sys/vm/{key}")]
        }
        ("cpu", "governor") => one("/sys/devices/system/cpu/cpufreq/*/scaling_governor"),
        ("cpu", "energy_performance_preference") => {
            one("/sys/devices/system/cpu/cpufreq/*/energy_performance_preference")
        }
        ("cpu", "min_perf_pct" | "max_perf_pct" | "no_turbo") => {
            vec![format!("/sys/devices/system/cpu/intel_pstate/{key}")]
        }
        ("disk", "elevator") => one("/sys/block/*/queue/scheduler"),
        ("disk", "readahead") => one("/sys/block/*/queue/read_ahead_kb"),
        _ => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Files;

    #[test]
    fn a_profile_wins_over_what_it_includes_and_circles_end() {
        let tree = Files::new(&[
            ("/etc/tuned/active_profile", "mine\n"),
            (
                "/etc/tuned/mine/tuned.conf",
                "[main]\ninclude=base\n[sysctl]\nvm.swappiness=5\n[cpu]\ngovernor=performance\n",
            ),
            (
                "/usr/lib/tuned/base/tuned.conf",
                "[main]\ninclude=mine\n[sysctl]\nvm.swappiness=10 # x\nnet.core.rmem_max=>16777216\n[vm]\ntransparent_hugepages=always\n",
            ),
        ]);
        let found = read(&tree);
        let last = |path: &str| found.iter().rfind(|w| w.path == path).unwrap();
        assert_eq!(last("/proc/sys/vm/swappiness").value, "5");
        assert_eq!(last("/proc/sys/net/core/rmem_max").value, "16777216");
        assert_eq!(
            last("/sys/kernel/mm/transparent_hugepage/enabled").place(),
            "tuned profile mine (/usr/lib/tuned/base/tuned.conf:7)"
        );
        assert!(
            found
                .iter()
                .any(|w| w.path.ends_with("cpufreq/*/scaling_governor"))
        );
    }

    #[test]
    fn names_that_leave_the_directory_are_not_followed() {
        let tree = Files::new(&[
            ("/etc/tuned/active_profile", "../x a/b\n"),
            ("/etc/tuned/../x/tuned.conf", "[sysctl]\nvm.swappiness=5\n"),
        ]);
        assert_eq!(read(&tree), []);
    }
}
