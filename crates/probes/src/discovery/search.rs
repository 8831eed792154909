//! Searches a running program for probe sites: samples stacks, counts candidates in rounds, and chooses.
//!
//! The search is bounded in time ([`TIME_MAX`]), in cost to the program ([`COST_MAX`]) and in the number of candidates.
//! It runs for seconds on a separate thread, and removes all probes before it returns. One search runs at a time,
//! because it loads the program and the machine.

use crate::concern::census::Census;
use crate::concern::keeper::Held;
use crate::concern::{Files, Looked, Others, threads};
use crate::crowd::{AtOnce, Crowd};
use crate::discovery::atlas::{Atlas, Frame};
use crate::discovery::compiled;
use crate::discovery::compiled::{Counted, Instruction, Memory, Sets, Switches};
use crate::discovery::image::Image;
use crate::discovery::place::{Patched, Place, same_program};
use crate::discovery::rehearsal::rehearse;
use crate::discovery::windows::most_paid;
use crate::owed::{Entry, Owed, is_replaced};
use crate::turns::{Children, FORKS_MAX, Urgent};
use homeostat_kernel::Root;
use homeostat_kernel::bpf::{Counters, Link};
use homeostat_kernel::perf::OpenError;
use homeostat_kernel::process::open_process;
use homeostat_meters::common::PROCESSES_MAX;
use homeostat_meters::cpu_time::{CpuTime, tick, ticks, waiting};
use homeostat_model::{ProcessId, Workload};
use homeostat_points::choice::{self, Choice, Chosen, Limits, Observation};
use homeostat_points::code::Candidate;
use homeostat_sensors::storage::Refusal;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

pub(super) const TIME_MAX: Duration = Duration::from_secs(40);
/// Longest wait for another search.
const TURN_MAX: Duration = Duration::from_secs(120);
/// Most CPU time that the probes of a search may take from the program (seconds).
pub(super) const COST_MAX: f64 = 1.0;
/// Most candidates that are counted.
pub(super) const CANDIDATES_MAX: usize = 640;
/// Size and duration of the first round's chunks: some candidates run millions of times a second.
const FIRST_CHUNK: usize = 32;
const FIRST_TIME: Duration = Duration::from_millis(5);
const FIRST_PAY: Duration = Duration::from_millis(2);
/// The same for generated code, where a hit costs ten times as much. The duration spans several ticks of the CPU clock
/// (4 ms).
const FIRST_TIME_COMPILED: Duration = Duration::from_millis(60);
const FIRST_PAY_COMPILED: Duration = Duration::from_millis(16);
/// The wait for a program with little CPU time grows up to this factor.
const PATIENCE: u32 = 6;
/// … and is at least this: on a busy machine, a scheduling delay may take as long.
const PATIENCE_MIN: Duration = Duration::from_millis(300);
/// Candidates with more hits per second are never counted …
const FLOOD: f64 = 250_000.0;
/// … and are dropped after the short first round only above this.
const FLOOD_ROUGH: f64 = 2.0 * FLOOD;
/// Candidates with fewer hits in the first round are counted again, for longer.
const RARE: f64 = 3_000.0;
const SECOND_TIME: Duration = Duration::from_millis(120);
const SECOND_PAY: Duration = Duration::from_millis(8);
const SECOND_CHUNK: usize = 128;
/// Too busy for the second round, which is for rare candidates.
const BUSY: f64 = 8_000.0;
const SECOND_TRIES: u32 = 5;
/// Most CPU time for confirming rates (seconds). Then the search goes on with the known rates.
const SURE_PAY: f64 = 0.2;
/// Rates of the first round are too small by at most this factor.
const ROUGH_BY: f64 = 5.0;
/// Most candidates of the last round, in all and per function.
const LAST_MAX: usize = 64;
/// Most candidates in generated code, where few are counted at once.
const CANDIDATES_MAX_COMPILED: usize = 48;
const LAST_OF_FUNCTION: usize = 16;
/// … and per rate for costly ones (rates differ by this logarithm).
const LAST_ALIKE: usize = 4;
const ALIKE: f64 = 0.25;
/// Most CPU time of the last round's probes, as a share of the program's. A server that runs every site for each of
/// 100,000 requests a second allows few. Costlier sites get shorter windows.
const LAST_COST: f64 = 0.3;
/// … and of the first two costly sites.
const LAST_COST_OF_TWO: f64 = 0.5;
/// Most processes of a program that are searched, with one link each.
const LINKS_MAX: usize = 8;
/// Interval between checks for tracers and freezers while counting.
const LIBERTY_EVERY: Duration = Duration::from_millis(10);
/// A released probe is off after this many checks without a hit, at this interval, within this time.
const OFF_LOOKS: u32 = 3;
const OFF_EVERY: Duration = Duration::from_millis(2);
const OFF_MAX: Duration = Duration::from_millis(2_100);
/// Held by the running search.
static TURN: Mutex<()> = Mutex::new(());

/// Where the count takes place.
#[derive(Clone, Debug)]
pub(super) enum At {
    /// In code of files.
    File { place: Place, witness: Option<Place> },
    /// In generated code.
    Compiled {
        place: Instruction,
        witness: Option<Instruction>,
    },
}

#[derive(Clone, Debug)]
pub(super) struct Found {
    pub(super) at: At,
    pub(super) chosen: Chosen,
    /// Cost of a hit here (seconds of CPU time) if all threads that can run at once hit …
    pub(super) hit_cost: f64,
    /// … with as many as ran at once during the search …
    pub(super) hit_cost_seen: f64,
    /// … and by number of threads, in code of files.
    pub(super) costs: BTreeMap<usize, f64>,
    pub(super) cpus: f64,
    /// Programs of its processes (device and inode).
    pub(super) executables: BTreeSet<(u64, u64)>,
}

impl Found {
    pub(super) fn name(&self) -> &str {
        match &self.at {
            At::File { place, .. } => &place.name,
            At::Compiled { place, .. } => &place.name,
        }
    }
}

/// No files, for checks before any is known.
fn no_files() -> Files {
    Files {
        targets: Vec::new(),
        others: Others::None,
        pages: CANDIDATES_MAX as u64,
        looked: Looked::default(),
    }
}

pub(super) enum Attached {
    Files(Held<Vec<Link>>),
    Compiled(Counted),
}

