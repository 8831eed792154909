//! Recall: a reader that was proven to push a program's pages out is contained as soon as it is seen reading.
//!
//! The backup of every night takes the memory of the same program as in the night before. What was proven of the two, by
//! their fingerprints, need not be lost first to be known: while a program lives for whose sake a reader was proven to be
//! worth containing, and the machine reads much from storage, it is looked for that reader, and the strategy that protects
//! is asked although memory is not short yet. It proposes only while memory could not hold both. What it proposes goes
//! under guard at once, on the verdict of the trial that was.
//!
//! Nothing rests on the hour of the day. And nothing is believed for long: after two recalls, later after four, the reader
//! is not recalled once, so that it is tried anew with coins if it does harm again; and so it is after a restart, since
//! how often it was recalled is not kept. The guard of a recall is that of any accepted change, but a backup is often over
//! before its first probe: it is those trials that bound what a wrong verdict can cost. Whoever takes the change back
//! takes back what was proven.

use crate::engine::Engine;
use crate::experiment::{Experiment, Setup};
use crate::guard::Guard;
use crate::places::Places;
use crate::policy::Mode;
use crate::protocol::Command;
use crate::relief;
use crate::rollout::Piece;
use crate::strategy::Proposal;
use crate::view::Stage;
use homeostat_model::ProvenReader;
use homeostat_model::action::Target;
use homeostat_model::{
    ActionId, Bytes, Effect, ExperimentId, ExperimentKind, ExperimentRecord, Fingerprint, Nanoseconds,
    StrategyId, Verdict, WorkloadId,
};
use homeostat_statistics::TrialParameters;
use homeostat_statistics::breaker::Breaker;
use std::collections::{BTreeMap, BTreeSet};

/// Pairs that are remembered.
const PAIRS_MAX: usize = 256;
/// From this many bytes per second that the whole machine reads from storage it is looked for known readers …
const READ_MIN: f64 = 16.0 * 1024.0 * 1024.0;
/// … all processes are looked at often for so long, since it may just have begun …
const HURRY: Nanoseconds = Nanoseconds::from_secs(20);
/// … and again only after the machine has read less for so long.
const REST: Nanoseconds = Nanoseconds::from_secs(60);
/// The number of recalls between two trials doubles so often at most: four.
const DOUBLINGS_MAX: u32 = 2;

/// Whose memory, who takes it, and who proposed to contain it.
pub(crate) type Pair = (Fingerprint, Fingerprint, StrategyId);

/// What is known of a pair.
#[derive(Clone, Debug, PartialEq)]
struct Proven {
    effect: Effect,
    washout: Nanoseconds,
    /// Trials in a row that accepted it.
    trials: u32,
    /// Recalls since the last of them.
    recalls: u32,
}

impl Proven {
    /// Whether it is contained without a trial once more.
    fn is_recalled(&self) -> bool {
        self.recalls < Self::recalls_of(self.trials)
    }

    /// Recalls after so many trials.
    fn recalls_of(trials: u32) -> u32 {
        1 << trials.clamp(1, DOUBLINGS_MAX)
    }
}

/// The pairs that are known, and who of them is looked at now.
#[derive(Debug, Default)]
pub(crate) struct Recall {
    proven: BTreeMap<Pair, Proven>,
    /// Living readers that were proven to take the memory of a living program, while the machine reads much, and what each
    /// has read from storage since it is looked at.
    expected: BTreeMap<WorkloadId, Bytes>,
    /// Since when the machine reads much, and when it did last.
    reading: Option<(Nanoseconds, Nanoseconds)>,
}

impl Recall {
    /// What the history knows: it comes to a trial first.
    pub(crate) fn remember(readers: Vec<ProvenReader>) -> Self {
        let proven = readers.into_iter().take(PAIRS_MAX).map(|r| {
            let known = Proven {
                effect: r.effect,
                washout: r.washout,
                trials: r.trials,
                recalls: Proven::recalls_of(r.trials),
            };
            ((r.program, r.reader, r.strategy), known)
        });
        Self {
            proven: proven.collect(),
            ..Self::default()
        }
    }

    /// Whether it is looked at what this workload reads.
    pub(crate) fn expects(&self, id: &WorkloadId) -> bool {
        self.expected.contains_key(id)
    }

