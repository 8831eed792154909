//! Kernel counters of a program, with which sites are compared.

use homeostat_kernel::Root;
use homeostat_meters::{Meter, MeterKind, kernel, sockets};
use homeostat_model::{MeterId, Workload};
use homeostat_points::choice::Signal;

pub(super) struct Signals(Vec<(&'static str, bool, Box<dyn Meter>)>);

impl Signals {
    /// Opens the counters that can be read, the closest to requests first.
    pub(super) fn open(root: &Root, workload: &Workload) -> Self {
        let wanted: [(&str, &'static str, bool); 6] = [
            ("sockets.segments", "TCP segments received with data", false),
            ("sockets.bytes", "bytes sent and received over TCP", false),
            ("io.read_calls", "read calls", false),
            ("io.write_calls", "write calls", false),
            ("io.bytes", "bytes read and written", false),
            ("switches.voluntary", "voluntary context switches", true),
        ];
        let mut open: Vec<(&'static str, bool, Box<dyn Meter>)> = Vec::new();
        for (id, name, weak) in wanted {
            let id = MeterId::from(id);
            let meter = kernel::Kernel
                .open(root, workload, &id)
                .or_else(|_| sockets::Sockets.open(root, workload, &id));
            if let Ok(mut meter) = meter {
                if meter.read(workload).is_ok() {
                    open.push((name, weak, meter));
                }
            }
        }
        Self(open)
    }

    pub(super) fn names(&self) -> Vec<Signal> {
        self.0
            .iter()
            .map(|(name, weak, _)| Signal {
                name: (*name).to_owned(),
                weak: *weak,
                counts: Vec::new(),
            })
            .collect()
    }

    /// Present counts. An unreadable counter reads 0.
    pub(super) fn read(&mut self, workload: &Workload) -> Vec<f64> {
        self.0
            .iter_mut()
            .map(|(_, _, meter)| meter.read(workload).unwrap_or(0.0))
            .collect()
    }
}
