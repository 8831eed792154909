//! `homeostat replay`: the same decisions again, from a recording.

use crate::Context;
use crate::failure::Failure;
use crate::render::text::plural;
use clap::Args;
use homeostat_daemon::api::SCHEMA;
use homeostat_daemon::recordings::{self, Difference, EndReason, Ending};
use serde::Serialize;
use std::fmt::Write;
use std::path::PathBuf;

/// Longest text of a command that is shown to people; `--json` has all of it.
const TEXT_MAX: usize = 2000;

/// Decide again from a recording and compare, byte for byte.
///
/// A mind made as the recorded one was gets the recorded events, and its commands are compared with the recorded ones up
/// to the first difference. Works without a daemon, on any machine, as any user, and touches nothing but FILE. Exit code
/// 0: identical; 1: different, or the file cannot be used.
#[derive(Debug, Args)]
#[command(after_help = "EXAMPLES
  homeostat replay bug.jsonl
  homeostat replay --json bug.jsonl")]
pub struct Replay {
    /// A recording made by `homeostat record` or `homeostat run --record`.
    file: PathBuf,
}

#[derive(Serialize)]
struct Report<'a> {
    schema: u32,
    /// Version of this program.
    version: &'static str,
    identical: bool,
    #[serde(flatten)]
    replay: &'a recordings::Replay,
}

impl Replay {
    /// Replays and shows.
    pub(crate) fn run(self, context: &Context) -> Result<(), Failure> {
        let found = recordings::replay(&self.file).map_err(|e| {
            let mut failure = Failure::from_error(&e);
            if let Failure::Report(_, message) = &mut failure {
                *message = format!("{}: {message}", self.file.display());
            }
            failure
        })?;
        let report = Report {
            schema: SCHEMA,
            version: env!("CARGO_PKG_VERSION"),
            identical: found.difference.is_none(),
            replay: &found,
        };
        context.terminal.show(&report, |_| human(&found))?;
        match &found.difference {
            None => Ok(()),
            Some(d) => Err(Failure::failed(format!(
                "the replay differs from the recording at step {}",
                d.step
            ))),
        }
    }
}

fn human(found: &recordings::Replay) -> String {
    let mut text = String::new();
    let strategies: Vec<&str> = found.strategies.iter().map(|s| s.as_str()).collect();
    let _ = writeln!(
        text,
        "recorded by homeostat {} on {}\nstrategies: {}",
        found.program,
        found.machine,
        strategies.join(", ")
    );
    if found.program != env!("CARGO_PKG_VERSION") {
        let _ = writeln!(
            text,
            "note: this is homeostat {}: another version may decide otherwise on purpose",
            env!("CARGO_PKG_VERSION")
        );
    }
    let kinds: Vec<String> = found.kinds.iter().map(|(k, n)| format!("{n} {k}")).collect();
    let _ = writeln!(
        text,
        "{} over {}, {}{}{}",
        plural(found.steps, "step"),
        found.length,
        plural(found.commands, "command"),
        if kinds.is_empty() { "" } else { ": " },
        kinds.join(", ")
    );
    match &found.ending {
        None => {}
        Some(Ending::Marked { reason }) => {
            let _ = writeln!(
                text,
                "{}",
                match reason {
                    EndReason::Limit => "the recording ends at its size limit; the daemon ran on",
                    EndReason::Finished => "the recording ends with the end of the daemon",
                    EndReason::Stopped => "the recording ends where the recorder was closed",
                }
            );
        }
        Some(Ending::Missing) => {
            text.push_str("the recording has no end marker: the recorder was killed\n");
        }
        Some(Ending::Torn { line, bytes }) => {
            let _ = writeln!(
                text,
                "line {line} is torn after {bytes} bytes and was left out: the recorder was killed while writing"
            );
        }
    }
    match &found.difference {
        None if found.texts => text.push_str("identical, byte for byte\n"),
        None => text.push_str("identical by the hash of every step (the texts were not recorded)\n"),
        Some(d) => difference(&mut text, d),
    }
    text
}

fn difference(text: &mut String, d: &Difference) {
    let _ = writeln!(
        text,
        "DIFFERENT at step {} (line {}, {} since boot, event {}){}",
        d.step,
        d.line,
        d.now,
        d.event,
        d.command
            .map_or_else(String::new, |n| format!(", command {n} of the answer"))
    );
    let shown = |side: &Option<String>| match side {
        None => "(nothing)".to_owned(),
        Some(s) if s.chars().count() > TEXT_MAX => {
            let head: String = s.chars().take(TEXT_MAX).collect();
            format!("{head} … ({} bytes in all; --json has them)", s.len())
        }
        Some(s) => s.clone(),
    };
    let recorded = if d.command.is_none() && d.recorded.is_none() {
        "(the texts were not recorded)".to_owned()
    } else {
        shown(&d.recorded)
    };
    let _ = writeln!(text, "  recorded: {recorded}\n  replayed: {}", shown(&d.replayed));
}
