//! Spans: how long threads ran from the end of a wait to their next wait. In a server whose threads wait for requests that is
//! the time in which a request, or what came together, is worked at; what waited in a queue before is not in it.

use crate::units::Nanoseconds;
use serde::{Deserialize, Serialize};

/// Pieces of each power of two: a span is known to 1/16, 6 %.
const PIECES: u64 = 16;
/// Powers of two above sixteen nanoseconds: the last is five hours.
const POWERS: usize = 40;
/// Pieces in all.
const ALL: usize = (POWERS + 1) * PIECES as usize;

/// A histogram of times whose pieces grow with what they hold: each power of two is divided evenly.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpanHistogram {
    counts: Vec<u64>,
    total: u64,
}

impl Default for SpanHistogram {
    fn default() -> Self {
        Self {
            counts: vec![0; ALL],
            total: 0,
        }
    }
}

impl SpanHistogram {
    fn piece(nanoseconds: u64) -> usize {
        let value = nanoseconds.max(PIECES);
        let power = u64::from(value.ilog2()) - 4;
        // 16 values of each power: those above its leading bit.
        ((power * PIECES + (value >> power) - PIECES) as usize).min(ALL - 1)
    }

    /// Adds a span of so many nanoseconds.
    pub fn add(&mut self, nanoseconds: u64) {
        self.add_many(Self::piece(nanoseconds), 1);
    }

    fn add_many(&mut self, piece: usize, count: u64) {
        if let Some(own) = self.counts.get_mut(piece) {
            *own = own.saturating_add(count);
            self.total = self.total.saturating_add(count);
        }
    }

    /// Adds all of another.
    pub fn merge(&mut self, other: &Self) {
        for (piece, count) in other.counts.iter().enumerate() {
            self.add_many(piece, *count);
        }
    }

    /// Adds what was seen in an interval.
    pub fn add_spans(&mut self, spans: &Spans) {
        for (piece, count) in &spans.counts {
            self.add_many(usize::from(*piece), u64::from(*count));
        }
    }

    /// How many it holds.
    pub fn total(&self) -> u64 {
        self.total
    }

    /// The value below which this share lies, in nanoseconds; within a piece as if it were evenly filled.
    pub fn quantile(&self, share: f64) -> Option<f64> {
        let wanted = self.total as f64 * share;
        let mut before = 0u64;
        self.counts.iter().enumerate().find_map(|(piece, count)| {
            let upto = before.saturating_add(*count);
            if *count == 0 || (upto as f64) < wanted {
                before = upto;
                return None;
            }
            let (power, within) = (piece as u64 / PIECES, piece as u64 % PIECES);
            let into = ((wanted - before as f64) / *count as f64).clamp(0.0, 1.0);
            Some(((PIECES + within) as f64 + into) * (1u64 << power.min(50)) as f64)
        })
    }
}

/// The spans of a workload's threads that ended in an interval.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Spans {
    /// Pieces of a [`SpanHistogram`] that hold something, and how many: ascending.
    pub counts: Vec<(u16, u32)>,
    /// CPU time of its threads in which they were recorded: all of it, or a part.
    pub cpu: Nanoseconds,
}

impl Spans {
    /// What a histogram holds that was filled in so much CPU time.
    pub fn of(histogram: &SpanHistogram, cpu: Nanoseconds) -> Self {
        let counts = histogram.counts.iter().enumerate();
        Self {
            counts: counts
                .filter(|(_, count)| **count > 0)
                .map(|(piece, count)| (piece as u16, u32::try_from(*count).unwrap_or(u32::MAX)))
                .collect(),
            cpu,
        }
    }

    /// How many there were in an interval in which the workload used so much CPU time: in all of it as many as in the part.
    pub fn number(&self, cpu: f64) -> f64 {
        let seen: f64 = self.counts.iter().map(|(_, count)| f64::from(*count)).sum();
        let part = self.cpu.as_secs_f64();
        if part > 0.0 && cpu > part {
            seen * cpu / part
        } else {
            seen
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_histogram_keeps_what_it_is_told_to_six_percent() {
        for value in [
            1u64,
            15,
            16,
            17,
            31,
            32,
            100,
            999,
            12_345,
            1_000_000,
            123_456_789,
            1 << 39,
        ] {
            let mut h = SpanHistogram::default();
            h.add(value);
            let told = h.quantile(0.5).unwrap();
            let off = (told / (value.max(16) as f64) - 1.0).abs();
            assert!(off <= 0.07, "{value}: {told}");
        }
        let mut h = SpanHistogram::default();
        h.add(u64::MAX);
        assert!(h.quantile(0.99).unwrap() > 1e12);
        assert_eq!(SpanHistogram::default().quantile(0.5), None);
    }

    #[test]
    fn quantiles_are_those_of_the_values() {
        let mut h = SpanHistogram::default();
        (1..=1000u64).for_each(|v| h.add(v * 1000));
        for (share, value) in [(0.5, 500_000.0), (0.99, 990_000.0)] {
            let told = h.quantile(share).unwrap();
            assert!((told / value - 1.0f64).abs() < 0.07, "{share}: {told}");
        }
    }

    #[test]
    fn what_an_interval_tells_makes_the_same_histogram() {
        let mut h = SpanHistogram::default();
        (1..=300u64).for_each(|v| h.add(v * v * 100));
        let spans = Spans::of(&h, Nanoseconds::from_millis(200));
        let text = serde_json::to_string(&spans).unwrap();
        let read: Spans = serde_json::from_str(&text).unwrap();
        let mut again = SpanHistogram::default();
        again.add_spans(&read);
        assert_eq!(again, h);
        assert!((read.number(0.3) - 450.0).abs() < 1e-9);
        assert_eq!(read.number(0.1), 300.0, "no fewer than were seen");
        // What somebody wrote by hand is not believed.
        again.add_spans(&Spans {
            counts: vec![(u16::MAX, 7)],
            ..Spans::default()
        });
        assert_eq!(again.total(), 300);
    }

    proptest::proptest! {
        #[test]
        fn larger_values_lie_in_no_smaller_piece(a in 0u64..1 << 41, b in 0u64..1 << 41) {
            let (a, b) = (a.min(b), a.max(b));
            proptest::prop_assert!(SpanHistogram::piece(a) <= SpanHistogram::piece(b));
        }
    }
}
