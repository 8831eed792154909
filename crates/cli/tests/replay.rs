//! `homeostat replay` as a user runs it.
#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

fn recording() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/recordings/latency.jsonl")
}

fn replay(arguments: &[&str], file: &Path) -> Output {
    Command::new(env!("CARGO_BIN_EXE_homeostat"))
        .arg("replay")
        .args(arguments)
        .arg(file)
        .stdin(Stdio::null())
        .output()
        .unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn a_recording_of_a_real_machine_is_decided_the_same_again() {
    let same = replay(&[], &recording());
    let said = text(&same.stdout);
    assert_eq!(same.status.code(), Some(0), "{said}{}", text(&same.stderr));
    assert!(said.contains("identical, byte for byte"), "{said}");
    let json: serde_json::Value = serde_json::from_slice(&replay(&["--json"], &recording()).stdout).unwrap();
    assert_eq!(json["identical"], true);
    assert_eq!(json["difference"], serde_json::Value::Null);
}

#[test]
fn a_difference_is_shown_with_both_texts_and_the_exit_code_says_so() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("other.jsonl");
    let whole = std::fs::read_to_string(recording()).unwrap();
    let changed = whole.replacen("{\"block\":0,\"on\":true}", "{\"block\":0,\"on\":false}", 1);
    let changed = if changed == whole {
        whole.replacen("\"on\":false", "\"on\":true", 1)
    } else {
        changed
    };
    assert_ne!(whole, changed);
    std::fs::write(&file, changed).unwrap();
    let other = replay(&[], &file);
    let said = text(&other.stdout);
    assert_eq!(other.status.code(), Some(1), "{said}");
    assert!(
        said.contains("DIFFERENT at step")
            && said.contains("recorded: {\"NoteCoin\"")
            && said.contains("replayed: {\"NoteCoin\""),
        "{said}"
    );
    assert!(text(&other.stderr).contains("differs"));
}

#[test]
fn what_is_no_recording_is_named_with_its_path() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("notes.txt");
    std::fs::write(&file, "buy milk\n").unwrap();
    let wrong = replay(&[], &file);
    assert_eq!(wrong.status.code(), Some(1));
    let said = text(&wrong.stderr);
    assert!(
        said.contains("notes.txt") && said.contains("not a recording"),
        "{said}"
    );
    let missing = replay(&[], &directory.path().join("none.jsonl"));
    assert_eq!(missing.status.code(), Some(1));
    assert!(
        text(&missing.stderr).contains("cannot be read"),
        "{}",
        text(&missing.stderr)
    );
}
