//! What tests of several crates need.
#![expect(clippy::unwrap_used, reason = "a test that cannot make its files is to fail")]

use crate::Root;
use std::fs;

/// A machine of these files alone, by path below its root and text. It lasts as long as the directory is held.
pub fn tree<'f>(files: impl IntoIterator<Item = &'f (&'f str, &'f str)>) -> (tempfile::TempDir, Root) {
    let directory = tempfile::tempdir().unwrap();
    let root = Root::imitating(directory.path());
    for (path, text) in files {
        let path = root.path(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }
    (directory, root)
}
