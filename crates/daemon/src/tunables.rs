//! `homeostat tunable`: kernel settings as people and scripts see them, and changes by hand. The rules of
//! [`crate::api`] hold for the JSON shapes. Nothing here needs the daemon: its log of this boot ([`crate::watch`]) and
//! its journal are on disk. Settings by hand have their own journal, `settings` in the state directory. So a stopping
//! daemon keeps them, and `unset` can undo them.

use crate::api::SCHEMA;
use crate::watch;
use homeostat_effectors::Registry;
use homeostat_kernel::Root;
use homeostat_kernel::clock::MonotonicClock;
use homeostat_model::action::Target;
use homeostat_model::setting::{is_one_setting, other_of_pair};
use homeostat_model::{Action, ActionId, ExperimentKind, ExperimentRecord, Nanoseconds};
use homeostat_platform::Clock;
pub use homeostat_runtime::by_hand::ByHandError;
use homeostat_runtime::{RecoveryReport, by_hand, restore_within};
use homeostat_store::history::{ExperimentFilter, HISTORY_FILE};
use homeostat_store::journal::{self, Owed, OwedState};
use homeostat_store::{History, Journal, JournalError, JournalOptions};
use homeostat_tunables::catalogue::CatalogueError;
use homeostat_tunables::configured::{pattern, sysctl_path};
use homeostat_tunables::reading::Reading;
use homeostat_tunables::settings::{Host, Known, Own, Said, Setting, Watched};
use homeostat_tunables::snapshot::{self, Snapshot};
use homeostat_tunables::{Applies, Catalogue, Facts, Found, Kind, Origin, Tree, stale};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// The groups of the catalogue, for the command line.
pub const GROUPS: [&str; 18] = [
    "vm",
    "kernel",
    "fs",
    "net.core",
    "net.ipv4",
    "net.other",
    "thp",
    "khugepaged",
    "ksm",
    "zswap",
    "mm",
    "sched",
    "block",
    "cpu",
    "irq",
    "link",
    "module",
    "boot",
];
/// Ways of setting, as in [`SetBy::kind`], for the command line.
pub const KINDS: [&str; 15] = [
    "default",
    "kernel",
    "kernel_command_line",
    "module_options",
    "sysctl_file",
    "udev_rule",
    "tmpfiles",
    "sysfs_file",
    "systemd_unit",
    "boot_script",
    "tuned_profile",
    "run_time",
    "command",
    "homeostat",
    "unknown",
];
/// Directory of the journal of what people set, in the state directory.
pub const JOURNAL_DIRECTORY: &str = "settings";

/// Names of the settings without a device in them, the same on every machine. For completion.
pub fn names() -> &'static [String] {
    static NAMES: OnceLock<Vec<String>> = OnceLock::new();
    NAMES.get_or_init(|| {
        // Commands that read a setting report a broken catalogue.
        let tunables = Catalogue::load().map(|c| c.tunables).unwrap_or_default();
        tunables
            .into_iter()
            .map(|t| t.name)
            .filter(|n| !n.contains('*'))
            .collect()
    })
}
/// Stands for the workload of such changes in the journal.
const WORKLOAD: &str = "host";
/// Time limit of recovering settings by hand, after homeostat's changes. A setting is written at once.
pub(crate) const RECOVERY_PATIENCE: Nanoseconds = Nanoseconds::from_secs(20);
/// Argument of the action: when a person asked.
const AT: &str = "at_unix";
/// Most suggestions for an unknown name.
const NEAR_MAX: usize = 6;
const SNAPSHOT_BYTES_MAX: u64 = 16 * 1024 * 1024;

/// The origin of a setting.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SetBy {
    /// `default`, `kernel` (set by the kernel itself), `sysctl_file`, `kernel_command_line`, `module_options`, `udev_rule`, `tmpfiles`, `sysfs_file`,
    /// `systemd_unit`, `boot_script`, `tuned_profile`, `run_time`, `command` (`homeostat tunable set`), `homeostat` or
    /// `unknown`.
    pub kind: String,
    /// In words: file and line, parameter, program.
    pub text: String,
    /// When, where that is known.
    pub at_unix: Option<u64>,
    /// Number of the action of homeostat, or of the change by `homeostat tunable set`.
    pub change: Option<u64>,
}

/// A line somewhere about a setting.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Line {
    /// Kind of place, as in [`SetBy::kind`].
    pub kind: String,
    /// The place.
    pub place: String,
    /// The value that it says.
    pub value: String,
    /// Whether that value is in force.
    pub in_force: bool,
    /// Doubts: why the line may have no effect, or why the kernel refuses its value. Empty without doubts.
    #[serde(default)]
    pub note: String,
}

/// An experiment about a setting.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Trial {
    /// Number, for `homeostat history`.
    pub id: u64,
    /// Workload.
    pub workload: String,
    /// Verdict; absent while it runs.
    pub verdict: Option<String>,
    /// Best estimate of the gain as a share.
    pub effect: Option<f64>,
    /// When it ended.
    pub ended_unix: u64,
}

/// One setting (`homeostat tunable list --json`, `show --json`).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Tunable {
    /// Name.
    pub name: String,
    /// File; `cmdline:NAME` for a parameter of the kernel's command line.
    pub path: String,
    /// Group.
    pub group: String,
    /// Value now; absent when it has none.
    pub value: Option<String>,
    /// `set`, `absent` (this kernel or machine does not have it), `denied` or `unreadable`.
    pub state: String,
    /// The kernel's own value; absent when that is not known.
    pub default: Option<String>,
    /// Whether the value differs from the kernel's own; absent when that is not known.
    pub changed: Option<bool>,
    /// Value when the daemon was first started in this boot.
    pub boot: Option<String>,
    /// Its permitted values.
    pub values: String,
    /// Unit.
    pub unit: String,
    /// `dynamic`, `boot` or `restricted`.
    pub r#type: String,
    /// First kernel that had it.
    pub since: String,
    /// Its effect.
    pub what: String,
    /// Source of the documentation.
    pub source: String,
    /// Its origin; absent without a value.
    pub set_by: Option<SetBy>,
    /// Its lines in files, in the order of effect.
    pub lines: Vec<Line>,
    /// Name of the strategy of homeostat that experiments with it.
    pub strategy: Option<String>,
    /// Experiments about it here, newest first.
    pub experiments: Vec<Trial>,
    /// An objection to its value on this machine.
    pub warning: Option<String>,
}

