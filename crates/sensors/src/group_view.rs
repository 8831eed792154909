//! Control groups as directories: who may make groups in them, and which units have them delegated.
//!
//! It reads only kernel file systems and system unit files, which no untrusted user can mount or write in the daemon's
//! view. A directory that cannot be read counts as root's.

use crate::grouping::{Groups, Writer};
use homeostat_kernel::Root;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt;

const KEPT_MAX: usize = 4096;
const UNIT_FILE_MAX: u64 = 64 * 1024;
/// Directories of unit files, strongest first (systemd.unit(5), *unit file load path*).
const UNIT_DIRECTORIES: &[&str] = &[
    "/etc/systemd/system",
    "/run/systemd/system",
    "/run/systemd/transient",
    "/run/systemd/generator",
    "/usr/local/lib/systemd/system",
    "/usr/lib/systemd/system",
    "/lib/systemd/system",
];

/// Knowledge about the control groups below a root.
#[derive(Debug)]
pub struct GroupView {
    root: Root,
    /// Mount point by hierarchy, if the whole hierarchy is mounted.
    mounts: RefCell<BTreeMap<String, String>>,
    delegating: RefCell<BTreeMap<String, bool>>,
}

impl GroupView {
    /// Nothing is read yet.
    pub fn new(root: Root) -> Self {
        let view = Self {
            root,
            mounts: RefCell::default(),
            delegating: RefCell::default(),
        };
        view.forget();
        view
    }

    /// Forgets facts that may change: units restart with other settings, hierarchies are mounted.
    pub fn forget(&self) {
        self.delegating.borrow_mut().clear();
        let text = std::fs::read_to_string(self.root.path("/proc/self/mountinfo")).unwrap_or_default();
        *self.mounts.borrow_mut() = hierarchies(&text);
    }

    fn directory(&self, hierarchy: &str, path: &str) -> Option<std::path::PathBuf> {
        let mounts = self.mounts.borrow();
        let mount = mounts.get(hierarchy).map(String::as_str).or_else(|| {
            // A captured tree has no list of mounts.
            (!self.root.is_live() && hierarchy.is_empty()).then_some("/sys/fs/cgroup")
        })?;
        Some(self.root.path(&format!("{}{path}", mount.trim_end_matches('/'))))
    }
}

impl Groups for GroupView {
    fn writer(&self, hierarchy: &str, path: &str) -> Option<Writer> {
        const OTHERS_WRITE: u32 = 0o022;
        // A captured tree belongs to the user who unpacked it.
        if !self.root.is_live() {
            return None;
        }
        let seen = std::fs::symlink_metadata(self.directory(hierarchy, path)?).ok()?;
        match (seen.uid(), seen.mode() & OTHERS_WRITE) {
            (0, 0) => None,
            (0, _) => Some(Writer::Others),
            (user, _) => Some(Writer::User(user)),
        }
    }

    fn delegates(&self, hierarchy: &str, path: &str, unit: &str) -> bool {
        let key = format!("{hierarchy}:{path}");
        if let Some(known) = self.delegating.borrow().get(&key) {
            return *known;
        }
        let noted = self
            .directory(hierarchy, path)
            .is_some_and(|directory| is_noted(&directory));
        let delegates = noted || is_written(&self.root, unit);
        let mut kept = self.delegating.borrow_mut();
        if kept.len() >= KEPT_MAX {
            kept.clear();
        }
        kept.insert(key, delegates);
        delegates
    }
}

/// Whether systemd marked the directory of a unit as delegated.
fn is_noted(directory: &std::path::Path) -> bool {
    ["trusted.delegate", "user.delegate"].iter().any(|name| {
        let mut value = [0u8; 8];
        rustix::fs::getxattr(directory, *name, &mut value)
            .is_ok_and(|length| value.get(..length) == Some(b"1".as_slice()))
    })
}

fn is_written(root: &Root, unit: &str) -> bool {
    // The name came from a group: it must not lead out of the directories.
    if unit.contains('/') || unit.starts_with('.') {
        return false;
    }
    let template = unit
        .split_once('@')
        .zip(unit.rsplit_once('.'))
        .map(|((head, _), (_, suffix))| format!("{head}@.{suffix}"));
    let names: Vec<&str> = std::iter::once(unit).chain(template.as_deref()).collect();
    let mut delegates = false;
    let fragment = names.iter().find_map(|name| {
        UNIT_DIRECTORIES
            .iter()
            .find_map(|directory| read(root, &format!("{directory}/{name}")))
    });
    if let Some(text) = fragment {
        delegates = said(&text).unwrap_or(false);
    }
    // Drop-ins are read in the order of their names, across directories.
    let mut pieces: BTreeMap<std::ffi::OsString, String> = BTreeMap::new();
    for name in &names {
        for directory in UNIT_DIRECTORIES {
            let Ok(list) = std::fs::read_dir(root.path(&format!("{directory}/{name}.d"))) else {
                continue;
            };
            for entry in list.flatten().take(KEPT_MAX) {
                let file = entry.file_name();
                if file.as_encoded_bytes().ends_with(b".conf") && !pieces.contains_key(&file) {
                    let path = format!("{directory}/{name}.d/{}", file.to_string_lossy());
                    pieces.extend(read(root, &path).map(|text| (file, text)));
                }
            }
        }
    }
    for text in pieces.values() {
        delegates = said(text).unwrap_or(delegates);
    }
    delegates
}

