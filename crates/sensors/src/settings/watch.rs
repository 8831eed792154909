//! Notices at once when somebody else changes a setting, and names the writer.
//!
//! **How.** The kernel reports each write to a watched file ([`Fanotify`]); then the value is read. Files of
//! `/proc/sys` stay open, because the kernel drops their inodes, and so the watches, with the last user. Writes through
//! another mount of proc are not reported, so all values are also read every [`LOOK_EVERY`], or without fanotify every
//! [`POLL_EVERY`]. A read costs a few microseconds per file.
//!
//! **Who.** The kernel reports the writing process; one that has ended is reported as unknown. Writes of homeostat's
//! own process are ignored.

use homeostat_kernel::fanotify::Fanotify;
use homeostat_kernel::{Root, files};
use homeostat_tunables::settings::instances;
use homeostat_tunables::{Catalogue, Kind, Tree, Values};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fd::{AsFd, OwnedFd};
use std::collections::BTreeMap;
use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

/// Interval of reading all values although writes are reported.
pub const LOOK_EVERY: Duration = Duration::from_secs(60);
/// Interval of reading all values if writes are not reported.
pub const POLL_EVERY: Duration = Duration::from_secs(5);
/// Most settings that are watched.
pub const WATCHED_MAX: usize = 600;
/// Pause after a batch of writes: meanwhile the kernel merges the writes of one process to one file.
const REST: Duration = Duration::from_millis(50);
/// Time after its end during which a process number means the same process.
const SAME_WRITER: Duration = Duration::from_secs(2);
const READS_MAX: usize = 16;

/// Somebody else changed a setting.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ForeignWrite {
    /// The setting's name.
    pub name: String,
    /// Its file.
    pub path: String,
    /// Value before, in normal form.
    pub from: String,
    /// Value now.
    pub to: String,
    /// Writer, if the kernel reported one: `sysctl (pid 7, user 0)`.
    pub by: Option<String>,
    /// It was a command of homeostat (`homeostat tunable`): the writer ran this process's executable.
    pub own_command: bool,
}

#[derive(Clone, Debug)]
struct Writer {
    text: String,
    own_command: bool,
}

impl Writer {
    fn unknown(text: String) -> Self {
        Self {
            text,
            own_command: false,
        }
    }
}

struct Watched {
    name: String,
    path: String,
    values: Values,
    last: String,
    /// Keeps the inode of a file of `/proc/sys`, and is read repeatedly.
    open: Option<File>,
}

/// The watch over the settings of the catalogue.
pub struct Watch {
    root: Root,
    watched: Vec<Watched>,
    by_inode: BTreeMap<(u64, u64), usize>,
    fanotify: Option<Fanotify>,
    why_not: Option<String>,
    looked: Instant,
    rest_until: Instant,
    /// The last writer, so that a program that writes several settings and ends is named for all of them.
    writer: Option<(i32, Instant, Writer)>,
}

impl std::fmt::Debug for Watch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Watch")
            .field("watched", &self.watched.len())
            .field("told", &self.fanotify.is_some())
            .finish_non_exhaustive()
    }
}

impl Watch {
    /// Begins to watch the catalogue's settings that this machine has, without interrupts: irqbalance moves them.
    pub fn begin(root: Root, catalogue: &Catalogue) -> Self {
        let (fanotify, why_not) = match Fanotify::new() {
            Ok(fanotify) => (Some(fanotify), None),
            Err(e) => (
                None,
                Some(format!("the kernel does not tell of writes (fanotify: {e})")),
            ),
        };
        let mut watch = Self {
            root,
            watched: Vec::new(),
            by_inode: BTreeMap::new(),
            fanotify,
            why_not,
            looked: Instant::now(),
            rest_until: Instant::now(),
            writer: None,
        };
        for tunable in &catalogue.tunables {
            if tunable.kind == Kind::Boot || tunable.group == "irq" {
                continue;
            }
            for (name, path) in instances(tunable, &watch.root) {
                watch.add(name, path, tunable.values.clone());
            }
        }
        watch
    }

