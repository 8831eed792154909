//! `homeostat report`: what was found, tried, gained and rejected, as one HTML file.

use crate::failure::{Failure, Kind};
use crate::{Context, page};
use clap::Args;
use homeostat_daemon::api::Stage;
use homeostat_daemon::client::{Client, ClientError};
use homeostat_daemon::dossier::Dossier;
use homeostat_daemon::settings::{self, Settings};
use homeostat_daemon::wiring::PastError;
use serde::Serialize;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

/// Workloads of which the daemon is asked for every meter.
const EXPLAINED_MAX: usize = 40;

/// Write what was found, tried, gained and rejected into one HTML file.
///
/// The file needs nothing else: no network, no script, no font. It is made from the running daemon and its history, or,
/// with the daemon dead, from the history alone. It holds the names of this machine's programs and units, and is readable
/// for you only.
#[derive(Debug, Args)]
#[command(after_help = "EXAMPLES
  homeostat report                           writes homeostat-report.html
  homeostat report -o - | ssh desk 'cat > report.html'
  homeostat report --json                    what the page is made from")]
pub struct Report {
    /// The file to write; - is standard output.
    #[arg(long, short, value_name = "FILE", default_value = "homeostat-report.html")]
    output: PathBuf,
    /// At most so many experiments, the newest.
    #[arg(long, value_name = "NUMBER", default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=1000))]
    experiments: u32,
}

#[derive(Serialize)]
struct Written<'a> {
    schema: u32,
    file: &'a Path,
    bytes: usize,
}

impl Report {
    /// Gathers, writes, and says where it is.
    pub(crate) fn run(self, context: &Context) -> Result<(), Failure> {
        let dossier = self.gather(context)?;
        if context.terminal.json {
            return context.terminal.show(&dossier, |_| String::new());
        }
        let text = page::page(&dossier);
        if self.output.as_os_str() == "-" {
            return context.terminal.print(&text);
        }
        write(&self.output, text.as_bytes()).map_err(|e| {
            Failure::from_error(&std::io::Error::new(
                e.kind(),
                format!("cannot write {}: {e}", self.output.display()),
            ))
        })?;
        let written = Written {
            schema: dossier.schema,
            file: &self.output,
            bytes: text.len(),
        };
        context.terminal.show(&written, |_| {
            format!(
                "The report is in {} ({}); open it in any browser.\n",
                written.file.display(),
                crate::render::bytes(written.bytes as u64)
            )
        })
    }

    /// From the daemon, if there is one, and from the history, if it may be read.
    fn gather(&self, context: &Context) -> Result<Dossier, Failure> {
        let now = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .map_or(0, |d| d.as_secs());
        let mut dossier = Dossier::empty(now);
        let live = ask(&context.socket(), &mut dossier);
        let policy = settings::load(&context.sources)
            .map_or_else(|_| Settings::default(), |loaded| loaded.settings)
            .policy;
        let past = dossier.add_past(&context.state_directory(), &policy, self.experiments);
        match (live, past) {
            (_, Ok(())) | (Ok(()), Err(PastError::None(_))) => Ok(dossier),
            (Ok(()), Err(e)) => {
                let why = e.to_string();
                let first = why.lines().next().unwrap_or_default();
                dossier
                    .notes
                    .push(format!("Without blocks and earlier experiments: {first}"));
                Ok(dossier)
            }
            (Err(e @ ClientError::Denied(_)), Err(_)) => Err(e.into()),
            (Err(_), Err(e @ PastError::None(_))) => Err(Failure::Report(Kind::NotFound, e.to_string())),
            (Err(_), Err(e @ PastError::Denied(_))) => Err(Failure::Report(Kind::Permission, e.to_string())),
            (Err(_), Err(e @ PastError::History(_))) => Err(Failure::failed(e.to_string())),
        }
    }
}

/// Adds what the daemon says.
fn ask(socket: &Path, dossier: &mut Dossier) -> Result<(), ClientError> {
    let mut client = Client::connect(socket)?;
    let status = client.status()?;
    for w in status
        .workloads
        .iter()
        .filter(|w| w.stage != Stage::Ignored)
        .take(EXPLAINED_MAX)
    {
        // One that ended meanwhile is no reason to go without the others.
        if let Ok(explanation) = client.explain(&w.name) {
            dossier.explanations.push(explanation);
        }
    }
    dossier.story = client.story(0)?.lines;
    dossier.status = Some(status);
    Ok(())
}

/// Writes beside the file and puts it in its place at once: whoever reads sees the old page or the new one, and a link
/// that somebody laid there is replaced, not followed.
fn write(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    let mut name = path.file_name().unwrap_or_default().to_os_string();
    name.push(format!(".{}.new", std::process::id()));
    let beside = path.with_file_name(name);
    let written = std::fs::OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(&beside)
        .and_then(|mut file| file.write_all(bytes).and_then(|()| file.sync_all()))
        .and_then(|()| std::fs::rename(&beside, path));
    if written.is_err() {
        let _ = std::fs::remove_file(&beside);
    }
    written
}
