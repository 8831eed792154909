//! Faults of sensors, effectors, clock, journal and process, as a wrapper around any platform.
//!
//! A [`FaultPlan`] is a *swarm* (Groce et al. 2012): each seed enables a random subset of the kinds at random rates.
//! Runs where everything fails a little find less than runs where few things fail often. A crash among refusals is
//! common where nothing else is refused.
//!
//! A crash needs no second process. At a chosen call of a sensor, an effector or a journal step the state directory is
//! copied. From then on nothing reaches the machine or matters on disk. The loop is dropped, and a new one starts from
//! the copy. Its unsynced tail may be torn as by a power cut.

mod disk;
mod faulty;
mod kinds;

pub(crate) use disk::{damage_bytes, private_directory};
pub use faulty::{Faulty, FaultyClock, PictureOf};
pub(crate) use kinds::pick;
pub use kinds::{FaultPlan, Kind};

use crate::checkers::{Call, Hand, Ledger, Picture, Value};
use disk::{copy_directory, damage, tear};
use homeostat_model::{Nanoseconds, Snapshot};
use homeostat_statistics::simulation::Random;
use homeostat_store::history::HISTORY_FILE;
use homeostat_store::journal::{COUNT_FILE, FaultHook, JOURNAL_FILE};
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A hash over everything that happened, in order (FNV-1a, 64 bits), and the last lines of it.
#[derive(Clone, Debug)]
pub struct Trace {
    hash: u64,
    lines: u64,
    last: std::collections::VecDeque<String>,
    kept: usize,
}

/// Lines of the trace that a report shows.
pub const TRACE_SHOWN: usize = 60;

impl Default for Trace {
    fn default() -> Self {
        Self {
            hash: 0xcbf2_9ce4_8422_2325,
            lines: 0,
            last: std::collections::VecDeque::new(),
            kept: TRACE_SHOWN,
        }
    }
}

impl Trace {
    /// Adds a line.
    pub fn line(&mut self, text: String) {
        for byte in text.bytes().chain([b'\n']) {
            self.hash = (self.hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
        self.lines += 1;
        while self.last.len() >= self.kept.max(1) {
            self.last.pop_front();
        }
        self.last.push_back(text);
    }

    /// The hash so far.
    pub fn hash(&self) -> u64 {
        self.hash
    }

    /// Number of lines so far.
    pub fn lines(&self) -> u64 {
        self.lines
    }

    /// The last lines, oldest first.
    pub fn last(&self) -> impl Iterator<Item = &String> {
        self.last.iter()
    }
}

#[derive(Default)]
struct Disk {
    directory: PathBuf,
    /// Copy of the state directory at the kill.
    image: Option<PathBuf>,
    images: u64,
    steps: u64,
    /// Written but unsynced records at the end of the journal.
    unsynced: usize,
    /// The last synced `journal.count`.
    count: Vec<u8>,
    /// Number of journal steps to fail, and the error.
    failing: Option<(u32, io::ErrorKind)>,
}

/// Shared by the wrapper, the journal hook and the campaign.
struct State {
    plan: FaultPlan,
    random: Random,
    calm: bool,
    injected: BTreeMap<Kind, u64>,
    dead: bool,
    /// Calls until the kill, and whether the last call still reaches the machine.
    crash_in_calls: Option<(u64, bool)>,
    /// Steps of the journal until the kill.
    crash_in_steps: Option<u64>,
    disk: Disk,
    sensors_out_until: Nanoseconds,
    effectors_out_until: Nanoseconds,
    /// Offset of the wall clock in seconds.
    wall_offset: i64,
    last: Option<Snapshot>,
    trace: Trace,
    calls: Vec<Call>,
    calls_in_turn: u64,
    ledger: Ledger,
    /// Actions whose record was on disk when they first reached the machine.
    covered: BTreeSet<u64>,
    broken: Vec<(Breach, String)>,
    never_done: BTreeSet<u64>,
}

/// Faults that the wrapper itself can see.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Breach {
    /// An action reached the machine before its undo record was on disk.
    Unrecorded,
    /// A person's value was overwritten.
    Overwritten,
}

/// Handle to the faults of one run; all copies are the same.
#[derive(Clone)]
pub struct Faults(Arc<Mutex<State>>);

impl std::fmt::Debug for Faults {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Faults").field("plan", &self.lock().plan).finish()
    }
}

const CALLS_MAX: usize = 50_000;

