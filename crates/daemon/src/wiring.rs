//! Wires the parts: machine, clock, journal, history, strategies, engine. The only place that names them all.

use crate::api::{SCHEMA, StoryLine};
use crate::board::Board;
use crate::control::{self, ControlError, Server};
use crate::greeting::{self, FirstLook};
use crate::log::Log;
use crate::machine_lock::{self, MachineLockError, Sole, while_dying};
use crate::metrics::endpoint::{self, Endpoint, MetricsError};
use crate::notify::Manager;
use crate::report::{Diagnosis, Past, StrategyState};
use crate::service::{self, Ended, Service, Signals};
use crate::settings::{self, Loaded, Settings, SettingsErrors, Sources};
use crate::switch::{self, Standing};
use crate::watch::{Book, WatchThread};
use crate::{process, progress_place};
use homeostat_effectors::Registry;
use homeostat_effectors::fetcher::Launch;
use homeostat_engine::{Mode, Status, Strategy};
use homeostat_kernel::Root;
use homeostat_kernel::clock::MonotonicClock;
use homeostat_linux::LinuxPlatform;
use homeostat_model::{ActionId, Bytes, CapabilityState, ExperimentId, Machine, Nanoseconds, WorkloadId};
use homeostat_platform::{Clock, PlatformError, Sensors};
use homeostat_probes::owed::Mended;
use homeostat_runtime::{Recorder, RecordingError, RecoveryReport, Runtime, StartError};
use homeostat_store::history::{ExperimentFilter, HISTORY_FILE};
use homeostat_store::switch::SwitchError;
use homeostat_store::{
    History, HistoryError, HistoryOptions, Journal, JournalError, JournalOptions, Recovered, ResilientHistory,
};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Why the daemon cannot start.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// The configuration is not valid.
    #[error("{0}")]
    Settings(#[from] SettingsErrors),
    /// Nothing can be changed without root's rights.
    #[error("{}", privileges_text(.0))]
    Privileges(Vec<&'static str>),
    /// The switch cannot be recorded, and without it the daemon would act.
    #[error("{0}")]
    Switch(#[from] SwitchError),
    /// The journal cannot be opened: without it nothing may be changed.
    #[error("{0}")]
    Journal(#[from] JournalError),
    /// Another daemon runs on this machine.
    #[error("{0}")]
    Machine(#[from] MachineLockError),
    /// The control socket is taken, or its group does not exist.
    #[error("{0}")]
    Control(#[from] ControlError),
    /// The machine cannot be described.
    #[error("{0}")]
    Start(#[from] StartError),
    /// The wanted recording cannot be made.
    #[error(transparent)]
    Recording(#[from] RecordingError),
    /// A thread or a signal handler could not be set up.
    #[error("cannot start: {0}")]
    System(#[from] std::io::Error),
}

fn privileges_text(missing: &[&'static str]) -> String {
    let root = missing.is_empty();
    let what = if root {
        "root's rights".to_owned()
    } else {
        missing.join(", ")
    };
    let remedy = if root {
        "run it as root"
    } else {
        "give them to this process (a container: --cap-add; a unit: CapabilityBoundingSet=)"
    };
    format!(
        "without {what} programs of others cannot be measured, changed or put back\n  hint: {remedy}; or `homeostat run \
         --advise-only`, which changes nothing"
    )
}

fn platform(settings: &Settings) -> LinuxPlatform {
    LinuxPlatform::with_meters(Root::default(), &settings.meters)
}

fn platform_below(root: Option<&Path>, settings: &Settings) -> LinuxPlatform {
    match root {
        Some(root) => LinuxPlatform::with_meters(Root::new(root), &settings.meters),
        None => platform(settings),
    }
}

/// The command that starts this program to read files in the control groups of others.
pub const FETCHER: &str = "fetch-for-daemon";

/// Whether programs may be protected from streaming readers: the strategy works here and is on.
fn may_protect(machine: &Machine, strategies: &[Box<dyn Strategy>], settings: &Settings) -> bool {
    const STRATEGY: &str = "file_cache";
    let policy = &settings.policy;
    policy.strategies.get(STRATEGY) != Some(&false)
        && strategies
            .iter()
            .any(|s| s.id().as_str() == STRATEGY && s.usable(machine, policy.profile).is_ok())
}

/// Whether evicted pages may be read back: the kernel must report them.
fn may_fetch(machine: &Machine) -> bool {
    let told = machine.capability("memory.taken");
    told.is_some_and(|c| c.state == CapabilityState::Available)
}

/// The command for that, from the running executable, whatever its path holds by now.
fn fetcher() -> Launch {
    Launch {
        program: "/proc/self/exe".into(),
        arguments: vec![FETCHER.into()],
    }
}

/// The helper process itself, until the daemon ends.
///
/// # Errors
/// The daemon did not start it.
pub fn fetch() -> std::io::Result<()> {
    homeostat_effectors::fetcher::serve()
}

/// Probes the machine, or the one below `root`, and asks each strategy whether it can work there.
///
/// # Errors
/// The machine cannot be described at all.
pub fn diagnose(root: Option<&Path>) -> Result<Diagnosis, PlatformError> {
    let usual = Settings::default();
    let machine = platform_below(root, &usual).machine()?;
    let strategies = homeostat_strategies::all()
        .iter()
        .map(|s| StrategyState {
            id: s.id().to_string(),
            summary: s.summary().to_owned(),
            refused: s.usable(&machine, usual.policy.profile).err(),
        })
        .collect();
    Ok(Diagnosis::new(&machine, strategies))
}

/// An unpredictable seed. Fixed only if the kernel gives none; the assignment then stays balanced.
fn draw_seed() -> u64 {
    let mut bytes = [0; 8];
    let drawn = std::fs::File::open("/dev/urandom").and_then(|mut f| f.read_exact(&mut bytes));
    if drawn.is_ok() {
        u64::from_le_bytes(bytes)
    } else {
        MonotonicClock.now().0
    }
}

/// The seed of this machine's coins: one configuration for a fleet must not try the same things at the same moments everywhere.
/// Without a machine id it is the seed that was given.
pub(crate) fn seed_of_this_machine(given: u64) -> u64 {
    let mut id = String::new();
    let read = std::fs::File::open("/etc/machine-id").and_then(|f| f.take(64).read_to_string(&mut id));
    if read.is_ok() {
        mixed(given, id.trim().as_bytes())
    } else {
        given
    }
}

/// A seed and some bytes as one seed (FNV-1a, then the finaliser of SplitMix64); without bytes the seed itself.
fn mixed(seed: u64, bytes: &[u8]) -> u64 {
    if bytes.is_empty() {
        return seed;
    }
    let hash = bytes.iter().fold(0xcbf2_9ce4_8422_2325u64, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
    });
    let mut z = seed ^ hash;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

fn recovery_notes(report: &RecoveryReport) -> Vec<String> {
    let lines = |list: &[(ActionId, String)], what: &str| -> Vec<String> {
        list.iter()
            .map(|(id, text)| format!("{what} {id} ({text})"))
            .collect()
    };
    let mut notes = lines(
        &report.undone,
        "an earlier run ended without undoing its change; undone now: action",
    );
    notes.extend(lines(&report.void, "nothing to undo any more: action"));
    notes.extend(lines(&report.kept, "kept in force from an earlier run: action"));
    notes.extend(lines(
        &report.failed,
        "could not be undone and is still owed: action",
    ));
    notes.extend(lines(
        &report.unrecorded,
        "nothing is left to undo, but the journal could not be written, so the next start looks again: action",
    ));
    notes
}

fn breakpoint_notes(mended: &Mended) -> Vec<String> {
    let still =
        |text: &String| format!("{text}; the next start looks again, and so does `homeostat restore`");
    let left = mended.left.iter().map(still);
    mended.taken_out.iter().cloned().chain(left).collect()
}

/// Opens the journal; a dying daemon may hold it for a moment. `allow_read_only`: for an undo without writes to it.
fn open_journal(state_directory: &Path, allow_read_only: bool) -> Result<(Journal, Recovered), JournalError> {
    let held_by = |e: &JournalError| match e {
        JournalError::Held { pid, .. } => Some(*pid),
        _ => None,
    };
    while_dying(held_by, || {
        let options = JournalOptions::default();
        match allow_read_only {
            true => Journal::open_for_undo(state_directory, options),
            false => Journal::open(state_directory, options),
        }
    })
}

/// Runs the daemon until it is stopped.
///
/// # Errors
/// [`RunError`]; nothing was changed then.
pub fn run(sources: &Sources) -> Result<Ended, RunError> {
    run_recorded(sources, false, None)
}

/// As [`run`], and records the engine into a new file, up to the limit. `advise_first`: a new installation starts with
/// the switch off ([`switch::record_first`]).
///
/// # Errors
/// Also when the file cannot be made.
pub fn run_recorded(
    sources: &Sources,
    advise_first: bool,
    record: Option<(&Path, Bytes)>,
) -> Result<Ended, RunError> {
    // While there is one thread and no lock.
    homeostat_meters::service::start();
    let loaded = settings::load_for_daemon(sources)?;
    let mut settings = loaded.settings.clone();
    settings.policy.seed = if loaded.seed_given {
        seed_of_this_machine(settings.policy.seed)
    } else {
        draw_seed()
    };
    // Even while the switch is off: switched on, this daemon could not act.
    if settings.policy.mode == Mode::Act {
        process::may_change_others().map_err(RunError::Privileges)?;
    }
    if advise_first {
        // Before the journal, by which the next start would take this version for an earlier one.
        switch::record_first(&settings.paths.state_directory)?;
    }
    let clock = MonotonicClock;
    let (journal, recovered) = open_journal(&settings.paths.state_directory, false)?;
    let mut notes = recovered.complaints();
    let socket = settings.socket();
    let listener = match control::bind(&socket, &settings.control.group) {
        Ok(listener) => Some(listener),
        Err(e @ (ControlError::AlreadyRunning(_) | ControlError::NoSuchGroup(_))) => return Err(e.into()),
        Err(e) => {
            notes.push(format!(
                "there is no control socket, so `homeostat status` does not work: {e}"
            ));
            None
        }
    };
    // A command that cannot reach the socket has written the switch by now; later ones reach the socket.
    let standing = Standing::read(
        &settings.paths.state_directory,
        settings.policy.mode,
        loaded.mode_from.clone(),
    );
    let policy = standing.policy(&settings.policy);
    let mut sole = Sole::new(Path::new(machine_lock::FILE), &settings.paths.state_directory);
    notes.extend(sole.ensure(&policy)?);
    notes.extend(process::raise_priority(&settings.service));
    process::raise_file_limit();
    notes.extend(progress_place::make(&settings.meters));
    let history = ResilientHistory::open(
        &settings.paths.state_directory.join(HISTORY_FILE),
        HistoryOptions {
            first_experiment: recovered.next_experiment,
            ..HistoryOptions::default()
        },
        clock.unix_seconds(),
    );
    // Catch signals before recovery, so that Ctrl-C does not end it half way.
    let (sender, inbox) = service::channel();
    let signals = Signals::listen(sender.clone())?;
    let log = Log::of_this_process(settings.service.log);
    let board = Arc::new(Board::default());
    // Not earlier: a failed start leaves no empty file.
    let recorder = record
        .map(|(path, limit)| Recorder::create(path, limit))
        .transpose()?;
    let mut platform = platform(&settings);
    let strategies = homeostat_strategies::all();
    // Before the slow recovery.
    let machine = platform.machine().map_err(StartError::from)?;
    // Before memory is short. Without the process everything else works, and failed reads report it.
    if may_protect(&machine, &strategies, &settings) {
        platform.stand_by();
        if may_fetch(&machine) {
            if let Err(why) = platform.start_fetcher(&fetcher()) {
                notes.push(format!(
                    "what a program loses to a reader cannot be read for it: {why}"
                ));
            }
        }
    }
    for story in greeting::lines(&loaded, &standing.shown(), &machine, &strategies) {
        let line = StoryLine::new(clock.unix_seconds(), &story);
        log.write(&line);
        board.tell(line);
    }
    let (mut runtime, report) = Runtime::start_recorded(
        platform,
        MonotonicClock,
        journal,
        history,
        strategies,
        policy,
        recorder,
    )?;
    notes.extend(recovery_notes(&report));
    let by_hand = crate::tunables::recover(&settings.paths.state_directory);
    notes.extend(recovery_notes(&by_hand.report));
    notes.extend(by_hand.complaints);
    // Before anything is counted.
    homeostat_probes::write_breakpoints_down_in(&settings.paths.state_directory);
    notes.extend(breakpoint_notes(&homeostat_probes::mend(
        &settings.paths.state_directory,
    )));
    // After recovery, so that its writes are nobody's change.
    let (watch, limits) = crate::watch::begin();
    notes.extend(limits);
    let book = watch.as_ref().map(|watch| {
        let directory = &settings.paths.run_directory;
        Book::open(directory, &machine.boot_id, clock.unix_seconds(), watch.values())
    });
    let watching = watch
        .map(|watch| WatchThread::start(watch, sender.clone()))
        .transpose()?;
    notes.extend(process::lock_memory(&settings.service));
    let server = listener
        .map(|listener| {
            let post = service::post(sender.clone());
            board.ask_by(&post);
            Server::start(listener, &socket, board.clone(), post)
        })
        .transpose()?;
    let metrics = metrics_endpoint(&settings, &board).unwrap_or_else(|e| {
        notes.push(e.to_string());
        None
    });
    if let Some(endpoint) = &metrics {
        let text = format!("metrics can be read at http://{}/metrics", endpoint.address());
        let line = StoryLine::new(clock.unix_seconds(), &service::host_story(text, false));
        log.write(&line);
        board.tell(line);
    }
    drop(sender);
    let ended = Service {
        driven: &mut runtime,
        clock: &clock,
        board,
        inbox,
        manager: Manager::from_environment(),
        log,
        settings,
        standing,
        sources: sources.clone(),
        notes,
        first_look: Some(FirstLook::default()),
        book,
        sole,
    }
    .run();
    // Counting ends with the runtime.
    homeostat_probes::begin_to_end();
    drop(watching);
    drop(metrics);
    drop(server);
    drop(signals);
    Ok(ended)
}

/// The monitoring endpoint, if wanted. The daemon works without it.
fn metrics_endpoint(settings: &Settings, board: &Arc<Board>) -> Result<Option<Endpoint>, MetricsError> {
    endpoint::address(&settings.metrics.listen)?
        .map(|address| Endpoint::start(address, board.clone()))
        .transpose()
}

/// Undoes what the journal says is owed, without history or configuration. No daemon may run. Without `must_exist`, a
/// missing state directory means that nothing is owed.
///
/// # Errors
/// [`RestoreError::DaemonRuns`] or [`RestoreError::Ending`] while a daemon has the journal; else it cannot be used.
pub fn restore(
    state_directory: &Path,
    include_kept: bool,
    must_exist: bool,
) -> Result<Restored, RestoreError> {
    match std::fs::metadata(state_directory) {
        Ok(_) => {}
        Err(e) if e.kind() == std::io::ErrorKind::NotFound && !must_exist => {
            return Ok(Restored {
                report: RecoveryReport::default(),
                breakpoints: Mended::default(),
                complaints: Vec::new(),
                damaged: false,
            });
        }
        Err(source) => {
            return Err(RestoreError::Directory {
                path: state_directory.to_owned(),
                source,
            });
        }
    }
    // First: it works even if the journal cannot be opened.
    let breakpoints = homeostat_probes::mend(state_directory);
    let boot_id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id")
        .map_err(RestoreError::Boot)?
        .trim()
        .to_owned();
    let (mut journal, recovered) = open_journal(state_directory, true).map_err(|e| match e {
        JournalError::Held { pid: Some(pid), .. } if crate::process::is_ending(pid) => {
            RestoreError::Ending { pid }
        }
        JournalError::Held { pid, .. } => RestoreError::DaemonRuns { pid },
        e => RestoreError::Journal(e),
    })?;
    let mut effectors = Registry::new(&Root::default());
    let mut report = homeostat_runtime::restore(
        &mut journal,
        &mut effectors,
        &MonotonicClock,
        &boot_id,
        include_kept,
    );
    let by_hand = crate::tunables::recover(state_directory);
    report.undone.extend(by_hand.report.undone);
    report.failed.extend(by_hand.report.failed);
    report.unrecorded.extend(by_hand.report.unrecorded);
    let damaged = !recovered.is_whole() || !by_hand.complaints.is_empty();
    let mut complaints = recovered.complaints();
    complaints.extend(by_hand.complaints);
    Ok(Restored {
        report,
        breakpoints,
        complaints,
        damaged,
    })
}

/// Why nothing could be restored.
#[derive(Debug, thiserror::Error)]
pub enum RestoreError {
    /// The journal's holder was killed or is ending, and is not gone yet.
    #[error(
        "process {pid} has the journal and is ending, but the kernel has not let it go yet\n  hint: run `homeostat restore` again when it is gone (`ps -p {pid}`); until then what it changed stays in force"
    )]
    Ending {
        /// Its process id.
        pid: u32,
    },
    /// A daemon runs.
    #[error("a homeostat daemon runs{} (or another `restore`) and has the journal\n  hint: `homeostat undo --all` asks it to undo everything; or stop it first", pid_text(*pid))]
    DaemonRuns {
        /// Its process id, if it is known.
        pid: Option<u32>,
    },
    /// The state directory cannot be read.
    #[error("cannot look into the state directory {}: {source}\n  hint: name the one the daemon used with --state-dir, as the same user", path.display())]
    Directory {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The journal cannot be used.
    #[error("{0}")]
    Journal(#[from] JournalError),
    /// It is not known in which boot this is.
    #[error("cannot read /proc/sys/kernel/random/boot_id: {0}\n  hint: mount /proc")]
    Boot(std::io::Error),
}

/// The result of `restore`.
#[derive(Clone, Debug)]
pub struct Restored {
    /// Action by action.
    pub report: RecoveryReport,
    /// Remains in counted programs.
    pub breakpoints: Mended,
    /// Faults of the journal.
    pub complaints: Vec<String>,
    /// Records were lost to damage: something may be in force that nobody knows of any more.
    pub damaged: bool,
}

fn pid_text(pid: Option<u32>) -> String {
    pid.map_or_else(String::new, |pid| format!(" (process {pid})"))
}

/// Why the past cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum PastError {
    /// There is no history yet.
    #[error("there is no history in {}\n  hint: it begins when `homeostat run` runs for the first time", .0.display())]
    None(PathBuf),
    /// It may not be read.
    #[error("{}: permission denied\n  hint: the history may be read by root", .0.display())]
    Denied(PathBuf),
    /// It cannot be read.
    #[error("{0}")]
    History(#[from] HistoryError),
}

pub(crate) fn open_past(state_directory: &Path) -> Result<History, PastError> {
    let file = state_directory.join(HISTORY_FILE);
    std::fs::File::open(&file).map_err(|e| match e.kind() {
        std::io::ErrorKind::NotFound => PastError::None(state_directory.to_owned()),
        std::io::ErrorKind::PermissionDenied => PastError::Denied(file.clone()),
        _ => HistoryError::Unreachable {
            path: file.clone(),
            why: e.to_string(),
        }
        .into(),
    })?;
    Ok(History::open_read_only(&file)?)
}

/// Past experiments, newest first, with or without a daemon. Blocks come with a single experiment only.
///
/// # Errors
/// [`PastError`].
pub fn past(
    state_directory: &Path,
    workload: Option<&str>,
    id: Option<u64>,
    limit: u32,
) -> Result<Past, PastError> {
    let history = open_past(state_directory)?;
    let records = history.experiments(&ExperimentFilter {
        workload: workload.map(WorkloadId::new),
        id: id.map(ExperimentId),
        limit,
        blocks: id.is_some(),
        ..ExperimentFilter::default()
    })?;
    Ok(Past {
        schema: SCHEMA,
        experiments: records.iter().map(Into::into).collect(),
    })
}

/// Removed with its content when dropped.
struct Scratch(PathBuf);

impl Scratch {
    fn new() -> std::io::Result<Self> {
        use std::os::unix::fs::DirBuilderExt;
        let path = std::env::temp_dir().join(format!("homeostat-plan-{}", std::process::id()));
        std::fs::DirBuilder::new().mode(0o700).create(&path)?;
        Ok(Self(path))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Runs the engine for some time without acting, and returns what it would try. Does not touch the daemon's journal and
/// history. `go_on` sees the state at intervals and ends it with false.
///
/// # Errors
/// As [`run`].
pub fn rehearse(
    sources: &Sources,
    root: Option<&Path>,
    length: Nanoseconds,
    go_on: impl FnMut(&Status, Nanoseconds) -> bool,
) -> Result<Status, RunError> {
    rehearse_recorded(sources, root, length, None, go_on)
}

/// As [`rehearse`], and records the engine into a new file, up to the limit.
///
/// # Errors
/// Also when the file cannot be made.
pub fn rehearse_recorded(
    sources: &Sources,
    root: Option<&Path>,
    length: Nanoseconds,
    record: Option<(&Path, Bytes)>,
    mut go_on: impl FnMut(&Status, Nanoseconds) -> bool,
) -> Result<Status, RunError> {
    let Loaded { mut settings, .. } = settings::load(sources)?;
    settings.policy.mode = Mode::AdviseOnly;
    if root.is_none() {
        // Breakpoints are real even in a rehearsal.
        homeostat_probes::write_breakpoints_down_in(&settings.paths.state_directory);
    } else {
        settings.meters.breakpoints = false;
    }
    let scratch = Scratch::new()?;
    let (journal, _) = Journal::open(&scratch.0, JournalOptions::default())?;
    let clock = MonotonicClock;
    let history = ResilientHistory::open(
        &scratch.0.join(HISTORY_FILE),
        HistoryOptions::default(),
        clock.unix_seconds(),
    );
    let recorder = record
        .map(|(path, limit)| Recorder::create(path, limit))
        .transpose()?;
    let (mut runtime, _) = Runtime::start_recorded(
        platform_below(root, &settings),
        MonotonicClock,
        journal,
        history,
        homeostat_strategies::all(),
        settings.policy,
        recorder,
    )?;
    let start = clock.now();
    let mut shown = Nanoseconds::ZERO;
    loop {
        let turn = runtime.turn();
        let now = clock.now();
        let elapsed = now.saturating_sub(start);
        // People follow only a few pictures a second.
        if now.saturating_sub(shown) >= Nanoseconds::from_millis(500) {
            shown = now;
            if !go_on(&runtime.view(), elapsed) {
                break;
            }
        }
        if elapsed >= length || turn.finished {
            break;
        }
        clock.sleep(
            turn.wake_at
                .saturating_sub(now)
                .min(Nanoseconds::from_millis(500)),
        );
    }
    Ok(runtime.view())
}

#[cfg(test)]
mod tests {
    use super::*;
    use homeostat_runtime::RECOVERY_PATIENCE;

    #[test]
    fn each_machine_has_a_seed_of_its_own_that_stays() {
        let of = |seed, id: &str| mixed(seed, id.as_bytes());
        assert_eq!(of(7, "a0"), of(7, "a0"));
        assert_eq!(of(7, ""), 7);
        let all = [of(7, "a0"), of(7, "a1"), of(8, "a0"), of(7, "")];
        assert!((1..4).all(|n| !all[..n].contains(&all[n])), "{all:?}");
        assert_eq!(seed_of_this_machine(7), seed_of_this_machine(7));
    }

    /// Else the service manager would kill it half way, and again at each start.
    #[test]
    fn the_service_manager_waits_for_longer_than_recovery_takes() {
        let unit = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging/homeostat.service");
        let unit = std::fs::read_to_string(unit).unwrap();
        let recovery = RECOVERY_PATIENCE + crate::tunables::RECOVERY_PATIENCE;
        for (name, takes) in [
            ("TimeoutStartSec=", recovery),
            ("TimeoutStopSec=", recovery),
            ("TimeoutStopSec=", service::STOP_PATIENCE),
        ] {
            let line = unit.lines().find_map(|line| line.strip_prefix(name)).unwrap();
            let waits = Nanoseconds::from_secs(line.parse().unwrap());
            // Opening the journal, and taking breakpoints out of programs, come on top.
            assert!(waits >= takes + Nanoseconds::from_secs(30), "{name}{line}");
        }
    }
}
