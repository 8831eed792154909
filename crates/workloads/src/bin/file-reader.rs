//! `file-reader`: reads one file from beginning to end, again and again.
//!
//! The disk-bound program of the test of IBM's autotune: "creates a file of user specified size, and then repeatedly
//! reads the entire file, reporting the number of megabytes … every 10 seconds".

use clap::Parser;
use homeostat_workloads::{
    FileError, MIB, Outcome, ProgramError, Session, Share, Timing, Work, WorkFile, main_of,
};
use std::fs::File;
use std::io::{Read, Seek};
use std::path::PathBuf;
use std::process::ExitCode;

/// Bytes per read call, as `dd bs=256k`.
const READ_BYTES: usize = 256 * 1024;

/// Reads one file from beginning to end, again and again.
///
/// The progress counter counts bytes; the reports give MiB, too. A file that does not exist is created and removed
/// at the end; one that exists is read as it is and left alone.
#[derive(Debug, Parser)]
#[command(
    version,
    after_help = "Example: file-reader 8192 60 --file /var/tmp/big --report 10"
)]
struct Arguments {
    /// Size of the file if it has to be created, in MiB.
    #[arg(value_name = "MiB", value_parser = clap::value_parser!(u64).range(1..=u64::MAX / MIB))]
    mib: u64,
    #[command(flatten)]
    timing: Timing,
    /// The file (default: a new one in the directory for temporary files).
    #[arg(long, value_name = "PATH")]
    file: Option<PathBuf>,
    #[command(flatten)]
    pace: Share,
}

fn main() -> ExitCode {
    main_of("file-reader", run)
}

fn run(arguments: &Arguments) -> Result<(), ProgramError> {
    let session = Session::prepare()?;
    let path = arguments
        .file
        .clone()
        .unwrap_or_else(|| WorkFile::default_path("file-reader"));
    let file = WorkFile::find_or_make(path, arguments.mib, &session)?;
    let path = file.path();
    let failed = |what| move |source| FileError::new(what, path, source);
    let mut first = File::open(path).map_err(failed("open"))?;
    // The size from stat is zero for special files, so ask for a byte.
    if first.read(&mut [0]).map_err(failed("read"))? == 0 {
        return Err(ProgramError::Empty {
            path: path.to_owned(),
        });
    }
    let work = Work::publish("file-reader", "byte", 1);
    let worker = |thread: usize| {
        let mut duty = arguments.pace.duty();
        let mut file = &first;
        let mut buffer = vec![0; READ_BYTES];
        file.rewind()?;
        while !session.stopping() {
            match file.read(&mut buffer)? {
                0 => file.rewind()?,
                bytes => work.add(thread, bytes as u64),
            }
            duty.rest();
        }
        Ok(())
    };
    session.run(arguments.timing.plan(1), &work, worker, Outcome::mebibytes)?;
    Ok(())
}
