//! `homeostat memory`.

use crate::failure::Failure;
use crate::{Context, render};
use clap::Args;
use homeostat_daemon::client::Client;
use homeostat_daemon::memory;
use homeostat_model::Nanoseconds;
use std::path::PathBuf;

/// Show whether memory is short, what it is used for, who reads files, who waits for pages, and who pushes whom out.
///
/// Judged by what is taken and brought back, not by how full memory is. Works with and without the daemon, and changes
/// nothing. As root it sees what every workload reads, else those of the user. Whose memory grows and may leak is known where a
/// daemon has watched for half an hour.
#[derive(Debug, Args)]
#[command(after_help = "EXAMPLES
  homeostat memory
  homeostat memory --seconds 10              watch longer
  homeostat memory --json | jq '{verdict, why}'")]
pub struct Memory {
    /// Seconds to watch.
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=3600))]
    seconds: u32,
    /// Show every workload, not only the first.
    #[arg(long, short)]
    all: bool,
    /// Directory that holds the /proc and /sys of another machine.
    #[arg(long, value_name = "DIRECTORY")]
    root: Option<PathBuf>,
}

impl Memory {
    /// Watches and shows.
    pub(crate) fn run(self, context: &Context) -> Result<(), Failure> {
        let length = Nanoseconds::from_secs(u64::from(self.seconds));
        let most = if self.all { usize::MAX } else { memory::SHOWN };
        let mut seen =
            memory::watch(self.root.as_deref(), length, most).map_err(|e| Failure::from_error(&e))?;
        // That of another machine is not known to a daemon of this one.
        if self.root.is_none() {
            if let Ok(status) = Client::connect(&context.socket()).and_then(|mut daemon| daemon.status()) {
                seen.add_growing(&status.advice);
            }
        }
        context.terminal.show(&seen, |look| render::memory(&seen, look))
    }
}
