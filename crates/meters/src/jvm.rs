//! Java programs: a sentence about what would make their work countable.
//!
//! The HotSpot machine publishes `hsperfdata` counters (classes loaded, collections, safepoints, compilations);
//! none of them counts useful work: they fall silent or rise for reasons of the machine's own, so none is
//! offered. Its `method__entry` probes need a start option that slows every method.

use crate::common::{is_program, not_mine, refused};
use crate::{Meter, MeterKind};
use homeostat_kernel::Root;
use homeostat_model::{MeterCandidate, MeterClass, MeterId, Workload};
use homeostat_platform::PlatformError;

/// The kind.
pub(super) struct Jvm;

impl MeterKind for Jvm {
    fn find(&mut self, _: &Root, workload: &Workload) -> Vec<MeterCandidate> {
        if !is_program(workload, &["java"]) {
            return vec![];
        }
        vec![refused(
            "jvm",
            MeterClass::Application,
            "count",
            "the counters of the Java machine (collections, classes, safepoints) do not follow useful work; name the \
             program's Prometheus endpoint in the configuration (prometheus:http://127.0.0.1:PORT/metrics#METRIC) or \
             let it publish a progress counter",
        )]
    }

    fn open(&mut self, _: &Root, _: &Workload, id: &MeterId) -> Result<Box<dyn Meter>, PlatformError> {
        Err(not_mine(id))
    }
}