/// Many settings.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Tunables {
    /// Version of these shapes.
    pub schema: u32,
    /// Kernel release.
    pub kernel: String,
    /// Since when the daemon has watched in this boot; absent when it has not.
    pub watched_since_unix: Option<u64>,
    /// The settings.
    pub settings: Vec<Tunable>,
}

/// A finding of `homeostat tunable check`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Finding {
    /// `differs`, `missing_here`, `missing_there`, `ignored`, `not_in_force`, `conflict` or `works_against`.
    pub kind: String,
    /// Setting.
    pub name: String,
    /// Value here.
    pub here: Option<String>,
    /// Value in the snapshot.
    pub there: Option<String>,
    /// Its place in a file.
    pub place: String,
    /// The message.
    pub text: String,
}

/// The findings of `homeostat tunable check`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Check {
    /// Version of these shapes.
    pub schema: u32,
    /// The other machine and its kernel, when one was compared.
    pub compared_with: Option<String>,
    /// Checked settings.
    pub looked_at: u64,
    /// The findings.
    pub findings: Vec<Finding>,
}

/// The effect of a change by hand, real or planned.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Changed {
    /// Version of these shapes.
    pub schema: u32,
    /// Whether it was only tried.
    pub dry_run: bool,
    /// The changes.
    pub changes: Vec<OneChange>,
}

/// One setting that was changed or put back.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct OneChange {
    /// Setting.
    pub name: String,
    /// File.
    pub path: String,
    /// Value before.
    pub from: String,
    /// Value after.
    pub to: String,
    /// Number of the change; absent when it was only tried.
    pub change: Option<u64>,
    /// A remark.
    pub remark: String,
}

/// Why a command about settings failed.
#[derive(Debug, thiserror::Error)]
pub enum TunableError {
    /// A bug of ours.
    #[error(transparent)]
    Catalogue(#[from] CatalogueError),
    /// No such setting.
    #[error("no setting is called {name:?}{}", near_text(near))]
    NotFound {
        /// The requested name.
        name: String,
        /// Similar names.
        near: Vec<String>,
    },
    /// The name means several settings.
    #[error("{name:?} stands for several settings: {}\n  hint: name one of them", several.join(", "))]
    Several {
        /// The requested name.
        name: String,
        /// Those.
        several: Vec<String>,
    },
    /// The value is not allowed.
    #[error("{name}: {why}")]
    Value {
        /// Setting.
        name: String,
        /// Why.
        why: String,
    },
    /// It cannot be changed while the machine runs.
    #[error(
        "{name} can be changed on the kernel's command line only\n  hint: add {parameter} to it (GRUB_CMDLINE_LINUX) and boot"
    )]
    BootOnly {
        /// Setting.
        name: String,
        /// The parameter to write there.
        parameter: String,
    },
    /// It has no value here.
    #[error("{name} cannot be changed here: {why}")]
    NotHere {
        /// Setting.
        name: String,
        /// Why.
        why: String,
    },
    /// A wrong value can stop the machine.
    #[error(
        "{name} is restricted: a wrong value can stop the machine or take something away from it\n  hint: `homeostat tunable show {name}` says what it does; --restricted changes it"
    )]
    Restricted {
        /// Setting.
        name: String,
    },
    /// Somebody chose the value.
    #[error(
        "{name} = {value} was chosen by somebody: {by}\n  hint: --force changes it until the next boot; to change it for good, change it there"
    )]
    Chosen {
        /// Setting.
        name: String,
        /// Value.
        value: String,
        /// The other party.
        by: String,
    },
    /// homeostat has the setting in hand.
    #[error(
        "{name} = {value} is what homeostat tries or keeps there now (change {action})\n  hint: `homeostat undo {action}` first, so that what is put back later is not homeostat's value"
    )]
    Ours {
        /// Setting.
        name: String,
        /// Value.
        value: String,
        /// Number of the change.
        action: u64,
    },
    /// homeostat's journal or the machine refused.
    #[error("{0}")]
    ByHand(#[from] ByHandError),
    /// The journal cannot be used.
    #[error("{0}")]
    Journal(#[from] JournalError),
    /// Nothing was set by this command.
    #[error(
        "{0} was not set by `homeostat tunable set`, so there is nothing to take back\n  hint: `homeostat tunable show {0}` says who set it"
    )]
    NotSet(String),
    /// A privilege is missing.
    #[error("changing settings needs root")]
    Privilege(#[source] std::io::Error),
    /// A file cannot be used.
    #[error("{}: {source}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A file is no snapshot.
    #[error("{} is no snapshot of settings: {why}\n  hint: `homeostat tunable snapshot -o FILE` makes one", path.display())]
    NoSnapshot {
        /// The file.
        path: PathBuf,
        /// Why.
        why: String,
    },
}

fn near_text(near: &[String]) -> String {
    if near.is_empty() {
        "\n  hint: `homeostat tunable list` lists them".to_owned()
    } else {
        format!("\n  hint: did you mean {}?", near.join(" or "))
    }
}

/// The directories to read.
#[derive(Clone, Debug)]
pub struct Places {
    /// Directory that holds the files of a captured machine; `None` = this one.
    pub root: Option<PathBuf>,
    /// The daemon's state directory.
    pub state_directory: PathBuf,
    /// The daemon's run directory.
    pub run_directory: PathBuf,
}

