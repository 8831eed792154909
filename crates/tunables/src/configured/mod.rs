//! What is written down on a machine about its settings, and which line wins.
//!
//! Read are, in the order in which they take effect at boot: the kernel's command line, modprobe.d, tuned's sysctls (it
//! applies sysctl.d again after its own, `reapply_sysctl`), sysctl.d and sysctl.conf, udev rules, tmpfiles.d, sysfs.d,
//! the commands of systemd units, rc.local, and tuned. Within each the documented precedence holds. A place explains a
//! value only when it is the winning one of its kind and says that value; of several the last in that order is named.

mod command_line;
mod modprobe;
pub mod pattern;
mod shell;
mod sysctl;
mod sysfs_conf;
mod tmpfiles;
mod tuned;
mod udev;

pub(crate) use command_line::own as own_parameter;

use crate::tree::Tree;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Most configuration files of one directory that are read.
const FILES_MAX: usize = 1000;
/// Most lines that are kept of all files together.
const WRITTEN_MAX: usize = 20_000;

/// Which kind of place something is written in, in the order in which they take effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Way {
    /// A parameter of the kernel's command line.
    KernelCommandLine,
    /// `options` in modprobe.d.
    ModuleOptions,
    /// A sysctl of the active tuned profile.
    TunedSysctl,
    /// sysctl.d or sysctl.conf.
    SysctlFile,
    /// A udev rule.
    UdevRule,
    /// tmpfiles.d.
    Tmpfiles,
    /// sysfs.d or sysfs.conf of sysfsutils.
    SysfsFile,
    /// A command of a systemd unit.
    SystemdUnit,
    /// rc.local.
    BootScript,
    /// The active tuned profile.
    TunedProfile,
}

impl Way {
    /// For filters and JSON.
    pub fn name(self) -> &'static str {
        match self {
            Self::KernelCommandLine => "kernel_command_line",
            Self::ModuleOptions => "module_options",
            Self::SysctlFile => "sysctl_file",
            Self::UdevRule => "udev_rule",
            Self::Tmpfiles => "tmpfiles",
            Self::SysfsFile => "sysfs_file",
            Self::SystemdUnit => "systemd_unit",
            Self::BootScript => "boot_script",
            Self::TunedSysctl | Self::TunedProfile => "tuned_profile",
        }
    }
}

/// A condition of a udev rule that can be looked at.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Condition {
    /// Attribute, a file below the device's directory.
    attribute: String,
    /// Pattern of its value.
    value: String,
    /// It must not fit.
    negated: bool,
}

/// One line somewhere that sets something.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Written {
    /// File that is set; may hold `*`, `?` and `[…]`.
    pub path: String,
    /// The value as it stands there.
    pub value: String,
    /// Kind of place.
    pub way: Way,
    /// The file that says so.
    pub file: String,
    /// Its line, from 1; 0 on the command line.
    pub line: usize,
    /// What to call the place besides the file: the parameter, the profile, the unit.
    pub what: String,
    /// The attribute that a udev rule sets, with its conditions; the device's directory is the path without it.
    conditions: (String, Vec<Condition>),
}

impl Written {
    fn new(way: Way, path: String, value: &str, file: &str, line: usize) -> Self {
        Self {
            path,
            value: value.to_owned(),
            way,
            file: file.to_owned(),
            line,
            what: String::new(),
            conditions: (String::new(), Vec::new()),
        }
    }

    /// The place in words: `/etc/sysctl.d/10-x.conf:3`.
    pub fn place(&self) -> String {
        let (file, line) = (&self.file, self.line);
        match self.way {
            Way::KernelCommandLine => format!("kernel command line {}", self.what),
            Way::TunedProfile | Way::TunedSysctl => format!("tuned profile {} ({file}:{line})", self.what),
            Way::ModuleOptions
            | Way::SysctlFile
            | Way::UdevRule
            | Way::Tmpfiles
            | Way::SysfsFile
            | Way::SystemdUnit
            | Way::BootScript => {
                format!("{file}:{line}")
            }
        }
    }

    fn fits(&self, path: &str, tree: &dyn Tree) -> bool {
        if !pattern::fits(&self.path, path) {
            return false;
        }
        let (attribute, conditions) = &self.conditions;
        let Some(device) = path.strip_suffix(attribute.as_str()) else {
            return conditions.is_empty();
        };
        conditions.iter().all(|c| {
            let there = tree.text(&format!("{device}{}", c.attribute)).unwrap_or_default();
            pattern::fits_any(&c.value, there.trim()) != c.negated
        })
    }
}

/// Everything that is written down.
#[derive(Clone, Debug, Default)]
pub struct Configured {
    /// In order of effect.
    written: Vec<Written>,
    /// Files of /proc/sys that sysctl.d keeps its patterns away from.
    excluded: Vec<String>,
}

impl Configured {
    /// Reads all places.
    pub fn read(tree: &dyn Tree) -> Self {
        let mut found = Self::default();
        found.written.extend(command_line::read(tree));
        found.written.extend(modprobe::read(tree));
        let (written, excluded) = sysctl::read(tree);
        found.written.extend(written);
        found.excluded = excluded;
        found.written.extend(udev::read(tree));
        found.written.extend(tmpfiles::read(tree));
        found.written.extend(sysfs_conf::read(tree));
        found.written.extend(shell::read(tree));
        found.written.extend(tuned::read(tree));
        // Stable: within a kind the order of effect stays.
        found.written.sort_by_key(|w| w.way);
        found.written.truncate(WRITTEN_MAX);
        found
    }

