//! The history: observation windows, decisions, experiments with every block, and verdicts, in one SQLite file.
//! `history` and `explain` read it. The next proposal takes its prior from it.
//!
//! Nothing depends on the history: undo lives in the journal. A damaged, full, read-only or newer file costs knowledge
//! and is reported once. The daemon uses [`ResilientHistory`].
//!
//! Cost: one transaction a tick, a page cache of 1 MiB, a hard limit on the file size ([`HistoryOptions::bytes_max`]).
//! [`History::prune`] keeps the file below the limit. WAL with `synchronous = NORMAL`: a power loss may cost the last
//! seconds, never consistency. The CLI reads while the daemon writes.
//!
//! Damage is found at opening (SQLite's `quick_check`: structure, types, constraints) and in use (text that is not
//! UTF-8). SQLite keeps no checksums, so other flipped bits inside a text or number stay unnoticed.
//!
//! Numbers survive exactly: 64-bit integers by their bits, floating-point numbers with infinities. NaN is stored as
//! NULL and comes back as NaN. SQLite loses only the sign of a negative zero.

mod migrations;
mod resilient;

pub use resilient::{HistoryState, ResilientHistory};

use homeostat_model::{
    ActionId, BlockRecord, Bytes, Effect, ExperimentId, ExperimentKind, ExperimentRecord, Fingerprint,
    FreshGain, MemberOutcome, MeterId, Nanoseconds, ProvenReader, StrategyId, Verdict, WindowRecord,
    WorkloadId,
};
use migrations::{LATEST, MIGRATIONS};
use rusqlite::types::Value;
use rusqlite::{
    Connection, ErrorCode, OpenFlags, OptionalExtension, Params, Row, Transaction, TransactionBehavior,
    params,
};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Name of the history in the state directory.
pub const HISTORY_FILE: &str = "history.sqlite";
/// Most blocks of one experiment; far above what any budget allows.
pub const BLOCKS_MAX: usize = 10_000;
/// Longest sentence that is stored, in bytes; the rest is cut off.
pub const SENTENCE_BYTES_MAX: usize = 4096;
/// Most rows that one query returns.
pub const ROWS_MAX: u32 = 10_000;
/// Most rows that one step of [`History::prune`] deletes per table.
const PRUNE_STEP: u32 = 500;
const PAGE_BYTES: u64 = 4096;
const DAY_SECONDS: u64 = 86_400;
/// Page cache, in KiB. The whole daemon must stay below 16 MiB.
const CACHE_KIB: i64 = 1024;
/// Heap that SQLite as a whole tries not to exceed.
const HEAP_BYTES: i64 = 4 * 1024 * 1024;
/// Longest wait for another process's lock. The daemon's loop waits too. A batch that failed is tried again next tick.
const BUSY_WAIT: Duration = Duration::from_millis(200);

/// Limits of a history.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HistoryOptions {
    /// Hard limit on the size of the file.
    pub bytes_max: Bytes,
    /// Age in days after which windows, decisions and blocks are forgotten.
    pub keep_days: u32,
    /// Lowest number for a new experiment, from the journal: the file may have been lost.
    pub first_experiment: ExperimentId,
}
impl Default for HistoryOptions {
    fn default() -> Self {
        Self {
            bytes_max: Bytes::from_mib(64),
            keep_days: 90,
            first_experiment: ExperimentId(1),
        }
    }
}

/// Why the history failed. The variant determines the caller's reaction.
#[derive(Debug, thiserror::Error)]
pub enum HistoryError {
    /// The file is not a database or its inside is broken: set it aside and start a new one.
    #[error("{}: damaged: {why}", path.display())]
    Damaged {
        /// File.
        path: PathBuf,
        /// SQLite's finding.
        why: String,
    },
    /// No space on the file system, or the limit of the file is reached: prune or free space.
    #[error("{}: no space left for the history: {why}\n  hint: free space on that file system, or raise the size limit", path.display())]
    Full {
        /// File.
        path: PathBuf,
        /// SQLite's message.
        why: String,
    },
    /// It can be read and not written.
    #[error("{}: the history can not be written: {why}\n  hint: check the mount and the permissions of its directory", path.display())]
    ReadOnly {
        /// File.
        path: PathBuf,
        /// SQLite's message.
        why: String,
    },
    /// Another process holds it right now: try again.
    #[error("{}: in use by another process", path.display())]
    Busy {
        /// File.
        path: PathBuf,
    },
    /// Written by a newer homeostat: leave it alone.
    #[error("{}: written by a newer homeostat (version {found}, this program knows {LATEST})\n  hint: use the newer program, or move the file away", path.display())]
    Newer {
        /// File.
        path: PathBuf,
        /// Its version.
        found: u32,
    },
    /// Written by an older homeostat, and opened for reading only.
    #[error("{}: written by an older homeostat (version {found}, this program needs {LATEST})\n  hint: start the daemon once; it brings the file up to date", path.display())]
    Older {
        /// File.
        path: PathBuf,
        /// Its version.
        found: u32,
    },
    /// It does not exist or cannot be opened.
    #[error("{}: can not be opened: {why}", path.display())]
    Unreachable {
        /// File.
        path: PathBuf,
        /// The cause.
        why: String,
    },
    /// The record breaks a limit; it was not stored.
    #[error("not stored: {what}")]
    Invalid {
        /// The limit.
        what: String,
    },
    /// A row that this program did not write or does not understand.
    #[error("{}: {column} holds {text:?}, which is not understood", path.display())]
    Malformed {
        /// File.
        path: PathBuf,
        /// Table and column.
        column: &'static str,
        /// Its content.
        text: String,
    },
    /// Anything else.
    #[error("{}: {source}", path.display())]
    Sqlite {
        /// File.
        path: PathBuf,
        /// The cause.
        source: rusqlite::Error,
    },
}

/// A decision, as in `explain` and `report`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DecisionRecord {
    /// When, in seconds since the epoch.
    pub at_unix: u64,
    /// About which workload; absent = the machine.
    pub workload: Option<WorkloadId>,
    /// Stage after it.
    pub stage: String,
    /// The sentence with its numbers.
    pub text: String,
}

/// The observations of one workload in one window.
#[derive(Clone, Debug, PartialEq)]
pub struct Window {
    /// Machine fingerprint.
    pub machine: String,
    /// Start, in seconds since the epoch.
    pub started_unix: u64,
    /// The observation.
    pub seen: WindowRecord,
}

/// One thing to remember; a batch of them is written in one transaction.
#[derive(Clone, Debug, PartialEq)]
pub enum Entry {
    /// A decision.
    Decision(DecisionRecord),
    /// An observation window.
    Window(Window),
    /// An experiment, running or ended; replaces what is stored under its number.
    Experiment(Box<ExperimentRecord>),
}

