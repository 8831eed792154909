//! What counts useful work inside a program: breakpoints in functions that are known or named, and progress points that are found.
//!
//! The daemon does without this crate where its feature `probes` is off.

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

/// Longest wait of an orderly end for breakpoints to be taken out.
const TAKEN_OFF_MAX: Duration = Duration::from_secs(10);

/// Why progress points are not used now unless a person asks for them: somebody is on the machine who is not trusted with them.
pub fn why_no_points(root: &Root) -> Option<String> {
    strangers::Strangers::default().why_not(root, std::time::Instant::now())
}

/// Why functions and places in files cannot be counted in turns, by BPF, on this machine and by this user.
pub fn why_not_in_turns() -> Option<homeostat_kernel::perf::OpenError> {
    homeostat_kernel::bpf::Counters::possible().err()
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

/// A kind that counts through breakpoints, where nobody wants any: it says what could be counted, and opens nothing.
struct WithoutBreakpoints(Box<dyn MeterKind>);

/// Why nothing is counted through breakpoints where a person wants none.
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

/// As a person wants kinds that count through breakpoints: all of them, or none that opens anything.
fn by_breakpoints(settings: &MeterSettings, kind: Box<dyn MeterKind>) -> Box<dyn MeterKind> {
    let kind = of_its_user(kind);
    if settings.breakpoints {
        kind
    } else {
        Box::new(WithoutBreakpoints(kind))
    }
}

/// Functions that are known or that a person named.
pub fn by_functions(settings: &MeterSettings) -> Box<dyn MeterKind> {
    by_breakpoints(settings, Box::new(Uprobe::new(settings)))
}

/// Progress points, found in the program while it runs.
pub fn by_points(settings: &MeterSettings) -> Box<dyn MeterKind> {
    by_breakpoints(settings, Box::new(Points::new(settings)))
}

/// What a person named and no other kind knows.
pub fn unclaimed(settings: &MeterSettings) -> Box<dyn MeterKind> {
    of_its_user(Box::new(Unclaimed::new(settings)))
}
