//! Which meter to trust.
//!
//! Meters are tried in tiers, nearest to the work first: the program's own counters together with kernel work
//! (which costs nothing to read), then probes. A meter qualifies when it fires, is steady per CPU second over
//! blocks, and costs the workload little. Kernel work must in addition be confirmed by a second, different kind of
//! kernel work that keeps a constant ratio to it: a single counter may count polling or waiting instead of work.
//! Hardware counts never qualify: the treatment may change the number of instructions (seed 001: a large-segment
//! case gained 30 % while instructions per second fell by 58 %).

use crate::policy::Policy;
use crate::series::Series;
use homeostat_model::{MeterCandidate, MeterClass, MeterId, Nanoseconds};

/// Intervals joined into one block when noise is judged.
const BLOCK: usize = 4;
/// Kernel work must be at least this steady (coefficient of variation over blocks of work per CPU second).
const KERNEL_NOISE_MAX: f64 = 0.15;
/// … and fire at least this often per second.
const KERNEL_RATE_MIN: f64 = 5.0;
/// Two kinds of kernel work confirm each other when their ratio varies by no more than this.
const CONFIRMATION_NOISE_MAX: f64 = 0.10;

/// Tiers in the order they are tried.
pub(crate) const TIERS: [&[MeterClass]; 2] = [
    &[MeterClass::Application, MeterClass::Kernel],
    &[MeterClass::Probe],
];

/// How good a meter turned out to be.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Assessment {
    /// Counts per second.
    pub(crate) rate: f64,
    /// Coefficient of variation of work per CPU second over blocks.
    pub(crate) noise: f64,
    /// Share of the workload's CPU time that counting costs.
    pub(crate) cost: f64,
    /// Why it does not qualify, with the remedy.
    pub(crate) refused: Option<String>,
}

/// Judges one open meter by its readings since `since`. `None`: too few readings yet.
pub(crate) fn assess(
    candidate: &MeterCandidate,
    others: &[&MeterCandidate],
    series: &Series,
    since: Nanoseconds,
    policy: &Policy,
) -> Option<Assessment> {
    let seen = series.since(since).count();
    let readings = series.readings(&candidate.id, since);
    if readings.len() < policy.meter_samples_min {
        // A meter that delivers nothing while samples come in has failed.
        if seen >= policy.meter_samples_min * 2 {
            return Some(Assessment {
                rate: 0.0,
                noise: f64::INFINITY,
                cost: 0.0,
                refused: Some(format!(
                    "could be read in {} of {seen} intervals only",
                    readings.len()
                )),
            });
        }
        return None;
    }
    let work: f64 = readings.iter().map(|r| r.0).sum();
    let seconds: f64 = readings.iter().map(|r| r.1).sum();
    let cpu: f64 = readings.iter().map(|r| r.2).sum();
    let rate = if seconds > 0.0 { work / seconds } else { 0.0 };
    let cost = if cpu > 0.0 {
        work * candidate.cost_per_count.as_secs_f64() / cpu
    } else {
        0.0
    };
    let ratios: Vec<f64> = readings
        .chunks_exact(BLOCK)
        .filter_map(|b| {
            let c: f64 = b.iter().map(|r| r.2).sum();
            (c > 0.0).then(|| b.iter().map(|r| r.0).sum::<f64>() / c)
        })
        .collect();
    let noise = variation(&ratios);
    let refused = if work <= 0.0 {
        Some(format!(
            "did not fire in {seconds:.0} s (the function may be inlined or unused, or the program idle)"
        ))
    } else if cost > policy.meter_cost_max {
        Some(format!(
            "would cost {:.1} % of the workload's CPU time at {rate:.0} counts per second (limit {:.1} %); choose a function called once per batch",
            cost * 100.0,
            policy.meter_cost_max * 100.0
        ))
    } else if candidate.class == MeterClass::Hardware {
        Some("instructions alone never judge: a change may alter how many are needed".to_owned())
    } else if candidate.class == MeterClass::Kernel {
        kernel_refusal(candidate, others, series, since, rate, noise)
    } else if noise > policy.meter_noise_max {
        Some(format!(
            "varies by {:.0} % per CPU second from block to block (limit {:.0} %)",
            noise * 100.0,
            policy.meter_noise_max * 100.0
        ))
    } else {
        None
    };
    Some(Assessment {
        rate,
        noise,
        cost,
        refused,
    })
}

fn kernel_refusal(
    candidate: &MeterCandidate,
    others: &[&MeterCandidate],
    series: &Series,
    since: Nanoseconds,
    rate: f64,
    noise: f64,
) -> Option<String> {
    if rate < KERNEL_RATE_MIN {
        return Some(format!(
            "fires {rate:.1} times a second (at least {KERNEL_RATE_MIN} needed)"
        ));
    }
    if noise > KERNEL_NOISE_MAX {
        return Some(format!(
            "varies by {:.0} % per CPU second from block to block (limit for kernel work {:.0} %)",
            noise * 100.0,
            KERNEL_NOISE_MAX * 100.0
        ));
    }
    let confirmed = others.iter().any(|other| {
        other.class == MeterClass::Kernel
            && family(&other.id) != family(&candidate.id)
            && ratio_variation(&candidate.id, &other.id, series, since) <= CONFIRMATION_NOISE_MAX
    });
    if confirmed {
        None
    } else {
        Some(
            "no second kind of kernel work keeps a constant ratio to it, so it may count waiting or polling"
                .to_owned(),
        )
    }
}

/// `io.write_calls` → `io.write`: counters of one family say the same thing and do not confirm each other.
fn family(id: &MeterId) -> &str {
    let text = id.as_str();
    if text.starts_with("io.bytes") {
        "io.bytes"
    } else {
        text.split('_').next().unwrap_or(text)
    }
}

