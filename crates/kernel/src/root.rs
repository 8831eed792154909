//! The directory below which `/proc`, `/sys`, `/etc` and `/run` are read.
//!
//! Absolute links in a captured tree (`/etc/sysctl.d/x.conf` to `/etc/static/x.conf`) mean files of that tree, never of
//! the running machine. The kernel resolves them so (`openat2` with `RESOLVE_IN_ROOT`, from Linux 5.6 on).

use rustix::fs::{Mode, OFlags, ResolveFlags};
use rustix::io::Errno;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

/// Most links in a row before a path counts as absent (as `MAXSYMLINKS` of the kernel).
const LINKS_MAX: u32 = 40;
/// Target of paths that cannot be resolved: a name that does not exist.
const NOWHERE: &str = ".homeostat-unresolved";

/// The root of the file tree that describes the machine: `/` in production, a captured tree in tests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Root {
    directory: PathBuf,
    /// Links are followed as on the running machine, in a test's tree that imitates it.
    follows: bool,
}

impl Root {
    /// A root other than `/`.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self {
            directory: path.into(),
            follows: false,
        }
    }

    /// A test's tree that imitates the running machine: links in its `/proc` lead to real files.
    #[cfg(any(test, feature = "testing"))]
    pub fn imitating(path: impl Into<PathBuf>) -> Self {
        Self {
            directory: path.into(),
            follows: true,
        }
    }

    /// The file of that absolute path, below the root. In a captured tree links are resolved, and never lead out of it.
    pub fn path(&self, absolute: &str) -> PathBuf {
        let relative = absolute.trim_start_matches('/');
        if !self.is_captured() {
            return self.directory.join(relative);
        }
        self.within(Path::new(relative), LINKS_MAX)
    }

    /// As [`Root::path`], for a link that is itself to be read.
    pub fn link_path(&self, absolute: &str) -> PathBuf {
        match absolute.rsplit_once('/') {
            Some((directory, name)) if !self.is_live() => self.path(directory).join(name),
            _ => self.path(absolute),
        }
    }

    /// The target of a path after all links, as an absolute path within the tree; `None` if it does not exist.
    pub fn real_path(&self, absolute: &str) -> Option<String> {
        let real = std::fs::canonicalize(self.path(absolute)).ok()?;
        let top = std::fs::canonicalize(&self.directory).ok()?;
        let inside = real.strip_prefix(top).ok()?;
        Some(format!("/{}", inside.to_str()?))
    }

    /// Opens the file of that absolute path, below the root.
    ///
    /// # Errors
    /// As `openat2(2)`.
    pub fn open(&self, absolute: &str, flags: OFlags) -> Result<OwnedFd, Errno> {
        let flags = flags | OFlags::CLOEXEC;
        if !self.is_captured() {
            return rustix::fs::open(self.path(absolute), flags, Mode::empty());
        }
        let relative = absolute.trim_start_matches('/');
        let relative = if relative.is_empty() { "." } else { relative };
        // A captured tree may hold a pipe where a file is expected.
        open_in(
            self.directory()?.as_fd(),
            Path::new(relative),
            flags | OFlags::NONBLOCK,
        )
    }

    fn directory(&self) -> Result<OwnedFd, Errno> {
        rustix::fs::open(
            &self.directory,
            OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC,
            Mode::empty(),
        )
    }

    fn within(&self, relative: &Path, links: u32) -> PathBuf {
        if relative.as_os_str().is_empty() {
            return self.directory.clone();
        }
        let found = self
            .directory()
            .and_then(|root| open_in(root.as_fd(), relative, OFlags::PATH | OFlags::CLOEXEC));
        if let Ok(found) = found {
            let link = format!("/proc/self/fd/{}", found.as_raw_fd());
            return std::fs::read_link(link).unwrap_or_else(|_| self.directory.join(NOWHERE));
        }
        // It does not exist, or a link leads to nothing: its target is searched within the tree.
        let (Some(parent), Some(name)) = (relative.parent(), relative.file_name()) else {
            return self.directory.join(NOWHERE);
        };
        let path = self.within(parent, links).join(name);
        match (std::fs::read_link(&path), links.checked_sub(1)) {
            (Err(_), _) => path,
            (Ok(_), None) => self.directory.join(NOWHERE),
            (Ok(target), Some(links)) => match target.strip_prefix("/") {
                Ok(absolute) => self.within(absolute, links),
                Err(_) => self.within(&parent.join(target), links),
            },
        }
    }

    /// Whether links are resolved within the tree.
    pub(crate) fn is_captured(&self) -> bool {
        !self.follows && !self.is_live()
    }

    /// The root itself.
    pub fn as_path(&self) -> &Path {
        &self.directory
    }

    /// Whether this is the running machine, where system calls on processes make sense.
    pub fn is_live(&self) -> bool {
        self.directory == Path::new("/")
    }
}