    fn add(&mut self, name: String, path: String, values: Values) {
        if self.watched.len() >= WATCHED_MAX {
            return;
        }
        let Ok(text) = self.root.read(&path) else {
            return;
        };
        let file = self.root.path(&path);
        if let (Some(fanotify), Ok(metadata), Ok(name)) = (
            &self.fanotify,
            std::fs::metadata(&file),
            CString::new(file.as_os_str().as_bytes()),
        ) {
            if fanotify.watch(&name).is_ok() {
                use std::os::unix::fs::MetadataExt;
                self.by_inode
                    .insert((metadata.dev(), metadata.ino()), self.watched.len());
            }
        }
        let open = path.starts_with("/proc/sys/").then(|| File::open(&file).ok());
        self.watched.push(Watched {
            last: values.normal(&String::from_utf8_lossy(&text)),
            name,
            path,
            values,
            open: open.flatten(),
        });
    }

    /// Values when the watch began, or as last seen, by file.
    pub fn values(&self) -> BTreeMap<String, String> {
        self.watched
            .iter()
            .map(|w| (w.path.clone(), w.last.clone()))
            .collect()
    }

    /// Reason why writes are not reported; `None` if they are.
    pub fn why_not(&self) -> Option<&str> {
        self.why_not.as_deref()
    }

    /// Number of watched settings.
    pub fn len(&self) -> usize {
        self.watched.len()
    }

    /// Whether nothing is watched.
    pub fn is_empty(&self) -> bool {
        self.watched.is_empty()
    }

    /// Waits for another writer's changes, for the stop (`None` then), or at most for `patience`.
    pub fn wait(&mut self, stop: &OwnedFd, patience: Duration) -> Option<Vec<ForeignWrite>> {
        let rest = self.rest_until.saturating_duration_since(Instant::now());
        if !rest.is_zero() && is_stopped(stop, rest) {
            return None;
        }
        let every = if self.fanotify.is_some() {
            LOOK_EVERY
        } else {
            POLL_EVERY
        };
        let wait = every.saturating_sub(self.looked.elapsed()).min(patience);
        let limit = Timespec::try_from(wait).ok();
        let told = {
            let mut fds = vec![PollFd::new(stop, PollFlags::IN)];
            if let Some(fanotify) = &self.fanotify {
                fds.push(PollFd::from_borrowed_fd(fanotify.as_fd(), PollFlags::IN));
            }
            let _ = rustix::event::poll(&mut fds, limit.as_ref());
            if fds.first().is_some_and(|fd| !fd.revents().is_empty()) {
                return None;
            }
            fds.get(1).is_some_and(|fd| !fd.revents().is_empty())
        };
        let mut found = Vec::new();
        if told {
            self.take_events(&mut found);
            self.rest_until = Instant::now() + REST;
        }
        if self.looked.elapsed() >= every {
            self.look(&mut found);
        }
        Some(found)
    }

    fn take_events(&mut self, found: &mut Vec<ForeignWrite>) {
        for _ in 0..READS_MAX {
            let events = match self.fanotify.as_ref().map(Fanotify::read) {
                Some(Ok(events)) if !events.is_empty() => events,
                Some(Ok(_)) | None => return,
                Some(Err(e)) => {
                    // Never spin: from now on the values are read at intervals.
                    self.fanotify = None;
                    self.why_not = Some(format!("the kernel tells of writes no more (fanotify: {e})"));
                    return;
                }
            };
            for event in events {
                let Some(file) = event.file else {
                    self.look(found);
                    continue;
                };
                let inode = rustix::fs::fstat(&file).map(|s| (s.st_dev, s.st_ino));
                let Some(index) = inode.ok().and_then(|i| self.by_inode.get(&i).copied()) else {
                    continue;
                };
                if event.pid == own_pid() {
                    self.accept(index);
                } else {
                    let by = self.writer(event.pid);
                    found.extend(self.compare(index, Some(by)));
                }
            }
        }
    }

    /// Reads all values now: changes by others since the last reading.
    pub fn look_now(&mut self) -> Vec<ForeignWrite> {
        let mut found = Vec::new();
        self.look(&mut found);
        found
    }

    fn look(&mut self, found: &mut Vec<ForeignWrite>) {
        self.looked = Instant::now();
        for index in 0..self.watched.len() {
            found.extend(self.compare(index, None));
        }
    }

