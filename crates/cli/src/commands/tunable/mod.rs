//! `homeostat tunable`: the settings of the kernel, who set them, and their change by hand.

pub(crate) mod text;

use crate::Context;
use crate::failure::{Failure, Kind};
use clap::builder::{NonEmptyStringValueParser, PossibleValue, PossibleValuesParser, TypedValueParser};
use clap::{Args, Subcommand};
use homeostat_daemon::client::Client;
use homeostat_daemon::tunables::{self, Filter, GROUPS, KINDS, Places, Survey, TunableError, Which, Wish};
use homeostat_daemon::watch;
use std::ffi::OsStr;
use std::path::PathBuf;

/// Takes any name, file or pattern, and tells shells the names there are, for completion.
#[derive(Clone)]
struct SettingName;

impl TypedValueParser for SettingName {
    type Value = String;

    fn parse_ref(
        &self,
        command: &clap::Command,
        argument: Option<&clap::Arg>,
        value: &OsStr,
    ) -> Result<String, clap::Error> {
        NonEmptyStringValueParser::new().parse_ref(command, argument, value)
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        Some(Box::new(
            tunables::names()
                .iter()
                .map(|name| PossibleValue::new(name.as_str())),
        ))
    }
}

/// Show and change the settings of the kernel that matter, with who set each.
///
/// For each setting: its value, the kernel's own, the value at boot, its range, what it does, and who set it: a file and its
/// line, the kernel's command line, a udev rule, a unit, tuned, somebody at run time, or homeostat. docs/tunables.md
/// describes all of them.
#[derive(Debug, Args)]
#[command(after_help = "EXAMPLES
  homeostat tunable list --changed              what is not as the kernel has it, and who set it
  homeostat tunable show vm.swappiness          all about one setting
  homeostat tunable set vm.swappiness 10        until the next boot; `unset` puts it back
  homeostat tunable check                       old tuning that this kernel ignores or that does harm
  homeostat tunable snapshot -o a.json          and on another machine: homeostat tunable check a.json")]
pub struct Tunable {
    /// What to do.
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    /// List settings with their values and who set them.
    #[command(after_help = "EXAMPLES
  homeostat tunable list --changed
  homeostat tunable list 'vm.dirty*' swappiness
  homeostat tunable list --group net.ipv4 --set-by sysctl_file
  homeostat tunable list --json | jq '.settings[] | select(.changed) | {name, value, default}'")]
    List(List),
    /// Show all about one setting, or about those that fit a pattern.
    #[command(after_help = "EXAMPLES
  homeostat tunable show vm.swappiness
  homeostat tunable show 'block.*.scheduler'
  homeostat tunable show /sys/kernel/mm/transparent_hugepage/enabled")]
    Show {
        /// Name or file of a setting, or a pattern with `*`.
        #[arg(value_parser = SettingName, hide_possible_values = true)]
        name: String,
        /// Directory that holds the files of another machine.
        #[arg(long, value_name = "DIRECTORY")]
        root: Option<PathBuf>,
    },
    /// Set a setting until the next boot, with its undo on disk first.
    ///
    /// The value is checked against the setting's range. What somebody chose (a file, the command line, a write at run
    /// time) is not overwritten unless told. Running experiments of homeostat on that setting are given up.
    #[command(after_help = "EXAMPLES
  homeostat tunable set vm.swappiness 10
  homeostat tunable set --dry-run net.ipv4.tcp_rmem '4096 131072 16777216'
  homeostat tunable set --force vm.dirty_ratio 10      although a file says otherwise")]
    Set {
        /// Name or file of the setting.
        #[arg(value_parser = SettingName, hide_possible_values = true)]
        name: String,
        /// Value; several numbers in one argument.
        #[arg(allow_hyphen_values = true)]
        value: String,
        /// Overwrite what somebody chose.
        #[arg(long)]
        force: bool,
        /// Change a setting whose wrong value can stop the machine.
        #[arg(long)]
        restricted: bool,
        /// Check, say what would be done, and change nothing.
        #[arg(long)]
        dry_run: bool,
    },
    /// Put back what `set` changed, to what was found before.
    #[command(after_help = "EXAMPLES
  homeostat tunable unset vm.swappiness
  homeostat tunable unset --all")]
    Unset {
        /// Name or file of the setting.
        #[arg(required_unless_present = "all", value_parser = SettingName, hide_possible_values = true)]
        name: Option<String>,
        /// Everything that `set` changed.
        #[arg(long, conflicts_with = "name")]
        all: bool,
        /// Say what would be done, and change nothing.
        #[arg(long)]
        dry_run: bool,
    },
    /// Show what differs from the kernel's own values.
    #[command(after_help = "EXAMPLES
  homeostat tunable diff
  homeostat tunable diff --group vm")]
    Diff {
        /// Only one group.
        #[arg(long, value_parser = PossibleValuesParser::new(GROUPS))]
        group: Option<String>,
        /// Directory that holds the files of another machine.
        #[arg(long, value_name = "DIRECTORY")]
        root: Option<PathBuf>,
    },
    /// Find old tuning that this kernel ignores or that works against the machine; with a file, compare with another machine.
    ///
    /// Ends with 1 when something was found. Settings that are at the kernel's own value on both machines count as alike.
    #[command(after_help = "EXAMPLES
  homeostat tunable check
  homeostat tunable check snapshot-of-the-other-machine.json
  homeostat tunable check --json | jq '.findings[] | select(.kind == \"ignored\")'")]
    Check {
        /// A snapshot of another machine, or of this one at another time.
        file: Option<PathBuf>,
        /// Directory that holds the files of another machine, to check that one.
        #[arg(long, value_name = "DIRECTORY")]
        root: Option<PathBuf>,
    },
    /// Write the values of all settings into a file, as JSON.
    #[command(after_help = "EXAMPLES
  homeostat tunable snapshot -o $(hostname).json
  homeostat tunable snapshot | ssh other homeostat tunable check /dev/stdin")]
    Snapshot {
        /// The file; a new one. Standard output unless given.
        #[arg(short, long, value_name = "FILE")]
        output: Option<PathBuf>,
        /// Directory that holds the files of another machine.
        #[arg(long, value_name = "DIRECTORY")]
        root: Option<PathBuf>,
    },
}

