//! `homeostat run`: the daemon in the foreground.

use crate::Context;
use crate::commands::record;
use crate::failure::{Failure, Kind};
use clap::{Args, ValueEnum};
use homeostat_daemon::service::Ended;
use homeostat_daemon::settings::assignment;
use homeostat_daemon::wiring::{self, RunError};
use std::path::PathBuf;

/// Run the daemon in the foreground.
///
/// It works without a configuration. SIGTERM or Ctrl-C undoes every change and ends it; SIGHUP reads the
/// configuration again.
#[derive(Debug, Args)]
#[command(after_help = "EXAMPLES
  homeostat run                              find workloads, try, prove, keep or undo
  homeostat run --advise-only                say what would be tried; change no setting and no memory
  homeostat run --advise-first               as packages start it: that, until `homeostat on`
  homeostat run --calibrate                  placebo experiments only: measures homeostat's own false accepts
  homeostat run --record bug.jsonl           record for a bug report; `homeostat replay` decides the same again
  homeostat run --set age_min_s=5 --set cpu_min=0.2")]
pub struct Run {
    /// Find and say what would be tried; change no setting and no memory.
    #[arg(long, conflicts_with = "calibrate")]
    advise_only: bool,
    /// Only advise as long as nobody has let it act with `homeostat on`.
    ///
    /// For packages. Where no switch was ever set, the first start sets it to off; a state directory that an earlier version has
    /// worked with stays on.
    #[arg(long)]
    advise_first: bool,
    /// Run placebo experiments only; change no setting and no memory.
    #[arg(long)]
    calibrate: bool,
    /// Leave proven changes in force when the daemon stops.
    #[arg(long)]
    keep: bool,
    /// Record what is seen and decided into a new file, for `homeostat replay`. It holds names of programs and units,
    /// paths and arguments of this machine.
    #[arg(long, value_name = "FILE")]
    record: Option<PathBuf>,
    /// Most that the recording grows to, in MiB; the daemon then runs on without.
    #[arg(long, value_name = "MIB", requires = "record", default_value_t = record::LIMIT_MIB,
        value_parser = clap::value_parser!(u32).range(1..))]
    record_limit: u32,
    /// How log lines on standard error look.
    #[arg(long, value_enum)]
    log: Option<Format>,
    /// Override a setting, for example age_min_s=5 or service.lock_memory=false; may be repeated.
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<String>,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Format {
    Human,
    Json,
}

impl Run {
    /// Runs until it is told to stop.
    pub(crate) fn run(self, context: &Context) -> Result<(), Failure> {
        let mut sources = context.sources.clone();
        let mut set = |key: &str, text: &str| sources.set.push(assignment(key, text));
        if self.advise_only {
            set("policy.mode", "advise-only");
        }
        if self.calibrate {
            set("policy.mode", "calibrate");
        }
        match (self.log, context.terminal.json) {
            (Some(Format::Json), _) | (None, true) => set("service.log", "json"),
            (Some(Format::Human), _) => set("service.log", "human"),
            (None, false) => {}
        }
        if self.keep {
            sources.set.push("service.keep_on_stop=true".into());
        }
        sources.set.extend(self.set);
        let limit = record::limit(self.record_limit);
        let record = self.record.as_deref().map(|file| (file, limit));
        match wiring::run_recorded(&sources, self.advise_first, record) {
            Ok(Ended::Settled) => Ok(()),
            Ok(Ended::Unsettled { in_force }) => Err(Failure::failed(format!(
                "ended with {in_force} change(s) in force\n  hint: `homeostat restore` undoes them"
            ))),
            Err(e @ RunError::Privileges(_)) => Err(Failure::Report(Kind::Permission, e.to_string())),
            Err(RunError::Settings(errors)) => Err(Failure::Configuration(errors)),
            Err(e) => Err(Failure::from_error(&e)),
        }
    }
}