/// Selects experiments. All conditions must hold; the newest come first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExperimentFilter {
    /// Only of this workload, by its name at the time.
    pub workload: Option<WorkloadId>,
    /// Only of workloads with this identity.
    pub fingerprint: Option<Fingerprint>,
    /// Only of this strategy.
    pub strategy: Option<StrategyId>,
    /// Only this one.
    pub id: Option<ExperimentId>,
    /// Only those started at or after this time.
    pub since_unix: u64,
    /// Most rows, up to [`ROWS_MAX`].
    pub limit: u32,
    /// Whether to load the blocks, too.
    pub blocks: bool,
}
impl Default for ExperimentFilter {
    fn default() -> Self {
        Self {
            workload: None,
            fingerprint: None,
            strategy: None,
            id: None,
            since_unix: 0,
            limit: 100,
            blocks: true,
        }
    }
}

/// Selects decisions or windows. The newest come first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Filter {
    /// Only of this workload, by its name at the time.
    pub workload: Option<WorkloadId>,
    /// Only those at or after this time.
    pub since_unix: u64,
    /// Most rows, up to [`ROWS_MAX`].
    pub limit: u32,
}
impl Filter {
    fn parameters(&self) -> impl Params + '_ {
        (
            self.workload.as_deref(),
            time(self.since_unix),
            self.limit.min(ROWS_MAX),
        )
    }
}
impl Default for Filter {
    fn default() -> Self {
        Self {
            workload: None,
            since_unix: 0,
            limit: 100,
        }
    }
}

/// Prior knowledge about a strategy on a workload. Placebos are not counted.
#[derive(Clone, Debug, PartialEq)]
pub struct Prior {
    /// Identity of the workload.
    pub fingerprint: Fingerprint,
    /// Strategy.
    pub strategy: StrategyId,
    /// Experiments that ended with that verdict.
    pub accepted: u32,
    /// Rejected.
    pub rejected: u32,
    /// Harmful.
    pub harmful: u32,
    /// Inconclusive.
    pub inconclusive: u32,
    /// Aborted; these say nothing about the effect and are not the `last_*` ones.
    pub aborted: u32,
    /// Effect of the last one that was decided.
    pub last_effect: Option<Effect>,
    /// Time constant of the effect in that trial.
    pub last_settling: Option<Nanoseconds>,
    /// Its verdict.
    pub last_verdict: Option<Verdict>,
    /// Its end, in seconds since the epoch; 0 when there is none.
    pub last_unix: u64,
}

/// How often a treatment that does nothing was judged, and accepted: our own false accepts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PlaceboSummary {
    /// Placebo experiments that came to a verdict (aborted ones do not count).
    pub run: u64,
    /// Accepted ones among them.
    pub accepted: u64,
}

/// The result of one step of pruning.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pruned {
    /// Rows deleted.
    pub rows: u64,
    /// Whether another step would find more to do.
    pub more: bool,
}

/// The history, open.
#[derive(Debug)]
pub struct History {
    connection: Connection,
    path: PathBuf,
    options: HistoryOptions,
}

impl History {
    /// Opens the file for reading and writing, creates it if needed (mode 0600), migrates it and checks its content.
    ///
    /// # Errors
    /// Any [`HistoryError`] about the file.
    pub fn open(path: &Path, options: HistoryOptions) -> Result<Self, HistoryError> {
        only_regular_files(path)?;
        create_private(path)?;
        let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
        let connection = Connection::open_with_flags(path, flags).map_err(|e| classify(path, e))?;
        let mut history = Self {
            connection,
            path: path.to_owned(),
            options,
        };
        history.prepare_for_writing()?;
        Ok(history)
    }

    /// Opens an existing file for reading only: while a daemon runs, or on read-only media.
    ///
    /// # Errors
    /// [`HistoryError::Unreachable`], or [`HistoryError::Older`] or [`HistoryError::Newer`] for another version.
    pub fn open_read_only(path: &Path) -> Result<Self, HistoryError> {
        only_regular_files(path)?;
        let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX;
        let read = |connection: Connection| {
            let history = Self {
                connection,
                path: path.to_owned(),
                options: HistoryOptions::default(),
            };
            history.configure()?;
            let found = history.version()?;
            let path = path.to_owned();
            match found.cmp(&LATEST) {
                std::cmp::Ordering::Equal => Ok(history),
                std::cmp::Ordering::Less => Err(HistoryError::Older { path, found }),
                std::cmp::Ordering::Greater => Err(HistoryError::Newer { path, found }),
            }
        };
        let first = Connection::open_with_flags(path, flags)
            .map_err(|e| classify(path, e))
            .and_then(read);
        let Err(HistoryError::ReadOnly { .. } | HistoryError::Unreachable { .. }) = &first else {
            return first;
        };
        // Without a shared-memory file and a pending log, the main file alone is complete.
        let log = with_suffix(path, "-wal");
        if !path.exists() || std::fs::metadata(&log).is_ok_and(|m| m.len() > 0) {
            return first;
        }
        let Some(uri) = immutable_uri(path) else {
            return first;
        };
        Connection::open_with_flags(uri, flags | OpenFlags::SQLITE_OPEN_URI)
            .map_err(|e| classify(path, e))
            .and_then(read)
    }

    /// A history that ends with the process.
    ///
    /// # Errors
    /// When there is not even memory for it.
    pub fn in_memory(options: HistoryOptions) -> Result<Self, HistoryError> {
        let path = PathBuf::from("history in memory");
        let connection = Connection::open_in_memory().map_err(|e| classify(&path, e))?;
        let mut history = Self {
            connection,
            path,
            options,
        };
        history.prepare_for_writing()?;
        Ok(history)
    }

    fn configure(&self) -> Result<(), HistoryError> {
        self.connection
            .busy_timeout(BUSY_WAIT)
            .map_err(|e| self.error(e))?;
        self.connection.set_prepared_statement_cache_capacity(24);
        self.set("cache_size", Value::Integer(-CACHE_KIB))?;
        self.set("mmap_size", Value::Integer(0))?;
        self.set("soft_heap_limit", Value::Integer(HEAP_BYTES))?;
        self.set("foreign_keys", Value::Integer(1))?;
        // Sorts hold a bounded number of rows and must not create files outside the state directory.
        self.set("temp_store", Value::Integer(2))
    }

    /// Sets a pragma. Some answer with a row, some do not.
    fn set(&self, name: &str, value: Value) -> Result<(), HistoryError> {
        self.connection
            .pragma_update_and_check(None, name, value, |_| Ok(()))
            .or_else(no_row)
            .map_err(|e| self.error(e))
    }

    fn prepare_for_writing(&mut self) -> Result<(), HistoryError> {
        self.configure()?;
        let found = self.version()?;
        if found > LATEST {
            return Err(HistoryError::Newer {
                path: self.path.clone(),
                found,
            });
        }
        if found > 0 {
            // Check before writing, so that a damaged file stays as found.
            let verdict: String = self
                .connection
                .query_row("PRAGMA quick_check(1)", [], |r| r.get(0))
                .map_err(|e| self.error(e))?;
            if verdict != "ok" {
                return Err(HistoryError::Damaged {
                    path: self.path.clone(),
                    why: verdict,
                });
            }
        } else {
            // These pragmas only work before the first table exists.
            self.set("page_size", Value::Integer(PAGE_BYTES as i64))?;
            self.set("auto_vacuum", Value::Text("incremental".to_owned()))?;
        }
        let pages = (self.options.bytes_max.0 / PAGE_BYTES).clamp(64, u64::from(u32::MAX) / 2);
        self.set("journal_mode", Value::Text("wal".to_owned()))?;
        self.set("synchronous", Value::Text("normal".to_owned()))?;
        self.set("wal_autocheckpoint", Value::Integer(256))?;
        self.set("journal_size_limit", Value::Integer(1024 * 1024))?;
        self.set("max_page_count", Value::Integer(pages as i64))?;
        self.migrate(LATEST)
    }

