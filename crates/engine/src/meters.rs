//! Which meter to trust.
//!
//! Meters are tried in tiers, nearest to the work first: the program's own counters together with kernel work
//! (which costs nothing to read), then probes, then progress points that have to be found first. A meter qualifies when it fires, is steady per CPU second over
//! blocks, and costs the workload little. Kernel work must in addition be confirmed by a second, different kind of
//! kernel work that keeps a constant ratio to it: a single counter may count polling or waiting instead of work.
//! Hardware counts never qualify: the treatment may change the number of instructions (seed 001: a large-segment
//! case gained 30 % while instructions per second fell by 58 %).

use crate::policy::Policy;
use crate::series::{Interval, Series, keeps_threads_busy};
use homeostat_model::{MeterCandidate, MeterClass, MeterId, Nanoseconds, WorkloadSample};
use homeostat_statistics::robust;
use std::collections::BTreeMap;

/// Intervals joined into one block when noise is judged.
const BLOCK: usize = 4;
/// Kernel work must be at least this steady (coefficient of variation over blocks of work per CPU second).
const KERNEL_NOISE_MAX: f64 = 0.15;
/// … and fire at least this often per second.
const KERNEL_RATE_MIN: f64 = 5.0;
/// Calls that come at most so often a second may be made by a clock: of more the moment at which they are read is too uncertain …
const CLOCK_RATE_MAX: f64 = 2000.0;
/// … as is told by the variance of their number in spans of equal length. A clock that is exact leaves 1/4 at most, by where the spans
/// begin, …
const CLOCK_VARIANCE_MAX: f64 = 0.5;
/// … however long they are (so many readings), as work does not: what varies from call to call, or with the machine's speed, adds up.
const CLOCK_SPANS: [usize; 5] = [1, 3, 6, 12, 24];
/// So many spans of a length there must be …
const CLOCK_SPANS_MIN: usize = 4;
/// … and so many readings, of which the longest have as many, before calls are refused for it …
const CLOCK_READINGS: usize = 96;
/// … and until then nothing is decided by what may come to be refused: what has no more variance than this over the shortest two. So a clock
/// whose ticks come late now and then is not taken at the first moment at which it looks like work.
const CLOCK_VARIANCE_EARLY: f64 = 2.0;
const CLOCK_SPANS_EARLY: usize = 2;
/// Bytes and calls that vary by more than this against each other (standard deviation of the logarithm of their ratio, over blocks) are told
/// apart by which of them does.
const BURSTS_MIN: f64 = 0.05;
/// It is looked after so many readings which of them does. Before, a few blocks may not show how much they vary: half of that is enough to
/// wait for the first look.
const BURSTS_LOOKS: [usize; 3] = [FEW_BLOCKS * BLOCK, 2 * FEW_BLOCKS * BLOCK, 4 * FEW_BLOCKS * BLOCK];
const BURSTS_MIN_EARLY: f64 = BURSTS_MIN / 2.0;
/// Of fewer blocks than these every one must keep the ratio.
const FEW_BLOCKS: usize = 6;
/// Points speak for kernel work after as many blocks as that. A function that is counted in turns is asked whether it agrees then for the
/// first time, and whenever there are twice as many readings, not at each of them until chance says so: its own noise falls with the length
/// of the blocks, of which there are [`LONG_BLOCKS`] then. After so many readings (of a second) it has been asked often enough.
const IN_TURNS_SPEAK_AFTER: usize = 96;
const LONG_BLOCKS: usize = 8;
/// Intervals that tell how long they are.
const LATELY: usize = 15;
/// Two kinds of kernel work confirm each other when their ratio varies by no more than this.
pub(crate) const CONFIRMATION_NOISE_MAX: f64 = 0.10;
/// … and one of them counted without the other in no larger share of the blocks than this.
const ALONE_MAX: f64 = 0.10;
/// A function that is counted for less of the CPU time than this yields to kernel work that says the same.
pub(crate) const COUNTED_MIN: f64 = 0.5;

/// Tiers in the order they are tried.
pub(crate) const TIERS: [&[MeterClass]; 3] = [
    &[MeterClass::Application, MeterClass::Kernel],
    &[MeterClass::Probe],
    &[MeterClass::Points],
];
/// Samples that progress points may take to be found before they are taken for silent: a search takes up to 40 s, and waits
/// up to two minutes for those of other programs, which are made one at a time.
const SEARCH_SAMPLES: usize = 170;

/// The next tier worth opening: one that has something to offer. Points are looked for only when nothing else will do,
/// for the search costs the workload a little; probes also when kernel work would.
pub(crate) fn next_tier(
    tier: usize,
    candidates: &[MeterCandidate],
    application: bool,
    any: bool,
) -> Option<usize> {
    (tier + 1..TIERS.len()).find(|next| {
        let classes = TIERS.get(*next).copied().unwrap_or_default();
        let enough = if classes.contains(&MeterClass::Points) {
            any
        } else {
            application
        };
        !enough
            && candidates
                .iter()
                .any(|c| c.refused.is_none() && classes.contains(&c.class))
    })
}

/// How good a meter turned out to be.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Assessment {
    /// Counts per second.
    pub(crate) rate: f64,
    /// Coefficient of variation of work per CPU second over blocks.
    pub(crate) noise: f64,
    /// By how much it may vary.
    pub(crate) noise_max: f64,
    /// Share of the workload's CPU time that counting costs.
    pub(crate) cost: f64,
    /// Share of its CPU time in which it is really counted; the rest is estimated from it.
    pub(crate) counted: f64,
    /// Why it does not qualify, with the remedy.
    pub(crate) refused: Option<String>,
    /// What is said here may change soon.
    pub(crate) unsettled: Option<Unsettled>,
    /// It varies by more than kernel work may, and so does this, to which it keeps a constant ratio.
    pub(crate) vouched_by: Option<MeterId>,
}

/// Why what is said of a meter may change soon, so that it is read for longer before anything is decided by it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unsettled {
    /// It varies by too much, and what may speak for it has few readings yet, of so many that are needed.
    Unspoken(usize),
    /// It may be made by a clock.
    Clock,
}

impl Unsettled {
    /// After so many readings (of a second) it is decided.
    pub(crate) fn readings(self) -> usize {
        match self {
            Self::Unspoken(readings) => readings,
            Self::Clock => CLOCK_READINGS,
        }
    }
}

/// Whether the noise of a meter may refuse it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NoiseLimit {
    /// As the policy says.
    Kept,
    /// The program loses its pages: then it does a hundredth of its work in one block and all of it in the next, by any meter, and that
    /// is the effect and not noise. What such a meter may judge is told at [`crate::watched::Chosen`].
    Lifted,
}

/// Judges one open meter by its readings since `since`. `None`: too few readings yet.
pub(crate) fn assess(
    candidate: &MeterCandidate,
    others: &[&MeterCandidate],
    series: &Series,
    since: Nanoseconds,
    policy: &Policy,
    limit: NoiseLimit,
) -> Option<Assessment> {
    let seen = series.since(since).count();
    let readings = series.readings(&candidate.id, since);
    let least = readings_min(candidate, series, policy);
    if readings.len() < least {
        // A meter that delivers nothing while samples come in has failed.
        let search = if candidate.class == MeterClass::Points {
            SEARCH_SAMPLES
        } else {
            0
        };
        if seen >= least * 2 + search {
            return Some(Assessment {
                rate: 0.0,
                noise: f64::INFINITY,
                noise_max: policy.meter_noise_max,
                cost: 0.0,
                counted: 1.0,
                refused: Some(format!(
                    "could be read in {} of {seen} intervals only",
                    readings.len()
                )),
                unsettled: None,
                vouched_by: None,
            });
        }
        return None;
    }
    let Counted {
        work,
        seconds,
        rate,
        cost,
        counted,
        noise,
    } = count(candidate, &readings, series, since);
    let word = if candidate.class == MeterClass::Kernel {
        word_for(candidate, others, series, since, policy, noise)
    } else {
        Word::None
    };
    // Over the time in which what speaks for it was read as well.
    let noise = match word {
        Word::Given(_, while_both) => while_both.unwrap_or(noise),
        Word::None | Word::NotYet(_) => noise,
    };
    let noise_max = if candidate.class != MeterClass::Kernel {
        policy.meter_noise_max
    } else if matches!(word, Word::Given(..)) {
        policy.meter_noise_max.max(KERNEL_NOISE_MAX)
    } else {
        KERNEL_NOISE_MAX
    };
    let by_points = matches!(word, Word::Given(_, Some(_)));
    let confirmed_by = if by_points { &watched(others)[..] } else { others };
    let lifted = limit == NoiseLimit::Lifted
        && noise.is_finite()
        && !is_of_waiting(&candidate.id)
        && !is_by_waits(candidate);
    let too_noisy = (noise > noise_max && !lifted).then(|| varies_by_more(candidate, noise, noise_max));
    // It would qualify, but comes as by a clock: longer spans may tell yet.
    let like_a_clock = candidate.class == MeterClass::Kernel
        && rate >= KERNEL_RATE_MIN
        && too_noisy.is_none()
        && may_be_a_clock(candidate, confirmed_by, series, since);
    let refused = if work <= 0.0 {
        Some(if candidate.class == MeterClass::Kernel {
            format!("counted nothing in {seconds:.0} s: the program does no such work, or is idle")
        } else {
            format!(
                "did not fire in {seconds:.0} s (the function may be inlined or unused, or the program idle)"
            )
        })
    } else if cost > policy.meter_cost_max {
        Some(too_dear(rate, cost, policy))
    } else if candidate.class == MeterClass::Hardware {
        Some("instructions alone never judge: a change may alter how many are needed".to_owned())
    } else if candidate.class == MeterClass::Kernel {
        kernel_refusal(candidate, confirmed_by, series, since, rate, too_noisy)
    } else {
        too_noisy
    };
    Some(Assessment {
        rate,
        noise,
        noise_max,
        cost,
        counted,
        refused,
        unsettled: match word {
            _ if like_a_clock => Some(Unsettled::Clock),
            Word::NotYet(readings) if seen < SEARCH_SAMPLES + 2 * IN_TURNS_SPEAK_AFTER => {
                Some(Unsettled::Unspoken(readings))
            }
            _ => None,
        },
        vouched_by: match word {
            Word::Given(id, _) if noise > KERNEL_NOISE_MAX => Some(id),
            _ => None,
        },
    })
}

