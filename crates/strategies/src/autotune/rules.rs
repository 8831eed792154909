//! `autotune-classic`: the rules and limits of IBM's autotune (seed 003, Trent 2004), as a pure function of samples.
//!
//! autotune looked every 4 seconds at what AIX paged, and moved the shares of memory that files may use. Its two rules and
//! the limits of its Table 1 are here as they stand there. Four entries of the table say "varies"; their values here are
//! ours, and each says so.
//!
//! Unit: shares are percent of the machine's memory, as `vmo` takes them.

use homeostat_model::Nanoseconds;

/// The values of Table 1.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Limits {
    /// "Monitor Interval": 4 seconds.
    pub monitor_interval: Nanoseconds,
    /// "Maximum maxperm": 90 %.
    pub maxperm_max: f64,
    /// "Minimum maxperm": 6 %.
    pub maxperm_min: f64,
    /// "Maximum minperm": 20 %.
    pub minperm_max: f64,
    /// "Minimum minperm": 2 %.
    pub minperm_min: f64,
    /// "Maximum maxclient": 90 %.
    pub maxclient_max: f64,
    /// "Minimum maxclient": 6 %.
    pub maxclient_min: f64,
    /// "Rearm interval for increasing file cache": 60 seconds.
    pub rearm: Nanoseconds,
    /// "File cache increase delta": varies there. Percent of memory per interval; ours: 1.
    pub increase: f64,
    /// "File cache decrease delta": varies there, "taking into account the degree of paging". Percent of memory at the
    /// threshold and at [`Limits::heavy`] times the threshold; ours: 2 and 10, in proportion between.
    pub decrease: (f64, f64),
    /// Degree of paging, in thresholds, from which the decrease is as large as it gets; ours: 50.
    pub heavy: f64,
    /// "Numeric definition of sufficient available memory for increase": varies there. Percent of memory that is free;
    /// ours: 2.
    pub sufficient: f64,
    /// "Paging threshold for modifying file cache": varies there. Pages per second, in and out each; ours: 5, with which
    /// the published recovery of about a minute comes out in the machine model.
    pub threshold: f64,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            monitor_interval: Nanoseconds::from_secs(4),
            maxperm_max: 90.0,
            maxperm_min: 6.0,
            minperm_max: 20.0,
            minperm_min: 2.0,
            maxclient_max: 90.0,
            maxclient_min: 6.0,
            rearm: Nanoseconds::from_secs(60),
            increase: 1.0,
            decrease: (2.0, 10.0),
            heavy: 50.0,
            sufficient: 2.0,
            threshold: 5.0,
        }
    }
}

/// What autotune reads at the end of an interval.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Sample {
    /// When.
    pub at: Nanoseconds,
    /// Pages read from paging space per second.
    pub paged_in: f64,
    /// Pages written to paging space per second.
    pub paged_out: f64,
    /// Share of the memory that holds pages of files (`numperm`), percent.
    pub numperm: f64,
    /// Share of the memory that is free, percent.
    pub free: f64,
}

/// The parameters that autotune sets.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Parameters {
    /// Below this share pages of files are taken like all others.
    pub minperm: f64,
    /// Above this share pages of files are taken first.
    pub maxperm: f64,
    /// The same for files of JFS2 and of networks; it is never exceeded.
    pub maxclient: f64,
    /// Whether `maxperm` is never exceeded either.
    pub strict: bool,
}

/// autotune.
#[derive(Clone, Debug, PartialEq)]
pub struct Autotune {
    limits: Limits,
    now: Parameters,
    /// When paging space was used last; the start counts as such.
    paged_at: Nanoseconds,
    /// When it looked last.
    looked_at: Option<Nanoseconds>,
    /// Decreases in a row.
    decreases: u32,
}

impl Autotune {
    /// Starts from the parameters found.
    pub fn new(limits: Limits, found: Parameters, now: Nanoseconds) -> Self {
        Self {
            limits,
            now: found,
            paged_at: now,
            looked_at: None,
            decreases: 0,
        }
    }

    /// The parameters in force.
    pub fn parameters(&self) -> Parameters {
        self.now
    }

    /// Takes a sample and returns the parameters to set, when they change. Samples that come before the monitor interval is
    /// over are not looked at.
    pub fn step(&mut self, sample: &Sample) -> Option<Parameters> {
        let limits = self.limits;
        if self
            .looked_at
            .is_some_and(|at| sample.at - at < limits.monitor_interval)
        {
            return None;
        }
        self.looked_at = Some(sample.at);
        let before = self.now;
        let paging = sample.paged_in.min(sample.paged_out);
        if sample.paged_in.max(sample.paged_out) >= limits.threshold {
            self.paged_at = sample.at;
        }
        // Decrease File Cache Rule: pages are read and written "simultaneously".
        if paging >= limits.threshold {
            let degree = ((paging / limits.threshold - 1.0) / (limits.heavy - 1.0)).clamp(0.0, 1.0);
            let delta = limits.decrease.0 + degree * (limits.decrease.1 - limits.decrease.0);
            let lower = |share: f64, least: f64| (share.min(sample.numperm.max(least)) - delta).max(least);
            self.now.maxperm = lower(self.now.maxperm, limits.maxperm_min);
            self.now.maxclient = lower(self.now.maxclient, limits.maxclient_min);
            self.now.minperm = (self.now.minperm - delta)
                .clamp(limits.minperm_min, limits.minperm_max)
                .min(self.now.maxperm);
            self.decreases += 1;
            // "If this continues, turn strict_maxperm on."
            self.now.strict |= self.decreases >= 2;
        } else {
            self.decreases = 0;
            // Increase File Cache Rule: nothing paged "for a while", and memory enough; "gradually".
            let is_quiet = sample.at - self.paged_at >= limits.rearm;
            if is_quiet && sample.free >= limits.sufficient {
                self.now.maxperm = raise(self.now.maxperm, limits.increase, limits.maxperm_max);
                self.now.maxclient = raise(self.now.maxclient, limits.increase, limits.maxclient_max);
                // The source does not say when the strict limit ends: with the ceiling back where it can be.
                if self.now.maxperm >= limits.maxperm_max {
                    self.now.strict = false;
                }
            }
        }
        (self.now != before).then_some(self.now)
    }
}

