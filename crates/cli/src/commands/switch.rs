//! `homeostat on` and `homeostat off`: the switch, which holds over restarts, reboots and upgrades.

use crate::Context;
use crate::commands::restore::{self, Item};
use crate::commands::undo::{Waited, ended, wait_until_undone};
use crate::failure::{Failure, Kind};
use clap::Args;
use homeostat_daemon::api::{SCHEMA, Switch};
use homeostat_daemon::client::{Client, ClientError};
use homeostat_daemon::settings;
use homeostat_daemon::switch::Standing;
use homeostat_daemon::tunables::still_set;
use serde::Serialize;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

/// Let homeostat act: try changes, and keep what is proven to help.
///
/// Holds over restarts, reboots and upgrades, until `homeostat off`. A package is installed with the switch off. After a pause,
/// `homeostat resume` lets it go on instead.
#[derive(Debug, Args)]
#[command(after_help = "EXAMPLES
  homeostat on
  homeostat status | head -1                 whether it is on, since when and why")]
pub struct On {}

/// Undo everything, change nothing from now on, and stay so until `homeostat on`.
///
/// Waits until all is undone: trials, proven changes, what was kept over a stop. homeostat goes on looking and advising. It holds
/// over restarts, reboots and upgrades, and works without a daemon as `homeostat restore` does. Settings that a person set with
/// `homeostat tunable set` stay. Lighter: `homeostat pause` keeps proven changes in force, and ends with the daemon.
#[derive(Debug, Args)]
#[command(after_help = "EXAMPLES
  homeostat off                              whether the daemon runs or not
  homeostat --json off | jq '.undone[].text'")]
pub struct Off {}

#[derive(Serialize)]
struct OnAnswer {
    schema: u32,
    /// Whether it stood otherwise before.
    changed: bool,
    /// How it stands now.
    switch: Switch,
    /// Why it does not act all the same.
    problem: Option<String>,
}

#[derive(Serialize)]
struct OffAnswer {
    /// Whether it stood otherwise before.
    changed: bool,
    /// How it stands now.
    switch: Switch,
    #[serde(flatten)]
    restored: restore::Answer,
}

/// The switch is root's, with or without a daemon.
fn must_be_root() -> Result<(), Failure> {
    match rustix::process::geteuid().is_root() {
        true => Ok(()),
        false => Err(Failure::Report(
            Kind::Permission,
            "only root may switch homeostat on or off\n  hint: run it as root".to_owned(),
        )),
    }
}

/// The switch as a daemon that starts now would find it.
pub(crate) fn standing(context: &Context, state_directory: &Path) -> Standing {
    let (mode, from) = match settings::load(&context.sources) {
        Ok(loaded) => (loaded.settings.policy.mode, loaded.mode_from),
        // The paths were looked for in it, with a warning.
        Err(_) => (settings::Policy::default().mode, None),
    };
    Standing::read(state_directory, mode, from)
}

/// Sets the switch without a daemon.
fn set(context: &Context, state_directory: &Path, on: bool) -> Result<(bool, Standing), Failure> {
    let mut standing = standing(context, state_directory);
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let changed = standing
        .set(on, now.map_or(0, |now| now.as_secs()))
        .map_err(|e| Failure::from_error(&e))?;
    Ok((changed, standing))
}

impl On {
    /// Lets it act, and says if something else keeps it from that.
    pub(crate) fn run(self, context: &Context) -> Result<(), Failure> {
        must_be_root()?;
        let (changed, switch, problem) = match Client::connect(&context.socket()) {
            Ok(mut client) => {
                let switched = client.switch(true)?;
                (switched.changed, switched.switch, switched.problem)
            }
            Err(ClientError::NotRunning(_)) => {
                // It may name another state directory, where the next start looks for the switch.
                if context.state_directory.is_none() {
                    settings::load(&context.sources).map_err(Failure::Configuration)?;
                }
                let (changed, standing) = set(context, &context.state_directory(), true)?;
                // A daemon that began meanwhile may have read the switch before it was set; then it has its socket by now.
                if let Ok(mut client) = Client::connect(&context.socket()) {
                    let switched = client.switch(true)?;
                    (changed || switched.changed, switched.switch, switched.problem)
                } else {
                    let why = standing.forbidden_by();
                    let problem = why.map(|(_, why, remedy)| format!("{why}\n  hint: {remedy}"));
                    (changed, standing.shown(), problem)
                }
            }
            Err(e) => return Err(e.into()),
        };
        let answer = OnAnswer {
            schema: SCHEMA,
            changed,
            switch,
            problem,
        };
        context
            .terminal
            .show(&answer, |_| match (changed, answer.switch.on) {
                (true, _) => answer.switch.sentence(),
                (false, true) => format!("It was on already: {}", answer.switch.sentence()),
                (false, false) => answer.switch.sentence(),
            })?;
        match answer.problem {
            None => Ok(()),
            Some(problem) => Err(Failure::failed(format!("homeostat does not act: {problem}"))),
        }
    }
}

