//! The search for progress points in a running program: sample stacks, count candidates in rounds, judge.
//!
//! All of it is bounded: in time ([`TIME_MAX`]), in what it costs the program ([`COST_MAX`]), in the number of places.
//! It runs on a thread of its own, seconds long; what it attaches is removed before it returns.

use super::super::common::{ENTRIES_MAX, PROCESSES_MAX, numbers_in, open_process, read_at};
use super::super::uprobe::stranger_of;
use super::atlas::{Atlas, Frame};
use super::image::Image;
use crate::Root;
use crate::sys::bpf::{Counters, Link};
use crate::sys::perf::OpenError;
use crate::sys::probe::process_cpu_time;
use crate::sys::stacks::{Sample, Sampler};
use homeostat_model::{ProcessId, Workload};
use homeostat_points::HIT_COST;
use homeostat_points::choice::{self, Choice, Chosen, Limits, Observation};
use homeostat_points::code::Candidate;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::CString;
use std::os::unix::ffi::OsStrExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Longest search.
const TIME_MAX: Duration = Duration::from_secs(40);
/// Most CPU time that the probes of a search may take from the program (seconds).
const COST_MAX: f64 = 1.0;
/// Threads that are sampled: the busiest.
const THREADS_MAX: usize = 8;
/// How long it is looked at who is busy.
const RANKING: Duration = Duration::from_millis(300);
/// Samples per second of CPU time of a thread.
const SAMPLES_PER_SECOND: u64 = 99;
/// Samples that are enough, and fewest that say something.
const SAMPLES_ENOUGH: usize = 400;
const SAMPLES_MIN: usize = 40;
/// After the usual time so many will do; a program that gets little CPU time is looked at for longer.
const SAMPLES_FAIR: usize = 200;
const SAMPLING_USUAL: Duration = Duration::from_secs(4);
const SAMPLING_MAX: Duration = Duration::from_secs(12);
/// Words of the stack that are looked at in one sample.
const FRAMES_MAX: usize = 96;
/// Most candidates that are counted.
pub(super) const CANDIDATES_MAX: usize = 640;
/// Candidates that are tried together for the first time, and for how long: some will run millions of times a second.
const FIRST_CHUNK: usize = 32;
const FIRST_TIME: Duration = Duration::from_millis(5);
const FIRST_PAY: Duration = Duration::from_millis(2);
/// A program that is given little CPU time is waited for this many times as long.
const PATIENCE: u32 = 6;
/// … and at least so long: on a busy machine a turn may take that.
const PATIENCE_MIN: Duration = Duration::from_millis(300);
/// More often than this is never counted.
const FLOOD: f64 = 150_000.0;
/// What was seen less often in the first round is counted again, longer.
const RARE: f64 = 3_000.0;
const SECOND_TIME: Duration = Duration::from_millis(120);
const SECOND_PAY: Duration = Duration::from_millis(8);
const SECOND_CHUNK: usize = 128;
/// Busy in the second round, which was meant for what is rare.
const BUSY: f64 = 8_000.0;
const SECOND_TRIES: u32 = 5;
/// Places that go into the last round, in all and of one function.
const LAST_MAX: usize = 64;
const LAST_OF_FUNCTION: usize = 16;
/// … and of those that are dear, of one rate (rates differ by this logarithm).
const LAST_ALIKE: usize = 4;
const ALIKE: f64 = 0.25;
/// Share of the program's CPU time that they may cost together: of a server whose every place runs for each of a hundred
/// thousand requests a second, few can be counted at all. The dearer they are, the shorter are the windows.
const LAST_COST: f64 = 0.3;
/// Processes that get a link each, when a file cannot be counted as a whole.
const LINKS_MAX: usize = 8;

/// A place to be counted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Place {
    /// Path of the file by which the kernel finds it from our side.
    pub(super) file: CString,
    /// Offset of the instruction.
    pub(super) offset: u64,
    /// Whether hits of every process that runs the file count, as no other workload does.
    pub(super) whole_file: bool,
    /// For people: `redis-server+0x85333`.
    pub(super) name: String,
}

/// What was found.
#[derive(Clone, Debug)]
pub(super) struct Found {
    pub(super) place: Place,
    pub(super) witness: Option<Place>,
    pub(super) chosen: Chosen,
}