impl Attached {
    /// Detaches the probes if this blocks nobody.
    ///
    /// # Errors
    /// Names the process that stands still.
    pub(super) fn let_go(self) -> Result<(), Refusal> {
        match self {
            Self::Files(held) => held.let_go(),
            Self::Compiled(counted) => {
                drop(counted);
                Ok(())
            }
        }
    }
}

#[derive(Clone, Debug)]
pub(super) struct Ended {
    /// The site, or why there is none.
    pub(super) result: Result<Found, Refusal>,
    /// Counts of the last round.
    pub(super) observation: Option<Observation>,
    pub(super) account: String,
}

/// Waits for another search to end.
fn turn(stop: &AtomicBool) -> Result<MutexGuard<'static, ()>, Refusal> {
    let begun = Instant::now();
    loop {
        match TURN.try_lock() {
            Ok(guard) => return Ok(guard),
            // A panicked search leaves no state that matters to the next.
            Err(TryLockError::Poisoned(e)) => return Ok(PoisonError::into_inner(e)),
            Err(TryLockError::WouldBlock) => {}
        }
        if stop.load(Ordering::Relaxed) {
            return Err(Refusal::Now("the search was called off".to_owned()));
        }
        if begun.elapsed() > TURN_MAX {
            return Err(Refusal::Now(format!(
                "other programs were being searched for more than {} s; it is tried again later",
                TURN_MAX.as_secs()
            )));
        }
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// Runs a search. `stop` ends it early.
pub(super) fn search(root: &Root, workload: &Workload, limits: Limits, stop: &AtomicBool) -> Ended {
    let begun = turn(stop).and_then(|turn| Ok((turn, Search::begin(root, workload, limits, stop)?)));
    let (_turn, mut search) = match begun {
        Ok(begun) => begun,
        Err(why) => {
            return Ended {
                result: Err(why),
                observation: None,
                account: String::new(),
            };
        }
    };
    let result = search.run();
    search.finish();
    Ended {
        result,
        account: search.account(),
        observation: search.observation.take(),
    }
}

/// A candidate in the process.
#[derive(Clone, Debug)]
pub(super) struct Spot {
    pub(super) image: usize,
    pub(super) candidate: Candidate,
    pub(super) offset: u64,
    pub(super) function: u64,
    /// Share of the samples with it, or with the interpreter function around it, on the stack …
    pub(super) coverage: f64,
    /// … and with itself.
    pub(super) own: f64,
    /// Mean distance from the top of the stack (words).
    depth: f64,
    /// Hits per second.
    pub(super) rate: f64,
}

impl Spot {
    /// Updates the rate from a count with others. `spoilt`: one of them was hit too often, so the count lasted only
    /// milliseconds. It then replaces no longer count of a rare candidate, and a low count says nothing of a busy one.
    fn made_sure(&mut self, rate: f64, spoilt: bool) {
        if rate >= RARE || (self.rate >= RARE && !spoilt) {
            self.rate = rate;
        }
    }

    fn is_at(&self) -> (usize, u64) {
        (self.image, self.offset)
    }
}

/// Drops candidates that are confirmed as too busy. Splits off those whose rough rate, corrected by the largest error
/// found so far, would be too high: they are tried only if nothing else is left. Most sites of a loop run equally often,
/// and would be tried one after the other.
fn without_floods(pool: Vec<Spot>, made_sure: &[Spot]) -> (Vec<Spot>, Vec<Spot>) {
    let sure: BTreeMap<(usize, u64), f64> = made_sure.iter().map(|s| (s.is_at(), s.rate)).collect();
    // A flood leaves little time, so rates measured with it are too high.
    let is_flooded = sure.values().any(|rate| *rate > FLOOD_ROUGH);
    let flood = if is_flooded { FLOOD_ROUGH } else { FLOOD };
    let too_small = pool
        .iter()
        .filter(|rough| rough.rate >= RARE)
        .filter_map(|rough| Some((rough.rate, *sure.get(&rough.is_at())?)))
        .filter(|(_, sure)| *sure > flood)
        .map(|(rough, sure)| (sure / rough).min(ROUGH_BY))
        .fold(1.0, f64::max);
    pool.into_iter()
        .filter_map(|mut spot| match sure.get(&spot.is_at()) {
            Some(rate) if *rate > flood => None,
            Some(rate) => {
                spot.rate = *rate;
                Some(spot)
            }
            None => Some(spot),
        })
        .partition(|s| sure.contains_key(&s.is_at()) || s.rate < RARE || s.rate * too_small <= FLOOD)
}

pub(super) struct Search<'a> {
    pub(super) root: &'a Root,
    pub(super) workload: &'a Workload,
    /// Limits of the choice, at the cost of a hit when all possible threads hit at once: counting will last for hours.
    pub(super) limits: Limits,
    /// Cost of a hit with the threads that run at once in this search.
    at_once: AtOnce,
    cpu_time: CpuTime,
    stop: &'a AtomicBool,
    pub(super) begun: Instant,
    /// Its processes, with the program of each at the start (device and inode).
    subjects: Vec<(ProcessId, (u64, u64))>,
    counters: Counters,
    /// Files with its code. `None`: the file could not be parsed.
    pub(super) images: Vec<Option<Image>>,
    /// Counters in generated code. `None`: the code is in files.
    pub(super) compiled: Option<Sets>,
    pub(super) spots: Vec<Spot>,
    /// Share of the samples in waiting loops.
    pub(super) waiting: f64,
    /// Share of the waits of its busiest threads for several connections at once.
    pub(super) gathering: f64,
    samples: usize,
    candidates: usize,
    /// Cost to the program so far (seconds of CPU time).
    pub(super) paid: f64,
    /// CPUs that the program used at first.
    pub(super) cpus: f64,
    /// For each part: seconds, CPU time of the program, and remaining candidates.
    parts: Vec<(String, f64, f64, usize)>,
    observation: Option<Observation>,
    closing: Vec<JoinHandle<Result<(), Refusal>>>,
    /// The clean-up log entry, from before the first probe.
    owed: Option<Arc<Owed>>,
    /// Last time at which no tracer or freezer was seen.
    liberty: Option<Instant>,
    /// Children forked meanwhile, which pay too.
    children: Children,
    /// Number of forks, and since when they are counted.
    forked: (usize, Instant),
}

