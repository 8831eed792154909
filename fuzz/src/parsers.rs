//! One parser, named by `HOMEOSTAT_FUZZ`, with whatever libFuzzer thinks of.
#![no_main]

use homeostat_linux::parsers;
use homeostat_linux::parsers::Parser;
use libfuzzer_sys::fuzz_target;
use std::sync::LazyLock;

static PARSER: LazyLock<Parser> = LazyLock::new(|| {
    let wanted = std::env::var("HOMEOSTAT_FUZZ").unwrap_or_default();
    parsers::all().find(|(name, _)| *name == wanted).unwrap_or_else(|| {
        let names: Vec<&str> = parsers::all().map(|(name, _)| name).collect();
        eprintln!("HOMEOSTAT_FUZZ names no parser: {wanted:?}; there are: {}", names.join(" "));
        std::process::exit(2)
    })
});

// A wrong name ends it before libFuzzer takes an exit for a finding.
fuzz_target!(init: LazyLock::force(&PARSER), |bytes: &[u8]| (PARSER.1)(bytes));