/// How a search ended, and what it was.
#[derive(Clone, Debug)]
pub(super) struct Ended {
    /// The point, or why there is none.
    pub(super) result: Result<Found, String>,
    /// What was counted in the last round.
    pub(super) observation: Option<Observation>,
    /// What was done, for people.
    pub(super) account: String,
}

/// Searches. `stop` ends it early.
pub(super) fn search(root: &Root, workload: &Workload, limits: Limits, stop: &AtomicBool) -> Ended {
    let mut search = match Search::begin(root, workload, limits, stop) {
        Ok(search) => search,
        Err(why) => {
            return Ended {
                result: Err(why),
                observation: None,
                account: String::new(),
            };
        }
    };
    let result = search.run();
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
    pub(super) coverage: f64,
    /// How far out on the stack it was seen, on average (words).
    depth: f64,
    /// Hits a second.
    pub(super) rate: f64,
}

pub(super) struct Search<'a> {
    pub(super) root: &'a Root,
    pub(super) workload: &'a Workload,
    limits: Limits,
    stop: &'a AtomicBool,
    begun: Instant,
    processes: Vec<ProcessId>,
    counters: Counters,
    /// Files that hold its code; `None` for one that cannot be looked into.
    images: Vec<Option<Image>>,
    pub(super) spots: Vec<Spot>,
    /// Share of the samples that were in loops that wait.
    pub(super) waiting: f64,
    samples: usize,
    candidates: usize,
    pub(super) hits: u64,
    /// CPUs that the program used when it was looked at first.
    pub(super) cpus: f64,
    /// What each part of the search took: seconds, hits, and how many places it left.
    parts: Vec<(&'static str, f64, u64, usize)>,
    observation: Option<Observation>,
}

impl<'a> Search<'a> {
    fn begin(
        root: &'a Root,
        workload: &'a Workload,
        limits: Limits,
        stop: &'a AtomicBool,
    ) -> Result<Self, String> {
        let counters = Counters::new(CANDIDATES_MAX as u32).map_err(|e| refusal(&e))?;
        let processes: Vec<ProcessId> = workload.processes.iter().take(PROCESSES_MAX).copied().collect();
        for process in &processes {
            if let Some(tracer) = tracer_of(root, *process) {
                return Err(format!(
                    "process {process} is being traced by process {tracer}; points are looked for when it is not"
                ));
            }
        }
        Ok(Self {
            root,
            workload,
            limits,
            stop,
            begun: Instant::now(),
            processes,
            counters,
            images: Vec::new(),
            spots: Vec::new(),
            waiting: 0.0,
            samples: 0,
            candidates: 0,
            hits: 0,
            cpus: 0.0,
            parts: Vec::new(),
            observation: None,
        })
    }

    fn account(&self) -> String {
        let parts: Vec<String> = self
            .parts
            .iter()
            .map(|(name, seconds, hits, places)| {
                format!(
                    "{name}: {seconds:.1} s, {:.2} s of its CPU time, {places} places left",
                    *hits as f64 * HIT_COST
                )
            })
            .collect();
        format!(
            "{} samples of its stacks, {} places tried; {}",
            self.samples,
            self.candidates,
            parts.join("; ")
        )
    }

    /// Notes what a part of the search took.
    fn part(&mut self, name: &'static str) {
        let seconds: f64 = self.parts.iter().map(|p| p.1).sum();
        let hits: u64 = self.parts.iter().map(|p| p.2).sum();
        self.parts.push((
            name,
            self.begun.elapsed().as_secs_f64() - seconds,
            self.hits - hits,
            self.spots.len(),
        ));
    }

    fn run(&mut self) -> Result<Found, String> {
        let (cpu, begun) = (self.cpu(), Instant::now());
        let threads = self.busiest()?;
        let samples = self.sample(&threads)?;
        self.samples = samples.len();
        // Over the sampling, too: the longer the better.
        self.cpus = (self.cpu() - cpu) / begun.elapsed().as_secs_f64();
        self.spots = self.find_candidates(&samples)?;
        self.candidates = self.spots.len();
        self.part("sampling");
        let burden = self.first_round();
        self.part("first round");
        let burden = burden?;
        let second = self.second_round();
        self.part("second round");
        second?;
        let observation = self.last_round(&burden);
        self.part("windows");
        let observation = observation?;
        let choice = choice::choose(&observation, self.limits);
        self.observation = Some(observation);
        match choice {
            Choice::Abstained(why) => Err(why),
            Choice::Chosen(chosen) => {
                let place = self.place(chosen.point).ok_or("the point was lost")?;
                let witness = chosen.witness.and_then(|w| self.place(w));
                Ok(Found {
                    place,
                    witness,
                    chosen,
                })
            }
        }
    }

