//! The configuration: one optional TOML file and its drop-ins, checked with the line and the remedy.
//!
//! Every setting has a default. Later layers win: defaults, main file, drop-ins by name, `--set` on the command line.
//! Rule lists (`[[policy.workloads]]`) are joined, later layers first, because the first matching rule wins.
//!
//! The types generate `homeostat config default` and `docs/configuration.md`: names and values from the serialised
//! defaults, texts from the fields' doc comments. So both stay current.

mod catalogue;
pub mod muted;

use crate::api::near_names;
use crate::control::{GROUP_REMEDY, group_id};
use crate::metrics;
pub use homeostat_engine::Policy;
pub use homeostat_meters::MeterSettings;
use homeostat_store::trust;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::ops::Range;
use std::path::{Path, PathBuf};
use toml::Spanned;
use toml::de::{DeTable, DeValue};

pub use catalogue::{Section, SettingText, default_file, introduction, markdown, of_strategies, reference};

/// The sections, in the order of the documentation.
const SECTIONS: [&str; 6] = ["paths", "control", "service", "metrics", "meters", "policy"];
/// Default path of the main file.
pub const MAIN_FILE: &str = "/etc/homeostat/homeostat.toml";
/// Largest configuration file: far above any real one.
const FILE_BYTES_MAX: u64 = 1024 * 1024;
const DROP_INS_MAX: usize = 256;

/// Format of log lines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// For people: `HH:MM:SSZ workload stage: sentence`.
    #[default]
    Human,
    /// One JSON object per line, as `io.homeostat.Follow` sends them.
    Json,
}

/// Where homeostat keeps its files.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Paths {
    /// Directory of the journal and the history. It must survive a restart of the daemon; it need not survive a
    /// reboot, because a reboot undoes everything by itself.
    pub state_directory: PathBuf,
    /// Directory of the control socket and of the progress counters of programs.
    pub run_directory: PathBuf,
}

impl Default for Paths {
    fn default() -> Self {
        Self {
            state_directory: "/var/lib/homeostat".into(),
            run_directory: "/run/homeostat".into(),
        }
    }
}

/// The control socket.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Control {
    /// Path of the socket; empty = `io.homeostat` in the run directory.
    pub socket: PathBuf,
    /// Group whose members may read the state (only root may change anything): a name or a number.
    pub group: String,
}

impl Default for Control {
    fn default() -> Self {
        Self {
            socket: PathBuf::new(),
            group: "root".into(),
        }
    }
}

/// Numbers for monitoring systems.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Metrics {
    /// Address and port where the state can be read as OpenMetrics text, such as `127.0.0.1:9464`, at `/metrics`;
    /// empty = nowhere. It must be a loopback address: every user of this machine may read it then, names of workloads
    /// included.
    pub listen: String,
}

/// How the daemon behaves as a process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Service {
    /// Leave accepted changes in force when the daemon stops. Otherwise the machine is restored.
    pub keep_on_stop: bool,
    /// Lock the daemon's memory, so that it still works when memory is short.
    pub lock_memory: bool,
    /// Raise the daemon's priority (nice −5) and protect it from the out-of-memory killer (score −500).
    pub raise_priority: bool,
    /// `human` or `json`.
    pub log: LogFormat,
}

impl Default for Service {
    fn default() -> Self {
        Self {
            keep_on_stop: false,
            lock_memory: true,
            raise_priority: true,
            log: LogFormat::Human,
        }
    }
}

/// All settings.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Settings {
    /// Where homeostat keeps its files.
    pub paths: Paths,
    /// The control socket.
    pub control: Control,
    /// How the daemon behaves as a process.
    pub service: Service,
    /// Numbers for monitoring systems.
    pub metrics: Metrics,
    /// How useful work is counted where homeostat can not find out by itself.
    pub meters: MeterSettings,
    /// The mind: what is considered, how it is tried, what is kept.
    pub policy: Policy,
}