impl<'a> Search<'a> {
    fn begin(
        root: &'a Root,
        workload: &'a Workload,
        limits: Limits,
        stop: &'a AtomicBool,
    ) -> Result<Self, Refusal> {
        let counters = Counters::new(CANDIDATES_MAX as u32).map_err(|e| refusal(&e))?;
        let mut subjects = Vec::new();
        for process in workload.processes.iter().take(PROCESSES_MAX) {
            subjects.extend(
                homeostat_meters::code_file::executable(root, *process).map(|identity| (*process, identity)),
            );
        }
        if subjects.is_empty() {
            return Err("it has ended, or cannot be looked at: run homeostat as root".into());
        }
        if subjects.len() > LINKS_MAX {
            return Err(Refusal::Lasting(format!(
                "it has {} processes; points are looked for in programs of at most {LINKS_MAX}",
                subjects.len()
            )));
        }
        let processes: Vec<ProcessId> = subjects.iter().map(|s| s.0).collect();
        let crowd = Crowd::of(root, &processes);
        crowd.allow()?;
        // One system call (sched_setaffinity) changes where threads may run.
        ticks(root, &processes).map_err(Refusal::Now)?;
        let at_once = AtOnce::new(crowd, rehearse(root, crowd)?);
        let all_at_once = at_once.cost();
        // Checks first, with no file known, whether the program can be probed at all.
        no_files().allow_first(root, &processes)?;
        Ok(Self {
            root,
            workload,
            limits: Limits {
                hit_cost: all_at_once,
                ..limits
            },
            at_once,
            cpu_time: CpuTime::default(),
            stop,
            begun: Instant::now(),
            subjects,
            counters,
            images: Vec::new(),
            compiled: None,
            spots: Vec::new(),
            waiting: 0.0,
            gathering: 0.0,
            samples: 0,
            candidates: 0,
            paid: 0.0,
            cpus: 0.0,
            parts: Vec::new(),
            observation: None,
            closing: Vec::new(),
            owed: None,
            liberty: None,
            children: Children::default(),
            forked: (0, Instant::now()),
        })
    }

    pub(super) fn processes(&self) -> impl Iterator<Item = ProcessId> {
        self.subjects.iter().map(|(process, _)| *process)
    }

    fn finish(&mut self) {
        for thread in self.closing.drain(..) {
            // A panicked thread has dropped its links, too.
            let _ = thread.join();
        }
        self.owed = None;
    }

    /// Logs all possible sites of the search in the clean-up log.
    fn owe(&self) -> Result<Arc<Owed>, Refusal> {
        let mut by_image: BTreeMap<usize, Vec<(u64, u32)>> = BTreeMap::new();
        for spot in &self.spots {
            by_image.entry(spot.image).or_default().push((spot.offset, 0));
        }
        let processes: Vec<ProcessId> = self.processes().collect();
        let entries = by_image.into_iter().filter_map(|(number, places)| {
            let image = self.image(number)?;
            Some(Entry::new(&image.target(), places, &processes))
        });
        Owed::begin(self.root, entries.collect::<Result<_, _>>()?)
    }

    /// Waits until released probes are no longer hit.
    ///
    /// # Errors
    /// Still hit: a process that stands still delays the removal.
    pub(super) fn are_off(&mut self, spots: &[usize]) -> Result<(), Refusal> {
        let threads = std::mem::take(&mut self.closing);
        let (ended, closing): (Vec<_>, Vec<_>) = threads.into_iter().partition(JoinHandle::is_finished);
        self.closing = closing;
        for thread in ended {
            // A panicked thread has dropped its links, too.
            thread.join().unwrap_or(Ok(()))?;
        }
        if self.closing.is_empty() {
            return Ok(());
        }
        let begun = Instant::now();
        let first = self.read(spots);
        let (mut last, mut still) = (first.clone(), 0);
        while still < OFF_LOOKS {
            self.go_on_after(hits_between(&first, &last))?;
            self.at_liberty()?;
            if begun.elapsed() > OFF_MAX {
                return Err(Refusal::Now(
                    "breakpoints that slow it for a moment could not be taken off in time".to_owned(),
                ));
            }
            std::thread::sleep(OFF_EVERY);
            let now = self.read(spots);
            still = if now == last { still + 1 } else { 0 };
            last = now;
        }
        Ok(())
    }

    /// Detaches on a separate thread. The kernel removes breakpoints first and then waits some 40 ms, which windows do
    /// not wait for ([`are_off`](Self::are_off)). Without a thread, the links are dropped here, only slower.
    pub(super) fn let_go(&mut self, attached: Attached) {
        let Attached::Files(held) = attached else {
            // There are few hardware breakpoints, and they go at once.
            return;
        };
        let thread = std::thread::Builder::new()
            .name("points-close".to_owned())
            .stack_size(128 * 1024)
            .spawn(move || held.let_go());
        self.closing.extend(thread);
    }

    fn account(&self) -> String {
        let parts: Vec<String> = self
            .parts
            .iter()
            .map(|(name, seconds, paid, places)| {
                format!("{name}: {seconds:.1} s, {paid:.2} s of its CPU time, {places} places left")
            })
            .collect();
        format!(
            "{} samples of its stacks, {} places tried, {:.2} µs a hit; {}",
            self.samples,
            self.candidates,
            self.hit_cost() * 1e6,
            parts.join("; ")
        )
    }

    fn part(&mut self, name: impl Into<String>) {
        let seconds: f64 = self.parts.iter().map(|p| p.1).sum();
        let paid: f64 = self.parts.iter().map(|p| p.2).sum();
        self.parts.push((
            name.into(),
            self.begun.elapsed().as_secs_f64() - seconds,
            self.paid - paid,
            self.spots.len(),
        ));
    }