    /// Takes the migration steps up to `target`, each in a transaction.
    fn migrate(&mut self, target: u32) -> Result<(), HistoryError> {
        loop {
            let version = self.version()?;
            let step = MIGRATIONS.get(version as usize).filter(|_| version < target);
            let Some(step) = step else {
                return Ok(());
            };
            self.in_transaction(|t| {
                // Another process may have taken this step while we waited for the lock.
                let now: u32 = t.query_row("PRAGMA user_version", [], |r| r.get(0))?;
                if now == version {
                    t.execute_batch(step)?;
                    t.pragma_update(None, "user_version", version + 1)?;
                }
                Ok(())
            })?;
        }
    }

    fn version(&self) -> Result<u32, HistoryError> {
        self.connection
            .query_row("PRAGMA user_version", [], |r| r.get(0))
            .map_err(|e| self.error(e))
    }

    fn error(&self, e: rusqlite::Error) -> HistoryError {
        classify(&self.path, e)
    }

    fn in_transaction<T>(
        &mut self,
        work: impl FnOnce(&Transaction<'_>) -> Result<T, rusqlite::Error>,
    ) -> Result<T, HistoryError> {
        let path = &self.path;
        let run = |connection: &mut Connection| {
            let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
            let out = work(&transaction)?;
            transaction.commit()?;
            Ok(out)
        };
        run(&mut self.connection).map_err(|e| classify(path, e))
    }

    /// Stores a batch in one transaction.
    ///
    /// # Errors
    /// [`HistoryError::Invalid`] when an entry breaks a limit; otherwise about the file. Nothing was stored.
    pub fn record(&mut self, entries: &[Entry]) -> Result<(), HistoryError> {
        for entry in entries {
            check(entry)?;
        }
        if entries.is_empty() {
            return Ok(());
        }
        self.in_transaction(|t| {
            for entry in entries {
                match entry {
                    Entry::Decision(d) => insert_decision(t, d)?,
                    Entry::Window(w) => insert_window(t, w)?,
                    Entry::Experiment(e) => upsert_experiment(t, e)?,
                }
            }
            Ok(())
        })
    }

    /// Stores one decision.
    ///
    /// # Errors
    /// As [`record`](Self::record).
    pub fn record_decision(&mut self, decision: &DecisionRecord) -> Result<(), HistoryError> {
        self.record(&[Entry::Decision(decision.clone())])
    }

    /// Stores one window.
    ///
    /// # Errors
    /// As [`record`](Self::record).
    pub fn record_window(&mut self, window: &Window) -> Result<(), HistoryError> {
        self.record(&[Entry::Window(window.clone())])
    }

    /// Stores one experiment with its blocks; replaces what is stored under its number.
    ///
    /// # Errors
    /// As [`record`](Self::record).
    pub fn record_experiment(&mut self, experiment: &ExperimentRecord) -> Result<(), HistoryError> {
        self.record(&[Entry::Experiment(Box::new(experiment.clone()))])
    }

    fn prove_writable(&mut self, now_unix: u64) -> Result<(), HistoryError> {
        self.in_transaction(|t| {
            t.execute(
                "INSERT INTO meta (key, value) VALUES ('returned_to_disk_unix', ?1)
                 ON CONFLICT (key) DO UPDATE SET value = excluded.value",
                [time(now_unix)],
            )
            .map(|_| ())
        })
    }

    fn rows<T>(
        &self,
        sql: &str,
        params: impl Params,
        read: impl FnMut(&Row<'_>) -> rusqlite::Result<T>,
    ) -> Result<Vec<T>, HistoryError> {
        let query = || {
            self.connection
                .prepare_cached(sql)?
                .query_map(params, read)?
                .collect::<Result<_, _>>()
        };
        query().map_err(|e| self.error(e))
    }

    fn known<T>(
        &self,
        column: &'static str,
        text: String,
        read: impl FnOnce(&str) -> Option<T>,
    ) -> Result<T, HistoryError> {
        read(&text).ok_or_else(|| HistoryError::Malformed {
            path: self.path.clone(),
            column,
            text,
        })
    }

    /// The experiments that pass the filter, newest first.
    ///
    /// # Errors
    /// About the file; [`HistoryError::Malformed`] when it was edited by hand.
    pub fn experiments(&self, filter: &ExperimentFilter) -> Result<Vec<ExperimentRecord>, HistoryError> {
        let rows = self.rows(
            "SELECT experiments.*, machines.fingerprint AS machine_fingerprint,
                    workloads.fingerprint AS workload_fingerprint
             FROM experiments
             JOIN machines ON machines.id = experiments.machine
             JOIN workloads ON workloads.id = experiments.workload
             WHERE (?1 IS NULL OR workload_name = ?1
                    OR EXISTS (SELECT 1 FROM experiment_others o
                               WHERE o.experiment = experiments.id AND o.workload_name = ?1))
               AND (?2 IS NULL OR workloads.fingerprint = ?2
                    OR EXISTS (SELECT 1 FROM experiment_others o JOIN workloads w ON w.id = o.workload
                               WHERE o.experiment = experiments.id AND w.fingerprint = ?2))
               AND (?3 IS NULL OR strategy = ?3)
               AND (?4 IS NULL OR experiments.id = ?4)
               AND started_unix >= ?5
             ORDER BY experiments.id DESC LIMIT ?6",
            params![
                filter.workload.as_deref(),
                filter.fingerprint.as_deref(),
                filter.strategy.as_deref(),
                filter.id.map(|id| bits(id.0)),
                time(filter.since_unix),
                filter.limit.min(ROWS_MAX),
            ],
            |row| Ok((read_experiment(row)?, Words::read(row)?)),
        )?;
        rows.into_iter()
            .map(|(mut e, words)| {
                e.kind = self.known("experiments.kind", words.kind, ExperimentKind::of)?;
                if let Some(text) = words.verdict {
                    e.verdict = Some(self.known("experiments.verdict", text, Verdict::of)?);
                }
                if let Some(text) = words.spans {
                    e.spans = self.known("experiments.spans", text, |t| serde_json::from_str(t).ok())?;
                }
                if let Some(text) = words.meanings {
                    e.meanings =
                        self.known("experiments.meanings", text, |t| serde_json::from_str(t).ok())?;
                }
                if let Some(text) = words.fresh {
                    e.fresh = self.known("experiments.fresh", text, |t| serde_json::from_str(t).ok())?;
                }
                if let Some(text) = words.off_level {
                    e.off_level =
                        self.known("experiments.off_level", text, |t| serde_json::from_str(t).ok())?;
                }
                if let Some(text) = words.not_excluded {
                    e.not_excluded =
                        self.known("experiments.not_excluded", text, |t| serde_json::from_str(t).ok())?;
                }
                e.others = self.others(e.id)?;
                if !e.others.is_empty() {
                    e.members = self.members(e.id)?;
                }
                if filter.blocks {
                    e.blocks = self.blocks(e.id)?;
                }
                Ok(e)
            })
            .collect()
    }

    fn others(&self, id: ExperimentId) -> Result<Vec<(WorkloadId, Fingerprint)>, HistoryError> {
        self.rows(
            "SELECT o.workload_name, workloads.fingerprint FROM experiment_others o
             JOIN workloads ON workloads.id = o.workload WHERE o.experiment = ?1 ORDER BY o.position",
            [bits(id.0)],
            |r| {
                Ok((
                    WorkloadId::new(r.get::<_, String>(0)?),
                    Fingerprint::new(r.get::<_, String>(1)?),
                ))
            },
        )
    }

    fn members(&self, id: ExperimentId) -> Result<Vec<MemberOutcome>, HistoryError> {
        let rows: Vec<(String, String, Option<Effect>)> = self.rows(
            "SELECT workload_name, verdict, has_effect, effect_estimate, effect_lower, effect_upper, effect_confidence
             FROM experiment_members WHERE experiment = ?1 ORDER BY position",
            [bits(id.0)],
            |r| Ok((r.get(0)?, r.get(1)?, effect_if(r, 2, 3)?)),
        )?;
        rows.into_iter()
            .map(|(workload, verdict, effect)| {
                Ok(MemberOutcome {
                    workload: WorkloadId::new(workload),
                    verdict: self.known("experiment_members.verdict", verdict, Verdict::of)?,
                    effect,
                })
            })
            .collect()
    }

    fn blocks(&self, id: ExperimentId) -> Result<Vec<BlockRecord>, HistoryError> {
        self.rows(
            "SELECT position, change_on, measured_from_ns, measured_ns, work, cpu_ns, score, broken
             FROM blocks WHERE experiment = ?1 ORDER BY position",
            [bits(id.0)],
            |r| {
                Ok(BlockRecord {
                    index: r.get(0)?,
                    on: r.get(1)?,
                    measured_from: Nanoseconds(unbits(r.get(2)?)),
                    measured: Nanoseconds(unbits(r.get(3)?)),
                    work: real(r.get(4)?),
                    cpu: Nanoseconds(unbits(r.get(5)?)),
                    score: real(r.get(6)?),
                    broken: r.get(7)?,
                })
            },
        )
    }

    /// The decisions that pass the filter, newest first.
    ///
    /// # Errors
    /// About the file.
    pub fn decisions(&self, filter: &Filter) -> Result<Vec<DecisionRecord>, HistoryError> {
        self.rows(
            "SELECT at_unix, workload_name, stage, sentence FROM decisions
             WHERE (?1 IS NULL OR workload_name = ?1) AND at_unix >= ?2 ORDER BY id DESC LIMIT ?3",
            filter.parameters(),
            |r| {
                Ok(DecisionRecord {
                    at_unix: untime(r.get(0)?),
                    workload: r.get::<_, Option<String>>(1)?.map(WorkloadId::new),
                    stage: r.get(2)?,
                    text: r.get(3)?,
                })
            },
        )
    }

    /// The windows that pass the filter, newest first.
    ///
    /// # Errors
    /// About the file.
    pub fn windows(&self, filter: &Filter) -> Result<Vec<Window>, HistoryError> {
        self.rows(
            "SELECT windows.*, machines.fingerprint AS machine_fingerprint,
                    workloads.fingerprint AS workload_fingerprint
             FROM windows
             JOIN machines ON machines.id = windows.machine
             JOIN workloads ON workloads.id = windows.workload
             WHERE (?1 IS NULL OR workload_name = ?1) AND started_unix >= ?2
             ORDER BY windows.id DESC LIMIT ?3",
            filter.parameters(),
            read_window,
        )
    }

    /// Prior knowledge of each workload and strategy on machines with this fingerprint, in order.
    ///
    /// # Errors
    /// About the file.
    pub fn priors(&self, machine: &str) -> Result<Vec<Prior>, HistoryError> {
        self.rows(
            "SELECT p.fingerprint, p.strategy, p.accepted, p.rejected, p.harmful, p.inconclusive, p.aborted,
                    e.verdict, COALESCE(m.has_effect, e.has_effect),
                    COALESCE(m.effect_estimate, e.effect_estimate), COALESCE(m.effect_lower, e.effect_lower),
                    COALESCE(m.effect_upper, e.effect_upper),
                    COALESCE(m.effect_confidence, e.effect_confidence), e.ended_unix,
                    CASE WHEN e.verdict = 'accepted' THEN e.fresh END, e.settling_ns
             FROM priors p LEFT JOIN experiments e ON e.id = p.last_experiment
             -- What is accepted is accepted as a whole; what is not is held against each by its own effect.
             LEFT JOIN experiment_members m ON e.verdict <> 'accepted' AND m.has_effect
                AND m.experiment = e.id
                AND m.position = (SELECT MIN(x.position) FROM experiment_members x
                                  WHERE x.experiment = e.id AND x.workload = p.workload)
             WHERE p.machine = ?1 ORDER BY p.fingerprint, p.strategy LIMIT ?2",
            params![machine, ROWS_MAX],
            |r| {
                Ok(Prior {
                    fingerprint: Fingerprint::new(r.get::<_, String>(0)?),
                    strategy: StrategyId::new(r.get::<_, String>(1)?),
                    accepted: r.get(2)?,
                    rejected: r.get(3)?,
                    harmful: r.get(4)?,
                    inconclusive: r.get(5)?,
                    aborted: r.get(6)?,
                    last_verdict: r.get::<_, Option<String>>(7)?.as_deref().and_then(Verdict::of),
                    last_effect: fresh_at(r, 14)?.or(effect_if(r, 8, 9)?),
                    last_settling: r.get::<_, Option<i64>>(15)?.map(|ns| Nanoseconds(unbits(ns))),
                    last_unix: r.get::<_, Option<i64>>(13)?.map_or(0, untime),
                })
            },
        )
    }

    /// Streaming readers whose last trial on behalf of another program proved that limiting them helps.
    ///
    /// # Errors
    /// About the file.
    pub fn proven_readers(&self, machine: &str) -> Result<Vec<ProvenReader>, HistoryError> {
        self.rows(
            "SELECT workloads.fingerprint, e.reader, e.strategy, e.effect_estimate, e.effect_lower,
                    e.effect_upper, e.effect_confidence, e.washout_ns, last.accepted
             FROM (SELECT MAX(id) AS id, SUM(verdict = 'accepted') AS accepted FROM experiments
                   WHERE reader IS NOT NULL AND kind <> 'placebo' AND verdict <> 'aborted'
                   GROUP BY machine, workload, reader, strategy) last
             JOIN experiments e ON e.id = last.id
             JOIN machines ON machines.id = e.machine
             JOIN workloads ON workloads.id = e.workload
             WHERE machines.fingerprint = ?1 AND e.verdict = 'accepted' AND e.has_effect
             ORDER BY e.id DESC LIMIT ?2",
            params![machine, ROWS_MAX],
            |r| {
                Ok(ProvenReader {
                    program: Fingerprint::new(r.get::<_, String>(0)?),
                    reader: Fingerprint::new(r.get::<_, String>(1)?),
                    strategy: StrategyId::new(r.get::<_, String>(2)?),
                    effect: effect_at(r, 3)?,
                    washout: Nanoseconds(unbits(r.get(7)?)),
                    trials: r.get(8)?,
                })
            },
        )
    }

    /// How often a placebo was judged and how often it was accepted, including those already pruned.
    ///
    /// # Errors
    /// About the file.
    pub fn placebo_summary(&self) -> Result<PlaceboSummary, HistoryError> {
        self.connection
            .query_row(
                "SELECT (SELECT COUNT(*) FROM experiments WHERE kind = 'placebo' AND verdict <> 'aborted')
                            + COALESCE((SELECT value FROM meta WHERE key = 'placebo_run_pruned'), 0),
                        (SELECT COUNT(*) FROM experiments WHERE kind = 'placebo' AND verdict = 'accepted')
                            + COALESCE((SELECT value FROM meta WHERE key = 'placebo_accepted_pruned'), 0)",
                [],
                |r| {
                    Ok(PlaceboSummary {
                        run: untime(r.get(0)?),
                        accepted: untime(r.get(1)?),
                    })
                },
            )
            .map_err(|e| self.error(e))
    }

    /// First unused experiment number, counting pruned experiments and those of the journal.
    ///
    /// # Errors
    /// About the file.
    pub fn next_experiment_id(&self) -> Result<ExperimentId, HistoryError> {
        let highest: i64 = self
            .connection
            .query_row(
                "SELECT MAX(COALESCE((SELECT MAX(id) FROM experiments), 0),
                            COALESCE((SELECT value FROM meta WHERE key = 'highest_experiment'), 0))",
                [],
                |r| r.get(0),
            )
            .map_err(|e| self.error(e))?;
        Ok(ExperimentId(untime(highest).saturating_add(1)).max(self.options.first_experiment))
    }

    /// Bytes of the database that hold something.
    ///
    /// # Errors
    /// About the file.
    pub fn bytes_used(&self) -> Result<Bytes, HistoryError> {
        let pragma = |name: &str| -> Result<u64, HistoryError> {
            self.connection
                .query_row(&format!("PRAGMA {name}"), [], |r| r.get(0))
                .map(untime)
                .map_err(|e| self.error(e))
        };
        let pages = pragma("page_count")?.saturating_sub(pragma("freelist_count")?);
        Ok(Bytes(pages.saturating_mul(pragma("page_size")?)))
    }

    /// Deletes rows older than `keep_days`, then the oldest while over three quarters of `bytes_max` are used, in small
    /// steps. The last verdict per workload and strategy goes last, so that no known harm is repeated.
    ///
    /// # Errors
    /// About the file.
    pub fn prune(&mut self, now_unix: u64) -> Result<Pruned, HistoryError> {
        let horizon = time(now_unix.saturating_sub(u64::from(self.options.keep_days) * DAY_SECONDS));
        let limit = Bytes(self.options.bytes_max.0 / 4 * 3);
        let oversized = self.bytes_used()? > limit;
        let rows = self.in_transaction(|t| {
            let mut rows = delete_older(t, horizon)?;
            if rows == 0 && oversized {
                rows = delete_oldest(t)?;
            }
            Ok(rows)
        })?;
        if rows > 0 {
            self.connection
                .execute_batch("PRAGMA incremental_vacuum(256)")
                .map_err(|e| self.error(e))?;
        }
        Ok(Pruned { rows, more: rows > 0 })
    }
}

fn delete_older(t: &Transaction<'_>, horizon: i64) -> rusqlite::Result<u64> {
    let mut rows = 0;
    rows += t.execute(
        "DELETE FROM windows WHERE id IN (SELECT id FROM windows WHERE started_unix < ?1 ORDER BY id LIMIT ?2)",
        params![horizon, PRUNE_STEP],
    )?;
    rows += t.execute(
        "DELETE FROM decisions WHERE id IN (SELECT id FROM decisions WHERE at_unix < ?1 ORDER BY id LIMIT ?2)",
        params![horizon, PRUNE_STEP],
    )?;
    let blocks = delete_blocks(t, horizon)?;
    rows += blocks;
    if blocks < PRUNE_STEP as usize {
        // Deleting an experiment deletes its blocks, so first there must be few.
        rows += delete_experiments(t, horizon, true)?;
    }
    Ok(rows as u64)
}

/// Deletes one step of the oldest rows, the least valuable kind first.
fn delete_oldest(t: &Transaction<'_>) -> rusqlite::Result<u64> {
    for table in ["windows", "decisions"] {
        let sql = format!("DELETE FROM {table} WHERE id IN (SELECT id FROM {table} ORDER BY id LIMIT ?1)");
        let rows = t.execute(&sql, [PRUNE_STEP])?;
        if rows > 0 {
            return Ok(rows as u64);
        }
    }
    for rows in [
        |t: &Transaction<'_>| delete_blocks(t, i64::MAX),
        |t: &Transaction<'_>| {
            let superseded = delete_experiments(t, i64::MAX, true)?;
            if superseded > 0 {
                Ok(superseded)
            } else {
                delete_experiments(t, i64::MAX, false)
            }
        },
    ] {
        let rows = rows(t)?;
        if rows > 0 {
            return Ok(rows as u64);
        }
    }
    Ok(0)
}

