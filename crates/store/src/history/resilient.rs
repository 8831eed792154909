//! A history that never fails the daemon. Entries are queued and written once a tick. If that fails, an in-memory
//! history takes over, seeded with the readable entries: a full disk must not repeat a known harm. Every few minutes it
//! tries the disk again and writes the new entries. A damaged file moves to `history.sqlite.damaged-SECONDS`. Each
//! change is reported once.

use super::{
    DecisionRecord, Entry, ExperimentFilter, Filter, History, HistoryError, HistoryOptions, PlaceboSummary,
    Prior, ROWS_MAX, Window, check, with_suffix,
};
use homeostat_model::{Bytes, ExperimentId, ExperimentRecord, ProvenReader};
use std::collections::{BTreeSet, VecDeque};
use std::path::{Path, PathBuf};

const RETRY_SECONDS: u64 = 300;
/// Most entries that wait to be written; beyond it the oldest are dropped and counted.
const QUEUE_MAX: usize = 4096;
/// Most messages that wait to be taken.
const MESSAGES_MAX: usize = 64;
/// Damaged files kept for a person; the oldest are deleted.
const DAMAGED_FILES_MAX: usize = 3;
const MEMORY_BYTES_MAX: Bytes = Bytes::from_mib(2);
const SEED_MAX: u32 = 500;

/// The present place of the history.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HistoryState {
    /// On disk, as it should be.
    OnDisk,
    /// In memory only; it ends with the daemon unless the file can be written again before.
    InMemory {
        /// Since when, in seconds since the epoch.
        since_unix: u64,
        /// Why, in a sentence.
        why: String,
    },
}

/// The history as the daemon uses it. No call fails or blocks for long.
#[derive(Debug)]
pub struct ResilientHistory {
    path: PathBuf,
    options: HistoryOptions,
    state: HistoryState,
    /// `None` only without memory for the substitute.
    history: Option<History>,
    retry_at_unix: u64,
    queue: VecDeque<Entry>,
    dropped: u64,
    /// Experiments recorded in memory since the fallback. Only these, not the seed, go to the disk later.
    unsaved: BTreeSet<ExperimentId>,
    messages: Vec<String>,
    /// The last fault of reading or waiting that was reported, so that it is reported once.
    reported: Option<String>,
}

impl ResilientHistory {
    /// Opens the history, or a substitute. `now_unix` is the time in seconds since the epoch.
    pub fn open(path: &Path, options: HistoryOptions, now_unix: u64) -> Self {
        let mut this = Self {
            path: path.to_owned(),
            options,
            state: HistoryState::OnDisk,
            history: None,
            retry_at_unix: 0,
            queue: VecDeque::new(),
            dropped: 0,
            unsaved: BTreeSet::new(),
            messages: Vec::new(),
            reported: None,
        };
        match this.open_file(now_unix) {
            Ok(history) => this.history = Some(history),
            Err(e) => this.degrade(&e, now_unix),
        }
        this
    }

    /// The place of the history.
    pub fn state(&self) -> &HistoryState {
        &self.state
    }

    /// Entries that were lost because they could not be written in time.
    pub fn dropped(&self) -> u64 {
        self.dropped
    }

    /// Messages for the operator, each once. Empties the list.
    pub fn take_messages(&mut self) -> Vec<String> {
        std::mem::take(&mut self.messages)
    }

    /// Remembers a decision at the next [`flush`](Self::flush).
    pub fn record_decision(&mut self, decision: DecisionRecord) {
        self.push(Entry::Decision(decision));
    }

    /// Remembers a window at the next [`flush`](Self::flush).
    pub fn record_window(&mut self, window: Window) {
        self.push(Entry::Window(window));
    }

    /// Queues an experiment for the next [`flush`](Self::flush). Only its last state in a tick is written.
    pub fn record_experiment(&mut self, experiment: ExperimentRecord) {
        self.queue
            .retain(|entry| !matches!(entry, Entry::Experiment(e) if e.id == experiment.id));
        self.push(Entry::Experiment(Box::new(experiment)));
    }

