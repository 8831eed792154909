//! The active profile of tuned: sections of the types `sysctl`, `sysfs`, `vm`, `cpu` and `disk`, as its own loader reads them.
//!
//! A profile follows what it includes, section by section and option by option. A section counts where its conditions hold
//! (`enabled`, `uname_regex`, `cpuinfo_regex`, `devices`). `>N` sets N where less stands. What a variable or function of tuned
//! gives is put in where it stands in the profile, else the value is not known. After its own sysctls tuned applies
//! sysctl.d again, unless `reapply_sysctl=0`.

use super::{Applies, Form, Way, Written};
use crate::tree::Tree;

/// Most profiles that are loaded, and deepest chain of `include=`.
const PROFILES_MAX: usize = 32;
const DEPTH_MAX: u32 = 8;
/// Where profiles are looked for, first the administrator's.
const PLACES: &[&str] = &[
    "/etc/tuned/profiles",
    "/etc/tuned",
    "/usr/lib/tuned/profiles",
    "/usr/lib/tuned",
];

/// What tuned does.
#[derive(Default)]
pub(super) struct Profile {
    /// What it writes, in its order.
    pub(super) written: Vec<Written>,
    /// Whether it applies sysctl.d again.
    pub(super) reapplies: Option<Applies>,
}

pub(super) fn read(tree: &dyn Tree) -> Profile {
    let active = tree.text("/etc/tuned/active_profile").unwrap_or_default();
    let names: Vec<&str> = active.split_whitespace().filter(|n| is_safe(n)).collect();
    let mut loader = Loader {
        tree,
        files: Vec::new(),
        sections: Vec::new(),
    };
    // One that cannot be loaded is the end of all of them.
    if loader.load(&names, 0).is_none() {
        return Profile::default();
    }
    Maker {
        tree,
        active: &names.join(" "),
        variables: Vec::new(),
    }
    .make(loader.sections)
}

fn is_safe(name: &str) -> bool {
    !name.is_empty()
        && name
            .chars()
            .all(|c| c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '-'))
}

/// One option with the place where it stands.
#[derive(Clone, Debug)]
struct Setting {
    key: String,
    value: String,
    file: String,
    line: usize,
}

/// A section, merged from all profiles (`Unit` in tuned).
#[derive(Clone, Debug)]
struct Section {
    name: String,
    options: Vec<Setting>,
}

impl Section {
    fn get(&self, key: &str) -> Option<&str> {
        self.options
            .iter()
            .find(|o| o.key == key)
            .map(|o| o.value.as_str())
    }

    fn is_on(&self, key: &str) -> Option<bool> {
        self.get(key).map(|v| matches!(v, "True" | "true" | "1"))
    }

    /// Sets an option, in the place that it had; returns the place.
    fn put(&mut self, option: Setting) -> usize {
        match self.options.iter().position(|o| o.key == option.key) {
            Some(at) => {
                if let Some(before) = self.options.get_mut(at) {
                    *before = option;
                }
                at
            }
            None => {
                self.options.push(option);
                self.options.len() - 1
            }
        }
    }

    /// `_merge_two()`: the newer section replaces the older one, or is laid over it.
    fn merge(&mut self, newer: Self) {
        if newer.is_on("replace") == Some(true) {
            *self = newer;
            return;
        }
        // These have a value in every section, also where none is written.
        self.options
            .retain(|o| !matches!(o.key.as_str(), "type" | "enabled" | "devices"));
        if let Some(dropped) = newer.get("drop") {
            let dropped: Vec<String> = dropped.split([',', ';']).map(|d| d.trim().to_owned()).collect();
            self.options.retain(|o| !dropped.contains(&o.key));
        }
        for option in newer.options {
            self.put(option);
        }
    }
}

struct Loader<'t> {
    tree: &'t dyn Tree,
    files: Vec<String>,
    sections: Vec<Section>,
}