impl Settings {
    /// Path of the control socket.
    pub fn socket(&self) -> PathBuf {
        if self.control.socket.as_os_str().is_empty() {
            self.paths.run_directory.join("io.homeostat")
        } else {
            self.control.socket.clone()
        }
    }
}

/// Sources of the settings.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sources {
    /// A file named on the command line; it must exist. Without it [`MAIN_FILE`] is read if present.
    pub file: Option<PathBuf>,
    /// `key=value` from the command line, in order; keys without a section belong to `policy`.
    pub set: Vec<String>,
}

/// A complaint about one place of the configuration.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct SettingsError {
    /// File, or `--set …`.
    pub file: String,
    /// Line, from 1; 0 when the whole file is meant.
    pub line: usize,
    /// Column in characters, from 1.
    pub column: usize,
    /// Setting, with dots; empty when unknown.
    pub key: String,
    /// Its value.
    pub value: String,
    /// The fault.
    pub problem: String,
    /// The remedy.
    pub remedy: String,
}

impl fmt::Display for SettingsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.file)?;
        if self.line > 0 {
            write!(f, ":{}:{}", self.line, self.column)?;
        }
        match (self.key.as_str(), self.value.as_str()) {
            ("", _) => {}
            (key, "") => write!(f, ": {key}")?,
            (key, value) => write!(f, ": {key} = {value}")?,
        }
        write!(f, ": {}", self.problem)?;
        if self.remedy.is_empty() {
            Ok(())
        } else {
            write!(f, "\n  hint: {}", self.remedy)
        }
    }
}

impl std::error::Error for SettingsError {}

/// All complaints, one after the other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SettingsErrors(pub Vec<SettingsError>);

impl fmt::Display for SettingsErrors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, error) in self.0.iter().enumerate() {
            if i > 0 {
                f.write_str("\n")?;
            }
            error.fmt(f)?;
        }
        Ok(())
    }
}

impl std::error::Error for SettingsErrors {}

/// The result of reading.
#[derive(Clone, Debug, PartialEq)]
pub struct Loaded {
    /// The settings.
    pub settings: Settings,
    /// The files and `--set` arguments they come from, in order; empty = all defaults.
    pub layers: Vec<String>,
    /// Whether a person chose the seed of the random assignment.
    pub seed_given: bool,
    /// Last place of `policy.mode`; `None` = default.
    pub mode_from: Option<Place>,
}

/// The place of a setting.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// File, or `--set …`.
    pub layer: String,
    /// Line, from 1.
    pub line: usize,
}

impl Place {
    /// Whether it was given on the command line.
    pub fn is_command_line(&self) -> bool {
        self.layer.starts_with(SET)
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.is_command_line() {
            true => f.write_str("the command line"),
            false => write!(f, "{}, line {}", self.layer, self.line),
        }
    }
}

const SET: &str = "--set ";

struct Layer {
    name: String,
    text: String,
}

/// Reads, merges and checks all layers.
///
/// # Errors
/// Every complaint that was found.
pub fn load(sources: &Sources) -> Result<Loaded, SettingsErrors> {
    load_and(sources, Vec::new(), |_| Vec::new())
}

/// As [`load`], and complains about what this machine lacks: only for a daemon that is to run here.
///
/// # Errors
/// Every complaint that was found.
pub fn load_for_daemon(sources: &Sources) -> Result<Loaded, SettingsErrors> {
    load_and(sources, changeable_by_others(sources), |settings| {
        let group = group_id(&settings.control.group).is_none().then(|| {
            (
                "control.group".to_owned(),
                "there is no such group".to_owned(),
                GROUP_REMEDY.to_owned(),
            )
        });
        let passwords = settings.meters.redis_password_files.values();
        let passwords = passwords.filter_map(|file| {
            // The file belongs to its server's user; only the path must be trusted.
            let wrong = file.parent().and_then(trust::distrust)?;
            Some((
                "meters.redis_password_files".to_owned(),
                wrong.to_string(),
                wrong.remedy,
            ))
        });
        group.into_iter().chain(passwords).collect()
    })
}

