//! Loads for trying the procedures: a random number generator and a metric, simulated second by second. The generator
//! is SplitMix64 (Steele, Lea and Flood 2014): one word of state, reproducible everywhere. It serves simulation and
//! tests only, never the random assignment of real trials.

use crate::robust::{ln, mean};
use std::f64::consts::TAU;

/// A reproducible stream of random numbers.
#[derive(Clone, Debug)]
pub struct Random {
    state: u64,
    spare: Option<f64>,
}

impl Random {
    /// The stream of a seed.
    pub fn new(seed: u64) -> Self {
        Self {
            state: seed,
            spare: None,
        }
    }

    /// The next 64 bits.
    pub fn next_u64(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Uniform in [0, 1).
    pub fn uniform(&mut self) -> f64 {
        (self.next_u64() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// A fair random bit.
    pub fn coin(&mut self) -> bool {
        self.next_u64() >> 63 == 1
    }

    /// Standard normal (Marsaglia's polar method).
    pub fn gaussian(&mut self) -> f64 {
        if let Some(spare) = self.spare.take() {
            return spare;
        }
        loop {
            let (x, y) = (2.0 * self.uniform() - 1.0, 2.0 * self.uniform() - 1.0);
            let s = x * x + y * y;
            if s > 0.0 && s < 1.0 {
                let factor = (-2.0 * ln(s) / s).sqrt();
                self.spare = Some(y * factor);
                return x * factor;
            }
        }
    }

    /// Exponential with mean 1.
    pub fn exponential(&mut self) -> f64 {
        -ln(1.0 - self.uniform())
    }

    /// Student's t with three degrees of freedom, scaled to variance 1.
    pub fn heavy(&mut self) -> f64 {
        let z = self.gaussian();
        let chi: f64 = (0..3).map(|_| self.gaussian()).map(|g| g * g).sum();
        z / (chi / 3.0).sqrt() / 3f64.sqrt()
    }
}

/// sin(2π `turns`) by its series: the same bits on every machine.
fn sine(turns: f64) -> f64 {
    let x = (turns - turns.round()) * TAU;
    let square = x * x;
    let mut sum = 1.0;
    let mut n = 26.0;
    while n > 1.0 {
        sum = 1.0 - square * sum / (n * (n + 1.0));
        n -= 2.0;
    }
    x * sum
}

/// A kind of load: how the logarithm of the unchanged metric moves from second to second.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Load {
    /// Standard deviation of the stationary part.
    pub cv: f64,
    /// Its correlation from one second to the next.
    pub rho: f64,
    /// Standard deviation of the slope, per minute.
    pub drift: f64,
    /// Steps of 10 %, once per 300 s on average.
    pub steps: bool,
    /// 20 % over the day and 10 % over the hour.
    pub diurnal: bool,
    /// Heavy-tailed innovations, and stalls of 30 % in one second of 200.
    pub tails: bool,
}

impl Load {
    /// Gaussian white noise.
    pub fn white(cv: f64) -> Self {
        Self {
            cv,
            rho: 0.0,
            drift: 0.0,
            steps: false,
            diurnal: false,
            tails: false,
        }
    }

    /// Autocorrelated Gaussian noise.
    pub fn correlated(cv: f64, rho: f64) -> Self {
        Self {
            rho,
            ..Self::white(cv)
        }
    }

    /// Everything at once.
    pub fn all(cv: f64) -> Self {
        Self {
            cv,
            rho: 0.8,
            drift: 0.002,
            steps: true,
            diurnal: true,
            tails: true,
        }
    }

    /// The named loads of the example `operating_characteristics`.
    pub fn scenarios(cv: f64) -> [(&'static str, Self); 8] {
        let base = Self::correlated(cv, 0.5);
        [
            ("rho .2", Self::correlated(cv, 0.2)),
            ("rho .5", base),
            ("rho .8", Self::correlated(cv, 0.8)),
            ("drift", Self { drift: 0.005, ..base }),
            ("steps", Self { steps: true, ..base }),
            (
                "diurnal",
                Self {
                    diurnal: true,
                    ..base
                },
            ),
            ("tails", Self { tails: true, ..base }),
            ("all", Self::all(cv)),
        ]
    }

    /// A run of this load with random phases.
    pub fn start(self, random: &mut Random) -> Signal {
        Signal {
            load: self,
            stationary: self.cv * random.gaussian(),
            level: 0.0,
            slope: self.drift * random.gaussian() / 60.0,
            day: random.uniform(),
            hour: random.uniform(),
            second: 0.0,
        }
    }
}

/// A load in progress.
#[derive(Clone, Debug)]
pub struct Signal {
    load: Load,
    stationary: f64,
    level: f64,
    slope: f64,
    day: f64,
    hour: f64,
    second: f64,
}

impl Signal {
    /// The logarithm of the metric in the next second.
    pub fn next(&mut self, random: &mut Random) -> f64 {
        let load = self.load;
        let innovation = if load.tails {
            random.heavy()
        } else {
            random.gaussian()
        };
        self.stationary =
            load.rho * self.stationary + (1.0 - load.rho * load.rho).sqrt() * load.cv * innovation;
        self.level += self.slope;
        if load.steps && random.uniform() < 1.0 / 300.0 {
            self.level += 0.10 * random.gaussian();
        }
        let mut y = self.stationary + self.level;
        if load.diurnal {
            y += 0.20 * sine(self.day + self.second / 86_400.0)
                + 0.10 * sine(self.hour + self.second / 3600.0);
        }
        if load.tails && random.uniform() < 0.005 {
            y -= 0.30 * random.exponential();
        }
        self.second += 1.0;
        y
    }

    /// The score of the next block: `washout` seconds are discarded, `measured` averaged, `effect` added.
    pub fn block(&mut self, random: &mut Random, washout: u32, measured: u32, effect: f64) -> f64 {
        for _ in 0..washout {
            self.next(random);
        }
        let seconds: Vec<f64> = (0..measured.max(1)).map(|_| self.next(random)).collect();
        mean(&seconds) + effect
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::robust::{autocorrelation, variance};

    #[test]
    fn the_generator_is_the_published_one() {
        // First outputs of SplitMix64 for the seed 1234567 (reference implementation).
        let mut r = Random::new(1_234_567);
        assert_eq!(r.next_u64(), 6_457_827_717_110_365_317);
        assert_eq!(r.next_u64(), 3_203_168_211_198_807_973);
    }

    #[test]
    fn distributions_have_their_moments() {
        let mut r = Random::new(3);
        let g: Vec<f64> = (0..40_000).map(|_| r.gaussian()).collect();
        assert!(mean(&g).abs() < 0.02 && (variance(&g) - 1.0).abs() < 0.03);
        let e: Vec<f64> = (0..40_000).map(|_| r.exponential()).collect();
        assert!((mean(&e) - 1.0).abs() < 0.02);
        let heads = (0..40_000).filter(|_| r.coin()).count();
        assert!((19_500..20_500).contains(&heads));
        let h: Vec<f64> = (0..40_000).map(|_| r.heavy()).collect();
        assert!(h.iter().any(|x| x.abs() > 6.0), "tails are heavy");
    }

    #[test]
    fn loads_are_as_described() {
        let mut r = Random::new(4);
        let mut s = Load::correlated(0.05, 0.8).start(&mut r);
        let ys: Vec<f64> = (0..60_000).map(|_| s.next(&mut r)).collect();
        assert!((variance(&ys).sqrt() / 0.05 - 1.0).abs() < 0.05);
        assert!((autocorrelation(&ys, 1) - 0.8).abs() < 0.02);
    }

    #[test]
    fn the_sine_is_a_sine() {
        for i in -20..20 {
            let turns = f64::from(i) * 0.137;
            assert!((sine(turns) - (TAU * turns).sin()).abs() < 1e-12, "{turns}");
        }
    }
}