impl Loader<'_> {
    /// Loads profiles one after another, each after what it includes; `None` when tuned would refuse.
    fn load(&mut self, names: &[&str], depth: u32) -> Option<()> {
        if depth > DEPTH_MAX {
            return None;
        }
        for name in names {
            let (name, is_optional) = match name.strip_prefix('-') {
                Some(rest) => (rest, true),
                None => (*name, false),
            };
            let name = name.rsplit('/').next().unwrap_or_default();
            if name.is_empty() || name.contains("..") || self.files.len() >= PROFILES_MAX {
                return None;
            }
            // A profile may include the one of the same name that it hides.
            let mut was_loaded = false;
            let found = PLACES.iter().find_map(|place| {
                let path = format!("{place}/{name}/tuned.conf");
                if self.files.contains(&path) {
                    was_loaded = true;
                    return None;
                }
                self.tree.text(&path).map(|text| (path, text))
            });
            let Some((file, text)) = found else {
                if was_loaded || is_optional {
                    continue;
                }
                return None;
            };
            self.files.push(file.clone());
            let directory = file.strip_suffix("/tuned.conf").unwrap_or_default();
            let mut sections = sections(&text, &file)?;
            for option in sections.iter_mut().flat_map(|s| s.options.iter_mut()) {
                option.value = option.value.replace("${i:PROFILE_DIR}", directory);
            }
            if let Some(include) = sections
                .iter()
                .find(|s| s.name == "main")
                .and_then(|s| s.get("include"))
            {
                let include = include.to_owned();
                let names: Vec<&str> = include.split([',', ';']).map(str::trim).collect();
                self.load(&names, depth + 1)?;
            }
            for section in sections.into_iter().filter(|s| s.name != "main") {
                match self.sections.iter_mut().find(|s| s.name == section.name) {
                    Some(before) => before.merge(section),
                    None => self.sections.push(section),
                }
            }
        }
        Some(())
    }
}

/// The sections of a file as `configparser` of Python reads them; `None` when it would not.
fn sections(text: &str, file: &str) -> Option<Vec<Section>> {
    let mut found: Vec<Section> = Vec::new();
    let mut current = 0;
    let mut indent = 0;
    // The option that an indented line goes on with.
    let mut open: Option<usize> = None;
    let mut blanks = 0;
    for (index, line) in text.lines().enumerate() {
        if line.trim_start().starts_with(['#', ';']) {
            continue;
        }
        // A comment on a line stands after white space.
        let is_comment = |at: usize| {
            line.get(..at)
                .is_some_and(|before| before.is_empty() || before.ends_with(char::is_whitespace))
        };
        let cut = line
            .char_indices()
            .find(|(at, c)| *c == '#' && is_comment(*at))
            .map_or(line, |(at, _)| line.get(..at).unwrap_or_default());
        let plain = cut.trim();
        if plain.is_empty() {
            blanks += 1;
            continue;
        }
        let own = cut.len() - cut.trim_start().len();
        let last = open.and_then(|at| found.get_mut(current)?.options.get_mut(at));
        if let (true, Some(option)) = (own > indent, last) {
            option.value.push_str(&"\n".repeat(blanks + 1));
            option.value.push_str(plain);
            blanks = 0;
            continue;
        }
        (indent, open, blanks) = (own, None, 0);
        if let Some((name, _)) = plain.strip_prefix('[').and_then(|l| l.rsplit_once(']')) {
            if name.is_empty() {
                return None;
            }
            // A section that is there twice goes on.
            current = found.iter().position(|s| s.name == name).unwrap_or(found.len());
            if current == found.len() {
                found.push(Section {
                    name: name.to_owned(),
                    options: Vec::new(),
                });
            }
            continue;
        }
        let (key, value) = plain.split_once('=')?;
        let (key, value) = (key.trim(), value.trim());
        if key.is_empty() {
            return None;
        }
        let section = found.get_mut(current)?;
        open = Some(section.put(Setting {
            key: key.to_owned(),
            value: value.to_owned(),
            file: file.to_owned(),
            line: index + 1,
        }));
    }
    Some(found)
}

struct Maker<'t> {
    tree: &'t dyn Tree,
    active: &'t str,
    variables: Vec<(String, String)>,
}

