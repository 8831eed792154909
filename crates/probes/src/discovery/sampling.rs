//! First part of a search: samples the stacks of the busiest threads. Only words that point into code are kept. The
//! rest of a stack is wiped at once, because it may hold secrets.

use crate::discovery::atlas::{Atlas, Code, Frame};
use crate::discovery::compiled;
use crate::discovery::compiled::{Memory, Pieces, Sets};
use crate::discovery::search::{Search, Seen, Spot, refusal};
use homeostat_kernel::Root;
use homeostat_kernel::perf::OpenError;
use homeostat_kernel::stacks::Sampler;
use homeostat_meters::common::ENTRIES_MAX;
use homeostat_meters::cpu_time::{Threads, all_ran};
use homeostat_meters::waits::waits_for_several;
use homeostat_model::ProcessId;
use homeostat_points::code::Candidate;
use homeostat_sensors::storage::Refusal;
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

/// Most threads that are sampled: the busiest.
const THREADS_MAX: usize = 8;
/// A thread with less than this share of the busiest thread's CPU time does no work (a timer thread, for example).
const MAIN: f64 = 0.1;
/// Duration of the ranking of threads.
const RANKING: Duration = Duration::from_millis(300);
/// Stack samples per second of CPU time of a thread.
const SAMPLES_PER_SECOND: u64 = 99;
/// The same for samples without a stack, which only show where instructions begin, and the most addresses kept.
const PLACES_PER_SECOND: u64 = 499;
const PLACES_MAX: usize = 4096;
/// Enough samples, and the fewest that are usable.
const SAMPLES_ENOUGH: usize = 400;
const SAMPLES_MIN: usize = 40;
/// Enough samples after the usual time. A program with little CPU time is sampled for longer.
const SAMPLES_FAIR: usize = 200;
const SAMPLING_USUAL: Duration = Duration::from_secs(4);
const SAMPLING_MAX: Duration = Duration::from_secs(12);
/// A function is an interpreter's if this share of the samples lies in code that leads to its indirect jumps.
const INTERPRETS: f64 = 0.15;
/// Most words used of one stack sample.
const FRAMES_MAX: usize = 96;

#[derive(Default)]
struct Samplers {
    stacks: Vec<(ProcessId, Sampler)>,
    /// Without stacks.
    places: Vec<(ProcessId, Sampler)>,
}

#[derive(Default)]
pub(super) struct Samples {
    pub(super) traces: Vec<Trace>,
    /// Addresses at which an instruction was about to run.
    places: BTreeSet<(ProcessId, u64)>,
    pub(super) waited_for: WaitedFor,
}

/// What threads were seen waiting for in the kernel.
#[derive(Debug, Default)]
pub(super) struct WaitedFor {
    seen: usize,
    /// … of which for several connections at once.
    several: usize,
}

impl WaitedFor {
    fn look(&mut self, root: &Root, threads: &[(ProcessId, i32)]) {
        let known = threads
            .iter()
            .filter_map(|(process, thread)| waits_for_several(root, *process, *thread));
        for several in known {
            self.seen += 1;
            self.several += usize::from(several);
        }
    }

    /// Share of waits for several connections at once.
    pub(super) fn gathering(&self) -> f64 {
        if self.seen == 0 {
            return 0.0;
        }
        self.several as f64 / self.seen as f64
    }
}

pub(super) struct Trace {
    process: ProcessId,
    instruction: u64,
    /// Words of the stack that point into code, with their distance from its top, the nearest first.
    words: Vec<(usize, u64)>,
}

impl Samples {
    fn take(&mut self, samplers: &mut Samplers, atlas: &Atlas) {
        let mut new = Vec::new();
        for (process, sampler) in &mut samplers.places {
            sampler.read(&mut new);
            for sample in new.drain(..).filter(|s| s.in_user_mode) {
                if self.places.len() < PLACES_MAX {
                    self.places.insert((*process, sample.instruction));
                }
            }
        }
        for (process, sampler) in &mut samplers.stacks {
            sampler.read(&mut new);
            // A sample wipes its stack when dropped.
            self.traces.extend(new.drain(..).map(|sample| {
                Trace {
                    process: *process,
                    instruction: sample.instruction,
                    words: sample
                        .stack()
                        .iter()
                        .copied()
                        .enumerate()
                        .filter(|(_, word)| atlas.may_be_code(*process, *word))
                        .collect(),
                }
            }));
        }
    }
}

