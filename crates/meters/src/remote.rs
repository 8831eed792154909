//! Meter kinds that run in a helper process. The daemon only checks whether the workload fits the kind, and whose it
//! is.

use crate::common::{is_program, not_mine, refused};
use crate::service::speaker::{Place, Reply, Request};
use crate::service::{call, tell};
use crate::{Meter, MeterKind, MeterSettings, memcached, progress, prometheus, redis};
use homeostat_helper::Domain;
use homeostat_kernel::Root;
use homeostat_model::{MeterCandidate, MeterClass, MeterId, Workload};
use homeostat_platform::PlatformError;
use serde::{Deserialize, Serialize};
use std::sync::atomic::{AtomicU64, Ordering};

/// The kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Kind {
    /// Progress files.
    Progress,
    /// Redis and its relatives.
    Redis,
    /// memcached.
    Memcached,
    /// Prometheus endpoints.
    Prometheus,
}

impl Kind {
    pub(crate) fn make(self, settings: &MeterSettings) -> Box<dyn MeterKind> {
        match self {
            Self::Progress => Box::new(progress::Progress::new(settings)),
            Self::Redis => Box::new(redis::Redis::new(settings)),
            Self::Memcached => Box::new(memcached::Memcached),
            Self::Prometheus => Box::new(prometheus::Prometheus::new(settings)),
        }
    }

    /// Meters of this kind that a workload might have, with their units.
    fn possible(self, settings: &MeterSettings, workload: &Workload) -> Vec<(String, String)> {
        let one = |id: &str, unit: &str| vec![(id.to_owned(), unit.to_owned())];
        match self {
            Self::Progress => one(progress::ID, "count"),
            Self::Redis if is_program(workload, &redis::PROGRAMS) => one(redis::ID, redis::UNIT),
            Self::Memcached if is_program(workload, &memcached::PROGRAMS) => {
                one(memcached::ID, memcached::UNIT)
            }
            Self::Redis | Self::Memcached => Vec::new(),
            Self::Prometheus => {
                let named = settings.configured_for(workload).into_iter();
                named
                    .filter(|named| prometheus::is_mine(&named.meter))
                    .map(|named| {
                        let unit = named.unit.as_deref().unwrap_or(prometheus::UNIT);
                        (named.meter.clone(), unit.to_owned())
                    })
                    .collect()
            }
        }
    }
}

pub(super) struct Remote {
    kind: Kind,
    settings: MeterSettings,
}

impl Remote {
    pub(super) fn new(kind: Kind, settings: &MeterSettings) -> Self {
        Self {
            kind,
            settings: settings.clone(),
        }
    }

    fn place(&self, root: &Root, workload: &Workload) -> Place {
        Place {
            kind: self.kind,
            root: root.as_path().to_owned(),
            settings: self.settings.clone(),
            workload: followed(workload),
        }
    }
}

/// The workload, cut to the processes that a meter follows.
fn followed(workload: &Workload) -> Workload {
    let mut workload = workload.clone();
    workload.processes.truncate(crate::common::PROCESSES_MAX);
    workload
}

/// The domain of the workload's first living process.
fn whose(root: &Root, workload: &Workload) -> Result<Domain, PlatformError> {
    let mut gone = PlatformError::Vanished {
        target: workload.id.to_string(),
    };
    for process in &workload.processes {
        match Domain::of(root, *process) {
            Err(e @ PlatformError::Vanished { .. }) => gone = e,
            other => return other,
        }
    }
    Err(gone)
}

impl MeterKind for Remote {
    fn find(&mut self, root: &Root, workload: &Workload) -> Vec<MeterCandidate> {
        let possible = self.kind.possible(&self.settings, workload);
        if possible.is_empty() {
            return Vec::new();
        }
        let found =
            whose(root, workload).and_then(|domain| call(domain, &Request::Find(self.place(root, workload))));
        let why = match found {
            Ok(Reply::Found(found)) => return found,
            Ok(_) => "the helper process has answered something else".to_owned(),
            Err(e) => e.to_string(),
        };
        possible
            .into_iter()
            .map(|(id, unit)| refused(&id, MeterClass::Application, &unit, why.clone()))
            .collect()
    }

    fn open(
        &mut self,
        root: &Root,
        workload: &Workload,
        id: &MeterId,
    ) -> Result<Box<dyn Meter>, PlatformError> {
        let possible = self.kind.possible(&self.settings, workload);
        if !possible.iter().any(|(possible, _)| possible == id.as_str()) {
            return Err(not_mine(id));
        }
        static KEYS: AtomicU64 = AtomicU64::new(0);
        let mut meter = RemoteMeter {
            place: self.place(root, workload),
            root: root.clone(),
            id: id.clone(),
            key: KEYS.fetch_add(1, Ordering::Relaxed),
            domain: None,
        };
        meter.read(workload)?;
        Ok(Box::new(meter))
    }
}

struct RemoteMeter {
    place: Place,
    root: Root,
    id: MeterId,
    key: u64,
    domain: Option<Domain>,
}

impl RemoteMeter {
    fn leave(&mut self) {
        if let Some(domain) = self.domain.take() {
            tell(domain, &Request::Close(self.key));
        }
    }
}

impl Meter for RemoteMeter {
    fn read(&mut self, workload: &Workload) -> Result<f64, PlatformError> {
        let domain = whose(&self.root, workload)?;
        if self.domain.is_some_and(|before| before != domain) {
            self.leave();
        }
        self.domain = Some(domain);
        let place = Place {
            root: self.place.root.clone(),
            settings: self.place.settings.clone(),
            workload: followed(workload),
            kind: self.place.kind,
        };
        match call(domain, &Request::Read(self.key, place, self.id.clone()))? {
            Reply::Count(count) => count,
            Reply::Found(_) | Reply::Code(_) | Reply::Behind(_) => Err(PlatformError::Busy {
                what: format!("reading meter {}", self.id),
                why: "the helper process has answered something else".to_owned(),
            }),
        }
    }

    fn forget_ended(&mut self, workload: &Workload) {
        if let Some(domain) = self.domain {
            tell(domain, &Request::Forget(self.key, followed(workload)));
        }
    }
}

impl Drop for RemoteMeter {
    fn drop(&mut self) {
        self.leave();
    }
}