/// Selection for the list.
#[derive(Clone, Debug, Default)]
pub struct Filter {
    /// Names, parts of names, or patterns with `*`; any of them. Empty = all.
    pub names: Vec<String>,
    /// One group.
    pub group: Option<String>,
    /// Only settings that differ from the kernel's value or, if that is unknown, were chosen by somebody.
    pub changed: bool,
    /// Only what was set in one of these ways ([`SetBy::kind`]).
    pub set_by: Vec<String>,
    /// Also what this machine does not have.
    pub absent: bool,
}

/// A surveyed machine.
pub struct Survey {
    root: Root,
    catalogue: Catalogue,
    watched: Option<Watched>,
    own: Vec<Own>,
    trials: BTreeMap<String, Vec<Trial>>,
}

const TRIALS_MAX: usize = 5;
const PAST_MAX: u32 = 500;

impl Survey {
    /// Collects knowledge besides the settings themselves.
    ///
    /// # Errors
    /// A bug of ours.
    pub fn begin(places: &Places) -> Result<Self, TunableError> {
        let root = places.root.clone().map(Root::new).unwrap_or_default();
        let mut survey = Self {
            catalogue: Catalogue::load()?,
            watched: None,
            own: Vec::new(),
            trials: BTreeMap::new(),
            root,
        };
        if survey.root.is_live() {
            let boot = boot_id(&survey.root);
            survey.watched = watch::read(&places.run_directory).filter(|w| w.boot_id == boot);
            let past = past(&places.state_directory);
            survey.own = own_changes(&places.state_directory, &boot);
            for own in survey.own.iter_mut().filter(|o| o.by_command.is_none()) {
                own.experiment = past.iter().find(|e| e.action.0 == own.action).map(|e| e.id.0);
            }
            survey.trials = trials(&past);
        }
        survey.own.extend(zeros(&survey.own));
        Ok(survey)
    }

    fn known(&self) -> Known<'_> {
        Known {
            watched: self.watched.as_ref(),
            own: &self.own,
        }
    }

    /// The settings that pass a filter.
    pub fn list(&self, filter: &Filter) -> Tunables {
        let host = Host::read(&self.root);
        let settings = host.settings(&self.catalogue);
        let shown = settings
            .iter()
            .filter(|s| filter.absent || s.found != Found::Absent)
            .filter(|s| filter.group.as_ref().is_none_or(|g| *g == s.tunable.group))
            .filter(|s| filter.names.is_empty() || filter.names.iter().any(|n| is_meant(n, s)))
            .filter(|s| !filter.changed || self.is_changed(&host, s))
            .map(|s| self.describe(&host, s))
            .filter(|t| {
                filter.set_by.is_empty()
                    || t.set_by
                        .as_ref()
                        .is_some_and(|by| filter.set_by.contains(&by.kind))
            })
            .collect();
        Tunables {
            schema: SCHEMA,
            kernel: host.facts.release_text.clone(),
            watched_since_unix: self.watched.as_ref().map(|w| w.since_unix),
            settings: shown,
        }
    }

    /// Whether a value differs from the kernel's, or if that is unknown, whether somebody chose it.
    fn is_changed(&self, host: &Host<'_>, setting: &Setting<'_>) -> bool {
        setting.is_changed().unwrap_or_else(|| {
            host.origin(setting, &self.known())
                .is_some_and(|origin| origin.is_choice())
        })
    }

    /// The settings of a name: one by name or file, or several by a pattern.
    ///
    /// # Errors
    /// [`TunableError::NotFound`].
    pub fn show(&self, name: &str) -> Result<Tunables, TunableError> {
        let host = Host::read(&self.root);
        let settings = host.settings(&self.catalogue);
        let meant = find(&settings, name)?;
        Ok(Tunables {
            schema: SCHEMA,
            kernel: host.facts.release_text.clone(),
            watched_since_unix: self.watched.as_ref().map(|w| w.since_unix),
            settings: meant.into_iter().map(|s| self.describe(&host, s)).collect(),
        })
    }

    fn describe(&self, host: &Host<'_>, setting: &Setting<'_>) -> Tunable {
        let t = setting.tunable;
        let value = setting.found.value();
        let (text, state) = match &setting.found {
            Found::Value(v) => (Some(v.clone()), "set"),
            Found::Absent => (None, "absent"),
            Found::Denied => (None, "denied"),
            Found::Unreadable => (None, "unreadable"),
        };
        Tunable {
            name: setting.name.clone(),
            path: setting.path.clone(),
            group: t.group.clone(),
            value: text,
            state: state.to_owned(),
            default: setting.standard.shown(),
            changed: setting.is_changed(),
            boot: self
                .watched
                .as_ref()
                .and_then(|w| w.boot.get(&setting.path).cloned()),
            values: t.values.to_string(),
            unit: t.unit.clone(),
            r#type: t.kind.name().to_owned(),
            since: t.since.to_string(),
            what: t.what.clone(),
            source: t.source.clone(),
            set_by: host.origin(setting, &self.known()).map(|o| set_by(&o)),
            lines: host.lines_about(setting).iter().map(line).collect(),
            experiments: t
                .strategy
                .as_ref()
                .and_then(|s| self.trials.get(s))
                .cloned()
                .unwrap_or_default(),
            strategy: t.strategy.clone(),
            warning: value
                .filter(|_| setting.is_changed() != Some(false))
                .and_then(|v| stale::against(&self.catalogue, &setting.name, v, host))
                .map(|rule| rule.text.clone()),
        }
    }

    /// A snapshot of this machine.
    pub fn snapshot(&self) -> Snapshot {
        let host = Host::read(&self.root);
        let settings = host.settings(&self.catalogue);
        let name = host.tree.text("/proc/sys/kernel/hostname").unwrap_or_default();
        Snapshot::take(
            &host,
            &settings,
            &self.known(),
            name.trim(),
            MonotonicClock.unix_seconds(),
        )
    }

    /// Stale or harmful settings of this machine, and differences from another.
    pub fn check(&self, other: Option<&Snapshot>) -> Check {
        let host = Host::read(&self.root);
        let settings = host.settings(&self.catalogue);
        let mut findings: Vec<Finding> = Vec::new();
        if let Some(other) = other {
            findings.extend(
                snapshot::compare(&self.catalogue, other, &host, &settings)
                    .into_iter()
                    .map(|d| Finding {
                        kind: d.difference.to_string(),
                        name: d.name,
                        here: d.here,
                        there: d.there,
                        place: String::new(),
                        text: d.remark,
                    }),
            );
        }
        findings.extend(
            stale::find(&self.catalogue, &host, &settings)
                .into_iter()
                .map(|f| Finding {
                    here: settings
                        .iter()
                        .find(|s| s.name == f.name)
                        .and_then(|s| s.found.value().map(str::to_owned)),
                    kind: f.trouble.to_string(),
                    name: f.name,
                    there: None,
                    place: f.place,
                    text: f.text,
                }),
        );
        Check {
            schema: SCHEMA,
            compared_with: other.map(|o| format!("{}, Linux {}", o.host, o.kernel)),
            looked_at: settings.iter().filter(|s| s.found.value().is_some()).count() as u64,
            findings,
        }
    }
}

