//! The part of a helper that speaks: it holds the meters, parses what they read, and has no privilege.

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

/// What the daemon asks for.
#[derive(Debug, Serialize, Deserialize)]
pub enum Request {
    /// Which meters of a kind could count a workload's work.
    Find(Place),
    /// Reads a meter, and opens it first where it is not open here.
    Read(u64, Place, MeterId),
    /// A workload has these processes only.
    Forget(u64, Workload),
    /// A meter is not needed any more.
    Close(u64),
    /// A file with code of a process, or what is in it.
    Code(code_file::Asked),
    /// What a path leads to where homeostat runs, for a process that may run it.
    Behind(PathBuf, ProcessId),
}

/// A kind of meter, and the workload that it is asked about.
#[derive(Debug, Serialize, Deserialize)]
pub struct Place {
    /// Which kind.
    pub kind: remote::Kind,
    /// Where the machine's files are.
    pub root: PathBuf,
    /// What a person says of meters.
    pub settings: MeterSettings,
    /// Whose.
    pub workload: Workload,
}

/// What it is answered.
#[derive(Debug, Serialize, Deserialize)]
pub enum Reply {
    /// To [`Request::Find`].
    Found(Vec<MeterCandidate>),
    /// To [`Request::Read`].
    Count(Result<f64, PlatformError>),
    /// To [`Request::Code`]; the file comes with it where that was wanted.
    Code(Result<code_file::Answered, PlatformError>),
    /// To [`Request::Behind`].
    Behind(Option<String>),
}

/// Serves the daemon, until that ends.
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