    pub(super) fn go_on(&self) -> Result<(), String> {
        if self.stop.load(Ordering::Relaxed) {
            return Err("the search was called off".to_owned());
        }
        if self.begun.elapsed() > TIME_MAX {
            return Err(format!("the search took more than {} s", TIME_MAX.as_secs()));
        }
        let cost = self.hits as f64 * HIT_COST;
        if cost > COST_MAX {
            return Err(format!(
                "the search would have cost the program more than {COST_MAX} s of its CPU time"
            ));
        }
        Ok(())
    }

    /// CPU time of all processes in seconds.
    pub(super) fn cpu(&self) -> f64 {
        self.processes
            .iter()
            .filter_map(|p| process_cpu_time(p.pid))
            .map(|ns| ns as f64 / 1e9)
            .sum()
    }

    // ---- stacks -------------------------------------------------------------------------------------------------

    /// Threads that use the most CPU time: (process, thread).
    fn busiest(&self) -> Result<Vec<(ProcessId, i32)>, String> {
        let before = self.run_times();
        std::thread::sleep(RANKING);
        let mut used: Vec<(u64, (ProcessId, i32))> = self
            .run_times()
            .into_iter()
            .filter_map(|(key, now)| Some((now.checked_sub(*before.get(&key)?)?, key)))
            .filter(|(ns, _)| *ns > 0)
            .collect();
        used.sort_unstable_by(|a, b| b.cmp(a));
        used.truncate(THREADS_MAX);
        let busy: u64 = used.iter().map(|(ns, _)| ns).sum();
        if (busy as f64) < 0.05 * RANKING.as_nanos() as f64 {
            return Err("it uses less than 5 % of a CPU, too little to see where it works".to_owned());
        }
        Ok(used.into_iter().map(|(_, key)| key).collect())
    }

    /// Time on a CPU of each thread in nanoseconds, from `schedstat`.
    fn run_times(&self) -> BTreeMap<(ProcessId, i32), u64> {
        let mut times = BTreeMap::new();
        let mut buffer = [0u8; 128];
        for process in &self.processes {
            let Ok(dir) = open_process(self.root, *process) else {
                continue;
            };
            let Ok((threads, _)) = numbers_in(&dir, "task", ENTRIES_MAX) else {
                continue;
            };
            for thread in threads {
                let time = read_at(&dir, &format!("task/{thread}/schedstat"), &mut buffer)
                    .ok()
                    .and_then(|n| {
                        let text = std::str::from_utf8(buffer.get(..n)?).ok()?;
                        text.split_ascii_whitespace().next()?.parse().ok()
                    });
                times.extend(time.map(|t: u64| ((*process, thread), t)));
            }
            if times.len() >= ENTRIES_MAX {
                break;
            }
        }
        times
    }

    fn sample(&self, threads: &[(ProcessId, i32)]) -> Result<Vec<(ProcessId, Sample)>, String> {
        let mut samplers = Vec::new();
        for (process, thread) in threads {
            match Sampler::open(*thread, SAMPLES_PER_SECOND) {
                Ok(sampler) => samplers.push((*process, sampler)),
                Err(OpenError::Vanished) => {}
                Err(e) => return Err(refusal(&e)),
            }
        }
        let mut samples = Vec::new();
        let mut new = Vec::new();
        let begun = Instant::now();
        while begun.elapsed() < SAMPLING_MAX && samples.len() < SAMPLES_ENOUGH {
            if samples.len() >= SAMPLES_FAIR && begun.elapsed() >= SAMPLING_USUAL {
                break;
            }
            std::thread::sleep(Duration::from_millis(100));
            self.go_on()?;
            for (process, sampler) in &mut samplers {
                sampler.read(&mut new);
                samples.extend(new.drain(..).map(|s| (*process, s)));
            }
        }
        if samples.len() < SAMPLES_MIN {
            return Err(format!(
                "only {} samples of its stacks could be taken in {} s: it works too little",
                samples.len(),
                SAMPLING_MAX.as_secs()
            ));
        }
        Ok(samples)
    }

