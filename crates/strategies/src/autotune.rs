//! # autotune
//!
//! ## What
//! IBM's autotune (seed 003) on Linux, in the profile `autotune-classic` only. Every four seconds it looks at what the
//! machine pages. When memory of programs goes to swap and comes back at the same time, it moves three settings of the
//! kernel so that pages of files are taken rather than those of programs; after a minute without paging it moves them
//! back, a little at a time, until all are as found. In this profile `file_cache` is off, and nothing here is tried: the
//! rules are carried out as they were written.
//!
//! ## Why it helps
//! Programs whose memory is swapped out while a big file is read wait for the disk at every step, also after the reader
//! has ended. autotune took the file's pages instead, and the programs were back within a minute while the reader ran.
//!
//! ## When it hurts
//! * Where what programs need *is* in the file cache (mapped files, databases beyond their own buffers): it lowers the
//!   share of files, and does not tell the reader's from the others. `file_cache`, in homeostat's own profile, does.
//! * Without swap it does nothing: what it looks at never happens.
//! * `vm.swappiness` reaches the machine as a whole, and in control groups of version 1 the root group and those that are
//!   made later: the others have a `memory.swappiness` of their own, which stays.
//!
//! ## Evidence
//! AIX has a ceiling for the share of memory that holds pages of files (`maxperm`), which it moves; Linux has none. What
//! stands for it is ours:
//!
//! | AIX | Linux |
//! |---|---|
//! | `maxperm` and `maxclient`, from their maximum (90 %) to their minimum (6 %) | `vm.swappiness`, from what was found to 1 |
//! | `minperm`, from its maximum (20 %) to its minimum (2 %) | `vm.vfs_cache_pressure`, from what was found to twice that |
//! | `strict_maxperm` | `vm.watermark_scale_factor` five times what was found: the kernel starts earlier, so that programs look for memory less often themselves |
//! | pages in and out of paging space | `pswpin`, `pswpout` of `/proc/vmstat` |
//! | `numperm`, free memory | pages of files (`Cached` + `Buffers` − `Shmem`), `MemAvailable` |
//!
//! On Linux 6.18 memory of programs mostly survives a big reader without any help (docs/file-cache.md): this profile is there
//! to be compared with.
//!
//! ## Undo
//! What was found is written back: when the ceiling is where it began, at the end, and after a crash from the journal. A
//! setting that somebody wrote down (sysctl.d, tuned) or set at run time is left alone; one that somebody writes meanwhile
//! is theirs at once.
//!
//! ## References
//! Seed 003 (Trent: Autonomic-based Persistent Memory Management in AIX, 2004); Linux
//! `Documentation/admin-guide/sysctl/vm.rst`.

mod rules;

pub use rules::{Autotune, Limits, Parameters, Sample};

use crate::common::capable;
use homeostat_engine::{
    Controller, Declined, HostSeen, Opinion, Policy, Profile, Seen, Setting, Strategy, Wanted,
};
use homeostat_model::{Machine, MemorySetting, Nanoseconds, StrategyId};
use std::collections::BTreeMap;

const ID: &str = "autotune";

const SWAPPINESS: &str = "/proc/sys/vm/swappiness";
const CACHE_PRESSURE: &str = "/proc/sys/vm/vfs_cache_pressure";
const SCALE_FACTOR: &str = "/proc/sys/vm/watermark_scale_factor";
/// Never below: with 0 the kernel keeps memory of programs until next to no file is left.
const SWAPPINESS_MIN: f64 = 1.0;
/// Swappiness is moved in steps of this: each step is a record on disk, when disks are busy.
const SWAPPINESS_STEP: f64 = 5.0;
/// Most that directory entries and inodes are pressed harder, as a multiple of what was found …
const PRESSURE_MOST: f64 = 2.0;
/// … in so many steps.
const PRESSURE_STEPS: f64 = 2.0;
/// What a strict ceiling stands for, as a multiple of what was found; the kernel takes at most 1000 (before 4.6: 1000; now
/// 3000).
const SCALE_STRICT: u64 = 5;
const SCALE_MAX: u64 = 1000;

macro_rules! limit {
    ($constant:ident, $name:literal, $value:expr, $low:expr, $high:expr, $help:literal) => {
        const $constant: Setting = Setting {
            strategy: ID,
            name: $name,
            default: $value,
            classic: $value,
            low: $low,
            high: $high,
            help: $help,
        };
    };
}