    fn run(&mut self) -> Result<Found, Refusal> {
        let (cpu, begun) = (self.cpu(), Instant::now());
        self.look_who_runs();
        let (threads, main) = self.busiest()?;
        let processes: Vec<ProcessId> = self.processes().collect();
        let atlas = Atlas::new(self.root, &processes, Census::recent(self.root)?);
        let samples = self.sample(&threads, threads.get(..main).unwrap_or_default(), &atlas)?;
        self.samples = samples.traces.len();
        self.gathering = samples.waited_for.gathering();
        // Measured over the sampling too, because longer is better.
        self.cpus = (self.cpu() - cpu) / begun.elapsed().as_secs_f64();
        self.spots = if self.is_compiled(&atlas, &samples)? {
            self.begin_compiled(&threads)?;
            self.compiled_candidates(&atlas, &samples)?
        } else {
            self.find_candidates(atlas, &samples)?
        };
        drop(samples);
        if self.compiled.is_none() {
            self.look_who_runs();
            self.leave_out_the_patched()?;
            self.owed = Some(self.owe()?);
        }
        self.candidates = self.spots.len();
        // Earlier forks are not charged to the search.
        self.charge_children(0, 0.0)?;
        self.forked = (0, Instant::now());
        self.part("sampling");
        let burden = self.first_round();
        self.part("first round");
        let burden = burden?;
        let second = self.second_round();
        self.part("second round");
        second?;
        let observation = self.last_round(&burden);
        self.part(observation.as_ref().map_or_else(
            |_| "windows".to_owned(),
            |seen| format!("{} windows", seen.seconds.len()),
        ));
        let observation = observation?;
        let choice = choice::choose(&observation, self.limits);
        self.observation = Some(observation);
        match choice {
            Choice::Abstained(why) | Choice::Undecided(why) => Err(Refusal::Lasting(why)),
            Choice::Chosen(chosen) if self.compiled.is_some() && chosen.witness.is_none() => {
                Err(Refusal::Lasting(format!(
                    "it is at work in code that no file holds (compiled while it runs), and of the places in it that run seldom enough \
                     to be counted no two do the same work, as would tell when one is compiled anew ({})",
                    chosen.reason
                )))
            }
            Choice::Chosen(chosen) => {
                let at = self.at(&chosen).ok_or("the point was lost")?;
                Ok(Found {
                    at,
                    chosen,
                    hit_cost: self.limits.hit_cost,
                    hit_cost_seen: self.hit_cost(),
                    costs: self.at_once.costs().clone(),
                    cpus: self.cpus,
                    executables: self.subjects.iter().map(|s| s.1).collect(),
                })
            }
        }
    }

    /// Checks, at most every few milliseconds, that none of its processes is traced or frozen. A checkpointer begins
    /// with that, and would save the breakpoints, too.
    pub(super) fn at_liberty(&mut self) -> Result<(), Refusal> {
        if self.liberty.is_some_and(|then| then.elapsed() < LIBERTY_EVERY) {
            return Ok(());
        }
        for process in self.processes() {
            threads::at_liberty(self.root, process)?;
        }
        self.liberty = Some(Instant::now());
        Ok(())
    }

    /// Charges the uncounted children, which inherit the breakpoints, at the cost per CPU second of the counted ones.
    ///
    /// # Errors
    /// A sentence: processes fork too often, and each fork copies the pages with breakpoints.
    pub(super) fn charge_children(&mut self, hits: u64, cpu: f64) -> Result<(), Refusal> {
        if self.compiled.is_some() {
            // Children do not inherit hardware breakpoints.
            return Ok(());
        }
        let processes: Vec<ProcessId> = self.processes().collect();
        let programs = self.subjects.iter().map(|s| s.1).collect();
        let unpaid = self.children.since(self.root, &processes, &programs);
        self.paid += hits_of_children(hits, cpu, unpaid.cpu) as f64 * self.hit_cost();
        self.forked.0 += unpaid.forks;
        let seconds = self.forked.1.elapsed().as_secs_f64();
        if too_many(self.forked.0, seconds) {
            return Err(Refusal::Lasting(format!(
                "{} processes were forked in {seconds:.1} s of the search, each of which has to copy what is counted with",
                self.forked.0
            )));
        }
        Ok(())
    }

    pub(super) fn go_on(&self) -> Result<(), String> {
        if self.begun.elapsed() > TIME_MAX {
            return Err(format!("the search took more than {} s", TIME_MAX.as_secs()));
        }
        affordable(self.paid)?;
        self.may_be_read()
    }

    /// Whether the counts may still be used.
    pub(super) fn may_be_read(&self) -> Result<(), String> {
        if self.stop.load(Ordering::Relaxed) {
            return Err("the search was called off".to_owned());
        }
        // If the main process runs another program, the search ends for all of them.
        let (main, identity) = self.subjects.first().ok_or("it has no process")?;
        same_program(self.root, *main, *identity)?;
        Ok(())
    }

    /// Whether the budget allows this many uncharged hits, for each slice of a window.
    pub(super) fn go_on_after(&self, hits: u64) -> Result<(), String> {
        // At the cost for all threads at once: more may have woken since the last check.
        affordable(self.paid + hits as f64 * self.limits.hit_cost)
    }

    /// How often the threads with hardware breakpoints got a CPU. Empty for probes in files.
    pub(super) fn runs(&self) -> Switches {
        let mut switches = Switches::default();
        switches.look(self.runs_now());
        switches
    }

    fn runs_now(&self) -> BTreeMap<i32, u64> {
        let Some((sets, process)) = self.compiled.as_ref().zip(self.processes().next()) else {
            return BTreeMap::new();
        };
        open_process(self.root, process)
            .map(|dir| compiled::runs(dir, sets.threads()))
            .unwrap_or_default()
    }

    /// Charges their context switches since then.
    pub(super) fn charge_switches(&mut self, since: &mut Switches) {
        if self.compiled.is_none() {
            return;
        }
        since.look(self.runs_now());
        self.paid += since.take() as f64 * compiled::switch_cost(compiled::PLACES_MAX);
    }

    /// Present cost of a hit (seconds of CPU time).
    pub(super) fn hit_cost(&self) -> f64 {
        match self.compiled {
            // A hardware breakpoint costs only its own thread.
            Some(_) => self.limits.hit_cost,
            None => self.at_once.cost(),
        }
    }

    /// Checks how many threads ran at once since the last check, which sets the cost of a hit.
    fn look_who_runs(&mut self) {
        let processes = self.subjects.iter().map(|(process, _)| *process);
        self.at_once.look(self.root, processes);
    }

    pub(super) fn charge(&mut self, hits: u64) {
        if self.compiled.is_none() {
            self.look_who_runs();
        }
        self.paid += hits as f64 * self.hit_cost();
    }

    /// CPU time of all processes since the first call (seconds). Never decreases, even if a process ends.
    pub(super) fn cpu(&mut self) -> f64 {
        let processes: Vec<ProcessId> = self.processes().collect();
        self.cpu_time.read(&processes)
    }

    // ---- candidates ---------------------------------------------------------------------------------------------

