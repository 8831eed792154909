//! The clockwork of a staged rollout: a change that cannot be switched back cheaply is made part by part, and the coin
//! decides when.
//!
//! A stage has nine slots of fixed length; the start of every slot is discarded. The onset slot of the stage is drawn
//! from `1..=8` and journalled before the stage begins; when it begins, the part is made. The times of all slots of a
//! stage are fixed before its onset is drawn, from the past only, so under "no effect" nothing measured depends on it
//! and the evidence is exact (`homeostat_statistics::staged`). A part that takes longer than the discarded start of its
//! slot comes into effect over some slots; how long it will take is known from the parts before, and the evidence looks
//! for such a ramp. The next stage begins when the part is made.

use crate::meaning::SlotSpan;
use crate::panel::Gauge;
use crate::series::EDGE_TOLERANCE;
use crate::strategy::Proposal;
use homeostat_model::action::Target;
use homeostat_model::{Action, ActionId, BlockRecord, EffectorId, Nanoseconds, WorkloadId};
use homeostat_statistics::robust::ln;
use homeostat_statistics::staged::{EVIDENCE_PER_STAGE_MAX, HISTORY_MIN, NoiseModel, Ramp, Rollout, SLOTS};
use std::collections::BTreeMap;

/// The coin of a stage is journalled as block `stage × 16 + onset`, on.
pub(crate) const BLOCKS_PER_STAGE: u32 = 16;
/// Blocks of the round trips that may follow a rollout are numbered from here.
pub(crate) const ROUND_TRIPS_FROM: u32 = 1024;
/// Stages at most; what is left follows on the evidence of those.
pub(crate) const STAGES_MAX: usize = 32;
/// A slot counts when at least this share of its measured part carries readings.
const COVERAGE_MIN: f64 = 0.6;
/// The discarded start of a slot covers this many times what the part is expected to take.
const PACE_MARGIN: f64 = 1.25;
/// … unless that is more than this many times the measured part: then the part ramps up …
const DISCARD_MAX: f64 = 1.5;
/// … over this many slots.
const RAMP_SLOTS: f64 = 2.0;
/// A noise model rests on the longest slots of which the history holds this many; else on the shortest.
const SLOTS_WANTED: usize = 24;
/// The walk of a noise model from few slots is mostly chance: it counts as n / (n + this).
const WALK_DOUBT: f64 = 24.0;
/// Share of the most possible evidence at which longer slots are not worth their time.
const EVIDENCE_ENOUGH: f64 = 0.9;
/// A predicted gain below this (log units) is not planned for.
const THETA_MIN: f64 = 0.02;

/// What one action does to one workload.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Piece {
    pub(crate) workload: WorkloadId,
    pub(crate) effector: EffectorId,
    pub(crate) target: Target,
    pub(crate) arguments: BTreeMap<String, String>,
}

impl Piece {
    /// The pieces of a proposal: what is tried first and what follows it, in order.
    pub(crate) fn of(workload: &WorkloadId, proposal: &Proposal) -> Vec<Self> {
        std::iter::once(&proposal.target)
            .chain(&proposal.stages)
            .map(|target| Self {
                workload: workload.clone(),
                effector: proposal.effector.clone(),
                target: target.clone(),
                arguments: proposal.arguments.clone(),
            })
            .collect()
    }

    /// The action that carries it out.
    pub(crate) fn action(self, id: ActionId, why: String) -> Action {
        Action {
            id,
            effector: self.effector,
            workload: self.workload,
            target: self.target,
            arguments: self.arguments,
            why,
        }
    }
}

/// The parts of several changes that are made as one: the first pieces of all, then the second, and so on.
pub(crate) fn interleave(of: Vec<Vec<Piece>>) -> Vec<Vec<Piece>> {
    let longest = of.iter().map(Vec::len).max().unwrap_or(0);
    let mut parts: Vec<Vec<Piece>> = (0..longest).map(|_| Vec::new()).collect();
    for pieces in of {
        for (part, piece) in parts.iter_mut().zip(pieces) {
            part.push(piece);
        }
    }
    parts
}

