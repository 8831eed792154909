//! `homeostat locality`.

use crate::failure::Failure;
use crate::{Context, render};
use clap::Args;
use homeostat_daemon::api::{Found, find_named};
use homeostat_daemon::client::ClientError;
use homeostat_daemon::places::{self, Observer, Wanted};
use homeostat_model::Nanoseconds;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Show where workloads run and their memory lies: local, near and far.
///
/// Works with and without the daemon, and changes nothing. As root it sees every workload, else those of the user.
#[derive(Debug, Args)]
#[command(after_help = "EXAMPLES
  homeostat locality                         the largest workloads of this machine
  homeostat locality redis-server            one of them in full: memory by node and kind, threads by cache
  homeostat locality --watch                 again and again, until Ctrl-C
  homeostat locality --root captured/        another machine, captured with fixtures/capture.sh
  homeostat locality --json | jq '.workloads[] | {name, local, score}'
  homeostat locality --watch --json          one JSON document a line")]
pub struct Locality {
    /// Its name as in `homeostat status`, or a process id, or its program.
    workload: Option<String>,
    /// Show it again and again, until Ctrl-C.
    #[arg(long, short)]
    watch: bool,
    /// Seconds to watch for each picture.
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=3600))]
    seconds: u32,
    /// Show every workload, not only the largest.
    #[arg(long, short, conflicts_with = "workload")]
    all: bool,
    /// Directory that holds the /proc and /sys of another machine: what is counted over time is not known there.
    #[arg(long, value_name = "DIRECTORY", conflicts_with = "watch")]
    root: Option<PathBuf>,
}

impl Locality {
    /// Watches and shows.
    pub(crate) fn run(self, context: &Context) -> Result<(), Failure> {
        let interrupted = Arc::new(AtomicBool::new(false));
        for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
            signal_hook::flag::register(signal, interrupted.clone())
                .map_err(|e| Failure::failed(format!("cannot watch for signals: {e}")))?;
        }
        let mut observer = Observer::begin(self.root.as_deref(), &context.state_directory())
            .map_err(|e| Failure::from_error(&e))?;
        let wanted = match &self.workload {
            Some(name) => Wanted::One(match find_named(observer.workloads(), name) {
                Found::One(workload) => workload.id.clone(),
                Found::Near(near) => return Err(not_found(name, near, false)),
                Found::Several(several) => return Err(not_found(name, several, true)),
            }),
            None if self.all => Wanted::Largest(usize::MAX),
            None => Wanted::Largest(places::SHOWN),
        };
        let length = Nanoseconds::from_secs(u64::from(self.seconds));
        loop {
            let seen = observer
                .watch(&wanted, length, || !interrupted.load(Ordering::Relaxed))
                .map_err(|e| Failure::from_error(&e))?;
            if interrupted.load(Ordering::Relaxed) && self.watch {
                return Ok(());
            }
            let terminal = &context.terminal;
            if terminal.json && self.watch {
                let line = serde_json::to_string(&seen)
                    .map_err(|e| Failure::failed(format!("cannot be expressed as JSON: {e}")))?;
                terminal.print(&line)?;
            } else {
                if self.watch {
                    terminal.clear()?;
                }
                terminal.show(&seen, |look| {
                    if self.workload.is_some() {
                        render::locality_of_one(&seen, look)
                    } else {
                        render::locality(&seen, look)
                    }
                })?;
            }
            if !self.watch {
                return Ok(());
            }
        }
    }
}

fn not_found(name: &str, near: Vec<String>, ambiguous: bool) -> Failure {
    ClientError::WorkloadNotFound {
        workload: name.to_owned(),
        near,
        ambiguous,
    }
    .into()
}