/// Configuration files that untrusted users may change: their content acts with root's rights.
fn changeable_by_others(sources: &Sources) -> Vec<SettingsError> {
    let main = sources.file.clone().unwrap_or_else(|| PathBuf::from(MAIN_FILE));
    let drop_ins = main.with_extension("d");
    // The directory counts even if empty.
    let files = [main, drop_ins.clone()]
        .into_iter()
        .chain(self::drop_ins(&drop_ins));
    let mut wrong: Vec<trust::Distrust> = files.filter_map(|file| trust::distrust(&file)).collect();
    wrong.dedup();
    wrong
        .into_iter()
        .map(|wrong| *whole_file(&wrong.path, wrong.why, &wrong.remedy))
        .collect()
}

/// Setting, problem, remedy.
type Complaint = (String, String, String);

fn load_and(
    sources: &Sources,
    mut errors: Vec<SettingsError>,
    more: impl Fn(&Settings) -> Vec<Complaint>,
) -> Result<Loaded, SettingsErrors> {
    let mut layers = Vec::new();
    match &sources.file {
        Some(file) => match read(file) {
            Ok(text) => layers.push(Layer {
                name: file.display().to_string(),
                text,
            }),
            Err(e) => errors.push(*e),
        },
        None => {
            let main = Path::new(MAIN_FILE);
            if main.exists() {
                match read(main) {
                    Ok(text) => layers.push(Layer {
                        name: MAIN_FILE.to_owned(),
                        text,
                    }),
                    Err(e) => errors.push(*e),
                }
            }
        }
    }
    let main = sources.file.clone().unwrap_or_else(|| PathBuf::from(MAIN_FILE));
    for file in drop_ins(&main.with_extension("d")) {
        match read(&file) {
            Ok(text) => layers.push(Layer {
                name: file.display().to_string(),
                text,
            }),
            Err(e) => errors.push(*e),
        }
    }
    for set in &sources.set {
        match set_layer(set) {
            Ok(layer) => layers.push(layer),
            Err(e) => errors.push(*e),
        }
    }
    let merged = merge(&layers, more, &mut errors);
    match (merged, errors.is_empty()) {
        (Some(loaded), true) => Ok(loaded),
        _ => Err(SettingsErrors(errors)),
    }
}

fn whole_file(file: &Path, problem: String, remedy: &str) -> Box<SettingsError> {
    Box::new(SettingsError {
        file: file.display().to_string(),
        line: 0,
        column: 0,
        key: String::new(),
        value: String::new(),
        problem,
        remedy: remedy.to_owned(),
    })
}

fn read(file: &Path) -> Result<String, Box<SettingsError>> {
    let size = std::fs::metadata(file).map_err(|e| {
        whole_file(
            file,
            format!("can not be read: {e}"),
            "check the path and its permissions, or leave it out",
        )
    })?;
    if !size.is_file() || size.len() > FILE_BYTES_MAX {
        return Err(whole_file(
            file,
            "is not a configuration file (a regular file of at most 1 MiB)".into(),
            "name another file, or move this one out of the directory",
        ));
    }
    std::fs::read_to_string(file).map_err(|e| {
        whole_file(
            file,
            format!("can not be read: {e}"),
            "the file must be UTF-8 text that root may read",
        )
    })
}

fn drop_ins(directory: &Path) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(directory) else {
        return Vec::new();
    };
    let mut files: Vec<PathBuf> = entries
        .filter_map(|e| e.ok().map(|e| e.path()))
        .filter(|p| p.extension().is_some_and(|x| x == "toml"))
        .take(DROP_INS_MAX)
        .collect();
    files.sort();
    files
}

/// `key=value` as a layer: the value is TOML if it parses, else text.
fn set_layer(set: &str) -> Result<Layer, Box<SettingsError>> {
    let name = format!("{SET}{set}");
    let Some((key, value)) = set.split_once('=') else {
        return Err(whole_file(
            Path::new(&name),
            "has no '='".into(),
            "write --set key=value",
        ));
    };
    let (key, value) = (key.trim(), value.trim());
    let head = key.split('.').next().unwrap_or(key);
    let key = if SECTIONS.contains(&head) {
        key.to_owned()
    } else {
        format!("policy.{key}")
    };
    let mut text = format!("{key} = {value}\n");
    if DeTable::parse(&text).is_err() {
        text = format!("{key} = {}\n", toml::Value::String(value.to_owned()));
    }
    Ok(Layer { name, text })
}

