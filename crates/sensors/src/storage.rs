//! Storage that a program or another machine serves (FUSE, networks).
//!
//! Access to a mapped page of such storage waits for an answer, and may hold the address space meanwhile. FUSE waits
//! like a sleep, not like a disk read, so the thread's state does not reveal it. So nothing is counted in a process
//! that maps such storage. The list of mounts (proc(5), `mountinfo`) gives the kind of a device without asking the
//! storage.

use crate::patient::patiently;
use homeostat_kernel::process::{open_process, text_of};
use homeostat_kernel::{Root, internal_files};
use homeostat_model::ProcessId;
use homeostat_platform::PlatformError;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::LazyLock;

/// Most bytes read of a list of mappings.
pub const MAPS_MAX: usize = 4 * 1024 * 1024;
/// File systems whose pages come from memory or from a disk of this machine, and the kernel's own.
const ORDINARY: &[&str] = &[
    "bcachefs",
    "btrfs",
    "devtmpfs",
    "erofs",
    "exfat",
    "ext2",
    "ext3",
    "ext4",
    "f2fs",
    "hugetlbfs",
    "iso9660",
    "jfs",
    "minix",
    "msdos",
    "nilfs2",
    "ntfs3",
    "proc",
    "ramfs",
    "reiserfs",
    "rootfs",
    "squashfs",
    "sysfs",
    "tmpfs",
    "udf",
    "vfat",
    "xfs",
    "zfs",
];
const LAYERS: &str = "overlay";
const DEPTH_MAX: usize = 3;
const MOUNTS_MAX: usize = 1024 * 1024;

/// Devices of memory that is mapped like a file and has no mount.
static INTERNAL: LazyLock<BTreeSet<(u32, u32)>> = LazyLock::new(internal_files::devices);

/// Device and inode, as a list of mappings gives them.
pub type DeviceInode = ((u32, u32), u64);

/// Reason why nothing is inserted into a program, or removed from it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// It may pass, so a new check soon is worthwhile.
    Now(String),
    /// It lasts as long as the program runs this way.
    Lasting(String),
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Now(why) | Self::Lasting(why) => f.write_str(why),
        }
    }
}

impl From<String> for Refusal {
    fn from(why: String) -> Self {
        Self::Lasting(why)
    }
}

impl From<&str> for Refusal {
    fn from(why: &str) -> Self {
        Self::Lasting(why.to_owned())
    }
}