fn delete_blocks(t: &Transaction<'_>, horizon: i64) -> rusqlite::Result<usize> {
    t.execute(
        "DELETE FROM blocks WHERE (experiment, position) IN (
            SELECT experiment, position FROM blocks JOIN experiments ON experiments.id = blocks.experiment
            WHERE started_unix < ?1 AND verdict IS NOT NULL ORDER BY experiment, position LIMIT ?2)",
        params![horizon, PRUNE_STEP],
    )
}

/// Experiments that began before `horizon`. `keep_last` spares the last decided experiment of its kind.
fn delete_experiments(t: &Transaction<'_>, horizon: i64, keep_last: bool) -> rusqlite::Result<usize> {
    t.execute_batch(
        "CREATE TEMP TABLE IF NOT EXISTS going (id INTEGER PRIMARY KEY); DELETE FROM temp.going;",
    )?;
    t.execute(
        "INSERT INTO temp.going
         SELECT e.id FROM experiments e
         WHERE e.started_unix < ?1
           -- One that still runs has no verdict yet; one that was cut off by a crash never gets one.
           AND (e.verdict IS NOT NULL OR ?1 < 9223372036854775807)
           -- Of several that were tried as one, each has its own last one.
           AND (NOT ?2 OR e.kind = 'placebo' OR e.verdict IS NULL OR e.verdict = 'aborted' OR NOT EXISTS (
                SELECT 1 FROM (SELECT e.workload AS workload
                               UNION SELECT o.workload FROM experiment_others o WHERE o.experiment = e.id) member
                WHERE NOT EXISTS (
                    SELECT 1 FROM experiments later
                    WHERE later.strategy = e.strategy AND later.machine = e.machine
                      AND later.kind <> 'placebo' AND later.verdict <> 'aborted' AND later.id > e.id
                      AND (later.workload = member.workload
                           OR EXISTS (SELECT 1 FROM experiment_others o
                                      WHERE o.experiment = later.id AND o.workload = member.workload)))))
         ORDER BY e.id LIMIT ?3",
        params![horizon, keep_last, PRUNE_STEP],
    )?;
    for (key, condition) in [
        ("placebo_run_pruned", "kind = 'placebo' AND verdict <> 'aborted'"),
        (
            "placebo_accepted_pruned",
            "kind = 'placebo' AND verdict = 'accepted'",
        ),
    ] {
        let sql = format!(
            "INSERT INTO meta (key, value)
             SELECT ?1, COUNT(*) FROM experiments WHERE id IN (SELECT id FROM temp.going) AND {condition}
             ON CONFLICT (key) DO UPDATE SET value = value + excluded.value"
        );
        t.execute(&sql, [key])?;
    }
    t.execute(
        "DELETE FROM experiments WHERE id IN (SELECT id FROM temp.going)",
        [],
    )
}

