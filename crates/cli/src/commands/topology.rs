//! `homeostat topology`.

use crate::failure::Failure;
use crate::{Context, render};
use clap::Args;
use homeostat_daemon::places;
use std::path::PathBuf;

/// Show the machine's shape: packages, caches, cores, memory nodes with distances and tiers, and where devices sit.
///
/// Needs no daemon and no privilege.
#[derive(Debug, Args)]
#[command(after_help = "EXAMPLES
  homeostat topology
  homeostat topology --json | jq '.nodes[] | {id, cpus, memory_bytes}'
  homeostat topology --root captured/        another machine, captured with fixtures/capture.sh")]
pub struct Topology {
    /// Directory that holds the /proc and /sys of another machine.
    #[arg(long, value_name = "DIRECTORY")]
    root: Option<PathBuf>,
}

impl Topology {
    /// Reads and shows.
    pub(crate) fn run(self, context: &Context) -> Result<(), Failure> {
        let topology = places::describe(self.root.as_deref()).map_err(|e| Failure::from_error(&e))?;
        context
            .terminal
            .show(&topology, |look| render::topology(&topology, look))
    }
}
