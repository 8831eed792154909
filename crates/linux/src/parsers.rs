//! Every parser of data that a workload can influence, as a function of bytes: for tests with damaged inputs and for
//! the fuzzer (`fuzz/`). Add every new parser here.

pub use homeostat_kernel::Parser;

/// All of them.
pub fn all() -> impl Iterator<Item = Parser> {
    homeostat_sensors::parsers::ALL
        .iter()
        .chain(homeostat_meters::parsers::ALL)
        .chain(homeostat_probes::parsers::ALL)
        .copied()
}

/// The parsers of executable files, on a file: for tests with files larger than memory.
pub fn executable(file: &std::fs::File) {
    homeostat_meters::parsers::file(file);
}