/// How a rollout is laid out.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Plan {
    /// Measured part of a slot.
    pub(crate) measured: Nanoseconds,
    /// Shortest discarded start of a slot.
    pub(crate) discard: Nanoseconds,
    /// Noise of slots of that length.
    pub(crate) noise: NoiseModel,
}

/// What a rollout is planned from.
pub(crate) struct Wish<'a> {
    /// Passive history as (work, denominator) per interval.
    pub(crate) seconds: &'a [(f64, f64)],
    /// Length of an interval in seconds.
    pub(crate) interval: f64,
    /// Discarded start of a slot in seconds.
    pub(crate) discard: f64,
    /// How much of that is for a meter that tells late: what lies nearer to each other tells partly the same.
    pub(crate) lag: f64,
    /// Candidates for the measured part, in seconds.
    pub(crate) candidates: &'a [f64],
    /// Shares after each part.
    pub(crate) shares: &'a [f64],
    /// Predicted gain (log units).
    pub(crate) theta: f64,
    /// Level.
    pub(crate) alpha: f64,
    /// Longest rollout in seconds.
    pub(crate) budget: f64,
}

/// Chooses the shortest slots that promise enough evidence for the predicted gain. `None`: the history is too short or
/// too broken, or no slot fits the budget.
pub(crate) fn plan(wish: &Wish<'_>) -> Option<Plan> {
    let mut candidates: Vec<f64> = wish
        .candidates
        .iter()
        .copied()
        .filter(|c| *c >= wish.interval)
        .collect();
    candidates.sort_by(f64::total_cmp);
    let late = (wish.lag / wish.interval).ceil().max(0.0) as usize;
    let means = |measured: f64| -> Vec<f64> {
        let per_slot = (measured / wish.interval).round().max(1.0) as usize;
        wish.seconds
            .chunks_exact(per_slot + late)
            .filter_map(|slot| slot.get(late..))
            .map(|slot| {
                let (work, denominator) = slot.iter().fold((0.0, 0.0), |s, x| (s.0 + x.0, s.1 + x.1));
                ln(work.max(0.5) / denominator)
            })
            .collect()
    };
    let enough = |wanted: usize| move |m: &&f64| means(**m).len() >= wanted;
    let base = candidates
        .iter()
        .rev()
        .find(enough(SLOTS_WANTED))
        .or_else(|| candidates.iter().find(enough(HISTORY_MIN)))?;
    let history = means(*base);
    let noise = NoiseModel::from_history(&history)?;
    let slots = history.len() as f64;
    let noise = NoiseModel {
        walk: noise.walk * slots / (slots + WALK_DOUBT),
        ..noise
    };
    let stages = wish.shares.len() as f64;
    // Whole intervals, so that the edges of the slots fall on the beat of the samples.
    let discard = (wish.discard / wish.interval).ceil() * wish.interval;
    let theta = wish.theta.max(THETA_MIN);
    let wanted = ln(1.0 / wish.alpha).min(EVIDENCE_ENOUGH * stages * EVIDENCE_PER_STAGE_MAX);
    let mut best: Option<(f64, Plan)> = None;
    for measured in &candidates {
        if stages * SLOTS as f64 * (discard + measured) > wish.budget {
            break;
        }
        let between = base + late as f64 * wish.interval;
        let slots = noise.scaled(measured / base, (discard + measured) / between);
        let evidence = slots.evidence_expected(wish.shares, theta);
        let better = best.as_ref().is_none_or(|(e, _)| evidence > *e);
        if better {
            let plan = Plan {
                measured: Nanoseconds::from_secs_f64(*measured),
                discard: Nanoseconds::from_secs_f64(discard),
                noise: slots,
            };
            best = Some((evidence, plan));
        }
        if evidence >= wanted {
            break;
        }
    }
    best.map(|(_, plan)| plan)
}

