//! Every parser of what a workload can influence, as a function of bytes: for tests with damaged inputs and for the
//! fuzzer (`fuzz/`). Nothing else uses this list. A new parser belongs into it.

pub use homeostat_kernel::Parser;

/// All of them.
pub fn all() -> impl Iterator<Item = Parser> {
    homeostat_sensors::parsers::ALL
        .iter()
        .chain(homeostat_meters::parsers::ALL)
        .chain(homeostat_probes::parsers::ALL)
        .copied()
}

/// The parsers of executable files, as they read from a file: for tests with files that fit into no memory.
pub fn executable(file: &std::fs::File) {
    homeostat_meters::parsers::file(file);
}
