//! Shared by several meters: sums that survive the end of their parts, and candidates.

use homeostat_model::{MeterCandidate, MeterClass, MeterId, Nanoseconds, Workload};
use homeostat_platform::PlatformError;
use std::collections::BTreeMap;

/// Most processes of one workload that a meter follows.
pub const PROCESSES_MAX: usize = 512;
/// Most entries read of a process's `task` or `fd` directory.
pub const ENTRIES_MAX: usize = 4096;

/// Sum of counters that come and go. It keeps the count of ended counters, so it never decreases. A counter that
/// decreases (restart, reuse of its key) starts again from zero.
#[derive(Debug)]
pub struct Cumulative<K> {
    ended: f64,
    parts: BTreeMap<K, Part>,
}
#[derive(Clone, Copy, Debug)]
struct Part {
    /// Value before the first reading, which does not count.
    offset: f64,
    last: f64,
}

impl<K: Ord + Clone> Default for Cumulative<K> {
    fn default() -> Self {
        Self::new()
    }
}

impl<K: Ord + Clone> Cumulative<K> {
    /// No counter yet.
    pub fn new() -> Self {
        Self {
            ended: 0.0,
            parts: BTreeMap::new(),
        }
    }

    /// Sets one counter's value. A new counter counts from zero if `whole` (it began after the opening of the meter),
    /// otherwise from its present value.
    pub fn set(&mut self, key: &K, value: f64, whole: bool) {
        match self.parts.get_mut(key) {
            Some(part) if value < part.last => {
                self.ended += part.last - part.offset;
                *part = Part {
                    offset: 0.0,
                    last: value,
                };
            }
            Some(part) => part.last = value,
            None => {
                let offset = if whole { 0.0 } else { value };
                self.parts.insert(key.clone(), Part { offset, last: value });
            }
        }
    }

    /// Whether the counter was seen before.
    pub fn knows(&self, key: &K) -> bool {
        self.parts.contains_key(key)
    }

    /// Forgets counters that have gone, and keeps their counts.
    pub fn retain(&mut self, stays: impl Fn(&K) -> bool) {
        let ended = &mut self.ended;
        self.parts.retain(|key, part| {
            let keep = stays(key);
            if !keep {
                *ended += part.last - part.offset;
            }
            keep
        });
    }

    /// Total of all counters.
    pub fn total(&self) -> f64 {
        self.ended + self.parts.values().map(|p| p.last - p.offset).sum::<f64>()
    }
}

/// The answer of a kind to an id that is not its own.
pub fn not_mine(id: &MeterId) -> PlatformError {
    PlatformError::Unsupported {
        what: format!("meter {id}"),
        why: "it is not a meter of this workload; `homeostat explain` lists those that are".to_owned(),
    }
}

/// A candidate that can be opened.
pub fn usable(id: &str, class: MeterClass, unit: &str) -> MeterCandidate {
    MeterCandidate {
        id: MeterId::from(id),
        class,
        unit: unit.to_owned(),
        cost_per_count: Nanoseconds::ZERO,
        lag: Nanoseconds::ZERO,
        refused: None,
    }
}

/// A candidate that cannot be opened, with the reason and the remedy.
pub fn refused(id: &str, class: MeterClass, unit: &str, why: impl Into<String>) -> MeterCandidate {
    MeterCandidate {
        refused: Some(why.into()),
        ..usable(id, class, unit)
    }
}

/// Whether the workload's program, by its main process or executable file, has one of these names.
pub fn is_program(workload: &Workload, names: &[&str]) -> bool {
    let file = workload.executable.rsplit('/').next().unwrap_or_default();
    // An update replaced the running program.
    let file = file.strip_suffix(" (deleted)").unwrap_or(file);
    names.iter().any(|n| *n == workload.program || *n == file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_survive_the_end_of_their_parts() {
        let mut c = Cumulative::new();
        c.set(&1, 100.0, false);
        assert_eq!(
            c.total(),
            0.0,
            "what was counted before the meter was opened does not count"
        );
        c.set(&1, 110.0, false);
        c.set(&2, 5.0, true);
        assert_eq!(c.total(), 15.0);
        c.retain(|k| *k == 2);
        assert_eq!(c.total(), 15.0);
        c.set(&2, 7.0, true);
        assert_eq!(c.total(), 17.0);
    }

    #[test]
    fn a_part_that_goes_back_starts_again() {
        let mut c = Cumulative::new();
        c.set(&1, 100.0, false);
        c.set(&1, 150.0, false);
        c.set(&1, 3.0, false);
        assert_eq!(c.total(), 53.0);
        c.set(&1, 4.0, false);
        assert_eq!(c.total(), 54.0);
    }
}
