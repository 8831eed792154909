//! `homeostat explain`.

use crate::failure::Failure;
use crate::{Context, render};
use clap::Args;
use homeostat_daemon::client::Client;

/// Explain what was done with a workload, from the first sight to the verdict.
#[derive(Debug, Args)]
#[command(after_help = "EXAMPLES
  homeostat explain redis-server.service
  homeostat explain redis-server             the program
  homeostat explain 4711                     the process id")]
pub struct Explain {
    /// Its name as in `homeostat status`, or a process id, or its program.
    workload: String,
}

impl Explain {
    /// Asks and shows.
    pub(crate) fn run(self, context: &Context) -> Result<(), Failure> {
        let explanation = Client::connect(&context.socket())?.explain(&self.workload)?;
        context
            .terminal
            .show(&explanation, |look| render::explanation(&explanation, look))
    }
}
