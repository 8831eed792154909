//! The tests of `crates/linux/tests/placement`, on a kernel that has the nodes that they ask for: the same binary that
//! `cargo test` runs on the host, where most of them skip.

use super::Context;
use crate::keeper::program;
use crate::{Failure, ensure};
use std::process::{Command, Stdio};

/// What a test says when it has nothing to test with.
const SKIPPED: &str = "skipped:";
/// Tests that skip here all the same: one wants three nodes with memory, two a kernel from 6.2.
const SKIPS_MAX: usize = 3;

/// All of them pass, and hardly any skips.
pub(super) fn pass_here(context: &Context) -> Result<(), Failure> {
    let output = Command::new(program("placement-tests")?)
        .args(["--nocapture", "--test-threads=1"])
        .current_dir(&context.directory)
        .env("TMPDIR", &context.directory)
        .stdin(Stdio::null())
        .output()
        .map_err(Failure::system("starting the tests of placement"))?;
    let said = [output.stdout, output.stderr].concat();
    let said = String::from_utf8_lossy(&said);
    let result = said
        .lines()
        .rfind(|l| l.starts_with("test result:"))
        .unwrap_or_default();
    ensure!(
        output.status.success() && result.contains("ok."),
        "the tests of placement ({}): {result}\n{}",
        output.status,
        said.lines().map(|line| format!("  {line}\n")).collect::<String>()
    );
    let skips: Vec<&str> = said.lines().filter(|l| l.contains(SKIPPED)).collect();
    ensure!(
        skips.len() <= SKIPS_MAX,
        "{} tests skip here: {skips:?}",
        skips.len()
    );
    let passed = result.split_whitespace().nth(3).unwrap_or_default();
    ensure!(
        passed.parse::<u32>().is_ok_and(|n| n > 0),
        "no test was run: {result}"
    );
    context.note(&format!("{passed} passed, {} skipped: {skips:?}", skips.len()));
    Ok(())
}