fn check(entry: &Entry) -> Result<(), HistoryError> {
    match entry {
        Entry::Experiment(e) if e.blocks.len() > BLOCKS_MAX => Err(HistoryError::Invalid {
            what: format!(
                "experiment {} has {} blocks, more than {BLOCKS_MAX}",
                e.id,
                e.blocks.len()
            ),
        }),
        Entry::Experiment(e) if e.id.0 == 0 || e.id.0 > i64::MAX as u64 => Err(HistoryError::Invalid {
            what: format!("experiment number {} is out of range", e.id),
        }),
        Entry::Experiment(_) | Entry::Decision(_) | Entry::Window(_) => Ok(()),
    }
}

fn machine_row(t: &Transaction<'_>, fingerprint: &str) -> rusqlite::Result<i64> {
    named_row(
        t,
        "SELECT id FROM machines WHERE fingerprint = ?1",
        "INSERT INTO machines (fingerprint) VALUES (?1)",
        fingerprint,
    )
}

fn workload_row(t: &Transaction<'_>, fingerprint: &Fingerprint) -> rusqlite::Result<i64> {
    named_row(
        t,
        "SELECT id FROM workloads WHERE fingerprint = ?1",
        "INSERT INTO workloads (fingerprint) VALUES (?1)",
        fingerprint.as_str(),
    )
}

