//! Scenario files (TOML): machine, programs, events and comparison, documented in `docs/evidence.md`. An error names
//! file, line, value and remedy. The scenarios of the published rows are part of the program ([`built_in`]).

use homeostat_engine::Policy;
pub use homeostat_engine::policy::Profile;
use homeostat_simulator::behaviour::ProgramSpec;
use homeostat_simulator::hardware::Profile as ProgramProfile;
use homeostat_simulator::layout::{self, Layout};
use homeostat_simulator::profiles;
use homeostat_simulator::rough::roughen;
use homeostat_simulator::scheduler::SchedulerKind;
use homeostat_simulator::world::{PersonChange, Surroundings, TimedChange, WorldSpec};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::path::Path;

const HOURS_MAX: f64 = 744.0;
const EVENTS_MAX: usize = 100_000;
const POINTS_MAX: f64 = 200_000.0;

/// A span of virtual time, seconds since the start of the run.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Window {
    /// First second.
    pub from_s: f64,
    /// Last second.
    pub to_s: f64,
}

/// The comparison of the table before and after.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub enum Baseline {
    /// The same seed without homeostat.
    LeftAlone,
    /// The same run, earlier.
    SameRun,
}

/// The two windows of the table.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Windows {
    /// Window before.
    pub before: Window,
    /// Window after: the steady end of the run.
    pub after: Window,
    /// In which run the window before lies.
    pub baseline: Baseline,
}

/// The machine of a scenario.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MachineSection {
    /// A layout by name; `homeostat-lab --list` prints them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub named: Option<String>,
    /// A layout of one's own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub layout: Option<Layout>,
    /// How the kernel places threads.
    #[serde(default = "fan_out")]
    pub scheduler: SchedulerKind,
    /// The machine can split large pages of several processes, as published machines could and Linux cannot.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub split_shared: bool,
}

fn fan_out() -> SchedulerKind {
    SchedulerKind::FanOut
}

/// A whole scenario.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Scenario {
    /// Short name, as on the command line.
    pub name: String,
    /// One line for people.
    pub title: String,
    /// Source of the machine and the numbers.
    #[serde(default)]
    pub source: String,
    /// Published rows that this scenario reproduces, such as `P15`.
    #[serde(default)]
    pub rows: Vec<String>,
    /// Length in simulated hours.
    pub hours: f64,
    /// Seed of the noise and of homeostat's random assignment.
    #[serde(default = "one")]
    pub seed: u64,
    /// Length of a point of the curves in seconds.
    #[serde(default = "minute")]
    pub resolution_s: f64,
    /// The machine.
    pub machine: MachineSection,
    /// The programs' surroundings: fragmentation, paging, power, cost of the optimizer.
    #[serde(default)]
    pub surroundings: Surroundings,
    /// Profiles that the programs name, in addition to the shipped ones.
    #[serde(default, rename = "program-profile")]
    pub profiles: Vec<ProgramProfile>,
    /// Its programs.
    #[serde(rename = "program")]
    pub programs: Vec<ProgramSpec>,
    /// The events.
    #[serde(default, rename = "event")]
    pub events: Vec<TimedChange>,
    /// Settings by an expert at the start, in the run compared with homeostat's.
    #[serde(default)]
    pub by_hand: Vec<PersonChange>,
    /// The comparison. Absent: the last quarter of the run with and without homeostat.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub windows: Option<Windows>,
    /// Strategies that may be used; all when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub strategies: Option<Vec<String>>,
    /// Thresholds: homeostat's own or those of the original.
    #[serde(default)]
    pub profile: Profile,
    /// Engine settings that differ from the defaults, as in the daemon's configuration.
    #[serde(default)]
    pub policy: Policy,
}

fn one() -> u64 {
    1
}

fn minute() -> f64 {
    60.0
}

