//! Transparent-huge-page settings of the host and who made them.
//!
//! Provenance (design.md, *ownership*): a value that differs from what the kernel was built with was chosen by
//! somebody. The places where a choice is written down are looked through in the order in which they win: tuned
//! (running, last to write), tmpfiles.d and sysfs.d (boot), kernel command line. A value that none explains was
//! written `at run time`.

use super::bytes::{chosen, lines, number, words};
use super::files;
use crate::Root;
use homeostat_model::{HugePageSettings, PageSizeSetting};

const BASE: &str = "/sys/kernel/mm/transparent_hugepage";
/// Most configuration files of one directory that are searched.
const CONFIGURATION_FILES_MAX: usize = 500;

/// The settings, with the search for their origin done again only when the value changes.
#[derive(Debug)]
pub struct HugePages {
    root: Root,
    origin: Option<(String, Option<String>)>,
}

impl HugePages {
    /// A reader that has not seen anything yet.
    pub fn new(root: Root) -> Self {
        Self { root, origin: None }
    }

    /// The settings now; empty on a kernel without transparent huge pages.
    pub fn read(&mut self) -> HugePageSettings {
        let enabled = self.choice("enabled");
        let found = match &self.origin {
            Some((value, origin)) if *value == enabled => origin.clone(),
            _ => {
                let origin = if enabled.is_empty() {
                    None
                } else {
                    origin(&self.root, &enabled)
                };
                self.origin = Some((enabled.clone(), origin.clone()));
                origin
            }
        };
        HugePageSettings {
            enabled: PageSizeSetting(enabled),
            shmem_enabled: PageSizeSetting(self.choice("shmem_enabled")),
            defrag: PageSizeSetting(self.choice("defrag")),
            enabled_set_by: found,
            khugepaged_pages_collapsed: files::text(
                &self.root,
                &format!("{BASE}/khugepaged/pages_collapsed"),
            )
            .and_then(|t| number(t.as_bytes()))
            .unwrap_or(0),
        }
    }

    fn choice(&self, leaf: &str) -> String {
        files::bytes(&self.root, &format!("{BASE}/{leaf}"), files::SMALL_FILE_MAX)
            .and_then(|b| chosen(&b).map(str::to_owned))
            .unwrap_or_default()
    }
}

/// Who set `enabled` to `value`; `None` when that is what the kernel does by itself, or when the kernel's own
/// default is not known and nothing else explains the value.
fn origin(root: &Root, value: &str) -> Option<String> {
    let written = from_tuned(root, value)
        .or_else(|| from_tmpfiles(root, value))
        .or_else(|| from_sysfs_conf(root, value))
        .or_else(|| from_command_line(root, value));
    match (written, built_in(root)) {
        (Some(place), _) => Some(place),
        (None, Some(default)) if default != value => Some("at run time".to_owned()),
        (None, _) => None,
    }
}

/// `transparent_hugepage=` of the kernel command line; the last one wins.
fn from_command_line(root: &Root, value: &str) -> Option<String> {
    let line = files::bytes(root, "/proc/cmdline", files::SMALL_FILE_MAX)?;
    let last = words(&line)
        .filter_map(|w| w.strip_prefix(b"transparent_hugepage="))
        .last()?;
    (last == value.as_bytes()).then(|| format!("kernel command line transparent_hugepage={value}"))
}

/// A line of a tmpfiles.d file: `w /sys/kernel/mm/transparent_hugepage/enabled - - - - never`. Files in `/etc`
/// replace those of the same name in `/run` and `/usr/lib`; of all files the last in order of name wins.
fn from_tmpfiles(root: &Root, value: &str) -> Option<String> {
    let mut winning: Option<String> = None;
    for (path, text) in configuration(
        root,
        &["/etc/tmpfiles.d", "/run/tmpfiles.d", "/usr/lib/tmpfiles.d"],
    ) {
        for (number, line) in text.split(|&b| b == b'\n').enumerate() {
            let mut parts = words(line);
            let kind = parts.next().unwrap_or_default();
            if !matches!(kind.first(), Some(b'w')) {
                continue;
            }
            if parts.next() != Some(b"/sys/kernel/mm/transparent_hugepage/enabled") {
                continue;
            }
            let written = parts.last().unwrap_or_default();
            winning = (written == value.as_bytes()).then(|| format!("{path}:{}", number + 1));
        }
    }
    winning
}