fn named_row(t: &Transaction<'_>, select: &str, insert: &str, name: &str) -> rusqlite::Result<i64> {
    if let Some(id) = t
        .prepare_cached(select)?
        .query_row([name], |r| r.get(0))
        .optional()?
    {
        return Ok(id);
    }
    t.prepare_cached(insert)?.execute([name])?;
    Ok(t.last_insert_rowid())
}

fn insert_decision(t: &Transaction<'_>, d: &DecisionRecord) -> rusqlite::Result<()> {
    let mut sentence = d.text.clone();
    crate::cut(&mut sentence, SENTENCE_BYTES_MAX);
    // The column of numbers comes from earlier versions.
    t.prepare_cached(
        "INSERT INTO decisions (at_unix, workload_name, stage, sentence, numbers) VALUES (?1, ?2, ?3, ?4, 'null')",
    )?
    .execute(params![time(d.at_unix), d.workload.as_deref(), d.stage, sentence])?;
    Ok(())
}

fn insert_window(t: &Transaction<'_>, w: &Window) -> rusqlite::Result<()> {
    let seen = &w.seen;
    t.prepare_cached(
        "INSERT INTO windows (machine, workload, workload_name, started_unix, length_ns, samples, meter, work,
            variation, cpu_ns, runqueue_wait_ns, faults_minor, faults_major, resident_bytes, anonymous_bytes,
            shared_bytes, huge_bytes)
         VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14, ?15, ?16, ?17)",
    )?
    .execute(params![
        machine_row(t, &w.machine)?,
        workload_row(t, &seen.fingerprint)?,
        seen.workload.as_str(),
        time(w.started_unix),
        bits(seen.length.0),
        seen.samples,
        seen.meter.as_deref(),
        seen.work,
        seen.variation,
        bits(seen.cpu.0),
        bits(seen.runqueue_wait.0),
        bits(seen.faults_minor),
        bits(seen.faults_major),
        bits(seen.resident.0),
        bits(seen.anonymous.0),
        bits(seen.shared.0),
        seen.huge.map(|b| bits(b.0)),
    ])?;
    Ok(())
}

const NO_EFFECT: Effect = Effect {
    estimate: f64::NAN,
    lower: f64::NAN,
    upper: f64::NAN,
    confidence: f64::NAN,
};

fn read_window(r: &Row<'_>) -> rusqlite::Result<Window> {
    let number = |name: &str| -> rusqlite::Result<u64> { Ok(unbits(r.get(name)?)) };
    let seen = WindowRecord {
        workload: WorkloadId::new(r.get::<_, String>("workload_name")?),
        fingerprint: Fingerprint::new(r.get::<_, String>("workload_fingerprint")?),
        length: Nanoseconds(number("length_ns")?),
        samples: r.get("samples")?,
        meter: r.get::<_, Option<String>>("meter")?.map(MeterId::new),
        work: real(r.get("work")?),
        variation: real(r.get("variation")?),
        cpu: Nanoseconds(number("cpu_ns")?),
        runqueue_wait: Nanoseconds(number("runqueue_wait_ns")?),
        faults_minor: number("faults_minor")?,
        faults_major: number("faults_major")?,
        resident: Bytes(number("resident_bytes")?),
        anonymous: Bytes(number("anonymous_bytes")?),
        shared: Bytes(number("shared_bytes")?),
        huge: r.get::<_, Option<i64>>("huge_bytes")?.map(|b| Bytes(unbits(b))),
    };
    Ok(Window {
        machine: r.get("machine_fingerprint")?,
        started_unix: untime(r.get("started_unix")?),
        seen,
    })
}

