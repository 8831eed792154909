//! The control series of a trial: the speed of memory, as the canary saw it beside the program.
//!
//! * Noise that the canary saw, too, is taken out of the scores: see `homeostat_statistics::control`. The record of a block
//!   holds the score that judges.
//! * The canary is a guardrail. A change that makes memory slower for it does so for other programs.

use crate::canary::CanaryLog;
use crate::experiment::Experiment;
use crate::off_level::Levels;
use crate::panel::{GUARDRAIL_BLOCKS, GUARDRAIL_ERROR_MIN, GUARDRAIL_LEVEL};
use homeostat_model::{BlockRecord, Nanoseconds};
use homeostat_statistics::control::Control;
use homeostat_statistics::robust::exp_m1;
use homeostat_statistics::trimmed::{self, Proof};
use homeostat_statistics::{Decision, Trial};

/// A slowness of the memory from which it is told (a share).
const WORTH_TELLING: f64 = 0.01;
/// A change is refused where the canary's memory is proven to get slower, and seems to do so by at least this (log units).
/// That is more than a neighbour may lose: nobody's work depends on the canary.
const CANARY_FALL: f64 = 0.05;

/// What is measured beside a trial's members and neighbours.
#[derive(Clone, Debug, Default)]
pub(crate) struct Beside {
    /// CPU time that homeostat used while the trial ran.
    pub(crate) own_cpu: Nanoseconds,
    pub(crate) canary: CanaryLog,
    /// The level without the change, in the trial and before.
    pub(crate) levels: Levels,
    control: Control,
    /// The canary's speed in the blocks with the change on, and off (log units).
    on: Vec<f64>,
    off: Vec<f64>,
}

impl Beside {
    /// Fixes how much noise is taken out of the blocks to come. Call it before each coin.
    pub(crate) fn fix(&mut self) {
        self.control.fix();
    }

    /// The factor of the canary's speed in the pairs that follow the trial (0 is none), and the scale of their differences,
    /// given that of the trial's scores.
    pub(crate) fn after(&self, scale: f64) -> (f64, f64) {
        self.control.after(scale)
    }

    /// Takes the canary's speed in a block, and out of its score the noise that the canary saw.
    fn adjust(&mut self, record: &mut BlockRecord, now: Nanoseconds) {
        let speed = self.canary.speed(record.measured_from, now);
        let taken = self.control.taken_out(speed);
        self.control.observe(record.on, record.score, speed);
        record.score -= taken;
        if let Some(speed) = speed {
            let arm = if record.on { &mut self.on } else { &mut self.off };
            arm.push(speed);
        }
    }

    /// A proven gain counts where the scores as measured show it, too. Otherwise the trial goes on.
    fn confirm(&self, decision: Decision, trial: &mut Trial) -> Decision {
        if decision == Decision::Benefit && !self.control.permits(trial.parameters().gate) {
            return trial.go_on();
        }
        decision
    }

    /// How much slower the canary's memory gets by the change, if that is proven at this level.
    pub(crate) fn hurt(&self, level: f64) -> Option<String> {
        if self.on.len().min(self.off.len()) < GUARDRAIL_BLOCKS {
            return None;
        }
        let proof = if level < GUARDRAIL_LEVEL {
            Proof::Both
        } else {
            Proof::Either
        };
        let fell = trimmed::fall(
            &self.on,
            &self.off,
            CANARY_FALL,
            level,
            GUARDRAIL_ERROR_MIN,
            proof,
        )?;
        Some(format!(
            "it makes the machine's memory {:.1} % slower for others, by the memory canary",
            -exp_m1(fell) * 100.0
        ))
    }

    /// What to say of it with an accepted change; empty without a canary.
    pub(crate) fn told(&self) -> String {
        let Some((change, error)) = self.control.reaction() else {
            return String::new();
        };
        let mut text = String::new();
        let slower = -exp_m1(change + 2.0 * error);
        if slower >= WORTH_TELLING {
            text = format!("; memory is at least {:.1} % slower for others", slower * 100.0);
        }
        if let (true, Some(lowered)) = (self.control.was_used(), self.control.lowered()) {
            let spread = lowered.sqrt();
            text.push_str(&format!(
                "; noise of the memory was taken out: it lowered the spread by {spread:.1}×"
            ));
        }
        text
    }
}