impl Maker<'_> {
    fn make(mut self, sections: Vec<Section>) -> Profile {
        if let Some(variables) = sections.iter().find(|s| s.name == "variables") {
            for option in &variables.options {
                if option.key == "include" {
                    self.include(&option.value);
                } else {
                    let value = self.expanded(&option.value);
                    self.variables.push((option.key.clone(), value));
                }
            }
        }
        let mut instances: Vec<&Section> = sections.iter().filter(|s| s.name != "variables").collect();
        let priority = |s: &Section| {
            s.get("priority")
                .and_then(|p| p.trim().parse::<i64>().ok())
                .unwrap_or(0)
        };
        instances.sort_by_key(|s| priority(s));
        let mut profile = Profile::default();
        for section in instances {
            let applies = self.applies(section);
            let kind = section.get("type").unwrap_or(&section.name);
            if kind == "sysctl" && !matches!(applies, Applies::No(_)) && self.reapplies() {
                profile.reapplies = Some(match profile.reapplies.take() {
                    Some(Applies::Yes) => Applies::Yes,
                    _ => applies.clone(),
                });
            }
            for option in &section.options {
                self.option(section, kind, option, &applies, &mut profile.written);
            }
        }
        profile
    }

    /// `variables_file`: assignments without a section.
    fn include(&mut self, path: &str) {
        let text = self.tree.text(path).unwrap_or_default();
        for section in sections(&format!("[x]\n{text}"), path).unwrap_or_default() {
            for option in section.options {
                let value = self.expanded(&option.value);
                self.variables.push((option.key, value));
            }
        }
    }

    fn reapplies(&self) -> bool {
        let text = self.tree.text("/etc/tuned/tuned-main.conf").unwrap_or_default();
        let value = text
            .lines()
            .filter_map(|l| l.split_once('='))
            .filter(|(key, _)| key.trim() == "reapply_sysctl")
            .map(|(_, value)| value.trim().to_ascii_lowercase())
            .next_back();
        !matches!(value.as_deref(), Some("0" | "false" | "no" | "n"))
    }

    fn expanded(&self, text: &str) -> String {
        // The last definition counts.
        self.variables
            .iter()
            .rev()
            .fold(text.to_owned(), |text, (name, value)| {
                text.replace(&format!("${{{name}}}"), value)
            })
    }

    fn applies(&self, section: &Section) -> Applies {
        if section.is_on("enabled") == Some(false) {
            return Applies::No("its section is not enabled".to_owned());
        }
        let uname = || {
            let text = |path: &str| self.tree.text(path).unwrap_or_default().trim().to_owned();
            let known = format!(
                "Linux {} {} {} ",
                text("/proc/sys/kernel/hostname"),
                text("/proc/sys/kernel/osrelease"),
                text("/proc/sys/kernel/version")
            );
            match crate::tree::architecture(self.tree) {
                Some(machine) => (format!("{known}{machine}"), true),
                None => (known, false),
            }
        };
        let cpuinfo = || match self.tree.text("/proc/cpuinfo") {
            Some(text) => (text, true),
            None => (String::new(), false),
        };
        self.matches(section, "uname_regex", uname)
            .and(self.matches(section, "cpuinfo_regex", cpuinfo))
            .and(match section.get("devices_udev_regex") {
                Some(_) => Applies::Unknown("it asks udev for the devices".to_owned()),
                None => Applies::Yes,
            })
    }

    /// A condition of a section; `text` with whether it is whole.
    fn matches(&self, section: &Section, key: &str, text: impl Fn() -> (String, bool)) -> Applies {
        let Some(expression) = section.get(key) else {
            return Applies::Yes;
        };
        let expression = self.expanded(expression);
        let unknown = || Applies::Unknown(format!("{key} cannot be told"));
        if expression.contains("${") {
            return unknown();
        }
        let Ok(regex) = regex_lite::Regex::new(&format!("(?m){expression}")) else {
            return unknown();
        };
        match (text(), ()) {
            ((text, _), ()) if regex.is_match(&text) => Applies::Yes,
            ((_, true), ()) => Applies::No(format!("{key} does not hold here")),
            ((_, false), ()) => unknown(),
        }
    }

    fn option(
        &self,
        section: &Section,
        kind: &str,
        option: &Setting,
        applies: &Applies,
        found: &mut Vec<Written>,
    ) {
        let key = option.key.as_str();
        let unquoted = option.value.strip_prefix('"').and_then(|v| v.strip_suffix('"'));
        let value = self.expanded(unquoted.filter(|_| kind == "sysctl").unwrap_or(&option.value));
        let mut add = |path: String, value: &str, form: Form, applies: Applies| {
            let way = if path.starts_with("/proc/sys/") {
                Way::TunedSysctl
            } else {
                Way::TunedProfile
            };
            let mut written = Written::new(way, path, value, &option.file, option.line);
            self.active.clone_into(&mut written.what);
            written.form = if value.contains("${") {
                Form::Computed
            } else {
                form
            };
            written.applies = applies;
            found.push(written);
        };
        let (number, form) = match value.split_at_checked(1) {
            Some((">", rest)) if !rest.is_empty() => (rest.trim(), Form::AtLeast),
            Some(("<", rest)) if !rest.is_empty() => (rest.trim(), Form::AtMost),
            _ => (value.as_str(), Form::Plain),
        };
        let all = applies.clone();
        match (kind, key) {
            (_, "type" | "enabled" | "replace" | "drop" | "devices" | "priority") => {}
            ("sysctl", name) if name.ends_with("_regex") => {}
            ("sysctl", name) => add(format!("/proc/sys/{}", name.replace('.', "/")), number, form, all),
            ("sysfs", path) if path.starts_with("/sys/") => add(path.to_owned(), &value, Form::Plain, all),
            ("vm", "transparent_hugepages" | "transparent_hugepage") => {
                let cmdline = self.tree.text("/proc/cmdline").unwrap_or_default();
                let all = if cmdline.contains("transparent_hugepage=") {
                    Applies::No("the kernel's command line sets it".to_owned())
                } else {
                    all
                };
                add(
                    "/sys/kernel/mm/transparent_hugepage/enabled".to_owned(),
                    &value,
                    Form::Plain,
                    all,
                );
            }
            ("vm", "transparent_hugepage.defrag") => {
                add(
                    "/sys/kernel/mm/transparent_hugepage/defrag".to_owned(),
                    &value,
                    Form::Plain,
                    all,
                );
            }
            ("vm", "dirty_ratio" | "dirty_background_ratio" | "dirty_bytes" | "dirty_background_bytes") => {
                // A share of memory is set by the name that takes shares.
                match number.strip_suffix('%') {
                    Some(share) => {
                        let path = format!("/proc/sys/vm/{}", key.replace("_bytes", "_ratio"));
                        add(path, share.trim(), form, all);
                    }
                    None => add(format!("/proc/sys/vm/{key}"), number, form, all),
                }
            }
            ("cpu", "governor" | "energy_performance_preference") => {
                let leaf = if key == "governor" {
                    "scaling_governor"
                } else {
                    key
                };
                let path = format!("/sys/devices/system/cpu/cpufreq/*/{leaf}");
                add(path, &value, Form::FirstOffered, all);
            }
            ("cpu", "min_perf_pct" | "max_perf_pct" | "no_turbo") => {
                add(
                    format!("/sys/devices/system/cpu/intel_pstate/{key}"),
                    number,
                    form,
                    all,
                );
            }
            ("disk", "elevator") => {
                for (device, applies) in devices(section, &all) {
                    add(
                        format!("/sys/block/{device}/queue/scheduler"),
                        &value,
                        Form::Plain,
                        applies,
                    );
                }
            }
            ("disk", "readahead") => {
                let kib = match number.split_once(char::is_whitespace) {
                    Some((sectors, unit)) if unit.trim_start().starts_with('s') => sectors
                        .parse::<u64>()
                        .map_or(number.to_owned(), |n| (n / 2).to_string()),
                    Some((kib, _)) => kib.to_owned(),
                    None => number.to_owned(),
                };
                for (device, applies) in devices(section, &all) {
                    add(
                        format!("/sys/block/{device}/queue/read_ahead_kb"),
                        &kib,
                        form,
                        applies,
                    );
                }
            }
            _ => {}
        }
    }
}

