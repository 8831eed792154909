//! What a swarm showed: the figures beside their goals, the distribution, the gap by reason, the worst machines.

use super::{Case, Options, Trial};
use crate::exact;
use crate::oracle::AT_ITS_EXPENSE;
use crate::report::{STYLE, escape};
use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt::Write;

/// Worst machines that are named.
const NAMED_MAX: usize = 10;
/// Reasons of the gap that are named.
const GAPS_NAMED_MAX: usize = 12;
/// Confidence of the bounds.
const CONFIDENCE: f64 = 0.95;
/// A machine that ends below this, relative to being left alone, ended worse.
const WORSE: f64 = 0.995;
/// What a swarm showed.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Report {
    /// What was run.
    pub options: Options,
    /// The machines, in order.
    pub cases: Vec<Case>,
}

/// A distribution of shares of the best placement.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Spread {
    /// Smallest.
    pub min: f64,
    /// 1st percentile.
    pub p1: f64,
    /// 5th percentile.
    pub p5: f64,
    /// 25th percentile.
    pub p25: f64,
    /// Median.
    pub median: f64,
    /// 75th percentile.
    pub p75: f64,
}

impl Spread {
    fn of(values: impl Iterator<Item = f64>) -> Self {
        let values = sorted(values);
        let at = |p| percentile(&values, p);
        Self {
            min: values.first().copied().unwrap_or(f64::NAN),
            p1: at(0.01),
            p5: at(0.05),
            p25: at(0.25),
            median: at(0.5),
            p75: at(0.75),
        }
    }
}

/// A reason for which something is missing to the best.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Reason {
    /// What the best placement has that the end state lacks.
    pub lacks: String,
    /// What became of that.
    pub outcome: String,
    /// Share of all that is missing on all machines together, 0..1.
    pub share: f64,
    /// Programs.
    pub programs: usize,
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
    /// Machines whose best placement costs one of their programs 3 % or more, which homeostat may not do.
    pub at_expense: usize,
    /// Share that was reached of the best placement that costs no program that much.
    pub share_for_all: Spread,
    /// Machines that ended with a program at that much less than on the machine left alone.
    pub ended_at_expense: usize,
    /// Machines that ended worse than left alone by more than half a percent.
    pub worse_than_alone: usize,
    /// Machines on which all placements were tried.
    pub exhaustive: usize,
    /// Work lost against the same seed left alone, as a share of all work: mean over the machines.
    pub exposure: f64,
    /// … of the worst machine.
    pub exposure_max: f64,
    /// Work lost in trials that were not accepted, as a share of all work: mean over the machines.
    pub harm: f64,
    /// … of the worst machine.
    pub harm_max: f64,
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
    /// Exact upper bound (95 %) of the share of accepted changes that have no gain.
    pub false_share_max: f64,
    /// Placebos.
    pub placebos: u32,
    /// Accepted placebos.
    pub placebos_accepted: u32,
    /// Experiments by verdict.
    pub verdicts: BTreeMap<String, usize>,
    /// Decisions to try something per simulated hour.
    pub experiments_per_hour: f64,
    /// … on the busiest machine.
    pub experiments_per_hour_max: f64,
    /// Lines of the story per simulated hour.
    pub lines_per_hour: f64,
    /// CPU time of homeostat as a share of one CPU: mean.
    pub own_cpu: f64,
    /// What is missing to the best, by reason, the largest first.
    pub gap: Vec<Reason>,
}

/// The value below which a share `p` of the sorted values lies.
pub(super) fn percentile(sorted: &[f64], p: f64) -> f64 {
    let at = ((sorted.len() as f64 * p).ceil() as usize).max(1) - 1;
    sorted.get(at).copied().unwrap_or(f64::NAN)
}

pub(super) fn sorted(values: impl Iterator<Item = f64>) -> Vec<f64> {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values
}

/// Most events that a Poisson number with this mean reaches with 95 %.
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

