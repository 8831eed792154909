//! What the tests of both modules need: tests that run parts of themselves in another process.
#![allow(dead_code, reason = "each test binary uses its own part")]

use std::path::Path;
use std::process::{Command, Output};

/// Variable that tells a re-executed test binary which child it is to play.
pub(crate) const ROLE: &str = "HOMEOSTAT_STORE_TEST_ROLE";
/// Variable with the directory the child works in.
pub(crate) const DIRECTORY: &str = "HOMEOSTAT_STORE_TEST_DIRECTORY";
/// Variable with a number for the child.
pub(crate) const NUMBER: &str = "HOMEOSTAT_STORE_TEST_NUMBER";

/// The role of this process, if it is a child.
pub(crate) fn role() -> Option<String> {
    std::env::var(ROLE).ok()
}
/// The directory of this child.
pub(crate) fn directory() -> std::path::PathBuf {
    std::env::var_os(DIRECTORY)
        .expect("a child has a directory")
        .into()
}
/// The number of this child.
pub(crate) fn number() -> u64 {
    std::env::var(NUMBER)
        .expect("a child has a number")
        .parse()
        .expect("a number")
}

/// Runs one test function of this binary in a process of its own and waits for its end.
pub(crate) fn child(test: &str, role: &str, directory: &Path, number: u64) -> Output {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture", "--test-threads=1"])
        .env(ROLE, role)
        .env(DIRECTORY, directory)
        .env(NUMBER, number.to_string())
        .output()
        .unwrap()
}

/// Runs one test function of this binary in a mount namespace of its own, after `script` (with `$DIR`) set the
/// stage there. `None`, with a printed reason, where this user may not mount.
pub(crate) fn child_with_mounts(script: &str, test: &str, role: &str, directory: &Path) -> Option<Output> {
    let output = Command::new("unshare")
        .args(["--mount", "--propagation", "private", "sh", "-c"])
        .arg(format!(
            "{script} || exit 77; exec \"$0\" --exact \"$1\" --nocapture --test-threads=1"
        ))
        .arg(std::env::current_exe().unwrap())
        .arg(test)
        .env("DIR", directory)
        .env(ROLE, role)
        .env(DIRECTORY, directory)
        .env(NUMBER, "0")
        .output();
    let reason = match output {
        Ok(output) if output.status.success() => return Some(output),
        Ok(output) if output.status.code() == Some(77) || output.stderr.starts_with(b"unshare:") => {
            String::from_utf8_lossy(&output.stderr).into_owned()
        }
        Ok(output) => panic!(
            "child {role} failed: {}\n{}",
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr)
        ),
        Err(e) => e.to_string(),
    };
    println!("SKIPPED: no private mount namespace here: {reason}");
    None
}