    /// All lines, in order of effect.
    pub fn all(&self) -> &[Written] {
        &self.written
    }

    /// The lines about one file: the winning one of each kind of place, in order of effect.
    pub fn about(&self, path: &str, tree: &dyn Tree) -> Vec<&Written> {
        let mut winning: BTreeMap<Way, &Written> = BTreeMap::new();
        for written in self.written.iter().filter(|w| w.fits(path, tree)) {
            if written.way == Way::SysctlFile {
                // A line that names the file wins over every pattern, wherever it stands; some are kept away from
                // patterns on purpose (sysctl.d(5)).
                let general = pattern::is_pattern(&written.path);
                if general && self.excluded.iter().any(|e| e == path) {
                    continue;
                }
                if general
                    && winning
                        .get(&Way::SysctlFile)
                        .is_some_and(|w| !pattern::is_pattern(&w.path))
                {
                    continue;
                }
            }
            winning.insert(written.way, written);
        }
        winning.into_values().collect()
    }

    /// The line that explains a value: `same` tells whether a written text means the value that is in force. A
    /// parameter of the command line means what `meaning` makes of it.
    pub fn origin(&self, path: &str, tree: &dyn Tree, same: impl Fn(&Written) -> bool) -> Option<&Written> {
        self.about(path, tree).into_iter().rev().find(|w| same(w))
    }
}

/// The `*.conf` files of several directories, earlier directories replacing later ones by name, in order of name.
fn files_of(tree: &dyn Tree, directories: &[&str], ending: &str) -> Vec<(String, String)> {
    let mut by_name: BTreeMap<String, String> = BTreeMap::new();
    for directory in directories {
        for name in tree.names(directory).into_iter().take(FILES_MAX) {
            if name.ends_with(ending) {
                by_name
                    .entry(name.clone())
                    .or_insert_with(|| format!("{directory}/{name}"));
            }
        }
    }
    by_name
        .into_values()
        .filter_map(|path| tree.text(&path).map(|text| (path, text)))
        .collect()
}

/// The lines of a text with their numbers; a backslash at the end joins the next line.
fn joined_lines(text: &str) -> Vec<(usize, String)> {
    let mut lines: Vec<(usize, String)> = Vec::new();
    let mut goes_on = false;
    for (index, line) in text.lines().enumerate() {
        let (part, more) = match line.strip_suffix('\\') {
            Some(part) => (part, true),
            None => (line, false),
        };
        match lines.last_mut() {
            Some((_, whole)) if goes_on => {
                whole.push(' ');
                whole.push_str(part.trim());
            }
            _ => lines.push((index + 1, part.trim().to_owned())),
        }
        goes_on = more;
    }
    lines
}

/// The file of a sysctl's name. With a slash first, or none at all, dots stay what they are; with a dot first, dots part
/// and slashes stand for dots (sysctl.d(5)).
pub fn sysctl_path(name: &str) -> String {
    let first = name.find(['.', '/']);
    let path: String = match first.and_then(|at| name.as_bytes().get(at)) {
        Some(b'.') => name
            .chars()
            .map(|c| match c {
                '.' => '/',
                '/' => '.',
                c => c,
            })
            .collect(),
        _ => name.to_owned(),
    };
    format!("/proc/sys/{path}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Files;

    #[test]
    fn names_of_sysctls_are_files() {
        assert_eq!(sysctl_path("vm.swappiness"), "/proc/sys/vm/swappiness");
        assert_eq!(sysctl_path("vm/swappiness"), "/proc/sys/vm/swappiness");
        assert_eq!(
            sysctl_path("net/ipv4/conf/eth0.100/rp_filter"),
            "/proc/sys/net/ipv4/conf/eth0.100/rp_filter"
        );
        assert_eq!(
            sysctl_path("net.ipv4.conf.eth0/100.rp_filter"),
            "/proc/sys/net/ipv4/conf/eth0.100/rp_filter"
        );
    }

    #[test]
    fn continued_lines_keep_the_number_of_the_first() {
        assert_eq!(
            joined_lines("a\nb \\\n  c\nd"),
            [(1, "a".to_owned()), (2, "b c".to_owned()), (4, "d".to_owned())]
        );
    }

    #[test]
    fn the_last_kind_of_place_that_says_the_value_is_named() {
        let tree = Files::new(&[
            ("/proc/cmdline", "quiet sysctl.vm.swappiness=5\n"),
            ("/etc/sysctl.d/10-a.conf", "vm.swappiness = 10\n"),
            ("/etc/tmpfiles.d/a.conf", "w /proc/sys/vm/swappiness - - - - 20\n"),
        ]);
        let configured = Configured::read(&tree);
        let path = "/proc/sys/vm/swappiness";
        assert_eq!(configured.about(path, &tree).len(), 3);
        let origin = |value: &str| {
            configured
                .origin(path, &tree, |w| w.value == value)
                .map(Written::place)
        };
        assert_eq!(origin("20").as_deref(), Some("/etc/tmpfiles.d/a.conf:1"));
        assert_eq!(origin("10").as_deref(), Some("/etc/sysctl.d/10-a.conf:1"));
        assert_eq!(
            origin("5").as_deref(),
            Some("kernel command line sysctl.vm.swappiness=5")
        );
        assert_eq!(origin("60"), None);
    }
}
