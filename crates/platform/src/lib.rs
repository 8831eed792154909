//! The seam between the mind and the machine.
//!
//! [`Sensors`], [`Effectors`] and [`Clock`] are all that the runtime knows of a machine. The real one is in the
//! `linux` crate; tests and the simulator bring others. Every implementation passes [`conformance`].
//!
//! Contract, in short:
//! * Nothing here blocks for longer than a few tens of milliseconds; long changes are carried out in slices.
//! * Sensing changes nothing on the machine.
//! * An effector first tells how to undo ([`Effectors::prepare`], which changes nothing), and only after that
//!   record is on disk is it asked to act.
//! * Undo is idempotent, and safe when the world has moved on: process gone, pid reused, mapping gone, value
//!   changed by somebody else since (then it is theirs and stays).

pub mod conformance;
mod error;

pub use error::PlatformError;
use homeostat_model::{
    Action, Direction, Locality, Machine, MemoryMap, MeterCandidate, MeterId, Nanoseconds, Progress,
    Snapshot, UndoRecord, WorkloadId,
};

/// What to look at in one sample.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SampleRequest {
    /// Scan all processes and recognise workloads anew (costs time in proportion to their number).
    pub scan: bool,
    /// Workloads to sample in detail and whose open meters to read, whether or not this sample scans.
    pub detail: Vec<WorkloadId>,
}

/// Everything that can be seen. No method changes the machine, except that an open probe costs the probed
/// program a little.
pub trait Sensors {
    /// Reads the topology and probes the capabilities.
    fn machine(&mut self) -> Result<Machine, PlatformError>;
    /// Takes a sample. A process or workload that vanishes meanwhile is simply absent.
    fn sample(&mut self, request: &SampleRequest) -> Result<Snapshot, PlatformError>;
    /// Whether it is to be looked at what workloads read, also while memory is not short; from the next sample on.
    fn look_at_reads(&mut self, wanted: bool) {
        let _ = wanted;
    }
    /// Whose spans from wait to wait are to be followed from now on; nobody else's are any more. What comes of it is in their
    /// samples. May cost a followed program up to half a percent of its CPU time.
    fn follow_spans(&mut self, workloads: &[WorkloadId]) {
        let _ = workloads;
    }
    /// Whether the memory canary is to run from the next sample on. It needs 67 MiB and about 0.8 % of a CPU. What it
    /// measures, or why there is none, is in [`Snapshot::canary`].
    fn keep_canary(&mut self, wanted: bool) {
        let _ = wanted;
    }
    /// Looks into the memory of a workload, region by region. Bounded; `truncated` says when the bound was hit.
    fn inspect_memory(&mut self, workload: &WorkloadId) -> Result<MemoryMap, PlatformError>;
    /// Looks where the threads and the memory of a workload are. Bounded.
    ///
    /// # Errors
    /// `Unsupported` where the machine has no places to tell apart or no sensor for them.
    fn inspect_locality(&mut self, workload: &WorkloadId) -> Result<Locality, PlatformError>;
    /// Which meters could count this workload's work, with a reason for each that could not.
    fn find_meters(&mut self, workload: &WorkloadId) -> Result<Vec<MeterCandidate>, PlatformError>;
    /// Opens a meter; from now on it is read with each detailed sample of that workload.
    fn open_meter(&mut self, workload: &WorkloadId, meter: &MeterId) -> Result<(), PlatformError>;
    /// Closes a meter; no error when it is not open.
    fn close_meter(&mut self, workload: &WorkloadId, meter: &MeterId);
    /// The meters that the last sample could not read, and never will again: they are closed. Each is told once, with the reason. One
    /// that cannot be read for a moment is not lost; neither are those of a workload that has ended, which the next scan tells.
    fn take_lost_meters(&mut self) -> Vec<LostMeter> {
        Vec::new()
    }
}

/// An open meter that can be read no more.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LostMeter {
    /// Whose work it counted.
    pub workload: WorkloadId,
    /// Which.
    pub meter: MeterId,
    /// Why.
    pub why: PlatformError,
}

/// How far an earlier process got with an action, as far as the journal knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reached {
    /// It is not known to have been made whole even once: it may be half made, or made and not looked at.
    Begun,
    /// It was made whole, and may be in force, wholly or in part.
    Made,
    /// It was made, and everything was put back; nothing was written since.
    PutBack,
}

/// Everything that can be changed.
pub trait Effectors {
    /// What will be needed to revert the action. Changes nothing.
    ///
    /// # Errors
    /// Any [`PlatformError`]; the action is then not taken.
    fn prepare(&mut self, action: &Action) -> Result<UndoRecord, PlatformError>;
    /// Carries out the next slice of the action (or of its undo): at most a few tens of milliseconds.
    /// Called again, after the pause it asked for, until it reports `done`. Calling it after `done`, or after a
    /// switch of direction half way, is allowed: it always drives towards the named state from wherever the
    /// machine is. State about progress may be kept in memory, but must be reconstructible: after a crash undo
    /// starts from the record alone.
    fn advance(&mut self, record: &UndoRecord, direction: Direction) -> Result<Progress, PlatformError>;
    /// Forgets any in-memory state about this action (it was closed in the journal).
    fn forget(&mut self, record: &UndoRecord);
    /// Takes over an action that an earlier process left in force on purpose: what was changed is ours, not a person's
    /// choice, and is looked after from now on. Called before the first sample. Changes nothing.
    fn adopt(&mut self, record: &UndoRecord) {
        let _ = record;
    }
    /// Told how an earlier process left an action, before the first that is owed is undone: of whose value lies there the
    /// record alone says less. Changes nothing.
    fn inherit(&mut self, record: &UndoRecord, reached: Reached) {
        let _ = (record, reached);
    }
}

/// Time. The only clock of the system.
pub trait Clock {
    /// Time since boot, never going back.
    fn now(&self) -> Nanoseconds;
    /// CPU time that the calling thread has used: on a busy machine much less passes than on the wall. A clock that
    /// does not know says [`Clock::now`].
    fn cpu_time(&self) -> Nanoseconds {
        self.now()
    }
    /// Seconds since the epoch, for people.
    fn unix_seconds(&self) -> u64;
    /// Waits. Used only where nothing else can happen meanwhile: recovery and restore.
    fn sleep(&self, length: Nanoseconds);
}