/// A rollout in progress.
pub(crate) struct Staged {
    /// The parts, in order, each with a piece for every workload that has one.
    pub(crate) parts: Vec<Vec<Piece>>,
    /// Share of the whole after each part.
    pub(crate) shares: Vec<f64>,
    pub(crate) rollout: Rollout,
    plan: Plan,
    interval: Nanoseconds,
    /// Stage that runs, from 0.
    pub(crate) stage: usize,
    started: Nanoseconds,
    /// Discarded start of the slots of this stage.
    pub(crate) discard: Nanoseconds,
    onset: usize,
    /// Scores of the slots of this stage so far.
    scores: Vec<f64>,
    /// How long the part of this stage is expected to take, from the parts before.
    expected: Nanoseconds,
    /// Whether the part of this stage was ordered.
    pub(crate) ordered: bool,
    /// Since when a part is being made.
    pub(crate) moving: Option<Nanoseconds>,
    /// When the last part was made.
    made_at: Option<Nanoseconds>,
    /// How long the last part took, in seconds per share of the whole.
    pace: f64,
    /// How long each part took.
    took: Vec<Nanoseconds>,
}

/// What a rollout needs at this moment.
pub(crate) enum StagedState {
    Running,
    /// Make the part of this stage.
    Onset,
    /// All slots of the stage are measured and its part is made.
    Complete,
    /// A slot could not be measured.
    Broken(String),
}

impl Staged {
    pub(crate) fn new(parts: Vec<Vec<Piece>>, shares: Vec<f64>, plan: Plan, interval: Nanoseconds) -> Self {
        Self {
            rollout: Rollout::new(plan.noise),
            discard: plan.discard,
            parts,
            shares,
            plan,
            interval,
            stage: 0,
            started: Nanoseconds::ZERO,
            onset: 0,
            scores: Vec::new(),
            expected: Nanoseconds::ZERO,
            ordered: false,
            moving: None,
            made_at: None,
            pace: 0.0,
            took: Vec::new(),
        }
    }

    /// What has become of a capital of one: half of it is bet on the stages.
    pub(crate) fn capital(&self) -> f64 {
        (1.0 + self.rollout.estimate().evidence) / 2.0
    }

    pub(crate) fn share_of(&self, stage: usize) -> f64 {
        let at = |i: usize| self.shares.get(i).copied().unwrap_or(1.0);
        at(stage) - if stage == 0 { 0.0 } else { at(stage - 1) }
    }

    /// Begins a stage. `left`: time that the budget leaves. The times are fixed here, before the onset is known.
    pub(crate) fn begin(&mut self, stage: usize, now: Nanoseconds, left: Nanoseconds, settling: Nanoseconds) {
        let takes = self.pace * self.share_of(stage);
        let measured = self.plan.measured.as_secs_f64();
        // A quick part is made within the discarded start; a slow one is let ramp up over some slots, which costs
        // evidence, but much less time.
        let quick = takes * PACE_MARGIN + settling.as_secs_f64();
        let slow = takes / RAMP_SLOTS - measured;
        let stages_left = self.parts.len().saturating_sub(stage).max(1) as f64;
        let affordable = left.as_secs_f64() / (stages_left * SLOTS as f64) - measured;
        let beat = self.interval.as_secs_f64().max(1e-3);
        let longest = (measured * DISCARD_MAX).max(slow);
        let wanted = (quick.min(longest).min(affordable) / beat).ceil() * beat;
        self.expected = Nanoseconds::from_secs_f64(takes);
        self.discard = self.plan.discard.max(Nanoseconds::from_secs_f64(wanted));
        self.stage = stage;
        self.started = now;
        self.scores.clear();
        self.ordered = false;
    }

    /// The onset slot as drawn, `1..=8`.
    pub(crate) fn set_onset(&mut self, onset: usize) {
        self.onset = onset;
    }

    pub(crate) fn measured(&self) -> Nanoseconds {
        self.plan.measured
    }

    fn slot(&self) -> Nanoseconds {
        self.discard + self.plan.measured
    }

