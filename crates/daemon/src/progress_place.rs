//! The directory in which programs publish progress counters: a file system of limited size, so that no user can fill
//! `/run`. In the service's sandbox a mount would stay inside, so the unit makes it before the daemon starts.

use homeostat_meters::MeterSettings;
use rustix::mount::{MountFlags, mount};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::Path;

/// Size and files. Most programs' files have up to four pages, at most nine (`homeostat_progress::layout`).
const OPTIONS: &std::ffi::CStr = c"size=4m,nr_inodes=1024,mode=1777";

/// Makes the directory if it is the usual one and this process is root. Returns warnings for people.
pub fn make(settings: &MeterSettings) -> Option<String> {
    let directory = &settings.progress_directory;
    // Its owner makes another directory.
    if *directory != MeterSettings::default().progress_directory || !rustix::process::geteuid().is_root() {
        return None;
    }
    let shown = directory.display();
    match make_at(directory) {
        Ok(true) => None,
        Ok(false) => Some(format!(
            "every user may fill the file system of {shown}: remove that directory when no program publishes there, and start \
             homeostat again"
        )),
        Err(e) => Some(format!(
            "{shown} cannot be made with a limited size ({e}), so only programs of root can publish progress counters there"
        )),
    }
}

/// False for a world-writable directory that is in use and cannot be replaced.
fn make_at(directory: &Path) -> io::Result<bool> {
    let device = |path: &Path| std::fs::symlink_metadata(path).map(|about| about.dev());
    let parent = directory.parent().unwrap_or(Path::new("/"));
    match std::fs::symlink_metadata(directory) {
        Ok(about) if about.dev() != device(parent)? => return Ok(true),
        Ok(about) if std::fs::read_dir(directory)?.next().is_some() => return Ok(about.mode() & 0o002 == 0),
        Ok(_) => {}
        Err(e) if e.kind() == io::ErrorKind::NotFound => {
            std::fs::DirBuilder::new()
                .recursive(true)
                .mode(0o755)
                .create(directory)?;
        }
        Err(e) => return Err(e),
    }
    let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    mount("homeostat-progress", directory, "tmpfs", flags, OPTIONS)?;
    Ok(true)
}
