//! The settings, as data: `catalogue.toml`, compiled in.
//!
//! A default is written as `60` (exact), `= FORMULA` (exact, by memory and CPUs) or `~ FORMULA` (the kernel computes it at
//! boot from more than can be seen afterwards: right to within a quarter), several numbers parted by `;`. `before` lists
//! defaults of older kernels, `options` those that the kernel's build decides (`$` = the value of the option itself).

use crate::expression::{self, Names};
use crate::tree::{Facts, Release};
use crate::values::Values;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Relative distance within which an approximate default holds.
const ABOUT: f64 = 0.25;

/// When a setting can be changed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// At any time; it takes effect at once or soon.
    #[default]
    Dynamic,
    /// On the kernel's command line only.
    Boot,
    /// At any time, but a wrong value can stop the machine or take something away from it: changed only when told twice.
    Restricted,
}

impl Kind {
    /// Its name in the command line and in JSON.
    pub fn name(self) -> &'static str {
        match self {
            Self::Dynamic => "dynamic",
            Self::Boot => "boot",
            Self::Restricted => "restricted",
        }
    }
}

/// One entry: a setting, or one kind of setting that every device has (`*` in name and path).
#[derive(Clone, Debug)]
pub struct Tunable {
    /// Name: that of the sysctl, else group and file. A `*` stands for the device.
    pub name: String,
    /// File, with the same `*`; `cmdline:NAME` for what is only on the kernel's command line.
    pub path: String,
    /// Group, by its id.
    pub group: String,
    /// Which values it takes.
    pub values: Values,
    /// Unit of the value; empty for a switch or a name.
    pub unit: String,
    /// When it can be changed.
    pub kind: Kind,
    /// First kernel that had it.
    pub since: Release,
    /// What it does, in two lines.
    pub what: String,
    /// Where that is documented: a file of the kernel's Documentation, or of its source.
    pub source: String,
    /// Name of a parameter of the kernel's command line that sets it, too.
    pub parameter: Option<String>,
    /// What words of that parameter mean as a value here.
    pub parameter_values: BTreeMap<String, String>,
    /// The strategy of homeostat that experiments with it.
    pub strategy: Option<String>,
    default: Option<String>,
    before: Vec<(Release, String)>,
    options: Vec<(String, String)>,
}

/// What the kernel does by itself.
#[derive(Clone, Debug, PartialEq)]
pub enum Standard {
    /// This value.
    Exact(String),
    /// These numbers, to within a quarter.
    About(Vec<f64>),
    /// Not known here; the reason.
    Unknown(String),
}

impl Standard {
    /// Whether a value (in normal form) is the default; `None` when the default is not known.
    pub fn holds(&self, value: &str) -> Option<bool> {
        match self {
            Self::Exact(default) => Some(default == value),
            Self::About(numbers) => {
                let words: Vec<&str> = value.split(' ').collect();
                let near = |word: &str, about: f64| {
                    word.parse::<f64>()
                        .is_ok_and(|v| (v - about).abs() <= ABOUT * about.abs())
                };
                Some(words.len() == numbers.len() && words.iter().zip(numbers).all(|(w, n)| near(w, *n)))
            }
            Self::Unknown(_) => None,
        }
    }

    /// For people; `None` when not known.
    pub fn shown(&self) -> Option<String> {
        match self {
            Self::Exact(value) => Some(value.clone()),
            Self::About(numbers) => Some(format!("about {}", whole(numbers))),
            Self::Unknown(_) => None,
        }
    }
}

fn whole(numbers: &[f64]) -> String {
    numbers
        .iter()
        .map(|n| format!("{:.0}", n.floor()))
        .collect::<Vec<_>>()
        .join(" ")
}