fn read(root: &Root, path: &str) -> Option<String> {
    use std::io::Read;
    let file = std::fs::File::open(root.path(path)).ok()?;
    if !file.metadata().ok()?.is_file() {
        return None;
    }
    let mut text = Vec::new();
    file.take(UNIT_FILE_MAX).read_to_end(&mut text).ok()?;
    Some(String::from_utf8_lossy(&text).into_owned())
}

/// The last `Delegate=` of a unit file: a truth value, or a list of controllers.
fn said(text: &str) -> Option<bool> {
    text.lines()
        .filter_map(|line| line.trim().strip_prefix("Delegate"))
        .filter_map(|rest| rest.trim_start().strip_prefix('='))
        .map(|value| !matches!(value.trim(), "no" | "false" | "off" | "0" | "n" | "f"))
        .next_back()
}

/// Mount points by hierarchy, from `/proc/self/mountinfo`. The name of a hierarchy is as in the second field of
/// `/proc/PID/cgroup`: its controllers in that order, its name, or empty for the unified one. Only mounts of a whole
/// hierarchy count, because their paths are those of `/proc/PID/cgroup`.
fn hierarchies(mountinfo: &str) -> BTreeMap<String, String> {
    const NO_CONTROLLERS: &[&str] = &[
        "rw",
        "ro",
        "xattr",
        "noprefix",
        "clone_children",
        "cpuset_v2_mode",
    ];
    let mut found = BTreeMap::new();
    for line in mountinfo.lines() {
        let Some((mount, source)) = line.split_once(" - ") else {
            continue;
        };
        let mut mount = mount.split(' ').skip(3);
        let (Some(inner), Some(point)) = (mount.next(), mount.next()) else {
            continue;
        };
        let mut source = source.split(' ');
        let (kind, options) = (source.next(), source.nth(1).unwrap_or_default());
        if inner != "/" {
            continue;
        }
        let key = match kind {
            Some("cgroup2") => String::new(),
            Some("cgroup") => {
                let own = options
                    .split(',')
                    .filter(|o| !NO_CONTROLLERS.contains(o) && !o.starts_with("release_agent="));
                own.collect::<Vec<_>>().join(",")
            }
            _ => continue,
        };
        found.entry(key).or_insert_with(|| point.replace("\\040", " "));
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hierarchies_are_found_where_they_are_mounted() {
        let found = hierarchies(
            "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw,nsdelegate\n\
             31 23 0:27 / /sys/fs/cgroup/cpu,cpuacct rw shared:9 - cgroup cgroup rw,cpu,cpuacct\n\
             32 23 0:28 /docker/1 /inner rw - cgroup cgroup rw,memory\n\
             33 23 0:29 / /sys/fs/cgroup/systemd rw - cgroup systemd rw,xattr,name=systemd\n\
             rubbish\n",
        );
        let all: Vec<(&str, &str)> = found.iter().map(|(k, v)| (k.as_str(), v.as_str())).collect();
        assert_eq!(
            all,
            [
                ("", "/sys/fs/cgroup"),
                ("cpu,cpuacct", "/sys/fs/cgroup/cpu,cpuacct"),
                ("name=systemd", "/sys/fs/cgroup/systemd"),
            ]
        );
    }

    #[test]
    fn a_unit_delegates_as_its_files_say_the_last_word_wins() {
        let tree = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = tree.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        write("usr/lib/systemd/system/a.service", "[Service]\nDelegate=yes\n");
        write(
            "usr/lib/systemd/system/b.service",
            "[Service]\nDelegate = cpu memory\n",
        );
        write("usr/lib/systemd/system/c@.service", "[Service]\nDelegate=\n");
        write(
            "etc/systemd/system/a.service.d/x.conf",
            "[Service]\nDelegate=no\n",
        );
        write(
            "usr/lib/systemd/system/d.service",
            "[Service]\n#Delegate=yes\nDelegateSubgroup=x\n",
        );
        let view = GroupView::new(Root::new(tree.path()));
        let delegates = |unit: &str| view.delegates("", &format!("/system.slice/{unit}"), unit);
        assert!(!delegates("a.service"));
        assert!(delegates("b.service"));
        assert!(delegates("c@one.service"));
        assert!(!delegates("d.service"));
        assert!(!delegates("nosuch.service"));
        assert!(!delegates("..service"));
    }
}
