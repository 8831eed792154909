//! Every parser of what a workload can influence, as a function of bytes: for tests with damaged inputs and for the
//! fuzzer (`fuzz/`). Nothing else uses this list. A new parser belongs into it.

use crate::meters;
use crate::sensors::{choice, group_memory, grouping, locality, processes, reads, regions};
use homeostat_model::Bytes;
use homeostat_progress::layout;

/// A name, and a parser that takes whatever bytes there are and may refuse them, but no more.
pub type Parser = (&'static str, fn(&[u8]));

/// All of them.
pub fn all() -> impl Iterator<Item = Parser> {
    SENSORS.iter().chain(meters::parsers::ALL).copied()
}

const SENSORS: &[Parser] = &[
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
    ("progress", |bytes| {
        if let Ok(header) = layout::Header::parse(bytes, bytes.len() as u64) {
            let _ = layout::sum_slots(bytes, header.slots);
        }
    }),
    ("progress-file-name", |bytes| {
        let _ = layout::parse_file_name(&String::from_utf8_lossy(bytes));
    }),
];

/// The parsers of executable files, as they read from a file: for tests with files that fit into no memory.
pub fn executable(file: &std::fs::File) {
    meters::parsers::file(file);
}
