//! Realistic signal noise: autocorrelated, drifting, stepping, heavy-tailed, with stalls. A counter `(seed, stream,
//! index)` names each draw, so draws do not depend on others. A signal has cells of one second, visited once and in
//! order, so noise does not depend on sampling. Shape from machine-model B.1 point 12: `y = AR(1) + drift + steps`, t3
//! innovations, stalls.

use serde::{Deserialize, Serialize};

/// Length of a cell of noise in nanoseconds: one second, the sampling interval of an experiment.
pub const CELL_NS: u64 = 1_000_000_000;

/// Spreads 64 bits so that each input bit moves each output bit (finaliser of SplitMix64, Steele, Lea and Flood 2014).
pub(crate) fn mix(value: u64) -> u64 {
    let mut z = value.wrapping_add(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// A source of numbers that are named, not drawn in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Draws {
    key: u64,
}

impl Draws {
    /// The draws of one stream of one run.
    pub fn new(seed: u64, stream: u64) -> Self {
        Self {
            key: mix(mix(seed) ^ stream.wrapping_mul(0x9E37_79B9_7F4A_7C15)),
        }
    }

    /// 64 random bits for this index.
    pub fn bits(&self, index: u64) -> u64 {
        mix(self.key ^ mix(index.wrapping_add(0xD1B5_4A32_D192_ED03)))
    }

    /// Uniform in (0, 1).
    pub fn uniform(&self, index: u64) -> f64 {
        ((self.bits(index) >> 11) as f64 + 0.5) / (1u64 << 53) as f64
    }

    /// Standard normal (Box and Muller).
    pub fn normal(&self, index: u64) -> f64 {
        let (a, _) = self.normals(index);
        a
    }

    fn normals(&self, index: u64) -> (f64, f64) {
        let base = index.wrapping_mul(2);
        let radius = (-2.0 * self.uniform(base).ln()).sqrt();
        let angle = std::f64::consts::TAU * self.uniform(base.wrapping_add(1));
        (radius * angle.cos(), radius * angle.sin())
    }

    /// Student's t with three degrees of freedom, scaled to variance one.
    pub fn heavy(&self, index: u64) -> f64 {
        let (z, a) = self.normals(index.wrapping_mul(2));
        let (b, c) = self.normals(index.wrapping_mul(2).wrapping_add(1));
        // The variance of t3 is 3.
        z / ((a * a + b * b + c * c) / 3.0).sqrt().max(1e-6) / 3f64.sqrt()
    }
}

/// How noisy a signal is. All zero = perfectly steady.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct NoiseSpec {
    /// Coefficient of variation of the autocorrelated part, per second; 0..1.
    pub cv: f64,
    /// Correlation from one second to the next, 0..0.999.
    pub correlation: f64,
    /// Share of the innovations that come from a t3 distribution, 0..1.
    pub heavy_tails: f64,
    /// Largest slow drift away from the mean, relative, 0..0.5.
    pub drift: f64,
    /// Period of the drift in seconds.
    pub drift_period_s: f64,
    /// Standard deviation of the level that is drawn anew at every step, relative, 0..0.5.
    pub steps: f64,
    /// Mean seconds between two steps.
    pub step_every_s: f64,
    /// Stalls per hour: seconds in which the program stands still for a part of the time.
    pub stalls_per_hour: f64,
}

impl Default for NoiseSpec {
    fn default() -> Self {
        Self {
            cv: 0.015,
            correlation: 0.5,
            heavy_tails: 0.1,
            drift: 0.0,
            drift_period_s: 3600.0,
            steps: 0.0,
            step_every_s: 1800.0,
            stalls_per_hour: 0.0,
        }
    }
}

impl NoiseSpec {
    /// No noise at all.
    pub const QUIET: Self = Self {
        cv: 0.0,
        correlation: 0.0,
        heavy_tails: 0.0,
        drift: 0.0,
        drift_period_s: 3600.0,
        steps: 0.0,
        step_every_s: 1800.0,
        stalls_per_hour: 0.0,
    };