fn merge(
    layers: &[Layer],
    more: impl Fn(&Settings) -> Vec<Complaint>,
    errors: &mut Vec<SettingsError>,
) -> Option<Loaded> {
    let mut merged = toml::Table::new();
    for layer in layers {
        match check_layer(layer) {
            Ok(table) => merge_table(&mut merged, table, ""),
            Err(e) => errors.push(*e),
        }
    }
    let seed_given = merged.get("policy").and_then(|p| p.get("seed")).is_some();
    // Each layer has valid types, so only a contradiction between layers fails here.
    let settings: Settings = match toml::Value::Table(merged).try_into() {
        Ok(settings) => settings,
        Err(e) => {
            errors.push(SettingsError {
                file: layers
                    .iter()
                    .map(|l| l.name.as_str())
                    .collect::<Vec<_>>()
                    .join(" + "),
                line: 0,
                column: 0,
                key: String::new(),
                value: String::new(),
                problem: e.message().to_owned(),
                remedy: "the files do not go together; remove one of them".into(),
            });
            return None;
        }
    };
    let crossed = crossed(&settings);
    for (key, problem, remedy) in complaints(&settings).into_iter().chain(more(&settings)) {
        // Crossed bounds are reported once, below, at the setting that a person wrote.
        if !crossed.iter().any(|pair| pair.low == key || pair.high == key) {
            errors.push(place(layers, &key, problem, remedy));
        }
    }
    for pair in crossed {
        errors.push(pair.complaint(layers));
    }
    Some(Loaded {
        settings,
        layers: layers.iter().map(|l| l.name.clone()).collect(),
        seed_given,
        mode_from: written_at(layers, "policy.mode"),
    })
}

fn written_at(layers: &[Layer], key: &str) -> Option<Place> {
    layers.iter().rev().find_map(|layer| {
        let table = DeTable::parse(&layer.text).ok()?;
        let span = value_span(table.get_ref(), key)?;
        Some(Place {
            layer: layer.name.clone(),
            line: position(&layer.text, span.start).0,
        })
    })
}

fn merge_table(into: &mut toml::Table, from: toml::Table, section: &str) {
    for (key, value) in from {
        match (into.get_mut(&key), value) {
            (Some(toml::Value::Table(old)), toml::Value::Table(new)) => merge_table(old, new, &key),
            // Rules join. Other lists are replaced, also meters of a workload that are tables.
            (Some(toml::Value::Array(old)), toml::Value::Array(mut new))
                if section == "policy"
                    && key == "workloads"
                    && new.iter().chain(old.iter()).all(toml::Value::is_table) =>
            {
                new.append(old);
                *old = new;
            }
            (_, value) => {
                into.insert(key, value);
            }
        }
    }
}

fn check_layer(layer: &Layer) -> Result<toml::Table, Box<SettingsError>> {
    if let Err(e) = toml::from_str::<Settings>(&layer.text) {
        return Err(Box::new(explain(layer, &e)));
    }
    toml::from_str::<toml::Table>(&layer.text).map_err(|e| Box::new(explain(layer, &e)))
}

const METERS_REMEDY: &str = "write for example: [\"uprobe:shop:handle_order\"] or, to say what one count is, \
                             [{ meter = \"uprobe:shop:handle_order\", unit = \"order\" }]; what a count costs is measured";