impl Tunable {
    /// What the kernel with these facts does by itself.
    pub fn standard(&self, facts: &Facts) -> Standard {
        if !self.options.is_empty() {
            for (option, value) in &self.options {
                if value == "$" {
                    match facts.option_value(option) {
                        Some(value) => return Standard::Exact(self.values.normal(&value)),
                        None if facts.options.is_some() => continue,
                        None => {}
                    }
                }
                match facts.has_option(option) {
                    None => {
                        return Standard::Unknown(format!(
                            "the kernel's build decides ({option}), and its configuration is not found"
                        ));
                    }
                    Some(true) => {
                        return computed(value, facts).unwrap_or_else(Standard::Unknown);
                    }
                    Some(false) => {}
                }
            }
        }
        let text = self
            .before
            .iter()
            .find(|(release, _)| facts.release < *release)
            .map(|(_, value)| value)
            .or(self.default.as_ref());
        match text {
            None => Standard::Unknown("it depends on the device or the machine".into()),
            Some(text) => match computed(text, facts) {
                Ok(standard) => standard,
                Err(why) => Standard::Unknown(why),
            },
        }
    }

    /// The default as the catalogue writes it, for the reference.
    pub fn default_text(&self) -> String {
        let mut parts: Vec<String> = Vec::new();
        for (option, value) in &self.options {
            parts.push(match value.as_str() {
                "$" => format!("the value of {option}"),
                value => format!("{} with {option}", in_words(value)),
            });
        }
        if let Some(default) = &self.default {
            parts.push(in_words(default));
        }
        for (release, value) in &self.before {
            parts.push(format!("`{value}` before {release}"));
        }
        if parts.is_empty() {
            "depends on the device or the machine".into()
        } else {
            parts.join("; ")
        }
    }
}

/// A default as the catalogue writes it, for the reference.
fn in_words(default: &str) -> String {
    match default.split_at_checked(1) {
        Some(("~", formula)) => format!("about `{}`", formula.trim()),
        Some(("=", formula)) => format!("`{}`", formula.trim()),
        _ => format!("`{default}`"),
    }
}

fn computed(text: &str, facts: &Facts) -> Result<Standard, String> {
    let formula = |formulas: &str| {
        if facts.memory == 0 || facts.cpus == 0 {
            return Err("it depends on memory and CPUs, which are not known".to_owned());
        }
        let names = Names { facts, value: None };
        formulas
            .split(';')
            .map(|f| expression::evaluate(f.trim(), &names).map_err(|e| e.to_string()))
            .collect::<Result<Vec<f64>, String>>()
    };
    match text.split_at_checked(1) {
        Some(("=", formulas)) => formula(formulas).map(|n| Standard::Exact(whole(&n))),
        Some(("~", formulas)) => formula(formulas).map(Standard::About),
        _ => Ok(Standard::Exact(text.to_owned())),
    }
}

/// Settings that belong together.
#[derive(Clone, Debug)]
pub struct Group {
    /// Short name, for filters.
    pub id: String,
    /// Heading.
    pub title: String,
}

/// A setting that kernels no longer have, or no longer obey.
#[derive(Clone, Debug)]
pub struct Gone {
    /// Name of the sysctl or file.
    pub name: String,
    /// First kernel without it; `None` where it is a rule about a value.
    pub since: Release,
    /// The file is still there, and nothing reads it.
    pub stays: bool,
    /// What came instead, or why it went.
    pub text: String,
    /// Where that is documented.
    pub source: String,
}

/// A value that works against the machine.
#[derive(Clone, Debug)]
pub struct Against {
    /// Name of the setting.
    pub name: String,
    /// Formula that is not zero when the rule applies.
    pub when: String,
    /// Or: these words.
    pub words: Vec<String>,
    /// What it costs and what to do.
    pub text: String,
}

/// All of it.
#[derive(Clone, Debug)]
pub struct Catalogue {
    /// Groups in the order of the reference.
    pub groups: Vec<Group>,
    /// Settings, in order of group.
    pub tunables: Vec<Tunable>,
    /// What is gone.
    pub gone: Vec<Gone>,
    /// What works against.
    pub against: Vec<Against>,
}

