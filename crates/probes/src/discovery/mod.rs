//! Probe sites: a search finds instructions that run once per unit of the program's work, without its help (crate
//! `points`). This serves programs that expose no counter and whose kernel work is not proportional to their work.
//!
//! Opening the meter starts a search on a separate thread ([`search`]), which takes 15 to 30 s. The meter is busy until
//! then. It counts one site, and a second one as a witness. The meter ends, and with it any trial based on it, if their
//! ratio moves, they fall silent, the program is replaced, or somebody traces it. Above the cost limit, counting is
//! sampled. Before a probe is attached or detached, the safety checks run ([`concern`](crate::concern)).
//!
//! The kernel removes the probes whenever homeostat exits.

mod active;
mod atlas;
mod compiled;
pub(super) mod image;
mod place;
mod probes;
mod rehearsal;
mod sampling;
mod search;
mod signals;
mod windows;

pub use compiled::cost as cost_in_compiled_code;

use crate::concern::threads;
use crate::crowd::Crowd;
use crate::strangers::Strangers;
use crate::turns::{Counting, Lost};
use homeostat_kernel::Root;
use homeostat_kernel::bpf::Counters;
use homeostat_kernel::perf::OpenError;
use homeostat_kernel::process::open_process;
use homeostat_meters::code_file::executable;
use homeostat_meters::common::{is_program, not_mine, refused, usable};
use homeostat_meters::cpu_time::ticks;
use homeostat_meters::{Meter, MeterKind, MeterSettings, PointsWish};
use homeostat_model::{MeterCandidate, MeterClass, MeterId, Nanoseconds, ProcessId, Workload, WorkloadId};
use homeostat_platform::PlatformError;
use homeostat_points::choice::{Limits, Observation};
use homeostat_sensors::storage::Refusal;
use search::{At, Ended, Found};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, TryRecvError};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

const ID: &str = "points";
const UNIT: &str = "turn of its work";
/// Delay before repeating a search that found nothing: a search costs the program a little.
const REST: Duration = Duration::from_secs(3600);
/// … if the obstacle may pass.
const REST_NOW: Duration = Duration::from_secs(60);
/// … if generated code was replaced: a compiler that has begun to replace code goes on.
const REST_COMPILED: Duration = Duration::from_secs(300);
/// Programs known to compile code at run time.
const COMPILERS: [&str; 8] = [
    "java", "node", "nodejs", "deno", "bun", "dotnet", "luajit", "pypy3",
];
/// Most lasting failures in a row to count at a found site.
const FAILURES_MAX: u32 = 3;
const REMEMBERED_MAX: usize = 256;

/// A program at the time of its search.
type Key = (WorkloadId, ProcessId, (u64, u64));

#[derive(Clone)]
enum Known {
    Found {
        found: Box<Found>,
        account: String,
        failures: u32,
    },
    Nothing {
        why: Refusal,
        /// No new search before this time.
        until: Instant,
        /// What the search did and cost, if there was one.
        account: Option<String>,
    },
}

/// Results of searches, shared with running searches.
type Memory = Arc<Mutex<BTreeMap<Key, Known>>>;

/// The meter kind.
pub struct Points {
    wish: PointsWish,
    /// Watch for untrusted users, if nobody asked for probe sites.
    strangers: Arc<Mutex<Strangers>>,
    limits: Limits,
    memory: Memory,
    /// Whether this kernel and user can count, once tried.
    possible: Option<Result<(), String>>,
}

impl Points {
    pub(super) fn new(settings: &MeterSettings) -> Self {
        Self {
            wish: settings.progress_points,
            strangers: Arc::default(),
            limits: Limits {
                cost: settings.probe_cost_max,
                ..Limits::default()
            },
            memory: Memory::default(),
            possible: None,
        }
    }

    fn possible(&mut self) -> Result<(), String> {
        if let Some(known) = &self.possible {
            return known.clone();
        }
        if !cfg!(target_arch = "x86_64") {
            return Err(
                "points are found in code of x86-64 only; name a meter in the configuration".to_owned(),
            );
        }
        let found = Counters::possible();
        let now = matches!(found, Err(OpenError::Busy(_)));
        let found = found.map_err(|e| {
            format!(
                "counting many places at once needs Linux 6.6 or later with BPF and uprobes, a kernel that counts by process \
                 (6.10, or a stable one of then), and CAP_BPF and CAP_PERFMON ({e}); run homeostat as root"
            )
        });
        // A lack of memory or descriptors passes.
        if !now {
            self.possible = Some(found.clone());
        }
        found
    }