/// Turns a parser error into a complaint with a remedy.
fn explain(layer: &Layer, error: &toml::de::Error) -> SettingsError {
    let span = error.span().unwrap_or(0..0);
    let (line, column) = position(&layer.text, span.start);
    let problem = error.message().lines().next().unwrap_or_default().to_owned();
    let parsed = DeTable::parse(&layer.text).ok();
    let syntax = parsed.is_none();
    let found = parsed.as_ref().and_then(|t| key_at(t.get_ref(), &span, ""));
    let (key, value) = found.unwrap_or_default();
    let value = clip(layer.text.get(value).unwrap_or_default());
    let remedy = if syntax {
        "the file is not TOML here: keys are `name = value`, text stands in \"quotes\", sections in [brackets]".into()
    } else if key.starts_with("meters.configured.") {
        METERS_REMEDY.into()
    } else if problem.contains("unknown field") {
        unknown_key_remedy(&key)
    } else {
        match catalogue::example(&key) {
            Some(example) => format!("write for example: {example}"),
            None => "`homeostat config default` shows every setting with its meaning".into(),
        }
    };
    // After an unknown name the parser lists all known names; the remedy names the likely one instead.
    let problem = match problem.split_once(", expected ") {
        Some((short, _)) if problem.contains("unknown field") => {
            short.replace("unknown field", "unknown setting")
        }
        _ => problem,
    };
    SettingsError {
        file: layer.name.clone(),
        line,
        column,
        key,
        value,
        problem,
        remedy,
    }
}

fn unknown_key_remedy(key: &str) -> String {
    let known = catalogue::keys();
    let (section, name) = key.rsplit_once('.').unwrap_or(("", key));
    let candidates: Vec<&str> = known
        .iter()
        .filter_map(|k| {
            let (s, n) = k.rsplit_once('.').unwrap_or(("", k));
            (s == section).then_some(n)
        })
        .collect();
    let near = near_names(name, candidates.iter().copied());
    if let Some(best) = near.first() {
        return format!("did you mean `{best}`? `homeostat config default` shows every setting");
    }
    // The right name in the wrong section.
    match known
        .iter()
        .find(|k| k.rsplit_once('.').map_or(k.as_str(), |(_, n)| n) == name)
    {
        Some(elsewhere) => format!("did you mean `{elsewhere}`? it belongs to another section"),
        None => "remove it; `homeostat config default` shows every setting".into(),
    }
}

fn clip(text: &str) -> String {
    let line = text.lines().next().unwrap_or_default();
    if line.chars().count() > 60 {
        line.chars().take(60).chain(['…']).collect()
    } else {
        line.to_owned()
    }
}

/// Line and column (in characters), from 1.
fn position(text: &str, offset: usize) -> (usize, usize) {
    let before = text.get(..offset.min(text.len())).unwrap_or(text);
    let line = before.matches('\n').count() + 1;
    let column = before.rsplit('\n').next().unwrap_or_default().chars().count() + 1;
    (line, column)
}

/// The setting at a place of the text: its dotted name, and the place of its value.
fn key_at(table: &DeTable<'_>, span: &Range<usize>, prefix: &str) -> Option<(String, Range<usize>)> {
    for (key, value) in table {
        let name = if prefix.is_empty() {
            key.get_ref().to_string()
        } else {
            format!("{prefix}.{}", key.get_ref())
        };
        if overlaps(&key.span(), span) {
            return Some((name, value.span()));
        }
        if let Some(inner) = key_in(value, span, &name) {
            return Some(inner);
        }
    }
    None
}

fn key_in(value: &Spanned<DeValue<'_>>, span: &Range<usize>, name: &str) -> Option<(String, Range<usize>)> {
    match value.get_ref() {
        DeValue::Table(table) => {
            if let Some(inner) = key_at(table, span, name) {
                return Some(inner);
            }
        }
        DeValue::Array(items) => {
            if let Some(inner) = items.iter().find_map(|item| key_in(item, span, name)) {
                return Some(inner);
            }
        }
        _ => {}
    }
    overlaps(&value.span(), span).then(|| (name.to_owned(), value.span()))
}

fn overlaps(a: &Range<usize>, b: &Range<usize>) -> bool {
    a.start < b.end.max(b.start + 1) && b.start < a.end
}

/// Two settings in the wrong order: the first must not exceed the second.
struct Crossed {
    low: &'static str,
    high: &'static str,
    values: (f64, f64),
}

