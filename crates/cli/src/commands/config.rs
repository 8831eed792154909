//! `homeostat config`.

use crate::Context;
use crate::failure::Failure;
use clap::{Args, Subcommand};
use homeostat_daemon::client::Client;
use homeostat_daemon::settings::{self, SettingsError};
use serde::Serialize;

/// Check and show the configuration.
#[derive(Debug, Args)]
#[command(after_help = "EXAMPLES
  homeostat config default > /etc/homeostat/homeostat.toml
  homeostat config check
  homeostat config show
  homeostat config reload                    ask the daemon to read it again")]
pub struct Config {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    /// Say whether the configuration is valid, and if not, where and what to do.
    #[command(after_help = "EXAMPLES\n  homeostat config check --config ./homeostat.toml")]
    Check,
    /// Print a file with every setting, its meaning and its default.
    #[command(after_help = "EXAMPLES\n  homeostat config default > /etc/homeostat/homeostat.toml")]
    Default {
        /// As a page of the book.
        #[arg(long)]
        markdown: bool,
    },
    /// Print the settings that are in force after all files are read.
    #[command(after_help = "EXAMPLES\n  homeostat config show --json")]
    Show,
    /// Ask the daemon to read the configuration again.
    #[command(after_help = "EXAMPLES\n  homeostat config check && homeostat config reload")]
    Reload,
}

#[derive(Serialize)]
struct Verdict {
    schema: u32,
    valid: bool,
    files: Vec<String>,
    errors: Vec<SettingsError>,
}

#[derive(Serialize)]
struct Reloaded {
    schema: u32,
    notes: Vec<String>,
}

impl Config {
    /// Does it.
    pub(crate) fn run(self, context: &Context) -> Result<(), Failure> {
        match self.what {
            What::Check => check(context),
            What::Default { markdown: false } => context.terminal.print(&settings::default_file()),
            What::Default { markdown: true } => context.terminal.print(&settings::markdown()),
            What::Show => {
                let loaded = settings::load(&context.sources).map_err(Failure::Configuration)?;
                context
                    .terminal
                    .show(&loaded.settings, |_| settings::show(&loaded.settings))
            }
            What::Reload => {
                let notes = Client::connect(&context.socket())?.reload()?;
                let answer = Reloaded {
                    schema: homeostat_daemon::api::SCHEMA,
                    notes,
                };
                context.terminal.show(&answer, |_| {
                    let mut text = String::from("The daemon has read its configuration again.\n");
                    for note in &answer.notes {
                        text.push_str(&format!("note: {note}\n"));
                    }
                    text
                })
            }
        }
    }
}

fn check(context: &Context) -> Result<(), Failure> {
    let schema = homeostat_daemon::api::SCHEMA;
    match settings::load_for_daemon(&context.sources) {
        Ok(loaded) => {
            let verdict = Verdict {
                schema,
                valid: true,
                files: loaded.layers,
                errors: vec![],
            };
            context
                .terminal
                .show(&verdict, |_| match verdict.files.as_slice() {
                    [] => "There is no configuration file; all settings have their defaults.".into(),
                    files => format!("Valid: {}", files.join(", ")),
                })
        }
        Err(errors) if context.terminal.json => {
            let verdict = Verdict {
                schema,
                valid: false,
                files: vec![],
                errors: errors.0.clone(),
            };
            context.terminal.show(&verdict, |_| String::new())?;
            Err(Failure::Configuration(errors))
        }
        Err(errors) => Err(Failure::Configuration(errors)),
    }
}