/// Whether something speaks for kernel work that varies by more than it may.
#[derive(Clone, Debug, PartialEq)]
enum Word {
    None,
    /// Something may, when there are so many readings of it.
    NotYet(usize),
    /// By whom, and where these are points by how much the kernel work varied while both were read.
    Given(MeterId, Option<f64>),
}

impl Word {
    fn not_before(self, readings: usize) -> Self {
        match self {
            Self::NotYet(other) => Self::NotYet(other.max(readings)),
            _ => Self::NotYet(readings),
        }
    }
}

/// Of these meters those whose ratio to another a trial can watch: not switches.
fn watched<'a>(others: &[&'a MeterCandidate]) -> Vec<&'a MeterCandidate> {
    others.iter().copied().filter(|o| !is_of_waiting(&o.id)).collect()
}

/// Where a function that is known says the same as kernel work, what varies is the program or the machine, not the meter. So it is where
/// points do: places in the program's code that were seen to be neither waiting nor a clock. These are found long after kernel work is
/// read, and were often chosen because they keep to it; so what counts is the time in which both were read, of which there must be enough,
/// and in which they must vary alike. Kernel work takes their place then, which is counted to the last unit. Switches are spoken for by
/// nothing: where threads run may change how many a unit takes.
fn word_for(
    candidate: &MeterCandidate,
    others: &[&MeterCandidate],
    series: &Series,
    since: Nanoseconds,
    policy: &Policy,
    noise_of_all: f64,
) -> Word {
    let mut word = Word::None;
    if is_of_waiting(&candidate.id) {
        return word;
    }
    for other in others {
        let is_points = other.class == MeterClass::Points;
        let may_speak = if is_points {
            noise_of_all > KERNEL_NOISE_MAX
        } else {
            other.class == MeterClass::Probe && !is_by_waits(other)
        };
        if !may_speak {
            continue;
        }
        let both: Vec<_> = series
            .since(since)
            .filter_map(|i| Some((i.work.get(&candidate.id)?.0, i.work.get(&other.id)?.0, i.cpu)))
            .collect();
        // A few blocks say nothing for sure, also not that they disagree.
        let speak_after = FEW_BLOCKS * block(series.lag(&other.id), series);
        if is_points && both.len() < speak_after {
            if confirming(candidate, &watched(others), series, since).is_some() {
                word = word.not_before(speak_after);
            }
            continue;
        }
        // One of the looks.
        let at_last = (1..)
            .map(|n| speak_after << n)
            .find(|readings| *readings >= IN_TURNS_SPEAK_AFTER)
            .unwrap_or(IN_TURNS_SPEAK_AFTER);
        let of = |work: fn(&(f64, f64, f64)) -> f64| {
            let length = block(lag(candidate, series).max(lag(other, series)), series);
            noise(
                &both.iter().map(|b| (work(b), 0.0, b.2)).collect::<Vec<_>>(),
                length,
            )
        };
        let (own, its) = (of(|b| b.0), of(|b| b.1));
        let agrees = ratio_variation(&candidate.id, &other.id, series, since) <= CONFIRMATION_NOISE_MAX;
        if its > policy.meter_noise_max {
            continue;
        }
        if !agrees {
            // So noisy an estimate may agree, and be seen to do so in longer blocks only.
            if own > KERNEL_NOISE_MAX
                && own <= policy.meter_noise_max
                && both.len() < at_last
                && is_estimate(&other.id, series, since)
                && confirming(candidate, &watched(others), series, since).is_some()
            {
                word = word.not_before(at_last);
            }
            continue;
        }
        if !is_points {
            return Word::Given(other.id.clone(), None);
        }
        if own <= KERNEL_NOISE_MAX.max(its + CONFIRMATION_NOISE_MAX) {
            return Word::Given(other.id.clone(), Some(own));
        }
    }
    word
}

/// What the readings of a meter come to.
struct Counted {
    work: f64,
    seconds: f64,
    rate: f64,
    cost: f64,
    counted: f64,
    noise: f64,
}

fn count(
    candidate: &MeterCandidate,
    readings: &[(f64, f64, f64)],
    series: &Series,
    since: Nanoseconds,
) -> Counted {
    let work: f64 = readings.iter().map(|r| r.0).sum();
    let seconds: f64 = readings.iter().map(|r| r.1).sum();
    let cpu: f64 = readings.iter().map(|r| r.2).sum();
    let counted = series.counted(&candidate.id, since);
    // What was really counted, reading by reading: where more is done, less of it is counted.
    let hits = series.hits(&candidate.id, since);
    let cost = if cpu > 0.0 {
        hits * candidate.cost_per_count.as_secs_f64() / cpu
    } else {
        0.0
    };
    Counted {
        work,
        seconds,
        rate: if seconds > 0.0 { work / seconds } else { 0.0 },
        cost,
        counted,
        noise: noise(readings, block(lag(candidate, series), series)),
    }
}

fn varies_by_more(candidate: &MeterCandidate, noise: f64, noise_max: f64) -> String {
    let of_what = if candidate.class == MeterClass::Kernel {
        " for kernel work"
    } else {
        ""
    };
    format!(
        "varies by {:.0} % per CPU second from block to block (limit{of_what} {:.0} %)",
        noise * 100.0,
        noise_max * 100.0
    )
}

fn too_dear(rate: f64, cost: f64, policy: &Policy) -> String {
    format!(
        "would cost {:.1} % of the workload's CPU time at {rate:.0} counts per second (limit {:.1} %, policy.meter_cost_max); choose a \
         function called once per batch",
        cost * 100.0,
        policy.meter_cost_max * 100.0
    )
}

/// What a meter that was chosen in a loss comes to since that was over; else why it may judge nothing else. `None`: too few readings yet.
/// What confirms it is known.
pub(crate) fn assess_again(
    candidate: &MeterCandidate,
    before: &Assessment,
    series: &Series,
    since: Nanoseconds,
    policy: &Policy,
) -> Option<Result<Assessment, String>> {
    let readings = series.readings(&candidate.id, since);
    if readings.len() < readings_min(candidate, series, policy) {
        return None;
    }
    let now = count(candidate, &readings, series, since);
    Some(if !now.noise.is_finite() {
        Err(format!(
            "{} has counted nothing in half of the blocks since the program loses no pages any more",
            candidate.id
        ))
    } else if now.cost > policy.meter_cost_max {
        Err(format!(
            "{} {}",
            candidate.id,
            too_dear(now.rate, now.cost, policy)
        ))
    } else if now.noise > before.noise_max {
        Err(format!(
            "{} {} also while the program loses no pages",
            candidate.id,
            varies_by_more(candidate, now.noise, before.noise_max)
        ))
    } else {
        Ok(Assessment {
            rate: now.rate,
            noise: now.noise,
            cost: now.cost,
            counted: now.counted,
            ..before.clone()
        })
    })
}

/// Intervals joined into one block when the noise of a meter is judged that may tell so late: what lies nearer to each other is partly told by
/// the same.
fn block(lag: Nanoseconds, series: &Series) -> usize {
    if lag == Nanoseconds::ZERO {
        return BLOCK;
    }
    let mut lengths: Vec<f64> = series.since(Nanoseconds::ZERO).map(|i| i.seconds).collect();
    // One sample that was late says nothing of the others.
    let lately = lengths.split_off(lengths.len().saturating_sub(LATELY));
    let interval = robust::median(&lately);
    if interval > 0.0 {
        block_of(lag, interval)
    } else {
        BLOCK
    }
}

/// The same of intervals of this length (seconds).
fn block_of(lag: Nanoseconds, interval: f64) -> usize {
    BLOCK.max((lag.as_secs_f64() / interval).round() as usize)
}

/// How late a meter may tell, as far as is known.
pub(crate) fn lag(candidate: &MeterCandidate, series: &Series) -> Nanoseconds {
    candidate.lag.max(series.lag(&candidate.id))
}

/// Readings that a meter is judged from at least: as many blocks of one that tells late as of others.
fn readings_min(candidate: &MeterCandidate, series: &Series, policy: &Policy) -> usize {
    policy.meter_samples_min * block(lag(candidate, series), series) / BLOCK
}

/// Readings, of a second, after which a meter that tells so late can have been judged, and can have spoken for others where it may.
pub fn readings_wanted(lag: Nanoseconds) -> usize {
    FEW_BLOCKS * block_of(lag, 1.0)
}

/// Coefficient of variation of work per CPU second over blocks of so many readings.
fn noise(readings: &[(f64, f64, f64)], length: usize) -> f64 {
    let ratios: Vec<f64> = blocks(readings, length)
        .into_iter()
        .filter(|(_, cpu)| *cpu > 0.0)
        .map(|(work, cpu)| work / cpu)
        .collect();
    variation(&ratios)
}

/// Work and CPU seconds of each block of so many readings.
fn blocks(readings: &[(f64, f64, f64)], length: usize) -> Vec<(f64, f64)> {
    readings
        .chunks_exact(length)
        .map(|block| block.iter().fold((0.0, 0.0), |sum, r| (sum.0 + r.0, sum.1 + r.2)))
        .collect()
}

