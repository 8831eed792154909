//! The level without the change, in a trial and before it.
//!
//! A trial compares blocks with the change on against blocks after an undo. An undo that slows the program down (a scar) looks
//! like a gain there. The level before the trial owes nothing to a switch, so the scar shows against it. A load that changed
//! shows as well: the comparison decides nothing. Scores are in log units, as measured, without a control taken out.

use crate::engine::Engine;
use crate::experiment::Experiment;
use crate::panel::{GUARDRAIL_BLOCKS, Gauge, INTERVAL_CONFIDENCE, log_gain};
use homeostat_model::{BlockRecord, Nanoseconds, OffLevel};
use homeostat_statistics::robust::{autocorrelation, exp_m1, mean, median, student_t_limit, variance};

/// Scores before a trial, and of its blocks without the change.
#[derive(Clone, Debug, Default)]
pub(crate) struct Levels {
    before: Vec<f64>,
    off: Vec<f64>,
}

impl Levels {
    /// Cuts the passive history into spans as long as a block. Spans in which a block would be measured again are left out.
    pub(crate) fn before(gauge: &Gauge<'_>, since: Nanoseconds, now: Nanoseconds, span: Nanoseconds) -> Self {
        let ends = std::iter::successors(Some(now), |end| end.0.checked_sub(span.0).map(Nanoseconds));
        let mut before: Vec<f64> = ends
            .take_while(|end| span > Nanoseconds::ZERO && end.saturating_sub(span) >= since)
            .filter_map(|end| gauge.whole(end.saturating_sub(span), end))
            .collect();
        before.reverse();
        Self {
            before,
            off: Vec::new(),
        }
    }

    /// Takes a block of the trial, with its score as measured.
    pub(crate) fn observe(&mut self, record: &BlockRecord) {
        if !record.on && !record.broken && record.score.is_finite() {
            self.off.push(record.score);
        }
    }

    /// Compares the two. `gain`: of the change, as a share; `None` where nothing was switched. `None` with too few readings.
    pub(crate) fn compare(&self, gain: Option<f64>) -> Option<OffLevel> {
        let (before, off) = (&self.before, &self.off);
        if before.len().min(off.len()) < GUARDRAIL_BLOCKS {
            return None;
        }
        let level = median(before);
        let change = mean(off) - level;
        // Neighbouring spans resemble each other, so they count for fewer (first-order autoregression).
        let alike = autocorrelation(before, 1).clamp(0.0, 1.0);
        let counts = |n: usize| (n as f64 * (1.0 - alike) / (1.0 + alike)).max(1.0);
        let (n, m) = (counts(before.len()), counts(off.len()));
        let error = (variance(before) * (1.0 / n + 1.0 / m)).sqrt();
        let reach = student_t_limit((1.0 - INTERVAL_CONFIDENCE) / 2.0, (n - 1.0).max(1.0)) * error;
        // The mean of skewed noise lies beside its median.
        let usual = mean(before) - level;
        let fell = change < usual - reach;
        // A scar alone makes a gain as large as itself, so a gain must be clearly larger.
        let made_up = |gain: f64| change + log_gain(gain) > (usual + reach).max(0.0);
        let finite = [change, usual, reach].iter().all(|x| x.is_finite());
        finite.then(|| OffLevel {
            change: exp_m1(change),
            usual_lower: exp_m1(usual - reach),
            usual_upper: exp_m1(usual + reach),
            confidence: INTERVAL_CONFIDENCE,
            blocks: off.len() as u32,
            spans_before: before.len() as u32,
            may_be_a_scar: fell && gain.is_some_and(|gain| !made_up(gain)),
        })
    }
}

impl Engine {
    /// The level before a trial. A rollout has no blocks after an undo; before a protection the level was a loss.
    pub(crate) fn levels_before(&self, e: &Experiment) -> Levels {
        let panel = &e.setup.panel;
        let interval = self.policy.detail_interval_s;
        let readings = (e.setup.measured.as_secs_f64() / interval).ceil();
        self.gauge(panel)
            .filter(|_| !e.is_staged() && !e.protects())
            .map(|gauge| {
                let span = Nanoseconds::from_secs_f64(readings * interval);
                Levels::before(&gauge, self.passive_since(panel), self.now, span)
            })
            .unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use homeostat_statistics::simulation::Random;

    const SECOND: Nanoseconds = Nanoseconds::from_secs(1);

    fn block(on: bool, score: f64) -> BlockRecord {
        BlockRecord {
            index: 0,
            on,
            measured_from: Nanoseconds::ZERO,
            measured: SECOND,
            work: 1.0,
            cpu: SECOND,
            score,
            broken: false,
        }
    }

    /// Noise of 2 % of which a span keeps this share of the last one; 60 spans before, then blocks in pairs, the off ones of
    /// which lie lower by `scar`.
    fn levels(seed: u64, kept: f64, scar: f64) -> Levels {
        let mut random = Random::new(seed);
        let mut noise = 0.0;
        let mut next = || {
            noise = kept * noise + 0.02 * (1.0 - kept * kept).sqrt() * random.gaussian();
            3.0 + noise
        };
        let mut levels = Levels {
            before: (0..60).map(|_| next()).collect(),
            off: Vec::new(),
        };
        for index in 0..24 {
            let (on, score) = (index % 2 == 0, next());
            levels.observe(&block(on, if on { score + 9.0 } else { score - scar }));
        }
        levels
    }

    #[test]
    fn the_usual_range_holds_what_it_says_also_where_neighbours_resemble_each_other() {
        for kept in [0.0, 0.5, 0.8] {
            let runs = 2000;
            let outside = (0..runs)
                .filter_map(|seed| levels(seed, kept, 0.0).compare(None))
                .filter(|l| l.change < l.usual_lower || l.change > l.usual_upper)
                .count();
            let share = outside as f64 / runs as f64;
            assert!((0.02..=0.13).contains(&share), "{share} with {kept}");
        }
    }

    #[test]
    fn a_fall_warns_where_it_is_unusual_and_the_gain_does_not_make_up_for_it() {
        let scarred = levels(1, 0.0, 0.05);
        let seen = |gain| scarred.compare(gain).unwrap();
        assert!((seen(None).change + 0.05).abs() < 0.02, "{:?}", seen(None));
        assert!(seen(Some(0.03)).may_be_a_scar);
        assert!(seen(Some(0.052)).may_be_a_scar, "a scar alone");
        assert!(seen(Some(-0.01)).may_be_a_scar);
        assert!(!seen(Some(0.10)).may_be_a_scar, "the gain is larger");
        assert!(!seen(None).may_be_a_scar, "nothing was undone");
        let whole = levels(1, 0.0, 0.0).compare(Some(0.0)).unwrap();
        assert!(!whole.may_be_a_scar, "{whole:?}");
    }

    #[test]
    fn too_few_readings_say_nothing() {
        let mut few = levels(1, 0.0, 0.0);
        few.before.truncate(GUARDRAIL_BLOCKS - 1);
        assert_eq!(few.compare(None), None);
        assert_eq!(Levels::default().compare(None), None);
    }
}