/// A fault of a scenario.
#[derive(Debug, thiserror::Error)]
pub enum ScenarioError {
    /// No such file, and no scenario of that name.
    #[error(
        "{name}: neither a scenario of the program nor a file that can be read ({why})\n  hint: `homeostat-lab --list` prints the scenarios"
    )]
    Unknown {
        /// The requested name.
        name: String,
        /// Why it cannot be read as a file.
        why: String,
    },
    /// A mistake, with its place.
    #[error("{file}:{line}: {message}{}", hint(remedy))]
    Wrong {
        /// File.
        file: String,
        /// Line, from 1.
        line: usize,
        /// The fault, with the value.
        message: String,
        /// The remedy.
        remedy: String,
    },
}

fn hint(remedy: &str) -> String {
    if remedy.is_empty() {
        String::new()
    } else {
        format!("\n  hint: {remedy}")
    }
}

macro_rules! shipped {
    ($($name:literal),* $(,)?) => {
        &[$((concat!($name, ".toml"), include_str!(concat!("../scenarios/", $name, ".toml")))),*]
    };
}

const BUILT_IN: &[(&str, &str)] = shipped![
    "p1",
    "p3",
    "p4-8",
    "p4-15",
    "p5-16",
    "p5-32",
    "p6-8",
    "p6-16",
    "p7",
    "p8",
    "p9",
    "p10",
    "p11-60",
    "p11-90",
    "p12a-1",
    "p12a-2",
    "p12b-1",
    "p12b-2",
    "p13-1",
    "p13-2",
    "p13-3",
    "p15",
    "p16-spread",
    "p16-contained",
];

/// The scenarios that ship with the program, in the order of the published rows.
///
/// # Errors
/// Never for a released program: a test reads them all.
pub fn built_in() -> Result<Vec<Scenario>, ScenarioError> {
    BUILT_IN.iter().map(|(file, text)| parse(file, text)).collect()
}

/// A scenario by name, else from a file.
///
/// # Errors
/// [`ScenarioError`]: neither exists, or something in it is wrong.
pub fn find(name: &str) -> Result<Scenario, ScenarioError> {
    let built_in = BUILT_IN.iter().find(|(file, _)| {
        file.strip_suffix(".toml")
            .is_some_and(|n| n.eq_ignore_ascii_case(name))
    });
    match built_in {
        Some((file, text)) => parse(file, text),
        None => load(Path::new(name)),
    }
}

/// A scenario from a file.
///
/// # Errors
/// [`ScenarioError`]: the file cannot be read, or something in it is wrong.
pub fn load(path: &Path) -> Result<Scenario, ScenarioError> {
    let text = std::fs::read_to_string(path).map_err(|e| ScenarioError::Unknown {
        name: path.display().to_string(),
        why: e.to_string(),
    })?;
    parse(&path.display().to_string(), &text)
}

/// A scenario from text; `file` is for messages.
///
/// # Errors
/// [`ScenarioError::Wrong`] names the line, the value and the remedy.
pub fn parse(file: &str, text: &str) -> Result<Scenario, ScenarioError> {
    let scenario: Scenario = toml::from_str(text).map_err(|e| {
        let line = e.span().map_or(1, |s| line_at(text, s.start));
        let message = e.message().trim().replace('\n', " ");
        ScenarioError::Wrong {
            file: file.to_owned(),
            line,
            remedy: remedy(&message).to_owned(),
            message: quote(text, line, &message),
        }
    })?;
    scenario.check(text).map_err(|w| ScenarioError::Wrong {
        file: file.to_owned(),
        line: w.line,
        message: w.message,
        remedy: w.remedy,
    })?;
    Ok(scenario)
}

fn line_at(text: &str, byte: usize) -> usize {
    let end = byte.min(text.len());
    1 + text.as_bytes()[..end].iter().filter(|b| **b == b'\n').count()
}

fn quote(text: &str, line: usize, message: &str) -> String {
    let said = text
        .lines()
        .nth(line.saturating_sub(1))
        .unwrap_or_default()
        .trim();
    if said.is_empty() {
        message.to_owned()
    } else {
        format!("{message}: `{said}`")
    }
}