/// What is told of a meter that counts in turns, after its cost; nothing of others.
pub(crate) fn in_turns(counted: f64, lag: Nanoseconds) -> String {
    if counted >= 1.0 {
        return String::new();
    }
    let mut told = format!(
        ", counted in turns: {:.0} % of its CPU time, the rest estimated",
        counted * 100.0
    );
    if lag > Nanoseconds::ZERO {
        told += &format!(" and told up to {:.0} s late", lag.as_secs_f64().ceil());
    }
    told
}

/// What is told of kernel work that varies by more than it may, after its cost; nothing of others.
pub(crate) fn vouched(assessment: &Assessment) -> String {
    assessment.vouched_by.as_ref().map_or_else(String::new, |by| {
        format!(
            ", more noise than the {:.0} % of kernel work, but as much as {by} has, to which it keeps a constant ratio",
            KERNEL_NOISE_MAX * 100.0
        )
    })
}

fn kernel_refusal(
    candidate: &MeterCandidate,
    others: &[&MeterCandidate],
    series: &Series,
    since: Nanoseconds,
    rate: f64,
    too_noisy: Option<String>,
) -> Option<String> {
    if rate < KERNEL_RATE_MIN {
        return Some(format!(
            "fires {rate:.1} times a second (at least {KERNEL_RATE_MIN} needed)"
        ));
    }
    if too_noisy.is_some() {
        return too_noisy;
    }
    if runs_by_a_clock(&candidate.id, series) {
        return Some(format!(
            "comes {rate:.1} times a second and as evenly as by a clock while the program is busy, so it may be its log or a timer"
        ));
    }
    if confirming(candidate, others, series, since).is_some() {
        return None;
    }
    let by_a_clock = witnesses(candidate, others, series, since).min_by(|a, b| a.0.total_cmp(&b.0));
    Some(by_a_clock.map_or_else(
        || {
            "no second kind of kernel work keeps a constant ratio to it, so it may count waiting or polling"
                .to_owned()
        },
        |(_, id)| {
            format!(
                "only {id} keeps a constant ratio to it, which comes as evenly as by a clock while the program is busy, so both may be its \
                 log or a timer"
            )
        },
    ))
}

/// Whether calls or switches come as evenly in time as by a clock, in a program whose threads are always at work: a log, a progress line, a
/// timer. Calls and their bytes confirm each other then, and are no work. Work that is as steady, on a machine that is as steady, cannot be
/// told from it, and has to be counted otherwise. Not what connections carry, nor in a program that waits: whoever gives it its work may do
/// so by a clock.
///
/// It is asked of all that was read of it: what else is looked at since begins to be read anew.
fn runs_by_a_clock(id: &MeterId, series: &Series) -> bool {
    as_by_a_clock(id, series).is_some_and(|seen| seen.is_so(&CLOCK_SPANS, CLOCK_VARIANCE_MAX))
}

/// Whether it would qualify, but may come to be refused as a clock's, itself or all that confirms it.
fn may_be_a_clock(
    candidate: &MeterCandidate,
    others: &[&MeterCandidate],
    series: &Series,
    since: Nanoseconds,
) -> bool {
    let early = CLOCK_SPANS.get(..CLOCK_SPANS_EARLY).unwrap_or_default();
    let may_be = |id: &MeterId| {
        as_by_a_clock(id, series).is_some_and(|seen| {
            seen.readings.len() < CLOCK_READINGS && seen.is_so(early, CLOCK_VARIANCE_EARLY)
        })
    };
    let mut confirmed_by = witnesses(candidate, others, series, since).peekable();
    confirmed_by.peek().is_some() && (may_be(&candidate.id) || confirmed_by.all(|(_, id)| may_be(id)))
}

/// Calls by reading, of a program whose threads are always at work.
struct Ticks {
    /// Their number and the seconds over which they were counted.
    readings: Vec<(f64, f64)>,
    /// How many a second.
    rate: f64,
}

impl Ticks {
    /// Whether their number varies by no more over spans of these lengths.
    fn is_so(&self, lengths: &[usize], variance_max: f64) -> bool {
        lengths.iter().all(|length| {
            let spans = self.readings.chunks_exact(*length);
            let number = spans.len();
            let off: f64 = spans
                .map(|span| span.iter().map(|r| r.0 - self.rate * r.1).sum::<f64>().powi(2))
                .sum();
            number < CLOCK_SPANS_MIN || off <= variance_max * number as f64
        })
    }
}

/// What a clock could count so, of a program that could not be asked by one.
fn as_by_a_clock(id: &MeterId, series: &Series) -> Option<Ticks> {
    if !(id.as_str().ends_with("_calls") || is_of_waiting(id)) {
        return None;
    }
    let (mut readings, mut seconds, mut busy) = (Vec::new(), 0.0, 0.0);
    for i in series.since(Nanoseconds::ZERO) {
        if let Some(read) = i.work.get(id) {
            readings.push(*read);
            seconds += i.seconds;
            busy += i.cpu + i.wait;
        }
    }
    let (calls, counted) = readings
        .iter()
        .fold((0.0, 0.0), |sum, r| (sum.0 + r.0, sum.1 + r.1));
    if seconds <= 0.0 || counted <= 0.0 || !keeps_threads_busy(busy / seconds, None) {
        return None;
    }
    let rate = calls / counted;
    (KERNEL_RATE_MIN..CLOCK_RATE_MAX)
        .contains(&rate)
        .then_some(Ticks { readings, rate })
}

/// The other kind of kernel work that keeps the most constant ratio to this one, of those that confirm it; switches only where nothing else
/// does, since no trial watches their ratio.
pub(crate) fn confirming(
    candidate: &MeterCandidate,
    others: &[&MeterCandidate],
    series: &Series,
    since: Nanoseconds,
) -> Option<MeterId> {
    witnesses(candidate, others, series, since)
        .filter(|(_, id)| !runs_by_a_clock(id, series))
        .min_by(|a, b| {
            let key = |id: &MeterId| u8::from(is_of_waiting(id));
            key(a.1).cmp(&key(b.1)).then(a.0.total_cmp(&b.0))
        })
        .map(|(_, id)| id.clone())
}

/// Other kinds of kernel work that keep a constant ratio to this one, with how much it varies.
fn witnesses<'a>(
    candidate: &'a MeterCandidate,
    others: &'a [&'a MeterCandidate],
    series: &'a Series,
    since: Nanoseconds,
) -> impl Iterator<Item = (f64, &'a MeterId)> {
    others
        .iter()
        .filter(move |other| {
            other.class == MeterClass::Kernel
                && family(&other.id) != family(&candidate.id)
                && rate_of(&other.id, series, since) >= KERNEL_RATE_MIN
        })
        .map(move |other| {
            (
                ratio_variation(&candidate.id, &other.id, series, since),
                &other.id,
            )
        })
        .filter(|(varies, _)| *varies <= CONFIRMATION_NOISE_MAX)
}

/// Counts per second.
fn rate_of(id: &MeterId, series: &Series, since: Nanoseconds) -> f64 {
    let readings = series.since(since).filter_map(|i| i.work.get(id));
    let (work, seconds) = readings.fold((0.0, 0.0), |sum, r| (sum.0 + r.0, sum.1 + r.1));
    if seconds > 0.0 { work / seconds } else { 0.0 }
}

/// `io.write_calls` → `io.write`: counters of one family say the same thing and do not confirm each other.
fn family(id: &MeterId) -> &str {
    let text = id.as_str();
    if text.starts_with("io.bytes") {
        "io.bytes"
    } else {
        text.split('_').next().unwrap_or(text)
    }
}

/// Whether a meter is counted for a small part of the time, and the rest is reckoned from that.
fn is_estimate(id: &MeterId, series: &Series, since: Nanoseconds) -> bool {
    series.counted(id, since) < COUNTED_MIN
}

/// How many of so many readings were there when it was looked at them last, and for the first time at so many.
fn last_look(readings: usize, first: usize) -> usize {
    let mut look = first;
    if readings < look {
        return readings;
    }
    while 2 * look <= readings {
        look *= 2;
    }
    look
}

/// How much the ratio of two counters varies from block to block, which are the longer the more was read where one of them is an estimate.
/// A block in which only one of them counted says that they do not
/// count the same: a few bytes that a JVM writes once a minute confirm nothing.
fn ratio_variation(a: &MeterId, b: &MeterId, series: &Series, since: Nanoseconds) -> f64 {
    let pairs: Vec<(f64, f64)> = series
        .since(since)
        .filter_map(|i| Some((i.work.get(a)?.0, i.work.get(b)?.0)))
        .collect();
    let (looked_at, length) = if is_estimate(a, series, since) || is_estimate(b, series, since) {
        let late = block(series.lag(a).max(series.lag(b)), series);
        let look = last_look(pairs.len(), FEW_BLOCKS * late);
        (look, late.max(look / LONG_BLOCKS))
    } else {
        (pairs.len(), BLOCK)
    };
    let blocks: Vec<(f64, f64)> = pairs
        .get(..looked_at)
        .unwrap_or(&pairs)
        .chunks_exact(length)
        .map(|c| c.iter().fold((0.0, 0.0), |s, p| (s.0 + p.0, s.1 + p.1)))
        // Nothing was done.
        .filter(|(x, y)| *x > 0.0 || *y > 0.0)
        .collect();
    let ratios: Vec<f64> = blocks
        .iter()
        .filter(|(x, y)| *x > 0.0 && *y > 0.0)
        .map(|(x, y)| x / y)
        .collect();
    let alone = blocks.len() - ratios.len();
    if ratios.len() < 2 || alone as f64 > ALONE_MAX * blocks.len() as f64 {
        f64::INFINITY
    } else if ratios.len() < FEW_BLOCKS {
        // The spread of a few leaves the one out that differs.
        let median = robust::median(&ratios);
        ratios
            .iter()
            .fold(0.0, |most, r| f64::max(most, (r / median - 1.0).abs()))
    } else {
        variation(&ratios)
    }
}