    fn push(&mut self, entry: Entry) {
        if let Err(e) = check(&entry) {
            self.dropped += 1;
            self.tell(e.to_string());
            return;
        }
        if self.queue.len() >= QUEUE_MAX {
            // An experiment is worth more than a window or a sentence.
            let victim = self
                .queue
                .iter()
                .position(|e| !matches!(e, Entry::Experiment(_)))
                .unwrap_or(0);
            self.queue.remove(victim);
            self.dropped += 1;
        }
        self.queue.push_back(entry);
    }

    /// Writes the queue in one transaction and tries the disk again when due. Call it once a tick.
    pub fn flush(&mut self, now_unix: u64) {
        if matches!(self.state, HistoryState::InMemory { .. }) && now_unix >= self.retry_at_unix {
            self.try_disk(now_unix);
        }
        if self.queue.is_empty() {
            return;
        }
        let batch: Vec<Entry> = self.queue.drain(..).collect();
        self.write(batch, now_unix);
    }

    fn write(&mut self, batch: Vec<Entry>, now_unix: u64) {
        // Each pass finishes or falls back: as given, after pruning or with a new file, in memory.
        for _ in 0..3 {
            match self.write_once(&batch, now_unix) {
                Ok(()) => {
                    self.note_unsaved(&batch);
                    return;
                }
                Err(HistoryError::Busy { .. }) => {
                    self.tell_once(format!(
                        "{}: another process keeps the history locked; it is written later",
                        self.path.display()
                    ));
                    self.queue.extend(batch);
                    return;
                }
                Err(e) if self.state == HistoryState::OnDisk => self.fall_back(&e, now_unix),
                Err(_) => break,
            }
        }
        self.dropped += batch.len() as u64;
    }

    fn write_once(&mut self, batch: &[Entry], now_unix: u64) -> Result<(), HistoryError> {
        let Some(history) = &mut self.history else {
            return Err(HistoryError::Full {
                path: self.path.clone(),
                why: "no memory".to_owned(),
            });
        };
        match history.record(batch) {
            Err(HistoryError::Full { path, why }) => {
                // At our own limit, forgetting the oldest helps; on a full disk it does not.
                for _ in 0..16 {
                    if !history.prune(now_unix)?.more {
                        break;
                    }
                    if history.record(batch).is_ok() {
                        return Ok(());
                    }
                }
                Err(HistoryError::Full { path, why })
            }
            other => other,
        }
    }

    fn note_unsaved(&mut self, batch: &[Entry]) {
        if self.state == HistoryState::OnDisk {
            self.reported = None;
            return;
        }
        self.unsaved.extend(batch.iter().filter_map(|entry| match entry {
            Entry::Experiment(e) => Some(e.id),
            Entry::Decision(_) | Entry::Window(_) => None,
        }));
    }

    /// Deletes a small step. Call it about once a minute; true when there is more to do soon.
    pub fn prune(&mut self, now_unix: u64) -> bool {
        let Some(history) = &mut self.history else {
            return false;
        };
        match history.prune(now_unix) {
            Ok(pruned) => pruned.more,
            Err(e) => {
                self.reading_failed(&e, now_unix);
                false
            }
        }
    }

    /// As [`History::experiments`]; empty when unreadable.
    pub fn experiments(&mut self, filter: &ExperimentFilter, now_unix: u64) -> Vec<ExperimentRecord> {
        self.read(now_unix, |h| h.experiments(filter)).unwrap_or_default()
    }

    /// As [`History::decisions`]; empty when unreadable.
    pub fn decisions(&mut self, filter: &Filter, now_unix: u64) -> Vec<DecisionRecord> {
        self.read(now_unix, |h| h.decisions(filter)).unwrap_or_default()
    }

    /// As [`History::windows`]; empty when unreadable.
    pub fn windows(&mut self, filter: &Filter, now_unix: u64) -> Vec<Window> {
        self.read(now_unix, |h| h.windows(filter)).unwrap_or_default()
    }

    /// As [`History::priors`]. Empty when unreadable: every strategy is then tried as if for the first time.
    pub fn priors(&mut self, machine: &str, now_unix: u64) -> Vec<Prior> {
        self.read(now_unix, |h| h.priors(machine)).unwrap_or_default()
    }

