//! `homeostat pause` and `homeostat resume`.

use crate::Context;
use crate::failure::Failure;
use clap::Args;
use homeostat_daemon::client::Client;
use serde::Serialize;

#[derive(Serialize)]
struct Answer {
    schema: u32,
    paused: bool,
}

/// Start no new trial; running ones are undone, proven changes stay.
///
/// Lasts until `homeostat resume` or the end of the daemon. To undo proven changes as well, and to stay so over restarts:
/// `homeostat off`.
#[derive(Debug, Args)]
#[command(after_help = "EXAMPLES
  homeostat pause && deploy-the-release && homeostat resume")]
pub struct Pause {}

/// Go on after a pause.
#[derive(Debug, Args)]
#[command(after_help = "EXAMPLES
  homeostat resume")]
pub struct Resume {}

impl Pause {
    /// Asks.
    pub(crate) fn run(self, context: &Context) -> Result<(), Failure> {
        Client::connect(&context.socket())?.pause()?;
        let answer = Answer {
            schema: homeostat_daemon::api::SCHEMA,
            paused: true,
        };
        context.terminal.show(&answer, |_| {
            "Paused: no new trial starts; running ones are being undone; proven changes stay in force.\nGo on with: \
             homeostat resume"
                .into()
        })
    }
}

impl Resume {
    /// Asks.
    pub(crate) fn run(self, context: &Context) -> Result<(), Failure> {
        Client::connect(&context.socket())?.resume()?;
        let answer = Answer {
            schema: homeostat_daemon::api::SCHEMA,
            paused: false,
        };
        context.terminal.show(&answer, |_| "Resumed.".into())
    }
}