/// Robust coefficient of variation: 1.4826 × MAD / median. One value or none says nothing: infinite.
fn variation(values: &[f64]) -> f64 {
    if values.len() < 2 {
        return f64::INFINITY;
    }
    let median = robust::median(values);
    if median <= 0.0 || !median.is_finite() {
        return f64::INFINITY;
    }
    robust::mad_sigma(values) / median
}

/// Whether a kind of kernel work is switches of threads: a change of where threads run, or of what they wait for, may change how
/// many of them a unit of work takes.
pub(crate) fn is_of_waiting(id: &MeterId) -> bool {
    id.as_str().starts_with("switches")
}

/// Whether most of its work may be told by how often threads wait, by what was counted a moment before: it keeps a constant ratio to the
/// latter, and whoever waits for its pages would be told as working.
fn is_by_waits(candidate: &MeterCandidate) -> bool {
    candidate.lag > Nanoseconds::ZERO
}

/// The meter to use, of those that qualify: the one nearest to the work. A function that can be counted for a small part of the time
/// only is an estimate with noise of its own; where kernel work was confirmed and keeps a constant ratio to it, it is the same work
/// and counted to the last unit, so that is taken. (nginx over three loads: the function, counted for 4 % of the time, was wrong by
/// 4.8 % of the truth, bytes by 0.01 %; docs/meters.md.) Not switches: a change of where threads run may change how many a unit takes.
pub(crate) fn choose<'a>(
    assessed: impl IntoIterator<Item = (&'a MeterCandidate, &'a Assessment)>,
    series: &Series,
    since: Nanoseconds,
) -> Option<Best<'a>> {
    let mut good: Vec<(&MeterCandidate, &Assessment)> = assessed
        .into_iter()
        .filter(|(_, a)| a.refused.is_none())
        .collect();
    good.sort_by_key(|(c, a)| preference(c, a));
    let (candidate, assessment) = steadier_calls(&good, series, since).or_else(|| good.first().copied())?;
    let best = Best {
        candidate,
        assessment,
        stands_for: None,
    };
    if candidate.class != MeterClass::Probe || assessment.counted >= COUNTED_MIN {
        return Some(best);
    }
    let exact: Vec<_> = good
        .into_iter()
        .filter(|(c, _)| {
            c.class == MeterClass::Kernel
                && !is_of_waiting(&c.id)
                && ratio_variation(&candidate.id, &c.id, series, since) <= CONFIRMATION_NOISE_MAX
        })
        .collect();
    let exact = steadier_calls(&exact, series, since).or_else(|| exact.first().copied());
    Some(exact.map_or(best, |(exact, assessment)| Best {
        candidate: exact,
        assessment,
        stands_for: Some(&candidate.id),
    }))
}

/// Calls instead of bytes, where bytes come in bursts that calls do not have: a database's log grows with each of its writes, and now and
/// then it writes much at once of what it has kept. (RocksDB: bytes were wrong by 10.6 %, write calls by .09 %; docs/meters.md.) What varies
/// alike in both is the program or the machine; of what varies in their ratio most must be in the bytes, as it is not where a pipe is more
/// or less full. (Where the machine moves both by much more than their ratio moves a few blocks show nothing of that: of zstd, whose calls
/// were wrong by 18 %, six blocks of a loud hour had a slope of .65, with an error of 1.2.)
fn steadier_calls<'a>(
    good: &[(&'a MeterCandidate, &'a Assessment)],
    series: &Series,
    since: Nanoseconds,
) -> Option<(&'a MeterCandidate, &'a Assessment)> {
    let bytes = good.first().filter(|(c, _)| is_of_files(c))?.0;
    let all = good.iter().filter(|(c, _)| is_calls(c));
    all.filter_map(|calls| {
        let both = BytesAndCalls::of(bytes, calls.0, series, since);
        both.come_in_bursts().then_some((both.of_calls, *calls))
    })
    .min_by(|a, b| a.0.total_cmp(&b.0))
    .map(|(_, calls)| calls)
}

fn is_of_files(bytes: &MeterCandidate) -> bool {
    bytes.id.as_str() == "io.bytes"
}

fn is_calls(candidate: &MeterCandidate) -> bool {
    candidate.id.as_str().ends_with("_calls")
}

/// After how many readings it is looked again, where the meter that would be taken is bytes of files, which vary against calls that would do
/// as well, and it is not clear yet whether they come in bursts. For a while: readings may be missing.
pub(crate) fn bursts_are_looked_for_after<'a>(
    taken: &MeterCandidate,
    assessed: impl IntoIterator<Item = (&'a MeterCandidate, &'a Assessment)>,
    series: &Series,
    since: Nanoseconds,
) -> Option<usize> {
    let [first, .., last] = BURSTS_LOOKS;
    if !is_of_files(taken) || series.since(since).count() >= 2 * last {
        return None;
    }
    let all = assessed.into_iter();
    all.filter(|(calls, a)| is_calls(calls) && a.refused.is_none())
        .filter_map(|(calls, _)| {
            let both = BytesAndCalls::of(taken, calls, series, since);
            let next = BURSTS_LOOKS.into_iter().find(|look| both.readings < *look)?;
            let may_be = if both.readings < first {
                both.are_apart_by(BURSTS_MIN_EARLY)
            } else {
                both.may_come_in_bursts()
            };
            may_be.then_some(next)
        })
        .max()
}

/// How bytes and calls vary per CPU second, over blocks (logarithms).
struct BytesAndCalls {
    readings: usize,
    blocks: usize,
    /// Variance of the calls.
    of_calls: f64,
    /// Variance of the ratio of both.
    apart: f64,
    /// Slope of both together (their product) on that ratio, and its standard error. It is 1 where what varies in the ratio is in the bytes
    /// and -1 where it is in the calls, whatever varies in both alike; of that there may be so much that few blocks tell nothing.
    in_bytes: (f64, f64),
}

impl BytesAndCalls {
    fn of(bytes: &MeterCandidate, calls: &MeterCandidate, series: &Series, since: Nanoseconds) -> Self {
        let both: Vec<(f64, f64, f64)> = series
            .since(since)
            .filter_map(|i| Some((i.work.get(&bytes.id)?.0, i.work.get(&calls.id)?.0, i.cpu)))
            .collect();
        let blocks: Vec<(f64, f64)> = both
            .chunks_exact(BLOCK)
            .map(|block| {
                block
                    .iter()
                    .fold((0.0, 0.0, 0.0), |s, b| (s.0 + b.0, s.1 + b.1, s.2 + b.2))
            })
            .filter(|(bytes, calls, cpu)| *bytes > 0.0 && *calls > 0.0 && *cpu > 0.0)
            .map(|(bytes, calls, cpu)| (robust::ln(bytes / cpu), robust::ln(calls / cpu)))
            .collect();
        let of =
            |value: fn(&(f64, f64)) -> f64| robust::variance(&blocks.iter().map(value).collect::<Vec<_>>());
        let (of_bytes, of_calls) = (of(|b| b.0), of(|b| b.1));
        let (together, apart) = (of(|b| b.0 + b.1), of(|b| b.0 - b.1));
        let slope = (of_bytes - of_calls) / apart;
        let rest = (together - slope * slope * apart).max(0.0);
        let freedom = (blocks.len() as f64 - 2.0).max(1.0);
        Self {
            readings: both.len(),
            blocks: blocks.len(),
            of_calls,
            apart,
            in_bytes: (slope, (rest / apart / freedom).sqrt()),
        }
    }

    fn are_apart_by(&self, least: f64) -> bool {
        self.apart > least * least
    }

    /// The slope and its limit of error (level .05, one side), where the ratio varies by too much to say the same.
    fn slope(&self) -> Option<(f64, f64)> {
        if self.blocks < FEW_BLOCKS || !self.are_apart_by(BURSTS_MIN) {
            return None;
        }
        let (slope, error) = self.in_bytes;
        Some((
            slope,
            error * robust::student_t_limit(0.05, (self.blocks - 2) as f64),
        ))
    }

    /// Whether most of that is in the bytes, and proven not to be in the calls.
    fn come_in_bursts(&self) -> bool {
        self.slope()
            .is_some_and(|(slope, limit)| slope > 0.5 && slope > limit)
    }

    /// Whether most of it may be in the bytes.
    fn may_come_in_bursts(&self) -> bool {
        self.slope().is_some_and(|(slope, limit)| slope + limit > 0.5)
    }
}

/// The meter to use.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Best<'a> {
    pub(crate) candidate: &'a MeterCandidate,
    pub(crate) assessment: &'a Assessment,
    /// The function that is nearer to the work, of which it says the same.
    pub(crate) stands_for: Option<&'a MeterId>,
}

/// Order of preference among qualified meters: class, then kind of kernel work, then noise.
fn preference(candidate: &MeterCandidate, assessment: &Assessment) -> (u8, u8, u64) {
    let class = match candidate.class {
        MeterClass::Application => 0,
        MeterClass::Probe => 1,
        MeterClass::Kernel => 2,
        MeterClass::Points => 3,
        MeterClass::Hardware => 4,
    };
    // Segments of a connection are requests and answers; bytes and calls of all files have the program's own in them. Of
    // PostgreSQL under pgbench, beside compilers, segments were wrong by 5 % of the truth, io.bytes by 24 %. How many bytes one call
    // carries depends on how full a pipe is when it is read: of zstd bytes were wrong by 0.1 %, write calls by 18 %
    // (docs/meters.md).
    let id = candidate.id.as_str();
    let kernel = if id.starts_with("socket") {
        0
    } else if id.starts_with("io.bytes") {
        1
    } else if id.starts_with("io.") {
        2
    } else {
        3
    };
    (class, kernel, (assessment.noise * 1e6) as u64)
}