/// A snapshot from a file.
///
/// # Errors
/// It cannot be read, or is none.
pub fn read_snapshot(path: &Path) -> Result<Snapshot, TunableError> {
    use std::io::Read;
    let file = |source| TunableError::File {
        path: path.to_owned(),
        source,
    };
    let none = |why: String| TunableError::NoSnapshot {
        path: path.to_owned(),
        why,
    };
    let mut text = Vec::new();
    std::fs::File::open(path)
        .map_err(file)?
        .take(SNAPSHOT_BYTES_MAX)
        .read_to_end(&mut text)
        .map_err(file)?;
    let snapshot: Snapshot = serde_json::from_slice(&text).map_err(|e| none(e.to_string()))?;
    if snapshot.schema == snapshot::SCHEMA {
        Ok(snapshot)
    } else {
        Err(none(format!(
            "it has version {}, this program knows {}",
            snapshot.schema,
            snapshot::SCHEMA
        )))
    }
}

/// Writes a file that must not be there yet.
///
/// # Errors
/// It is there, or cannot be written.
pub fn write_new(path: &Path, text: &str) -> Result<(), TunableError> {
    use std::io::Write;
    std::fs::OpenOptions::new()
        .write(true)
        .create_new(true)
        .open(path)
        .and_then(|mut file| file.write_all(text.as_bytes()))
        .map_err(|source| TunableError::File {
            path: path.to_owned(),
            source,
        })
}

fn line(said: &Said<'_>) -> Line {
    let note = match (&said.applies, &said.reading) {
        (_, Reading::Refused(why)) => format!("the kernel refuses it: {why}"),
        (Applies::Unknown(why) | Applies::No(why), _) | (Applies::Yes, Reading::Unknown(why)) => {
            format!("not sure: {why}")
        }
        (Applies::Yes, Reading::Equal | Reading::Different(_)) => String::new(),
    };
    Line {
        kind: said.written.way.name().to_owned(),
        place: said.written.place(),
        value: said.value.clone(),
        in_force: said.reading == Reading::Equal,
        note,
    }
}

fn set_by(origin: &Origin) -> SetBy {
    let (text, at_unix, change) = match origin {
        Origin::Default => ("kernel default".to_owned(), None, None),
        Origin::Configured { place, .. } => (place.clone(), None, None),
        Origin::Kernel { why, .. } => (why.clone(), None, None),
        Origin::RunTime {
            at_unix: Some(at),
            by,
        } => (
            by.as_ref()
                .map_or_else(|| "at run time".to_owned(), |by| format!("at run time by {by}")),
            Some(*at),
            None,
        ),
        Origin::RunTime { .. } => (
            "at run time, before homeostat watched; no file says so".to_owned(),
            None,
            None,
        ),
        Origin::Command { change, at_unix } => (
            "`homeostat tunable set`".to_owned(),
            Some(*at_unix),
            Some(*change),
        ),
        Origin::Homeostat { action, experiment } => (
            match experiment {
                Some(id) => format!("homeostat, experiment {id}"),
                None => format!("homeostat, action {action}"),
            },
            None,
            Some(*action),
        ),
        Origin::Unknown => ("not known: no file says so".to_owned(), None, None),
    };
    SetBy {
        kind: origin.kind().to_owned(),
        text,
        at_unix,
        change,
    }
}

fn boot_id(root: &Root) -> String {
    root.text("/proc/sys/kernel/random/boot_id")
        .unwrap_or_default()
        .trim()
        .to_owned()
}

/// Changes of settings in force, by the daemon and by `homeostat tunable set`. Empty if the journal is unreadable.
fn own_changes(state_directory: &Path, boot: &str) -> Vec<Own> {
    let mut own = Vec::new();
    for directory in [
        state_directory.to_owned(),
        state_directory.join(JOURNAL_DIRECTORY),
    ] {
        let Ok(recovered) = journal::read(&directory) else {
            continue;
        };
        for owed in recovered.owed.values().filter(|o| !o.is_void(boot)) {
            let action = &owed.record.action;
            let (Target::Files(files), Some(value)) = (&action.target, action.arguments.get("value")) else {
                continue;
            };
            own.extend(files.iter().map(|path| Own {
                path: path.clone(),
                value: value.clone(),
                action: action.id.0,
                experiment: None,
                by_command: action.arguments.get(AT).and_then(|at| at.parse().ok()),
            }));
        }
    }
    own
}

/// Changes that the kernel made to the other file of a pair of which only one counts.
fn zeros(own: &[Own]) -> Vec<Own> {
    let zero = |own: &Own| {
        other_of_pair(&own.path).map(|other| Own {
            path: other.to_owned(),
            value: "0".to_owned(),
            ..own.clone()
        })
    };
    own.iter().filter_map(zero).collect()
}

