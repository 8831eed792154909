//! A progress point that is being counted: in turns, where counting it all the time would cost too much ([`turns`](crate::turns)).

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

/// A point that could be counted for a smaller share of the time than this and some ticks, as a hit is charged, is not begun: that the
/// breakpoints come and go, and the looks before that, would be a large part of what they are there for.
const SHARE_MIN: f64 = 0.02;

/// … by the processor's own breakpoints, which come and go within microseconds.
const SHARE_MIN_COMPILED: f64 = 0.005;

/// A point that is hit so often that it could be counted for less of each second has a window of that length every so many seconds (at most):
/// whoever compares leaves out as many after each change, and of a program that is slower at one time than at another a block meets few
/// of these times.
const APART_MAX: f64 = 6.0;

/// By what is told what a point did while it was not counted, so that it costs no more than it may.
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
    // At the price that was seen: where it turns out to be another they will be as far apart as that takes.
    let apart = share_min / share.max(1e-9) * (found.hit_cost_seen / found.hit_cost).min(1.0);
    // What is hit in more than half of its time is told too small.
    let most = APART_MAX.min(TAKEN_MAX * CHARGED * share_min / cost_max);
    // Of code that no file holds so short a window has few hits.
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

/// Share of the time in which it can be counted, as a hit is charged.
fn share(found: &Found) -> f64 {
    (found.chosen.duty / CHARGED).min(1.0)
}

/// Begins to count a point and its witness, which can be afforded ([`rest`]).
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