/// Why the catalogue is not sound; a bug of ours, found by a test.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the catalogue of settings is not sound: {0}")]
pub struct CatalogueError(pub String);

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FileCatalogue {
    group: Vec<FileGroup>,
    gone: Vec<FileGone>,
    against: Vec<FileAgainst>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FileGroup {
    id: String,
    title: String,
    prefix: String,
    base: String,
    source: String,
    tunable: Vec<FileTunable>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FileTunable {
    name: String,
    file: Option<String>,
    values: String,
    #[serde(default)]
    unit: String,
    #[serde(default)]
    kind: Kind,
    since: String,
    what: String,
    source: Option<String>,
    default: Option<String>,
    #[serde(default)]
    before: Vec<(String, String)>,
    #[serde(default)]
    options: Vec<(String, String)>,
    parameter: Option<String>,
    #[serde(default)]
    parameter_values: BTreeMap<String, String>,
    strategy: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FileGone {
    name: String,
    since: String,
    #[serde(default)]
    stays: bool,
    text: String,
    source: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FileAgainst {
    name: String,
    #[serde(default)]
    when: String,
    #[serde(default)]
    words: Vec<String>,
    text: String,
}

fn release(text: &str) -> Result<Release, CatalogueError> {
    Release::parse(text).ok_or_else(|| CatalogueError(format!("{text:?} is no release")))
}

impl Catalogue {
    /// The catalogue that is compiled in.
    ///
    /// # Errors
    /// It is not sound: a bug of ours.
    pub fn load() -> Result<Self, CatalogueError> {
        Self::parse(include_str!("catalogue.toml"))
    }

    /// From text.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn parse(text: &str) -> Result<Self, CatalogueError> {
        let file: FileCatalogue = toml::from_str(text).map_err(|e| CatalogueError(e.to_string()))?;
        let mut groups = Vec::new();
        let mut tunables = Vec::new();
        for group in file.group {
            for t in group.tunable {
                let leaf = t.file.unwrap_or_else(|| t.name.replace('.', "/"));
                let path = if leaf.starts_with('/') || leaf.starts_with("cmdline:") {
                    leaf
                } else {
                    format!("{}{leaf}", group.base)
                };
                let mut before = t
                    .before
                    .iter()
                    .map(|(r, value)| Ok((release(r)?, value.clone())))
                    .collect::<Result<Vec<_>, CatalogueError>>()?;
                before.sort_by_key(|(r, _)| *r);
                tunables.push(Tunable {
                    name: format!("{}{}", group.prefix, t.name),
                    path,
                    group: group.id.clone(),
                    values: Values::parse(&t.values).map_err(CatalogueError)?,
                    unit: t.unit,
                    kind: t.kind,
                    since: release(&t.since)?,
                    what: t.what.split_whitespace().collect::<Vec<_>>().join(" "),
                    source: t.source.unwrap_or_else(|| group.source.clone()),
                    parameter: t.parameter,
                    parameter_values: t.parameter_values,
                    strategy: t.strategy,
                    default: t.default,
                    before,
                    options: t.options,
                });
            }
            groups.push(Group {
                id: group.id,
                title: group.title,
            });
        }
        let gone = file
            .gone
            .into_iter()
            .map(|g| {
                Ok(Gone {
                    since: release(&g.since)?,
                    name: g.name,
                    stays: g.stays,
                    text: g.text,
                    source: g.source,
                })
            })
            .collect::<Result<Vec<_>, CatalogueError>>()?;
        let against = file
            .against
            .into_iter()
            .map(|a| Against {
                name: a.name,
                when: a.when,
                words: a.words,
                text: a.text,
            })
            .collect();
        Ok(Self {
            groups,
            tunables,
            gone,
            against,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    fn host() -> Facts {
        Facts {
            release: Release(6, 18),
            memory: 32 << 30,
            cpus: 8,
            nodes: 1,
            page: 4096,
            options: Some(BTreeSet::new()),
            ..Facts::default()
        }
    }

    #[test]
    fn there_are_enough_of_them_and_each_is_described_once() {
        let catalogue = Catalogue::load().unwrap();
        assert!(catalogue.tunables.len() >= 150, "{}", catalogue.tunables.len());
        let (mut names, mut paths) = (BTreeSet::new(), BTreeSet::new());
        for t in &catalogue.tunables {
            assert!(names.insert(&t.name), "{} twice", t.name);
            assert!(paths.insert(&t.path), "{} twice", t.path);
            assert_eq!(
                t.name.matches('*').count(),
                t.path.matches('*').count(),
                "{}",
                t.name
            );
            assert!(
                (60..=420).contains(&t.what.len()),
                "{}: {} characters",
                t.name,
                t.what.len()
            );
            assert!(t.what.ends_with('.'), "{}: {}", t.name, t.what);
            assert!(
                t.source.starts_with("Documentation/")
                    || t.source.ends_with(".c")
                    || t.source.ends_with(".h"),
                "{}: {}",
                t.name,
                t.source
            );
            assert!(
                Release(2, 0) <= t.since && t.since <= Release(6, 18),
                "{}",
                t.name
            );
            assert_eq!(t.kind == Kind::Boot, t.path.starts_with("cmdline:"), "{}", t.name);
            if let Values::Integers { count, min, max } = &t.values {
                assert!(
                    *count >= 1 && min.zip(*max).is_none_or(|(a, b)| a < b),
                    "{}",
                    t.name
                );
            }
        }
    }

    #[test]
    fn every_default_is_a_value_of_its_setting() {
        for t in Catalogue::load().unwrap().tunables {
            let mut all: Vec<String> = t.parameter_values.values().cloned().collect();
            let before = t.before.iter().map(|(_, value)| value);
            let options = t.options.iter().map(|(_, value)| value).filter(|v| *v != "$");
            for text in t.default.iter().chain(before).chain(options) {
                match computed(text, &host()).unwrap_or_else(|e| panic!("{}: {e}", t.name)) {
                    Standard::Exact(value) => all.push(value),
                    Standard::About(numbers) => all.push(whole(&numbers)),
                    Standard::Unknown(why) => panic!("{}: {why}", t.name),
                }
            }
            for value in all {
                assert_eq!(t.values.check(&value, ""), Ok(value.clone()), "{}", t.name);
            }
            for (release, _) in &t.before {
                assert!(*release > t.since, "{}", t.name);
            }
        }
    }

    #[test]
    fn what_is_gone_is_in_no_newer_kernels_list_and_rules_can_be_evaluated() {
        let catalogue = Catalogue::load().unwrap();
        assert!(catalogue.gone.len() >= 20, "{}", catalogue.gone.len());
        let mut names = BTreeSet::new();
        for gone in &catalogue.gone {
            assert!(names.insert(&gone.name), "{} twice", gone.name);
            assert!(!gone.text.is_empty() && !gone.source.is_empty(), "{}", gone.name);
        }
        let facts = host();
        for rule in &catalogue.against {
            assert!(
                catalogue.tunables.iter().any(|t| t.name == rule.name),
                "{} is in no group",
                rule.name
            );
            assert_eq!(rule.when.is_empty(), !rule.words.is_empty(), "{}", rule.name);
            if !rule.when.is_empty() {
                let names = Names {
                    facts: &facts,
                    value: Some(1.0),
                };
                expression::evaluate(&rule.when, &names).unwrap();
            }
        }
    }

    #[test]
    fn defaults_follow_the_kernel_its_build_and_the_machine() {
        let catalogue = Catalogue::load().unwrap();
        let find = |name: &str| catalogue.tunables.iter().find(|t| t.name == name).unwrap();
        let mut facts = host();
        let somaxconn = find("net.core.somaxconn");
        assert_eq!(somaxconn.standard(&facts), Standard::Exact("4096".into()));
        facts.release = Release(4, 19);
        assert_eq!(somaxconn.standard(&facts), Standard::Exact("128".into()));
        let thp = find("thp.enabled");
        assert!(matches!(
            thp.standard(&Facts {
                options: None,
                ..host()
            }),
            Standard::Unknown(_)
        ));
        let with = |option: &str| Facts {
            options: Some(BTreeSet::from([option.to_owned()])),
            ..host()
        };
        assert_eq!(
            thp.standard(&with("CONFIG_TRANSPARENT_HUGEPAGE_MADVISE")),
            Standard::Exact("madvise".into())
        );
        let about = Standard::About(vec![100.0, 200.0]);
        assert_eq!(about.holds("120 180"), Some(true));
        assert_eq!(about.holds("130 180"), Some(false));
        assert_eq!(about.holds("100"), Some(false));
    }
}
