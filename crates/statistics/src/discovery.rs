//! The level for the next of many tries: control of false discoveries. A daemon that tries a change an hour at level
//! 0.05 keeps a useless one every day. With e-LOND, try `i` of an epoch gets `α_i = q · γ_i · (R + 1)`. Σγ_i is at most
//! 1 and `R` counts what was accepted so far and still stands, each kind of change once: who proves the same gain again
//! has discovered nothing. With e-values the expected share of false accepts is at most `q`, for any dependence between
//! tries. The strict profile ([`Rule::Spending`]) controls the chance of *any* false accept.

use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;

/// Ratio of one γ to the one before in the half that the first tries get: the first one's level is 0.0055 by default, which
/// takes three quarters of the pairs that 0.001 takes, and the hundredth still has 0.0002.
const DECAY_FIRST: f64 = 0.9;

fn decay_first() -> f64 {
    DECAY_FIRST
}

/// How the levels of many tries are controlled together.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum Rule {
    /// False-discovery rate at most `rate`: `α_i = rate · γ_i · (accepts + 1)`. γ is the mean of two geometric series,
    /// `(1 − decay) · decay^(i−1)` and the same with `decay_first`. The first level is 0.0055 by default.
    ELond {
        /// Largest expected share of false accepts among all accepts.
        rate: f64,
        /// Ratio of one γ to the one before in the half that many tries share.
        decay: f64,
        /// The same in the half that the first tries share.
        #[serde(default = "decay_first")]
        decay_first: f64,
        /// Tries after which the count starts again.
        epoch: u32,
    },
    /// Chance of any false accept ever at most `total`: `α_i = total · 6 / (π² i²)`.
    Spending {
        /// Largest chance.
        total: f64,
    },
    /// The same level for every try: no control over many.
    Fixed {
        /// Level.
        alpha: f64,
    },
}

impl Default for Rule {
    fn default() -> Self {
        Self::ELond {
            rate: 0.10,
            decay: 0.99,
            decay_first: DECAY_FIRST,
            epoch: 200,
        }
    }
}

impl Rule {
    /// Level of try number `position` (from 0) after `accepts` accepts. Always within 1e-12..0.5.
    pub fn alpha(&self, position: u32, accepts: u32) -> f64 {
        let alpha = match self {
            Self::ELond {
                rate,
                decay,
                decay_first,
                ..
            } => {
                // Multiply repeatedly: powf differs between machines. Bounded by 100 000 steps.
                let half =
                    |ratio: f64| (0..position.min(100_000)).fold(0.5 * (1.0 - ratio), |g, _| g * ratio);
                rate * (half(*decay) + half(*decay_first)) * (f64::from(accepts) + 1.0)
            }
            Self::Spending { total } => {
                let i = f64::from(position) + 1.0;
                total * 6.0 / (std::f64::consts::PI * std::f64::consts::PI * i * i)
            }
            Self::Fixed { alpha } => *alpha,
        };
        if alpha.is_nan() {
            1e-12
        } else {
            alpha.clamp(1e-12, 0.5)
        }
    }

    /// Checks ranges. Each complaint names the parameter, its value and the allowed range.
    pub fn validate(&self) -> Vec<String> {
        let mut wrong = Vec::new();
        let mut range = |name: &str, value: f64, low: f64, high: f64| {
            if !(value >= low && value <= high) {
                wrong.push(format!("{name} = {value}: must be between {low} and {high}"));
            }
        };
        match self {
            Self::ELond {
                rate,
                decay,
                decay_first,
                epoch,
            } => {
                range("rate", *rate, 1e-6, 0.5);
                range("decay", *decay, 0.0, 0.9999);
                range("decay_first", *decay_first, 0.0, 0.9999);
                range("epoch", f64::from(*epoch), 1.0, 100_000.0);
            }
            Self::Spending { total } => range("total", *total, 1e-6, 0.5),
            Self::Fixed { alpha } => range("alpha", *alpha, 1e-9, 0.5),
        }
        wrong
    }
}

/// Tries so far, and which kinds of change stand accepted. A retry of the same change is a new try.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Discovery {
    rule: Rule,
    tries: u32,
    accepted: BTreeSet<String>,
}

impl Discovery {
    /// Before the first try.
    pub fn new(rule: Rule) -> Self {
        Self {
            rule,
            tries: 0,
            accepted: BTreeSet::new(),
        }
    }

    /// The level of the next try, to be fixed before the try starts.
    pub fn next_alpha(&self) -> f64 {
        self.rule.alpha(self.tries, self.accepts())
    }

