//! What a trial said after each of its blocks, computed again from its record.
//!
//! The history keeps the score of every block and what came out at the end, not what was known in between. The test is
//! deterministic, so the same blocks give the same estimates. One number is missing in the record: the scale of the
//! noise that the passive history had shown, which sets the stakes. It is found as the one that leads to the estimate,
//! the interval and the evidence that were recorded. Where no scale does, nothing is returned: a curve that ends elsewhere
//! than the verdict would be an invention. So a trace is a receipt as well: the verdict follows from the blocks.

use crate::relief;
use homeostat_model::{BlockRecord, Effect, ExperimentKind, ExperimentRecord};
use homeostat_statistics::robust::{exp, ln};
use homeostat_statistics::{Arm, Trial, TrialParameters};

/// Most blocks of a trial that is computed again: the search costs about the cube of it.
const BLOCKS_MAX: usize = 200;
/// Scales that are tried, evenly on a logarithmic axis: so near each other that a switch from pairs to single blocks, where no
/// evidence can be compared, rarely lies between the right one and both its neighbours.
const SCALES: u32 = 640;
/// Smallest and largest scale (log units).
const SCALE_RANGE: (f64, f64) = (5e-4, 2.0);
/// Halvings of the interval in which the evidence crosses what was recorded.
const HALVINGS: u32 = 60;
/// A level at which no test ends.
const NEVER: f64 = 1e-300;
/// Numbers agree when they differ by less than this share (or this much, below one).
const AGREEMENT: f64 = 1e-6;

/// What was known after a block.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Traced {
    /// Estimate with its interval.
    pub effect: Effect,
    /// Evidence for a gain (e-value).
    pub evidence: f64,
}

/// The state of knowledge after each block of a trial by on/off blocks, in order; `None` for rollouts, for trials
/// without a verdict, and where the record does not lead to what was recorded. `parameters` are those of the policy;
/// the level is that of the record.
pub fn retrace(record: &ExperimentRecord, parameters: &TrialParameters) -> Option<Vec<Traced>> {
    // What protects a program is tried in another way, which the record does not tell.
    let relief = relief::parameters(parameters);
    let contained = relief::sparing(parameters);
    // Earlier versions spared nobody.
    let relief_by_fair_coins = TrialParameters {
        off_chance: parameters.off_chance,
        ..relief.clone()
    };
    [parameters, &relief, &contained, &relief_by_fair_coins]
        .into_iter()
        .find_map(|p| retrace_with(record, p))
}

fn retrace_with(record: &ExperimentRecord, parameters: &TrialParameters) -> Option<Vec<Traced>> {
    let effect = record.effect?;
    let simple = matches!(record.kind, ExperimentKind::Switchback | ExperimentKind::Placebo);
    if !simple || record.blocks.is_empty() || record.blocks.len() > BLOCKS_MAX || !record.evidence.is_finite()
    {
        return None;
    }
    let with = |scale: f64| TrialParameters {
        alpha: record.alpha,
        scale_prior: scale,
        // What rules a gain out depends on how fast the effect sets in, which is not recorded as it was told.
        beta: NEVER,
        ..parameters.clone()
    };
    // With a scale that is not the right one the trial might have ended before: the search does not end it.
    let endless = |scale: f64| TrialParameters {
        alpha: NEVER,
        alpha_harm: NEVER,
        beta: NEVER,
        ..with(scale)
    };
    let agrees = |trial: &Trial| {
        let e = trial.estimate();
        close(e.effect, effect.estimate)
            && close(e.lower, effect.lower)
            && close(e.upper, effect.upper)
            && close(e.evidence, record.evidence)
    };
    let scale = scale_of(
        record.evidence,
        |scale| Some(replayed(&record.blocks, endless(scale))?.evidence()),
        |scale| replayed(&record.blocks, with(scale)).is_some_and(|trial| agrees(&trial)),
    )?;
    trace(&record.blocks, with(scale))
}