    /// As [`History::proven_readers`]. Empty when unreadable: every reader must then be proven anew.
    pub fn proven_readers(&mut self, machine: &str, now_unix: u64) -> Vec<ProvenReader> {
        self.read(now_unix, |h| h.proven_readers(machine))
            .unwrap_or_default()
    }

    /// As [`History::placebo_summary`]; zero when unreadable.
    pub fn placebo_summary(&mut self, now_unix: u64) -> PlaceboSummary {
        self.read(now_unix, History::placebo_summary).unwrap_or_default()
    }

    /// As [`History::next_experiment_id`]; numbers that wait to be written are counted, too.
    pub fn next_experiment_id(&mut self, now_unix: u64) -> ExperimentId {
        let stored = self
            .read(now_unix, History::next_experiment_id)
            .unwrap_or(self.options.first_experiment);
        let waiting = self.queue.iter().filter_map(|entry| match entry {
            Entry::Experiment(e) => Some(ExperimentId(e.id.0.saturating_add(1))),
            Entry::Decision(_) | Entry::Window(_) => None,
        });
        let next = waiting.fold(stored, Ord::max);
        // The numbers stay used even if the file is lost later.
        self.options.first_experiment = self.options.first_experiment.max(next);
        next
    }

    fn read<T>(&mut self, now_unix: u64, query: impl Fn(&History) -> Result<T, HistoryError>) -> Option<T> {
        match query(self.history.as_ref()?) {
            Ok(found) => Some(found),
            Err(e) => {
                self.reading_failed(&e, now_unix);
                query(self.history.as_ref()?).ok()
            }
        }
    }

    fn reading_failed(&mut self, e: &HistoryError, now_unix: u64) {
        match e {
            HistoryError::Damaged { .. } if self.state == HistoryState::OnDisk => self.fall_back(e, now_unix),
            _ => self.tell_once(e.to_string()),
        }
    }

    /// Begins a new file if this one is damaged, else goes on in memory.
    fn fall_back(&mut self, e: &HistoryError, now_unix: u64) {
        if matches!(e, HistoryError::Damaged { .. }) {
            self.history = None;
            if let Ok(history) = self.begin_anew(e, now_unix) {
                self.history = Some(history);
                return;
            }
        }
        self.degrade(e, now_unix);
    }

    fn open_file(&mut self, now_unix: u64) -> Result<History, HistoryError> {
        match History::open(&self.path, self.options) {
            Err(e @ HistoryError::Damaged { .. }) => self.begin_anew(&e, now_unix),
            other => other,
        }
    }

    fn begin_anew(&mut self, damage: &HistoryError, now_unix: u64) -> Result<History, HistoryError> {
        let aside = set_aside(&self.path, now_unix).map_err(|e| HistoryError::ReadOnly {
            path: self.path.clone(),
            why: e.to_string(),
        })?;
        let history = History::open(&self.path, self.options)?;
        self.tell(format!(
            "{damage}\n  a new history was begun; the damaged file is {}\n  hint: known gains and harms are learned again; undo is not affected",
            aside.display()
        ));
        Ok(history)
    }

    fn degrade(&mut self, e: &HistoryError, now_unix: u64) {
        let seed = match (&self.history, e) {
            (_, HistoryError::Damaged { .. } | HistoryError::Newer { .. }) => Vec::new(),
            (Some(history), _) => seed_from(history),
            (None, _) => History::open_read_only(&self.path)
                .map(|h| seed_from(&h))
                .unwrap_or_default(),
        };
        let next = self.history.as_ref().and_then(|h| h.next_experiment_id().ok());
        self.options.first_experiment = seed
            .iter()
            .map(|x| ExperimentId(x.id.0 + 1))
            .chain(next)
            .fold(self.options.first_experiment, Ord::max);
        let options = HistoryOptions {
            bytes_max: MEMORY_BYTES_MAX,
            ..self.options
        };
        self.history = History::in_memory(options).ok();
        if let Some(history) = &mut self.history {
            let seed: Vec<Entry> = seed.into_iter().map(|x| Entry::Experiment(Box::new(x))).collect();
            // Without the seed, only knowledge is lost.
            let _ = history.record(&seed);
        }
        self.unsaved.clear();
        self.retry_at_unix = now_unix.saturating_add(RETRY_SECONDS);
        self.state = HistoryState::InMemory {
            since_unix: now_unix,
            why: e.to_string(),
        };
        self.tell(format!(
            "{e}\n  the history goes on in memory and tries the file again every {} minutes; undo is not affected",
            RETRY_SECONDS / 60
        ));
    }

