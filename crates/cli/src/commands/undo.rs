//! `homeostat undo`.

use crate::Context;
use crate::failure::Failure;
use clap::Args;
use homeostat_daemon::api::Status;
use homeostat_daemon::client::{Client, ClientError};
use serde::Serialize;
use std::time::{Duration, Instant};

/// How long to wait until the daemon has undone what was asked.
const PATIENCE: Duration = Duration::from_secs(90);
const ASK_AGAIN: Duration = Duration::from_millis(200);

/// Undo one change or all of them.
///
/// Waits until it is done. The workload is not tried again with the same change for a while; to keep it from being
/// tried at all, write a rule into the configuration.
#[derive(Debug, Args)]
#[command(after_help = "EXAMPLES
  homeostat undo 17                          the number stands in `homeostat status`
  homeostat undo --all                       everything, running trials included")]
pub struct Undo {
    /// Number of the change.
    #[arg(required_unless_present = "all")]
    action: Option<u64>,
    /// Everything.
    #[arg(long, conflicts_with = "action")]
    all: bool,
}

#[derive(Serialize)]
struct Answer {
    schema: u32,
    undone: Vec<u64>,
}

impl Undo {
    /// Asks, waits and says so.
    pub(crate) fn run(self, context: &Context) -> Result<(), Failure> {
        let mut client = Client::connect(&context.socket())?;
        let undone = match self.action {
            Some(action) => {
                client.undo(action)?;
                vec![action]
            }
            None => client.undo_all()?,
        };
        if wait_until_undone(&mut client, &undone, |s| !self.all || no_trial_is_on(s))? == Waited::Ended {
            return Err(ended());
        }
        let answer = Answer {
            schema: homeostat_daemon::api::SCHEMA,
            undone,
        };
        context
            .terminal
            .show(&answer, |_| match answer.undone.as_slice() {
                [] => "Nothing was in force; running trials are undone.".into(),
                [one] => format!("Undone: change {one}."),
                several => format!("Undone: {} changes.", several.len()),
            })
    }
}

/// The daemon is gone before it could be seen that the changes are.
pub(crate) fn ended() -> Failure {
    Failure::failed(
        "the daemon ended before it said that the changes are undone\n  hint: `homeostat restore` undoes what is left, and \
         says so when nothing is",
    )
}

/// What came of waiting for an undo.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Waited {
    /// The changes are gone.
    Undone,
    /// The daemon is gone before that could be seen. It may have undone everything, or have been killed: the journal knows.
    Ended,
}

/// Whether no trial has its change on.
pub(crate) fn no_trial_is_on(status: &Status) -> bool {
    !status.experiments.iter().any(|e| e.on)
}

/// Waits until the changes are gone, and what `and_then` asks of the state.
pub(crate) fn wait_until_undone(
    client: &mut Client,
    actions: &[u64],
    and_then: impl Fn(&Status) -> bool,
) -> Result<Waited, Failure> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let status = match client.status() {
            Ok(status) => status,
            Err(ClientError::Broken { .. }) => return Ok(Waited::Ended),
            Err(e) => return Err(e.into()),
        };
        let left: Vec<u64> = status
            .in_force
            .iter()
            .map(|c| c.action.0)
            .filter(|action| actions.contains(action))
            .collect();
        if left.is_empty() && and_then(&status) {
            return Ok(Waited::Undone);
        }
        if Instant::now() > deadline {
            return Err(Failure::failed(format!(
                "the daemon took the request, but after {} s changes {left:?} are still in force\n  hint: \
                 `homeostat status` shows them; the undo goes on",
                PATIENCE.as_secs()
            )));
        }
        std::thread::sleep(ASK_AGAIN);
    }
}
