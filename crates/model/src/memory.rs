//! The memory of a workload by region, as large-page and migration strategies need it.

use crate::units::Bytes;
use crate::workload::{ProcessId, WorkloadId};
use serde::{Deserialize, Serialize};

/// What backs a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MemoryKind {
    /// Private anonymous memory: heap, stack, mmap.
    Anonymous,
    /// Shared anonymous memory: SysV segments, memfd, `/dev/shm`, `MAP_SHARED|MAP_ANONYMOUS`.
    Shared,
    /// Pages of a file on a disk file system.
    File,
    /// hugetlbfs: already large, chosen by a person.
    HugeTlb,
}

/// What the program itself asked for with `madvise(2)` (VmFlags `hg` and `nh`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MemoryAdvice {
    /// Nothing.
    None,
    /// `MADV_HUGEPAGE`.
    HugePage,
    /// `MADV_NOHUGEPAGE`.
    NoHugePage,
    /// Not read: the kernel shows it only while it holds up the program for long. `MADV_COLLAPSE` itself refuses what the
    /// program keeps in small pages.
    Unknown,
}

/// The large-page-sized, aligned pieces of a region, each in one of four states.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pieces {
    /// Mapped by a large page already.
    pub huge: u32,
    /// Every base page present: conversion adds no memory.
    pub full: u32,
    /// Some base pages absent: conversion would fill the holes.
    pub sparse: u32,
    /// No base page present.
    pub empty: u32,
}

/// One mapping of one process (a VMA).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryRegion {
    /// Whose.
    pub process: ProcessId,
    /// First address.
    pub start: u64,
    /// Length.
    pub length: Bytes,
    /// What backs it.
    pub kind: MemoryKind,
    /// Name as the kernel prints it (`[heap]`, `/SYSV00000000`, `/memfd:x`), or empty.
    pub name: String,
    /// Resident.
    pub resident: Bytes,
    /// Resident and referenced lately (smaps `Referenced`), as far as the kernel knows; all of it where that was not read.
    pub referenced: Bytes,
    /// Mapped by large pages (AnonHugePages + ShmemPmdMapped).
    pub huge: Bytes,
    /// In swap.
    pub swapped: Bytes,
    /// The program's own advice.
    pub advice: MemoryAdvice,
    /// Locked by `mlock(2)` (VmFlags `lo`; where they were not read, whether the process has locked so much).
    pub locked: bool,
    /// Whether the kernel would map it with large pages at all (smaps `THPeligible`); collapse ignores the
    /// system switch, so this alone does not forbid it. `true` where that was not read ([`MemoryAdvice::Unknown`]).
    pub eligible: bool,
    /// For shared memory: whether offset and address agree modulo the large page size. Without it the kernel
    /// refuses (EINVAL).
    pub aligned: bool,
    /// How many of the inspected processes of the workload map it. A large page of shared memory that several
    /// processes map cannot be split from outside (Linux 6.18), so a conversion could not be undone.
    #[serde(default = "one")]
    pub mappers: u32,
    /// The aligned pieces and their states. Zero for regions that were not looked into.
    pub pieces: Pieces,
    /// Start addresses of the pieces in state `full`, ascending: what can be converted without adding memory.
    pub convertible: Vec<u64>,
}

fn one() -> u32 {
    1
}

/// All regions of a workload that are big enough to matter.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryMap {
    /// Whose.
    pub workload: WorkloadId,
    /// Processes with `PR_SET_THP_DISABLE` (`THP_enabled: 0` in `/proc/PID/status`).
    pub disabled: Vec<ProcessId>,
    /// Regions of at least one large page, of all its processes, shared memory named once (through the
    /// process that maps most of it).
    pub regions: Vec<MemoryRegion>,
    /// True when a bound on regions or bytes cut the inspection short.
    pub truncated: bool,
}
