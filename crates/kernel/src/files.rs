//! Bounded reads of small kernel files, below the root; for many reads, relative to a directory that stays open.

use crate::Root;
use homeostat_platform::PlatformError;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use std::ffi::CStr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// Most bytes read of a file that is not expected to be large.
pub const SMALL_FILE_MAX: usize = 64 * 1024;
/// Most bytes read of `/proc/cpuinfo`, `/proc/stat`, `/proc/config.gz` and the like.
pub const LARGE_FILE_MAX: usize = 4 * 1024 * 1024;
/// Most entries read of a directory.
pub const DIRECTORY_MAX: usize = 100_000;

/// Result of a bounded read. Absence from a cut text proves nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "a text that was cut must not be taken for the whole"]
pub struct Text<'b> {
    bytes: &'b [u8],
    cut: bool,
}

impl<'b> Text<'b> {
    /// A complete text.
    pub fn whole_of(bytes: &'b [u8]) -> Self {
        Self { bytes, cut: false }
    }

    /// The beginning of a longer text.
    pub fn cut(bytes: &'b [u8]) -> Self {
        Self { bytes, cut: true }
    }

    /// The text, unless it was cut.
    pub fn whole(self) -> Option<&'b [u8]> {
        (!self.cut).then_some(self.bytes)
    }

    /// The text as far as read: only for facts at the beginning, or for single lines.
    pub fn beginning(self) -> &'b [u8] {
        self.bytes
    }

    /// Whether there was more.
    pub fn is_cut(self) -> bool {
        self.cut
    }
}

/// A directory that stays open, so that files in it are found without walking the path again.
#[derive(Debug)]
pub struct Directory {
    open: OwnedFd,
    /// It belongs to a captured tree, and links must not lead out of it.
    captured: bool,
}

impl Directory {
    /// Opens a directory below the root for listing and reading.
    ///
    /// # Errors
    /// As `open(2)`.
    pub fn open(root: &Root, absolute: &str) -> Result<Self, Errno> {
        Ok(Self {
            open: root.open(absolute, OFlags::RDONLY | OFlags::DIRECTORY)?,
            captured: root.is_captured(),
        })
    }

    /// Its descriptor.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.open.as_fd()
    }

    /// Reads at most `limit` bytes of a file in it. The caller keeps the `buffer`: a steady state allocates nothing.
    ///
    /// # Errors
    /// As `open(2)` and `read(2)`; a process that ended is `NOENT` or `SRCH`.
    pub fn read<'b>(
        &self,
        relative: &CStr,
        buffer: &'b mut Vec<u8>,
        limit: usize,
    ) -> Result<Text<'b>, Errno> {
        let fd = self.open_file(relative)?;
        read_all(fd.as_fd(), buffer, limit)
    }
}

impl Directory {
    /// Opens a file in it for reading.
    ///
    /// # Errors
    /// As `open(2)`.
    pub fn open_file(&self, relative: &CStr) -> Result<OwnedFd, Errno> {
        let flags = OFlags::RDONLY | OFlags::CLOEXEC;
        if self.captured {
            let name = Path::new(std::ffi::OsStr::from_bytes(relative.to_bytes()));
            return crate::root::open_in(self.open.as_fd(), name, flags | OFlags::NONBLOCK);
        }
        rustix::fs::openat(&self.open, relative, flags, Mode::empty())
    }

    /// Reads a short record (`stat`, `statm`, `schedstat`) with one `read(2)`: the kernel never writes a part.
    ///
    /// # Errors
    /// As [`Directory::read`]; `FBIG` for a file that is no such record.
    pub fn read_record<'b>(&self, relative: &CStr, buffer: &'b mut Vec<u8>) -> Result<&'b [u8], Errno> {
        const RECORD_MAX: usize = 2048;
        let fd = self.open_file(relative)?;
        if buffer.len() < RECORD_MAX {
            buffer.resize(RECORD_MAX, 0);
        }
        let n = rustix::io::retry_on_intr(|| rustix::io::read(&fd, &mut buffer[..RECORD_MAX]))?;
        if n == RECORD_MAX {
            return Err(Errno::FBIG);
        }
        Ok(buffer.get(..n).unwrap_or_default())
    }
}

impl From<OwnedFd> for Directory {
    fn from(open: OwnedFd) -> Self {
        Self {
            open,
            captured: false,
        }
    }
}

fn read_all<'b>(fd: BorrowedFd<'_>, buffer: &'b mut Vec<u8>, limit: usize) -> Result<Text<'b>, Errno> {
    fill(buffer, limit, |room, _| rustix::io::read(fd, room))
}

