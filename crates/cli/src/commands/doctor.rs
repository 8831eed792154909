//! `homeostat doctor`.

use crate::failure::Failure;
use crate::{Context, render};
use clap::Args;
use homeostat_daemon::wiring;

/// Show what this machine can sense and do, and what is missing.
///
/// Ends with 1 when no strategy can work on this machine.
#[derive(Debug, Args)]
#[command(after_help = "EXAMPLES
  homeostat doctor                           as root, to see what the daemon would see
  homeostat doctor --json | jq '.capabilities[] | select(.state != \"available\")'")]
pub struct Doctor {}

impl Doctor {
    /// Probes and shows.
    pub(crate) fn run(self, context: &Context) -> Result<(), Failure> {
        let diagnosis = wiring::diagnose().map_err(|e| Failure::from_error(&e))?;
        context
            .terminal
            .show(&diagnosis, |look| render::diagnosis(&diagnosis, look))?;
        if diagnosis.can_act() {
            Ok(())
        } else {
            Err(Failure::failed(
                "nothing can be improved on this machine as it is; the reasons stand above",
            ))
        }
    }
}
