//! The vocabulary of homeostat as types with units.
//!
//! Plain data and arithmetic: no I/O, no clock, no randomness, no dependency on any other crate of the
//! workspace. Every word here has the same meaning in the code, the command line, the documentation and the
//! database (see docs/concepts.md).
#![deny(clippy::disallowed_methods, clippy::disallowed_types)]

pub mod action;
pub mod canary;
pub mod experiment;
pub mod locality;
pub mod machine;
pub mod memory;
pub mod meter;
pub mod places;
pub mod sample;
pub mod setting;
pub mod spans;
pub mod topology;
pub mod units;
pub mod workload;

pub use action::{Action, ActionId, Direction, EffectorId, Progress, UndoRecord};
pub use canary::CanaryReading;
pub use experiment::{
    Advice, AdvisedSetting, BlockRecord, Effect, ExperimentId, ExperimentKind, ExperimentRecord, FreshGain,
    LossIn, MeaningAccount, MemberOutcome, NotExcluded, OffLevel, ProvenReader, SpanChange, SpansAccount,
    StrategyId, Verdict, WindowRecord, effect_in_words,
};
pub use locality::{Counters, Locality};
pub use machine::{Capability, CapabilityId, CapabilityState, Cpu, Machine, NumaNode};
pub use memory::{MemoryAdvice, MemoryKind, MemoryMap, MemoryRegion, Pieces};
pub use meter::{MeterCandidate, MeterClass, MeterId, MeterReading};
pub use places::{MemoryByKind, NumaBalancing, Places, Redispatches};
pub use sample::{
    HugePageSettings, KernelBalancing, MachineSample, MemorySetting, PageSizeSetting, Paging, Pressure,
    Reads, Snapshot, WorkloadSample,
};
pub use spans::{SpanHistogram, Spans};
pub use topology::{
    Cache, CacheKind, Device, DeviceKind, LogicalCpu, MemoryAccess, MemoryNode, MemoryTier, SideCache,
    Topology,
};
pub use units::{Bytes, CpuId, LlcId, Nanoseconds, NodeId, Ratio};
pub use workload::{Fingerprint, OperatorChoice, Owner, ProcessId, Workload, WorkloadId, WorkloadKind};
