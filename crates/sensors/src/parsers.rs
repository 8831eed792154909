//! The parsers of sensors, as functions of bytes.

use crate::{choice, group_memory, grouping, locality, processes, reads, regions, storage};
use homeostat_kernel::Parser;
use homeostat_model::Bytes;

/// Names, and parsers of arbitrary bytes.
pub const ALL: &[Parser] = &[
    ("environment", |bytes| {
        let _ = choice::from_environment(bytes, "here");
    }),
    ("cgroup", |bytes| {
        let _ = grouping::place(bytes, &grouping::TextOnly);
        let _ = grouping::ArgumentHashes::of(bytes);
    }),
    ("memory-stat", |bytes| {
        let _ = group_memory::parse(bytes);
    }),
    ("stat", |bytes| {
        let _ = processes::parse_stat(bytes);
    }),
    ("schedstat", |bytes| {
        let _ = processes::parse_wait(bytes);
    }),
    ("maps", |bytes| {
        let _ = processes::parse_segment(bytes);
        let _ = locality::memory::parse_maps(bytes);
    }),
    ("smaps", |bytes| {
        let _ = regions::parse_smaps(bytes);
        let _ = regions::parse_rollup(bytes);
    }),
    ("status", |bytes| {
        let _ = regions::parse_glance(bytes);
        let _ = locality::memory::Resident::parse(bytes);
        let _ = locality::threads::parse_switches(bytes);
    }),
    ("numa-maps", |bytes| {
        let _ = locality::memory::parse_numa_maps(bytes, Bytes(4096));
    }),
    ("thread-stat", |bytes| {
        let _ = locality::threads::parse_thread_stat(bytes);
    }),
    ("sched", |bytes| {
        let _ = locality::threads::parse_sched(bytes);
    }),
    ("process-io", |bytes| {
        let _ = reads::parse_io(bytes);
        let _ = reads::parse_position(bytes);
        let _ = reads::parse_inode(bytes);
    }),
    ("mountinfo", |bytes| {
        storage::parse(&String::from_utf8_lossy(bytes))
    }),
];