fn crossed(settings: &Settings) -> Vec<Crossed> {
    let policy = &settings.policy;
    let trial = &policy.trial;
    [
        (
            "policy.observe_min_s",
            policy.observe_min_s,
            "policy.observe_max_s",
            policy.observe_max_s,
        ),
        (
            "policy.washout_min_s",
            policy.washout_min_s,
            "policy.washout_max_s",
            policy.washout_max_s,
        ),
        ("policy.trial.gate", trial.gate, "policy.trial.delta", trial.delta),
        // The first bound would admit what the second refuses.
        (
            "meters.probe_cost_max",
            settings.meters.probe_cost_max,
            "policy.meter_cost_max",
            policy.meter_cost_max,
        ),
    ]
    .into_iter()
    .filter(|(_, low, _, high)| low > high)
    .map(|(low, a, high, b)| Crossed {
        low,
        high,
        values: (a, b),
    })
    .collect()
}

impl Crossed {
    /// Blames the setting that was written last and names the other's value.
    fn complaint(&self, layers: &[Layer]) -> SettingsError {
        let written = |key: &str| {
            layers.iter().enumerate().rev().find_map(|(i, layer)| {
                let table = DeTable::parse(&layer.text).ok()?;
                Some((i, value_span(table.get_ref(), key)?.start))
            })
        };
        let (a, b) = self.values;
        if written(self.low) > written(self.high) {
            place(
                layers,
                self.low,
                format!("must not be above {}, which is {b}", self.high),
                format!("lower it, or raise {}", self.high),
            )
        } else {
            place(
                layers,
                self.high,
                format!("must not be below {}, which is {a}", self.low),
                format!("raise it, or lower {}", self.low),
            )
        }
    }
}

fn complaints(settings: &Settings) -> Vec<Complaint> {
    let mut found = Vec::new();
    let policy = &settings.policy;
    let ranges = [
        ("meters", settings.meters.validate()),
        ("policy", policy.validate()),
        ("policy.trial", policy.trial.validate()),
        ("policy.discovery", policy.discovery.validate()),
    ];
    for (section, text) in ranges
        .into_iter()
        .flat_map(|(s, texts)| texts.into_iter().map(move |t| (s, t)))
    {
        let (name, rest) = text.split_once(" = ").unwrap_or((text.as_str(), ""));
        let key = format!("{section}.{}", name.split(' ').next().unwrap_or(name));
        let problem = rest
            .split_once(": ")
            .map_or(text.clone(), |(_, rule)| rule.to_owned());
        let remedy = match catalogue::default_of(&key) {
            Some(default) => format!("the default is {default}"),
            None => "`homeostat config default` shows every setting with its meaning".into(),
        };
        found.push((key, problem, remedy));
    }
    let known: Vec<String> = homeostat_strategies::all()
        .iter()
        .map(|s| s.id().to_string())
        .collect();
    let named = std::iter::once(("policy.strategies".to_owned(), &policy.strategies)).chain(
        policy
            .workloads
            .iter()
            .map(|rule| ("policy.workloads".to_owned(), &rule.strategies)),
    );
    for (key, strategies) in named {
        for name in strategies.keys().filter(|name| !known.contains(name)) {
            found.push((
                key.clone(),
                format!("there is no strategy {name:?}"),
                format!("the strategies are: {}", known.join(", ")),
            ));
        }
    }
    let paths = [
        ("paths.state_directory", &settings.paths.state_directory, false),
        ("paths.run_directory", &settings.paths.run_directory, false),
        (
            "meters.progress_directory",
            &settings.meters.progress_directory,
            false,
        ),
        ("control.socket", &settings.control.socket, true),
    ];
    for (key, path, may_be_empty) in paths {
        let unset = may_be_empty && path.as_os_str().is_empty();
        if !path.is_absolute() && !unset {
            found.push((
                key.into(),
                "is not an absolute path".into(),
                "begin it with /".into(),
            ));
        }
    }
    if let Err(e) = metrics::endpoint::address(&settings.metrics.listen) {
        found.push((
            "metrics.listen".into(),
            "is not a loopback address with a port".into(),
            e.remedy().into(),
        ));
    }
    // sockaddr_un holds 108 bytes, one of them the closing zero.
    if settings.socket().as_os_str().len() > 107 {
        found.push((
            "control.socket".into(),
            "is longer than 107 bytes, which the kernel does not allow".into(),
            "choose a shorter path".into(),
        ));
    }
    found.extend(complaints_of_strategies(policy));
    for rule in &settings.policy.workloads {
        if rule.pattern.is_empty() {
            found.push((
                "policy.workloads".into(),
                "a rule has no `match`".into(),
                "name the workload: match = \"redis*\"".into(),
            ));
        } else if rule.never && rule.always {
            found.push((
                "policy.workloads".into(),
                format!("the rule for {:?} says both never and always", rule.pattern),
                "keep one of the two".into(),
            ));
        }
    }
    for pattern in policy.one_owner.iter().flatten() {
        // A rule that matches nothing would be silently ignored.
        if pattern != "machine" && !pattern.contains([':', '*']) {
            found.push((
                "policy.one_owner".into(),
                format!("{pattern:?} is no owner"),
                "name owners as `homeostat status --json` does: machine, user:1000, pod:*".into(),
            ));
        }
    }
    found.extend(complaints_of_meters(&settings.meters));
    found
}