    /// What it has read from storage since it is looked at; nothing of others.
    pub(crate) fn read_by(&self, id: &WorkloadId) -> Bytes {
        self.expected.get(id).copied().unwrap_or_default()
    }

    /// A workload has read so much more.
    pub(crate) fn note_read(&mut self, id: &WorkloadId, bytes: Bytes) {
        if let Some(read) = self.expected.get_mut(id) {
            *read += bytes;
        }
    }

    /// Whether anybody is.
    pub(crate) fn expects_anybody(&self) -> bool {
        !self.expected.is_empty()
    }

    /// Whether a reader may just have begun to read, so that all processes are to be looked at soon.
    pub(crate) fn is_in_a_hurry(&self, now: Nanoseconds) -> bool {
        self.reading.is_some_and(|(since, _)| now - since < HURRY)
    }

    /// A trial has shown what containing a reader does for a program.
    pub(crate) fn note_verdict(
        &mut self,
        pair: &Pair,
        verdict: Verdict,
        effect: Effect,
        washout: Nanoseconds,
    ) {
        match verdict {
            Verdict::Aborted => {}
            Verdict::Accepted => {
                if self.proven.len() >= PAIRS_MAX && !self.proven.contains_key(pair) {
                    return;
                }
                let trials = self.proven.get(pair).map_or(0, |p| p.trials);
                let known = Proven {
                    effect,
                    washout,
                    trials: trials.saturating_add(1),
                    recalls: 0,
                };
                self.proven.insert(pair.clone(), known);
            }
            Verdict::Rejected | Verdict::Harmful | Verdict::Inconclusive => self.forget(pair),
        }
    }

    /// A reader was contained without a trial. What could not be made has protected nobody, and does not count.
    pub(crate) fn note_made(&mut self, pair: &Pair) {
        if let Some(known) = self.proven.get_mut(pair) {
            known.recalls = known.recalls.saturating_add(1);
        }
    }

    /// What is known under one fingerprint is known under another one from now on.
    pub(crate) fn rename(&mut self, former: &Fingerprint, now: &Fingerprint) {
        let is_of = |(program, reader, _): &Pair| program == former || reader == former;
        let pairs: Vec<Pair> = self.proven.keys().filter(|pair| is_of(pair)).cloned().collect();
        let renamed = |name: &Fingerprint| if name == former { now.clone() } else { name.clone() };
        for pair in pairs {
            if let Some(known) = self.proven.remove(&pair) {
                let new = (renamed(&pair.0), renamed(&pair.1), pair.2);
                self.proven.entry(new).or_insert(known);
            }
        }
    }

    /// What was proven does not hold any more.
    pub(crate) fn forget(&mut self, pair: &Pair) {
        self.proven.remove(pair);
    }
}

impl Engine {
    /// Who is contained for the sake of whom by such a change; `None` for other changes, and readers that are gone.
    pub(crate) fn reader_of(&self, target: &Target) -> Option<Fingerprint> {
        match target {
            Target::Reader(r) => Some(self.workloads.get(&r.workload)?.workload.fingerprint.clone()),
            _ => None,
        }
    }

    /// The pair that a change for a workload is about, if it is to contain a reader.
    fn pair_of(&self, id: &WorkloadId, strategy: &StrategyId, target: &Target) -> Option<Pair> {
        let program = self.workloads.get(id)?.workload.fingerprint.clone();
        Some((program, self.reader_of(target)?, strategy.clone()))
    }

    /// Somebody takes a change back, or all: what was proven of its reader is forgotten.
    pub(crate) fn forget_readers(&mut self, action: Option<ActionId>) {
        let pairs: Vec<Pair> = self
            .changes
            .iter()
            .filter(|(id, _)| action.is_none_or(|action| action == **id))
            .filter_map(|(_, c)| self.pair_of(&c.action.workload, &c.strategy, &c.action.target))
            .collect();
        for pair in &pairs {
            self.recall.forget(pair);
        }
    }