    /// Candidates of the samples, the most promising first.
    pub(super) fn rank(
        &self,
        seen: BTreeMap<(usize, u64), Seen>,
        samples: usize,
    ) -> Result<Vec<Spot>, String> {
        let mut spots: Vec<Spot> = seen
            .into_iter()
            .filter_map(|((image, address), s)| {
                let offset = match self.compiled {
                    Some(_) => address,
                    None => self.image(image)?.offset(address)?,
                };
                let spot = Spot {
                    image,
                    candidate: s.candidate,
                    offset,
                    function: ((image as u64) << 48) ^ s.function,
                    coverage: s.around as f64 / samples as f64,
                    own: s.samples as f64 / samples as f64,
                    depth: s.depth as f64 / s.samples as f64,
                    rate: 0.0,
                };
                Some(spot)
            })
            .collect();
        // Candidates seen themselves in most samples come first, then the outermost. A path through an interpreter's
        // operation is rarely seen itself, but its function nearly always, so rare candidates must not displace it.
        let class = |spot: &Spot| {
            let around = match self.compiled {
                // A piece of generated code is not a function.
                Some(_) => spot.own,
                None => spot.coverage,
            };
            if spot.own >= 0.5 {
                0
            } else if around >= 0.15 {
                1
            } else {
                2
            }
        };
        spots.sort_by(|a, b| {
            class(a)
                .cmp(&class(b))
                .then(b.depth.total_cmp(&a.depth))
                .then(a.image.cmp(&b.image))
                .then(a.offset.cmp(&b.offset))
        });
        spots.truncate(match self.compiled {
            Some(_) => CANDIDATES_MAX_COMPILED,
            None => CANDIDATES_MAX,
        });
        Ok(spots)
    }

    // ---- counting -----------------------------------------------------------------------------------------------

    fn image(&self, number: usize) -> Option<&Image> {
        self.images.get(number)?.as_ref()
    }

    /// Attaches probes if the safety checks pass. Skips sites that the kernel refuses.
    pub(super) fn attach(&self, spots: &[usize]) -> Result<Attached, Refusal> {
        if let Some(sets) = &self.compiled {
            let place = |i: &usize| Some((*i, self.spots.get(*i)?.offset));
            let places: Vec<(usize, u64)> = spots.iter().filter_map(place).collect();
            let process = self.processes().next().ok_or("it has no process")?;
            let there = compiled::threads_of(self.root, process).map_err(|e| Refusal::Now(e.to_string()))?;
            return match sets.count(&places, &there) {
                Ok(counted) => Ok(Attached::Compiled(counted)),
                Err(e @ OpenError::Busy(_)) => Err(Refusal::Now(format!(
                    "somebody else has the processor's breakpoints of its threads ({e}), perhaps a debugger"
                ))),
                Err(OpenError::Vanished) => Err(Refusal::Now(
                    "the threads that were seen at work have ended".to_owned(),
                )),
                Err(e) => Err(refusal(&e).into()),
            };
        }
        self.attach_files(spots).map(Attached::Files)
    }

    fn attach_files(&self, spots: &[usize]) -> Result<Held<Vec<Link>>, Refusal> {
        let mut by_image: BTreeMap<usize, Vec<(u64, u32)>> = BTreeMap::new();
        for i in spots {
            if let Some(spot) = self.spots.get(*i) {
                by_image
                    .entry(spot.image)
                    .or_default()
                    .push((spot.offset, *i as u32));
            }
        }
        let owed = self
            .owed
            .as_ref()
            .ok_or("it is not written down where it is counted")?;
        let processes: Vec<ProcessId> = self.processes().collect();
        let targets = by_image.keys().filter_map(|i| self.image(*i)).map(Image::target);
        let files = Files {
            targets: targets.collect(),
            ..no_files()
        };
        files.allow(self.root, &processes)?;
        let on = owed.take()?;
        let mut links = Vec::new();
        let mut outcome = Ok(());
        for (number, places) in by_image {
            // Attach per process, never to the whole file: that would change other processes' data mappings of it.
            for process in &processes {
                if let Some(image) = self.image(number) {
                    outcome = outcome.and_then(|()| on.may_attach());
                    outcome = outcome.and_then(|()| self.attach_to(image, &places, *process, &mut links));
                }
            }
        }
        // After an error, the links made so far are released as usual.
        let attached = Held::new(self.root, &files, &processes, links, on);
        outcome.map(|()| attached)
    }

    fn attach_to(
        &self,
        image: &Image,
        places: &[(u64, u32)],
        process: ProcessId,
        links: &mut Vec<Link>,
    ) -> Result<(), Refusal> {
        let several = self.subjects.len() > 1;
        if let Some((_, identity)) = self.subjects.iter().find(|(p, _)| *p == process) {
            if let Err(why) = same_program(self.root, process, *identity) {
                return if several { Ok(()) } else { Err(why.into()) };
            }
        }
        let attached = self
            .counters
            .attach(image.file.kernel_path(), places, Some(process.pid));
        match attached {
            Ok(link) => links.push(link),
            // One of several processes may have ended.
            Err(OpenError::Vanished) if several => {}
            Err(OpenError::Vanished) => return Err("it has ended".into()),
            // One site cannot be probed: bisection finds it.
            Err(OpenError::Unsupported(_)) if places.len() > 1 => {
                let (a, b) = places.split_at(places.len() / 2);
                self.attach_to(image, a, process, links)?;
                self.attach_to(image, b, process, links)?;
            }
            Err(OpenError::Unsupported(_)) => {}
            Err(e @ OpenError::Busy(_)) => return Err(Refusal::Now(refusal(&e))),
            Err(e) => return Err(refusal(&e).into()),
        }
        Ok(())
    }

    /// Drops sites where memory differs from the file: somebody patches it and may do so again.
    fn leave_out_the_patched(&mut self) -> Result<(), String> {
        let main = self.processes().next().ok_or("it has no process")?;
        let patched = Patched::look(self.root, main).map_err(|e| e.to_string())?;
        let before = self.spots.len();
        let spots = std::mem::take(&mut self.spots);
        self.spots = spots
            .into_iter()
            .filter(|s| {
                self.image(s.image)
                    .filter(|i| !i.file.bytes(s.offset).is_some_and(|code| is_replaced(&code)))
                    .is_some_and(|i| patched.agrees(&i.file, &i.device_inode, s.offset))
            })
            .collect();
        if self.spots.is_empty() && before > 0 {
            return Err(
                "its code in memory is not that of its file: it was patched while it ran, or its file was written over"
                    .to_owned(),
            );
        }
        Ok(())
    }