fn complaints_of_meters(meters: &MeterSettings) -> Vec<Complaint> {
    let mut found = Vec::new();
    let key = |pattern: &str| format!("meters.configured.{pattern}");
    for (pattern, entries) in &meters.configured {
        for entry in entries {
            let mut complain = |problem: String, remedy: &str| {
                found.push((key(pattern), problem, remedy.to_owned()));
            };
            if let Some((problem, remedy)) = meter_complaint(&entry.meter) {
                complain(format!("{:?} {problem}", entry.meter), remedy);
            }
            if let Some(unit) = &entry.unit {
                if let Some(problem) = unit_complaint(unit) {
                    complain(
                        format!("the unit {} {problem}", clip(&format!("{unit:?}"))),
                        "say in 1 to 40 characters what one count is: unit = \"order\"",
                    );
                }
            }
        }
    }
    for [(other, earlier), (pattern, entry)] in meters.contradictions() {
        let [one, two] = [earlier, entry].map(|entry| entry.unit.as_deref().unwrap_or_default());
        let meter = &entry.meter;
        let (problem, remedy) = if other == pattern {
            (
                format!("says that one count of {meter:?} is {one:?}, and that it is {two:?}"),
                "keep one of the two units",
            )
        } else {
            (
                format!("says that one count of {meter:?} is {two:?}, and {other:?} that it is {one:?}"),
                "keep one of the two units, or write patterns that cannot both fit one workload",
            )
        };
        found.push((key(pattern), problem, remedy.to_owned()));
    }
    found
}

/// Complaints about settings of single strategies: an unread setting would switch nothing off.
fn complaints_of_strategies(policy: &Policy) -> Vec<Complaint> {
    let strategies = homeostat_strategies::all();
    let mut found = Vec::new();
    for (strategy, values) in &policy.settings {
        let section = format!("policy.settings.{strategy}");
        let Some(known) = strategies.iter().find(|s| s.id().as_str() == strategy) else {
            let names: Vec<String> = strategies
                .iter()
                .filter(|s| !s.settings().is_empty())
                .map(|s| s.id().to_string())
                .collect();
            found.push((
                section,
                format!("there is no strategy {strategy:?}"),
                format!("strategies with settings are: {}", names.join(", ")),
            ));
            continue;
        };
        for (name, value) in values {
            let key = format!("{section}.{name}");
            match known.settings().iter().find(|setting| setting.name == name) {
                None => {
                    let names: Vec<&str> = known.settings().iter().map(|setting| setting.name).collect();
                    found.push((
                        key,
                        format!("{strategy} has no setting {name:?}"),
                        format!("its settings are: {}", names.join(", ")),
                    ));
                }
                Some(setting) if !(setting.low..=setting.high).contains(value) => found.push((
                    key,
                    format!("must be from {} to {}", setting.low, setting.high),
                    format!("the default is {}", setting.default),
                )),
                Some(_) => {}
            }
        }
    }
    found
}