    fn strangers(&self) -> Option<Arc<Mutex<Strangers>>> {
        (self.wish == PointsWish::Auto).then(|| Arc::clone(&self.strangers))
    }

    fn check(&mut self, root: &Root, workload: &Workload) -> Result<Key, String> {
        if self.wish == PointsWish::Never {
            return Err("meters.progress_points = false: progress points are not looked for".to_owned());
        }
        if !root.is_live() {
            return Err("this is a captured tree, not the running machine".to_owned());
        }
        if let Some(why) = self.strangers().and_then(|strangers| why_not(&strangers, root)) {
            return Err(why);
        }
        let main = *workload.processes.first().ok_or("it has no process")?;
        open_process(root, main).map_err(|e| e.to_string())?;
        self.possible()?;
        threads::at_liberty(root, main).map_err(|why| why.to_string())?;
        Crowd::of(root, &workload.processes)
            .allow()
            .map_err(|why| why.to_string())?;
        ticks(root, &workload.processes)?;
        let identity = executable(root, main).ok_or_else(|| {
            let remedy = if rustix::process::geteuid().is_root() {
                "not even by root here: it is the first process of another name space, or protected"
            } else {
                "run homeostat as root"
            };
            format!("the executable of process {main} cannot be looked at; {remedy}")
        })?;
        let key = (workload.id.clone(), main, identity);
        forget_the_ended(root, &self.memory);
        match lock(&self.memory).get(&key) {
            Some(Known::Nothing { why, until, .. }) if Instant::now() < *until => Err(why.to_string()),
            _ => Ok(key),
        }
    }
}

fn why_not(strangers: &Mutex<Strangers>, root: &Root) -> Option<String> {
    // A panic under this lock at worst forgot a user.
    let mut strangers = strangers.lock().unwrap_or_else(PoisonError::into_inner);
    strangers.why_not(root, Instant::now())
}

/// A failed search, with the reason and the time of the next.
fn nothing(why: Refusal, account: Option<String>) -> Known {
    let rest = match why {
        Refusal::Now(_) => REST_NOW,
        Refusal::Lasting(_) => REST,
    };
    Known::Nothing {
        why,
        until: Instant::now() + rest,
        account,
    }
}

fn lock(memory: &Memory) -> std::sync::MutexGuard<'_, BTreeMap<Key, Known>> {
    // A panic under this lock at worst forgot a result.
    memory.lock().unwrap_or_else(PoisonError::into_inner)
}

fn remember(memory: &Memory, key: &Key, known: Known) {
    let mut memory = lock(memory);
    if memory.len() >= REMEMBERED_MAX {
        memory.clear();
    }
    memory.insert(key.clone(), known);
}

/// Notes whether counting began. Repeated lasting failures count as a failed search.
fn note_opening(memory: &Memory, key: &Key, failed: Option<&PlatformError>) {
    let mut memory = lock(memory);
    let Some(Known::Found { failures, .. }) = memory.get_mut(key) else {
        return;
    };
    match failed {
        None => *failures = 0,
        // A lack of memory or descriptors passes, and ended programs are forgotten.
        Some(PlatformError::Busy { .. } | PlatformError::Vanished { .. }) => {}
        Some(why) => {
            *failures += 1;
            if *failures >= FAILURES_MAX {
                memory.insert(key.clone(), nothing(Refusal::Lasting(why.to_string()), None));
            }
        }
    }
}

/// Forgets a site that changed its meaning. A compiler that replaced generated code may do so again.
fn lost(memory: &Memory, key: &Key, why: &str) {
    let mut memory = lock(memory);
    if let Some(Known::Found { found, .. }) = memory.remove(key) {
        if matches!(found.at, At::Compiled { .. }) {
            let known = Known::Nothing {
                why: Refusal::Now(why.to_owned()),
                until: Instant::now() + REST_COMPILED,
                account: None,
            };
            memory.insert(key.clone(), known);
        }
    }
}