/// A line of sysfsutils: `kernel/mm/transparent_hugepage/enabled = never` in `/etc/sysfs.conf` or `/etc/sysfs.d`.
fn from_sysfs_conf(root: &Root, value: &str) -> Option<String> {
    let mut places = configuration(root, &["/etc/sysfs.d"]);
    if let Some(text) = files::bytes(root, "/etc/sysfs.conf", files::SMALL_FILE_MAX) {
        places.insert(0, ("/etc/sysfs.conf".to_owned(), text));
    }
    let mut winning = None;
    for (path, text) in places {
        for (number, line) in text.split(|&b| b == b'\n').enumerate() {
            let Some(at) = line.iter().position(|&b| b == b'=') else {
                continue;
            };
            let (name, set) = line.split_at(at);
            let name = name.trim_ascii();
            let name = name.strip_prefix(b"/sys/").unwrap_or(name);
            if name == b"kernel/mm/transparent_hugepage/enabled" {
                let set = set.get(1..).unwrap_or_default().trim_ascii();
                winning = (set == value.as_bytes()).then(|| format!("{path}:{}", number + 1));
            }
        }
    }
    winning
}

/// `transparent_hugepages=` in the `[vm]` section of the active tuned profile, following `include=`.
fn from_tuned(root: &Root, value: &str) -> Option<String> {
    tuned_settings(root, &[b"transparent_hugepages", b"transparent_hugepage"])
        .into_iter()
        .find_map(|(place, set)| (set == value.as_bytes()).then_some(place))
}

/// What the active profiles of tuned set one of these keys to, and where, following `include=`: one for each profile that
/// does.
pub(crate) fn tuned_settings(root: &Root, keys: &[&[u8]]) -> Vec<(String, Vec<u8>)> {
    let mut out = Vec::new();
    /// Deepest chain of `include=` that is followed.
    const INCLUDES_MAX: usize = 8;
    let Some(active) = files::text(root, "/etc/tuned/active_profile") else {
        return out;
    };
    for profile in active.split_whitespace().take(INCLUDES_MAX) {
        let mut name = profile.to_owned();
        for _ in 0..INCLUDES_MAX {
            if name.is_empty() || name.contains("..") || name.starts_with('/') {
                break;
            }
            let places = [
                "/etc/tuned",
                "/etc/tuned/profiles",
                "/usr/lib/tuned",
                "/usr/lib/tuned/profiles",
            ];
            let found = places.iter().find_map(|place| {
                let path = format!("{place}/{name}/tuned.conf");
                files::bytes(root, &path, files::SMALL_FILE_MAX).map(|text| (path, text))
            });
            let Some((path, text)) = found else { break };
            let mut include = None;
            let mut set = None;
            for (number, line) in text.split(|&b| b == b'\n').enumerate() {
                let Some(at) = line.iter().position(|&b| b == b'=') else {
                    continue;
                };
                let (key, rest) = line.split_at(at);
                let rest = rest.get(1..).unwrap_or_default().trim_ascii();
                match key.trim_ascii() {
                    key if keys.contains(&key) => set = Some((number + 1, rest)),
                    b"include" => include = Some(String::from_utf8_lossy(rest).into_owned()),
                    _ => {}
                }
            }
            if let Some((line, set)) = set {
                // The innermost profile that sets it decides.
                out.push((format!("tuned profile {profile} ({path}:{line})"), set.to_vec()));
                break;
            }
            match include {
                Some(next) => name = next,
                None => break,
            }
        }
    }
    out
}

/// What the kernel was built with.
fn built_in(root: &Root) -> Option<&'static str> {
    let config = super::kernel_config::read(root)?;
    for (symbol, value) in [
        (&b"CONFIG_TRANSPARENT_HUGEPAGE_ALWAYS=y"[..], "always"),
        (&b"CONFIG_TRANSPARENT_HUGEPAGE_MADVISE=y"[..], "madvise"),
        (&b"CONFIG_TRANSPARENT_HUGEPAGE_NEVER=y"[..], "never"),
    ] {
        if lines(&config).any(|l| l == symbol) {
            return Some(value);
        }
    }
    None
}