/// One step up; what a person had set above the maximum stays.
fn raise(share: f64, step: f64, most: f64) -> f64 {
    (share + step).min(most).max(share)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const FOUND: Parameters = Parameters {
        minperm: 20.0,
        maxperm: 80.0,
        maxclient: 80.0,
        strict: false,
    };

    fn sample(second: u64, paged_in: f64, paged_out: f64) -> Sample {
        Sample {
            at: Nanoseconds::from_secs(second),
            paged_in,
            paged_out,
            numperm: 60.0,
            free: 5.0,
        }
    }

    fn fresh() -> Autotune {
        Autotune::new(Limits::default(), FOUND, Nanoseconds::ZERO)
    }

    #[test]
    fn the_limits_are_those_of_table_1() {
        let l = Limits::default();
        assert_eq!(l.monitor_interval, Nanoseconds::from_secs(4));
        assert_eq!((l.maxperm_max, l.maxperm_min), (90.0, 6.0));
        assert_eq!((l.minperm_max, l.minperm_min), (20.0, 2.0));
        assert_eq!((l.maxclient_max, l.maxclient_min), (90.0, 6.0));
        assert_eq!(l.rearm, Nanoseconds::from_secs(60));
    }

    #[test]
    fn it_decreases_only_when_pages_are_read_and_written_at_once() {
        for (paged_in, paged_out) in [(0.0, 0.0), (900.0, 0.0), (0.0, 900.0), (900.0, 4.0)] {
            assert_eq!(fresh().step(&sample(4, paged_in, paged_out)), None);
        }
        let p = fresh().step(&sample(4, 5.0, 5.0)).unwrap();
        // From what files use now, not from a ceiling that limits nothing.
        assert_eq!((p.minperm, p.maxperm, p.maxclient), (18.0, 58.0, 58.0));
        assert!(!p.strict);
    }

    #[test]
    fn heavier_paging_decreases_more_and_repetition_makes_it_strict() {
        let light = fresh().step(&sample(4, 10.0, 10.0)).unwrap();
        let heavy = fresh().step(&sample(4, 5000.0, 5000.0)).unwrap();
        assert_eq!(heavy.maxperm, 50.0);
        assert!(light.maxperm > heavy.maxperm);
        let mut a = fresh();
        a.step(&sample(4, 100.0, 100.0));
        assert!(a.step(&sample(8, 100.0, 100.0)).unwrap().strict);
        // A pause ends the repetition.
        let mut a = fresh();
        a.step(&sample(4, 100.0, 100.0));
        a.step(&sample(8, 0.0, 0.0));
        assert!(!a.step(&sample(12, 100.0, 100.0)).unwrap().strict);
    }

    #[test]
    fn it_looks_every_four_seconds() {
        let mut a = fresh();
        assert!(a.step(&sample(4, 100.0, 100.0)).is_some());
        assert_eq!(a.step(&sample(7, 100.0, 100.0)), None);
        assert!(a.step(&sample(8, 100.0, 100.0)).is_some());
    }

    #[test]
    fn it_increases_gradually_after_a_minute_of_quiet_with_memory_enough() {
        let mut a = fresh();
        a.step(&sample(4, 5000.0, 5000.0));
        a.step(&sample(8, 5000.0, 5000.0));
        let low = a.parameters();
        for second in (12..68).step_by(4) {
            assert_eq!(a.step(&sample(second, 0.0, 0.0)), None, "{second}");
        }
        let p = a.step(&sample(68, 0.0, 0.0)).unwrap();
        assert_eq!(p.maxperm, low.maxperm + 1.0);
        assert_eq!(p.minperm, low.minperm, "only the ceilings rise");
        let short = Sample {
            free: 1.0,
            ..sample(72, 0.0, 0.0)
        };
        assert_eq!(a.step(&short), None, "no memory for more");
        // One direction of paging is activity, too.
        a.step(&sample(76, 50.0, 0.0));
        assert_eq!(a.step(&sample(80, 0.0, 0.0)), None);
        for i in 0..200 {
            a.step(&sample(200 + 4 * i, 0.0, 0.0));
        }
        let p = a.parameters();
        assert_eq!((p.maxperm, p.maxclient, p.strict), (90.0, 90.0, false));
    }

    proptest! {
        #[test]
        fn the_parameters_stay_within_the_table(
            samples in proptest::collection::vec((0.0..1e6f64, 0.0..1e6f64, 0.0..100.0f64, 0.0..100.0f64), 1..300)
        ) {
            let mut a = fresh();
            for (i, (paged_in, paged_out, numperm, free)) in samples.into_iter().enumerate() {
                a.step(&Sample { at: Nanoseconds::from_secs(4 * i as u64), paged_in, paged_out, numperm, free });
                let p = a.parameters();
                prop_assert!((6.0..=90.0).contains(&p.maxperm), "{p:?}");
                prop_assert!((6.0..=90.0).contains(&p.maxclient), "{p:?}");
                prop_assert!((2.0..=20.0).contains(&p.minperm) && p.minperm <= p.maxperm, "{p:?}");
            }
        }
    }
}
