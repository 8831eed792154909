//! Counts at a probe site: continuously, or sampled where that would cost too much ([`turns`](crate::turns)).

use crate::crowd::Crowd;
use crate::discovery::compiled::Compiled;
use crate::discovery::probes::Probes;
use crate::discovery::rehearsal::known_cost;
use crate::discovery::search::{At, Found};
use crate::turns::{Beginning, CHARGED, Counting, Rest, TAKEN_MAX};
use homeostat_kernel::Root;
use homeostat_kernel::bpf::Counters;
use homeostat_kernel::perf::OpenError;
use homeostat_meters::cpu_time::waiting;
use homeostat_model::Workload;
use homeostat_platform::PlatformError;
use std::sync::Arc;

pub(super) fn failed(e: OpenError) -> PlatformError {
    let what = "counting a progress point".to_owned();
    match e {
        OpenError::Denied(errno) => PlatformError::Denied {
            what,
            needs: format!("run homeostat as root, or with CAP_BPF and CAP_PERFMON ({errno})"),
        },
        OpenError::Vanished => PlatformError::Vanished {
            target: "the process of a progress point".to_owned(),
        },
        OpenError::Unsupported(errno) => PlatformError::Unsupported {
            what,
            why: format!("the kernel says {errno}; choose another meter"),
        },
        OpenError::Busy(errno) => PlatformError::Busy {
            what,
            why: errno.to_string(),
        },
    }
}

/// Smallest share of the time, plus some ticks, at the charged cost. Below it, the effort around windows dominates.
const SHARE_MIN: f64 = 0.02;

/// … with hardware breakpoints, which come and go within microseconds.
const SHARE_MIN_COMPILED: f64 = 0.005;

/// Longest distance (seconds) of windows of minimum length, for sites too busy to be counted in each second. A
/// comparison drops as much after each change, and a block contains few phases of a program with changing speed.
const APART_MAX: f64 = 6.0;

/// Basis for estimating the uncounted work within the cost limit.
///
/// # Errors
/// Why it cannot be counted for long enough at this price, for people.
pub(super) fn rest(found: &Found, cost_max: f64) -> Result<Rest, String> {
    let share = share(found);
    let share_min = match found.at {
        At::File { .. } => SHARE_MIN,
        At::Compiled { .. } => SHARE_MIN_COMPILED,
    } + waiting();
    if share >= share_min {
        return Ok(Rest::CpuTime);
    }
    // At the cost seen in the search. If the cost changes, the distance follows.
    let apart = share_min / share.max(1e-9) * (found.hit_cost_seen / found.hit_cost).min(1.0);
    // If hits take more than half of the time, the estimate is too small.
    let most = APART_MAX.min(TAKEN_MAX * CHARGED * share_min / cost_max);
    // In generated code, so short a window has few hits.
    if apart <= most && matches!(found.at, At::File { .. }) {
        return Ok(Rest::LastWindow { share_min, apart });
    }
    Err(format!(
        "{} follows its work, but {:.0} hits a second would cost {:.0} % of its CPU time, too much even part of the time; \
         choose another meter",
        found.name(),
        found.chosen.rate,
        100.0 * cost_max / share
    ))
}

fn share(found: &Found) -> f64 {
    (found.chosen.duty / CHARGED).min(1.0)
}

/// Begins to count a site and its witness within the limit ([`rest`]).
///
/// # Errors
/// As of a meter that is opened.
pub(super) fn open(
    root: &Root,
    workload: &Workload,
    found: &Found,
    executable: (u64, u64),
    cost_max: f64,
) -> Result<Counting, PlatformError> {
    let main = *workload
        .processes
        .first()
        .ok_or_else(|| failed(OpenError::Vanished))?;
    let rest = rest(found, cost_max).map_err(|why| PlatformError::Unsupported {
        what: "counting a progress point".to_owned(),
        why,
    })?;
    let how = |counters, hit_cost| Beginning {
        root: root.clone(),
        counters,
        hit_cost,
        cost_max,
        share: share(found),
        cpus: found.cpus,
        rest,
    };
    match &found.at {
        At::File { place, witness } => {
            let counters = Arc::new(Counters::new(2).map_err(failed)?);
            let places = [place.clone()].into_iter().chain(witness.clone()).collect();
            let crowd = Crowd::of(root, &workload.processes);
            let probes = Probes::new(root, found, places, main, executable, crowd, counters.clone());
            let known = known_cost(crowd);
            Counting::begin(workload, probes, how(counters, known.max(found.hit_cost)))
        }
        At::Compiled { place, witness } => {
            let places = [place.clone()].into_iter().chain(witness.clone()).collect();
            let probes = Compiled::new(root, main, executable, places);
            let hits = probes.hits();
            Counting::begin(workload, probes, how(hits, found.hit_cost))
        }
    }
}