/// The `*.conf` files of several directories, earlier directories replacing later ones by name, in order of name.
fn configuration(root: &Root, directories: &[&str]) -> Vec<(String, Vec<u8>)> {
    let mut by_name = std::collections::BTreeMap::new();
    for directory in directories {
        for name in files::names(root, directory)
            .into_iter()
            .take(CONFIGURATION_FILES_MAX)
        {
            if name.ends_with(".conf") {
                by_name
                    .entry(name.clone())
                    .or_insert_with(|| format!("{directory}/{name}"));
            }
        }
    }
    by_name
        .into_values()
        .filter_map(|path| files::bytes(root, &path, files::SMALL_FILE_MAX).map(|text| (path, text)))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(list: &[(&str, &str)]) -> (tempfile::TempDir, Root) {
        let dir = tempfile::tempdir().unwrap();
        for (path, text) in list {
            let file = dir.path().join(path.trim_start_matches('/'));
            std::fs::create_dir_all(file.parent().unwrap()).unwrap();
            std::fs::write(file, text).unwrap();
        }
        let root = Root::new(dir.path());
        (dir, root)
    }
    const ENABLED: &str = "/sys/kernel/mm/transparent_hugepage/enabled";
    const CONFIG: (&str, &str) = ("/boot/config-6.1.0", "CONFIG_TRANSPARENT_HUGEPAGE_MADVISE=y\n");
    const RELEASE: (&str, &str) = ("/proc/sys/kernel/osrelease", "6.1.0\n");

    fn set_by(list: &[(&str, &str)]) -> Option<String> {
        let (_keep, root) = host(list);
        HugePages::new(root).read().enabled_set_by
    }

    #[test]
    fn the_kernels_own_default_was_set_by_nobody() {
        assert_eq!(
            set_by(&[(ENABLED, "always [madvise] never\n"), CONFIG, RELEASE]),
            None
        );
    }

    #[test]
    fn a_value_that_no_file_explains_was_set_at_run_time() {
        assert_eq!(
            set_by(&[(ENABLED, "always madvise [never]\n"), CONFIG, RELEASE]).as_deref(),
            Some("at run time")
        );
    }

    #[test]
    fn without_a_known_default_nobody_is_blamed() {
        assert_eq!(set_by(&[(ENABLED, "[always] madvise never\n"), RELEASE]), None);
    }

    #[test]
    fn the_command_line_is_named_when_it_fits() {
        let line = (
            "/proc/cmdline",
            "quiet transparent_hugepage=always transparent_hugepage=never\n",
        );
        assert_eq!(
            set_by(&[(ENABLED, "always madvise [never]\n"), CONFIG, RELEASE, line]).as_deref(),
            Some("kernel command line transparent_hugepage=never")
        );
        assert_eq!(
            set_by(&[(ENABLED, "[always] madvise never\n"), CONFIG, RELEASE, line]).as_deref(),
            Some("at run time")
        );
    }

    #[test]
    fn a_tmpfiles_line_is_named_and_etc_replaces_usr_lib() {
        let usr = (
            "/usr/lib/tmpfiles.d/thp.conf",
            "w /sys/kernel/mm/transparent_hugepage/enabled - - - - always\n",
        );
        let etc = (
            "/etc/tmpfiles.d/thp.conf",
            "# ours\nw! /sys/kernel/mm/transparent_hugepage/enabled - - - - never\n",
        );
        assert_eq!(
            set_by(&[(ENABLED, "always madvise [never]\n"), usr, etc]).as_deref(),
            Some("/etc/tmpfiles.d/thp.conf:2")
        );
        assert_eq!(set_by(&[(ENABLED, "[always] madvise never\n"), usr, etc]), None);
    }

    #[test]
    fn sysfs_d_and_tuned_are_named() {
        let sysfs = (
            "/etc/sysfs.d/x.conf",
            "kernel/mm/transparent_hugepage/enabled = never\n",
        );
        assert_eq!(
            set_by(&[(ENABLED, "always madvise [never]\n"), sysfs]).as_deref(),
            Some("/etc/sysfs.d/x.conf:1")
        );
        let active = ("/etc/tuned/active_profile", "mine\n");
        let mine = (
            "/etc/tuned/mine/tuned.conf",
            "[main]\ninclude=throughput-performance\n",
        );
        let base = (
            "/usr/lib/tuned/throughput-performance/tuned.conf",
            "[vm]\ntransparent_hugepages=always\n",
        );
        assert_eq!(
            set_by(&[(ENABLED, "[always] madvise never\n"), active, mine, base]).as_deref(),
            Some("tuned profile mine (/usr/lib/tuned/throughput-performance/tuned.conf:2)")
        );
    }

    #[test]
    fn a_kernel_without_large_pages_has_empty_settings() {
        let (_keep, root) = host(&[RELEASE]);
        assert_eq!(HugePages::new(root).read(), HugePageSettings::default());
    }
}