    pub(super) fn read(&self, spots: &[usize]) -> Vec<u64> {
        if let Some(sets) = &self.compiled {
            return sets.read(spots);
        }
        spots
            .iter()
            .map(|i| self.counters.read(*i as u32).unwrap_or(0))
            .collect()
    }

    /// Counts until the program has used `enough` CPU time or paid the limit. Returns undisturbed hits per second.
    pub(super) fn count(
        &mut self,
        spots: &[usize],
        enough: Duration,
        pay: Duration,
    ) -> Result<Vec<f64>, Refusal> {
        self.go_on()?;
        // From here on, a late wake-up costs the program.
        let urgent = Urgent::begin();
        let first = self.read(spots);
        let mut runs = self.runs();
        let attached = match self.attach(spots) {
            Ok(attached) => attached,
            Err(why) => {
                // Some probes may have been attached for a moment.
                let hits = self.charge_since(&first, spots);
                self.charge_switches(&mut runs);
                self.charge_children(hits, 0.0)?;
                return Err(why);
            }
        };
        let before = self.read(spots);
        let start = self.cpu();
        let begun = Instant::now();
        let slice = (enough / 4)
            .min(pay.div_f64(self.cpus.max(1.0)))
            .clamp(Duration::from_millis(1), self.slice_max());
        let so_far = |this: &mut Self| {
            let after = this.read(spots);
            let paid = hits_between(&before, &after) as f64 * this.hit_cost();
            (this.cpu() - start, paid, after)
        };
        let patience = (enough * PATIENCE).max(PATIENCE_MIN);
        let mut disturbed = Ok(());
        let (cpu, paid, after) = loop {
            std::thread::sleep(slice);
            let seen = so_far(self);
            if seen.0 >= enough.as_secs_f64() || seen.1 >= pay.as_secs_f64() || begun.elapsed() >= patience {
                break seen;
            }
            disturbed = self.at_liberty();
            if disturbed.is_err() {
                break seen;
            }
        };
        // A clock one tick old misses most of so short a time, which would turn 10,000 hits a second into a flood.
        // Waiting for a tick would cost the program too much. So usual CPU use is assumed for at most one tick.
        let usual = begun.elapsed().as_secs_f64() * self.cpus;
        let off = attached.let_go();
        drop(urgent);
        // Hits during attach and detach are charged, too.
        let since = self.charge_since(&first, spots);
        self.charge_switches(&mut runs);
        let children = self.charge_children(since, cpu);
        off?;
        disturbed?;
        children?;
        let late = tick().map_or(0.0, |tick| tick.as_secs_f64()) * self.cpus;
        let cpu = cpu.max(usual.min(cpu + late));
        // CPU time that probes did not take was the program's.
        let own = (cpu - paid).max(0.1 * cpu.max(paid)).max(1e-6);
        Ok(after
            .iter()
            .zip(&before)
            .map(|(a, b)| a.saturating_sub(*b) as f64 / own * self.cpus)
            .collect())
    }

    /// Charges the hits of these sites since that reading, and returns their number.
    fn charge_since(&mut self, first: &[u64], spots: &[usize]) -> u64 {
        let hits = hits_between(first, &self.read(spots));
        self.charge(hits);
        hits
    }

    /// First round: measures roughly how often candidates run. Returns busy ones that may serve to slow the program.
    fn first_round(&mut self) -> Result<Vec<Spot>, Refusal> {
        let all: Vec<usize> = (0..self.spots.len()).collect();
        let (enough, pay) = match self.compiled {
            Some(_) => (FIRST_TIME_COMPILED, FIRST_PAY_COMPILED),
            None => (FIRST_TIME, FIRST_PAY),
        };
        for chunk in all.chunks(self.at_once(FIRST_CHUNK)) {
            let rates = self.count(chunk, enough, pay)?;
            for (i, rate) in chunk.iter().zip(rates) {
                if let Some(spot) = self.spots.get_mut(*i) {
                    spot.rate = rate;
                }
            }
        }
        let busy = self
            .spots
            .iter()
            .filter(|s| s.rate > 2_000.0 && s.coverage > 0.02 && !s.candidate.waits)
            .cloned()
            .collect();
        // Silence for 4 ms says nothing about ten runs a second, so silent candidates stay.
        self.spots.retain(|s| s.rate <= FLOOD_ROUGH);
        self.renumbered();
        Ok(busy)
    }

    /// Second round: measures the candidates that were rare in the first.
    fn second_round(&mut self) -> Result<(), Refusal> {
        let rare: Vec<usize> = (0..self.spots.len())
            .filter(|i| self.spots.get(*i).is_some_and(|s| s.rate < RARE))
            .collect();
        for chunk in rare.chunks(self.at_once(SECOND_CHUNK)) {
            let mut left = chunk.to_vec();
            // Candidates that turn out to be busy spoil the count for the others, which are counted again without them.
            for _ in 0..SECOND_TRIES {
                let rates = self.count(&left, SECOND_TIME, SECOND_PAY)?;
                let mut spoilt = false;
                for (i, rate) in left.iter().zip(rates) {
                    if let Some(spot) = self.spots.get_mut(*i) {
                        spot.rate = rate;
                        spoilt |= rate > BUSY;
                    }
                }
                if !spoilt {
                    break;
                }
                left.retain(|i| self.spots.get(*i).is_some_and(|s| s.rate <= BUSY));
                if left.is_empty() {
                    break;
                }
            }
        }
        let min = self.limits.rate_min;
        // Busy candidates are known from the first round only.
        self.spots
            .retain(|s| s.rate >= min / 2.0 && s.rate <= FLOOD_ROUGH);
        if self.spots.is_empty() {
            return Err(Refusal::Lasting(format!(
                "none of {} places where it was seen at work runs between {min:.0} and {FLOOD:.0} times a second",
                self.candidates
            )));
        }
        self.make_sure()?;
        if self.spots.is_empty() {
            return Err("every place where it was seen at work runs too often to be counted".into());
        }
        Ok(())
    }