    fn now(&self, index: usize) -> Option<String> {
        let watched = self.watched.get(index)?;
        let open = watched.open.as_ref().filter(|_| self.root.is_live());
        let text = match open.and_then(read_again) {
            Some(text) => text,
            None => self.root.read(&watched.path).ok()?,
        };
        Some(watched.values.normal(&String::from_utf8_lossy(&text)))
    }

    /// Takes the present value as ours.
    fn accept(&mut self, index: usize) {
        if let Some(now) = self.now(index) {
            if let Some(watched) = self.watched.get_mut(index) {
                watched.last = now;
            }
        }
    }

    fn writer(&mut self, pid: i32) -> Writer {
        if pid <= 0 {
            return Writer::unknown("a process of another container".to_owned());
        }
        let now = Instant::now();
        if let Some(text) = in_words(pid) {
            let writer = Writer {
                text,
                own_command: runs_our_program(pid),
            };
            self.writer = Some((pid, now, writer.clone()));
            return writer;
        }
        match &self.writer {
            Some((known, at, writer)) if *known == pid && now.duration_since(*at) < SAME_WRITER => {
                writer.clone()
            }
            _ => Writer::unknown(format!("a process that has ended since (pid {pid})")),
        }
    }

    fn compare(&mut self, index: usize, by: Option<Writer>) -> Option<ForeignWrite> {
        let now = self.now(index)?;
        let watched = self.watched.get_mut(index)?;
        if watched.last == now {
            return None;
        }
        let from = std::mem::replace(&mut watched.last, now.clone());
        Some(ForeignWrite {
            name: watched.name.clone(),
            path: watched.path.clone(),
            from,
            to: now,
            own_command: by.as_ref().is_some_and(|writer| writer.own_command),
            by: by.map(|writer| writer.text),
        })
    }
}

/// The present value of an open setting; `None` if it cannot be read this way, or is longer than settings are.
fn read_again(open: &File) -> Option<Vec<u8>> {
    const LONG: usize = 4096;
    let mut text = vec![0; LONG];
    let length = open.read_at(&mut text, 0).ok().filter(|length| *length < LONG)?;
    text.truncate(length);
    Some(text)
}

fn own_pid() -> i32 {
    i32::try_from(std::process::id()).unwrap_or(-1)
}

fn is_stopped(stop: &OwnedFd, patience: Duration) -> bool {
    let mut fds = [PollFd::new(stop, PollFlags::IN)];
    let limit = Timespec::try_from(patience).ok();
    let _ = rustix::event::poll(&mut fds, limit.as_ref());
    fds.iter().any(|fd| !fd.revents().is_empty())
}

fn in_words(pid: i32) -> Option<String> {
    let root = Root::default();
    let program = files::text(&root, &format!("/proc/{pid}/comm"))?;
    let user = files::bytes(&root, &format!("/proc/{pid}/status"), files::SMALL_FILE_MAX)
        .map(|status| crate::choice::user(&status));
    Some(match user {
        Some(user) => format!("{program} (pid {pid}, user {user})"),
        None => format!("{program} (pid {pid})"),
    })
}

/// Whether a process runs our executable. Its name proves nothing: any process may be called `homeostat`.
fn runs_our_program(pid: i32) -> bool {
    let file = |path: String| rustix::fs::stat(path).ok().map(|s| (s.st_dev, s.st_ino));
    let ours = file("/proc/self/exe".to_owned());
    ours.is_some() && ours == file(format!("/proc/{pid}/exe"))
}

/// Ends a watch from another thread: one half to keep, the other for [`Watch::wait`].
#[derive(Debug)]
pub struct Stopper(OwnedFd);

