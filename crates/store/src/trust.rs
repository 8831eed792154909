//! Which untrusted users may change a file that root acts on, or a directory on its path. Only root and the user of
//! this process are trusted. A sticky directory such as `/tmp` is safe: nobody else can replace our files in it.

use std::collections::BTreeSet;
use std::fs::Metadata;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

const STICKY: u32 = 0o1000;

/// Something on the way to a file that somebody else may change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Distrust {
    /// The changeable path: the file, a link or a directory above it.
    pub path: PathBuf,
    /// Why.
    pub why: String,
    /// The remedy.
    pub remedy: String,
}

impl std::fmt::Display for Distrust {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}", self.path.display(), self.why)
    }
}

/// Whether an untrusted user may change the file or its path. A missing file belongs to nobody.
pub fn distrust(path: &Path) -> Option<Distrust> {
    let absolute = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    let real = std::fs::canonicalize(&absolute).unwrap_or_else(|_| absolute.clone());
    let mut all: Vec<&Path> = absolute.ancestors().chain(real.ancestors()).collect();
    // From the root downwards: the first fault explains the rest.
    all.sort_by_key(|p| p.components().count());
    let mut seen = BTreeSet::new();
    all.into_iter()
        .filter(|p| seen.insert(p.to_owned()))
        .find_map(|p| {
            let about = std::fs::symlink_metadata(p).ok()?;
            let (why, remedy) = what_is_wrong(p, &about)?;
            Some(Distrust {
                path: p.to_owned(),
                why,
                remedy,
            })
        })
}

fn what_is_wrong(path: &Path, about: &Metadata) -> Option<(String, String)> {
    let own = rustix::process::geteuid().as_raw();
    let owner = about.uid();
    if owner != 0 && owner != own {
        let who = if own == 0 { "root" } else { "you" };
        return Some((
            format!("it belongs to user {owner}"),
            format!("give it to {who} (chown), or use another place"),
        ));
    }
    let kind = about.file_type();
    if kind.is_symlink() {
        return None;
    }
    if kind.is_fifo() || kind.is_socket() || kind.is_char_device() || kind.is_block_device() {
        return Some((
            "it is not a regular file".to_owned(),
            "look at it and move it away".to_owned(),
        ));
    }
    let mode = about.mode() & 0o7777;
    if kind.is_dir() && mode & STICKY != 0 {
        return None;
    }
    let group = mode & 0o020 != 0 && about.gid() != 0;
    let bits = match (mode & 0o002 != 0, group) {
        (true, _) => "o-w,g-w",
        (false, true) => "g-w",
        (false, false) => return None,
    };
    let who = if mode & 0o002 != 0 {
        "every user".to_owned()
    } else {
        format!("group {}", about.gid())
    };
    Some((
        format!("{who} may write to it (mode {mode:04o})"),
        format!("chmod {bits} {}", path.display()),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{PermissionsExt, chown, symlink};

    #[test]
    fn a_file_is_trusted_as_far_as_nobody_else_can_change_it_or_the_way_to_it() {
        let home = tempfile::tempdir().unwrap();
        let directory = home.path().join("a/b");
        std::fs::create_dir_all(&directory).unwrap();
        let file = directory.join("file");
        std::fs::write(&file, "").unwrap();
        let set = |p: &Path, mode| std::fs::set_permissions(p, PermissionsExt::from_mode(mode)).unwrap();
        let culprit = |p: &Path| distrust(p).map(|d| d.path);
        set(&file, 0o644);
        assert_eq!(distrust(&file), None);
        assert_eq!(distrust(&directory.join("none/at/all")), None);
        set(&file, 0o666);
        let found = distrust(&file).unwrap();
        assert!(
            found.path == file && found.remedy.starts_with("chmod o-w"),
            "{found:?}"
        );
        set(&file, 0o644);
        set(&home.path().join("a"), 0o777);
        assert_eq!(culprit(&file), Some(home.path().join("a")));
        set(&home.path().join("a"), 0o1777);
        assert_eq!(distrust(&file), None, "sticky");
        set(&home.path().join("a"), 0o755);
        // By way of a link, both ways count.
        let link = home.path().join("link");
        symlink(&file, &link).unwrap();
        assert_eq!(distrust(&link), None);
        set(&directory, 0o777);
        assert_eq!(culprit(&link), Some(directory.clone()));
        set(&directory, 0o755);
        if rustix::process::geteuid().is_root() {
            chown(&file, Some(1000), Some(1000)).unwrap();
            assert_eq!(culprit(&file), Some(file.clone()));
            chown(&file, Some(0), Some(1000)).unwrap();
            set(&file, 0o664);
            assert!(distrust(&file).unwrap().why.contains("group 1000"));
            chown(&file, Some(0), Some(0)).unwrap();
            assert_eq!(distrust(&file), None, "root's group");
        } else {
            eprintln!("skipped in part: only root can give files away");
        }
    }
}