fn remedy(message: &str) -> &'static str {
    if message.contains("unknown field") {
        "the key is misspelt or stands in the wrong section; the expected ones are listed; docs/evidence.md explains each"
    } else if message.contains("unknown variant") {
        "use one of the values that are listed"
    } else if message.contains("missing field") {
        "add the key to this section; docs/evidence.md has an example"
    } else if message.contains("invalid type") {
        "give a value of the expected type; times are numbers in seconds, text stands in quotes"
    } else {
        "see docs/evidence.md for the format"
    }
}

/// A mistake without its file.
struct Mistake {
    line: usize,
    message: String,
    remedy: String,
}

/// Section, which one of that name, key.
type Place<'a> = (&'a str, usize, &'a str);

/// Text that may be wrong, to find its place.
struct Text<'a>(&'a str);

impl Text<'_> {
    fn ensure(&self, holds: bool, place: Place<'_>, message: &str, remedy: &str) -> Result<(), Mistake> {
        if holds {
            return Ok(());
        }
        let (section, index, key) = place;
        Err(Mistake {
            line: line_of(self.0, section, index, key),
            message: message.to_owned(),
            remedy: remedy.to_owned(),
        })
    }
}

/// Line of the `index`-th (from 0) section of that name, or of the key in it; its first line if the key is absent.
fn line_of(text: &str, section: &str, index: usize, key: &str) -> usize {
    let header = format!("[[{section}]]");
    let single = format!("[{section}]");
    let mut seen = 0;
    let mut inside = section.is_empty();
    let mut at = 1;
    for (i, line) in text.lines().enumerate() {
        let line = line.trim_start();
        if line.starts_with(&header) || line.starts_with(&single) {
            if inside && !section.is_empty() {
                break;
            }
            inside = seen == index;
            seen += 1;
            if inside {
                at = i + 1;
            }
        } else if inside && line.starts_with('[') && !line.starts_with(&format!("[{section}.")) {
            break;
        } else if inside
            && line
                .strip_prefix(key)
                .is_some_and(|rest| !key.is_empty() && rest.trim_start().starts_with('='))
        {
            return i + 1;
        }
    }
    at
}

impl Scenario {
    /// Length in seconds.
    pub fn length_s(&self) -> f64 {
        self.hours * 3600.0
    }

    /// The windows that are compared.
    pub fn windows(&self) -> Windows {
        let last = Window {
            from_s: self.length_s() * 0.75,
            to_s: self.length_s(),
        };
        self.windows.unwrap_or(Windows {
            before: last,
            after: last,
            baseline: Baseline::LeftAlone,
        })
    }

    /// The engine's settings in this scenario.
    pub fn policy(&self) -> Policy {
        let mut policy = self.policy.clone();
        policy.seed = self.seed;
        policy.profile = self.profile;
        if let Some(allowed) = &self.strategies {
            for strategy in homeostat_strategies::all() {
                let id = strategy.id();
                if !allowed.iter().any(|a| a == id.as_str()) {
                    policy.strategies.insert(id.as_str().to_owned(), false);
                }
            }
        }
        policy
    }

    /// Makes its signals rough; see [`homeostat_simulator::rough`].
    pub fn roughen(&mut self) {
        roughen(&mut self.programs, &mut self.surroundings);
    }

    /// The layout of its machine.
    ///
    /// # Errors
    /// There is none of that name, or its shape makes no sense.
    pub fn layout(&self) -> Result<Layout, String> {
        let mut layout = match (&self.machine.named, &self.machine.layout) {
            (Some(name), None) => Layout::named(name).map_err(|e| format!("machine.named: {e}"))?,
            (None, Some(layout)) => layout.clone(),
            (Some(_), Some(_)) => return Err("machine.named and machine.layout are both given".into()),
            (None, None) => return Err("[machine] has neither `named` nor `layout`".into()),
        };
        layout.check().map_err(|e| format!("machine.layout: {e}"))?;
        layout.split_shared |= self.machine.split_shared;
        Ok(layout)
    }