    /// Start of the measured part of the slot that runs, when it has begun.
    pub(crate) fn measuring_since(&self, now: Nanoseconds) -> Option<Nanoseconds> {
        if self.scores.len() >= SLOTS {
            return None;
        }
        let from = self.started + self.slot() * self.scores.len() as u64 + self.discard;
        (now >= from).then_some(from)
    }

    /// A slot of this stage that is over, with what was in force in it; `None` where its part was being made.
    pub(crate) fn span_of(&self, slot: &BlockRecord) -> Option<SlotSpan> {
        let is_being_made =
            self.moving.is_some() || self.made_at.is_some_and(|made| made > slot.measured_from);
        if slot.on && is_being_made {
            return None;
        }
        let made = if slot.on {
            Some(self.stage)
        } else {
            self.stage.checked_sub(1)
        };
        Some(SlotSpan {
            stage: self.stage as u32,
            slot: slot.index % BLOCKS_PER_STAGE,
            share: made.map_or(0.0, |stage| self.shares.get(stage).copied().unwrap_or(1.0)),
            from: slot.measured_from,
            to: slot.measured_from + self.plan.measured + EDGE_TOLERANCE,
        })
    }

    /// The part is made.
    pub(crate) fn made(&mut self, now: Nanoseconds) {
        if let Some(since) = self.moving.take() {
            let took = now - since;
            self.made_at = Some(now);
            self.took.push(took);
            let share = self.share_of(self.stage);
            if share > 0.0 {
                self.pace = took.as_secs_f64() / share;
            }
        }
    }

    /// Measures the slots that ended and says what is due. Records go to `blocks`.
    pub(crate) fn poll(
        &mut self,
        now: Nanoseconds,
        gauge: &Gauge<'_>,
        blocks: &mut Vec<BlockRecord>,
    ) -> StagedState {
        while self.scores.len() < SLOTS {
            let index = self.scores.len();
            let start = self.started + self.slot() * index as u64;
            let (from, end) = (start + self.discard, start + self.slot());
            if now + EDGE_TOLERANCE < end {
                break;
            }
            let reading = gauge.read(from, end + EDGE_TOLERANCE);
            let length = (end - from).as_secs_f64();
            if reading.idle {
                return StagedState::Broken("the load went away in a slot of the rollout".into());
            }
            let score = reading
                .score
                .filter(|s| s.is_finite() && reading.seconds >= COVERAGE_MIN * length);
            let Some(score) = score else {
                return StagedState::Broken(format!(
                    "the meter {} delivered no readings in a slot of the rollout",
                    gauge.meters()
                ));
            };
            blocks.push(BlockRecord {
                index: self.stage as u32 * BLOCKS_PER_STAGE + index as u32,
                on: index >= self.onset,
                measured_from: from,
                measured: Nanoseconds::from_secs_f64(reading.seconds),
                work: reading.work,
                cpu: Nanoseconds::from_secs_f64(reading.cpu),
                score,
                broken: false,
            });
            self.scores.push(score);
        }
        if !self.ordered && self.scores.len() >= self.onset {
            return StagedState::Onset;
        }
        if self.scores.len() == SLOTS && self.ordered && self.moving.is_none() {
            return StagedState::Complete;
        }
        StagedState::Running
    }

    /// Level of the slots before the onset of this stage, for the circuit breaker.
    pub(crate) fn level_before(&self) -> Option<f64> {
        let before = self.scores.get(..self.onset.min(self.scores.len()))?;
        (!before.is_empty()).then(|| homeostat_statistics::robust::mean(before))
    }

    /// Counts the completed stage.
    pub(crate) fn count(&mut self) -> Result<(), String> {
        let mut slots = [0.0; SLOTS];
        if self.scores.len() != SLOTS {
            return Err("a stage ended before its slots".into());
        }
        slots.copy_from_slice(&self.scores);
        let share = self.shares.get(self.stage).copied().unwrap_or(1.0);
        let ramp = Ramp {
            slot: self.slot().as_secs_f64(),
            discard: self.discard.as_secs_f64(),
            takes: self.expected.as_secs_f64(),
        };
        self.rollout
            .stage_ramp(&slots, self.onset, share, &ramp)
            .map_err(|e| e.to_string())
    }