#[derive(Clone, Default)]
struct Tally {
    seen: BTreeMap<(usize, u64), Seen>,
    samples: usize,
    /// Samples with each function on the stack.
    on_stack: BTreeMap<(usize, u64), usize>,
    /// … and with the sample in code that leads to an indirect jump.
    dispatching: BTreeMap<(usize, u64), usize>,
    waiting: usize,
    /// Samples in unknown code.
    outside: usize,
}

impl Tally {
    /// Adds a sample: its frames with their distance from the top of the stack, the sampled instruction first.
    fn add(&mut self, at_work: Option<Frame>, callers: impl Iterator<Item = (usize, Frame)>) {
        let mut here: BTreeMap<(usize, u64), (Candidate, u64, usize)> = BTreeMap::new();
        let mut functions: BTreeSet<(usize, u64)> = BTreeSet::new();
        self.samples += 1;
        match &at_work {
            Some(frame) => {
                self.waiting += usize::from(frame.waits);
                if frame.candidates.iter().any(|c| c.dispatched) {
                    let function = (frame.image, frame.function);
                    *self.dispatching.entry(function).or_default() += 1;
                }
            }
            None => self.outside += 1,
        }
        for (depth, frame) in at_work.map(|frame| (0, frame)).into_iter().chain(callers) {
            frame.note(depth, &mut here);
            functions.insert((frame.image, frame.function));
        }
        for function in functions {
            *self.on_stack.entry(function).or_default() += 1;
        }
        for (key, (candidate, function, depth)) in here {
            let entry = self.seen.entry(key).or_insert(Seen::new(candidate, function));
            entry.candidate.dispatched |= candidate.dispatched;
            entry.samples += 1;
            entry.depth += depth;
        }
    }

    /// Returns the candidates. Any sample in an interpreter's function belongs to the loop through its table. All other
    /// code of that function belongs to it too, because it begins and ends the operations.
    fn seen(self, code: Code) -> BTreeMap<(usize, u64), Seen> {
        let interprets = |function: &(usize, u64)| {
            let dispatching = self.dispatching.get(function).copied().unwrap_or(0);
            // The functions of generated code are unknown.
            code == Code::File && dispatching as f64 >= INTERPRETS * self.samples as f64
        };
        let mut all = self.seen;
        for ((image, _), seen) in &mut all {
            let function = (*image, seen.function);
            seen.around = match self.on_stack.get(&function) {
                Some(samples) if seen.candidate.dispatched || interprets(&function) => *samples,
                _ => seen.samples,
            };
        }
        all
    }
}

