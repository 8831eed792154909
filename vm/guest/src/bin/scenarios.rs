//! `scenarios all`: runs what the kernel's command line names. `scenarios run NAME` and `scenarios crash POINT
//! DIRECTORY` are what it starts itself.

use homeostat_guest::{Failure, crash, scenarios};
use std::path::Path;
use std::process::ExitCode;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let done = match words.as_slice() {
        ["all"] => scenarios::run_all(),
        ["run", name] => scenarios::run_one(name),
        ["crash", point, directory] => crash::child(point, Path::new(directory)),
        _ => Err(Failure::Broken(
            "usage: scenarios all | run NAME | crash POINT DIRECTORY".into(),
        )),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("{failure}");
            ExitCode::FAILURE
        }
    }
}