/// Forgets results of ended processes and closes their files.
fn forget_the_ended(root: &Root, memory: &Memory) {
    lock(memory).retain(|(_, process, _), _| open_process(root, *process).is_ok());
}

impl MeterKind for Points {
    fn find(&mut self, root: &Root, workload: &Workload) -> Vec<MeterCandidate> {
        vec![match self.check(root, workload) {
            Ok(key) => {
                let in_files = || rehearsal::known_cost(Crowd::of(root, &workload.processes));
                let compiles = is_program(workload, &COMPILERS);
                let (unit, hit) = match lock(&self.memory).get(&key) {
                    Some(Known::Found { found, .. }) => {
                        let hit = match found.at {
                            At::File { .. } => in_files(),
                            At::Compiled { .. } => found.hit_cost,
                        };
                        (format!("passage of {}", found.name()), hit)
                    }
                    // The search decides between the two. Until then, the higher cost is reported.
                    _ if compiles => (UNIT.to_owned(), compiled::known_cost()),
                    _ => (UNIT.to_owned(), in_files()),
                };
                MeterCandidate {
                    // For the site and its witness.
                    cost_per_count: Nanoseconds::from_secs_f64(2.0 * hit),
                    ..usable(ID, MeterClass::Points, &unit)
                }
            }
            Err(why) => refused(ID, MeterClass::Points, UNIT, why),
        }]
    }

    fn open(
        &mut self,
        root: &Root,
        workload: &Workload,
        id: &MeterId,
    ) -> Result<Box<dyn Meter>, PlatformError> {
        if id.as_str() != ID {
            return Err(not_mine(id));
        }
        let key = self.check(root, workload).map_err(|why| unsupported(&why))?;
        let limits = self.limits;
        // Not within the condition: that would hold the lock for the whole body, which takes it again.
        let known = lock(&self.memory).get(&key).cloned();
        if let Some(Known::Found { found, .. }) = known {
            let active = active::open(root, workload, &found, key.2, limits.cost);
            note_opening(&self.memory, &key, active.as_ref().err());
            let active = active?;
            return Ok(Box::new(PointsMeter {
                root: root.clone(),
                memory: self.memory.clone(),
                key,
                cost_max: limits.cost,
                strangers: self.strangers(),
                state: State::Active(Box::new(active)),
            }));
        }
        let stop = Arc::new(AtomicBool::new(false));
        let (sender, receiver) = std::sync::mpsc::channel();
        let (root_there, workload_there, stop_there) = (root.clone(), workload.clone(), stop.clone());
        std::thread::Builder::new()
            .name("points".to_owned())
            .spawn(move || {
                // The receiver may be gone.
                let _ = sender.send(search::search(&root_there, &workload_there, limits, &stop_there));
            })
            .map_err(|e| PlatformError::Busy {
                what: "starting the search for progress points".to_owned(),
                why: e.to_string(),
            })?;
        Ok(Box::new(PointsMeter {
            root: root.clone(),
            memory: self.memory.clone(),
            key,
            cost_max: limits.cost,
            strangers: self.strangers(),
            state: State::Searching { receiver, stop },
        }))
    }

    fn story(&self, workload: &Workload, id: &MeterId) -> Option<String> {
        (id.as_str() == ID).then(|| self.tale(workload)).flatten()
    }
}

impl Points {
    fn tale(&self, workload: &Workload) -> Option<String> {
        let memory = lock(&self.memory);
        let mine = |key: &Key| key.0 == workload.id && workload.processes.first() == Some(&key.1);
        memory
            .iter()
            .filter(|(key, _)| mine(key))
            .find_map(|(_, known)| match known {
                Known::Found { found, account, .. } => Some(format!(
                    "{}: {}. Found with {account}",
                    found.name(),
                    found.chosen.reason
                )),
                Known::Nothing { account, .. } => account
                    .as_ref()
                    .filter(|account| !account.is_empty())
                    .map(|account| format!("Nothing was found with {account}")),
            })
    }
}

fn not_yet(why: &str) -> PlatformError {
    PlatformError::Busy {
        what: "counting its work through progress points".to_owned(),
        why: why.to_owned(),
    }
}

fn unsupported(why: &str) -> PlatformError {
    PlatformError::Unsupported {
        what: "counting its work through progress points".to_owned(),
        why: why.to_owned(),
    }
}