fn ratio_variation(a: &MeterId, b: &MeterId, series: &Series, since: Nanoseconds) -> f64 {
    let pairs: Vec<(f64, f64)> = series
        .since(since)
        .filter_map(|i| Some((i.work.get(a)?.0, i.work.get(b)?.0)))
        .collect();
    let ratios: Vec<f64> = pairs
        .chunks_exact(BLOCK)
        .filter_map(|c| {
            let (x, y) = c.iter().fold((0.0, 0.0), |s, p| (s.0 + p.0, s.1 + p.1));
            (x > 0.0 && y > 0.0).then(|| x / y)
        })
        .collect();
    if ratios.len() < 2 {
        f64::INFINITY
    } else {
        variation(&ratios)
    }
}

/// Robust coefficient of variation: 1.4826 × MAD / median. One value or none says nothing: infinite.
fn variation(values: &[f64]) -> f64 {
    if values.len() < 2 {
        return f64::INFINITY;
    }
    let median = homeostat_statistics::robust::median(values);
    if median <= 0.0 || !median.is_finite() {
        return f64::INFINITY;
    }
    homeostat_statistics::robust::mad_sigma(values) / median
}

/// Order of preference among qualified meters: class, then kind of kernel work, then noise.
pub(crate) fn preference(candidate: &MeterCandidate, assessment: &Assessment) -> (u8, u8, u64) {
    let class = match candidate.class {
        MeterClass::Application => 0,
        MeterClass::Probe => 1,
        MeterClass::Kernel => 2,
        MeterClass::Hardware => 3,
    };
    let kernel = if candidate.id.as_str().starts_with("io.") {
        0
    } else if candidate.id.as_str().starts_with("socket") {
        1
    } else if candidate.id.as_str().starts_with("syscalls") {
        2
    } else {
        3
    };
    (class, kernel, (assessment.noise * 1e6) as u64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::series::Interval;
    use std::collections::BTreeMap;

    fn candidate(id: &str, class: MeterClass, cost_us: u64) -> MeterCandidate {
        MeterCandidate {
            id: id.into(),
            class,
            unit: "x".into(),
            cost_per_count: Nanoseconds(cost_us * 1000),
            refused: None,
        }
    }

    fn series(work: impl Fn(u64) -> Vec<(&'static str, f64)>) -> Series {
        let mut s = Series::default();
        for t in 1..=24 {
            s.push(Interval {
                end: Nanoseconds::from_secs(t),
                seconds: 1.0,
                cpu: 0.5,
                wait: 0.0,
                machine_idle: 0.5,
                churn: 0,
                faults: (0, 0),
                work: work(t)
                    .into_iter()
                    .map(|(k, v)| (MeterId::new(k), (v, 1.0)))
                    .collect::<BTreeMap<_, _>>(),
            });
        }
        s
    }

    fn judge(c: &MeterCandidate, others: &[&MeterCandidate], s: &Series) -> Assessment {
        assess(c, others, s, Nanoseconds::ZERO, &Policy::default()).expect("enough readings")
    }

    #[test]
    fn a_probe_that_never_fires_is_refused_with_the_likely_cause() {
        let c = candidate("uprobe:f", MeterClass::Probe, 1);
        let a = judge(&c, &[], &series(|_| vec![("uprobe:f", 0.0)]));
        assert!(a.refused.unwrap().contains("inlined"));
    }

    #[test]
    fn a_probe_on_a_hot_function_is_refused_for_its_cost() {
        let c = candidate("uprobe:f", MeterClass::Probe, 1);
        let a = judge(&c, &[], &series(|_| vec![("uprobe:f", 360_000.0)]));
        assert!(a.cost > 0.7, "{}", a.cost);
        assert!(a.refused.unwrap().contains("per batch"));
    }

    #[test]
    fn kernel_work_needs_a_second_witness_of_another_family() {
        let (w, r, v) = (
            candidate("io.write_calls", MeterClass::Kernel, 0),
            candidate("io.write_bytes", MeterClass::Kernel, 0),
            candidate("switches.voluntary", MeterClass::Kernel, 0),
        );
        let agree = series(|_| {
            vec![
                ("io.write_calls", 100.0),
                ("io.write_bytes", 1e4),
                ("switches.voluntary", 100.0),
            ]
        });
        assert_eq!(judge(&w, &[&v], &agree).refused, None);
        assert!(judge(&w, &[&r], &agree).refused.is_some(), "same family");
        let apart = series(|t| {
            vec![
                ("io.write_calls", 100.0),
                ("switches.voluntary", if t % 8 < 4 { 20.0 } else { 200.0 }),
            ]
        });
        assert!(
            judge(&w, &[&v], &apart)
                .refused
                .unwrap()
                .contains("constant ratio")
        );
    }

    #[test]
    fn too_few_readings_is_no_judgement_and_a_silent_meter_is_refused() {
        let c = candidate("redis", MeterClass::Application, 0);
        let mut s = Series::default();
        s.push(
            series(|_| vec![("redis", 1.0)])
                .since(Nanoseconds::ZERO)
                .next()
                .unwrap()
                .clone(),
        );
        assert_eq!(assess(&c, &[], &s, Nanoseconds::ZERO, &Policy::default()), None);
        let silent = series(|_| vec![]);
        assert!(judge(&c, &[], &silent).refused.unwrap().contains("0 of 24"));
    }

    #[test]
    fn instructions_never_judge() {
        let c = candidate("pmu.instructions", MeterClass::Hardware, 0);
        let a = judge(&c, &[], &series(|_| vec![("pmu.instructions", 1e9)]));
        assert!(a.refused.unwrap().contains("never judge"));
    }
}