/// A figure with its goal: what, value, goal, verdict.
type Row = (&'static str, String, &'static str, &'static str);

impl Case {
    /// Whether its best placement serves the machine at the expense of one of its programs.
    fn is_at_an_expense(&self) -> bool {
        self.best_gains.iter().any(|g| *g < AT_ITS_EXPENSE)
    }
}

impl Report {
    fn trials(&self) -> impl Iterator<Item = &Trial> {
        self.cases.iter().flat_map(|c| &c.trials)
    }

    /// The figures.
    pub fn summary(&self) -> Summary {
        let n = self.cases.len().max(1) as f64;
        let hours: f64 = self.cases.iter().map(|c| c.hours).sum();
        let rate = |c: &Case| c.trials.len() as f64 / c.hours.max(1e-9);
        let mean = |of: fn(&Case) -> f64| self.cases.iter().map(of).sum::<f64>() / n;
        let most = |of: fn(&Case) -> f64| self.cases.iter().map(of).fold(0.0, f64::max);
        let mut verdicts = BTreeMap::new();
        for t in self.trials() {
            let word = t.verdict.map_or_else(|| "running".to_owned(), |v| v.to_string());
            *verdicts.entry(word).or_insert(0) += 1;
        }
        let accepted = self.trials().filter(|t| t.accepted()).count();
        let nulls = self.trials().filter(|t| t.is_null()).count();
        let false_accepts = self.trials().filter(|t| t.accepted() && t.is_null()).count();
        Summary {
            machines: self.cases.len(),
            hours,
            share: Spread::of(self.cases.iter().map(|c| c.share)),
            alone: Spread::of(self.cases.iter().map(|c| c.alone)),
            at_expense: self.cases.iter().filter(|c| c.is_at_an_expense()).count(),
            share_for_all: Spread::of(self.cases.iter().map(|c| c.share_for_all)),
            ended_at_expense: self
                .cases
                .iter()
                .filter(|c| c.gains.iter().any(|g| *g < AT_ITS_EXPENSE))
                .count(),
            worse_than_alone: self.cases.iter().filter(|c| c.reached < WORSE).count(),
            exhaustive: self.cases.iter().filter(|c| c.exhaustive).count(),
            exposure: mean(|c| c.exposure),
            exposure_max: most(|c| c.exposure),
            harm: mean(|c| c.harm),
            harm_max: most(|c| c.harm),
            experiments: self.trials().count(),
            accepted,
            false_accepts,
            nulls,
            allowed: self
                .trials()
                .filter(|t| t.is_null())
                .fold(0.0, |sum, t| sum + t.alpha),
            false_accept_rate_max: exact::rate_at_most(false_accepts as u64, nulls as u64, CONFIDENCE),
            false_share_max: exact::rate_at_most(false_accepts as u64, accepted as u64, CONFIDENCE),
            placebos: self.cases.iter().map(|c| c.placebos).sum(),
            placebos_accepted: self.cases.iter().map(|c| c.placebos_accepted).sum(),
            verdicts,
            experiments_per_hour: self.trials().count() as f64 / hours.max(1e-9),
            experiments_per_hour_max: self.cases.iter().map(rate).fold(0.0, f64::max),
            lines_per_hour: self.cases.iter().map(|c| c.lines as f64).sum::<f64>() / hours.max(1e-9),
            own_cpu: mean(|c| c.own_cpu),
            gap: self.gap(),
        }
    }

    /// What is missing, by reason.
    fn gap(&self) -> Vec<Reason> {
        let mut sums: BTreeMap<(&str, &str), (f64, usize)> = BTreeMap::new();
        for gap in self.cases.iter().flat_map(|c| &c.gaps) {
            let sum = sums
                .entry((gap.lacks.as_str(), gap.outcome.as_str()))
                .or_default();
            sum.0 += gap.part;
            sum.1 += 1;
        }
        let all: f64 = sums.values().map(|(part, _)| part).sum();
        let mut reasons: Vec<Reason> = sums
            .into_iter()
            .map(|((lacks, outcome), (part, programs))| Reason {
                lacks: lacks.to_owned(),
                outcome: outcome.to_owned(),
                share: part / all.max(1e-12),
                programs,
            })
            .collect();
        reasons.sort_by(|a, b| b.share.total_cmp(&a.share));
        reasons
    }

    /// The machines on which least of the best was reached, the worst first.
    fn worst(&self) -> Vec<&Case> {
        let mut worst: Vec<&Case> = self.cases.iter().collect();
        worst.sort_by(|a, b| a.share.total_cmp(&b.share));
        worst.truncate(NAMED_MAX);
        worst
    }

    /// The machines that ended worse than left alone, the worst first.
    fn harmed(&self) -> Vec<&Case> {
        let mut harmed: Vec<&Case> = self.cases.iter().filter(|c| c.reached < WORSE).collect();
        harmed.sort_by(|a, b| a.reached.total_cmp(&b.reached));
        harmed.truncate(NAMED_MAX);
        harmed
    }

    fn rows(s: &Summary) -> Vec<Row> {
        let met = |yes: bool| if yes { "met" } else { "MISSED" };
        let none = "";
        vec![
            (
                "share of the best placement, median",
                percent(s.share.median),
                ">= 98 %",
                met(s.share.median >= 0.98),
            ),
            (
                "  5th percentile",
                percent(s.share.p5),
                ">= 90 %",
                met(s.share.p5 >= 0.90),
            ),
            ("  25th percentile", percent(s.share.p25), none, none),
            ("  1st percentile", percent(s.share.p1), none, none),
            ("  smallest", percent(s.share.min), none, none),
            (
                "  machines whose best costs a program 3 %",
                s.at_expense.to_string(),
                none,
                none,
            ),
            (
                "share of the best that costs none 3 %, median",
                percent(s.share_for_all.median),
                none,
                none,
            ),
            ("  5th percentile", percent(s.share_for_all.p5), none, none),
            (
                "  machines that ended with a program below 97 %",
                s.ended_at_expense.to_string(),
                none,
                none,
            ),
            ("  left alone: median", percent(s.alone.median), none, none),
            ("  left alone: 5th percentile", percent(s.alone.p5), none, none),
            ("  left alone: smallest", percent(s.alone.min), none, none),
            (
                "machines that ended worse than left alone",
                s.worse_than_alone.to_string(),
                "0",
                met(s.worse_than_alone == 0),
            ),
            (
                "work lost against being left alone, mean",
                format!("{:.4} %", s.exposure * 100.0),
                "<= 0.2 %",
                met(s.exposure <= 0.002),
            ),
            (
                "  on the worst machine",
                format!("{:.4} %", s.exposure_max * 100.0),
                none,
                none,
            ),
            (
                "  in trials that were not accepted, mean",
                format!("{:.4} %", s.harm * 100.0),
                none,
                none,
            ),
            (
                "  … on the worst machine",
                format!("{:.4} %", s.harm_max * 100.0),
                none,
                none,
            ),
            ("experiments", s.experiments.to_string(), none, none),
            ("  accepted", s.accepted.to_string(), none, none),
            (
                "  tested changes without a true gain",
                s.nulls.to_string(),
                none,
                none,
            ),
            (
                "false accepts",
                s.false_accepts.to_string(),
                "see below",
                met(s.false_accepts as f64 <= bound(s.allowed)),
            ),
            ("placebos", s.placebos.to_string(), none, none),
            ("  accepted", s.placebos_accepted.to_string(), none, none),
            (
                "decisions to try something, per hour",
                format!("{:.2}", s.experiments_per_hour),
                none,
                none,
            ),
            (
                "  on the busiest machine",
                format!("{:.2}", s.experiments_per_hour_max),
                "<= 20",
                met(s.experiments_per_hour_max <= 20.0),
            ),
            (
                "lines of the story per hour",
                format!("{:.1}", s.lines_per_hour),
                none,
                none,
            ),
            (
                "CPU time of homeostat, of one CPU",
                format!("{:.3} %", s.own_cpu * 100.0),
                none,
                none,
            ),
        ]
    }

    fn heading(s: &Summary) -> String {
        format!(
            "{} machines, {:.0} simulated hours; best placement by trying all on {} of them, by search on the others",
            s.machines, s.hours, s.exhaustive
        )
    }

    fn footnotes(s: &Summary) -> Vec<String> {
        let words: Vec<String> = s.verdicts.iter().map(|(v, n)| format!("{n} {v}")).collect();
        vec![
            format!("verdicts: {}", words.join(", ")),
            format!(
                "false accepts: the levels of the {} changes without a gain allow {:.2} on average, and at most {:.0} with \
                 95 %; {} were accepted, which bounds the rate at {} of such changes and at {} of what is accepted (exact, \
                 95 %, one-sided)",
                s.nulls,
                s.allowed,
                bound(s.allowed),
                s.false_accepts,
                percent(s.false_accept_rate_max),
                percent(s.false_share_max)
            ),
        ]
    }

    /// Why most of the gap of a machine is there.
    fn why(case: &Case) -> String {
        case.gaps.first().map_or_else(
            || "nothing is missing".to_owned(),
            |gap| {
                let all: f64 = case.gaps.iter().map(|g| g.part).sum();
                format!(
                    "{:.0} % of the gap: {} lacks {} ({})",
                    100.0 * gap.part / all.max(1e-12),
                    gap.program,
                    gap.lacks,
                    gap.outcome
                )
            },
        )
    }

    fn line_of(case: &Case) -> String {
        format!(
            "{:.1} % of the best (left alone {:.1} %); {}; best: {}",
            case.share * 100.0,
            case.alone * 100.0,
            case.machine,
            case.placement
        )
    }

    /// For people: the figures beside their goals, the gap by reason, and the worst machines with how to see them again.
    pub fn text(&self) -> String {
        let s = self.summary();
        let mut out = format!("{}\n\n", Self::heading(&s));
        for (name, value, goal, verdict) in Self::rows(&s) {
            let line = format!("{name:<46} {value:>12}  {goal:<10} {verdict}");
            let _ = writeln!(out, "{}", line.trim_end());
        }
        for note in Self::footnotes(&s) {
            let _ = writeln!(out, "\n{note}");
        }
        let _ = writeln!(out, "\nwhat is missing to the best, by reason:");
        for reason in s.gap.iter().take(GAPS_NAMED_MAX) {
            let _ = writeln!(
                out,
                "  {:>5.1} %  {} programs lack {}: {}",
                reason.share * 100.0,
                reason.programs,
                reason.lacks,
                reason.outcome
            );
        }
        let mut list = |title: &str, cases: &[&Case]| {
            let _ = writeln!(out, "\n{title}");
            for case in cases {
                let _ = writeln!(
                    out,
                    "  {}: {}\n      {}\n      {}",
                    case.index,
                    Self::line_of(case),
                    Self::why(case),
                    self.options.reproduction(case.index)
                );
            }
        };
        list("least of the best was reached on:", &self.worst());
        let harmed = self.harmed();
        if !harmed.is_empty() {
            list("worse than left alone ended:", &harmed);
        }
        out
    }

    /// One self-contained page: the distribution as a curve, the figures, the gap, the worst machines.
    pub fn html(&self) -> String {
        let s = self.summary();
        let mut out = format!(
            "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><meta name=\"viewport\" content=\"width=device-width\">\
             <title>A swarm of {0} machines</title><style>{STYLE}</style></head><body>\n<h1>A swarm of {0} machines</h1>\n\
             <p class=\"source\">{1}; seed {2}</p>\n",
            s.machines,
            escape(&Self::heading(&s)),
            self.options.seed
        );
        out.push_str("<p class=\"key\">");
        for (class, what) in [("homeostat", "with homeostat"), ("alone", "left alone")] {
            let _ = write!(
                out,
                "<span><svg style=\"display:inline;width:2rem\" viewBox=\"0 0 20 8\"><polyline class=\"{class}\" points=\"0,4 20,4\"/></svg> {what}</span>"
            );
        }
        out.push_str("</p>\n<h3>share of the best placement <small>(%, machines in order)</small></h3>\n");
        self.curve(&mut out);
        out.push_str(
            "<h2>Figures</h2>\n<table><tr><th>figure</th><th>value</th><th>goal</th><th></th></tr>\n",
        );
        for (name, value, goal, verdict) in Self::rows(&s) {
            let _ = writeln!(
                out,
                "<tr><td>{}</td><td>{}</td><td>{}</td><td{}>{verdict}</td></tr>",
                escape(name),
                escape(&value),
                escape(goal),
                if verdict == "MISSED" {
                    " class=\"warning\""
                } else {
                    ""
                }
            );
        }
        out.push_str("</table>\n");
        for note in Self::footnotes(&s) {
            let _ = writeln!(out, "<p>{}</p>", escape(&note));
        }
        out.push_str("<h2>What is missing to the best</h2>\n<table><tr><th>lacks</th><th>share of the gap</th><th>programs</th><th>outcome</th></tr>\n");
        for reason in s.gap.iter().take(GAPS_NAMED_MAX) {
            let _ = writeln!(
                out,
                "<tr><td>{}</td><td>{:.1} %</td><td>{}</td><td class=\"text\">{}</td></tr>",
                escape(&reason.lacks),
                reason.share * 100.0,
                reason.programs,
                escape(&reason.outcome)
            );
        }
        out.push_str("</table>\n<h2>The worst machines</h2>\n<table><tr><th>machine</th><th>reached</th><th>left alone</th><th>why and how to see it again</th></tr>\n");
        for case in self.worst() {
            let _ = writeln!(
                out,
                "<tr><td>{}: {}</td><td>{:.1} %</td><td>{:.1} %</td><td class=\"text\">{}<br><code>{}</code></td></tr>",
                case.index,
                escape(&case.machine),
                case.share * 100.0,
                case.alone * 100.0,
                escape(&Self::why(case)),
                escape(&self.options.reproduction(case.index))
            );
        }
        out.push_str("</table>\n</body></html>\n");
        out
    }

    /// The sorted shares with homeostat and left alone.
    fn curve(&self, out: &mut String) {
        const WIDTH: f64 = 1000.0;
        const HEIGHT: f64 = 260.0;
        const LEFT: f64 = 42.0;
        const BOTTOM: f64 = 22.0;
        let last = self.cases.len().saturating_sub(1).max(1) as f64;
        let x = |i: usize| LEFT + (WIDTH - LEFT - 4.0) * i as f64 / last;
        let y = |share: f64| (HEIGHT - BOTTOM) * (1.0 - share.clamp(0.0, 1.0)) + 4.0;
        let _ = writeln!(out, "<svg viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\">");
        for tick in [0.0, 0.25, 0.5, 0.75, 0.9, 1.0] {
            let _ = writeln!(
                out,
                "<line class=\"axis\" x1=\"{LEFT}\" x2=\"{WIDTH}\" y1=\"{0:.1}\" y2=\"{0:.1}\"/><text x=\"{1}\" y=\"{2:.1}\" text-anchor=\"end\">{3:.0}</text>",
                y(tick),
                LEFT - 6.0,
                y(tick) + 4.0,
                tick * 100.0
            );
        }
        let curves = [
            ("alone", sorted(self.cases.iter().map(|c| c.alone))),
            ("homeostat", sorted(self.cases.iter().map(|c| c.share))),
        ];
        for (class, shares) in curves {
            let points: Vec<String> = shares
                .iter()
                .enumerate()
                .map(|(i, s)| format!("{:.1},{:.1}", x(i), y(*s)))
                .collect();
            let _ = writeln!(
                out,
                "<polyline class=\"{class}\" points=\"{}\"/>",
                points.join(" ")
            );
        }
        out.push_str("</svg>\n");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::swarm::Gap;
    use homeostat_model::Verdict;

    fn trial(verdict: Verdict, truth: f64) -> Trial {
        Trial {
            strategy: "large_pages".into(),
            workload: "a<b".into(),
            others: Vec::new(),
            verdict: Some(verdict),
            alpha: 0.01,
            estimated: Some(truth),
            truth: Some(truth),
            at_s: 100.0,
            length_s: 60.0,
            lost_s: 0.0,
        }
    }

    fn case(index: u64, share: f64) -> Case {
        Case {
            index,
            machine: "two chips".into(),
            programs: vec!["a<b".into()],
            best: 2.0,
            placement: "free".into(),
            best_gains: vec![2.0],
            best_for_all: 2.0,
            share_for_all: share,
            gains: vec![2.0 * share],
            exhaustive: true,
            tried: 10,
            reached: 2.0 * share,
            share,
            alone: 0.5,
            mean_share: share,
            trials: vec![
                trial(Verdict::Accepted, 0.1),
                trial(Verdict::Rejected, -0.01),
                trial(Verdict::Accepted, -0.02),
            ],
            placebos: 1,
            placebos_accepted: 0,
            lines: 20,
            reasons: BTreeMap::new(),
            hours: 4.0,
            gaps: vec![Gap {
                program: "a<b".into(),
                part: (1.0 / share).ln(),
                lacks: if index == 0 {
                    "threads kept together"
                } else {
                    "memory"
                }
                .into(),
                outcome: "declined".into(),
            }],
            exposure: 0.001,
            harm: 0.0005,
            own_cpu: 0.001,
        }
    }

    fn report() -> Report {
        Report {
            options: Options {
                seed: 3,
                rough: true,
                ..Options::default()
            },
            // The worst is in the middle, and one ended worse than left alone.
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
        let total: f64 = s.gap.iter().map(|r| r.share).sum();
        assert!((total - 1.0).abs() < 1e-9);
        assert_eq!(s.gap[0].lacks, "memory", "{:?}", s.gap);
        assert_eq!(s.gap[0].programs, 3);
    }

    #[test]
    fn the_worst_machine_is_named_first_with_how_to_see_it_again() {
        let report = report();
        let again = "homeostat-lab --swarm --seed 3 --from 1 --machines 1 --hours 4 --rough";
        for text in [report.text(), report.html()] {
            let (first, second) = (text.find(again), text.find("--from 0 "));
            assert!(first.is_some() && first < second, "{text}");
            assert!(
                text.contains("MISSED") && text.contains("100 % of the gap"),
                "{text}"
            );
        }
        assert!(report.text().contains("worse than left alone ended:\n  1:"));
        let page = report.html();
        assert!(page.contains("a&lt;b lacks") && !page.contains("http"), "{page}");
        assert_eq!(page.matches("<svg").count(), page.matches("</svg>").count());
    }

    #[test]
    fn the_bound_of_false_accepts_is_that_of_poisson() {
        // 95 % quantiles of the Poisson distribution, from tables.
        for (mean, most) in [(0.0, 0.0), (0.05, 0.0), (0.1, 1.0), (1.0, 3.0), (10.0, 15.0)] {
            assert_eq!(bound(mean), most, "{mean}");
        }
    }
}
