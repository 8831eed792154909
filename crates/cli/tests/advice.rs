//! Advice: asked for, refused where there is none, muted in the configuration and unmuted.
#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::path::Path;
use std::process::{Command, Output};

fn homeostat(directory: &Path, arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_homeostat"))
        .arg("--config")
        .arg(directory.join("homeostat.toml"))
        .arg("--socket")
        .arg(directory.join("no-daemon"))
        .args(arguments)
        .env_remove("JOURNAL_STREAM")
        .output()
        .unwrap()
}

fn json(output: &Output) -> serde_json::Value {
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn what_is_muted_stands_in_the_configuration_and_can_be_taken_back() {
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("homeostat.toml"), "").unwrap();
    let muted = homeostat(
        directory.path(),
        &["--json", "advice", "mute", "prefetch/counters"],
    );
    assert!(muted.status.success(), "{muted:?}");
    assert_eq!(
        (&json(&muted)["muted"], &json(&muted)["in_force"]),
        (&true.into(), &false.into())
    );
    let shown = json(&homeostat(directory.path(), &["--json", "config", "show"]));
    assert_eq!(
        shown["policy"]["muted_advice"],
        serde_json::json!(["prefetch/counters"])
    );

    let stranger = homeostat(directory.path(), &["advice", "unmute", "another"]);
    assert_eq!(stranger.status.code(), Some(4), "{stranger:?}");
    assert!(String::from_utf8_lossy(&stranger.stderr).contains("prefetch/counters"));
    assert!(
        homeostat(directory.path(), &["advice", "unmute", "prefetch/counters"])
            .status
            .success()
    );
    let shown = json(&homeostat(directory.path(), &["--json", "config", "show"]));
    assert_eq!(shown["policy"]["muted_advice"], serde_json::json!([]));
}

#[test]
fn without_a_daemon_there_is_nobody_to_ask() {
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("homeostat.toml"), "").unwrap();
    for arguments in [&["advice"][..], &["advice", "list"], &["advice", "apply", "x"]] {
        assert_eq!(
            homeostat(directory.path(), arguments).status.code(),
            Some(3),
            "{arguments:?}"
        );
    }
}
