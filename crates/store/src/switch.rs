//! The switch: whether homeostat may act on this machine. It persists over restarts, reboots and upgrades. One file in
//! the state directory (mode 0600) contains `on` or `off` and a newline. It is replaced as a whole and synced: a crash
//! leaves the old or the new position. An unreadable switch, or one that others may write, counts as off.

use crate::journal::{self, JournalError};
use rustix::fs::{Mode, OFlags};
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

/// Name of the switch in the state directory.
pub const SWITCH_FILE: &str = "switch";
const NEW_FILE: &str = "switch.new";
const BYTES_MAX: u64 = 16;
const REMEDY: &str = "`homeostat on` or `homeostat off` writes it anew";

/// The state of the switch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Switch {
    /// Whether homeostat may act. False also where the file cannot be read.
    pub on: bool,
    /// Time of the change, seconds since the epoch; absent if unknown.
    pub since_unix: Option<u64>,
    /// Why it counts as off although the file does not say so, with the remedy.
    pub trouble: Option<String>,
}

/// Why the switch cannot be written.
#[derive(Debug, thiserror::Error)]
pub enum SwitchError {
    /// The state directory cannot be used.
    #[error("{0}")]
    Directory(#[from] JournalError),
    /// The file cannot be written.
    #[error("{}: cannot {what} the switch: {source}\n  hint: make that file system writable, with some space, and run it again", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The attempt.
        what: &'static str,
        /// Why it failed.
        source: io::Error,
    },
}

/// Reads the switch; `None` where it was never set.
pub fn read(state_directory: &Path) -> Option<Switch> {
    let path = state_directory.join(SWITCH_FILE);
    let unknown = |why: String| {
        Some(Switch {
            on: false,
            since_unix: None,
            trouble: Some(format!("{} {why}, so it counts as off; {REMEDY}", path.display())),
        })
    };
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let file = match rustix::fs::open(&path, flags, Mode::empty()) {
        Ok(file) => File::from(file),
        Err(rustix::io::Errno::NOENT) => return None,
        Err(e) => return unknown(format!("cannot be read ({e})")),
    };
    let about = match file.metadata() {
        Ok(about) => about,
        Err(e) => return unknown(format!("cannot be read ({e})")),
    };
    let own = rustix::process::geteuid().as_raw();
    if !about.is_file() {
        return unknown("is not a file".to_owned());
    }
    if about.mode() & 0o022 != 0 || (about.uid() != 0 && about.uid() != own) {
        return unknown("may have been written by others than root".to_owned());
    }
    let mut text = Vec::new();
    if let Err(e) = (&file).take(BYTES_MAX).read_to_end(&mut text) {
        return unknown(format!("cannot be read ({e})"));
    }
    let on = match text.trim_ascii() {
        b"on" => true,
        b"off" => false,
        _ => return unknown("says neither on nor off".to_owned()),
    };
    let since = about
        .modified()
        .ok()
        .and_then(|at| at.duration_since(UNIX_EPOCH).ok());
    Some(Switch {
        on,
        since_unix: since.map(|since| since.as_secs()),
        trouble: None,
    })
}

/// Sets the switch and creates the state directory if needed. The switch is on the disk on return.
///
/// # Errors
/// [`SwitchError`]; the switch is unchanged.
pub fn write(state_directory: &Path, on: bool) -> Result<(), SwitchError> {
    journal::create_directory(state_directory)?;
    let path = state_directory.join(SWITCH_FILE);
    let new = state_directory.join(NEW_FILE);
    let failed = |what: &'static str, path: &Path| {
        let path = path.to_owned();
        move |source: io::Error| SwitchError::File { path, what, source }
    };
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::TRUNC | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    let file = rustix::fs::open(&new, flags, Mode::RUSR | Mode::WUSR);
    let mut file = File::from(file.map_err(|e| failed("write", &new)(e.into()))?);
    file.write_all(if on { b"on\n" } else { b"off\n" })
        .and_then(|()| file.sync_all())
        .map_err(failed("write", &new))?;
    std::fs::rename(&new, &path).map_err(failed("replace", &path))?;
    File::open(state_directory)
        .and_then(|directory| directory.sync_all())
        .map_err(failed("sync", &path))
}

