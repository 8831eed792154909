//! Settings of the mind, as a value. The daemon reads them from the configuration file; the engine never looks.
//!
//! Times are in seconds, shares in 0..1, unless the name says otherwise. The example
//! `operating_characteristics` of the crate `homeostat-statistics` prints what the defaults of the experiment achieve.

use homeostat_model::words;
use homeostat_statistics::TrialParameters;
use homeostat_statistics::discovery::Rule;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

words!(
    /// Whether homeostat acts or only says what it would do.
    #[derive(Default)]
    Mode {
        /// Try, prove, keep or undo.
        #[default]
        Act = "act",
        /// Find and say what would be tried, with ids; change nothing. What is in force is undone.
        AdviseOnly = "advise-only",
        /// Run placebo experiments only: measures our own false accepts; changes nothing.
        Calibrate = "calibrate",
    }
);

/// Which set of thresholds the strategies use where the configuration does not say otherwise.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Profile {
    /// Floors as low as an experiment can still prove a benefit.
    #[default]
    Homeostat,
    /// The published figures of IBM's AIX Active System Optimizer.
    AsoClassic,
    /// IBM's autotune looks after the file cache with its own rules, without trials; all else as in homeostat's own.
    AutotuneClassic,
}

/// What the operator chose for workloads that match.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct WorkloadRule {
    /// Workload id, program name, unit or cgroup; `*` matches any run of characters.
    #[serde(rename = "match")]
    pub pattern: String,
    /// Leave it alone.
    pub never: bool,
    /// Skip the age and size floors, and allow changes where the workload's own choice cannot be read.
    pub always: bool,
    /// Strategy id to on/off.
    pub strategies: BTreeMap<String, bool>,
}

/// A setting of an earlier version. Files and recordings that name it are read, and its value is dropped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Retired;

impl<'de> Deserialize<'de> for Retired {
    fn deserialize<D: serde::Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        serde::de::IgnoredAny::deserialize(from).map(|_| Self)
    }
}

/// All settings of the mind.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Policy {
    /// Act, advise only, or calibrate.
    pub mode: Mode,
    /// Seed of all coins. The daemon draws one at start when it is absent from the configuration, and mixes one that is there with
    /// the machine's id, so that the machines of a fleet do not switch at the same moments.
    pub seed: u64,
    /// A workload is considered when its oldest process is at least this old (seconds).
    pub age_min_s: f64,
    /// … uses at least this many CPUs on average (1.0 = one CPU busy all the time).
    pub cpu_min: f64,
    /// … and has at least this much resident memory (MiB), or gets 32 MiB a second by read calls from files in memory.
    pub memory_min_mib: u64,
    /// Seconds between scans of all processes at rest. Stretched when a scan costs more than `own_cpu_rest`.
    pub scan_interval_s: f64,
    /// Seconds between samples of a workload that is metered, observed or under experiment.
    pub detail_interval_s: f64,
    /// Seconds between such samples while a change is compared on and off: blocks are as short as a second.
    pub trial_interval_s: f64,
    /// Most workloads sampled in detail at the same time.
    pub detail_workloads_max: usize,
    /// Samples (intervals) needed to judge a meter.
    pub meter_samples_min: usize,
    /// Seconds of passive history before a trial; two fifths of it where the predicted gain is plain to see.
    pub observe_min_s: f64,
    /// Seconds of passive history that are kept and used to choose the block length.
    pub observe_max_s: f64,
    /// A meter is refused when the coefficient of variation of its objective over blocks exceeds this, except for what is done
    /// against a loss of pages that goes on while it is judged.
    pub meter_noise_max: f64,
    /// A meter is refused, and closed, when counting costs the workload more than this share of its CPU time. What can be counted in turns
    /// stays below `meters.probe_cost_max` anyway; where the kernel cannot do that (before Linux 6.10) functions are counted all the time,
    /// and this holds alone.
    pub meter_cost_max: f64,
    /// Shortest washout of a block (seconds); longer where what a meter tells may still be about the block before.
    pub washout_min_s: f64,
    /// Longest washout: a change that needs more to take effect is not switched back and forth (seconds).
    pub washout_max_s: f64,
    /// Candidate lengths of the measured part of a block (seconds).
    pub measured_candidates_s: Vec<f64>,
    /// Budget of one experiment (seconds).
    pub experiment_max_s: f64,
    /// How many tries are controlled together, and how.
    pub discovery: Rule,
    /// The sequential test.
    pub trial: TrialParameters,
    /// Wait after a rejected try, doubling with each (seconds). A program that loses far more memory than then is tried before.
    pub backoff_rejected_s: f64,
    /// Wait after an inconclusive or aborted try (seconds).
    pub backoff_inconclusive_s: f64,
    /// Wait after a harmful try (seconds).
    pub backoff_harmful_s: f64,
    /// Most of its work that a reader of files may lose when it is contained for a program whose pages it pushes out, as a
    /// share (0.03 to 0.9). A trial is not accepted either where the reader is proven to lose and seems to lose more than the
    /// lower end of what the program gains.
    pub reader_loss_max: f64,
    /// A change is refused as harmful when the spans of a program that is tried, or of a neighbour, from the end of a wait of its
    /// threads to the next wait, are proven to get longer by it and seem to do so by at least this share (0.03 to 10): half of them, or one of a
    /// hundred, and also for the work done in each. 0 = spans are not followed.
    pub span_rise_max: f64,
    /// Wait before a refused meter or a declined proposal is looked at again (seconds).
    pub reconsider_s: f64,
    /// One placebo experiment every so many seconds; 0 = none.
    pub placebo_every_s: f64,
    /// Level of placebo experiments. Higher than that of real tries, so that few of them say much.
    pub placebo_alpha: f64,
    /// Probe pairs of the probation after acceptance.
    pub probation_pairs: u32,
    /// Seconds between probe pairs of an accepted change after probation. Where the change protects from a loss, each pair without a suspicion doubles them, up to a day.
    pub probe_every_s: f64,
    /// Experiments started per hour at most.
    pub experiments_per_hour_max: u32,
    /// Work that trials may cost in 24 hours, in hundredths of a second: 20,000 are 200 s of lost work. When it is used up no new trial starts, and probes of changes that protect from a loss wait.
    pub harm_exposure_per_day_max: f64,
    /// Most memory that a change may add to a workload, as a share of its resident memory.
    pub bloat_max: f64,
    /// Rules for workloads, first match wins. `always = true` also allows changes to a workload whose own choice cannot be read;
    /// a `never` that was read still wins.
    pub workloads: Vec<WorkloadRule>,
    /// Owners that trust each other: lists of patterns of owners (`machine`, `user:1000`, `pod:*`), each list one owner. Without a
    /// rule nothing is changed on one owner's workload for another owner's sake.
    pub one_owner: Vec<Vec<String>>,
    /// Strategy id to on/off for the whole host.
    pub strategies: BTreeMap<String, bool>,
    /// Ids of advice that nobody wants to see again (`homeostat advice mute ID`).
    pub muted_advice: Vec<String>,
    /// Which set of thresholds the strategies use: `homeostat` or `aso-classic`; or `autotune-classic`, with which autotune
    /// looks after the file cache, by its own rules and without trials.
    pub profile: Profile,
    /// Thresholds and paces by strategy id and name, over those of the profile.
    pub settings: BTreeMap<String, BTreeMap<String, f64>>,
    /// An earlier version counted probe sites as a second meter in trials; no verdict rested on that.
    #[serde(skip_serializing)]
    pub independent_check: Retired,
}

