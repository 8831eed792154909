//! `homeostat history`: read from the file, so that it works with the daemon dead.

use crate::failure::{Failure, Kind};
use crate::{Context, render};
use clap::Args;
use homeostat_daemon::wiring::{self, PastError};

/// Show the experiments of the past; works without the daemon.
#[derive(Debug, Args)]
#[command(after_help = "EXAMPLES
  homeostat history
  homeostat history --workload redis-server.service --limit 5
  homeostat history --blocks 12              every block of experiment 12")]
pub struct History {
    /// Only of this workload (its full name).
    #[arg(long, short)]
    workload: Option<String>,
    /// One experiment with all its blocks.
    #[arg(long, value_name = "EXPERIMENT", conflicts_with = "workload")]
    blocks: Option<u64>,
    /// At most so many, newest first.
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    limit: u32,
}

impl History {
    /// Reads and shows.
    pub(crate) fn run(self, context: &Context) -> Result<(), Failure> {
        let directory = context.state_directory();
        let past =
            wiring::past(&directory, self.workload.as_deref(), self.blocks, self.limit).map_err(|e| {
                let kind = match &e {
                    PastError::None(_) => Kind::NotFound,
                    PastError::Denied(_) => Kind::Permission,
                    PastError::History(_) => Kind::Failed,
                };
                Failure::Report(kind, e.to_string())
            })?;
        if past.experiments.is_empty() {
            let missing = match (self.blocks, self.workload) {
                (Some(id), _) => Some(format!("there is no experiment {id}")),
                (None, Some(workload)) => Some(format!("there is no experiment on {workload:?}")),
                (None, None) => None,
            };
            if let Some(missing) = missing {
                let hint = "\n  hint: `homeostat history` lists what there is";
                return Err(Failure::Report(Kind::NotFound, format!("{missing}{hint}")));
            }
        }
        context
            .terminal
            .show(&past, |look| match (self.blocks, past.experiments.as_slice()) {
                (Some(_), [one]) => render::experiment(one, look),
                _ => render::past(&past, look),
            })
    }
}