impl Search<'_> {
    /// The threads with the most CPU time, (process, thread), and how many of the first do the work.
    pub(super) fn busiest(&self) -> Result<(Vec<(ProcessId, i32)>, usize), String> {
        // For each process, whatever the number of threads of the others.
        let of_each = || -> Threads {
            let of_one = |process| all_ran(self.root, [process], ENTRIES_MAX).0;
            self.processes().flat_map(of_one).collect()
        };
        let before = of_each();
        std::thread::sleep(RANKING);
        let after = of_each();
        let mut used: Vec<(u64, (ProcessId, i32))> = after
            .into_iter()
            .filter_map(|(key, now)| Some((now.ns.checked_sub(before.get(&key)?.ns)?, key)))
            .filter(|(ns, _)| *ns > 0)
            .collect();
        used.sort_unstable_by(|a, b| b.cmp(a));
        used.truncate(THREADS_MAX);
        let busy: u64 = used.iter().map(|(ns, _)| ns).sum();
        if (busy as f64) < 0.05 * RANKING.as_nanos() as f64 {
            return Err("it uses less than 5 % of a CPU, too little to see where it works".to_owned());
        }
        let most = used.first().map_or(0, |(ns, _)| *ns);
        let main = used.partition_point(|(ns, _)| *ns as f64 >= MAIN * most as f64);
        Ok((used.into_iter().map(|(_, key)| key).collect(), main))
    }

    /// Samples these threads, and checks what the main ones wait for.
    pub(super) fn sample(
        &self,
        threads: &[(ProcessId, i32)],
        main: &[(ProcessId, i32)],
        atlas: &Atlas,
    ) -> Result<Samples, String> {
        let mut samplers = self.samplers(threads)?;
        let mut samples = Samples::default();
        let begun = Instant::now();
        while begun.elapsed() < SAMPLING_MAX && samples.traces.len() < SAMPLES_ENOUGH {
            if samples.traces.len() >= SAMPLES_FAIR && begun.elapsed() >= SAMPLING_USUAL {
                break;
            }
            std::thread::sleep(Duration::from_millis(100));
            self.go_on()?;
            samples.take(&mut samplers, atlas);
            samples.waited_for.look(self.root, main);
        }
        if samples.traces.len() < SAMPLES_MIN {
            return Err(format!(
                "only {} samples of its stacks could be taken in {} s: it works too little",
                samples.traces.len(),
                SAMPLING_MAX.as_secs()
            ));
        }
        Ok(samples)
    }

    fn samplers(&self, threads: &[(ProcessId, i32)]) -> Result<Samplers, String> {
        // A single process may execute what it likes, and only harms itself with a breakpoint inside an instruction.
        // One of several processes may be less trusted than another that runs the same file.
        let alone = self.workload.processes.len() == 1;
        let mut found = Samplers::default();
        for (process, thread) in threads {
            match Sampler::open(*thread, SAMPLES_PER_SECOND) {
                Ok(sampler) => found.stacks.push((*process, sampler)),
                Err(OpenError::Vanished) => continue,
                Err(e) => return Err(refusal(&e)),
            }
            // Without these samples, less of its code is known, but nothing wrong.
            if alone {
                if let Ok(sampler) = Sampler::open_bare(*thread, PLACES_PER_SECOND) {
                    found.places.push((*process, sampler));
                }
            }
        }
        Ok(found)
    }

    /// Whether it runs mostly generated code.
    ///
    /// # Errors
    /// A sentence: unknown.
    pub(super) fn is_compiled(&self, atlas: &Atlas, samples: &Samples) -> Result<bool, Refusal> {
        mostly_compiled(
            samples
                .traces
                .iter()
                .map(|t| atlas.code(t.process, t.instruction)),
        )
    }

    /// Switches to generated code: hardware breakpoints of these threads.
    ///
    /// # Errors
    /// A sentence: too many processes or threads, or unsupported by this machine.
    pub(super) fn begin_compiled(&mut self, threads: &[(ProcessId, i32)]) -> Result<(), Refusal> {
        if self.workload.processes.len() != 1 {
            return Err(Refusal::Lasting(
                "it is at work in code that no file holds (compiled while it runs), which is counted in programs of one process only; \
                 name a meter in the configuration"
                    .to_owned(),
            ));
        }
        for process in self.processes() {
            compiled::threads_of(self.root, process).map_err(|e| Refusal::Lasting(e.to_string()))?;
        }
        self.limits.hit_cost = compiled::rehearse()?;
        self.compiled = Some(Sets::on(threads.iter().map(|(_, thread)| *thread)));
        Ok(())
    }

    /// Candidates in generated code. Code of files there, a collector or compiler, runs by memory use or time. In a
    /// JVM, such sites kept their ratio to each other and were wrong by 17 % at a quarter of a CPU.
    pub(super) fn compiled_candidates(
        &mut self,
        atlas: &Atlas,
        samples: &Samples,
    ) -> Result<Vec<Spot>, Refusal> {
        let process = self.processes().next().ok_or("it has no process")?;
        let memory = Memory::open(self.root, process)?;
        let traces = &samples.traces;
        let pieces = Pieces::read(
            &memory,
            atlas.compiled(process),
            samples.places.iter().map(|(_, address)| *address),
            traces.iter().flat_map(|t| t.words.iter().map(|(_, word)| *word)),
            &|| self.go_on().map_err(Refusal::from),
        )?;
        let mut tally = Tally::default();
        for trace in traces {
            self.go_on()?;
            let callers = trace.words.iter().filter_map(|(depth, word)| {
                let frame = pieces.resolve(*word)?;
                Some((depth + 1, frame))
            });
            tally.add(pieces.resolve(trace.instruction), callers.take(FRAMES_MAX));
        }
        self.waiting = tally.waiting as f64 / traces.len() as f64;
        let seen = tally.seen(Code::Compiled);
        if seen.is_empty() {
            return Err(Refusal::Lasting(
                "it is at work in code that no file holds (compiled while it runs), in which no place was found that can be counted; \
                 name a meter in the configuration"
                    .to_owned(),
            ));
        }
        Ok(self.rank(seen, traces.len())?)
    }

    /// Candidates around the sampled addresses, the most promising first.
    pub(super) fn find_candidates(
        &mut self,
        mut atlas: Atlas,
        samples: &Samples,
    ) -> Result<Vec<Spot>, Refusal> {
        let (root, workload) = (self.root, self.workload);
        let traces = &samples.traces;
        // All addresses before the first function is decoded.
        atlas.learn(root, workload, &samples.places);
        let mut tally = Tally::default();
        for trace in traces {
            self.go_on()?;
            let at_work = atlas.resolve(root, workload, trace.process, trace.instruction, false);
            let callers = trace
                .words
                .iter()
                .filter_map(|(depth, word)| {
                    let frame = atlas.resolve(root, workload, trace.process, *word, true)?;
                    Some((depth + 1, frame))
                })
                .take(FRAMES_MAX);
            tally.add(at_work, callers);
        }
        self.waiting = tally.waiting as f64 / traces.len() as f64;
        let outside = tally.outside;
        let seen = tally.seen(Code::File);
        self.images = atlas.images;
        if seen.is_empty() {
            let why = if let Some(why) = atlas.left_out.first() {
                format!("no place where it works can be counted ({why})")
            } else if outside * 2 > traces.len() {
                "it works mostly in code that cannot be taken apart; name a meter in the configuration"
                    .to_owned()
            } else {
                "no place where it works can be counted cheaply".to_owned()
            };
            return Err(if atlas.passing {
                Refusal::Now(why)
            } else {
                Refusal::Lasting(why)
            });
        }
        Ok(self.rank(seen, traces.len())?)
    }
}

