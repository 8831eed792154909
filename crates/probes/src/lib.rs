//! Counts useful work inside a program: by breakpoints in known or named functions, or at probe sites found by search.
//!
//! Without the daemon's feature `probes`, this crate is not built.

mod concern;
mod cpu_counters;
mod crowd;
pub mod discovery;
mod functions;
pub mod known;
pub mod owed;
pub mod parsers;
mod points;
mod probing;
mod strangers;
mod turns;
mod unclaimed;
mod uprobe;

pub use discovery::{Points, PointsReport, cost_in_compiled_code, find_points};
pub use known::{KnownMeter, known_meters};
pub use owed::{Mended, mend, write_breakpoints_down_in};
pub use points::{KnownPoint, Place, known_points};
pub use unclaimed::Unclaimed;
pub use uprobe::Uprobe;

use homeostat_kernel::Root;
use homeostat_meters::{Meter, MeterKind, MeterSettings, of_its_user};
use homeostat_model::{MeterCandidate, MeterId, Workload};
use homeostat_platform::PlatformError;
use std::time::Duration;

/// Longest wait for the removal of breakpoints at an orderly exit.
const TAKEN_OFF_MAX: Duration = Duration::from_secs(10);

/// Why probe sites are not used now without an explicit request: an untrusted user has a process.
pub fn why_no_points(root: &Root) -> Option<String> {
    strangers::Strangers::default().why_not(root, std::time::Instant::now())
}

/// Why sampled (duty-cycled) counting by BPF is impossible on this machine or for this user.
pub fn why_not_in_turns() -> Option<homeostat_kernel::perf::OpenError> {
    homeostat_kernel::bpf::Counters::possible().err()
}

/// Waits until every unused breakpoint is removed, at most ten seconds: threads first check that this blocks nobody.
/// The rest end with this process, even if that blocks somebody. Returns whether all are removed.
pub fn wait_until_off() -> bool {
    owed::wait_for_all(TAKEN_OFF_MAX)
}

/// From now on this process inserts no breakpoint, because it is about to exit.
pub fn begin_to_end() {
    owed::end();
}

/// Before exit: no breakpoint is inserted any more, and [`wait_until_off`] removes the rest. A process that exits while
/// the kernel inserts or removes breakpoints leaves them behind. Returns whether all are removed.
pub fn end() -> bool {
    begin_to_end();
    wait_until_off()
}

/// A breakpoint meter kind that is switched off: it reports what could be counted, and opens nothing.
struct WithoutBreakpoints(Box<dyn MeterKind>);

/// Reason shown where the configuration forbids breakpoints.
pub const NO_BREAKPOINTS: &str = "meters.breakpoints = false: nothing is counted through breakpoints";

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

fn by_breakpoints(settings: &MeterSettings, kind: Box<dyn MeterKind>) -> Box<dyn MeterKind> {
    let kind = of_its_user(kind);
    if settings.breakpoints {
        kind
    } else {
        Box::new(WithoutBreakpoints(kind))
    }
}

/// Counts functions that are known or that a person named.
pub fn by_functions(settings: &MeterSettings) -> Box<dyn MeterKind> {
    by_breakpoints(settings, Box::new(Uprobe::new(settings)))
}

/// Counts at probe sites, which a search finds in the running program.
pub fn by_points(settings: &MeterSettings) -> Box<dyn MeterKind> {
    by_breakpoints(settings, Box::new(Points::new(settings)))
}

/// Counts what a person named and no other kind knows.
pub fn unclaimed(settings: &MeterSettings) -> Box<dyn MeterKind> {
    of_its_user(Box::new(Unclaimed::new(settings)))
}