    // ---- candidates ---------------------------------------------------------------------------------------------

    /// What may be counted around the places where the program was seen at work, the most promising first.
    fn find_candidates(&mut self, samples: &[(ProcessId, Sample)]) -> Result<Vec<Spot>, String> {
        let mut atlas = Atlas::default();
        let mut seen: BTreeMap<(usize, u64), Seen> = BTreeMap::new();
        let mut waiting = 0;
        let mut outside = 0;
        for (process, sample) in samples {
            let mut here: BTreeMap<(usize, u64), (Candidate, u64, usize)> = BTreeMap::new();
            match atlas.resolve(self.root, *process, sample.instruction, false) {
                Some(frame) => {
                    waiting += usize::from(frame.waits);
                    note(&frame, 0, &mut here);
                }
                None => outside += 1,
            }
            let mut frames = 0;
            for (depth, word) in sample.stack.iter().enumerate() {
                if let Some(frame) = atlas.resolve(self.root, *process, *word, true) {
                    note(&frame, depth + 1, &mut here);
                    frames += 1;
                    if frames >= FRAMES_MAX {
                        break;
                    }
                }
            }
            for (key, (candidate, function, depth)) in here {
                let entry = seen.entry(key).or_insert(Seen {
                    candidate,
                    function,
                    samples: 0,
                    depth: 0,
                });
                entry.samples += 1;
                entry.depth += depth;
            }
        }
        self.images = atlas.images;
        self.waiting = waiting as f64 / samples.len() as f64;
        if seen.is_empty() {
            return Err(if outside * 2 > samples.len() {
                "it works mostly in code that no file holds (compiled while it runs) or that cannot be taken apart; name \
                 a meter in the configuration"
                    .to_owned()
            } else {
                "no place where it works can be counted cheaply".to_owned()
            });
        }
        let mut spots: Vec<Spot> = seen
            .into_iter()
            .filter_map(|((image, address), s)| {
                Some(Spot {
                    image,
                    candidate: s.candidate,
                    offset: self.image(image)?.offset(address)?,
                    function: ((image as u64) << 48) ^ s.function,
                    coverage: s.samples as f64 / samples.len() as f64,
                    depth: s.depth as f64 / s.samples as f64,
                    rate: 0.0,
                })
            })
            .collect();
        // What is on the stack most of the time first, and of that what is farthest out.
        let class = |s: &Spot| match s.coverage {
            c if c >= 0.5 => 0,
            c if c >= 0.15 => 1,
            _ => 2,
        };
        spots.sort_by(|a, b| {
            class(a)
                .cmp(&class(b))
                .then(b.depth.total_cmp(&a.depth))
                .then(a.image.cmp(&b.image))
                .then(a.offset.cmp(&b.offset))
        });
        spots.truncate(CANDIDATES_MAX);
        Ok(spots)
    }

    // ---- counting -----------------------------------------------------------------------------------------------

    fn image(&self, number: usize) -> Option<&Image> {
        self.images.get(number)?.as_ref()
    }

    /// Whose executions of a file are counted: of these processes, or of all (`None`).
    fn whose(&self, image: usize) -> Option<Vec<Option<i32>>> {
        let image = self.image(image)?;
        if let [one] = self.processes.as_slice() {
            return Some(vec![Some(one.pid)]);
        }
        if image.main && stranger_of(self.root, self.workload, image.identity).is_none() {
            return Some(vec![None]);
        }
        (self.processes.len() <= LINKS_MAX).then(|| self.processes.iter().map(|p| Some(p.pid)).collect())
    }

    /// Attaches; what the kernel refuses is left out.
    pub(super) fn attach(&self, spots: &[usize]) -> Result<Vec<Link>, String> {
        let mut by_image: BTreeMap<usize, Vec<(u64, u32)>> = BTreeMap::new();
        for i in spots {
            if let Some(spot) = self.spots.get(*i) {
                by_image
                    .entry(spot.image)
                    .or_default()
                    .push((spot.offset, *i as u32));
            }
        }
        let mut links = Vec::new();
        for (image, places) in by_image {
            let Some(path) = self.image(image).and_then(|i| c_path(&i.path)) else {
                continue;
            };
            for whose in self.whose(image).unwrap_or_default() {
                self.attach_to(&path, &places, whose, &mut links)?;
            }
        }
        Ok(links)
    }

