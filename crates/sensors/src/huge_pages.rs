//! Transparent-huge-page settings of the host and who made them.
//!
//! Provenance: somebody chose a value that differs from the kernel's built-in one. A value
//! that none of the places of `homeostat_tunables::configured` explains was written `at run time`.

use homeostat_kernel::bytes::{chosen, number};
use homeostat_kernel::files::Kept;
use homeostat_kernel::{Root, files};
use homeostat_model::{HugePageSettings, PageSizeSetting};

const BASE: &str = "/sys/kernel/mm/transparent_hugepage";

/// The settings; their origin is searched again only when the value changes.
#[derive(Debug)]
pub struct HugePages {
    root: Root,
    enabled: Kept,
    shmem_enabled: Kept,
    defrag: Kept,
    collapsed: Kept,
    buffer: Vec<u8>,
    origin: Option<(String, Option<String>)>,
}

impl HugePages {
    /// A reader without readings.
    pub fn new(root: Root) -> Self {
        let file = |leaf: &str| Kept::new(&root, &format!("{BASE}/{leaf}"));
        Self {
            enabled: file("enabled"),
            shmem_enabled: file("shmem_enabled"),
            defrag: file("defrag"),
            collapsed: file("khugepaged/pages_collapsed"),
            buffer: Vec::new(),
            origin: None,
            root,
        }
    }

    /// The settings now; empty on a kernel without transparent huge pages.
    pub fn read(&mut self) -> HugePageSettings {
        let buffer = &mut self.buffer;
        let enabled = choice(&mut self.enabled, buffer);
        let found = match &self.origin {
            Some((value, origin)) if *value == enabled => origin.clone(),
            _ => {
                let origin = if enabled.is_empty() {
                    None
                } else {
                    crate::settings::origin(&self.root, &format!("{BASE}/enabled"))
                };
                self.origin = Some((enabled.clone(), origin.clone()));
                origin
            }
        };
        HugePageSettings {
            enabled: PageSizeSetting(enabled),
            shmem_enabled: PageSizeSetting(choice(&mut self.shmem_enabled, buffer)),
            defrag: PageSizeSetting(choice(&mut self.defrag, buffer)),
            enabled_set_by: found,
            khugepaged_pages_collapsed: self
                .collapsed
                .read(buffer, files::SMALL_FILE_MAX)
                .and_then(|text| number(text.trim_ascii()))
                .unwrap_or(0),
        }
    }
}

fn choice(file: &mut Kept, buffer: &mut Vec<u8>) -> String {
    file.read(buffer, files::SMALL_FILE_MAX)
        .and_then(chosen)
        .map(str::to_owned)
        .unwrap_or_default()
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