impl Experiment {
    /// Takes a finished block. Returns the trial's decision.
    pub(crate) fn judge(&mut self, mut record: BlockRecord, now: Nanoseconds) -> Decision {
        self.beside.levels.observe(&record);
        // Bounded losses: the bound is about what is measured, and memory is short then.
        if self.setup.parameters.loss_max.is_none() {
            self.beside.adjust(&mut record, now);
        }
        let score = record.score;
        self.blocks.push(record);
        let decision = self.trial.observe(score);
        self.beside.confirm(decision, &mut self.trial)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use homeostat_model::{Bytes, CanaryReading};
    use homeostat_statistics::simulation::Random;

    const SECOND: Nanoseconds = Nanoseconds::from_secs(1);

    fn block(on: bool, from: Nanoseconds, score: f64) -> BlockRecord {
        BlockRecord {
            index: 0,
            on,
            measured_from: from,
            measured: SECOND,
            work: 1.0,
            cpu: SECOND,
            score,
            broken: false,
        }
    }

    /// Blocks of a second in a random order. `slower`: by how much the change makes memory slower.
    fn run(blocks: u64, slower: f64) -> (Beside, f64, f64) {
        let (mut beside, mut random) = (Beside::default(), Random::new(7));
        let (mut measured, mut judged) = (Vec::new(), Vec::new());
        let mut first = true;
        for index in 0..blocks {
            if index % 2 == 0 {
                beside.fix();
                first = random.coin();
            }
            let on = first == (index % 2 == 0);
            let noise = 0.05 * random.gaussian();
            let end = SECOND * (index + 1);
            let load_ns = 100.0 * homeostat_statistics::robust::exp(noise + if on { slower } else { 0.0 });
            let reading = CanaryReading {
                loads: 10_000,
                loading: Nanoseconds((10_000.0 * load_ns) as u64),
                cpu: Nanoseconds::from_millis(5),
                resident: Bytes::from_mib(66),
            };
            beside.canary.push(end, SECOND, reading);
            let mut record = block(on, SECOND * index, 3.0 - noise + 0.01 * random.gaussian());
            let before = record.score;
            beside.adjust(&mut record, end);
            if index >= blocks / 2 {
                measured.push(before);
                judged.push(record.score);
            }
        }
        let variance = homeostat_statistics::robust::variance;
        (beside, variance(&measured), variance(&judged))
    }

    #[test]
    fn noise_that_the_canary_saw_is_taken_out_and_told() {
        let (beside, measured, judged) = run(80, 0.0);
        assert!(judged * 3.0 < measured, "{judged} instead of {measured}");
        let told = beside.told();
        assert!(
            told.contains("noise of the memory was taken out: it lowered the spread by"),
            "{told}"
        );
        assert_eq!(beside.hurt(GUARDRAIL_LEVEL), None);
    }

    #[test]
    fn a_change_that_makes_memory_slower_for_others_is_refused() {
        let (beside, ..) = run(80, 0.2);
        let hurt = beside.hurt(GUARDRAIL_LEVEL).unwrap();
        assert!(hurt.contains("slower for others"), "{hurt}");
        assert!(
            beside.told().starts_with("; memory is at least "),
            "{}",
            beside.told()
        );
    }

    #[test]
    fn without_a_canary_scores_stay_as_measured() {
        let mut beside = Beside::default();
        let mut record = block(true, Nanoseconds::ZERO, 2.5);
        beside.fix();
        beside.adjust(&mut record, SECOND);
        assert_eq!(record.score, 2.5);
        assert_eq!(
            (beside.told(), beside.hurt(GUARDRAIL_LEVEL)),
            (String::new(), None)
        );
        let mut trial = Trial::new(homeostat_statistics::TrialParameters::default());
        assert_eq!(beside.confirm(Decision::Benefit, &mut trial), Decision::Benefit);
    }
}
