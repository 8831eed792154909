//! Signals as rough as they are on bad days: for asking whether what holds on kind machines holds on unkind ones, too.
//!
//! The shape is that of machine-model B.1 point 12 (autocorrelation, factors of the load, t3 innovations, stalls); how
//! much of each is assumed: a coefficient of variation of 3 to 8 % per second where the usual programs of this simulator
//! have 1.5 %, which needs some 4 to 30 times as many blocks for the same proof. Counters are biased as those of real
//! processors are: each is off by a factor of its own that no repetition averages out (a standard deviation of 20 %), and
//! a program's own counter of its work wanders by up to 2 % with time, as one that counts retries does.

use crate::behaviour::{Load, ProgramSpec};
use crate::noise::{Draws, NoiseSpec};
use crate::world::Surroundings;

/// Noise of processor counters from look to look.
const COUNTER_CV: f64 = 0.10;
/// Standard deviation of the logarithm of the factor by which a processor counter is off.
const COUNTER_BIAS: f64 = 0.20;
/// Noise of one reading of a work meter, at least, for one second.
const METER_CV: f64 = 0.01;
/// How far a work meter wanders from the truth.
const METER_BIAS: f64 = 0.02;

/// Makes the load of the programs and everything that is seen of them rough. What a program really gains from a change is
/// as before. The same `seed` gives the same roughness.
pub fn roughen(programs: &mut [ProgramSpec], surroundings: &mut Surroundings, seed: u64) {
    surroundings.counter_cv = surroundings.counter_cv.max(COUNTER_CV);
    surroundings.counter_bias = surroundings.counter_bias.max(COUNTER_BIAS);
    for (stream, program) in programs.iter_mut().enumerate() {
        let draws = Draws::new(seed ^ 0x0072_6f75_6768, stream as u64);
        program.noise = rougher(program.noise, &draws, 0);
        if matches!(program.load, Load::Open { .. }) {
            program.arrival_noise = rougher(program.arrival_noise, &draws, 100);
        }
        for meter in &mut program.meters {
            meter.cv = meter.cv.max(METER_CV);
            meter.bias = meter.bias.max(METER_BIAS);
        }
    }
}

/// Never calmer than it was.
fn rougher(was: NoiseSpec, draws: &Draws, first: u64) -> NoiseSpec {
    let real = |index: u64, low: f64, high: f64| low + draws.uniform(first + index) * (high - low);
    NoiseSpec {
        cv: was.cv.max(real(0, 0.03, 0.08)),
        correlation: was.correlation.max(real(1, 0.6, 0.95)),
        heavy_tails: was.heavy_tails.max(real(2, 0.2, 0.5)),
        drift: was.drift.max(real(3, 0.02, 0.10)),
        drift_period_s: real(4, 1800.0, 14_400.0),
        steps: was.steps.max(real(5, 0.02, 0.10)),
        step_every_s: real(6, 300.0, 3600.0),
        stalls_per_hour: was.stalls_per_hour.max(real(7, 0.0, 12.0)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rough_is_valid_rougher_and_the_same_every_time() {
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
        for seed in 0..50 {
            let make = || {
                let mut programs = vec![usual.clone(), usual.clone()];
                let mut surroundings = Surroundings::default();
                roughen(&mut programs, &mut surroundings, seed);
                (programs, surroundings)
            };
            let (programs, surroundings) = make();
            assert_eq!((programs.clone(), surroundings.clone()), make());
            assert!(surroundings.counter_bias > 0.0);
            for p in &programs {
                assert_eq!(p.complaints(), Vec::<String>::new());
                assert!(p.noise.cv > usual.noise.cv && p.noise.steps > 0.0 && p.arrival_noise.cv > 0.0);
                assert!(p.meters.iter().all(|m| m.bias > 0.0));
            }
            assert_ne!(programs[0].noise, programs[1].noise, "each its own");
        }
    }
}
