//! Reports configured meters that no kind knows, such as spelling mistakes.

use crate::uprobe;
use homeostat_kernel::Root;
use homeostat_meters::common::{not_mine, refused};
use homeostat_meters::{Meter, MeterKind, MeterSettings, prometheus};
use homeostat_model::{MeterCandidate, MeterClass, MeterId, Workload};
use homeostat_platform::PlatformError;

/// The meter kind.
pub struct Unclaimed(MeterSettings);

impl Unclaimed {
    pub(super) fn new(settings: &MeterSettings) -> Self {
        Self(settings.clone())
    }
}

impl MeterKind for Unclaimed {
    fn find(&mut self, _: &Root, workload: &Workload) -> Vec<MeterCandidate> {
        self.0
            .configured_for(workload)
            .into_iter()
            .filter(|named| !prometheus::is_mine(&named.meter) && !uprobe::is_mine(&named.meter))
            .map(|named| {
                refused(
                    &named.meter,
                    MeterClass::Application,
                    named.unit.as_deref().unwrap_or("count"),
                    "a configured meter begins with uprobe:, usdt: or prometheus:; correct it in the configuration",
                )
            })
            .collect()
    }

    fn open(&mut self, _: &Root, _: &Workload, id: &MeterId) -> Result<Box<dyn Meter>, PlatformError> {
        Err(not_mine(id))
    }
}
