//! `homeostat advice`: what a person could do and homeostat may not.

use crate::Context;
use crate::commands::tunable;
use crate::failure::{Failure, Kind};
use crate::render;
use clap::{Args, Subcommand};
use homeostat_daemon::api::{self, SCHEMA};
use homeostat_daemon::client::{Client, ClientError};
use homeostat_daemon::settings::muted::{self, MuteError};
use homeostat_daemon::tunables::{self, Wish};
use serde::Serialize;
use std::path::PathBuf;

/// Show what a person could do and homeostat may not; do it, or do not see it again.
///
/// Advice is what would help but can not be tried and undone while a program runs: a restart, a setting for the whole machine.
/// Each piece has an id that stays the same. `--json` exports it.
#[derive(Debug, Args)]
#[command(after_help = "EXAMPLES
  homeostat advice                                      what there is, with risks
  homeostat advice apply large_pages/enabled-never      set what it says, until the next boot; `tunable unset` puts it back
  homeostat advice mute prefetch/counters               do not show it again
  homeostat advice --json > advice.json                 export it")]
pub struct Advice {
    #[command(subcommand)]
    what: Option<What>,
}

#[derive(Debug, Subcommand)]
enum What {
    /// List what there is.
    #[command(after_help = "EXAMPLES\n  homeostat advice list --json | jq -r '.advice[].id'")]
    List,
    /// Set the setting of the kernel that the advice names, as `homeostat tunable set` does: with its undo on disk first.
    ///
    /// Advice that is not about one setting is for a person to follow: it is shown, and nothing is done.
    #[command(after_help = "EXAMPLES
  homeostat advice apply --dry-run large_pages/enabled-never
  homeostat advice apply large_pages/enabled-never
  homeostat tunable unset --all                         and back")]
    Apply {
        /// Its id.
        id: String,
        /// Overwrite what somebody chose.
        #[arg(long)]
        force: bool,
        /// Check, say what would be done, and change nothing.
        #[arg(long)]
        dry_run: bool,
    },
    /// Do not show it again, here, in `status` and in the log. Written into the configuration.
    #[command(after_help = "EXAMPLES\n  homeostat advice mute prefetch/counters")]
    Mute {
        /// Its id.
        id: String,
    },
    /// Show it again when it is found again.
    #[command(after_help = "EXAMPLES\n  homeostat advice unmute prefetch/counters")]
    Unmute {
        /// Its id.
        id: String,
    },
}

#[derive(Serialize)]
struct Listed {
    schema: u32,
    advice: Vec<api::Advice>,
    muted: Vec<String>,
}

#[derive(Serialize)]
struct Muted {
    schema: u32,
    id: String,
    muted: bool,
    file: PathBuf,
    /// Whether a daemon has read it already.
    in_force: bool,
}

impl From<MuteError> for Failure {
    fn from(e: MuteError) -> Self {
        match e {
            MuteError::Configuration(errors) => Self::Configuration(errors),
            MuteError::NotMuted { .. } | MuteError::Unknown { .. } => {
                Self::Report(Kind::NotFound, e.to_string())
            }
            MuteError::NoId(_) => Self::Report(Kind::Usage, e.to_string()),
            MuteError::File { .. } | MuteError::Overridden(_) => Self::from_error(&e),
        }
    }
}

impl Advice {
    /// Does it.
    pub(crate) fn run(self, context: &Context) -> Result<(), Failure> {
        match self.what.unwrap_or(What::List) {
            What::List => list(context),
            What::Apply { id, force, dry_run } => apply(context, &id, force, dry_run),
            What::Mute { id } => mute(context, id, true),
            What::Unmute { id } => mute(context, id, false),
        }
    }
}

fn list(context: &Context) -> Result<(), Failure> {
    let listed = Listed {
        schema: SCHEMA,
        advice: Client::connect(&context.socket())?.status()?.advice,
        // A broken configuration must not keep anybody from reading.
        muted: muted::muted(&context.sources).unwrap_or_default(),
    };
    context.terminal.show(&listed, |look| {
        render::advice_list(&listed.advice, &listed.muted, look)
    })
}

fn apply(context: &Context, id: &str, force: bool, dry_run: bool) -> Result<(), Failure> {
    let known = Client::connect(&context.socket())?.status()?.advice;
    let Some(advice) = known.iter().find(|a| a.id == id) else {
        let ids: Vec<&str> = known.iter().map(|a| a.id.as_str()).collect();
        let hint = if ids.is_empty() {
            "there is no advice at the moment".to_owned()
        } else {
            format!("there is: {}", ids.join(", "))
        };
        return Err(Failure::Report(
            Kind::NotFound,
            format!("no advice {id:?}\n  hint: {hint}"),
        ));
    };
    let Some(setting) = &advice.setting else {
        return Err(Failure::failed(format!(
            "{id} is not about a setting that could be set here; it is for a person to follow\n  hint: {}",
            advice.remedy
        )));
    };
    let wish = Wish {
        name: setting.path.clone(),
        value: setting.value.clone(),
        force,
        restricted: false,
        dry_run,
    };
    let done = tunables::set(&tunable::places(context, None), &wish)?;
    context
        .terminal
        .show(&done, |look| tunable::text::changed(&done, false, look))
}

fn mute(context: &Context, id: String, mute: bool) -> Result<(), Failure> {
    // Without a daemon, the kinds of advice are known all the same.
    let shown = Client::connect(&context.socket())
        .and_then(|mut daemon| daemon.status())
        .map(|status| status.advice.into_iter().map(|a| a.id).collect::<Vec<_>>())
        .unwrap_or_default();
    let file = muted::set_muted(&context.sources, &id, mute, &shown)?;
    let told = Client::connect(&context.socket()).and_then(|mut daemon| {
        daemon.reload()?;
        daemon.status()
    });
    let in_force = match told {
        // A daemon that reads another configuration still shows it.
        Ok(status) => !mute || !status.advice.iter().any(|a| a.id == id),
        Err(ClientError::NotRunning(_)) => false,
        Err(e) => return Err(e.into()),
    };
    let answer = Muted {
        schema: SCHEMA,
        id,
        muted: mute,
        file,
        in_force,
    };
    context.terminal.show(&answer, |_| {
        format!(
            "{}: {} ({}){}",
            if mute { "Muted" } else { "No longer muted" },
            answer.id,
            answer.file.display(),
            if in_force {
                ""
            } else {
                "; no daemon that reads this file runs, the next one will know"
            },
        )
    })
}