    fn attach_to(
        &self,
        path: &CString,
        places: &[(u64, u32)],
        whose: Option<i32>,
        links: &mut Vec<Link>,
    ) -> Result<(), String> {
        match self.counters.attach(path, places, whose) {
            Ok(link) => links.push(link),
            // A process of several may have ended.
            Err(OpenError::Vanished) if self.processes.len() > 1 => {}
            Err(OpenError::Vanished) => return Err("it has ended".to_owned()),
            // One of them cannot be probed: which, is found by halves.
            Err(OpenError::Unsupported(_)) if places.len() > 1 => {
                let (a, b) = places.split_at(places.len() / 2);
                self.attach_to(path, a, whose, links)?;
                self.attach_to(path, b, whose, links)?;
            }
            Err(OpenError::Unsupported(_)) => {}
            Err(e) => return Err(refusal(&e)),
        }
        Ok(())
    }

    pub(super) fn read(&self, spots: &[usize]) -> Vec<u64> {
        spots
            .iter()
            .map(|i| self.counters.read(*i as u32).unwrap_or(0))
            .collect()
    }

    /// Counts until the program has used so much CPU time, or has paid so much for it: hits a second of each, as they
    /// would be if the program were left alone.
    pub(super) fn count(
        &mut self,
        spots: &[usize],
        enough: Duration,
        pay: Duration,
    ) -> Result<Vec<f64>, String> {
        self.go_on()?;
        let before = self.read(spots);
        let start = self.cpu();
        let begun = Instant::now();
        let links = self.attach(spots)?;
        let slice = (enough / 4).clamp(Duration::from_millis(1), Duration::from_millis(20));
        let (mut after, mut cpu, mut paid);
        loop {
            std::thread::sleep(slice);
            after = self.read(spots);
            cpu = self.cpu() - start;
            let hits: u64 = after.iter().zip(&before).map(|(a, b)| a.saturating_sub(*b)).sum();
            paid = hits as f64 * HIT_COST;
            let patience = (enough * PATIENCE).max(PATIENCE_MIN);
            if cpu >= enough.as_secs_f64() || paid >= pay.as_secs_f64() || begun.elapsed() >= patience {
                break;
            }
        }
        drop(links);
        // Those that came while the probes were taken off were paid for, too.
        let last = self.read(spots);
        self.hits += last.iter().zip(&before).map(|(l, b)| l - b).sum::<u64>();
        // What the probes did not take was left for the program itself.
        let own = (cpu - paid).max(0.1 * cpu).max(1e-6);
        Ok(after
            .iter()
            .zip(&before)
            .map(|(a, b)| a.saturating_sub(*b) as f64 / own * self.cpus)
            .collect())
    }

