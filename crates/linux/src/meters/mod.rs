//! How useful work is counted, one file per kind of meter. To add one: a file here, a line in [`kinds`].

mod bounded;
pub(crate) mod code_file;
pub(crate) mod common;
mod concern;
pub(crate) mod connection;
mod cpu_time;
mod crowd;
mod discovery;
mod elf;
mod elf64;
mod functions;
mod go;
mod jvm;
mod kernel;
mod known;
pub(crate) mod listeners;
mod memcached;
pub(crate) mod network;
mod owed;
mod owned;
pub(crate) mod parsers;
mod patient;
mod points;
mod probing;
mod processor;
pub(crate) mod progress;
mod prometheus;
mod ranges;
pub(crate) mod redis;
pub(crate) mod remote;
mod servers;
mod settings;
mod sockets;
mod spans;
mod strangers;
mod tasks;
mod turns;
mod unclaimed;
mod uprobe;
mod waits;

pub use discovery::{PointsReport, cost_in_compiled_code, find_points};
pub use known::{KnownMeter, known_meters};
pub use owed::{Mended, mend, write_breakpoints_down_in};
pub use points::{KnownPoint, Place, known_points};
pub use settings::{ConfiguredMeter, MeterSettings, PointsWish};
pub(crate) use spans::Follower;
pub use spans::{Quantile, SpanBlocks, Spans, SpansReport};

use crate::Root;
use homeostat_model::{MeterCandidate, MeterId, Nanoseconds, Workload};
use homeostat_platform::PlatformError;
use std::time::Duration;

/// Longest wait of an orderly end for breakpoints to be taken out.
const TAKEN_OFF_MAX: Duration = Duration::from_secs(10);

/// Whether a process has mapped only memory and storage that nobody else answers for, so that reading it waits for nobody.
pub(crate) fn maps_only_its_own(root: &Root, process: homeostat_model::ProcessId) -> bool {
    concern::storage::own_memory(root, process).is_ok()
}

/// Why progress points are not used now unless a person asks for them: somebody is on the machine who is not trusted with them.
pub(crate) fn why_no_points(root: &Root) -> Option<String> {
    strangers::Strangers::default().why_not(root, std::time::Instant::now())
}

/// Why functions and places in files cannot be counted in turns, by BPF, on this machine and by this user.
pub(crate) fn why_not_in_turns() -> Option<crate::sys::perf::OpenError> {
    crate::sys::bpf::Counters::possible().err()
}

/// Waits until every breakpoint is taken out that a meter had needed, at most ten seconds: that is done by threads, which look
/// first that it holds up nobody. What is left then goes with this process, whoever stands still. Whether all are out.
pub fn wait_until_off() -> bool {
    owed::wait_for_all(TAKEN_OFF_MAX)
}

/// From now on no breakpoint is put in by anybody in this process, which is about to end.
pub fn begin_to_end() {
    owed::end();
}

/// This process is about to end: from now on no breakpoint is put in by anybody, and those that are in are waited for as by
/// [`wait_until_off`]. Who ends while the kernel puts some in or takes some out leaves them behind. Whether all are out.
pub fn end() -> bool {
    begin_to_end();
    wait_until_off()
}

/// One kind of meter: finds out whether it fits a workload, and opens it.
pub trait MeterKind {
    /// Which meters of this kind could count the workload's work; refusals carry the remedy. Must be cheap
    /// (a few milliseconds) and must not disturb the workload.
    fn find(&mut self, root: &Root, workload: &Workload) -> Vec<MeterCandidate>;
    /// Opens one of them.
    ///
    /// # Errors
    /// `Vanished`, `Denied`, `Unsupported`.
    fn open(
        &mut self,
        root: &Root,
        workload: &Workload,
        id: &MeterId,
    ) -> Result<Box<dyn Meter>, PlatformError>;
    /// How a meter of this kind came to be, where that took more than a look: for people.
    fn story(&self, _workload: &Workload, _id: &MeterId) -> Option<String> {
        None
    }
}