/// Whether a version without a switch has acted with this state directory. Its journal has numbered an action and has
/// no record count. The history is no evidence, since an advising daemon writes one too.
pub fn has_acted(state_directory: &Path) -> bool {
    !state_directory.join(journal::COUNT_FILE).exists()
        && journal::read(state_directory).is_ok_and(|found| !found.owed.is_empty() || found.next_action.0 > 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Journal, JournalOptions};
    use std::os::unix::fs::{PermissionsExt, symlink};

    fn position(directory: &Path) -> Option<bool> {
        read(directory).map(|switch| switch.on)
    }

    #[test]
    fn what_was_written_is_read_and_the_file_is_private() {
        let home = tempfile::tempdir().unwrap();
        let directory = home.path().join("state");
        assert_eq!(read(&directory), None);
        write(&directory, false).unwrap();
        assert_eq!(position(&directory), Some(false));
        assert_eq!(std::fs::read(directory.join(SWITCH_FILE)).unwrap(), b"off\n");
        write(&directory, true).unwrap();
        let switch = read(&directory).unwrap();
        assert!(switch.on && switch.trouble.is_none() && switch.since_unix > Some(1_600_000_000));
        assert_eq!(std::fs::read(directory.join(SWITCH_FILE)).unwrap(), b"on\n");
        let mode = |name: &str| std::fs::metadata(directory.join(name)).unwrap().mode() & 0o777;
        assert_eq!((mode(SWITCH_FILE), mode("")), (0o600, 0o700));
        assert!(!directory.join(NEW_FILE).exists());
        // A kill before the replacement leaves the old position.
        std::fs::write(directory.join(NEW_FILE), "off\n").unwrap();
        assert_eq!(position(&directory), Some(true));
        write(&directory, false).unwrap();
        assert_eq!(position(&directory), Some(false));
    }

    #[test]
    fn a_switch_that_cannot_be_trusted_counts_as_off_and_says_what_to_do() {
        let home = tempfile::tempdir().unwrap();
        let directory = home.path();
        let file = directory.join(SWITCH_FILE);
        let is_off = |what: &str| {
            let switch = read(directory).unwrap();
            let trouble = switch.trouble.unwrap_or_default();
            assert!(!switch.on && trouble.contains(what), "{what}: {trouble}");
            assert!(trouble.contains("`homeostat on` or `homeostat off` writes it anew"));
        };
        for text in ["", "ON", "on off", "on\0", "off and on again, and so on"] {
            std::fs::write(&file, text).unwrap();
            is_off("neither on nor off");
        }
        std::fs::write(&file, "on").unwrap();
        assert_eq!(position(directory), Some(true), "the newline may be missing");
        std::fs::set_permissions(&file, PermissionsExt::from_mode(0o622)).unwrap();
        is_off("others than root");
        std::fs::remove_file(&file).unwrap();
        std::fs::write(directory.join("elsewhere"), "on\n").unwrap();
        symlink(directory.join("elsewhere"), &file).unwrap();
        is_off("cannot be read");
        // Written anew, it is a file again, and what the link led to is untouched.
        write(directory, true).unwrap();
        assert_eq!(position(directory), Some(true));
        std::fs::remove_file(&file).unwrap();
        std::fs::create_dir(&file).unwrap();
        is_off("is not a file");
        assert!(write(directory, true).is_err());
    }

    #[test]
    fn an_earlier_version_that_acted_is_told_from_one_that_only_advised() {
        let home = tempfile::tempdir().unwrap();
        let directory = home.path();
        assert!(!has_acted(&directory.join("none")));
        assert!(!has_acted(directory));
        // As a daemon that only advises leaves it: a history, and a journal that has numbered nothing.
        std::fs::write(directory.join(crate::history::HISTORY_FILE), "").unwrap();
        drop(Journal::open(directory, JournalOptions::default()).unwrap());
        assert!(!has_acted(directory));
        let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/upgrade");
        for journal in ["journal-in-trial", "journal-accepted"] {
            let acted = tempfile::tempdir().unwrap();
            let file = acted.path().join(journal::JOURNAL_FILE);
            std::fs::copy(fixtures.join(journal), file).unwrap();
            assert!(has_acted(acted.path()), "{journal}");
            // A daemon of this version, started by hand: the package then begins switched off.
            drop(Journal::open_for_undo(acted.path(), JournalOptions::default()).unwrap());
            assert!(!has_acted(acted.path()), "{journal}");
        }
    }
}