/// Whether most samples lie in generated code.
///
/// # Errors
/// A sentence: unknown.
fn mostly_compiled(seen: impl Iterator<Item = Code>) -> Result<bool, Refusal> {
    let (mut all, mut compiled, mut unknown) = (0, 0, 0);
    for code in seen {
        all += 1;
        compiled += usize::from(code == Code::Compiled);
        unknown += usize::from(code == Code::Unknown);
    }
    if unknown * 2 > all {
        return Err(Refusal::Now(format!(
            "it could not be read what it has mapped, of {unknown} of {all} samples"
        )));
    }
    Ok(compiled * 2 > all - unknown)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_goes_through_a_table_is_as_often_on_the_stack_as_its_function() {
        let candidate = |address, dispatched| Candidate {
            address,
            kind: homeostat_points::code::Kind::Branch,
            nesting: 0,
            innermost_loop: None,
            waits: false,
            dispatched,
            seen: dispatched,
        };
        let frame = |function, candidates| Frame {
            image: 0,
            function,
            waits: false,
            candidates,
        };
        let mut tally = Tally::default();
        let operation = || frame(0x1000, vec![candidate(0x1010, true), candidate(0x1020, false)]);
        tally.add(Some(operation()), std::iter::empty());
        // At work in another operation, in one that it called, and elsewhere.
        tally.add(Some(frame(0x1000, vec![])), std::iter::empty());
        let called = [(7, frame(0x1000, vec![])), (9, frame(0x1000, vec![]))];
        tally.add(Some(frame(0x5000, vec![])), called.into_iter());
        for _ in 0..5 {
            tally.add(None, std::iter::empty());
        }
        assert_eq!(tally.outside, 5);
        let of = |seen: &BTreeMap<(usize, u64), Seen>, address| {
            let seen = seen.get(&(0, address))?;
            Some((seen.samples, seen.around))
        };
        let mut interpreter = tally.clone();
        // In an eighth of the samples at work in an operation: a function with a table, not more.
        let seen = tally.seen(Code::File);
        assert_eq!(of(&seen, 0x1010), Some((1, 3)));
        assert_eq!(of(&seen, 0x1020), Some((1, 1)));
        // In two of nine: an interpreter, all of which is in its loop.
        interpreter.add(Some(operation()), std::iter::empty());
        let seen = interpreter.clone().seen(Code::Compiled);
        assert_eq!(of(&seen, 0x1020), Some((2, 2)), "no function is known");
        let seen = interpreter.seen(Code::File);
        assert_eq!(of(&seen, 0x1010), Some((2, 4)));
        assert_eq!(of(&seen, 0x1020), Some((2, 4)));
    }

    #[test]
    fn only_code_that_is_compiled_as_it_runs_counts_as_that() {
        let of = |counts: [(Code, usize); 4]| {
            mostly_compiled(
                counts
                    .into_iter()
                    .flat_map(|(code, n)| std::iter::repeat_n(code, n)),
            )
        };
        let seen = |file, kernel, compiled, unknown| {
            of([
                (Code::File, file),
                (Code::Kernel, kernel),
                (Code::Compiled, compiled),
                (Code::Unknown, unknown),
            ])
        };
        assert!(matches!(seen(50, 0, 50, 0), Ok(false)));
        assert!(matches!(seen(49, 0, 51, 0), Ok(true)));
        // Somebody who reads the clock all the time.
        assert!(matches!(seen(10, 90, 0, 0), Ok(false)));
        assert!(matches!(seen(50, 0, 0, 50), Ok(false)));
        assert!(matches!(seen(49, 0, 0, 51), Err(Refusal::Now(_))));
        assert!(matches!(seen(20, 0, 30, 50), Ok(true)));
    }
}