impl Faults {
    /// Faults of a plan, for a daemon with its state in `directory`, on a machine that looks like `picture`.
    pub fn new(plan: FaultPlan, directory: &Path, picture: Picture) -> Self {
        let random = Random::new(plan.seed ^ 0x4641_554c_5453_0000);
        Self(Arc::new(Mutex::new(State {
            plan,
            random,
            calm: false,
            injected: BTreeMap::new(),
            dead: false,
            crash_in_calls: None,
            crash_in_steps: None,
            disk: Disk {
                directory: directory.to_owned(),
                ..Disk::default()
            },
            sensors_out_until: Nanoseconds::ZERO,
            effectors_out_until: Nanoseconds::ZERO,
            wall_offset: 0,
            last: None,
            trace: Trace::default(),
            calls: Vec::new(),
            calls_in_turn: 0,
            ledger: Ledger::new(picture),
            covered: BTreeSet::new(),
            broken: Vec::new(),
            never_done: BTreeSet::new(),
        })))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// From now on nothing fails any more.
    pub fn stop(&self) {
        let mut s = self.lock();
        s.calm = true;
        s.disk.failing = None;
        s.crash_in_calls = None;
        s.crash_in_steps = None;
        s.sensors_out_until = Nanoseconds::ZERO;
        s.effectors_out_until = Nanoseconds::ZERO;
        s.never_done.clear();
    }

    /// Whether the daemon was killed.
    pub fn dead(&self) -> bool {
        self.lock().dead
    }

    /// How often each kind was injected so far.
    pub fn injected(&self) -> BTreeMap<Kind, u64> {
        self.lock().injected.clone()
    }

    /// Counts a fault that the campaign itself brought about.
    pub fn count(&self, kind: Kind) {
        *self.lock().injected.entry(kind).or_default() += 1;
    }

    /// Adds a line to the trace.
    pub fn trace(&self, line: String) {
        self.lock().trace.line(line);
    }

    /// Keeps this many lines of the trace, at least one.
    pub fn keep_trace(&self, lines: usize) {
        self.lock().trace.kept = lines;
    }

    /// A copy of the trace.
    pub fn traced(&self) -> Trace {
        self.lock().trace.clone()
    }

    /// The calls of effectors since the last time, and the number of all calls.
    pub fn take_calls(&self) -> (Vec<Call>, u64) {
        let mut s = self.lock();
        let calls = std::mem::take(&mut s.calls);
        (calls, std::mem::take(&mut s.calls_in_turn))
    }

    /// Faults at the seam itself since the last call.
    pub fn take_broken(&self) -> Vec<(Breach, String)> {
        std::mem::take(&mut self.lock().broken)
    }

    /// Enters in the ledger what `hand` changed since the last picture.
    pub fn note(&self, hand: Hand, picture: Picture) {
        self.lock().note(hand, picture);
    }

    /// A person wrote this setting: see [`Ledger::chosen`].
    pub fn chosen(&self, name: &str) {
        self.lock().ledger.chosen(name);
    }

    /// A copy of the ledger.
    pub fn ledger(&self) -> Ledger {
        self.lock().ledger.clone()
    }

    /// Nothing is owed any more: see [`Ledger::nothing_owed`].
    pub fn nothing_owed(&self) {
        self.lock().ledger.nothing_owed();
    }

    /// Accepts what is left over on the machine, after it was reported.
    pub fn settle(&self) {
        self.lock().ledger.settle();
    }

    /// Kills the daemon at the `calls`-th call from now. `reached`: that call still reaches the machine.
    pub fn crash_after_calls(&self, calls: u64, reached: bool) {
        self.lock().crash_in_calls = Some((calls, reached));
    }

    /// Kills the daemon at the `steps`-th step of the journal from now.
    pub fn crash_after_steps(&self, steps: u64) {
        self.lock().crash_in_steps = Some(steps);
    }

    /// Kills the daemon now, between two turns.
    pub fn crash_now(&self) {
        self.lock().die();
    }

    /// The next `steps` steps of the journal fail.
    pub fn fail_disk(&self, steps: u32, error: io::ErrorKind) {
        self.lock().disk.failing = Some((steps, error));
    }

    /// No sample until then.
    pub fn sensors_out(&self, until: Nanoseconds) {
        self.lock().sensors_out_until = until;
    }

    /// Every effector refuses until then.
    pub fn effectors_out(&self, until: Nanoseconds) {
        self.lock().effectors_out_until = until;
    }

    /// Moves the wall clock by this many seconds.
    pub fn jump_wall_clock(&self, seconds: i64) {
        let mut s = self.lock();
        s.wall_offset = s.wall_offset.saturating_add(seconds);
    }

    /// The directory on disk after a crash, with torn tail and damaged history by the plan. The daemon is alive again.
    ///
    /// # Errors
    /// The copy could not be made or changed.
    pub fn revive(&self) -> io::Result<PathBuf> {
        let mut s = self.lock();
        if let Some(image) = s.disk.image.take() {
            let unsynced = s.disk.unsynced;
            if s.draw_share(Kind::TornTail) && unsynced > 0 {
                s.hit(Kind::TornTail);
                tear(&image.join(JOURNAL_FILE), unsynced, &mut s.random)?;
                if image.join(COUNT_FILE).exists() {
                    std::fs::write(image.join(COUNT_FILE), &s.disk.count)?;
                }
            }
            let old = std::mem::replace(&mut s.disk.directory, image);
            std::fs::remove_dir_all(old)?;
        }
        if s.draw_share(Kind::HistoryDamaged) {
            s.hit(Kind::HistoryDamaged);
            let path = s.disk.directory.join(HISTORY_FILE);
            damage(&path, &mut s.random)?;
        }
        s.dead = false;
        s.crash_in_calls = None;
        s.crash_in_steps = None;
        s.disk.unsynced = 0;
        s.keep_count()?;
        Ok(s.disk.directory.clone())
    }

    /// Directory in which the daemon keeps its state now.
    pub fn directory(&self) -> PathBuf {
        self.lock().disk.directory.clone()
    }

    /// Steps of the journal so far, over all lives of the daemon.
    pub fn journal_steps(&self) -> u64 {
        self.lock().disk.steps
    }

    /// The hook for the journal.
    pub fn journal_hook(&self) -> FaultHook {
        let faults = self.clone();
        Box::new(move |step| faults.lock().journal_step(step))
    }
}

impl State {
    fn hit(&mut self, kind: Kind) {
        *self.injected.entry(kind).or_default() += 1;
    }

