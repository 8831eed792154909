//! Whether a meter of kernel work still means what it meant when it was chosen.
//!
//! Such a meter was taken because a second kind of kernel work kept a constant ratio to it. That kind is read beside it during a
//! trial, and the trial is broken off when the ratio is no longer the same: between the arms, for then the change alters what a
//! unit of work is (fewer calls for the same bytes) and what looks like a gain may be none; or over time in both arms, for then
//! the program does something else now (another phase, other code).
//!
//! Which of the two has changed its meaning the ratio does not tell. So switches of threads are no witness: what a change does to
//! waiting shows in them, and not in the work; and a trial that protects a program from losing its pages is not watched, for
//! each of its waits is a switch. Kinds that change together (reads and wake-ups of a program that takes whatever is there) are
//! seen by neither.

use crate::panel::{GUARDRAIL_BLOCKS, GUARDRAIL_ERROR_MIN};
use crate::series::Series;
use homeostat_model::{MeterId, Nanoseconds, WorkloadId};
use homeostat_statistics::robust::{exp, ln, mean};
use homeostat_statistics::trimmed::{self, Proof};

/// The ratio may move by this share: the band in which it qualified.
const BAND: f64 = crate::meters::CONFIRMATION_NOISE_MAX;
/// The last blocks of each arm that are compared with those before, of which there must be as many, to see whether the ratio has
/// moved over time …
const MOVED_BLOCKS: usize = 3;
/// … and the level at which both arms must prove it. It is looked at after every block.
const MOVED_LEVEL: f64 = 0.0005;
/// A kind that counted nothing at all is taken for half a count, so that its absence shows as a ratio that is far off.
const COUNTED_MIN: f64 = 0.5;

/// The ratio of two kinds of kernel work of one workload that is tried.
#[derive(Clone, Debug)]
pub(crate) struct Meaning {
    workload: WorkloadId,
    judge: MeterId,
    beside: MeterId,
    /// Logarithms of the ratio by block, oldest first.
    on: Vec<f64>,
    off: Vec<f64>,
}

impl Meaning {
    pub(crate) fn new(workload: WorkloadId, judge: MeterId, beside: MeterId) -> Self {
        Self {
            workload,
            judge,
            beside,
            on: Vec::new(),
            off: Vec::new(),
        }
    }

    pub(crate) fn workload(&self) -> &WorkloadId {
        &self.workload
    }

    pub(crate) fn beside(&self) -> &MeterId {
        &self.beside
    }

    /// Reads both over the measured part of a block that ended. A block in which one of them was not read, or nothing was done,
    /// says nothing.
    pub(crate) fn observe(&mut self, series: &Series, on: bool, from: Nanoseconds, to: Nanoseconds) {
        let (judge, beside) = (
            series.sums(&self.judge, from, to),
            series.sums(&self.beside, from, to),
        );
        let both_read = judge.intervals > 0 && judge.intervals == beside.intervals;
        if !both_read || (judge.work <= 0.0 && beside.work <= 0.0) {
            return;
        }
        let arm = if on { &mut self.on } else { &mut self.off };
        arm.push(ln(judge.work.max(COUNTED_MIN)) - ln(beside.work.max(COUNTED_MIN)));
    }

    /// What to say when the ratio is not what it was. Between the arms that must be proven at this level; `gain`: what the change
    /// is thought to give (log units), at the one look before it is accepted, else it is one look of many, at which two tests
    /// must prove it.
    pub(crate) fn changed(&self, level: f64, gain: Option<f64>) -> Option<String> {
        self.moved().or_else(|| self.differs(level, gain))
    }

    fn differs(&self, level: f64, gain: Option<f64>) -> Option<String> {
        if self.on.len() < GUARDRAIL_BLOCKS || self.off.len() < GUARDRAIL_BLOCKS {
            return None;
        }
        let proof = if gain.is_some() {
            Proof::Either
        } else {
            Proof::Both
        };
        // Either direction, so half of the level each.
        let below = |a: &[f64], b: &[f64], band: f64| {
            trimmed::fall(a, b, band, level / 2.0, GUARDRAIL_ERROR_MIN, proof).is_some()
        };
        let band = ln(1.0 + BAND);
        // More counts for the same work look like a gain, also fewer more than the band where that is all there is to it.
        let faked = gain.map_or(band, |gain| band.min(gain / 2.0).max(GUARDRAIL_ERROR_MIN));
        (below(&self.on, &self.off, band) || below(&self.off, &self.on, faked)).then(|| {
            format!(
                "{}: the change alters what {} means: {:.4} of them for one of {} with it, {:.4} without",
                self.workload,
                self.judge,
                exp(mean(&self.on)),
                self.beside,
                exp(mean(&self.off)),
            )
        })
    }

    /// Both arms have left the band of their own earlier blocks, to the same side, and each proves it.
    fn moved(&self) -> Option<String> {
        let (on, off) = (Moved::of(&self.on)?, Moved::of(&self.off)?);
        (on.is_proven && off.is_proven && (on.now > on.before) == (off.now > off.before)).then(|| {
            format!(
                "{}: {} no longer means what it did: {:.4} of them for one of {} before, {:.4} now, with the change and without \
                 (another phase, or other code)",
                self.workload,
                self.judge,
                exp(off.before),
                self.beside,
                exp(off.now),
            )
        })
    }
}

/// The last blocks of one arm against those before.
struct Moved {
    before: f64,
    now: f64,
    is_proven: bool,
}

impl Moved {
    fn of(arm: &[f64]) -> Option<Self> {
        let (earlier, last) = arm.split_at(arm.len().checked_sub(MOVED_BLOCKS)?);
        if earlier.len() < MOVED_BLOCKS {
            return None;
        }
        let fell = |a: &[f64], b: &[f64]| {
            let band = ln(1.0 + BAND);
            trimmed::fall(a, b, band, MOVED_LEVEL, GUARDRAIL_ERROR_MIN, Proof::Both).is_some()
        };
        Some(Self {
            before: mean(earlier),
            now: mean(last),
            is_proven: fell(last, earlier) || fell(earlier, last),
        })
    }
}