/// Past experiments, newest first. Empty if the history is unreadable.
fn past(state_directory: &Path) -> Vec<ExperimentRecord> {
    let file = state_directory.join(HISTORY_FILE);
    // SQLite would create a missing file.
    if std::fs::File::open(&file).is_err() {
        return Vec::new();
    }
    let filter = ExperimentFilter {
        limit: PAST_MAX,
        blocks: false,
        ..ExperimentFilter::default()
    };
    History::open_read_only(&file)
        .and_then(|history| history.experiments(&filter))
        .unwrap_or_default()
}

fn trials(past: &[ExperimentRecord]) -> BTreeMap<String, Vec<Trial>> {
    let mut by_strategy: BTreeMap<String, Vec<Trial>> = BTreeMap::new();
    for e in past.iter().filter(|e| e.kind != ExperimentKind::Placebo) {
        let of = by_strategy.entry(e.strategy.to_string()).or_default();
        if of.len() < TRIALS_MAX {
            of.push(Trial {
                id: e.id.0,
                workload: e.workload.to_string(),
                verdict: e.verdict.map(|v| v.to_string()),
                effect: e.effect.map(|e| e.estimate).filter(|x| x.is_finite()),
                ended_unix: e.ended_unix,
            });
        }
    }
    by_strategy
}

/// Whether a typed text means the setting: a pattern, or part of its name or file.
fn is_meant(typed: &str, setting: &Setting<'_>) -> bool {
    if pattern::is_pattern(typed) {
        pattern::fits(typed, &setting.name)
    } else {
        setting.name.contains(typed) || setting.path == typed
    }
}

fn find<'s, 'c>(settings: &'s [Setting<'c>], name: &str) -> Result<Vec<&'s Setting<'c>>, TunableError> {
    let found: Vec<&Setting<'_>> = if pattern::is_pattern(name) {
        settings.iter().filter(|s| pattern::fits(name, &s.name)).collect()
    } else {
        let as_sysctl = sysctl_path(name);
        settings
            .iter()
            .filter(|s| s.name == name || s.path == name || s.path == as_sysctl)
            .take(1)
            .collect()
    };
    if !found.is_empty() {
        return Ok(found);
    }
    let part = name.rsplit(['.', '/']).next().unwrap_or(name);
    let near = settings
        .iter()
        .map(|s| s.name.clone())
        .filter(|n| n.contains(name) || n.rsplit('.').next() == Some(part))
        .take(NEAR_MAX)
        .collect();
    Err(TunableError::NotFound {
        name: name.to_owned(),
        near,
    })
}

/// A person's request for a setting.
#[derive(Clone, Debug)]
pub struct Wish {
    /// Name or file of the setting.
    pub name: String,
    /// Value.
    pub value: String,
    /// Although somebody chose the value that it has.
    pub force: bool,
    /// Although it is restricted.
    pub restricted: bool,
    /// Only say what would be done.
    pub dry_run: bool,
}

/// Sets a setting until the next boot, with its undo on disk first. Skips settings with that value.
///
/// # Errors
/// [`TunableError`]; nothing was changed then, but for [`ByHandError::HalfWay`].
pub fn set(places: &Places, wish: &Wish) -> Result<Changed, TunableError> {
    let survey = Survey::begin(places)?;
    let host = Host::read(&survey.root);
    let settings = host.settings(&survey.catalogue);
    let setting = match find(&settings, &wish.name)?.as_slice() {
        [one] => *one,
        several => {
            return Err(TunableError::Several {
                name: wish.name.clone(),
                several: several.iter().take(NEAR_MAX).map(|s| s.name.clone()).collect(),
            });
        }
    };
    let (from, to) = allowed(&survey, &host, setting, wish)?;
    let remark = stale::against(&survey.catalogue, &setting.name, &to, &host)
        .map(|rule| format!("works against this machine: {}", rule.text))
        .unwrap_or_default();
    let answer = |change, remark| {
        Ok(Changed {
            schema: SCHEMA,
            dry_run: wish.dry_run,
            changes: vec![OneChange {
                name: setting.name.clone(),
                path: setting.path.clone(),
                from: from.clone(),
                to: to.clone(),
                change,
                remark,
            }],
        })
    };
    if from == to {
        return answer(None, "it has that value already".to_owned());
    }
    if wish.dry_run {
        return answer(None, remark);
    }
    let (mut journal, mut effectors) = open(places, &survey.root)?;
    let id = journal.next_action_id();
    let action = Action {
        id,
        effector: "setting".into(),
        workload: WORKLOAD.into(),
        target: Target::Files(vec![setting.path.clone()]),
        arguments: BTreeMap::from([
            ("value".to_owned(), to.clone()),
            (AT.to_owned(), MonotonicClock.unix_seconds().to_string()),
        ]),
        why: format!("a person asked for {} = {to} instead of {from}", setting.name),
    };
    by_hand::change(&mut journal, &mut effectors, &MonotonicClock, &action)?;
    answer(Some(id.0), remark)
}

/// The present value and the value to write, if the change is allowed.
fn allowed(
    survey: &Survey,
    host: &Host<'_>,
    setting: &Setting<'_>,
    wish: &Wish,
) -> Result<(String, String), TunableError> {
    let name = setting.name.clone();
    if setting.tunable.kind == Kind::Boot {
        let parameter = setting.path.trim_start_matches("cmdline:");
        return Err(TunableError::BootOnly {
            parameter: format!("{parameter}={}", wish.value),
            name,
        });
    }
    let from = match &setting.found {
        Found::Value(value) => value.clone(),
        Found::Absent => {
            let why = absent(&setting.tunable.since.to_string(), &host.facts, setting);
            return Err(TunableError::NotHere { name, why });
        }
        Found::Denied => {
            let why = "it may not be read by this user; run as root".to_owned();
            return Err(TunableError::NotHere { name, why });
        }
        Found::Unreadable => {
            let why = "it cannot be read, so it could not be put back".to_owned();
            return Err(TunableError::NotHere { name, why });
        }
    };
    let to = setting
        .tunable
        .values
        .check(&wish.value, &setting.shown)
        .map_err(|why| TunableError::Value {
            name: name.clone(),
            why,
        })?;
    if setting.tunable.kind == Kind::Restricted && !wish.restricted {
        return Err(TunableError::Restricted { name });
    }
    // Also during an off block: homeostat will restore the value found then.
    let by_homeostat = survey
        .own
        .iter()
        .find(|o| o.path == setting.path && o.by_command.is_none());
    if let Some(own) = by_homeostat {
        return Err(TunableError::Ours {
            name,
            value: from,
            action: own.action,
        });
    }
    if let Some(origin) = host.origin(setting, &survey.known()) {
        // This command's own value belongs to the same person.
        if origin.is_choice() && !matches!(origin, Origin::Command { .. }) && !wish.force && from != to {
            return Err(TunableError::Chosen {
                name,
                value: from,
                by: set_by(&origin).text,
            });
        }
    }
    Ok((from, to))
}

