//! `homeostat doctor`.

use crate::commands::switch::standing;
use crate::failure::Failure;
use crate::{Context, render};
use clap::Args;
use homeostat_daemon::wiring;
use std::path::PathBuf;

/// Show what this machine can sense and do, and what is missing.
///
/// Ends with 1 when no strategy can work on this machine.
#[derive(Debug, Args)]
#[command(after_help = "EXAMPLES
  homeostat doctor                           as root, to see what the daemon would see
  homeostat doctor --root captured/          another machine, captured with fixtures/capture.sh
  homeostat doctor --json | jq '.capabilities[] | select(.state != \"available\")'")]
pub struct Doctor {
    /// Directory that holds the /proc, /sys and /etc of another machine.
    #[arg(long, value_name = "DIRECTORY")]
    root: Option<PathBuf>,
}

impl Doctor {
    /// Probes and shows.
    pub(crate) fn run(self, context: &Context) -> Result<(), Failure> {
        let mut diagnosis = wiring::diagnose(self.root.as_deref()).map_err(|e| Failure::from_error(&e))?;
        // The state directory is root's.
        if self.root.is_none() && rustix::process::geteuid().is_root() {
            diagnosis.switch = Some(standing(context, &context.state_directory()).shown());
        }
        context
            .terminal
            .show(&diagnosis, |look| render::diagnosis(&diagnosis, look))?;
        // Nobody can act on files; what they tell is all that was asked for.
        if self.root.is_some() || diagnosis.can_act() {
            Ok(())
        } else {
            Err(Failure::failed(verdict(rustix::process::geteuid().is_root())))
        }
    }
}

/// Why nothing can be done. Most of what is missing to anybody but root is not missing to the daemon.
fn verdict(is_root: bool) -> &'static str {
    if is_root {
        "nothing can be improved on this machine as it is; the reasons stand above"
    } else {
        "this user can improve nothing here; the reasons stand above\n  hint: run `homeostat doctor` as root, as the daemon \
         runs"
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_user_may_not_do_is_not_called_impossible() {
        assert!(verdict(false).contains("hint: run `homeostat doctor` as root"));
        assert!(verdict(true).contains("this machine"));
    }
}