    /// Finds out what runs at all, and how often within a factor. Returns busy places that may serve to slow the
    /// program a little.
    fn first_round(&mut self) -> Result<Vec<Spot>, String> {
        let all: Vec<usize> = (0..self.spots.len()).collect();
        for chunk in all.chunks(FIRST_CHUNK) {
            let rates = self.count(chunk, FIRST_TIME, FIRST_PAY)?;
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
        // Silent for 4 ms says nothing of what runs ten times a second: those stay.
        self.spots.retain(|s| s.rate <= FLOOD);
        Ok(busy)
    }

    /// Finds out how often those run that were hardly seen in the first round.
    fn second_round(&mut self) -> Result<(), String> {
        let rare: Vec<usize> = (0..self.spots.len())
            .filter(|i| self.spots.get(*i).is_some_and(|s| s.rate < RARE))
            .collect();
        for chunk in rare.chunks(SECOND_CHUNK) {
            let mut left = chunk.to_vec();
            // Those that turn out to be busy would spoil it for the others: these are counted again without them.
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
        self.spots.retain(|s| s.rate >= min / 2.0 && s.rate <= FLOOD);
        if self.spots.is_empty() {
            return Err(format!(
                "none of {} places where it was seen at work runs between {min:.0} and {FLOOD:.0} times a second",
                self.candidates
            ));
        }
        self.keep_the_best(1.0);
        // The rates of the busy ones are rough: those that are left are made sure of.
        let all: Vec<usize> = (0..self.spots.len()).collect();
        let rates = self.count(&all, SECOND_TIME, SECOND_PAY)?;
        for (spot, rate) in self.spots.iter_mut().zip(rates) {
            spot.rate = rate;
        }
        self.spots.retain(|s| s.rate >= min / 2.0 && s.rate <= FLOOD);
        self.keep_the_best(1.5);
        if self.spots.is_empty() {
            return Err("every place where it was seen at work runs too often to be counted".to_owned());
        }
        Ok(())
    }

    /// Keeps as many as can be counted at once, of many functions and of different rates: what runs equally often is
    /// probably the same work. `slack`: how far beyond the room.
    fn keep_the_best(&mut self, slack: f64) {
        let cpus = self.cpus.max(0.02);
        let room = slack * LAST_COST * cpus / HIT_COST;
        // What would be cheap enough alone goes first, in the order of promise.
        let dear = |s: &Spot| s.rate * HIT_COST > self.limits.cost * cpus;
        let (cheap, costly): (Vec<Spot>, Vec<Spot>) = self.spots.drain(..).partition(|s| !dear(s));
        let mut kept: Vec<Spot> = Vec::new();
        let mut left = room;
        for (list, most, alike) in [
            (cheap, LAST_MAX * 3 / 4, LAST_OF_FUNCTION),
            (costly, LAST_MAX, LAST_ALIKE),
        ] {
            let mut of_function: BTreeMap<u64, usize> = BTreeMap::new();
            let mut of_rate: BTreeMap<i64, usize> = BTreeMap::new();
            let mut taken: BTreeSet<(usize, u64)> = BTreeSet::new();
            // The first of each function before the second of any.
            for turn in 0..LAST_OF_FUNCTION {
                for spot in &list {
                    let same = of_function.entry(spot.function).or_default();
                    let as_often = of_rate
                        .entry((spot.rate.max(1.0).ln() / ALIKE) as i64)
                        .or_default();
                    if *same > turn || *as_often >= alike || kept.len() >= most || spot.rate > left {
                        continue;
                    }
                    if taken.insert((spot.image, spot.offset)) {
                        *same += 1;
                        *as_often += 1;
                        left -= spot.rate;
                        kept.push(spot.clone());
                    }
                }
            }
        }
        self.spots = kept;
    }

    fn place(&self, spot: usize) -> Option<Place> {
        let spot = self.spots.get(spot)?;
        let image = self.image(spot.image)?;
        let file = if image.main {
            self.workload.program.clone()
        } else {
            let path = image.path.to_string_lossy();
            path.rsplit('/').next().unwrap_or_default().to_owned()
        };
        Some(Place {
            file: c_path(&image.path)?,
            offset: spot.offset,
            whole_file: self.whose(spot.image)?.first()?.is_none(),
            name: format!("{file}+{:#x}", spot.offset),
        })
    }
}

fn c_path(path: &std::path::Path) -> Option<CString> {
    CString::new(path.as_os_str().as_bytes()).ok()
}

fn refusal(e: &OpenError) -> String {
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

/// Process that traces (ptrace) a process.
pub(super) fn tracer_of(root: &Root, process: ProcessId) -> Option<i32> {
    let dir = open_process(root, process).ok()?;
    let mut buffer = [0u8; 4096];
    let n = read_at(&dir, "status", &mut buffer).ok()?;
    let text = String::from_utf8_lossy(buffer.get(..n)?).into_owned();
    let tracer: i32 = text
        .lines()
        .find_map(|l| l.strip_prefix("TracerPid:"))?
        .trim()
        .parse()
        .ok()?;
    (tracer != 0).then_some(tracer)
}

/// A candidate over all samples.
struct Seen {
    candidate: Candidate,
    function: u64,
    samples: usize,
    depth: usize,
}

/// Notes the candidates around a frame once per sample, at the outermost depth.
fn note(frame: &Frame, depth: usize, here: &mut BTreeMap<(usize, u64), (Candidate, u64, usize)>) {
    for candidate in &frame.candidates {
        let entry =
            here.entry((frame.image, candidate.address))
                .or_insert((*candidate, frame.function, depth));
        entry.2 = entry.2.max(depth);
    }
}
