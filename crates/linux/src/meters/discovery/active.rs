//! A progress point that is being counted.
//!
//! Probes are put on and taken off, and the program is looked at, by a thread of the point's own ([`turns`](super::turns)):
//! the kernel may have to wait for the program's memory for either. Who reads the meter only adds up.

use super::children::Children;
use super::debt::Debt;
use super::rehearsal::{known_cost, threads_of};
use super::search::Found;
use super::turns::{POINT, Probes, Shared, Turns, cpu_of, held};
use crate::Root;
use crate::sys::bpf::Counters;
use crate::sys::perf::OpenError;
use homeostat_model::{ProcessId, Workload};
use homeostat_platform::PlatformError;
use std::sync::Arc;
use std::sync::mpsc::Sender;

/// Counted for a smaller share of the time than this it would say nothing.
pub(super) const DUTY_MIN: f64 = 0.01;

/// Why a point is no longer counted.
#[derive(Clone, Debug)]
pub(super) enum Lost {
    /// The program is gone, or cannot be read now.
    Vanished(PlatformError),
    /// The point does not mean what it meant.
    Changed(String),
    /// Nothing may be counted now; it is looked at again in the next turn.
    Paused(String),
}

/// A point and its witness, being counted.
pub(super) struct Active {
    shared: Arc<Shared>,
    counters: Arc<Counters>,
    /// Of what would be counted all the time, so much is said: then a count costs the program what it is said to cost.
    scale: f64,
    work: f64,
    /// Its end ends the thread.
    _stop: Sender<()>,
}

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

impl Active {
    /// Begins to count.
    ///
    /// # Errors
    /// As of a meter that is opened.
    pub(super) fn open(
        root: &Root,
        workload: &Workload,
        found: &Found,
        executable: (u64, u64),
        cost_max: f64,
    ) -> Result<Self, PlatformError> {
        let duty = found.chosen.duty;
        if duty < DUTY_MIN {
            return Err(PlatformError::Unsupported {
                what: format!("counting at {}", found.place.name),
                why: format!(
                    "{:.0} hits a second would cost {:.0} % of its CPU time, too much even part of the time; choose \
                     another meter",
                    found.chosen.rate,
                    100.0 * cost_max / duty
                ),
            });
        }
        let processes: Vec<ProcessId> = workload.processes.clone();
        let main = *processes.first().ok_or_else(|| failed(OpenError::Vanished))?;
        let counters = Arc::new(Counters::new(2).map_err(failed)?);
        let shared = Arc::new(Shared::new(workload.clone(), cpu_of(&processes)));
        let turns = Turns {
            root: root.clone(),
            main,
            executable,
            probes: Probes::new(root, found, counters.clone()),
            shared: shared.clone(),
            hit_cost: known_cost(threads_of(root, &processes)).max(found.hit_cost),
            cost_max,
            duty,
            name: found.place.name.clone(),
            cpus: found.cpus,
            watch: super::turns::Watch::default(),
            children: Children::default(),
            debt: Debt::default(),
            paused: None,
            compared: None,
            number: 0,
        };
        let (stop, stopped) = std::sync::mpsc::channel();
        std::thread::Builder::new()
            .name("points".to_owned())
            .spawn(move || turns.run(&stopped))
            .map_err(|e| PlatformError::Busy {
                what: "starting to count a progress point".to_owned(),
                why: e.to_string(),
            })?;
        Ok(Self {
            shared,
            counters,
            scale: if duty >= 0.999 { 1.0 } else { duty },
            work: 0.0,
            _stop: stop,
        })
    }

    /// Cumulative hits; of a point that is counted part of the time, those that this share of all would be. `None` while
    /// the first turn has not begun.
    pub(super) fn read(&mut self, workload: &Workload) -> Result<Option<f64>, Lost> {
        let tally = {
            let mut tally = held(&self.shared.tally);
            if let Some(lost) = &tally.lost {
                return Err(lost.clone());
            }
            if tally.workload.processes != workload.processes {
                tally.workload = workload.clone();
            }
            if let Some(why) = &tally.paused {
                return Err(Lost::Paused(why.clone()));
            }
            if !tally.begun {
                return Ok(None);
            }
            let since = if tally.always {
                // To the hit.
                let now = self.counters.read(POINT).unwrap_or(tally.counted);
                now.saturating_sub(tally.counted) as f64
            } else {
                // Since the last turn ended at its rate.
                tally.per_cpu * (cpu_of(&workload.processes) - tally.cpu).max(0.0)
            };
            tally.work + since
        };
        self.work = self.work.max(tally * self.scale);
        Ok(Some(self.work))
    }
}
