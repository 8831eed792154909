//! Java programs: explains how to make their work countable.
//!
//! HotSpot's `hsperfdata` counters (classes, collections, safepoints, compilations) are not offered, because they count
//! the JVM's own activity. The `method__entry` probes need a start option that slows every method.

use crate::common::{is_program, not_mine, refused};
use crate::{Meter, MeterKind};
use homeostat_kernel::Root;
use homeostat_model::{MeterCandidate, MeterClass, MeterId, Workload};
use homeostat_platform::PlatformError;

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