/// An open meter.
pub trait Meter {
    /// Cumulative count of work since some fixed moment. A value that is lower than the one before (restart,
    /// wrap) makes the sensor drop that interval. `workload` is its present state: processes may have come
    /// and gone since the meter was opened.
    ///
    /// # Errors
    /// `Busy` when it cannot be read for a moment; the sensor closes a meter that says nothing else for minutes. `Vanished`, or any
    /// other when [`Meter::is_over`]: it can be read no more, and why; the sensor closes it. Any other may pass as well: the sensor
    /// closes a meter that tells nothing else for a while.
    fn read(&mut self, workload: &Workload) -> Result<f64, PlatformError>;
    /// Whether its last error was its last word: nothing will ever be read of it again.
    fn is_over(&self) -> bool {
        false
    }
    /// Lets go of what it holds of processes that the workload has no more. Told at each scan, also where nobody reads it.
    fn forget_ended(&mut self, workload: &Workload) {
        let _ = workload;
    }
    /// Share of the time before the last reading in which work was really counted, 0..=1; the rest of that reading is estimated
    /// from it. `None`: in too little of it for the reading to say anything of the time since the one before.
    fn counted(&self) -> Option<f64> {
        Some(1.0)
    }
    /// How long before the last reading some of what tells it may have been counted; zero: it was counted since the reading before.
    fn lag(&self) -> Nanoseconds {
        Nanoseconds::ZERO
    }
}

/// A kind that counts through breakpoints, where nobody wants any: it says what could be counted, and opens nothing.
struct WithoutBreakpoints(Box<dyn MeterKind>);

const NO_BREAKPOINTS: &str = "meters.breakpoints = false: nothing is counted through breakpoints";

impl MeterKind for WithoutBreakpoints {
    fn find(&mut self, root: &Root, workload: &Workload) -> Vec<MeterCandidate> {
        let mut found = self.0.find(root, workload);
        for candidate in &mut found {
            candidate.refused.get_or_insert_with(|| NO_BREAKPOINTS.to_owned());
        }
        found
    }

    fn open(
        &mut self,
        _root: &Root,
        _workload: &Workload,
        id: &MeterId,
    ) -> Result<Box<dyn Meter>, PlatformError> {
        Err(PlatformError::Unsupported {
            what: format!("meter {id}"),
            why: NO_BREAKPOINTS.to_owned(),
        })
    }
}

