//! Files that the programs work on: made for a run and removed after it, or somebody's own and left alone.

use crate::{MIB, Session};
use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// Why a file cannot be worked on.
#[derive(Debug, thiserror::Error)]
#[error("cannot {what} {}: {source}", path.display())]
pub struct FileError {
    what: &'static str,
    path: PathBuf,
    source: io::Error,
}

impl FileError {
    /// What failed, on which file, and the system's answer.
    pub fn new(what: &'static str, path: &Path, source: io::Error) -> Self {
        Self {
            what,
            path: path.to_owned(),
            source,
        }
    }
}

/// A file to work on. One that was made for the run is removed on drop.
#[derive(Debug)]
pub struct WorkFile {
    path: PathBuf,
    is_own: bool,
}

impl WorkFile {
    /// The file at `path`, made with `mib` MiB of content that does not compress to nothing when it does not exist. Making it
    /// ends early when the session is to stop.
    ///
    /// # Errors
    /// When it can neither be made nor is there.
    pub fn find_or_make(path: PathBuf, mib: u64, session: &Session) -> Result<Self, FileError> {
        match File::options().write(true).create_new(true).open(&path) {
            Ok(file) => {
                let own = Self { path, is_own: true };
                fill(file, mib, session).map_err(|e| FileError::new("fill", &own.path, e))?;
                Ok(own)
            }
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(Self { path, is_own: false }),
            Err(error) => Err(FileError::new("create", &path, error)),
        }
    }

    /// A name in the directory for temporary files, of this program and process.
    #[must_use]
    pub fn default_path(program: &str) -> PathBuf {
        std::env::temp_dir().join(format!("homeostat-{program}-{}", std::process::id()))
    }

    /// Where it is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for WorkFile {
    fn drop(&mut self) {
        if self.is_own {
            if let Err(error) = std::fs::remove_file(&self.path) {
                eprintln!("cannot remove {}: {error}", self.path.display());
            }
        }
    }
}

fn fill(mut file: File, mib: u64, session: &Session) -> io::Result<()> {
    // Not zeroes: a file system that compresses would keep none of them.
    let block: Vec<u8> = (0..MIB)
        .map(|at| (at.wrapping_mul(0x9E37_79B9) >> 16) as u8)
        .collect();
    for _ in 0..mib {
        if session.stopping() {
            break;
        }
        file.write_all(&block)?;
    }
    file.sync_all()
}
