//! `file-worker`: touches a file here and there, as a database or a search index does.
//!
//! The file-backed twin of `memory-writer`: its working set lies in the file cache, where a big reader pushes it out.

use clap::{Parser, ValueEnum};
use homeostat_workloads::chain::Random;
use homeostat_workloads::{
    BASE_PAGE_BYTES, FileError, MIB, Outcome, Pausing, ProgramError, Region, Session, Timing, Work, WorkFile,
    main_of,
};
use std::fs::File;
use std::io::{Seek, SeekFrom};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

/// Touches between two updates of the progress counter, at most.
const BATCH_MAX: u32 = 4096;
/// A batch that took longer is made smaller, so that the counter also moves while each touch waits for the disk …
const BATCH_SLOW: Duration = Duration::from_millis(20);
/// … and one that took less is made larger.
const BATCH_FAST: Duration = Duration::from_millis(1);

/// Touches a file here and there, at random.
///
/// The progress counter counts touches: one word of a mapping, or one read call of 4 KiB. A file that does not exist is
/// created and removed at the end; one that exists is left as it is.
#[derive(Debug, Parser)]
#[command(
    version,
    after_help = "Example: file-worker 256 60 --file /var/tmp/index --by pread --report 10"
)]
struct Arguments {
    /// Size of the working set, and of the file if it has to be created, in MiB.
    #[arg(value_name = "MiB", value_parser = clap::value_parser!(u64).range(1..=u64::MAX / MIB))]
    mib: u64,
    #[command(flatten)]
    timing: Timing,
    /// The file, or a disk (default: a new one in the directory for temporary files).
    #[arg(long, value_name = "PATH")]
    file: Option<PathBuf>,
    /// How it is touched.
    #[arg(long, value_enum, default_value = "mapping")]
    by: By,
    #[command(flatten)]
    pace: Pausing,
}

/// How a file is touched.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum By {
    /// Words of a shared mapping.
    Mapping,
    /// Read calls of one page.
    Pread,
}

fn main() -> ExitCode {
    main_of("file-worker", run)
}

/// What one touch reads from.
enum Source {
    Mapping(Region),
    File(File),
}

fn run(arguments: &Arguments) -> Result<(), ProgramError> {
    let session = Session::prepare()?;
    let path = arguments
        .file
        .clone()
        .unwrap_or_else(|| WorkFile::default_path("file-worker"));
    let file = WorkFile::find_or_make(path, arguments.mib, &session)?;
    let source = open(arguments, &file, &session)?;
    let pages = arguments.mib * MIB / BASE_PAGE_BYTES as u64;
    let work = Work::publish("file-worker", "touch", 1);
    let worker = |thread: usize| {
        let mut duty = arguments.pace.duty();
        let mut random = Random::new(0x005E_ED0F_11E5);
        let mut page = [0u8; BASE_PAGE_BYTES];
        let mut batch = 1;
        while !session.stopping() {
            let begin = Instant::now();
            for _ in 0..batch {
                match &source {
                    Source::Mapping(region) => {
                        let words = region.words();
                        let at = random.below(words.len() as u64) as usize;
                        std::hint::black_box(words[at].load(Relaxed));
                    }
                    Source::File(file) => {
                        file.read_exact_at(&mut page, random.below(pages) * BASE_PAGE_BYTES as u64)?;
                    }
                }
            }
            work.add(thread, u64::from(batch));
            let took = begin.elapsed();
            if took > BATCH_SLOW {
                batch = (batch / 4).max(1);
            } else if took < BATCH_FAST {
                batch = (batch * 2).min(BATCH_MAX);
            }
            duty.rest();
        }
        Ok(())
    };
    session.run(arguments.timing.plan(1), &work, worker, touches)?;
    Ok(())
}

fn open(arguments: &Arguments, file: &WorkFile, session: &Session) -> Result<Source, ProgramError> {
    let path = file.path();
    let failed = |what| move |source| FileError::new(what, path, source);
    let opened = File::options()
        .read(true)
        .write(arguments.by == By::Mapping)
        .open(path)
        .map_err(failed("open"))?;
    // Not the size in its inode, which is zero for a disk.
    let bytes = (&opened).seek(SeekFrom::End(0)).map_err(failed("look at"))?;
    // A file that was not filled to its end, because the program is to stop, is not worked on.
    if bytes < arguments.mib * MIB && !session.stopping() {
        return Err(ProgramError::Short {
            path: path.to_owned(),
            bytes,
            mib: arguments.mib,
        });
    }
    Ok(match arguments.by {
        By::Mapping => Source::Mapping(Region::of_file(opened, arguments.mib)?),
        By::Pread => Source::File(opened),
    })
}

fn touches(outcome: &Outcome) -> String {
    format!("touches_per_10s={:.0}", outcome.work_per_s() * 10.0)
}
