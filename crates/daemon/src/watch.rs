//! The watch over kernel settings: a thread waits for writes of others, and a log in the run directory records who
//! changed what in this boot, for `homeostat tunable`. A foreign write wins: homeostat withdraws its change, reported
//! once.

use crate::service::Message;
use homeostat_kernel::Root;
use homeostat_model::Nanoseconds;
use homeostat_sensors::settings::watch;
use homeostat_sensors::settings::watch::{ForeignWrite, Stopper, Watch};
use homeostat_tunables::Catalogue;
use homeostat_tunables::settings::{Change, Watched};
use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::mpsc::SyncSender;
use std::thread::JoinHandle;
use std::time::Duration;

/// Name of the log in the run directory.
pub const BOOK_FILE: &str = "tunables.json";
/// Version of the log.
pub const BOOK_SCHEMA: u32 = 1;
/// Largest log: the values of some hundred settings and a thousand changes.
const BOOK_BYTES_MAX: u64 = 4 * 1024 * 1024;
/// A setting that is written repeatedly is reported at most this often; the log has all changes.
const TELL_EVERY: Nanoseconds = Nanoseconds::from_secs(60);
/// Shortest time between two saves.
const SAVE_EVERY: Nanoseconds = Nanoseconds::from_secs(1);
/// Time until the log has a foreign write: usually 0.1 s, 2 s if just saved, longer if the daemon gets little CPU time.
const NOTICED_WITHIN: Duration = Duration::from_secs(10);
const NOTICED_EVERY: Duration = Duration::from_millis(20);
const WAIT_MAX: Duration = Duration::from_secs(60);

/// Ends the thread when it is dropped.
pub struct WatchThread {
    stop: Stopper,
    thread: Option<JoinHandle<()>>,
}

impl WatchThread {
    /// Watches until dropped, and sends the writes of others.
    ///
    /// # Errors
    /// No thread or descriptor is left.
    pub fn start(mut watch: Watch, sender: SyncSender<Message>) -> std::io::Result<Self> {
        let (stop, stopped) = Stopper::new()?;
        let thread = std::thread::Builder::new()
            .name("settings".into())
            .stack_size(128 * 1024)
            .spawn(move || {
                while let Some(writes) = watch.wait(&stopped, WAIT_MAX) {
                    if !writes.is_empty() && sender.send(Message::Settings(writes)).is_err() {
                        return;
                    }
                }
            })?;
        Ok(Self {
            stop,
            thread: Some(thread),
        })
    }
}

