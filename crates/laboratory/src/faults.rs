//! Faults of sensors, effectors, clock, journal and process, as a wrapper around any platform.
//!
//! A [`FaultPlan`] is a *swarm* (Groce et al. 2012): each seed enables a random subset of the kinds at random rates.
//! Runs in which everything fails a little find less than runs in which some things fail a lot and others never: a
//! crash that is rare among refusals is common where nothing is refused.
//!
//! A crash needs no second process: at a chosen call of a sensor, an effector or a journal step the state directory is
//! copied as it stands, and from then on nothing reaches the machine or matters on disk. The loop is dropped and a new
//! one starts from the copy, of which the tail that was not synced may be torn as a power cut would tear it.

use crate::checkers::{Call, Hand, Ledger, Picture, Value};
use homeostat_model::{
    Action, Direction, Locality, Machine, MemoryMap, MeterCandidate, MeterId, Nanoseconds, Progress,
    Snapshot, UndoRecord, WorkloadId,
};
use homeostat_platform::{Clock, Effectors, LostMeter, PlatformError, SampleRequest, Sensors};
use homeostat_statistics::simulation::Random;
use homeostat_store::history::HISTORY_FILE;
use homeostat_store::journal::{COUNT_FILE, FaultHook, JOURNAL_FILE};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// One kind of fault. The rate of a kind is a probability per call for those that take the place of a call, and a
/// number per simulated hour for the others (see [`Kind::per_call`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    // -- sensing, per call
    /// A sample fails.
    SampleLost,
    /// A sample is the one before it again, with its times.
    StaleSample,
    /// Values that cannot be: NaN, negative, huge, zero or endless intervals.
    GarbageValues,
    /// A counter wrapped: a difference of almost 2^64.
    CounterWrap,
    /// The same workload twice in a list, or a sample of one that does not exist.
    DuplicateWorkloads,
    /// A workload is missing in a scan although it runs.
    WorkloadMissed,
    /// Time stands still between two samples.
    TimeStandsStill,
    /// The meters are silent.
    MetersSilent,
    /// Meters cannot be looked for or opened.
    MeterRefused,
    /// Memory or places cannot be inspected.
    InspectionRefused,
    /// An inspection returns values that cannot be.
    InspectionGarbage,
    // -- acting, per call
    /// `EPERM`.
    Denied,
    /// `EBUSY`.
    Busy,
    /// `ESRCH` although the process lives (only when making a change: of an undo it would be a lie that no kernel tells).
    Vanished,
    /// `ENOMEM`.
    NoMemory,
    /// The kernel does not know the call (any more).
    Unsupported,
    /// A part is done, the rest is reported as skipped.
    Partial,
    /// An effector that asks for a pause without end.
    EndlessPause,
    /// A slice that takes seconds.
    SlowSlice,
    /// An effector that never gets done, however often it is called.
    NeverDone,
    // -- per hour
    /// No sample for minutes to hours.
    SensorOutage,
    /// Every effector refuses for minutes.
    EffectorOutage,
    /// The wall clock jumps, forward or back; the monotonic clock does not.
    WallClockJump,
    /// The machine sleeps: a long gap in the monotonic clock.
    LongGap,
    /// The disk is full for some steps of the journal.
    DiskFull,
    /// The disk fails at some step of the journal.
    DiskError,
    /// The history on disk is damaged while the daemon is down.
    HistoryDamaged,
    /// The daemon is killed between two calls of sensors or effectors.
    CrashAtCall,
    /// The daemon is killed at a step of the journal.
    CrashAtJournal,
    /// At a crash the tail of the journal that was not synced is torn.
    TornTail,
    /// An orderly stop and start.
    Restart,
    /// An operator pauses, and resumes some time later.
    Pause,
    /// An operator undoes one change.
    Undo,
    /// An operator undoes everything.
    UndoAll,
    /// New settings.
    Reconfigure,
    /// A person changes a setting that homeostat may have changed.
    PersonChanges,
    /// Another tuner changes settings again and again.
    OtherTuner,
    /// CPUs go offline and come back.
    CpuOffline,
    /// A memory node goes offline and comes back.
    NodeOffline,
    /// A program ends for good.
    ProgramEnds,
    /// A program ends and starts again.
    ProgramRestarts,
    /// A program forks.
    ProgramForks,
    /// A program does something else from now on.
    PhaseChange,
}