    /// A try of this kind of change (such as "kind of program, strategy") ended. The last try of a kind is what holds.
    pub fn record(&mut self, kind: &str, accepted: bool) {
        self.tries = self.tries.saturating_add(1);
        if accepted {
            self.accepted.insert(kind.to_owned());
        } else {
            self.revoke(kind);
        }
        if let Rule::ELond { epoch, .. } = self.rule {
            if self.tries >= epoch {
                self.tries = 0;
                self.accepted.clear();
            }
        }
    }

    /// What was accepted turned out not to hold.
    pub fn revoke(&mut self, kind: &str) {
        self.accepted.remove(kind);
    }

    /// Tries in this epoch.
    pub fn tries(&self) -> u32 {
        self.tries
    }

    /// Kinds of change that were accepted in this epoch and stand.
    pub fn accepts(&self) -> u32 {
        u32::try_from(self.accepted.len()).unwrap_or(u32::MAX)
    }

    /// The rule in use.
    pub fn rule(&self) -> &Rule {
        &self.rule
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn e_lond_starts_high_and_grows_with_what_is_accepted_and_stands() {
        let gamma = |i: i32| 0.5 * (0.01 * 0.99f64.powi(i) + 0.1 * 0.9f64.powi(i));
        let is = |d: &Discovery, i, accepts: f64| {
            assert!(
                (d.next_alpha() - 0.10 * gamma(i) * (accepts + 1.0)).abs() < 1e-12,
                "{d:?}"
            );
        };
        let mut d = Discovery::new(Rule::default());
        assert!((d.next_alpha() - 0.0055).abs() < 1e-12);
        d.record("redis, large_pages", true);
        is(&d, 1, 1.0);
        d.record("redis, large_pages", true);
        is(&d, 2, 1.0);
        d.record("nginx, large_pages", true);
        is(&d, 3, 2.0);
        d.record("redis, reader", false);
        is(&d, 4, 2.0);
        d.revoke("nginx, large_pages");
        is(&d, 4, 1.0);
        d.record("redis, large_pages", false);
        is(&d, 5, 0.0);
        assert_eq!((d.tries(), d.accepts()), (5, 0));
        assert!((Rule::default().alpha(99, 0) - 1.85e-4).abs() < 1e-6);
    }

    #[test]
    fn an_epoch_ends_and_starts_afresh() {
        let mut d = Discovery::new(Rule::ELond {
            rate: 0.1,
            decay: 0.99,
            decay_first: 0.99,
            epoch: 3,
        });
        for (kind, accepted) in [("a", true), ("b", true), ("c", false)] {
            d.record(kind, accepted);
        }
        assert_eq!((d.tries(), d.accepts()), (0, 0));
        assert!((d.next_alpha() - 0.001).abs() < 1e-12);
    }

    #[test]
    fn levels_without_accepts_add_up_to_no_more_than_the_rate() {
        for (rule, total) in [
            (Rule::default(), 0.10),
            (
                Rule::ELond {
                    rate: 0.05,
                    decay: 0.5,
                    decay_first: 0.9,
                    epoch: 1000,
                },
                0.05,
            ),
            (Rule::Spending { total: 0.05 }, 0.05),
        ] {
            let spent: f64 = (0..1000).map(|i| rule.alpha(i, 0)).sum();
            assert!(spent <= total + 1e-6 && spent > 0.9 * total, "{rule:?} {spent}");
        }
    }

    #[test]
    fn levels_are_usable_whatever_the_parameters() {
        for rule in [
            Rule::Fixed { alpha: f64::NAN },
            Rule::Fixed { alpha: 7.0 },
            Rule::ELond {
                rate: f64::INFINITY,
                decay: 1.0,
                decay_first: 1.0,
                epoch: 0,
            },
            Rule::Spending { total: -1.0 },
        ] {
            let alpha = Discovery::new(rule.clone()).next_alpha();
            assert!((1e-12..=0.5).contains(&alpha), "{rule:?} {alpha}");
            assert!(!rule.validate().is_empty());
        }
        assert!(Rule::default().validate().is_empty());
    }

    #[test]
    fn state_and_settings_survive_writing_down() {
        let mut d = Discovery::new(Rule::Spending { total: 0.05 });
        d.record("redis, large_pages", true);
        let text = serde_json::to_string(&d).unwrap();
        assert_eq!(serde_json::from_str::<Discovery>(&text).unwrap(), d);
        let rule: Rule =
            serde_json::from_str(r#"{"kind":"e_lond","rate":0.1,"decay":0.99,"epoch":200}"#).unwrap();
        assert_eq!(rule, Rule::default());
    }
}