impl Stopper {
    /// Both halves.
    ///
    /// # Errors
    /// No descriptors are left.
    pub fn new() -> io::Result<(Self, OwnedFd)> {
        let event = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC)?;
        Ok((Self(event.try_clone()?), event))
    }

    /// Ends the watch.
    pub fn stop(&self) {
        // One more on a counter without a reader: it cannot fail before very many calls.
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree() -> (tempfile::TempDir, Root) {
        let dir = tempfile::tempdir().unwrap();
        let root = Root::new(dir.path());
        for (path, text) in [
            ("/proc/sys/vm/swappiness", "60\n"),
            (
                "/sys/kernel/mm/transparent_hugepage/enabled",
                "always [madvise] never\n",
            ),
            ("/proc/irq/default_smp_affinity", "3\n"),
        ] {
            let file = root.path(path);
            std::fs::create_dir_all(file.parent().unwrap()).unwrap();
            std::fs::write(file, text).unwrap();
        }
        (dir, root)
    }

    fn write(root: &Root, path: &str, text: &str) {
        std::fs::write(root.path(path), text).unwrap();
    }

    #[test]
    fn a_look_finds_what_changed_and_tells_it_once() {
        let (_keep, root) = tree();
        let mut watch = Watch::begin(root.clone(), &Catalogue::load().unwrap());
        // Interrupts are not watched.
        assert_eq!(watch.len(), 2);
        write(&root, "/proc/sys/vm/swappiness", "10\n");
        write(&root, "/proc/irq/default_smp_affinity", "1\n");
        let mut found = Vec::new();
        watch.look(&mut found);
        assert_eq!(found.len(), 1);
        assert_eq!(
            (
                found[0].name.as_str(),
                found[0].from.as_str(),
                found[0].to.as_str()
            ),
            ("vm.swappiness", "60", "10")
        );
        let mut again = Vec::new();
        watch.look(&mut again);
        assert_eq!(again, []);
    }

    #[test]
    fn the_end_is_noticed_while_waiting() {
        let (_keep, root) = tree();
        let mut watch = Watch::begin(root, &Catalogue::load().unwrap());
        let (hold, stop) = Stopper::new().unwrap();
        assert_eq!(watch.wait(&stop, Duration::ZERO), Some(Vec::new()));
        hold.stop();
        assert_eq!(watch.wait(&stop, Duration::from_secs(3600)), None);
    }

    /// The kernel's own files, and a process that is not this one.
    #[test]
    fn a_write_of_another_process_is_told_with_its_writer_and_an_own_one_is_not() {
        if !rustix::process::geteuid().is_root() {
            eprintln!("skipped: needs root");
            return;
        }
        let (_keep, root) = tree();
        let mut watch = Watch::begin(root.clone(), &Catalogue::load().unwrap());
        if let Some(why) = watch.why_not() {
            eprintln!("skipped: {why}");
            return;
        }
        let (_hold, stop) = Stopper::new().unwrap();
        write(&root, "/proc/sys/vm/swappiness", "20\n");
        assert_eq!(watch.wait(&stop, Duration::from_secs(10)), Some(Vec::new()));
        let file = root.path("/proc/sys/vm/swappiness");
        let mut child = std::process::Command::new("sh")
            .arg("-c")
            // It waits, so that its name can be read.
            .arg(format!("echo 30 > {}; exec cat", file.display()))
            .stdin(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let mut found = Vec::new();
        // The file is emptied first, and then written: one or two events.
        for _ in 0..100 {
            found.extend(watch.wait(&stop, Duration::from_secs(10)).unwrap());
            if found.last().is_some_and(|w: &ForeignWrite| w.to == "30") {
                break;
            }
        }
        drop(child.stdin.take());
        child.wait().unwrap();
        let last = found.last().unwrap();
        assert_eq!((last.name.as_str(), last.to.as_str()), ("vm.swappiness", "30"));
        let by = last.by.clone().unwrap();
        assert!(by.contains(&format!("pid {}", child.id())), "{by}");
        assert!(!last.own_command, "a shell is no command of homeostat");
    }

    #[test]
    fn a_process_is_known_by_the_file_it_runs_and_not_by_its_name() {
        let own = std::process::id();
        assert!(runs_our_program(i32::try_from(own).unwrap()));
        let directory = tempfile::tempdir().unwrap();
        let named = directory.path().join("homeostat");
        if !["/bin/sleep", "/usr/bin/sleep"]
            .iter()
            .any(|p| std::fs::copy(p, &named).is_ok())
        {
            println!("skipped: no sleep to copy");
            return;
        }
        let mut child = std::process::Command::new(&named).arg("60").spawn().unwrap();
        let ours = runs_our_program(i32::try_from(child.id()).unwrap());
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(!ours);
    }
}