    /// Looks for known readers while the machine reads much.
    pub(crate) fn look_out_for_readers(&mut self) {
        let (now, seconds) = (self.now, self.machine_interval.as_secs_f64());
        let read = self.machine_sample.paging.read_in.0 as f64;
        let reads_much = seconds > 0.0 && read >= READ_MIN * seconds;
        let recall = &mut self.recall;
        recall.reading = match recall.reading {
            _ if recall.proven.is_empty() => None,
            Some((since, _)) if reads_much => Some((since, now)),
            None if reads_much => Some((now, now)),
            Some((_, last)) if now - last >= REST => None,
            before => before,
        };
        if recall.reading.is_none() {
            recall.expected.clear();
            return;
        }
        let living: BTreeSet<&Fingerprint> = self
            .workloads
            .values()
            .filter(|w| !w.gone && w.meter.is_some())
            .map(|w| &w.workload.fingerprint)
            .collect();
        let readers: BTreeSet<&Fingerprint> = self
            .recall
            .proven
            .iter()
            .filter(|((program, ..), p)| p.is_recalled() && living.contains(program))
            .map(|((_, reader, _), _)| reader)
            .collect();
        let expected = self
            .workloads
            .iter()
            .filter(|(id, w)| !w.gone && readers.contains(&w.workload.fingerprint) && !self.is_contained(id))
            .map(|(id, _)| (id.clone(), self.recall.read_by(id)))
            .collect();
        self.recall.expected = expected;
    }

    /// Whether a change of ours is in force, or on its way, that contains this reader.
    fn is_contained(&self, reader: &WorkloadId) -> bool {
        let contains = |t: &Target| matches!(t, Target::Reader(r) if r.workload == *reader);
        self.changes.values().any(|c| contains(&c.action.target))
    }

    /// Whether a reader that is looked at was proven to take the memory of this workload.
    pub(crate) fn expects_loss(&self, id: &WorkloadId) -> bool {
        self.recall
            .expected
            .keys()
            .any(|reader| self.is_proven(id, reader))
    }

    /// Whether a reader was proven to take the memory of a workload, so that it is contained without a trial.
    pub(crate) fn is_proven(&self, id: &WorkloadId, reader: &WorkloadId) -> bool {
        if self.strangers(reader, id).is_some() || !self.is_known_again(id) {
            return false;
        }
        let of = |id: &WorkloadId| self.workloads.get(id).map(|w| &w.workload.fingerprint);
        let (Some(program), Some(reader)) = (of(id), of(reader)) else {
            return false;
        };
        self.recall
            .proven
            .iter()
            .any(|((p, r, _), known)| p == program && r == reader && known.is_recalled())
    }

    /// The pair that a proposal is about, if it was proven and is not to be tried anew.
    pub(crate) fn proven_pair(
        &self,
        id: &WorkloadId,
        strategy: &StrategyId,
        proposal: &Proposal,
    ) -> Option<Pair> {
        let pair = self.pair_of(id, strategy, &proposal.target)?;
        if !self.is_known_again(id) {
            return None;
        }
        self.recall
            .proven
            .get(&pair)
            .is_some_and(Proven::is_recalled)
            .then_some(pair)
    }

