//! `homeostat demo` on a kernel of Debian as it is set there: private memory has large pages from the start.

use super::Context;
use crate::instruments::{rollup_kib, text};
use crate::keeper::program;
use crate::{Failure, ensure};
use std::collections::BTreeSet;
use std::fs::File;
use std::process::{Command, Stdio};
use std::time::Duration;

const SWITCH: &str = "/sys/kernel/mm/transparent_hugepage/enabled";
const TICK: Duration = Duration::from_millis(200);
/// What the demo starts, and what the kernel calls its memory in large pages.
const SHOWN: (&str, &str) = ("latency", "ShmemPmdMapped");
/// Ends of a trial, and of a demo in which none ended.
const VERDICTS: [&str; 7] = [
    "accepted",
    "rejected",
    "harmful",
    "inconclusive",
    "aborted",
    "declined",
    "none in time",
];
/// Reasons of an emulated machine to try nothing: it is noisy.
const REASONS: [&str; 2] = [
    "not tried: too noisy",
    "not touched, because its work cannot be measured",
];

/// Ends with status 0 and says what was so: a change that was made is gone, one that was not made has its reason.
pub(super) fn ends_with_a_true_account(context: &Context) -> Result<(), Failure> {
    let switch = text(SWITCH)?;
    ensure!(
        switch.contains("[always]"),
        "Debian's kernel sets {SWITCH} to always, and here it is {switch}"
    );
    let before = processes()?;
    let file = |name: &str| {
        let path = context.directory.join(name);
        File::create(&path).map_err(Failure::system(format!("making {}", path.display())))
    };
    let mut demo = Command::new(program("homeostat")?)
        .args(["demo", "--json"])
        .env("TMPDIR", "/tmp")
        .stdin(Stdio::null())
        .stdout(file("account")?)
        .stderr(file("story")?)
        .spawn()
        .map_err(Failure::system("starting the demo"))?;
    let mut most_kib = 0;
    let ended = loop {
        if let Some(status) = demo.try_wait().map_err(Failure::system("waiting for the demo"))? {
            break status;
        }
        for pid in processes()?.difference(&before) {
            // One that has just ended has no name any more.
            if text(format!("/proc/{pid}/comm")).is_ok_and(|name| name.trim() == SHOWN.0) {
                most_kib = most_kib.max(rollup_kib(*pid, SHOWN.1).unwrap_or(0));
            }
        }
        std::thread::sleep(TICK);
    };
    let story = text(context.directory.join("story"))?;
    ensure!(ended.success(), "the demo ended with {ended}:\n{story}");
    ensure!(
        story.contains("large pages from the start") && story.contains("Shared memory"),
        "the demo does not say what this machine does by itself:\n{story}"
    );
    let account: serde_json::Value = serde_json::from_str(&text(context.directory.join("account"))?)?;
    ensure!(
        account["restored"] == true,
        "the demo says that something was not put back: {account}"
    );
    let shown = &account["workloads"][0];
    let word = |name: &str| shown[name].as_str().unwrap_or_default();
    let number = |name: &str| shown[name].as_u64().unwrap_or(u64::MAX);
    ensure!(VERDICTS.contains(&word("verdict")), "an unknown verdict: {shown}");
    context.note(&format!(
        "{} after {} s, {} blocks; {} MiB in large pages at most; {}",
        word("verdict"),
        number("seconds"),
        number("blocks"),
        most_kib >> 10,
        word("reason")
    ));
    if word("verdict") == "declined" {
        ensure!(
            REASONS.iter().any(|r| word("reason").starts_with(r)),
            "declined for a reason that is not so on this machine: {shown}"
        );
    }
    ensure!(
        number("huge_bytes_after") <= number("huge_bytes_before"),
        "large pages stay: {shown}"
    );
    ensure!(
        number("blocks") == 0 || most_kib > 0,
        "a trial with blocks in which nothing was converted: {shown}"
    );
    let left: Vec<i32> = processes()?
        .difference(&before)
        .copied()
        .filter(|pid| {
            text(format!("/proc/{pid}/comm")).is_ok_and(|name| [SHOWN.0, "homeostat"].contains(&name.trim()))
        })
        .collect();
    ensure!(left.is_empty(), "processes of the demo stay: {left:?}");
    Ok(())
}

/// All processes.
fn processes() -> Result<BTreeSet<i32>, Failure> {
    let list = std::fs::read_dir("/proc").map_err(Failure::system("listing /proc"))?;
    Ok(list
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .collect())
}