enum State {
    Searching {
        receiver: Receiver<Ended>,
        stop: Arc<AtomicBool>,
    },
    Active(Box<Counting>),
    Over(String),
}

struct PointsMeter {
    root: Root,
    memory: Memory,
    key: Key,
    cost_max: f64,
    strangers: Option<Arc<Mutex<Strangers>>>,
    state: State,
}

impl PointsMeter {
    fn stop_search(&self) {
        if let State::Searching { stop, .. } = &self.state {
            stop.store(true, Ordering::Relaxed);
        }
    }

    fn nothing(&mut self, why: Refusal, account: Option<String>) -> PlatformError {
        remember(&self.memory, &self.key, nothing(why.clone(), account));
        let error = unsupported(&why.to_string());
        // Detaches now.
        self.state = State::Over(why.to_string());
        error
    }
}

impl Meter for PointsMeter {
    fn counted(&self) -> Option<f64> {
        match &self.state {
            State::Active(active) => active.share(),
            State::Searching { .. } | State::Over(_) => None,
        }
    }

    fn lag(&self) -> Nanoseconds {
        match &self.state {
            State::Active(active) => active.lag(),
            State::Searching { .. } | State::Over(_) => Nanoseconds::ZERO,
        }
    }

    fn is_over(&self) -> bool {
        match &self.state {
            State::Searching { .. } => false,
            State::Active(active) => active.is_over(),
            State::Over(_) => true,
        }
    }

    fn read(&mut self, workload: &Workload) -> Result<f64, PlatformError> {
        if !matches!(self.state, State::Over(_)) {
            if let Some(why) = self.strangers.as_ref().and_then(|s| why_not(s, &self.root)) {
                // The result stays known for when the users have gone. Detaches now.
                self.stop_search();
                self.state = State::Over(why);
            }
        }
        match &mut self.state {
            State::Over(why) => Err(unsupported(why)),
            State::Active(active) => match active.read(workload) {
                Ok(Some(work)) => Ok(work),
                Ok(None) => Err(not_yet("its probes are being put on")),
                Err(Lost::Paused(why)) => Err(not_yet(&why)),
                Err(Lost::Vanished(e)) => Err(e),
                // The site has changed its meaning. A later opening of the meter starts a new search.
                Err(Lost::Changed(why)) => {
                    lost(&self.memory, &self.key, &why);
                    self.state = State::Over(why.clone());
                    Err(unsupported(&why))
                }
            },
            State::Searching { receiver, .. } => match receiver.try_recv() {
                Err(TryRecvError::Empty) => Err(not_yet("they are still being looked for")),
                Err(TryRecvError::Disconnected) => {
                    Err(self.nothing(Refusal::Now("the search broke off".to_owned()), None))
                }
                Ok(Ended {
                    result: Err(why),
                    account,
                    ..
                }) => Err(self.nothing(why, Some(account))),
                Ok(Ended {
                    result: Ok(found),
                    account,
                    ..
                }) => {
                    // Its rate may be different in an hour.
                    if let Err(why) = active::rest(&found, self.cost_max) {
                        return Err(self.nothing(Refusal::Lasting(why), Some(account)));
                    }
                    let known = Known::Found {
                        found: Box::new(found.clone()),
                        account,
                        failures: 0,
                    };
                    remember(&self.memory, &self.key, known);
                    match active::open(&self.root, workload, &found, self.key.2, self.cost_max) {
                        Ok(active) => {
                            self.state = State::Active(Box::new(active));
                            Err(not_yet("its probes are being put on"))
                        }
                        // The result stays known for a while, so that the next opening needs no search.
                        Err(e) => {
                            note_opening(&self.memory, &self.key, Some(&e));
                            self.state = State::Over(e.to_string());
                            Err(e)
                        }
                    }
                }
            },
        }
    }
}

impl Drop for PointsMeter {
    fn drop(&mut self) {
        self.stop_search();
    }
}

/// Result of a search, for people and recordings.
#[derive(Clone, Debug)]
pub struct PointsReport {
    /// Name of the site, or why there is none.
    pub result: Result<String, String>,
    /// Why the site can be trusted.
    pub reason: Option<String>,
    /// What the search did and cost.
    pub account: String,
    /// Counts of the last round.
    pub observation: Option<Observation>,
}