impl Kind {
    /// All kinds.
    pub const ALL: [Self; 43] = [
        Self::SampleLost,
        Self::StaleSample,
        Self::GarbageValues,
        Self::CounterWrap,
        Self::DuplicateWorkloads,
        Self::WorkloadMissed,
        Self::TimeStandsStill,
        Self::MetersSilent,
        Self::MeterRefused,
        Self::InspectionRefused,
        Self::InspectionGarbage,
        Self::Denied,
        Self::Busy,
        Self::Vanished,
        Self::NoMemory,
        Self::Unsupported,
        Self::Partial,
        Self::EndlessPause,
        Self::SlowSlice,
        Self::NeverDone,
        Self::SensorOutage,
        Self::EffectorOutage,
        Self::WallClockJump,
        Self::LongGap,
        Self::DiskFull,
        Self::DiskError,
        Self::HistoryDamaged,
        Self::CrashAtCall,
        Self::CrashAtJournal,
        Self::TornTail,
        Self::Restart,
        Self::Pause,
        Self::Undo,
        Self::UndoAll,
        Self::Reconfigure,
        Self::PersonChanges,
        Self::OtherTuner,
        Self::CpuOffline,
        Self::NodeOffline,
        Self::ProgramEnds,
        Self::ProgramRestarts,
        Self::ProgramForks,
        Self::PhaseChange,
    ];

    /// Whether its rate is a probability per call (0..1); else it is a number per simulated hour.
    pub fn per_call(self) -> bool {
        self < Self::SensorOutage
    }

    /// Lowest and highest rate that a swarm draws, log-uniformly.
    fn range(self) -> (f64, f64) {
        match self {
            Self::NeverDone | Self::EndlessPause => (0.0005, 0.02),
            Self::WorkloadMissed | Self::StaleSample | Self::TimeStandsStill => (0.0002, 0.05),
            _ if self.per_call() => (0.0002, 0.1),
            // The share of crashes that tear the tail.
            Self::TornTail => (0.2, 1.0),
            Self::HistoryDamaged => (0.05, 0.5),
            Self::SensorOutage | Self::EffectorOutage | Self::NodeOffline | Self::ProgramEnds => (0.02, 0.5),
            _ => (0.05, 3.0),
        }
    }

    /// Whether it happens at a random time, by the hand of the campaign.
    pub fn is_event(self) -> bool {
        !self.per_call() && !matches!(self, Self::TornTail | Self::HistoryDamaged)
    }
}

/// Which faults, and how often.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct FaultPlan {
    /// Seed of all draws of faults, apart from that of the machine.
    pub seed: u64,
    /// Rate by kind: a probability per call, or a number per simulated hour.
    pub rates: BTreeMap<Kind, f64>,
}

impl FaultPlan {
    /// No faults at all.
    pub fn none() -> Self {
        Self::default()
    }

    /// The swarm of a seed: each kind with probability one half (in one seed of eight: one kind alone), each rate
    /// log-uniform in the range of the kind.
    pub fn swarm(seed: u64) -> Self {
        let mut random = Random::new(seed ^ 0x5357_4152_4d00_0000);
        let alone = (random.next_u64() % 8 == 0).then(|| pick(&mut random, &Kind::ALL));
        let mut rates = BTreeMap::new();
        for kind in Kind::ALL {
            let (coin, place) = (random.coin(), random.uniform());
            let enabled = match alone {
                Some(Some(one)) => *one == kind,
                _ => coin,
            };
            if enabled {
                let (low, high) = kind.range();
                let (low, high) = (low.log2(), high.log2());
                rates.insert(kind, (low + (high - low) * place).exp2());
            }
        }
        Self { seed, rates }
    }

    /// The rate of a kind; zero when it is not enabled.
    pub fn rate(&self, kind: Kind) -> f64 {
        self.rates.get(&kind).copied().unwrap_or(0.0)
    }

    /// What is wrong with it; empty when it is valid.
    pub fn validate(&self) -> Vec<String> {
        self.rates
            .iter()
            .filter_map(|(kind, rate)| {
                let high = if kind.per_call() { 1.0 } else { 3600.0 };
                (!(0.0..=high).contains(rate))
                    .then(|| format!("rate of {kind:?} = {rate}: must be between 0 and {high}"))
            })
            .collect()
    }
}

/// One of a list.
pub(crate) fn pick<'a, T>(random: &mut Random, list: &'a [T]) -> Option<&'a T> {
    let n = list.len() as u64;
    (n > 0)
        .then(|| (random.next_u64() % n) as usize)
        .and_then(|i| list.get(i))
}

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

