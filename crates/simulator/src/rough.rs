//! Rough signals, to ask whether results on kind machines hold on unkind ones.
//!
//! The work and the external arrivals of every program become at least as noisy as [`NoiseSpec::ROUGH`] (scenario `all`
//! of experiments.md A.2 at 5 %). The usual simulated programs have 1.5 % and nothing else. The same proof then takes 4
//! to 30 times as many blocks. Each processor counter is off by a factor that no repetition averages out (standard
//! deviation 20 %, assumed). A program's work counter wanders by up to 2 % over time, like one that counts retries.

use crate::behaviour::{Load, ProgramSpec};
use crate::noise::NoiseSpec;
use crate::world::Surroundings;

/// Noise of processor counters between samples.
const COUNTER_CV: f64 = 0.10;
/// Standard deviation of the logarithm of a processor counter's factor.
const COUNTER_BIAS: f64 = 0.20;
/// Factor on the noise of one work meter reading …
const METER_NOISE: f64 = 5.0;
/// … and at least this, for one second.
const METER_CV: f64 = 0.01;
const METER_BIAS: f64 = 0.02;

/// Makes the programs' load and all signals rough, alike for every program and seed. The true gain of a change stays.
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

/// Never calmer than before.
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