    /// Makes a change that was proven for this pair, and puts it under guard. False when it must wait for another trial
    /// to make way, or for the probe of another guard to end: what a probe measures is not to be mixed with this. A probe is
    /// waited for and not broken off, since a reader that comes whenever one releases it would leave none ever complete.
    pub(crate) fn make_again(&mut self, id: &WorkloadId, pair: &Pair, proposal: &Proposal) -> bool {
        if self.policy.mode != Mode::Act {
            return false;
        }
        if self.real_trial_running() {
            self.make_way(&format!(
                "a reader is known to take the memory of {id}, which comes first"
            ));
            return false;
        }
        let (Some(proven), Some(panel), Some(piece)) = (
            self.recall.proven.get(pair).cloned(),
            self.panel_of(std::slice::from_ref(id)).map(relief::by_work),
            Piece::of(id, proposal).pop(),
        ) else {
            return false;
        };
        let choice = relief::choice(&self.policy);
        let (number, action) = (ExperimentId(self.next_experiment), ActionId(self.next_action));
        self.next_experiment += 1;
        self.next_action += 1;
        let lag = self.lag(&panel);
        let setup = Setup {
            id: number,
            kind: ExperimentKind::Switchback,
            strategy: pair.2.clone(),
            panel,
            action,
            hypothesis: proposal.hypothesis.clone(),
            predicted: proven.effect,
            seed: self.policy.seed,
            settling: proposal.settling,
            washout_min: relief::washout_min(&self.policy),
            washout_max: Nanoseconds::from_secs_f64(self.policy.washout_max_s),
            lag,
            measured: Nanoseconds::from_secs_f64(choice.measured_s),
            budget: Nanoseconds::from_secs_f64(self.policy.experiment_max_s),
            parameters: TrialParameters {
                scale_prior: choice.scale,
                ..relief::parameters(&self.policy.trial)
            },
            shown: 1.0,
            spread: choice.spread,
            started: self.now,
            started_unix: self.unix,
            urgent: true,
            lengths: None,
            reader: Some(pair.1.clone()),
            contained: crate::trials::contained_by(&proposal.target),
            places: Places::default(),
        };
        let mut e = Experiment::new(setup, Breaker::new(choice.scale_breaker));
        // Another meter may have judged then.
        e.washout = e.washout.max(proven.washout);
        e.parts.push(vec![action]);
        let text = format!(
            "{}; it is contained at once, since a trial has proven that this {}; the change is guarded",
            proposal.hypothesis,
            e.setup.panel.gain(&proven.effect),
        );
        let record = ExperimentRecord {
            effect: Some(proven.effect),
            ..self.record(&e, Some(Verdict::Accepted))
        };
        let guard =
            Guard::new(&e, record, text.clone(), self.now, &self.policy).of_recall(proven.effect, self.now);
        self.guards.insert(guard);
        self.open_own_meter(id);
        self.make(piece.action(action, proposal.hypothesis.clone()), pair.2.clone());
        let now = self.now;
        if let Some(w) = self.workloads.get_mut(id) {
            w.proposed = None;
            w.seeking = false;
            w.relief_at = now + relief::AGAIN;
            w.forget_inspections();
        }
        self.advise(proposal.advice.clone());
        self.decide(id, Stage::Improved, text, false);
        true
    }

    /// Opens the meter that was chosen for a workload, if it is not open.
    pub(crate) fn open_own_meter(&mut self, id: &WorkloadId) {
        let Some(w) = self.workloads.get_mut(id) else {
            return;
        };
        if let Some(chosen) = &w.meter {
            if !w.open.contains(&chosen.candidate.id) {
                let meter = chosen.candidate.id.clone();
                w.open.push(meter.clone());
                self.out.push(Command::OpenMeter(id.clone(), meter));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_proven_again_and_again_is_tried_less_and_less() {
        let pair: Pair = (
            Fingerprint::new("program"),
            Fingerprint::new("reader"),
            StrategyId::new("s"),
        );
        let effect = Effect {
            estimate: 5.0,
            lower: 1.0,
            upper: 9.0,
            confidence: 0.9,
        };
        let mut recall = Recall::default();
        // Recalls until it is tried anew, after each trial that accepts it.
        let until = |recall: &mut Recall| {
            recall.note_verdict(&pair, Verdict::Accepted, effect, Nanoseconds::from_secs(3));
            let known = recall.proven.get_mut(&pair).unwrap();
            let mut recalls = 0;
            while known.is_recalled() {
                known.recalls += 1;
                recalls += 1;
            }
            recalls
        };
        let rounds: Vec<u32> = (0..8).map(|_| until(&mut recall)).collect();
        assert_eq!(rounds, [2, 4, 4, 4, 4, 4, 4, 4]);
        // A trial that was broken off says nothing; one that does not accept ends it.
        recall.note_verdict(&pair, Verdict::Aborted, effect, Nanoseconds::ZERO);
        assert_eq!(recall.proven.len(), 1);
        recall.note_verdict(&pair, Verdict::Inconclusive, effect, Nanoseconds::ZERO);
        assert!(recall.proven.is_empty());
    }

    #[test]
    fn what_the_history_knows_is_tried_first() {
        let reader = ProvenReader {
            program: Fingerprint::new("program"),
            reader: Fingerprint::new("reader"),
            strategy: StrategyId::new("s"),
            effect: Effect {
                estimate: 5.0,
                lower: 1.0,
                upper: 9.0,
                confidence: 0.9,
            },
            washout: Nanoseconds::from_secs(3),
            trials: 7,
        };
        let recall = Recall::remember(vec![reader]);
        assert!(recall.proven.values().all(|known| !known.is_recalled()));
    }
}