/// Fills the growing buffer by `read` (into which room, from which position) until the end or beyond `limit` bytes.
fn fill<'b>(
    buffer: &'b mut Vec<u8>,
    limit: usize,
    mut read: impl FnMut(&mut [u8], usize) -> Result<usize, Errno>,
) -> Result<Text<'b>, Errno> {
    let mut used = 0;
    // The byte after the limit separates a file that ends there from a longer one.
    while used <= limit {
        if used == buffer.len() {
            let larger = (used * 2).max(1024).min(limit.saturating_add(1));
            buffer.resize(larger, 0);
        }
        let Some(room) = buffer.get_mut(used..) else { break };
        match read(room, used) {
            Ok(0) => break,
            Ok(n) => used += n,
            Err(Errno::INTR) => {}
            Err(e) => return Err(e),
        }
    }
    let bytes = buffer.get(..used.min(limit)).unwrap_or_default();
    Ok(Text {
        bytes,
        cut: used > limit,
    })
}

/// A file that is read repeatedly and stays open: a new reading takes no memory but the kernel's for the file.
#[derive(Debug)]
pub struct Kept {
    root: Root,
    absolute: String,
    open: Option<OwnedFd>,
}

impl Kept {
    /// The file of that absolute path below the root; the first reading opens it.
    pub fn new(root: &Root, absolute: &str) -> Self {
        Self {
            root: root.clone(),
            absolute: absolute.to_owned(),
            open: None,
        }
    }

    /// Where it is.
    pub fn path(&self) -> PathBuf {
        self.root.path(&self.absolute)
    }

    /// Reads it from its beginning into `buffer`; `None` when it is absent, unreadable or longer than `limit` bytes.
    pub fn read<'b>(&mut self, buffer: &'b mut Vec<u8>, limit: usize) -> Option<&'b [u8]> {
        self.read_text(buffer, limit)?.whole()
    }

    /// As [`Kept::read`], but cuts a longer file. The caller keeps the buffer: a steady state allocates nothing.
    pub fn read_text<'b>(&mut self, buffer: &'b mut Vec<u8>, limit: usize) -> Option<Text<'b>> {
        if self.open.is_none() {
            self.open = Some(self.root.open(&self.absolute, OFlags::RDONLY).ok()?);
        }
        let outcome = fill(buffer, limit, |room, at| {
            let open = self.open.as_ref().ok_or(Errno::BADF)?;
            rustix::io::pread(open, room, at as u64)
        });
        // Below another root than `/` the path may lead to another file each time.
        if outcome.is_err() || !self.root.is_live() {
            self.open = None;
        }
        outcome.ok()
    }
}

/// Writes a number and its suffix into a name that ends with a zero byte; an overlong rest is left out.
fn write_name(name: &mut [u8], number: u32, rest: &[&[u8]]) {
    let mut digits = [0u8; 10];
    let mut n = number;
    let mut at = digits.len();
    loop {
        at -= 1;
        digits[at] = b'0' + (n % 10) as u8;
        n /= 10;
        if n == 0 {
            break;
        }
    }
    let mut length = 0;
    for &b in digits[at..].iter().chain(rest.iter().copied().flatten()) {
        if length + 1 < name.len() {
            name[length] = b;
            length += 1;
        }
    }
}

/// Name of a file of a process, `PID/leaf`, made without allocating.
pub struct ProcessFile([u8; 64]);

impl ProcessFile {
    /// `pid/leaf`; a leaf that is too long yields a name that does not exist.
    pub fn new(pid: i32, leaf: &str) -> Self {
        let mut name = [0u8; 64];
        write_name(&mut name, pid.unsigned_abs(), &[b"/", leaf.as_bytes()]);
        Self(name)
    }

    /// As a C string.
    pub fn name(&self) -> &CStr {
        CStr::from_bytes_until_nul(&self.0).unwrap_or(c"")
    }
}

/// Name of a file that is a number, made without allocating.
pub struct NumberedFile([u8; 12]);

impl NumberedFile {
    /// The number in decimal digits.
    pub fn new(number: u32) -> Self {
        let mut name = [0u8; 12];
        write_name(&mut name, number, &[]);
        Self(name)
    }

    /// As a C string.
    pub fn name(&self) -> &CStr {
        CStr::from_bytes_until_nul(&self.0).unwrap_or(c"")
    }
}

/// Reads a file below the root whole; `None` when it is absent, unreadable or longer than `limit` bytes.
pub fn bytes(root: &Root, absolute: &str, limit: usize) -> Option<Vec<u8>> {
    read(root, absolute, limit).ok()
}

/// As [`bytes`], with the reason for a failure.
///
/// # Errors
/// As `open(2)` and `read(2)`; `FBIG` if the file is longer than `limit` bytes.
pub fn read(root: &Root, absolute: &str, limit: usize) -> Result<Vec<u8>, Errno> {
    let fd = root.open(absolute, OFlags::RDONLY)?;
    let mut buffer = Vec::new();
    let used = read_all(fd.as_fd(), &mut buffer, limit)?;
    let used = used.whole().ok_or(Errno::FBIG)?.len();
    buffer.truncate(used);
    Ok(buffer)
}

