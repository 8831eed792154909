//! A setting that a person makes with `homeostat tunable`: multi-gen LRU's `min_ttl_ms`, which homeostat itself never moves, since
//! the kernel ends programs when it cannot keep what it promises. Debian's kernel has it.
//!
//! It is made and put back; it stays over a daemon that is killed and restored, since it is a person's; a value that the kernel
//! rounds is refused with what became of it, and nothing stays of the try; what somebody else writes afterwards stays.

use super::Context;
use crate::daemon::{Daemon, ask, json};
use crate::instruments::{text, write};
use crate::{Failure, ensure};
use std::path::Path;

const NAME: &str = "mm.lru_gen.min_ttl_ms";
const FILE: &str = "/sys/kernel/mm/lru_gen/min_ttl_ms";
const ENABLED: &str = "mm.lru_gen.enabled";
const ENABLED_FILE: &str = "/sys/kernel/mm/lru_gen/enabled";
/// A whole number of clock ticks at every rate that Linux has.
const OURS: &str = "1000";
/// Somebody else's.
const THEIRS: &str = "2000";
/// No whole number of ticks at less than 1000 a second: Debian has 250.
const UNEVEN: &str = "1003";
/// Nothing is to be tried meanwhile.
const HANDS_OFF: &str = "[[policy.workloads]]\nmatch = \"*\"\nnever = true\n";

/// Made, kept over a killed daemon, put back; refused where the kernel rounds; left to whoever writes next.
pub(super) fn made_by_a_person(context: &Context) -> Result<(), Failure> {
    let directory = &context.directory;
    let found = value()?;
    let generations = text(ENABLED_FILE)?;
    context.note(&format!(
        "multi-gen LRU: enabled {}, min_ttl_ms {found}",
        generations.trim()
    ));
    ensure!(found == "0", "{FILE} is {found} at the start, expected 0");

    // The other one of the two: the file shows hexadecimal digits.
    let wanted = if generations.trim() == "0x0000" { "7" } else { "0" };
    change(directory, "set", &[ENABLED, wanted])?;
    ensure!(
        text(ENABLED_FILE)? != generations,
        "{ENABLED_FILE} is as before: {generations}"
    );

    let daemon = Daemon::start(directory, HANDS_OFF)?;
    change(directory, "set", &[NAME, OURS])?;
    is_now(OURS, "after set")?;
    let shown = json(&ask(directory, &["tunable", "show", NAME, "--json"])?)?;
    let one = &shown["settings"][0];
    ensure!(
        one["value"] == OURS && one["set_by"]["kind"] == "command",
        "show says: {shown}"
    );
    daemon.kill()?;
    json(&ask(directory, &["restore", "--json"])?)?;
    is_now(OURS, "after kill -9 of the daemon and restore: it is a person's")?;

    let refused = ask(directory, &["tunable", "set", NAME, UNEVEN])?;
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    ensure!(
        !refused.status.success() && said.contains(UNEVEN) && said.contains("1004"),
        "{UNEVEN} ms are no whole number of ticks, and it said: {said}"
    );
    is_now(OURS, "after a value that the kernel rounds")?;

    change(directory, "unset", &[NAME])?;
    is_now(&found, "after unset")?;

    change(directory, "set", &[NAME, OURS])?;
    write(FILE, THEIRS)?;
    let put_back = change(directory, "unset", &[NAME])?;
    is_now(THEIRS, "after unset: somebody else has written since")?;
    ensure!(
        put_back["changes"][0]["remark"]
            .as_str()
            .is_some_and(|remark| remark.contains("somebody else")),
        "unset says: {put_back}"
    );
    write(FILE, &found)?;
    change(directory, "unset", &[ENABLED])?;
    ensure!(
        text(ENABLED_FILE)? == generations,
        "{ENABLED_FILE} is {} after unset, expected {generations}",
        text(ENABLED_FILE)?
    );
    Ok(())
}

fn change(directory: &Path, verb: &str, arguments: &[&str]) -> Result<serde_json::Value, Failure> {
    let mut words = vec!["tunable", verb];
    words.extend(arguments);
    words.push("--json");
    json(&ask(directory, &words)?)
}

fn value() -> Result<String, Failure> {
    Ok(text(FILE)?.trim().to_owned())
}

fn is_now(expected: &str, when: &str) -> Result<(), Failure> {
    let now = value()?;
    ensure!(now == expected, "{FILE} is {now}, expected {expected} {when}");
    Ok(())
}
