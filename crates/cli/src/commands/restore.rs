//! `homeostat restore`: from the journal alone, without the daemon.

use crate::Context;
use crate::commands::undo::{Waited, no_trial_is_on, wait_until_undone};
use crate::failure::{Failure, Kind};
use clap::Args;
use homeostat_daemon::client::{Client, ClientError};
use homeostat_daemon::meters::mend;
use homeostat_daemon::wiring::{self, RestoreError, Restored};
use serde::Serialize;
use std::fmt::Write as _;
use std::path::Path;

/// Undo what a dead daemon left behind.
///
/// Needs the journal and nothing else: no daemon, no history, no configuration. With a living daemon it asks that
/// one to undo everything.
#[derive(Debug, Args)]
#[command(after_help = "EXAMPLES
  homeostat restore                          after a crash, or before removing homeostat
  homeostat restore --kept                   also what was kept on purpose (`run --keep`)
  homeostat restore --unless-running         nothing while a daemon runs, as after the end of a service
  homeostat restore --state-dir /var/lib/homeostat")]
pub struct Restore {
    /// Also undo changes that were left in force on purpose.
    #[arg(long)]
    kept: bool,
    /// Leave alone what a living daemon has changed, and succeed.
    ///
    /// For what runs after the end of a service (`ExecStopPost=`): that one may have ended because another daemon runs, whose
    /// changes are not its business.
    #[arg(long)]
    unless_running: bool,
}

/// Who undid it, where somebody runs who looks after it.
const NOBODY: &str = "nobody";

#[derive(Clone, Serialize)]
pub(crate) struct Item {
    pub(crate) action: u64,
    pub(crate) text: String,
}

/// What was undone, and what could not be.
#[derive(Serialize)]
pub(crate) struct Answer {
    schema: u32,
    /// Who undid it: `daemon` or `journal`; or `nobody`, since somebody runs who looks after it.
    by: &'static str,
    pub(crate) undone: Vec<Item>,
    void: Vec<Item>,
    kept: Vec<Item>,
    failed: Vec<Item>,
    /// Undone, but the journal could not be written.
    unrecorded: Vec<Item>,
    /// What was counted with in programs and had been left there: taken out now.
    breakpoints: Vec<String>,
    /// … and what may still be there.
    breakpoints_left: Vec<String>,
    pub(crate) complaints: Vec<String>,
    /// The state directory whose journal was used.
    looked_in: Option<String>,
    /// The journal was damaged, or the configuration that names the state directory could not be read: something may be
    /// in force that is not known here.
    damaged: bool,
}

impl Answer {
    /// By whom, and nothing else yet.
    pub(crate) fn by(by: &'static str) -> Self {
        Self {
            schema: homeostat_daemon::api::SCHEMA,
            by,
            undone: vec![],
            void: vec![],
            kept: vec![],
            failed: vec![],
            unrecorded: vec![],
            breakpoints: vec![],
            breakpoints_left: vec![],
            complaints: vec![],
            looked_in: None,
            damaged: false,
        }
    }

    pub(crate) fn human(&self) -> String {
        let mut out = String::new();
        for complaint in &self.complaints {
            let _ = writeln!(out, "note: {complaint}");
        }
        let parts = [
            ("undone", &self.undone),
            ("nothing to undo any more", &self.void),
            ("kept on purpose (--kept undoes it)", &self.kept),
            ("NOT UNDONE", &self.failed),
            (
                "nothing left to undo, but its record could not be updated",
                &self.unrecorded,
            ),
        ];
        for (what, items) in parts {
            for item in items {
                let _ = writeln!(out, "{what}: change {}: {}", item.action, item.text);
            }
        }
        for text in &self.breakpoints {
            let _ = writeln!(out, "undone: {text}");
        }
        for text in &self.breakpoints_left {
            let _ = writeln!(out, "NOT UNDONE: {text}");
        }
        let summary = match (self.undone.len(), self.failed.len()) {
            _ if self.by == NOBODY => "Left to the one that runs.".to_owned(),
            (0, 0) if !self.breakpoints_left.is_empty() => {
                "Not everything could be taken out of programs; it stays written down.".to_owned()
            }
            (0, 0) if !self.breakpoints.is_empty() => "Restored.".to_owned(),
            (0, 0) => match &self.looked_in {
                Some(directory) => format!("Nothing to undo is known in {directory}."),
                None => "Nothing was left to undo.".to_owned(),
            },
            (n, 0) => format!("Restored: {n} change(s) undone and verified."),
            (_, failed) => format!("{failed} change(s) could not be undone; they stay in the journal."),
        };
        out + &summary
    }