/// What the wrapper, the journal hook and the campaign share.
struct State {
    plan: FaultPlan,
    random: Random,
    calm: bool,
    injected: BTreeMap<Kind, u64>,
    /// Killed: nothing reaches the machine any more.
    dead: bool,
    /// Calls until the daemon is killed, and whether the call still reaches the machine.
    crash_in_calls: Option<(u64, bool)>,
    /// Steps of the journal until the daemon is killed.
    crash_in_steps: Option<u64>,
    /// Steps of the journal that fail, and with which error.
    disk: Option<(u32, io::ErrorKind)>,
    sensors_out_until: Nanoseconds,
    effectors_out_until: Nanoseconds,
    /// Seconds that the wall clock is off.
    wall_offset: i64,
    directory: PathBuf,
    /// Where the copy of the state directory is when the daemon was killed.
    image: Option<PathBuf>,
    images: u64,
    /// Steps of the journal so far.
    steps: u64,
    /// Records at the end of the journal that are written and not synced.
    unsynced: usize,
    /// The second file of the journal as it was synced last.
    count: Vec<u8>,
    last: Option<Snapshot>,
    trace: Trace,
    calls: Vec<Call>,
    calls_in_turn: u64,
    ledger: Ledger,
    /// Records that were on disk when their action first reached the machine.
    covered: BTreeSet<u64>,
    broken: Vec<(Breach, String)>,
    never_done: BTreeSet<u64>,
}

/// What the wrapper itself can see to be wrong.
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

/// Calls remembered between two turns.
const CALLS_MAX: usize = 50_000;

impl Faults {
    /// Faults of a plan, for a daemon whose state is kept in `directory`, on a machine that looks like `picture`.
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
            disk: None,
            sensors_out_until: Nanoseconds::ZERO,
            effectors_out_until: Nanoseconds::ZERO,
            wall_offset: 0,
            directory: directory.to_owned(),
            image: None,
            images: 0,
            steps: 0,
            unsynced: 0,
            count: Vec::new(),
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
        s.disk = None;
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

    /// Keeps so many lines of the trace, at least one.
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

    /// What was wrong at the seam itself since the last time.
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

    /// Kills the daemon at the `calls`-th call from now; `reached` says whether that call still reaches the machine.
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
        self.lock().disk = Some((steps, error));
    }

    /// No sample until then.
    pub fn sensors_out(&self, until: Nanoseconds) {
        self.lock().sensors_out_until = until;
    }

    /// Every effector refuses until then.
    pub fn effectors_out(&self, until: Nanoseconds) {
        self.lock().effectors_out_until = until;
    }

    /// Moves the wall clock by so many seconds.
    pub fn jump_wall_clock(&self, seconds: i64) {
        let mut s = self.lock();
        s.wall_offset = s.wall_offset.saturating_add(seconds);
    }

    /// After a crash: the directory in which the next daemon finds what was on disk. The tail that was not synced may
    /// be torn and the history damaged, as the plan says. The daemon is alive again.
    ///
    /// # Errors
    /// The copy could not be made or changed.
    pub fn revive(&self) -> io::Result<PathBuf> {
        let mut s = self.lock();
        if let Some(image) = s.image.take() {
            let unsynced = s.unsynced;
            if s.draw_share(Kind::TornTail) && unsynced > 0 {
                s.hit(Kind::TornTail);
                tear(&image.join(JOURNAL_FILE), unsynced, &mut s.random)?;
                if image.join(COUNT_FILE).exists() {
                    std::fs::write(image.join(COUNT_FILE), &s.count)?;
                }
            }
            let old = std::mem::replace(&mut s.directory, image);
            std::fs::remove_dir_all(old)?;
        }
        if s.draw_share(Kind::HistoryDamaged) {
            s.hit(Kind::HistoryDamaged);
            let path = s.directory.join(HISTORY_FILE);
            damage(&path, &mut s.random)?;
        }
        s.dead = false;
        s.crash_in_calls = None;
        s.crash_in_steps = None;
        s.unsynced = 0;
        s.keep_count()?;
        Ok(s.directory.clone())
    }

    /// Directory in which the daemon keeps its state now.
    pub fn directory(&self) -> PathBuf {
        self.lock().directory.clone()
    }

    /// Steps of the journal so far, over all lives of the daemon.
    pub fn journal_steps(&self) -> u64 {
        self.lock().steps
    }

    /// The hook for the journal.
    pub fn journal_hook(&self) -> FaultHook {
        let faults = self.clone();
        Box::new(move |step| faults.lock().journal_step(step))
    }
}

/// Makes a directory that nobody else may look into, as the journal wants it.
pub(crate) fn private_directory(path: &Path) -> io::Result<()> {
    use std::os::unix::fs::PermissionsExt;
    std::fs::create_dir_all(path)?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o700))
}

/// Copies the plain files of a directory.
fn copy_directory(from: &Path, to: &Path) -> io::Result<()> {
    private_directory(to)?;
    for entry in std::fs::read_dir(from)? {
        let entry = entry?;
        let name = entry.file_name();
        // SQLite's shared-memory index does not survive a crash; it is built anew from the log.
        if entry.file_type()?.is_file() && !name.to_string_lossy().ends_with("-shm") {
            std::fs::copy(entry.path(), to.join(name))?;
        }
    }
    Ok(())
}