limit!(
    INTERVAL,
    "monitor_interval_s",
    4.0,
    1.0,
    60.0,
    "seconds between two looks (Table 1: Monitor Interval)"
);
limit!(
    CEILING_MAX,
    "maxperm_max",
    90.0,
    10.0,
    100.0,
    "percent of the memory that files may use at most, from which the ceiling starts (Table 1: Maximum maxperm)"
);
limit!(
    CEILING_MIN,
    "maxperm_min",
    6.0,
    1.0,
    50.0,
    "percent of the memory that files may always use (Table 1: Minimum maxperm)"
);
limit!(
    FLOOR_MAX,
    "minperm_max",
    20.0,
    1.0,
    100.0,
    "percent of the memory below which pages of files are taken like all others, at most (Table 1: Maximum minperm)"
);
limit!(
    FLOOR_MIN,
    "minperm_min",
    2.0,
    0.5,
    50.0,
    "the same at least (Table 1: Minimum minperm)"
);
limit!(
    REARM,
    "rearm_s",
    60.0,
    1.0,
    3600.0,
    "seconds without paging before the ceiling rises (Table 1: Rearm interval)"
);
limit!(
    INCREASE,
    "increase_percent",
    1.0,
    0.1,
    50.0,
    "percent of the memory by which the ceiling rises with each look (Table 1: varies; ours)"
);
limit!(
    DECREASE_LEAST,
    "decrease_least_percent",
    2.0,
    0.1,
    50.0,
    "percent of the memory by which the ceiling falls when paging is at the threshold (Table 1: varies; ours)"
);
limit!(
    DECREASE_MOST,
    "decrease_most_percent",
    10.0,
    0.1,
    50.0,
    "percent of the memory by which the ceiling falls when paging is heavy (Table 1: varies; ours)"
);
limit!(
    HEAVY,
    "heavy",
    50.0,
    2.0,
    1e6,
    "thresholds of paging from which it is heavy (ours: the source takes the degree of paging into account, and does not say how)"
);
limit!(
    SUFFICIENT,
    "sufficient_percent",
    2.0,
    0.0,
    90.0,
    "percent of the memory that must be available for the ceiling to rise (Table 1: varies; ours)"
);
limit!(
    THRESHOLD,
    "threshold_pages_per_s",
    5.0,
    0.1,
    1e6,
    "pages per second that go to swap and come back from which it is paging (Table 1: varies; ours: with it the published recovery comes out in the machine model)"
);

/// The strategy.
pub(crate) struct AutotuneClassic;

impl Strategy for AutotuneClassic {
    fn id(&self) -> StrategyId {
        ID.into()
    }

    fn summary(&self) -> &'static str {
        "IBM's autotune: moves vm.swappiness and two more while programs page, and back"
    }

    fn settings(&self) -> &'static [Setting] {
        &[
            INTERVAL,
            CEILING_MAX,
            CEILING_MIN,
            FLOOR_MAX,
            FLOOR_MIN,
            REARM,
            INCREASE,
            DECREASE_LEAST,
            DECREASE_MOST,
            HEAVY,
            SUFFICIENT,
            THRESHOLD,
        ]
    }

    fn works_in(&self, profile: Profile) -> Result<(), String> {
        match profile {
            Profile::AutotuneClassic => Ok(()),
            Profile::Homeostat | Profile::AsoClassic => {
                Err("it is at work in the profile autotune-classic only".into())
            }
        }
    }

    fn applicable(&self, machine: &Machine) -> Result<(), String> {
        capable(machine, &["memory.settings"])
    }

    fn controller(&self, policy: &Policy) -> Option<Box<dyn Controller>> {
        Some(Box::new(Loop::new(policy)))
    }

    fn consider(&self, _seen: &Seen<'_>) -> Opinion {
        Opinion::Decline(Declined::because(
            "autotune looks after the machine, not after one program",
        ))
    }
}