/// The scale whose evidence is the one wanted and that agrees in all else.
fn scale_of(wanted: f64, evidence: impl Fn(f64) -> Option<f64>, agrees: impl Fn(f64) -> bool) -> Option<f64> {
    let (low, high) = (ln(SCALE_RANGE.0), ln(SCALE_RANGE.1));
    let at = |i: u32| exp(low + (high - low) * f64::from(i) / f64::from(SCALES));
    let mut before: Option<(f64, f64)> = None;
    for i in 0..=SCALES {
        let scale = at(i);
        let Some(found) = evidence(scale) else {
            before = None;
            continue;
        };
        let above = found - wanted;
        if let Some((last, last_above)) = before {
            if (last_above <= 0.0) != (above <= 0.0) {
                let (mut left, mut right) = (last, scale);
                for _ in 0..HALVINGS {
                    let middle = (left + right) / 2.0;
                    match evidence(middle) {
                        Some(e) if (e - wanted <= 0.0) == (last_above <= 0.0) => left = middle,
                        Some(_) => right = middle,
                        None => break,
                    }
                }
                if let Some(scale) = [left, right].into_iter().find(|s| agrees(*s)) {
                    return Some(scale);
                }
            }
        }
        before = Some((scale, above));
    }
    None
}

/// The trial after its blocks; `None` when it would have switched otherwise or ended before.
fn replayed(blocks: &[BlockRecord], parameters: TrialParameters) -> Option<Trial> {
    let mut trial = Trial::new(parameters);
    for block in blocks {
        step(&mut trial, block)?;
    }
    Some(trial)
}

fn trace(blocks: &[BlockRecord], parameters: TrialParameters) -> Option<Vec<Traced>> {
    let mut trial = Trial::new(parameters);
    let mut told = None;
    let mut all = Vec::with_capacity(blocks.len());
    for (index, block) in blocks.iter().enumerate() {
        step(&mut trial, block)?;
        if told.is_none() || is_told(index + 1) || index + 1 == blocks.len() {
            let e = trial.estimate();
            told = Some(Effect {
                estimate: e.effect,
                lower: e.lower,
                upper: e.upper,
                confidence: e.confidence,
            });
        }
        all.push(Traced {
            effect: told?,
            evidence: trial.evidence(),
        });
    }
    Some(all)
}

/// Whether the interval is computed after so many blocks: after each at first, then after each twentieth part more. It costs some
/// hundreds of exponentials for each block so far, which would be a tenth of a CPU in a long trial of short blocks.
pub(crate) fn is_told(blocks: usize) -> bool {
    blocks % (blocks / 20).max(1) == 0
}

fn step(trial: &mut Trial, block: &BlockRecord) -> Option<()> {
    if trial.decision() != homeostat_statistics::Decision::Continue {
        return None;
    }
    let arm = trial.next_arm(block.on);
    if (arm == Arm::On) != block.on {
        return None;
    }
    if block.broken {
        trial.observe_broken();
    } else {
        trial.observe(block.score);
    }
    Some(())
}