/// Tears the last `records` records, none of which was synced: some prefix of them survives, the rest is zero (space
/// was allocated) or gone, or has a few wrong bytes.
fn tear(path: &Path, records: usize, random: &mut Random) -> io::Result<()> {
    let mut bytes = match std::fs::read(path) {
        Ok(bytes) => bytes,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(e) => return Err(e),
    };
    let used = bytes.iter().rposition(|b| *b != 0).map_or(0, |i| i + 1);
    let mut starts: Vec<usize> = vec![0];
    starts.extend(
        bytes[..used]
            .iter()
            .enumerate()
            .filter(|(i, b)| **b == b'\n' && i + 1 < used)
            .map(|(i, _)| i + 1),
    );
    // The first record of a file is synced when the file is made.
    let first = starts.len().saturating_sub(records).max(1);
    let Some(from) = starts.get(first).copied() else {
        return Ok(());
    };
    let at = from + (random.next_u64() as usize) % (used - from).max(1);
    match random.next_u64() % 3 {
        0 => bytes[at..used].fill(0),
        1 => bytes.truncate(at),
        _ => {
            for _ in 0..=(random.next_u64() % 8) {
                let i = from + (random.next_u64() as usize) % (used - from).max(1);
                bytes[i] ^= (random.next_u64() % 255) as u8 + 1;
            }
        }
    }
    std::fs::write(path, bytes)
}

/// Damages a file anywhere: wrong bytes, a torn end, or nothing left.
pub(crate) fn damage(path: &Path, random: &mut Random) -> io::Result<()> {
    let mut bytes = match std::fs::read(path) {
        Ok(bytes) => bytes,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(e) => return Err(e),
    };
    damage_bytes(&mut bytes, random);
    std::fs::write(path, bytes)
}

/// Wrong bytes, a torn end, a hole of zeros, or nothing left.
pub(crate) fn damage_bytes(bytes: &mut Vec<u8>, random: &mut Random) {
    let n = bytes.len().max(1) as u64;
    match random.next_u64() % 8 {
        0 => bytes.clear(),
        1 | 2 => bytes.truncate((random.next_u64() % n) as usize),
        3 => {
            let from = (random.next_u64() % n) as usize;
            let to = (from + 4096).min(bytes.len());
            bytes[from.min(to)..to].fill(0);
        }
        _ => {
            for _ in 0..=(random.next_u64() % 16) {
                let i = (random.next_u64() % n) as usize;
                if let Some(byte) = bytes.get_mut(i) {
                    *byte ^= (random.next_u64() % 255) as u8 + 1;
                }
            }
        }
    }
}

impl State {
    fn hit(&mut self, kind: Kind) {
        *self.injected.entry(kind).or_default() += 1;
    }

    /// Whether a fault of a kind takes the place of this call.
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
        self.images += 1;
        let name = format!("state-{}", self.images);
        let image = self
            .directory
            .parent()
            .map_or_else(|| PathBuf::from(&name), |p| p.join(&name));
        // A copy that failed is a directory without a journal, which the checkers would take for a lost one; so the
        // old directory serves on.
        match copy_directory(&self.directory, &image) {
            Ok(()) => self.image = Some(image),
            Err(e) => self.trace.line(format!("no image of the crash: {e}")),
        }
    }

    /// Counts a call; true when the daemon is dead and the call must not reach the machine.
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

    /// After a call that reached the machine: the daemon may be killed before it hears the answer.
    fn call_ends(&mut self) -> bool {
        if !self.dead && matches!(self.crash_in_calls, Some((0, true))) {
            self.die();
        }
        self.dead
    }

    /// Keeps the second file of the journal as it is on disk now.
    fn keep_count(&mut self) -> io::Result<()> {
        self.count = match std::fs::read(self.directory.join(COUNT_FILE)) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => Vec::new(),
            read => read?,
        };
        Ok(())
    }

    fn journal_step(&mut self, step: &'static str) -> io::Result<()> {
        if self.dead {
            return Err(io::Error::other("killed"));
        }
        self.steps += 1;
        if step.starts_with("count.") {
            if step == "count.after_sync" || step == "count.after_create" {
                self.keep_count()?;
            }
        } else if step.ends_with(".after_write") && !step.starts_with("compact") {
            self.unsynced += 1;
        } else if step.ends_with(".after_sync") {
            self.unsynced = 0;
        }
        if let Some(left) = self.crash_in_steps {
            if left == 0 {
                self.die();
                self.trace.line(format!("killed at {step}"));
                return Err(io::Error::other("killed"));
            }
            self.crash_in_steps = Some(left - 1);
        }
        if let Some((left, kind)) = self.disk {
            self.disk = (left > 1).then_some((left - 1, kind));
            if step.ends_with(".after_write") && !step.starts_with("compact") && !step.starts_with("count.") {
                // What was written is taken out again.
                self.unsynced = self.unsynced.saturating_sub(1);
            }
            return Err(io::Error::from(kind));
        }
        Ok(())
    }
}

