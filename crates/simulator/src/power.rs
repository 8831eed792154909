//! Clock frequency and power.
//!
//! The fewer cores are busy, the faster they may run, and a core draws power with the cube of its frequency (voltage
//! follows frequency). Fixed frequency is the default: the published machines ran at one clock.

use serde::{Deserialize, Serialize};

/// How the clock follows the load, and what it costs.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Power {
    /// Frequency with one busy core, relative to the nominal one, 1..2.
    pub turbo: f64,
    /// Frequency with all cores busy, relative to the nominal one, 0.2..2.
    pub all_busy: f64,
    /// Power of the idle machine in watts.
    pub idle_w: f64,
    /// Power of one core that is busy at the nominal frequency, in watts.
    pub core_w: f64,
}

impl Default for Power {
    fn default() -> Self {
        Self {
            turbo: 1.0,
            all_busy: 1.0,
            idle_w: 100.0,
            core_w: 8.0,
        }
    }
}

impl Power {
    /// What is wrong with it.
    pub fn complaints(&self) -> Vec<String> {
        let mut wrong = Vec::new();
        let mut range = |name: &str, value: f64, low: f64, high: f64| {
            if !(value >= low && value <= high) {
                wrong.push(format!(
                    "power.{name} = {value}: must be between {low} and {high}"
                ));
            }
        };
        range("turbo", self.turbo, 1.0, 2.0);
        range("all_busy", self.all_busy, 0.2, 2.0);
        range("idle_w", self.idle_w, 0.0, 1e6);
        range("core_w", self.core_w, 0.0, 1e4);
        wrong
    }

    /// Frequency relative to the nominal one when this share of the cores is busy.
    pub fn frequency(&self, busy: f64) -> f64 {
        self.turbo + (self.all_busy - self.turbo) * busy.clamp(0.0, 1.0)
    }

    /// Watts drawn when so many of so many cores are busy.
    pub fn watts(&self, busy_cores: f64, cores: f64) -> f64 {
        let f = self.frequency(if cores > 0.0 { busy_cores / cores } else { 0.0 });
        self.idle_w + busy_cores.max(0.0) * self.core_w * f.powi(3)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_busy_cores_run_faster_and_power_follows_the_cube() {
        let p = Power {
            turbo: 1.3,
            all_busy: 1.0,
            idle_w: 50.0,
            core_w: 10.0,
        };
        assert_eq!((p.frequency(0.0), p.frequency(1.0)), (1.3, 1.0));
        assert_eq!(p.watts(0.0, 8.0), 50.0);
        assert_eq!(p.watts(8.0, 8.0), 130.0);
        assert!(p.watts(1.0, 8.0) > 50.0 + 10.0 * 1.9);
        assert_eq!(Power::default().frequency(0.3), 1.0);
    }

    #[test]
    fn impossible_values_are_named() {
        let p = Power {
            turbo: f64::NAN,
            ..Power::default()
        };
        assert!(p.complaints().join("").contains("power.turbo"));
    }
}
