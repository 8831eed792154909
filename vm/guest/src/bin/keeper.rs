//! `keeper MIB CPUS THREADS`: see `homeostat_guest::keeper`.

use std::process::ExitCode;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match homeostat_guest::keeper::main(&arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("keeper: {failure}");
            ExitCode::FAILURE
        }
    }
}