fn limits(policy: &Policy) -> Limits {
    let minperm_max = FLOOR_MAX.value(policy);
    let maxperm_max = CEILING_MAX.value(policy);
    let maxperm_min = CEILING_MIN.value(policy).min(maxperm_max);
    let least = DECREASE_LEAST.value(policy);
    Limits {
        monitor_interval: Nanoseconds::from_secs_f64(INTERVAL.value(policy)),
        maxperm_max,
        maxperm_min,
        minperm_max,
        minperm_min: FLOOR_MIN.value(policy).min(minperm_max),
        // Linux knows no files that are kept apart from others.
        maxclient_max: maxperm_max,
        maxclient_min: maxperm_min,
        rearm: Nanoseconds::from_secs_f64(REARM.value(policy)),
        increase: INCREASE.value(policy),
        decrease: (least, DECREASE_MOST.value(policy).max(least)),
        heavy: HEAVY.value(policy),
        sufficient: SUFFICIENT.value(policy),
        threshold: THRESHOLD.value(policy),
    }
}

/// The rules at work on Linux.
struct Loop {
    limits: Limits,
    /// The rules since paging began; `None` while everything is as found.
    rules: Option<Autotune>,
    /// What was found, by file: of those that nobody chose.
    found: BTreeMap<&'static str, u64>,
    /// Since the last look: pages in and out, and seconds.
    counted: (f64, f64, f64),
    looked_at: Option<Nanoseconds>,
}

/// A look at the machine.
#[derive(Clone, Copy)]
struct Look {
    sample: Sample,
}

impl Loop {
    fn new(policy: &Policy) -> Self {
        Self {
            limits: limits(policy),
            rules: None,
            found: BTreeMap::new(),
            counted: (0.0, 0.0, 0.0),
            looked_at: None,
        }
    }

    /// Adds the last interval, and returns what was seen since the last look when it is time for one.
    fn look(&mut self, seen: &HostSeen<'_>) -> Option<Look> {
        let paging = &seen.sample.paging;
        self.counted.0 += paging.swapped_in as f64;
        self.counted.1 += paging.swapped_out as f64;
        self.counted.2 += seen.interval.as_secs_f64();
        let is_due = self
            .looked_at
            .is_none_or(|at| seen.now.saturating_sub(at) >= self.limits.monitor_interval);
        if !is_due || self.counted.2 <= 0.0 {
            return None;
        }
        let (came, went, seconds) = std::mem::take(&mut self.counted);
        self.looked_at = Some(seen.now);
        let percent = |part: u64| 100.0 * part as f64 / seen.machine.memory.0.max(1) as f64;
        Some(Look {
            sample: Sample {
                at: seen.now,
                paged_in: came / seconds,
                paged_out: went / seconds,
                numperm: percent(seen.sample.memory_file.0),
                free: percent(seen.sample.memory_available.0),
            },
        })
    }

    /// Where the rules start: nothing limits the files.
    fn start(&self) -> Parameters {
        Parameters {
            minperm: self.limits.minperm_max,
            maxperm: self.limits.maxperm_max,
            maxclient: self.limits.maxclient_max,
            strict: false,
        }
    }

    /// Remembers the settings that may be moved: those that nobody chose.
    fn find(&mut self, settings: &[MemorySetting]) {
        for file in [SWAPPINESS, CACHE_PRESSURE, SCALE_FACTOR] {
            let free = settings
                .iter()
                .find(|s| s.path == file && s.set_by.is_none() && !s.ours && s.value > 0);
            if let Some(setting) = free {
                self.found.insert(file, setting.value);
            }
        }
    }

    /// Which values the parameters stand for. What somebody chose since is not among them.
    fn values(&self, p: &Parameters, settings: &[MemorySetting]) -> BTreeMap<String, String> {
        let l = &self.limits;
        let mut values = BTreeMap::new();
        let mut set = |file: &'static str, value: &dyn Fn(u64) -> u64| {
            let chosen = settings.iter().any(|s| s.path == file && s.set_by.is_some());
            if let Some(found) = self.found.get(file) {
                if !chosen {
                    let value = value(*found);
                    if value != *found {
                        values.insert(file.to_owned(), value.to_string());
                    }
                }
            }
        };
        let open = (p.maxperm - l.maxperm_min) / (l.maxperm_max - l.maxperm_min).max(1e-9);
        set(SWAPPINESS, &|found| swappiness(found, open.clamp(0.0, 1.0)));
        let pressed = (l.minperm_max - p.minperm) / (l.minperm_max - l.minperm_min).max(1e-9);
        set(CACHE_PRESSURE, &|found| {
            let steps = (pressed.clamp(0.0, 1.0) * PRESSURE_STEPS).ceil() / PRESSURE_STEPS;
            (found as f64 * (1.0 + (PRESSURE_MOST - 1.0) * steps)).round() as u64
        });
        set(SCALE_FACTOR, &|found| {
            if p.strict {
                found.saturating_mul(SCALE_STRICT).min(SCALE_MAX).max(found)
            } else {
                found
            }
        });
        values
    }
}

