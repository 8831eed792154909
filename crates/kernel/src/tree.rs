//! Files of the machine, or of a captured one, for the catalogue.

use crate::{Root, files, kernel_config};
use homeostat_tunables::{Tree, Unreadable};
use std::io::ErrorKind;

impl Tree for Root {
    fn read(&self, path: &str) -> Result<Vec<u8>, Unreadable> {
        // A write-only setting (`0200`) could be opened by root, but would return an error.
        files::read(self, path, files::SMALL_FILE_MAX).map_err(|e| match std::io::Error::from(e).kind() {
            ErrorKind::NotFound | ErrorKind::NotADirectory => Unreadable::Absent,
            ErrorKind::PermissionDenied => Unreadable::Denied,
            _ => Unreadable::Failed,
        })
    }

    fn names(&self, directory: &str) -> Vec<String> {
        files::names(self, directory)
    }

    fn real_path(&self, path: &str) -> Option<String> {
        Root::real_path(self, path)
    }

    fn kernel_configuration(&self) -> Option<Vec<u8>> {
        kernel_config::read(self)
    }
}