impl Default for Policy {
    fn default() -> Self {
        Self {
            mode: Mode::Act,
            seed: 0,
            age_min_s: 10.0,
            cpu_min: 0.05,
            memory_min_mib: 48,
            scan_interval_s: 10.0,
            detail_interval_s: 1.0,
            trial_interval_s: 0.25,
            detail_workloads_max: 8,
            meter_samples_min: 12,
            observe_min_s: 30.0,
            observe_max_s: 1200.0,
            meter_noise_max: 0.35,
            meter_cost_max: 0.01,
            washout_min_s: 0.5,
            washout_max_s: 180.0,
            measured_candidates_s: vec![1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 10.0, 20.0, 40.0, 80.0],
            experiment_max_s: 3600.0,
            discovery: Rule::default(),
            trial: TrialParameters::default(),
            backoff_rejected_s: 86_400.0,
            backoff_inconclusive_s: 21_600.0,
            backoff_harmful_s: 7.0 * 86_400.0,
            reader_loss_max: 0.5,
            span_rise_max: 0.2,
            reconsider_s: 600.0,
            placebo_every_s: 21_600.0,
            placebo_alpha: 0.05,
            probation_pairs: 30,
            probe_every_s: 1800.0,
            experiments_per_hour_max: 20,
            harm_exposure_per_day_max: 20_000.0,
            bloat_max: 0.01,
            workloads: Vec::new(),
            one_owner: Vec::new(),
            strategies: BTreeMap::new(),
            muted_advice: Vec::new(),
            profile: Profile::Homeostat,
            settings: BTreeMap::new(),
            independent_check: Retired,
        }
    }
}