    /// A signal that makes trials hard: the scenario `all` of experiments.md A.2 at 5 %. Noise lasts for seconds and
    /// has heavy tails. Added are an hourly wave of 10 %, a new level (standard deviation 10 %) every five minutes, and
    /// a stall every 200 s. Minutes suffice to prove an effect of 5 %; one of 2 % is not always provable.
    pub const ROUGH: Self = Self {
        cv: 0.05,
        correlation: 0.8,
        heavy_tails: 1.0,
        drift: 0.1,
        drift_period_s: 3600.0,
        steps: 0.1,
        step_every_s: 300.0,
        stalls_per_hour: 18.0,
    };

    /// Faults, by name, value and range.
    pub fn complaints(&self) -> Vec<String> {
        let mut wrong = Vec::new();
        let mut range = |name: &str, value: f64, low: f64, high: f64| {
            if !(value >= low && value <= high) {
                wrong.push(format!(
                    "noise.{name} = {value}: must be between {low} and {high}"
                ));
            }
        };
        range("cv", self.cv, 0.0, 1.0);
        range("correlation", self.correlation, 0.0, 0.999);
        range("heavy_tails", self.heavy_tails, 0.0, 1.0);
        range("drift", self.drift, 0.0, 0.5);
        range("drift_period_s", self.drift_period_s, 1.0, 1e9);
        range("steps", self.steps, 0.0, 0.5);
        range("step_every_s", self.step_every_s, 1.0, 1e9);
        range("stalls_per_hour", self.stalls_per_hour, 0.0, 3600.0);
        wrong
    }
}

/// A noisy factor over time, mean about one.
#[derive(Clone, Debug)]
pub struct Noise {
    spec: NoiseSpec,
    draws: Draws,
    phase: f64,
    /// Next cell to be visited, and the autocorrelated part at the cell before it.
    next: u64,
    state: f64,
    factor: f64,
}

impl Noise {
    /// A signal that starts at `cell`.
    pub fn new(spec: NoiseSpec, seed: u64, stream: u64, cell: u64) -> Self {
        let draws = Draws::new(seed, stream);
        let mut noise = Self {
            phase: draws.uniform(u64::MAX),
            state: spec.cv * draws.normal(u64::MAX / 4),
            next: cell,
            factor: 1.0,
            spec,
            draws,
        };
        noise.visit();
        noise
    }

    /// The factor in this cell. Earlier cells answer like the present one: time does not go back.
    pub fn at(&mut self, cell: u64) -> f64 {
        while self.next <= cell {
            self.visit();
        }
        self.factor
    }

