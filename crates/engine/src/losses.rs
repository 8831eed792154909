//! How much a program lost when its protection was tried and refused.
//!
//! A refusal says of a program that keeping a reader from its memory gained it nothing, or not enough to be seen. That
//! was so beside that reader, at that loss. A program that reads a MiB a second from storage beside a small reader, and
//! is refused for it, is to be protected in the night in which a backup takes everything; the back-off of a day would
//! leave it alone. So a protection that was refused is tried again before its back-off is over where several times as much
//! is lost as was seen while it was tried, and in the minute after it was taken back. Each such try that is refused raises
//! what is asked of the next one, so there are few of them.
//!
//! What was harmful stays refused, and so does what ended because the reader, or another neighbour, lost too much by it. A
//! program for which another reader is contained is left alone: in a probe of that one's guard it loses much. What is known of
//! losses is lost at a restart: then the back-off counts.

use crate::engine::Engine;
use crate::experiment::Experiment;
use homeostat_model::{Bytes, Fingerprint, Nanoseconds, StrategyId, Verdict, WorkloadId, WorkloadSample};
use std::collections::BTreeMap;

/// So many times the loss of the refused try is another matter. Losses of one second vary by a factor of two about their mean.
const TIMES: f64 = 4.0;
/// Less than this counts as this (bytes a second): from next to nothing everything is many times as much.
const FLOOR: f64 = 1024.0 * 1024.0;
/// For so long after a refusal what is lost with the change taken back still belongs to what was refused: a loss that grows slowly
/// may not show in a block.
const TAKEN_BACK: Nanoseconds = Nanoseconds::from_secs(60);
/// Most kinds of program that are remembered so.
const LOSSES_MAX: usize = 256;

/// The largest loss that belongs to a refusal.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Loss {
    /// Bytes a second.
    most: f64,
    /// Until when it may still grow.
    until: Nanoseconds,
}

/// Those of protections that were refused.
pub(crate) type Losses = BTreeMap<(Fingerprint, StrategyId), Loss>;

/// What a workload reads again of what was taken from it, in bytes a second: faults that wait for storage, of a page each
/// at least, or what it reads here and there, whichever is more (a fault may be in both).
pub(crate) fn lost_per_s(sample: &WorkloadSample, page: Bytes) -> f64 {
    let seconds = sample.interval.as_secs_f64();
    if seconds <= 0.0 {
        return 0.0;
    }
    let by_faults = sample.faults_major as f64 * page.0 as f64;
    by_faults.max(sample.reads.here_and_there().0 as f64) / seconds
}

impl Engine {
    /// What a workload loses by its last sample, in bytes a second.
    pub(crate) fn loses_per_s(&self, id: &WorkloadId) -> f64 {
        self.workloads.get(id).map_or(0.0, |w| w.rereads[1])
    }

    /// Takes the last sample of a workload into what is known of refusals, and of trials that may become one.
    pub(crate) fn note_loss(&mut self, id: &WorkloadId) {
        let Some(w) = self.workloads.get(id) else { return };
        let [_, lost] = w.rereads;
        for e in self.experiments.values_mut() {
            if e.setup.urgent && e.setup.panel.has(id) {
                e.most_lost = e.most_lost.max(lost);
            }
        }
        for ((fingerprint, _), loss) in &mut self.losses {
            if *fingerprint == w.workload.fingerprint && self.now < loss.until {
                loss.most = loss.most.max(lost);
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
                    let most = self.losses.get(&key).map_or(0.0, |l| l.most).max(e.most_lost);
                    let until = self.now + TAKEN_BACK;
                    self.remember_loss(key, Loss { most, until });
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

    /// Whether a workload loses far more than what belongs to the refusal of its protection, and by how much: the loss now and
    /// the largest then, in bytes a second.
    fn loses_far_more(&self, id: &WorkloadId, strategy: &StrategyId) -> Option<(f64, f64)> {
        let w = self.workloads.get(id)?;
        let key = (w.workload.fingerprint.clone(), strategy.clone());
        let (prior, _) = self.backs_off(&key)?;
        let loss = self.losses.get(&key)?;
        let is_refused = matches!(prior.verdict, Verdict::Rejected | Verdict::Inconclusive);
        let is_protected = self.guards.of(id).any(|g| g.strategy == *strategy);
        // One sample may be a lump.
        let now = w.rereads[0].min(w.rereads[1]);
        (is_refused && !is_protected && self.now >= loss.until && now >= TIMES * loss.most.max(FLOOR))
            .then_some((now, loss.most))
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
            "tried again although it was refused: {}/s are lost, and at most {}/s were when it was tried",
            Bytes(now as u64),
            Bytes(then as u64)
        ))
    }
}