/// What was measured in one interval, for [`judge_meters`].
#[derive(Clone, Debug, Default, PartialEq)]
pub struct MeterInterval {
    /// Its length in seconds.
    pub seconds: f64,
    /// CPU seconds that the workload used.
    pub cpu: f64,
    /// Seconds that its threads waited for a CPU.
    pub wait: f64,
    /// Work by meter: counts, and the seconds over which they were counted.
    pub work: BTreeMap<MeterId, (f64, f64)>,
    /// Share of the CPU time in which that was really counted, of meters that count in turns.
    pub counted: BTreeMap<MeterId, f64>,
    /// How long before its end some of it may have been counted, of meters that tell so late.
    pub lags: BTreeMap<MeterId, Nanoseconds>,
}

impl MeterInterval {
    /// Of a sample of its workload. What cannot be is left out.
    pub fn of(sample: &WorkloadSample) -> Self {
        let readings = || sample.meters.iter();
        Self {
            seconds: sample.interval.as_secs_f64(),
            cpu: sample.cpu.as_secs_f64(),
            wait: sample.runqueue_wait.as_secs_f64(),
            work: readings()
                .filter(|m| m.interval.0 > 0 && m.work.is_finite() && m.work >= 0.0)
                .map(|m| (m.meter.clone(), (m.work, m.interval.as_secs_f64())))
                .collect(),
            counted: readings()
                .filter(|m| m.counted < 1.0)
                .map(|m| (m.meter.clone(), m.counted.max(0.0)))
                .collect(),
            lags: readings()
                .filter(|m| m.lag > Nanoseconds::ZERO)
                .map(|m| (m.meter.clone(), m.lag))
                .collect(),
        }
    }
}

/// What the mind makes of a meter.
#[derive(Clone, Debug, PartialEq)]
pub struct JudgedMeter {
    /// Which.
    pub id: MeterId,
    /// Counts per second.
    pub rate: f64,
    /// Coefficient of variation of work per CPU second over blocks of four intervals; infinite when not known.
    pub noise: f64,
    /// Smallest effect on work per CPU second that a trial of twenty minutes could prove with it (a share of the work),
    /// if its noise averages out over longer blocks; infinite when not known.
    pub detectable: f64,
    /// Share of the workload's CPU time that counting costs.
    pub cost: f64,
    /// Share of its CPU time in which it is really counted; the rest is estimated from it. 1: all the time.
    pub counted: f64,
    /// Whether it is the one that would be used.
    pub chosen: bool,
    /// The function that is nearer to the work but counted for a small part of the time, for which it is used.
    pub stands_for: Option<MeterId>,
    /// It varies by more than kernel work may, and so does this, to which it keeps a constant ratio.
    pub vouched_by: Option<MeterId>,
    /// Why it does not qualify, with the remedy.
    pub refused: Option<String>,
}

/// Length of the trial that [`JudgedMeter::detectable`] is about (seconds).
const DETECTABLE_S: f64 = 1200.0;
/// … and of its blocks, with their washout.
const DETECTABLE_BLOCK_S: f64 = 30.0;

/// Judges meters that were all open over the same intervals, as the engine does with those of a workload. Refused
/// candidates keep their reason. `None` for a meter that has too few readings yet.
pub fn judge_meters(
    candidates: &[MeterCandidate],
    intervals: &[MeterInterval],
    policy: &Policy,
) -> Vec<Option<JudgedMeter>> {
    let mut series = Series::default();
    let mut end = Nanoseconds::ZERO;
    for interval in intervals {
        end += Nanoseconds::from_secs_f64(interval.seconds);
        series.push(Interval {
            end,
            seconds: interval.seconds,
            cpu: interval.cpu,
            wait: interval.wait,
            machine_idle: 0.0,
            churn: 0,
            faults: (0, 0),
            work: interval.work.clone(),
            counted: interval.counted.clone(),
            lags: interval.lags.clone(),
            spans: None,
        });
    }
    let open: Vec<&MeterCandidate> = candidates.iter().filter(|c| c.refused.is_none()).collect();
    let assessed: Vec<Option<Assessment>> = candidates
        .iter()
        .map(|candidate| {
            candidate.refused.is_none().then_some(())?;
            let others: Vec<&MeterCandidate> =
                open.iter().copied().filter(|o| o.id != candidate.id).collect();
            assess(
                candidate,
                &others,
                &series,
                Nanoseconds::ZERO,
                policy,
                NoiseLimit::Kept,
            )
        })
        .collect();
    let known = candidates
        .iter()
        .zip(&assessed)
        .filter_map(|(c, a)| Some((c, a.as_ref()?)));
    let best = choose(known, &series, Nanoseconds::ZERO);
    let is_best = |id: &MeterId| best.is_some_and(|b| b.candidate.id == *id);
    candidates
        .iter()
        .zip(&assessed)
        .map(|(candidate, assessed)| {
            let unknown = JudgedMeter {
                id: candidate.id.clone(),
                rate: 0.0,
                noise: f64::INFINITY,
                detectable: f64::INFINITY,
                cost: 0.0,
                counted: 1.0,
                chosen: is_best(&candidate.id),
                stands_for: best
                    .filter(|b| b.candidate.id == candidate.id)
                    .and_then(|b| b.stands_for.cloned()),
                vouched_by: None,
                refused: candidate.refused.clone(),
            };
            let Some(a) = assessed else {
                return candidate.refused.is_some().then_some(unknown);
            };
            let length = block(lag(candidate, &series), &series);
            Some(JudgedMeter {
                rate: a.rate,
                noise: a.noise,
                detectable: detectable(
                    a.noise,
                    lag(candidate, &series),
                    length,
                    intervals,
                    policy,
                ),
                cost: a.cost,
                counted: a.counted,
                vouched_by: a.vouched_by.clone(),
                refused: a.refused.clone().map(|why| match a.unsettled {
                    Some(Unsettled::Clock) => {
                        format!("{why}, of which {CLOCK_READINGS} s are needed to be sure: test for longer")
                    }
                    Some(Unsettled::Unspoken(readings)) => format!(
                        "{why}; what may speak for it has not been read for long enough ({readings} s are needed): test for longer"
                    ),
                    None => why,
                }),
                ..unknown
            })
        })
        .collect()
}