/// What to list.
#[derive(Debug, Args)]
struct List {
    /// Names, parts of names, or patterns with `*`; any of them.
    #[arg(value_parser = SettingName, hide_possible_values = true)]
    names: Vec<String>,
    /// Only one group.
    #[arg(long, value_parser = PossibleValuesParser::new(GROUPS))]
    group: Option<String>,
    /// Only what differs from the kernel's own value.
    #[arg(long)]
    changed: bool,
    /// Only what was set in this way; may be given several times.
    #[arg(long, value_name = "KIND", value_parser = PossibleValuesParser::new(KINDS))]
    set_by: Vec<String>,
    /// Also what this machine does not have.
    #[arg(long)]
    all: bool,
    /// Directory that holds the files of another machine.
    #[arg(long, value_name = "DIRECTORY")]
    root: Option<PathBuf>,
}

impl From<TunableError> for Failure {
    fn from(e: TunableError) -> Self {
        let kind = match &e {
            TunableError::NotFound { .. } | TunableError::NotSet(_) => Kind::NotFound,
            TunableError::Several { .. } | TunableError::Value { .. } => Kind::Usage,
            TunableError::Catalogue(_)
            | TunableError::BootOnly { .. }
            | TunableError::NotHere { .. }
            | TunableError::Restricted { .. }
            | TunableError::Chosen { .. }
            | TunableError::Ours { .. }
            | TunableError::ByHand(_)
            | TunableError::Journal(_)
            | TunableError::Privilege(_)
            | TunableError::File { .. }
            | TunableError::NoSnapshot { .. } => return Self::from_error(&e),
        };
        Self::Report(kind, e.to_string())
    }
}

pub(crate) fn places(context: &Context, root: Option<PathBuf>) -> Places {
    Places {
        root,
        state_directory: context.state_directory(),
        run_directory: context.run_directory(),
    }
}

/// Stays until the daemon, where one runs, has seen what was changed: whose write it was can only be told while the writer
/// lives.
fn await_watch(context: &Context, done: &tunables::Changed) {
    if done.dry_run || Client::connect(&context.socket()).is_err() {
        return;
    }
    let written: Vec<(&str, &str)> = done
        .changes
        .iter()
        .filter(|c| c.change.is_some() && c.from != c.to)
        .map(|c| (c.path.as_str(), c.to.as_str()))
        .collect();
    if !written.is_empty() {
        watch::await_noticed(&context.run_directory(), &written);
    }
}

impl Tunable {
    /// Does it.
    pub(crate) fn run(self, context: &Context) -> Result<(), Failure> {
        let terminal = &context.terminal;
        match self.what {
            What::List(list) => {
                let filter = Filter {
                    names: list.names,
                    group: list.group,
                    changed: list.changed,
                    set_by: list.set_by,
                    absent: list.all,
                };
                let found = Survey::begin(&places(context, list.root))?.list(&filter);
                terminal.show(&found, |look| text::list(&found, look))
            }
            What::Show { name, root } => {
                let found = Survey::begin(&places(context, root))?.show(&name)?;
                terminal.show(&found, |look| text::show(&found, look))
            }
            What::Diff { group, root } => {
                let filter = Filter {
                    group,
                    changed: true,
                    ..Filter::default()
                };
                let found = Survey::begin(&places(context, root))?.list(&filter);
                terminal.show(&found, |look| text::diff(&found, look))
            }
            What::Set {
                name,
                value,
                force,
                restricted,
                dry_run,
            } => {
                let wish = Wish {
                    name,
                    value,
                    force,
                    restricted,
                    dry_run,
                };
                let done = tunables::set(&places(context, None), &wish)?;
                await_watch(context, &done);
                terminal.show(&done, |look| text::changed(&done, false, look))
            }
            What::Unset {
                name,
                all: _,
                dry_run,
            } => {
                let which = name.map_or(Which::All, Which::One);
                let done = tunables::unset(&places(context, None), &which, dry_run)?;
                await_watch(context, &done);
                terminal.show(&done, |look| text::changed(&done, true, look))
            }
            What::Check { file, root } => {
                let other = file.as_deref().map(tunables::read_snapshot).transpose()?;
                let found = Survey::begin(&places(context, root))?.check(other.as_ref());
                terminal.show(&found, |look| text::check(&found, look))?;
                if found.findings.is_empty() {
                    Ok(())
                } else {
                    Err(Failure::failed(text::summary(&found)))
                }
            }
            What::Snapshot { output, root } => {
                let snapshot = Survey::begin(&places(context, root))?.snapshot();
                let json = serde_json::to_string_pretty(&snapshot)
                    .map_err(|e| Failure::failed(format!("cannot be expressed as JSON: {e}")))?;
                let Some(path) = output else {
                    return terminal.print(&json);
                };
                tunables::write_new(&path, &json)?;
                terminal.print(&if terminal.json {
                    format!("{{\"schema\": 1, \"settings\": {}}}", snapshot.settings.len())
                } else {
                    format!("{} settings are in {}.", snapshot.settings.len(), path.display())
                })
            }
        }
    }
}