    /// The world at the start.
    ///
    /// # Errors
    /// As [`Scenario::layout`].
    pub fn world(&self) -> Result<WorldSpec, String> {
        Ok(WorldSpec {
            programs: self.programs.clone(),
            profiles: self.profiles.clone(),
            seed: self.seed,
            surroundings: self.surroundings.clone(),
            ..WorldSpec::new(self.layout()?, self.machine.scheduler)
        })
    }

    fn knows(&self, name: &str) -> bool {
        self.programs
            .iter()
            .any(|p| p.name == name || p.workloads().iter().any(|w| w == name))
    }

    /// Finds what the types cannot express. `text` is the source.
    fn check(&self, text: &str) -> Result<(), Mistake> {
        let text = Text(text);
        self.check_times(&text)?;
        let key = if self.machine.named.is_some() {
            "named"
        } else {
            "layout"
        };
        let names = layout::names().join(", ");
        let remedy = format!("give `named` (one of {names}) or a [machine.layout], not both");
        let layout = self.layout();
        let said = layout.as_ref().err().map_or("", String::as_str);
        text.ensure(layout.is_ok(), ("machine", 0, key), said, &remedy)?;
        self.check_programs(&text)?;
        self.check_changes(&text)?;
        self.check_settings(&text)
    }

    fn check_times(&self, text: &Text<'_>) -> Result<(), Mistake> {
        let (length, resolution) = (self.length_s(), self.resolution_s);
        text.ensure(
            self.hours > 0.0 && self.hours <= HOURS_MAX,
            ("", 0, "hours"),
            &format!("hours = {}", self.hours),
            "give a length above 0 and at most 744 hours (a month)",
        )?;
        text.ensure(
            resolution >= 1.0 && resolution <= length && length / resolution <= POINTS_MAX,
            ("", 0, "resolution_s"),
            &format!("resolution_s = {resolution}"),
            "give at least 1, at most the length of the run, and so much that a curve has at most 200000 points",
        )?;
        let windows = self
            .windows
            .iter()
            .flat_map(|w| [("before", w.before), ("after", w.after)]);
        for (name, Window { from_s, to_s }) in windows {
            text.ensure(
                from_s >= 0.0 && to_s <= length && to_s - from_s >= resolution,
                ("windows", 0, name),
                &format!("{name} = {from_s} s to {to_s} s"),
                &format!(
                    "a window lies within the run (0 to {length} s) and is at least as long as resolution_s"
                ),
            )?;
        }
        Ok(())
    }

    fn check_programs(&self, text: &Text<'_>) -> Result<(), Mistake> {
        text.ensure(
            !self.programs.is_empty(),
            ("", 0, ""),
            "there is no [[program]]",
            "describe at least one program",
        )?;
        for (i, p) in self.programs.iter().enumerate() {
            text.ensure(
                !self.programs.iter().take(i).any(|q| q.name == p.name),
                ("program", i, "name"),
                &format!("name = {:?}: there are two programs of that name", p.name),
                "names must be unique",
            )?;
            let complaint = p.complaints().into_iter().next().unwrap_or_default();
            // The complaint names the program, then the key.
            let key = complaint.split_once(": ").map_or("", |(_, rest)| {
                rest.split([' ', ':', '.', ',']).next().unwrap_or_default()
            });
            text.ensure(
                complaint.is_empty(),
                ("program", i, key),
                &complaint,
                "docs/evidence.md has the keys of a program with their ranges",
            )?;
            text.ensure(
                self.profiles.iter().any(|q| q.name == p.profile) || profiles::profile(&p.profile).is_some(),
                ("program", i, "profile"),
                &format!("profile = {:?}: there is no profile of that name", p.profile),
                &format!("the profiles are {}", profiles::names().join(", ")),
            )?;
        }
        Ok(())
    }