/// A name or a whole path: a relative path is searched in no directory.
fn names_a_file(binary: &str) -> bool {
    !binary.is_empty() && (binary.starts_with('/') || !binary.contains('/'))
}

fn unit_complaint(unit: &str) -> Option<&'static str> {
    if unit.trim().is_empty() {
        Some("is blank")
    } else if unit.trim() != unit {
        Some("begins or ends with a space")
    } else if unit.chars().count() > 40 {
        Some("is longer than 40 characters")
    } else if unit.chars().any(char::is_control) {
        Some("has a control character in it")
    } else {
        None
    }
}

fn meter_complaint(meter: &str) -> Option<(&'static str, &'static str)> {
    let Some((kind, rest)) = meter.split_once(':') else {
        return Some((
            "names no kind of meter",
            "begin it with uprobe:, usdt: or prometheus:",
        ));
    };
    match kind {
        "uprobe" => (rest.rsplit_once(':').is_none_or(|(file, function)| !names_a_file(file) || function.is_empty()))
            .then_some((
                "is not a uprobe",
                "write uprobe:BINARY:FUNCTION; BINARY is the name of the program or of a library that it has loaded, or the whole path of \
                 either",
            )),
        "usdt" => {
            let parts: Vec<&str> = rest.rsplitn(3, ':').collect();
            let is_one = matches!(parts[..], [name, provider, file] if names_a_file(file) && !provider.is_empty() && !name.is_empty());
            (!is_one).then_some((
                "is not a USDT probe",
                "write usdt:BINARY:PROVIDER:PROBE; BINARY is the name of the program or of a library that it has loaded, or the whole path \
                 of either",
            ))
        }
        "prometheus" => (!rest.starts_with("http://") || !rest.contains('#')).then_some((
            "is not a Prometheus metric",
            "write prometheus:http://127.0.0.1:9090/metrics#name_of_the_metric",
        )),
        _ => Some((
            "is of a kind that does not exist",
            "begin it with uprobe:, usdt: or prometheus:",
        )),
    }
}

fn place(layers: &[Layer], key: &str, problem: String, remedy: String) -> SettingsError {
    for layer in layers.iter().rev() {
        let Ok(table) = DeTable::parse(&layer.text) else {
            continue;
        };
        if let Some(span) = value_span(table.get_ref(), key) {
            let (line, column) = position(&layer.text, span.start);
            let value = clip(layer.text.get(span).unwrap_or_default());
            return SettingsError {
                file: layer.name.clone(),
                line,
                column,
                key: key.to_owned(),
                value,
                problem,
                remedy,
            };
        }
    }
    SettingsError {
        file: "settings".into(),
        line: 0,
        column: 0,
        key: key.to_owned(),
        value: String::new(),
        problem,
        remedy,
    }
}

fn value_span(table: &DeTable<'_>, key: &str) -> Option<Range<usize>> {
    for (name, value) in table {
        let name: &str = name.get_ref();
        if name == key {
            return Some(value.span());
        }
        let rest = key.strip_prefix(name).and_then(|r| r.strip_prefix('.'));
        if let (Some(rest), DeValue::Table(inner)) = (rest, value.get_ref()) {
            if let Some(span) = value_span(inner, rest) {
                return Some(span);
            }
        }
    }
    None
}

/// `key=value` for [`Sources::set`], with the text quoted.
pub fn assignment(key: &str, text: &str) -> String {
    format!("{key}={}", toml::Value::String(text.to_owned()))
}

/// The settings in force as TOML.
pub fn show(settings: &Settings) -> String {
    toml::to_string(settings).unwrap_or_else(|e| format!("# the settings can not be shown as TOML: {e}\n"))
}

#[cfg(test)]
mod tests;