impl Policy {
    /// Checks ranges. Each complaint names the setting, its value and the allowed range.
    pub fn validate(&self) -> Vec<String> {
        let mut wrong = Vec::new();
        let mut range = |name: &str, value: f64, low: f64, high: f64| {
            if !(value >= low && value <= high) {
                wrong.push(format!("{name} = {value}: must be between {low} and {high}"));
            }
        };
        range("age_min_s", self.age_min_s, 0.0, 86_400.0);
        range("cpu_min", self.cpu_min, 0.0, 10_000.0);
        range("scan_interval_s", self.scan_interval_s, 1.0, 3600.0);
        range("detail_interval_s", self.detail_interval_s, 0.2, 60.0);
        range("trial_interval_s", self.trial_interval_s, 0.2, 60.0);
        range(
            "detail_workloads_max",
            self.detail_workloads_max as f64,
            1.0,
            64.0,
        );
        range("meter_samples_min", self.meter_samples_min as f64, 4.0, 600.0);
        range("observe_min_s", self.observe_min_s, 10.0, 86_400.0);
        range("observe_max_s", self.observe_max_s, self.observe_min_s, 7200.0);
        range("meter_noise_max", self.meter_noise_max, 0.01, 10.0);
        range("meter_cost_max", self.meter_cost_max, 0.0001, 1.0);
        range("washout_min_s", self.washout_min_s, 0.0, 600.0);
        range("washout_max_s", self.washout_max_s, self.washout_min_s, 600.0);
        range(
            "measured_candidates_s (count)",
            self.measured_candidates_s.len() as f64,
            1.0,
            16.0,
        );
        for candidate in &self.measured_candidates_s {
            range("measured_candidates_s", *candidate, 1.0, 600.0);
        }
        range("experiment_max_s", self.experiment_max_s, 30.0, 86_400.0);
        range("backoff_rejected_s", self.backoff_rejected_s, 0.0, 1e9);
        range("backoff_inconclusive_s", self.backoff_inconclusive_s, 0.0, 1e9);
        range("backoff_harmful_s", self.backoff_harmful_s, 0.0, 1e9);
        range("reader_loss_max", self.reader_loss_max, 0.03, 0.9);
        if self.span_rise_max != 0.0 {
            range("span_rise_max", self.span_rise_max, 0.03, 10.0);
        }
        range("reconsider_s", self.reconsider_s, 1.0, 1e9);
        range("placebo_every_s", self.placebo_every_s, 0.0, 1e9);
        range("placebo_alpha", self.placebo_alpha, 1e-6, 0.5);
        range("probation_pairs", f64::from(self.probation_pairs), 0.0, 1000.0);
        range("probe_every_s", self.probe_every_s, 10.0, 1e9);
        range(
            "experiments_per_hour_max",
            f64::from(self.experiments_per_hour_max),
            0.0,
            1000.0,
        );
        range(
            "harm_exposure_per_day_max",
            self.harm_exposure_per_day_max,
            0.0,
            1e9,
        );
        range("bloat_max", self.bloat_max, 0.0, 1.0);
        wrong
    }

    /// The first rule that matches any of the names.
    pub fn rule_for(&self, names: &[&str]) -> Option<&WorkloadRule> {
        self.workloads
            .iter()
            .find(|rule| names.iter().any(|name| matches(&rule.pattern, name)))
    }
}

/// Whether `name` matches `pattern`, where `*` stands for any run of characters.
pub fn matches(pattern: &str, name: &str) -> bool {
    let mut parts = pattern.split('*');
    let Some(first) = parts.next() else {
        return name.is_empty();
    };
    let Some(mut rest) = name.strip_prefix(first) else {
        return false;
    };
    let parts: Vec<&str> = parts.collect();
    let Some((last, middle)) = parts.split_last() else {
        return rest.is_empty();
    };
    for part in middle {
        match rest.find(part) {
            Some(at) => rest = &rest[at + part.len()..],
            None => return false,
        }
    }
    rest.ends_with(last)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_match_like_a_shell_star() {
        for (pattern, name, expected) in [
            ("redis*", "redis-server.service", true),
            ("*.service", "redis-server.service", true),
            ("*redis*", "my-redis-1", true),
            ("redis", "redis-server", false),
            ("a*b*c", "a1b2c", true),
            ("a*b*c", "acb", false),
            ("*", "", true),
            ("ab*ba", "aba", false),
        ] {
            assert_eq!(matches(pattern, name), expected, "{pattern} against {name}");
        }
    }

    #[test]
    fn a_setting_of_an_earlier_version_is_read_and_dropped() {
        for value in ["true", "false", "\"soon\""] {
            let old = format!("{{\"cpu_min\": 0.2, \"independent_check\": {value}}}");
            let read: Policy = serde_json::from_str(&old).unwrap();
            let expected = Policy {
                cpu_min: 0.2,
                ..Policy::default()
            };
            assert_eq!(read, expected);
            assert!(
                !serde_json::to_string(&read)
                    .unwrap()
                    .contains("independent_check")
            );
        }
        assert!(serde_json::from_str::<Policy>("{\"independent\": true}").is_err());
    }

    #[test]
    fn the_default_policy_is_valid_and_a_bad_value_is_named() {
        assert_eq!(Policy::default().validate(), Vec::<String>::new());
        let policy = Policy {
            cpu_min: f64::NAN,
            washout_min_s: -1.0,
            ..Policy::default()
        };
        let wrong = policy.validate().join("\n");
        assert!(
            wrong.contains("cpu_min") && wrong.contains("washout_min_s"),
            "{wrong}"
        );
    }
}
