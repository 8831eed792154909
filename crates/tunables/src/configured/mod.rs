//! What is written down on a machine about its settings.
//!
//! Each format has a reader that follows the format's own manual, and returns its lines in the order in which their
//! tool carries them out. A line applies, does not apply, or it cannot be told from outside (a rule of udev asks a
//! program, a unit may be off). All lines that may apply are kept: which of them explains a value is decided in
//! [`crate::settings`], where the value is known and what the kernel makes of a text.
//!
//! Order of effect: the kernel's command line and modprobe.d, then sysctl.d, udev rules, tmpfiles.d, sysfs.d, units and
//! rc.local (whose order among each other nothing fixes), then tuned, which applies sysctl.d once more.

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
pub(crate) use sysctl::UNREAD as UNREAD_SYSCTL_CONF;

use crate::tree::Tree;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Most configuration files of one directory that are read.
const FILES_MAX: usize = 1000;
/// Most lines that are kept of all files together.
const WRITTEN_MAX: usize = 20_000;

/// Which kind of place something is written in.
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

/// When a line is carried out. Within one phase only lines of the same way have an order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    /// A module is loaded with its options.
    Module,
    /// The kernel reads its command line, and the loader of modules adds what stands there to its own options.
    Kernel,
    /// The machine starts.
    Boot,
    /// tuned applies its profile.
    Tuned,
    /// tuned applies sysctl.d again (`reapply_sysctl`).
    Reapplied,
}

/// Whether a line is carried out on this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Applies {
    /// It is.
    Yes,
    /// It is not; the reason.
    No(String),
    /// It cannot be told from the files; the reason.
    Unknown(String),
}

impl Applies {
    /// Both must apply.
    fn and(self, other: Self) -> Self {
        match (self, other) {
            (no @ Self::No(_), _) | (_, no @ Self::No(_)) => no,
            (unknown @ Self::Unknown(_), _) | (_, unknown @ Self::Unknown(_)) => unknown,
            (Self::Yes, Self::Yes) => Self::Yes,
        }
    }
}

/// How the value of a line is meant.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Form {
    /// This text is written.
    #[default]
    Plain,
    /// This number is written where a smaller one stands (`>N` of tuned).
    AtLeast,
    /// This number is written where a larger one stands (`<N` of tuned).
    AtMost,
    /// The first of these that the file offers is written (`a|b` of tuned).
    FirstOffered,
    /// Something is written, and what is known only when it happens: a variable, a specifier, a program's answer.
    Computed,
}

/// One line somewhere that sets something.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Written {
    /// File that is set; may hold `*`, `?` and `[…]`.
    pub path: String,
    /// The value as its tool writes it.
    pub value: String,
    /// How the value is meant.
    pub form: Form,
    /// Kind of place.
    pub way: Way,
    /// When it is carried out.
    pub phase: Phase,
    /// The file that says so.
    pub file: String,
    /// Its line, from 1; 0 on the command line.
    pub line: usize,
    /// What to call the place besides the file: the parameter, the profile, the unit.
    pub what: String,
    /// The unit or script that leads to the file.
    pub via: String,
    /// Whether it is carried out, as far as that does not depend on the device.
    pub applies: Applies,
    /// The line itself says that the file may be missing.
    pub optional: bool,
    /// What a rule of udev asks of the device.
    rule: Option<udev::Rule>,
}

impl Written {
    fn new(way: Way, path: String, value: &str, file: &str, line: usize) -> Self {
        Self {
            path,
            value: value.to_owned(),
            form: Form::Plain,
            way,
            phase: match way {
                Way::ModuleOptions => Phase::Module,
                Way::KernelCommandLine => Phase::Kernel,
                Way::TunedSysctl | Way::TunedProfile => Phase::Tuned,
                Way::SysctlFile
                | Way::UdevRule
                | Way::Tmpfiles
                | Way::SysfsFile
                | Way::SystemdUnit
                | Way::BootScript => Phase::Boot,
            },
            file: file.to_owned(),
            line,
            what: String::new(),
            via: String::new(),
            applies: Applies::Yes,
            optional: false,
            rule: None,
        }
    }

    /// The one device that a rule of udev is about, if it names one.
    pub(crate) fn device(&self) -> Option<&str> {
        self.rule.as_ref()?.names_device()
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
                let by = if self.via.is_empty() { "" } else { ", by " };
                format!("{file}:{line}{by}{}", self.via)
            }
        }
    }
}

/// A line about one file.
#[derive(Clone, Debug)]
pub struct Candidate<'w> {
    /// The line.
    pub written: &'w Written,
    /// Its position in the order of effect of all lines.
    pub position: usize,
    /// Whether it is carried out for this file: never [`Applies::No`].
    pub applies: Applies,
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
        let profile = tuned::read(tree);
        let sysctl = sysctl::read(tree, profile.reapplies);
        found.written.extend(sysctl.written);
        found.excluded = sysctl.excluded;
        found.written.extend(udev::read(tree));
        found.written.extend(tmpfiles::read(tree));
        found.written.extend(sysfs_conf::read(tree));
        found.written.extend(shell::read(tree));
        found.written.extend(profile.written);
        // Stable: within a kind the order of effect stays.
        found.written.sort_by_key(|w| (w.phase, w.way));
        found.written.truncate(WRITTEN_MAX);
        found
    }

    /// All lines, in order of effect.
    pub fn all(&self) -> &[Written] {
        &self.written
    }

    /// The lines about one file that apply or may apply, in order of effect.
    pub fn about(&self, path: &str, tree: &dyn Tree) -> Vec<Candidate<'_>> {
        // A file that sysctl.d names is out of reach of its patterns, wherever the two stand (sysctl.d(5)).
        let is_named = self.excluded.iter().any(|e| e == path)
            || self
                .written
                .iter()
                .any(|w| w.way == Way::SysctlFile && w.path == path && !matches!(w.applies, Applies::No(_)));
        let mut device = udev::Device::of(path);
        let mut found = Vec::new();
        for (position, written) in self.written.iter().enumerate() {
            if !pattern::fits(&written.path, path) {
                continue;
            }
            if written.way == Way::SysctlFile && is_named && pattern::is_pattern(&written.path) {
                continue;
            }
            let mut applies = written.applies.clone();
            if let Some(rule) = &written.rule {
                applies = applies.and(rule.applies(&mut device, tree));
            }
            if !matches!(applies, Applies::No(_)) {
                found.push(Candidate {
                    written,
                    position,
                    applies,
                });
            }
        }
        found
    }
}

/// The files of several directories, earlier directories replacing later ones by name, in order of name.
fn files_of(tree: &dyn Tree, directories: &[&str], ending: &str) -> Vec<(String, String)> {
    let mut by_name: BTreeMap<String, String> = BTreeMap::new();
    for directory in directories {
        for name in tree.names(directory).into_iter().take(FILES_MAX) {
            if name.ends_with(ending) && !name.starts_with('.') {
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
    // As path_simplify() of systemd: no doubled slashes, no dots that stay where they are.
    let parts: Vec<&str> = path.split('/').filter(|p| !p.is_empty() && *p != ".").collect();
    format!("/proc/sys/{}", parts.join("/"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_sysctls_are_files() {
        assert_eq!(sysctl_path("vm.swappiness"), "/proc/sys/vm/swappiness");
        assert_eq!(sysctl_path("vm/swappiness"), "/proc/sys/vm/swappiness");
        assert_eq!(sysctl_path("/vm//swappiness/"), "/proc/sys/vm/swappiness");
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
}