/// All kinds of meters, those closest to the work first.
pub fn kinds(settings: &MeterSettings) -> Vec<Box<dyn MeterKind>> {
    let of_its_user = |kind: Box<dyn MeterKind>| -> Box<dyn MeterKind> { Box::new(owned::Owned(kind)) };
    let by_breakpoints = |kind: Box<dyn MeterKind>| -> Box<dyn MeterKind> {
        let kind = of_its_user(kind);
        if settings.breakpoints {
            kind
        } else {
            Box::new(WithoutBreakpoints(kind))
        }
    };
    let told: Vec<Box<dyn MeterKind>> = vec![
        Box::new(remote::Remote::new(remote::Kind::Progress, settings)),
        Box::new(remote::Remote::new(remote::Kind::Redis, settings)),
        Box::new(remote::Remote::new(remote::Kind::Memcached, settings)),
        Box::new(remote::Remote::new(remote::Kind::Prometheus, settings)),
        Box::new(jvm::Jvm),
    ];
    let counted: Vec<Box<dyn MeterKind>> = vec![
        by_breakpoints(Box::new(uprobe::Uprobe::new(settings))),
        Box::new(kernel::Kernel),
        Box::new(sockets::Sockets),
        by_breakpoints(Box::new(discovery::Points::new(settings))),
        Box::new(processor::Processor),
        of_its_user(Box::new(unclaimed::Unclaimed::new(settings))),
    ];
    told.into_iter().map(of_its_user).chain(counted).collect()
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use homeostat_model::{Fingerprint, MeterClass, OperatorChoice, ProcessId, WorkloadId, WorkloadKind};

    pub(crate) fn workload(program: &str, processes: Vec<ProcessId>) -> Workload {
        Workload {
            id: WorkloadId::from(program),
            kind: WorkloadKind::ProcessGroup,
            former: None,
            owner: homeostat_model::Owner::Machine,
            others: Vec::new(),
            fingerprint: Fingerprint::from(program),
            program: program.to_owned(),
            executable: format!("/usr/bin/{program}"),
            processes,
            choice: OperatorChoice::default(),
        }
    }

    /// This test program itself, as a workload.
    pub(crate) fn own() -> Workload {
        let stat = std::fs::read("/proc/self/stat").unwrap();
        let start_ticks = common::start_ticks(&stat).unwrap();
        workload(
            "own",
            vec![ProcessId {
                pid: std::process::id() as i32,
                start_ticks,
            }],
        )
    }

    #[test]
    fn every_candidate_has_an_id_of_its_own_and_every_refusal_a_reason() {
        let root = Root::default();
        let mut ids = std::collections::BTreeSet::new();
        for kind in &mut kinds(&MeterSettings::default()) {
            for candidate in kind.find(&root, &own()) {
                assert!(ids.insert(candidate.id.clone()), "{} twice", candidate.id);
                assert!(!candidate.unit.is_empty());
                if let Some(why) = candidate.refused {
                    assert!(why.len() > 20, "{}: {why}", candidate.id);
                }
            }
        }
        assert!(ids.len() > 8);
    }

    #[test]
    fn nothing_is_counted_through_breakpoints_where_nobody_wants_any() {
        let root = Root::default();
        // This program is none that is known, so something of it is asked for by name.
        let named = "uprobe:own:main";
        let settings = |breakpoints| MeterSettings {
            breakpoints,
            progress_points: PointsWish::Always,
            configured: [("own".to_owned(), vec![ConfiguredMeter::from(named)])].into(),
            ..MeterSettings::default()
        };
        let is_by_breakpoints =
            |c: &MeterCandidate| matches!(c.class, MeterClass::Probe | MeterClass::Points);
        let mut ids = Vec::new();
        for kind in &mut kinds(&settings(false)) {
            for candidate in kind.find(&root, &own()).into_iter().filter(is_by_breakpoints) {
                assert!(candidate.refused.is_some(), "{}", candidate.id);
                ids.push(candidate.id);
            }
        }
        assert!(ids.iter().any(|id| id.as_str() == "points"), "{ids:?}");
        assert!(ids.iter().any(|id| id.as_str().starts_with("uprobe:")), "{ids:?}");
        // Nor for whoever asks for one by its name.
        for id in &ids {
            let refusals: Vec<String> = kinds(&settings(false))
                .iter_mut()
                .map(|kind| kind.open(&root, &own(), id).err().unwrap().to_string())
                .collect();
            assert!(
                refusals.iter().any(|why| why.contains(NO_BREAKPOINTS)),
                "{refusals:?}"
            );
        }
        // What is refused otherwise has another reason.
        let others = kinds(&settings(true));
        for candidate in others.into_iter().flat_map(|mut kind| kind.find(&root, &own())) {
            assert_ne!(candidate.refused.as_deref(), Some(NO_BREAKPOINTS));
        }
    }

    #[test]
    fn a_count_is_what_a_person_says_it_is_and_else_what_is_known_of_it() {
        let function = |p: &&KnownPoint| matches!(p.place, Place::Function("readQueryFromClient"));
        let known = known_points().iter().find(function).unwrap().unit;
        let gone = workload(
            "redis-server",
            vec![ProcessId {
                pid: i32::MAX,
                start_ticks: 1,
            }],
        );
        for (meter, unsaid) in [
            ("uprobe:redis-server:readQueryFromClient", known),
            ("uprobe:redis-server:other", "hit"),
            ("usdt:redis-server:redis:other", "hit"),
            ("prometheus:http://127.0.0.1:1/metrics#orders_total", "count"),
            ("of no kind", "count"),
        ] {
            for said in [None, Some("order")] {
                let named = ConfiguredMeter {
                    meter: meter.to_owned(),
                    unit: said.map(str::to_owned),
                };
                let settings = MeterSettings {
                    configured: [("redis*".to_owned(), vec![named])].into(),
                    ..MeterSettings::default()
                };
                let units: Vec<String> = kinds(&settings)
                    .iter_mut()
                    .flat_map(|kind| kind.find(&Root::default(), &gone))
                    .filter(|c| c.id.as_str() == meter)
                    .map(|c| c.unit)
                    .collect();
                assert_eq!(units, [said.unwrap_or(unsaid)], "{meter}");
            }
        }
    }

    #[test]
    fn an_id_of_nobody_is_refused_by_all() {
        for kind in &mut kinds(&MeterSettings::default()) {
            let opened = kind.open(&Root::default(), &own(), &MeterId::from("no such meter"));
            assert!(matches!(opened, Err(PlatformError::Unsupported { .. })));
        }
    }

    #[test]
    fn an_empty_tree_and_a_process_that_is_gone_give_refusals_only() {
        let empty = tempfile::tempdir().unwrap();
        let gone = workload(
            "redis-server",
            vec![ProcessId {
                pid: i32::MAX,
                start_ticks: 1,
            }],
        );
        for root in [Root::new(empty.path()), Root::default()] {
            for kind in &mut kinds(&MeterSettings::default()) {
                for candidate in kind.find(&root, &gone) {
                    assert!(candidate.refused.is_some(), "{}", candidate.id);
                    assert!(
                        kind.open(&root, &gone, &candidate.id).is_err(),
                        "{}",
                        candidate.id
                    );
                }
            }
        }
    }
}
