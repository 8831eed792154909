//! How much a program lost when its protection was tried and refused.
//!
//! A refusal says of a program that keeping a reader from its memory gained it nothing, or not enough to be seen. That
//! was so beside that reader, at that loss. A program that reads a MiB a second from storage beside a small reader, and
//! is refused for it, is to be protected in the night in which a backup takes everything; the back-off of a day would
//! leave it alone. So a protection that was refused is tried again before its back-off is over where several times as much
//! is lost as was seen while it was tried, and in the minute after it was taken back. Each such try that is refused raises
//! what is asked of the next one, so there are few of them.
//!
//! How much is told by the *intensity* of a loss: what is read again for each second of CPU time, not of the clock. A program
//! that lost everything waits, and reads what its storage gives to one who waits, which may be less than it reads where it
//! waits now and then (measured: docs/file-cache.md). More load is more of both, and the same intensity; a program that idles
//! and reads a little has a high one, so storage is to work a good part as hard as it did, too. The reading itself takes CPU
//! time, so no intensity is above what a CPU can read; and beside a large reader a read takes longer than beside a small one, so
//! four times the intensity of a small loss may be nearly all. A thread that computes or spins beside those that wait hides
//! their loss.
//!
//! What was harmful stays refused, and so does what ended because the reader, or another neighbour, lost too much by it. A
//! program for which another reader is contained is left alone: in a probe of that one's guard it loses much. What is known of
//! losses is lost at a restart: then the back-off counts.

use crate::engine::Engine;
use crate::experiment::Experiment;
use homeostat_model::{Bytes, Fingerprint, Nanoseconds, StrategyId, Verdict, WorkloadId, WorkloadSample};
use std::collections::BTreeMap;

/// So many times the intensity of the refused try is another matter, and less than one part of so many of what storage delivered
/// then is too little to be one.
const TIMES: f64 = 4.0;
/// Less than this counts as this (bytes for each second of CPU time): from next to nothing everything is many times as much.
const FLOOR: f64 = 1024.0 * 1024.0;
/// Less CPU time than this share of the clock's counts as this: who did nothing at all has lost no more than one who did little.
const CPU_MIN: f64 = 0.01;
/// For so long after a refusal what is lost with the change taken back still belongs to what was refused: a loss that grows slowly
/// may not show in a block.
const TAKEN_BACK: Nanoseconds = Nanoseconds::from_secs(60);
/// Most kinds of program that are remembered so.
const LOSSES_MAX: usize = 256;

/// What a workload reads again, by one sample of it, of what was taken from it.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Rereads {
    /// Bytes a second: how much storage works for it.
    pub(crate) per_s: f64,
    /// Bytes for each second of its CPU time: how bad that is for it.
    pub(crate) intensity: f64,
}

impl Rereads {
    /// What both have at least.
    pub(crate) fn least(self, other: Self) -> Self {
        Self {
            per_s: self.per_s.min(other.per_s),
            intensity: self.intensity.min(other.intensity),
        }
    }

    /// The larger of each.
    pub(crate) fn most(self, other: Self) -> Self {
        Self {
            per_s: self.per_s.max(other.per_s),
            intensity: self.intensity.max(other.intensity),
        }
    }

    /// Faults that wait for storage, of a page each at least, or what it reads here and there, whichever is more (a fault may be
    /// in both).
    pub(crate) fn of(sample: &WorkloadSample, page: Bytes) -> Self {
        let seconds = sample.interval.as_secs_f64();
        if seconds <= 0.0 {
            return Self::default();
        }
        let by_faults = sample.faults_major as f64 * page.0 as f64;
        let bytes = by_faults.max(sample.reads.here_and_there().0 as f64);
        Self {
            per_s: bytes / seconds,
            intensity: bytes / sample.cpu.as_secs_f64().max(seconds * CPU_MIN),
        }
    }
}

/// The largest loss that belongs to a refusal.
#[derive(Clone, Debug)]
pub(crate) struct Loss {
    /// Whose: another of its kind that starts with nothing in memory says nothing of it.
    of: WorkloadId,
    most: Rereads,
    /// Until when it may still grow.
    until: Nanoseconds,
}

/// Those of protections that were refused.
pub(crate) type Losses = BTreeMap<(Fingerprint, StrategyId), Loss>;

impl Engine {
    /// How badly a workload loses: the intensity by its last sample, for there may be only one yet. Who loses most has most to
    /// show for being protected.
    pub(crate) fn loses(&self, id: &WorkloadId) -> f64 {
        self.workloads.get(id).map_or(0.0, |w| w.rereads[1].intensity)
    }

    /// Takes the last sample of a workload into what is known of refusals, and of trials that may become one.
    pub(crate) fn note_loss(&mut self, id: &WorkloadId) {
        let Some(w) = self.workloads.get(id) else { return };
        let lost = w.lost_lately();
        for e in self.experiments.values_mut() {
            if e.setup.urgent && e.setup.panel.has(id) {
                e.most_lost = e.most_lost.most(lost);
            }
        }
        for loss in self.losses.values_mut() {
            if loss.of == *id && self.now < loss.until {
                loss.most = loss.most.most(lost);
            }
        }
    }