impl Off {
    /// Switches it off, waits until all is undone and says what was.
    pub(crate) fn run(self, context: &Context) -> Result<(), Failure> {
        must_be_root()?;
        let directory = context.state_directory();
        let answer = match Client::connect(&context.socket()) {
            Ok(client) => ask(context, client, &directory)?,
            Err(ClientError::NotRunning(_)) => alone(context, &directory)?,
            Err(e) => return Err(e.into()),
        };
        context.terminal.show(&answer, |_| {
            let already = if answer.changed {
                ""
            } else {
                "It was off already: "
            };
            format!(
                "{already}{}\n{}",
                answer.switch.sentence(),
                answer.restored.human()
            )
        })?;
        answer.restored.verdict()
    }
}

/// Has the daemon do it.
fn ask(context: &Context, mut client: Client, directory: &Path) -> Result<OffAnswer, Failure> {
    // Only for its words: what is in force is counted by the daemon when it takes the request.
    let before = client
        .status()
        .map_or_else(|_| Vec::new(), |status| status.in_force);
    let switched = match client.switch(false) {
        // It was killed, and still takes connections until the kernel has closed its socket.
        Err(ClientError::Broken { .. }) => return alone(context, directory),
        Err(e @ (ClientError::Silent(_) | ClientError::Busy(_) | ClientError::Protocol { .. })) => {
            // Whatever it does now, its next start must not act.
            return Err(match set(context, directory, false) {
                Ok(_) => e.into(),
                Err(Failure::Report(kind, why)) => Failure::Report(kind, format!("{e}\n{why}")),
                Err(other) => other,
            });
        }
        switched => switched?,
    };
    let gone = |s: &homeostat_daemon::api::Status| s.experiments.is_empty();
    if wait_until_undone(&mut client, &switched.actions, gone).map_err(but_is_off)? == Waited::Ended {
        return Err(ended());
    }
    let text = |action: u64| {
        let change = before.iter().find(|c| c.action.0 == action);
        change.map_or_else(
            || "by the running daemon".to_owned(),
            |c| format!("{}: {}", c.workload, c.text),
        )
    };
    let mut restored = restore::Answer::by("daemon");
    restored.undone = switched
        .actions
        .iter()
        .map(|action| Item {
            action: *action,
            text: text(*action),
        })
        .collect();
    restored.complaints.extend(persons(directory));
    if let Some(problem) = switched.problem {
        return Err(Failure::failed(format!(
            "everything is undone and the daemon is off, but only until it ends: {problem}"
        )));
    }
    Ok(OffAnswer {
        changed: switched.changed,
        switch: switched.switch,
        restored,
    })
}

/// Without a daemon: first the switch, so that none acts that starts meanwhile, then the journal. Where the switch cannot be
/// recorded, everything is undone all the same.
fn alone(context: &Context, directory: &Path) -> Result<OffAnswer, Failure> {
    let switched = set(context, directory, false);
    let restored = restore::by_hand(context, true, false);
    let (changed, standing) = match (switched, &restored) {
        (Ok(switched), _) => switched,
        (Err(Failure::Report(kind, why)), Ok(restored)) => {
            let human = restored.human();
            return Err(Failure::Report(
                kind,
                format!("{why}\nIt stays as it was. {human}"),
            ));
        }
        (Err(failure), _) => return Err(failure),
    };
    match restored {
        Ok(mut restored) => {
            if !context.settings_are_readable() {
                restored.complaints.push(format!(
                    "the configuration cannot be read, so the switch was set in {}; if it names another state directory, mend it and run \
                     `homeostat off` again",
                    directory.display()
                ));
            }
            Ok(OffAnswer {
                changed,
                switch: standing.shown(),
                restored,
            })
        }
        // One that was just starting has the journal, and may have read the switch before it was set.
        Err(failure) => match Client::connect(&context.socket()) {
            Ok(client) => ask(context, client, directory),
            Err(_) => Err(but_is_off(failure)),
        },
    }
}

/// The switch is recorded, whatever else failed.
fn but_is_off(failure: Failure) -> Failure {
    match failure {
        Failure::Report(kind, why) => Failure::Report(
            kind,
            format!("the switch is off, but not everything is undone: {why}"),
        ),
        other => other,
    }
}

/// What a person set stays, and is named.
fn persons(directory: &Path) -> Option<String> {
    let still_set = still_set(directory);
    (!still_set.is_empty()).then(|| restore::left_to_persons(&still_set))
}