impl Drop for WatchThread {
    fn drop(&mut self) {
        self.stop.stop();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Others' changes in this boot, in memory and on file.
pub struct Book {
    file: PathBuf,
    watched: Watched,
    told: BTreeMap<String, Nanoseconds>,
    saved: Option<Nanoseconds>,
    is_behind: bool,
    broken: bool,
}

impl Book {
    /// Opens or begins the log of this boot. An existing log keeps the values of its first start as "boot values".
    pub fn open(
        run_directory: &Path,
        boot_id: &str,
        now_unix: u64,
        values: BTreeMap<String, String>,
    ) -> Self {
        let file = run_directory.join(BOOK_FILE);
        let watched = match read(run_directory) {
            Some(mut watched) if watched.boot_id == boot_id => {
                // A later device starts with its present value.
                for (path, value) in values {
                    watched.boot.entry(path).or_insert(value);
                }
                watched
            }
            _ => Watched {
                schema: BOOK_SCHEMA,
                boot_id: boot_id.to_owned(),
                since_unix: now_unix,
                boot: values,
                changes: Vec::new(),
            },
        };
        let mut book = Self {
            file,
            watched,
            told: BTreeMap::new(),
            saved: None,
            is_behind: false,
            broken: false,
        };
        book.save();
        book
    }

    /// Notes a change. The sentence for people, if it is time for one.
    pub fn note(&mut self, write: &ForeignWrite, at: Nanoseconds, at_unix: u64) -> Option<String> {
        self.watched.add(Change {
            at_unix,
            name: write.name.clone(),
            path: write.path.clone(),
            from: write.from.clone(),
            to: write.to.clone(),
            by: write.by.clone(),
            own_command: write.own_command,
        });
        self.is_behind = true;
        self.flush(at);
        let due = self
            .told
            .get(&write.path)
            .is_none_or(|told| at.saturating_sub(*told) >= TELL_EVERY);
        due.then(|| {
            self.told.insert(write.path.clone(), at);
            sentence(write)
        })
    }

    /// Writes the log if it is behind and was not written just now. Call it at intervals.
    pub fn flush(&mut self, at: Nanoseconds) {
        let rested = self
            .saved
            .is_none_or(|saved| at.saturating_sub(saved) >= SAVE_EVERY);
        if self.is_behind && rested {
            self.saved = Some(at);
            self.is_behind = false;
            self.save();
        }
    }

    /// Writes atomically. An unwritable log costs knowledge only.
    fn save(&mut self) {
        let outcome = serde_json::to_vec(&self.watched)
            .map_err(std::io::Error::from)
            .and_then(|text| {
                let new = self.file.with_extension("json.new");
                let mut file = std::fs::File::create(&new)?;
                file.write_all(&text)?;
                std::fs::rename(&new, &self.file)
            });
        self.broken = outcome.is_err();
    }

    /// Whether a change is not on file yet.
    pub fn is_behind(&self) -> bool {
        self.is_behind
    }

    /// Whether the last change could not be written down.
    pub fn is_broken(&self) -> bool {
        self.broken
    }
}

impl Drop for Book {
    fn drop(&mut self) {
        if self.is_behind {
            self.save();
        }
    }
}

/// The sentence about a change.
pub fn sentence(write: &ForeignWrite) -> String {
    let by = write.by.as_deref().unwrap_or("somebody else");
    format!(
        "{} was changed from {} to {} by {by}: homeostat leaves it so",
        write.name, write.from, write.to
    )
}

/// The log in a run directory; `None` without a readable one.
pub fn read(run_directory: &Path) -> Option<Watched> {
    use std::io::Read;
    let mut text = Vec::new();
    std::fs::File::open(run_directory.join(BOOK_FILE))
        .ok()?
        .take(BOOK_BYTES_MAX)
        .read_to_end(&mut text)
        .ok()?;
    serde_json::from_slice(&text)
        .ok()
        .filter(|w: &Watched| w.schema == BOOK_SCHEMA)
}

/// Waits until the log has these values as the last of their files, if a daemon watches, for a bounded time. A command
/// calls it before it ends: the writer can only be identified while it lives.
pub fn await_noticed(run_directory: &Path, written: &[(&str, &str)]) {
    let begin = std::time::Instant::now();
    while begin.elapsed() < NOTICED_WITHIN {
        let is_noticed = read(run_directory).is_none_or(|watched| {
            written.iter().all(|(path, value)| match watched.last(path) {
                Some(change) => change.to == *value,
                None => !watched.boot.contains_key(*path),
            })
        });
        if is_noticed {
            return;
        }
        std::thread::sleep(NOTICED_EVERY);
    }
}

/// Begins the watch over this machine. What is limited is said in a note for people.
pub fn begin() -> (Option<Watch>, Vec<String>) {
    let catalogue = match Catalogue::load() {
        Ok(catalogue) => catalogue,
        Err(e) => return (None, vec![format!("settings are not watched: {e}")]),
    };
    let watch = Watch::begin(Root::default(), &catalogue);
    let notes = watch
        .why_not()
        .map(|why| {
            format!(
                "{why}: what others set is noticed within {} s, and not who did it",
                watch::POLL_EVERY.as_secs()
            )
        })
        .into_iter()
        .collect();
    (Some(watch), notes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(to: &str) -> ForeignWrite {
        ForeignWrite {
            name: "vm.swappiness".into(),
            path: "/proc/sys/vm/swappiness".into(),
            from: "60".into(),
            to: to.into(),
            by: Some("sh (pid 7, user 0)".into()),
            own_command: false,
        }
    }

    #[test]
    fn the_book_keeps_boot_values_over_a_restart_and_begins_anew_with_a_boot() {
        let directory = tempfile::tempdir().unwrap();
        let values = |v: &str| BTreeMap::from([("/proc/sys/vm/swappiness".to_owned(), v.to_owned())]);
        let mut book = Book::open(directory.path(), "one", 100, values("60"));
        let said = book.note(&write("10"), Nanoseconds::from_secs(1), 101).unwrap();
        assert_eq!(
            said,
            "vm.swappiness was changed from 60 to 10 by sh (pid 7, user 0): homeostat leaves it so"
        );
        // Told once a minute, noted every time.
        assert_eq!(book.note(&write("20"), Nanoseconds::from_secs(2), 102), None);
        assert!(book.note(&write("30"), Nanoseconds::from_secs(62), 162).is_some());
        // Written at most once a second, and the rest when its time comes.
        book.note(&write("40"), Nanoseconds::from_millis(62_100), 162);
        assert_eq!(read(directory.path()).unwrap().changes.len(), 3);
        book.flush(Nanoseconds::from_millis(62_900));
        assert_eq!(read(directory.path()).unwrap().changes.len(), 3);
        book.flush(Nanoseconds::from_millis(63_000));
        assert_eq!(read(directory.path()).unwrap().changes.len(), 4);
        drop(book);
        let again = Book::open(directory.path(), "one", 200, values("30"));
        assert_eq!(again.watched.boot, values("60"));
        assert_eq!((again.watched.since_unix, again.watched.changes.len()), (100, 4));
        drop(again);
        let other = Book::open(directory.path(), "two", 300, values("60"));
        assert_eq!((other.watched.since_unix, other.watched.changes.len()), (300, 0));
        assert_eq!(read(directory.path()).unwrap(), other.watched);
    }

    #[test]
    fn rubbish_in_the_run_directory_is_no_book_and_a_missing_directory_no_error() {
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join(BOOK_FILE), "{\"schema\":1}").unwrap();
        assert_eq!(read(directory.path()), None);
        let book = Book::open(&directory.path().join("none"), "one", 1, BTreeMap::new());
        assert!(book.is_broken());
    }
}