    fn visit(&mut self) {
        let cell = self.next;
        self.next += 1;
        let s = &self.spec;
        let mut log = 0.0;
        if s.cv > 0.0 {
            let tail = s.heavy_tails > 0.0 && self.draws.uniform(cell.wrapping_mul(8)) < s.heavy_tails;
            let innovation = if tail {
                self.draws.heavy(cell.wrapping_mul(8) + 1)
            } else {
                self.draws.normal(cell.wrapping_mul(8) + 2)
            };
            let scale = s.cv * (1.0 - s.correlation * s.correlation).sqrt();
            self.state = s.correlation * self.state + scale * innovation;
            log += self.state;
        }
        if s.drift > 0.0 {
            let turns = cell as f64 / s.drift_period_s + self.phase;
            log += s.drift * (std::f64::consts::TAU * turns).sin();
        }
        if s.steps > 0.0 {
            let step = (cell as f64 / s.step_every_s + self.phase) as u64;
            log += s.steps * self.draws.normal(step.wrapping_add(1 << 40));
        }
        let mut factor = log.clamp(-3.0, 3.0).exp();
        if s.stalls_per_hour > 0.0
            && self.draws.uniform(cell.wrapping_mul(8) + 5) < s.stalls_per_hour / 3600.0
        {
            factor *= self.draws.uniform(cell.wrapping_mul(8) + 6);
        }
        self.factor = factor;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn series(spec: NoiseSpec, seed: u64, n: u64) -> Vec<f64> {
        let mut noise = Noise::new(spec, seed, 3, 0);
        (0..n).map(|c| noise.at(c).ln()).collect()
    }

    fn moments(x: &[f64]) -> (f64, f64, f64) {
        let n = x.len() as f64;
        let mean = x.iter().sum::<f64>() / n;
        let variance = x.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / n;
        let lag: f64 = x.windows(2).map(|w| (w[0] - mean) * (w[1] - mean)).sum::<f64>() / n;
        (mean, variance.sqrt(), lag / variance)
    }

    #[test]
    fn the_autocorrelated_part_has_its_spread_and_its_correlation() {
        let spec = NoiseSpec {
            cv: 0.05,
            correlation: 0.7,
            heavy_tails: 0.2,
            ..NoiseSpec::QUIET
        };
        let (mean, sd, lag) = moments(&series(spec, 9, 40_000));
        assert!(mean.abs() < 0.003, "{mean}");
        assert!((sd / 0.05 - 1.0).abs() < 0.06, "{sd}");
        assert!((lag - 0.7).abs() < 0.03, "{lag}");
    }

    #[test]
    fn heavy_tails_are_heavier_than_normal_ones_at_the_same_variance() {
        let draws = Draws::new(1, 1);
        let n = 100_000;
        let count = |f: &dyn Fn(u64) -> f64| (0..n).filter(|i| f(*i).abs() > 4.0).count();
        let (heavy, normal) = (count(&|i| draws.heavy(i)), count(&|i| draws.normal(i)));
        assert!(heavy > 200 && normal < 30, "{heavy} {normal}");
    }

    #[test]
    fn a_cell_does_not_depend_on_which_cells_were_looked_at() {
        let spec = NoiseSpec {
            cv: 0.1,
            drift: 0.1,
            steps: 0.1,
            stalls_per_hour: 300.0,
            ..NoiseSpec::default()
        };
        let (mut all, mut some) = (Noise::new(spec, 5, 6, 0), Noise::new(spec, 5, 6, 0));
        let every: Vec<f64> = (0..1000).map(|c| all.at(c)).collect();
        for c in [0, 17, 18, 400, 999] {
            assert_eq!(some.at(c).to_bits(), every[c as usize].to_bits(), "cell {c}");
        }
        let mut other = Noise::new(spec, 5, 7, 0);
        assert_ne!(other.at(999).to_bits(), every[999].to_bits(), "another stream");
    }

    #[test]
    fn quiet_is_one_and_stalls_come_at_their_rate() {
        assert!(series(NoiseSpec::QUIET, 1, 100).iter().all(|v| *v == 0.0));
        let spec = NoiseSpec {
            stalls_per_hour: 60.0,
            ..NoiseSpec::QUIET
        };
        let stalls = series(spec, 1, 36_000).iter().filter(|v| **v < 0.0).count();
        assert!((500..700).contains(&stalls), "{stalls} in ten hours");
    }

    #[test]
    fn steps_hold_their_level() {
        let spec = NoiseSpec {
            steps: 0.2,
            step_every_s: 100.0,
            ..NoiseSpec::QUIET
        };
        let x = series(spec, 2, 2000);
        let changes = x.windows(2).filter(|w| w[0] != w[1]).count();
        assert!((15..=21).contains(&changes), "{changes}");
    }

    #[test]
    fn wrong_numbers_are_named() {
        let spec = NoiseSpec {
            cv: f64::NAN,
            correlation: 1.0,
            ..NoiseSpec::default()
        };
        let text = spec.complaints().join("\n");
        assert!(
            text.contains("noise.cv") && text.contains("noise.correlation"),
            "{text}"
        );
        assert!(NoiseSpec::default().complaints().is_empty());
    }
}
