//! `homeostat status`.

use crate::failure::{Failure, Kind};
use crate::{Context, render};
use clap::Args;
use homeostat_daemon::board::hangs_for;
use homeostat_daemon::client::Client;

/// Show what homeostat does at the moment.
#[derive(Debug, Args)]
#[command(after_help = "EXAMPLES
  homeostat status
  homeostat status --all                     with the workloads for which there is nothing to do
  homeostat status --json | jq '.in_force[].action'")]
pub struct Status {
    /// Show the workloads for which there is nothing to do, too.
    #[arg(long, short)]
    all: bool,
}

impl Status {
    /// Asks and shows.
    pub(crate) fn run(self, context: &Context) -> Result<(), Failure> {
        let status = Client::connect(&context.socket())?.status()?;
        context
            .terminal
            .show(&status, |look| render::status(&status, self.all, look))?;
        match hangs_for(&status) {
            None => Ok(()),
            Some(age) => Err(Failure::Report(
                Kind::Hangs,
                format!(
                    "the loop of the daemon has published nothing for {} s, so this state is that old\n  hint: look at its log; \
                     restart it, and `homeostat restore` undoes what it leaves",
                    age.as_secs()
                ),
            )),
        }
    }
}