/// Swappiness for a ceiling that is open so far (0 to 1): at its start what was found, at its end 1, in steps.
fn swappiness(found: u64, open: f64) -> u64 {
    let found = found as f64;
    let wanted = SWAPPINESS_MIN + (found - SWAPPINESS_MIN) * open;
    if open >= 1.0 {
        return found as u64;
    }
    ((wanted / SWAPPINESS_STEP).floor() * SWAPPINESS_STEP).clamp(SWAPPINESS_MIN, found.max(SWAPPINESS_MIN))
        as u64
}

impl Controller for Loop {
    fn every(&self) -> Nanoseconds {
        self.limits.monitor_interval
    }

    fn step(&mut self, seen: &HostSeen<'_>) -> Option<Wanted> {
        let Look { sample } = self.look(seen)?;
        let settings = &seen.sample.memory_settings;
        if self.rules.is_none() {
            self.limits = limits(seen.policy);
            self.find(settings);
            if sample.paged_in.min(sample.paged_out) < self.limits.threshold {
                return None;
            }
            self.rules = Some(Autotune::new(self.limits, self.start(), sample.at));
        }
        let start = self.start();
        let rules = self.rules.as_mut()?;
        let now = rules.step(&sample)?;
        if now.maxperm >= start.maxperm {
            self.rules = None;
            return Some(Wanted {
                values: BTreeMap::new(),
                why: format!(
                    "nothing was paged for {}, and files may use all memory again",
                    self.limits.rearm
                ),
            });
        }
        Some(Wanted {
            values: self.values(&now, settings),
            why: format!(
                "{:.0} pages a second come from swap and {:.0} go there; files use {:.0} % of the memory, and are to use at \
                 most {:.0} %{}",
                sample.paged_in,
                sample.paged_out,
                sample.numperm,
                now.maxperm,
                if now.strict { ", strictly" } else { "" },
            ),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::common::testing::{available, chips, machine};
    use homeostat_model::{Bytes, MachineSample, Paging};

    /// A machine of 64 GiB on which files use half of the memory.
    struct Host {
        machine: Machine,
        policy: Policy,
        sample: MachineSample,
        second: u64,
        loop_: Loop,
    }

    fn setting(path: &str, value: u64) -> MemorySetting {
        MemorySetting {
            path: path.into(),
            value,
            set_by: None,
            ours: false,
        }
    }

    impl Host {
        fn new() -> Self {
            let machine = machine(&chips(1, 1), 2);
            let policy = Policy {
                profile: Profile::AutotuneClassic,
                ..Policy::default()
            };
            let sample = MachineSample {
                memory_file: Bytes(machine.memory.0 / 2),
                memory_available: Bytes(machine.memory.0 / 2),
                memory_settings: vec![
                    setting(SWAPPINESS, 60),
                    setting(CACHE_PRESSURE, 100),
                    setting(SCALE_FACTOR, 10),
                ],
                ..MachineSample::default()
            };
            Self {
                loop_: Loop::new(&policy),
                machine,
                policy,
                sample,
                second: 0,
            }
        }

        /// Seconds of so many pages in and out each; what it wanted last, if anything new.
        fn run(&mut self, seconds: u64, pages: u64) -> Option<Wanted> {
            let mut wanted = None;
            for _ in 0..seconds {
                self.second += 1;
                self.sample.paging = Paging {
                    swapped_in: pages,
                    swapped_out: pages,
                    ..Paging::default()
                };
                let seen = HostSeen {
                    now: Nanoseconds::from_secs(self.second),
                    policy: &self.policy,
                    machine: &self.machine,
                    sample: &self.sample,
                    interval: Nanoseconds::from_secs(1),
                };
                wanted = self.loop_.step(&seen).or(wanted);
            }
            wanted
        }
    }

    fn value(wanted: &Wanted, file: &str) -> Option<u64> {
        wanted.values.get(file).map(|v| v.parse().unwrap())
    }

    #[test]
    fn it_is_at_work_in_its_own_profile_only_where_the_settings_can_be_written() {
        let mut machine = machine(&chips(1, 1), 2);
        assert!(
            AutotuneClassic
                .usable(&machine, Profile::AutotuneClassic)
                .is_err()
        );
        machine.capabilities.push(available("memory.settings"));
        assert_eq!(AutotuneClassic.usable(&machine, Profile::AutotuneClassic), Ok(()));
        for profile in [Profile::Homeostat, Profile::AsoClassic] {
            assert!(AutotuneClassic.usable(&machine, profile).is_err());
        }
    }

    #[test]
    fn the_defaults_are_table_1() {
        assert_eq!(limits(&Policy::default()), Limits::default());
    }

    #[test]
    fn paging_lowers_the_ceiling_and_repetition_is_strict() {
        let mut host = Host::new();
        assert_eq!(host.run(60, 0), None, "nothing pages");
        let looks: Vec<Wanted> = (0..4).filter_map(|_| host.run(1, 100)).collect();
        assert_eq!(looks.len(), 1, "it looks every four seconds");
        let wanted = &looks[0];
        // Half of the memory is files, and the ceiling falls from there: (47 - 6) of (90 - 6), of 60.
        let first = value(wanted, SWAPPINESS).unwrap();
        assert!((20..=30).contains(&first), "{wanted:?}");
        assert!(first % 5 == 0, "in steps");
        assert_eq!(value(wanted, SCALE_FACTOR), None, "not strict yet");
        assert!(
            wanted.why.contains("25 pages a second come from swap"),
            "{}",
            wanted.why
        );
        let wanted = host.run(8, 5000).unwrap();
        assert!(value(&wanted, SWAPPINESS).unwrap() < first);
        assert_eq!(value(&wanted, SCALE_FACTOR), Some(50));
        assert_eq!(value(&wanted, CACHE_PRESSURE), Some(200));
        // However long: never zero.
        let wanted = host.run(200, 5000).unwrap();
        assert_eq!(value(&wanted, SWAPPINESS), Some(1));
    }

    #[test]
    fn after_a_minute_of_quiet_all_goes_back_by_steps() {
        let mut host = Host::new();
        host.run(100, 5000);
        assert_eq!(host.run(56, 0), None, "a minute is not over");
        let mut seen = vec![1];
        let mut last = None;
        for _ in 0..400 {
            if let Some(wanted) = host.run(4, 0) {
                let now = value(&wanted, SWAPPINESS).unwrap_or(60);
                assert!(now >= *seen.last().unwrap(), "it never goes down again: {seen:?}");
                if now != *seen.last().unwrap() {
                    seen.push(now);
                }
                last = Some(wanted);
            }
        }
        assert_eq!(last.unwrap().values, BTreeMap::new(), "all as found");
        assert!(seen.len() >= 10 && seen.last() == Some(&60), "{seen:?}");
    }

    #[test]
    fn what_somebody_chose_is_not_moved() {
        let mut host = Host::new();
        host.sample.memory_settings[0].set_by = Some("/etc/sysctl.d/90.conf".into());
        host.sample.memory_settings[1].value = 0;
        let wanted = host.run(12, 5000).unwrap();
        assert_eq!(wanted.values.keys().collect::<Vec<_>>(), [SCALE_FACTOR]);
        // Chosen while it was ours: no longer wanted.
        let mut host = Host::new();
        assert!(value(&host.run(8, 5000).unwrap(), SWAPPINESS).is_some());
        host.sample.memory_settings[0].set_by = Some("at run time".into());
        assert_eq!(value(&host.run(8, 5000).unwrap(), SWAPPINESS), None);
    }

    #[test]
    fn what_is_ours_is_not_taken_for_what_was_found() {
        let mut host = Host::new();
        host.run(4, 0);
        host.sample.memory_settings[0] = MemorySetting {
            value: 5,
            ours: true,
            ..setting(SWAPPINESS, 5)
        };
        let wanted = host.run(200, 5000).unwrap();
        assert_eq!(value(&wanted, SWAPPINESS), Some(1));
        assert_eq!(host.loop_.found[SWAPPINESS], 60);
    }

    #[test]
    fn swappiness_lies_between_one_and_what_was_found() {
        for found in [1, 10, 60, 100, 200] {
            let mut before = 0;
            for i in 0..=100 {
                let now = swappiness(found, f64::from(i) / 100.0);
                assert!((1..=found).contains(&now) && now >= before, "{found} {i} {now}");
                before = now;
            }
            assert_eq!(before, found);
        }
    }
}
