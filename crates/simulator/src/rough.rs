//! Signals as rough as they are on bad days: for asking whether what holds on kind machines holds on unkind ones, too.
//!
//! The work of every program, and what arrives where it comes from outside, is at least as noisy as [`NoiseSpec::ROUGH`]
//! (the scenario `all` of experiments.md A.2 at 5 %, where the usual programs of this simulator have 1.5 % and nothing else),
//! which needs some 4 to 30 times as many blocks for the same proof. Counters are biased as those of real processors are: each
//! is off by a factor of its own that no repetition averages out (a standard deviation of 20 %, assumed), and a program's
//! own counter of its work wanders by up to 2 % with time, as one that counts retries does.

use crate::behaviour::{Load, ProgramSpec};
use crate::noise::NoiseSpec;
use crate::world::Surroundings;

/// Noise of processor counters from look to look.
const COUNTER_CV: f64 = 0.10;
/// Standard deviation of the logarithm of the factor by which a processor counter is off.
const COUNTER_BIAS: f64 = 0.20;
/// So many times the noise of one reading of a work meter …
const METER_NOISE: f64 = 5.0;
/// … and at least this, for one second.
const METER_CV: f64 = 0.01;
/// How far a work meter wanders from the truth.
const METER_BIAS: f64 = 0.02;

/// Makes the load of the programs and everything that is seen of them rough, the same for every program and seed. What a
/// program really gains from a change is as before.
pub fn roughen(programs: &mut [ProgramSpec], surroundings: &mut Surroundings) {
    surroundings.counter_cv = surroundings.counter_cv.max(COUNTER_CV);
    surroundings.counter_bias = surroundings.counter_bias.max(COUNTER_BIAS);
    for program in programs {
        program.noise = rougher(program.noise);
        if matches!(program.load, Load::Open { .. }) {
            program.arrival_noise = rougher(program.arrival_noise);
        }
        for meter in &mut program.meters {
            meter.cv = (meter.cv * METER_NOISE).max(METER_CV);
            meter.bias = meter.bias.max(METER_BIAS);
        }
    }
}

/// Never calmer than it was.
fn rougher(was: NoiseSpec) -> NoiseSpec {
    let rough = NoiseSpec::ROUGH;
    NoiseSpec {
        cv: was.cv.max(rough.cv),
        correlation: was.correlation.max(rough.correlation),
        heavy_tails: was.heavy_tails.max(rough.heavy_tails),
        drift: was.drift.max(rough.drift),
        drift_period_s: rough.drift_period_s,
        steps: was.steps.max(rough.steps),
        step_every_s: rough.step_every_s,
        stalls_per_hour: was.stalls_per_hour.max(rough.stalls_per_hour),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rough_is_valid_and_rougher() {
        let usual = ProgramSpec {
            name: "a".into(),
            profile: "oltp".into(),
            private_mib: 64,
            load: Load::Open {
                per_s: None,
                busy: Some(1.0),
            },
            ..ProgramSpec::default()
        };
        let louder = ProgramSpec {
            noise: NoiseSpec {
                cv: 0.07,
                ..usual.noise
            },
            load: Load::default(),
            ..usual.clone()
        };
        let mut programs = vec![usual.clone(), louder.clone()];
        let mut surroundings = Surroundings::default();
        roughen(&mut programs, &mut surroundings);
        assert!(surroundings.counter_bias > 0.0 && surroundings.counter_cv > 0.0);
        for p in &programs {
            assert_eq!(p.complaints(), Vec::<String>::new());
            assert!(p.noise.cv > usual.noise.cv && p.noise.steps > 0.0 && p.noise.stalls_per_hour > 0.0);
            assert!(p.meters.iter().all(|m| m.bias > 0.0 && m.cv >= METER_CV));
        }
        assert_eq!(programs[0].noise, NoiseSpec::ROUGH);
        assert_eq!(
            programs[0].arrival_noise,
            NoiseSpec::ROUGH,
            "what arrives from outside"
        );
        assert_eq!(programs[1].arrival_noise, louder.arrival_noise, "nothing arrives");
        assert!(
            (programs[1].noise.cv - 0.07).abs() < 1e-12,
            "never calmer than it was"
        );
    }
}