/// The smallest effect that a trial of [`DETECTABLE_S`] could prove: its blocks are longer than those over which the
/// noise was judged (so many intervals), and differences of two are what the trial bets on. Where readings may tell what was counted so long
/// before, that is left out of each block.
fn detectable(
    noise: f64,
    lag: Nanoseconds,
    length: usize,
    intervals: &[MeterInterval],
    policy: &Policy,
) -> f64 {
    let seconds: f64 = intervals.iter().map(|i| i.seconds).sum();
    let judged_s = length as f64 * seconds / intervals.len().max(1) as f64;
    let measured_s = DETECTABLE_BLOCK_S - lag.as_secs_f64();
    let averaged = (judged_s / measured_s.max(judged_s)).sqrt();
    let scale =
        (noise * averaged * std::f64::consts::SQRT_2).max(homeostat_statistics::block_length::SCALE_FLOOR);
    let trial = &policy.trial;
    let for_one_scale = homeostat_statistics::block_length::blocks_needed(trial.design, trial.alpha, 1.0);
    scale * (for_one_scale / (DETECTABLE_S / DETECTABLE_BLOCK_S)).sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn candidate(id: &str, class: MeterClass, cost_us: u64) -> MeterCandidate {
        MeterCandidate {
            id: id.into(),
            class,
            unit: "x".into(),
            cost_per_count: Nanoseconds(cost_us * 1000),
            lag: Nanoseconds::ZERO,
            refused: None,
        }
    }

    fn series(work: impl Fn(u64) -> Vec<(&'static str, f64)>) -> Series {
        series_of(24, work)
    }

    fn series_of(seconds: u64, work: impl Fn(u64) -> Vec<(&'static str, f64)>) -> Series {
        counted_in_turns(seconds, &BTreeMap::new(), work)
    }

    fn counted_in_turns(
        seconds: u64,
        counted: &BTreeMap<MeterId, f64>,
        work: impl Fn(u64) -> Vec<(&'static str, f64)>,
    ) -> Series {
        let mut s = Series::default();
        for t in 1..=seconds {
            s.push(Interval {
                end: Nanoseconds::from_secs(t),
                seconds: 1.0,
                cpu: 0.5,
                wait: 0.0,
                machine_idle: 0.5,
                churn: 0,
                faults: (0, 0),
                work: work(t)
                    .into_iter()
                    .map(|(k, v)| (MeterId::new(k), (v, 1.0)))
                    .collect::<BTreeMap<_, _>>(),
                counted: counted.clone(),
                lags: BTreeMap::new(),
                spans: None,
            });
        }
        s
    }

    fn judge(c: &MeterCandidate, others: &[&MeterCandidate], s: &Series) -> Assessment {
        assess(
            c,
            others,
            s,
            Nanoseconds::ZERO,
            &Policy::default(),
            NoiseLimit::Kept,
        )
        .expect("enough readings")
    }

    #[test]
    fn a_probe_that_never_fires_is_refused_with_the_likely_cause() {
        let c = candidate("uprobe:f", MeterClass::Probe, 1);
        let a = judge(&c, &[], &series(|_| vec![("uprobe:f", 0.0)]));
        assert!(a.refused.unwrap().contains("inlined"));
    }

    #[test]
    fn noise_refuses_no_meter_in_a_loss_but_one_that_counts_waiting() {
        let swings = |t: u64| if t % 8 < 4 { 10.0 } else { 1000.0 };
        let policy = Policy::default();
        let judge = |c: &MeterCandidate, others: &[&MeterCandidate], s: &Series, limit| {
            let a = assess(c, others, s, Nanoseconds::ZERO, &policy, limit).expect("enough readings");
            a.refused.is_none()
        };
        let (own, read, bytes, switches) = (
            candidate("progress", MeterClass::Application, 0),
            candidate("io.read_calls", MeterClass::Kernel, 0),
            candidate("io.bytes", MeterClass::Kernel, 0),
            candidate("switches.voluntary", MeterClass::Kernel, 0),
        );
        let by_waits = MeterCandidate {
            lag: Nanoseconds::from_secs(5),
            ..candidate("uprobe:f", MeterClass::Probe, 0)
        };
        let s = series(|t| {
            [
                "progress",
                "io.read_calls",
                "io.bytes",
                "switches.voluntary",
                "uprobe:f",
            ]
            .map(|id| (id, swings(t)))
            .to_vec()
        });
        for (c, others, is_taken) in [
            (&own, vec![], true),
            (&read, vec![&bytes], true),
            (&read, vec![], false),
            (&switches, vec![&read], false),
            (&by_waits, vec![], false),
        ] {
            assert!(!judge(c, &others, &s, NoiseLimit::Kept), "{}", c.id);
            assert_eq!(judge(c, &others, &s, NoiseLimit::Lifted), is_taken, "{}", c.id);
        }
    }

    #[test]
    fn a_meter_taken_in_a_loss_is_judged_again_by_its_noise_and_its_cost() {
        let probe = candidate("uprobe:f", MeterClass::Probe, 1);
        let again = |count: &dyn Fn(u64) -> f64| {
            let s = series(|t| vec![("uprobe:f", count(t))]);
            assess_again(&probe, &good(2.0, 1.0), &s, Nanoseconds::ZERO, &Policy::default()).unwrap()
        };
        assert!(again(&|_| 1000.0).is_ok_and(|a| a.noise < 0.01 && a.rate > 100.0));
        assert!(again(&|_| 360_000.0).unwrap_err().contains("per batch"));
        assert!(
            again(&|t| if t % 8 < 4 { 10.0 } else { 1000.0 })
                .unwrap_err()
                .contains("also while")
        );
        assert!(again(&|_| 0.0).unwrap_err().contains("counted nothing"));
    }

    #[test]
    fn a_probe_on_a_hot_function_is_refused_for_its_cost() {
        let c = candidate("uprobe:f", MeterClass::Probe, 1);
        let a = judge(&c, &[], &series(|_| vec![("uprobe:f", 360_000.0)]));
        assert!(a.cost > 0.7, "{}", a.cost);
        assert!(a.refused.unwrap().contains("per batch"));
    }

    #[test]
    fn kernel_work_needs_a_second_witness_of_another_family() {
        let (w, r, v) = (
            candidate("io.write_calls", MeterClass::Kernel, 0),
            candidate("io.write_bytes", MeterClass::Kernel, 0),
            candidate("switches.voluntary", MeterClass::Kernel, 0),
        );
        let agree = series(|_| {
            vec![
                ("io.write_calls", 100.0),
                ("io.write_bytes", 1e4),
                ("switches.voluntary", 100.0),
            ]
        });
        assert_eq!(judge(&w, &[&v], &agree).refused, None);
        assert!(judge(&w, &[&r], &agree).refused.is_some(), "same family");
        let apart = series(|t| {
            vec![
                ("io.write_calls", 100.0),
                ("switches.voluntary", if t % 8 < 4 { 20.0 } else { 200.0 }),
            ]
        });
        assert!(
            judge(&w, &[&v], &apart)
                .refused
                .unwrap()
                .contains("constant ratio")
        );
    }

    /// A busy program which calls `write` so often in each second, for lines of 60 bytes.
    fn lines(seconds: u64, cpu: f64, wait: f64, calls: impl Fn(u64) -> f64) -> Series {
        let mut s = Series::default();
        for t in 1..=seconds {
            let calls = calls(t);
            let work = [("io.write_calls", calls), ("io.bytes", 60.0 * calls)];
            s.push(Interval {
                end: Nanoseconds::from_secs(t),
                seconds: 1.0,
                cpu,
                wait,
                machine_idle: 0.5,
                work: work.map(|(id, w)| (MeterId::new(id), (w, 1.0))).into(),
                ..Interval::default()
            });
        }
        s
    }

    #[test]
    fn what_a_busy_program_writes_by_a_clock_is_not_its_work() {
        let (calls, bytes) = (
            candidate("io.write_calls", MeterClass::Kernel, 0),
            candidate("io.bytes", MeterClass::Kernel, 0),
        );
        let refused = |s: &Series| {
            let (of_calls, of_bytes) = (judge(&calls, &[&bytes], s), judge(&bytes, &[&calls], s));
            let confirmed = confirming(&bytes, &[&calls], s, Nanoseconds::ZERO).is_some();
            assert_eq!(of_bytes.refused.is_none(), confirmed);
            (of_calls.refused, of_bytes.refused)
        };
        // By the clock, 10 or 32.5 times a second; the latter are 32 in one second and 33 in the next. Alone or beside another.
        for (rate, cpu, wait) in [(10.0, 1.0, 0.0), (32.5, 1.0, 0.0), (187.5, 0.5, 0.5)] {
            let by_a_clock = |t: u64| (rate * t as f64).floor() - (rate * (t - 1) as f64).floor();
            let (of_calls, of_bytes) = refused(&lines(96, cpu, wait, by_a_clock));
            assert!(
                of_calls.is_some_and(|why| why.contains("as evenly as by a clock")),
                "{rate}"
            );
            assert!(
                of_bytes.is_some_and(|why| why.contains("only io.write_calls")),
                "{rate}"
            );
            // Nothing is decided by it so soon.
            let early = lines(24, cpu, wait, by_a_clock);
            for (own, other) in [(&calls, &bytes), (&bytes, &calls)] {
                let judged = judge(own, &[other], &early);
                assert_eq!(judged.unsettled, Some(Unsettled::Clock));
            }
        }
        // Work, which varies by some percent; which is as steady from second to second, and slower for half a minute; or is asked for by
        // somebody else, for whom the program waits.
        let varied = |t: u64| if t % 3 == 0 { 38.0 } else { 41.0 };
        for s in [
            lines(96, 1.0, 0.0, varied),
            lines(96, 1.0, 0.0, |t| if t / 24 == 1 { 39.0 } else { 40.0 }),
            lines(96, 0.6, 0.0, |_| 40.0),
            lines(96, 1.4, 0.1, |_| 40.0),
        ] {
            assert_eq!(refused(&s), (None, None));
        }
    }

    #[test]
    fn what_counts_now_and_then_confirms_nothing() {
        // As seen of a JVM: switches of its collector all the time, and a few bytes written now and then, always as many.
        let (switches, bytes) = (
            candidate("switches.voluntary", MeterClass::Kernel, 0),
            candidate("io.bytes", MeterClass::Kernel, 0),
        );
        let s = series(|t| {
            vec![
                ("switches.voluntary", 110.0),
                ("io.bytes", if t % 12 == 1 { 2703.0 } else { 0.0 }),
            ]
        });
        let refused = judge(&switches, &[&bytes], &s).refused;
        assert!(refused.is_some_and(|why| why.contains("constant ratio")));
    }

    fn good(noise: f64, counted: f64) -> Assessment {
        Assessment {
            rate: 100.0,
            noise,
            noise_max: 0.35,
            cost: 0.0,
            counted,
            refused: None,
            unsettled: None,
            vouched_by: None,
        }
    }

    #[test]
    fn a_function_that_is_hardly_counted_yields_to_kernel_work_that_says_the_same() {
        let (probe, segments, switches) = (
            candidate("uprobe:f", MeterClass::Probe, 1000),
            candidate("sockets.segments", MeterClass::Kernel, 0),
            candidate("switches.voluntary", MeterClass::Kernel, 0),
        );
        let in_step = series(|t| {
            let n = 100.0 + (t % 3) as f64;
            vec![
                ("uprobe:f", 0.93 * n),
                ("sockets.segments", n),
                ("switches.voluntary", n),
            ]
        });
        let apart = series(|t| {
            let n = if t % 8 < 4 { 100.0 } else { 300.0 };
            vec![
                ("uprobe:f", n),
                ("sockets.segments", 100.0),
                ("switches.voluntary", n),
            ]
        });
        let chosen = |counted, s: &Series| {
            let assessed = [
                (&switches, &good(0.001, 1.0)),
                (&segments, &good(0.01, 1.0)),
                (&probe, &good(0.03, counted)),
            ];
            choose(assessed, s, Nanoseconds::ZERO)
                .map(|b| (b.candidate.id.to_string(), b.stands_for.map(ToString::to_string)))
        };
        let (segments, function) = ("sockets.segments".to_owned(), "uprobe:f".to_owned());
        assert_eq!(chosen(0.03, &in_step), Some((segments, Some(function.clone()))));
        assert_eq!(chosen(1.0, &in_step), Some((function.clone(), None)));
        // They do not say the same; switches do, and are not asked.
        assert_eq!(chosen(0.03, &apart), Some((function, None)));
    }

    #[test]
    fn kernel_work_that_keeps_to_a_known_function_may_vary_as_much_as_one() {
        let (segments, switches, probe) = (
            candidate("sockets.segments", MeterClass::Kernel, 0),
            candidate("switches.voluntary", MeterClass::Kernel, 0),
            candidate("uprobe:f", MeterClass::Probe, 1),
        );
        // Beside others a statement costs more CPU time at one time than at another.
        let varying = |probe_too: bool| {
            series(move |t| {
                let n = 1000.0 * (1.0 + 0.2 * (((t - 1) / 4) % 3) as f64);
                let by_function = if probe_too { n } else { 1000.0 };
                vec![
                    ("sockets.segments", n),
                    ("switches.voluntary", n),
                    ("uprobe:f", by_function),
                ]
            })
        };
        let refused =
            |others: &[&MeterCandidate], probe_too| judge(&segments, others, &varying(probe_too)).refused;
        assert_eq!(refused(&[&switches, &probe], true), None);
        // One that is told by switches keeps a ratio to them anyway.
        let by_waits = MeterCandidate {
            lag: Nanoseconds::from_secs(5),
            ..probe.clone()
        };
        for (others, probe_too) in [
            (&[&switches][..], true),
            (&[&switches, &probe][..], false),
            (&[&switches, &by_waits][..], true),
        ] {
            let why = refused(others, probe_too);
            assert!(
                why.as_ref()
                    .is_some_and(|w| w.contains("limit for kernel work 15 %")),
                "{why:?}"
            );
        }
        // Switches are spoken for by nothing.
        assert!(
            judge(&switches, &[&segments, &probe], &varying(true))
                .refused
                .is_some()
        );
        assert_eq!(
            judge(&segments, &[&switches, &probe], &varying(true)).vouched_by,
            Some(probe.id.clone())
        );
        // A second kind of kernel work is needed all the same.
        assert!(refused(&[&probe], true).is_some_and(|why| why.contains("constant ratio")));
    }

    #[test]
    fn a_function_that_is_hardly_counted_is_given_time_to_speak_for_kernel_work() {
        let (segments, bytes, probe) = (
            candidate("sockets.segments", MeterClass::Kernel, 0),
            candidate("io.bytes", MeterClass::Kernel, 0),
            candidate("uprobe:f", MeterClass::Probe, 1),
        );
        let points = MeterCandidate {
            class: MeterClass::Points,
            ..probe.clone()
        };
        // As nginx on a machine that is slower at one time than at another: its function, in a twenty-fifth of its CPU time, is off by a
        // seventh for so many readings in a row, and what the kernel counts is right.
        let seen = |seconds, counted: f64, in_a_row: u64| {
            counted_in_turns(
                seconds,
                &BTreeMap::from([(probe.id.clone(), counted)]),
                move |t| {
                    let block = (t - 1) / 4;
                    let n = 1000.0 * (1.0 + 0.2 * (block % 3) as f64);
                    let side = (t - 1) / in_a_row;
                    let noise = if side % 2 == 0 { 1.14 } else { 0.86 };
                    vec![
                        ("sockets.segments", n),
                        ("io.bytes", 900.0 * n),
                        ("uprobe:f", n * noise),
                    ]
                },
            )
        };
        for speaker in [&probe, &points] {
            let judged = |s: &Series| judge(&segments, &[&bytes, speaker], s);
            let early = judged(&seen(24, 0.04, 4));
            assert_eq!(early.unsettled, Some(Unsettled::Unspoken(IN_TURNS_SPEAK_AFTER)));
            let at_last = judged(&seen(96, 0.04, 4));
            assert_eq!((at_last.refused, at_last.unsettled), (None, None));
            assert_eq!(at_last.vouched_by, Some(probe.id.clone()));
            // What is counted all the time has no such excuse, and one that is off for long does not agree in the end.
            assert_eq!(judged(&seen(24, 1.0, 4)).unsettled, None);
            let apart = judged(&seen(96, 0.04, 24));
            assert!(apart.refused.is_some() && apart.unsettled.is_none());
        }
        // It is looked at 24, 48 and 96 readings, and not in between.
        assert_eq!(
            [12, 24, 47, 48, 95, 96, 191, 192].map(|n| last_look(n, 24)),
            [12, 24, 24, 48, 48, 96, 96, 192]
        );
        // Where nothing is too loud nothing is waited for.
        let calm = counted_in_turns(24, &BTreeMap::from([(probe.id.clone(), 0.04)]), |t| {
            let noise = if (t - 1) / 4 % 2 == 0 { 1.14 } else { 0.86 };
            vec![
                ("sockets.segments", 100.0),
                ("io.bytes", 900.0),
                ("uprobe:f", 100.0 * noise),
            ]
        });
        let calm = judge(&segments, &[&bytes, &probe], &calm);
        assert_eq!((calm.refused, calm.unsettled), (None, None));
    }

    #[test]
    fn kernel_work_may_vary_as_much_as_points_that_keep_to_it_while_both_are_read() {
        let (bytes, calls, switches, points) = (
            candidate("io.bytes", MeterClass::Kernel, 0),
            candidate("io.write_calls", MeterClass::Kernel, 0),
            candidate("switches.voluntary", MeterClass::Kernel, 0),
            candidate("points", MeterClass::Points, 1),
        );
        // The machine is slower at one time than at another; points are found after so many seconds, and follow or do not.
        let varying = |found_after: u64, points_too: bool| {
            series(move |t| {
                let n = 1000.0 * (1.0 + 0.2 * (((t - 1) / 4) % 3) as f64);
                let mut work = vec![
                    ("io.bytes", 64.0 * n),
                    ("io.write_calls", n),
                    ("switches.voluntary", n),
                ];
                if t > found_after {
                    work.push(("points", if points_too { n } else { 1000.0 }));
                }
                work
            })
        };
        let judged = |others: &[&MeterCandidate], s: &Series| judge(&bytes, others, s);
        let spoken_for = judged(&[&calls, &points], &varying(0, true));
        assert_eq!(
            (spoken_for.refused.as_deref(), spoken_for.unsettled),
            (None, None)
        );
        assert_eq!(spoken_for.vouched_by, Some(points.id.clone()));
        assert!(vouched(&spoken_for).contains("as much as points"));
        // Before it is clear whether they do nothing is decided, and what happened while they were looked for says nothing of them.
        let early = judged(&[&calls, &points], &varying(12, true));
        assert!(early.unsettled.is_some() && early.refused.is_some() && early.vouched_by.is_none());
        // Nor does a block say so early in which they disagree.
        let stray = series(|t| {
            let n = 1000.0 * (1.0 + 0.2 * (((t - 1) / 4) % 3) as f64);
            let by_points = if (17..=20).contains(&t) { 1.3 * n } else { n };
            let mut work = vec![("io.bytes", 64.0 * n), ("io.write_calls", n)];
            if t > 12 {
                work.push(("points", by_points));
            }
            work
        });
        assert!(judged(&[&calls, &points], &stray).unsettled.is_some());
        // Unless there is nothing to wait for.
        assert_eq!(judged(&[&switches, &points], &varying(12, true)).unsettled, None);
        // Loud while they were looked for, and by far calmer since: what it is told to vary by is what it varies by while both are read.
        let calmer = |bytes: f64| {
            series_of(60, move |t| {
                let loud = if t <= 36 && (t / 4) % 2 == 0 { bytes } else { 1.0 };
                let mut work = vec![("io.bytes", 1000.0 * loud), ("io.write_calls", 10.0 * loud)];
                if t > 36 {
                    work.push(("points", 10.0));
                }
                work
            })
        };
        let since_then = judged(&[&calls, &points], &calmer(3.0));
        assert_eq!(
            (since_then.refused.as_deref(), since_then.vouched_by),
            (None, None)
        );
        assert!(since_then.noise < 0.01, "{}", since_then.noise);
        // Who varies by more than a meter may speaks for nobody.
        let wild = series(|t| {
            let n = 1000.0 * (1.0 + 0.8 * (((t - 1) / 4) % 3) as f64);
            vec![("io.bytes", 64.0 * n), ("io.write_calls", n), ("points", n)]
        });
        let of_wild = judged(&[&calls, &points], &wild);
        assert!(
            of_wild
                .refused
                .is_some_and(|w| w.contains("limit for kernel work 15 %"))
        );
        // They do not vary; and nothing but switches confirms what they speak for.
        let apart = judged(&[&calls, &points], &varying(0, false));
        assert!(
            apart
                .refused
                .is_some_and(|w| w.contains("limit for kernel work 15 %"))
                && apart.unsettled.is_none()
        );
        let unwatched = judged(&[&switches, &points], &varying(0, true));
        assert!(unwatched.refused.is_some_and(|w| w.contains("constant ratio")));
        // It is switches that it keeps to most of all; what a trial can watch confirms it all the same.
        let closest = series(|t| {
            let n = 1000.0 + (t % 3) as f64;
            vec![
                ("io.bytes", n),
                ("io.write_calls", n * (1.0 + 0.01 * (t % 5) as f64)),
                ("switches.voluntary", n),
            ]
        });
        assert_eq!(
            confirming(&bytes, &[&switches, &calls], &closest, Nanoseconds::ZERO),
            Some(calls.id.clone())
        );
        assert_eq!(
            confirming(&bytes, &[&switches], &closest, Nanoseconds::ZERO),
            Some(switches.id)
        );
    }

    #[test]
    fn bytes_go_before_calls_and_segments_before_both() {
        let ids = [
            "switches.voluntary",
            "io.write_calls",
            "io.bytes",
            "sockets.segments",
        ];
        let all = ids.map(|id| candidate(id, MeterClass::Kernel, 0));
        let assessments = [0.001, 0.002, 0.003, 0.1].map(|noise| good(noise, 1.0));
        let empty = Series::default();
        for last in 1..=all.len() {
            let some = all.iter().zip(&assessments).take(last);
            let chosen = choose(some, &empty, Nanoseconds::ZERO).map(|b| b.candidate.id.as_str());
            assert_eq!(chosen, Some(ids[last - 1]));
        }
    }

    #[test]
    fn calls_go_before_bytes_that_come_in_bursts() {
        let ids = ["io.bytes", "io.write_calls"];
        let all = ids.map(|id| candidate(id, MeterClass::Kernel, 0));
        let good = good(0.05, 1.0);
        let chosen = |seconds: u64, bytes: &dyn Fn(u64) -> f64, calls: &dyn Fn(u64) -> f64| {
            // The machine is now faster and now slower.
            let speed = |t: u64| [1.0, 1.1, 0.9, 1.2][(t / 4 % 4) as usize];
            let s = series_of(seconds, |t| {
                let calls = 1000.0 * speed(t) * calls(t);
                vec![("io.write_calls", calls), ("io.bytes", 100.0 * calls * bytes(t))]
            });
            let some = all.iter().map(|c| (c, &good));
            choose(some, &s, Nanoseconds::ZERO)
                .unwrap()
                .candidate
                .id
                .to_string()
        };
        let steady = |_: u64| 1.0;
        // Every twenty seconds as much again.
        let bursts = |t: u64| if t % 20 < 4 { 2.0 } else { 1.0 };
        assert_eq!(chosen(60, &steady, &steady), "io.bytes");
        assert_eq!(chosen(60, &bursts, &steady), "io.write_calls");
        // More calls for as many bytes.
        assert_eq!(chosen(60, &|t| 1.0 / bursts(t), &bursts), "io.bytes");
        // Less than enough to tell.
        assert_eq!(chosen(20, &bursts, &steady), "io.bytes");
    }

    #[test]
    fn bytes_are_not_taken_before_it_can_be_seen_whether_they_come_in_bursts() {
        let all = ["io.bytes", "io.write_calls"].map(|id| candidate(id, MeterClass::Kernel, 0));
        let [bytes, calls] = &all;
        // How much the machine moves both, and how much larger the bytes of every third block are.
        let look = |taken: &MeterCandidate, seconds: u64, (moves, by): (f64, f64), of_calls: &Assessment| {
            let s = series_of(seconds, |t| {
                let block = (t - 1) / 4;
                let calls = 1000.0 * [1.0, 1.0 + moves, 1.0 - moves, 1.0 + moves / 2.0][(block % 4) as usize];
                let burst = if block % 3 == 0 { by } else { 1.0 };
                vec![("io.write_calls", calls), ("io.bytes", 100.0 * calls * burst)]
            });
            let assessed = [(bytes, &good(0.05, 1.0)), (calls, of_calls)];
            bursts_are_looked_for_after(taken, assessed, &s, Nanoseconds::ZERO)
        };
        let fine = good(0.05, 1.0);
        let quiet = (0.04, 1.08);
        assert_eq!(look(bytes, 12, quiet, &fine), Some(24));
        // They are not so much apart, keep their ratio, the calls will not do, or these are taken.
        let refused = Assessment {
            refused: Some("counts nothing".into()),
            ..fine.clone()
        };
        assert_eq!(look(bytes, 24, quiet, &fine), None);
        assert_eq!(look(bytes, 12, (0.04, 1.03), &fine), None);
        assert_eq!(look(bytes, 12, quiet, &refused), None);
        assert_eq!(look(calls, 12, quiet, &fine), None);
        // Where the machine moves both by much more few blocks tell nothing, and in the end it is given up.
        let loud = (0.6, 1.2);
        assert_eq!(
            [12, 24, 48, 96].map(|seconds| look(bytes, seconds, loud, &fine)),
            [Some(24), Some(48), Some(96), None]
        );
    }

    #[test]
    fn too_few_readings_is_no_judgement_and_a_silent_meter_is_refused() {
        let c = candidate("redis", MeterClass::Application, 0);
        let mut s = Series::default();
        s.push(
            series(|_| vec![("redis", 1.0)])
                .since(Nanoseconds::ZERO)
                .next()
                .unwrap()
                .clone(),
        );
        assert_eq!(
            assess(
                &c,
                &[],
                &s,
                Nanoseconds::ZERO,
                &Policy::default(),
                NoiseLimit::Kept
            ),
            None
        );
        let silent = series(|_| vec![]);
        assert!(judge(&c, &[], &silent).refused.unwrap().contains("0 of 24"));
    }

    #[test]
    fn instructions_never_judge() {
        let c = candidate("pmu.instructions", MeterClass::Hardware, 0);
        let a = judge(&c, &[], &series(|_| vec![("pmu.instructions", 1e9)]));
        assert!(a.refused.unwrap().contains("never judge"));
    }

    #[test]
    fn judging_from_outside_says_what_the_engine_says() {
        let intervals: Vec<MeterInterval> = (0..24)
            .map(|t| MeterInterval {
                seconds: 1.0,
                cpu: 0.5,
                work: [
                    ("uprobe:f", 1_000.0 + f64::from(t % 3)),
                    ("redis", 1_000.0 + f64::from(t % 5) * 10.0),
                ]
                .into_iter()
                .map(|(id, work)| (MeterId::new(id), (work, 1.0)))
                .collect(),
                ..MeterInterval::default()
            })
            .collect();
        let mut shut = candidate("prometheus:x", MeterClass::Application, 0);
        shut.refused = Some("no such endpoint; correct it".to_owned());
        let candidates = [
            candidate("uprobe:f", MeterClass::Probe, 1),
            candidate("redis", MeterClass::Application, 0),
            shut,
            candidate("silent", MeterClass::Application, 0),
        ];
        let judged = judge_meters(&candidates, &intervals, &Policy::default());
        let of = |i: usize| judged[i].clone().expect("judged");
        assert!(
            of(1).chosen && of(1).refused.is_none(),
            "the nearest to the work is taken, not the steadiest"
        );
        assert!(!of(0).chosen && of(0).refused.is_none() && of(0).cost > 0.0);
        assert_eq!(of(2).refused.as_deref(), Some("no such endpoint; correct it"));
        assert!(of(3).refused.is_some() && of(3).rate == 0.0);
        assert!(of(1).detectable > 0.0 && of(1).detectable < 0.1, "{:?}", of(1));
        // What is told late is left out of each block, and readings near to each other tell the same.
        let late: Vec<MeterInterval> = intervals
            .iter()
            .map(|i| MeterInterval {
                lags: BTreeMap::from([(MeterId::new("redis"), Nanoseconds::from_secs(6))]),
                ..i.clone()
            })
            .collect();
        let seen = |n: usize| judge_meters(&candidates, &late[..n], &Policy::default())[1].clone();
        assert!(seen(17).is_none() && seen(18).is_some_and(|j| j.noise < of(1).noise));
        let provable = |lag, length| {
            let lag = Nanoseconds::from_secs(lag);
            detectable(0.2, lag, length, &intervals, &Policy::default())
        };
        let longer = provable(6, 6) / provable(0, 4);
        assert!((longer - (6.0 / 24.0 / (4.0 / 30.0_f64)).sqrt()).abs() < 1e-9);
        // Too short to say.
        let early = judge_meters(&candidates, &intervals[..5], &Policy::default());
        assert!(early[0].is_none() && early[2].is_some());
    }

    #[test]
    fn a_test_that_is_too_short_for_points_to_speak_says_so() {
        let candidates = [
            candidate("io.bytes", MeterClass::Kernel, 0),
            candidate("io.write_calls", MeterClass::Kernel, 0),
            candidate("points", MeterClass::Points, 1),
        ];
        // The machine is slower at one time than at another; points are found after 12 s, and follow or do not.
        let refused = |seconds: u32, points_too: bool| {
            let intervals: Vec<MeterInterval> = (0..seconds)
                .map(|t| {
                    let n = 1000.0 * (1.0 + 0.2 * f64::from(t / 4 % 3));
                    let mut work = vec![("io.bytes", 64.0 * n), ("io.write_calls", n)];
                    if t >= 12 {
                        work.push(("points", if points_too { n } else { 1000.0 }));
                    }
                    MeterInterval {
                        seconds: 1.0,
                        cpu: 0.5,
                        work: work
                            .into_iter()
                            .map(|(id, work)| (MeterId::new(id), (work, 1.0)))
                            .collect(),
                        ..MeterInterval::default()
                    }
                })
                .collect();
            let judged = judge_meters(&candidates, &intervals, &Policy::default());
            judged[0].clone().expect("enough readings").refused
        };
        let (varies, too_short) = (
            "(limit for kernel work 15 %)",
            "; what may speak for it has not been read for long enough (24 s are needed): test for longer",
        );
        for (seconds, points_too) in [(24, true), (35, true), (35, false)] {
            let why = refused(seconds, points_too).expect("they have not spoken");
            assert!(
                why.ends_with(&format!("{varies}{too_short}")),
                "{seconds} s: {why}"
            );
        }
        // They have spoken: for it, or not.
        assert_eq!(refused(36, true), None);
        assert!(refused(36, false).is_some_and(|why| why.ends_with(varies)));
    }

    #[test]
    fn points_are_looked_for_only_when_nothing_else_will_do() {
        let points = candidate("points", MeterClass::Points, 1);
        let probe = candidate("uprobe:f", MeterClass::Probe, 1);
        let both = [points.clone(), probe];
        assert_eq!(next_tier(0, &both, false, false), Some(1));
        assert_eq!(
            next_tier(0, &both, false, true),
            Some(1),
            "a probe is better than kernel work"
        );
        assert_eq!(next_tier(1, &both, false, false), Some(2));
        assert_eq!(next_tier(1, &both, false, true), None);
        assert_eq!(next_tier(0, &both, true, true), None);
        assert_eq!(next_tier(2, &both, false, false), None);
        // A tier that has nothing to offer is passed over.
        assert_eq!(next_tier(0, &[points], false, false), Some(2));
    }

    #[test]
    fn the_search_for_points_has_its_time() {
        let c = candidate("points", MeterClass::Points, 1);
        let silent = series(|_| vec![]);
        assert!(
            assess(
                &c,
                &[],
                &silent,
                Nanoseconds::ZERO,
                &Policy::default(),
                NoiseLimit::Kept
            )
            .is_none()
        );
        let probe = candidate("uprobe:f", MeterClass::Probe, 1);
        assert!(
            assess(
                &probe,
                &[],
                &silent,
                Nanoseconds::ZERO,
                &Policy::default(),
                NoiseLimit::Kept
            )
            .is_some()
        );
    }
}
