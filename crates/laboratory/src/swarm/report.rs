//! The result of a swarm: the figures with their goals, and the worst machines.

use super::{Case, Options, Trial};
use crate::exact;
use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt::Write;

const NAMED_MAX: usize = 10;
const CONFIDENCE: f64 = 0.95;
/// End merit, relative to being left alone, below which a machine ended worse.
const WORSE: f64 = 0.995;

/// The result of a swarm.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Report {
    /// The options of the run.
    pub options: Options,
    /// The machines, in order.
    pub cases: Vec<Case>,
}

/// A distribution of shares of the best placement.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Spread {
    /// Smallest.
    pub min: f64,
    /// 5th percentile.
    pub p5: f64,
    /// Median.
    pub median: f64,
}

impl Spread {
    fn of(values: impl Iterator<Item = f64>) -> Self {
        let values = sorted(values);
        Self {
            min: percentile(&values, 0.0),
            p5: percentile(&values, 0.05),
            median: percentile(&values, 0.5),
        }
    }
}

/// The figures of a swarm.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Summary {
    /// Machines.
    pub machines: usize,
    /// Simulated hours in all.
    pub hours: f64,
    /// Share of the best placement that was reached at the end.
    pub share: Spread,
    /// … that leaving the machine alone reaches.
    pub alone: Spread,
    /// Machines that ended worse than left alone by more than half a percent.
    pub worse_than_alone: usize,
    /// Work lost against the same seed left alone, as a share of all work: mean over the machines.
    pub exposure: f64,
    /// … of the worst machine.
    pub exposure_max: f64,
    /// Work lost in trials that were not accepted, as a share of all work: mean over the machines.
    pub harm: f64,
    /// Experiments (placebos not counted).
    pub experiments: usize,
    /// Accepted ones.
    pub accepted: usize,
    /// Accepted ones without a true gain.
    pub false_accepts: usize,
    /// Experiments whose change had no true gain.
    pub nulls: usize,
    /// Sum of the levels at which those were tested: as many false accepts are allowed on average.
    pub allowed: f64,
    /// Exact upper bound (95 %) of the rate at which changes without a gain are accepted.
    pub false_accept_rate_max: f64,
    /// Placebos.
    pub placebos: u32,
    /// Accepted placebos.
    pub placebos_accepted: u32,
    /// Experiments by verdict.
    pub verdicts: BTreeMap<String, usize>,
    /// Decisions to try something per simulated hour on the busiest machine.
    pub experiments_per_hour_max: f64,
}

pub(super) fn percentile(sorted: &[f64], p: f64) -> f64 {
    let at = ((sorted.len() as f64 * p).ceil() as usize).max(1) - 1;
    sorted.get(at).copied().unwrap_or(f64::NAN)
}

pub(super) fn sorted(values: impl Iterator<Item = f64>) -> Vec<f64> {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values
}

/// Largest Poisson count with this mean at 95 %.
pub(super) fn bound(mean: f64) -> f64 {
    let (mut term, mut sum, mut k) = ((-mean).exp(), (-mean).exp(), 0.0);
    while sum < CONFIDENCE && k < 1e6 {
        k += 1.0;
        term *= mean / k;
        sum += term;
    }
    k
}

fn percent(x: f64) -> String {
    format!("{:.2} %", x * 100.0)
}

impl Report {
    fn trials(&self) -> impl Iterator<Item = &Trial> {
        self.cases.iter().flat_map(|c| &c.trials)
    }

    /// The figures.
    pub fn summary(&self) -> Summary {
        let n = self.cases.len().max(1) as f64;
        let mean = |of: fn(&Case) -> f64| self.cases.iter().map(of).sum::<f64>() / n;
        let most = |of: fn(&Case) -> f64| self.cases.iter().map(of).fold(0.0, f64::max);
        let mut verdicts = BTreeMap::new();
        for t in self.trials() {
            let word = t.verdict.map_or_else(|| "running".to_owned(), |v| v.to_string());
            *verdicts.entry(word).or_insert(0) += 1;
        }
        let nulls = || self.trials().filter(|t| t.is_null());
        let false_accepts = nulls().filter(|t| t.accepted()).count();
        Summary {
            machines: self.cases.len(),
            hours: self.cases.iter().map(|c| c.hours).sum(),
            share: Spread::of(self.cases.iter().map(|c| c.share)),
            alone: Spread::of(self.cases.iter().map(|c| c.alone)),
            worse_than_alone: self.cases.iter().filter(|c| c.reached < WORSE).count(),
            exposure: mean(|c| c.exposure),
            exposure_max: most(|c| c.exposure),
            harm: mean(|c| c.harm),
            experiments: self.trials().count(),
            accepted: self.trials().filter(|t| t.accepted()).count(),
            false_accepts,
            nulls: nulls().count(),
            allowed: nulls().fold(0.0, |sum, t| sum + t.alpha),
            false_accept_rate_max: exact::rate_at_most(
                false_accepts as u64,
                nulls().count() as u64,
                CONFIDENCE,
            ),
            placebos: self.cases.iter().map(|c| c.placebos).sum(),
            placebos_accepted: self.cases.iter().map(|c| c.placebos_accepted).sum(),
            verdicts,
            experiments_per_hour_max: most(|c| c.trials.len() as f64 / c.hours.max(1e-9)),
        }
    }

    /// The machines with the least share of the best, the worst first.
    fn worst(&self) -> Vec<&Case> {
        let mut worst: Vec<&Case> = self.cases.iter().collect();
        worst.sort_by(|a, b| a.share.total_cmp(&b.share));
        worst.truncate(NAMED_MAX);
        worst
    }

