//! Whether a meter of kernel work still means what it meant when it was chosen.
//!
//! Such a meter was taken because a second kind of kernel work kept a constant ratio to it. That kind is read beside it during a
//! trial, and the trial is broken off when the ratio is no longer the same: between the arms, for then the change alters what a
//! unit of work is (fewer calls for the same bytes) and what looks like a gain may be none; or over time in both arms, for then
//! the program does something else now (another phase, other code).

use crate::panel::{GUARDRAIL_BLOCKS, GUARDRAIL_ERROR_MIN};
use crate::series::Series;
use homeostat_model::{MeterId, Nanoseconds, WorkloadId};
use homeostat_statistics::robust::{exp, ln, mean, median};
use homeostat_statistics::trimmed::{self, Proof};

/// The ratio may move by this share: the band in which it qualified.
const BAND: f64 = crate::meters::CONFIRMATION_NOISE_MAX;
/// Blocks of each arm that must all lie beyond the band before the ratio counts as moved over time.
const MOVED_BLOCKS: usize = 2;
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

    /// What to say when the ratio is not what it was. Between the arms that must be proven at this level; `last`: the one look
    /// before the change is accepted, else one of many, at which two tests must prove it.
    pub(crate) fn changed(&self, level: f64, last: bool) -> Option<String> {
        self.moved().or_else(|| self.differs(level, last))
    }

    fn differs(&self, level: f64, last: bool) -> Option<String> {
        if self.on.len() < GUARDRAIL_BLOCKS || self.off.len() < GUARDRAIL_BLOCKS {
            return None;
        }
        let proof = if last { Proof::Either } else { Proof::Both };
        // Either direction, so half of the level each.
        let below = |a: &[f64], b: &[f64]| {
            trimmed::fall(a, b, ln(1.0 + BAND), level / 2.0, GUARDRAIL_ERROR_MIN, proof).is_some()
        };
        (below(&self.on, &self.off) || below(&self.off, &self.on)).then(|| {
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

    /// Both arms have left the band of their own earlier blocks, to the same side.
    fn moved(&self) -> Option<String> {
        let (on, off) = (Moved::of(&self.on)?, Moved::of(&self.off)?);
        let band = ln(1.0 + BAND);
        let away = (on.least > band && off.least > band) || (on.most < -band && off.most < -band);
        away.then(|| {
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
    least: f64,
    most: f64,
}

impl Moved {
    fn of(arm: &[f64]) -> Option<Self> {
        let (earlier, last) = arm.split_at(arm.len().checked_sub(MOVED_BLOCKS)?);
        if earlier.len() < MOVED_BLOCKS {
            return None;
        }
        let before = median(earlier);
        let away = || last.iter().map(|ratio| ratio - before);
        Some(Self {
            before,
            now: mean(last),
            least: away().fold(f64::INFINITY, f64::min),
            most: away().fold(f64::NEG_INFINITY, f64::max),
        })
    }
}