    fn check_changes(&self, text: &Text<'_>) -> Result<(), Mistake> {
        text.ensure(
            self.events.len() <= EVENTS_MAX,
            ("event", EVENTS_MAX, ""),
            &format!("{} events", self.events.len()),
            "at most 100000 events",
        )?;
        let known = |change: &PersonChange, place| match change.program().filter(|p| !self.knows(p)) {
            Some(program) => text.ensure(
                false,
                place,
                &format!("program {program:?} is not in the scenario"),
                "name one of the [[program]] sections",
            ),
            None => Ok(()),
        };
        let length = self.length_s();
        for (i, e) in self.events.iter().enumerate() {
            text.ensure(
                e.at_s >= 0.0 && e.at_s <= length,
                ("event", i, "at_s"),
                &format!("at_s = {}", e.at_s),
                &format!("give a moment between 0 and {length} s, the length of the run"),
            )?;
            known(&e.change, ("event", i, "change"))?;
        }
        self.by_hand.iter().try_for_each(|c| known(c, ("by_hand", 0, "")))
    }

    fn check_settings(&self, text: &Text<'_>) -> Result<(), Mistake> {
        let all = homeostat_strategies::all();
        let known: Vec<String> = all.iter().map(|s| s.id().to_string()).collect();
        for name in self.strategies.iter().flatten() {
            text.ensure(
                known.contains(name),
                ("", 0, "strategies"),
                &format!("strategies: there is no strategy {name:?}"),
                &format!("the strategies are {}", known.join(", ")),
            )?;
        }
        let complaint = self.policy.validate().into_iter().next().unwrap_or_default();
        text.ensure(
            complaint.is_empty(),
            (
                "policy",
                0,
                complaint.split([' ', '=']).next().unwrap_or_default(),
            ),
            &format!("policy: {complaint}"),
            "docs/configuration.md explains each setting",
        )
    }
}

impl fmt::Display for Baseline {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::LeftAlone => "the same seed left alone",
            Self::SameRun => "the same run, earlier",
        })
    }
}

/// Names of the layouts that a scenario can use.
pub fn machines() -> Vec<&'static str> {
    layout::names()
}