    /// Chooses candidates for the last round. Busy ones have rough rates, so they are counted together once more.
    /// Candidates that prove too busy are replaced by the next.
    fn make_sure(&mut self) -> Result<(), Refusal> {
        let min = self.limits.rate_min;
        let may_pay = self.paid + SURE_PAY;
        let mut pool = std::mem::take(&mut self.spots);
        let (mut suspects, mut known) = (Vec::new(), BTreeSet::new());
        for _ in 0..SECOND_TRIES {
            self.spots = pool.clone();
            self.keep_the_best(1.0);
            if self.spots.is_empty() {
                // Suspects are better than nothing.
                pool.append(&mut suspects);
                self.spots = pool.clone();
                self.keep_the_best(1.0);
            }
            self.renumbered();
            if self.spots.is_empty() {
                break;
            }
            let all: Vec<usize> = (0..self.spots.len()).collect();
            let rates = self.count(&all, SECOND_TIME, SECOND_PAY)?;
            let spoilt = rates.iter().any(|rate| *rate > FLOOD);
            for (spot, rate) in self.spots.iter_mut().zip(rates) {
                spot.made_sure(rate, spoilt);
            }
            known.extend(self.spots.iter().map(Spot::is_at));
            let (left, more) = without_floods(pool, &self.spots);
            pool = left;
            suspects.extend(more);
            self.spots.retain(|s| s.rate >= min / 2.0 && s.rate <= FLOOD);
            self.keep_the_best(1.5);
            if (!spoilt && !self.spots.is_empty()) || self.paid > may_pay {
                break;
            }
        }
        if self.spots.is_empty() {
            // Candidates with good rates, although counted together with too busy ones.
            pool.retain(|s| known.contains(&s.is_at()) && s.rate >= min / 2.0 && s.rate <= FLOOD);
            self.spots = pool;
            self.keep_the_best(1.5);
        }
        self.renumbered();
        Ok(())
    }

    /// Keeps as many as can be counted at once, of many functions and rates: equal rates are probably the same work.
    /// `slack`: factor on the room.
    fn keep_the_best(&mut self, slack: f64) {
        let cpus = self.cpus.max(0.02);
        let room = slack * LAST_COST * cpus / self.hit_cost();
        if self.compiled.is_some() {
            self.spots = compiled::best(
                std::mem::take(&mut self.spots),
                room,
                |s| (s.rate, s.coverage),
                |s| s.function,
            );
            return;
        }
        let most = most_paid(cpus, COST_MAX - self.paid, waiting());
        let of_cost = |share: f64| (slack * share * cpus).min(most) / self.hit_cost();
        let room = Room {
            all: of_cost(LAST_COST),
            of_two: of_cost(LAST_COST_OF_TWO),
            cheap: self.limits.cost * cpus / self.limits.hit_cost,
        };
        self.spots = best(std::mem::take(&mut self.spots), room);
    }

    /// Longest time between cost checks: hardware breakpoints can take all of a thread's time.
    fn slice_max(&self) -> Duration {
        Duration::from_millis(if self.compiled.is_some() { 4 } else { 20 })
    }

    /// Number of sites that can be counted at once.
    fn at_once(&self, chunk: usize) -> usize {
        match self.compiled {
            Some(_) => compiled::PLACES_MAX,
            None => chunk,
        }
    }

    /// Forgets the counts, because the candidates get new numbers.
    fn renumbered(&self) {
        if let Some(sets) = &self.compiled {
            sets.renumber();
        }
    }

    fn at(&self, chosen: &Chosen) -> Option<At> {
        if self.compiled.is_some() {
            let memory = Memory::open(self.root, self.processes().next()?).ok()?;
            let instruction = |spot: usize| {
                let address = self.spots.get(spot)?.offset;
                let name = format!("{}+{address:#x}", self.workload.program);
                memory.instruction(address, name).ok()?
            };
            return Some(At::Compiled {
                place: instruction(chosen.point)?,
                witness: chosen.witness.and_then(instruction),
            });
        }
        Some(At::File {
            place: self.place(chosen.point)?,
            witness: chosen.witness.and_then(|w| self.place(w)),
        })
    }

    fn place(&self, spot: usize) -> Option<Place> {
        let spot = self.spots.get(spot)?;
        let image = self.image(spot.image)?;
        Some(Place {
            file: image.file.clone(),
            device_inode: image.device_inode,
            path: image.path.clone(),
            offset: spot.offset,
            seen: spot.candidate.seen,
            name: format!("{}+{:#x}", image.name, spot.offset),
        })
    }
}

/// Checks the total cost of the search (seconds of CPU time).
///
/// # Errors
/// A sentence: above the limit.
fn affordable(paid: f64) -> Result<(), String> {
    if paid > COST_MAX {
        return Err(format!(
            "the search would have cost the program more than {COST_MAX} s of its CPU time"
        ));
    }
    Ok(())
}

pub(super) fn hits_between(before: &[u64], after: &[u64]) -> u64 {
    let pairs = after.iter().zip(before);
    pairs.map(|(after, before)| after.saturating_sub(*before)).sum()
}

fn hits_of_children(hits: u64, cpu: f64, of_children: f64) -> u64 {
    if cpu > 0.0 {
        (hits as f64 * of_children / cpu) as u64
    } else {
        0
    }
}

/// Whether processes fork more often than allowed per second, with one second's worth in advance.
fn too_many(forks: usize, seconds: f64) -> bool {
    forks as f64 > FORKS_MAX as f64 * (1.0 + seconds)
}

pub(super) fn refusal(e: &OpenError) -> String {
    match e {
        OpenError::Denied(_) => {
            format!(
                "points need CAP_BPF and CAP_PERFMON: run homeostat as root ({e}; kernel lockdown may refuse as well)"
            )
        }
        OpenError::Unsupported(_) => {
            format!(
                "the kernel cannot count many places at once ({e}); it needs Linux 6.6 with BPF and uprobes"
            )
        }
        OpenError::Vanished | OpenError::Busy(_) => e.to_string(),
    }
}

#[derive(Clone)]
pub(super) struct Seen {
    pub(super) candidate: Candidate,
    pub(super) function: u64,
    pub(super) samples: usize,
    /// Samples with it on the stack. For a candidate in an interpreter's loop: samples with the function.
    pub(super) around: usize,
    pub(super) depth: usize,
}

impl Seen {
    pub(super) fn new(candidate: Candidate, function: u64) -> Self {
        Self {
            candidate,
            function,
            samples: 0,
            around: 0,
            depth: 0,
        }
    }
}

impl Frame {
    /// Notes the candidates around a frame once per sample, at the outermost depth.
    pub(super) fn note(&self, depth: usize, here: &mut BTreeMap<(usize, u64), (Candidate, u64, usize)>) {
        for candidate in &self.candidates {
            let entry =
                here.entry((self.image, candidate.address))
                    .or_insert((*candidate, self.function, depth));
            entry.0.dispatched |= candidate.dispatched;
            entry.2 = entry.2.max(depth);
        }
    }
}