    /// A trial of a protection is over.
    pub(crate) fn note_refused_loss(&mut self, e: &Experiment) {
        let Some(verdict) = e.verdict.filter(|_| e.setup.urgent) else {
            return;
        };
        for m in e.setup.panel.members() {
            let key = (m.fingerprint.clone(), e.setup.strategy.clone());
            match verdict {
                // It says nothing of the loss.
                Verdict::Aborted => {}
                Verdict::Rejected | Verdict::Inconclusive if !e.hindered => {
                    let known = self.losses.get(&key).map(|l| l.most).unwrap_or_default();
                    let most = known.most(e.most_lost);
                    let until = self.now + TAKEN_BACK;
                    let of = m.workload.clone();
                    self.remember_loss(key, Loss { of, most, until });
                }
                _ => {
                    self.losses.remove(&key);
                }
            }
        }
    }

    fn remember_loss(&mut self, key: (Fingerprint, StrategyId), loss: Loss) {
        if self.losses.len() >= LOSSES_MAX && !self.losses.contains_key(&key) {
            let kept: Vec<_> = self
                .losses
                .keys()
                .filter(|k| self.backs_off(k).is_some())
                .cloned()
                .collect();
            self.losses.retain(|k, _| kept.contains(k));
        }
        if self.losses.len() < LOSSES_MAX || self.losses.contains_key(&key) {
            self.losses.insert(key, loss);
        }
    }

    /// Whether a workload loses far more than what belongs to the refusal of its protection, and by how much: what it loses now,
    /// and the most then.
    fn loses_far_more(&self, id: &WorkloadId, strategy: &StrategyId) -> Option<(Rereads, Rereads)> {
        let w = self.workloads.get(id)?;
        let key = (w.workload.fingerprint.clone(), strategy.clone());
        let (prior, _) = self.backs_off(&key)?;
        let loss = self.losses.get(&key)?;
        let is_refused = matches!(prior.verdict, Verdict::Rejected | Verdict::Inconclusive);
        let is_protected = self.guards.of(id).any(|g| g.strategy == *strategy);
        let now = w.lost_lately();
        let is_far_more =
            now.intensity >= TIMES * loss.most.intensity.max(FLOOR) && TIMES * now.per_s >= loss.most.per_s;
        (is_refused && !is_protected && self.now >= loss.until && is_far_more).then_some((now, loss.most))
    }

    /// Why a strategy that protects is not asked about a workload: as for any, but for a back-off from a far smaller loss.
    pub(crate) fn relief_refusal(&self, id: &WorkloadId, strategy: &StrategyId) -> Option<String> {
        self.switched_off(id, strategy).or_else(|| {
            self.back_off_told(id, strategy)
                .filter(|_| self.loses_far_more(id, strategy).is_none())
        })
    }

    /// Why a protection is tried again before its back-off is over.
    pub(crate) fn tried_again(&self, id: &WorkloadId, strategy: &StrategyId) -> Option<String> {
        let (now, then) = self.loses_far_more(id, strategy)?;
        Some(format!(
            "tried again although it was refused: it reads {} again for each second of its CPU time ({}/s), and read {} at most \
             when it was tried",
            Bytes(now.intensity as u64),
            Bytes(now.per_s as u64),
            Bytes(then.intensity as u64)
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use homeostat_model::Reads;

    const PAGE: Bytes = Bytes(4096);

    fn sample(seconds: f64, cpu: f64, faults: u64) -> WorkloadSample {
        WorkloadSample {
            cpu: Nanoseconds::from_secs_f64(cpu),
            faults_major: faults,
            ..WorkloadSample::empty(WorkloadId::new("program"), Nanoseconds::from_secs_f64(seconds))
        }
    }

    #[track_caller]
    fn assert_is(sample: &WorkloadSample, per_s: f64, intensity: f64) {
        let is = Rereads::of(sample, PAGE);
        let close = |a: f64, b: f64| (a - b).abs() <= 1e-6 * b;
        assert!(close(is.per_s, per_s) && close(is.intensity, intensity), "{is:?}");
    }

    #[test]
    fn more_load_and_longer_samples_are_the_same_intensity_and_waiting_is_another() {
        let page = PAGE.0 as f64;
        assert_is(&sample(1.0, 0.5, 100), 100.0 * page, 200.0 * page);
        // Four times the load, and ten times the time.
        assert_is(&sample(1.0, 2.0, 400), 400.0 * page, 200.0 * page);
        assert_is(&sample(10.0, 5.0, 1000), 100.0 * page, 200.0 * page);
        // As many in a second of one that does little else.
        assert_is(&sample(1.0, 0.05, 100), 100.0 * page, 2000.0 * page);
        // Nothing is done at all, or no time has passed.
        assert_is(&sample(1.0, 0.0, 100), 100.0 * page, 10_000.0 * page);
        assert_is(&sample(0.0, 0.0, 100), 0.0, 0.0);
    }

    #[test]
    fn reads_here_and_there_count_where_they_are_more_than_faults() {
        let mut sample = sample(2.0, 0.5, 100);
        sample.reads = Reads {
            from_storage: Bytes::from_mib(9),
            in_sequence: Bytes::from_mib(3),
            by_ended: Bytes::from_mib(2),
            ..Reads::default()
        };
        let mib = Bytes::from_mib(1).0 as f64;
        assert_is(&sample, 2.0 * mib, 8.0 * mib);
        sample.faults_major = 2000;
        assert_is(&sample, 1000.0 * 4096.0, 4000.0 * 4096.0);
    }
}