/// As [`bytes`], as text without surrounding white space; invalid UTF-8 is replaced.
pub fn text(root: &Root, absolute: &str) -> Option<String> {
    bytes(root, absolute, SMALL_FILE_MAX).map(|b| String::from_utf8_lossy(&b).trim().to_owned())
}

/// Reads a required file.
///
/// # Errors
/// `Unsupported` with the path and the system's words.
pub fn required(root: &Root, absolute: &str, limit: usize) -> Result<Vec<u8>, PlatformError> {
    bytes(root, absolute, limit).ok_or_else(|| is_missing(&root.path(absolute)))
}

/// The error for a missing required file.
pub fn is_missing(path: &Path) -> PlatformError {
    PlatformError::Unsupported {
        what: format!("reading {}", path.display()),
        why: "the file is absent or unreadable; homeostat needs proc mounted and readable".into(),
    }
}

/// Names in a directory below the root, sorted; empty when it is absent.
pub fn names(root: &Root, absolute: &str) -> Vec<String> {
    let Ok(entries) = std::fs::read_dir(root.path(absolute)) else {
        return Vec::new();
    };
    let mut found: Vec<String> = entries
        .take(DIRECTORY_MAX)
        .filter_map(|e| e.ok().and_then(|e| e.file_name().into_string().ok()))
        .collect();
    found.sort_unstable();
    found
}

/// Names of the form `prefixN` in a directory below the root, as their numbers in ascending order.
pub fn numbered(root: &Root, absolute: &str, prefix: &str) -> Vec<u32> {
    let mut found: Vec<u32> = names(root, absolute)
        .iter()
        .filter_map(|n| n.strip_prefix(prefix).and_then(|d| d.parse().ok()))
        .collect();
    found.sort_unstable();
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_process_files() {
        assert_eq!(ProcessFile::new(1, "stat").name(), c"1/stat");
        assert_eq!(
            ProcessFile::new(4_194_304, "smaps_rollup").name(),
            c"4194304/smaps_rollup"
        );
        assert_eq!(ProcessFile::new(7, &"x".repeat(500)).name().to_bytes().len(), 63);
        assert_eq!(NumberedFile::new(0).name(), c"0");
        assert_eq!(NumberedFile::new(u32::MAX).name(), c"4294967295");
    }

    #[test]
    fn reading_stops_at_the_limit_says_so_and_reuses_the_buffer() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("f"), vec![b'a'; 10_000]).unwrap();
        let d = Directory::open(&Root::default(), dir.path().to_str().unwrap()).unwrap();
        let mut buffer = Vec::new();
        let cut = d.read(c"f", &mut buffer, 5000).unwrap();
        assert!(cut.is_cut() && cut.whole().is_none() && cut.beginning().len() == 5000);
        let length = |text: Text<'_>| text.whole().map(<[u8]>::len);
        assert_eq!(length(d.read(c"f", &mut buffer, 100_000).unwrap()), Some(10_000));
        let capacity = buffer.capacity();
        assert_eq!(length(d.read(c"f", &mut buffer, 100_000).unwrap()), Some(10_000));
        assert_eq!(buffer.capacity(), capacity);
        // A limit of just its length.
        assert_eq!(
            length(d.read(c"f", &mut Vec::new(), 10_000).unwrap()),
            Some(10_000)
        );
        assert_eq!(length(d.read(c"f", &mut Vec::new(), 9_999).unwrap()), None);
        let root = Root::new(dir.path());
        assert_eq!(read(&root, "/f", 9_999), Err(Errno::FBIG));
        assert_eq!(bytes(&root, "/f", 10_000).map(|b| b.len()), Some(10_000));
        assert_eq!(d.read_record(c"f", &mut Vec::new()), Err(Errno::FBIG));
        assert_eq!(d.read(c"absent", &mut buffer, 10).unwrap_err(), Errno::NOENT);
    }

    #[test]
    fn a_kept_file_is_read_from_its_beginning_each_time() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("f");
        let mut buffer = Vec::new();
        // A root of its own: the file is found anew each time, also when it is another one.
        let mut kept = Kept::new(&Root::new(dir.path()), "/f");
        assert_eq!(kept.read(&mut buffer, 10), None);
        for text in ["one", "three"] {
            std::fs::write(dir.path().join("new"), text).unwrap();
            std::fs::rename(dir.path().join("new"), &file).unwrap();
            assert_eq!(kept.read(&mut buffer, 10), Some(text.as_bytes()));
            assert_eq!(kept.read(&mut buffer, 2), None, "it is longer");
        }
        // The running machine: one that stays open.
        let mut kept = Kept::new(&Root::default(), file.to_str().unwrap());
        assert_eq!(kept.read(&mut buffer, 10), Some(&b"three"[..]));
        std::fs::write(&file, "four").unwrap();
        std::fs::remove_file(&file).unwrap();
        assert_eq!(kept.read(&mut buffer, 10), Some(&b"four"[..]), "it is open");
        assert_eq!(
            Kept::new(&Root::default(), file.to_str().unwrap()).read(&mut buffer, 10),
            None
        );
    }
}