/// The devices of a section, as patterns.
fn devices(section: &Section, applies: &Applies) -> Vec<(String, Applies)> {
    let list = section.get("devices").unwrap_or("*");
    let words: Vec<&str> = list
        .split([',', ';', ' ', '\t'])
        .filter(|w| !w.is_empty())
        .collect();
    let except = words.iter().any(|w| w.starts_with('!'));
    let applies = if except {
        applies
            .clone()
            .and(Applies::Unknown(format!("devices={list} leaves some out")))
    } else {
        applies.clone()
    };
    let mut found: Vec<(String, Applies)> = words
        .iter()
        .filter(|w| !w.starts_with('!'))
        .map(|w| ((*w).to_owned(), applies.clone()))
        .collect();
    if found.is_empty() {
        found.push(("*".to_owned(), applies));
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Files;

    fn said(list: &[(&str, &str)]) -> Vec<(String, String, Form)> {
        read(&Files::new(list))
            .written
            .into_iter()
            .filter(|w| !matches!(w.applies, Applies::No(_)))
            .map(|w| (w.path, w.value, w.form))
            .collect()
    }

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
        let found = read(&tree).written;
        let of = |path: &str| -> Vec<&Written> { found.iter().filter(|w| w.path == path).collect() };
        let swappiness = of("/proc/sys/vm/swappiness");
        assert_eq!((swappiness.len(), swappiness[0].value.as_str()), (1, "5"));
        let most = of("/proc/sys/net/core/rmem_max");
        assert_eq!(
            (most[0].value.as_str(), most[0].form),
            ("16777216", Form::AtLeast)
        );
        assert_eq!(
            of("/sys/kernel/mm/transparent_hugepage/enabled")[0].place(),
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
        let tree = [
            ("/etc/tuned/active_profile", "../x a/b\n"),
            ("/etc/tuned/../x/tuned.conf", "[sysctl]\nvm.swappiness=5\n"),
        ];
        assert_eq!(said(&tree), []);
    }

    #[test]
    fn a_section_counts_where_its_conditions_hold() {
        let with = |section: &str| {
            let text = format!("[variables]\nA=aarch64\n[x]\ntype=sysctl\n{section}\nvm.swappiness=5\n");
            said(&[
                ("/etc/tuned/active_profile", "p"),
                ("/etc/tuned/p/tuned.conf", &text),
                ("/proc/cpuinfo", "flags\t\t: fpu\nmodel name : AMD EPYC\n"),
                ("/proc/sys/kernel/osrelease", "6.12.0\n"),
            ])
            .len()
        };
        assert_eq!(with(""), 1);
        assert_eq!(with("enabled=false"), 0);
        assert_eq!(with("uname_regex=${A}"), 0);
        assert_eq!(with("uname_regex=x86_64"), 1);
        assert_eq!(with("cpuinfo_regex=^model name\\s+:.*\\bAMD\\b"), 1);
        assert_eq!(with("cpuinfo_regex=Intel"), 0);
    }

    #[test]
    fn sections_are_replaced_and_options_dropped() {
        let with = |section: &str| {
            let text = format!("[main]\ninclude=base\n[sysctl]\n{section}\n");
            let said = said(&[
                ("/etc/tuned/active_profile", "p"),
                ("/etc/tuned/p/tuned.conf", &text),
                (
                    "/usr/lib/tuned/base/tuned.conf",
                    "[sysctl]\nvm.swappiness=5\nvm.dirty_ratio=9\n",
                ),
            ]);
            said.into_iter()
                .map(|(path, ..)| path.replace("/proc/sys/", ""))
                .collect::<Vec<_>>()
        };
        assert_eq!(with("vm.x=1"), ["vm/swappiness", "vm/dirty_ratio", "vm/x"]);
        assert_eq!(with("replace=1\nvm.x=1"), ["vm/x"]);
        assert_eq!(with("drop=vm.swappiness"), ["vm/dirty_ratio"]);
        // One line that is no option, and tuned loads nothing.
        assert_eq!(with("nonsense"), Vec::<String>::new());
    }
}
