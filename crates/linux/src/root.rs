//! The directory below which `/proc`, `/sys`, `/etc` and `/run` are read.

use std::path::{Path, PathBuf};

/// The root of the file tree that describes the machine: `/` in production, a captured tree in tests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Root(PathBuf);

impl Root {
    /// A root other than `/`.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self(path.into())
    }
    /// The file of that absolute path, below the root.
    pub fn path(&self, absolute: &str) -> PathBuf {
        self.0.join(absolute.trim_start_matches('/'))
    }
    /// The root itself.
    pub fn as_path(&self) -> &Path {
        &self.0
    }
    /// Whether this is the running machine, where system calls on processes make sense.
    pub fn is_live(&self) -> bool {
        self.0 == Path::new("/")
    }
}

impl Default for Root {
    fn default() -> Self {
        Self(PathBuf::from("/"))
    }
}