    fn try_disk(&mut self, now_unix: u64) {
        self.retry_at_unix = now_unix.saturating_add(RETRY_SECONDS);
        let Ok(mut disk) = self.open_file(now_unix) else {
            return;
        };
        let collected = match &self.history {
            Some(memory) => self.collected(memory),
            None => Vec::new(),
        };
        if disk
            .prove_writable(now_unix)
            .and_then(|()| disk.record(&collected))
            .is_err()
        {
            return;
        }
        self.history = Some(disk);
        self.unsaved.clear();
        if let HistoryState::InMemory { since_unix, .. } =
            std::mem::replace(&mut self.state, HistoryState::OnDisk)
        {
            self.tell(format!(
                "{}: the history is on disk again after {} minutes in memory; {} entries were saved",
                self.path.display(),
                now_unix.saturating_sub(since_unix) / 60,
                collected.len()
            ));
        }
    }

    /// Entries that are only in memory, in order.
    fn collected(&self, memory: &History) -> Vec<Entry> {
        let all = Filter {
            limit: ROWS_MAX,
            ..Filter::default()
        };
        let mut out: Vec<Entry> = Vec::new();
        for id in &self.unsaved {
            let one = ExperimentFilter {
                id: Some(*id),
                ..ExperimentFilter::default()
            };
            let found = memory.experiments(&one).unwrap_or_default();
            out.extend(found.into_iter().map(|e| Entry::Experiment(Box::new(e))));
        }
        out.extend(
            memory
                .windows(&all)
                .unwrap_or_default()
                .into_iter()
                .rev()
                .map(Entry::Window),
        );
        out.extend(
            memory
                .decisions(&all)
                .unwrap_or_default()
                .into_iter()
                .rev()
                .map(Entry::Decision),
        );
        out
    }

    fn tell(&mut self, message: String) {
        if self.messages.len() < MESSAGES_MAX {
            self.messages.push(message);
        }
    }

    fn tell_once(&mut self, message: String) {
        if self.reported.as_ref() != Some(&message) {
            self.tell(message.clone());
            self.reported = Some(message);
        }
    }
}

fn seed_from(history: &History) -> Vec<ExperimentRecord> {
    let filter = ExperimentFilter {
        limit: SEED_MAX,
        blocks: false,
        ..ExperimentFilter::default()
    };
    history.experiments(&filter).unwrap_or_default()
}

/// Moves a damaged database and its companions away, and deletes all but the newest such files.
fn set_aside(path: &Path, now_unix: u64) -> std::io::Result<PathBuf> {
    let aside = with_suffix(path, &format!(".damaged-{now_unix}"));
    // Companions first: SQLite might apply a stale log to a new database.
    for suffix in ["-shm", "-wal", ""] {
        match std::fs::rename(with_suffix(path, suffix), with_suffix(&aside, suffix)) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => return Err(e),
            _ => {}
        }
    }
    // Only tidying; tried again next time.
    let _ = delete_old_damaged(path);
    Ok(aside)
}

fn delete_old_damaged(path: &Path) -> std::io::Result<()> {
    let (Some(directory), Some(name)) = (path.parent(), path.file_name().and_then(|n| n.to_str())) else {
        return Ok(());
    };
    let prefix = format!("{name}.damaged-");
    let mut times = BTreeSet::new();
    for entry in std::fs::read_dir(directory)? {
        if let Some(rest) = entry?.file_name().to_str().and_then(|n| n.strip_prefix(&prefix)) {
            if let Ok(time) = rest.parse::<u64>() {
                times.insert(time);
            }
        }
    }
    while times.len() > DAMAGED_FILES_MAX {
        let Some(oldest) = times.pop_first() else { break };
        for companion in ["", "-wal", "-shm"] {
            let _ = std::fs::remove_file(with_suffix(path, &format!(".damaged-{oldest}{companion}")));
        }
    }
    Ok(())
}