fn killed() -> PlatformError {
    PlatformError::Busy {
        what: "any call".into(),
        why: "the daemon was killed".into(),
    }
}

/// A platform whose calls may fail, lie within the bounds of what real machines do, or be the last of the daemon.
pub struct Faulty<P, C> {
    inner: P,
    clock: C,
    faults: Faults,
    picture: PictureOf,
}

/// Takes a picture of the machine.
pub type PictureOf = std::rc::Rc<dyn Fn() -> Picture>;

impl<P: Clone, C: Clone> Clone for Faulty<P, C> {
    fn clone(&self) -> Self {
        Self {
            inner: self.inner.clone(),
            clock: self.clock.clone(),
            faults: self.faults.clone(),
            picture: self.picture.clone(),
        }
    }
}

impl<P, C: Clock> Faulty<P, C> {
    /// Wraps a platform. `clock` is used to let time pass in slow calls, `picture` to attribute changes.
    pub fn new(inner: P, clock: C, faults: Faults, picture: PictureOf) -> Self {
        Self {
            inner,
            clock,
            faults,
            picture,
        }
    }

    /// A call of a sensor other than `sample`: killed, refused, or passed on.
    fn sense<T>(
        &mut self,
        refusal: Kind,
        what: &str,
        call: impl FnOnce(&mut P) -> Result<T, PlatformError>,
    ) -> Result<T, PlatformError> {
        {
            let mut s = self.faults.lock();
            if s.call_begins() {
                return Err(killed());
            }
            let now = self.clock.now();
            if s.strikes(refusal) || now < s.sensors_out_until {
                return Err(refused(&mut s.random, what));
            }
        }
        let result = call(&mut self.inner);
        if self.faults.lock().call_ends() {
            return Err(killed());
        }
        result
    }
}

/// A refusal of a sensor.
fn refused(random: &mut Random, what: &str) -> PlatformError {
    let what = what.to_owned();
    match random.next_u64() % 4 {
        0 => PlatformError::Denied {
            what,
            needs: "CAP_SYS_PTRACE".into(),
        },
        1 => PlatformError::Vanished { target: what },
        2 => PlatformError::Malformed {
            path: "/proc".into(),
            line: "\u{fffd}\u{fffd}".into(),
        },
        _ => PlatformError::Busy {
            what,
            why: "ENOMEM".into(),
        },
    }
}

impl<P: Sensors, C: Clock> Sensors for Faulty<P, C> {
    fn machine(&mut self) -> Result<Machine, PlatformError> {
        self.sense(Kind::SampleLost, "the machine", Sensors::machine)
    }

    fn sample(&mut self, request: &SampleRequest) -> Result<Snapshot, PlatformError> {
        {
            let mut s = self.faults.lock();
            if s.call_begins() {
                return Err(killed());
            }
            let now = self.clock.now();
            if s.strikes(Kind::SampleLost) || now < s.sensors_out_until {
                return Err(refused(&mut s.random, "a sample"));
            }
            if s.strikes(Kind::StaleSample) {
                if let Some(stale) = s.last.clone() {
                    return Ok(stale);
                }
            }
        }
        let result = self.inner.sample(request);
        let mut s = self.faults.lock();
        if s.call_ends() {
            return Err(killed());
        }
        let mut snapshot = result?;
        let offset = s.wall_offset;
        snapshot.unix_seconds = snapshot.unix_seconds.saturating_add_signed(offset);
        s.spoil(&mut snapshot);
        if s.plan.rate(Kind::StaleSample) > 0.0 {
            s.last = Some(snapshot.clone());
        }
        Ok(snapshot)
    }

    fn inspect_memory(&mut self, workload: &WorkloadId) -> Result<MemoryMap, PlatformError> {
        let mut map = self.sense(Kind::InspectionRefused, "its memory", |p| {
            p.inspect_memory(workload)
        })?;
        let mut s = self.faults.lock();
        if s.strikes(Kind::InspectionGarbage) {
            map.truncated = true;
            for region in &mut map.regions {
                match s.random.next_u64() % 5 {
                    0 => region.resident.0 = u64::MAX,
                    1 => region.referenced.0 = u64::MAX,
                    2 => region.resident.0 = 0,
                    3 => region.pieces.full = u32::MAX,
                    _ => region.convertible.clear(),
                }
            }
        }
        Ok(map)
    }