fn close(a: f64, b: f64) -> bool {
    a == b || (a - b).abs() <= AGREEMENT * a.abs().max(b.abs()).max(1.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use homeostat_model::{
        ActionId, Bytes, ExperimentId, Fingerprint, MeterId, Nanoseconds, StrategyId, Verdict, WorkloadId,
    };
    use homeostat_statistics::simulation::Random;

    /// A trial as it would be recorded, with the scale that nobody wrote down.
    fn recorded(seed: u64, gain: f64, scale: f64, broken: Option<usize>) -> ExperimentRecord {
        recorded_as(&TrialParameters::default(), seed, gain, scale, broken)
    }

    fn recorded_as(
        like: &TrialParameters,
        seed: u64,
        gain: f64,
        scale: f64,
        broken: Option<usize>,
    ) -> ExperimentRecord {
        let parameters = TrialParameters {
            alpha: 0.001,
            scale_prior: scale,
            ..like.clone()
        };
        let mut random = Random::new(seed);
        let mut trial = Trial::new(parameters);
        let mut blocks = Vec::new();
        while trial.decision() == homeostat_statistics::Decision::Continue && blocks.len() < 60 {
            let on = trial.next_arm(random.coin()) == Arm::On;
            let noise = 10.0 + 0.02 * random.gaussian();
            let score = match on {
                true => noise + gain,
                // Nothing at all was done.
                false if like.loss_max.is_some() && blocks.len() > 3 => f64::NEG_INFINITY,
                false => noise,
            };
            let broken = broken == Some(blocks.len());
            if broken {
                trial.observe_broken();
            } else {
                trial.observe(score);
            }
            blocks.push(BlockRecord {
                index: blocks.len() as u32,
                on,
                measured_from: Nanoseconds::ZERO,
                measured: Nanoseconds::from_secs(4),
                work: exp(score) * 4.0,
                cpu: Nanoseconds::from_secs(4),
                score,
                broken,
            });
        }
        let e = trial.estimate();
        let effect = Effect {
            estimate: e.effect,
            lower: e.lower,
            upper: e.upper,
            confidence: e.confidence,
        };
        ExperimentRecord {
            id: ExperimentId(1),
            kind: ExperimentKind::Switchback,
            strategy: StrategyId::from("large_pages"),
            workload: WorkloadId::new("w"),
            fingerprint: Fingerprint::new("f"),
            others: Vec::new(),
            members: Vec::new(),
            spans: Vec::new(),
            meanings: Vec::new(),
            fresh: None,
            off_level: None,
            not_excluded: Vec::new(),
            settling: None,
            reader: None,
            machine: String::new(),
            action: ActionId(1),
            hypothesis: String::new(),
            predicted: effect,
            meter: MeterId::from("progress"),
            objective: String::new(),
            seed,
            alpha: 0.001,
            washout: Nanoseconds::from_secs(2),
            measured: Nanoseconds::from_secs(4),
            started_unix: 1,
            ended_unix: 2,
            verdict: Some(Verdict::Accepted),
            reason: String::new(),
            effect: Some(effect),
            evidence: e.evidence,
            stalled: Nanoseconds::ZERO,
            bloat: Bytes(0),
            harm_exposure: 0.0,
            blocks,
        }
    }

    #[test]
    fn the_trace_ends_where_the_record_does_whatever_the_scale_was() {
        for (seed, gain, scale) in [
            (1, 0.15, 0.04),
            (2, 0.03, 0.013),
            (3, 0.0, 0.08),
            (4, -0.1, 0.021),
        ] {
            let record = recorded(seed, gain, scale, None);
            let trace = retrace(&record, &TrialParameters::default()).expect("it is found again");
            assert_eq!(trace.len(), record.blocks.len());
            let last = trace.last().expect("a block");
            let effect = record.effect.expect("an effect");
            assert!(close(last.effect.estimate, effect.estimate), "seed {seed}");
            assert!(close(last.effect.lower, effect.lower), "seed {seed}");
            assert!(close(last.evidence, record.evidence), "seed {seed}");
        }
    }

    #[test]
    fn a_broken_block_is_one_of_the_trial() {
        let record = recorded(5, 0.2, 0.05, Some(2));
        assert!(record.blocks.iter().any(|b| b.broken));
        assert!(retrace(&record, &TrialParameters::default()).is_some());
    }

    #[test]
    fn a_record_that_was_changed_by_hand_has_no_trace() {
        let mut record = recorded(1, 0.15, 0.04, None);
        record.blocks[1].score += 0.05;
        assert_eq!(retrace(&record, &TrialParameters::default()), None);
        let mut record = recorded(1, 0.15, 0.04, None);
        record.evidence *= 3.0;
        assert_eq!(retrace(&record, &TrialParameters::default()), None);
        record.kind = ExperimentKind::StagedRollout;
        assert_eq!(retrace(&record, &TrialParameters::default()), None);
    }

    #[test]
    fn a_trial_that_protects_is_traced_with_its_own_bound() {
        let policy = TrialParameters::default();
        for (seed, gain) in [(1, 3.0), (2, 6.0), (3, 0.9)] {
            let record = recorded_as(&relief::parameters(&policy), seed, gain, 0.5, None);
            assert!(record.effect.expect("an effect").upper.is_infinite());
            let trace = retrace(&record, &policy).expect("it is found again");
            assert_eq!(trace.len(), record.blocks.len());
            assert!(close(trace.last().expect("a block").evidence, record.evidence));
        }
    }
}