fn absent(since: &str, facts: &Facts, setting: &Setting<'_>) -> String {
    if setting.tunable.since > facts.release {
        format!("it came with Linux {since}, and this is {}", facts.release_text)
    } else {
        "this kernel was built without it, or the machine or module that has it is not there".to_owned()
    }
}

/// Opens the journal of settings by hand, after undoing a crash's remains, and the effectors.
fn open(places: &Places, root: &Root) -> Result<(Journal, Registry), TunableError> {
    if !rustix::process::geteuid().is_root() {
        return Err(TunableError::Privilege(
            std::io::ErrorKind::PermissionDenied.into(),
        ));
    }
    let directory = places.state_directory.join(JOURNAL_DIRECTORY);
    let (mut journal, _) = Journal::open(
        &places.state_directory_ready(&directory)?,
        JournalOptions::default(),
    )?;
    let _ = restore_within(
        RECOVERY_PATIENCE,
        &mut journal,
        &mut Registry::new(root),
        &MonotonicClock,
        &boot_id(root),
        false,
    );
    // A fresh registry: the undo after a crash leaves others' later choices alone, a person's request now does not.
    Ok((journal, Registry::new(root)))
}

/// Recovery of changes by command.
#[derive(Debug, Default)]
pub struct ByHand {
    /// The undone changes.
    pub report: RecoveryReport,
    /// Faults of the journal of such changes: unknown settings may be in force.
    pub complaints: Vec<String>,
}

/// Undoes a half done `homeostat tunable set`; completed settings stay. Does nothing while such a command runs.
pub fn recover(state_directory: &Path) -> ByHand {
    let directory = state_directory.join(JOURNAL_DIRECTORY);
    if !directory.exists() {
        return ByHand::default();
    }
    let found = match journal::read(&directory) {
        Ok(found) => found,
        Err(e) => {
            return ByHand {
                report: RecoveryReport::default(),
                complaints: vec![e.to_string()],
            };
        }
    };
    let is_half_done = found.owed.values().any(|o| o.state != OwedState::Kept);
    if !is_half_done && found.is_whole() {
        return ByHand::default();
    }
    let root = Root::default();
    match Journal::open_for_undo(&directory, JournalOptions::default()) {
        Ok((mut journal, found)) => {
            let mut effectors = Registry::new(&root);
            let mut report = restore_within(
                RECOVERY_PATIENCE,
                &mut journal,
                &mut effectors,
                &MonotonicClock,
                &boot_id(&root),
                false,
            );
            // A person's settings are no news here.
            report.kept.clear();
            let complaints = if found.is_whole() {
                Vec::new()
            } else {
                found.complaints()
            };
            ByHand { report, complaints }
        }
        // A running command handles its changes.
        Err(JournalError::Held { .. }) => ByHand::default(),
        Err(e) => ByHand {
            report: RecoveryReport::default(),
            complaints: vec![e.to_string()],
        },
    }
}

impl Places {
    /// Creates the state directory as the daemon would, for the journal in it.
    fn state_directory_ready(&self, directory: &Path) -> Result<PathBuf, TunableError> {
        use std::os::unix::fs::DirBuilderExt;
        std::fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&self.state_directory)
            .map_err(|source| TunableError::File {
                path: self.state_directory.clone(),
                source,
            })?;
        Ok(directory.to_owned())
    }
}

/// The settings to put back.
#[derive(Clone, Debug)]
pub enum Which {
    /// One, by name or file.
    One(String),
    /// All that `set` changed and that are still in force.
    All,
}

/// Restores the value from before the first `set`. A value that somebody else wrote since stays. For a pair of which
/// one counts, changes to both are undone under either name: each found what the one before had set.
///
/// # Errors
/// [`TunableError`].
pub fn unset(places: &Places, which: &Which, dry_run: bool) -> Result<Changed, TunableError> {
    let root = places.root.clone().map(Root::new).unwrap_or_default();
    let catalogue = Catalogue::load()?;
    let host = Host::read(&root);
    let settings = host.settings(&catalogue);
    let path = match which {
        Which::All => None,
        Which::One(name) => match find(&settings, name)?.as_slice() {
            [one] => Some(one.path.clone()),
            several => {
                return Err(TunableError::Several {
                    name: name.clone(),
                    several: several.iter().take(NEAR_MAX).map(|s| s.name.clone()).collect(),
                });
            }
        },
    };
    if matches!(which, Which::All) && !places.state_directory.join(JOURNAL_DIRECTORY).exists() {
        // Nobody has set anything: create nothing.
        return Ok(Changed {
            schema: SCHEMA,
            dry_run,
            changes: Vec::new(),
        });
    }
    let (mut journal, mut effectors) = open(places, &root)?;
    // Newest first: each found the value set before it.
    let mut mine: Vec<Mine> = journal
        .owed()
        .filter(|o| o.state == OwedState::Kept)
        .filter_map(Mine::of)
        .filter(|m| path.as_ref().is_none_or(|p| is_one_setting(&m.file, p)))
        .collect();
    mine.sort_by_key(|m| std::cmp::Reverse(m.id));
    if let (Which::One(name), true) = (which, mine.is_empty()) {
        return Err(TunableError::NotSet(name.clone()));
    }
    let setting = |file: &str| settings.iter().find(|s| s.path == file);
    let now = |file: &str| {
        let text = root.text(file).unwrap_or_default();
        setting(file).map_or_else(|| text.trim().to_owned(), |s| s.tunable.values.normal(&text))
    };
    // Several changes of one setting are one undo.
    let mut changes: Vec<OneChange> = Vec::new();
    for m in &mine {
        if changes.iter().all(|c| c.path != m.file) {
            changes.push(OneChange {
                name: setting(&m.file).map_or_else(|| m.file.clone(), |s| s.name.clone()),
                path: m.file.clone(),
                from: now(&m.file),
                to: String::new(),
                change: Some(m.id.0),
                remark: String::new(),
            });
        }
    }
    if !dry_run {
        for m in &mine {
            by_hand::take_back(&mut journal, &mut effectors, &MonotonicClock, m.id)?;
        }
    }
    for change in &mut changes {
        // Restore what the oldest change found, under either name of a pair.
        let first = mine.iter().rfind(|m| is_one_setting(&m.file, &change.path));
        let found = first.and_then(|m| m.found(&change.path)).unwrap_or_default();
        if dry_run {
            change.to = found;
            continue;
        }
        change.to = now(&change.path);
        if change.to != found {
            change.remark = format!("somebody else has changed it since; {} stays", change.to);
        }
    }
    Ok(Changed {
        schema: SCHEMA,
        dry_run,
        changes,
    })
}