    fn inspect_locality(&mut self, workload: &WorkloadId) -> Result<Locality, PlatformError> {
        let mut locality = self.sense(Kind::InspectionRefused, "its places", |p| {
            p.inspect_locality(workload)
        })?;
        let mut s = self.faults.lock();
        if s.strikes(Kind::InspectionGarbage) {
            let bad = bad_number(&mut s.random);
            for running in locality.running.values_mut() {
                *running = bad;
            }
            match s.random.next_u64() % 4 {
                0 => locality.running.clear(),
                1 => locality.private.clear(),
                2 => locality.private.values_mut().for_each(|b| b.0 = u64::MAX),
                _ => locality.threads = 0,
            }
            if let Some(counters) = &mut locality.counters {
                counters.local_share = bad;
                counters.memory_stall_share = bad;
                counters.prefetch_share = bad;
            }
        }
        Ok(locality)
    }

    fn find_meters(&mut self, workload: &WorkloadId) -> Result<Vec<MeterCandidate>, PlatformError> {
        self.sense(Kind::MeterRefused, "its meters", |p| p.find_meters(workload))
    }

    fn open_meter(&mut self, workload: &WorkloadId, meter: &MeterId) -> Result<(), PlatformError> {
        self.sense(Kind::MeterRefused, "a meter", |p| p.open_meter(workload, meter))
    }

    fn close_meter(&mut self, workload: &WorkloadId, meter: &MeterId) {
        if !self.faults.lock().call_begins() {
            self.inner.close_meter(workload, meter);
        }
    }

    fn take_lost_meters(&mut self) -> Vec<LostMeter> {
        self.inner.take_lost_meters()
    }
}

/// A number that no sensor should deliver.
fn bad_number(random: &mut Random) -> f64 {
    const BAD: [f64; 8] = [
        f64::NAN,
        f64::INFINITY,
        f64::NEG_INFINITY,
        -1.0,
        -1e30,
        1e300,
        0.0,
        f64::MIN_POSITIVE,
    ];
    pick(random, &BAD).copied().unwrap_or(f64::NAN)
}

/// An amount that no counter should show.
fn bad_amount(random: &mut Random) -> u64 {
    const BAD: [u64; 6] = [0, 1, u64::MAX, u64::MAX / 2, 1 << 63, u64::MAX - 1000];
    pick(random, &BAD).copied().unwrap_or(0)
}

impl State {
    /// Puts faults of the sensors into a sample.
    fn spoil(&mut self, snapshot: &mut Snapshot) {
        if self.strikes(Kind::TimeStandsStill) {
            snapshot.interval = Nanoseconds::ZERO;
            if let Some(last) = &self.last {
                snapshot.at = last.at;
            }
            for sample in &mut snapshot.samples {
                sample.interval = Nanoseconds::ZERO;
                sample
                    .meters
                    .iter_mut()
                    .for_each(|m| m.interval = Nanoseconds::ZERO);
            }
        }
        if self.strikes(Kind::MetersSilent) {
            snapshot.samples.iter_mut().for_each(|s| s.meters.clear());
        }
        if self.strikes(Kind::CounterWrap) {
            let near = u64::MAX - self.random.next_u64() % 1_000_000;
            for sample in &mut snapshot.samples {
                match self.random.next_u64() % 4 {
                    0 => sample.cpu = Nanoseconds(near),
                    1 => sample.faults_minor = near,
                    2 => sample.runqueue_wait = Nanoseconds(near),
                    _ => sample.meters.iter_mut().for_each(|m| m.work = near as f64),
                }
            }
        }
        if self.strikes(Kind::GarbageValues) {
            self.garble(snapshot);
        }
        if self.strikes(Kind::WorkloadMissed) {
            let n = self.random.next_u64() as usize;
            if let Some(list) = &mut snapshot.workloads {
                if !list.is_empty() {
                    let gone = list.remove(n % list.len());
                    snapshot.samples.retain(|s| s.id != gone.id);
                }
            }
        }
        if self.strikes(Kind::DuplicateWorkloads) {
            if let Some(list) = &mut snapshot.workloads {
                if let Some(one) = list.first().cloned() {
                    list.push(one);
                }
            }
            if let Some(one) = snapshot.samples.first().cloned() {
                snapshot.samples.push(one.clone());
                let mut stranger = one;
                stranger.id = "stranger".into();
                snapshot.samples.push(stranger);
            }
        }
    }