/// Opens a path below a directory that is the root for all links in it.
pub fn open_in(root: BorrowedFd<'_>, relative: &Path, flags: OFlags) -> Result<OwnedFd, Errno> {
    rustix::fs::openat2(
        root,
        relative,
        flags,
        Mode::empty(),
        ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS,
    )
}

impl Default for Root {
    fn default() -> Self {
        Self::new("/")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::files;
    use proptest::prelude::*;
    use std::os::unix::fs::symlink;

    /// A tree, and beside it what no link of the tree may reach.
    fn tree() -> (tempfile::TempDir, Root) {
        let keep = tempfile::tempdir().unwrap();
        let root = keep.path().join("root");
        std::fs::create_dir_all(root.join("etc/static")).unwrap();
        std::fs::create_dir_all(root.join("etc/sysctl.d")).unwrap();
        std::fs::write(root.join("etc/static/a.conf"), "inside").unwrap();
        std::fs::write(keep.path().join("outside"), "outside").unwrap();
        (keep, Root::new(root))
    }

    #[test]
    fn links_mean_files_of_the_tree() {
        let (keep, root) = tree();
        let link = |target: &str, name: &str| symlink(target, root.as_path().join(name)).unwrap();
        link("/etc/static/a.conf", "etc/sysctl.d/absolute.conf");
        link("../static/a.conf", "etc/sysctl.d/relative.conf");
        link(
            keep.path().join("outside").to_str().unwrap(),
            "etc/sysctl.d/host.conf",
        );
        link("../../../../../../outside", "etc/sysctl.d/up.conf");
        link("/etc/static", "linked");
        link("/loop", "loop");
        let read = |path: &str| files::bytes(&root, path, 100).map(|b| String::from_utf8(b).unwrap());
        let inside = Some("inside".to_owned());
        for path in [
            "/etc/sysctl.d/absolute.conf",
            "/etc/sysctl.d/relative.conf",
            "/linked/a.conf",
        ] {
            assert_eq!(read(path), inside, "{path}");
            assert_eq!(std::fs::read_to_string(root.path(path)).ok(), inside, "{path}");
        }
        for path in [
            "/etc/sysctl.d/host.conf",
            "/etc/sysctl.d/up.conf",
            "/loop",
            "/loop/x",
            "/../outside",
        ] {
            assert_eq!(read(path), None, "{path}");
            assert!(std::fs::read(root.path(path)).is_err(), "{path}");
        }
        assert_eq!(
            root.real_path("/linked/a.conf").as_deref(),
            Some("/etc/static/a.conf")
        );
        assert_eq!(files::names(&root, "/linked"), ["a.conf"]);
        // What is not there yet can be made where its path says.
        std::fs::write(root.path("/linked/new"), "x").unwrap();
        assert!(root.as_path().join("etc/static/new").exists());
        assert_eq!(
            root.link_path("/linked"),
            std::fs::canonicalize(root.as_path()).unwrap().join("linked")
        );
    }

    #[test]
    fn the_running_machine_is_read_as_it_is() {
        let root = Root::default();
        assert_eq!(root.path("/proc/self/status"), Path::new("/proc/self/status"));
        assert!(files::bytes(&root, "/proc/self/status", 1 << 16).is_some());
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(200))]
        #[test]
        fn no_chain_of_links_leads_out(
            targets in proptest::collection::vec("(/|\\.\\./|\\./)?([abcd]|\\.\\.|etc)(/([abcd]|\\.\\.)){0,4}", 4),
            path in "(/([abcd]|\\.\\.|etc)){1,5}",
        ) {
            let (keep, root) = tree();
            for (name, target) in ["a", "b", "c", "d"].iter().zip(&targets) {
                let target = target.replace("b", keep.path().join("outside").to_str().unwrap());
                symlink(target, root.as_path().join(name)).unwrap();
            }
            let reached = root.path(&path);
            let top = std::fs::canonicalize(root.as_path()).unwrap();
            if let Ok(real) = std::fs::canonicalize(&reached) {
                prop_assert!(real.starts_with(&top), "{} is {}", path, real.display());
            }
        }
    }
}
