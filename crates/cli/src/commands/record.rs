//! `homeostat record`: what the mind sees and decides, into a file.

use crate::Context;
use crate::failure::Failure;
use clap::Args;
use homeostat_daemon::api::SCHEMA;
use homeostat_daemon::recordings::LIMIT_DEFAULT;
use homeostat_daemon::wiring::{self, RunError};
use homeostat_model::{Bytes, Nanoseconds};
use serde::Serialize;
use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// [`LIMIT_DEFAULT`] in MiB.
pub(crate) const LIMIT_MIB: u32 = (LIMIT_DEFAULT.0 / (1024 * 1024)) as u32;

/// A limit in MiB as an amount.
pub(crate) fn limit(mib: u32) -> Bytes {
    Bytes::from_mib(u64::from(mib))
}

/// Record what the mind sees and decides, changing no setting and no memory, for a bug report.
///
/// The same mind as the daemon's looks at this machine without acting and without touching journal or history; all that
/// it sees and answers goes into FILE, which `homeostat replay` can check on any machine. To record real experiments,
/// use `homeostat run --record FILE`.
///
/// PRIVACY: the recording holds the names of this machine's programs, units and containers, paths of executables,
/// telling arguments of their command lines, process numbers, sizes and rates. It is readable for you only. Look into it
/// before you hand it on: it is text, one JSON object per line.
#[derive(Debug, Args)]
#[command(after_help = "EXAMPLES
  homeostat record bug.jsonl                 five minutes
  homeostat record --seconds 3600 bug.jsonl
  homeostat run --record bug.jsonl           with experiments, until it is stopped
  homeostat replay bug.jsonl                 decides the same again")]
pub struct Record {
    /// The file to make; it must not exist.
    file: PathBuf,
    /// How long; Ctrl-C ends it early.
    #[arg(long, default_value_t = 300, value_parser = clap::value_parser!(u32).range(1..=86_400))]
    seconds: u32,
    /// Most that the file grows to, in MiB; the recording ends there.
    #[arg(long, value_name = "MIB", default_value_t = LIMIT_MIB, value_parser = clap::value_parser!(u32).range(1..))]
    limit: u32,
}

#[derive(Serialize)]
struct Recorded {
    schema: u32,
    file: PathBuf,
    bytes: u64,
}

impl Record {
    /// Records.
    pub(crate) fn run(self, context: &Context) -> Result<(), Failure> {
        let interrupted = Arc::new(AtomicBool::new(false));
        for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
            signal_hook::flag::register(signal, interrupted.clone())
                .map_err(|e| Failure::failed(format!("cannot watch for signals: {e}")))?;
        }
        let length = Nanoseconds::from_secs(u64::from(self.seconds));
        let progress = context.terminal.is_terminal && !context.terminal.json;
        if !context.terminal.json {
            let _ = writeln!(
                std::io::stderr(),
                "Recording this machine for at most {} s. Nothing is changed. The file will hold names of programs and \
                 units, paths and arguments.",
                self.seconds
            );
        }
        let record = Some((self.file.as_path(), limit(self.limit)));
        let result = wiring::rehearse_recorded(&context.sources, None, length, record, |view, elapsed| {
            if progress {
                let _ = write!(
                    std::io::stderr(),
                    "\r\x1b[K{:.0} of {} s, {} workloads",
                    elapsed.as_secs_f64(),
                    self.seconds,
                    view.workloads.len()
                );
            }
            !interrupted.load(Ordering::Relaxed)
        });
        if progress {
            let _ = write!(std::io::stderr(), "\r\x1b[K");
        }
        result.map_err(|e| match e {
            RunError::Settings(errors) => Failure::Configuration(errors),
            e => Failure::from_error(&e),
        })?;
        let bytes = std::fs::metadata(&self.file)
            .map_err(|e| Failure::failed(format!("{}: {e}", self.file.display())))?
            .len();
        let recorded = Recorded {
            schema: SCHEMA,
            file: self.file,
            bytes,
        };
        context.terminal.show(&recorded, |_| {
            format!(
                "Recorded: {} ({})\nCheck it with `homeostat replay`, and look into it before you hand it on.\n",
                recorded.file.display(),
                Bytes(recorded.bytes)
            )
        })
    }
}
