//! The speaker of a helper: holds the meters, parses what they read, and has no privilege.

use crate::service::opener;
use crate::service::opener::{Ask, Got};
use crate::{Meter, MeterSettings, code_file, remote};
use homeostat_helper::Line;
use homeostat_kernel::Root;
use homeostat_model::{MeterCandidate, MeterId, ProcessId, Workload};
use homeostat_platform::PlatformError;
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::os::fd::AsFd;
use std::path::PathBuf;

/// A request of the daemon.
#[derive(Debug, Serialize, Deserialize)]
pub enum Request {
    /// Finds the meters of a kind for a workload.
    Find(Place),
    /// Reads a meter, and opens it first if needed.
    Read(u64, Place, MeterId),
    /// Reports the present processes of a workload.
    Forget(u64, Workload),
    /// Closes a meter.
    Close(u64),
    /// Opens a file with code of a process, or queries it.
    Code(code_file::Asked),
    /// Resolves a path where homeostat runs, for a process that may run it.
    Behind(PathBuf, ProcessId),
}

/// A meter kind, and a workload for it.
#[derive(Debug, Serialize, Deserialize)]
pub struct Place {
    /// The kind.
    pub kind: remote::Kind,
    /// Root of the machine's files.
    pub root: PathBuf,
    /// Meter configuration.
    pub settings: MeterSettings,
    /// The workload.
    pub workload: Workload,
}

/// Reply to a request.
#[derive(Debug, Serialize, Deserialize)]
pub enum Reply {
    /// To [`Request::Find`].
    Found(Vec<MeterCandidate>),
    /// To [`Request::Read`].
    Count(Result<f64, PlatformError>),
    /// To [`Request::Code`], with the file if it was requested.
    Code(Result<code_file::Answered, PlatformError>),
    /// To [`Request::Behind`].
    Behind(Option<String>),
}

/// Serves the daemon until it ends.
pub(super) fn serve(line: &Line, to_opener: Line) -> Result<(), Errno> {
    opener::link(to_opener);
    let mut meters: BTreeMap<u64, Box<dyn Meter>> = BTreeMap::new();
    loop {
        let mut file = None;
        let reply = match line.receive(None)? {
            Request::Find(place) => Reply::Found(find(&place)),
            Request::Read(key, place, id) => Reply::Count(read(&mut meters, key, &place, &id)),
            Request::Forget(key, workload) => {
                if let Some(meter) = meters.get_mut(&key) {
                    meter.forget_ended(&workload);
                }
                continue;
            }
            Request::Close(key) => {
                meters.remove(&key);
                continue;
            }
            Request::Code(asked) => Reply::Code(code_file::answer(&asked).map(|(answered, opened)| {
                file = opened;
                answered
            })),
            Request::Behind(path, process) => Reply::Behind(match opener::ask(&Ask::Behind(path, process)) {
                Ok((Got::Behind(behind), _)) => behind,
                Ok(_) | Err(_) => None,
            }),
        };
        let files: Vec<_> = file.iter().map(AsFd::as_fd).collect();
        line.send(&reply, &files, None)?;
    }
}

fn find(place: &Place) -> Vec<MeterCandidate> {
    let mut kind = place.kind.make(&place.settings);
    kind.find(&Root::new(&place.root), &place.workload)
}

fn read(
    meters: &mut BTreeMap<u64, Box<dyn Meter>>,
    key: u64,
    place: &Place,
    id: &MeterId,
) -> Result<f64, PlatformError> {
    let meter = match meters.entry(key) {
        std::collections::btree_map::Entry::Occupied(open) => open.into_mut(),
        std::collections::btree_map::Entry::Vacant(free) => {
            let mut kind = place.kind.make(&place.settings);
            free.insert(kind.open(&Root::new(&place.root), &place.workload, id)?)
        }
    };
    meter.read(&place.workload)
}