    /// Whether everything is undone.
    pub(crate) fn verdict(&self) -> Result<(), Failure> {
        if self.damaged {
            Err(Failure::failed(
                "not everything could be looked at, so something may still be in force\n  hint: see the notes above; a program that is restarted has its own memory settings again, and a reboot clears all",
            ))
        } else if self.failed.is_empty() && self.breakpoints_left.is_empty() {
            match self.unrecorded.len() {
                0 => Ok(()),
                n => Err(Failure::failed(format!(
                    "everything is undone, but {n} record(s) of the journal could not be updated\n  hint: make the state \
                     directory writable and run `homeostat restore` again"
                ))),
            }
        } else {
            Err(Failure::failed(
                "the machine is not fully restored\n  hint: run it again; see the reasons above",
            ))
        }
    }
}

impl Restore {
    /// Restores and says what was done.
    pub(crate) fn run(self, context: &Context) -> Result<(), Failure> {
        let answer = if self.unless_running {
            by_hand(context, self.kept, true)?
        } else {
            match Client::connect(&context.socket()) {
                Ok(client) => match self.ask(client, &context.state_directory())? {
                    Some(answer) => answer,
                    None => {
                        let mut answer = by_hand(context, self.kept, false)?;
                        answer.complaints.push(
                            "the daemon that was asked ended meanwhile; this is what the journal here tells (of one with \
                             another state directory, --state-dir names that)"
                                .into(),
                        );
                        answer
                    }
                },
                // The state directory may belong to a daemon with another socket; its lock tells.
                Err(ClientError::NotRunning(_)) => by_hand(context, self.kept, false)?,
                Err(e) => return Err(e.into()),
            }
        };
        context.terminal.show(&answer, |_| answer.human())?;
        answer.verdict()
    }

    /// `None` when the daemon ended while it was asked: one that was killed still takes connections until the kernel
    /// has closed its socket. Whether it has is told by the journal's lock.
    fn ask(&self, mut client: Client, state_directory: &Path) -> Result<Option<Answer>, Failure> {
        let actions = match client.undo_all() {
            Err(ClientError::Broken { .. }) => return Ok(None),
            actions => actions?,
        };
        if wait_until_undone(&mut client, &actions, no_trial_is_on)? == Waited::Ended {
            return Ok(None);
        }
        let text = "by the running daemon";
        // What others have left that ended beside it; it looks after its own.
        let breakpoints = mend(state_directory);
        Ok(Some(Answer {
            undone: actions.into_iter().map(|action| Item { action, text: text.into() }).collect(),
            breakpoints: breakpoints.taken_out,
            breakpoints_left: breakpoints.left,
            complaints: vec![
                "a daemon runs and goes on looking for work; `homeostat pause` or stopping it prevents new trials"
                    .into(),
            ],
            ..Answer::by("daemon")
        }))
    }
}

/// From the journal alone. `kept`: also what was left in force on purpose.
pub(crate) fn by_hand(context: &Context, kept: bool, unless_running: bool) -> Result<Answer, Failure> {
    let directory = context.state_directory();
    // Where homeostat never ran there is nothing to restore; a directory that somebody names with --state-dir must be there.
    let Restored {
        report,
        breakpoints,
        complaints,
        damaged,
    } = match wiring::restore(&directory, kept, context.state_directory.is_some()) {
        Err(RestoreError::DaemonRuns { pid: Some(pid) }) if unless_running => {
            return Ok(Answer {
                complaints: vec![format!(
                    "process {pid} has the journal and looks after what is in it; no change was undone"
                )],
                looked_in: Some(directory.display().to_string()),
                ..Answer::by(NOBODY)
            });
        }
        Err(e @ (RestoreError::DaemonRuns { .. } | RestoreError::Ending { .. })) => {
            return Err(Failure::Report(Kind::Failed, e.to_string()));
        }
        restored => restored.map_err(|e| Failure::from_error(&e))?,
    };
    let mut complaints = complaints;
    let still_set = homeostat_daemon::tunables::still_set(&directory);
    if !still_set.is_empty() {
        complaints.push(left_to_persons(&still_set));
    }
    let items = |list: Vec<(homeostat_model::ActionId, String)>| {
        list.into_iter()
            .map(|(id, text)| Item { action: id.0, text })
            .collect()
    };
    Ok(Answer {
        schema: homeostat_daemon::api::SCHEMA,
        by: "journal",
        undone: items(report.undone),
        void: items(report.void),
        kept: items(report.kept),
        failed: items(report.failed),
        unrecorded: items(report.unrecorded),
        breakpoints: breakpoints.taken_out,
        breakpoints_left: breakpoints.left,
        complaints,
        looked_in: Some(directory.display().to_string()),
        damaged: damaged || !context.settings_are_readable(),
    })
}

/// What a person set is the person's.
pub(crate) fn left_to_persons(still_set: &[String]) -> String {
    format!(
        "set by a person with `homeostat tunable set`, and left so (`homeostat tunable unset --all` puts it back): {}",
        still_set.join(", ")
    )
}