impl Refusal {
    /// As an error of a meter: `Now` becomes `Busy`.
    pub fn error(self, what: &str) -> PlatformError {
        let what = what.to_owned();
        match self {
            Self::Now(why) => PlatformError::Busy { what, why },
            Self::Lasting(why) => PlatformError::Unsupported { what, why },
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Mount {
    device: (u32, u32),
    point: String,
    kind: String,
    options: String,
}

#[derive(Clone, Debug, Default)]
struct Mounts(Vec<Mount>);

impl Mounts {
    fn of(root: &Root, process: &str) -> Option<Self> {
        let path = root.path(&format!("/proc/{process}/mountinfo"));
        let file = std::fs::File::open(path).ok()?;
        let mut text = Vec::new();
        std::io::Read::read_to_end(&mut std::io::Read::take(file, MOUNTS_MAX as u64), &mut text).ok()?;
        (text.len() < MOUNTS_MAX).then(|| Self::parse(&String::from_utf8_lossy(&text)))
    }

    fn parse(text: &str) -> Self {
        Self(text.lines().filter_map(mount).collect())
    }

    fn on(&self, device: (u32, u32)) -> Option<&Mount> {
        self.0.iter().find(|m| m.device == device)
    }

    /// The mount that holds a path: the longest one above it, and the last of several there.
    fn holds(&self, path: &str) -> Option<&Mount> {
        let below = |point: &str| {
            point == "/"
                || path
                    .strip_prefix(point)
                    .is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
        };
        self.0
            .iter()
            .filter(|m| below(&m.point))
            .max_by_key(|m| m.point.len())
    }
}

/// `id parent major:minor root point options [optional …] - kind source options`.
fn mount(line: &str) -> Option<Mount> {
    let (place, storage) = line.split_once(" - ")?;
    let mut place = place.split(' ').skip(2);
    let (major, minor) = place.next()?.split_once(':')?;
    let point = place.nth(1)?;
    let mut storage = storage.split(' ');
    let kind = storage.next()?;
    let options = storage.nth(1).unwrap_or_default();
    Some(Mount {
        device: (major.parse().ok()?, minor.parse().ok()?),
        point: plain(point),
        kind: kind.to_owned(),
        options: plain(options),
    })
}

/// Removes the escapes of the list (`\040` for a space).
fn plain(text: &str) -> String {
    let mut out = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((first, after)) = rest.split_first() {
        let octal = after.get(..3).filter(|_| *first == b'\\').and_then(|digits| {
            let digits = std::str::from_utf8(digits).ok()?;
            u8::from_str_radix(digits, 8).ok()
        });
        match octal {
            Some(byte) => {
                out.push(byte);
                rest = after.get(3..).unwrap_or_default();
            }
            None => {
                out.push(*first);
                rest = after;
            }
        }
    }
    String::from_utf8_lossy(&out).into_owned()
}

struct View {
    /// Mounts in the process's view, and in ours.
    its: Mounts,
    ours: Mounts,
    /// It has its own user name space, in which it may have mounted any layers.
    own_users: bool,
}

impl View {
    /// Whether a mapping comes from memory or a disk of this machine.
    ///
    /// # Errors
    /// A sentence: another program or machine serves it, or that cannot be known.
    fn allow(&self, device: (u32, u32), path: &str) -> Result<(), String> {
        // A file without a mount has a name that no path can have.
        let nameless = !path.starts_with('/') && !path.starts_with("(unreachable)");
        if INTERNAL.contains(&device) || nameless {
            return Ok(());
        }
        let found = self.its.on(device).or_else(|| self.ours.on(device));
        let Some(mount) = found else {
            return Err(format!(
                "{path} lies on storage (device {}:{}) that is mounted nowhere that can be seen: who answers for it cannot \
                 be told",
                device.0, device.1
            ));
        };
        self.allow_mount(mount, path, DEPTH_MAX)
    }

    fn allow_mount(&self, mount: &Mount, path: &str, depth: usize) -> Result<(), String> {
        // Read on demand from a program, for example a store of container images.
        let on_demand = mount.kind == "erofs" && mount.options.split(',').any(|o| o.starts_with("fsid="));
        if ORDINARY.contains(&mount.kind.as_str()) && !on_demand {
            return Ok(());
        }
        if mount.kind != LAYERS {
            return Err(format!(
                "{path} lies on {}: a program or another machine answers for it, and could hold up who waits for it",
                mount.kind
            ));
        }
        let unknown = |why: &str| Err(format!("{path} lies on layers of which {why}"));
        if self.own_users {
            return unknown(
                "it cannot be told where they lie: the process lives in a name space of users of its own",
            );
        }
        // Layers without a full path were named relative to a directory next to the written one (containerd, with many
        // layers). Only root mounts layers outside such a name space.
        let mut layers = layers(&mount.options);
        layers.retain(|layer| layer.starts_with('/'));
        if layers.is_empty() || depth == 0 {
            return unknown("it cannot be told where they lie: the list of mounts has no full path");
        }
        for layer in layers {
            // The mounting process may have had either view.
            for holder in [self.ours.holds(&layer), self.its.holds(&layer)]
                .into_iter()
                .flatten()
            {
                if holder != mount {
                    self.allow_mount(holder, path, depth - 1)?;
                }
            }
        }
        Ok(())
    }
}

/// The directories of a file system of layers, from its options (`lowerdir=/a:/b,upperdir=/c,workdir=/d`).
fn layers(options: &str) -> Vec<String> {
    let mut found = Vec::new();
    for option in split(options, ',') {
        let Some((name, value)) = option.split_once('=') else {
            continue;
        };
        match name {
            "lowerdir" => found.extend(split(value, ':').into_iter().filter(|d| !d.is_empty())),
            "lowerdir+" | "datadir+" | "upperdir" => found.push(value.to_owned()),
            _ => {}
        }
    }
    found.into_iter().map(|d| d.replace('\\', "")).collect()
}

/// Splits a text at separators without a `\` before them.
fn split(text: &str, separator: char) -> Vec<String> {
    let mut parts = vec![String::new()];
    let mut escaped = false;
    for c in text.chars() {
        if c == separator && !escaped {
            parts.push(String::new());
            continue;
        }
        escaped = c == '\\' && !escaped;
        if let Some(last) = parts.last_mut() {
            last.push(c);
        }
    }
    parts
}

/// Reads a list of mounts, and judges each of them.
pub fn parse(text: &str) {
    let view = View {
        its: Mounts::parse(text),
        ours: Mounts::default(),
        own_users: false,
    };
    for mount in &view.its.0 {
        let _ = view.allow(mount.device, &mount.point);
    }
}

/// Ranges of a process's memory that nobody serves: without a file, or with a file in kernel memory (memfd). Reading
/// them never waits, as long as that lasts. The list of mappings is read anew.
///
/// # Errors
/// A sentence: it maps storage other than memory or a disk of this machine, or that cannot be known.
pub fn own_memory(root: &Root, process: ProcessId) -> Result<Vec<(u64, u64)>, Refusal> {
    let unknown =
        |why: &str| Refusal::Now(format!("what process {process} has mapped cannot be told: {why}"));
    let dir = open_process(root, process).map_err(|e| unknown(&e.to_string()))?;
    let text = maps(process, dir)
        .filter(|text| !text.is_empty())
        .ok_or_else(|| unknown("it has ended, or its list could not be read whole and in time"))?;
    allow_mapped(root, process, text.lines().filter_map(file_of))?;
    Ok(text.lines().filter_map(own_range).collect())
}

/// The list of mappings of a process; `None` if it cannot be read completely and in time.
pub fn maps(process: ProcessId, dir: OwnedFd) -> Option<String> {
    patiently(process.pid, move || text_of(&dir, "maps", MAPS_MAX))
        .ok()?
        .ok()
}

/// The file in a line of a list of mappings: `start-end perms offset device inode path`. The kernel goes through all
/// mappings of the file, also those with data.
pub fn file_of(line: &str) -> Option<(DeviceInode, &str)> {
    let mut fields = line.splitn(6, ' ').skip(3);
    let (major, minor) = fields.next()?.split_once(':')?;
    let inode = fields.next()?.parse().ok().filter(|i| *i != 0)?;
    let number = |s: &str| u32::from_str_radix(s, 16).ok();
    Some((
        ((number(major)?, number(minor)?), inode),
        fields.next().unwrap_or_default().trim_start(),
    ))
}

/// Whether a process maps only memory and storage that nobody else serves, so that reading it never waits.
pub fn maps_only_its_own(root: &Root, process: ProcessId) -> bool {
    own_memory(root, process).is_ok()
}

/// Begin and end in a line of a list of mappings, if nobody serves that memory.
fn own_range(line: &str) -> Option<(u64, u64)> {
    // A mapping with an unreadable device may be anything.
    let inode = line.split(' ').nth(4)?;
    let is_own = inode == "0" || file_of(line).is_some_and(|((device, _), _)| INTERNAL.contains(&device));
    let (from, to) = line.split(' ').next()?.split_once('-')?;
    let hex = |text| u64::from_str_radix(text, 16).ok();
    Some((hex(from)?, hex(to)?)).filter(|(from, to)| is_own && from < to)
}

/// Whether all mappings of a process come from memory or a disk of this machine.
///
/// # Errors
/// A sentence: one does not, or that cannot be known.
pub fn allow_mapped<'a>(
    root: &Root,
    process: ProcessId,
    mapped: impl Iterator<Item = (DeviceInode, &'a str)>,
) -> Result<(), Refusal> {
    let mut devices: BTreeMap<(u32, u32), &str> = BTreeMap::new();
    for ((device, _), path) in mapped {
        // Keeps for each device the name least like the kernel's own.
        let known = devices.entry(device).or_insert(path);
        if path.starts_with('/') {
            *known = path;
        }
    }
    let Some(its) = Mounts::of(root, &process.pid.to_string()) else {
        // Either it has ended, and its mappings no longer matter, or it cannot be read.
        return match open_process(root, process) {
            Err(homeostat_platform::PlatformError::Vanished { .. }) => Ok(()),
            _ => Err(Refusal::Now(format!(
                "the mounts of process {process} cannot be read"
            ))),
        };
    };
    let view = View {
        its,
        ours: Mounts::of(root, "self").unwrap_or_default(),
        own_users: users(root, &process.pid.to_string()) != users(root, "self"),
    };
    for (device, path) in devices {
        view.allow(device, path).map_err(|why| {
            Refusal::Lasting(format!(
                "process {process} has storage mapped that may not answer: {why}"
            ))
        })?;
    }
    Ok(())
}

fn users(root: &Root, process: &str) -> Option<Vec<u8>> {
    let path = root.path(&format!("/proc/{process}/ns/user"));
    let link = std::fs::read_link(path).ok()?;
    Some(std::os::unix::ffi::OsStringExt::into_vec(link.into_os_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOUNTS: &str = "\
27 1 254:0 / / rw,relatime - ext4 /dev/vda rw,discard
28 27 0:25 / /mnt/a\\040b ro,nosuid shared:3 master:1 - fuse.sshfs me@host:/ rw,user_id=0
29 27 0:30 / /srv rw - nfs4 host:/srv rw,vers=4.2
30 27 0:31 / /mnt/layers rw - overlay overlay rw,lowerdir=/var/l/1:/var/l/2,upperdir=/var/u,workdir=/var/w
31 27 0:32 / /mnt/remote rw - overlay overlay rw,lowerdir=/srv/image:/var/l/2
32 27 0:33 / /mnt/relative rw - overlay overlay rw,lowerdir=l/1:l/2,upperdir=/var/u
33 27 0:34 / /mnt/twice rw - overlay overlay rw,lowerdir=/mnt/remote/x
39 27 0:40 / /mnt/nowhere ro - overlay overlay ro,lowerdir=l/1:l/2
34 27 0:35 / /mnt/demand ro - erofs none ro,fsid=image
35 27 0:36 / /shared rw - virtiofs tag rw
36 27 0:37 / /nine rw - 9p tag rw
37 27 0:38 / /ceph rw - ceph 1.2.3.4:/ rw
nonsense
38 27 0:39 / /x
";

    fn view() -> View {
        View {
            its: Mounts::parse(MOUNTS),
            ours: Mounts::default(),
            own_users: false,
        }
    }

    #[test]
    fn mounts_are_read_with_their_escapes_and_the_longest_holds_a_path() {
        let mounts = Mounts::parse(MOUNTS);
        assert_eq!(mounts.0.len(), 12);
        let sshfs = mounts.on((0, 25)).unwrap();
        assert_eq!(
            (sshfs.point.as_str(), sshfs.kind.as_str()),
            ("/mnt/a b", "fuse.sshfs")
        );
        let kind = |path: &str| mounts.holds(path).unwrap().kind.clone();
        assert_eq!(kind("/srv"), "nfs4");
        assert_eq!(kind("/srv/x"), "nfs4");
        assert_eq!(kind("/srvx"), "ext4");
        assert_eq!(kind("/mnt/a b/c"), "fuse.sshfs");
        assert_eq!(plain("a\\040b\\134c\\9"), "a b\\c\\9");
    }

    #[test]
    fn storage_that_somebody_answers_for_is_refused() {
        let view = view();
        for (device, kind) in [
            ((0, 25), "fuse.sshfs"),
            ((0, 30), "nfs4"),
            ((0, 35), "erofs"),
            ((0, 36), "virtiofs"),
            ((0, 37), "9p"),
            ((0, 38), "ceph"),
        ] {
            let why = view.allow(device, "/some/file").unwrap_err();
            assert!(why.contains(kind) && why.contains("/some/file"), "{why}");
        }
        assert_eq!(view.allow((254, 0), "/usr/bin/x"), Ok(()));
        // Mounted where nobody sees it (any more).
        assert!(view.allow((0, 99), "/some/file").unwrap_err().contains("0:99"));
        assert!(view.allow((0, 99), "(unreachable)/file").is_err());
        assert_eq!(view.allow((0, 99), "anon_inode:[io_uring]"), Ok(()));
        assert_eq!(view.allow((0, 99), "socket:[7]"), Ok(()));
    }

    #[test]
    fn layers_are_as_good_as_what_they_lie_on() {
        let mut view = view();
        assert_eq!(view.allow((0, 31), "/usr/bin/x"), Ok(()));
        assert!(view.allow((0, 32), "/usr/bin/x").unwrap_err().contains("nfs4"));
        assert_eq!(view.allow((0, 33), "/usr/bin/x"), Ok(()));
        assert!(
            view.allow((0, 40), "/usr/bin/x")
                .unwrap_err()
                .contains("full path")
        );
        assert!(view.allow((0, 34), "/usr/bin/x").unwrap_err().contains("nfs4"));
        view.own_users = true;
        assert!(
            view.allow((0, 31), "/usr/bin/x")
                .unwrap_err()
                .contains("name space")
        );
        assert_eq!(view.allow((254, 0), "/usr/bin/x"), Ok(()));
        // What we see and it does not.
        let ours = View {
            its: Mounts::default(),
            ours: Mounts::parse(MOUNTS),
            own_users: false,
        };
        assert!(ours.allow((0, 30), "/x").is_err());
        assert_eq!(
            layers("rw,lowerdir=/a\\:b:/c::/d,upperdir=/e\\,f,workdir=/w,lowerdir+=/g"),
            ["/a:b", "/c", "/d", "/e,f", "/g"]
        );
    }

    #[test]
    fn memory_that_is_mapped_like_a_file_is_nobody_elses() {
        let file = rustix::fs::memfd_create("x", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        let stat = rustix::fs::fstat(&file).unwrap();
        let device = (rustix::fs::major(stat.st_dev), rustix::fs::minor(stat.st_dev));
        assert_eq!(
            View {
                its: Mounts::default(),
                ours: Mounts::default(),
                own_users: true
            }
            .allow(device, "/memfd:x"),
            Ok(())
        );
    }

    #[test]
    fn memory_of_no_file_is_a_process_s_own_and_of_files_only_what_the_kernel_keeps() {
        let file = rustix::fs::memfd_create("x", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        let device = rustix::fs::fstat(&file).unwrap().st_dev;
        let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
        for (line, own) in [
            ("1000-3000 rwxp 00000000 00:00 0 ", true),
            ("1000-3000 rwxp 00000000 00:00 0 [anon:js]", true),
            ("1000-3000 r-xp 00000000 fe:00 77 /usr/bin/x", false),
            // Whoever mounts FUSE there chooses the name.
            ("1000-3000 r-xp 00000000 00:fa 77 /memfd:x (deleted)", false),
            ("1000-3000 rw-s 00000000 00:fb 99 /dev/dri/card0", false),
            ("3000-1000 rwxp 00000000 00:00 0 ", false),
            ("1000-3000 rwxp", false),
            ("", false),
        ] {
            assert_eq!(own_range(line), own.then_some((0x1000, 0x3000)), "{line}");
        }
        let line = format!("1000-3000 r-xs 00000000 {major:x}:{minor:x} 77 /memfd:x (deleted)");
        assert_eq!(own_range(&line), Some((0x1000, 0x3000)));
    }

    #[test]
    fn what_this_test_has_mapped_is_judged() {
        let root = Root::default();
        let stat = std::fs::read("/proc/self/stat").unwrap();
        let own = ProcessId {
            pid: i32::try_from(std::process::id()).unwrap(),
            start_ticks: homeostat_kernel::process::start_ticks(&stat).unwrap(),
        };
        // Wherever this test lies, there is an answer, and a refusal says what it is about.
        let text = std::fs::read_to_string("/proc/self/maps").unwrap();
        match allow_mapped(&root, own, text.lines().filter_map(file_of)) {
            Ok(()) => {}
            Err(why) => assert!(why.to_string().contains(&own.pid.to_string()), "{why}"),
        }
        let gone = ProcessId {
            pid: i32::MAX,
            start_ticks: 1,
        };
        assert_eq!(allow_mapped(&root, gone, std::iter::empty()), Ok(()));
    }
}
