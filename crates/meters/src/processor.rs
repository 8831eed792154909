//! Instructions and cycles in user mode, from hardware counters. They never measure progress alone, because the
//! treatment may change the instructions per unit of work.

use crate::common::{not_mine, refused, usable};
use crate::tasks::{Counted, Limits, TaskCounters};
use crate::{Meter, MeterKind};
use homeostat_kernel::Root;
use homeostat_kernel::perf::Scope;
use homeostat_model::{MeterCandidate, MeterClass, MeterId, Workload};
use homeostat_platform::PlatformError;

const LIMITS: Limits = Limits {
    counters: 256,
    attach: 16,
};
const ALL: [(&str, &str, Counted); 2] = [
    ("instructions", "instruction", Counted::Instructions),
    ("cycles", "processor cycle", Counted::Cycles),
];

pub(super) struct Processor;

impl MeterKind for Processor {
    fn find(&mut self, root: &Root, workload: &Workload) -> Vec<MeterCandidate> {
        ALL.iter()
            .map(|(id, unit, counted)| match probe(root, workload, counted) {
                Ok(()) => usable(id, MeterClass::Hardware, unit),
                Err(why) => refused(id, MeterClass::Hardware, unit, why),
            })
            .collect()
    }

    fn open(
        &mut self,
        root: &Root,
        workload: &Workload,
        id: &MeterId,
    ) -> Result<Box<dyn Meter>, PlatformError> {
        let (.., counted) = ALL
            .iter()
            .find(|(name, ..)| *name == id.as_str())
            .ok_or_else(|| not_mine(id))?;
        probe(root, workload, counted).map_err(|why| PlatformError::Unsupported {
            what: format!("meter {id}"),
            why,
        })?;
        Ok(Box::new(ProcessorMeter(TaskCounters::open(
            root,
            workload,
            vec![counted.clone()],
            LIMITS,
        )?)))
    }
}

fn probe(root: &Root, workload: &Workload, counted: &Counted) -> Result<(), String> {
    if !root.is_live() {
        return Err("this is a captured tree, not the running machine".to_owned());
    }
    let Some(main) = workload.processes.first() else {
        return Err("it has no process".to_owned());
    };
    homeostat_kernel::process::open_process(root, *main).map_err(|e| e.to_string())?;
    match counted.open(Scope::Thread(main.pid)) {
        Ok(_) => Ok(()),
        Err(PlatformError::Unsupported { .. }) => Err(
            "the machine shows no hardware counters; on a virtual machine let the host pass its PMU through"
                .to_owned(),
        ),
        Err(e) => Err(e.to_string()),
    }
}

struct ProcessorMeter(TaskCounters);

impl Meter for ProcessorMeter {
    fn read(&mut self, workload: &Workload) -> Result<f64, PlatformError> {
        self.0.read(workload)
    }
}