/// Searches a workload's probe sites now, in the calling thread, for up to 40 s. No probe stays attached.
pub fn find_points(root: &Root, workload: &Workload) -> PointsReport {
    let ended = search::search(root, workload, Limits::default(), &AtomicBool::new(false));
    PointsReport {
        reason: ended.result.as_ref().ok().map(|f| f.chosen.reason.clone()),
        result: ended
            .result
            .map(|f| f.name().to_owned())
            .map_err(|why| why.to_string()),
        account: ended.account,
        observation: ended.observation,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use homeostat_kernel::process::start_ticks;

    #[test]
    fn what_was_found_in_processes_that_have_ended_is_forgotten() {
        let stat = std::fs::read("/proc/self/stat").unwrap();
        let living = ProcessId {
            pid: i32::try_from(std::process::id()).unwrap(),
            start_ticks: start_ticks(&stat).unwrap(),
        };
        // Its number belongs to another by now.
        let ended = ProcessId {
            start_ticks: living.start_ticks + 1,
            ..living
        };
        let memory = Memory::default();
        for process in [living, ended] {
            let known = nothing(Refusal::Now("busy".to_owned()), None);
            remember(&memory, &(WorkloadId::from("x"), process, (1, 2)), known);
        }
        forget_the_ended(&Root::default(), &memory);
        let left: Vec<ProcessId> = lock(&memory).keys().map(|key| key.1).collect();
        assert_eq!(left, [living]);
    }

    #[test]
    fn when_somebody_comes_who_is_not_trusted_it_ends() {
        use std::fs;
        let tree = tempfile::tempdir().unwrap();
        let root = Root::new(tree.path());
        let put = |path: &str, text: &str| {
            let path = root.path(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        put("/proc/1/loginuid", "4294967295");
        let meter = |strangers| {
            // Nobody answers yet, and nobody breaks off.
            let (sender, receiver) = std::sync::mpsc::channel();
            let stop = Arc::new(AtomicBool::new(false));
            let process = ProcessId {
                pid: 7,
                start_ticks: 1,
            };
            let meter = PointsMeter {
                root: root.clone(),
                memory: Memory::default(),
                key: (WorkloadId::from("x"), process, (1, 2)),
                cost_max: 0.005,
                strangers,
                state: State::Searching {
                    receiver,
                    stop: stop.clone(),
                },
            };
            (meter, stop, sender)
        };
        let workload = workload_of(Vec::new());
        let (mut watched, stop, _sender) = meter(Some(Arc::default()));
        assert!(matches!(watched.read(&workload), Err(PlatformError::Busy { .. })));
        // A look holds for five seconds: another one who watches.
        put("/proc/9/loginuid", "1002");
        watched.strangers = Some(Arc::default());
        let told = watched.read(&workload).unwrap_err();
        assert!(matches!(told, PlatformError::Unsupported { .. }), "{told:?}");
        assert!(told.to_string().contains("user 1002"), "{told}");
        assert!(stop.load(Ordering::Relaxed), "the search ends, too");
        assert!(watched.is_over());
        assert!(matches!(
            watched.read(&workload),
            Err(PlatformError::Unsupported { .. })
        ));
        // A person asked for them.
        let (mut asked_for, stop, _sender) = meter(None);
        assert!(matches!(
            asked_for.read(&workload),
            Err(PlatformError::Busy { .. })
        ));
        assert!(!stop.load(Ordering::Relaxed));
        assert!(!asked_for.is_over());
    }

    fn workload_of(processes: Vec<ProcessId>) -> Workload {
        Workload {
            id: "x".into(),
            kind: homeostat_model::WorkloadKind::ProcessGroup,
            former: None,
            owner: homeostat_model::Owner::Machine,
            others: Vec::new(),
            fingerprint: homeostat_model::Fingerprint::new("x"),
            program: "x".into(),
            executable: String::new(),
            processes,
            choice: homeostat_model::OperatorChoice::default(),
        }
    }

    /// A place in code that no file holds, where there is none.
    fn found_nowhere() -> Known {
        let found = Found {
            at: At::Compiled {
                place: compiled::Instruction {
                    address: 0,
                    bytes: vec![0x90],
                    name: "own+0x0".to_owned(),
                },
                witness: None,
            },
            chosen: homeostat_points::choice::Chosen {
                point: 0,
                witness: None,
                cluster: vec![0],
                rate: 100.0,
                noise: 0.0,
                duty: 1.0,
                reason: "test".to_owned(),
            },
            hit_cost: 1e-6,
            hit_cost_seen: 1e-6,
            costs: std::collections::BTreeMap::new(),
            cpus: 1.0,
            executables: std::collections::BTreeSet::new(),
        };
        Known::Found {
            found: Box::new(found),
            account: String::new(),
            failures: 0,
        }
    }

    /// Whoever holds what is remembered and takes it once more stands still for good: in a thread of its own, so that this test ends.
    #[test]
    fn what_was_found_is_opened_again_without_waiting_for_itself() {
        let mut program = std::process::Command::new("sleep").arg("600").spawn().unwrap();
        let pid = i32::try_from(program.id()).unwrap();
        let stat = std::fs::read(format!("/proc/{pid}/stat")).unwrap();
        let main = ProcessId {
            pid,
            start_ticks: start_ticks(&stat).unwrap(),
        };
        let workload = workload_of(vec![main]);
        let (tell, told) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            let mut kind = Points::new(&MeterSettings {
                progress_points: PointsWish::Always,
                ..MeterSettings::default()
            });
            // Nothing is counted in the kernel's way here.
            kind.possible = Some(Ok(()));
            let root = Root::default();
            let steps: Result<(), String> = kind.check(&root, &workload).and_then(|key| {
                remember(&kind.memory, &key, found_nowhere());
                for _ in 0..2 {
                    kind.open(&root, &workload, &MeterId::new(ID))
                        .map_err(|e| e.to_string())?;
                }
                Ok(())
            });
            // Whoever listened may have given up.
            let _ = tell.send(steps);
        });
        let ended = told.recv_timeout(Duration::from_secs(60));
        let _ = program.kill();
        let _ = program.wait();
        match ended {
            Ok(Ok(())) => {}
            Ok(Err(why)) => eprintln!("skipped: {why}"),
            Err(_) => panic!("it stands still"),
        }
    }

    #[test]
    fn a_search_that_found_nothing_tells_what_it_did() {
        let main = ProcessId {
            pid: 1,
            start_ticks: 1,
        };
        let workload = workload_of(vec![main]);
        let kind = Points::new(&MeterSettings::default());
        let key: Key = (workload.id.clone(), main, (1, 2));
        let tale = || kind.story(&workload, &MeterId::new(ID));
        let why = || Refusal::Lasting("nothing there".to_owned());
        remember(&kind.memory, &key, nothing(why(), None));
        assert_eq!(tale(), None);
        remember(&kind.memory, &key, nothing(why(), Some("12 samples".to_owned())));
        assert_eq!(tale().as_deref(), Some("Nothing was found with 12 samples"));
    }

    #[test]
    fn what_was_found_and_can_never_be_counted_is_judged() {
        let key: Key = (
            WorkloadId::from("x"),
            ProcessId {
                pid: 1,
                start_ticks: 1,
            },
            (1, 2),
        );
        let known = found_nowhere();
        let memory = Memory::default();
        remember(&memory, &key, known.clone());
        let is_found = || matches!(lock(&memory).get(&key), Some(Known::Found { .. }));
        let (lasting, passing) = (unsupported("no such thing"), not_yet("no memory"));
        for _ in 0..10 {
            note_opening(&memory, &key, Some(&passing));
        }
        for _ in 1..FAILURES_MAX {
            note_opening(&memory, &key, Some(&lasting));
        }
        note_opening(&memory, &key, None);
        for _ in 1..FAILURES_MAX {
            note_opening(&memory, &key, Some(&lasting));
            assert!(is_found());
        }
        note_opening(&memory, &key, Some(&lasting));
        assert!(
            matches!(
                lock(&memory).get(&key),
                Some(Known::Nothing {
                    why: Refusal::Lasting(_),
                    ..
                })
            ),
            "it is not tried for ever"
        );
        // Code that was compiled anew is not looked into at once.
        remember(&memory, &key, known);
        lost(&memory, &key, "made anew");
        let rests = matches!(
            lock(&memory).get(&key),
            Some(Known::Nothing { why: Refusal::Now(_), until, .. }) if *until > Instant::now() + REST_NOW
        );
        assert!(rests);
    }
}