    fn garble(&mut self, snapshot: &mut Snapshot) {
        let random = &mut self.random;
        match random.next_u64() % 6 {
            0 => snapshot.interval = Nanoseconds(bad_amount(random)),
            1 => snapshot.machine.cpu_busy = Nanoseconds(bad_amount(random)),
            2 => snapshot.machine.memory_free.0 = bad_amount(random),
            3 => snapshot.machine.pressure_memory.some = Nanoseconds(bad_amount(random)),
            4 => snapshot.own_cpu = Nanoseconds(bad_amount(random)),
            _ => snapshot.unix_seconds = bad_amount(random),
        }
        for sample in &mut snapshot.samples {
            match random.next_u64() % 10 {
                0 => sample.interval = Nanoseconds(bad_amount(random)),
                1 => sample.cpu = Nanoseconds(bad_amount(random)),
                2 => sample.runqueue_wait = Nanoseconds(bad_amount(random)),
                3 => sample.resident.0 = bad_amount(random),
                4 => sample.age = Nanoseconds(bad_amount(random)),
                5 => sample.threads = 0,
                6 => sample.churn = u32::MAX,
                7 => sample
                    .meters
                    .iter_mut()
                    .for_each(|m| m.interval = Nanoseconds(bad_amount(random))),
                _ => sample.meters.iter_mut().for_each(|m| m.work = bad_number(random)),
            }
        }
        if let Some(list) = &mut snapshot.workloads {
            if random.next_u64() % 4 == 0 {
                if let Some(one) = list.first_mut() {
                    one.processes.clear();
                }
            }
        }
    }

    /// A refusal of an effector, or nothing.
    fn refusal(
        &mut self,
        record: &Action,
        direction: Option<Direction>,
        now: Nanoseconds,
    ) -> Option<PlatformError> {
        let what = || format!("{} on {}", record.effector, record.workload);
        if now < self.effectors_out_until {
            return Some(PlatformError::Busy {
                what: what(),
                why: "EBUSY for some time".into(),
            });
        }
        if self.strikes(Kind::Denied) {
            return Some(PlatformError::Denied {
                what: what(),
                needs: "CAP_SYS_NICE".into(),
            });
        }
        if self.strikes(Kind::Busy) {
            return Some(PlatformError::Busy {
                what: what(),
                why: "EBUSY".into(),
            });
        }
        if self.strikes(Kind::NoMemory) {
            return Some(PlatformError::Rejected {
                what: what(),
                value: "1".into(),
                errno: "ENOMEM".into(),
            });
        }
        if direction != Some(Direction::Undo) {
            if self.strikes(Kind::Vanished) {
                return Some(PlatformError::Vanished {
                    target: record.workload.to_string(),
                });
            }
            if self.strikes(Kind::Unsupported) {
                return Some(PlatformError::Unsupported {
                    what: what(),
                    why: "ENOSYS".into(),
                });
            }
        }
        None
    }

    fn log(&mut self, call: Call, outcome: &str) {
        let direction = match call.direction {
            None => "prepare",
            Some(Direction::Apply) => "apply",
            Some(Direction::Undo) => "undo",
        };
        self.trace.line(format!(
            "{direction} {} {} {}: {outcome}",
            call.action, call.effector, call.workload
        ));
        if self.calls.len() < CALLS_MAX {
            self.calls.push(call);
        }
    }
}

impl<P: Effectors, C: Clock> Effectors for Faulty<P, C> {
    fn prepare(&mut self, action: &Action) -> Result<UndoRecord, PlatformError> {
        let call = Call {
            action: action.id,
            workload: action.workload.clone(),
            effector: action.effector.clone(),
            direction: None,
            why: action.why.clone(),
            reached: false,
            done: false,
        };
        {
            let mut s = self.faults.lock();
            if s.call_begins() {
                return Err(killed());
            }
            let now = self.clock.now();
            if let Some(error) = s.refusal(action, None, now) {
                s.log(call, &error.to_string());
                return Err(error);
            }
        }
        let before = (self.picture)();
        self.faults.lock().note(Hand::Machine, before.clone());
        let result = self.inner.prepare(action);
        let after = (self.picture)();
        let mut s = self.faults.lock();
        // Preparing changes nothing; if it does, it is ours and nothing will ever undo it.
        s.note(Hand::Ours, after);
        let outcome = result
            .as_ref()
            .map_or_else(ToString::to_string, |_| "prepared".to_owned());
        s.log(call, &outcome);
        if s.call_ends() {
            return Err(killed());
        }
        result
    }