impl Scenario {
    /// Changes the length of the run. Windows at its end move along; later events are dropped.
    ///
    /// # Errors
    /// The length is no length, or shorter than the scenario's resolution allows.
    pub fn shorten_or_extend(&mut self, hours: f64) -> Result<(), String> {
        if !(hours > 0.0 && hours <= HOURS_MAX) {
            return Err(format!("give a length above 0 and at most {HOURS_MAX} hours"));
        }
        let ratio = hours / self.hours;
        self.hours = hours;
        let length = self.length_s();
        if length < self.resolution_s {
            return Err(format!(
                "the curves of this scenario have points of {} s",
                self.resolution_s
            ));
        }
        if length / self.resolution_s > POINTS_MAX {
            return Err(format!(
                "that is more than {POINTS_MAX} points of {} s",
                self.resolution_s
            ));
        }
        self.events.retain(|e| e.at_s <= length);
        if let Some(w) = &mut self.windows {
            for window in [&mut w.before, &mut w.after] {
                window.from_s *= ratio;
                window.to_s = (window.to_s * ratio).min(length);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMALL: &str = r#"name = "small"
title = "a small machine"
hours = 1.0

[machine]
named = "small-2n"

[[program]]
name = "db"
profile = "oltp"
threads = 4
private_mib = 512

[[event]]
at_s = 600.0
change = { what = "restart", program = "db" }

[policy]
scan_interval_s = 5.0
"#;

    fn complaint(from: &str, to: &str) -> String {
        let text = SMALL.replacen(from, to, 1);
        assert_ne!(text, SMALL, "{from}");
        parse("small.toml", &text).unwrap_err().to_string()
    }

    #[test]
    fn every_scenario_of_the_program_is_valid_and_named_as_its_file() {
        for (file, text) in BUILT_IN {
            let scenario = parse(file, text).unwrap_or_else(|e| panic!("{e}"));
            assert_eq!(format!("{}.toml", scenario.name), *file);
            assert!(!scenario.rows.is_empty() && !scenario.source.is_empty(), "{file}");
            assert!(find(&scenario.name.to_uppercase()).is_ok(), "{file}");
        }
        assert!(built_in().unwrap().len() >= 20);
    }

    #[test]
    fn a_scenario_says_what_it_means() {
        let s = parse("small.toml", SMALL).unwrap();
        assert_eq!(s.events.len(), 1);
        assert!((s.policy().scan_interval_s - 5.0).abs() < 1e-9);
        assert_eq!(s.windows().baseline, Baseline::LeftAlone);
        let written = toml::to_string(&s).unwrap();
        assert_eq!(parse("again.toml", &written).unwrap(), s);
    }

    #[test]
    fn the_example_of_the_documentation_is_a_scenario() {
        let page = include_str!("../../../docs/evidence.md");
        let example = page
            .split("```toml\n")
            .nth(1)
            .and_then(|rest| rest.split("```").next())
            .unwrap();
        let s = parse("docs/evidence.md", example).unwrap_or_else(|e| panic!("{e}"));
        assert_eq!((s.name.as_str(), s.events.len()), ("mine", 1));
    }

    #[test]
    fn mistakes_are_named_with_file_line_value_and_remedy() {
        for (from, to, parts) in [
            (
                "threads = 4",
                "treads = 4",
                &["small.toml:11", "treads", "hint:"][..],
            ),
            (
                "threads = 4",
                "threads = 0",
                &["small.toml:11", "threads = 0", "between"],
            ),
            ("threads = 4", "threads = \"four\"", &["small.toml:11", "four"]),
            ("small-2n", "small-3n", &["small.toml:6", "small-3n", "small-2n"]),
            ("\"oltp\"", "\"oltq\"", &["small.toml:10", "oltq", "daytrader"]),
            ("hours = 1.0", "hours = -1.0", &["small.toml:3", "hours = -1"]),
            (
                "at_s = 600.0",
                "at_s = 6000.0",
                &["small.toml:15", "6000", "3600"],
            ),
            ("program = \"db\"", "program = \"bd\"", &["small.toml:16", "bd"]),
            ("restart", "restrat", &["small.toml:16", "restrat"]),
            (
                "scan_interval_s = 5.0",
                "scan_interval_s = 0.1",
                &["small.toml:19", "scan_interval_s"],
            ),
            (
                "scan_interval_s = 5.0",
                "scan_interval = 5.0",
                &["small.toml:19", "scan_interval"],
            ),
            (
                "hours = 1.0",
                "hours = 1.0\nstrategies = [\"magic\"]",
                &["small.toml:4", "magic", "cache_affinity"],
            ),
            (
                "hours = 1.0",
                "hours = 1.0\nhours = 2.0",
                &["small.toml:4", "duplicate"],
            ),
        ] {
            let text = complaint(from, to);
            for part in parts {
                assert!(text.contains(part), "{to}: {part} is not in: {text}");
            }
        }
    }

    #[test]
    fn a_name_that_is_nothing_is_answered_with_the_list() {
        let text = find("nonesuch").unwrap_err().to_string();
        assert!(text.contains("nonesuch") && text.contains("--list"), "{text}");
    }

    #[test]
    fn another_length_moves_the_windows_with_it() {
        let mut s = find("p7").unwrap();
        s.shorten_or_extend(1.0).unwrap();
        assert_eq!(s.windows().after.to_s, 3600.0);
        assert!(s.shorten_or_extend(f64::NAN).is_err() && s.shorten_or_extend(0.001).is_err());
    }
}
