//! Does a change hurt somebody while it is tried? One rule for switched blocks and for the slots of a rollout.
//!
//! All guardrails of a trial share one level. Half of it is left to the workloads that are tried, however many neighbours
//! there are. Each side divides its half among its guardrails.

use crate::experiment::Experiment;
use crate::panel::Guardrail;
use crate::spans::{self, SpanRail};
use homeostat_model::NotExcluded;

/// Losses that are not excluded are told if they are larger than this (a share).
const TOLD_MIN: f64 = 0.0005;

/// Which readings are compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum By {
    /// Blocks with the change against blocks without.
    Blocks,
    /// Slots of a rollout before and after each part was made.
    Slots,
}

/// Somebody is hurt.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Hurt {
    /// Whether it is somebody else's workload.
    pub(crate) is_neighbour: bool,
    pub(crate) text: String,
}

impl By {
    fn speaks(self, rail: &SpanRail) -> bool {
        match self {
            Self::Blocks => rail.speaks(),
            Self::Slots => rail.speaks_in_stages(),
        }
    }

    fn hurt(self, rail: &Guardrail, level: f64, gained: Option<f64>) -> Option<String> {
        match self {
            Self::Blocks => rail.hurt(level, gained),
            Self::Slots => rail.hurt_in_stages(level, gained),
        }
    }
}

impl Experiment {
    /// The first that is hurt by these readings. `level`: of all guardrails together. `gained`: what the change is sure to
    /// gain (log units), at the one check before it is accepted.
    pub(crate) fn hurt(&self, by: By, level: f64, gained: Option<f64>) -> Option<Hurt> {
        let (own, others) = (self.asked(by, false), self.asked(by, true));
        let share = if own > 0 && others > 0 { 0.5 } else { 1.0 };
        let each = |is_neighbour: bool| {
            let asked = if is_neighbour { others } else { own };
            level * share / asked.max(1) as f64
        };
        let found = |is_neighbour: bool, text: String| Hurt { is_neighbour, text };
        let by_work = self.rails.iter().find_map(|r| {
            let text = by.hurt(r, each(r.is_neighbour()), gained)?;
            Some(found(r.is_neighbour(), text))
        });
        let by_spans = || {
            self.spans.iter().find_map(|s| {
                let level = each(s.is_neighbour());
                let text = match by {
                    By::Blocks => s.hurt(self.span_rise_max, level, gained.is_some()),
                    By::Slots => s.hurt_in_stages(self.span_rise_max, level),
                };
                Some(found(s.is_neighbour(), text?))
            })
        };
        let by_canary = || {
            let canary = self.beside.hurt(level).filter(|_| by == By::Blocks)?;
            Some(found(true, canary))
        };
        by_work.or_else(by_spans).or_else(by_canary)
    }

    /// The losses that the guardrails do not exclude, the largest first.
    pub(crate) fn not_excluded(&self) -> Vec<NotExcluded> {
        let by = match &self.staged {
            Some(_) if self.trip.is_none() => By::Slots,
            _ => By::Blocks,
        };
        let rails = self.rails.iter().filter_map(|r| r.not_excluded(by));
        let spans = self.spans.iter().filter_map(|s| s.not_excluded(by));
        let mut all: Vec<NotExcluded> = rails.chain(spans).filter(|n| n.most > TOLD_MIN).collect();
        all.sort_by(|a, b| b.most.total_cmp(&a.most));
        all
    }

    /// The largest of them, for the reason of an acceptance.
    pub(crate) fn largest_not_excluded(&self) -> String {
        let all = self.not_excluded();
        all.first().map_or_else(String::new, |largest| {
            format!(
                "; not excluded ({:.0} % confidence): {largest}",
                largest.confidence * 100.0
            )
        })
    }

    /// Questions asked of neighbours, or of those that are tried.
    fn asked(&self, by: By, neighbours: bool) -> usize {
        let rails = self.rails.iter().filter(|r| r.is_neighbour() == neighbours);
        let spans = self.spans.iter().filter(|s| s.is_neighbour() == neighbours);
        rails.count() + spans::QUESTIONS * spans.filter(|s| by.speaks(s)).count()
    }
}