fn upsert_experiment(t: &Transaction<'_>, e: &ExperimentRecord) -> rusqlite::Result<()> {
    let effect = e.effect.unwrap_or(NO_EFFECT);
    t.prepare_cached(
        "INSERT INTO experiments (id, machine, workload, workload_name, kind, strategy, action, hypothesis,
            predicted_estimate, predicted_lower, predicted_upper, predicted_confidence, meter, objective, seed,
            alpha, washout_ns, measured_ns, started_unix, ended_unix, verdict, reason, has_effect,
            effect_estimate, effect_lower, effect_upper, effect_confidence, evidence, stalled_ns, bloat_bytes,
            harm_exposure, reader, spans, meanings, fresh, settling_ns, off_level, not_excluded)
         VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14, ?15, ?16, ?17, ?18, ?19, ?20, ?21,
            ?22, ?23, ?24, ?25, ?26, ?27, ?28, ?29, ?30, ?31, ?32, ?33, ?34, ?35, ?36, ?37, ?38)
         ON CONFLICT (id) DO UPDATE SET machine = excluded.machine, workload = excluded.workload,
            workload_name = excluded.workload_name, kind = excluded.kind, strategy = excluded.strategy,
            action = excluded.action, hypothesis = excluded.hypothesis,
            predicted_estimate = excluded.predicted_estimate, predicted_lower = excluded.predicted_lower,
            predicted_upper = excluded.predicted_upper, predicted_confidence = excluded.predicted_confidence,
            meter = excluded.meter, objective = excluded.objective, seed = excluded.seed, alpha = excluded.alpha,
            washout_ns = excluded.washout_ns, measured_ns = excluded.measured_ns,
            started_unix = excluded.started_unix, ended_unix = excluded.ended_unix, verdict = excluded.verdict,
            reason = excluded.reason, has_effect = excluded.has_effect,
            effect_estimate = excluded.effect_estimate, effect_lower = excluded.effect_lower,
            effect_upper = excluded.effect_upper, effect_confidence = excluded.effect_confidence,
            evidence = excluded.evidence, stalled_ns = excluded.stalled_ns, bloat_bytes = excluded.bloat_bytes,
            harm_exposure = excluded.harm_exposure, reader = excluded.reader, spans = excluded.spans,
            meanings = excluded.meanings, fresh = excluded.fresh,
            settling_ns = excluded.settling_ns, off_level = excluded.off_level,
            not_excluded = excluded.not_excluded",
    )?
    .execute(params![
        bits(e.id.0),
        machine_row(t, &e.machine)?,
        workload_row(t, &e.fingerprint)?,
        e.workload.as_str(),
        e.kind.as_str(),
        e.strategy.as_str(),
        bits(e.action.0),
        e.hypothesis,
        e.predicted.estimate,
        e.predicted.lower,
        e.predicted.upper,
        e.predicted.confidence,
        e.meter.as_str(),
        e.objective,
        bits(e.seed),
        e.alpha,
        bits(e.washout.0),
        bits(e.measured.0),
        time(e.started_unix),
        time(e.ended_unix),
        e.verdict.map(Verdict::as_str),
        e.reason,
        e.effect.is_some(),
        effect.estimate,
        effect.lower,
        effect.upper,
        effect.confidence,
        e.evidence,
        bits(e.stalled.0),
        bits(e.bloat.0),
        e.harm_exposure,
        e.reader.as_ref().map(Fingerprint::as_str),
        (!e.spans.is_empty()).then(|| serde_json::to_string(&e.spans)).and_then(Result::ok),
        (!e.meanings.is_empty()).then(|| serde_json::to_string(&e.meanings)).and_then(Result::ok),
        e.fresh.as_ref().and_then(|fresh| serde_json::to_string(fresh).ok()),
        e.settling.map(|settling| bits(settling.0)),
        e.off_level.as_ref().and_then(|level| serde_json::to_string(level).ok()),
        (!e.not_excluded.is_empty()).then(|| serde_json::to_string(&e.not_excluded)).and_then(Result::ok),
    ])?;
    t.prepare_cached(
        "INSERT INTO meta (key, value) VALUES ('highest_experiment', ?1)
         ON CONFLICT (key) DO UPDATE SET value = MAX(value, excluded.value)",
    )?
    .execute([bits(e.id.0)])?;
    // The members of a trial are fixed when it begins.
    let mut insert = t.prepare_cached(
        "INSERT INTO experiment_others (experiment, position, workload, workload_name) VALUES (?1, ?2, ?3, ?4)
         ON CONFLICT (experiment, position) DO NOTHING",
    )?;
    for (position, (workload, fingerprint)) in e.others.iter().enumerate() {
        insert.execute(params![
            bits(e.id.0),
            position as i64,
            workload_row(t, fingerprint)?,
            workload.as_str()
        ])?;
    }
    // Written at the end, and again when a guard revokes the verdict.
    let mut insert = t.prepare_cached(
        "INSERT INTO experiment_members (experiment, position, workload, workload_name, verdict, has_effect,
            effect_estimate, effect_lower, effect_upper, effect_confidence)
         VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10)
         ON CONFLICT (experiment, position) DO UPDATE SET verdict = excluded.verdict,
            has_effect = excluded.has_effect, effect_estimate = excluded.effect_estimate,
            effect_lower = excluded.effect_lower, effect_upper = excluded.effect_upper,
            effect_confidence = excluded.effect_confidence",
    )?;
    let fingerprints = std::iter::once(&e.fingerprint).chain(e.others.iter().map(|(_, f)| f));
    for (position, (member, fingerprint)) in e.members.iter().zip(fingerprints).enumerate() {
        let effect = member.effect.unwrap_or(NO_EFFECT);
        insert.execute(params![
            bits(e.id.0),
            position as i64,
            workload_row(t, fingerprint)?,
            member.workload.as_str(),
            member.verdict.as_str(),
            member.effect.is_some(),
            effect.estimate,
            effect.lower,
            effect.upper,
            effect.confidence,
        ])?;
    }
    // A running experiment is recorded at every block: skip the stored blocks.
    let mut insert = t.prepare_cached(
        "INSERT INTO blocks (experiment, position, change_on, measured_from_ns, measured_ns, work, cpu_ns, score, broken)
         VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9)
         ON CONFLICT (experiment, position) DO UPDATE SET change_on = excluded.change_on,
            measured_from_ns = excluded.measured_from_ns, measured_ns = excluded.measured_ns, work = excluded.work,
            cpu_ns = excluded.cpu_ns, score = excluded.score, broken = excluded.broken
         WHERE (change_on, measured_from_ns, measured_ns, work, cpu_ns, score, broken)
            IS NOT (excluded.change_on, excluded.measured_from_ns, excluded.measured_ns, excluded.work,
                excluded.cpu_ns, excluded.score, excluded.broken)",
    )?;
    for b in &e.blocks {
        insert.execute(params![
            bits(e.id.0),
            b.index,
            b.on,
            bits(b.measured_from.0),
            bits(b.measured.0),
            b.work,
            bits(b.cpu.0),
            b.score,
            b.broken
        ])?;
    }
    let positions =
        serde_json::Value::from(e.blocks.iter().map(|b| b.index).collect::<Vec<u32>>()).to_string();
    t.prepare_cached(
        "DELETE FROM blocks WHERE experiment = ?1 AND position NOT IN (SELECT value FROM json_each(?2))",
    )?
    .execute(params![bits(e.id.0), positions])?;
    Ok(())
}

/// Reads an effect from four columns, starting at `first`.
fn effect_at(r: &Row<'_>, first: usize) -> rusqlite::Result<Effect> {
    Ok(Effect {
        estimate: real(r.get(first)?),
        lower: real(r.get(first + 1)?),
        upper: real(r.get(first + 2)?),
        confidence: real(r.get(first + 3)?),
    })
}