    /// Whether a fault of this kind replaces the call.
    fn strikes(&mut self, kind: Kind) -> bool {
        let rate = self.plan.rate(kind);
        if self.calm || rate <= 0.0 {
            return false;
        }
        let struck = self.random.uniform() < rate;
        if struck {
            self.hit(kind);
        }
        struck
    }

    fn draw_share(&mut self, kind: Kind) -> bool {
        let rate = self.plan.rate(kind);
        !self.calm && rate > 0.0 && self.random.uniform() < rate
    }

    fn note(&mut self, hand: Hand, picture: Picture) {
        for (name, persons, ours) in self.ledger.note(hand, picture) {
            let now = ours.map_or_else(|| "nothing".to_owned(), |v: Value| v.to_string());
            self.broken.push((
                Breach::Overwritten,
                format!("{name} was {persons} by the choice of a person and was set to {now}"),
            ));
        }
    }

    fn die(&mut self) {
        if self.dead {
            return;
        }
        self.dead = true;
        self.disk.images += 1;
        let name = format!("state-{}", self.disk.images);
        let image = self
            .disk
            .directory
            .parent()
            .map_or_else(|| PathBuf::from(&name), |p| p.join(&name));
        // A failed copy has no journal, which the checkers would take for a lost one: go on with the old directory.
        match copy_directory(&self.disk.directory, &image) {
            Ok(()) => self.disk.image = Some(image),
            Err(e) => self.trace.line(format!("no image of the crash: {e}")),
        }
    }

    /// Counts a call. True: the daemon is dead and the call must not reach the machine.
    fn call_begins(&mut self) -> bool {
        self.calls_in_turn += 1;
        if self.dead {
            return true;
        }
        if let Some((left, reached)) = self.crash_in_calls {
            if left > 0 {
                self.crash_in_calls = Some((left - 1, reached));
            } else if !reached {
                self.die();
                return true;
            }
        }
        false
    }

    /// After a call that reached the machine: the daemon may be killed before the answer.
    fn call_ends(&mut self) -> bool {
        if !self.dead && matches!(self.crash_in_calls, Some((0, true))) {
            self.die();
        }
        self.dead
    }

    fn keep_count(&mut self) -> io::Result<()> {
        self.disk.count = match std::fs::read(self.disk.directory.join(COUNT_FILE)) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => Vec::new(),
            read => read?,
        };
        Ok(())
    }

    fn journal_step(&mut self, step: &'static str) -> io::Result<()> {
        if self.dead {
            return Err(io::Error::other("killed"));
        }
        self.disk.steps += 1;
        if step.starts_with("count.") {
            if step == "count.after_sync" || step == "count.after_create" {
                self.keep_count()?;
            }
        } else if step.ends_with(".after_write") && !step.starts_with("compact") {
            self.disk.unsynced += 1;
        } else if step.ends_with(".after_sync") {
            self.disk.unsynced = 0;
        }
        if let Some(left) = self.crash_in_steps {
            if left == 0 {
                self.die();
                self.trace.line(format!("killed at {step}"));
                return Err(io::Error::other("killed"));
            }
            self.crash_in_steps = Some(left - 1);
        }
        if let Some((left, kind)) = self.disk.failing {
            self.disk.failing = (left > 1).then_some((left - 1, kind));
            if step.ends_with(".after_write") && !step.starts_with("compact") && !step.starts_with("count.") {
                // Remove the written record.
                self.disk.unsynced = self.disk.unsynced.saturating_sub(1);
            }
            return Err(io::Error::from(kind));
        }
        Ok(())
    }
}