struct Mine {
    id: ActionId,
    file: String,
    value: String,
    /// … and in the other file of a pair.
    other: Option<String>,
}

impl Mine {
    fn of(owed: &Owed) -> Option<Self> {
        let Target::Files(files) = &owed.record.action.target else {
            return None;
        };
        let found = &owed.record.found;
        Some(Self {
            id: owed.record.action.id,
            file: files.first()?.clone(),
            value: found.get("value")?.clone(),
            other: found.get("other").cloned(),
        })
    }

    /// Value found in a file: its own, or the other one of a pair.
    fn found(&self, file: &str) -> Option<String> {
        if file == self.file {
            Some(self.value.clone())
        } else {
            self.other.clone()
        }
    }
}

/// Files of settings changed by `homeostat tunable set` and still in force, for `restore`.
pub fn still_set(state_directory: &Path) -> Vec<String> {
    let boot = boot_id(&Root::default());
    own_changes(state_directory, &boot)
        .into_iter()
        .filter(|o| o.by_command.is_some())
        .map(|o| o.path)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Machine {
        _keep: tempfile::TempDir,
        places: Places,
    }

    fn machine(list: &[(&str, &str)]) -> Machine {
        let keep = tempfile::tempdir().unwrap();
        let root = keep.path().join("root");
        let mut all = vec![
            ("/proc/sys/kernel/osrelease", "6.12.0\n"),
            ("/proc/sys/kernel/random/boot_id", "b\n"),
            ("/proc/meminfo", "MemTotal: 33554432 kB\n"),
            ("/sys/devices/system/cpu/online", "0-7\n"),
            ("/proc/sys/vm/swappiness", "60\n"),
            ("/proc/sys/vm/dirty_ratio", "5\n"),
            ("/proc/sys/vm/stat_interval", "9\n"),
            ("/proc/sys/vm/min_free_kbytes", "67584\n"),
            ("/proc/sys/vm/vfs_cache_pressure", "100\n"),
            ("/etc/sysctl.d/a.conf", "vm.dirty_ratio = 5\n"),
        ];
        all.extend(list);
        for (path, text) in all {
            let file = root.join(path.trim_start_matches('/'));
            std::fs::create_dir_all(file.parent().unwrap()).unwrap();
            std::fs::write(file, text).unwrap();
        }
        let places = Places {
            root: Some(root),
            state_directory: keep.path().join("state"),
            run_directory: keep.path().join("run"),
        };
        Machine { _keep: keep, places }
    }

    fn wish(name: &str, value: &str) -> Wish {
        Wish {
            name: name.to_owned(),
            value: value.to_owned(),
            force: false,
            restricted: false,
            dry_run: true,
        }
    }

    #[test]
    fn only_what_is_allowed_is_set() {
        let m = machine(&[]);
        let ok = set(&m.places, &wish("vm.swappiness", "10")).unwrap();
        assert_eq!(
            (ok.changes[0].from.as_str(), ok.changes[0].to.as_str(), ok.dry_run),
            ("60", "10", true)
        );
        // By file, and by a sysctl's other way of writing.
        assert!(set(&m.places, &wish("/proc/sys/vm/swappiness", "10")).is_ok());
        assert!(set(&m.places, &wish("vm/swappiness", "10")).is_ok());
        let refused = |name: &str, value: &str| set(&m.places, &wish(name, value)).unwrap_err();
        assert!(matches!(
            refused("vm.swappiness", "201"),
            TunableError::Value { .. }
        ));
        assert!(matches!(
            refused("vm.swapiness", "1"),
            TunableError::NotFound { .. }
        ));
        assert!(matches!(
            refused("boot.isolcpus", "1"),
            TunableError::BootOnly { .. }
        ));
        assert!(matches!(
            refused("vm.min_free_kbytes", "1"),
            TunableError::Restricted { .. }
        ));
        assert!(matches!(refused("ksm.run", "1"), TunableError::NotHere { .. }));
        assert!(matches!(refused("vm.*", "1"), TunableError::Several { .. }));
        let chosen = refused("vm.dirty_ratio", "10").to_string();
        assert!(chosen.contains("/etc/sysctl.d/a.conf:1"), "{chosen}");
        let chosen = refused("vm.stat_interval", "1").to_string();
        assert!(chosen.contains("at run time"), "{chosen}");
        let forced = Wish {
            force: true,
            ..wish("vm.dirty_ratio", "10")
        };
        assert!(set(&m.places, &forced).is_ok());
        let remark = &set(&m.places, &wish("vm.vfs_cache_pressure", "0"))
            .unwrap()
            .changes[0]
            .remark;
        assert!(remark.contains("works against"), "{remark}");
    }

    #[test]
    fn the_command_line_knows_every_group() {
        let catalogue = Catalogue::load().unwrap();
        let ids: Vec<&str> = catalogue.groups.iter().map(|g| g.id.as_str()).collect();
        assert_eq!(ids, GROUPS);
    }

    #[test]
    fn lists_are_filtered_and_names_that_are_not_known_get_an_offer() {
        let m = machine(&[]);
        let survey = Survey::begin(&m.places).unwrap();
        let names = |filter: &Filter| -> Vec<String> {
            survey.list(filter).settings.into_iter().map(|t| t.name).collect()
        };
        let changed = Filter {
            changed: true,
            ..Filter::default()
        };
        assert_eq!(names(&changed), ["vm.dirty_ratio", "vm.stat_interval"]);
        let by_file = Filter {
            set_by: vec!["sysctl_file".into()],
            ..Filter::default()
        };
        assert_eq!(names(&by_file), ["vm.dirty_ratio"]);
        let pattern = Filter {
            names: vec!["vm.s*".into()],
            ..Filter::default()
        };
        assert_eq!(names(&pattern), ["vm.swappiness", "vm.stat_interval"]);
        assert!(
            names(&Filter {
                absent: true,
                ..Filter::default()
            })
            .len()
                > 150
        );
        match survey.show("swappiness").unwrap_err() {
            TunableError::NotFound { near, .. } => assert_eq!(near, ["vm.swappiness"]),
            e => panic!("{e}"),
        }
        let shown = &survey.show("vm.dirty_ratio").unwrap().settings[0];
        assert_eq!(shown.set_by.as_ref().unwrap().kind, "sysctl_file");
        assert_eq!(shown.lines.len(), 1);
        assert!(shown.lines[0].in_force);
    }

    #[test]
    fn of_a_pair_what_one_change_does_to_the_other_one_is_that_change_s() {
        let own = |path: &str, action| Own {
            path: path.into(),
            value: "10".into(),
            action,
            experiment: None,
            by_command: None,
        };
        let zeros = zeros(&[
            own("/proc/sys/vm/dirty_ratio", 7),
            own("/proc/sys/vm/swappiness", 8),
        ]);
        assert_eq!(zeros.len(), 1);
        assert_eq!(
            (zeros[0].path.as_str(), zeros[0].value.as_str(), zeros[0].action),
            ("/proc/sys/vm/dirty_bytes", "0", 7)
        );
    }

    #[test]
    fn what_homeostat_has_in_hand_is_not_set_by_hand() {
        let m = machine(&[]);
        let mut survey = Survey::begin(&m.places).unwrap();
        survey.own.push(Own {
            path: "/proc/sys/vm/swappiness".into(),
            value: "10".into(),
            action: 7,
            experiment: Some(3),
            by_command: None,
        });
        let host = Host::read(&survey.root);
        let settings = host.settings(&survey.catalogue);
        let setting = find(&settings, "vm.swappiness").unwrap()[0];
        let refused = allowed(&survey, &host, setting, &wish("vm.swappiness", "30")).unwrap_err();
        assert!(
            matches!(refused, TunableError::Ours { action: 7, .. }),
            "{refused}"
        );
        let origin = Origin::Homeostat {
            action: 7,
            experiment: Some(3),
        };
        assert_eq!(set_by(&origin).text, "homeostat, experiment 3");
    }

    /// Set twice and put back, in a tree of plain files; with root, because the journal wants it.
    #[test]
    fn what_was_set_is_put_back_to_what_was_found_first() {
        if !rustix::process::geteuid().is_root() {
            eprintln!("skipped: needs root");
            return;
        }
        let m = machine(&[]);
        let act = |name: &str, value: &str| Wish {
            dry_run: false,
            ..wish(name, value)
        };
        let file = m.places.root.clone().unwrap().join("proc/sys/vm/swappiness");
        let first = set(&m.places, &act("vm.swappiness", "10")).unwrap();
        assert_eq!(first.changes[0].change, Some(1));
        assert_eq!(std::fs::read_to_string(&file).unwrap(), "10\n");
        let recovered = journal::read(&m.places.state_directory.join(JOURNAL_DIRECTORY)).unwrap();
        assert_eq!(recovered.owed.len(), 1);
        assert_eq!(recovered.owed[&ActionId(1)].state, OwedState::Kept);
        // A tree of files does not know the journal of this machine, so the second value counts as somebody's choice.
        let again = Wish {
            force: true,
            ..act("vm.swappiness", "20")
        };
        assert_eq!(set(&m.places, &again).unwrap().changes[0].change, Some(2));
        let one = Which::One("vm.swappiness".into());
        let tried = unset(&m.places, &one, true).unwrap();
        assert_eq!((tried.changes[0].to.as_str(), tried.dry_run), ("60", true));
        assert_eq!(std::fs::read_to_string(&file).unwrap(), "20\n");
        let back = unset(&m.places, &one, false).unwrap();
        assert_eq!(back.changes.len(), 1);
        assert_eq!(
            (back.changes[0].from.as_str(), back.changes[0].to.as_str()),
            ("20", "60")
        );
        assert_eq!(std::fs::read_to_string(&file).unwrap(), "60\n");
        assert!(matches!(
            unset(&m.places, &one, false),
            Err(TunableError::NotSet(_))
        ));
        assert_eq!(unset(&m.places, &Which::All, false).unwrap().changes, []);
        // What somebody else wrote in between stays.
        set(&m.places, &act("vm.swappiness", "30")).unwrap();
        std::fs::write(&file, "77\n").unwrap();
        let back = unset(&m.places, &Which::All, false).unwrap();
        assert!(back.changes[0].remark.contains("77 stays"), "{back:?}");
        assert_eq!(std::fs::read_to_string(&file).unwrap(), "77\n");
    }
}