/// As `effect_at`, where column `has` is set.
fn effect_if(r: &Row<'_>, has: usize, first: usize) -> rusqlite::Result<Option<Effect>> {
    let effect = effect_at(r, first)?;
    Ok(r.get::<_, Option<bool>>(has)?.unwrap_or(false).then_some(effect))
}

/// What was measured after an acceptance, if that can be read.
fn fresh_at(r: &Row<'_>, column: usize) -> rusqlite::Result<Option<Effect>> {
    let text: Option<String> = r.get(column)?;
    let fresh = text.and_then(|text| serde_json::from_str::<FreshGain>(&text).ok());
    Ok(fresh.map(|fresh| fresh.effect))
}

/// Fields of an experiment that need parsing.
struct Words {
    kind: String,
    verdict: Option<String>,
    spans: Option<String>,
    meanings: Option<String>,
    fresh: Option<String>,
    off_level: Option<String>,
    not_excluded: Option<String>,
}

impl Words {
    fn read(r: &Row<'_>) -> rusqlite::Result<Self> {
        Ok(Self {
            kind: r.get("kind")?,
            verdict: r.get("verdict")?,
            spans: r.get("spans")?,
            meanings: r.get("meanings")?,
            fresh: r.get("fresh")?,
            off_level: r.get("off_level")?,
            not_excluded: r.get("not_excluded")?,
        })
    }
}

fn read_experiment(r: &Row<'_>) -> rusqlite::Result<ExperimentRecord> {
    let text = |name: &str| r.get::<_, String>(name);
    let number = |name: &str| -> rusqlite::Result<u64> { Ok(unbits(r.get(name)?)) };
    let float = |name: &str| -> rusqlite::Result<f64> { Ok(real(r.get(name)?)) };
    let column = |name: &str| r.as_ref().column_index(name);
    Ok(ExperimentRecord {
        id: ExperimentId(number("id")?),
        kind: ExperimentKind::Placebo,
        strategy: StrategyId::new(text("strategy")?),
        workload: WorkloadId::new(text("workload_name")?),
        fingerprint: Fingerprint::new(text("workload_fingerprint")?),
        others: Vec::new(),
        members: Vec::new(),
        spans: Vec::new(),
        meanings: Vec::new(),
        fresh: None,
        off_level: None,
        not_excluded: Vec::new(),
        settling: r
            .get::<_, Option<i64>>("settling_ns")?
            .map(|ns| Nanoseconds(unbits(ns))),
        reader: r.get::<_, Option<String>>("reader")?.map(Fingerprint::new),
        machine: text("machine_fingerprint")?,
        action: ActionId(number("action")?),
        hypothesis: text("hypothesis")?,
        predicted: effect_at(r, column("predicted_estimate")?)?,
        meter: MeterId::new(text("meter")?),
        objective: text("objective")?,
        seed: number("seed")?,
        alpha: float("alpha")?,
        washout: Nanoseconds(number("washout_ns")?),
        measured: Nanoseconds(number("measured_ns")?),
        started_unix: untime(r.get("started_unix")?),
        ended_unix: untime(r.get("ended_unix")?),
        verdict: None,
        reason: text("reason")?,
        effect: effect_if(r, column("has_effect")?, column("effect_estimate")?)?,
        evidence: float("evidence")?,
        stalled: Nanoseconds(number("stalled_ns")?),
        bloat: Bytes(number("bloat_bytes")?),
        harm_exposure: float("harm_exposure")?,
        blocks: Vec::new(),
    })
}

fn bits(x: u64) -> i64 {
    x as i64
}
fn unbits(x: i64) -> u64 {
    x as u64
}
/// Queries compare times and counts, so they keep their order. None is near the limit.
fn time(x: u64) -> i64 {
    i64::try_from(x).unwrap_or(i64::MAX)
}
fn untime(x: i64) -> u64 {
    u64::try_from(x).unwrap_or(0)
}
fn real(x: Option<f64>) -> f64 {
    x.unwrap_or(f64::NAN)
}

fn no_row(e: rusqlite::Error) -> rusqlite::Result<()> {
    match e {
        rusqlite::Error::QueryReturnedNoRows => Ok(()),
        e => Err(e),
    }
}

fn classify(path: &Path, e: rusqlite::Error) -> HistoryError {
    let path = path.to_owned();
    let why = e.to_string();
    if matches!(e, rusqlite::Error::Utf8Error(..)) {
        // A damaged shared text (a machine's) makes later rows unreadable. Only this program writes here.
        return HistoryError::Damaged { path, why };
    }
    match e.sqlite_error_code() {
        Some(ErrorCode::DatabaseCorrupt | ErrorCode::NotADatabase) => HistoryError::Damaged { path, why },
        Some(ErrorCode::DiskFull) => HistoryError::Full { path, why },
        Some(ErrorCode::ReadOnly | ErrorCode::PermissionDenied) => HistoryError::ReadOnly { path, why },
        Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked) => HistoryError::Busy { path },
        Some(ErrorCode::CannotOpen) => HistoryError::Unreachable { path, why },
        _ => HistoryError::Sqlite { path, source: e },
    }
}

/// Refuses FIFOs and devices: SQLite waits for ever for the other end of a FIFO, and a device may answer anything.
fn only_regular_files(path: &Path) -> Result<(), HistoryError> {
    for suffix in ["", "-wal", "-shm", "-journal"] {
        let path = with_suffix(path, suffix);
        if std::fs::metadata(&path).is_ok_and(|about| !about.is_file()) {
            return Err(HistoryError::Unreachable {
                path,
                why: "it is not a regular file; look at it and move it away".to_owned(),
            });
        }
    }
    Ok(())
}

/// Creates the file with mode 0600 first: SQLite would create it readable for all. Companions inherit the mode.
fn create_private(path: &Path) -> Result<(), HistoryError> {
    use rustix::fs::{Mode, OFlags};
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    match rustix::fs::open(path, flags, Mode::RUSR | Mode::WUSR) {
        Ok(_) => Ok(()),
        Err(e) => {
            let (path, why) = (path.to_owned(), std::io::Error::from(e).to_string());
            Err(match e {
                rustix::io::Errno::ROFS | rustix::io::Errno::ACCESS | rustix::io::Errno::PERM => {
                    HistoryError::ReadOnly { path, why }
                }
                rustix::io::Errno::NOSPC | rustix::io::Errno::DQUOT => HistoryError::Full { path, why },
                _ => HistoryError::Unreachable { path, why },
            })
        }
    }
}

fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}

/// A URI that tells SQLite that nobody changes the file. `None` unless the path is UTF-8.
fn immutable_uri(path: &Path) -> Option<String> {
    let mut uri = "file:".to_owned();
    for c in path.to_str()?.chars() {
        match c {
            '%' | '?' | '#' => uri.push_str(&format!("%{:02x}", u32::from(c))),
            c => uri.push(c),
        }
    }
    Some(uri + "?immutable=1")
}

#[cfg(test)]
mod tests;