    fn figures(s: &Summary) -> String {
        let lost = |x: f64| format!("{:.4} %", x * 100.0);
        let falsely = format!("{} of {}", s.false_accepts, s.nulls);
        let (share, busiest) = (s.share, s.experiments_per_hour_max);
        let worse = s.worse_than_alone;
        let is_bounded = s.false_accepts as f64 <= bound(s.allowed);
        let rows = [
            (
                "share of the best, median",
                percent(share.median),
                ">= 98 %",
                share.median >= 0.98,
            ),
            ("  5th percentile", percent(share.p5), ">= 90 %", share.p5 >= 0.90),
            ("  smallest", percent(share.min), "", true),
            ("left alone, median", percent(s.alone.median), "", true),
            ("  5th percentile", percent(s.alone.p5), "", true),
            (
                "machines worse than left alone",
                worse.to_string(),
                "0",
                worse == 0,
            ),
            (
                "work lost, mean",
                lost(s.exposure),
                "<= 0.2 %",
                s.exposure <= 0.002,
            ),
            ("  on the worst machine", lost(s.exposure_max), "", true),
            ("  in trials not accepted, mean", lost(s.harm), "", true),
            (
                "trials per hour, busiest machine",
                format!("{busiest:.2}"),
                "<= 20",
                busiest <= 20.0,
            ),
            (
                "false accepts, of changes without gain",
                falsely,
                "see below",
                is_bounded,
            ),
        ];
        let mut out = format!("{} machines, {:.0} simulated hours\n\n", s.machines, s.hours);
        for (name, value, goal, is_met) in rows {
            let verdict = match (goal, is_met) {
                ("", _) => "",
                (_, true) => "met",
                (_, false) => "MISSED",
            };
            let line = format!("{name:<40} {value:>14}  {goal:<10} {verdict}");
            let _ = writeln!(out, "{}", line.trim_end());
        }
        out
    }

    /// For people: the figures, and the worst machines with how to see them again.
    pub fn text(&self) -> String {
        let s = self.summary();
        let mut out = Self::figures(&s);
        let words: Vec<String> = s.verdicts.iter().map(|(v, n)| format!("{n} {v}")).collect();
        let _ = write!(
            out,
            "\n{} experiments: {}; {} of {} placebos accepted\n\
             the levels of the changes without a gain allow {:.2} false accepts on average, and at most {:.0} with 95 %; what was \
             accepted bounds their rate at {} (exact, 95 %, one-sided)\n\nleast of the best was reached on:\n",
            s.experiments,
            words.join(", "),
            s.placebos_accepted,
            s.placebos,
            s.allowed,
            bound(s.allowed),
            percent(s.false_accept_rate_max)
        );
        for case in self.worst() {
            let (share, alone) = (percent(case.share), percent(case.alone));
            let again = self.options.reproduction(case.index);
            let _ = writeln!(out, "  {}: {share} (left alone {alone}): {again}", case.index);
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use homeostat_model::Verdict;

    fn trial(verdict: Verdict, truth: f64) -> Trial {
        Trial {
            strategy: "large_pages".into(),
            workload: "a".into(),
            verdict: Some(verdict),
            alpha: 0.01,
            truth: Some(truth),
            lost_s: 0.0,
        }
    }

    fn case(index: u64, share: f64) -> Case {
        Case {
            index,
            best: 2.0,
            reached: 2.0 * share,
            share,
            alone: 0.5,
            trials: vec![
                trial(Verdict::Accepted, 0.1),
                trial(Verdict::Rejected, -0.01),
                trial(Verdict::Accepted, -0.02),
            ],
            placebos: 1,
            placebos_accepted: 0,
            hours: 4.0,
            exposure: 0.001,
            harm: 0.0005,
        }
    }

    fn report() -> Report {
        Report {
            options: Options {
                seed: 3,
                rough: true,
                ..Options::default()
            },
            // The worst is in the middle, and it ended worse than left alone.
            cases: vec![case(0, 0.5), case(1, 0.45), case(2, 0.9), case(3, 1.0)],
        }
    }

    #[test]
    fn the_summary_counts_what_the_cases_show() {
        let s = report().summary();
        assert_eq!((s.machines, s.experiments, s.accepted), (4, 12, 8));
        assert_eq!((s.nulls, s.false_accepts), (8, 4));
        assert!((s.allowed - 0.08).abs() < 1e-12);
        assert_eq!((s.share.min, s.share.median), (0.45, 0.5));
        assert_eq!(s.worse_than_alone, 1);
        assert_eq!(s.false_accept_rate_max, exact::rate_at_most(4, 8, 0.95));
    }

    #[test]
    fn the_worst_machine_is_named_first_with_how_to_see_it_again() {
        let text = report().text();
        let again = "homeostat-lab --swarm --seed 3 --from 1 --machines 1 --hours 4 --rough";
        let (first, second) = (text.find(again), text.find("--from 0 "));
        assert!(first.is_some() && first < second, "{text}");
        assert!(text.contains("MISSED"), "{text}");
    }

    #[test]
    fn the_bound_of_false_accepts_is_that_of_poisson() {
        // 95 % quantiles of the Poisson distribution, from tables.
        for (mean, most) in [(0.0, 0.0), (0.05, 0.0), (0.1, 1.0), (1.0, 3.0), (10.0, 15.0)] {
            assert_eq!(bound(mean), most, "{mean}");
        }
    }
}
