//! `homeostat top`.

use crate::failure::{Failure, Kind};
use crate::top::draw::Look;
use crate::{Context, top};
use clap::Args;
use std::io::IsTerminal;
use std::path::PathBuf;

/// Watch what homeostat does, live, or go through a recording.
///
/// Shows the machine and its workloads, the trial that runs (block by block, with the estimate and its shrinking
/// interval), what is in force and what it brought, the decisions as a story, budgets and pressure. Goes back and forth in
/// time. Looking changes nothing. The key ? explains the keys.
#[derive(Debug, Args)]
#[command(after_help = "EXAMPLES
  homeostat top                              the daemon, live
  homeostat top bug.jsonl                    a recording of `homeostat run --record`
  NO_COLOR=1 homeostat top                   without colour")]
pub struct Top {
    /// A recording, instead of the daemon.
    recording: Option<PathBuf>,
}

impl Top {
    /// Shows until the reader leaves.
    pub(crate) fn run(self, context: &Context) -> Result<(), Failure> {
        if context.terminal.json {
            return Err(Failure::Report(
                Kind::Usage,
                "top draws on a terminal\n  hint: `homeostat status --json` is the same for programs"
                    .to_owned(),
            ));
        }
        if !(context.terminal.is_terminal && std::io::stdin().is_terminal()) {
            return Err(Failure::failed(
                "top needs a terminal for its picture and its keys\n  hint: `homeostat status` shows the same once",
            ));
        }
        let look = Look {
            color: context.terminal.look().color,
            unicode: speaks_unicode(),
        };
        match &self.recording {
            Some(recording) => top::replay(recording, look),
            None => top::watch(context.socket(), look),
        }
    }
}

/// Whether the terminal shows more than ASCII: by the locale, in the order in which the C library looks at it.
fn speaks_unicode() -> bool {
    let locale = ["LC_ALL", "LC_CTYPE", "LANG"]
        .iter()
        .filter_map(|name| std::env::var(name).ok())
        .find(|value| !value.is_empty())
        .unwrap_or_default()
        .to_lowercase();
    let console = std::env::var("TERM").is_ok_and(|t| matches!(t.as_str(), "linux" | "dumb" | "vt100"));
    (locale.contains("utf-8") || locale.contains("utf8")) && !console
}