    fn advance(&mut self, record: &UndoRecord, direction: Direction) -> Result<Progress, PlatformError> {
        let action = &record.action;
        let mut call = Call {
            action: action.id,
            workload: action.workload.clone(),
            effector: action.effector.clone(),
            direction: Some(direction),
            why: action.why.clone(),
            reached: false,
            done: false,
        };
        let slow = {
            let mut s = self.faults.lock();
            if s.call_begins() {
                return Err(killed());
            }
            let now = self.clock.now();
            if let Some(error) = s.refusal(action, Some(direction), now) {
                s.log(call, &error.to_string());
                return Err(error);
            }
            if direction == Direction::Apply && s.covered.insert(action.id.0) {
                // From the disk, not from the memory of the code under test.
                let on_disk = homeostat_store::journal::read(&s.directory)
                    .is_ok_and(|found| found.owed.contains_key(&action.id));
                if !on_disk {
                    s.broken.push((
                        Breach::Unrecorded,
                        format!(
                            "action {} ({} on {}) reached the machine before its undo record was on disk",
                            action.id, action.effector, action.workload
                        ),
                    ));
                }
            }
            let slow = s.strikes(Kind::SlowSlice).then(|| s.random.uniform() * 30.0);
            slow.map(Nanoseconds::from_secs_f64)
        };
        if let Some(length) = slow {
            self.clock.sleep(length);
        }
        let before = (self.picture)();
        self.faults.lock().note(Hand::Machine, before);
        let result = self.inner.advance(record, direction);
        let after = (self.picture)();
        let mut s = self.faults.lock();
        s.note(Hand::Ours, after);
        let result = result.map(|mut progress| {
            // Only of a change: an undo that is done and says otherwise is a lie that no kernel tells.
            if direction == Direction::Apply
                && (s.never_done.contains(&action.id.0) || s.strikes(Kind::NeverDone))
            {
                s.never_done.insert(action.id.0);
                progress.done = false;
            } else if progress.done && direction == Direction::Apply && s.strikes(Kind::Partial) {
                let lost = progress.total - progress.total / 3;
                progress.finished = progress.total - lost;
                progress.skipped.insert("EIO".into(), lost);
            }
            if !progress.done && s.strikes(Kind::EndlessPause) {
                progress.pause = Nanoseconds(u64::MAX);
            }
            progress
        });
        call.reached = !matches!(&result, Err(PlatformError::Vanished { .. }));
        call.done = match &result {
            Ok(progress) => progress.done,
            // Whoever is gone has nothing to be undone.
            Err(PlatformError::Vanished { .. }) => true,
            Err(_) => false,
        };
        let outcome = match &result {
            Ok(p) if p.done => format!("done {}/{} {:?}", p.finished, p.total, p.skipped),
            Ok(p) => format!("{}/{}", p.finished, p.total),
            Err(e) => e.to_string(),
        };
        s.log(call, &outcome);
        if s.call_ends() {
            return Err(killed());
        }
        result
    }

    fn forget(&mut self, record: &UndoRecord) {
        let mut s = self.faults.lock();
        s.never_done.remove(&record.action.id.0);
        if !s.call_begins() {
            drop(s);
            self.inner.forget(record);
        }
    }
}

/// The clock beside a faulty platform: the wall clock may jump.
#[derive(Clone, Debug)]
pub struct FaultyClock<C> {
    inner: C,
    faults: Faults,
}

impl<C> FaultyClock<C> {
    /// Wraps a clock.
    pub fn new(inner: C, faults: Faults) -> Self {
        Self { inner, faults }
    }
}

impl<C: Clock> Clock for FaultyClock<C> {
    fn now(&self) -> Nanoseconds {
        self.inner.now()
    }
    fn unix_seconds(&self) -> u64 {
        let offset = self.faults.lock().wall_offset;
        self.inner.unix_seconds().saturating_add_signed(offset)
    }
    fn sleep(&self, length: Nanoseconds) {
        self.inner.sleep(length);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_are_listed_once_each_and_in_order() {
        let mut sorted = Kind::ALL.to_vec();
        sorted.sort_unstable();
        sorted.dedup();
        assert_eq!(sorted, Kind::ALL);
        assert_eq!(sorted.last(), Some(&Kind::PhaseChange));
    }

    #[test]
    fn swarms_differ_and_are_valid() {
        let plans: Vec<FaultPlan> = (0..200).map(FaultPlan::swarm).collect();
        for plan in &plans {
            assert_eq!(plan.validate(), Vec::<String>::new());
            assert_eq!(*plan, FaultPlan::swarm(plan.seed));
        }
        for kind in Kind::ALL {
            let n = plans.iter().filter(|p| p.rate(kind) > 0.0).count();
            assert!((40..160).contains(&n), "{kind:?} in {n} of 200");
        }
        assert!(plans.iter().any(|p| p.rates.len() == 1));
    }

    #[test]
    fn a_plan_out_of_range_is_refused() {
        let plan = FaultPlan {
            seed: 0,
            rates: BTreeMap::from([(Kind::Denied, 1.5), (Kind::Restart, f64::NAN), (Kind::Busy, 0.5)]),
        };
        assert_eq!(plan.validate().len(), 2);
    }

    #[test]
    fn only_what_was_not_synced_is_torn() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("journal");
        let mut seen = BTreeSet::new();
        for seed in 0..200 {
            let mut bytes = b"one\ntwo\nthree\nfour\n".to_vec();
            bytes.resize(64, 0);
            std::fs::write(&path, &bytes).unwrap();
            tear(&path, 2, &mut Random::new(seed)).unwrap();
            let torn = std::fs::read(&path).unwrap();
            assert!(torn.starts_with(b"one\ntwo\n"), "{torn:?}");
            seen.insert(torn);
        }
        assert!(seen.len() > 20);
    }
}