    /// The largest part that can be switched back and forth within this time, and how long it took to make: any part
    /// where they do not touch each other (memory), else only the last.
    pub(crate) fn round_trip(&self, longest: Nanoseconds, margin: f64) -> Option<(usize, Nanoseconds)> {
        let apart = |t: &Target| matches!(t, Target::Pages(_) | Target::Memory(_));
        let last = self.parts.len().saturating_sub(1);
        self.took
            .iter()
            .enumerate()
            .filter(|(i, _)| *i == last || self.parts.iter().flatten().all(|p| apart(&p.target)))
            .filter(|(_, took)| Nanoseconds::from_secs_f64(took.as_secs_f64() * margin) <= longest)
            .max_by(|(a, _), (b, _)| self.share_of(*a).total_cmp(&self.share_of(*b)))
            .map(|(i, took)| (i, *took))
    }

    /// Whether this was the last stage.
    pub(crate) fn is_last(&self) -> bool {
        self.stage + 1 >= self.parts.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_several_are_made_side_by_side() {
        let piece = |name: &str, size: u32| Piece {
            workload: name.into(),
            effector: "e".into(),
            target: Target::Cpus((0..size).map(homeostat_model::CpuId).collect()),
            arguments: BTreeMap::new(),
        };
        let parts = interleave(vec![
            vec![piece("a", 1), piece("a", 2)],
            vec![piece("b", 1), piece("b", 2), piece("b", 3)],
        ]);
        let names = |part: &Vec<Piece>| part.iter().map(|p| p.workload.to_string()).collect::<Vec<_>>();
        assert_eq!(
            parts.iter().map(names).collect::<Vec<_>>(),
            [vec!["a", "b"], vec!["a", "b"], vec!["b"]]
        );
        assert!(interleave(Vec::new()).is_empty());
    }

    fn wish(seconds: &[(f64, f64)], theta: f64) -> Option<Plan> {
        plan(&Wish {
            seconds,
            interval: 1.0,
            discard: 2.3,
            lag: 0.0,
            candidates: &[4.0, 6.0, 10.0, 20.0, 40.0, 80.0],
            shares: &[0.1, 0.25, 0.5, 1.0],
            theta,
            alpha: 0.002,
            budget: 3600.0,
        })
    }

    fn history(n: usize, spread: f64) -> Vec<(f64, f64)> {
        let mut x = 12345u64;
        (0..n)
            .map(|_| {
                let mut sum = 0.0;
                for _ in 0..6 {
                    x ^= x << 13;
                    x ^= x >> 7;
                    x ^= x << 17;
                    sum += (x >> 11) as f64 / (1u64 << 53) as f64;
                }
                (1000.0 * (1.0 + spread * (sum - 3.0) * 2f64.sqrt()), 1.0)
            })
            .collect()
    }

    #[test]
    fn a_large_gain_gets_short_slots_and_a_small_one_long_slots() {
        let seconds = history(60, 0.02);
        let quick = wish(&seconds, 0.5).unwrap();
        let slow = wish(&history(600, 0.02), 0.03).unwrap();
        assert!(
            quick.measured <= Nanoseconds::from_secs(6),
            "a rollout of minutes: {quick:?}"
        );
        assert!(slow.measured > quick.measured, "{slow:?}");
        assert_eq!(quick.discard, Nanoseconds::from_secs(3), "whole beats");
        let whole = (slow.measured + slow.discard) * 36;
        assert!(
            whole <= Nanoseconds::from_secs(3600),
            "within the budget: {whole}"
        );
    }

    #[test]
    fn without_history_there_is_no_plan() {
        assert_eq!(wish(&history(20, 0.02), 0.5), None);
        let nothing = vec![(0.0, 0.0); 60];
        assert_eq!(wish(&nothing, 0.5), None);
    }
}