/// Allowed hits per second in the last round.
#[derive(Clone, Copy)]
struct Room {
    all: f64,
    /// For the first two costly sites in any case: with small units of work, a program may have no other.
    of_two: f64,
    /// Up to this rate, a site is cheap.
    cheap: f64,
}

/// Fills the room with sites of many functions and rates. Sites that are cheap alone come first, in order of promise.
fn best(spots: Vec<Spot>, room: Room) -> Vec<Spot> {
    let (cheap, costly): (Vec<Spot>, Vec<Spot>) = spots.into_iter().partition(|s| s.rate <= room.cheap);
    let mut kept: Vec<Spot> = Vec::new();
    let mut used = 0.0;
    for (list, most, alike, first) in [
        (cheap, LAST_MAX * 3 / 4, LAST_OF_FUNCTION, 0),
        (costly, LAST_MAX, LAST_ALIKE, 2),
    ] {
        let mut of_function: BTreeMap<u64, usize> = BTreeMap::new();
        let mut of_rate: BTreeMap<i64, usize> = BTreeMap::new();
        let mut taken: BTreeSet<(usize, u64)> = BTreeSet::new();
        // Takes the first of each function before the second of any.
        for turn in 0..LAST_OF_FUNCTION {
            for spot in &list {
                let same = of_function.entry(spot.function).or_default();
                let as_often = of_rate
                    .entry((spot.rate.max(1.0).ln() / ALIKE) as i64)
                    .or_default();
                let most_hits = if taken.len() < first {
                    room.of_two
                } else {
                    room.all
                };
                let fits = used + spot.rate <= most_hits;
                if *same > turn || *as_often >= alike || kept.len() >= most || !fits {
                    continue;
                }
                if taken.insert((spot.image, spot.offset)) {
                    *same += 1;
                    *as_often += 1;
                    used += spot.rate;
                    kept.push(spot.clone());
                }
            }
        }
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;
    use homeostat_points::code::Kind;

    /// Of a function, hit so often a second.
    fn spot(function: u64, rate: f64) -> Spot {
        Spot {
            image: 0,
            candidate: Candidate {
                address: function + rate as u64,
                kind: Kind::Entry,
                nesting: 0,
                innermost_loop: None,
                waits: false,
                dispatched: false,
                seen: false,
            },
            offset: function + rate as u64,
            function,
            coverage: 0.5,
            own: 0.1,
            depth: 0.0,
            rate,
        }
    }

    #[test]
    fn what_turns_out_to_be_too_much_gives_its_room_to_others() {
        let rough = [
            spot(1, 284_000.0),
            spot(1, 281_000.0),
            spot(1, 111_000.0),
            spot(2, 72_000.0),
            spot(3, 5_000.0),
            spot(4, 40.0),
        ];
        let rates = |spots: &[Spot]| -> Vec<f64> { spots.iter().map(|s| s.rate).collect() };
        // The first was 2.6 times as much. Within the milliseconds that this took hardly anything was seen of the others.
        let mut sure = [rough[0].clone(), rough[4].clone(), rough[5].clone()];
        for (spot, rate) in sure.iter_mut().zip([740_000.0, 0.0, 0.0]) {
            spot.made_sure(rate, true);
        }
        let (left, suspects) = without_floods(rough.to_vec(), &sure);
        assert_eq!(rates(&left), [72_000.0, 5_000.0, 40.0]);
        assert_eq!(rates(&suspects), [281_000.0, 111_000.0]);
        // Beside such a one another looks more than it is, and is counted again.
        let mut sure = [rough[0].clone(), rough[3].clone()];
        sure[0].made_sure(900_000.0, true);
        sure[1].made_sure(300_000.0, true);
        let (left, _) = without_floods(rough.to_vec(), &sure);
        assert_eq!(rates(&left), [300_000.0, 5_000.0, 40.0]);
        // What was thought to be rare says nothing of what was busy.
        let mut sure = [rough[5].clone()];
        sure[0].made_sure(300_000.0, true);
        let (left, suspects) = without_floods(rough.to_vec(), &sure);
        assert_eq!(rates(&left), [111_000.0, 72_000.0, 5_000.0]);
        assert_eq!(rates(&suspects), [284_000.0, 281_000.0]);
        // Where nothing was too much, silence is believed.
        let mut quiet = rough[4].clone();
        quiet.made_sure(0.0, false);
        assert_eq!(quiet.rate, 0.0);
    }

    #[test]
    fn two_places_that_are_dear_are_looked_at_however_little_room_they_leave() {
        let room = Room {
            all: 250_000.0,
            of_two: 416_000.0,
            cheap: 4_000.0,
        };
        let rates = |spots: &[(u64, f64)]| -> Vec<f64> {
            let spots = spots
                .iter()
                .map(|(function, rate)| spot(*function, *rate))
                .collect();
            best(spots, room).iter().map(|s| s.rate).collect()
        };
        // A program of 156,000 units a second, and a clock.
        let fine = [(1, 100.0), (2, 156_000.0), (3, 156_001.0), (3, 156_002.0)];
        assert_eq!(rates(&fine), [100.0, 156_000.0, 156_001.0]);
        // Where they leave room others are kept, and no two that do not fit.
        let mixed = [(1, 90_000.0), (2, 90_001.0), (3, 90_002.0), (4, 20_000.0)];
        assert_eq!(rates(&mixed), [90_000.0, 90_001.0, 20_000.0]);
        assert_eq!(rates(&[(1, 230_000.0), (2, 230_001.0)]), [230_000.0]);
    }

    #[test]
    fn a_search_costs_a_second_at_most() {
        assert!(affordable(1.0).is_ok());
        assert!(affordable(1.00001).unwrap_err().contains("more than 1 s"));
    }

    #[test]
    fn what_is_forked_in_a_search_is_paid_for_and_must_not_be_much() {
        assert_eq!(hits_of_children(1_000, 0.2, 0.1), 500);
        assert_eq!(hits_of_children(1_000, 0.2, 0.0), 0);
        assert_eq!(hits_of_children(1_000, 0.0, 0.1), 0);
        assert!(!too_many(FORKS_MAX, 0.0));
        assert!(too_many(FORKS_MAX + 1, 0.0));
        assert!(!too_many(5 * FORKS_MAX, 4.0));
        assert!(too_many(5 * FORKS_MAX + 1, 4.0));
    }
}
